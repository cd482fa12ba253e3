"""A kernel passes ahead-of-time checks within the board's shared memory, without spills and without races."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from infcl_gen.verification import aot

FITS = aot.Resources("forward", "sm_90", 232448, 255, 0, ())


@pytest.mark.parametrize(
    ("change", "passed", "words"),
    [
        ({}, True, "shared 232448 of 232448 B, 255 registers, 0 B spilled"),
        ({"shared_bytes": 232449}, False, "shared 232449 of 232448 B"),
        ({"spill_bytes": 4}, False, "4 B spilled"),
        ({"races": ("PTX line 1 overwrites",)}, False, r"PTX line 1 overwrites \(1 such pairs\)"),
    ],
)
def test_one_bad_variant_fails_a_kernel(change: dict[str, object], passed: bool, words: str) -> None:
    """The other variants are right; the row tells of the worst."""
    found = iter([FITS, aot.Resources(**(vars(FITS) | change)), FITS])  # type: ignore[arg-type]
    ways = ["whole", "ragged", "other"]
    kernels: Any = SimpleNamespace(variants=lambda *_: ways, compiled=lambda *_: next(found))
    row = aot._row(kernels, "forward", "sm_90")
    assert row["check"] == "aot sm_90 forward" and row["passed"] == passed
    assert re.search(words, row["detail"])
