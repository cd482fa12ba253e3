"""Kernels of losses over prefixes of the features: one sweep with statistics, and gradients of logits, of each."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from infcl_gen.verification.properties import Case
from tests.kernels import checks
from tests.kernels.packages import Made
from tests.kernels.worker import Interpreter
from tests.tiers import LONG, nightly

CLIP = Made("panel", "clip_prefixes", dim=48)
INFONCE = Made("panel", "infonce_prefixes", "fp16", dim=48, settings=(("descriptors", "off"),))
CLIP_COSINES = Made("panel", "clip_cosines_prefixes", dim=48)
INFONCE_COSINES = Made("panel", "infonce_cosines_prefixes", dim=48, settings=(("descriptors", "off"),))
CLIP_OF_ROWS = Made("panel", "clip_prefixes_of_rows", dim=48)
INFONCE_OF_ROWS = Made("panel", "infonce_prefixes_of_rows", dim=48, settings=(("descriptors", "off"),))
CLIP_COSINES_OF_ROWS = Made("panel", "clip_cosines_prefixes_of_rows", dim=48)
INFONCE_COSINES_OF_ROWS = Made("panel", "infonce_cosines_prefixes_of_rows", dim=48)
OF_ROWS = {
    "clip_of_rows": CLIP_OF_ROWS, "infonce_of_rows": INFONCE_OF_ROWS, "clip_cosines_of_rows": CLIP_COSINES_OF_ROWS,
    "infonce_cosines_of_rows": INFONCE_COSINES_OF_ROWS,
}  # fmt: skip
ALL = {"clip": CLIP, "infonce": INFONCE, "clip_cosines": CLIP_COSINES, "infonce_cosines": INFONCE_COSINES, **OF_ROWS}
RAGGED = nightly(ALL, [each for each in ALL if each not in ("infonce_of_rows", "clip_cosines_of_rows")])


INPUTS = [
    ("unit", "contiguous", 14.3), ("matched", "strided", 100.0), ("unnormalised", "contiguous", 1000.0),
    ("solved", "contiguous", 20.0),
]  # fmt: skip
# Strided products and cosines of any length; of the other two losses the gate judges ragged sizes.
INPUTS_OF_CI = [
    ("clip", INPUTS[1]),
    ("infonce_cosines", INPUTS[2]),
    ("clip_cosines_of_rows", INPUTS[1]),
    ("clip_cosines", INPUTS[3]),
]


@pytest.mark.parametrize(("name", "drawn"), nightly(itertools.product(ALL, INPUTS), INPUTS_OF_CI), ids=str)
def test_as_accurate_as_the_dtypes_allow(interpreted: Interpreter, name: str, drawn: tuple[str, str, float]) -> None:
    made, (features, layout, scale) = ALL[name], drawn
    interpreted(checks.numerics, made, Case(100, 91, 0, scale=scale, bias=-1.0, features=features, layout=layout))


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_sizes_amid_nan(interpreted: Interpreter, name: str) -> None:
    """Also where rows differ by more than a tile's one exponential can hold."""
    made = ALL[name]
    sizes = (1, 31, 64, 97, 130) if LONG else (1, 101)
    interpreted(checks.guarded, made, [(n, (n * 37) % 131) for n in sizes], 14.3, "cpu", 3)
    if LONG or made in (CLIP, INFONCE_COSINES):
        interpreted(checks.guarded, made, [(70, 45)], 1000.0)


@pytest.mark.parametrize("name", nightly(OF_ROWS, ["infonce_of_rows", "clip_cosines_of_rows"]))
def test_losses_of_single_queries(interpreted: Interpreter, name: str) -> None:
    interpreted(checks.losses_of_rows, OF_ROWS[name])


@pytest.mark.parametrize("name", nightly(["clip_cosines", "infonce_cosines"], ["clip_cosines"]))
def test_positives_behind_the_last_key(interpreted: Interpreter, name: str) -> None:
    interpreted(checks.positives_behind_the_last_key, ALL[name])


def test_a_flag_for_all_prefixes(interpreted: Interpreter) -> None:
    interpreted(checks.flagged_sums, CLIP)
    interpreted(checks.flagged_gradients, CLIP)
    interpreted(checks.flagged_gradients, CLIP_COSINES)


@pytest.mark.parametrize(
    "name", nightly(ALL, ["clip", "infonce_cosines", "clip_of_rows"])
)  # both templates of products
def test_frozen_sides(interpreted: Interpreter, name: str) -> None:
    interpreted(checks.frozen_sides, ALL[name])


RANKS = [
    ("clip", "ring"), ("clip", "gather"), ("infonce", "ring"), ("clip_cosines", "ring"), ("infonce_cosines", "gather"),
    ("clip_of_rows", "gather"), ("clip_cosines_of_rows", "ring"), ("infonce_cosines_of_rows", "gather"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "transport"), nightly(RANKS, [RANKS[1], RANKS[3], RANKS[6]]))
def test_over_ranks(interpreted: Interpreter, loss: str, transport: str) -> None:
    settings = (*ALL[loss].settings, ("transport", transport))
    made = dataclasses.replace(ALL[loss], devices=4, settings=settings)
    interpreted(checks.over_ranks, made, 3, [[130, 0, 10], [40, 0, 0]] if LONG else [[70, 10, 0]])


@pytest.mark.parametrize("loss", nightly(["clip_prefixes", "clip_cosines_prefixes"], ["clip_cosines_prefixes"]))
def test_selftest_of_the_planned_tiles(interpreted: Interpreter, loss: str) -> None:
    """Whose last slab is no whole tile of the depth."""
    interpreted(checks.selftest, Made("panel", loss, dim=48, small=False))
