"""Rows that are keys of each other, over ranks: of two ranks one computes their pairs, and has sums for rows of both.

Forward's sums for visiting rows are what it notes of own ones, `Saved.of_queries` before `combine`: of each row its
log-sum-exps so far, and its positive if it was met. They travel home, and are merged with the own rows' there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .statistics import Statistics, merge_parts, view
from .traits import Traits

_EXPONENT_OF_POSITIVES = 4  # as in `Block.positive`


def begin(sums: Tensor, traits: Traits) -> None:
    """Makes `sums` (2 + POSITIVE_PARTS, n) those of no pair: sums of 0, and positives that nobody has met."""
    sums.zero_()
    if traits.labels:
        sums[2].fill_(math.nan)


def add(total: Tensor, sums: Tensor, traits: Traits) -> None:
    """total += sums, both (2 + POSITIVE_PARTS, m) of the same rows and of different pairs."""
    positive, met = total[2:], sums[2:]
    _merge(view(total), view(sums))
    if traits.second:
        _merge(view(positive[-2:]), view(met[-2:]))
        positive, met = positive[:-2], met[:-2]
    if traits.labels:
        torch.where(met[0].isnan(), positive, met, out=positive)
        return
    positive[1] += met[1]  # their number
    if traits.softmax_of_positives:
        own, others = (Statistics(each[_EXPONENT_OF_POSITIVES], each[0]) for each in (positive, met))
        _merge(own, others)
    else:
        positive[0] += met[0]


def _merge(total: Statistics, sums: Statistics) -> None:
    merge_parts(total, sums.exponent[None], sums.mantissa[None])
