# SPDX-License-Identifier: Apache-2.0
"""The layers as modules: stock's parameters and checkpoints, copies, training, DistributedDataParallel."""

from __future__ import annotations

import copy
import importlib
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from linear_reference import ACTIVATIONS, PARAMETERS
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.nn.utils import prune as pruning

from fused_ops import functional

layers = importlib.import_module("fused_ops.nn")


class StockMLP(nn.Module):
    def __init__(self, activation: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(7, 6, bias)
        self.act = activation
        self.fc2 = nn.Linear(6, 7, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class StockGated(nn.Module):
    def __init__(self, activation: nn.Module, bias: bool, down: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(7, 6, bias)
        self.up_proj = nn.Linear(7, 6, bias)
        if down:
            self.down_proj = nn.Linear(6, 7, bias)
        self.act = activation

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden) if hasattr(self, "down_proj") else hidden


class StockLinearAct(nn.Linear):
    def __init__(self, activation: nn.Module, bias: bool = True) -> None:
        super().__init__(7, 6, bias)
        self.act = activation

    def forward(self, input: Tensor) -> Tensor:
        return self.act(super().forward(input))


# Name to ours and its stock counterpart, each with 7 inputs and 6 hidden features.
PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "LinearAct": (lambda: layers.LinearAct(7, 6), lambda: StockLinearAct(nn.GELU())),
    "LinearAct relu no bias": (
        lambda: layers.LinearAct(7, 6, bias=False, activation="relu"),
        lambda: StockLinearAct(nn.ReLU(), False),
    ),
    "GatedLinear": (lambda: layers.GatedLinear(7, 6), lambda: StockGated(nn.SiLU(), True, False)),
    "GatedLinear gelu no bias": (
        lambda: layers.GatedLinear(7, 6, bias=False, activation="gelu"),
        lambda: StockGated(nn.GELU(), False, False),
    ),
    "MLP": (lambda: layers.MLP(7, 6), lambda: StockMLP(nn.GELU())),
    "MLP tanh no bias": (
        lambda: layers.MLP(7, 6, bias=False, activation="gelu_tanh"),
        lambda: StockMLP(nn.GELU("tanh"), False),
    ),
    "GatedMLP": (lambda: layers.GatedMLP(7, 6), lambda: StockGated(nn.SiLU(), False, True)),
    "GatedMLP relu bias": (
        lambda: layers.GatedMLP(7, 6, bias=True, activation="relu"),
        lambda: StockGated(nn.ReLU(), True, True),
    ),
}


def make(name: str, which: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return PAIRS[name][which]()


def sample(*batch: int, seed: int = 1) -> Tensor:
    return torch.randn(*batch, 7, generator=torch.Generator().manual_seed(seed))


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    output = module(x)
    loss = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
    return [output, *torch.autograd.grad(loss, [x, *module.parameters()])]


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [(5,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_as_stock_under_the_same_seed(name: str, batch: tuple[int, ...]) -> None:
    """Same initialisation, drawn in the same order, same forward, same gradients."""
    fused, stock = make(name, 0), make(name, 1)
    for (our_name, ours), (their_name, theirs) in zip(fused.named_parameters(), stock.named_parameters(), strict=True):
        assert our_name == their_name
        assert torch.equal(ours, theirs), our_name
    assert_close(results(fused, sample(*batch)), results(stock, sample(*batch)))


@pytest.mark.parametrize("name", PAIRS)
def test_state_dicts_interchange(name: str) -> None:  # case 12
    for ours, theirs in ((0, 1), (1, 0)):
        source, target = make(name, ours, seed=2), make(name, theirs, seed=3)
        assert list(source.state_dict()) == list(target.state_dict())
        target.load_state_dict(source.state_dict(), strict=True)
        assert_close(results(target, sample(5)), results(source, sample(5)))


def through_pickle(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def through_torch_save(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("name", PAIRS)
def test_copies_are_equal_and_independent(name: str, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    module = make(name, 0)
    expected = results(module, sample(5))
    twin = duplicate(module)
    assert type(twin) is type(module)
    assert all(torch.equal(a, b) for a, b in zip(results(twin, sample(5)), expected, strict=True))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert all(torch.equal(a, b) for a, b in zip(results(module, sample(5)), expected, strict=True))


def test_shallow_copy_shares_parameters() -> None:
    module = make("MLP", 0)
    twin = copy.copy(module)
    assert all(a is b for a, b in zip(module.parameters(), twin.parameters(), strict=True))


def test_types_and_repr() -> None:
    assert isinstance(layers.LinearAct(7, 6), nn.Linear)
    for name, submodules in (
        ("GatedLinear", ["gate_proj", "up_proj"]),
        ("MLP", ["fc1", "fc2"]),
        ("GatedMLP", ["gate_proj", "up_proj", "down_proj"]),
    ):
        children = dict(make(name, 0).named_children())
        assert list(children) == submodules
        assert {type(child) for child in children.values()} == {nn.Linear}
    assert "in_features=7, out_features=6" in repr(layers.LinearAct(7, 6))
    for name in ("relu", "gelu_tanh"):
        for cls in (layers.LinearAct, layers.GatedLinear, layers.MLP, layers.GatedMLP):
            assert name in repr(cls(7, 6, activation=name))


@pytest.mark.parametrize("cls", ["MLP", "GatedMLP"])
def test_out_features(cls: str) -> None:
    module = getattr(layers, cls)
    assert module(7, 6)(sample(5)).shape == (5, 7)
    assert module(7, 6, 3)(sample(5)).shape == (5, 3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_by_name(name: str) -> None:
    x = sample(5)
    layer = layers.LinearAct(7, 6, activation=name)
    assert layer.activation.name == name
    assert_close(layer(x), ACTIVATIONS[name](F.linear(x, layer.weight, layer.bias)))


# What is known by instance: the module, and whether it keeps the parameters that it was built with.
STOCK_MODULES = [
    nn.Identity(),
    nn.ReLU(),
    nn.ReLU6(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(),
    nn.Mish(),
    nn.Sigmoid(),
    nn.Tanh(),
    nn.LeakyReLU(),
    nn.LeakyReLU(0.3),
    nn.ELU(),
    nn.ELU(0.7),
    nn.SELU(),
    nn.CELU(1.6),
    nn.Softplus(),
    nn.Softplus(2.0, 1.5),
    nn.Hardtanh(),
    nn.Hardtanh(-0.4, 0.9),
    nn.Hardswish(),
    nn.Hardsigmoid(),
]


def label(activation: Any) -> str:
    """The same in every process, which an address is not."""
    return str(activation) if isinstance(activation, nn.Module) else getattr(activation, "__name__", repr(activation))


STOCK_FUNCTIONS: list[Callable[..., Tensor]] = [F.relu, torch.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.mish]


@pytest.mark.parametrize("activation", [*STOCK_MODULES, *STOCK_FUNCTIONS], ids=label)
def test_activation_of_modules_and_functions(activation: Callable[[Tensor], Tensor]) -> None:
    x = sample(50)
    layer = layers.LinearAct(7, 6, activation=activation)
    assert_close(layer(x), activation(F.linear(x, layer.weight, layer.bias)))
    assert list(layer.state_dict()) == ["weight", "bias"]


class OtherReLU(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class Stateful(nn.PReLU):
    pass


UNKNOWN = [OtherReLU(), nn.PReLU(), Stateful(), nn.Dropout(), nn.RReLU(), nn.Softmax(-1), nn.Threshold(0.1, 20.0)]


@pytest.mark.parametrize("activation", [*UNKNOWN, lambda x: x, torch.sin, "gleu", "", None, 3], ids=label)
def test_what_is_no_known_activation(activation: Any) -> None:
    """A subclass may do anything in its forward, and a function that is not one of PyTorch's as well."""
    assert importlib.import_module("fused_ops.nn.activation").Activation.of(activation) is None
    with pytest.raises((ValueError, TypeError), match="expected"):
        layers.LinearAct(7, 6, activation=activation)


def test_an_activation_is_read_once() -> None:
    """The instance that it was read from may be shared: it is neither kept nor changed."""  # case 14
    module = nn.LeakyReLU(0.3)
    layer = layers.LinearAct(7, 6, activation=module)
    module.negative_slope = 0.9
    assert layer.activation.parameters == (0.3,)


@pytest.mark.parametrize("name", PARAMETERS)
def test_activations_are_values(name: str) -> None:
    of = importlib.import_module("fused_ops.nn.activation").Activation.of
    classes = {"leaky_relu": nn.LeakyReLU, "elu": nn.ELU, "celu": nn.CELU, "softplus": nn.Softplus}
    module = classes.get(name, nn.Hardtanh)(*PARAMETERS[name].values())
    first, second = of(module), of(copy.deepcopy(module))
    assert first == second
    assert hash(first) == hash(second)
    assert first != of(name)
    assert of(name) == of(type(module)())
    with pytest.raises(AttributeError):
        first.name = "relu"


@pytest.mark.parametrize("name", PAIRS)
def test_training_follows_stock(name: str) -> None:
    """Twenty steps of AdamW with clipping and weight decay."""
    fused, stock = make(name, 0), make(name, 1)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (fused, stock)]
    losses: list[list[float]] = [[], []]
    for step in range(20):
        x = sample(16, seed=step)
        for index, (module, optimizer) in enumerate(zip((fused, stock), optimizers, strict=True)):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = (module(x) - x.mean(-1, keepdim=True).sin()).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            losses[index].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(list(fused.parameters()), list(stock.parameters()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_converted_to_another_dtype(name: str, dtype: torch.dtype) -> None:
    fused, stock = make(name, 0).to(dtype), make(name, 1).to(dtype)
    tolerance = 8 * torch.finfo(dtype).eps
    actual, expected = results(fused, sample(5).to(dtype)), results(stock, sample(5).to(dtype))
    assert {result.dtype for result in actual} == {dtype}
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_constructor_dtype_and_device() -> None:
    for cls in (layers.LinearAct, layers.GatedLinear, layers.MLP, layers.GatedMLP):
        module = cls(7, 6, dtype=torch.bfloat16, device="meta")
        assert {(p.dtype, p.device.type) for p in module.parameters()} == {(torch.bfloat16, "meta")}
        module = module.to_empty(device="cpu")
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.5)
        assert module(sample(5).bfloat16()).isfinite().all()


@pytest.mark.parametrize("name", PAIRS)
def test_frozen_parameters_get_no_gradient(name: str) -> None:  # case 7
    fused, stock = make(name, 0), make(name, 1)
    for module in (fused, stock):
        for index, parameter in enumerate(module.parameters()):
            parameter.requires_grad_(index % 2 == 1)
        if sum(p.requires_grad for p in module.parameters()):
            module(sample(5)).square().sum().backward()
    for ours, theirs in zip(fused.parameters(), stock.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None)
        if ours.grad is not None:
            assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("name", PAIRS)
def test_hooks_on_modules_and_parameters_fire(name: str) -> None:  # case 10
    events: dict[int, list[str]] = {0: [], 1: []}
    for which in (0, 1):
        module = make(name, which)
        log = events[which]
        module.register_forward_pre_hook(lambda *_, log=log: log.append("forward pre"))
        module.register_forward_hook(lambda *_, log=log: log.append("forward"))
        module.register_full_backward_hook(lambda *_, log=log: log.append("backward"))
        for key, parameter in module.named_parameters():
            parameter.register_hook(lambda g, log=log, key=key: log.append(key))
            parameter.register_post_accumulate_grad_hook(lambda p, log=log, key=key: log.append("after " + key))
        module(sample(5).requires_grad_()).sum().backward()
    assert sorted(events[0]) == sorted(events[1])
    assert events[0][:2] == ["forward pre", "forward"]


@pytest.mark.parametrize("name", ["GatedLinear", "MLP", "GatedMLP"])
def test_a_hook_on_a_submodule_is_not_passed_over(name: str) -> None:
    """The inner nn.Linear are real modules, and users hook them: to read activations, or to change them."""
    module = make(name, 0)
    stock = make(name, 1)
    for network in (module, stock):
        first = next(iter(network.children()))
        first.register_forward_hook(lambda module, args, output: 2 * output)  # pyright: ignore
    assert_close(results(module, sample(5)), results(stock, sample(5)))


def replaced_weight(module: nn.Module) -> None:
    for linear in (m for m in module.modules() if type(m) is nn.Linear):
        linear.weight = nn.Parameter(linear.weight.detach().cos())


def replaced_bias(module: nn.Module) -> None:
    for linear in (m for m in module.modules() if type(m) is nn.Linear):
        linear.bias = None  # pyright: ignore[reportAttributeAccessIssue]


def weight_norm(module: nn.Module) -> None:
    for linear in [m for m in module.modules() if type(m) is nn.Linear]:
        nn.utils.parametrizations.weight_norm(linear)


def pruned(module: nn.Module) -> None:
    from torch.nn.utils import prune

    for linear in [m for m in module.modules() if type(m) is nn.Linear]:
        prune.l1_unstructured(linear, "weight", amount=0.5)


def replaced_submodule(module: nn.Module) -> None:
    """As an adapter library does: the child is another module that does more than a linear layer."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.scale = nn.Parameter(torch.full((base.out_features,), 1.7))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) * self.scale

    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, Adapter(child))


def patched_forward(module: nn.Module) -> None:
    for linear in [m for m in module.modules() if type(m) is nn.Linear]:
        linear.forward = lambda input, base=linear: 3 * F.linear(input, base.weight, base.bias)


@pytest.mark.parametrize(
    "change", [replaced_weight, replaced_bias, weight_norm, pruned, replaced_submodule, patched_forward]
)
@pytest.mark.parametrize("name", ["GatedLinear", "MLP", "GatedMLP"])
def test_submodules_changed_after_construction(name: str, change: Callable[[nn.Module], None]) -> None:  # case 11
    """Never ignored: the result is that of calling the submodules."""
    fused, stock = make(name, 0), make(name, 1)
    change(fused)
    change(stock)
    assert_close(results(fused, sample(5)), results(stock, sample(5)))


def test_parametrized_linear_act() -> None:  # case 11
    fused, stock = make("LinearAct", 0), make("LinearAct", 1)
    for module in (fused, stock):
        torch.manual_seed(1)  # it draws a vector to start from
        nn.utils.parametrizations.spectral_norm(module.eval())
    assert_close(results(fused, sample(5)), results(stock, sample(5)))


@pytest.mark.parametrize("name", PAIRS)
def test_shared_layer_used_twice(name: str) -> None:
    fused, stock = (make(name, which) for which in (0, 1))
    gradients = []
    for module in (fused, stock):
        (module(sample(5)).square().sum() + module(sample(3, seed=2)).sum()).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert_close(*gradients)


def test_tied_weights() -> None:
    """One parameter in two layers, the second transposed: it gets the sum of both gradients."""
    torch.manual_seed(0)
    embedding = nn.Parameter(torch.randn(6, 7))
    from fused_ops.functional import linear_act

    x = sample(5)
    outputs = [
        linear_act(linear_act(x, embedding), embedding.t()),
        F.gelu(F.linear(F.gelu(F.linear(x, embedding)), embedding.t())),
    ]
    assert_close(*(torch.autograd.grad(output.square().sum(), embedding) for output in outputs))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_distributed_data_parallel(name: str, gradient_as_bucket_view: bool) -> None:
    module, expected = make(name, 0), make(name, 0)
    parallel = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=gradient_as_bucket_view)
    for step in range(3):
        for network in (parallel, expected):
            network(sample(5, seed=step)).square().sum().backward()
    for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)
    with parallel.no_sync():
        parallel(sample(5)).sum().backward()


# At the interpreter's exit torch 2.14 aborts in one of some 100 processes that have used DistributedDataParallel, stock
# layers or not.
TWO_PROCESSES = """
import os
import sys
import torch
import torch.distributed as dist
from test_linear_modules import PAIRS, make, sample

rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
for name in PAIRS:
    module, whole = make(name, 0), make(name, 0)
    parallel = torch.nn.parallel.DistributedDataParallel(module)
    shards = [sample(4, seed=10 + other) for other in range(2)]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    other = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(3):
        parallel(shards[rank]).square().mean().backward()
        whole(torch.cat(shards)).square().mean().backward()
        optimizer.step(), other.step()
        optimizer.zero_grad(), other.zero_grad()
    torch.testing.assert_close(list(module.parameters()), list(whole.parameters()), rtol=1e-5, atol=1e-6)
dist.destroy_process_group()
print("equal", flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_distributed_data_parallel_over_two_processes(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
            assert output.endswith("equal\n")
    finally:
        for process in processes:
            process.kill()
            process.wait()


FRESH = """
import torch
from fused_ops import nn
model = nn.MLP(4, 8)
torch.compile(model, fullgraph=True, backend="eager")(torch.randn(3, 4))
torch.export.export(model, (torch.randn(3, 4),))
"""


def test_compiles_in_a_fresh_interpreter() -> None:
    """Without any other module of the package imported, which could register what is missing."""
    subprocess.run([sys.executable, "-c", FRESH], check=True)


@pytest.mark.parametrize(
    ("make_layer", "message"),
    [
        (lambda: nn.LazyLinear(3), "got LazyLinear"),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), "got ParametrizedLinear"),
        (lambda: prune(nn.Linear(4, 3)), "without hooks, pruning or parametrizations"),
        (lambda: hooked(nn.Linear(4, 3)), "without hooks, pruning or parametrizations"),
    ],
)
def test_from_linear_takes_plain_layers_only(make_layer: Callable[[], nn.Linear], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        layers.LinearAct.from_linear(make_layer(), "relu")


def prune(linear: nn.Linear) -> nn.Linear:
    pruning.l1_unstructured(linear, "weight", 0.5)
    return linear


def hooked(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(lambda *_: None)
    return linear


def test_a_missing_weight_is_no_missing_layer() -> None:
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    for call in (
        lambda: functional.gated_linear(x, weight, None),  # type: ignore[arg-type]
        lambda: functional.mlp(x, weight, None, None),  # type: ignore[arg-type]
        lambda: functional.gated_mlp(x, weight, weight, None),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="to be a Tensor, got NoneType"):
            call()
    with pytest.raises(ValueError, match="expected min_val < max_val"):
        functional.linear_act(x, weight, None, "hardtanh", min_val=2.0, max_val=1.0)
    with pytest.raises(ValueError, match="to be numbers, got 'a'"):
        functional.linear_act(x, weight, None, "leaky_relu", negative_slope="a")  # type: ignore[arg-type]
