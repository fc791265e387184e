# SPDX-License-Identifier: Apache-2.0
"""Steps over one element more than the memory holds, which memcheck must find: see benchmarks/gpu_steps.py."""

from __future__ import annotations

from typing import Any

import torch

from fused_ops import optim


class OneTooMany:
    """1,000 floats that say they are 1,001."""

    def __init__(self) -> None:
        self.memory = torch.ones(1000, device="cuda")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (1001,), "typestr": "<f4", "data": (self.memory.data_ptr(), False), "version": 2}


if __name__ == "__main__":
    floats = OneTooMany()
    param = torch.as_tensor(floats, device="cuda").requires_grad_()
    assert param.data_ptr() == floats.memory.data_ptr()
    param.grad = torch.ones(1001, device="cuda")
    optim.SGD([param], lr=0.1).step()
    torch.cuda.synchronize()
