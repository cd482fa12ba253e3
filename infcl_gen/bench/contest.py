"""`infcl-gen bench`: packages and peers side by side, point by point, in a worker process.

One process measures all contestants of a point, in turns. A contestant that crashes it, or is silent for too long, gets
a row that says so; a fresh process measures the others without it.
"""

import contextlib
import dataclasses
import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from infcl_gen.bench.measure import measure_point
from infcl_gen.bench.peers import Peer
from infcl_gen.bench.point import Point, point_of
from infcl_gen.bench.results import Row, Rows
from infcl_gen.emission import read_package
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.files import timing_lock
from infcl_gen.processes import Answer, Requests, Worker, run_ranks

# For the worker to import torch and prepare a point: 3 s on an idle machine, over 120 s beside a test suite on 2 cores.
START_S = 600.0
RING_S = 600.0
_LOG = logging.getLogger("infcl_gen")


@dataclasses.dataclass(frozen=True)
class Limits:
    rounds: int = 10
    seconds: float = 20.0  # of timed runs at a point; every contestant has at least three
    silent_s: float = 300.0  # the worker's longest silence: one contestant's compilation and first runs
    errors_up_to: int = 32768  # queries; fp64 is slow on most GPUs


class Contest(contextlib.ExitStack):
    """Measures points, on one device in one worker for as long as it lives. Leaving the context ends the worker.

    `absent` maps peers that could not take part to the reason. `feature_dtype` and `gradients` as for `point_of`.
    """

    def __init__(
        self, peers: Sequence[Peer], scale: float = 14.3, limits: Limits | None = None, feature_dtype: str | None = None
    ) -> None:
        super().__init__()
        self.scale, self.limits, self.feature_dtype = scale, limits or Limits(), feature_dtype
        self.gradients = True
        self.absent: dict[str, str] = {}
        self._peers = peers
        self._worker: Worker | None = None

    def point(
        self, packages: Sequence[Path], batch: int | None = None, only: Sequence[str] | None = None, ranks: int = 1
    ) -> Point:
        """The point of these packages at `batch` queries, with the peers named in `only` (None: all).

        Raises InputError as `point_of` does.
        """
        read = [read_package(folder, edited=True) for folder in packages]
        spec, limits = read[0].spec, self.limits
        wanted = {peer.name: peer.absent(spec["loss"]) for peer in self._peers if only is None or peer.name in only}
        self.absent |= {name: why for name, why in wanted.items() if why is not None}
        present = [name for name, why in wanted.items() if why is None]
        errors = (batch or spec["problem"]["batch_size"]) <= limits.errors_up_to
        features = self.feature_dtype if ranks == 1 else None  # rings take features of the packages' dtype
        timed = self.scale, limits.rounds, limits.seconds
        return point_of(read, batch, present, *timed, errors, features, ranks, self.gradients)

    def rows(self, point: Point) -> Rows:
        """One row per contestant, packages first. Raises ToolchainError if the worker cannot start or lacks the
        device."""
        found: dict[str, Row] = {}
        with timing_lock(point.target, 10 * self.limits.silent_s):
            while waiting := [name for name in point.contestants if name not in found]:
                found |= self._attempt(point, waiting)
        return [found[name] for name in point.contestants]

    def _attempt(self, point: Point, waiting: Sequence[str]) -> dict[str, Row]:
        """Rows of the waiting contestants; without some of them where one of them takes the worker with it."""
        if self._worker is None:
            scratch = self.enter_context(tempfile.TemporaryDirectory(prefix="infcl-gen-bench-"))
            self._worker = Worker("infcl_gen.bench.contest:work", [], Path(scratch) / "worker.log")
            self.callback(self._worker.kill)
        worker = self._worker
        left = {kind: [name for name in getattr(point, kind) if name in waiting] for kind in ("packages", "peers")}
        worker.send(dataclasses.asdict(point) | left)
        found: dict[str, Row] = {}
        turn = None
        while True:
            patience_s = self.limits.silent_s if turn else max(self.limits.silent_s, START_S)
            answer = worker.answer(patience_s)
            if answer is None or "ended" in answer:
                failure = str(answer["ended"] if answer else f"no result within {patience_s:g} s")[:300]
                self.close()
                self._worker = None
                if turn is None or turn in found:
                    raise ToolchainError(f"nothing can be measured: {failure}")
                _LOG.info("%s: %s", turn, failure)
                return found | {turn: {**point.row(turn), "error": failure}}
            if "refused" in answer:
                raise ToolchainError(answer["refused"])
            if "done" in answer:
                return found
            if answer["row"] is None:
                turn = answer["name"]
            else:
                found[answer["name"]] = answer["row"]

    def ring(self, packages: Sequence[Path], ranks: int, only: Sequence[str] | None = None, once: bool = False) -> Rows:
        """Rows on several devices at the packages' batch sizes; peers run beside the first package of each batch size.

        `once` measures one step of each package. Raises InputError unless packages have one key per query,
        ToolchainError without the GPUs or if a rank fails.
        """
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
        # In one long step a rank may wait for the others until the whole run times out.
        job = {"points": list(map(dataclasses.asdict, points)), "once": once, "timeout_s": timeout_s if once else 120.0}
        with timing_lock(point.target, 2 * timeout_s):
            rows: Rows = run_ranks("infcl_gen.bench.ring:measure_rank", job, ranks, timeout_s)[0]
        return rows


def work(requests: Requests, answer: Answer) -> None:
    """The worker's task: one point after the other, with the libraries loaded once.

    A request has the fields of a Point. Answers are what `measure_point` yields, as {"name": NAME, "row": ROW},
    then {"done": true}; or {"refused": why} if this machine cannot measure the point.
    """
    warnings.simplefilter("ignore")  # peers warn their own users; the log is for failures
    while True:
        try:
            for name, row in measure_point(Point(**requests.get())):
                answer(name=name, row=row)
            answer(done=True)
        except ToolchainError as error:
            answer(refused=str(error))
