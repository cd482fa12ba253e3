"""Messages between the GPUs of one host by their copy engines, which leave the multiprocessors to the work beside them.

Each rank has a mailbox for every other rank: two places in symmetric memory. A message travels in pieces:

    sender      waits for a free place, copies a piece there, and counts it as sent
    receiver    waits for the count, copies the piece out, and counts it as taken, which frees its place

Counts are words in symmetric memory, which the driver writes and waits for in the order of a stream: the host waits for
nothing. Streams may share a hardware queue, in which a wait holds up all that comes later. Pieces are enqueued by
distance of the ranks, sent and taken in turns: none waits for one that comes later on another rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import itertools
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .table import MAILBOX_PLACES, piece_bytes

TEXT_BYTES = 256  # of what ranks tell each other before mailboxes are opened
_WHY_LENGTH = 160
_WORD_BYTES = 4
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, which compares modulo 2^32
_FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH: what another device wrote before the count is then seen
_WORD_MASK = (1 << 32) - 1
_WATCH_S = 1.0
_YES = ("1", "true", "t", "yes", "y")  # as torch reads switches of the environment
_SOCKET_PATH_BYTES = 107  # that the kernel takes; torch passes handles of symmetric memory through a socket

Tell = Callable[[str], list[str]]  # every rank's text, in rank order


class Message(NamedTuple):
    """One end of a message: a contiguous buffer, the rank at the other end, and the tag of the tensor."""

    buffer: Tensor
    peer: int
    tag: int


class Endpoint(NamedTuple):
    """What a rank says of itself before mailboxes are opened. `why`: what it lacks, as a clause; "" for nothing."""

    why: str
    host: int
    device: int

    @classmethod
    def of(cls, device: torch.device) -> Endpoint:
        words = [socket.gethostname(), _socket_folder()]
        with contextlib.suppress(OSError):
            words.append(Path("/proc/sys/kernel/random/boot_id").read_text())
            words += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "net", "pid")]
        host = int.from_bytes(hashlib.sha256("\n".join(words).encode()).digest()[:7], "little")
        return cls(_lacking(device), host, device.index)


def refusal(ranks: Sequence[Endpoint]) -> str:
    """Why these ranks cannot have mailboxes, as a clause; "" if they can."""
    for rank, endpoint in enumerate(ranks):
        if endpoint.why:
            return f"rank {rank} {endpoint.why}"
        for other in range(rank):
            if endpoint.host != ranks[other].host:
                return f"ranks {other} and {rank} have different hosts, containers or temporary folders"
            if endpoint.device == ranks[other].device:
                return f"ranks {other} and {rank} both see their GPU as cuda:{endpoint.device}"
    return ""


def opened(
    tell: Tell, group: torch.distributed.ProcessGroup, rank: int, device: torch.device, timeout_s: float
) -> Mailboxes | str:
    """This rank's mailboxes; or why the ranks have none, a clause that is the same on all. All call this together."""
    ranks = [Endpoint(*json.loads(text)) for text in tell(json.dumps(Endpoint.of(device)))]
    why, made, devices = refusal(ranks), list[Mailboxes](), [endpoint.device for endpoint in ranks]
    steps = (lambda: made.append(Mailboxes(rank, devices, timeout_s)), lambda: made[0].meet(group.group_name))
    for step in steps if not why else ():
        own = ""
        try:
            step()
        except Exception as error:  # told to all ranks
            own = f"met {type(error).__name__}: {error}"
        why = why or next((f"rank {each} {text}" for each, text in enumerate(tell(_short(own))) if text), "")
        if why:
            break
    if why:
        return why
    # It holds the mailboxes: freeing them waits for the device, whose streams may wait for a rank that is gone.
    watching = made[0], weakref.ref(group)
    threading.Thread(target=_watch, args=watching, name="infcl mailboxes", daemon=True).start()
    return made[0]


def _short(text: str) -> str:
    """Few characters, of which JSON escapes none."""
    plain = text.encode("ascii", "replace")[:_WHY_LENGTH].decode()
    return "".join(each if each.isprintable() and each not in '"\\' else " " for each in plain)


def _socket_folder() -> str:
    """Where torch makes the socket."""
    return next((found for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if (found := os.environ.get(name))), "/tmp")


def _lacking(device: torch.device) -> str:
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if os.environ.get(name, "").lower() in _YES:
            return f"has {name} set, which NCCL alone heeds"
    if len(os.fsencode(f"{_socket_folder()}/symm_mem-{os.getpid()}")) > _SOCKET_PATH_BYTES:
        return "has a temporary folder whose path is too long for a socket"
    try:
        importlib.import_module("cuda.bindings.driver")
        backend = _symmetric().get_backend(device)
    except ImportError as error:
        return _short(f"cannot import {error.name or error}")
    except Exception as error:  # of torch versions whose symmetric memory differs
        return _short(f"has no symmetric memory in torch {torch.__version__}: {error}")
    return "" if backend == "CUDA" else f"has symmetric memory of the backend {backend}, not CUDA"


class Mailboxes:
    """Those of this rank in a process group; `devices`: the GPU of each rank, all of one host."""

    def __init__(self, rank: int, devices: Sequence[int], timeout_s: float) -> None:
        size, device = len(devices), torch.device("cuda", devices[rank])
        self.devices, self._rank, self._size, self._device = list(devices), rank, size, device
        self._timeout_s = timeout_s
        for other in devices:
            if other != device.index and not torch.cuda.can_device_access_peer(device, other):
                raise RuntimeError(f"cuda:{device.index} cannot reach the memory of cuda:{other}")
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        flushes = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
        can_flush = self._call("cuDeviceGetAttribute", flushes, device.index)[0]
        self._wait_flags = _AT_LEAST | _FLUSH * bool(can_flush)
        self._piece_bytes = piece_bytes(size)
        self._pieces_bytes = self._piece_bytes * MAILBOX_PLACES * (size - 1)
        self._own = self._allocated(self._pieces_bytes + 2 * size * _WORD_BYTES)
        self._own.zero_()
        torch.cuda.synchronize(device)
        self._sent, self._taken = [0] * size, [0] * size  # pieces to, and from, each rank
        self._outgoing, self._incoming = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # Batches; those that each stream has done, which the watching thread reads without a call to CUDA: while a user
        # records a graph some are forbidden.
        self._posted, self._done = 0, torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=True)
        self._pending: deque[_Pending] = deque()

    def _allocated(self, size: int) -> Tensor:
        empty, how = _symmetric().empty, {"dtype": torch.uint8, "device": self._device}
        try:
            found: Tensor = empty(size, **how)
        except RuntimeError:  # what torch's allocator keeps is not free for symmetric memory
            torch.cuda.empty_cache()
            found = empty(size, **how)
        return found

    def meet(self, group_name: str) -> None:
        """Finds the memory of the other ranks; no rank returns before all have come."""
        handle = _symmetric().rendezvous(self._own, group_name)
        self._memory = [handle.get_buffer(peer, self._own.shape, torch.uint8) for peer in range(self._size)]
        self._start: list[int] = [memory.data_ptr() for memory in self._memory]

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Delivery:
        """Starts messages, behind the current stream's work so far. Ranks post the batches of a pair in one order."""
        streams, self._posted = (self._outgoing, self._incoming), self._posted + 1
        delivery = Delivery(self._device, (*sends, *receives))
        self._pending.append(_Pending(self._posted, time.monotonic() + self._timeout_s, delivery))
        begun = torch.cuda.current_stream(self._device).record_event()
        for stream in streams:
            stream.wait_event(begun)
        for distance in range(1, self._size):
            to, origin = (self._rank + distance) % self._size, (self._rank - distance) % self._size
            for sent, taken in itertools.zip_longest(self._pieces(sends, to), self._pieces(receives, origin)):
                if sent is not None:
                    self._send(to, *sent)
                if taken is not None:
                    self._take(origin, *taken)
        for word, stream in enumerate(streams):
            self._write(stream, self._done.data_ptr() + word * _WORD_BYTES, self._posted)
        delivery.done = [stream.record_event() for stream in streams]
        return delivery

    def check(self) -> bool:
        """Whether batches are under way. Ends the process where one is overdue, as torch's watchdog does for NCCL."""
        done = self._done.tolist()
        while self._pending and all(_difference(word, self._pending[0].number) >= 0 for word in done):
            self._pending.popleft()
        if self._pending and time.monotonic() > self._pending[0].deadline_s:
            print(
                f"infcl: messages of rank {self._rank} of {self._size} have not arrived within {self._timeout_s:g} s "
                "(a rank has died, hangs, does not call the loss, or has that much work before it); this process ends",
                file=sys.stderr,
                flush=True,
            )
            os.abort()
        return bool(self._pending)

    def _pieces(self, messages: Sequence[Message], peer: int) -> Iterator[tuple[int, int]]:
        """Address and bytes of each piece of the messages at whose other end `peer` is."""
        for message in messages:
            if message.peer == peer:
                buffer = message.buffer
                address, size = buffer.data_ptr(), buffer.numel() * buffer.element_size()
                for start in range(0, size, self._piece_bytes):
                    yield address + start, min(self._piece_bytes, size - start)

    def _send(self, to: int, address: int, size: int) -> None:
        number = self._sent[to]
        if number >= MAILBOX_PLACES:
            self._wait(self._outgoing, self._count(self._rank, to, taken=True), number - MAILBOX_PLACES + 1)
        self._copy(self._outgoing, self._place(to, self._rank, number), address, size)
        self._write(self._outgoing, self._count(to, self._rank), number + 1)
        self._sent[to] = number + 1

    def _take(self, origin: int, address: int, size: int) -> None:
        number = self._taken[origin]
        self._wait(self._incoming, self._count(self._rank, origin), number + 1)
        self._copy(self._incoming, address, self._place(self._rank, origin, number), size)
        self._write(self._incoming, self._count(origin, self._rank, taken=True), number + 1)
        self._taken[origin] = number + 1

    def _place(self, rank: int, sender: int, number: int) -> int:
        """The address of a piece in the mailbox that `rank` has for `sender`."""
        mailbox = (rank - sender) % self._size - 1
        return self._start[rank] + (mailbox * MAILBOX_PLACES + number % MAILBOX_PLACES) * self._piece_bytes

    def _count(self, rank: int, peer: int, taken: bool = False) -> int:
        """The address, in the memory of `rank`, of the number of pieces that `peer` has sent to it, or taken."""
        return self._start[rank] + self._pieces_bytes + (taken * self._size + peer) * _WORD_BYTES

    def _copy(self, stream: torch.cuda.Stream, target: int, source: int, size: int) -> None:
        self._call("cuMemcpyDtoDAsync", target, source, size, stream.cuda_stream)

    def _write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        self._call("cuStreamWriteValue32", stream.cuda_stream, address, value & _WORD_MASK, 0)

    def _wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        self._call("cuStreamWaitValue32", stream.cuda_stream, address, value & _WORD_MASK, self._wait_flags)

    def _call(self, function: str, *arguments: int) -> list[Any]:
        status, *found = getattr(self._driver, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} failed: {status.name}")
        return list(found)


class Delivery:
    """A batch under way, as torch's `Work`: its buffers are busy until it was waited for."""

    def __init__(self, device: torch.device, messages: Sequence[Message]) -> None:
        self._device, self._messages = device, messages
        self.done: Sequence[torch.cuda.Event] = ()

    def wait(self) -> None:
        """The current stream waits, not the host."""
        stream = torch.cuda.current_stream(self._device)
        for event in self.done:
            stream.wait_event(event)
        self._messages = ()  # whose memory torch reuses behind this stream's work


class _Pending(NamedTuple):
    number: int
    deadline_s: float  # of time.monotonic()
    delivery: Delivery  # kept alive, with buffers that nobody has waited for


def _difference(word: int, number: int) -> int:
    return ctypes.c_int32(word - number).value


def _watch(mailboxes: Mailboxes, group: weakref.ref[torch.distributed.ProcessGroup]) -> None:
    while mailboxes.check() or group() is not None:
        time.sleep(_WATCH_S)


def _symmetric() -> Any:
    return importlib.import_module("torch.distributed._symmetric_memory")
