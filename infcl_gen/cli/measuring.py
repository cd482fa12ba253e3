"""Commands that measure, simulate, or look at this machine: bench, scale, doctor."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from infcl_gen.cli import options, text
from infcl_gen.cli.group import Reported, main, show
from infcl_gen.errors import InputError, ToolchainError, VerificationError

if TYPE_CHECKING:
    from infcl_gen.bench.contest import Work

BENCH = ("batches", "dims", "package", "against", "scale", "features", "repeats", "ranks", "errors")
# Of a ring nothing is drawn, no errors are computed, and features come in the package's dtype.
NOT_OF_RINGS = ("plot", "errors", "features")


@main.command()
@options.problem
@click.option("--batches", metavar="N,...", help="Several batch sizes: 8k,16k,64k.")
@click.option("--dims", metavar="D,...", help="Several embedding dimensions.")
@click.option("--package", multiple=True, metavar="DIR", help="Measure this package; may be given again.")
@click.option("--against", metavar="NAME,...", help="Whom to compare with: names, all or none [all].")
@click.option("--scale", metavar="S", help="Logit scale [14.3].")
@click.option("--features", metavar="DTYPE", help="Of features: the package's [default], or fp32 under autocast to it.")
@click.option("--repeats", metavar="N", help="Timed runs of each [10].")
@click.option("--ranks", metavar="N", help="Measure a ring of N processes, with and without communication [1].")
@click.option("--errors", metavar="N", help="Largest batch whose errors are computed, in fp64 [32k].")
@click.option("--campaign", metavar="FILE.toml", help="Measure what this file describes; goes on where it stopped.")
@click.option("--plot", metavar="FILE", help="Draw time and memory against the batch size: .svg, .png, .pdf.")
@click.option("-o", "--output", metavar="FILE", help="Write the measurements to this .json file.")
@options.common
def bench(**flags: Any) -> None:
    """Time packages side by side with plain torch and other libraries: milliseconds, memory, errors.

    A package is generated for every batch size and dimension, or those of --package are taken, also edited ones. Who is
    not installed is named as absent.
    """
    flags = options.settle(flags)
    if flags["campaign"] is not None:
        _campaign(flags)
        return
    from infcl_gen.bench import contest, results, ring
    from infcl_gen.bench.peers import chosen_peers

    ranks = options.ranks_of(flags["ranks"]) or 1
    rounds = options.count(flags["repeats"], "--repeats", 10, 1, 10000)
    errors = options.count(flags["errors"], "--errors", 32768, 0, 2**40)
    scale = options.number(flags["scale"], "--scale", 14.3, 1e6, "scale")
    everybody = list(ring.PEERS) if ranks > 1 else None
    peers = chosen_peers(everybody if flags["against"] is None else flags["against"])
    output, picture = options.json_file(flags["output"]), _picture(flags)
    command = options.command_line("bench", flags, (*options.PROBLEM, *BENCH))
    libraries = [peer.distribution for peer in peers]
    measured = contest.Contest(peers, scale, contest.Limits(rounds, errors_up_to=errors), flags["features"])

    def write(rows: contest.Rows) -> None:
        if output is not None:
            results.write_results(output, rows, command, measured.absent, libraries)

    with _work(flags, ranks) as work:
        if ranks > 1:
            ring.check_peers([peer.name for peer in peers])
            measured.absent |= {peer.name: why for peer in peers if (why := peer.absent()) is not None}
            present = [peer.name for peer in peers if peer.name not in measured.absent]
            folders = [package for packages, _ in work for package in packages]
            rows = ring.measure_ring(folders, ranks, present, scale, rounds)
            write(rows)
        else:
            with measured, options.progress(flags) as progress:
                rows = contest.run(measured, work, progress, write)  # written after each point
    _draw(picture, rows, command)
    result = results.measurement(rows, command, measured.absent, libraries)
    show(flags, result, lambda: text.bench_text(rows, measured.absent, output, picture))


def _campaign(flags: dict[str, Any]) -> None:
    from infcl_gen.bench.campaign import read_campaign, run_campaign
    from infcl_gen.bench.results import measurement
    from infcl_gen.inputs.text import flag_name

    for name in (*options.PROBLEM, *BENCH):
        if flags[name] not in (None, ()):
            raise InputError(f"{flag_name(name)}: stands in the file of --campaign; leave it out")
    campaign = read_campaign(flags["campaign"])
    output = options.json_file(flags["output"] or str(campaign.output)) or campaign.output
    picture = _picture(flags)
    command = options.command_line("bench", flags, ("campaign",))
    with options.progress(flags) as progress:
        found = run_campaign(dataclasses.replace(campaign, output=output), command, progress)
    _draw(picture, found.rows, command)
    result = measurement(found.rows, found.command, found.absent, found.libraries)
    result |= {"left": found.left, "broken": found.broken}
    show(flags, result, lambda: text.campaign_text(found, output, picture))
    if found.broken:
        raise Reported(VerificationError(f"{len(found.broken)} guarantees are broken: {found.broken[0]}"))


def _picture(flags: Mapping[str, Any]) -> Path | None:
    """The file of --plot, if it can be drawn here."""
    picture = options.result_file("--plot", flags["plot"])
    if picture is not None:
        from infcl_gen.bench.plots import check_plot

        check_plot(picture)
    return picture


def _draw(picture: Path | None, rows: Sequence[dict[str, Any]], command: str) -> None:
    if picture is not None:
        from infcl_gen.bench.plots import plot
        from infcl_gen.bench.results import board

        plot(rows, picture, f"{board()}; {command}")


@contextlib.contextmanager
def _work(flags: Mapping[str, Any], ranks: int) -> Iterator[Work]:
    """Which packages are measured at which batch sizes: given ones, or generated ones in a temporary folder.

    Raises InputError for flags that contradict each other.
    """
    from infcl_gen.bench.contest import generated
    from infcl_gen.inputs.problem import MAX_BATCH, MAX_DIM, make_problem
    from infcl_gen.inputs.text import flag_name

    for name in NOT_OF_RINGS if ranks > 1 else ():
        if flags[name] is not None:
            raise InputError(f"{flag_name(name)}: not with --ranks; leave it out")
    for several, one in (("batches", "batch_size"), ("dims", "dim")):
        if flags[several] is not None and flags[one] is not None:
            raise InputError(f"--{several}: give either --{several} or {flag_name(one)}, not both")
    batches: list[int] | None = None
    if flags["batches"] is not None:
        batches = options.counts(flags["batches"], "--batches", MAX_BATCH)
    if flags["package"]:
        for name in (*options.PROBLEM, "dims", *(["batches"] if ranks > 1 else [])):
            if flags[name] not in (None, ()):
                raise InputError(f"{flag_name(name)}: comes with --package; give one of them")
        names = dict.fromkeys(flags["package"])
        folders = [Path(options.directory_name(folder, "--package")) for folder in names]
        sizes: list[int | None] = [*batches] if batches else [None]
        yield [(folders, batch) for batch in sizes]
        return
    dims = [flags["dim"]] if flags["dims"] is None else options.counts(flags["dims"], "--dims", MAX_DIM)
    given = {name: flags[name] for name in options.PROBLEM}
    given["devices"] = given["devices"] or (ranks if ranks > 1 else None)
    problems = [
        make_problem(**{**given, "batch_size": batch, "dim": dim})
        for dim in dims
        for batch in batches or [flags["batch_size"]]
    ]
    with generated(problems, ranks) as work:
        yield work


@main.command()
@options.together(options.loss, options.keys, options.dim)
@click.option("--batches", metavar="N,...", help="Batch sizes, over all devices [1M,32M].")
@click.option("--devices", metavar="N,...", help="Devices in all [8 to 4096, doubled; 8 a node].")
@options.together(*options.device)
@click.option("--plot", metavar="FILE", help="Draw time and efficiency against devices: .svg, .png, .pdf.")
@click.option("-o", "--output", metavar="FILE", help="Write the rows to this .json file.")
@options.common
def scale(**flags: Any) -> None:
    """Simulate a step on clusters of many sizes: time, efficiency, memory, and what bounds it.

    Each size is planned as `plan` does it, then its schedule runs as events on hosts, kernels, links and network.
    Nothing is measured, and no GPU is needed. A cluster file gives the devices of a node, and the links.
    """
    flags = options.settle(flags)
    from infcl_gen.bench import scaling
    from infcl_gen.files import write_file
    from infcl_gen.hardware import resolve_cluster
    from infcl_gen.inputs.cluster_file import MAX_DEVICES
    from infcl_gen.inputs.problem import MAX_BATCH

    batches = options.counts(flags["batches"] or "1M,32M", "--batches", MAX_BATCH)
    devices = None
    if flags["devices"] is not None:
        devices = options.counts(flags["devices"], "--devices", MAX_DEVICES)
    output, picture = options.json_file(flags["output"]), _picture(flags)
    names = [name for name in options.PROBLEM if name not in ("batch_size", "devices", "nodes")]
    problems = scaling.clusters({name: flags[name] for name in names}, devices, batches)
    board = resolve_cluster(problems[0]).profile.name
    command = options.command_line("scale", flags, (*names, "batches", "devices"))
    rows = []
    with options.progress(flags) as progress:
        for index, problem in enumerate(problems):
            progress(f"{problem.devices} devices", index, len(problems))
            rows.append(scaling.simulated(problem))
    result = scaling.results(rows, command, board)
    if output is not None:
        write_file(output, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    if picture is not None:
        from infcl_gen.bench.plots import plot_scaling

        plot_scaling(rows, picture, f"simulated, not measured: {board}; {command}")
    lines = [text.table_text(scaling.HEADER, [scaling.cells(row) for row in rows])]
    lines += [f"simulated for {board}, not measured"]
    lines += [f"wrote {file}" for file in (output, picture) if file is not None]
    show(flags, result, lambda: "\n".join(lines))


@main.command()
@options.common
def doctor(**flags: Any) -> None:
    """Show what is here: devices, links, versions, what works, and what to do about the rest."""
    flags = options.settle(flags)
    from infcl_gen.hardware.doctor import examine

    report = examine()
    rows = [(row.subject, row.state, row.detail, row.advice) for row in report.findings]
    keys = ("subject", "state", "detail", "advice")
    result: dict[str, Any] = {"findings": [dict(zip(keys, row, strict=True)) for row in rows], "links": None}
    shown = text.table_text(keys, rows)
    if report.links is not None:
        lines, (header, *rates) = report.links.cluster_file(report.profile), report.links.table()
        pairs = [[rate or None for rate in row] for row in report.links.pairs]
        result["links"] = {"pairs_gbs": pairs, "ring_gbs": report.links.ring, "cluster_file": lines}
        shown += f"\n\nLinks, one copy at a time\n{text.table_text(header, rates)}\n\nFor a --cluster file\n"
        shown += "\n".join("  " + line for line in lines)
    show(flags, result, lambda: shown)
    if any(row.state == "missing" and row.subject == "torch" for row in report.findings):
        raise Reported(ToolchainError("torch is missing: packages can be generated here, not run or verified"))
