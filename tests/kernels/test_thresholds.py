"""What small problems do not reach by themselves: long strips, many partial sums, the edges of a tile's range."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels import checks
from tests.kernels.packages import Made, module
from tests.kernels.worker import Interpreter

EXACT = Made("panel", dtype="fp32", dim=72, precision="exact")


@pytest.mark.parametrize("made", [Made("panel"), Made("fused"), EXACT], ids=["panel", "fused", "exact"])
def test_strips_of_several_row_blocks(interpreted: Interpreter, made: Made) -> None:
    """Planted: a strip that ends a row block early; the first strip for the column of every positive."""
    interpreted(checks.long_strips, made)


@pytest.mark.parametrize("made", [Made("panel"), Made("fused", "infonce", "fp16")], ids=["panel", "fused"])
def test_more_partial_sums_than_are_added_at_a_time(interpreted: Interpreter, made: Made) -> None:
    """Planted: loops over parts that end after the first chunk."""
    interpreted(checks.many_parts, made)


@pytest.mark.parametrize("strategy", ["panel", "fused"])
def test_sums_that_are_computed_again(interpreted: Interpreter, strategy: str) -> None:
    """Planted: SMALLEST_SUM = 2^-125, LARGEST_SUM = 2^127."""
    interpreted(checks.flagged_sums, Made(strategy))


@pytest.mark.parametrize("strategy", ["panel", "fused"])
def test_gradients_that_are_computed_again(interpreted: Interpreter, strategy: str) -> None:
    """Planted: SPREAD = 125."""
    interpreted(checks.flagged_gradients, Made(strategy))


@pytest.mark.parametrize(
    "made",
    [Made("panel", "gist"), Made("panel", "gist", "fp32"), Made("panel", "near_rows")],
    ids=["bf16", "fp32", "rows in pairs"],
)
def test_ties_of_a_guide(interpreted: Interpreter, made: Made) -> None:
    """Planted: `>=` for `>` in a tile."""
    interpreted(checks.ties_of_thresholds, made)


def test_ties_of_the_cpu_target() -> None:
    """Planted: torch.ge for torch.gt."""
    checks.ties_of_thresholds(Made("torch", "gist", "fp32"))
    checks.ties_of_thresholds(Made("torch", "near_rows", "fp32"))


def test_sums_of_the_cpu_target() -> None:
    """Planted: sums of dscale in fp32; a panel of -inf alone whose reference is -inf."""
    checks.many_parts(Made("torch", dtype="fp32"))
    package = module(Made("torch", dtype="fp32"))
    schedule, statistics = package._schedule, package._runtime.statistics
    acc, dots = torch.tensor([[2.0**40], [1.0], [-(2.0**40)]]).expand(3, 16).contiguous(), torch.zeros(1)
    one, zero = torch.ones(()), torch.zeros(())
    schedule.finish(acc, torch.ones(3, 16), one, zero, one, 1.0, acc, dots)
    assert float(dots) == 16.0
    sums = statistics.view(torch.zeros(2, 2))
    panel = torch.tensor([[-math.inf, -math.inf], [-math.inf, 0.0]])
    schedule.add_(sums, panel, torch.empty_like(panel), 1)
    assert sums.mantissa.tolist() == [0.0, 1.0]
    schedule.add_(sums, torch.zeros(2, 2), torch.empty(2, 2), 1)
    assert statistics.log(sums).exp().tolist() == pytest.approx([2.0, 3.0])
