# SPDX-License-Identifier: Apache-2.0
"""The loop for small matrix products: right for every size, role and layout, and used for the sizes it takes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fused_ops import dispatch, functional
from fused_ops._build import load_native

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROLES = ("forward", "grad_input", "grad_weight")
# Around the width of a vector, the limits of each size and of all together.
SIZES = ((1, 1, 1), (1, 10, 10), (2, 3, 15), (3, 2, 16), (7, 9, 17), (16, 10, 10), (5, 31, 33), (16, 32, 64))
SIZES += ((512, 2, 16), (512, 4, 16), (4, 512, 8), (16, 128, 16), (1, 1, 256), (64, 8, 16), (31, 33, 32))


@pytest.fixture(autouse=True)
def default_table():
    dispatch.set_choices([])
    yield
    dispatch.reset()


def factors(role: str, m: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the product of a role, [m, k] times [k, n], is called with."""
    generator = torch.Generator().manual_seed(1000 * m + 100 * k + n)
    a = torch.randn((k, m) if role == "grad_weight" else (m, k), generator=generator)
    b = torch.randn((n, k) if role == "forward" else (k, n), generator=generator)
    return a.to(dtype), b.to(dtype)


def exact(role: str, a: Tensor, b: Tensor) -> Tensor:
    a, b = a.double(), b.double()
    return a @ b.t() if role == "forward" else a @ b if role == "grad_input" else a.t() @ b


def check(result: Tensor, role: str, a: Tensor, b: Tensor) -> None:
    """Within the sum's rounding in float, then half a unit of the 16-bit result."""
    wanted, magnitude = exact(role, a, b), exact(role, a.abs(), b.abs())
    terms = a.shape[0] if role == "grad_weight" else a.shape[1]
    unit = torch.finfo(a.dtype).eps
    smallest = torch.finfo(a.dtype).smallest_normal * unit
    bound = terms * 2**-24 * magnitude + unit / 2 * wanted.abs() * 1.0001 + smallest / 2
    assert (result.dtype, result.is_contiguous()) == (a.dtype, True)
    assert torch.all((result.double() - wanted).abs() <= bound)


@pytest.mark.parametrize(("dtype", "role", "sizes"), [*itertools.product(DTYPES, ROLES, SIZES)], ids=str)
def test_rounds_the_exact_product_once(dtype: torch.dtype, role: str, sizes: tuple[int, int, int]) -> None:
    native = load_native()
    if not native.is_small_product(dtype, *sizes):
        pytest.skip("aten's, being faster")
    a, b = factors(role, *sizes, dtype)
    check(native.product("loop", role, a, b), role, a, b)


def test_most_sizes_are_taken() -> None:
    assert sum(load_native().is_small_product(torch.bfloat16, *sizes) for sizes in SIZES) >= len(SIZES) - 3


def layouts(matrix: Tensor) -> dict[str, Tensor]:
    rows, columns = matrix.shape
    spaced = torch.full((2 * rows, 3 * columns), torch.nan, dtype=matrix.dtype)
    spaced[::2, ::3] = matrix
    shifted = torch.full((rows * columns + 1,), torch.nan, dtype=matrix.dtype)
    shifted[1:] = matrix.flatten()
    return {
        "transposed": matrix.t().contiguous().t(),
        "spaced": spaced[::2, ::3],
        "misaligned": shifted[1:].view(rows, columns),
        "broadcast": matrix[:1].expand(rows, columns),
    }


@pytest.mark.parametrize(("role", "which"), [*itertools.product(ROLES, range(2))])
@pytest.mark.parametrize("layout", ["transposed", "spaced", "misaligned", "broadcast"])
def test_layouts(role: str, which: int, layout: str) -> None:
    pair = list(factors(role, 9, 11, 18, torch.bfloat16))
    pair[which] = layouts(pair[which])[layout]
    check(load_native().product("loop", role, *pair), role, *pair)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_in_its_row_and_column(dtype: torch.dtype) -> None:
    a, b = factors("grad_input", 6, 8, 20, dtype)
    a[2, 3], b[5, 17] = torch.nan, torch.inf
    result = load_native().product("loop", "grad_input", a, b)
    wanted = exact("grad_input", a, b)
    torch.testing.assert_close(result.isnan(), wanted.isnan())
    torch.testing.assert_close(result.isinf(), wanted.isinf())
    kept = wanted.isfinite()
    assert kept.sum() == 5 * 19
    torch.testing.assert_close(result[kept].double(), wanted[kept], rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_layer_adds_its_bias_before_it_rounds(dtype: torch.dtype) -> None:
    """1 + 2^-12 and a bias of -1: what a product rounded first would have lost."""
    x = torch.tensor([[1.0, 2.0**-6]], dtype=dtype)
    weight = torch.tensor([[1.0, 2.0**-6]] * 3, dtype=dtype)
    bias = torch.full((3,), -1.0, dtype=dtype)
    assert functional.linear_act(x, weight, bias, "identity").tolist() == [[2.0**-12] * 3]


def test_the_table_overrides_the_default() -> None:
    """Told by the order of summing: 2^26 + 30 times 1 - 2^26, in float from left to right, is 0."""
    terms = torch.tensor([2.0**13, *[1.0] * 30, -(2.0**13)])
    x, weight = terms.expand(8, 32).bfloat16(), terms.abs().expand(32, 32).bfloat16()
    by_aten = float(load_native().product("aten", "forward", x, weight)[0, 0])
    if by_aten == 0:
        pytest.skip("aten sums in the same order here")
    for provider, wanted in ((None, 0.0), ("aten", by_aten), ("loop", 0.0)):
        dispatch.set_choices([dispatch.Choice("forward", "bfloat16", 8, 32, 32, provider)] if provider else [])
        assert functional.linear_act(x, weight, None, "identity").tolist() == [[wanted] * 32] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sizes_and_dtypes_that_the_loop_does_not_take_go_to_aten(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    assert not load_native().is_small_product(dtype, 8, 32, 32)
    assert load_native().is_small_product(torch.float32, 16, 10, 10)
    assert not load_native().is_small_product(torch.bfloat16, 8, 1024, 32)
    assert not load_native().is_small_product(torch.bfloat16, 2**62, 2**62, 2**62)
    dispatch.set_choices([dispatch.Choice("forward", name, 8, 32, 32, "loop")])
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(size, generator=generator, dtype=dtype) for size in ((8, 32), (32, 32)))
    torch.testing.assert_close(functional.linear_act(x, weight, None, "identity"), x @ weight.t())
