"""What `make demo` runs: plan, generate, import and run a CLIP loss package on this machine, and check it against fp64.

On a GPU the package is Triton kernels; without one it is the torch target, and a ring of two gloo processes as well.
Exits with 5 if an error is larger than allowed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import infcl_gen
from infcl_gen.emission import import_package
from infcl_gen.errors import InfclError
from infcl_gen.verification.memory import PeakMeter

SCALE = 14.3
GRADIENTS = ("loss", "dq", "dk", "dscale")
# Allowed relative error: twice that of plain torch in the same arithmetic, and a few roundings of a result.
ALLOWED_RATIO, ALLOWED_ROUNDINGS = 2.0, 8.0

Results = tuple[torch.Tensor, ...]  # of GRADIENTS


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument(
        "-o", "--output", type=Path, default=Path("build/demo"), help="folder for the package"
    )
    try:
        passed = demo(arguments.parse_args().output)
    except InfclError as error:
        sys.exit(f"demo: {error}")
    sys.exit(0 if passed else 5)


def demo(output: Path) -> bool:
    """Run the demonstration, print its tables, and return whether all errors are within what is allowed."""
    console = Console(width=100, highlight=False)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    # On the GPU accuracy is checked with fewer rows than timed: a dense fp64 matrix of 65 536 rows is 34 GB.
    flags: dict[str, Any] = (
        {"batch_size": 65536, "dim": 768, "dtype": "bf16", "memory_budget": "1GiB"}
        if cuda
        else {"batch_size": 4096, "dim": 256, "dtype": "fp32", "memory_budget": "32MiB", "target": "cpu"}
    )
    checked_rows = min(flags["batch_size"], 8192)

    started = time.perf_counter()
    plan = infcl_gen.plan(loss="clip", **flags)
    folder = infcl_gen.generate(plan.problem, output / f"clip_{plan.target}", force=True)
    package = import_package(folder)
    console.print(f"planned, generated and imported in {time.perf_counter() - started:.1f} s: {folder}")
    console.print(
        f"clip, batch {flags['batch_size']}, D {flags['dim']}, {flags['dtype']}, strategy {plan.strategy} on "
        f"{plan.problem.device_profile}: panels of {plan.panel_rows} x {plan.panel_keys}"
    )

    q, k = features(checked_rows, flags["dim"], plan.dtype, device)
    truth = dense(q, k, torch.float64)
    plain = relative_errors(dense(q, k, q.dtype), truth)
    measured = {"package": relative_errors(package.loss_and_grads(q, k, SCALE)[:4], truth)}
    if not cuda:
        two: dict[str, Any] = {"devices": 2, "set": {"transport": "ring"}}
        spread = infcl_gen.generate(loss="clip", **flags, **two, output=output / "clip_ring", force=True)
        measured["ring of 2 processes"] = relative_errors(ring(spread, q, k), truth)
    table = Table("relative error against fp64", *GRADIENTS, title=f"errors at batch {checked_rows}")
    for name, errors in {"plain torch, same dtype": plain, **measured}.items():
        table.add_row(name, *(f"{error:.1e}" for error in errors))
    console.print(table)

    q, k = features(flags["batch_size"], flags["dim"], plan.dtype, device)
    table = Table(
        "forward + backward", "time, best of 5", "memory", title=f"cost at batch {flags['batch_size']}"
    )
    seconds, peak_bytes = cost(lambda: package.loss_and_grads(q, k, SCALE), device)
    table.add_row("plan", f"{plan.predicted_time_s * 1e3:.1f} ms", _mib(plan.predicted_peak_bytes))
    table.add_row("package, measured", f"{seconds * 1e3:.1f} ms", _mib(peak_bytes))
    seconds, peak_bytes = cost(lambda: dense(q, k, q.dtype), device)
    table.add_row("plain torch, measured", f"{seconds * 1e3:.1f} ms", _mib(peak_bytes))
    console.print(table)

    passed = all(within(errors, plain, q.dtype) for errors in measured.values())
    console.print(f"package: {folder}")
    console.print(
        "all errors are within twice those of plain torch, plus a few roundings"
        if passed
        else "FAILED: an error is too large"
    )
    return passed


def features(rows: int, dim: int, dtype: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit rows, each query near its key, as in training."""
    generator = torch.Generator(device).manual_seed(0)
    k = torch.randn(rows, dim, device=device, generator=generator)
    q = k + torch.randn(rows, dim, device=device, generator=generator)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[
        dtype
    ]
    return (torch.nn.functional.normalize(q).to(kind), torch.nn.functional.normalize(k).to(kind))


def dense(q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype) -> Results:
    """Loss and gradients by plain torch, storing the whole similarity matrix in `dtype`."""
    q, k = (side.to(dtype).requires_grad_() for side in (q.detach(), k.detach()))
    scale = torch.tensor(
        SCALE, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=q.device
    )
    scale.requires_grad_()
    logits = scale.to(dtype) * (q @ k.T)
    labels = torch.arange(q.shape[0], device=q.device)
    cross_entropy = torch.nn.functional.cross_entropy
    loss = (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2
    return (loss.detach(), *torch.autograd.grad(loss, (q, k, scale)))


def ring(folder: Path, q: torch.Tensor, k: torch.Tensor, ranks: int = 2) -> Results:
    """The same from `ranks` gloo processes, each with its part of the rows; gradients averaged as DDP would."""
    with tempfile.TemporaryDirectory() as shared:
        torch.save((q, k), f"{shared}/features.pt")
        torch.multiprocessing.spawn(_ring_rank, (ranks, str(folder), shared), nprocs=ranks)
        parts = [torch.load(f"{shared}/result{rank}.pt") for rank in range(ranks)]
    losses, dqs, dks, dscales = zip(*parts, strict=True)
    mean = lambda values: torch.stack(values).mean(0)  # noqa: E731
    return mean(losses), torch.cat(dqs) / ranks, torch.cat(dks) / ranks, mean(dscales)


def _ring_rank(rank: int, ranks: int, folder: str, shared: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{shared}/store", rank=rank, world_size=ranks)
    try:
        q, k = (side.tensor_split(ranks)[rank] for side in torch.load(f"{shared}/features.pt"))
        results = import_package(Path(folder)).loss_and_grads(q, k, SCALE)[:4]
        torch.save(tuple(result.clone() for result in results), f"{shared}/result{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def relative_errors(results: Results, truth: Results) -> list[float]:
    return [
        float((result.double() - true).norm() / true.norm())
        for result, true in zip(results, truth, strict=True)
    ]


def within(errors: list[float], plain: list[float], dtype: torch.dtype) -> bool:
    """Each error at most twice plain torch's plus a few roundings; NaN never is."""
    allowance = ALLOWED_ROUNDINGS * torch.finfo(dtype).eps
    return all(error <= ALLOWED_RATIO * other + allowance for error, other in zip(errors, plain, strict=True))


def cost(run: Callable[[], Any], device: torch.device) -> tuple[float, int]:
    """Seconds of the fastest of five runs, which shared the processor least, and the most bytes that one run takes."""
    run()
    with PeakMeter(device) as meter:
        run()
    times = []
    for _ in range(5):
        _synchronize(device)
        started = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times), meter.peak_bytes


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
