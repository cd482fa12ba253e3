"""How the samples of a step pass its towers: plain data, chosen by `choose`, executed by `executor`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Of samples that a contrastive loss sees together; the more of them stays on the device until backward, the later.
TREATMENTS = ("cached", "offloaded", "checkpointed", "kept")
STREAMED = "streamed"
WITH_GRAPHS = ("checkpointed", "kept")  # whose graphs stay from the first pass
# Samples are dealt out in this order, so that a smaller batch than the planned one keeps no more.
DEALT = (STREAMED, *reversed(TREATMENTS))


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
    offloaded     that stays in the memory of the host instead
    cached        features alone stay; a second pass makes the graph (gradient cache, arXiv 2101.06983)
    streamed      the loss is a mean over samples: each micro-batch passes forward and backward at once
    frozen        no gradient is wanted: all samples pass once, as the first pass of cached ones
    tokens        that a sample has at most, where samples have various lengths; else 0
    """

    name: str
    cached: Part = Part()
    checkpointed: Part = Part()
    kept: Part = Part()
    offloaded: Part = Part()
    streamed: Part = Part()
    frozen: bool = False
    tokens: int = 0

    @property
    def samples(self) -> int:
        return sum(part.samples for _, part in self.parts())

    def parts(self) -> Iterator[tuple[str, Part]]:
        """The treatments that some samples have; those of which most stays until backward come first."""
        for treatment in DEALT:
            part: Part = getattr(self, treatment)
            if part.samples:
                yield treatment, part

    def passes(self, samples: int, tower: int = 0, lengths: Sequence[int] | None = None) -> Iterator[MicroBatch]:
        """Those of the first `samples` samples: what is kept comes first, so that fewer samples keep no more.

        lengths   tokens of each sample, in descending order: a micro-batch holds as many samples as have the tokens of
                  the planned ones, when all are as long as its first
        """
        start, tokens = 0, self.tokens if lengths else 1
        for treatment, part in self.parts():
            left = part.samples * tokens
            while start < samples and left >= (length := lengths[start] if lengths else 1):
                size = min(max(1, part.micro_batch * tokens // length), left // length, samples - start)
                yield MicroBatch(tower, start, start + size, treatment)
                start, left = start + size, left - size * length


class MicroBatch(NamedTuple):
    """One micro-batch of a tower."""

    tower: int
    start: int
    stop: int
    treatment: str

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)
