"""The table of communication, executed: where travelling tensors are, when messages start, and what waits for them.

On CUDA the host waits for no message: messages run on streams of their own, behind the work that they depend on, and
the current stream waits for them where the table says so.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from .group import Group, Layout
from .launch import panel, panel_columns
from .mailboxes import Message
from .table import HERE, KEPT, OWN, RECEIVED, STAYED, Place, Share, Step, Table, Transfer

T = TypeVar("T")
_Agree = Callable[[], None]
_Ends = tuple[set[str], list[Message], list[Message]]  # a batch on this rank: roles, sends and receives
_streams: dict[int, torch.cuda.Stream] = {}  # by device: where messages are started
_TAG = 32  # of messages outside of a trip; the tags of its tensors count from 0


class Tensors(NamedTuple):
    """The tensors of a trip, by their names in the table.

    kept    left by forward for backward. Ring: of the last keys of forward, as long as the largest shard. Gather: of
            the keys of all ranks, in rank order; sums that all ranks get are written there
    dtypes  of "features" and "statistics"
    add_up  add_up(parts, total): writes the sum of `parts` (ranks with queries, ...), in this order, to `total`
    """

    own: Mapping[str, Tensor]  # of this rank's keys
    kept: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    add_up: Callable[[Tensor, Tensor], None] | None = None


class Trip:
    """One phase of the table on this rank. Iterating yields the owners of visiting keys; the loop's body works on them.

    The work reads unchanged tensors as `trip[name]` and, after `arrive()`, adds to summed tensors. `arrive` starts the
    step's messages, behind the work of earlier steps only. Late ones start behind the work so far, too. On a CPU all
    but late ones start before the work. After the loop `home(name)` holds the sums of all ranks for this rank's keys;
    of a triangle `others(name)` those of other ranks.

    `agree` is called once, before anything is sent. A failed transfer raises RuntimeError with phase, hop and peers.
    """

    def __init__(
        self, group: Group, table: Table, phase: str, layout: Layout, tensors: Tensors, agree: _Agree | None = None
    ) -> None:
        self._group, self._table, self._phase, self._layout, self._agree = group, table, phase, layout, agree
        kind: type[_Shards | _Slots] = _Shards if table.transport == "gather" else _Slots
        self._rooms = kind(table, phase, layout, tensors)
        self._device = next(iter(tensors.own.values())).device
        self._step, self._hop, self._owner = Step(None), -1, layout.rank
        self.fresh = True  # nothing was added to this step's sums: work may overwrite them
        self._pending: tuple[int, list[_Ends], Moment | None] | None = None  # messages of this step, not started
        self._under_way: dict[tuple[int, str], Batch] = {}  # by the step that has started them, and the role

    def __iter__(self) -> Iterator[int]:
        for number, step in enumerate(self._table.steps(self._phase)):
            self._step, self.fresh = step, step.fresh
            for name, source, target in step.copies:
                self._rooms.of(name, target, self._owner).copy_(self._rooms.of(name, source, self._owner))
            self._wait(step.unchanged_from, "unchanged")
            if step.owner is not None:
                self._hop, self._owner = self._hop + 1, self._table.rank(self._layout.rank, step.owner)
            if step.sends:
                # Buffers first: the launches that make them must not run beside the work.
                self._pending = number, list(self._ends(step)), None if step.late else self._moment()
                if not step.late and (step.owner is None or self._device.type != "cuda"):
                    self._start()
            if step.owner is not None:
                with self._range():
                    yield self._owner
                    self.arrive()  # where there was no work
        self._rooms.release(self._step.sums)
        self._group.finish_trip()

    def _range(self) -> contextlib.AbstractContextManager[Any]:
        """A profiler's range for this hop."""
        hop = f"infcl {self._phase} hop {self._hop} of {self._table.hops(self._phase)}"
        return profiler.record_function(hop) if profiler._is_profiler_enabled else contextlib.nullcontext()

    def __getitem__(self, name: str) -> Tensor:
        summed = self._table.role(name, self._phase) == "summed"
        return self._rooms.of(name, self._step.sums if summed else self._step.unchanged, self._owner)

    def carries(self, name: str) -> bool:
        """Whether the tensor has a role in this phase."""
        return self._table.role(name, self._phase) != "absent"

    def arrive(self) -> None:
        """Starts this step's messages, then waits for the sums that it adds to; further calls do nothing."""
        self._start()
        if self.adds:
            self._wait(self._step.sums_from, "summed")

    def home(self, name: str) -> Tensor:
        self._wait(self._step.sums_from, "summed")
        return self._rooms.home(name, self._step.sums)

    def others(self, name: str) -> Sequence[Tensor]:
        """Of a triangle the sums that other ranks have for this rank's rows, in the order in which to add them."""
        self._wait(self._step.sums_from, "summed")
        return self._rooms.others(name, self._step.sums)

    @property
    def share(self) -> Share:
        """The part of the pairs of this rank's queries and the visiting keys that it computes."""
        here, layout = self._layout.rank, self._layout
        return self._step.share(here, self._owner, layout.rows[here], layout.keys[self._owner])

    @property
    def adds(self) -> bool:
        """Whether this step's work adds to summed tensors."""
        return self._table.adds(self._step)

    @property
    def early(self) -> bool:
        """Whether this step begins work that a later one ends."""
        return self._step.early

    def _start(self) -> None:
        if self._pending is None:
            return
        (number, batches, moment), self._pending = self._pending, None
        if self._agree is not None:
            self._agree()
            self._agree = None
        hops = self._table.hops(self._phase)
        what = f"{self._phase} {self._table.transport}, hop {max(self._hop, 0)} of {hops}"
        if self._table.transport == "gather":  # in a ring's first batch every rank has messages
            Batch(self._group, what, *self._group.first_messages(self._device)).wait()
        with moment or self._moment():
            for roles, sends, receives in batches:
                batch = Batch(self._group, what, sends, receives)
                self._under_way |= {(number, role): batch for role in roles}

    def _moment(self) -> "Moment":
        return Moment(self._device, self._group.overlaps)

    def _ends(self, step: Step) -> Iterator[_Ends]:
        for batch in self._table.batches(self._phase, step, self._rooms.size):
            ends = [self._rooms.ends(sent) for sent in batch]
            sends, receives = ([message for message in some if message is not None] for some in zip(*ends, strict=True))
            yield {self._table.role(sent.name, self._phase) for sent in batch}, sends, receives

    def _wait(self, number: int, role: str) -> None:
        batch = self._under_way.pop((number, role), None)
        if batch is not None:
            batch.wait()


class _Rooms:
    """The buffers of a trip. Subclasses have:

    of       the tensor of the owner's keys in a place
    size     bytes of a transfer
    ends     the message that is sent, and the one received; None for nothing
    home     the finished sums of the own keys, from this place and what has stayed
    others   of a triangle the sums of other ranks for the own keys, from this place
    release  frees all but the finished sums in this place, and what has stayed: memory for the results
    """

    def __init__(self, table: Table, phase: str, layout: Layout, tensors: Tensors) -> None:
        self._table, self._phase, self._layout, self._tensors = table, phase, layout, tensors
        self._items = {item.name: item for item in table.travelling}
        self._tags = {name: tag for tag, name in enumerate(self._items)}

    def _new(self, name: str, keys: int, ranks: int | None = None, zero: bool = False) -> Tensor:
        item, like = self._items[name], next(iter(self._tensors.own.values()))
        each = (item.columns, keys) if item.across else (keys, item.columns)
        shape = each if ranks is None else (ranks, *each)
        return (like.new_zeros if zero else like.new_empty)(shape, dtype=self._dtype(name))

    def _count(self, name: str, owner: int) -> int:
        """Rows of the tensor of the owner's keys."""
        return 1 if self._items[name].once else self._layout.keys[owner]

    def _dtype(self, name: str) -> torch.dtype:
        dtype = self._items[name].dtype
        found: torch.dtype = self._tensors.dtypes.get(dtype) or getattr(torch, dtype)
        return found

    def _first(self, name: str, x: Tensor, keys: int) -> Tensor:
        return panel_columns(x, 0, keys) if self._items[name].across else panel(x, 0, keys)


class _Slots(_Rooms):
    """A ring's buffers for the largest shard, used by turns."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._largest = max(self._layout.keys)
        self._slots: dict[tuple[str, Place], Tensor] = {}

    def of(self, name: str, place: Place, owner: int) -> Tensor:
        return self._first(name, self._slot(name, place), self._count(name, owner))

    def size(self, name: str) -> int:
        return self._most(name) * self._items[name].columns * self._dtype(name).itemsize

    def ends(self, sent: Transfer) -> tuple[Message, Message]:
        here, tag = self._layout.rank, self._tags[sent.name]
        source, target = (self._slot(sent.name, place, whole=True) for place in (sent.source, sent.target))
        to, origin = self._table.rank(here, sent.to), self._table.rank(here, sent.to, back=True)
        return Message(source, to, tag), Message(target, origin, tag)

    def home(self, name: str, place: Place) -> Tensor:
        here = self._layout.rank
        arrived, stayed = self.of(name, place, here), self._slots.pop((name, STAYED), None)
        return arrived if stayed is None else arrived.add_(self._first(name, stayed, self._count(name, here)))

    def others(self, name: str, place: Place) -> list[Tensor]:
        return [self.home(name, place)]

    def release(self, place: Place) -> None:
        read = {item.name for item in self._table.named("unchanged", self._phase)}
        self._slots = {
            key: slot for key, slot in self._slots.items() if key[0] not in read and key[1] in (STAYED, place)
        }

    def _most(self, name: str) -> int:
        return 1 if self._items[name].once else self._largest

    def _slot(self, name: str, place: Place, whole: bool = False) -> Tensor:
        """`whole`: contiguous, to be sent."""
        slot = self._slots.get((name, place))
        if slot is None and place == OWN:
            slot = self._tensors.own[name]
        elif slot is None and place == KEPT:
            slot = self._tensors.kept.get(name)  # None where backward does not read it
        if slot is None:  # zeros where no work of this rank overwrites them, for want of queries
            slot = self._new(name, self._most(name), zero=not self._layout.rows[self._layout.rank])
        self._slots[name, place] = slot.contiguous() if whole else slot
        return self._slots[name, place]


class _Shards(_Rooms):
    """A gather's tensors of all ranks' keys.

    A message needs queries at one end and keys at the other. Sums of all keys go to every rank with queries or keys.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        rows, keys, here = self._layout.rows, self._layout.keys, self._layout.rank
        self._workers = [rank for rank, count in enumerate(rows) if count]
        sent_home = [sent for step in self._table.steps(self._phase) for sent in step.sends if sent.target == RECEIVED]
        self._hosts = {self._table.rank(here, sent.of) for sent in sent_home if sent.of}  # get sums for their keys
        origins = {self._table.rank(here, sent.to, back=True) for sent in sent_home}
        self._guests = [rank for rank in self._workers if keys[here] and rank in origins]  # send sums for the own keys
        # The sums that all ranks get, of all keys.
        self._shared = {sent.name for sent in sent_home if sent.of is None}
        self._read, self._sums = dict[str, Sequence[Tensor]](), dict[str, Sequence[Tensor]]()
        self._received: dict[str, Tensor] = {}

    def of(self, name: str, place: Place, owner: int) -> Tensor:
        if place == OWN:
            return self._tensors.own[name]
        role = self._table.role(name, self._phase)
        return (self._own_sums(name) if role == "summed" else self._all(name))[owner]

    def size(self, name: str) -> int:
        return 0  # no batch mixes sums and unchanged tensors

    def ends(self, sent: Transfer) -> tuple[Message | None, Message | None]:
        here, tag = self._layout.rank, self._tags[sent.name]
        to, origin = self._table.rank(here, sent.to), self._table.rank(here, sent.to, back=True)
        send = receive = None
        if self._is_sent(sent, here):
            send = Message(self._buffer(sent, here, receives=False), to, tag)
        if self._is_sent(sent, origin):
            receive = Message(self._buffer(sent, origin, receives=True), origin, tag)
        return send, receive

    def home(self, name: str, place: Place) -> Tensor:
        here, received = self._layout.rank, self._received.pop(name, None)
        if name in self._shared:
            keys, total = sum(self._layout.keys), self._tensors.kept.get(name)
            if total is None:  # the owners send it again for backward
                total = self._new(name, keys)
            if received is not None and self._is_concerned(here) and self._tensors.add_up is not None:
                self._tensors.add_up(received, self._first(name, total, keys))
            self._sums.pop(name, None)
            return self._split(name, total)[here]
        own = self._own_sums(name)[here]
        del self._sums[name]  # sums that were sent leave their memory to the results
        for part in () if received is None else received:
            own.add_(part)
        return own

    def others(self, name: str, place: Place) -> Sequence[Tensor]:
        self._sums.pop(name, None)
        received = self._received.pop(name, None)
        return () if received is None else received.unbind()

    def release(self, place: Place) -> None:
        self._read = {}

    def _is_concerned(self, rank: int) -> bool:
        return bool(self._layout.rows[rank] or self._layout.keys[rank])

    def _is_sent(self, sent: Transfer, sender: int) -> bool:
        rows, receiver = self._layout.rows, self._table.rank(sender, sent.to)
        if sent.of is None:
            return bool(rows[sender]) and self._is_concerned(receiver)
        worker, owner = sender if sent.target == RECEIVED else receiver, self._table.rank(sender, sent.of)
        return bool(rows[worker] and self._layout.keys[owner])

    def _buffer(self, sent: Transfer, sender: int, receives: bool) -> Tensor:
        """The buffer that a rank sends, or in which its message is received."""
        name, owner = sent.name, self._table.rank(sender, sent.of or HERE)
        if sent.target != RECEIVED:
            return self._all(name)[owner]
        if name not in self._shared and not receives:
            return self._own_sums(name)[owner]
        return self._parts(name)[(self._workers if name in self._shared else self._guests).index(sender)]

    def _all(self, name: str) -> Sequence[Tensor]:
        """The unchanged tensor of each owner's keys."""
        if name not in self._read:
            kept = self._tensors.kept.get(name)
            if kept is None:  # forward has not left it; what lies across is contiguous for each owner alone
                self._read[name] = [self._new(name, count) for count in self._layout.keys]
            else:
                self._read[name] = self._split(name, kept)
        return self._read[name]

    def _own_sums(self, name: str) -> Sequence[Tensor]:
        """This rank's sums for each owner's keys."""
        if name not in self._sums:
            layout, here = self._layout, self._layout.rank
            if name in self._shared:
                added = self._parts(name)[self._workers.index(here)] if layout.rows[here] else self._new(name, 0)
                self._sums[name] = self._split(name, added)
            else:  # the own sums are apart: they outlive those that are sent
                count = 0 if self._table.triangle else self._count(name, here)
                own = self._new(name, count, zero=not layout.rows[here])
                counts = [
                    self._count(name, rank) if layout.rows[here] and rank in self._hosts else 0
                    for rank in range(len(layout.keys))
                ]
                if self._items[name].across:
                    shards = tuple(self._new(name, count) for count in counts)
                else:
                    shards = self._new(name, sum(counts)).split(counts)
                self._sums[name] = (*shards[:here], own, *shards[here + 1 :])
        return self._sums[name]

    def _parts(self, name: str) -> Tensor:
        """Room for the sums of each contributing rank: of all keys if all ranks get them, else of the own keys."""
        if name not in self._received:
            keys, ranks = self._count(name, self._layout.rank), self._guests
            if name in self._shared:
                keys, ranks = sum(self._layout.keys), self._workers
            self._received[name] = self._new(name, keys, len(ranks))
        return self._received[name]

    def _split(self, name: str, x: Tensor) -> Sequence[Tensor]:
        """The part of each rank's keys, by one `split`: a single view takes up to 13 us of the host."""
        axis = 1 if self._items[name].across else 0
        keys = self._layout.keys if x.shape[axis] else [0] * len(self._layout.keys)
        shards: tuple[Tensor, ...] = x.split((*keys, x.shape[axis] - sum(keys)), axis)
        return shards


class Batch:
    """Messages that travel together, started here.

    Errors begin with `what` and name the peers; only the failing peer where the backend tells messages apart (gloo).
    """

    def __init__(self, group: Group, what: str, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._start = f"{what}: rank {group.rank} failed"
        self._ends = [f"sending to rank {message.peer}" for message in sends]
        self._ends += [f"receiving from rank {message.peer}" for message in receives]
        self._buffers = [message.buffer for message in (*sends, *receives)]  # kept alive until waited for
        self._works = self._named(lambda: group.post(sends, receives), self._ends) if self._ends else []

    def wait(self) -> None:
        """Waits for all messages: on CUDA the current stream waits, not the host."""
        works, self._works = self._works, []
        apart = len(works) == len(self._ends)
        for work, end in zip(works, self._ends, strict=False):
            self._named(work.wait, [end] if apart else self._ends)
        self._buffers = []

    def _named(self, step: Callable[[], T], ends: Sequence[str]) -> T:
        try:
            return step()
        except RuntimeError as error:
            raise RuntimeError(f"{self._start} {' or '.join(dict.fromkeys(ends))}: {error}") from error


def over_ranks(own: Tensor, group: Group, what: str) -> Tensor:
    """The sum of all ranks' tensors (contiguous, of one shape), which each rank adds up in a fixed order."""
    total, received = own.clone(), torch.empty_like(own)
    for distance in range(1, group.size):
        to, origin = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        Batch(group, what, [Message(own, to, _TAG)], [Message(received, origin, _TAG)]).wait()
        total += received
    return total


def of_ranks(own: Tensor, counts: Sequence[int], group: Group, what: str) -> Tensor:
    """The rows of all ranks' tensors in the order of ranks; `own` is contiguous, and `counts` are their rows."""
    found = own.new_empty((sum(counts), *own.shape[1:]))
    parts = found.split(list(counts))
    parts[group.rank].copy_(own)
    others = [rank for rank in range(group.size) if rank != group.rank]
    sends = [Message(own, peer, _TAG) for peer in others if len(own)]
    receives = [Message(parts[peer], peer, _TAG) for peer in others if counts[peer]]
    Batch(group, what, sends, receives).wait()
    return found


class Moment:
    """A context in which messages wait for the work launched before it was made; later work too unless `beside`."""

    def __init__(self, device: torch.device, beside: bool) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" and beside else None
        if self._stream is not None:
            self._event = self._stream.record_event()

    def __enter__(self) -> None:
        if self._stream is not None:
            index = self._stream.device.index
            stream = _streams.get(index) or _streams.setdefault(index, torch.cuda.Stream(index))
            stream.wait_event(self._event)
            torch.cuda.set_stream(stream)  # `torch.cuda.stream` takes 40 us more of the host

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
