# SPDX-License-Identifier: Apache-2.0
"""The pool of large results: memory is used again, given back on request, and never while a tensor has it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from fused_ops import functional, memory

ROWS, FEATURES = 512, 1024  # an output of 2 MiB


@pytest.fixture(autouse=True)
def default_pool():
    memory.set_buffer_pool_limit(None)
    memory.empty_cache()
    yield
    memory.set_buffer_pool_limit(None)
    memory.empty_cache()


def output(rows: int = ROWS) -> torch.Tensor:
    x = torch.randn(rows, 8)
    with torch.no_grad():
        return functional.linear_act(x, torch.randn(FEATURES, 8), None, "relu")


def counts() -> tuple[int, int]:
    pool = memory.buffer_pool()
    return pool["reused"], pool["fresh"]


def test_freed_memory_is_used_again() -> None:
    first = output()
    address, (reused, fresh) = first.data_ptr(), counts()
    assert address % 64 == 0
    del first
    assert memory.buffer_pool()["kept_bytes"] >= ROWS * FEATURES * 4
    second = output()
    assert second.data_ptr() == address
    assert counts() == (reused + 1, fresh)
    assert memory.buffer_pool()["kept_bytes"] == 0


def test_memory_in_use_is_not_used_again() -> None:
    tensors = [output() for _ in range(4)]
    assert len({tensor.data_ptr() for tensor in tensors}) == 4
    view = tensors[0][3:5]
    kept = view.clone()
    del tensors
    others = [output() for _ in range(4)]
    assert torch.equal(view, kept)
    assert all(other.data_ptr() + 3 * FEATURES * 4 != view.data_ptr() for other in others)


@pytest.mark.parametrize(
    ("rows", "shared"), [(ROWS, True), (ROWS * 9 // 10, True), (ROWS // 2, False), (ROWS + 1, False)]
)
def test_only_memory_of_about_the_size_is_used_again(rows: int, shared: bool) -> None:
    first = output()
    address = first.data_ptr()
    del first
    assert (output(rows).data_ptr() == address) == shared


def test_small_results_are_not_pooled() -> None:
    before = counts()
    output(8)
    assert counts() == before


def test_limit_and_empty_cache() -> None:
    tensors = [output() for _ in range(4)]
    size = ROWS * FEATURES * 4
    memory.set_buffer_pool_limit(2 * size)
    del tensors
    assert memory.buffer_pool()["kept_bytes"] == 2 * size
    assert memory.buffer_pool()["limit_bytes"] == 2 * size
    memory.empty_cache()
    assert memory.buffer_pool()["kept_bytes"] == 0
    assert memory.buffer_pool()["limit_bytes"] == 2 * size
    memory.set_buffer_pool_limit(0)
    output()
    assert memory.buffer_pool()["kept_bytes"] == 0
    with pytest.raises(ValueError, match=r"expected 0 <= limit_bytes < 2\*\*63, got -1\. [A-Z]"):
        memory.set_buffer_pool_limit(-1)
    with pytest.raises(TypeError, match="expected limit_bytes to be an int or None, got '1 GB'"):
        memory.set_buffer_pool_limit("1 GB")  # type: ignore[arg-type]


def test_pooled_tensors_can_be_resized_and_shared() -> None:
    tensor = output()
    values = tensor.clone()
    tensor.resize_(ROWS * 3, FEATURES)
    assert torch.equal(tensor[:ROWS], values)
    other = output()
    other.share_memory_()
    assert other.is_shared()


def test_threads_never_share_a_result() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x, weight = torch.randn(ROWS, 8, generator=generator), torch.randn(FEATURES, 8, generator=generator)
        with torch.no_grad():
            expected = torch.relu(x @ weight.t())
            for _ in range(20):
                if not torch.allclose(functional.linear_act(x, weight, None, "relu"), expected, atol=1e-4):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FAULTS = """
import resource, sys, torch
import fused_ops
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
if sys.argv[1] == "keep":
    assert fused_ops.keep_freed_memory()
x = torch.ones(48 << 18)  # 48 MiB, more than glibc ever keeps by itself
for _ in range(2):
    x + 1
before = faults()
for _ in range(4):
    x + 1
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults as Linux does")
def test_keep_freed_memory_saves_page_faults() -> None:
    counted = {}
    for mode in ("default", "keep"):
        run = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
        counted[mode] = int(run.stdout)
    assert counted["default"] > 4 * 12  # a fault for each 4 MiB at the very least, with the largest pages
    assert counted["keep"] < counted["default"] / 4


def test_keep_freed_memory_can_be_undone() -> None:
    assert memory.keep_freed_memory() == memory.keep_freed_memory(False)
