# SPDX-License-Identifier: Apache-2.0
"""The emulated CUDA kernels under sanitizers, and planted faults that each detector must see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulated import build

pytestmark = pytest.mark.skipif(shutil.which(build.compiler()[0]) is None, reason="no C++ compiler")

ORDERS = [
    pytest.param("forward", marks=pytest.mark.slow),
    pytest.param("backward", marks=pytest.mark.slow),
    "shuffled",
]
ONE_RULE = "sgd momentum"
NO_FMA = 77


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    result = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    if result.returncode == NO_FMA:
        pytest.skip(result.stdout.strip())
    return result


@pytest.mark.slow
@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_kernels_agree_with_the_cpu_and_touch_only_their_tensors(order: str) -> None:
    result = run(build.program("walk", "address"), order)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]


def one_rule(folder: Path) -> Path:
    """A copy of the sources in which only one rule's kernels are compiled."""
    shutil.copytree(build.ROOT / "csrc" / "core", folder / "core")
    replace(
        folder / "core/cuda/walk.cu",
        "    error = in_double ? run<Optimizer, double, kStates>(walk) : run<Optimizer, float, kStates>(walk);",
        "    if constexpr (std::is_same_v<Optimizer, SGD> && kStates == 1)\n"
        "      error = in_double ? run<Optimizer, double, kStates>(walk) : run<Optimizer, float, kStates>(walk);",
    )
    return folder


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} must hold this once, to be replaced: {old}"
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_kernels_of_one_rule(sanitizer: str, tmp_path: Path) -> None:
    result = run(build.program("one_rule", sanitizer, csrc=one_rule(tmp_path / "csrc")), "shuffled", ONE_RULE)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]


@dataclass(frozen=True)
class Fault:
    file: str
    old: str
    new: str
    seen: str  # in what the program prints
    sanitizer: str = "address"


FAULTS = {
    "out of bounds": Fault(
        "walk.cuh",
        "int vectors_end = end / kElements<T> * kElements<T>;",
        "int vectors_end = (end + kElements<T> - 1) / kElements<T> * kElements<T>;",
        "buffer-overflow",
    ),
    "misaligned": Fault(
        "walk.cu",
        "(address - uintptr_t(phase * size_of(dtype))) % kVectorBytes == 0",
        "(address - uintptr_t(phase * size_of(dtype))) % 4 == 0",
        "misaligned address",
    ),
    "wrong tail": Fault(
        "walk.cuh",
        "const int singles = head + end - vectors_end;",
        "const int singles = head + (end - vectors_end) / 2;",
        "differs from the CPU",
    ),
    "wrong head": Fault(
        "walk.cuh",
        "int vectors_begin = origin < 0 ? kElements<T> : 0;",
        "int vectors_begin = 0;",
        "differs from the CPU|overflow",
    ),
    "32-bit overflow": Fault(
        "walk.cuh",
        "const int64_t origin = int64_t(chunk_index - record.first_chunk) * chunk - traits.phase;",
        "const int64_t origin = (chunk_index - record.first_chunk) * chunk - int(traits.phase);",
        "signed integer overflow",
    ),
    "dropped stream": Fault("walk.cu", "static_cast<cudaStream_t>(stream)", "nullptr", "another stream"),
    "unchecked launch": Fault(
        "walk.cu",
        "if (const int error = run()) return error;",
        "run();",
        "a failed launch is not reported",
    ),
    "lost rule": Fault(
        "walk.cu", "<const Rule*>(walk_.workspace) + first_item", "<const Rule*>(walk_.workspace)", "differs from"
    ),
    "metadata off by one": Fault("walk.cuh", ".first_chunk <= chunk)", ".first_chunk < chunk)", "FAIL|overflow"),
    "full metadata": Fault(
        "walk.cu", "parameters_.kWords) {", "parameters_.kWords + 5) {", "FAIL|runtime error|overflow|SEGV"
    ),
    "narrow accesses": Fault(
        "walk.cu",
        "item.layout ? Path::kStrided : phase < 0",
        "item.layout ? Path::kStrided : phase <= 0",
        "fewer than 16",
    ),
    "found_inf ignored": Fault(
        "walk.cuh",
        "if (parameters.found_inf && *parameters.found_inf != 0) return;",
        "",
        "differs from the CPU|overflow",
    ),
    "counters raced": Fault(
        "walk.cuh",
        "double(atomicAdd(parameters.step[index].counter, 1.0f) + 1.0f)",
        "double(*parameters.step[index].counter += 1.0f)",
        "data race",
        "thread",
    ),
    "two threads on one element": Fault(
        "walk.cuh", "int(threadIdx.x) * (interleaved", "int(threadIdx.x / 2) * (interleaved", "data race", "thread"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    csrc = one_rule(tmp_path / "csrc")
    replace(csrc / "core/cuda" / fault.file, fault.old, fault.new)
    result = run(build.program(f"fault {name}", fault.sanitizer, csrc=csrc), "forward", ONE_RULE)
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert any(text in output for text in fault.seen.split("|")), output[-4000:]


BARRIER_FAULTS = [
    (0, "address", ""),
    (0, "thread", ""),
    (1, "thread", "data race"),
    (2, "address", "divergent barrier: some threads have ended"),
    (3, "address", "divergent barrier: threads wait at different ones"),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("fault", "sanitizer", "seen"), BARRIER_FAULTS)
def test_barriers(fault: int, sanitizer: str, seen: str, order: str) -> None:
    name = f"barriers {fault}"
    program = build.program(name, sanitizer, ["barriers.cpp", "fibers.cpp"], flags=[f"-DFAULT={fault}"])
    result = run(program, order)
    assert (result.returncode == 0) == (seen == ""), result.stderr[-4000:]
    assert seen in result.stderr
