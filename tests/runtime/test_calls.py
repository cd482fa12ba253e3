"""Calls of one group, one after the other: what a rank does before it knows of the others' sizes, and when they change.

As test_in_process.py: threads of one process, over a transport that forgives nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infcl_gen.planning.schedule import gather_schedule, ring_schedule
from tests.kernels.tiers import examples

from .in_process import Ring, World, current_rank
from .test_in_process import (
    LOSSES,
    MORE_THAN_A_PANEL,
    Batch,
    Packages,
    Results,
    batches,
    check_against_reference,
    step,
)
from .test_planted_bugs import ENGINE, Planted


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_a_rank_begins_before_autograd_is_asked_and_the_others_are_heard(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """From the second call of the same sizes on; in the first it must hear theirs before. Nothing is sent earlier."""
    package = packages("clip")
    ops = importlib.import_module(f"{package.__name__}._runtime.ops")
    orders: dict[int, list[str]] = {0: [], 1: []}

    def noting(where: Any, name: str) -> None:
        inner = getattr(where, name)

        def noted(*args: Any, **options: Any) -> Any:
            orders[current_rank()].append(name)
            given = inner(*args, **options)
            return heard(given) if name == "ask" else given

        monkeypatch.setattr(where, name, noted)

    def heard(answers: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (answers(), orders[current_rank()].append("heard"))[0]

    def job(rank: int) -> list[list[str]]:
        found = []
        for _ in range(2):
            orders[rank].clear()
            q, k = (torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
            module(q, k, 2.0)
            found.append(orders[rank][: orders[rank].index("post") + 1])
        return found

    module = package.ContrastiveLoss()
    noting(package.ContrastiveLoss._package.schedule, "start_forward")
    noting(ops._Loss, "apply")
    noting(Ring, "ask")
    noting(Ring, "post")
    schedule = gather_schedule(2, True) if transport == "gather" else ring_schedule(2, 1, True, True)
    world = World(package, 2, schedules={2: schedule})
    for first, second in world.run(job):
        assert first == ["ask", "heard", "start_forward", "apply", "post"]
        assert second == ["ask", "start_forward", "apply", "heard", "post"]


@st.composite
def calls(draw: st.DrawFn, loss: str) -> list[Batch]:
    """Of one group, one after the other: sizes as before, others on one rank, on two, or on all."""
    members = range(draw(st.integers(2, 5)))
    nodes, keeps = draw(st.sampled_from((0, 1))), draw(st.booleans())
    found = [draw(batches(loss, members, nodes, keeps))]
    for change in draw(st.lists(st.sampled_from(("none", "one", "two", "all")), min_size=1, max_size=4)):
        rows, keys = list(found[-1].rows), list(found[-1].keys)
        rank, other = (draw(st.integers(0, len(members) - 1)) for _ in range(2))
        if change == "one":
            more = draw(st.sampled_from((1, MORE_THAN_A_PANEL)))
            rows[rank], keys[rank] = rows[rank] + more, keys[rank] + more
        elif change == "two":  # sums of all ranks are as before
            rows[rank], rows[other] = rows[other], rows[rank]
            keys[rank], keys[other] = keys[other], keys[rank]
        again = dataclasses.replace(
            found[-1], rows=tuple(rows), keys=tuple(keys), seed=draw(st.integers(0, 99))
        )
        found.append(draw(batches(loss, members, nodes, keeps)) if change == "all" else again)
    return found


def check_calls(package: ModuleType, batches: Sequence[Batch], turns: int) -> None:
    """From the second call on a rank begins before it knows of the others' sizes."""
    size = len(batches[0].members)
    has_keys = package.ContrastiveLoss._package.loss.HAS_KEYS
    tensors = [batch.tensors(package.SPEC["problem"]["dim"]) for batch in batches]

    def job(rank: int) -> Results:
        return [step(package, batch, given, rank, "") for batch, given in zip(batches, tensors, strict=True)]

    world = World(package, size, seed=turns, schedules={size: batches[0].schedule(has_keys)})
    for batch, *results in zip(batches, *world.run(job), strict=True):
        check_against_reference(package, batch, results)


@pytest.mark.parametrize("loss", LOSSES)
@examples(ci=30, long=300)
@given(data=st.data(), turns=st.integers(0, 2**31))
def test_calls_of_other_sizes(packages: Packages, loss: str, data: st.DataObject, turns: int) -> None:
    check_calls(packages(loss, batch_size=1024), data.draw(calls(loss)), turns)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("self._begin(self._agreed.layout(), agree=None)", "self._begin(self._layout, agree=None)"),
        ("guess is not None and (guess.rows[ring.rank], guess.keys[ring.rank]) == (len(q), len(k))",
         "guess is not None"),
        ("(guess.rows[ring.rank], guess.keys[ring.rank]) == (len(q), len(k))", "guess.rows[ring.rank] == len(q)"),
    ],
    ids=["the second attempt is of the old sizes", "own sizes are guessed", "own keys are guessed"],
)  # fmt: skip
def test_a_wrong_guess_of_sizes_is_noticed(
    packages: Packages, planted: Planted, right: str, wrong: str
) -> None:
    first = Batch((0, 1, 2), (5, 2, 3), (5, 2, 3))
    others = dataclasses.replace(first, rows=(9, 2, 3), keys=(9, 2, 3))
    elsewhere = dataclasses.replace(first, rows=(9, 2, 3), keys=(1, 2, 11))
    check_calls(packages("clip"), [first, others, elsewhere], turns=1)
    name = planted(wrong, "clip", ((ENGINE, right, wrong),))
    with pytest.raises((AssertionError, RuntimeError)):
        check_calls(importlib.import_module(name), [first, others, elsewhere], turns=1)
