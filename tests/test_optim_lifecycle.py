# SPDX-License-Identifier: Apache-2.0
"""What training code does to an optimizer besides stepping it: each scenario runs on ours, and on stock in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import (
    OPTIMIZERS,
    STATES,
    Backend,
    Problem,
    assert_follows,
    bits,
    config_of,
    same_bits,
    stock,
    twin,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

SHAPES = [(5, 7), (33,), (), (2, 3, 4, 5), (1030,)]

Make = Callable[..., Optimizer]  # params, then what differs from the configuration "all"
Scenario = Callable[[Make, Problem], Optimizer]
SCENARIOS: list[Scenario] = []


def scenario(function: Scenario) -> Scenario:
    SCENARIOS.append(function)
    return function


@scenario
def add_param_group(make: Make, problem: Problem) -> Optimizer:  # case 15
    optimizer = make(problem.params[:2])
    problem.run(optimizer, steps=[0, 1])
    optimizer.add_param_group({"params": problem.params[2:], "lr": 0.3})
    problem.run(optimizer, steps=[2, 3])
    return optimizer


@scenario
def param_appended_to_a_group(make: Make, problem: Problem) -> Optimizer:
    optimizer = make(problem.params[:2])
    problem.run(optimizer, steps=[0, 1])
    optimizer.param_groups[0]["params"].append(problem.params[3])
    problem.run(optimizer, steps=[2])
    del optimizer.param_groups[0]["params"][0]
    problem.run(optimizer, steps=[3])
    return optimizer


@scenario
def data_repointed(make: Make, problem: Problem) -> Optimizer:  # case 15
    optimizer = make(problem.params)
    for step in range(4):
        problem.run(optimizer, steps=[step])
        for param in problem.params:
            param.data = param.data.clone() * 0.5
    return optimizer


@scenario
def data_repointed_to_another_layout(make: Make, problem: Problem) -> Optimizer:  # case 15
    optimizer = make(problem.params)
    problem.run(optimizer, steps=[0, 1])
    problem.params[0].data = problem.params[0].data.t().contiguous().t()
    problem.params[3].data = problem.params[3].data.contiguous(memory_format=torch.channels_last)
    problem.params[1].data = torch.stack([problem.params[1].data] * 2, 1)[:, 0]
    problem.run(optimizer, steps=[2, 3])
    return optimizer


@scenario
def grads_to_none_and_back(make: Make, problem: Problem) -> Optimizer:  # case 15
    optimizer = make(problem.params)
    problem.run(optimizer, steps=[0])
    optimizer.zero_grad(set_to_none=True)
    assert all(param.grad is None for param in problem.params)
    optimizer.step()  # nothing to do
    problem.run(optimizer, steps=[1])
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is not None and bool((param.grad == 0).all()) for param in problem.params)
    optimizer.step()
    return optimizer


@scenario
def grads_written_in_place(make: Make, problem: Problem) -> Optimizer:
    optimizer = make(problem.params)
    problem.assign(0)
    for step in range(3):
        for grad in problem.grads[0]:
            grad.mul_(step + 0.5)
        optimizer.step()
    return optimizer


@scenario
def frozen_then_thawed(make: Make, problem: Problem) -> Optimizer:
    """requires_grad is not the optimizer's business: a gradient that is there counts."""  # case 18
    optimizer = make(problem.params)
    problem.run(optimizer, steps=[0])
    problem.params[1].requires_grad_(False)
    problem.run(optimizer, steps=[1, 2])
    problem.params[1].requires_grad_(True)
    problem.run(optimizer, steps=[3])
    return optimizer


@scenario
def never_requires_grad(make: Make, problem: Problem) -> Optimizer:  # case 18
    problem.params = [param.detach() for param in problem.params]
    optimizer = make(problem.params)
    problem.run(optimizer)
    return optimizer


@scenario
def non_leaf_params(make: Make, problem: Problem) -> Optimizer:  # case 18
    leaves, problem.params = problem.params, [param * 1.0 for param in problem.params]
    for param in problem.params:
        param.retain_grad()
    optimizer = make(problem.params)
    problem.run(optimizer)
    assert all(leaf.grad is None for leaf in leaves)
    return optimizer


@scenario
def states_cleared(make: Make, problem: Problem) -> Optimizer:
    optimizer = make(problem.params)
    problem.run(optimizer, steps=[0, 1])
    del optimizer.state[problem.params[0]]
    problem.run(optimizer, steps=[2])
    optimizer.state.clear()
    problem.run(optimizer, steps=[3])
    return optimizer


@scenario
def states_replaced(make: Make, problem: Problem) -> Optimizer:
    optimizer = make(problem.params)
    problem.run(optimizer, steps=[0, 1])
    for param in problem.params[:3]:
        for key, value in optimizer.state[param].items():
            optimizer.state[param][key] = value + 3 if key == "step" else value * 0.5
    problem.run(optimizer, steps=[2])
    for param in problem.params[2:]:
        for key, value in optimizer.state[param].items():
            if key != "step":
                value.mul_(0.25)
    problem.run(optimizer, steps=[3])
    return optimizer


@scenario
def state_dictionary_replaced(make: Make, problem: Problem) -> Optimizer:
    optimizer = make(problem.params)
    problem.run(optimizer, steps=[0, 1])
    for param in problem.params:
        optimizer.state[param] = {key: value.clone() for key, value in optimizer.state[param].items()}
    problem.run(optimizer, steps=[2, 3])
    return optimizer


@scenario
def steps_set_one_by_one(make: Make, problem: Problem) -> Optimizer:
    """Step counters that start out equal and are then edited in place, each on its own."""
    optimizer = make(problem.params)
    problem.run(optimizer, steps=[0, 1])
    for index, param in enumerate(problem.params):
        if "step" in optimizer.state[param]:
            optimizer.state[param]["step"].fill_(index + 1)
    problem.run(optimizer, steps=[2, 3])
    return optimizer


@scenario
def hyperparameters_edited(make: Make, problem: Problem) -> Optimizer:
    optimizer = make(problem.params)
    problem.run(optimizer, steps=[0, 1])
    (group,) = optimizer.param_groups
    for key, value in {
        "lr": 0.3,
        "weight_decay": 0.02,
        "eps": 1e-2,
        "betas": (0.6, 0.7),
        "alpha": 0.7,
        "lr_decay": 0.4,
        "momentum": 0.4,
        "dampening": 0.1,
        "maximize": False,
    }.items():
        if key in group:
            group[key] = value
    problem.run(optimizer, steps=[2, 3])
    return optimizer


@scenario
def groups_moved(make: Make, problem: Problem) -> Optimizer:
    """A parameter that wanders to another group takes its state along."""
    optimizer = make([{"params": problem.params[:3]}, {"params": problem.params[3:], "lr": 0.2}])
    problem.run(optimizer, steps=[0, 1])
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop(0))
    problem.run(optimizer, steps=[2, 3])
    return optimizer


@scenario
def many_groups(make: Make, problem: Problem) -> Optimizer:
    optimizer = make([{"params": [param], "lr": 0.01 * (i + 1)} for i, param in enumerate(problem.params)])
    problem.run(optimizer)
    return optimizer


@scenario
def group_without_gradients(make: Make, problem: Problem) -> Optimizer:
    for grads in problem.grads:
        grads[0] = grads[1] = None
    optimizer = make([{"params": problem.params[:2]}, {"params": problem.params[2:]}])
    problem.run(optimizer)
    return optimizer


@scenario
def no_gradients_at_all(make: Make, problem: Problem) -> Optimizer:
    optimizer = make(problem.params)
    optimizer.step()
    optimizer.step()
    return optimizer


@scenario
def group_without_params(make: Make, problem: Problem) -> Optimizer:
    optimizer = make([{"params": []}, {"params": problem.params}])
    problem.run(optimizer)
    return optimizer


@scenario
def named_params(make: Make, problem: Problem) -> Optimizer:
    optimizer = make([(f"weight{i}", param) for i, param in enumerate(problem.params)])
    problem.run(optimizer)
    return optimizer


@scenario
def duplicate_params(make: Make, problem: Problem) -> Optimizer:
    """torch warns of it and then updates twice, one after the other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        optimizer = make([*problem.params[:3], problem.params[0], problem.params[4], problem.params[4]])
        for step in range(4):
            problem.assign(step)
            optimizer.step()
    return optimizer


@scenario
def closures(make: Make, problem: Problem) -> Optimizer:  # case 16
    optimizer = make(problem.params)
    losses = []
    for step in range(4):

        def closure(step: int = step) -> Any:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss: Any = sum((p * grad).sum() for p, grad in zip(problem.params, problem.grads[step], strict=True))
            loss.backward()
            return loss

        losses.append(optimizer.step(closure))
    assert all(isinstance(loss, torch.Tensor) for loss in losses)
    return optimizer


@scenario
def hooks(make: Make, problem: Problem) -> Optimizer:  # case 16
    """Pre and post hooks run once a step, in order, and see the parameters before and after."""
    optimizer = make(problem.params)
    calls = []
    pre = optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append(("pre", problem.params[2].item())))
    post = optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(("post", problem.params[2].item())))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append(("global", 0.0)))
    try:
        problem.run(optimizer, steps=[0, 1])
    finally:
        everywhere.remove()
    assert [kind for kind, _ in calls] == ["pre", "post", "global"] * 2
    assert calls[0][1] != calls[1][1] == calls[3][1] != calls[4][1]
    pre.remove()
    post.remove()
    problem.run(optimizer, steps=[2, 3])
    assert len(calls) == 6
    return optimizer


@scenario
def gradients_changed_by_a_hook(make: Make, problem: Problem) -> Optimizer:  # case 16
    optimizer = make(problem.params)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(problem.params, 1.0)

    optimizer.register_step_pre_hook(clip)
    problem.run(optimizer)
    return optimizer


@scenario
def whole_optimizer_copied(make: Make, problem: Problem) -> Optimizer:  # case 19
    optimizer = make(problem.params)
    problem.run(optimizer, steps=[0, 1])
    optimizer, problem.params = copy.deepcopy((optimizer, problem.params))
    problem.run(optimizer, steps=[2, 3])
    return optimizer


@scenario
def gradients_with_a_graph(make: Make, problem: Problem) -> Optimizer:
    """backward(create_graph=True) leaves gradients that require gradients themselves."""
    optimizer = make(problem.params)
    for step in range(3):
        optimizer.zero_grad()
        loss: Any = sum(
            (param**2 * grad).sum() for param, grad in zip(problem.params, problem.grads[step], strict=True)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            loss.backward(create_graph=True)
        assert all(param.grad is not None and param.grad.requires_grad for param in problem.params)
        optimizer.step()
        assert all(param.grad_fn is None and param.is_leaf for param in problem.params)
    optimizer.zero_grad()
    return optimizer


@scenario
def inside_inference_mode(make: Make, problem: Problem) -> Optimizer:
    optimizer = make(problem.params)
    with torch.inference_mode():
        problem.run(optimizer)
    return optimizer


@scenario
def inference_tensors(make: Make, problem: Problem) -> Optimizer:
    with torch.inference_mode():
        problem.params = [param.clone() for param in problem.params]
        problem.grads = [[None if g is None else g.clone() for g in grads] for grads in problem.grads]
        optimizer = make(problem.params)
        problem.run(optimizer)
    return optimizer


@scenario
def negative_bit_gradients(make: Make, problem: Problem) -> Optimizer:  # case 18
    problem.grads = [[None if g is None else torch.ops.aten._neg_view(g) for g in grads] for grads in problem.grads]
    optimizer = make(problem.params)
    problem.run(optimizer)
    return optimizer


@scenario
def grads_that_share_memory(make: Make, problem: Problem) -> Optimizer:
    """One gradient tensor serves several parameters, and a parameter's gradient is the parameter itself."""
    problem.params[2].data = problem.params[2].data.clone()
    optimizer = make(problem.params[1:3])
    for step in range(3):
        problem.assign(step)
        problem.params[2].grad = problem.params[2].detach()
        optimizer.step()
    return optimizer


@scenario
def replaced_grads_every_step(make: Make, problem: Problem) -> Optimizer:
    """Fresh gradient tensors whose addresses repeat, with other layouts between."""  # case 15
    optimizer = make(problem.params)
    for step in range(4):
        for param, grad in zip(problem.params, problem.grads[step], strict=True):
            order = tuple(reversed(range(grad.dim())))
            param.grad = grad.permute(order).contiguous().permute(order) if step % 2 else grad.clone()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("run", SCENARIOS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scenario(backend: Backend, name: str, run: Scenario) -> None:
    problem = Problem(SHAPES, device=backend.device)
    other = twin(problem)
    ours = run(lambda params, **kw: backend.make(name, params, **(config_of(name, "all") | kw)), problem)
    theirs = run(lambda params, **kw: stock(name, params, **(config_of(name, "all") | kw)), other)
    assert_follows(ours, problem.params, theirs, other.params, eps=4e-6)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_conjugated_gradients(backend: Backend, name: str, dtype: torch.dtype) -> None:  # cases 17, 18
    problem = Problem(SHAPES, dtype=dtype, device=backend.device)
    problem.grads = [[None if g is None else g.conj() for g in grads] for grads in problem.grads]
    other = twin(problem)
    ours, theirs = (
        make(name, prob.params, **config_of(name, "all")) for make, prob in ((backend.make, problem), (stock, other))
    )
    problem.run(ours)
    other.run(theirs)
    assert_follows(ours, problem.params, theirs, other.params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_that_are_imaginary_parts(backend: Backend, name: str) -> None:
    """``z.conj().imag`` is strided and has the negative bit set."""  # case 18
    problem = Problem([(6, 7)], device=backend.device)
    source = Problem([(6, 7)], dtype=torch.complex64, device=backend.device)
    problem.grads = [[None if g is None else g.conj().imag for g in grads] for grads in source.grads]
    assert problem.grads[0][0] is not None
    assert problem.grads[0][0].is_neg()
    other = twin(problem)
    ours, theirs = (
        make(name, prob.params, **config_of(name, "all")) for make, prob in ((backend.make, problem), (stock, other))
    )
    problem.run(ours)
    other.run(theirs)
    assert_follows(ours, problem.params, theirs, other.params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_optimizer_a_parameter_inside_backward(backend: Backend, name: str) -> None:  # case 16
    """register_post_accumulate_grad_hook: step while backward runs, and free the gradient at once."""
    problems = [Problem(SHAPES, device=backend.device)]
    problems.append(twin(problems[0]))
    everything: list[list[Optimizer]] = []
    for problem, make in zip(problems, (backend.make, stock), strict=True):
        optimizers = {param: make(name, [param], **config_of(name, "all")) for param in problem.params}

        def hook(param: torch.Tensor, optimizers: dict[torch.Tensor, Optimizer] = optimizers) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in problem.params:
            param.register_post_accumulate_grad_hook(hook)
        for grads in problem.grads:
            sum((param * grad).sum() for param, grad in zip(problem.params, grads, strict=True)).backward()  # type: ignore
            assert all(param.grad is None for param in problem.params)
        everything.append(list(optimizers.values()))
    for index, (ours, theirs) in enumerate(zip(*everything, strict=True)):
        assert_follows(ours, [problems[0].params[index]], theirs, [problems[1].params[index]])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_autograd_sees_the_update(backend: Backend, name: str) -> None:
    """A parameter saved for backward and then stepped: backward must refuse, not use the new value silently."""
    for config in ("default", "all"):
        param = torch.rand(5, device=backend.device, requires_grad=True)
        optimizer = backend.make(name, [param], **config_of(name, config))
        loss = (param * param).sum()
        param.grad = torch.rand(5, device=backend.device)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_views_see_the_update(backend: Backend, name: str) -> None:
    """The update is in place: a detached alias and tied storage follow, and no address changes."""
    problem = Problem([(4, 6)], device=backend.device)
    (param,) = problem.params
    alias, address = param.detach(), param.data_ptr()
    optimizer = backend.make(name, [param], **config_of(name, "all"))
    problem.run(optimizer, steps=[0])
    addresses = {key: optimizer.state[param][key].data_ptr() for key in STATES[name]}
    problem.run(optimizer, steps=[1, 2])
    assert torch.equal(alias, param)
    assert param.data_ptr() == address
    assert {key: optimizer.state[param][key].data_ptr() for key in STATES[name]} == addresses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_bits_whatever_the_threads_and_the_grouping(backend: Backend, name: str) -> None:
    shapes = [(65537,), (3,), (40_000,), (129, 65)]
    results = []
    threads = torch.get_num_threads()
    for count, groups in ((1, 1), (2, 1), (2, 2), (3, 4)):
        problem = Problem(shapes, device=backend.device)
        optimizer = backend.make(name, [{"params": problem.params[i::groups]} for i in range(groups)])
        torch.set_num_threads(count)
        try:
            problem.run(optimizer)
        finally:
            torch.set_num_threads(threads)
        results.append(bits(optimizer, problem.params))
    assert all(same_bits(results[0], result) for result in results[1:])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_default_dtype_float64(backend: Backend, name: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        problem = Problem([(5,), (3, 4)], dtype=[torch.float32, torch.float64], device=backend.device)
        other = twin(problem)
        ours, theirs = (
            make(name, prob.params, **config_of(name, "all"))
            for make, prob in ((backend.make, problem), (stock, other))
        )
        problem.run(ours)
        other.run(theirs)
        assert_follows(ours, problem.params, theirs, other.params)
    finally:
        torch.set_default_dtype(torch.float32)


def test_momentum_switched_on_mid_training(backend: Backend) -> None:
    problem = Problem(SHAPES, device=backend.device)
    other = twin(problem)
    optimizers = []
    for prob, make in ((problem, backend.make), (other, stock)):
        optimizer = make("SGD", prob.params, lr=0.1, dampening=0.2)
        prob.run(optimizer, steps=[0, 1])
        optimizer.param_groups[0]["momentum"] = 0.9
        prob.run(optimizer, steps=[2])
        optimizer.param_groups[0]["momentum"] = 0.0
        prob.run(optimizer, steps=[3])
        optimizers.append(optimizer)
    assert_follows(optimizers[0], problem.params, optimizers[1], other.params)


class Tagged(torch.nn.Parameter):
    """A subclass without behaviour of its own, as many libraries have."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameter_subclass(backend: Backend, name: str) -> None:
    problem = Problem(SHAPES, device=backend.device)
    other = twin(problem)
    problem.params = [Tagged(param.detach()) for param in problem.params]
    ours, theirs = (
        make(name, prob.params, **config_of(name, "all")) for make, prob in ((backend.make, problem), (stock, other))
    )
    problem.run(ours)
    other.run(theirs)
    assert all(type(param) is Tagged for param in problem.params)
    assert_follows(ours, problem.params, theirs, other.params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_train_step(backend: Backend, name: str) -> None:
    """torch.compile around forward, backward and step: it may break the graph, not the result."""
    torch.manual_seed(0)
    inputs = torch.randn(3, 8, 5)
    results: list[list[Any]] = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(5, 4).to(backend.device)
        optimizer = backend.make(name, model.parameters(), **config_of(name, "all"))

        def train_step(batch: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        torch._dynamo.reset()
        run = torch.compile(train_step, backend="eager") if compiled else train_step
        losses = [run(batch.to(backend.device)) for batch in inputs]
        results.append([*losses, *(param.detach() for param in model.parameters())])
    for eager, compiled_result in zip(*results, strict=True):
        torch.testing.assert_close(compiled_result, eager, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_repr_and_profiler_name_are_stocks(backend: Backend, name: str) -> None:
    param = torch.ones(3, device=backend.device, requires_grad=True)
    kwargs = config_of(name, "all")
    optimizer = backend.make(name, [param], **kwargs)
    ours, theirs = repr(optimizer), repr(getattr(torch.optim, name)([param], **kwargs))
    assert [line for line in ours.splitlines() if "state_dtype" not in line] == theirs.splitlines()
    param.grad = torch.ones_like(param)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert any(event.key == f"Optimizer.step#{name}.step" for event in profile.key_averages())


def test_adagrad_shares_its_memory() -> None:
    param = torch.ones(3, requires_grad=True)
    optimizer = Backend("cpu", "cpu").make("Adagrad", [param])
    optimizer.share_memory()  # type: ignore[attr-defined]
    assert optimizer.state[param]["sum"].is_shared()
    param.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[param]["sum"].is_shared()
    assert bool((optimizer.state[param]["sum"] == 1).all())
