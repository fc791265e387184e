# SPDX-License-Identifier: Apache-2.0
"""The emulated CUDA epilogues under sanitizers, and planted faults that each detector must see."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from emulated import build
from emulated.test_programs import Fault, replace, run

pytestmark = pytest.mark.skipif(shutil.which(build.compiler()[0]) is None, reason="no C++ compiler")


def few_activations(folder: Path) -> Path:
    """A copy of the sources in which the kernels know two activations, those of the program's brief mode."""
    shutil.copytree(build.ROOT / "csrc" / "core", folder / "core")
    replace(
        folder / "core/cuda/epilogue.cuh",
        "    if constexpr (kEnd - kBegin == 1)",
        "    if (activation == 3)\n"
        "      visitor.template operator()<GELU>();\n"
        "    else if (activation == 8)\n"
        "      visitor.template operator()<Sigmoid>();\n"
        "    else if constexpr (true) {\n"
        "    } else if constexpr (kEnd - kBegin == 1)",
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("shuffled",), ("forward", "brief"), ("backward", "brief")])
def test_kernels_agree_with_plain_loops(arguments: tuple[str, ...]) -> None:
    result = run(build.program("epilogue", "address", build.EPILOGUE_PROGRAM), *arguments)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_kernels_of_two_activations(sanitizer: str, tmp_path: Path) -> None:
    csrc = few_activations(tmp_path / "csrc")
    program = build.program("few_activations", sanitizer, build.EPILOGUE_PROGRAM, csrc)
    result = run(program, "shuffled", "brief")
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]


FAULTS = {
    "out of bounds": Fault(
        "epilogue.cuh", "if (end > matrix_rows) end = matrix_rows;", "", "buffer-overflow|SEGV|use-after"
    ),
    "columns out of bounds": Fault(
        "epilogue.cuh", "const bool any = column < matrix_columns &&", "const bool any =", "buffer-overflow|SEGV"
    ),
    "misaligned": Fault("epilogue.cu", "if (!aligned) division.width = 1;", "", "misaligned address"),
    "wrong tail": Fault("epilogue.cuh", "if (i < rows) store_one(", "if (i + 1 < rows) store_one(", "differs"),
    "wrong tail of a sum": Fault(
        "epilogue.cuh", "if (i < rows) sum[0]", "if (i + 1 < rows) sum[0]", "differs in column"
    ),
    "32-bit overflow": Fault(
        "epilogue.cuh",
        "column = (int64_t(column_block) * division.lanes + lane) * division.width;",
        "column = (column_block * division.lanes + lane) * division.width;",
        "signed integer overflow",
    ),
    "dropped stream": Fault("epilogue.cu", "static_cast<cudaStream_t>(stream)", "nullptr", "another stream"),
    "unchecked launch": Fault(
        "epilogue.cu",
        "if (const int error = launch_pass<T>(kernel, pass, division, stream)) return error;",
        "launch_pass<T>(kernel, pass, division, stream);",
        "a failure is not reported",
    ),
    "narrow accesses": Fault(
        "epilogue.cu", "stride % vector == 0 ? vector : 1", "stride % vector == 7 ? vector : 1", "fewer than 16"
    ),
    "order of the sums": Fault(
        "epilogue.cu",
        "if (!aligned) division.width = 1;",
        "if (!aligned) division.width = 1, division.block_rows /= 2, division.row_blocks *= 2;",
        "sums differ|overflow",
    ),
    "missing barrier": Fault(
        "epilogue.cuh",
        "  __syncthreads();\n  if (thread >= lanes) return;",
        "  if (thread >= lanes) return;",
        "data race",
        "thread",
    ),
    "divergent barrier": Fault(
        "epilogue.cuh", "if (groups == 1) return;", "if (groups == 1 || threadIdx.x == 0) return;", "divergent barrier"
    ),
    "read after another's write": Fault(
        "epilogue.cuh",
        "row = row_block * division.block_rows + group;",
        "row = row_block * division.block_rows + group / 2;",
        "data race",
        "thread",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    csrc = few_activations(tmp_path / "csrc")
    replace(csrc / "core/cuda" / fault.file, fault.old, fault.new)
    program = build.program(f"epilogue fault {name}", fault.sanitizer, build.EPILOGUE_PROGRAM, csrc)
    result = run(program, "forward", "brief")
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert any(text in output for text in fault.seen.split("|")), output[-4000:]
