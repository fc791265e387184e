# SPDX-License-Identifier: Apache-2.0
"""What a method of a block does, read by running it on a symbol in place of a tensor, with stand-ins for its children.

Recorded are the calls to children, activations, products and halvings. Whatever else the method does with the symbol,
looking at its shape included, ends the run: nothing is concluded from what was not seen.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fused_ops.fuse.blocks import fact_of, is_linear
from fused_ops.fuse.own_state import OwnState
from fused_ops.fuse.randomness import RandomStates
from fused_ops.nn.activation import Activation

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Unproven(Exception):  # noqa: N818
    """The reason why a method is not what can be fused."""


@dataclass(frozen=True)
class Called:
    """A child, called with the value so far."""

    name: str


@dataclass(frozen=True)
class Activated:
    """The value so far, activated."""

    activation: Activation
    act: str | None  # the child that did it


@dataclass(frozen=True)
class Gated:
    """act(linear(x)) * up(x), or act(one half of linear(x)) * the other half."""

    linear: str
    activated: Activated
    up: str | None
    halves: tuple[int, int] | None


@dataclass(frozen=True)
class Shaped:
    """The value so far, through a method of the tensor with constants."""

    method: str
    arguments: tuple[Any, ...]


Item = Called | Activated | Gated | Shaped


@dataclass(frozen=True)
class Reading:
    """A method's items in the order of the data, and what they were read from."""

    items: tuple[Item, ...]
    attributes: frozenset[tuple[str, str]] = frozenset()  # of children, by name: looked at
    dtypes: frozenset[str] = frozenset()  # linear layers, of whose weight or output the dtype was looked at


@dataclass(frozen=True)
class _Node:
    kind: str  # input, call, act, product, half, cast, shape
    inputs: tuple[_Node, ...] = ()
    detail: Any = None

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _Symbol(Tensor):
    """Stands for a tensor of unknown shape and values."""

    recorder: _Recorder
    node: _Node

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        symbol = next(value for value in (*args, *(kwargs or {}).values()) if isinstance(value, _Symbol))
        with torch._C.DisableTorchFunctionSubclass():
            return symbol.recorder.function(func, args, kwargs or {})


_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_HALVINGS = (torch.chunk, Tensor.chunk)
_METHODS = {
    getattr(owner, name): name
    for name in ("flatten", "view", "reshape", "softmax", "log_softmax")
    for owner in (Tensor, torch, F)
    if hasattr(owner, name)
}
_GET_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]


_AUTOCAST_DEVICES = ("cpu", "cuda")


def _modes() -> tuple[Any, ...]:
    """What decides, besides its arguments, how an operation runs."""
    autocast = ((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES)
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast)


@contextlib.contextmanager
def _in_modes(gradients: bool, autocast: bool) -> Iterator[None]:
    """With and without gradients and autocast, on devices that need not be there, which torch.autocast would say."""
    before = [(device, torch.is_autocast_enabled(device)) for device in _AUTOCAST_DEVICES]
    try:
        with torch.set_grad_enabled(gradients):
            for device in _AUTOCAST_DEVICES:
                torch.set_autocast_enabled(device, autocast)
            yield
    finally:
        for device, enabled in before:
            torch.set_autocast_enabled(device, enabled)
        torch.clear_autocast_cache()


class _Recorder:
    def __init__(self, block: nn.Module, dtype: torch.dtype, linear_dtype: torch.dtype) -> None:
        self.block, self.dtype, self.linear_dtype, self.modes = block, dtype, linear_dtype, _modes()
        self.nodes: list[_Node] = []
        self.reason: str | None = None
        self.attributes, self.dtypes = set[tuple[str, str]](), set[str]()

    def stop(self, reason: str) -> NoReturn:
        self.reason = self.reason or reason  # also where the method catches the exception
        raise Unproven(self.reason)

    def symbol(self, node: _Node, dtype: torch.dtype) -> _Symbol:
        if _modes() != self.modes:
            self.stop("its forward changes autocast, gradients or inference mode")
        if node.kind != "input":
            self.nodes.append(node)
        symbol = torch.empty((1, 1), dtype=dtype, device="meta").as_subclass(_Symbol)
        symbol.recorder, symbol.node = self, node
        return symbol

    def call(self, name: str, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Symbol:
        if len(args) != 1 or kwargs or not isinstance(args[0], _Symbol):
            self.stop(f"its forward calls {name} with more than one tensor")
        (symbol,) = args
        activation = None if isinstance(child, nn.Identity) else Activation.of(child)
        dtype = self.linear_dtype if is_linear(type(child)) else symbol_dtype(symbol)
        if activation is not None:
            return self.symbol(_Node("act", (symbol.node,), Activated(activation, name)), dtype)
        return self.symbol(_Node("call", (symbol.node,), name), dtype)

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        symbols = [value for value in args if isinstance(value, _Symbol)]
        if function == _GET_DTYPE:
            self.dtypes.add(self.source(symbols[0].node))
            return symbol_dtype(symbols[0])
        dtype = symbol_dtype(symbols[0]) if symbols else self.dtype
        nodes = tuple(symbol.node for symbol in symbols)
        if len(symbols) == len(args) == 1 and (activation := Activation.of(functools.partial(function, **kwargs))):
            return self.symbol(_Node("act", nodes, Activated(activation, None)), dtype)
        if function in _PRODUCTS and len(symbols) == len(args) == 2 and not kwargs:
            return self.symbol(_Node("product", nodes), dtype)
        if function in _HALVINGS and len(symbols) == 1 and _arguments(args, kwargs) in ((2, -1), (2, {"dim": -1})):
            return tuple(self.symbol(_Node("half", nodes, half), dtype) for half in range(2))
        if function is Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
            return self.symbol(_Node("cast", nodes, args[1]), args[1])
        if function in _METHODS and len(symbols) == 1 and args[0] is symbols[0]:
            arguments = (*args[1:], *(kwargs[name] for name in kwargs if name in ("dim", "start_dim")))
            if all(isinstance(value, int) for value in arguments) and kwargs.get("dtype") is None:
                return self.symbol(_Node("shape", nodes, Shaped(_METHODS[function], arguments)), dtype)
        self.stop(f"its forward uses {_name_of(function)}")

    def source(self, node: _Node) -> str:
        """The linear layer that decides of which dtype a value is."""
        while node.kind != "input":
            child = self.block._modules[node.detail] if node.kind == "call" else None
            if is_linear(type(child)):
                return node.detail
            if node.kind == "call" and type(child) not in (nn.Dropout, nn.Identity):
                self.stop(f"its forward looks at the dtype of what {node.detail} returns")
            node = node.inputs[0]
        self.stop("its forward looks at the dtype of its input")

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """The dtype that the block is read with, of a linear layer's weight."""
        for name, child in self.block._modules.items():
            if child is not None and is_linear(type(child)) and child._parameters.get("weight") is tensor:
                self.dtypes.add(name)
                return self.dtype
        self.stop("its forward looks at the dtype of a tensor that is no weight")

    def look(self, name: str, child: nn.Module, attribute: str) -> None:
        if not isinstance(fact_of(child, attribute), _FACTS):
            self.stop(f"its forward looks at {name}.{attribute}")
        self.attributes.add((name, attribute))


class _OnlySymbols(TorchFunctionMode):
    """Ends the run before an operation changes a tensor, such as a buffer of the block, or looks at one."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if in_place or (kwargs or {}).get("out") is not None:
            self.recorder.stop(f"its forward uses {_name_of(func)}")
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if tensors and not any(isinstance(tensor, _Symbol) for tensor in tensors):
            if func == _GET_DTYPE:
                return self.recorder.dtype_of(tensors[0])
            self.recorder.stop(f"its forward uses {_name_of(func)} of a tensor that is not its input")
        return func(*args, **(kwargs or {}))


_IN_PLACE = {"__set__", "__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "pow"))}


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (*args[1:], kwargs) if kwargs else args[1:]


def symbol_dtype(symbol: Tensor) -> torch.dtype:
    with torch._C.DisableTorchFunctionSubclass():
        return symbol.dtype


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", repr(function))
    # A getter's attribute is known only to what it is bound to.
    return getattr(getattr(function, "__self__", None), "__name__", name) if name == "__get__" else name


# A child's attributes that are compared at each call; the types are fact_of()'s.
_FACTS = (bool, int, float, str, tuple, torch.dtype, type(None), type)


class _StandIn:
    def __getattribute__(self, name: str) -> Any:
        # Read for both values of `training`; a call of `forward` has a reason of its own.
        if not name.startswith("__") and name not in ("training", "forward"):
            recorder, child_name, child = self.__dict__["_stands_for"]
            recorder.look(child_name, child, name)
        return super().__getattribute__(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder, name, child = self.__dict__["_stands_for"]
        return recorder.call(name, child, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recorder, name, _ = self.__dict__["_stands_for"]
        recorder.stop(f"its forward calls {name}.forward")


@functools.cache
def _stand_in(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_StandIn, kind), {})


def _copy(module: nn.Module, kind: type[nn.Module], **differs: Any) -> nn.Module:
    copy = object.__new__(kind)
    copy.__dict__.update(module.__dict__, **differs)
    return copy


def _run(block: nn.Module, method: str, training: bool, recorder: _Recorder) -> Any:
    """The method's result on a symbol. Runs on a copy, so that the block and its children are not touched."""
    children = {}
    for name, child in block._modules.items():
        if child is not None:
            stands_for = (recorder, name, child)
            child = _copy(child, _stand_in(type(child)), _stands_for=stands_for, training=training)  # noqa: PLW2901
        children[name] = child
    copy = _copy(block, type(block), _modules=children, training=training)
    before = dict(copy.__dict__)
    with _OnlySymbols(recorder):
        result = getattr(copy, method)(recorder.symbol(_Node("input"), recorder.dtype))
    if before.keys() != copy.__dict__.keys() or any(copy.__dict__[name] is not before[name] for name in before):
        recorder.stop("its forward stores values")
    return result


def _items(block: nn.Module, recorder: _Recorder, result: Any) -> tuple[Item, ...]:
    """The recorded calls as a chain from the input to the result."""
    if not isinstance(result, _Symbol):
        raise Unproven("its forward returns something else than one tensor")
    node, items, seen = result.node, [], set[_Node]()

    def see(node: _Node, kind: str) -> _Node:
        if node.kind != kind or node in seen:
            raise Unproven("its forward is not a chain of layers")
        seen.add(node)
        return node

    while node.kind != "input":
        see(node, node.kind)
        if node.kind == "cast":
            # To the weights' dtype, in front of a linear layer that autocast would cast for anyway.
            behind = block._modules[items[-1].name] if items and isinstance(items[-1], Called) else None
            if recorder.linear_dtype == recorder.dtype or node.detail != recorder.dtype or not is_linear(type(behind)):
                raise Unproven("its forward casts to another dtype")
            node = node.inputs[0]
        elif node.kind == "product":
            activated, other = sorted(node.inputs, key=lambda factor: factor.kind != "act")
            see(activated, "act")
            if other.kind == "half":
                mine, other = see(activated.inputs[0], "half"), see(other, "half")
                if mine.inputs[0] is not other.inputs[0]:
                    raise Unproven("its forward multiplies what is no gate")
                linear = see(mine.inputs[0], "call")
                items.append(Gated(linear.detail, activated.detail, None, (mine.detail, other.detail)))
            else:
                linear, up = see(activated.inputs[0], "call"), see(other, "call")
                if linear.inputs[0] is not up.inputs[0]:
                    raise Unproven("its forward multiplies what is no gate")
                items.append(Gated(linear.detail, activated.detail, up.detail, None))
            node = linear.inputs[0]
        elif node.kind in ("call", "act", "shape"):
            items.append(Called(node.detail) if node.kind == "call" else node.detail)
            node = node.inputs[0]
        else:
            raise Unproven("its forward is not a chain of layers")
    if len(seen) != len(recorder.nodes):
        raise Unproven("its forward computes what it does not return")
    return tuple(reversed(items))


def _may_activate(block: nn.Module, method: Any) -> bool:
    """Whether it is worth a run: an activation is at hand, as a child, an attribute or a function."""
    children = (child for child in block.children() if not isinstance(child, nn.Identity))
    attributes = (value for value in vars(block).values() if callable(value))
    names = (name for name in method.__code__.co_names if name != "linear")
    return any(map(Activation.of, itertools.chain(children, attributes, names)))


def is_sequential(kind: type[nn.Module]) -> bool:
    """Whether the class runs its children one after the other, as Sequential does."""
    return kind.forward is nn.Sequential.forward and getattr(kind, "__iter__", None) is nn.Sequential.__iter__


def method_of(block: nn.Module) -> str:
    """The method that holds the linear layers and their activation."""
    return "_ff_block" if isinstance(block, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)) else "forward"


def read(block: nn.Module, dtype: torch.dtype) -> Reading | None:
    """What the block's method does, with and without training, gradients and autocast; None if it activates nothing.

    Raises:
        Unproven: it does something else than what can be fused.
    """
    kind = type(block)
    if is_sequential(kind):
        return Reading(tuple(_child_items(block)))
    method = method_of(block)
    function = getattr(kind, method)
    if not inspect.isfunction(inspect.unwrap(function)) or not _may_activate(block, inspect.unwrap(function)):
        return None
    parameters = list(inspect.signature(function).parameters.values())[1:]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not parameters or parameters[0].kind not in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
        raise Unproven("its forward takes no tensor")
    if required[1:]:
        raise Unproven("its forward takes more than one argument")

    state = OwnState(block)
    reading, reason = None, ""
    try:
        reading = _read(block, method, dtype)
        if reading.dtypes and any(_read(block, method, other) != reading for other in DTYPES):
            raise Unproven("its forward differs between dtypes")
    except Unproven as unproven:
        reason = str(unproven)
    finally:
        changed = state.put_back()
    if changed or reason:
        raise Unproven("its forward changes its own state" if changed else reason)
    return reading


def _read(block: nn.Module, method: str, dtype: torch.dtype) -> Reading:
    readings, attributes, dtypes, states = set(), set(), set(), RandomStates()
    for training, gradients, autocast in itertools.product((True, False), repeat=3):
        with _in_modes(gradients, autocast):
            recorder = _Recorder(block, dtype, torch.bfloat16 if autocast else dtype)
            result, reason = None, None
            try:
                result = _run(block, method, training, recorder)
            except Exception as error:
                reason = str(error) if isinstance(error, Unproven) else f"it cannot be traced: {error!r}"
        if states.changed():
            raise Unproven("its forward draws random numbers")
        if reason := recorder.reason or reason:
            raise Unproven(reason)
        readings.add(_items(block, recorder, result))
        attributes |= recorder.attributes
        dtypes |= recorder.dtypes
    if len(readings) != 1:
        raise Unproven("its forward differs between training and evaluation, or with autocast")
    return Reading(readings.pop(), frozenset(attributes), frozenset(dtypes))


def _child_items(block: nn.Module) -> list[Item]:
    items: list[Item] = []
    for name, child in block._modules.items():
        activation = None if child is None or isinstance(child, nn.Identity) else Activation.of(child)
        items.append(Called(name) if activation is None else Activated(activation, name))
    return items
