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


@pytest.mark.parametrize(
    ("fault", "message"),
    [
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
    ],
)
def test_the_simulator_notices(fault: object, message: str) -> None:
    broken = fault(ring_schedule(4, has_keys=True))  # type: ignore[operator]
    with pytest.raises(VerificationError, match=message):
        simulate(broken, [(3, 3), (0, 0), (1, 1), (5, 5)])


def test_a_group_of_one_never_communicates() -> None:
    assert ring_schedule(1, True) == Schedule(1, (Hop(0, 0, 0, 0, (), ()),))
