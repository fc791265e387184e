# SPDX-License-Identifier: Apache-2.0
"""Linear layers with what follows them, in one differentiable operation: the functional forms of fused_ops.nn.

All compute, with weights [out_features, in_features] as in torch.nn.functional.linear::

    hidden = act(input @ weight.T + bias) [* (input @ up_weight.T + up_bias)]
    output = hidden [@ down_weight.T + down_bias]

Backward keeps the pre-activations (of relu, sigmoid and tanh the output instead) and re-derives `hidden` where the down
projection's gradient wants it. Matrix products run in torch's own libraries; the activation, the gate and the bias are
one pass over the result, their derivative and the bias gradients another.

Dtypes: float32, float64, bfloat16 and float16, the same for all tensors; under torch.autocast they are converted.
16-bit values are computed in float32. Devices: CPU and CUDA; anything else, function transforms (vmap, jvp, grad) and
forward-mode derivatives run the same formula in torch's own operators. Second derivatives are supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fused_ops._build import load_native
from fused_ops.nn import grad_buffers
from fused_ops.nn.activation import ACTIVATIONS, Activation

try:  # torch.compile has to find the operators, and their fake kernels, without running what loads them
    from fused_ops import ops

    _native: Any = ops.load_native()
except RuntimeError:  # said by load_native() at the first call
    _native = None

__all__ = ["gated_linear", "gated_mlp", "linear_act", "mlp"]


_DEFAULTS = {name: Activation(name) for name in ACTIVATIONS}


def find_activation(activation: Any, parameters: dict[str, float]) -> Activation:
    """What Activation.of finds.

    Raises:
        ValueError: it finds none.
    """
    found = _DEFAULTS.get(activation) if isinstance(activation, str) and not parameters else None
    found = found or Activation.of(activation, **parameters)
    if found is None:
        raise ValueError(
            f"fused_ops: expected activation in ({', '.join(ACTIVATIONS)}), got {activation!r}. "
            "Use one of these names, or a module of torch.nn or a function of torch.nn.functional that computes one."
        )
    return found


def _expect_tensors(function: str, **weights: Any) -> None:
    """Without this check a None would leave the gate or the down projection out."""
    for name, weight in weights.items():
        if not isinstance(weight, Tensor):
            raise TypeError(
                f"{function}: expected {name} to be a Tensor, got {type(weight).__name__}. Pass its weight."
            )


def _composed(tensors: Sequence[Tensor | None], activation: Activation) -> Tensor:
    """The block in torch's own functions, which tensor subclasses override."""
    input, weight, bias, up_weight, up_bias, down_weight, down_bias = tensors
    linear: Any = torch.nn.functional.linear
    hidden = activation.reference(linear(input, weight, bias))
    if up_weight is not None:
        hidden = hidden * linear(input, up_weight, up_bias)
    return hidden if down_weight is None else linear(hidden, down_weight, down_bias)


def feed_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    up_weight: Tensor | None,
    up_bias: Tensor | None,
    down_weight: Tensor | None,
    down_bias: Tensor | None,
    activation: Activation,
) -> Tensor:
    """The block of this module's description, which all its functions are cases of."""
    name, parameters = activation.name, activation.parameters
    if is_compiling():
        return torch.ops.fused_ops.feed_forward(
            input, weight, bias, up_weight, up_bias, down_weight, down_bias, name, parameters
        )
    native = _native or load_native()
    main_grads = grad_buffers.of((weight, up_weight, down_weight)) if grad_buffers.Marks.any else None
    if main_grads is None:
        output = native.feed_forward(input, weight, bias, up_weight, up_bias, down_weight, down_bias, name, parameters)
    else:
        output = native.feed_forward(
            input, weight, bias, up_weight, up_bias, down_weight, down_bias, name, parameters, main_grads
        )
    if output is NotImplemented:
        return _composed((input, weight, bias, up_weight, up_bias, down_weight, down_bias), activation)
    return output


def linear_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | Activation = "gelu",
    **parameters: float,
) -> Tensor:
    """act(input @ weight.T + bias).

    Args:
        input: the features in its last dimension.
        weight: of the linear layer; a transposed view is as fast, and its gradient has the same layout where the
            input has a gradient too.
        bias: of the linear layer. Default: none.
        activation: a name in fused_ops.nn.ACTIVATIONS, an Activation, or a module or function that computes one.
        **parameters: of the activation, by name, e.g. negative_slope=0.1.

    Shape:
        input [*, in_features], weight [out_features, in_features], bias [out_features]; output [*, out_features].

    Raises:
        ValueError: the activation is not known.
        RuntimeError: shapes, dtypes or devices do not fit together.

    Example:
        >>> weight, bias = torch.eye(2), torch.tensor([0.0, -1.0])
        >>> linear_act(torch.ones(2), weight, bias, "relu")
        tensor([1., 0.])
    """
    return feed_forward(input, weight, bias, None, None, None, None, find_activation(activation, parameters))


def gated_linear(
    input: Tensor,
    weight: Tensor,
    up_weight: Tensor,
    bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    activation: str | Activation = "silu",
    **parameters: float,
) -> Tensor:
    """act(input @ weight.T + bias) * (input @ up_weight.T + up_bias): SwiGLU with silu, GEGLU with gelu, GLU with
    sigmoid, ReGLU with relu.

    Args, Raises: see linear_act.

    Shape:
        input [*, in_features], weights [hidden_features, in_features], biases [hidden_features]; output
        [*, hidden_features].

    Example:
        >>> x, weight = torch.tensor([1.0, -1.0]), torch.eye(2)
        >>> gated_linear(x, weight, 3 * weight, activation="relu")
        tensor([3., -0.])

    Reference: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    _expect_tensors("gated_linear", up_weight=up_weight)
    return feed_forward(input, weight, bias, up_weight, up_bias, None, None, find_activation(activation, parameters))


def mlp(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None = None,
    activation: str | Activation = "gelu",
    **parameters: float,
) -> Tensor:
    """act(input @ weight.T + bias) @ down_weight.T + down_bias.

    Args, Raises: see linear_act.

    Shape:
        input [*, in_features], weight [hidden_features, in_features], bias [hidden_features], down_weight
        [out_features, hidden_features], down_bias [out_features]; output [*, out_features].

    Example:
        >>> x, weight = torch.tensor([2.0, -1.0]), torch.eye(2)
        >>> mlp(x, weight, None, torch.ones(1, 2), activation="relu")
        tensor([2.])
    """
    _expect_tensors("mlp", down_weight=down_weight)
    found = find_activation(activation, parameters)
    return feed_forward(input, weight, bias, None, None, down_weight, down_bias, found)


def gated_mlp(
    input: Tensor,
    weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str | Activation = "silu",
    **parameters: float,
) -> Tensor:
    """(act(input @ weight.T + bias) * (input @ up_weight.T + up_bias)) @ down_weight.T + down_bias.

    Args, Raises: see linear_act.

    Shape:
        input [*, in_features], weight and up_weight [hidden_features, in_features], bias and up_bias
        [hidden_features], down_weight [out_features, hidden_features], down_bias [out_features]; output
        [*, out_features].

    Example:
        >>> x, weight = torch.tensor([2.0, -1.0]), torch.eye(2)
        >>> gated_mlp(x, weight, 3 * weight, torch.ones(1, 2), activation="relu")
        tensor([12.])
    """
    _expect_tensors("gated_mlp", up_weight=up_weight, down_weight=down_weight)
    found = find_activation(activation, parameters)
    return feed_forward(input, weight, bias, up_weight, up_bias, down_weight, down_bias, found)
