# SPDX-License-Identifier: Apache-2.0
"""What a step launches, counted through the emulated launcher."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from emulated import build
from reference import Backend

pytestmark = pytest.mark.slow


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    from conftest import emulated_native

    monkeypatch.setattr("fused_ops.optim.base.load_native", emulated_native)
    return Backend("emulated", "cpu")


@pytest.fixture
def native() -> Any:
    module = build.module()
    module.take_launches()
    return module


def make_params(sizes: list[int], dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = []
    for i, size in enumerate(sizes):
        param = torch.randn(size, generator=generator).to(dtypes[i % len(dtypes)]).requires_grad_()
        param.grad = torch.randn(size, generator=generator).to(param.dtype)
        params.append(param)
    return params


MIXED = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("name", "operands", "minimum"), [("Adam", 4, 800), ("RMSprop", 3, 1000), ("SGD", 3, 1000), ("Adagrad", 3, 1000)]
)
def test_one_launch_for_many_tensors(backend: Backend, native: Any, name: str, operands: int, minimum: int) -> None:
    options = {"momentum": 0.9} if name == "SGD" else {}
    params = make_params([1 + i * 37 % 300 for i in range(minimum)], MIXED)
    optimizer = backend.make(name, params, **options)
    for _ in range(3):
        optimizer.step()
        assert len(native.take_launches()) == 1


@pytest.mark.parametrize("beyond", [0, 1])
def test_at_the_limit_of_one_launch(backend: Backend, native: Any, beyond: int) -> None:
    params = make_params([3] * (native.max_records(4) + beyond), MIXED)
    before = [param.detach().clone() for param in params]
    backend.make("Adam", params, lr=0.1).step()
    assert len(native.take_launches()) == 1 + beyond
    assert all(bool((old != new).any()) for old, new in zip(before, params, strict=True))


def test_a_failed_launch_names_the_operation_and_the_device(backend: Backend, native: Any) -> None:
    optimizer = backend.make("Adam", make_params([5], [torch.float32]))
    native.fail_next_launch()
    with pytest.raises(RuntimeError, match=r"adam.*on cpu.*invalid configuration"):
        optimizer.step()


def test_host_time_of_two_thousand_tensors(backend: Backend, native: Any) -> None:
    """Under a fifth of stock's fused=True, kernels left out here and one element a tensor there."""
    params = make_params([1] * 2000, [torch.float32])
    ours, stock = backend.make("Adam", params), torch.optim.Adam(params, fused=True)

    def best(step: Any) -> float:
        times = []
        for _ in range(12):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return min(times)

    native.set_execute(False)
    try:
        host = best(ours.step)
    finally:
        native.set_execute(True)
    launches = native.take_launches()
    assert len(launches) == 12 * 3
    assert host < best(stock.step) / 5
