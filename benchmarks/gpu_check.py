# SPDX-License-Identifier: Apache-2.0
"""Builds, tests, sanitizes and measures fused_ops on this machine's GPU: offline, in one call, within a time limit.

    make gpu-check                                                    # everything, in 9 minutes at most
    python benchmarks/gpu_check.py --steps build tests --minutes 4
    python benchmarks/gpu_check.py --output DIR                       # not to benchmarks/results

A step whose tool is missing is skipped, one past its limit is killed with all that it started; both are reported and
the rest goes on. Time that a step leaves over goes to those after it. After every step the results are written to
OUTPUT/<gpu>/<date>.json and .md; .log holds what the steps printed, .png the plot.

Exits with 1 if the build or a check of correctness failed or did not end, with 2 if there is no GPU, else with 0.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import gpu_report
import gpu_steps
from gpu_environment import ROOT
from gpu_steps import PYTHON, STEPS, Check, Step, StepError, is_wrong

ADVICE = "Run it on a machine with an NVIDIA GPU, with PYTHON set to a Python that has a CUDA build of torch."


def attempt(step: Step, check: Check, limit: float) -> dict[str, Any]:
    begin = monotonic()
    check.deadline = begin + limit
    print(f"== {step.name}: at most {limit:.0f} s", flush=True)
    result: dict[str, Any] = {"name": step.name}
    try:
        result |= {"outcome": "passed", "detail": step.take(check)}
    except StepError as error:
        result |= {"outcome": error.outcome, "detail": error.detail, "failures": error.failures}
    except (OSError, ValueError, LookupError) as error:  # a tool that cannot be started, a result that cannot be read
        result |= {"outcome": "failed", "detail": f"{type(error).__name__}: {error}"}
    result |= {"seconds": round(monotonic() - begin, 1), "limit": round(limit, 1)}
    print(f"   {result['outcome']} in {result['seconds']:.0f} s: {result['detail']}", flush=True)
    for failure in result.get("failures", ()):
        print(f"   {failure}")
    return result


def environment(limit: float, scratch: Path) -> dict[str, Any]:
    """The facts about this machine; a StepError says why nothing can be checked on it."""
    ended = gpu_steps.run((PYTHON, "benchmarks/gpu_environment.py"), limit, {}, scratch / "environment.log")
    if ended.status is None:
        raise StepError("timed out", f"expected the GPU to answer within {limit:.0f} s, got nothing.")
    lines = ended.output.strip().splitlines() or ["no output"]
    if ended.status != 0:
        raise StepError("failed", f"expected a CUDA build of torch in {PYTHON}, got: {lines[-1]}.")
    facts = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    if not facts["gpus"]:
        raise StepError("failed", f"expected a CUDA GPU, got none ({facts['reason'].rstrip('.')}).")
    return facts


def result_stem(output: Path, facts: dict[str, Any]) -> Path:
    """<gpu>/<date> in the output folder, with a number where that day has results already."""
    folder = output / re.sub(r"[^a-z0-9]+", "-", facts["gpus"][0]["name"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    names = [facts["date"], *(f"{facts['date']}-{number}" for number in range(2, 1000))]
    return folder / next(name for name in names if not (folder / f"{name}.json").exists())


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--steps", nargs="+", choices=names, default=names, help="the others are left out")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps together")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    deadline = monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as scratch:
        try:
            facts = environment(min(90.0, 15 * options.minutes), Path(scratch))
        except StepError as error:
            print(f"gpu-check: {error.detail} {ADVICE}")
            return 2
        record = {"date": facts["date"], "environment": facts, "steps": [], "rows": [], "goals": []}
        check = Check(record, result_stem(options.output.resolve(), facts), Path(scratch))
        print(f"gpu-check: {facts['gpus'][0]['name']}, torch {facts['torch']}, nvcc {facts['nvcc']}")
        check.write()
        chosen = [step for step in STEPS if step.name in options.steps]
        for index, step in enumerate(chosen):
            share = step.share / sum(later.share for later in chosen[index:])
            record["steps"].append(attempt(step, check, share * max(0.0, deadline - monotonic())))
            check.write()
    for verdict in record["goals"]:
        print(gpu_report.sentence(verdict))
    print(f"Results are in {check.file('.json')}, .md and .log")
    correctness = {step.name for step in STEPS if step.is_correctness}
    unproven = [s for s in record["steps"] if s["name"] in correctness and s["outcome"] in ("failed", "timed out")]
    return 1 if unproven or any(map(is_wrong, record["rows"])) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running step is killed with this process
    sys.exit(main())
