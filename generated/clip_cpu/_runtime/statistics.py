"""Sums of exponentials with an unbounded range.

A statistic of a row (or of a key) is ``sum_j 2**x2_j``, where ``x2 = log2(e) * logit``. It is held as the pair
``mantissa * 2**exponent``, both floating point: a logit of 1e6 overflows neither, and a row whose logits are all
-1e6 does not underflow to zero, as it would against any fixed reference. Statistics of disjoint sets of keys merge by
addition. The order of merges is fixed by the schedule, so results are bitwise repeatable.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LN2 = math.log(2.0)
LOG2E = 1.0 / LN2


class Statistics(NamedTuple):
    """``mantissa * 2**exponent`` per row: integer-valued exponents, ``1 <= mantissa < 2``; a sum over nothing has the
    mantissa 0, whatever its exponent. NaN in either part means that the row saw a NaN (or an infinite logit). Where not
    every integer is a number of the exponents' dtype (beyond 2^24 in fp32) mantissas take up what exponents cannot."""

    exponent: Tensor
    mantissa: Tensor

    def panel(self, start: int, rows: int) -> Statistics:
        """Up to `rows` of them from `start` on, without a copy; no views where these are all: each takes the host up to
        13 us."""
        if start == 0 and rows >= self.exponent.shape[0]:
            return self
        return Statistics(self.exponent[start : start + rows], self.mantissa[start : start + rows])


def view(pair: Tensor) -> Statistics:
    """A (2 or more, rows) tensor as statistics, without a copy."""
    exponent, mantissa, *_ = pair.unbind()
    return Statistics(exponent, mantissa)


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
    """``into += sum_p totals[p] * 2**exponents[p]`` row by row, in place, for statistics (parts, rows) of at least one
    part; the order is that of the parts."""
    lowest = torch.finfo(into.exponent.dtype).min
    own = torch.where(totals == 0, lowest, exponents)  # the exponent of a sum over nothing means nothing
    reference = own.amax(0)
    merge(into, reference, (totals * torch.exp2(own - reference)).sum(0))


def excess(sums: Statistics, places: slice | Tensor, term: Tensor) -> Tensor:
    """p - 1 of terms (2, rows), exponents and mantissas, in the sums at `places`: exactly 0 where a sum is its term.

    As (term - sum) / sum: p would be rounded, and the difference of 1 and a rounded p is not what the others add up to.
    """
    mantissa = sums.mantissa[places]
    return (term[1] * torch.exp2(term[0] - sums.exponent[places])).sub_(mantissa).div_(mantissa)


def log(statistics: Statistics, places: slice = slice(None)) -> Tensor:
    """Natural logarithm of the sums at `places`, the log-sum-exps, in fp64: of one number one result, whatever its
    exponent."""
    fraction, shift = torch.frexp(statistics.mantissa[places].double())
    return (statistics.exponent[places].double() + shift + torch.log2(fraction)).mul_(LN2)
