"""What a GPU's own meters say of a step: power and clock (NVIDIA's management library), counters of kernels (ncu)."""

from __future__ import annotations

import csv
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from infcl_gen.bench.point import Step, bare_products, point_of, training_step
from infcl_gen.bench.results import Rows
from infcl_gen.bench.timing import turns
from infcl_gen.emission import import_package, read_package
from infcl_gen.errors import ToolchainError
from infcl_gen.processes import own_environment

WARM_S = 0.25
MEASURED_S = 0.5  # joules are then known to some 15 %: the counter moves in steps of up to 0.1 s
ASKED_EVERY_S = 0.03
ROUNDS = 3
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


def power(packages: Sequence[Path], scale: float) -> Rows:
    """A row for each package ("step") and for its bare products ("products"), repeated without a pause, in turns.

    Beside the fields of the measurement format: `what`, `limit_w`, and of one repetition `joules`; `watts`, the median
    `clock_mhz`, and `held_down`, the share of moments at which the board held its clock down for power. Raises
    ToolchainError without the management library.
    """
    library, gpu = _meters()
    limit_w = library.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3
    runs: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for folder in packages:
        row, *steps = _prepared(folder, scale)
        for what, step in zip(("step", "products"), steps, strict=True):
            runs[f"{folder} {what}"] = step
            rows[f"{folder} {what}"] = {**row, "what": what, "limit_w": limit_w, "repeats": ROUNDS}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _, name in turns(list(runs), ROUNDS):
        found[name].append(_measured(runs[name], library, gpu))
    for name, measured in found.items():
        rows[name] |= {figure: round(statistics.median(m[figure] for m in measured), 3) for figure in measured[0]}
    return list(rows.values())


def counters(folder: Path, scale: float) -> Rows:
    """A row for each launch of one step, in order: its `kernel`, and METRICS, percentages of what the hardware can do.

    ncu runs each kernel several times by itself: the board is cooler than in a step, and the caches are cold. Raises
    ToolchainError without ncu, or where it may not read the counters.
    """
    command = ["ncu", "--csv", "--profile-from-start", "off", "--clock-control", "none"]
    command += ["--metrics", ",".join(METRICS.values())]
    command += [sys.executable, "-P", "-m", "infcl_gen.bench.board", str(folder), str(scale)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=own_environment())
    except FileNotFoundError as error:
        raise ToolchainError("ncu is not installed; it comes with CUDA's Nsight Compute") from error
    except subprocess.TimeoutExpired as error:
        raise ToolchainError(f"ncu took more than {TIMEOUT_S:g} s") from error
    start = run.stdout.find('"ID"')
    if run.returncode or start < 0:
        raise ToolchainError(f"ncu read no counters: {(run.stdout + run.stderr).strip()[-500:]}")
    row = _row(folder, scale)
    return [{**row, **launch} for launch in read_counters(run.stdout[start:]) if launch["time_us"] >= LEAST_US]


def _row(folder: Path, scale: float) -> dict[str, Any]:
    package = read_package(folder)
    return {**point_of([package], scale=scale).row(str(package.path)), "strategy": package.spec["plan"]["strategy"]}


def _prepared(folder: Path, scale: float) -> tuple[dict[str, Any], Step, Step]:
    """A package's row, its step, and its bare products."""
    module, inputs = import_package(folder), point_of([read_package(folder)], scale=scale).inputs()
    products = bare_products(module.SPEC["plan"], inputs.q.detach(), inputs.k.detach())
    return _row(folder, scale), training_step(module, *inputs.leaves), products


def _meters() -> tuple[Any, Any]:
    """NVIDIA's management library, and its handle of the GPU that torch uses."""
    try:
        import pynvml
    except ImportError as error:
        raise ToolchainError("power is read by pynvml; pip install nvidia-ml-py") from error
    if not torch.cuda.is_available():
        raise ToolchainError("power is that of a GPU; torch sees none on this machine")
    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def _measured(run: Callable[[], object], library: Any, gpu: Any) -> dict[str, float]:
    """Of `run` alone, over and over."""
    clocks: list[int] = []
    held_down: list[bool] = []

    def repeat(seconds: float) -> int:
        """How many runs there are in that time. The device is asked amid each `at_once` of them, which the host then
        waits for, or it would be seconds ahead."""
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            for _ in range(at_once):
                run()
            clocks.append(library.nvmlDeviceGetClockInfo(gpu, library.NVML_CLOCK_SM))
            reasons = library.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)  # why the clock is below its highest
            held_down.append(bool(reasons & library.nvmlClocksThrottleReasonSwPowerCap))
            torch.cuda.synchronize()
            count += at_once
        return count

    def joules_so_far() -> float:
        return float(library.nvmlDeviceGetTotalEnergyConsumption(gpu)) / 1e3

    run()
    at_once = 1
    at_once = repeat(ASKED_EVERY_S)
    repeat(WARM_S)
    clocks.clear()
    held_down.clear()
    joules, begin = joules_so_far(), time.perf_counter()
    count = repeat(MEASURED_S)
    seconds, joules = time.perf_counter() - begin, joules_so_far() - joules
    return {
        "median_ms": 1e3 * seconds / count,
        "joules": joules / count,
        "watts": joules / seconds,
        "clock_mhz": statistics.median(clocks),
        "held_down": statistics.fmean(held_down),
    }


def read_counters(text: str) -> Rows:
    """A row for each launch in ncu's CSV, columns in the order of METRICS. Raises ToolchainError if it lacks some."""
    names = {metric: name for name, metric in METRICS.items()}
    found: dict[str, dict[str, Any]] = {}
    for line in csv.DictReader(io.StringIO(text)):
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


def main() -> None:
    """What ncu runs: one forward and backward between the profiler's start and stop, after one that compiles."""
    _, step, _ = _prepared(Path(sys.argv[1]), float(sys.argv[2]))
    step()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        step()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
