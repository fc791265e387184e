# SPDX-License-Identifier: Apache-2.0
"""What is kept between forward and backward, counted through saved_tensors_hooks: bytes beside the arguments."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_reference import ACTIVATIONS, FORMS, SAVES_OUTPUT, Block, assert_agrees, subsets
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

ROWS, INPUTS, HIDDEN, OUTPUTS = 64, 16, 48, 24


def storages(tensors: Any) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}


def saved(block: Block, function: Callable[..., Tensor]) -> tuple[dict[int, int], Tensor]:
    """Storages that autograd keeps, with their bytes, and the output that keeps them."""
    packed: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        output = function(**block.tensors)
    return storages(packed), output


def saved_bytes(block: Block, function: Callable[..., Tensor]) -> int:
    """Beside the arguments, which exist anyway."""
    kept, output = saved(block, function)
    arguments = storages(block.tensors.values())
    result = sum(size for pointer, size in kept.items() if pointer not in arguments)
    del output
    return result


def block_of(form: str, activation: str, **options: Any) -> Block:
    return Block(form, activation, (ROWS,), INPUTS, HIDDEN, OUTPUTS, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_tensor_for_a_layer(activation: str, dtype: torch.dtype) -> None:
    """The pre-activation, or the output itself, which costs nothing while the next layer keeps it too."""
    block = block_of("linear_act", activation, dtype=dtype)
    kept, output = saved(block, block.fused)
    hidden = ROWS * HIDDEN * dtype.itemsize
    beside = {p: size for p, size in kept.items() if p not in storages(block.tensors.values())}
    if activation == "identity":
        assert beside == {}
    elif activation in SAVES_OUTPUT:
        assert beside == {output.untyped_storage().data_ptr(): hidden}
    else:
        assert list(beside.values()) == [hidden]
        assert output.untyped_storage().data_ptr() not in beside


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "sigmoid"])
def test_two_tensors_for_a_gate(activation: str) -> None:
    """Gate and up; stock keeps the gate twice and the product for the layer that follows."""
    block = block_of("gated_linear", activation)
    hidden = ROWS * HIDDEN * 4
    assert saved_bytes(block, block.fused) == 2 * hidden
    assert saved_bytes(block, block.stock) >= 3 * hidden - (hidden if activation in SAVES_OUTPUT else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_of_the_hidden_of_an_mlp(dtype: torch.dtype) -> None:
    block = block_of("mlp", "gelu", dtype=dtype)
    hidden = ROWS * HIDDEN * dtype.itemsize
    assert saved_bytes(block, block.fused) == hidden
    assert saved_bytes(block, block.stock) == 2 * hidden


def test_half_of_the_hidden_of_a_gated_mlp() -> None:
    block = block_of("gated_mlp", "silu")
    hidden = ROWS * HIDDEN * 4
    assert saved_bytes(block, block.fused) == 2 * hidden
    assert saved_bytes(block, block.stock) == 4 * hidden


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu"])
@pytest.mark.parametrize("form", FORMS)
def test_never_more_than_stock_whatever_is_frozen(form: str, activation: str) -> None:
    """Arguments counted too: an input is not kept alive for the gradient of a frozen weight."""
    for frozen in subsets(FORMS[form]):
        block = block_of(form, activation, frozen=frozen)
        kept = {name: sum(saved(block, f)[0].values()) for name, f in (("ours", block.fused), ("stock", block.stock))}
        assert kept["ours"] <= kept["stock"], f"frozen: {frozen}"


def test_still_fused_after_transforms() -> None:
    """What runs stock's operators inside a transform must not go on doing so after it."""
    block = block_of("gated_mlp", "silu")
    before = saved_bytes(block, block.fused)
    x = torch.ones(3)
    torch.func.grad(lambda t: t.square().sum())(x)
    torch.func.vmap(lambda t: 2 * t)(x)
    torch.func.jvp(lambda t: 2 * t, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        torch.autograd.forward_ad.make_dual(x, x)
    torch.compile(lambda t: 2 * t, backend="eager")(x)
    assert saved_bytes(block, block.fused) == before < saved_bytes(block, block.stock)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_kept_without_gradients(form: str) -> None:
    block = block_of(form, "gelu", frozen=FORMS[form])
    assert saved(block, block.fused)[0] == {}
    block = block_of(form, "gelu")
    with torch.no_grad():
        assert saved(block, block.fused)[0] == {}


@pytest.mark.parametrize("form", FORMS)
def test_saved_tensors_may_be_replaced(form: str) -> None:
    """As offloading and compressing hooks do: what comes back is another tensor with the same values."""
    block = block_of(form, "gelu")
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        output = block.fused(**block.tensors)
    gradients = torch.autograd.grad(output, list(block.trainable.values()), block.grad_output)
    oracle = block.oracle()
    assert_agrees(dict(zip(block.trainable, gradients, strict=True)), oracle)
    with save_on_cpu():
        assert_agrees(block.run(), oracle)


def test_hooks_that_replace_are_seen_by_backward() -> None:
    """Doubling what was saved must change the gradients: nothing is kept on the side, past the hooks."""
    block = block_of("gated_mlp", "silu")
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: 2 * tensor):
        output = block.fused(**block.tensors)
    changed = torch.autograd.grad(output, list(block.trainable.values()), block.grad_output)
    plain = block.run()
    for name, gradient in zip(block.trainable, changed, strict=True):
        if name != "down_bias":  # the sum of the output's gradient, for which nothing is saved
            assert not torch.allclose(gradient, plain[name]), name


@pytest.mark.parametrize("form", FORMS)
def test_memory_is_released_after_backward(form: str) -> None:
    block = block_of(form, "gelu")
    output = block.fused(**block.tensors)
    output.backward(block.grad_output)
    reference = weakref.ref(output)
    del output
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("activation", ["relu", "gelu", "identity"])
@pytest.mark.parametrize("form", FORMS)
def test_no_reference_cycle(form: str, activation: str) -> None:
    """An output that was never used in a backward goes away without the garbage collector."""
    block = block_of(form, activation)
    gc.disable()
    try:
        output = block.fused(**block.tensors)
        reference = weakref.ref(output)
        del output
        assert reference() is None
    finally:
        gc.enable()
