# SPDX-License-Identifier: Apache-2.0
"""The native activations, compiled for each instruction set: their error over the whole range, and torch's values at
kinks, infinities and NaN."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cpu_levels import LEVELS, cpu_flags
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
# Of values and of derivatives, in epsilons; see tests/native/activation_accuracy.cpp.
BOUNDS = {"baseline": (3, 3), "avx2": (2.25, 2.5), "avx512": (2.25, 2.5)}
BOUNDS_16 = (1, 1)
# Exact but for the rounding of a parameter, or of a product or two.
PLAIN = {"identity", "relu", "relu_squared", "leaky_relu", "hardtanh", "relu6", "hardswish", "hardsigmoid"}

INFINITY, NAN = math.inf, math.nan
POINTS = [-INFINITY, -3e38, -1e30, -200.0, -104.0, -88.0, -20.5, -6.0, -3.0, -1.0, -0.75, -1e-3, -1e-30, -1e-40, -0.0]
POINTS += [0.0, 1e-40, 1e-30, 1e-3, 1.0, 3.0, 4.0, 6.0, 20.0, 20.5, 88.0, 1e30, 3e38, INFINITY, NAN]

Function = Callable[..., Tensor]
TORCH: dict[str, Function] = {
    "identity": lambda x: x * 1,
    "relu": functional.relu,
    "relu_squared": lambda x: torch.square(functional.relu(x)),
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "mish": functional.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "selu": functional.selu,
    "celu": functional.celu,
    "softplus": functional.softplus,
    "hardtanh": functional.hardtanh,
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
}
PARAMETER_COUNT = {"leaky_relu": 1, "elu": 1, "celu": 1, "softplus": 2, "hardtanh": 2}
# The derivative at NaN is one side's, or NaN, in torch as well: that differs between its loops for one and for many.
KINKED = {"relu", "relu6", "hardtanh", "hardsigmoid", "leaky_relu", "hardswish", "elu", "selu", "celu"}


def compile_program(directory: Path, level: str, *include_first: Path, optimize: str = "-O3") -> Path:
    program = directory / f"activation_accuracy_{level}"
    includes = [f"-I{path}" for path in (*include_first, ROOT / "csrc")]
    source = str(ROOT / "tests/native/activation_accuracy.cpp")
    define = f"-DTEST_{level.upper()}"
    compiler = [os.environ.get("CXX", "g++"), *FLAGS, optimize]
    subprocess.run([*compiler, define, *includes, source, "-o", str(program)], check=True)
    return program


def run(program: Path, *arguments: object) -> list[dict[str, Any]]:
    result = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("needs a C++ compiler")
    directory = tmp_path_factory.mktemp("native")
    return {level: compile_program(directory, level) for level in BOUNDS if set(LEVELS[level]) <= cpu_flags()}


def beyond_bounds(level: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def is_beyond(row: dict[str, Any]) -> bool:
        value, derivative = BOUNDS_16 if row["type"] == "16 bits" else BOUNDS[level]
        return row["value"] > value or row["derivative"] > derivative

    return [*filter(is_beyond, rows)]


def check_sweep(programs: dict[str, Path], points: int) -> None:
    reports = {level: run(program, "sweep", points) for level, program in programs.items()}
    for level, (*rows, impostor, impostor16) in reports.items():
        assert beyond_bounds(level, rows) == []
        assert [row for row in rows if row["activation"] in PLAIN and max(row["value"], row["derivative"]) > 1.5] == []
        assert {(row["activation"], row["type"]) for row in rows} == {
            *((a, t) for a in TORCH for t in ("float32", "float64")),
            ("gelu", "16 bits"),
        }
        impostors = [impostor, impostor16]
        assert beyond_bounds(level, impostors) == impostors, "GELU's approximation passed for GELU"
    digests = {level: [row["digest"] for row in rows] for level, rows in reports.items() if level != "baseline"}
    assert len(set(map(tuple, digests.values()))) <= 1, "AVX2 and AVX-512 give different bits"


def test_error_is_within_bounds(programs: dict[str, Path]) -> None:
    check_sweep(programs, 1 << 18)


@pytest.mark.slow
def test_error_is_within_bounds_at_many_points(programs: dict[str, Path]) -> None:
    check_sweep(programs, 1 << 24)


# A digit of a coefficient or a constant, in math.h or activations.h, and what must be seen to be wrong.
MUTANTS = {
    "exponential, third order": ("0x1.5554a8p-3f", "0x1.5556a8p-3f", "sigmoid"),
    "exponential, last order": ("0x1.6ac176p-10f", "0x1.9ac176p-10f", "silu"),
    "ln 2, low part": ("0x1.7f7d1cp-20f", "0x1.6f7d1cp-20f", "elu"),
    "logarithm": ("0x1.554dd4p-2f", "0x1.554fd4p-2f", "softplus"),
    "Mills ratio": ("0x1.427306p-1f", "0x1.427316p-1f", "gelu"),
    "end of the tail": ("T(14.45)", "T(12)", "gelu"),
    "exponent for 16 bits": ("0x1.df3572p-5f", "0x1.df8572p-5f", "gelu"),
    "power for 16 bits": ("0x1.ca144p-5f", "0x1.ca344p-5f", "gelu"),
    "ratio for 16 bits": ("0x1.b91db8p-5f", "0x1.b99db8p-5f", "gelu"),
    "end for 16 bits": ("kEnd = 12.8f", "kEnd = 12.7f", "gelu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_constant_is_seen(mutant: str, programs: dict[str, Path], tmp_path: Path) -> None:
    right, wrong, activation = MUTANTS[mutant]
    level = list(programs)[-1]
    texts = {name: (ROOT / "csrc/core" / name).read_text() for name in ("math.h", "activations.h")}
    (name,) = (name for name, text in texts.items() if right in text)
    assert texts[name].count(right) == 1
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / name).write_text(texts[name].replace(right, wrong))
    *rows, _, _ = run(compile_program(tmp_path, level, tmp_path, optimize="-O1"), "sweep", 1 << 15)
    assert activation in {row["activation"] for row in beyond_bounds(level, rows)}


def torch_at(name: str, parameters: list[float], x: float) -> tuple[float, float]:
    leaf = torch.tensor(x, dtype=torch.float32).double().requires_grad_()
    value = TORCH[name](leaf, *parameters[: PARAMETER_COUNT.get(name, 0)])
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad.item()


def agrees(ours: float, theirs: float, relative: float, absolute: float) -> bool:
    theirs = torch.tensor(theirs).float().item()  # where a large number is infinite
    if math.isnan(theirs) or math.isinf(theirs):
        return ours == theirs or (math.isnan(ours) and math.isnan(theirs))
    return abs(ours - theirs) <= max(relative * abs(theirs), absolute)


@pytest.mark.parametrize("level", BOUNDS)
def test_special_points_are_torch_s(level: str, programs: dict[str, Path]) -> None:
    if level not in programs:
        pytest.skip(f"this CPU has no {level}")
    wrong = []
    for row in run(programs[level], "at", *POINTS):
        name, x, ours = row["activation"], float(row["x"]), float(row["value"])
        value, derivative = torch_at(name, row["parameters"], x)
        unit = 2.0**-17 if row["type"] == "16 bits" else 0.0
        if not agrees(ours, value, 4e-7, max(1e-42, unit * abs(x))) or (
            ours == 0 and math.copysign(1, ours) != math.copysign(1, value)
        ):
            wrong.append((row, value))
        if (name in KINKED and math.isnan(x)) or (name == "gelu_tanh" and 1e20 < abs(x) < INFINITY):
            continue  # in the latter, torch cubes x to infinity and multiplies that by 0
        # Near zero the terms of a derivative may cancel; of sigmoid and tanh it is taken at a value in float32; torch
        # itself rounds 1 / alpha to float32 for the derivative of celu.
        absolute = max(unit, 3e-7 if abs(x) <= 1 or name in ("sigmoid", "tanh") else 1e-41)
        if not agrees(float(row["derivative"]), derivative, 4e-6 if name == "celu" else 4e-7, absolute):
            wrong.append((row, derivative))
    assert wrong == []
