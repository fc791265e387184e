# SPDX-License-Identifier: Apache-2.0
"""Random groups of parameters: shapes, dtypes, layouts, flags and skipped gradients in any combination."""

from __future__ import annotations

import os
from typing import Any

import pytest
from reference import (
    DTYPES,
    LAYOUTS,
    OPTIMIZERS,
    PARAM_LAYOUTS,
    Backend,
    Oracle,
    Problem,
    assert_agrees,
    assert_gaps_untouched,
)

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

unit = st.floats(0.0, 0.95, allow_subnormal=False)
rate = st.floats(1e-3, 0.1, allow_subnormal=False)
epsilon = st.sampled_from([1e-8, 1e-3])
decay = st.sampled_from([0.0, 0.03])
MOMENTS = st.tuples(st.floats(0.5, 0.95), st.floats(0.5, 0.99))
HYPERPARAMETERS: dict[str, Any] = {
    "Adam": {"lr": rate, "betas": MOMENTS, "eps": epsilon, "weight_decay": decay, "amsgrad": st.booleans(),
             "maximize": st.booleans(), "decoupled_weight_decay": st.booleans()},
    "AdamW": {"lr": rate, "betas": MOMENTS, "eps": epsilon, "weight_decay": decay, "amsgrad": st.booleans(),
              "maximize": st.booleans()},
    "RMSprop": {"lr": rate, "alpha": st.floats(0.5, 0.99), "eps": epsilon, "weight_decay": decay,
                "momentum": st.sampled_from([0.0, 0.7]), "centered": st.booleans(), "maximize": st.booleans()},
    "SGD": {"lr": rate, "momentum": st.sampled_from([0.0, 0.9]), "dampening": st.sampled_from([0.0, 0.4]),
            "weight_decay": decay, "nesterov": st.booleans(), "maximize": st.booleans()},
    "Adagrad": {"lr": rate, "lr_decay": unit, "weight_decay": decay, "eps": epsilon,
                "initial_accumulator_value": st.sampled_from([0.0, 0.2]), "maximize": st.booleans()},
}  # fmt: skip
shape = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17]), max_size=4).map(tuple) | st.integers(0, 300).map(
    lambda n: (n,)
)


@st.composite
def cases(draw: Any) -> tuple[str, dict[str, Any], Problem]:
    name = draw(st.sampled_from(OPTIMIZERS))
    config = draw(st.fixed_dictionaries(HYPERPARAMETERS[name]))
    if config.get("nesterov") and (config["momentum"] == 0 or config["dampening"] != 0):
        config["nesterov"] = False
    shapes = draw(st.lists(shape, min_size=1, max_size=5))
    problem = Problem(
        shapes,
        dtype=[draw(st.sampled_from(DTYPES)) for _ in shapes],
        layout=[draw(st.sampled_from(PARAM_LAYOUTS)) for _ in shapes],
        grad_layout=[draw(st.sampled_from(list(LAYOUTS))) for _ in shapes],
        steps=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**20)),
        bounded=True,
    )
    for grads in problem.grads:
        for index in draw(st.lists(st.integers(0, len(shapes) - 1), max_size=2)):
            grads[index] = None
    return name, config, problem


@settings(
    max_examples=int(os.environ.get("FUSED_OPS_TEST_EXAMPLES", "300")),
    deadline=None,
    derandomize="CI" in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=cases())
def test_any_group(case: tuple[str, dict[str, Any], Problem]) -> None:
    name, config, problem = case
    optimizer = Backend("cpu", "cpu").make(name, problem.params, **config)
    problem.run(optimizer)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **config), ulps=3)
    for param, layout in zip(problem.params, problem.layout, strict=True):
        if layout in ("every_other", "padded_rows", "offset"):
            assert_gaps_untouched(param)
