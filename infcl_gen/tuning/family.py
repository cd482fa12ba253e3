"""The search in one family of kernels: candidates are judged, compiled, checked and timed, each in its own process."""

import contextlib
import dataclasses
import math
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.emission.package import content_digest, read_package, write_package
from infcl_gen.emission.pipeline import build_for
from infcl_gen.errors import InfclError, InputError, VerificationError
from infcl_gen.files import timing_lock
from infcl_gen.hardware import Cluster
from infcl_gen.inputs.overrides import BLOCK_FIELDS
from infcl_gen.inputs.problem import Problem
from infcl_gen.kernels import TILES, families
from infcl_gen.losses import LossSpec, derive
from infcl_gen.planning import Plan, plan
from infcl_gen.planning.records import Candidate, Settings, measured_settings
from infcl_gen.processes import Progress, Worker

LEAST_GAIN = 0.01  # by which a winner beats the best so far; and by more than the doubt in both medians
GIVE_UP = 1.3  # after GIVE_UP_ROUNDS a candidate whose best time exceeds this many times the best median is dropped
GIVE_UP_ROUNDS = 2
LEAST_ROUNDS = 5  # even when the time is up
COMPILE_SHARE = 0.3  # of a family's time; loading, checking and timing the best few take the rest


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much is tried, and how long each step of one candidate may take."""

    minutes: float = 20.0
    compiled: int = 48  # candidates of a family
    timed: int = 8
    rounds: int = 15
    repeats: int = 2
    jobs: int = os.cpu_count() or 1
    compile_s: float = 180.0
    gate_s: float = 420.0
    sample_s: float = 120.0


@dataclasses.dataclass(frozen=True)
class Case:
    """What is tuned: the problem with only the user's own settings, and its plan by the cost model."""

    problem: Problem
    loss: LossSpec
    cluster: Cluster
    default: Plan

    def plan(self, settings: Settings) -> Plan:
        """The plan of a candidate. Raises InputError or InfeasibleError if there is none."""
        found = plan(self._with(settings), derive(self.loss), self.cluster)
        if found.strategy != self.default.strategy:
            raise InputError(f"the strategy would be {found.strategy}, not {self.default.strategy}")
        return found

    def files(self, settings: Settings) -> dict[str, str]:
        """The text of a candidate's package."""
        return build_for(self._with(settings), self.loss, self.cluster)

    def _with(self, settings: Settings) -> Problem:
        return dataclasses.replace(self.problem, settings=measured_settings(self.problem.settings, settings))


Proposed = tuple[str, Settings]


@dataclasses.dataclass
class Entry:
    """A candidate on its way; `status` is "" while it is in the race."""

    settings: Settings
    folder: Path
    predicted_ms: float | None = None
    distance: float = 0.0
    digest: str = ""
    status: str = ""
    detail: str = ""
    process: Worker | None = None
    rounds: list[list[float]] = dataclasses.field(default_factory=list)

    @property
    def times_ms(self) -> tuple[float, ...]:
        return tuple(round(value, 6) for values in self.rounds for value in values)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def doubt_ms(self) -> float:
        """Two standard errors of the median over rounds, within which drift is alike; by the median deviation, in which
        outliers do not count."""
        rounds = [statistics.median(values) for values in self.rounds]
        middle = statistics.median(rounds)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in rounds)
        return 2 * 1.25 * spread / math.sqrt(len(rounds))

    def candidate(self, family: str) -> Candidate:
        status, detail = self.status or "timed", self.detail[:300]
        return Candidate(family, self.settings, status, detail, self.predicted_ms, self.times_ms)

    def drop(self, status: str, detail: str) -> None:
        self.status, self.detail = status, detail
        self.end()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()


def hopeless(racing: Sequence[Entry]) -> list[Entry]:
    """The candidates whose best time is more than GIVE_UP times the least median."""
    limit = GIVE_UP * min((entry.median_ms for entry in racing), default=0.0)
    return [entry for entry in racing if min(entry.times_ms) > limit]


def fastest(racing: Sequence[Entry], incumbent: Entry | None) -> Entry:
    """The least median wins, if it beats the incumbent by LEAST_GAIN and by the doubt in both."""
    best = min(racing, key=lambda entry: entry.median_ms)
    if incumbent is None:
        return best
    gain = incumbent.median_ms - best.median_ms
    noise = max(LEAST_GAIN * incumbent.median_ms, math.hypot(incumbent.doubt_ms, best.doubt_ms))
    return best if gain > noise else incumbent


@dataclasses.dataclass
class Family:
    """The search in one family. The first entry is the best so far, which wins ties."""

    case: Case
    family: str
    best: Settings
    limits: Limits
    scratch: Path
    progress: Progress = lambda *_: None
    earlier: Mapping[Proposed, float] = dataclasses.field(default_factory=dict)
    entries: list[Entry] = dataclasses.field(default_factory=list)

    def run(self, others: Sequence[Settings], deadline: float) -> tuple[Settings, str, tuple[Candidate, ...]]:
        """The winner's settings, the digest of its package as it was timed, and every candidate with its fate.

        Raises VerificationError if no candidate is right, or the winner's files changed meanwhile.
        """
        for index, settings in enumerate(dict.fromkeys([self.best, *others])):
            self.entries.append(Entry(settings, self.scratch / f"candidate{index}"))
        try:
            self._judge_legality()
            self._rank(self.limits.compiled)
            now = time.monotonic()
            self._compile(now + COMPILE_SHARE * (deadline - now))
            self._rank(self.limits.timed)
            self._gate()
            self._time(deadline)
            winner = self._winner()
        finally:
            for entry in self.entries:
                entry.end()
        return winner.settings, winner.digest, tuple(entry.candidate(self.family) for entry in self.entries)

    def _racing(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.status]

    def _judge_legality(self) -> None:
        """Drop illegal candidates, and remove those whose plan is that of an earlier one."""
        entries, self.entries, seen = self.entries, [], []
        for entry in entries:
            try:
                planned = self._plan(entry)
            except InfclError as error:
                entry.drop("illegal", str(error))
            else:
                entry.predicted_ms = 1e3 * planned.predicted_time_s
                tiles = (planned.panel_rows, planned.panel_keys, planned.product_by, planned.blocks)
                if tiles in seen:
                    continue
                seen.append(tiles)
            self.entries.append(entry)

    def _plan(self, entry: Entry) -> Plan:
        """The plan of a candidate, and its distance from the default block. Raises InfclError if it is illegal."""
        default, prefix = self.case.default, f"{self.family}."
        if fields := {key.removeprefix(prefix): int(size) for key, size in entry.settings if key.startswith(prefix)}:
            base = default.blocks[self.family]
            block = dataclasses.replace(base, **fields)
            entry.distance = sum(abs(math.log2(getattr(block, n) / getattr(base, n))) for n in BLOCK_FIELDS)
            if found := TILES[self.family].violations(block, default, self.case.cluster.profile):
                raise InputError("; ".join(found))
        return self.case.plan(entry.settings)

    def _rank(self, count: int) -> None:
        """Keep the best so far as the first, then the `count` - 1 most promising in order. Those that earlier records
        found fast come first, up to half of what is timed."""
        first, *others = self.entries
        racing = [entry for entry in others if not entry.status]
        racing.sort(key=lambda entry: (entry.predicted_ms, entry.distance))
        known = [entry for entry in racing if proposed(self.family, entry.settings) in self.earlier]
        known.sort(key=lambda entry: self.earlier[proposed(self.family, entry.settings)])
        fast = known[: self.limits.timed // 2]
        racing = [*fast, *(entry for entry in racing if entry not in fast)]
        self.entries = [first, *racing, *(entry for entry in others if entry.status)]
        for entry in racing[count - 1 :]:
            entry.drop("not timed", "others are predicted to be faster, are nearer to the default, or were fast before")

    def _start(self, entry: Entry, task: str, *arguments: str) -> None:
        if not entry.digest:
            self._write(entry)
        log = entry.folder.with_suffix(".log")
        entry.process = Worker(f"infcl_gen.tuning.worker:{task}", [str(entry.folder), *arguments], log)

    def _write(self, entry: Entry) -> None:
        files = self.case.files(entry.settings)
        write_package(files, entry.folder)
        entry.digest = content_digest(files)

    def _compile(self, until: float) -> None:
        """For a GPU, ahead of time, all but the best so far; those not begun at `until` are dropped."""
        from infcl_gen.verification.aot import SHARED_BYTES

        arch, default = self.case.cluster.profile.arch, self.case.default
        # A forward with a stash has the gradient's tiles, so it may also spill or not fit.
        blocks = (self.family, "forward") if default.stash and self.family == "gradient" else (self.family,)
        compiled = (each for family in families(default) for each in family.kernels(default))
        kernels = [each.name for each in compiled if each.block in blocks]
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
                self._start(entry, "compile_kernels", arch, *kernels)
            self._answers(part, self.limits.compile_s, otherwise="does not compile")
            for entry in part:
                entry.end()
            self.progress(f"{self.family}: compile", start + len(part), len(todo))

    def _gate(self) -> None:
        """Each process runs the numerics gate, all at once; then each compares a step of the planned size."""
        for entry in self._racing():
            self._start(entry, "run")
        self._answers(self._racing(), self.limits.gate_s)
        self.progress(f"{self.family}: check", 1, 2)
        # One after the other, since their tensors would not fit together; against the first, the best so far.
        file, written = str(self.scratch / "reference.pt"), False
        for entry in self._racing():
            written |= bool(self._answers([entry], self.limits.sample_s, {"file": file, "reference": not written}))
        self.progress(f"{self.family}: check", 2, 2)

    def _time(self, deadline: float) -> None:
        for round_ in range(self.limits.rounds):
            if round_ >= LEAST_ROUNDS and time.monotonic() > deadline:
                return
            racing = self._racing()  # in another order each time: the first after a pause has a cooler board
            for entry in random.Random(round_).sample(racing, len(racing)):
                with timing_lock(self.case.cluster.profile.target, 10 * self.limits.sample_s):
                    answers = self._answers([entry], self.limits.sample_s, {"repeats": self.limits.repeats})
                entry.rounds += [answer["times_ms"] for answer in answers]
            if round_ + 1 >= GIVE_UP_ROUNDS:
                for entry in hopeless(self._racing()):
                    entry.drop("slower", f"more than {GIVE_UP:g} times the best after {round_ + 1} rounds")
            self.progress(f"{self.family}: time", round_ + 1, self.limits.rounds)

    def _winner(self) -> Entry:
        first, racing = self.entries[0], self._racing()
        if not racing:
            fate = f"the default: {first.status} {first.detail}"
            raise VerificationError(f"no candidate of {self.family} gives right results; {fate}")
        best = fastest(racing, None if first.status else first)
        with contextlib.suppress(InputError):
            if read_package(best.folder).digest == best.digest:
                return best
        raise VerificationError("the files of the winner changed while it was timed")

    def _answers(
        self, entries: Sequence[Entry], timeout_s: float, request: Any = None, otherwise: str = "crashed"
    ) -> list[dict[str, Any]]:
        """The next answer of each, to `request` if there is one. Dropped: who hangs, fails, or ends (`otherwise`)."""
        deadline, found = time.monotonic() + timeout_s, []
        for entry in entries:
            assert entry.process is not None
            if request is not None:
                entry.process.send(request)
            answer = entry.process.answer(deadline - time.monotonic())
            if answer is None:
                entry.drop("hung", f"no answer within {timeout_s:g} s")
            elif "ended" in answer:
                entry.drop(otherwise, answer["ended"])
            elif "failed" in answer:
                entry.drop(answer["failed"], answer["detail"])
            else:
                found.append(answer)
        return found


def proposed(family: str, settings: Settings) -> Proposed:
    """What a candidate changes in its own family."""
    return family, tuple(pair for pair in settings if belongs(pair[0], family))


def belongs(key: str, family: str) -> bool:
    if family == "panel":
        return key in ("panel_rows", "panel_keys")
    return key in TILES[family].settings
