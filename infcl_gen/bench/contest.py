"""`infcl-gen bench`: packages and peers side by side, point by point, in a worker process that may be lost.

Everybody at a point is measured in one process and in turns. Who crashes it, or keeps it waiting for too long, gets a
row that says so, and the others are measured again in a fresh process without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.bench.peers import PEERS, Peer
from infcl_gen.bench.point import GENERATED, RESULTS, Point, empty_row, measure_point, point_of
from infcl_gen.bench.results import IDENTITY, SIZES, blank_row
from infcl_gen.bench.timing import timing_lock
from infcl_gen.emission import build, read_package, write_package
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.inputs.problem import Problem
from infcl_gen.losses import is_builtin
from infcl_gen.processes import Answer, Requests, Worker, last_line

Rows = list[dict[str, Any]]
Work = list[tuple[Sequence[Path], int | None]]  # packages, and the batch size (None: the planned one)
# For the worker to import torch and to prepare a point, which is nobody's turn: 3 s on an idle machine, and
# more than 120 were seen on one with two cores amid a whole test-suite. That is no reason to measure nothing.
START_S = 600.0
_LOG = logging.getLogger("infcl_gen")


@dataclasses.dataclass(frozen=True)
class Limits:
    """How often everything runs, and how long the worker may be silent: one contestant's compilation and first runs."""

    rounds: int = 10
    seconds: float = 20.0  # of timed runs at a point; everybody has at least three
    silent_s: float = 300.0
    errors_up_to: int = 32768  # queries; fp64 is slow on most GPUs


class Contest:
    """Measures points of one loss one after the other, in one worker as long as it lives, and ends that on leaving.

    `absent` names the peers that cannot take part, with the reason.
    """

    def __init__(
        self, peers: Sequence[Peer], scale: float = 14.3, limits: Limits | None = None, feature_dtype: str | None = None
    ) -> None:
        """`feature_dtype` as for `bench.point_of`."""
        self.scale, self.limits, self.feature_dtype = scale, limits or Limits(), feature_dtype
        self.absent: dict[str, str] = {}
        self._peers = tuple(peers)
        self._asked = False
        self._worker: Worker | None = None
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Contest:
        scratch = self._exits.enter_context(tempfile.TemporaryDirectory(prefix="infcl-gen-bench-"))
        self._log = Path(scratch) / "worker.log"
        self._exits.callback(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def point(self, packages: Sequence[Path], batch: int | None = None, only: Sequence[str] | None = None) -> Point:
        """The point of these packages at `batch` queries, with the peers named in `only` (None: all), not measured.

        Raises InputError as `bench.point_of` does.
        """
        read = [read_package(folder, edited=True) for folder in packages]
        limits, loss = self.limits, read[0].spec["loss"]
        size = batch or read[0].spec["problem"]["batch_size"]
        builtin = is_builtin(loss)
        for peer in self._peers:
            if not builtin:
                self.absent[peer.name] = f"computes {' and '.join(peer.losses)} only, and this is a loss of your own"
            elif loss["name"] not in peer.losses:
                self.absent[peer.name] = f"does not compute {loss['name']}"
        names = [peer.name for peer in self._peers if only is None or peer.name in only]
        errors = size <= limits.errors_up_to
        return point_of(read, size, names, self.scale, limits.rounds, limits.seconds, errors, self.feature_dtype)

    def rows(self, point: Point) -> Rows:
        """A row of everybody at the point, packages first. Raises ToolchainError if the worker cannot even start,
        or has not the package's device."""
        point = self._present(point)
        target = read_package(point.packages[0], edited=True).spec["device"]["target"]
        with timing_lock(target, 10 * self.limits.silent_s):
            found: dict[str, dict[str, Any]] = {}
            waiting = list(point.contestants)
            while waiting:
                rows, culprit, failure = self._attempt(_restricted(point, waiting))
                found |= rows
                waiting = [name for name in waiting if name not in found]
                if culprit in waiting:
                    _LOG.info("%s: %s", culprit, failure)
                    found[culprit] = {**empty_row(point, culprit), "error": failure}
                    waiting.remove(culprit)
                elif waiting:
                    raise ToolchainError(f"nothing can be measured: {failure}")
        return [found[name] for name in point.contestants]

    def _present(self, point: Point) -> Point:
        """The point without absent peers. Who is installed is asked once, of the worker, which has torch loaded."""
        if not self._asked:
            worker = self._started()
            worker.send({"do": "absent", "peers": [peer.name for peer in self._peers]})
            answer = worker.answer(self._patience_s(None))
            if answer is None or "ended" in answer:
                raise ToolchainError(f"nothing can be measured: {self._failure(answer, None)}")
            self.absent = {**answer["absent"], **self.absent}
            self._asked = True
        return dataclasses.replace(point, peers=tuple(name for name in point.peers if name not in self.absent))

    def _attempt(self, point: Point) -> tuple[dict[str, dict[str, Any]], str | None, str]:
        """Rows by contestant; and, if the worker was lost, during whose turn (None: nobody's) and how."""
        worker = self._started()
        worker.send({"do": "point", **dataclasses.asdict(point)})
        rows: dict[str, dict[str, Any]] = {}
        running: str | None = None
        while True:
            answer = worker.answer(self._patience_s(running))
            if answer is None or "ended" in answer:
                failure = self._failure(answer, running)
                self._end()
                return rows, running, failure
            if "running" in answer:
                running = answer["running"]
            elif "row" in answer:
                rows[answer["name"]] = answer["row"]
            elif "refused" in answer:
                raise ToolchainError(answer["refused"])
            else:
                return rows, None, ""

    def _started(self) -> Worker:
        if self._worker is None:
            self._worker = Worker("infcl_gen.bench.contest:work", [], self._log)
        return self._worker

    def _patience_s(self, running: str | None) -> float:
        """How long no answer is waited for while it is this contestant's turn (None: nobody's)."""
        return self.limits.silent_s if running else max(self.limits.silent_s, START_S)

    def _failure(self, answer: dict[str, Any] | None, running: str | None) -> str:
        if answer is None:
            return f"no result within {self._patience_s(running):g} s"
        return f"{answer['ended']}: {last_line(self._log)}"[:300]

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


def work(requests: Requests, answer: Answer) -> None:
    """The worker: points are asked for, rows answered. It goes from one to the next with the same libraries loaded.

    {"do": "absent", "peers": [NAME, ...]}     answers {"absent": {NAME: why}}
    {"do": "point", ...}                       the fields of a Point; answers {"running": NAME or null} and
                                               {"name": NAME, "row": {...}}, many of them, then {"done": true}; or
                                               {"refused": why}, where this machine cannot measure it
    """
    warnings.simplefilter("ignore")  # of the peers, to their own users; the log is for what goes wrong
    while True:
        request = requests.get()
        if request.pop("do") == "absent":
            found = {name: PEERS[name].absent() for name in request["peers"]}
            answer(absent={name: why for name, why in found.items() if why is not None})
            continue
        request |= {name: tuple(request[name]) for name in ("packages", "peers", "edited")}
        try:
            measure_point(
                Point(**request),
                report=lambda name, row: answer(name=name, row=row),
                announce=lambda name: answer(running=name),
            )
        except ToolchainError as error:
            answer(refused=str(error))
        else:
            answer(done=True)


def run(
    contest: Contest,
    work: Work,
    progress: Callable[[str, int, int], None] | None = None,
    finished: Callable[[Rows], None] | None = None,
) -> Rows:
    """The rows of every (packages, batch) in `work`; `finished` gets those so far after each of them.

    All points are checked before the first is measured.
    """
    points = [contest.point(packages, batch) for packages, batch in work]
    rows: Rows = []
    for index, point in enumerate(points):
        if progress is not None:
            progress(f"{point.loss}, B {point.batch}, D {point.dim}", index, len(points))
        rows += contest.rows(point)
        if finished is not None:
            finished(rows)
    return rows


@contextlib.contextmanager
def generated(problems: Iterable[Problem], devices: int = 1) -> Iterator[Work]:
    """Packages for the problems in a temporary folder, with their batch sizes: work for `run`.

    Raises InputError for a problem of another number of devices, and whatever planning raises, before anything is
    written.
    """
    texts = []
    for problem in problems:
        if problem.devices != devices:
            measured = "one device is" if devices == 1 else f"--ranks {devices} are"
            raise InputError(f"--devices: {measured} measured, not {problem.devices}; leave it out")
        texts.append((build(problem), problem.batch_size))
    with tempfile.TemporaryDirectory(prefix="infcl-gen-bench-") as folder:
        work: Work = []
        for index, (files, batch) in enumerate(texts):
            work.append(([write_package(files, Path(folder) / str(index) / GENERATED)], batch))
        yield work


def table(rows: Rows) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and lines of text: one per row, with times relative to the fastest package at its point. What a row has
    beyond the measurement format has columns of its own."""
    known = {*blank_row(dict.fromkeys(SIZES), 1, "", None, 1.0), "transport", "edited"}
    more = dict.fromkeys(name for row in rows for name in row if name not in known)
    header = (
        *("loss", "B", "D", "who", "median ms", "mean", "std", "runs", "ratio", "floor ms"),
        *("queued ms", "std", "ratio", "floor ms", "MiB"),
        *(f"err {name}" for name in RESULTS),
        *more,
        "",
    )
    return header, [(*_line(row, rows), *_extra(row, more), row["error"] or "") for row in rows]


def _extra(row: dict[str, Any], names: Iterable[str]) -> list[str]:
    values = (row.get(name, "") for name in names)
    return [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]


def _line(row: dict[str, Any], rows: Rows) -> tuple[str, ...]:
    who = row["impl"] if row["package"] in (None, GENERATED) else f"{row['impl']} {row['package']}"
    who += " (edited)" if row.get("edited") else ""
    start = (row["loss"], str(row["batch"]), str(row["dim"]), who)
    errors = [_number((row["err"] or {}).get(name), "{:.1e}") for name in RESULTS]
    if row["error"] is not None:
        return (*start, *[""] * 11, *errors)
    idle, queued = (
        [_number(row[field], "{:.2f}") for field in fields]
        for fields in (("median_ms", "mean_ms", "std_ms"), ("queued_ms", "queued_std_ms"))
    )
    idle += [str(row["repeats"]), _ratio("median_ms", row, rows), _number(row["floor_ms"], "{:.2f}")]
    queued += [_ratio("queued_ms", row, rows), _number(row["queued_floor_ms"], "{:.2f}")]
    return (*start, *idle, *queued, _number(row["peak_bytes"] and row["peak_bytes"] / 2**20, "{:.1f}"), *errors)


def _ratio(field: str, row: dict[str, Any], rows: Rows) -> str:
    """A row's time to that of the fastest package at its point."""
    fastest_ms = _fastest(field, row, rows)
    return _number(fastest_ms and row[field] and row[field] / fastest_ms, "{:.2f}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _fastest(field: str, row: dict[str, Any], rows: Rows) -> float | None:
    """Time of the fastest package at a row's point; of a ring, as it is: other transports compute nothing of use."""
    found = [
        other[field]
        for other in rows
        if other["impl"] == "infcl"
        and other[field] is not None
        and (row["ranks"] == 1 or other["package"] is None)
        and all(other[name] == row[name] for name in IDENTITY)
    ]
    return min(found, default=None)


def _restricted(point: Point, names: Sequence[str]) -> Point:
    """The same point for some of its contestants."""
    packages = tuple(name for name in point.packages if name in names)
    peers = tuple(name for name in point.peers if name in names)
    return dataclasses.replace(point, packages=packages, peers=peers)
