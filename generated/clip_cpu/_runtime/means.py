"""Sums of features, from which the mean of all logits and its gradients follow.

Of a logit that is affine in z the mean over a query's keys is the logit of its product with the mean key. Each rank
adds up the keys that visit it; sums of queries travel beside the sums for dk.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .package import Call, Package
from .transport import Trip

EACH = 256  # rows that a GPU adds up in the statistics dtype, before their sums are in fp64
ROWS = 4096  # at a time, where a temporary is wider than the features
STRIP_ROWS = 32  # at a time elsewhere, where torch copies features to the dtype of their sum


def sum_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the rows of x (rows, D), of any strides: fp64 (D,), in a fixed order. `dtype`: of the statistics."""
    if x.is_cuda:
        return _by_parts(x, dtype)
    total = x.new_zeros(x.shape[1], dtype=torch.float64)
    for part in x.split(STRIP_ROWS):
        total += part.sum(0, dtype=torch.float64)
    return total


def _by_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in few launches, which read features in place."""
    whole = x.shape[0] // EACH * EACH
    if not whole:
        return x.sum(0, dtype=dtype).double()
    total: Tensor = x[:whole].unflatten(0, (-1, EACH)).sum(1, dtype=dtype).sum(0, dtype=torch.float64)
    return total if whole == x.shape[0] else total.add_(x[whole:].sum(0, dtype=dtype))


class Means:
    """The sums of this rank's queries, of all keys that it has seen, and of the queries of all ranks, which `arrived`.

    package.loss.MEAN_SHARE multiplies the mean of all logits in L.
    """

    def __init__(self, package: Package, call: Call, keys: int) -> None:
        """`keys`: their number in the whole batch."""
        self._package, self._call, self._count = package, call, keys
        self._seen: Tensor | None = None
        self._arrived: Tensor | None = None
        self.rows: Tensor | None = None  # (m,), by which the parts of queries are multiplied

    def see(self, k: Tensor) -> None:
        """Adds keys of the batch, each of which is seen once."""
        total = sum_of(k, self._package.schedule.STATISTICS_DTYPE)
        self._seen = total if self._seen is None else self._seen.add_(total)

    @functools.cached_property
    def queries(self) -> Tensor:
        """The sum of this rank's queries, fp64 (D,), times `rows`."""
        if self.rows is not None:
            return torch.mv(self._call.q.to(self.rows.dtype).T, self.rows).double()
        return sum_of(self._call.q, self._package.schedule.STATISTICS_DTYPE)

    def work(self, trip: Trip, fresh: bool) -> None:
        """Adds the sum of this rank's queries to a row that travels; what is fresh was never written."""
        row = trip["query sums"]
        if fresh:
            row.copy_(self.queries)
        else:
            row.add_(self.queries)

    def arrived(self, trip: Trip) -> None:
        self._arrived = trip.home("query sums")[0]

    @functools.cached_property
    def of_keys(self) -> Tensor:
        """The mean of all keys (D,), once they are seen: times MEAN_SHARE it is part of a sum for dq."""
        assert self._seen is not None
        return self._rounded(self._seen)

    @functools.cached_property
    def of_queries(self) -> Tensor:
        """The sum of all queries over the number of keys (D,): the same of a sum for dk."""
        return self._rounded(self.queries if self._arrived is None else self._arrived)

    def for_queries(self, total: Tensor, start: int) -> dict[str, Tensor]:
        """What `finish` takes for sums for dq, besides them."""
        if self.rows is None:
            return {"mean": self.of_keys}
        schedule, rows = self._package.schedule, self.rows[start : start + len(total)]
        total.addr_(rows, self.of_keys, alpha=self._package.loss.MEAN_SHARE * 2.0**schedule.GRADIENT_EXPONENT)
        return {"mean": torch.zeros_like(self.of_keys)}

    def for_keys(self, total: Tensor) -> dict[str, Tensor]:
        return {"mean": self.of_queries}

    def _rounded(self, total: Tensor) -> Tensor:
        return (total / self._count).to(self._package.schedule.STATISTICS_DTYPE)

    def added_to_rows(self, terms: Tensor) -> Tensor:
        """The losses of this rank's queries, (m,), with what the mean of the logits of each adds, once all are seen."""
        if not len(terms):
            return terms
        assert self._seen is not None
        q, formulas = self._call.q, self._package.loss
        z = torch.cat([part.double() @ self._seen for part in q.split(ROWS)]) / self._count
        mean = formulas.logit(z, self._call.scale.double(), self._call.bias.double())
        added: Tensor = mean.mul_(formulas.MEAN_SHARE).add_(terms)
        return added.to(terms.dtype)

    def added(self, loss: Tensor, weight: float) -> Tensor:
        """`loss`, 0-dim, with what the mean of the logits of this rank's queries adds to it, once all keys are seen."""
        rows, formulas = self._call.q.shape[0], self._package.loss
        if not rows:
            return loss
        assert self._seen is not None
        z = torch.dot(self.queries, self._seen) / (rows * self._count)
        mean = formulas.logit(z, self._call.scale.double(), self._call.bias.double())
        added: Tensor = mean.mul_(weight * formulas.MEAN_SHARE * rows).add_(loss)
        return added.to(loss.dtype)
