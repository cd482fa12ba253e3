"""Gradients of own numbers of queries and keys in the numerics gate: true ones pass, and wrong ones are noticed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from infcl_gen.verification.oracle import NUMBERS
from infcl_gen.verification.properties import check_case, random_cases
from infcl_gen.verification.verify import run

from .pool import Packages

LOSSES = {
    "weighted": {"query_weight"},
    "weighed_sides_ids": {"query_weight", "key_weight"},
    "hard": {"query_weight", "negatives"},
    "tempered_hard": {"query_weight", "negatives", "query_scale"},
    "tempered_infonce": {"query_scale", "key_scale"},
    "tempered_siglip": {"query_scale"},
}


def failing(module: ModuleType) -> tuple[set[str], set[str]]:
    """What the gate compares of own numbers over some inputs, and what fails of all."""
    compared, failed = set[str](), set[str]()
    for case in random_cases(module, 14):
        if case.seed % 2:
            rows = check_case(module, case)
            compared |= {row.quantity for row in rows} & {f"d{name}" for name in NUMBERS}
            failed |= {row.quantity for row in rows if not row.passed}
    return compared, failed


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", LOSSES)
def test_true_gradients_pass(packages: Packages, loss: str, dtype: str) -> None:
    """Also of features that numbers multiply, at a scale of 1 000, where their rounding moves logits by more than 1."""
    compared, failed = failing(packages(loss, dtype))
    assert not failed and compared >= {f"d{name}" for name in LOSSES[loss]}


PLANTED = [(loss, name, "fp32") for loss, names in LOSSES.items() for name in sorted(names)]


@pytest.mark.parametrize(("loss", "name", "dtype"), [*PLANTED, ("hard", "negatives", "bf16")])
def test_a_wrong_gradient_is_noticed(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, loss: str, name: str, dtype: str
) -> None:
    """Planted: one that is 2 % too large, while the value stays."""
    module = packages(loss, dtype)
    whole = module.contrastive_loss

    def wrong(*arguments: Any, **given: Any) -> torch.Tensor:
        x = given[name]
        value: torch.Tensor = whole(*arguments, **{**given, name: x + 0.02 * (x - x.detach())})
        return value

    monkeypatch.setattr(module, "contrastive_loss", wrong)
    assert failing(module)[1] == {f"d{name}"}


def test_a_gradient_that_stays_away_is_noticed(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a weight that is a constant of the call."""
    module = packages("weighted")
    whole = module.contrastive_loss

    def wrong(*arguments: Any, **given: Any) -> torch.Tensor:
        x = given["query_weight"]
        value: torch.Tensor = whole(*arguments, **{**given, "query_weight": x.detach() + 0 * x})
        return value

    monkeypatch.setattr(module, "contrastive_loss", wrong)
    assert failing(module)[1] == {"dquery_weight"}


@pytest.mark.parametrize(("frozen", "left"), [("query", {"dkey_scale"}), ("key", {"dquery_scale"})])
def test_scales_of_a_frozen_side_have_no_gradient(packages: Packages, frozen: str, left: set[str]) -> None:
    assert failing(packages("tempered_infonce", frozen=frozen)) == (left, set())


FolderOf = Callable[[ModuleType], Path]


@pytest.mark.parametrize("loss", ["tempered_hard", "weighed_sides_ids"])
def test_true_gradients_pass_over_ranks(packages: Packages, folder_of: FolderOf, loss: str) -> None:
    (row,) = run("ring", folder_of(packages(loss)), "cpu", 8, 2)
    assert row["passed"], row["detail"]


def test_a_wrong_gradient_is_noticed_over_ranks(packages: Packages, folder_of: FolderOf, tmp_path: Path) -> None:
    """Planted: a scale's gradient that is 2 % too large."""
    folder = shutil.copytree(folder_of(packages("tempered_infonce")), tmp_path / "planted")
    file = folder / "_runtime" / "scaled.py"
    right = "return of_x, row_dots(x, upstream, numbers.dtype) if"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, right.replace("row_dots", "1.02 * row_dots")))
    (row,) = run("ring", folder, "cpu", 8, 2, edited=True)
    assert not row["passed"] and "dquery_scale" in row["detail"]
