# SPDX-License-Identifier: Apache-2.0
"""The package itself: what it is built for, what it says where it cannot run, and which instructions it holds."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch
from torch.utils import cpp_extension

import fused_ops
from fused_ops import __main__ as command
from fused_ops import _build

ROOT = Path(__file__).resolve().parents[1]
# As setup.py optimizes.
CXX_FLAGS = ["-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-std=c++20", "-fopenmp"]
CXX_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
X86 = os.uname().machine == "x86_64"


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code away from the source tree, so that the installed package is what it imports."""
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd="/", env={**os.environ, **environment}, timeout=300
    )


def need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


# What was built


def test_metadata_requires_the_minor_version_of_torch_that_it_was_built_with() -> None:
    major, minor = map(int, fused_ops.build_info()["torch_built"].split(".")[:2])
    requirement = next(line for line in importlib.metadata.requires("fused_ops") or () if line.startswith("torch"))
    assert set(requirement.removeprefix("torch").split(",")) == {f">={major}.{minor}", f"<{major}.{minor + 1}"}


def test_build_info_names_what_works_here() -> None:
    facts = fused_ops.build_info()
    assert facts["version"] == importlib.metadata.version("fused_ops")
    assert facts["torch_running"] == torch.__version__
    assert facts["native_reason"] is None
    assert "cpu" in facts["enabled"]
    assert ("cuda" in facts["enabled"]) <= facts["cuda"] <= bool(facts["cuda_architectures"])
    assert all(re.fullmatch(r"(sm|compute)_\d+[af]?", name) for name in facts["cuda_architectures"])
    assert facts["cpu_levels"] == (["baseline", "avx2", "avx512", "avx512_bf16"] if X86 else ["baseline"])
    assert facts["cpu_level"] in facts["cpu_levels_supported"]
    assert sum(device["best"] for device in facts["devices"]) == 1
    assert all(0 < device["memory_free"] <= device["memory"] for device in facts["devices"])


@pytest.mark.parametrize("level", fused_ops.build_info()["cpu_levels_supported"])
def test_environment_variable_forces_the_cpu_level(level: str) -> None:
    code = "import fused_ops; print(fused_ops.build_info()['cpu_level'])"
    assert run_python(code, FUSED_OPS_CPU_LEVEL=level).stdout.split() == [level]


def test_info_command_prints_the_facts() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "fused_ops", "info"], capture_output=True, text=True, check=True, cwd="/"
    )
    assert f"running {torch.__version__}" in result.stdout
    assert f"{fused_ops.build_info()['cpu_level']} chosen" in result.stdout


@pytest.mark.parametrize(("torch_cuda", "notes"), [(None, 0), ("13.0", 1)])
def test_a_build_without_cuda_is_a_note_only_beside_a_torch_with_it(
    torch_cuda: str | None, notes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**_build._config(), "CUDA_VERSION": None, "CUDA_ARCHITECTURES": (), "CUDA_REASON": "FUSED_OPS_CUDA=0"}
    monkeypatch.setattr(_build, "_config", lambda: config)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    assert command.info(argparse.Namespace(json=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "CUDA      not built: FUSED_OPS_CUDA=0" in lines
    assert sum(line.startswith("note ") for line in lines) == notes


def test_bench_command_gives_medians_between_their_quartiles() -> None:
    options = ["--device", "cpu", "--tensors", "3", "--elements", "100", "--repeats", "5"]
    result = subprocess.run(
        [sys.executable, "-m", "fused_ops", "bench", *options], capture_output=True, text=True, check=True, cwd="/"
    )
    number = r"(\d+\.\d\d)"
    pattern = rf"{number} +{number} to {number} +{number} \((?:foreach|fused)\) +{number} to {number} +\d+\.\d\d$"
    rows = re.findall(pattern, result.stdout, re.MULTILINE)
    assert len(rows) == len(command.CASES), result.stdout
    for row in rows:
        ours, first, third, stocks, stock_first, stock_third = map(float, row)
        assert first <= ours <= third
        assert stock_first <= stocks <= stock_third
    assert command.quartiles([3.0, 1.0, 2.0, 5.0, 4.0]) == (2.0, 3.0, 4.0)
    assert command.quartiles([3.0]) == (3.0, 3.0, 3.0)


def test_verify_command_agrees_with_stock() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "fused_ops", "verify", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    agreeing, total = re.findall(r"(\d+) of (\d+) agree", result.stdout)[0]
    assert agreeing == total
    assert int(total) > 20


# What it says where it cannot run

UNUSABLE = {
    "newer torch": ("import torch; torch.__version__ = '99.1.0'", "torch 99.1.0 is running: rebuild it with"),
    "older torch": ("import torch; torch.__version__ = '2.4.1+cpu'", "torch 2.4.1+cpu is running: rebuild it with"),
    "library that cannot load": ("import sys; sys.modules['fused_ops._C'] = None", "cannot be loaded"),
    "no library": ("import sys; sys.modules['fused_ops._build_config'] = None", "nothing is built"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_import_never_fails_and_the_first_use_says_how_to_rebuild(case: str) -> None:
    fake, expected = UNUSABLE[case]
    result = run_python(
        f"{fake}\n"
        "import torch, fused_ops\n"
        "assert fused_ops.build_info()['enabled'] == []\n"
        "print(fused_ops.build_info()['native_reason'])\n"
        "p = torch.ones(3, requires_grad=True); p.grad = torch.ones(3)\n"
        "try: fused_ops.optim.AdamW([p]).step()\n"
        "except RuntimeError as error: print(error)\n"
        "assert torch.equal(p, torch.ones(3))\n"
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2, result.stdout
    for line in lines:
        assert expected in line
        assert "pip install" in line


CUDA_BUILD = {"CUDA_VERSION": "13.0", "CUDA_ARCHITECTURES": ("sm_75", "sm_80", "sm_86", "sm_90a", "compute_90")}


@pytest.fixture(autouse=True)
def forget_checked_devices() -> Iterator[None]:
    _build._check_cuda.cache_clear()
    yield
    _build._check_cuda.cache_clear()


CAPABILITIES = {
    (6, 1): False,
    (7, 0): False,
    (7, 5): True,
    (8, 0): True,
    (8, 9): True,  # machine code of 8.6 runs on it
    (9, 0): True,
    (10, 0): True,  # through PTX
}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_gpu_older_than_the_build_is_named(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "_config", lambda: CUDA_BUILD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Imaginary GPU")
    message = r"sm_75.* got Imaginary GPU of compute capability \d\.\d.*TORCH_CUDA_ARCH_LIST"
    with contextlib.nullcontext() if CAPABILITIES[capability] else pytest.raises(RuntimeError, match=message):
        _build.check_device(torch.device("cuda", 0))


def test_a_build_without_cuda_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"CUDA_VERSION": None, "CUDA_ARCHITECTURES": (), "CUDA_REASON": "nvcc was not found on PATH"}
    monkeypatch.setattr(_build, "_config", lambda: config)
    with pytest.raises(RuntimeError, match=r"CPU-only one \(nvcc was not found on PATH\).*FUSED_OPS_CUDA=1"):
        _build.check_device(torch.device("cuda", 0))


def test_a_driver_that_does_not_fit_gives_the_drivers_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore text.")

    monkeypatch.setattr(_build, "_config", lambda: CUDA_BUILD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(RuntimeError, match=r"expected a CUDA device, got none\. The NVIDIA driver .* 11040\)\.$"):
        _build.check_device(torch.device("cuda", 0))


def test_the_best_device_has_the_largest_free_memory_times_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [((9, 0), 10), ((8, 0), 80), ((7, 0), 500), ((9, 0), 60)]  # 7.0 is older than the build
    monkeypatch.setattr(_build, "_config", lambda: CUDA_BUILD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Imaginary GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (gpus[index][1], 500))
    assert fused_ops.best_device() == torch.device("cuda", 1)
    assert [device["best"] for device in fused_ops.build_info()["devices"]] == [False, False, True, False, False]
    gpus[:] = [((7, 0), 500)]
    assert fused_ops.best_device() == torch.device("cpu")


# How it is built: setup.py with an imaginary toolkit


SETTINGS = ("FUSED_OPS_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH", "MAX_JOBS", "FUSED_OPS_WERROR")


class Setup:
    """setup.py, run without building anything: its functions, and what it passed to setup()."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.monkeypatch, self.tmp_path, self.arguments = monkeypatch, tmp_path, {}
        for name in SETTINGS:  # set first, so that what setup.py sets is undone as well
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        monkeypatch.setattr(setuptools, "setup", lambda **arguments: self.arguments.update(arguments))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
        monkeypatch.chdir(ROOT)

    def __call__(self, **environment: str) -> dict[str, Any]:
        for name, value in environment.items():
            self.monkeypatch.setenv(name, value)
        return runpy.run_path(str(ROOT / "setup.py"))

    def toolkit(self, version: str, architectures: str) -> Path:
        home = self.tmp_path / "toolkit"
        nvcc = home / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(
            "#!/bin/sh\n"
            'case "$1" in\n'
            f"--version) echo 'Cuda compilation tools, release {version}, V{version}.1';;\n"
            f"--dryrun) echo '#$ TOP={home}/bin/..' >&2;;\n"
            f"--list-gpu-arch) printf 'compute_%s\\n' {architectures};;\n"
            "esac\n"
        )
        nvcc.chmod(0o755)
        return home

    @property
    def extension(self) -> setuptools.Extension:
        return self.arguments["ext_modules"][0]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Setup:
    return Setup(monkeypatch, tmp_path)


def has_cuda(setup: Setup) -> bool:
    kernels = any(source.endswith(".cu") for source in setup.extension.sources)
    assert kernels == (("FUSED_OPS_CUDA", None) in setup.extension.define_macros)
    return kernels


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        ("75 80 86 87 89 90 100 103 120 121", "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"),
        ("50 75 80 86 89 90", "7.5;8.0;8.6;8.9;9.0+PTX"),
    ],
)
def test_all_architectures_that_nvcc_knows_are_built(setup: Setup, architectures: str, expected: str) -> None:
    setup(CUDA_HOME=str(setup.toolkit("13.0", architectures)))
    assert has_cuda(setup)
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == expected


def test_the_users_settings_are_kept(setup: Setup) -> None:
    home = setup.toolkit("13.0", "75 80")
    setup(CUDA_HOME=str(home), TORCH_CUDA_ARCH_LIST="8.0", MAX_JOBS="1")
    assert (os.environ["TORCH_CUDA_ARCH_LIST"], os.environ["MAX_JOBS"]) == ("8.0", "1")
    assert str(home / "include") in setup.extension.include_dirs


def test_jobs_fit_the_cores_and_the_memory(setup: Setup) -> None:
    setup(FUSED_OPS_CUDA="0")
    jobs = int(os.environ["MAX_JOBS"])
    assert 1 <= jobs <= len(os.sched_getaffinity(0))


def test_cuda_home_is_found_behind_a_wrapper_of_nvcc(setup: Setup) -> None:
    home = setup.toolkit("13.0", "75 80")
    wrapper = setup.tmp_path / "elsewhere" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    setup(PATH=f"{wrapper.parent}:{os.environ['PATH']}")
    assert has_cuda(setup)
    assert os.environ["CUDA_HOME"] == str(home)


def test_zero_builds_for_the_cpu_only(setup: Setup) -> None:
    setup(FUSED_OPS_CUDA="0", CUDA_HOME=str(setup.toolkit("13.0", "75")))
    assert not has_cuda(setup)


MISSING = {
    "nvcc": ("13.0", None, r"nvcc was not found in CUDA_HOME=.*install CUDA toolkit 13\.0"),
    "the right toolkit": (
        "13.0",
        "12.8",
        r"nvcc is of CUDA 12\.8 but torch was built with CUDA 13\.0.*CUDA toolkit 13",
    ),
    "a CUDA build of torch": (None, "13.0", r"this torch is a CPU-only build \(install a CUDA build of torch\)"),
}


@pytest.mark.parametrize("missing", MISSING)
def test_one_names_what_to_install_and_auto_builds_for_the_cpu(
    setup: Setup, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_cuda, toolkit, message = MISSING[missing]
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    home = setup.toolkit(toolkit, "75 80") if toolkit else setup.tmp_path
    with pytest.raises(SystemExit, match=message):
        setup(FUSED_OPS_CUDA="1", CUDA_HOME=str(home))
    setup(FUSED_OPS_CUDA="auto", CUDA_HOME=str(home))
    assert not has_cuda(setup)


def test_an_unknown_setting_is_an_error(setup: Setup) -> None:
    with pytest.raises(SystemExit, match=r"expected FUSED_OPS_CUDA in \(auto, 0, 1\), got 'yes'"):
        setup(FUSED_OPS_CUDA="yes")


def test_an_old_torch_is_an_error(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    with pytest.raises(SystemExit, match=r"expected torch >= 2\.11, got 2\.10\.0"):
        setup()


# What was compiled


def test_torchs_own_openmp_runtime_is_the_only_one() -> None:
    result = run_python(
        "import fused_ops\n"
        "fused_ops.build_info()\n"
        "import sys; assert 'fused_ops._C' in sys.modules\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.split('/')[-1]})\n"
    )
    assert result.returncode == 0, result.stderr
    runtimes = [path for path in result.stdout.split() if re.search(r"/lib(g|i)?omp", path)]
    assert len(runtimes) == 1, runtimes


# Beyond the x86-64 baseline: whatever is encoded with VEX or EVEX, mask registers, and the later scalar instructions.
BEYOND_BASELINE = re.compile(
    r"v(?!err|erw)\w+|k(mov|or|and|andn|not|xor|xnor|test|shift|unpck|add)\w*|"
    r"andn|bextr|bls(i|r|msk)|bzhi|mulx|pdep|pext|rorx|s(a|h)rx|shlx|[lt]zcnt|popcnt|movbe|crc32\w*"
)
EVEX_ONLY = re.compile(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])\b")
BF16_ONLY = re.compile(r"vcvtne2?ps2bf16\w*|vdpbf16ps")


def instructions_by_level(library: Path) -> dict[str, dict[str, list[str]]]:
    """The functions of each level that hold instructions of each kind."""
    command = ["objdump", "-d", "-C", "-w", "--no-show-raw-insn", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, dict[str, list[str]]] = {}
    function, level = "", ""
    for line in listing.splitlines():
        if heading := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function = heading[1]
            names = re.findall(r"fused_ops::(avx2|avx512_bf16|avx512)::", function)
            level = names[0] if names else "baseline"
        elif instruction := re.match(r"\s+[0-9a-f]+:\s+(?:(?:lock|rep\w*|bnd|notrack|data16)\s+)*(\w+)", line):
            kind = "baseline"
            if BEYOND_BASELINE.fullmatch(instruction[1]):
                kind = "avx512" if EVEX_ONLY.search(line) else "avx2"
            if BF16_ONLY.fullmatch(instruction[1]):
                kind = "avx512_bf16"
            found.setdefault(level, {}).setdefault(kind, []).append(function)
    return found


@pytest.mark.skipif(not X86, reason="x86-64 only")
def test_instructions_stay_inside_the_functions_of_their_level() -> None:
    need("objdump")
    found = instructions_by_level(Path(_build.load_native().__file__))
    assert len(found["avx2"]["avx2"]) > 1000
    assert len(found["avx512"]["avx512"]) > 1000
    assert len(found["avx512_bf16"]["avx512_bf16"]) > 20
    assert len(found["baseline"]["baseline"]) > 1000
    assert not set(found["baseline"]) - {"baseline"}, sorted(set(found["baseline"]["avx2"]))[:5]
    assert not set(found["avx2"]) - {"baseline", "avx2"}, sorted(set(found["avx2"]["avx512"]))[:5]
    assert "avx512_bf16" not in found["avx512"], sorted(set(found["avx512"]["avx512_bf16"]))[:5]


# compiler, emulator (with the machine that it stands for), level that must be chosen there
MACHINES = {
    "x86-64 without AVX": ("g++", ["qemu-x86_64", "-cpu", "Nehalem"], "baseline"),
    "x86-64 with AVX2": ("g++", ["qemu-x86_64", "-cpu", "Haswell"], "avx2"),
    "aarch64": ("aarch64-linux-gnu-g++", ["qemu-aarch64"], "baseline"),
}


@pytest.fixture(scope="module")
def native_tests() -> dict[str, Path]:
    """The test program that each compiler made."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_loops_run_on_other_machines(
    machine: str, native_tests: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    compiler, emulator, level = MACHINES[machine]
    need(compiler, emulator[0])
    if compiler == "g++" and not X86:
        pytest.skip("x86-64 only")
    if compiler not in native_tests:
        native_tests[compiler] = tmp_path_factory.mktemp("native") / "walk_test"
        sources = [*sorted((ROOT / "csrc/core/cpu").glob("*.cpp")), ROOT / "tests/native/walk_test.cpp"]
        target = ["-static", "-I", str(ROOT / "csrc"), "-o", str(native_tests[compiler])]
        subprocess.run([compiler, *CXX_FLAGS, *target, *map(str, sources)], check=True)
    result = subprocess.run(
        [*emulator, str(native_tests[compiler]), level], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    passed = re.search(rf"{level}: (\d+) passed, 0 failed", result.stdout)
    assert passed, result.stdout
    assert int(passed[1]) > 1000


# The package, built as users build it


@pytest.mark.slow
def test_an_isolated_build_finds_the_installed_torch_and_packs_only_what_is_needed(tmp_path: Path) -> None:
    earlier = ROOT / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "fused_ops"
    earlier.mkdir(parents=True, exist_ok=True)
    (earlier / "gone.py").touch()  # a module that has been deleted since an earlier build
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "FUSED_OPS_CUDA": "0"}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    log = (result.stdout + result.stderr).splitlines()
    said = [line.strip() for line in log if "fused_ops: building" in line]
    assert said == [f"fused_ops: building for torch {torch.__version__}, CPU only: FUSED_OPS_CUDA=0"]
    wheel = next(tmp_path.glob("fused_ops-*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    library = f"fused_ops/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert {library, "fused_ops/_build_config.py", "fused_ops/py.typed", "fused_ops/__init__.py"} <= set(names)
    assert all(name.startswith(("fused_ops/", "fused_ops-")) for name in names)
    assert not [name for name in names if name.endswith((".cpp", ".h", ".cu", ".o", "gone.py"))]
    assert wheel.stat().st_size < 5_000_000
