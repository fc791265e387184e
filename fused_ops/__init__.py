# SPDX-License-Identifier: Apache-2.0
"""Fused, drop-in replacements that make existing PyTorch training code faster: same names, same results.

Example:
    >>> import torch
    >>> from fused_ops import optim  # was: from torch import optim
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = optim.RMSprop(model.parameters(), lr=1e-3)
    >>> model(torch.randn(8, 4)).square().mean().backward()
    >>> optimizer.step()
"""

from importlib.metadata import PackageNotFoundError, version

from fused_ops import dispatch, functional, memory, nn, optim
from fused_ops._build import best_device, build_info
from fused_ops.dispatch import tune
from fused_ops.fuse import fuse
from fused_ops.memory import keep_freed_memory
from fused_ops.optim import fuse_optimizer

try:
    __version__ = version("fused_ops")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "unknown"

__all__ = [
    "best_device",
    "build_info",
    "dispatch",
    "functional",
    "fuse",
    "fuse_optimizer",
    "keep_freed_memory",
    "memory",
    "nn",
    "optim",
    "tune",
]
