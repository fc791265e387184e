# SPDX-License-Identifier: Apache-2.0
from typing import Any

import torch

from fused_ops.optim.base import FusedOptimizer


class Adagrad(FusedOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad in one pass over memory.

    Per element, with gradient g and parameter p::

        g <- g + weight_decay * p
        sum <- sum + g^2
        p <- p - lr / (1 + (step - 1) * lr_decay) * g / (sqrt(sum) + eps)

    Sparse gradients take torch.optim's own step.

    Args:
        params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, foreach, maximize, differentiable, fused: as
        torch.optim.Adagrad, with its defaults.
        state_dtype: see FusedOptimizer.

    Example:
        >>> import fused_ops, torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = fused_ops.optim.Adagrad([weight], lr=0.1)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.9000, 0.9000, 0.9000])

    Reference: Duchi, Hazan & Singer, 2011, https://jmlr.org/papers/v12/duchi11a.html.
    """

    rule = "adagrad"
    takes_sparse = True

    def initial_value(self, name: str, param: torch.Tensor, group: dict[str, Any]) -> complex:
        value = group["initial_accumulator_value"]
        return complex(value, value) if param.is_complex() else value
