"""One phase of a call as blocks of queries and keys: what the package's device sweep works on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import triangle
from .group import Group, Layout
from .launch import panel
from .means import Means
from .package import Block, Call, Package, Saved, combined
from .renormalised import Renormalised
from .scaled import row_dots
from .statistics import Statistics, Terms, by_prefix, view
from .transport import Trip
from .weighted import WeightedMeans


class Sweep:
    """One phase of a call, which makes its blocks. `queries` and `positive` are views of `Saved.of_queries`, or live no
    longer than the sweep where that holds gradients."""

    def __init__(self, package: Package, call: Call, layout: Layout, saved: Saved, group: Group | None = None) -> None:
        self.package, self.call, self.layout, self.saved = package, call, layout, saved
        # Labels first: their copy from the host waits for kernels launched before it.
        self.positives, statistics = _positives(package, call, layout), saved.of_queries
        self.query_ids, self.key_ids = (None if ids is None else ids.contiguous() for ids in call.ids)
        self.vectors = saved.of_vectors if package.traits.vectors else None
        self.queries: Statistics | Terms | None = None
        self.prefixes = len(package.traits.slabs)
        self.sums: Tensor | None = None
        if package.traits.pairs:
            sums = self.sums = package.schedule.term_sums(call.q, max(layout.keys))
            self.positive, self.stash = sums[:0], call.q.new_empty(0) if package.traits.at_once else saved.stash
            self.queries = None if package.traits.at_once else Terms(*statistics)
        elif package.at_once(len(layout.rows)):
            statistics = new_statistics(package, call.q)
            self.queries, self.positive, self.stash = view(statistics), statistics[2:], call.q.new_empty(0)
        else:
            self.queries = view(statistics, self.prefixes)
            self.positive, self.stash = by_prefix(statistics, self.prefixes)[2:], saved.stash
        self.means: Means | WeightedMeans | None = None
        if package.traits.weighted:
            self.means = WeightedMeans(package, call, saved.weighted, group)
        elif package.traits.means:
            self.means = Means(package, call, sum(layout.keys))
        self.renormalised = Renormalised(package, call) if package.traits.renormalised else None
        self.thresholds: Tensor | None = None
        if package.traits.thresholds:
            own = call.guides if package.traits.guide else call[:2]
            self.thresholds = _thresholds(package, *own, self.labels, layout.key_offset(layout.rank))
        self.tiles = self.stash if self.stash.numel() else None  # of one device; over ranks the stash holds keys

    @property
    def further(self) -> Means | WeightedMeans | Renormalised | None:
        """What sums are changed by before they are gradients."""
        return self.renormalised if self.means is None else self.means

    @property
    def slopes(self) -> Tensor | int:
        """Parts of the sum of M * dL/dx over all pairs, or what `slopes_of_rows` has."""
        return slopes_of_rows(self.package, self.positive) if self.sums is None else self.sums[1]

    def block(
        self, owner: int, k: Tensor, statistics: Tensor, key_ids: Tensor | None, guide_keys: Tensor | None = None
    ) -> Block:
        of_keys = self.statistics_of_keys(statistics) if self.package.traits.has_keys else {"keys": None}
        first = self.layout.key_offset(owner)
        q, _, scale, bias, *_ = self.call
        counts = sum(self.layout.rows), sum(self.layout.keys)
        found = (self.queries, None, self.positive, self.vectors, self.query_ids, key_ids, self.sums, counts)
        block = Block(q, k, scale, bias, self.positives, first, *found)
        if self.renormalised is not None:
            factors = self.renormalised.of_queries, self.renormalised.factors(k)
            block = block._replace(query_factors=factors[0], key_factors=factors[1])
        guide_queries, thresholds = self.call.guide_queries, self.thresholds
        return block._replace(guide_queries=guide_queries, guide_keys=guide_keys, thresholds=thresholds, **of_keys)

    def statistics_of_keys(self, statistics: Tensor) -> dict[str, Any]:
        """The fields of a `Block` that are views of the statistics of its keys."""
        keys = view(statistics, self.prefixes)
        return {"keys": keys, "key_guide": statistics[-3:]} if self.package.traits.guided_sides else {"keys": keys}

    def own_block(self) -> Block:
        block = self.block(self.layout.rank, self.call.k, self.saved.of_keys, self.key_ids, self.call.guide_keys)
        if not self.package.traits.triangle:
            return block
        assert isinstance(self.queries, Statistics)
        return block._replace(
            keys=self.queries, key_positive=self.positive, key_labels=self.labels, first_query=block.first_key,
            own=True, key_thresholds=self.thresholds,
        )  # fmt: skip

    @property
    def labels(self) -> Tensor | None:
        """`positives` of a loss with labels."""
        return self.positives if isinstance(self.positives, Tensor) else None

    def block_of_rows(self, owner: int, trip: Trip) -> Block:
        """The block of a triangle with the rows of another rank."""
        traits = self.package.traits
        ids = trip["key ids"].view(-1) if traits.ids else None
        noted = trip["key sums" if trip.carries("key sums") else "key statistics"]
        labels = trip["key labels"].view(-1) if traits.labels else None
        block, thresholds = self.block(owner, trip["keys"], self.saved.of_keys, ids), None
        if traits.thresholds:
            thresholds = _thresholds(self.package, trip["keys"], trip["keys"], labels, block.first_key)
        return block._replace(
            keys=view(noted), key_positive=noted[2:], key_labels=labels,
            first_query=self.layout.key_offset(self.layout.rank), key_thresholds=thresholds,
        )  # fmt: skip

    def visits(self, trip: Trip) -> Iterator[Block]:
        """The blocks of queries and each owner's keys, as a trip brings them, without empty ones."""
        traits = self.package.traits
        for owner in trip:
            if traits.triangle and trip.adds:
                self._begin(trip)
            share = trip.share
            if not (share.rows and share.keys):
                continue
            if self.means is not None:
                self.means.see(trip["keys"])
            if traits.triangle:
                block = self.own_block() if owner == self.layout.rank else self.block_of_rows(owner, trip)
                yield block.panel(share.row, share.rows, share.key, share.keys)
            else:
                statistics = trip["key statistics"] if traits.has_keys else self.saved.of_keys
                ids = trip["key ids"].view(-1) if traits.ids else None
                guides = trip["guide keys"] if traits.guide else None
                yield self.block(owner, trip["keys"], statistics, ids, guides).panel(*share)

    def _begin(self, trip: Trip) -> None:
        """Makes sums for visiting rows to which nothing was added those of no pair; gradients where this rank's work
        leaves rows out."""
        if trip.fresh and trip.carries("key sums"):
            triangle.begin(trip["key sums"], self.package.traits)
            trip.fresh = False
        elif trip.fresh:
            sums, share = trip["key gradients"], trip.share
            panel(sums, 0, share.key if share.rows else len(sums)).zero_()


def _thresholds(
    package: Package, own: Tensor | None, positives: Tensor | None, labels: Tensor | None, first: int
) -> Tensor:
    """What pairs of each query are compared with, (m,): affine in the similarity, or a guide's, of its positive, which
    is the key of its index. Of a triangle `labels` name it, another row of the rank whose rows begin at `first`. NaN
    where the similarity is, or where rows are in no pair. A rank makes those of visiting rows itself."""
    factor, margin = package.loss.THRESHOLD
    assert own is not None and positives is not None
    there, alone = (None, None) if labels is None else triangle.partners(labels, first)
    found = row_dots(own, positives, package.schedule.STATISTICS_DTYPE, there).mul_(factor).add_(margin)
    return found if alone is None else found.masked_fill_(alone, math.nan)


def _positives(package: Package, call: Call, layout: Layout) -> Tensor | int:
    """Global key index of each query's positive, contiguous int64 (m,); without labels that of local row 0."""
    own, rows = call.options.labelling == "own", call.q.shape[0]
    offset = layout.key_offset(layout.rank) if own else sum(layout.rows[: layout.rank])
    if not package.traits.labels:
        return offset
    if call.labels is None:
        places = torch.arange(offset, offset + rows, device=call.q.device)
        return places.roll(rows // 2) if package.traits.triangle else places  # two views of a sample
    return call.labels.to(call.q.device).contiguous()


def slopes_of_rows(package: Package, positive: Tensor) -> Tensor | int:
    """Of a combined loss queries' parts of M * dL/dscale and M * dL/dbias (2, m), which `combine` leaves in `positive`
    (POSITIVE_PARTS, m); of others the number of queries, as the sum of M * dL/dx over a row is a constant."""
    traits = package.traits
    return combined(traits, positive).of_scalars.flatten(1).contiguous() if traits.combined else positive.shape[-1]


def new_statistics(package: Package, q: Tensor) -> Tensor:
    """Room for the statistics of q's rows, and for what the forward notes of their positives."""
    schedule = package.schedule
    numbers = (2 + schedule.POSITIVE_PARTS) * _losses(package)
    return q.new_empty((numbers, q.shape[0]), dtype=schedule.STATISTICS_DTYPE)


def _losses(package: Package) -> int:
    """How many losses with statistics of their own are added: one for each prefix of the features."""
    return len(package.traits.slabs) or 1
