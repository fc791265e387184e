# SPDX-License-Identifier: Apache-2.0
"""Dtypes and autocast: what autocast computes in, what it hands back, and that nothing is cast twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from linear_reference import ACTIVATIONS, FEW_ACTIVATIONS, FORMS, Block, Oracle, assert_agrees, same_bits
from torch.utils.checkpoint import checkpoint

HALF = [torch.bfloat16, torch.float16]


def cast(block: Block, dtype: torch.dtype) -> Oracle:
    """The oracle of what autocast computes: on the tensors as it rounds them, with the bound of its dtype."""
    tensors = {k: None if t is None else t.detach().to(dtype).float() for k, t in block.tensors.items()}
    eps = torch.finfo(dtype).eps
    return Oracle.of(block.activation, block.parameters, tensors, block.grad_output, eps)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", FEW_ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_autocast(device: str, form: str, activation: str, dtype: torch.dtype) -> None:  # case 4
    block = Block(form, activation, (37,), 19, 21, 11, device=device)
    with torch.autocast(device, dtype):
        output = block.fused(**block.tensors)
        assert output.dtype == dtype == block.stock(**block.tensors).dtype
    block.grad_output = block.grad_output.to(dtype)
    gradients = torch.autograd.grad(output, list(block.trainable.values()), block.grad_output)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    block.grad_output = block.grad_output.float()
    assert_agrees({"output": output, **dict(zip(block.trainable, gradients, strict=True))}, cast(block, dtype))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_backward_inside_autocast(device: str, form: str, inside: bool) -> None:
    """Autocast is off in backward whether or not it is called inside: the same bits."""
    block = Block(form, "gelu", (37,), 19, 21, 11, device=device)
    with torch.autocast(device, torch.bfloat16):
        output = block.fused(**block.tensors)
        loss = (output.float() * block.grad_output).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    gradients = {name: t.grad for name, t in block.trainable.items() if t.grad is not None}
    block.grad_output = block.grad_output.bfloat16().float()
    assert gradients.keys() == block.trainable.keys()
    assert_agrees(gradients, cast(block, torch.bfloat16), slack=1.5)


@pytest.mark.parametrize("form", FORMS)
def test_double_stays_double_under_autocast(device: str, form: str) -> None:  # case 4
    block = Block(form, "gelu", (37,), 19, 21, 11, torch.float64, device)
    with torch.autocast(device, torch.bfloat16):
        stock_dtype = block.stock(**block.tensors).dtype
        output = block.fused(**block.tensors)
    assert output.dtype == stock_dtype == torch.float64
    assert_agrees({"output": output}, block.oracle())


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_dtypes_under_autocast(device: str, input_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    block = Block("gated_mlp", "silu", (37,), 19, 21, 11, device=device)
    tensors = {}
    for name, tensor in block.tensors.items():
        assert tensor is not None
        dtype = input_dtype if name == "input" else weight_dtype if name.endswith("weight") else torch.float32
        tensors[name] = tensor.detach().to(dtype).requires_grad_()
    block.tensors = tensors
    block.grad_output = block.grad_output.bfloat16()
    with torch.autocast(device, torch.bfloat16):
        results = block.run()
    assert results["output"].dtype == torch.bfloat16
    for name, tensor in block.trainable.items():
        assert results[name].dtype == tensor.dtype
    block.grad_output = block.grad_output.float()
    assert_agrees(results, cast(block, torch.bfloat16), slack=1.5)


def test_autocast_disabled_inside(device: str) -> None:
    block = Block("mlp", "gelu", (37,), device=device)
    with torch.autocast(device, torch.bfloat16), torch.autocast(device, enabled=False):
        results = block.run()
    assert results["output"].dtype == torch.float32
    assert_agrees(results, block.oracle())


def test_autocast_casts_a_weight_once(device: str) -> None:
    """Its cache of cast weights is used, as by nn.Linear: one cast for two calls, and one gradient summed in fp32."""
    block = Block("linear_act", "gelu", (37,), 19, 21, device=device)
    with torch.autocast(device, torch.bfloat16):
        output = block.fused(**block.tensors) + block.fused(**block.tensors)
    gradients = torch.autograd.grad(output, list(block.trainable.values()), block.grad_output.bfloat16())
    with torch.autocast(device, torch.bfloat16):
        plain = block.stock(**block.tensors) + block.stock(**block.tensors)
    expected = torch.autograd.grad(plain, list(block.trainable.values()), block.grad_output.bfloat16())
    for name, ours, theirs in zip(block.trainable, gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-5, atol=2**-4, msg=name)


@pytest.mark.parametrize("autocast", [None, *HALF], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_checkpointing(device: str, form: str, reentrant: bool, autocast: torch.dtype | None) -> None:  # case 9
    """The same bits as without it."""
    block = Block(form, "gelu", (37,), 19, 21, 11, device=device)
    names = list(block.tensors)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return block.fused(**dict(zip(names, tensors, strict=True)))

    results = []
    for checkpointed in (False, True):
        with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
            if checkpointed:
                output = checkpoint(call, *block.tensors.values(), use_reentrant=reentrant)
            else:
                output = call(*block.tensors.values())  # pyright: ignore[reportArgumentType]
        for tensor in block.trainable.values():
            tensor.grad = None
        output.backward(block.grad_output.to(output.dtype))
        results.append({"output": output.detach()} | {n: t.grad for n, t in block.trainable.items()})
    assert same_bits(*results)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_output_is_rounded_once(device: str, activation: str) -> None:
    """The activation of a 16-bit product is computed in float: within half a unit of what the stored product gives."""
    for dtype in HALF:
        block = Block("linear_act", activation, (333,), 1, 1, dtype=dtype, device=device, without=("bias",))
        block.tensors["weight"] = torch.ones(1, 1, dtype=dtype, device=device)
        x = block.tensors["input"]
        assert x is not None
        exact = ACTIVATIONS[activation](x.detach().double())
        nearest = exact.to(dtype)
        error = (block.fused(**block.tensors).detach().double() - exact).abs()
        allowed = (nearest.double() - exact).abs() + 2e-6 * (exact.abs() + x.detach().double().abs())
        assert bool((error <= allowed).all())


def test_tf32_and_bf16_settings_are_respected(device: str) -> None:
    """torch.set_float32_matmul_precision reaches our products: never less precise than it says."""
    block = Block("mlp", "gelu", (64,), 64, 64, 64, device=device)
    before = torch.get_float32_matmul_precision()
    results = {}
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            results[precision] = block.run()
    finally:
        torch.set_float32_matmul_precision(before)
    assert_agrees(results["highest"], block.oracle())
    tensors = {k: None if t is None else t.detach() for k, t in block.tensors.items()}
    medium = Oracle.of("gelu", {}, tensors, block.grad_output, eps=2.0**-7)
    assert_agrees(results["medium"], medium)


@pytest.mark.parametrize(("form", "dtype"), itertools.product(FORMS, [torch.complex64, torch.int64]), ids=str)
def test_other_dtypes_are_as_stock_or_refused(form: str, dtype: torch.dtype) -> None:
    block = Block(form, "relu")
    tensors = {name: None if t is None else t.detach().to(dtype) for name, t in block.tensors.items()}
    results = []
    for function in (block.fused, block.stock):
        try:
            results.append(function(**tensors))
        except (RuntimeError, ValueError, NotImplementedError, TypeError):
            results.append(None)
    if results[0] is not None:
        torch.testing.assert_close(*results)
