# SPDX-License-Identifier: Apache-2.0
"""What runs where on the CPU: whose matrix product, and whether a fused block or torch's own operators.

A table of choices, each measured on some machine, says for which sizes an alternative is faster than the default. The
defaults are torch's own matrix product (MKL or OpenBLAS for float32) and the fused block; the alternatives are oneDNN's
product and torch's own operators. Products of small float16 or bfloat16 matrices, at most some thousand
multiplications, and of very small float32 ones are a loop of this package by default. A choice holds for all sizes
between the same powers of two: 512 to 1023 are one. Results differ between choices by rounding only.

The table is made of, later ones overriding earlier ones:

1. defaults, measured for this processor's vendor;
2. the file that tune() has written for this processor, number of threads and minor version of torch: see tuning_file();
3. set_choices().

FUSED_OPS_TUNING=off in the environment leaves the table empty at the start, and tune() then saves nothing;
FUSED_OPS_TUNING=PATH names another file.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops import functional
from fused_ops._build import _first_value, load_native
from fused_ops.nn.activation import ACTIVATIONS, Activation

__all__ = ["Choice", "choices", "default_choices", "reset", "runs_by_default", "set_choices", "tune", "tuning_file"]

FORMAT = 1
DTYPES = ("float32", "float64", "bfloat16", "float16")
ONEDNN_DTYPES = ("float32", "bfloat16")
PRODUCTS = ("forward", "grad_input", "grad_weight")
PROVIDERS = ("aten", "onednn", "loop")
SHAPES = ((16, 10, 10), (128, 784, 512), (512, 768, 3072), (2048, 1024, 4096), (64, 4096, 11008), (16384, 256, 1024))
SHAPES += ((65536, 64, 64), (8, 768, 3072))
MARGIN = 1.05  # an alternative has to be this much faster: two equal routines measure a few percent apart


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 0 < size < 2**62


@dataclass(frozen=True)
class Choice:
    """What is faster for matrices [m, k] times [k, n].

    Args:
        operation: "forward", "grad_input" or "grad_weight", which choose the provider of that matrix product; or the
            name of an activation, which chooses how a linear layer with that activation runs, inference and training
            apart. Blocks with a gate or a down projection are always fused: they save memory too.
        dtype: e.g. "float32".
        m, k, n: sizes; each stands for all of the same power of two.
        faster: "aten", "onednn" or "loop" for a product, "fused" or "stock" for an activation. Sizes that the loop does
            not take go to aten.
        training: of an activation: whether gradients are wanted. Default: True.
    """

    operation: str
    dtype: str
    m: int
    k: int
    n: int
    faster: str
    training: bool = True

    def __post_init__(self) -> None:
        wanted = PROVIDERS if self.operation in PRODUCTS else ("fused", "stock")
        if self.faster not in wanted:
            raise ValueError(
                f"Choice: expected faster in ({', '.join(wanted)}) for {self.operation}, got {self.faster!r}."
            )
        if self.operation not in (*PRODUCTS, *ACTIVATIONS):
            names = ", ".join((*PRODUCTS, *ACTIVATIONS))
            raise ValueError(f"Choice: expected operation in ({names}), got {self.operation!r}.")
        dtypes = ONEDNN_DTYPES if self.faster == "onednn" else DTYPES
        if self.dtype not in dtypes:
            raise ValueError(f"Choice: expected dtype in ({', '.join(dtypes)}) for {self.faster}, got {self.dtype!r}.")
        for size in (self.m, self.k, self.n):
            if not _is_size(size):
                raise ValueError(f"Choice: expected sizes to be positive integers, got {size!r}.")
        if not isinstance(self.training, bool):
            raise ValueError(f"Choice: expected training to be True or False, got {self.training!r}.")

    @property
    def _place(self) -> tuple[Any, ...]:
        """What the choice is for: of two for the same place the later one holds."""
        return self.operation, self.training, self.dtype, self.m, self.k, self.n


def runs_by_default(choice: Choice) -> str:
    """What runs for the sizes of a choice where the table says nothing.

    Raises:
        RuntimeError: the native library cannot be loaded.

    Example:
        >>> runs_by_default(Choice("forward", "bfloat16", m=16, k=32, n=32, faster="onednn"))
        'loop'
    """
    if choice.operation not in PRODUCTS:
        return "fused"
    is_small = load_native().is_small_product(getattr(torch, choice.dtype), choice.m, choice.k, choice.n)
    return "loop" if is_small else "aten"


# Measured on 2 cores: where oneDNN's product took less than 1/1.05 of the time of torch's own.
_ONEDNN = {
    "GenuineIntel": {  # Sapphire Rapids
        "float32": (
            ("forward", 64, 4096, 11008),
            ("forward", 65536, 64, 64),
            ("forward", 8, 768, 3072),
            ("grad_input", 65536, 64, 64),
        ),
        "bfloat16": (
            ("forward", 128, 784, 512),
            ("forward", 512, 768, 3072),
            ("forward", 8, 768, 3072),
        ),
    },
    "AuthenticAMD": {  # Zen 4
        "float32": (
            ("forward", 512, 768, 3072),
            ("forward", 512, 3072, 768),
            ("forward", 2048, 1024, 4096),
            ("forward", 64, 4096, 11008),
            ("forward", 16384, 256, 1024),
            ("forward", 8, 768, 3072),
            ("grad_input", 512, 768, 3072),
            ("grad_input", 512, 3072, 768),
            ("grad_input", 2048, 4096, 1024),
            ("grad_input", 64, 11008, 4096),
            ("grad_input", 16384, 1024, 256),
            ("grad_input", 8, 3072, 768),
            ("grad_weight", 768, 512, 3072),
            ("grad_weight", 3072, 8, 768),
        ),
    },
}

_current: list[Choice] = []


def default_choices() -> list[Choice]:
    """The choices that this package brings for this processor."""
    vendor = _first_value("/proc/cpuinfo", "vendor_id", "")
    return [
        Choice(operation, dtype, m, k, n, "onednn")
        for dtype, rows in _ONEDNN.get(vendor, {}).items()
        for operation, m, k, n in rows
    ]


def _processor() -> str:
    return _first_value("/proc/cpuinfo", "model name", platform.processor() or platform.machine())


def _setting() -> str:
    return os.environ.get("FUSED_OPS_TUNING", "")


def tuning_file() -> Path:
    """Where tune() saves what it finds: $FUSED_OPS_TUNING, or a file in $XDG_CACHE_HOME/fused_ops (~/.cache/fused_ops),
    whose name has the processor, the number of threads and the minor version of torch."""
    if _setting() not in ("", "off"):
        return Path(_setting())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = ".".join(torch.__version__.split(".")[:2])
    slug = re.sub(r"[^a-z0-9]+", "-", _processor().lower()).strip("-")
    return cache / "fused_ops" / f"tuning-{slug}-{torch.get_num_threads()}-threads-torch-{version}.json"


def choices() -> list[Choice]:
    """The table in use. Later lines override earlier ones."""
    return list(_current)


def set_choices(table: Iterable[Choice]) -> None:
    """Replaces the table in use, for this process. With an empty one every default runs.

    Raises:
        TypeError: an item is no Choice.
        RuntimeError: the native library cannot be loaded.

    Example:
        >>> from fused_ops import dispatch
        >>> choice = dispatch.Choice("forward", "float32", m=64, k=4096, n=11008, faster="onednn")
        >>> dispatch.set_choices([*dispatch.choices(), choice])
        >>> dispatch.reset()
    """
    if not isinstance(table, Iterable):
        raise TypeError(f"set_choices: expected an iterable of Choices, got {table!r}. Put it in a list.")
    table = list(table)
    for line in table:
        if not isinstance(line, Choice):
            raise TypeError(f"set_choices: expected Choices, got {line!r}. Make them with dispatch.Choice(...).")
    load_native().set_choices(
        [
            (line.operation, line.training, getattr(torch, line.dtype), line.m, line.k, line.n, line.faster)
            for line in table
        ]
    )
    _current[:] = table


def _saved() -> list[Choice]:
    path = tuning_file()
    try:
        record = json.loads(path.read_text())
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']}, expected {FORMAT}")
        return [Choice(**line) for line in record["choices"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        warnings.warn(f"fused_ops: {path} is left out: {error}. Run fused_ops.tune() again.", stacklevel=2)
        return []


def _expect_writable(path: Path) -> None:
    """Before minutes are spent on what is to be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError("it is a directory, or not writable")
    except OSError as error:
        raise OSError(
            f"tune: expected to be able to write {path}, but {error}. "
            "Set FUSED_OPS_TUNING to a file, or pass save=False."
        ) from error


def reset() -> None:
    """Makes the table anew from the defaults and the file."""
    set_choices([] if _setting() == "off" else [*default_choices(), *_saved()])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _seconds(routine: Callable[[], Any]) -> float:
    start = time.perf_counter()
    routine()
    return time.perf_counter() - start


def _faster(default: Callable[[], Any], alternative: Callable[[], Any], budget: float) -> bool:
    """Whether the alternative is faster by MARGIN, both taking turns for `budget` seconds."""
    estimate = max(min(_seconds(default) for _ in range(2)), min(_seconds(alternative) for _ in range(2)))
    calls = max(1, round(0.005 / estimate))
    ratios: list[float] = []
    deadline = time.monotonic() + budget
    while len(ratios) < 5 or (time.monotonic() < deadline and len(ratios) < 50):
        times = [min(_seconds(routine) for _ in range(calls)) for routine in (default, alternative)]
        ratios.append(times[0] / times[1])
    return statistics.median(ratios) > MARGIN


_Sizes = tuple[int, int, int]


def _fastest(native: Any, operation: str, sizes: _Sizes, a: Tensor, b: Tensor, budget: float) -> str:
    """The provider whose product of two matrices takes least, aten's unless another wins by MARGIN."""
    best = "aten"
    for provider in PROVIDERS[1:]:
        if provider == "onednn" and not (_name(a.dtype) in ONEDNN_DTYPES and native.has_onednn()):
            continue
        if provider == "loop" and not native.is_small_product(a.dtype, *sizes):
            continue
        routines = [partial(native.product, one, operation, a, b) for one in (best, provider)]
        if _faster(routines[0], routines[1], budget):
            best = provider
    return best


def _product_cases(shape: tuple[int, int, int], dtype: torch.dtype) -> Iterable[tuple[str, _Sizes, Tensor, Tensor]]:
    """Of a layer: each product's operation, its sizes m, k, n, and its factors."""
    m, k, n = shape
    x, w, g = (torch.randn(size).to(dtype) for size in ((m, k), (n, k), (m, n)))
    return (("forward", (m, k, n), x, w), ("grad_input", (m, n, k), g, w), ("grad_weight", (n, m, k), g, x))


def _block(activation: Activation, shape: tuple[int, int, int], dtype: torch.dtype, training: bool) -> tuple[Any, Any]:
    m, k, n = shape
    x = torch.randn(m, k).to(dtype).requires_grad_(training)
    w, b = torch.randn(n, k).to(dtype).requires_grad_(training), torch.randn(n).to(dtype).requires_grad_(training)
    g = torch.randn(m, n).to(dtype)
    tensors = (x, w, b, None, None, None, None)

    def run(forward: Callable[[], Tensor]) -> Callable[[], Any]:
        if training:
            return lambda: torch.autograd.grad(forward(), (x, w, b), g)
        return forward

    return run(lambda: functional._composed(tensors, activation)), run(
        lambda: functional.feed_forward(*tensors, activation)
    )


def _measure_all(
    native: Any,
    shapes: Sequence[tuple[int, int, int]],
    dtypes: Sequence[torch.dtype],
    activations: Sequence[str],
    seconds: float,
    note: Callable[[Choice], None],
    found: list[Choice],
) -> None:
    for shape in shapes:
        for dtype in dtypes:
            name = _name(dtype)
            for operation, sizes, a, b in _product_cases(shape, dtype):
                note(Choice(operation, name, *sizes, _fastest(native, operation, sizes, a, b, seconds)))
    products = list(found)
    set_choices(products)  # blocks are measured with the products that they will have
    for shape in shapes:
        for dtype in dtypes:
            name = _name(dtype)
            for activation in activations:
                for training in (False, True):
                    stock, fused = _block(functional.find_activation(activation, {}), shape, dtype, training)
                    faster = "stock" if _faster(fused, stock, seconds) else "fused"
                    note(Choice(activation, name, *shape, faster, training))


def _expect_measurable(shapes: Any, dtypes: Any, activations: Any, seconds: Any) -> None:
    for name, value in (("shapes", shapes), ("dtypes", dtypes), ("activations", activations)):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError(f"tune: expected {name} to be a sequence, got {value!r}. Put it in a list.")
    for activation in activations:
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise ValueError(f"tune: expected activations in ({', '.join(ACTIVATIONS)}), got {activation!r}. Name one.")
    if not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
        raise TypeError(f"tune: expected seconds to be a number >= 0, got {seconds!r}. Each comparison takes as long.")


def tune(
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    activations: Sequence[str] = ("gelu", "gelu_tanh", "relu", "silu"),
    seconds: float = 0.3,
    save: bool = True,
    progress: bool = True,
) -> list[Choice]:
    """Measures on this machine what is faster, for your shapes, and uses it from now on. Draws random numbers.

    Args:
        shapes: (rows, in_features, out_features) of your layers; rows are all but the last dimension of the input.
            Default: eight shapes from small to large.
        dtypes: Default: float32 and bfloat16.
        activations: names. Default: gelu, gelu_tanh, relu, silu.
        seconds: to spend on each comparison; there are (3 + 2 * activations) * shapes * dtypes of them. Default: 0.3.
        save: whether to write the result to tuning_file(), to be used by later processes, keeping what it holds for
            other sizes; not where FUSED_OPS_TUNING is off. Default: True.
        progress: whether to show a progress bar on a terminal. Default: True.

    Returns:
        The choices found, also those for a default.

    Raises:
        TypeError: seconds is no number, shapes, dtypes or activations are no sequence.
        OSError: the result could not be saved.
        ValueError: a shape, a dtype or an activation is not known.
        RuntimeError: the native library cannot be loaded.

    Example:
        >>> found = tune([(8, 16, 16)], dtypes=[torch.float32], activations=["relu"], seconds=0.0, save=False)
        >>> sorted({choice.operation for choice in found})
        ['forward', 'grad_input', 'grad_weight', 'relu']
    """
    native = load_native()
    _expect_measurable(shapes, dtypes, activations, seconds)
    path = tuning_file()
    save = save and _setting() != "off"
    if save:
        _expect_writable(path)
    for shape in shapes:
        if not isinstance(shape, Sequence) or len(shape) != 3 or not all(map(_is_size, shape)):
            raise ValueError(
                f"tune: expected shapes of three positive integers (rows, in, out), got {shape!r}. "
                "Say those of your layers."
            )
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype) or _name(dtype) not in DTYPES:
            raise ValueError(f"tune: expected dtypes in ({', '.join(DTYPES)}), got {dtype!r}. Leave it out.")
    before = choices()
    set_choices([])
    found: list[Choice] = []
    total = len(shapes) * len(dtypes) * (len(PRODUCTS) + 2 * len(activations))
    bar = progress and sys.stderr.isatty()

    def note(choice: Choice) -> None:
        found.append(choice)
        if bar:
            done = round(30 * len(found) / total)
            text = f"{choice.operation} {choice.dtype} {choice.m}x{choice.k}x{choice.n}: {choice.faster}"
            sys.stderr.write(f"\r\x1b[2K[{'#' * done}{'.' * (30 - done)}] {len(found)}/{total}  {text}")
            sys.stderr.flush()

    try:
        with torch.inference_mode(False), torch.enable_grad():
            _measure_all(native, shapes, dtypes, activations, seconds, note, found)
    except BaseException:
        set_choices(before)
        raise
    finally:
        if bar:
            sys.stderr.write("\r\x1b[2K")
    if save:
        record = {"format": FORMAT, "processor": _processor(), "threads": torch.get_num_threads()}
        lines = {line._place: line for line in (*_saved(), *found)}
        record |= {"torch": torch.__version__, "choices": [asdict(line) for line in lines.values()]}
        path.write_text(json.dumps(record, indent=1) + "\n")
    new = {line._place for line in found}
    kept = [line for line in before if line._place not in new]
    set_choices([*kept, *found])
    return found


with contextlib.suppress(RuntimeError):  # no native library: said at the first use
    reset()
