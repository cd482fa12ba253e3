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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.bench.measure import measure_point
from infcl_gen.bench.peers import Peer
from infcl_gen.bench.point import Point, point_of
from infcl_gen.bench.results import Rows
from infcl_gen.bench.ring import TIMEOUT_S, measure_ring
from infcl_gen.emission import read_package
from infcl_gen.errors import ToolchainError
from infcl_gen.files import timing_lock
from infcl_gen.processes import Answer, Requests, Worker

Progress = Callable[[str, int, int], None]  # what is measured, how many are done, of how many
Done = Callable[[Rows], None]
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


class Contest(contextlib.AbstractContextManager["Contest"]):
    """Measures points one after the other, on one device in one worker as long as it lives, and ends that on leaving.

    `absent` names the peers that could not take part, with the reason.
    """

    def __init__(
        self, peers: Sequence[Peer], scale: float = 14.3, limits: Limits | None = None, feature_dtype: str | None = None
    ) -> None:
        """`feature_dtype` as for `bench.point_of`."""
        self.scale, self.limits, self.feature_dtype = scale, limits or Limits(), feature_dtype
        self.absent: dict[str, str] = {}
        self._peers = tuple(peers)
        self._worker: Worker | None = None
        self._exits = contextlib.ExitStack()

    def __exit__(self, *_: object) -> None:
        self._end()

    def point(self, packages: Sequence[Path], batch: int | None = None, only: Sequence[str] | None = None) -> Point:
        """The point of these packages at `batch` queries, with the peers named in `only` (None: all), not measured.

        Raises InputError as `bench.point_of` does.
        """
        read = [read_package(folder, edited=True) for folder in packages]
        limits, size = self.limits, batch or read[0].spec["problem"]["batch_size"]
        names, errors = self._present(read[0].spec["loss"], only), size <= limits.errors_up_to
        return point_of(read, size, names, self.scale, limits.rounds, limits.seconds, errors, self.feature_dtype)

    def rows(self, point: Point) -> Rows:
        """A row of everybody at the point, packages first. Raises ToolchainError if the worker cannot even start,
        or has not the package's device."""
        found: dict[str, dict[str, Any]] = {}
        with timing_lock(point.target, 10 * self.limits.silent_s):
            while waiting := [name for name in point.contestants if name not in found]:
                turn, failure = self._attempt(point.only(waiting), found)
                if turn is not None and turn not in found:
                    _LOG.info("%s: %s", turn, failure)
                    found[turn] = {**point.row(turn), "error": failure}
                elif not found.keys() >= set(waiting):
                    raise ToolchainError(f"nothing can be measured: {failure}")
        return [found[name] for name in point.contestants]

    def ring(self, packages: Sequence[Path], ranks: int, only: Sequence[str] | None = None, once: bool = False) -> Rows:
        """The rows of everybody at the packages' batch sizes on several devices, as `measure_ring` takes and raises."""
        peers = self._present(read_package(packages[0], edited=True).spec["loss"], only)
        timeout_s = self.limits.silent_s if once else TIMEOUT_S
        return measure_ring(packages, ranks, peers, self.scale, self.limits.rounds, timeout_s, once)

    def _present(self, loss: dict[str, Any], only: Sequence[str] | None) -> list[str]:
        """Who of the peers named in `only` (None: all) can take part; the others are `absent`."""
        wanted = [peer for peer in self._peers if only is None or peer.name in only]
        absent = {peer.name: why for peer in wanted if (why := peer.absent(loss)) is not None}
        self.absent |= absent
        return [peer.name for peer in wanted if peer.name not in absent]

    def _attempt(self, point: Point, found: dict[str, dict[str, Any]]) -> tuple[str | None, str]:
        """Adds rows to `found`. If the worker was lost: during whose turn (None: nobody's) and how."""
        if self._worker is None:
            scratch = self._exits.enter_context(tempfile.TemporaryDirectory(prefix="infcl-gen-bench-"))
            self._worker = Worker("infcl_gen.bench.contest:work", [], Path(scratch) / "worker.log")
            self._exits.callback(self._worker.kill)
        self._worker.send(dataclasses.asdict(point))
        turn: str | None = None
        while True:
            patience_s = self.limits.silent_s if turn else max(self.limits.silent_s, START_S)
            answer = self._worker.answer(patience_s)
            if answer is None or "ended" in answer:
                failure = answer["ended"] if answer else f"no result within {patience_s:g} s"
                self._end()
                return turn, str(failure)[:300]
            if "refused" in answer:
                raise ToolchainError(answer["refused"])
            if "done" in answer:
                return None, ""
            if "row" in answer:
                found[answer["name"]] = answer["row"]
            else:
                turn = answer["running"]

    def _end(self) -> None:
        self._exits.close()
        self._worker = None


def work(requests: Requests, answer: Answer) -> None:
    """The worker: points are asked for, rows answered. It goes from one to the next with the same libraries loaded.

    A request has the fields of a Point. Answers are {"running": NAME or null} and {"name": NAME, "row": {...}}, many of
    them, then {"done": true}; or {"refused": why}, where this machine cannot measure it.
    """
    warnings.simplefilter("ignore")  # of the peers, to their own users; the log is for what goes wrong
    while True:
        try:
            measure_point(
                Point(**requests.get()),
                report=lambda name, row: answer(name=name, row=row),
                announce=lambda name: answer(running=name),
            )
        except ToolchainError as error:
            answer(refused=str(error))
        else:
            answer(done=True)


def run(contest: Contest, work: Work, progress: Progress = lambda *_: None, done: Done = lambda _: None) -> Rows:
    """The rows of every (packages, batch) in `work`; `done` gets those so far after each of them.

    All points are checked before the first is measured.
    """
    points = [contest.point(packages, batch) for packages, batch in work]
    rows: Rows = []
    for index, point in enumerate(points):
        progress(f"{point.loss}, B {point.batch}, D {point.dim}", index, len(points))
        rows += contest.rows(point)
        done(rows)
    return rows
