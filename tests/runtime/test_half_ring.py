"""A triangle over ranks: of two one computes their pairs, or each its share, and sums of visiting rows go home."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

import infcl_gen
from infcl_gen.losses import BUILTIN_LOSSES
from infcl_gen.runtime.table import Table
from infcl_gen.verification.oracle import Inputs, LossAndGrads
from infcl_gen.verification.properties import neighbours
from infcl_gen.verification.worker import averaged
from tests.runtime.in_process import World, table_of
from tests.runtime.test_triangle import DIM, features, labels_of
from tests.tiers import LONG, combined, nightly, some
from tests.verification.dense import dense

OWN = Path(__file__).parent.parent / "kernels" / "losses.py"
# Labels; positives left out of sums; a second log-sum-exp; a logit that is not affine; the sum of the positive; other
# pairs left out; ids.
LOSSES = ("ntxent", "dcl", "hard_negative", "capped_of_rows", "four_block", "three_block", "supcon_out", "supcon_in")
IN_PAIRS = ("four_block", "three_block")
SHARDS = ([40, 24], [0, 26], [24, 0, 17], [16, 33, 0, 25], [12, 30, 5, 0, 21])
WAYS = {
    "ring": {"transport": "ring"},
    "ring that keeps": {"transport": "ring", "keeps": True},
    "gather": {"transport": "gather"},
    "ring over nodes": {"transport": "ring", "nodes": True},
}


@functools.cache
def package(loss: str) -> ModuleType:
    """In fp64, by panels of 16 rows."""
    name = loss if loss in BUILTIN_LOSSES else f"{OWN}:{loss}"
    module = infcl_gen.load(loss=name, batch_size=120, dim=DIM, dtype="fp64", target="cpu")
    for constant in ("FORWARD_ROWS", "FORWARD_KEYS", "PANEL_ROWS", "PANEL_KEYS", "FINISH_ROWS"):
        setattr(module._schedule, constant, 16)
    return module


def planned(module: ModuleType, world: int, transport: str, keeps: bool = False, nodes: bool = False) -> Table:
    """Over nodes of two devices where `nodes`, and of one device if there are an odd number of ranks."""
    table = table_of(module, transport, world, keeps)
    devices = 1 if world % 2 else 2
    return dataclasses.replace(table, nodes=world // devices, devices_per_node=devices) if nodes else table


def whole(loss: str, rows: int) -> Inputs:
    """Positives are on any ranks, those of rows in pairs on the own."""
    q, scale, bias = features(rows, "fp64"), 3.0, -0.5
    if loss.startswith("supcon"):
        return Inputs(q, None, scale, bias, None, torch.arange(rows) * 7 % (rows // 3))
    return Inputs(q, None, scale, bias, neighbours(rows) if loss in IN_PAIRS else labels_of(rows, "any"))


def over_ranks(loss: str, shards: Sequence[int], calls: int = 2, **way: Any) -> tuple[LossAndGrads, LossAndGrads]:
    """The average of what the ranks find, and the formula by hand. All calls give the same bits."""
    module, world, given = package(loss), len(shards), whole(loss, sum(shards))
    first = [0, *itertools.accumulate(shards)]

    def job(rank: int) -> list[Any]:
        part = slice(*first[rank : rank + 2])
        own = given.of_rank(part, part)
        found, *more = (module.loss_and_grads(*own[:4], **own.given) for _ in range(calls))
        for one, other in itertools.product(range(len(found)), more):
            assert found[one] is None or torch.equal(found[one], other[one])
        return list(found)

    tables = {world: planned(module, world, **way)}
    found = averaged(World(module, world, tables=tables, seed=sum(shards)).run(job))
    return found, dense(loss, *given)


def check(loss: str, shards: Sequence[int], **way: Any) -> None:
    found, truth = over_ranks(loss, shards, **way)
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"{loss}, {shards}, {way}: {name}")


def even(loss: str, shards: Sequence[int]) -> list[int]:
    """Where positives are on the own rank it has whole pairs."""
    return [rows // 2 * 2 for rows in shards] if loss in IN_PAIRS else list(shards)


@pytest.mark.parametrize(
    ("loss", "way"),
    nightly(itertools.product(LOSSES, WAYS), [*itertools.product(["ntxent"], WAYS), *combined(LOSSES[1:], WAYS)]),
)
def test_it_is_the_formula_by_hand(loss: str, way: str) -> None:
    """Over uneven and empty ranks, of which the positives are on any other; the same bits each time.

    In CI one loss over all ranks in each way, and each of the others over some in one."""
    place = LOSSES.index(loss) + list(WAYS).index(way)
    for shards in SHARDS if LONG or loss == "ntxent" else [SHARDS[place % len(SHARDS)]]:
        check(loss, even(loss, shards), **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_each_pair_is_computed_once(way: str) -> None:
    """In forward and in backward, by the blocks that the sweep gets; with one scratch for all hops."""
    module, shards = package("ntxent"), [40, 16, 0, 25]
    schedule, calls = module._schedule, Counter[tuple[str, int, int]]()

    def noting(phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(block: Any, *arguments: Any, **named: Any) -> Any:
            rows, keys = (range(n, n + len(x)) for n, x in ((block.first_query, block.q), (block.first_key, block.k)))
            pairs = itertools.combinations(rows, 2) if block.own else itertools.product(rows, keys)
            calls.update((phase, *sorted(pair)) for pair in pairs)
            return work(block, *arguments, **named)

        return noted

    with (
        mock.patch.object(schedule, "forward_block", noting("forward", schedule.forward_block)),
        mock.patch.object(schedule, "backward_block", noting("backward", schedule.backward_block)),
        mock.patch.object(schedule, "backward_scratch", side_effect=schedule.backward_scratch) as scratch,
    ):
        check("ntxent", shards, **WAYS[way])
    pairs = [(phase, *pair) for phase in ("forward", "backward") for pair in itertools.combinations(range(81), 2)]
    assert calls == dict.fromkeys(pairs, 2)  # of two calls
    assert scratch.call_count == 2 * 3  # and of three ranks with rows


def test_a_rank_with_few_rows_has_no_share() -> None:
    """Of so few rows the half is none, or all."""
    for way, shards in itertools.product(WAYS.values(), ([3, 5], [2, 1, 1, 3], [4, 4, 40, 4])):
        check("ntxent", shards, **way)


def _skip(*given: Any) -> None:
    """Sums of statistics that are not added."""


def _twice(add: Callable[..., None]) -> Callable[..., None]:
    def twice(*given: Any) -> None:
        add(*given)
        add(*given)

    return twice


def _others(change: Callable[[Sequence[Any]], Sequence[Any]], others: Callable[..., Any]) -> Callable[..., Any]:
    return lambda trip, name: change(others(trip, name)) if name == "key gradients" else others(trip, name)


BUGS: dict[str, tuple[str, Callable[[Any, Any, Any], tuple[Any, str, Any]]]] = {
    "both compute the first half": (
        "dq",
        lambda table, triangle, trip: (
            table.Step, "share", lambda step, rank, owner, m, n, share=table.Step.share: (
                share(step, rank, owner, m, n)._replace(key=0)
            ),
        ),
    ),
    "both compute all": (
        "loss",
        lambda table, triangle, trip: (table.Step, "share", lambda step, rank, owner, m, n: table.Share(0, m, 0, n)),
    ),
    "column statistics are not sent home": ("loss", lambda table, triangle, trip: (triangle, "add", _skip)),
    "column statistics are added twice": (
        "loss", lambda table, triangle, trip: (triangle, "add", _twice(triangle.add)),
    ),
    "gradients of visitors are not sent home": (
        "dq",
        lambda table, triangle, trip: (trip, "others", _others(lambda sums: [], trip.others)),
    ),
    "gradients of visitors are added twice": (
        "dq",
        lambda table, triangle, trip: (trip, "others", _others(lambda sums: [*sums, *sums], trip.others)),
    ),
    "sums for visitors begin with what was there": (
        "loss", lambda table, triangle, trip: (triangle, "begin", lambda sums, traits: sums.fill_(1.0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("bug", "way"), combined(some(BUGS, len(WAYS)), WAYS))
def test_a_planted_bug_is_noticed(monkeypatch: pytest.MonkeyPatch, bug: str, way: str) -> None:
    wrong, plant = BUGS[bug]
    module, shards = package("ntxent"), [40, 24]
    check("ntxent", shards, **WAYS[way])
    table, triangle, transport = (
        importlib.import_module(f"{module.__name__}._runtime.{name}") for name in ("table", "triangle", "transport")
    )
    monkeypatch.setattr(*plant(table, triangle, transport.Trip))
    found, truth = over_ranks("ntxent", shards, 1, **WAYS[way])  # which may be NaN
    results = zip(truth._fields, found, truth, strict=True)
    off = {name for name, ours, theirs in results if theirs is not None and not ours.isclose(theirs).all()}
    assert wrong in off, off
