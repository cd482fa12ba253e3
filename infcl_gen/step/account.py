"""Bytes and seconds of a step: what is allocated in each phase, and how long each takes.

    cached_forward       cached micro-batches pass the towers without a graph
    offloaded_forward    others pass with theirs, which goes to the host meanwhile
    forward              the others pass with theirs, which stays on the device
    loss                 its forward and backward
    backward             of the graphs that stayed on the device
    offloaded_backward   of those that come back from the host
    forward_backward     cached micro-batches again, and streamed ones

The peak is that of the largest phase (arXiv 2410.17243, equation 10, with the graphs that a plan keeps).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from infcl_gen.inputs.problem import DTYPE_BYTES
from infcl_gen.step.costs import PassCosts, StepCosts, TowerCosts
from infcl_gen.step.plan import STREAMED, TREATMENTS, WITH_GRAPHS, Part, TowerPlan

BUCKET_BYTES = 64 << 20  # of gradients that are reduced over ranks together, without FSDP2
HOST_LOCK_GBS = 2.4  # 1e9 bytes a second that cudaHostRegister locks: 52.6 GB take 21 s beside one H200, torch 2.11
PHASES = (
    "cached_forward", "offloaded_forward", "forward", "loss", "backward", "offloaded_backward", "forward_backward",
)  # fmt: skip


class LossCosts(NamedTuple):
    """A loss within one memory budget: its peak beyond the features, with their gradients, and its time."""

    peak_bytes: int
    time_s: float
    budget_bytes: int | None = None


class Losses(Protocol):
    """The loss of so many samples per device."""

    def smallest_bytes(self, samples: int) -> int:
        """The least memory that it takes."""

    def within_budgets(self, samples: int) -> Sequence[LossCosts]:
        """Its costs within several budgets, the smallest first."""


@dataclasses.dataclass(frozen=True)
class StepProblem:
    """What a step is planned for, per device.

    samples        that pass each tower
    memory_bytes   all that the process may allocate on the device
    host_memory_bytes   of the host, that offloaded graphs may take
    optimizer_bytes   of the optimiser's state, for all parameters
    world_size, wrapper   "none", "ddp" (gradients are reduced in buckets), "fsdp2" (each device has a share)
    inputs         "host": micro-batches are copied to the device; "device": the whole batch is there
    treatments, micro_batch   that a plan may use; None: any
    """

    costs: StepCosts
    samples: int
    memory_bytes: int
    losses: Losses
    optimizer_bytes: int = 0
    world_size: int = 1
    wrapper: str = "none"
    inputs: str = "host"
    treatments: tuple[str, ...] = TREATMENTS
    micro_batch: int | None = None
    host_memory_bytes: int = 0

    @property
    def offloads(self) -> bool:
        """Whether graphs may wait on the host. Under FSDP2 they may not: weights lose their memory behind their pass,
        when a copy of what it saved may still be under way."""
        wanted = "offloaded" in self.treatments and self.host_memory_bytes > 0
        return wanted and self.costs.host_to_device_gbs > 0 and self.wrapper != "fsdp2"


class Item(NamedTuple):
    """Bytes of one kind, and the phases in which they are allocated."""

    name: str
    size_bytes: int
    phases: tuple[str, ...]
    why: str


@dataclasses.dataclass(frozen=True)
class Account:
    """A choice of treatments, and what it costs; `host_bytes` of offloaded graphs on the host."""

    towers: tuple[TowerPlan, ...]
    loss: LossCosts
    items: tuple[Item, ...]
    phase_s: dict[str, float]
    host_bytes: int = 0

    def bytes_in(self, phase: str) -> int:
        return sum(item.size_bytes for item in self.items if phase in item.phases)

    @functools.cached_property
    def peak_bytes(self) -> int:
        return max(map(self.bytes_in, PHASES))

    @functools.cached_property
    def time_s(self) -> float:
        return sum(self.phase_s.values())

    @property
    def host_lock_s(self) -> float:
        """That the first step takes longer: the host locks the memory of offloaded graphs."""
        return self.host_bytes / (HOST_LOCK_GBS * 1e9)


def account(problem: StepProblem, towers: Sequence[TowerPlan], loss: LossCosts) -> Account:
    """What it costs that the samples pass the towers so."""
    pairs = list(zip(problem.costs.towers, towers, strict=True))
    host_bytes = sum(offloaded_bytes(costs, plan.offloaded) for costs, plan in pairs)
    items, phase_s = tuple(_items(problem, pairs, loss)), _seconds(problem, pairs, loss)
    return Account(tuple(towers), loss, items, phase_s, host_bytes)


def passes_of(part: Part) -> Iterator[tuple[int, int]]:
    """(samples of a micro-batch, how many there are of that size)."""
    whole, rest = divmod(part.samples, part.micro_batch)
    if whole:
        yield part.micro_batch, whole
    if rest:
        yield rest, 1


def graphs_of(costs: TowerCosts, plan: TowerPlan) -> Iterator[tuple[str, PassCosts, Part]]:
    """The treatments whose graphs stay, with what these cost."""
    for treatment, part in plan.parts():
        graph = costs.graph(treatment)
        if treatment in WITH_GRAPHS and graph is not None:
            yield treatment, graph, part


def tower_seconds(problem: StepProblem, costs: TowerCosts, plan: TowerPlan) -> float:
    """Of all passes of a tower."""
    return sum(_tower_seconds(problem, costs, plan).values())


def _tower_seconds(problem: StepProblem, costs: TowerCosts, plan: TowerPlan) -> dict[str, float]:
    found = dict.fromkeys(PHASES, 0.0)
    for treatment, part in plan.parts():
        graph = costs.graph(treatment)
        for size, count in passes_of(part):
            if treatment == "cached":
                first_s = costs.without_graph.at("forward_s", size)
                found["cached_forward"] += count * _pass_seconds(problem, costs, first_s, size)
            if graph is not None and treatment in ("cached", STREAMED):
                found["forward_backward"] += count * _pass_seconds(problem, costs, graph.seconds(size), size)
            elif graph is not None:
                forward_s = _pass_seconds(problem, costs, graph.at("forward_s", size), size)
                backward_s = graph.at("backward_s", size)
                if treatment == "offloaded":
                    copied_s = graph.at("kept_bytes", size) / (problem.costs.host_to_device_gbs * 1e9)
                    found["offloaded_forward"] += count * max(forward_s, copied_s)
                    found["offloaded_backward"] += count * max(backward_s, copied_s)
                else:
                    found["forward"] += count * forward_s
                    found["backward"] += count * backward_s
    return found


def _pass_seconds(problem: StepProblem, costs: TowerCosts, compute_s: float, size: int) -> float:
    """Of one pass whose input arrives while the one before computes."""
    bytes_per_s = problem.costs.host_to_device_gbs * 1e9
    copy_s = size * costs.input_bytes / bytes_per_s if problem.inputs == "host" and bytes_per_s else 0.0
    return max(compute_s, copy_s)


Pairs = list[tuple[TowerCosts, TowerPlan]]


def _seconds(problem: StepProblem, pairs: Pairs, loss: LossCosts) -> dict[str, float]:
    of_towers = [_tower_seconds(problem, costs, plan) for costs, plan in pairs]
    found = {phase: sum(each[phase] for each in of_towers) for phase in PHASES}
    return found | {"loss": found["loss"] + loss.time_s}


def kept_bytes(graph: PassCosts, part: Part) -> int:
    """Of the graphs of all micro-batches of a part."""
    return sum(round(graph.at("kept_bytes", size)) * count for size, count in passes_of(part))


def offloaded_bytes(costs: TowerCosts, part: Part) -> int:
    """Of the host, for the graphs of these samples."""
    return kept_bytes(costs.checkpointed, part) if part.samples and costs.checkpointed is not None else 0


def _items(problem: StepProblem, pairs: Pairs, loss: LossCosts) -> Iterator[Item]:
    costs = problem.costs
    again, copies = ("cached_forward", "forward_backward"), ("offloaded_forward", "offloaded_backward")
    behind_loss = ("backward", "offloaded_backward", "forward_backward")
    sharded = problem.wrapper == "fsdp2"
    share = problem.world_size if sharded else 1
    yield Item("parameters", -(-costs.parameter_bytes // share), PHASES, "and buffers")
    yield Item("gradients", costs.gradient_bytes, behind_loss, "of parameters, whole until they are reduced")
    if sharded:
        yield Item("own gradients", -(-costs.gradient_bytes // share), behind_loss, "this device's share")
    if problem.wrapper == "ddp":
        yield Item("DDP's buckets", costs.gradient_bytes, PHASES, "held from when it is made, beside gradients")
    if problem.wrapper == "ddp" and problem.world_size > 1:
        size = min(BUCKET_BYTES, costs.gradient_bytes)
        yield Item("bucket", size, ("forward_backward",), "gradients that are reduced together")
    yield Item("optimizer", -(-problem.optimizer_bytes // share), PHASES, "its state")
    yield Item("workspace", costs.workspace_bytes, PHASES, "the matrix library keeps it")
    yield Item("cast weights", costs.cast_bytes, PHASES, "autocast keeps them while graphs need them")
    if problem.inputs == "device":
        size = problem.samples * sum(tower.input_bytes for tower in costs.towers)
        yield Item("inputs", size, PHASES, "the whole batch")
    else:
        once = ("offloaded_forward", "forward")
        for phases, names in ((again, ("cached", STREAMED)), (once, (*WITH_GRAPHS, "offloaded"))):
            parts = [(tower, getattr(plan, name)) for tower, plan in pairs for name in names]
            largest = max(tower.input_bytes * min(part.micro_batch, part.samples) for tower, part in parts)
            yield Item("inputs", largest, phases, "a micro-batch that arrives ahead of its pass")
    features = problem.samples * sum(tower.feature_bytes for tower in costs.towers)
    yield Item("features", features, PHASES, "of all samples")
    yield Item("feature gradients", features, behind_loss, "what towers are given to go backward from")
    for tower, plan in pairs:
        for name, graph, part in graphs_of(tower, plan):
            why = f"{part.samples} samples of {tower.name}, {part.micro_batch} at a time"
            yield Item(f"{name} graphs", kept_bytes(graph, part), ("forward", "loss", "backward"), why)
    passing = [
        offloaded_bytes(tower, Part(size, size)) for tower, plan in pairs for size, _ in passes_of(plan.offloaded)
    ]
    why = "of one micro-batch on its way to the host or back, while another is computed"
    yield Item("offloaded graphs", max(passing, default=0), ("forward", "backward", *copies), why)
    ends = sum(tower.feature_bytes * plan.offloaded.samples for tower, plan in pairs)
    why = "features that offloaded graphs begin from"
    yield Item("ends of graphs", ends, ("forward", "loss", "backward", *copies), why)
    if any(plan.cached.samples for _, plan in pairs):
        states = sum(tower.state_bytes * plan.cached.passes for tower, plan in pairs)
        yield Item("states", states, PHASES, "buffers and random numbers, for second passes")
        yield Item("copied buffers", costs.state_bytes, again, "to see which ones a pass changes")
    if not costs.with_targets:
        why = "those before a pass or a block, and those behind it, to see whether it drew"
        yield Item("random states", 2 * costs.random_bytes, PHASES, why)
    yield Item("loss", loss.peak_bytes, ("loss",), "its scratch, and the features' gradients")
    for phase, size in _workspace(pairs, costs.dtype).items():
        yield Item("activations", size, (phase,), "of one micro-batch while it is computed")


def _workspace(pairs: Pairs, dtype: str) -> dict[str, int]:
    """By phase, what the pass of one micro-batch allocates beside the graphs that stay.

    While a tower passes, forward or backward, the graphs of the towers behind it are not there: backward begins with
    the last tower. Offloaded micro-batches pass forward first and backward last, when none of the others is there.
    Features of a second pass are compared with those of the first: their difference, and it in fp64.
    """
    found, behind_bytes = dict.fromkeys(PHASES, 0.0), 0
    compared = 1 if dtype == "fp64" else 1 + DTYPE_BYTES["fp64"] // DTYPE_BYTES[dtype]
    for costs, plan in reversed(pairs):
        for treatment, size in {(treatment, size) for treatment, part in plan.parts() for size, _ in passes_of(part)}:
            graph, peaks = costs.graph(treatment), dict[str, float]()
            if treatment == "cached":
                peaks["cached_forward"] = costs.without_graph.at("forward_peak_bytes", size)
            if graph is not None:
                forward, backward = (graph.at(name, size) for name in ("forward_peak_bytes", "backward_peak_bytes"))
                if treatment in ("cached", STREAMED):
                    of_features = compared * costs.feature_bytes * size * (treatment == "cached")
                    peaks["forward_backward"] = max(forward, backward, graph.at("kept_bytes", size) + of_features)
                elif treatment == "offloaded":
                    peaks |= {"offloaded_forward": forward, "offloaded_backward": backward}
                else:
                    there = graph.at("kept_bytes", size) + behind_bytes
                    peaks |= {"forward": forward - there, "backward": backward - there}
            found |= {phase: max(found[phase], peak) for phase, peak in peaks.items()}
        behind_bytes += sum(kept_bytes(graph, part) for _, graph, part in graphs_of(costs, plan))
    return {phase: round(size) for phase, size in found.items() if size}
