"""`infcl-gen bench --campaign FILE.toml`: many measurements that a file describes; their rows grow in another file.

    measure = "speed"                     what is measured: a key of MEASURES
    output = "../bench/h200-grid.json"    the rows, beside the campaign's file; --output wins
    minutes = 8                           no point is begun later: run it again to go on
    repeats, seconds, silent_s            as `contest.Limits` has them
    errors_up_to = "32k"                  the largest batch whose errors are computed, in fp64
    [[points]]                            flags of a problem; each value of a list with each of the others
    batch_size = ["8k", "64k"]
    dim = 768
    memory_budget = ["auto", "40GiB"]     these and `set`: a package at the same point for each plan that differs
    against = "open_clip"                 peers beside the packages, as --against names them
    scale = [14.3, 100.0]
    features = "fp32"                     as --features

A later table replaces an earlier one at the same point. A point is not measured again if the output has rows of it, and
of all peers that are wanted there and installed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infcl_gen.bench import board
from infcl_gen.bench.contest import Contest, Limits, Progress
from infcl_gen.bench.peers import PEERS, chosen_peers
from infcl_gen.bench.point import row_precision
from infcl_gen.bench.results import IDENTITY, Rows, measured_before, measurement, write_results
from infcl_gen.emission import build, plan_problem, read_package, write_package
from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.inputs.text import parse_count, read_toml, show, suggestion

KEYS = ("measure", "output", "minutes", "repeats", "seconds", "silent_s", "errors_up_to", "points")
VARIANTS = ("memory_budget", "set")  # of the packages at one point
CLOSE = 1.1  # predicted to measured peak, where no steps are recorded: their plans have room for a call that cannot be


@dataclasses.dataclass(frozen=True)
class Place:
    """One point: packages for problems that differ in budget and settings, each under a name, beside peers."""

    problems: Mapping[str, Problem]
    against: tuple[str, ...] = ()
    scale: float = 14.3
    features: str | None = None

    @property
    def problem(self) -> Problem:
        return next(iter(self.problems.values()))

    @property
    def identity(self) -> tuple[Any, ...]:
        """The values of IDENTITY in its rows."""
        problem = self.problem
        precision = row_precision(problem.precision, problem.dtype, self.features)
        sizes = (problem.batch_size, problem.total_keys, problem.dim, problem.dtype, precision, problem.devices)
        return (problem.loss.rpartition(":")[2], *sizes, self.scale)


@dataclasses.dataclass(frozen=True)
class Campaign:
    """What the file says, in the order of its points."""

    measure: str
    output: Path
    places: tuple[Place, ...]
    limits: Limits
    minutes: float = math.inf


def read_campaign(path: str | Path) -> Campaign:
    """The campaign in a TOML file. Raises InputError that names what is unknown, missing or out of range."""
    table, where = read_toml("--campaign", path), f"--campaign: {show(str(path))}"
    for key in table:
        if key not in KEYS:
            raise InputError(f"{where}: unknown key {show(key)}{suggestion(key, KEYS)}")
    if table.get("measure") not in MEASURES:
        raise InputError(f"{where}: measure must be one of {', '.join(MEASURES)}")
    points = table.get("points")
    if not isinstance(points, list) or not points or not all(isinstance(point, dict) for point in points):
        raise InputError(f"{where}: needs [[points]]")
    times = {name: table[name] for name in ("minutes", "seconds", "silent_s") if name in table}
    for name, value in times.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise InputError(f"{where}: {name} must be a number, not {show(value)}")
    minutes = times.pop("minutes", math.inf)
    try:
        rounds = parse_count(table.get("repeats", 10), "repeats")
        errors = parse_count(table.get("errors_up_to", "32k"), "errors_up_to")
        places = {place.identity: place for point in points for place in _places(point)}
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    if rounds < 1 or errors < 0:
        raise InputError(f"{where}: repeats must be at least 1, and errors_up_to at least 0")
    if not isinstance(output := table.get("output"), str) or not output.endswith(".json"):
        raise InputError(f"{where}: output must be a .json file")
    return Campaign(
        table["measure"], Path(path).parent / output, tuple(places.values()),
        Limits(rounds=rounds, errors_up_to=errors, **times), minutes,
    )  # fmt: skip


def run_campaign(campaign: Campaign, command: str, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Measure the points that the output lacks, one after the other, and write it after each.

    Returns what the output holds, and how many points are `left`, and which guarantees are `broken`. Raises InputError
    if the output was measured on another board or with other versions, ToolchainError where this machine cannot measure
    a point.
    """
    measure, output = MEASURES[campaign.measure], campaign.output
    peers = dict.fromkeys(name for place in campaign.places for name in place.against)
    libraries = [PEERS[name].distribution for name in peers] + ["nvidia-ml-py"] * (campaign.measure == "power")
    rows, absent, command = measured_before(output, command, libraries)
    results = measurement(rows, command, absent, libraries)
    deadline, left, broken = time.monotonic() + 60 * campaign.minutes, 0, []
    with Contest(chosen_peers(list(peers) or "none"), limits=campaign.limits) as contest:
        for index, place in enumerate(campaign.places):
            here = [row for row in rows if tuple(row[name] for name in IDENTITY) == place.identity]
            if here and {row["impl"] for row in here} | set(absent) >= set(place.against):
                continue
            if time.monotonic() > deadline:
                left += 1
                continue
            progress(" ".join(map(str, place.identity)), index, len(campaign.places))
            contest.scale, contest.feature_dtype = place.scale, place.features
            with tempfile.TemporaryDirectory(prefix="infcl-gen-campaign-") as folder:
                fresh, defects = measure(place, Path(folder), contest)
            absent |= contest.absent
            broken += defects
            rows = [row for row in rows if row not in here] + fresh
            rows.sort(key=lambda row: (row["dim"], row["batch"]))  # stable: packages stay first
            results = measurement(rows, command, absent, libraries)
            write_results(output, results)
    return results | {"left": left, "broken": broken}


def _places(table: dict[str, Any]) -> list[Place]:
    """Every point of one table."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in table.items()}
    against = lists.pop("against", ["none"])
    variants = {name: lists.pop(name, [None]) for name in VARIANTS}
    found = []
    for values in itertools.product(*lists.values()):
        flags = dict(zip(lists, values, strict=True))
        scale, features = flags.pop("scale", 14.3), flags.pop("features", None)
        problems = {}
        for budget, settings in itertools.product(*variants.values()):
            words = [f"{name}={value}" for name, value in (settings or {}).items()]
            name = "_".join([*([] if budget in (None, "auto") else [str(budget)]), *words])
            problems[name] = make_problem(**flags, memory_budget=budget, set=settings)
        peers = chosen_peers(against, problems[name].devices)
        found.append(Place(problems, tuple(peer.name for peer in peers), scale, features))
    return found


def _packages(place: Place, folder: Path) -> list[Path]:
    """A package for each problem whose plan differs from those before it, in a folder named by its strategy."""
    found: dict[str, Path] = {}
    for name, problem in place.problems.items():
        plan, _ = plan_problem(problem)
        tiles = repr((
            plan.strategy, plan.panel_rows, plan.panel_keys, plan.stash_rows, plan.replay, plan.blocks,
            plan.schedule.transport,
        ))  # fmt: skip
        if tiles not in found:
            found[tiles] = write_package(build(problem), folder / "_".join(filter(None, [plan.strategy, name])))
    return list(found.values())


# Each measures one point: its rows, and which guarantees are broken.


def _speed(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """Packages and peers on one device, in turns."""
    return contest.rows(contest.point(_packages(place, folder), place.problem.batch_size, place.against)), []


def _rings(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """Packages with and without their communication, and peers, on as many devices as the problem has."""
    return contest.ring(_packages(place, folder), place.problem.devices, place.against), []


def _large(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """One step of each package, for batches that take minutes."""
    rows = contest.ring(_packages(place, folder), place.problem.devices, (), once=True)
    return rows, [f"{place.problem.batch_size}: {row['error']}" for row in rows if row["error"] is not None]


def _memory(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """Three budgets: is measured peak <= predicted <= budget, and is predicted close?

    They are the smallest and a tenth more (the very smallest works in tiles, and takes minutes), what an unlimited plan
    takes, and the geometric mean. One byte less than the smallest must be refused. Each package has a process of its
    own, so that none inherits another's workspaces.
    """
    rows: Rows = []
    broken = []
    problem = place.problem
    generous, _ = plan_problem(problem)
    smallest, largest = generous.smallest_budget_bytes, generous.predicted_peak_bytes

    def within(budget: int) -> Problem:
        return dataclasses.replace(problem, memory_budget_bytes=budget)

    try:
        plan_problem(within(smallest - 1))
        broken.append(f"a budget of {smallest - 1} bytes was not refused")
    except InfeasibleError as error:
        if error.smallest_budget_bytes != smallest:
            broken.append(f"the refusal names {error.smallest_budget_bytes}, not {smallest} bytes")
    for budget in dict.fromkeys((smallest * 11 // 10, int((smallest * largest) ** 0.5), largest)):
        package = write_package(build(within(budget)), folder / str(budget))
        recorded = read_package(package).spec["plan"]["replay"]
        with Contest([], place.scale, contest.limits) as alone:
            (row,) = alone.rows(alone.point([package]))
        rows.append(row)
        measured, predicted = row["peak_bytes"], row["predicted_peak_bytes"]
        if row["error"] is not None:
            broken.append(f"within {budget} bytes: {row['error']}")
        elif not measured <= predicted <= budget or (predicted > CLOSE * measured and not recorded):
            broken.append(f"within {budget} bytes: predicted {predicted}, measured {measured}")
    return rows, [f"{problem.loss} {problem.batch_size} x {problem.dim}: {what}" for what in broken]


def _power(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """Power, energy and clock of packages and of their bare products."""
    return board.power(_packages(place, folder), place.scale), []


def _counters(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """Hardware counters of each kernel of one step."""
    return [row for package in _packages(place, folder) for row in board.counters(package, place.scale)], []


MEASURES = {
    "speed": _speed, "rings": _rings, "large": _large, "memory": _memory, "power": _power, "counters": _counters,
}  # fmt: skip
