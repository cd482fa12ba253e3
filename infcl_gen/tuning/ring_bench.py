"""What a ring of GPUs takes: packages with and without their communication, and peers that run on several devices.

`measure_ring` starts a process for each rank; these run all points one after the other, everybody in turns as in
`bench`, and the time of a run is that of its slowest rank. A package is measured three times:

    infcl                       as it is
    infcl, no overlap           each transfer is waited for where it starts
    infcl, no communication     the same work on every rank, but what would be sent is copied to where it would arrive
                                (0.3 % of a hop's time at D = 768): what efficiency is relative to

Rows are those of `bench`, with `ranks` > 1, the global `batch`, and the largest peak of any rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.emission import import_package, read_package
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.tuning.bench import Timer, blank_row, features, time_figures
from infcl_gen.tuning.peers import open_clip_loss
from infcl_gen.tuning.process import one_line
from infcl_gen.verification.memory import PeakMeter

TIMEOUT_S = 600.0
HOW = {"infcl": None, "infcl, no overlap": "no overlap", "infcl, no communication": "no communication"}
PEERS = {"inf_cl": "inf_cl", "open_clip": "open_clip"}  # that run on several devices, and their modules


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that the ranks' processes need; `packages` are folders, one for each point."""

    packages: tuple[str, ...]
    ranks: int
    peers: tuple[str, ...]
    scale: float
    rounds: int
    store: str
    output: str


def measure_ring(
    packages: Sequence[Path],
    ranks: int,
    peers: Sequence[str] = (),
    scale: float = 14.3,
    rounds: int = 10,
    timeout_s: float = TIMEOUT_S,
) -> list[dict[str, Any]]:
    """A row of everybody at the batch size of each package, which must have been planned for that many devices.

    Raises InputError for another package or peer, ToolchainError without the GPUs or if a rank fails.
    """
    import torch

    check_peers(peers)
    for folder in packages:
        planned = read_package(folder).spec["plan"]["world_size"]
        if planned != ranks:
            raise InputError(f"--ranks: {folder} was planned for {planned} device(s), not {ranks}")
    gpus = torch.cuda.device_count()
    if gpus < ranks and any(_device(read_package(folder).spec) == "cuda" for folder in packages):
        raise ToolchainError(f"--ranks: {ranks} GPUs are needed, and {gpus} are here")
    with tempfile.TemporaryDirectory(prefix="infcl-gen-ring-") as scratch:
        job = Job(
            tuple(str(Path(folder).resolve()) for folder in packages), ranks, tuple(peers), scale, rounds,
            str(Path(scratch) / "store"), str(Path(scratch) / "rows.json"),
        )  # fmt: skip
        description = Path(scratch) / "job.json"
        description.write_text(json.dumps(dataclasses.asdict(job)))
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
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=Path(job.store).as_uri(), rank=rank, world_size=job.ranks,
        timeout=datetime.timedelta(seconds=120), device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )  # fmt: skip
    rows = [row for package in job.packages for row in _point(job, Path(package), rank)]
    if rank == 0:
        Path(job.output).write_text(json.dumps(rows))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # tearing a group down may wait for ranks that are gone


def _device(spec: dict[str, Any]) -> str:
    return "cpu" if spec["device"]["target"] == "cpu" else "cuda"


def _point(job: Job, folder: Path, rank: int) -> list[dict[str, Any]]:
    import torch

    module = import_package(folder)
    problem, plan, predicted = (module.SPEC[name] for name in ("problem", "plan", "predicted"))
    batch, dim = problem["batch_size"], problem["dim"]
    shards = [batch // job.ranks + (other < batch % job.ranks) for other in range(job.ranks)]
    own = shards[rank]
    device = _device(module.SPEC)
    q, k = (features(own, dim, problem["dtype"], 2 * rank + seed, device) for seed in range(2))
    wide = torch.float64 if problem["dtype"] == "fp64" else torch.float32
    scale = torch.tensor(job.scale, dtype=wide, device=device, requires_grad=True)
    planned = {
        "strategy": plan["strategy"],
        "budget_bytes": plan["budget_bytes"],
        "predicted_peak_bytes": predicted["peak_bytes"],
    }
    losses: dict[str, Callable[[], Any]] = dict.fromkeys(HOW, lambda: module.contrastive_loss(q, k, scale))
    for name in job.peers:
        losses[name] = globals()[f"_{name}"](q, k, scale, rank, job.ranks)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    for name, loss in losses.items():
        step = _step(module, HOW.get(name), shards, loss, (q, k, scale))
        row = _empty(job, problem, name) | (planned if name in HOW else {})
        row["error"], row["peak_bytes"] = _first(step, (q, k, scale), HOW.get(name) != "no communication")
        rows[name] = row
        if row["error"] is None:
            steps[name] = step
    rows["infcl"]["predicted_ms"] = 1e3 * predicted["time_s"]
    timer = Timer(device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(job.rounds):
        start = round_ % len(steps)
        for name in (*list(steps)[start:], *list(steps)[:start]):
            torch.distributed.barrier()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(_slowest(timer.ms(steps[name]), device))
    for name, found in times.items():
        rows[name] |= time_figures(found)
    return list(rows.values())


def _empty(job: Job, problem: dict[str, Any], name: str) -> dict[str, Any]:
    sizes = {"loss": problem["loss"], "batch": problem["batch_size"], "keys": problem["batch_size"]}
    sizes |= {field: problem[field] for field in ("dim", "dtype", "precision")}
    return blank_row(sizes, job.ranks, "infcl" if name in HOW else name, HOW.get(name), job.scale)


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


def _slowest(time_ms: float, device: str) -> float:
    import torch

    value = torch.tensor(time_ms, device=device)
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return float(value)


@contextlib.contextmanager
def _transport(module: Any, how: str | None, shards: list[int]) -> Iterator[None]:
    """The package's ring with another way to carry messages between these shards, while this lasts."""
    ring = importlib.import_module(f"{module.__name__}._runtime.ring")
    if how is None:
        yield
        return
    post, ask = ring.Ring.post, ring.Ring.ask

    def at_once(self: Any, sends: Any, receives: Any) -> list[Any]:
        for work in post(self, sends, receives):
            work.wait()
        return []

    def copied(self: Any, sends: Any, receives: Any) -> list[Any]:
        for sent, received in zip(sends, receives, strict=True):
            received.buffer.copy_(sent.buffer)  # what was never written might be NaN, and raise flags
        return []

    def known(self: Any, header: Any, phase: str = "forward", call: int = 0) -> Callable[[], Any]:
        order = {"protocol": 0, "phase": phase, "trips finished": 0, "call number": call}
        return lambda: [{**header, **order, "rows": rows, "keys": rows} for rows in shards]

    if how == "no overlap":
        ring.Ring.post = at_once
    else:
        ring.Ring.post = copied
        ring.Ring.ask = known
    try:
        yield
    finally:
        ring.Ring.post, ring.Ring.ask = post, ask


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
