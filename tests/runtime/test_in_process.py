"""The runtime over rings of up to 64 ranks: threads of one process, real tensors, drawn shards and orders of events."""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infcl_gen.planning.schedule import Schedule, gather_schedule, ring_schedule, walk_schedule
from infcl_gen.runtime.ring import _HEADER, BackwardRotation, ForwardRotation, Message, Rotation
from infcl_gen.runtime.route import planned_route
from tests.kernels.tiers import examples

from .in_process import Stopped, TransportError, World, current_rank
from .test_planted_bugs import BUGS, ENGINE, GATHER, RING, ROUTE, Bug, Planted

Packages = Callable[..., ModuleType]
Results = list[list[Tensor]]  # of one group, by its ranks: loss, dq, dk, dscale, dbias
LOSSES = ("clip", "infonce", "soft")
# Most rings are small: that is where ranks are each other's only neighbour, or both neighbours are the same rank.
SMALL_WORLDS = (1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8, 8)
ROWS = (0, 0, 1, 1, 2, 3, 5)
MORE_THAN_A_PANEL = 66
TOLERANCE = 1e-12


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one group computes; the ranks' shards are consecutive rows of random features."""

    members: tuple[int, ...]  # world ranks, in group-rank order
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    labelled: bool = False
    scale: float = 3.0
    bias: float = 0.0
    upstream: float = 1.0
    grad_sync: str = "mean"
    reduction: str = "mean"
    transposed: bool = False
    seed: int = 0
    nodes: int = 1  # 0: a gather
    keeps: bool = True

    def schedule(self, has_keys: bool) -> Schedule:
        """As planned for as many ranks as there are members."""
        if not self.nodes:
            return gather_schedule(len(self.members), has_keys)
        return ring_schedule(self.nodes, len(self.members) // self.nodes, has_keys, self.keeps)

    def tensors(self, dim: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """All queries and keys, and the labels if there are any."""
        generator = torch.Generator().manual_seed(self.seed)
        q, k = (
            torch.randn(sum(n), dim, generator=generator, dtype=torch.float64) for n in (self.rows, self.keys)
        )
        if self.transposed:
            q, k = q.T.contiguous().T, k.T.contiguous().T
        labels = torch.randint(sum(self.keys), (sum(self.rows),), generator=generator)
        return q, k, labels if self.labelled else None


@st.composite
def batches(draw: st.DrawFn, loss: str, members: Sequence[int], nodes: int, keeps: bool) -> Batch:
    world = len(members)
    rows = draw(st.lists(st.sampled_from(ROWS), min_size=world, max_size=world))
    if not any(rows) or draw(st.integers(0, 15)) == 15:
        rows[draw(st.integers(0, world - 1))] = draw(st.sampled_from((1, MORE_THAN_A_PANEL)))
    labelled = loss == "infonce" and draw(st.booleans())
    if loss != "infonce" and draw(st.booleans()):
        keys = rows
    else:  # sharded in another way than the queries
        total = sum(rows)
        if labelled:
            total = draw(st.integers(1, total + 9))
        elif loss == "infonce":
            total += draw(st.integers(0, 9))
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=world - 1, max_size=world - 1)))
        keys = [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]
    return Batch(
        tuple(members),
        tuple(rows),
        tuple(keys),
        labelled,
        scale=draw(st.sampled_from((1.0, 0.07, 4.0, 14.3, -2.0, 0.0))),
        bias=draw(st.sampled_from((0.0, -10.0))),
        upstream=draw(st.sampled_from((1.0, -0.375))),
        grad_sync=draw(st.sampled_from(("mean", "sum"))),
        reduction=draw(st.sampled_from(("mean", "sum"))),
        transposed=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
        nodes=nodes,
        keeps=keeps,
    )


@dataclasses.dataclass(frozen=True)
class Example:
    """Disjoint groups of the world's ranks, in any order, each with a batch of its own, at the same time."""

    loss: str
    dim: int
    groups: tuple[Batch, ...]
    turns: int  # the seed of the order of events


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def runs(draw: st.DrawFn, loss: str, largest: int = 64) -> Example:
    large = largest > 8 and draw(st.integers(0, 11)) == 11
    world = draw(st.integers(9, largest)) if large else draw(st.sampled_from(SMALL_WORLDS))
    order = draw(st.permutations(range(world))) if draw(st.booleans()) else list(range(world))
    divided = world > 1 and draw(st.booleans())
    cuts = sorted(draw(st.sets(st.integers(1, world - 1), min_size=1, max_size=2))) if divided else []
    members = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, world], strict=True)]
    # One way for all groups of a size: each kind a third of the time.
    nodes = {
        n: draw(st.sampled_from((0, 1, draw(st.sampled_from(divisors(n)))))) for n in set(map(len, members))
    }
    keeps = draw(st.booleans())
    groups = tuple(draw(batches(loss, m, nodes[len(m)], keeps)) for m in members)
    return Example(loss, draw(st.integers(1, 9)), groups, draw(st.integers(0, 2**31)))


# ---------------------------------------------------------------------------------------------- runs and their truth


Visits = dict[tuple[int, str], list[int]]  # (world rank, phase) -> the first key of each block, in order


@contextmanager
def spied(package: ModuleType) -> Iterator[Visits]:
    """Notes the blocks that the device sweep is given."""
    schedule = package.ContrastiveLoss._package.schedule
    visits: Visits = {}

    def noting(phase: str, block: Callable[..., None]) -> Callable[..., None]:
        def noted(*arguments: Any, **options: Any) -> None:
            visits.setdefault((current_rank(), phase), []).append(arguments[5])
            block(*arguments, **options)

        return noted

    with (
        mock.patch.object(schedule, "forward_block", noting("forward", schedule.forward_block)),
        mock.patch.object(schedule, "backward_block", noting("backward", schedule.backward_block)),
    ):
        yield visits


def run(package: ModuleType, groups: Sequence[Batch], turns: int = 0) -> tuple[list[Results], World, Visits]:
    """The results of each group's ranks, in group-rank order."""
    size = sum(len(batch.members) for batch in groups)
    has_keys = package.ContrastiveLoss._package.loss.HAS_KEYS
    schedules = {len(batch.members): batch.schedule(has_keys) for batch in groups if len(batch.members) > 1}
    world = World(package, size, {str(i): batch.members for i, batch in enumerate(groups)}, turns, schedules)
    dim = package.SPEC["problem"]["dim"]
    tensors = [batch.tensors(dim) for batch in groups]
    places = {
        member: (i, rank) for i, batch in enumerate(groups) for rank, member in enumerate(batch.members)
    }

    def job(member: int) -> list[Tensor]:
        group, rank = places[member]
        return step(package, groups[group], tensors[group], rank, str(group))

    with spied(package) as visits:
        results = world.run(job)
    return [[results[member] for member in batch.members] for batch in groups], world, visits


def step(
    package: ModuleType,
    batch: Batch,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    rank: int,
    group_name: str,
) -> list[Tensor]:
    """The loss and gradients of one rank."""
    q, k, labels = tensors
    own = slice(sum(batch.rows[:rank]), sum(batch.rows[: rank + 1]))
    visiting = slice(sum(batch.keys[:rank]), sum(batch.keys[: rank + 1]))
    leaves = [q[own].detach().requires_grad_(), k[visiting].detach().requires_grad_()]
    leaves += [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (batch.scale, batch.bias)]
    module = package.ContrastiveLoss(grad_sync=batch.grad_sync)
    module.options = module.options._replace(group_name=group_name, reduction=batch.reduction)
    loss = module(*leaves, labels=None if labels is None else labels[own])
    (loss * batch.upstream).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def joined(batch: Batch, results: Results) -> list[Tensor]:
    """What the parameters of a model would get: averaged over the ranks, or summed."""
    share = 1.0 / len(batch.members) if batch.grad_sync == "mean" else 1.0
    loss, dq, dk, dscale, dbias = zip(*results, strict=True)
    return [
        sum(loss) * share, torch.cat(dq) * share, torch.cat(dk) * share, sum(dscale) * share, sum(dbias) * share,
    ]  # fmt: skip


def check_against_reference(package: ModuleType, batch: Batch, results: Results) -> None:
    """Loss and gradients to 1e-12 of their size, or of that of the terms that cancel in them."""
    q, k, labels = batch.tensors(package.SPEC["problem"]["dim"])
    z = float((q @ k.T).abs().max())
    leaves = [q.requires_grad_(), k.requires_grad_()]
    leaves += [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (batch.scale, batch.bias)]
    arguments = {} if labels is None else {"labels": labels}
    weight = float(len(q)) if batch.reduction == "sum" else 1.0
    loss = package.reference(*leaves, **arguments) * weight
    truth = [
        loss.detach(), *torch.autograd.grad(loss * batch.upstream, leaves, materialize_grads=True)
    ]  # fmt: skip
    unit = weight * abs(batch.upstream)
    slope = abs(batch.scale) * unit / len(q)
    terms = [
        weight * (1.0 + abs(batch.scale) * z + abs(batch.bias)),
        slope * float(k.detach().abs().max()),
        slope * float(q.detach().abs().max()),
        unit * z,
        unit,
    ]
    for name, ours, exact, size in zip(
        ("loss", "dq", "dk", "dscale", "dbias"), joined(batch, results), truth, terms, strict=True
    ):
        error = float((ours - exact).abs().max())
        allowed = TOLERANCE * max(size, float(exact.abs().max()))
        assert error <= allowed, f"{name} is off by {error:.3g}, allowed {allowed:.3g}"


def check_schedule(package: ModuleType, batch: Batch, index: int, world: World, visits: Visits) -> None:
    """Blocks are met in the order, and messages sent in the numbers, of the simulated schedule."""
    size, dim = len(batch.members), package.SPEC["problem"]["dim"]
    has_keys = package.ContrastiveLoss._package.loss.HAS_KEYS
    schedule = batch.schedule(has_keys)
    simulated = walk_schedule(schedule, list(zip(batch.rows, batch.keys, strict=True)), has_keys)
    firsts = [sum(batch.keys[:owner]) for owner in range(size)]
    for phase in ("forward", "backward"):
        expected: dict[int, list[int]] = {rank: [] for rank in range(size)}
        for rank, owner in simulated[phase].visits:
            if batch.rows[rank] and batch.keys[owner]:
                expected[rank].append(firsts[owner])
        for rank, member in enumerate(batch.members):
            assert visits.get((member, phase), []) == expected[rank], (phase, rank)
    group = next(group for group in world.groups if group.name == str(index))
    for rank in range(size):
        if schedule.transport == "gather":
            expected_messages = gathered_messages(schedule, batch, rank, dim)
        else:
            kept = schedule.keeps and max(batch.keys) <= -(-package.SPEC["problem"]["batch_size"] // size)
            expected_messages = rotated_messages(schedule, batch, rank, dim, kept)
        assert group.posted[rank] == expected_messages, rank


Messages = Counter[tuple[int, int, int]]  # (to whom, tag, bytes)


def rotated_messages(schedule: Schedule, batch: Batch, rank: int, dim: int, kept: bool) -> Messages:
    """Always of the largest shard. What forward has ended with, if it was not `kept`, goes there again."""
    largest = max(batch.keys)
    sizes = {"keys": 8 * largest * dim, "key statistics": 16 * largest, "key gradients": 8 * largest * dim}
    messages: Messages = Counter()
    for phase in ("forward", "backward"):
        payload = schedule.payload(phase)
        tags = payload.parcels + payload.sums
        for hop in range(schedule.world_size):
            peer = schedule.send_to(rank, hop, phase)
            messages.update((peer, tags.index(part), sizes[part]) for part in schedule.carries(phase, hop))
    if not kept:
        last = next(
            other for other in range(schedule.world_size) if schedule.owner(other, 0, "backward") == rank
        )
        messages.update((last, tag, sizes[part]) for tag, part in enumerate(schedule.backward.parcels))
    return messages


def gathered_messages(schedule: Schedule, batch: Batch, rank: int, dim: int) -> Messages:
    """Of as many rows as the owner has keys, where one end has keys and the other queries; sums for all keys."""
    messages: Messages = Counter()
    forward, backward = schedule.forward, schedule.backward
    for other in set(range(schedule.world_size)) - {rank}:
        own, theirs = batch.keys[rank], batch.keys[other]
        if own and batch.rows[other]:
            messages.update((other, 0, 8 * own * dim) for _ in forward.parcels)
        if theirs and batch.rows[rank]:
            messages.update((other, 2, 8 * theirs * dim) for _ in backward.sums)
        if batch.rows[rank] and (batch.rows[other] or theirs):
            messages.update((other, 1, 16 * sum(batch.keys)) for _ in forward.shared)
    return messages


def check(package: ModuleType, example: Example) -> list[Results]:
    results, world, visits = run(package, example.groups, example.turns)
    for index, (batch, of_group) in enumerate(zip(example.groups, results, strict=True)):
        check_against_reference(package, batch, of_group)
        if len(batch.members) > 1:
            check_schedule(package, batch, index, world, visits)
    return results


def package_of(packages: Packages, example: Example) -> ModuleType:
    return packages(example.loss, dim=example.dim, batch_size=1024)


# ---------------------------------------------------------------------------------------------- properties


# 3 x 300 + 3 x 20 + 40 = 1 000 examples in the normal tier, in 55 s of one core; 10 000 in the long one.


@pytest.mark.parametrize("loss", LOSSES)
@examples(ci=300, long=3000)
@given(data=st.data())
def test_loss_and_gradients_are_those_of_one_process(
    packages: Packages, loss: str, data: st.DataObject
) -> None:
    """Any world, uneven and empty ranks, disjoint sub-groups of permuted ranks: the dense reference, to 1e-12."""
    example = data.draw(runs(loss))
    check(package_of(packages, example), example)


@pytest.mark.parametrize(("loss", "nodes"), [("clip", 8), ("infonce", 16), ("soft", 1), ("clip", 0)])
def test_64_ranks(packages: Packages, loss: str, nodes: int) -> None:
    rows = tuple(rank * rank % 5 for rank in range(64))
    keys = tuple(rank % 3 for rank in range(64)) if loss == "infonce" else rows[::-1]
    members = tuple(rank * 37 % 64 for rank in range(64))
    example = Example(
        loss, 4, (Batch(members, rows, keys, labelled=loss == "infonce", nodes=nodes),), turns=1
    )
    check(package_of(packages, example), example)


@pytest.mark.parametrize("loss", LOSSES)
@examples(ci=20, long=200)
@given(data=st.data(), turns=st.integers(0, 2**31))
def test_results_do_not_depend_on_the_order_of_events(
    packages: Packages, loss: str, data: st.DataObject, turns: int
) -> None:
    """Bitwise."""
    example = data.draw(runs(loss, largest=16))
    package = package_of(packages, example)
    first = check(package, example)
    again = run(package, example.groups, turns)[0]
    for batch, one, other in zip(example.groups, first, again, strict=True):
        for rank in range(len(batch.members)):
            assert all(torch.equal(a, b) for a, b in zip(one[rank], other[rank], strict=True)), rank


@examples(ci=40, long=400)
@given(
    nodes=st.integers(1, 8),
    devices=st.integers(2, 8),
    parcels=st.integers(1, 3),
    accumulates=st.booleans(),
    turns=st.integers(0, 99),
)
def test_parcels_visit_everybody_and_accumulators_come_home(
    packages: Packages, nodes: int, devices: int, parcels: int, accumulates: bool, turns: int
) -> None:
    """The rotations alone: at each hop what the schedule says, contributions added in the order of the hops."""
    schedule, world = ring_schedule(nodes, devices, has_keys=True), nodes * devices
    route = planned_route(dataclasses.asdict(schedule))
    package = packages("clip")

    def parcel(owner: int) -> list[Tensor]:
        return [torch.full((2, 3), 100.0 * part + owner) for part in range(parcels)]

    def follow(rotation: Rotation, rank: int) -> None:
        # hosts[hop][owner]: whom the keys of the owner visit
        hops = range(world)
        hosts = [{schedule.owner(r, hop, rotation.phase): r for r in range(world)} for hop in hops]
        found = []
        for hop, owner in enumerate(rotation):
            assert all(map(torch.equal, rotation.parcels, parcel(owner)))
            if rotation.accumulator is not None:
                rotation.arrive()
                rotation.accumulator[hop] = rank
            found.append(owner)
        rotation.arrive()
        assert found == [schedule.owner(rank, hop, rotation.phase) for hop in hops]
        if rotation.accumulator is not None:
            assert rotation.accumulator.tolist() == [host[rank] for host in hosts]

    def job(rank: int) -> None:
        ring = place.ring(rank, "")
        own, last = parcel(rank), [torch.empty(2, 3) for _ in range(parcels)]
        log, seen = (
            torch.full((world,), -1.0) if accumulates else None for _ in range(2)
        )  # who was here, in order
        follow(ForwardRotation(ring, route, own, 2, last, log, seen), rank)
        assert all(map(torch.equal, last, parcel(schedule.owner(rank, world - 1))))
        if seen is not None:
            assert sorted(seen.tolist()) == list(range(world)) and seen[-1] == rank
        for kept in (last, None, last):  # twice: what was kept is there again
            log = torch.full((world,), -1.0) if accumulates else None
            away = parcel(rank) if kept is None else ()
            follow(BackwardRotation(ring, route, own, kept, away, log), rank)

    place = World(package, world, seed=turns)
    place.run(job)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_backward_again(packages: Packages, world: int, keeps: bool) -> None:
    """Of a retained graph: the same gradients."""
    package = packages("clip", batch_size=1024)
    dim = package.SPEC["problem"]["dim"]

    def job(rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        q, k = (
            torch.randn(3 + rank, dim, generator=generator, dtype=torch.float64, requires_grad=True)
            for _ in range(2)
        )
        loss = package.contrastive_loss(q, k, 3.0)
        first, second = (torch.autograd.grad(loss, (q, k), retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, first, second))

    World(package, world, schedules={world: ring_schedule(1, world, True, keeps)}).run(job)


@pytest.mark.parametrize("nodes", [1, 2, 0])
def test_nan_in_nan_out(packages: Packages, nodes: int) -> None:
    """One NaN in one rank's queries is in the gradients of all keys; in its keys, in those of all queries."""
    for which in (0, 1):
        batch = Batch((0, 1, 2, 3), (2, 3, 0, 1), (2, 3, 0, 1), nodes=nodes)
        tensors = list(batch.tensors(8))
        tensors[which][3, 5] = float("nan")
        with mock.patch.object(Batch, "tensors", lambda self, dim, tensors=tensors: tuple(tensors)):
            of_group = run(packages("clip", batch_size=1024), [batch])[0][0]
        loss, *gradients = joined(batch, of_group)
        assert loss.isnan() and gradients[2].isnan()
        assert gradients[1 - which].isnan().all() and gradients[which][3].isnan().all()


# ---------------------------------------------------------------------------------------------- what must be noticed


def to_the_next(ring: Any, send: Tensor, receive: Tensor, tag: int = 0) -> list[Any]:
    after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    works: list[Any] = ring.post([Message(send, after, tag)], [Message(receive, before, tag)])
    return works


def test_messages_arrive_at_the_wait(packages: Packages) -> None:
    def job(rank: int) -> list[float]:
        receive = torch.zeros(1)
        works = to_the_next(world.ring(rank, ""), torch.full((1,), float(rank)), receive)
        early = receive.item()
        for _ in range(2):  # as with torch's own works, waiting again does nothing
            for work in works:
                work.wait()
        return [early, receive.item()]

    world = World(packages("clip"), 3)
    assert repr(world.run(job)) == "[[nan, 2.0], [nan, 0.0], [nan, 1.0]]"


def write(ring: Any, to_send: bool) -> None:
    buffers = torch.zeros(2, 4)
    works = to_the_next(ring, buffers[0], buffers[1])
    buffers[0 if to_send else 1, 3] = 1.0
    for work in works:
        work.wait()


def post(
    ring: Any, tag: int = 0, size: int = 4, dtype: torch.dtype = torch.float32, wait: bool = True
) -> None:
    works = to_the_next(ring, torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype), tag)
    for work in works if wait else ():
        work.wait()


def stay_out_of_exchange(ring: Any) -> None:
    if ring.rank:
        ring.exchange({field: kind() for field, kind in _HEADER.items()})


MISUSES: dict[str, tuple[Callable[[Any], None], str]] = {
    "writes to what is being sent": (lambda ring: write(ring, True), "sending 4 x float32 .* written to before"),
    "writes to what is being received": (lambda ring: write(ring, False), "receiving .* written to before"),
    "disagrees on the tag": (lambda ring: post(ring, tag=ring.rank // 2), "with tag 1 meets .* with tag 0"),
    "disagrees on the size": (lambda ring: post(ring, size=4 + ring.rank // 2), "5 x float32 .* meets .* 4 x float32"),
    "disagrees on the dtype": (
        lambda ring: post(ring, dtype=(torch.float32, torch.int32)[ring.rank // 2]), "int32 .* meets .* float32"
    ),
    "never waits": (lambda ring: post(ring, wait=False), "left at the end.*nobody has waited for it"),
    "leaves a message": (
        lambda ring: post(ring, wait=False) if ring.rank else None, "left at the end: .*it has no other end"
    ),
    "waits for ever": (
        lambda ring: post(ring) if ring.rank else None, "nobody can go on: rank 1 waits for the other end of"
    ),
    "stays out of the exchange": (
        stay_out_of_exchange, "nobody can go on: rank 1 waits for the headers of all ranks"
    ),
}  # fmt: skip


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_of_the_transport_is_noticed(packages: Packages, misuse: str, turns: int) -> None:
    job, message = MISUSES[misuse]
    world = World(packages("clip"), 3, seed=turns)
    with pytest.raises(TransportError, match=message):
        world.run(lambda rank: job(world.ring(rank, "")))


@pytest.mark.parametrize("turns", range(5))
def test_an_exception_ends_all_ranks(packages: Packages, turns: int) -> None:
    ends: list[type] = []

    def job(rank: int) -> None:
        if rank == 3:
            raise KeyError("rank 3")
        try:
            while True:
                post(world.ring(rank, ""))
        except Exception as error:
            ends.append(type(error))
            raise

    world = World(packages("clip"), 5, seed=turns)
    threads = threading.active_count()
    with pytest.raises(KeyError, match="rank 3"):
        world.run(job)
    assert set(ends) <= {Stopped} and threading.active_count() == threads


@pytest.mark.parametrize("turns", range(3))
def test_ranks_that_disagree_all_fail(packages: Packages, turns: int) -> None:
    """One rank's wrong sizes, on all ranks, and no message after the exchange."""
    ends: list[str] = []
    q = torch.zeros(2, 8, dtype=torch.float64)

    def job(rank: int) -> None:
        try:
            package.contrastive_loss(q, q[: 1 + (rank != 2)])
        except ValueError as error:
            ends.append(str(error))

    package = packages("clip")
    world = World(package, 4, seed=turns)
    world.run(job)
    assert len(ends) == 4 and all("8 queries and 7 keys" in text for text in ends)
    assert not any(world.groups[0].posted)


MORE_BUGS = {
    "a shard's keys are numbered from its end": Bug(
        ((RING, "self.keys[:owner]", "self.keys[: owner + 1]"),), loss="infonce"
    ),
    "every shard is taken to be as long as the own": Bug(
        ((ENGINE, "valid = layout.keys[owner]", "valid = layout.keys[layout.rank]"),)
    ),
    "an empty rank does not take part in backward": Bug(
        ((ENGINE, "        route = self.package.route.over(ring.size)\n",
          "        if not len(q):\n            return q.clone(), k.clone()\n"
          "        route = self.package.route.over(ring.size)\n"),)
    ),
    "sums are added to before they have arrived": Bug(
        ((ENGINE, '"arrive": trip.arrive', '"arrive": lambda: None'),)
    ),
    "a buffer is used before its message has arrived": Bug(
        ((RING, "                    self._keys.wait()\n", "                    pass\n"),), rows=(40, 40)
    ),
    "keys stay on their side when they change the node": Bug(
        ((ROUTE, "sign * device_step)", "sign * device_step * (not node_step))"),),
        rows=(5, 0, 9, 1, 2, 3),
        nodes=2,
    ),
    "keys are not where backward begins": Bug(
        ((RING, "        self._send((self._away, self.parcels), self._ends(self.ring.size - 1), None)\n"
          "        assert self._keys is not None\n        self._keys.wait()\n", ""),),
        rows=(5, 2, 9), keeps=False
    ),
    "keys go on backwards as they came": Bug(
        ((RING, "return self.route.receive_from(self.ring.rank, hop), self.route.send_to(self.ring.rank, hop)",
          "return self.route.send_to(self.ring.rank, hop), self.route.receive_from(self.ring.rank, hop)"),),
        rows=(5, 2, 9, 1),
    ),
    "the gradient of the keys is taken before it has come home": Bug(
        ((RING, "# where no work has\n            self.arrive()\n", "\n"),)
    ),
    "sums of statistics are added to what memory held": Bug(
        ((ENGINE, '"fresh_keys": trip.fresh', '"fresh_keys": False'),), nodes=0
    ),
    "sums of statistics are replaced at each hop": Bug(
        ((ENGINE, '"fresh_keys": trip.fresh', '"fresh_keys": True'),)
    ),
    "what comes home is added twice": Bug(
        ((GATHER, "            self._own.add_(part)\n", "            self._own.add_(part).add_(part)\n"),), nodes=0
    ),
    "sums for the first owner are sent to all": Bug(
        ((GATHER, "Message(parts[owner], owner, 2)", "Message(self._sums[: len(parts[owner])], owner, 2)"),),
        rows=(5, 2, 9), nodes=0,
    ),
    "one rank's sums of statistics are left out": Bug(
        ((GATHER, "self._add_up(self._sums, view", "self._add_up(self._sums[1:], view"),), rows=(5, 2, 9), nodes=0
    ),
    "a rank with keys and no queries does not get its sums": Bug(
        ((GATHER, "layout.rows[rank] or layout.keys[rank]", "layout.rows[rank]"),),
        rows=(5, 0, 9), keys=(5, 5, 4), nodes=0,
    ),
    "sums of statistics are added before they have come": Bug(
        ((GATHER, 'receives).wait()', 'receives)'),), nodes=0
    ),
    "keys are worked on before they have come": Bug(((GATHER, "self._keys.wait()", "pass"),), nodes=0),
    "a rank without queries keeps what its memory held": Bug(
        ((GATHER, "if layout.rows[ring.rank] else gathered.new_zeros", "if True else gathered.new_zeros"),),
        rows=(5, 0, 9), keys=(5, 5, 4), nodes=0,
    ),
    "sums are added before they have come home": Bug(
        ((GATHER, "            self._home.wait()\n", "            pass\n"),), nodes=0
    ),
}  # fmt: skip
NOT_THIS_TRANSPORT = {"the group is hard-wired"}  # an edit of what it stands in for
PLANTED = {name: bug for name, bug in (BUGS | MORE_BUGS).items() if name not in NOT_THIS_TRANSPORT}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_noticed(packages: Packages, planted: Planted, name: str) -> None:
    bug = PLANTED[name]
    keys = tuple(n + 3 for n in reversed(bug.rows)) if bug.loss == "infonce" else bug.keys or bug.rows
    ranks = tuple(range(len(bug.rows)))
    batch = Batch(ranks, bug.rows, keys, labelled=bug.loss == "infonce", nodes=bug.nodes, keeps=bug.keeps)
    example = Example(bug.loss, 8, (batch,), turns=1)
    check(packages(bug.loss), example)
    with pytest.raises((AssertionError, RuntimeError)):
        check(importlib.import_module(planted(name, bug.loss, bug.edits)), example)
