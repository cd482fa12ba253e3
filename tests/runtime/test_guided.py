"""Losses with a guide, on the CPU target: against the formula by hand, alone and over ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import infcl_gen
from infcl_gen.runtime.table import Table
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.worker import averaged
from tests.losses.specs import APART, DERIVABLE
from tests.runtime.in_process import World
from tests.runtime.test_several import SHARDS, in_panels
from tests.runtime.test_triangle import DIM, features, passes_its_selftest
from tests.tiers import combined, in_pairs, some
from tests.verification.dense import dense

FACTORS = (1e-3, 3.0, 60.0)  # of a guide's features: its similarities are all alike, apart, or up to some thousands


OWN_LOSSES = {"distill_apart": APART, "distill_capped": DERIVABLE["distill_capped"]}  # of both sides, as distill_clip


@functools.cache
def package(dtype: str = "fp64", loss: str = "distill") -> ModuleType:
    """In panels of eight rows."""
    spec = OWN_LOSSES.get(loss, loss)
    return in_panels(infcl_gen.load(loss=spec, batch_size=64, dim=DIM, dtype=dtype, target="cpu"))


def guides(rows: int, keys: int, factor: float, dtype: str = "fp64") -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    like = features(1, dtype)
    u, v = (factor * torch.randn(count, DIM, generator=draw, dtype=torch.float64) for count in (rows, keys))
    return u.to(like), v.to(like)


def inputs(rows: int, factor: float, scale: float, dtype: str = "fp64", keys: int | None = None) -> Inputs:
    keys = rows + 3 if keys is None else keys
    u, v = guides(rows, keys, factor, dtype)
    q, k = features(rows, dtype), features(keys + 1, dtype)[1:]
    return Inputs(q, k, scale, -0.5, guide_queries=u, guide_keys=v)


def as_defined(module: ModuleType, given: Inputs) -> None:
    """Loss and all gradients in fp64 are those of the formula by hand."""
    found, truth = module.loss_and_grads(*given[:4], **given.given), dense(module.SPEC["loss"]["name"], *given)
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11, msg=f"{len(given.q)} rows: {name}")


@pytest.mark.parametrize("scale", [1e-3, 14.3, 1000.0])
@pytest.mark.parametrize("factor", FACTORS)
def test_it_is_the_formula_by_hand(factor: float, scale: float) -> None:
    for rows, keys in ((3, 6), (22, 25), (9, 1), (1, 9)):
        as_defined(package(), inputs(rows, factor, scale, keys=keys))
    for rows, loss in itertools.product((1, 3, 22), ("distill_apart", "distill_both", "distill_clip")):
        as_defined(package(loss=loss), inputs(rows, factor, scale, keys=rows))


@pytest.mark.parametrize("loss", ["distill_apart", "distill"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_as_accurate_as_the_dtypes_allow(dtype: str, loss: str) -> None:
    for rows, factor, scale in in_pairs((6, 22), FACTORS, (1e-3, 14.3, 1000.0)):
        module, given = package(dtype, loss), inputs(rows, factor, scale, dtype, rows if loss != "distill" else None)
        judged = gate(module.loss_and_grads(*given[:4], **given.given), truth_of(module, given))
        assert not failures(judged), failures(judged)
    assert passes_its_selftest(package(dtype, loss))


def test_a_student_that_agrees_has_no_gradient_and_the_entropy_of_its_teacher() -> None:
    q, k = features(22, "fp64"), features(25, "fp64")
    loss, dq, dk, dscale, _ = package().loss_and_grads(q, k, 14.3, guide_queries=14.3 * q, guide_keys=k)
    shares = (14.3 * q @ k.T).softmax(1)
    torch.testing.assert_close(loss, -(shares * shares.log()).sum(1).mean())
    for gradient in (dq, dk, dscale):
        assert float(gradient.norm()) < 1e-12


def test_both_directions_are_those_of_two_calls() -> None:
    """The second call has all sides exchanged."""
    given = inputs(22, 3.0, 14.3, keys=22)
    q, k = (x.clone().requires_grad_() for x in given[:2])
    u, v = given.guide_queries, given.guide_keys
    call = functools.partial(package().contrastive_loss, scale=14.3)
    two = (call(q, k, guide_queries=u, guide_keys=v) + call(k, q, guide_queries=v, guide_keys=u)) / 2
    one = package(loss="distill_both").contrastive_loss(q, k, 14.3, guide_queries=u, guide_keys=v)
    torch.testing.assert_close(one, two)
    for a, b in zip(*(torch.autograd.grad(each, (q, k)) for each in (one, two)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_it_has_what_distill_clip_loss_returns() -> None:
    """OpenCLIP 3.3's `DistillClipLoss`: the contrastive loss, then the distillation, each a mean of both directions."""
    given = inputs(22, 3.0, 14.3, keys=22)
    call = {"guide_queries": given.guide_queries, "guide_keys": given.guide_keys}
    student, teacher = 14.3 * given.q @ given.k.T, given.guide_queries @ given.guide_keys.T
    sides = (student, teacher), (student.T, teacher.T)
    contrastive = sum(torch.nn.functional.cross_entropy(s, torch.arange(22)) for s, _ in sides) / 2
    distilled = sum(-(t.softmax(1) * s.log_softmax(1)).sum(1).mean() for s, t in sides) / 2
    both, whole = (
        package(loss=loss).contrastive_loss(*given[:2], 14.3, **call) for loss in ("distill_both", "distill_clip")
    )
    torch.testing.assert_close(both, distilled)
    torch.testing.assert_close(whole, contrastive + distilled)


def test_a_student_that_agrees_has_no_gradient_on_either_side() -> None:
    q, k = features(22, "fp64"), features(22, "fp64").flip(0)
    module = package(loss="distill_both")
    _, dq, dk, dscale, _ = module.loss_and_grads(q, k, 14.3, guide_queries=14.3 * q, guide_keys=k)
    for gradient in (dq, dk, dscale):
        assert float(gradient.norm()) < 1e-12


@pytest.mark.parametrize("which", ["q", "k", "guide_queries", "guide_keys"])
def test_what_is_not_finite_reaches_both_sides(which: str) -> None:
    given = inputs(22, 3.0, 14.3, keys=22)
    spoilt = getattr(given, which).clone()
    spoilt[5, 3] = torch.nan
    given = given._replace(**{which: spoilt})
    for result in package(loss="distill_clip").loss_and_grads(*given[:4], **given.given):
        assert result.isnan().all()


@pytest.mark.parametrize("which", ["q", "k", "guide_queries", "guide_keys"])
def test_what_is_not_finite_stays_so(which: str) -> None:
    given = inputs(22, 3.0, 14.3)
    spoilt = getattr(given, which).clone()
    spoilt[5, 3] = torch.nan
    given = given._replace(**{which: spoilt})
    loss, dq, dk, dscale, dbias = package().loss_and_grads(*given[:4], **given.given)
    assert loss.isnan() and dscale.isnan() and dbias.isnan() and dq[5].isnan().all() and dk.isnan().all()
    assert bool(dq[4].isnan().all()) == (which in ("k", "guide_keys"))


@pytest.mark.parametrize(("transport", "keeps"), [("ring", False), ("ring", True), ("gather", False)])
def test_over_ranks(transport: str, keeps: bool) -> None:
    """Uneven and empty ranks: the average of their results is the formula by hand; autograd has the same gradient."""
    for shards, loss in combined(SHARDS, ("distill", "distill_apart")):
        over_ranks(package(loss=loss), transport, keeps, shards)


def over_ranks(module: ModuleType, transport: str, keeps: bool, shards: list[int]) -> None:
    world, rows = len(shards), sum(shards)
    table = Table(transport, 1, world, keeps, module.ContrastiveLoss._package.table.travelling)
    whole = inputs(rows, 3.0, 3.0, keys=rows)
    offsets, from_behind = ([0, *itertools.accumulate(each)] for each in (shards, shards[::-1]))

    def job(rank: int) -> list[Any]:
        queries, keys = (slice(*each[rank : rank + 2]) for each in (offsets, from_behind))
        own = whole.of_rank(queries, keys)
        found = module.loss_and_grads(*own[:4], **own.given)
        leaf = own.q.clone().requires_grad_()
        (dq,) = torch.autograd.grad(module.contrastive_loss(leaf, *own[1:4], **own.given), leaf)
        assert torch.equal(dq, found[1])
        return list(found)

    found = averaged(World(module, world, tables={world: table}, seed=rows).run(job))
    order = torch.cat([torch.arange(rows)[slice(*from_behind[rank : rank + 2])] for rank in range(world)])
    truth = dense(module.SPEC["loss"]["name"], *whole._replace(k=whole.k[order], guide_keys=whole.guide_keys[order]))
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"{shards}: {name}")


@pytest.mark.parametrize("name", ["distill", "distill_clip"])
def test_ways_of_calling_agree(name: str) -> None:
    """The module, the loss without sizes, a compiled call, guides of any stride, and a frozen side."""
    given, module = inputs(22, 3.0, 14.3, "fp32", keys=22), package("fp32", name)
    loss, dq, *_ = module.loss_and_grads(*given[:4], **given.given)
    assert torch.equal(loss, module.ContrastiveLoss()(*given[:4], **given.given))
    torch.testing.assert_close(loss, infcl_gen.ContrastiveLoss(name)(*given[:4], **given.given))
    strided = {name: torch.stack([x, x], 2)[:, :, 0] for name, x in given.given.items() if x is not None}
    torch.testing.assert_close(loss, module.contrastive_loss(*given[:4], **strided))  # of another kernel of BLAS
    leaf = given.q.clone().requires_grad_()
    run = torch.compile(
        lambda x: module.contrastive_loss(x, *given[1:4], **given.given), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(dq, torch.autograd.grad(run(leaf), leaf)[0])


U, V = guides(6, 6, 1.0)
BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"guide_queries": U}, r"^distill needs guide_keys: guide_keys must be a dense tensor of torch.float64, \(6, 12\)"),
    ({"guide_queries": U, "guide_keys": V[:5]}, r"not of shape \(5, 12\)$"),
    ({"guide_queries": U[:, :5], "guide_keys": V}, "pad the narrower of features and guide by zeros"),
    ({"guide_queries": U.float(), "guide_keys": V}, "not of torch.float32: cast it$"),
    ({"guide_queries": U.clone().requires_grad_(), "guide_keys": V}, "requires a gradient, and a guide has none: pass"),
    (
        {"guide_queries": U, "guide_keys": V, "labels": torch.arange(6)},
        "^distill has no positives: it takes no labels$",
    ),
]


@pytest.mark.parametrize(("given", "why"), BAD_CALLS)
def test_calls_that_are_refused(given: dict[str, Any], why: str) -> None:
    q, k = features(6, "fp64"), features(6, "fp64")
    with pytest.raises(ValueError, match=why) as error:
        package().contrastive_loss(q, k, 2.0, **given)
    assert "\n" not in str(error.value)


def test_other_losses_have_no_guide() -> None:
    q = features(6, "fp64")
    with pytest.raises(ValueError, match=r"^clip has no guide: guide_keys must be None$"):
        infcl_gen.contrastive_loss(q, q, 2.0, guide_keys=q)


OWN = """
from infcl_gen.losses.language import *

X = 20 * tanh(scale * z / 20) + bias
APART = logsumexp_over_keys(X) - mean_by_softmax(X, similarity("guide_query", "guide_key"))
CAPPED = LossSpec("capped", mean_over_queries(query_weight * sqrt(1 + APART)), "none")
"""


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    """A logit that is not affine; weights of queries, and a term that is not linear."""
    (tmp_path / "own.py").write_text(OWN.replace("sqrt(", "(").replace("APART)", "APART) ** 2"))
    load = functools.partial(infcl_gen.load, loss=f"{tmp_path}/own.py:CAPPED", batch_size=64, dim=DIM, target="cpu")
    given, draw = inputs(22, 3.0, 3.0), torch.Generator().manual_seed(3)
    q, k = (x.clone().requires_grad_() for x in given[:2])
    weight = torch.rand(22, generator=draw, dtype=torch.float64).requires_grad_()
    loss = in_panels(load(dtype="fp64")).contrastive_loss(q, k, 3.0, query_weight=weight, **given.given)
    x, shares = 20 * torch.tanh(3.0 * (q @ k.T) / 20), (given.guide_queries @ given.guide_keys.T).softmax(1)
    truth = (weight * (1 + x.logsumexp(1) - (shares * x).sum(1)) ** 2).mean()
    torch.testing.assert_close(loss, truth)
    found, expected = (torch.autograd.grad(each, (q, k, weight)) for each in (loss, truth))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    narrow, own = load(dtype="fp32"), inputs(22, 3.0, 3.0, "fp32")._replace(query_weight=weight.detach().float())
    judged = gate(narrow.loss_and_grads(*own[:4], **own.given), truth_of(narrow, own))
    assert not failures(judged), failures(judged)


def test_a_logit_that_is_not_affine() -> None:
    """A quarter of one direction, three quarters of the other, and a tenth of CLIP's loss, of capped logits."""
    given = inputs(22, 3.0, 14.3, keys=22)
    q, k = (x.clone().requires_grad_() for x in given[:2])
    x, y = 4 * torch.tanh(14.3 * (q @ k.T) / 4), given.guide_queries @ given.guide_keys.T
    truth = sum(
        torch.nn.functional.cross_entropy(s, torch.arange(22)) / 20 - w * (t.softmax(1) * s.log_softmax(1)).sum() / 22
        for w, s, t in ((0.25, x, y), (0.75, x.T, y.T))
    )
    loss, dq, dk, *_ = package(loss="distill_capped").loss_and_grads(*given[:2], 14.3, **given.given)
    torch.testing.assert_close(loss, truth.detach())
    for ours, theirs in zip((dq, dk), torch.autograd.grad(truth, (q, k)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    own = inputs(22, 3.0, 14.3, "fp32", keys=22)
    module = package("fp32", "distill_capped")
    judged = gate(module.loss_and_grads(*own[:4], **own.given), truth_of(module, own))
    assert not failures(judged), failures(judged)


# What is replaced in the schedule by what.
BUGS = {
    "sums of a guide are not cleared": ("block.positive[:2].zero_()", "block.positive[:2].fill_(1)"),
    "the last panel decides the mean": ("mul_(share)", "mul_(1.0)"),
    "the mean is not divided": (".sum(axis).div_(total)", ".sum(axis)"),
    "panels of a guide have one exponent": ("reference - exponent", "0 * exponent"),
    "logits of the guide are of base e": ("y.mul_(LOG2E), t, 1)", "y, t, 1)"),
    "the guide has no gradient": ("g += t.div_", "t.div_"),
    "a guide's softmax has no sum": ("g += t.div_(part.positive[0, :, None])", "g -= t"),
    "keys of the guide are the first ones": (
        "u, converted(part.guide_keys", "u, converted(block.guide_keys[: len(part.k)]",
    ),
    "the slope by the guide is one": ("positive[0, rows] /= slope", "positive[0, rows] /= 1.0"),
}  # fmt: skip


OF_BOTH_SIDES = {
    "sums of keys are not cleared": ("block.key_guide.zero_()", "block.key_guide.fill_(1)"),
    "means are of the first keys": ("part.key_guide, x2", "block.key_guide[:, : len(part.k)], x2"),
    "sides have each other's shares": ("zip(sides, formulas.GUIDE_SHARES)", "zip(sides, formulas.GUIDE_SHARES[::-1])"),
    "keys have no mean in the loss": ("block.key_guide[0, panel]", "0 * block.key_guide[0, panel]"),
    "positives have no share of the guide": ("add_shares_(g, y.mul_(LOG2E), t, part)", """\
kept = g[row, column].clone()
            add_shares_(g, y.mul_(LOG2E), t, part)
            g[row, column] = kept"""),
}  # fmt: skip


@pytest.mark.parametrize("bug", some([*BUGS, *OF_BOTH_SIDES]))
def test_planted_bugs_are_noticed(with_bug: Callable[..., ModuleType], bug: str) -> None:
    both = bug in OF_BOTH_SIDES
    good = package(loss="distill_apart") if both else package()
    wrong = in_panels(with_bug(good, bug, *(BUGS | OF_BOTH_SIDES)[bug]))
    with pytest.raises(AssertionError):
        for factor, scale in itertools.product(FACTORS, (2.0, 14.3)):
            as_defined(wrong, inputs(22, factor, scale, keys=22 if both else None))


def test_a_gather_without_the_means_of_other_ranks_is_noticed(with_bug: Callable[..., ModuleType]) -> None:
    edit = "mean.copy_(shares.mul_(means).sum(0))", "mean.copy_(means[0])"
    wrong = in_panels(with_bug(package(loss="distill_apart"), "one rank", *edit))
    with pytest.raises(AssertionError):
        over_ranks(wrong, "gather", False, [7, 6, 9])
