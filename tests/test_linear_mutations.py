# SPDX-License-Identifier: Apache-2.0
"""The tests of the linear tests: a plain Python operator passes them, and fails them with each planted fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import linear_reference
import pytest
import test_linear_layouts
import test_linear_memory
import test_linear_values
import torch
from linear_reference import ACTIVATIONS
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


class Plain(torch.autograd.Function):
    """The formulas of the operator, written out; `fault` names what is wrong in it."""

    @staticmethod
    def forward(
        ctx: Any,
        fault: str,
        activation: str,
        parameters: Mapping[str, float],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        up_weight: Tensor | None,
        up_bias: Tensor | None,
        down_weight: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:
        ctx.fault, ctx.activation, ctx.parameters = fault, activation, parameters
        if fault == "parameters ignored":
            ctx.parameters = parameters = {}
        if fault == "layout of the input ignored":
            input = input.as_strided(input.shape, torch.empty(input.shape).stride())
        pre = F.linear(input, weight, bias)
        up = None if up_weight is None else F.linear(input, up_weight, up_bias)
        hidden = ACTIVATIONS[activation](pre, **parameters)
        if up is not None:
            hidden = hidden * up
        kept = hidden if fault == "hidden kept" and down_weight is not None else None
        ctx.save_for_backward(input, weight, up_weight, down_weight, pre, up, kept)
        output = hidden if down_weight is None else F.linear(hidden, down_weight, down_bias)
        if fault == "output in half precision":
            output = output.bfloat16().to(output.dtype)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # noqa: PLR0912, PLR0915
        input, weight, up_weight, down_weight, pre, up, _ = ctx.saved_tensors
        fault: str = ctx.fault
        (grad,) = grad_outputs
        names = ("input", "weight", "bias", "up", "up_bias", "down", "down_bias")
        need = dict(zip(names, ctx.needs_input_grad[3:], strict=True))
        x = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])

        def rows(tensor: Tensor) -> Tensor:
            return tensor.reshape(x.shape[0], tensor.shape[-1])

        def slope(activation: str) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                z = rows(pre).detach().requires_grad_()
                value = ACTIVATIONS[activation](z, **ctx.parameters)
                return value.detach(), torch.autograd.grad(value.sum(), z)[0]

        value, derivative = slope(ctx.activation)
        if fault == "derivative of another gelu":
            _, derivative = slope("gelu_tanh")
        if fault == "derivative in half precision":
            derivative = derivative.bfloat16().to(derivative.dtype)
        if fault == "saved tensor reused as a buffer":
            pre.mul_(0.5)
        if fault == "output gradient written":
            grad.mul_(2)
        grad = rows(grad)
        results: dict[str, Tensor | None] = dict.fromkeys(need)
        hidden = value if up is None else value * rows(up)
        if down_weight is not None:
            results["down"] = grad.t() @ hidden if need["down"] else None
            results["down_bias"] = grad.sum(0) if need["down_bias"] else None
            grad = grad @ down_weight
        grad_pre = grad * derivative if up is None else grad * rows(up) * derivative
        if need["weight"]:
            results["weight"] = grad_pre.t() @ x
            if fault == "weight gradient of no rows uninitialised" and not x.shape[0]:
                results["weight"] = torch.full_like(weight, math.nan)
            if fault == "weight gradient of the square transposed" and weight.shape[0] == weight.shape[1]:
                results["weight"] = (x.t() @ grad_pre).contiguous()
        if need["bias"]:
            results["bias"] = grad_pre.sum(0)
            if fault == "no bias gradient":
                results["bias"] = None
            if fault == "bias gradient before the activation":
                results["bias"] = grad.sum(0)
            if fault == "bias gradient only with that of the weight" and not need["weight"]:
                results["bias"] = torch.zeros_like(grad_pre[0])
            if fault == "last row left out of the bias gradient":
                results["bias"] = grad_pre[:-1].sum(0)
        if need["input"] or fault == "gradient of a frozen input":
            grad_input = grad_pre @ weight
            if up_weight is not None:
                grad_up = grad * value
                grad_input = grad_input + grad_up @ up_weight
                if fault == "up counted twice":
                    grad_input = grad_input + grad_up @ up_weight
            results["input"] = grad_input.reshape(input.shape) if need["input"] else None
        if up_weight is not None:
            grad_up = grad * value if fault != "up gradient without the activation" else grad
            results["up"] = grad_up.t() @ x if need["up"] else None
            results["up_bias"] = grad_up.sum(0) if need["up_bias"] else None
        return None, None, None, *results.values()


def plain(fault: str) -> Callable[..., Tensor]:
    """In place of linear_reference.ours."""

    def call(_: str, activation: str, parameters: Mapping[str, float], tensors: Mapping[str, Tensor | None]) -> Tensor:
        names = ("input", "weight", "bias", "up_weight", "up_bias", "down_weight", "down_bias")
        output = Plain.apply(fault, activation, parameters, *(tensors.get(name) for name in names))
        assert isinstance(output, Tensor)
        return output

    return call


values, layouts, memory = test_linear_values, test_linear_layouts, test_linear_memory

# Fault, and a test that must see it.
FAULTS: dict[str, Callable[[], None]] = {
    "derivative of another gelu": lambda: values.test_agrees_with_the_oracle(
        "cpu", "linear_act", "gelu", {}, torch.float32
    ),
    "derivative in half precision": lambda: values.test_agrees_with_the_oracle(
        "cpu", "gated_mlp", "mish", {}, torch.float32
    ),
    "output in half precision": lambda: values.test_sizes("cpu", "gelu", 3, 7, 1),
    "parameters ignored": lambda: values.test_agrees_with_the_oracle(
        "cpu", "mlp", "leaky_relu", {"negative_slope": 0.3}, torch.bfloat16
    ),
    "no bias gradient": lambda: values.test_every_subset_of_frozen_arguments("cpu", "linear_act", "gelu"),
    "bias gradient before the activation": lambda: values.test_sizes("cpu", "relu", 1, 3, 5),
    "bias gradient only with that of the weight": lambda: values.test_every_subset_of_frozen_arguments(
        "cpu", "linear_act", "gelu"
    ),
    "last row left out of the bias gradient": lambda: values.test_sizes("cpu", "gelu", 3, 7, 5),
    "weight gradient of no rows uninitialised": lambda: values.test_no_rows_give_zero_gradients("cpu", "mlp", (2, 0)),
    "weight gradient of the square transposed": lambda: values.test_sizes("cpu", "gelu", 7, 7, 5),
    "up counted twice": lambda: values.test_sizes_of_blocks("cpu", "gated_linear", (5, 1, 333, 1)),
    "up gradient without the activation": lambda: values.test_sizes_of_blocks("cpu", "gated_mlp", (3, 777, 7, 333)),
    "gradient of a frozen input": lambda: values.test_no_gemm_for_what_is_frozen("gated_linear"),
    "saved tensor reused as a buffer": lambda: values.test_the_same_bits_every_time_and_from_a_retained_graph(
        "cpu", "linear_act", "gelu"
    ),
    "output gradient written": lambda: values.test_nothing_that_is_given_is_written("cpu", "linear_act", "gelu"),
    "layout of the input ignored": lambda: layouts.test_views_as_input("cpu", "every other row"),
    "hidden kept": lambda: memory.test_half_of_the_hidden_of_an_mlp(torch.float32),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_no_alarm(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(linear_reference, "ours", plain(""))
    FAULTS[fault]()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(linear_reference, "ours", plain(fault))
    with pytest.raises((AssertionError, RuntimeError)):
        FAULTS[fault]()


@pytest.mark.parametrize("activation", ["relu", "gelu", "hardswish"])
def test_one_element_off_by_a_few_ulps(activation: str) -> None:
    """The bound is no wider than it says: 8 ulps on the largest element of a small problem are too many."""
    block = linear_reference.Block("linear_act", activation, (5,), 3, 4, seed=5)
    results, oracle = block.run(block.stock), block.oracle()
    linear_reference.assert_agrees(results, oracle)
    for name in ("output", "input", "weight", "bias"):
        changed = {key: value.clone() for key, value in results.items()}
        flat = changed[name].flatten()
        flat[flat.abs().argmax()] *= 1 + 100 * torch.finfo(torch.float32).eps
        changed[name] = flat.view_as(changed[name])
        with pytest.raises(AssertionError, match=name):
            linear_reference.assert_agrees(changed, oracle)
