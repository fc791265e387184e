# SPDX-License-Identifier: Apache-2.0
"""The limits on the epilogues' machine code, their part of docs/sass.md, and worse code that they must refuse."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from cuda_static import sass, sass_epilogue  # noqa: E402
from cuda_static.test_sass import missing, replace  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.mark.parametrize("architecture", sass.GPUS)
def test_every_kernel_is_within_the_limits(architecture: int) -> None:
    gpu, kernels = sass.GPUS[architecture], sass_epilogue.compile_kernels(architecture)
    assert len(kernels) == 10
    assert {kernel.name: list(kernel.faults(gpu)) for kernel in kernels if any(kernel.faults(gpu))} == {}
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    if "release 13.0" in version:
        page = sass.PAGE.read_text()
        assert sass_epilogue.table(architecture, kernels) in page, "run: python tests/cuda_static/sass.py --write"


FAULTS = {
    "spills": ("cuda/epilogue.cuh", "(kGated ? 5 : 7)", "16", "spills"),
    "fp64": (
        "cuda/epilogue.cuh",
        "value[i] += bias[i];",
        "value[i] = T(double(value[i]) * 1.1 + double(bias[i]));",
        "fp64",
    ),
    "few bytes in flight": (
        "cuda/parameters.h",
        "constexpr int kThreads = 128;",
        "constexpr int kThreads = 32;",
        "in flight",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_worse_code_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, seen = FAULTS[name]
    if name == "few bytes in flight":
        monkeypatch.setattr(sass_epilogue, "THREADS", 32)
        monkeypatch.setattr(sass_epilogue, "MAX_BLOCKS", 4)
    shutil.copytree(ROOT / "csrc/core", tmp_path / "core")
    replace(tmp_path / "core" / file, old, new)
    kernels = sass_epilogue.compile_kernels(90, tmp_path / "core/cuda/epilogue.cu")
    faults = [fault for kernel in kernels for fault in kernel.faults(sass.GPUS[90])]
    assert any(seen in fault for fault in faults), faults
