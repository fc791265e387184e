# SPDX-License-Identifier: Apache-2.0
import torch

from fused_ops.optim.base import FusedOptimizer


class SGD(FusedOptimizer, torch.optim.SGD):
    """torch.optim.SGD in one pass over memory.

    Per element, with gradient g and parameter p::

        g <- g + weight_decay * p
        momentum_buffer <- momentum * momentum_buffer + (1 - dampening) * g        (first step: g)
        p <- p - lr * momentum_buffer

    With nesterov the last line subtracts lr * (g + momentum * momentum_buffer), without momentum lr * g.

    Sparse gradients take torch.optim's own step.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, differentiable, fused: as
        torch.optim.SGD, with its defaults.
        state_dtype: see FusedOptimizer.

    Example:
        >>> import fused_ops, torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = fused_ops.optim.SGD([weight], lr=0.1)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.9000, 0.9000, 0.9000])

    Reference: Sutskever et al., 2013, On the importance of initialization and momentum in deep learning.
    """

    rule = "sgd"
    takes_sparse = True
