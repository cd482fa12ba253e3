"""The planner: one problem, one derivation, one cluster -> one `Plan` with every level of tiling decided and explained.

It enumerates candidates (strategy, panel, stash), drops those whose predicted peak exceeds the budget, and takes the
fastest by the cost model; among those within 0.1 % of it, the smallest. So more budget never gives a slower plan, and
what is feasible is decided by the same figures that the plan reports.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.planning.cost import Buffer, CostModel, PhaseTime, Sizes
from infcl_gen.planning.levels import (
    FUSED_DIM_LIMIT,
    KERNELS,
    Block,
    Specialisation,
    default_blocks,
    shared_bytes,
)
from infcl_gen.planning.schedule import Schedule
from infcl_gen.planning.strategies import GATHER_LIMIT, Option, options_of
from infcl_gen.problem import BLOCK_FIELDS, MAX_BATCH, SETTINGS, bytes_text

if TYPE_CHECKING:
    from infcl_gen.hardware import Cluster
    from infcl_gen.losses import Derivation
    from infcl_gen.problem import Problem

AUTO_FRACTION = 8  # "auto" takes at most this part of the device's memory
_TOLERANCE = 1.001
# What a gather must be predicted to save, since its memory grows with the number of ranks. On 2 H200s with 64k rows
# each it took 0.9 % less than a ring from an idle device, and as much behind other work; with 16k rows 5 to 6 % more.
_GATHER_GAIN = 0.01


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a level is tiled as it is. Levels: 0 cluster, 1 node, 2 device, 3 multiprocessor, 4 warps."""

    level: int
    decision: str
    why: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that emission needs to know. Bytes and times are per rank.

    `predicted_peak_bytes` bounds what the loss allocates beyond its inputs and never exceeds `budget_bytes`.
    `predicted_time_s` begins on an idle device, `predicted_queued_s` behind other work, where the host costs nothing.
    `largest_batch` is feasible under the same `--memory-budget` ("auto": 1/8 of the device's memory), and the next
    larger one is not. `stash_rows` is 0 without a stash; `blocks` is empty for torch.
    """

    problem: Problem
    strategy: str
    target: str
    dtype: str
    products: str
    split: bool
    descriptors: bool
    replay: bool
    rows_per_rank: int
    keys_per_rank: int
    world_size: int
    forward_rows: int
    forward_keys: int
    panel_rows: int
    panel_keys: int
    stash_rows: int
    blocks: dict[str, Block]
    buffers: tuple[Buffer, ...]
    predicted_peak_bytes: int
    phases: tuple[PhaseTime, ...]
    predicted_time_s: float
    predicted_queued_s: float
    reasons: tuple[Reason, ...]
    budget_bytes: int  # what is promised: the budget given, or without one the predicted peak
    allowed_bytes: int  # what the plan might have taken: that budget, or a part of the device's memory
    smallest_budget_bytes: int
    largest_batch: int  # within what is allowed
    schedule: Schedule

    @property
    def specialisation(self) -> Specialisation:
        return Specialisation(self.strategy, self.dtype, self.problem.dim, self.descriptors, self.split)

    def as_dict(self) -> dict[str, Any]:
        """The plan as literals: dictionaries, lists, text and numbers."""
        literals = _literals(dataclasses.asdict(self) | {"problem": self.problem.as_dict()})
        assert isinstance(literals, dict)
        return literals


def plan(problem: Problem, derivation: Derivation, cluster: Cluster) -> Plan:
    """The fastest plan by the cost model whose predicted peak keeps the budget.

    Raises InputError (a flag or setting is invalid for this loss or device) or InfeasibleError (nothing fits; it
    carries the smallest feasible budget and the largest feasible batch).
    """
    _check(problem, derivation, cluster)
    ceiling = problem.memory_budget_bytes
    if ceiling is None:
        ceiling = cluster.profile.memory_bytes // AUTO_FRACTION
    options = options_of(problem, derivation, cluster)
    smallest = min(option.smallest_peak(problem) for option in options)
    largest = _largest_batch(problem, derivation, cluster, ceiling)
    if smallest > ceiling:
        raise InfeasibleError(
            _infeasible_message(problem, cluster, ceiling, smallest, largest), smallest, largest
        )
    everything = _candidates(problem, options)
    candidates = [candidate for candidate in everything if candidate.peak_bytes <= ceiling]
    best = _best(candidates, _fastest_ring_s(everything))
    option, sizes, peak = best.option, best.sizes, best.peak_bytes
    model = option.model(problem)
    return Plan(
        problem=problem,
        strategy=option.specialisation.strategy,
        target=cluster.profile.target,
        dtype=problem.dtype,
        products=option.products,
        split=option.specialisation.split,
        descriptors=option.specialisation.descriptors,
        replay=option.replay,
        rows_per_rank=model.rows,
        keys_per_rank=model.keys,
        world_size=model.world_size,
        forward_rows=sizes.forward_rows,
        forward_keys=sizes.forward_keys,
        panel_rows=sizes.panel_rows,
        panel_keys=sizes.panel_keys,
        stash_rows=sizes.stash_rows,
        blocks=dict(option.blocks),
        buffers=model.buffers(sizes),
        predicted_peak_bytes=peak,
        phases=model.phases(sizes),
        predicted_time_s=best.time_s,
        predicted_queued_s=model.queued_s(sizes),
        reasons=_reasons(problem, best, candidates, ceiling),
        budget_bytes=peak if problem.memory_budget_bytes is None else ceiling,
        allowed_bytes=ceiling,
        smallest_budget_bytes=smallest,
        largest_batch=problem.batch_size if largest is None else largest,
        schedule=option.schedule,
    )


def cost_model(plan: Plan, derivation: Derivation, cluster: Cluster) -> CostModel:
    """The cost model that a plan was chosen by."""
    transport, keeps = plan.schedule.transport, plan.schedule.keeps
    option = Option(
        plan.specialisation, plan.products, plan.replay, transport, keeps, plan.blocks, derivation, cluster
    )
    return option.model(plan.problem)


def _as_many_keys(derivation: Derivation) -> bool:
    """Whether the loss needs as many keys as queries."""
    return derivation.has_keys or derivation.spec.positives == "diagonal"


def _check(problem: Problem, derivation: Derivation, cluster: Cluster) -> None:
    if _as_many_keys(derivation) and problem.total_keys != problem.batch_size:
        paired = derivation.spec.positives == "diagonal"
        why = (
            "pairs query i with key i"
            if paired
            else "reduces over queries as well, so each key needs its query"
        )
        raise InputError(
            f"--keys: the loss {problem.loss!r} {why}:"
            f" --keys {problem.total_keys} must equal --batch-size {problem.batch_size} (or be left out)"
        )
    if problem.dtype != "fp32" and problem.precision != "default":
        raise InputError(
            f"--precision: {problem.precision} applies to --dtype fp32 only, not to {problem.dtype}; leave it out"
        )
    if problem.dtype == "fp64" and cluster.profile.target != "cpu":
        raise InputError("--dtype: fp64 is supported with --target cpu only; valid here: bf16, fp16, fp32")
    if problem.precision == "tf32" and cluster.profile.vendor != "nvidia":
        raise InputError(f"--precision: tf32 needs an NVIDIA GPU, not {cluster.profile.name}")
    kernels = {key.partition(".")[0] for key in problem.setting if "." in key}
    for kernel in sorted(kernels - set(KERNELS)):
        raise InputError(f"--set {kernel}: unknown kernel {kernel!r}; valid: {', '.join(KERNELS)}")
    known = {*SETTINGS, *(f"{kernel}.{field}" for kernel in KERNELS for field in BLOCK_FIELDS)}
    for key in sorted(set(problem.setting) - known):
        raise InputError(f"--set {key}: unknown; valid: {', '.join(sorted(known))}")


@dataclasses.dataclass(frozen=True)
class _Candidate:
    time_s: float
    peak_bytes: int
    order: int
    option: Option
    sizes: Sizes


def _candidates(problem: Problem, options: list[Option]) -> list[_Candidate]:
    """Everything, whatever the budget."""
    found = []
    for order, option in enumerate(options):
        model = option.model(problem)
        for sizes in option.sizes(problem):
            found.append(_Candidate(model.time_s(sizes), model.peak_bytes(sizes), order, option, sizes))
    return found


def _fastest_ring_s(everything: list[_Candidate]) -> float:
    """With any budget: what a gather is compared with must not change with it, or more budget, which makes rings
    faster, would turn down a gather that was better than they are."""
    return min((c.time_s for c in everything if c.option.transport == "ring"), default=math.inf)


def _best(candidates: list[_Candidate], ring_s: float) -> _Candidate:
    """The smallest of the candidates within the tolerance of the fastest; ties by a fixed order."""
    worthwhile = (1 - _GATHER_GAIN) * ring_s
    rest = [c for c in candidates if c.option.transport != "gather" or c.time_s <= worthwhile]
    candidates = rest or candidates  # a gather alone may keep the budget, or be what was set
    limit = min(candidate.time_s for candidate in candidates) * _TOLERANCE
    return min(
        (candidate for candidate in candidates if candidate.time_s <= limit),
        key=lambda c: (c.peak_bytes, c.time_s, c.order, dataclasses.astuple(c.sizes)),
    )


def _largest_batch(problem: Problem, derivation: Derivation, cluster: Cluster, ceiling: int) -> int | None:
    """The largest global batch that some option can plan within the ceiling; None if not even one row fits."""

    @functools.cache
    def fits(batch: int) -> bool:
        # With --keys the keys stay, unless the loss needs them equal to the queries.
        keys = batch if problem.keys is not None and _as_many_keys(derivation) else problem.keys
        other = dataclasses.replace(problem, batch_size=batch, keys=keys)
        try:
            options = options_of(other, derivation, cluster)
        except (
            InputError
        ):  # what another batch does not allow, such as a stash of too many keys, does not fit
            return False
        return any(option_fits(option, other) for option in options)

    def option_fits(option: Option, other: Problem) -> bool:
        try:
            return option.smallest_peak(other) <= ceiling
        except InputError:  # a panel as set
            return False

    if not fits(1):
        return None
    low, high = 1, MAX_BATCH + 1  # low fits, high does not
    probe = problem.batch_size
    while high - low > 1:
        low, high = (probe, high) if fits(probe) else (low, probe)
        probe = (low + high) // 2 if high <= MAX_BATCH else min(2 * low, MAX_BATCH)
    return low


def _infeasible_message(
    problem: Problem, cluster: Cluster, ceiling: int, smallest: int, largest: int | None
) -> str:
    budget = f"--memory-budget {bytes_text(ceiling)}"
    if problem.memory_budget_bytes is None:
        budget += f" (auto: 1/{AUTO_FRACTION} of {cluster.profile.name}'s memory)"
    return (
        f"{budget}: no plan fits --batch-size {problem.batch_size}, --dim {problem.dim} on {cluster.devices} device(s);"
        f" the smallest feasible budget is {smallest} bytes ({bytes_text(smallest)}), "
        + (f"the largest feasible batch is {largest}" if largest else "no batch fits this budget")
    )


def _reasons(
    problem: Problem, best: _Candidate, candidates: list[_Candidate], ceiling: int
) -> tuple[Reason, ...]:
    option, sizes = best.option, best.sizes
    model = option.model(problem)
    cluster = option.cluster
    measured = problem.setting.get("records") == "measured"
    by_setting = f"measured on {cluster.profile.name}" if measured else "set by --set"
    found = [*_transport_reasons(problem, best, candidates)]
    found.append(
        Reason(2, f"strategy {option.specialisation.strategy}", _strategy_why(problem, best, candidates))
    )
    tiles = -(-model.rows // sizes.panel_rows) * -(-model.keys // sizes.panel_keys)
    if option.specialisation.strategy == "fused":
        why = "gradients of logits never leave the multiprocessor; these rows of dq accumulate at once"
        rows = sizes.panel_rows
        if cluster.devices > 1:
            why, rows = "gradients of logits never leave the multiprocessor", model.rows
        found.append(Reason(2, f"{rows} query rows x all keys", why))
    else:
        area = sizes.panel_rows * sizes.panel_keys
        larger = any(
            c.order == best.order and c.sizes.panel_rows * c.sizes.panel_keys > area for c in candidates
        )
        if {"panel_rows", "panel_keys"} & set(problem.setting):
            why = by_setting
        else:
            why = (
                "larger ones are not faster"
                if larger
                else "larger ones exceed the budget, the problem or the cap"
            )
        why = f"{tiles} panel(s) a hop, peak {bytes_text(best.peak_bytes)} of {bytes_text(ceiling)}; {why}"
        found.append(Reason(2, f"panel {sizes.panel_rows} x {sizes.panel_keys}", why))
    as_backward = option.specialisation.strategy in ("torch", "stash")
    why = "as the backward panel" if as_backward else "its partial sums fit where backward needs more"
    found.append(Reason(2, f"forward panel {sizes.forward_rows} x {sizes.forward_keys}", why))
    if sizes.stash_rows:
        why = "kept tiles need no recomputation in backward"
        found.append(
            Reason(2, f"stash of {min(sizes.stash_rows, model.rows)} of {model.rows} query rows", why)
        )
    if option.replay:
        why = "set by --set" if "replay" in problem.setting else "kernels start sooner than one by one"
        found.append(Reason(2, "recorded CUDA graphs", why))
    if option.specialisation.strategy in ("panel", "stash"):
        library = "the library's product with fp32 output is the fastest here"
        why = library if option.products == "library" else "no library product with fp32 output here"
        why = by_setting if "products" in problem.setting else why
        found.append(Reason(3, f"products by {option.products}", why))
    if option.specialisation.split:
        why = "three bf16 products each: 16 bits, faster than tf32 and 64 times as accurate"
        found.append(Reason(3, "fp32 features as bf16 halves", why))
    for_many = default_blocks(cluster.profile, option.specialisation)
    for kernel, block in option.blocks.items():
        changed = sorted(key for key in problem.setting if key.startswith(kernel + "."))
        size = shared_bytes(kernel, block, option.specialisation)
        why = f"{size} of {cluster.profile.shared_bytes_per_block} bytes of shared memory"
        if measured:
            why = f"{by_setting}; {why}"
        elif changed:
            why = f"set by {', '.join(changed)}; {why}"
        elif block.rows * block.keys < for_many[kernel].rows * for_many[kernel].keys:
            why = (
                f"small: the batch has few tiles for {cluster.profile.multiprocessors} multiprocessors; {why}"
            )
        found.append(Reason(3, f"{kernel} block {block.rows} x {block.keys} x {block.depth}", why))
        registers = f"a register budget of {cluster.profile.registers_per_thread} per thread"
        found.append(
            Reason(4, f"{kernel}: {block.warps} warps, {block.stages} stages", f"keeps to {registers}")
        )
    if option.blocks:
        on = option.specialisation.descriptors
        why = "rows are multiples of 16 bytes" if on else "not on this board, for this row size, or by --set"
        found.append(Reason(4, f"tensor descriptors {'on' if on else 'off'}", why))
    return tuple(found)


def _transport_reasons(
    problem: Problem, best: _Candidate, candidates: list[_Candidate]
) -> tuple[Reason, Reason]:
    """Levels 0 and 1: how keys get to the queries."""
    option, model, cluster = best.option, best.option.model(problem), best.option.cluster
    world, nodes = model.world_size, cluster.nodes
    outer = Reason(0, "one node", "nothing crosses the network")
    if nodes > 1:
        inside = cluster.devices_per_node
        why = f"the network is crossed at one hop of {inside}, by all {inside} devices of a node at once"
        why = why if inside > 1 else "each device is a node"
        outer = Reason(0, f"ring of {nodes} nodes; keys visit, queries stay", why)
    if world == 1:
        return outer, Reason(1, "one device", "a group of one runs without communication")
    exposed = sum(phase.time_s for phase in model.phases(best.sizes) if phase.bound == "link")
    hidden = f"{1e3 * exposed:.3g} ms are not hidden"
    others = [c.time_s for c in candidates if c.option.transport != option.transport]
    other = {"ring": "gather", "gather": "ring"}[option.transport]
    choice = f"{1e3 * best.time_s:.3g} ms against {1e3 * min(others):.3g} by {other}; " if others else ""
    if option.transport == "ring" and others and min(others) < best.time_s:
        choice += f"that is not {_GATHER_GAIN:.1%} less, for more memory; "
    if "transport" in problem.setting:
        choice = "set by --set; "
    elif not others and nodes == 1 and world <= GATHER_LIMIT:
        choice = "a gather exceeds the budget; "
    if option.transport == "gather":
        text = f"gather among {world} devices: all keys at once"
        why = f"{choice}3 batches of messages a step at most, {hidden}"
    else:
        text = f"ring of {cluster.devices_per_node} devices, {world} hops in all"
        why = f"{choice}keys travel beside the work, {model.keys} at a time, and sums after it: {hidden}"
    return outer, Reason(1, text, why)


def _strategy_why(problem: Problem, best: _Candidate, candidates: list[_Candidate]) -> str:
    if "strategy" in problem.setting:
        return "set by --set"
    if best.option.specialisation.strategy == "torch":
        return "no GPU: panels with torch's matrix products"
    times: dict[str, float] = {}
    for candidate in candidates:
        if candidate.order != best.order and candidate.option.transport == best.option.transport:
            name = candidate.option.specialisation.strategy + " replayed" * candidate.option.replay
            times[name] = min(candidate.time_s, times.get(name, candidate.time_s))
    others = ", ".join(f"{name} {1e3 * time_s:.3g} ms" for name, time_s in times.items())
    text = f"predicted {1e3 * best.time_s:.3g} ms" + (f" against {others}" if others else "")
    if problem.dim > FUSED_DIM_LIMIT:
        text += f"; fused needs --dim at most {FUSED_DIM_LIMIT}"
    return text


def _literals(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _literals(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_literals(inner) for inner in value]
    return value
