# SPDX-License-Identifier: Apache-2.0
"""Runs a command and says what it took against its limits: measure.py SECONDS GIGABYTES command...

Over a limit it says MISSED. It fails only at twice the limit, since others may be using the machine.
"""

import os
import resource
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


def memory(process: int) -> tuple[int, int]:
    """Bytes that a process holds in memory: its own, and with its share of mapped files, which the system may drop."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    values = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines[1:])}
    return values.get("Pss_Anon", 0), values.get("Pss", 0)


def main() -> int:
    limit_seconds, limit_gigabytes, command = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    begin, peak, peak_with_files = time.monotonic(), 0, 0
    child = subprocess.Popen(command)
    while child.poll() is None:
        held = [memory(process) for process in descendants(child.pid)]
        peak = max(peak, sum(own for own, _ in held))
        peak_with_files = max(peak_with_files, sum(total for _, total in held))
        time.sleep(0.2)
    seconds, gigabytes = time.monotonic() - begin, peak / 1e9
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    missed = "MISSED: " if seconds > limit_seconds or gigabytes > limit_gigabytes else ""
    print(
        f"== {missed}{seconds:.0f} s (limit {limit_seconds:.0f}; {used.ru_utime + used.ru_stime:.0f} s of processor, "
        f"{len(os.sched_getaffinity(0))} cores), {gigabytes:.2f} GB (limit {limit_gigabytes:.2f}; "
        f"{peak_with_files / 1e9:.2f} with mapped files): {' '.join(command)}"
    )
    if child.returncode:
        return child.returncode
    return int(seconds > 2 * limit_seconds or gigabytes > 2 * limit_gigabytes)


if __name__ == "__main__":
    sys.exit(main())
