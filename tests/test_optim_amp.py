# SPDX-License-Identifier: Apache-2.0
"""GradScaler, and the grad_scale and found_inf attributes it sets: unscale once, skip without a trace."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from reference import (
    OPTIMIZERS,
    Backend,
    Oracle,
    Problem,
    assert_agrees,
    assert_follows,
    bits,
    config_of,
    same_bits,
    stock,
    twin,
)
from torch.optim import Optimizer

SHAPES = [(5, 7), (1030,), (), (0,)]
SCALE = 1024.0  # a power of two: scaling and unscaling are exact


def scaler_for(backend: Backend, scale: float = SCALE) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(backend.device, init_scale=scale, growth_interval=10_000)
    scaler.scale(torch.ones((), device=backend.device))  # makes the scale tensor
    return scaler


def scaled_step(
    problem: Problem, optimizer: Optimizer, scaler: torch.amp.GradScaler, step: int, factor: float = 1.0
) -> None:
    for param, grad in zip(problem.params, problem.grads[step], strict=True):
        param.grad = None if grad is None else grad * (scaler.get_scale() * factor)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("scale", [1.0, SCALE, 1000.0, 3e-3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_steps_agree(backend: Backend, name: str, scale: float) -> None:  # case 10
    problem = Problem(SHAPES, device=backend.device)
    kwargs = config_of(name, "all")
    optimizer, scaler = backend.make(name, problem.params, **kwargs), scaler_for(backend, scale)
    for step in range(problem.steps):
        scaled_step(problem, optimizer, scaler, step)
    ulps = 2 if math.log2(scale).is_integer() else 4
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs), ulps)
    assert getattr(optimizer, "grad_scale", None) is None
    assert getattr(optimizer, "found_inf", None) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_steps_in_other_dtypes(backend: Backend, name: str, dtype: torch.dtype) -> None:
    problem = Problem(SHAPES, dtype=dtype, device=backend.device)
    kwargs = config_of(name, "all")
    optimizer, scaler = backend.make(name, problem.params, **kwargs), scaler_for(backend)
    for step in range(problem.steps):
        scaled_step(problem, optimizer, scaler, step)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unscale_and_clip_unscales_once(backend: Backend, name: str) -> None:  # case 10a
    problem = Problem(SHAPES, device=backend.device)
    kwargs = config_of(name, "all")
    optimizer, scaler = backend.make(name, problem.params, **kwargs), scaler_for(backend)
    other = twin(problem)
    other_optimizer = stock(name, other.params, **kwargs)
    for step in range(problem.steps):
        for param, grad in zip(problem.params, problem.grads[step], strict=True):
            param.grad = grad * scaler.get_scale()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(problem.params, 0.5)
        scaler.step(optimizer)
        scaler.update()
        other.assign(step)
        torch.nn.utils.clip_grad_norm_(other.params, 0.5)
        other_optimizer.step()
    assert_follows(optimizer, problem.params, other_optimizer, other.params)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("config", ["default", "all"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_found_inf_leaves_no_trace(backend: Backend, name: str, config: str, bad: float) -> None:  # case 10b
    problem = Problem(SHAPES, device=backend.device)
    optimizer, scaler = backend.make(name, problem.params, **config_of(name, config)), scaler_for(backend)
    scaled_step(problem, optimizer, scaler, 0)
    before = bits(optimizer, problem.params)
    grad = problem.grads[1][1]
    grad[-1] = bad
    scaled_step(problem, optimizer, scaler, 1)
    assert scaler.get_scale() == SCALE / 2
    assert same_bits(before, bits(optimizer, problem.params))
    scaled_step(problem, optimizer, scaler, 2)
    del problem.grads[3], problem.grads[1]
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **config_of(name, config)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_found_inf_on_the_first_step(backend: Backend, name: str) -> None:
    """The steps after it are the first ones: no bias correction counted, no momentum buffer begun."""
    problem = Problem(SHAPES, device=backend.device)
    kwargs = config_of(name, "all")
    optimizer, scaler = backend.make(name, problem.params, **kwargs), scaler_for(backend)
    grad = problem.grads[0][0]
    grad[2, 3] = math.inf
    for step in range(problem.steps):
        scaled_step(problem, optimizer, scaler, step)
    del problem.grads[0]
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))


Attributes = Callable[[str], dict[str, torch.Tensor | None]]
BY_HAND: dict[
    str, tuple[Attributes, float, bool]
] = {  # attributes, what the gradients carry, whether the step is taken
    "found_inf 0, no grad_scale": (lambda d: {"found_inf": torch.zeros((), device=d)}, 1.0, True),
    "found_inf 1, no grad_scale": (lambda d: {"found_inf": torch.ones((), device=d)}, 1.0, False),  # case 10c
    "found_inf 2, grad_scale None": (
        lambda d: {"found_inf": torch.full((), 2.0, device=d), "grad_scale": None},
        1.0,
        False,
    ),
    "both None": (lambda d: {"found_inf": None, "grad_scale": None}, 1.0, True),
    "grad_scale alone": (lambda d: {"grad_scale": torch.full((), 8.0, device=d)}, 8.0, True),
    "grad_scale, found_inf None": (
        lambda d: {"grad_scale": torch.full((), 8.0, device=d), "found_inf": None},
        8.0,
        True,
    ),
    "one element, one dimension": (
        lambda d: {"grad_scale": torch.full((1,), 8.0, device=d), "found_inf": torch.zeros(1, device=d)},
        8.0,
        True,
    ),
    "both, skipped": (
        lambda d: {"grad_scale": torch.full((1,), 8.0, device=d), "found_inf": torch.ones(1, device=d)},
        8.0,
        False,
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_attributes_set_by_hand(backend: Backend, name: str, case: str) -> None:
    attributes, factor, taken = BY_HAND[case]
    problem = Problem(SHAPES, device=backend.device, steps=2)
    kwargs = config_of(name, "all")
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.run(optimizer, steps=[0])
    before = bits(optimizer, problem.params)
    for key, value in attributes(backend.device).items():
        setattr(optimizer, key, value)
    for param, grad in zip(problem.params, problem.grads[1], strict=True):
        param.grad = grad * factor
    optimizer.step()
    if taken:
        assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))
    else:
        assert same_bits(before, bits(optimizer, problem.params))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_user_scale_multiplies(backend: Backend, name: str) -> None:
    """A grad_scale that the user set divides as well, for instance for gradient accumulation."""  # case 10d
    problem = Problem(SHAPES, device=backend.device)
    kwargs = config_of(name, "all")
    optimizer, scaler = backend.make(name, problem.params, **kwargs), scaler_for(backend)
    for step in range(problem.steps):
        optimizer.grad_scale = torch.full((), 4.0, device=backend.device)  # type: ignore[attr-defined]
        scaled_step(problem, optimizer, scaler, step, factor=4.0)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unfused_checkpoint_then_scaler(backend: Backend, name: str) -> None:
    """A checkpoint says foreach or fused False and None; none of it may switch off the handling of scales."""  # case 4
    problem = Problem(SHAPES, device=backend.device)
    kwargs = config_of(name, "all")
    theirs = stock(name, problem.params, **kwargs)
    problem.run(theirs, steps=[0, 1])
    optimizer, scaler = backend.make(name, problem.params, **kwargs), scaler_for(backend)
    optimizer.load_state_dict(theirs.state_dict())
    for step in (2, 3):
        scaled_step(problem, optimizer, scaler, step)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs), ulps=4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_disabled_scaler_is_transparent(backend: Backend, name: str) -> None:
    problem = Problem(SHAPES, device=backend.device)
    optimizer = backend.make(name, problem.params)
    scaler = torch.amp.GradScaler(backend.device, enabled=False)
    for step in range(problem.steps):
        problem.assign(step)
        scaler.step(optimizer)
        scaler.update()
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_not_written_by_a_skipped_step(backend: Backend, name: str) -> None:
    problem = Problem(SHAPES, device=backend.device)
    optimizer, scaler = backend.make(name, problem.params), scaler_for(backend)
    problem.grads[0][0][0, 0] = math.nan
    scaled_step(problem, optimizer, scaler, 0)
    for param, original in zip(problem.params, problem.grads[0], strict=True):
        torch.testing.assert_close(param.grad, original * SCALE, rtol=0, atol=0, equal_nan=True)
