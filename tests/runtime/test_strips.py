"""Strips: as many as there is room for, at most, and as long as makes the fewest rounds."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infcl_gen.emission import build
from infcl_gen.inputs.problem import make_problem
from infcl_gen.runtime.launch import LONGEST_STRIP, cdiv, strip_blocks

counts = st.integers(1, 300)


@given(walked=counts, owned=counts, strips=counts, programs=counts)
def test_there_are_never_more_strips_than_there_is_room_for(
    walked: int, owned: int, strips: int, programs: int
) -> None:
    """Planted: a floor for the ceiling, which writes a strip's sums past the end."""
    strip = strip_blocks(walked, owned, min(strips, walked), programs)
    assert strip * min(strips, walked) >= walked
    assert 1 <= strip <= max(LONGEST_STRIP, cdiv(walked, min(strips, walked)))


@pytest.mark.parametrize(
    ("walked", "owned", "programs", "expected"),
    [(8, 1, 1, 8), (8, 1, 8, 1), (8, 8, 16, 4), (100, 1, 1, 25), (9, 1, 3, 3)],
)
def test_rounds_are_few_and_full(walked: int, owned: int, programs: int, expected: int) -> None:
    """A round takes its longest strip and half a block more: of 100 blocks in one program 4 strips of 25."""
    assert strip_blocks(walked, owned, walked, programs) == expected


@pytest.mark.parametrize("devices", [2, 4, 8, 16])
def test_a_rank_of_a_gather_begins_with_most_of_its_keys(devices: int) -> None:
    """Seven strips of eight at least are whole, wherever its keys begin. Planted: strips as long as on one device; as
    few strips as one device has room for."""
    rows = 16384
    flags = {"batch_size": rows * devices, "dim": 768, "devices": devices, "device_profile": "h200"}
    problem = make_problem(loss="infonce", set={"transport": "gather", "strategy": "rows"}, **flags)
    lines = build(problem)["schedule.py"].splitlines()
    found = dict(line.split("  #")[0].split(" = ") for line in lines if line[:1].isupper() and "  #" in line)
    numbers = {name: ast.literal_eval(text) for name, text in found.items() if text.isdigit()}
    limits = (numbers[name] for name in ("FORWARD_STRIPS", "FORWARD_PROGRAMS", "LONGEST_STRIP"))
    strip = strip_blocks(cdiv(rows * devices, 128), cdiv(min(rows, numbers["PANEL_ROWS"]), 128), *limits)
    own = rows // 128
    assert (own // strip - 1) * strip >= 7 * own // 8
