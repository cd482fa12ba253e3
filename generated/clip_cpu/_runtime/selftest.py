"""The self-test of a generated package: small batches on one device against the package's `reference` in fp64."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .group import ALONE
from .package import Options, Package

# Queries, keys, scale: one pair, a small tile, ragged tiles, and a temperature at which a fixed reference underflows.
CASES = ((1, 1, 1.0), (2, 2, 1.0), (64, 64, 14.3), (129, 129, 100.0), (100, 127, 14.3))
BIAS = -0.5
ROUNDINGS = 4.0  # allowed roundings of a result; at most 1.0 is measured
TF32_ROUNDOFF = 2.0**-10  # tensor cores cut operands to 10 mantissa bits
SPLIT_ROUNDOFF = 2.0**-16  # of a product of bf16 halves: operands are cut at 2^-18, low x low is left out


class Results(NamedTuple):
    """The loss (0-dim) and its gradients: dq (M, D), dk (N, D), dscale and dbias (0-dim)."""

    loss: Tensor
    dq: Tensor
    dk: Tensor
    dscale: Tensor
    dbias: Tensor


def selftest(package: Package, device: torch.device, loss_and_grads: Callable[..., Any]) -> dict[str, Any]:
    """The report of a package's `selftest`; `loss_and_grads` is that of api.py."""
    cases: list[dict[str, Any]] = []
    repeatable = True
    for rows, keys, scale in CASES:
        keys = keys if package.labelled else rows
        if rows > package.batch_size or keys > package.key_count:
            continue
        generator = torch.Generator().manual_seed(rows)
        random = (torch.randn(n, package.dim, generator=generator, dtype=torch.float64) for n in (rows, keys))
        q, k = (torch.nn.functional.normalize(x, dim=1).to(device, package.dtype) for x in random)
        arguments = (package, q, k, scale, BIAS, None, Options(ALONE))
        first, second = (Results(*loss_and_grads(*arguments)) for _ in range(2))
        repeatable &= all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        errors, allowed = _errors(package, first, q, k, scale)
        ok = all(errors[name] <= allowed[name] for name in errors)
        cases.append({"rows": rows, "keys": keys, "scale": scale, "ok": ok, "errors": errors, "allowed": allowed})
    return {
        "ok": repeatable and all(case["ok"] for case in cases),
        "package": package.name,
        "device": str(device),
        "dtype": str(package.dtype).removeprefix("torch."),
        "repeatable": repeatable,
        "cases": cases,
    }


def product_roundoff(dtype: torch.dtype, tf32: bool, split: bool) -> float:
    """Relative error of an operand in a matrix product, beyond the rounding of the features."""
    if dtype == torch.float32 and tf32:
        return TF32_ROUNDOFF
    return SPLIT_ROUNDOFF if split else torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2


def _errors(package: Package, found: Results, q: Tensor, k: Tensor, scale: float) -> tuple[dict[str, float], ...]:
    """Relative norm errors of the `Results`, and the largest allowed ones.

    Allowed are twice the error of dense torch in the statistics dtype, ROUNDINGS of the result, and the rounding of
    the products in the logits, whose terms are about scale / sqrt(D).
    """
    exact = _dense(package, q, k, scale, torch.float64)
    plain = _dense(package, q, k, scale, package.schedule.STATISTICS_DTYPE)
    product = 2.0 * product_roundoff(package.dtype, package.product_precision == "tf32", package.split)
    errors, allowed = {}, {}
    for name, truth in exact._asdict().items():
        if name == "dscale":  # terms of either sign: relative to the sum of their absolute values
            size = float((q.double() * exact.dq).abs().sum()) / scale
        else:
            size = 0.0 if name == "dbias" else float(torch.linalg.vector_norm(truth))
        size = size or 1.0  # one pair has no gradients
        # g is rounded to the features' dtype; the loss and dbias stay in the statistics dtype.
        rounded = 0.0 if name in ("loss", "dbias") else torch.finfo(package.dtype).eps
        rounding = ROUNDINGS * max(rounded, product) + scale / math.sqrt(package.dim) * product
        errors[name] = _distance(getattr(found, name), truth) / size
        allowed[name] = 2.0 * _distance(getattr(plain, name), truth) / size + rounding
    return errors, allowed


def _dense(package: Package, q: Tensor, k: Tensor, scale: float, dtype: torch.dtype) -> Results:
    """The results of the package's `reference` in `dtype`; unused inputs have gradient 0."""
    numbers = (torch.tensor(number, dtype=dtype, device=q.device) for number in (scale, BIAS))
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, *numbers)]
    loss = package.loss.reference(*leaves, dtype=dtype)
    return Results(loss.detach(), *torch.autograd.grad(loss, leaves, materialize_grads=True))


def _distance(value: Tensor, truth: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double() - truth))
