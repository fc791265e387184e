# SPDX-License-Identifier: Apache-2.0
import torch

from fused_ops.optim.base import FusedOptimizer


class AdamW(FusedOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW in one pass over memory: Adam with p <- (1 - lr * weight_decay) * p in place of its decay.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: as
        torch.optim.AdamW, with its defaults.
        state_dtype: see FusedOptimizer.

    Example:
        >>> import fused_ops, torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = fused_ops.optim.AdamW([weight], lr=0.1, weight_decay=1.0)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.8000, 0.8000, 0.8000])

    Reference: Loshchilov & Hutter, 2019, https://arxiv.org/abs/1711.05101, algorithm 2.
    """

    rule = "adam"
