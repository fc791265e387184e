# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` without a GPU: its order, limits, reports and exit status, the processes that it runs stubbed."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ALL = ["build", "tests", "memcheck", "racecheck", "benchmark", "compiled", "plot"]
FACTS = {
    "date": "2030-04-05",
    "gpus": [
        {"name": "NVIDIA X100 (80GB)", "capability": "9.0", "free_bytes": 70 << 30, "memory_bytes": 80 << 30},
        {"name": "NVIDIA X100 (80GB)", "capability": "10.0", "free_bytes": 70 << 30, "memory_bytes": 80 << 30},
    ],
    "reason": None,
    "driver": "1.2",
    "torch": "9.9+cu130",
    "nvcc": "13.0",
    "python": "3.12.3",
    "commit": "abc",
}


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def load(name: str) -> Any:
    return importlib.import_module(name)


def spread(value: float) -> dict[str, float]:
    return {"median": value, "lower": value, "upper": value}


def row(**changes: Any) -> dict[str, Any]:
    """A row as the benchmark writes it for a GPU."""
    entry = {
        "milliseconds": spread(0.5),
        "kernel_milliseconds": spread(0.4),
        "host_milliseconds": spread(0.05),
        "gigabytes_per_second": 3210.4,
        "error": None,
    }
    values = {
        "set": "b",
        "optimizer": "AdamW",
        "precision": "fp32",
        "elements": 124_439_808,
        "best_stock": "fused",
        "limit_gigabytes_per_second": spread(3400.0),
        "contenders": {"foreach": {**entry, "milliseconds": spread(0.9)}, "fused": entry, "fused_ops": entry},
        "metrics": {"vs best stock": 1.2, "share of limit": 0.95},
    }
    return {**values, **changes}


class Machine:
    """Stands in for processes, tools and time. A process takes `seconds` and ends as `endings` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.facts: dict[str, Any] = dict(FACTS)
        self.tools = {"nvcc": "/cuda/bin/nvcc", "compute-sanitizer": "/cuda/bin/compute-sanitizer"}
        self.modules = {"pytest", "triton", "matplotlib"}
        self.seconds: dict[str, float] = {}
        self.endings: dict[str, tuple[int, str]] = {
            "tests": (0, "....\n2100 passed, 12 skipped in 80.5s (0:01:20)\n"),
            "memcheck": (0, "5 passed, 9 deselected in 9.1s\n========= ERROR SUMMARY: 0 errors\n"),
            "racecheck": (0, "5 passed, 9 deselected in 9.1s\n========= RACECHECK SUMMARY: 0 hazards displayed\n"),
            "planted": (86, "========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 1 error\n"),
        }
        self.rows: dict[str, list[dict[str, Any]]] = {
            "benchmark": [row(), row(optimizer="RMSprop", metrics={"vs best stock": 2.9, "share of limit": 0.92})],
            "compiled": [row(set="d", elements=25_557_032)],
        }
        self.calls: list[tuple[str, Sequence[str], float, dict[str, str]]] = []
        self.seen: list[list[str]] = []  # the steps of the result file when each process starts
        self.output = Path()
        steps = load("gpu_steps")
        monkeypatch.setattr(steps, "run", self.run)
        monkeypatch.setattr(steps, "find_tool", self.tools.get)
        monkeypatch.setattr(steps, "find_spec", lambda name: name if name in self.modules else None)
        for module in (steps, load("gpu_check")):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)

    @staticmethod
    def kind(command: Sequence[str]) -> str:
        text = " ".join(command)
        places = {
            "gpu_environment.py": "environment",
            "setup.py": "build",
            "planted_fault": "planted",
            "--tool memcheck": "memcheck",
            "--tool racecheck": "racecheck",
            "-m pytest": "tests",
            "--compile": "compiled",
            "bench_optimizers.py": "benchmark",
            "gpu_report.py": "plot",
        }
        return next(kind for part, kind in places.items() if part in text)

    def run(self, command: Sequence[str], limit: float, variables: dict[str, str], log: Path) -> Any:
        kind = self.kind(command)
        self.calls.append((kind, command, limit, variables))
        self.seen += [[step["name"] for step in self.record()["steps"]]] if kind != "environment" else []
        status, output = self.endings.get(kind, (0, ""))
        if kind == "environment" and status == 0:
            output = f"a warning\n{json.dumps(self.facts)}\n"
        if kind in self.rows:
            result = Path(command[command.index("--output") + 1], "optimizers.json")
            result.write_text(json.dumps({"rows": self.rows[kind]}))
        seconds = self.seconds.get(kind, 10.0)
        self.now += min(seconds, limit)
        return load("gpu_steps").Ended(None if seconds > limit else status, output)

    def check(self, output: Path, *arguments: str) -> int:
        self.output = output
        return load("gpu_check").main(["--output", str(output), *arguments])

    def record(self) -> dict[str, Any]:
        return json.loads((self.output / "nvidia-x100-80gb" / "2030-04-05.json").read_text())

    def outcomes(self) -> dict[str, str]:
        return {step["name"]: step["outcome"] for step in self.record()["steps"]}

    def detail(self, name: str) -> str:
        return next(step["detail"] for step in self.record()["steps"] if step["name"] == name)

    def called(self, kind: str) -> tuple[Sequence[str], float, dict[str, str]]:
        return next(call[1:] for call in self.calls if call[0] == kind)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_everything_passes(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.check(tmp_path) == 0
    assert machine.outcomes() == dict.fromkeys(ALL, "passed")
    kinds = [kind for kind, *_ in machine.calls]
    assert kinds == ["environment", *ALL[:3], "planted", *ALL[3:]]
    assert machine.detail("tests") == "2100 passed, 12 skipped in 80.5s (0:01:20)"
    record = machine.record()
    assert record["environment"] == FACTS
    assert len(record["rows"]) == 3
    text = (tmp_path / "nvidia-x100-80gb" / "2030-04-05.md").read_text()
    assert "| b | AdamW | fp32 | 0.9 | 0.5 |  | 0.5 | 1.20x | 0.4 / 0.4 | 0.05 / 0.05 | 3210 | 95% | 3400 |" in text
    assert "- MISS RMSprop fp32, set b: speed-up over the best stock option 2.9, goal 3" in text
    printed = capsys.readouterr().out
    assert "== tests: at most" in printed
    assert "met  AdamW fp32, set b: share of the copy bandwidth 0.95, goal 0.93" in printed


def test_what_is_run(machine: Machine, tmp_path: Path) -> None:
    machine.check(tmp_path)
    command, _, variables = machine.called("build")
    assert command[1:] == ("setup.py", "-q", "build_ext", "--inplace")
    assert variables == {"FUSED_OPS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0;10.0"}
    command, _, _ = machine.called("tests")
    assert command[1:5] == ("-m", "pytest", "-m", "cuda")
    assert "-n" not in command
    for kind in ("memcheck", "racecheck", "planted"):
        command, _, variables = machine.called(kind)
        assert command[0] == "/cuda/bin/compute-sanitizer"
        assert variables == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command, _, _ = machine.called("benchmark")
    assert " ".join(command).count("--sets a b c d llama --precisions fp32 bf16") == 1


def test_results_are_written_after_every_step(machine: Machine, tmp_path: Path) -> None:
    machine.check(tmp_path)
    assert machine.seen == [[], ALL[:1], ALL[:2], ALL[:2], *(ALL[:n] for n in range(3, 7))]


def test_a_second_run_of_a_day_keeps_the_first(machine: Machine, tmp_path: Path) -> None:
    for _ in range(3):
        machine.check(tmp_path, "--steps", "build")
    names = sorted(path.stem for path in tmp_path.glob("*/*.json"))
    assert names == ["2030-04-05", "2030-04-05-2", "2030-04-05-3"]


def test_chosen_steps_keep_their_order(machine: Machine, tmp_path: Path) -> None:
    assert machine.check(tmp_path, "--steps", "benchmark", "build") == 0
    assert list(machine.outcomes()) == ["build", "benchmark"]


# ---- time ----


@pytest.mark.parametrize("minutes", [9.0, 4.0, 2.0])
@pytest.mark.parametrize("slow", [[], ["tests"], ["build", "tests", "benchmark"], [*ALL, "environment", "planted"]])
def test_all_steps_fit_into_the_time(machine: Machine, tmp_path: Path, slow: list[str], minutes: float) -> None:
    begin = machine.now
    machine.seconds = dict.fromkeys(slow, 1e9)
    machine.check(tmp_path, "--minutes", str(minutes))
    assert machine.now - begin <= 60 * minutes + 1e-6
    assert all(limit > 0 for *_, limit, _ in machine.calls)
    if "environment" not in slow:
        assert list(machine.outcomes()) == ALL


def test_time_left_over_goes_to_later_steps(machine: Machine, tmp_path: Path) -> None:
    limits = []
    for seconds in (60.0, 5.0):
        machine.seconds["build"] = seconds
        machine.check(tmp_path / str(seconds))
        limits.append({step["name"]: step["limit"] for step in machine.record()["steps"]})
    assert limits[0]["build"] == limits[1]["build"]
    assert all(limits[1][name] > limits[0][name] for name in ALL[1:])
    assert limits[0]["build"] > 150  # enough for two busy cores


def test_the_parts_of_a_step_share_its_limit(machine: Machine, tmp_path: Path) -> None:
    machine.check(tmp_path)
    assert machine.called("planted")[1] == pytest.approx(machine.called("memcheck")[1] - 10)


@pytest.mark.parametrize(
    ("slow", "status"),
    [("build", 1), ("tests", 1), ("memcheck", 1), ("planted", 1), ("racecheck", 1), ("benchmark", 0), ("compiled", 0),
     ("plot", 0)],
)  # fmt: skip
def test_a_step_past_its_limit(machine: Machine, tmp_path: Path, slow: str, status: int) -> None:
    machine.seconds[slow] = 1e9
    assert machine.check(tmp_path) == status
    late = "memcheck" if slow == "planted" else slow
    assert machine.outcomes() == dict.fromkeys(ALL, "passed") | {late: "timed out"}
    assert len(machine.record()["rows"]) == 3  # what was measured before the limit counts


# ---- what can go wrong ----


@pytest.mark.parametrize(
    ("missing", "skipped"),
    [
        ("nvcc", ["build"]),
        ("compute-sanitizer", ["memcheck", "racecheck"]),
        ("pytest", ["tests", "memcheck", "racecheck"]),
        ("triton", ["compiled"]),
        ("matplotlib", ["plot"]),
    ],
)
def test_a_missing_tool_is_reported(machine: Machine, tmp_path: Path, missing: str, skipped: list[str]) -> None:
    machine.tools.pop(missing, None)
    machine.modules.discard(missing)
    assert machine.check(tmp_path) == 0
    assert machine.outcomes() == dict.fromkeys(ALL, "passed") | dict.fromkeys(skipped, "skipped")
    assert all(missing in machine.detail(name) for name in skipped)
    assert missing in (tmp_path / "nvidia-x100-80gb" / "2030-04-05.md").read_text()


SUMMARY = "FAILED tests/test_a.py::test_b[x] - assert 1 == 2\nERROR tests/test_c.py\n"
FAILURES: dict[str, tuple[str, int, str, str, int]] = {  # process, its exit status and output; detail, exit status
    "compiler": ("build", 1, "nvcc error\nerror: command failed\n", "exit status 1: error: command failed", 1),
    "silent": ("build", -9, "", "exit status -9: no output", 1),
    "a test": ("tests", 1, f"{SUMMARY}1 failed, 7 passed in 3.0s\n", "exit status 1: 1 failed, 7 passed in 3.0s", 1),
    "collection": ("tests", 1, "9 passed, 1 error in 3.0s\n", "exit status 1: 9 passed, 1 error in 3.0s", 1),
    "crash": ("tests", -11, "Fatal Python error: Segmentation fault\n", "exit status -11: no summary", 1),
    "all skipped": ("tests", 0, "812 skipped in 3.0s\n", "no test ran: 812 skipped in 3.0s", 1),
    "none": ("tests", 5, "no tests ran in 0.10s\n", "exit status 5: no tests ran in 0.10s", 1),
    "bad access": ("memcheck", 86, "========= Invalid __global__ read\n", "memcheck found errors", 1),
    "hazard": ("racecheck", 86, "========= Error: Race reported\n", "racecheck found errors", 1),
    "short set": ("memcheck", 1, "1 failed in 3.0s\n", "exit status 1: 1 failed in 3.0s", 1),
    "blind memcheck": ("planted", 0, "", "memcheck did not find a planted fault: exit status 0", 1),
    "memcheck crash": ("planted", 1, "", "memcheck did not find a planted fault: exit status 1", 1),
    "benchmark": ("benchmark", 1, "RuntimeError: x\n", "exit status 1: RuntimeError: x", 0),
    "inductor": ("compiled", 1, "RuntimeError: x\n", "exit status 1: RuntimeError: x", 0),
    "plot": ("plot", 1, "no font\n", "exit status 1: no font", 0),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failing_step_is_reported_and_the_rest_goes_on(machine: Machine, tmp_path: Path, case: str) -> None:
    process, status, output, detail, expected = FAILURES[case]
    machine.endings[process] = (status, output)
    assert machine.check(tmp_path) == expected
    name = "memcheck" if process == "planted" else process
    assert machine.outcomes() == dict.fromkeys(ALL, "passed") | {name: "failed"}
    assert machine.detail(name) == detail


def test_failing_tests_are_named(machine: Machine, tmp_path: Path) -> None:
    machine.endings["tests"] = (1, f"{SUMMARY}1 failed, 7 passed, 1 error in 3.0s\n")
    machine.check(tmp_path)
    assert machine.record()["steps"][1]["failures"] == SUMMARY.splitlines()
    assert "- `ERROR tests/test_c.py`" in (tmp_path / "nvidia-x100-80gb" / "2030-04-05.md").read_text()


def test_a_device_that_the_sanitizer_refuses(machine: Machine, tmp_path: Path) -> None:
    for name in ("memcheck", "racecheck"):
        machine.endings[name] = (86, "========= Error: Device not supported. Please refer to the documentation\n")
    assert machine.check(tmp_path) == 0
    assert machine.outcomes()["memcheck"] == machine.outcomes()["racecheck"] == "skipped"


def test_a_tool_that_cannot_be_started(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(command: Sequence[str], *rest: Any) -> Any:
        if machine.kind(command) == "racecheck":
            raise PermissionError(13, "Permission denied")
        return machine.run(command, *rest)

    monkeypatch.setattr(load("gpu_steps"), "run", refuses)
    assert machine.check(tmp_path) == 1
    assert machine.outcomes() == dict.fromkeys(ALL, "passed") | {"racecheck": "failed"}


@pytest.mark.parametrize("late", [False, True])
def test_a_wrong_step_of_ours_fails_the_check(machine: Machine, tmp_path: Path, late: bool) -> None:
    wrong = row(set="c", elements=2_000_000)
    wrong["contenders"]["fused_ops"] = {**wrong["contenders"]["fused_ops"], "error": "differs by 1"}
    machine.rows["benchmark"].append(wrong)
    machine.endings["benchmark"] = (1, "WRONG\n")
    machine.seconds["benchmark"] = 1e9 if late else 10.0
    assert machine.check(tmp_path) == 1
    assert machine.outcomes()["benchmark"] == ("timed out" if late else "failed")


def test_a_wrong_stock_step_does_not(machine: Machine, tmp_path: Path) -> None:
    (first, *_) = machine.rows["benchmark"]
    first["contenders"]["foreach"] = {**first["contenders"]["foreach"], "error": "differs by 1"}
    assert machine.check(tmp_path) == 0
    assert "| 0.9 (wrong) |" in (tmp_path / "nvidia-x100-80gb" / "2030-04-05.md").read_text()


def test_the_compiled_row_replaces_the_plain_one(machine: Machine, tmp_path: Path) -> None:
    machine.rows["benchmark"] = [row(set="d", best_stock="foreach"), row()]
    machine.check(tmp_path)
    assert [(r["set"], r["best_stock"]) for r in machine.record()["rows"]] == [("d", "fused"), ("b", "fused")]


def test_nothing_measured_gives_no_plot(machine: Machine, tmp_path: Path) -> None:
    machine.rows = {}
    machine.endings["benchmark"] = machine.endings["compiled"] = (1, "OutOfMemoryError\n")
    assert machine.check(tmp_path) == 0
    assert machine.outcomes()["plot"] == "skipped"
    assert "Optimizer steps" not in (tmp_path / "nvidia-x100-80gb" / "2030-04-05.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"facts": {**FACTS, "gpus": [], "reason": "torch 9: no driver."}}, r"got none \(torch 9: no driver\)\."),
        ({"endings": {"environment": (1, "ModuleNotFoundError: no torch\n")}}, "ModuleNotFoundError: no torch"),
        ({"seconds": {"environment": 1e9}}, "expected the GPU to answer within 90 s"),
    ],
)
def test_no_gpu_is_one_sentence_and_status_2(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    vars(machine).update(change)
    assert machine.check(tmp_path) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("gpu-check: expected ")
    assert re.search(message, line)
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_for_real(tmp_path: Path) -> None:
    """The script itself, with no device visible: nothing stubbed."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--output", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout.startswith("gpu-check: expected a CUDA GPU, got none (torch ")
    assert len(ended.stdout.splitlines()) == 1


# ---- goals ----


@pytest.mark.parametrize(
    ("changes", "metric", "bound"),
    [
        ({"set": "a", "elements": 16 << 20}, "share of limit", 0.93),
        ({"set": "llama", "elements": 1 << 30, "precision": "bf16"}, "share of limit", 0.93),
        ({"set": "b"}, "vs best stock", 1.15),
        ({"set": "b", "optimizer": "RMSprop"}, "vs best stock", 3.0),
        ({"set": "c", "elements": 2_000_000}, "vs best stock", 2.0),
        ({"set": "c", "optimizer": "RMSprop"}, "vs best stock", 2.0),
    ],
)
def test_goals(changes: dict[str, Any], metric: str, bound: float) -> None:
    report = load("gpu_report")
    for value, met in ((bound, True), (bound - 0.01, False)):
        (verdict,) = report.judge([row(**changes, metrics={metric: value})])
        assert (verdict["met"], verdict["bound"], verdict["value"]) == (met, bound, value)
        assert report.sentence(verdict).startswith("met " if met else "MISS")


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"elements": (16 << 20) - 1}, "share of limit"),
        ({"set": "a"}, "vs best stock"),
        ({"set": "b", "optimizer": "SGD momentum"}, "vs best stock"),
        ({"set": "scalars"}, "share of limit"),
    ],
)
def test_no_goal_for_other_rows(changes: dict[str, Any], metric: str) -> None:
    assert load("gpu_report").judge([row(**changes, metrics={metric: 0.1})]) == []


# ---- processes, for real ----


def alive(process: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_and_what_it_started_end(tmp_path: Path, ends: bool) -> None:
    script = f"sleep 60 & echo $!; {'exit 3' if ends else 'sleep 60'}"
    begin = time.monotonic()
    ended = load("gpu_steps").run(("sh", "-c", script), 1.0, {}, tmp_path / "log")
    assert time.monotonic() - begin < 5
    assert ended.status == (3 if ends else None)
    child = int(ended.output)
    for _ in range(100):
        if not alive(child):
            break
        time.sleep(0.02)
    assert not alive(child)


def test_output_is_of_the_process_alone_and_is_logged(tmp_path: Path) -> None:
    run, log = load("gpu_steps").run, tmp_path / "log"
    for word in ("first", "second"):
        ended = run(("sh", "-c", f"echo $WORD; echo {word} >&2; pwd"), 5.0, {"WORD": "variable"}, log)
        assert ended.output == f"variable\n{word}\n{ROOT}\n"
    assert log.read_text().count("\n== sh -c ") == 2
    assert "first" in log.read_text()


def test_environment_without_torch_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcuda is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_environment.py")], capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert ended.stderr.splitlines()[-1] == "ImportError: libcuda is broken"


def test_nothing_but_the_standard_library_is_imported() -> None:
    """The driver must work, and say what is wrong, where torch is broken."""
    code = "import sys; sys.path.insert(0, 'benchmarks'); import gpu_check; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)
