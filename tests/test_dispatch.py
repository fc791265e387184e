# SPDX-License-Identifier: Apache-2.0
"""Dispatch: the table decides what runs, results differ by rounding only, and tune() measures, saves and restores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_ops import dispatch, functional
from fused_ops._build import load_native
from fused_ops.dispatch import Choice


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FUSED_OPS_TUNING", str(tmp_path / "tuning.json"))
    dispatch.set_choices([])
    yield
    monkeypatch.undo()
    dispatch.reset()


def tensors(m: int = 6, k: int = 5, n: int = 7, dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(m * k * n)
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in ((m, k), (n, k), (n,))] + [
        None
    ] * 4


def block(operands: list[Any], activation: str) -> torch.Tensor:
    x, w, b, *rest = operands
    assert rest == [None] * 4
    return functional.linear_act(x, w, b, activation)


def results(operands: list[Any], activation: str = "gelu") -> list[torch.Tensor]:
    output = block(operands, activation)
    leaves = [tensor for tensor in operands if tensor is not None]
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]


def is_fused(operands: list[Any], activation: str) -> bool:
    output = block(operands, activation)
    return output.grad_fn is not None and "FeedForwardBackward" in output.grad_fn.name()


def test_stock_is_chosen_for_its_activation_type_and_size_only() -> None:
    dispatch.set_choices([Choice("gelu", "float32", 6, 5, 7, "stock")])
    assert not is_fused(tensors(), "gelu")
    assert not is_fused(tensors(5, 4, 4), "gelu")  # of the same powers of two
    assert is_fused(tensors(8, 5, 7), "gelu")
    assert is_fused(tensors(6, 5, 8), "gelu")
    assert is_fused(tensors(), "relu")
    assert is_fused(tensors(dtype=torch.float64), "gelu")
    dispatch.set_choices([*dispatch.choices(), Choice("gelu", "float32", 6, 5, 7, "fused")])
    assert is_fused(tensors(), "gelu")  # the later line holds


@pytest.mark.parametrize(("activation", "fused"), [("gelu", False), ("softplus", False), ("silu", True)])
def test_large_layers_in_double_whose_loops_are_scalar_run_stock(activation: str, fused: bool) -> None:
    assert is_fused(tensors(300, 5, 70, torch.float64), activation) is fused
    assert is_fused(tensors(30, 5, 70, torch.float64), activation)
    assert is_fused(tensors(300, 5, 70), activation)


def test_blocks_are_always_fused() -> None:
    dispatch.set_choices([Choice("gelu", "float32", 6, 5, 7, "stock")])
    x, w, b, *_ = tensors()
    output = functional.mlp(x, w, b, torch.randn(3, 7))
    assert output.grad_fn is not None
    assert "FeedForwardBackward" in output.grad_fn.name()


def test_inference_and_training_are_chosen_apart() -> None:
    operands = tensors(200, 30, 40)
    stock = functional._composed(operands, functional.find_activation("gelu", {}))
    dispatch.set_choices([Choice("gelu", "float32", 200, 30, 40, "stock", training=False)])
    assert is_fused(operands, "gelu")
    with torch.no_grad():
        assert torch.equal(block(operands, "gelu"), stock)
        dispatch.set_choices([])
        assert not torch.equal(block(operands, "gelu"), stock)  # they round differently


@pytest.mark.parametrize("operation", dispatch.PRODUCTS)
@pytest.mark.parametrize(
    ("dtype", "provider"),
    [(torch.float32, "onednn"), (torch.bfloat16, "onednn"), (torch.bfloat16, "aten"), (torch.float16, "aten")],
)
def test_every_choice_agrees_with_the_default(operation: str, dtype: torch.dtype, provider: str) -> None:
    if provider == "onednn" and not load_native().has_onednn():
        pytest.skip("this torch has no oneDNN")
    operands = tensors(12, 20, 9, dtype)
    expected = results(operands)
    name = str(dtype).removeprefix("torch.")
    shape = {"forward": (12, 20, 9), "grad_input": (12, 9, 20), "grad_weight": (9, 12, 20)}[operation]
    dispatch.set_choices([Choice(operation, name, *shape, provider)])
    eps = torch.finfo(dtype).eps
    for ours, theirs in zip(results(operands), expected, strict=True):
        assert (ours - theirs).abs().max() <= 8 * eps * theirs.abs().max()


def test_stock_agrees_with_fused() -> None:
    expected = results(tensors())
    dispatch.set_choices([Choice("gelu", "float32", 6, 5, 7, "stock")])
    for ours, theirs in zip(results(tensors()), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tune_measures_saves_and_is_read_again() -> None:
    shapes, seconds = [(8, 16, 16), (4, 8, 32)], 0.0
    found = dispatch.tune(shapes, dtypes=[torch.float32], activations=["relu"], seconds=seconds, progress=False)
    assert len(found) == 2 * (3 + 2)
    assert dispatch.choices() == found
    record = json.loads(dispatch.tuning_file().read_text())
    assert record["format"] == 1
    assert record["threads"] == torch.get_num_threads()
    dispatch.tune(shapes[:1], dtypes=[torch.bfloat16], activations=[], seconds=seconds, progress=False)
    dispatch.set_choices([])
    dispatch.reset()
    own = dispatch.choices()[len(dispatch.default_choices()) :]
    assert own[: len(found)] == found
    assert len(own) == len(found) + 3  # those for other types were kept


def test_an_interrupted_tune_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [Choice("gelu", "float32", 6, 5, 7, "stock")]
    dispatch.set_choices(before)

    def interrupt(*arguments: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatch, "_faster", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dispatch.tune([(8, 16, 16)], progress=False)
    assert dispatch.choices() == before
    assert not is_fused(tensors(), "gelu")
    assert not dispatch.tuning_file().exists()


def test_the_faster_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = {"default": 2.0, "alternative": 1.0}
    monkeypatch.setattr(dispatch, "_seconds", lambda name: durations[name])
    assert dispatch._faster("default", "alternative", 0.0)  # type: ignore[arg-type]
    durations["alternative"] = 1.95  # within what two equal routines differ by
    assert not dispatch._faster("default", "alternative", 0.0)  # type: ignore[arg-type]


def test_off_means_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSED_OPS_TUNING", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dispatch.reset()
    assert dispatch.choices() == []
    assert dispatch.tune([(2, 3, 4)], seconds=0.0, progress=False)
    assert not dispatch.tuning_file().exists()


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        '{"format": 2, "choices": []}',
        '{"format": 1, "choices": [{"m": 1}]}',
        '{"format": 1, "choices": [{"operation": "gelu", "dtype": "float32", "m": 4, "k": 4, "n": 4, '
        '"faster": "stock", "training": "yes"}]}',
        "[" * 100_000,
    ],
)
def test_a_broken_file_is_left_out_with_a_warning(text: str) -> None:
    dispatch.tuning_file().write_text(text)
    with pytest.warns(UserWarning, match=r"tuning\.json is left out: .* Run fused_ops\.tune\(\) again"):
        dispatch.reset()
    assert dispatch.choices() == dispatch.default_choices()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("forward", "float32", 1, 1, 1, "stock"),
            r"expected faster in \(aten, onednn, loop\) for forward, got 'stock'",
        ),
        (("gelu", "float32", 1, 1, 1, "onednn"), r"expected faster in \(fused, stock\) for gelu, got 'onednn'"),
        (("glue", "float32", 1, 1, 1, "stock"), r"expected operation in \(forward, .*, got 'glue'"),
        (("swish", "float32", 1, 1, 1, "stock"), r"expected operation in \(forward, .*, got 'swish'"),
        (("gelu", "float64", 1, 1, 1, "stock"), None),
        (("gelu", "float33", 1, 1, 1, "stock"), "expected dtype in .* for stock, got 'float33'"),
        (("gelu", "int32", 1, 1, 1, "stock"), "expected dtype in .* for stock, got 'int32'"),
        (("forward", "float64", 1, 1, 1, "onednn"), "expected dtype in .* for onednn, got 'float64'"),
        (("gelu", "float32", 0, 1, 1, "stock"), "expected sizes to be positive integers, got 0"),
        (("gelu", "float32", 1, 1.5, 1, "stock"), "expected sizes to be positive integers, got 1.5"),
        (("gelu", "float32", 1, 1, "x", "stock"), "expected sizes to be positive integers, got 'x'"),
    ],
)
def test_choices_are_checked(arguments: tuple[Any, ...], message: str | None) -> None:
    if message is None:
        Choice(*arguments)
        return
    with pytest.raises(ValueError, match=message):
        Choice(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": [(0, 1, 1)]}, r"expected shapes of three positive integers \(rows, in, out\), got \(0, 1, 1\)"),
        ({"shapes": [(4, 4)]}, r"got \(4, 4\)"),
        ({"dtypes": [torch.int32]}, r"expected dtypes in \(float32, .*, got torch.int32"),
        ({"activations": ["foo"]}, r"expected activations in \(.*, got 'foo'"),
        ({"activations": [["relu"]]}, r"expected activations in \(.*, got \['relu'\]"),
        ({"activations": [torch.nn.GELU()]}, r"expected activations in \(.*, got GELU"),
        ({"dtypes": ["float32"]}, r"expected dtypes in \(float32, .*, got 'float32'"),
        ({"shapes": [(True, 4, 4)]}, r"got \(True, 4, 4\)"),
        ({"seconds": float("nan")}, "expected seconds to be a number >= 0, got nan"),
        ({"seconds": -1}, "expected seconds to be a number >= 0, got -1"),
        ({"shapes": [3]}, r"expected shapes of three positive integers \(rows, in, out\), got 3"),
        ({"shapes": 3}, "expected shapes to be a sequence, got 3"),
        ({"dtypes": torch.float32}, "expected dtypes to be a sequence, got torch.float32"),
        ({"seconds": "1"}, "expected seconds to be a number >= 0, got '1'"),
    ],
)
def test_tune_checks_before_it_measures(arguments: dict[str, Any], message: str) -> None:
    before = dispatch.choices()
    with pytest.raises((TypeError, ValueError), match=f"{message}.*\\. [A-Z]"):
        dispatch.tune(**arguments)
    assert dispatch.choices() == before


def test_tune_checks_that_it_can_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dispatch.set_choices([Choice("gelu", "float32", 6, 5, 7, "stock")])
    for place in (tmp_path, Path("/proc/none/tuning.json")):
        monkeypatch.setenv("FUSED_OPS_TUNING", str(place))
        with pytest.raises(OSError, match="tune: expected to be able to write"):
            dispatch.tune([(2, 3, 4)], seconds=60.0, progress=False)
    assert dispatch.choices() == [Choice("gelu", "float32", 6, 5, 7, "stock")]


@pytest.mark.parametrize(
    ("table", "message"), [(["a"], "expected Choices, got 'a'"), (3, "an iterable of Choices, got 3")]
)
def test_a_table_of_something_else_is_rejected(table: Any, message: str) -> None:
    before = dispatch.choices()
    with pytest.raises(TypeError, match=message):
        dispatch.set_choices(table)
    assert dispatch.choices() == before


def test_tune_again_replaces_and_does_not_need_gradients() -> None:
    options: dict[str, Any] = {"dtypes": [torch.float64], "activations": ["relu"], "seconds": 0.0, "progress": False}
    with torch.inference_mode():
        found = dispatch.tune([(8, 16, 16)], **options)
    assert {line.faster for line in found if line.operation in dispatch.PRODUCTS} == {"aten"}  # oneDNN has no float64
    dispatch.tune([(8, 16, 16)], **options)
    assert len(dispatch.choices()) == len(found)


@pytest.mark.parametrize("vendor", dispatch._ONEDNN)
def test_default_tables_are_well_formed(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_first_value", lambda *arguments: vendor)
    table = dispatch.default_choices()
    assert table
    assert all(line.faster in ("onednn", "stock") for line in table)
    dispatch.set_choices(table)
