"""What `make demo` runs: plan, generate, import and run a CLIP loss package on this machine, and check it against fp64.

On a GPU the package is Triton kernels; without one it is the torch target, and a ring of two gloo processes as well.
Exits with 5 if an error is larger than allowed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import infcl_gen
from infcl_gen.bench.measure import measure_point
from infcl_gen.bench.point import point_of
from infcl_gen.bench.results import RESULTS
from infcl_gen.emission import import_package, read_package
from infcl_gen.errors import InfclError
from infcl_gen.verification.properties import DTYPES
from infcl_gen.verification.verify import verify_package

GPU_PROBLEM = {"batch_size": 65536, "dim": 768, "dtype": "bf16", "memory_budget": "1GiB"}
CPU_PROBLEM = {"batch_size": 4096, "dim": 256, "dtype": "fp32", "memory_budget": "32MiB", "target": "cpu"}
# On a GPU accuracy is checked with fewer rows than timed: a dense fp64 matrix of 65 536 rows is 34 GB.
CHECKED_ROWS = 8192
# Allowed relative error: twice that of plain torch in the same arithmetic, and a few roundings of a result.
ALLOWED_RATIO, ALLOWED_ROUNDINGS = 2.0, 8.0
ROUNDS = 5
RING_EXAMPLES = 4


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("-o", "--output", type=Path, default="build/demo", show_default=True, help="Folder for the packages.")
def main(output: Path) -> None:
    try:
        passed = demo(output)
    except InfclError as error:
        sys.exit(f"demo: {error}")
    sys.exit(0 if passed else 5)


def demo(output: Path) -> bool:
    """Run the demonstration, print its tables, and return whether all errors are within what is allowed."""
    console = Console(width=100, highlight=False)
    flags: dict[str, Any] = GPU_PROBLEM if torch.cuda.is_available() else CPU_PROBLEM
    started = time.perf_counter()
    plan = infcl_gen.plan(**flags)
    folder = infcl_gen.generate(plan.problem, output / f"clip_{plan.target}", force=True)
    import_package(folder)
    console.print(f"planned, generated and imported in {time.perf_counter() - started:.1f} s: {folder}")
    console.print(
        f"clip, batch {flags['batch_size']}, D {flags['dim']}, {flags['dtype']}, strategy {plan.strategy} on "
        f"{plan.problem.device_profile}: panels of {plan.panel_rows} x {plan.panel_keys}"
    )

    batch = min(flags["batch_size"], CHECKED_ROWS)
    ours, plain = measured(folder, batch, rounds=1, errors=True)
    table = Table("relative error against fp64", *RESULTS, title=f"errors at batch {batch}")
    for name, row in (("plain torch, same dtype", plain), ("package", ours)):
        errors = row["err"] or {}
        table.add_row(name, *(f"{errors[each]:.1e}" if each in errors else "-" for each in RESULTS))
    console.print(table)
    passed = ours["error"] is None and within(ours["err"], plain["err"], DTYPES[plan.dtype])

    ours, plain = measured(folder, flags["batch_size"], rounds=ROUNDS, errors=False)
    title = f"cost at batch {flags['batch_size']}"
    table = Table("forward + backward", f"time, median of {ROUNDS}", "memory", title=title)
    table.add_row("plan", f"{plan.predicted_time_s * 1e3:.1f} ms", _mib(plan.predicted_peak_bytes))
    for name, row in (("package, measured", ours), ("plain torch, measured", plain)):
        figures = (row["error"], "") if row["error"] else (f"{row['median_ms']:.1f} ms", _mib(row["peak_bytes"]))
        table.add_row(name, *figures)
    console.print(table)

    if not torch.cuda.is_available():
        ring = output / "clip_ring"
        spread = infcl_gen.generate(output=ring, force=True, devices=2, set={"transport": "ring"}, **flags)
        rows = verify_package(spread, ranks=2, examples=RING_EXAMPLES)
        passed = passed and all(row["passed"] for row in rows)
        console.print(f"verify --ranks 2: {rows[-1]['check']}: {rows[-1]['detail']}")
    good, bad = (
        "all errors are within twice those of plain torch, plus a few roundings",
        "FAILED: an error is too large",
    )
    console.print(f"package: {folder}\n{good if passed else bad}")
    return passed


def measured(folder: Path, batch: int, rounds: int, errors: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of the package and of plain torch at `batch`, as `infcl-gen bench` measures them."""
    point = point_of([read_package(folder)], batch, ["torch"], rounds=rounds, errors=errors)
    rows = {row["impl"]: row for _, row in measure_point(point) if row is not None}
    return rows["infcl"], rows["torch"]


def within(errors: dict[str, float], plain: dict[str, float], dtype: torch.dtype) -> bool:
    """Each error at most twice plain torch's plus a few roundings; NaN never is."""
    allowance = ALLOWED_ROUNDINGS * torch.finfo(dtype).eps
    return all(errors[name] <= ALLOWED_RATIO * plain[name] + allowance for name in RESULTS)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
