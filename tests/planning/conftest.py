"""What the planning tests share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from infcl_gen.emission import simulate_problem
from infcl_gen.hardware import resolve_cluster
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.losses import Derivation, derive, load_loss, over_prefixes
from infcl_gen.planning import Plan, plan
from infcl_gen.planning.timeline import LEAD_S


@functools.cache
def derivation_of(loss: str, prefixes: tuple[int, ...] = (), renormalise: bool = False) -> Derivation:
    return derive(over_prefixes(load_loss(loss), prefixes, renormalise))


def plan_problem(problem: Problem) -> Plan:
    return plan(problem, derivation_of(problem.loss, problem.prefixes, problem.renormalise), resolve_cluster(problem))


def plan_flags(**flags: Any) -> Plan:
    return plan_problem(make_problem(**{"device_profile": "h200", "batch_size": 4096, "dim": 768} | flags))


def allowed_error(measured_ms: float) -> float:
    """Of a predicted time: 10 %; 15 % below 0.1 ms, where launches decide, which took other code as well 10 % less in
    one run than in another (compiled OpenCLIP at B = 1 024, D = 128: 0.067 and 0.074 ms)."""
    return 0.1 if measured_ms >= 0.1 else 0.15


def budget_of(row: Mapping[str, Any]) -> int | None:
    """The memory budget that a measured row was planned for; None: without one, its peak was its budget."""
    budget: int = row["budget_bytes"]
    return None if budget == row["predicted_peak_bytes"] else budget


def beside_measured(
    row: Mapping[str, Any], profile: str, idle: bool = False, copy_engines: bool = False
) -> tuple[float, float]:
    """Measured and simulated milliseconds of a row of `bench`: of a package on one or several devices, as it is, with
    "no overlap" or with "no communication"; behind other work unless `idle`, or where it was measured from an idle
    device only. A row that does not name its transport is of a ring. `copy_engines`: they have carried its messages."""
    chosen = {"strategy": row["strategy"]}
    if row["ranks"] > 1:
        chosen["transport"] = row.get("transport") or "ring"
        chosen["copy_engines"] = "on" if copy_engines else "off"
    problem = make_problem(
        loss=row["loss"], batch_size=row["batch"], dim=row["dim"], dtype=row["dtype"], precision=row["precision"],
        devices=row["ranks"], device_profile=profile, memory_budget=budget_of(row),
        set=chosen,
    )  # fmt: skip
    how = row["package"]
    queued_ms = None if idle else row.get("queued_ms")
    _, step = simulate_problem(
        problem, 0.0 if queued_ms is None else LEAD_S,
        communicate=how != "no communication", overlap=how != "no overlap",
    )  # fmt: skip
    return (row["median_ms"] if queued_ms is None else queued_ms), 1e3 * step.step_s
