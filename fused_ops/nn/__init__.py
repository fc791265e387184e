# SPDX-License-Identifier: Apache-2.0
"""Layers that compute a linear layer and what follows it in one operation: same parameters, same results."""

from fused_ops.nn.activation import ACTIVATIONS, Activation
from fused_ops.nn.feed_forward import MLP, GatedLinear, GatedMLP, LinearAct
from fused_ops.nn.grad_buffers import accumulate_grad

__all__ = ["ACTIVATIONS", "MLP", "Activation", "GatedLinear", "GatedMLP", "LinearAct", "accumulate_grad"]
