# SPDX-License-Identifier: Apache-2.0
"""Optimizers share nothing: stepping several at once gives what stepping them one after another gives."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from reference import OPTIMIZERS, Backend, Problem, bits, config_of, same_bits

SHAPES = [(1030,), (33, 17), (), (20_000,)]
STEPS = 25


def at_once(*functions: Callable[[], None]) -> None:
    barrier, failures = threading.Barrier(len(functions)), []

    def run(function: Callable[[], None]) -> None:
        try:
            barrier.wait()
            function()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("second", OPTIMIZERS)
@pytest.mark.parametrize("first", OPTIMIZERS)
def test_two_optimizers_in_two_threads(backend: Backend, first: str, second: str) -> None:  # case 20
    results = []
    for together in (False, True):
        pairs = []
        for seed, name in enumerate((first, second)):
            problem = Problem(SHAPES, device=backend.device, steps=STEPS, seed=seed)
            pairs.append((problem, backend.make(name, problem.params, **config_of(name, "all"))))
        steps = [lambda problem=problem, optimizer=optimizer: run(problem, optimizer) for problem, optimizer in pairs]
        if together:
            at_once(*steps)
        else:
            for step in steps:
                step()
        results.append([bits(optimizer, problem.params) for problem, optimizer in pairs])
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))


def run(problem: Problem, optimizer: object) -> None:
    """Like Problem.run, without catch_warnings, which is not for threads."""
    for step in range(problem.steps):
        problem.assign(step)
        optimizer.step()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_optimizers_over_one_model(backend: Backend, name: str) -> None:
    """Both know all parameters; each has gradients for its half only when its thread steps."""  # case 20
    results = []
    for together in (False, True):
        problem = Problem(SHAPES, device=backend.device, steps=STEPS)
        halves = [problem.params[:2], problem.params[2:]]
        optimizers = [
            backend.make(name, [{"params": half}, {"params": []}], **config_of(name, "all")) for half in halves
        ]

        def step_half(
            index: int, problem: Problem = problem, optimizers: list = optimizers, halves: list = halves
        ) -> None:
            for grads in problem.grads:
                for param, grad in zip(problem.params, grads, strict=True):
                    if any(param is own for own in halves[index]):
                        param.grad = grad
                optimizers[index].step()

        if together:
            at_once(lambda: step_half(0), lambda: step_half(1))
        else:
            step_half(0)
            step_half(1)
        results.append([bits(optimizer, half) for optimizer, half in zip(optimizers, halves, strict=True)])
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_made_in_one_thread_stepped_in_another(backend: Backend, name: str) -> None:
    results = []
    for elsewhere in (False, True):
        problem = Problem(SHAPES, device=backend.device)
        optimizer = backend.make(name, problem.params, **config_of(name, "all"))
        problem.run(optimizer, steps=[0, 1])
        if elsewhere:
            at_once(lambda problem=problem, optimizer=optimizer: problem.run(optimizer, steps=[2, 3]))
        else:
            problem.run(optimizer, steps=[2, 3])
        results.append(bits(optimizer, problem.params))
    assert same_bits(*results)
