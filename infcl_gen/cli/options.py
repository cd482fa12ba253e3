"""Options of commands, and what their values mean. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from infcl_gen.errors import InputError
from infcl_gen.files import check_folder

if TYPE_CHECKING:
    from infcl_gen.inputs.problem import Problem

MAX_RANKS = 64
PROBLEM = (
    *("loss", "batch_size", "keys", "dim", "devices", "nodes", "memory_budget"),
    *("dtype", "precision", "target", "device_profile", "cluster", "set"),
)


def together(*given: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """One decorator that adds all these options, in this order."""

    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(given):
            function = option(function)
        return function

    return apply


loss = click.option("--loss", metavar="NAME|FILE.py:NAME", help="Loss [clip].")
keys = click.option("--keys", metavar="N", help="Keys over all devices, if not as many as queries.")
dim = click.option("--dim", metavar="D", help="Embedding dimension.")
device = (
    click.option("--memory-budget", metavar="SIZE", help="Per device: 512MiB, 2GiB, or auto [auto]."),
    click.option("--dtype", metavar="bf16|fp16|fp32|fp64", help="Features [bf16]."),
    click.option("--precision", metavar="default|tf32|exact", help="Products of fp32 features [default]."),
    click.option("--target", metavar="auto|cpu|cuda|rocm", help="What the package runs on [auto]."),
    click.option("--device-profile", metavar="NAME|FILE.toml|auto", help="Device to plan for [auto]."),
    click.option("--cluster", metavar="FILE.toml", help="Nodes, devices, profile and links from a file."),
    click.option("--set", multiple=True, metavar="KEY=VALUE", help="Override a choice of the planner."),
)
problem = together(
    loss,
    click.option("--batch-size", metavar="N", help="Queries over all devices: 65536, 64k, 4M (k = 1024)."),
    keys,
    dim,
    click.option("--devices", metavar="N", help="Devices in all [1]."),
    click.option("--nodes", metavar="N", help="Nodes that hold them [1]."),
    *device,
)
common = together(
    click.option("--json", is_flag=True, help="One JSON object on stdout."),
    click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
    click.option("-v", "--verbose", is_flag=True, help="Log to stderr what happens; tracebacks of internal errors."),
    click.option("--config", metavar="FILE.toml", help="Flags from a file; flags given here win."),
)
directory = click.argument("directory", metavar="DIR")


class _Log(logging.Handler):
    """Log records as lines on the stderr of the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"infcl-gen: {self.format(record)}", err=True)


def settle(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags with those of `--config` filled in, and logging set up. Given flags win over the file's."""
    context = click.get_current_context()
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise InputError("the current folder was deleted; change to another one") from error
    if flags["config"] is not None:
        from infcl_gen.inputs.config import read_config
        from infcl_gen.inputs.overrides import parse_overrides

        config = read_config(flags["config"])
        if "set" in config and "set" in flags:
            merged = dict(parse_overrides(config["set"]).pairs) | dict(parse_overrides(flags["set"]).pairs)
            flags["set"] = tuple(f"{key}={value}" for key, value in merged.items())
        default = click.core.ParameterSource.DEFAULT
        given = {name for name in flags if context.get_parameter_source(name) is not default}
        if given & {"quiet", "verbose"}:
            given |= {"quiet", "verbose"}  # one of them given here, the other in the file
        for name, value in config.items():
            if name in flags and name != "set" and name not in given:
                flags[name] = value
    context.obj.update(json=flags["json"], verbose=flags["verbose"])
    if flags["quiet"] and flags["verbose"]:
        raise InputError("--quiet: contradicts --verbose; give one of them")
    logger = logging.getLogger("infcl_gen")
    logger.handlers = [_Log()]
    logger.setLevel(logging.INFO if flags["verbose"] else logging.WARNING)
    return flags


def problem_of(flags: Mapping[str, Any]) -> Problem:
    """The problem that flags describe."""
    from infcl_gen.inputs.problem import make_problem

    return make_problem(**{name: flags[name] for name in PROBLEM})


def directory_name(directory: str, flag: str = "DIR") -> str:
    """A folder that is there."""
    from infcl_gen.inputs.text import check_text, show

    check_text(flag, directory)
    if not os.path.isdir(directory):
        raise InputError(f"{flag}: {show(directory)} is not a folder; give one that infcl-gen generate wrote")
    return directory


def number(value: object, flag: str, default: float, most: float, what: str) -> float:
    """A number above 0, at most `most`."""
    from infcl_gen.inputs.text import show

    try:
        found = default if value is None else float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        found = math.nan
    if not 0 < found <= most:
        raise InputError(f"{flag}: {show(value)} is not a {what}; valid: above 0, at most {most:g}")
    return found


def count(value: object, flag: str, default: int, low: int, high: int) -> int:
    """A count within limits."""
    from infcl_gen.inputs.text import parse_count, show

    found = default if value is None else parse_count(value, flag)
    if not low <= found <= high:
        raise InputError(f"{flag}: {show(found)} is out of range; valid: {low} to {high}")
    return found


def ranks_of(value: object) -> int | None:
    return None if value is None else count(value, "--ranks", 1, 1, MAX_RANKS)


def counts(value: object, flag: str, high: int) -> list[int]:
    """The counts of a comma-separated text, or of a list from a configuration file; each once, in order."""
    return list(dict.fromkeys(count(part, flag, 0, 1, high) for part in _parts(value)))


def _parts(value: object) -> list[Any]:
    return value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]


def result_file(flag: str, value: str | None) -> Path | None:
    """A file to write at the end of a long run, if it can be written now."""
    from infcl_gen.inputs.text import check_text, show

    if value is None:
        return None
    path = Path(check_text(flag, value)).absolute()
    if path.is_dir():
        raise InputError(f"{flag}: {show(value)} is a folder; give a file in a folder of yours")
    check_folder(flag, path.parent)
    return path


def json_file(value: str | None) -> Path | None:
    """The file of --output, if it can be written now."""
    output = result_file("--output", value)
    if output is not None and output.suffix != ".json":
        raise InputError(f"--output: {output} must end in .json")
    return output


def targets(value: str | list[str] | None) -> list[str] | None:
    """The architectures of --aot."""
    from infcl_gen.hardware import load_profile, profile_names
    from infcl_gen.inputs.text import show

    if value is None:
        return None
    names = [str(name).strip() for name in _parts(value)]
    known = sorted({profile.arch for profile in map(load_profile, profile_names()) if profile.vendor != "cpu"})
    for name in names:
        if name not in known:
            raise InputError(f"--aot: {show(name)} is unknown; valid: {', '.join(known)}")
    return list(dict.fromkeys(names))


def command_line(command: str, flags: Mapping[str, Any], names: Sequence[str]) -> str:
    """The command line that gives the same: what was given, wherever it came from."""

    from infcl_gen.inputs.overrides import parse_overrides
    from infcl_gen.inputs.text import flag_name

    words = ["infcl-gen", command]
    for name in names:
        value = flags[name]
        if name == "set" and value:
            value = [f"{key}={word}" for key, word in parse_overrides(value).pairs]
        elif isinstance(value, list) and name != "package":
            value = ",".join(map(str, value))
        for part in () if value is None else value if isinstance(value, list | tuple) else (value,):
            words += [flag_name(name), str(part)]
    return shlex.join(words)


@contextlib.contextmanager
def progress(flags: Mapping[str, Any]) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr if that is a terminal; log records otherwise."""
    if flags["quiet"] or not sys.stderr.isatty():
        log = logging.getLogger("infcl_gen")
        yield lambda step, done, total: log.info("%s %d of %d", step, done, total)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("start", total=None)
        yield lambda step, done, total: bar.update(task, description=step, completed=done, total=total)
