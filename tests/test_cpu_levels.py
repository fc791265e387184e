# SPDX-License-Identifier: Apache-2.0
"""Each instruction-set level of the CPU loops, forced through the environment of a new process: the oracle's values,
and of the wider ones the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reference import ULPS

AVX512 = ["avx512f", "avx512bw", "avx512vl", "avx512dq"]
LEVELS = {"baseline": [], "avx2": ["avx2", "fma"], "avx512": AVX512, "avx512_bf16": [*AVX512, "avx512_bf16"]}
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
# The first step of SGD with momentum stores the gradient as it is: any float32 number can be sent through its rounding
# to bfloat16, which is compared here, bit for bit, with the textbook's, of integers.
NARROWING = """
import sys, torch, fused_ops

def rounded(bits):
    special = (bits & 0x7fffffff) > 0x7f800000
    result = torch.where(special, bits | 0x00400000, bits + 0x7fff + (bits >> 16 & 1)) >> 16
    return result.masked_fill(bits == -(1 << 31), 0).to(torch.int16)  # 0 + -0

def check(bits, offset=0):
    n, bits = bits.numel(), bits.to(torch.int32)
    grad = torch.empty(n + offset)[offset:].copy_(bits.view(torch.float32))
    param = torch.zeros(n + offset)[offset:].requires_grad_()
    param.grad = grad
    optimizer = fused_ops.optim.SGD([param], lr=0.0, momentum=0.5, state_dtype=torch.bfloat16)
    optimizer.step()
    buffer = optimizer.state[param]["momentum_buffer"]
    assert buffer.dtype == torch.bfloat16
    stored = buffer.view(torch.int16)
    wrong = (stored != rounded(bits)).nonzero().flatten()
    assert not len(wrong), [(hex(int(bits[i])), hex(int(stored[i]))) for i in wrong[:5]]

if sys.argv[1] == "all":
    for first in range(-(1 << 31), 1 << 31, 1 << 22):
        check(torch.arange(first, first + (1 << 22), dtype=torch.int32))
else:
    generator = torch.Generator().manual_seed(5)
    lower = torch.tensor([0, 1, 0x1234, 0x7fff, 0x8000, 0x8001, 0xffff])
    bits = (torch.arange(1 << 16)[:, None] << 16 | lower).flatten()
    check(bits)
    check(bits[torch.randperm(len(bits), generator=generator)])
    normal = 0x3f000000 + torch.randint(1 << 24, (64,), generator=generator)
    odd_ones = [0x00000001, 0x80000001, 0x00008000, 0x007fffff, 0x807fffff, 0x7f800001, 0xffc12345, 0x7f800000, 0]
    for n in range(1, 41):
        for offset in (0, 1, 3):
            for place in range(n):
                mixed = normal[:n].clone()
                mixed[place] = odd_ones[(n + place + offset) % len(odd_ones)]
                check(mixed, offset)
"""

# Of every activation, gated or not, all results, whose inputs have every upper half of a float: subnormal numbers,
# infinities and NaN too.
LAYERS = """
import hashlib, torch, fused_ops
from fused_ops import functional
generator = torch.Generator().manual_seed(11)
digest = hashlib.sha256()
every = (torch.arange(1 << 16) << 16 | 0x4321).to(torch.int32).view(torch.float32)
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for activation in fused_ops.nn.ACTIVATIONS:
        x = every.to(dtype).view(-1, 1).requires_grad_()
        one = torch.ones(1, 1, dtype=dtype)
        y = functional.linear_act(x, one, None, activation)
        gradient, = torch.autograd.grad(y, x, torch.ones_like(y))
        tensors = [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in
                   ((37, 19), (45, 19), (45, 19), (45,), (45,))]
        gated = functional.gated_linear(*tensors, activation=activation)
        for result in (y, gradient, gated, *torch.autograd.grad(gated.sum(), tensors)):
            digest.update(result.detach().nan_to_num(7.0).contiguous().view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()


def run_at(level: str, program: str = PROGRAM, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"FUSED_OPS_CPU_LEVEL": level, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
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
    """All but the baseline have fused multiply-add, so only that may round differently."""
    digests = {level: report["digest"] for level, report in reports.items() if level != "baseline"}
    if len(digests) < 2:
        pytest.skip("this CPU has not two of them")
    assert len(set(digests.values())) == 1, digests


def test_wider_vectors_give_the_same_bits_in_layers() -> None:
    supported = [level for level in LEVELS if level != "baseline" and set(LEVELS[level]) <= cpu_flags()]
    if len(supported) < 2:
        pytest.skip("this CPU has not two of them")
    results = {level: run_at(level, LAYERS) for level in supported}
    assert {result.returncode for result in results.values()} == {0}, results
    assert len({result.stdout for result in results.values()}) == 1, results


def check_narrowing(level: str, which: str) -> None:
    if not set(LEVELS[level]) <= cpu_flags():
        pytest.skip(f"this CPU has no {level}")
    result = run_at(level, NARROWING, which)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_rounding_to_bfloat16_is_exact(level: str) -> None:
    """Every upper half of a float32, every kind of lower half; subnormals, infinities and NaN between other numbers."""
    check_narrowing(level, "some")


@pytest.mark.large
@pytest.mark.skipif(os.environ.get("FUSED_OPS_LARGE_TESTS") != "1", reason="minutes: set FUSED_OPS_LARGE_TESTS=1")
@pytest.mark.parametrize("level", LEVELS)
def test_rounding_to_bfloat16_is_exact_for_every_float(level: str) -> None:
    check_narrowing(level, "all")


def test_unknown_level_is_an_error_that_names_the_known() -> None:
    program = "from reference import *; p = Problem([(3,)]); p.run(BACKENDS['cpu'].make('SGD', p.params))"
    result = run_at("sse9", program)
    assert result.returncode != 0
    assert "FUSED_OPS_CPU_LEVEL" in result.stderr
    assert "avx2" in result.stderr
