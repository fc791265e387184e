# SPDX-License-Identifier: Apache-2.0
"""Each instruction-set level of the CPU loops, forced through the environment of a new process: the oracle's values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reference import ULPS

LEVELS = {"baseline": [], "avx2": ["avx2", "fma"], "avx512": ["avx512f", "avx512bw", "avx512vl", "avx512dq"]}
PROGRAM = """
import hashlib, io, json, torch, fused_ops
from reference import *
worst, digest = {}, hashlib.sha256()
for dtype in DTYPES:
    for name in OPTIMIZERS:
        shapes = [(1,), (7,), (16,), (33,), (1025,), (40, 30)]
        problem = Problem(shapes, dtype=dtype, layout=["contiguous"] * 5 + ["every_other"])
        optimizer = BACKENDS["cpu"].make(name, problem.params, **config_of(name, "all"))
        problem.run(optimizer)
        errors = ulps_off(optimizer, problem.params, Oracle.of(name, problem, **config_of(name, "all")))
        worst[f"{name} {dtype}"] = max(float(e.max()) for error in errors for e in error.values())
        for tensors in snapshot(optimizer, problem.params):
            for key in sorted(tensors):
                digest.update(tensors[key].numpy().tobytes())
print(json.dumps({"worst": worst, "digest": digest.hexdigest(), "info": str(fused_ops.build_info())}))
"""


def cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()


def run_at(level: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"FUSED_OPS_CPU_LEVEL": level, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    supported = [level for level, flags in LEVELS.items() if set(flags) <= cpu_flags()]
    results = {level: run_at(level) for level in supported}
    for result in results.values():
        assert result.returncode == 0, result.stderr
    return {level: json.loads(result.stdout.splitlines()[-1]) for level, result in results.items()}


@pytest.mark.parametrize("level", LEVELS)
def test_level_agrees_with_the_oracle(level: str, reports: dict[str, dict[str, Any]]) -> None:
    if level not in reports:
        pytest.skip(f"this CPU has no {level}")
    assert f"'{level}'" in reports[level]["info"]
    assert {key: ulps for key, ulps in reports[level]["worst"].items() if ulps > ULPS} == {}


def test_wider_vectors_give_the_same_bits(reports: dict[str, dict[str, Any]]) -> None:
    """AVX2 and AVX-512 both have fused multiply-add, so only the baseline may round differently."""
    if not {"avx2", "avx512"} <= reports.keys():
        pytest.skip("this CPU has not both")
    assert reports["avx2"]["digest"] == reports["avx512"]["digest"]


def test_unknown_level_is_an_error_that_names_the_known() -> None:
    program = "from reference import *; p = Problem([(3,)]); p.run(BACKENDS['cpu'].make('SGD', p.params))"
    result = run_at("sse9", program)
    assert result.returncode != 0
    assert "FUSED_OPS_CPU_LEVEL" in result.stderr
    assert "avx2" in result.stderr
