# SPDX-License-Identifier: Apache-2.0
"""Times linear-activation layers and MLP blocks: stock PyTorch and fused_ops against each other.

    python benchmarks/bench_linear.py                                  # every row, about half an hour
    python benchmarks/bench_linear.py --quick --activations gelu relu  # a first impression
    python benchmarks/bench_linear.py --compile --check                # with torch.compile; fails on a missed floor

Every contender's output and gradients are first compared with stock in float64. Writes linear.json and linear.md to
the output directory after every row, and linear.png at the end.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
from common import add_arguments, describe_machine, write
from contenders import OURS
from linear_contenders import (
    ACCUMULATING,
    ACTIVATIONS,
    COMPILED,
    FORWARD,
    LIMIT,
    MODES,
    OUR_FUNCTIONAL,
    PRECISIONS,
    SHAPES,
    STOCK,
    STOCK_FUNCTIONAL,
    TRAINING,
    LinearCase,
    Oracle,
    Problem,
    gradient_bytes_saved,
    saved_bytes,
)
from linear_floors import LinearVerdict, judge
from linear_report import markdown, markdown_table, plot
from measurement import Routine, Spread, interleave
from progress import Progress
from torch import Tensor

GATE = "swiglu"
BLOCKS = (
    LinearCase("mlp", "gelu_new", (4096, 768, 3072), "fp32"),
    LinearCase("mlp", "gelu_new", (4096, 768, 3072), "bf16"),
    LinearCase("gated mlp", "silu", (2048, 1024, 2816), "fp32"),
    LinearCase("gated mlp", "silu", (2048, 1024, 2816), "bf16"),
)
ACCUMULATED = ((512, 768, 3072), (64, 4096, 11008))  # where the weight gradient's traffic is seen


@dataclass(frozen=True)
class Row:
    case: LinearCase
    mode: str

    def __str__(self) -> str:
        return f"{self.case}, {self.mode}"


def planned_rows(options: argparse.Namespace) -> list[Row]:
    """Every shape, precision and activation in both modes, then the blocks, then gradients added to kept ones."""
    cases = [
        LinearCase("gate", "silu", shape, precision)
        if activation == GATE
        else LinearCase("layer", activation, shape, precision)
        for shape in SHAPES
        for precision in options.precisions
        for activation in options.activations
    ]
    cases += [
        case
        for case in BLOCKS
        if case.precision in options.precisions and case.activation.replace("silu", GATE) in options.activations
    ]
    rows = [Row(case, mode) for case in cases for mode in (FORWARD, TRAINING)]
    if hasattr(import_module("fused_ops.nn"), "accumulate_grad"):
        rows += [
            Row(case, ACCUMULATING)
            for case in cases
            if case.block == "layer" and case.activation == "gelu" and case.shape in ACCUMULATED
        ]
    return [row for row in rows if row.mode in options.modes and options.shapes in (None, row.case.shape)]


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Verifies and times every contender of a row over the same input and parameters."""
    case, mode = row.case, row.mode
    problem = Problem.of(case, options.device)
    oracle = Oracle(problem)
    entrants: dict[str, Callable[[Tensor], Tensor]] = {}
    errors: dict[str, str | None] = {}
    for name, function in problem.callables(mode, options.compile).items():
        try:
            errors[name] = oracle.verify(function)
        except Exception as error:
            if name != COMPILED:
                raise
            print(f"\nleft out: {name} on {row}: {error}", file=sys.stderr)  # no compiler on this machine
            continue
        entrants[name] = function
    del oracle

    def clear_gradients() -> None:  # sums over thousands of steps would overflow
        for leaf in problem.leaves():
            if leaf.grad is not None:
                leaf.grad.zero_()

    routines: dict[str, Routine] = {name: problem.routine(function, mode) for name, function in entrants.items()}
    routines[LIMIT] = problem.products_alone(mode)
    budget, rounds = (0.5, (3, 10)) if options.quick else (options.seconds, (5, 30))
    with torch.set_grad_enabled(mode != FORWARD):
        times = interleave(
            routines,
            options.device,
            budget=budget,
            rounds=rounds,
            between=clear_gradients if mode == ACCUMULATING else lambda: None,
        )

    hidden_bytes = case.shape[0] * case.shape[2] * PRECISIONS[case.precision].itemsize
    result: dict[str, Any] = {
        **asdict(case),
        "mode": mode,
        "threads": torch.get_num_threads(),
        "hidden_bytes": hidden_bytes,
        "contenders": {},
        "metrics": {},
    }
    for name, values in times.items():
        counted = mode != FORWARD and name in (STOCK, OURS)
        result["contenders"][name] = {
            "milliseconds": asdict(Spread.of([1e3 * value for value in values])),
            "saved_bytes": saved_bytes(problem, entrants[name]) if counted else None,
            "error": errors.get(name),
        }

    def speedup(other: str, ours: str) -> float:
        return Spread.of([theirs / own for theirs, own in zip(times[other], times[ours], strict=True)]).median

    metrics = result["metrics"]
    for other, ours in ((STOCK, OURS), (COMPILED, OURS), (STOCK_FUNCTIONAL, OUR_FUNCTIONAL)):
        if other in times and ours in times:
            metrics[f"vs {other}"] = speedup(other, ours)
    metrics["share of limit"] = speedup(LIMIT, OURS)
    metrics["limit vs stock"] = speedup(STOCK, LIMIT)
    if mode == ACCUMULATING:
        metrics["gradient bytes saved"] = gradient_bytes_saved(problem, problem.ours())
    if mode == TRAINING:
        ours, stock = (result["contenders"][name]["saved_bytes"] for name in (OURS, STOCK))
        metrics["saved hidden tensors"] = ours / hidden_bytes
        if stock:
            metrics["saved bytes of stock's"] = ours / stock
    return result


def parse_shape(text: str) -> tuple[int, ...]:
    shape = tuple(int(number) for number in text.split("x"))
    if shape not in {*SHAPES, *(case.shape for case in BLOCKS)}:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join('x'.join(map(str, s)) for s in SHAPES)}")
    return shape


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    activations = [*ACTIVATIONS, GATE]
    parser.add_argument("--shapes", type=parse_shape, help="one shape, as 512x768x3072; default: all")
    parser.add_argument("--activations", nargs="+", choices=activations, default=activations)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    add_arguments(parser, seconds=3.0, quick="half a second a row", compiled="add torch.compile of stock")
    return parser.parse_args(arguments)


def record(results: list[dict[str, Any]], machine: dict[str, Any], options: argparse.Namespace) -> list[LinearVerdict]:
    """Writes what was measured; returns how the floors fared."""
    verdicts = judge(results) if options.device.type == "cpu" else []
    write(options.output, "linear", results, machine, verdicts, markdown(machine, results, verdicts))
    return verdicts


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    rows = planned_rows(options)
    if not rows:
        print("bench_linear: expected at least one row, got none. Name other shapes, activations, precisions or modes.")
        return 2
    torch.set_num_threads(options.threads)
    machine = describe_machine(options)
    progress = Progress(len(rows))
    results = []
    for row in rows:
        progress.advance(0, str(row))
        results.append(measure(row, options))
        record(results, machine, options)  # what was measured outlives an interruption
        progress.advance(1, str(row))
        gc.collect()
    progress.clear()

    verdicts = record(results, machine, options)
    print(markdown_table(results))
    for verdict in verdicts:
        print(verdict)
    subtitle = f"{machine['processor']}, torch {machine['torch']}, {machine['date']}"
    if not plot(results, options.output / "linear.png", subtitle):
        print("No plot: matplotlib is not installed, or no fp32 layer was measured.")
    print(f"Results are in {options.output}")

    wrong = {
        f"{row['block']} {row['activation']} {row['shape']} {row['precision']}: {name}: {entry['error']}": name
        for row in results
        for name, entry in row["contenders"].items()
        if entry["error"]
    }
    for line in wrong:
        print(f"WRONG {line}")
    missed = [verdict for verdict in verdicts if not verdict.passed]
    return int(any(name.startswith(OURS) for name in wrong.values()) or (options.check and bool(missed)))


if __name__ == "__main__":
    sys.exit(main())
