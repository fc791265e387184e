# SPDX-License-Identifier: Apache-2.0
"""The record of a GPU check as goals, markdown and a plot. Plots when run: gpu_report.py RECORD.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS = "fused_ops"
CONTENDERS = ("foreach", "fused", "compiled", OURS)


@dataclass(frozen=True)
class Goal:
    """A least value of a metric, for rows of these optimizers and sets that have so many elements."""

    metric: str
    bound: float
    optimizers: tuple[str, ...] = ("AdamW", "RMSprop")
    sets: str = "a b c d llama"
    least_elements: int = 0

    def applies(self, row: dict[str, Any]) -> bool:
        return (
            self.metric in row["metrics"]
            and row["optimizer"] in self.optimizers
            and row["set"] in self.sets.split()
            and row["elements"] >= self.least_elements
        )


GOALS = (
    Goal("share of limit", 0.93, least_elements=16 << 20),
    Goal("vs best stock", 1.15, ("AdamW",), "b"),
    Goal("vs best stock", 3.0, ("RMSprop",), "b"),
    Goal("vs best stock", 2.0, sets="c"),
)
METRICS = {"share of limit": "share of the copy bandwidth", "vs best stock": "speed-up over the best stock option"}


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One verdict for every goal and row that meet."""
    return [
        {
            "optimizer": row["optimizer"],
            "precision": row["precision"],
            "set": row["set"],
            "metric": METRICS[goal.metric],
            "value": row["metrics"][goal.metric],
            "bound": goal.bound,
            "met": row["metrics"][goal.metric] >= goal.bound,
        }
        for goal in GOALS
        for row in rows
        if goal.applies(row)
    ]


def sentence(verdict: dict[str, Any]) -> str:
    outcome = "met " if verdict["met"] else "MISS"
    case = f"{verdict['optimizer']} {verdict['precision']}, set {verdict['set']}"
    return f"{outcome} {case}: {verdict['metric']} {verdict['value']:.3g}, goal {verdict['bound']:g}"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [list(header), ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def step_cells(step: dict[str, Any]) -> list[str]:
    detail = step["detail"].replace("|", "\\|").replace("\n", " ")
    return [step["name"], step["outcome"], f"{step['seconds']:.0f} of {step['limit']:.0f}", detail]


def row_cells(row: dict[str, Any]) -> list[str]:
    contenders, metrics = row["contenders"], row["metrics"]

    def time(name: str, clock: str) -> str:
        entry = contenders.get(name, {}).get(clock)
        return f"{entry['median']:.3g}" if entry else ""

    def step(name: str) -> str:
        wrong = " (wrong)" if contenders.get(name, {}).get("error") else ""
        return time(name, "milliseconds") + wrong

    def both(clock: str) -> str:
        return f"{time(OURS, clock)} / {time(row['best_stock'], clock)}"

    rate, share = contenders[OURS]["gigabytes_per_second"], metrics.get("share of limit")
    return [
        row["set"],
        row["optimizer"],
        row["precision"],
        *(step(name) for name in CONTENDERS),
        f"{metrics['vs best stock']:.2f}x",
        both("kernel_milliseconds"),
        both("host_milliseconds"),
        "" if rate is None else f"{rate:.0f}",
        "" if share is None else f"{share:.0%}",
        f"{row['limit_gigabytes_per_second']['median']:.0f}",
    ]


def markdown(record: dict[str, Any]) -> str:
    facts = record["environment"]
    gpu = facts["gpus"][0]
    parts = [
        f"# GPU check: {gpu['name']}, {record['date']}",
        f"{len(facts['gpus'])} GPU(s), compute capability {gpu['capability']}, {gpu['free_bytes'] / 2**30:.1f} of "
        f"{gpu['memory_bytes'] / 2**30:.1f} GiB free; driver {facts['driver']}, torch {facts['torch']}, "
        f"nvcc {facts['nvcc']}, Python {facts['python']}, commit {facts['commit']}.",
        "## Steps",
        table(("step", "outcome", "seconds", "detail"), map(step_cells, record["steps"])),
    ]
    failures = [f"- `{failure}`" for step in record["steps"] for failure in step.get("failures", ())]
    if failures:
        parts += ["## Failures", "\n".join(failures)]
    if record["goals"]:
        parts += ["## Goals", "\n".join(f"- {sentence(verdict)}" for verdict in record["goals"])]
    if record["rows"]:
        header = (
            *("set", "optimizer", "precision"),
            *(f"{'ours' if name == OURS else name} ms" for name in CONTENDERS),
            *("vs best stock", "kernel ms, ours / stock", "host ms, ours / stock"),
            *("ours GB/s", "of copy", "copy GB/s"),
        )
        parts += [
            "## Optimizer steps",
            "Medians over rounds in which all contenders take turns. `ms` is from the call until the GPU has finished; "
            "kernel time is between CUDA events on a GPU kept busy until all is enqueued; host time is until the call "
            "returns. GB/s and `of copy` are from kernel times: the bytes that the algorithm must move, against a "
            "device-to-device copy, bytes read and written, measured in the same rounds.",
            table(header, map(row_cells, record["rows"])),
        ]
    return "\n\n".join(parts) + "\n"


def main(path: Path) -> int:
    from report import plot

    record = json.loads(path.read_text())
    facts = record["environment"]
    subtitle = f"{facts['gpus'][0]['name']}, torch {facts['torch']}, {record['date']}; bars: medians, lines: quartiles"
    return 0 if plot(record["rows"], path.with_suffix(".png"), subtitle) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
