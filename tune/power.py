"""Power, energy and clock of one step on this GPU, and of the bare products that it needs: whether power bounds it.

python tune/power.py [--points 64k:768,64k:128,32k:512] [--memory-budgets auto,40GiB] [-o tune/analysis/h200-power.json]

A row is a plan, or its products, repeated without a pause: milliseconds and joules of one repetition, watts, the median
clock, and of the moments at which the board was asked the share at which it held its clock down for power. Read by
NVIDIA's management library (`pip install nvidia-ml-py`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import infcl_gen
from infcl_gen.emission import import_package
from infcl_gen.problem import make_problem, parse_count
from infcl_gen.tuning.bench import bare_products, features, training_step
from infcl_gen.tuning.results import command_line, write_results

WARM_S = 0.25
MEASURED_S = 0.5  # joules are then known to some 15 %: the counter moves in steps of up to 0.1 s
ASKED_EVERY_S = 0.03
ROUNDS = 3


class Board:
    """The GPU that torch uses, as the management library sees it."""

    def __init__(self) -> None:
        import pynvml
        import torch

        self._library = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        )
        self.limit_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3

    def joules(self) -> float:
        """Since the driver was loaded."""
        return float(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3

    def clock_mhz(self) -> int:
        return int(self._library.nvmlDeviceGetClockInfo(self._handle, self._library.NVML_CLOCK_SM))

    def held_down(self) -> bool:
        """Whether the clock is below its highest for the sake of the power limit."""
        reasons = self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return bool(reasons & self._library.nvmlClocksThrottleReasonSwPowerCap)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=Path("tune/analysis/h200-power.json"))
    parser.add_argument("--points", default="64k:768,64k:128,32k:512", help="batch:dim, ...")
    parser.add_argument("--memory-budgets", default="auto,40GiB")
    given = parser.parse_args()
    board, rows = Board(), []
    for point in given.points.split(","):
        batch, dim = (parse_count(word) for word in point.split(":"))
        with tempfile.TemporaryDirectory() as folder:
            runs = _runs(batch, dim, given.memory_budgets.split(","), Path(folder))
            found: dict[tuple[str, str], list[dict[str, float]]] = {who: [] for who in runs}
            for round_ in range(ROUNDS):
                for who in random.Random(round_).sample(list(runs), len(runs)):
                    found[who].append(_measured(runs[who], board))
        for (strategy, what), measured in found.items():
            medians = {name: round(statistics.median(m[name] for m in measured), 3) for name in measured[0]}
            rows.append(
                {
                    "batch": batch,
                    "dim": dim,
                    "strategy": strategy,
                    "what": what,
                    "limit_w": board.limit_w,
                    **medians,
                }
            )
            print(*rows[-1].values(), flush=True)
    write_results(
        given.output, rows, command_line("tune/power.py", sys.argv[1:]), libraries=("nvidia-ml-py",)
    )
    return 0


def _runs(
    batch: int, dim: int, budgets: list[str], folder: Path
) -> dict[tuple[str, str], Callable[[], object]]:
    """By strategy and what it is: the step of each plan that is another, and its bare products."""
    import torch

    q, k = (features(batch, dim, "bf16", seed) for seed in (0, 1))
    scale = torch.tensor(14.3, device="cuda", requires_grad=True)
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    for number, budget in enumerate(budgets):
        problem = make_problem(batch_size=batch, dim=dim, memory_budget=budget)
        module = import_package(infcl_gen.generate(problem, folder / f"package{number}"))
        plan = module.SPEC["plan"]
        runs.setdefault((plan["strategy"], "step"), training_step(module, q, k, scale))
        runs.setdefault((plan["strategy"], "products"), bare_products(plan, q.detach(), k.detach()))
    return runs


def _measured(run: Callable[[], object], board: Board) -> dict[str, float]:
    """Of `run` alone, over and over."""
    import torch

    def repeat(seconds: float) -> int:
        """Runs in about that time; the host waits for the device now and then, or it would be seconds ahead."""
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            for _ in range(at_once):
                run()
            torch.cuda.synchronize()
            count += at_once
        return count

    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    at_once = max(1, round(0.1 / (time.perf_counter() - begin)))
    repeat(WARM_S)
    clocks: list[int] = []
    held: list[bool] = []
    done = threading.Event()

    def ask() -> None:
        while not done.wait(ASKED_EVERY_S):
            clocks.append(board.clock_mhz())
            held.append(board.held_down())

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        joules, begin = board.joules(), time.perf_counter()
        count = repeat(MEASURED_S)
        seconds, joules = time.perf_counter() - begin, board.joules() - joules
    finally:
        done.set()
        asking.join()
    return {
        "ms": 1e3 * seconds / count,
        "joules": joules / count,
        "watts": joules / seconds,
        "clock_mhz": statistics.median(clocks),
        "held_down": statistics.fmean(held),
    }


if __name__ == "__main__":
    sys.exit(main())
