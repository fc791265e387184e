# SPDX-License-Identifier: Apache-2.0
"""The parameter shapes that optimizers are measured on: one huge tensor, real models, many small tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import prod

import torch
from torch.nn import Parameter

Shape = tuple[int, ...]

# Large tensors that start exactly a power of two apart compete for the same cache sets and memory banks, which halves
# the speed of every contender. Storage a little larger than the tensor moves the next allocation off that spacing.
PADDED_FROM_BYTES = 1 << 20
PADDING_BYTES = 64 << 10


@dataclass(frozen=True)
class ParameterSet:
    """A named list of parameter shapes."""

    name: str
    title: str
    shapes: tuple[Shape, ...]

    @property
    def numel(self) -> int:
        return sum(prod(shape) for shape in self.shapes)


def gpt2_small_shapes() -> list[Shape]:
    """The 148 parameters of GPT-2 small (12 blocks, width 768, tied output embedding): 124,439,808 elements."""
    width = 768
    norm = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *(norm + attention + norm + mlp) * 12, *norm]


def resnet50_shapes() -> list[Shape]:
    """The 161 parameters of ResNet-50 (bottleneck blocks 3, 4, 6, 3): 25,557,032 elements."""

    def convolution(out_channels: int, in_channels: int, kernel: int) -> list[Shape]:
        return [(out_channels, in_channels, kernel, kernel), (out_channels,), (out_channels,)]  # weight, batch norm

    shapes = convolution(64, 3, 7)
    in_channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(width, in_channels, 1) + convolution(width, width, 3)
            shapes += convolution(4 * width, width, 1)
            if block == 0:
                shapes += convolution(4 * width, in_channels, 1)  # the shortcut changes the number of channels
            in_channels = 4 * width
    return [*shapes, (1000, in_channels), (1000,)]


def llama_shapes() -> list[Shape]:
    """The 146 parameters of a Llama model of 1B (16 blocks, width 2048, 8 of 32 heads for keys and values, tied
    embedding): 1,235,814,400 elements."""
    width, hidden, keys = 2048, 8192, 512
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    mlp = [(hidden, width), (hidden, width), (width, hidden)]
    return [(128256, width), *(attention + mlp + [(width,), (width,)]) * 16, (width,)]


def small_shapes(count: int = 2000, smallest: int = 256, largest: int = 4096, seed: int = 0) -> list[Shape]:
    """`count` vectors whose lengths are log-uniform between `smallest` and `largest`."""
    generator = random.Random(seed)
    return [(round(smallest * (largest / smallest) ** generator.random()),) for _ in range(count)]


PARAMETER_SETS = {
    parameter_set.name: parameter_set
    for parameter_set in (
        ParameterSet("a", "one tensor of 64M", ((64 << 20,),)),
        ParameterSet("b", "GPT-2 small, 148 tensors", tuple(gpt2_small_shapes())),
        ParameterSet("c", "2,000 small tensors", tuple(small_shapes())),
        ParameterSet("d", "ResNet-50, 161 tensors", tuple(resnet50_shapes())),
        ParameterSet("llama", "Llama 1B, 146 tensors", tuple(llama_shapes())),
        # With one element a tensor the kernel costs next to nothing, so a step's time is its overhead.
        ParameterSet("scalars", "2,000 tensors of 1 element", ((1,),) * 2000),
    )
}


def random_tensor(shape: Shape, dtype: torch.dtype, device: torch.device, scale: float) -> torch.Tensor:
    numel = prod(shape)
    padding = PADDING_BYTES // dtype.itemsize if numel * dtype.itemsize >= PADDED_FROM_BYTES else 0
    storage = torch.empty(numel + padding, dtype=dtype, device=device)
    return storage[:numel].normal_(0.0, scale).view(shape)


def make_parameters(
    shapes: tuple[Shape, ...], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> list[Parameter]:
    """Parameters with gradients, of the size that weights and gradients have in practice (about 0.02 and 0.01)."""
    torch.manual_seed(seed)
    parameters = [Parameter(random_tensor(shape, dtype, device, 0.02)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = random_tensor(tuple(parameter.shape), dtype, device, 0.01)
    return parameters
