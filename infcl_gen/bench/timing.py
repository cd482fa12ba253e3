"""Times of runs, each on a cold cache: from an idle device and behind other work.

On a GPU a run from an idle device waits for the host to start the first kernels. Behind other work, as a loss is behind
its towers in training, the host has run ahead: that is the device's time alone, unless the host is still behind after
LONGEST_LEAD_MS of other work.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from infcl_gen.files import lock, lock_file

FLUSH_BYTES = 256 << 20  # several times any L2: what a timed run starts with is in memory, not in a cache
CPU_FLUSH_BYTES = 64 << 20
SEED = 0
LONGEST_LEAD_MS = 40.0
LEAD_SIDE = 4096  # of the products of a lead: 0.2 ms each on an H200, long enough for its host to start one
LEAD_SAMPLE = 5  # of them are timed to know how many a lead takes


@contextlib.contextmanager
def timing_lock(target: str, timeout_s: float) -> Iterator[None]:
    """This machine's turn to time on its devices of a target: two runs at once would both measure nonsense."""
    with lock(lock_file(f"timing-{target}"), "timing", timeout_s):
        yield


class Times(NamedTuple):
    """Milliseconds of one run from an idle device, and of another one behind other work (None on the CPU)."""

    idle_ms: float
    queued_ms: float | None


class Timer:
    """Times runs, each on a cold cache: by the GPU's own events, or by the clock on the CPU."""

    def __init__(self, device: str, before: Callable[[], object] = lambda: None) -> None:
        """`before` is enqueued last before a queued run."""
        import torch

        self._gpu, self._before = device == "cuda", before
        size = FLUSH_BYTES if self._gpu else CPU_FLUSH_BYTES
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)
        self._lead: _Lead | None = None

    def times(self, run: Callable[[], object]) -> Times:
        """Of two runs on a GPU, and of more where the host was late; of one on the CPU."""
        idle_ms, host_ms = self.idle_ms(run)
        if not self._gpu:
            return Times(idle_ms, None)
        for lead_ms in leads_ms(host_ms):
            queued_ms, late = self.queued_ms(run, lead_ms)
            if not late:
                break
        return Times(idle_ms, queued_ms)

    def idle_ms(self, run: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds of a run that begins on an idle device, and what it took the host to start everything."""
        import torch

        self._flush.zero_()
        host_ms = 0.0

        def watched() -> None:
            nonlocal host_ms
            started = time.perf_counter()
            run()
            host_ms = 1e3 * (time.perf_counter() - started)

        if not self._gpu:
            watched()
            return host_ms, host_ms
        torch.cuda.synchronize()
        return self._watched(watched)[0], host_ms

    def queued_ms(self, run: Callable[[], object], lead_ms: float) -> tuple[float, bool]:
        """Milliseconds of a run behind `lead_ms` of other work, and whether the host was late: that work was over
        before the host had started everything.

        It is products, as towers have, then a flush of the cache. Behind 40 ms of memory traffic alone, in which the
        board cools, a loss at B = 64k, D = 1024 took 42 ms on an H200; over and over it takes 48.
        """
        if self._lead is None:
            self._lead = _Lead(self._flush.device)
        self._lead.enqueue(lead_ms)
        self._flush.zero_()
        self._before()
        return self._watched(run)

    def _watched(self, run: Callable[[], object]) -> tuple[float, bool]:
        """Milliseconds between two events around the run, and whether the first was over when the host was ready."""
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        late = start.query()
        end.synchronize()
        return float(start.elapsed_time(end)), bool(late)


class _Lead:
    """Other work for a GPU to be busy with."""

    def __init__(self, device: Any) -> None:
        import torch

        generator = torch.Generator(device).manual_seed(SEED)  # the process's own draws stay what they were
        shape = (2, LEAD_SIDE, LEAD_SIDE)
        self._factors = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
        self._product = torch.empty_like(self._factors[0])
        self._multiply()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(LEAD_SAMPLE):
            self._multiply()
        end.record()
        end.synchronize()
        self._product_ms = float(start.elapsed_time(end)) / LEAD_SAMPLE

    def enqueue(self, lead_ms: float) -> None:
        for _ in range(math.ceil(lead_ms / self._product_ms)):
            self._multiply()

    def _multiply(self) -> None:
        import torch

        torch.mm(*self._factors, out=self._product)


def leads_ms(host_ms: float) -> Iterator[float]:
    """How much other work a run is put behind whose host took `host_ms`: enough, or, where the host is late all the
    same (a busy device may slow it), twice as much, up to LONGEST_LEAD_MS."""
    lead_ms = min(1.5 * host_ms + 0.5, LONGEST_LEAD_MS)
    yield lead_ms
    while lead_ms < LONGEST_LEAD_MS:
        lead_ms = min(2 * lead_ms, LONGEST_LEAD_MS)
        yield lead_ms


def times_ms(run: Callable[[], object], repeats: int, device: str = "cuda") -> list[float]:
    """Times of `repeats` runs, each on a cold cache, after one that is not timed: on a GPU behind other work."""
    timer = Timer(device)
    run()
    found = (timer.times(run) for _ in range(repeats))
    return [times.idle_ms if times.queued_ms is None else times.queued_ms for times in found]


def time_figures(times: Sequence[Times]) -> dict[str, Any]:
    """What a row says of the times of some runs."""
    idle = [found.idle_ms for found in times]
    queued = _queued(times)
    return {
        "median_ms": statistics.median(idle),
        "mean_ms": statistics.fmean(idle),
        "std_ms": _spread(idle),
        "repeats": len(times),
        "queued_ms": statistics.median(queued) if queued else None,
        "queued_std_ms": _spread(queued) if queued else None,
    }


def floor_figures(times: Sequence[Times]) -> dict[str, float | None]:
    """The same of the bare products; nothing where they could not be timed."""
    idle, queued = [found.idle_ms for found in times], _queued(times)
    return {
        "floor_ms": statistics.median(idle) if idle else None,
        "queued_floor_ms": statistics.median(queued) if queued else None,
    }


def _queued(times: Sequence[Times]) -> list[float]:
    return [found.queued_ms for found in times if found.queued_ms is not None]


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
