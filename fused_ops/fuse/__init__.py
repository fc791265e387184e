# SPDX-License-Identifier: Apache-2.0
"""fuse(): fused linear-activation calls in an existing model, in place."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import nn

from fused_ops import _build
from fused_ops.fuse.blocks import FeedForward, Plan, fused_class
from fused_ops.fuse.planning import looks_linear, obstacle, plan_block
from fused_ops.fuse.randomness import RandomStates
from fused_ops.fuse.record import Unproven
from fused_ops.fuse.report import LOCK, FuseReport, Left, Replaced, Swap
from fused_ops.fuse.verify import Mismatch
from fused_ops.fuse.verify import verify as verify_steps

__all__ = ["FuseReport", "Left", "Replaced", "fuse"]


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _join(owner: str, child: str) -> str:
    return f"{owner}.{child}" if owner else child


class _Selection:
    """Which modules the name patterns ask for."""

    def __init__(self, model: nn.Module, include: Iterable[str] | None, exclude: Iterable[str] | None) -> None:
        self.names: dict[nn.Module, list[str]] = {}  # a module that is in several places has several
        for name, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(module, []).append(name)
        self.include = self._patterns("include", include)
        self.exclude = self._patterns("exclude", exclude)

    def _patterns(self, argument: str, patterns: Iterable[str] | None) -> list[str] | None:
        if patterns is None:
            return None
        if isinstance(patterns, str):
            patterns = [patterns]
        patterns = list(patterns) if isinstance(patterns, Iterable) else patterns
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"fuse: expected {argument} to be names of modules, got {patterns!r}. Put them in a list.")
        for pattern in patterns:
            if not any(_matches(name, pattern) for names in self.names.values() for name in names):
                raise ValueError(
                    f"fuse: expected {argument} to have dotted names of modules, got {pattern!r}, which matches none. "
                    "A * stands for one part between dots, or within one: 'layers.*.mlp'."
                )
        return patterns

    def refusal(self, block: nn.Module, child: str) -> str | None:
        """Why a block's child is not asked for: patterns match it or the block."""
        names = [name for owner in self.names[block] for name in (owner, _join(owner, child))]
        if self.exclude is not None and any(_matches(name, one) for name in names for one in self.exclude):
            return "is excluded by name"
        if self.include is not None and not any(_matches(name, one) for name in names for one in self.include):
            return "is not included by name"
        return None


def _described(block: nn.Module, steps: Iterable[FeedForward]) -> str:
    parts = []
    for step in steps:
        gate = " * linear" if step.up or step.halves else ""
        parts.append(f"{step.activation}(linear){gate}{' -> linear' if step.down else ''}")
    return f"{type(block).__name__}: {', '.join(parts)}"


def _plan(
    block: nn.Module, refusal: Callable[[str], str | None], verified: bool
) -> tuple[Plan | None, dict[str, str], list[tuple[tuple[FeedForward, ...], float | None]]]:
    """The block's plan, why some linear layers are not in it, and its steps as verified together with bytes saved."""
    failed: dict[str, str] = {}
    while True:
        plan, refused = plan_block(block, lambda child: failed.get(child) or refusal(child))
        if plan is None:
            return None, refused, []
        steps = [step for step in plan.steps if isinstance(step, FeedForward)]
        units = []
        for unit in [(step,) for step in steps] if plan.sequential else [tuple(steps)]:
            try:
                units.append((unit, verify_steps(block, plan, unit) if verified else None))
            except Mismatch as mismatch:
                failed.update({step.linear: f"fails its verification: {mismatch}" for step in unit})
                break
        else:
            return plan, refused, units


def _fuse_block(block: nn.Module, selection: _Selection, verified: bool, report: FuseReport) -> None:
    """Fuses what can be fused in one block, and reports it."""
    linears = [name for name, child in block._modules.items() if child is not None and looks_linear(child)]
    if not linears:
        return
    name, why = selection.names[block][0], "has no activation behind it"
    kind, plan, refused, states = type(block), None, {}, RandomStates()
    try:
        plan, refused, units = _plan(block, lambda child: selection.refusal(block, child), verified)
        if plan is not None:
            rows = [_row(block, name, unit, saved, verified) for unit, saved in units]
            _swap(block, plan, report)
            report.replaced.extend(rows)
    except Exception as error:  # whatever a model does, the other blocks do not depend on it
        plan, why = None, str(error) if isinstance(error, Unproven) else f"cannot be fused: {_said(error)}"
        if type(block) is not kind:
            object.__setattr__(block, "__class__", kind)
    finally:
        states.restore()
    for child in linears:
        if plan is None or child not in plan.linears:
            report.left.append(Left(_join(name, child), refused.get(child) or _obstacle(block, child) or why))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _obstacle(block: nn.Module, child: str) -> str | None:
    try:
        return obstacle(block.get_submodule(child))
    except Exception as error:
        return f"cannot be looked at: {_said(error)}"


def _swap(block: nn.Module, plan: Plan, report: FuseReport) -> None:
    swap = Swap(block, type(block), fused_class(type(block), plan))
    report.swaps.append(swap)  # first, so that an interrupt behind it can be undone
    try:
        block.__class__ = swap.fused
    except Exception as error:
        report.swaps.pop()
        raise Unproven(f"is in a block whose class cannot be exchanged: {error}") from None


def _row(block: nn.Module, name: str, steps: tuple[FeedForward, ...], saved: float | None, verified: bool) -> Replaced:
    layers = tuple(layer for step in steps for layer in step.names)
    meta = any(parameter.is_meta for layer in layers for parameter in block.get_submodule(layer).parameters())
    note = "not verified: on the meta device" if meta else "" if verified else "not verified"
    return Replaced(name, layers, _described(block, steps), None if saved is None else 1000 * saved, note)


def fuse(
    model: nn.Module,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    verify: bool = True,
) -> FuseReport:
    """Makes a model's linear layers run in one call with activation, gate and the linear layer behind, in place.

    Every module and every Parameter stays the same object under the same name: a block that is fused only gets a
    subclass of its own class, whose forward calls fused_ops.functional with the children's parameters. Optimizers,
    checkpoints, DDP, hooks on the block and isinstance checks go on as before. Whatever comes to the block's children
    later (a hook, pruning, an adapter, another activation) makes the block run its own class's forward again.

    Fused are: Linear and activation behind one another in a Sequential; blocks whose forward, run once with a symbol
    for the input, proves to be such a chain, gated or not, of torchvision, timm, transformers or your own; the
    feed-forward part of nn.TransformerEncoderLayer and DecoderLayer. Everything else is left alone, with the reason.

    Args:
        model: any module; it may itself be such a block.
        include: dotted names, of blocks or of linear layers, as in model.named_modules(). Only these are fused. Names
            match as a whole, and * stands for one part or within one: "layers.1" is not "layers.10", "layers.*.mlp" is
            the mlp of each layer. Default: all.
        exclude: names of those that are not fused. Default: none.
        verify: compares output and gradients of every block with its own forward's, on eight random tokens in its
            dtype on its device, before it is fused; what differs is left alone. Copies that share the parameters'
            memory are run, so that random states, gradients, flags and hooks of the model are untouched. Needs memory
            for the block's gradients. Blocks on the meta device are fused without. Default: True.

    Returns:
        What was fused, what was left alone and why, and undo(). Print it.

    Raises:
        TypeError: model is not a module, or include or exclude are not names.
        RuntimeError: the native library is not there.
        ValueError: a name in include or exclude matches no module; nothing has been changed.

    Warns:
        UserWarning: nothing was fused, and nothing is fused already.

    Example:
        >>> import fused_ops, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> report = fused_ops.fuse(model)
        >>> [(one.name, one.layers) for one in report.replaced]
        [('', ('0', '1'))]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse: expected model to be a torch.nn.Module, got {type(model).__name__}. Pass the module.")
    _build.load_native()  # or say what is missing
    report = FuseReport()
    with LOCK, torch.inference_mode(False):
        selection = _Selection(model, include, exclude)
        try:
            for block in selection.names:
                _fuse_block(block, selection, verify, report)
        except BaseException:  # an interrupt
            report.undo()
            raise
    if not report.replaced and not any("fused already" in one.reason for one in report.left):
        warnings.warn(
            "fuse: expected at least one linear layer with an activation behind it that can be fused, got none. "
            "Print the report for the reasons; the model is unchanged.",
            UserWarning,
            stacklevel=2,
        )
    return report
