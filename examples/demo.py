# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model twice from one seed: stock, and with fused_ops' optimizer and layers.

    python examples/demo.py
    python examples/demo.py --optimizer RMSprop --steps 50

The text is the source code of Python's standard library, read as bytes. Both trainings see the same batches and advance
step by step in turn, so whatever else slows the machine down slows both. Prints how well the losses agree and what the
model and the optimizer cost, and saves a plot of both.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import fused_ops

STOCK, FUSED = "torch", "fused_ops"


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a layer norm and around a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        attention = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:  # [batch, length] -> [batch, length, 256]
        return self.logits(self.norm(self.blocks(self.bytes(text) + self.positions)))


class Step(NamedTuple):
    loss: float
    seconds: float
    model_seconds: float  # forward and backward
    optimizer_seconds: float


def standard_library_text(megabytes: float = 4.0) -> Tensor:
    """Bytes of the standard library's modules, in a fixed shuffled order."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(paths)
    text = b""
    for path in paths:
        text += path.read_bytes()
        if len(text) > megabytes * 1e6:
            break
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def train(fused: bool, options: argparse.Namespace, text: Tensor) -> Iterator[Step]:
    """Trains step by step. The two lines that `fused` decides are all that differs between the two runs."""
    torch.manual_seed(options.seed)
    device, length = options.device, options.length
    model = LanguageModel(options.width, options.layers, options.heads, length).to(device)
    if fused:
        fused_ops.fuse(model)
    optim: Any = fused_ops.optim if fused else torch.optim
    optimizer = getattr(optim, options.optimizer)(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))  # warm-up
    batches = torch.Generator().manual_seed(options.seed)

    for _ in range(options.steps):
        starts = torch.randint(len(text) - length - 1, (options.batch,), generator=batches)
        windows = torch.stack([text[start : start + length + 1] for start in starts]).to(device, torch.long)

        begin = clock(device)
        logits = model(windows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        before = clock(device)
        optimizer.step()
        after = clock(device)
        optimizer.zero_grad()
        scheduler.step()
        yield Step(loss.item(), clock(device) - begin, before - begin, after - before)


def show_progress(done: int, total: int, stock: Step, fused: Step) -> None:
    if not sys.stderr.isatty():
        return
    filled = round(30 * done / total)
    bar = "#" * filled + "." * (30 - filled)
    end = "\n" if done == total else ""
    losses = f"loss {stock.loss:.3f} (stock) {fused.loss:.3f} (fused)"
    print(f"\r[{bar}] step {done}/{total}  {losses}", end=end, file=sys.stderr, flush=True)


def train_both(options: argparse.Namespace) -> dict[str, list[Step]]:
    """Both trainings, one step of each in turn."""
    text = standard_library_text()
    steps: dict[str, list[Step]] = {STOCK: [], FUSED: []}
    for stock, fused in zip(train(False, options, text), train(True, options, text), strict=True):
        steps[STOCK].append(stock)
        steps[FUSED].append(fused)
        show_progress(len(steps[STOCK]), options.steps, stock, fused)
    return steps


def milliseconds(steps: list[Step], field: str) -> float:
    """Median over the steps but the first few, which allocate and warm up."""
    return 1e3 * statistics.median(getattr(step, field) for step in steps[min(5, len(steps) - 1) :])


def summary(steps: dict[str, list[Step]]) -> str:
    pairs = zip(steps[STOCK], steps[FUSED], strict=True)
    differences = [abs(stock.loss - fused.loss) / stock.loss for stock, fused in pairs]
    lines = [f"{'':<12}{'first loss':>12}{'last loss':>12}{'ms a step':>12}{'ms in model':>14}{'ms in optimizer':>18}"]
    for name, run in steps.items():
        total, model, optimizer = (milliseconds(run, field) for field in Step._fields[1:])
        losses = f"{run[0].loss:>12.4f}{run[-1].loss:>12.4f}"
        lines.append(f"{name:<12}{losses}{total:>12.1f}{model:>14.1f}{optimizer:>18.2f}")
    speedups = [milliseconds(steps[STOCK], field) / milliseconds(steps[FUSED], field) for field in Step._fields[1:]]
    for part in (differences[: len(differences) // 3], differences):
        lines.append(f"Losses of steps 1 to {len(part)} differ by at most {max(part):.1e} of their value.")
    lines.append("Training amplifies the last bit's rounding: torch's own loop and fused=True part just as far.")
    lines.append(
        f"The optimizer is {speedups[2]:.1f}x faster, the model's forward and backward pass {speedups[1]:.2f}x, "
        f"a whole training step {speedups[0]:.2f}x."
    )
    return "\n".join(lines)


def save_plot(steps: dict[str, list[Step]], title: str, path: Path) -> bool:
    """False where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colours = {STOCK: "#0072B2", FUSED: "#D55E00"}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 4), width_ratios=(2, 1, 1))
    for name, run in steps.items():
        style = {"linewidth": 4.5, "alpha": 0.45} if name == STOCK else {"linewidth": 1.3}  # both stay visible
        left.plot(range(1, len(run) + 1), [step.loss for step in run], color=colours[name], label=name, **style)
    left.set(title="Training loss", xlabel="step", ylabel="cross-entropy (nats a byte)")
    left.legend(frameon=False)
    for axis, field, what in (
        (middle, "model_seconds", "Forward and backward"),
        (right, "optimizer_seconds", "Optimizer"),
    ):
        times = [milliseconds(run, field) for run in steps.values()]
        bars = axis.bar(list(steps), times, width=0.6, color=[colours[name] for name in steps])
        axis.bar_label(bars, fmt="%.1f ms", padding=3)
        axis.set(title=f"{what}: {times[0] / times[1]:.2f}x", ylabel="ms a step (median)")
        axis.margins(y=0.15)
    for axis in (left, middle, right):
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", default="AdamW", choices=("Adam", "AdamW", "RMSprop", "SGD", "Adagrad"))
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, help="default: the best CUDA device, else the CPU")
    parser.add_argument("--output", type=Path, default=Path("demo.png"), help="where the plot goes")
    options = parser.parse_args(arguments)
    options.device = options.device or fused_ops.best_device()
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    model = LanguageModel(options.width, options.layers, options.heads, options.length)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    place = f"{torch.get_num_threads()} CPU threads" if options.device.type == "cpu" else f"{options.device}"
    title = f"{options.optimizer}, {parameters / 1e6:.1f}M-parameter transformer, {place}, torch {torch.__version__}"
    print(f"Training twice, {options.steps} steps each: {title}")
    steps = train_both(options)
    print(summary(steps))
    if save_plot(steps, title, options.output):
        print(f"The plot is in {options.output}")
    else:
        print("No plot: matplotlib is not installed.")


if __name__ == "__main__":
    main()
