"""Strips: as many as there is room for, at most, and as long as makes the fewest rounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infcl_gen.runtime.launch import LONGEST_STRIP, cdiv, strip_blocks

counts = st.integers(1, 300)


@given(row_blocks=counts, key_blocks=counts, strips=counts, programs=counts)
def test_there_are_never_more_strips_than_there_is_room_for(
    row_blocks: int, key_blocks: int, strips: int, programs: int
) -> None:
    """Planted: a floor for the ceiling, which writes a strip's sums past the end."""
    strip = strip_blocks(row_blocks, key_blocks, min(strips, row_blocks), programs)
    assert strip * min(strips, row_blocks) >= row_blocks
    assert 1 <= strip <= max(LONGEST_STRIP, cdiv(row_blocks, min(strips, row_blocks)))


@pytest.mark.parametrize(
    ("row_blocks", "key_blocks", "programs", "expected"),
    [(8, 1, 1, 8), (8, 1, 8, 1), (8, 8, 16, 4), (100, 1, 1, 25), (9, 1, 3, 3)],
)
def test_rounds_are_few_and_full(row_blocks: int, key_blocks: int, programs: int, expected: int) -> None:
    """A round takes its longest strip and half a block more: of 100 blocks in one program 4 strips of 25."""
    assert strip_blocks(row_blocks, key_blocks, row_blocks, programs) == expected
