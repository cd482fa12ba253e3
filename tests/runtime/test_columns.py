"""Terms with the columns of any number of positives, on the CPU target: `mil_nce_multi` against the formula by hand,
alone and over ranks."""

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
from infcl_gen.runtime.columns import summed_by_id
from infcl_gen.runtime.table import Table
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import nan_misplaced, tensors
from infcl_gen.verification.worker import averaged
from tests.runtime.conftest import copy_with
from tests.runtime.in_process import World
from tests.runtime.test_several import in_panels
from tests.runtime.test_triangle import DIM, features, passes_its_selftest
from tests.tiers import some
from tests.verification.dense import dense

OWN = """
from infcl_gen.losses.language import *

X, COLUMNS = scale * z + bias, of_positive(logsumexp_over_queries(scale * z + bias))
MEAN = mean_over_positives(X)
SIGNED = LossSpec("signed", mean_over_queries(logsumexp_over_keys(X) - MEAN + tanh(COLUMNS - MEAN) / 2 - COLUMNS), "id")
"""


@functools.cache
def package(dtype: str = "fp64") -> ModuleType:
    """In panels of eight rows."""
    return in_panels(infcl_gen.load(loss="mil_nce_multi", batch_size=64, keys=128, dim=DIM, dtype=dtype, target="cpu"))


def inputs(rows: int, keys: int, scale: float, dtype: str = "fp64") -> Inputs:
    """Most queries have ids of their own, two have one; some keys are of no query, and some queries have none."""
    draw = torch.Generator().manual_seed(rows)
    query_ids, key_ids = torch.arange(rows) << 40, torch.randint(rows + 1, (keys,), generator=draw) << 40
    query_ids[rows // 2] = query_ids[0]
    return Inputs(features(rows, dtype), features(keys + 1, dtype)[1:], scale, -0.5, None, query_ids, key_ids)


def as_defined(module: ModuleType, given: Inputs) -> None:
    """Loss and all gradients in fp64 are those of the formula by hand."""
    found, truth = module.loss_and_grads(*given[:4], **given.given), dense("mil_nce_multi", *given)
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        near = 1e-12 + 2e-13 * float(given.scale)  # parts of three softmaxes cancel at positives
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=near, msg=f"{len(given.q)} rows: {name}")


SIZES = ((1, 1), (1, 5), (2, 3), (9, 20), (22, 44))


@pytest.mark.parametrize("scale", [1e-3, 14.3, 1000.0])
def test_it_is_the_formula_by_hand(scale: float) -> None:
    for rows, keys in SIZES:
        as_defined(package(), inputs(rows, keys, scale))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_as_accurate_as_the_dtypes_allow(dtype: str) -> None:
    for (rows, keys), scale in itertools.product(((2, 3), (22, 44)), (1e-3, 14.3, 1000.0)):
        module, given = package(dtype), inputs(rows, keys, scale, dtype)
        judged = gate(module.loss_and_grads(*given[:4], **given.given), truth_of(module, given))
        assert not failures(judged), failures(judged)
    assert passes_its_selftest(package(dtype))


def test_equally_many_candidates_as_the_paper_has_them() -> None:
    """Three captions of each clip, (clips, clips, 3): the sum over all that a clip and its captions have, once each."""
    q, k, clips = features(7, "fp64"), features(22, "fp64")[1:], torch.arange(7)
    q, k = (x.clone().requires_grad_() for x in (q, k))
    x = (4.0 * q @ k.T).view(7, 7, 3)
    own = x[clips, clips]
    others = torch.cat((x, x.transpose(0, 1)), 2).masked_fill(torch.eye(7, dtype=torch.bool)[:, :, None], -torch.inf)
    loss = (torch.cat((others.flatten(1), own), 1).logsumexp(1) - own.logsumexp(1)).mean()
    ids = {"query_ids": clips, "key_ids": clips.repeat_interleave(3)}
    found = package().contrastive_loss(q, k, 4.0, **ids)
    torch.testing.assert_close(found, loss)
    for ours, theirs in zip(*(torch.autograd.grad(each, (q, k)) for each in (found, loss)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_candidate_each_is_the_loss_of_pairs() -> None:
    q, k, ids = features(22, "fp32"), features(23, "fp32")[1:], torch.arange(22).flip(0)
    found = package("fp32").loss_and_grads(q, k, 14.3, query_ids=ids, key_ids=ids)
    of_pairs = infcl_gen.load(loss="mil_nce", batch_size=64, dim=DIM, dtype="fp32", target="cpu")
    for ours, theirs in zip(found, of_pairs.loss_and_grads(q, k, 14.3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_slopes_of_either_sign(tmp_path: Path) -> None:
    """Of a loss whose terms fall with the sum of columns, beside the mean of positives."""
    (tmp_path / "own.py").write_text(OWN)
    how = {"batch_size": 64, "keys": 64, "dim": DIM, "target": "cpu", "dtype": "fp64"}
    module, given = in_panels(infcl_gen.load(loss=f"{tmp_path}/own.py:SIGNED", **how)), inputs(9, 20, 2.0)
    q, k = (each.clone().requires_grad_() for each in given[:2])
    x, positive = 2.0 * q @ k.T - 0.5, given.query_ids[:, None] == given.key_ids
    found, n = positive.any(1), positive.sum(1).clamp(min=1)
    mean = (x * positive).sum(1) / n
    columns = x.logsumexp(0).expand_as(x).masked_fill(~positive & found[:, None], -torch.inf).logsumexp(1)
    terms = x.logsumexp(1) - mean + torch.tanh(columns - mean) / 2 - columns
    loss = torch.where(found, terms, 0.0).mean()
    ours = module.loss_and_grads(*given[:4], **given.given)
    for mine, theirs in zip(ours, (loss.detach(), *torch.autograd.grad(loss, (q, k))), strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("which", ["q", "k"])
def test_what_is_not_finite_stays_so(which: str) -> None:
    given = inputs(22, 44, 14.3)
    spoilt = getattr(given, which).clone()
    spoilt[5, 3] = torch.nan
    given = given._replace(**{which: spoilt})
    loss, dq, _, dscale, dbias = package().loss_and_grads(*given[:4], **given.given)
    assert loss.isnan() and dscale.isnan() and dbias.isnan() and dq[5].isnan().any()


SHARDS = (([3, 4, 2], [6, 8, 9]), ([6, 0, 10], [0, 20, 3]), ([5, 4], [0, 11]), ([1, 2, 3, 0], [4, 0, 0, 5]))


def test_a_nan_where_no_query_has_a_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` takes it: the oracle's autograd has NaN in all rows of dq. Planted: NaN is lost."""
    module, given = package("fp32"), inputs(9, 20, 1.0, "fp32")
    given = given._replace(key_ids=torch.full_like(given.key_ids, -1))
    assert nan_misplaced(module, given) == []
    found = module.loss_and_grads
    monkeypatch.setattr(
        module, "loss_and_grads", lambda *args, **how: tuple(torch.nan_to_num(x) for x in found(*args, **how))
    )
    assert {"loss", "dq", "dk"} <= set(nan_misplaced(module, given))


def over_ranks(module: ModuleType, transport: str, shards: list[int], keys: list[int]) -> None:
    world, whole = len(shards), inputs(sum(shards), sum(keys), 3.0)
    table = Table(transport, 1, world, False, module.ContrastiveLoss._package.table.travelling)
    cuts = [[0, *itertools.accumulate(each)] for each in (shards, keys)]

    def job(rank: int) -> list[Any]:
        own = whole.of_rank(*(slice(*each[rank : rank + 2]) for each in cuts))
        found = module.loss_and_grads(*own[:4], **own.given)
        leaf = own.q.clone().requires_grad_()
        (dq,) = torch.autograd.grad(module.contrastive_loss(leaf, *own[1:4], **own.given), leaf)
        torch.testing.assert_close(dq, found[1])
        return list(found)

    found = averaged(World(module, world, tables={world: table}, seed=world).run(job))
    truth = dense("mil_nce_multi", *whole)
    for name, ours, theirs in zip(truth._fields, found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"{shards}, {keys}: {name}")


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_over_ranks(transport: str) -> None:
    """Candidates on any rank; ranks without clips, without captions, and with neither."""
    for shards, keys in SHARDS:
        over_ranks(package(), transport, shards, keys)


def test_over_processes(over_processes: Callable[..., None]) -> None:
    draw = functools.partial(tensors, positives="id", with_ids=True)
    over_processes("mil_nce_multi", "gather", [5, 0, 4], draw)


def test_sums_by_id_are_exact_for_exponents_of_any_size() -> None:
    """Neighbours that leave fp64 beside each other, numbers of either sign, and ids that nobody has."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(-4, 4, (100,), generator=draw) << 50
    exponents = 1000 * torch.randn(100, generator=draw, dtype=torch.float64)
    numbers = torch.randn(100, generator=draw, dtype=torch.float64)
    numbers[::3] = 0.0
    exponents[::3] = torch.inf
    wanted = torch.cat((ids, torch.tensor([1, -(9 << 50), 9 << 50])))
    found, total = summed_by_id(ids, exponents, numbers, wanted)
    for id_, e, s in zip(wanted.tolist(), found.tolist(), total.tolist(), strict=True):
        of_id = (ids == id_) & (numbers != 0)
        if not of_id.any():
            assert s == 0
            continue
        expected = (numbers[of_id] * (exponents[of_id] - e).exp()).sum()
        assert s == pytest.approx(float(expected), rel=1e-12)
    assert all(map(torch.equal, summed_by_id(ids, exponents, numbers, wanted), (found, total)))


BUGS = {  # what is replaced where by what
    "columns are those of the own rank": ("_runtime/columns.py", "if self._group is None:", "if True:"),
    "keys keep their sums": ("_runtime/engine.py", "columns.renew(of_all[-1])", "pass"),
    "ids are cut": ("_runtime/columns.py", "ids, order = ids.sort", "ids, order = ids.int().long().sort"),
    "a key has the slope of one query": (
        "_runtime/columns.py", "total = s[distance:] * (e", "total = s[distance:] * (1 - same.double()) * (e"
    ),
    "columns have no slope by the bias": ("schedule.py", "weight + key_weight + slope", "weight + slope"),
}  # fmt: skip


@pytest.mark.parametrize("bug", some(BUGS))
def test_planted_bugs_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    name = f"mil_nce_multi_{''.join(each for each in bug if each.isalpha())}"
    monkeypatch.syspath_prepend(str(tmp_path))
    copy_with(bug, (BUGS[bug],), Path(str(package().__file__)).parent, tmp_path / name)
    with pytest.raises(AssertionError):
        over_ranks(in_panels(importlib.import_module(name)), "ring", *SHARDS[0])
