"""What `make demo` runs: plan, generate, import and run a CLIP loss package here, and check it against fp64.

On a GPU the package is Triton kernels; otherwise it is the torch target, and a ring of two gloo processes is verified
as well. Exits with 5 if an error is larger than allowed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

import infcl_gen
from infcl_gen.bench.measure import measure_point
from infcl_gen.bench.point import point_of
from infcl_gen.bench.results import RESULTS, Row, error_texts
from infcl_gen.cli.text import table_text
from infcl_gen.emission import import_package, read_package
from infcl_gen.errors import InfclError
from infcl_gen.inputs.text import bytes_text
from infcl_gen.verification.properties import DTYPES
from infcl_gen.verification.verify import verify_package

GPU_PROBLEM = {"batch_size": 65536, "dim": 768, "dtype": "bf16", "memory_budget": "1GiB"}
CPU_PROBLEM = {"batch_size": 4096, "dim": 256, "dtype": "fp32", "memory_budget": "32MiB", "target": "cpu"}
CHECKED_ROWS = 8192  # errors need a dense fp64 matrix, which is 34 GB at 65 536 rows
ALLOWED_RATIO, ALLOWED_ROUNDINGS = 2.0, 8.0  # error relative to plain torch's, plus roundings of the result
ROUNDS = 5
RING_EXAMPLES = 4


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("-o", "--output", type=Path, default="build/demo", show_default=True, help="Folder for the packages.")
def main(output: Path) -> None:
    try:
        sys.exit(0 if demo(output) else 5)
    except InfclError as error:
        sys.exit(f"demo: {error}")


def demo(output: Path) -> bool:
    """Print the demonstration's tables, and return whether all errors are allowed."""
    flags: dict[str, Any] = GPU_PROBLEM if torch.cuda.is_available() else CPU_PROBLEM
    started = time.perf_counter()
    plan = infcl_gen.plan(**flags)
    folder = infcl_gen.generate(plan.problem, output / f"clip_{plan.target}", force=True)
    import_package(folder)
    print(f"planned, generated and imported in {time.perf_counter() - started:.1f} s: {folder}")
    print(
        f"clip, batch {flags['batch_size']}, D {flags['dim']}, {flags['dtype']}, strategy {plan.strategy} on "
        f"{plan.problem.device_profile}: panels of {plan.panel_rows} x {plan.panel_keys}"
    )

    batch = min(flags["batch_size"], CHECKED_ROWS)
    ours, plain = measured(folder, batch, rounds=1, errors=True)
    lines = [("plain torch, same dtype", *error_texts(plain)), ("package", *error_texts(ours))]
    print(table_text((f"relative error against fp64, batch {batch}", *RESULTS), lines))
    passed = ours["error"] is None and within(ours["err"], plain["err"], DTYPES[plan.dtype])

    ours, plain = measured(folder, flags["batch_size"], rounds=ROUNDS, errors=False)
    lines = [("plan", f"{plan.predicted_time_s * 1e3:.1f} ms", bytes_text(plan.predicted_peak_bytes))]
    for name, row in (("package, measured", ours), ("plain torch, measured", plain)):
        taken = (row["error"], "") if row["error"] else (f"{row['median_ms']:.1f} ms", bytes_text(row["peak_bytes"]))
        lines.append((name, *taken))
    title = f"forward + backward, batch {flags['batch_size']}"
    print(table_text((title, f"time, median of {ROUNDS}", "memory"), lines))

    if not torch.cuda.is_available():
        spread = output / "clip_ring"
        infcl_gen.generate(output=spread, force=True, devices=2, set={"transport": "ring"}, **flags)
        rows = verify_package(spread, ranks=2, examples=RING_EXAMPLES)
        passed = passed and all(row["passed"] for row in rows)
        print(f"verify --ranks 2: {rows[-1]['check']}: {rows[-1]['detail']}")
    good = "all errors are within twice those of plain torch, plus a few roundings"
    print(f"package: {folder}\n{good if passed else 'FAILED: an error is too large'}")
    return passed


def measured(folder: Path, batch: int, rounds: int, errors: bool) -> tuple[Row, Row]:
    """The rows of the package and of plain torch, as `infcl-gen bench` measures them."""
    point = point_of([read_package(folder)], batch, ["torch"], rounds=rounds, errors=errors)
    rows = {row["impl"]: row for _, row in measure_point(point) if row is not None}
    return rows["infcl"], rows["torch"]


def within(errors: dict[str, float], plain: dict[str, float], dtype: torch.dtype) -> bool:
    allowance = ALLOWED_ROUNDINGS * torch.finfo(dtype).eps
    return all(errors[name] <= ALLOWED_RATIO * plain[name] + allowance for name in RESULTS)


if __name__ == "__main__":
    main()
