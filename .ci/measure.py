# SPDX-License-Identifier: Apache-2.0
"""Runs a command and fails if it takes too long or too much memory: measure.py SECONDS GIGABYTES command..."""

import os
import subprocess
import sys
import time
from pathlib import Path


def descendants(root: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it ended meanwhile
                continue
    found, frontier = [root], {root}
    while frontier := {child for child, parent in parents.items() if parent in frontier}:
        found += frontier
    return found


def memory(process: int) -> int:
    """Its proportional share of what is in memory, in bytes: what several processes share counts once."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def main() -> int:
    limit_seconds, limit_gigabytes, command = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    begin, peak = time.monotonic(), 0
    child = subprocess.Popen(command)
    while child.poll() is None:
        peak = max(peak, sum(map(memory, descendants(child.pid))))
        time.sleep(0.2)
    seconds, gigabytes = time.monotonic() - begin, peak / 1e9
    print(
        f"== {seconds:.0f} s (limit {limit_seconds:.0f}), {gigabytes:.2f} GB (limit {limit_gigabytes:.2f}), "
        f"{len(os.sched_getaffinity(0))} cores: {' '.join(command)}"
    )
    if child.returncode:
        return child.returncode
    return int(seconds > limit_seconds or gigabytes > limit_gigabytes)


if __name__ == "__main__":
    sys.exit(main())
