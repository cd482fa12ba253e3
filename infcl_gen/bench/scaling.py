"""A problem on clusters of many sizes: planned, then simulated, not measured.

A row has `loss, batch, dim, dtype, devices, nodes, strategy, transport, step_ms, forward_ms, backward_ms, alone_ms`
(the same work without communication), `efficiency`, `peak_bytes` (of one device, beyond the inputs), `bound`,
`critical_ms` (what the longest chain of events is made of), and `error`: why no plan fits, else None.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from infcl_gen.bench.results import SCHEMA_VERSION
from infcl_gen.emission import simulate_problem
from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.files import checksum
from infcl_gen.inputs.cluster_file import MAX_DEVICES, ClusterFile, read_cluster
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.inputs.text import bytes_text
from infcl_gen.version import __version__

DEVICES_PER_NODE = 8
UP_TO = 4096
HEADER = ("batch", "devices", "nodes", "transport", "step", "efficiency", "memory/device", "bound by")


def clusters(flags: Mapping[str, Any], devices: Sequence[int] | None, batches: Sequence[int]) -> list[Problem]:
    """The problem of `flags` (those of `make_problem`) for each batch size on each number of devices.

    Nodes have as many devices as the cluster file says, else 8. `devices` None: doubled from one node to all nodes of
    the cluster file, else to 4096. Raises InputError for a number that does not fill its nodes.
    """
    file = read_cluster(flags["cluster"]) if flags.get("cluster") is not None else ClusterFile()
    each = file.devices_per_node or DEVICES_PER_NODE
    if devices is None:
        last = min(MAX_DEVICES, each * file.nodes if file.nodes else max(UP_TO, each))
        devices = [count for power in range(17) if (count := each << power) <= last]
        if file.nodes and devices[-1] < last - last % each:
            devices.append(last - last % each)
    for count in devices:
        if count > each and count % each:
            raise InputError(
                f"--devices: {count} devices do not fill nodes of {each}; give multiples of {each}, or fewer"
            )
    found = []
    for batch in batches:
        for count in devices:
            size = min(count, each)
            links = file.links
            if links is not None and links.links_per_node is not None:  # of a whole node
                links = dataclasses.replace(links, links_per_node=min(links.links_per_node, size))
            here = dataclasses.replace(file, nodes=count // size, devices_per_node=size, links=links)
            found.append(make_problem(**{**flags, "batch_size": batch, "cluster": here}))
    return found


def simulated(problem: Problem) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {
        "loss": problem.loss, "batch": problem.batch_size, "dim": problem.dim, "dtype": problem.dtype,
        "devices": problem.devices, "nodes": problem.nodes,
    }  # fmt: skip
    figures: dict[str, Any] = dict.fromkeys(
        ("strategy", "transport", "step_ms", "forward_ms", "backward_ms", "alone_ms", "efficiency", "peak_bytes",
         "bound", "critical_ms", "smallest_budget_bytes", "error")
    )  # fmt: skip
    try:
        plan, step = simulate_problem(problem)
    except InfeasibleError as error:
        smallest = error.smallest_budget_bytes
        return row | figures | {"smallest_budget_bytes": smallest, "error": str(error)}
    figures |= {
        "strategy": plan.strategy,
        "transport": plan.schedule.transport,
        "step_ms": _ms(step.step_s),
        "forward_ms": _ms(step.forward_s),
        "backward_ms": _ms(step.backward_s),
        "alone_ms": _ms(step.alone_s),
        "efficiency": round(step.efficiency, 4),
        "peak_bytes": plan.predicted_peak_bytes,
        "bound": step.bound,
        "critical_ms": {name: _ms(time_s) for name, time_s in step.critical_s.items()},
        "smallest_budget_bytes": plan.smallest_budget_bytes,
    }
    return row | figures


def results(rows: Sequence[dict[str, Any]], command: str, board: str) -> dict[str, Any]:
    """What is written to a file: as measurements are, and marked as none."""
    return {
        "schema_version": SCHEMA_VERSION,
        "simulated": True,
        "note": "simulated by infcl_gen.planning.timeline from a device profile; nothing here was measured",
        "board": board,
        "versions": {"infcl_gen": __version__, "python": platform.python_version()},
        "command": command,
        "checksum": checksum(rows),
        "rows": list(rows),
    }


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as a line of the table below HEADER."""
    sizes = (str(row["batch"]), str(row["devices"]), str(row["nodes"]))
    if row["error"] is not None:
        smallest = row["smallest_budget_bytes"]
        return (
            *sizes,
            "-",
            "-",
            "-",
            f"at least {bytes_text(smallest)}" if smallest else "-",
            "no plan fits the budget",
        )
    time_ms = row["step_ms"]
    step = f"{time_ms / 1e3:.3g} s" if time_ms >= 1e3 else f"{time_ms:.3g} ms"
    efficiency = f"{row['efficiency']:.3f}"
    return (*sizes, row["transport"], step, efficiency, bytes_text(row["peak_bytes"]), row["bound"])


def _ms(time_s: float) -> float:
    return float(f"{1e3 * time_s:.6g}")
