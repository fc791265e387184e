# SPDX-License-Identifier: Apache-2.0
"""Compiles the emulated CUDA backend into test programs and, with torch's headers, into a Python module."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
BUILD = ROOT / "build" / "emulated"

# Kernels reinterpret what they load, as CUDA allows. Contraction is off and fma() explicit, as in the CUDA build.
FLAGS = ["-std=c++20", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter", "-Werror"]
SANITIZERS = {
    "none": ["-O2"],
    "address": ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-g1", "-fsanitize=thread"],
}
SCHEDULER = {"none": ["-O2"], "address": ["-O2", "-DEMULATION_ASAN"], "thread": ["-O2", "-DEMULATION_TSAN"]}
PROGRAM = ["emulated_walk.cpp", "fibers.cpp", "walk_test.cpp"]
EPILOGUE_PROGRAM = ["emulated_epilogue.cpp", "fibers.cpp", "epilogue_test.cpp"]


@contextmanager
def alone(name: str) -> Iterator[None]:
    """One build of a name at a time, also where tests run in several processes."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def newest(folders: Iterable[Path]) -> float:
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return max(path.stat().st_mtime for path in files if path.suffix not in (".py", ".pyc"))


def _object(source: Path, csrc: Path, flags: Sequence[str]) -> Path:
    """Returns the object file of a source, compiled if it is older than any file that it may include."""
    command = [*compiler(), *FLAGS, *WARNINGS, f"-I{FOLDER / 'include'}", f"-I{csrc}", *flags, "-c", str(source)]
    result = BUILD / f"{source.stem}-{hashlib.sha256(shlex.join(command).encode()).hexdigest()[:16]}.o"
    with alone(result.stem):
        if not result.exists() or result.stat().st_mtime < newest([csrc / "core", FOLDER]):
            subprocess.run([*command, "-o", str(result)], check=True)
    return result


def program(
    name: str, sanitizer: str, sources: Sequence[str] = PROGRAM, csrc: Path = ROOT / "csrc", flags: Sequence[str] = ()
) -> Path:
    """Returns the path of a test program; `csrc` is where the CUDA backend's sources are."""
    jobs = []
    for source in sources:
        # The scheduler of the fibers tells a sanitizer what it does; its own accesses are none of the kernels'.
        instrumentation = SCHEDULER[sanitizer] if source == "fibers.cpp" else SANITIZERS[sanitizer]
        jobs.append(
            (FOLDER / source, csrc if source.startswith("emulated_") else ROOT / "csrc", [*instrumentation, *flags])
        )
    if "walk_test.cpp" in sources:
        jobs += [(path, ROOT / "csrc", ["-O2"]) for path in sorted((ROOT / "csrc/core/cpu").glob("*.cpp"))]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(lambda job: _object(*job), jobs))
    command = [*compiler(), *SANITIZERS[sanitizer], *map(str, objects)]
    result = BUILD / f"{name}-{hashlib.sha256(shlex.join(command).encode()).hexdigest()[:16]}".replace(" ", "_")
    with alone(result.name):  # and never again: another process may be running it
        if not result.exists() or result.stat().st_mtime < max(path.stat().st_mtime for path in objects):
            subprocess.run([*command, "-o", str(result)], check=True)
    return result


def module() -> ModuleType:
    """Returns the module whose StepPlan runs every step on the emulated CUDA backend, in host memory."""
    from torch.utils import cpp_extension

    target = BUILD / "module"
    sources = [FOLDER / f"{name}.cpp" for name in ("emulated_walk", "emulated_epilogue", "emulated_bindings", "fibers")]
    sources += sorted((ROOT / "csrc/amalgamated").glob("*.cpp"))
    with alone("module"):
        target.mkdir(exist_ok=True)
        (target / "lock").unlink(missing_ok=True)  # torch's own, for which load() waits for ever after a kill
        result = cpp_extension.load(
            "fused_ops_emulated",
            [str(path) for path in [*sources, *sorted((ROOT / "csrc/core/cpu").glob("*.cpp"))]],
            extra_cflags=[*FLAGS, "-O1", "-g0", "-fvisibility=hidden", "-DFUSED_OPS_CUDA", "-DFUSED_OPS_EMULATED"],
            extra_include_paths=[str(FOLDER / "include"), str(ROOT / "csrc")],
            build_directory=str(target),
        )
    assert isinstance(result, ModuleType)
    return result
