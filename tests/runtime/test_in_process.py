"""The runtime over rings of up to 64 ranks: threads of one process, real tensors, drawn shards and orders of events."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from infcl_gen.runtime.group import _HEADER, Layout
from infcl_gen.runtime.mailboxes import Message
from infcl_gen.runtime.table import RECEIVED, Table, Travelling
from infcl_gen.runtime.transport import Tensors, Trip
from tests.planning.tables import gather_table, ring_table
from tests.planning.walk import walk
from tests.tiers import DRAWN_NODES, DRAWN_RANKS, LONG, examples, nightly, some
from tests.verification.dense import dense

from .in_process import Ring, Stopped, TransportError, World, current_rank
from .test_planted_bugs import BUGS, ENGINE, GROUP, TABLE, TRANSPORT, Bug, Planted

Packages = Callable[..., ModuleType]
Results = list[list[Tensor]]  # of one group, by its ranks: loss, dq, dk, dscale, dbias
LOSSES = ("clip", "infonce", "soft")
DRAWN_DIMS = nightly(range(1, 10), (1, 8))  # each is a package
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
    own: bool = False  # labels="own"
    scale: float = 3.0
    bias: float = 0.0
    upstream: float = 1.0
    grad_sync: str = "mean"
    reduction: str = "mean"
    transposed: bool = False
    seed: int = 0
    nodes: int = 1  # 0: a gather
    keeps: bool = True

    def table(self, has_keys: bool, dim: int) -> Table:
        """As planned for as many ranks as there are members."""
        if not self.nodes:
            return gather_table(len(self.members), has_keys, dim)
        return ring_table(self.nodes, len(self.members) // self.nodes, has_keys, self.keeps, dim)

    def tensors(self, dim: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """All queries and keys, and the labels if there are any."""
        generator = torch.Generator().manual_seed(self.seed)
        q, k = (torch.randn(sum(n), dim, generator=generator, dtype=torch.float64) for n in (self.rows, self.keys))
        if self.transposed:
            q, k = q.T.contiguous().T, k.T.contiguous().T
        if self.own:
            starts = [sum(self.keys[:rank]) for rank in range(len(self.keys))]
            own = [torch.arange(at, at + rows) for at, rows in zip(starts, self.rows, strict=True)]
            return q, k, torch.cat(own)
        labels = torch.randint(sum(self.keys), (sum(self.rows),), generator=generator)
        return q, k, labels if self.labelled else None


@st.composite
def batches(draw: st.DrawFn, loss: str, members: Sequence[int], nodes: int, keeps: bool) -> Batch:
    world = len(members)
    rows = draw(st.lists(st.sampled_from(ROWS), min_size=world, max_size=world))
    if not any(rows) or draw(st.integers(0, 15)) == 15:
        rows[draw(st.integers(0, world - 1))] = draw(st.sampled_from((1, MORE_THAN_A_PANEL)))
    labels = draw(st.sampled_from(("none", "own", "given"))) if loss == "infonce" else "none"
    if loss != "infonce" and draw(st.booleans()):
        keys = rows
    elif labels == "own":
        keys = [n + draw(st.integers(0, 3)) for n in rows]
    else:  # sharded in another way than the queries
        total = sum(rows)
        if labels == "given":
            total = draw(st.integers(1, total + 9))
        elif loss == "infonce" and world == 1:
            total += draw(st.integers(0, 9))
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=world - 1, max_size=world - 1)))
        keys = [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]
    return Batch(
        tuple(members),
        tuple(rows),
        tuple(keys),
        labels == "given",
        labels == "own",
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
def runs(draw: st.DrawFn, loss: str, largest: int = DRAWN_RANKS) -> Example:
    large = largest > 8 and draw(st.integers(0, 11)) == 11
    world = draw(st.integers(9, largest)) if large else draw(st.sampled_from(SMALL_WORLDS))
    order = draw(st.permutations(range(world))) if draw(st.booleans()) else list(range(world))
    divided = world > 1 and draw(st.booleans())
    cuts = sorted(draw(st.sets(st.integers(1, world - 1), min_size=1, max_size=2))) if divided else []
    members = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, world], strict=True)]
    # One way for all groups of a size: each kind a third of the time.
    nodes = {n: draw(st.sampled_from((0, 1, draw(st.sampled_from(divisors(n)))))) for n in set(map(len, members))}
    keeps = draw(st.booleans())
    groups = tuple(draw(batches(loss, m, nodes[len(m)], keeps)) for m in members)
    return Example(loss, draw(st.sampled_from(DRAWN_DIMS)), groups, draw(st.integers(0, 2**31)))


# ---------------------------------------------------------------------------------------------- runs and their truth


Visits = dict[tuple[int, str], list[int]]  # (world rank, phase) -> the first key of each block, in order


@contextmanager
def spied(package: ModuleType) -> Iterator[Visits]:
    """Notes the blocks that the device sweep is given."""
    schedule = package.ContrastiveLoss._package.schedule
    visits: Visits = {}

    def noting(phase: str, block: Callable[..., None]) -> Callable[..., None]:
        def noted(*arguments: Any, **options: Any) -> None:
            visits.setdefault((current_rank(), phase), []).append(arguments[0].first_key)
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
    dim = package.SPEC["problem"]["dim"]
    tables = {len(batch.members): batch.table(has_keys, dim) for batch in groups if len(batch.members) > 1}
    world = World(package, size, {str(i): batch.members for i, batch in enumerate(groups)}, turns, tables)
    tensors = [batch.tensors(dim) for batch in groups]
    places = {member: (i, rank) for i, batch in enumerate(groups) for rank, member in enumerate(batch.members)}

    def job(member: int) -> list[Tensor]:
        group, rank = places[member]
        return step(package, groups[group], tensors[group], rank, str(group))

    with spied(package) as visits:
        results = world.run(job)
    return [[results[member] for member in batch.members] for batch in groups], world, visits


def step(
    package: ModuleType, batch: Batch, tensors: tuple[Tensor, Tensor, Tensor | None], rank: int, group_name: str
) -> list[Tensor]:
    """The loss and gradients of one rank."""
    q, k, labels = tensors
    own = slice(sum(batch.rows[:rank]), sum(batch.rows[: rank + 1]))
    visiting = slice(sum(batch.keys[:rank]), sum(batch.keys[: rank + 1]))
    leaves = [q[own].detach().requires_grad_(), k[visiting].detach().requires_grad_()]
    leaves += [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (batch.scale, batch.bias)]
    module = package.ContrastiveLoss(grad_sync=batch.grad_sync)
    module.options = module.options._replace(group_name=group_name, reduction=batch.reduction)
    given = None if labels is None else labels[own]
    loss = module(*leaves, labels="own" if batch.own else given)
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
    weight = float(len(q)) if batch.reduction == "sum" else 1.0
    name = package.ContrastiveLoss._package.loss_name
    truth = dense(name, q, k, batch.scale, batch.bias, labels, factor=weight * batch.upstream)
    truth = truth._replace(loss=weight * truth.loss)
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
    """Blocks are met in the order of the table, which is proven; and its messages are sent, and no others."""
    size, dim = len(batch.members), package.SPEC["problem"]["dim"]
    table = batch.table(package.ContrastiveLoss._package.loss.HAS_KEYS, dim)
    if max(batch.keys) > -(-package.SPEC["problem"]["batch_size"] // size):  # no room for what forward ends with
        table = dataclasses.replace(table, keeps=False)
    walked = walk(table)
    firsts = [sum(batch.keys[:owner]) for owner in range(size)]
    group = next(group for group in world.groups if group.name == str(index))
    for rank, member in enumerate(batch.members):
        for phase in ("forward", "backward"):
            owners = [table.rank(rank, move) for move in walked[phase].owners]
            met = [firsts[owner] for owner in owners if batch.rows[rank] and batch.keys[owner]]
            assert visits.get((member, phase), []) == met, (phase, rank)
        assert group.posted[rank] == expected_messages(table, batch, rank), rank


def expected_messages(table: Table, batch: Batch, rank: int) -> Counter[tuple[int, int, int]]:
    """(to whom, tag, bytes). Of a ring always of the largest shard. Of a gather of as many rows as the owner has keys,
    where one end has keys and the other queries; sums for all keys, to whoever has either."""
    messages: Counter[tuple[int, int, int]] = Counter()
    tags = {item.name: (tag, 8 * item.columns) for tag, item in enumerate(table.travelling)}
    for phase in ("forward", "backward"):
        for sent in (sent for step in table.steps(phase) for sent in step.sends):
            to, (tag, size) = table.rank(rank, sent.to), tags[sent.name]
            if table.transport == "ring":
                count = max(batch.keys)
            elif sent.of is None:
                count = sum(batch.keys) if batch.rows[rank] and (batch.rows[to] or batch.keys[to]) else 0
            else:
                worker = rank if sent.target == RECEIVED else to
                count = batch.keys[table.rank(rank, sent.of)] if batch.rows[worker] else 0
            if count:
                messages[to, tag, size * count] += 1
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


# 3 x 20 + 3 x 5 + 15 = 90 examples in CI; 3 x 3 000 + 3 x 200 + 400 = 10 000 in the nightly tier.


@pytest.mark.parametrize("loss", LOSSES)
@examples(ci=20, long=3000)
@given(data=st.data())
def test_loss_and_gradients_are_those_of_one_process(packages: Packages, loss: str, data: st.DataObject) -> None:
    """Any world, uneven and empty ranks, disjoint sub-groups of permuted ranks: the dense reference, to 1e-12."""
    example = data.draw(runs(loss))
    check(package_of(packages, example), example)


@pytest.mark.parametrize(
    ("loss", "nodes"),
    # Of the ways that drawn rings of 16 ranks take the one in which nodes and devices are many.
    nightly([("clip", 8), ("infonce", 16), ("soft", 1), ("clip", 0)], [("clip", 8)]),
)
def test_many_ranks(packages: Packages, loss: str, nodes: int) -> None:
    world = 64 if LONG else 32  # the work grows with the square
    rows = tuple(rank * rank % 5 for rank in range(world))
    keys = tuple(rank % 3 for rank in range(world)) if loss == "infonce" else rows[::-1]
    members = tuple(rank * 37 % world for rank in range(world))
    example = Example(loss, 4, (Batch(members, rows, keys, labelled=loss == "infonce", nodes=nodes),), turns=1)
    check(package_of(packages, example), example)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(("loss", "nodes"), [("clip", 1), ("clip", 2), ("infonce", 1)])
def test_sums_do_not_wait_for_large_keys(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, loss: str, nodes: int, keeps: bool
) -> None:
    """Keys above the limit travel in a batch of their own, beside one of sums. Planted: the sums are not sent."""
    package = packages(loss, batch_size=1024)
    table = importlib.import_module(f"{package.__name__}._runtime.table")
    assert table.TOGETHER_BYTES > 0
    rows = (5, 0, 9, 1)
    example = Example(loss, 8, (Batch((0, 1, 2, 3), rows, rows, nodes=nodes, keeps=keeps),), turns=1)
    (together,) = check(package, example)
    with monkeypatch.context() as patch:
        patch.setattr(table, "TOGETHER_BYTES", 0)
        (apart,) = check(package, example)
        for one, other in zip(together, apart, strict=True):
            assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("loss", LOSSES)
@examples(ci=5, long=200)
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


@examples(ci=15, long=400)
@given(
    nodes=st.integers(0, DRAWN_NODES),
    devices=st.integers(2, DRAWN_NODES),
    parcels=st.integers(1, 3),
    accumulates=st.booleans(),
    keeps=st.booleans(),
    turns=st.integers(0, 99),
)
def test_parcels_visit_everybody_and_sums_come_home(
    packages: Packages, nodes: int, devices: int, parcels: int, accumulates: bool, keeps: bool, turns: int
) -> None:
    """The trips alone: at each step what the table says, contributions of all ranks; twice, as of a retained graph."""
    names = [f"parcel {part}" for part in range(parcels)]
    world = max(nodes, 1) * devices
    travels = [Travelling(name, 3, "features", "unchanged", "unchanged") for name in names]
    travels += [Travelling("log", world, "statistics", "summed", "summed")] * accumulates
    table = Table("ring" if nodes else "gather", max(nodes, 1), devices, keeps and nodes > 0, tuple(travels))
    walked = walk(table)

    def parcel(owner: int) -> dict[str, Tensor]:
        return {name: torch.full((2, 3), 100.0 * part + owner, dtype=torch.float64) for part, name in enumerate(names)}

    def follow(phase: str, rank: int, tensors: Tensors) -> None:
        trip = Trip(place.ring(rank, ""), table, phase, Layout(rank, (1,) * world, (2,) * world), tensors)
        found = []
        for hop, owner in enumerate(trip):
            assert all(torch.equal(trip[name], part) for name, part in parcel(owner).items())
            if accumulates:
                trip.arrive()
                if trip.fresh:
                    trip["log"].zero_()
                trip["log"][:, rank] += hop
            found.append(owner)
        assert found == [table.rank(rank, move) for move in walked[phase].owners]
        if accumulates:
            hops = {table.rank(rank, move, back=True): hop for hop, move in enumerate(walked[phase].owners)}
            assert trip.home("log").tolist() == [[hops[guest] for guest in range(world)]] * 2

    def job(rank: int) -> None:
        kept = {name: torch.full((2 if nodes else 2 * world, 3), -1.0, dtype=torch.float64) for name in names}
        dtypes = {"features": torch.float64, "statistics": torch.float64}
        tensors = Tensors(parcel(rank), kept, dtypes)
        follow("forward", rank, tensors)
        for _ in range(2):
            follow("backward", rank, tensors)

    place = World(packages("clip"), world, seed=turns)
    place.run(job)


SHARDS = [((3, 2), (4, 1)), ((25, 0, 20), (1, 3, 0)), ((0, 4, 31, 2), (3, 0, 2, 2))]  # from 17 rows on of two halves


@pytest.mark.parametrize(("rows", "keys"), SHARDS)
@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_a_loss_with_gradients_in_the_forward_sweep_travels(
    packages: Packages, transport: str, rows: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    """Pointwise: the sum of softplus over all pairs. No statistics, one trip, and the sums for dk are home after it."""
    travels = (
        Travelling("keys", 4, "features", forward="unchanged"),
        Travelling("key gradients", 4, "statistics", forward="summed"),
    )
    table = Table(transport, 1, len(rows), transport == "ring", travels)
    assert walk(table)["backward"].owners == () and not table.steps("backward")
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(sum(n), 4, generator=generator, dtype=torch.float64) for n in (rows, keys))

    def job(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        mine, own = q.split(rows)[rank], k.split(keys)[rank]
        loss, dq = mine.new_zeros(()), torch.zeros_like(mine)
        kept = {"keys": k.new_empty(k.shape)} if transport == "gather" else {}
        tensors = Tensors({"keys": own}, kept, {"features": k.dtype, "statistics": k.dtype})
        trip = Trip(place.ring(rank, ""), table, "forward", Layout(rank, rows, keys), tensors)
        for _ in trip:
            visiting, (row, count, *_) = trip["keys"], trip.share
            if not (count and len(visiting)):
                continue
            part = mine[row : row + count]
            z = part @ visiting.T
            loss += torch.nn.functional.softplus(z).sum()
            dq[row : row + count] += z.sigmoid() @ visiting
            trip.arrive()
            if trip.fresh:
                trip["key gradients"].zero_()
            trip["key gradients"].add_(z.sigmoid().T @ part)
        return loss, dq, trip.home("key gradients").clone()

    place = World(packages("clip"), len(rows))
    losses, dq, dk = zip(*place.run(job), strict=True)
    leaves = [q.requires_grad_(), k.requires_grad_()]
    truth = torch.nn.functional.softplus(leaves[0] @ leaves[1].T).sum()
    torch.testing.assert_close(sum(losses), truth.detach(), rtol=1e-12, atol=1e-12)
    for ours, exact in zip((torch.cat(dq), torch.cat(dk)), torch.autograd.grad(truth, leaves), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("rows", "keys"), SHARDS)
@pytest.mark.parametrize(("transport", "keeps"), [("ring", True), ("ring", False), ("gather", False)])
def test_a_loss_with_an_id_of_each_key_travels(
    packages: Packages, transport: str, keeps: bool, rows: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    """The sum over keys of log(1 + sum of exp over queries with another id): int64 ids are read in both sweeps."""
    travels = (
        Travelling("keys", 4, "features", "unchanged", "unchanged"),
        Travelling("ids", 1, "int64", "unchanged", "unchanged"),
        Travelling("sums", 1, "statistics", "summed", "unchanged"),
        Travelling("key gradients", 4, "statistics", backward="summed"),
    )
    table, largest = Table(transport, 1, len(rows), keeps, travels), max(keys)
    walk(table)
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(sum(n), 4, generator=generator, dtype=torch.float64) for n in (rows, keys))
    q_ids, k_ids = (torch.randint(3, (len(x), 1), generator=generator) for x in (q, k))

    def job(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        mine, ids = q.split(rows)[rank], q_ids.split(rows)[rank]
        own = {"keys": k.split(keys)[rank], "ids": k_ids.split(keys)[rank]}
        count = len(k) if transport == "gather" else largest
        kept = {"keys": k.new_empty(count, 4), "ids": k_ids.new_empty(count, 1), "sums": k.new_empty(count, 1)}
        layout, dtypes = Layout(rank, rows, keys), {"features": k.dtype, "statistics": k.dtype}
        add_up = lambda parts, total: total.copy_(parts.sum(0))  # noqa: E731
        tensors = Tensors(own, kept if keeps or transport == "gather" else {}, dtypes, add_up)
        trip = Trip(place.ring(rank, ""), table, "forward", layout, tensors)
        for _ in trip:
            if not (len(mine) and len(trip["keys"])):
                continue
            e = (mine @ trip["keys"].T).exp() * (ids != trip["ids"].T)
            trip.arrive()
            if trip.fresh:
                trip["sums"].zero_()
            trip["sums"].add_(e.sum(0)[:, None])
        finished = trip.home("sums").clone()
        dq = torch.zeros_like(mine)
        tensors = tensors._replace(own={**own, "sums": finished})
        trip = Trip(place.ring(rank, ""), table, "backward", layout, tensors)
        for _ in trip:
            visiting = trip["keys"]
            if not (len(mine) and len(visiting)):
                continue
            g = (mine @ visiting.T).exp() * (ids != trip["ids"].T) / (1 + trip["sums"].T)
            dq += g @ visiting
            trip.arrive()
            if trip.fresh:
                trip["key gradients"].zero_()
            trip["key gradients"].add_(g.T @ mine)
        return (1 + finished).log().sum(), dq, trip.home("key gradients").clone()

    place = World(packages("clip"), len(rows))
    losses, dq, dk = zip(*place.run(job), strict=True)
    leaves = [q.requires_grad_(), k.requires_grad_()]
    pairs = (leaves[0] @ leaves[1].T).exp() * (q_ids != k_ids.T)
    truth = (1 + pairs.sum(0)).log().sum()
    torch.testing.assert_close(sum(losses), truth.detach(), rtol=1e-12, atol=1e-12)
    for ours, exact in zip((torch.cat(dq), torch.cat(dk)), torch.autograd.grad(truth, leaves), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("nodes", "keeps"), [(1, True), (1, False), (0, False)])
def test_only_messages_are_started_beside_the_work(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, nodes: int, keeps: bool
) -> None:
    """On a GPU that is a stream of its own, for which the work does not wait: a buffer that is made, copied or zeroed
    there is read too early. Planted: buffers are looked up when messages start."""
    package = packages("clip", batch_size=1024)
    moment = importlib.import_module(f"{package.__name__}._runtime.transport").Moment

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, *_: Any) -> Any:
            raise AssertionError(f"{function} beside the work")

    def enter(self: Any) -> None:
        self.refusing = Nothing()
        self.refusing.__enter__()

    monkeypatch.setattr(moment, "__enter__", enter)
    monkeypatch.setattr(moment, "__exit__", lambda self, *_: self.refusing.__exit__(None, None, None))
    for rows in ((5, 0, 9), (4, 3)):
        batch = Batch(tuple(range(len(rows))), rows, rows, nodes=nodes, keeps=keeps)
        check(package, Example("clip", 8, (batch,), turns=1))


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_backward_again(packages: Packages, world: int, keeps: bool) -> None:
    """Of a retained graph: the same gradients."""
    package = packages("clip", batch_size=1024)
    dim = package.SPEC["problem"]["dim"]

    def job(rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        q, k = (
            torch.randn(3 + rank, dim, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)
        )
        loss = package.contrastive_loss(q, k, 3.0)
        first, second = (torch.autograd.grad(loss, (q, k), retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, first, second))

    World(package, world, tables={world: ring_table(1, world, True, keeps, dim)}).run(job)


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


def post(ring: Any, tag: int = 0, size: int = 4, dtype: torch.dtype = torch.float32, wait: bool = True) -> None:
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


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_only_a_gather_has_messages_before_its_first_batch(packages: Packages, transport: str) -> None:
    """Where they fail, phase, hop and peers are named. Planted: rings have them, too; they are posted without names."""
    word, send = torch.zeros(1), Ring.post

    def first_messages(self: Ring, device: torch.device) -> Any:
        return [Message(word, 1, 7)], [Message(word, 1, 7)]

    def failing(self: Ring, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        if sends[0].tag == 7:
            raise RuntimeError("no route")
        return send(self, sends, receives)

    package, q = packages("clip", devices=2, transport=transport), torch.ones(4, 8, dtype=torch.float64)
    told = r"^forward gather, hop 0 of 2: rank . failed sending to rank 1 or receiving from rank 1: no route$"
    with (
        mock.patch.multiple(Ring, first_messages=first_messages, post=failing),
        pytest.raises(RuntimeError, match=told) if transport == "gather" else nullcontext(),
    ):
        World(package, 2).run(lambda rank: package.loss_and_grads(q, q))


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


APART = (TABLE, "TOGETHER_BYTES = 64 << 20", "TOGETHER_BYTES = 0")
KEYS_ARE_THERE = (TRANSPORT, '            self._wait(step.unchanged_from, "unchanged")\n', "")
HOME = '        self._wait(self._step.sums_from, "summed")\n        return self._rooms.home'
MORE_BUGS = {
    "a shard's keys are numbered from its end": Bug(
        ((GROUP, "self.keys[:owner]", "self.keys[: owner + 1]"),), loss="infonce"
    ),
    "every shard is taken to be as long as the own": Bug(
        ((TRANSPORT, "self._slot(name, place), self._count(name, owner)",
          "self._slot(name, place), self._count(name, self._layout.rank)"),)
    ),
    "an empty rank does not take part in backward": Bug(
        ((ENGINE, "    table = _table(package, layout, weighting.gradients, kept)\n    if",
          "    if not len(call.q):\n        return call.q.clone(), call.k.clone()\n"
          "    table = _table(package, layout, weighting.gradients, kept)\n    if"),)
    ),
    "sums are added to before they have arrived": Bug(
        ((ENGINE, "fresh_dk=trip.fresh, arrive=trip.arrive", "fresh_dk=trip.fresh, arrive=lambda: None"),)
    ),
    "a buffer is used before its message has arrived": Bug((KEYS_ARE_THERE,), rows=(40, 40)),
    "keys stay on their side when they change the node": Bug(
        ((TABLE, "(after[1] - before[1]) % table.devices_per_node)", "after[1] - before[1] if after[1] else 0)"),),
        rows=(5, 0, 9, 1, 2, 3), nodes=2,
    ),
    "keys are not where backward begins": Bug(
        ((TABLE, "Step(None, sends=away, ", "Step(None, "),), rows=(5, 2, 9), keeps=False
    ),
    "keys go on backwards as they came": Bug(
        ((TABLE, "[_back(move) for move in _moves(table)]", "_moves(table)"),), rows=(5, 2, 9, 1)
    ),
    "the gradient of the keys is taken before it has come home": Bug(
        ((TRANSPORT, "                self.arrive()  # where there was no work\n", ""),)
    ),
    "sums are not sent beside large keys": Bug((APART, (TABLE, "return [sums, rest]", "return [rest]"))),
    "large keys are not sent beside sums": Bug(
        (APART, (TABLE, "return [sums, rest]", "return [sums]")), rows=(5, 2, 9, 1)
    ),
    "large keys are not waited for": Bug((APART, KEYS_ARE_THERE), rows=(5, 2, 9, 1)),
    "a rank with nothing to send stays out of a gather's first batch": Bug(
        ((TRANSPORT, 'if self._table.transport == "gather":  # in',
          'if self._table.transport == "gather" and self._layout.rows[self._layout.rank]:  # in'),),
        rows=(5, 0, 9), nodes=0,
    ),
    "there are no messages before a gather": Bug(
        ((TRANSPORT, "*self._group.first_messages(self._device)", "[], []"),), rows=(5, 0, 9), nodes=0
    ),
    "sums of statistics are added to what memory held": Bug(
        ((ENGINE, "fresh_keys = fresh if block.own else trip.fresh", "fresh_keys = False"),), nodes=0
    ),
    "sums of statistics are replaced at each hop": Bug(
        ((ENGINE, "fresh_keys = fresh if block.own else trip.fresh", "fresh_keys = True"),)
    ),
    "what comes home is added twice": Bug(
        ((TRANSPORT, "            own.add_(part)\n", "            own.add_(part).add_(part)\n"),), nodes=0
    ),
    "sums for one owner are sent to all": Bug(
        ((TRANSPORT, "return self._own_sums(name)[owner]",
          "return self._own_sums(name)[(sender + 1) % len(self._layout.keys)]"),),
        rows=(5, 2, 9), nodes=0,
    ),
    "one rank's sums of statistics are left out": Bug(
        ((TRANSPORT, "add_up(received, ", "add_up(received[1:], "),), rows=(5, 2, 9), nodes=0
    ),
    "a rank with keys and no queries does not get its sums": Bug(
        ((TRANSPORT, "bool(self._layout.rows[rank] or self._layout.keys[rank])", "bool(self._layout.rows[rank])"),),
        rows=(5, 0, 9), keys=(5, 5, 4), nodes=0,
    ),
    "sums of statistics are added before they have come": Bug(
        ((TRANSPORT, HOME, f'        if self._phase == "backward":\n    {HOME}'),), nodes=0
    ),
    "keys are worked on before they have come": Bug((KEYS_ARE_THERE,), nodes=0),
    "a rank without queries keeps what its memory held": Bug(
        ((TRANSPORT, "own = self._new(name, count, zero=not layout.rows[here])", "own = self._new(name, count)"),),
        rows=(5, 0, 9), keys=(5, 5, 4), nodes=0,
    ),
    "a rank of a ring without queries passes on what its memory held": Bug(
        ((TRANSPORT, ", zero=not self._layout.rows[self._layout.rank]", ""),), rows=(5, 0, 9), keys=(5, 5, 4)
    ),
    "sums are added before they have come home": Bug(
        ((TRANSPORT, HOME, f'        if self._phase == "forward":\n    {HOME}'),), nodes=0
    ),
    "what forward ends with is kept before the last work": Bug(
        ((TABLE, "Copy(name, last % 2, KEPT)", "Copy(name, (last + 1) % 2, KEPT)"),), rows=(5, 2, 9)
    ),
}  # fmt: skip
NOT_THIS_TRANSPORT = {"the group is hard-wired"}  # an edit of what it stands in for
PLANTED = {name: bug for name, bug in (BUGS | MORE_BUGS).items() if name not in NOT_THIS_TRANSPORT}


sound = functools.cache(check)


@pytest.mark.parametrize("name", some(PLANTED, 9))
def test_planted_bugs_are_noticed(packages: Packages, planted: Planted, name: str) -> None:
    bug = PLANTED[name]
    keys = tuple(n + 3 for n in reversed(bug.rows)) if bug.loss == "infonce" else bug.keys or bug.rows
    ranks = tuple(range(len(bug.rows)))
    batch = Batch(ranks, bug.rows, keys, labelled=bug.loss == "infonce", nodes=bug.nodes, keeps=bug.keeps)
    example = Example(bug.loss, 8, (batch,), turns=1)
    sound(packages(bug.loss), example)
    with pytest.raises((AssertionError, KeyError, RuntimeError)):
        check(importlib.import_module(planted(name, bug.loss, bug.edits)), example)
