# SPDX-License-Identifier: Apache-2.0
"""The speeds that must be reached on the CPU, in one table, and the comparison of results with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

RMSPROP = ("RMSprop", "RMSprop momentum", "RMSprop centered")
ADAM = ("AdamW", "Adam")
ALL = (*RMSPROP, *ADAM, "SGD momentum", "Adagrad")


@dataclass(frozen=True)
class Floor:
    """A bound on `metric`: "vs NAME" is a speed-up, "share of limit" a fraction; the other metrics have ceilings."""

    optimizers: tuple[str, ...]
    sets: str
    metric: str
    bound: float
    precision: str = "fp32"
    threads: int = 2
    competing: bool = False

    @property
    def is_ceiling(self) -> bool:
        return self.metric in ("ms", "MB a thread")

    def applies(self, row: dict[str, Any]) -> bool:
        return (
            row["optimizer"] in self.optimizers
            and row["set"] in self.sets.split()
            and row["precision"] == self.precision
            and row["threads"] == self.threads
            and row["competing"] == self.competing
        )


FLOORS = (
    Floor(RMSPROP, "a b", "vs best stock", 5.0),
    Floor(RMSPROP, "c", "vs best stock", 18.0),
    Floor(RMSPROP, "d", "vs best stock", 3.0),
    Floor(RMSPROP, "a", "share of limit", 0.93),
    Floor(RMSPROP, "d", "vs compiled", 1.15),
    Floor(ADAM, "c", "vs fused", 7.0),
    Floor(("AdamW",), "a b", "vs best stock", 0.98),
    Floor(("AdamW",), "a b", "share of limit", 0.90),
    Floor(("AdamW",), "d", "vs fused", 1.08),
    Floor(("AdamW",), "b", "vs fused", 1.8, precision="bf16"),
    Floor(("AdamW",), "c", "vs fused", 12.0, precision="bf16"),
    Floor(("AdamW",), "d", "vs fused", 2.0, precision="bf16"),
    Floor(("AdamW",), "b", "vs fused", 1.3, precision="fp32, bf16 states"),
    Floor(("SGD momentum", "Adagrad"), "c", "vs fused", 6.0),
    Floor(("SGD momentum", "Adagrad"), "a", "vs best stock", 0.98),
    Floor(("AdamW",), "scalars", "ms", 0.3),
    Floor(("AdamW",), "c", "vs fused", 4.0, competing=True),
    # Never slower on one thread; 0.98 rather than 1, because two equal routines differ by 2% in a noisy measurement.
    Floor(ALL, "a b c d", "vs best stock", 0.98, threads=1),
    Floor(ALL, "a b c d", "MB a thread", 1.0),
)


@dataclass(frozen=True)
class Verdict:
    floor: Floor
    row: dict[str, Any]
    value: float

    @property
    def passed(self) -> bool:
        return self.value <= self.floor.bound if self.floor.is_ceiling else self.value >= self.floor.bound

    def __str__(self) -> str:
        row, floor = self.row, self.floor
        case = f"{row['optimizer']} {row['precision']}, set {row['set']}, {row['threads']} thread(s)"
        case += ", one competing process" if row["competing"] else ""
        relation = "at most" if floor.is_ceiling else "at least"
        outcome = "pass" if self.passed else "MISS"
        return f"{outcome}  {case}: {floor.metric} {self.value:.3g}, {relation} {floor.bound:g}"


def judge(rows: Iterable[dict[str, Any]]) -> list[Verdict]:
    """One verdict for every floor and row that meet; a metric that was not measured gives none."""
    rows = list(rows)
    return [
        Verdict(floor, row, row["metrics"][floor.metric])
        for floor in FLOORS
        for row in rows
        if floor.applies(row) and floor.metric in row["metrics"]
    ]
