"""The ring's schedule: every pair of blocks met once, every accumulator home, and the simulator notices when not."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infcl_gen.errors import VerificationError
from infcl_gen.planning.schedule import Hop, Schedule, ring_schedule, simulate


@st.composite
def rings(draw: st.DrawFn, largest: int) -> tuple[list[tuple[int, int]], bool]:
    world = draw(st.integers(1, largest))
    size = st.integers(0, 70)  # uneven, and empty, shards
    return draw(st.lists(st.tuples(size, size), min_size=world, max_size=world)), draw(st.booleans())


def check(shards: list[tuple[int, int]], has_keys: bool) -> None:
    world = len(shards)
    sweeps = simulate(ring_schedule(world, has_keys), shards, has_keys)
    everything = {(rank, owner) for rank in range(world) for owner in range(world)}
    for phase in ("forward", "backward"):
        assert set(sweeps[phase].visits) == everything
        assert len(sweeps[phase].visits) == world * world
        assert sweeps[phase].logits == sum(a for a, _ in shards) * sum(b for _, b in shards)
    assert sweeps["backward"].transfers == (world * world if world > 1 else 0)
    assert sweeps["forward"].transfers == (world * (world - 1 + has_keys) if world > 1 else 0)


@given(rings(16))
def test_each_pair_once_and_accumulators_home(ring: tuple[list[tuple[int, int]], bool]) -> None:
    check(*ring)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8, 31, 64])
@pytest.mark.parametrize("has_keys", [True, False])
def test_large_rings(world: int, has_keys: bool) -> None:
    check([(rank % 5, (3 * rank) % 7) for rank in range(world)], has_keys)


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(rings(64))
def test_each_pair_once_and_accumulators_home_long(ring: tuple[list[tuple[int, int]], bool]) -> None:
    check(*ring)


def changed(schedule: Schedule, index: int, **fields: object) -> Schedule:
    hops = list(schedule.hops)
    hops[index] = dataclasses.replace(hops[index], **fields)  # type: ignore[arg-type]
    return Schedule(schedule.world_size, tuple(hops))


FAULTS = [
    (lambda s: changed(s, 1, owner_offset=0), "holds the keys of rank"),
    (lambda s: changed(s, 1, send_offset=2), "receives from another"),
    (lambda s: changed(s, 1, send_offset=0, recv_offset=0), "sends to itself"),
    (lambda s: changed(s, 1, send_offset=-1, recv_offset=1), "holds the keys of rank"),
    (lambda s: changed(s, 0, forward_carries=("keys",)), "holds the key statistics of rank"),
    (lambda s: changed(s, 0, forward_carries=()), "holds the keys of rank"),
    (lambda s: changed(s, 3, forward_carries=()), "key statistics at rank"),
    (lambda s: changed(s, 3, backward_carries=()), "key gradients at rank"),
    (lambda s: Schedule(4, s.hops[:3]), "12 different of 12 visits"),
    (lambda s: Schedule(4, (*s.hops, s.hops[0])), "hop 0: rank 0 holds the keys of rank 1"),
    (lambda s: Schedule(3, s.hops), "shards for a ring"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_the_simulator_notices(fault: object, message: str) -> None:
    broken = fault(ring_schedule(4, has_keys=True))  # type: ignore[operator]
    with pytest.raises(VerificationError, match=message):
        simulate(broken, [(3, 3), (0, 0), (1, 1), (5, 5)])


def test_a_group_of_one_never_communicates() -> None:
    assert ring_schedule(1, True) == Schedule(1, (Hop(0, 0, 0, 0, (), ()),))


def proven(schedule: Schedule, has_keys: bool) -> bool:
    """What `simulate` finds, by algebra: a hop is the same shift for every rank, so one rank stands for all of them.

    Takes W steps instead of the simulator's W^2, which for 65 536 ranks are 4 294 967 296.
    """
    world, hops = schedule.world_size, schedule.hops
    owners = [hop.owner_offset % world for hop in hops]
    if sorted(owners) != list(range(world)):  # with one hop per offset each pair is met once
        return False
    statistics = {"key statistics"} if has_keys else set()
    for hop, owner, following in zip(hops, owners, [*owners[1:], 0], strict=True):
        last = hop is hops[-1]
        if world == 1:
            return not hop.forward_carries and not hop.backward_carries
        if (hop.send_offset + hop.recv_offset) % world or not hop.send_offset % world:
            return False  # both ends of a transfer, which are two ranks
        if (following + hop.send_offset - owner) % world:
            return False  # what arrives at p from p - s is of p's next owner; after the last hop, of p itself
        read = set() if last else {"keys"}
        if not read | statistics <= set(hop.forward_carries):
            return False
        if not read | {"key gradients"} | (set() if last else statistics) <= set(hop.backward_carries):
            return False
    return owners[0] == 0  # work begins with the own keys


@pytest.mark.parametrize("has_keys", [True, False])
def test_the_largest_rings(has_keys: bool) -> None:
    for world in (1, 2, 3, 4, 8, 63, 64, 4096, 65535, 65536):
        assert proven(ring_schedule(world, has_keys), has_keys)


@pytest.mark.parametrize("fault", [fault for fault, message in FAULTS if message != "shards for a ring"])
def test_the_algebra_notices(fault: object) -> None:
    assert not proven(fault(ring_schedule(4, has_keys=True)), has_keys=True)  # type: ignore[operator]
