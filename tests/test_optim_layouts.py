# SPDX-License-Identifier: Apache-2.0
"""Every memory layout of parameter and gradient: the oracle's values, and not one byte beside them."""

from __future__ import annotations

import itertools
import os
import warnings

import pytest
import torch
from reference import (
    GAP,
    LAYOUTS,
    OPTIMIZERS,
    PARAM_LAYOUTS,
    STATES,
    Backend,
    Oracle,
    Problem,
    assert_agrees,
    assert_gaps_untouched,
    config_of,
    wide,
)

SHAPES = [(6, 10), (2, 3, 4, 5), (7,), (1, 9), ()]


@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", PARAM_LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_param_and_grad_layouts(backend: Backend, name: str, layout: str, grad_layout: str) -> None:  # cases 1, 2, 3
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        problem = Problem(SHAPES, dtype=dtype, layout=layout, grad_layout=grad_layout, device=backend.device, steps=2)
        strides = [param.stride() for param in problem.params]
        grads = [[wide(grad) for grad in step] for step in problem.grads]
        kwargs = config_of(name, "all")
        optimizer = backend.make(name, problem.params, **kwargs)
        problem.run(optimizer)
        assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))
        assert [param.stride() for param in problem.params] == strides
        for before, after in zip(grads, problem.grads, strict=True):
            assert all(torch.equal(b, wide(a)) for b, a in zip(before, after, strict=True)), "a gradient was written"
        if layout in ("every_other", "padded_rows", "offset"):
            for param in problem.params:
                assert_gaps_untouched(param)


@pytest.mark.parametrize("state_layout", PARAM_LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_layouts(backend: Backend, name: str, state_layout: str) -> None:
    """States that were loaded or set by hand in another layout than the parameter's."""
    problem = Problem(SHAPES, device=backend.device)
    kwargs = config_of(name, "all")
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.run(optimizer, steps=[0, 1])
    for param in problem.params:
        for key in STATES[name]:
            optimizer.state[param][key] = LAYOUTS[state_layout](optimizer.state[param][key], GAP)
    problem.run(optimizer, steps=[2, 3])
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))
    if state_layout in ("every_other", "padded_rows", "offset"):
        for param in problem.params:
            for key in STATES[name]:
                assert_gaps_untouched(optimizer.state[param][key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_params_interleaved_in_one_storage(backend: Backend, name: str, dtype: torch.dtype) -> None:
    """Two parameters own the even and the odd columns of one matrix: each gets its own update."""  # case 3
    problem = Problem([(70, 33), (70, 33)], dtype=dtype, device=backend.device)
    base = torch.empty(70, 66, dtype=dtype, device=backend.device)
    halves = [base[:, ::2], base[:, 1::2]]
    for half, param in zip(halves, problem.params, strict=True):
        half.copy_(param.detach())
    problem.params = [half.requires_grad_() for half in halves]
    kwargs = config_of(name, "all")
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.run(optimizer)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_neighbours_in_one_flat_buffer(backend: Backend, name: str, dtype: torch.dtype) -> None:
    """Parameters packed back to back at odd offsets, as flat-buffer engines do: chunks never touch a neighbour."""
    sizes = [1, 3, 8, 17, 64, 1025, 4097, 5]
    problem = Problem([(n,) for n in sizes], dtype=dtype, device=backend.device)
    flat = torch.cat([param.detach() for param in problem.params])
    problem.params = [part.requires_grad_() for part in flat.split(sizes)]
    kwargs = config_of(name, "all")
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.run(optimizer)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))


@pytest.mark.parametrize("count", [3, 70, 820])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_empty_tensor_in_every_slot(backend: Backend, name: str, count: int) -> None:
    """Empty first, last, and around the counts at which launches are cut: the rest as if it were one flat tensor."""
    empty = {0, 31, 32, 63, 64, 251, 252, 253, 255, 256, 511, 512, 799, 800, 801, count - 1}  # case 6
    sizes = [0 if index in empty else index % 5 + 1 for index in range(count)]
    flat = Problem([(sum(sizes),)], device=backend.device)
    params = [part.clone().requires_grad_() for part in flat.params[0].detach().split(sizes)]
    kwargs = config_of(name, "all")
    optimizer, flat_optimizer = backend.make(name, params, **kwargs), backend.make(name, flat.params, **kwargs)
    for step_grads in flat.grads:
        for param, grad in zip(params, step_grads[0].split(sizes), strict=True):
            param.grad = grad
        optimizer.step()
    flat.run(flat_optimizer)
    assert_agrees(flat_optimizer, flat.params, Oracle.of(name, flat, **kwargs))
    assert torch.equal(torch.cat([param.detach() for param in params]), flat.params[0])
    for key in STATES[name]:
        assert torch.equal(
            torch.cat([optimizer.state[p][key] for p in params]), flat_optimizer.state[flat.params[0]][key]
        )


@pytest.mark.parametrize("shapes", [[(0,)], [(0, 3), (2, 0)], [()], [(), (), ()], [(1,)]], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_of_empty_and_of_scalar_params(backend: Backend, name: str, shapes: list[tuple[int, ...]]) -> None:
    problem = Problem(shapes, device=backend.device)  # case 6
    kwargs = config_of(name, "all")
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.run(optimizer)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))


@pytest.mark.parametrize(("name", "dims"), [*itertools.product(OPTIMIZERS, [3, 6]), ("SGD", 9)])
def test_many_dimensions_that_cannot_be_merged(backend: Backend, name: str, dims: int) -> None:
    """Up to 18, each strided on its own; beyond what a kernel holds the step may be stock's, but not wrong."""
    problem = Problem([(2,) * (2 * dims)], device=backend.device, steps=2)
    base = torch.full((3,) * dims + (2,) * dims, GAP, device=backend.device)
    order = [dim for pair in zip(range(dims), range(dims, 2 * dims), strict=True) for dim in pair]
    param = base[(slice(None, None, 2),) * dims].permute(order)
    problem.params = [param.copy_(problem.params[0].detach()).requires_grad_()]
    kwargs = config_of(name, "all")
    optimizer = backend.make(name, problem.params, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step in range(problem.steps):
            problem.assign(step)
            optimizer.step()
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs), ulps=4)
    assert_gaps_untouched(problem.params[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stride_beyond_32_bits(backend: Backend, name: str) -> None:
    """Element offsets of 2**31 and more. The memory between is reserved, and on the CPU never touched."""  # case 11
    distance = 2**31 + 5
    base = torch.empty(distance + 3, dtype=torch.bfloat16, device=backend.device)
    problem = Problem([(2, 3)], dtype=torch.bfloat16, device=backend.device)
    far = base.as_strided((2, 3), (distance, 1)).copy_(problem.params[0].detach())
    problem.params = [far.requires_grad_()]
    kwargs = config_of(name, "default")
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.run(optimizer)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))


@pytest.mark.large
@pytest.mark.skipif(os.environ.get("FUSED_OPS_LARGE_TESTS") != "1", reason="needs 10 GB: set FUSED_OPS_LARGE_TESTS=1")
def test_more_elements_than_32_bits_count(backend: Backend) -> None:  # case 11
    numel = 2**31 + 1
    param = torch.ones(numel, dtype=torch.bfloat16, device=backend.device, requires_grad=True)
    param.grad = torch.ones(numel, dtype=torch.bfloat16, device=backend.device)
    backend.make("SGD", [param], lr=0.5).step()
    assert all(bool((piece == 0.5).all()) for piece in param.detach().split(2**28))
