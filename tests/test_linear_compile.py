# SPDX-License-Identifier: Apache-2.0
"""torch.compile, torch.export and the checks of the operator itself: one graph, and the results of eager mode."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from linear_reference import ALL_ACTIVATIONS, FORMS, Block, assert_agrees, subsets
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled_results(block: Block, compiler: Callable[..., Any]) -> dict[str, Tensor]:
    return block.run(compiler(block.fused))


def graphs(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> list[torch.fx.GraphModule]:
    """What dynamo hands to its backend."""
    seen: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(module)
        return module.forward

    torch.compile(function, backend=backend, fullgraph=True)(*args, **kwargs)
    return seen


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu", "leaky_relu"])
@pytest.mark.parametrize("form", FORMS)
def test_one_graph(form: str, activation: str) -> None:
    """No graph break. Stock operators in the graph would do, too, but not ours and stock's side by side."""
    block = Block(form, activation)
    (graph,) = graphs(block.fused, **block.tensors)
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("feed_forward" in call for call in calls) <= 1, calls


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu", "tanh"])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_by_aot_eager(form: str, activation: str) -> None:
    """Forward and backward traced with fake tensors: shapes, strides and dtypes of the fake kernels are right."""
    block = Block(form, activation, (37,), 19, 21, 11)
    results = compiled_results(block, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True))
    assert_agrees(results, block.oracle())


@pytest.mark.parametrize("frozen", [(), ("input",)])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_with_transposed_weights(form: str, frozen: tuple[str, ...]) -> None:
    """Their gradients have their memory order: what the fake kernel has to say as well."""
    layouts = {name: "transposed" for name in FORMS[form] if name.endswith("weight")}
    block = Block(form, "gelu", (37,), 19, 21, 11, layouts=layouts, frozen=frozen)
    results = compiled_results(block, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True))
    assert_agrees(results, block.oracle())


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_compiled_by_inductor(form: str, dtype: torch.dtype, dynamic: bool) -> None:
    block = Block(form, "gelu", (37,), 19, 21, 11, dtype)
    results = compiled_results(block, lambda f: torch.compile(f, fullgraph=True, dynamic=dynamic))
    assert_agrees(results, block.oracle(), slack=2)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_compiled_without_gradients(form: str) -> None:
    block = Block(form, "gelu", (37,), 19, 21, 11, frozen=FORMS[form])
    compiled = torch.compile(block.fused, fullgraph=True)
    with torch.no_grad():
        output = compiled(**block.tensors)
    assert_agrees({"output": output}, block.oracle(), slack=2)


def test_dynamic_rows_compile_once() -> None:
    counted = 0

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal counted
        counted += 1
        return module.forward

    block = Block("mlp", "gelu")
    compiled = torch.compile(block.fused, backend=backend, fullgraph=True, dynamic=True)
    for rows in (5, 9, 17, 33):
        other = Block("mlp", "gelu", (rows,), seed=rows)
        assert_agrees({"output": compiled(**other.tensors)}, other.oracle())
    assert counted == 1


def backward_results(block: Block, backend: str) -> dict[str, Tensor]:
    """Gradients that an eager forward pass's compiled backward pass leaves in .grad."""
    for tensor in block.trainable.values():
        tensor.grad = None
    with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True, dynamic=True)):
        block.fused(**block.tensors).backward(block.grad_output)
    return {name: tensor.grad for name, tensor in block.trainable.items() if tensor.grad is not None}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("activation", ["identity", "relu", "gelu", "leaky_relu"])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_autograd(form: str, activation: str, backend: str) -> None:
    for rows in (5, 9, 17):
        block = Block(form, activation, (2, rows), 19, 21, 11, seed=rows)
        assert_agrees(backward_results(block, backend), block.oracle())


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_compiled_autograd_by_inductor(form: str) -> None:
    block = Block(form, "gelu", (37,), 19, 21, 11)
    assert_agrees(backward_results(block, "inductor"), block.oracle(), slack=2)


@pytest.mark.parametrize("form", ["linear_act", "gated_mlp"])
def test_compiled_autograd_of_every_choice_of_gradients(form: str) -> None:
    """One compiler for all: what was compiled for one choice is not taken for another."""
    names = [name for name in FORMS[form] if name in ("input", "weight", "bias", "down_weight")]
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        for frozen in subsets(names)[:-1]:
            for _ in range(2):
                block = Block(form, "gelu", (5,), frozen=frozen)
                block.fused(**block.tensors).backward(block.grad_output)
                grads = {name: tensor.grad for name, tensor in block.tensors.items() if tensor is not None}
                assert [name for name, grad in grads.items() if grad is None] == list(frozen)
                assert_agrees({name: grad for name, grad in grads.items() if grad is not None}, block.oracle())


def test_compiled_autograd_tells_activations_and_parameters_apart() -> None:
    calls = [
        ("relu", {}),
        ("gelu", {}),
        ("leaky_relu", {"negative_slope": 0.1}),
        ("leaky_relu", {"negative_slope": 0.2}),
    ]
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        for activation, parameters in calls:
            block = Block("linear_act", activation, parameters=parameters)
            assert_agrees(block.run(), block.oracle())


def test_compiled_autograd_with_saved_tensors_packed() -> None:
    block = Block("gated_mlp", "silu", (5,))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        results = backward_results(block, "eager")
    assert_agrees(results, block.oracle())


def test_compiled_autograd_adds_to_gradients() -> None:
    """accumulate_grad's addition is the compiled graph's then, and the forward pass's tensors are not overwritten."""
    layers = importlib.import_module("fused_ops.nn")
    layer = layers.LinearAct(7, 6)
    layers.accumulate_grad(layer)
    x, grad = torch.randn(5, 7), torch.randn(5, 6)
    layer(x).backward(grad)
    once = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        layer(x).backward(grad)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name])


@pytest.mark.slow
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", ["linear_act", "gated_mlp"])
def test_compiled_checkpoint_under_autocast(form: str, reentrant: bool, amp: bool) -> None:  # case 9
    block = Block(form, "gelu", (37,), 19, 21, 11)
    names = list(block.tensors)

    def call(*tensors: Tensor) -> Tensor:
        return block.fused(**dict(zip(names, tensors, strict=True)))

    def step(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            return checkpoint(call, *tensors, use_reentrant=reentrant)

    tensors = [tensor for tensor in block.tensors.values() if tensor is not None]
    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=not reentrant)):
        for tensor in tensors:
            tensor.grad = None
        output = function(*tensors)
        assert output.dtype == (torch.bfloat16 if amp else torch.float32)
        output.backward(block.grad_output.to(output.dtype))
        results.append((output, *(tensor.grad for tensor in tensors)))
    tolerance = 2**-5 if amp else 1e-5
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def modules() -> dict[str, nn.Module]:
    layers = importlib.import_module("fused_ops.nn")
    torch.manual_seed(0)
    return {
        "LinearAct": layers.LinearAct(7, 6, activation="gelu"),
        "GatedLinear": layers.GatedLinear(7, 6),
        "MLP": layers.MLP(7, 6, activation="relu"),
        "GatedMLP": layers.GatedMLP(7, 6),
        "stacked": nn.Sequential(layers.MLP(7, 6), nn.LayerNorm(7), layers.GatedMLP(7, 5), layers.LinearAct(7, 3)),
    }


MODULES = ["LinearAct", "GatedLinear", "MLP", "GatedMLP", "stacked"]


@pytest.mark.parametrize("name", MODULES)
def test_modules_compile_to_one_graph(name: str) -> None:
    module = modules()[name]
    twin = copy.deepcopy(module)
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    results = []
    for network, function in ((module, module), (twin, torch.compile(twin, backend="aot_eager", fullgraph=True))):
        output = function(x)
        output.square().sum().backward()
        results.append((output, *(parameter.grad for parameter in network.parameters())))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_export(name: str, strict: bool) -> None:
    module = modules()[name].eval()
    rows = torch.export.Dim("rows", min=2, max=1000)
    example = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        program = torch.export.export(module, (example,), dynamic_shapes=((rows, None),), strict=strict)
        for count in (5, 33):
            x = torch.randn(count, 7, generator=torch.Generator().manual_seed(count))
            torch.testing.assert_close(program.module()(x), module(x), rtol=1e-5, atol=1e-6)
    assert {*program.state_dict} == {*module.state_dict()}


def test_exported_program_is_saved_and_loaded(tmp_path: Any) -> None:
    module = modules()["stacked"].eval()
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    torch.export.save(torch.export.export(module, (x,)), tmp_path / "program.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "program.pt2").module()(x), module(x))


@pytest.mark.parametrize("name", MODULES)
def test_symbolic_and_make_fx_tracing(name: str) -> None:
    module = modules()[name]
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    traced = torch.fx.experimental.proxy_tensor.make_fx(module)(x)  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(traced(x), module(x))


def operator_arguments(block: Block) -> tuple[Any, ...]:
    """In the order of the operator's schema."""
    order = ("input", "weight", "bias", "up_weight", "up_bias", "down_weight", "down_bias")
    values = [block.tensors.get(name) for name in order]
    return (*values, block.activation, [float(value) for value in block.parameters.values()])


OPCHECKS = [(form, activation) for form in FORMS for activation in ("identity", "relu", "gelu")]


@pytest.mark.parametrize(("form", "activation"), OPCHECKS)
def test_opcheck(form: str, activation: str) -> None:
    importlib.import_module("fused_ops.functional")
    operator = torch.ops.fused_ops.feed_forward.default
    for frozen in ((), ("weight", "bias"), FORMS[form]):
        block = Block(form, activation, (5,), frozen=frozen)
        torch.library.opcheck(operator, operator_arguments(block))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("activation", "parameters"), ALL_ACTIVATIONS)
def test_opcheck_of_every_activation(activation: str, parameters: dict[str, float], dtype: torch.dtype) -> None:
    importlib.import_module("fused_ops.functional")
    block = Block("gated_mlp", activation, (2, 3), dtype=dtype, parameters=parameters)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.fused_ops.feed_forward.default, operator_arguments(block), test_utils=utilities)


def test_operator_is_the_functional_form() -> None:
    importlib.import_module("fused_ops.functional")
    for form in FORMS:
        block = Block(form, "gelu", (37,))
        output = torch.ops.fused_ops.feed_forward(*operator_arguments(block))
        assert torch.equal(output, block.fused(**block.tensors))


@pytest.mark.parametrize("form", FORMS)
def test_fake_tensors_have_the_strides_of_real_ones(form: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for batch in ((), (5,), (2, 3), (0,)):
        block = Block(form, "gelu", batch)
        real = block.fused(**block.tensors)
        with FakeTensorMode() as mode:
            fake = block.fused(**{k: None if t is None else mode.from_tensor(t) for k, t in block.tensors.items()})
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        assert fake.stride() == real.stride()


def test_no_warning_from_autograd_registration() -> None:
    """Without a registered Autograd kernel PyTorch warns once that gradients would be wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in FORMS:
            Block(form, "gelu").run()
