# SPDX-License-Identifier: Apache-2.0
"""Derivatives of derivatives and function transforms: what stock gives, in float64."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_reference import ALL_ACTIVATIONS, FORMS, SMOOTH, Block, ours, stock
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

Tensors = tuple[Tensor, ...]


def functions(block: Block) -> tuple[Callable[..., Tensor], Callable[..., Tensor], Tensors]:
    """Ours and stock's as functions of the tensors in the form's order."""
    names = [name for name, tensor in block.tensors.items() if tensor is not None]

    def positional(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *tensors: function(**dict(zip(names, tensors, strict=True)))

    return positional(block.fused), positional(block.stock), tuple(t for t in block.tensors.values() if t is not None)


def double(form: str, activation: str = "gelu", batch: tuple[int, ...] = (3,), **options: Any) -> Block:
    return Block(form, activation, batch, 3, 4, 2, torch.float64, **options)


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("activation", "parameters"), ALL_ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form: str, activation: str, parameters: dict[str, float]) -> None:  # case 8
    """Numerical differences: an oracle that shares nothing with any formula."""
    fused, _, tensors = functions(double(form, activation, parameters=parameters))
    gradcheck(fused, tensors)


@pytest.mark.parametrize("activation", [name for name in SMOOTH if name != "hardswish"])
@pytest.mark.parametrize("form", FORMS)
def test_gradgradcheck(form: str, activation: str) -> None:  # case 8
    fused, _, tensors = functions(double(form, activation, (2,)))
    gradgradcheck(fused, tensors)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("form", FORMS)
def test_forward_mode_gradcheck(form: str, activation: str) -> None:
    fused, _, tensors = functions(double(form, activation))
    gradcheck(fused, tensors, check_forward_ad=True, check_undefined_grad=False)


@pytest.mark.parametrize(("activation", "parameters"), ALL_ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_gradient_penalty(form: str, activation: str, parameters: dict[str, float]) -> None:
    """First-order gradients under create_graph, then the gradients of their squares, for every argument."""
    block = double(form, activation, parameters=parameters)
    results: list[Any] = []
    for function in functions(block)[:2]:
        tensors = functions(block)[2]
        first = torch.autograd.grad(function(*tensors), tensors, block.grad_output, create_graph=True)
        penalty = torch.stack([gradient.square().sum() for gradient in first]).sum()
        second = torch.autograd.grad(penalty, tensors, allow_unused=True, materialize_grads=True)
        results.append((first, second))
    assert_same(*results, tolerance=1e-6 if activation == "hardsigmoid" else 1e-10)  # stock's has float32 constants


def test_gradient_with_respect_to_the_output_gradient() -> None:
    block = double("gated_mlp", "silu")
    results: list[Any] = []
    for function in functions(block)[:2]:
        tensors = functions(block)[2]
        direction = block.grad_output.clone().requires_grad_()
        first = torch.autograd.grad(function(*tensors), tensors, direction, create_graph=True)
        results.append(torch.autograd.grad(sum(g.sum() for g in first), direction))  # pyright: ignore
    assert_same(*results)


def test_third_derivative() -> None:
    block = double("linear_act", "gelu")
    results: list[Any] = []
    for function in functions(block)[:2]:
        tensors = functions(block)[2]
        value = function(*tensors).sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, tensors[0], create_graph=True)
            value = gradient.square().sum()
        results.append(value)
    assert_same(*results)


def pulled_back(function: Callable[..., Tensor], tensors: Tensors) -> Any:
    output, pull = vjp(function, *tensors)[:2]
    return output, pull(output.cos())


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], Tensors], Any]] = {
    "grad": lambda f, t: grad(lambda *a: f(*a).square().sum(), argnums=tuple(range(len(t))))(*t),
    "grad of grad": lambda f, t: grad(lambda x: grad(lambda y: f(y, *t[1:]).square().sum())(x).square().sum())(t[0]),
    "vjp": pulled_back,
    "jvp": lambda f, t: jvp(f, t, tuple(tensor.cos() for tensor in t)),
    "jvp of input": lambda f, t: jvp(lambda x: f(x, *t[1:]), (t[0],), (t[0].cos(),)),
    "jacrev": lambda f, t: jacrev(f, argnums=tuple(range(len(t))))(*t),
    "jacfwd": lambda f, t: jacfwd(f, argnums=tuple(range(len(t))))(*t),
    "hessian": lambda f, t: hessian(lambda x: f(x, *t[1:]).square().sum())(t[0]),
    "vmap over input": lambda f, t: vmap(lambda x: f(x, *t[1:]))(torch.stack([t[0], t[0].cos()])),
    "vmap over another dimension": lambda f, t: vmap(lambda x: f(x, *t[1:]), 1, 1)(torch.stack([t[0], t[0].cos()], 1)),
    "vmap over a weight": lambda f, t: vmap(lambda w: f(t[0], w, *t[2:]))(torch.stack([t[1], t[1].cos()])),
    "vmap over all": lambda f, t: vmap(f)(*(torch.stack([tensor, tensor.cos(), tensor.sin()]) for tensor in t)),
    "vmap over a bias": lambda f, t: vmap(lambda b: f(*t[:-1], b))(torch.stack([t[-1], t[-1].cos()])),
    "vmap of vmap": lambda f, t: vmap(lambda w: vmap(lambda x: f(x, w, *t[2:]))(torch.stack([t[0], t[0].cos()])))(
        torch.stack([t[1], t[1].cos()])
    ),
    "per-sample gradients": lambda f, t: vmap(grad(lambda w, x: f(x, w, *t[2:]).square().sum()), in_dims=(None, 0))(
        t[1], t[0]
    ),
    "grad of vmap": lambda f, t: grad(lambda w: vmap(lambda x: f(x, w, *t[2:]))(t[0]).square().sum())(t[1]),
    "vmap of jvp": lambda f, t: vmap(lambda x: jvp(lambda y: f(y, *t[1:]), (x,), (x.cos(),)))(
        torch.stack([t[0], t[0].cos()])
    ),
    "jvp of grad": lambda f, t: jvp(grad(lambda x: f(x, *t[1:]).square().sum()), (t[0],), (t[0].cos(),)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
@pytest.mark.parametrize("form", FORMS)
def test_transforms(form: str, activation: str, transform: str) -> None:  # case 8
    fused, plain, tensors = functions(double(form, activation))
    tensors = tuple(tensor.detach() for tensor in tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a slow path of vmap may say so
        assert_same(TRANSFORMS[transform](fused, tensors), TRANSFORMS[transform](plain, tensors))


@pytest.mark.parametrize("form", FORMS)
def test_transforms_leave_requires_grad_alone(form: str) -> None:
    """The tensors may require grad themselves, as a module's parameters do."""
    fused, plain, tensors = functions(double(form, "gelu"))
    actual, expected = (
        torch.autograd.grad(vmap(lambda x, f=f: f(x, *tensors[1:]))(tensors[0]).square().sum(), tensors)
        for f in (fused, plain)
    )
    assert_same(actual, expected)


def test_dual_numbers() -> None:
    """Forward-mode AD without torch.func, alone and through a backward."""
    fused, plain, tensors = functions(double("gated_mlp", "tanh"))
    results: list[Any] = []
    for function in (fused, plain):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(tensors[0], tensors[0].detach().cos())
            tangent = forward_ad.unpack_dual(function(dual, *tensors[1:])).tangent
            assert tangent is not None
            results.append((tangent.detach(), torch.autograd.grad(tangent.square().sum(), tensors[1])))
    assert_same(*results)


@pytest.mark.parametrize("vectorize", [False, True])
def test_jacobian_of_torch_autograd(vectorize: bool) -> None:
    fused, plain, tensors = functions(double("mlp", "gelu"))
    jacobian = torch.autograd.functional.jacobian
    assert_same(*(jacobian(function, tensors, vectorize=vectorize) for function in (fused, plain)))


@pytest.mark.parametrize("batched", [False, True])
def test_is_grads_batched(batched: bool) -> None:
    block = double("gated_linear", "silu")
    results: list[Any] = []
    for function in functions(block)[:2]:
        tensors = functions(block)[2]
        directions = torch.stack([block.grad_output, block.grad_output.cos()])
        results.append(
            torch.autograd.grad(function(*tensors), tensors, directions if batched else directions[0],
                                is_grads_batched=batched)
        )  # fmt: skip
    assert_same(*results)


def modules() -> dict[str, torch.nn.Module]:
    from fused_ops import nn

    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.float64}
    return {
        "LinearAct": nn.LinearAct(3, 4, activation="gelu", **options),
        "GatedLinear": nn.GatedLinear(3, 4, activation="silu", **options),
        "MLP": nn.MLP(3, 4, activation="gelu", **options),
        "GatedMLP": nn.GatedMLP(3, 4, activation="silu", **options),
    }


@pytest.mark.parametrize("name", ["LinearAct", "GatedLinear", "MLP", "GatedMLP"])
def test_functional_call(name: str) -> None:  # case 8
    """Parameters given from outside are used, gradients reach them, and the module's own stay as they were."""
    module = modules()[name]
    own = {key: value.detach().clone() for key, value in module.named_parameters()}
    other = {key: torch.cos(37 * value).detach().requires_grad_() for key, value in own.items()}
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    output = functional_call(module, other, (x,))
    gradients = torch.autograd.grad(output.square().sum(), list(other.values()))
    assert all(parameter.grad is None for parameter in module.parameters())
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            assert torch.equal(parameter, own[key])
            parameter.copy_(other[key])
    expected = module(x)
    assert_same(output, expected)
    assert_same(gradients, torch.autograd.grad(expected.square().sum(), list(module.parameters())))

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(module, parameters, (x,)).square().sum()

    detached = {key: value.detach() for key, value in other.items()}
    assert_same(tuple(grad(loss)(detached).values()), gradients)
    stacked = {key: torch.stack([value, value.sin()]) for key, value in detached.items()}  # an ensemble
    ensemble = vmap(lambda parameters: functional_call(module, parameters, (x,)))(stacked)
    assert_same(ensemble[0], output.detach())
    assert_same(ensemble[1], functional_call(module, {k: v[1] for k, v in stacked.items()}, (x,)))


def test_hooks_on_tensors() -> None:
    """A hook on an argument or on the output sees its gradient and may change it."""
    for form in FORMS:
        results: list[Any] = []
        for function in functions(double(form))[:2]:
            tensors = functions(double(form))[2]
            seen: list[Tensor] = []
            for tensor in tensors:
                tensor.register_hook(lambda g, seen=seen: (seen.append(g), 2 * g)[1])
            output = function(*tensors)
            output.register_hook(lambda g: 3 * g)
            results.append((torch.autograd.grad(output.square().sum(), tensors), seen))
        assert_same(results[0][0], results[1][0])
        assert len(results[0][1]) == len(results[1][1])


def test_node() -> None:
    """One node, with an edge to each operand that has a gradient, and named in errors and by profilers."""
    block = Block("gated_mlp", "silu", frozen=("weight", "down_bias"), without=("up_bias",))
    nodes: list[Any] = []
    output = block.fused(**block.tensors)
    creation_hook = getattr(torch.autograd.graph, "node_creation_hook", None)  # of torch 2.14
    if creation_hook:
        with creation_hook(nodes.append):
            output = block.fused(**block.tensors)
        assert output.grad_fn in nodes
    assert output.grad_fn is not None
    assert output.grad_fn.name() == "FeedForwardBackward"
    edges = [node for node, _ in output.grad_fn.next_functions if node is not None]
    assert {id(edge.variable) for edge in edges} == {id(tensor) for tensor in block.trainable.values()}  # pyright: ignore
    output.backward(block.grad_output)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.backward(block.grad_output)


def test_backward_on_another_thread() -> None:
    import threading

    fused, plain, tensors = functions(double("gated_mlp", "silu", (70,)))
    expected = torch.autograd.grad(plain(*tensors).square().sum(), tensors)
    results: list[Any] = [None] * 4

    def work(index: int) -> None:
        results[index] = torch.autograd.grad(fused(*tensors).square().sum(), tensors)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert_same(result, expected)


def test_undefined_output_gradient() -> None:
    """A block whose output does not reach the loss gets no gradient, and none of zeros in the way of others."""
    block = double("mlp")
    tensors = list(block.trainable.values())
    output = block.fused(**block.tensors)
    other = (tensors[0] * 2).sum()
    gradients = torch.autograd.grad(other + 0 * output.detach().sum(), tensors, allow_unused=True)
    assert [gradient is None for gradient in gradients] == [False] + [True] * (len(tensors) - 1)


def test_meta_tensors() -> None:
    """Shapes alone, as for counting or for building a model without memory."""
    for form in FORMS:
        block = Block(form, "gelu", (2, 5), 7, 6, 4)
        tensors = {k: None if t is None else t.to("meta") for k, t in block.tensors.items()}
        for with_grad in (False, True):
            with torch.set_grad_enabled(with_grad):
                output = ours(form, "gelu", {}, tensors)
            assert output.is_meta
            assert output.shape == stock("gelu", {}, tensors).shape


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(0, 4, 3), (3, 0, 2), (3, 4, 0), (0, 0, 2), (0, 3, 0)], ids=str)
@pytest.mark.parametrize("batch", [(2,), (0,), (2, 3)], ids=str)
def test_second_derivatives_of_what_is_empty(form: str, sizes: tuple[int, int, int], batch: tuple[int, ...]) -> None:
    block = Block(form, "gelu", batch, *sizes, torch.float64)
    pairs = []
    for function in (block.fused, block.stock):
        tensors = {name: tensor for name, tensor in block.tensors.items() if tensor is not None}
        output = function(**tensors)
        first = torch.autograd.grad(output, [*tensors.values()], torch.ones_like(output), create_graph=True)
        total = torch.cat([gradient.square().flatten() for gradient in first]).sum()
        pairs.append((output, *first, *torch.autograd.grad(total, [*tensors.values()], materialize_grads=True)))
    assert_same(*pairs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_input(layout: torch.layout) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.nested.nested_tensor([torch.randn(n, 4, generator=generator) for n in (2, 3)], layout=layout)
    weight, bias = (torch.randn(size, generator=generator) for size in ((5, 4), (5,)))
    outputs = [
        ours("linear_act", "gelu", {}, {"input": x, "weight": weight, "bias": bias}),
        stock("gelu", {}, {"input": x, "weight": weight, "bias": bias}),
    ]
    for mine, theirs in zip(*(output.unbind() for output in outputs), strict=True):
        assert_same(mine, theirs)


def test_threads_with_autocast_and_hooks_on_saved_tensors() -> None:
    """Autocast's lock and the interpreter's, taken in both orders, would wait for each other for ever."""
    program = """
import threading, torch
import fused_ops.functional
weight, x = torch.nn.Parameter(torch.randn(5, 8)), torch.randn(3, 8, requires_grad=True)
done = []
def work():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        for _ in range(8000):
            with torch.autocast("cpu", torch.bfloat16):
                fused_ops.functional.linear_act(x, weight, None, "silu")
    done.append(True)
threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(done), flush=True)
import os; os._exit(0)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout.split() == ["3"]
