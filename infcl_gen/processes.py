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

Requests = queue.SimpleQueue[dict[str, Any]]
Answer = Callable[..., None]


class ProcessError(ToolchainError):
    """A rank ended without a result, or in too long a time."""


class Worker:
    """A process spoken to by lines of JSON. It ends when it is killed, and when this process ends in any way."""

    def __init__(self, task: str, arguments: Sequence[str], log: Path) -> None:
        with log.open("wb") as output:
            self._popen = _start(["serve", task, *arguments], subprocess.PIPE, output)
        self._buffer = b""

    def send(self, request: dict[str, Any]) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: `answer` says so
            self._popen.stdin.write(json.dumps(request).encode() + b"\n")
            self._popen.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Its next answer; None after `timeout_s` without one; {"ended": how} if it has ended."""
        assert self._popen.stdout is not None
        deadline, pipe = time.monotonic() + timeout_s, self._popen.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            # Asked before the pipe is looked at, which then holds all that an ended process has written.
            exited = _exited(self._popen)
            ready = select.select([pipe], [], [], 0.0 if exited else min(left, 1.0))[0]
            if not ready and not exited:
                continue
            part = os.read(pipe, 1 << 16) if ready else b""
            if not part:
                gone = time.monotonic() + EXIT_S
                while not _exited(self._popen) and time.monotonic() < gone:
                    time.sleep(0.01)
                self.kill()
                return {"ended": _ending(self._popen.returncode)}
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        values: dict[str, Any] = json.loads(line)
        return values

    def kill(self) -> None:
        """End it and whatever it started."""
        _kill(self._popen)


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
    with tempfile.TemporaryDirectory(prefix="infcl-gen-ranks-") as scratch:
        folder = Path(scratch).resolve()
        (folder / "argument.json").write_text(json.dumps(argument))
        running: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                with (folder / f"log{rank}").open("wb") as output:
                    words = ["rank", task, str(rank), str(ranks), str(folder)]
                    running.append(_start(words, output, output, environment or {}))
            failure = _wait(running, timeout_s)
        finally:
            for process in running:
                _kill(process)
        logs = [folder / f"log{rank}" for rank in range(ranks)]
        if failure is not None:
            rank, how = failure
            raise ProcessError(f"{how}: {last_line(*logs[rank:], *logs[:rank])}")
        try:
            return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(ranks)]
        except (OSError, ValueError) as error:  # a package may end its process, and call that success
            raise ProcessError(f"no result of {ranks} ranks: {last_line(*logs)}") from error


def last_line(*logs: Path) -> str:
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


def _start(
    words: Sequence[str], stdout: Any, stderr: Any, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "infcl_gen.processes", *words],
        stdin=subprocess.PIPE,  # closed when this process ends: the other end then ends as well
        stdout=stdout,
        stderr=stderr,
        env={**own_environment(), **(environment or {})},
        start_new_session=True,  # Ctrl-C is for the parent, which then ends them
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> tuple[int, str] | None:
    """None once all have ended well, else a rank and what went wrong. One failure ends the wait."""
    deadline = time.monotonic() + timeout_s
    while True:
        ended = [_exited(process) for process in processes]
        failed = [rank for rank, process in enumerate(processes) if ended[rank] and _code(process)]
        if failed:  # all of them: one that dies makes others fail
            codes = (f"rank {rank} of {len(processes)}: {_ending(_code(processes[rank]))}" for rank in failed)
            return failed[0], ", ".join(codes)
        if all(ended):
            return None
        if time.monotonic() > deadline:
            return 0, f"not finished after {timeout_s:g} s"
        time.sleep(POLL_S)


def _exited(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended. It stays a zombie, so that its process group, which may live on, keeps its number."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _code(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process that has ended, negative for a signal."""
    _kill(process)
    return process.returncode


def _ending(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ------------------------------------------------------------------------------------- in the started process


def main() -> None:
    kind, task, *arguments = sys.argv[1:]
    requests: Requests = queue.SimpleQueue()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a package prints is not an answer
    sys.stdout = sys.stderr
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    module, _, name = task.partition(":")
    function = getattr(importlib.import_module(module), name)
    if kind == "serve":

        def answer(**values: Any) -> None:
            print(json.dumps(values, allow_nan=False), file=answers, flush=True)

        function(requests, answer, *arguments)
    else:
        rank, ranks, folder = arguments
        _sit(function, Seat(int(rank), int(ranks), Path(folder)))


def _sit(function: Callable[[Any, Seat], Any], seat: Seat) -> None:
    code = 1
    try:
        result = function(json.loads((seat.folder / "argument.json").read_text()), seat)
        (seat.folder / f"result{seat.rank}.json").write_text(json.dumps(result))
        if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():
            distributed.barrier()  # others may still need this rank
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may abort, and NCCL's wait, where a group is torn down after a peer is gone


def _read(requests: Requests) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    if os.getsid(0) == os.getpid():  # with the compilers that it started
        with contextlib.suppress(OSError):
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
