"""How much of a panel one program of a kernel walks."""

from __future__ import annotations

import functools

LONGEST_STRIP = 32  # row blocks; longer ones are not faster, and visit more keys at a time than L2 holds


@functools.cache
def strip_blocks(row_blocks: int, key_blocks: int, strips: int, programs: int, longest: int = LONGEST_STRIP) -> int:
    """Row blocks that one program walks: at most `strips` programs for each block of keys, in few and full rounds.

    A round is `programs` programs: as many as run at once, or for a ring, whose messages take multiprocessors away from
    some of them, several times as many. Each takes as long as its row blocks and about half a block more to start and
    end.
    """
    shortest = cdiv(row_blocks, strips)
    longest = max(shortest, min(row_blocks, longest))

    def cost(strip: int) -> float:
        return cdiv(key_blocks * cdiv(row_blocks, strip), programs) * (strip + 0.5)

    return min(range(shortest, longest + 1), key=cost)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
