"""How the samples of a step pass its towers: plain data, chosen by `choose`, executed by `executor`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

TREATMENTS = ("cached", "checkpointed", "kept")  # of samples that a contrastive loss sees together
STREAMED = "streamed"


@dataclasses.dataclass(frozen=True)
class Part:
    """So many samples of a tower, so many at a time."""

    samples: int = 0
    micro_batch: int = 1

    @property
    def passes(self) -> int:
        return -(-self.samples // self.micro_batch)


@dataclasses.dataclass(frozen=True)
class TowerPlan:
    """The samples of one tower by treatment.

    kept          the graph of the first pass stays until backward
    checkpointed  so does what enters each block; backward computes the blocks again
    cached        features alone stay; a second pass makes the graph (gradient cache, arXiv 2101.06983)
    streamed      the loss is a mean over samples: each micro-batch passes forward and backward at once
    frozen        no gradient is wanted: all samples pass once, as the first pass of cached ones
    """

    name: str
    cached: Part = Part()
    checkpointed: Part = Part()
    kept: Part = Part()
    streamed: Part = Part()
    frozen: bool = False

    @property
    def samples(self) -> int:
        return sum(getattr(self, treatment).samples for treatment in (*TREATMENTS, STREAMED))

    def passes(self, samples: int, tower: int = 0) -> Iterator[Pass]:
        """Those of the first `samples` samples: what is kept comes first, so that fewer samples keep no more."""
        start = 0
        for treatment in (STREAMED, *reversed(TREATMENTS)):
            part: Part = getattr(self, treatment)
            stop: int = min(samples, start + part.samples)
            for first in range(start, stop, part.micro_batch):
                yield Pass(tower, first, min(first + part.micro_batch, stop), treatment)
            start = max(start, stop)


class Pass(NamedTuple):
    """One micro-batch of a tower."""

    tower: int
    start: int
    stop: int
    treatment: str

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)
