"""The log-sum-exp over the positives of all queries, on which their terms depend: `dclw` on the CPU target."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

import infcl_gen
from infcl_gen.losses.language import (
    LossSpec,
    logsumexp_over_all_positives,
    logsumexp_over_keys,
    mean_over_queries,
    positive,
    scale,
    z,
)
from tests.runtime.conftest import copy_with
from tests.runtime.test_sides import as_defined, over_ranks, package
from tests.runtime.test_triangle import DIM, features, in_panels, labels_of
from tests.tiers import some

from .in_process import World


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_similarities_of_any_size(size: float) -> None:
    """e^(2 z) of features of norm 100 leaves fp64, but its share among all rows does not."""
    q, own = size * features(22, "fp64"), torch.arange(22).roll(11)
    q.requires_grad_()
    z = q @ q.T
    x, p = 1000.0 * z, z[torch.arange(22), own]
    negatives = x.masked_fill(torch.eye(22, dtype=torch.bool), -torch.inf).scatter(1, own[:, None], -torch.inf)
    loss = (negatives.logsumexp(1) - (2 - 22 * (2 * p).softmax(0)) * 1000.0 * p).mean()
    found = package("dclw").loss_and_grads(q.detach(), None, 1000.0)
    for ours, theirs in zip(found[:2], (loss, *torch.autograd.grad(loss, q)), strict=True):
        assert bool((ours - theirs).norm() <= 1e-8 * theirs.norm())


@pytest.mark.parametrize("scale", [0.0, -14.3])
def test_scales_that_are_not_positive(scale: float) -> None:
    as_defined(package("dclw"), "dclw", 22, "any", scale)


def test_terms_whose_slopes_by_it_are_alike() -> None:
    """2 E of each query, which depends on no row: all queries are added up."""
    similar = 3 * positive(z)
    formula = logsumexp_over_keys(scale * z) - positive(scale * z) + logsumexp_over_all_positives(similar) ** 2
    alike = LossSpec("alike", mean_over_queries(formula), positives="label")
    q, k = features(14, "fp64").split((6, 8))
    leaves = q.requires_grad_(), k.requires_grad_()
    x, at = q @ k.T, torch.arange(6)
    loss = (2 * x).logsumexp(1).mean() - (2 * x[at, at]).mean() + (3 * x[at, at]).logsumexp(0) ** 2
    found = infcl_gen.load(loss=alike, batch_size=8, dim=DIM, dtype="fp64", target="cpu").loss_and_grads(
        q.detach(), k.detach(), 2.0
    )
    for ours, theirs in zip(found, (loss.detach(), *torch.autograd.grad(loss, leaves)), strict=False):
        torch.testing.assert_close(ours, theirs)


def test_ranks_get_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, though each adds up what comes in its own order."""
    module, shards = package("dclw"), [6, 0, 3, 5]
    engine = importlib.import_module(f"{module.__name__}._runtime.engine")
    found, made = [], engine.pooled
    monkeypatch.setattr(engine, "pooled", lambda *given: found.append(made(*given)) or found[-1])
    q, labels = features(14, "fp64").split(shards), labels_of(14, "any")
    assert labels is not None
    named = labels.split(shards)
    World(module, 4).run(lambda rank: module.loss_and_grads(q[rank], None, 3.0, labels=named[rank]) and None)
    assert len(found) == 4 and all(torch.equal(each, found[0]) for each in found)


POOLED = "_runtime/pooled.py"
BUGS = {
    "the softmax is over the positives of one rank": (
        "formulas.of_all_positives(p, z, scale, bias).logsumexp(0), group",
        "formulas.of_all_positives(p, z, scale, bias).logsumexp(0), None",
    ),
    "slopes are those of one rank": ("**taken).sum(), group", "**taken).sum(), None"),
    "slopes are forgotten": ("torch.stack((total, slope))", "torch.stack((total, 0.0 * slope))"),
    "a rank's own number stands for those of all": (
        'of_ranks(own[None], [1] * group.size, group, "forward, numbers of all positives")',
        "torch.cat([own[None]] * group.size)",
    ),
}


@pytest.mark.parametrize("bug", some(BUGS))
def test_planted_bugs_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    original, name = package("dclw"), f"dclw_{''.join(c for c in bug if c.isalpha())}"
    monkeypatch.syspath_prepend(str(tmp_path))
    copy_with(bug, ((POOLED, *BUGS[bug]),), Path(str(original.__file__)).parent, tmp_path / name)
    wrong: ModuleType = in_panels(importlib.import_module(name))
    labels = labels_of(10, "any")
    assert labels is not None
    over_ranks(original, "dclw", "ring", [6, 0, 4], labels)
    with pytest.raises(AssertionError):
        over_ranks(wrong, "dclw", "ring", [6, 0, 4], labels)
