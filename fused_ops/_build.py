# SPDX-License-Identifier: Apache-2.0
"""Loads the native library and tells what it was built for, what runs here, and why something does not."""

import functools
import importlib
import importlib.metadata
import os
import platform
from typing import Any

import torch

REBUILD = "`pip install --force-reinstall --no-deps .` in its source tree"


@functools.cache
def _config() -> dict[str, Any]:
    """What setup.py wrote beside the library, or {} where nothing was built."""
    try:
        module = importlib.import_module("fused_ops._build_config")
    except ImportError:
        return {}
    return {name: value for name, value in vars(module).items() if name.isupper()}


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _major(version: str | None) -> str | None:
    return version.split(".")[0] if version else None


def _mismatch() -> str | None:
    """Why this library cannot run under this torch; loading it would only name an undefined symbol."""
    config = _config()
    if not config:
        return (
            f"fused_ops: nothing is built in {os.path.dirname(__file__)}. If that is the source tree, run "
            "`pip install -e .` in it; after `pip install .`, start Python in another folder."
        )
    built, running = config["TORCH_VERSION"], str(torch.__version__)
    rebuild = f"but torch {running} is running: rebuild it with {REBUILD}."
    if _minor(built) != _minor(running):
        return f"fused_ops: built for torch {built}, {rebuild}"
    if config["CUDA_VERSION"] and _major(config["CUDA_VERSION"]) != _major(torch.version.cuda):
        return f"fused_ops: built for a torch with CUDA {_major(config['CUDA_VERSION'])}, {rebuild}"
    return None


@functools.cache
def _load() -> tuple[Any, str | None]:
    reason = _mismatch()
    if reason is None:
        try:
            return importlib.import_module("fused_ops._C"), None
        except ImportError as error:
            detail = str(error).splitlines()[0]
            reason = f"fused_ops: the native library cannot be loaded ({detail}). Rebuild it with {REBUILD}."
    return None, reason


def load_native() -> Any:
    """Returns fused_ops._C, loaded once.

    Raises:
        RuntimeError: it was not built, was built for another torch, or cannot be loaded; says how to rebuild it.
    """
    native, reason = _load()
    if native is None:
        raise RuntimeError(reason)
    return native


def _runs_on(capability: tuple[int, int]) -> bool:
    """Whether a built architecture runs on a GPU: machine code within its major version, PTX on anything newer."""
    for architecture in _config().get("CUDA_ARCHITECTURES", ()):
        kind, number = architecture.split("_")
        major, minor = int(number.rstrip("af")[:-1]), int(number.rstrip("af")[-1])
        if number.endswith(("a", "f")):
            runs = capability == (major, minor)
        elif kind == "sm":
            runs = capability[0] == major and capability[1] >= minor
        else:
            runs = capability >= (major, minor)
        if runs:
            return True
    return False


def why_no_cuda_kernels() -> str | None:
    """Why the build left them out, in setup.py's words."""
    return _config().get("CUDA_REASON")


def _cuda_reason() -> str | None:
    """Why no CUDA device can be used at all, or None."""
    config = _config()
    if config and config["CUDA_VERSION"] is None:
        return (
            f"fused_ops: expected a build with CUDA, got a CPU-only one ({config['CUDA_REASON']}). "
            f"Rebuild it with FUSED_OPS_CUDA=1 {REBUILD}."
        )
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
            detail = "no device is visible"
        except (RuntimeError, AssertionError) as error:  # what torch raises without a driver, or without CUDA
            detail = str(error).splitlines()[0]
        return f"fused_ops: expected a CUDA device, got none. {detail}"
    return None


def _device_reason(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if _runs_on(capability):
        return None
    version = f"{capability[0]}.{capability[1]}"
    return (
        f"fused_ops: expected a GPU that runs one of {', '.join(_config().get('CUDA_ARCHITECTURES', ()))}, "
        f"got {torch.cuda.get_device_name(index)} of compute capability {version}. "
        f"Rebuild it with TORCH_CUDA_ARCH_LIST={version} {REBUILD}."
    )


@functools.cache  # keeps successes only: a call that raises is tried again
def _check_cuda(index: int) -> None:
    if reason := _cuda_reason() or _device_reason(index):
        raise RuntimeError(reason)


def check_device(device: torch.device) -> None:
    """Checks that the native library can work on a CPU or CUDA device.

    Raises:
        RuntimeError: the library cannot be loaded, is a CPU-only build, finds no usable driver, or was not built for
            this GPU.
    """
    load_native()
    if device.type == "cuda":
        if device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        _check_cuda(device.index or 0)


def _first_value(path: str, name: str, default: str) -> str:
    """The value of the first `name: value` line of a file in /proc."""
    try:
        with open(path) as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), default)
    except OSError:
        return default


def _cpu_device() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _first_value("/proc/meminfo", "MemAvailable", f"{memory // 1024} kB")
    return {
        "device": "cpu",
        "name": _first_value("/proc/cpuinfo", "model name", platform.machine()),
        "memory": memory,
        "memory_free": int(available.split()[0]) * 1024,
        "capability": None,
        "reason": None,
    }


def _cuda_device(index: int) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(index)
    return {
        "device": f"cuda:{index}",
        "name": torch.cuda.get_device_name(index),
        "memory": total,
        "memory_free": free,
        "capability": torch.cuda.get_device_capability(index),
        "reason": _device_reason(index),
    }


def _score(gpu: dict[str, Any]) -> float:
    major, minor = gpu["capability"]
    return gpu["memory_free"] * (major + minor / 10)


def _devices() -> list[dict[str, Any]]:
    """The CPU and every visible GPU; the best one is marked."""
    gpus = [] if _cuda_reason() else [_cuda_device(index) for index in range(torch.cuda.device_count())]
    usable = [gpu for gpu in gpus if gpu["reason"] is None]
    devices = [_cpu_device(), *gpus]
    best = max(usable, key=_score, default=devices[0])
    return [{**device, "best": device is best} for device in devices]


def best_device() -> torch.device:
    """Returns the usable GPU with the largest free memory times compute capability, or the CPU where there is none."""
    return torch.device(next(device["device"] for device in _devices() if device["best"]))


def build_info() -> dict[str, Any]:
    """Returns what was built and what runs here.

    Returns:
        version: of fused_ops.
        torch_built, torch_running: the versions of torch; torch_built is None where nothing was built.
        compiler: of the host code.
        native_reason: None, or why the native library cannot be used.
        cpu_levels, cpu_levels_supported, cpu_level: the instruction levels compiled, those this CPU has, the chosen.
        cuda_version, cuda_architectures: of the toolkit, and what its kernels were compiled for (sm_ machine code,
            compute_ PTX); None and () in a CPU-only build.
        cuda: whether this is a build with CUDA; cuda_reason: None, or why CUDA cannot be used.
        devices: for the CPU and each GPU: device, name, memory and memory_free in bytes, capability, reason (None, or
            why it cannot be used), best (the usable GPU with the largest free memory times compute capability, else the
            CPU).
        enabled: the backends that work here.

    Example:
        >>> import fused_ops
        >>> fused_ops.build_info()["enabled"][:1]
        ['cpu']
    """
    config = _config()
    native, reason = _load()
    cpu = native.cpu_info() if native else {"levels": [], "supported": [], "chosen": None}
    devices = _devices()
    gpu_works = any(device["capability"] and device["reason"] is None for device in devices)
    return {
        "version": config.get("VERSION") or importlib.metadata.version("fused_ops"),
        "torch_built": config.get("TORCH_VERSION"),
        "torch_running": str(torch.__version__),
        "compiler": config.get("COMPILER"),
        "native_reason": reason,
        "cpu_levels": cpu["levels"],
        "cpu_levels_supported": cpu["supported"],
        "cpu_level": cpu["chosen"],
        "cuda_version": config.get("CUDA_VERSION"),
        "cuda_architectures": config.get("CUDA_ARCHITECTURES", ()),
        "cuda": config.get("CUDA_VERSION") is not None,
        "cuda_reason": _cuda_reason(),
        "devices": devices,
        "enabled": [name for name, works in (("cpu", native), ("cuda", native and gpu_works)) if works],
    }
