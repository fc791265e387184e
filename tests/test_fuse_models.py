# SPDX-License-Identifier: Apache-2.0
"""fuse() on the models of torchvision, timm and transformers, built from a configuration with random weights."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_ops.fuse import fuse
from fused_ops.nn.activation import Activation


@dataclass(frozen=True)
class Model:
    """A row: how to build the model and its input, and how many fused calls it must get."""

    package: str
    build: Callable[[Any], nn.Module]
    fused: int
    input: Callable[[], dict[str, Tensor]]


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 40, (2, 7))}


def both_sides() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 40, (2, 7)), "decoder_input_ids": torch.randint(0, 40, (2, 5))}


def image() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, 16, 16, dtype=torch.float64)}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": image()["x"]}


LAYERS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS: dict[str, Any] = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = LAYERS | WORDS
BERT = LAYERS | {"vocab_size": 40, "hidden_dropout_prob": 0.1}
T5: dict[str, Any] = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
GPT2 = WORDS | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
VIT = LAYERS | {"image_size": 16, "patch_size": 8}
CLIP = LAYERS | WORDS


def transformers_model(name: str, **config: Any) -> Callable[[Any], nn.Module]:
    return lambda library: getattr(library, f"{name}Model")(getattr(library, f"{name}Config")(**config))


def torchvision_vit(library: Any) -> nn.Module:
    return library.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, dropout=0.1, num_classes=5
    )


def convnext(library: Any) -> nn.Module:
    block = library.models.convnext.CNBlockConfig
    return library.models.ConvNeXt([block(8, 16, 2), block(16, None, 1)], num_classes=5)


def swin(library: Any) -> nn.Module:
    return library.models.SwinTransformer([2, 2], 8, [2, 2], [1, 2], [2, 2], num_classes=5)


def timm_vit(mlp: str, **options: Any) -> Callable[[Any], nn.Module]:
    def build(library: Any) -> nn.Module:
        layer = getattr(library.layers, mlp)
        vit = library.models.vision_transformer.VisionTransformer
        return vit(16, 8, embed_dim=16, depth=2, num_heads=2, num_classes=5, mlp_layer=layer, **options)

    return build


def mixer(library: Any) -> nn.Module:
    return library.models.mlp_mixer.MlpMixer(img_size=16, patch_size=8, num_blocks=2, embed_dim=16, num_classes=5)


MODELS = {
    "gpt2": Model("transformers", transformers_model("GPT2", **GPT2), 2, tokens),
    "gpt2, relu": Model("transformers", transformers_model("GPT2", activation_function="relu", **GPT2), 2, tokens),
    "bert": Model("transformers", transformers_model("Bert", **BERT), 2, tokens),
    "llama": Model("transformers", transformers_model("Llama", **LLAMA), 2, tokens),
    "llama, bias": Model("transformers", transformers_model("Llama", mlp_bias=True, **LLAMA), 2, tokens),
    "llama, gelu": Model("transformers", transformers_model("Llama", hidden_act="gelu", **LLAMA), 2, tokens),
    "vit": Model("transformers", transformers_model("ViT", **VIT), 2, pixels),
    "t5": Model("transformers", transformers_model("T5", **T5), 4, both_sides),
    "t5, gated": Model("transformers", transformers_model("T5", feed_forward_proj="gated-gelu", **T5), 4, both_sides),
    "clip": Model("transformers", transformers_model("CLIPText", **CLIP), 2, tokens),
    "phi3": Model("transformers", transformers_model("Phi3", **LLAMA), 2, tokens),
    "torchvision vit": Model("torchvision", torchvision_vit, 2, image),
    "convnext": Model("torchvision", convnext, 3, image),
    "swin": Model("torchvision", swin, 4, image),
    "timm vit": Model("timm", timm_vit("Mlp"), 2, image),
    "timm vit, GluMlp": Model("timm", timm_vit("GluMlp"), 2, image),
    "timm vit, SwiGLU": Model("timm", timm_vit("SwiGLU"), 2, image),
    "mixer": Model("timm", mixer, 4, image),
}


@pytest.fixture(params=MODELS)
def row(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


def build(row: Model, dtype: torch.dtype, training: bool = True) -> nn.Module:
    library = pytest.importorskip(row.package)
    torch.manual_seed(0)
    return row.build(library).to(dtype).train(training)


def inputs(row: Model, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in row.input().items()}


def output(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(7)  # for dropout
    result = model(*values.values()) if "x" in values else model(**values)
    return result if isinstance(result, Tensor) else result.last_hidden_state


def loss(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
    """The output's components in random proportions: its norm says nothing behind a normalization."""
    result = output(model, values)
    return (result * torch.randn(result.shape, generator=torch.Generator().manual_seed(9), dtype=result.dtype)).mean()


def assert_near(actual: Tensor, expected: Tensor, what: str, largest: float = 0.0) -> None:
    """Normwise, since a sum's terms come in another order; a gradient also on the scale of the largest one."""
    allowed = {torch.float64: 1e-10, torch.float32: 2e-4}[expected.dtype] * expected.abs().max().item()
    allowed += 32 * torch.finfo(expected.dtype).eps * largest
    assert (actual - expected).abs().max().item() <= allowed, what


def assert_same(model: nn.Module, reference: nn.Module, values: dict[str, Tensor]) -> None:
    """Outputs and all gradients. A compiled model has zeros for gradients that are None."""
    compiled = hasattr(model, "_orig_mod")
    for one in (model, reference):
        one.zero_grad()
        loss(one, values).backward()
    assert_near(output(model, values), output(reference, values), "output")
    largest = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if not compiled:
            assert (mine.grad is None) == (theirs.grad is None), name
        zeros = torch.zeros_like(mine)
        assert_near(
            zeros if mine.grad is None else mine.grad, zeros if theirs.grad is None else theirs.grad, name, largest
        )


def fused(model: nn.Module, row: Model) -> nn.Module:
    report = fuse(model)
    assert len(report.replaced) == row.fused, report
    return model


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_output_and_gradients(row: Model, dtype: torch.dtype, training: bool) -> None:
    model = build(row, dtype, training)
    reference = copy.deepcopy(model)
    assert_same(fused(model, row), reference, inputs(row, dtype))


def test_five_training_steps(row: Model) -> None:
    """With optimizers made before the model is fused."""
    model = build(row, torch.float64)
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2, momentum=0.9) for one in (model, reference)]
    fused(model, row)
    for step in range(5):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss(one, inputs(row, torch.float64, step)).backward()
            optimizer.step()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_state_dict(row: Model) -> None:
    model, other = build(row, torch.float64, training=False), build(row, torch.float64, training=False)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    fused(model, row)
    assert list(model.state_dict()) == keys
    assert all(mine is before for mine, before in zip(model.parameters(), parameters, strict=True))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5).add_(0.01)
    model.load_state_dict(other.state_dict(), strict=True)
    assert_same(model, other, inputs(row, torch.float64))
    other.load_state_dict(model.state_dict(), strict=True)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("clone", [copy.deepcopy, saved_and_loaded])
def test_clones_are_fused_and_independent(row: Model, clone: Callable[[nn.Module], nn.Module]) -> None:
    model = build(row, torch.float64, training=False)
    reference = copy.deepcopy(model)
    twin = clone(fused(model, row))
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(twin, reference, inputs(row, torch.float64))


def test_undo(row: Model) -> None:
    model = build(row, torch.float64, training=False)
    before = [(module, type(module)) for module in model.modules()]
    report = fuse(model)
    report.undo()
    report.undo()
    after = [(module, type(module)) for module in model.modules()]
    assert all(m is n and kind is other for (m, kind), (n, other) in zip(before, after, strict=True))


def activations_of(package: str) -> dict[str, nn.Module]:
    library = pytest.importorskip(package)
    if package == "transformers.activations":
        return {name: library.ACT2FN[name] for name in library.ACT2CLS}
    kinds = {name: kind for name, kind in vars(library).items() if isinstance(kind, type)}
    return {name: kind() for name, kind in kinds.items() if issubclass(kind, nn.Module) and kind is not nn.Module}


@pytest.mark.parametrize(("package", "known"), [("transformers.activations", 19), ("timm.layers.activations", 9)])
def test_activations_are_what_they_are_taken_for(package: str, known: int) -> None:
    z = 5 * torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = {name: (module, Activation.of(module)) for name, module in activations_of(package).items()}
    recognised = {name: activation for name, (_, activation) in found.items() if activation is not None}
    assert len(recognised) >= known, sorted(found.keys() - recognised.keys())
    for name, activation in recognised.items():
        # Their own formulas have constants with ten digits.
        torch.testing.assert_close(activation.reference(z), found[name][0](z), rtol=1e-7, atol=1e-8, msg=name)


@pytest.mark.slow
def test_compiled_in_one_graph(row: Model) -> None:
    model = build(row, torch.float64, training=False)
    reference = copy.deepcopy(model)
    torch.compiler.reset()
    compiled: Any = torch.compile(fused(model, row), fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(compiled, reference, inputs(row, torch.float64))
