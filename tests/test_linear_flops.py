# SPDX-License-Identifier: Apache-2.0
"""torch.utils.flop_counter counts of our operators what it counts of stock's, whatever is frozen."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from linear_reference import FORMS, Block, subsets
from torch.utils.flop_counter import FlopCounterMode

importlib.import_module("fused_ops")  # a counter knows the formulas that there are when it is made


def flops(block: Block, function) -> tuple[int, int]:
    """Of forward, and of forward and backward."""
    with FlopCounterMode(display=False) as counter:
        output = function(**block.tensors)
        forward = counter.get_total_flops()
        if block.trainable:
            torch.autograd.grad(output, list(block.trainable.values()), block.grad_output)
    return forward, counter.get_total_flops()


@pytest.mark.parametrize(
    ("form", "frozen"),
    [(form, frozen) for form in FORMS for frozen in subsets([name for name in FORMS[form] if "bias" not in name])],
)
def test_as_many_as_stock(form: str, frozen: tuple[str, ...]) -> None:
    for batch, without in itertools.product([(5,), (2, 3, 4)], [(), ("bias", "down_bias")]):
        names = [name for name in FORMS[form] if "bias" in name and name not in without]
        block = Block(form, "gelu", batch, 7, 6, 4, frozen=(*frozen, *names[:1]), without=without)
        ours, stock = flops(block, block.fused), flops(block, block.stock)
        assert ours == stock
        assert stock[0] > 0


@pytest.mark.parametrize("form", FORMS)
def test_of_backward_alone(form: str) -> None:
    """The counter is entered when forward is done."""

    def counted(function) -> int:
        output = function(**block.tensors)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(output, list(block.trainable.values()), block.grad_output)
        return counter.get_total_flops()

    block = Block(form, "gelu", (5,), 7, 6, 4)
    ours, stock = counted(block.fused), counted(block.stock)
    assert ours == stock
    assert stock > 0
