# SPDX-License-Identifier: Apache-2.0
"""fuse(): what it recognises, what it leaves alone, what may happen to a model later; and nothing is disturbed."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import fused_ops.functional
import fused_ops.nn
from fused_ops.fuse import FuseReport, fuse
from fused_ops.nn.activation import ACTIVATIONS, Activation

FEATURES = 6


class MLP(nn.Module):
    """The shape of most transformers' blocks; its parts are arguments."""

    def __init__(self, act: Any = None, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, 9, bias=bias)
        self.act = nn.GELU() if act is None else act
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(9, FEATURES, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(FEATURES, 9, bias=False), nn.Linear(FEATURES, 9, bias=False)
        self.down_proj, self.act_fn = nn.Linear(9, FEATURES, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class UpFirst(Gated):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        return self.down_proj(torch.mul(up, F.gelu(self.gate_proj(x), approximate="tanh")))


class Halves(nn.Module):
    def __init__(self, gate_last: bool) -> None:
        super().__init__()
        self.fc1, self.act, self.norm = nn.Linear(FEATURES, 18), nn.Sigmoid(), nn.LayerNorm(9)
        self.fc2, self.gate_last = nn.Linear(9, FEATURES), gate_last

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.fc1(x).chunk(2, dim=-1)
        x = first * self.act(second) if self.gate_last else self.act(first) * second
        return self.fc2(self.norm(x))


class Casting(MLP):
    """As T5 does for weights kept in another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.fc1(x)))
        if self.fc2.weight.dtype not in (x.dtype, torch.int8):
            x = x.to(self.fc2.weight.dtype)
        return self.fc2(x)


class Functions(MLP):
    """As in many a tutorial."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(FEATURES, 8), nn.Linear(8, 9), nn.Linear(9, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(F.leaky_relu(self.a(x), negative_slope=0.3))))


def sequential(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 9), *layers)


def encoder(activation: Any, kind: type[nn.Module] = nn.TransformerEncoderLayer) -> nn.Module:
    return kind(FEATURES, 2, 12, activation=activation, batch_first=True)  # type: ignore[call-arg]


class SequentialSubclass(nn.Sequential):
    pass


shared_act = nn.GELU()

# How to build the model, and the layers of each fused call.
FUSED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "pair": (lambda: sequential(nn.GELU()), ["0 1"]),
    "in-place activation": (lambda: sequential(nn.ReLU(inplace=True)), ["0 1"]),
    "pair, then more": (lambda: sequential(nn.ReLU(), nn.LayerNorm(9), nn.Linear(9, 3)), ["0 1"]),
    "three layers": (lambda: sequential(nn.SiLU(), nn.Linear(9, 5)), ["0 1 2"]),
    "dropout between": (lambda: sequential(nn.SiLU(), nn.Dropout(0.4), nn.Linear(9, 5), nn.Dropout(0.4)), ["0 1 2 3"]),
    "two activations": (lambda: sequential(nn.SiLU(), nn.Linear(9, 5), nn.Tanh()), ["0 1", "2 3"]),
    "deeper": (lambda: sequential(nn.ReLU(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 2)), ["0 1", "2 3 4"]),
    "no bias": (lambda: nn.Sequential(nn.Linear(FEATURES, 9, bias=False), nn.Mish()), ["0 1"]),
    "subclass of Sequential": (lambda: SequentialSubclass(nn.Linear(FEATURES, 9), nn.ELU()), ["0 1"]),
    "block": (MLP, ["fc1 act drop fc2"]),
    "block, dropout": (lambda: MLP(dropout=0.4), ["fc1 act drop fc2"]),
    "block, shared activation": (lambda: nn.Sequential(MLP(shared_act), MLP(shared_act)), ["fc1 act drop fc2"] * 2),
    "block, function as attribute": (lambda: MLP(F.silu), ["fc1 drop fc2"]),
    "gated": (Gated, ["gate_proj up_proj act_fn down_proj"]),
    "gated, up first": (UpFirst, ["gate_proj up_proj down_proj"]),
    "halves": (lambda: Halves(gate_last=False), ["fc1 act"]),
    "halves, gate last": (lambda: Halves(gate_last=True), ["fc1 act"]),
    "casting": (Casting, ["fc1 act drop fc2"]),
    "functions": (Functions, ["fc1 fc2"]),
    "chain": (Chain, ["a b c"]),
    "encoder, relu": (lambda: encoder("relu"), ["linear1 dropout linear2"]),
    "encoder, module": (lambda: encoder(nn.GELU("tanh")), ["linear1 activation dropout linear2"]),
}


def data(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape or (5, FEATURES), generator=torch.Generator().manual_seed(seed), dtype=dtype)


def build(make: Callable[[], nn.Module], training: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return make().double().train(training)


def outcome(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Output, gradient of the input and of all parameters."""
    torch.manual_seed(3)  # for dropout
    x = x.clone().requires_grad_()
    output = model(x, x) if isinstance(model, nn.TransformerDecoderLayer) else model(x)
    grads = torch.autograd.grad(output.square().sum(), [x, *model.parameters()], allow_unused=True)
    return [output.detach(), *grads]


def assert_same(model: nn.Module, reference: nn.Module, x: Tensor | None = None, rtol: float = 1e-9) -> None:
    x = data() if x is None else x
    torch.testing.assert_close(outcome(model, x), outcome(reference, x), rtol=rtol, atol=rtol / 100)


def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Grows with each fused call."""
    made, real = [], fused_ops.functional.feed_forward
    monkeypatch.setattr(fused_ops.functional, "feed_forward", lambda *args: made.append(args) or real(*args))
    return made


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", FUSED)
def test_recognised(name: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make, layers = FUSED[name]
    model = build(make, training)
    reference = copy.deepcopy(model)
    report = fuse(model)
    assert [" ".join(one.layers) for one in report.replaced] == layers, report
    made = calls(monkeypatch)
    x = data(3, 4, FEATURES) if name.startswith("encoder") else data()
    assert_same(model, reference, x)
    assert len(made) == sum("b c" in one for one in layers) + len(layers)
    assert_same(pickle.loads(pickle.dumps(model)), reference, x) if name != "encoder, module" else None


def test_decoder_layer() -> None:
    model = build(lambda: encoder("gelu", nn.TransformerDecoderLayer))
    reference = copy.deepcopy(model)
    assert [one.layers for one in fuse(model).replaced] == [("linear1", "dropout", "linear2")]
    assert_same(model, reference, data(3, 4, FEATURES))


MODULES = {
    "identity": nn.Identity(),
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "mish": nn.Mish(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "leaky_relu": nn.LeakyReLU(0.3),
    "elu": nn.ELU(0.7),
    "selu": nn.SELU(),
    "celu": nn.CELU(1.7),
    "softplus": nn.Softplus(0.5, 3.0),
    "hardtanh": nn.Hardtanh(-0.3, 0.8),
    "relu6": nn.ReLU6(),
    "hardswish": nn.Hardswish(),
    "hardsigmoid": nn.Hardsigmoid(),
}


@pytest.mark.parametrize("name", MODULES)
def test_activation_of_module(name: str) -> None:
    activation, z = Activation.of(MODULES[name]), 4 * data(50)
    assert activation is not None
    assert activation.name == name
    assert torch.equal(activation.reference(z), MODULES[name](z))
    if name != "identity":
        model = build(lambda: nn.Sequential(nn.Linear(FEATURES, 9), copy.deepcopy(MODULES[name])))
        reference = copy.deepcopy(model)
        assert len(fuse(model).replaced) == 1
        # torch has constants of these two in float32.
        assert_same(model, reference, 4 * data(), rtol=1e-6 if name in ("celu", "hardsigmoid") else 1e-9)


OF: list[tuple[Any, dict[str, float], Activation | None]] = [
    ("leaky_relu", {}, Activation("leaky_relu", (0.01,))),
    ("leaky_relu", {"negative_slope": 0.2}, Activation("leaky_relu", (0.2,))),
    ("softplus", {"threshold": 5}, Activation("softplus", (1.0, 5.0))),
    ("gelu_new", {}, Activation("gelu_tanh")),
    ("swish", {}, Activation("silu")),
    (Activation("elu", (2.0,)), {}, Activation("elu", (2.0,))),
    (Activation("elu", (2.0,)), {"alpha": 3.0}, Activation("elu", (3.0,))),
    (F.gelu, {}, Activation("gelu")),
    (functools.partial(F.gelu, approximate="tanh"), {}, Activation("gelu_tanh")),
    (functools.partial(F.leaky_relu, negative_slope=0.4), {}, Activation("leaky_relu", (0.4,))),
    (functools.partial(F.relu, inplace=True), {}, None),
    (functools.partial(F.gelu, approximate="exact"), {}, None),
    (nn.GELU(approximate="exact"), {}, None),
    (F.relu_, {}, None),
    (torch.exp, {}, None),
    (nn.Softmax(-1), {}, None),
    (nn.PReLU(), {}, None),
    (nn.GELU, {}, None),
    ("prelu", {}, None),
    (None, {}, None),
    ([], {}, None),
]


@pytest.mark.parametrize(("what", "parameters", "expected"), OF)
def test_activation_of(what: Any, parameters: dict[str, float], expected: Activation | None) -> None:
    assert Activation.of(what, **parameters) == expected


def test_activation_rejects() -> None:
    with pytest.raises(ValueError, match="expected name in"):
        Activation("prelu")
    with pytest.raises(ValueError, match=r"len\(parameters\) == 1 for elu, got 2"):
        Activation("elu", (1.0, 2.0))
    with pytest.raises(TypeError, match=r"parameters of leaky_relu in .negative_slope., got alpha"):
        Activation.of("leaky_relu", alpha=1.0)
    assert all(len(Activation(name).parameters) == len(defaults) for name, defaults in ACTIVATIONS.items())


class SubclassOfLinear(nn.Linear):
    pass


class SubclassOfGELU(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Residual(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.act(self.fc1(x)))


class LooksAtShape(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x))) if x.shape[0] > 3 else x


class Remembers(MLP):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.act(self.fc1(x))
        return self.fc2(self.hidden)


class OtherInTraining(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x))) if self.training else self.fc2(self.fc1(x))


class UnusedHead(MLP):
    def forward(self, x: Tensor) -> Tensor:
        self.fc2(x[..., :1]) if x is None else self.fc1(x)
        return self.fc2(self.act(self.fc1(x)))


class Swallows(MLP):
    def forward(self, x: Tensor) -> Tensor:
        try:
            x = x.sin()
        except Exception:
            return self.fc2(self.act(self.fc1(x)))
        return self.fc2(self.act(self.fc1(x)))


class TwoArguments(MLP):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return self.fc2(self.act(self.fc1(x)))


class NotAGate(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(2 * x))


class SelfGate(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate) * gate)


class InputDtype(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x.to(self.fc1.weight.dtype) if x.dtype == torch.float16 else x)))


class OtherDtype(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.act(self.fc1(x)))
        return self.fc2(self.act(x) if x.dtype == torch.float16 else x)


class ReadsWeight(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x))) if self.fc1.weight.sum() < 1e9 else x


class AsksChild(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x))) if self.fc1.extra_repr() else x


class Draws(MLP):
    """Skips its layers at random, seldom."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x if self.draw() < 1e-9 else self.fc2(self.act(self.fc1(x)))


def numpy_random() -> float:
    return pytest.importorskip("numpy").random.random()


class InMode(MLP):
    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        with self.mode():
            return self.fc2(self.act(hidden))


class NoGrad(MLP):
    forward = torch.no_grad()(MLP.forward)


def in_mode(mode: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: InMode(lambda: mode(*args, **kwargs))


class Counts(MLP):
    def __init__(self, state: Any, count: Callable[[Any], Any]) -> None:
        super().__init__()
        self.state, self.count = state, count
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count(self)
        return self.fc2(self.act(self.fc1(x)))


class Stats:
    def __init__(self) -> None:
        self.calls, self.history = 0, []

    def increase(self) -> None:
        self.calls += 1
        self.history.append(self.calls)


class OwnPickling(MLP):
    def __reduce__(self) -> Any:
        return OwnPickling, ()


class OwnLayout(MLP):
    """Keeps its class."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise TypeError("no other class")
        super().__setattr__(name, value)


def with_(change: Callable[[Any], Any], make: Callable[[], nn.Module] = lambda: sequential(nn.GELU())) -> Any:
    """A model to which something has been done."""

    def build_and_change() -> nn.Module:
        model = make()
        change(model)
        return model

    return build_and_change


def ignore(*_: Any) -> None:
    pass


class Wrapper(nn.Module):
    """An adapter in place of a linear layer: its base layer, and an addend of low rank."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class TensorSubclass(Tensor):
    pass


def quantize(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.data.as_subclass(TensorSubclass))


def wrap(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        setattr(model, name, Wrapper(getattr(model, name)).to(model.fc2.weight))

    return change


def own_forward(of: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        module = model.get_submodule(of)
        module.forward = functools.partial(type(module).forward, module)

    return change


# How to build the model, and the name and the reason that the report must have.
LEFT: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "forward hook on the linear": (with_(lambda m: m[0].register_forward_hook(ignore)), "0", "a forward hook (ignore)"),
    "pre-hook on the linear": (with_(lambda m: m[0].register_forward_pre_hook(ignore)), "0", "a forward pre-hook"),
    "backward hook on the linear": (
        with_(lambda m: m[0].register_full_backward_hook(ignore)),
        "0",
        "has a backward hook (ignore)",
    ),
    "backward pre-hook": (with_(lambda m: m[0].register_full_backward_pre_hook(ignore)), "0", "a backward pre-hook"),
    "hook on the activation": (with_(lambda m: m[1].register_forward_hook(ignore)), "0", "activation 1 has a forward"),
    "old backward hook on the block": (
        with_(lambda m: m.register_backward_hook(ignore)),
        "0",
        "a backward hook that sees its last operation",
    ),
    "pruned": (with_(lambda m: prune.l1_unstructured(m[0], "weight", 0.5)), "0", "is pruned"),
    "weight_norm of old": (with_(lambda m: nn.utils.weight_norm(m[0])), "0", "(weight_norm)"),
    "spectral_norm of old": (with_(lambda m: nn.utils.spectral_norm(m[0])), "0", "(spectral_norm)"),
    "weight_norm": (with_(lambda m: parametrizations.weight_norm(m[0])), "0", "is parametrized"),
    "parametrized": (with_(lambda m: parametrize.register_parametrization(m[0], "weight", nn.ReLU())), "0", "is param"),
    "subclass": (lambda: nn.Sequential(SubclassOfLinear(FEATURES, 9), nn.GELU()), "0", "a subclass of Linear"),
    "subclass of the activation": (lambda: sequential(SubclassOfGELU()), "0", "no activation behind it"),
    "tensor subclass": (with_(quantize), "0", "is a TensorSubclass"),
    "forward of its own": (with_(own_forward("0")), "0", "has a forward of its own"),
    "block with a forward of its own": (with_(own_forward(""), MLP), "fc1", "block whose forward is set"),
    "dtype of its input": (InputDtype, "fc1", "looks at the dtype of its input"),
    "dtype of a layer that is not fused": (OtherDtype, "fc1", "looks at the dtype of what norm returns"),
    "values of a weight": (ReadsWeight, "fc1", "its forward uses sum of a tensor that is not its input"),
    "a child's method": (AsksChild, "fc1", "its forward looks at fc1.extra_repr"),
    "mixed dtypes": (with_(lambda m: m.fc1.double(), MLP), "fc1", "its own forward does not run"),
    "no activation": (lambda: nn.Sequential(nn.Linear(FEATURES, 9)), "0", "no activation behind it"),
    "softmax": (lambda: sequential(nn.Softmax(-1)), "0", "no activation behind it"),
    "residual": (Residual, "fc1", "its forward uses add"),
    "shape": (LooksAtShape, "fc1", "its forward uses shape"),
    "remembers": (Remembers, "fc2", "its forward stores values"),
    "other in training": (OtherInTraining, "fc1", "differs between training and evaluation"),
    "unused call": (UnusedHead, "fc1", "computes what it does not return"),
    "swallows exceptions": (Swallows, "fc1", "its forward uses sin"),
    "two arguments": (TwoArguments, "fc1", "takes more than one argument"),
    "no gate": (NotAGate, "gate_proj", "its forward uses"),
    "gate of itself": (SelfGate, "gate_proj", "is not a chain"),
    "adapter in the block": (with_(wrap("fc1"), MLP), "fc2", "no activation behind it"),
    "its own way of pickling": (OwnPickling, "fc1", "is pickled in its own way"),
    "its class cannot be exchanged": (OwnLayout, "fc1", "whose class cannot be exchanged: no other class"),
    "draws from torch": (lambda: Draws(lambda: torch.rand(()).item()), "fc1", "draws random numbers"),
    "draws from Python": (lambda: Draws(random.random), "fc1", "draws random numbers"),
    "draws from NumPy": (lambda: Draws(numpy_random), "fc1", "draws random numbers"),
    "without autocast": (in_mode(torch.autocast, "cpu", enabled=False), "fc1", "changes autocast"),
    "with autocast": (in_mode(torch.autocast, "cpu", torch.bfloat16), "fc1", "changes autocast"),
    "another autocast dtype": (in_mode(torch.autocast, "cpu", torch.float16), "fc1", "changes autocast"),
    "autocast of CUDA": (in_mode(torch.autocast, "cuda", enabled=False), "fc1", "changes autocast"),
    "without gradients": (in_mode(torch.no_grad), "fc1", "changes autocast, gradients"),
    "forward without gradients": (NoGrad, "fc1", "changes autocast, gradients"),
    "inference mode": (in_mode(torch.inference_mode), "fc1", "changes autocast, gradients or inference mode"),
    "attention's projection": (lambda: nn.MultiheadAttention(4, 2), "out_proj", "a subclass of Linear"),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_left_alone(name: str) -> None:
    make, layer, reason = LEFT[name]
    torch.manual_seed(0)
    model = make()
    kinds, states = [type(module) for module in model.modules()], (random.getstate(), torch.get_rng_state().tolist())
    with pytest.warns(UserWarning, match="fuse: expected at least one"):
        report = fuse(model)
    assert not report.replaced
    assert (random.getstate(), torch.get_rng_state().tolist()) == states
    assert reason in {one.name: one.reason for one in report.left}[layer], report
    assert [type(module) for module in model.modules()] == kinds


class NeedsKey(MLP):
    def __init_subclass__(cls, *, key: str) -> None:
        super().__init_subclass__()


class HidesItsLayers(MLP):
    def get_submodule(self, target: str) -> nn.Module:
        raise LookupError(target)


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return MLP()


# What goes wrong in one block, by the block, and the reason that the report must have.
BROKEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "class that has no subclasses": (NeedsKey, "cannot be fused: TypeError: NeedsKey.__init_subclass__() missing"),
    "own get_submodule": (HidesItsLayers, "cannot be looked at: LookupError: fc1"),
    "made in inference mode": (in_inference_mode, "cannot be fused: RuntimeError: Setting requires_grad=True on"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_block_leaves_the_others(name: str) -> None:
    make, reason = BROKEN[name]
    model = nn.Sequential(MLP(), make(), MLP())
    kinds = [type(module) for module in model.modules()]
    report = fuse(model)
    assert [one.name for one in report.replaced] == ["0", "2"]
    assert reason in {one.name: one.reason for one in report.left}["1.fc1"], report
    report.undo()
    assert [type(module) for module in model.modules()] == kinds


def test_called_in_inference_mode() -> None:
    model = build(MLP)
    reference = copy.deepcopy(model)
    with torch.inference_mode():
        assert fuse(model).replaced
        assert torch.is_inference_mode_enabled()
    assert_same(model, reference)


class Interrupts(MLP):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_interrupted() -> None:
    model = nn.Sequential(MLP(), Interrupts(), MLP())
    with pytest.raises(KeyboardInterrupt):
        fuse(model)
    assert [type(module) for module in model] == [MLP, Interrupts, MLP]


# A state of the block, how its forward changes it, how it is read, and the reason that the report must have.
OWN_STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "dict": (lambda: {"calls": 5}, lambda m: m.state.update(calls=m.state["calls"] + 1), lambda m: dict(m.state), ""),
    "list": (lambda: [5], lambda m: m.state.append(6), lambda m: list(m.state), ""),
    "full queue": (lambda: deque([5], 1), lambda m: m.state.append(6), lambda m: list(m.state), ""),
    "set": (lambda: {5}, lambda m: m.state.add(6), lambda m: set(m.state), ""),
    "nested": (lambda: {"a": [{"b": [5]}]}, lambda m: m.state["a"][0]["b"].pop(), lambda m: repr(m.state), ""),
    "object": (Stats, lambda m: m.state.increase(), lambda m: (m.state.calls, [*m.state.history]), ""),
    "buffer": (lambda: None, lambda m: m.steps.add_(1), lambda m: m.steps.item(), "its forward uses add_"),
    "weight": (
        lambda: None,
        lambda m: m.fc1.weight.data.clamp_(-0.01, 0.01),
        lambda m: m.fc1.weight.tolist(),
        "its forward uses data",
    ),
    "item of a buffer": (
        lambda: None,
        lambda m: m.steps.__setitem__((), 7),
        lambda m: m.steps.item(),
        "its forward uses __setitem__",
    ),
}


@pytest.mark.parametrize("name", OWN_STATE)
@pytest.mark.filterwarnings("ignore:fuse")
def test_a_forward_that_changes_its_own_state(name: str) -> None:
    state, count, look, reason = OWN_STATE[name]
    model: Any = build(lambda: Counts(state(), count))
    before, kept = look(model), model.state
    report = fuse(model)
    assert not report.replaced
    assert (reason or "its forward changes its own state") in report.left[0].reason
    assert look(model) == before
    assert model.state is kept
    model(data())
    assert look(model) != before


def test_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(9), nn.ReLU(), nn.Linear(9, 4), nn.ReLU())
    report = fuse(model)
    assert [one.layers for one in report.replaced] == [("2", "3")]
    assert "not initialized yet" in report.left[0].reason
    model(data(dtype=torch.float32))
    report.undo()
    assert [one.layers for one in fuse(model).replaced] == [("0", "1"), ("2", "3")]


def test_one_obstacle_leaves_the_others() -> None:
    model = build(lambda: sequential(nn.ReLU(), nn.Linear(9, 9), nn.GELU(), nn.Linear(9, 9), nn.GELU()))
    model.get_submodule("2").register_forward_hook(ignore)
    reference = copy.deepcopy(model)
    report = fuse(model)
    assert [one.layers for one in report.replaced] == [("0", "1"), ("4", "5")]
    assert [(one.name, one.reason) for one in report.left] == [("2", "has a forward hook (ignore)")]
    assert_same(model, reference)


# What may happen to a block after it was fused; it must do as the block that was not.
seen: list[str] = []


def set_(name: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value())


def hook(name: str, register: str) -> Callable[[Any], None]:
    return lambda model: getattr(model.get_submodule(name), register)(lambda *_: seen.append(name))


def scale_output(model: Any) -> None:
    model.fc1.register_forward_hook(lambda module, args, output: 2 * output)


def scale_gradient(model: Any) -> None:
    model.act.register_full_backward_hook(lambda module, grad_input, grad_output: (3 * grad_input[0],))


LATER: dict[str, Callable[[Any], Any]] = {
    "hook that changes the output": scale_output,
    "backward hook that changes the gradient": scale_gradient,
    "pruned": lambda model: prune.random_unstructured(model.fc1, "weight", 0.5),
    "parametrized": lambda model: parametrizations.weight_norm(model.fc2),
    "adapter": wrap("fc1"),
    "another activation": set_("act", nn.Tanh),
    "another form of the activation": lambda model: setattr(model.act, "approximate", "tanh"),
    "an activation with hooks": lambda model: model.act.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "another linear layer": set_("fc2", lambda: nn.Linear(9, 4).double()),
    "dropout": lambda model: setattr(model.drop, "p", 0.5),
    "no bias": lambda model: setattr(model.fc1, "bias", None),
    "frozen": lambda model: model.fc1.requires_grad_(False),
    "another dtype": lambda model: model.float().double(),
    "a tensor subclass": lambda model: setattr(
        model.fc1, "weight", nn.Parameter(model.fc1.weight.data.as_subclass(TensorSubclass))
    ),
    "forward of its own": lambda model: setattr(model.fc1, "forward", lambda x: F.linear(x, 2 * model.fc1.weight)),
}


@pytest.mark.parametrize("name", LATER)
def test_changed_later(name: str) -> None:
    model = build(MLP)
    reference = copy.deepcopy(model)
    assert fuse(model).replaced
    for one in (model, reference):
        torch.manual_seed(5)
        LATER[name](one)
    x = data().requires_grad_()
    outputs = []
    for one in (model, reference):
        torch.manual_seed(3)
        output = one(x)
        used = [p for p in one.parameters() if p.requires_grad]
        outputs.append([output, *torch.autograd.grad(output.square().sum(), [x, *used], allow_unused=True)])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-9, atol=1e-11)


class Handles(MLP):
    """What its own layers do with anything that is no tensor of their width, it does not leave to them."""

    def forward(self, x: Any) -> Any:
        try:
            return self.fc2(self.act(self.fc1(x)))
        except (TypeError, RuntimeError, AttributeError) as error:
            return type(error)


class Unwraps(nn.Linear):
    def forward(self, input: Any) -> Tensor:
        return super().forward(torch.cat(input) if isinstance(input, list) else input)


class Prepares(MLP):
    """Its first child takes what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Unwraps(FEATURES, FEATURES)

    def forward(self, x: Any) -> Tensor:
        return self.fc2(self.act(self.fc1(self.first(x))))


INPUTS: dict[str, Any] = {
    "tuple": (data(),),
    "list": [data()],
    "dict": {"x": data()},
    "none": None,
    "number": 3.5,
    "wrong width": data(5, FEATURES + 1),
    "no dimension": data()[0, 0],
    "wrong dtype, wrong width": data(5, 2, dtype=torch.float32),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_its_own_forward_handles(name: str) -> None:
    model = build(Handles)
    reference = copy.deepcopy(model)
    assert fuse(model).replaced
    expected = reference(INPUTS[name])
    assert issubclass(expected, Exception)
    assert model(INPUTS[name]) is expected
    assert_same(model, reference)


def test_input_that_its_first_child_handles() -> None:
    model = build(Prepares)
    reference = copy.deepcopy(model)
    assert fuse(model).replaced
    assert torch.equal(model([data(), data()]), reference([data(), data()]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_input() -> None:
    model = build(lambda: sequential(nn.GELU()))
    x = torch.nested.nested_tensor([data(2, FEATURES), data(3, FEATURES)])
    expected = model(x).unbind()
    assert fuse(model).replaced
    assert all(map(torch.equal, model(x).unbind(), expected))


@pytest.mark.parametrize(
    "act", [nn.LeakyReLU(0.3), nn.Hardtanh(-0.3, 0.8), nn.ReLU6()], ids=["leaky_relu", "hardtanh", "relu6"]
)
def test_output_changed_in_place(act: nn.Module) -> None:
    model = build(lambda: sequential(act))
    reference = copy.deepcopy(model)
    assert fuse(model).replaced
    outputs = []
    for one in (model, reference):
        x = 4 * data()
        output = one(x.requires_grad_())
        output += data(5, 9, seed=1)
        outputs.append([output, *torch.autograd.grad(output.square().sum(), [x, *one.parameters()])])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-9, atol=1e-11)


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]


@pytest.mark.parametrize("name", ["fc1", "act", "drop", "fc2", ""])
@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_hooks_fire(name: str, register: str) -> None:
    model = build(MLP)
    fuse(model)
    seen.clear()
    hook(name, register)(model)
    model(data().requires_grad_()).sum().backward()
    assert seen == [name]


def test_global_hooks_fire() -> None:
    model = build(MLP)
    fuse(model)
    seen.clear()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        model(data())
    finally:
        handle.remove()
    assert seen == ["Linear", "GELU", "Dropout", "Linear", "FusedMLP"]


class Branches(MLP):
    """Its forward runs its activation twice if `asks`, a condition, says so."""

    use = False

    def __init__(self, asks: Callable[[Any], Any]) -> None:
        super().__init__()
        self.asks, self.flag, self.config, self.extra = asks, False, {"on": False}, None
        self._flag, self.n = False, 1
        self.inner = nn.Identity()
        self.register_parameter("gamma", None)
        self.register_buffer("mask", None)
        self.register_module("late", None)
        self.register_buffer("on", torch.zeros(()))

    def condition(self) -> bool:
        return bool(self.asks(self))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.fc1(x))
        return self.fc2(self.act(x) if self.condition() else x)


class OwnMethod(MLP):
    def middle(self, x: Tensor) -> Tensor:
        return self.act(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.middle(self.fc1(x)))


def middle_of(model: Any) -> None:
    model.middle = lambda x: 2 * model.act(x)


def keep_forward(model: Any) -> None:
    forward = model.forward
    model.flag = True
    vars(model)["forward"] = forward


def parametrize_own(model: Any) -> None:
    model.gain = nn.Parameter(torch.ones(()))
    parametrize.register_parametrization(model, "gain", nn.Identity())


def subclassed(model: Any) -> None:
    model.__class__ = type("Sharded", (type(model),), {})
    model.flag = True


def branches(asks: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    return lambda: Branches(asks)


def some_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones((), dtype=torch.float64))


def children_names(model: Any) -> list[str]:
    return [name for name, _ in model.named_children()]


# What the block's forward looks at, and what changes it later.
STATE_LATER: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "attribute": (branches(lambda m: m.flag), set_("flag", lambda: True)),
    "attribute with an underscore": (branches(lambda m: m._flag), set_("_flag", lambda: True)),
    "attribute of the class": (branches(lambda m: m.use), set_("use", lambda: True)),
    "new attribute": (branches(lambda m: hasattr(m, "news")), set_("news", lambda: 1)),
    "deleted attribute": (branches(lambda m: not hasattr(m, "n")), lambda m: delattr(m, "n")),
    "None, then a module": (branches(lambda m: m.extra is not None), set_("extra", nn.Identity)),
    "None, then a child": (branches(lambda m: m.late is not None), set_("late", nn.Identity)),
    "None, then a parameter": (branches(lambda m: m.gamma is not None), set_("gamma", some_parameter)),
    "None, then a buffer": (branches(lambda m: m.mask is not None), set_("mask", some_parameter().detach)),
    "new buffer": (
        branches(lambda m: hasattr(m, "news")),
        lambda m: m.register_buffer("news", torch.ones(1, dtype=torch.float64)),
    ),
    "new buffer, iterated": (
        branches(lambda m: len(m._buffers) > 2),
        lambda m: m.register_buffer(name="news", tensor=torch.ones(1), persistent=False),
    ),
    "new parameter": (
        branches(lambda m: hasattr(m, "news")),
        lambda m: m.register_parameter("news", some_parameter()),
    ),
    "buffer, then None": (branches(lambda m: m.on is None), set_("on", lambda: None)),
    "deleted buffer": (branches(lambda m: not hasattr(m, "on")), lambda m: delattr(m, "on")),
    "new child, by children()": (branches(lambda m: len(list(m.children())) > 5), set_("news", nn.Identity)),
    "new child, by name": (
        branches(lambda m: "news" in children_names(m)),
        lambda m: m.register_module("news", nn.Identity()),
    ),
    "new child, behind its back": (
        branches(lambda m: "news" in children_names(m)),
        lambda m: m._modules.update(news=nn.Identity()),
    ),
    "child, then None": (branches(lambda m: m.inner is None), set_("inner", lambda: None)),
    "child of another class": (branches(lambda m: isinstance(m.inner, nn.Tanh)), set_("inner", nn.Tanh)),
    "value of a buffer": (branches(lambda m: m.on == 1), lambda m: m.on.fill_(1)),
    "item of a buffer": (branches(lambda m: m.on.item() == 1), lambda m: m.on.fill_(1)),
    "value of a tensor in a dict": (
        with_(lambda m: m.config.update(on=torch.zeros(())), branches(lambda m: m.config["on"])),
        lambda m: m.config["on"].fill_(1),
    ),
    "frozen weight": (branches(lambda m: not m.fc1.weight.requires_grad), lambda m: m.fc1.requires_grad_(False)),
    "shape of a weight": (
        branches(lambda m: m.fc1.weight.shape[0] != 9),
        lambda m: (setattr(m, "fc1", nn.Linear(FEATURES, 7)), setattr(m, "fc2", nn.Linear(7, 4)), m.double()),
    ),
    "dtype of a weight": (branches(lambda m: m.fc1.weight.dtype == torch.float32), lambda m: m.float()),
    "dtype of a buffer": (branches(lambda m: m.on.dtype == torch.float32), lambda m: setattr(m, "on", m.on.float())),
    "bias, then None": (branches(lambda m: m.fc1.bias is None), lambda m: setattr(m.fc1, "bias", None)),
    "None, then a bias": (
        with_(lambda m: setattr(m.fc1, "bias", None), branches(lambda m: m.fc1.bias is not None)),
        lambda m: setattr(m.fc1, "bias", nn.Parameter(data(9))),
    ),
    "a child's attribute": (branches(lambda m: m.drop.inplace), lambda m: setattr(m.drop, "inplace", True)),
    "a child's new attribute": (branches(lambda m: hasattr(m.fc1, "news")), lambda m: setattr(m.fc1, "news", 1)),
    "a child's p": (lambda: Skips(0.0), lambda m: setattr(m.drop, "p", 0.5)),
    "a child's buffer": (
        with_(lambda m: m.fc1.register_buffer("news", torch.zeros(())), branches(lambda m: m.fc1.news == 1)),
        lambda m: m.fc1.news.fill_(1),
    ),
    "method": (OwnMethod, middle_of),
    "attribute, its forward kept": (branches(lambda m: m.flag), keep_forward),
    "attribute of another tool's subclass": (branches(lambda m: m.flag), subclassed),
    "parametrized itself": (branches(lambda m: hasattr(m, "parametrizations")), parametrize_own),
}


class Skips(MLP):
    def __init__(self, dropout: float) -> None:
        super().__init__(dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.fc1(x))
        return self.fc2(self.drop(x) if self.drop.p > 0 else x)


@pytest.mark.parametrize("name", STATE_LATER)
@pytest.mark.filterwarnings("ignore:fuse")
def test_own_state_changed_later(name: str) -> None:
    """Fused or left alone, it does as the block that was not."""
    make, change = STATE_LATER[name]
    model = build(make)
    reference = copy.deepcopy(model)
    fuse(model)
    for training in (True, False):
        assert_same(model.train(training), reference.train(training))
    for one in (model.train(), reference.train()):
        torch.manual_seed(5)
        change(one)
    x = data(dtype=next(reference.parameters()).dtype).requires_grad_()
    outputs = []
    for one in (model, reference):
        torch.manual_seed(3)
        output = one(x)
        outputs.append([output, *torch.autograd.grad(output.square().sum(), [x, one.get_parameter("fc2.weight")])])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5 if x.dtype == torch.float32 else 1e-9, atol=1e-11)


def test_branches_are_fused() -> None:
    """So that the rows above that are not about tensors' values say something."""
    looked_at = {name: build(make) for name, (make, _) in STATE_LATER.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        left = {name for name, model in looked_at.items() if not fuse(model).replaced}
    assert left == {
        "value of a buffer",
        "item of a buffer",
        "value of a tensor in a dict",
        "frozen weight",
        "shape of a weight",
        "dtype of a weight",
        "dtype of a buffer",
        "a child's buffer",
    }


# What a tool may do to a block that its forward does not look at: it stays fused.
HARMLESS: dict[str, Callable[[Any], Any]] = {
    "training": lambda model: model.eval(),
    "the same value": lambda model: setattr(model, "flag", model.flag),
    "another tensor in a buffer": lambda model: setattr(model, "on", torch.ones(())),
    "another child of the class": lambda model: setattr(model, "fc1", nn.Linear(FEATURES, 9).double()),
    "hook on the block": lambda model: model.register_full_backward_hook(ignore),
    "compile()": lambda model: model.compile(backend="eager"),
    "another dtype": lambda model: model.float().double(),
    "functional_call": lambda model: torch.func.functional_call(
        model, {name: 2 * one.detach() for name, one in model.named_parameters()}, (data(),)
    ),
    "assigned state": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "an adapter come and gone": lambda model: (
        wrap("fc1")(model),
        model(data()),
        setattr(model, "fc1", model.fc1.base_layer),
    ),
    "a hook come and gone": lambda model: model.fc1.register_forward_hook(ignore).remove(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_stays_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(branches(lambda m: m.flag))
    fuse(model)
    HARMLESS[name](model)
    made = calls(monkeypatch)
    model.forward(data())
    assert len(made) == 1


def test_own_class_again() -> None:
    model: Any = build(lambda: Halves(gate_last=False))
    report = fuse(model)
    model.gate_last = True
    assert type(model) is Halves
    report.undo()
    assert type(model) is Halves


EDITS: dict[str, Callable[[Any], Any]] = {
    "append": lambda model: model.append(nn.Tanh()),
    "insert": lambda model: model.insert(1, nn.LayerNorm(9).double()),
    "delete": lambda model: model.__delitem__(1),
    "replace": lambda model: model.__setitem__(1, nn.Tanh()),
}


@pytest.mark.parametrize("name", EDITS)
def test_sequential_edited_later(name: str) -> None:
    model = build(lambda: sequential(nn.GELU(), nn.Linear(9, 4)))
    reference = copy.deepcopy(model)
    fuse(model)
    for one in (model, reference):
        torch.manual_seed(0)
        EDITS[name](one)
    assert_same(model, reference)


def test_parts_of_a_sequential() -> None:
    model: Any = build(lambda: sequential(nn.GELU(), nn.Linear(9, 4)))
    reference: Any = copy.deepcopy(model)
    fuse(model)
    for part in (slice(0, 1), slice(0, 2), slice(1, 3)):
        x = data(5, 9) if part.start else data()
        assert_same(model[part], reference[part], x)
    assert_same(model[0], reference[0])


# --- disturbs nothing ------------------------------------------------------------------------------------------------


def test_fuse_disturbs_nothing() -> None:
    model: Any = build(lambda: nn.Sequential(MLP(dropout=0.5), Gated()))
    model[0].drop.eval()
    model[0].fc1.requires_grad_(False)
    grad = torch.ones_like(model[0].fc2.weight)
    model[0].fc2.weight.grad = grad
    seen.clear()
    model[0].fc2.weight.register_hook(lambda grad: seen.append("tensor hook"))
    model[0].register_forward_hook(lambda *_: seen.append("module hook"))
    before = {
        "objects": [*model.modules(), *model.parameters()],
        "keys": list(model.state_dict()),
        "values": [parameter.detach().clone() for parameter in model.parameters()],
        "versions": [parameter._version for parameter in model.parameters()],
        "flags": [module.training for module in model.modules()],
        "frozen": [parameter.requires_grad for parameter in model.parameters()],
        "attributes": [list(vars(module)) for module in model.modules()],
    }
    torch.manual_seed(11)
    state = torch.get_rng_state()
    with torch.no_grad():
        assert len(fuse(model).replaced) == 2
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert seen == []
    assert model[0].fc2.weight.grad is grad
    assert torch.equal(grad, torch.ones_like(grad))
    assert all(parameter.grad is None for parameter in model[1].parameters())
    after = [*model.modules(), *model.parameters()]
    assert all(one is other for one, other in zip(after, before["objects"], strict=True))
    assert list(model.state_dict()) == before["keys"]
    assert all(map(torch.equal, model.parameters(), before["values"]))
    assert [parameter._version for parameter in model.parameters()] == before["versions"]
    assert [module.training for module in model.modules()] == before["flags"]
    assert [parameter.requires_grad for parameter in model.parameters()] == before["frozen"]
    assert [list(vars(module)) for module in model.modules()] == before["attributes"]


def test_shared_activation_is_not_touched() -> None:
    before = dict(vars(shared_act))
    model = nn.Sequential(MLP(shared_act), nn.Linear(FEATURES, 3), shared_act, shared_act)
    fuse(model)
    assert vars(shared_act) == before
    assert type(shared_act) is nn.GELU


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [8, 1024])
def test_verifies_in_its_dtype(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)).to(dtype)
    assert len(fuse(model).replaced) == 1


# --- verification ----------------------------------------------------------------------------------------------------


def wrong_activation(real: Any, *args: Any) -> Tensor:
    return real(*args[:-1], Activation("gelu_tanh"))


def wrong_gradient(real: Any, *args: Any) -> Tensor:
    return real(args[0].detach(), *args[1:])


def wrong_bias(real: Any, *args: Any) -> Tensor:
    return real(*args[:2], None, *args[3:])


def slightly_wrong(real: Any, *args: Any) -> Tensor:
    return real(*args) * (1 + 1e-3)


def raises(real: Any, *args: Any) -> Tensor:
    raise RuntimeError("out of memory")


WRONG = {
    wrong_activation: "output differs by",
    wrong_gradient: "gradient of input is there in one way",
    wrong_bias: "output differs by",
    slightly_wrong: "output differs by",
    raises: "the fused forward raises RuntimeError('out of memory')",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_fails_its_verification_is_left(
    wrong: Callable[..., Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MLP(), nn.Linear(FEATURES, 9), nn.GELU()).to(dtype)
    real = fused_ops.functional.feed_forward
    monkeypatch.setattr(fused_ops.functional, "feed_forward", functools.partial(wrong, real))
    with pytest.warns(UserWarning, match="expected at least one"):
        report = fuse(model)
    reasons = {one.name: one.reason for one in report.left}
    assert WRONG[wrong] in reasons["0.fc1"]
    assert WRONG[wrong] in reasons["1"]
    assert [type(module) for module in model.children()] == [MLP, nn.Linear, nn.GELU]
    assert [one.note for one in fuse(model, verify=False).replaced] == ["not verified"] * 2


def test_meta_device() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(MLP(), Gated())
    report = fuse(model)
    assert [one.note for one in report.replaced] == ["not verified: on the meta device"] * 2
    reference = build(lambda: nn.Sequential(MLP(), Gated()))
    model.load_state_dict(reference.state_dict(), assign=True)
    assert_same(model, reference)


def test_without_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_native() -> None:
        raise RuntimeError("fused_ops: no native library")

    monkeypatch.setattr("fused_ops._build.load_native", load_native)
    model = MLP()
    with pytest.raises(RuntimeError, match="no native library"):
        fuse(model)
    assert type(model) is MLP


# --- report, names, undo ---------------------------------------------------------------------------------------------


def layers(count: int = 12) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(MLP() for _ in range(count)), "head": sequential(nn.ReLU())})


# include, exclude, names of what is fused
NAMES: list[tuple[Any, Any, list[str]]] = [
    (["layers.1"], None, ["layers.1"]),
    ("layers.1", None, ["layers.1"]),
    (["layers.1*"], None, ["layers.1", "layers.10", "layers.11"]),
    (["layers.*"], ["layers.?"], ["layers.10", "layers.11"]),
    (None, ["layers.*"], ["head"]),
    (["layers.3.fc1"], None, ["layers.3"]),
    (["head.0"], None, ["head"]),
    (["head", "layers.2"], ["layers.2.fc1"], ["head"]),
]


@pytest.mark.parametrize(("include", "exclude", "expected"), NAMES)
def test_name_patterns(include: Any, exclude: Any, expected: list[str]) -> None:
    report = fuse(layers(), include=include, exclude=exclude)
    assert [one.name for one in report.replaced] == expected
    assert all("by name" in one.reason for one in report.left if one.name.endswith("fc1"))


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize("pattern", ["layer.1", "layers", "0.layers.12", "*.*.*.*.*", "0.layers.1.fc1.weight"])
def test_unknown_names_are_rejected(argument: str, pattern: str) -> None:
    model = nn.Sequential(layers())
    with pytest.raises(ValueError, match=f"fuse: expected {argument} to have dotted names of modules"):
        fuse(model, **{argument: [pattern]})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"fuse: expected {argument} to be names of modules, got 3"):
        fuse(model, **{argument: 3})  # type: ignore[arg-type]


def test_twice_and_undo() -> None:
    model = layers(2)
    kinds = [(module, type(module)) for module in model.modules()]
    first = fuse(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = fuse(model)
    assert len(first.replaced) == 3
    assert not second.replaced
    assert {one.reason for one in second.left} == {"is fused already"}
    second.undo()
    assert type(model.get_submodule("layers.0")) is not MLP
    first.undo()
    first.undo()
    assert all(
        module is other and type(module) is kind for module, (other, kind) in zip(model.modules(), kinds, strict=True)
    )
    assert len(fuse(model).replaced) == 3
    first.undo()
    assert type(model.get_submodule("layers.0")) is not MLP


def test_fused_layers_are_fused_already() -> None:
    layers = fused_ops.nn
    model = nn.Sequential(layers.LinearAct(4, 4), nn.ReLU(), layers.MLP(4, 4), layers.GatedMLP(4, 4))
    report = fuse(model)
    assert not report.replaced
    assert [one.reason for one in report.left] == ["is fused already"] * 6


def test_undo_after_another_tool() -> None:
    model = MLP()
    report = fuse(model)
    model.__class__ = type("Sharded", (type(model),), {})
    with pytest.warns(UserWarning, match=r"undo: expected type\(module\) == FusedMLP, got Sharded"):
        report.undo()
    assert type(model).__name__ == "Sharded"


def test_the_model_itself_may_be_a_block() -> None:
    model = build(MLP)
    reference = copy.deepcopy(model)
    report = fuse(model)
    assert report.replaced[0].name == ""
    assert isinstance(model, MLP)
    assert_same(model, reference)


def test_a_module_in_several_places() -> None:
    block = MLP()
    model = nn.ModuleDict({"first": block, "second": nn.ModuleDict({"again": block}), "linear": block.fc1})
    report = fuse(model, include=["second.again"])
    assert [one.name for one in report.replaced] == ["first"]
    assert model["first"] is block
    report.undo()
    with pytest.warns(UserWarning, match="expected at least one"):
        assert not fuse(model, exclude=["second.again"]).replaced


def test_table() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(MLP() for _ in range(2)), "head": nn.Linear(FEATURES, 3)})
    assert repr(fuse(model)).splitlines() == [
        "fused          layers               what                         memory less per 1,000 tokens",
        "layers.* (2x)  fc1, act, drop, fc2  MLP: gelu(linear) -> linear  35 KiB",
        "",
        "left alone  reason",
        "head        has no activation behind it",
    ]


# Hidden tensors fewer, of 9 features and 4 bytes for each of 1,000 tokens.
SAVED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gelu": (MLP, 1),
    "relu keeps one of one": (lambda: MLP(nn.ReLU()), 0),
    "swiglu": (Gated, 2),
}


@pytest.mark.parametrize("name", SAVED)
def test_memory_saved(name: str) -> None:
    make, tensors = SAVED[name]
    assert fuse(make()).replaced[0].saved_bytes == tensors * 9 * 4 * 1000


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"fuse: expected model to be a torch.nn.Module, got list"):
        fuse([nn.Linear(2, 2)])  # type: ignore[arg-type]


def test_threads() -> None:
    """Many threads fuse one model: each block is fused once."""
    model = layers(6)
    reports: list[FuseReport] = []
    threads = [threading.Thread(target=lambda: reports.append(fuse(model))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(report.replaced) for report in reports) == [0, 0, 0, 0, 0, 7]


# --- torch's own tools -----------------------------------------------------------------------------------------------


def test_functional_call_and_transforms() -> None:
    model = build(Gated)
    reference = copy.deepcopy(model)
    fuse(model)
    parameters = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}

    def loss(one: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(one, parameters, (x,)).square().sum()

    x = data()
    results = []
    for one in (model, reference):
        per_sample = torch.func.vmap(torch.func.grad(functools.partial(loss, one)), in_dims=(None, 0))
        results.append((torch.func.functional_call(one, parameters, (x,)), per_sample(parameters, x[:, None])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["block", "gated", "casting", "halves", "dropout between"])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = FUSED[name][0]()
    reference = copy.deepcopy(model)
    fuse(model)
    x = data(dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        mine, theirs = outcome(model, x), outcome(reference, x)
    for one, other in zip(mine, theirs, strict=True):
        assert one is not None
        assert other is not None
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * other.abs().max().item())


def test_in_several_calls_and_shapes() -> None:
    model, x = build(MLP), data(2, 3, 4, FEATURES)
    reference = copy.deepcopy(model)
    fuse(model)
    for view in (x, x.transpose(0, 2), x[0, 0, 0], x[:0]):
        assert_same(model, reference, view)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
def test_compiled_in_one_graph(name: str) -> None:
    model = build(FUSED[name][0], training=False)
    reference = copy.deepcopy(model)
    fuse(model)
    torch.compiler.reset()
    x = data(3, 4, FEATURES) if name.startswith("encoder") else data()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(compiled, reference, x)


@pytest.mark.slow
def test_compiled_before_a_hook_comes() -> None:
    model = build(MLP, training=False)
    reference = copy.deepcopy(model)
    fuse(model)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="aot_eager")
    assert_same(compiled, reference)
    model.act, reference.act = nn.Tanh(), nn.Tanh()
    assert_same(compiled, reference)


def data_parallel(model: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fully_sharded(model: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def checkpointed(model: Any) -> Any:
    return functools.partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=False)


def exported(model: Any) -> nn.Module:
    return torch.export.export(model, (data(),)).module()


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [data_parallel, fully_sharded, checkpointed, exported, torch.jit.script])
@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")
def test_wrapped(wrap: Callable[[Any], Any]) -> None:
    model = build(lambda: nn.Sequential(MLP(), Gated()), training=False)
    reference = copy.deepcopy(model)
    fuse(model)
    wrapped, x = wrap(model), data()
    for one in (wrapped, reference):
        one(x).square().sum().backward()
    torch.testing.assert_close(wrapped(x), reference(x), rtol=1e-9, atol=1e-11)
    mine = wrapped if wrap is exported else model
    for parameter, other in zip(mine.parameters(), reference.parameters(), strict=True):
        grad: Any = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(grad, other.grad, rtol=1e-9, atol=1e-11)


def in_a_function() -> nn.Module:
    activate = F.leaky_relu

    class Inside(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(activate(self.fc1(x), 0.3))

    return Inside()


class Holds(nn.Module):
    """A bigger model, with operations of its own around its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Functions(), Chain()]), sequential(nn.GELU(), Functions().fc2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(F.relu(x))


SCRIPTED: dict[str, Callable[[], nn.Module]] = {
    "functions": Functions,
    "chain": Chain,
    "up first": UpFirst,
    "halves": lambda: Halves(gate_last=True),
    "names of a function": in_a_function,
    "sequential": lambda: sequential(nn.GELU(), nn.Linear(9, FEATURES)),
    "blocks in a sequential": lambda: nn.Sequential(Functions(), MLP(), sequential(nn.ReLU())),
    "bigger model": Holds,
}


@pytest.mark.parametrize("name", SCRIPTED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted(name: str) -> None:
    """It is the stock model's script; parameters are shared, and the model goes on fused."""
    model = build(SCRIPTED[name], training=False)
    reference = copy.deepcopy(model)
    assert fuse(model).replaced
    kinds = [(module, type(module)) for module in model.modules()]
    scripted: Any = torch.jit.script(model)
    assert "aten::linear" in str(scripted.inlined_graph)
    assert_same(scripted, reference)
    assert all(mine is own for mine, own in zip(scripted.parameters(), model.parameters(), strict=True))
    assert all(
        module is other and type(other) is kind for (module, kind), other in zip(kinds, model.modules(), strict=True)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:fuse")
def test_fully_sharded_before() -> None:
    model = fully_sharded(build(lambda: nn.Sequential(MLP(), Gated())))
    report = fuse(model)
    assert not report.replaced
    assert all("is a DTensor" in one.reason for one in report.left)
