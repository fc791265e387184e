# SPDX-License-Identifier: Apache-2.0
"""Whether a plan gives the block's own output and gradients, on random data, and the memory that it saves.

Runs on copies that share the parameters' memory: flags, hooks, gradients and random states of the model are untouched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_ops.fuse.blocks import FeedForward, Plan, feed_forward, run

TOKENS = 8
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Mismatch(Exception):  # noqa: N818
    """Why a plan is not to be used."""


@dataclass(frozen=True)
class _Results:
    tensors: dict[str, Tensor | None]
    saved_bytes: int


def _detached(parameter: Tensor) -> Tensor:
    return parameter.detach().requires_grad_(parameter.is_floating_point())


def _copy(module: nn.Module, training: bool, parameters: dict[int, Tensor]) -> Any:
    """The module with detached parameters and without hooks, in training or evaluation."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__, training=training, **{name: type(vars(module)[name])() for name in _HOOKS})
    copy.__dict__["_parameters"] = {
        name: value if value is None else parameters.setdefault(id(value), _detached(value))
        for name, value in module._parameters.items()
    }
    copy.__dict__["_modules"] = {
        name: child if child is None else _copy(child, training, parameters) for name, child in module._modules.items()
    }
    return copy


@contextlib.contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Dropout draws the same numbers in every such context, and nobody else's."""
    index = device.index if device.index is not None else 0
    with torch.random.fork_rng([index] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(0)
        if device.type == "cuda":
            torch.cuda.default_generators[index].manual_seed(0)
        yield


def _results(function: Callable[[Tensor], Tensor], input: Tensor, parameters: list[Tensor]) -> _Results:
    known = {tensor.untyped_storage().data_ptr() for tensor in (input, *parameters)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with _own_randomness(input.device), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(input)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(output.shape, generator=generator, device="cpu", dtype=torch.float32).to(output)
    wanted = [input, *(parameter for parameter in parameters if parameter.requires_grad)]
    grads = torch.autograd.grad(output, wanted, grad, allow_unused=True)
    names = ("input", *(f"parameter {index}, {tuple(one.shape)}," for index, one in enumerate(wanted[1:])))
    gradients = {f"gradient of {name}": value for name, value in zip(names, grads, strict=True)}
    return _Results({"output": output.detach(), **gradients}, sum(saved.values()))


def tolerance(dtype: torch.dtype, terms: int) -> float:
    """The difference allowed between two correctly rounded ways, as a share of the largest value.

    A sum of n terms in another order differs by about sqrt(n) roundings of the accumulator; eight of them are allowed.
    What is stored in 16 bits between two operations is rounded there: sixteen such roundings. In float64 torch's and
    transformers' own formulas decide, some of which have constants in float32 or with ten digits. Another activation
    (GELU in its other form) differs by more than 1e-4, which float32 and float64 see.
    """
    accumulator = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        accumulator = 2.0**-10 if torch.get_float32_matmul_precision() == "high" else 2.0**-7
    rounding = torch.finfo(dtype).eps
    constants = 4 * torch.finfo(torch.float32).eps
    return max(16 * rounding + 8 * accumulator * terms**0.5, constants)


def _compare(expected: _Results, actual: _Results, allowed: float) -> None:
    for name, one in expected.tensors.items():
        other = actual.tensors[name]
        if one is None or other is None:
            if one is not other:
                raise Mismatch(f"{name} is there in one way and not in the other")
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            raise Mismatch(f"{name} has another shape or dtype")
        norm = functools.partial(torch.linalg.vector_norm, ord=float("inf"))
        if norm(one - other) <= allowed * norm(one) < float("inf"):
            continue
        one, other = one.double(), other.double()  # noqa: PLW2901
        scale = one[one.isfinite()].abs().max() if one.isfinite().any() else one.new_zeros(())
        same = ((one - other).abs() <= allowed * scale) | (one == other) | (one.isnan() & other.isnan())
        if not same.all():
            difference = (one - other).abs()[~same].max().item()
            raise Mismatch(f"{name} differs by {difference:.3g}, where {allowed * scale.item():.3g} is allowed")


def _modes(children: list[nn.Module]) -> list[bool]:
    """Values of `training` to run with; where it changes a module's state, only evaluation."""
    stateless = all(not list(child.buffers()) for child in children)
    return [False, True] if stateless and any(isinstance(child, nn.Dropout) for child in children) else [False]


def _both(
    block: nn.Module, plan: Plan, step: FeedForward, names: list[str], training: bool
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], list[Tensor]]:
    """The block's own way, the plan's way and the parameters of both; of a Sequential, only for the step."""
    parameters: dict[int, Tensor] = {}
    if plan.sequential:
        modules = {name: _copy(block.get_submodule(name), training, parameters) for name in names}
        stock, fused = nn.Sequential(*modules.values()), functools.partial(feed_forward, step, modules)
    else:
        copy = _copy(block, training, parameters)
        stock, fused = getattr(copy, plan.method), functools.partial(run, plan, copy._modules)
    return stock, fused, list(parameters.values())


def verify(block: nn.Module, plan: Plan, steps: tuple[FeedForward, ...]) -> float | None:
    """Compares the steps of the plan with the block, forward and backward.

    Args:
        block: the block, in its own class.
        plan: what to run in its place.
        steps: all of the plan's fused steps, or, where the block is a Sequential, the one to be compared.

    Returns:
        How many bytes fewer are saved for backward, a token. None: the block has no data, on the meta device.

    Raises:
        Mismatch: they differ, or one of them does not run.
    """
    first = steps[0]
    names = [*first.names] if plan.sequential else [name for name, child in block._modules.items() if child is not None]
    children = [block.get_submodule(name) for name in names]
    linear = block.get_submodule(first.linear)
    weight = linear._parameters["weight"]
    assert weight is not None
    if any(parameter.is_meta for child in children for parameter in child.parameters()):
        return None
    features = weight.shape[1] if type(linear) is nn.Linear else weight.shape[0]
    terms = max(TOKENS, *(size for child in children for p in child.parameters() for size in p.shape))
    generator = torch.Generator().manual_seed(0)
    data = torch.randn((TOKENS, features), generator=generator, device="cpu", dtype=torch.float32)
    saved = 0
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(weight.device.type, enabled=False):
        for training in _modes(children):
            stock, fused, parameters = _both(block, plan, first, names, training)
            input = data.to(weight).requires_grad_()
            try:
                expected = _results(stock, input, parameters)
            except Exception as error:
                raise Mismatch(f"its own forward does not run on random data: {error!r}") from None
            try:
                actual = _results(fused, input, parameters)
            except Exception as error:
                raise Mismatch(f"the fused forward raises {error!r}") from None
            _compare(expected, actual, tolerance(weight.dtype, terms))
            saved = expected.saved_bytes - actual.saved_bytes
    return saved / TOKENS
