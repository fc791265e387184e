# SPDX-License-Identifier: Apache-2.0
"""Times optimizer steps: stock PyTorch, fused_ops and installed peers, against each other and the bandwidth limit.

    python benchmarks/bench_optimizers.py                     # every row, about 15 minutes
    python benchmarks/bench_optimizers.py --quick --sets c d  # a first impression
    python benchmarks/bench_optimizers.py --compile --check   # with a compiled stock step; fails on a missed floor
    python benchmarks/bench_optimizers.py --device cuda       # on a GPU: kernel and host times too

Every contender first takes three steps that are compared with a float64 stock optimizer. Writes optimizers.json
and optimizers.md to the output directory after every row, and optimizers.png at the end.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import add_arguments, describe_machine, write
from contenders import (
    OPTIMIZERS,
    OURS,
    PRECISIONS,
    STOCK,
    Contender,
    OptimizerCase,
    Precision,
    bytes_per_element,
    contenders,
)
from floors import Verdict, judge
from measurement import (
    BandwidthLimit,
    Clock,
    Routine,
    Spread,
    competing_process,
    host_seconds,
    interleave,
    kernel_seconds,
    seconds,
    temporary_bytes,
    verify,
)
from parameter_sets import PARAMETER_SETS, ParameterSet, make_parameters
from progress import Progress
from report import markdown, markdown_table, plot

LIMIT = "bandwidth limit"
MODEL_SETS = ("a", "b", "c", "d")


@dataclass(frozen=True)
class Row:
    """One line of the benchmark: what is measured, and under which conditions."""

    case: OptimizerCase
    precision: Precision
    parameter_set: ParameterSet
    threads: int
    competing: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        condition = ", competing process" if self.competing else ""
        return f"{self.parameter_set.name}: {self.case.name} {self.precision.name}, {self.threads} thread(s){condition}"


def planned_rows(options: argparse.Namespace) -> list[Row]:
    """Every optimizer in fp32 and AdamW and RMSprop in the other precisions, then the rows under special conditions."""

    def rows(optimizers: tuple[str, ...], precisions: tuple[str, ...], sets: tuple[str, ...], **conditions: Any):
        for set_name in sets:
            for precision in precisions:
                for optimizer in optimizers:
                    wanted = (
                        optimizer in options.optimizers and precision in options.precisions and set_name in options.sets
                    )
                    if wanted:
                        yield Row(OPTIMIZERS[optimizer], PRECISIONS[precision], PARAMETER_SETS[set_name], **conditions)

    threads = options.threads
    everything, fp32 = tuple(OPTIMIZERS), ("fp32",)
    planned = [
        *rows(everything, fp32, ("a", "b", "c"), threads=threads),
        *rows(everything, fp32, ("d",), threads=threads, compiled=options.compile),
        *rows(("AdamW", "RMSprop"), ("bf16", "fp32, bf16 states"), MODEL_SETS, threads=threads),
        *rows(("AdamW",), fp32, ("scalars",), threads=threads),
    ]
    if options.device.type == "cuda":
        planned += rows(("AdamW", "RMSprop"), ("fp32", "bf16"), ("llama",), threads=threads)
    else:
        planned += rows(("AdamW",), fp32, ("c",), threads=threads, competing=True)
        if threads > 1:
            planned += rows(everything, fp32, ("c", "d"), threads=1)
            planned += rows(("AdamW", "RMSprop"), fp32, ("a", "b"), threads=1)
    return planned


def time_steps(
    steps: dict[str, Routine], row: Row, options: argparse.Namespace, between: Routine
) -> dict[str, dict[str, list[float]]]:
    """Seconds a step of every routine, by clock: one on the CPU, three on a GPU."""
    clocks: dict[str, Clock] = {"milliseconds": seconds}
    if options.device.type == "cuda":
        clocks |= {"kernel_milliseconds": kernel_seconds, "host_milliseconds": host_seconds}
    budget, rounds = (1.0, (5, 10)) if options.quick else (options.seconds, (7, 40))
    with competing_process(row.competing):
        return {
            key: interleave(
                steps, options.device, clock=clock, budget=budget / len(clocks), rounds=rounds, between=between
            )
            for key, clock in clocks.items()
        }


def measure(row: Row, options: argparse.Namespace, limit: BandwidthLimit) -> dict[str, Any]:
    """Verifies and times every contender of a row over the same parameters and gradients."""
    torch.set_num_threads(row.threads)
    dtype = row.precision.dtype
    parameters = make_parameters(row.parameter_set.shapes, dtype, options.device)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]

    entrants: dict[str, Contender] = {}
    steps: dict[str, Routine] = {}
    errors: dict[str, str | None] = {}
    for contender in contenders(row.case, row.precision, row.compiled, options.peers):
        if row.competing and contender.name not in ("fused", OURS):
            continue  # stock's loop takes seconds a step when its threads wait for a busy core
        if options.device.type == "cuda" and contender.name == "loop":
            continue  # thousands of launches a step; foreach is what stock chooses by itself
        try:
            step = contender.make_step(parameters)
            errors[contender.name] = verify(step, parameters, row.case, contender)
        except Exception as error:
            if contender.name in (*STOCK, OURS):
                raise
            print(f"\nleft out: {contender.name} on {row}: {error}", file=sys.stderr)  # a peer that does not run here
            continue
        entrants[contender.name], steps[contender.name] = contender, step

    def turn_gradients() -> None:  # an endlessly constant gradient would drive the centered variance to zero
        for gradient in gradients:
            gradient.neg_()

    timed = time_steps({**steps, LIMIT: limit}, row, options, turn_gradients)
    times = timed["milliseconds"]
    moving = timed.get("kernel_milliseconds", times)  # what counts against the bandwidth
    temporaries = {name: temporary_bytes(step, options.device) for name, step in steps.items()}

    bandwidths = [limit.bytes_moved / taken for taken in moving[LIMIT]]
    elements = row.parameter_set.numel
    result: dict[str, Any] = {
        "set": row.parameter_set.name,
        "optimizer": row.case.name,
        "precision": row.precision.name,
        "threads": row.threads,
        "competing": row.competing,
        "device": options.device.type,
        "tensors": len(parameters),
        "elements": elements,
        "limit_gigabytes_per_second": asdict(Spread.of([bandwidth / 1e9 for bandwidth in bandwidths])),
        "limit_milliseconds": None,
        "contenders": {},
        "metrics": {},
    }
    shows_bandwidth = row.parameter_set.name in (*MODEL_SETS, "llama")
    for name, contender in entrants.items():
        entry = result["contenders"][name] = {
            **{key: asdict(Spread.of([1e3 * taken for taken in values[name]])) for key, values in timed.items()},
            "gigabytes_per_second": None,
            "share_of_limit": None,
            "temporary_bytes": temporaries[name],
            "error": errors[name],
        }
        if contender.exact and shows_bandwidth:
            moved = elements * bytes_per_element(row.case, dtype, contender.state_dtype)
            entry["gigabytes_per_second"] = moved / Spread.of(moving[name]).median / 1e9
            shares = [moved / taken / rate for taken, rate in zip(moving[name], bandwidths, strict=True)]
            entry["share_of_limit"] = asdict(Spread.of(shares))
            if name == OURS:
                result["metrics"]["share of limit"] = entry["share_of_limit"]["median"]
                result["limit_milliseconds"] = 1e3 * moved / Spread.of(bandwidths).median

    def speedup(other: str) -> float:
        return Spread.of([theirs / ours for theirs, ours in zip(times[other], times[OURS], strict=True)]).median

    stock = [name for name in STOCK if name in times]
    result["best_stock"] = min(stock, key=lambda name: Spread.of(times[name]).median)
    result["metrics"]["vs best stock"] = speedup(result["best_stock"])
    for name in steps:
        if name != OURS:
            result["metrics"][f"vs {name}"] = speedup(name)
    result["metrics"]["ms"] = result["contenders"][OURS]["milliseconds"]["median"]
    temporary = temporaries[OURS]
    if temporary is not None:
        result["metrics"]["MB a thread"] = temporary / 2**20 / row.threads
    return result


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=PARAMETER_SETS, default=list(PARAMETER_SETS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    add_arguments(parser, seconds=6.0, quick="one second a row", compiled="add a compiled stock step on set d")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave out other installed packages")
    return parser.parse_args(arguments)


def record(results: list[dict[str, Any]], machine: dict[str, Any], options: argparse.Namespace) -> list[Verdict]:
    """Writes what was measured; returns how the floors fared."""
    verdicts = judge(results) if options.device.type == "cpu" else []
    write(options.output, "optimizers", results, machine, verdicts, markdown(machine, results, verdicts))
    return verdicts


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    rows = planned_rows(options)
    if not rows:
        print("bench_optimizers: expected at least one row, got none. Name other sets, optimizers or precisions.")
        return 2
    machine = describe_machine(options)
    limit = BandwidthLimit(options.device)
    progress = Progress(len(rows))
    results = []
    for row in rows:
        progress.advance(0, str(row))
        try:
            results.append(measure(row, options, limit))
        except torch.OutOfMemoryError as error:
            print(f"\nleft out: {row}: {str(error).splitlines()[0]}", file=sys.stderr)
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
        record(results, machine, options)  # what was measured outlives an interruption
        progress.advance(1, str(row))
        gc.collect()
    progress.clear()

    verdicts = record(results, machine, options)
    print(markdown_table(results))
    for verdict in verdicts:
        print(verdict)
    subtitle = f"{machine['processor']}, torch {machine['torch']}, {machine['date']}; bars: medians, lines: quartiles"
    if not plot(results, options.output / "optimizers.png", subtitle):
        print("No plot: matplotlib is not installed, or no fp32 row was measured.")
    print(f"Results are in {options.output}")

    wrong = [
        f"{row['optimizer']} {row['precision']}, set {row['set']}: {name} {entry['error']}"
        for row in results
        for name, entry in row["contenders"].items()
        if entry["error"]
    ]
    for line in wrong:
        print(f"WRONG {line}")
    missed = [verdict for verdict in verdicts if not verdict.passed]
    if any(row["contenders"][OURS]["error"] for row in results) or (options.check and missed):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
