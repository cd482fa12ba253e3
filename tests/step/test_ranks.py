"""Planned steps on several ranks, under DDP and FSDP2: the gradients of the whole batch, and one synchronisation."""

from __future__ import annotations

from pathlib import Path

import pytest

from infcl_gen.processes import run_ranks

pytestmark = pytest.mark.usefixtures("forked")
CASES = [
    ("ddp", (7,), "mixture"),
    ("ddp", (7, 7), "cached"),
    ("ddp", (12, 5), "mixture"),
    ("ddp", (4, 0, 9), "mixture"),
    ("fsdp", (7,), "cached"),
    ("fsdp", (8, 8), "mixture"),
    ("fsdp", (8, 8), "checkpointed"),
    ("fsdp", (6, 6, 6), "cached"),
]


@pytest.mark.parametrize(("wrapper", "rows", "way"), CASES)
def test_gradients_are_those_of_the_whole_batch(wrapper: str, rows: tuple[int, ...], way: str, tmp_path: Path) -> None:
    job = {"wrapper": wrapper, "rows": list(rows), "way": way, "cache": str(tmp_path)}
    for answer in run_ranks("tests.step.ranks:step", job, len(rows), 120.0):
        assert max(answer["errors"]) < 1e-12 and max(answer["values"]) < 1e-12, answer
        assert answer["reductions"] == (len(rows) > 1) * (6 if wrapper == "fsdp" else 1)  # 5 blocks and the rest
