# SPDX-License-Identifier: Apache-2.0
"""The examples run, and what they claim holds on small sizes."""

from __future__ import annotations

import importlib
import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["--steps", "12", "--batch", "2", "--length", "16", "--width", "32", "--layers", "1", "--heads", "2"]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo")


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "RMSprop", "SGD", "Adagrad"])
def test_both_trainings_agree(demo: Any, optimizer: str) -> None:
    lr = "0.1" if optimizer == "SGD" else "0.003"
    options = demo.parse_arguments([*TINY, "--optimizer", optimizer, "--lr", lr, "--device", "cpu"])
    steps = demo.train_both(options)
    stock, fused = ([step.loss for step in steps[name]] for name in (demo.STOCK, demo.FUSED))
    assert len(stock) == len(fused) == 12
    assert fused == pytest.approx(stock, rel=1e-4)
    assert stock[0] == pytest.approx(math.log(256), rel=0.05)  # an untrained model guesses
    assert fused[-1] < fused[0] - 0.1
    assert all(0 < step.optimizer_seconds < step.seconds for run in steps.values() for step in run)


def test_both_trainings_use_the_named_implementations(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import fused_ops

    used = []
    for module in (torch.optim, fused_ops.optim):
        cls = module.AdamW
        monkeypatch.setattr(module, "AdamW", lambda *a, cls=cls, **k: used.append(cls) or cls(*a, **k))
    blocks: list[int] = []
    fuse = fused_ops.fuse
    monkeypatch.setattr(fused_ops, "fuse", lambda model: blocks.append(len(fuse(model).replaced)))
    demo.train_both(demo.parse_arguments([*TINY[:1], "1", *TINY[2:], "--device", "cpu"]))
    assert [cls.__module__.split(".")[0] for cls in used] == ["torch", "fused_ops"]
    assert blocks == [1]  # once, on the fused side: the MLP of its one layer


def test_default_model_has_about_ten_million_parameters(demo: Any) -> None:
    options = demo.parse_arguments(["--device", "cpu"])
    model = demo.LanguageModel(options.width, options.layers, options.heads, options.length)
    assert 9e6 < sum(parameter.numel() for parameter in model.parameters()) < 12e6


def test_model_does_not_look_ahead(demo: Any) -> None:
    torch.manual_seed(5)
    model = demo.LanguageModel(32, 2, 2, 10)
    text = torch.randint(256, (1, 10))
    changed = text.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_text_is_python_source(demo: Any) -> None:
    text = bytes(demo.standard_library_text(megabytes=0.5).tolist())
    assert len(text) > 400_000
    assert b"import " in text
    assert text == bytes(demo.standard_library_text(megabytes=0.5).tolist())


def test_summary_and_plot(demo: Any, tmp_path: Path) -> None:
    steps = {
        demo.STOCK: [demo.Step(5.0 - 0.1 * i, 0.2, 0.15, 0.04) for i in range(20)],
        demo.FUSED: [demo.Step(5.0 - 0.1 * i + (i == 10) * 0.004, 0.16, 0.12, 0.004) for i in range(20)],
    }
    summary = demo.summary(steps)
    assert "Losses of steps 1 to 6 differ by at most 0.0e+00 of their value." in summary
    assert "Losses of steps 1 to 20 differ by at most 1.0e-03 of their value." in summary
    assert "The optimizer is 10.0x faster, the model's forward and backward pass 1.25x, " in summary
    assert summary.endswith("a whole training step 1.25x.")
    pytest.importorskip("matplotlib")
    assert demo.save_plot(steps, "title", tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"


def test_demo_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), *TINY, "--output", str(tmp_path / "demo.png")]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "Losses of steps 1 to 12 differ by at most" in run.stdout
    assert (tmp_path / "demo.png").exists() == bool(find_spec("matplotlib"))


def test_train_loop_learns() -> None:
    command = [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / "train_loop.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    start, end = map(float, re.findall(r"\d+\.\d+", run.stdout))
    assert end < start / 20
