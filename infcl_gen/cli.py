"""The command line, `infcl-gen`: a thin layer that reads flags, calls one function, and prints its result.

Nothing heavy is imported before a command needs it, so `--help` is quick. Results go to stdout (with `--json`
as one object), messages to stderr. Whatever goes wrong gives one line and an exit code (see
`infcl_gen.errors`); a defect of the program itself gives one line too, and its traceback with `-v`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from infcl_gen import reports
from infcl_gen.errors import InfclError, InfeasibleError, InputError, ToolchainError, VerificationError
from infcl_gen.version import __version__

if TYPE_CHECKING:
    from infcl_gen.problem import Problem
    from infcl_gen.tuning.contest import Work

SCHEMA_VERSION = 1
INTERRUPTED = 130
MAX_RANKS = 64
_OPTIONAL = ("torch", "triton")
_PROBLEM_FLAGS = (
    *("loss", "batch_size", "keys", "dim", "devices", "nodes", "memory_budget"),
    *("dtype", "precision", "target", "device_profile", "cluster", "set"),
)


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM is an interrupt as well, so that workers are ended and temporary folders removed."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # where alone a handler may be set
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Cli(click.Group):
    """The group whose `main` turns every exception into one line and an exit code."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> NoReturn:
        # click's own `main` prints usage errors on several lines, and swallows interrupts and broken pipes.
        arguments = list(sys.argv[1:] if args is None else args)
        shown = {"json": "--json" in arguments, "verbose": bool({"-v", "--verbose"} & set(arguments))}
        started = time.monotonic()
        try:
            try:
                with (
                    _termination_interrupts(),
                    self.make_context("infcl-gen", arguments, obj=shown) as context,
                ):
                    self.invoke(context)
                code = 0
                logging.getLogger("infcl_gen").info("finished in %.2f s", time.monotonic() - started)
            except BaseException as error:
                code = _report(error, shown["json"], shown["verbose"])
            if sys.stdout is not None:  # closed by whoever started this
                sys.stdout.flush()
        except BrokenPipeError:  # the reader (head, less) has gone: nothing to say, nowhere to say it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        sys.exit(code)


@click.group(
    cls=_Cli,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """A compiler for contrastive losses: plans and writes loss packages specialised to one problem.

    Exit codes: 0 ok, 1 internal error, 2 invalid input, 3 no plan fits the budget, 4 missing hardware or
    toolchain, 5 verification failed, 6 lock timeout, 130 interrupted.
    """


def _options(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


_loss_flag = click.option("--loss", metavar="NAME|FILE.py:NAME", help="Loss [clip].")
_keys_flag = click.option("--keys", metavar="N", help="Keys over all devices, if not as many as queries.")
_dim_flag = click.option("--dim", metavar="D", help="Embedding dimension.")
_device_flags = (
    click.option("--memory-budget", metavar="SIZE", help="Per device: 512MiB, 2GiB, or auto [auto]."),
    click.option("--dtype", metavar="bf16|fp16|fp32|fp64", help="Features [bf16]."),
    click.option("--precision", metavar="default|tf32|exact", help="Products of fp32 features [default]."),
    click.option("--target", metavar="auto|cpu|cuda|rocm", help="What the package runs on [auto]."),
    click.option("--device-profile", metavar="NAME|FILE.toml|auto", help="Device to plan for [auto]."),
    click.option("--cluster", metavar="FILE.toml", help="Nodes, devices, profile and links from a file."),
    click.option("--set", multiple=True, metavar="KEY=VALUE", help="Override a choice of the planner."),
)
_problem_flags = _options(
    _loss_flag,
    click.option("--batch-size", metavar="N", help="Queries over all devices: 65536, 64k, 4M (k = 1024)."),
    _keys_flag,
    _dim_flag,
    click.option("--devices", metavar="N", help="Devices in all [1]."),
    click.option("--nodes", metavar="N", help="Nodes that hold them [1]."),
    *_device_flags,
)
_common_flags = _options(
    click.option("--json", is_flag=True, help="One JSON object on stdout."),
    click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
    click.option(
        "-v", "--verbose", is_flag=True, help="Log to stderr what happens; tracebacks of internal errors."
    ),
    click.option("--config", metavar="FILE.toml", help="Flags from a file; flags given here win."),
)
_directory = click.argument("directory", metavar="DIR")


@main.command()
@_problem_flags
@_common_flags
def plan(**flags: Any) -> None:
    """Print the plan: tiles with reasons, memory by buffer, time by phase, the largest batch for the
    budget."""
    flags = _settle(flags)
    import infcl_gen

    problem = _problem(flags)
    result = infcl_gen.plan(problem)
    _output(
        flags,
        {"plan": result.as_dict()},
        lambda: f"{reports.plan_text(result)}\n\n{reports.record_text(problem)}",
    )


@main.command()
@_problem_flags
@click.option("-o", "--output", metavar="DIR", help="Folder for the package.")
@click.option("--force", is_flag=True, help="Replace a package that is there.")
@_common_flags
def generate(**flags: Any) -> None:
    """Plan a problem and write its loss package; byte-identical for identical inputs."""
    flags = _settle(flags)
    import infcl_gen
    from infcl_gen.problem import check_text

    if flags.get("output") is None:
        raise InputError("--output: is required; give the folder to write the package to")
    output = check_text("--output", flags["output"])
    path = infcl_gen.generate(_problem(flags), output, force=flags["force"])
    _output(flags, {"path": str(path)}, lambda: f"wrote {path}")


@main.command()
@_directory
@_common_flags
def inspect(directory: str, **flags: Any) -> None:
    """Show a package: SPEC, plan, derived formulas, kernels. Parses the files, never imports them."""
    flags = _settle(flags)
    from infcl_gen.emission.package import kernels_of, read_package

    package = read_package(_directory_name(directory))
    kernels = kernels_of(package.files.get("kernels.py", b"").decode())
    sizes = {path: len(content) for path, content in sorted(package.files.items())}
    result = {"spec": package.spec, "kernels": kernels, "files": sizes}
    _output(flags, result, lambda: reports.package_text(package.spec, kernels, sizes))


@main.command()
@_directory
@click.option("--ranks", metavar="N", help="Check on a ring of N processes as well.")
@click.option("--aot", metavar="ARCH,...", help="Compile every kernel for these targets: sm_90,gfx942,...")
@_common_flags
def verify(directory: str, **flags: Any) -> None:
    """Re-render a package and compare bytes, then check its numbers on this machine against fp64."""
    flags = _settle(flags)
    ranks, targets = _ranks(flags.get("ranks")), _targets(flags.get("aot"))
    folder = _directory_name(directory)
    from infcl_gen.verification.verify import verify_package

    report = verify_package(folder, ranks=ranks, aot=targets)
    rows = [("ok" if row["passed"] else "FAILED", row["check"], row["detail"]) for row in report.rows]
    _output(flags, report.as_dict(), lambda: reports.table_text(("", "check", "detail"), rows))
    if not report.passed:
        failed = [row["check"] for row in report.rows if not row["passed"]]
        error = VerificationError(f"{len(failed)} of {len(report.rows)} checks failed: {', '.join(failed)}")
        raise _Reported(error)


@main.command()
@_directory
@click.option(
    "--minutes", metavar="N", help="Time to spend [20]; one family of kernels is finished in any case."
)
@click.option("--records", metavar="DIR", help="Folder of the record [the user's data folder].")
@_common_flags
def tune(directory: str, **flags: Any) -> None:
    """Measure candidates on this machine, write a record, and the package again with the winner.

    May be interrupted at any moment: another run goes on from the last finished family of kernels.
    """
    flags = _settle(flags)
    minutes = _minutes(flags.get("minutes"))
    folder = _directory_name(directory)
    from infcl_gen.problem import check_text
    from infcl_gen.tuning.search import Limits, tune

    given = flags.get("records")
    records = None if given is None else Path(check_text("--records", given))
    with _progress(flags) as progress:
        outcome = tune(folder, records, Limits(minutes=minutes), progress=progress)
    _output(flags, outcome.as_dict(), lambda: reports.tuning_text(outcome))


@main.command()
@_problem_flags
@click.option("--batches", metavar="N,...", help="Several batch sizes: 8k,16k,64k.")
@click.option("--dims", metavar="D,...", help="Several embedding dimensions.")
@click.option("--package", multiple=True, metavar="DIR", help="Measure this package; may be given again.")
@click.option("--against", metavar="NAME,...", help="Whom to compare with: names, all or none [all].")
@click.option("--scale", metavar="S", help="Logit scale [14.3].")
@click.option(
    "--features", metavar="DTYPE", help="Of features: the package's [default], or fp32 under autocast to it."
)
@click.option("--repeats", metavar="N", help="Timed runs of each [10].")
@click.option(
    "--ranks", metavar="N", help="Measure a ring of N processes, with and without communication [1]."
)
@click.option("--errors", metavar="N", help="Largest batch whose errors are computed, in fp64 [32k].")
@click.option("--plot", metavar="FILE", help="Draw time and memory against the batch size: .svg, .png, .pdf.")
@click.option("-o", "--output", metavar="FILE", help="Write the measurements to this .json file.")
@_common_flags
def bench(**flags: Any) -> None:
    """Time packages side by side with plain torch and other libraries: milliseconds, memory, errors.

    A package is generated for every batch size and dimension, or those of --package are taken. Who is not
    installed is named as absent.
    """
    flags = _settle(flags)
    ranks = _ranks(flags["ranks"])
    if ranks is not None and ranks > 1:
        _bench_ring(flags, ranks)
        return
    from infcl_gen.tuning import contest
    from infcl_gen.tuning.peers import chosen_peers
    from infcl_gen.tuning.plot import check_plot, plot
    from infcl_gen.tuning.results import board, measurement, write_results

    peers = chosen_peers(flags["against"])
    limits = contest.Limits(
        rounds=_count_flag(flags["repeats"], "--repeats", 10, 1, 10000),
        errors_up_to=_count_flag(flags["errors"], "--errors", 32768, 0, 2**40),
    )
    measured = contest.Contest(peers, _scale(flags["scale"]), limits, flags["features"])
    output, picture = _json_file(flags["output"]), _result_file("--plot", flags["plot"])
    if picture is not None:
        check_plot(picture)
    command = _bench_command(flags)

    def write(rows: contest.Rows) -> None:
        if output is not None:
            libraries = [peer.distribution for peer in peers]
            write_results(output, rows, command, measured.absent, libraries)

    with _bench_work(flags) as work, measured, _progress(flags) as progress:
        rows = contest.run(measured, work, progress, write)  # written after each point: nothing is lost
    if picture is not None:
        plot(rows, picture, f"{board()}; {command}")
    result = measurement(rows, command, measured.absent, [peer.distribution for peer in peers])
    _output(flags, result, lambda: reports.bench_text(rows, measured.absent, output, picture))


def _bench_ring(flags: dict[str, Any], ranks: int) -> None:
    import tempfile

    from infcl_gen.emission import build, write_package
    from infcl_gen.problem import flag_name, parse_count
    from infcl_gen.tuning.bench import GENERATED
    from infcl_gen.tuning.peers import PEERS, chosen_peers
    from infcl_gen.tuning.results import measurement, write_results
    from infcl_gen.tuning.ring_bench import PEERS as RING_PEERS
    from infcl_gen.tuning.ring_bench import check_peers, measure_ring

    reasons = {
        "plot": "where nothing is drawn",
        "errors": "where no errors are computed",
        "features": "where features come in the package's dtype",
    }
    for name, reason in reasons.items():
        if flags[name] is not None:
            raise InputError(f"{flag_name(name)}: not with --ranks, {reason}; leave it out")
    _check_bench_flags(flags, ("dims", "batches"))
    devices = flags["devices"]
    if devices is not None and parse_count(devices, "--devices") != ranks:
        raise InputError(f"--devices: {devices} contradicts --ranks {ranks}; leave it out")
    asked = chosen_peers(flags["against"] or ",".join(RING_PEERS))
    check_peers([peer.name for peer in asked])
    absent = {peer.name: why for peer in asked if (why := PEERS[peer.name].absent()) is not None}
    peers = [peer.name for peer in asked if peer.name not in absent]
    rounds = _count_flag(flags["repeats"], "--repeats", 10, 1, 10000)
    output = _result_file("--output", flags["output"])
    command = _bench_command(flags)
    with tempfile.TemporaryDirectory(prefix="infcl-gen-bench-") as scratch:
        folders = [Path(_directory_name(folder, "--package")) for folder in flags["package"] or ()]
        for index, problem in enumerate(() if folders else _bench_problems({**flags, "devices": ranks})):
            folders.append(write_package(build(problem), Path(scratch) / str(index) / GENERATED))
        rows = measure_ring(folders, ranks, peers, _scale(flags["scale"]), rounds)
    libraries = [peer.distribution for peer in asked]
    if output is not None:
        write_results(output, rows, command, absent, libraries)
    _output(
        flags, measurement(rows, command, absent, libraries), lambda: reports.bench_text(rows, absent, output)
    )


@main.command()
@_options(_loss_flag, _keys_flag, _dim_flag)
@click.option("--batches", metavar="N,...", help="Batch sizes, over all devices [1M,32M].")
@click.option("--devices", metavar="N,...", help="Devices in all [8 to 4096, doubled; 8 a node].")
@_options(*_device_flags)
@click.option("--plot", metavar="FILE", help="Draw time and efficiency against devices: .svg, .png, .pdf.")
@click.option("-o", "--output", metavar="FILE", help="Write the rows to this .json file.")
@_common_flags
def scale(**flags: Any) -> None:
    """Simulate a step on clusters of many sizes: time, efficiency, memory, and what bounds it.

    Each size is planned as `plan` does it, then its schedule runs as events on hosts, kernels, links and network.
    Nothing is measured, and no GPU is needed. A cluster file gives the devices of a node, and the links.
    """
    flags = _settle(flags)
    from infcl_gen.hardware import resolve_cluster
    from infcl_gen.problem import MAX_BATCH, MAX_DEVICES
    from infcl_gen.tuning import scaling
    from infcl_gen.tuning.plot import check_plot, plot_scaling
    from infcl_gen.tuning.results import write_file

    batches = _counts_flag(flags["batches"] or "1M,32M", "--batches", MAX_BATCH)
    given = flags["devices"]
    devices = None if given is None else _counts_flag(given, "--devices", MAX_DEVICES)
    output, picture = _json_file(flags["output"]), _result_file("--plot", flags["plot"])
    if picture is not None:
        check_plot(picture)
    names = [name for name in _PROBLEM_FLAGS if name not in ("batch_size", "devices", "nodes")]
    problems = scaling.clusters({name: flags[name] for name in names}, devices, batches)
    board = resolve_cluster(problems[0]).profile.name
    command = _command("scale", flags, (*names, "batches", "devices"))
    rows = []
    with _progress(flags) as progress:
        for index, problem in enumerate(problems):
            if progress is not None:
                progress(f"{problem.devices} devices", index, len(problems))
            rows.append(scaling.simulated(problem))
    result = scaling.results(rows, command, board)
    if output is not None:
        write_file(output, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    if picture is not None:
        plot_scaling(rows, picture, f"simulated, not measured: {board}; {command}")
    lines = [reports.table_text(scaling.HEADER, [scaling.cells(row) for row in rows])]
    lines += ["simulated for " + board + ", not measured"]
    lines += [f"wrote {file}" for file in (output, picture) if file is not None]
    _output(flags, result, lambda: "\n".join(lines))


@main.command()
@_common_flags
def doctor(**flags: Any) -> None:
    """Show what is here: devices, links, versions, what works, and what to do about the rest."""
    flags = _settle(flags)
    from infcl_gen.hardware.doctor import examine

    report = examine()
    rows = [(row.subject, row.state, row.detail, row.advice) for row in report.findings]
    keys = ("subject", "state", "detail", "advice")
    result: dict[str, Any] = {"findings": [dict(zip(keys, row, strict=True)) for row in rows], "links": None}
    text = reports.table_text(keys, rows)
    if report.links is not None:
        lines, (header, *rates) = report.links.cluster_file(report.profile), report.links.table()
        pairs = [[rate or None for rate in row] for row in report.links.pairs]
        result["links"] = {"pairs_gbs": pairs, "ring_gbs": report.links.ring, "cluster_file": lines}
        shown = "\n".join("  " + line for line in lines)
        text += f"\n\nLinks, one copy at a time\n{reports.table_text(header, rates)}\n\nFor a --cluster file\n{shown}"
    _output(flags, result, lambda: text)
    if any(row.state == "missing" and row.subject == "torch" for row in report.findings):
        raise _Reported(
            ToolchainError("torch is missing: packages can be generated here, not run or verified")
        )


class _Reported(Exception):
    """An error whose result (with `--json`, the one object) is on stdout already."""

    def __init__(self, error: InfclError) -> None:
        super().__init__(str(error))
        self.error = error


class _Log(logging.Handler):
    """Log records as lines on the stderr of the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"infcl-gen: {self.format(record)}", err=True)


def _settle(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags with those of `--config` filled in, and logging set up. Given flags win over the file's."""
    context = click.get_current_context()
    if flags["config"] is not None:
        from infcl_gen.problem import parse_settings, read_config

        config = read_config(flags["config"])
        if "set" in config and "set" in flags:
            merged = dict(parse_settings(config["set"])) | dict(parse_settings(flags["set"]))
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


def _problem(flags: Mapping[str, Any]) -> Problem:
    from infcl_gen.problem import make_problem

    return make_problem(**{name: flags[name] for name in _PROBLEM_FLAGS})


def _directory_name(directory: str, flag: str = "DIR") -> str:
    from infcl_gen.problem import check_text, show

    check_text(flag, directory)
    if not os.path.isdir(directory):
        raise InputError(f"{flag}: {show(directory)} is not a folder; give one that infcl-gen generate wrote")
    return directory


def _ranks(value: object) -> int | None:
    from infcl_gen.problem import parse_count, show

    if value is None:
        return None
    ranks = parse_count(value, "--ranks")
    if not 1 <= ranks <= MAX_RANKS:
        raise InputError(f"--ranks: {show(ranks)} is out of range; valid: 1 to {MAX_RANKS}")
    return ranks


def _minutes(value: object) -> float:
    from infcl_gen.problem import show

    if value is None:
        return 20.0
    try:
        minutes = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        minutes = math.nan
    if not 0 < minutes <= 1440:
        raise InputError(f"--minutes: {show(value)} is not a number of minutes; valid: above 0, at most 1440")
    return minutes


def _count_flag(value: object, flag: str, default: int, low: int, high: int) -> int:
    from infcl_gen.problem import parse_count, show

    count = default if value is None else parse_count(value, flag)
    if not low <= count <= high:
        raise InputError(f"{flag}: {show(count)} is out of range; valid: {low} to {high}")
    return count


def _counts_flag(value: object, flag: str, high: int) -> list[int]:
    """The counts of a comma-separated text, or of a list from a configuration file; each once, in order."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return list(dict.fromkeys(_count_flag(part, flag, 0, 1, high) for part in parts))


def _scale(value: object) -> float:
    from infcl_gen.problem import show

    try:
        scale = 14.3 if value is None else float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        scale = math.nan
    if not 0 < scale <= 1e6:
        raise InputError(f"--scale: {show(value)} is not a scale; valid: above 0, at most 1e6")
    return scale


def _result_file(flag: str, value: str | None) -> Path | None:
    """A file to write at the end of a long run, if it can be written now."""
    from infcl_gen.problem import check_text, show

    if value is None:
        return None
    path = Path(check_text(flag, value)).absolute()
    try:
        folder = next((parent for parent in path.parents if parent.exists()), path)
        with tempfile.TemporaryFile(dir=folder):
            usable = not path.is_dir()
    except OSError:
        usable = False
    if not usable:
        raise InputError(f"{flag}: {show(value)} cannot be written; give a file in a folder of yours")
    return path


def _json_file(value: str | None) -> Path | None:
    output = _result_file("--output", value)
    if output is not None and output.suffix != ".json":
        raise InputError(f"--output: {output} must end in .json")
    return output


def _bench_work(flags: Mapping[str, Any]) -> contextlib.AbstractContextManager[Work]:
    """Which packages are measured at which batch sizes: given ones, or generated ones in a temporary folder."""
    from infcl_gen.problem import MAX_BATCH
    from infcl_gen.tuning.contest import generated

    batches: list[int] | None = (
        None if flags["batches"] is None else _counts_flag(flags["batches"], "--batches", MAX_BATCH)
    )
    _check_bench_flags(flags)
    if flags["package"]:
        folders = [Path(_directory_name(folder, "--package")) for folder in dict.fromkeys(flags["package"])]
        sizes: list[int | None] = [*batches] if batches else [None]
        return contextlib.nullcontext([(folders, batch) for batch in sizes])
    return generated(_bench_problems(flags))


def _check_bench_flags(flags: Mapping[str, Any], planned: Sequence[str] = ("dims",)) -> None:
    """Raises InputError for flags that contradict each other; `planned`: what packages bring, beside a problem."""
    from infcl_gen.problem import flag_name

    for several, one in (("batches", "batch_size"), ("dims", "dim")):
        if flags[several] is not None and flags[one] is not None:
            raise InputError(f"--{several}: give either --{several} or {flag_name(one)}, not both")
    for name in (*_PROBLEM_FLAGS, *planned) if flags["package"] else ():
        if flags[name] not in (None, ()):
            raise InputError(f"{flag_name(name)}: comes with --package; give one of them")


def _bench_problems(flags: Mapping[str, Any]) -> list[Problem]:
    from infcl_gen.problem import MAX_BATCH, MAX_DIM, make_problem

    batches = [flags["batch_size"]]
    if flags["batches"] is not None:
        batches = _counts_flag(flags["batches"], "--batches", MAX_BATCH)
    dims = [flags["dim"]] if flags["dims"] is None else _counts_flag(flags["dims"], "--dims", MAX_DIM)
    given = {name: flags[name] for name in _PROBLEM_FLAGS}
    return [make_problem(**{**given, "batch_size": batch, "dim": dim}) for dim in dims for batch in batches]


def _bench_command(flags: Mapping[str, Any]) -> str:
    own = ("batches", "dims", "package", "against", "scale", "features", "repeats", "ranks", "errors")
    return _command("bench", flags, (*_PROBLEM_FLAGS, *own))


def _command(command: str, flags: Mapping[str, Any], names: Sequence[str]) -> str:
    """The command line that gives the same: what was given, wherever it came from."""
    import shlex

    from infcl_gen.problem import flag_name, parse_settings

    words = ["infcl-gen", command]
    for name in names:
        value = flags[name]
        if name == "set" and value:
            value = [f"{key}={word}" for key, word in parse_settings(value)]
        elif isinstance(value, list) and name != "package":
            value = ",".join(map(str, value))
        for part in () if value is None else value if isinstance(value, list | tuple) else (value,):
            words += [flag_name(name), str(part)]
    return shlex.join(words)


@contextlib.contextmanager
def _progress(flags: Mapping[str, Any]) -> Iterator[Callable[[str, int, int], None] | None]:
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


def _targets(value: str | list[str] | None) -> list[str] | None:
    from infcl_gen.hardware import load_profile, profile_names
    from infcl_gen.problem import show

    if value is None:
        return None
    names = [name.strip() for name in (value.split(",") if isinstance(value, str) else value)]
    known = sorted(
        {profile.arch for profile in map(load_profile, profile_names()) if profile.vendor != "cpu"}
    )
    for name in names:
        if name not in known:
            raise InputError(f"--aot: {show(name)} is unknown; valid: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _output(flags: Mapping[str, Any], result: Mapping[str, Any], text: Callable[[], str]) -> None:
    if flags["json"]:
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **result}, indent=2, default=str))
    elif not flags["quiet"]:
        click.echo(text())


def _report(error: BaseException, as_json: bool, verbose: bool) -> int:
    """Print one line for `error` (with `--json` also an object on stdout) and return its exit code."""
    from infcl_gen.problem import clean

    reported = isinstance(error, _Reported)
    if isinstance(error, _Reported):
        error = error.error
    details: dict[str, Any] = {}
    if isinstance(error, BrokenPipeError):
        raise error
    if isinstance(error, click.exceptions.Exit):  # --help and --version
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | click.Abort):
        code, message = INTERRUPTED, "interrupted"
    elif isinstance(error, click.ClickException):
        code, message = 2, error.format_message().rstrip(".") + "; see infcl-gen --help"
    elif isinstance(error, InfeasibleError):
        code, message = error.exit_code, _infeasible_message(error)
        details = {
            "smallest_budget_bytes": error.smallest_budget_bytes,
            "largest_batch": error.largest_batch,
        }
    elif isinstance(error, InfclError):
        code, message = error.exit_code, str(error)
    elif isinstance(error, ImportError) and (error.name or "").split(".")[0] in _OPTIONAL:
        code, message = (
            4,
            f"{error.name} is not installed here, and this command needs it; see infcl-gen doctor",
        )
    elif isinstance(error, Exception):
        if verbose:
            traceback.print_exception(error, file=sys.stderr)
        hint = "" if verbose else " (-v shows where)"
        code, message = 1, f"internal error: {type(error).__name__}: {error}{hint}"
    else:
        raise error  # SystemExit
    message = clean(" ".join(message.split()))
    if as_json and not reported:
        payload = {"error": {"kind": type(error).__name__, "exit_code": code, "message": message, **details}}
        with contextlib.suppress(OSError):  # a full disk behind stdout may be what is reported
            click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **payload}, indent=2))
    click.echo(f"infcl-gen: error: {message}", err=True)
    return code


def _infeasible_message(error: InfeasibleError) -> str:
    """The planner's message, with whichever of the two figures it does not state itself."""
    from infcl_gen.problem import bytes_text

    message = str(error)
    budget, batch = error.smallest_budget_bytes, error.largest_batch
    if budget is not None and str(budget) not in message:
        message += f"; smallest feasible --memory-budget: {budget} ({bytes_text(budget)})"
    if batch is not None and str(batch) not in message:
        message += f"; largest feasible --batch-size: {batch}"
    return message


if __name__ == "__main__":
    main()
