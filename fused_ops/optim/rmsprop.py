# SPDX-License-Identifier: Apache-2.0
import torch

from fused_ops.optim.base import FusedOptimizer


class RMSprop(FusedOptimizer, torch.optim.RMSprop):
    """torch.optim.RMSprop in one pass over memory.

    Per element, with gradient g and parameter p::

        g <- g + weight_decay * p
        square_avg <- alpha * square_avg + (1 - alpha) * g^2
        p <- p - lr * g / (sqrt(square_avg) + eps)

    With centered, grad_avg averages g as square_avg does g^2, and the root is of max(square_avg - grad_avg^2, 0):
    rounding can make that difference negative, where torch.optim steps to NaN. With momentum, momentum_buffer <-
    momentum * momentum_buffer + g / (root + eps) takes the place of the quotient.

    Args:
        params, lr, alpha, eps, weight_decay, momentum, centered, capturable, foreach, maximize, differentiable: as
        torch.optim.RMSprop, with its defaults. `fused`, which the other optimizers take, is accepted and ignored.
        state_dtype: see FusedOptimizer.

    Example:
        >>> import fused_ops, torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = fused_ops.optim.RMSprop([weight], lr=0.01)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.9000, 0.9000, 0.9000])

    Reference: Tieleman & Hinton, 2012, lecture 6.5; centered: Graves, 2013, https://arxiv.org/abs/1308.0850.
    """

    rule = "rmsprop"
