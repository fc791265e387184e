# SPDX-License-Identifier: Apache-2.0
"""Each instruction-set level of the CPU loops, forced through the environment of a new process: the oracle's values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LEVELS = {"baseline": [], "avx2": ["avx2", "fma"], "avx512": ["avx512f", "avx512bw", "avx512vl", "avx512dq"]}
PROGRAM = """
import json
import torch
from reference import *
worst = {}
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
    for name, config in ALL_CONFIGS:
        shapes = [(1,), (7,), (16,), (33,), (1025,), (40, 30)]
        problem = Problem(shapes, dtype=dtype, layout=["contiguous"] * 5 + ["every_other"])
        kwargs = config_of(name, config)
        optimizer = BACKENDS["cpu"].make(name, problem.params, **kwargs)
        problem.run(optimizer)
        errors = ulps_off(optimizer, problem.params, Oracle.of(name, problem, **kwargs))
        worst[f"{name}-{config}-{dtype}"] = max(float(e.max()) for error in errors for e in error.values())
import fused_ops
print(json.dumps({"worst": worst, "info": {k: str(v) for k, v in fused_ops.build_info().items()}}))
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


@pytest.mark.parametrize("level", LEVELS)
def test_level_agrees_with_the_oracle(level: str) -> None:
    if not set(LEVELS[level]) <= cpu_flags():
        pytest.skip(f"this CPU has no {level}")
    result = run_at(level)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert level in json.dumps(report["info"])
    assert {key: ulps for key, ulps in report["worst"].items() if ulps > 2} == {}


def test_unknown_level_is_an_error_that_names_the_known() -> None:
    program = "from reference import *; p = Problem([(3,)]); p.run(BACKENDS['cpu'].make('SGD', p.params))"
    result = run_at("sse9", program)
    assert result.returncode != 0
    assert "FUSED_OPS_CPU_LEVEL" in result.stderr
    assert "avx2" in result.stderr
