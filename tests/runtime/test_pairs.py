"""A loss that is a sum over pairs: forward computes its gradients, and backward multiplies them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from infcl_gen.verification.properties import DTYPES
from tests.verification.dense import dense, dense_loss

from .in_process import USUAL

Packages = Callable[..., ModuleType]


def drawn(dtype: str, rows: int = 70) -> list[Tensor]:
    """q, k, scale and bias that require gradients."""
    generator = torch.Generator().manual_seed(3)
    features = (torch.randn(rows, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    leaves = [torch.nn.functional.normalize(x, dim=1).to(DTYPES[dtype]) for x in features]
    numbers = torch.promote_types(DTYPES[dtype], torch.float32)
    leaves += [torch.tensor(value, dtype=numbers) for value in (10.0, -10.0)]
    return [x.requires_grad_() for x in leaves]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_backward_may_be_called_again_with_another_gradient(packages: Packages, dtype: str) -> None:
    leaves = drawn(dtype)
    loss = packages("siglip", dtype).contrastive_loss(*leaves)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, retain_graph=True)
    fourfold = torch.autograd.grad(loss, leaves, loss.new_tensor(4.0))
    for a, b, c in zip(first, again, fourfold, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(4 * a, c) or (dtype == "fp16" and torch.allclose(4 * a, c, atol=2.0**-22))  # subnormal


@pytest.mark.parametrize("upstream", [2.0**-12, 3.0, 2.0**14])
def test_a_loss_scale_keeps_the_digits_of_small_gradients(packages: Packages, upstream: float) -> None:
    """Gradients in fp16 begin at 6e-8: what forward keeps has the range of fp32.

    Planted: what forward keeps is in the features' dtype.
    """
    leaves = drawn("fp16")
    loss = packages("siglip", "fp16").contrastive_loss(*leaves)
    found = torch.autograd.grad(loss, leaves, loss.new_tensor(upstream))
    truth = dense("siglip", leaves[0], leaves[1], 10.0, -10.0, factor=upstream)
    for ours, theirs in zip(found[:2], truth[1:3], strict=True):
        rounding = theirs.abs() * 2.0**-10 + 2.0**-24  # half the smallest subnormal, and a rounding of 11 bits
        assert bool(((ours.double() - theirs).abs() <= rounding).all())


def test_nothing_is_kept_without_gradients(packages: Packages) -> None:
    package, leaves = packages("siglip", "fp32"), drawn("fp32")
    operators = package.ContrastiveLoss._package.operators
    options = (*[None] * 6, *USUAL)
    loss, *kept = operators.forward(*(x.detach() for x in leaves), *options, 0)
    assert not any(x.numel() for x in kept)
    with torch.no_grad():
        assert torch.equal(loss, package.contrastive_loss(*leaves))
    loss, *kept = operators.forward(*(x.detach() for x in leaves), *options, 0b1111)
    assert [tuple(x.shape) for x in kept[:3]] == [(70, 8), (70, 8), (2,)]
    torch.testing.assert_close(loss.double(), dense_loss("siglip", *(x.double() for x in leaves)).detach())


def test_features_of_one_side_may_need_no_gradient(packages: Packages) -> None:
    package, leaves = packages("siglip", "fp64"), drawn("fp64")
    truth = torch.autograd.grad(dense_loss("siglip", *leaves), leaves)
    for side in range(4):
        inputs = [x if index == side else x.detach() for index, x in enumerate(leaves)]
        (found,) = torch.autograd.grad(package.contrastive_loss(*inputs), (leaves[side],))
        torch.testing.assert_close(found, truth[side])
