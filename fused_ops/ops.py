# SPDX-License-Identifier: Apache-2.0
"""The native operators, for those who call them without a class. Importing this module loads the native library.

`torch.ops.fused_ops.adam_`, `rmsprop_`, `sgd_` and `adagrad_` make one optimizer step in place over lists of tensors::

    adam_(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, *, lr, beta1, beta2, eps, weight_decay,
          decoupled_weight_decay, amsgrad, maximize)
    rmsprop_(params, grads, square_avgs, grad_avgs, momentum_buffers, steps, *, lr, alpha, eps, weight_decay, momentum,
             centered, maximize)
    sgd_(params, grads, momentum_buffers, *, lr, momentum, dampening, weight_decay, nesterov, maximize)
    adagrad_(params, grads, sums, steps, *, lr, lr_decay, eps, weight_decay, maximize)

A list of states is as long as params, or empty where the hyperparameters use no such state. `steps` holds one-element
tensors that count the steps done; the operator increments them. Flags are floats: 0.0 or 1.0. sgd_ treats every step
as one after the first, so give it zeros and dampening=0.0, or the buffers that it left. Shapes, dtypes and formulas
are those of the classes in fused_ops.optim; what those would leave to torch.optim raises RuntimeError here.

`torch.ops.fused_ops.feed_forward` is the operator behind fused_ops.functional, which says what it computes::

    feed_forward(input, weight, bias, up_weight, up_bias, down_weight, down_bias, activation, parameters) -> Tensor

It has kernels for autograd, autocast and function transforms, and can be compiled and exported.

Example:
    >>> import torch
    >>> from fused_ops.ops import OPTIMIZER_OPS
    >>> weight, grad = torch.ones(3), torch.ones(3)
    >>> options = dict(momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=0.0, maximize=0.0)
    >>> OPTIMIZER_OPS["sgd_"]([weight], [grad], [], lr=0.1, **options)
    >>> weight
    tensor([0.9000, 0.9000, 0.9000])
"""

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from fused_ops._build import load_native


def _no_output(*args: Any, **kwargs: Any) -> None:
    """What tracing needs to know: the operators return nothing."""


def _register() -> dict[str, torch._ops.OpOverload]:
    operators = {}
    for rule in load_native().optimizer_schemas():
        torch.library.register_fake(f"fused_ops::{rule}_", _no_output)
        operators[f"{rule}_"] = getattr(torch.ops.fused_ops, f"{rule}_").default
    return operators


OPTIMIZER_OPS: dict[str, torch._ops.OpOverload] = _register()

# Activations that a linear layer alone saves nothing but its output for.
_SAVES_NO_HIDDEN = {name for name, _, saves_output in load_native().activation_schemas() if saves_output}


def _hidden(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return input.new_empty((math.prod(input.shape[:-1]), weight.shape[0]))


@torch.library.register_fake("fused_ops::feed_forward")
def _(input, weight, bias, up_weight, up_bias, down_weight, down_bias, activation, parameters):
    last = weight if down_weight is None else down_weight
    return input.new_empty([*input.shape[:-1], last.shape[0]])


@torch.library.register_fake("fused_ops::feed_forward_training")
def _(input, weight, bias, up_weight, up_bias, down_weight, down_bias, activation, parameters):
    last = weight if down_weight is None else down_weight
    output = input.new_empty([*input.shape[:-1], last.shape[0]])
    block = up_weight is not None or down_weight is not None
    saved = _hidden(input, weight) if block or activation not in _SAVES_NO_HIDDEN else input.new_empty((0,))
    return output, saved, _hidden(input, weight) if up_weight is not None else input.new_empty((0,))


@torch.library.register_fake("fused_ops::feed_forward_backward")
def _(grad_out, input, weight, up_weight, down_weight, saved, up, activation, parameters, wanted):
    def like(rows: Any, columns: Any, weight: torch.Tensor | None = None) -> torch.Tensor:
        """In the memory order of the weight that it is the gradient of."""
        if weight is not None and weight.stride(0) == 1 and weight.stride(1) > 1:
            return grad_out.new_empty((columns, rows)).t()
        return grad_out.new_empty((rows, columns))

    out = grad_out.shape[-1]
    hidden = saved.shape[-1] if saved is not None else down_weight.shape[1] if down_weight is not None else out
    features = input.shape[-1] if input is not None else weight.shape[1] if weight is not None else None
    grads = (
        lambda: grad_out.new_empty((*grad_out.shape[:-1], features)),
        lambda: like(hidden, features, weight),
        lambda: grad_out.new_empty((hidden,)),
        lambda: like(hidden, features, up_weight),
        lambda: grad_out.new_empty((hidden,)),
        lambda: like(out, hidden, down_weight),
        lambda: grad_out.new_empty((out,)),
    )
    return [grad() for grad, is_wanted in zip(grads, wanted, strict=True) if is_wanted]


@register_flop_formula([torch.ops.fused_ops.feed_forward, torch.ops.fused_ops.feed_forward_training])
def _(input, weight, bias, up_weight, up_bias, down_weight, *_, **__) -> int:
    """Of the matrix products, as torch.utils.flop_counter counts."""
    hidden, features = weight
    per_row = hidden * features * (1 if up_weight is None else 2)
    return 2 * math.prod(input[:-1]) * (per_row if down_weight is None else per_row + hidden * down_weight[0])


@register_flop_formula(torch.ops.fused_ops.feed_forward_backward)
def _(grad_out, input, weight, up_weight, down_weight, saved, up, _, __, wanted, **___) -> int:
    out = grad_out[-1]
    hidden = saved[-1] if saved is not None else down_weight[1] if down_weight is not None else out
    features = input[-1] if input is not None else weight[1] if weight is not None else 0
    products = wanted[1] + wanted[3] + wanted[0] * (1 if up is None else 2)
    down_products = wanted[5] + (down_weight is not None and any(wanted[:5]))
    return 2 * math.prod(grad_out[:-1]) * hidden * (features * products + out * down_products)
