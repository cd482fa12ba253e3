"""Sums of exponentials with an unbounded range.

A statistic of a row (or of a key) is ``sum_j 2**x2_j``, where ``x2 = log2(e) * logit``, held as floating-point
``mantissa * 2**exponent``. Logits of 1e6 do not overflow, and rows of logits -1e6 do not underflow. Statistics of
disjoint keys merge by addition, in an order fixed by the schedule, so results are bitwise repeatable.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .launch import panel_columns

LN2 = math.log(2.0)
LOG2E = 1.0 / LN2


class Statistics(NamedTuple):
    """``mantissa * 2**exponent`` per row: integer-valued exponents, ``1 <= mantissa < 2``; an empty sum has mantissa 0.

    (rows,) each; of a loss over several prefixes (prefixes, rows).
    A combined loss divides mantissas by the weights of their rows, which leaves any number.
    NaN in either part: the row saw a NaN or an infinite logit. Where exponents are not exact integers (beyond 2^24 in
    fp32) mantissas take the rest.
    """

    exponent: Tensor
    mantissa: Tensor

    def panel(self, start: int, rows: int) -> Statistics:
        """Up to `rows` rows from `start` on, as `launch.panel`."""
        return Statistics(panel_columns(self.exponent, start, rows), panel_columns(self.mantissa, start, rows))

    def prefix(self, number: int) -> Statistics:
        """Those of one prefix, of statistics of several: (prefixes, rows)."""
        return Statistics(self.exponent[number], self.mantissa[number])


class Terms(NamedTuple):
    """Of each query of a sum over pairs, (rows,): the sum of its terms, and a factor of the gradients of its pairs."""

    total: Tensor
    factor: Tensor

    def panel(self, start: int, rows: int) -> Terms:
        """Up to `rows` rows from `start` on, as `launch.panel`."""
        return Terms(panel_columns(self.total, start, rows), panel_columns(self.factor, start, rows))


def view(pair: Tensor, prefixes: int = 0) -> Statistics:
    """A (2 or more, rows) tensor as statistics, without a copy; of several prefixes (2 or more times that, rows)."""
    exponent, mantissa, *_ = by_prefix(pair, prefixes).unbind()
    return Statistics(exponent, mantissa)


def by_prefix(numbers: Tensor, prefixes: int) -> Tensor:
    """Numbers (N * prefixes, rows) as (N, prefixes, rows), without a copy; without prefixes as they are."""
    return numbers.unflatten(0, (-1, prefixes)) if prefixes else numbers


def merge(into: Statistics, exponent: Tensor, total: Tensor) -> None:
    """``into += total * 2**exponent`` row by row, in place, renormalised. `total` is any finite number >= 0."""
    lowest = torch.finfo(into.exponent.dtype).min
    own = torch.where(into.mantissa == 0, lowest, into.exponent)
    reference = torch.maximum(own, exponent).clamp_(min=lowest)  # -inf - -inf would be NaN
    merged = into.mantissa * torch.exp2(own - reference) + total * torch.exp2(exponent - reference)
    carried = reference + (torch.frexp(merged)[1] - 1)
    into.mantissa.copy_(merged * torch.exp2(reference - carried))  # beyond 2^24 the sum above is rounded
    into.exponent.copy_(carried)


def merge_parts(into: Statistics, exponents: Tensor, totals: Tensor) -> None:
    """``into += sum_p totals[p] * 2**exponents[p]`` row by row, in place, in the order of the parts; (parts, rows)."""
    lowest = torch.finfo(into.exponent.dtype).min
    own = torch.where(totals == 0, lowest, exponents)  # the exponent of an empty sum is arbitrary
    reference = own.amax(0)
    merge(into, reference, (totals * torch.exp2(own - reference)).sum(0))


def excess(sums: Statistics, places: slice | Tensor, term: Tensor) -> Tensor:
    """p - 1 = (term - sum) / sum of terms (2, rows), exponents and mantissas, in the sums at `places`.

    Exactly 0 where a sum is its term; a rounded p would not add up to 1 with the other terms.
    """
    mantissa = sums.mantissa[places]
    return (term[1] * torch.exp2(term[0] - sums.exponent[places])).sub_(mantissa).div_(mantissa)


def log(statistics: Statistics, places: slice = slice(None)) -> Tensor:
    """Log-sum-exps at `places`, in fp64: equal numbers give equal results, however mantissa and exponent split them."""
    fraction, shift = torch.frexp(statistics.mantissa[places].double())
    return (statistics.exponent[places].double() + shift + torch.log2(fraction)).mul_(LN2)
