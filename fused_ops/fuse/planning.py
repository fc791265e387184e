# SPDX-License-Identifier: Apache-2.0
"""From what a block does to what can be fused in it, and the reasons for the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize, prune

from fused_ops.fuse.blocks import (
    Call,
    FeedForward,
    FusedBlock,
    Method,
    Plan,
    Step,
    fact_of,
    is_altered,
    is_conv1d,
    is_linear,
    is_plain,
    pickles_by_default,
    stock_class,
)
from fused_ops.fuse.record import (
    DTYPES,
    Activated,
    Called,
    Gated,
    Item,
    Reading,
    Shaped,
    Unproven,
    is_sequential,
    method_of,
    read,
)
from fused_ops.nn.activation import ACTIVATIONS

Refuse = Callable[[str], "str | None"]  # why a child is not to be fused, by its name


def looks_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(type(module))


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith("fused_ops.")


def _name_of_hook(hook: Any) -> str:
    names = {"WeightNorm": "weight_norm", "SpectralNorm": "spectral_norm"}
    name = getattr(hook, "__name__", type(hook).__name__)
    return names.get(name, name)


def altered(module: nn.Module) -> str | None:
    """Why the module is more than its class's forward."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is a ScriptModule"
    if parametrize.is_parametrized(module):
        return "is parametrized"
    if any(isinstance(hook, prune.BasePruningMethod) for hook in module._forward_pre_hooks.values()):
        return "is pruned"
    kinds = {
        "forward pre-hook": module._forward_pre_hooks,
        "forward hook": module._forward_hooks,
        "backward hook": module._backward_hooks,
        "backward pre-hook": module._backward_pre_hooks,
    }
    for kind, hooks in kinds.items():
        for hook in hooks.values():
            return f"has a {kind} ({_name_of_hook(hook)})"
    return "has a forward of its own, set on the instance" if "forward" in vars(module) else None


def obstacle(linear: nn.Module) -> str | None:
    """Why a linear layer cannot be part of a fused call."""
    kind = type(linear)
    reason = altered(linear)
    if _is_ours(linear):
        reason = "is fused already"
    elif isinstance(linear, LazyModuleMixin):
        reason = "is not initialized yet: run the model once, then fuse it"
    elif reason is None and not is_linear(kind):
        reason = f"is a {kind.__name__}, {'a subclass of Linear' if looks_linear(linear) else 'not a Linear'}"
    return reason or _odd_parameter(linear)


def _odd_parameter(linear: nn.Module) -> str | None:
    for name, parameter in linear._parameters.items():
        if parameter is not None and not is_plain(parameter):
            return f"has a {name} that is a {type(parameter).__name__}, not a plain Parameter"
        if parameter is not None and parameter.dtype not in DTYPES:
            return f"has a {name} in {parameter.dtype}"
    return None if linear._parameters.get("weight") is not None else "has no weight of its own"


def _unlike(block: nn.Module, step: FeedForward) -> str | None:
    """Why a step's linear layers do not go together."""
    linears = [block.get_submodule(name) for name in step.linears]
    parameters = [parameter for linear in linears for parameter in linear._parameters.values() if parameter is not None]
    for fact in ("dtype", "device"):
        values = sorted({str(getattr(parameter, fact)) for parameter in parameters})
        if len(values) > 1:
            return f"has parameters of more than one {fact} in its block ({', '.join(values)})"
    if (
        step.up is not None
        and block.get_submodule(step.linear).weight.shape != block.get_submodule(step.up).weight.shape
    ):
        return f"has another shape than {step.up}, which it gates"
    return None


class _Planner:
    def __init__(self, block: nn.Module, items: tuple[Item, ...], refuse: Refuse) -> None:
        self.block, self.items, self.refuse = block, items, refuse
        self.refused: dict[str, str] = {}

    def child(self, name: str) -> nn.Module:
        child = self.block._modules[name]
        assert child is not None
        return child

    def reason(self, step: FeedForward) -> str | None:
        """Why the step cannot be fused."""
        for name in step.linears:
            reason = self.refuse(name) or obstacle(self.child(name))
            if reason:
                return reason if name == step.linear else f"its block's {name} {reason}"
        if step.act is not None and (reason := altered(self.child(step.act))):
            return f"its activation {step.act} {reason}"
        return _unlike(self.block, step)

    def steps(self) -> tuple[Step, ...]:
        """The items with all that can be fused taken together."""
        steps: list[Step] = []
        position = 0
        while position < len(self.items):
            candidate, width = self.candidate(position)
            if candidate is None:
                steps.append(self.stock(self.items[position]))
                position += 1
                continue
            reason = self.reason(candidate)
            if reason is None:
                candidate, position = self.with_down(candidate, position + width)
                steps.append(candidate)
                continue
            if looks_linear(self.child(candidate.linear)):
                self.refused[candidate.linear] = reason
            if isinstance(self.items[position], Gated) or candidate.act is None:
                raise Unproven(f"its {candidate.linear} {reason}")
            steps.extend(map(self.stock, self.items[position : position + width]))
            position += width
        return tuple(steps)

    def candidate(self, position: int) -> tuple[FeedForward | None, int]:
        """What a fused step would begin with at this item, and how many items it takes."""
        item, following = (*self.items[position : position + 2], None)[:2]
        if isinstance(item, Gated):
            act = item.activated
            return FeedForward(item.linear, act.activation, act.act, item.up, item.halves), 1
        if isinstance(item, Called) and isinstance(following, Activated):
            return FeedForward(item.name, following.activation, following.act), 2
        return None, 1

    @staticmethod
    def stock(item: Item) -> Step:
        """The item by itself."""
        if isinstance(item, Shaped):
            return Method(item.method, item.arguments)
        name = item.name if isinstance(item, Called) else item.act if isinstance(item, Activated) else None
        if name is None:
            raise Unproven("its forward activates what is no linear layer's output")
        return Call(name)

    def with_down(self, step: FeedForward, position: int) -> tuple[FeedForward, int]:
        """The step with the linear layer behind it, if that has no activation of its own, and where it ends."""
        between = []
        for after, item in enumerate(self.items[position:], start=position + 1):
            if not isinstance(item, Called):
                break
            child = self.child(item.name)
            if type(child) in (nn.Dropout, nn.Identity) and not is_altered(child):
                between.append(item.name)
                continue
            longer = dataclasses.replace(step, between=tuple(between), down=item.name)
            activated = after < len(self.items) and isinstance(self.items[after], Activated)
            return (step, position) if activated or self.reason(longer) else (longer, after)
        return step, position


def _attributes(block: nn.Module, step: FeedForward) -> list[tuple[str, str]]:
    """Those of the activation that its value depends on."""
    if step.act is None:
        return []
    form = ["approximate"] if type(block._modules[step.act]) is nn.GELU else []
    return [(step.act, attribute) for attribute in (*ACTIVATIONS[step.activation.name], *form)]


def make_plan(block: nn.Module, reading: Reading, steps: tuple[Step, ...]) -> Plan:
    """The plan that makes these steps out of what was read."""
    fused = [step for step in steps if isinstance(step, FeedForward)]
    taking_part = {name for step in fused for name in step.names}
    linears = tuple(name for step in fused for name in step.linears)
    sequential = is_sequential(type(block))
    if others := reading.dtypes - set(linears):
        raise Unproven(f"its forward looks at the dtype of {min(others)}, which is not fused")
    attributes = {*reading.attributes, *(attribute for step in fused for attribute in _attributes(block, step))}
    attributes -= {(name, "weight") for name in linears}  # which each call looks at anyway
    return Plan(
        method=method_of(block),
        steps=steps,
        sequential=sequential,
        names=tuple(block._modules),
        children=tuple(
            (name, stock_class(child), name in taking_part)
            for name, child in block._modules.items()
            if name in taking_part or not sequential
        ),
        linears=linears,
        facts=tuple(
            (name, attribute, fact_of(block._modules[name], attribute)) for name, attribute in sorted(attributes)
        ),
        one_dtype=bool(reading.dtypes),
    )


def plan_block(block: nn.Module, refuse: Refuse) -> tuple[Plan | None, dict[str, str]]:
    """What can be fused in a block, and why others of its linear layers cannot.

    Args:
        block: a module with linear layers among its children.
        refuse: says, by a child's name, why it is not to be fused, or None.

    Raises:
        Unproven: the block has to be left alone as a whole.
    """
    if isinstance(block, FusedBlock) or _is_ours(block):
        raise Unproven("is fused already")
    if isinstance(block, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        raise Unproven(f"is in a {type(block).__name__}")
    if "forward" in vars(block):
        raise Unproven("is in a block whose forward is set on the instance")
    linears = [child for child in block._modules.values() if child is not None and looks_linear(child)]
    weights = (parameter for linear in linears for parameter in linear._parameters.values() if parameter is not None)
    dtype = next((weight.dtype for weight in weights), torch.float32)
    reading = read(block, dtype)
    if reading is None:
        return None, {}
    planner = _Planner(block, reading.items, refuse)
    steps = planner.steps()
    if not any(isinstance(step, FeedForward) for step in steps):
        return None, planner.refused
    if block._backward_hooks and not block._is_full_backward_hook:
        raise Unproven("is in a block with a backward hook that sees its last operation")
    if not pickles_by_default(type(block)):
        raise Unproven(f"is in a {type(block).__name__}, which is pickled in its own way")
    return make_plan(block, reading, steps), planner.refused
