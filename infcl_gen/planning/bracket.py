"""The largest number that fits, where what is taken grows nearly linearly with it."""

from __future__ import annotations

import math
from collections.abc import Callable


def largest_within(fits: int, fails: int, excess: Callable[[int], float], below: float, above: float) -> int:
    """The largest number from `fits` on, and below `fails`, whose excess is not positive; `below` and `above` are those
    of the two.

    By the Illinois method: about 6 calls where bisection needs 40. Halves the way where the excess is infinite.
    """
    below, moved = min(below, -1.0), 0
    while fails - fits > 1:
        share = 0.5 if math.isinf(above) else below / (below - above)
        guess = min(max(fits + int((fails - fits) * share), fits + 1), fails - 1)
        found = excess(guess)
        side = 1 if found > 0 else -1
        if side > 0:
            fails, above, below = guess, found, below / (2 if moved == side else 1)
        else:
            fits, below, above = guess, min(found, -1.0), above / (2 if moved == side else 1)
        moved = side
    return fits
