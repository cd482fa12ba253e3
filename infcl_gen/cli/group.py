"""The group of commands: every error becomes one line and an exit code (see `infcl_gen.errors`).

Results go to stdout (with `--json` as one object), messages to stderr. `-v` adds the traceback of an internal error.
"""

import contextlib
import errno
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import click

from infcl_gen.errors import InfclError, InfeasibleError, on_command_line
from infcl_gen.inputs.text import clean
from infcl_gen.version import __version__

SCHEMA_VERSION = 1
INTERRUPTED = 130
_OPTIONAL = ("torch", "triton")
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of writing, for example to stdout


def show(flags: Mapping[str, Any], result: Mapping[str, Any], text: Callable[[], str]) -> None:
    """Print a command's result: as one object with --json, else as text, unless --quiet is given."""
    if flags["json"]:
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **result}, indent=2, default=str))
        click.get_current_context().obj["json"] = False  # a later error must not print a second object
    elif not flags["quiet"]:
        click.echo(text())


class _Group(click.Group):
    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> NoReturn:
        """Run a command and exit. click's own `main` prints several lines and swallows interrupts and broken pipes."""
        ours = args is None and threading.current_thread() is threading.main_thread()  # the process runs this only
        if ours:  # SIGTERM interrupts too: workers end, and temporary folders are removed
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            code = self._outcome(list(sys.argv[1:] if args is None else args))
            if ours:
                _ignore_interrupts()
        except KeyboardInterrupt:  # after the command's outcome
            if ours:
                _ignore_interrupts()
            click.echo("infcl-gen: error: interrupted", err=True)
            code = INTERRUPTED
        sys.exit(code)

    def _outcome(self, arguments: list[str]) -> int:
        """Run a command, report its error if any, and return its exit code."""
        shown = {"json": "--json" in arguments, "verbose": bool({"-v", "--verbose"} & set(arguments))}
        started = time.monotonic()
        code = 1
        reader = on_command_line.set(True)
        try:
            try:
                with self.make_context("infcl-gen", arguments, obj=shown) as context:
                    self.invoke(context)
                code = 0
                logging.getLogger("infcl_gen").info("finished in %.2f s", time.monotonic() - started)
            except BaseException as error:
                code = _report(error, shown["json"], shown["verbose"])
            if sys.stdout is not None:  # the parent process may have closed it
                sys.stdout.flush()
        except OSError:  # the reader (head, less) has ended, or the disk is full: drop the rest of the output
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = code or 1
        finally:
            on_command_line.reset(reader)
        return code


def _ignore_interrupts() -> None:
    """After a command's outcome, an interrupt must not change the exit code."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


@click.group(
    cls=_Group,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """A compiler for contrastive losses: plans and writes loss packages specialised to one problem.

    Exit codes: 0 ok, 1 internal error, 2 invalid input, 3 no plan fits the budget, 4 missing hardware or
    toolchain, 5 verification failed, 6 lock timeout, 130 interrupted.
    """


def _report(error: BaseException, as_json: bool, verbose: bool) -> int:
    """Print `error` as one line, `as_json` also as an object on stdout, and return its exit code."""
    details: dict[str, Any] = {}
    if isinstance(error, BrokenPipeError):
        raise error
    if isinstance(error, click.exceptions.Exit):  # --help and --version
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | click.Abort):
        code, message = INTERRUPTED, "interrupted"
    elif isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        code = 2
        message = f"{error.format_message().rstrip('.')}; see {context.command_path if context else 'infcl-gen'} --help"
    elif isinstance(error, InfclError):
        code, message = error.exit_code, str(error)
        if isinstance(error, InfeasibleError):
            details = {"smallest_budget_bytes": error.smallest_budget_bytes, "largest_batch": error.largest_batch}
    elif isinstance(error, OSError) and error.errno in _UNWRITTEN and error.filename is None:
        code, message = 2, f"writing the result failed ({error.strerror}); make room, or write elsewhere"
    elif isinstance(error, ImportError) and (error.name or "").split(".")[0] in _OPTIONAL:
        code, message = 4, f"{error.name} is not installed here, and this command needs it; see infcl-gen doctor"
    elif isinstance(error, Exception):
        if verbose:
            traceback.print_exception(error, file=sys.stderr)
        hint = "" if verbose else " (-v shows where)"
        code, message = 1, f"internal error: {type(error).__name__}: {error}{hint}"
    else:
        raise error  # SystemExit
    message = clean(" ".join(message.split()))
    if as_json:
        payload = {"error": {"kind": type(error).__name__, "exit_code": code, "message": message, **details}}
        with contextlib.suppress(OSError):  # the error may be a full disk behind stdout
            click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **payload}, indent=2))
    click.echo(f"infcl-gen: error: {message}", err=True)
    return code
