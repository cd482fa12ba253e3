"""Invented costs of towers, with the proportions of a vision transformer and of a text transformer."""

from __future__ import annotations

import dataclasses

from infcl_gen.step.account import LossCosts
from infcl_gen.step.costs import PassCosts, StepCosts, TowerCosts

MB, SIZES = 10**6, (4, 8, 16, 32, 64)


def passes(kept_mb: float, forward_us: float, backward_us: float, extra_mb: float) -> PassCosts:
    """Per sample, beside 50 us for each pass."""

    def line(slope: float, start: float = 0.0) -> tuple[float, ...]:
        return tuple(start + slope * size for size in SIZES)

    def sizes(slope: float) -> tuple[int, ...]:
        return tuple(round(each) for each in line(slope * MB))

    behind = (line(backward_us * 1e-6, 50e-6), sizes(kept_mb + extra_mb)) if backward_us else ((), ())
    return PassCosts(SIZES, line(forward_us * 1e-6, 50e-6), sizes(kept_mb + extra_mb / 3), sizes(kept_mb), *behind)


IMAGE = TowerCosts("image", 1024, 602112, passes(0.001, 50, 0, 1.3), passes(20, 50, 84, 3), passes(2.5, 50, 120, 21))
TEXT = TowerCosts("text", 1024, 616, passes(0.001, 27, 0, 1.0), passes(13.5, 27, 40, 2), passes(1.4, 27, 58, 14))
COSTS = StepCosts("h200", (IMAGE, TEXT), 512, "bf16", 5 * MB, 5 * MB, 2 * MB, 50.0, {"torch": "2.11.0"})
FROZEN = dataclasses.replace(IMAGE, kept=None, checkpointed=None)


class Loss:
    """Linear memory, quadratic time; twice the memory is faster."""

    def smallest_bytes(self, samples: int) -> int:
        return 10_000 * samples

    def within_budgets(self, samples: int) -> list[LossCosts]:
        smallest, time_s = self.smallest_bytes(samples), 1e-9 * samples**2
        return [LossCosts(smallest, time_s, smallest), LossCosts(2 * smallest, 0.9 * time_s, 2 * smallest)]
