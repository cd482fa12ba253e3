"""Rows that are keys of each other, over ranks: of two ranks one computes their pairs, and has sums for rows of both.

Forward's sums for visiting rows are what it notes of own ones, `Saved.of_queries` before `combine`: of each row its
log-sum-exps so far, and its positive if it was met. They travel home, and are merged with the own rows' there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .statistics import Statistics, view
from .traits import Traits

_EXPONENT_OF_POSITIVES = 4  # as in `Block.positive`


def partners(labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Of the rows of a rank, from `first` on, the places of their positives among them, and which rows are in no pair:
    their positive is another rank's, or has another positive itself. Of these any place."""
    places, own = labels - first, torch.arange(first, first + len(labels), device=labels.device)
    there = places.clamp(0, len(labels) - 1)
    return there, (there != places) | (labels[there] != own)


def begin(sums: Tensor, traits: Traits) -> None:
    """Makes `sums` (2 + POSITIVE_PARTS, n) those of no pair: sums of 0, and positives that nobody has met.

    The exponents of these sums are the lowest, so that they decide none of a merged sum.
    """
    sums.zero_()
    lowest = torch.finfo(sums.dtype).min
    sums[0].fill_(lowest)
    if traits.labels:
        sums[2].fill_(math.nan)
    if traits.second:
        sums[-2].fill_(lowest)
    if traits.softmax_of_positives:
        sums[2 + _EXPONENT_OF_POSITIVES].fill_(lowest)


def add(total: Tensor, sums: Tensor, traits: Traits, add_statistics: Callable[[Statistics, Statistics], None]) -> None:
    """total += sums, both (2 + POSITIVE_PARTS, m) of the same rows and of different pairs, by the schedule's
    `add_statistics`."""
    positive, met = total[2:], sums[2:]
    add_statistics(view(total), view(sums))
    if traits.second:
        add_statistics(view(positive[-2:]), view(met[-2:]))
        positive, met = positive[:-2], met[:-2]
    if traits.labels:
        torch.where(met[0].isnan(), positive, met, out=positive)
        return
    positive[1] += met[1]  # their number
    if traits.softmax_of_positives:
        own, others = (Statistics(each[_EXPONENT_OF_POSITIVES], each[0]) for each in (positive, met))
        add_statistics(own, others)
    else:
        positive[0] += met[0]
