# SPDX-License-Identifier: Apache-2.0
"""LinearAct, GatedLinear, MLP and GatedMLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fused_ops import functional
from fused_ops.nn.activation import Activation


class LinearAct(nn.Linear):
    """act(input @ weight.T + bias): an nn.Linear and the activation that follows it, in one operation.

    Parameters, their initialization and the state_dict are nn.Linear's.

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the output's last dimension.
        bias: whether there is one. Default: True.
        activation: a name in fused_ops.nn.ACTIVATIONS, an Activation, or a module or function that computes one.
            Default: "gelu".
        device, dtype: of the parameters, as in nn.Linear.
        **parameters: of the activation, by name, e.g. negative_slope=0.1.

    Shape:
        input [*, in_features]; output [*, out_features].

    Raises:
        ValueError: the activation is not known.

    Example:
        >>> layer = LinearAct(4, 2, activation="relu")  # was: nn.Sequential(nn.Linear(4, 2), nn.ReLU())
        >>> layer(torch.randn(3, 4)).shape
        torch.Size([3, 2])
    """

    activation: Activation

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: Any = "gelu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parameters: float,
    ) -> None:
        found = functional.find_activation(activation, parameters)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = found

    @classmethod
    def from_linear(cls, linear: nn.Linear, activation: Any, **parameters: float) -> LinearAct:
        """A layer that shares the very parameters of an nn.Linear, and its training mode.

        Raises:
            TypeError: it is no plain nn.Linear: another class, pruned, parametrized, or with hooks, which would go.
            ValueError: the activation is not known.

        Example:
            >>> linear = nn.Linear(4, 2)
            >>> LinearAct.from_linear(linear, nn.ReLU()).weight is linear.weight
            True
        """
        if not _only_hold_parameters(linear) or set(linear._parameters) != {"weight", "bias"}:
            raise TypeError(
                f"LinearAct: expected an nn.Linear without hooks, pruning or parametrizations, got {linear}. "
                "Use fused_ops.fuse, which leaves such layers alone."
            )
        found = functional.find_activation(activation, parameters)
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, found, torch.device("meta"))
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        parameters = self._parameters  # a look-up through the module costs a tenth of a small layer
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None or bias is None:  # parametrized or pruned, or without a bias
            weight, bias = self.weight, self.bias
        return functional.feed_forward(input, weight, bias, None, None, None, None, self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


def _only_hold_parameters(*linears: nn.Module) -> bool:
    """Whether calling these modules would do no more than their matrix product: no hook, adapter or other subclass."""
    return all(
        type(linear) is nn.Linear
        and not (linear._forward_hooks or linear._forward_pre_hooks)
        and not (linear._backward_hooks or linear._backward_pre_hooks)
        and "forward" not in linear.__dict__
        for linear in linears
    )


class _FeedForward(nn.Module):
    """A block made of nn.Linear modules that only hold the parameters; should they do more, they are called."""

    def __init__(self, activation: Any, parameters: dict[str, float]) -> None:
        super().__init__()
        self.activation = functional.find_activation(activation, parameters)

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


class GatedLinear(_FeedForward):
    """act(gate_proj(input)) * up_proj(input): SwiGLU, GEGLU, ReGLU or GLU, by the activation.

    Args:
        in_features: size of the input's last dimension.
        hidden_features: size of the output's last dimension.
        bias: whether both projections have one. Default: True.
        activation: "silu" (the default), "gelu", "gelu_tanh", "relu", "sigmoid", or any other that LinearAct takes.
        device, dtype, **parameters: see LinearAct.

    Shape:
        input [*, in_features]; output [*, hidden_features].

    Raises:
        ValueError: the activation is not known.

    Example:
        >>> GatedLinear(4, 8)(torch.randn(3, 4)).shape
        torch.Size([3, 8])

    Reference: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        bias: bool = True,
        activation: Any = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parameters: float,
    ) -> None:
        super().__init__(activation, parameters)
        self.gate_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.up_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        gate, up = self.gate_proj, self.up_proj
        if not _only_hold_parameters(gate, up):
            return self.activation.reference(gate(input)) * up(input)
        return functional.feed_forward(input, gate.weight, gate.bias, up.weight, up.bias, None, None, self.activation)


class MLP(_FeedForward):
    """fc2(act(fc1(input))). Backward derives the hidden layer again from what fc1 gave, so that only that is kept.

    Args:
        in_features: size of the input's last dimension.
        hidden_features: between the two projections.
        out_features: size of the output's last dimension. Default: in_features.
        bias: whether both projections have one. Default: True.
        activation, device, dtype, **parameters: see LinearAct.

    Shape:
        input [*, in_features]; output [*, out_features].

    Raises:
        ValueError: the activation is not known.

    Example:
        >>> MLP(4, 16)(torch.randn(3, 4)).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        activation: Any = "gelu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parameters: float,
    ) -> None:
        super().__init__(activation, parameters)
        out_features = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        if not _only_hold_parameters(fc1, fc2):
            return fc2(self.activation.reference(fc1(input)))
        return functional.feed_forward(input, fc1.weight, fc1.bias, None, None, fc2.weight, fc2.bias, self.activation)


class GatedMLP(_FeedForward):
    """down_proj(act(gate_proj(input)) * up_proj(input)): the feed-forward block of Llama and its kin.

    Args:
        in_features: size of the input's last dimension.
        hidden_features: between the projections.
        out_features: size of the output's last dimension. Default: in_features.
        bias: whether the projections have one. Default: False.
        activation: Default: "silu".
        device, dtype, **parameters: see LinearAct.

    Shape:
        input [*, in_features]; output [*, out_features].

    Raises:
        ValueError: the activation is not known.

    Example:
        >>> GatedMLP(4, 16)(torch.randn(3, 4)).shape
        torch.Size([3, 4])

    Reference: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        activation: Any = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parameters: float,
    ) -> None:
        super().__init__(activation, parameters)
        out_features = in_features if out_features is None else out_features
        self.gate_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.up_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = nn.Linear(hidden_features, out_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if not _only_hold_parameters(gate, up, down):
            return down(self.activation.reference(gate(input)) * up(input))
        return functional.feed_forward(
            input, gate.weight, gate.bias, up.weight, up.bias, down.weight, down.bias, self.activation
        )
