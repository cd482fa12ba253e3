"""Frozen sides in every strategy: what their gradient would take is left out."""

from __future__ import annotations

import pytest

from tests.kernels import checks
from tests.kernels.packages import Made
from tests.kernels.worker import Interpreter
from tests.tiers import nightly

MADE = [
    *(Made("panel"), Made("panel", dtype="fp32"), Made("panel", "siglip"), Made("panel", "infonce", "fp16")),
    *(Made("fused"), Made("fused", "infonce"), Made("stash"), Made("rows", "infonce")),
    *(Made("panel", "smooth_clip"), Made("rows", "smooth")),
]


# Of each strategy, of halves and of means one; planted bugs are noticed in two others.
OF_CI = [MADE[place] for place in (0, 1, 2, 5, 6, 9)]


@pytest.mark.parametrize("made", nightly(MADE, OF_CI), ids=lambda made: f"{made.strategy}-{made.loss}-{made.dtype}")
def test_frozen_sides(interpreted: Interpreter, made: Made) -> None:
    interpreted(checks.frozen_sides, made)


def test_rows_over_ranks(interpreted: Interpreter) -> None:
    made = Made("rows", "infonce", devices=3, settings=(("transport", "gather"),))
    interpreted(checks.frozen_sides_over_ranks, made, [70, 0, 30])
    interpreted(checks.frozen_sides_over_ranks, made, [64, 128, 64])
