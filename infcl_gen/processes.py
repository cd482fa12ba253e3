"""Processes, launched in one way: workers that answer line by line, and ranks that run one function each.

    worker = Worker("module:function", [ARGUMENT, ...], log)      runs function(requests, answer, *arguments)
    run_ranks("module:function", argument, ranks, timeout_s)      runs function(argument, seat) in each rank

Requests, answers, arguments and results are JSON. A process that crashes or hangs takes nothing with it but its own
result, and a process whose parent is gone ends by itself.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infcl_gen.errors import ToolchainError

EXIT_S = 5.0  # from a worker's last word to its end
POLL_S = 0.02
FAILED_S = 0.2  # from the end of the first rank that fails to that of others

Requests = queue.SimpleQueue[dict[str, Any]]
Answer = Callable[..., None]


class ProcessError(ToolchainError):
    """A rank ended without a result, or in too long a time."""


class Worker:
    """A process spoken to by lines of JSON. It ends when it is killed, and when this process ends in any way.

    `environment` is added to this process's own; what the worker prints goes to `log`.
    """

    def __init__(
        self, task: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        with log.open("wb") as output:
            self._popen = _start([task, *arguments], output, {**own_environment(), **(environment or {})})
        self._buffer = b""

    def send(self, request: dict[str, Any]) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: `answer` says so
            self._popen.stdin.write(json.dumps(request).encode() + b"\n")
            self._popen.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Its next answer; None after `timeout_s` without one; {"ended": how, and its last line} if it has ended."""
        assert self._popen.stdout is not None
        deadline, pipe = time.monotonic() + timeout_s, self._popen.stdout.fileno()
        while b"\n" not in self._buffer:
            # Asked before the pipe is looked at, which then holds all that an ended process has written.
            exited, left_s = self._exited(), deadline - time.monotonic()
            if select.select([pipe], [], [], 0.0 if exited else min(max(left_s, 0.0), 1.0))[0]:
                part = os.read(pipe, 1 << 16)
            elif exited:
                part = b""
            elif left_s > 0:
                continue
            else:
                return None
            if not part:
                gone = time.monotonic() + EXIT_S
                while not self._exited() and time.monotonic() < gone:
                    time.sleep(POLL_S)
                self.kill()
                code = self._popen.returncode
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                return {"ended": f"{how}: {_last_line(self._log)}"}
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        values: dict[str, Any] = json.loads(line)
        return values

    def kill(self) -> None:
        """End it and whatever it started."""
        if self._popen.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def _exited(self) -> bool:
        """Whether it has ended. It stays a zombie, so that its process group, which may live on, keeps its number."""
        ended = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return self._popen.returncode is not None or os.waitid(os.P_PID, self._popen.pid, ended) is not None


@dataclass(frozen=True)
class Seat:
    """Which of `ranks` processes this is, and the scratch folder that they share."""

    rank: int
    ranks: int
    folder: Path

    def join_group(self, device: str, timeout_s: float) -> None:
        """Make the default process group: NCCL for "cuda", where rank r uses GPU r, gloo for "cpu"."""
        import torch
        import torch.distributed as dist

        place = torch.device("cuda", self.rank) if device == "cuda" else None
        if place is not None:
            torch.cuda.set_device(place)
        dist.init_process_group(
            "gloo" if place is None else "nccl", init_method=(self.folder / "store").as_uri(), rank=self.rank,
            world_size=self.ranks, timeout=datetime.timedelta(seconds=timeout_s), device_id=place,
        )  # fmt: skip


def run_ranks(
    task: str, argument: Any, ranks: int, timeout_s: float, environment: Mapping[str, str] | None = None
) -> list[Any]:
    """What the task returned in each rank; `environment` is added to this process's own.

    The first rank that fails ends all. Raises ProcessError, which names it, how it ended and its last line; or the
    timeout.
    """
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="infcl-gen-ranks-") as scratch, contextlib.ExitStack() as running:
        folder = Path(scratch).resolve()
        logs = [folder / f"log{rank}" for rank in range(ranks)]
        waiting: dict[int, Worker] = {}
        for rank, log in enumerate(logs):
            seat = [task, str(rank), str(ranks), str(folder)]
            waiting[rank] = Worker("infcl_gen.processes:sit", seat, log, environment)
            running.callback(waiting[rank].kill)
            waiting[rank].send({"argument": argument})
        results: dict[int, Any] = {}
        failing = False
        while True:
            found = {rank: answer for rank, worker in waiting.items() if (answer := worker.answer(0.0))}
            failed = [f"rank {rank} of {ranks}: {each['ended']}" for rank, each in found.items() if "ended" in each]
            if failed and failing:
                raise ProcessError("; ".join(failed))
            failing = bool(failed)  # then others, too: one that dies makes others fail, which may be seen to end first
            for rank, answer in found.items():
                if "result" in answer:
                    results[rank] = answer["result"]
                    del waiting[rank]
            if not waiting:
                return [results[rank] for rank in range(ranks)]
            if time.monotonic() > deadline:
                raise ProcessError(f"not finished after {timeout_s:g} s: {_last_line(*logs)}")
            time.sleep(FAILED_S if failing else POLL_S)


def _last_line(*logs: Path) -> str:
    """The last line that names an error, else the last one, of the first log that is not empty."""
    for log in logs:
        written = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in written if "error" in line.lower()]
        if written:
            return (errors or written)[-1][:500]
    return "it wrote nothing"


def own_environment() -> dict[str, str]:
    """This process's environment, with which another Python finds infcl_gen, and kernels are not interpreted."""
    source = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}


def _start(words: Sequence[str], log: Any, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "infcl_gen.processes", *words],
        stdin=subprocess.PIPE,  # closed when this process ends: the other end then ends as well
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the parent, which then ends them
    )


# ------------------------------------------------------------------------------------- in the started process


def main() -> None:
    """Run the task that the command line names, with its arguments."""
    task, *arguments = sys.argv[1:]
    requests: Requests = queue.SimpleQueue()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a package prints is not an answer
    sys.stdout = sys.stderr
    threading.Thread(target=_read, args=(requests,), daemon=True).start()

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    _function(task)(requests, answer, *arguments)


def sit(requests: Requests, answer: Answer, task: str, rank: str, ranks: str, folder: str) -> None:
    """The task of a rank: answers its result, then waits to be killed, since others may still need this rank."""
    try:
        result = _function(task)(requests.get()["argument"], Seat(int(rank), int(ranks), Path(folder)))
        answer(result=result)
        threading.Event().wait()
    except Exception:
        traceback.print_exc()
    os._exit(1)  # gloo's threads may abort, and NCCL's wait, where a group is torn down after a peer is gone


def _function(task: str) -> Callable[..., Any]:
    module, _, name = task.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _read(requests: Requests) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    if os.getsid(0) == os.getpid():  # with the compilers that it started
        with contextlib.suppress(OSError):
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
