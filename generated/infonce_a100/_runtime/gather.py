"""The gather: keys of all ranks at once, for few ranks that are near each other.

A ring sends something on at every hop; here everybody sends to everybody, in one batch of messages at a time:

    forward    work on the own keys    | keys -> everybody
               work on all others'
               sums for their statistics -> home; the own ones, added up in rank order, -> everybody
    backward   work on all others' keys, which are still there, with their statistics
               work on the own keys    | sums for the others' gradients -> home
               dq is finished; then what has come home is added to the own sums, in rank order

Four batches a step, where a ring of W has 2 W + 2 that cost the host 0.1 to 0.2 ms each. The price is memory, for the
keys of all ranks from forward to backward and for the gradients of all of them, sent and received. Messages have as
many rows as their owner has keys: nothing is padded, and where one end has no queries or no keys there is no message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .ring import Layout, Message, Moment, Ring, Transfer
from .statistics import merge_parts, view


class Gather:
    """What both directions share. Iterating yields owners; the work on `parcels[0]`, the keys of the owner, adds to
    `accumulator`, which needs no waiting for. Errors name the phase, what was under way, and the peers."""

    def __init__(self, ring: Ring, layout: Layout, phase: str) -> None:
        self.ring, self.layout, self.phase = ring, layout, phase
        self.parcels: list[Tensor] = []
        self.accumulator: Tensor | None = None
        here = ring.rank
        others = [rank for rank in range(ring.size) if rank != here]
        # Who works on the own keys, and whose keys are worked on here: between others there are no messages.
        self._guests = [rank for rank in others if layout.keys[here] and layout.rows[rank]]
        self._owners = [rank for rank in others if layout.keys[rank] and layout.rows[here]]
        # In the order of a ring, in which no two ranks work on the same keys.
        self._order = [(here - hop) % ring.size for hop in range(1, ring.size)]

    def rows_of(self, owner: int) -> slice:
        """Of the keys of an owner among those of all ranks."""
        start = self.layout.key_offset(owner)
        return slice(start, start + self.layout.keys[owner])

    def pair_of(self, statistics: Tensor, owner: int) -> Tensor:
        """(2, keys) of an owner, contiguous, in `statistics` (2, keys of all ranks or more), which are a pair for each
        owner after that of the one before."""
        rows = self.rows_of(owner)
        return statistics.view(-1)[2 * rows.start : 2 * rows.stop].view(2, -1)

    def _spread(self, what: str, tag: int, own: Tensor, others: Callable[[int], Tensor]) -> Transfer:
        """Sends `own` to all who work on the own keys, and receives `others(owner)` of those who are worked on here."""
        sends = [Message(own, guest, tag) for guest in self._guests]
        receives = [Message(others(owner), owner, tag) for owner in self._owners]
        return self._transfer(what, sends, receives)

    def _bring_home(self, what: str, tag: int, parts: Callable[[int], Tensor], received: Tensor) -> Transfer:
        """Sends `parts(owner)` to each owner that was worked on here, and receives what others have for the own keys:
        (guests, ...), in rank order."""
        sends = [Message(parts(owner), owner, tag) for owner in self._owners]
        receives = [Message(part, guest, tag) for guest, part in zip(self._guests, received, strict=True)]
        return self._transfer(what, sends, receives)

    def _transfer(self, what: str, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        return Transfer(self.ring, f"{self.phase} gather of {self.ring.size} ranks, {what}", sends, receives)


class ForwardGather(Gather):
    """Keys of all ranks come into `gathered` (at least as many rows, D); `statistics` (2, as many; None: the loss has
    none) get those of all.

    agree      called before anything is sent, when the work on this rank's own keys has been started
    finished   whether backward needs the finished statistics of others. The own ones are in `accumulator` afterwards.
    """

    def __init__(
        self,
        ring: Ring,
        layout: Layout,
        k: Tensor,
        gathered: Tensor,
        statistics: Tensor | None,
        finished: bool,
        agree: Callable[[], None] | None,
    ) -> None:
        super().__init__(ring, layout, "forward")
        self._gathered, self._statistics = gathered, statistics
        self._finished, self._agree = finished, agree
        gathered[self.rows_of(ring.rank)].copy_(k)
        if statistics is not None:
            statistics.zero_()

    def __iter__(self) -> Iterator[int]:
        here = self.ring.rank
        begin = Moment([self._gathered])
        self._visit(here)
        yield here
        if self._agree is not None:
            self._agree()
        self.ring.connect(self._gathered.device)
        own = self._gathered[self.rows_of(here)]
        with begin:  # not after the work
            keys = self._spread("keys", 0, own, lambda owner: self._gathered[self.rows_of(owner)])
        keys.wait()
        for owner in self._order:
            self._visit(owner)
            yield owner
        self._visit(here)
        if self._statistics is not None:
            self._settle(self._statistics)
        self.ring.finish_trip()

    def arrive(self) -> None:
        """Nothing is on its way while there is work."""

    def _visit(self, owner: int) -> None:
        self.parcels = [self._gathered[self.rows_of(owner)]]
        if self._statistics is not None:
            self.accumulator = self.pair_of(self._statistics, owner)

    def _settle(self, statistics: Tensor) -> None:
        own = self.pair_of(statistics, self.ring.rank)
        received = own.new_empty((len(self._guests), *own.shape))
        home = self._bring_home(
            "sums of statistics", 1, lambda owner: self.pair_of(statistics, owner), received
        )
        home.wait()
        if len(received):
            merge_parts(view(own), received[:, 0], received[:, 1])
        if self._finished:
            others = self._spread("statistics", 2, own, lambda owner: self.pair_of(statistics, owner))
            others.wait()


class BackwardGather(Gather):
    """Gradients of the keys of all ranks: `gathered` and `statistics` as the forward has left them.

    `accumulator`, in the dtype of `sums`, is never written to before the work on its owner: sums may replace what it
    holds. What others have added to this rank's own comes with `settle()`. `agree` is called before anything is sent,
    when the work on all others' keys has been started.
    """

    def __init__(
        self,
        ring: Ring,
        layout: Layout,
        gathered: Tensor,
        statistics: Tensor | None,
        dtype: torch.dtype,
        agree: Callable[[], None],
    ) -> None:
        super().__init__(ring, layout, "backward")
        self._gathered, self._statistics, self._agree = gathered, statistics, agree
        own = self.rows_of(ring.rank)
        shape = (own.stop - own.start, gathered.shape[1])
        # A rank without queries contributes nothing to its own keys.
        new = gathered.new_empty if layout.rows[ring.rank] else gathered.new_zeros
        self._own = new(shape, dtype=dtype)
        foreign = sum(layout.keys[owner] for owner in self._owners)
        self._sums = gathered.new_empty((foreign, shape[1]), dtype=dtype)
        self._received = gathered.new_empty((len(self._guests), *shape), dtype=dtype)
        self._home: Transfer | None = None

    def __iter__(self) -> Iterator[int]:
        here = self.ring.rank
        parts = dict(
            zip(self._owners, self._sums.split([self.layout.keys[o] for o in self._owners]), strict=True)
        )
        for owner in self._order:
            if owner in parts:
                self._visit(owner, parts[owner])
                yield owner
        self._agree()
        self._home = self._bring_home("sums of gradients", 3, lambda owner: parts[owner], self._received)
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
        self.parcels, self.accumulator = [self._gathered[self.rows_of(owner)]], sums
        if self._statistics is not None:
            self.parcels.append(self.pair_of(self._statistics, owner))
