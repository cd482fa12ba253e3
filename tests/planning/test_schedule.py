"""The ring's schedule: every pair of blocks met once, every accumulator home, and the simulator notices when not."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infcl_gen.errors import VerificationError
from infcl_gen.planning.schedule import Payload, Schedule, gather_schedule, ring_schedule, walk_schedule


@st.composite
def rings(draw: st.DrawFn, largest: int) -> tuple[int, int, list[tuple[int, int]], bool]:
    nodes = draw(st.integers(1, largest))
    devices = draw(st.integers(1, largest // nodes))
    size = st.integers(0, 70)  # uneven, and empty, shards
    shards = draw(st.lists(st.tuples(size, size), min_size=nodes * devices, max_size=nodes * devices))
    return nodes, devices, shards, draw(st.booleans())


def check(nodes: int, devices: int, shards: list[tuple[int, int]], has_keys: bool) -> None:
    world = nodes * devices
    everything = {(rank, owner) for rank in range(world) for owner in range(world)}
    for keeps in (True, False):
        sweeps = walk_schedule(ring_schedule(nodes, devices, has_keys, keeps), shards, has_keys)
        for phase in ("forward", "backward"):
            assert set(sweeps[phase].visits) == everything
            assert len(sweeps[phase].visits) == world * world
            assert sweeps[phase].logits == sum(a for a, _ in shards) * sum(b for _, b in shards)
        # What is not kept is sent once more.
        assert sweeps["backward"].transfers == (world * (world - keeps) if world > 1 else 0)
        assert sweeps["forward"].transfers == (world * (world - 1 + has_keys) if world > 1 else 0)


@given(rings(16))
def test_each_pair_once_and_accumulators_home(ring: tuple[int, int, list[tuple[int, int]], bool]) -> None:
    check(*ring)


@pytest.mark.parametrize(
    ("nodes", "devices"),
    [
        (1, 1),
        (1, 2),
        (1, 3),
        (1, 8),
        (1, 31),
        (1, 64),
        (2, 1),
        (2, 2),
        (3, 2),
        (2, 3),
        (8, 8),
        (7, 9),
        (64, 1),
    ],
)
@pytest.mark.parametrize("has_keys", [True, False])
def test_large_rings(nodes: int, devices: int, has_keys: bool) -> None:
    check(nodes, devices, [(rank % 5, (3 * rank) % 7) for rank in range(nodes * devices)], has_keys)


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(rings(64))
def test_each_pair_once_and_accumulators_home_long(
    ring: tuple[int, int, list[tuple[int, int]], bool],
) -> None:
    check(*ring)


class Deaf(Schedule):
    """Everybody listens to the wrong side."""

    def receive_from(self, rank: int, hop: int, phase: str = "forward") -> int:
        return self.send_to(rank, hop, phase)


class DeafBefore(Schedule):
    """Everybody listens to the wrong side for what was not kept."""

    def receive_from(self, rank: int, hop: int, phase: str = "forward") -> int:
        return self.send_to(rank, hop, phase) if hop < 0 else super().receive_from(rank, hop, phase)


class Confused(Schedule):
    """At hop 1 everybody takes the visitors for the own keys."""

    def owner(self, rank: int, hop: int, phase: str = "forward") -> int:
        return rank if hop == 1 else super().owner(rank, hop, phase)


class Impatient(Schedule):
    """Backward goes on in the direction of the forward."""

    def move(self, hop: int, phase: str = "forward") -> tuple[int, int]:
        return super().move(hop)


def fields(schedule: Schedule) -> dict[str, object]:
    return {field.name: getattr(schedule, field.name) for field in dataclasses.fields(schedule)}


def changed(**values: object) -> Callable[[Schedule], Schedule]:
    return lambda schedule: dataclasses.replace(schedule, **values)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=2, max_size=16), st.booleans())
def test_a_gather_meets_each_pair_once(shards: list[tuple[int, int]], has_keys: bool) -> None:
    """And each batch of messages goes from everybody to everybody else."""
    world = len(shards)
    schedule = gather_schedule(world, has_keys)
    sweeps = walk_schedule(schedule, shards, has_keys)
    messages = world * (world - 1)
    assert sweeps["forward"].transfers == messages * (1 + has_keys)
    assert sweeps["backward"].transfers == messages
    assert all(schedule.owner(rank, 0) == rank for rank in range(world))
    assert all(schedule.owner(rank, world - 1, "backward") == rank for rank in range(world))


GATHER_FAULTS: list[tuple[Callable[[Schedule], Schedule], str]] = [
    (
        changed(forward=Payload((), (), ("key statistics",))),
        "forward hop 1: rank 0 has no keys",
    ),
    (
        changed(forward=Payload(("keys",), ("key statistics",))),
        "backward hop 0: rank 0 has no key statistics",
    ),
    (changed(forward=Payload(("keys",), ())), r"statistics of rank 0 at rank 0 have .* of \[0\]"),
    (changed(backward=Payload((), ())), r"key gradients of rank 0 at rank 0 have contributions of \[0\]"),
    (changed(moves=((0, 2),)), "different of 16 visits"),
]


@pytest.mark.parametrize(("fault", "message"), GATHER_FAULTS)
def test_the_simulator_notices_in_a_gather(fault: Callable[[Schedule], Schedule], message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        walk_schedule(fault(gather_schedule(4, has_keys=True)), [(3, 3), (0, 0), (1, 1), (5, 5)])


def test_the_network_is_crossed_once_a_cycle() -> None:
    """By all devices of a node at once: 3 hops of 12 over 3 nodes of 4, where a flat ring needs one link at each. The
    way back needs no last one."""
    schedule = ring_schedule(3, 4, has_keys=True)
    assert schedule.moves == ((0, 1), (0, 1), (0, 1), (1, 1))
    for phase, hops, counts in (
        ("forward", 12, {"device": 9, "node": 3}),
        ("backward", 11, {"device": 9, "node": 2}),
    ):
        moves = [schedule.move(hop, phase) for hop in range(hops)]
        assert Counter(map(schedule.level, moves)) == counts
        for hop, move in enumerate(moves):
            pairs = [(rank // 4, schedule.send_to(rank, hop, phase) // 4) for rank in range(12)]
            assert all((a != b) == (schedule.level(move) == "node") for a, b in pairs)
    assert [schedule.send_to(rank, 3) for rank in range(4)] == [5, 6, 7, 4]
    assert [schedule.send_to(rank, 7, "backward") for rank in range(4, 8)] == [3, 0, 1, 2]


@pytest.mark.parametrize("has_keys", [True, False])
def test_what_moves(has_keys: bool) -> None:
    statistics = ("key statistics",) if has_keys else ()
    schedule = ring_schedule(2, 2, has_keys)
    for hop in range(3):
        assert schedule.carries("forward", hop) == ("keys", *statistics)
    assert schedule.carries("forward", 3) == statistics
    for hop in range(2):
        assert schedule.carries("backward", hop) == ("keys", *statistics, "key gradients")
    assert schedule.carries("backward", 2) == ("key gradients",)
    assert schedule.carries("backward", 3) == ()
    assert ring_schedule(1, 2, has_keys).carries("backward", 0) == ("key gradients",)


FAULTS: list[tuple[Callable[[Schedule], Schedule], str]] = [
    (lambda s: Confused(**fields(s)), "holds the keys of rank"),  # type: ignore[arg-type]
    (lambda s: Deaf(**fields(s)), "receives from another"),  # type: ignore[arg-type]
    (lambda s: Impatient(**fields(s)), "backward hop 1: rank 0 holds the keys of rank"),  # type: ignore[arg-type]
    (lambda s: DeafBefore(**fields(s) | {"keeps": False}), "before backward: .* receives from another"),  # type: ignore[arg-type]
    (
        changed(keeps=False, backward=Payload(("keys",), ("key gradients",))),
        "backward hop 0: rank 0 holds the key statistics of rank 0",
    ),
    (lambda s: Impatient(**fields(s) | {"keeps": False}), "backward hop 0: rank 0 holds the keys"),  # type: ignore[arg-type]
    (changed(moves=((0, 1), (0, 1), (1, 0))), "belong to rank 2, 6 contributions"),  # ends beside its home
    (changed(moves=((0, 1),)), "contributes twice"),
    (changed(moves=((0, 1), (1, 1))), "contributes twice"),
    (changed(moves=((0, 1), (1, 1), (0, 1), (0, 1))), "contributes twice"),
    (changed(moves=((0, 3), (0, 1), (1, 1))), "sends to itself"),
    (changed(forward=Payload(("keys",), ())), "holds the key statistics of rank"),
    (changed(forward=Payload((), ("key statistics",))), "holds the keys of rank"),
    (changed(backward=Payload(("keys",), ("key gradients",))), "holds the key statistics of rank"),
    (changed(forward=Payload(("keys", "key statistics"), ())), "key statistics at rank"),
    (changed(backward=Payload(("keys", "key statistics", "key gradients"), ())), "key gradients of rank 2, not"),
    (changed(backward=Payload(("keys", "key statistics"), ("labels",))), "has not all of .*labels"),
    (changed(nodes=3), "shards for a ring"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_the_simulator_notices(fault: Callable[[Schedule], Schedule], message: str) -> None:
    broken = fault(ring_schedule(2, 3, has_keys=True))
    with pytest.raises(VerificationError, match=message):
        walk_schedule(broken, [(3, 3), (0, 0), (1, 1), (5, 5), (2, 0), (0, 7)])


def test_a_group_of_one_never_communicates() -> None:
    schedule = ring_schedule(1, 1, True)
    assert not schedule.moves and not schedule.carries("forward", 0) and not schedule.carries("backward", 0)
    walk_schedule(schedule, [(3, 3)])


def proven(schedule: Schedule, has_keys: bool) -> bool:
    """What `simulate` finds, by algebra: a move is the same shift for every rank, so rank 0 stands for all of them.

    Takes W steps instead of the simulator's W^2, which for 65 536 ranks are 4 294 967 296.
    """
    world = schedule.world_size
    owners = [schedule.owner(0, hop) for hop in range(world)]
    if owners != [schedule.owner(0, hop, "backward") for hop in reversed(range(world))]:
        return False  # backward begins with what is there
    if sorted(owners) != list(range(world)) or owners[0] != 0:  # with one hop per shift each pair is met once
        return False
    if world == 1:
        return not schedule.carries("forward", 0) and not schedule.carries("backward", 0)
    statistics = {"key statistics"} if has_keys else set()
    for hop, owner in enumerate(owners):
        last = hop == world - 1
        receiver = schedule.send_to(0, hop)
        if receiver == 0 or schedule.receive_from(receiver, hop) != 0:
            return False  # both ends of a transfer, which are two ranks
        if (receiver if last else schedule.owner(receiver, hop + 1)) != owner:
            return False  # what arrives is what visits next; after the last hop the own
        read = set() if last else {"keys"}
        if not read | statistics <= set(schedule.carries("forward", hop)):
            return False
    if not schedule.keeps:  # what is sent once more, before the first hop
        receiver = schedule.send_to(0, -1, "backward")
        if schedule.receive_from(receiver, -1, "backward") != 0:
            return False
        if schedule.owner(receiver, 0, "backward") != 0:
            return False
        if not {"keys"} | statistics <= set(schedule.payload("backward").parcels):
            return False
    for hop in range(world - 1):
        receiver = schedule.send_to(0, hop, "backward")
        if receiver == 0 or schedule.receive_from(receiver, hop, "backward") != 0:
            return False
        if schedule.owner(receiver, hop + 1, "backward") != owners[world - 1 - hop]:
            return False
        read = {"keys"} | statistics if hop < world - 2 else set()  # the own ones are at home
        if not read | {"key gradients"} <= set(schedule.carries("backward", hop)):
            return False
    return True


@pytest.mark.parametrize("has_keys", [True, False])
def test_the_largest_rings(has_keys: bool) -> None:
    for nodes, devices in (
        (1, 1), (1, 2), (1, 8), (1, 4096), (1, 65536), (2, 2), (9, 7), (512, 8), (8192, 8), (911, 72), (2, 32768)
    ):  # fmt: skip
        for keeps in (True, False):
            assert proven(ring_schedule(nodes, devices, has_keys, keeps), has_keys)


@pytest.mark.parametrize("fault", [fault for fault, message in FAULTS if message != "shards for a ring"])
def test_the_algebra_notices(fault: Callable[[Schedule], Schedule]) -> None:
    assert not proven(fault(ring_schedule(2, 3, has_keys=True)), has_keys=True)
