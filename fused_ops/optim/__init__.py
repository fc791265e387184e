# SPDX-License-Identifier: Apache-2.0
"""Fused optimizers, each a subclass of its torch.optim namesake with another step()."""

from fused_ops.optim.adagrad import Adagrad
from fused_ops.optim.adam import Adam
from fused_ops.optim.adamw import AdamW
from fused_ops.optim.base import FusedOptimizer, fuse_optimizer
from fused_ops.optim.rmsprop import RMSprop
from fused_ops.optim.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "FusedOptimizer", "RMSprop", "fuse_optimizer"]
