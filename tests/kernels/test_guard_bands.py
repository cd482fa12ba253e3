"""Every ragged size 1..130 amid NaN: nothing leaks in, nothing outside a buffer is overwritten."""

from __future__ import annotations

import pytest

from tests.kernels import checks
from tests.kernels.packages import Made
from tests.kernels.worker import Interpreter
from tests.tiers import LONG, nightly

# Around the edges of tiles, whose sides are 32 and 64.
EDGES = (1, 31, 32, 33, 63, 64, 65, 95, 97, 127, 128, 129, 130)
AROUND = EDGES if LONG else (1, 33, 63, 129)
FEW = EDGES if LONG else (1, 101)  # one row, and two panels of either side, of which the first is whole
PACKAGES = {
    "panel": Made("panel"),
    "panel, pointers": Made("panel", "infonce", "fp16", settings=(("descriptors", "off"),)),
    "panel, fp32": Made("panel", dtype="fp32", dim=8),
    "pairs": Made("panel", "siglip"),
    "pairs, pointers": Made("panel", "siglip", "fp16", settings=(("descriptors", "off"),)),
    "pairs, fp32": Made("panel", "siglip", "fp32", dim=8),
    "pairs by id": Made("panel", "siglip_multi"),
    "pairs of single queries": Made("panel", "siglip_labels_of_rows"),
    "means": Made("panel", "smooth_clip", dim=100),
    "triangle": Made("panel", "ntxent"),
    "triangle, pointers": Made("panel", "ntxent", "fp16", settings=(("descriptors", "off"),)),
    "triangle, fp32": Made("panel", "ntxent", "fp32", dim=8),
    "combined triangle": Made("panel", "margin_of_rows"),
    "combined triangle, fp32": Made("panel", "dcl", "fp32", dim=8),
    "two sums of a triangle": Made("panel", "hard_negative"),
    "sums of partners": Made("panel", "weighed_by_partner"),
    "sums of columns": Made("panel", "weighed_by_column"),
    "columns of ids": Made("panel", "mil_nce_multi"),
    "columns of ids, fp32": Made("panel", "mil_nce_multi", "fp32", dim=8),
    "sums of columns, fp32": Made("panel", "mil_nce", "fp32", dim=8),
    "two sums, pointers": Made("panel", "hard_keys", settings=(("descriptors", "off"),)),
    "two sums, fp32": Made("panel", "squared_weights", "fp32", dim=8),
    "several of a triangle": Made("panel", "supcon_in"),
    "several of a triangle, fp32": Made("panel", "supcon_out", "fp32", dim=8),
    "several, pointers": Made("panel", "infonce_in", "fp16", settings=(("descriptors", "off"),)),
    "guide": Made("panel", "distill"),
    "guide, fp32": Made("panel", "distill", "fp32", dim=8),
    "guide of both sides": Made("panel", "distill_apart"),
    "guide of both sides, fp32": Made("panel", "distill_clip", "fp32", dim=8),
    "above a threshold": Made("panel", "gist"),
    "above a threshold, fp32": Made("panel", "near_and_ids", "fp32", dim=8),
    "rows in pairs": Made("panel", "three_block"),
    "rows in pairs, fp32": Made("panel", "near_rows", "fp32", dim=8),
    "ids left out": Made("panel", "clip_without_ids"),
    "fused": Made("fused", "infonce"),
    "fused, pointers": Made("fused", dim=3),
    "stash": Made("stash"),
}
EVERY = ("panel", "fused") if LONG else ("fused",)
AROUND_EDGES = ("panel", "pairs", "triangle", "stash")  # a package of each strategy and of each way to finish
# Left to the nightly tier: their kernels are those of others in fp32, or through pointers.
REPEATED = (
    "triangle, fp32", "columns of ids, fp32", "guide, fp32", "pairs, pointers", "two sums, fp32", "triangle, pointers",
    "sums of columns, fp32", "guide of both sides, fp32", "above a threshold, fp32", "rows in pairs, fp32",
)  # fmt: skip
COMPUTED_TWICE = (
    "panel", "fused", "stash", "triangle", "combined triangle", "several of a triangle", "several, pointers",
    "two sums of a triangle", "two sums, pointers", "guide", "sums of columns",
)  # fmt: skip
REPEATED_TWICE = ("combined triangle", "several, pointers", "two sums, pointers")


@pytest.mark.parametrize("first", [1, 14, 27, 40, 53, 66, 79, 92, 105, 118])
@pytest.mark.parametrize("name", EVERY)
def test_every_ragged_size(interpreted: Interpreter, name: str, first: int) -> None:
    """Of one side: where the loss allows it the keys run down while the queries run up.

    The nightly tier takes every size of both sides. CI takes every eighth of the queries, which from 67 on lie one
    below a whole tile, and the keys have the rest.
    """
    sizes = [n for n in range(first, first + 13) if LONG or n % 8 == (1 if n < 67 else 7)]
    interpreted(checks.guarded, PACKAGES[name], [(n, 131 - n) for n in sizes], 14.3, "cpu", 3)


OTHERS = sorted(set(PACKAGES) - set(EVERY))
OTHERS_OF_CI = sorted(set(OTHERS) - set(REPEATED))


@pytest.mark.parametrize("name", nightly(OTHERS, OTHERS_OF_CI))
def test_ragged_sizes_of_other_kernels(interpreted: Interpreter, name: str) -> None:
    sizes = AROUND if name in AROUND_EDGES else FEW
    interpreted(checks.guarded, PACKAGES[name], [(n, (n * 37) % 131) for n in sizes], 14.3, "cpu", 3)


@pytest.mark.parametrize("name", nightly(COMPUTED_TWICE, set(COMPUTED_TWICE) - set(REPEATED_TWICE)))
def test_tiles_that_are_computed_twice(interpreted: Interpreter, name: str) -> None:
    """At this scale rows differ by more than a tile's one exponential can hold."""
    interpreted(checks.guarded, PACKAGES[name], [(70, 45), (129, 131)] if LONG else [(101, 69)], 1000.0)


@pytest.mark.parametrize(
    "loss",
    [
        *("clip", "infonce", "siglip", "ntxent", "dcl", "hard_negative", "supcon_in", "infonce_out", "distill"),
        *("distill_clip", "four_block", "three_block", "gist", "mil_nce", "mil_nce_multi"),
    ],
)
def test_the_cpu_target(loss: str) -> None:
    checks.guarded(Made("torch", loss), [(n, 131 - n) for n in (range(1, 131) if LONG else FEW)])
