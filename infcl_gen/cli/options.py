"""Options of commands, and how their values are read. Heavy imports wait until a command needs them."""

import contextlib
import functools
import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from infcl_gen.cli.group import main
from infcl_gen.errors import InputError
from infcl_gen.files import check_folder
from infcl_gen.inputs.overrides import parse_overrides
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.inputs.text import check_integer, check_text, flag_name, parse_count, read_toml, show, suggestion

MAX_RANKS = 64

# The flags that a configuration file may give, with the types of their values.
FLAGS: dict[str, Any] = {}
COUNT = int | str
COUNTS = int | str | list[int | str]
NUMBER = int | float | str
NAMES = str | list[str]
SETTINGS = dict[str, int | str] | list[str]

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


def option(names: str, metavar: str | None, help_text: str, kind: Any = str) -> Option:
    """A flag of the command line, and of a configuration file with a value of type `kind`."""
    name = names.rpartition("--")[2].replace("-", "_")
    FLAGS[name] = FLAGS.get(name, kind) | kind
    form: dict[str, Any] = {"is_flag": True} if kind is bool else {"multiple": kind in (list[str], SETTINGS)}
    return click.option(*names.split(), metavar=metavar, help=help_text, **form)


loss = option("--loss", "NAME|FILE.py:NAME", "Loss [clip].")
batch_size = option("--batch-size", "N", "Queries over all devices: 65536, 64k, 4M (k = 1024).", COUNT)
keys = option("--keys", "N", "Keys over all devices, if not as many as queries.", COUNT)
dim = option("--dim", "D", "Embedding dimension.", COUNT)
devices = option("--devices", "N", "Devices in all [1].", COUNT)
nodes = option("--nodes", "N", "Nodes that hold them [1].", COUNT)
device = (
    option("--memory-budget", "SIZE", "Per device: 512MiB, 2GiB, or auto [auto].", COUNT),
    option("--dtype", "bf16|fp16|fp32|fp64", "Features [bf16]."),
    option("--precision", "default|tf32|exact", "Products of fp32 features [default]."),
    option("--frozen", "none|query|key", "The side that needs no gradient [none]."),
    option("--prefixes", "D1,D2:W2,...,D", "Add up the loss of so many first columns of the features [D]."),
    option("--renormalise", None, "Similarities of each prefix are cosines of its columns.", bool),
    option("--negatives", "H", "Negatives of each query, of losses that have them [1].", COUNT),
    option("--target", "auto|cpu|cuda|rocm", "What the package runs on [auto]."),
    option("--device-profile", "NAME|FILE.toml|auto", "Device to plan for [auto]."),
    option("--cluster", "FILE.toml", "Nodes, devices, profile and links from a file."),
    option("--set", "KEY=VALUE", "Override a choice of the planner.", SETTINGS),
)
problem = (loss, batch_size, keys, dim, devices, nodes, *device)
PROBLEM = tuple(FLAGS)
html = option("--html", "FILE", "Write a page with figures to this .html file.")
common = (
    option("--json", None, "One JSON object on stdout.", bool),
    option("-q --quiet", None, "Print errors only.", bool),
    option("-v --verbose", None, "Log to stderr what happens; tracebacks of internal errors.", bool),
    click.option("--config", metavar="FILE.toml", help="Flags from a file; flags given here win."),
)
directory = click.argument("directory", metavar="DIR")


def command(*given: Option) -> Callable[[Callable[[dict[str, Any]], None]], click.Command]:
    """Makes a function of settled flags a command of the group, with these options and the common ones."""

    def apply(function: Callable[[dict[str, Any]], None]) -> click.Command:
        @functools.wraps(function)
        def run(**flags: Any) -> None:
            function(settle(flags))

        options: Any = run
        for each in reversed((*given, *common)):
            options = each(options)
        return main.command()(options)

    return apply


def settle(flags: dict[str, Any]) -> dict[str, Any]:
    """Add the flags of `--config`, where the command line does not give them, and set up logging."""
    context = click.get_current_context()
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise InputError("the current folder was deleted; change to another one") from error
    if flags["config"] is not None:
        config = read_config(flags["config"])
        if "set" in config and "set" in flags:
            merged = dict(parse_overrides(config.pop("set")).pairs) | dict(parse_overrides(flags["set"]).pairs)
            flags["set"] = tuple(f"{key}={value}" for key, value in merged.items())
        default = click.core.ParameterSource.DEFAULT
        given = {name for name in flags if context.get_parameter_source(name) is not default}
        if given & {"quiet", "verbose"}:
            given |= {"quiet", "verbose"}  # the command line may contradict the file
        flags |= {name: value for name, value in config.items() if name in flags.keys() - given}
    context.obj.update(json=flags["json"], verbose=flags["verbose"])
    if flags["quiet"] and flags["verbose"]:
        raise InputError("--quiet: contradicts --verbose; give one of them")
    handler, logger = logging.StreamHandler(), logging.getLogger("infcl_gen")
    handler.setFormatter(logging.Formatter("infcl-gen: %(message)s"))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if flags["verbose"] else logging.WARNING)
    return flags


def read_config(path: str) -> dict[str, Any]:
    """The flags in a TOML file, by their names with underscores; the file may write dashes.

    One file may serve every command, so flags of other commands are valid.
    Raises InputError naming the key that is unknown, given twice, or has a wrong type.
    """
    import msgspec

    values: dict[str, Any] = {}
    for key, value in read_toml("--config", path).items():
        name, place = key.replace("-", "_"), f"{show(key)} in {show(path)}"
        if name not in FLAGS:
            raise InputError(f"--config: unknown key {place}{suggestion(name, FLAGS)}")
        if name in values:
            raise InputError(f"--config: {show(key)} is given twice in {show(path)}")
        try:
            values[name] = msgspec.convert(value, FLAGS[name], strict=True)
        except msgspec.ValidationError as error:
            raise InputError(f"--config: key {place}: {error}") from None
    return values


def problem_of(flags: Mapping[str, Any]) -> Problem:
    return make_problem(**{name: flags[name] for name in PROBLEM})


def directory_name(directory: str, flag: str = "DIR") -> str:
    """`directory` if it exists; else raises InputError."""
    if not os.path.isdir(check_text(flag, directory)):
        raise InputError(f"{flag}: {show(directory)} is not a folder; give one that infcl-gen generate wrote")
    return directory


def refuse(flags: Mapping[str, Any], names: Iterable[str], why: str) -> None:
    """Raises InputError for the first of these flags that was given."""
    for name in names:
        if flags[name] is not False and flags[name] not in (None, ()):
            raise InputError(f"{flag_name(name)}: {why}")


def number(flags: Mapping[str, Any], name: str, default: float, most: float, what: str) -> float:
    """The value of a flag, above 0 and at most `most`."""
    value = flags[name]
    try:
        found = default if value is None else float(value)
    except (ValueError, OverflowError):
        found = math.nan
    if not 0 < found <= most:
        raise InputError(f"{flag_name(name)}: {show(value)} is not a {what}; valid: above 0, at most {most:g}")
    return found


def count(flags: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    """The value of a flag, from `low` to `high`."""
    flag, value = flag_name(name), flags[name]
    return default if value is None else check_integer(flag, parse_count(value, flag), low, high)


def counts(flags: Mapping[str, Any], name: str, high: int) -> list[int] | None:
    """The distinct counts of a flag, in order."""
    if flags[name] is None:
        return None
    return list(dict.fromkeys(count({name: part}, name, 1, 1, high) for part in parts(flags[name])))


def parts(value: object) -> list[Any]:
    """The parts of a comma-separated text, of a configuration file's list, or of one other value."""
    return value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]


def result_file(flags: Mapping[str, Any], name: str) -> Path | None:
    """The file of --output, --plot or --html. Raises InputError, before a long run, if it cannot be written."""
    if flags[name] is None:
        return None
    flag, path = flag_name(name), Path(check_text(flag_name(name), flags[name])).absolute()
    if path.is_dir():
        raise InputError(f"{flag}: {show(flags[name])} is a folder; give a file in a folder of yours")
    check_folder(flag, path.parent)
    if (suffix := {"output": ".json", "html": ".html"}.get(name, path.suffix)) != path.suffix:
        raise InputError(f"{flag}: {path} must end in {suffix}")
    if name == "plot":
        from infcl_gen.bench.plots import check_plot

        check_plot(path)
    return path


def command_line(command: str, flags: Mapping[str, Any], names: Sequence[str]) -> str:
    """The command line that gives these flags again, also those of a configuration file."""
    words = ["infcl-gen", command]
    for name in names:
        value = flags[name]
        if name == "set" and value:
            value = [f"{key}={word}" for key, word in parse_overrides(value).pairs]
        elif isinstance(value, list) and name != "package":
            value = ",".join(map(str, value))
        for part in value if isinstance(value, list | tuple) else (value,):
            if part is not None and part is not False:
                words += [flag_name(name)] if part is True else [flag_name(name), str(part)]
    return shlex.join(words)


@contextlib.contextmanager
def progress(flags: Mapping[str, Any]) -> Iterator[Callable[[str, int, int], None]]:
    """A function of (step, done, total) that moves a bar on a terminal's stderr, or else logs."""
    if flags["quiet"] or not sys.stderr.isatty():
        log = logging.getLogger("infcl_gen")
        yield lambda step, done, total: log.info("%s %d of %d", step, done, total)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("start", total=None)
        yield lambda step, done, total: bar.update(task, description=step, completed=done, total=total)
