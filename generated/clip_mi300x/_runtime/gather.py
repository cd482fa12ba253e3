"""The gather: keys of all ranks at once, for few ranks that are near each other.

A ring sends something on at every hop; here everybody sends to everybody, in one batch of messages at a time:

    forward    keys -> everybody       | work on the own keys
               work on all others'
               sums for the statistics of all keys -> everybody, who adds them up in rank order
    backward   work on all others' keys, which are still there, with their statistics
               work on the own keys    | sums for the others' gradients -> home
               dq is finished; then what has come home is added to the own sums, in rank order

Three batches a step, where a ring of W has 2 W + 1 (of two 4). The price is memory, for the keys of all ranks from
forward to backward and for the gradients of all of them, sent and received. Keys and gradients travel with as many rows
as their owner has keys, between ranks of which one has queries and the other keys; sums for statistics, which are of
all keys, from each rank with queries to all that have queries or keys. Nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .launch import panel_columns
from .ring import Agreeing, Layout, Message, Moment, Ring, Transfer
from .statistics import Statistics, view


class Gather:
    """What both directions share. Iterating yields owners; the work on `parcels[0]`, the keys of the owner, adds to
    `accumulator`. Errors name the phase, what was under way, and the peers."""

    fresh = True  # nothing was added to an accumulator before the work on its owner, which may replace what it holds

    def __init__(self, ring: Ring, layout: Layout, phase: str) -> None:
        self.ring, self.layout, self.phase = ring, layout, phase
        self.parcels: list[Tensor] = []
        self.accumulator: Tensor | None = None
        here = ring.rank
        others = [rank for rank in range(ring.size) if rank != here]
        # Who works on the own keys, and whose keys are worked on here: only there go keys, and gradients home.
        self._guests = [rank for rank in others if layout.keys[here] and layout.rows[rank]]
        self._owners = [rank for rank in others if layout.keys[rank] and layout.rows[here]]
        # In the order of a ring, in which no two ranks work on the same keys.
        self._order = [(here - hop) % ring.size for hop in range(1, ring.size)]

    def _by_owner(self, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """The part of each rank's keys of what is of all keys, and may be longer: all at once, for a view takes the
        host up to 13 us."""
        keys = self.layout.keys
        parts: tuple[Tensor, ...] = x.split((*keys, x.shape[dim] - sum(keys)), dim)
        return parts

    def _transfer(self, what: str, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        return Transfer(self.ring, f"{self.phase} gather of {self.ring.size} ranks, {what}", sends, receives)


class ForwardGather(Gather):
    """Keys of all ranks come into `gathered` (at least as many rows, D); `statistics` (2, at least as many; None: the
    loss has none) get those of all. The own ones are in `accumulator` afterwards.

    add_up     the package's `merge_ranks`, if it has statistics of keys
    agree      called before anything is sent
    """

    def __init__(
        self,
        ring: Ring,
        layout: Layout,
        k: Tensor,
        gathered: Tensor,
        statistics: Tensor | None,
        add_up: Callable[[Tensor, Statistics], None] | None,
        agree: Agreeing | None,
    ) -> None:
        super().__init__(ring, layout, "forward")
        self._device, self._agree = gathered.device, agree
        self._shards = self._by_owner(gathered)
        self._shards[ring.rank].copy_(k)
        self._moment: Moment | None = Moment([gathered])
        self._statistics = self._own_sums = None
        if statistics is not None and add_up is not None:
            self._statistics, self._add_up = panel_columns(statistics, 0, sum(layout.keys)), add_up
            workers = [rank for rank in range(ring.size) if layout.rows[rank]]
            self._sums = statistics.new_empty((len(workers), *self._statistics.shape))
            self._sums_of = dict(zip(workers, self._sums.unbind(), strict=True))
            self._own_sums = self._sums_of.get(ring.rank)
            if self._own_sums is not None:
                self._own_shards = self._by_owner(self._own_sums, 1)
        self._visit(ring.rank)  # the work on the own keys may begin before the first visit
        self._keys: Transfer | None = None

    def __iter__(self) -> Iterator[int]:
        here = self.ring.rank
        yield here
        self.arrive()  # where there was no work
        assert self._keys is not None
        self._keys.wait()
        for owner in self._order:
            self._visit(owner)
            yield owner
        if self._statistics is not None:
            self._settle(self._statistics)
        self.ring.finish_trip()

    def arrive(self) -> None:
        """Sends the own keys, once: the device has been given work on them, for which what is sent does not wait."""
        moment, self._moment = self._moment, None
        if moment is None:
            return
        if self._agree is not None:
            self._agree()
        self.ring.connect(self._device)
        sends = [Message(self._shards[self.ring.rank], guest, 0) for guest in self._guests]
        receives = [Message(self._shards[owner], owner, 0) for owner in self._owners]
        with moment:
            self._keys = self._transfer("keys", sends, receives)

    def _visit(self, owner: int) -> None:
        self.parcels = [self._shards[owner]]
        if self._own_sums is not None:
            self.accumulator = self._own_shards[owner]

    def _settle(self, statistics: Tensor) -> None:
        """Everybody who has queries or keys gets the sums of everybody who has queries, and adds them up alike."""
        here, layout = self.ring.rank, self.layout
        concerned = [rank for rank in range(self.ring.size) if layout.rows[rank] or layout.keys[rank]]
        if here in concerned:
            own = self._own_sums
            sends = [] if own is None else [Message(own, rank, 1) for rank in concerned if rank != here]
            receives = [Message(part, rank, 1) for rank, part in self._sums_of.items() if rank != here]
            self._transfer("sums of statistics", sends, receives).wait()
            self._add_up(self._sums, view(statistics))
        self.accumulator = self._by_owner(statistics, 1)[here]


class BackwardGather(Gather):
    """Gradients of the keys of all ranks: `gathered` and `statistics` as the forward has left them.

    `accumulator` is of `dtype`. What others have added to this rank's own comes with `settle()`. `ask` is called behind
    the first work, which the device is waiting for; what it gives, when the work on all others' keys has been launched.
    """

    def __init__(
        self,
        ring: Ring,
        layout: Layout,
        gathered: Tensor,
        statistics: Tensor | None,
        dtype: torch.dtype,
        ask: Callable[[], Agreeing],
    ) -> None:
        super().__init__(ring, layout, "backward")
        self._ask, self._shards = ask, self._by_owner(gathered)
        self._statistics = None if statistics is None else self._by_owner(statistics, 1)
        shape = (layout.keys[ring.rank], gathered.shape[1])
        # A rank without queries contributes nothing to its own keys.
        new = gathered.new_empty if layout.rows[ring.rank] else gathered.new_zeros
        self._own = new(shape, dtype=dtype)
        foreign = sum(layout.keys[owner] for owner in self._owners)
        self._sums = gathered.new_empty((foreign, shape[1]), dtype=dtype)
        self._received = gathered.new_empty((len(self._guests), *shape), dtype=dtype)
        self._home: Transfer | None = None

    def __iter__(self) -> Iterator[int]:
        here, agree = self.ring.rank, None
        parts = dict(
            zip(self._owners, self._sums.split([self.layout.keys[o] for o in self._owners]), strict=True)
        )
        for owner in self._order:
            if owner in parts:
                self._visit(owner, parts[owner])
                yield owner
                agree = agree or self._ask()
        agree = agree or self._ask()
        agree()
        sends = [Message(parts[owner], owner, 2) for owner in self._owners]
        receives = [Message(part, guest, 2) for guest, part in zip(self._guests, self._received, strict=True)]
        self._home = self._transfer("sums of gradients", sends, receives)
        self._visit(here, self._own)
        yield here
        self.ring.finish_trip()

    def arrive(self) -> None:
        """Nothing is on its way to the keys that are worked on."""

    def settle(self) -> Tensor:
        """The sums for the own keys, once what others have added to them is home."""
        if self._home is not None:
            self._home.wait()
        for part in self._received:
            self._own.add_(part)
        self._received = self._sums = self._own.new_empty(0)  # their memory is for the results
        return self._own

    def _visit(self, owner: int, sums: Tensor) -> None:
        self.parcels, self.accumulator = [self._shards[owner]], sums
        if self._statistics is not None:
            self.parcels.append(self._statistics[owner])
