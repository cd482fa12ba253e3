"""The errors of infcl_gen, each with the exit code of the command line.

Messages say what was wrong, where, and what would be valid. They name flags ("--batch-size"), which `in_python_words`
turns into keywords ("batch_size") for callers in Python. Any other exception is a defect of the program (exit code 1).
"""

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar

on_command_line: ContextVar[bool] = ContextVar("on_command_line", default=False)  # the reader has typed flags


class InfclError(Exception):
    """Base of all errors meant for the user."""

    exit_code = 1


class InputError(InfclError):
    """A flag, a file or an argument is invalid; the message names it."""

    exit_code = 2


class InfeasibleError(InfclError):
    """No plan fits the memory budget.

    `smallest_budget_bytes` is feasible for the same problem, `largest_batch` (global queries) for the same budget; None
    where there is none.
    """

    exit_code = 3

    def __init__(
        self, message: str, smallest_budget_bytes: int | None = None, largest_batch: int | None = None
    ) -> None:
        super().__init__(message)
        self.smallest_budget_bytes = smallest_budget_bytes
        self.largest_batch = largest_batch


class ToolchainError(InfclError):
    """Hardware, a library or a compiler that the command needs is missing or too old."""

    exit_code = 4


class VerificationError(InfclError):
    """A generated package is not what it should be, or its numbers are wrong."""

    exit_code = 5


class LockTimeoutError(InfclError):
    """Another process held a lock for too long."""

    exit_code = 6


@contextlib.contextmanager
def in_python_words() -> Iterator[None]:
    """Errors that pass name keywords instead of flags, except on the command line and in commands (infcl-gen ...)."""
    try:
        yield
    except InfclError as error:
        if error.args:
            error.args = (in_readers_words(str(error.args[0])), *error.args[1:])
        raise


def in_readers_words(text: str) -> str:
    """A message that names flags, for who reads it."""
    flags = r"infcl-gen [^;,]*|(?<![\w-])--([a-z][a-z-]*)"
    return text if on_command_line.get() else re.sub(flags, _keyword, text)


def _keyword(found: re.Match[str]) -> str:
    return found[1].replace("-", "_") if found[1] else found[0]
