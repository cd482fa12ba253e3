"""The planner: from problem, derivation and cluster to a `Plan` that decides and explains every level of tiling.

It takes the fastest candidate whose predicted peak keeps the budget; among candidates within 0.1 % of it, the
smallest. So more budget never gives a slower plan, and the figures of a plan are those that decide what is feasible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from typing import Any

from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.hardware import Cluster
from infcl_gen.inputs.problem import MAX_BATCH, Problem
from infcl_gen.inputs.text import bytes_text
from infcl_gen.kernels.choice import Choice
from infcl_gen.losses import Derivation
from infcl_gen.planning.bracket import largest_within
from infcl_gen.planning.candidates import GATHER_GAIN, Candidate, Choices, sizes_of
from infcl_gen.planning.memory import Buffer
from infcl_gen.planning.model import HOST, CostModel, PhaseTime, Sizes, products_of
from infcl_gen.planning.reasons import Reason, reasons_of
from infcl_gen.runtime.table import Table

AUTO_FRACTION = 8  # "auto" takes at most this part of the device's memory
_TOLERANCE = 1.001


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Choice, Sizes):
    """A choice, its sizes and its predictions, per rank: the input of emission.

    `predicted_peak_bytes` bounds what the loss allocates beyond its inputs and never exceeds `budget_bytes`.
    `predicted_time_s` is from an idle device, `predicted_queued_s` behind other work, which hides the host.
    """

    problem: Problem
    rows_per_rank: int
    keys_per_rank: int
    buffers: tuple[Buffer, ...]
    predicted_peak_bytes: int
    phases: tuple[PhaseTime, ...]
    predicted_time_s: float
    predicted_queued_s: float
    reasons: tuple[Reason, ...]
    budget_bytes: int  # promised: the budget given, or without one the predicted peak
    allowed_bytes: int  # the limit of the search: the budget given, or 1/8 of the device's memory
    smallest_budget_bytes: int
    largest_batch: int  # within `allowed_bytes`; the next larger batch is not feasible
    schedule: Table

    @property
    def products(self) -> float:
        """Matrix products of 2 M N D operations that a step takes, as `products_of`, to 4 digits."""
        return float(f"{products_of(self.phases, self, self.rows_per_rank, self.keys_per_rank):.4g}")

    def as_dict(self) -> dict[str, Any]:
        """The plan as literals: dictionaries, lists, text and numbers."""
        fields = literals_of(self) | {"problem": self.problem.as_dict(), "products": self.products}
        fields |= {name: getattr(self, name) for name in ("split", "operand_dtype", "input_precision")}
        for name in ("buffers", "phases", "reasons"):
            fields[name] = [each._asdict() for each in getattr(self, name)]
        literals: dict[str, Any] = json.loads(json.dumps(fields))
        del literals["arch"]  # part of the device's profile, which SPEC holds beside the plan
        return literals


def literals_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass and of those in it; what few losses have is not told of the others."""
    return dataclasses.asdict(record, dict_factory=lambda pairs: {k: v for k, v in pairs if v or k not in _SELDOM})


_SELDOM = ("means", "once", "pooled", "renormalised", "slabs", "triangle")  # fields whose default is False, 0 or ()


def plan(problem: Problem, derivation: Derivation, cluster: Cluster) -> Plan:
    """The fastest plan by the cost model whose predicted peak keeps the budget.

    Raises InputError (a flag or setting is invalid for this loss or device) or InfeasibleError (nothing fits), which
    carries the smallest feasible budget and the largest feasible batch.
    """
    _check(problem, derivation, cluster)
    budget = problem.memory_budget_bytes
    ceiling = cluster.profile.memory_bytes // AUTO_FRACTION if budget is None else budget
    choices = Choices(problem, derivation, cluster)
    models = choices.models(problem.batch_size, problem.total_keys)
    smallest = min(peak for model in models for _, peak in sizes_of(model, problem.settings, smallest=True))
    largest = _largest_batch(problem, choices, ceiling)
    if smallest > ceiling:
        raise InfeasibleError(_infeasible_message(problem, cluster, ceiling, smallest, largest), smallest, largest)
    everything = [
        Candidate(order, model, sizes, peak)
        for order, model in enumerate(models)
        for sizes, peak in sizes_of(model, problem.settings)
    ]
    best = _best(everything, [candidate for candidate in everything if candidate.peak_bytes <= ceiling])
    model, sizes, peak = best.model, best.sizes, best.peak_bytes
    phases = model.phases(sizes)
    return Plan(
        **vars(model.choice),
        **vars(sizes),
        problem=problem,
        rows_per_rank=model.rows,
        keys_per_rank=model.keys,
        buffers=model.buffers(sizes),
        predicted_peak_bytes=peak,
        phases=phases,
        predicted_time_s=best.time_s,
        predicted_queued_s=math.fsum(phase.time_s for phase in phases if phase.name != HOST),
        reasons=reasons_of(problem, best, everything, ceiling, choices.impossible("rows", problem.total_keys)),
        budget_bytes=peak if budget is None else budget,
        allowed_bytes=ceiling,
        smallest_budget_bytes=smallest,
        largest_batch=problem.batch_size if largest is None else largest,
        schedule=model.table,
    )


def cost_model(plan: Plan, cluster: Cluster) -> CostModel:
    """The cost model that a plan was chosen by."""
    return CostModel(plan, cluster, plan.rows_per_rank, plan.keys_per_rank, plan.problem.negatives, plan.schedule)


def _check(problem: Problem, derivation: Derivation, cluster: Cluster) -> None:
    if derivation.spec.positives == "diagonal" and problem.total_keys != problem.batch_size:
        raise InputError(
            f"--keys: the loss {problem.loss!r} pairs query i with key i:"
            f" --keys {problem.total_keys} must equal --batch-size {problem.batch_size} (or be left out)"
        )
    if derivation.prefixes and derivation.prefixes[-1] != problem.dim:
        shown = ", ".join(map(str, derivation.prefixes))
        raise InputError(f"--prefixes: {shown} must end with --dim {problem.dim}: add it, or pass fewer columns")
    if derivation.traits.triangle and problem.total_keys != problem.batch_size:
        raise InputError(f"--keys: the rows of {problem.loss!r} are keys of each other; leave out --keys")
    if derivation.traits.triangle and problem.frozen != "none":
        raise InputError(f"--frozen: {problem.loss!r} has one side, whose gradient is all there is; leave out --frozen")
    if problem.negatives > 1 and "negatives" not in derivation.traits.vectors:
        raise InputError(f"--negatives: {problem.loss!r} has no negatives of single queries; leave out --negatives")
    if problem.dtype == "fp64" and cluster.profile.target != "cpu":
        raise InputError("--dtype: fp64 is supported with --target cpu only; valid here: bf16, fp16, fp32")
    if problem.precision == "tf32" and cluster.profile.vendor != "nvidia":
        raise InputError(f"--precision: tf32 needs an NVIDIA GPU, not {cluster.profile.name}")


def _best(everything: list[Candidate], candidates: list[Candidate]) -> Candidate:
    """The smallest of the candidates within the tolerance of the fastest; ties by a fixed order.

    One that refuses wider features is only taken where all others exceed the budget.
    """
    candidates = [c for c in candidates if c.model.choice.wider] or candidates
    if any(c.model.choice.gather for c in candidates):
        # Of any budget, so that more budget never gives a slower plan; of those whose messages go the same way.
        rings = [c for c in everything if not c.model.choice.gather]
        ring_s = {
            engines: min((c.time_s for c in rings if c.model.table.copy_engines == engines), default=math.inf)
            for engines in (True, False)
        }
        rest = [
            c for c in candidates
            if not c.model.choice.gather or c.time_s <= (1 - GATHER_GAIN) * ring_s[c.model.table.copy_engines]
        ]  # fmt: skip
        candidates = rest or candidates  # only gathers may keep the budget, or be allowed by --set
    limit = min(candidate.time_s for candidate in candidates) * _TOLERANCE
    return min(
        (candidate for candidate in candidates if candidate.time_s <= limit),
        key=lambda c: (c.peak_bytes, c.time_s, c.order, dataclasses.astuple(c.sizes)),
    )


def _largest_batch(problem: Problem, choices: Choices, ceiling: int) -> int | None:
    """The largest global batch with a plan within the ceiling; None if not even one row fits."""

    def excess(batch: int) -> float:
        try:
            models = choices.models(batch, problem.keys or batch)
        except InputError:  # a setting forbids this batch: a stash of too many keys
            return math.inf
        least = math.inf
        for model in models:
            with contextlib.suppress(InputError):  # a panel that is set does not suit this batch's blocks
                least = min([least, *(peak for _, peak in sizes_of(model, problem.settings, smallest=True))])
        return least - ceiling

    if excess(1) > 0:
        return None
    own = excess(problem.batch_size)
    if own > 0:
        return largest_within(1, problem.batch_size, excess, excess(1), own)
    above = excess(MAX_BATCH)
    return MAX_BATCH if above <= 0 else largest_within(problem.batch_size, MAX_BATCH, excess, own, above)


def _infeasible_message(problem: Problem, cluster: Cluster, ceiling: int, smallest: int, largest: int | None) -> str:
    auto = f" (auto: 1/{AUTO_FRACTION} of {cluster.profile.name}'s memory)" * (problem.memory_budget_bytes is None)
    return (
        f"--memory-budget {bytes_text(ceiling)}{auto}: no plan fits --batch-size {problem.batch_size},"
        f" --dim {problem.dim} on {cluster.devices} device(s);"
        f" the smallest feasible budget is {smallest} bytes ({bytes_text(smallest)}), "
        + (f"the largest feasible batch is {largest}" if largest else "no batch fits this budget")
    )
