"""Numbers of single queries and keys: their weights, and the log-sum-exp of negatives that only queries see."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from infcl_gen.runtime.table import Table
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import Case, inputs_of
from infcl_gen.verification.worker import averaged
from tests.kernels.planted import Edit
from tests.tiers import some
from tests.verification.dense import dense, dense_loss

from .in_process import USUAL, World
from .pool import Packages, Pool, results

LOSSES = ("weighted", "hard", "gemini", "weighed_by_all", "weighed_sides_ids")
X = torch.randn(6, 8, dtype=torch.float64)
W, N = torch.rand(6, dtype=torch.float64), torch.randn(6, 2, 8, dtype=torch.float64)
SIDES = "weighed_sides_ids"
CLOSE = {"rtol": 1e-10, "atol": 1e-13}


def drawn(package: ModuleType, seed: int = 1, rows: int = 70) -> Inputs:
    keys = rows if package.SPEC["positives"] == "diagonal" else 93
    return inputs_of(package, Case(rows, keys, 8, "fp64", 3.0, -1.0, seed=seed))


def leaves_of(inputs: Inputs) -> tuple[Inputs, list[Tensor]]:
    """The inputs, and what of them requires gradients."""
    found = inputs._asdict() | {
        name: torch.tensor(x, dtype=torch.float64) for name, x in zip(("scale", "bias"), inputs[2:4], strict=True)
    }
    found = {
        name: x.double().clone().requires_grad_("_state" not in name and "guide" not in name)
        if x is not None and x.is_floating_point()
        else x
        for name, x in found.items()
    }
    return Inputs(**found), [x for x in found.values() if x is not None and x.requires_grad]


def truth(loss: str, inputs: Inputs) -> list[Tensor]:
    """The loss by its definition, and its gradients by all that have some."""
    inputs, leaves = leaves_of(inputs)
    value = dense_loss(loss, *inputs)
    return [value.detach(), *torch.autograd.grad(value, leaves, materialize_grads=True)]


def assert_close(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.to(ours.dtype), **CLOSE)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", LOSSES)
def test_one_device_against_the_definition(packages: Packages, loss: str, seed: int) -> None:
    """By autograd all gradients, times upstream; by `loss_and_grads` those of features and numbers."""
    package = packages(loss)
    inputs = drawn(package, seed)
    expected = truth(loss, inputs)
    assert_close(package.loss_and_grads(*inputs[:4], **inputs.given), dense(loss, *inputs))
    assert_close(package.loss_and_grads(*inputs[:4], **inputs.given), expected[:5])
    given, leaves = leaves_of(inputs)
    assert given.query_weight is None or bool((given.query_weight == 0).any())
    value = package.contrastive_loss(*given[:4], **given.given)
    assert_close([value.detach(), *torch.autograd.grad(value, leaves, retain_graph=True)], expected)
    assert_close(torch.autograd.grad(value, leaves, -3 * torch.ones_like(value)), [-3 * each for each in expected[1:]])
    value = package.contrastive_loss(*given[:4], **given.given, reduction="sum", grad_sync="sum")
    assert_close(torch.autograd.grad(value, leaves), [70 * each for each in expected[1:]])
    assert_close([package.reference(*inputs[:4], **inputs.given)], expected[:1])


def in_strips_of(package: ModuleType, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(f"{package.__name__}._runtime.negatives"), "STRIP_ROWS", products)


@pytest.mark.parametrize("products", [1, 8])
def test_products_with_negatives_in_strips(packages: Packages, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row, and of several, the last strip ragged."""
    in_strips_of(packages("hard"), products, monkeypatch)
    test_one_device_against_the_definition(packages, "hard", 2)


@pytest.mark.parametrize(
    ("loss", "wanted", "place"), [("hard", "query_weight", 5), ("hard", "negatives", 6), (SIDES, "key_weight", 6)]
)
def test_one_gradient_alone(packages: Packages, loss: str, wanted: str, place: int) -> None:
    package = packages(loss)
    inputs = drawn(package)
    leaf = getattr(inputs, wanted).clone().requires_grad_()
    value = package.contrastive_loss(*inputs[:4], **inputs.given | {wanted: leaf})
    assert_close(torch.autograd.grad(value, leaf), truth(loss, inputs)[place : place + 1])


def test_in_a_module_in_inference_and_by_strides(packages: Packages) -> None:
    package = packages("hard")
    expected = dense("hard", X, X, 2.0, 0.5, query_weight=W, negatives=N)
    spread = {"query_weight": W.repeat_interleave(2)[::2], "negatives": N.mT.contiguous().mT}
    assert_close([package.ContrastiveLoss()(X, X, 2.0, 0.5, **spread)], expected[:1])
    with torch.inference_mode():
        x, w, n = X * 1, W * 1, N * 1
        assert_close(package.loss_and_grads(x, x, 2.0, 0.5, query_weight=w, negatives=n), expected)


def test_traced_and_transformed(packages: Packages) -> None:
    package = packages("hard")
    leaves = [X.clone(), W.clone(), N.clone()]

    def loss(q: Tensor, w: Tensor, n: Tensor) -> Tensor:
        value: Tensor = package.contrastive_loss(q, X, 2.0, query_weight=w, negatives=n)
        return value

    plain = [x.clone().requires_grad_() for x in leaves]
    expected = torch.autograd.grad(loss(*plain), plain)
    assert_close(torch.func.grad(loss, argnums=(0, 1, 2))(*leaves), expected)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = [x.clone().requires_grad_() for x in leaves]
    assert_close(torch.autograd.grad(compiled(*found), found), expected)
    with pytest.raises(ValueError, match="hard needs negatives: negatives must be a dense"):
        torch.compile(lambda q: package.contrastive_loss(q, X, 2.0, query_weight=W), backend="aot_eager")(X)


def test_operators_are_well_formed(packages: Packages) -> None:
    operators = packages("hard").ContrastiveLoss._package.operators
    call = [
        x.clone().requires_grad_()
        for x in (X, X, torch.tensor(2.0).double(), torch.tensor(0.0).double(), torch.stack((W, W)))
    ]
    rest = (*[None] * 5, *USUAL)
    torch.library.opcheck(operators.forward, (*call, *rest, 31))
    with torch.no_grad():
        loss, *saved = operators.forward(*call, *rest, 31)
        arguments = (torch.ones_like(loss), *(x.detach() for x in call), *rest[:5], *saved, *rest[5:], 31)
    torch.library.opcheck(operators.backward, arguments)


def test_gradients_have_the_dtype_of_what_they_are_of(packages: Packages) -> None:
    package = packages("hard", "bf16")
    given = [X.bfloat16(), X.bfloat16(), W.float(), N.bfloat16()]
    q, k, w, n = leaves = [x.requires_grad_() for x in given]
    found = torch.autograd.grad(package.contrastive_loss(q, k, 2.0, query_weight=w, negatives=n), leaves)
    expected = truth(
        "hard", Inputs(*(x.detach().double() for x in (q, k)), 2.0, 0.0, query_weight=w.detach(), negatives=n.detach())
    )
    for ours, theirs, leaf in zip(found, [expected[place] for place in (1, 2, 5, 6)], leaves, strict=True):
        assert ours.dtype == leaf.dtype
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0.02, atol=2e-3)


WEIGHT = r"query_weight must be a dense floating-point tensor of shape \(6,\) on cpu"
HARD = r"negatives must be a dense floating-point tensor of shape \(6, H, 8\), with H at least 1, on cpu"
IDS = torch.arange(6)
GIVEN = {"query_weight": W, "query_ids": IDS, "key_ids": IDS}
BAD_CALLS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("weighted", {}, ValueError, f"^weighted needs query_weight: {WEIGHT}$"),
    ("weighted", {"query_weight": 1.0}, TypeError, f"{WEIGHT}, not float$"),
    ("weighted", {"query_weight": W[:5]}, ValueError, rf"{WEIGHT}, not of shape \(5,\)$"),
    ("weighted", {"query_weight": W.long()}, ValueError, f"{WEIGHT}, not torch.int64$"),
    ("weighted", {"query_weight": W.to_sparse()}, ValueError, f"{WEIGHT}, not torch.sparse_coo"),
    ("weighted", {"query_weight": W.to("meta")}, ValueError, f"{WEIGHT}, not on meta$"),
    (
        "weighted",
        {"query_weight": W, "negatives": N},
        ValueError,
        "weighted has no negatives of single queries .gemini has.: neg",
    ),
    ("hard", {"query_weight": W}, ValueError, f"^hard needs negatives: {HARD}$"),
    ("hard", {"query_weight": W, "negatives": N[:, 0]}, ValueError, rf"{HARD}, not of shape \(6, 8\)$"),
    ("hard", {"query_weight": W, "negatives": N[:, :0]}, ValueError, rf"{HARD}, not of shape \(6, 0, 8\)$"),
    ("hard", {"query_weight": W, "negatives": N[:, :, 1:]}, ValueError, rf"{HARD}, not of shape \(6, 2, 7\)$"),
    (SIDES, GIVEN, ValueError, f"^{SIDES} needs key_weight: {WEIGHT.replace('query', 'key')}$"),
    (SIDES, {**GIVEN, "key_weight": W[1:]}, ValueError, r"key_weight must be .*, not of shape \(5,\)$"),
    ("clip", {"key_weight": W}, ValueError, "clip has no weights of keys: key_weight must be None$"),
    ("clip", {"query_weight": W}, ValueError, "clip has no weights of queries: query_weight must be None$"),
    ("siglip", {"negatives": N}, ValueError, "siglip has no negatives of single queries .gemini has.: negatives must"),
]


@pytest.mark.parametrize(("loss", "keywords", "error", "message"), BAD_CALLS)
def test_wrong_numbers_are_refused_in_one_line(
    packages: Packages, loss: str, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    package = packages(loss)
    for call in (package.contrastive_loss, package.loss_and_grads):
        with pytest.raises(error, match=message) as caught:
            call(X, X, 2.0, **keywords)
        assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def pool(packages: Packages, folder_of: Callable[[ModuleType], Path]) -> Iterator[Pool]:
    pool = Pool(2, folder_of(packages("clip")).parent)
    yield pool
    pool.close()


RING, GATHER = {"devices": 2, "transport": "ring"}, {"devices": 2, "transport": "gather"}


def over_ranks(pool: Pool, package: str, rows: list[int], keys: list[int], **options: Any) -> list[Tensor]:
    """The loss and all gradients, as data-parallel training has them: numbers averaged, rows joined over the ranks."""
    case = Case(sum(rows), sum(keys), 8, "fp64", 3.0, -1.0, seed=1)
    ranks = tuple(range(len(rows)))
    how = {"package": package, "ranks": ranks, "rows": rows, "keys": keys, "case": case, **options}
    parts = results(pool.run("own_gradients", ranks, **how))
    joined = zip(*parts, strict=True)
    return [torch.cat(each) / len(ranks) if each[0].dim() else torch.stack(each).mean() for each in joined]


@pytest.mark.parametrize(("rows", "keys"), [([33, 40], [65, 30]), ([0, 7], [9, 2])])
@pytest.mark.parametrize("way", [RING, GATHER], ids=["ring", "gather"])
@pytest.mark.parametrize("loss", ["hard", "gemini", "weighed_by_all"])
def test_over_ranks(
    pool: Pool, packages: Packages, loss: str, way: dict[str, Any], rows: list[int], keys: list[int]
) -> None:
    """Nothing of them travels: each rank gives the numbers of its own queries, and gets their gradients."""
    case = Case(sum(rows), sum(keys), 8, "fp64", 3.0, -1.0, seed=1)
    expected = truth(loss, inputs_of(packages(loss), case))
    assert_close(over_ranks(pool, packages(loss, **way).__name__, rows, keys), expected)


@pytest.mark.parametrize("rows", [[33, 40], [0, 7]])
@pytest.mark.parametrize("way", [RING, GATHER], ids=["ring", "gather"])
def test_weights_of_keys_over_ranks(pool: Pool, packages: Packages, way: dict[str, Any], rows: list[int]) -> None:
    """The statistics of keys change between the phases, and travel with the keys in backward."""
    case = Case(sum(rows), sum(rows), 8, "fp64", 3.0, -1.0, seed=1)
    expected = truth(SIDES, inputs_of(packages(SIDES), case))
    assert_close(over_ranks(pool, packages(SIDES, **way).__name__, rows, rows), expected)


@pytest.mark.parametrize("ranks", [3, 4])
def test_weights_of_keys_over_more_ranks(packages: Packages, ranks: int) -> None:
    """By threads in this process: a ring's keys then visit ranks that are neither first nor last."""
    package, rows = packages(SIDES), [5, 0, 9, 3][:ranks]
    inner = package.ContrastiveLoss._package
    inputs = inputs_of(package, Case(sum(rows), sum(rows), 8, "fp64", 3.0, -1.0, seed=1))
    expected = dense(SIDES, *inputs)

    def step(rank: int) -> list[Any]:
        part = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        own = inputs.of_rank(part, part)
        return list(package.loss_and_grads(*own[:4], **own.given))

    for transport, nodes in (("ring", 1), ("ring", 2), ("gather", 1)):
        if ranks % nodes == 0:
            table = Table(transport, nodes, ranks // nodes, False, inner.table.travelling)
            assert_close(averaged(World(package, ranks, tables={ranks: table}).run(step)), expected)


def test_keys_of_other_ranks_have_no_weights(packages: Packages) -> None:
    """A key is weighed together with its query, so that both must be on one rank."""
    package = packages(SIDES)
    with pytest.raises(ValueError, match="give each rank as many keys as queries, not 5 and 6"):
        package.contrastive_loss(X, X[1:], 2.0, query_weight=W, key_weight=W[1:], query_ids=IDS, key_ids=IDS[1:])


def test_ranks_must_agree_on_what_they_give(pool: Pool, packages: Packages) -> None:
    package = packages("weighted", **RING).__name__
    answers = pool.run("own_gradients", (0, 1), {1: {"without": True}}, package=package, ranks=(0, 1), rows=[4, 4],
                       keys=[4, 4], case=Case(8, 8, 8, "fp64", seed=1))  # fmt: skip
    kinds, messages = zip(*answers, strict=True)
    assert kinds == ("RuntimeError", "ValueError") and "arguments of rank 1 are invalid" in messages[0]
    assert "weighted needs query_weight" in messages[1]


SCHEDULE, ENGINE, API, NEGATIVES = "schedule.py", "_runtime/engine.py", "_runtime/api.py", "_runtime/negatives.py"
SLOPES = "own.copy_(torch.stack(of_own))"
BUGS: dict[str, Edit] = {
    "slopes stay numbers": (SCHEDULE, SLOPES, "pass"),
    "slopes of the first rows": (SCHEDULE, "own = block.vectors[:, rows]", "own = block.vectors[:, : len(r)]"),
    "the weight of a term is left out": (ENGINE, "saved.of_vectors[: package.traits.weighed].mul_(weight)", "pass"),
    "upstream is left out": (
        ENGINE,
        "saved.of_vectors * upstream.to(saved.of_vectors.dtype)",
        "saved.of_vectors * 1.0",
    ),
    "negatives are not scaled": (
        NEGATIVES,
        "_Products.apply(q, negatives, scale.dtype), scale, bias)",
        "_Products.apply(q, negatives, scale.dtype), scale.detach(), bias)",
    ),
    "columns of keys keep their sums": (SCHEDULE, "(of_columns / key_weight)", "of_columns"),
    "positives without their columns": (SCHEDULE, " + key_weight * torch.exp(pc - cp)", ""),
    "weights of keys for those of queries": (
        API,
        "for x in (query_weight, key_weight)",
        "for x in (key_weight, query_weight)",
    ),
    "negatives of the next query": (NEGATIVES, "apply(q, negatives,", "apply(q, negatives.roll(1, 0),"),
    "a row between strips": (NEGATIVES, "range(0, negatives.shape[0], step)", "range(0, negatives.shape[0], step + 1)"),
    "gradients of the first strip": (NEGATIVES, "of_rows[strip] = (weights", "of_rows[: len(weights)] = (weights"),
    "negatives without gradients": (NEGATIVES, "of_negatives[strip] = weights", "of_negatives[strip] = 0 * weights"),
}


@pytest.mark.parametrize("name", some(BUGS))
def test_planted_bugs_are_noticed(
    packages: Packages, planted: Callable[..., str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = SIDES if "keys" in name or "columns" in name else "hard"
    wrong = importlib.import_module(planted(name, loss, (BUGS[name],)))
    in_strips_of(wrong, 8, monkeypatch)
    with pytest.raises(AssertionError):
        test_one_device_against_the_definition(lambda _: wrong, loss, 1)
