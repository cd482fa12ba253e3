"""A kernel passes ahead-of-time checks within the board's shared memory, without spills and without races."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import infcl_gen
from infcl_gen.verification import aot

FITS = aot.Resources("forward", "sm_90", 232448, 255, 0, ())


@pytest.mark.parametrize(
    ("change", "passed", "words"),
    [
        ({}, True, "shared 232448 of 232448 B, 255 registers, 0 B spilled"),
        ({"shared_bytes": 232449}, False, "shared 232449 of 232448 B"),
        ({"spill_bytes": 4}, False, "4 B spilled"),
        ({"faults": ("PTX line 1 overwrites",)}, False, r"PTX line 1 overwrites \(1 in all\)"),
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


def test_an_argument_that_kernels_of_this_version_do_not_have_is_named(tmp_path: Path) -> None:
    kernels = aot.Kernels(infcl_gen.generate(output=tmp_path / "p", batch_size=1024, dim=64, device_profile="h200"))
    family, declared = kernels._declared["forward"]
    arguments = tuple(each for each in declared.arguments if each.name != "scale_ptr")
    kernels._declared["forward"] = family, dataclasses.replace(declared, arguments=arguments)
    row = aot._row(kernels, "forward", "sm_90")
    assert not row["passed"]
    assert row["detail"].endswith(": forward takes scale_ptr, which kernels of this version do not; generate it again")
