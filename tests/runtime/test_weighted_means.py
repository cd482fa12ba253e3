"""Means of keys whose weights follow from a second pair of features, as CWCL has them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from infcl_gen.runtime import weighted
from infcl_gen.verification.gate import failures
from infcl_gen.verification.oracle import Inputs, oracle, oracle_by_slices
from infcl_gen.verification.properties import Case, check_case, inputs_of
from tests.kernels.planted import Edit
from tests.tiers import some
from tests.verification.dense import dense

from .in_process import USUAL
from .pool import Packages, Pool
from .test_own import assert_close, leaves_of, over_ranks, truth

LOSSES = ("cwcl", "cwcl_both", "cwcl_rince")
X = torch.randn(6, 8, dtype=torch.float64)
U = torch.nn.functional.normalize(torch.randn(6, 8, dtype=torch.float64), dim=1)


def drawn(package: ModuleType, seed: int = 1, rows: int = 70) -> Inputs:
    keys = rows if package.SPEC["positives"] == "diagonal" else 93
    inputs = inputs_of(package, Case(rows, keys, 8, "fp64", 3.0, -1.0, seed=seed))
    return inputs._replace(q=inputs.q + 0.3, k=inputs.others - 0.2)  # means far from 0


@pytest.mark.parametrize("loss", LOSSES)
def test_one_device_against_the_definition(packages: Packages, loss: str) -> None:
    package = packages(loss)
    for seed, rows in enumerate((70, 1, 9)):
        inputs = drawn(package, seed, rows)
        expected = truth(loss, inputs)
        assert_close(package.loss_and_grads(*inputs[:4], **inputs.given), dense(loss, *inputs))
        given, leaves = leaves_of(inputs)
        value = package.contrastive_loss(*given[:4], **given.given, reduction="sum", grad_sync="sum")
        found = torch.autograd.grad(value, leaves, -2 * torch.ones_like(value))
        assert_close([value.detach() / rows, *(x / (-2 * rows) for x in found)], expected)
        assert_close([package.reference(*inputs[:4], **inputs.given)], expected[:1])


def test_strips_are_added_up(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    package = packages("cwcl_both")
    own = importlib.import_module(f"{package.__name__}._runtime.weighted")
    monkeypatch.setattr(own, "STRIP_ROWS", 16)
    inputs = drawn(package)
    assert_close(package.loss_and_grads(*inputs[:4], **inputs.given), truth("cwcl_both", inputs))
    assert weighted.STRIP_ROWS != 16


@pytest.mark.parametrize("wanted", range(1, 16))
@pytest.mark.parametrize("loss", LOSSES)
def test_some_gradients_alone(packages: Packages, loss: str, wanted: int) -> None:
    inputs = drawn(packages(loss))
    leaves = inputs.leaves(torch.float64, torch.float64)
    chosen = [x.requires_grad_(bool(wanted >> bit & 1)) for bit, x in enumerate(leaves)]
    value = packages(loss).contrastive_loss(*leaves, **inputs.given)
    found = torch.autograd.grad(value, [x for x in chosen if x.requires_grad])
    every = truth(loss, inputs)[1:]
    assert_close(found, [x for x, leaf in zip(every, leaves, strict=True) if leaf.requires_grad])


def test_traced_and_transformed(packages: Packages) -> None:
    package = packages("cwcl")

    def loss(q: Tensor, k: Tensor) -> Tensor:
        value: Tensor = package.contrastive_loss(q, k, 2.0, guide_queries=U, guide_keys=U)
        return value

    plain = [x.clone().requires_grad_() for x in (X, X.flip(0))]
    expected = torch.autograd.grad(loss(*plain), plain)
    assert_close(torch.func.grad(loss, argnums=(0, 1))(X, X.flip(0)), expected)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = [x.clone().requires_grad_() for x in (X, X.flip(0))]
    assert_close(torch.autograd.grad(compiled(*found), found), expected)


def test_operators_are_well_formed(packages: Packages) -> None:
    operators = packages("cwcl").ContrastiveLoss._package.operators
    numbers = (torch.tensor(2.0).double(), torch.tensor(0.0).double())
    call = [x.clone().requires_grad_() for x in (X, X, *numbers)]
    rest = (*[None] * 4, U, U, *USUAL)
    torch.library.opcheck(operators.forward, (*call, *rest, 15))
    with torch.no_grad():
        loss, *saved = operators.forward(*call, *rest, 15)
        arguments = (torch.ones_like(loss), *(x.detach() for x in call), *rest[:6], *saved, *rest[6:], 15)
    torch.library.opcheck(operators.backward, arguments)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("loss", LOSSES)
def test_as_accurate_as_plain_torch(packages: Packages, loss: str, dtype: str) -> None:
    package = packages(loss, dtype)
    for seed, scale in enumerate((1.0, 14.3, 100.0, 14.3)):
        features = ("unit", "matched", "unnormalised", "duplicate")[seed]
        keys = 70 if package.SPEC["positives"] == "diagonal" else 93
        rows = check_case(package, Case(70, keys, 8, dtype, scale, -1.0, features, seed=seed))
        assert not failures(rows), failures(rows)
    if loss != "cwcl_rince":  # whose gradients leave the range of fp16 at its scales
        assert package.selftest("cpu")["ok"], package.selftest("cpu")


@pytest.mark.parametrize("loss", LOSSES)
def test_large_batches_have_the_same_truth(packages: Packages, loss: str) -> None:
    inputs = drawn(packages(loss))._replace(bias=None)
    sliced = oracle_by_slices(importlib.import_module(f"{packages(loss).__name__}.loss"), inputs)
    assert_close(sliced[:4], oracle(packages(loss), inputs)[:4])


@pytest.fixture(scope="module")
def pool(packages: Packages, folder_of: Callable[[ModuleType], Path]) -> Iterator[Pool]:
    pool = Pool(3, folder_of(packages("clip")).parent)
    yield pool
    pool.close()


WAYS = [("cwcl", "ring"), ("cwcl_both", "ring"), ("cwcl_both", "gather"), ("cwcl_rince", "ring")]


def ranks_agree(pool: Pool, package: ModuleType, loss: str) -> None:
    rows = [33, 0, 40]
    keys = [65, 30, 0] if package.SPEC["positives"] == "label" else rows
    inputs = inputs_of(package, Case(sum(rows), sum(keys), 8, "fp64", 3.0, -1.0, seed=1))
    assert_close(over_ranks(pool, package.__name__, rows, keys), truth(loss, inputs))


@pytest.mark.parametrize(("loss", "transport"), WAYS)
def test_over_ranks(pool: Pool, packages: Packages, loss: str, transport: str) -> None:
    """Sums over keys go to all ranks before forward, those over queries after backward's work."""
    ranks_agree(pool, packages(loss, devices=3, transport=transport), loss)


WEIGHTED, WEIGHTING, TRANSPORT = (f"_runtime/{name}.py" for name in ("weighted", "weighting", "transport"))
ALONE: dict[str, Edit] = {
    "weights have no constant": (WEIGHTED, "factors[:, :1] *= constant", "factors[:, :1] *= 0"),
    "weights are not divided by their sum": (WEIGHTED, "(factors / (factors @ self._sums[:, -1:]))", "factors"),
    "queries have the first rows' part": (WEIGHTED, "self._of_queries(start + first,", "self._of_queries(first,"),
    "keys have the part of queries": (WEIGHTED, "strip.addmm_(rows, queries", "strip.addmm_(rows, self._sums[:, :-1]"),
    "dk lacks the mean": (WEIGHTING, "self._further.for_keys(total)", "{}"),
    "the loss lacks the mean": (WEIGHTED, "mean.mul_(weight *", "mean.mul_(0 *"),
}
OVER_RANKS: dict[str, Edit] = {
    "sums of keys stay at home": (WEIGHTED, "own.copy_(over_ranks(own,", "(lambda *_: None)(over_ranks(own,"),
    "sums of queries stay at home": (WEIGHTED, "self._arrived = over_ranks(", "_ = over_ranks("),
    "the last rank's sums alone": (TRANSPORT, "total += received", "total = received"),
}


@pytest.mark.parametrize("name", some(ALONE))
def test_planted_bugs_are_noticed(packages: Packages, planted: Callable[..., str], name: str) -> None:
    wrong = importlib.import_module(planted(name, "cwcl_both", (ALONE[name],)))
    with pytest.raises((AssertionError, RuntimeError)):
        test_one_device_against_the_definition(lambda _: wrong, "cwcl_both")


@pytest.mark.parametrize("name", some(OVER_RANKS))
def test_planted_bugs_of_ranks_are_noticed(
    pool: Pool, packages: Packages, planted: Callable[..., str], name: str
) -> None:
    wrong = importlib.import_module(planted(name, "cwcl_both", (OVER_RANKS[name],)))
    with pytest.raises(AssertionError):
        ranks_agree(pool, wrong, "cwcl_both")
