# SPDX-License-Identifier: Apache-2.0
"""state_dict in both directions with torch.optim, mid-training, whatever its age; pickling and copying."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import (
    ALL_CONFIGS,
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

import fused_ops

SHAPES = [(5, 7), (), (33,), (2, 3, 4, 5)]

StateDict = dict[str, Any]


def through_a_file(state: StateDict) -> StateDict:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def with_integer_steps(state: StateDict) -> StateDict:
    """As optimizers before torch 1.12 wrote it."""
    state = copy.deepcopy(state)
    for entry in state["state"].values():
        if "step" in entry:
            entry["step"] = int(entry["step"])
    return state


def with_float_steps(state: StateDict) -> StateDict:
    state = with_integer_steps(state)
    for entry in state["state"].values():
        if "step" in entry:
            entry["step"] = float(entry["step"])
    return state


def without_new_options(state: StateDict) -> StateDict:
    """Groups as written before foreach, fused, capturable, differentiable and maximize existed."""
    state = copy.deepcopy(state)
    for group in state["param_groups"]:
        for key in ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"):
            group.pop(key, None)
    return state


TREATMENTS: dict[str, Callable[[StateDict], StateDict]] = {
    "as it is": lambda state: state,
    "deep copy": copy.deepcopy,
    "through a file": through_a_file,
    "integer steps": with_integer_steps,
    "float steps": with_float_steps,
    "old groups": without_new_options,
}
# From and to: stock's own implementations leave different flags in the groups.
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "ours": lambda backend, name, params, **kw: backend.make(name, params, **kw),
    "stock loop": lambda backend, name, params, **kw: stock(name, params, **kw),
    "stock foreach": lambda backend, name, params, **kw: getattr(torch.optim, name)(params, foreach=True, **kw),
    "stock fused": lambda backend, name, params, **kw: getattr(torch.optim, name)(
        params, **kw, **({} if name == "RMSprop" else {"fused": True})
    ),
}
DIRECTIONS = [(source, target) for source in MAKERS for target in MAKERS if "ours" in (source, target)]


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moves_mid_training(backend: Backend, name: str, source: str, target: str, treatment: str) -> None:
    """Two steps in one optimizer, two more in the other: as if it had been one."""  # cases 12, 19
    if treatment == "old groups" and name == "Adam" and target != "ours":
        pytest.skip("stock drops what is missing here")
    problem = Problem(SHAPES, device=backend.device)
    kwargs = config_of(name, "all")
    first = MAKERS[source](backend, name, problem.params, **kwargs)
    problem.run(first, steps=[0, 1])
    second = MAKERS[target](backend, name, problem.params, **kwargs)
    second.load_state_dict(TREATMENTS[treatment](first.state_dict()))
    problem.run(second, steps=[2, 3])
    assert_agrees(second, problem.params, Oracle.of(name, problem, **kwargs), ulps=4)


@pytest.mark.parametrize(("name", "config"), ALL_CONFIGS)
def test_state_dict_looks_like_stock(backend: Backend, name: str, config: str) -> None:
    """Same keys, dtypes, shapes and group entries, but for flags that choose the implementation."""
    kwargs = config_of(name, config)
    dictionaries = []
    for make in (backend.make, stock):
        problem = Problem(SHAPES, device=backend.device)
        optimizer = make(name, problem.params, **kwargs)
        problem.run(optimizer)
        dictionaries.append(optimizer.state_dict())
    ours, theirs = dictionaries
    described = [
        {
            index: {
                key: (v.dtype, v.shape, v.stride()) if isinstance(v, torch.Tensor) else v for key, v in entry.items()
            }
            for index, entry in dictionary["state"].items()
        }
        for dictionary in dictionaries
    ]
    assert described[0] == described[1]
    for our_group, their_group in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        flags = {"foreach", "fused", "state_dtype"}
        assert {k: v for k, v in our_group.items() if k not in flags} == {
            k: v for k, v in their_group.items() if k not in flags
        }


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "SGD"])
def test_steps_that_leave_never_alias(backend: Backend, name: str) -> None:
    """Stock increments each step tensor, so one that is shared would count twice."""
    problem = Problem(SHAPES, device=backend.device)
    optimizer = backend.make(name, problem.params, **config_of(name, "all"))
    problem.run(optimizer)
    for steps in (
        [entry["step"] for entry in optimizer.state_dict()["state"].values()],
        [entry["step"] for entry in copy.deepcopy(optimizer).state_dict()["state"].values()],
    ):
        assert len({step.untyped_storage().data_ptr() for step in steps}) == len(SHAPES)
        assert all(step.dtype == torch.float32 and step.shape == () and step.item() == problem.steps for step in steps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_states_of_16_bit_params_survive(backend: Backend, name: str, dtype: torch.dtype) -> None:
    """Saving and loading keeps every state's bits and dtype; stock would cast them to the parameter's."""  # case 12
    problem = Problem(SHAPES, dtype=dtype, device=backend.device)
    kwargs = config_of(name, "all") | {"state_dtype": torch.float32}
    first = backend.make(name, problem.params, **kwargs)
    problem.run(first, steps=[0, 1])
    second = backend.make(name, problem.params, **kwargs)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert same_bits(bits(first, problem.params), bits(second, problem.params))
    assert all(second.state[param][key].dtype == torch.float32 for param in problem.params for key in STATES[name])
    problem.run(second, steps=[2, 3])
    assert_agrees(second, problem.params, Oracle.of(name, problem, **kwargs))


@pytest.mark.parametrize("direction", ["to stock", "from stock"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_16_bit_params_with_float32_states_and_stock(backend: Backend, name: str, direction: str) -> None:
    """To stock: it takes the dictionary, and casts. From stock: its 16-bit states become float32, value for value."""
    problem = Problem(SHAPES, dtype=torch.bfloat16, device=backend.device)  # case 12
    kwargs = config_of(name, "all")
    ours = backend.make(name, problem.params, state_dtype=torch.float32, **kwargs)
    theirs = stock(name, problem.params, **kwargs)
    source, target = (ours, theirs) if direction == "to stock" else (theirs, ours)
    problem.run(source, steps=[0, 1])
    target.load_state_dict(source.state_dict())
    dtype = torch.bfloat16 if direction == "to stock" else torch.float32
    for param in problem.params:
        for key in STATES[name]:
            expected, actual = source.state[param][key], target.state[param][key]
            assert actual.dtype == dtype
            assert torch.equal(actual, expected.to(dtype))
    problem.run(target, steps=[2, 3])
    assert_agrees(target, problem.params, Oracle.of(name, problem, **kwargs), ulps=4)


def drop_one(state: StateDict) -> None:
    del state["state"][1]


def reverse_params(state: StateDict) -> None:
    """The group's parameters in another order: states follow position, as in stock."""
    state["param_groups"][0]["params"].reverse()


def change_lr(state: StateDict) -> None:
    state["param_groups"][0]["lr"] = 0.005


EDITS = {"partial": drop_one, "reordered": reverse_params, "another lr": change_lr}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Adagrad"])
def test_edited_checkpoints_load_as_in_stock(backend: Backend, name: str, edit: str) -> None:  # case 19
    shapes = [(4, 3)] * 3  # equal, so that reordering stays valid
    ours = Problem(shapes, device=backend.device)
    theirs = twin(ours)
    optimizers = []
    for problem, make in ((ours, backend.make), (theirs, stock)):
        kwargs = config_of(name, "all")
        first = make(name, problem.params, **kwargs)
        problem.run(first, steps=[0, 1])
        state = copy.deepcopy(first.state_dict())
        EDITS[edit](state)
        second = make(name, problem.params, **kwargs)
        second.load_state_dict(state)
        problem.run(second, steps=[2, 3])
        optimizers.append(second)
    assert_follows(optimizers[0], ours.params, optimizers[1], theirs.params)


def test_partial_adagrad_checkpoint_loads_as_in_stock(backend: Backend) -> None:
    """A parameter without a state in the checkpoint starts from the optimizer's initial accumulator."""
    ours = Problem([(4, 3)] * 3, device=backend.device)
    theirs = twin(ours)
    optimizers = []
    for problem, make in ((ours, backend.make), (theirs, stock)):
        first = make("Adagrad", problem.params, initial_accumulator_value=0.5)
        problem.run(first, steps=[0, 1])
        state = copy.deepcopy(first.state_dict())
        drop_one(state)
        second = make("Adagrad", problem.params, initial_accumulator_value=0.5)
        second.load_state_dict(state)
        problem.run(second, steps=[2, 3])
        optimizers.append(second)
    assert_follows(optimizers[0], ours.params, optimizers[1], theirs.params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrong_checkpoints_are_refused_as_in_stock(backend: Backend, name: str) -> None:
    problem = Problem(SHAPES, device=backend.device)
    optimizer = backend.make(name, problem.params)
    problem.run(optimizer, steps=[0])
    other = Problem(SHAPES[:2], device=backend.device)
    before = bits(optimizer, problem.params)
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(backend.make(name, other.params).state_dict())
    two_groups = backend.make(name, [{"params": problem.params[:1]}, {"params": problem.params[1:]}])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(two_groups.state_dict())
    assert same_bits(before, bits(optimizer, problem.params))


def _saved(pair: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(pair, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": _saved,
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copies_train_on_by_themselves(backend: Backend, name: str, how: str, steps_before: int) -> None:  # case 19
    problem = Problem(SHAPES, device=backend.device)
    kwargs = config_of(name, "all")
    optimizer = backend.make(name, problem.params, **kwargs)
    problem.run(optimizer, steps=range(steps_before))
    before = bits(optimizer, problem.params)
    twin_problem = copy.copy(problem)
    twin_optimizer, twin_problem.params = COPIES[how]((optimizer, problem.params))
    assert type(twin_optimizer) is type(optimizer)
    twin_problem.run(twin_optimizer, steps=range(steps_before, problem.steps))
    assert same_bits(before, bits(optimizer, problem.params)), "stepping the copy changed the original"
    assert_agrees(twin_optimizer, twin_problem.params, Oracle.of(name, problem, **kwargs))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dict_hooks(backend: Backend, name: str) -> None:  # case 16
    problem = Problem(SHAPES, device=backend.device)
    optimizer = backend.make(name, problem.params)
    problem.run(optimizer, steps=[0])
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda opt, state: state | {"note": 5})
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: {k: v for k, v in state.items() if k != "note"})
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("after loading"))
    state = optimizer.state_dict()
    assert state["note"] == 5
    optimizer.load_state_dict(state)
    assert calls == ["before saving", "after loading"]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(("name", "config"), ALL_CONFIGS)
def test_fuse_optimizer_keeps_the_state(backend: Backend, name: str, config: str, steps_before: int) -> None:
    """The very same object goes on: its groups, state tensors, hooks and schedulers stay."""
    problem = Problem(SHAPES, device=backend.device)
    kwargs = config_of(name, config)
    optimizer = getattr(torch.optim, name)(problem.params, **kwargs)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    problem.run(optimizer, steps=range(steps_before))
    tensors = {param: dict(optimizer.state[param]) for param in problem.params if param in optimizer.state}
    fused = fused_ops.fuse_optimizer(optimizer)
    assert fused is optimizer
    assert isinstance(fused, getattr(fused_ops.optim, name))
    problem.run(fused, steps=range(steps_before, problem.steps))
    for param, state in tensors.items():
        assert all(fused.state[param][key] is value for key, value in state.items() if key != "step")
    assert len(calls) == problem.steps
    assert_agrees(fused, problem.params, Oracle.of(name, problem, **kwargs), ulps=4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_load_hook_that_edits_states(backend: Backend, name: str) -> None:
    """What the hook returns is what is loaded, with state_dtype as without."""  # case 16
    for state_dtype in (None, torch.float32):
        problem = Problem(SHAPES, dtype=torch.bfloat16, device=backend.device)
        kwargs = config_of(name, "all") | {"state_dtype": state_dtype}
        first = backend.make(name, problem.params, **kwargs)
        problem.run(first, steps=[0, 1])
        key = STATES[name][0]

        def halve(optimizer: Optimizer, state: StateDict, key: str = key) -> StateDict:
            state = copy.deepcopy(state)
            for entry in state["state"].values():
                entry[key] *= 0.5
            return state

        second = backend.make(name, problem.params, **kwargs)
        second.register_load_state_dict_pre_hook(halve)
        second.load_state_dict(first.state_dict())
        for param in problem.params:
            assert torch.equal(second.state[param][key], first.state[param][key] * 0.5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fuse_optimizer_under_a_scheduler(backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler has wrapped the optimizer's step by then; the fused step must run all the same."""
    problem = Problem(SHAPES, device=backend.device)
    optimizer = getattr(torch.optim, name)(problem.params, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    problem.run(optimizer, steps=[0])
    scheduler.step()
    other = twin(problem)
    theirs = stock(name, other.params, lr=0.1)
    their_scheduler = torch.optim.lr_scheduler.ExponentialLR(theirs, 0.5)
    for step in range(problem.steps):
        other.run(theirs, steps=[step])
        their_scheduler.step()
    fused = fused_ops.fuse_optimizer(optimizer)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("stock's step ran")

    monkeypatch.setattr(getattr(torch.optim, name), "_init_group", fail)
    for step in range(1, problem.steps):
        problem.run(fused, steps=[step])
        scheduler.step()
    assert_follows(fused, problem.params, theirs, other.params)


def test_fuse_optimizer_refuses_what_it_does_not_know() -> None:
    param = torch.ones(3, requires_grad=True)

    class Own(torch.optim.SGD):
        """A subclass may have changed anything."""

    for optimizer in (torch.optim.Rprop([param]), Own([param], lr=0.1)):
        with pytest.raises(TypeError, match=r"fuse_optimizer: expected .*, got .*"):
            fused_ops.fuse_optimizer(optimizer)
    fused = Backend("cpu", "cpu").make("SGD", [param])
    assert fused_ops.fuse_optimizer(fused) is fused
