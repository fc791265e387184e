# SPDX-License-Identifier: Apache-2.0
"""Backends as a fixture: a test that takes ``backend`` runs on each, and is skipped, with the reason, without one."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterator

import pytest
import torch
from reference import BACKENDS, Backend


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU and a CUDA build of the package")
    config.addinivalue_line("markers", "large: needs 10 GB of memory, or many minutes; set FUSED_OPS_LARGE_TESTS=1")


def missing(name: str) -> str | None:
    """Why a backend cannot run here, or None."""
    if name != "cuda":
        return None
    if not torch.cuda.is_available():
        return "no CUDA device, or a torch built without CUDA"
    import fused_ops

    return None if fused_ops.build_info().get("cuda") else "fused_ops was built without CUDA"


@functools.cache
def emulated_native() -> types.SimpleNamespace:
    """fused_ops._C with steps over host tensors on the emulated CUDA backend."""
    from emulated import build

    import fused_ops._build

    native = vars(fused_ops._build.load_native()) | {"StepPlan": build.module().StepPlan}
    return types.SimpleNamespace(**{name: value for name, value in native.items() if not name.startswith("__")})


MARKS = {"cuda": pytest.mark.cuda, "emulated": pytest.mark.slow}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in BACKENDS])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    reason = missing(request.param)
    if reason:
        pytest.skip(reason)
    if request.param == "emulated":
        monkeypatch.setattr("fused_ops.optim.base.load_native", emulated_native)
    return BACKENDS[request.param]


@pytest.fixture
def process_group() -> Iterator[None]:
    """For DistributedDataParallel in one process. All of it must have gone before the group does, whose thread would
    otherwise wait for the interpreter's lock while that is held to wait for the thread."""
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    import torch.distributed as dist

    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """For what is one operator on every device."""
    reason = missing(request.param)
    if reason:
        pytest.skip(reason)
    return request.param
