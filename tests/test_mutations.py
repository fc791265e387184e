# SPDX-License-Identifier: Apache-2.0
"""The tests of the tests: every fault planted here must be seen by the comparison that the other modules rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import (
    GAP,
    LAYOUTS,
    OPTIMIZERS,
    STATES,
    Oracle,
    Problem,
    assert_agrees,
    assert_follows,
    assert_gaps_untouched,
    bits,
    config_of,
    same_bits,
    stock,
    twin,
)
from torch.optim import Optimizer

SHAPES = [(67,), (5, 7)]


def float32_run(name: str, **changes: Any) -> tuple[Optimizer, Problem]:
    problem = Problem(SHAPES)
    optimizer = stock(name, problem.params, **(config_of(name, "all") | changes))
    problem.run(optimizer)
    return optimizer, problem


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_fault_no_alarm(name: str) -> None:
    """AdamW in stock rounds the parameter twice a step, so it needs twice the bound; the others stay within it."""
    optimizer, problem = float32_run(name)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **config_of(name, "all")), ulps=4)


NUMBERS = [
    (name, key, index)
    for name in OPTIMIZERS
    for key, value in config_of(name, "all").items()
    if not isinstance(value, bool)
    for index in range(len(value) if isinstance(value, tuple) else 1)
]


@pytest.mark.parametrize(("name", "key", "index"), NUMBERS)
def test_a_hyperparameter_off_by_a_thousandth(name: str, key: str, index: int) -> None:
    optimizer, problem = float32_run(name)
    config = config_of(name, "all")
    value = config[key]
    config[key] = (
        tuple(v * (1.001 if i == index else 1) for i, v in enumerate(value))
        if isinstance(value, tuple)
        else value * 1.001
    )
    with pytest.raises(AssertionError, match="off the oracle"):
        assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **config))


FLAGS = [(name, key) for name in OPTIMIZERS for key, value in config_of(name, "all").items() if isinstance(value, bool)]


@pytest.mark.parametrize(("name", "key"), FLAGS)
def test_a_flag_ignored(name: str, key: str) -> None:
    optimizer, problem = float32_run(name, **{key: False})
    with pytest.raises(AssertionError):
        assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **config_of(name, "all")))


def one_element(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    params[0].detach()[66] *= 1 + 2e-6


def one_element_not_a_number(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    params[1].detach()[4, 6] = torch.nan


def one_element_infinite(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    params[1].detach()[0, 0] = torch.inf


def one_state_element(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    next(value for key, value in optimizer.state[params[1]].items() if key != "step")[2, 3] *= 1.001


def states_swapped(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    """Of two elements of one parameter."""
    key = next(key for key in optimizer.state[params[0]] if key != "step")
    optimizer.state[params[0]][key] = optimizer.state[params[0]][key].flip(0)


def state_missing(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    optimizer.state[params[0]].popitem()


def state_too_many(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    optimizer.state[params[1]]["extra"] = torch.ones(5, 7)


def step_off_by_one(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    state = optimizer.state[params[0]]
    state["step"] = state.get("step", torch.zeros(())) + 1


def an_update_lost(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    params[0].detach()[:8] = Problem(SHAPES).params[0].detach()[:8]


FAULTS: list[Callable[[Optimizer, list[torch.Tensor]], None]] = [
    one_element, one_element_not_a_number, one_element_infinite, one_state_element, states_swapped, state_missing,
    state_too_many, step_off_by_one, an_update_lost,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_planted_fault(name: str, fault: Callable[[Optimizer, list[torch.Tensor]], None]) -> None:
    optimizer, problem = float32_run(name)
    before = bits(optimizer, problem.params)
    other = twin(problem)
    theirs = stock(name, other.params, **config_of(name, "all"))
    other.run(theirs)
    assert_follows(optimizer, problem.params, theirs, other.params)
    fault(optimizer, problem.params)
    with pytest.raises(AssertionError):
        assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **config_of(name, "all")), ulps=4)
    assert not same_bits(before, bits(optimizer, problem.params))
    if fault not in (one_element, one_state_element):  # smaller than a scenario's tolerance
        with pytest.raises(AssertionError):
            assert_follows(optimizer, problem.params, theirs, other.params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_16_bit_bound_sees_a_lost_rounding_step(name: str, dtype: torch.dtype) -> None:
    """Values moved by three units in the last place."""
    problem = Problem(SHAPES, dtype=dtype)
    optimizer = stock(name, problem.params)
    problem.run(optimizer)
    oracle = Oracle.of(name, problem)
    problem.params[0].detach().mul_(1 + 6 * torch.finfo(dtype).eps)
    with pytest.raises(AssertionError, match="off the oracle"):
        assert_agrees(optimizer, problem.params, oracle)


def test_bits_tell_apart() -> None:
    """Dtype, stride, a sign of zero and NaN payloads count; equal NaNs are equal."""
    param = torch.tensor([[1.0, -0.0, float("nan")]], requires_grad=True)
    optimizer = stock("Adam", [param])
    before = bits(optimizer, [param])
    assert same_bits(before, bits(optimizer, [param]))
    with torch.no_grad():
        param[0, 1] = 0.0
    assert not same_bits(before, bits(optimizer, [param]))
    for changed in (param.detach().double(), param.detach().expand(2, 3)):
        assert not same_bits(before, [{"param": changed}])


@pytest.mark.parametrize("layout", ["every_other", "padded_rows", "offset"])
def test_gap_check_sees_a_write(layout: str) -> None:
    param = LAYOUTS[layout](torch.rand(4, 6), GAP)
    assert_gaps_untouched(param)
    base = param._base
    assert base is not None
    base.view(-1)[0 if layout != "every_other" else 1] = 5.0
    with pytest.raises(AssertionError, match="beside"):
        assert_gaps_untouched(param)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_what_they_say(layout: str) -> None:
    """Same values (but for expanded), and strides that differ from the contiguous ones where a layout claims to."""
    value = torch.rand(2, 3, 4, 5)
    result = LAYOUTS[layout](value, GAP)
    assert result.shape == value.shape
    assert torch.equal(result, value[:1].expand_as(value) if layout == "expanded" else value)
    assert (result.stride() == value.stride()) == (layout in ("contiguous", "offset"))
    assert (result.storage_offset() == 1) == (layout in ("padded_rows", "offset"))


def test_states_table_is_complete() -> None:
    for name in OPTIMIZERS:
        optimizer, problem = float32_run(name)
        assert {key for key in optimizer.state[problem.params[0]] if key != "step"} == set(STATES[name])
