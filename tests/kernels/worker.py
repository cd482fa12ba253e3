"""A process in which Triton interprets kernels on the CPU, and the requests that checks travel in.

TRITON_INTERPRET is read when triton is imported, and changes it for the whole process: so one process of its own per
pytest worker, forked at its first interpreter test from the server of those that interpret.
"""

from __future__ import annotations

import base64
import gc
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from infcl_gen import processes
from tests.forks import SERVERS

TIMEOUT_S = 280.0


class Interpreter:
    """`interpreter(check, *arguments)` runs a check there; what it raises becomes an AssertionError here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._start()

    def __call__(self, check: Callable[..., Any], *arguments: Any) -> None:
        self._run(run, check, arguments)

    def apart(self, check: Callable[..., Any], *arguments: Any) -> None:
        """In a fork of the process, for kernels that may write where they must not: later checks do not suffer."""
        self._run(run_apart, check, arguments)

    def _run(self, how: Callable[..., str], check: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._worker.send({"call": base64.b64encode(pickle.dumps((how, check, arguments))).decode()})
        answer = self._worker.answer(TIMEOUT_S) or {"ended": f"{check.__name__} takes more than {TIMEOUT_S:.0f} s"}
        if "ended" in answer:
            self.close()
            self._start()
            raise AssertionError(f"the interpreter process ended: {answer['ended']}")
        if answer["failure"]:
            raise AssertionError(answer["failure"])

    def close(self) -> None:
        self._worker.kill()

    def _start(self) -> None:
        with mock.patch.object(processes, "_start", SERVERS.start):
            task, log = "tests.kernels.worker:serve", self.folder / f"interpreter{os.getpid()}.log"
            self._worker = processes.Worker(task, [str(self.folder)], log, {"TRITON_INTERPRET": "1"})


def serve(requests: Any, answer: Callable[..., None], folder: str) -> None:
    """The task of the process, which the server has made ready."""
    import torch

    from tests.kernels.packages import use_folder

    use_folder(Path(folder))
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # as in the process that runs the tests
    gc.set_threshold(50_000)
    while True:
        how, check, arguments = pickle.loads(base64.b64decode(requests.get()["call"]))
        answer(failure=how(check, arguments))


def run(check: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """What the check fails with, or nothing."""
    try:
        check(*arguments)
    except AssertionError as error:
        return str(error) or traceback.format_exc()
    except Exception:
        # Whatever it is: the parent fails the test with it, and this process goes on with the next.
        return f"not an assertion:\n{traceback.format_exc()}"
    return ""


def run_apart(check: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            with open(writer, "w") as answer:
                answer.write(run(check, arguments))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader) as answer:
        failure = answer.read()
    _, status = os.waitpid(child, 0)
    return f"its process ended with {os.waitstatus_to_exitcode(status)}" if status else failure
