# SPDX-License-Identifier: Apache-2.0
"""16-bit storage is the float32 rule rounded once; parameter, gradient and state dtypes are independent."""

from __future__ import annotations

import itertools

import pytest
import torch
from reference import (
    ALL_CONFIGS,
    HALF_DTYPES,
    OPTIMIZERS,
    STATES,
    Backend,
    Oracle,
    Problem,
    assert_agrees,
    config_of,
)

SHAPES = [(1,), (7,), (65,), (5, 13), (1025,), ()]
REAL_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("state_dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize(("name", "config"), ALL_CONFIGS)
def test_equals_float32_rounded_once(
    backend: Backend, name: str, config: str, dtype: torch.dtype, state_dtype: torch.dtype | None
) -> None:
    """Bit for bit: float32 copies stepped by the same backend, each result then rounded to its storage."""
    problem = Problem(SHAPES, dtype=dtype, device=backend.device)
    narrow = backend.make(name, problem.params, state_dtype=state_dtype, **config_of(name, config))
    for step, grads in enumerate(problem.grads):
        params = [param.detach().float().requires_grad_() for param in problem.params]
        wide = backend.make(name, params, **config_of(name, config))
        for param, narrow_param, grad in zip(params, problem.params, grads, strict=True):
            param.grad = grad.float()
            for key, value in narrow.state.get(narrow_param, {}).items():
                wide.state[param][key] = value.to(torch.float32, copy=True)
        wide.step()
        problem.run(narrow, steps=[step])
        for param, narrow_param in zip(params, problem.params, strict=True):
            assert torch.equal(narrow_param, param.to(dtype))
            for key, value in narrow.state.get(narrow_param, {}).items():
                assert torch.equal(value, wide.state[param][key].to(value.dtype)), key


@pytest.mark.parametrize("state_dtype", REAL_DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_independent_dtypes(backend: Backend, name: str, state_dtype: torch.dtype) -> None:
    """Every parameter dtype with every gradient dtype, side by side in one group."""
    pairs = list(itertools.product(REAL_DTYPES, REAL_DTYPES))
    dtypes, grad_dtypes = ([pair[i] for pair in pairs] for i in (0, 1))
    problem = Problem([(37,)] * len(pairs), dtypes, grad_dtypes, device=backend.device, bounded=True)
    kwargs = config_of(name, "all")
    optimizer = backend.make(name, problem.params, state_dtype=state_dtype, **kwargs)
    problem.run(optimizer)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, state_dtype=state_dtype, **kwargs))


@pytest.mark.parametrize("state_dtype", [None, *REAL_DTYPES], ids=str)
@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_have_the_dtype_asked_for(
    backend: Backend, name: str, dtype: torch.dtype, state_dtype: torch.dtype | None
) -> None:  # case 12
    problem = Problem([(3, 4)], dtype=dtype, device=backend.device, layout="transposed", steps=2)
    optimizer = backend.make(name, problem.params, state_dtype=state_dtype, **config_of(name, "all"))
    problem.run(optimizer)
    (param,) = problem.params
    state = optimizer.state[param]
    assert {key: state[key].dtype for key in STATES[name]} == dict.fromkeys(STATES[name], state_dtype or dtype)
    assert {key: state[key].stride() for key in STATES[name]} == dict.fromkeys(STATES[name], param.stride())
    if name != "SGD":
        assert state["step"].dtype == torch.float32
        assert state["step"].dim() == 0
        assert state["step"].item() == 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dtype_must_be_a_real_floating_point(name: str) -> None:
    backend = Backend("cpu", "cpu")
    for dtype in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises((TypeError, ValueError), match="state_dtype"):
            backend.make(name, [torch.ones(2, requires_grad=True)], state_dtype=dtype)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_mixed_group_with_params_frozen_on_alternate_steps(backend: Backend, name: str) -> None:
    """Each parameter's own step count and bias correction, whatever its neighbours do."""  # case 7
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
        torch.float32,
        torch.bfloat16,
    ]
    problem = Problem([(9,), (40,), (3, 3), (5,), (4,), (17,), (2, 9)], dtypes, device=backend.device, steps=7)
    for step, grads in enumerate(problem.grads):
        grads[0] = None if step % 2 else grads[0]
        grads[1] = grads[1] if step % 2 else None
        grads[2] = None if step == 3 else grads[2]
        grads[5] = None if step < 5 else grads[5]
        grads[6] = None
    kwargs = config_of(name, "all")
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.run(optimizer)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs), ulps=4)
    if name not in ("SGD", "Adagrad"):  # Adagrad makes its states when it is constructed
        assert [float(optimizer.state[p]["step"]) if p in optimizer.state else 0 for p in problem.params] == [
            4,
            3,
            6,
            7,
            7,
            2,
            0,
        ]
