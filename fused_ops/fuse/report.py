# SPDX-License-Identifier: Apache-2.0
"""What fuse() did, as a table, and how to take it back."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

LOCK = threading.RLock()  # one model is changed at a time


@dataclass(frozen=True)
class Replaced:
    """One fused call.

    Args:
        name: of the block that makes it; "" is the model itself.
        layers: the block's children that take part.
        kind: the block's class, and what is fused.
        saved_bytes: how many bytes fewer a thousand tokens save for backward, as measured. None: not measured.
        note: what else is to be said.
    """

    name: str
    layers: tuple[str, ...]
    kind: str
    saved_bytes: float | None
    note: str = ""


@dataclass(frozen=True)
class Left:
    """A linear layer that stays as it is, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Swap:
    module: nn.Module
    stock: type[nn.Module]
    fused: type[nn.Module]


def _grouped(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows that differ only in the numbers of their first column as one, with * and their count."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        groups.setdefault((re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), *rest), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names)}x)", *rest)
        for (pattern, *rest), names in groups.items()
    ]


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _kilobytes(saved_bytes: float | None) -> str:
    return "not measured" if saved_bytes is None else f"{saved_bytes / 1024:,.0f} KiB"


@dataclass(frozen=True, repr=False)
class FuseReport:
    """What fuse() replaced and what it left alone. Printed, it is a table.

    Example:
        >>> import fused_ops, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
        >>> report = fused_ops.fuse(model)
        >>> report.replaced[0].layers
        ('0', '1', '2')
        >>> report.undo()
        >>> type(model)
        <class 'torch.nn.modules.container.Sequential'>
    """

    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)

    def undo(self) -> None:
        """Gives every block its own class back. The second time it does nothing."""
        with LOCK:
            while self.swaps:
                swap = self.swaps.pop()
                if type(swap.module) is swap.fused:
                    swap.module.__class__ = swap.stock
                elif type(swap.module) is not swap.stock:
                    warnings.warn(
                        f"undo: expected type(module) == {swap.fused.__name__}, got {type(swap.module).__name__}. "
                        "Another tool has changed the class since; undo that first. The module stays as it is.",
                        UserWarning,
                        stacklevel=2,
                    )

    def __repr__(self) -> str:
        parts = []
        if self.replaced:
            rows = [
                (one.name or "(the model)", ", ".join(one.layers), one.kind, _kilobytes(one.saved_bytes), one.note)
                for one in self.replaced
            ]
            header = ("fused", "layers", "what", "memory less per 1,000 tokens", "")
            parts.append(_table([header, *_grouped(rows)]))
        if self.left:
            parts.append(_table([("left alone", "reason"), *_grouped((one.name, one.reason) for one in self.left)]))
        return "\n\n".join(parts) or "nothing to fuse: the model has no linear layers"
