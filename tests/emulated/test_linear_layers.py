# SPDX-License-Identifier: Apache-2.0
"""The tables of the linear-activation layers once more, on the emulated CUDA kernels."""

from __future__ import annotations

import pytest
from emulated import build
from test_linear_layouts import *  # noqa: F403
from test_linear_values import *  # noqa: F403

pytestmark = pytest.mark.slow

# Hundreds of thousands of rows take minutes here; what they are about, the launches' limits, test_epilogues.py has.
del test_more_rows_than_a_16_bit_index_holds  # noqa: F821


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_ops.functional._native", build.module())


@pytest.fixture
def device() -> str:
    """Overrides the tables' own: host memory, which the emulated kernels work on."""
    return "cpu"


def test_the_emulated_kernels_run() -> None:
    import torch

    from fused_ops import functional

    module = build.module()
    module.take_launches()
    x = torch.randn(5, 7, requires_grad=True)
    functional.linear_act(x, torch.randn(3, 7), torch.randn(3), "gelu").sum().backward()
    assert len(module.take_launches()) == 2  # activate, differentiate: nothing wants a bias gradient
