"""Losses over prefixes of the features, in one sweep: torch's own cross-entropy of each slice is the truth."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import infcl_gen
from infcl_gen.errors import InfclError
from infcl_gen.runtime.table import Table
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import Inputs, LossAndGrads
from infcl_gen.verification.properties import Case, inputs_of
from infcl_gen.verification.worker import averaged
from tests.kernels.planted import Edit
from tests.tiers import combined, in_pairs, nightly, some

from .in_process import World

Packages = Callable[..., ModuleType]
LOSSES = ("clip_prefixes", "infonce_prefixes", "clip_cosines", "infonce_cosines")
PREFIXES = {2: 1.0, 5: 0.5, 8: 2.0}
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def batch(loss: str, seed: int = 0, rows: int = 70, keys: int = 93) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    counts = rows, rows if loss.startswith("clip") else keys
    q, k = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in counts)
    labels = None if loss.startswith("clip") else torch.randint(counts[1], (rows,), generator=generator)
    return Inputs(q, k, 3.0, -1.0, labels)


def dense(inputs: Inputs, loss: str = "") -> LossAndGrads:
    """Kusupati et al., arXiv 2205.13147, equation 1, with the loss of each prefix written out. Cosines divide by norms
    of at least 1e-12, which do not change where they are that small."""
    leaves = q, k, scale, bias = inputs.leaves(torch.float64, torch.float64)
    own = torch.arange(len(q)) if inputs.labels is None else inputs.labels
    total = q.new_zeros(())
    for columns, weight in PREFIXES.items():
        z = q[:, :columns] @ k[:, :columns].T
        if loss.endswith("cosines"):
            squares = (x[:, :columns].square().sum(1) for x in (q, k))
            of_q, of_k = (torch.where(each > 1e-24, each.clamp(min=1e-24).sqrt(), 1e-12) for each in squares)
            z = z / of_q[:, None] / of_k
        logits = scale * z + bias
        value = torch.nn.functional.cross_entropy(logits, own)
        if inputs.labels is None:
            value = (value + torch.nn.functional.cross_entropy(logits.T, own)) / 2
        total = total + weight * value
    return LossAndGrads(total.detach(), *torch.autograd.grad(total, leaves))


def assert_close(found: Any, expected: Any) -> None:
    for name, ours, theirs in zip(("loss", "dq", "dk", "dscale", "dbias"), found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def as_defined(package: ModuleType, loss: str) -> None:
    for seed, rows in enumerate((70, 1, 9)):
        inputs = batch(loss, seed, rows)
        truth = dense(inputs, loss)
        assert_close(package.loss_and_grads(*inputs[:4], labels=inputs.labels), truth)
        torch.testing.assert_close(package.reference(*inputs[:4], labels=inputs.labels), truth.loss, **CLOSE)


@pytest.mark.parametrize("loss", LOSSES)
def test_one_device_against_the_definition(packages: Packages, loss: str) -> None:
    as_defined(packages(loss), loss)


@pytest.mark.parametrize("loss", LOSSES)
def test_frozen_sides(packages: Packages, loss: str) -> None:
    inputs = batch(loss)
    truth = dense(inputs, loss)
    for side, place in (("query", 0), ("key", 1)):
        leaves = inputs.leaves(torch.float64, torch.float64)
        leaves[place].requires_grad_(False)
        value = packages(loss, frozen=side).contrastive_loss(*leaves, labels=inputs.labels)
        found = torch.autograd.grad(value, [x for x in leaves if x.requires_grad])
        expected = [each for other, each in enumerate(truth[1:]) if other != place]
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize(("loss", "dtype"), combined(LOSSES, ["bf16", "fp32"]))
def test_as_accurate_as_the_dtypes_allow(packages: Packages, loss: str, dtype: str) -> None:
    package = packages(loss, dtype)
    for features, layout, scale, rows in in_pairs(
        ("unit", "matched", "negative"), ("contiguous", "strided"), (100.0, 1.0), (129, 1)
    ):
        inputs = inputs_of(package, Case(rows, rows, 8, dtype, scale, -1.0, features, layout, seed=rows))
        judged = gate(package.loss_and_grads(*inputs[:4], labels=inputs.labels), truth_of(package, inputs))
        assert not failures(judged), f"{features}, {scale}, {rows}: {failures(judged)}"
    assert package.selftest()["ok"]


@pytest.mark.parametrize("loss", ["clip_prefixes", "clip_cosines"])
def test_nan_in_nan_out(packages: Packages, loss: str) -> None:
    """One behind the first prefix leaves that prefix's gradients to no one: they are sums with others."""
    inputs = batch(loss)
    inputs.q[5, 7] = torch.nan
    value, dq, dk, dscale, _ = packages(loss).loss_and_grads(*inputs[:4])
    truth = dense(inputs, loss)
    assert value.isnan() and dscale.isnan()
    assert torch.equal(dq.isnan(), truth.dq.isnan()) and torch.equal(dk.isnan(), truth.dk.isnan())


@pytest.mark.parametrize("loss", ["clip_cosines", "infonce_cosines"])
def test_cosines_of_rows_of_zeros_and_of_any_norm(packages: Packages, loss: str) -> None:
    """As `torch.nn.functional.normalize` has them: what is 0, or far below 1e-12, is divided by that."""
    inputs = batch(loss)
    for x, row in ((inputs.q, 3), (inputs.k, 4)):
        x[row], x[row + 1, :2], x[row + 2], x[row + 3] = 0.0, 0.0, 1e-15 * x[row + 2], 1e9 * x[row + 3]
    found, truth = packages(loss).loss_and_grads(*inputs[:4], labels=inputs.labels), dense(inputs, loss)
    torch.testing.assert_close(found[0], truth.loss, **CLOSE)
    for ours, theirs in zip(found[1:3], truth[1:3], strict=True):
        sizes = torch.linalg.vector_norm(theirs, dim=1, keepdim=True)
        torch.testing.assert_close(ours / sizes, theirs / sizes, rtol=1e-9, atol=1e-9)
    q, k, *rest = (x.double().requires_grad_() for x in inputs.leaves(torch.float64, torch.float64))
    packages(loss).reference(q, k, *rest, labels=inputs.labels).backward()
    torch.testing.assert_close(found[1], q.grad, rtol=1e-9, atol=1e-12)


SHARDS = [([9], [9]), ([6, 10], [10, 6]), ([5, 0, 9], [4, 10, 0]), ([70, 3, 0], [0, 3, 70])]


def over_ranks(
    package: ModuleType, loss: str, transport: str, keeps: bool, shards: tuple[list[int], list[int]]
) -> None:
    """The average of the ranks is the definition's, and equal calls give equal bits."""
    rows, keys = shards
    world, inputs = len(rows), batch(loss, 3, sum(rows), sum(keys))
    travelling = package.ContrastiveLoss._package.table.travelling
    table = Table(transport, 1, world, keeps and transport == "ring", travelling)

    def job(rank: int) -> list[Any]:
        own = inputs.of_rank(*(slice(sum(counts[:rank]), sum(counts[: rank + 1])) for counts in (rows, keys)))
        return list(package.loss_and_grads(*own[:4], labels=own.labels))

    results = [World(package, world, tables={world: table}, seed=seed).run(job) for seed in (1, 2)]
    for first, second in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_close(averaged(results[0]), dense(inputs, loss))


@pytest.mark.parametrize(("loss", "way"), combined(LOSSES, [("ring", True), ("ring", False), ("gather", False)]))
def test_over_ranks(packages: Packages, loss: str, way: tuple[str, bool]) -> None:
    transport, keeps = way
    """Uneven ranks, ranks without queries, without keys, and without both."""
    for shards in nightly(SHARDS, SHARDS[2:]):
        over_ranks(packages(loss), loss, transport, keeps, shards)


def test_statistics_of_each_prefix_travel(packages: Packages) -> None:
    items = packages("clip_prefixes", devices=2).ContrastiveLoss._package.table.travelling
    columns = {"keys": 8, "key statistics": 6, "key gradients": 8}
    assert {item.name: item.columns for item in items} == columns
    items = packages("clip_cosines", devices=2).ContrastiveLoss._package.table.travelling
    assert {item.name: item.columns for item in items} == columns | {"key radial sums": 3}


@pytest.mark.parametrize("renormalise", [False, True])
def test_prefixes_by_keyword(renormalise: bool) -> None:
    """Of a built-in loss, in `load`, and in the loss that takes no sizes."""
    inputs = batch("clip_prefixes")
    truth = dense(inputs, "cosines" * renormalise)
    leaves = inputs.leaves(torch.float64, torch.float64)
    how: dict[str, Any] = {"prefixes": PREFIXES} | ({"renormalise": True} if renormalise else {})
    package = infcl_gen.load(batch_size=300, dim=8, dtype="fp64", target="cpu", **how)
    command = package.SPEC["regenerate"]
    assert "--prefixes 2,5:0.5,8:2.0" in command and "--loss clip " in command
    assert (" --renormalise -o" in command) == renormalise
    by_module = infcl_gen.ContrastiveLoss(**how)
    for call in (package.contrastive_loss, by_module, lambda *x: infcl_gen.contrastive_loss(*x, **how)):
        value = call(*leaves)
        assert_close([value.detach(), *torch.autograd.grad(value, leaves)], truth)
    with pytest.raises(InfclError, match="renormalise=1 is neither True nor False"):  # also after a call with True
        infcl_gen.contrastive_loss(*leaves, prefixes=PREFIXES, renormalise=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"prefixes": [2, 5]}, "must end with dim 8"),
        ({"prefixes": [5, 2, 8]}, "do not grow"),
        ({"prefixes": {2: 0.0, 8: 1.0}}, "weight 0.0"),
        ({"prefixes": "2,x"}, "is not a count"),
        ({"renormalise": True}, "cosines are of prefixes; give prefixes"),
        ({"prefixes": [2, 8], "renormalise": "yes"}, "is neither true nor false"),
        ({"prefixes": [2, 8], "loss": "ntxent", "renormalise": True}, "of two sides"),
        (
            {
                "prefixes": [16, 64],
                "renormalise": True,
                "dim": 64,
                "target": None,
                "device_profile": "h200",
                "dtype": "fp16",
            }
            | {"set": {"strategy": "panel"}},
            "whose range gradients over norms leave: give dtype bf16",
        ),
        ({"prefixes": [2, 8], "loss": "siglip"}, "not for sums over pairs"),
        ({"prefixes": [2, 8], "loss": "ntxent"}, "of two sides"),
        ({"prefixes": [2, 8], "loss": "rince"}, "constant multiples"),
        ({"prefixes": [2, 8], "loss": "cwcl"}, "without means of logits"),
        ({"prefixes": [2, 8], "target": None, "device_profile": "h200", "dtype": "bf16"}, "give prefixes with 16"),
        (
            {"prefixes": [16, 64], "dim": 64, "target": None, "device_profile": "h200", "dtype": "fp32"},
            "give dtype bf16",
        ),
    ],
)
def test_what_has_no_kernel_is_refused(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(InfclError, match=says) as caught:
        infcl_gen.plan(**{"batch_size": 300, "dim": 8, "dtype": "fp64", "target": "cpu"} | flags)
    assert "\n" not in str(caught.value)


ENGINE, SCHEDULE, RENORMALISED = "_runtime/engine.py", "schedule.py", "_runtime/renormalised.py"
ALONE: dict[str, Edit] = {
    "slabs take the gradient of their own prefix alone": (SCHEDULE, "g.add_(longer)", "pass"),
    "all slabs take that of the whole": (SCHEDULE, "g.add_(longer)", "g.copy_(longer)"),
    "gradients are not weighted": (SCHEDULE, "g.mul_(formulas.PREFIX_WEIGHTS[number])", "pass"),
    "terms are not weighted": (SCHEDULE, "weight * of_prefix", "weight"),
    "similarities start again": (SCHEDULE, "slab.start == 0)", "True)"),
    "the sums of a prefix hold no positive": (SCHEDULE, "= exponent[row], e[row, column]", "= exponent[row], 0.0"),
}
COSINES: dict[str, Edit] = {
    "gradients have a part along the row": (SCHEDULE, "-= multiple[rows, None] * x[rows, slab]", "-= 0.0"),
    "a slab loses what its own prefix has along the row": (RENORMALISED, "shorter.add_(longer)", "pass"),
    "gradients of logits have no factors": (SCHEDULE, "cosines_(g, of_prefix)  #", "pass  #"),
    "radial sums of panels replace each other": (SCHEDULE, "fresh_dk and i == 0)\n\n", "True)\n\n"),
    "rows of zeros lose what they have along themselves": (RENORMALISED, ".masked_fill_(factors == largest, 0.0)", ""),
}
OVER_RANKS: dict[str, Edit] = {
    "the first prefix is merged alone": (ENGINE, "for number in range(prefixes):", "for number in range(1):"),
    "sums of prefixes are mixed": (ENGINE, "total.prefix(number)", "total.prefix(prefixes - 1 - number)"),
}


@pytest.mark.parametrize("name", some(ALONE))
def test_planted_bugs_are_noticed(packages: Packages, planted: Callable[..., str], name: str) -> None:
    wrong = importlib.import_module(planted(name, "clip_prefixes", (ALONE[name],)))
    with pytest.raises(AssertionError):
        as_defined(wrong, "clip_prefixes")


@pytest.mark.parametrize("name", some(COSINES))
def test_planted_bugs_of_cosines_are_noticed(packages: Packages, planted: Callable[..., str], name: str) -> None:
    wrong = importlib.import_module(planted(name, "clip_cosines", (COSINES[name],)))
    with pytest.raises(AssertionError):
        if "zeros" in name:
            test_cosines_of_rows_of_zeros_and_of_any_norm(lambda _: wrong, "clip_cosines")
        as_defined(wrong, "clip_cosines")


def test_radial_sums_that_stay_away_are_noticed(packages: Packages, planted: Callable[..., str]) -> None:
    edit = (
        RENORMALISED,
        'self._arrived = trip.home("key radial sums")',
        "self._arrived = torch.zeros_like(self.of_keys)",
    )
    wrong = importlib.import_module(planted("radial sums of keys do not come home", "clip_cosines", (edit,)))
    with pytest.raises(AssertionError):
        over_ranks(wrong, "clip_cosines", "ring", True, ([6, 10], [10, 6]))


@pytest.mark.parametrize("name", some(OVER_RANKS))
def test_planted_bugs_of_ranks_are_noticed(packages: Packages, planted: Callable[..., str], name: str) -> None:
    wrong = importlib.import_module(planted(name, "clip_prefixes", (OVER_RANKS[name],)))
    with pytest.raises(AssertionError):
        over_ranks(wrong, "clip_prefixes", "gather", False, ([6, 10], [10, 6]))
