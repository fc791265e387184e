# SPDX-License-Identifier: Apache-2.0
"""A step that cannot be taken changes nothing and says what it wanted; one that stock must take says so, once."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import (
    CONFIGS,
    OPTIMIZERS,
    STATES,
    Backend,
    Oracle,
    Problem,
    assert_agrees,
    assert_follows,
    bits,
    config_of,
    same_bits,
    stock,
    twin,
)
from torch.optim import Optimizer
from torch.testing._internal.two_tensor import TwoTensor

SHAPES = [(4, 6), (33,), (5, 2)]
LAST = 2  # the parameter that is spoilt: everything before it in the group is in order
MESSAGE = re.compile(r"[\w.]+: expected .+, got .+\. [A-Z].+", re.DOTALL)


def wrong_shape(optimizer: Optimizer, param: torch.Tensor) -> None:
    param.data = torch.rand(7, 3, device=param.device)


def same_numel_other_shape(optimizer: Optimizer, param: torch.Tensor) -> None:
    param.data = param.data.reshape(2, 5)


def complex_for_real(optimizer: Optimizer, param: torch.Tensor) -> None:
    param.data = param.data.to(torch.complex64)


def real_for_complex_gradient(optimizer: Optimizer, param: torch.Tensor) -> None:
    param.grad_dtype = None
    param.grad = torch.rand(param.shape, dtype=torch.complex64, device=param.device)


def integer_param(optimizer: Optimizer, param: torch.Tensor) -> None:
    param.requires_grad_(False)
    param.data = torch.ones(param.shape, dtype=torch.int32, device=param.device)


def overlapping_param(optimizer: Optimizer, param: torch.Tensor) -> None:
    param.data = torch.rand(param.shape[0], 1, device=param.device).expand(param.shape)


def overlapping_rows(optimizer: Optimizer, param: torch.Tensor) -> None:
    rows, columns = param.shape
    param.data = torch.rand(rows + columns, device=param.device).as_strided((rows, columns), (1, 1))


def state_of_wrong_shape(optimizer: Optimizer, param: torch.Tensor) -> None:
    key = next(key for key in reversed(optimizer.state[param]) if key != "step")
    optimizer.state[param][key] = torch.ones(3, device=param.device)


def state_of_wrong_dtype(optimizer: Optimizer, param: torch.Tensor) -> None:
    key = next(key for key in reversed(optimizer.state[param]) if key != "step")
    optimizer.state[param][key] = torch.ones(param.shape, dtype=torch.int64, device=param.device)


def state_on_another_device(optimizer: Optimizer, param: torch.Tensor) -> None:
    key = next(key for key in reversed(optimizer.state[param]) if key != "step")
    optimizer.state[param][key] = torch.empty(param.shape, device="meta")


def state_that_overlaps(optimizer: Optimizer, param: torch.Tensor) -> None:
    key = next(key for key in reversed(optimizer.state[param]) if key != "step")
    optimizer.state[param][key] = torch.ones(1, 1, device=param.device).expand(param.shape)


def sparse_gradient(optimizer: Optimizer, param: torch.Tensor) -> None:
    param.grad = torch.rand(param.shape, device=param.device).to_sparse()


SPOILS: list[Callable[[Optimizer, torch.Tensor], None]] = [
    wrong_shape, same_numel_other_shape, complex_for_real, real_for_complex_gradient, integer_param,
    overlapping_param, overlapping_rows, state_of_wrong_shape, state_of_wrong_dtype, state_on_another_device,
    state_that_overlaps,
]  # fmt: skip


def clones(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in state.items()}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rejected_step_changes_nothing(
    backend: Backend, name: str, spoil: Callable[[Optimizer, torch.Tensor], None], groups: int
) -> None:  # case 5
    problem = Problem(SHAPES, device=backend.device)
    optimizer = backend.make(
        name, [{"params": problem.params[i::groups]} for i in range(groups)], **config_of(name, "all")
    )
    problem.run(optimizer, steps=[0, 1])
    problem.assign(2)
    spoil(optimizer, problem.params[LAST])
    before = bits(optimizer, problem.params[:LAST])
    spoilt_state = clones(optimizer.state[problem.params[LAST]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # whether stock's step was tried first does not matter here
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            optimizer.step()
    assert same_bits(before, bits(optimizer, problem.params[:LAST]))
    assert same_bits([spoilt_state], [clones(optimizer.state[problem.params[LAST]])])
    assert MESSAGE.match(str(caught.value)), f"does not say what was expected and what came: {caught.value}"


@pytest.mark.parametrize("spoil", SPOILS[:7], ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rejected_first_step_leaves_no_state(
    backend: Backend, name: str, spoil: Callable[[Optimizer, torch.Tensor], None]
) -> None:  # case 5
    problem = Problem(SHAPES, device=backend.device)
    good, kwargs = problem.params[LAST].data, config_of(name, "all")
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.assign(0)
    before = bits(optimizer, problem.params[:LAST])
    spoil(optimizer, problem.params[LAST])
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        optimizer.step()
    assert same_bits(before, bits(optimizer, problem.params[:LAST]))
    problem.params[LAST].grad = None
    problem.params[LAST].data = good
    problem.params[LAST].requires_grad_()
    problem.run(optimizer)
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **kwargs))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_native_errors_name_the_optimizer(backend: Backend, name: str) -> None:
    problem = Problem(SHAPES, device=backend.device)
    optimizer = backend.make(name, problem.params, **config_of(name, "all"))
    problem.run(optimizer, steps=[0, 1])
    for spoil, fact in ((wrong_shape, r"grads\[2\]\.shape"), (state_of_wrong_shape, r"state\['\w+'\] of params\[2\]")):
        problem.assign(2)
        spoil(optimizer, problem.params[LAST])
        with pytest.raises(RuntimeError, match=f"^{name.lower()}: expected {fact}"):
            optimizer.step()
        problem.params[LAST].data = torch.rand(SHAPES[LAST], device=backend.device)


NUMBERS = {
    "Adam": ["lr", "eps", "weight_decay"],
    "AdamW": ["lr", "eps", "weight_decay"],
    "RMSprop": ["lr", "alpha", "eps", "weight_decay", "momentum"],
    "SGD": ["lr", "momentum", "dampening", "weight_decay"],
    "Adagrad": ["lr", "lr_decay", "eps", "weight_decay"],
}
NOT_NUMBERS: list[tuple[Any, type[Exception], str]] = [
    (math.nan, ValueError, "nan"),
    (torch.tensor(math.nan), ValueError, "tensor(nan)"),
    (torch.ones(3), ValueError, "a tensor of shape (3,)"),
    ("1e-3", TypeError, "'1e-3'"),
    (None, TypeError, "None"),
    (1j, TypeError, "1j"),
]
NOT_BETAS: list[tuple[Any, type[Exception], str]] = [
    ((math.nan, 0.9), ValueError, "(nan, 0.9)"),
    ((0.9, math.nan), ValueError, "(0.9, nan)"),
    ((0.9, "0.99"), ValueError, "(0.9, '0.99')"),
    ((0.9,), ValueError, "(0.9,)"),
    (0.9, ValueError, "0.9"),
    (None, TypeError, "None"),
]
WRONG_VALUES = [
    (name, key, "a number", *row) for name, keys in NUMBERS.items() for key in keys for row in NOT_NUMBERS
] + [(name, "betas", "two numbers", *row) for name in ("Adam", "AdamW") for row in NOT_BETAS]


@pytest.mark.parametrize(("name", "key", "wanted", "value", "error", "got"), WRONG_VALUES)
def test_values_that_are_not_numbers(
    backend: Backend, name: str, key: str, wanted: str, value: Any, error: type[Exception], got: str
) -> None:
    """The step names the group, changes nothing, and goes on as if nothing had been once the value is right again."""
    problem, other = Problem(SHAPES, device=backend.device), Problem(SHAPES, device=backend.device)
    optimizer, undisturbed = (
        backend.make(name, [{"params": p.params[:1]}, {"params": p.params[1:]}], **config_of(name, "all"))
        for p in (problem, other)
    )
    problem.run(optimizer, steps=[0, 1])
    problem.assign(2)
    before = bits(optimizer, problem.params)
    right = optimizer.param_groups[1][key]
    optimizer.param_groups[1][key] = value
    message = f"{name}: expected param_groups[1]['{key}'] to be {wanted}, got {got}. "
    with pytest.raises(error, match="^" + re.escape(message) + "[A-Z]"):
        optimizer.step()
    assert same_bits(before, bits(optimizer, problem.params))
    optimizer.param_groups[1][key] = right
    optimizer.step()
    other.run(undisturbed, steps=[0, 1, 2])
    assert same_bits(bits(undisturbed, other.params), bits(optimizer, problem.params))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop"])
def test_sparse_gradients_are_refused_as_in_stock(backend: Backend, name: str) -> None:  # case 5
    problem = Problem(SHAPES, device=backend.device)
    optimizer = backend.make(name, problem.params, **config_of(name, "all"))
    problem.run(optimizer, steps=[0])
    problem.assign(1)
    sparse_gradient(optimizer, problem.params[LAST])
    before = bits(optimizer, problem.params)
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
    assert same_bits(before, bits(optimizer, problem.params))


def our_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning) and "own step" in str(w.message)]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1, "maximize": True}),
        ("Adagrad", {"lr": 0.1}),
        ("Adagrad", {"lr": 0.1, "lr_decay": 0.5, "initial_accumulator_value": 0.2}),
    ],
)
def test_sparse_gradients_that_stock_takes(backend: Backend, name: str, config: dict[str, Any]) -> None:
    problem = Problem([(6, 4), (9,)], device=backend.device)
    other = twin(problem)
    rows = torch.tensor([[4, 0, 4]])  # uncoalesced: a row twice
    for prob in (problem, other):
        for grads in prob.grads:
            grads[0] = torch.sparse_coo_tensor(rows.to(grads[0].device), grads[0][:3], (6, 4))
    ours, theirs = backend.make(name, problem.params, **config), stock(name, other.params, **config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(problem.steps):
            problem.assign(step)
            ours.step()
    other.run(theirs)
    assert len(our_warnings(caught)) == 1, [str(w.message) for w in caught]
    assert_follows(ours, problem.params, theirs, other.params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_differentiable_runs_stock(name: str) -> None:
    """Gradients flow through the step, to the values before it."""
    outer = []
    for make in (Backend("cpu", "cpu").make, stock):
        start = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
        param = start.clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = make(name, [param], lr=0.1, differentiable=True)
            for _ in range(3):
                param.grad = (start * 0.3 + 0.1).detach()
                optimizer.step()
        assert len(our_warnings(caught)) == (0 if make is stock else 1), [str(w.message) for w in caught]
        (gradient,) = torch.autograd.grad((param**2).sum(), start)
        outer.append((param.detach(), gradient))
    for ours, theirs in zip(*outer, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_meta_device_runs_stock(name: str) -> None:
    param = torch.empty(3, 4, device="meta", requires_grad=True)
    param.grad = torch.empty(3, 4, device="meta")
    optimizer = Backend("cpu", "cpu").make(name, [param], **config_of(name, "all"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    assert len(our_warnings(caught)) == 1, [str(w.message) for w in caught]
    assert all(optimizer.state[param][key].device.type == "meta" for key in STATES[name])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrapper_subclass(name: str) -> None:
    """A tensor that only wraps others (as DTensor does) has no memory of its own to write to."""
    first, second = Problem(SHAPES), Problem(SHAPES, seed=1)
    other = twin(second)
    params = [
        torch.nn.Parameter(TwoTensor(a.detach().clone(), b.detach().clone()))
        for a, b in zip(first.params, second.params, strict=True)
    ]
    ours = Backend("cpu", "cpu").make(name, params, **config_of(name, "all"))
    theirs = stock(name, other.params, **config_of(name, "all"))
    for a_grads, b_grads in zip(first.grads, second.grads, strict=True):
        for param, a, b in zip(params, a_grads, b_grads, strict=True):
            param.grad = TwoTensor(a, b)
        ours.step()
    other.run(theirs)
    for param, expected in zip(params, other.params, strict=True):
        assert isinstance(param.data, TwoTensor)
        torch.testing.assert_close(param.data.b, expected.detach().float(), rtol=2e-6, atol=1e-6)
        assert not torch.equal(param.data.a, param.data.b)


FUNCTIONAL = {
    "Adam": ["_single_tensor_adam", "_multi_tensor_adam", "_fused_adam"],
    "AdamW": ["_single_tensor_adam", "_multi_tensor_adam", "_fused_adam"],
    "RMSprop": ["_single_tensor_rmsprop", "_multi_tensor_rmsprop"],
    "SGD": ["_single_tensor_sgd", "_multi_tensor_sgd", "_fused_sgd"],
    "Adagrad": ["_single_tensor_adagrad", "_multi_tensor_adagrad", "_fused_adagrad"],
}


@pytest.mark.parametrize(
    "flags", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}], ids=str
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stock_code_does_not_run(
    backend: Backend, name: str, flags: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every configuration, dtype, layout and flag goes the fused way: stock's functions raise here."""
    if name == "RMSprop" and "fused" in flags:
        pytest.skip("torch.optim.RMSprop has no argument fused")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("stock's step ran")

    import importlib

    module = importlib.import_module(f"torch.optim.{'adam' if name == 'AdamW' else name.lower()}")
    for function in FUNCTIONAL[name]:
        monkeypatch.setattr(module, function, fail)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
    for config in CONFIGS[name]:
        if config == "tensor_lr" and flags.get("foreach"):
            continue  # stock's constructor refuses it
        for layout, grad_layout in (("contiguous", "expanded"), ("every_other", "transposed")):
            problem = Problem([(3, 4)] * len(dtypes), dtypes, None, layout, grad_layout, backend.device, steps=2)
            start = [param.detach().clone() for param in problem.params]
            problem.run(backend.make(name, problem.params, **config_of(name, config), **flags))
            assert all(not torch.equal(a, b) for a, b in zip(start, problem.params, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_constructor_signature_is_stocks(name: str) -> None:
    """Same arguments in the same order with the same defaults, and state_dtype by keyword."""
    import inspect

    import fused_ops.optim

    ours = inspect.signature(getattr(fused_ops.optim, name)).parameters
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in ours.values()):
        pytest.skip("arguments are passed on")
    assert [(k, p.default) for k, p in ours.items() if k != "state_dtype"] == [
        (k, p.default) for k, p in theirs.items()
    ]
    assert ours["state_dtype"].kind is inspect.Parameter.KEYWORD_ONLY
    assert ours["state_dtype"].default is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_is_a_torch_optimizer(name: str) -> None:
    import fused_ops.optim

    ours = getattr(fused_ops.optim, name)
    assert issubclass(ours, getattr(torch.optim, name))
    assert issubclass(ours, fused_ops.optim.FusedOptimizer)
    assert ours.__name__ == name


def test_state_replaced_while_another_was_lost(backend: Backend) -> None:
    """What a rejected step saw of a state must not pass for all of it once the rest is back."""
    param = torch.nn.Parameter(torch.linspace(1, 2, 5, device=backend.device))
    optimizer = backend.make("Adam", [param])
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    state = optimizer.state[param]
    lost, replaced = state.pop("exp_avg_sq"), state["exp_avg"].clone()
    state["exp_avg"] = replaced
    with pytest.raises(RuntimeError, match="exp_avg_sq"):
        optimizer.step()
    state["exp_avg_sq"] = lost
    before = replaced.clone()
    optimizer.step()
    assert (replaced != before).all()
