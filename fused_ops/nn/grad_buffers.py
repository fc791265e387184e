# SPDX-License-Identifier: Apache-2.0
"""Gradients of weights added straight to where they accumulate, by the matrix product that computes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class Marks:
    any = False  # whether any weight was ever marked: until then no call looks for marks


_MARK = "fused_ops_accumulate_grad"


def of(weights: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
    """The main_grad of each of these weights, or None if their gradients are not to be added in place."""
    if not any(weight is not None and getattr(weight, _MARK, False) for weight in weights):
        return None
    return tuple(getattr(weight, "main_grad", None) for weight in weights)


def _wrapper(module: nn.Module) -> str | None:
    """The class of a wrapper within the module that has to see every gradient, or None."""
    for child in module.modules():
        name = type(child).__name__
        if name in ("DistributedDataParallel", "FullyShardedDataParallel") or hasattr(child, "_get_fsdp_state"):
            return name
    return None


def _hooked(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    for name, weight in weights:
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            return name
    return None


def _unusable(weight: Tensor) -> str | None:
    """Why the gradient of a weight cannot be added to its main_grad, or None."""
    grad = getattr(weight, "main_grad", None)
    if grad is None:
        return None
    if not isinstance(grad, Tensor) or grad.layout != torch.strided:
        return "to be a strided Tensor"
    if not grad.is_floating_point() or grad.requires_grad:
        return "to be of a floating-point dtype and not to require grad"
    if grad.shape != weight.shape or grad.device != weight.device:
        return f"to have shape {tuple(weight.shape)} and to be on {weight.device}"
    if any(stride == 0 and size > 1 for stride, size in zip(grad.stride(), grad.shape, strict=True)):
        return f"to have memory for each element, got an expanded one of strides {grad.stride()}"
    return None


def accumulate_grad(module: nn.Module, enabled: bool = True) -> int:
    """Lets backward add the gradients of weights of fused layers to their existing .grad, within the matrix product.

    Stock PyTorch computes the gradient of each micro-batch into fresh memory and then adds that to .grad: for a weight
    of n bytes, 4 n bytes are moved besides the product (the new gradient written and read, .grad read and written).
    Here the product reads and writes .grad itself, 2 n bytes. Keep gradients between steps for it to help from the
    first micro-batch on: optimizer.zero_grad(set_to_none=False).

    A weight with an attribute `main_grad`, a tensor of its shape and of any floating-point dtype, has its gradient
    added to that one and .grad left alone.

    Where somebody would miss the gradient, or another operation computes it, it is returned to autograd as ever, which
    adds it to .grad, also where there is a main_grad: torch.autograd.grad, backward(inputs=...), create_graph=True,
    hooks on the weight, torch.compile, torch.autocast that converts the weight, dispatch modes such as
    FlopCounterMode, function transforms, a gate without activation, and operations other than fused_ops'.

    Args:
        module: whose 2-dimensional parameters are marked; a deep copy of the module is not.
        enabled: False unmarks them.

    Returns:
        The number of weights marked or unmarked.

    Raises:
        TypeError: module is no module.
        ValueError: the module holds DistributedDataParallel or a fully sharded module, or a weight has hooks; these
            have to see each gradient; or a main_grad cannot take its weight's gradient.

    Example:
        >>> layer = LinearAct(4, 2)
        >>> accumulate_grad(layer)
        1
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"accumulate_grad: expected module to be a torch.nn.Module, got {type(module).__name__}. Pass the module."
        )
    weights = [(name, parameter) for name, parameter in module.named_parameters() if parameter.dim() == 2]
    if enabled:
        if (wrapper := _wrapper(module)) is not None:
            raise ValueError(
                f"accumulate_grad: expected a module without wrappers that reduce gradients, got a {wrapper}. "
                "Leave accumulation to it, e.g. within its no_sync()."
            )
        if (name := _hooked(weights)) is not None:
            raise ValueError(
                f"accumulate_grad: expected weights without hooks, got one on {name}. Remove it: it would not run."
            )
        for name, weight in weights:
            if (fault := _unusable(weight)) is not None:
                raise ValueError(f"accumulate_grad: expected main_grad of {name} {fault}. Make another one.")
        Marks.any = True
    for _, weight in weights:
        setattr(weight, _MARK, enabled)
    return len(weights)
