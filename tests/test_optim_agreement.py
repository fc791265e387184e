# SPDX-License-Identifier: Apache-2.0
"""Every optimizer, every argument, every dtype, every size at which a loop changes its path: the oracle's values."""

from __future__ import annotations

import math

import pytest
import torch
from reference import (
    ALL_CONFIGS,
    CONFIGS,
    DTYPES,
    HALF_DTYPES,
    OPTIMIZERS,
    Backend,
    Oracle,
    Problem,
    assert_agrees,
    config_of,
    snapshot,
    stock,
    ulps_off,
    wide,
)

SHAPES = [(3, 5), (1,), (), (129,), (4, 3, 2, 5), (0, 4)]
# A vector register, a cache block, a chunk of work and a 16-bit index, each -1, 0, +1.
BOUNDARIES = [
    1,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    33,
    63,
    64,
    65,
    255,
    257,
    1023,
    1024,
    1025,
    4095,
    4096,
    4097,
    16383,
    16384,
    16385,
]
LARGE_BOUNDARIES = [65535, 65536, 65537, 131073]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "config"), ALL_CONFIGS)
def test_agrees_with_the_oracle(backend: Backend, name: str, config: str, dtype: torch.dtype) -> None:  # case 17
    problem = Problem(SHAPES, dtype=dtype, device=backend.device)
    kwargs = config_of(name, config)
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.run(optimizer)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))


@pytest.mark.parametrize(("name", "config"), ALL_CONFIGS)
def test_never_worse_than_stock(backend: Backend, name: str, config: str) -> None:
    """Over many elements: neither the worst nor the mean error exceeds that of stock's own float32."""
    ours, theirs = (Problem([(20_000,)], device=backend.device) for _ in range(2))
    kwargs = config_of(name, config)
    our_optimizer, their_optimizer = backend.make(name, ours.params, **kwargs), stock(name, theirs.params, **kwargs)
    ours.run(our_optimizer)
    theirs.run(their_optimizer)
    oracle = Oracle.of(name, ours, **kwargs)
    (our_errors,), (their_errors,) = (
        ulps_off(optimizer, problem.params, oracle)
        for optimizer, problem in ((our_optimizer, ours), (their_optimizer, theirs))
    )
    for key, error in our_errors.items():
        assert float(error.mean()) <= 1.05 * float(their_errors[key].mean()) + 0.01, key
        assert float(error.max()) <= float(their_errors[key].max()) + 0.5, key


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sizes_at_boundaries(backend: Backend, name: str, dtype: torch.dtype) -> None:  # case 8
    problem = Problem([(n,) for n in BOUNDARIES], dtype=dtype, device=backend.device, steps=2)
    kwargs = config_of(name, "all")
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.run(optimizer)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_uniform_input_gives_uniform_output(backend: Backend, name: str, dtype: torch.dtype, offset: int) -> None:
    """Vector body and tail are one code: equal elements stay equal, and all of them move."""  # case 8
    sizes = [*BOUNDARIES, *LARGE_BOUNDARIES]
    params = [
        torch.full((n + offset,), 0.7, dtype=dtype, device=backend.device)[offset:].requires_grad_() for n in sizes
    ]
    optimizer = backend.make(name, params, **config_of(name, "all"))
    for step in range(3):
        for param in params:
            param.grad = torch.full_like(param, 0.9 + 0.4 * step)
        optimizer.step()
    one = params[0].detach()[0]
    assert one != torch.tensor(0.7, dtype=dtype)
    assert math.isfinite(one)
    for param in params:
        assert bool((param == one).all()), f"numel {param.numel()}: elements differ"


@pytest.mark.parametrize(("name", "config"), ALL_CONFIGS)
def test_not_a_number_and_infinity_spread_as_in_the_oracle(backend: Backend, name: str, config: str) -> None:
    problem = Problem([(37,)], device=backend.device)
    grads = [step[0] for step in problem.grads]
    grads[0][0], grads[1][5], grads[1][16], grads[2][35], grads[3][36] = (
        math.nan,
        math.inf,
        -math.inf,
        math.nan,
        math.inf,
    )
    kwargs = config_of(name, config)
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.run(optimizer)
    oracle = Oracle.of(name, problem, **kwargs)
    oracle.scale = [{k: v.nan_to_num(1.0, 1.0, 1.0) for k, v in scale.items()} for scale in oracle.scale]
    assert_agrees(optimizer, problem.params, oracle)


@pytest.mark.parametrize("numel", [1, 64, 65])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES], ids=str)
def test_centered_rmsprop_stays_finite(backend: Backend, dtype: torch.dtype, momentum: float, numel: int) -> None:
    """A constant gradient drives the variance to 0, where rounding can make it negative: it is clamped."""  # case 9
    param = torch.full((numel,), 0.5, dtype=dtype, device=backend.device, requires_grad=True)
    param.grad = torch.full_like(param, 0.37)
    optimizer = backend.make("RMSprop", [param], centered=True, alpha=0.99, momentum=momentum, lr=1e-6)
    for step in range(2000):
        optimizer.step()
        assert step % 100 or bool(param.isfinite().all()), f"not finite after step {step}"
    assert bool(param.isfinite().all())
    assert all(bool(value.isfinite().all()) for value in optimizer.state[param].values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_long_run(backend: Backend, name: str) -> None:
    """300 steps: bias corrections and lr decay follow the step count far from 1."""
    problem = Problem([(33,), (2, 2)], device=backend.device, steps=300)
    kwargs = config_of(name, "all")
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.run(optimizer)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs), ulps=8)


EXTREMES = {  # magnitudes of parameters and gradients
    "tiny gradients": (1.0, 1e-22),
    "large gradients": (1.0, 1e15),
    "overflowing gradients": (1.0, 1e25),
    "tiny values": (1e-30, 1e-10),
    "large values": (1e20, 1.0),
}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_extreme_magnitudes(backend: Backend, name: str, extreme: str) -> None:
    """Where squares leave float32's range, stock float32 is the reference: same infinities, same zeros."""
    ours, theirs = (Problem([(67,)], device=backend.device) for _ in range(2))
    optimizers = backend.make(name, ours.params, lr=1e-3), stock(name, theirs.params, lr=1e-3)
    for problem, optimizer in zip((ours, theirs), optimizers, strict=True):
        problem.params[0].detach().mul_(EXTREMES[extreme][0])
        for grads in problem.grads:
            grads[0].mul_(EXTREMES[extreme][1])
        problem.start = [wide(param) for param in problem.params]
        problem.run(optimizer)
    expected, unit = snapshot(optimizers[1], theirs.params), Oracle.of(name, ours, lr=1e-3).scale
    for actual, wanted, scale in zip(snapshot(optimizers[0], ours.params), expected, unit, strict=True):
        for key, value in wanted.items():
            close = (actual[key] - value).abs() <= 2e-6 * scale[key] + 1e-44
            assert bool((close | (actual[key] == value) | (actual[key].isnan() & value.isnan())).all()), key


def test_every_configuration_moves_something() -> None:
    """No row of the table is a copy of another: every configuration leads elsewhere, so every argument is tested."""
    for name, configs in CONFIGS.items():
        ends = []
        for config in configs:
            problem = Problem([(11,)])
            optimizer = stock(name, problem.params, **config_of(name, config))
            problem.run(optimizer)
            ends.append(problem.params[0].detach().clone())
        for i, first in enumerate(ends):
            assert all(not torch.equal(first, other) for other in ends[i + 1 :]), f"{name}: two configurations agree"
