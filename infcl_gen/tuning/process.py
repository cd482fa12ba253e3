"""Measuring in processes that can be killed alone: both ends of their conversation in lines of JSON.

A worker that crashes or hangs takes nothing with it but its own answer, and one whose parent is gone ends by itself.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.emission.package import lock

EXIT_S = 5.0  # from a worker's last word to its end

Requests = queue.SimpleQueue[dict[str, Any]]
Answer = Callable[..., None]


class Process:
    """A worker, spoken to by lines of JSON. It ends when it is killed, and when this process ends in any way."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"},
                start_new_session=True,  # Ctrl-C is for the parent, which then ends them
            )
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
            exited = (
                self._exited()
            )  # asked first: what it has written before that is in the pipe when it is looked at
            ready = select.select([pipe], [], [], 0.0 if exited else min(left, 1.0))[0]
            if not ready and not exited:
                continue
            part = os.read(pipe, 1 << 16) if ready else b""
            if not part:
                gone = time.monotonic() + EXIT_S
                while not self._exited() and time.monotonic() < gone:
                    time.sleep(0.01)
                self.kill()
                code = self._popen.returncode
                return {"ended": f"killed by signal {-code}" if code and code < 0 else f"exit code {code}"}
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        values: dict[str, Any] = json.loads(line)
        return values

    def _exited(self) -> bool:
        """Whether it has ended. It stays a zombie, so that its process group, which may live on, keeps its number."""
        if self._popen.returncode is not None:
            return True
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self._popen.pid, flags) is not None

    def kill(self) -> None:
        """End it and whatever it started."""
        if self._popen.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()


def serve(work: Callable[[Requests, Answer], None]) -> None:
    """The worker's end: runs `work` with what is asked on stdin and a way to answer; ends when stdin is closed.

    Also in the middle of work: a parent that is gone leaves nobody behind.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a package prints is not an answer

    def answer(**values: Any) -> None:
        print(json.dumps(values, allow_nan=False), file=answers, flush=True)

    requests: Requests = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    work(requests, answer)


@contextlib.contextmanager
def timing_lock(target: str, timeout_s: float) -> Iterator[None]:
    """This machine's turn to time on its devices of a target: two runs at once would both measure nonsense."""
    file = Path(tempfile.gettempdir()) / f"infcl_gen-{os.getuid()}" / f"timing-{target}.lock"
    with lock(file, "timing", timeout_s):
        yield


def last_line(log: Path) -> str:
    """The last line of a log that names an error, else the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it wrote nothing"])[-1]


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory, of a device or of the host, is used up."""
    import torch

    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _read(requests: Requests) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    if os.getsid(0) == os.getpid():  # with the compilers that it started
        with contextlib.suppress(OSError):
            os.killpg(0, signal.SIGKILL)
    os._exit(1)
