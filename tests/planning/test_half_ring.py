"""The table of a triangle: of two ranks one computes their pairs, or each its share; the walk notices when not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infcl_gen.errors import VerificationError
from infcl_gen.planning.timeline import execute
from infcl_gen.runtime.table import HERE, SHARE_ROWS, Step, Table
from tests.planning.tables import triangle_table
from tests.planning.test_schedule import Phases, changed, sent
from tests.planning.test_timeline import case
from tests.planning.walk import walk

SHAPES = [(1, 2), (1, 3), (1, 4), (1, 7), (1, 8), (2, 1), (4, 1), (2, 2), (2, 3), (3, 2), (3, 4), (4, 4)]


def tables(nodes: int, devices: int) -> list[Table]:
    rings = [triangle_table("ring", nodes, devices, keeps) for keeps in (False, True)]
    return rings + [triangle_table("gather", 1, devices)] * (nodes == 1 and devices > 1)


def counted(table: Table, phase: str, rows: Sequence[int]) -> np.ndarray:
    """How often each ordered pair of rows is computed, (B, B); own rows with each other as those above the diagonal."""
    first, found = [0, *itertools.accumulate(rows)], np.zeros((sum(rows), sum(rows)), int)
    for rank, step in itertools.product(range(len(rows)), table.steps(phase)):
        if step.owner is None:
            continue
        owner = table.rank(rank, step.owner)
        share = step.share(rank, owner, rows[rank], rows[owner])
        assert 0 <= share.row <= share.row + share.rows <= rows[rank]
        assert 0 <= share.key <= share.key + share.keys <= rows[owner]
        own, key = first[rank] + share.row, first[owner] + share.key
        block = np.ones((share.rows, share.keys), int)
        found[own : own + share.rows, key : key + share.keys] += np.triu(block, 1) if owner == rank else block
    return found


def check_pairs(table: Table, rows: Sequence[int]) -> None:
    """Each unordered pair of rows once in all, by whichever rank, in either phase."""
    once = np.triu(np.ones((sum(rows), sum(rows)), int), 1)
    for phase in ("forward", "backward"):
        found = counted(table, phase, rows)
        assert (np.triu(found) + np.tril(found).T == once).all(), phase


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_each_pair_of_rows_once_in_all(nodes: int, devices: int, data: st.DataObject) -> None:
    """Over uneven and empty ranks, by rings and gathers."""
    size = nodes * devices
    rows = data.draw(st.lists(st.integers(0, 40), min_size=size, max_size=size))
    for table in tables(nodes, devices):
        check_pairs(table, rows)


@pytest.mark.parametrize(("nodes", "devices"), SHAPES)
def test_a_ring_of_half_the_hops(nodes: int, devices: int) -> None:
    """All is there where work needs it, and all sums come home; who meets whom is balanced, and so is half of it."""
    for table in tables(nodes, devices):
        walked, world = walk(table), nodes * devices
        assert set(walked["forward"].owners) == set(walked["backward"].owners)
        assert walked["backward"].owners[-1] == HERE
        for phase in ("forward", "backward"):
            steps = table.steps(phase)
            assert table.hops(phase) == len(walked[phase].owners) <= world // 2 + 1 + 2 * (nodes > 1)
            assert sum(map(table.work, steps)) == pytest.approx(1)
            if world % 2 == 0:
                even = 4 * SHARE_ROWS
                each = counted(table, phase, [even] * world).reshape(world, even, -1).sum((1, 2))
                assert (each == world * even**2 // 2 - even // 2).all()


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_gather_sends_keys_to_half_of_the_others(world: int) -> None:
    """Statistics and gradients go home from those alone; labels go with the rows."""
    table, half = triangle_table("gather", 1, world), world // 2
    walked = walk(table)
    assert walked["forward"].transfers == (2 + 1) * half
    assert walked["backward"].transfers == (1 + 1) * half


@pytest.mark.parametrize("way", ["ring", "gather"])
def test_ids_travel_instead_of_labels(way: str) -> None:
    names = [item.name for item in triangle_table(way, 1, 4, labels=False).travelling]
    assert names == ["keys", "key ids", "key sums", "key statistics", "key gradients"]
    walk(triangle_table(way, 1, 4, labels=False))


def test_a_kept_ring_sends_only_statistics_before_backward() -> None:
    """Its rows and labels are there; without, they are sent once more."""
    for keeps, names in ((True, {"key statistics"}), (False, {"keys", "key labels", "key statistics"})):
        first, *_ = triangle_table("ring", 1, 4, keeps).steps("backward")
        assert first.owner is None and {sent.name for sent in first.sends} == names


def test_shares_of_two_ranks_are_even_and_aligned() -> None:
    for rows, keys in ((0, 5), (5, 0), (1, 1), (4, 40), (16, 16), (1000, 3), (32768, 32768)):
        step = Step((0, 1), halved=True)
        lower, upper = step.share(0, 1, rows, keys), step.share(1, 0, keys, rows)
        assert (lower.row, lower.key, lower.keys) == (0, 0, keys) and (upper.row, upper.rows) == (0, keys)
        assert lower.rows == upper.key and lower.rows + upper.keys == rows
        assert lower.rows % SHARE_ROWS == 0 or lower.rows == rows
        assert abs(lower.rows - upper.keys) <= SHARE_ROWS
        assert step._replace(halved=False).share(0, 1, rows, keys) == (0, rows, 0, keys)


FAULTS: list[tuple[Table, Callable[[Phases], None], str]] = [
    (triangle_table("ring", 1, 4), changed("forward", 2, halved=False), r"are met by half"),
    (triangle_table("ring", 1, 4), changed("forward", 1, halved=True), r"are met by half"),
    (triangle_table("ring", 1, 4), changed("backward", 1, halved=False), r"are met by half"),
    (triangle_table("ring", 1, 4), changed("forward", 1, fresh=False), "no key sums of .* to add to"),
    (triangle_table("ring", 1, 4), changed("forward", 3, sends=()), "the key sums of .* are not there"),
    (triangle_table("ring", 1, 4), sent("forward", 3, "key sums", to=(0, 1)), "the key sums of .* are not there"),
    (triangle_table("ring", 1, 4), sent("forward", 2, "key sums"), "no key sums of .* to add to"),
    (triangle_table("ring", 1, 4), sent("backward", 3, "key gradients"), "the key gradients of .* are not there"),
    (triangle_table("ring", 1, 4), changed("backward", 3, sums_from=-1), "nobody waits for what step 3 has sent"),
    (triangle_table("ring", 1, 4, keeps=True), changed("backward", 0, sends=()), "no key statistics"),
    (triangle_table("ring", 1, 5), lambda phases: phases["backward"].pop(1) and None, "meet or are met|backward step"),
    (triangle_table("gather", 1, 4), changed("forward", 3, sends=()), "key sums of .* are not there"),
    (triangle_table("gather", 1, 4), sent("backward", 3, "key gradients"), "key gradients of .* are not there"),
    (triangle_table("gather", 1, 4), sent("backward", 0, "key statistics"), "no key statistics"),
    (triangle_table("gather", 1, 4), changed("backward", 2, halved=False), r"are met by half"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "fault", "message"), FAULTS, ids=range(len(FAULTS)))
def test_the_walk_notices(table: Table, fault: Callable[[Phases], None], message: str) -> None:
    phases = {phase: list(table.steps(phase)) for phase in ("forward", "backward")}
    walk(table, phases)
    fault(phases)
    with pytest.raises(VerificationError, match=message):
        walk(table, phases)


def test_the_count_of_pairs_notices_a_share_that_both_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the higher rank takes the first half, too; shares that overlap; pairs that both compute."""
    rows, table, share = [40, 24, 33, 16], triangle_table("ring", 1, 4), Step.share
    check_pairs(table, rows)
    for bug in (
        lambda step, rank, owner, m, n: share(step, min(rank, owner), max(rank, owner), m, n),
        lambda step, rank, owner, m, n: share(step, rank, owner, m, n)._replace(key=0),
        lambda step, rank, owner, m, n: share(step._replace(halved=False), rank, owner, m, n),
    ):
        monkeypatch.setattr(Step, "share", bug)
        with pytest.raises(AssertionError):
            check_pairs(table, rows)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_pairs(dataclasses.replace(table, triangle=False), rows)


@pytest.mark.parametrize("way", ["ring", "gather"])
def test_one_rank_stands_for_all_in_a_timeline(way: str) -> None:
    """Of two ranks that share pairs, too; its work is that of the cost model, and it takes about half of clip's."""
    for world in (2, 3, 4, 8):
        plan, model = case(batch_size=4096 * world, loss="ntxent", devices=world, set={"transport": way})
        one, all_ = (execute(plan, model, everybody=everybody) for everybody in (False, True))
        assert one.step_s == pytest.approx(all_.step_s, rel=1e-9) and one.bound == all_.bound
        clip, of_clip = case(batch_size=65536 * world, devices=world, set={"transport": way})
        rows, of_rows = case(batch_size=65536 * world, loss="ntxent", devices=world, set={"transport": way})
        halved = execute(rows, of_rows, lead_s=0.1).step_s / execute(clip, of_clip, lead_s=0.1).step_s
        assert halved == pytest.approx(0.5, abs=0.03)
