"""What a package takes on this GPU: time, memory and errors, beside the floor of its bare matrix products.

    python -m infcl_gen.tuning.bench PACKAGE [--batch N] [--scale S] [--repeats R] [--errors]     prints one JSON row

`measure` runs that in a process of its own, so that no package inherits another's memory or library workspaces, and
`write_results` keeps the rows. A row's fields are those of the measurement format, version 1: times in milliseconds,
sizes in bytes beyond the inputs, errors as norms relative to fp64.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from infcl_gen.errors import ToolchainError
from infcl_gen.version import __version__

SCHEMA_VERSION = 1
TIMEOUT_S = 600.0
FLUSH_BYTES = 256 << 20  # several times any L2: what a timed run starts with is in memory, not in a cache
CPU_FLUSH_BYTES = 64 << 20
SEED = 0


def measure(package: Path, *arguments: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The row of one package, from a process of its own; `error` says why there is none, else it is None."""
    command = [sys.executable, "-m", "infcl_gen.tuning.bench", str(package), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"impl": "infcl", "error": f"no result within {timeout_s:g} s"}
    if done.returncode != 0:
        return {"impl": "infcl", "error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def measure_package(
    package: Path, batch: int | None = None, scale: float = 14.3, repeats: int = 10, errors: bool = False
) -> dict[str, Any]:
    """Forward and backward of the loss on unit-norm random features at `batch` (default: the planned one).

    The first run at that size gives the peak (64 rows have compiled the kernels before it); the timed ones follow, each
    on a cold cache. Raises ToolchainError without a CUDA device.
    """
    import torch

    from infcl_gen.emission import import_package
    from infcl_gen.verification.memory import PeakMeter

    if not torch.cuda.is_available():
        raise ToolchainError("measuring needs a CUDA device")
    module = import_package(package)
    problem, plan, predicted = module.SPEC["problem"], module.SPEC["plan"], module.SPEC["predicted"]
    queries = batch or problem["batch_size"]
    keys = batch or problem["keys"] or problem["batch_size"]
    q, k = (
        features(rows, problem["dim"], problem["dtype"], seed) for seed, rows in enumerate((queries, keys))
    )
    temperature = torch.tensor(scale, device="cuda", requires_grad=True)

    step = training_step(module, q, k, temperature)
    warm = [rows.detach()[: min(64, len(rows))].clone().requires_grad_() for rows in (q, k)]
    module.contrastive_loss(
        *warm, temperature
    ).backward()  # compiles the kernels; their memory is the driver's
    temperature.grad = None
    with PeakMeter("cuda") as meter:
        result = step()
    error = _errors(module, q, k, scale, result) if errors else None
    del result
    measured_ms = times_ms(step, repeats)
    return {
        "loss": module.SPEC["loss"]["name"],
        "batch": queries,
        "keys": keys,
        "dim": problem["dim"],
        "dtype": problem["dtype"],
        "precision": problem["precision"],
        "ranks": 1,
        "impl": "infcl",
        "strategy": plan["strategy"],
        "scale": scale,
        "median_ms": statistics.median(measured_ms),
        "mean_ms": statistics.fmean(measured_ms),
        "std_ms": statistics.stdev(measured_ms) if len(measured_ms) > 1 else 0.0,
        "repeats": repeats,
        "peak_bytes": meter.peak_bytes,
        "budget_bytes": plan["budget_bytes"],
        "predicted_peak_bytes": predicted["peak_bytes"],
        "predicted_ms": 1e3 * predicted["time_s"],
        "floor_ms": _floor_ms(plan, q.detach(), k.detach()),
        "err": error,
        "error": None,
    }


def write_results(path: Path, rows: Sequence[dict[str, Any]], command: str) -> None:
    """Writes the rows with board and versions, atomically, with a checksum of the rows inside."""
    text = json.dumps(list(rows), sort_keys=True)
    results = {
        "schema_version": SCHEMA_VERSION,
        "board": board(),
        "versions": versions(),
        "command": command,
        "checksum": hashlib.sha256(text.encode()).hexdigest(),
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def board() -> str:
    """The GPU's name, as its driver gives it."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def versions() -> dict[str, str]:
    """What a measurement depends on."""
    import torch
    import triton

    return {
        "infcl_gen": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
    }


def features(rows: int, dim: int, dtype: str, seed: int, device: str = "cuda") -> Any:
    """Random features of unit norm that ask for gradients; the same on every run."""
    import torch

    from infcl_gen.verification.properties import DTYPES

    generator = torch.Generator(device).manual_seed(SEED + seed)
    found = torch.empty(rows, dim, dtype=DTYPES[dtype], device=device)
    wide = torch.float64 if dtype == "fp64" else torch.float32
    for start in range(0, rows, 1 << 16):  # the fp32 numbers of four million rows would not fit beside them
        count = min(1 << 16, rows - start)
        part = torch.randn(count, dim, generator=generator, device=device, dtype=wide)
        found[start : start + len(part)] = torch.nn.functional.normalize(part, dim=1)
    return found.requires_grad_()


def training_step(module: ModuleType, q: Any, k: Any, temperature: Any) -> Callable[[], tuple[Any, ...]]:
    """One forward and backward of a package, as training runs it: (loss, dq, dk, dscale)."""
    import torch

    needs_labels = module.SPEC["positives"] == "label" and len(q) > len(k)
    labels = torch.arange(len(q), device=q.device) % len(k) if needs_labels else None

    def step() -> tuple[Any, ...]:
        q.grad = k.grad = temperature.grad = None
        loss = module.contrastive_loss(q, k, temperature, labels=labels)
        loss.backward()
        return loss.detach(), q.grad, k.grad, temperature.grad

    return step


def times_ms(run: Callable[[], object], repeats: int, device: str = "cuda") -> list[float]:
    """Times of `repeats` runs, each on a cold cache, after one that is not timed. On the GPU by its own events."""
    import torch

    flush = torch.empty(
        FLUSH_BYTES if device == "cuda" else CPU_FLUSH_BYTES, dtype=torch.uint8, device=device
    )
    run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            started = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - started))
    return times


def _floor_ms(plan: dict[str, Any], q: Any, k: Any) -> float:
    """Time of the library's products for this plan, panel by panel: z twice (less what the stash keeps), dq and dk."""
    import torch

    rows, keys = min(plan["panel_rows"], len(q)), min(plan["panel_keys"], len(k))
    if plan["strategy"] == "fused":
        rows = keys = min(16384, len(q), len(k))
    panels = (len(q) / rows) * (len(k) / keys)
    a, b = q[:rows], k[:keys]
    g = torch.empty(rows, keys, dtype=q.dtype, device=q.device).normal_()
    dq, dk = (torch.zeros(n, q.shape[1], dtype=torch.float32, device=q.device) for n in (rows, keys))
    wide: dict[str, Any] = {} if q.dtype == torch.float32 else {"out_dtype": torch.float32}
    similarity = statistics.median(times_ms(lambda: torch.mm(a, b.T, out=g), 5))
    g.normal_()
    products = statistics.median(times_ms(lambda: torch.addmm(dq, g, b, out=dq, **wide), 5))
    products += statistics.median(times_ms(lambda: torch.addmm(dk, g.T, a, out=dk, **wide), 5))
    recomputed = 1 - min(plan["stash_rows"], len(q)) / len(q)
    return float(panels * ((1 + recomputed) * similarity + products))


def _errors(module: ModuleType, q: Any, k: Any, scale: float, result: Sequence[Any]) -> dict[str, float]:
    """Relative norm errors of (loss, dq, dk, dscale) against fp64, computed in slices of the queries."""
    import torch

    loss = module.loss
    z_scale = torch.tensor(scale, dtype=torch.float64, device=q.device)
    zero = torch.zeros((), dtype=torch.float64, device=q.device)
    q64, k64 = q.detach().double(), k.detach().double()
    m, n = len(q64), len(k64)
    slices = [slice(start, min(start + 2048, m)) for start in range(0, m, 2048)]
    r, p = (torch.empty(m, dtype=torch.float64, device=q.device) for _ in range(2))
    c = torch.full((n,), float("-inf"), dtype=torch.float64, device=q.device)
    for rows in slices:
        x = loss.logit(q64[rows] @ k64.T, z_scale, zero)
        r[rows] = torch.logsumexp(x, 1)
        c = torch.logaddexp(c, torch.logsumexp(x, 0))
        p[rows] = x.diagonal(rows.start)
    value = loss.query_term(r, p).sum() / m + (loss.key_term(c, p).sum() / m if loss.HAS_KEYS else 0.0)
    dq, dk, dscale = torch.zeros_like(q64), torch.zeros_like(k64), zero.clone()
    factor = loss.gradient_factor(z_scale, zero) / m
    for rows in slices:
        z = q64[rows] @ k64.T
        x = loss.logit(z, z_scale, zero)
        g = loss.QUERY_SHARE * torch.exp(x - r[rows, None])
        if loss.HAS_KEYS:
            g += loss.KEY_SHARE * torch.exp(x - c)
        g.diagonal(rows.start).add_(loss.POSITIVE_SHARE)
        g *= loss.dlogit_dz(z, z_scale, zero)
        total = g @ k64
        dq[rows] = total * factor
        dk += g.T @ q64[rows] * factor
        dscale += (q64[rows] * total).sum() / m
    dscale *= loss.dscale_factor(z_scale, zero)
    exact = {"loss": value, "dq": dq, "dk": dk, "dscale": dscale}
    return {
        name: float((got.double() - true).norm() / true.norm())
        for (name, true), got in zip(exact.items(), result, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures one generated package on this GPU.")
    parser.add_argument("package", type=Path)
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--scale", type=float, default=14.3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--errors", action="store_true")
    arguments = parser.parse_args()
    row = measure_package(
        arguments.package, arguments.batch, arguments.scale, arguments.repeats, arguments.errors
    )
    print(json.dumps(row))


if __name__ == "__main__":
    main()
