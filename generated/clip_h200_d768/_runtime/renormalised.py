"""Cosines of prefixes: z of prefix p is q_i[:p] . k_j[:p] over both norms.

Tiles multiply products by the inverse norms of their rows, the `factors`. With g of prefix p the gradient of q_i[:p]
has a part along q_i[:p], which is -sum_j g_ij z_ij / |q_i[:p]|^2 times it. Sweeps add up these radial sums beside the
sums for dq and dk; those of keys travel. A row whose norm is below SMALLEST_NORM is divided by that instead, as torch's
`normalize` does it, and has no such part.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .launch import panel_columns
from .means import STRIP_ROWS
from .package import Block, Call, Package
from .transport import Trip

SMALLEST_NORM = 1e-12
TILE_ROWS = 256  # of the largest tile


def factors_of(x: Tensor, prefixes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """1 / max(|x_i[:p]|, SMALLEST_NORM) of each prefix p and row of x (rows, D), of any strides: (prefixes, rows).

    Kernels read whole tiles: there is room behind the last row, of zeros.
    """
    rows = x.shape[0]
    room = x.new_zeros((len(prefixes), -(-rows // TILE_ROWS) * TILE_ROWS), dtype=dtype)
    found = room[:, :rows]
    step = max(1, rows) if x.is_cuda else STRIP_ROWS  # a GPU adds squares up without a copy
    for start in range(0, rows, step):
        strip = slice(start, start + step)
        for own, columns in zip(found, prefixes, strict=True):
            torch.linalg.vector_norm(x[strip, :columns], dim=1, dtype=dtype, out=own[strip])
    return found.clamp_(min=SMALLEST_NORM).reciprocal_()


class Renormalised:
    """Of one phase of a call the factors of its rows, and in backward the radial sums."""

    def __init__(self, package: Package, call: Call) -> None:
        self._prefixes, self._dtype = package.traits.prefixes, package.schedule.STATISTICS_DTYPE
        self._call, self._arrived = call, call.q.new_empty(0)

    @functools.cached_property
    def of_queries(self) -> Tensor:
        """The factors of the queries, (prefixes, m)."""
        return factors_of(self._call.q, self._prefixes, self._dtype)

    @functools.cached_property
    def of_keys(self) -> Tensor:
        """The factors of this rank's keys, (prefixes, n)."""
        return factors_of(self._call.k, self._prefixes, self._dtype)

    @functools.cached_property
    def query_sums(self) -> Tensor:
        """Room for the radial sums of the queries, (prefixes, m)."""
        return torch.empty_like(self.of_queries)

    def factors(self, k: Tensor) -> Tensor:
        """The factors of visiting keys."""
        return self.of_keys if k is self._call.k else factors_of(k, self._prefixes, self._dtype)

    def with_sums(self, block: Block, trip: Trip | None, of_queries: bool, of_keys: bool) -> Block:
        """The block with the radial sums to which its backward adds: those of keys travel, or are of one device."""
        visiting = None
        if of_keys and trip is None:
            visiting = self._arrived = torch.empty_like(self.of_keys)
        elif of_keys and trip is not None:
            visiting = trip["key radial sums"]
        return block._replace(query_radial=self.query_sums if of_queries else None, key_radial=visiting)

    def arrived(self, trip: Trip) -> None:
        self._arrived = trip.home("key radial sums")

    def for_queries(self, total: Tensor, start: int) -> dict[str, Tensor]:
        """What `finish` takes for sums for dq, besides them."""
        own = (panel_columns(each, start, total.shape[0]) for each in (self.of_queries, self.query_sums))
        return {"radial": self._of_slabs(*own)}

    def for_keys(self, total: Tensor) -> dict[str, Tensor]:
        return {"radial": self._of_slabs(self.of_keys, self._arrived)}

    def _of_slabs(self, factors: Tensor, sums: Tensor) -> Tensor:
        """The multiple of its own row that each slab of columns loses, (slabs, rows); all longer prefixes have it."""
        largest = factors.new_full((), SMALLEST_NORM).reciprocal_()  # `new_tensor` waits for the device
        found = (sums * factors).mul_(factors).masked_fill_(factors == largest, 0.0)
        for longer, shorter in zip(reversed(found[1:].unbind()), reversed(found[:-1].unbind()), strict=True):
            shorter.add_(longer)
        return found
