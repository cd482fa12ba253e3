"""Negatives that only one query sees: the log-sum-exp h_i of their logits, a number of the query.

Of rows in pairs, (M / 2, H, D), they are those of pairs in the order of their first rows: only that row is compared
with them, and both rows have their log-sum-exp. Where the loss has thresholds, it leaves out those above the pair's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .scaled import row_dots
from .traits import Traits

STRIP_ROWS = 16384  # products of a query and a negative at a time, which are wider than the features


class Pairs(NamedTuple):
    """Of each pair the places of its first row and of the other one, (M / 2,); and of each row its pair, (M,)."""

    first: Tensor
    other: Tensor
    of_row: Tensor


def shape(partnered: bool, q: Tensor) -> tuple[Any, Any]:
    """How many queries, or pairs where rows are `partnered`, have negatives, and of which width."""
    return (q.shape[0] // 2 if partnered else q.shape[0]), q.shape[1]


def pairs(labels: Tensor | None, rows: int, device: torch.device) -> Pairs:
    """The pairs of a rank's rows, whose labels may count from another rank's first; None: rows i and i + M / 2. Any
    places where labels are of no pairs."""
    own = torch.arange(rows, device=device)
    there = own.roll(rows // 2)
    if labels is not None and rows:
        labels = labels.to(device)
        there = (labels - labels.min()).clamp(0, rows - 1)
    of_row = (own < there).cumsum(0).index_select(0, torch.minimum(own, there)).sub(1).clamp(0, max(0, rows // 2 - 1))
    first = own.new_zeros(rows // 2).scatter(0, of_row, torch.minimum(own, there))
    return Pairs(first, there.index_select(0, first), of_row)


class _Products(torch.autograd.Function):
    """z (B, H) in `dtype` of rows (B, D) and the negatives of each (B, H, D)."""

    @staticmethod
    def forward(rows: Tensor, negatives: Tensor, dtype: torch.dtype) -> Tensor:
        z = rows.new_empty(negatives.shape[:2], dtype=dtype)
        for strip in _strips(negatives):
            z[strip] = (rows[strip].to(dtype)[:, None] * negatives[strip]).sum(2)
        return z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, negatives = ctx.saved_tensors
        of_rows, of_negatives = (
            x.new_empty(x.shape) if wanted else None
            for x, wanted in zip((rows, negatives), ctx.needs_input_grad, strict=False)
        )
        for strip in _strips(negatives):
            weights = upstream[strip, :, None]
            if of_rows is not None:
                of_rows[strip] = (weights * negatives[strip]).sum(1)
            if of_negatives is not None:
                of_negatives[strip] = weights * rows[strip, None]
        return of_rows, of_negatives, None


def _strips(negatives: Tensor) -> Iterator[slice]:
    """Of rows whose products with negatives are in work at a time. A compiler fuses products with their sums, and
    rows of an exported graph vary: there it is one strip."""
    if torch.compiler.is_compiling():
        return iter([slice(None)])
    step = max(1, STRIP_ROWS // negatives.shape[1])
    return (slice(start, start + step) for start in range(0, negatives.shape[0], step))


def log_sums(
    traits: Traits, loss: Any, q: Tensor, negatives: Tensor, scale: Tensor, bias: Tensor, labels: Tensor | None = None
) -> Tensor:
    """h (M,) in scale's dtype of queries q (M, D) and their negatives, differentiably in all but labels.

    `loss` is a package's loss.py. Products are summed element by element: a matrix product might round to bf16 or tf32.
    """
    if not traits.partnered:
        return torch.logsumexp(loss.logit(_Products.apply(q, negatives, scale.dtype), scale, bias), 1)
    found = pairs(labels, q.shape[0], q.device)
    rows = q.index_select(0, found.first)
    z = _Products.apply(rows, negatives, scale.dtype)
    x = loss.logit(z, scale, bias)
    if not traits.thresholds:
        return torch.logsumexp(x, 1).index_select(0, found.of_row)
    factor, margin = loss.THRESHOLD
    most = row_dots(rows.detach(), q.detach(), scale.dtype, found.other) * factor + margin
    above = z.detach() > most[:, None]
    none = above.all(1)  # left: torch's derivative of such a sum would be NaN
    sums = torch.logsumexp(x.masked_fill(above & ~none[:, None], -math.inf), 1)
    return sums.masked_fill(none, -math.inf).index_select(0, found.of_row)
