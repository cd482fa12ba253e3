"""Frozen sides in every strategy: what their gradient would take is left out."""

from __future__ import annotations

import pytest

from tests.kernels import checks
from tests.kernels.packages import Made
from tests.kernels.worker import Interpreter

MADE = [
    *(Made("panel"), Made("panel", dtype="fp32"), Made("panel", "siglip"), Made("panel", "infonce", "fp16")),
    *(Made("fused"), Made("fused", "infonce"), Made("stash"), Made("rows", "infonce")),
    *(Made("panel", "smooth_clip"), Made("rows", "smooth")),
]


@pytest.mark.parametrize("made", MADE, ids=lambda made: f"{made.strategy}-{made.loss}-{made.dtype}")
def test_frozen_sides(interpreted: Interpreter, made: Made) -> None:
    interpreted(checks.frozen_sides, made)


def test_rows_over_ranks(interpreted: Interpreter) -> None:
    made = Made("rows", "infonce", devices=3, settings=(("transport", "gather"),))
    interpreted(checks.frozen_sides_over_ranks, made, [70, 0, 30])
