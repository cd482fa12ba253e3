"""The timeline of a step: a plan's schedule executed as events, for all ranks or for one that stands for all of them.

Each rank has a host, which enqueues in order, a stream of kernels, a stream of messages, and a port to the devices of
its node. The ranks of a node share its links to the network.

    host      start, tell, agree  first 0  post 0  rest 0  first 1  post 1  rest 1  first 2  post 2 ...
    kernels                         | first . rest 0 ..............  | first ......... rest 1 .......  | first ...
    messages                                     | keys for 1       | sums of 0, keys for 2     | sums of 1
                                                                                 ^ it waits for the sums of 0

The steps are those of `runtime.table`. Hosts exchange their calls at the start of forward, and before the first message
of backward. A message starts when it is posted, the message before it is done and, for sums, the work has added to
them. A transfer starts when both of its ends have. A message occupies SMs: kernels of its rank are slower meanwhile.

All ranks do the same, so one is simulated: it sends to itself. Its transfers between nodes count once for each device
of a node.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from infcl_gen.planning.events import Events, Pipe, Task
from infcl_gen.planning.model import CostModel, host_times
from infcl_gen.planning.planner import Plan
from infcl_gen.runtime.table import Transfer

HOST_MESSAGE_S, HOST_PEER_S = 100e-6, 20e-6  # host time of a batch of messages and of each further peer (2 H200s)
# Exchange of calls with each other rank: to post, to read and compare, and until the other host has it (2 H200s).
TELL_PEER_S, READ_PEER_S, HEARD_S = 80e-6, 50e-6, 200e-6
BEFORE_BACKWARD = 0.6  # of the host's time after its start: between the launches of forward and those of backward
FIRST_LAUNCHES = 0.6  # of a hop's launches: before those that add to travelling sums (in forward 3 of 4 or 5)
LEAD_S = 20e-3  # lead of the host behind other work; the towers of a training step take longer

LEVELS = {"device": "device link", "node": "network"}
RESOURCES = ("compute", *LEVELS.values(), "host")


@dataclasses.dataclass(frozen=True)
class Interval:
    """A resource of a rank in use; `name` says by what."""

    rank: int
    resource: str
    name: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated step. `alone_s`: the step with copies instead of messages. `busy_s`: use of each resource of the
    slowest rank. `critical_s`: the longest chain of events by resource; `bound`: the largest part of it."""

    step_s: float
    forward_s: float
    alone_s: float
    busy_s: dict[str, float]
    critical_s: dict[str, float]
    bound: str
    intervals: tuple[Interval, ...]

    @property
    def backward_s(self) -> float:
        return self.step_s - self.forward_s

    @property
    def efficiency(self) -> float:
        """Speed relative to the same work without communication."""
        return self.alone_s / self.step_s


class Work(NamedTuple):
    """The work of one phase on one rank."""

    first_s: float  # kernels of all hops before these add to travelling sums
    rest_s: float  # their other kernels
    begun_s: float  # of the early work, which waits for no keys of other ranks
    left_s: float  # after late messages have started
    last_s: float  # after the last hop, before the sums are home
    home_s: float  # after the sums are home
    launches: float  # of all hops


def execute(
    plan: Plan, model: CostModel, *, communicate: bool = True, overlap: bool = True, everybody: bool = False,
    lead_s: float = 0.0,
) -> Timeline:  # fmt: skip
    """Simulate one forward and backward of `plan`, which was chosen by `model`.

    communicate  False: what would be sent is copied on the device
    overlap      False: kernels wait for each message where it starts
    everybody    every rank is simulated, instead of one that stands for all
    lead_s       seconds by which the host leads, behind other work as in training; 0 is an idle device
    """
    done = _Step(plan, model, communicate, overlap, everybody, lead_s).run()
    if not communicate or plan.world_size == 1:
        return done
    return dataclasses.replace(done, alone_s=_Step(plan, model, False, overlap, False, lead_s).run().step_s)


def phase_works(plan: Plan, model: CostModel) -> dict[str, Work]:
    """The work of "forward" and of "backward", from the phases of the cost model."""
    found = {}
    for phase in ("forward", "backward"):
        hops_s, first_s = model.work_s(phase, plan.phases, plan)
        begun_s, left_s = model.begun_s(plan.phases, plan), model.left_s(plan.phases, plan)
        rest_s, launches = max(0.0, hops_s - first_s), model.launches(phase, plan)
        found[phase] = Work(first_s, rest_s, begun_s, left_s, 0.0, 0.0, launches)
    times = {phase.name: phase.time_s for phase in plan.phases}
    # Queries are finished before the sums of keys are home, keys after.
    queries_s, keys_s = (
        times["finish"] * own / (plan.of_queries + plan.of_keys) for own in (plan.of_queries, plan.of_keys)
    )
    last = "forward" if plan.at_once else "backward"  # the phase in which sums become gradients
    found[last] = found[last]._replace(last_s=queries_s, home_s=keys_s + times.get("additions", 0.0))
    if plan.at_once:
        found["backward"] = found["backward"]._replace(last_s=times["rescale"])
    return found


Streams = list[list[Task]]  # by rank, the tasks that the next task of a stream waits for; inner lists never change


def _joined(some: Streams, more: Streams) -> Streams:
    return [[*these, *those] for these, those in zip(some, more, strict=True)]


class _Step:
    """The events of one step: built in the order in which hosts enqueue, then run."""

    def __init__(
        self, plan: Plan, model: CostModel, communicate: bool, overlap: bool, everybody: bool, lead_s: float
    ) -> None:
        cluster, table = model.cluster, model.table
        self._table, self._model, self._works = table, model, phase_works(plan, model)
        self._communicate, self._overlap, self._everybody, self._lead_s = communicate, overlap, everybody, lead_s
        self._ranks = range(table.world_size if everybody else 1)
        self._copy = 2 / (cluster.profile.bandwidth_gbs.value * 1e9)  # seconds a byte: read and written
        each = table.devices_per_node
        self._latency = {"device": cluster.latency_us.value * 1e-6, "node": cluster.node_latency_us.value * 1e-6}
        device, node = cluster.link_gbs.value * 1e9, cluster.node_link_gbs.value * 1e9
        nodes, weight = (table.nodes, 1) if everybody else (1, each)
        uplinks = [Pipe(node, node * cluster.links_per_node, weight) for _ in range(nodes)]
        self._pipes = [{"device": Pipe(device, device, 1), "node": uplinks[rank // each]} for rank in self._ranks]
        start_s, step_s, self._launch_s = host_times(plan)
        between_s = (step_s - start_s) * BEFORE_BACKWARD
        self._host_s = {"forward": start_s, "backward": between_s, "end": step_s - start_s - between_s}
        self._events = Events(len(self._ranks), model.slowdown)
        self._nothing: Streams = [[] for _ in self._ranks]
        self._host, self._kernels, self._messages = (list(self._nothing) for _ in range(3))
        for stream in (self._kernels, self._messages) if lead_s else ():
            self._enqueue(stream, "lead", "other work", lead_s)

    def run(self) -> Timeline:
        self._phase("forward")
        forward = [self._kernels[rank][-1] for rank in self._ranks]
        self._phase("backward")
        self._enqueue(self._host, "host", "end", self._host_s["end"])
        ends = self._enqueue(self._kernels, "end", "end", 0.0, self._host)
        self._events.run()
        last = max((task for (task,) in ends), key=lambda task: task.end)
        return self._timeline(last, max(task.end for task in forward))

    def _phase(self, phase: str) -> None:
        work = self._works[phase]
        self._enqueue(self._host, "host", f"{phase}, start", self._host_s[phase])
        hop, home = 0, self._nothing
        if phase == "forward":
            self._agree(phase)
        arrived: dict[tuple[int, str], Streams] = {}  # by step and role, the ends of the messages
        for number, step in enumerate(self._table.steps(phase)):
            before, part = list(self._kernels), self._table.work(step)
            first_s, rest_s = part * work.first_s, part * work.rest_s
            if step.early:  # behind its messages
                rest_s = work.begun_s
            if step.late:
                first_s, rest_s = first_s + rest_s - work.begun_s - work.left_s, work.left_s
            if step.owner is not None:
                keys = arrived.get((step.unchanged_from, "unchanged"), self._nothing)
                self._part(phase, hop, part * FIRST_LAUNCHES, first_s, keys)
            for batch in self._table.batches(phase, step, self._model.sent_bytes):
                if phase == "backward" and not arrived:
                    self._agree(phase)
                name = f"{phase}, message {hop if number or step.owner else 'before'}"
                done = self._message(name, batch, list(self._kernels) if step.late else before)
                arrived |= {(number, self._table.role(sent.name, phase)): done for sent in batch}
            sums = arrived.get((step.sums_from, "summed"), self._nothing)
            if not self._table.adds(step):
                home, sums = sums, self._nothing
            if step.owner is not None:
                self._part(phase, hop, part * (1 - FIRST_LAUNCHES), rest_s, sums)
                hop += 1
        self._enqueue(self._kernels, "compute", f"{phase}, end", work.last_s)
        self._enqueue(self._kernels, "compute", f"{phase}, home", work.home_s, home)

    def _part(self, phase: str, hop: int, share: float, work_s: float, arrived: Streams) -> None:
        """Kernels of a hop that wait for `arrived`, and their share of the phase's launches."""
        seconds, name = self._launch_s * self._works[phase].launches * share, f"{phase}, hop {hop}"
        waits = _joined(self._host, arrived)
        launched = self._enqueue(self._host, "host", name, seconds)
        self._enqueue(self._kernels, "compute", name, work_s, waits)
        self._kernels = _joined(self._kernels, launched)  # the last kernel does not end before its launch

    def _agree(self, phase: str) -> None:
        """Every host tells all others of its call, and reads theirs."""
        if others := (self._table.world_size - 1) * self._communicate:
            tell = f"{phase}, tell"
            told = self._enqueue(self._host, "host", tell, TELL_PEER_S * others)
            heard = [self._events.task(task.rank, "heard", "host", tell, HEARD_S, [task]) for (task,) in told]
            self._enqueue(self._host, "host", f"{phase}, agree", READ_PEER_S * others, [heard for _ in self._ranks])

    def _message(self, name: str, batch: Sequence[Transfer], kernels: Streams) -> Streams:
        """One batch of transfers on every rank, behind `kernels`; returns its ends."""
        if not self._communicate:
            seconds = self._copy * sum(map(self._model.transfer_bytes, batch))
            self._enqueue(self._kernels, "compute", name, seconds, self._host)
            return self._nothing
        levels = {self._table.level(sent.to) for sent in batch}
        start_s = self._model.batch_s + max(self._latency[level] for level in levels)
        resource = LEVELS["node" if "node" in levels else "device"]
        host_s = HOST_MESSAGE_S + HOST_PEER_S * (len({sent.to for sent in batch}) - 1) + self._model.posting_s(batch)
        posted = self._enqueue(self._host, "host", name, host_s)
        begins = self._enqueue(self._messages, "message", name, start_s, _joined(posted, kernels), resource)
        flows: Counter[tuple[int, int, str]] = Counter()  # bytes by sender, receiver and level
        for sent, rank in itertools.product(batch, self._ranks):
            other = self._table.rank(rank, sent.to) if self._everybody else rank
            flows[rank, other, self._table.level(sent.to)] += self._model.transfer_bytes(sent)
        arriving = [list[Task]() for _ in self._ranks]
        for (rank, other, level), size in flows.items():
            both, pipe = begins[rank] + begins[other], self._pipes[rank][level]
            flow = self._events.task(rank, "transfer", LEVELS[level], name, size, both, pipe)
            for end in {rank, other}:
                arriving[end].append(flow)
        found = self._enqueue(self._messages, "done", name, 0.0, arriving, resource)
        if not self._overlap:
            self._kernels = _joined(self._kernels, found)
        return found

    def _enqueue(
        self, stream: Streams, kind: str, name: str, seconds: float, waits: Streams | None = None, resource: str = ""
    ) -> Streams:
        """Append a task to the stream of every rank; it starts behind the stream's tasks and behind `waits`."""
        stream[:] = [
            [self._events.task(rank, kind, resource or kind, name, seconds, before)]
            for rank, before in enumerate(_joined(stream, waits or self._nothing))
        ]
        return list(stream)

    def _timeline(self, last: Task, forward_s: float) -> Timeline:
        lead_s, critical = self._lead_s, dict.fromkeys(RESOURCES, 0.0)
        task: Task | None = last.cause
        while task is not None and task.end > lead_s:
            spent = task.end - max(task.start, lead_s)
            slowed = max(0.0, spent - task.work) if task.kind == "compute" and task.slowed_by else 0.0
            critical[task.resource] += spent - slowed
            critical[task.slowed_by or task.resource] += slowed
            task = task.cause
        intervals = [
            Interval(task.rank, task.resource, task.name, max(0.0, task.start - lead_s), task.end - lead_s)
            for task in self._events.tasks
            if task.kind in ("host", "compute", "transfer") and task.end > max(task.start, lead_s)
        ]
        busy = [dict.fromkeys(RESOURCES, 0.0) for _ in self._ranks]
        for interval in intervals:
            busy[interval.rank][interval.resource] += interval.end_s - interval.start_s
        step_s, bound = last.end - lead_s, max(RESOURCES, key=lambda name: critical[name])
        return Timeline(step_s, forward_s - lead_s, step_s, busy[last.rank], critical, bound, tuple(intervals))
