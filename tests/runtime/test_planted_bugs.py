"""Bugs that other rings have had, planted into a package: the tests of the ring must notice each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.kernels.planted import Edit
from tests.tiers import some

from . import pool as pools
from . import ring_worker
from .pool import Packages, Pool, assert_equal, average, results

AGREEMENT, API, ENGINE, GROUP, SWEEP, TABLE, TRANSPORT, WEIGHTING = (
    f"_runtime/{name}.py"
    for name in ("agreement", "api", "engine", "group", "sweep", "table", "transport", "weighting")
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
        ((ENGINE, "return dq, dk, *weighting.scalars(sweep.slopes)",
          "return dq, dk, *(len(layout.rows) * x for x in weighting.scalars(sweep.slopes))"),)
    ),
    "averaging divides feature gradients by the ranks": Bug(
        ((WEIGHTING, 'ranks = len(layout.rows) if options.grad_sync == "mean" else 1', "ranks = 1"),)
    ),
    "each rank weighs its own mean equally": Bug(
        ((WEIGHTING, WEIGHT, "return 1 / max(1, layout.rows[layout.rank]) if"),), (0, 1), (3, 8)
    ),
    "the batch is as large as the ranks times this one's": Bug(
        ((WEIGHTING, WEIGHT, "return ranks / max(1, len(layout.rows) * layout.rows[layout.rank]) if"),), (0, 1), (3, 8)
    ),
    "the group is hard-wired": Bug(
        ((API, "return Options(group.group_name,", 'return Options("",'),),
        (2, 3, 1, 0), (5, 9, 0, 20), "infonce",
    ),
    "a rank without rows stays out of the ring": Bug(
        ((SWEEP, "for owner in trip:", "for owner in trip if self.call.q.shape[0] else ():"),),
        breaks=True,
    ),
    "padding of a short shard is computed": Bug(
        ((TRANSPORT, "self._slot(name, place), self._count(name, owner))",
          "self._slot(name, place), self._largest if owner != self._layout.rank else self._layout.keys[owner])"),),
        (0, 1),
        (3, 8),
    ),
    "statistics of the visiting keys do not travel": Bug(
        ((TABLE, "finished = tuple(Copy(name, last % 2, KEPT) for name in sums if name in read)", "finished = ()"),
         (TABLE, "Copy(name, OWN, source) for name in absent)", "Copy(name, OWN, source) for name in absent[:1])"))
    ),
    "the accumulator does not come home": Bug(
        ((TABLE, "follow(last), -1, last + 1, finished", "(), -1, -1, finished"),)
    ),
    "keys go the wrong way round": Bug(
        ((TRANSPORT, "to, origin = self._table.rank(here, sent.to), self._table.rank(here, sent.to, back=True)",
          "origin, to = self._table.rank(here, sent.to), self._table.rank(here, sent.to, back=True)"),),
    ),
    "a label counts from this rank's own first key": Bug(
        ((SWEEP, "    return call.labels", "    return layout.key_offset(layout.rank) + call.labels"),),
        loss="infonce",
    ),
    "a shard's keys are numbered from zero": Bug(
        ((GROUP, "return sum(self.keys[:owner])", "return 0"),), loss="infonce"
    ),
}  # fmt: skip

OTHER_BUGS: dict[str, tuple[Edit, ...]] = {
    "mismatched ranks are not noticed": ((AGREEMENT, "if problem is not None:", "if False:"),),
    "a group of one sends to itself": ((GROUP, "if dist.get_world_size(process_group) == 1:", "if False:"),),
}


@pytest.fixture(scope="module")
def pool(packages: Packages, folder_of: Callable[[ModuleType], Path]) -> Iterator[Pool]:
    pool = Pool(4, folder_of(packages("clip")).parent, timeout_s=10)
    yield pool
    pool.close()


Planted = Callable[[str, str, tuple[Edit, ...]], str]


@pytest.mark.parametrize("name", some(BUGS))
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
