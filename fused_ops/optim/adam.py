# SPDX-License-Identifier: Apache-2.0
import torch

from fused_ops.optim.base import FusedOptimizer


class Adam(FusedOptimizer, torch.optim.Adam):
    """torch.optim.Adam in one pass over memory.

    Per element, with gradient g, parameter p, and bias_k = 1 - beta_k^step::

        g <- g + weight_decay * p
        exp_avg <- exp_avg + (1 - beta1) * (g - exp_avg)
        exp_avg_sq <- beta2 * exp_avg_sq + (1 - beta2) * g^2
        p <- p - lr / bias_1 * exp_avg / (sqrt(exp_avg_sq / bias_2) + eps)

    With amsgrad, max_exp_avg_sq, the largest exp_avg_sq so far, takes its place in the last line.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, foreach, maximize, capturable, differentiable, fused,
        decoupled_weight_decay: as torch.optim.Adam, with its defaults.
        state_dtype: see FusedOptimizer.

    Example:
        >>> import fused_ops, torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = fused_ops.optim.Adam([weight], lr=0.1)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.9000, 0.9000, 0.9000])

    Reference: Kingma & Ba, 2015, https://arxiv.org/abs/1412.6980; AMSGrad: https://arxiv.org/abs/1904.09237.
    """

    rule = "adam"
