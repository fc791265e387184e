# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle, the error bound, and the tables that the tests of the linear-activation layers draw from.

Oracle
    Stock PyTorch on float64 copies of the very tensors that the operator under test gets, gradients by autograd.

Bound
    A running error analysis in float64. A sum is off by at most ``ULPS * eps(dtype)`` of the absolute values that are
    summed, a product of stored numbers by the errors of its factors, and an activation by how far it moves when its
    input moves by the input's error, plus ulps of its own terms. Kinks need no exception: within
    the input's error of one, either side's derivative is right.
    Why 2 ulps: rounding a stored result costs half of one; a blocked sum of n terms of random sign grows it by far
    less than one more. An activation may be off by 4 ulps of its input (stock's
    own erf GELU is, by 3, near -3), and its derivative, which sums terms of the size of one and of the input, by 2.
    The bound adds up worst cases, so ``test_linear_values`` also compares the typical error with stock's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from reference import GAP, LAYOUTS, draw, wide
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

ULPS = 2.0

Function = Callable[..., Tensor]

# Name to PyTorch's own function; differentiable, in any dtype, with the operator's keyword parameters.
ACTIVATIONS: dict[str, Function] = {
    "identity": lambda x: x * 1.0,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "softplus": F.softplus,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": lambda x: F.relu6(x + 3) / 6,  # F.hardsigmoid has no second derivative
}
# Away from the defaults, for the activations that have any. CELU's alpha is a power of two, since stock rounds its
# inverse to float32 in the derivative.
PARAMETERS: dict[str, dict[str, float]] = {
    "leaky_relu": {"negative_slope": 0.3},
    "elu": {"alpha": 0.7},
    "celu": {"alpha": 2.0},
    "softplus": {"beta": 2.0, "threshold": 1.5},
    "hardtanh": {"min_val": -0.5, "max_val": 0.875},
}
ALL_ACTIVATIONS = [*((name, {}) for name in ACTIVATIONS), *PARAMETERS.items()]
# A slope that gives one output for two inputs, and bounds that are no numbers of 16 bits.
ALL_ACTIVATIONS += [("leaky_relu", {"negative_slope": -0.3}), ("hardtanh", {"min_val": -0.3, "max_val": 0.7})]
FEW_ACTIVATIONS = ["identity", "relu", "gelu", "gelu_tanh", "silu", "tanh"]  # one of each way to save and to compute
SAVES_OUTPUT = ("relu", "sigmoid", "tanh")
SMOOTH = [name for name in ACTIVATIONS if name not in ("relu", "leaky_relu", "relu6", "hardtanh", "hardsigmoid")]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

# The functional forms, and their tensor arguments in order.
FORMS: dict[str, tuple[str, ...]] = {
    "linear_act": ("input", "weight", "bias"),
    "gated_linear": ("input", "weight", "up_weight", "bias", "up_bias"),
    "mlp": ("input", "weight", "bias", "down_weight", "down_bias"),
    "gated_mlp": ("input", "weight", "up_weight", "down_weight", "bias", "up_bias", "down_bias"),
}


def stock(activation: str, parameters: Mapping[str, float], tensors: Mapping[str, Tensor | None]) -> Tensor:
    """The block from PyTorch's own operators."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    hidden = ACTIVATIONS[activation](F.linear(given["input"], given["weight"], given.get("bias")), **parameters)
    if "up_weight" in given:
        hidden = hidden * F.linear(given["input"], given["up_weight"], given.get("up_bias"))
    if "down_weight" in given:
        hidden = F.linear(hidden, given["down_weight"], given.get("down_bias"))
    return hidden


def ours(form: str, activation: str, parameters: Mapping[str, float], tensors: Mapping[str, Tensor | None]) -> Tensor:
    import fused_ops.functional

    return getattr(fused_ops.functional, form)(**tensors, activation=activation, **parameters)


@dataclass
class Block:
    """A functional form with its tensors and the gradient of its output; ``tensors`` are leaves that require grad.

    Layouts are those of ``reference.LAYOUTS``, by argument; "output" is the output's gradient. ``without`` names the
    biases that are left out, ``frozen`` the arguments that do not require grad. Weights are scaled as layers are
    initialised, so that the activation sees values of a size around one.
    """

    form: str = "linear_act"
    activation: str = "gelu"
    batch: Sequence[int] = (5,)
    inputs: int = 7
    hidden: int = 6
    outputs: int = 4
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    parameters: Mapping[str, float] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    without: Iterable[str] = ()
    frozen: Iterable[str] = ()
    seed: int = 0
    tensors: dict[str, Tensor | None] = field(init=False)
    grad_output: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        has_down = "down_weight" in FORMS[self.form]
        shapes: dict[str, tuple[int, ...]] = {
            "input": (*self.batch, self.inputs),
            "weight": (self.hidden, self.inputs),
            "bias": (self.hidden,),
            "up_weight": (self.hidden, self.inputs),
            "up_bias": (self.hidden,),
            "down_weight": (self.outputs, self.hidden),
            "down_bias": (self.outputs,),
            "output": (*self.batch, self.outputs if has_down else self.hidden),
        }

        def make(name: str) -> Tensor:
            value = draw(shapes[name], torch.float64, generator)
            if name.endswith("weight"):
                value = value / math.sqrt(max(1, shapes[name][1]))
            layout = self.layouts.get(name, "contiguous")
            return LAYOUTS[layout](value.to(self.device, self.dtype), GAP)

        self.tensors = {
            name: None if name in tuple(self.without) else make(name).requires_grad_(name not in tuple(self.frozen))
            for name in FORMS[self.form]
        }
        self.grad_output = make("output")

    @property
    def trainable(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.tensors.items() if t is not None and t.requires_grad}

    def run(self, function: Function | None = None) -> dict[str, Tensor]:
        """The output and the gradients of all that requires one, of ours, or of another function(**tensors)."""
        output = (function or self.fused)(**self.tensors)
        return with_gradients(output, self.trainable, self.grad_output)

    def stock(self, **tensors: Tensor | None) -> Tensor:
        return stock(self.activation, self.parameters, tensors)

    def fused(self, **tensors: Tensor | None) -> Tensor:
        return ours(self.form, self.activation, self.parameters, tensors)

    def oracle(self) -> Oracle:
        return Oracle.of(self.activation, self.parameters, self.tensors, self.grad_output)


def with_gradients(output: Tensor, trainable: Mapping[str, Tensor], grad_output: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(output, list(trainable.values()), grad_output) if trainable else ()
    return {"output": output.detach(), **dict(zip(trainable, gradients, strict=True))}


@dataclass
class Oracle:
    """Values of the output and of every gradient, and how far each element may be off them."""

    values: dict[str, Tensor]
    bounds: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        activation: str,
        parameters: Mapping[str, float],
        tensors: Mapping[str, Tensor | None],
        grad_output: Tensor,
        eps: float | None = None,
    ) -> Oracle:
        """``eps``: that of the compute dtype where it is not the tensors' own, as under autocast."""
        eps = eps or torch.finfo(grad_output.dtype).eps
        eps *= 2 if eps == torch.finfo(torch.float64).eps else 1  # the oracle rounds as much
        copies = {name: None if t is None else wide(t).requires_grad_() for name, t in tensors.items()}
        present = {name: copy for name, copy in copies.items() if copy is not None}
        values = with_gradients(stock(activation, parameters, copies), present, wide(grad_output))
        bounds = _bounds(activation, parameters, present, wide(grad_output), ULPS * eps)
        return cls(values, {name: bounds[name] for name in values})


@dataclass
class Approximate:
    """A float64 matrix, and a bound on the error of what was computed for it."""

    value: Tensor
    error: Tensor

    def __mul__(self, other: Approximate) -> Approximate:
        return Approximate(self.value * other.value, self._propagated(other, torch.mul))

    def __matmul__(self, other: Approximate) -> Approximate:
        return Approximate(self.value @ other.value, self._propagated(other, torch.matmul))

    def _propagated(self, other: Approximate, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return product(self.value.abs() + self.error, other.error) + product(self.error, other.value.abs())

    @property
    def mT(self) -> Approximate:  # noqa: N802 (torch's name)
        return Approximate(self.value.mT, self.error.mT)


def _bounds(
    activation: str, parameters: Mapping[str, float], tensors: dict[str, Tensor], grad_output: Tensor, unit: float
) -> dict[str, Tensor]:
    """The error analysis of the module's docstring; ``unit`` is the error of an operation in parts of its terms."""
    underflow = unit * (6.2e-5 if unit > 1e-4 else 0.0)  # float16 is no finer than eps of its smallest normal number

    def exact(value: Tensor) -> Approximate:
        return Approximate(value, torch.zeros_like(value))

    def summed(result: Approximate, terms: Tensor) -> Approximate:
        return Approximate(result.value, result.error + unit * terms + underflow)

    def product(a: Approximate, b: Approximate) -> Approximate:
        return summed(a @ b, a.value.abs() @ b.value.abs())

    def scaled(a: Approximate, b: Approximate) -> Approximate:
        result = a * b
        return summed(result, result.value.abs())

    def column_sum(a: Approximate) -> Tensor:
        return a.error.sum(0) + unit * a.value.abs().sum(0) + underflow

    def linear(a: Approximate, weight: str, bias: str) -> Approximate:
        result = product(a, exact(tensors[weight]).mT)
        if bias not in tensors:
            return result
        offset = tensors[bias].detach()
        return summed(Approximate(result.value + offset, result.error), offset.abs())

    def elementwise(function: Callable[[Tensor], Tensor], x: Approximate, terms: Tensor) -> Approximate:
        value = function(x.value)
        around = [(function(x.value + sign * x.error) - value).abs() for sign in (-1, 1)]
        return summed(Approximate(value, torch.maximum(*around)), value.abs() + terms)

    def value_of(x: Tensor) -> Tensor:
        return ACTIVATIONS[activation](x, **parameters)

    def derivative_of(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(value_of(x).sum(), x)[0]

    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    batch, inputs = tensors["input"].shape[:-1], tensors["input"].shape[-1]
    x = exact(tensors["input"].reshape(math.prod(batch), inputs))
    grad = exact(grad_output.reshape(x.value.shape[0], grad_output.shape[-1]))
    bounds: dict[str, Tensor] = {}

    pre = linear(x, "weight", "bias")
    gate = elementwise(value_of, pre, 2 * pre.value.abs())
    up = linear(x, "up_weight", "up_bias") if "up_weight" in tensors else None
    hidden = scaled(gate, up) if up else gate
    output = hidden
    if "down_weight" in tensors:
        output = linear(hidden, "down_weight", "down_bias")
        bounds["down_weight"] = product(grad.mT, hidden).error
        bounds["down_bias"] = column_sum(grad)
        grad = product(grad, exact(tensors["down_weight"]))

    slope = elementwise(derivative_of, pre, 1 + pre.value.abs())
    grad_pre = scaled(scaled(grad, up) if up else grad, slope)
    bounds["output"] = output.error.reshape(grad_output.shape)
    bounds["weight"] = product(grad_pre.mT, x).error
    bounds["bias"] = column_sum(grad_pre)
    grad_input = product(grad_pre, exact(tensors["weight"]))
    if up:
        grad_up = scaled(grad, gate)
        bounds["up_weight"] = product(grad_up.mT, x).error
        bounds["up_bias"] = column_sum(grad_up)
        through_up = product(grad_up, exact(tensors["up_weight"]))
        both = through_up.value.abs() + grad_input.value.abs()
        grad_input = summed(Approximate(both, grad_input.error + through_up.error), both)
    bounds["input"] = grad_input.error.reshape(tensors["input"].shape)
    return bounds


def off(actual: Tensor, expected: Tensor, bound: Tensor) -> Tensor:
    """Errors in parts of their bounds; NaN where only one side is one counts as infinite."""
    assert actual.shape == expected.shape, f"expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    actual = wide(actual)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    share = (actual - expected).abs() / bound
    return torch.where(same, 0.0, torch.where(share.isnan(), math.inf, share))


def assert_agrees(results: Mapping[str, Tensor], oracle: Oracle, slack: float = 1.0) -> None:
    """Every result, and none is missing silently: the caller names what it computed by computing it."""
    for name, actual in results.items():
        shares = off(actual, oracle.values[name], oracle.bounds[name])
        share = float(shares.max()) if shares.numel() else 0.0
        assert share <= slack, f"{name}: {share:.3g} times its bound off the oracle, over {slack:g}"


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [chosen for count in range(len(names) + 1) for chosen in itertools.combinations(names, count)]


def same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(a, second[name]) and a.dtype == second[name].dtype for name, a in first.items()
    )
