"""What a tracer records is what a plain call does: every option arrives, and gradients have the features' dtype."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.kernels.planted import Edit

Packages = Callable[..., ModuleType]
OPS = "_runtime/ops.py"


def drawn(*dtypes: torch.dtype) -> list[Tensor]:
    """q and k in these dtypes, and a scale in fp32."""
    generator = torch.Generator().manual_seed(5)
    features = [torch.randn(20, 8, generator=generator).to(dtype).requires_grad_() for dtype in dtypes]
    return [*features, torch.tensor(2.0, requires_grad=True)]


def options_arrive(package: ModuleType) -> None:
    """`reduction` is the one option that changes the results of a single rank, in forward and in backward."""
    leaves = drawn(torch.bfloat16, torch.bfloat16)
    found = {}

    def results(reduction: str, *leaves: Tensor) -> tuple[Tensor, ...]:
        loss = package.contrastive_loss(*leaves, reduction=reduction)
        return (loss, *torch.autograd.grad(loss, leaves))

    for reduction in ("mean", "sum"):
        run = partial(results, reduction)
        found[reduction] = run(*leaves)
        for recorded, plain in zip(make_fx(run)(*leaves)(*leaves), found[reduction], strict=True):
            assert torch.equal(recorded, plain), f"reduction {reduction}"
    assert not any(torch.equal(a, b) for a, b in zip(found["mean"], found["sum"], strict=True))


def gradients_have_the_dtype_of_their_features(package: ModuleType) -> None:
    """By the operator itself: autograd's engine would cast what comes out of it."""
    operators = package.ContrastiveLoss._package.operators
    wide, narrow = torch.float32, torch.bfloat16
    for dtypes in ((wide, wide), (wide, narrow), (narrow, wide), (narrow, narrow)):
        q, k, scale = (x.detach() for x in drawn(*dtypes))
        call = (q, k, scale, torch.tensor(0.0), None)
        options = ("", "mean", "mean", "first", "none")
        loss, *saved = operators.forward(*call, *options, 15)
        dq, dk, dscale, dbias = operators.backward(torch.ones_like(loss), *call, *saved, *options)
        assert (dq.dtype, dk.dtype) == dtypes, f"{dq.dtype}, {dk.dtype} for {dtypes}"
        assert dscale.dtype == dbias.dtype == wide
        rounded = [torch.equal(x.bfloat16().float(), x) for x in (dq, dk) if x.dtype == wide]
        assert not any(rounded), "gradients of wider features are not rounded to the package's dtype in between"


CHECKS: dict[str, Callable[[ModuleType], None]] = {
    "options": options_arrive, "dtypes": gradients_have_the_dtype_of_their_features,
}  # fmt: skip
BUGS: dict[str, tuple[str, Edit]] = {
    "a traced call drops the reduction": (
        "options", (OPS, "*call.options[:5], gradients", '*call.options[:2], "mean", *call.options[3:5], gradients'),
    ),
    "the forward operator drops the reduction": (
        "options", (OPS, "Options(*inputs[5:10])", 'Options(*inputs[5:10])._replace(reduction="mean")'),
    ),
    "the backward operator drops the reduction": (
        "options", (OPS, "Options(*rest[7:])", 'Options(*rest[7:])._replace(reduction="mean")'),
    ),
    "gradients keep the dtype of their sums": (
        "dtypes", (OPS, "(dq.to(q.dtype), dk.to(k.dtype), *scalars)", "(dq, dk, *scalars)"),
    ),
    "both gradients have the dtype of the queries": ("dtypes", (OPS, "dk.to(k.dtype)", "dk.to(q.dtype)")),
    "gradients pass through the package's dtype": (
        "dtypes", (OPS, "return (dq.to(q.dtype), dk", "dq = dq.to(package.dtype)\n        return (dq.to(q.dtype), dk"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_operators(packages: Packages, check: str) -> None:
    CHECKS[check](packages("clip", dtype="bf16"))


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_operators_is_noticed(planted: Callable[..., str], bug: str) -> None:
    check, edit = BUGS[bug]
    package = importlib.import_module(planted(bug, "clip", (edit,), dtype="bf16"))
    with pytest.raises(AssertionError):
        CHECKS[check](package)
