"""Losses that leave out pairs above a threshold of their query, on the CPU target: against the formula by hand, alone
and over ranks; what is refused."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import infcl_gen
from infcl_gen.losses import LossError
from infcl_gen.runtime.table import Table
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import apart_from_thresholds, near_thresholds
from infcl_gen.verification.worker import averaged
from tests.runtime.in_process import World
from tests.runtime.test_several import SHARDS, in_panels
from tests.runtime.test_triangle import DIM, features, passes_its_selftest
from tests.tiers import some
from tests.verification.dense import dense

OWN = """
from infcl_gen.losses.language import *

X, OTHER = scale * z + bias, 1 - is_positive
def left_out(pairs):
    return mean_over_queries(logsumexp_over_keys(X, where=1 - pairs * OTHER) - positive(X))
NEAR = step(z - positive(z) - 1/10)
QWEN = LossSpec("near", left_out(1 - (1 - NEAR) * (1 - same_id)))
HALF = LossSpec("half", left_out(step(2 * guide - positive(guide) - 1)))
LATER = LossSpec("later", left_out(step(guide - positive(guide))), "label")
BOTH = LossSpec("both", left_out(NEAR) / 2 + mean_over_keys(logsumexp_over_queries(X) - positive(X)) / 2)
SCALED = LossSpec("scaled", left_out(step(X - positive(X))))
TWO = LossSpec("two", left_out(NEAR * step(z - positive(z) - 1/5)))
BARE = LossSpec("bare", mean_over_queries(logsumexp_over_keys(X, where=1 - NEAR) - positive(X)))
"""


@functools.cache
def package(dtype: str = "fp64", loss: str = "gist") -> ModuleType:
    """In panels of eight rows."""
    return in_panels(infcl_gen.load(loss=loss, batch_size=64, dim=DIM, dtype=dtype, target="cpu"))


def inputs(rows: int, scale: float, dtype: str = "fp64") -> Inputs:
    draw, like = torch.Generator().manual_seed(rows), features(1, dtype)
    u, v = (torch.randn(rows, DIM, generator=draw, dtype=torch.float64).to(like) for _ in range(2))
    given = Inputs(features(rows, dtype), features(rows + 1, dtype)[1:], scale, -0.5, guide_queries=u, guide_keys=v)
    return apart_from_thresholds(package(dtype), given)


def as_defined(module: ModuleType, given: Inputs) -> None:
    """Loss and all gradients in fp64 are those of the formula by hand."""
    found, truth = module.loss_and_grads(*given[:4], **given.given), dense("gist", *given)
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11, msg=f"{len(given.q)} rows: {name}")


@pytest.mark.parametrize("scale", [1e-3, 14.3, 1000.0])
def test_it_is_the_formula_by_hand(scale: float) -> None:
    for rows in (1, 2, 9, 22):
        as_defined(package(), inputs(rows, scale))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_as_accurate_as_the_dtypes_allow(dtype: str) -> None:
    for rows, scale in itertools.product((6, 22), (1e-3, 14.3, 1000.0)):
        module, given = package(dtype), inputs(rows, scale, dtype)
        judged = gate(module.loss_and_grads(*given[:4], **given.given), truth_of(module, given))
        assert not failures(judged), failures(judged)
    assert passes_its_selftest(package(dtype))


def test_a_guide_that_finds_nothing_nearer_leaves_infonce() -> None:
    """And one that finds all of them nearer leaves each query its positive, which has a loss of 0."""
    given = inputs(22, 14.3)
    own = torch.eye(22, DIM, dtype=torch.float64).roll(1, 1)[:DIM]
    q, k = given.q[:DIM], given.k[:DIM]
    loss = package().contrastive_loss(q, k, 14.3, guide_queries=own, guide_keys=own)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(14.3 * q @ k.T, torch.arange(DIM)))
    found = package().loss_and_grads(q, k, 14.3, guide_queries=-own, guide_keys=own)
    assert all(float(each.abs().max()) < 1e-12 for each in found)


@pytest.mark.parametrize("which", ["q", "k", "guide_queries", "guide_keys"])
def test_what_is_not_finite_stays_so(which: str) -> None:
    given = inputs(22, 14.3)
    spoilt = getattr(given, which).clone()
    spoilt[5, 3] = torch.nan
    given = given._replace(**{which: spoilt})
    loss, dq, dk, dscale, dbias = package().loss_and_grads(*given[:4], **given.given)
    assert loss.isnan() and dscale.isnan() and dbias.isnan() and dq[5].isnan().all() and dk.isnan().any(1).all()


@pytest.mark.parametrize(("transport", "keeps"), [("ring", False), ("ring", True), ("gather", False)])
def test_over_ranks(transport: str, keeps: bool) -> None:
    """Uneven and empty ranks: the average of their results is the formula by hand; autograd has the same gradient."""
    for shards in SHARDS:
        over_ranks(package(), transport, keeps, shards)


def over_ranks(module: ModuleType, transport: str, keeps: bool, shards: list[int]) -> None:
    world, rows = len(shards), sum(shards)
    table = Table(transport, 1, world, keeps, module.ContrastiveLoss._package.table.travelling)
    whole, offsets = inputs(rows, 3.0), [0, *itertools.accumulate(shards)]

    def job(rank: int) -> list[Any]:
        own = whole.of_rank(*[slice(*offsets[rank : rank + 2])] * 2)
        found = module.loss_and_grads(*own[:4], **own.given)
        leaf = own.q.clone().requires_grad_()
        (dq,) = torch.autograd.grad(module.contrastive_loss(leaf, *own[1:4], **own.given), leaf)
        assert torch.equal(dq, found[1])
        return list(found)

    found = averaged(World(module, world, tables={world: table}, seed=rows).run(job))
    for name, ours, theirs in zip(dense("gist", *whole)._fields, found, dense("gist", *whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"{shards}: {name}")


def test_a_query_and_its_key_lie_on_one_rank() -> None:
    whole = inputs(9, 3.0)
    table = Table("ring", 1, 2, False, package().ContrastiveLoss._package.table.travelling)

    def job(rank: int) -> str:
        own = whole.of_rank(*(slice(*sides[rank]) for sides in (((0, 4), (4, 9)), ((0, 5), (5, 9)))))
        with pytest.raises(ValueError, match=r"^gist takes a query and its own key on one rank") as error:
            package().contrastive_loss(*own[:4], **own.given)
        return str(error.value)

    said = World(package(), 2, tables={2: table}).run(job)
    assert said[0] == said[1] and said[0].endswith("as many keys as queries, not 5 and 4 as rank 0 has")


def test_ways_of_calling_agree() -> None:
    """The module, the loss without sizes, a compiled call, and guides of any stride."""
    given, module = inputs(22, 14.3, "fp32"), package("fp32")
    loss, dq, *_ = module.loss_and_grads(*given[:4], **given.given)
    assert torch.equal(loss, module.ContrastiveLoss()(*given[:4], **given.given))
    torch.testing.assert_close(loss, infcl_gen.ContrastiveLoss("gist")(*given[:4], **given.given))
    strided = {name: torch.stack([x, x], 2)[:, :, 0] for name, x in given.given.items() if x is not None}
    torch.testing.assert_close(loss, module.contrastive_loss(*given[:4], **strided))
    leaf = given.q.clone().requires_grad_()
    run = torch.compile(
        lambda x: module.contrastive_loss(x, *given[1:4], **given.given), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(dq, torch.autograd.grad(run(leaf), leaf)[0])


def test_losses_of_ones_own(tmp_path: Path) -> None:
    """Similarities of the loss itself, beside ids; half of the similarity of the positive, by a guide."""
    (tmp_path / "own.py").write_text(OWN)
    given, ids = inputs(22, 14.3), torch.arange(22) // 2
    load = functools.partial(infcl_gen.load, batch_size=64, dim=DIM, target="cpu", dtype="fp64")
    similar, guided = (u @ v.T for u, v in ((given.q, given.k), (given.guide_queries, given.guide_keys)))
    others, own = ~torch.eye(22, dtype=torch.bool), {"query_ids": ids, "key_ids": ids}
    guides = {"guide_queries": given.guide_queries, "guide_keys": given.guide_keys}
    for name, keywords, left_out in (
        ("QWEN", own, (similar > similar.diagonal()[:, None] + 0.1) | (ids[:, None] == ids)),
        ("HALF", guides, guided > guided.diagonal()[:, None] / 2 + 0.5),
    ):
        assert 0 < int((left_out & others).sum()) < 22 * 20
        q, k = (x.clone().requires_grad_() for x in given[:2])
        loss = in_panels(load(loss=f"{tmp_path}/own.py:{name}")).contrastive_loss(q, k, 14.3, **keywords)
        logits = (14.3 * q @ k.T).masked_fill(left_out & others, -torch.inf)
        truth = torch.nn.functional.cross_entropy(logits, torch.arange(22))
        torch.testing.assert_close(loss, truth)
        for ours, theirs in zip(*(torch.autograd.grad(each, (q, k)) for each in (loss, truth)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


REFUSED = {
    "LATER": "a threshold has no kernel yet beside positives='label': write positives='diagonal'$",
    "BOTH": "beside mean_over_keys: write mean_over_queries alone, and call it once for each direction$",
    "SCALED": r"is no comparison of a similarity: write step\(guide - positive\(guide\) \+ margin\), or z for guide$",
    "TWO": "^loss two: a mask has one threshold, and ",
    "BARE": r"has no kernel yet: write 1 - is_positive, 1 - step\(z - positive\(z\) - 0.1\) \* \(1 - is_positive\)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_kernel_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(LossError, match=REFUSED[name]) as error:
        infcl_gen.plan(loss=f"{tmp_path}/own.py:{name}", batch_size=64, dim=DIM, target="cpu")
    assert "\n" not in str(error.value)


def test_draws_keep_away_from_thresholds() -> None:
    """Of fp32 by ten roundings of a product; rows of keys that are almost alike are moved."""
    given = inputs(22, 14.3, "fp32")
    v = given.guide_keys.clone()
    v[3] = v[2]
    v[7] = v[6] + 1e-7 * v[6].abs()
    near = near_thresholds((1.0, 0.0), given.guide_queries, v, given.positives())
    assert near.nonzero().tolist() == [[2, 3], [3, 2], [6, 7], [7, 6]]
    moved = apart_from_thresholds(package("fp32"), given._replace(guide_keys=v))
    assert not bool(near_thresholds((1.0, 0.0), moved.guide_queries, moved.guide_keys, moved.positives()).any())
    assert torch.equal(moved.guide_queries[8:], given.guide_queries[8:])


# What is replaced in the schedule by what.
BUGS = {
    "positives are left out": ("above[positive_places(block)] = False", "pass"),
    "the mask is of another panel": ("part.guide_keys, panels.k", "block.guide_keys[: len(part.k)], panels.k"),
    "thresholds are of the first rows": ("part.thresholds)", "block.thresholds[: len(part.q)])"),
    "the gradient has all pairs": (
        "softmaxes_(z, g, part, above)", "softmaxes_(z, g, part, torch.zeros_like(above))",
    ),
    "the forward has all pairs": (
        "x2 = kept_(logits_(z, part.scale, part.bias), part, above)", "x2 = logits_(z, part.scale, part.bias)",
    ),
    "what is below is left out": ("torch.gt(", "torch.lt("),
}  # fmt: skip


@pytest.mark.parametrize("bug", some(BUGS))
def test_planted_bugs_are_noticed(with_bug: Callable[..., ModuleType], bug: str) -> None:
    wrong = in_panels(with_bug(package(), bug, *BUGS[bug]))
    with pytest.raises(AssertionError):
        as_defined(wrong, inputs(22, 14.3))
