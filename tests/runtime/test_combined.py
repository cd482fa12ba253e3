"""Losses whose terms combine the sum of a query and its positive: the weight of each row follows between the sweeps."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from infcl_gen.verification.properties import Case, tensors
from tests.tiers import some
from tests.verification.dense import dense, dense_loss

Packages = Callable[..., ModuleType]
LOSSES = ("rince", "margin", "decoupled", "angular", "debiased_keys")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", LOSSES)
def test_one_device_against_the_definition(packages: Packages, loss: str, seed: int) -> None:
    """Also the gradients of scale and bias where a term depends on them besides its logits."""
    bias = 0.0 if loss == "debiased_keys" else -1.0
    inputs = tensors(Case(70, 93, 8, "fp64", 3.0, bias, seed=seed), "label")
    found = packages(loss).loss_and_grads(*inputs[:4], labels=inputs.labels)
    for ours, theirs in zip(found, dense(loss, *inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def test_a_sum_of_nothing(packages: Packages) -> None:
    """A query whose only key is its positive has no negatives: log 0 of them, and gradients that are numbers."""
    q, k = torch.randn(1, 8, dtype=torch.float64), torch.randn(1, 8, dtype=torch.float64)
    loss, dq, dk, dscale, dbias = packages("margin").loss_and_grads(q, k, 2.0, 0.5)
    assert (float(loss), float(dscale), float(dbias)) == (0, 0, 0) and not bool(dq.any() or dk.any())
    loss, dq, dk, dscale, dbias = packages("decoupled").loss_and_grads(q, k, 2.0, 0.5)
    assert float(loss) == -math.inf and float(dbias) == -1
    torch.testing.assert_close(dq, -2.0 * k)
    torch.testing.assert_close(dscale, -(q * k).sum())


def test_backward_may_be_called_again_with_another_gradient(packages: Packages) -> None:
    q, k = (torch.randn(9, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    loss = packages("margin").contrastive_loss(q, k, scale)
    first = torch.autograd.grad(loss, (q, k, scale), retain_graph=True)
    fourfold = torch.autograd.grad(loss, (q, k, scale), 4 * torch.ones_like(loss))
    truth = torch.autograd.grad(dense_loss("margin", q, k, scale), (q, k, scale))
    for once, four, true in zip(first, fourfold, truth, strict=True):
        torch.testing.assert_close(once, true)
        assert torch.equal(4 * once, four)


def test_the_self_test_knows_sums_of_nothing(packages: Packages) -> None:
    assert packages("decoupled").selftest()["ok"]


def test_a_saturated_logit_has_gradients_by_the_similarity(packages: Packages) -> None:
    """A cap at 20 leaves no slope at z = 1 000: nothing may be divided by it."""
    q, k = (torch.nn.functional.normalize(torch.randn(9, 8, dtype=torch.float64)) for _ in range(2))
    found = packages("angular").loss_and_grads(q, q + 0.1 * k, 1e5)
    for ours, theirs in zip(found, dense("angular", q, q + 0.1 * k, 1e5), strict=True):
        torch.testing.assert_close(ours, theirs)


BUGS = {
    "scale in the term has no gradient": ("angular", "scale_part = ", "scale_part = 0.0 * "),
    "the number of keys is that of a panel": ("debiased_keys", "block.counts[1]", "93 - 64"),
    "an angle counts as if it were a logit's": ("angular", "through_z = ", "through_z = 0.0 * "),
}


@pytest.mark.parametrize("name", some(BUGS))
def test_planted_bugs_are_noticed(packages: Packages, planted: Callable[..., str], name: str) -> None:
    loss, old, new = BUGS[name]
    file = "schedule.py" if "block" in old else "loss.py"
    wrong = planted(name, loss, ((file, old, new),))
    with pytest.raises(AssertionError):
        test_one_device_against_the_definition(lambda _: importlib.import_module(wrong), loss, 1)
