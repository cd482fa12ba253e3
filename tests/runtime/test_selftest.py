"""The self-test accepts errors within its tolerance, none beyond it, and no result that differs from run to run."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import infcl_gen
from infcl_gen.emission import import_package
from tests.tiers import combined
from tests.verification.dense import dense

Packages = Callable[..., ModuleType]
Compute = Callable[..., tuple[Tensor, ...]]
QUANTITIES = ("loss", "dq", "dk", "dscale", "dbias")


def report_of(package: ModuleType, compute: Compute, split: bool = False) -> dict[str, Any]:
    """The self-test of a package whose numbers come from `compute(q, k, scale, bias)`."""
    module = importlib.import_module(f"{package.__name__}._runtime.selftest")
    bound = dataclasses.replace(package.ContrastiveLoss._package, split=split)
    loss_and_grads = lambda _, *arguments: compute(*arguments[:4])  # noqa: E731
    return dict(module.selftest(bound, torch.device("cpu"), loss_and_grads))  # type: ignore[attr-defined]


def wrong_by(quantity: str, error: float) -> Compute:
    """The loss in fp64, one quantity of which is off by `error` times what the self-test relates errors to."""

    def compute(q: Tensor, k: Tensor, scale: float, bias: float) -> tuple[Tensor, ...]:
        results = dense("clip", q, k, scale, bias)._asdict()
        if quantity == "dscale":
            results["dscale"] = results["dscale"] + error * (q.double() * results["dq"]).abs().sum() / scale
        elif quantity == "dbias":
            results["dbias"] = results["dbias"] + error
        else:
            results[quantity] = results[quantity] * (1.0 + error)
        return tuple(results.values())

    return compute


@pytest.mark.parametrize(("quantity", "dtype"), combined(QUANTITIES, ["bf16", "fp16", "fp32", "fp64"]))
def test_errors_beyond_the_tolerance_fail_and_those_within_pass(packages: Packages, dtype: str, quantity: str) -> None:
    """Four roundings of the statistics dtype are allowed, and a little for the logits: a tolerance twice as wide fails
    here. Gradients in 16 bits have what rounding g and the result must cost; the errors of dscale then cancel."""
    package = packages(dtype=dtype, dim=96, panel=(64, 128))
    kind = package.ContrastiveLoss._package.dtype
    kind = torch.promote_types(kind, torch.float32) if quantity in ("loss", "dbias") else kind
    most, too_much = {"dscale": (0.01, 0.05)}.get(quantity, (1.0, 1.5)) if kind.itemsize == 2 else (3.5, 8.0)
    eps = torch.finfo(kind).eps
    assert report_of(package, wrong_by(quantity, most * eps))["ok"]
    assert not report_of(package, wrong_by(quantity, too_much * eps))["ok"]


@pytest.mark.parametrize(
    ("factor_of", "loss", "dtype"),
    combined(
        {"loss": 1.002, "dq": 1.02, "dk": 1.02, "dscale": 1.02}.items(), ["clip", "infonce"], ["bf16", "fp16", "fp32"]
    ),
)
def test_results_that_are_a_little_too_large_fail(
    packages: Packages, factor_of: tuple[str, float], loss: str, dtype: str
) -> None:
    quantity, factor = factor_of
    package = packages(loss, dtype=dtype, dim=96, panel=(64, 128))
    module = importlib.import_module(f"{package.__name__}._runtime.api")

    def compute(*arguments: Any, by: float = factor) -> tuple[Tensor, ...]:
        results = module.loss_and_grads(package.ContrastiveLoss._package, *arguments, *[None] * 6, module.Options())
        found = dict(zip(QUANTITIES, results, strict=True))
        found[quantity] = (found[quantity].float() * by).to(found[quantity].dtype)
        return tuple(found.values())

    assert report_of(package, functools.partial(compute, by=1.0))["ok"]
    assert not report_of(package, compute)["ok"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_kernel_of_gradients_that_are_a_little_too_large_is_noticed(
    planted: Callable[..., str], packages: Packages, dtype: str
) -> None:
    assert packages("clip", dtype=dtype).selftest()["ok"]
    edit = ("schedule.py", ".addmm_(g, part,", ".addmm_(g, part, alpha=1.02,")
    package = importlib.import_module(planted(f"large gradients in {dtype}", "clip", (edit,), dtype=dtype))
    failed = [case for case in package.selftest()["cases"] if not case["ok"]]
    wrong = {name for case in failed for name, error in case["errors"].items() if error > case["allowed"][name]}
    assert {"dq", "dk"} <= wrong and "loss" not in wrong


def test_products_of_halves_may_be_less_accurate(packages: Packages) -> None:
    package = packages(dtype="fp32", dim=96, panel=(64, 128))
    assert report_of(package, wrong_by("dq", 3.5 * 2.0**-15), split=True)["ok"]
    assert not report_of(package, wrong_by("dq", 8.0 * 2.0**-15), split=True)["ok"]


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_a_result_that_differs_from_run_to_run_fails(packages: Packages, quantity: str) -> None:
    package = packages(dtype="fp64", dim=96, panel=(64, 128))
    calls = []

    def compute(*arguments: Any) -> tuple[Tensor, ...]:
        calls.append(1)
        return wrong_by(quantity, 2.0**-50 * (len(calls) % 2))(*arguments)

    report = report_of(package, compute)
    assert not report["repeatable"] and not report["ok"]
    assert all(case["ok"] for case in report["cases"])


@pytest.mark.parametrize("logit", ["z", "z + bias", "2 * z"])
def test_a_loss_that_does_not_use_the_scale_or_the_bias(tmp_path: Path, logit: str) -> None:
    (tmp_path / "plain.py").write_text(
        "from infcl_gen.losses.language import *\n"
        f"x = {logit}\n"
        'PLAIN = LossSpec("plain", mean_over_queries(logsumexp_over_keys(x) - positive(x)), "label")\n'
    )
    folder = infcl_gen.generate(
        loss=f"{tmp_path}/plain.py:PLAIN", batch_size=130, dim=8, target="cpu", output=tmp_path / "package"
    )
    report = import_package(folder, f"plain_{abs(hash(logit))}").selftest()
    assert report["ok"], report
