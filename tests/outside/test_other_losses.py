"""Other libraries' losses as oracles; who is not installed is skipped by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.outside.other_losses import ALLOWED, COMPARISONS, OUTPUT, Comparison, Given, compare, errors_of, wrong


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFCL_GEN_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("one", COMPARISONS, ids=lambda one: one.name)
def test_same_value_and_gradients(one: Comparison) -> None:
    if why := one.absent():
        pytest.skip(why)
    for (_, dtype), errors in errors_of([one]).items():
        assert not wrong(one, dtype, errors)


def dense(given: Given) -> Any:
    """siglip in torch, in place of a library."""
    import torch

    q, k = given.unit
    x = given.scale * q @ k.T + given.bias
    return torch.nn.functional.softplus(torch.where(torch.eye(len(x), dtype=torch.bool), -x, x)).sum() / len(x)


DENSE = Comparison("torch", "torch", "dense()", "siglip", dense)


def test_what_differs_is_noticed() -> None:
    for dtype in ALLOWED:
        assert not wrong(DENSE, dtype, compare(DENSE, dtype))
    more = dataclasses.replace(DENSE, theirs=lambda given: 1.0001 * dense(given))
    assert [line.partition(":")[0] for line in wrong(more, "fp32", compare(more, "fp32"))] == [
        "loss", "dq", "dk", "dscale", "dbias"
    ]  # fmt: skip

    def without_bias(given: Given) -> Any:
        given.bias = given.bias.detach()
        return dense(given)

    fixed = dataclasses.replace(DENSE, theirs=without_bias)
    assert wrong(fixed, "fp32", compare(fixed, "fp32")) == ["dbias: no gradient"]


def test_what_is_not_installed_is_named() -> None:
    nobody = dataclasses.replace(DENSE, distribution="no-such-library", module="no_such_module.losses")
    assert nobody.absent() == "no-such-library is not installed"
    broken = dataclasses.replace(DENSE, module="torch.no_such_module")
    assert broken.absent() == "torch cannot be imported: No module named 'torch.no_such_module'"


def test_the_committed_file_has_all_of_them() -> None:
    results = json.loads(OUTPUT.read_text())
    shown = [
        (row["impl"], row["call"], row["loss"], row["ranks"], row["keys"], row["dtype"]) for row in results["rows"]
    ]
    assert len(set(shown)) == len(shown) == len(COMPARISONS) * len(ALLOWED) and not results["absent"]
    assert {one.call for one in COMPARISONS} == {row["call"] for row in results["rows"]}
    assert not any(row["error"] for row in results["rows"])
