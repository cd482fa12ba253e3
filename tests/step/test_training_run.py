"""A training run by micro-batches against the same run by whole batches: CLIP on handwritten digits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiers import LONG

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"


@pytest.fixture(scope="module")
def digits() -> Any:
    specification = importlib.util.spec_from_file_location("digits", EXAMPLE)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_losses_of_all_steps_are_equal_in_fp64(digits: Any) -> None:
    """In CI of 30 steps, in the nightly tier of 300."""
    steps = 300 if LONG else 30
    flags = {"batch_size": 160, "dtype": torch.float64, "adam": False, "steps": steps}
    losses, right = digits.train(micro_batch=64, **flags)
    true, right_of_whole = digits.train(micro_batch=0, **flags)
    assert len(losses) == steps and losses[-1] < losses[0] - steps / 600
    assert max(abs(a - b) for a, b in zip(losses, true, strict=True)) < 1e-8
    assert right == right_of_whole


@pytest.mark.long
def test_accuracy_in_fp32_is_within_the_spread_of_seeds(digits: Any) -> None:
    of_whole = [digits.train(batch_size=256, micro_batch=0, seed=seed)[1] for seed in range(3)]
    right = digits.train(batch_size=256, micro_batch=64, seed=0)[1]
    assert min(of_whole) > 0.85 and abs(right - of_whole[0]) <= max(of_whole) - min(of_whole)
