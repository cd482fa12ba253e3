"""docs/conventions.py: the factors and errors in the gradients of several libraries, for docs/gradients.md."""

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from infcl_gen.processes import run_ranks

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("conventions", ROOT / "docs" / "conventions.py")
assert SPEC is not None and SPEC.loader is not None
conventions = importlib.util.module_from_spec(SPEC)
sys.modules["conventions"] = conventions  # dataclasses look their module up
SPEC.loader.exec_module(conventions)
OURS = [one for one in conventions.CONTESTANTS if one.module == "infcl_gen"]


def test_a_file_is_left_as_it_is_where_contestants_of_it_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = conventions.CONTESTANTS[-1]
    monkeypatch.setattr(conventions, "OUTPUT", tmp_path / "conventions.json")
    monkeypatch.setattr(conventions, "CONTESTANTS", [dataclasses.replace(absent, module="no_such_library")])
    conventions.OUTPUT.write_text(held := json.dumps({"rows": [{"impl": absent.distribution}]}))
    assert conventions.main() == 4 and conventions.OUTPUT.read_text() == held
    assert f"is left as it is: install {absent.distribution}" in capsys.readouterr().err


def test_a_factor_and_another_direction_are_told_apart() -> None:
    """Two ranks that return the true gradients times a factor, or without one side."""
    given = [conventions.leaves(rank) for rank in range(2)]
    q, k = (torch.cat([normalize(each[side]) for each in given]) for side in (0, 1))
    scale = given[0][2]
    loss = conventions.DENSE["clip"](q, k, scale)
    loss.backward()

    def results(factor: float, keys: float) -> list[dict[str, Any]]:
        return [
            {
                "value": (1 + sign / 2) * loss.item(), "q": (2 * factor * each[0].grad).tolist(),
                "k": (2 * factor * keys * each[1].grad).tolist(), "scale": 3 * scale.grad.item(),
            } for sign, each in zip((1, -1), given, strict=True)
        ]  # fmt: skip

    row = conventions.rows_of(OURS[0], 2, results(0.5, 1.0))
    assert row["features"]["ratio"] == pytest.approx(0.5) and row["features"]["error"] < 1e-12
    assert row["dscale"]["ratio"] == pytest.approx(3.0) and row["values"] == pytest.approx([1.5, 0.5])
    assert conventions.rows_of(OURS[0], 2, results(0.5, 0.0))["features"]["error"] > 0.1
    row = conventions.rows_of(OURS[0], 2, [{"failed": "no"}, {"failed": "no"}])
    assert row["error"] == "no" and row["features"] is None


@pytest.mark.usefixtures("forked")
def test_this_projects_gradients_are_exact_on_two_ranks() -> None:
    path = os.pathsep.join([str(ROOT / "docs"), str(ROOT)])
    results = run_ranks("conventions:measure_rank", ["infcl_gen"], 2, 120.0, {"PYTHONPATH": path})
    for one, found in zip(OURS, zip(*results, strict=True), strict=True):
        row = conventions.rows_of(one, 2, list(found))
        assert row["error"] is None
        for figure in (row["features"], row["dscale"]):
            assert figure["ratio"] == pytest.approx(1.0, abs=1e-10) and figure["error"] < 1e-10


def test_the_committed_file_has_all_of_them() -> None:
    results = json.loads(conventions.OUTPUT.read_text())
    shown = {(row["impl"], row["call"], row["ranks"]) for row in results["rows"]}
    here = [one for one in conventions.CONTESTANTS if one.distribution not in results["absent"]]
    assert shown == {(one.distribution, one.call, ranks) for one in here for ranks in conventions.RANKS}
