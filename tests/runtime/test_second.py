"""Losses of two sides with a second log-sum-exp of each query, on the CPU target: against formulas by hand."""

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
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.worker import averaged
from tests.runtime.in_process import World, table_of
from tests.runtime.test_sides import OWN
from tests.runtime.test_triangle import DIM, features, in_panels, passes_its_selftest
from tests.tiers import some
from tests.verification.dense import dense

LOSSES = ("hard_keys", "squared_weights")
SCALES = (1e-3, 2.0, 14.3, 1000.0)


@functools.cache
def package(loss: str, dtype: str = "fp64") -> ModuleType:
    """In panels of eight rows."""
    return in_panels(infcl_gen.load(loss=f"{OWN}:{loss}", batch_size=64, dim=DIM, dtype=dtype, target="cpu"))


def inputs(loss: str, rows: int, scale: float, dtype: str = "fp64") -> Inputs:
    """With labels of any key; with weights and ids where the loss has them."""
    draw = torch.Generator().manual_seed(rows)
    q, k = features(2 * rows, dtype).chunk(2)
    labels = torch.randint(rows, (rows,), generator=draw)
    if loss == "hard_keys":
        return Inputs(q, k, scale, -0.5, labels)
    weight = torch.rand(rows, generator=draw, dtype=q.dtype) - 0.3
    ids = [torch.randint(rows, (rows,), generator=draw) for _ in "qk"]
    return Inputs(q, k, scale, -0.5, labels, *ids, weight)


def as_defined(module: ModuleType, loss: str, given: Inputs) -> None:
    found, truth = module.loss_and_grads(*given[:4], **given.given), dense(loss, *given)
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"{loss}, {len(given.q)} rows: {name}")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("loss", LOSSES)
def test_it_is_the_formula_by_hand(loss: str, scale: float) -> None:
    for rows in (2, 6, 22):
        as_defined(package(loss), loss, inputs(loss, rows, scale))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("loss", LOSSES)
def test_as_accurate_as_the_dtypes_allow(loss: str, dtype: str) -> None:
    for rows, scale in itertools.product((6, 22), SCALES):
        module, given = package(loss, dtype), inputs(loss, rows, scale, dtype)
        judged = gate(module.loss_and_grads(*given[:4], **given.given), truth_of(module, given))
        assert not failures(judged), failures(judged)
    assert passes_its_selftest(package(loss, dtype))


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_not_finite_stays_so(loss: str) -> None:
    given = inputs(loss, 22, 14.3)
    q = given.q.clone()
    q[5, 3] = torch.nan
    value, dq, _, dscale, _ = package(loss).loss_and_grads(q, *given[1:4], **given.given)
    assert value.isnan() and dscale.isnan() and dq[5].isnan().all()


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("loss", LOSSES)
def test_over_ranks(loss: str, transport: str) -> None:
    """Uneven and empty ranks: the average of their results is that of the formula by hand."""
    module = package(loss)
    for shards in ([6, 0, 10], [2, 2], [0, 12], [5, 3, 7]):
        world, whole = len(shards), inputs(loss, sum(shards), 3.0)
        table = table_of(module, transport, world)
        offsets = [0, *itertools.accumulate(shards)]

        def job(rank: int, whole: Inputs = whole, offsets: list[int] = offsets) -> list[Any]:
            part = slice(*offsets[rank : rank + 2])
            own = whole.of_rank(part, part)
            return list(module.loss_and_grads(*own[:4], **own.given))

        found = averaged(World(module, world, tables={world: table}, seed=world).run(job))
        truth = dense(loss, *whole)
        for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"{shards}: {name}")


CAPPED = """
from infcl_gen.losses.language import *

x = 20 * tanh(scale * z / 20) + bias
terms = exp(logsumexp_over_keys(x) / 4) + logsumexp_over_keys(1.5 * x) - 3 * positive(x / 2)
MINE = LossSpec("mine", mean_over_queries(terms + logsumexp_over_negatives(x)), "label")
"""


def test_a_logit_that_is_not_affine(tmp_path: Path) -> None:
    """Beside further negatives of a query, and a positive that is another multiple of the logit."""
    (tmp_path / "own.py").write_text(CAPPED)
    how = {"batch_size": 64, "dim": DIM, "dtype": "fp64", "target": "cpu"}
    module, given = in_panels(infcl_gen.load(loss=f"{tmp_path}/own.py:MINE", **how)), inputs("hard_keys", 22, 3.0)
    scale, negatives = torch.tensor(3.0, dtype=torch.float64), features(44, "fp64").view(22, 2, DIM)
    q, k, scale, negatives = leaves = [x.clone().requires_grad_() for x in (given.q, given.k, scale, negatives)]
    loss = module.contrastive_loss(q, k, scale, labels=given.labels, negatives=negatives)
    x, own = (20 * torch.tanh(scale * each / 20) for each in (q @ k.T, (negatives @ q[:, :, None])[..., 0]))
    terms = (x.logsumexp(1) / 4).exp() + (1.5 * x).logsumexp(1) - 1.5 * x[torch.arange(22), given.labels]
    truth = (terms + own.logsumexp(1)).mean()
    torch.testing.assert_close(loss, truth)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


# What is replaced in the schedule by what.
BUGS = {
    "second sums are not cleared": ("block.second.mantissa.zero_()", "block.second.mantissa.fill_(1)"),
    "the second sum is of the logits themselves": ("torch.mul(x2, formulas.MULTIPLE, out=e)", "e.copy_(x2)"),
    "a query has its first share alone": ("g[strip].add_((multiple", "(0.0 * (multiple"),
    "a sum of nothing has a second weight": ("second_weight.masked_fill(nothing, 0.0)", "second_weight + 0.0 * r"),
}


@pytest.mark.parametrize("bug", some(BUGS))
def test_planted_bugs_are_noticed(with_bug: Callable[..., ModuleType], bug: str) -> None:
    wrong = in_panels(with_bug(package("hard_keys"), bug, *BUGS[bug]))
    with pytest.raises(AssertionError):
        for rows in (1, 22):
            as_defined(wrong, "hard_keys", inputs("hard_keys", rows, 2.0))
