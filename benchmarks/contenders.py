# SPDX-License-Identifier: Apache-2.0
"""What is compared: optimizers, precisions, and the implementations that compete on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import Parameter

import fused_ops.optim

OURS = "fused_ops"
STOCK = ("loop", "foreach", "fused")
HAS_STOCK_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer with its arguments; `states` is the number of state tensors as large as the parameter."""

    name: str
    class_name: str
    states: int
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Precision:
    """Parameters and gradients share one dtype; `state_dtype` None means that states have it too."""

    name: str
    dtype: torch.dtype
    state_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Contender:
    """`make_step` takes parameters with gradients and returns the routine that is timed: one optimizer step."""

    name: str
    make_step: Callable[[list[Parameter]], Callable[[], Any]]
    state_dtype: torch.dtype
    exact: bool = True  # False: states of 8 bits, held to a looser bound and given no bandwidth figures


OPTIMIZERS = {
    case.name: case
    for case in (
        OptimizerCase("RMSprop", "RMSprop", 1),
        OptimizerCase("RMSprop momentum", "RMSprop", 2, {"momentum": 0.9}),
        OptimizerCase("RMSprop centered", "RMSprop", 2, {"centered": True}),
        OptimizerCase("AdamW", "AdamW", 2),
        OptimizerCase("Adam", "Adam", 2),
        OptimizerCase("SGD momentum", "SGD", 1, {"momentum": 0.9}),
        OptimizerCase("Adagrad", "Adagrad", 1),
    )
}

PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", torch.float32),
        Precision("bf16", torch.bfloat16),
        Precision("fp32, bf16 states", torch.float32, torch.bfloat16),
    )
}

LR = 1e-3


def bytes_per_element(case: OptimizerCase, dtype: torch.dtype, state_dtype: torch.dtype) -> int:
    """What a step must move: gradient read, parameter and every state read and written."""
    return 3 * dtype.itemsize + 2 * case.states * state_dtype.itemsize


def stock_contenders(case: OptimizerCase, precision: Precision) -> list[Contender]:
    cls = getattr(torch.optim, case.class_name)
    modes = {"loop": {"foreach": False}, "foreach": {"foreach": True}}
    if case.class_name in HAS_STOCK_FUSED:
        modes["fused"] = {"fused": True}

    def contender(name: str, mode: dict[str, bool]) -> Contender:
        return Contender(
            name, lambda parameters: cls(parameters, lr=LR, **case.arguments, **mode).step, precision.dtype
        )

    return [contender(name, mode) for name, mode in modes.items()]


def compiled_contender(case: OptimizerCase, precision: Precision) -> Contender:
    cls = getattr(torch.optim, case.class_name)

    def make_step(parameters: list[Parameter]) -> Callable[[], Any]:
        torch.compiler.reset()
        return torch.compile(cls(parameters, lr=LR, foreach=True, **case.arguments).step, fullgraph=False)

    return Contender("compiled", make_step, precision.dtype)


def our_contender(case: OptimizerCase, precision: Precision) -> Contender:
    cls = getattr(fused_ops.optim, case.class_name)
    state_dtype = precision.state_dtype

    def make_step(parameters: list[Parameter]) -> Callable[[], Any]:
        return cls(parameters, lr=LR, state_dtype=state_dtype, **case.arguments).step

    return Contender(OURS, make_step, state_dtype or precision.dtype)


def peer_contenders(case: OptimizerCase, precision: Precision) -> list[Contender]:
    """Other public optimizers that run on the CPU, each only where it is installed."""
    if case.class_name not in ("Adam", "AdamW"):
        return []
    decoupled = case.class_name == "AdamW"
    arguments = {"lr": LR, **case.arguments}
    peers = []
    if find_spec("deepspeed"):
        cpu_adam = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        weight_decay = 1e-2 if decoupled else 0.0
        peers.append(
            Contender(
                "DeepSpeed CPUAdam",
                lambda p: cpu_adam(p, adamw_mode=decoupled, weight_decay=weight_decay, **arguments).step,
                precision.dtype,
            )
        )
    if find_spec("bitsandbytes"):
        optim = import_module("bitsandbytes").optim
        full, low = (getattr(optim, case.class_name + suffix) for suffix in ("", "8bit"))
        peers.append(Contender("bitsandbytes", lambda p: full(p, **arguments).step, precision.dtype))
        peers.append(Contender("bitsandbytes 8-bit", lambda p: low(p, **arguments).step, torch.uint8, exact=False))
    if find_spec("torchao"):
        optim = import_module("torchao.optim")
        for label, suffix in (("8-bit", "8bit"), ("fp8", "Fp8")):
            cls = getattr(optim, case.class_name + suffix)
            step = lambda p, cls=cls: cls(p, **arguments).step  # noqa: E731
            peers.append(Contender(f"torchao {label}", step, torch.uint8, exact=False))
    return peers


def contenders(case: OptimizerCase, precision: Precision, compiled: bool, peers: bool) -> list[Contender]:
    entries = [*stock_contenders(case, precision), our_contender(case, precision)]
    if compiled:
        entries.append(compiled_contender(case, precision))
    if peers:
        entries += peer_contenders(case, precision)
    return entries
