"""The largest number that fits, of excesses that grow as memory does, and of others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from infcl_gen.inputs.problem import MAX_BATCH
from infcl_gen.planning.bracket import largest_within

# By the largest number that fits.
EXCESSES: dict[str, Callable[[int], Callable[[int], float]]] = {
    "linear": lambda most: lambda x: 7e3 * (x - most) - 1,
    "squares": lambda most: lambda x: x * x - most * most,
    "out of range": lambda most: lambda x: math.inf if x > most else x - 2e12,
    "a step up": lambda most: lambda x: 1e15 if x > most else -1.0,
    "a step from far below": lambda most: lambda x: 1.0 if x > most else -1e15,
    "a wall": lambda most: lambda x: math.expm1(min((x - most) / 1e5, 700.0)),
    "none beside zero": lambda most: lambda x: x > most,
}


@pytest.mark.parametrize("name", EXCESSES)
def test_the_largest_number_is_found(name: str) -> None:
    """Also at either end, and each number is asked for once."""
    fails = MAX_BATCH
    for most in (1, 2, 1000, fails // 3, fails - 2, fails - 1):
        asked: list[int] = []
        excess = EXCESSES[name](most)

        def counted(x: int, excess: Callable[[int], float] = excess, asked: list[int] = asked) -> float:
            asked.append(x)
            return excess(x)

        assert largest_within(1, fails, counted, excess(1), excess(fails)) == most
        assert all(1 < x < fails for x in asked) and len(asked) == len({*asked})
        assert len(asked) <= 4 or name != "linear"


def test_neighbours_leave_nothing_to_ask() -> None:
    assert largest_within(4, 5, lambda x: pytest.fail(f"asked for {x}"), -1.0, 1.0) == 4
