# SPDX-License-Identifier: Apache-2.0
"""What is compared on linear layers: stock modules, ours with the same parameters, and the products alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from contenders import OURS
from measurement import Routine
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812

STOCK = "stock"
COMPILED = "compiled"
STOCK_FUNCTIONAL = "stock functional"
OUR_FUNCTIONAL = "fused_ops functional"
LIMIT = "products alone"

FORWARD = "forward"
TRAINING = "forward+backward"
ACCUMULATING = "forward+backward, kept .grad"
MODES = (FORWARD, TRAINING, ACCUMULATING)

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = (
    (16, 10, 10),
    (128, 784, 512),
    (512, 768, 3072),
    (2048, 1024, 4096),
    (64, 4096, 11008),
    (16384, 256, 1024),
    (65536, 64, 64),
    (8, 768, 3072),
)


class NewGELU(nn.Module):
    """The tanh form of GELU from separate operations, as in GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


# Label to stock's module and our activation's name.
ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "identity": (nn.Identity, "identity"),
    "relu": (nn.ReLU, "relu"),
    "gelu": (nn.GELU, "gelu"),
    "gelu_tanh": (lambda: nn.GELU("tanh"), "gelu_tanh"),
    "gelu_new": (NewGELU, "gelu_tanh"),
    "silu": (nn.SiLU, "silu"),
}
# As functions, where PyTorch has one: a module costs microseconds that a layer of 10 features notices.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class StockMLP(nn.Module):
    def __init__(self, inputs: int, hidden: int, activation: nn.Module, **factory: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden, **factory)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, inputs, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class StockGate(nn.Module):
    def __init__(self, inputs: int, hidden: int, activation: nn.Module, has_down: bool, **factory: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(inputs, hidden, **factory)
        self.up_proj = nn.Linear(inputs, hidden, **factory)
        self.activation = activation
        self.down_proj = nn.Linear(hidden, inputs, **factory) if has_down else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class LinearCase:
    """A block over [rows, inputs]: "layer" (linear, activation), "mlp" (and linear), "gate" (activation(gate) * up) or
    "gated mlp" (and linear)."""

    block: str
    activation: str
    shape: tuple[int, int, int]  # rows, inputs, hidden features
    precision: str

    def __str__(self) -> str:
        return f"{self.block} {self.activation} {'x'.join(map(str, self.shape))} {self.precision}"

    @property
    def products(self) -> int:
        """Matrix products of a forward pass, all of rows x inputs x hidden."""
        return {"layer": 1, "mlp": 2, "gate": 2, "gated mlp": 3}[self.block]

    @property
    def outputs(self) -> int:
        return self.shape[1] if self.block.endswith("mlp") else self.shape[2]


@dataclass
class Problem:
    """The stock module of a case, which owns the parameters, an input and the gradient of the output."""

    case: LinearCase
    stock: nn.Module
    input: Tensor
    grad_output: Tensor

    @classmethod
    def of(cls, case: LinearCase, device: torch.device, seed: int = 0) -> Problem:
        torch.manual_seed(seed)
        rows, inputs, hidden = case.shape
        factory: dict[str, Any] = {"device": device, "dtype": PRECISIONS[case.precision]}
        activation = ACTIVATIONS[case.activation][0]()
        if case.block == "layer":
            linear = nn.Linear(inputs, hidden, **factory)
            stock = linear if case.activation == "identity" else nn.Sequential(linear, activation)
        elif case.block == "mlp":
            stock = StockMLP(inputs, hidden, activation, **factory)
        else:
            stock = StockGate(inputs, hidden, activation, case.block == "gated mlp", **factory)
        x = torch.randn(rows, inputs, **factory).requires_grad_()
        return cls(case, stock, x, torch.randn(rows, case.outputs, **factory))

    def ours(self) -> nn.Module:
        """Our module, over the very parameters of the stock one."""
        layers = import_module("fused_ops.nn")
        _, inputs, hidden = self.case.shape
        options: dict[str, Any] = {"activation": ACTIVATIONS[self.case.activation][1], "bias": True, "device": "meta"}
        name = {"layer": "LinearAct", "mlp": "MLP", "gate": "GatedLinear", "gated mlp": "GatedMLP"}[self.case.block]
        module: nn.Module = getattr(layers, name)(inputs, hidden, **options)
        state = {key.removeprefix("0."): value for key, value in self.stock.state_dict(keep_vars=True).items()}
        module.load_state_dict(state, assign=True)
        return module

    def functional(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """A layer as functions of its parameters; empty for what is no such layer."""
        if self.case.block != "layer" or self.case.activation not in FUNCTIONS:
            return {}
        linear_act = import_module("fused_ops.functional").linear_act
        weight, bias = self.stock.parameters()
        stock, name = FUNCTIONS[self.case.activation], ACTIVATIONS[self.case.activation][1]
        return {
            STOCK_FUNCTIONAL: lambda x: stock(F.linear(x, weight, bias)),
            OUR_FUNCTIONAL: lambda x: linear_act(x, weight, bias, name),
        }

    def callables(self, mode: str, compiled: bool) -> dict[str, Callable[[Tensor], Tensor]]:
        ours = self.ours()
        if mode == ACCUMULATING:
            import_module("fused_ops.nn").accumulate_grad(ours)
        entries: dict[str, Callable[[Tensor], Tensor]] = {STOCK: self.stock, OURS: ours}
        if compiled:
            torch.compiler.reset()
            entries[COMPILED] = torch.compile(self.stock, fullgraph=True)
        if max(self.case.shape) <= 64:
            entries |= self.functional()
        return entries

    def leaves(self) -> list[Tensor]:
        return [self.input, *self.stock.parameters()]

    def routine(self, function: Callable[[Tensor], Tensor], mode: str) -> Routine:
        """What is timed. Gradients start as None, as after zero_grad(), or are added to those that are there."""
        x, grad_output, leaves = self.input, self.grad_output, self.leaves()

        def forward() -> None:
            function(x)

        def train() -> None:
            for leaf in leaves:
                leaf.grad = None
            function(x).backward(grad_output)

        def accumulate() -> None:
            x.grad = None
            function(x).backward(grad_output)

        return {FORWARD: forward, TRAINING: train, ACCUMULATING: accumulate}[mode]

    def products_alone(self, mode: str) -> Routine:
        """The same matrix products into buffers that are kept: what is left when all the rest costs nothing."""
        rows, inputs, hidden = self.case.shape
        x = self.input.detach()
        weight = next(self.stock.parameters()).detach()
        count = self.case.products
        output, grad_input, grad_weight = x.new_empty(rows, hidden), x.new_empty(rows, inputs), torch.empty_like(weight)
        is_down = [index >= 2 or (self.case.block == "mlp" and index == 1) for index in range(count)]

        def forward() -> None:
            for down in is_down:
                if down:
                    torch.mm(output, weight, out=grad_input)
                else:
                    torch.mm(x, weight.t(), out=output)

        def train() -> None:
            forward()
            for down in is_down:
                torch.mm(output.t(), x, out=grad_weight)
                if down:
                    torch.mm(x, weight.t(), out=output)
                else:
                    torch.mm(output, weight, out=grad_input)

        routine = forward if mode == FORWARD else train

        def without_autograd() -> None:
            with torch.no_grad():
                routine()

        return routine if mode == FORWARD else without_autograd


def saved_bytes(problem: Problem, function: Callable[[Tensor], Tensor]) -> int:
    """What autograd keeps from forward for backward, beside the input and the parameters."""
    packed: list[Tensor] = []
    hooks = saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor)
    with torch.enable_grad(), hooks:
        output = function(problem.input)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in packed}
    for leaf in problem.leaves():
        storages.pop(leaf.untyped_storage().data_ptr(), None)
    del output
    return sum(storages.values())


def gradient_bytes_saved(problem: Problem, ours: nn.Module) -> int:
    """Memory for gradients of weights that a pass does without where accumulate_grad() adds them in place. Twice as
    many bytes are not moved: those that a product writes and an addition reads."""
    accumulate_grad, pool = import_module("fused_ops.nn").accumulate_grad, import_module("fused_ops").memory.buffer_pool
    run, device = problem.routine(ours, ACCUMULATING), problem.input.device
    used = {}
    for enabled in (False, True):
        accumulate_grad(ours, enabled)
        run()  # from here on there are gradients to add to
        if device.type == "cpu":  # results of 1 MiB or more
            before = pool()
            run()
            after = pool()
            results = sum(after[key] - before[key] for key in ("reused", "fresh"))
            used[enabled] = results * next(problem.stock.parameters()).nbytes
        else:
            before = torch.cuda.memory_stats(device)
            run()
            after = torch.cuda.memory_stats(device)
            used[enabled] = after["allocated_bytes.all.allocated"] - before["allocated_bytes.all.allocated"]
    return used[False] - used[True]


# Error in parts of the value, both as Euclidean norms: sums of thousands of terms in fp32, a few roundings to 8 bits.
# Not the largest error: where a pre-activation rounds to the other side of a kink, as a few of millions do in every
# implementation, its gradient is another one.
TOLERANCES = {"fp32": 1e-3, "bf16": 2**-4}


class Oracle:
    """Output and gradients of the stock module in float64."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        module = copy.deepcopy(problem.stock).double()
        x = problem.input.detach().double().requires_grad_()
        output = module(x)
        gradients = torch.autograd.grad(output, [x, *module.parameters()], problem.grad_output.double())
        self.expected = [output.detach(), *gradients]

    def verify(self, function: Callable[[Tensor], Tensor]) -> str | None:
        """None, or what differs."""
        problem = self.problem
        for leaf in problem.leaves():
            leaf.grad = None
        with torch.enable_grad():
            output = function(problem.input)
            output.backward(problem.grad_output)
        tolerance = TOLERANCES[problem.case.precision]
        for name, actual, expected in zip(self._names(), self._actual(output), self.expected, strict=True):
            if actual is None:
                return f"gives no {name}"
            error = float((actual.double() - expected).norm() / expected.norm())
            if not error <= tolerance:
                return f"{name} differs from the float64 oracle by {error:.3g} of its norm"
        return None

    def _names(self) -> Iterator[str]:
        yield "output"
        yield "gradient of the input"
        for name, _ in self.problem.stock.named_parameters():
            yield f"gradient of {name}"

    def _actual(self, output: Tensor) -> Iterator[Tensor | None]:
        yield output.detach()
        for leaf in self.problem.leaves():
            yield leaf.grad
