# SPDX-License-Identifier: Apache-2.0
"""The limits on the CUDA kernels' machine code, docs/sass.md, and code made worse on purpose that they must refuse."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from cuda_static import sass  # noqa: E402


def missing() -> str | None:
    if shutil.which("nvcc") is None:
        return "no nvcc"
    try:
        sass.tool()
    except FileNotFoundError as error:
        return str(error)
    return None


pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module", params=sass.GPUS)
def compiled(request: pytest.FixtureRequest) -> tuple[int, list[sass.Kernel]]:
    return request.param, sass.compile_kernels(request.param)


def test_every_kernel_is_within_the_limits(compiled: tuple[int, list[sass.Kernel]]) -> None:
    architecture, kernels = compiled
    assert len(kernels) == 18
    assert {
        k.name: list(k.faults(sass.GPUS[architecture])) for k in kernels if any(k.faults(sass.GPUS[architecture]))
    } == {}


def test_the_page_is_up_to_date(compiled: tuple[int, list[sass.Kernel]]) -> None:
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    if "release 13.0" not in version:
        pytest.skip("docs/sass.md was written with CUDA 13.0")
    assert sass.table(*compiled) in sass.PAGE.read_text(), "run: python tests/cuda_static/sass.py --write"


FAULTS = {
    "spills": ("cuda/parameters.h", "(kOperands < 4 ? 8 : 11 - kOperands)", "16", "spills"),
    "narrow accesses": (
        "cuda/walk.cuh",
        "    store(address + gap, pack(value[4], value[5], value[6], value[7]));",
        "    for (int i = 0; i < 4; ++i) store(address + gap + 4 * i, value[4 + i]);",
        "fewer than 16 bytes",
    ),
    "fp64 in the loop": ("math.h", "return ::sqrtf(x);", "return float(::sqrt(double(x)));", "fp64 instructions"),
    "low occupancy": (
        "cuda/parameters.h",
        "constexpr int kThreads = 128;",
        "constexpr int kThreads = 32;",
        "in flight",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_worse_code_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, seen = FAULTS[name]
    shutil.copytree(ROOT / "csrc/core", tmp_path / "core")
    only = "    error = in_double ? run<Optimizer, double, kStates>(walk) : run<Optimizer, float, kStates>(walk);"
    replace(tmp_path / "core/cuda/walk.cu", only, f"    if constexpr (std::is_same_v<Optimizer, Adam>)\n  {only}")
    replace(tmp_path / "core" / file, old, new)
    if name == "low occupancy":
        monkeypatch.setattr(sass, "THREADS", 32)
        monkeypatch.setattr(sass, "MAX_BLOCKS", 4)
    kernels = sass.compile_kernels(90, tmp_path / "core/cuda/walk.cu")
    faults = [fault for kernel in kernels if kernel.compute == "float" for fault in kernel.faults(sass.GPUS[90])]
    assert any(seen in fault for fault in faults), faults


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} must hold this once, to be replaced: {old}"
    path.write_text(text.replace(old, new))
