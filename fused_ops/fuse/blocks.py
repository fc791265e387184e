# SPDX-License-Identifier: Apache-2.0
"""What a fused block is: its own class's subclass whose forward makes fused calls with the children's parameters.

The block stays the same object with the same children, parameters, hooks and state; only its class is swapped. What the
fused forward relies on is checked again at each call, so that a hook, an adapter or another activation that comes later
is honoured: the block then runs its own class's forward. What the block itself is given, or loses, makes it a block of
its own class again.
"""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fused_ops import functional
from fused_ops.fuse.own_state import own_values, same
from fused_ops.nn.activation import Activation


@dataclass(frozen=True)
class Call:
    """A child called as it is."""

    name: str


@dataclass(frozen=True)
class Method:
    """A method of the tensor, with constants."""

    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class FeedForward:
    """A linear layer and its activation in one call, with a gate and with the linear layer behind, where there are any.

    All fields but the activation are children's names.
    """

    linear: str
    activation: Activation
    act: str | None = None  # the activation, if it is a child
    up: str | None = None  # the linear layer whose output the activated one is multiplied with
    halves: tuple[int, int] | None = None  # or which halves of `linear`'s output are activated and multiplied with
    between: tuple[str, ...] = ()  # Dropout and Identity, in front of `down`
    down: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The children that take part."""
        return tuple(name for name in (self.linear, self.up, self.act, *self.between, self.down) if name is not None)

    @property
    def linears(self) -> tuple[str, ...]:
        """The linear layers among them."""
        return tuple(name for name in (self.linear, self.up, self.down) if name is not None)


Step = Call | Method | FeedForward


@dataclass(frozen=True)
class Plan:
    """What a method of a block does, and the facts that this was read from."""

    method: str
    steps: tuple[Step, ...]
    sequential: bool  # the method calls the children in their order, and looks at nothing else
    names: tuple[str, ...]  # of all children
    # name, class and whether it takes part in a fused call; those that do not may be of any class in a Sequential
    children: tuple[tuple[str, type, bool], ...]
    linears: tuple[str, ...]
    facts: tuple[tuple[str, str, Any], ...]  # child, attribute, fact_of() them
    one_dtype: bool  # the method looks at dtypes of linear layers; all have the same, whichever


def is_conv1d(kind: type) -> bool:
    """Whether this is transformers' linear layer with a transposed weight."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(kind: type) -> bool:
    return kind is nn.Linear or is_conv1d(kind)


def is_altered(module: nn.Module) -> bool:
    """Whether calling the module does more, or other, than its class's forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def is_plain(tensor: Any) -> TypeGuard[Tensor]:
    return type(tensor) is nn.Parameter or type(tensor) is Tensor


def stock_class(module: nn.Module | None) -> type:
    """The module's own class, fused or not."""
    return getattr(type(module), "fused_from", type(module))


def fact_of(module: nn.Module | None, attribute: str) -> Any:
    """An attribute's value; Tensor in place of any tensor, and AttributeError where there is none."""
    value = getattr(module, attribute, AttributeError)
    return Tensor if isinstance(value, Tensor) else value


def holds(plan: Plan, block: nn.Module) -> bool:
    """Whether what the plan was read from is still so."""
    modules = block._modules
    if getattr(block, "fused_plan", None) is not plan or tuple(modules) != plan.names:
        return False
    for name, kind, takes_part in plan.children:
        module = modules[name]
        is_other = type(module) is not kind and stock_class(module) is not kind
        if is_other or (takes_part and is_altered(module)):  # pyright: ignore[reportArgumentType]
            return False
    for name, attribute, value in plan.facts:
        if fact_of(modules[name], attribute) != value:
            return False
    dtype = None
    for name in plan.linears:
        parameters = modules[name]._parameters  # pyright: ignore[reportOptionalMemberAccess]
        weight = parameters.get("weight")
        if not is_plain(weight) or not (parameters.get("bias") is None or is_plain(parameters["bias"])):
            return False
        if plan.one_dtype and dtype not in (None, weight.dtype):
            return False
        dtype = weight.dtype
    return not _has_any_global_hook()


def _parameters_of(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = linear._parameters["weight"], linear._parameters.get("bias")
    assert weight is not None
    return (weight.t() if is_conv1d(type(linear)) else weight), bias


def _passes(module: nn.Module) -> bool:
    return not isinstance(module, nn.Dropout) or not module.training or module.p == 0


def feed_forward(step: FeedForward, modules: Mapping[str, Any], input: Tensor) -> Tensor:
    """Runs one step with the parameters of the children that it names."""
    weight, bias = _parameters_of(modules[step.linear])
    up_weight = up_bias = None
    if step.halves is not None:
        weight, up_weight = (weight.chunk(2)[half] for half in step.halves)
        bias, up_bias = (bias if bias is None else bias.chunk(2)[half] for half in step.halves)
    elif step.up is not None:
        up_weight, up_bias = _parameters_of(modules[step.up])
    hidden = (input, weight, bias, up_weight, up_bias)
    if step.down is not None and all(_passes(modules[name]) for name in step.between):
        return functional.feed_forward(*hidden, *_parameters_of(modules[step.down]), step.activation)
    output = functional.feed_forward(*hidden, None, None, step.activation)
    for name in step.between:
        output = modules[name](output)
    return output if step.down is None else modules[step.down](output)


def run(plan: Plan, modules: Mapping[str, Any], input: Any) -> Any:
    """Runs all steps."""
    for step in plan.steps:
        if isinstance(step, FeedForward):
            input = feed_forward(step, modules, input)
        elif isinstance(step, Call):
            input = modules[step.name](input)
        else:
            input = getattr(input, step.name)(*step.arguments)
    return input


def _fits(plan: Plan, block: nn.Module, input: Any) -> bool:
    """Whether the input is what the plan is for: a tensor, as wide as the linear layer that it starts with."""
    if not isinstance(input, Tensor) or input.is_nested:
        return False
    first = plan.steps[0]
    if not isinstance(first, FeedForward):
        return True
    linear: Any = block._modules[first.linear]
    weight = linear._parameters.get("weight")  # none once it is pruned or parametrized
    dimension = 1 if type(linear) is nn.Linear else 0
    return weight is not None and input.dim() > 0 and input.size(-1) == weight.size(dimension)


def _give_back(block: nn.Module) -> None:
    """Makes it a block of its own class for good."""
    kind: Any = type(block)
    if "fused_from" in vars(kind):
        object.__setattr__(block, "__class__", kind.fused_from)
    else:  # another tool has made a subclass since, as parametrizations do, which has to stay
        vars(block)["fused_plan"] = None


def _watched(name: str) -> Callable[..., None]:
    """nn.Module's method of that name. What it changes in the block, the plan was not read from."""

    @functools.wraps(getattr(nn.Module, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        before = own_values(self)
        try:
            getattr(super(FusedBlock, self), name)(*args, **kwargs)
        finally:
            plan: Plan | None = getattr(type(self), "fused_plan", None)
            if plan is not None and not plan.sequential and not same(before, own_values(self)):
                _give_back(self)

    return method


class FusedBlock:
    """Mixed into the class of every block that fuse() has swapped."""

    fused_plan: ClassVar[Plan]
    fused_from: ClassVar[type[nn.Module]]

    __setattr__ = _watched("__setattr__")
    __delattr__ = _watched("__delattr__")
    add_module = _watched("add_module")
    register_buffer = _watched("register_buffer")
    register_parameter = _watched("register_parameter")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # This class is made at run time: pickle and copy.deepcopy make it once more.
        _, _, *state = super().__reduce_ex__(max(protocol, 2))
        return _empty_block, (self.fused_from, type(self).fused_plan), *state


def _with_names_of(stock: Any, function: Any) -> Any:
    """The function, seeing the stock one's names: torch.jit.script takes them, and the source of what is wrapped."""
    names = stock.__globals__
    if stock.__closure__:
        values = (cell.cell_contents for cell in stock.__closure__)
        names = {**names, **dict(zip(stock.__code__.co_freevars, values, strict=True))}
    return types.FunctionType(function.__code__, names, closure=function.__closure__)


@functools.cache
def fused_class(base: type[nn.Module], plan: Plan) -> type[nn.Module]:
    """The subclass of `base` whose instances run the plan."""
    stock = getattr(base, plan.method)

    def fused_call(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs or not holds(plan, self) or not _fits(plan, self, args[0]):
            return stock(self, *args, **kwargs)
        return run(plan, self._modules, args[0])

    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return fused_call(self, args, kwargs)

    namespace = {
        plan.method: functools.wraps(stock)(_with_names_of(stock, fused)),
        "fused_plan": plan,
        "fused_from": base,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    return type(f"Fused{base.__name__}", (FusedBlock, base), namespace)


def _empty_block(base: type[nn.Module], plan: Plan) -> nn.Module:
    return object.__new__(fused_class(base, plan))


def pickles_by_default(kind: type) -> bool:
    """Whether FusedBlock can pickle what the class pickles."""
    return (
        kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and (kind not in copyreg.dispatch_table)
    )
