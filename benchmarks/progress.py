# SPDX-License-Identifier: Apache-2.0
"""A one-line progress bar on a terminal; silent where standard error is not one."""

from __future__ import annotations

import sys
import time


class Progress:
    def __init__(self, total: float) -> None:
        self.total = total
        self.done = 0.0
        self.start = time.monotonic()
        self.visible = sys.stderr.isatty()

    def advance(self, amount: float, label: str) -> None:
        self.done = min(self.total, self.done + amount)
        if not self.visible:
            return
        fraction = self.done / self.total
        filled = round(30 * fraction)
        elapsed = time.monotonic() - self.start
        left = f", {elapsed * (1 - fraction) / fraction:.0f} s left" if fraction > 0.02 else ""
        bar = "#" * filled + "." * (30 - filled)
        sys.stderr.write(f"\r\x1b[2K[{bar}] {fraction:4.0%}{left}  {label}")
        sys.stderr.flush()

    def clear(self) -> None:
        if self.visible:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
