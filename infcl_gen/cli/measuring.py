"""Commands that measure or examine this machine: bench, doctor."""

import dataclasses
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infcl_gen.cli import options, pages, text
from infcl_gen.cli.group import show
from infcl_gen.cli.options import COUNT, COUNTS, NAMES, NUMBER, command, option
from infcl_gen.errors import InputError, ToolchainError, VerificationError
from infcl_gen.inputs.problem import MAX_BATCH, MAX_DIM, make_problem
from infcl_gen.inputs.text import flag_name, table_text

BENCH = ("batches", "dims", "package", "against", "scale", "features", "repeats", "ranks", "errors")


@command(
    *options.problem,
    option("--batches", "N,...", "Several batch sizes: 8k,16k,64k.", COUNTS),
    option("--dims", "D,...", "Several embedding dimensions.", COUNTS),
    option("--package", "DIR", "Measure this package; may be given again.", list[str]),
    option("--against", "NAME,...", "Whom to compare with: names, all or none [all].", NAMES),
    option("--scale", "S", "Logit scale [14.3].", NUMBER),
    option("--features", "DTYPE", "Of features: the package's [default], or fp32 under autocast to it."),
    option("--repeats", "N", "Timed runs of each [10].", COUNT),
    option("--ranks", "N", "Measure a ring of N processes, with and without communication [1].", COUNT),
    option("--errors", "N", "Largest batch whose errors are computed, in fp64 [32k].", COUNT),
    option("--campaign", "FILE.toml", "Measure what this file describes; goes on where it stopped."),
    option("--plot", "FILE", "Draw time and memory against the batch size: .svg, .png, .pdf."),
    options.html,
    option("--results", "FILE.json", "Draw this earlier --output by --plot and --html; measures nothing."),
    option("-o --output", "FILE", "Write the measurements to this .json file."),
)
def bench(flags: dict[str, Any]) -> None:
    """Time packages side by side with plain torch and other libraries: milliseconds, memory, errors.

    A package is generated for every batch size and dimension, or those of --package are taken, also edited ones. Who is
    not installed is named as absent.
    """
    if flags["results"] is not None:
        options.refuse(flags, (*options.PROBLEM, *BENCH, "campaign", "output"), "nothing is measured with --results")
        pages.results(flags)
        return
    if flags["campaign"] is not None:
        _campaign(flags)
        return
    from infcl_gen.bench import contest, results
    from infcl_gen.bench.peers import chosen_peers

    ranks = options.count(flags, "ranks", 1, 1, options.MAX_RANKS)
    rounds = options.count(flags, "repeats", 10, 1, 10000)
    errors = options.count(flags, "errors", 32768, 0, 2**40)
    scale = options.number(flags, "scale", 14.3, 1e6, "scale")
    peers = chosen_peers(flags["against"], ranks)
    output, *drawn = (options.result_file(flags, name) for name in ("output", *pages.DRAWN))
    command = options.command_line("bench", flags, (*options.PROBLEM, *BENCH))
    libraries = [peer.distribution for peer in peers]
    measured = contest.Contest(peers, scale, contest.Limits(rounds, errors_up_to=errors), flags["features"])

    def document(rows: results.Rows) -> dict[str, Any]:
        """The rows so far with their origin, written to --output."""
        found = results.measurement(rows, command, measured.absent, libraries)
        if output is not None:
            results.write_results(output, found)
        return found

    with tempfile.TemporaryDirectory(prefix="infcl-gen-bench-") as scratch:
        work = _work(flags, ranks, Path(scratch))
        if ranks > 1:
            rows = measured.ring([package for packages, _ in work for package in packages], ranks)
            result = document(rows)
        else:
            points = [measured.point(packages, batch) for packages, batch in work]  # check all points first
            rows = []
            with measured, options.progress(flags) as progress:
                for index, point in enumerate(points):
                    progress(f"{point.loss}, B {point.batch}, D {point.dim}", index, len(points))
                    rows += measured.rows(point)
                    result = document(rows)
    pages.draw(result, *drawn)
    show(flags, result, lambda: text.bench_text(rows, measured.absent, output, *drawn))


def _campaign(flags: dict[str, Any]) -> None:
    from infcl_gen.bench.campaign import read_campaign, run_campaign

    options.refuse(flags, (*options.PROBLEM, *BENCH), "stands in the file of --campaign; leave it out")
    campaign = read_campaign(flags["campaign"])
    output = options.result_file({"output": flags["output"] or str(campaign.output)}, "output") or campaign.output
    drawn = [options.result_file(flags, name) for name in pages.DRAWN]
    command = options.command_line("bench", flags, ("campaign",))
    with options.progress(flags) as progress:
        result = run_campaign(dataclasses.replace(campaign, output=output), command, progress)
    pages.draw(result, *drawn)
    show(flags, result, lambda: text.campaign_text(result, output, *drawn))
    if broken := result["broken"]:
        raise VerificationError(f"{len(broken)} guarantees are broken: {broken[0]}")


def _work(flags: Mapping[str, Any], ranks: int, scratch: Path) -> list[tuple[list[Path], int | None]]:
    """(packages, batch size) to measure; None: the planned size. Without --package they are generated in `scratch`.

    Raises InputError for flags that contradict each other.
    """
    from infcl_gen.bench.results import GENERATED
    from infcl_gen.emission import build, write_package

    if ranks > 1:  # features have the package's dtype, errors are not computed, and nothing is drawn
        options.refuse(flags, ("plot", "errors", "features"), "not with --ranks; leave it out")
    for several, one in (("batches", "batch_size"), ("dims", "dim")):
        if flags[several] is not None and flags[one] is not None:
            raise InputError(f"--{several}: give either --{several} or {flag_name(one)}, not both")
    batches = options.counts(flags, "batches", MAX_BATCH)
    if flags["package"]:
        others = (*options.PROBLEM, "dims", *(["batches"] if ranks > 1 else []))
        options.refuse(flags, others, "comes with --package; give one of them")
        folders = [Path(options.directory_name(name, "--package")) for name in dict.fromkeys(flags["package"])]
        return [(folders, batch) for batch in batches or (None,)]
    dims = options.counts(flags, "dims", MAX_DIM) or [flags["dim"]]
    given = {name: flags[name] for name in options.PROBLEM}
    given["devices"] = given["devices"] or (ranks if ranks > 1 else None)
    sizes = itertools.product(dims, batches or [flags["batch_size"]])
    problems = [make_problem(**{**given, "dim": dim, "batch_size": batch}) for dim, batch in sizes]
    for problem in problems:
        if problem.devices != ranks:
            measured = "one device is" if ranks == 1 else f"--ranks {ranks} are"
            raise InputError(f"--devices: {measured} measured, not {problem.devices}; leave it out")
    return [
        ([write_package(build(problem), scratch / str(index) / GENERATED)], problem.batch_size)
        for index, problem in enumerate(problems)
    ]


@command()
def doctor(flags: dict[str, Any]) -> None:
    """Show what is here: devices, links, versions, what works, and what to do about the rest."""
    from infcl_gen.hardware.doctor import examine

    report = examine()
    rows = [dataclasses.asdict(finding) for finding in report.findings]
    result: dict[str, Any] = {"findings": rows, "links": None}
    shown = table_text(tuple(rows[0]), [tuple(row.values()) for row in rows])
    if report.links is not None:
        lines, (header, *rates) = report.links.cluster_file(report.profile), report.links.table()
        pairs = [[rate or None for rate in row] for row in report.links.pairs]
        result["links"] = {"pairs_gbs": pairs, "ring_gbs": report.links.ring, "cluster_file": lines}
        shown += f"\n\nLinks, one copy at a time\n{table_text(header, rates)}\n\nFor a --cluster file\n"
        shown += "\n".join("  " + line for line in lines)
    show(flags, result, lambda: shown)
    if any(row["state"] == "missing" and row["subject"] == "torch" for row in rows):
        raise ToolchainError("torch is missing: packages can be generated here, not run or verified")
