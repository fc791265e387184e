# SPDX-License-Identifier: Apache-2.0
"""Results as a table in markdown and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contenders import OURS, STOCK
from floors import Verdict
from parameter_sets import PARAMETER_SETS

# Okabe and Ito's palette, told apart by colour-blind readers and in greyscale.
COLOURS = {"loop": "#999999", "foreach": "#56B4E9", "fused": "#0072B2", OURS: "#D55E00"}
LABELS = {"loop": "stock, loop", "foreach": "stock, foreach", "fused": "stock, fused", OURS: "fused_ops"}

HEADER = (
    *("set", "optimizer", "precision", "threads"),
    *("loop ms", "foreach ms", "fused ms", "ours ms", "quartiles"),
    *("vs best stock", "vs fused", "of limit", "ours GB/s", "peak temp.", "others ms"),
)


def table_cells(row: dict[str, Any]) -> list[str]:
    contenders, metrics = row["contenders"], row["metrics"]

    def milliseconds(name: str) -> str:
        if name not in contenders:
            return ""
        wrong = " (wrong)" if contenders[name]["error"] else ""
        return f"{contenders[name]['milliseconds']['median']:.3g}{wrong}"

    def metric(name: str, form: str) -> str:
        return form.format(metrics[name]) if name in metrics else ""

    ours = contenders[OURS]
    spread = ours["milliseconds"]
    others = [name for name in contenders if name not in (*STOCK, OURS)]
    bandwidth, temporary = ours["gigabytes_per_second"], ours["temporary_bytes"]
    return [
        row["set"],
        row["optimizer"],
        row["precision"],
        f"{row['threads']}{' + 1 competing process' if row['competing'] else ''}",
        *(milliseconds(name) for name in STOCK),
        f"**{milliseconds(OURS)}**",
        f"{spread['lower']:.3g} to {spread['upper']:.3g}",
        metric("vs best stock", "{:.2f}x"),
        metric("vs fused", "{:.2f}x"),
        metric("share of limit", "{:.0%}"),
        "" if bandwidth is None else f"{bandwidth:.1f}",
        "" if temporary is None else f"{temporary / 2**20:.2f} MiB",
        ", ".join(f"{name} {milliseconds(name)}" for name in others),
    ]


def format_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """In markdown, without the columns that no line uses."""
    table = [header, *lines]
    used = [index for index in range(len(header)) if any(line[index] for line in table[1:])]
    widths = [max(len(line[index]) for line in table) for index in used]

    def text(line: Sequence[str]) -> str:
        return "| " + " | ".join(line[index].ljust(width) for index, width in zip(used, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([text(table[0]), rule, *(text(line) for line in table[1:])])


def markdown_table(rows: Iterable[dict[str, Any]]) -> str:
    return format_table(HEADER, [table_cells(row) for row in rows])


def markdown(machine: dict[str, Any], rows: Sequence[dict[str, Any]], verdicts: Sequence[Verdict]) -> str:
    sets = [f"- {name}: {PARAMETER_SETS[name].title}" for name in dict.fromkeys(row["set"] for row in rows)]
    facts = [f"- {key}: {value}" for key, value in machine.items()]
    parts = [
        "# Optimizer steps",
        "Milliseconds a step, medians; `quartiles` are those of ours. Ratios are medians of the ratios within a round, "
        "in which all contenders take turns. `of limit` compares with moving the bytes that the algorithm must move "
        "(each gradient read, each parameter and state read and written) at the rate of an in-place read-modify-write "
        "(on a GPU, of a copy) of a 512 MiB buffer, measured in the same rounds; data that stays in a cache can exceed "
        "it.",
        "\n".join(facts),
        "\n".join(sets),
        markdown_table(rows),
    ]
    if verdicts:
        parts += ["## Floors", "\n".join(f"- {verdict}" for verdict in verdicts)]
    return "\n\n".join(parts) + "\n"


def plot_panel(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    """A group of bars for each optimizer, with a line across it at the bandwidth limit."""
    from matplotlib import patheffects

    width = 0.8 / len(COLOURS)
    for place, row in enumerate(rows):
        present = [name for name in COLOURS if name in row["contenders"]]
        left = place - width * len(present) / 2  # an optimizer without a fused stock version has three bars
        for index, name in enumerate(present):
            spread = row["contenders"][name]["milliseconds"]
            axis.bar(
                left + (index + 0.5) * width,
                spread["median"],
                width * 0.92,
                color=COLOURS[name],
                yerr=[[spread["median"] - spread["lower"]], [spread["upper"] - spread["median"]]],
                error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
            )
        limit = row["limit_milliseconds"]
        axis.hlines(limit, left, left + width * len(present), color="black", linewidth=1.4)
        axis.annotate(
            f"{row['metrics']['vs best stock']:.1f}x",
            (left + (len(present) - 0.5) * width, max(row["contenders"][OURS]["milliseconds"]["upper"], limit)),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            fontweight="bold",
            color=COLOURS[OURS],
            path_effects=[patheffects.withStroke(linewidth=2.5, foreground="white")],
        )
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    low, high = axis.get_ylim()
    axis.set_ylim(low / 1.2, high * 1.3)
    axis.set_xticks(range(len(rows)), [row["optimizer"].replace(" ", "\n") for row in rows], fontsize=9)
    axis.set_title(PARAMETER_SETS[rows[0]["set"]].title, fontsize=11)
    axis.set_ylabel("ms a step")
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def plot(rows: Iterable[dict[str, Any]], path: Path, subtitle: str) -> bool:
    """Milliseconds a step of the fp32 rows, a panel for each parameter set; False without matplotlib or such rows."""
    if find_spec("matplotlib") is None:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [row for row in rows if row["precision"] == "fp32" and not row["competing"] and row["limit_milliseconds"]]
    threads = max((row["threads"] for row in rows), default=0)
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["threads"] == threads:
            panels.setdefault(row["set"], []).append(row)
    if not panels:
        return False
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    height = 3.3 * lines + 0.9  # inches
    figure, axes = plt.subplots(lines, columns, figsize=(6.4 * columns, height), squeeze=False)
    for axis, panel in zip(axes.flat, panels.values(), strict=False):
        plot_panel(axis, panel)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)

    shown = [name for name in COLOURS if any(name in row["contenders"] for row in rows)]
    handles: list[Any] = [Patch(color=COLOURS[name], label=LABELS[name]) for name in shown]
    handles.append(Line2D([], [], color="black", linewidth=1.4, label="memory bandwidth limit"))
    where = "GPU" if rows[0].get("device") == "cuda" else f"{threads} thread(s)"
    title = f"One optimizer step, fp32, {where}. Log scale; labels: speed-up over the best stock option"
    figure.suptitle(title, y=1 - 0.1 / height, fontsize=12)
    top = 1 - 0.32 / height
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, top), ncols=5, frameon=False, fontsize=9)
    figure.text(0.5, 0.05 / height, subtitle, ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.2 / height, 1, 1 - 0.62 / height))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
