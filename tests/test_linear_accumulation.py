# SPDX-License-Identifier: Apache-2.0
"""accumulate_grad: weight gradients that the product adds to .grad itself, equal to stock's over micro-batches."""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fused_ops import dispatch

layers = importlib.import_module("fused_ops.nn")
MICRO_BATCHES = 8
MODULES: dict[str, Callable[[], nn.Module]] = {
    "LinearAct": lambda: layers.LinearAct(24, 24),
    "GatedLinear": lambda: layers.GatedLinear(24, 24),
    "MLP": lambda: layers.MLP(24, 40, activation="relu"),
    "GatedMLP": lambda: layers.GatedMLP(24, 40),
    "stacked": lambda: nn.Sequential(layers.MLP(24, 40), nn.LayerNorm(24), layers.LinearAct(24, 24)),
}


def make(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]().to(device, dtype)


def batch(module: nn.Module, seed: int) -> Tensor:
    parameter = next(module.parameters())
    x = torch.randn(37, 24, generator=torch.Generator().manual_seed(seed))
    return x.to(parameter.device, parameter.dtype)


def loss(module: nn.Module, seed: int = 0) -> Tensor:
    output = module(batch(module, seed))
    return (output * torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)).sum()


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.dim() == 2]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_equal_over_micro_batches(device: str, name: str, dtype: torch.dtype, keep: bool) -> None:
    """Two steps of eight micro-batches, gradients cleared to zeros or to None between them."""
    module = make(name, dtype, device)
    plain = copy.deepcopy(module)
    assert layers.accumulate_grad(module) == len(matrices(module))
    for _ in range(2):
        for network in (module, plain):
            network.zero_grad(set_to_none=not keep)
            for seed in range(MICRO_BATCHES):
                loss(network, seed).backward()
    # A sum of eight, rounded after each in stock; the product adds before it rounds.
    tolerance = MICRO_BATCHES * torch.finfo(dtype).eps
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("name", MODULES)
def test_the_kept_gradient_is_the_one_that_grows(device: str, name: str) -> None:
    module = make(name, device=device)
    layers.accumulate_grad(module)
    loss(module).backward()
    kept = [parameter.grad for parameter in module.parameters()]
    pointers = [grad.data_ptr() for grad in kept if grad is not None]
    once = [None if grad is None else grad.clone() for grad in kept]
    loss(module).backward()
    for parameter, before, pointer, first in zip(module.parameters(), kept, pointers, once, strict=True):
        assert parameter.grad is before
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == pointer
        torch.testing.assert_close(parameter.grad, 2 * first, rtol=1e-5, atol=1e-4)  # pyright: ignore


def test_main_grad_in_float32(device: str) -> None:
    """Master gradients of bf16 weights: .grad stays empty, and the sum is more exact than in bf16."""
    module = make("GatedMLP", torch.bfloat16, device)
    exact = copy.deepcopy(module).double()
    for parameter in matrices(module):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # pyright: ignore
    layers.accumulate_grad(module)
    for seed in range(MICRO_BATCHES):
        for network in (module, exact):
            loss(network, seed).backward()
    for ours, theirs in zip(matrices(module), matrices(exact), strict=True):
        assert ours.grad is None
        assert theirs.grad is not None
        error = (ours.main_grad.double() - theirs.grad).abs().max() / theirs.grad.abs().max()  # pyright: ignore
        assert float(error) < 0.02


def test_gradients_that_are_asked_for_are_returned() -> None:
    """torch.autograd.grad and create_graph get their gradients, and .grad does not change."""
    module = make("GatedMLP")
    plain = copy.deepcopy(module)
    layers.accumulate_grad(module)
    loss(module).backward()
    before = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    gradients = torch.autograd.grad(loss(module), list(module.parameters()))
    expected = torch.autograd.grad(loss(plain), list(plain.parameters()))
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)
    (penalty,) = torch.autograd.grad(loss(module).square(), [matrices(module)[0]], create_graph=True)
    assert penalty.grad_fn is not None
    for parameter, kept in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, kept)  # pyright: ignore


def test_hooks_set_later_see_the_gradient() -> None:
    module = make("MLP")
    plain = copy.deepcopy(module)
    layers.accumulate_grad(module)
    seen: dict[int, list[Tensor]] = {0: [], 1: []}
    for which, network in enumerate((module, plain)):
        loss(network).backward()
        matrices(network)[0].register_hook(lambda g, which=which: seen[which].append(g))
        matrices(network)[1].register_post_accumulate_grad_hook(
            lambda p, which=which: seen[which].append(p.grad.clone())
        )
        loss(network, 1).backward()
    assert len(seen[0]) == len(seen[1]) == 2
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_refused_where_a_gradient_would_be_missed() -> None:
    module = make("MLP")
    handle = matrices(module)[0].register_hook(lambda g: g)
    with pytest.raises(ValueError, match=r"expected weights without hooks, got one on fc1.weight\. [A-Z]"):
        layers.accumulate_grad(module)
    handle.remove()
    assert layers.accumulate_grad(module) == 2


@pytest.mark.usefixtures("process_group")
def test_refused_within_distributed_data_parallel() -> None:
    parallel = nn.parallel.DistributedDataParallel(make("MLP"))
    for wrapped in (parallel, nn.Sequential(parallel)):
        with pytest.raises(ValueError, match="DistributedDataParallel"):
            layers.accumulate_grad(wrapped)


@pytest.mark.usefixtures("process_group")
def test_marked_before_distributed_data_parallel_reduces_all_the_same() -> None:
    """The order that no check can see: wrapping after marking. Its hooks on the accumulators must still fire."""
    module = make("MLP")
    plain = copy.deepcopy(module)
    layers.accumulate_grad(module)
    parallel = nn.parallel.DistributedDataParallel(module)
    for seed in range(3):
        loss(parallel, seed).backward()
        loss(plain, seed).backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["sparse", "transposed", "every other", "frozen"])
def test_gradients_that_cannot_be_added_to(form: str) -> None:
    """A .grad of another kind than the product can write: the sum is stock's."""
    module = make("LinearAct")
    plain = copy.deepcopy(module)
    layers.accumulate_grad(module)
    for network in (module, plain):
        weight = matrices(network)[0]
        if form == "sparse":
            weight.grad = torch.eye(24).to_sparse()
        elif form == "transposed":
            weight.grad = torch.ones(24, 24).t()
        elif form == "every other":
            weight.grad = torch.ones(24, 48)[:, ::2]
        else:
            weight.requires_grad_(False)
        loss(network).backward()
    ours, theirs = (matrices(network)[0].grad for network in (module, plain))
    assert (ours is None) is (theirs is None)
    if ours is not None and theirs is not None:
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=1e-5, atol=1e-5)


def test_unmarked_and_copied() -> None:
    module = make("MLP")
    layers.accumulate_grad(module)
    assert layers.accumulate_grad(module, enabled=False) == 2
    marked = make("MLP")
    layers.accumulate_grad(marked)
    plain, twin = make("MLP"), copy.deepcopy(marked)
    for network in (module, plain, twin):
        for seed in range(2):
            loss(network, seed).backward()
    assert all(parameter.grad is None for parameter in marked.parameters())
    for network in (module, twin):
        for ours, theirs in zip(network.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_a_weight_used_twice() -> None:
    torch.manual_seed(0)
    layer = layers.LinearAct(24, 24)
    plain = copy.deepcopy(layer)
    layers.accumulate_grad(layer)
    for network in (layer, plain):
        for seed in range(3):
            network(network(batch(network, seed))).square().sum().backward()
    for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"accumulate_grad: expected module to be a torch.nn.Module, got list"):
        layers.accumulate_grad([layers.LinearAct(7, 6)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [
        (torch.zeros(6, 7, dtype=torch.int32), "floating-point dtype"),
        (torch.zeros(6, 7, dtype=torch.complex64), "floating-point dtype"),
        (torch.zeros(6, 7, requires_grad=True), "not to require grad"),
        (torch.zeros(7, 6), r"to have shape \(6, 7\)"),
        (torch.zeros(6, 7, device="meta"), "to be on cpu"),
        (torch.zeros(6, 7).to_sparse(), "strided"),
        ([0.0], "strided Tensor"),
        (torch.zeros(1, 7).expand(6, 7), "expanded|share memory"),
    ],
)
def test_a_main_grad_that_cannot_take_the_gradient_is_refused(main_grad: object, message: str) -> None:
    layer = layers.LinearAct(7, 6)
    layer.weight.main_grad = main_grad
    with pytest.raises(ValueError, match=message):
        layers.accumulate_grad(layer)
    if isinstance(main_grad, torch.Tensor):  # put there later
        del layer.weight.main_grad
        layers.accumulate_grad(layer)
        layer.weight.main_grad = main_grad
        with pytest.raises(RuntimeError, match="accumulate_grad: expected main_grad"):
            layer(torch.randn(2, 7)).sum().backward()


def test_a_weight_frozen_after_the_forward_pass_gets_no_gradient() -> None:
    layer = layers.LinearAct(7, 6)
    layers.accumulate_grad(layer)
    layer(torch.randn(2, 7)).sum().backward()
    assert layer.weight.grad is not None
    before = layer.weight.grad.clone()
    output = layer(torch.randn(2, 7)).sum()
    layer.weight.requires_grad_(False)
    output.backward()
    assert torch.equal(layer.weight.grad, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", ["frozen first layer", "stock is faster"])
def test_main_grad_gets_the_gradient_however_the_block_runs(case: str, dtype: torch.dtype) -> None:
    if case == "frozen first layer":
        module = layers.MLP(24, 32, 8).to(dtype)
        module.fc1.requires_grad_(False)
        weight = module.fc2.weight
    else:  # for float64 GELU of this size, and by the table
        module = layers.LinearAct(64, 512, activation="gelu").to(dtype)
        weight = module.weight
    x = torch.randn(64, 24 if case == "frozen first layer" else 64, dtype=dtype)
    (expected,) = torch.autograd.grad(module(x).square().sum(), weight)
    weight.main_grad = torch.ones_like(weight)
    layers.accumulate_grad(module)
    name = str(dtype).removeprefix("torch.")
    dispatch.set_choices([dispatch.Choice("gelu", name, 64, 64, 512, "stock")])
    try:
        module(x).square().sum().backward()
    finally:
        dispatch.reset()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad - 1, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_graph_that_saved_the_old_gradient_raises() -> None:
    layer = layers.LinearAct(4, 4)
    layer.weight.grad = torch.randn(4, 4)
    layers.accumulate_grad(layer)
    factor = torch.randn(4, 4, requires_grad=True)
    product = (layer.weight.grad * factor).sum()
    layer(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("other", ["the fused layer", "stock's operator"])
def test_two_threads_lose_no_update(other: str) -> None:
    """Each adds ones times ones, exactly; without a lock, or with one of our own, some are lost."""
    layer = layers.LinearAct(256, 256, bias=False, activation="identity")
    layer.weight.grad = torch.zeros(256, 256)
    layers.accumulate_grad(layer)
    steps = 1000

    def work(function: Callable[[Tensor], Tensor]) -> None:
        for _ in range(steps):
            function(torch.ones(8, 256)).sum().backward()

    def stock(x: Tensor) -> Tensor:
        return F.linear(x, layer.weight)

    functions = [layer, layer if other == "the fused layer" else stock]
    threads = [threading.Thread(target=work, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bool((layer.weight.grad == 2 * steps * 8).all())


@pytest.mark.parametrize(
    ("dtype", "sum_dtype"),
    [
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float64),
    ],
    ids=str,
)
def test_a_main_grad_of_any_dtype_is_rounded_once(dtype: torch.dtype, sum_dtype: torch.dtype) -> None:
    """The factors are out of float16's range, unless they are in it, and the gradient is not."""
    layer = layers.LinearAct(24, 40, bias=False, activation="identity").to(dtype)
    generator = torch.Generator().manual_seed(1)
    large = 1.0 if dtype == torch.float16 else 1e5
    x = (torch.randn(64, 24, generator=generator) / large).to(dtype)
    grad_output = (large * torch.randn(64, 40, generator=generator)).to(dtype)
    start = torch.randn(40, 24, generator=generator).to(sum_dtype)
    layer.weight.main_grad = start.clone()
    layers.accumulate_grad(layer)
    layer(x).backward(grad_output)
    exact = start.double() + grad_output.double().t() @ x.double()
    terms = grad_output.double().abs().t() @ x.double().abs()
    bound = (2**-50 if torch.float64 in (dtype, sum_dtype) else 2**-22) * terms
    bound += 0.5001 * torch.finfo(sum_dtype).eps * exact.abs()
    assert bool(((layer.weight.main_grad.double() - exact).abs() <= bound).all())
