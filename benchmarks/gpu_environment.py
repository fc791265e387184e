# SPDX-License-Identifier: Apache-2.0
"""Prints, as one line of JSON, what a GPU check depends on: the GPUs, their driver, torch and nvcc."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on PATH, or in CUDA_HOME or the usual place, as setup.py finds nvcc."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", os.defpath), *(os.path.join(home, "bin") for home in homes if home)]
    return shutil.which(name, path=os.pathsep.join(folders))


def output(program: str | None, *arguments: str) -> str | None:
    """What a program prints, or None where it is missing or fails."""
    if program is None:
        return None
    try:
        run = subprocess.run((program, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def gpus() -> tuple[list[dict[str, Any]], str | None]:
    """Every GPU that torch can use, or none and the reason."""
    import torch

    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
            reason = "no device is visible"
        except (RuntimeError, AssertionError) as error:  # what torch raises without a driver, or without CUDA
            reason = str(error).splitlines()[0]
        return [], f"torch {torch.__version__}: {reason}"
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
                "free_bytes": torch.cuda.mem_get_info(index)[0],
            }
        )
    return found, None


def facts() -> dict[str, Any]:
    import torch

    found, reason = gpus()
    release = re.search(r"release (\S+),", output(find_tool("nvcc"), "--version") or "")
    driver = output(shutil.which("nvidia-smi"), "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.date.today().isoformat(),
        "gpus": found,
        "reason": reason,
        "driver": driver.splitlines()[0] if driver else None,
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "nvcc": release[1] if release else None,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "commit": output(shutil.which("git"), "describe", "--always", "--dirty"),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
