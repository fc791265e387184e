# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks have in common: their arguments, the machine's description, the record of what was measured."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fused_ops
from fused_ops import dispatch


def add_arguments(parser: argparse.ArgumentParser, *, seconds: float, quick: str, compiled: str) -> None:
    """Those that every benchmark takes; `quick` and `compiled` are the help of --quick and --compile."""
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="the floors are for 2")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--seconds", type=float, default=seconds, help="time to spend on the rounds of a row")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--compile", action="store_true", help=f"{compiled} (slow to compile)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a floor is missed")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")


def describe_machine(options: argparse.Namespace) -> dict[str, Any]:
    machine = {
        "date": datetime.date.today().isoformat(),
        "processor": dispatch._processor(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "torch": torch.__version__,
        "CPU capability of torch": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "fused_ops": getattr(fused_ops, "__version__", "unknown"),
    }
    if options.device.type == "cuda":
        machine["device"] = torch.cuda.get_device_name(options.device)
    if hasattr(os, "getloadavg"):
        machine["load before"] = round(os.getloadavg()[0], 2)
    return machine


def write(
    directory: Path, name: str, rows: list[dict[str, Any]], machine: dict[str, Any], verdicts: Sequence[Any], text: str
) -> None:
    """Writes the record as JSON and its table, in markdown, beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, "rows": rows, "floors": [str(verdict) for verdict in verdicts]}
    (directory / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (directory / f"{name}.md").write_text(text)
