"""What CI leaves to the nightly tier (HYPOTHESIS_PROFILE=long): examples beyond a few, and sizes that take long.

The nightly tier alone draws features of 640, 768 and 1 152 dimensions under the interpreter (5 s each instead of 1 s),
and runs every ragged size of `panel` and `fused` between guard bands; CI runs every one of `fused` on one of its sides,
and those around the edges of tiles of the others, and of the CPU target.
It compiles every kernel ahead of time (2 minutes); CI those of which tests/compiled.json does not know what they take.
It judges the legality of all that the tuner proposes; CI judges a third.
It takes all forty combinations of options, also over one to four ranks; CI takes ten on the CPU and over three ranks,
and the kernels of four.
It draws rings in one process of up to 64 ranks (5 s each); CI draws up to 16, beside four fixed rings of 64.
It plans for 65 536 ranks and measures what one of them allocates (30 s); CI goes up to 4 096. One rank of 4 096 goes
through the whole runtime; in CI one of 1 024.
It compiles what the tuner drops for spills of ragged sizes alone (20 s); CI drops what spills on all.
It trains in fp32 and compares accuracies with the spread of seeds (18 s); in CI 300 steps in fp64 have the same losses
and the same accuracy as whole batches, and single steps are tested in fp32.
"""

from __future__ import annotations

import os

import hypothesis

from infcl_gen.verification.properties import DIMS

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
DRAWN_RANKS, DRAWN_NODES = (64, 8) if LONG else (16, 4)
INTERPRETED_DIMS = DIMS if LONG else tuple(dim for dim in DIMS if dim <= 384)


def examples(ci: int, long: int) -> hypothesis.settings:
    return hypothesis.settings(max_examples=long if LONG else ci)
