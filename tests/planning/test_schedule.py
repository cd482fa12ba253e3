"""The table of communication: every pair of blocks met once, every sum home, and the walk notices when not."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infcl_gen.errors import VerificationError
from infcl_gen.planning.model import kinds
from infcl_gen.runtime.table import HERE, Step, Table
from tests.planning.tables import gather_table, ring_table, travelling
from tests.planning.walk import walk
from tests.tiers import combined

Phases = dict[str, list[Step]]


def check(nodes: int, devices: int, has_keys: bool) -> None:
    world = nodes * devices
    for keeps in (True, False):
        walked = walk(ring_table(nodes, devices, has_keys, keeps))
        everybody = {(node, device) for node in range(nodes) for device in range(devices)}
        for phase in ("forward", "backward"):
            assert set(walked[phase].owners) == everybody and len(walked[phase].owners) == world
        assert walked["forward"].owners == walked["backward"].owners[::-1]
        # The own keys do not travel home, in backward not at all; what was not kept is sent once more.
        forward = world - 1 + world * has_keys
        backward = (1 + has_keys) * (world - 2 + (not keeps)) + world - 1
        assert walked["forward"].transfers == (forward if world > 1 else 0)
        assert walked["backward"].transfers == (backward if world > 1 else 0)


@given(st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_each_pair_once_and_sums_home(nodes: int, devices: int, has_keys: bool) -> None:
    check(nodes, devices, has_keys)


@pytest.mark.parametrize(
    ("shape", "has_keys"), combined([(1, 64), (1, 511), (64, 1), (7, 9), (512, 8), (2, 1024)], [True, False])
)
def test_large_rings(shape: tuple[int, int], has_keys: bool) -> None:
    """One rank stands for all: W steps, where all ranks would take W^2."""
    check(*shape, has_keys)


@pytest.mark.long
def test_the_largest_rings() -> None:
    for nodes, devices in ((8192, 8), (911, 72), (2, 32768)):
        check(nodes, devices, has_keys=True)


@pytest.mark.parametrize("world", range(2, 17))
@pytest.mark.parametrize("has_keys", [True, False])
def test_a_gather_meets_each_pair_once(world: int, has_keys: bool) -> None:
    """Each batch of messages goes from everybody to everybody else; the own keys come first, in backward last."""
    table = gather_table(world, has_keys)
    walked = walk(table)
    assert walked["forward"].transfers == (world - 1) * (1 + has_keys)
    assert walked["backward"].transfers == world - 1
    assert walked["forward"].owners[0] == walked["backward"].owners[-1] == HERE
    batches = [step for phase in walked for step in table.steps(phase) if step.sends]
    assert len(batches) == 2 + has_keys


@pytest.mark.parametrize("way", [("ring", 1, 2), ("ring", 1, 5), ("ring", 3, 2), ("gather", 1, 2), ("gather", 1, 5)])
def test_a_forward_with_gradients_sends_beside_work(way: tuple[str, int, int]) -> None:
    """Keys and sums: it begins and ends with the own keys, each time with one half of the queries. The own part of the
    sums does not travel.

    Planted: the second half is left out.
    """
    table = Table(*way, False, travelling("siglip"))
    walked, steps = walk(table)["forward"], table.steps("forward")
    world, works = table.world_size, [step for step in steps if step.owner is not None]
    assert (works[0].owner, works[0].part) == (works[-1].owner, works[-1].part - 1) == (HERE, 1)
    assert walked.owners[0] == HERE and not any(step.part for step in works[1:-1])
    assert walked.transfers == 2 * (world - 1)
    # Its work waits for no sums: the last ones come home beside it, or behind it.
    assert works[-1].sums_from == -1 and steps[-1].owner is None and steps[-1].sums_from == len(steps) - 2
    assert all(step.owner is not None for step in steps if step.sends)
    assert sum(map(table.work, steps)) == pytest.approx(1)
    with pytest.raises(VerificationError, match="contributions"):
        walk(table, {"forward": [step._replace(owner=None) if step.part == 2 else step for step in steps]})


@given(st.integers(0, 1500))
def test_halves_of_the_queries_are_all_of_them(rows: int) -> None:
    """They meet at a multiple of 16 rows, of 128 if there are 256: an even number of tiles is halved. The first is
    empty for no queries alone: its work begins the sums."""
    first, second = (Step(HERE, part=part).share(1, 1, rows, 7) for part in (1, 2))
    assert (first.row, first.rows, second.rows) == (0, second.row, rows - first.rows)
    assert first.keys == second.keys == 7 and first.key == second.key == 0
    each = 128 if rows >= 256 else 16
    assert first.rows == rows < 2 * each or (first.rows % each == 0 and 0 <= first.rows - second.rows < 2 * each)
    assert bool(first.rows) == bool(rows)


@pytest.mark.parametrize("world", [2, 3, 16])
def test_a_whole_gather_begins_with_the_own_keys(world: int) -> None:
    """Forward has two batches of messages, keys beside the first work and sums late in the last; backward has neither.
    For another number of ranks it is a ring with the sums in backward."""
    table = gather_table(world, has_keys=False).as_whole()
    walked = walk(table)
    assert walked["forward"].transfers == 2 * (world - 1) and walked["backward"].transfers == 0
    first, *works, own, last = table.steps("forward")
    assert first.owner == HERE and first.early and {sent.name for sent in first.sends} == {"keys"}
    assert not any(step.early or step.sends or step.unchanged_from for step in works)
    assert table.visits("forward") == world == table.hops("forward") - 1
    assert own.owner == HERE and own.late and {sent.name for sent in own.sends} == {"key gradients"}
    assert last.owner is None and not last.sends
    other = table.over(world + 1)
    assert other == ring_table(1, world + 1, has_keys=False, keeps=False)
    assert table.over(1).travelling == other.travelling and not table.over(1).whole
    assert [item.name for item in table.without_sums().travelling] == ["keys"]
    frozen = table.without_key_gradients()
    assert frozen.whole and walk(frozen)["forward"].transfers == world - 1


@pytest.mark.parametrize("way", [(ring_table, 1, 2), (ring_table, 2, 3), (ring_table, 1, 9), (gather_table, 5)])
@pytest.mark.parametrize("frozen", [False, True])
def test_renewed_statistics_are_sent_again(way: tuple[Any, ...], frozen: bool) -> None:
    """A ring's forward leaves none of them for backward: what it has kept is not what their owner makes of them."""
    make, *sizes = way
    table = dataclasses.replace(make(*sizes), keeps=False, travelling=travelling("mil_nce"))
    table = table.without_key_gradients() if frozen else table
    walk(table)
    sent = [sent.name for step in table.steps("backward") for sent in step.sends]
    assert sent.count("key statistics") == table.world_size - 1
    if table.transport == "ring":
        with pytest.raises(VerificationError, match=r"^backward step 0: no key statistics .*in kept"):
            walk(dataclasses.replace(table, keeps=True))
    if table.transport == "gather" and not frozen:
        first, *_, own, home = table.steps("backward")
        assert first.owner is None and own.owner == HERE and {sent.name for sent in own.sends} == {"key gradients"}
        assert home.owner is None


@pytest.mark.parametrize("way", [ring_table(2, 2), ring_table(1, 3, keeps=False), gather_table(3)])
def test_without_gradients_of_keys_their_statistics_still_travel(way: Table) -> None:
    frozen = way.without_key_gradients()
    assert [item.name for item in frozen.travelling] == ["keys", "key statistics"]
    assert frozen.steps("forward") == way.steps("forward")
    kept = [sent for step in way.steps("backward") for sent in step.sends if sent.name != "key gradients"]
    assert [sent for step in frozen.steps("backward") for sent in step.sends] == kept


@pytest.mark.parametrize(("world", "batches"), [(2, 4), (3, 7), (4, 9), (8, 17)])
def test_batches_of_a_ring(world: int, batches: int) -> None:
    """2 W + 1, of two 4: between two the kept statistics are not sent on."""
    table = ring_table(1, world)
    steps = [step for phase in ("forward", "backward") for step in table.steps(phase)]
    assert sum(len(table.batches("forward", step, lambda name: 1)) for step in steps) == batches


def test_the_network_is_crossed_once_a_cycle() -> None:
    """By all devices of a node at once: 3 steps of 12 over 3 nodes of 4, where a flat ring needs one link at each. The
    way back needs no last one."""
    table = ring_table(3, 4)
    for phase, name, counts in (
        ("forward", "key statistics", {"device": 9, "node": 3}),
        ("backward", "key gradients", {"device": 9, "node": 2}),
    ):
        moves = [sent.to for step in table.steps(phase) for sent in step.sends if sent.name == name]
        assert Counter(map(table.level, moves)) == counts
        for move in moves:
            pairs = [(rank // 4, table.rank(rank, move) // 4) for rank in range(12)]
            assert all((a != b) == (table.level(move) == "node") for a, b in pairs)
    assert [table.rank(rank, (1, 1)) for rank in range(4)] == [5, 6, 7, 4]
    assert [table.rank(rank, (1, 1), back=True) for rank in range(4, 8)] == [3, 0, 1, 2]


@pytest.mark.parametrize("nodes", [1, 2])
def test_steps_of_a_kind_cost_the_same(nodes: int) -> None:
    """As many as there are steps, and no more kinds in a larger ring."""
    for phase in ("forward", "backward"):
        for keeps in (True, False):
            small, large = (ring_table(nodes, devices, keeps=keeps) for devices in (6, 12))
            assert sum(kinds(large, phase).values()) == len(large.steps(phase))
            assert set(kinds(small, phase)) == set(kinds(large, phase))


def test_sums_travel_apart_from_large_tensors() -> None:
    table = ring_table(1, 4)
    step = table.steps("forward")[1]
    for size, expected in ((1 << 26, [2]), ((1 << 26) + 1, [1, 1])):
        batches = table.batches("forward", step, lambda name, size=size: size)  # type: ignore[misc]
        assert [len(batch) for batch in batches] == expected
        assert batches[0][0].name == "key statistics"  # sums first


def test_a_group_of_one_never_communicates() -> None:
    for phase, walked in walk(ring_table(1, 1)).items():
        assert walked.owners == (HERE,) and walked.transfers == 0, phase


# ---------------------------------------------------------------------------------------------- what must be noticed


def changed(phase: str, number: int, **fields: Any) -> Callable[[Phases], None]:
    """Another value in a row of the table."""

    def fault(phases: Phases) -> None:
        phases[phase][number] = phases[phase][number]._replace(**fields)

    return fault


def sent(phase: str, number: int, name: str, **fields: Any) -> Callable[[Phases], None]:
    """Another transfer of this tensor; without fields: none."""

    def fault(phases: Phases) -> None:
        step, found = phases[phase][number], []
        for one in step.sends:
            if one.name != name or fields:
                found.append(one._replace(**fields) if one.name == name else one)
        assert tuple(found) != step.sends, "the fault changes nothing"
        phases[phase][number] = step._replace(sends=tuple(found))

    return fault


RING_FAULTS: list[tuple[Callable[[Phases], None], str]] = [
    (changed("forward", 2, owner=HERE), "forward step 2: the keys in .* are of"),
    (changed("forward", 0, copies=()), "forward step 0: no keys of .* in 0 to send"),
    (sent("forward", 1, "keys", to=(0, 2)), "forward step 2: no keys of .* to send"),
    (sent("forward", 1, "keys", to=HERE), "sent to the rank itself"),
    (sent("forward", 1, "keys", to=(2, 3)), "sent to the rank itself"),  # all the way round
    (sent("forward", 1, "keys", of=(1, 1)), "no keys of .* to send"),
    (sent("forward", 2, "key statistics"), "no key statistics of .* to add to"),
    (sent("forward", 1, "keys"), "forward step 2: "),
    (sent("forward", 2, "key statistics", target=1), "received in 1 while it is busy"),
    (sent("forward", 1, "keys", target="kept"), "received in kept while it is busy|in kept are on their way"),
    (changed("forward", 3, unchanged_from=-1), "sent before they have arrived|are on their way"),
    (changed("forward", 3, sums_from=-1), "on their way|no key statistics of"),
    (changed("forward", 3, fresh=True), "written to while|are not there|have 3 contributions"),
    (changed("forward", 6, copies=()), "backward step 0: no key statistics"),
    (changed("forward", 6, sums_from=-1), "nobody waits for what step 6 has sent"),
    (changed("forward", 6, sends=()), "end of forward: the key statistics"),
    (changed("backward", 0, unchanged=0), "backward step 0: the keys in 0 are on their way"),
    (changed("backward", 2, owner=HERE), "backward step 2: the keys in .* are of"),
    (sent("backward", 1, "key statistics"), "backward step 2: the key statistics in|no key statistics"),
    (sent("backward", 2, "key gradients"), "no key gradients of"),
    (sent("backward", 5, "key gradients", to=(0, 1)), "no key gradients of"),
    (changed("backward", 5, unchanged=1), "backward step 5: the keys in 1 are of|no keys in 1"),
    (changed("backward", 5, fresh=True), "written to while|have 1 contributions|on their way"),
    (lambda phases: phases["backward"].pop(3) and None, "backward step [34]"),
    (lambda phases: phases["forward"].insert(1, phases["forward"][0]), "forward step 1|visits"),
]  # fmt: skip
NOT_KEPT_FAULTS: list[tuple[Callable[[Phases], None], str]] = [
    (changed("backward", 0, sends=()), "backward step 1: no keys of .* in 0 to send"),
    (changed("backward", 0, copies=()), "backward step 0: no keys of"),
    (sent("backward", 0, "keys", to=(0, 1)), "backward step 1: .*not of|no keys of"),
    (sent("backward", 0, "key statistics"), "no key statistics"),
    (changed("backward", 1, unchanged_from=-1), "backward step 1: the keys in 0 are on|sent before they have arrived"),
]  # fmt: skip
GATHER_FAULTS: list[tuple[Callable[[Phases], None], str]] = [
    (changed("forward", 0, sends=()), "forward step 1: no keys in all"),
    (changed("forward", 1, unchanged_from=-1), "the keys in all are on their way"),
    (changed("forward", 2, owner=(0, 3)), "different of 4 visits|forward step"),
    (changed("forward", 4, sends=()), "end of forward: the key statistics of .* have 1 contributions"),
    (changed("forward", 4, sums_from=-1), "nobody waits"),
    (changed("backward", 3, sends=()), "end of backward: the key gradients of .* have 1 contributions"),
    (changed("backward", 4, sums_from=-1), "nobody waits for what step 3 has sent"),
    (sent("backward", 3, "key gradients", of=HERE), "no key gradients of .* to send|cannot be added|while it is busy"),
    (lambda phases: phases["backward"].pop(1) and None, "visits|no key gradients of"),
]  # fmt: skip
WHOLE_FAULTS: list[tuple[Callable[[Phases], None], str]] = [
    (changed("forward", 0, owner=(0, 1)), "forward step 0: .*on their way|no keys in all"),
    (changed("forward", 0, copies=()), "forward step 0: no keys of"),
    (changed("forward", 0, early=False), "different of 5 visits"),
    (changed("forward", 1, unchanged_from=-1), "the keys in all are on their way"),
]
FAULTS: list[tuple[Table, Callable[[Phases], None], str]] = [
    *((ring_table(2, 3), *fault) for fault in RING_FAULTS),
    *((ring_table(2, 3, keeps=False), *fault) for fault in NOT_KEPT_FAULTS),
    *((gather_table(4), *fault) for fault in GATHER_FAULTS),
    *((gather_table(4, has_keys=False).as_whole(), *fault) for fault in WHOLE_FAULTS),
]


@pytest.mark.parametrize(("table", "fault", "message"), FAULTS, ids=range(len(FAULTS)))
def test_the_walk_notices(table: Table, fault: Callable[[Phases], None], message: str) -> None:
    phases: dict[str, Sequence[Step]] = {phase: table.steps(phase) for phase in ("forward", "backward")}
    walk(table, phases)
    wrong = {phase: list(steps) for phase, steps in phases.items()}
    fault(wrong)
    with pytest.raises(VerificationError, match=message):
        walk(table, wrong)
