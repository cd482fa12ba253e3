"""The timeline of a step: a plan's schedule executed as events, for all ranks or for one that stands for all of them.

What each rank has: a host, which enqueues one thing after the other; a stream of kernels; a stream of messages; a port
to the devices of its node; and with them its node's links to the network, which all transfers that leave it share.

    host      start, tell  first 0  agree  post 0  rest 0  first 1  post 1  rest 1  first 2  post 2 ...
    kernels                  | first . rest 0 ..............  | first ......... rest 1 .......  | first ...
    messages                                     | keys for 1       | sums of 0, keys for 2     | sums of 1
                                                                                 ^ it waits for the sums of 0

That is forward. Backward posts at the start of each hop, but behind the work of the first, where hosts tell each other;
if keys were not kept, they tell each other first, and a message brings the keys.

A message starts when the host has posted it, the one before it is done and, for sums, the work that added to them; a
transfer starts when both of its ends have; a message is done when what it sends and what it receives has passed. While
a rank's message is on its way the rank's kernels are slower: it takes multiprocessors. Every rank does the same at each
hop (`Schedule` is symbolic in the rank), so that one of them, whose neighbour is itself and which counts as often as a
node has devices, has the times of all.

Work is the cost model's, launches too; what messages cost is below.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from infcl_gen.planning import cost
from infcl_gen.planning.events import Events, Pipe, Task
from infcl_gen.planning.schedule import Move

if TYPE_CHECKING:
    from infcl_gen.planning.cost import CostModel
    from infcl_gen.planning.planner import Plan

# What messages cost the host, traced on two H200s. What they cost the device is in the cost model, as are the host's
# start and launches. `python tune/scaling.py --compare` shows measured rows beside their simulated times.
HOST_MESSAGE_S = 100e-6  # one batch of sends and receives, on the host
HOST_PEER_S = 20e-6  # each further peer in a batch
# Control exchange, of each other rank: to post, to read and compare; and until it is heard, where hosts begin together.
TELL_PEER_S, READ_PEER_S, HEARD_S = 80e-6, 50e-6, 200e-6
# Of what a step costs the host after its start: between forward's launches and backward's.
BEFORE_BACKWARD = 0.6

# Of a hop's launches: before those that add to sums that travel. Forward 3 of 4 or 5; backward it makes no difference.
FIRST_LAUNCHES = 0.6

LEAD_S = 20e-3  # how far a host is ahead behind other work: a training step's towers take longer

RESOURCES = ("compute", "device link", "network", "host")
LEVELS = {"device": "device link", "node": "network"}


@dataclasses.dataclass(frozen=True)
class Interval:
    """A resource of a rank in use. `name` says with what, and at which hop."""

    rank: int
    resource: str
    name: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated step. `alone_s`: the same work when nothing is sent (copied instead). `busy_s`: each resource of the
    slowest rank in use; `critical_s`: what the longest chain of events is made of, `bound` the largest part of it."""

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
        """Of the same work without communication."""
        return self.alone_s / self.step_s


@dataclasses.dataclass(frozen=True)
class Work:
    """One phase of one rank.

    `first_s`, `rest_s`: of a hop's kernels, up to where they add to what travels, and from there on. `last_s`,
    `home_s`: of what follows the last hop, before and after the sums are home. `launches`: of kernels, at a hop.
    `keys_bytes` travel unchanged, `sums_bytes` are added to.
    """

    first_s: float
    rest_s: float
    last_s: float
    home_s: float
    launches: float
    keys_bytes: int
    sums_bytes: int


def execute(
    plan: Plan,
    model: CostModel,
    *,
    communicate: bool = True,
    overlap: bool = True,
    everybody: bool = False,
    lead_s: float = 0.0,
) -> Timeline:
    """Simulate one forward and backward of `plan`, which was chosen by `model`.

    communicate  False: nothing is sent; it is copied to where it would arrive
    overlap      False: each message is waited for where it starts
    everybody    every rank by itself, instead of one that stands for all
    lead_s       how far the host is ahead when the device begins: behind other work, as in training. 0: an idle device
    """
    works = phase_works(plan, model)
    done = _Step(plan, model, works, communicate, overlap, everybody, lead_s).run()
    if not communicate or plan.world_size == 1:
        return done
    alone_s = _Step(plan, model, works, False, overlap, False, lead_s).run().step_s
    return dataclasses.replace(done, alone_s=alone_s)


def phase_works(plan: Plan, model: CostModel) -> dict[str, Work]:
    """What a rank does in "forward" and in "backward", from the phases of the cost model."""
    sizes = cost.Sizes(
        plan.forward_rows, plan.forward_keys, plan.panel_rows, plan.panel_keys, plan.stash_rows
    )
    launches = model.launches(sizes)
    times = {phase.name: phase.time_s for phase in plan.phases if phase.name in launches}
    hops = plan.world_size
    names = list(times)  # two phases forward, as in the cost model
    found = {}
    for phase, mine in (("forward", names[:2]), ("backward", names[2:])):
        hop_s = math.fsum(times[name] for name in mine if name not in cost.AFTER_HOPS) / hops
        before_s = math.fsum(times[name] for name in mine if name in cost.BEFORE_SUMS)
        first_s = before_s / hops / model.panels(phase, sizes)
        last_s = times["finish"] if phase == "backward" else 0.0
        found[phase] = Work(
            first_s,
            max(0.0, hop_s - first_s),
            last_s / 2,  # of queries, then of keys: as long
            last_s / 2 + times.get("additions", 0.0) * (phase == "backward"),
            math.fsum(launches[name] for name in mine) / hops,
            *model.travels(phase),
        )
    return found


class _Leg(NamedTuple):
    """`size` bytes over a level from each rank to each of `receivers(rank)`, of which there are so many."""

    size: int
    level: str
    receivers: Callable[[int], tuple[int, ...]]
    receiver_count: int


class _Step:
    """The events of one step: built in the order in which hosts enqueue, then run."""

    def __init__(
        self,
        plan: Plan,
        model: CostModel,
        works: dict[str, Work],
        communicate: bool,
        overlap: bool,
        everybody: bool,
        lead_s: float,
    ) -> None:
        cluster, schedule = model.cluster, plan.schedule
        self._schedule, self._works = schedule, works
        self._communicate, self._overlap = communicate, overlap
        self._ranks = range(schedule.world_size if everybody else 1)
        self._everybody = everybody
        self._copy = 2 / (cluster.profile.bandwidth_gbs.value * 1e9)  # seconds a byte: read and written
        each = schedule.devices_per_node
        self._latency = {
            "device": cluster.latency_us.value * 1e-6,
            "node": cluster.node_latency_us.value * 1e-6,
        }
        device, node = cluster.link_gbs.value * 1e9, cluster.node_link_gbs.value * 1e9
        ports = [Pipe(device, device, 1) for _ in self._ranks]
        uplinks = [
            Pipe(node, node * cluster.links_per_node, 1 if everybody else each)
            for _ in range(schedule.nodes if everybody else 1)
        ]
        self._pipes = [{"device": ports[rank], "node": uplinks[rank // each]} for rank in self._ranks]
        gpu = plan.strategy != "torch"
        self._launch_s = cost.HOST_LAUNCH_S if gpu and not plan.replay else 0.0
        start, step = cost.host_times(plan.strategy, plan.replay)
        between_s = (step - start) * BEFORE_BACKWARD
        self._host_s = {"forward": start * gpu, "backward": between_s * gpu}
        self._host_end_s = (step - start - between_s) * gpu
        self._legs: dict[tuple[tuple[Move, int], ...], list[_Leg]] = {}
        self._events = Events(len(self._ranks), cost.SLOWDOWN)
        # Of each rank: what the next of each stream waits for; what the keys, and the sums, of a hop wait for.
        self._host, self._kernels, self._messages, self._keys, self._sums = (
            [list[Task]() for _ in self._ranks] for _ in range(5)
        )
        self._lead_s = lead_s
        for rank in self._ranks if lead_s else ():
            for stream in (self._kernels, self._messages):
                self._enqueue(stream, rank, "lead", "other work", lead_s)

    def run(self) -> Timeline:
        self._phase("forward")
        forward = [self._kernels[rank][-1] for rank in self._ranks]
        self._phase("backward")
        for rank in self._ranks:
            self._enqueue(self._host, rank, "host", "end", self._host_end_s)
        ends = [
            self._events.task(rank, "end", "", "end", 0.0, self._host[rank] + self._kernels[rank])
            for rank in self._ranks
        ]
        self._events.run()
        last = max(ends, key=lambda task: task.end)
        return self._timeline(last, max(task.end for task in forward))

    def _phase(self, phase: str) -> None:
        work = self._works[phase]
        for rank in self._ranks:
            self._enqueue(self._host, rank, "host", f"{phase}, start", self._host_s[phase])
        {"none": self._alone, "ring": self._rotate, "gather": self._gather}[self._schedule.transport](phase)
        for rank in self._ranks:
            self._enqueue(self._kernels, rank, "compute", f"{phase}, end", work.last_s)
            self._enqueue(self._kernels, rank, "compute", f"{phase}, home", work.home_s, self._sums[rank])
            self._keys[rank], self._sums[rank] = [], []

    def _alone(self, phase: str) -> None:
        self._work(phase, 0)

    def _rotate(self, phase: str) -> None:
        """The keys go round, or back, as the runtime's `ForwardRotation` and `BackwardRotation` let them."""
        forward = phase == "forward"
        if not forward and not self._schedule.keeps:
            self._agree(phase, self._tell(phase))
            away = [self._leg(self._schedule.move(-1, phase), self._works[phase].keys_bytes)]
            self._keys = self._message(f"{phase}, message to the last", away, self._kernels)
        told = self._tell(phase) if forward else []
        for hop in range(self._schedule.world_size + 1):
            before, works = [list(tasks) for tasks in self._kernels], hop < self._schedule.world_size
            if works and forward:
                self._first(phase, hop)
            elif works and not hop:
                self._work(phase, hop)
            if not hop and (forward or self._schedule.keeps):
                self._agree(phase, told or self._tell(phase))  # backward tells behind the first work
            self._post(phase, hop, before)
            if works and forward:
                self._rest(phase, hop)
            elif works and hop:
                self._work(phase, hop)

    def _gather(self, phase: str) -> None:
        """Everybody sends to everybody, as the runtime's `ForwardGather` and `BackwardGather` let them."""
        work, last = self._works[phase], self._schedule.world_size - 1
        if phase == "forward":
            told = self._tell(phase)
            before = [list(tasks) for tasks in self._kernels]
            self._first(phase, 0)
            self._agree(phase, told)
            keys = self._message(f"{phase}, keys", self._to_all(work.keys_bytes), before)
            self._rest(phase, 0)
            self._keys = keys
            for hop in range(1, last + 1):
                self._work(phase, hop)
            if work.sums_bytes:  # those for all keys
                to_all = self._to_all((last + 1) * work.sums_bytes)
                done = self._message(f"{phase}, sums", to_all, self._kernels)
                self._kernels = [[*self._kernels[rank], *done[rank]] for rank in self._ranks]
        else:
            self._work(phase, 0)
            told = self._tell(phase)
            for hop in range(1, last):
                self._work(phase, hop)
            self._agree(phase, told)
            home = self._message(f"{phase}, sums", self._to_all(work.sums_bytes), self._kernels)
            self._work(phase, last)
            self._sums = home

    def _work(self, phase: str, hop: int) -> None:
        """A hop's kernels."""
        self._first(phase, hop)
        self._rest(phase, hop)

    def _first(self, phase: str, hop: int) -> None:
        """Those that add to nothing that travels."""
        work, name = self._works[phase], f"{phase}, hop {hop}"
        for rank in self._ranks:
            waits = self._host[rank] + self._keys[rank]
            self._enqueue(self._host, rank, "host", name, self._launch_s * work.launches * FIRST_LAUNCHES)
            self._enqueue(self._kernels, rank, "compute", name, work.first_s, waits)

    def _rest(self, phase: str, hop: int) -> None:
        """The others, which wait for the sums that travel."""
        work, name = self._works[phase], f"{phase}, hop {hop}"
        seconds = self._launch_s * work.launches * (1 - FIRST_LAUNCHES)
        for rank in self._ranks:
            waits = self._host[rank] + self._sums[rank]
            launched = self._enqueue(self._host, rank, "host", name, seconds)
            self._enqueue(self._kernels, rank, "compute", name, work.rest_s, waits)
            self._kernels[rank].append(launched)  # the last kernel is not over before its launch

    def _tell(self, phase: str) -> list[Task]:
        """The control exchange: every rank's host tells all others; when each is heard."""
        seconds = TELL_PEER_S * (self._schedule.world_size - 1) * self._communicate
        told = [self._enqueue(self._host, rank, "host", f"{phase}, tell", seconds) for rank in self._ranks]
        heard_s = HEARD_S * (seconds > 0)
        return [
            self._events.task(task.rank, "heard", "host", f"{phase}, tell", heard_s, [task]) for task in told
        ]

    def _agree(self, phase: str, told: list[Task]) -> None:
        """Every rank's host reads what each has said."""
        if self._communicate:
            seconds = READ_PEER_S * (self._schedule.world_size - 1)
            for rank in self._ranks:
                self._enqueue(self._host, rank, "host", f"{phase}, agree", seconds, told)

    def _post(self, phase: str, hop: int, kernels: list[list[Task]]) -> None:
        """What leaves at the start of a ring's hop, when `kernels` are done: keys for the next, sums of the last."""
        work, schedule, name = self._works[phase], self._schedule, f"{phase}, message {hop}"
        payload, hops = schedule.payload(phase), schedule.world_size
        keys = hop < hops and set(payload.parcels) <= set(schedule.carries(phase, hop))
        sums = hop > 0 and work.sums_bytes and set(payload.sums) <= set(schedule.carries(phase, hop - 1))
        ahead = {hop: work.keys_bytes} if keys else {}
        behind = {hop - 1: work.sums_bytes} if sums else {}
        together = work.keys_bytes <= cost.TOGETHER_BYTES
        for batch in [behind | ahead] if together else [behind, ahead]:
            if batch:
                done = self._message(name, self._moved(phase, batch), kernels)
                for rank in self._ranks:
                    self._sums[rank] = done[rank] if hop - 1 in batch else self._sums[rank]
                    self._keys[rank] = done[rank] if hop in batch else self._keys[rank]

    def _moved(self, phase: str, parts: dict[int, int]) -> list[_Leg]:
        """Bytes by the hop whose move they make: one transfer to each neighbour."""
        key = tuple((self._schedule.move(hop, phase), size) for hop, size in parts.items())
        if key not in self._legs:  # the same for each cycle
            legs: dict[Move, _Leg] = {}
            for move, size in key:
                size += legs[move].size if move in legs else 0
                legs[move] = self._leg(move, size)
            self._legs[key] = list(legs.values())
        return self._legs[key]

    def _leg(self, move: Move, size: int) -> _Leg:
        return _Leg(size, self._schedule.level(move), functools.partial(self._next, move), 1)

    def _next(self, move: Move, rank: int) -> tuple[int, ...]:
        return (self._schedule.moved(rank, move),)

    def _to_all(self, size: int) -> list[_Leg]:
        """As many bytes to every other rank of a node."""
        return [_Leg(size, "device", self._others, self._schedule.world_size - 1)]

    def _others(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in range(self._schedule.world_size) if other != rank)

    def _message(self, name: str, legs: list[_Leg], kernels: list[list[Task]]) -> list[list[Task]]:
        """One batch of transfers on every rank, when `kernels` are done; what tells that it is there."""
        if not self._communicate:
            seconds = self._copy * sum(leg.size * leg.receiver_count for leg in legs)
            for rank in self._ranks:
                self._enqueue(self._kernels, rank, "compute", name, seconds, self._host[rank])
            return [[] for _ in self._ranks]
        start_s = cost.BATCH_S + max(self._latency[leg.level] for leg in legs)
        resource = LEVELS["node" if any(leg.level == "node" for leg in legs) else "device"]
        host_s = HOST_MESSAGE_S + HOST_PEER_S * (sum(leg.receiver_count for leg in legs) - 1)
        begins = []
        for rank in self._ranks:
            waits = [self._enqueue(self._host, rank, "host", name, host_s), *kernels[rank]]
            begins.append(self._enqueue(self._messages, rank, "message", name, start_s, waits, resource))
        arriving: list[list[Task]] = [[] for _ in self._ranks]
        for leg in legs:
            for rank in self._ranks:
                # One rank that stands for all sends everything to itself.
                size = leg.size if self._everybody else leg.size * leg.receiver_count
                for other in leg.receivers(rank) if self._everybody else (rank,):
                    both, pipe = [begins[rank], begins[other]], self._pipes[rank][leg.level]
                    flow = self._events.task(
                        rank, "transfer", LEVELS[leg.level], name, float(size), both, pipe
                    )
                    for end in {rank, other}:
                        arriving[end].append(flow)
        found = [
            [self._enqueue(self._messages, rank, "done", name, 0.0, arriving[rank], resource)]
            for rank in self._ranks
        ]
        if not self._overlap:
            for rank in self._ranks:
                self._kernels[rank] = self._kernels[rank] + found[rank]
        return found

    def _enqueue(
        self, stream: list[list[Task]], rank: int, kind: str, name: str, seconds: float, waits: Sequence[Task] = (),
        resource: str | None = None,
    ) -> Task:  # fmt: skip
        """A task behind what a stream of a rank holds."""
        before = [*stream[rank], *waits]
        task = self._events.task(rank, kind, kind if resource is None else resource, name, seconds, before)
        stream[rank] = [task]
        return task

    def _timeline(self, last: Task, forward_s: float) -> Timeline:
        critical = dict.fromkeys(RESOURCES, 0.0)
        task: Task | None = last.cause
        while task is not None and task.end > self._lead_s:
            spent = task.end - max(task.start, self._lead_s)
            slowed = max(0.0, spent - task.work) if task.kind == "compute" and task.slowed_by else 0.0
            critical[task.resource] += spent - slowed
            if slowed:
                critical[task.slowed_by] += slowed
            task = task.cause
        intervals = [
            Interval(
                task.rank,
                task.resource,
                task.name,
                max(0.0, task.start - self._lead_s),
                task.end - self._lead_s,
            )
            for task in self._events.tasks
            if task.kind in ("host", "compute", "transfer") and task.end > max(task.start, self._lead_s)
        ]
        busy = [dict.fromkeys(RESOURCES, 0.0) for _ in self._ranks]
        for interval in intervals:
            busy[interval.rank][interval.resource] += interval.end_s - interval.start_s
        return Timeline(
            step_s=last.end - self._lead_s,
            forward_s=forward_s - self._lead_s,
            alone_s=last.end - self._lead_s,
            busy_s=busy[last.rank],
            critical_s=critical,
            bound=max(RESOURCES, key=lambda name: critical[name]),
            intervals=tuple(intervals),
        )
