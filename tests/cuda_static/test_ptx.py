# SPDX-License-Identifier: Apache-2.0
"""The PTX that nvcc makes of every kernel, interpreted, against the emulation: bit for bit.

Adam's `prepare` calls pow(), of which CUDA's and the host's may differ in the last place; 1 - pow() magnifies that up
to 1 / (1 - beta) times, with the beta of 0.99 used here 100 times. So a rule in double is compared within 256 units in
the last place, one in float, where that vanishes, within 2.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]
from cuda_static import ptx  # noqa: E402
from emulated import build  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc"),
    pytest.mark.skipif(shutil.which(build.compiler()[0]) is None, reason="no C++ compiler"),
]
NVCC = ["nvcc", "-O3", "-std=c++20", "-fmad=false", f"-I{ROOT / 'csrc'}"]


POW_ULPS = {"prepare adam float": 2, "prepare adam double": 256}


@dataclass
class Launch:
    name: str
    blocks: int
    threads: int
    parameters: bytes
    ranges: list[tuple[int, int, bytes, bytes]]  # DType, address, before, after

    @property
    def kernel(self) -> str:
        kind, optimizer, compute, states = self.name.split()
        names = {"adam": "Adam", "rmsprop": "RMSprop", "sgd": "SGD", "adagrad": "Adagrad"}
        return rf"\d{kind}IN.*\d{names[optimizer]}E{compute[0]}Lj{states}E"


def read_launches(path: Path) -> Iterator[Launch]:
    data = memoryview(path.read_bytes())
    at = 0

    def number() -> int:
        nonlocal at
        at += 8
        return struct.unpack_from("<q", data, at - 8)[0]

    def block() -> bytes:
        nonlocal at
        size = number()
        at += size
        return bytes(data[at - size : at])

    while at < len(data):
        name, blocks, threads, parameters = block().decode(), number(), number(), block()
        ranges = [(number(), number(), block(), block()) for _ in range(number())]
        yield Launch(name, blocks, threads, parameters, ranges)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ptx") / "walk.ptx"
    subprocess.run(
        [*NVCC, "-arch=compute_90", "-ptx", str(ROOT / "csrc/core/cuda/walk.cu"), "-o", str(path)], check=True
    )
    return path.read_text()


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[Launch]:
    program = build.program("ptx_cases", "none", ["emulated_walk.cpp", "fibers.cpp", "ptx_cases.cpp"])
    path = tmp_path_factory.mktemp("ptx") / "launches"
    subprocess.run([str(program), str(path)], check=True)
    return list(read_launches(path))


def assert_same(dtype: int, actual: bytes, expected: bytes, ulps: int) -> None:
    """Equal bits, or NaN both; with ulps, values no further apart than that."""
    float_type, integer = [(np.float32, np.int32), (np.float64, np.int64), (np.float16, np.int16), (None, np.int16)][
        dtype
    ]
    a, b = (np.frombuffer(data, integer) for data in (actual, expected))
    if float_type is None:
        nan_a, nan_b = ((x.astype(np.int32) & 0x7FFF) > 0x7F80 for x in (a, b))
    else:
        nan_a, nan_b = (np.isnan(x.view(float_type)) for x in (a, b))
    apart = np.abs(a.astype(np.int64) - b.astype(np.int64))
    differ = (apart > ulps) & ~(nan_a & nan_b)
    assert not differ.any(), f"{int(differ.sum())} of {len(a)} differ, first at {int(np.argmax(differ))}"


def interpret(launch: Launch, source: str) -> ptx.Memory:
    memory = ptx.Memory([(address, before) for _, address, before, _ in launch.ranges])
    kernel = ptx.parse(source, launch.kernel)
    ptx.Machine(kernel, launch.blocks, launch.threads, launch.parameters, memory).run()
    return memory


def test_every_kernel_agrees_with_the_emulation(source: str, launches: list[Launch]) -> None:
    for launch in launches:
        memory = interpret(launch, source)
        assert any(before != after for _, _, before, after in launch.ranges), launch.name
        for dtype, address, _, after in launch.ranges:
            try:
                assert_same(dtype, memory.read(address), after, POW_ULPS.get(launch.name.rsplit(" ", 1)[0], 0))
            except AssertionError as error:
                raise AssertionError(f"{launch.name}: {error}") from error
    kernels = re.findall(r"\.entry (\w+)", source)
    assert {kernel for launch in launches for kernel in kernels if re.search(launch.kernel, kernel)} == set(kernels)


FAULTS = {  # a change of the PTX, and what the interpreter says
    "out of bounds": (r"(ld\.global\.ca\.v4\.u32[^;]*\[%rd\d+)\]", r"\1+1048576]", "out of bounds"),
    "misaligned": (r"(ld\.global\.ca\.v4\.u32[^;]*\[%rd\d+)\]", r"\1+4]", "misaligned"),
    "another rounding": (r"fma\.rn\.f32(.*?);", r"mad_twice.f32\1;", "unknown instruction"),
    "wrong operation": (r"sqrt\.rn\.f32", "abs.f32", "differ"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_seen(name: str, source: str, launches: list[Launch]) -> None:
    launch = next(launch for launch in launches if launch.name == "walk adam float 3")
    pattern, replacement, seen = FAULTS[name]
    changed = re.sub(pattern, replacement, source)
    assert changed != source

    def check() -> None:
        memory = interpret(launch, changed)
        for dtype, address, _, after in launch.ranges:
            assert_same(dtype, memory.read(address), after, 0)

    with pytest.raises((ptx.PtxError, AssertionError), match=seen):
        check()
