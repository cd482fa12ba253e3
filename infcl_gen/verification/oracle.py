"""What a package's numbers are compared with: the dense loss in fp64, and the same loss in plain torch.

The oracle is the package's `reference`, printed from the loss's formula, differentiated by autograd: it shares neither
the derived gradient nor any kernel with what it checks.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

SLICE_ROWS = 2048


class LossAndGrads(NamedTuple):
    """A loss (0-dim) and its gradients: dq (M, D), dk (N, D), dscale and dbias (0-dim)."""

    loss: Tensor
    dq: Tensor
    dk: Tensor
    dscale: Tensor
    dbias: Tensor


def oracle(
    module: ModuleType,
    q: Tensor,
    k: Tensor,
    scale: float | Tensor = 1.0,
    bias: float | Tensor | None = None,
    labels: Tensor | None = None,
) -> LossAndGrads:
    """The dense fp64 loss of the package and its gradients, all fp64, for features of any dtype and strides."""
    leaves = _leaves(q, k, scale, bias)
    loss = module.reference(*leaves, labels=labels, dtype=torch.float64)
    return _gradients(loss, leaves)


def plain_torch(
    module: ModuleType,
    q: Tensor,
    k: Tensor,
    scale: float | Tensor = 1.0,
    bias: float | Tensor | None = None,
    labels: Tensor | None = None,
) -> LossAndGrads:
    """The same loss as one would write it in torch, in the features' own dtype; its error sets the tolerance.

    What OpenCLIP computes under autocast: the similarities are a product in the features' dtype (so bf16 rounds them),
    logits and cross-entropy are fp32, and autograd returns through the same dtypes. fp32 and fp64 stay what they are.
    """
    mathematics = loss_module(module)
    statistics = torch.promote_types(q.dtype, torch.float32)
    q, k, scale, bias = _leaves(q, k, scale, bias, q.dtype, statistics)
    x = mathematics.logit((q @ k.T).to(statistics), scale, bias)
    if mathematics.POSITIVES == "label":
        labels = torch.arange(len(q), device=q.device) if labels is None else labels.to(q.device)
        loss = mathematics.loss_of_logits(x, labels)
    else:
        loss = mathematics.loss_of_logits(x)
    return _gradients(loss, (q, k, scale, bias))


def oracle_by_slices(mathematics: Any, q: Tensor, k: Tensor, scale: float, labels: Tensor) -> LossAndGrads:
    """The oracle for batches whose similarities do not fit into memory, a slice of the queries at a time.

    From a package's loss.py alone, and by its derived gradient: autograd would keep every slice.
    """
    q, k = q.detach().double(), k.detach().double()
    factor, zero = (torch.tensor(number, dtype=torch.float64, device=q.device) for number in (scale, 0.0))
    slices = [slice(start, start + SLICE_ROWS) for start in range(0, len(q), SLICE_ROWS)]
    r, p = (q.new_empty(len(q)) for _ in range(2))
    c = q.new_full((len(k),), -torch.inf)
    for rows in slices:
        x = mathematics.logit(q[rows] @ k.T, factor, zero)
        r[rows] = x.logsumexp(1)
        c = c.logaddexp(x.logsumexp(0))
        p[rows] = x.gather(1, labels[rows, None])[:, 0]
    loss = mathematics.query_term(r, p).sum() + (mathematics.key_term(c, p).sum() if mathematics.HAS_KEYS else 0)
    dq, dk, dscale = torch.zeros_like(q), torch.zeros_like(k), zero.clone()
    for rows in slices:
        z = q[rows] @ k.T
        x = mathematics.logit(z, factor, zero)
        g = mathematics.QUERY_SHARE * (x - r[rows, None]).exp()
        if mathematics.HAS_KEYS:
            g += mathematics.KEY_SHARE * (x - c).exp()
        g.scatter_add_(1, labels[rows, None], g.new_full((len(g), 1), mathematics.POSITIVE_SHARE))
        g *= mathematics.dlogit_dz(z, factor, zero)
        dq[rows] = g @ k
        dk += g.T @ q[rows]
        dscale += (q[rows] * dq[rows]).sum()
    to_features = mathematics.gradient_factor(factor, zero) / len(q)
    dscale *= mathematics.dscale_factor(factor, zero) / len(q)
    return LossAndGrads(loss / len(q), dq * to_features, dk * to_features, dscale, zero + mathematics.DBIAS)


def loss_module(module: ModuleType) -> Any:
    """The package's loss.py (its `__init__` need not offer it under this name)."""
    return importlib.import_module(f"{module.__name__}.loss")


def _leaves(
    q: Tensor,
    k: Tensor,
    scale: float | Tensor,
    bias: float | Tensor | None,
    dtype: torch.dtype = torch.float64,
    statistics: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fresh leaves that ask for gradients."""

    def leaf(value: float | Tensor, dtype: torch.dtype) -> Tensor:
        tensor = torch.as_tensor(value, dtype=dtype, device=q.device).detach().clone()
        return tensor.requires_grad_()

    return (leaf(q, dtype), leaf(k, dtype), leaf(scale, statistics), leaf(0.0 if bias is None else bias, statistics))


def _gradients(loss: Tensor, leaves: tuple[Tensor, Tensor, Tensor, Tensor]) -> LossAndGrads:
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    filled = (
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    )
    return LossAndGrads(loss.detach(), *filled)
