# SPDX-License-Identifier: Apache-2.0
"""The steps of a GPU check. Each runs processes of its own, returns what to say when it passed, or raises StepError."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import gpu_report
from gpu_environment import ROOT, find_tool

PYTHON = sys.executable
FOUND_BY_SANITIZER = 86  # the exit status that it is told to use


class StepError(Exception):
    """Why a step did not pass; the outcome is "failed", "timed out" or "skipped"."""

    def __init__(self, outcome: str, detail: str, failures: Sequence[str] = ()) -> None:
        super().__init__(detail)
        self.outcome, self.detail, self.failures = outcome, detail, list(failures)


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit status, None if it was killed at its limit, and what it printed."""

    status: int | None
    output: str

    def expect_success(self) -> None:
        if self.status != 0:
            lines = self.output.strip().splitlines() or ["no output"]
            raise StepError("failed", f"exit status {self.status}: {lines[-1]}")


def run(command: Sequence[str], limit: float, variables: dict[str, str], log: Path) -> Ended:
    """Runs a command in the source tree for at most `limit` seconds, then kills what is left of its process group."""
    with log.open("ab") as file:
        file.write(f"\n== {' '.join(command)}\n".encode())
        file.flush()
        start = file.tell()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(max(limit, 0))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for the driver may not die
                process.wait(5)
    return Ended(status, log.read_bytes()[start:].decode(errors="replace"))


@dataclass
class Check:
    """What the steps share: the record that they add to, and the time at which the present one must have ended."""

    record: dict[str, Any]
    stem: Path  # of the result files, without their suffix
    scratch: Path
    deadline: float = 0.0

    def file(self, suffix: str) -> Path:
        return self.stem.with_name(self.stem.name + suffix)

    def run(self, *command: str, **variables: str) -> Ended:
        ended = run(command, self.deadline - monotonic(), variables, self.file(".log"))
        if ended.status is None:
            raise StepError("timed out", "killed at its limit")
        return ended

    def write(self) -> None:
        self.record["goals"] = gpu_report.judge(self.record["rows"])
        self.file(".json").write_text(json.dumps(self.record, indent=1) + "\n")
        self.file(".md").write_text(gpu_report.markdown(self.record))


def tool(name: str) -> str:
    path = find_tool(name)
    if path is None:
        raise StepError("skipped", f"{name} was not found on PATH or in CUDA_HOME")
    return path


def need_module(name: str) -> None:
    if find_spec(name) is None:
        raise StepError("skipped", f"the Python package {name} is not installed")


def build(check: Check) -> str:
    tool("nvcc")
    architectures = ";".join(sorted({gpu["capability"] for gpu in check.record["environment"]["gpus"]}, key=float))
    command = (PYTHON, "setup.py", "-q", "build_ext", "--inplace")
    check.run(*command, FUSED_OPS_CUDA="1", TORCH_CUDA_ARCH_LIST=architectures).expect_success()
    return f"for compute capability {architectures}"


def pytest(check: Check, *before: str, arguments: Sequence[str], **variables: str) -> tuple[Ended, str]:
    """Runs the tests that need a GPU; returns what ended and the line that counts them."""
    need_module("pytest")
    selection = ("-m", "cuda", "-q", "--tb=short", "--continue-on-collection-errors")
    ended = check.run(*before, PYTHON, "-m", "pytest", *selection, *arguments, **variables)
    lines = ended.output.strip().splitlines()
    counts = next((line.strip("= ") for line in reversed(lines) if re.search(r"\bin [\d.]+s\b", line)), "no summary")
    return ended, counts


def expect_passes(ended: Ended, counts: str) -> None:
    failures = re.findall(r"^(?:FAILED|ERROR) .*", ended.output, re.MULTILINE)
    if ended.status != 0:
        raise StepError("failed", f"exit status {ended.status}: {counts}", failures[:20])
    if not re.search(r"\b[1-9]\d* passed", counts):
        raise StepError("failed", f"no test ran: {counts}")


def tests(check: Check) -> str:
    # A kernel that fails for good takes the other tests of its process along: several processes, a file in one of them.
    processes = ("-n", "4", "--dist", "loadfile") if find_spec("xdist") else ()
    ended, counts = pytest(check, arguments=("tests", "--maxfail=100", *processes))
    expect_passes(ended, counts)
    return counts


def sanitizer(check: Check, name: str) -> tuple[str, ...]:
    return (
        *(tool("compute-sanitizer"), "--tool", name, "--error-exitcode", str(FOUND_BY_SANITIZER)),
        *("--target-processes", "all", "--report-api-errors", "no"),
    )


# Each tensor in memory of its own, so that nothing lies behind its last element.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def sanitize(check: Check, name: str) -> str:
    arguments = ("tests/test_cuda_device.py", "-k", "short_set")
    ended, counts = pytest(check, *sanitizer(check, name), arguments=arguments, **UNCACHED)
    if "Device not supported" in ended.output:
        raise StepError("skipped", "compute-sanitizer does not support this device or driver")
    if ended.status == FOUND_BY_SANITIZER:
        found = re.findall(r"^========= (?:Error|Warning|Invalid|Program hit|.*hazard).*", ended.output, re.MULTILINE)
        raise StepError("failed", f"{name} found errors", found[:20])
    expect_passes(ended, counts)
    return counts


def memcheck(check: Check) -> str:
    counts = sanitize(check, "memcheck")
    planted = check.run(*sanitizer(check, "memcheck"), PYTHON, "tests/cuda_planted_fault.py", **UNCACHED)
    if planted.status != FOUND_BY_SANITIZER:
        raise StepError("failed", f"memcheck did not find a planted fault: exit status {planted.status}")
    return f"{counts}; a planted access out of bounds is found"


def racecheck(check: Check) -> str:
    return sanitize(check, "racecheck")


def measure(check: Check, *arguments: str) -> str:
    """Runs the benchmark and takes over the rows that it finished, however it ended."""
    folder = Path(tempfile.mkdtemp(dir=check.scratch))
    command = (PYTHON, "benchmarks/bench_optimizers.py", "--device", "cuda", "--no-peers", "--seconds", "1.5")
    selection = ("--optimizers", "AdamW", "RMSprop", "--output", str(folder), *arguments)
    fresh: list[dict[str, Any]] = []
    try:
        ended = check.run(*command, *selection)
    finally:
        result = folder / "optimizers.json"
        if result.exists():
            fresh = json.loads(result.read_text())["rows"]
        rows = {(row["set"], row["optimizer"], row["precision"]): row for row in (*check.record["rows"], *fresh)}
        check.record["rows"] = list(rows.values())
    wrong = [f"{row['optimizer']} {row['precision']}, set {row['set']}" for row in fresh if is_wrong(row)]
    if wrong:
        raise StepError("failed", "a step of fused_ops differs from the float64 oracle", wrong)
    ended.expect_success()
    return f"{len(fresh)} rows"


def is_wrong(row: dict[str, Any]) -> bool:
    return row["contenders"][gpu_report.OURS]["error"] is not None


def benchmark(check: Check) -> str:
    return measure(check, "--sets", *"abcd", "llama", "--precisions", "fp32", "bf16")


def compiled(check: Check) -> str:
    need_module("triton")
    return measure(check, "--sets", "d", "--precisions", "fp32", "--compile")


def plot(check: Check) -> str:
    need_module("matplotlib")
    if not any(row["precision"] == "fp32" for row in check.record["rows"]):
        raise StepError("skipped", "nothing was measured in fp32")
    check.run(PYTHON, "benchmarks/gpu_report.py", str(check.file(".json"))).expect_success()
    return check.file(".png").name


@dataclass(frozen=True)
class Step:
    """`share`: its part of the time that is left, against the shares of the steps still to come."""

    take: Callable[[Check], str]
    share: float
    is_correctness: bool

    @property
    def name(self) -> str:
        return self.take.__name__


STEPS = (
    Step(build, 18, True),
    Step(tests, 14, True),
    Step(memcheck, 5, True),
    Step(racecheck, 3, True),
    Step(benchmark, 9, False),
    Step(compiled, 4, False),
    Step(plot, 1, False),
)
