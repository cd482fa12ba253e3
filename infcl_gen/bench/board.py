"""The GPU's own meters for a step: power and clock (NVIDIA's management library), kernel counters (ncu)."""

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
from infcl_gen.bench.results import Row, Rows
from infcl_gen.bench.timing import turns
from infcl_gen.emission import import_package, read_package
from infcl_gen.errors import ToolchainError
from infcl_gen.processes import own_environment

WARM_S = 0.25
MEASURED_S = 0.5  # joules are then known to about 15 %: the energy counter moves in steps of up to 0.1 s
POLL_S = 0.03
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
LEAST_US = 20.0  # shorter launches are left out: their launch latency dominates


def power(packages: Sequence[Path], scale: float) -> Rows:
    """Two rows per package: its step ("step") and its bare products ("products"), run back to back, in turns.

    Fields beside the measurement format: `what`; `limit_w`; `joules` of one run; `watts`; the median `clock_mhz`; and
    `held_down`, the share of samples in which the power cap lowered the clock. Raises ToolchainError without pynvml or
    a GPU.
    """
    library, gpu = _meters()
    limit_w = library.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3
    runs: dict[str, Step] = {}
    rows: dict[str, Row] = {}
    for folder in packages:
        row = _row(folder, scale)
        for what, run in zip(("step", "products"), _runs(folder, scale), strict=True):
            runs[f"{folder} {what}"] = run
            rows[f"{folder} {what}"] = {**row, "what": what, "limit_w": limit_w, "repeats": ROUNDS}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _, name in turns(list(runs), ROUNDS):
        found[name].append(_measured(runs[name], library, gpu))
    for name, measured in found.items():
        rows[name] |= {figure: round(statistics.median(m[figure] for m in measured), 3) for figure in measured[0]}
    return list(rows.values())


def counters(folder: Path, scale: float) -> Rows:
    """One row per launch of a step, in order: its `kernel`, and METRICS as percentages of the hardware's peak.

    ncu replays each kernel by itself: the board is cooler than in a step, and caches are cold. Raises ToolchainError
    without ncu, or where it may not read the counters.
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


def _row(folder: Path, scale: float) -> Row:
    package = read_package(folder)
    return {**point_of([package], scale=scale).row(str(package.path)), "strategy": package.spec["plan"]["strategy"]}


def _runs(folder: Path, scale: float) -> tuple[Step, Step]:
    """A package's training step and its bare products."""
    module, inputs = import_package(folder), point_of([read_package(folder)], scale=scale).inputs()
    known = module.SPEC["loss"]["traits"]["known"]
    q, k = (x if x is None else x.detach() for x in (inputs.q, inputs.k))
    products = bare_products(module.SPEC["plan"], q, k, known)
    return training_step(module, *inputs.leaves, bias=inputs.bias), products


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
    """Figures of `run`, repeated back to back."""
    clocks: list[int] = []
    held_down: list[bool] = []

    def repeat(seconds: float, at_once: int) -> int:
        """The number of runs in that time. Each `at_once` runs the meters are read while the device is busy; then the
        host waits, or it would run seconds ahead."""
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            for _ in range(at_once):
                run()
            clocks.append(library.nvmlDeviceGetClockInfo(gpu, library.NVML_CLOCK_SM))
            reasons = library.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
            held_down.append(bool(reasons & library.nvmlClocksThrottleReasonSwPowerCap))
            torch.cuda.synchronize()
            count += at_once
        return count

    run()
    at_once = repeat(POLL_S, 1)
    repeat(WARM_S, at_once)
    clocks.clear()
    held_down.clear()
    energy_mj, begin = library.nvmlDeviceGetTotalEnergyConsumption(gpu), time.perf_counter()
    count = repeat(MEASURED_S, at_once)
    seconds = time.perf_counter() - begin
    joules = (library.nvmlDeviceGetTotalEnergyConsumption(gpu) - energy_mj) / 1e3
    return {
        "median_ms": 1e3 * seconds / count,
        "joules": joules / count,
        "watts": joules / seconds,
        "clock_mhz": statistics.median(clocks),
        "held_down": statistics.fmean(held_down),
    }


def read_counters(text: str) -> Rows:
    """One row per launch in ncu's CSV, fields in the order of METRICS. Raises ToolchainError if a metric is missing."""
    names = {metric: name for name, metric in METRICS.items()}
    found: dict[str, Row] = {}
    for line in csv.DictReader(io.StringIO(text)):
        row = found.setdefault(line["ID"], {"kernel": line["Kernel Name"].partition("(")[0]} | dict.fromkeys(METRICS))
        if line["Metric Name"] in names:
            value, unit = line["Metric Value"].replace(",", ""), line["Metric Unit"].lower()
            if unit not in UNITS or not value.replace(".", "", 1).isdigit():
                raise ToolchainError(f"ncu gives {line['Metric Name']} as {value!r} {unit!r}")
            row[names[line["Metric Name"]]] = round(float(value) * UNITS[unit], 3)
    if missing := sorted({name for row in found.values() for name in METRICS if row[name] is None}):
        raise ToolchainError(f"ncu gives no {', '.join(METRICS[name] for name in missing)}")
    return list(found.values())


def main() -> None:
    """The program that ncu profiles: one step to compile, then one between the profiler's start and stop."""
    step, _ = _runs(Path(sys.argv[1]), float(sys.argv[2]))
    step()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        step()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
