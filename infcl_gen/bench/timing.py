"""Times of runs on a cold cache: from an idle device, and behind other work.

On a GPU a run from an idle device waits for the host to launch the first kernels. Behind other work, as a loss runs
behind its towers, the host has run ahead: the time is the device's alone, unless the host is late even after
LONGEST_LEAD_MS of other work.
"""

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

FLUSH_BYTES = 256 << 20  # several times any GPU's L2
CPU_FLUSH_BYTES = 64 << 20
SEED = 0
LONGEST_LEAD_MS = 40.0
LEAD_SIDE = 4096  # a product of 0.2 ms on an H200, longer than the host needs to launch one
LEAD_SAMPLE = 5  # products timed to know how many fill a lead


class Times(NamedTuple):
    """Milliseconds of one run from an idle device, and of another behind other work (None on the CPU)."""

    idle_ms: float
    queued_ms: float | None


class Timer:
    """Times runs on a cold cache, by the GPU's events or by the CPU's clock."""

    def __init__(self, device: str) -> None:
        self.device = device
        size = FLUSH_BYTES if device == "cuda" else CPU_FLUSH_BYTES
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def times(self, run: Callable[[], object]) -> Times:
        """Times of two runs on a GPU, more where the host is late; of one run on the CPU."""
        idle_ms, host_ms = self.idle_ms(run)
        if self.device == "cpu":
            return Times(idle_ms, None)
        lead_ms = min(1.5 * host_ms + 0.5, LONGEST_LEAD_MS)
        while True:
            queued_ms, late = self.queued_ms(run, lead_ms)
            if not late or lead_ms == LONGEST_LEAD_MS:
                return Times(idle_ms, queued_ms)
            lead_ms = min(2 * lead_ms, LONGEST_LEAD_MS)  # a busy device may slow its host

    def idle_ms(self, run: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds of a run from an idle device, and milliseconds of the host to launch it."""
        self._flush.zero_()
        if self.device == "cpu":
            host_ms = _host_ms(run)
            return host_ms, host_ms
        torch.cuda.synchronize()
        return _watched(run)[:2]

    def queued_ms(self, run: Callable[[], object], lead_ms: float) -> tuple[float, bool]:
        """Milliseconds of a run behind `lead_ms` of other work; and whether that work ended before the host had
        launched everything.

        The work is products, as in towers, then a flush of the cache. Memory traffic alone would cool the board: behind
        40 ms of it a loss at B = 64k, D = 1024 took 42 ms on an H200, against 48 ms back to back.
        """
        multiply, product_ms = self._lead
        multiply(math.ceil(lead_ms / product_ms))
        self._flush.zero_()
        self.gather()
        device_ms, _, late = _watched(run)
        return device_ms, late

    def gather(self) -> None:
        """Enqueued last before a queued run; ranks meet here."""

    @functools.cached_property
    def _lead(self) -> tuple[Callable[[int], None], float]:
        """A function that enqueues a number of products, and the milliseconds of one."""
        generator = torch.Generator(self.device).manual_seed(SEED)  # leaves the global generator alone
        shape = (2, LEAD_SIDE, LEAD_SIDE)
        factors = torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=generator)
        product = torch.empty_like(factors[0])

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.mm(*factors, out=product)

        multiply(1)
        return multiply, _watched(lambda: multiply(LEAD_SAMPLE))[0] / LEAD_SAMPLE


def _watched(run: Callable[[], object]) -> tuple[float, float, bool]:
    """Milliseconds of the device and of the host, and whether the device began before the host was done."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    host_ms = _host_ms(run)
    end.record()
    late = start.query()
    end.synchronize()
    return float(start.elapsed_time(end)), host_ms, bool(late)


def _host_ms(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Round and name of every turn; a name removed from `names` meanwhile has no later rounds.

    Each round is shuffled, since a run that always follows the hottest is slower. All ranks draw the same order.
    """
    for round_ in range(rounds):
        for name in random.Random(SEED + round_).sample(names, len(names)):
            yield round_, name


def time_figures(times: Sequence[Times], floors: Sequence[Times] = ()) -> dict[str, Any]:
    """A row's figures from the times of a step, and of its bare products (`floors`)."""
    idle, floor = ([run.idle_ms for run in runs] for runs in (times, floors))
    queued, queued_floor = ([run.queued_ms for run in runs if run.queued_ms is not None] for runs in (times, floors))
    return {
        "median_ms": statistics.median(idle),
        "mean_ms": statistics.fmean(idle),
        "std_ms": statistics.stdev(idle) if len(idle) > 1 else 0.0,
        "repeats": len(times),
        "queued_ms": statistics.median(queued) if queued else None,
        "queued_std_ms": statistics.stdev(queued) if len(queued) > 1 else 0.0 if queued else None,
        "floor_ms": statistics.median(floor) if floor else None,
        "queued_floor_ms": statistics.median(queued_floor) if queued_floor else None,
    }
