"""Bugs that other rings have had, planted into a package: the tests of the ring must notice each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.kernels.planted import Edit

from . import pool as pools
from . import ring_worker
from .pool import Packages, Pool, assert_equal, average, results

AGREEMENT, ENGINE, RING, ROUTE, GATHER, API = (
    f"_runtime/{name}.py" for name in ("agreement", "engine", "ring", "route", "gather", "api")
)


@dataclasses.dataclass(frozen=True)
class Bug:
    """With these edits, gradients over `ranks` that hold `rows` rows each are wrong, or fail."""

    edits: tuple[Edit, ...]
    ranks: tuple[int, ...] = (0, 1, 2)
    rows: tuple[int, ...] = (5, 0, 9)
    loss: str = "clip"
    keys: tuple[int, ...] = ()  # in another way than the queries
    nodes: int = 1  # as planned; 0: a gather
    keeps: bool = True  # as planned: what a ring's backward begins with
    breaks: bool = False  # one rank fails and the others wait for it: no further test may use these processes


WEIGHT = "return ranks / sum(layout.rows) if"
BUGS = {
    "the gradient of the scale is summed over the ranks, then averaged": Bug(
        ((ENGINE, "return dq, dk, *weighting.scalars(rows)\n",
          "return dq, dk, *(len(layout.rows) * x for x in weighting.scalars(rows))\n"),)
    ),
    "averaging divides feature gradients by the ranks": Bug(
        ((ENGINE, 'ranks = len(layout.rows) if options.grad_sync == "mean" else 1', "ranks = 1"),)
    ),
    "each rank weighs its own mean equally": Bug(
        ((ENGINE, WEIGHT, "return 1 / max(1, layout.rows[layout.rank]) if"),), (0, 1), (3, 8)
    ),
    "the batch is as large as the ranks times this one's": Bug(
        ((ENGINE, WEIGHT, "return ranks / max(1, len(layout.rows) * layout.rows[layout.rank]) if"),), (0, 1), (3, 8)
    ),
    "the group is hard-wired": Bug(
        ((API, "    name: str = group.group_name\n    return name", '    return ""'),),
        (2, 3, 1, 0), (5, 9, 0, 20), "infonce",
    ),
    "a rank without rows stays out of the ring": Bug(
        ((ENGINE, "in trip:\n            valid = layout.keys[owner]\n            if not (rows and valid):\n"
          "                continue\n            block", "in trip if rows else ():\n"
          "            valid = layout.keys[owner]\n            block"),),
        breaks=True,
    ),
    "padding of a short shard is computed": Bug(
        ((ENGINE, "panel(trip.parcels[0], 0, valid), layout", "trip.parcels[0], layout"),
         (ENGINE, "view(trip.accumulator).panel(0, valid)", "view(trip.accumulator)")),
        (0, 1),
        (3, 8),
    ),
    "statistics of the visiting keys do not travel": Bug(
        ((ENGINE, "kept = saved.key_statistics[:, keys : keys + largest]",
          "kept = k.new_zeros((2, largest), dtype=dq_sum.dtype)"),
         (ENGINE, "away[1][:, :keys].copy_(own[1])", "away[1].zero_()"))
    ),
    "the accumulator does not come home": Bug(
        ((RING, "        self._swap_accumulators()\n        self._send_hop()\n        self.ring.finish_trip()\n",
          "        self.ring.finish_trip()\n"),)
    ),
    "keys go the wrong way round": Bug(
        ((RING, "return self.route.send_to(self.ring.rank, hop), self.route.receive_from(self.ring.rank, hop)",
          "return self.route.receive_from(self.ring.rank, hop), self.route.send_to(self.ring.rank, hop)"),),
    ),
    "a label counts from this rank's own first key": Bug(
        ((ENGINE, "    return labels\n", "    return labels + layout.key_offset(layout.rank)\n"),),
        loss="infonce",
    ),
    "a shard's keys are numbered from zero": Bug(
        ((RING, "return sum(self.keys[:owner])", "return 0"),), loss="infonce"
    ),
}  # fmt: skip

OTHER_BUGS: dict[str, tuple[Edit, ...]] = {
    "mismatched ranks are not noticed": ((AGREEMENT, "if problem is not None:", "if False:"),),
    "a group of one sends to itself": ((RING, "if dist.get_world_size(group) == 1:", "if False:"),),
}


@pytest.fixture(scope="module")
def pool(packages: Packages, folder_of: Callable[[ModuleType], Path]) -> Iterator[Pool]:
    pool = Pool(4, folder_of(packages("clip")).parent, timeout_s=10)
    yield pool
    pool.close()


Planted = Callable[[str, str, tuple[Edit, ...]], str]


@pytest.mark.parametrize("name", BUGS)
def test_wrong_gradients_are_noticed(
    pool: Pool,
    packages: Packages,
    planted: Planted,
    folder_of: Callable[[ModuleType], Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    bug = BUGS[name]
    labelled = bug.loss == "infonce"
    rows = list(bug.rows)
    keys = [n + 3 for n in reversed(rows)] if labelled else rows
    arguments: dict[str, Any] = {"ranks": bug.ranks, "rows": rows, "keys": keys, "labelled": labelled}
    truth = ring_worker.reference_gradients(packages(bug.loss), rows, keys, labelled)
    good = packages(bug.loss).__name__
    assert_equal(average(results(pool.run("gradients", bug.ranks, package=good, **arguments))), truth)
    wrong = planted(name, bug.loss, bug.edits)
    other = Pool(3, folder_of(packages("clip")).parent) if bug.breaks else None
    if other is not None:
        monkeypatch.setattr(pools, "TIMEOUT_S", 3)  # a hang is one way to notice
    try:
        with pytest.raises((AssertionError, TimeoutError)):
            answers = (other or pool).run("gradients", bug.ranks, package=wrong, **arguments)
            assert_equal(average(results(answers)), truth)
    finally:
        if other is not None:
            for process in other.processes:  # some of them wait for others for ever
                process.kill()
            other.close()


def test_unnoticed_mismatches_are_noticed(pool: Pool, packages: Packages, planted: Planted) -> None:
    """Ranks that want different gradients: nothing fails by itself when nobody compares."""
    name = "mismatched ranks are not noticed"
    wrong = planted(name, "clip", OTHER_BUGS[name])
    for package, noticed in ((packages("clip").__name__, True), (wrong, False)):
        answers = pool.run("call", (0, 1), each={1: {"grad_sync": "sum"}}, package=package, ranks=(0, 1))
        assert [kind == "RuntimeError" for kind, _ in answers] == [noticed, noticed], answers


def test_a_ring_of_one_is_noticed(pool: Pool, packages: Packages, planted: Planted) -> None:
    name = "a group of one sends to itself"
    results(pool.run("alone", (2,), package=packages("clip").__name__))
    ((kind, text),) = pool.run("alone", (2,), package=planted(name, "clip", OTHER_BUGS[name]))
    assert kind != "ok", text
