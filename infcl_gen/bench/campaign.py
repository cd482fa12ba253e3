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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from infcl_gen.bench import board
from infcl_gen.bench.contest import Contest, Limits
from infcl_gen.bench.peers import PEERS, chosen_peers
from infcl_gen.bench.point import row_precision
from infcl_gen.bench.results import IDENTITY, Rows, measured_before, measurement, write_results
from infcl_gen.emission import build, plan_problem, read_package, write_package
from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.inputs.text import check_integer, check_keys, check_word, parse_count, read_toml, show

CLOSE = 1.1  # predicted to measured peak, where no steps are recorded: their plans have room for a call that cannot be

Progress = Callable[[str, int, int], None]  # what is measured, how many are done, of how many
Positive = Annotated[float, msgspec.Meta(ge=0)]


class _File(msgspec.Struct):
    """The keys of a campaign's file."""

    measure: str
    output: Annotated[str, msgspec.Meta(pattern=r"\.json$")]
    points: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    minutes: Positive = math.inf
    repeats: int | str = Limits.rounds
    seconds: Positive = Limits.seconds
    silent_s: Positive = Limits.silent_s
    errors_up_to: int | str = Limits.errors_up_to


@dataclasses.dataclass(frozen=True)
class Place:
    """One point: packages for problems that differ in budget and settings, each under a name, beside peers."""

    problems: Mapping[str, Problem]
    against: tuple[str, ...]
    scale: float
    features: str | None

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

    def packages(self, folder: Path) -> list[Path]:
        """One for each problem whose plan differs from those before it, in a folder named by its strategy."""
        found: dict[str, Path] = {}
        for name, problem in self.problems.items():
            plan, _ = plan_problem(problem)
            sizes = (plan.strategy, plan.panel_rows, plan.panel_keys, plan.stash_rows, plan.replay)
            tiles = repr((sizes, plan.blocks, plan.schedule.transport))
            if tiles not in found:
                found[tiles] = write_package(build(problem), folder / "_".join(filter(None, [plan.strategy, name])))
        return list(found.values())


@dataclasses.dataclass(frozen=True)
class Campaign:
    """What the file says, in the order of its points."""

    measure: str
    output: Path
    places: tuple[Place, ...]
    limits: Limits
    minutes: float


def read_campaign(path: str | Path) -> Campaign:
    """The campaign in a TOML file. Raises InputError that names what is unknown, missing or out of range."""
    table, name = read_toml("--campaign", path), show(str(path))
    check_keys("--campaign", table, _File.__struct_fields__, name)
    try:
        file = msgspec.convert(table, _File)
        check_word("measure", file.measure, tuple(MEASURES))
        rounds = check_integer("repeats", parse_count(file.repeats, "repeats"), 1, 10000)
        errors = check_integer("errors_up_to", parse_count(file.errors_up_to, "errors_up_to"), 0, 2**40)
        places = {place.identity: place for point in file.points for place in _places(point)}
    except (InputError, msgspec.ValidationError) as error:
        raise InputError(f"--campaign: {name}: {error}") from error
    limits = Limits(rounds, file.seconds, file.silent_s, errors)
    return Campaign(file.measure, Path(path).parent / file.output, tuple(places.values()), limits, file.minutes)


def _places(table: Mapping[str, Any]) -> list[Place]:
    """Every point of one table."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in table.items()}
    against, scales = lists.pop("against", ["none"]), lists.pop("scale", [14.3])
    features, budgets = lists.pop("features", [None]), lists.pop("memory_budget", ["auto"])
    settings, found = lists.pop("set", [{}]), []
    for values in itertools.product(*lists.values()):
        flags = dict(zip(lists, values, strict=True))
        problems = {}
        for budget, words in itertools.product(budgets, settings):
            problem = make_problem(**flags, memory_budget=budget, set=words)
            names = [f"{name}={value}" for name, value in problem.settings.pairs]
            problems["_".join(names if budget == "auto" else [str(budget), *names])] = problem
        peers = tuple(peer.name for peer in chosen_peers(against, problem.devices))
        found += [Place(problems, peers, *both) for both in itertools.product(scales, features)]
    return found


def run_campaign(campaign: Campaign, command: str, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Measure the points that the output lacks, one after the other, and write it after each.

    Returns what the output holds, and how many points are `left`, and which guarantees are `broken`. Raises InputError
    if the output was measured on another board or with other versions, ToolchainError where this machine cannot measure
    a point.
    """
    measure, output = MEASURES[campaign.measure], campaign.output
    peers = list(dict.fromkeys(name for place in campaign.places for name in place.against))
    libraries = [PEERS[name].distribution for name in peers] + ["nvidia-ml-py"] * (campaign.measure == "power")
    rows, absent, command = measured_before(output, command, libraries)
    deadline, left, broken = time.monotonic() + 60 * campaign.minutes, 0, []
    with Contest(chosen_peers(peers or "none"), limits=campaign.limits) as contest:
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
            write_results(output, measurement(rows, command, absent, libraries))
    return measurement(rows, command, absent, libraries) | {"left": left, "broken": broken}


# Each measures one point: its rows, and which guarantees are broken.


def _timed(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """Packages and peers, in turns; on several devices packages also without their communication."""
    packages, problem = place.packages(folder), place.problem
    if problem.devices > 1:
        return contest.ring(packages, problem.devices, place.against), []
    return contest.rows(contest.point(packages, problem.batch_size, place.against)), []


def _large(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """One step of each package, for batches that take minutes."""
    rows = contest.ring(place.packages(folder), place.problem.devices, (), once=True)
    return rows, [f"{place.problem.batch_size}: {row['error']}" for row in rows if row["error"] is not None]


def _memory(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """Three budgets: is measured peak <= predicted <= budget, and is predicted close?

    They are the smallest and a tenth more (the very smallest works in tiles, and takes minutes), what an unlimited plan
    takes, and the geometric mean. One byte less than the smallest must be refused. Each package has a process of its
    own, so that none inherits another's workspaces.
    """
    rows: Rows = []
    broken, problem = [], place.problem
    generous, _ = plan_problem(problem)
    smallest, largest = generous.smallest_budget_bytes, generous.predicted_peak_bytes
    try:
        plan_problem(dataclasses.replace(problem, memory_budget_bytes=smallest - 1))
        broken.append(f"a budget of {smallest - 1} bytes was not refused")
    except InfeasibleError as error:
        if error.smallest_budget_bytes != smallest:
            broken.append(f"the refusal names {error.smallest_budget_bytes}, not {smallest} bytes")
    for budget in dict.fromkeys((smallest * 11 // 10, int((smallest * largest) ** 0.5), largest)):
        package = write_package(build(dataclasses.replace(problem, memory_budget_bytes=budget)), folder / str(budget))
        recorded = read_package(package).spec["plan"]["replay"]
        with Contest([], place.scale, contest.limits) as alone:
            rows += alone.rows(alone.point([package]))
        measured, predicted, failure = (rows[-1][name] for name in ("peak_bytes", "predicted_peak_bytes", "error"))
        if failure is None and (not measured <= predicted <= budget or (predicted > CLOSE * measured and not recorded)):
            failure = f"predicted {predicted}, measured {measured}"
        if failure is not None:
            broken.append(f"within {budget} bytes: {failure}")
    return rows, [f"{problem.loss} {problem.batch_size} x {problem.dim}: {what}" for what in broken]


def _power(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """Power, energy and clock of packages and of their bare products."""
    return board.power(place.packages(folder), place.scale), []


def _counters(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """Hardware counters of each kernel of one step."""
    return [row for package in place.packages(folder) for row in board.counters(package, place.scale)], []


MEASURES = {
    "speed": _timed, "rings": _timed, "large": _large, "memory": _memory, "power": _power, "counters": _counters,
}  # fmt: skip
