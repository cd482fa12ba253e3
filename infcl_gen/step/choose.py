"""Which samples are kept, checkpointed or cached: the fastest step whose predicted peak keeps the memory.

Keeping a graph saves a forward pass and costs its bytes. For each pair of micro-batch sizes (of cached samples, and of
the others) a tower has a frontier: by the bytes that graphs may take, the least time. Frontiers of the towers are
merged, and `account` decides between the best points. More than GROUPS micro-batches of a tower are chosen in equal
groups; at the end single ones are moved while that makes the step faster and fits.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.inputs.problem import MAX_BATCH
from infcl_gen.inputs.text import bytes_text
from infcl_gen.planning.bracket import largest_within
from infcl_gen.step.account import (
    Account,
    LossCosts,
    StepProblem,
    account,
    graphs_of,
    kept_bytes,
    offloaded_bytes,
    tower_seconds,
)
from infcl_gen.step.costs import PassCosts, TowerCosts
from infcl_gen.step.plan import STREAMED, WITH_GRAPHS, Part, TowerPlan

GROUPS = 64  # of a tower: a frontier has then up to 65 x 66 / 2 points
NEARLY_AS_FAST = 1.1  # sizes of micro-batches that take at most so many times the best time per sample are tried first
SMALLER = 3  # sizes that each further attempt tries
ATTEMPTS = 7  # 18 smaller sizes, which leave more room for graphs; there are 12 powers of two below 4096
SHARES = (1.0, 0.5, 0.25)  # of what the host could hold, that are tried
THINNED = 64  # points of a frontier, where there are more than two towers: 64 x 64 pairs of two of them
SPLIT = ("checkpointed", "kept", "cached")
Split = tuple[int, int, int]  # a number for each treatment of SPLIT
CostOf = Callable[[str, int, int], tuple[int, float]]  # from a treatment, samples and a size to bytes and seconds


# One way for a tower: bytes that it holds until backward, its seconds, and its samples by treatment.
Point = tuple[int, float, Split]


def choose(problem: StepProblem) -> Account:
    """The fastest account within the memory; of equally fast ones the smallest.

    Raises InputError where towers have no way that the problem allows, and InfeasibleError where nothing fits.
    """
    least = _smallest(problem)
    if least.peak_bytes > problem.memory_bytes:
        smallest, largest = least.peak_bytes, largest_samples(problem) * problem.world_size
        fits = f"the largest batch that fits has {largest} samples" if largest else "no batch fits"
        devices = f" on {problem.world_size} devices" if problem.world_size > 1 else ""
        raise InfeasibleError(
            f"a step of {problem.samples} samples per device needs "
            f"{bytes_text(smallest)}; {bytes_text(problem.memory_bytes)} are allowed, and {fits}{devices}",
            smallest, largest,
        )  # fmt: skip
    sizes = [[_sizes(problem, costs, attempt) for costs in problem.costs.towers] for attempt in range(ATTEMPTS)]
    attempts = [each for place, each in enumerate(sizes) if each not in sizes[:place]]
    found = min(filter(None, (_best(problem, each) for each in attempts)), key=_rank, default=None)
    found = found or account(problem, least.towers, problem.losses.within_budgets(problem.samples)[0])
    return _with_offloaded(problem, found) if problem.offloads else found


def _rank(found: Account) -> tuple[float, int]:
    return found.time_s, found.peak_bytes


def _with_offloaded(problem: StepProblem, found: Account) -> Account:
    """The same with graphs on the host, where that is faster: as many as fit it or a share of these, of one tower
    first; the others pass in micro-batches of the sizes that were found."""
    sizes = [sorted({part.micro_batch for _, part in plan.parts()}) for plan in found.towers]
    best = [found]
    for share, order in itertools.product(SHARES, itertools.permutations(range(len(sizes)))):
        parts, left = [Part()] * len(sizes), share * problem.host_memory_bytes
        for place in order:
            costs, size = problem.costs.towers[place], sizes[place][-1]
            if _may_offload(problem, costs):
                each = offloaded_bytes(costs, Part(size, size))
                samples = min(share * problem.samples, left // each * size)
                parts[place] = Part(int(samples), size)
                left -= offloaded_bytes(costs, parts[place])
        other = _best(problem, sizes, parts)
        if other is not None:
            best.append(other)
    return min(best, key=_rank)


def largest_samples(problem: StepProblem) -> int:
    """The largest batch of a device that fits, 0 if none does."""

    def excess_bytes(samples: int) -> int:
        return smallest_bytes(dataclasses.replace(problem, samples=samples)) - problem.memory_bytes

    most = MAX_BATCH // problem.world_size
    above = excess_bytes(most)
    return most if above <= 0 else largest_within(0, most, excess_bytes, -problem.memory_bytes, above)


def smallest_bytes(problem: StepProblem) -> int:
    """The least memory that a step needs. Raises InputError where towers have no way that the problem allows."""
    return _smallest(problem).peak_bytes


def _smallest(problem: StepProblem) -> Account:
    """What takes the least memory: one treatment and one size of micro-batches for all samples of a tower."""
    loss = LossCosts(problem.losses.smallest_bytes(problem.samples), 0.0)
    found = [
        account(problem, towers, loss)
        for towers in itertools.product(*(_uniform(problem, costs) for costs in problem.costs.towers))
    ]
    if not found:
        raise InputError(
            f"treatments: {', '.join(problem.treatments)}: a tower has no blocks to checkpoint; allow cached or kept"
        )
    return min(found, key=lambda each: each.peak_bytes)


def _uniform(problem: StepProblem, costs: TowerCosts) -> Iterator[TowerPlan]:
    """Plans with one treatment for all samples of a tower, in its smallest micro-batches; or larger ones, of which
    fewer keep states for a second pass."""
    sizes = _all_sizes(problem, costs)
    for treatment in ("cached",) if costs.frozen else _treatments(problem, costs):
        for size in sizes if costs.state_bytes and treatment == "cached" else sizes[:1]:
            yield _plan(costs, {treatment: Part(problem.samples, size)})


def _treatments(problem: StepProblem, costs: TowerCosts) -> list[str]:
    """Of those that need no memory of the host."""
    allowed = [each for each in problem.treatments if each != "offloaded"]
    return [each for each in allowed if each != "checkpointed" or costs.checkpointed is not None]


def _may_offload(problem: StepProblem, costs: TowerCosts) -> bool:
    return problem.offloads and costs.checkpointed is not None


def _best(problem: StepProblem, sizes: Sequence[list[int]], offloaded: Sequence[Part] = ()) -> Account | None:
    """The fastest that fits, in micro-batches of these sizes for each tower, beside samples that are offloaded."""
    parts = offloaded or [Part()] * len(sizes)
    towers = [list(_beside(problem, *each)) for each in zip(problem.costs.towers, sizes, parts, strict=True)]
    best: Account | None = None
    rooms: dict[Any, Room] = {}
    for loss in problem.losses.within_budgets(problem.samples):
        for chosen in itertools.product(*towers):
            limit_s = math.inf if best is None else best.time_s - loss.time_s
            if sum(frontier.least_s for frontier in chosen) >= limit_s:
                continue
            key = loss, *(frontier.kind for frontier in chosen)
            if key not in rooms:
                rooms[key] = _room(problem, account(problem, [frontier.one_each for frontier in chosen], loss))
            room_bytes, most_bytes = rooms[key]
            least_s, _ = _fastest(chosen, most_bytes)
            # A plan leaves more room than a micro-batch of each treatment: graphs of other towers are gone by then.
            while least_s < limit_s:
                time_s, points = _fastest(chosen, room_bytes)
                if not points:
                    break
                plans = [frontier.plan_of(split) for frontier, (*_, split) in zip(chosen, points, strict=True)]
                found = account(problem, plans, loss)
                if time_s < limit_s and _fits(problem, found):
                    best, limit_s = found, time_s
                left_bytes, _ = _room(problem, found)
                if left_bytes <= room_bytes or found.peak_bytes > problem.memory_bytes:
                    break
                room_bytes = left_bytes
    return None if best is None else _improved(problem, best)


def _fits(problem: StepProblem, found: Account) -> bool:
    return found.peak_bytes <= problem.memory_bytes and found.host_bytes <= problem.host_memory_bytes


def _improved(problem: StepProblem, found: Account) -> Account:
    """Single micro-batches get another treatment, as long as the step gets faster and fits."""
    while True:
        moved = (account(problem, plans, found.loss) for plans in _neighbours(problem, found.towers))
        fitting = [each for each in moved if _fits(problem, each)]
        best = min(fitting, key=_rank, default=found)
        if best.time_s >= found.time_s:
            return found
        found = best


def _neighbours(problem: StepProblem, towers: Sequence[TowerPlan]) -> Iterator[list[TowerPlan]]:
    for place, (costs, plan) in enumerate(zip(problem.costs.towers, towers, strict=True)):
        treatments = [] if costs.frozen else _treatments(problem, costs)
        if plan.offloaded.samples:
            treatments = [*treatments, "offloaded"]
        for source, target in itertools.permutations(treatments, 2):
            giving, taking = getattr(plan, source), getattr(plan, target)
            size = taking.micro_batch if taking.samples else max(giving.micro_batch, plan.checkpointed.micro_batch)
            moved = min(size, giving.samples)
            if moved:
                parts = {source: dataclasses.replace(giving, samples=giving.samples - moved)}
                parts[target] = Part(taking.samples + moved, size)
                yield [*towers[:place], dataclasses.replace(plan, **parts), *towers[place + 1 :]]


class Room(NamedTuple):
    """Bytes that graphs may take: beside everything else of a plan, and if computing them took nothing."""

    room_bytes: int
    most_bytes: int


def _room(problem: StepProblem, found: Account) -> Room:
    graphs_bytes = sum(held_bytes(costs, plan) for costs, plan in zip(problem.costs.towers, found.towers, strict=True))
    others_bytes = max(found.bytes_in(phase) for phase in ("forward", "loss", "backward")) - graphs_bytes
    return Room(problem.memory_bytes - others_bytes, problem.memory_bytes - (found.bytes_in("loss") - graphs_bytes))


class Frontier(NamedTuple):
    """Ways for a tower of which none is faster and smaller than another, the smallest first; none holds more than the
    memory.

    sizes     of micro-batches, for each treatment of SPLIT
    kind      treatments with graphs that occur, and the size of their micro-batches
    one_each  one micro-batch of each of these
    """

    points: list[Point]
    sizes: Split
    kind: tuple[Any, ...]
    one_each: TowerPlan

    @property
    def least_s(self) -> float:
        return self.points[-1][1]

    def plan_of(self, split: Split) -> TowerPlan:
        parts: dict[str, Any] = {name: Part(*part) for name, *part in zip(SPLIT, split, self.sizes, strict=True)}
        return dataclasses.replace(self.one_each, **parts)


def _beside(problem: StepProblem, costs: TowerCosts, sizes: list[int], offloaded: Part) -> Iterator[Frontier]:
    """The frontiers of a tower of whose samples some are offloaded."""
    if not offloaded.samples:
        yield from _frontiers(problem, costs, sizes)
        return
    alone = _plan(costs, {"offloaded": offloaded})
    time_s = tower_seconds(problem, costs, alone)
    if offloaded.samples == problem.samples:
        yield Frontier([(0, time_s, (0, 0, 0))], (1, 1, 1), (), alone)
        return
    rest = dataclasses.replace(problem, samples=problem.samples - offloaded.samples)
    for each in _frontiers(rest, costs, sizes):
        points = [(held_bytes, time_s + rest_s, split) for held_bytes, rest_s, split in each.points]
        one_each = dataclasses.replace(each.one_each, offloaded=offloaded)
        yield each._replace(points=points, one_each=one_each)


def _frontiers(problem: StepProblem, costs: TowerCosts, sizes: list[int]) -> Iterator[Frontier]:
    """One frontier for each pair of micro-batch sizes and each set of treatments.

    Each set of treatments has its own room: a treatment that does not occur allocates nothing while it is computed.
    """
    samples, treatments = problem.samples, _treatments(problem, costs)
    sizes = sorted({min(size, samples) for size in sizes})
    if STREAMED in treatments:
        for size in sizes:
            plan = _plan(costs, {STREAMED: Part(samples, size)})
            yield Frontier([(0, tower_seconds(problem, costs, plan), (0, 0, 0))], (1, 1, 1), (), plan)
        return
    graphs = [] if costs.frozen else [each for each in treatments if each in WITH_GRAPHS]
    cached = costs.frozen or "cached" in treatments
    cost_of = functools.lru_cache(maxsize=None)(functools.partial(_cost, problem, costs))
    others = [size for size in sizes if _measured(problem, costs, "cached", size)] if cached else []
    for size in others:
        if point := _frontier([(0, 0.0, (0, 0, samples))], cost_of, size, problem.memory_bytes):
            yield Frontier(point, (1, 1, size), (), _plan(costs, {}))
    for chosen in [*([each] for each in graphs), *([graphs] if len(graphs) > 1 else [])]:
        for graph in sizes:
            if not all(_measured(problem, costs, name, graph) for name in chosen):
                continue
            one_each = _plan(costs, {name: Part(min(graph, samples), graph) for name in chosen})
            fastest_s = min(cost_of(name, samples, graph)[1] for name in chosen)
            ways = list(_ways(problem, cost_of, graph, [*chosen, *["cached"] * cached]))
            for other in others or sizes[:1]:
                if others and fastest_s >= cost_of("cached", samples, other)[1]:
                    continue  # graphs that stay are no gain
                if points := _frontier(ways, cost_of, other, problem.memory_bytes):
                    yield Frontier(points, (graph, graph, other), (graph, *chosen), one_each)


def _plan(costs: TowerCosts, parts: Mapping[str, Any]) -> TowerPlan:
    return TowerPlan(costs.name, frozen=costs.frozen, tokens=costs.tokens, **parts)


def _cost(problem: StepProblem, costs: TowerCosts, treatment: str, samples: int, size: int) -> tuple[int, float]:
    """Bytes that are held until backward, and seconds, of the samples with one treatment."""
    plan = _plan(costs, {treatment: Part(samples, size)})
    return held_bytes(costs, plan), tower_seconds(problem, costs, plan)


def _ways(problem: StepProblem, cost_of: CostOf, graph: int, treatments: Sequence[str]) -> Iterator[Point]:
    """All numbers of micro-batches that are checkpointed and kept within the memory. The rest is cached, and not
    counted."""
    samples = problem.samples
    passes = -(-samples // graph)
    group = -(-passes // GROUPS) * graph
    counts = range(-(-samples // group) + 1)
    for checkpointed in counts if "checkpointed" in treatments else (0,):
        some = min(checkpointed * group, samples)
        some_bytes, some_s = cost_of("checkpointed", some, graph)
        for kept in counts if "kept" in treatments else (0,):
            others = min(kept * group, samples - some)
            rest = samples - some - others
            others_bytes, others_s = cost_of("kept", others, graph)
            if others_bytes + some_bytes > problem.memory_bytes:
                break
            if rest == 0 or "cached" in treatments:
                yield others_bytes + some_bytes, others_s + some_s, (some, others, rest)
            if others < kept * group:
                break


def _frontier(ways: Sequence[Point], cost_of: CostOf, size: int, most_bytes: int) -> list[Point]:
    """The ways of which none is faster and smaller than another, with their cached samples in micro-batches of a size.

    Plans are made of few of these: making one for each way takes more time than all else.
    """
    cached = {rest: cost_of("cached", rest, size) for rest in {split[-1] for *_, split in ways}}
    found: list[Point] = []
    for held, time_s, split in ways:
        more_bytes, more_s = cached[split[-1]]
        if held + more_bytes <= most_bytes:
            found.append((held + more_bytes, time_s + more_s, split))
    points: list[Point] = []
    least_s = math.inf
    for point in sorted(found):
        if point[1] < least_s:
            points.append(point)
            least_s = point[1]
    return points


def held_bytes(costs: TowerCosts, plan: TowerPlan) -> int:
    """Of all graphs that stay, and of the states for second passes."""
    graphs = sum(kept_bytes(graph, part) for _, graph, part in graphs_of(costs, plan))
    return graphs + costs.state_bytes * plan.cached.passes


def _fastest(frontiers: Sequence[Frontier], room_bytes: int) -> tuple[float, list[Point]]:
    """The points, one of each frontier, that take the least time within the room; infinite time if none fits."""
    first, *others = frontiers
    if not others:
        place = bisect.bisect_right(first.points, (room_bytes, math.inf))
        return (first.points[place - 1][1], [first.points[place - 1]]) if place else (math.inf, [])
    best: tuple[float, list[Point]] = math.inf, []
    step = 1 if len(others) == 1 else max(1, len(first.points) // THINNED)
    others_s = sum(frontier.least_s for frontier in others)
    for point in itertools.chain(first.points[::step], first.points[-1:]):
        held_bytes, time_s, _ = point
        if held_bytes > room_bytes:
            break
        if time_s + others_s >= best[0]:
            continue
        rest_s, rest = _fastest(others, room_bytes - held_bytes)
        if time_s + rest_s < best[0]:
            best = time_s + rest_s, [point, *rest]
    return best


def _graphs(costs: TowerCosts) -> list[PassCosts]:
    """What was measured of the passes of a tower that say which sizes there are."""
    return [each for each in (costs.kept, costs.checkpointed) if each is not None] or [costs.without_graph]


def _all_sizes(problem: StepProblem, costs: TowerCosts) -> list[int]:
    """Micro-batches to choose from, in ascending order: those that were measured, and powers of two below."""
    if problem.micro_batch is not None:
        return [min(problem.micro_batch, problem.samples)]
    measured = sorted({min(size, problem.samples) for graph in _graphs(costs) for size in graph.sizes})
    return [*(1 << power for power in range((measured[0] - 1).bit_length())), *measured]


def _measured(problem: StepProblem, costs: TowerCosts, treatment: str, size: int) -> bool:
    """Whether a treatment may have micro-batches of a size: graphs that are kept were not measured where they are
    large."""
    graph = costs.graph(treatment) or costs.without_graph
    return problem.micro_batch is not None or size <= graph.sizes[-1]


def _sizes(problem: StepProblem, costs: TowerCosts, attempt: int) -> list[int]:
    """Sizes of micro-batches to try: at first the measured ones that are about as fast as any of their treatment.

    Each further attempt has the smallest and the largest of these, and the next SMALLER sizes below them; at the end
    the smallest.
    """
    sizes = _all_sizes(problem, costs)
    fast = sorted({size for graph in _graphs(costs) for size in _fast(graph, sizes)})
    if attempt == 0:
        return fast
    below = [size for size in reversed(sizes) if size < fast[0]]
    first = SMALLER * (attempt - 1)
    return sorted({*(below[first : first + SMALLER] or below[-1:]), fast[0], fast[-1]})


def _fast(graph: PassCosts, sizes: Sequence[int]) -> list[int]:
    measured = [size for size in sizes if graph.sizes[0] <= size <= graph.sizes[-1]] or [sizes[-1]]
    sample_s = {size: graph.seconds(size) / size for size in measured}
    return [size for size in measured if sample_s[size] <= NEARLY_AS_FAST * min(sample_s.values())]
