"""What a ring of GPUs takes: packages with and without their communication, and peers that run on several devices.

`measure_ring` starts a process for each rank; they run all points one after the other, everybody in turns as in
`bench`, and the time of a run is that of its slowest rank. A package is measured three times:

    infcl                       as it is
    infcl, no overlap           each transfer is waited for where it starts
    infcl, no communication     the same work on every rank, but what would be sent is copied to where it would arrive
                                (0.3 % of a hop's time at D = 768): what efficiency is relative to

Rows are those of `bench`, with `ranks` > 1, the global `batch`, the largest peak of any rank, and how keys travel
(`transport`). `once` is for batches that take minutes: one step of each package as it is, on an idle device.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.bench.peers import open_clip_loss
from infcl_gen.bench.point import features, one_line
from infcl_gen.bench.results import blank_row
from infcl_gen.bench.timing import Timer, Times, leads_ms, time_figures, timing_lock
from infcl_gen.emission import import_package, read_package
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.processes import Seat, run_ranks
from infcl_gen.verification.memory import PeakMeter

TASK = "infcl_gen.bench.ring:measure_rank"
TIMEOUT_S = 600.0
HOW = {"infcl": None, "infcl, no overlap": "no overlap", "infcl, no communication": "no communication"}
PEERS = {"inf_cl": "inf_cl", "open_clip": "open_clip"}  # that run on several devices, and their modules


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that the ranks' processes need; `packages` are folders. Peers are measured beside the first package
    for a batch."""

    packages: tuple[str, ...]
    ranks: int
    peers: tuple[str, ...]
    scale: float
    rounds: int
    once: bool
    timeout_s: float


def measure_ring(
    packages: Sequence[Path],
    ranks: int,
    peers: Sequence[str] = (),
    scale: float = 14.3,
    rounds: int = 10,
    timeout_s: float = TIMEOUT_S,
    once: bool = False,
) -> list[dict[str, Any]]:
    """A row of everybody at the batch size of each package, which must have been planned for that many devices.

    Raises InputError for another package or peer, ToolchainError without the GPUs or if a rank fails.
    """
    import torch

    check_peers(peers)
    specs = [read_package(folder, edited=True).spec for folder in packages]
    for folder, spec in zip(packages, specs, strict=True):
        planned, problem = spec["plan"]["world_size"], spec["problem"]
        if planned != ranks:
            raise InputError(f"--ranks: {folder} was planned for {planned} device(s), not {ranks}")
        if problem["keys"] not in (None, problem["batch_size"]):
            raise InputError(f"--keys: rings are measured with a key for each query; {folder} has {problem['keys']}")
    gpus = torch.cuda.device_count()
    if gpus < ranks and any(_device(spec) == "cuda" for spec in specs):
        raise ToolchainError(f"--ranks: {ranks} GPUs are needed, and {gpus} are here")
    folders = tuple(str(Path(folder).resolve()) for folder in packages)
    # A rank of one long step waits for the others as long as all may take.
    job = Job(folders, ranks, tuple(peers), scale, rounds, once, timeout_s if once else 120.0)
    with timing_lock(specs[0]["device"]["target"], 2 * timeout_s):
        rows: list[dict[str, Any]] = run_ranks(TASK, dataclasses.asdict(job), ranks, timeout_s)[0]
    return rows


def check_peers(names: Sequence[str]) -> None:
    """Raises InputError for a peer that runs on one device only."""
    for name in names:
        if name not in PEERS:
            raise InputError(f"--against: {name} runs on one device; on several: {', '.join(PEERS)} or none")


def measure_rank(argument: dict[str, Any], seat: Seat) -> list[dict[str, Any]]:
    """The rows of a `Job`, on each rank."""
    job = Job(**argument)
    seat.join_group(_device(read_package(job.packages[0], edited=True).spec), job.timeout_s)
    rows: list[dict[str, Any]] = []
    for package in job.packages:
        if job.once:
            rows.append(_once(job, Path(package), seat.rank))
        else:
            rows += _point(job, Path(package), seat.rank, {row["batch"] for row in rows})
    return rows


def _device(spec: dict[str, Any]) -> str:
    return "cpu" if spec["device"]["target"] == "cpu" else "cuda"


class _Ring:
    """What is measured at one point, on this rank."""

    def __init__(self, job: Job, folder: Path, rank: int) -> None:
        self.job, self.rank, self.module = job, rank, import_package(folder, edited=True)
        self.edited = bool(read_package(folder, edited=True).edited)
        self.spec = self.module.SPEC
        self.batch = self.spec["problem"]["batch_size"]
        self.shards = [self.batch // job.ranks + (r < self.batch % job.ranks) for r in range(job.ranks)]
        self.device = _device(self.spec)

    def leaves(self, rows: int) -> tuple[Any, Any, Any]:
        """q, k and scale of this rank, which ask for gradients."""
        import torch

        problem = self.spec["problem"]
        q, k = (
            features(rows, problem["dim"], problem["dtype"], 2 * self.rank + seed, self.device) for seed in range(2)
        )
        wide = torch.promote_types(q.dtype, torch.float32)
        return q, k, torch.tensor(self.job.scale, dtype=wide, device=self.device, requires_grad=True)

    def row(self, name: str) -> dict[str, Any]:
        """Of one contestant, before anything is measured."""
        problem, plan, predicted = (self.spec[name] for name in ("problem", "plan", "predicted"))
        sizes = {"loss": problem["loss"], "batch": self.batch, "keys": self.batch}
        sizes |= {field: problem[field] for field in ("dim", "dtype", "precision")}
        impl = "infcl" if name in HOW else name
        row = blank_row(sizes, self.job.ranks, impl, HOW.get(name), self.job.scale) | {"transport": None}
        if name in HOW:
            row |= {"edited": True} if self.edited else {}
            row |= {
                "strategy": plan["strategy"],
                "budget_bytes": plan["budget_bytes"],
                "predicted_peak_bytes": predicted["peak_bytes"],
                "transport": plan["schedule"]["transport"],
            }
        if name == "infcl":
            row["predicted_ms"] = 1e3 * predicted["time_s"]
            row["predicted_queued_ms"] = 1e3 * predicted["queued_s"] if self.device == "cuda" else None
        return row


def _once(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """The row of one step, after a small one that compiles."""
    ring = _Ring(job, folder, rank)

    def step(leaves: Sequence[Any]) -> None:
        ring.module.contrastive_loss(*leaves).backward()

    small = ring.leaves(min(2 * ring.spec["plan"]["panel_rows"], min(ring.shards)))
    step(small)
    del small
    leaves, timer = ring.leaves(ring.shards[rank]), Timer(ring.device)
    _meet(ring.device)
    with PeakMeter(leaves[0].device) as meter:
        time_ms, _ = timer.idle_ms(lambda: step(leaves))
    finite = all(bool(part.isfinite().all()) for leaf in leaves for part in leaf.grad.view(-1).split(1 << 28))
    time_ms, peak, wrong = _largest([time_ms, meter.peak_bytes, not finite], ring.device)
    row = ring.row("infcl")
    if wrong:
        return row | {"error": "not finite"}
    if peak > row["predicted_peak_bytes"]:
        return row | {"error": f"took {round(peak)} bytes"}
    return row | time_figures([Times(time_ms, None)]) | {"peak_bytes": round(peak)}


def _point(job: Job, folder: Path, rank: int, compared: set[int]) -> list[dict[str, Any]]:
    """The rows of everybody; without peers at batches at which they were `compared` before."""
    ring = _Ring(job, folder, rank)
    module, shards, device = ring.module, ring.shards, ring.device
    q, k, scale = ring.leaves(shards[rank])
    losses: dict[str, Callable[[], Any]] = dict.fromkeys(HOW, lambda: module.contrastive_loss(q, k, scale))
    peers = () if ring.batch in compared else job.peers
    uneven = len(set(shards)) > 1  # where peers abort, or hang
    for name in () if uneven else peers:
        losses[name] = globals()[f"_{name}"](q, k, scale, rank, job.ranks)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    groups = importlib.import_module(f"{module.__name__}._runtime.group")
    carrying = carriers(module, shards)
    for name, loss in losses.items():
        use = functools.partial(groups.use_group, carrying[name]) if name in carrying else None
        step = _step(loss, (q, k, scale), use)
        row = ring.row(name)
        row["error"], row["peak_bytes"] = _first(step, (q, k, scale), HOW.get(name) != "no communication")
        rows[name] = row
        if row["error"] is None:
            steps[name] = step
    timer = Timer(device, before=lambda: _start_together(device))
    times: dict[str, list[Times]] = {name: [] for name in steps}
    for round_ in range(job.rounds):
        for name in random.Random(round_).sample(list(steps), len(steps)):  # the same on every rank
            times[name].append(_times(timer, steps[name], device))
    for name, found in times.items():
        rows[name] |= time_figures(found)
    for name in peers if uneven else ():
        rows[name] = ring.row(name) | {"error": "needs as many rows on each rank"}
    return list(rows.values())


def _step(loss: Callable[[], Any], leaves: Sequence[Any], before: Callable[[], None] | None) -> Callable[[], None]:
    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        if before is not None:
            before()
        loss().backward()

    return step


def _first(step: Callable[[], None], leaves: Sequence[Any], true: bool) -> tuple[str | None, int | None]:
    """Two runs, which compile and measure the peak: why there is none on some rank, and the largest one. `true`: the
    results are the loss's, and must be finite (without communication a row of an uneven shard is anything)."""
    import torch

    error, peak = None, 0
    try:
        step()
        for leaf in leaves:
            leaf.grad = None
        with PeakMeter(leaves[0].device) as meter:
            step()
        peak = meter.peak_bytes
        if true and not all(leaf.grad is None or bool(leaf.grad.isfinite().all()) for leaf in leaves):
            error = "not finite"
    except torch.OutOfMemoryError:
        error = "out of memory"
    except Exception as failure:
        error = f"{type(failure).__name__}: {one_line(failure)}"
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (error, peak))
    errors = [text for text, _ in found if text]
    return (errors[0], None) if errors else (None, max(size for _, size in found))


def _times(timer: Timer, step: Callable[[], None], device: str) -> Times:
    """Those of the slowest rank. All begin together; behind other work those whose lead is over wait for the others."""
    _meet(device)
    idle_ms, host_ms = _largest(timer.idle_ms(step), device)
    if device == "cpu":
        return Times(idle_ms, None)
    for lead_ms in leads_ms(host_ms):
        _meet(device)
        queued_ms, late = _largest(timer.queued_ms(step, lead_ms), device)
        if not late:
            break
    return Times(idle_ms, queued_ms)


def _meet(device: str) -> None:
    import torch

    torch.distributed.barrier()
    if device == "cuda":
        torch.cuda.synchronize()


def _start_together(device: str) -> None:
    """On the devices, without their hosts: nobody's lead is over before everybody's is."""
    import torch

    torch.distributed.all_reduce(torch.zeros(1, device=device))


def _largest(values: Sequence[float], device: str) -> list[float]:
    """Each the largest of all ranks."""
    import torch

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


def _inf_cl(q: Any, k: Any, scale: Any, rank: int, ranks: int) -> Callable[[], Any]:
    """`inf_cl.cal_inf_loss(q, k, scale=scale)`, once for each direction."""
    from inf_cl import cal_inf_loss

    def loss() -> Any:
        return (cal_inf_loss(q, k, scale=scale) + cal_inf_loss(k, q, scale=scale)) / 2

    return loss


def _open_clip(q: Any, k: Any, scale: Any, rank: int, ranks: int) -> Callable[[], Any]:
    """`open_clip.ClipLoss(local_loss=True, gather_with_grad=True)` under autocast."""
    import torch

    criterion = open_clip_loss().ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=ranks)

    def loss() -> Any:
        with torch.autocast("cuda", q.dtype):
            return criterion(q, k, scale)

    return loss
