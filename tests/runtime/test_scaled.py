"""Numbers that multiply the similarities of single queries and keys: 1 / temperature of each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from infcl_gen.runtime.scaled import row_dots, scaled, times_rows
from infcl_gen.verification.gate import failures
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import Case, check_case, inputs_of
from tests.kernels.planted import Edit
from tests.tiers import combined, some
from tests.verification.dense import dense

from .pool import Packages, Pool
from .test_own import GATHER, RING, assert_close, leaves_of, over_ranks, truth

LOSSES = ("tempered_infonce", "tempered_clip_ids", "tempered_siglip", "tempered_hard")
X = torch.randn(6, 8, dtype=torch.float64)
S = torch.rand(6, dtype=torch.float64) + 0.5


def drawn(package: ModuleType, seed: int = 1, rows: int = 70) -> Inputs:
    keys = rows if package.SPEC["positives"] == "diagonal" else 93
    return inputs_of(package, Case(rows, keys, 8, "fp64", 3.0, -1.0, seed=seed))


def test_a_graph_of_gradients_is_built_as_on_gpus(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: products that are written to a given tensor there, too, which torch refuses."""
    package = packages("tempered_infonce")
    module = importlib.import_module(f"{package.__name__}._runtime.scaled")
    monkeypatch.setattr(module, "WITHOUT_COPIES", ("cpu", "cuda"))
    given, leaves = {"key_scale": S.flip(0)}, [X.clone().requires_grad_(), S.clone().requires_grad_()]

    def loss(q: Tensor, query_scale: Tensor) -> Tensor:
        found: Tensor = package.contrastive_loss(q, X, 14.3, query_scale=query_scale, **given)
        return found

    expected = torch.autograd.grad(loss(*leaves), leaves)
    graphed = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    transformed = torch.func.grad(loss, argnums=(0, 1))(*(x.detach() for x in leaves))
    for ours, theirs in zip((*graphed, *transformed), expected * 2, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("loss", LOSSES)
def test_one_device_against_the_definition(packages: Packages, loss: str, seed: int) -> None:
    """By autograd all gradients, also of queries whose number is 0; by `loss_and_grads` those of features and scale."""
    package = packages(loss)
    inputs = drawn(package, seed)
    assert inputs.query_scale is not None
    inputs.query_scale[1] = 0.0
    expected = truth(loss, inputs)
    assert_close(package.loss_and_grads(*inputs[:4], **inputs.given), dense(loss, *inputs))
    given, leaves = leaves_of(inputs)
    value = package.contrastive_loss(*given[:4], **given.given)
    assert_close([value.detach(), *torch.autograd.grad(value, leaves, -3 * torch.ones_like(value))],
                 [expected[0], *(-3 * each for each in expected[1:])])  # fmt: skip
    value = package.contrastive_loss(*given[:4], **given.given, reduction="sum", grad_sync="sum")
    assert_close(torch.autograd.grad(value, leaves), [len(inputs.q) * each for each in expected[1:]])
    assert_close([package.reference(*inputs[:4], **inputs.given)], expected[:1])


def test_their_gradients_alone_and_in_a_module(packages: Packages) -> None:
    package, s, t = packages("tempered_infonce"), S.clone().requires_grad_(), S.flip(0).requires_grad_()
    expected = truth("tempered_infonce", Inputs(X, X, 2.0, 0.5, query_scale=S, key_scale=S.flip(0)))
    value = package.ContrastiveLoss()(X, X, 2.0, 0.5, query_scale=s, key_scale=t)
    assert_close([value.detach(), *torch.autograd.grad(value, (s, t))], [expected[0], *expected[-2:]])
    with torch.inference_mode():
        assert_close([package.ContrastiveLoss()(X * 1, X * 1, 2.0, 0.5, query_scale=S * 1, key_scale=t)], expected[:1])


def test_traced_and_transformed(packages: Packages) -> None:
    package = packages("tempered_infonce")

    def loss(q: Tensor, s: Tensor) -> Tensor:
        value: Tensor = package.contrastive_loss(q, X, 2.0, query_scale=s, key_scale=S)
        return value

    plain = [x.clone().requires_grad_() for x in (X, S)]
    expected = torch.autograd.grad(loss(*plain), plain)
    assert_close(torch.func.grad(loss, argnums=(0, 1))(X, S), expected)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = [x.clone().requires_grad_() for x in (X, S)]
    assert_close(torch.autograd.grad(compiled(*found), found), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_rounded_once(dtype: torch.dtype) -> None:
    x, y, s = torch.randn(9, 8).to(dtype)[:, ::2], torch.randn(9, 4).to(dtype), torch.rand(9, dtype=torch.float32)
    expected = (x.double() * s.double()[:, None]).float().to(dtype)
    torch.testing.assert_close(times_rows(x, s), expected, rtol=0, atol=0)
    x, s = x.requires_grad_(), s.requires_grad_()
    product = scaled(x, s)
    of_x, of_s = torch.autograd.grad(product, (x, s), y)
    assert (product.dtype, of_x.dtype, of_s.dtype) == (dtype, dtype, torch.float32)
    torch.testing.assert_close(of_x, times_rows(y, s.detach()), rtol=0, atol=0)
    torch.testing.assert_close(of_s.double(), (x.double() * y.double()).sum(1), rtol=1e-5, atol=1e-6)
    assert row_dots(x[:0], y[:0], torch.float32).shape == (0,)


@pytest.mark.parametrize(("loss", "dtype"), combined(LOSSES, ["bf16", "fp16", "fp32"]))
def test_as_accurate_as_plain_torch(packages: Packages, loss: str, dtype: str) -> None:
    package = packages(loss, dtype)
    for seed, scale in enumerate((1.0, 14.3, 100.0, 14.3)):
        features = ("unit", "matched", "unnormalised", "duplicate")[seed]
        keys = 70 if package.SPEC["positives"] == "diagonal" else 93
        rows = check_case(package, Case(70, keys, 8, dtype, scale, -1.0, features, seed=seed))
        assert not failures(rows), failures(rows)


@pytest.mark.parametrize("loss", LOSSES)
def test_selftest(packages: Packages, loss: str) -> None:
    report = packages(loss, "bf16").selftest("cpu")
    assert report["ok"], report


SCALES = r"query_scale must be a dense floating-point tensor of shape \(6,\) on cpu"
OF_KEYS = r"key_scale must be a dense floating-point tensor of shape \(5,\) on cpu"
BAD_CALLS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("tempered_infonce", {}, ValueError, f"^tempered_infonce needs query_scale: {SCALES}$"),
    ("tempered_infonce", {"query_scale": 2.0}, TypeError, f"{SCALES}, not float$"),
    ("tempered_infonce", {"query_scale": S[:5]}, ValueError, rf"{SCALES}, not of shape \(5,\)$"),
    ("tempered_infonce", {"query_scale": S, "key_scale": S}, ValueError, rf"{OF_KEYS}, not of shape \(6,\)$"),
    (
        "tempered_hard",
        {"query_scale": S, "key_scale": S[:5]},
        ValueError,
        "has no scales of single keys: key_scale must",
    ),
    ("infonce", {"query_scale": S}, ValueError, "infonce has no scales of single queries: query_scale must be None$"),
]


@pytest.mark.parametrize(("loss", "keywords", "error", "message"), BAD_CALLS)
def test_wrong_numbers_are_refused_in_one_line(
    packages: Packages, loss: str, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    own = {"query_weight": S, "negatives": X[:, None]} if loss == "tempered_hard" else {}
    labels = torch.zeros(6, dtype=torch.int64)
    for call in (packages(loss).contrastive_loss, packages(loss).loss_and_grads):
        with pytest.raises(error, match=message) as caught:
            call(X, X[:5], 2.0, labels=labels, **own, **keywords)
        assert "\n" not in str(caught.value)


def test_of_a_frozen_side_they_have_no_gradient(packages: Packages) -> None:
    package, s = packages("tempered_infonce", frozen="key"), S.clone().requires_grad_()
    value = package.contrastive_loss(X, X, 2.0, query_scale=s, key_scale=S)
    (of_s,) = torch.autograd.grad(value, s)
    assert_close([of_s], truth("tempered_infonce", Inputs(X, X, 2.0, 0.0, query_scale=S, key_scale=S))[-2:-1])
    with pytest.raises(ValueError, match=r"key_scale requires a gradient, which .*: pass key_scale.detach\(\)"):
        package.contrastive_loss(X, X, 2.0, query_scale=S, key_scale=s)


@pytest.fixture(scope="module")
def pool(packages: Packages, folder_of: Callable[[ModuleType], Path]) -> Iterator[Pool]:
    pool = Pool(3, folder_of(packages("clip")).parent)
    yield pool
    pool.close()


@pytest.mark.parametrize("way", [RING, GATHER], ids=["ring", "gather"])
@pytest.mark.parametrize("loss", LOSSES[:3])
def test_over_ranks(pool: Pool, packages: Packages, loss: str, way: dict[str, Any]) -> None:
    """Nothing of them travels: features are multiplied where they are."""
    package, rows = packages(loss, **way | {"devices": 3}), [33, 0, 40]
    keys = [65, 30, 0] if package.SPEC["positives"] == "label" else rows
    inputs = inputs_of(package, Case(sum(rows), sum(keys), 8, "fp64", 3.0, -1.0, seed=1))
    assert_close(over_ranks(pool, package.__name__, rows, keys), truth(loss, inputs))


API, SCALED = "_runtime/api.py", "_runtime/scaled.py"
BUGS: dict[str, Edit] = {
    "queries are not multiplied": (API, "scaled(x, a) for x, a in zip((q, k)", "x for x, a in zip((q, k)"),
    "keys have the numbers of queries": (API, "return of_queries, of_keys", "return of_queries, of_queries"),
    "the gradient of features lacks them": (SCALED, "times_rows(upstream, numbers)", "upstream * 1.0"),
    "their gradient is that of the next row": (SCALED, "row_dots(x, upstream,", "row_dots(x.roll(1, 0), upstream,"),
    "results without autograd lack them": (API, "times_rows(x, a) for", "x * 1.0 for"),
}


@pytest.mark.parametrize("name", some(BUGS))
def test_planted_bugs_are_noticed(packages: Packages, planted: Callable[..., str], name: str) -> None:
    wrong = importlib.import_module(planted(name, "tempered_siglip", (BUGS[name],)))
    with pytest.raises(AssertionError):
        test_one_device_against_the_definition(lambda _: wrong, "tempered_siglip", 1)
