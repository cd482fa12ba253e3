"""A point, measured on several devices: packages with and without their communication, and peers that run there.

`measure_ring` starts a process for each rank; they run all points one after the other, everybody in turns as in
`measure`, and the time of a run is that of its slowest rank. A package is measured three times:

    infcl                       as it is
    infcl, no overlap           each transfer is waited for where it starts
    infcl, no communication     the same work on every rank, but what would be sent is copied to where it would arrive
                                (0.3 % of a hop's time at D = 768): what efficiency is relative to

Rows are those of `bench`, with `ranks` > 1, the global `batch`, the largest peak of any rank, and how keys travel
(`transport`). `once` is for batches that take minutes: one step of each package as it is, on an idle device.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from infcl_gen.bench.measure import described, first_runs, judged
from infcl_gen.bench.peers import PEERS, chosen_peers
from infcl_gen.bench.point import Point, point_of
from infcl_gen.bench.results import Rows, planned_figures
from infcl_gen.bench.steps import Inputs, Step, inputs_of, step_of, training_step
from infcl_gen.bench.timing import Timer, Times, time_figures, turns
from infcl_gen.emission import import_package, read_package
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.files import timing_lock
from infcl_gen.processes import Seat, run_ranks
from infcl_gen.verification.memory import PeakMeter

TIMEOUT_S = 600.0
HOW = {"infcl": None, "infcl, no overlap": "no overlap", "infcl, no communication": "no communication"}


def measure_ring(
    packages: Sequence[Path],
    ranks: int,
    peers: Sequence[str] = (),
    scale: float = 14.3,
    rounds: int = 10,
    timeout_s: float = TIMEOUT_S,
    once: bool = False,
) -> Rows:
    """A row of everybody at the batch size of each package, which must have been planned for that many devices. Peers
    are measured beside the first package for a batch.

    Raises InputError for another package or peer, ToolchainError without the GPUs or if a rank fails.
    """
    chosen_peers(list(peers), ranks)
    points: list[Point] = []
    for folder in packages:
        package = read_package(Path(folder).resolve(), edited=True)
        compared = package.spec["problem"]["batch_size"] in {point.batch for point in points}
        point = point_of([package], None, () if compared else peers, scale, rounds, ranks=ranks)
        if point.keys != point.batch:
            raise InputError(f"--keys: rings are measured with a key for each query; {folder} has {point.keys}")
        points.append(point)
    gpus = torch.cuda.device_count()
    if gpus < ranks and any(point.device == "cuda" for point in points):
        raise ToolchainError(f"--ranks: {ranks} GPUs are needed, and {gpus} are here")
    # A rank of one long step waits for the others as long as all may take.
    job = {"points": list(map(dataclasses.asdict, points)), "once": once, "timeout_s": timeout_s if once else 120.0}
    with timing_lock(points[0].target, 2 * timeout_s):
        rows: Rows = run_ranks("infcl_gen.bench.ring:measure_rank", job, ranks, timeout_s)[0]
    return rows


def measure_rank(job: dict[str, Any], seat: Seat) -> Rows:
    """The rows of all points, on each rank."""
    points = [Point(**point) for point in job["points"]]
    seat.join_group(points[0].device, job["timeout_s"])
    measure = _once if job["once"] else _point
    return [row for point in points for row in measure(point, seat.rank)]


def _shards(point: Point) -> list[int]:
    """Rows of each rank."""
    return [point.batch // point.ranks + (rank < point.batch % point.ranks) for rank in range(point.ranks)]


def _row(point: Point, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Of one contestant, before anything is measured; times are predicted of a package as it is."""
    if name not in HOW:
        return point.row(name) | {"transport": None}
    ours = point.row(point.packages[0]) | planned_figures(spec, times=name == "infcl")
    return ours | {"package": HOW[name], "transport": spec["plan"]["schedule"]["transport"]}


def _once(point: Point, rank: int) -> Rows:
    """The row of one step, after a small one that compiles."""
    module, shards = import_package(Path(point.packages[0]), edited=True), _shards(point)
    small = min(2 * module.SPEC["plan"]["panel_rows"], *shards)
    training_step(module, *inputs_of(point, small, small, rank).leaves)()
    inputs, timer = inputs_of(point, shards[rank], shards[rank], rank), Timer(point.device)
    results: list[tuple[Any, ...]] = []
    step = training_step(module, *inputs.leaves)
    _meet(point.device)
    with PeakMeter(inputs.q.device) as meter:
        time_ms, _ = timer.idle_ms(lambda: results.append(step()))
    _, defect = judged(results[0])
    time_ms, peak, wrong = _largest([time_ms, meter.peak_bytes, defect is not None], point.device)
    row = _row(point, "infcl", module.SPEC)
    if wrong:
        return [row | {"error": "not finite"}]
    if peak > row["predicted_peak_bytes"]:
        return [row | {"error": f"took {round(peak)} bytes"}]
    return [row | time_figures([Times(time_ms, None)]) | {"peak_bytes": round(peak)}]


def _point(point: Point, rank: int) -> Rows:
    """The rows of everybody."""
    module, shards = import_package(Path(point.packages[0]), edited=True), _shards(point)
    inputs = inputs_of(point, shards[rank], shards[rank], rank)
    carrying = carriers(module, shards)
    steps = {name: _package_step(module, inputs, carrying.get(name)) for name in HOW}
    uneven = len(set(shards)) > 1  # where peers abort, or hang
    for name in () if uneven else point.peers:
        prepare = PEERS[name].on_ranks
        assert prepare is not None
        steps[name] = step_of(prepare(inputs, rank, point.ranks), *inputs.leaves)
    rows = {name: _row(point, name, module.SPEC) for name in (*HOW, *point.peers)}
    for name, row in rows.items():
        if name in steps:
            row["error"], row["peak_bytes"] = _first(steps[name], inputs, HOW.get(name) != "no communication")
        else:
            row["error"] = "needs as many rows on each rank"
    timer = RanksTimer(point.device)
    times: dict[str, list[Times]] = {name: [] for name, row in rows.items() if row["error"] is None}
    for _, name in turns(list(times), point.rounds):
        times[name].append(timer.times(steps[name]))
    for name, found in times.items():
        rows[name] |= time_figures(found)
    return list(rows.values())


def _package_step(module: ModuleType, inputs: Inputs, carrier: Any) -> Step:
    """A step whose messages go by `carrier` (None: there is one rank)."""
    groups = importlib.import_module(f"{module.__name__}._runtime.group")

    def loss() -> Any:
        if carrier is not None:
            groups.use_group(carrier)
        return module.contrastive_loss(*inputs.leaves)

    return step_of(loss, *inputs.leaves)


def _first(step: Step, inputs: Inputs, true: bool) -> tuple[str | None, int | None]:
    """Two runs, which compile and measure the peak: why there is none on some rank, and the largest one. `true`: the
    results are the loss's, and must be finite (without communication a row of an uneven shard is anything)."""
    error, peak = None, 0
    try:
        peak, _, defect = first_runs(step, inputs)
        error = defect if true else None
    except Exception as failure:
        error = described(failure, inputs.q.device.type)
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (error, peak))
    errors = [text for text, _ in found if text]
    return (errors[0], None) if errors else (None, max(size for _, size in found))


class RanksTimer(Timer):
    """Times of the slowest rank. All begin together; behind other work those whose lead is over wait for the others."""

    def idle_ms(self, run: Callable[[], object]) -> tuple[float, float]:
        _meet(self.device)
        idle_ms, host_ms = _largest(super().idle_ms(run), self.device)
        return idle_ms, host_ms

    def queued_ms(self, run: Callable[[], object], lead_ms: float) -> tuple[float, bool]:
        _meet(self.device)
        queued_ms, late = _largest(super().queued_ms(run, lead_ms), self.device)
        return queued_ms, bool(late)

    def gather(self) -> None:
        """On the devices, without their hosts: nobody's lead is over before everybody's is."""
        torch.distributed.all_reduce(torch.zeros(1, device=self.device))


def _meet(device: str) -> None:
    torch.distributed.barrier()
    if device == "cuda":
        torch.cuda.synchronize()


def _largest(values: Sequence[float], device: str) -> list[float]:
    """Each the largest of all ranks."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return [float(value) for value in found.tolist()]


def carriers(module: Any, shards: Sequence[int]) -> dict[str, Any]:
    """What carries the messages between these shards, for each way in HOW that a package is measured in: groups of the
    package's own kind, for the default process group. Empty where that is of one rank."""
    groups = importlib.import_module(f"{module.__name__}._runtime.group")
    plain = groups.find_group("")
    if plain is None:
        return {}

    class AtOnce(groups.Group):  # type: ignore[name-defined]
        """Each transfer is waited for where it starts."""

        overlaps = False

        def post(self, sends: Any, receives: Any) -> list[Any]:
            for work in super().post(sends, receives):
                work.wait()
            return []

    class Copied(groups.Group):  # type: ignore[name-defined]
        """What would be sent is copied to where it would arrive, and everybody is known to say the same."""

        overlaps = False

        def post(self, sends: Any, receives: Any) -> list[Any]:
            # A gather's are as long as their owners' shards.
            for sent, received in zip(sends, receives, strict=False):
                source, target = sent.buffer.view(-1), received.buffer.view(-1)
                target.zero_()  # what was never written might be NaN, and raise flags
                target[: len(source)].copy_(source[: len(target)])
            return []

        def exchange(self, header: Any, phase: str = "forward", call: int | None = None) -> list[Any]:
            order = {"protocol": 0, "phase": phase, "trips finished": 0, "call number": call or 0}
            # Ranks that say the same share a header, as in the ring: to compare two takes the host 15 us.
            said = {rows: {**header, **order, "rows": rows, "keys": rows} for rows in shards}
            return [said[rows] for rows in shards]

    kinds = {"infcl, no overlap": AtOnce, "infcl, no communication": Copied}
    return {"infcl": plain} | {name: kind(plain.process_group) for name, kind in kinds.items()}
