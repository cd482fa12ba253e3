"""What `plan` and `bench` draw: pages, and the picture of `bench --plot`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infcl_gen.cli import options, text
from infcl_gen.cli.group import show
from infcl_gen.cli.scaling import DEVICES_PER_NODE, UP_TO, simulated
from infcl_gen.errors import InputError
from infcl_gen.inputs.problem import Problem

DRAWN = ("plot", "html")  # the flags of files that `draw` writes


def write_plan(file: Path, problem: Problem, command: str) -> None:
    """The plan of `problem` as a page, with a simulated step of it and of other numbers of devices."""
    from infcl_gen.emission.pipeline import case_of, simulate_problem
    from infcl_gen.planning.planner import cost_model
    from infcl_gen.report.page import write_page
    from infcl_gen.report.plan import plan_page

    plan, step = simulate_problem(problem)
    try:
        scaling: list[dict[str, Any]] | str = [simulated(each) for each in around(problem)]
    except InputError as error:  # of a setting that another number of devices forbids
        scaling = f"Other numbers of devices are not simulated: {error}"
    write_page(file, plan_page(plan, cost_model(plan, case_of(problem).cluster), step, scaling, command))


def around(problem: Problem) -> list[Problem]:
    """The problem on its number of devices, halved up to six times, and doubled to four times it or to 64."""
    each = problem.devices // problem.nodes if problem.nodes > 1 else max(DEVICES_PER_NODE, problem.devices)
    counts = [problem.devices >> power for power in range(6, 0, -1) if problem.devices % (1 << power) == 0]
    most = max(64, problem.devices, min(4 * problem.devices, UP_TO))
    counts += [problem.devices << power for power in range(7) if problem.devices << power <= most]
    found = []
    for count in counts:
        size, links = min(count, each), problem.links
        if links is not None and links.links_per_node is not None:
            links = dataclasses.replace(links, links_per_node=min(links.links_per_node, size))
        if count % size == 0:
            found.append(dataclasses.replace(problem, devices=count, nodes=count // size, links=links))
    return found


def draw(result: Mapping[str, Any], picture: Path | None, page: Path | None) -> None:
    """Write the files of DRAWN from what `bench` prints with --json."""
    if picture is not None:
        from infcl_gen.bench.plots import plot

        plot(result["rows"], picture, f"{result['board']}; {result['command']}")
    if page is not None:
        from infcl_gen.report.bench import bench_page
        from infcl_gen.report.page import write_page

        write_page(page, bench_page(result))


def results(flags: dict[str, Any]) -> None:
    """`bench --results`."""
    from infcl_gen.bench.results import read_results

    result, drawn = read_results(flags["results"]), [options.result_file(flags, name) for name in DRAWN]
    draw(result, *drawn)
    show(flags, result, lambda: text.bench_text(result["rows"], result.get("absent", {}), *drawn))
