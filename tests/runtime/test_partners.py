"""Losses of one side whose terms have the sum of the other row of a pair, too, on the CPU target."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import infcl_gen
from infcl_gen.losses import BUILTIN_LOSSES
from infcl_gen.runtime.traits import Traits
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import apart_from_thresholds, neighbours, tensors
from infcl_gen.verification.worker import averaged
from tests.runtime.in_process import World, table_of
from tests.runtime.test_triangle import DIM, features, in_panels, labels_of, passes_its_selftest
from tests.tiers import combined, nightly, some
from tests.verification.dense import dense

LOSSES = ("four_block", "weighed_by_partner", "three_block", "four_block_apart", "of_queries_alone", "near_rows")
OWN = Path(__file__).parent.parent / "kernels" / "losses.py"


@functools.cache
def package(loss: str, dtype: str = "fp64") -> ModuleType:
    """In panels of eight rows."""
    name = loss if loss in BUILTIN_LOSSES else f"{OWN}:{loss}"
    return in_panels(infcl_gen.load(loss=name, batch_size=64, dim=DIM, dtype=dtype, target="cpu"))


def as_defined(module: ModuleType, loss: str, rows: int, kind: str, scale: float, distinct: int | None = None) -> None:
    """Loss and all gradients in fp64 are those of the formula by hand, of rows of which so many are `distinct`."""
    q, labels = features(rows, "fp64"), labels_of(rows, kind)
    q = q[torch.arange(rows) % (distinct or rows)]
    found, truth = module.loss_and_grads(q, None, scale, -0.5, labels=labels), dense(loss, q, None, scale, -0.5, labels)
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12 + 1e-14 * scale, msg=f"{rows} rows: {name}")


@pytest.mark.parametrize(("loss", "scale"), combined(LOSSES, [1e-3, 2.0, 14.3, 1000.0]))
def test_it_is_the_formula_by_hand(loss: str, scale: float) -> None:
    for rows, kind in itertools.product((4, 6, 22), ("halves", "pairs")):
        as_defined(package(loss), loss, rows, kind, scale)


def test_no_derivative_is_nan_where_all_negatives_of_a_pair_are_left_out() -> None:
    """Planted: the derivative of a sum of nothing, which was cleared after torch's search for NaN had seen it."""
    module = infcl_gen.load(loss="three_block_hard", batch_size=64, dim=DIM, dtype="fp64", target="cpu")
    q = features(8, "fp64")
    negatives = q[:4, None].expand(4, 2, DIM).clone()  # as near as can be
    negatives[0] = -q[0]
    leaves = [x.detach().requires_grad_() for x in (q, negatives)]
    with torch.autograd.set_detect_anomaly(True):
        module.contrastive_loss(leaves[0], None, 5.0, negatives=leaves[1]).backward()
    truth = [x.detach().requires_grad_() for x in leaves]
    module.reference(truth[0], None, 5.0, negatives=truth[1]).backward()
    for ours, theirs in zip(leaves, truth, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("loss", "dtype"), combined(LOSSES, ["bf16", "fp32"]))
def test_as_accurate_as_the_dtypes_allow(loss: str, dtype: str) -> None:
    for rows, scale in itertools.product((2, 6, 22), (1000.0, 1e-3, 14.3)):
        module, labels = package(loss, dtype), labels_of(rows, "pairs")
        inputs = Inputs(features(rows, dtype), None, scale, -1.0, labels)
        if Traits(**module.SPEC["loss"]["traits"]).thresholds:
            inputs = apart_from_thresholds(module, inputs)
        judged = gate(module.loss_and_grads(*inputs[:4], labels=labels), truth_of(module, inputs))
        assert not failures(judged), failures(judged)
    assert passes_its_selftest(package(loss, dtype))


def test_a_batch_of_one_pair() -> None:
    """The paper's Z has the positive twice. Without negatives the other loss is 0."""
    loss, dq, _, dscale, dbias = package("four_block").loss_and_grads(features(2, "fp64"), None, 14.3, 0.5)
    assert float(loss) == pytest.approx(math.log(2.0), abs=1e-12)
    assert not bool(dq.any()) and (float(dscale), float(dbias)) == (0, 0)
    loss, dq, *_ = package("weighed_by_partner").loss_and_grads(features(2, "fp64"), None, 14.3)
    assert float(loss) == 0 and not bool(dq.any())


@pytest.mark.parametrize("loss", ["three_block", "four_block_apart", "near_rows"])
def test_rows_that_occur_more_than_once(loss: str) -> None:
    """A query whose document is another's, too, has it among the others: it is no nearer than its own."""
    for distinct in (1, 2, 7, 11):
        as_defined(package(loss), loss, 22, "halves", 2.0, distinct)


def test_others_that_are_all_above_the_threshold_leave_the_pair_alone() -> None:
    """Rows of a pair are far from each other, and all others are nearer: the loss is 0, and nothing has a gradient."""
    apart = 5 * torch.eye(DIM, dtype=torch.float64)[1:]
    q = torch.cat([apart, -apart])
    q[:, 0] = 1.0
    for loss in ("three_block", "four_block_apart", "near_rows"):
        found, dq, _, dscale, dbias = package(loss).loss_and_grads(q, None, 14.3, 0.5)
        assert float(found) == 0 and not bool(dq.any()) and (float(dscale), float(dbias)) == (0, 0)


SHARDS = ([6, 0, 10], [2, 2], [0, 12], [8, 4, 0, 10])


@pytest.mark.parametrize(("loss", "transport"), combined(LOSSES, ["ring", "gather"]))
def test_over_ranks(loss: str, transport: str) -> None:
    """Uneven and empty ranks: the average of their results is that of the formula by hand."""
    module = package(loss)
    for shards in nightly(SHARDS, SHARDS[::3]):
        world, rows = len(shards), sum(shards)
        table = table_of(module, transport, world)
        q, labels = features(rows, "fp64"), neighbours(rows)

        def job(rank: int, q: Tensor = q, labels: Tensor = labels, shards: list[int] = shards) -> list[Any]:
            own, named = q.split(shards)[rank], labels.split(shards)[rank]
            found = module.loss_and_grads(own, None, 3.0, -1.0, labels=named)
            leaf = own.clone().requires_grad_()
            (dq,) = torch.autograd.grad(module.contrastive_loss(leaf, None, 3.0, -1.0, labels=named), leaf)
            assert torch.equal(dq, found[1])
            return list(found)

        found = averaged(World(module, world, tables={world: table}, seed=rows).run(job))
        truth = dense(loss, q, None, 3.0, -1.0, labels=labels)
        for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"{shards}: {name}")


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_over_processes(over_processes: Callable[..., None], transport: str) -> None:
    draw = functools.partial(tensors, positives="label", one_sided=True, mutual=True)
    for rows in ([2, 4, 6], [6, 0, 4]):
        over_processes("four_block", transport, rows, draw)


ALONE = r"takes pairs of rows of one rank, of which labels\[i\] = j and labels\[j\] = i, but row {} is in none"
WRONG = {  # labels of four rows on rank 0 and two on rank 1, and the row that is named; which rank's loss is NaN
    "not mutual": ([1, 2, 3, 2, 5, 4], "0 on rank 0", 0),
    "of another rank": ([1, 0, 3, 4, 2, 5], "2 on rank 0", 0),
    "mutual over ranks": ([1, 0, 4, 5, 2, 3], "2 on rank 0", 0),
    "itself": ([1, 0, 3, 2, 4, 5], "4 on rank 1", 1),
}


@pytest.mark.parametrize("case", WRONG)
def test_rows_without_a_partner_are_refused_and_give_nan_where_labels_are_not_looked_at(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every rank. Labels on a device are looked at once."""
    labels, row, rank_of_row = WRONG[case]
    module, shards, q = package("four_block"), [4, 2], features(6, "fp64")

    def refused(rank: int) -> None:
        with pytest.raises(ValueError, match=ALONE.format(row)):
            module.contrastive_loss(q.split(shards)[rank], None, labels=torch.tensor(labels).split(shards)[rank])

    World(module, 2).run(refused)
    monkeypatch.setattr(
        importlib.import_module(f"{module.__name__}._runtime.agreement"), "_label_range", lambda *_: (0, -1)
    )

    def unseen(rank: int) -> list[bool]:
        found = module.loss_and_grads(q.split(shards)[rank], None, labels=torch.tensor(labels).split(shards)[rank])
        return [bool(found[0].isnan()), bool(found[1].isnan().all())]

    found = World(module, 2).run(unseen)
    assert found[rank_of_row][0] and found[0][1] and found[1][1]


def test_alone_an_odd_number_of_rows_has_no_pairs() -> None:
    with pytest.raises(ValueError, match=ALONE.format(4)):
        package("four_block").contrastive_loss(features(5, "fp64"), None, labels=torch.tensor([1, 0, 3, 2, 0]))
    with pytest.raises(ValueError, match="views of one sample, but there are 5 rows"):
        package("four_block").contrastive_loss(features(5, "fp64"), None)


def test_what_is_not_finite_stays_so() -> None:
    q = features(22, "fp64")
    q[5, 3] = torch.nan
    loss, dq, _, dscale, dbias = package("four_block").loss_and_grads(q, None, 14.3)
    assert loss.isnan() and dscale.isnan() and dbias.isnan() and dq.isnan().all()


NOTED, WEIGHTED = "block.queries.{}[at]", "        positive[3, rows] = term\n"
COLUMN_SIDES = "(rows == other)[:, None], columns == own"
BUGS = {  # the loss, and what is replaced in its schedule by what
    "the other row is the next one": ("four_block", "places[rows] - first", "(places[rows] + 2) % 22 - first"),
    "the sum is that of the row itself": ("four_block", NOTED.format("mantissa"), "block.queries.mantissa[rows]"),
    "its exponent is that of the row itself": ("four_block", NOTED.format("exponent"), "block.queries.exponent[rows]"),
    "sums are noted after some have weights": (
        "weighed_by_partner", WEIGHTED, f"{WEIGHTED}        note_partners_(block)\n"
    ),
    "thresholds of columns are those of rows": (
        "three_block", "z, block.key_thresholds, out", "z, block.thresholds[:, None], out"
    ),
    "documents are compared with queries, and not the reverse": (
        "three_block", "((False, True),)", "((True, False),)"
    ),
    "sides of columns are those of rows": (
        "of_queries_alone", COLUMN_SIDES, "(rows == own)[:, None], columns == other"
    ),
    "positives are left out": ("near_rows", "of_columns[positives] = False", "of_columns[positives] = True"),
    "the gradient has what the sums leave out": (
        "three_block", "softmaxes_(z, g, part, of_rows, of_columns)",
        "softmaxes_(z, g, part, of_rows & False, of_columns & False)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", some(BUGS))
def test_planted_bugs_are_noticed(with_bug: Callable[..., ModuleType], bug: str) -> None:
    loss, *edit = BUGS[bug]
    wrong = in_panels(with_bug(package(loss), bug, *edit))
    with pytest.raises(AssertionError):
        as_defined(wrong, loss, 22, "pairs", 2.0)
