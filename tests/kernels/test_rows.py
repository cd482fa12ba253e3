"""A loss whose gradients follow from the sums of queries: forward computes them, by rows of panels."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from infcl_gen.verification.properties import Case
from tests.kernels import checks
from tests.kernels.packages import Made
from tests.kernels.worker import Interpreter
from tests.tiers import LONG, combined

ROWS = Made("rows", "infonce")


@pytest.mark.parametrize(
    "check",
    [
        *(checks.rows_of_panels, checks.labels_without_a_key, checks.sampled_references),
        *(checks.gradients_in_a_recording, checks.shares_of_a_block, checks.begun_rows),
        checks.positives_of_strips,
    ],
)
def test_rows_of_panels(interpreted: Interpreter, check: Callable[..., None]) -> None:
    interpreted(check, ROWS)


@pytest.mark.parametrize(
    ("loss", "check"), combined(["rince", "smooth"], [checks.rows_of_panels, checks.gradients_in_a_recording])
)
def test_rows_of_panels_with_weights_or_means(interpreted: Interpreter, loss: str, check: Callable[..., None]) -> None:
    interpreted(check, Made("rows", loss))


def test_over_ranks_backward_has_the_gradients(interpreted: Interpreter) -> None:
    interpreted(checks.over_ranks, ROWS, 3, [[70, 10, 60], [0, 100, 3]])


@pytest.mark.parametrize("loss", ["infonce", "rince", "smooth"])
def test_a_gather_begins_with_the_own_keys(interpreted: Interpreter, loss: str) -> None:
    """With those in strips of 64 that hold no other rank's. Some have no queries, no keys, or a ragged tile."""
    made = Made("rows", loss, devices=4, settings=(("transport", "gather"),))
    interpreted(checks.begun_over_ranks, made, [64, 128, 70, 64], [(0, 64), (64, 192), (192, 256), (320, 326)])
    interpreted(checks.begun_over_ranks, made, [128, 64, 64, 0], [(128, 192), (192, 256), None])


@pytest.mark.parametrize("loss", ["infonce", "smooth"])
def test_a_gather_without_gradients_and_with_wider_features(interpreted: Interpreter, loss: str) -> None:
    made = Made("rows", loss, devices=4, settings=(("transport", "gather"),))
    interpreted(checks.forward_with_gradients_over_ranks, made, [70, 0, 30])
    interpreted(checks.forward_with_gradients_over_ranks, made, [64, 128, 64])


@pytest.mark.parametrize("descriptors", ["on", "off"])
def test_ragged_sizes(interpreted: Interpreter, descriptors: str) -> None:
    made = Made("rows", "infonce", settings=(("descriptors", descriptors),))
    sizes = [(1, 1), (33, 70), (64, 64), (65, 127), (131, 100)]
    interpreted(checks.guarded, made, sizes if LONG else [(1, 1), (101, 69)], 14.3, "cpu", 3)
    interpreted(checks.guarded, made, [(70, 45), (129, 131)] if LONG else [(101, 69)], 1000.0)


@pytest.mark.parametrize(("scale", "features"), combined([14.3, 100.0, 1000.0], ["unit", "unnormalised"]))
def test_wide_ranges(interpreted: Interpreter, scale: float, features: str) -> None:
    interpreted(checks.numerics, ROWS, Case(130, 170, 0, scale=scale, features=features, seed=6))
