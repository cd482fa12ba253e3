"""Workers and ranks: what they answer, how their ends are told, and that nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from infcl_gen.processes import Answer, ProcessError, Requests, Seat, Worker, run_ranks

ROOT = Path(__file__).resolve().parent.parent
TASKS = "tests.test_processes"


def report(argument: Any, seat: Seat) -> dict[str, Any]:
    """A rank that says who it is, after what it was told to do."""
    print("printed, not answered")
    does = argument.get(str(seat.rank))
    if does == "fail":
        if seat.rank:
            while not (seat.folder / "log0").stat().st_size:  # so that another has written, too
                time.sleep(0.02)
        raise ValueError("planted")
    if does == "abort":
        os.abort()
    if does == "leave":
        os._exit(0)
    if does == "hang":
        time.sleep(1000)
    if "note" in argument:
        Path(argument["note"], str(seat.rank)).write_text(str(os.getpid()))
        time.sleep(1000)
    return {"rank": seat.rank, "ranks": seat.ranks, "mode": os.environ["TRITON_INTERPRET"]}


def echo(requests: Requests, answer: Answer, word: str) -> None:
    print("printed, not answered")
    while True:
        answer(got=requests.get(), word=word)


def fork(requests: Requests, answer: Answer, note: str) -> None:
    """Ends, and leaves a child that holds its pipes."""
    Path(note).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    os._exit(3)


def ended(pid: int) -> bool:
    """Whether it has ended within a while; a zombie has."""
    status, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 10.0
    while time.monotonic() < deadline:
        if not status.exists() or status.read_text().split()[2] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_every_rank_gives_its_result() -> None:
    found = run_ranks(f"{TASKS}:report", {}, 3, 60.0, {"TRITON_INTERPRET": "1"})
    assert found == [{"rank": rank, "ranks": 3, "mode": "1"} for rank in range(3)]
    assert run_ranks(f"{TASKS}:report", {}, 1, 60.0)[0]["mode"] == "0"


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("fail", "^rank 1 of 2: exit code 1: ValueError: planted$"),
        ("abort", "^rank 1 of 2: killed by signal 6"),
        ("leave", "^rank 1 of 2: exit code 0"),
    ],
)
def test_a_rank_that_fails_is_named(does: str, message: str) -> None:
    with pytest.raises(ProcessError, match=message):
        run_ranks(f"{TASKS}:report", {"1": does, "0": "hang"}, 2, 60.0)


def test_ranks_that_hang_are_ended() -> None:
    started = time.monotonic()
    with pytest.raises(ProcessError, match=r"^not finished after 5 s: printed"):
        run_ranks(f"{TASKS}:report", {"0": "hang"}, 1, 5.0)
    assert time.monotonic() - started < 20.0


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    argument = {"note": str(tmp_path)}
    code = f"from infcl_gen.processes import run_ranks; run_ranks('{TASKS}:report', {argument}, 2, 60)"
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    notes = [tmp_path / "0", tmp_path / "1"]
    deadline = time.monotonic() + 60.0
    while not all(note.exists() and note.read_text() for note in notes) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert all(ended(int(note.read_text())) for note in notes)


def test_a_worker_answers_until_it_is_killed(tmp_path: Path) -> None:
    worker = Worker(f"{TASKS}:echo", ["word"], tmp_path / "log")
    for number in range(2):
        worker.send({"number": number})
        assert worker.answer(60.0) == {"got": {"number": number}, "word": "word"}
    assert worker.answer(0.05) is None
    worker.kill()
    assert worker.answer(60.0) == {"ended": "killed by signal 9: printed, not answered"}
    assert "printed" in (tmp_path / "log").read_text()


def test_a_worker_that_has_ended_leaves_nobody_behind(tmp_path: Path) -> None:
    """Its answer does not wait for what it has started either, which may hold its pipe."""
    note = tmp_path / "child"
    worker = Worker(f"{TASKS}:fork", [str(note)], tmp_path / "log")
    started = time.monotonic()
    assert worker.answer(50.0) == {"ended": "exit code 3: it wrote nothing"}
    assert time.monotonic() - started < 30.0
    worker.kill()
    assert ended(int(note.read_text()))
