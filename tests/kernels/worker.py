"""A process in which Triton interprets kernels on the CPU, and the pipe that checks travel through.

TRITON_INTERPRET is read when triton is imported, and changes it for the whole process: so one process of its own per
pytest worker, started at its first interpreter test.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
        try:
            self._pipe.send((how, check, arguments))
            if not self._pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"{check.__name__} takes more than {TIMEOUT_S:.0f} s")
            failure = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError, TimeoutError) as error:
            self.close()
            code = self._process.exitcode
            self._start()
            raise AssertionError(f"the interpreter process ended with {code}: {error!r}") from None
        if failure:
            raise AssertionError(failure)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            self._process = context.Process(target=main, args=(theirs, self.folder), daemon=True)
            self._process.start()
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
        theirs.close()


def main(pipe: Connection, folder: Path) -> None:
    import torch

    from tests.imports import quicken
    from tests.kernels.interpreter import accelerate
    from tests.kernels.packages import use_folder

    use_folder(folder)
    quicken()
    torch.set_num_threads(1)
    accelerate()
    os.fsync = lambda handle: None  # as in the process that runs the tests
    gc.freeze()  # what was imported: a collection took 0.3 s
    gc.set_threshold(50_000)
    while True:
        try:
            how, check, arguments = pipe.recv()
        except EOFError:
            break
        pipe.send(how(check, arguments))
    os._exit(0)  # an orderly end frees millions of objects first, in more than 5 s


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
