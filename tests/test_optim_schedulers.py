# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedulers, which edit the groups between steps: float and tensor lr, and cyclic momenta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import OPTIMIZERS, Backend, Problem, assert_follows, config_of, stock, twin
from torch.optim import Optimizer, lr_scheduler

STEPS = 8
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, step_size=2, gamma=0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 4], gamma=0.3),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, gamma=0.8),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=5, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=3),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 1.0 / (1 + epoch)),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda epoch: 0.9),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=4),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, total_iters=6, power=2.0),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 1e-3, 0.1, step_size_up=2, cycle_momentum=_has_momentum(opt)),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(
        opt, 0.1, total_steps=STEPS + 1, cycle_momentum=_has_momentum(opt)
    ),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 0.2, 3), lr_scheduler.ExponentialLR(opt, 0.7)], milestones=[3]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(opt, 0.5, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)], optimizer=opt
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1),
}


def _has_momentum(optimizer: Optimizer) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


def _build(name: str, optimizer: Optimizer) -> Any:
    """Some schedulers fill a tensor lr in place and others replace it; either must reach the next step."""
    return SCHEDULERS[name](optimizer)


@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.optim.lr_scheduler")
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float_lr", "tensor_lr"])
@pytest.mark.parametrize("scheduler_name", SCHEDULERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_schedulers(backend: Backend, name: str, scheduler_name: str, tensor_lr: bool) -> None:  # case 14
    problem = Problem([(5, 7), (19,)], device=backend.device, steps=STEPS)
    other = twin(problem)
    config = {key: value for key, value in config_of(name, "all").items() if key != "maximize"}
    pairs = []
    for prob, make in ((problem, backend.make), (other, stock)):
        lr = torch.tensor(0.02) if tensor_lr else 0.02
        groups = [{"params": prob.params[:1]}, {"params": prob.params[1:], "weight_decay": 0.03}]
        optimizer = make(name, groups, **(config | {"lr": lr}))
        pairs.append((prob, optimizer, _build(scheduler_name, optimizer)))
    for step in range(STEPS):
        for prob, optimizer, scheduler in pairs:
            prob.run(optimizer, steps=[step])
            scheduler.step(*([1.0] if scheduler_name == "ReduceLROnPlateau" else []))
    (_, ours, _), (_, theirs, _) = pairs
    assert [float(g["lr"]) for g in ours.param_groups] == [float(g["lr"]) for g in theirs.param_groups]
    assert_follows(ours, problem.params, theirs, other.params, eps=2e-6)


LR_CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "float to float": lambda group: group.update(lr=0.007),
    "to a tensor": lambda group: group.update(lr=torch.tensor(0.007)),
    "to a float64 tensor": lambda group: group.update(lr=torch.tensor(0.007, dtype=torch.float64)),
    "to one element": lambda group: group.update(lr=torch.tensor([0.007])),
    "to an integer": lambda group: group.update(lr=1),
    "to zero": lambda group: group.update(lr=0.0),
}


@pytest.mark.parametrize("change", LR_CHANGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lr_changed_by_hand(backend: Backend, name: str, change: str) -> None:  # case 14
    problem = Problem([(5, 7), (19,)], device=backend.device)
    other = twin(problem)
    optimizers = []
    for prob, make in ((problem, backend.make), (other, stock)):
        optimizer = make(name, prob.params, **config_of(name, "all"))
        prob.run(optimizer, steps=[0, 1])
        LR_CHANGES[change](optimizer.param_groups[0])
        prob.run(optimizer, steps=[2, 3])
        optimizers.append(optimizer)
    assert_follows(optimizers[0], problem.params, optimizers[1], other.params, eps=2e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tensor_lr_filled_in_place(backend: Backend, name: str) -> None:  # case 14
    problem = Problem([(5, 7), (19,)], device=backend.device)
    other = twin(problem)
    optimizers = []
    for prob, make in ((problem, backend.make), (other, stock)):
        lr = torch.tensor(0.02)
        optimizer = make(name, prob.params, lr=lr)
        for step in range(prob.steps):
            lr.fill_(0.02 / (1 + step))
            prob.run(optimizer, steps=[step])
        optimizers.append(optimizer)
    assert_follows(optimizers[0], problem.params, optimizers[1], other.params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_of_several_dtypes_each_with_its_own_lr(backend: Backend, name: str) -> None:  # case 13
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16, torch.float16]
    problem = Problem([(11,), (7,), (5,), (40,), (3, 3), (9,)], dtypes, device=backend.device)
    other = twin(problem)
    optimizers = []
    for prob, make in ((problem, backend.make), (other, stock)):
        groups = [
            {"params": prob.params[:3], "lr": torch.tensor(0.5)},
            {"params": prob.params[3:5], "lr": torch.tensor(0.01)},
            {"params": prob.params[5:], "lr": 0.1},
        ]
        optimizer = make(name, groups, **config_of(name, "all"))
        prob.run(optimizer)
        optimizers.append(optimizer)
    for index, eps in enumerate([1e-5, 2e-2, 1e-7, 2e-6, 2e-2, 4e-3]):
        ours, theirs = [problem.params[index]], [other.params[index]]
        assert_follows(optimizers[0], ours, optimizers[1], theirs, eps=eps)
