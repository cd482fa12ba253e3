"""`infcl-gen bench --campaign FILE.toml`: measurements that a file describes; rows are added to an output file.

    measure = "speed"                     what is measured: a key of MEASURES
    output = "../bench/h200-grid.json"    relative to the campaign's file; --output wins
    minutes = 8                           no point begins later; another run goes on from there
    repeats, seconds, silent_s            as in `contest.Limits`
    errors_up_to = "32k"                  the largest batch whose errors are computed, in fp64
    [[points]]                            flags of a problem; lists are combined, each value with each
    batch_size = ["8k", "64k"]
    dim = 768
    memory_budget = ["auto", "40GiB"]     this and `set`: one package per distinct plan, at the same point
    against = "open_clip"                 peers, as for --against
    scale = [14.3, 100.0]
    features = "fp32"                     as for --features
    gradients = false                     forward alone; for "speed" on one device

A later table replaces an earlier one at the same point. A point is skipped if the output has its rows, among them rows
of all peers that are wanted and installed.
"""

import dataclasses
import itertools
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from infcl_gen.bench import board
from infcl_gen.bench.contest import Contest, Limits
from infcl_gen.bench.peers import PEERS, chosen_peers
from infcl_gen.bench.point import row_precision
from infcl_gen.bench.results import Rows, identity, measured_before, measurement, write_results
from infcl_gen.emission import build, loss_of, plan_problem, read_package, write_package
from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.inputs.text import check_integer, check_keys, check_word, parse_count, prefixes_text, read_toml, show
from infcl_gen.processes import Progress

CLOSE = 1.1  # predicted / measured peak; not with CUDA graphs: plans hold room for a call that cannot be recorded

Positive = Annotated[float, msgspec.Meta(ge=0)]


class _File(msgspec.Struct):
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
    """One point: named problems that differ in budget and settings only, and the peers beside their packages."""

    problems: Mapping[str, Problem]
    against: tuple[str, ...]
    scale: float
    features: str | None
    gradients: bool

    @property
    def problem(self) -> Problem:
        return next(iter(self.problems.values()))

    @property
    def identity(self) -> tuple[Any, ...]:
        """The `identity` of its rows."""
        problem = self.problem
        precision = row_precision(problem.precision, problem.dtype, self.features)
        loss = loss_of(problem)
        sizes = (problem.batch_size, problem.total_keys, problem.dim, problem.dtype, precision, problem.devices)
        named = (problem.frozen, prefixes_text(loss.prefixes, loss.renormalise), self.gradients)
        return (problem.loss_name, *sizes, self.scale, *named)

    def packages(self, folder: Path) -> list[Path]:
        """A package for each distinct plan, in a folder named by strategy and problem."""
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
    measure: str
    output: Path
    places: tuple[Place, ...]
    limits: Limits
    minutes: float


def read_campaign(path: str | Path) -> Campaign:
    """Read a TOML file. Raises InputError that names what is unknown, missing or out of range."""
    table, name = read_toml("--campaign", path), show(str(path))
    check_keys("--campaign", table, _File.__struct_fields__, name)
    try:
        file = msgspec.convert(table, _File)
        check_word("measure", file.measure, tuple(MEASURES))
        rounds = check_integer("repeats", parse_count(file.repeats, "repeats"), 1, 10000)
        errors = check_integer("errors_up_to", parse_count(file.errors_up_to, "errors_up_to"), 0, 2**40)
        places = {place.identity: place for point in file.points for place in _places(point)}
        if any(
            not place.gradients and (file.measure, place.problem.devices) != ("speed", 1) for place in places.values()
        ):
            raise InputError("gradients: forward alone is measured on one device, with measure = 'speed'; leave it out")
    except (InputError, msgspec.ValidationError) as error:
        raise InputError(f"--campaign: {name}: {error}") from error
    limits = Limits(rounds, file.seconds, file.silent_s, errors)
    return Campaign(file.measure, Path(path).parent / file.output, tuple(places.values()), limits, file.minutes)


def _places(table: Mapping[str, Any]) -> list[Place]:
    """All points of one [[points]] table."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in table.items()}
    against, scales = lists.pop("against", ["none"]), lists.pop("scale", [14.3])
    features, budgets = lists.pop("features", [None]), lists.pop("memory_budget", ["auto"])
    gradients = lists.pop("gradients", [True])
    if wrong := [value for value in gradients if not isinstance(value, bool)]:
        raise InputError(f"gradients: expected true or false, got {show(wrong[0])}")
    settings, found = lists.pop("set", [{}]), []
    for values in itertools.product(*lists.values()):
        flags = dict(zip(lists, values, strict=True))
        problems = {}
        for budget, words in itertools.product(budgets, settings):
            problem = make_problem(**flags, memory_budget=budget, set=words)
            names = [f"{name}={value}" for name, value in problem.settings.pairs]
            problems["_".join(names if budget == "auto" else [str(budget), *names])] = problem
        peers = tuple(peer.name for peer in chosen_peers(against, problem.devices))
        found += [Place(problems, peers, *each) for each in itertools.product(scales, features, gradients)]
    return found


def run_campaign(campaign: Campaign, command: str, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Measure the points that the output lacks, and write the output after each.

    Returns its contents with `left`, the number of points for lack of time, and `broken`, the guarantees that failed.
    Raises InputError if the output is of another board or of other versions, ToolchainError if a point cannot be
    measured here.
    """
    measure, output = MEASURES[campaign.measure], campaign.output
    peers = list(dict.fromkeys(name for place in campaign.places for name in place.against))
    libraries = [PEERS[name].distribution for name in peers] + ["nvidia-ml-py"] * (campaign.measure == "power")
    rows, absent, command = measured_before(output, command, libraries)
    deadline, left, broken = time.monotonic() + 60 * campaign.minutes, 0, []
    with Contest(chosen_peers(peers or "none"), limits=campaign.limits) as contest:
        for index, place in enumerate(campaign.places):
            here = [row for row in rows if identity(row) == place.identity]
            if here and {row["impl"] for row in here} | set(absent) >= set(place.against):
                continue
            if time.monotonic() > deadline:
                left += 1
                continue
            progress(" ".join(str(each) for each in place.identity if each is not True), index, len(campaign.places))
            contest.scale, contest.feature_dtype, contest.gradients = place.scale, place.features, place.gradients
            with tempfile.TemporaryDirectory(prefix="infcl-gen-campaign-") as folder:
                fresh, defects = measure(place, Path(folder), contest)
            absent |= contest.absent
            broken += defects
            rows = [row for row in rows if row not in here] + fresh
            rows.sort(key=lambda row: (row["dim"], row["batch"]))  # stable: packages stay first
            write_results(output, measurement(rows, command, absent, libraries))
    return measurement(rows, command, absent, libraries) | {"left": left, "broken": broken}


# Each of MEASURES takes a point, a folder for packages and a contest. It returns rows and the broken guarantees.


def _timed(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """Packages and peers in turns; on several devices also packages without communication."""
    packages, problem = place.packages(folder), place.problem
    if problem.devices > 1:
        return contest.ring(packages, problem.devices, place.against), []
    return contest.rows(contest.point(packages, problem.batch_size, place.against)), []


def _large(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """One step of each package, for batches whose step takes minutes."""
    rows = contest.ring(place.packages(folder), place.problem.devices, (), once=True)
    return rows, [f"{place.problem.batch_size}: {row['error']}" for row in rows if row["error"] is not None]


def _memory(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    """Checks measured peak <= predicted <= budget, predicted close to measured, and the refusal below the smallest.

    Budgets: 1.1 times the smallest (at the smallest itself a step takes minutes), the peak of an unlimited plan, and
    their geometric mean. Each package has its own process, so that none inherits another's workspaces.
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
    return board.power(place.packages(folder), place.scale), []


def _counters(place: Place, folder: Path, contest: Contest) -> tuple[Rows, list[str]]:
    return [row for package in place.packages(folder) for row in board.counters(package, place.scale)], []


MEASURES = {
    "speed": _timed, "rings": _timed, "large": _large, "memory": _memory, "power": _power, "counters": _counters,
}  # fmt: skip
