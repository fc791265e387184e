# SPDX-License-Identifier: Apache-2.0
"""python -m fused_ops info | verify | bench | tune: what was built, whether it is right, what it gains, what runs."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import dispatch
from ._build import best_device, build_info, why_no_cuda_kernels

# One row an optimizer and a set of its arguments.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"weight_decay": 0.01}),
    ("Adam", {"amsgrad": True, "maximize": True}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    ("SGD", {"weight_decay": 0.01}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
]
VERIFY_STEPS = 5
# In units of the dtype's eps times the largest parameter. Storing a parameter of that size rounds it by at most half a
# unit a step, VERIFY_STEPS times, which adds up to less in practice; the step itself is far smaller than the parameter.
VERIFY_LIMIT = 2.0

Parameters = list[torch.Tensor]


def random_parameters(sizes: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> Parameters:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def say(rows: list[Sequence[str]]) -> None:
    """Prints a table; the first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def describe(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items()) or "defaults"


def info(options: argparse.Namespace) -> int:
    facts = build_info()
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    cuda = f"{facts['cuda_version']} for {', '.join(facts['cuda_architectures'])}"
    if not facts["cuda"]:
        cuda = ": ".join(filter(None, ("not built", why_no_cuda_kernels())))
    # Beside a CPU build of torch a build without CUDA is as it should be.
    cuda_reason = facts["cuda_reason"] if torch.version.cuda else None
    levels = ", ".join(facts["cpu_levels"])
    print(f"fused_ops {facts['version']}")
    print(f"torch     built with {facts['torch_built']}, running {facts['torch_running']}")
    print(f"compiler  {facts['compiler']}")
    print(f"CPU       {facts['cpu_level']} chosen of {', '.join(facts['cpu_levels_supported'])} (compiled: {levels})")
    print(f"CUDA      {cuda}")
    print(f"enabled   {', '.join(facts['enabled']) or 'nothing'}")
    for device in facts["devices"]:
        capability = ", compute capability {}.{}".format(*device["capability"]) if device["capability"] else ""
        memory = f"{device['memory_free'] / 2**30:.1f} of {device['memory'] / 2**30:.1f} GiB free"
        best = " (best)" if device["best"] else ""
        print(f"device    {device['device']}: {device['name']}, {memory}{capability}{best}")
    for reason in [facts["native_reason"], cuda_reason, *(device["reason"] for device in facts["devices"])]:
        if reason:
            print(f"note      {reason}")
    return 0


def train(
    optimizer_class: Any, arguments: dict[str, Any], start: Parameters, gradients: list[Parameters]
) -> Parameters:
    parameters = [tensor.clone().requires_grad_() for tensor in start]
    optimizer = optimizer_class(parameters, **arguments)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def largest_error(results: Parameters, oracle: Parameters) -> float:
    """The largest difference, in units of eps times the largest value; infinite if a result is not finite."""
    worst = 0.0
    for result, expected in zip(results, oracle, strict=True):
        difference = (result.double() - expected).abs().max() / (torch.finfo(result.dtype).eps * expected.abs().max())
        worst = max(worst, difference.item() if difference.isfinite() else float("inf"))
    return worst


def verify(options: argparse.Namespace) -> int:
    """Compares every fused optimizer with torch.optim run in float64 on the same random numbers.

    The limit is VERIFY_LIMIT, or stock's own error in that dtype where that is larger. In float64 stock is the oracle,
    and its unknown error is added: as many units as in float32, since it takes the same roundings.
    """
    from . import optim

    sizes = [1, 7, 64, 1023, 65537]
    rows: list[Sequence[str]] = [("optimizer", "arguments", "dtype", "error (eps)", "stock's", "")]
    failures = 0
    for number, (name, arguments) in enumerate(CASES):
        stock, stock_arguments = getattr(torch.optim, name), {**arguments, "foreach": False}
        stock_errors: dict[torch.dtype, float] = {}
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            start = random_parameters(sizes, dtype, options.device, number)
            gradients = [random_parameters(sizes, dtype, options.device, 100 + step) for step in range(VERIFY_STEPS)]
            exact = [[tensor.double() for tensor in step] for step in (start, *gradients)]
            oracle = train(stock, stock_arguments, exact[0], exact[1:])
            error = largest_error(train(getattr(optim, name), arguments, start, gradients), oracle)
            if dtype == torch.float64:
                limit, stock_text = VERIFY_LIMIT + stock_errors[torch.float32], "oracle"
            else:
                stock_errors[dtype] = largest_error(train(stock, stock_arguments, start, gradients), oracle)
                limit, stock_text = max(VERIFY_LIMIT, stock_errors[dtype]), f"{stock_errors[dtype]:.2f}"
            failures += not error <= limit
            type_name = str(dtype).removeprefix("torch.")
            result = "ok" if error <= limit else "WRONG"
            rows.append((name, describe(arguments), type_name, f"{error:.2f}", stock_text, result))
    say(rows)
    print(f"{len(rows) - 1 - failures} of {len(rows) - 1} agree with float64 torch.optim on {options.device}")
    return 1 if failures else 0


def milliseconds(step: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first, the median and the third."""
    first, median, third = statistics.quantiles(values, method="inclusive") if len(values) > 1 else [*values] * 3
    return first, median, third


def bench(options: argparse.Namespace) -> int:
    """Times a step of each optimizer beside stock PyTorch's ways, taking turns; benchmarks/ has the full comparison."""
    from . import optim

    sizes = [256 * (1 + i % 16) for i in range(options.tensors)] + [options.elements]
    rows: list[Sequence[str]] = [
        ("optimizer", "arguments", "fused_ops ms", "quartiles", "best of stock ms", "quartiles", "times faster")
    ]
    print(f"{len(sizes)} float32 tensors, {sum(sizes):,} elements, {options.device}, median of {options.repeats} steps")
    for number, (name, arguments) in enumerate(CASES):
        print(f"\r{name} ({number + 1} of {len(CASES)}) ", end="", file=sys.stderr, flush=True)
        stock = getattr(torch.optim, name)
        ways: dict[str, Any] = {"ours": (getattr(optim, name), {}), "foreach": (stock, {"foreach": True})}
        if name != "RMSprop":
            ways["fused"] = (stock, {"fused": True})
        steps = {}
        for way, (optimizer_class, choice) in ways.items():
            parameters = random_parameters(sizes, torch.float32, options.device, seed=0)
            for parameter in parameters:
                parameter.requires_grad_().grad = torch.randn_like(parameter)
            steps[way] = optimizer_class(parameters, **arguments, **choice).step
        times: dict[str, list[float]] = {way: [] for way in steps}
        for repeat in range(options.repeats + 2):
            for way, step in steps.items():
                elapsed = milliseconds(step, options.device)
                if repeat >= 2:  # the first steps make the states
                    times[way].append(elapsed)
        first, median, third = quartiles(times.pop("ours"))
        stock_quartiles = {way: quartiles(values) for way, values in times.items()}
        best = min(stock_quartiles, key=lambda way: stock_quartiles[way][1])
        stock_first, stock_median, stock_third = stock_quartiles[best]
        ours = (f"{median:.2f}", f"{first:.2f} to {third:.2f}")
        stocks = (f"{stock_median:.2f} ({best})", f"{stock_first:.2f} to {stock_third:.2f}")
        rows.append((name, describe(arguments), *ours, *stocks, f"{stock_median / median:.2f}"))
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
    say(rows)
    return 0


def parse_shape(text: str) -> tuple[int, int, int]:
    sizes = tuple(int(size) for size in text.split("x"))
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError
    return sizes


def tune(options: argparse.Namespace) -> int:
    found = dispatch.tune(options.shapes or dispatch.SHAPES, seconds=options.seconds)
    rows: list[Sequence[str]] = [("operation", "dtype", "m", "k", "n", "faster")]
    for line in found:
        if line.faster != dispatch.runs_by_default(line):
            mode = "" if line.operation in dispatch.PRODUCTS else ", training" if line.training else ", inference"
            rows.append((line.operation + mode, line.dtype, str(line.m), str(line.k), str(line.n), line.faster))
    print(
        f"{len(found)} choices measured; where the default is not the fastest:"
        if len(rows) > 1
        else f"{len(found)} choices measured: the default is the fastest everywhere."
    )
    if len(rows) > 1:
        say(rows)
    print(f"Saved in {dispatch.tuning_file()}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fused_ops", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    info_parser = commands.add_parser("info", help="what was built and what runs here")
    info_parser.add_argument("--json", action="store_true", help="print it as JSON")
    info_parser.set_defaults(run=info)
    verify_parser = commands.add_parser("verify", help="compare every optimizer with float64 torch.optim")
    verify_parser.set_defaults(run=verify)
    bench_parser = commands.add_parser("bench", help="time every optimizer beside torch.optim")
    bench_parser.add_argument("--tensors", type=int, default=500, help="small tensors (default: %(default)s)")
    bench_parser.add_argument("--elements", type=int, default=8_000_000, help="of a large one (default: %(default)s)")
    bench_parser.add_argument("--repeats", type=int, default=9, help="timed steps (default: %(default)s)")
    bench_parser.set_defaults(run=bench)
    tune_parser = commands.add_parser("tune", help="measure what is faster for linear layers, and save it")
    tune_parser.add_argument("shapes", nargs="*", type=parse_shape, metavar="ROWSxINxOUT", help="default: eight shapes")
    tune_parser.add_argument("--seconds", type=float, default=0.3, help="a comparison (default: %(default)s)")
    tune_parser.set_defaults(run=tune)
    for subparser in (verify_parser, bench_parser):
        subparser.add_argument("--device", type=torch.device, help="default: the best one found")
    options = parser.parse_args(arguments)
    if options.run in (verify, bench):
        options.device = options.device or best_device()
    return options.run(options)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:  # a library that cannot be used says why in one sentence
        sys.exit(str(error))
