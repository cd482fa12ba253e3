"""Time and memory against the batch size, drawn from measured rows by matplotlib (the `plot` extra)."""

import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.bench.results import Row, label
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.files import write_file
from infcl_gen.inputs.text import show

FORMATS = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Raises InputError for another format, ToolchainError without matplotlib."""
    if path.suffix not in FORMATS:
        raise InputError(f"--plot: {show(str(path))} must end in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ToolchainError("--plot: needs matplotlib, which is not installed; pip install matplotlib")


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Two panels for each (loss, dim, dtype): ms of forward and backward, and MiB beyond the inputs; both axes log.

    Rows without figures are left out. The file is complete or absent.
    """
    from matplotlib.figure import Figure

    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["error"] is None:
            groups.setdefault((row["loss"], row["dim"], row["dtype"]), []).append(row)
    names = sorted({label(row) for here in groups.values() for row in here})
    figure = Figure(figsize=(11, 1 + 3.8 * max(1, len(groups))), layout="constrained")
    axes = figure.subplots(max(1, len(groups)), 2, squeeze=False)
    for pair, ((loss, dim, dtype), here) in zip(axes, groups.items(), strict=False):
        here.sort(key=lambda row: row["batch"])
        batches = {row["batch"] for row in here}
        sizes = {size: f"{size >> 10}k" if size % 1024 == 0 else str(size) for size in batches}
        panels = (("median_ms", "ms, forward + backward", 1.0), ("peak_bytes", "MiB beyond the inputs", 2.0**20))
        for axis, (what, unit, divisor) in zip(pair, panels, strict=True):
            for name in dict.fromkeys(map(label, here)):
                points, number = [row for row in here if label(row) == name], names.index(name)
                axis.plot(
                    [row["batch"] for row in points], [row[what] / divisor for row in points],
                    color=f"C{number % 10}", linestyle="-" if number < 10 else "--", marker="o", markersize=3,
                    linewidth=2.5 if name.startswith("infcl") else 1.2, label=name,
                )  # fmt: skip
            frame(axis, "batch size", unit, sizes, yscale="log")
            axis.set_title(f"{loss}, D = {dim}, {dtype}", fontsize=10)
        pair[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path, title)


def frame(axis: Any, x: str, y: str, ticks: Mapping[int, str], **scales: str) -> None:
    """Label the axes: x is logarithmic, with a tick at each size."""
    from matplotlib.ticker import NullLocator

    axis.set(xscale="log", xlabel=x, ylabel=y, **scales)
    axis.set_xticks(sorted(ticks), [ticks[size] for size in sorted(ticks)], fontsize=8)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(True, alpha=0.3)


def save(figure: Any, path: Path, title: str) -> None:
    """Write the figure atomically, in the format of the path's suffix."""
    from matplotlib import rc_context

    figure.suptitle(title, fontsize=10)
    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "infcl_gen"}):  # the same rows give the same bytes
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(content, format=path.suffix[1:], dpi=150, metadata=metadata)
    write_file(path, content.getvalue())
