"""From sums over pairs to gradients: the weight of a term, and the last kernel of each phase."""

from __future__ import annotations

import torch
from torch import Tensor

from .group import Layout
from .launch import panel
from .means import Means
from .package import KEYS, QUERIES, SCALARS, Call, Options, Package, Saved, products
from .renormalised import Renormalised
from .weighted import WeightedMeans

Sums = tuple[Tensor | None, Tensor | None]  # for dq and dk


class Weighting:
    """Turns sums over pairs into gradients: the weight of a term, the upstream gradient and the logit's factor; before
    that each gets the part that `further` has of it.

    `dtype` is that of dq and dk. In the statistics dtype they may overwrite the sums.
    """

    def __init__(
        self,
        package: Package,
        call: Call,
        layout: Layout,
        upstream: Tensor,
        gradients: int,
        result: torch.dtype | None = None,
        further: Means | WeightedMeans | Renormalised | None = None,
    ) -> None:
        self._further = further
        schedule, self.gradients, self.products = package.schedule, gradients, products(gradients)
        self._schedule, self._q, self._k, dtype = schedule, call.q, call.k, schedule.STATISTICS_DTYPE
        self._factors = call.scale, call.bias, upstream.to(dtype).contiguous(), weight_of(layout, call.options)
        self.dtype = result or (dtype if call.options.unrounded else package.dtype)
        self.in_place = self.dtype == dtype
        self._dots = None
        if gradients & SCALARS:
            rows = (call.q if self.products.of_queries else call.k).shape[0]
            self._dots = call.q.new_empty(-(-rows // schedule.FINISH_ROWS), dtype=dtype)

    def kept(self, saved: Saved) -> Sums:
        """dq and dk of `Saved`, where forward writes them."""
        dq = saved.of_queries if self.gradients & QUERIES else None
        return dq, saved.of_keys if self.gradients & KEYS else None

    def query_sums(self, dq: Tensor | None, rows: int) -> Tensor | None:
        """Room for the sums of so many rows, dq itself if it can hold them; None if no gradient needs them."""
        if not self.products.of_queries or (self.in_place and dq is not None):
            return dq
        return self._q.new_empty((rows, self._q.shape[1]), dtype=self._schedule.STATISTICS_DTYPE)

    def queries(self, total: Tensor, out: Tensor, start: int = 0, **of_rows: Tensor) -> None:
        """Rows of dq from `start` on, a multiple of FINISH_ROWS. `of_rows`: what `finish` takes of them, besides."""
        rows, each = total.shape[0], self._schedule.FINISH_ROWS
        if rows:
            dots = None if self._dots is None else panel(self._dots, start // each, -(-rows // each))
            more = {} if self._further is None else self._further.for_queries(total, start)
            self._schedule.finish(total, panel(self._q, start, rows), *self._factors, out, dots=dots, **more, **of_rows)

    def keys(self, total: Tensor, out: Tensor) -> None:
        if total.shape[0]:
            dots = None if self.products.of_queries else self._dots
            more = {} if self._further is None else self._further.for_keys(total)
            self._schedule.finish(total, self._k, *self._factors, out, dots=dots, **more)

    def scalars(self, slopes: Tensor | int) -> tuple[Tensor | None, Tensor | None]:
        """(dscale, dbias), after all sums; `slopes` are those of the sweep."""
        if self._dots is None:
            return None, None
        found: tuple[Tensor, Tensor] = self._schedule.scalar_gradients(self._dots, *self._factors, slopes)
        return found


def weight_of(layout: Layout, options: Options) -> float:
    """What the terms of a rank are multiplied by."""
    if options.reduction == "none":
        return 1.0
    ranks = len(layout.rows) if options.grad_sync == "mean" else 1
    return ranks / sum(layout.rows) if options.reduction == "mean" else float(ranks)
