# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: streams, graphs, synchronization, memory, several devices, failing launches.

Each test also runs with the host in the GPU's place, so that its own logic is tested where there is no GPU.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import missing
from reference import (
    ALL_CONFIGS,
    BACKENDS,
    OPTIMIZERS,
    Oracle,
    Problem,
    assert_agrees,
    assert_follows,
    assert_gaps_untouched,
    bits,
    config_of,
    same_bits,
    stock,
    twin,
)
from torch import Tensor
from torch.optim import Optimizer

pytestmark = pytest.mark.filterwarnings("error:.*own step:UserWarning")  # stock's step ran, not ours

ROOT = Path(__file__).resolve().parents[1]
SHAPES = [(5, 7), (1030,), (), (0,), (4000,)]
CAPTURABLE = ["Adam", "AdamW", "RMSprop"]


@contextlib.contextmanager
def synchronizing_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Gpu:
    """What the tests do with a device."""

    name = "cuda"
    huge = 2**31 + 1  # more elements than 32 bits count

    def make(self, name: str, params: Sequence[Tensor], **config: Any) -> Optimizer:
        return BACKENDS["cuda"].make(name, params, **config)

    @property
    def device(self) -> str:
        return self.name

    def several(self) -> list[str]:
        count = torch.cuda.device_count()
        if count < 2:
            pytest.skip("there is one GPU; this needs several")
        return [f"cuda:{index}" for index in range(count)]

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def using(self, device: str) -> AbstractContextManager[Any]:
        return torch.cuda.device(device)

    def stream(self, device: str | None = None) -> Any:
        return torch.cuda.Stream(device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def occupy(self) -> None:
        """Keeps the current stream busy for a tenth of a second or more."""
        torch.cuda._sleep(300_000_000)

    def is_busy(self, stream: Any) -> bool:
        return not stream.query()

    def wait(self, stream: Any, other: Any) -> None:
        """What `stream` does next comes after what `other` has been told to do."""
        stream.wait_stream(other)

    def synchronize(self) -> None:
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)

    def without_synchronizing(self) -> AbstractContextManager[None]:
        return synchronizing_is_an_error()

    def memory(self) -> tuple[int, int]:
        """Bytes that tensors hold, and how often any have been allocated."""
        stats = torch.cuda.memory_stats()
        return stats["allocated_bytes.all.current"], stats["allocation.all.allocated"]

    def peak_bytes(self, work: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated()

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Records the work without doing it; returns what does it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay


class HostInItsPlace(Gpu):
    name = "cpu"
    huge = 2**12 + 1

    def make(self, name: str, params: Sequence[Tensor], **config: Any) -> Optimizer:
        return BACKENDS["cpu"].make(name, params, **config)

    def several(self) -> list[str]:
        return ["cpu", "cpu"]

    def current_device(self) -> int:
        return 0

    def using(self, device: str) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def stream(self, device: str | None = None) -> Any:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def occupy(self) -> None:
        pass

    def is_busy(self, stream: Any) -> bool:
        return True

    def wait(self, stream: Any, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def without_synchronizing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def memory(self) -> tuple[int, int]:
        return 0, 0

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return 0

    def free_bytes(self) -> int:
        return 2**40

    def capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        return work


@pytest.fixture(scope="module", autouse=True)
def only_new_objects_are_collected() -> Iterator[None]:
    """What imports and other files leave, torch's graphs above all, makes each collection here many times slower."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=[pytest.param(Gpu, marks=pytest.mark.cuda), HostInItsPlace], ids=["cuda", "host"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    reason = missing(request.param.name)
    if reason:
        pytest.skip(reason)
    yield request.param()
    gc.collect()
    if request.param is Gpu:
        torch.cuda.empty_cache()


def on_device(gpu: Gpu, name: str) -> dict[str, Any]:
    """The configuration in which the device keeps the step counters and the learning rate."""
    return config_of(name, "all") | {"capturable": True, "lr": torch.tensor(0.02, device=gpu.device)}


def oracle(name: str, problem: Problem, config: dict[str, Any]) -> Oracle:
    return Oracle.of(name, problem, **{key: value for key, value in config.items() if key != "capturable"})


def late_gradients(problem: Problem) -> list[Tensor]:
    """Gradients of NaN for the parameters, to be written later."""
    late = [torch.full_like(grad, math.nan) for grad in problem.grads[0]]
    for param, grad in zip(problem.params, late, strict=True):
        param.grad = grad
    return late


def write(late: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for target, grad in zip(late, grads, strict=True):
        target.copy_(grad, non_blocking=True)


def configurations(gpu: Gpu, name: str) -> list[dict[str, Any]]:
    return [config_of(name, "all"), *([on_device(gpu, name)] if name in CAPTURABLE else [])]


# ---- streams ----


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_runs_on_the_current_stream(gpu: Gpu, name: str) -> None:
    """It comes after the gradients that a busy stream has yet to write, and waits for nothing."""
    for config in configurations(gpu, name):
        problem = Problem(SHAPES, device=gpu.device)
        optimizer = gpu.make(name, problem.params, **config)
        problem.assign(0)
        optimizer.step()
        late, side = late_gradients(problem), gpu.stream()
        gpu.synchronize()
        with gpu.on(side):
            for step in range(1, problem.steps):
                gpu.occupy()
                write(late, problem.grads[step])
                optimizer.step()
        assert gpu.is_busy(side), "a step has waited for the device"
        gpu.synchronize()
        assert_agrees(optimizer, problem.params, oracle(name, problem, config))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_one_stream_after_a_step_on_another(gpu: Gpu, name: str) -> None:
    for config in configurations(gpu, name):
        problem = Problem(SHAPES, device=gpu.device)
        optimizer, late = gpu.make(name, problem.params, **config), late_gradients(problem)
        streams = [gpu.stream(), gpu.stream()]
        gpu.synchronize()
        for step in range(problem.steps):
            stream, other = streams[step % 2], streams[1 - step % 2]
            gpu.wait(stream, other)
            with gpu.on(stream):
                gpu.occupy()
                write(late, problem.grads[step])
                optimizer.step()
        gpu.synchronize()
        assert_agrees(optimizer, problem.params, oracle(name, problem, config))


@pytest.mark.parametrize(("first", "second"), list(zip(OPTIMIZERS, OPTIMIZERS[1:] + OPTIMIZERS[:1], strict=True)))
def test_two_optimizers_on_two_streams(gpu: Gpu, first: str, second: str) -> None:
    results = []
    for together in (False, True):
        problems = [Problem(SHAPES, device=gpu.device, seed=seed) for seed in (0, 1)]
        configs = [configurations(gpu, name)[-1] for name in (first, second)]
        optimizers = [
            gpu.make(name, problem.params, **config)
            for name, problem, config in zip((first, second), problems, configs, strict=True)
        ]
        streams = [gpu.stream(), gpu.stream()]
        gpu.synchronize()
        for step in range(problems[0].steps):
            for problem, optimizer, stream in zip(problems, optimizers, streams, strict=True):
                with gpu.on(stream) if together else contextlib.nullcontext():
                    problem.assign(step)
                    optimizer.step()
        gpu.synchronize()
        results.append([bits(o, p.params) for o, p in zip(optimizers, problems, strict=True)])
        for name, problem, optimizer, config in zip((first, second), problems, optimizers, configs, strict=True):
            assert_agrees(optimizer, problem.params, oracle(name, problem, config))
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))


# ---- graphs ----


@pytest.mark.parametrize("name", CAPTURABLE)
def test_replays_follow_the_learning_rate(gpu: Gpu, name: str) -> None:
    """A captured step, replayed with another learning rate each time, against eager steps and against stock's."""
    rates = [0.02, 0.03, 0.005, 0.04, 0.001, 0.1]
    eager_steps = 2  # before the capture, as torch asks for
    results = []
    for capture_from in (len(rates), eager_steps):
        problem = Problem(SHAPES, device=gpu.device, steps=len(rates))
        optimizer = gpu.make(name, problem.params, **on_device(gpu, name))
        late, lr = late_gradients(problem), optimizer.param_groups[0]["lr"]
        take_step: Callable[[], Any] = optimizer.step
        side = gpu.stream()
        gpu.synchronize()
        for step, rate in enumerate(rates):
            if step == capture_from:
                gpu.synchronize()
                before = bits(optimizer, problem.params)
                take_step = gpu.capture(optimizer.step)
                gpu.synchronize()
                assert same_bits(before, bits(optimizer, problem.params)), "the capture has stepped"
            with gpu.on(side):
                write(late, problem.grads[step])
                lr.fill_(rate)
                take_step()
            gpu.synchronize()
        results.append(bits(optimizer, problem.params))

        other = twin(problem)
        theirs = stock(name, other.params, **config_of(name, "all"))
        for step, rate in enumerate(rates):
            theirs.param_groups[0]["lr"] = rate
            other.run(theirs, steps=[step])
        assert_follows(optimizer, problem.params, theirs, other.params)
    assert same_bits(*results)


# ---- synchronization and memory ----


@pytest.mark.cuda
def test_the_check_for_synchronization_works() -> None:
    reason = missing("cuda")
    if reason:
        pytest.skip(reason)
    value = torch.ones((), device="cuda")
    with synchronizing_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()
    assert value.item() == 1


@pytest.mark.parametrize(("name", "config"), ALL_CONFIGS)
def test_steps_neither_synchronize_nor_allocate(gpu: Gpu, name: str, config: str) -> None:
    problem = Problem(SHAPES, device=gpu.device, steps=2)
    optimizer = gpu.make(name, problem.params, **config_of(name, config))
    problem.run(optimizer)
    gc.collect()  # not during the steps
    before = gpu.memory()
    with gpu.without_synchronizing():
        for _ in range(20):
            optimizer.step()
    assert gpu.memory() == before


@pytest.mark.parametrize("name", CAPTURABLE)
def test_memory_does_not_grow_where_the_device_counts_the_steps(gpu: Gpu, name: str) -> None:
    problem = Problem(SHAPES, device=gpu.device, steps=2)
    optimizer = gpu.make(name, problem.params, **on_device(gpu, name))

    def steps() -> None:
        with gpu.without_synchronizing():
            for _ in range(20):
                optimizer.step()

    for step in range(problem.steps):
        problem.assign(step)
        optimizer.step()
    gc.collect()
    before, _ = gpu.memory()
    peak = gpu.peak_bytes(steps)
    assert gpu.memory()[0] == before
    assert peak - before <= 64 << 10  # the rules that the device builds, one a parameter


SCALE = 1024.0  # a power of two: scaling and unscaling are exact


@pytest.mark.parametrize("bad", [None, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_steps_do_not_synchronize(gpu: Gpu, name: str, bad: float | None) -> None:
    """GradScaler's finding stays on the device: a skipped step costs no waiting, and leaves no trace."""
    problem = Problem(SHAPES, device=gpu.device)
    config = config_of(name, "all")
    optimizer = gpu.make(name, problem.params, **config)
    scaler = torch.amp.GradScaler(gpu.device, init_scale=SCALE, growth_interval=10_000)
    scaler.scale(torch.ones((), device=gpu.device))  # makes the scale tensor
    scales = [SCALE, SCALE, SCALE, SCALE if bad is None else SCALE / 2]
    scaled = [[grad * scale for grad in grads] for grads, scale in zip(problem.grads, scales, strict=True)]
    if bad is not None:
        scaled[2][1][-1] = bad
    for step, grads in enumerate(scaled):
        for param, grad in zip(problem.params, grads, strict=True):
            param.grad = grad
        with gpu.without_synchronizing() if step > 0 else contextlib.nullcontext():  # at first the counters move
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == scales[-1]
    if bad is not None:
        del problem.grads[2]
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **config))


# ---- size ----


@pytest.mark.parametrize(
    ("name", "dtype", "tensors"), [("Adam", torch.bfloat16, 4), ("RMSprop", torch.float32, 3)], ids=str
)
def test_more_elements_than_32_bits_count(gpu: Gpu, name: str, dtype: torch.dtype, tensors: int) -> None:
    """Every element of one huge tensor has the bits that it gets as an element of a smaller one."""
    part = (gpu.huge - 1) // 16  # the last part is of one element
    needed = tensors * (gpu.huge + 4 * part) * dtype.itemsize
    if gpu.free_bytes() < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free memory on the GPU")

    def values(seed: int, count: int) -> Tensor:
        generator = torch.Generator(gpu.device).manual_seed(seed)
        return torch.randn(count, generator=generator, device=gpu.device).to(dtype)

    def step(param: Tensor) -> dict[str, Tensor]:
        optimizer = gpu.make(name, [param], lr=0.02)
        for _ in range(2):
            optimizer.step()
        state = {key: value for key, value in optimizer.state[param].items() if key != "step"}
        return {"param": param.detach(), **state}

    param, param.grad = (torch.empty(gpu.huge, dtype=dtype, device=gpu.device) for _ in range(2))
    for index, (piece, grad) in enumerate(zip(param.split(part), param.grad.split(part), strict=True)):
        piece.copy_(values(2 * index, len(piece)))
        grad.copy_(values(2 * index + 1, len(piece)))
    whole = step(param)
    assert len(whole) == tensors - 1
    for index in range(17):
        begin, end = index * part, min((index + 1) * part, gpu.huge)
        small = values(2 * index, end - begin)
        before = small.clone()
        small.grad = values(2 * index + 1, end - begin)
        for key, expected in step(small).items():
            assert torch.equal(whole[key][begin:end], expected), f"{key}: elements {begin} to {end}"
        assert float((small != before).float().mean()) > 0.9


# ---- several devices ----


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_optimizer_over_several_gpus(gpu: Gpu, name: str) -> None:
    devices, current = gpu.several(), gpu.current_device()
    for config in configurations(gpu, name):
        problem = Problem(SHAPES, device=[devices[index % len(devices)] for index in range(len(SHAPES))])
        optimizer = gpu.make(name, problem.params, **config)
        for step in range(problem.steps):
            problem.assign(step)
            optimizer.step()
        gpu.synchronize()
        assert gpu.current_device() == current
        assert_agrees(optimizer, problem.params, oracle(name, problem, config))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_stream_is_that_of_the_tensors_device(gpu: Gpu, name: str) -> None:
    """Also while another device is the current one."""
    here, there = gpu.several()[:2]
    problem = Problem(SHAPES, device=there)
    config = config_of(name, "all")
    optimizer, late, side = gpu.make(name, problem.params, **config), late_gradients(problem), gpu.stream(there)
    gpu.synchronize()
    with gpu.on(side):
        for step in range(problem.steps):
            gpu.occupy()
            write(late, problem.grads[step])
            with gpu.using(here):
                optimizer.step()
    gpu.synchronize()
    assert_agrees(optimizer, problem.params, oracle(name, problem, config))


# ---- errors ----

# In a process of its own. A capture that a forbidden call has ended refuses every later launch into it.
FAILING_LAUNCH = """
import os
import torch
from fused_ops import optim

param = torch.ones(5, device="cuda", requires_grad=True)
param.grad = torch.ones_like(param)
optimizer = optim.SGD([param], lr=0.1)
optimizer.step()
torch.cuda.synchronize()
graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.stream(side):
    graph.capture_begin()
    try:
        side.synchronize()
    except RuntimeError:
        pass
    try:
        optimizer.step()
    except RuntimeError as error:
        print(error, flush=True)
os._exit(0)
"""


@pytest.mark.cuda
def test_a_failed_launch_names_the_operation_and_the_device() -> None:
    reason = missing("cuda")
    if reason:
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FAILING_LAUNCH]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    expected = r"sgd: the CUDA launch over 1 parameters on cuda:0 failed: .*captur.*\. Set CUDA_LAUNCH_BLOCKING"
    assert re.search(expected, ended.stdout), ended.stdout + ended.stderr


# ---- for compute-sanitizer ----

ROWS = [  # shape, dtype, layout of the parameter, layout of the gradient
    ((4099,), torch.float32, "contiguous", "contiguous"),
    ((1030,), torch.bfloat16, "offset", "contiguous"),
    ((129,), torch.float16, "contiguous", "offset"),
    ((33, 17), torch.float32, "every_other", "transposed"),
    ((2, 3, 4, 5), torch.bfloat16, "channels_last", "contiguous"),
    ((19,), torch.float64, "offset", "contiguous"),
    ((5, 7), torch.complex64, "padded_rows", "contiguous"),
    ((6, 4), torch.float32, "transposed", "expanded"),
    ((), torch.float32, "contiguous", "contiguous"),
    ((0,), torch.float32, "contiguous", "contiguous"),
]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_short_set(gpu: Gpu, name: str, scaled: bool) -> None:
    """Both kernels, every path and storage type through them, in few and small launches."""
    shapes, dtypes, layouts, grad_layouts = (list(column) for column in zip(*ROWS, strict=True))
    problem = Problem(shapes, dtype=dtypes, layout=layouts, grad_layout=grad_layouts, device=gpu.device, steps=2)
    config = config_of(name, "all")
    optimizer = gpu.make(name, problem.params, **config)
    factor = 8.0 if scaled else 1.0
    if scaled:  # the device then builds the rules
        attributes: Any = optimizer
        attributes.grad_scale = torch.full((), factor, device=gpu.device)
        attributes.found_inf = torch.zeros((), device=gpu.device)
    for grads in problem.grads:
        for param, grad in zip(problem.params, grads, strict=True):
            param.grad = grad * factor
        optimizer.step()
    assert_agrees(optimizer, problem.params, Oracle.of(name, problem, **config), ulps=3)
    for param, layout in zip(problem.params, layouts, strict=True):
        if layout in ("every_other", "padded_rows", "offset"):
            assert_gaps_untouched(param)
