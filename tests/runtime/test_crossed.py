"""Losses whose terms have the sums of a row and of the column of one index, on the CPU target: `mil_nce` against the
formula by hand, alone and over ranks; what is refused."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import infcl_gen
from infcl_gen.errors import InputError
from infcl_gen.losses import BUILTIN_LOSSES
from infcl_gen.runtime.table import Table
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import tensors
from infcl_gen.verification.worker import averaged
from tests.runtime.conftest import copy_with
from tests.runtime.in_process import World
from tests.runtime.test_several import SHARDS, in_panels
from tests.runtime.test_triangle import DIM, features, passes_its_selftest
from tests.tiers import some
from tests.verification.dense import dense

LOSSES = ("mil_nce", "weighed_by_column", "decoupled_clip")
KERNELS = Path(__file__).parent.parent / "kernels" / "losses.py"
OWN = """
from infcl_gen.losses.language import *

X, OTHERS = scale * z + bias, (1 - is_positive) * (1 - same_id)
ROW, COLUMN = logsumexp_over_keys(X, where=OTHERS), of_positive(logsumexp_over_queries(X, where=OTHERS))
BOTH = LossSpec("both", mean_over_queries((ROW + COLUMN) / 2 - positive(X)))
"""


@functools.cache
def package(dtype: str = "fp64", loss: str = "mil_nce") -> ModuleType:
    """In panels of eight rows."""
    loss = loss if loss in BUILTIN_LOSSES else f"{KERNELS}:{loss}"
    return in_panels(infcl_gen.load(loss=loss, batch_size=64, dim=DIM, dtype=dtype, target="cpu"))


def inputs(rows: int, scale: float, dtype: str = "fp64") -> Inputs:
    return Inputs(features(rows, dtype), features(rows + 1, dtype)[1:], scale, -0.5)


def as_defined(module: ModuleType, given: Inputs, loss: str = "mil_nce") -> None:
    """Loss and all gradients in fp64 are those of the formula by hand."""
    found, truth = module.loss_and_grads(*given[:4]), dense(loss, *given)
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        near = 1e-12 + 1e-14 * float(given.scale)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=near, msg=f"{len(given.q)} rows: {name}")


@pytest.mark.parametrize("scale", [1e-3, 1.0, 14.3])
@pytest.mark.parametrize("loss", LOSSES)
def test_it_is_the_formula_by_hand(loss: str, scale: float) -> None:
    for rows in (1, 2, 9, 22):
        as_defined(package(loss=loss), inputs(rows, scale), loss)
    as_defined(package(), inputs(22, 1000.0))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_as_accurate_as_the_dtypes_allow(dtype: str) -> None:
    for loss, scale in itertools.product(LOSSES, (1e-3, 14.3, 1000.0)):
        module, given = package(dtype, loss), inputs(22, scale, dtype)
        judged = gate(module.loss_and_grads(*given[:4]), truth_of(module, given))
        assert not failures(judged), failures(judged)
    assert passes_its_selftest(package(dtype))


def test_pairs_that_are_certain_have_gradients_to_the_last_digit() -> None:
    """A share of e^-40 beside that of the pair is none of its roundings. A lone pair has a loss of 0."""
    own = torch.eye(8, DIM, dtype=torch.float32)
    loss, dq, dk, dscale, _ = package("fp32").loss_and_grads(own, own, 40.0)
    share = 14 * torch.tensor(-40.0).exp() / 8
    torch.testing.assert_close(loss, 8 * share, rtol=1e-5, atol=0)
    torch.testing.assert_close(dq.diagonal(), (-40 * share).expand(8), rtol=1e-5, atol=0)
    torch.testing.assert_close(dk, dq, rtol=1e-5, atol=0)
    torch.testing.assert_close(dscale, -8 * share, rtol=1e-5, atol=0)
    assert all(not bool(each.any()) for each in package("fp32").loss_and_grads(own[:1], own[:1], 40.0))


@pytest.mark.parametrize("which", ["q", "k"])
def test_what_is_not_finite_stays_so(which: str) -> None:
    given = inputs(22, 14.3)
    spoilt = getattr(given, which).clone()
    spoilt[5, 3] = torch.nan
    loss, dq, dk, dscale, dbias = package().loss_and_grads(*given._replace(**{which: spoilt})[:4])
    assert loss.isnan() and dscale.isnan() and dbias.isnan() and dq.isnan().any(1).all() and dk.isnan().any(1).all()


def over_ranks(module: ModuleType, transport: str, shards: list[int], nodes: int = 1, loss: str = "mil_nce") -> None:
    world, rows = len(shards), sum(shards)
    table = Table(transport, nodes, world // nodes, False, module.ContrastiveLoss._package.table.travelling)
    whole, offsets = inputs(rows, 3.0), [0, *itertools.accumulate(shards)]

    def job(rank: int) -> list[Any]:
        own = whole.of_rank(*[slice(*offsets[rank : rank + 2])] * 2)
        found = module.loss_and_grads(*own[:4])
        for place in (0, 1):  # a side alone, beside which the other is frozen
            leaf = own[place].clone().requires_grad_()
            loss = module.contrastive_loss(*own[:place], leaf, *own[place + 1 : 4])
            torch.testing.assert_close(*torch.autograd.grad(loss, leaf), found[1 + place])
        return list(found)

    found = averaged(World(module, world, tables={world: table}, seed=rows).run(job))
    for name, ours, theirs in zip(dense(loss, *whole)._fields, found, dense(loss, *whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"{shards}: {name}")


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_over_ranks(transport: str) -> None:
    """Uneven and empty ranks: the average of their results is the formula by hand, also where one side is frozen."""
    for shards in SHARDS:
        over_ranks(package(), transport, shards)
    over_ranks(package(loss="decoupled_clip"), transport, SHARDS[-1], loss="decoupled_clip")
    if transport == "ring":
        over_ranks(package(), transport, [3, 2, 4, 1], nodes=2)


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_over_processes(over_processes: Callable[..., None], transport: str) -> None:
    over_processes("mil_nce", transport, [5, 0, 4], functools.partial(tensors, positives="diagonal"))


def test_a_query_and_its_key_lie_on_one_rank() -> None:
    whole = inputs(9, 3.0)
    table = Table("ring", 1, 2, False, package().ContrastiveLoss._package.table.travelling)

    def job(rank: int) -> str:
        own = whole.of_rank(*(slice(*sides[rank]) for sides in (((0, 4), (4, 9)), ((0, 5), (5, 9)))))
        with pytest.raises(ValueError, match=r"^mil_nce takes a query and its own key on one rank") as error:
            package().contrastive_loss(*own[:4])
        return str(error.value)

    said = World(package(), 2, tables={2: table}).run(job)
    assert said[0] == said[1] and said[0].endswith("as many keys as queries, not 5 and 4 as rank 0 has")


def test_a_ring_keeps_no_keys() -> None:
    """Whose factors forward does not know."""
    sizes = {"loss": "mil_nce", "batch_size": 64, "dim": DIM, "devices": 4, "target": "cpu"}
    assert not infcl_gen.plan(**sizes, set={"transport": "ring"}).keeps
    with pytest.raises(InputError, match=r"in mil_nce keys travel with their factors in backward; valid: off$"):
        infcl_gen.plan(**sizes, set={"transport": "ring", "keeps": "on"})


def test_ways_of_calling_agree() -> None:
    """The module, the loss without sizes, a compiled call, and the two sides exchanged."""
    given, module = inputs(22, 14.3, "fp32"), package("fp32")
    loss, dq, *_ = module.loss_and_grads(*given[:4])
    assert torch.equal(loss, module.ContrastiveLoss()(*given[:4]))
    torch.testing.assert_close(loss, infcl_gen.ContrastiveLoss("mil_nce")(*given[:4]))
    torch.testing.assert_close(loss, module.contrastive_loss(given.k, given.q, *given[2:4]))
    leaf = given.q.clone().requires_grad_()
    run = torch.compile(lambda x: module.contrastive_loss(x, *given[1:4]), backend="aot_eager", fullgraph=True)
    assert torch.equal(dq, torch.autograd.grad(run(leaf), leaf)[0])


@pytest.mark.parametrize("rows", [1, 22])
def test_a_loss_of_ones_own_beside_ids(tmp_path: Path, rows: int) -> None:
    """Sums of nothing have no weight: of one pair, and of a row all keys of which have its id."""
    (tmp_path / "own.py").write_text(OWN)
    module = infcl_gen.load(loss=f"{tmp_path}/own.py:BOTH", batch_size=64, dim=DIM, target="cpu", dtype="fp64")
    given, ids = inputs(rows, 3.0), torch.arange(rows) // 3
    leaves = [x.clone().requires_grad_() for x in (given.q, given.k)] + [torch.tensor(3.0).double().requires_grad_()]
    x = leaves[2] * leaves[0] @ leaves[1].T
    others = x.masked_fill((ids[:, None] == ids) | torch.eye(rows, dtype=torch.bool), -torch.inf)
    truth = -x.diagonal().mean() + (0.0 if rows == 1 else (others.logsumexp(1) + others.logsumexp(0)).mean() / 2)
    found = in_panels(module).loss_and_grads(*given[:4], query_ids=ids, key_ids=ids)
    for ours, theirs in zip(found[1:4], torch.autograd.grad(truth, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert float(found[4]) == pytest.approx(-1.0 if rows == 1 else 0.0, abs=1e-12)
    assert float(found[0]) == (-torch.inf if rows == 1 else pytest.approx(truth.item()))


BUGS = {  # the loss, and what is replaced in its schedule by what
    "the sum of a column is that of a row": ("mil_nce", "log(block.keys, rows)", "log(block.queries, rows)"),
    "a column has the weight of its row": ("weighed_by_column", "(of_columns / key_weight)", "(of_columns / weight)"),
    "columns keep their sums": ("mil_nce", "(of_columns / key_weight)", "(of_columns + 0.0 * key_weight)"),
    "the weights of columns are no part of the bias": ("mil_nce", "weight + key_weight + slope", "weight + slope"),
}
BUGS_OVER_RANKS = {  # what is replaced where, and by which transport
    "a gather sends no statistics again": (
        "_runtime/table.py", ' if x.forward == "absent" or x.renewed', ' if x.forward == "absent"', "gather",
    ),
    "a ring changes others' statistics": (
        "_runtime/engine.py", "finished = panel_columns(saved.of_keys", "panel_columns(saved.of_keys", "ring"
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", some(BUGS))
def test_planted_bugs_are_noticed(with_bug: Callable[..., ModuleType], bug: str) -> None:
    loss, *edit = BUGS[bug]
    wrong = in_panels(with_bug(package(loss=loss), bug, *edit))
    with pytest.raises(AssertionError):
        as_defined(wrong, inputs(22, 3.0), loss)


@pytest.mark.parametrize("bug", some(BUGS_OVER_RANKS))
def test_planted_bugs_of_transports_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    *edit, transport = BUGS_OVER_RANKS[bug]
    name = f"mil_nce_{''.join(each for each in bug if each.isalpha())}"
    monkeypatch.syspath_prepend(str(tmp_path))
    copy_with(bug, (tuple(edit),), Path(str(package().__file__)).parent, tmp_path / name)
    with pytest.raises(AssertionError):
        over_ranks(in_panels(importlib.import_module(name)), transport, [6, 3, 4])
