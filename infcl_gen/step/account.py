"""Bytes and seconds of a step: what is allocated in each phase, and how long each takes.

    first      cached micro-batches pass the towers without a graph
    graphs     the others pass with theirs, which stays
    loss       its forward and backward
    backward   of the graphs that were kept
    second     cached micro-batches again, forward and backward; streamed ones

The peak is that of the largest phase (arXiv 2410.17243, equation 10, with the graphs that a plan keeps).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from infcl_gen.step.costs import PassCosts, StepCosts, TowerCosts
from infcl_gen.step.plan import STREAMED, TREATMENTS, Part, TowerPlan

BUCKET_BYTES = 64 << 20  # of gradients that are reduced over ranks together, without FSDP2
PHASES = ("first", "graphs", "loss", "backward", "second")


class LossCosts(NamedTuple):
    """A loss within one memory budget: its peak beyond the features, with their gradients, and its time."""

    peak_bytes: int
    time_s: float
    budget_bytes: int | None = None


class Losses(Protocol):
    """The loss of so many samples of each tower per device."""

    def smallest_bytes(self, samples: tuple[int, ...]) -> int:
        """The least memory that it takes."""

    def within_budgets(self, samples: tuple[int, ...]) -> Sequence[LossCosts]:
        """Its costs within several budgets, the smallest first."""


@dataclasses.dataclass(frozen=True)
class StepProblem:
    """What a step is planned for, per device.

    samples        of each tower
    memory_bytes   all that the process may allocate on the device
    optimizer_bytes   of the optimiser's state, for all parameters
    world_size, wrapper   "none", "ddp" (gradients are reduced in buckets), "fsdp2" (each device has a share)
    inputs         "host": micro-batches are copied to the device; "device": the whole batch is there
    treatments, micro_batch   that a plan may use; None: any
    """

    costs: StepCosts
    samples: tuple[int, ...]
    memory_bytes: int
    losses: Losses
    optimizer_bytes: int = 0
    world_size: int = 1
    wrapper: str = "none"
    inputs: str = "host"
    treatments: tuple[str, ...] = TREATMENTS
    micro_batch: int | None = None


class Item(NamedTuple):
    """Bytes of one kind, and the phases in which they are allocated."""

    name: str
    size: int
    phases: tuple[str, ...]
    why: str


@dataclasses.dataclass(frozen=True)
class Account:
    """A choice of treatments, and what it costs."""

    towers: tuple[TowerPlan, ...]
    loss: LossCosts
    items: tuple[Item, ...]
    seconds: dict[str, float]

    def bytes_in(self, phase: str) -> int:
        return sum(item.size for item in self.items if phase in item.phases)

    @property
    def peak_bytes(self) -> int:
        return max(map(self.bytes_in, PHASES))

    @property
    def time_s(self) -> float:
        return sum(self.seconds.values())


def account(problem: StepProblem, towers: Sequence[TowerPlan], loss: LossCosts) -> Account:
    """What it costs that the samples pass the towers so."""
    pairs = list(zip(problem.costs.towers, towers, strict=True))
    return Account(tuple(towers), loss, tuple(_items(problem, pairs, loss)), _seconds(problem, pairs, loss))


def passes_of(part: Part) -> Iterator[tuple[int, int]]:
    """(samples of a micro-batch, how many there are of that size)."""
    whole, rest = divmod(part.samples, part.micro_batch)
    if whole:
        yield part.micro_batch, whole
    if rest:
        yield rest, 1


def ways(costs: TowerCosts, plan: TowerPlan) -> Iterator[tuple[str, PassCosts, Part]]:
    """The treatments that a tower's samples get, with what their graph costs."""
    for name in ("checkpointed", "kept"):
        graph: PassCosts | None = getattr(costs, name)
        part: Part = getattr(plan, name)
        if part.samples and graph is not None:
            yield name, graph, part


def tower_seconds(problem: StepProblem, costs: TowerCosts, plan: TowerPlan) -> float:
    """Of all passes of a tower."""
    return sum(_tower_seconds(problem, costs, plan).values())


def _tower_seconds(problem: StepProblem, costs: TowerCosts, plan: TowerPlan) -> dict[str, float]:
    found = dict.fromkeys(PHASES, 0.0)
    for size, count in passes_of(plan.cached):
        first_s = costs.without_graph.at("forward_s", size)
        found["first"] += count * _pass_seconds(problem, costs, first_s, size)
        if costs.kept is not None:
            found["second"] += count * _pass_seconds(problem, costs, costs.kept.seconds(size), size)
    for size, count in passes_of(plan.streamed):
        assert costs.kept is not None
        found["second"] += count * _pass_seconds(problem, costs, costs.kept.seconds(size), size)
    for _, graph, part in ways(costs, plan):
        for size, count in passes_of(part):
            found["graphs"] += count * _pass_seconds(problem, costs, graph.at("forward_s", size), size)
            found["backward"] += count * graph.at("backward_s", size)
    return found


def _pass_seconds(problem: StepProblem, costs: TowerCosts, compute_s: float, size: int) -> float:
    """Of one pass whose input arrives while the one before computes."""
    rate = problem.costs.host_to_device_gbs * 1e9
    copy_s = size * costs.input_bytes / rate if problem.inputs == "host" and rate else 0.0
    return max(compute_s, copy_s)


Pairs = list[tuple[TowerCosts, TowerPlan]]


def _seconds(problem: StepProblem, pairs: Pairs, loss: LossCosts) -> dict[str, float]:
    of_towers = [_tower_seconds(problem, costs, plan) for costs, plan in pairs]
    found = {phase: sum(each[phase] for each in of_towers) for phase in PHASES}
    return found | {"loss": found["loss"] + loss.time_s}


def kept_bytes(graph: PassCosts, part: Part) -> int:
    """Of the graphs of all micro-batches of a part."""
    return sum(round(graph.at("kept_bytes", size)) * count for size, count in passes_of(part))


def _items(problem: StepProblem, pairs: Pairs, loss: LossCosts) -> Iterator[Item]:
    costs = problem.costs
    after = ("backward", "second")
    sharded = problem.wrapper == "fsdp2"
    share = problem.world_size if sharded else 1
    yield Item("parameters", -(-costs.parameter_bytes // share), PHASES, "and buffers")
    yield Item("gradients", costs.gradient_bytes, after, "of parameters, whole until they are reduced")
    if sharded:
        yield Item("own gradients", -(-costs.gradient_bytes // share), after, "this device's share")
    if problem.wrapper == "ddp" and problem.world_size > 1:
        yield Item("buckets", min(BUCKET_BYTES, costs.gradient_bytes), ("second",), "gradients reduced together")
    yield Item("optimizer", -(-problem.optimizer_bytes // share), PHASES, "its state")
    yield Item("workspace", costs.workspace_bytes, PHASES, "the matrix library keeps it")
    yield Item("cast weights", costs.cast_bytes, PHASES, "autocast keeps them while graphs need them")
    if problem.inputs == "device":
        size = sum(tower.input_bytes * samples for tower, samples in zip(costs.towers, problem.samples, strict=True))
        yield Item("inputs", size, PHASES, "the whole batch")
    else:
        again = ("cached", STREAMED)
        for phases, names in ((("first", "second"), again), (("graphs",), ("checkpointed", "kept"))):
            parts = [(tower, getattr(plan, name)) for tower, plan in pairs for name in names]
            largest = max(tower.input_bytes * min(part.micro_batch, part.samples) for tower, part in parts)
            yield Item("inputs", largest, phases, "a micro-batch that arrives ahead of its pass")
    features = sum(tower.feature_bytes * samples for tower, samples in zip(costs.towers, problem.samples, strict=True))
    yield Item("features", features, PHASES, "of all samples")
    yield Item("feature gradients", features, after, "what towers are given to go backward from")
    for tower, plan in pairs:
        for name, graph, part in ways(tower, plan):
            why = f"{part.samples} samples of {tower.name}, {part.micro_batch} at a time"
            yield Item(f"{name} graphs", kept_bytes(graph, part), ("graphs", "loss", "backward"), why)
    if any(plan.cached.samples for _, plan in pairs):
        states = sum(tower.state_bytes * plan.cached.passes for tower, plan in pairs)
        yield Item("states", states, PHASES, "buffers and random numbers, for second passes")
        yield Item("copied buffers", costs.state_bytes, ("first", "second"), "for it shows later which a pass changes")
    yield Item("loss", loss.peak_bytes, ("loss",), "its scratch, and the features' gradients")
    for phase, size in _workspace(pairs).items():
        yield Item("activations", size, (phase,), "of one micro-batch while it is computed")


def _workspace(pairs: Pairs) -> dict[str, int]:
    """By phase, what the pass of one micro-batch allocates beside the graphs that stay."""
    found = dict.fromkeys(("first", "graphs", "backward", "second"), 0.0)
    for costs, plan in pairs:
        for size in {size for size, _ in passes_of(plan.cached)}:
            found["first"] = max(found["first"], costs.without_graph.at("forward_peak_bytes", size))
        for size in {size for part in (plan.cached, plan.streamed) for size, _ in passes_of(part)}:
            if costs.kept is not None:
                peaks = (costs.kept.at(name, size) for name in ("forward_peak_bytes", "backward_peak_bytes"))
                found["second"] = max(found["second"], *peaks)
        for _, graph, part in ways(costs, plan):
            for size in {size for size, _ in passes_of(part)}:
                kept = graph.at("kept_bytes", size)
                found["graphs"] = max(found["graphs"], graph.at("forward_peak_bytes", size) - kept)
                found["backward"] = max(found["backward"], graph.at("backward_peak_bytes", size) - kept)
    return {phase: round(size) for phase, size in found.items()}
