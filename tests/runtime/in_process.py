"""Ranks as threads of one process: the shipped runtime on real tensors, over a transport that forgives nothing.

The threads take turns. One runs until it has to wait; which of those that can go on is next, a generator with the
given seed decides. So a run is a function of its seed, different seeds show different orders of events, and a deadlock
is noticed when nobody can go on, not after a timeout. A message costs 20 us, which leaves room for thousands of rings.

A transport may do anything to a buffer between `post` and `wait`, and this one does the worst that is allowed:

    receive    NaN from the post on; the message arrives at the wait, if nobody has written to the buffer meanwhile
    send       must hold at the wait what it held at the post
    matching   the n-th send along an edge meets the n-th receive there, as with NCCL: same tag, same size, or it fails
    waiting    both ends wait until the other end has posted: nothing is buffered
    the first  messages of a group need every rank, as with NCCL: a gather's have others before them
    the end    a message that nobody takes, or that nobody waits for, is an error
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import random
import threading
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from infcl_gen.runtime.group import ALONE
from infcl_gen.runtime.ops import _named
from infcl_gen.runtime.package import Options
from infcl_gen.runtime.table import Table

TIMEOUT_S = 120.0  # of a run; 64 ranks need 1.5 s. Deadlocks are noticed at once: this is for a computation that hangs
YIELD_AT_POST = 0.25  # how often a rank gives way after a post: some messages are early, some late
USUAL = _named(Options())  # what an operator is given of a call without options
POISON = b"\xff"  # NaN in every floating-point dtype, -1 in every integer one

Result = TypeVar("Result")


def table_of(package: ModuleType, transport: str, ranks: int, keeps: bool = False) -> Table:
    """The table of a package as if it had been planned for so many devices of one node."""
    of_one: Table = package.ContrastiveLoss._package.table
    return dataclasses.replace(of_one, transport=transport, devices_per_node=ranks, keeps=keeps and transport == "ring")


class TransportError(RuntimeError):
    """The runtime has misused the transport, or waits for what never comes."""


class Stopped(RuntimeError):
    """Another rank has failed; this one ends."""


class World:
    """`size` ranks, and the process groups that some of them form.

    groups: name -> members, in group-rank order; "" is the group of all. `seed` decides who runs when. `tables`:
    what groups of these sizes do, as if the package had been planned for them; others as it was planned.
    """

    def __init__(
        self,
        package: ModuleType,
        size: int,
        groups: Mapping[str, Sequence[int]] | None = None,
        seed: int = 0,
        tables: Mapping[int, Table] | None = None,
    ) -> None:
        self.size, self.package, self.tables = size, package, tables or {}
        self.failure: BaseException | None = None
        self._rings: dict[tuple[str, int], Ring] = {}
        self.groups = [Group(self, name, m) for name, m in {"": range(size), **(groups or {})}.items()]
        for group in self.groups:
            for rank, member in enumerate(group.members):
                self._rings[group.name, member] = Ring(group, rank)
        self._chance = random.Random(seed)
        self._ready = list(range(size))
        self._waiting: dict[int, str] = {}  # rank -> for what
        self._turns = [threading.Lock() for _ in range(size + 1)]  # the last one: everybody has ended
        for turn in self._turns:
            turn.acquire()

    def run(self, job: Callable[[int], Result]) -> list[Result]:
        """`job(rank)` on every rank, with the package's runtime on this transport; results by rank.

        Raises what the first rank that failed has raised, after all ranks have ended; TransportError for misuse.
        """
        results: dict[int, Result] = {}
        threads = [
            threading.Thread(target=self._live, args=(rank, job, results), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        with _attached(self.package, self.tables), uninitialised_memory_is_nan():
            for thread in threads:
                thread.start()
            self._next()
            self._take_turn(self.size)
            for thread in threads:
                thread.join(TIMEOUT_S)
        if self.failure is None:
            for group in self.groups:
                group.check_end()
        if self.failure is not None:
            raise self.failure
        return [results[rank] for rank in range(self.size)]

    def ring(self, rank: int, group_name: str) -> Ring | None:
        """What `find_group` answers on this rank."""
        ring = self._rings.get((group_name, rank))
        if ring is None:
            raise RuntimeError(f"rank {rank} is not a member of the process group {group_name!r}")
        return None if ring.size == 1 else ring

    # Below: called by the thread whose turn it is, so nothing here needs a lock.

    def fail(self, error: BaseException) -> BaseException:
        """Ends all ranks with `error`, unless they are ending already; returns it."""
        if self.failure is None:
            self.failure = error
            self._ready += self._waiting
            self._waiting.clear()
        return error

    def wait_for(self, rank: int, what: str) -> None:
        """Until somebody resumes this rank."""
        self._go_on()
        self._waiting[rank] = what
        self._next()
        self._take_turn(rank)
        self._go_on()

    def resume(self, rank: int) -> None:
        if self._waiting.pop(rank, None) is not None:
            self._ready.append(rank)

    def maybe_yield(self, rank: int) -> None:
        self._go_on()
        if self._chance.random() < YIELD_AT_POST:
            self._ready.append(rank)
            self._next()
            self._take_turn(rank)
            self._go_on()

    def _go_on(self) -> None:
        if self.failure is not None:
            raise Stopped(f"another rank has failed: {self.failure}")

    def _next(self) -> None:
        """Gives the turn to a rank that can go on."""
        if not self._ready and self._waiting:
            waits = [f"rank {rank} waits for {what}" for rank, what in sorted(self._waiting.items())]
            self.fail(TransportError("nobody can go on: " + "; ".join(waits)))
        if not self._ready:
            self._turns[self.size].release()
            return
        chosen = self._chance.randrange(len(self._ready))
        self._ready[chosen], self._ready[-1] = self._ready[-1], self._ready[chosen]
        self._turns[self._ready.pop()].release()

    def _take_turn(self, rank: int) -> None:
        if not self._turns[rank].acquire(timeout=TIMEOUT_S):
            raise TimeoutError(f"no end after {TIMEOUT_S} s: some rank hangs in a computation")

    def _live(self, rank: int, job: Callable[[int], Result], results: dict[int, Result]) -> None:
        self._take_turn(rank)
        _place.world, _place.rank = self, rank
        try:
            torch.set_num_threads(1)  # OpenMP's setting is one of each thread
            self._go_on()
            results[rank] = job(rank)
        except BaseException as error:  # the main thread raises it
            self.fail(error)
        self._next()


class Group:
    """What the ranks of one process group share."""

    def __init__(self, world: World, name: str, members: Sequence[int]) -> None:
        self.world, self.name, self.members = world, name, tuple(members)
        self.edges: defaultdict[tuple[int, int], Edge] = defaultdict(Edge)  # from rank to rank
        self.headers: dict[int, dict[str, Any]] = {}  # of the exchange in progress
        # (to whom, tag, bytes) of what each rank has sent
        self.posted: list[Counter[tuple[int, int, int]]] = [Counter() for _ in members]
        self.met: set[int] = set()  # who has taken part in the first batch, or in the messages before it
        module = importlib.import_module(f"{world.package.__name__}._runtime.group")
        self.trips: Counter[int] = Counter()
        self.as_received = lambda header: module._decode(module._encode(header))

    def check_end(self) -> None:
        """Fails the world if a message has not been taken or not been waited for, or a rank was not there at first."""
        left = [half for edge in self.edges.values() for half in edge.busy]
        if left:
            reasons = ("nobody has waited for it" if half.other else "it has no other end" for half in left)
            texts = (f"{half.text}: {why}" for half, why in zip(left, reasons, strict=True))
            self.world.fail(TransportError("left at the end: " + "; ".join(texts)))
        if self.met and len(self.met) < len(self.members):
            missing = sorted(set(range(len(self.members))) - self.met)
            self.world.fail(TransportError(f"ranks {missing} took no part in the first batch of messages"))


class Edge:
    """Messages from one rank to another. `unmatched` holds ends of one kind only, in the order of their posts."""

    def __init__(self) -> None:
        self.unmatched: deque[Half] = deque()
        self.busy: set[Half] = set()  # posted, and not waited for


class Half:
    """One end of a message, which keeps its buffer busy until it is waited for: what the runtime knows as a Work."""

    def __init__(self, ring: Ring, edge: Edge, sends: bool, buffer: Tensor, tag: int) -> None:
        assert buffer.is_contiguous()
        self.world, self.rank, self.edge = ring.group.world, ring.group.members[ring.rank], edge
        self.sends, self.buffer, self.tag = sends, buffer, tag
        self.kind = (str(buffer.dtype).removeprefix("torch."), buffer.numel())
        verb = "sending" if sends else "receiving"
        self.text = f"rank {self.rank} {verb} {self.kind[1]} x {self.kind[0]} with tag {tag}"
        self.other: Half | None = None
        if not sends:
            ctypes.memmove(buffer.data_ptr(), POISON * buffer.nbytes, buffer.nbytes)
        self.content = _content(buffer)  # what the buffer must hold at the wait
        edge.busy.add(self)
        if edge.unmatched and edge.unmatched[0].sends != sends:
            self._match(edge.unmatched.popleft())
        else:
            edge.unmatched.append(self)

    def _match(self, other: Half) -> None:
        if (self.tag, self.kind) != (other.tag, other.kind):
            raise self.world.fail(TransportError(f"{self.text} meets {other.text}"))
        self.other, other.other = other, self
        self.world.resume(other.rank)  # it may wait for another message: then it goes on waiting

    def wait(self) -> bool:
        if self not in self.edge.busy:
            return True
        while self.other is None:
            self.world.wait_for(self.rank, f"the other end of: {self.text}")
        if _content(self.buffer) != self.content:
            raise self.world.fail(TransportError(f"{self.text}: the buffer was written to before the wait"))
        if not self.sends:
            ctypes.memmove(self.buffer.data_ptr(), self.other.content, self.buffer.nbytes)
        self.edge.busy.remove(self)
        return True


class Ring:
    """Stands in for `infcl_gen.runtime.group.Group`."""

    overlaps = True

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, len(group.members)
        self.labels_checked: set[str] = set()
        self.layouts: dict[Any, Any] = {}

    def check_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"the in-process transport cannot carry {device.type} tensors")

    def first_messages(self, device: torch.device) -> tuple[list[Any], list[Any]]:
        self.group.met.add(self.rank)
        return [], []

    @property
    def trips(self) -> int:
        return self.group.trips[self.rank]

    def finish_trip(self) -> None:
        self.group.trips[self.rank] += 1

    def exchange(
        self, header: Mapping[str, Any], phase: str = "forward", call: int | None = None
    ) -> list[dict[str, Any]]:
        group, world = self.group, self.group.world
        headers, trips = group.headers, self.trips
        order = {"phase": phase, "trips finished": trips, "call number": trips if call is None else call}
        headers[self.rank] = group.as_received({**header, "protocol": 0, **order})
        if len(headers) == self.size:
            group.headers = {}  # the next exchange may begin before all have left this one
            for member in group.members:
                world.resume(member)

        while len(headers) < self.size:
            world.wait_for(group.members[self.rank], f"the headers of all ranks of group {group.name!r}")
        return [headers[rank] for rank in range(self.size)]

    def post(self, sends: Sequence[Any], receives: Sequence[Any]) -> list[Half]:
        edges = self.group.edges
        self.group.met.add(self.rank)
        works = []
        for sent in sends:
            self.group.posted[self.rank][sent.peer, sent.tag, sent.buffer.nbytes] += 1
            works.append(Half(self, edges[self.rank, sent.peer], True, sent.buffer, sent.tag))
        for got in receives:
            works.append(Half(self, edges[got.peer, self.rank], False, got.buffer, got.tag))
        self.group.world.maybe_yield(self.group.members[self.rank])
        return works


class Echo(Ring):
    """Rank 0 of a ring of any size, alone: what it sends is what it receives. For what does not depend on the values.

    shards: how many queries each rank holds, and as many keys unless `keys` says how many; the rank itself holds
    `shards[0]`.
    """

    def __init__(self, shards: Sequence[int], table: Table | None = None, keys: Sequence[int] | None = None) -> None:
        self.rank, self.size, self.shards, self.keys = 0, len(shards), shards, keys or shards
        self.tables = {} if table is None else {self.size: table}
        self.labels_checked = set()
        self.layouts = {}

    trips = 0

    def first_messages(self, device: torch.device) -> tuple[list[Any], list[Any]]:
        return [], []

    def finish_trip(self) -> None:
        pass

    def exchange(
        self, header: Mapping[str, Any], phase: str = "forward", call: int | None = None
    ) -> list[dict[str, Any]]:
        order = {"protocol": 0, "phase": phase, "trips finished": 0, "call number": 0}
        counts = zip(self.shards, self.keys, strict=True)
        return [{**header, **order, "rows": rows, "keys": keys} for rows, keys in counts]

    def post(self, sends: Sequence[Any], receives: Sequence[Any]) -> list[Half]:
        for sent, got in zip(sends, receives, strict=True):
            assert sent.buffer.nbytes == got.buffer.nbytes
            ctypes.memmove(got.buffer.data_ptr(), sent.buffer.data_ptr(), sent.buffer.nbytes)
        return []

    @contextlib.contextmanager
    def attached(self, package: ModuleType) -> Iterator[None]:
        """The package's runtime finds this ring, in the calling thread."""
        with _attached(package, self.tables):
            _place.world, _place.rank = self, 0
            try:
                yield
            finally:
                del _place.world, _place.rank

    def ring(self, rank: int, group_name: str) -> Ring:
        return self


def current_rank() -> int:
    """The world rank of the calling thread."""
    rank: int = _place.rank
    return rank


_place = threading.local()


def _content(buffer: Tensor) -> bytes:
    return ctypes.string_at(buffer.data_ptr(), buffer.nbytes)


@contextlib.contextmanager
def _attached(package: ModuleType, tables: Mapping[int, Table]) -> Iterator[None]:
    """The package's `find_group` answers threads of a World with their world's rings, and all others as ever; groups of
    the sizes in `tables` follow these."""
    module = importlib.import_module(f"{package.__name__}._runtime.table")
    planned = {size: module.planned_table(dataclasses.asdict(found)) for size, found in tables.items()}
    over = module.Table.over
    with contextlib.ExitStack() as patches:
        answer = mock.patch.object(
            module.Table, "over", lambda self, size: planned[size] if size in planned else over(self, size)
        )
        patches.enter_context(answer)
        for name in ("group", "agreement", "engine", "ops", "replay"):  # all but the first have imported it by name
            module = importlib.import_module(f"{package.__name__}._runtime.{name}")
            patches.enter_context(mock.patch.object(module, "find_group", _found_by_thread(module.find_group)))
        yield


def _found_by_thread(find_group: Callable[[str], Any]) -> Callable[[str], Any]:
    def find(group_name: str) -> Any:
        world: World | Echo | None = getattr(_place, "world", None)
        if world is None or group_name == ALONE:
            return find_group(group_name)
        return world.ring(_place.rank, group_name)

    return find


@contextlib.contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """torch fills it in deterministic mode: reading past the valid rows of a buffer then shows in the result.

    The mode is set as torch.use_deterministic_algorithms does, which imports Inductor first (2 s of CPU time).
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        with warnings.catch_warnings():
            # Said once per package, by the first example whose ring is larger than planned.
            warnings.filterwarnings("ignore", message=".*was planned for")
            yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=False)
