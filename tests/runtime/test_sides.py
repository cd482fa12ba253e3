"""Losses of one side whose terms combine a row's sum and its positive, on the CPU target: against formulas by hand."""

from __future__ import annotations

import functools
import importlib
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
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import tensors
from infcl_gen.verification.worker import averaged
from tests.runtime.in_process import World, table_of
from tests.runtime.test_triangle import DIM, features, in_panels, labels_of, passes_its_selftest
from tests.tiers import combined, in_pairs, nightly, some
from tests.verification.dense import dense

LOSSES = (
    "dcl", "dclw", "debiased", "hard_negative", "rince_of_rows", "margin_of_rows", "weighed_of_rows", "capped_of_rows",
)  # fmt: skip
OVERFLOWING = ("rince_of_rows", "margin_of_rows", "weighed_of_rows", "capped_of_rows")  # as they are written by hand
OWN = Path(__file__).parent.parent / "kernels" / "losses.py"


@functools.cache
def package(loss: str, dtype: str = "fp64") -> ModuleType:
    """In panels of eight rows."""
    name = loss if loss in BUILTIN_LOSSES else f"{OWN}:{loss}"
    return in_panels(infcl_gen.load(loss=name, batch_size=64, dim=DIM, dtype=dtype, target="cpu"))


def as_defined(module: ModuleType, loss: str, rows: int, kind: str, scale: float) -> None:
    """Loss and all gradients in fp64 are those of the formula by hand."""
    q, labels = features(rows, "fp64"), labels_of(rows, kind)
    found = module.loss_and_grads(q, None, scale, -0.5, labels=labels)
    truth = dense(loss, q, None, scale, -0.5, labels=labels)
    assert found[2] is None
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"{loss}, {rows} rows: {name}")


@pytest.mark.parametrize(
    ("loss", "kind", "scale"), in_pairs(LOSSES, ["halves", "pairs", "any"], [1e-3, 2.0, 14.3, 1000.0])
)
def test_it_is_the_formula_by_hand(loss: str, kind: str, scale: float) -> None:
    """Labels that are mutual and that are not; scale and bias where a term depends on them besides its logits."""
    for rows in (3, 6, 22):
        if rows % 2 and kind != "any":
            continue
        if scale == 1000.0 and loss in OVERFLOWING:
            continue
        as_defined(package(loss), loss, rows, kind, scale)


@pytest.mark.parametrize(("loss", "dtype"), combined(LOSSES, ["bf16", "fp32"]))
def test_as_accurate_as_the_dtypes_allow(loss: str, dtype: str) -> None:
    for rows, kind, scale in in_pairs((6, 22), ("pairs", "any"), (1e-3, 14.3, 1000.0)):
        module, inputs = package(loss, dtype), Inputs(features(rows, dtype), None, scale, -1.0, labels_of(rows, kind))
        judged = gate(module.loss_and_grads(*inputs[:4], labels=inputs.labels), truth_of(module, inputs))
        assert not failures(judged), failures(judged)
    assert passes_its_selftest(package(loss, dtype))


def test_the_lower_bound_of_debiased_sums() -> None:
    """Rows near their positives are below it at scale 14.3, those far away are above; none is within ten roundings.

    At 1 000 neither side of the bound overflows.
    """
    first, second = features(22, "fp64").chunk(2)
    near = torch.nn.functional.normalize(torch.cat([first, first + 0.05 * second]), dim=1)
    for q, scale, below in ((near, 14.3, 22), (features(22, "fp64"), 2.0, 0), (near, 1000.0, 22)):
        x, own = scale * (q @ q.T), torch.arange(22).roll(11)
        negatives = x.clone().fill_diagonal_(-math.inf).scatter(1, own[:, None], -math.inf).logsumexp(1)
        share = 2.0 * torch.exp(x[torch.arange(22), own] - negatives)  # tau_plus N e^p over S
        rest = negatives + torch.log((1 - share).clamp(min=0.0) / 0.9)
        apart = rest - (math.log(20) - scale)
        assert int((apart < 0).sum()) == below and float(apart.abs().min()) > 1e-6
        found = package("debiased").loss_and_grads(q, None, scale)
        for ours, theirs in zip(found, dense("debiased", q, None, scale), strict=True):
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


def test_two_rows_have_no_negatives() -> None:
    q = features(2, "fp64")
    loss, dq, _, dscale, dbias = package("dcl").loss_and_grads(q, None, 2.0, 0.5)
    assert float(loss) == -math.inf and float(dbias) == -1
    torch.testing.assert_close(dq, -2.0 * q.flip(0))
    torch.testing.assert_close(dscale, -(q[0] * q[1]).sum())
    # Whose weights, of one similarity, are 1 whatever that is.
    for ours, dcl in zip(
        package("dclw").loss_and_grads(q, None, 2.0), (loss, dq, None, dscale, 0 * dbias), strict=True
    ):
        if dcl is not None:
            torch.testing.assert_close(ours, dcl)
    for name in ("debiased", "hard_negative"):
        loss, dq, _, dscale, _ = package(name).loss_and_grads(q, None, 2.0)
        assert (float(loss), float(dscale)) == (0, 0) and not bool(dq.any())


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_not_finite_stays_so(loss: str) -> None:
    q = features(22, "fp64")
    q[5, 3] = torch.nan
    loss_of_all, dq, _, dscale, _ = package(loss).loss_and_grads(q, None, 14.3)
    assert loss_of_all.isnan() and dscale.isnan() and dq.isnan().all()


SHARDS = ([6, 0, 10], [2, 2], [0, 12], [5, 3, 7], [1, 1], [1, 2, 3], [3, 0, 1, 2])


def over_ranks(module: ModuleType, loss: str, transport: str, shards: list[int], labels: Tensor) -> None:
    """The average of the ranks' results is that of the formula by hand; autograd gives the same gradient."""
    world, rows = len(shards), sum(shards)
    table = table_of(module, transport, world)
    q = features(rows, "fp64")

    def job(rank: int) -> list[Any]:
        own, named = q.split(shards)[rank], labels.split(shards)[rank]
        found = module.loss_and_grads(own, None, 3.0, -1.0, labels=named)
        leaf = own.clone().requires_grad_()
        (dq,) = torch.autograd.grad(module.contrastive_loss(leaf, None, 3.0, -1.0, labels=named), leaf)
        assert torch.equal(dq, found[1])
        return list(found)

    found = averaged(World(module, world, tables={world: table}, seed=rows).run(job))
    truth = dense(loss, q, None, 3.0, -1.0, labels=labels)
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        if theirs is not None and rows > 2:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"{shards}: {name}")


@pytest.mark.parametrize(("loss", "transport"), combined(LOSSES, ["ring", "gather"]))
def test_over_ranks(loss: str, transport: str) -> None:
    """Uneven and empty ranks; rows whose positive is on another rank, and is not theirs."""
    for shards in nightly(SHARDS, ([6, 0, 10], [3, 0, 1, 2])):
        over_ranks(package(loss), loss, transport, shards, labels_of(sum(shards), "any"))
    over_ranks(package(loss), loss, transport, [6, 4, 2], labels_of(12, "pairs"))


@pytest.mark.parametrize(
    ("loss", "transport", "rows"),
    in_pairs(["dcl", "dclw", "hard_negative"], ["ring", "gather"], [(1, 2, 3), (7, 0, 4)]),
)
def test_over_processes(over_processes: Callable[..., None], loss: str, transport: str, rows: tuple[int, ...]) -> None:
    """On gloo, with labels of any row: the average of the ranks is the formula by hand."""
    over_processes(loss, transport, list(rows), functools.partial(tensors, positives="label", one_sided=True))


def test_rows_have_numbers_of_their_own(tmp_path: Path) -> None:
    """A weight and further negatives of each row, with their gradients."""
    (tmp_path / "own.py").write_text(OWN_NUMBERS)
    module = in_panels(
        infcl_gen.load(loss=f"{tmp_path}/own.py:MINE", batch_size=64, dim=DIM, dtype="fp64", target="cpu")
    )
    q, labels, draw = features(22, "fp64"), labels_of(22, "any"), torch.Generator().manual_seed(3)
    assert labels is not None
    leaves = [q, torch.rand(22, generator=draw, dtype=torch.float64) - 0.3]
    leaves += [torch.randn(22, 2, DIM, generator=draw, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)]
    q, weight, negatives, scale = (x.requires_grad_() for x in leaves)
    loss = module.contrastive_loss(q, None, scale, labels=labels, query_weight=weight, negatives=negatives)
    x = scale * (q @ q.T)
    sums = (x.exp() - torch.diag(x.exp().diagonal())).sum(1) + (scale * (negatives @ q[:, :, None])[..., 0]).exp().sum(
        1
    )
    truth = (weight * (sums.log() - x[torch.arange(22), labels])).mean()
    torch.testing.assert_close(loss, truth)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


OWN_NUMBERS = """
from infcl_gen.losses.language import *

x = scale * similarity("query", "query")
r = logsumexp_over_keys(x, where=1 - is_self)
with_own = r + softplus(logsumexp_over_negatives(x) - r)
MINE = LossSpec("mine", mean_over_queries(query_weight * (with_own - positive(x))), positives="label")
"""


@pytest.mark.parametrize("loss", LOSSES)
def test_over_ranks_a_label_on_a_device_that_names_its_own_row_gives_nan(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such labels are looked at once only. Each row sees the row without a positive: all gradients are NaN, and the
    loss of its rank; where terms depend on the positives of all rows that of every rank."""
    module, shards = package(loss), [4, 2]
    agreement = importlib.import_module(f"{module.__name__}._runtime.agreement")
    monkeypatch.setattr(agreement, "_label_range", lambda *_: (0, -1))

    def job(rank: int) -> list[bool]:
        labels = torch.tensor([1, 0, 3, 2, 4, 4]).split(shards)[rank]
        found = module.loss_and_grads(features(6, "fp64").split(shards)[rank], None, labels=labels)
        return [bool(found[0].isnan()), bool(found[1].isnan().all()), bool(found[3].isnan())]

    assert World(module, 2).run(job) == [[loss == "dclw", True, True], [True, True, True]]


def test_ways_of_calling_agree() -> None:
    """The module, the loss without sizes, a compiled call, and an upstream gradient."""
    q, module = features(22, "fp32"), package("dcl", "fp32")
    loss, dq, *_ = module.loss_and_grads(q, None, 14.3)
    assert torch.equal(loss, module.ContrastiveLoss()(q, None, 14.3))
    torch.testing.assert_close(loss, infcl_gen.ContrastiveLoss("dcl")(q, None, 14.3))
    leaf = q.clone().requires_grad_()
    run = torch.compile(lambda x: module.contrastive_loss(x, None, 14.3), backend="aot_eager", fullgraph=True)
    assert torch.equal(dq, torch.autograd.grad(run(leaf), leaf)[0])
    assert torch.equal(4 * dq, torch.autograd.grad(4 * module.contrastive_loss(leaf, None, 14.3), leaf)[0])


ONE_SIDE = "(rows, keys, 1),):\n        at, there"
MUTUAL = "torch.where(mutual, noted_there[0, there], softmax)"
# The loss, and what is replaced in its schedule by what.
BUGS = {
    "columns leave out the positives of rows": ("dcl", "x2[visible[::-1]] = -math.inf", "x2[row, column] = -math.inf"),
    "columns leave out the positives of rows, too": ("dcl", "x2[row, column] = of_positives\n", "x2 += 0.0\n"),
    "b is that of the other axis": ("rince_of_rows", MUTUAL, MUTUAL.replace("noted_there[0, there]", "noted[0, at]")),
    "a positive that is not mutual has no share of the other row": ("rince_of_rows", MUTUAL, "noted_there[0, there]"),
    "columns have the weights of rows": (
        "rince_of_rows", "formulas.KEY_SHARE / block.keys.mantissa", "query_weight[:1]",
    ),
    "z is lost once g takes its place": ("rince_of_rows", "positive[4, rows] = positive[0, rows]", "positive[4] = 0.0"),
    "columns have no second sums": (
        "hard_negative", "add_(part.key_second, torch.mul(x2, formulas.MULTIPLE, out=e), e, 0)", "pass",
    ),
    "a pair has the second share of one row": (
        "hard_negative", "g[strip].add_(multiple.sub_(block.key_second.exponent).exp2_()", "(0.0 * (multiple)",
    ),
    "the positive of another row has its first share alone": (
        "weighed_of_rows", ".div_(second.mantissa)", ".div_(second.mantissa) * 0.0",
    ),
    "the second sum has the weight of the first": ("hard_negative", "/ second_weight)", "/ weight)"),
    "the positive has no share in the second sum": ("weighed_of_rows", " + second_weight * torch.exp(", " + 0 * ("),
    "the second share is no part of the bias": ("weighed_of_rows", "weight + second_weight + slope", "weight + slope"),
    "positives of columns have no slope by their similarity": (
        "capped_of_rows", "(rows, keys, 1), (keys, rows, -1)):\n        at, there", ONE_SIDE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", some(BUGS))
def test_planted_bugs_are_noticed(with_bug: Callable[..., ModuleType], bug: str) -> None:
    loss, *edit = BUGS[bug]
    wrong = in_panels(with_bug(package(loss), bug, *edit))
    with pytest.raises(AssertionError):
        for kind in ("any", "pairs"):
            as_defined(wrong, loss, 22, kind, 2.0)
