"""The columns of a query's positives, of which it has any number: their sum, and what a key gets by the terms with it.

cp_i = log sum_j exp(c_j) over the positives j of query i, c_j the log-sum-exp over queries of key j. With the slopes
ac_i of terms by it dL/dx_ij has exp(x_ij) * U_j, U_j = sum_l ac_l * exp(-cp_l) over the queries l of key j's id. Both
are made between the sweeps, in fp64, from a few numbers of each query and key. Over ranks each tells its own to all
others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .group import Group, Layout
from .package import Block, Package
from .statistics import LOG2E, log
from .transport import of_ranks

NOTHING = -1e300  # the exponent of a sum of nothing
HUGE = 2.0**100  # the exponent of an infinite sum: no logit has a share in it


class Columns:
    """Of the block of all own queries and own keys, whose statistics are complete. All ranks make one, and call both
    methods, those without queries or keys, too."""

    def __init__(self, package: Package, block: Block, group: Group | None, layout: Layout) -> None:
        self._block, self._group, self._layout = block, group, layout
        scale, bias = block.scale.double(), block.bias.double()
        lacks = package.schedule.SUMS_LACK_SHIFT
        self._shift = package.loss.logit(torch.zeros_like(scale), scale, bias) if lacks else 0.0
        self._of_queries: Tensor | None = None

    def of_queries(self) -> Tensor:
        """cp of each query, fp64 (m,); -inf of one without positives."""
        block = self._block
        assert block.keys is not None and block.query_ids is not None and block.key_ids is not None
        c = log(block.keys) + self._shift
        ids, c = self._of_ranks(block.key_ids, self._layout.keys, c)
        exponent, number = summed_by_id(ids, c, torch.ones_like(c), block.query_ids)
        self._of_queries = exponent + number.log()
        return self._of_queries.clone()

    def renew(self, weights: Tensor) -> None:
        """Makes the statistics of own keys those of 1 / U_j, from ac of each query, fp64 (m,): 2**x2 over the sum is
        then exp(x_ij) * U_j. A key of no query has an infinite sum."""
        block, cp = self._block, self._of_queries
        assert block.keys is not None and block.query_ids is not None and block.key_ids is not None and cp is not None
        ids, cp, weights = self._of_ranks(block.query_ids, self._layout.rows, cp, weights)
        exponent, number = summed_by_id(ids, -cp, weights, block.key_ids)
        nothing = number == 0
        power = (exponent + self._shift) * -LOG2E
        block.keys.exponent.copy_(power.floor().masked_fill_(nothing, HUGE))
        rest = torch.exp2(power - block.keys.exponent.double())
        block.keys.mantissa.copy_((rest / number).masked_fill(nothing, torch.inf))

    def _of_ranks(self, ids: Tensor, counts: tuple[int, ...], *numbers: Tensor) -> list[Tensor]:
        """Ids and numbers of all ranks, which travel together."""
        if self._group is None:
            return [ids, *numbers]
        own = torch.stack((ids.view(torch.float64), *numbers), 1)
        bits, *found = of_ranks(own, counts, self._group, "forward, sums of columns").unbind(1)
        return [bits.contiguous().view(torch.int64), *found]


def summed_by_id(ids: Tensor, exponents: Tensor, numbers: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Of each wanted id the sum of numbers * exp(exponents) of this id, as an exponent and a number, 0 of none.

    ids int64 (N,), at least one, and wanted (m,); the others fp64 (N,). Neighbours of one id are added at distances of
    1, 2, 4, ...: in one order, whatever the device, which is never waited for.
    """
    ids, order = ids.sort(stable=True)
    s = numbers[order]
    e = torch.where(s == 0, NOTHING, exponents[order])
    distance = 1
    while distance < len(ids):
        same, before = ids[distance:] == ids[:-distance], torch.where(s[:-distance] == 0, NOTHING, e[:-distance])
        before, more = torch.where(same, before, NOTHING), torch.where(same, s[:-distance], 0.0)
        top = torch.maximum(e[distance:], before)
        total = s[distance:] * (e[distance:] - top).exp() + more * (before - top).exp()
        e, s = torch.cat((e[:distance], top)), torch.cat((s[:distance], total))
        distance *= 2
    place = (torch.searchsorted(ids, wanted, right=True) - 1).clamp_(min=0)
    return e[place], torch.where(ids[place] == wanted, s[place], 0.0)
