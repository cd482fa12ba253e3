"""Batches of millions on this GPU, or on a ring of GPUs, each once: time, memory against the plan, finite or not.

python tune/large.py [--batches 1M,4M] [--ranks 1] [--dim 768] [--memory-budget 40GiB] [-o tune/bench/h200-large.json]

Each package first runs a small batch, so that its kernels are compiled, and then one step of the whole. Rows of other
sizes that the file holds are kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import infcl_gen
from infcl_gen.emission import import_package, read_package
from infcl_gen.errors import InputError
from infcl_gen.problem import make_problem, parse_count
from infcl_gen.tuning.bench import RESULTS, empty_row, features, point_of, training_step
from infcl_gen.tuning.results import command_line, measured_before, write_results
from infcl_gen.tuning.ring_bench import measure_ring
from infcl_gen.tuning.timing import Timer, Times, time_figures
from infcl_gen.verification.memory import PeakMeter

SIZES = ("batch", "dim", "ranks", "budget_bytes")  # a row is measured again where these are the same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=Path("tune/bench/h200-large.json"))
    parser.add_argument("--batches", default="1M,4M")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--memory-budget", default="40GiB")
    given = parser.parse_args()
    rows, _, command = measured_before(given.output, command_line("tune/large.py", sys.argv[1:]))
    failed = False
    for batch in map(parse_count, given.batches.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            settings = {"strategy": "panel"} | ({"transport": "ring"} if given.ranks > 1 else {})
            flags = {"memory_budget": given.memory_budget, "devices": given.ranks, "set": settings}
            problem = make_problem(batch_size=batch, dim=given.dim, **flags)
            package = infcl_gen.generate(problem, Path(folder) / "package")
            if given.ranks == 1:
                fresh = _once(package, batch)
            else:
                (fresh,) = measure_ring([package], given.ranks, once=True)
        shown = ("batch", "median_ms", "predicted_ms", "peak_bytes", "predicted_peak_bytes", "error")
        print({name: fresh[name] for name in shown}, flush=True)
        rows = [row for row in rows if any(row[name] != fresh[name] for name in SIZES)] + [fresh]
        rows.sort(key=lambda row: row["batch"])
        write_results(given.output, rows, command)
        failed |= fresh["error"] is not None
    sys.exit(5 if failed else 0)


def _once(folder: Path, batch: int) -> dict[str, Any]:
    """The row of one step. An error names what of the result is not finite, or that the plan's memory was exceeded."""
    package = read_package(folder)
    point = point_of([package], batch)
    row = empty_row(point, point.packages[0])
    module = import_package(folder)
    plan, predicted = module.SPEC["plan"], module.SPEC["predicted"]
    scale = torch.tensor(point.scale, device="cuda", requires_grad=True)
    panel = 2 * plan["panel_rows"]
    small = [features(panel, point.dim, point.dtype, seed) for seed in (0, 1)]
    training_step(module, *small, scale)()
    del small
    q, k = (features(batch, point.dim, point.dtype, seed) for seed in (0, 1))
    torch.cuda.empty_cache()
    step, timer = training_step(module, q, k, scale), Timer("cuda")
    results: list[tuple[Any, ...]] = []
    with PeakMeter("cuda") as meter:
        time_ms, _ = timer.idle_ms(lambda: results.append(step()))
    not_finite = [name for name, x in zip(RESULTS, results[0], strict=True) if not _finite(x)]
    error = f"not finite: {', '.join(not_finite)}" if not_finite else None
    if meter.peak_bytes > predicted["peak_bytes"]:
        error = f"took {meter.peak_bytes} bytes"
    return row | {
        "strategy": plan["strategy"],
        "budget_bytes": plan["budget_bytes"],
        "predicted_peak_bytes": predicted["peak_bytes"],
        "predicted_ms": 1e3 * predicted["time_s"],
        **time_figures([Times(time_ms, None)]),
        "peak_bytes": meter.peak_bytes,
        "error": error,
    }


def _finite(x: torch.Tensor) -> bool:
    return all(bool(part.isfinite().all()) for part in x.split(1 << 18)) if x.dim() else bool(x.isfinite())


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
