"""Why a plan is as it is: one sentence for each decision."""

from __future__ import annotations

from typing import NamedTuple

from infcl_gen.inputs.problem import Problem
from infcl_gen.inputs.text import bytes_text
from infcl_gen.kernels import TILES, default_blocks, launched
from infcl_gen.kernels.fused import DIM_LIMIT
from infcl_gen.planning.candidates import GATHER_GAIN, GATHER_LIMIT, Candidate
from infcl_gen.planning.model import products_of


class Reason(NamedTuple):
    """A decision at a level of tiling: 0 cluster, 1 node, 2 device, 3 SM, 4 warps."""

    level: int
    decision: str
    why: str


def reasons_of(
    problem: Problem, best: Candidate, everything: list[Candidate], ceiling: int, without_rows: str | None
) -> tuple[Reason, ...]:
    """Why `best` was taken among the candidates, of which those within `ceiling` bytes are possible.

    `without_rows`: why the strategy rows is impossible, as the end of a sentence; None if it is not.
    """
    candidates = [candidate for candidate in everything if candidate.peak_bytes <= ceiling]
    model, choice, sizes, profile = best.model, best.model.choice, best.sizes, best.model.profile
    measured = problem.settings.records == "measured"
    by_setting = f"measured on {profile.name}" if measured else "set by --set"
    strategy = Reason(2, f"strategy {choice.strategy}", _strategy_why(problem, best, everything, ceiling, without_rows))
    found = [*_transport_reasons(problem, best, candidates, everything), strategy]
    if choice.traits.triangle:
        products = products_of(model.phases(sizes), choice, model.rows, model.keys)
        why = f"z_ij = z_ji: {products:.3g} products for 4"
        if choice.world_size > 1:
            why += "; a pair of two ranks is computed by one of them, and the other's sums travel home"
        found.append(Reason(2, "panels on and above the diagonal of own rows", why))
    if choice.strategy == "fused":
        rows, why = model.rows, "gradients of logits never leave the multiprocessor"
        if choice.world_size == 1:
            rows, why = sizes.panel_rows, f"{why}; these rows of dq accumulate at once"
        found.append(Reason(2, f"{rows} query rows x all keys", why))
    else:
        area = sizes.panel_rows * sizes.panel_keys
        larger = any(c.order == best.order and c.sizes.panel_rows * c.sizes.panel_keys > area for c in candidates)
        why = (
            "of those considered no larger one is faster"
            if larger
            else "larger ones exceed the budget, the problem or the cap"
        )
        why = by_setting if problem.settings.panel_rows or problem.settings.panel_keys else why
        peak = f"peak {bytes_text(best.peak_bytes)} of {bytes_text(ceiling)}"
        count = model.panels("backward", sizes)
        panels = f"{count} panel{'s' * (count != 1)}" + " a hop" * (choice.world_size > 1)
        why = f"{panels}, {peak}; {why}"
        found.append(Reason(2, f"panel {sizes.panel_rows} x {sizes.panel_keys}", why))
    shared = choice.strategy in ("torch", "stash", "rows")
    why = "as the backward panel" if shared else "its partial sums fit where backward needs more"
    found.append(Reason(2, f"forward panel {sizes.forward_rows} x {sizes.forward_keys}", why))
    if sizes.stash_rows:
        why = "kept tiles need no recomputation in backward"
        found.append(Reason(2, f"stash of {min(sizes.stash_rows, model.rows)} of {model.rows} query rows", why))
    if not choice.wider:
        needed = min(candidate.peak_bytes for candidate in everything if candidate.model.choice.wider)
        why = f"gradients of wider ones need a budget of {needed} bytes ({bytes_text(needed)})"
        found.append(Reason(2, f"features in {choice.dtype} alone", why))
    if choice.frozen != "none":
        found.append(
            Reason(2, f"no gradient of the {choice.frozen} side", "it is frozen: no product, sums or messages")
        )
    if choice.replay:
        why = "set by --set" if problem.settings.replay else "kernels start sooner than one by one"
        found.append(Reason(2, "recorded CUDA graphs", why))
    if choice.strategy in ("panel", "stash", "rows"):
        why = "the library's product with fp32 output is the fastest here"
        why = why if choice.library else "no library product with fp32 output here"
        why = by_setting if problem.settings.products else why
        found.append(Reason(3, f"products by {choice.product_by}", why))
    if choice.split:
        why = "three bf16 products each: 16 bits, faster than tf32 and 64 times as accurate"
        found.append(Reason(3, "fp32 features as bf16 halves", why))
    for_many = default_blocks(profile, choice)
    for kernel, block in choice.blocks.items():
        changed = sorted(f"{kernel}.{field}" for field in problem.settings.block(kernel))
        why = f"{TILES[kernel].shared_bytes(block, choice)} of {profile.shared_bytes_per_block} bytes of shared memory"
        if measured:
            why = f"{by_setting}; {why}"
        elif changed:
            why = f"set by {', '.join(changed)}; {why}"
        elif block.rows * block.keys < for_many[kernel].rows * for_many[kernel].keys:
            why = f"small: the batch has few tiles for {profile.multiprocessors} multiprocessors; {why}"
        found.append(Reason(3, f"{kernel} block {block.rows} x {block.keys} x {block.depth}", why))
        why = f"keeps to a register budget of {profile.registers_per_thread} per thread"
        found.append(Reason(4, f"{kernel}: {block.warps} warps, {block.stages} stages", why))
    for kernel, (name, block) in launched(choice).items():
        if name != kernel:
            why = f"{block.warps} warps, {block.stages} stages; in place of {kernel}, where Triton can run it"
            found.append(Reason(3, f"{name} block {block.rows} x {block.keys} x {block.depth}", why))
    if choice.blocks:
        on = choice.descriptors
        why = "rows are multiples of 16 bytes" if on else "not on this board, for this row size, or by --set"
        found.append(Reason(4, f"tensor descriptors {'on' if on else 'off'}", why))
    return tuple(found)


def _transport_reasons(
    problem: Problem, best: Candidate, candidates: list[Candidate], everything: list[Candidate]
) -> tuple[Reason, Reason]:
    """Levels 0 and 1: how keys reach the queries."""
    model, cluster, way = best.model, best.model.cluster, best.model.choice.transport
    world, nodes, inside = cluster.devices, cluster.nodes, cluster.devices_per_node
    outer, (own, compared) = Reason(0, "one node", "nothing crosses the network"), best.model.choice.traits.sides
    if nodes > 1:
        why = f"the network is crossed at one hop of {inside}, by all {inside} devices of a node at once"
        why = why if inside > 1 else "each device is a node"
        how = "rows visit other devices' rows" if own == compared else f"{compared} visit, {own} stay"
        outer = Reason(0, f"ring of {nodes} nodes; {how}", why)
    if world == 1:
        return outer, Reason(1, "one device", "a group of one runs without communication")
    exposed = sum(phase.time_s for phase in model.phases(best.sizes) if phase.bound == "link")
    hidden = f"{1e3 * exposed:.3g} ms are not hidden"
    if cluster.profile.target == "cuda":
        hidden += f"; {'copy engines carry' if model.table.copy_engines else 'NCCL carries'} the messages"
    if not model.table.copy_engines and any(c.model.table.copy_engines for c in everything):
        by_engines = [c.time_s for c in candidates if c.model.table.copy_engines and c.model.choice.transport == way]
        instead = f"copy engines and their mailboxes {1e3 * min(by_engines, default=0.0):.3g} ms are predicted"
        hidden += f", for with {instead}" if by_engines else f", for a {way} with mailboxes exceeds the budget"
    others = [c.time_s for c in candidates if c.model.choice.transport != way]
    other = {"ring": "gather", "gather": "ring"}[way]
    choice = f"{1e3 * best.time_s:.3g} ms against {1e3 * min(others):.3g} by {other}; " if others else ""
    if way == "ring" and others and min(others) < best.time_s:
        choice += f"a gather takes more memory, and must be {GATHER_GAIN:.0%} faster than a ring of any budget; "
    if problem.settings.transport:
        choice = "set by --set; "
    elif way == "ring" and not others and nodes == 1 and world <= GATHER_LIMIT:
        choice = "a gather exceeds the budget; "
    if way == "gather":
        steps = (step for phase in ("forward", "backward") for step in model.table.steps(phase))
        why = f"{choice}{sum(bool(step.sends) for step in steps)} batches of messages a step, {hidden}"
        return outer, Reason(1, f"gather among {world} devices: all {compared} at once", why)
    why = f"{choice}{compared} travel beside the work, {model.keys} at a time"
    why += ("" if own == compared else ", and sums after it") + f": {hidden}"
    return outer, Reason(1, f"ring of {inside} devices, {model.table.visits('forward')} hops in all", why)


def _strategy_why(
    problem: Problem, best: Candidate, everything: list[Candidate], ceiling: int, without_rows: str | None
) -> str:
    choice = best.model.choice
    if problem.settings.strategy:
        return "set by --set"
    if choice.strategy == "torch":
        return "no GPU: panels with torch's matrix products"
    times: dict[str, float] = {}
    for candidate in everything:
        other = candidate.model.choice
        name = other.strategy + " replayed" * other.replay
        comparable = other.wider == choice.wider and (other.transport == choice.transport or other.rows)
        another = name != choice.strategy + " replayed" * choice.replay
        if another and comparable and candidate.peak_bytes <= ceiling:
            times[name] = min(candidate.time_s, times.get(name, candidate.time_s))
    others = ", ".join(f"{name} {1e3 * time_s:.3g} ms" for name, time_s in times.items())
    text = f"predicted {1e3 * best.time_s:.3g} ms" + (f" against {others}" if others else "")
    if problem.dim > DIM_LIMIT:
        text += f"; fused needs --dim at most {DIM_LIMIT}"
    if choice.traits.known == "row" and not choice.rows and not any(name.startswith("rows") for name in times):
        rows = [c.peak_bytes for c in everything if c.model.choice.rows and c.model.choice.wider]
        why = without_rows or (f"needs a budget of {bytes_text(min(rows))}" if rows else "is excluded by --set")
        text += f"; rows, with three products for four, {why}"
    return text
