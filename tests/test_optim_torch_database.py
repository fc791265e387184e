# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own optimizer database: every input configuration and every error input of these five, against stock."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from reference import BACKENDS, OPTIMIZERS, Backend, Oracle, Problem, assert_agrees, assert_follows, stock, twin

pytest.importorskip("expecttest")  # the database needs it
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

SHAPES = [(5, 7), (33,), (), (0,), (2, 3, 4, 5)]
INFOS: dict[str, Any] = {info.name: info for info in optim_db}


def input_rows() -> list[Any]:
    """All rows that any device has: those that need CUDA are there too, to be skipped by name."""
    rows = []
    for name in OPTIMIZERS:
        inputs = _get_optim_inputs_including_global_cliquey_kwargs("cuda", torch.float32, INFOS[name])
        rows += [pytest.param(name, row.kwargs, id=f"{name}-{index}-{row.desc}") for index, row in enumerate(inputs)]
    return rows


@pytest.mark.filterwarnings("ignore:.*own step.*:UserWarning")  # differentiable=True
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize(("name", "kwargs"), input_rows())
def test_inputs(backend: Backend, name: str, kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    if kwargs.get("capturable") and backend.device == "cpu":
        pytest.skip("capturable=True needs CUDA, in stock too")
    problem = Problem(SHAPES, dtype=dtype, device=backend.device, steps=5)
    differentiable = bool(kwargs.get("differentiable"))
    params = [param.clone() for param in problem.params] if differentiable else problem.params
    optimizer = backend.make(name, params, **copy.deepcopy(kwargs))
    for grads in problem.grads:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
    config = {k: v for k, v in copy.deepcopy(kwargs).items() if k not in ("differentiable", "capturable")}
    if differentiable:  # stock's step ran: its own rounding, so the looser comparison
        other = twin(problem)
        theirs = stock(name, other.params, **config)
        other.run(theirs)
        assert_follows(optimizer, params, theirs, other.params, eps=0.05 if dtype == torch.bfloat16 else 2e-6)
    else:
        assert_agrees(optimizer, params, Oracle.of(name, problem, **config), ulps=3)


def error_rows() -> list[Any]:
    return [
        pytest.param(name, device, index, id=f"{name}-{device}-{row.optimizer_error_input.desc}-{index}")
        for name in OPTIMIZERS
        for device in ("cpu", "cuda")
        if device == "cpu" or torch.cuda.is_available()
        for index, row in enumerate(INFOS[name].optim_error_inputs_func(device, torch.float32))
    ]


@pytest.mark.parametrize(("name", "device", "index"), error_rows())
def test_error_inputs(name: str, device: str, index: int) -> None:
    row = INFOS[name].optim_error_inputs_func(device, torch.float32)[index]
    params = row.optimizer_error_input.params
    if params is None:
        params = [torch.nn.Parameter(torch.randn(2, 3, device=device))]
    make = BACKENDS[device].make
    kwargs = row.optimizer_error_input.kwargs
    if issubclass(row.error_type, Warning):
        with pytest.warns(row.error_type, match=row.error_regex):
            make(name, params, **kwargs)
        return
    assert row.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
    with pytest.raises(row.error_type) as caught:
        make(name, params, **kwargs)
    assert re.search(row.error_regex, str(caught.value))


# What the constructors refuse beyond the database: the same error from ours as from stock, word for word.
CONSTRUCTOR_ERRORS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{"lr": -1.0}, {"eps": -1e-8}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"weight_decay": -0.1},
             {"fused": True, "foreach": True}, {"fused": True, "differentiable": True}, {"lr": torch.ones(2)}],
    "AdamW": [{"lr": -1.0}, {"eps": -1e-8}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1},
              {"fused": True, "foreach": True}],
    "RMSprop": [{"lr": -1.0}, {"eps": -1e-8}, {"alpha": -0.5}, {"momentum": -0.5}, {"weight_decay": -0.1},
                {"lr": torch.ones(2)}],
    "SGD": [{"lr": -1.0}, {"momentum": -0.5}, {"weight_decay": -0.1}, {"nesterov": True},
            {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, {"fused": True, "foreach": True}],
    "Adagrad": [{"lr": -1.0}, {"lr_decay": -0.5}, {"eps": -1e-8}, {"initial_accumulator_value": -1.0},
                {"weight_decay": -0.1}, {"fused": True, "foreach": True}, {"fused": True, "differentiable": True}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "kwargs"), [(name, kw) for name, rows in CONSTRUCTOR_ERRORS.items() for kw in rows])
def test_constructor_errors_are_stocks(name: str, kwargs: dict[str, Any]) -> None:
    messages = []
    for make in (BACKENDS["cpu"].make, lambda name, params, **kw: getattr(torch.optim, name)(params, **kw)):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            make(name, [torch.ones(3, requires_grad=True)], **kwargs)
        messages.append((caught.type, str(caught.value)))
    assert messages[0] == messages[1]
    with pytest.raises(TypeError):
        BACKENDS["cpu"].make(name, [torch.ones(3, requires_grad=True)], no_such_argument=1)
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        BACKENDS["cpu"].make(name, [torch.ones(3, requires_grad=True) * 2])  # case 18
