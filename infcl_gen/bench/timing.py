"""Times of runs, each on a cold cache: from an idle device and behind other work.

On a GPU a run from an idle device waits for the host to start the first kernels. Behind other work, as a loss is behind
its towers in training, the host has run ahead: that is the device's time alone, unless the host is still behind after
LONGEST_LEAD_MS of other work.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

FLUSH_BYTES = 256 << 20  # several times any L2: what a timed run starts with is in memory, not in a cache
CPU_FLUSH_BYTES = 64 << 20
SEED = 0
LONGEST_LEAD_MS = 40.0
LEAD_SIDE = 4096  # of the products of a lead: 0.2 ms each on an H200, long enough for its host to start one
LEAD_SAMPLE = 5  # of them are timed to know how many a lead takes


class Times(NamedTuple):
    """Milliseconds of one run from an idle device, and of another one behind other work (None on the CPU)."""

    idle_ms: float
    queued_ms: float | None


class Timer:
    """Times runs, each on a cold cache: by the GPU's own events, or by the clock on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        size = FLUSH_BYTES if device == "cuda" else CPU_FLUSH_BYTES
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def times(self, run: Callable[[], object]) -> Times:
        """Of two runs on a GPU, and of more where the host was late; of one on the CPU."""
        idle_ms, host_ms = self.idle_ms(run)
        if self.device == "cpu":
            return Times(idle_ms, None)
        lead_ms = min(1.5 * host_ms + 0.5, LONGEST_LEAD_MS)
        queued_ms, late = self.queued_ms(run, lead_ms)
        while late and lead_ms < LONGEST_LEAD_MS:  # a busy device may slow its host
            lead_ms = min(2 * lead_ms, LONGEST_LEAD_MS)
            queued_ms, late = self.queued_ms(run, lead_ms)
        return Times(idle_ms, queued_ms)

    def idle_ms(self, run: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds of a run that begins on an idle device, and what it took the host to start everything."""
        self._flush.zero_()
        if self.device == "cpu":
            host_ms = _host_ms(run)
            return host_ms, host_ms
        torch.cuda.synchronize()
        return _watched(run)[:2]

    def queued_ms(self, run: Callable[[], object], lead_ms: float) -> tuple[float, bool]:
        """Milliseconds of a run behind `lead_ms` of other work, and whether the host was late: that work was over
        before the host had started everything.

        It is products, as towers have, then a flush of the cache. Behind 40 ms of memory traffic alone, in which the
        board cools, a loss at B = 64k, D = 1024 took 42 ms on an H200; over and over it takes 48.
        """
        multiply, product_ms = self._lead
        multiply(math.ceil(lead_ms / product_ms))
        self._flush.zero_()
        self.gather()
        device_ms, _, late = _watched(run)
        return device_ms, late

    def gather(self) -> None:
        """What is enqueued last before a queued run: on one device nothing."""

    @functools.cached_property
    def _lead(self) -> tuple[Callable[[int], None], float]:
        """What enqueues a number of products, and the milliseconds of one."""
        generator = torch.Generator(self.device).manual_seed(SEED)  # the process's own draws stay what they were
        shape = (2, LEAD_SIDE, LEAD_SIDE)
        factors = torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=generator)
        product = torch.empty_like(factors[0])

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.mm(*factors, out=product)

        multiply(1)
        return multiply, _watched(lambda: multiply(LEAD_SAMPLE))[0] / LEAD_SAMPLE


def _watched(run: Callable[[], object]) -> tuple[float, float, bool]:
    """Milliseconds between two events around the run and those of the host, and whether the first event was over when
    the host was ready."""
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
    """Round and name of every turn: each name once a round. A name that is removed meanwhile has no later rounds.

    Every round has an order of its own, since who always follows the hottest is slower for it. All ranks draw the same.
    """
    for round_ in range(rounds):
        for name in random.Random(SEED + round_).sample(names, len(names)):
            yield round_, name


def time_figures(times: Sequence[Times], floors: Sequence[Times] = ()) -> dict[str, Any]:
    """What a row says of the times of some runs, and of those of the bare products."""
    idle, queued, floor, queued_floor = (
        [ms for found in runs if (ms := found[way]) is not None] for runs in (times, floors) for way in range(2)
    )
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
