# SPDX-License-Identifier: Apache-2.0
"""The steps as operators: torch.library.opcheck on every one, and the bits of the optimizer's own step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import DTYPES, OPTIMIZERS, STATES, Backend, Problem, config_of
from torch.optim import Optimizer

import fused_ops.ops

SHAPES = [(5, 7), (33,), (), (0,)]
OPERATORS = {name: fused_ops.ops.OPTIMIZER_OPS[f"{name.lower()}_"] for name in OPTIMIZERS if name != "AdamW"}


def arguments(name: str, optimizer: Optimizer, problem: Problem, step: int) -> tuple[list[Any], dict[str, float]]:
    """What the operator takes to do the optimizer's next step: the lists of its schema, then its hyperparameters."""
    (group,) = optimizer.param_groups
    values = dict(group)
    if "betas" in group:
        values["beta1"], values["beta2"] = group["betas"]
    lists: list[Any] = []
    hyperparameters = {}
    for argument in OPERATORS[name]._schema.arguments:
        key = argument.name.removesuffix("s")
        if argument.kwarg_only:
            hyperparameters[argument.name] = float(values[argument.name])
        elif argument.name == "params":
            lists.append([param.detach() for param in problem.params])
        elif argument.name == "grads":
            lists.append(problem.grads[step])
        else:
            lists.append([optimizer.state[param][key] for param in problem.params if key in optimizer.state[param]])
    return lists, hyperparameters


def after_two_steps(backend: Backend, name: str, config: str, dtype: torch.dtype) -> tuple[Optimizer, Problem]:
    problem = Problem(SHAPES, dtype=dtype, device=backend.device)
    optimizer = backend.make(name, problem.params, **config_of(name, config))
    problem.run(optimizer, steps=[0, 1])
    return optimizer, problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", ["default", "all"])
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(backend: Backend, name: str, config: str, dtype: torch.dtype) -> None:
    optimizer, problem = after_two_steps(backend, name, config, dtype)
    lists, hyperparameters = arguments(name, optimizer, problem, 2)
    torch.library.opcheck(OPERATORS[name], tuple(lists), hyperparameters)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_equals_the_optimizer(backend: Backend, name: str, dtype: torch.dtype) -> None:
    optimizer, problem = after_two_steps(backend, name, "all", dtype)
    lists, hyperparameters = arguments(name, optimizer, problem, 2)
    lists = copy.deepcopy(lists)
    OPERATORS[name](*lists, **hyperparameters)
    problem.run(optimizer, steps=[2])
    expected, _ = arguments(name, optimizer, problem, 2)
    for ours, theirs in zip(lists, expected, strict=True):
        assert len(ours) == len(theirs) == len(SHAPES)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_wrong_arguments_change_nothing(backend: Backend, name: str) -> None:
    optimizer, problem = after_two_steps(backend, name, "all", torch.float32)
    lists, hyperparameters = arguments(name, optimizer, problem, 2)
    lists = copy.deepcopy(lists)
    before = copy.deepcopy(lists)
    wrong_shape = [*lists[1][:-1], torch.ones(3, device=backend.device)]
    for position, wrong in ((1, lists[1][:-1]), (1, wrong_shape), (2, []), (2, lists[2][:1]), (0, lists[0][1:])):
        arguments_ = [wrong if i == position else value for i, value in enumerate(lists)]
        with pytest.raises(RuntimeError, match=r"\w+: expected .+ == .+, got .+\. [A-Z]"):
            OPERATORS[name](*arguments_, **hyperparameters)
    for ours, theirs in zip(lists, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_every_operator_is_tested() -> None:
    assert set(fused_ops.ops.OPTIMIZER_OPS) == {f"{name.lower()}_" for name in OPERATORS}
    assert all(STATES[name] for name in OPERATORS)
