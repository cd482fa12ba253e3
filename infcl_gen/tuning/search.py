"""`infcl-gen tune`: which settings are the fastest on this machine?

One kernel family after the other, the others at their best so far:

    propose   settings that might be better           illegal ones dropped: no plan, or not within the budget
    compile   ahead of time, in parallel              those that do not compile, or spill, dropped
    rank      by what a record found fast, the cost model, and nearness to the default
    gate      each in a process of its own            wrong, crashed, hung or out of memory: dropped
    time      in turns, on a cold cache               clearly slower ones dropped after two rounds
    record    the best so far, in a partial file      so that an interrupted run goes on from there

A candidate is a set of `--set` pairs; it is timed as a whole package, byte for byte what is written at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import logging
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from infcl_gen.emission.lower import KERNEL_FAMILIES, KERNEL_TEMPLATES
from infcl_gen.emission.package import read_package, write_package
from infcl_gen.emission.pipeline import build_for, spec_inputs, work_digest
from infcl_gen.emission.render import content_digest
from infcl_gen.errors import InfclError, InputError, ToolchainError, VerificationError
from infcl_gen.hardware import Cluster
from infcl_gen.losses import Derivation, LossSpec, derive
from infcl_gen.planning import Plan, plan
from infcl_gen.planning.levels import Block, default_blocks, violations
from infcl_gen.planning.records import (
    Candidate,
    Key,
    Record,
    Settings,
    is_tuned,
    measured_settings,
    own_settings,
    read_records,
    record_folders,
    record_key,
    store,
    user_folder,
    write_records,
)
from infcl_gen.problem import BLOCK_FIELDS, Problem
from infcl_gen.tuning.process import Process, last_line, timing_lock
from infcl_gen.version import __version__

# A winner is faster than the best so far by more than this, and than both medians are known.
LEAST_GAIN = 0.01
GIVE_UP = 1.3  # times the best median, if no time at all is below it after GIVE_UP_ROUNDS
GIVE_UP_ROUNDS = 2
LEAST_ROUNDS = 5  # whatever the time
_WORKER = "infcl_gen.tuning.worker"
_LOG = logging.getLogger("infcl_gen")


COMPILE_SHARE = 0.3  # of a family's time; to load, check and time the best few takes the rest


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much is tried, and how long each step of one candidate may take."""

    minutes: float = 20.0
    compiled: int = 48  # candidates of a family that are compiled
    timed: int = 8
    rounds: int = 15
    repeats: int = 2
    jobs: int = os.cpu_count() or 1
    compile_s: float = 180.0
    load_s: float = 120.0
    gate_s: float = 300.0
    sample_s: float = 120.0


@dataclasses.dataclass(frozen=True)
class Case:
    """What is tuned: the problem with the user's own settings only, and its plan by the cost model."""

    problem: Problem
    loss: LossSpec
    cluster: Cluster
    derivation: Derivation
    default: Plan

    def plan(self, settings: Settings) -> Plan:
        """The plan of a candidate. Raises InputError or InfeasibleError if it has none."""
        found = plan(self._with(settings), self.derivation, self.cluster)
        if found.strategy != self.default.strategy:
            raise InputError(f"the strategy would be {found.strategy}, not {self.default.strategy}")
        return found

    def files(self, settings: Settings) -> dict[str, str]:
        """The text of a candidate's package."""
        return build_for(self._with(settings), self.loss, self.cluster)

    def work(self, settings: Settings) -> str:
        """Digest of what the device does in it."""
        return work_digest(self._with(settings), self.loss, self.cluster)

    def _with(self, settings: Settings) -> Problem:
        return dataclasses.replace(self.problem, settings=measured_settings(self.problem.settings, settings))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run found: the record, its file, and the times of the winner and of the default (None: not both timed)."""

    record: Record
    file: Path
    package: Path
    default_ms: float | None
    best_ms: float | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "package": str(self.package),
            "file": str(self.file),
            "default_ms": self.default_ms,
            "best_ms": self.best_ms,
            "record": dataclasses.asdict(self.record),
        }


Propose = Callable[[Case, str, Settings], list[Settings]]
Proposed = tuple[str, Settings]
Progress = Callable[[str, int, int], None]


def tune(
    folder: str | Path,
    records: Path | None = None,
    limits: Limits | None = None,
    propose: Propose | None = None,
    progress: Progress | None = None,
    plant: Callable[[Settings, Path], None] | None = None,
) -> Outcome:
    """Tune the package in `folder` on this machine, write the record to `records` (the user's data folder), and the
    package again with the winning settings.

    When the time is up, the record holds the families that were finished; the next run goes on from there. `plant`
    edits a candidate's files before it is run: tests only. Raises InputError (no package, or one with blocks of the
    user's), ToolchainError (this machine has not the package's device), VerificationError (no candidate is right, or
    infcl_gen's own files have changed meanwhile).
    """
    limits = limits or Limits()
    package = read_package(folder)
    case = _case(package.spec)
    check_device(case.cluster)
    key = record_key(case.problem, case.loss, case.cluster)
    records = user_folder() if records is None else records
    partial = records / f".{key.board}-{key.digest}.partial.json"
    record = _resumed(partial, key, case)
    names, earlier = families(case.default), _timed_before(records, key)
    deadline = time.monotonic() + 60 * limits.minutes
    for index, family in enumerate(names):
        if family in record.families:
            continue
        if index and time.monotonic() > deadline:
            break
        left = max(0.0, deadline - time.monotonic()) / (len(names) - index)
        with tempfile.TemporaryDirectory(prefix="infcl-gen-tune-") as scratch:
            run = _Family(case, family, record.settings, limits, Path(scratch), plant, progress, earlier)
            settings, digest, candidates = run.run(propose or proposals, time.monotonic() + left)
        if content_digest(case.files(settings)) != digest:  # infcl_gen's own files have changed meanwhile
            raise VerificationError(f"{folder}: the package to be written is not the one that was timed")
        done = (*record.families, family)
        record = dataclasses.replace(
            record,
            settings=settings,
            digest=digest,
            work=case.work(settings),
            families=done,
            complete=done == names,
            candidates=(*record.candidates, *candidates),
        )
        write_records(partial, [record])
    file = store(record, records)
    path = write_package(case.files(record.settings), folder, force=True)
    if record.complete:
        partial.unlink(missing_ok=True)
    return Outcome(record, file, path, *_first_and_last_ms(record))


def families(default: Plan) -> tuple[str, ...]:
    """What is tuned one after the other: kernels by the name of their block; panels for torch."""
    return {"torch": ("panel",), "fused": ("forward", "fused")}.get(
        default.strategy, ("forward", "gradient", "product")
    )


def proposals(case: Case, family: str, best: Settings) -> list[Settings]:
    """Settings to try for a family, the other families' as in `best`; legal or not."""
    others = tuple(pair for pair in best if not _belongs(pair[0], family))
    found: list[Settings] = [others]
    default = case.default
    if family == "panel":
        for rows, keys in itertools.product((128, 256, 512, 1024, 2048, 4096, 8192), repeat=2):
            if rows < 2 * default.rows_per_rank and keys < 2 * default.keys_per_rank:
                found.append((*others, ("panel_rows", str(rows)), ("panel_keys", str(keys))))
    else:
        products: list[Settings] = [()]
        if family == "product" and "products" not in case.problem.setting:
            found += [(*others, ("products", word)) for word in ("library", "triton")]
            products = [(("products", "triton"),)]
        elif family == "product" and default.products == "library":
            return found
        base = _default_block(case, family)
        kept = ("rows", "keys") if _keeps_tiles(family, default.strategy) else ()
        for block in _blocks(family, base, default.strategy):
            fields = tuple(
                (f"{family}.{name}", str(getattr(block, name))) for name in BLOCK_FIELDS if name not in kept
            )
            found += [(*others, *pairs, *(() if block == base else fields)) for pairs in products]
    return list(dict.fromkeys(tuple(sorted(settings)) for settings in found))


def check_device(cluster: Cluster) -> None:
    """Raises ToolchainError unless this machine has the device that the cluster is made of."""
    from infcl_gen.hardware.detection import find_device, match

    profile = cluster.profile
    if profile.target == "cpu":
        return
    found = find_device()
    here = None if found is None else match(found)
    if here is None or (here.arch, here.multiprocessors) != (profile.arch, profile.multiprocessors):
        name = "no GPU" if here is None else here.name
        raise ToolchainError(
            f"tuning needs the device that the package is for, {profile.name}; this machine has {name}"
        )


def _case(spec: dict[str, Any]) -> Case:
    problem, loss, cluster = spec_inputs(spec)
    problem = dataclasses.replace(problem, settings=own_settings(problem.settings))
    fixed = [name for name in problem.setting if is_tuned(name) and name != "products"]
    if fixed:
        raise InputError(
            f"DIR: the package was generated with --set {', '.join(fixed)}, which tuning chooses; generate it without"
        )
    derivation = derive(loss)
    return Case(problem, loss, cluster, derivation, plan(problem, derivation, cluster))


def _resumed(partial: Path, key: Key, case: Case) -> Record:
    """What an earlier run has finished for the same problem, work of the device and versions; else a record of
    nothing."""
    versions = _versions()
    with contextlib.suppress(InfclError):
        for record in read_records(partial):
            same = (record.key, record.versions) == (key, versions)
            if same and record.work == case.work(record.settings):
                _LOG.info("going on after %s", ", ".join(record.families))
                return record
    return Record(key, (), "", "", False, (), versions, ())


def _timed_before(records: Path, key: Key) -> dict[Proposed, float]:
    """Medians of the candidates that stayed in the race in records of this problem, of whatever work and versions:
    after most changes the same are fast."""
    found: dict[Proposed, float] = {}
    for folder in (records, *record_folders()):
        with contextlib.suppress(InputError):
            for record in read_records(folder / f"{key.board}.json"):
                for candidate in record.candidates if record.key == key else ():
                    if candidate.status == "timed":
                        proposed = _proposed(candidate.family, candidate.settings)
                        found.setdefault(proposed, statistics.median(candidate.times_ms))
    return found


def _proposed(family: str, settings: Settings) -> Proposed:
    """What a candidate changes in its own family, whatever the other families' best was."""
    return family, tuple(pair for pair in settings if _belongs(pair[0], family))


def _versions() -> dict[str, str]:
    found = {"infcl_gen": __version__}
    for name in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _belongs(key: str, family: str) -> bool:
    if family == "panel":
        return key in ("panel_rows", "panel_keys")
    return key.startswith(f"{family}.") or (family == "product" and key == "products")


def _default_block(case: Case, family: str) -> Block:
    default = case.default
    if family in default.blocks:
        return default.blocks[family]
    rows, keys = default.rows_per_rank, default.keys_per_rank
    return default_blocks(case.cluster.profile, default.specialisation, rows, keys)[family]


def _keeps_tiles(family: str, strategy: str) -> bool:
    """The forward of a stash keeps the gradient's tiles."""
    return family == "forward" and strategy == "stash"


def _blocks(family: str, base: Block, strategy: str) -> Iterator[Block]:
    sides = (64, 128, 256)
    fixed = _keeps_tiles(family, strategy)
    rows = (base.rows,) if fixed else sides
    keys = (base.keys,) if fixed else sides
    depths = (base.depth,) if family == "fused" else (32, 64, 128)
    for fields in itertools.product(rows, keys, depths, (4, 8), (2, 3, 4)):
        yield Block(*fields)


def _first_and_last_ms(record: Record) -> tuple[float | None, float | None]:
    """Medians of the default in the first family and of the winner in the last one."""
    first = [c for c in record.candidates if c.family == record.families[0] and not c.settings]
    last = [c for c in record.candidates if c.family == record.families[-1] and c.settings == record.settings]
    medians = [statistics.median(c[0].times_ms) if c and c[0].times_ms else None for c in (first, last)]
    return medians[0], medians[1]


# ---------------------------------------------------------------------------------------------- one family


@dataclasses.dataclass
class _Entry:
    """A candidate on its way; `status` "" as long as it is in the race."""

    settings: Settings
    folder: Path
    predicted_ms: float | None = None
    distance: float = 0.0
    digest: str = ""
    status: str = ""
    detail: str = ""
    process: Process | None = None
    rounds: list[list[float]] = dataclasses.field(default_factory=list)

    @property
    def times_ms(self) -> tuple[float, ...]:
        return tuple(round(value, 6) for values in self.rounds for value in values)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def doubt_ms(self) -> float:
        """Two standard errors of the median, from how the rounds differ (what drifts is alike within one). Estimated
        from the median deviation: an outlier does not count."""
        rounds = [statistics.median(values) for values in self.rounds]
        middle = statistics.median(rounds)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in rounds)
        return 2 * 1.25 * spread / math.sqrt(len(rounds))

    def drop(self, status: str, detail: str = "") -> None:
        self.status, self.detail = status, detail
        if self.process is not None:
            self.process.kill()


def fastest(racing: Sequence[_Entry], incumbent: _Entry | None) -> _Entry:
    """The one with the least median; the incumbent unless that is faster by LEAST_GAIN and by the doubt in both."""
    best = min(racing, key=lambda entry: entry.median_ms)
    if incumbent is None:
        return best
    gain = incumbent.median_ms - best.median_ms
    noise = max(LEAST_GAIN * incumbent.median_ms, math.hypot(incumbent.doubt_ms, best.doubt_ms))
    return best if gain > noise else incumbent


class _Family:
    """The search in one family. The first entry is the best so far, which wins ties."""

    def __init__(
        self,
        case: Case,
        family: str,
        best: Settings,
        limits: Limits,
        scratch: Path,
        plant: Callable[[Settings, Path], None] | None,
        progress: Progress | None,
        earlier: Mapping[Proposed, float] | None = None,
    ) -> None:
        self.earlier = earlier or {}
        self.case, self.family, self.best, self.limits = case, family, best, limits
        self.scratch, self.plant = scratch, plant
        self.progress = progress or (lambda *_: None)
        self.device = "cpu" if case.cluster.profile.target == "cpu" else "cuda"
        self.entries: list[_Entry] = []

    def run(self, propose: Propose, deadline: float) -> tuple[Settings, str, tuple[Candidate, ...]]:
        """The winner's settings, the digest of its package as it was timed, and every candidate with its fate."""
        wanted = [self.best, *propose(self.case, self.family, self.best)]
        self.entries = [
            _Entry(settings, self.scratch / f"candidate{index}")
            for index, settings in enumerate(dict.fromkeys(wanted))
        ]
        try:
            self._judge_legality()
            self._rank(self.limits.compiled)
            if self.device == "cuda":
                now = time.monotonic()
                self._compile(now + COMPILE_SHARE * (deadline - now))
            self._rank(self.limits.timed)
            self._gate()
            self._time(deadline)
            winner = self._winner()
        finally:
            for entry in self.entries:
                if entry.process is not None:
                    entry.process.kill()
        candidates = tuple(
            Candidate(
                self.family, e.settings, e.status or "timed", e.detail[:300], e.predicted_ms, e.times_ms
            )
            for e in self.entries
        )
        return winner.settings, winner.digest, candidates

    def _racing(self) -> list[_Entry]:
        return [entry for entry in self.entries if not entry.status]

    def _judge_legality(self) -> None:
        """Drops what is illegal, and removes what is the same plan as an earlier candidate."""
        case, base = self.case, None
        if self.family != "panel":
            base = _default_block(case, self.family)
        entries, self.entries, seen = self.entries, [], []
        for entry in entries:
            if base is not None:
                fields = {k.partition(".")[2]: int(v) for k, v in entry.settings if _is_block(k, self.family)}
                block = dataclasses.replace(base, **fields)
                entry.distance = sum(
                    abs(math.log2(getattr(block, n) / getattr(base, n))) for n in BLOCK_FIELDS
                )
                found = violations(self.family, block, case.cluster.profile, case.default.specialisation)
                if found and fields:
                    entry.drop("illegal", "; ".join(found))
            if not entry.status:
                try:
                    planned = case.plan(entry.settings)
                except InfclError as error:
                    entry.drop("illegal", str(error))
                else:
                    entry.predicted_ms = 1e3 * planned.predicted_time_s
                    tiles = (planned.panel_rows, planned.panel_keys, planned.products, planned.blocks)
                    if tiles in seen:
                        continue
                    seen.append(tiles)
            self.entries.append(entry)

    def _rank(self, count: int) -> None:
        """Keep the best so far, which stays the first, and the `count` - 1 most promising, in that order: if the time
        is up before all are compiled, the others are left out. Half of what is timed may be what was fast before."""

        def before_ms(entry: _Entry) -> float:
            return self.earlier.get(_proposed(self.family, entry.settings), math.inf)

        first, *others = self.entries
        racing = [entry for entry in others if not entry.status]
        racing.sort(key=lambda entry: (entry.predicted_ms, entry.distance))
        known = sorted((entry for entry in racing if before_ms(entry) < math.inf), key=before_ms)
        del known[self.limits.timed // 2 :]
        racing = [*known, *(entry for entry in racing if entry not in known)]
        self.entries = [first, *racing, *(entry for entry in others if entry.status)]
        for entry in racing[count - 1 :]:
            entry.drop(
                "not timed",
                "others are predicted to be faster, are nearer to the default, or were fast before",
            )

    def _write(self, entry: _Entry) -> None:
        if not entry.digest:
            files = self.case.files(entry.settings)
            write_package(files, entry.folder)
            entry.digest = content_digest(files)
            if self.plant is not None:
                self.plant(entry.settings, entry.folder)

    def _compile(self, until: float) -> None:
        """Ahead of time, each in a process of its own, as many at once as there are jobs; the best so far runs as it
        is. What has not begun by then is left out."""
        from infcl_gen.verification.aot import SHARED_BYTES

        arch, strategy = self.case.cluster.profile.arch, self.case.default.strategy
        kernels = [
            name
            for template in KERNEL_TEMPLATES.get(strategy, ())
            for name, family in KERNEL_FAMILIES[template].items()
            if family == self.family
            # The forward of a stash has the gradient's tiles: it may spill, or not fit, where the gradient does.
            or (strategy == "stash" and (family, self.family) == ("forward", "gradient"))
        ]
        if arch not in SHARED_BYTES or not kernels:
            return
        todo = [entry for entry in self._racing() if entry is not self.entries[0]]
        for start in range(0, len(todo), self.limits.jobs):
            if start and time.monotonic() > until:
                for entry in todo[start:]:
                    entry.drop("not timed", "the time was up before it was compiled")
                return
            part = todo[start : start + self.limits.jobs]
            for entry in part:
                self._write(entry)
                launches = read_package(entry.folder).spec["launches"]
                there = [name for name in kernels if name in launches]
                entry.process = Process(
                    _WORKER, ["compile", str(entry.folder), arch, *there], self._log(entry)
                )
            for entry, answer in self._answers(part, self.limits.compile_s, "does not compile"):
                used = answer["resources"]
                spilled = [f"{r['kernel']}: {r['spill_bytes']} bytes" for r in used if r["spill_bytes"]]
                large = [r["kernel"] for r in used if r["shared_bytes"] > SHARED_BYTES[arch]]
                if spilled or large:
                    entry.drop("spills", "; ".join(spilled) or f"too much shared memory: {', '.join(large)}")
            for entry in part:
                if entry.process is not None:
                    entry.process.kill()
                    entry.process = None
            self.progress(f"{self.family}: compile", min(start + len(part), len(todo)), len(todo))

    def _gate(self) -> None:
        """Start them all, each in its process, and let them judge themselves; no times are taken meanwhile."""
        racing = self._racing()
        for entry in racing:
            self._write(entry)
            entry.process = Process(_WORKER, ["run", str(entry.folder), self.device], self._log(entry))
        for step, step_s in enumerate((self.limits.load_s, self.limits.gate_s), start=1):
            self._answers(self._racing(), step_s, "crashed")
            self.progress(f"{self.family}: check", step, 3)
        # Then at the size that is timed, one after the other: against the first, which is the best so far.
        file, written = self.scratch / "reference.pt", False
        for entry in self._racing():
            request = {"do": "compare", "file": str(file), "reference": not written}
            written |= self._ask(entry, request) is not None
        self.progress(f"{self.family}: check", 3, 3)

    def _time(self, deadline: float) -> None:
        for round_ in range(self.limits.rounds):
            if round_ >= LEAST_ROUNDS and time.monotonic() > deadline:
                return
            racing = self._racing()  # in another order each time: who comes after a pause has a cooler board
            for entry in random.Random(round_).sample(racing, len(racing)):
                with timing_lock(self.case.cluster.profile.target, 10 * self.limits.sample_s):
                    answer = self._ask(entry, {"do": "sample", "repeats": self.limits.repeats})
                if answer is not None:
                    entry.rounds.append(answer["times_ms"])
            racing = self._racing()
            if round_ + 1 >= GIVE_UP_ROUNDS and racing:
                limit = GIVE_UP * min(entry.median_ms for entry in racing)
                for entry in racing:
                    if min(entry.times_ms) > limit:
                        entry.drop(
                            "slower", f"more than {GIVE_UP:g} times the best after {round_ + 1} rounds"
                        )
            self.progress(f"{self.family}: time", round_ + 1, self.limits.rounds)

    def _winner(self) -> _Entry:
        racing = self._racing()
        if not racing:
            first = self.entries[0]
            raise VerificationError(
                f"no candidate of {self.family} gives right results; the default: {first.status} {first.detail}"
            )
        best = fastest(racing, None if self.entries[0].status else self.entries[0])
        try:
            timed = read_package(best.folder).digest
        except InputError as error:
            raise VerificationError(f"the files of the winner changed while it was timed: {error}") from error
        if timed != best.digest:
            raise VerificationError("the files of the winner changed while it was timed")
        return best

    def _ask(self, entry: _Entry, request: dict[str, Any]) -> dict[str, Any] | None:
        """A candidate's answer; None if it gave none, and is out."""
        assert entry.process is not None
        entry.process.send(request)
        answers = self._answers([entry], self.limits.sample_s, "crashed")
        return answers[0][1] if answers else None

    def _answers(
        self, entries: Sequence[_Entry], timeout_s: float, otherwise: str
    ) -> list[tuple[_Entry, dict[str, Any]]]:
        """The next answer of each; who gives none is out, as `otherwise` unless it says itself why."""
        processes = [entry.process for entry in entries if entry.process is not None]
        found = []
        with ThreadPoolExecutor(max(1, len(processes))) as pool:
            try:
                waiting = [pool.submit(process.answer, timeout_s) for process in processes]
                for entry, future in zip(entries, waiting, strict=True):
                    answer = future.result()
                    if answer is None:
                        entry.drop("hung", f"no answer within {timeout_s:g} s")
                    elif "ended" in answer:
                        entry.drop(otherwise, f"{answer['ended']}: {last_line(self._log(entry))}")
                    elif "failed" in answer:
                        entry.drop(answer["failed"], answer["detail"])
                    else:
                        found.append((entry, answer))
            except BaseException:
                for process in processes:  # or leaving the pool would wait for them
                    process.kill()
                raise
        return found

    def _log(self, entry: _Entry) -> Path:
        return entry.folder.with_suffix(".log")


def _is_block(key: str, family: str) -> bool:
    return key.startswith(f"{family}.")
