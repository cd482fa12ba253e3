"""Processes: workers that answer line by line, and ranks that run one function each.

    worker = Worker("module:function", [ARGUMENT, ...], log)      runs function(requests, answer, *arguments)
    run_ranks("module:function", argument, ranks, timeout_s)      runs function(argument, seat) in each rank

Requests, answers, arguments and results are JSON. A process that crashes or hangs loses only its own result. A process
whose parent is gone ends by itself.
"""

import contextlib
import datetime
import json
import os
import pkgutil
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

EXIT_S = 5.0  # a worker's time to exit once its pipe is closed
POLL_S = 0.02
FAILED_S = 0.2  # wait after the first failed rank, for others that fail with it

Requests = queue.SimpleQueue[dict[str, Any]]
Answer = Callable[..., None]
Progress = Callable[[str, int, int], None]  # is told what begins, how much is done, and of how much


class ProcessError(ToolchainError):
    """A rank ended without a result, or took too long."""


class Worker:
    """A process that gets requests and gives answers as lines of JSON. It ends at the latest with this process.

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
        with contextlib.suppress(OSError):  # if it has ended, `answer` says so
            self._popen.stdin.write(json.dumps(request).encode() + b"\n")
            self._popen.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """The next answer; None after `timeout_s`; {"ended": how, and the log's last line} if the worker has ended."""
        assert self._popen.stdout is not None
        deadline, pipe = time.monotonic() + timeout_s, self._popen.stdout.fileno()
        while b"\n" not in self._buffer:
            # Checked before the pipe, which then holds everything that an ended process has written.
            exited, left_s = self._exited(), deadline - time.monotonic()
            readable, _, _ = select.select([pipe], [], [], 0.0 if exited else min(max(left_s, 0.0), 1.0))
            if not readable and not exited:
                if left_s > 0:
                    continue
                return None
            part = os.read(pipe, 1 << 16) if readable else b""
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
        return dict(json.loads(line))

    def kill(self) -> None:
        """End the worker and all processes that it started."""
        if self._popen.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def _exited(self) -> bool:
        # WNOWAIT leaves a zombie, so that `kill` still finds the process group by this number.
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return self._popen.returncode is not None or os.waitid(os.P_PID, self._popen.pid, options) is not None


@dataclass(frozen=True)
class Seat:
    rank: int
    ranks: int
    folder: Path  # scratch, shared by all ranks

    def join_group(self, device: str, timeout_s: float) -> None:
        """Make the default process group: NCCL for "cuda", with GPU r for rank r; gloo for "cpu"."""
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
    """The task's result of each rank; `environment` is added to this process's own.

    A rank that fails ends all. Raises ProcessError for failed ranks, with how each ended and its last line, and after
    `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="infcl-gen-ranks-") as scratch, contextlib.ExitStack() as running:
        folder = Path(scratch).resolve()
        logs = [folder / f"log{rank}" for rank in range(ranks)]
        waiting: dict[int, Worker] = {}
        for rank, log in enumerate(logs):
            words = [task, str(rank), str(ranks), str(folder)]
            worker = waiting[rank] = Worker("infcl_gen.processes:sit", words, log, environment)
            running.callback(worker.kill)
            worker.send({"argument": argument})
        results: dict[int, Any] = {}
        failing = False
        while True:
            found = {rank: answer for rank, worker in waiting.items() if (answer := worker.answer(0.0))}
            failed = [f"rank {rank} of {ranks}: {each['ended']}" for rank, each in found.items() if "ended" in each]
            if failed and failing:
                raise ProcessError("; ".join(failed))
            # Collected once more: a rank that dies makes others fail, which may be seen to end first.
            failing = bool(failed)
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
    """Of the first log that is not empty: the last line that names an error, else the last line."""
    for log in logs:
        written = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in written if "error" in line.lower()]
        if written:
            return (errors or written)[-1][:500]
    return "it wrote nothing"


def own_environment() -> dict[str, str]:
    """This process's environment, in which another Python finds infcl_gen and does not interpret kernels."""
    source = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}


def _start(words: Sequence[str], log: Any, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "infcl_gen.processes", *words],
        stdin=subprocess.PIPE,  # closed when this process ends, which ends the worker
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches the parent only, which ends its workers
    )


# ------------------------------------------------------------------------------------- in the started process


def main() -> None:
    """Run the task of the command line with its arguments."""
    task, *arguments = sys.argv[1:]
    requests: Requests = queue.SimpleQueue()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a package prints is no answer
    sys.stdout = sys.stderr
    threading.Thread(target=_read, args=(requests,), daemon=True).start()

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    pkgutil.resolve_name(task)(requests, answer, *arguments)


def sit(requests: Requests, answer: Answer, task: str, rank: str, ranks: str, folder: str) -> None:
    """The task of a rank: answer the result, then wait to be killed, since other ranks may still need this one."""
    try:
        seat = Seat(int(rank), int(ranks), Path(folder))
        answer(result=pkgutil.resolve_name(task)(requests.get()["argument"], seat))
        threading.Event().wait()
    except Exception:
        traceback.print_exc()
    os._exit(1)  # a teardown after a peer is gone may abort in gloo's threads and hang in NCCL's


def _read(requests: Requests) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    if os.getsid(0) == os.getpid():  # ends compilers that this process started
        with contextlib.suppress(OSError):
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
