"""Hardware counters of each kernel of one step on this GPU, read by Nsight Compute (ncu): what bounds it.

python tune/counters.py [--batch 16k] [--dim 768] [--memory-budgets auto,40GiB] [-o tune/analysis/h200-counters.json]

A row is one launch, in order: its time at the clock that the board had, and how busy tensor cores, caches, memory and
the other pipes of a multiprocessor were, in percent of what they can do. ncu runs each kernel several times by itself:
the board is cooler than in a step, and the caches are cold.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import infcl_gen
from infcl_gen.errors import ToolchainError
from infcl_gen.problem import make_problem, parse_count
from infcl_gen.tuning.results import command_line, write_results

METRICS = {
    "time_us": "gpu__time_duration.sum",
    "clock_ghz": "smsp__cycles_elapsed.avg.per_second",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "special_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "shared_percent": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "fma_percent": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "alu_percent": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "l1_percent": "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
}
UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "hz": 1e-9, "mhz": 1e-3, "ghz": 1.0, "%": 1.0}
TIMEOUT_S = 300.0
LEAST_US = 20.0  # shorter launches are left out: they are bound by starting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=Path("tune/analysis/h200-counters.json"))
    parser.add_argument("--batch", type=parse_count, default="16k")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--memory-budgets", default="auto,40GiB")
    parser.add_argument("--step", type=Path, help=argparse.SUPPRESS)  # what ncu runs
    given = parser.parse_args()
    if given.step is not None:
        _step(given.step)
        return 0
    rows: list[dict[str, Any]] = []
    for budget in given.memory_budgets.split(","):
        with tempfile.TemporaryDirectory() as folder:
            problem = make_problem(
                batch_size=given.batch, dim=given.dim, memory_budget=budget, set={"replay": "off"}
            )
            package = infcl_gen.generate(problem, Path(folder) / "package")
            strategy = infcl_gen.plan(problem).strategy
            try:
                table = _counters(package)
            except ToolchainError as error:
                print(error, file=sys.stderr)
                return error.exit_code
        point = {"batch": given.batch, "dim": given.dim, "strategy": strategy}
        rows += [point | row for row in table if row["time_us"] >= LEAST_US]
    for row in rows:
        print(*row.values())
    write_results(given.output, rows, command_line("tune/counters.py", sys.argv[1:]))
    return 0


def _counters(package: Path) -> list[dict[str, Any]]:
    """A row for each launch. Raises ToolchainError without ncu, or where it may not read the counters."""
    command = ["ncu", "--csv", "--profile-from-start", "off", "--clock-control", "none"]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--step", str(package)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError as error:
        raise ToolchainError("ncu is not installed; it comes with CUDA's Nsight Compute") from error
    except subprocess.TimeoutExpired as error:
        raise ToolchainError(f"ncu took more than {TIMEOUT_S:g} s") from error
    start = run.stdout.find('"ID"')
    if run.returncode or start < 0:
        raise ToolchainError(f"ncu read no counters: {(run.stdout + run.stderr).strip()[-500:]}")
    names = {metric: name for name, metric in METRICS.items()}
    found: dict[str, dict[str, Any]] = {}  # columns in the order of METRICS
    for line in csv.DictReader(io.StringIO(run.stdout[start:])):
        blank = {"kernel": line["Kernel Name"].partition("(")[0]} | dict.fromkeys(METRICS)
        row = found.setdefault(line["ID"], blank)
        if line["Metric Name"] in names:
            value, unit = line["Metric Value"].replace(",", ""), line["Metric Unit"].lower()
            if unit not in UNITS or not value.replace(".", "", 1).isdigit():
                raise ToolchainError(f"ncu gives {line['Metric Name']} as {value!r} {unit!r}")
            row[names[line["Metric Name"]]] = round(float(value) * UNITS[unit], 3)
    missing = sorted({name for row in found.values() for name in METRICS if row[name] is None})
    if missing:
        raise ToolchainError(f"ncu gives no {', '.join(METRICS[name] for name in missing)}")
    return list(found.values())


def _step(package: Path) -> None:
    """One forward and backward between the profiler's start and stop, after one that compiles."""
    import torch

    from infcl_gen.emission import import_package
    from infcl_gen.tuning.bench import features, training_step

    module = import_package(package)
    problem = module.SPEC["problem"]
    q, k = (features(problem["batch_size"], problem["dim"], problem["dtype"], seed) for seed in (0, 1))
    scale = torch.tensor(14.3, device="cuda", requires_grad=True)
    step = training_step(module, q, k, scale)
    step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    sys.exit(main())
