# SPDX-License-Identifier: Apache-2.0
"""What the machine code of the CUDA kernels costs, read from its disassembly: the table of docs/sass.md and its limits.

Usage: python tests/cuda_static/sass.py          checks and prints the table
       python tests/cuda_static/sass.py --write  writes docs/sass.md
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/sass.md"
NVCC = ["nvcc", "-O3", "-std=c++20", "-fmad=false", "-cubin"]

THREADS = 128  # a block, as in csrc/core/cuda/parameters.h
VECTORS = 2  # of 16 bytes, of each operand, that a thread loads before it uses the first


@dataclass(frozen=True)
class Gpu:
    """Peak numbers of the data sheets; a multiprocessor issues 4 instructions of 32 threads and 16 MUFU a clock."""

    name: str
    multiprocessors: int
    clock: float  # Hz
    bandwidth: float  # bytes/s
    max_threads: int = 2048

    @property
    def bytes_in_flight_needed(self) -> float:
        """Of one multiprocessor: Little's law."""
        return self.bandwidth * LATENCY / self.multiprocessors


LATENCY = 0.8e-6  # s, of a load from memory under load
GPUS = {
    80: Gpu("A100 80GB", 108, 1.41e9, 2.04e12),
    90: Gpu("H200", 132, 1.755e9, 4.8e12),
    100: Gpu("B200", 148, 1.85e9, 8.0e12),
}
REGISTERS, REGISTER_UNIT, MAX_BLOCKS = 65536, 256, 32
FP64 = r"\b(DADD|DMUL|DFMA|DMNMX|DSETP|F2F\.F64\S*|F2F\.F32\.F64|I2F\.F64\S*|F2I\.F64\S*|MUFU\.RCP64H|MUFU\.RSQ64H)\b"
CONVERSION = r"F2FP|HADD2|HFMA2|F2F\.F16|F2F\.BF16|PRMT|0xffff0000|0x10000,"


@dataclass(frozen=True)
class Kernel:
    optimizer: str
    compute: str  # float or double
    states: int  # a bit mask
    registers: int
    local_bytes: int
    loads: int  # in the main loop, of 16 bytes
    stores: int
    narrow: int  # accesses of the main loop of fewer than 16 bytes
    mufu: int
    fp64: int  # in the main loop
    local_accesses: int  # anywhere
    instructions: float  # for one element of the compute type, slow paths of division and square root left out

    @property
    def name(self) -> str:
        return f"{self.optimizer} {self.states:03b} {self.compute}"

    @property
    def operands(self) -> int:
        return 2 + bin(self.states).count("1")

    @property
    def size(self) -> int:
        return 4 if self.compute == "float" else 8

    @property
    def elements(self) -> int:
        return VECTORS * 16 // self.size

    @property
    def bytes_moved(self) -> int:
        """For one element: every operand is read, all but the gradient are written."""
        return (2 * self.operands - 1) * self.size

    def resident_threads(self, gpu: Gpu) -> int:
        a_warp = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        blocks = min(REGISTERS // (a_warp * THREADS // 32), gpu.max_threads // THREADS, MAX_BLOCKS)
        return blocks * THREADS

    def bytes_in_flight(self, gpu: Gpu) -> int:
        return self.resident_threads(gpu) * self.operands * VECTORS * 16

    def picoseconds(self, gpu: Gpu) -> dict[str, float]:
        """For one element, by what could be the bound."""
        clocks = gpu.multiprocessors * gpu.clock
        return {
            "memory": self.bytes_moved / gpu.bandwidth * 1e12,
            "issue": self.instructions / (clocks * 4 * 32) * 1e12,
            "mufu": self.mufu / self.elements / (clocks * 16) * 1e12,
        }

    def faults(self, gpu: Gpu) -> Iterator[str]:
        if self.local_bytes or self.local_accesses:
            yield f"spills: {self.local_bytes} bytes of local memory, {self.local_accesses} accesses to it"
        if self.narrow:
            yield f"{self.narrow} accesses of fewer than 16 bytes in the main loop"
        if self.loads != VECTORS * self.operands:
            yield f"{self.loads} loads of 16 bytes in the main loop, expected {VECTORS * self.operands}"
        if self.compute == "float" and self.fp64:
            yield f"{self.fp64} fp64 instructions in the main loop"
        if self.bytes_in_flight(gpu) < gpu.bytes_in_flight_needed:
            yield f"{self.bytes_in_flight(gpu)} bytes in flight, {gpu.bytes_in_flight_needed:.0f} needed"
        times = self.picoseconds(gpu)
        if self.compute == "float" and max(times.values()) > 1.05 * times["memory"]:
            yield f"modelled time {max(times.values()):.2f} ps, the memory's alone is {times['memory']:.2f}"


def main_loop(body: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The shortest loop that loads 16 bytes at once."""
    best: list[tuple[int, str]] = []
    for address, text in body:
        match = re.search(r"\bBRA(?:\.\w+)* .*?(0x[0-9a-f]+)", text)
        if not match or int(match[1], 16) >= address:
            continue
        loop = [line for line in body if int(match[1], 16) <= line[0] <= address]
        if any(re.search(r"\bLDG?\.\S*128", line[1]) for line in loop) and (not best or len(loop) < len(best)):
            best = loop
    return best


def instructions_for_compute_type(loop: list[tuple[int, str]], compute: str) -> int:
    """Of one pass of the loop: without the blocks that convert 16-bit types, and without calls of slow paths."""
    targets = {int(found, 16) for _, text in loop if "BRA" in text for found in re.findall(r"0x[0-9a-f]+", text)}
    blocks: list[list[str]] = [[]]
    for address, text in loop:
        if address in targets:
            blocks.append([])
        blocks[-1].append(text)
        if re.search(r"\b(BRA|CALL)\b", text):
            blocks.append([])
    left_out = rf"CALL|{CONVERSION}" if compute == "float" else "CALL"
    return sum(len(block) for block in blocks if not any(re.search(left_out, text) for text in block))


def read_kernels(disassembly: str, usage: str) -> list[Kernel]:
    resources = {
        name: (int(registers), int(stack) + int(local))
        for name, registers, stack, local in re.findall(
            r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage
        )
    }
    kernels = []
    for part in disassembly.split("Function : ")[1:]:
        name = part.split()[0]
        match = re.search(r"4walkIN\S*?\d([A-Z][A-Za-z]+?)E([fd])Lj(\d)E", name)
        if not match:
            continue
        body = [(int(a, 16), t) for a, t in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]+);", part)]
        loop = main_loop(body)
        texts = [text for _, text in loop]

        def count(pattern: str, lines: list[str]) -> int:
            return sum(bool(re.search(pattern, line)) for line in lines)

        compute = "float" if match[2] == "f" else "double"
        wide_loads, wide_stores = (count(rf"\b{op}G?\.\S*128", texts) for op in ("LD", "ST"))
        kernels.append(
            Kernel(
                optimizer=match[1],
                compute=compute,
                states=int(match[3]),
                registers=resources[name][0],
                local_bytes=resources[name][1],
                loads=wide_loads,
                stores=wide_stores,
                narrow=count(r"\b(LDG?|STG?)\b\.", texts) - wide_loads - wide_stores,
                mufu=count(r"\bMUFU\b", texts),
                fp64=count(FP64, texts),
                local_accesses=count(r"\b(LDL|STL)\b", [text for _, text in body]),
                instructions=instructions_for_compute_type(loop, compute) / (8 if compute == "float" else 4),
            )
        )
    order = {name: i for i, name in enumerate(("Adam", "RMSprop", "SGD", "Adagrad"))}
    return sorted(kernels, key=lambda k: (k.compute == "double", order.get(k.optimizer, 9), k.states))


def compile_kernels(architecture: int, source: Path = ROOT / "csrc/core/cuda/walk.cu") -> list[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "walk.cubin"
        command = [*NVCC, f"-I{source.parents[2]}"]
        subprocess.run([*command, f"-arch=sm_{architecture}", str(source), "-o", str(cubin)], check=True)
        outputs = [
            subprocess.run([tool(), option, str(cubin)], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        ]
    return read_kernels(*outputs)


def tool() -> str:
    """cuobjdump: on PATH, or where the package nvidia-cuda-cuobjdump puts it (it needs nvdisasm beside it)."""
    places = [Path(folder) / "nvidia/cu13/bin" for folder in sys.path if folder]
    found = shutil.which("cuobjdump") or next(
        (str(p / "cuobjdump") for p in places if (p / "cuobjdump").exists()), None
    )
    if not found:
        raise FileNotFoundError("cuobjdump was not found: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return found


HEADER = (
    "| kernel | registers | local memory | loads / stores of 16 B | narrower | MUFU | fp64 | instructions an element "
    "| bytes an element | threads a multiprocessor | KB in flight (needed) | modelled ps an element: memory / issue |"
)


def table(architecture: int, kernels: list[Kernel]) -> str:
    gpu = GPUS[architecture]
    rows = [HEADER, "|---" * 12 + "|"]
    for k in kernels:
        times, threads = k.picoseconds(gpu), k.resident_threads(gpu)
        rows.append(
            f"| {k.name} | {k.registers} | {k.local_bytes} | {k.loads} / {k.stores} | {k.narrow} | {k.mufu} | {k.fp64} "
            f"| {k.instructions:.0f} | {k.bytes_moved} | {threads} ({threads * 100 // 2048}%) "
            f"| {k.bytes_in_flight(gpu) / 1000:.0f} ({gpu.bytes_in_flight_needed / 1000:.0f}) "
            f"| {times['memory']:.2f} / {times['issue']:.2f} |"
        )
    return "\n".join(rows)


def page(tables: dict[int, str]) -> str:
    text = [(Path(__file__).with_name("sass_page.md")).read_text().strip()]
    for architecture, rows in tables.items():
        gpu = GPUS[architecture]
        text.append(
            f"## sm_{architecture}, modelled on {gpu.name}\n\n{gpu.multiprocessors} multiprocessors at "
            f"{gpu.clock / 1e9:g} GHz, {gpu.bandwidth / 1e12:g} TB/s.\n\n{rows}"
        )
    return "\n\n".join(text) + "\n"


def main() -> int:
    sys.path.insert(0, str(ROOT / "tests"))
    from cuda_static import sass_epilogue

    with ThreadPoolExecutor(2) as pool:
        compiled = dict(zip(GPUS, pool.map(compile_kernels, GPUS), strict=True))
        epilogues = dict(zip(GPUS, pool.map(sass_epilogue.compile_kernels, GPUS), strict=True))
    result = page({architecture: table(architecture, kernels) for architecture, kernels in compiled.items()})
    result += "\n" + sass_epilogue.page(epilogues)
    if "--write" in sys.argv:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(result)
    else:
        print(result)
    faults = [
        f"sm_{a} {k.name}: {fault}" for a in GPUS for k in [*compiled[a], *epilogues[a]] for fault in k.faults(GPUS[a])
    ]
    print("\n".join(faults), file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
