"""The scripts of tune/ that need no GPU to be tried."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infcl_gen.errors import InputError
from tests.tuning.rows import assert_is_row
from tests.tuning.scripts import script


def test_errors_under_autocast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package's gradients are those of fp32 accumulators; whatever goes through bf16 products is rounded to bf16."""

    def clip_loss(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        logits, labels = scale * q @ k.T, torch.arange(len(q))
        cross_entropy = torch.nn.functional.cross_entropy
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    module = script("gradient_errors")
    monkeypatch.setattr(module, "open_clip_loss", lambda: SimpleNamespace(ClipLoss=lambda: clip_loss))
    output = tmp_path / "autocast.json"
    words = ["--batches", "128", "--dim", "64", "--target", "cpu", "-o", str(output)]
    monkeypatch.setattr(sys, "argv", ["gradient_errors", *words])
    assert module.main() == 0 and "open_clip" in capsys.readouterr().out
    rows = json.loads(output.read_text())["rows"]
    assert [(row["impl"], row["scale"]) for row in rows] == [
        (name, scale) for scale in (14.3, 100.0) for name in ("infcl", "open_clip")
    ]
    for ours, theirs in (rows[:2], rows[2:]):
        assert ours["err"]["dq"] < 1e-5 and 1e-3 < theirs["err"]["dq"] < 0.1
    assert "| clip | 128 | 64 | 100.0 | open_clip" in script("readme_figures").accuracies(rows)


def test_the_grid_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "grid.json"

    def grid(*flags: str) -> str:
        words = ["--dims", "16", "--dtype", "fp32", "--target", "cpu", "--against", "torch", "--repeats", "3"]
        words += ["--others", "torch-checkpoint", "-o", str(output), *flags]
        monkeypatch.setattr(sys, "argv", ["speed_grid.py", *words])
        assert script("speed_grid").main() == 0
        return capsys.readouterr().out

    assert "1 points left: run it again" in grid("--batches", "64", "--minutes", "0", "--others-at", "64:16")
    assert not output.exists()
    assert "3 rows" in grid("--batches", "64", "--others-at", "64:16")
    first = json.loads(output.read_text())["rows"]
    assert [row["impl"] for row in first] == ["infcl", "torch", "torch-checkpoint"]
    grid("--batches", "64,80", "--others-at", "80:32")
    rows = json.loads(output.read_text())["rows"]
    assert rows[:3] == first and [(row["impl"], row["batch"]) for row in rows[3:]] == [
        ("infcl", 80),
        ("torch", 80),
    ]
    for row in rows:
        assert_is_row(row)
    # Of features under autocast a point is another one: neither taken for measured, nor in the other's place.
    narrow = ("--batches", "64", "--others-at", "", "--dtype", "bf16")
    grid(*narrow)
    grid(*narrow, "--features", "fp32")
    of_64 = [row for row in json.loads(output.read_text())["rows"] if row["dtype"] == "bf16"]
    assert [row["precision"] for row in of_64] == ["default"] * 2 + ["autocast from fp32"] * 2
    monkeypatch.setattr("infcl_gen.tuning.results.board", lambda: "another board")
    with pytest.raises(InputError, match="another board"):
        grid("--batches", "96")
