# SPDX-License-Identifier: Apache-2.0
"""Builds the native library fused_ops._C against the torch that is installed; everything else is in pyproject.toml.

Environment variables:
    FUSED_OPS_CUDA        auto (default): with CUDA if nvcc and a CUDA build of torch are found. 0: never. 1: or fail.
    TORCH_CUDA_ARCH_LIST  GPU architectures, as torch.utils.cpp_extension reads it; default: see ARCHITECTURES.
    CUDA_HOME             the CUDA toolkit; default: the one that nvcc belongs to.
    MAX_JOBS              compilers run at once; default: as many as the cores and the memory (2 GB each) allow.
    FUSED_OPS_WERROR      1: compiler warnings are errors.
"""

import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py

MINIMUM_TORCH = (2, 11)
ARCHITECTURES = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
CXX_FLAGS = ["-O2", "-std=c++20", "-g0", "-fopenmp", "-fvisibility=hidden"]
CXX_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
NVCC_FLAGS = ["-O3", "-std=c++20", "-fmad=false", "-Xfatbin=-compress-all", "--threads=2"]
NVCC_FLAGS += ["-Xcompiler=-fvisibility=hidden"]
# torch.utils.cpp_extension defines these, which would take away the conversions of __half and __nv_bfloat16.
NVCC_FLAGS += [
    f"-U__CUDA_NO_{name}__"
    for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
]


def find_torch() -> bool:
    """Makes the installed torch importable: in an isolated build it lies outside sys.path."""
    schemes: list[dict[str, str]] = [{}]
    if "VIRTUAL_ENV" in os.environ:  # some front ends isolate the build in a virtual environment of its own
        schemes.append({"base": os.environ["VIRTUAL_ENV"], "platbase": os.environ["VIRTUAL_ENV"]})
    folders = [sysconfig.get_path(kind, vars=scheme) for scheme in schemes for kind in ("purelib", "platlib")]
    for folder in [*folders, site.getusersitepackages()]:
        if importlib.util.find_spec("torch") is not None:
            break
        if Path(folder, "torch", "version.py").is_file():
            sys.path.append(folder)
            importlib.invalidate_caches()
    return importlib.util.find_spec("torch") is not None


class BuildPython(build_py):
    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib, "fused_ops"), ignore_errors=True)  # else modules since deleted are packed
        super().run()


def output(*command: str | Path) -> str:
    return subprocess.check_output(command, text=True)


def find_cuda(torch_cuda: str | None) -> tuple[Path | None, str]:
    """Returns the CUDA toolkit to build with and its version, or None and the reason why there is none."""
    if torch_cuda is None:
        return None, "this torch is a CPU-only build (install a CUDA build of torch)"
    package = f'"cuda-toolkit[nvcc,cccl]=={torch_cuda}.*"'
    wanted = f"install CUDA toolkit {torch_cuda}, e.g. pip install {package}, or set CUDA_HOME"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [str(Path(home, "bin"))] if home else [None, "/usr/local/cuda/bin"]
    nvcc = next(filter(None, (shutil.which("nvcc", path=place) for place in places)), None)
    if nvcc is None:
        return None, f"nvcc was not found {f'in CUDA_HOME={home}' if home else 'on PATH'} ({wanted})"
    if not home:  # the nvcc on PATH may be a script or a link that lies outside its toolkit
        plan = subprocess.run([nvcc, "--dryrun", "none.cu"], capture_output=True, text=True, check=False).stderr
        top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
        home = top[1].strip() if top else Path(nvcc).resolve().parents[1]
    release = re.search(r"release (\d+\.\d+)", output(nvcc, "--version"))
    version = release[1] if release else "unknown"
    if version.split(".")[0] != torch_cuda.split(".")[0]:
        return None, f"nvcc is of CUDA {version} but torch was built with CUDA {torch_cuda} ({wanted})"
    return Path(home).resolve(), version


def default_architectures(home: Path) -> str:
    """Every architecture of ARCHITECTURES that this nvcc knows, and PTX of the newest for GPUs that come later."""
    known = output(home / "bin" / "nvcc", "--list-gpu-arch").split()
    return ";".join(arch for arch in ARCHITECTURES if f"compute_{arch.replace('.', '')}" in known) + "+PTX"


def default_jobs() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // 2_000_000_000))


def native_library() -> dict[str, Any]:
    """Returns the setup() arguments that build fused_ops._C beside the torch that is importable."""
    import torch
    from torch.utils import cpp_extension

    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < MINIMUM_TORCH:
        sys.exit(f"fused_ops: expected torch >= 2.11, got {torch.__version__}. Run: pip install --upgrade torch")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        sys.exit("fused_ops: Python.h was not found. Install Python's headers, e.g. apt-get install python3-dev")
    if shutil.which(shlex.split(cpp_extension.get_cxx_compiler())[0]) is None:
        sys.exit("fused_ops: no C++ compiler was found. Install one, e.g. apt-get install g++, or set CXX")
    setting = os.environ.get("FUSED_OPS_CUDA", "auto")
    if setting not in ("auto", "0", "1"):
        sys.exit(f"fused_ops: expected FUSED_OPS_CUDA in (auto, 0, 1), got {setting!r}.")
    home, detail = (None, "FUSED_OPS_CUDA=0") if setting == "0" else find_cuda(torch.version.cuda)
    if home is None and setting == "1":
        sys.exit(f"fused_ops: FUSED_OPS_CUDA=1, but {detail}.")

    os.environ.setdefault("MAX_JOBS", str(default_jobs()))
    folders = (Path("csrc/amalgamated"), Path("csrc/core"))
    sources = [str(path) for folder in folders for path in sorted(folder.rglob("*.cpp"))]
    compiler = output(*shlex.split(cpp_extension.get_cxx_compiler()), "--version").splitlines()[0]
    cxx_flags, nvcc_flags = list(CXX_FLAGS), list(NVCC_FLAGS)
    if "clang" not in compiler:
        cxx_flags += ["-ftree-vectorize", "-fvect-cost-model=dynamic"]  # of -O3 all that the loops gain from
        cxx_flags += ["--param=ggc-min-expand=30"]  # torch's headers in 15% less memory, for 10% more time
    include_dirs, libraries, architectures = [str(Path("csrc").resolve())], [], ()
    macros: list[tuple[str, str | None]] = [("AT_PER_OPERATOR_HEADERS", None)]  # of torch's operators only those in use
    if os.environ.get("FUSED_OPS_WERROR") == "1":
        cxx_flags += ["-Werror"]
        nvcc_flags += ["--Werror=all-warnings", "-Xcompiler=-Werror"]
    if home:
        if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
            os.environ["TORCH_CUDA_ARCH_LIST"] = default_architectures(home)
        names = re.findall(r",code=(\w+)", " ".join(cpp_extension._get_cuda_arch_flags()))
        architectures = tuple(sorted(names, key=lambda name: int(re.sub(r"\D", "", name))))
        cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = str(home)
        sources += sorted(map(str, Path("csrc/core/cuda").glob("*.cu")))
        include_dirs += [str(home / "include")]
        libraries += ["c10_cuda"]  # brings the very libcudart that torch uses, as libtorch_cpu brings its libgomp
        macros += [("FUSED_OPS_CUDA", None)]
    config = {
        "TORCH_VERSION": str(torch.__version__),
        "CUDA_VERSION": detail if home else None,
        "CUDA_ARCHITECTURES": architectures,
        "CUDA_REASON": None if home else detail,
        "COMPILER": compiler,
    }

    class BuildNative(cpp_extension.BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            self.force = True  # ninja knows what is out of date; a library built for another torch must not be kept
            tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}-torch-{torch.__version__}"
            self.build_temp = str(Path("build", tag).resolve())  # kept, where an editable install would use a new one

        def build_extension(self, ext) -> None:
            device = f"CPU and CUDA {detail} ({os.environ['TORCH_CUDA_ARCH_LIST']})" if home else f"CPU only: {detail}"
            print(f"fused_ops: building for torch {torch.__version__}, {device}", flush=True)
            super().build_extension(ext)
            facts = {"VERSION": self.distribution.get_version(), **config}
            self.config_path = Path(self.get_ext_fullpath(ext.name)).with_name("_build_config.py")
            self.config_path.write_text("".join(f"{name} = {value!r}\n" for name, value in facts.items()))

        def copy_extensions_to_source(self) -> None:  # of an editable install
            super().copy_extensions_to_source()
            self.copy_file(str(self.config_path), "fused_ops")

    extension = cpp_extension.CppExtension(
        "fused_ops._C",
        sources,
        include_dirs=include_dirs,
        libraries=libraries,
        define_macros=macros,
        extra_compile_args={"cxx": cxx_flags, "nvcc": nvcc_flags},
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildNative, "build_py": BuildPython},
        "install_requires": [f"torch>={major}.{minor},<{major}.{minor + 1}"],
    }


arguments: dict[str, Any] = native_library() if find_torch() else {"setup_requires": ["torch>=2.11"]}
setup(**arguments)
