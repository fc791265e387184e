# SPDX-License-Identifier: Apache-2.0
"""Host memory that is kept rather than given back and fetched again, page by page, at every step."""

from __future__ import annotations

import ctypes
from typing import Any

from fused_ops._build import load_native

__all__ = ["buffer_pool", "empty_cache", "keep_freed_memory", "set_buffer_pool_limit"]

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4


def keep_freed_memory(enabled: bool = True) -> bool:
    """Makes the C library keep the memory of freed tensors for the next ones, in this process, for all of PyTorch.

    By default glibc asks the kernel for fresh memory for each large tensor (from 32 MiB on, sooner for the first of a
    size) and gives it back when the tensor is freed. The kernel clears every page when it is first touched, which takes
    longer than many an operation on it. With this call freed memory stays with the process: its resident size remains
    at its peak, and memory may fragment. Call it once, before the model is made. Operations of fused_ops have a pool of
    their own and gain less: see buffer_pool().

    Args:
        enabled: False restores glibc's defaults, but for thresholds that it would have adapted. Default: True.

    Returns:
        Whether it took effect: False where the C library is not glibc.

    Reference: mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD.
    """
    try:
        libc: Any = ctypes.CDLL(None)
        libc.gnu_get_libc_version()
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return False
    if enabled:
        settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 64 << 20}
    else:
        settings = {_M_MMAP_MAX: 65536, _M_TRIM_THRESHOLD: 128 << 10, _M_TOP_PAD: 128 << 10}
        settings[_M_MMAP_THRESHOLD] = 128 << 10
    results = [mallopt(parameter, value) for parameter, value in settings.items()]  # all are set, whatever one returns
    return results == [1] * len(results)


def buffer_pool() -> dict[str, int]:
    """What the pool of fused_ops' own results of 1 MiB or more holds: outputs, saved activations, gradients on the CPU.

    Returns:
        kept_bytes: memory that no tensor uses now, kept for the next results of about the same size.
        limit_bytes: the most that is kept: an eighth of the machine's memory, or what set_buffer_pool_limit() said.
        reused, fresh: results that got kept memory, and those that did not.

    Raises:
        RuntimeError: the native library cannot be loaded.
    """
    return load_native().pool_statistics()


def empty_cache() -> None:
    """Frees the memory that buffer_pool() reports as kept.

    Raises:
        RuntimeError: the native library cannot be loaded.
    """
    load_native().release_pool()


def set_buffer_pool_limit(limit_bytes: int | None) -> None:
    """Limits what the pool keeps while no tensor uses it, and frees what exceeds that.

    Args:
        limit_bytes: 0 turns the pool off; None restores the default, an eighth of the machine's memory.

    Raises:
        TypeError: the limit is no integer.
        ValueError: the limit is negative or too large.
        RuntimeError: the native library cannot be loaded.
    """
    if limit_bytes is not None and not isinstance(limit_bytes, int):
        raise TypeError(
            f"set_buffer_pool_limit: expected limit_bytes to be an int or None, got {limit_bytes!r}. Pass whole bytes."
        )
    if limit_bytes is not None and not 0 <= limit_bytes < 2**63:
        raise ValueError(
            f"set_buffer_pool_limit: expected 0 <= limit_bytes < 2**63, got {limit_bytes}. Pass None for the default."
        )
    load_native().set_pool_limit(-1 if limit_bytes is None else limit_bytes)
