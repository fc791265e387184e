# SPDX-License-Identifier: Apache-2.0
"""The speeds that linear layers must reach on the CPU, in one table, and the comparison of results with it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from linear_contenders import FORWARD, SHAPES, TRAINING

ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_new", "silu", "relu")  # identity has a floor of its own
TINY = SHAPES[:1]
LARGE = tuple(shape for shape in SHAPES if 4 * shape[0] * shape[2] >= 32 << 20 or shape[1] <= 256)


@dataclass(frozen=True)
class LinearFloor:
    """A bound on `metric` in every row that matches, or on its geometric mean over them. None matches anything.

    "vs NAME" is how many times faster ours is; the other metrics have ceilings.
    """

    bound: float
    metric: str = "vs stock"
    blocks: tuple[str, ...] | None = None
    activations: tuple[str, ...] | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    precisions: tuple[str, ...] | None = ("fp32",)
    modes: tuple[str, ...] | None = None
    mean: bool = False
    threads: int = 2

    @property
    def is_ceiling(self) -> bool:
        return not self.metric.startswith("vs ")

    def applies(self, row: dict[str, Any]) -> bool:
        facts = (
            (self.blocks, row["block"]),
            (self.activations, row["activation"]),
            (self.shapes, tuple(row["shape"])),
            (self.precisions, row["precision"]),
            (self.modes, row["mode"]),
        )
        return (
            all(wanted is None or fact in wanted for wanted, fact in facts)
            and row["threads"] == self.threads
            and self.metric in row["metrics"]
        )


GRID = {"blocks": ("layer", "gate"), "activations": ACTIVATIONS, "mean": True}
FUNCTIONAL = "vs stock functional"

FLOORS = (
    # 0.98 rather than 1, because two equal routines differ by 2% in a noisy measurement.
    LinearFloor(0.98, precisions=None),
    LinearFloor(1.3, modes=(FORWARD,), **GRID),
    LinearFloor(1.25, modes=(TRAINING,), **GRID),
    LinearFloor(1.0, precisions=("bf16",), modes=(FORWARD,), **GRID),
    LinearFloor(1.0, precisions=("bf16",), modes=(TRAINING,), **GRID),
    LinearFloor(1.0, "vs compiled", precisions=None, mean=True),
    LinearFloor(3.0, shapes=TINY, activations=("gelu",), modes=(TRAINING,)),
    LinearFloor(1.5, shapes=TINY, activations=("relu",), modes=(TRAINING,)),
    LinearFloor(3.0, FUNCTIONAL, shapes=TINY, activations=("gelu",), modes=(FORWARD,)),
    LinearFloor(2.0, FUNCTIONAL, shapes=TINY, activations=("relu",), modes=(FORWARD,)),
    LinearFloor(1.7, blocks=("layer",), activations=ACTIVATIONS, shapes=(SHAPES[4],), modes=(FORWARD,)),
    LinearFloor(1.4, blocks=("layer",), activations=ACTIVATIONS, shapes=(SHAPES[4],), modes=(TRAINING,)),
    LinearFloor(1.2, blocks=("layer",), activations=ACTIVATIONS, shapes=SHAPES[2:4], modes=(FORWARD,)),
    LinearFloor(1.1, blocks=("layer",), activations=ACTIVATIONS, shapes=SHAPES[2:4], modes=(TRAINING,)),
    LinearFloor(1.2, blocks=("layer",), activations=ACTIVATIONS, shapes=LARGE, modes=(TRAINING,)),
    LinearFloor(1.3, blocks=("layer",), activations=("gelu_tanh",), shapes=LARGE, modes=(TRAINING,)),
    LinearFloor(1.3, blocks=("mlp",), activations=("gelu_new",), modes=(TRAINING,)),
    LinearFloor(1.15, blocks=("gated mlp",), modes=(TRAINING,)),
    LinearFloor(0.5, "saved bytes of stock's", blocks=("mlp",), precisions=None),
    LinearFloor(2.0, "saved hidden tensors", blocks=("gate", "gated mlp"), precisions=None),
)


@dataclass(frozen=True)
class LinearVerdict:
    floor: LinearFloor
    case: str
    value: float

    @property
    def passed(self) -> bool:
        return self.value <= self.floor.bound if self.floor.is_ceiling else self.value >= self.floor.bound

    def __str__(self) -> str:
        relation = "at most" if self.floor.is_ceiling else "at least"
        outcome = "pass" if self.passed else "MISS"
        return f"{outcome}  {self.case}: {self.floor.metric} {self.value:.3g}, {relation} {self.floor.bound:g}"


def describe(row: dict[str, Any]) -> str:
    shape = "x".join(map(str, row["shape"]))
    return f"{row['block']} {row['activation']} {shape} {row['precision']} {row['mode']}, {row['threads']} thread(s)"


def judge(rows: Iterable[dict[str, Any]]) -> list[LinearVerdict]:
    """One verdict for every floor and row that meet; for a floor of the mean, one for all rows that it meets."""
    rows = list(rows)
    verdicts = []
    for floor in FLOORS:
        matching = [row for row in rows if floor.applies(row)]
        if floor.mean and matching:
            value = statistics.geometric_mean(row["metrics"][floor.metric] for row in matching)
            what = " ".join([*(floor.precisions or ("all precisions",)), *(floor.modes or ("all modes",))])
            verdicts.append(LinearVerdict(floor, f"geometric mean of {len(matching)} rows, {what}", value))
        elif not floor.mean:
            verdicts += [LinearVerdict(floor, describe(row), row["metrics"][floor.metric]) for row in matching]
    return verdicts
