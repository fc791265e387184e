# SPDX-License-Identifier: Apache-2.0
"""The PTX that nvcc makes of the epilogues, interpreted, against the emulation: bit for bit.

In double, gelu and softplus call erfc() and log1p(), of which CUDA's and the host's may differ in the last places.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]
from cuda_static import ptx  # noqa: E402
from cuda_static.test_ptx import NVCC, Launch, assert_same, read_launches  # noqa: E402
from emulated import build  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc"),
    pytest.mark.skipif(shutil.which(build.compiler()[0]) is None, reason="no C++ compiler"),
]
LIBM = {"double plain 3", "double gated 3", "double plain 14", "double gated 14"}


def kernel_of(launch: Launch) -> str:
    """The pattern of its mangled name."""
    kind, compute, gated, _ = launch.name.split()
    letter = compute[0]
    return rf"\dsum_rowsI{letter}E" if kind == "sum" else rf"\d{kind}_rowsI\w*?E{letter}Lb{int(gated == 'gated')}E"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ptx") / "epilogue.ptx"
    subprocess.run(
        [*NVCC, "-arch=compute_90", "-ptx", str(ROOT / "csrc/core/cuda/epilogue.cu"), "-o", str(path)], check=True
    )
    return path.read_text()


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[Launch]:
    sources = ["emulated_epilogue.cpp", "fibers.cpp", "epilogue_ptx_cases.cpp"]
    program = build.program("epilogue_ptx_cases", "none", sources)
    path = tmp_path_factory.mktemp("ptx") / "launches"
    subprocess.run([str(program), str(path)], check=True)
    return list(read_launches(path))


def check(launch: Launch, kernel: ptx.Kernel) -> None:
    memory = ptx.Memory([(address, before) for _, address, before, _ in launch.ranges])
    ptx.Machine(kernel, launch.blocks, launch.threads, launch.parameters, memory).run()
    assert any(before != after for _, _, before, after in launch.ranges), launch.name
    for dtype, address, _, after in launch.ranges:
        try:
            if launch.name.partition(" ")[2] in LIBM:
                actual, expected = (np.frombuffer(data, np.float64) for data in (memory.read(address), after))
                np.testing.assert_allclose(actual, expected, rtol=1e-14, atol=1e-15)
            else:
                assert_same(dtype, memory.read(address), after, 0)
        except AssertionError as error:
            raise AssertionError(f"{launch.name}: {error}") from error


def test_every_kernel_agrees_with_the_emulation(source: str, launches: list[Launch]) -> None:
    kernels = {pattern: ptx.parse(source, pattern) for pattern in map(kernel_of, launches)}
    for launch in launches:
        check(launch, kernels[kernel_of(launch)])
    names = re.findall(r"\.entry (\w+)", source)
    assert {name for pattern in kernels for name in names if re.search(pattern, name)} == set(names)


FAULTS = {  # a change of the PTX, and what the interpreter says
    "out of bounds": (r"(ld\.global\.cs\.v4\.u32[^;]*\[%rd\d+)\]", r"\1+1048576]", "out of bounds"),
    "misaligned": (r"(st\.global\.wb\.v4\.u32 *\[%rd\d+)\]", r"\1+4]", "misaligned"),
    "wrong operation": (r"rcp\.rn\.f32", "sqrt.rn.f32", "differ"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_seen(name: str, source: str, launches: list[Launch]) -> None:
    pattern, replacement, seen = FAULTS[name]
    changed = re.sub(pattern, replacement, source)
    assert changed != source
    launch = next(launch for launch in launches if launch.name == "differentiate float gated 5")
    with pytest.raises((ptx.PtxError, AssertionError), match=seen):
        check(launch, ptx.parse(changed, kernel_of(launch)))
