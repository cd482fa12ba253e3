"""Messages between the GPUs of one host by their copy engines, which leave the multiprocessors to the work beside them.

Each rank has a mailbox for every other rank: two places in symmetric memory. A message travels in pieces:

    sender      waits for a free place, copies a piece there, and counts it as sent
    receiver    waits for the count, copies the piece out, and counts it as taken, which frees its place

Counts are words in symmetric memory, which the driver writes and waits for in the order of a stream: the host waits for
nothing. Streams may share a hardware queue, in which a wait holds up all that comes later. So pieces are enqueued in an
order in which none waits for one that comes later on another rank: by distance of the ranks, sent and taken in turns.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .table import MAILBOX_BYTES

_PLACES = 2  # of a mailbox: one is filled while the other is emptied
_ALIGNED_BYTES = 512
_WORD_BYTES = 4
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, which compares modulo 2^32
_WORD_MASK = (1 << 32) - 1
_WATCH_S = 1.0


class Message(NamedTuple):
    """One end of a message: a contiguous buffer, the rank at the other end, and the tag of the tensor."""

    buffer: Tensor
    peer: int
    tag: int


class Seat(NamedTuple):
    """What a rank says of itself before mailboxes are opened. `why`: what it lacks, as a clause; "" for nothing."""

    why: str
    host: int
    device: int

    @classmethod
    def of(cls, device: torch.device) -> Seat:
        boot = Path("/proc/sys/kernel/random/boot_id")
        name = socket.gethostname() + (boot.read_text() if boot.exists() else "")
        host = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        return cls(_lacking(device), host, device.index)


def refusal(seats: Sequence[Seat]) -> str:
    """Why ranks with these seats cannot have mailboxes, as a clause that all of them agree on; "" if they can."""
    for rank, seat in enumerate(seats):
        if seat.why:
            return f"rank {rank} {seat.why}"
        for other in range(rank):
            if seat.host != seats[other].host:
                return f"ranks {other} and {rank} are on different hosts"
            if seat.device == seats[other].device:
                return f"ranks {other} and {rank} are both on the device cuda:{seat.device} that they see"
    return ""


def _lacking(device: torch.device) -> str:
    if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() in ("1", "true"):
        return "has TORCH_NCCL_BLOCKING_WAIT set, which NCCL alone heeds"
    try:
        importlib.import_module("cuda.bindings.driver")
        backend = _symmetric().get_backend(device)
    except ImportError as error:
        return f"cannot import {error.name}"
    except AttributeError:
        return f"has torch {torch.__version__}, without symmetric memory"
    if backend != "CUDA":
        return f"has symmetric memory of the backend {backend}, not CUDA"
    others = (other for other in range(torch.cuda.device_count()) if other != device.index)
    hidden = [other for other in others if not torch.cuda.can_device_access_peer(device, other)]
    return f"cannot reach the memory of cuda:{hidden[0]}" if hidden else ""


class Mailboxes:
    """Those of this rank in a process group of `size` ranks; opened by all ranks together."""

    def __init__(self, group_name: str, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self._rank, self._size, self._device, self._timeout_s = rank, size, device, timeout_s
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        self._piece_bytes = MAILBOX_BYTES // (_PLACES * (size - 1)) // _ALIGNED_BYTES * _ALIGNED_BYTES
        symmetric, words = _symmetric(), 2 * size * _WORD_BYTES
        self._own: Tensor = symmetric.empty(MAILBOX_BYTES + words, dtype=torch.uint8, device=device)
        self._own.zero_()
        torch.cuda.synchronize(device)  # rendezvous waits for all ranks, so that none counts before
        handle = symmetric.rendezvous(self._own, group_name)
        self._memory = [handle.get_buffer(peer, self._own.shape, torch.uint8) for peer in range(size)]  # of all ranks
        self._start: list[int] = [memory.data_ptr() for memory in self._memory]
        self._counts = [start + MAILBOX_BYTES for start in self._start]
        self._sent, self._taken = [0] * size, [0] * size  # pieces to, and from, each rank
        self._outgoing, self._incoming = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # Batches; those that each stream has done, which the watching thread reads without a call to CUDA: a user who
        # captures a graph forbids some.
        self._posted, self._done = 0, torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._pending: deque[_Pending] = deque()
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="infcl mailboxes", daemon=True).start()

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Delivery:
        """Starts messages, behind the current stream's work so far. Ranks post the batches of a pair in one order."""
        begun = torch.cuda.current_stream(self._device).record_event()
        streams = self._outgoing, self._incoming
        for stream in streams:
            stream.wait_event(begun)
        for distance in range(1, self._size):
            to, origin = (self._rank + distance) % self._size, (self._rank - distance) % self._size
            for sent, taken in itertools.zip_longest(self._pieces(sends, to), self._pieces(receives, origin)):
                if sent is not None:
                    self._send(to, *sent)
                if taken is not None:
                    self._take(origin, *taken)
        delivery = Delivery(self._device, [stream.record_event() for stream in streams], (*sends, *receives))
        self._posted += 1
        for word, stream in enumerate(streams):
            self._write(stream, self._done.data_ptr() + word * _WORD_BYTES, self._posted)
        self._pending.append(_Pending(self._posted, time.monotonic() + self._timeout_s, delivery))
        return delivery

    def check(self) -> None:
        """Forgets what has arrived. Ends the process where a batch is overdue, as torch's watchdog does for NCCL."""
        done = min(self._done.tolist())
        while self._pending and self._pending[0].number - done <= 0:
            self._pending.popleft()
        if self._pending and time.monotonic() > self._pending[0].deadline_s:
            print(
                f"infcl: messages of rank {self._rank} of {self._size} have not arrived within {self._timeout_s:g} s "
                "(a rank has died, hangs, or does not call the loss); this process ends",
                file=sys.stderr,
                flush=True,
            )
            os.abort()

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
        if number >= _PLACES:
            self._wait(self._outgoing, self._count(self._rank, to, taken=True), number - _PLACES + 1)
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
        return self._start[rank] + (mailbox * _PLACES + number % _PLACES) * self._piece_bytes

    def _count(self, rank: int, peer: int, taken: bool = False) -> int:
        """The address, in the memory of `rank`, of the number of pieces that `peer` has sent to it, or taken."""
        return self._counts[rank] + (taken * self._size + peer) * _WORD_BYTES

    def _copy(self, stream: torch.cuda.Stream, target: int, source: int, size: int) -> None:
        self._call("cuMemcpyDtoDAsync", target, source, size, stream.cuda_stream)

    def _write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        self._call("cuStreamWriteValue32", stream.cuda_stream, address, value & _WORD_MASK, 0)

    def _wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        self._call("cuStreamWaitValue32", stream.cuda_stream, address, value & _WORD_MASK, _AT_LEAST)

    def _call(self, function: str, *arguments: int) -> None:
        (status,) = getattr(self._driver, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} failed: {status.name}")


class Delivery:
    """A batch under way, as torch's `Work`: its buffers are busy until it was waited for."""

    def __init__(self, device: torch.device, done: Sequence[torch.cuda.Event], messages: Sequence[Message]) -> None:
        self._device, self._done, self._messages = device, done, messages

    def wait(self) -> None:
        """The current stream waits, not the host."""
        stream = torch.cuda.current_stream(self._device)
        for event in self._done:
            stream.wait_event(event)
        self._messages = ()  # whose memory torch reuses behind this stream's work


class _Pending(NamedTuple):
    number: int
    deadline_s: float  # of time.monotonic()
    delivery: Delivery  # kept alive, with buffers that nobody has waited for


def _watch(reference: weakref.ref[Mailboxes]) -> None:
    while (mailboxes := reference()) is not None:
        mailboxes.check()
        del mailboxes
        time.sleep(_WATCH_S)


def _symmetric() -> Any:
    return importlib.import_module("torch.distributed._symmetric_memory")
