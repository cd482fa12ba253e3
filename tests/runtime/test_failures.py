"""What the ring does when it cannot work, on gloo processes: ranks that do not fit together are refused before anything
is sent, ranks that die, hang or fail are named within the group's timeout, and nobody returns a wrong result."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from . import ring_worker
from .test_ring import Packages, Pool, assert_equal, average, results

TIMEOUT_S = 5.0  # gloo connects 4 processes within it, on 2 busy cores
GRACE_S = 2.0  # within which an error must follow the timeout
WORLDS = {2: (0, 1), 4: (0, 1, 2, 3)}
SMALLER = {2: (1,), 4: (0, 1, 2)}  # groups without some rank that the whole has
VICTIM = {2: 1, 4: 2}


@pytest.fixture(scope="module")
def names(packages: Packages) -> dict[str, str]:
    made = {
        "clip": packages("clip"),
        "infonce": packages("infonce"),
        "other": packages("clip", panel=(128, 64)),
        "bf16": packages("clip", dtype="bf16"),
        "gather": packages("clip", devices=4, transport="gather"),
    }
    return {key: module.__name__ for key, module in made.items()}


@pytest.fixture(scope="module")
def folder(packages: Packages, folder_of: Callable[[ModuleType], Path]) -> Path:
    return folder_of(packages("clip")).parent


@pytest.fixture(scope="module")
def pool(names: dict[str, str], folder: Path) -> Iterator[Pool]:
    pool = Pool(4, folder, timeout_s=20)
    yield pool
    pool.close()


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
    "fp16 against bf16": Mismatch(
        {"dtype": "float16"}, r"dtype differs \(rank 0: bfloat16, .*rank {v}: float16", {"dtype": "bfloat16"}, "bf16"
    ),
    "embedding dimension": Mismatch({"dim": 7}, r"embedding dimension differs \(rank 0: 8, .*rank {v}: 7"),
    "package": Mismatch({"package": "other"}, r"package digest differs \(rank 0: \w+, .*rank {v}: \w+"),
    "loss": Mismatch({"package": "infonce"}, r"loss differs \(rank 0: clip, .*rank {v}: infonce"),
    "torch version": Mismatch({"torch_version": "2.11.0+cu128"}, r"torch version differs .*rank {v}: 2.11.0\+cu128"),
    "protocol": Mismatch({"protocol": 1}, r"protocol differs \(rank 0: 3, .*rank {v}: 1"),
    "grad_sync": Mismatch({"grad_sync": "sum"}, r"grad_sync differs \(rank 0: mean, .*rank {v}: sum"),
    "an unknown grad_sync": Mismatch({"grad_sync": "average"}, r"grad_sync differs .*rank {v}: average"),
    "reduction": Mismatch({"reduction": "sum"}, r"reduction differs \(rank 0: mean, .*rank {v}: sum"),
    "gradients": Mismatch({"grad": True}, r"gradients wanted differs \(rank 0: 0, .*rank {v}: 1"),
    "unchecked ranks": Mismatch({"check_ranks": "never"}, r"ranks compared differs .*rank {v}: False"),
    "labels": Mismatch(LABELS, r"labels given differs \(rank 0: False, .*rank {v}: True", loss="infonce"),
    "too few labels": Mismatch(
        {"labels": [0]}, "arguments of rank {v} are invalid|labels must be int64 of shape", LABELS, "infonce"
    ),
    "scale": Mismatch({"scale": "large"}, "arguments of rank {v} are invalid|scale must be a number"),
    "device": Mismatch({"device": "meta"}, "arguments of rank {v} are invalid|device.type"),
    "a label that is no key": Mismatch(
        {"labels": [0, 1, 2, 99]}, "labels on rank {v} range from 0 to 99", LABELS, "infonce", "ValueError"
    ),
    "a negative label": Mismatch(
        {"labels": [0, 1, 2, -1]}, "labels on rank {v} range from -1", LABELS, "infonce", "ValueError"
    ),
    "a key without a query": Mismatch({"keys": 5}, r"pairs query i with key i, but .* \d+ keys", error="ValueError"),
    "too many rows": Mismatch(
        {"rows": 299}, r"at most 300 queries.*regenerate: infcl-gen generate.*--batch-size 3\d\d", error="ValueError"
    ),
    "another step": Mismatch(
        {"steps": ["forward", "forward"]},
        r"phase differs \(rank 0: backward, .*rank {v}: forward",
        {"grad": True, "steps": ["forward", "backward 0"]},
    ),
    "order of backward": Mismatch(
        {"steps": [*TWICE[:2], "backward 1"]},
        r"call number differs \(rank 0: (\d+), .*rank {v}: (?!\1)\d+",
        {"grad": True, "steps": TWICE},
    ),
    "an abandoned trip": Mismatch({"trips": 1000}, r"trips finished differs .*rank {v}: 1000"),
}  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatched_ranks_raise_everywhere_before_the_first_hop(
    pool: Pool, names: dict[str, str], kind: str, world: int
) -> None:
    case, ranks, victim = MISMATCHES[kind], WORLDS[world], VICTIM[world]
    package = names[case.loss]
    wrong = {key: names[value] if key == "package" else value for key, value in case.wrong.items()}
    common = {"steps": ["forward"], **case.common}
    renewed(pool, ranks)
    answers = pool.run("refused", ranks, each={victim: wrong}, package=package, ranks=ranks, **common)
    for rank, (error, text, transfers) in enumerate(results(answers)):
        own_fault = rank == victim and error in ("TypeError", "ValueError")
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


def test_an_empty_batch_raises_everywhere(pool: Pool, names: dict[str, str]) -> None:
    renewed(pool, (0, 1))
    answers = pool.run("call", (0, 1), package=names["clip"], ranks=(0, 1), rows=0)
    assert all(kind == "ValueError" and "at least one query" in text for kind, text in answers), answers


class Failure(NamedTuple):
    """What one rank does, and where: in its turn-th exchange (0: before forward, 1: before backward) or at that hop."""

    act: str
    place: str
    turn: int


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


IN_A_GATHER = [kind for kind in (*SURVIVED, *KILLED) if kind.endswith("hop")]  # the exchange is the same


def cases(kinds: dict[str, Failure]) -> list[Any]:
    """(kind, world, name of the package): all kinds in rings of 2 and 4, those of hops in a gather of 4 too."""
    rings = [(kind, world, "clip") for kind in kinds for world in WORLDS]
    return rings + [(kind, 4, "gather") for kind in kinds if kind in IN_A_GATHER]


def renewed(pool: Pool, *groups: tuple[int, ...]) -> None:
    """Fresh groups: a failure leaves connections broken."""
    everybody = tuple(range(len(pool.pipes)))
    results(pool.run("renew", everybody, groups=list(groups), timeout_s=TIMEOUT_S))


def assert_told(
    answer: Any, rank: int, world: int, victim: int, failure: Failure, gather: bool = False
) -> None:
    """A survivor's answer: an error in time, which names phase, hop and peers."""
    ((error, text, seconds, found),) = results([answer])
    assert error in ("RuntimeError", "DistBackendError") and not found, answer
    assert seconds <= TIMEOUT_S + GRACE_S, answer
    if failure.place == "exchange":
        phase = ("forward", "backward")[failure.turn]
        told = f"control exchange before {phase}: rank {rank} of {world} failed .* rank {victim} "
        assert re.match(told, text), answer
        return
    if gather:
        # Whoever gives up first closes its connections: others may name it. Headers are looked at after the first work
        # of backward: they may not have left the victim.
        peer = rf"(?!{rank})\d"
        told = rf"{failure.place} gather of {world} ranks, [a-z ]+: rank {rank} failed (sending to|receiving from) "
        told += (
            rf"rank {peer}: |control exchange before backward: rank {rank} of {world} failed .* rank {peer} "
        )
        assert re.match(told, text), answer
        return
    peers = f"(sending to rank {(rank + 1) % world}|receiving from rank {(rank - 1) % world})"
    match = re.match(rf"{failure.place} ring, hop (\d) of {world}: rank {rank} failed {peers}: ", text)
    assert match, answer
    if (rank - victim) % world == 1:  # it waits for the victim itself; those behind it may be further on
        assert failure.turn <= int(match[1]) < world, answer  # a rank farther off goes on for longer


@pytest.mark.parametrize(("kind", "world", "package"), cases(SURVIVED))
def test_a_stalled_or_failing_rank_is_an_error_in_time(
    pool: Pool, names: dict[str, str], kind: str, world: int, package: str
) -> None:
    ranks, victim, failure = WORLDS[world], VICTIM[world], SURVIVED[kind]
    renewed(pool, ranks)
    pool.start(
        "struggle",
        ranks,
        package=names[package],
        ranks=ranks,
        victim=victim,
        seconds=TIMEOUT_S + 1,
        **failure._asdict(),
    )
    rest = [rank for rank in ranks if rank != victim]
    answers = [pool.receive(rank) for rank in rest]
    os.kill(pool.processes[victim].pid or 0, signal.SIGCONT)
    ((error, text, _, found),) = results([pool.receive(victim)])
    for rank, answer in zip(rest, answers, strict=True):
        assert_told(answer, rank, world, victim, failure, package == "gather")
    if failure.act == "raise":
        assert (error, text) == ("ZeroDivisionError", "integer division or modulo by zero")
    else:  # it wakes up in a group that has given up on it
        assert error == "RuntimeError", (error, text)
        assert re.match(
            rf"(control exchange|\w+ (ring|gather)[^:]* of {world}[^:]*: rank {victim} )", text
        ), text
    assert not found


def test_an_exception_in_the_last_hop_leaves_errors_or_right_results(
    pool: Pool, names: dict[str, str]
) -> None:
    """Ranks that need nothing more from the one that fails have their results; its neighbours have not."""
    ranks, failure = WORLDS[4], Failure("raise", "backward", 3)
    arguments = {"package": names["clip"], "ranks": ranks}
    renewed(pool, ranks)
    healthy = results(pool.run("struggle", ranks, **arguments))
    answers = pool.run("struggle", ranks, victim=2, **failure._asdict(), **arguments)
    for rank in (1, 3):
        assert_told(answers[rank], rank, 4, 2, failure)
    error, text, _, found = answers[0][1]
    assert error == "RuntimeError" and "backward ring, hop 3 of 4" in text if error else found, answers
    if found:
        assert_equal(found, healthy[0][3])


@pytest.mark.parametrize(("kind", "world", "package"), cases(KILLED))
def test_a_killed_rank_is_an_error_in_time(
    names: dict[str, str], folder: Path, kind: str, world: int, package: str
) -> None:
    ranks, victim, failure = WORLDS[world], VICTIM[world], KILLED[kind]
    pool = Pool(world, folder)
    try:
        renewed(pool, ranks)
        answers = pool.run(
            "struggle", ranks, package=names[package], ranks=ranks, victim=victim, **failure._asdict()
        )
        assert answers[victim] == ("dead", "")
        for rank in ranks:
            if rank != victim:
                assert_told(answers[rank], rank, world, victim, failure, package == "gather")
    finally:
        pool.close()


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_has_left_is_named(names: dict[str, str], folder: Path, world: int) -> None:
    ranks, victim = WORLDS[world], VICTIM[world]
    pool = Pool(world, folder)
    try:
        renewed(pool, ranks)
        pool.pipes[victim].send(None)
        pool.processes[victim].join()
        rest = tuple(rank for rank in ranks if rank != victim)
        answers = pool.run("struggle", rest, package=names["clip"], ranks=ranks)
        for rank, answer in zip(rest, answers, strict=True):
            assert_told(answer, rank, world, victim, Failure("", "exchange", 0))
    finally:
        pool.close()


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_does_not_call_the_loss_is_named(pool: Pool, names: dict[str, str], world: int) -> None:
    ranks, victim = WORLDS[world], VICTIM[world]
    renewed(pool, ranks)
    rest = tuple(rank for rank in ranks if rank != victim)
    for rank, answer in zip(
        rest, pool.run("struggle", rest, package=names["clip"], ranks=ranks), strict=True
    ):
        assert_told(answer, rank, world, victim, Failure("", "exchange", 0))


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_with_a_smaller_group_is_named(
    pool: Pool, packages: Packages, names: dict[str, str], world: int
) -> None:
    ranks, victim, smaller = WORLDS[world], VICTIM[world], SMALLER[world]
    renewed(pool, ranks, smaller)
    answers = pool.run(
        "struggle", ranks, each={victim: {"ranks": smaller}}, package=names["clip"], ranks=ranks
    )
    for rank in ranks:
        if rank != victim:
            assert_told(answers[rank], rank, world, victim, Failure("", "exchange", 0))
    ((error, text, seconds, found),) = results([answers[victim]])
    if len(smaller) == 1:  # it has what it asked for
        assert_equal(found, ring_worker.reference_gradients(packages("clip"), [4], [4], False))
    else:
        assert error == "RuntimeError" and "rank 2 of 3 failed waiting for rank 1 " in text, answers
        assert seconds <= TIMEOUT_S + GRACE_S


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_with_another_package_is_told_at_once(pool: Pool, names: dict[str, str], world: int) -> None:
    ranks, victim = WORLDS[world], VICTIM[world]
    renewed(pool, ranks)
    answers = pool.run(
        "struggle", ranks, each={victim: {"package": names["other"]}}, package=names["clip"], ranks=ranks
    )
    for error, text, seconds, found in results(answers):
        assert error == "RuntimeError" and "package digest differs" in text and not found, answers
        assert seconds <= GRACE_S, answers


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("place", ["exchange", "forward", "backward"])
def test_a_late_rank_changes_nothing(
    pool: Pool, packages: Packages, names: dict[str, str], place: str, world: int
) -> None:
    ranks, victim, rows = WORLDS[world], VICTIM[world], [4] * world
    renewed(pool, ranks)
    late = {"victim": victim, "act": "sleep", "place": place, "turn": 1, "seconds": TIMEOUT_S / 3}
    answers = results(pool.run("struggle", ranks, package=names["clip"], ranks=ranks, **late))
    assert all(not error and seconds >= TIMEOUT_S / 3 for error, _, seconds, _ in answers), answers
    truth = ring_worker.reference_gradients(packages("clip"), rows, rows, False)
    assert_equal(average([found for *_, found in answers]), truth)
