"""The mean of a query's logits whose keys have weights, o_ij = a + b * (u_i . v_j), of a guide's features.

With rows [a, b u_i] / sum_l o_il of queries, A, and rows [1, v_j] of keys, B, the weights are A B^T. So the sums that
the mean and its gradients take are products of A, B, q and k that no pair has part in: each of
them takes rows * D * D multiplications. They are summed in fp64 over strips.

Over ranks the sums over keys, B^T [k, 1], go to all ranks before forward, and are kept for backward. There those over
queries, A^T q, go to all ranks after the work. Each is a matrix of (1 + D) x (1 + D) numbers at most.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .group import Group
from .package import Call, Package
from .transport import Trip, over_ranks

STRIP_ROWS = 4096  # at a time, where a temporary is wider than the features


class WeightedMeans:
    """The part of a rank's queries and keys in these means. `sums`, fp64 (1 + D, 1 + D), has B^T [k, 1] of all keys,
    once `begin` has written it."""

    def __init__(self, package: Package, call: Call, sums: Tensor, group: Group | None) -> None:
        self._package, self._call, self._sums, self._group = package, call, sums, group
        assert call.guide_queries is not None and call.guide_keys is not None
        self._guide_queries, self._guide_keys = call.guide_queries, call.guide_keys
        self._dtype = package.schedule.STATISTICS_DTYPE
        self._share = package.loss.MEAN_SHARE * 2.0**package.schedule.GRADIENT_EXPONENT  # in sums over pairs
        self._arrived: Tensor | None = None

    def begin(self) -> None:
        """Before forward: all ranks call it."""
        k, guide = self._call.k, self._guide_keys
        own = self._sums.zero_()
        for start in range(0, k.shape[0], STRIP_ROWS):
            strip = slice(start, start + STRIP_ROWS)
            own += _with_ones(guide[strip].to(self._dtype), 0).T @ _with_ones(k[strip].to(self._dtype), 1)
        if self._group is not None:
            own.copy_(over_ranks(own, self._group, "forward, sums of weighted keys"))

    def _of_queries(self, start: int, count: int) -> Tensor:
        """Rows of A, in the statistics dtype."""
        constant, slope = self._package.loss.WEIGHT
        factors = _with_ones(self._guide_queries[start : start + count].double(), 0)
        factors[:, :1] *= constant
        factors[:, 1:] *= slope
        return (factors / (factors @ self._sums[:, -1:])).to(self._dtype)

    @functools.cached_property
    def _own_queries(self) -> Tensor:
        """A^T q of this rank, fp64 (1 + D, D)."""
        q, found = self._call.q, torch.zeros_like(self._sums[:, :-1])
        for start in range(0, q.shape[0], STRIP_ROWS):
            strip = q[start : start + STRIP_ROWS].to(self._dtype)
            found += self._of_queries(start, len(strip)).T @ strip
        return found

    def see(self, k: Tensor) -> None:
        """Keys are added up where they are."""

    def work(self, trip: Trip, fresh: bool) -> None:
        """Nothing travels with the keys."""

    def arrived(self, trip: Trip) -> None:
        """After the work of a phase that has gradients of keys: all ranks call it."""
        assert self._group is not None
        self._arrived = over_ranks(self._own_queries, self._group, "sums of weighted queries")

    def for_queries(self, total: Tensor, start: int) -> dict[str, Tensor]:
        """Adds to `total`, the sums for dq of rows from `start` on, their part of the mean. Returns what `finish` takes
        besides."""
        keys = self._sums[:, :-1].to(self._dtype)
        for first in range(0, total.shape[0], STRIP_ROWS):
            strip = total[first : first + STRIP_ROWS]
            strip.addmm_(self._of_queries(start + first, len(strip)), keys, alpha=self._share)
        return {}

    def for_keys(self, total: Tensor) -> dict[str, Tensor]:
        """The same of the sums for dk, of all keys of this rank."""
        queries = (self._own_queries if self._arrived is None else self._arrived).to(self._dtype)
        guide = self._guide_keys
        for first in range(0, total.shape[0], STRIP_ROWS):
            strip = total[first : first + STRIP_ROWS]
            rows = _with_ones(guide[first : first + len(strip)].to(self._dtype), 0)
            strip.addmm_(rows, queries, alpha=self._share)
        return {}

    def added(self, loss: Tensor, weight: float) -> Tensor:
        """`loss`, 0-dim, with what the means of this rank's queries add to it."""
        rows, formulas = self._call.q.shape[0], self._package.loss
        if not rows:
            return loss
        z = (self._own_queries * self._sums[:, :-1]).sum() / rows
        mean = formulas.logit(z, self._call.scale.double(), self._call.bias.double())
        added: Tensor = mean.mul_(weight * formulas.MEAN_SHARE * rows).add_(loss)
        return added.to(loss.dtype)


def _with_ones(x: Tensor, place: int) -> Tensor:
    """x (rows, D) with a column of ones before (0) or behind (1) its own."""
    ones = x.new_ones((x.shape[0], 1))
    return torch.cat((x, ones) if place else (ones, x), 1)
