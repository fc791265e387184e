# SPDX-License-Identifier: Apache-2.0
"""Results of linear layers as a table in markdown and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contenders import OURS
from linear_contenders import COMPILED, FORWARD, LIMIT, OUR_FUNCTIONAL, STOCK, STOCK_FUNCTIONAL, TRAINING
from linear_floors import LinearVerdict
from report import format_table

HEADER = (
    *("block", "activation", "rows x inputs x hidden", "precision", "pass"),
    *("stock ms", "compiled ms", "ours ms", "quartiles", "vs stock", "vs compiled", "products ms", "of limit"),
    *("stock func. ms", "ours func. ms", "vs func.", "stock saved", "ours saved"),
)
# Okabe and Ito's palette, told apart by colour-blind readers.
COLOURS = {
    "gelu": "#D55E00",
    "gelu_tanh": "#E69F00",
    "gelu_new": "#F0E442",
    "silu": "#009E73",
    "relu": "#56B4E9",
    "identity": "#999999",
    "swiglu": "#0072B2",
}


def shape_of(row: dict[str, Any], separator: str = "x") -> str:
    return separator.join(map(str, row["shape"]))


def table_cells(row: dict[str, Any]) -> list[str]:
    contenders, metrics = row["contenders"], row["metrics"]

    def milliseconds(name: str) -> str:
        if name not in contenders:
            return ""
        wrong = " (wrong)" if contenders[name]["error"] else ""
        return f"{contenders[name]['milliseconds']['median']:.3g}{wrong}"

    def metric(name: str, form: str = "{:.2f}x") -> str:
        return form.format(metrics[name]) if name in metrics else ""

    def saved(name: str) -> str:
        size = contenders[name]["saved_bytes"]
        return "" if size is None else f"{size / 2**20:.3g} MiB"

    spread = contenders[OURS]["milliseconds"]
    return [
        *(row["block"], row["activation"], shape_of(row), row["precision"], row["mode"]),
        *(milliseconds(STOCK), milliseconds(COMPILED), f"**{milliseconds(OURS)}**"),
        f"{spread['lower']:.3g} to {spread['upper']:.3g}",
        *(metric(f"vs {STOCK}"), metric(f"vs {COMPILED}"), milliseconds(LIMIT), metric("share of limit", "{:.0%}")),
        *(milliseconds(STOCK_FUNCTIONAL), milliseconds(OUR_FUNCTIONAL), metric(f"vs {STOCK_FUNCTIONAL}")),
        *(saved(STOCK), saved(OURS)),
    ]


def gradient_bytes(row: dict[str, Any]) -> str:
    saved = row["metrics"]["gradient bytes saved"] / 2**20
    what = f"{row['block']} {row['activation']} {shape_of(row)} {row['precision']}"
    return (
        f"{what}: a pass needs {saved:.4g} MiB of memory and {2 * saved:.4g} MiB of traffic less, since no gradient "
        "is written and then read to be added"
    )


def markdown_table(rows: Iterable[dict[str, Any]]) -> str:
    return format_table(HEADER, [table_cells(row) for row in rows])


def markdown(machine: dict[str, Any], rows: Sequence[dict[str, Any]], verdicts: Sequence[LinearVerdict]) -> str:
    parts = [
        "# Linear-activation layers",
        "Milliseconds a pass, medians; `quartiles` are those of ours. Ratios are medians of the ratios within a round, "
        "in which all contenders take turns. `forward` runs under no_grad; `forward+backward` gives the gradients of "
        "input and parameters, from None as after zero_grad(); with `kept .grad` those of the parameters are added to "
        "what is there. `products` are the same matrix products alone, into buffers that are kept: `of limit` compares "
        "with them, and can exceed 100% where another product is chosen. `func.` calls functions of the parameters in "
        "place of modules. `saved` is what autograd keeps for backward, beside the input and the parameters.",
        "\n".join(f"- {key}: {value}" for key, value in machine.items()),
        markdown_table(rows),
    ]
    in_place = [row for row in rows if "gradient bytes saved" in row["metrics"]]
    if in_place:
        parts += ["## Gradients added in place", "\n".join(f"- {gradient_bytes(row)}" for row in in_place)]
    if verdicts:
        parts += ["## Floors", "\n".join(f"- {verdict}" for verdict in verdicts)]
    return "\n\n".join(parts) + "\n"


def plot_panel(axis: Any, rows: Sequence[dict[str, Any]], title: str) -> None:
    """A group of bars for each shape, one an activation, with a tick where only the products would take time."""
    shapes = list(dict.fromkeys(shape_of(row, "\n") for row in rows))
    labels = [label for label in COLOURS if any(label_of(row) == label for row in rows)]
    width = 0.84 / len(labels)
    for row in rows:
        place = shapes.index(shape_of(row, "\n")) + (labels.index(label_of(row)) - (len(labels) - 1) / 2) * width
        speedup = row["metrics"][f"vs {STOCK}"]
        axis.bar(place, speedup - 1, 0.92 * width, bottom=1, color=COLOURS[label_of(row)])
        limit = row["metrics"]["limit vs stock"]
        axis.hlines(limit, place - width / 2, place + width / 2, color="black", linewidth=1.3)
    axis.axhline(1, color="#333333", linewidth=0.8)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}x")
    axis.set_xticks(range(len(shapes)), shapes, fontsize=8)
    axis.set_title(title, fontsize=11)
    axis.set_ylabel("times as fast as stock")
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def label_of(row: dict[str, Any]) -> str:
    return "swiglu" if row["block"] == "gate" else row["activation"]


def plot(rows: Iterable[dict[str, Any]], path: Path, subtitle: str) -> bool:
    """Speed-ups of the fp32 layers, a panel for each mode; False without matplotlib or such rows."""
    if find_spec("matplotlib") is None:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [row for row in rows if row["precision"] == "fp32" and row["block"] in ("layer", "gate")]
    panels = {mode: [row for row in rows if row["mode"] == mode] for mode in (FORWARD, TRAINING)}
    panels = {mode: panel for mode, panel in panels.items() if panel}
    if not panels:
        return False
    height = 3.4 * len(panels) + 0.8  # inches
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, height), squeeze=False)
    for axis, (mode, panel) in zip(axes.flat, panels.items(), strict=True):
        plot_panel(axis, panel, mode)
    used = [label for label in COLOURS if any(label_of(row) == label for row in rows)]
    handles: list[Any] = [Patch(color=COLOURS[label], label=label) for label in used]
    handles.append(Line2D([], [], color="black", linewidth=1.3, label="products alone"))
    threads = max(row["threads"] for row in rows)
    title = f"fused_ops against stock eager, fp32, {threads} thread(s); rows, inputs and hidden features below the bars"
    figure.suptitle(title, y=1 - 0.1 / height, fontsize=12)
    top = 1 - 0.32 / height
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, top), ncols=8, frameon=False, fontsize=9)
    figure.text(0.5, 0.05 / height, subtitle, ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.2 / height, 1, 1 - 0.62 / height))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
