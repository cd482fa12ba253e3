"""The torch device sweep and the engine on one device, against the dense reference in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from infcl_gen.verification.oracle import LossAndGrads
from tests.tiers import nightly
from tests.verification.dense import dense

Packages = Callable[..., ModuleType]
LOSSES = ("clip", "infonce", "soft")


def assert_close(ours: tuple[Tensor, ...], truth: LossAndGrads, tolerance: float, size: float = 1.0) -> None:
    for name, a, b in zip(("loss", "dq", "dk", "dscale", "dbias"), ours, truth, strict=True):
        distance = float(torch.linalg.vector_norm(a.double() - b))
        assert distance <= tolerance * (float(torch.linalg.vector_norm(b)) + size), name


RAGGED = [(rows, loss) for rows in range(1, 131) for loss in LOSSES]


@pytest.mark.parametrize(("rows", "loss"), nightly(RAGGED, RAGGED[::4]))  # in CI each size with one loss
def test_every_ragged_size_amid_nan(packages: Packages, loss: str, rows: int) -> None:
    """Inputs are strided slices of NaN-filled memory: nothing outside them is read."""
    package = packages(loss)
    torch.manual_seed(rows)
    keys = rows + rows % 7 if loss == "infonce" else rows
    q = torch.full((rows + 2, 11), math.nan, dtype=torch.float64)[1:-1, 2:10]
    k = torch.full((10, 2 * keys + 3), math.nan, dtype=torch.float64)[1:9, 1 : 2 * keys : 2].T
    q.copy_(torch.randn(rows, 8))
    k.copy_(torch.randn(keys, 8))
    labels = torch.randint(keys, (rows,)) if loss == "infonce" and rows % 2 else None
    ours = package.loss_and_grads(q, k, 3.0, -2.0, labels=labels)
    assert_close(ours, dense(loss, q, k, 3.0, -2.0, labels), 1e-13)
    assert all(x.is_contiguous() for x in ours)


@given(data=st.data())
def test_any_scale_and_features(packages: Packages, data: st.DataObject) -> None:
    loss = data.draw(st.sampled_from(["clip", "infonce"]))
    package = packages(loss, dtype=data.draw(st.sampled_from(["fp64", "fp32"])))
    rows = data.draw(st.integers(1, 60))
    scale = data.draw(st.sampled_from([1e-3, 1.0, 14.3, 100.0, 1e4]))
    kind = data.draw(st.sampled_from(["unit", "large", "negative", "duplicate", "zero"]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    q, k = (torch.nn.functional.normalize(torch.randn(rows, 8, dtype=torch.float64), dim=1) for _ in range(2))
    if kind == "large":
        q, k = q * 30, k * 30
    elif kind == "negative":
        q, k = q.abs(), -k.abs()
    elif kind == "duplicate":
        q, k = q[:1].expand(rows, 8), k[:1].expand(rows, 8)
    elif kind == "zero":
        q = q * (torch.arange(rows) % 2)[:, None]
    dtype = torch.float64 if package.SPEC["problem"]["dtype"] == "fp64" else torch.float32
    q, k = q.to(dtype), k.to(dtype)
    ours = package.loss_and_grads(q, k, scale)
    largest = float((q.double() @ k.double().T).abs().max()) * scale
    tolerance = 16 * torch.finfo(dtype).eps * (1.0 + largest)
    assert all(x.isfinite().all() for x in ours)
    assert_close(ours, dense(loss, q, k, scale, 0.0, None), tolerance, size=1.0 + scale / rows)


@pytest.mark.parametrize("loss", ["clip", "infonce", "soft"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_selftest_passes(packages: Packages, loss: str, dtype: str) -> None:
    report = packages(loss, dtype=dtype, dim=96, panel=(64, 128)).selftest()
    assert report["ok"], report
    assert len(report["cases"]) == 5


def test_selftest_of_a_batch_of_one_has_a_case(packages: Packages) -> None:
    report = packages("clip", batch_size=1).selftest()
    assert report["ok"] and [case["rows"] for case in report["cases"]] == [1]


@pytest.mark.parametrize("poisoned", ["q", "k"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss", ["clip", "infonce"])
def test_not_finite_in_is_nan_out(packages: Packages, loss: str, poisoned: str, value: float) -> None:
    package = packages(loss)
    q, k = torch.randn(40, 8, dtype=torch.float64), torch.randn(40, 8, dtype=torch.float64)
    (q if poisoned == "q" else k)[33, 2] = value
    loss_value, dq, dk, dscale, dbias = package.loss_and_grads(q, k, 2.0)
    assert loss_value.isnan() and dscale.isnan() and dbias.isnan()
    assert dk.isnan().any() and dq.isnan().any()


def test_scale_that_is_nan(packages: Packages) -> None:
    q = torch.randn(5, 8, dtype=torch.float64)
    assert all(x.isnan().any() for x in packages("clip").loss_and_grads(q, q, math.nan))


def test_bitwise_repeatable(packages: Packages) -> None:
    package = packages("clip", dtype="bf16")
    q, k = torch.randn(100, 8).bfloat16(), torch.randn(100, 8).bfloat16()
    first = package.loss_and_grads(q, k, 50.0)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, package.loss_and_grads(q, k, 50.0), strict=True))


def test_reference_point_is_never_fixed(packages: Packages) -> None:
    """At scale 100 and similarities near -1 every term underflows against the bound `scale`."""
    package = packages("clip", dtype="fp32")
    q = torch.nn.functional.normalize(torch.ones(50, 8) + 1e-3 * torch.randn(50, 8), dim=1)
    loss, *_ = package.loss_and_grads(q, -q, 100.0)
    assert float(loss) == pytest.approx(float(dense("clip", q, -q, 100.0).loss), rel=1e-5)


def test_products_are_exact_whatever_the_switches(packages: Packages) -> None:
    package = packages("clip", dtype="fp32")
    q, k = torch.randn(64, 8), torch.randn(64, 8)
    expected = package.loss_and_grads(q, k, 20.0)
    torch.set_float32_matmul_precision("medium")
    try:
        assert all(torch.equal(a, b) for a, b in zip(expected, package.loss_and_grads(q, k, 20.0), strict=True))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


class Allocations(TorchDispatchMode):
    """Sizes of all new storages of at least `threshold` bytes, in order."""

    def __init__(self, threshold: int) -> None:
        super().__init__()
        self.threshold, self.seen, self.sizes = threshold, set[int](), list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor) and not any(
                isinstance(a, Tensor) and a.untyped_storage()._cdata == x.untyped_storage()._cdata
                for a in (*args, *(kwargs or {}).values())
            ):
                size = x.untyped_storage().nbytes()
                if size >= self.threshold:
                    self.sizes.append(size)
        return result


@pytest.mark.parametrize("loss", ["clip", "infonce"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scratch_is_exactly_what_the_legend_says(packages: Packages, loss: str, dtype: str) -> None:
    rows, keys, dim = 64, 128, 96
    package = packages(loss, dtype=dtype, dim=dim, panel=(rows, keys))
    schedule = package._schedule
    x = torch.randn(300, dim).to(schedule.FEATURE_DTYPE)
    queries = torch.ones(2 + schedule.POSITIVE_PARTS, 300)
    scale, bias = torch.tensor(2.0), torch.tensor(0.0)
    statistics = package._runtime.statistics.view(queries)
    positives = torch.arange(300) if loss == "infonce" else 0
    per_key = statistics if loss == "clip" else None
    panel = 4 * rows * keys
    expected = [panel, panel] + ([4 * rows * dim, 4 * keys * dim] if dtype == "bf16" else [])
    total = torch.zeros(300, dim)
    block = package._runtime.package.Block(x, x, scale, bias, positives, 0, statistics, per_key, queries[2:])
    with torch.no_grad(), Allocations(threshold=4 * 300 * 2) as forward:
        schedule.forward_block(block, None)
    assert sorted(forward.sizes) == sorted(expected)
    with torch.no_grad(), Allocations(threshold=4 * 300 * 2) as backward:
        schedule.backward_block(block, total, total, None)
    assert sorted(backward.sizes) == sorted(expected)
