"""Negatives that only one query sees: the log-sum-exp h_i of their logits, a number of the query.

Of rows in pairs, (M / 2, H, D), they are those of pairs in the order of their first rows: only that row is compared
with them, and both rows have their log-sum-exp. Where the loss has thresholds, it leaves out those above the pair's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .traits import Traits


class Pairs(NamedTuple):
    """Of each pair the places of its first row and of the other one, (M / 2,); and of each row its pair, (M,)."""

    first: Tensor
    other: Tensor
    of_row: Tensor


def shape(traits: Traits, q: Tensor) -> tuple[Any, Any]:
    """How many queries, or pairs, have negatives, and of which width."""
    return (q.shape[0] // 2 if traits.partnered else q.shape[0]), q.shape[1]


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


def log_sums(
    traits: Traits, loss: Any, q: Tensor, negatives: Tensor, scale: Tensor, bias: Tensor, labels: Tensor | None = None
) -> Tensor:
    """h (M,) of queries q (M, D) and their negatives, in their dtype, differentiably in all but labels.

    `loss` is a package's loss.py. Products are summed element by element: a matrix product might round to bf16 or tf32.
    """
    if not traits.partnered:
        return torch.logsumexp(loss.logit((q[:, None] * negatives).sum(2), scale, bias), 1)
    found = pairs(labels, q.shape[0], q.device)
    rows = q.index_select(0, found.first)
    z = (rows[:, None] * negatives).sum(2)
    x = loss.logit(z, scale, bias)
    if traits.thresholds:
        factor, margin = loss.THRESHOLD
        most = (rows * q.index_select(0, found.other)).sum(1).detach() * factor + margin
        x = x.masked_fill(z.detach() > most[:, None], -math.inf)
    return torch.logsumexp(x, 1).index_select(0, found.of_row)
