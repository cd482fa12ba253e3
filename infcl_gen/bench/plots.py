"""Time and memory against the batch size, drawn from measured rows by matplotlib (the `plot` extra); and simulated rows
against the number of devices."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infcl_gen.bench.point import GENERATED
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.files import write_file
from infcl_gen.inputs.text import show

FORMATS = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Raises InputError for a name of another format, ToolchainError without matplotlib."""
    if path.suffix not in FORMATS:
        raise InputError(f"--plot: {show(str(path))} must end in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ToolchainError("--plot: needs matplotlib, which is not installed; pip install matplotlib")


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Two panels for each (loss, dim, dtype): ms of forward and backward, and MiB beyond the inputs; both axes log.

    Rows without figures are left out; points of one contestant are joined. The file is complete or absent.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    groups: dict[tuple[str, int, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        if row["error"] is None:
            lines = groups.setdefault((row["loss"], row["dim"], row["dtype"]), {})
            lines.setdefault(_label(row), []).append(row)
    labels = sorted({label for lines in groups.values() for label in lines})
    figure = Figure(figsize=(11, 1 + 3.8 * max(1, len(groups))), layout="constrained")
    axes = figure.subplots(max(1, len(groups)), 2, squeeze=False)
    for pair, ((loss, dim, dtype), lines) in zip(axes, groups.items(), strict=False):
        for axis, what, unit, divisor in (
            (pair[0], "median_ms", "ms, forward + backward", 1.0),
            (pair[1], "peak_bytes", "MiB beyond the inputs", 2.0**20),
        ):
            for label, points in lines.items():
                points = sorted(points, key=lambda row: row["batch"])
                number = labels.index(label)
                axis.plot(
                    [row["batch"] for row in points],
                    [row[what] / divisor for row in points],
                    color=f"C{number % 10}",
                    linestyle="-" if number < 10 else "--",
                    marker="o",
                    markersize=3,
                    linewidth=2.5 if label.startswith("infcl") else 1.2,
                    label=label,
                )
            axis.set(xscale="log", yscale="log", xlabel="batch size", ylabel=unit)
            sizes = sorted({row["batch"] for points in lines.values() for row in points})
            axis.set_xticks(sizes, [f"{size >> 10}k" if size % 1024 == 0 else str(size) for size in sizes])
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_title(f"{loss}, D = {dim}, {dtype}", fontsize=10)
            axis.grid(True, alpha=0.3)
        pair[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def plot_scaling(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Two panels over the number of devices, of simulated rows: ms of forward and backward, and efficiency against the
    same work without communication. Points of one batch size are joined; the word beside one says what bounds it, where
    that changes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    batches = sorted({row["batch"] for row in rows})
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axis, what, label in (
        (left, "step_ms", "ms, forward + backward (simulated)"),
        (right, "efficiency", "of the same work without communication"),
    ):
        for number, batch in enumerate(batches):
            points = [row for row in rows if row["batch"] == batch and row["error"] is None]
            points.sort(key=lambda row: row["devices"])
            name = f"batch {batch >> 20}M" if batch % 2**20 == 0 else f"batch {batch}"
            axis.plot(
                [row["devices"] for row in points], [row[what] for row in points],
                color=f"C{number % 10}", marker="o", markersize=3, linewidth=2, label=name,
            )  # fmt: skip
            bound = None
            for row in points:
                if row["bound"] != bound:
                    bound = row["bound"]
                    axis.annotate(bound, (row["devices"], row[what]), fontsize=7, color=f"C{number % 10}",
                                  xytext=(3, 4), textcoords="offset points")  # fmt: skip
        counts = sorted({row["devices"] for row in rows})
        axis.set(xscale="log", xlabel="devices", ylabel=label)
        axis.set_xticks(counts, [str(count) for count in counts], fontsize=8)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(True, alpha=0.3)
    left.set_yscale("log")
    right.set_ylim(0, 1.05)
    left.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "infcl_gen"}):  # the same rows give the same bytes
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(content, format=path.suffix[1:], dpi=150, metadata=metadata)
    write_file(path, content.getvalue())


def _label(row: dict[str, Any]) -> str:
    name = row["package"]
    return row["impl"] if name in (None, GENERATED) else f"{row['impl']} {name}"
