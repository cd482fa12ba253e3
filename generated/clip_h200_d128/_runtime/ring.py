"""The group: who takes part, what every rank brings, and how keys travel.

Queries stay; keys go round. At each hop a rank works on the keys that visit it, while those of the next hop are already
on their way into a second buffer. What the work changes (statistics of the visiting keys, or their gradients) follows
after it. Forward is a round trip of W hops. Backward is the way back, from where the forward has left everything; the
own keys come last, and sums for their gradients come home beside the work on them. The package's route says who sends
to whom after which hop; of a flat ring:

    forward      hop 0        work on own keys       | keys -> p + 1, keys <- p - 1
                 hop 1        work on those of p - 1 | keys -> p + 1, keys <- p - 1, and the sums of hop 0
                 ...
                 hop W - 1    work on those of p + 1, which stay here          , and the sums of hop W - 2
                                                                                 the sums of hop W - 1: home
    backward     hop 0        work on those of p + 1 | keys -> p - 1, keys <- p + 1
                 hop 1        work on those of p + 2 | keys -> p - 1, keys <- p + 1, and the sums of hop 0
                 ...
                 hop W - 2    work on those of p - 1                           , and the sums of hop W - 3
                 hop W - 1    work on own keys                                 , and the sums of hop W - 2: home

All that is sent and received is in this file.
"""

from __future__ import annotations

import abc
import datetime
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .route import Route

T = TypeVar("T")
# Hears what the others say of their calls, and raises where ranks disagree: called before anything is sent. Hosts are
# up to 1 ms apart: work that needs no keys of others is launched before.
Agreeing = Callable[[], None]

ALONE = "<this device>"  # a group name: one device, also where torch.distributed is initialised
PROTOCOL = 7  # raise it with every change of what ranks send to each other

# What each rank tells all others before the first hop. Text travels as its first 14 characters, in ASCII. The protocol
# comes first and the length is fixed: gloo ends the process when a message is longer than its receiver expects.
_TEXT_BYTES, _HEADER_BYTES = 14, 256
_SHORTEST_WAIT_S = 0.1  # for others to take a header, where the timeout has passed
_CONTROL_TAG = 64  # parcels and accumulators count from 0
_HEADER: dict[str, type] = {
    "protocol": int,
    "accepted": bool,  # False: this rank's own arguments were wrong, and it raises
    "package digest": str,
    "torch version": str,
    "loss": str,
    "dtype": str,
    "embedding dimension": int,
    "phase": str,
    "trips finished": int,  # of this process in this group
    "call number": int,  # trips finished before the forward
    "ranks compared": bool,
    "labels given": bool,
    "gradients wanted": int,  # bits: q, k, scale, bias
    "differentiated": bool,  # whether any is
    "grad_sync": str,
    "reduction": str,
    "rows": int,
    "keys": int,
    "first label": int,  # smallest and largest label; (0, -1) where they were not looked at
    "last label": int,
}
_FORMAT = struct.Struct("<" + "".join(f"{_TEXT_BYTES}s" if kind is str else "q" for kind in _HEADER.values()))
_FINGERPRINT = ("protocol", "package digest", "torch version", "loss", "dtype", "embedding dimension")
_PACKAGE = ("package digest",)  # what ranks send to each other is the plan's
_ORDER = ("phase", "trips finished", "call number")
_DIFFERENTIATED = ("differentiated",)  # else backward would wait for ranks that never call it
_PER_CALL = ("ranks compared", "labels given", "gradients wanted", "grad_sync", "reduction")

# A batch of messages takes 0.1 ms of an H200's host and 0.08 ms to start, in which a link carries 60 MB. Sums do not
# wait for keys larger than this.
TOGETHER_BYTES = 64 << 20

_streams: dict[int, torch.cuda.Stream] = {}
# A group that is destroyed takes its ring, its threads and its sockets with it: nothing here holds on to it.
_rings: weakref.WeakKeyDictionary[dist.ProcessGroup, Ring] = weakref.WeakKeyDictionary()
# Of all packages of this process together. Gloo groups beside NCCL groups: a second one would meet the keys of another.
# Trips finished in each group: transfers that one package left behind would meet those of the next.
_control_groups: Any = vars(dist).setdefault("_infcl_control_groups", weakref.WeakKeyDictionary())
_trips: Any = vars(dist).setdefault("_infcl_trips", weakref.WeakKeyDictionary())


def find_ring(group_name: str) -> Ring | None:
    """The ring of a process group, given by name ("": the default group), or None for a group of one.

    Raises RuntimeError if there is no such group or this process is not in it.
    """
    if group_name == ALONE:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        if group_name:
            raise RuntimeError(
                f"process group {group_name!r} does not exist: torch.distributed is not initialised"
            )
        return None
    group = resolve(group_name)
    ring = _rings.get(group)
    if ring is None:
        if dist.get_rank(group) < 0:
            raise RuntimeError(f"this process is not a member of the process group {group_name!r}")
        if dist.get_world_size(group) == 1:
            return None
        ring = _rings[group] = Ring(group)
    return ring


def resolve(group_name: str) -> dist.ProcessGroup:
    """The group of that name ("": the default one). Operators carry names: a traced graph cannot carry a group."""
    by_name: Any = dist.distributed_c10d._resolve_process_group
    group = by_name(group_name) if group_name else dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


def group_size(group_name: str) -> int:
    """Number of ranks of a group that is given by name."""
    ring = find_ring(group_name)
    return 1 if ring is None else ring.size


class Ring:
    """The ranks of one process group, in group-rank order; this process is `rank` of `size` (at least 2)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.labels_checked: set[str] = set()
        self.layouts: dict[str, Any] = {}  # everybody's sizes in the last call, by package
        self._backends = _backends(group)
        self._coalesces: dict[str, bool] = {}  # by type of device: whether messages can be posted as one
        self._connected = False

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed while the loss was using it")
        return group

    def check_device(self, device: torch.device) -> None:
        """Raises ValueError if tensors on `device` cannot travel in this group."""
        backend = self._backends.get(device.type)
        if backend is None or (device.type == "cuda" and backend == "gloo"):
            need = "nccl" if device.type == "cuda" else "gloo"
            raise ValueError(
                f"the process group cannot carry {device.type} tensors (its backends: {self._backends}); "
                f"initialise it with the {need} backend"
            )

    @property
    def trips(self) -> int:
        """Trips that this process has finished in the group. Where it differs, ranks are not in the same call."""
        return int(_trips.get(self.group, 0))

    def finish_trip(self) -> None:
        _trips[self.group] = self.trips + 1

    def ask(
        self, header: Mapping[str, Any], phase: str = "forward", call: int | None = None
    ) -> Callable[[], list[dict[str, Any]]]:
        """Sends this rank's header to all others, without waiting; the result waits for theirs: in group-rank order.

        A small message between every two hosts; the device is not involved. To tell another takes 50 us of an H200's
        host; between two that begin together the answer is there 0.2 ms later. `phase` is that of the trip, `call` in
        backward the number of trips before its forward. Raises RuntimeError, then or at the waiting, if somebody's
        header does not come within the group's timeout, or is of another protocol; where somebody has died, once the
        others have this rank's header, or the timeout has passed.
        """
        trips = self.trips
        order = {"phase": phase, "trips finished": trips, "call number": trips if call is None else call}
        said = {**header, "protocol": PROTOCOL, **order}
        own = _encode(said)
        messages = [bytearray(own) for _ in range(self.size)]  # the others' are received into
        gathered = [torch.frombuffer(message, dtype=torch.uint8) for message in messages]
        peers = [(self.rank - distance) % self.size for distance in range(1, self.size)]
        receives: list[tuple[int, dist.Work]] = []
        sends: list[tuple[int, dist.Work]] = []
        failed: list[RuntimeError] = []

        def failure(step: str, error: RuntimeError) -> RuntimeError:
            named = RuntimeError(
                f"control exchange before {phase}: rank {self.rank} of {self.size} failed {step} "
                f"(it has died, hangs, or does not call the loss): {error}"
            )
            named.__cause__ = error
            return named

        def settle(step: str, work: dist.Work) -> None:
            try:
                if failed:  # within the timeout of the whole: a wait would begin it again
                    left_s = max(began + self._timeout.total_seconds() - time.monotonic(), _SHORTEST_WAIT_S)
                    work.wait(datetime.timedelta(seconds=left_s))
                else:
                    work.wait()
            except RuntimeError as error:
                failed.append(failure(step, error))

        try:  # directly, not by an all-gather: whoever is silent can be named
            control = self._control_group()
        except RuntimeError as error:
            raise failure("connecting", error) from error
        began = time.monotonic()
        for peer in peers:
            try:
                receives.append((peer, control.recv([gathered[peer]], peer, _CONTROL_TAG)))
                sends.append((peer, control.send([gathered[self.rank]], peer, _CONTROL_TAG)))
            except RuntimeError as error:
                failed.append(failure(f"addressing rank {peer}", error))

        def answers() -> list[dict[str, Any]]:
            for peer, work in receives:
                if not failed:
                    settle(f"waiting for rank {peer}", work)
            # Also after a failure: gloo drops a message that nobody waits for, and its receiver would blame this rank.
            for peer, work in sends:
                settle(f"telling rank {peer}", work)
            if failed:
                raise failed[0]
            received = [bytes(message) for message in messages]
            if received.count(own) == self.size:  # to decode one takes 20 us
                return [said] * self.size
            decoded = {message: _decode(message) for message in dict.fromkeys(received)}
            headers = [decoded[message] for message in received]  # ranks that say the same share one
            if any(header["protocol"] != PROTOCOL for header in decoded.values()):
                each = ", ".join(f"rank {rank}: {header['protocol']}" for rank, header in enumerate(headers))
                raise RuntimeError(f"ranks disagree: protocol differs ({each})")
            return headers

        return answers

    def exchange(self, header: Mapping[str, Any]) -> list[dict[str, Any]]:
        """`ask`, and the answers."""
        return self.ask(header)()

    def connect(self, device: torch.device) -> None:
        """Lets every rank take part in the group's first batch of messages on a GPU, which NCCL asks for: in a gather a
        rank with nothing to send would not."""
        if device.type != "cuda" or self._connected:
            return
        self._connected = True
        word = torch.zeros(2, device=device)
        sends = [Message(word[:1], (self.rank + 1) % self.size, 0)]
        receives = [Message(word[1:], (self.rank - 1) % self.size, 0)]
        Transfer(self, "connecting", sends, receives).wait()

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[dist.Work]:
        """Starts these messages together, at least one. All buffers are busy until waited for, once.

        As `batch_isend_irecv` does, which takes 0.05 to 0.1 ms more of the host to look at them.
        """
        group, device = self.group, (*sends, *receives)[0].buffer.device
        together = self._coalesces.get(device.type)
        if together is None:  # to look takes 13 us
            together = type(group) is dist.ProcessGroup and group._get_backend(device).supports_coalescing
            self._coalesces[device.type] = together
        if together:
            group._start_coalescing(device)
        works = [group.send([message.buffer], message.peer, message.tag) for message in sends]
        works += [group.recv([message.buffer], message.peer, message.tag) for message in receives]
        return [group._end_coalescing(device)] if together else works

    def _control_group(self) -> Any:
        """What carries host tensors between these ranks: the group itself if it can, else gloo beside it.

        Not `new_group`: all processes of the job would have to call it, or (with local synchronisation) all ranks would
        have to have made equally many groups before; otherwise it hangs.
        """
        if "cpu" in self._backends:
            return self.group
        control = _control_groups.get(self.group)
        if control is None:
            store = dist.PrefixStore(
                f"infcl/{self.group.group_name}", dist.distributed_c10d._get_default_store()
            )
            control = _control_groups[self.group] = dist.ProcessGroupGloo(
                store, self.rank, self.size, self._timeout
            )
        return control

    @property
    def _timeout(self) -> datetime.timedelta:
        """The group's own, which a group made beside it would not have."""
        backend = self.group._get_backend(torch.device(next(iter(self._backends))))
        options = getattr(backend, "options", None)  # some backends have none
        found: datetime.timedelta | None = getattr(options, "_timeout", None)
        return found or dist.distributed_c10d.default_pg_timeout


class Layout(NamedTuple):
    """Rows and keys of each rank. The batch is their concatenation in group-rank order."""

    rank: int
    rows: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def alone(cls, rows: int, keys: int) -> Layout:
        """That of a group of one."""
        return cls(0, (rows,), (keys,))

    def row_offset(self) -> int:
        return sum(self.rows[: self.rank])

    def key_offset(self, owner: int) -> int:
        return sum(self.keys[:owner])


class Message(NamedTuple):
    """One end of a message: a contiguous buffer, the rank at the other end, and what it is, as a number."""

    buffer: Tensor
    peer: int
    tag: int


class Transfer:
    """Messages that travel together, from now on. Errors, here and at `wait`, begin with `what` and name the peers: the
    very one where the backend tells messages apart (gloo)."""

    def __init__(self, ring: Ring, what: str, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._start = f"{what}: rank {ring.rank} failed"
        self._ends = [f"sending to rank {message.peer}" for message in sends]
        self._ends += [f"receiving from rank {message.peer}" for message in receives]
        self._works = self._named(lambda: ring.post(sends, receives), self._ends) if self._ends else []

    def wait(self) -> None:
        """Until all of them have arrived: on CUDA the current stream waits, and not the host."""
        works, self._works = self._works, []
        apart = len(works) == len(self._ends)
        for work, end in zip(works, self._ends, strict=False):
            self._named(work.wait, [end] if apart else self._ends)

    def _named(self, step: Callable[[], T], ends: Sequence[str]) -> T:
        try:
            return step()
        except RuntimeError as error:
            raise RuntimeError(f"{self._start} {' or '.join(dict.fromkeys(ends))}: {error}") from error


class Rotation(abc.ABC):
    """What both directions of a ring share.

    parcels      tensors that travel unchanged. Contiguous, of the same shape on every rank: the largest shard's.
    accumulator  a tensor that the work at each hop adds to, or None.
    agree        called before anything is sent.

    Iterating yields the owner of the visiting parcels, W times; the work goes into the loop's body and uses `.parcels`
    and, after `arrive()`, `.accumulator`: it leaves the previous rank when that has added to it, and travels beside
    this hop's work until then. Afterwards, and forward after a last `arrive()`, it is this rank's own, with the
    contributions of all. On CUDA no transfer is waited for on the host: they run on the backend's stream, ordered
    against the current one. Raises RuntimeError naming phase, hop and peers when a transfer fails.

    To send takes the host 0.1 ms, and to hear from the others as long: where the device would wait, it is given work
    before, for which what is sent does not wait. At the first hop of backward that is the whole hop's; forward, on
    CUDA, at every hop what is launched before `arrive`.
    """

    phase: str

    def __init__(
        self,
        ring: Ring,
        route: Route,
        parcels: Sequence[Tensor],
        accumulator: Tensor | None,
        agree: Agreeing | None,
    ) -> None:
        self.ring, self.route = ring, route
        self.parcels, self.accumulator = list(parcels), accumulator
        self._agree = agree
        self._spare_accumulator = None if accumulator is None else torch.empty_like(accumulator)
        self._accumulator_tag = len(self.parcels)
        self._together = sum(parcel.nbytes for parcel in parcels) <= TOGETHER_BYTES
        self._hop = 0
        self._pending: Moment | None = None  # before this hop's work, while its messages have not been sent
        self._keys: Transfer | None = None  # what the next hop's parcels wait for
        self._arriving: Transfer | None = None  # what the accumulator waits for

    @property
    def fresh(self) -> bool:
        """Whether nothing has been added to the accumulator yet: the work may replace what it holds."""
        return self._hop == 0

    def arrive(self) -> None:
        """Waits for the accumulator, once a hop; nothing may touch it before."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.wait()

    def _visits(self, owners: Iterator[int]) -> Iterator[int]:
        """The hops, one for each owner."""
        for hop, owner in enumerate(owners):
            if hop:
                if self._keys is not None:
                    self._keys.wait()
                self._hop = hop
                self._swap_accumulators()
                self._advance()
            yield owner
            self._send_pending()  # where no work has
            self.arrive()

    def _settle_call(self) -> None:
        """Before anything is sent, once."""
        agree, self._agree = self._agree, None
        if agree is not None:
            agree()

    def _swap_accumulators(self) -> None:
        """What the last hop has added to leaves; the accumulator is what comes for it."""
        self.accumulator, self._spare_accumulator = self._spare_accumulator, self.accumulator

    def _send_pending(self) -> None:
        """Sends this hop's messages if they have not been sent: behind `_pending`, and not behind the work since."""
        moment, self._pending = self._pending, None
        if moment is None:
            return
        self._settle_call()
        with moment:
            self._send_hop()

    @abc.abstractmethod
    def __iter__(self) -> Iterator[int]: ...

    @abc.abstractmethod
    def _advance(self) -> None:
        """The parcels that have come are in use. Sends this hop's messages, or leaves that to `_send_pending`."""

    @abc.abstractmethod
    def _send_hop(self) -> None:
        """Sends what leaves at this hop."""

    def _send(
        self,
        parcels: tuple[Sequence[Tensor], Sequence[Tensor]],
        parcels_ends: tuple[int, int],
        sums_ends: tuple[int, int] | None,
    ) -> None:
        """Parcels (those sent, and buffers for those received), and what was passed on, if `sums_ends` are given; ends
        are (to whom, from whom)."""
        ahead = [
            (Message(sent, parcels_ends[0], tag), Message(received, parcels_ends[1], tag))
            for tag, (sent, received) in enumerate(zip(*parcels, strict=True))
        ]
        if self.accumulator is None or self._spare_accumulator is None or sums_ends is None:
            self._keys = self._transfer(ahead)
            return
        tag = self._accumulator_tag
        behind = [
            (
                Message(self._spare_accumulator, sums_ends[0], tag),
                Message(self.accumulator, sums_ends[1], tag),
            )
        ]
        if self._together:
            self._arriving, self._keys = self._transfer(behind + ahead), None
        else:
            self._arriving = self._transfer(behind)
            self._keys = self._transfer(ahead)

    def _transfer(self, messages: Sequence[tuple[Message, Message]]) -> Transfer:
        size = self.ring.size
        what = f"{self.phase} ring, hop {min(self._hop, size - 1)} of {size}"
        return Transfer(self.ring, what, [sent for sent, _ in messages], [got for _, got in messages])


class ForwardRotation(Rotation):
    """The round trip.

    own          this rank's parcels, which are copied: the first of `rows` rows
    last         (rows, ...) each: will hold the parcels that visit last. None: they are not kept
    finished     of the accumulator's shape: gets what all have added to it, for the parcels that visit last. Or None
    """

    phase = "forward"

    def __init__(
        self,
        ring: Ring,
        route: Route,
        own: Sequence[Tensor],
        rows: int,
        last: Sequence[Tensor] | None = None,
        accumulator: Tensor | None = None,
        finished: Tensor | None = None,
        agree: Agreeing | None = None,
    ) -> None:
        def buffers() -> list[Tensor]:
            return [part.new_empty((rows, *part.shape[1:])) for part in own]

        first, second = buffers(), list(last) if last is not None else buffers()
        if ring.size % 2:  # used by turns: what is used first is used last
            first, second = second, first
        for buffer, part in zip(first, own, strict=True):
            buffer[: len(part)].copy_(part)
        super().__init__(ring, route, first, accumulator, agree)
        self._spares, self._finished = second, finished
        self._pending = Moment(first)  # here: the work on the own keys may begin before the first visit

    def __iter__(self) -> Iterator[int]:
        yield from self._visits(self._owners())
        if self._finished is not None and self.accumulator is not None:
            self._finished.copy_(self.accumulator)
        self.parcels, self._spares = [], []  # their memory is for the results
        self._hop = self.ring.size
        self._swap_accumulators()
        self._send_hop()
        self.ring.finish_trip()

    def _owners(self) -> Iterator[int]:
        owner = self.ring.rank
        for hop in range(self.ring.size):
            yield owner
            owner = self.route.receive_from(owner, hop)

    def arrive(self) -> None:
        """Sends this hop's messages, behind what has been launched of its work; then waits for the accumulator."""
        self._send_pending()
        super().arrive()

    def _advance(self) -> None:
        self.parcels, self._spares = self._spares, self.parcels
        self._pending = Moment(self.parcels)
        if not any(parcel.is_cuda for parcel in self.parcels):
            self._send_pending()  # what a CPU computes is over when it is launched: nothing would travel beside it

    def _send_hop(self) -> None:
        """The keys for the next hop, by this hop's move, and the sums of the last one, by its move."""
        hop = self._hop
        moving = (self.parcels, self._spares) if hop < self.ring.size - 1 else ((), ())
        self._send(moving, self._ends(hop), self._ends(hop - 1) if hop else None)

    def _ends(self, hop: int) -> tuple[int, int]:
        """To whom, and from whom, by the move after a hop."""
        return self.route.send_to(self.ring.rank, hop), self.route.receive_from(self.ring.rank, hop)


class BackwardRotation(Rotation):
    """The way back, by the moves of the forward from the last but one to the first.

    own          this rank's parcels, of any shape: they come last, and do not travel
    last         what the forward has kept, which is not written to: it comes first
    away         where nothing was kept: own parcels to send to where they come first. They are overwritten
    """

    phase = "backward"

    def __init__(
        self,
        ring: Ring,
        route: Route,
        own: Sequence[Tensor],
        last: Sequence[Tensor] | None,
        away: Sequence[Tensor] = (),
        accumulator: Tensor | None = None,
        agree: Agreeing | None = None,
    ) -> None:
        first = [torch.empty_like(parcel) for parcel in away] if last is None else last
        super().__init__(ring, route, first, accumulator, agree)
        self._own, self._away, self._kept = own, list(away), last is not None
        # Beside what is in use one is in flight; what was kept cannot be either.
        spares = range(min(2, ring.size - 2)) if self._kept else ()
        self._spares = [[torch.empty_like(parcel) for parcel in first] for _ in spares]
        self._coming: Sequence[Tensor] = ()

    def __iter__(self) -> Iterator[int]:
        if not self._kept:
            self._fetch()
        self._pending = Moment(self.parcels)
        yield from self._visits(self._owners())
        # Their memory is for the results.
        self.parcels, self._spares, self._own, self._spare_accumulator = [], [], (), None
        self.ring.finish_trip()

    def _fetch(self) -> None:
        self._settle_call()
        self._send((self._away, self.parcels), self._ends(self.ring.size - 1), None)
        assert self._keys is not None
        self._keys.wait()
        self._spares, self._away = [self._away], []

    def _owners(self) -> Iterator[int]:
        moves = range(self.ring.size - 1)
        owner = self.route.send_to(self.ring.rank, len(moves))  # whose keys go home from here
        yield owner
        for hop in reversed(moves):
            owner = self.route.send_to(owner, hop)
            yield owner

    def _advance(self) -> None:
        if self._hop > 1 or not self._kept:
            self._spares.append(self.parcels)
        self.parcels = list(self._coming if self._hop < self.ring.size - 1 else self._own)
        self._send_hop()

    def _send_hop(self) -> None:
        """The keys for the next hop, unless those are the own ones, and the sums of the last one."""
        before = self.ring.size - 2 - self._hop  # the hop of the forward before the one that this repeats
        self._coming = self._spares.pop() if before > 0 else ()
        moving = (self.parcels if before > 0 else (), self._coming)
        self._send(moving, self._ends(max(before, 0)), self._ends(before + 1) if self._hop else None)

    def _ends(self, hop: int) -> tuple[int, int]:
        """To whom, and from whom, against the move after a hop of the forward."""
        return self.route.receive_from(self.ring.rank, hop), self.route.send_to(self.ring.rank, hop)


class Moment:
    """A context in which transfers wait for what the device has been given up to now, and not for what comes later."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        device = next((x.device for x in tensors if x.is_cuda), None)
        self._stream: torch.cuda.Stream | None = None
        if device is not None:
            self._stream = torch.cuda.current_stream(device)
            self._event = self._stream.record_event()

    def __enter__(self) -> None:
        if self._stream is not None:
            device = self._stream.device
            if device.index not in _streams:
                _streams[device.index] = torch.cuda.Stream(device)
            stream = _streams[device.index]
            stream.wait_event(self._event)
            torch.cuda.set_stream(stream)  # torch.cuda.stream takes the host 40 us to look at devices first

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)


def difference(headers: Sequence[Mapping[str, Any]], only_order: bool = False) -> str | None:
    """What the ranks do not have in common, in words, or None: the first kind of difference, from which the others may
    follow. `only_order`: no more than that all are in the same call and send the same."""
    distinct = list({id(header): header for header in headers}.values())
    if len(distinct) == 1:  # ranks that say the same share one: to look at its fields takes 15 us
        return None
    for fields in (_PACKAGE, _ORDER, _DIFFERENTIATED) if only_order else (_FINGERPRINT, _ORDER, _PER_CALL):
        different = [field for field in fields if any(h[field] != headers[0][field] for h in distinct)]
        if different:
            return "; ".join(
                f"{field} differs (" + ", ".join(f"rank {r}: {h[field]}" for r, h in enumerate(headers)) + ")"
                for field in different
            )
    return None


def rejection(headers: Sequence[Mapping[str, Any]]) -> str | None:
    """Which ranks do not accept their own arguments, in words, or None."""
    rejecting = [rank for rank, header in enumerate(headers) if not header["accepted"]]
    if rejecting:
        return f"the arguments of rank {', '.join(map(str, rejecting))} are invalid (see the error there)"
    return None


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> backend, from torch's own description, such as "cpu:gloo,cuda:nccl"."""
    pairs = (item.split(":") for item in dist.get_backend_config(group).split(",") if ":" in item)
    return {device: backend for device, backend in pairs if backend and backend != "undefined"}


def _encode(header: Mapping[str, Any]) -> bytes:
    values = (header[field] for field in _HEADER)
    packed = _FORMAT.pack(*(x.encode("ascii", "replace") if isinstance(x, str) else x for x in values))
    return packed.ljust(_HEADER_BYTES, b"\0")


def _decode(message: bytes) -> dict[str, Any]:
    values = zip(_HEADER.items(), _FORMAT.unpack_from(message), strict=True)
    return {
        field: x.rstrip(b"\0").decode("ascii", "replace") if kind is str else kind(x)
        for (field, kind), x in values
    }
