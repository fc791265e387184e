# SPDX-License-Identifier: Apache-2.0
"""The states of the random generators that a model may draw from."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one.tobytes() == other.tobytes() if hasattr(one, "tobytes") else one == other


class RandomStates:
    """The states of torch's, Python's and, if it is imported, NumPy's global generators, as they are now."""

    def __init__(self) -> None:
        self.torch, self.python = torch.get_rng_state(), random.getstate()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.numpy = sys.modules.get("numpy")
        self.numpy_state = self.numpy and self.numpy.random.get_state()

    def changed(self) -> bool:
        now = RandomStates()
        return not _same(
            (self.torch, self.python, self.cuda, self.numpy_state if self.numpy else now.numpy_state),
            (now.torch, now.python, now.cuda if self.cuda else self.cuda, now.numpy_state),
        )

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        for device, state in enumerate(self.cuda):
            torch.cuda.set_rng_state(state, device)
        if self.numpy:
            self.numpy.random.set_state(self.numpy_state)
