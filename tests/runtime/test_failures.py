"""What the ring does when it cannot work: ranks that do not fit together are refused before anything is sent, ranks
that die, hang or fail are named within the group's timeout, and nobody returns a wrong result.

On gloo processes, and in the GPU suite on NCCL. There the host waits for no transfer, so that a failure in a hop is
noticed where the ranks next compare their calls: before backward. After that only torch's watchdog notices it, and ends
the process. With TORCH_NCCL_BLOCKING_WAIT=1 the hop is named as on gloo. Ranks that share a GPU talk through sockets:
there NCCL may notice earlier that somebody has gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from infcl_gen.runtime.group import PROTOCOL
from tests.tiers import combined

from . import ring_worker
from .pool import BACKENDS, Packages, Pool, assert_equal, average, backends, need, results

TIMEOUT_S = 4.0  # gloo connects 4 processes within it, on 2 busy cores
CONNECT_S = 60.0  # of NCCL's first connections, and of a process's first step; on busy GPUs they took more than 4 s
# Within which an error must follow the timeout, by transport. On GPUs that others work on, torch's watchdog took 5.3 s.
GRACE_S = {"gloo": 2.0, "nccl": 8.0}
WATCHDOG_S = 0.8  # what torch's watchdog takes to end a process after a timeout (see BACKENDS)
WATCHDOG = "Watchdog caught collective operation timeout"  # what it says
NOTICED = "remote process exited or there was a network error"  # or this, of ranks that share GPUs
WORLDS = {2: (0, 1), 4: (0, 1, 2, 3)}
SMALLER = {2: (1,), 4: (0, 1, 2)}  # groups without some rank that the whole has
VICTIM = {2: 1, 4: 2}


@pytest.fixture(scope="module")
def names(packages: Packages) -> dict[str, str]:
    made = {
        "clip": packages("clip", devices=4, keeps="on"),
        "infonce": packages("infonce"),
        "other": packages("clip", panel=(128, 64)),
        "bf16": packages("clip", dtype="bf16"),
        "gather": packages("clip", devices=4, transport="gather"),
    }
    return {key: module.__name__ for key, module in made.items()}


@pytest.fixture(scope="module")
def folder(packages: Packages, folder_of: Callable[[ModuleType], Path]) -> Path:
    return folder_of(packages("clip")).parent


class Place(NamedTuple):
    """Who forms a ring, and which package it runs."""

    backend: str
    world: int
    package: str = "clip"


class Pools:
    """Processes for each place, started on first use and again after a failure that they did not survive."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pools: dict[Place, Pool] = {}

    def get(self, place: Place) -> Pool:
        need(place.backend, place.world)
        pool = self._pools.get(place)
        if pool is None or pool.lost or not all(process.is_alive() for process in pool.processes):
            self.drop(place)
            pool = self._pools[place] = Pool(place.world, self._folder, backend=place.backend, groups=())
        return pool

    def drop(self, place: Place) -> None:
        """The transfers of these processes may never end."""
        pool = self._pools.pop(place, None)
        if pool is not None:
            pool.close()

    def renew(self, place: Place) -> Pool:
        """Processes of which no test knows."""
        self.drop(place)
        return self.get(place)


Check = Callable[[Pool, Place], None]


def side_by_side(get: Callable[[Place], Pool], places: Iterable[Place], check: Check) -> None:
    """`check` in each place at once: most of its time it waits for a timeout."""
    pools = [(get(place), place) for place in places]
    with ThreadPoolExecutor(len(pools)) as threads:
        for found in [threads.submit(check, *each) for each in pools]:
            found.result()


@pytest.fixture(scope="module")
def pools(names: dict[str, str], folder: Path) -> Iterator[Pools]:
    pools = Pools(folder)
    yield pools
    for place in list(pools._pools):
        pools.drop(place)


@pytest.fixture
def pool(pools: Pools) -> Pool:
    return pools.get(Place("gloo", 4))


class Mismatch(NamedTuple):
    """What one rank does otherwise than all others, and what every rank then says. {v} is the rank that deviates."""

    wrong: dict[str, Any]
    message: str
    common: dict[str, Any] = {}  # noqa: RUF012 (never written to)
    loss: str = "clip"
    error: str = "RuntimeError"


LABELS = {"labels": [0, 1, 2, 3]}
TWICE = ["forward", "forward", "backward 0"]
MISMATCHES = {
    "fp32 in an fp64 package": Mismatch({"dtype": "float32"}, r"dtype differs \(rank 0: float64, .*rank {v}: float32"),
    "embedding dimension": Mismatch({"dim": 7}, r"embedding dimension differs \(rank 0: 8, .*rank {v}: 7"),
    "package": Mismatch({"package": "other"}, r"package digest differs \(rank 0: \w+, .*rank {v}: \w+"),
    "loss": Mismatch({"package": "infonce"}, r"loss differs \(rank 0: clip, .*rank {v}: infonce"),
    "torch version": Mismatch({"torch_version": "2.11.0+cu128"}, r"torch version differs .*rank {v}: 2.11.0\+cu128"),
    "protocol": Mismatch({"protocol": 1}, rf"protocol differs \(rank 0: {PROTOCOL}, .*rank {{v}}: 1"),
    "grad_sync": Mismatch({"grad_sync": "sum"}, r"grad_sync differs \(rank 0: mean, .*rank {v}: sum"),
    "an unknown grad_sync": Mismatch(
        {"grad_sync": "average"}, "arguments of rank {v} are invalid|grad_sync must be one of"
    ),
    "reduction": Mismatch({"reduction": "sum"}, r"reduction differs \(rank 0: mean, .*rank {v}: sum"),
    "gradients": Mismatch({"grad": True}, r"gradients wanted differs \(rank 0: nothing, .*rank {v}: q k"),
    "gradients of unchecked ranks": Mismatch(
        {"grad": True}, r"differentiated differs \(rank 0: nothing, .*rank {v}: q k", {"check_ranks": "never"}
    ),
    "unchecked ranks": Mismatch({"check_ranks": "never"}, r"ranks compared differs .*rank {v}: False"),
    "labels": Mismatch(LABELS, r"labels differs \(rank 0: none, .*rank {v}: given", loss="infonce"),
    "own labels": Mismatch({"labels": "own"}, r"labels differs \(rank 0: none, .*rank {v}: own", loss="infonce"),
    "too few labels": Mismatch(
        {"labels": [0]}, "arguments of rank {v} are invalid|labels must be int64 of shape", LABELS, "infonce"
    ),
    "scale": Mismatch({"scale": "large"}, "arguments of rank {v} are invalid|scale must be a number"),
    "scale in training": Mismatch(
        {"scale": "large"}, "arguments of rank {v} are invalid|scale must be a number", {"grad": True}
    ),
    "no tensor in training": Mismatch(
        {"listed": True}, "arguments of rank {v} are invalid|q must be", {"grad": True}
    ),
    "scale of unchecked ranks in training": Mismatch(
        {"scale": "large"}, "arguments of rank {v} are invalid|scale must be a number",
        {"grad": True, "check_ranks": "never"},
    ),
    "scale beside features that are cast": Mismatch(
        {"scale": "large"}, "arguments of rank {v} are invalid|scale must be a number", {"dtype": "float32"}, "bf16"
    ),
    "memory for features that are cast": Mismatch(
        {"lacks_memory": True}, "arguments of rank {v} are invalid|no memory for", {"dtype": "float32"}, "bf16"
    ),
    "a nested tensor": Mismatch({"nested": True}, "arguments of rank {v} are invalid|q must be a dense tensor"),
    "more keys than queries": Mismatch(
        {"keys": 5}, r"\d+ queries and \d+ keys on \d ranks.*labels=\"own\"", loss="infonce", error="ValueError"
    ),
    "fewer keys than own labels": Mismatch(
        {"keys": 3}, 'labels="own" .*rank {v} has 4 queries and 3 keys', {"labels": "own"}, "infonce", "ValueError"
    ),
    "no tensor": Mismatch({"listed": True}, "arguments of rank {v} are invalid|q must be"),
    "device": Mismatch({"device": "meta"}, "arguments of rank {v} are invalid|on the meta device"),
    "a label that is no key": Mismatch(
        {"labels": [0, 1, 2, 99]}, "labels on rank {v} range from 0 to 99", LABELS, "infonce", "ValueError"
    ),
    "a negative label": Mismatch(
        {"labels": [0, 1, 2, -1]}, "labels on rank {v} range from -1", LABELS, "infonce", "ValueError"
    ),
    "a key without a query": Mismatch(
        {"keys": 5}, r"pairs query i with key i, but .* \d+ keys \(rank {v} has 4 and 5\);", error="ValueError"
    ),
    "too many rows": Mismatch(
        {"rows": 299}, r"at most 300 queries.*regenerate: infcl-gen generate.*3\d\d", error="BatchTooLargeError"
    ),
    "another step": Mismatch(
        {"steps": ["forward", "forward"]},
        r"phase differs \(rank 0: backward, .*rank {v}: forward",
        {"grad": True, "steps": ["forward", "backward 0"]},
    ),
    "order of backward": Mismatch(
        {"steps": [*TWICE[:2], "backward 1"]},
        r"different calls of the loss: passes finished before its forward are (\d+) on rank 0.* (?!\1)\d+ on rank {v}",
        {"grad": True, "steps": TWICE},
    ),
    "an abandoned trip": Mismatch(
        {"trips": 1000}, r"different calls of the loss: passes finished are (?!1000)\d+ on rank 0.* 1000 on rank {v}"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "world"), combined(MISMATCHES, WORLDS))
def test_mismatched_ranks_raise_everywhere_before_the_first_hop(
    pool: Pool, names: dict[str, str], kind: str, world: int
) -> None:
    assert_refused(pool, names, MISMATCHES[kind], names[MISMATCHES[kind].loss], world)


@pytest.mark.parametrize("kind", ["grad_sync", "a key without a query", "another step", "order of backward"])
def test_a_gather_is_refused_before_anything_is_sent(pool: Pool, names: dict[str, str], kind: str) -> None:
    """Though its sizes are known from a call before."""
    assert_refused(pool, names, MISMATCHES[kind], names["gather"], 4, called=True)


def assert_refused(
    pool: Pool, names: dict[str, str], case: Mismatch, package: str, world: int, called: bool = False
) -> None:
    """With what is wrong on one rank, every rank raises that and has sent nothing. `called`: after a right call."""
    ranks, victim = WORLDS[world], VICTIM[world]
    wrong = {key: names[value] if key == "package" else value for key, value in case.wrong.items()}
    common = {"steps": ["forward"], **case.common}
    renewed(pool, ranks)
    if called:
        results(pool.run("call", ranks, package=package, ranks=ranks))
    answers = pool.run("refused", ranks, each={victim: wrong}, package=package, ranks=ranks, **common)
    for rank, (error, text, transfers) in enumerate(results(answers)):
        own_fault = rank == victim and error in ("TypeError", "ValueError", "OutOfMemoryError")
        assert error == case.error or own_fault, answers
        assert re.search(case.message.replace("{v}", str(victim)), text), answers
        assert transfers == 0, answers
    dtype = {"dtype": "bfloat16"} if case.loss == "bf16" else {}
    results(pool.run("call", ranks, package=package, ranks=ranks, **dtype))  # the ring is usable again


def test_calls_are_compared_after_the_first_use_too(pool: Pool, names: dict[str, str]) -> None:
    arguments = {"package": names["clip"], "ranks": (0, 1)}
    renewed(pool, (0, 1))
    results(pool.run("call", (0, 1), **arguments))
    answers = pool.run("call", (0, 1), each={1: {"grad_sync": "sum"}}, **arguments)
    assert all(kind == "RuntimeError" and "grad_sync differs" in text for kind, text in answers), answers


@pytest.mark.parametrize(
    ("which", "remedy"),
    [
        ("q", "pass the rows of this rank, q.to_local(), and its mesh as group"),
        ("labels", "pass the rows of this rank, labels.to_local(), and its mesh as group"),
        ("scale", 'pass scale.full_tensor(grad_placements=[Partial("avg")]), or Partial("sum") with grad_sync="sum"'),
    ],
)
def test_distributed_tensors_are_refused_with_what_to_do(
    pool: Pool, names: dict[str, str], which: str, remedy: str
) -> None:
    """In one sentence, not by torch's error from inside; a rank without one hears which rank has it."""
    arguments: dict[str, Any] = {"package": names["infonce"], "ranks": (0, 1)}
    renewed(pool, (0, 1))
    everywhere = pool.run("of_parts", (0, 1), which=which, **arguments)
    assert everywhere == [("TypeError", f"{which} is a DTensor: {remedy}")] * 2
    on_one = pool.run("of_parts", (0, 1), each={0: {"which": None}, 1: {"which": which}}, **arguments)
    assert on_one[1] == everywhere[1]
    assert on_one[0] == (
        "RuntimeError", "ranks disagree: the arguments of rank 1 are invalid (see the error there)"
    )  # fmt: skip
    results(pool.run("of_parts", (0, 1), which=None, **arguments))  # the ring is usable again


def test_an_empty_batch_raises_everywhere(pool: Pool, names: dict[str, str]) -> None:
    renewed(pool, (0, 1))
    answers = pool.run("call", (0, 1), package=names["clip"], ranks=(0, 1), rows=0)
    assert all(kind == "ValueError" and "at least one query" in text for kind, text in answers), answers


class Failure(NamedTuple):
    """What one rank does, and where: in its turn-th exchange (0: before forward, 1: before backward) or at that hop."""

    act: str
    place: str
    turn: int

    def over(self, world: int) -> Failure:
        """Two ranks need nothing more of each other in their last hop backward: there it happens in the first."""
        return self._replace(turn=0) if self.place == "backward" and world == 2 else self

    @property
    def past_comparing(self) -> bool:
        """Whether all have compared their calls of backward, after their first work, when it happens."""
        return self.place == "backward" and self.turn > 0


SURVIVED = {
    "stalled in the exchange": Failure("stop", "exchange", 0),
    "stalled in the exchange of backward": Failure("sleep", "exchange", 1),
    "stalled in a forward hop": Failure("sleep", "forward", 1),
    "stalled in a backward hop": Failure("stop", "backward", 1),
    "exception in the exchange": Failure("raise", "exchange", 0),
    "exception in a forward hop": Failure("raise", "forward", 1),
    "exception in a backward hop": Failure("raise", "backward", 1),
}
KILLED = {
    "killed in the exchange": Failure("kill", "exchange", 0),
    "killed in the exchange of backward": Failure("kill", "exchange", 1),
    "killed in a forward hop": Failure("kill", "forward", 1),
    "killed in a backward hop": Failure("kill", "backward", 1),
}


# The victim goes on when the others have given up: its transfers have no one to go to. Either it is told so in the
# exchange before backward, or the watchdog, which has the same timeout, ends it first.
LEFT_ALONE = (Failure("sleep", "exchange", 1), Failure("sleep", "forward", 1), Failure("stop", "backward", 0))


def renewed(pool: Pool, *groups: tuple[int, ...], worked: str = "") -> list[list[Tensor]]:
    """Fresh groups: a failure leaves connections broken. `worked`: a package of which each group runs one step first;
    the results of each rank of the first group are returned, else nothing."""
    everybody = tuple(range(len(pool.pipes)))

    def step(ranks: tuple[int, ...]) -> list[list[Tensor]]:
        answers = pool.run("struggle", ranks, package=worked, ranks=ranks)
        assert all(kind == "ok" and not answer[0] for kind, answer in answers), (answers, *map(pool.log, ranks))
        return [found for _, (*_, found) in answers]

    if worked and not pool.warm:
        results(pool.run("renew", everybody, groups=[everybody], timeout_s=CONNECT_S))
        step(everybody)
        pool.warm = True
    results(pool.run("renew", everybody, groups=list(groups), timeout_s=TIMEOUT_S))
    healthy = []
    for ranks in groups if worked else ():
        results(pool.run("connect", ranks, ranks=ranks, timeout_s=CONNECT_S))
        healthy.append(step(ranks))
    return healthy[0] if healthy else []


def before(backend: str, names: dict[str, str]) -> str:
    """What a ring has worked with before something goes wrong. The first step connects processes, and on GPUs loads
    libraries; the other rings fail in their first step."""
    return "" if backend == "gloo" else names["clip"]


def grace_s(backend: str) -> float:
    return GRACE_S[backend.partition("-")[0]]


def assert_told(answer: Any, place: Place, rank: int, failure: Failure) -> None:
    """A survivor's answer: an error in time, which names phase, hop and peers."""
    backend, world, package = place
    victim = VICTIM[world]
    ((error, text, seconds, found),) = results([answer])
    assert error in ("RuntimeError", "DistBackendError") and not found, answer
    assert seconds <= TIMEOUT_S + grace_s(backend), answer
    if failure.place == "exchange":
        phase = ("forward", "backward")[failure.turn]
        told = f"control exchange before {phase}: rank {rank} of {world} failed .* rank {victim} "
        assert re.match(told, text), answer
        return
    if package == "gather":
        # Whoever gives up first closes its connections: others may name it. Headers are looked at after the first work
        # of backward: they may not have left the victim. Messages that cannot begin are named together.
        peer = rf"(?!{rank})\d"
        end = rf"(sending to|receiving from) rank {peer}"
        told = rf"{failure.place} gather, hop \d of {world}: rank {rank} failed {end}( or {end})*: "
        told += rf"|control exchange before backward: rank {rank} of {world} failed .* rank {peer} "
        assert re.match(told, text), answer
        return
    step = 1 if failure.place == "forward" else -1  # to whom keys go
    send, receive = f"sending to rank {(rank + step) % world}", f"receiving from rank {(rank - step) % world}"
    peers = f"({send}|{receive}|{send} or {receive})"  # NCCL does not say which of a batch
    match = re.match(rf"{failure.place} ring, hop (\d) of {world}: rank {rank} failed {peers}: ", text)
    if failure.place == "backward" and not failure.past_comparing:  # gloo: its header may have left it all the same
        told = f"control exchange before backward: rank {rank} of {world} failed .* rank {victim} "
        assert match or re.match(told, text), answer
        return
    assert match, answer
    if (rank - victim) % world == step % world:  # it waits for the victim itself; those behind it may be further on
        assert failure.turn <= int(match[1]) < world, answer  # a rank farther off goes on for longer


def assert_ended(pool: Pool, answer: Any, rank: int, seconds: float) -> None:
    """A survivor that nobody could tell: the watchdog has ended it in time, and it has returned nothing."""
    assert answer == ("dead", ""), answer
    assert seconds <= TIMEOUT_S + WATCHDOG_S + GRACE_S["nccl"], seconds
    pool.processes[rank].join(5)
    assert pool.processes[rank].exitcode == -signal.SIGABRT, pool.log(rank)
    log = pool.log(rank)
    assert WATCHDOG in log or (len(pool.processes) > torch.cuda.device_count() and NOTICED in log), log


def served(world: int, failure: Failure) -> tuple[int, ...]:
    """Ranks that may finish without the victim. Before its second hop backward it has sent its sums for the rank after
    it: that one needs nothing more of it, and returns its results unless its own sends wait for the victim."""
    return ((VICTIM[world] + 1) % world,) if failure.past_comparing else ()


def fail(
    pool: Pool, place: Place, names: dict[str, str], failure: Failure, healthy: Sequence[list[Tensor]] = ()
) -> Any:
    """Lets one rank fail, checks what the others say, and returns what it says itself. `healthy`: each
    rank's results without the failure."""
    backend, world, package = place
    ranks, victim, failure = WORLDS[world], VICTIM[world], failure.over(world)
    start = time.monotonic()
    mark = Path(pool.logs.name, f"acted {start}")
    pool.start(
        "struggle",
        ranks,
        package=names[package],
        ranks=ranks,
        victim=victim,
        seconds=TIMEOUT_S + 1,
        mark=str(mark),
        **failure._asdict(),
    )
    rest = [rank for rank in ranks if rank != victim]
    answers = [(rank, pool.receive(rank), time.monotonic() - start) for rank in rest]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pool.processes[victim].pid or 0, signal.SIGCONT)
    last = pool.receive(victim)
    for rank, answer, seconds in answers:
        may_have = backend.startswith("nccl") and rank in served(world, failure)
        if may_have and answer[0] == "ok" and not answer[1][0]:
            assert_equal(answer[1][3], healthy[rank])
        elif backend == "nccl" and failure.past_comparing and answer[0] == "ok":
            # Ranks that share a GPU send through sockets, which may notice before the watchdog.
            assert_told(answer, place, rank, failure)
        elif backend == "nccl" and failure.past_comparing:
            assert_ended(pool, answer, rank, seconds)
        elif backend == "nccl" and failure.place == "forward" and "forward ring" not in str(answer[1]):
            # Noticed where calls are compared next.
            assert_told(answer, place, rank, failure._replace(place="exchange", turn=1))
        else:
            assert_told(answer, place, rank, failure)
    return last


def places(*names: str) -> list[Any]:
    """Places of which a test checks some at once: all of gloo, and each of the GPU suite alone. A control group beside
    gloo is of four ranks only. A process of the GPU suite keeps its rings, and tries those of one size in turn: on GPUs
    that many share, a ring takes longer to connect than TIMEOUT_S."""
    found = [Place(name, world) for name in names for world in (WORLDS if name != "gloo-beside" else (4,))]
    apart = [place for place in found if BACKENDS[place.backend].name == "nccl"]
    together = [pytest.param([place for place in found if place not in apart], id="gloo")]
    for place in apart:
        group = f"{place.backend.removesuffix('-waiting')}-{place.world}"
        marks = [pytest.mark.gpu, pytest.mark.xdist_group(group)]
        together.append(pytest.param([place], id=f"{place.backend}-{place.world}", marks=marks))
    return together


def where(failures: dict[str, Failure]) -> list[Any]:
    """(kind, places): in exchanges the host waits on all backends; a gather's are those of a ring."""
    found = []
    for kind, failure in failures.items():
        in_exchange = failure.place == "exchange"
        of_gloo, *others = places(
            *(("gloo", "gloo-beside", "nccl") if in_exchange else ("gloo", "nccl", "nccl-waiting"))
        )
        of_gloo.values[0].extend([] if in_exchange else [Place("gloo", 4, "gather")])
        found += [
            pytest.param(kind, *each.values, id=f"{kind}-{each.id}", marks=each.marks) for each in (of_gloo, *others)
        ]
    return found


@pytest.mark.parametrize(("kind", "rings"), where(SURVIVED))
def test_a_stalled_or_failing_rank_is_an_error_in_time(
    pools: Pools, names: dict[str, str], kind: str, rings: list[Place]
) -> None:
    def check(pool: Pool, place: Place) -> None:
        backend, world, _ = place
        victim, failure = VICTIM[world], SURVIVED[kind].over(world)
        healthy = renewed(pool, WORLDS[world], worked=before(backend, names))
        try:
            last = fail(pool, place, names, failure, healthy)
        finally:
            log = pool.log(victim)
            if backend == "nccl" and failure.place != "exchange":
                pools.drop(place)
        assert_woken(last, log, place, failure, healthy)

    side_by_side(pools.get, rings, check)


def assert_woken(last: Any, log: str, place: Place, failure: Failure, healthy: Sequence[list[Tensor]]) -> None:
    """What a rank says itself that has stalled or failed."""
    backend, world, _ = place
    victim, gone = VICTIM[world], backend == "nccl" and failure.past_comparing and failure.act != "raise"
    if gone and last == ("dead", ""):  # like the others: its transfers have no one to go to
        return
    if backend == "nccl" and failure in LEFT_ALONE and last == ("dead", ""):
        assert WATCHDOG in log, log
        return
    assert last[0] == "ok", f"{last}\n{log}"
    error, text, _, found = last[1]
    if backend.startswith("nccl") and failure.act != "raise" and not error:
        # What it waited for had been sent before the others gave up.
        assert_equal(found, healthy[victim])
        return
    if failure.act == "raise":
        assert (error, text) == ("ZeroDivisionError", "integer division or modulo by zero")
    else:  # it wakes up in a group that has given up on it
        assert error == "RuntimeError", (error, text)
        assert re.match(rf"(control exchange|\w+ (ring|gather)[^:]* of {world}[^:]*: rank {victim} )", text), text
    assert not found


@pytest.mark.parametrize("hop", [2, 3])
@pytest.mark.parametrize("backend", backends("gloo", "nccl-waiting"))
@pytest.mark.xdist_group("nccl-4")
def test_an_exception_near_the_end_leaves_errors_or_right_results(
    pools: Pools, names: dict[str, str], backend: str, hop: int
) -> None:
    """Ranks that need nothing more from the one that fails have their results. Before the last hop the one that waits
    for its sums has not, and on gloo not the one that sends to it: NCCL takes a small message whether it is asked for
    or not. In the last hop all has been sent, but gloo may drop what nobody waits for any more."""
    ranks, failure = WORLDS[4], Failure("raise", "backward", hop)
    arguments = {"package": names["clip"], "ranks": ranks}
    pool = pools.get(Place(backend, 4))
    healthy = renewed(pool, ranks, worked=names["clip"])
    answers = pool.run("struggle", ranks, victim=2, **failure._asdict(), **arguments)
    told = () if hop == 3 else (1, 3) if backend == "gloo" else (1,)
    for rank in told:
        assert_told(answers[rank], Place(backend, 4), rank, failure)
    for rank in {0, 1, 3} - set(told):
        error, text, _, found = answers[rank][1]
        assert error == "RuntimeError" and "backward ring, hop 3 of 4" in text if error else found, answers
        if found:
            assert_equal(found, healthy[rank])


@pytest.mark.parametrize(("kind", "rings"), where(KILLED))
def test_a_killed_rank_is_an_error_in_time(pools: Pools, names: dict[str, str], kind: str, rings: list[Place]) -> None:
    def check(pool: Pool, place: Place) -> None:
        healthy = renewed(pool, WORLDS[place.world], worked=before(place.backend, names))
        assert fail(pool, place, names, KILLED[kind], healthy) == ("dead", "")

    side_by_side(pools.renew, rings, check)


@pytest.mark.parametrize("rings", places("gloo", "gloo-beside", "nccl"))
def test_a_rank_that_has_left_is_named(pools: Pools, names: dict[str, str], rings: list[Place]) -> None:
    def check(pool: Pool, place: Place) -> None:
        ranks, victim = WORLDS[place.world], VICTIM[place.world]
        renewed(pool, ranks, worked=before(place.backend, names))
        pool.pipes[victim].send(None)
        pool.processes[victim].join()
        assert_missed(pool, place, names)

    side_by_side(pools.renew, rings, check)


@pytest.mark.parametrize("rings", places("gloo", "gloo-beside", "nccl"))
def test_a_rank_that_does_not_call_the_loss_is_named(pools: Pools, names: dict[str, str], rings: list[Place]) -> None:
    def check(pool: Pool, place: Place) -> None:
        renewed(pool, WORLDS[place.world], worked=before(place.backend, names))
        assert_missed(pool, place, names)

    side_by_side(pools.get, rings, check)


def assert_missed(pool: Pool, place: Place, names: dict[str, str]) -> None:
    """Ranks that call the loss without the victim name it."""
    ranks, victim = WORLDS[place.world], VICTIM[place.world]
    rest = tuple(rank for rank in ranks if rank != victim)
    answers = pool.run("struggle", rest, package=names["clip"], ranks=ranks)
    for rank, answer in zip(rest, answers, strict=True):
        assert_told(answer, place, rank, Failure("", "exchange", 0))


@pytest.mark.parametrize("rings", places("gloo", "nccl"))
def test_a_rank_with_a_smaller_group_is_named(
    pools: Pools, packages: Packages, names: dict[str, str], rings: list[Place]
) -> None:
    truth = ring_worker.reference_gradients(packages("clip"), [4], [4], False)

    def check(pool: Pool, place: Place) -> None:
        backend, world, _ = place
        ranks, victim, smaller = WORLDS[world], VICTIM[world], SMALLER[world]
        renewed(pool, ranks, smaller, worked=before(backend, names))
        answers = pool.run("struggle", ranks, each={victim: {"ranks": smaller}}, package=names["clip"], ranks=ranks)
        for rank in ranks:
            if rank != victim:
                assert_told(answers[rank], place, rank, Failure("", "exchange", 0))
        ((error, text, seconds, found),) = results([answers[victim]])
        if len(smaller) == 1:  # it has what it asked for
            assert_equal(found, truth)
        else:
            assert error == "RuntimeError" and "rank 2 of 3 failed waiting for rank 1 " in text, answers
            assert seconds <= TIMEOUT_S + grace_s(backend)

    side_by_side(pools.get, rings, check)


@pytest.mark.parametrize("rings", places("gloo", "nccl"))
def test_a_rank_with_another_package_is_told_at_once(pools: Pools, names: dict[str, str], rings: list[Place]) -> None:
    def check(pool: Pool, place: Place) -> None:
        ranks, other = WORLDS[place.world], {VICTIM[place.world]: {"package": names["other"]}}
        renewed(pool, ranks, worked=before(place.backend, names))
        answers = pool.run("struggle", ranks, each=other, package=names["clip"], ranks=ranks)
        for error, text, seconds, found in results(answers):
            assert error == "RuntimeError" and "package digest differs" in text and not found, answers
            assert seconds <= grace_s(place.backend), answers

    side_by_side(pools.get, rings, check)


@pytest.mark.parametrize("when", ["exchange", "forward", "backward"])
@pytest.mark.parametrize("rings", places("gloo", "nccl"))
def test_a_late_rank_changes_nothing(
    pools: Pools, packages: Packages, names: dict[str, str], rings: list[Place], when: str
) -> None:
    def check(pool: Pool, place: Place) -> None:
        backend, world, _ = place
        ranks, rows, failure = WORLDS[world], [4] * world, Failure("sleep", when, 1).over(world)
        renewed(pool, ranks, worked=before(backend, names))
        late = failure._asdict() | {"victim": VICTIM[world], "seconds": TIMEOUT_S / 3}
        answers = results(pool.run("struggle", ranks, package=names["clip"], ranks=ranks, **late))
        waited = set(ranks) - set(served(world, failure) if backend == "nccl" else ())
        assert all(not error for error, *_ in answers), answers
        assert all(answers[rank][2] >= TIMEOUT_S / 3 for rank in waited), answers
        truth = ring_worker.reference_gradients(packages("clip"), rows, rows, False)
        assert_equal(average([found for *_, found in answers]), truth)

    side_by_side(pools.get, rings, check)
