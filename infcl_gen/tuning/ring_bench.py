"""What a ring of GPUs takes: packages with and without their communication, and peers that run on several devices.

`measure_ring` starts a process for each rank; these run all points one after the other, everybody in turns as in
`bench`, and the time of a run is that of its slowest rank. A package is measured three times:

    infcl                       as it is
    infcl, no overlap           each transfer is waited for where it starts
    infcl, no communication     the same work on every rank, but what would be sent is copied to where it would arrive
                                (0.3 % of a hop's time at D = 768): what efficiency is relative to

Rows are those of `bench`, with `ranks` > 1, the global `batch`, the largest peak of any rank, and how keys travel
(`transport`). `once` is for batches that take minutes: one step of each package as it is, on an idle device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.emission import import_package, read_package
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.tuning.bench import features
from infcl_gen.tuning.peers import open_clip_loss
from infcl_gen.tuning.process import one_line, timing_lock
from infcl_gen.tuning.results import blank_row
from infcl_gen.tuning.timing import Timer, Times, leads_ms, time_figures
from infcl_gen.verification.memory import PeakMeter

TIMEOUT_S = 600.0
HOW = {"infcl": None, "infcl, no overlap": "no overlap", "infcl, no communication": "no communication"}
PEERS = {"inf_cl": "inf_cl", "open_clip": "open_clip"}  # that run on several devices, and their modules


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that the ranks' processes need; `packages` are folders, one for each point. Peers are measured beside
    the first package for a batch, up to `peers_up_to`."""

    packages: tuple[str, ...]
    ranks: int
    peers: tuple[str, ...]
    peers_up_to: float
    scale: float
    rounds: int
    once: bool
    store: str
    output: str


def measure_ring(
    packages: Sequence[Path],
    ranks: int,
    peers: Sequence[str] = (),
    scale: float = 14.3,
    rounds: int = 10,
    timeout_s: float = TIMEOUT_S,
    peers_up_to: float = math.inf,
    once: bool = False,
) -> list[dict[str, Any]]:
    """A row of everybody at the batch size of each package, which must have been planned for that many devices; peers
    up to a batch of `peers_up_to`.

    Raises InputError for another package or peer, ToolchainError without the GPUs or if a rank fails.
    """
    import torch

    check_peers(peers)
    specs = [read_package(folder).spec for folder in packages]
    for folder, spec in zip(packages, specs, strict=True):
        planned, problem = spec["plan"]["world_size"], spec["problem"]
        if planned != ranks:
            raise InputError(f"--ranks: {folder} was planned for {planned} device(s), not {ranks}")
        if problem["keys"] not in (None, problem["batch_size"]):
            raise InputError(
                f"--keys: rings are measured with a key for each query; {folder} has {problem['keys']}"
            )
    gpus = torch.cuda.device_count()
    if gpus < ranks and any(_device(spec) == "cuda" for spec in specs):
        raise ToolchainError(f"--ranks: {ranks} GPUs are needed, and {gpus} are here")
    with tempfile.TemporaryDirectory(prefix="infcl-gen-ring-") as scratch:
        job = Job(
            tuple(str(Path(folder).resolve()) for folder in packages), ranks, tuple(peers), peers_up_to, scale, rounds,
            once, str(Path(scratch) / "store"), str(Path(scratch) / "rows.json"),
        )  # fmt: skip
        description = Path(scratch) / "job.json"
        description.write_text(json.dumps(dataclasses.asdict(job)))
        with timing_lock(specs[0]["device"]["target"], 2 * timeout_s):
            _run(description, ranks, timeout_s)
        rows: list[dict[str, Any]] = json.loads(Path(job.output).read_text())
    return rows


def check_peers(names: Sequence[str]) -> None:
    """Raises InputError for a peer that runs on one device only."""
    for name in names:
        if name not in PEERS:
            raise InputError(f"--against: {name} runs on one device; on several: {', '.join(PEERS)} or none")


def _run(description: Path, ranks: int, timeout_s: float) -> None:
    """Ends all ranks as soon as one fails."""
    command = [sys.executable, "-m", "infcl_gen.tuning.ring_bench", str(description)]
    logs = [description.with_name(f"rank{rank}.log") for rank in range(ranks)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen([*command, str(rank)], stdout=file, stderr=subprocess.STDOUT)
                )
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout_s)
        waiting = set(range(ranks))
        while waiting:
            for rank in sorted(waiting):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if processes[rank].wait(0.2) != 0:
                        lines = logs[rank].read_text(errors="replace").strip().splitlines() or ["no output"]
                        raise ToolchainError(f"rank {rank} of {ranks} failed: {lines[-1]}")
                    waiting.remove(rank)
            if datetime.datetime.now() > deadline:
                raise ToolchainError(f"no result of {ranks} ranks within {timeout_s:g} s")
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    """One rank: JOB.json RANK."""
    import torch
    import torch.distributed as dist

    job, rank = Job(**json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[2])
    device = _device(read_package(Path(job.packages[0])).spec)
    if device == "cuda":
        torch.cuda.set_device(rank)
    gpu = device == "cuda"
    dist.init_process_group(
        "nccl" if gpu else "gloo", init_method=Path(job.store).as_uri(), rank=rank, world_size=job.ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT_S if job.once else 120),
        device_id=torch.device("cuda", rank) if gpu else None,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for package in job.packages:
        if job.once:
            rows.append(_once(job, Path(package), rank))
        else:
            rows += _point(job, Path(package), rank, {row["batch"] for row in rows})
    if rank == 0:
        Path(job.output).write_text(json.dumps(rows))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # tearing a group down may wait for ranks that are gone


def _device(spec: dict[str, Any]) -> str:
    return "cpu" if spec["device"]["target"] == "cpu" else "cuda"


class _Ring:
    """What is measured at one point, on this rank."""

    def __init__(self, job: Job, folder: Path, rank: int) -> None:
        self.job, self.rank, self.module = job, rank, import_package(folder)
        self.spec = self.module.SPEC
        self.batch = self.spec["problem"]["batch_size"]
        self.shards = [self.batch // job.ranks + (r < self.batch % job.ranks) for r in range(job.ranks)]
        self.device = _device(self.spec)

    def leaves(self, rows: int) -> tuple[Any, Any, Any]:
        """q, k and scale of this rank, which ask for gradients."""
        import torch

        problem = self.spec["problem"]
        q, k = (
            features(rows, problem["dim"], problem["dtype"], 2 * self.rank + seed, self.device)
            for seed in range(2)
        )
        wide = torch.float64 if problem["dtype"] == "fp64" else torch.float32
        return q, k, torch.tensor(self.job.scale, dtype=wide, device=self.device, requires_grad=True)

    def row(self, name: str) -> dict[str, Any]:
        """Of one contestant, before anything is measured."""
        problem, plan, predicted = (self.spec[name] for name in ("problem", "plan", "predicted"))
        sizes = {"loss": problem["loss"], "batch": self.batch, "keys": self.batch}
        sizes |= {field: problem[field] for field in ("dim", "dtype", "precision")}
        impl = "infcl" if name in HOW else name
        row = blank_row(sizes, self.job.ranks, impl, HOW.get(name), self.job.scale) | {"transport": None}
        if name in HOW:
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
    peers = job.peers if ring.batch <= job.peers_up_to and ring.batch not in compared else ()
    uneven = len(set(shards)) > 1  # where peers abort, or hang
    for name in () if uneven else peers:
        losses[name] = globals()[f"_{name}"](q, k, scale, rank, job.ranks)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    for name, loss in losses.items():
        step = _step(module, HOW.get(name), shards, loss, (q, k, scale))
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


def _step(
    module: Any, how: str | None, shards: list[int], loss: Callable[[], Any], leaves: Sequence[Any]
) -> Callable[[], None]:
    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        with _transport(module, how, shards):
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


@contextlib.contextmanager
def _transport(module: Any, how: str | None, shards: list[int]) -> Iterator[None]:
    """The package's ring with another way to carry messages between these shards, while this lasts."""
    ring = importlib.import_module(f"{module.__name__}._runtime.ring")
    if how is None:
        yield
        return
    post, ask, enter = ring.Ring.post, ring.Ring.ask, ring.Moment.__enter__

    def at_once(self: Any, sends: Any, receives: Any) -> list[Any]:
        for work in post(self, sends, receives):
            work.wait()
        return []

    def copied(self: Any, sends: Any, receives: Any) -> list[Any]:
        for sent, received in zip(
            sends, receives, strict=False
        ):  # a gather's are as long as their owners' shards
            source, target = sent.buffer.view(-1), received.buffer.view(-1)
            target.zero_()  # what was never written might be NaN, and raise flags
            target[: len(source)].copy_(source[: len(target)])
        return []

    def known(self: Any, header: Any, phase: str = "forward", call: int = 0) -> Callable[[], Any]:
        order = {"protocol": 0, "phase": phase, "trips finished": 0, "call number": call}
        # Ranks that say the same share a header, as in the ring: to compare two takes the host 15 us.
        said = {rows: {**header, **order, "rows": rows, "keys": rows} for rows in shards}
        return lambda: [said[rows] for rows in shards]

    ring.Moment.__enter__ = lambda self: None  # else a stream beside the work's would wait, or copy
    if how == "no overlap":
        ring.Ring.post = at_once
    else:
        ring.Ring.post = copied
        ring.Ring.ask = known
    try:
        yield
    finally:
        ring.Ring.post, ring.Ring.ask, ring.Moment.__enter__ = post, ask, enter


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


if __name__ == "__main__":
    main()
