# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle, the error measure, and the tables that the optimizer tests draw from.

Oracle
    ``torch.optim.X(foreach=False, fused=False)`` on float64 copies of the tensors that the optimizer under test gets.

Bound
    ``|ours - oracle| <= ULPS * eps(dtype) * scale``, element by element, for parameters and for every state, with
    ``scale = |value| + sum over steps of |change|``.
    Why: storing a result rounds it by up to eps/2 of itself, once a step, and STEPS = 4 such roundings are 2 eps of
    ``|value|``; each change is itself the result of a few roundings relative to its own size. A sum can cancel
    (gradient plus weight decay, or gradients of opposite sign in a moment), and then its rounding error is relative to
    its terms, not to the small sum; so the scale is also taken from the same recurrence run on absolute values, where
    nothing cancels, and the larger of the two counts. To it is added how far the value moves for a relative change of
    the gradients (its condition number), which is large where a small denominator magnifies a rounding error.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

STEPS = 4
ULPS = 2.0
GAP = 77.0  # fills the memory between the elements of a strided parameter; exact in every dtype

# Every optimizer with every argument of its own. "all" turns on all that can be on together, away from the defaults.
CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "Adam": {
        "default": {},
        "weight_decay": {"weight_decay": 0.1},
        "amsgrad": {"amsgrad": True, "betas": (0.7, 0.9)},
        "maximize": {"maximize": True},
        "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
        "tensor_lr": {"lr": torch.tensor(0.02)},
        "all": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True, "maximize": True},
    },
    "AdamW": {
        "default": {},
        "no_weight_decay": {"weight_decay": 0.0},
        "amsgrad": {"amsgrad": True, "betas": (0.7, 0.9)},
        "maximize": {"maximize": True},
        "tensor_lr": {"lr": torch.tensor(0.02)},
        "all": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True, "maximize": True},
    },
    "RMSprop": {
        "default": {},
        "weight_decay": {"weight_decay": 0.1},
        "momentum": {"momentum": 0.9},
        "centered": {"centered": True},
        "centered_momentum": {"centered": True, "momentum": 0.9},
        "maximize": {"maximize": True},
        "tensor_lr": {"lr": torch.tensor(0.02)},
        "all": {
            "lr": 0.02,
            "alpha": 0.9,
            "eps": 1e-3,
            "weight_decay": 0.1,
            "momentum": 0.8,
            "centered": True,
            "maximize": True,
        },
    },
    "SGD": {
        "default": {},
        "weight_decay": {"weight_decay": 0.1},
        "momentum": {"momentum": 0.9},
        "dampening": {"momentum": 0.9, "dampening": 0.5},
        "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        "maximize": {"maximize": True, "momentum": 0.9},
        "tensor_lr": {"lr": torch.tensor(0.02)},
        "all": {"lr": 0.02, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1, "maximize": True},
    },
    "Adagrad": {
        "default": {},
        "weight_decay": {"weight_decay": 0.1},
        "lr_decay": {"lr_decay": 0.5},
        "initial_accumulator_value": {"initial_accumulator_value": 0.3},
        "maximize": {"maximize": True},
        "tensor_lr": {"lr": torch.tensor(0.02)},
        "all": {
            "lr": 0.02,
            "lr_decay": 0.1,
            "eps": 1e-3,
            "weight_decay": 0.1,
            "initial_accumulator_value": 0.3,
            "maximize": True,
        },
    },
}
OPTIMIZERS = list(CONFIGS)
ALL_CONFIGS = [(name, config) for name, configs in CONFIGS.items() for config in configs]
STATES = {  # with the configuration "all"
    "Adam": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    "AdamW": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    "RMSprop": ["square_avg", "momentum_buffer", "grad_avg"],
    "SGD": ["momentum_buffer"],
    "Adagrad": ["sum"],
}
HALF_DTYPES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]


def config_of(name: str, config: str) -> dict[str, Any]:
    return copy.deepcopy(CONFIGS[name][config])


# ---- layouts: each returns the same values laid out in memory in another way ----


def _every_other(value: Tensor, gap: float) -> Tensor:
    if value.dim() == 0:
        return _offset(value, gap)
    base = value.new_full((*value.shape[:-1], 2 * value.shape[-1]), gap)
    return base[..., ::2].copy_(value)


def _padded_rows(value: Tensor, gap: float) -> Tensor:
    if value.dim() == 0:
        return _offset(value, gap)
    width = value.shape[-1]
    return value.new_full((*value.shape[:-1], width + 3), gap)[..., 1 : 1 + width].copy_(value)


def _offset(value: Tensor, gap: float) -> Tensor:
    return value.new_full((value.numel() + 2,), gap)[1:-1].view(value.shape).copy_(value)


def _transposed(value: Tensor, gap: float) -> Tensor:
    order = tuple(reversed(range(value.dim())))
    return value.permute(order).contiguous().permute(order)


def _channels_last(value: Tensor, gap: float) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value.clone()


def _expanded(value: Tensor, gap: float) -> Tensor:
    return value[:1].clone().expand_as(value) if value.dim() and value.numel() else value.clone()


LAYOUTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "contiguous": lambda value, gap: value.clone(memory_format=torch.contiguous_format),
    "transposed": _transposed,
    "channels_last": _channels_last,
    "every_other": _every_other,
    "padded_rows": _padded_rows,
    "offset": _offset,
    "expanded": _expanded,  # stride 0: for gradients only; takes the first row's values
}
PARAM_LAYOUTS = [layout for layout in LAYOUTS if layout != "expanded"]


def assert_gaps_untouched(param: Tensor) -> None:
    """The memory of the parameter's storage that is no element of the parameter still holds GAP."""
    flat = torch.empty(0, dtype=param.dtype, device=param.device).set_(param.untyped_storage())
    is_gap = torch.ones(flat.numel(), dtype=torch.bool, device=param.device)
    is_gap.as_strided(param.shape, param.stride(), param.storage_offset()).fill_(False)
    assert bool((flat[is_gap] == GAP).all()), "memory beside the parameter's elements was written"


# ---- problems ----


def draw(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, bounded: bool = False) -> Tensor:
    """Random values of a dtype. Bounded ones have magnitudes of 0.5 to 2, so that float16 holds their squares as
    normal numbers; float16 is always bounded."""
    real_shape = (*shape, 2) if dtype.is_complex else tuple(shape)
    value = torch.randn(real_shape, dtype=torch.float64, generator=generator)
    if bounded or dtype == torch.float16:
        value = value.sign() * (0.5 + 1.5 * torch.rand(real_shape, dtype=torch.float64, generator=generator))
    if dtype.is_complex:
        value = torch.view_as_complex(value)
    return value.to(dtype)


@dataclass
class Problem:
    """Parameters, and their gradients at every step, None for no gradient. Options: one value, or one a parameter."""

    shapes: Sequence[Sequence[int]]
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32
    grad_dtype: torch.dtype | Sequence[torch.dtype] | None = None
    layout: str | Sequence[str] = "contiguous"
    grad_layout: str | Sequence[str] = "contiguous"
    device: str | Sequence[str] = "cpu"
    steps: int = STEPS
    seed: int = 0
    bounded: bool = False
    params: list[Tensor] = field(init=False)
    start: list[Tensor] = field(init=False)
    grads: list[list[Any]] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        count = len(self.shapes)
        dtypes = _each(self.dtype, count)
        grad_dtypes = _each(self.grad_dtype or dtypes, count)
        layouts, grad_layouts, devices = (_each(v, count) for v in (self.layout, self.grad_layout, self.device))
        self.params = []
        for shape, dtype, grad_dtype, layout, device in zip(
            self.shapes, dtypes, grad_dtypes, layouts, devices, strict=True
        ):
            param = LAYOUTS[layout](draw(shape, dtype, generator, self.bounded).to(device), GAP).requires_grad_()
            if grad_dtype != dtype:
                param.grad_dtype = grad_dtype
            self.params.append(param)
        self.start = [wide(param) for param in self.params]
        self.grads = [
            [
                LAYOUTS[layout](draw(shape, dtype, generator, self.bounded).to(device), math.nan)
                for shape, dtype, layout, device in zip(self.shapes, grad_dtypes, grad_layouts, devices, strict=True)
            ]
            for _ in range(self.steps)
        ]

    def run(self, optimizer: Optimizer, steps: Iterable[int] | None = None) -> None:
        """Takes steps, all by default. A warning is an error: it would say that stock's step ran, not ours."""
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for step in range(self.steps) if steps is None else steps:
                self.assign(step)
                optimizer.step()

    def assign(self, step: int) -> None:
        for param, grad in zip(self.params, self.grads[step], strict=True):
            param.grad = grad


def twin(problem: Problem) -> Problem:
    """The same problem on contiguous float64 copies, for running stock through the same scenario."""
    other = copy.copy(problem)
    other.params = [start.clone().requires_grad_() for start in problem.start]
    other.grads = [[None if grad is None else wide(grad) for grad in step] for step in problem.grads]
    return other


def _each(value: Any, count: int) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] * count


def wide(tensor: Tensor) -> Tensor:
    """A contiguous float64 (complex128) copy on the CPU."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    plain = tensor.detach().to_dense().resolve_conj().resolve_neg()
    return plain.to("cpu", dtype, copy=True).contiguous()


def real(tensor: Tensor) -> Tensor:
    """A float64 copy; a complex tensor as its real view."""
    tensor = wide(tensor)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# ---- the oracle ----


def stock(name: str, params: Any, **config: Any) -> Optimizer:
    """The optimizer of torch.optim, single tensor, without what only ours understands."""
    config = {key: value for key, value in config.items() if key not in ("state_dtype", "foreach", "fused")}
    if name != "RMSprop":
        config["fused"] = False
    return getattr(torch.optim, name)(params, foreach=False, **config)


Snapshot = list[dict[str, Tensor]]


def snapshot(optimizer: Optimizer, params: Sequence[Tensor]) -> Snapshot:
    """Everything that an optimizer step may change, per parameter, in float64."""
    return [
        {"param": real(param)}
        | {key: real(value) for key, value in optimizer.state.get(param, {}).items() if value is not None}
        for param in params
    ]


def trajectory(
    name: str,
    start: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor | None]],
    rounding: Sequence[tuple[torch.dtype, torch.dtype]] | None = None,
    **config: Any,
) -> list[Snapshot]:
    """Stock's snapshots, before the first step and after every one. ``rounding``: per parameter, the dtypes of its own
    and of its states' storage; 16-bit ones round what each step stores."""
    params = [param.clone().requires_grad_() for param in start]
    optimizer = stock(name, params, **copy.deepcopy(config))
    history = [snapshot(optimizer, params)]
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
        for param, (param_dtype, state_dtype) in zip(params, rounding or [], strict=rounding is not None):
            _round_in_place(param.detach(), param_dtype)
            for key, value in optimizer.state.get(param, {}).items():
                if key != "step" and value is not None:
                    _round_in_place(value, state_dtype)
        history.append(snapshot(optimizer, params))
    return history


def _round_in_place(tensor: Tensor, dtype: torch.dtype) -> None:
    if dtype.itemsize == 2:
        tensor.copy_(tensor.to(dtype))


def _scale(history: list[Snapshot]) -> Snapshot:
    scale = [{key: value.abs() for key, value in last.items()} for last in history[-1]]
    for before, after in itertools.pairwise(history):
        for total, old, new in zip(scale, before, after, strict=True):
            for key, value in new.items():
                total[key] += (value - old[key]).abs() if key in old else value.abs()
    return scale


@dataclass
class Oracle:
    values: Snapshot
    scale: Snapshot

    @classmethod
    def of(cls, name: str, problem: Problem, **config: Any) -> Oracle:
        """What the problem must lead to. Reads the problem's start, so the problem may already have been run."""
        start = problem.start
        # Stock divides a float32 tensor lr by the bias correction in float32, whatever the parameter's dtype.
        config = {key: float(value) if isinstance(value, Tensor) else value for key, value in config.items()}
        grads = [[None if g is None else wide(g) for g in step] for step in problem.grads]
        sign = -1.0 if config.get("maximize") else 1.0
        plain = trajectory(name, start, grads, **config)
        majorant = trajectory(
            name, _map(_absolute, start), [_map(lambda g: sign * _absolute(g), s) for s in grads], **config
        )
        nudged = trajectory(name, start, [_map(lambda g: g * (1 + NUDGE), s) for s in grads], **config)
        scale = [
            {key: torch.maximum(own[key], other[key]) + (moved[key] - value[key]).abs() / NUDGE for key in own}
            for own, other, moved, value in zip(_scale(plain), _scale(majorant), nudged[-1], plain[-1], strict=True)
        ]
        rounding = [(param.dtype, config.get("state_dtype") or param.dtype) for param in problem.params]
        if any(dtype.itemsize == 2 for dtypes in rounding for dtype in dtypes):
            return cls(trajectory(name, start, grads, rounding, **config)[-1], scale)
        return cls(plain[-1], scale)


NUDGE = 2.0**-24  # a relative change of the gradients: far above float64's rounding, small enough to be linear


def _map(function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor | None]) -> list[Any]:
    return [None if tensor is None else function(tensor) for tensor in tensors]


def _absolute(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(torch.view_as_real(tensor).abs())
    return tensor.abs()


def ulps_off(optimizer: Optimizer, params: Sequence[Tensor], oracle: Oracle) -> list[dict[str, Tensor]]:
    """Errors in units of eps(dtype) * scale; the coarsest dtype among a parameter and its states counts for all.

    For float64 the unit is doubled, since the oracle then rounds as much as what it judges."""
    errors = []
    for param, expected, scale in zip(params, oracle.values, oracle.scale, strict=True):
        tensors = {"param": param} | {k: v for k, v in optimizer.state.get(param, {}).items() if v is not None}
        assert tensors.keys() == expected.keys(), f"expected {sorted(expected)}, got {sorted(tensors)}"
        eps = max(torch.finfo(tensor.dtype).eps for key, tensor in tensors.items() if key != "step")
        eps *= 2 if eps == torch.finfo(torch.float64).eps else 1
        errors.append({key: _ulps(real(t), expected[key], eps * scale[key]) for key, t in tensors.items()})
    return errors


def _ulps(actual: Tensor, expected: Tensor, unit: Tensor) -> Tensor:
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = (actual - expected).abs() / unit
    return torch.where(same, 0.0, torch.where(error.isnan(), math.inf, error))


def assert_agrees(optimizer: Optimizer, params: Sequence[Tensor], oracle: Oracle, ulps: float = ULPS) -> None:
    for index, errors in enumerate(ulps_off(optimizer, params, oracle)):
        for key, error in errors.items():
            limit = 0.0 if key == "step" else ulps
            worst = float(error.max()) if error.numel() else 0.0
            assert worst <= limit, f"params[{index}] {key}: {worst:.3g} ulps of scale off the oracle, over {limit}"


def assert_follows(
    optimizer: Optimizer, params: Sequence[Tensor], other: Optimizer, other_params: Sequence[Tensor], eps: float = 1e-6
) -> None:
    """For scenarios that are more than steps: same keys, same step counts, values within a few roundings."""
    ours, theirs = snapshot(optimizer, params), snapshot(other, other_params)
    for index, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert actual.keys() == expected.keys(), f"params[{index}]: expected {sorted(expected)}, got {sorted(actual)}"
        for key, value in expected.items():
            worst = float(_ulps(actual[key], value, 1 + value.abs()).max()) if value.numel() else 0.0
            assert worst <= (0.0 if key == "step" else eps), f"params[{index}] {key}: off by {worst:.3g}"


def bits(optimizer: Optimizer, params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """A copy of everything that a rejected or skipped step must leave as it was: for comparing with ``same_bits``."""
    return [
        {"param": param.detach().clone()}
        | {key: copy.deepcopy(value) for key, value in optimizer.state.get(param, {}).items()}
        for param in params
    ]


def same_bits(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> bool:
    """Same keys, dtypes, layouts and values, NaN equal to NaN."""

    def same(a: Any, b: Any) -> bool:
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return a is b or bool(a == b)
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.stride() == b.stride()
            and (a.is_meta or torch.equal(_as_integers(a), _as_integers(b)))
        )

    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(same(a[key], b[key]) for key in a) for a, b in zip(first, second, strict=True)
    )


def _as_integers(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()]) if tensor.dtype.is_floating_point else tensor


# ---- backends ----


@dataclass(frozen=True)
class Backend:
    """Where a table runs: a device for the tensors, and a way to make the optimizer under test."""

    name: str
    device: str

    def make(self, name: str, params: Any, **config: Any) -> Optimizer:
        import fused_ops.optim

        return getattr(fused_ops.optim, name)(params, **config)


BACKENDS = {
    "cpu": Backend("cpu", "cpu"),
    "emulated": Backend("emulated", "cpu"),  # the CUDA kernels as host C++: see tests/emulated
    "cuda": Backend("cuda", "cuda"),
}
