"""`infcl-gen scale`: a problem on clusters of many sizes, planned and simulated, not measured.

A row has the problem's sizes and FIGURES. `alone_ms` is a step without communication, `peak_bytes` of one device beyond
the inputs, `critical_ms` the longest chain of events by resource, `error` why no plan fits (else None).
"""

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.cli import options, text
from infcl_gen.cli.group import show
from infcl_gen.cli.options import COUNTS, command, option
from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.hardware import resolve_cluster
from infcl_gen.inputs.cluster_file import MAX_DEVICES, read_cluster
from infcl_gen.inputs.problem import MAX_BATCH, Problem, make_problem
from infcl_gen.inputs.text import bytes_text, table_text
from infcl_gen.version import __version__

DEVICES_PER_NODE = 8
UP_TO = 4096
FIGURES = (
    *("strategy", "transport", "step_ms", "forward_ms", "backward_ms", "alone_ms", "efficiency", "peak_bytes"),
    *("bound", "critical_ms", "smallest_budget_bytes", "error"),
)
HEADER = ("batch", "devices", "nodes", "transport", "step", "efficiency", "memory/device", "bound by")
NOTE = "simulated by infcl_gen.planning.timeline from a device profile; nothing here was measured"


@command(
    *(options.loss, options.keys, options.dim),
    option("--batches", "N,...", "Batch sizes, over all devices [1M,32M].", COUNTS),
    option("--devices", "N,...", "Devices in all [8 to 4096, doubled; 8 a node].", COUNTS),
    *options.device,
    option("--plot", "FILE", "Draw time and efficiency against devices: .svg, .png, .pdf."),
    option("-o --output", "FILE", "Write the rows to this .json file."),
)
def scale(flags: dict[str, Any]) -> None:
    """Simulate a step on clusters of many sizes: time, efficiency, memory, and what bounds it.

    Each size is planned as `plan` does it, then its schedule runs as events on hosts, kernels, links and network.
    Nothing is measured, and no GPU is needed. A cluster file gives the devices of a node, and the links.
    """
    from infcl_gen.bench.results import document, write_results

    batches = options.counts(flags, "batches", MAX_BATCH) or [1 << 20, 32 << 20]
    devices = options.counts(flags, "devices", MAX_DEVICES)
    output, picture = options.result_file(flags, "output"), options.result_file(flags, "plot")
    names = [name for name in options.PROBLEM if name not in ("batch_size", "devices", "nodes")]
    problems = clusters({name: flags[name] for name in names}, devices, batches)
    board = resolve_cluster(problems[0]).profile.name
    command = options.command_line("scale", flags, (*names, "batches", "devices"))
    rows = []
    with options.progress(flags) as progress:
        for index, problem in enumerate(problems):
            progress(f"{problem.devices} devices", index, len(problems))
            rows.append(simulated(problem))
    versions = {"infcl_gen": __version__, "python": platform.python_version()}
    result = document(rows, command, board, versions, simulated=True, note=NOTE)
    if output is not None:
        write_results(output, result)
    if picture is not None:
        plot(rows, picture, f"simulated, not measured: {board}; {command}")
    table = table_text(HEADER, [cells(row) for row in rows])
    lines = [table, f"simulated for {board}, not measured", *text.wrote(output, picture)]
    show(flags, result, lambda: "\n".join(lines))


def clusters(flags: Mapping[str, Any], devices: Sequence[int] | None, batches: Sequence[int]) -> list[Problem]:
    """The problem of `flags` (see `make_problem`) for each batch size on each number of devices.

    `devices` None doubles them from one node to all nodes of the cluster file, else to 4096. Nodes have 8 devices
    unless the cluster file says otherwise. Raises InputError for a number that does not fill its nodes.
    """
    file = read_cluster({} if flags.get("cluster") is None else flags["cluster"])
    each = file.devices_per_node or DEVICES_PER_NODE
    if devices is None:
        last = min(MAX_DEVICES, each * file.nodes if file.nodes else max(UP_TO, each))
        devices = [count for power in range(17) if (count := each << power) <= last]
        if file.nodes and devices[-1] < last - last % each:
            devices.append(last - last % each)
    places = []
    for count in devices:
        size = min(count, each)
        if count % size:
            why = f"{count} devices do not fill nodes of {each}"
            raise InputError(f"--devices: {why}; give multiples of {each}, or fewer")
        links = file.links
        if links is not None and links.links_per_node is not None:  # the file describes a whole node
            links = dataclasses.replace(links, links_per_node=min(links.links_per_node, size))
        places.append(dataclasses.replace(file, nodes=count // size, devices_per_node=size, links=links))
    return [make_problem(**{**flags, "batch_size": batch, "cluster": place}) for batch in batches for place in places]


def simulated(problem: Problem) -> dict[str, Any]:
    """The row of one problem."""
    from infcl_gen.emission import simulate_problem

    row: dict[str, Any] = {"loss": problem.loss, "batch": problem.batch_size}
    row |= {name: getattr(problem, name) for name in ("dim", "dtype", "devices", "nodes")} | dict.fromkeys(FIGURES)
    try:
        plan, step = simulate_problem(problem)
    except InfeasibleError as error:
        return row | {"smallest_budget_bytes": error.smallest_budget_bytes, "error": str(error)}
    row |= {f"{part}_ms": _ms(getattr(step, f"{part}_s")) for part in ("step", "forward", "backward", "alone")}
    return row | {
        "strategy": plan.strategy,
        "transport": plan.schedule.transport,
        "efficiency": round(step.efficiency, 4),
        "peak_bytes": plan.predicted_peak_bytes,
        "bound": step.bound,
        "critical_ms": {name: _ms(time_s) for name, time_s in step.critical_s.items()},
        "smallest_budget_bytes": plan.smallest_budget_bytes,
    }


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as the cells below HEADER."""
    sizes = (str(row["batch"]), str(row["devices"]), str(row["nodes"]))
    if row["error"] is not None:
        smallest = row["smallest_budget_bytes"]
        least = f"at least {bytes_text(smallest)}" if smallest else "-"
        return (*sizes, "-", "-", "-", least, "no plan fits the budget")
    time_ms = row["step_ms"]
    step = f"{time_ms / 1e3:.3g} s" if time_ms >= 1e3 else f"{time_ms:.3g} ms"
    efficiency = f"{row['efficiency']:.3f}"
    return (*sizes, row["transport"], step, efficiency, bytes_text(row["peak_bytes"]), row["bound"])


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Two panels over the number of devices: ms of forward and backward, and efficiency. Lines join a batch size.

    A word stands beside a point where the bounding resource changes.
    """
    from matplotlib.figure import Figure

    from infcl_gen.bench.plots import frame, save

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, batch in enumerate(sorted({row["batch"] for row in rows})):
        points = [row for row in rows if row["batch"] == batch and row["error"] is None]
        points.sort(key=lambda row: row["devices"])
        name, color = f"batch {batch >> 20}M" if batch % 2**20 == 0 else f"batch {batch}", f"C{number % 10}"
        bounds = [None, *(row["bound"] for row in points)]
        for axis, what in ((left, "step_ms"), (right, "efficiency")):
            line = [row["devices"] for row in points], [row[what] for row in points]
            axis.plot(*line, color=color, marker="o", markersize=3, linewidth=2, label=name)
            for before, row in zip(bounds, points, strict=False):
                if row["bound"] != before:
                    beside = {"xytext": (3, 4), "textcoords": "offset points"}
                    axis.annotate(row["bound"], (row["devices"], row[what]), fontsize=7, color=color, **beside)
    sizes = {row["devices"]: str(row["devices"]) for row in rows}
    frame(left, "devices", "ms, forward + backward (simulated)", sizes)
    frame(right, "devices", "of the same work without communication", sizes)
    left.set_yscale("log")
    right.set_ylim(0, 1.05)
    left.legend(fontsize=8)
    save(figure, path, title)


def _ms(time_s: float) -> float:
    return float(f"{1e3 * time_s:.6g}")
