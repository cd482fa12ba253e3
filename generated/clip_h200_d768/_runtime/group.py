"""The ranks of a process group: the exchange of headers before a trip, and the start of a batch of messages.

table.py says what travels when; transport.py executes it.
"""

from __future__ import annotations

import datetime
import struct
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .mailboxes import TEXT_BYTES, Mailboxes, Message, opened

ALONE = "<this device>"  # a group name: one device, also where torch.distributed is initialised
PROTOCOL = 18  # raise it with every change of what ranks send to each other

# The header that each rank sends to all others before a trip. Texts are cut to 14 ASCII characters. The protocol comes
# first and the length is fixed: gloo ends the process when a message is longer than its receiver expects.
_TEXT_BYTES, _HEADER_BYTES = 14, 256
_SHORTEST_WAIT_S = 0.1  # for peers to take a header after the timeout has passed
_CONTROL_TAG = 64  # the tags of travelling tensors count from 0
_TEXTS = (
    "package digest", "torch version", "loss", "dtype", "phase", "labels", "grad_sync", "reduction",
    "digest of prefixes",  # that calls add up a loss over
    "gradients wanted", "differentiated",  # inputs whose gradients are wanted; of these, those that decide what is sent
)  # fmt: skip
_NUMBERS = (
    "embedding dimension", "rows", "keys",
    "trips finished",  # of this process in this group
    "call number",  # trips finished before the forward
    "first label", "last label",  # smallest and largest; (0, -1) where labels were not read
    "device",  # index of the rank's GPU; -1 for a CPU
)  # fmt: skip
_ANSWERS = (
    "accepted",  # False: this rank rejects its own arguments
    "ranks compared",
)  # fmt: skip
_HEADER = {"protocol": int} | dict.fromkeys(_NUMBERS, int) | dict.fromkeys(_ANSWERS, bool) | dict.fromkeys(_TEXTS, str)
_FORMAT = struct.Struct("<" + "".join(f"{_TEXT_BYTES}s" if kind is str else "q" for kind in _HEADER.values()))

# Weak: a destroyed group takes its Group, its threads and its sockets with it.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()
# One gloo group beside an NCCL group, shared by all packages: a second would use the same store keys, and could receive
# the first one's messages.
_control_groups: Any = vars(dist).setdefault("_infcl_control_groups", weakref.WeakKeyDictionary())
_trips: Any = vars(dist).setdefault("_infcl_trips", weakref.WeakKeyDictionary())
_mailboxes: Any = vars(dist).setdefault(f"_infcl_mailboxes_{PROTOCOL}", weakref.WeakKeyDictionary())  # or why not


def find_group(group_name: str) -> Group | None:
    """The `Group` of a named process group ("": the default group), or None for a group of one.

    Raises RuntimeError if there is no such group or this process is not in it.
    """
    if group_name == ALONE:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        if group_name:
            raise RuntimeError(f"process group {group_name!r} does not exist: torch.distributed is not initialised")
        return None
    process_group = resolve(group_name)
    group = _groups.get(process_group)
    if group is None:
        if dist.get_rank(process_group) < 0:
            raise RuntimeError(f"this process is not a member of the process group {group_name!r}")
        if dist.get_world_size(process_group) == 1:
            return None
        group = _groups[process_group] = Group(process_group)
    return group


def use_group(group: Group) -> None:
    """Makes this object carry the messages of its process group, to measure them, say."""
    _groups[group.process_group] = group


def resolve(group_name: str) -> dist.ProcessGroup:
    """The named group ("": the default one). Operators carry names, since a traced graph cannot carry a group."""
    by_name: Any = dist.distributed_c10d._resolve_process_group
    group = by_name(group_name) if group_name else dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


class Group:
    """One process group of `size` ranks (at least 2), of which this process is `rank`."""

    overlaps = True  # whether a GPU carries messages on a stream of their own, beside its work

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._process_group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.labels_checked: set[str] = set()
        self._backends = _backends(group)
        self._coalesces: dict[str, bool] = {}  # device type -> whether messages can be posted as one batch
        self._connected = False
        self._mailboxes: Mailboxes | None = None
        self._may_connect = True

    @property
    def process_group(self) -> dist.ProcessGroup:
        group = self._process_group()
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
        """Trips that this process has finished in the group. Ranks with different counts are in different calls."""
        return int(_trips.get(self.process_group, 0))

    def finish_trip(self) -> None:
        _trips[self.process_group] = self.trips + 1

    def exchange(
        self, header: Mapping[str, Any], phase: str = "forward", call: int | None = None
    ) -> list[dict[str, Any]]:
        """The headers of all ranks, in group-rank order: one host message per pair of ranks, 0.2 ms if all are ready.

        `call`: in backward, the number of trips before its forward. Raises RuntimeError if a header does not arrive
        within the group's timeout, or has another protocol. If a rank has died, the error waits until the other ranks
        have this rank's header, or the timeout has passed.
        """
        trips = self.trips
        said = {**header, "protocol": PROTOCOL, "phase": phase, "trips finished": trips}
        said["call number"] = trips if call is None else call
        own, failed = _encode(said), list[tuple[str, RuntimeError]]()
        messages = [bytearray(own) for _ in range(self.size)]  # overwritten by the peers' headers
        gathered = [torch.frombuffer(message, dtype=torch.uint8) for message in messages]

        def attempt(step: str, work: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return work(*arguments)
            except RuntimeError as error:
                failed.append((step, error))

        control = attempt("connecting", self._control_group)
        began, works = time.monotonic(), []
        for distance in range(1, 1 if failed else self.size):
            peer = (self.rank - distance) % self.size  # no all-gather: a silent rank can be named
            step = f"addressing rank {peer}"
            receive = attempt(step, control.recv, [gathered[peer]], peer, _CONTROL_TAG)
            send = receive and attempt(step, control.send, [gathered[self.rank]], peer, _CONTROL_TAG)
            works.append((peer, receive, send))
        for peer, receive, _ in works:
            if receive and not failed:
                attempt(f"waiting for rank {peer}", receive.wait)
        # Also after a failure: gloo drops a message that nobody waits for; its receiver would blame this rank.
        for peer, _, send in works:
            limit = []
            if failed:  # what is left of the timeout: a plain wait would begin it again
                left_s = max(began + self._timeout.total_seconds() - time.monotonic(), _SHORTEST_WAIT_S)
                limit = [datetime.timedelta(seconds=left_s)]
            if send:
                attempt(f"telling rank {peer}", send.wait, *limit)
        if failed:
            step, error = failed[0]
            raise RuntimeError(
                f"control exchange before {phase}: rank {self.rank} of {self.size} failed {step} "
                f"(it has died, hangs, or does not call the loss): {error}"
            ) from error
        received = [bytes(message) for message in messages]
        if received.count(own) == self.size:
            return [said] * self.size
        decoded = {message: _decode(message) for message in dict.fromkeys(received)}  # decoding one takes 20 us
        headers = [decoded[message] for message in received]
        if any(header["protocol"] != PROTOCOL for header in decoded.values()):
            each = ", ".join(f"rank {rank}: {header['protocol']}" for rank, header in enumerate(headers))
            raise RuntimeError(f"ranks disagree: protocol differs ({each})")
        return headers

    def connect(self, devices: Sequence[int]) -> None:
        """Lets copy engines carry messages of these GPUs, one for each rank; else rank 0 warns why NCCL does.

        Called by all ranks, after an `exchange`; nothing is done while a graph is recorded. Raises RuntimeError, on
        every rank, where one has another GPU than before.
        """
        if self._mailboxes is not None and self._mailboxes.devices != list(devices):
            before = self._mailboxes.devices
            raise RuntimeError(
                f"the ranks have the GPUs {list(devices)}, and had {before}: copy engines carry messages between those "
                "that a process group begins with; make another group, or generate with --set copy_engines=off"
            )
        if not self._may_connect:
            return
        with torch.cuda.device(devices[self.rank]):
            if torch.cuda.is_current_stream_capturing():
                return
            self._may_connect, group = False, self.process_group
            if group not in _mailboxes:
                _mailboxes[group] = found = self._opened(torch.device("cuda", devices[self.rank]))
                if isinstance(found, str) and self.rank == 0:
                    warnings.warn(
                        f"NCCL carries messages, and not copy engines: {found}; packages that are generated with --set "
                        "copy_engines=off expect that",
                        stacklevel=2,
                    )
        self._mailboxes = None if isinstance(_mailboxes[group], str) else _mailboxes[group]

    def _opened(self, device: torch.device) -> Mailboxes | str:
        sends, receives = self.first_messages(device)
        for work in self._post(sends, receives) if sends else ():  # NCCL carries messages of graphs, and connects now
            work.wait()
        timeout_s = self._timeout.total_seconds()
        return opened(self._texts_of_all, self.process_group, self.rank, device, timeout_s)

    def _texts_of_all(self, text: str) -> list[str]:
        """Every rank's text of at most TEXT_BYTES ASCII characters, in rank order."""
        own = torch.frombuffer(bytearray(text.encode().ljust(TEXT_BYTES)), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._control_group().allgather([found], [own]).wait()
        return [bytes(each.tolist()).decode().rstrip() for each in found]

    def told_by_first(self, text: str) -> str:
        """Rank 0's text, on every rank: called by all of them after an `exchange`. Raises RuntimeError."""
        control, size = self._control_group(), torch.tensor([len(text.encode())], device="cpu")
        control.broadcast(size, 0).wait()
        words = torch.frombuffer(bytearray(text.encode()).ljust(int(size)), dtype=torch.uint8)[: int(size)]
        control.broadcast(words, 0).wait()
        return bytes(words.tolist()).decode()

    def first_messages(self, device: torch.device) -> tuple[list[Message], list[Message]]:
        """What each rank sends and receives, once, before a gather and before mailboxes are opened: NCCL needs every
        rank in a group's first batch, and a rank without keys has nothing to send."""
        if device.type != "cuda" or self._connected:
            return [], []
        self._connected = True
        word = torch.zeros(2, device=device)
        ends = (word[:1], (self.rank + 1) % self.size), (word[1:], (self.rank - 1) % self.size)
        send, receive = (Message(*end, 0) for end in ends)
        return [send], [receive]

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
        """Starts at least one message as one batch. The buffers are busy until the works are waited for, once."""
        on_gpu = (*sends, *receives)[0].buffer.device.type == "cuda"
        if on_gpu and self._mailboxes is not None and not torch.cuda.is_current_stream_capturing():
            return [self._mailboxes.post(sends, receives)]
        return self._post(sends, receives)

    def _post(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[dist.Work]:
        """`post` by the group's backend.

        `batch_isend_irecv` does the same, with 0.05 to 0.1 ms more of host time for its checks.
        """
        group, device = self.process_group, (*sends, *receives)[0].buffer.device
        if device.type not in self._coalesces:  # asking takes 13 us
            able = type(group) is dist.ProcessGroup and group._get_backend(device).supports_coalescing
            self._coalesces[device.type] = able
        together = self._coalesces[device.type]
        if together:
            group._start_coalescing(device)
        works = [group.send([message.buffer], message.peer, message.tag) for message in sends]
        works += [group.recv([message.buffer], message.peer, message.tag) for message in receives]
        return [group._end_coalescing(device)] if together else works

    def _control_group(self) -> Any:
        """The group that carries host tensors: the process group itself if it can, else a gloo group beside it.

        `new_group` could hang: it needs a call by every process of the job or, with local synchronisation, ranks that
        have made equally many groups before.
        """
        group = self.process_group
        if "cpu" in self._backends:
            return group
        if group not in _control_groups:
            store = dist.PrefixStore(f"infcl/{group.group_name}", dist.distributed_c10d._get_default_store())
            _control_groups[group] = dist.ProcessGroupGloo(store, self.rank, self.size, self._timeout)
        return _control_groups[group]

    @property
    def _timeout(self) -> datetime.timedelta:
        """The group's own timeout, which a gloo group beside it must be given."""
        backend = self.process_group._get_backend(torch.device(next(iter(self._backends))))
        options = getattr(backend, "options", None)  # some backends have none
        return getattr(options, "_timeout", None) or dist.distributed_c10d.default_pg_timeout


class Layout(NamedTuple):
    """Queries and keys of each rank. The batch is their concatenation in group-rank order."""

    rank: int
    rows: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def alone(cls, q: Tensor, k: Tensor) -> Layout:
        return cls(0, (q.shape[0],), (k.shape[0],))

    def key_offset(self, owner: int) -> int:
        return sum(self.keys[:owner])


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> backend, from torch's description, such as "cpu:gloo,cuda:nccl"."""
    pairs = (item.split(":") for item in dist.get_backend_config(group).split(",") if ":" in item)
    return {device: backend for device, backend in pairs if backend and backend != "undefined"}


def _encode(header: Mapping[str, Any]) -> bytes:
    values = (header[field] for field in _HEADER)
    packed = _FORMAT.pack(*(x.encode("ascii", "replace") if isinstance(x, str) else x for x in values))
    return packed.ljust(_HEADER_BYTES, b"\0")


def _decode(message: bytes) -> dict[str, Any]:
    values = zip(_HEADER.items(), _FORMAT.unpack_from(message), strict=True)
    return {
        field: x.rstrip(b"\0").decode("ascii", "replace") if kind is str else kind(x) for (field, kind), x in values
    }
