"""Losses that tell apart pairs of one id: ids are checked, travel with their keys, and decide as defined."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from infcl_gen.verification.properties import Case, Inputs, inputs_of
from tests.kernels.planted import Edit
from tests.tiers import nightly, some
from tests.verification.dense import dense, dense_loss

from . import ring_worker
from .pool import Packages, Pool, assert_equal, average, results

LABELLED = ("infonce_ids", "decoupled_ids")
LOSSES = ("siglip_multi", "clip_ids", *LABELLED)
X, IDS = torch.randn(6, 8, dtype=torch.float64), torch.arange(6)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("loss", LOSSES)
def test_one_device_against_the_definition(packages: Packages, loss: str, seed: int) -> None:
    """Ids in common, those of neighbours, none in common, and one for all: rows without a positive, and with all."""
    keys = 70 if loss == "clip_ids" else 93
    inputs = inputs_of(packages(loss), Case(70, keys, 8, "fp64", 3.0, -1.0, seed=seed))
    assert inputs.labels is not None or loss not in LABELLED or seed % 2 == 0
    if inputs.labels is None and loss in LABELLED:
        inputs = inputs._replace(labels=torch.arange(70))
    assert_close(packages(loss), inputs, loss)


def assert_close(package: ModuleType, inputs: Inputs, loss: str) -> None:
    for ours, theirs in zip(package.loss_and_grads(*inputs[:4], **inputs.given), dense(loss, *inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def test_a_row_without_a_positive_counts(packages: Packages) -> None:
    """It adds the terms of its negatives, and stays in the mean."""
    package = packages("siglip_multi")
    alone = package.contrastive_loss(X, X, 2.0, query_ids=IDS, key_ids=IDS + 6)
    q = 2.0 * X @ X.T
    torch.testing.assert_close(alone, torch.nn.functional.softplus(q).sum() / 6)


def test_ids_decide_by_all_of_their_bits(packages: Packages) -> None:
    low, high = torch.zeros(6, dtype=torch.int64), torch.arange(6) << 32
    expected = dense_loss("siglip_multi", X, X, 2.0, query_ids=high, key_ids=low)
    torch.testing.assert_close(
        packages("siglip_multi").contrastive_loss(X, X, 2.0, query_ids=high, key_ids=low), expected
    )


def test_ids_of_any_stride_and_in_a_module(packages: Packages) -> None:
    package = packages("siglip_multi")
    spread = torch.arange(12)[::2]
    loss = package.contrastive_loss(X, X, 2.0, query_ids=spread, key_ids=2 * IDS)
    assert torch.equal(loss, package.ContrastiveLoss()(X, X, 2.0, query_ids=2 * IDS, key_ids=spread))
    assert torch.equal(loss, package.contrastive_loss(X, X, 2.0, query_ids=IDS, key_ids=IDS))
    torch.testing.assert_close(loss, package.reference(X, X, 2.0, query_ids=IDS, key_ids=IDS))


def test_ids_in_a_compiled_graph(packages: Packages) -> None:
    for loss in LOSSES:
        package = packages(loss)
        step = torch.compile(
            lambda q, a, b: package.contrastive_loss(q, X, 2.0, query_ids=a, key_ids=b),  # noqa: B023
            fullgraph=True,
            backend="aot_eager",
        )
        q = X.clone().requires_grad_()
        ids = IDS // 2
        (ours,) = torch.autograd.grad(step(q, ids, ids), q)
        (plain,) = torch.autograd.grad(package.contrastive_loss(q, X, 2.0, query_ids=ids, key_ids=ids), q)
        assert torch.equal(ours, plain)


NEEDED = r"int64 tensor of shape \(6,\) on cpu"
BAD_CALLS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("siglip_multi", {}, ValueError, f"siglip_multi needs query_ids and key_ids: query_ids must be an {NEEDED}$"),
    ("siglip_multi", {"query_ids": IDS}, ValueError, f"needs query_ids and key_ids: key_ids must be an {NEEDED}$"),
    ("clip_ids", {"key_ids": IDS}, ValueError, "clip_ids needs query_ids and key_ids: query_ids must be"),
    ("clip_ids", {"query_ids": IDS, "key_ids": IDS[:5]}, ValueError, rf"key_ids .* {NEEDED}, not .* of shape \(5,\)$"),
    ("clip_ids", {"query_ids": IDS.int(), "key_ids": IDS}, ValueError, f"query_ids .* {NEEDED}, not torch.int32"),
    ("infonce_ids", {"query_ids": IDS.tolist(), "key_ids": IDS}, TypeError, f"query_ids .* {NEEDED}, not list$"),
    ("infonce_ids", {"query_ids": IDS, "key_ids": IDS.to("meta")}, ValueError, f"key_ids .* {NEEDED}, not on meta$"),
    ("clip", {"query_ids": IDS}, ValueError, "clip tells no pairs of one id apart: query_ids and key_ids must be None"),
    ("siglip", {"query_ids": IDS, "key_ids": IDS}, ValueError, "siglip tells no pairs of one id apart"),
    (
        "siglip_multi",
        {"query_ids": IDS, "key_ids": IDS, "labels": IDS},
        ValueError,
        "keys of .* id: it takes no labels",
    ),
]


@pytest.mark.parametrize(("loss", "keywords", "error", "message"), BAD_CALLS)
def test_wrong_ids_are_refused_in_one_line(
    packages: Packages, loss: str, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    package = packages(loss)
    for call in (package.contrastive_loss, package.loss_and_grads):
        with pytest.raises(error, match=message) as caught:
            call(X, X, 2.0, **keywords)
        assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def pool(packages: Packages, folder_of: Callable[[ModuleType], Path]) -> Iterator[Pool]:
    pool = Pool(3, folder_of(packages("clip")).parent)
    yield pool
    pool.close()


WAYS: dict[str, dict[str, Any]] = {
    "ring that keeps": {"devices": 3, "transport": "ring", "keeps": "on"},
    "ring": {"devices": 3, "transport": "ring", "keeps": "off"},
    "gather": {"devices": 3, "transport": "gather"},
    "gather of 2": {"devices": 2, "transport": "gather"},
    "alone": {},
}
RUNS = [
    ("alone", (0,), [9]), ("alone", (0, 1), [3, 70]), ("ring", (0, 1, 2), [65, 0, 3]),
    ("ring that keeps", (0, 1, 2), [6, 6, 6]), ("ring that keeps", (0, 1, 2), [5, 0, 70]),
    ("gather", (0, 1, 2), [65, 0, 3]), ("gather of 2", (0, 1), [4, 9]),
]  # fmt: skip


# Every loss in every way, once where rows are uneven, by ids that ranks share and by ids of other ranks in turn.
RUNS_OF_CI = [
    (loss, RUNS[run], ("shared", "elsewhere")[(place + run) % 2])
    for place, loss in enumerate(LOSSES)
    for run in (1, 2, 4, 5)
]


@pytest.mark.parametrize(
    ("loss", "run", "ids"), nightly(itertools.product(LOSSES, RUNS, ["shared", "elsewhere"]), RUNS_OF_CI)
)
def test_ids_travel_with_their_keys(
    pool: Pool, packages: Packages, loss: str, run: tuple[str, tuple[int, ...], list[int]], ids: str
) -> None:
    way, ranks, rows = run
    if loss == "siglip_multi" and way == "ring that keeps":
        way = "ring"  # its backward reads no keys
    package, case = sharded(packages, loss, way, ranks, rows, ids)
    truth = ring_worker.reference_gradients(packages(loss), *itertools.islice(case.values(), 3), ids)
    for how in ("function", "traced") if way != "alone" and ids == "shared" else ("function",):
        ours = pool.run("gradients", ranks, package=package.__name__, ranks=ranks, how=how, **case)
        assert_equal(average(results(ours)), truth)


def sharded(
    packages: Packages, loss: str, way: str, ranks: tuple[int, ...], rows: list[int], ids: str
) -> tuple[ModuleType, dict[str, Any]]:
    labelled = loss in LABELLED
    keys = rows if loss == "clip_ids" else [n + 3 for n in reversed(rows)]
    return packages(loss, **WAYS[way]), {"rows": rows, "keys": keys, "labelled": labelled, "ids": ids}


SCHEDULE, ENGINE, SWEEP = "schedule.py", "_runtime/engine.py", "_runtime/sweep.py"
VISITING = 'trip["key ids"].view(-1) if'
OWN_PLACE = "left_out[positive_places(strip)]"
SAME = "strip.query_ids[:, None] == strip.key_ids"
BUGS: dict[str, tuple[str, str, Edit]] = {  # loss, way, edit
    "ids of the wrong rank": ("siglip_multi", "ring", (SWEEP, VISITING, "self.key_ids if")),
    "ids of the wrong rank, in a mask": ("clip_ids", "gather", (SWEEP, VISITING, "self.key_ids if")),
    "ids of the first hop stay for backward": (
        "clip_ids", "ring that keeps", (ENGINE, "named: ids[:largest]", "named: sweep.key_ids[:, None].clone()"),
    ),
    "low halves are compared": (
        "siglip_multi", "ring", (SCHEDULE, SAME, "strip.query_ids[:, None].int() == strip.key_ids.int()"),
    ),
    "low halves are compared, in a mask": (
        "clip_ids", "ring", (SCHEDULE, SAME, "strip.query_ids[:, None].int() == strip.key_ids.int()"),
    ),
    "the class is flipped": ("siglip_multi", "ring", (SCHEDULE, SAME, SAME.replace("==", "!="))),
    "the mask is flipped": ("infonce_ids", "ring", (SCHEDULE, SAME, SAME.replace("==", "!="))),
    "rows have no weights": (
        "decoupled_ids", "gather", (ENGINE, "if package.traits.combined:", "if False:"),
    ),
    "a positive is in the sum": ("decoupled_ids", "ring", (SCHEDULE, f"{OWN_PLACE} = True", f"{OWN_PLACE} = False")),
    "slopes are those of positives": (
        "decoupled_ids", "ring", (SCHEDULE, "term, weight + slope)", "term, slope)"),
    ),
    "the positive is left out": ("clip_ids", "ring", (SCHEDULE, f"{OWN_PLACE} = False", "pass")),
}  # fmt: skip


@pytest.mark.parametrize("name", some(BUGS))
def test_planted_bugs_are_noticed(pool: Pool, packages: Packages, planted: Callable[..., str], name: str) -> None:
    loss, way, edit = BUGS[name]
    ranks, rows = (0, 1, 2), [7, 7, 7]
    package, case = sharded(packages, loss, way, ranks, rows, "shared")
    case["keys"] = rows
    truth = ring_worker.reference_gradients(packages(loss), rows, rows, case["labelled"], "shared")
    good = pool.run("gradients", ranks, package=package.__name__, ranks=ranks, **case)
    assert_equal(average(results(good)), truth)
    wrong = planted(name, loss, (edit,), **WAYS[way])
    with pytest.raises(AssertionError):
        assert_equal(average(results(pool.run("gradients", ranks, package=wrong, ranks=ranks, **case))), truth)
