"""Strips of several row blocks, sums of many parts, thresholds of the wide range: on each kernel that has them."""

from __future__ import annotations

import pytest

from tests.kernels import pieces
from tests.kernels.packages import Made
from tests.kernels.worker import Interpreter


@pytest.mark.parametrize(
    "made",
    [Made("panel"), Made("stash"), Made("panel", dtype="fp32", precision="exact"), Made("panel", "distill_apart")],
)
def test_strips_of_several_row_blocks(interpreted: Interpreter, made: Made) -> None:
    """Planted: a strip that ends a block early; the positive of a key looked up in another strip."""
    interpreted(pieces.long_strips, made)


def test_sums_of_many_parts(interpreted: Interpreter) -> None:
    """Planted, in each of the three loops: only the first part is done."""
    interpreted(pieces.sums_of_many_parts, Made("panel", "infonce"))


def test_slopes_of_all_sizes(interpreted: Interpreter) -> None:
    """Planted: a strip of large logits that counts as one of small ones."""
    interpreted(pieces.slopes_of_all_sizes, Made("panel", "siglip", "fp32", precision="exact", dim=64))


def test_sizes_of_logits(interpreted: Interpreter) -> None:
    """Planted: tiny terms without their squares, a slope without its own, a strip of others, or with a NaN, that
    counts as tiny."""
    interpreted(pieces.sizes_of_logits, Made("panel", "siglip", dim=128))


def test_sizes_handed_on(interpreted: Interpreter) -> None:
    """Planted: a launch that does not read what the one before has met, or reads what it writes."""
    interpreted(pieces.sizes_handed_on, Made("panel", "siglip"))


def test_thresholds_of_the_forward(interpreted: Interpreter) -> None:
    """Planted: SMALLEST_SUM of 2^-125, LARGEST_SUM of 2^127."""
    interpreted(pieces.thresholds_of_the_forward, Made("panel", "infonce"))


@pytest.mark.parametrize("strategy", ["panel", "fused"])
def test_threshold_of_the_backward(interpreted: Interpreter, strategy: str) -> None:
    """Planted: a SPREAD of 125."""
    interpreted(pieces.threshold_of_the_backward, Made(strategy))


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_lines_without_a_term(dtype: str) -> None:
    pieces.lines_without_a_term(Made("torch", dtype=dtype))


def test_cancelling_products() -> None:
    pieces.cancelling_products(Made("torch", dtype="fp32"))


@pytest.mark.parametrize(
    "made",
    [
        Made("panel"),
        Made("panel", "infonce"),
        Made("panel", "ntxent"),
        Made("fused"),
        Made("stash"),
        Made("rows", "infonce"),
        Made("panel", "siglip"),
        Made("panel", dtype="fp32"),
    ],
)
def test_a_rehearsal_notes_the_launches_of_a_step(interpreted: Interpreter, made: Made) -> None:
    """Also of a step with fewer gradients. Planted: a rehearsal without backward, of other constants, of all
    gradients whatever the call wants, or of panels with positives alone."""
    interpreted(pieces.rehearsal, made)


@pytest.mark.parametrize("loss", ["ntxent", "hard_negative", "supcon_in", "supcon_out"])
def test_sums_of_visitors(interpreted: Interpreter, loss: str) -> None:
    """Planted: exponents of 0 in sums of no pair, beside which others are lost."""
    interpreted(pieces.sums_of_visitors, Made("panel", loss))
    pieces.sums_of_visitors(Made("torch", loss, "fp32"))


def test_a_later_strip_of_wide_range(interpreted: Interpreter) -> None:
    """Planted: the reference of the first strip for that of all."""
    interpreted(pieces.a_later_strip_of_wide_range, Made("stash"))
