"""A point, measured on several devices: packages with and without communication, and peers that run there.

Each rank is a process that measures all points in order, contestants in turns as in `measure`. A run takes as long as
its slowest rank. A package is measured in three ways:

    infcl                       as generated
    infcl, no overlap           each transfer is waited for where it starts
    infcl, no communication     the same work, but messages are copied locally (0.3 % of a hop's time at D = 768);
                                efficiency is relative to this

Rows have `ranks` > 1, the global `batch`, the largest peak of any rank, and the plan's `transport`.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from infcl_gen.bench.measure import described, first_runs, judged
from infcl_gen.bench.peers import PEERS
from infcl_gen.bench.point import Inputs, Point, Step, own_keywords, step_of, training_step
from infcl_gen.bench.results import Row, Rows, planned_figures
from infcl_gen.bench.timing import Timer, Times, time_figures, turns
from infcl_gen.emission import import_package
from infcl_gen.processes import Seat
from infcl_gen.runtime.table import MAILBOX_BYTES
from infcl_gen.verification.memory import PeakMeter

HOW = {"infcl": None, "infcl, no overlap": "no overlap", "infcl, no communication": "no communication"}


def measure_rank(job: dict[str, Any], seat: Seat) -> Rows:
    """The task of each rank: the rows of all points. With `once` each package takes one step from an idle device."""
    points = [Point(**point) for point in job["points"]]
    seat.join_group(points[0].device, job["timeout_s"])
    measure = _once if job["once"] else _in_turns
    modules = [import_package(Path(point.packages[0]), edited=True) for point in points]
    return [row for each in zip(points, modules, strict=True) for row in measure(*each, seat.rank)]


def _row(point: Point, name: str, spec: Mapping[str, Any]) -> Row:
    """A contestant's row before it is measured. Predicted times are of the package as generated."""
    if name not in HOW:
        return point.row(name) | {"transport": None}
    row = point.row(point.packages[0]) | planned_figures(spec, times=name == "infcl")
    return row | {"package": HOW[name], "transport": spec["plan"]["schedule"]["transport"]}


def _once(point: Point, module: ModuleType, rank: int) -> Rows:
    """The row of one step, after a small step that compiles."""
    small = min(2 * module.SPEC["plan"]["panel_rows"], *map(point.shard, range(point.ranks)))
    first = point.inputs(rank, small)
    training_step(module, *first.leaves, bias=first.bias)()
    del first
    inputs, timer = point.inputs(rank), RanksTimer(point.device)
    step = training_step(module, *inputs.leaves, bias=inputs.bias)
    results: list[tuple[Any, ...]] = []
    with PeakMeter(inputs.q.device) as meter:
        time_ms, _ = timer.idle_ms(lambda: results.append(step()))
    defect = judged(results[0], inputs.wanted)[1]
    wrong, peak = _largest([defect is not None, meter.peak_bytes], point.device)
    row = _row(point, "infcl", module.SPEC)
    unseen = MAILBOX_BYTES * module.SPEC["plan"]["schedule"]["copy_engines"]  # by torch's statistics
    if wrong or peak + unseen > row["predicted_peak_bytes"]:
        return [row | {"error": "not finite" if wrong else f"took {round(peak)} bytes"}]
    return [row | time_figures([Times(time_ms, None)]) | {"peak_bytes": round(peak)}]


def _in_turns(point: Point, module: ModuleType, rank: int) -> Rows:
    """The rows of all contestants."""
    shards = list(map(point.shard, range(point.ranks)))
    inputs = point.inputs(rank)
    first = sum(shards[:rank])
    steps = {name: _package_step(module, inputs, first, carrier) for name, carrier in carriers(module, shards).items()}
    if len(set(shards)) == 1:  # with uneven shards peers abort or hang
        for name in point.peers:
            prepare = PEERS[name].on_ranks
            assert prepare is not None
            steps[name] = step_of(prepare(inputs, rank=rank, world_size=point.ranks), *inputs.leaves)
    rows = {name: _row(point, name, module.SPEC) for name in (*HOW, *point.peers)}
    for name, row in rows.items():
        if name in steps:
            row |= _first(steps[name], inputs, HOW.get(name) != "no communication")
        else:
            row["error"] = "needs as many rows on each rank"
    timer = RanksTimer(point.device)
    times: dict[str, list[Times]] = {name: [] for name, row in rows.items() if row["error"] is None}
    for _, name in turns(list(times), point.rounds):
        times[name].append(timer.times(steps[name]))
    return [row | time_figures(times[name]) if name in times else row for name, row in rows.items()]


def _package_step(module: ModuleType, inputs: Inputs, first: int, carrier: Any) -> Step:
    """A step whose messages go by `carrier`; `first`: the batch's row that this rank begins with."""
    own = own_keywords(module.SPEC, *inputs.leaves[:2], first)
    use_group = importlib.import_module(f"{module.__name__}._runtime.group").use_group

    def loss() -> Any:
        use_group(carrier)
        return module.contrastive_loss(*inputs.leaves, inputs.bias, **own)

    return step_of(loss, *inputs.leaves)


def _first(step: Step, inputs: Inputs, true: bool) -> Row:
    """First runs on all ranks: an error of some rank, else the largest peak. `true`: the results are the loss's and
    must be finite; without communication an uneven shard's may not be."""
    peak, error = 0, None
    try:
        peak, _, defect = first_runs(step, inputs)
        error = defect if true else None
    except Exception as failure:
        error = described(failure, inputs.q.device.type)
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (peak, error))
    error = next((text for _, text in found if text), None)
    return {"error": error, "peak_bytes": None if error else max(size for size, _ in found)}


class RanksTimer(Timer):
    """Times of the slowest rank. All ranks begin together, on an idle device and behind other work."""

    def idle_ms(self, run: Callable[[], object]) -> tuple[float, float]:
        _meet(self.device)
        idle_ms, host_ms = _largest(super().idle_ms(run), self.device)
        return idle_ms, host_ms

    def queued_ms(self, run: Callable[[], object], lead_ms: float) -> tuple[float, bool]:
        _meet(self.device)
        queued_ms, late = _largest(super().queued_ms(run, lead_ms), self.device)
        return queued_ms, bool(late)

    def gather(self) -> None:
        """Devices wait for each other, hosts do not: the leads of all ranks end together."""
        torch.distributed.all_reduce(torch.zeros(1, device=self.device))


def _meet(device: str) -> None:
    torch.distributed.barrier()
    if device == "cuda":
        torch.cuda.synchronize()


def _largest(values: Sequence[float], device: str) -> list[float]:
    """Each value's maximum over the ranks."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return [float(value) for value in found.tolist()]


def carriers(module: ModuleType, shards: Sequence[int]) -> dict[str, Any]:
    """For each way in HOW the group that carries messages between `shards` rows per rank, of the package's own kind."""
    groups = importlib.import_module(f"{module.__name__}._runtime.group")
    plain = groups.find_group("")

    class AtOnce(groups.Group):  # type: ignore[name-defined]
        """Waits for each transfer where it starts."""

        overlaps = False

        def post(self, sends: Any, receives: Any) -> list[Any]:
            for work in super().post(sends, receives):
                work.wait()
            return []

    class Copied(groups.Group):  # type: ignore[name-defined]
        """Copies what would be sent to where a message would arrive, and answers exchanges for all ranks."""

        overlaps = False

        def post(self, sends: Any, receives: Any) -> list[Any]:
            # In a gather the buffers are as long as their owners' shards.
            for sent, received in zip(sends, receives, strict=False):
                source, target = sent.buffer.view(-1), received.buffer.view(-1)
                target.zero_()  # uninitialised memory may hold NaN, which raises flags
                target[: len(source)].copy_(source[: len(target)])
            return []

        def exchange(self, header: Any, phase: str = "forward", call: int | None = None) -> list[Any]:
            order = {"protocol": 0, "phase": phase, "trips finished": 0, "call number": call or 0}
            # Ranks that say the same share one header, as in the ring: comparing two takes the host 15 us.
            said = {rows: {**header, **order, "rows": rows, "keys": rows} for rows in shards}
            return [said[rows] for rows in shards]

    ways = {"infcl, no overlap": AtOnce, "infcl, no communication": Copied}
    return {"infcl": plain} | {name: way(plain.process_group) for name, way in ways.items()}
