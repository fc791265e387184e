# SPDX-License-Identifier: Apache-2.0
"""Runs PTX, as nvcc emits it, with numpy: all threads of all blocks at once, with bounds and alignment checked.

Threads that have diverged wait for the ones behind them (the lowest program counter runs first), which is one of the
orders a GPU may choose. Arithmetic is IEEE 754's, rounded once, fma included. A call of CUDA's pow() is not followed:
numpy's is taken, so what comes of it may be a unit in the last place off.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = Any  # numpy arrays of many types
Lanes = Any  # an array of the indices of the threads that run
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
POW = "__internal_accurate_pow"


class PtxError(RuntimeError):
    """An access out of bounds or misaligned, or an instruction that is not known."""


def width(kind: str) -> int:
    return 8 if kind == "pred" else int(re.sub(r"\D", "", kind))


def numpy_type(kind: str) -> Any:
    if kind == "pred":
        return np.bool_
    return {"f": FLOAT, "s": SIGNED}.get(kind[0], UNSIGNED)[width(kind)]


class Memory:
    """Separate ranges of bytes at given addresses; an access lies inside one of them."""

    def __init__(self, ranges: list[tuple[int, bytes]]) -> None:
        self.ranges = sorted(ranges)
        self.starts = np.array([start for start, _ in self.ranges], np.uint64)
        self.ends = np.array([start + len(data) for start, data in self.ranges], np.uint64)
        self.offsets = np.cumsum([0] + [len(data) for _, data in self.ranges])[:-1].astype(np.uint64)
        self.bytes = np.frombuffer(b"".join(data for _, data in self.ranges), np.uint8).copy()

    def index(self, address: Array, size: int, text: str) -> Array:
        if (address % np.uint64(size)).any():
            raise PtxError(f"misaligned access of {size} bytes: {text}")
        place = np.searchsorted(self.starts, address, "right").astype(np.int64) - 1
        bad = (place < 0) | (address + np.uint64(size) > self.ends[np.maximum(place, 0)])
        if bad.any():
            raise PtxError(f"access out of bounds by {int(bad.sum())} threads: {text}")
        return (address - self.starts[place] + self.offsets[place]).astype(np.int64)

    def read(self, start: int) -> bytes:
        place = [first for first, _ in self.ranges].index(start)
        first = int(self.offsets[place])
        return self.bytes[first : first + len(self.ranges[place][1])].tobytes()


def _fma(a: Array, b: Array, c: Array) -> Array:
    if a.dtype == np.float64:
        return _libm_fma(a, b, c).astype(np.float64)
    # The product of two floats is exact in double; the sum is rounded to odd there, so that rounding it again is right.
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    adjust = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    bits = np.where(adjust, bits + np.where((error > 0) == (total > 0), 1, -1), bits)
    return bits.view(np.float64).astype(np.float32)


def _load_libm_fma() -> Callable[..., Array]:
    library = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
    library.fma.restype, library.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
    return np.frompyfunc(library.fma, 3, 1)


_libm_fma = _load_libm_fma()


def _to_bfloat16(value: Array) -> Array:
    bits = value.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(value), 0x7FFF, rounded).astype(np.uint16)


def _shift(operation: Callable[..., Array], value: Array, by: Array) -> Array:
    limit = value.dtype.itemsize * 8
    inside = by < limit
    shifted = operation(value, np.where(inside, by, 0).astype(value.dtype))
    beyond = np.where(value < 0, -1, 0).astype(value.dtype) if operation is np.right_shift else value.dtype.type(0)
    return np.where(inside, shifted, beyond)


COMPARE: dict[str, Callable[..., Array]] = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal},
}


def _compare(name: str, a: Array, b: Array) -> Array:
    if name == "nan":
        return np.isnan(a) | np.isnan(b)
    if name == "num":
        return ~(np.isnan(a) | np.isnan(b))
    if name in COMPARE:
        ordered = COMPARE[name](a, b)
        return ordered & ~(np.isnan(a) | np.isnan(b)) if a.dtype.kind == "f" else ordered
    assert name.endswith("u"), name
    return COMPARE[name[:-1]](a, b) | np.isnan(a) | np.isnan(b)


BINARY: dict[str, Callable[..., Array]] = {
    **{"add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    **{"min": np.minimum, "max": np.maximum},
}
UNARY: dict[str, Callable[..., Array]] = {"neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "not": np.invert}


@dataclass
class Instruction:
    text: str
    words: list[str]  # the opcode's parts
    operands: list[str]
    guard: str | None
    negated: bool


@dataclass
class Kernel:
    parameter: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)  # where each array of shared memory begins
    shared_bytes: int = 0


def parse(source: str, pattern: str) -> Kernel:
    """The kernel whose mangled name the pattern finds."""
    source = re.sub(r"//.*", "", source)
    entries = [m for m in re.finditer(r"\.entry\s+(\w+)\s*\((.*?)\)[^{]*\{", source, re.S) if re.search(pattern, m[1])]
    if len(entries) != 1:
        raise PtxError(f"{len(entries)} kernels are named {pattern}")
    depth, end = 1, entries[0].end()
    while depth:
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        end += 1
    names = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.\w+\s+(\w+)", entries[0][2])
    if len(names) != 1:
        raise PtxError(f"expected one kernel parameter, got {names}")
    kernel = Kernel(names[0])
    for name, size in re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[(\d+)\]", source):
        if re.search(rf"\b{name}\b", source[entries[0].end() : end]):
            kernel.shared[name] = kernel.shared_bytes
            kernel.shared_bytes += -(-int(size) // 16) * 16
    body = re.sub(r"(\$\w+):", r"\1:;", source[entries[0].end() : end - 1])
    for raw in body.split(";"):
        text = re.sub(r"\s+", " ", raw).strip()
        while text[:2] in ("{ ", "} "):
            text = text[2:]
        if text.endswith(":"):
            kernel.labels[text[:-1]] = len(kernel.instructions)
        elif text and not text.startswith((".", "{", "}")):
            match = re.match(r"(?:@(!?)(%\w+) )?([\w.:]+) ?(.*)", text)
            assert match, text
            operands = [part.strip() for part in re.split(r",(?![^{(]*[})])", match[4])] if match[4] else []
            kernel.instructions.append(Instruction(text, match[3].split("."), operands, match[2], match[1] == "!"))
    return kernel


class Machine:
    """One launch of a kernel."""

    def __init__(self, kernel: Kernel, blocks: int, threads: int, parameters: bytes, memory: Memory) -> None:
        self.kernel, self.memory = kernel, memory
        self.count, self.threads = blocks * threads, threads
        self.shared = np.full(blocks * kernel.shared_bytes, 0xFF, np.uint8)
        self.parameters = np.frombuffer(parameters + bytes(16), np.uint8)
        lane = np.arange(self.count, dtype=np.uint64)
        self.registers: dict[str, Array] = {
            "%tid.x": lane % np.uint64(threads),
            "%ctaid.x": lane // np.uint64(threads),
            "%ntid.x": np.full(self.count, threads, np.uint64),
            kernel.parameter: np.zeros(self.count, np.uint64),  # the parameter space begins with it
        }
        for name, start in kernel.shared.items():
            self.registers[name] = np.full(self.count, start, np.uint64)

    def run(self) -> None:
        waiting: dict[int, Lanes] = {0: np.arange(self.count)}
        at_barrier: dict[int, Lanes] = {}
        with np.errstate(all="ignore"):
            while waiting or at_barrier:
                if not waiting:
                    self._open_barrier(waiting, at_barrier)
                counter = min(waiting)
                lanes = waiting.pop(counter)
                stop = min(waiting, default=len(self.kernel.instructions))
                while counter < stop:
                    if self.kernel.instructions[counter].words[0] == "bar":
                        self._join(at_barrier, counter, lanes)
                        lanes = lanes[:0]
                        break
                    target = self._step(self.kernel.instructions[counter], lanes)
                    counter += 1
                    if target is not None:
                        place, left, stay = target
                        self._join(waiting, place, left)
                        lanes = stay
                        break
                if len(lanes):
                    self._join(waiting, counter, lanes)

    def _open_barrier(self, waiting: dict[int, Lanes], at_barrier: dict[int, Lanes]) -> None:
        """Once nobody else runs: whole blocks have to wait, at one and the same barrier."""
        (place, lanes), *others = at_barrier.items()
        if others or not np.isin(np.bincount(lanes // self.threads), (0, self.threads)).all():
            raise PtxError("divergent barrier")
        at_barrier.clear()
        self._join(waiting, place + 1, lanes)

    def _join(self, waiting: dict[int, Lanes], place: int, lanes: Lanes) -> None:
        if len(lanes) and place < len(self.kernel.instructions):
            waiting[place] = np.sort(np.concatenate([waiting[place], lanes])) if place in waiting else lanes

    def _read(self, operand: str, kind: str, lanes: Lanes) -> Array:
        if operand in self.registers:
            bits = self.registers[operand][lanes]
        elif match := re.fullmatch(r"0[fd]([0-9A-Fa-f]+)", operand):
            bits = np.full(len(lanes), int(match[1], 16), np.uint64)
        else:
            bits = np.full(len(lanes), int(operand, 0) & (1 << 64) - 1, np.uint64)
        if kind == "pred":
            return bits != 0
        return bits.astype(UNSIGNED[width(kind)]).view(numpy_type(kind))

    def _write(self, operand: str, value: Array, lanes: Lanes) -> None:
        value = np.ascontiguousarray(value)
        bits = value.view(UNSIGNED[value.dtype.itemsize * 8]) if value.dtype != np.bool_ else value
        if operand not in self.registers:
            self.registers[operand] = np.zeros(self.count, np.uint64)
        self.registers[operand][lanes] = bits.astype(np.uint64)

    def _address(self, operand: str, lanes: Lanes) -> Array:
        match = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", operand)
        assert match, operand
        return self._read(match[1], "u64", lanes) + np.uint64(int(match[2] or 0) & (1 << 64) - 1)

    def _step(self, instruction: Instruction, lanes: Lanes) -> tuple[int, Lanes, Lanes] | None:
        if instruction.guard:
            taken = self._read(instruction.guard, "pred", lanes) != instruction.negated
            stay, lanes = lanes[~taken], lanes[taken]
        else:
            stay = lanes[:0]
        words, operands = instruction.words, instruction.operands
        if words[0] == "bra":
            return self.kernel.labels[operands[0]], lanes, stay
        if words[0] in ("ret", "exit"):
            return len(self.kernel.instructions), lanes, stay
        if len(lanes):
            self._execute(instruction.text, words, operands, lanes)
        return None

    def _execute(self, text: str, words: list[str], o: list[str], lanes: Lanes) -> None:  # noqa: PLR0912, PLR0915
        name, kind = words[0], words[-1]

        def read(index: int, of: str = kind) -> Array:
            return self._read(o[index], of, lanes)

        if name in ("ld", "st"):
            self._move(text, words, o, lanes)
        elif name == "atom":
            assert words[2:] == ["add", "f32"] or words[1:] == ["global", "add", "f32"], text
            index = self.memory.index(self._address(o[1], lanes), 4, text)
            for lane, at, value in zip(lanes, index, read(2), strict=True):
                word = self.memory.bytes[at : at + 4].view(np.float32)
                self._write(o[0], word.copy(), np.array([lane]))
                word[0] += value
        elif name == "call":
            match = re.search(r"\((\w+)\), (\w+), \( ?(\w+), (\w+) ?\)", text)
            assert match, text
            assert match[2] == POW, text
            base, exponent = (self._read(match[i], "f64", lanes) for i in (3, 4))
            self._write(match[1], np.power(np.abs(base), exponent), lanes)
        elif name == "mov" and "{" in o[0]:
            parts = [part.strip() for part in o[0].strip("{}").split(",")]
            each = width(kind) // len(parts)
            for i, part in enumerate(parts):
                self._write(part, (read(1, f"u{width(kind)}") >> (each * i)).astype(UNSIGNED[each]), lanes)
        elif name == "mov" and "{" in o[1]:
            parts = [part.strip() for part in o[1].strip("{}").split(",")]
            each = width(kind) // len(parts)
            value = np.zeros(len(lanes), np.uint64)
            for i, part in enumerate(parts):
                value |= self._read(part, f"u{each}", lanes).astype(np.uint64) << np.uint64(each * i)
            self._write(o[0], value.astype(UNSIGNED[width(kind)]), lanes)
        elif name in ("mov", "cvta"):
            self._write(o[0], read(1), lanes)
        elif name == "cvt":
            self._write(o[0], self._convert(read(1) if kind != "bf16" else read(1, "u16"), words[-2], words), lanes)
        elif name == "setp":
            self._write(o[0], _compare(words[1], read(1), read(2)), lanes)
        elif name == "selp":
            self._write(o[0], np.where(read(3, "pred"), read(1), read(2)), lanes)
        elif name in ("shl", "shr"):
            self._write(
                o[0], _shift(np.left_shift if name == "shl" else np.right_shift, read(1), read(2, "u32")), lanes
            )
        elif name == "bfi":
            start, length = int(o[3]), int(o[4])
            mask = np.uint64(((1 << length) - 1) << start)
            inserted = read(0 + 1, "u64") << np.uint64(start) & mask
            self._write(o[0], (read(2, "u64") & ~mask | inserted).astype(numpy_type(kind)), lanes)
        elif name in ("mul", "mad") and "wide" in words:
            double = numpy_type(kind[0] + str(2 * width(kind)))
            product = read(1).astype(double) * read(2).astype(double)
            self._write(o[0], product, lanes)
        elif name == "mul":
            self._write(o[0], read(1) * read(2), lanes)
        elif name == "mad":
            self._write(o[0], read(1) * read(2) + read(3), lanes)
        elif name == "fma":
            self._write(o[0], _fma(read(1), read(2), read(3)), lanes)
        elif name in ("div", "rcp"):
            self._write(o[0], self._divide(name, read, kind), lanes)
        elif name == "copysign":
            self._write(o[0], np.copysign(read(2), read(1)), lanes)
        elif (name in BINARY and kind == "pred") or name in BINARY:
            self._write(o[0], BINARY[name](read(1), read(2)), lanes)
        elif name in UNARY:
            self._write(o[0], UNARY[name](read(1)), lanes)
        else:
            raise PtxError(f"unknown instruction: {text}")

    @staticmethod
    def _divide(name: str, read: Callable[[int], Array], kind: str) -> Array:
        if name == "rcp":
            return numpy_type(kind)(1) / read(1)
        a, b = read(1), read(2)
        if kind.startswith("f"):
            return a / b
        quotient = np.abs(a) // np.abs(b)  # towards zero, unlike numpy's
        return quotient if kind.startswith("u") else np.where((a < 0) != (b < 0), -quotient, quotient)

    @staticmethod
    def _convert(value: Array, to: str, words: list[str]) -> Array:
        if to == "bf16":
            return _to_bfloat16(value)
        if "rzi" in words:
            value = np.trunc(value)
        return value.astype(numpy_type(to))

    def _move(self, text: str, words: list[str], o: list[str], lanes: Lanes) -> None:
        kind = words[-1]
        loads = words[0] == "ld"
        registers = [part.strip() for part in o[0 if loads else 1].strip("{}").split(",")]
        place = o[1 if loads else 0]
        local = re.fullmatch(r"\[((?:param|retval)\d+)(?:\+0)?\]", place)  # an argument of a call
        if local:
            source, target = (local[1], registers[0]) if loads else (registers[0], local[1])
            self._write(target, self._read(source, kind, lanes), lanes)
            return
        size = width(kind) // 8
        address = self._address(place, lanes)
        if words[1] == "param":
            index, storage = address.astype(np.int64), self.parameters
        elif words[1] == "shared":
            if (address + np.uint64(size * len(registers)) > self.kernel.shared_bytes).any():
                raise PtxError(f"access out of bounds of shared memory: {text}")
            index, storage = (lanes // self.threads * self.kernel.shared_bytes + address).astype(np.int64), self.shared
        else:
            index, storage = self.memory.index(address, size * len(registers), text), self.memory.bytes
        for i, register in enumerate(registers):
            places = (index + i * size)[:, None] + np.arange(size)
            if loads:
                self._write(register, np.ascontiguousarray(storage[places]).view(numpy_type(kind)).ravel(), lanes)
            else:
                value = np.ascontiguousarray(self._read(register, kind, lanes))
                storage[places] = value.view(np.uint8).reshape(-1, size)
