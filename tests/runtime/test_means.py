"""Losses with the mean of all logits, as label smoothing has it: torch's own cross-entropy is the truth."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from infcl_gen.runtime.means import EACH, STRIP_ROWS, _by_parts, sum_of
from infcl_gen.runtime.table import Table
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import Case, inputs_of
from infcl_gen.verification.worker import averaged
from tests.kernels.planted import Edit
from tests.tiers import combined, in_pairs, nightly, some
from tests.verification.dense import dense, dense_loss

from .in_process import World

Packages = Callable[..., ModuleType]
LOSSES = ("smooth", "smooth_clip", "smooth_rince")
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SCALE, BIAS = 3.0, -1.0


def batch(loss: str, seed: int = 0, rows: int = 70, keys: int = 93) -> Inputs:
    """Features whose means are far from 0: a wrong mean is seen."""
    generator = torch.Generator().manual_seed(seed)
    paired = loss == "smooth_clip"
    counts = rows, rows if paired else keys
    q, k = (torch.randn(n, 8, generator=generator, dtype=torch.float64) / 3 + 0.2 for n in counts)
    labels = None if paired else torch.randint(counts[1], (rows,), generator=generator)
    return Inputs(q, k - 0.5, SCALE, BIAS, labels)


def assert_close(found: Any, expected: Any) -> None:
    for name, ours, theirs in zip(("loss", "dq", "dk", "dscale", "dbias"), found, expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def as_defined(package: ModuleType, loss: str) -> None:
    for seed, rows in enumerate((70, 1, 9)):
        inputs = batch(loss, seed, rows)
        truth = dense(loss, *inputs)
        assert_close(package.loss_and_grads(*inputs[:4], labels=inputs.labels), truth)
        torch.testing.assert_close(package.reference(*inputs[:4], labels=inputs.labels), truth.loss, **CLOSE)
        leaves = inputs.leaves(torch.float64, torch.float64)
        value = package.contrastive_loss(*leaves, labels=inputs.labels, reduction="sum", grad_sync="sum")
        found = torch.autograd.grad(value, leaves, -2 * torch.ones_like(value))
        assert_close([value / rows, *(x / (-2 * rows) for x in found)], truth)


@pytest.mark.parametrize("loss", LOSSES)
def test_one_device_against_the_definition(packages: Packages, loss: str) -> None:
    as_defined(packages(loss), loss)


@pytest.mark.parametrize("wanted", range(1, 16))
@pytest.mark.parametrize("loss", LOSSES)
def test_some_gradients_alone(packages: Packages, loss: str, wanted: int) -> None:
    """Of a frozen side, too, whose product is left out: scale then takes the other's."""
    inputs = batch(loss)
    leaves = inputs.leaves(torch.float64, torch.float64)
    chosen = [x.requires_grad_(bool(wanted >> bit & 1)) for bit, x in enumerate(leaves)]
    value = packages(loss).contrastive_loss(*leaves, labels=inputs.labels)
    found = iter(torch.autograd.grad(value, [x for x in chosen if x.requires_grad]))
    truth = dense(loss, *inputs)
    expected = [each if wanted >> bit & 1 else None for bit, each in enumerate(truth[1:])]
    assert_close(
        [value.detach(), *(next(found) if each is not None else None for each in expected)], [truth[0], *expected]
    )


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("loss", LOSSES[:2])
def test_a_side_that_was_planned_to_be_frozen(packages: Packages, loss: str, side: str) -> None:
    inputs = batch(loss)
    leaves = inputs.leaves(torch.float64, torch.float64)
    leaves["qk".index(side[0])].requires_grad_(False)
    given = [x for x in leaves if x.requires_grad]
    value = packages(loss, frozen=side).contrastive_loss(*leaves, labels=inputs.labels)
    truth = [each for each, leaf in zip(dense(loss, *inputs)[1:], leaves, strict=True) if leaf.requires_grad]
    for ours, theirs in zip(torch.autograd.grad(value, given), truth, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize(("loss", "dtype"), combined(LOSSES[:2], ["bf16", "fp16", "fp32"]))
def test_as_accurate_as_the_dtypes_allow(packages: Packages, loss: str, dtype: str) -> None:
    """Also of keys that lie far from the origin, whose mean is all but each of them; and of a query and key alone."""
    package = packages(loss, dtype)
    for features, scale, rows in in_pairs(("unit", "matched", "negative", "duplicate"), (1.0, 100.0), (1, 129)):
        inputs = inputs_of(package, Case(rows, rows, 8, dtype, scale, -1.0, features, seed=rows))
        judged = gate(package.loss_and_grads(*inputs[:4], labels=inputs.labels), truth_of(package, inputs))
        assert not failures(judged), f"{features}, {scale}, {rows}: {failures(judged)}"
    assert package.selftest()["ok"]


def test_the_gate_has_little_room_for_a_wrong_mean(packages: Packages) -> None:
    """A mean that is off by a hundredth is beyond what fp32 may cost."""
    package = packages("smooth", "fp32")
    inputs = inputs_of(package, Case(129, 129, 8, "fp32", 1.0, -1.0, "matched"))
    found, truth = package.loss_and_grads(*inputs[:4], labels=inputs.labels), truth_of(package, inputs)
    assert not failures(gate(found, truth))
    off = 1e-2 * 0.1 * inputs.k.mean(0) / len(inputs.q)
    assert "dq" in failures(gate((found[0], found[1] + off, *found[2:]), truth))


@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize("loss", LOSSES)
def test_nan_in_nan_out(packages: Packages, loss: str, which: str) -> None:
    inputs = batch(loss)
    getattr(inputs, which)[5, 3] = torch.nan
    value, dq, dk, dscale, dbias = packages(loss).loss_and_grads(*inputs[:4], labels=inputs.labels)
    assert value.isnan() and dscale.isnan() and dbias.isnan()
    side, other = (dq, dk) if which == "q" else (dk, dq)
    assert side[5].isnan().all() and other[:, 3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, STRIP_ROWS, EACH, 3 * EACH + 5])
def test_sums_of_rows(rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 20).to(dtype) + 1
    truth = x.double().sum(0)
    for each in (x, x.T.contiguous().T, torch.stack((x, x), 2)[:, :, 0]):
        torch.testing.assert_close(sum_of(each, torch.float64), truth, rtol=1e-13, atol=1e-13)
        for statistics, error in ((torch.float64, 1e-13), (torch.float32, 1e-6)):  # as on a GPU
            torch.testing.assert_close(_by_parts(each, statistics), truth, rtol=error, atol=error)


def test_a_compiled_step(packages: Packages) -> None:
    inputs = batch("smooth")
    package = packages("smooth")

    def step(q: Tensor, k: Tensor) -> Tensor:
        value: Tensor = package.contrastive_loss(q, 2 * k, SCALE, BIAS, labels=inputs.labels)
        return value

    leaves = [x.clone().requires_grad_() for x in inputs[:2]]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    truth = dense_loss("smooth", leaves[0], 2 * leaves[1], SCALE, BIAS, inputs.labels)
    value = compiled(*leaves)
    torch.testing.assert_close(value, truth, **CLOSE)
    for ours, theirs in zip(torch.autograd.grad(value, leaves), torch.autograd.grad(truth, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


SHARDS = [([9], [9]), ([6, 10], [10, 6]), ([5, 0, 9], [4, 10, 0]), ([70, 3, 0], [0, 3, 70]), ([0, 2, 0], [1, 0, 1])]


def over_ranks(
    package: ModuleType, loss: str, transport: str, keeps: bool, shards: tuple[list[int], list[int]]
) -> None:
    """The average of the ranks is the definition's; equal calls give equal bits; a gradient of one side alone, too."""
    rows, keys = shards
    world, inputs = len(rows), batch(loss, 3, sum(rows), sum(keys))
    travelling = package.ContrastiveLoss._package.table.travelling
    table = Table(transport, 1, world, keeps and transport == "ring", travelling)

    def job(rank: int) -> list[Any]:
        own = inputs.of_rank(*(slice(sum(counts[:rank]), sum(counts[: rank + 1])) for counts in (rows, keys)))
        found = list(package.loss_and_grads(*own[:4], labels=own.labels))
        for place in (0, 1):
            leaves = own.leaves(torch.float64, torch.float64)
            one = leaves[place]
            others = [x if x is one else x.detach() for x in leaves]
            (alone,) = torch.autograd.grad(package.contrastive_loss(*others, labels=own.labels), one)
            assert torch.equal(alone, found[1 + place])
        return found

    results = [World(package, world, tables={world: table}, seed=seed).run(job) for seed in (1, 2)]
    for first, second in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), (
            "results depend on the order of events"
        )
    assert_close(averaged(results[0]), dense(loss, *inputs))


@pytest.mark.parametrize(("loss", "way"), combined(LOSSES, [("ring", True), ("ring", False), ("gather", False)]))
def test_over_ranks(packages: Packages, loss: str, way: tuple[str, bool]) -> None:
    transport, keeps = way
    """Uneven ranks, ranks without queries, without keys, and without both."""
    for shards in nightly(SHARDS, SHARDS[2:]):
        over_ranks(packages(loss), loss, transport, keeps, shards)


def test_sums_of_queries_take_a_row(packages: Packages) -> None:
    """Of any number of keys; no other loss has them, and a step without dk does not send them."""
    package = packages("smooth_clip", devices=2)
    table = package.ContrastiveLoss._package.table
    names = [item.name for item in table.travelling]
    assert names == ["keys", "key statistics", "key gradients", "query sums"]
    assert "query sums" not in [item.name for item in table.without_key_gradients().travelling]
    assert "query sums" not in str(packages("clip", devices=2).SPEC) and "means" not in str(packages("clip").SPEC)
    largest = [each for each in package.SPEC["plan"]["buffers"] if "query sums" in each["name"]]
    assert largest and all(each["bytes"] <= 2 * 8 * 8 for each in largest)


ENGINE, SWEEP, MEANS, SCHEDULE = "_runtime/engine.py", "_runtime/sweep.py", "_runtime/means.py", "schedule.py"
SEEN = "sweep.means.see(block.k)\n    scratch"
ALONE: dict[str, tuple[str, Edit]] = {
    "the share is forgotten in gradients": ("smooth", (SCHEDULE, "alpha=formulas.MEAN_SHARE", "alpha=0.0")),
    "the mean is in no loss": ("smooth", (MEANS, "mean.mul_(weight * formulas.MEAN_SHARE * rows)", "mean.mul_(0.0)")),
    "dk takes the mean of queries": ("smooth", (MEANS, "self.queries if", "self.queries * 93 / 70 if")),
    "dq takes the mean of queries": ("smooth", (MEANS, '{"mean": self.of_keys}', '{"mean": self.of_queries}')),
    "the gradient of bias lacks the mean": ("smooth_rince", (SCHEDULE, " + formulas.MEAN_SHARE", "")),
    "rows behind whole strips are left out": ("smooth", (MEANS, "x.split(STRIP_ROWS)", "x.split(STRIP_ROWS)[:-1]")),
    "keys are seen twice": ("smooth", (ENGINE, SEEN, f"sweep.means.see(block.k)\n        {SEEN}")),
}
OVER_RANKS: dict[str, Edit] = {
    "sums of queries stay at home": (MEANS, 'self._arrived = trip.home("query sums")[0]', "pass"),
    "sums of queries replace those of others": (MEANS, "row.add_(self.queries)", "row.copy_(self.queries)"),
    "only own keys are in the mean": (SWEEP, 'see(trip["keys"])', "see(self.call.k)"),
    "the mean is that of a shard": (SWEEP, "call, sum(layout.keys))", "call, max(layout.keys))"),
    "each rank adds the mean of all": (MEANS, "MEAN_SHARE * rows)", "MEAN_SHARE * 16)"),
}


@pytest.mark.parametrize("name", some(ALONE))
def test_planted_bugs_are_noticed(packages: Packages, planted: Callable[..., str], name: str) -> None:
    loss, edit = ALONE[name]
    with pytest.raises(AssertionError):
        as_defined(importlib.import_module(planted(name, loss, (edit,))), loss)


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("name", some(OVER_RANKS))
def test_planted_bugs_of_ranks_are_noticed(
    packages: Packages, planted: Callable[..., str], name: str, transport: str
) -> None:
    if transport == "gather" and "replace" in name:
        pytest.skip("of a gather nothing is added to a row that travels")
    wrong = importlib.import_module(planted(name, "smooth", (OVER_RANKS[name],)))
    with pytest.raises(AssertionError):
        over_ranks(wrong, "smooth", transport, True, ([6, 10], [10, 6]))
