"""Losses with any number of positives of a query, on the CPU target: against formulas by hand, alone and over ranks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import infcl_gen
from infcl_gen.losses import BUILTIN_LOSSES
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import tensors
from infcl_gen.verification.worker import averaged
from tests.runtime.in_process import World, table_of
from tests.runtime.test_triangle import DIM, features, in_panels, passes_its_selftest
from tests.tiers import combined, in_pairs, nightly, some
from tests.verification.dense import dense

OF_ROWS, OF_TWO_SIDES = ("supcon_out", "supcon_in"), ("infonce_out", "infonce_in")
LOSSES = (*OF_ROWS, *OF_TWO_SIDES)
SCALES = (1e-3, 14.3, 1000.0)
# Of so many rows: several of each id beside some that are alone, one id for all, none twice, two, and ids whose low
# halves are equal.
IDS = {
    "some": lambda rows: torch.arange(rows) * 7 % (rows // 2 + 1) // 2,
    "one": lambda rows: torch.full((rows,), -3),
    "apart": lambda rows: torch.arange(rows),
    "halves": lambda rows: torch.arange(rows) % max(1, rows // 2),
    "high": lambda rows: torch.arange(rows) % 3 << 40,
}


@functools.cache
def package(loss: str, dtype: str = "fp64") -> ModuleType:
    """In panels of eight rows."""
    return in_panels(infcl_gen.load(loss=loss, batch_size=64, dim=DIM, dtype=dtype, target="cpu"))


def inputs(loss: str, rows: int, kind: str, scale: float, dtype: str = "fp64") -> Inputs:
    """Of two sides there are three more keys, with the ids of the first ones."""
    q, ids = features(rows, dtype), IDS[kind](rows)
    if loss in OF_ROWS:
        return Inputs(q, None, scale, -0.5, None, ids)
    keys = features(rows + 3, dtype)
    return Inputs(q, keys, scale, -0.5, None, ids, torch.cat([ids[:3], ids.flip(0)])[: rows + 3])


def as_defined(module: ModuleType, loss: str, given: Inputs) -> None:
    """Loss and all gradients in fp64 are those of the formula by hand."""
    found, truth = module.loss_and_grads(*given[:4], **given.given), dense(loss, *given)
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11, msg=f"{loss}, {len(given.q)} rows: {name}")


@pytest.mark.parametrize(("loss", "kind", "scale"), in_pairs(LOSSES, IDS, SCALES))
def test_it_is_the_formula_by_hand(loss: str, kind: str, scale: float) -> None:
    for rows in (3, 6, 22):
        as_defined(package(loss), loss, inputs(loss, rows, kind, scale))


@pytest.mark.parametrize(("loss", "dtype"), combined(LOSSES, ["bf16", "fp16", "fp32"]))
def test_as_accurate_as_the_dtypes_allow(loss: str, dtype: str) -> None:
    for rows, kind, scale in in_pairs((22, 6), IDS, SCALES):
        module, given = package(loss, dtype), inputs(loss, rows, kind, scale, dtype)
        judged = gate(module.loss_and_grads(*given[:4], **given.given), truth_of(module, given))
        assert not failures(judged), failures(judged)
    assert passes_its_selftest(package(loss, dtype))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_row_without_positives_adds_nothing_and_counts(loss: str) -> None:
    """It has no gradient of its own; that of a negative of others it has."""
    given = inputs(loss, 6, "apart", 3.0)
    given = given._replace(key_ids=None if given.k is None else 10 + torch.arange(9))
    for value in package(loss).loss_and_grads(*given[:4], **given.given):
        assert value is None or not bool(value.any())
    pair = given._replace(query_ids=torch.tensor([0, 0, 1, 2, 3, 4]))
    pair = pair._replace(key_ids=None if pair.k is None else torch.tensor([0, *range(10, 18)]))
    loss_of_all, dq, *_ = package(loss).loss_and_grads(*pair[:4], **pair.given)
    others = pair.q if pair.k is None else pair.k
    x = 3.0 * pair.q[:2] @ others.T
    x[0, 0] = -math.inf if pair.k is None else x[0, 0]
    x[1, 1] = -math.inf if pair.k is None else x[1, 1]
    at = (1, 0) if pair.k is None else (0, 0)
    torch.testing.assert_close(loss_of_all, sum(x[i].logsumexp(0) - x[i, at[i]] for i in range(2)) / 6)
    assert bool(dq[2:].any()) == (pair.k is None)


@pytest.mark.parametrize("loss", LOSSES)
def test_positives_that_are_alike_share_the_softmax(loss: str) -> None:
    """Of a batch of one row again and again the loss is log of the number of keys, and no gradient is left."""
    q, ids = features(1, "fp32").expand(22, DIM), torch.zeros(22, dtype=torch.int64)
    k, given = (None, {}) if loss in OF_ROWS else (q, {"key_ids": ids})
    value, dq, *_ = package(loss, "fp32").loss_and_grads(q, k, 14.3, query_ids=ids, **given)
    assert float(value) == pytest.approx(math.log(21 if k is None else 22), rel=1e-6)
    assert float(dq.norm()) < 1e-5


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_not_finite_stays_so(loss: str) -> None:
    """In a row with positives and in one without; of two sides the gradients of other queries hold it by the keys."""
    for row in (5, 21):
        given = inputs(loss, 22, "some", 14.3)
        ids = given.query_ids.clone()
        ids[21] = 99
        q = given.q.clone()
        q[row, 3] = torch.nan
        value, dq, *_, dscale, _ = package(loss).loss_and_grads(q, *given[1:4], **given.given | {"query_ids": ids})
        assert value.isnan() and dscale.isnan() and dq[row].isnan().all()
        assert loss in OF_TWO_SIDES or dq.isnan().all()


SHARDS = ([6, 0, 10], [2, 2], [0, 12], [5, 3, 7], [1, 1], [1, 2, 3], [3, 0, 1, 2])


def over_ranks(module: ModuleType, loss: str, transport: str, shards: list[int], kind: str) -> None:
    """The average of the ranks' results is that of the formula by hand; autograd gives the same gradient."""
    world, rows = len(shards), sum(shards)
    table = table_of(module, transport, world)
    whole = inputs(loss, rows, kind, 3.0)
    if whole.k is not None and whole.key_ids is not None:
        whole = whole._replace(k=whole.k[:rows], key_ids=whole.key_ids[:rows])
    offsets = [0, *itertools.accumulate(shards)]

    def job(rank: int) -> list[Any]:
        part = slice(*offsets[rank : rank + 2])
        own = whole.of_rank(part, part)
        found = module.loss_and_grads(*own[:4], **own.given)
        leaf = own.q.clone().requires_grad_()
        (dq,) = torch.autograd.grad(module.contrastive_loss(leaf, *own[1:4], **own.given), leaf)
        assert torch.equal(dq, found[1])
        return list(found)

    found = averaged(World(module, world, tables={world: table}, seed=rows).run(job))
    truth = dense(loss, *whole)
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"{shards}: {name}")


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("loss", LOSSES)
def test_over_ranks(loss: str, transport: str) -> None:
    """Uneven and empty ranks; rows whose positives are all on other ranks, and rows without any."""
    for shards, kind in combined(nightly(SHARDS, SHARDS[::3]), ("some", "halves", "one")):
        over_ranks(package(loss), loss, transport, shards, kind)


@pytest.mark.parametrize(("loss", "transport", "rows"), in_pairs(LOSSES, ["ring", "gather"], [(1, 2, 3), (7, 0, 4)]))
def test_over_processes(over_processes: Callable[..., None], loss: str, transport: str, rows: tuple[int, ...]) -> None:
    """On gloo: the average of the ranks is the formula by hand."""
    draw = functools.partial(tensors, positives="id", with_ids=True, one_sided=loss in OF_ROWS)
    over_processes(loss, transport, list(rows), draw)


def test_ways_of_calling_agree() -> None:
    """The module, the loss without sizes, a compiled call, ids of any stride, and an upstream gradient."""
    q, module, ids = features(22, "fp32"), package("supcon_in", "fp32"), IDS["some"](22)
    loss, dq, *_ = module.loss_and_grads(q, None, 14.3, query_ids=ids)
    assert torch.equal(loss, module.ContrastiveLoss()(q, None, 14.3, query_ids=torch.stack([ids, ids], 1)[:, 0]))
    torch.testing.assert_close(loss, infcl_gen.ContrastiveLoss("supcon_in")(q, None, 14.3, query_ids=ids))
    leaf = q.clone().requires_grad_()
    run = torch.compile(
        lambda x: module.contrastive_loss(x, None, 14.3, query_ids=ids), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(dq, torch.autograd.grad(run(leaf), leaf)[0])
    tripled = torch.autograd.grad(4 * module.contrastive_loss(leaf, None, 14.3, query_ids=ids), leaf)[0]
    assert torch.equal(4 * dq, tripled)


BAD_CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("supcon_out", {}, r"^supcon_out needs query_ids: query_ids must be an int64 tensor of shape \(6,\) on cpu$"),
    ("supcon_out", {"query_ids": torch.arange(6), "key_ids": torch.arange(6)},
     "^query_ids are the ids of both sides in supcon_out: key_ids must be None$"),
    ("supcon_in", {"query_ids": torch.arange(6), "labels": torch.arange(6)},
     "^the positives of supcon_in are the rows of a row's id: it takes no labels$"),
    ("supcon_in", {"query_ids": torch.arange(5)}, r"not torch.int64 of shape \(5,\)$"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "given", "why"), BAD_CALLS)
def test_calls_that_are_refused(loss: str, given: dict[str, Any], why: str) -> None:
    for call in (package(loss).contrastive_loss, package(loss).loss_and_grads):
        with pytest.raises(ValueError, match=why) as error:
            call(features(6, "fp64"), None, 2.0, **given)
        assert "\n" not in str(error.value)


OWN = """
from infcl_gen.losses.language import *

X = 20 * tanh(scale * similarity("query", "query") / 20) + bias
ALL = logsumexp_over_keys(X, where=1 - is_self)
POSITIVES = logsumexp_over_keys(X, where=(1 - is_self) * is_positive)
CAPPED = LossSpec("capped", mean_over_queries(ALL - mean_over_positives(X)), "id")
ROOTS = LossSpec("roots", mean_over_queries(query_weight * exp((ALL - POSITIVES) / 2) / positives_of_query), "id")
"""


@pytest.mark.parametrize("name", ["CAPPED", "ROOTS"])
def test_a_loss_of_ones_own(name: str, tmp_path: Path) -> None:
    """A logit that is not affine; weights of rows, and a term that is not linear and has the number of positives."""
    (tmp_path / "own.py").write_text(OWN)
    load = functools.partial(infcl_gen.load, loss=f"{tmp_path}/own.py:{name}", batch_size=64, dim=DIM, target="cpu")
    q, draw = features(22, "fp64").requires_grad_(), torch.Generator().manual_seed(3)
    weight = (torch.rand(22, generator=draw, dtype=torch.float64) - 0.3).requires_grad_()
    own = {"query_weight": weight} if name == "ROOTS" else {}
    for kind in IDS:
        ids, module = IDS[kind](22), in_panels(load(dtype="fp64"))
        loss = module.contrastive_loss(q, None, 3.0, query_ids=ids, **own)
        x = 20 * torch.tanh(3.0 * (q @ q.T) / 20)
        terms = []
        for i in range(22):
            others = [j for j in range(22) if j != i]
            positives = [j for j in others if ids[j] == ids[i]]
            if not positives:
                continue
            ratio = x[i, others].exp().sum() / x[i, positives].exp().sum()
            of_mean = x[i, others].logsumexp(0) - x[i, positives].mean()
            terms.append(of_mean if name == "CAPPED" else weight[i] * ratio.sqrt() / len(positives))
        truth = (torch.stack(terms).sum() if terms else 0.0 * (q.sum() + weight.sum())) / 22
        torch.testing.assert_close(loss, truth)
        wanted = [q, *own.values()]
        found, expected = (torch.autograd.grad(each, wanted, retain_graph=True) for each in (loss, truth))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        narrow = load(dtype="fp32")
        given = Inputs(q.detach().float(), None, 14.3, -1.0, None, ids, None, *(x.detach() for x in own.values()))
        judged = gate(narrow.loss_and_grads(*given[:4], **given.given), truth_of(narrow, given))
        assert not failures(judged), failures(judged)


# The loss, and what is replaced in its schedule by what.
BUGS = {
    "a row is its own positive": ("supcon_out", "same_id.diagonal(first).fill_(False)", "pass"),
    "columns have no positives": ("supcon_out", "add_positives_(part, x2, e, 0)", "pass"),
    "positives are counted twice": ("supcon_in", "+= same_id.sum(axis)", "+= 2 * same_id.sum(axis)"),
    "counts of positives are not cleared": ("infonce_out", "block.positive[:2].zero_()", "block.positive[:2].fill_(1)"),
    "the mean is a sum": ("supcon_out", "(LOG2E * n)", "LOG2E"),
    "each positive has the whole slope": ("infonce_out", "slope / n", "slope"),
    "a row without positives has a weight": ("supcon_in", "torch.where(found, part, r * 0.0)", "part"),
    "a pair has the slope of one side": (
        "supcon_out", "strip.positive[0][:, None] + strip.key_positive[0]", "strip.positive[0][:, None] + 0 * g[rows]",
    ),
    "all keys share the positives' softmax": ("infonce_in", "shares.masked_fill_(others, 0.0)", "shares"),
    "the diagonal has a gradient": ("supcon_in", "g.fill_diagonal_(0.0)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("bug", some(BUGS))
def test_planted_bugs_are_noticed(with_bug: Callable[..., ModuleType], bug: str) -> None:
    loss, *edit = BUGS[bug]
    wrong = in_panels(with_bug(package(loss), bug, *edit))
    with pytest.raises(AssertionError):
        for kind, scale in itertools.product(IDS, (2.0, 14.3)):
            as_defined(wrong, loss, inputs(loss, 22, kind, scale))


def test_the_losses_here_are_those_with_a_statistic_of_positives() -> None:
    from infcl_gen.losses import derive

    traits = {name: derive(spec).traits for name, spec in BUILTIN_LOSSES.items()}
    assert sorted(LOSSES) == sorted(
        name for name, each in traits.items() if each.several and not each.guide and not each.crossed
    )
