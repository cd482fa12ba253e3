"""Mailboxes: messages that copy engines carry, here by a driver that executes what is enqueued in any allowed order."""

from __future__ import annotations

import ctypes
import datetime
import importlib
import inspect
import random
import signal
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import infcl_gen
from infcl_gen.inputs.problem import make_problem
from infcl_gen.runtime import group as groups
from infcl_gen.runtime import mailboxes
from infcl_gen.runtime.group import Group
from infcl_gen.runtime.mailboxes import Endpoint, Message, refusal
from infcl_gen.verification.properties import Case

from .pool import Pool, need, results

Operation = Callable[[], bool]  # whether it was done; a wait may have to be tried again
Turn = list[list[list[int]]]  # of one batch, by sender and receiver: the bytes of each message
SIZES = st.lists(st.sampled_from([0, 1, 511, 512, 513, 2000, 3584]), max_size=2)


class Host:
    """Ranks of one host. Each has `queues` hardware queues: one holds all of a rank's operations in a single order."""

    def __init__(self, ranks: int, queues: int, module: ModuleType = mailboxes) -> None:
        self.queues: list[list[deque[Operation]]] = [[deque() for _ in range(queues)] for _ in range(ranks)]
        pieces = 512 * 2 * (ranks - 1)
        self._memory = [torch.full((pieces + 8 * ranks,), 7, dtype=torch.uint8) for _ in range(ranks)]
        self.ranks = []
        for rank in range(ranks):
            with mock.patch.multiple(module, **self._replaced(rank), piece_bytes=lambda _: 512):
                made = module.Mailboxes(rank, range(ranks), 60.0)
                made.meet("group")
                self.ranks.append(made)

    def _replaced(self, rank: int) -> dict[str, Any]:
        """For the module's names, what stands for CUDA on a rank."""
        made = iter(range(2))
        handle = SimpleNamespace(get_buffer=lambda peer, *_: self._memory[peer])
        cuda = SimpleNamespace(
            Stream=lambda _: Stream(next(made) % len(self.queues[rank])),
            synchronize=lambda _: None,
            can_device_access_peer=lambda *_: True,
            current_stream=lambda _: Stream(0),
        )
        zeros = lambda *size, dtype, device, pin_memory: torch.zeros(*size, dtype=dtype)  # noqa: E731
        return {
            "torch": SimpleNamespace(cuda=cuda, zeros=zeros, uint8=torch.uint8, int32=torch.int32, device=torch.device),
            "_symmetric": lambda: SimpleNamespace(
                empty=lambda *_, **__: self._memory[rank], rendezvous=lambda *_: handle
            ),
            "importlib": SimpleNamespace(import_module=lambda _: self._driver(rank)),
        }

    def _driver(self, rank: int) -> Any:
        word = lambda address: ctypes.c_uint32.from_address(address)  # noqa: E731

        def enqueue(queue: int, operation: Operation) -> tuple[int]:
            self.queues[rank][queue].append(operation)
            return (0,)

        def copied(target: int, source: int, size: int) -> bool:
            ctypes.memmove(target, source, size)
            return True

        def written(address: int, value: int) -> bool:
            word(address).value = value
            return True

        def reached(address: int, value: int) -> bool:
            return ctypes.c_int32(word(address).value - value).value >= 0

        return SimpleNamespace(
            CUdevice_attribute=mock.MagicMock(),
            cuDeviceGetAttribute=lambda *_: (0, 1),
            cuMemcpyDtoDAsync=lambda target, source, size, queue: enqueue(queue, lambda: copied(target, source, size)),
            cuStreamWriteValue32=lambda queue, address, value, _: enqueue(queue, lambda: written(address, value)),
            cuStreamWaitValue32=lambda queue, address, value, _: enqueue(queue, lambda: reached(address, value)),
        )

    def post(self, turn: Turn) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every rank's messages of a batch; what is sent, and where it arrives."""
        ends = []
        for rank, each in enumerate(self.ranks):
            out = [(to, sizes) for to, sizes in enumerate(turn[rank]) if to != rank]
            into = [(origin, turn[origin][rank]) for origin in range(len(self.ranks)) if origin != rank]
            sends = [Message(torch.randint(255, (n,), dtype=torch.uint8), to, 0) for to, sizes in out for n in sizes]
            receives = [
                Message(torch.full((n,), 9, dtype=torch.uint8), origin, 0) for origin, sizes in into for n in sizes
            ]
            ends.append((sends, receives))
            cuda = SimpleNamespace(current_stream=lambda _: Stream(0))
            if not (sends or receives):
                continue
            with mock.patch.object(inspect.getmodule(type(each)) or mailboxes, "torch", SimpleNamespace(cuda=cuda)):
                each.post(sends, receives)
        return [
            (sent.buffer, arrived.buffer)
            for rank, (sends, _) in enumerate(ends)
            for peer, (_, receives) in enumerate(ends)
            for sent, arrived in zip(
                [m for m in sends if m.peer == peer], [m for m in receives if m.peer == rank], strict=True
            )
        ]

    def run(self, seed: int) -> bool:
        """Executes what is enqueued, in a random order of the queues; False where all that is left waits for ever."""
        draws, waiting = random.Random(seed), [queue for queues in self.queues for queue in queues]
        while waiting := [queue for queue in waiting if queue]:
            draws.shuffle(waiting)
            ready = next((queue for queue in waiting if queue[0]()), None)
            if ready is None:
                return False
            ready.popleft()
            for _ in range(draws.choice([0, 30])):  # a queue may run far ahead of others
                if not ready or not ready[0]():
                    break
                ready.popleft()
        return True


class Stream:
    """Stands for a CUDA stream, which is a hardware queue here. Work before a batch is not part of these tests."""

    def __init__(self, queue: int) -> None:
        self.cuda_stream = queue

    def record_event(self) -> None:
        pass

    def wait_event(self, event: None) -> None:
        pass


@st.composite
def turns(draw: st.DrawFn) -> list[Turn]:
    ranks, batches = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    return [[[draw(SIZES) for _ in range(ranks)] for _ in range(ranks)] for _ in range(batches)]


def arrives(found: list[Turn], queues: int, seed: int, module: ModuleType = mailboxes) -> bool:
    """Whether all messages of these batches arrive as they were sent."""
    host = Host(len(found[0]), queues, module)
    ends = [end for turn in found for end in host.post(turn)]
    done = host.run(seed)
    return done and all(torch.equal(sent, arrived) for sent, arrived in ends)


@given(found=turns(), queues=st.integers(1, 2), seed=st.integers(0, 99))
def test_messages_arrive(found: list[Turn], queues: int, seed: int) -> None:
    """Also where all of a rank's streams share one hardware queue, in which a wait holds up all that comes later."""
    assert arrives(found, queues, seed)


def test_counts_wrap() -> None:
    found = [[[[], [3584]], [[2000], []]]] * 3
    host = Host(2, 2)
    for each in host.ranks:
        each._sent, each._taken = [2**32 - 5] * 2, [2**32 - 5] * 2
        for rank in range(2):
            for taken in (False, True):
                ctypes.c_uint32.from_address(each._count(rank, 1 - rank, taken)).value = 2**32 - 5
    ends = [end for turn in found for end in host.post(turn)]
    assert host.run(0)
    assert all(torch.equal(sent, arrived) for sent, arrived in ends)


def test_a_batch_is_forgotten_once_both_streams_are_done() -> None:
    for posted in (0, 2**31 - 1, 2**32 - 1):
        host = Host(2, 2)
        for each in host.ranks:
            each._posted = posted
            each._done.fill_(ctypes.c_int32(posted).value)
        host.post([[[], [600]], [[], []]])
        assert all(each.check() for each in host.ranks)
        assert host.run(0)
        assert not any(each.check() for each in host.ranks)


def test_only_messages_of_their_gpu_go_by_mailboxes() -> None:
    """Those of a CPU go by the group's backend, whose host waits for them; ranks that change GPUs are refused."""
    host, message = Host(2, 1), Message(torch.zeros(3), 1, 0)
    group = Group.__new__(Group)
    group._mailboxes = host.ranks[0]
    with mock.patch.object(Group, "_post", return_value=["posted"]) as post:
        assert group.post([message], []) == ["posted"]
    post.assert_called_once_with([message], [])
    with pytest.raises(RuntimeError, match=r"the ranks have the GPUs \[0, 2\], and had \[0, 1\]"):
        group.connect([0, 2])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_refusal_is_a_warning_on_one_rank_once(rank: int) -> None:
    """NCCL connects in time for graphs that are recorded later."""
    process_group, warned = dist.ProcessGroup(rank, 2), "NCCL carries messages, and not copy engines: rank 1 is far;"
    with (
        mock.patch.object(groups, "_mailboxes", weakref.WeakKeyDictionary()),
        mock.patch.object(groups, "opened", return_value="rank 1 is far") as opened,
        mock.patch.object(Group, "process_group", process_group),
        mock.patch.object(Group, "_timeout", datetime.timedelta(seconds=9)),
        mock.patch.object(Group, "first_messages", return_value=(["word"], ["other"])),
        mock.patch.object(Group, "_post", return_value=[mock.Mock()]) as post,
        mock.patch.multiple(torch.cuda, device=mock.MagicMock(), is_current_stream_capturing=lambda: False),
        warnings.catch_warnings(record=True) as found,
    ):
        for _ in range(2):  # the groups of two packages
            group = Group.__new__(Group)
            group.rank, group._mailboxes, group._may_connect = rank, None, True
            for _ in range(2):
                group.connect([0, 1])
            assert group._mailboxes is None
    opened.assert_called_once_with(mock.ANY, process_group, rank, torch.device("cuda", rank), 9.0)
    post.assert_called_once_with(["word"], ["other"])
    assert [str(each.message).startswith(warned) for each in found] == [True] * (rank == 0)


def test_mailboxes_are_watched_while_their_group_lives() -> None:
    """And while batches are under way."""
    under_way = iter([True, False, True, False, False])
    alive = iter(["group", "group", None])
    watched = SimpleNamespace(check=lambda: next(under_way))
    with mock.patch.object(mailboxes.time, "sleep") as sleep:
        mailboxes._watch(watched, lambda: next(alive))  # type: ignore[arg-type]
    assert sleep.call_count == 4 and next(alive, None) is None


def test_an_overdue_batch_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    host = Host(2, 2)
    host.post([[[], [600]], [[], []]])
    clock = SimpleNamespace(monotonic=lambda: float("inf"))
    with mock.patch.object(mailboxes, "time", clock), mock.patch.object(mailboxes.os, "abort") as abort:
        host.ranks[1].check()
    abort.assert_called_once()
    assert "messages of rank 1 of 2 have not arrived within 60 s" in capsys.readouterr().err


PLANTED = {
    "sends before receives": (
        "for sent, taken in itertools.zip_longest(self._pieces(sends, to), self._pieces(receives, origin)):",
        "for sent, taken in [*((s, None) for s in self._pieces(sends, to)),"
        " *((None, t) for t in self._pieces(receives, origin))]:",
    ),
    "a full place is filled": ("if number >= MAILBOX_PLACES:", "if number < 0:"),
    "a place is emptied before it is full": (
        "self._wait(self._incoming, self._count(self._rank, origin), number + 1)",
        "pass",
    ),
    "one mailbox for all senders": ("mailbox = (rank - sender) % self._size - 1", "mailbox = 0"),
    "a sender's own count": (
        "self._count(origin, self._rank, taken=True)",
        "self._count(self._rank, self._rank, taken=True)",
    ),
    "an older count": ("self._count(self._rank, origin), number + 1)", "self._count(self._rank, origin), number)"),
}


def planted() -> Iterator[tuple[str, ModuleType]]:
    source = inspect.getsource(mailboxes)
    for name, (right, wrong) in PLANTED.items():
        assert source.count(right) == 1, name
        module = types.ModuleType(f"infcl_gen.runtime.mailboxes_{len(name)}")
        module.__package__ = "infcl_gen.runtime"
        with mock.patch.dict("sys.modules", {module.__name__: module}):
            exec(compile(source.replace(right, wrong), module.__name__, "exec"), vars(module))
            yield name, module


def test_planted_bugs_are_seen() -> None:
    every = [[[[2000, 513] if a != b else [] for a in range(3)] for b in range(3)]] * 3
    for name, module in planted():
        assert not all(arrives(every, queues, seed, module) for queues in (1, 2) for seed in range(8)), name


def test_refusal() -> None:
    ranks = [Endpoint("", 1, 0), Endpoint("", 1, 1)]
    assert refusal(ranks) == ""
    assert (
        refusal([*ranks, Endpoint("", 2, 2)]) == "ranks 0 and 2 have different hosts, containers or temporary folders"
    )
    assert refusal([*ranks, Endpoint("", 1, 1)]) == "ranks 1 and 2 both see their GPU as cuda:1"
    assert refusal([*ranks, Endpoint("cannot import cuda", 1, 2)]) == "rank 2 cannot import cuda"


TROUBLE: dict[str, tuple[str, list[Any], str]] = {  # where, what happens to either rank, and what both then say
    "nothing": ("", [], ""),
    "a rank lacks something": ("endpoint", ["", "cannot import cuda"], "rank 1 cannot import cuda"),
    "no memory": ("__init__", [None, RuntimeError("out of\nmemory")], "rank 1 met RuntimeError: out of memory"),
    "no handle": ("meet", [OSError("no socket " + 300 * "x"), None], "rank 0 met OSError: no socket x"),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_ranks_have_mailboxes_together_or_not_at_all(name: str) -> None:
    """One rank's trouble is told to all, in as many exchanges."""
    where, draws, message = TROUBLE[name]
    here, barrier = threading.local(), threading.Barrier(2, timeout=10)
    told: list[list[str]] = [["", ""] for _ in range(4)]  # by exchange and rank

    def step(place: str) -> Any:
        result = draws[here.rank] if place == where else None
        if isinstance(result, Exception):
            raise result
        return result

    def run(rank: int) -> Any:
        here.rank, exchanges = rank, iter(told)

        def tell(text: str) -> list[str]:
            assert len(text) <= 256
            texts = next(exchanges)
            texts[rank] = text
            barrier.wait()
            return list(texts)

        group: Any = mock.Mock(group_name="group")
        return mailboxes.opened(tell, group, rank, torch.device("cuda", rank), 60.0)

    with (
        mock.patch.object(mailboxes.Endpoint, "of", lambda device: Endpoint(step("endpoint") or "", 1, device.index)),
        mock.patch.object(mailboxes.Mailboxes, "__init__", lambda *_: step("__init__")),
        mock.patch.object(mailboxes.Mailboxes, "meet", lambda *_: step("meet")),
        mock.patch.object(mailboxes, "_watch") as watch,
        ThreadPoolExecutor(2) as threads,
    ):
        found = list(threads.map(run, range(2)))
    if message:
        assert all(str(each).startswith(message) for each in found) and found[0] == found[1]
    else:
        assert all(isinstance(each, mailboxes.Mailboxes) for each in found)
    assert watch.call_count == (0 if message else 2)


def test_a_rank_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    with mock.patch.dict("sys.modules", {"cuda.bindings.driver": None}):
        assert Endpoint.of(device).why.startswith("cannot import cuda")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    assert Endpoint.of(device).why == "has TORCH_NCCL_BLOCKING_WAIT set, which NCCL alone heeds"


SMALL = {"loss": "siglip", "batch_size": 4096, "dim": 64, "device_profile": "h200", "devices": 2}
BOTH = (0, 1)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Packages by copy_engines and transport, importable."""
    folder = tmp_path_factory.mktemp("mailboxes")
    found = {}
    for transport in ("ring", "gather"):
        for word in ("on", "off"):
            way = {"transport": transport, "copy_engines": word, "panel_rows": "256", "panel_keys": "256"}
            found[f"{transport} {word}"] = name = f"siglip_{transport}_{word}"
            infcl_gen.generate(make_problem(**SMALL, set=way), folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield found


def pool_of(names: dict[str, str], timeout_s: float) -> Pool:
    need("nccl", 2)
    folder = Path(str(importlib.import_module(names["ring on"]).__file__)).parents[1]
    return Pool(2, folder, timeout_s, backend="nccl", groups=[BOTH])


@pytest.mark.gpu
def test_copy_engines_and_nccl_bring_the_same_bits(names: dict[str, str]) -> None:
    pool = pool_of(names, 60.0)
    try:
        for transport, rows in (("ring", [512, 512]), ("ring", [1000, 24]), ("gather", [400, 624]), ("gather", [0, 9])):
            case = Case(sum(rows), sum(rows), 64, "bf16", 14.3, -10.0, seed=1)
            ways = []
            for word, carrier in (("on", "copy engines"), ("off", "NCCL")):
                given = {"package": names[f"{transport} {word}"], "ranks": BOTH}
                ways.append(results(pool.run("case_results", BOTH, rows=rows, keys=rows, case=case, **given)))
                assert results(pool.run("carrier", BOTH, **given)) == [carrier] * 2
            for parts in zip(*ways, strict=True):
                for one, other in zip(*parts, strict=True):
                    assert torch.equal(one, other)
    finally:
        pool.close()


@pytest.mark.gpu
def test_a_rank_that_waits_in_vain_is_ended_in_time(names: dict[str, str]) -> None:
    pool = pool_of(names, 4.0)
    try:
        pool.start("abandoned", BOTH, package=names["ring on"], ranks=BOTH, absent=1)
        assert pool.receive(1) == ("ok", 0.0)
        assert pool.receive(0) == ("dead", "")
        pool.processes[0].join(5)
        assert pool.processes[0].exitcode == -signal.SIGABRT
        assert "messages of rank 0 of 2 have not arrived within 4 s" in pool.log(0)
    finally:
        pool.close()
