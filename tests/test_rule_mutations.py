# SPDX-License-Identifier: Apache-2.0
"""The test of the native walk test: a constant, sign or operator of a rule that is wrong must make it fail."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
# walk.cpp names the loops of every level; those of the baseline are the ones that run.
OTHER_LEVELS = """#include "core/cpu/walk.h"
namespace fused_ops {
namespace avx2 { cpu::WalkFunction find_walk(int, unsigned, bool) { return nullptr; } }
namespace avx512 { cpu::WalkFunction find_walk(int, unsigned, bool) { return nullptr; } }
namespace avx512_bf16 { cpu::WalkFunction find_walk(int, unsigned, bool) { return nullptr; } }
}
"""

ADAM = ("adam", "adamw")
# File, what it says and what it says in its place, and the optimizers whose cases must fail, and no others.
MUTANTS: list[tuple[str, str, str, Sequence[str]]] = [
    ("adam.h", "decoupled_weight_decay != 0 ? 0 :", "decoupled_weight_decay == 0 ? 0 :", ADAM),
    ("adam.h", "h.lr * h.weight_decay : 0", "h.weight_decay : 0", ["adamw"]),
    ("adam.h", "h.lr * h.weight_decay : 0", "-h.lr * h.weight_decay : 0", ["adamw"]),
    ("adam.h", "one_minus_beta1(T(1 - h.beta1))", "one_minus_beta1(T(h.beta1))", ADAM),
    ("adam.h", "beta2(T(h.beta2))", "beta2(T(h.beta1))", ADAM),
    ("adam.h", "one_minus_beta2(T(1 - h.beta2))", "one_minus_beta2(T(1 - h.beta1))", ADAM),
    ("adam.h", "h.lr / (1 - ::pow(h.beta1, step))", "h.lr / (1 - ::pow(h.beta1, step + 1))", ADAM),
    ("adam.h", "h.lr / (1 - ::pow(h.beta1, step))", "h.lr * (1 - ::pow(h.beta1, step))", ADAM),
    ("adam.h", "1 / ::sqrt(1 - ::pow(h.beta2, step))", "1 / ::sqrt(1 - ::pow(h.beta2, step - 1))", ADAM),
    ("adam.h", "1 / ::sqrt(1 - ::pow(h.beta2, step))", "1 / (1 - ::pow(h.beta2, step))", ADAM),
    ("adam.h", "add_decay(coupled_decay, param,", "add_decay(-coupled_decay, param,", ["adam"]),
    ("adam.h", "fma(one_minus_beta2 * grad, grad,", "fma(one_minus_beta2, grad,", ADAM),
    ("adam.h", "beta2 * exp_avg_sq)", "-beta2 * exp_avg_sq)", ADAM),
    ("adam.h", "= maximum(state[kMaxExpAvgSq], exp_avg_sq)", "= exp_avg_sq", ADAM),
    ("adam.h", "second_moment = state[kMaxExpAvgSq] =", "state[kMaxExpAvgSq] =", ADAM),
    ("adam.h", "fma(sqrt(second_moment), rsqrt_bias2, eps)", "(sqrt(second_moment) + eps) * rsqrt_bias2", ADAM),
    ("adam.h", "param - fma(decoupled_decay, param, step)", "param + fma(decoupled_decay, param, step)", ADAM),
    ("rmsprop.h", "one_minus_alpha(T(1 - h.alpha))", "one_minus_alpha(T(1 + h.alpha))", ["rmsprop"]),
    ("rmsprop.h", "alpha * square_avg)", "square_avg)", ["rmsprop"]),
    ("rmsprop.h", "fma(one_minus_alpha * grad, grad,", "fma(alpha * grad, grad,", ["rmsprop"]),
    ("rmsprop.h", "fma(-grad_avg, grad_avg, square_avg)", "fma(grad_avg, grad_avg, square_avg)", ["rmsprop"]),
    ("rmsprop.h", "lerp(grad_avg, grad, one_minus_alpha)", "lerp(grad, grad_avg, one_minus_alpha)", ["rmsprop"]),
    ("rmsprop.h", "sqrt(variance) + eps", "sqrt(variance + eps)", ["rmsprop"]),
    ("rmsprop.h", "fma(momentum, state[kMomentumBuffer], update)", "fma(momentum, update, state[kMomentumBuffer])",
     ["rmsprop"]),
    ("rmsprop.h", "update = state[kMomentumBuffer] =", "state[kMomentumBuffer] =", ["rmsprop"]),
    ("rmsprop.h", "fma(-lr, update, param)", "fma(lr, update, param)", ["rmsprop"]),
    ("sgd.h", "step > 1 ? h.momentum : 0", "step > 0 ? h.momentum : 0", ["sgd"]),
    ("sgd.h", "step > 1 ? 1 - h.dampening : 1", "step > 2 ? 1 - h.dampening : 1", ["sgd"]),
    ("sgd.h", "1 - h.dampening", "1 + h.dampening", ["sgd"]),
    ("sgd.h", "h.nesterov != 0 ? h.momentum : 0", "0", ["sgd"]),
    ("sgd.h", "fma(nesterov_momentum, buffer, grad)", "fma(nesterov_momentum, grad, buffer)", ["sgd"]),
    ("sgd.h", "fma(-lr, update, param)", "fma(-lr, grad, param)", ["sgd"]),
    ("adagrad.h", "(step - 1) * h.lr_decay", "step * h.lr_decay", ["adagrad"]),
    ("adagrad.h", "h.lr / (1 + ", "h.lr * (1 + ", ["adagrad"]),
    ("adagrad.h", "fma(grad, grad, sum)", "fma(-grad, grad, sum)", ["adagrad"]),
    ("adagrad.h", "fma(-step_size, grad / (sqrt(sum) + eps), param)", "fma(-step_size, grad / sqrt(sum), param)",
     ["adagrad"]),
    ("adagrad.h", "sqrt(sum) + eps", "sum + eps", ["adagrad"]),
    ("rule.h", "fma(weight_decay, param, grad)", "fma(-weight_decay, param, grad)",
     ["adam", "rmsprop", "sgd", "adagrad"]),
    *((f"{name}.h", "param, grad_factor * grad)", "param, grad)", ADAM if name == "adam" else [name])
      for name in ("adam", "rmsprop", "sgd", "adagrad")),
]  # fmt: skip


def compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(command[0]) is None:
        pytest.skip("needs a C++ compiler")
    return command


def compile_object(optimize: str, source: Path, core: Path, directory: Path) -> Path:
    result = directory / f"{source.stem}.o"
    command = [*compiler(), optimize, *FLAGS, f"-I{core.parent}", "-c", str(source), "-o", str(result)]
    subprocess.run(command, check=True)
    return result


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The objects of all but the loops, which no mutant changes."""
    directory = tmp_path_factory.mktemp("unchanged")
    other_levels = directory / "other_levels.cpp"
    other_levels.write_text(OTHER_LEVELS)
    core = ROOT / "csrc/core"
    sources = [core / "cpu/walk.cpp", core / "cpu/level.cpp", ROOT / "tests/native/walk_test.cpp", other_levels]
    return [compile_object("-O1", source, core, directory) for source in sources]


def failing_optimizers(core: Path, unchanged: list[Path], directory: Path) -> set[str]:
    """The optimizers that the walk test finds wrong, with the loops compiled from the sources in `core`."""
    loops = directory / "loops.cpp"
    loops.write_text('#include "core/cpu/walk_impl.h"\n')
    program = directory / "walk_test"
    objects = [compile_object("-O0", loops, core, directory), *unchanged]  # run once: the compiler's time counts
    subprocess.run([*compiler(), *map(str, objects), "-o", str(program)], check=True)
    environment = {**os.environ, "FUSED_OPS_CPU_LEVEL": "baseline"}
    result = subprocess.run(
        [str(program), "baseline"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    failures = set(re.findall(r"^(\w+) states \d+, .*: (?:element|operand)", result.stdout, re.MULTILINE))
    assert result.returncode == bool(failures), result.stdout
    return failures


@pytest.mark.slow
def test_no_fault_no_alarm(unchanged: list[Path], tmp_path: Path) -> None:
    assert failing_optimizers(ROOT / "csrc/core", unchanged, tmp_path) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("file", "right", "wrong", "optimizers"), MUTANTS)
def test_a_wrong_rule_is_seen(
    file: str, right: str, wrong: str, optimizers: Sequence[str], unchanged: list[Path], tmp_path: Path
) -> None:
    core = Path(shutil.copytree(ROOT / "csrc/core", tmp_path / "core"))
    text = (core / "optim" / file).read_text()
    assert text.count(right) == 1
    (core / "optim" / file).write_text(text.replace(right, wrong))
    assert failing_optimizers(core, unchanged, tmp_path) == set(optimizers)
