# SPDX-License-Identifier: Apache-2.0
"""Every memory layout of inputs, weights, biases and output gradients: the oracle's values, and no byte beside."""

from __future__ import annotations

import math

import pytest
import torch
from linear_reference import FORMS, Block, assert_agrees, ours, stock, with_gradients
from reference import LAYOUTS, PARAM_LAYOUTS, assert_gaps_untouched

HAVE_GAPS = ("every_other", "padded_rows", "offset")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*FORMS["gated_mlp"], "output"])
@pytest.mark.parametrize("form", FORMS)
def test_layout_of_one_tensor(device: str, form: str, name: str, layout: str) -> None:  # case 3
    if name not in (*FORMS[form], "output"):
        pytest.skip("not an argument of this form")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for activation in ("relu", "gelu"):
            block = Block(form, activation, (3, 5), 19, 33, 17, dtype, device, layouts={name: layout})
            assert_agrees(block.run(), block.oracle())
            tensor = block.grad_output if name == "output" else block.tensors[name]
            assert tensor is not None
            if layout in HAVE_GAPS:
                assert_gaps_untouched(tensor.detach())


@pytest.mark.parametrize("layout", PARAM_LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_layout_of_all_tensors(device: str, form: str, layout: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        names = (*FORMS[form], "output")
        block = Block(form, "silu", (2, 3, 4), 19, 33, 17, dtype, device, layouts=dict.fromkeys(names, layout))
        assert_agrees(block.run(), block.oracle())


@pytest.mark.parametrize("offset", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_misaligned(device: str, dtype: torch.dtype, offset: int) -> None:  # case 3
    """Every tensor begins `offset` elements into a storage, down to 2 bytes off any alignment that a vector wants."""
    block = Block("gated_mlp", "gelu", (37,), 24, 40, 16, dtype, device)

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        storage = torch.empty(tensor.numel() + offset, dtype=dtype, device=device)
        return storage[offset:].view(tensor.shape).copy_(tensor.detach())

    block.tensors = {k: None if t is None else shifted(t).requires_grad_() for k, t in block.tensors.items()}
    block.grad_output = shifted(block.grad_output)
    assert_agrees(block.run(), block.oracle())


def views(device: str) -> dict[str, torch.Tensor]:
    """Inputs with 24 features, as models make them."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    images = make(2, 24, 3, 5)
    return {
        "sequence first": make(5, 3, 24).transpose(0, 1),
        "channels last": images.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1),
        "channels first": images.permute(0, 2, 3, 1),
        "features transposed": make(24, 7).t(),
        "slice of features": make(7, 60)[:, 20:44],
        "every other row": make(14, 24)[::2],
        "last token": make(4, 9, 24)[:, -1],
        "class token": make(4, 9, 24)[:, 0],
        "one row for all": make(1, 24).expand(7, 24),
        "one batch for all": make(1, 5, 24).expand(3, 5, 24),
        "one number": make(1, 1).expand(7, 24),
        "window": make(200).as_strided((9, 24), (3, 1)),
        "flipped": make(7, 24).flip(0),
        "unfolded": make(1, 60).unfold(1, 24, 9)[0],
    }


@pytest.mark.parametrize("view", views("cpu"))
def test_views_as_input(device: str, view: str) -> None:  # case 3
    x = views(device)[view]
    for form in FORMS:
        block = Block(form, "gelu", x.shape[:-1], 24, 16, 8, device=device)
        block.tensors["input"] = x.detach().requires_grad_()
        assert block.tensors["input"].stride() == x.stride()
        assert_agrees(block.run(), block.oracle())


@pytest.mark.parametrize("form", FORMS)
def test_output_is_as_stock_lays_it_out(device: str, form: str) -> None:
    """Code that calls view() on the output of nn.Linear goes on working."""
    for view, x in views(device).items():
        block = Block(form, "gelu", x.shape[:-1], 24, 16, 8, device=device)
        block.tensors["input"] = x
        output, plain = block.fused(**block.tensors), block.stock(**block.tensors)
        assert output.shape == plain.shape
        assert output.is_contiguous() or output.stride() == plain.stride(), view


@pytest.mark.parametrize("form", FORMS)
def test_gradient_of_a_sum(device: str, form: str) -> None:  # case 3
    """sum().backward() sends one number, expanded with strides of zero."""
    block = Block(form, "gelu", (6, 7), 24, 16, 8, device=device)
    block.grad_output = torch.ones((), device=device).expand(block.grad_output.shape)
    assert_agrees(block.run(), block.oracle())


@pytest.mark.parametrize("transposed", [("weight",), ("down_weight",), ("weight", "up_weight", "down_weight")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_stored_by_input(device: str, dtype: torch.dtype, transposed: tuple[str, ...]) -> None:  # case 13
    """As GPT-2's Conv1D does: the operator gets `weight.t()`, and the parameter a gradient of its own layout."""
    block = Block("gated_mlp", "gelu_tanh", (37,), 24, 40, 16, dtype, device)
    oracle = block.oracle()
    parameters = {}
    for name in transposed:
        tensor = block.tensors[name]
        assert tensor is not None
        parameters[name] = torch.nn.Parameter(tensor.detach().t().contiguous())
        block.tensors[name] = parameters[name].t()
    block.fused(**block.tensors).backward(block.grad_output)
    gradients = {name: t.grad for name, t in block.tensors.items() if t is not None and t.is_leaf}
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        gradients[name] = parameter.grad.t()
    assert_agrees({name: gradient for name, gradient in gradients.items() if gradient is not None}, oracle)
    assert gradients.keys() == block.tensors.keys()


def test_fused_projections_split_into_views(device: str) -> None:
    """Gate and up as halves of one parameter: both gradients reach it."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(64, 24, generator=generator).div(math.sqrt(24)).to(device).requires_grad_()
    bias = torch.randn(64, generator=generator).to(device).requires_grad_()
    x = torch.randn(37, 24, generator=generator).to(device)
    grad_output = torch.randn(37, 32, generator=generator).to(device)
    results = []
    for function in (lambda **tensors: ours("gated_linear", "silu", {}, tensors), lambda **t: stock("silu", {}, t)):
        gate, up = both.chunk(2)
        gate_bias, up_bias = bias.chunk(2)
        y = function(input=x, weight=gate, up_weight=up, bias=gate_bias, up_bias=up_bias)
        results.append(with_gradients(y, {"both": both, "bias": bias}, grad_output))
    for name, expected in results[1].items():
        torch.testing.assert_close(results[0][name], expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_conjugate_and_negative_views_are_resolved_or_refused(device: str, form: str) -> None:
    block = Block(form, "gelu", (5,), device=device)
    pair = torch.randn(5, 7, 2, generator=torch.Generator().manual_seed(0)).to(device)
    negated = torch.view_as_complex(pair).conj().imag  # a view whose elements are minus what its memory holds
    assert negated.is_neg()
    tensors = block.tensors | {"input": negated}
    torch.testing.assert_close(block.fused(**tensors), block.stock(**tensors), rtol=1e-5, atol=1e-5)
