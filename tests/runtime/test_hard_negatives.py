"""Hard negatives of rows in pairs: a pair's first row alone is compared with them, and both rows have their sum."""

from __future__ import annotations

import functools
import importlib
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import infcl_gen
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.properties import FEATURES, Case, inputs_of
from infcl_gen.verification.worker import averaged
from tests.runtime.conftest import Edit, copy_with
from tests.runtime.in_process import World, table_of
from tests.runtime.test_partners import SHARDS, neighbours
from tests.runtime.test_triangle import DIM, features, in_panels, labels_of
from tests.tiers import combined, some
from tests.verification.dense import dense, dense_loss

LOSS = "three_block_hard"


@functools.cache
def package(dtype: str = "fp64") -> ModuleType:
    """In panels of eight rows."""
    return in_panels(infcl_gen.load(loss=LOSS, batch_size=64, dim=DIM, dtype=dtype, target="cpu"))


def hard(q: Tensor, labels: Tensor | None, most: int = 3) -> Tensor:
    """Of each pair, in the order of first rows: one that is random, one like the document, one above the threshold."""
    own = torch.arange(len(q)).roll(len(q) // 2) if labels is None else labels
    first = torch.arange(len(q))[torch.arange(len(q)) < own]
    near = q[own[first]] + 0.02 * q[first]
    return torch.stack((features(7 * len(q), "fp64")[: len(first)], near, 2 * q[first]), 1)[:, :most]


def as_defined(module: ModuleType, rows: int, kind: str, scale: float) -> None:
    """Loss and all gradients in fp64, those of hard negatives, too, are those of the formula by hand."""
    q, labels = features(rows, "fp64"), labels_of(rows, kind)
    ours, theirs = ([q.clone().requires_grad_(), hard(q, labels).requires_grad_()] for _ in range(2))
    loss = module.contrastive_loss(ours[0], None, scale, -0.5, labels=labels, negatives=ours[1])
    truth = dense_loss(
        LOSS, theirs[0], None, torch.tensor(scale, dtype=torch.float64), -0.5, labels, negatives=theirs[1]
    )
    found = [loss, *torch.autograd.grad(2.5 * loss, ours)]
    for each, true in zip(found, [truth, *torch.autograd.grad(2.5 * truth, theirs)], strict=True):
        torch.testing.assert_close(each, true, rtol=1e-9, atol=1e-12 + 1e-14 * scale)
    alone = module.loss_and_grads(q, None, scale, -0.5, labels=labels, negatives=ours[1].detach())
    by_hand = dense(LOSS, q, None, scale, -0.5, labels=labels, negatives=ours[1].detach())
    for name, each, true in zip(by_hand._fields, alone, by_hand, strict=True):
        if true is not None:
            torch.testing.assert_close(each, true, rtol=1e-9, atol=1e-12 + 1e-14 * scale, msg=name)


@pytest.mark.parametrize("scale", [1e-3, 2.0, 14.3, 1000.0])
def test_it_is_the_formula_by_hand(scale: float) -> None:
    for rows, kind in itertools.product((4, 6, 22), ("halves", "pairs")):
        as_defined(package(), rows, kind, scale)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_as_accurate_as_the_dtypes_allow(dtype: str) -> None:
    module = package(dtype)
    for seed, (structure, scale) in enumerate(combined(FEATURES, (1e-3, 14.3, 100.0))):
        inputs = inputs_of(module, Case(22, 22, DIM, dtype, scale, -1.0, structure, seed=seed))
        judged = gate(module.loss_and_grads(*inputs[:4], **inputs.given), truth_of(module, inputs))
        assert not failures(judged), failures(judged)


def over_ranks(module: ModuleType, transport: str, *each: list[int]) -> None:
    """The average of the ranks' results is that of the formula by hand; negatives stay."""
    for shards in each:
        world, rows = len(shards), sum(shards)
        q, labels = features(rows, "fp64"), neighbours(rows)
        n, halves = hard(q, labels), [each // 2 for each in shards]

        def job(
            rank: int, q: Tensor = q, labels: Tensor = labels, n: Tensor = n, shards: list[int] = shards,
            halves: list[int] = halves,
        ) -> list[Any]:  # fmt: skip
            own, named, further = (x.split(sizes)[rank] for x, sizes in ((q, shards), (labels, shards), (n, halves)))
            found = module.loss_and_grads(own, None, 3.0, -1.0, labels=named, negatives=further)
            leaves = own.clone().requires_grad_(), further.clone().requires_grad_()
            loss = module.contrastive_loss(leaves[0], None, 3.0, -1.0, labels=named, negatives=leaves[1])
            dq, dn = torch.autograd.grad(loss, leaves)
            torch.testing.assert_close(dq, found[1], rtol=1e-12, atol=1e-15)
            return [*found[:2], dn, *found[3:]]

        tables = {world: table_of(module, transport, world)}
        found = averaged(World(module, world, tables=tables, seed=rows).run(job))
        leaf = n.clone().requires_grad_()
        truth = dense(LOSS, q, None, 3.0, -1.0, labels=labels, negatives=n)
        whole = dense_loss(LOSS, q, None, torch.tensor(3.0, dtype=torch.float64), -1.0, labels, negatives=leaf)
        truth = truth._replace(dk=torch.autograd.grad(whole, leaf)[0])
        for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"{shards}: {name}")


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_over_ranks(transport: str) -> None:
    over_ranks(package(), transport, *SHARDS)


def test_negatives_that_are_all_above_the_threshold_leave_three_block() -> None:
    """As padding is: twice the query."""
    q = features(22, "fp64")
    found = package().loss_and_grads(q, None, 14.3, 0.5, negatives=2 * q[:11, None])
    without = infcl_gen.load(loss="three_block", batch_size=64, dim=DIM, dtype="fp64", target="cpu")
    for ours, theirs in zip(found, without.loss_and_grads(q, None, 14.3, 0.5), strict=True):
        assert ours is theirs is None or torch.allclose(ours, theirs, rtol=1e-12, atol=1e-15)
    pair = package().loss_and_grads(features(2, "fp64"), None, 14.3, negatives=2 * features(2, "fp64")[:1, None])
    assert float(pair[0]) == 0 and not bool(pair[1].any())


def test_wrong_negatives_are_refused() -> None:
    q = features(6, "fp64")
    shape = rf"of shape \(3, H, {DIM}\), with H at least 1, of pairs in the order of their first rows, on cpu"
    for wrong, said in ((q[:, None], r"\(6, 1, "), (q[:3, None, 1:], r"\(3, 1, "), (q[:3, None][:, :0], r"\(3, 0, ")):
        with pytest.raises(
            ValueError, match=f"negatives must be a dense floating-point tensor {shape}, not of shape {said}"
        ):
            package().contrastive_loss(q, None, negatives=wrong)
        with pytest.raises(ValueError, match=r"this loss needs negatives, floating-point of shape \(3, 'H', "):
            package().reference(q, None, negatives=wrong)
    with pytest.raises(ValueError, match=f"{LOSS} needs negatives: .* {shape}$"):
        package().contrastive_loss(q, None)


NEGATIVES, SPREAD = "_runtime/negatives.py", "index_select(0, found.of_row)\n"
BUGS: dict[str, Edit] = {
    "the second row is compared": (
        NEGATIVES,
        "rows = q.index_select(0, found.first)",
        "rows = q.index_select(0, found.other)",
    ),
    "the threshold is another pair's": (NEGATIVES, "> most[:, None]", "> most.roll(1)[:, None]"),
    "nothing is left out": (NEGATIVES, "z.detach() > most[:, None]", "z.detach() > math.inf"),
    "only the first row has the sum": (NEGATIVES, SPREAD, f"{SPREAD[:-1]}.index_fill(0, found.other, -math.inf)\n"),
    "pairs are those of halves": (NEGATIVES, "if labels is not None and rows:", "if False:"),
    "labels count from this rank's first": (NEGATIVES, "labels - labels.min()", "labels"),
}


@pytest.mark.parametrize("bug", some(BUGS))
def test_planted_bugs_are_noticed(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"hard_{''.join(c for c in bug if c.isalpha())}"
    monkeypatch.syspath_prepend(str(tmp_path))
    copy_with(bug, (BUGS[bug],), Path(str(package().__file__)).parent, tmp_path / name)
    wrong = in_panels(importlib.import_module(name))
    with pytest.raises(AssertionError):
        as_defined(wrong, 22, "pairs", 2.0)
        over_ranks(wrong, "ring", [8, 4, 0, 10])
