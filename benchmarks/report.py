# SPDX-License-Identifier: Apache-2.0
"""Results as a table in markdown and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from contenders import OURS, STOCK
from floors import Verdict
from parameter_sets import PARAMETER_SETS

# Okabe and Ito's palette, told apart by colour-blind readers and in greyscale.
COLOURS = {"loop": "#999999", "foreach": "#56B4E9", "fused": "#0072B2", OURS: "#D55E00"}
LABELS = {"loop": "stock, loop", "foreach": "stock, foreach", "fused": "stock, fused", OURS: "fused_ops"}

HEADER = (
    ("set", "optimizer", "precision", "threads")
    + ("loop ms", "foreach ms", "fused ms", "ours ms", "quartiles")
    + ("vs best stock", "vs fused", "of limit", "ours GB/s", "peak temp.", "others ms")
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


def markdown_table(rows: Iterable[dict[str, Any]]) -> str:
    lines = [list(HEADER), *(table_cells(row) for row in rows)]
    used = [index for index in range(len(HEADER)) if any(line[index] for line in lines[1:])]
    widths = [max(len(line[index]) for line in lines) for index in used]

    def text(line: Sequence[str]) -> str:
        return "| " + " | ".join(line[index].ljust(width) for index, width in zip(used, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([text(lines[0]), rule, *(text(line) for line in lines[1:])])


def markdown(machine: dict[str, Any], rows: Sequence[dict[str, Any]], verdicts: Sequence[Verdict]) -> str:
    sets = [f"- {name}: {PARAMETER_SETS[name].title}" for name in dict.fromkeys(row["set"] for row in rows)]
    facts = [f"- {key}: {value}" for key, value in machine.items()]
    parts = [
        "# Optimizer steps",
        "Milliseconds a step, medians; `quartiles` are those of ours. Ratios are medians of the ratios within a round, in "
        "which all contenders take turns. `of limit` compares with moving the bytes that the algorithm must move (each "
        "gradient read, each parameter and state read and written) at the rate of an in-place read-modify-write of a "
        "512 MiB buffer, measured in the same rounds; data that stays in a cache can exceed it.",
        "\n".join(facts),
        "\n".join(sets),
        markdown_table(rows),
    ]
    if verdicts:
        parts += ["## Floors", "\n".join(f"- {verdict}" for verdict in verdicts)]
    return "\n\n".join(parts) + "\n"


def plot(rows: Iterable[dict[str, Any]], path: Path, subtitle: str) -> bool:
    """Bars of milliseconds a step for the fp32 rows, a panel for each parameter set; False without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import patheffects
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [row for row in rows if row["precision"] == "fp32" and not row["competing"] and row["set"] != "scalars"]
    threads = max((row["threads"] for row in shown), default=0)
    shown = [row for row in shown if row["threads"] == threads]
    sets = list(dict.fromkeys(row["set"] for row in shown))
    if not sets:
        return False
    columns = min(2, len(sets))
    lines = -(-len(sets) // columns)
    height = 3.3 * lines + 0.9
    figure, axes = plt.subplots(lines, columns, figsize=(6.4 * columns, height), squeeze=False)
    names = (*STOCK, OURS)
    width = 0.8 / len(names)
    for axis, set_name in zip(axes.flat, sets, strict=False):
        panel = [row for row in shown if row["set"] == set_name]
        for place, row in enumerate(panel):
            present = [name for name in names if name in row["contenders"]]
            left = place - width * len(present) / 2  # an optimizer without a fused stock version has three bars
            for index, name in enumerate(present):
                spread = row["contenders"][name]["milliseconds"]
                errors = [[spread["median"] - spread["lower"]], [spread["upper"] - spread["median"]]]
                axis.bar(
                    left + (index + 0.5) * width,
                    spread["median"],
                    width * 0.92,
                    color=COLOURS[name],
                    yerr=errors,
                    error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
                )
            limit = row["limit_milliseconds"]
            if limit is not None:
                axis.hlines(limit, left, left + width * len(present), color="black", linewidth=1.4)
            ours = row["contenders"][OURS]["milliseconds"]
            axis.annotate(
                f"{row['metrics']['vs best stock']:.1f}x",
                (left + (len(present) - 0.5) * width, max(ours["upper"], limit or 0)),
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
        axis.set_xticks(range(len(panel)), [row["optimizer"].replace(" ", "\n") for row in panel], fontsize=9)
        axis.set_title(PARAMETER_SETS[set_name].title, fontsize=11)
        axis.set_ylabel("ms a step")
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(sets) :]:
        axis.set_visible(False)
    handles: list[Any] = [Patch(color=COLOURS[name], label=LABELS[name]) for name in names]
    handles.append(Line2D([], [], color="black", linewidth=1.4, label="memory bandwidth limit"))
    title = (
        f"One optimizer step, fp32, {threads} thread(s): log scale, labels give the speed-up over the best stock option"
    )
    figure.suptitle(title, y=1 - 0.1 / height, fontsize=12)
    top = 1 - 0.32 / height  # inches below the upper edge
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, top), ncols=5, frameon=False, fontsize=9)
    figure.text(0.5, 0.05 / height, subtitle, ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.2 / height, 1, 1 - 0.62 / height))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
