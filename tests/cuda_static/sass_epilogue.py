# SPDX-License-Identifier: Apache-2.0
"""What the machine code of the epilogues costs: their part of docs/sass.md, and its limits. Written by sass.py."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cuda_static.sass import FP64, GPUS, MAX_BLOCKS, NVCC, REGISTER_UNIT, REGISTERS, ROOT, THREADS, Gpu, tool

CUDA = ROOT / "csrc/core/cuda"
VECTORS_AHEAD = {"activate": 4, "activate gated": 3, "differentiate": 3, "differentiate gated": 2}  # of each operand
OPERANDS = {"activate": 1, "activate gated": 2, "differentiate": 2, "differentiate gated": 3}
BYTES = {"activate": 2, "activate gated": 3, "differentiate": 3, "differentiate gated": 5}  # elements moved for one
UNIT = 8  # elements computed at once
# Of a unit: finding the activation among 19, and telling formats apart, which the kernels that are counted do not do.
DECISIONS = 40


@dataclass(frozen=True)
class Kernel:
    name: str
    registers: int
    local: int
    wide: int  # loads of 16 bytes in the main loop
    fp64: int  # anywhere

    @property
    def is_float(self) -> bool:
        return self.name.endswith("float")

    @property
    def kind(self) -> str:
        return self.name.rsplit(" ", 1)[0]

    def resident_threads(self, gpu: Gpu) -> int:
        a_warp = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        return min(REGISTERS // (a_warp * THREADS // 32), gpu.max_threads // THREADS, MAX_BLOCKS) * THREADS

    def bytes_in_flight(self, gpu: Gpu) -> int:
        return self.resident_threads(gpu) * OPERANDS[self.kind] * VECTORS_AHEAD[self.kind] * 16

    def faults(self, gpu: Gpu) -> Iterator[str]:
        if self.local:
            yield f"spills: {self.local} bytes of local memory"
        if self.is_float and self.fp64:
            yield f"{self.fp64} fp64 instructions"
        if self.kind not in OPERANDS:
            return
        if self.wide < OPERANDS[self.kind]:
            yield f"{self.wide} loads of 16 bytes in the main loop"
        if self.is_float and self.bytes_in_flight(gpu) < gpu.bytes_in_flight_needed:
            yield f"{self.bytes_in_flight(gpu)} bytes in flight, {gpu.bytes_in_flight_needed:.0f} needed"


def disassemble(architecture: int, source: Path, include: Path) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "epilogue.cubin"
        command = [*NVCC, f"-I{include}", f"-arch=sm_{architecture}", str(source), "-o", str(cubin)]
        subprocess.run(command, check=True)
        code, usage = (
            subprocess.run([tool(), option, str(cubin)], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
        return code, usage


def functions(disassembly: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    for part in disassembly.split("Function : ")[1:]:
        yield part.split()[0], [(int(a, 16), t) for a, t in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]+);", part)]


def main_loop(body: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The longest loop that loads 16 bytes at once."""
    loops = []
    for address, text in body:
        match = re.search(r"\bBRA(?:\.\w+)* .*?(0x[0-9a-f]+)", text)
        if match and int(match[1], 16) < address:
            loops.append([line for line in body if int(match[1], 16) <= line[0] <= address])
    loops = [loop for loop in loops if any(re.search(r"\bLDG\.\S*128", text) for _, text in loop)]
    return max(loops, key=len, default=[])


def compile_kernels(architecture: int, source: Path = CUDA / "epilogue.cu") -> list[Kernel]:
    code, usage = disassemble(architecture, source, source.parents[2])
    kernels = []
    for name, body in functions(code):
        match = re.search(r"\d(activate|differentiate|sum)_rowsI\w*?([fd])(?:Lb(\d)E)?E", name)
        resources = re.search(rf"Function {name}:\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
        assert match, name
        assert resources, name
        texts = [text for _, text in body]
        kernels.append(
            Kernel(
                match[1] + (" gated" if match[3] == "1" else "") + (" float" if match[2] == "f" else " double"),
                int(resources[1]),
                int(resources[2]) + int(resources[3]),
                sum(bool(re.search(r"\bLDG\.\S*128", text)) for _, text in main_loop(body)),
                sum(bool(re.search(FP64, text)) for text in texts),
            )
        )
    return sorted(kernels, key=lambda kernel: (not kernel.is_float, kernel.name))


# Kernels of one activation and one format: width columns of a dtype.
ONE_ACTIVATION = """
#include "core/cuda/epilogue.cuh"
namespace fused_ops::cuda {{
inline namespace FUSED_OPS_LEVEL {{
template <class Activation>
struct Only {{
  template <class Visitor>
  __device__ __forceinline__ static void visit(int, const Visitor& visitor) {{
    visitor.template operator()<Activation>();
  }}
}};
template <class Activation, bool kGated>
void* kernels[] = {{(void*)&activate_rows<Only<Activation>, float, kGated>,
                   (void*)&differentiate_rows<Only<Activation>, float, kGated>}};
{instances}
}}
}}
"""


def activation_names() -> list[str]:
    """The structs of core/activations.h, in their order."""
    text = (ROOT / "csrc/core/activations.h").read_text()
    match = re.search(r"using Activations = std::tuple<([^>]+)>", text)
    assert match
    return [name.strip() for name in match[1].split(",")]


def count_instructions(architecture: int, mover: str) -> dict[tuple[str, str], float]:
    """By (activation, kind): instructions of the main loop for one element, slow paths of division left out."""
    with tempfile.TemporaryDirectory() as folder:
        core = Path(folder) / "core"
        core.mkdir()
        for path in (ROOT / "csrc/core").glob("*"):
            (core / path.name).symlink_to(path)
        (core / "cuda").unlink()
        (core / "cuda").mkdir()
        for path in CUDA.glob("*"):
            text = path.read_text().replace("mover{pass.dtype, parameters.division.width}", f"mover{{{mover}}}")
            (core / "cuda" / path.name).write_text(text)
        source = Path(folder) / "one.cu"
        instances = "\n".join(
            f"template void* kernels<{name}, {gated}>[];" for name in activation_names() for gated in ("false", "true")
        )
        source.write_text(ONE_ACTIVATION.format(instances=instances))
        code, _ = disassemble(architecture, source, Path(folder))
    counts = {}
    for name, body in functions(code):
        match = re.search(r"\d(activate|differentiate)_rowsI\w*?\d([A-Z][A-Za-z0-9]+?)EEEfLb(\d)E", name)
        assert match, name
        loop = main_loop(body)
        targets = {int(found, 16) for _, text in loop if "BRA" in text for found in re.findall(r"0x[0-9a-f]+", text)}
        blocks: list[list[str]] = [[]]
        for address, text in loop:
            if address in targets:
                blocks.append([])
            blocks[-1].append(text)
            if re.search(r"\b(BRA|CALL)\b", text):
                blocks.append([])
        total = sum(len(block) for block in blocks if not any("CALL" in text for text in block))
        counts[match[2], match[1] + (" gated" if match[3] == "1" else "")] = (total + DECISIONS) / UNIT
    return counts


def table(architecture: int, kernels: list[Kernel]) -> str:
    gpu = GPUS[architecture]
    rows = [
        "| kernel | registers | local memory | fp64 | threads a multiprocessor | KB in flight (needed) |",
        "|---" * 6 + "|",
    ]
    for k in kernels:
        flight, threads = "", ""
        if k.kind in OPERANDS:
            threads = f"{k.resident_threads(gpu)} ({k.resident_threads(gpu) * 100 // 2048}%)"
            flight = f"{k.bytes_in_flight(gpu) / 1000:.0f} ({gpu.bytes_in_flight_needed / 1000:.0f})"
        rows.append(f"| {k.name} | {k.registers} | {k.local} | {k.fp64} | {threads} | {flight} |")
    return "\n".join(rows)


def activation_table(architecture: int) -> str:
    gpu = GPUS[architecture]
    formats = {
        4: count_instructions(architecture, "DType::kFloat32, 4"),
        2: count_instructions(architecture, "DType::kBFloat16, 8"),
    }
    rows = [
        "| activation | "
        + " | ".join(f"{kind}, {'float32' if size == 4 else 'bfloat16'}" for size in formats for kind in OPERANDS)
        + " |"
    ]
    rows += ["|---" * (1 + 2 * len(OPERANDS)) + "|"]
    rate = gpu.multiprocessors * gpu.clock * 4 * 32
    for name in activation_names():
        cells = [name]
        for size, counts in formats.items():
            for kind in OPERANDS:
                memory, issue = BYTES[kind] * size / gpu.bandwidth * 1e12, counts[name, kind] / rate * 1e12
                cells.append(
                    f"{counts[name, kind]:.0f}: {memory:.2f} / {issue:.2f}" + (" *" if issue > 1.05 * memory else "")
                )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def page(kernels: dict[int, list[Kernel]]) -> str:
    text = [Path(__file__).with_name("sass_epilogue_page.md").read_text().strip()]
    text += [
        f"### Epilogues on sm_{architecture}\n\n{table(architecture, found)}" for architecture, found in kernels.items()
    ]
    text += [f"### By activation, sm_90, modelled on {GPUS[90].name}\n\n{activation_table(90)}"]
    return "\n\n".join(text) + "\n"
