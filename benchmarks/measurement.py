# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing, the bandwidth limit, temporary memory, a competing process, and the check against the oracle."""

from __future__ import annotations

import ctypes
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from contenders import LR, Contender, OptimizerCase
from torch.nn import Parameter

Routine = Callable[[], Any]
Clock = Callable[[Routine, torch.device], float]

FASTEST_CLOCK = 3e9  # Hz; no GPU's multiprocessors run faster
VERIFIED_STEPS = 3
VERIFIED_ELEMENTS = 64  # of every parameter


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)


def seconds(routine: Routine, device: torch.device) -> float:
    start = time.perf_counter()
    routine()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def host_seconds(routine: Routine, device: torch.device) -> float:
    """Until the call returns, with nothing waiting on the device before it."""
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    routine()
    taken = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return taken


def kernel_seconds(routine: Routine, device: torch.device) -> float:
    """Between events around what the routine enqueues, on a device kept busy until all of it is enqueued.

    A queue holds about a thousand launches: a routine that makes more waits for the device, and its waits count.
    """
    wait = 1.5 * host_seconds(routine, device) + 1e-4
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(round(wait * FASTEST_CLOCK))
    start.record()
    routine()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def interleave(
    routines: dict[str, Routine],
    device: torch.device,
    *,
    clock: Clock = seconds,
    budget: float,
    rounds: tuple[int, int],
    between: Routine = lambda: None,
    turn: float = 0.02,
) -> dict[str, list[float]]:
    """Seconds a call, one value a round for each routine, all routines taking turns in every round.

    A machine's speed drifts, so only values of the same round are compared. A turn is one untimed call, which brings
    the routine's own data back into the caches, then as many timed ones as fit in `turn` seconds; its value is their
    median. The order rotates, so that no routine always follows the same other one.

    Args:
        clock: how a call is timed.
        budget: seconds to spend; rounds stop when it is spent.
        rounds: at least and at most this many.
        between: called before each round, untimed.
    """
    calls = {}
    for name, routine in routines.items():
        estimate = min(clock(routine, device) for _ in range(2))
        calls[name] = max(1, min(50, round(turn / estimate)))
    values: dict[str, list[float]] = {name: [] for name in routines}
    order = list(routines)
    deadline = time.monotonic() + budget
    collecting = gc.isenabled()
    gc.disable()
    try:
        while len(values[order[0]]) < rounds[1]:
            if len(values[order[0]]) >= rounds[0] and time.monotonic() > deadline:
                break
            between()
            order = order[1:] + order[:1]
            for name in order:
                clock(routines[name], device)
                turns = [clock(routines[name], device) for _ in range(calls[name])]
                values[name].append(statistics.median(turns))
    finally:
        if collecting:
            gc.enable()
    return values


class BandwidthLimit:
    """Reads and writes a buffer larger than any cache: the rate that no optimizer step can beat for long.

    On the CPU in place; on a GPU as a device-to-device copy.
    """

    def __init__(self, device: torch.device, megabytes: int = 512) -> None:
        self.buffer = torch.ones(megabytes << 18, device=device)  # fp32: 2^18 elements are a MiB
        self.bytes_moved = 2 * self.buffer.nbytes
        if device.type == "cpu":
            self.native = import_module("fused_ops._C").read_modify_write
        else:
            self.copy = torch.empty_like(self.buffer)

    def __call__(self) -> None:
        if self.buffer.is_cpu:
            self.native(self.buffer, 1, torch.get_num_threads())
        else:
            self.copy.copy_(self.buffer)


def temporary_bytes(routine: Routine, device: torch.device) -> int | None:
    """How far memory rises above its level before the call while `routine` runs; None where that cannot be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        routine()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # free memory that the allocator kept would hide temporaries
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the high-water mark
        before = _status_bytes("VmRSS")
        routine()
        return max(0, _status_bytes("VmHWM") - before)
    except (OSError, AttributeError, LookupError):
        return None


def _status_bytes(key: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise LookupError(key)


@contextmanager
def competing_process(active: bool) -> Iterator[None]:
    """One busy process beside the measurement; it ends by itself should this process die."""
    if not active:
        yield
        return
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100000))"
    process = subprocess.Popen([sys.executable, "-c", loop])
    try:
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def tolerance(dtype: torch.dtype, contender: Contender) -> tuple[float, float]:
    """Bound on a parameter's error after `VERIFIED_STEPS` steps: in parts of its value and of how far it has moved."""
    of_value = VERIFIED_STEPS * torch.finfo(dtype).eps  # half a unit for the result and half for what leads to it
    if not contender.exact:
        return of_value, 0.5
    if torch.bfloat16 in (dtype, contender.state_dtype):
        return of_value, 2**-5  # the state, and stock's intermediate values, are rounded to 8 bits each time
    return of_value, 1e-5


def verify(step: Routine, parameters: list[Parameter], case: OptimizerCase, contender: Contender) -> str | None:
    """Steps the contender and a float64 stock optimizer from the same point; None, or what differs.

    The optimizers work on each element alone, so the first elements of every parameter stand for all.
    """

    def head(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1)[:VERIFIED_ELEMENTS].double()

    start = torch.cat([head(parameter) for parameter in parameters])
    references = [Parameter(head(parameter).clone()) for parameter in parameters]
    for reference, parameter in zip(references, parameters, strict=True):
        assert parameter.grad is not None
        reference.grad = head(parameter.grad)
    oracle = getattr(torch.optim, case.class_name)(references, lr=LR, foreach=False, **case.arguments)
    for _ in range(VERIFIED_STEPS):
        oracle.step()
        step()
    of_value, of_movement = tolerance(parameters[0].dtype, contender)
    expected = torch.cat([reference.detach() for reference in references])
    error = (torch.cat([head(parameter) for parameter in parameters]) - expected).abs()
    excess = error - of_value * expected.abs() - of_movement * (expected - start).abs()
    if bool((excess <= 0).all()):
        return None
    return f"differs from the float64 oracle by {error[excess.argmax()].item():.3g} after {VERIFIED_STEPS} steps"
