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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from infcl_gen.bench.measure import measure_point
from infcl_gen.bench.peers import Peer
from infcl_gen.bench.point import Point, point_of
from infcl_gen.bench.results import Rows
from infcl_gen.emission import read_package
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.files import timing_lock
from infcl_gen.processes import Answer, Requests, Worker, run_ranks

# For the worker to import torch and to prepare a point, which is nobody's turn: 3 s on an idle machine, and
# more than 120 were seen on one with two cores amid a whole test-suite. That is no reason to measure nothing.
START_S = 600.0
RING_S = 600.0
_KINDS = ("packages", "peers")
_LOG = logging.getLogger("infcl_gen")


@dataclasses.dataclass(frozen=True)
class Limits:
    """How often everything runs, and how long the worker may be silent: one contestant's compilation and first runs."""

    rounds: int = 10
    seconds: float = 20.0  # of timed runs at a point; everybody has at least three
    silent_s: float = 300.0
    errors_up_to: int = 32768  # queries; fp64 is slow on most GPUs


class Contest(contextlib.ExitStack):
    """Measures points one after the other, on one device in one worker as long as it lives, and ends that on leaving.

    `absent` names the peers that could not take part, with the reason. `feature_dtype` as for `point_of`.
    """

    def __init__(
        self, peers: Sequence[Peer], scale: float = 14.3, limits: Limits | None = None, feature_dtype: str | None = None
    ) -> None:
        super().__init__()
        self.scale, self.limits, self.feature_dtype = scale, limits or Limits(), feature_dtype
        self.absent: dict[str, str] = {}
        self._peers = tuple(peers)
        self._worker: Worker | None = None

    def point(
        self, packages: Sequence[Path], batch: int | None = None, only: Sequence[str] | None = None, ranks: int = 1
    ) -> Point:
        """The point of these packages at `batch` queries, with the peers named in `only` (None: all), not measured.

        Raises InputError as `point_of` does.
        """
        read = [read_package(folder, edited=True) for folder in packages]
        spec, limits = read[0].spec, self.limits
        wanted = {peer.name: peer.absent(spec["loss"]) for peer in self._peers if only is None or peer.name in only}
        self.absent |= {name: why for name, why in wanted.items() if why is not None}
        present = [name for name, why in wanted.items() if why is None]
        errors = (batch or spec["problem"]["batch_size"]) <= limits.errors_up_to
        features = self.feature_dtype if ranks == 1 else None  # on several devices: the packages' own
        return point_of(read, batch, present, self.scale, limits.rounds, limits.seconds, errors, features, ranks)

    def rows(self, point: Point) -> Rows:
        """A row of everybody at the point, packages first. Raises ToolchainError if the worker cannot even start,
        or has not the package's device."""
        found: dict[str, dict[str, Any]] = {}
        turn, asked = None, False
        with timing_lock(point.target, 10 * self.limits.silent_s):
            while waiting := [name for name in point.contestants if name not in found]:
                worker = self._worker = self._worker or self._started()
                if not asked:
                    left = {kind: [name for name in getattr(point, kind) if name in waiting] for kind in _KINDS}
                    worker.send(dataclasses.asdict(point) | left)
                    turn, asked = None, True
                patience_s = self.limits.silent_s if turn else max(self.limits.silent_s, START_S)
                answer = worker.answer(patience_s)
                if answer is None or "ended" in answer:
                    failure = str(answer["ended"] if answer else f"no result within {patience_s:g} s")[:300]
                    self.close()
                    self._worker, asked = None, False
                    if turn is None or turn in found:
                        raise ToolchainError(f"nothing can be measured: {failure}")
                    _LOG.info("%s: %s", turn, failure)
                    found[turn] = {**point.row(turn), "error": failure}
                elif "refused" in answer:
                    raise ToolchainError(answer["refused"])
                elif answer["row"] is None:
                    turn = answer["name"]
                else:
                    found[answer["name"]] = answer["row"]
        return [found[name] for name in point.contestants]

    def ring(self, packages: Sequence[Path], ranks: int, only: Sequence[str] | None = None, once: bool = False) -> Rows:
        """The rows of everybody at the packages' batch sizes on several devices, peers beside the first package for a
        batch; `once`: of one step of each package. Raises InputError for packages with other keys than queries,
        ToolchainError without the GPUs or if a rank fails."""
        points: list[Point] = []
        for folder in packages:
            point = self.point([folder], None, only, ranks)
            if point.keys != point.batch:
                raise InputError(f"--keys: rings are measured with a key for each query; {folder} has {point.keys}")
            compared = any(point.batch == other.batch for other in points)
            points.append(dataclasses.replace(point, peers=()) if compared else point)
        if point.device == "cuda" and (gpus := torch.cuda.device_count()) < ranks:
            raise ToolchainError(f"--ranks: {ranks} GPUs are needed, and {gpus} are here")
        timeout_s = self.limits.silent_s if once else RING_S
        # A rank of one long step waits for the others as long as all may take.
        job = {"points": list(map(dataclasses.asdict, points)), "once": once, "timeout_s": timeout_s if once else 120.0}
        with timing_lock(point.target, 2 * timeout_s):
            rows: Rows = run_ranks("infcl_gen.bench.ring:measure_rank", job, ranks, timeout_s)[0]
        return rows

    def _started(self) -> Worker:
        scratch = self.enter_context(tempfile.TemporaryDirectory(prefix="infcl-gen-bench-"))
        worker = Worker("infcl_gen.bench.contest:work", [], Path(scratch) / "worker.log")
        self.callback(worker.kill)
        return worker


def work(requests: Requests, answer: Answer) -> None:
    """The worker: points are asked for, rows answered. It goes from one to the next with the same libraries loaded.

    A request has the fields of a Point. Answers are what `measure_point` yields, as {"name": NAME, "row": ROW}; or
    {"refused": why}, where this machine cannot measure it.
    """
    warnings.simplefilter("ignore")  # of the peers, to their own users; the log is for what goes wrong
    while True:
        try:
            for name, row in measure_point(Point(**requests.get())):
                answer(name=name, row=row)
        except ToolchainError as error:
            answer(refused=str(error))
