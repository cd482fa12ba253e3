"""Files of measurements, and what is made of them: plots, and the tables of the README."""

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

import infcl_gen
from infcl_gen.bench import figures
from infcl_gen.bench.plots import check_plot, plot
from infcl_gen.bench.point import measure_package
from infcl_gen.bench.results import write_results
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.files import checksum
from tests.bench.rows import rows_of_several_points


def test_results_are_valid_json_and_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = infcl_gen.generate(batch_size=96, dim=16, dtype="fp64", target="cpu", output=tmp_path / "small")
    rows = [measure_package(package, repeats=1)]
    file = tmp_path / "deep" / "rows.json"
    write_results(file, rows, "a command", {"memeff": "memeff is not installed"}, ["torch", "click", "no-such-thing"])
    written = json.loads(file.read_text())
    assert written["rows"] == rows and written["schema_version"] == 1 and written["command"] == "a command"
    assert written["checksum"] == checksum(rows) and written["absent"] == {"memeff": "memeff is not installed"}
    assert written["board"] and {"torch", "triton", "click"} <= set(written["versions"])
    assert file.stat().st_mode & 0o777 == 0o644
    with pytest.raises(ValueError):
        write_results(file, [{**rows[0], "median_ms": math.nan}], "another")

    def fails(*_: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError):
        write_results(file, [], "another")
    assert json.loads(file.read_text()) == written
    assert [path.name for path in file.parent.iterdir()] == ["rows.json"]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_plots(tmp_path: Path) -> None:
    svg, png = tmp_path / "new" / "p.svg", tmp_path / "p.png"
    for path in (svg, png):
        check_plot(path)
        plot(rows_of_several_points(), path, "a <title>")
    text = svg.read_text()
    assert text.startswith("<?xml") and text.rstrip().endswith("</svg>") and "<dc:date>" not in text
    for part in (
        "a &lt;title&gt;",
        "clip, D = 64, bf16",
        "clip, D = 128, bf16",
        ">4k<",
        ">6000<",
        ">infcl<",
        ">inf_cl<",
    ):
        assert part in text.replace("<!-- ", ">").replace(" -->", "<"), part
    assert png.read_bytes().startswith(b"\x89PNG")
    plot(rows_of_several_points(), tmp_path / "again.svg", "a <title>")
    assert (tmp_path / "again.svg").read_bytes() == svg.read_bytes()
    plot([], tmp_path / "empty.svg", "nothing")  # every contestant failed
    assert not [path for path in tmp_path.rglob(".*")]


def test_plots_that_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^--plot: .*\.svg"):
        check_plot(Path("plot.gif"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    with pytest.raises(ToolchainError, match="matplotlib"):
        check_plot(Path("plot.svg"))


def test_comparisons_as_tables_of_the_readme() -> None:
    text = figures.comparisons(rows_of_several_points(), {"memeff": "memeff is not installed"})
    assert "| clip, D = 64, bf16, scale 14.3: ms (queued), MiB | 1024 | 4096 | 6000 | error of dq |" in text
    assert "| infcl | 1024.00 ± 0.50, 1024 | 4096.00 ± 0.50, 4096 |" in text and "| 2.0e-03 |" in text
    assert "| inf_cl | out of memory | 12288.00" in text
    assert "| products of infcl | 1.25 | 1.25 | 1.25 |  |" in text
    assert text.endswith("Absent: memeff (memeff is not installed).\n")
    autocast = [{**rows_of_several_points()[0], "precision": "autocast from fp32"}]
    text = figures.comparisons(autocast, {})
    assert "| clip, D = 64, bf16, autocast from fp32, scale 14.3: ms (queued), MiB | 1024 |" in text
    ring = {**rows_of_several_points()[0], "ranks": 4, "transport": "ring", "predicted_peak_bytes": 5 * 10**8}
    text = figures.comparisons([{**ring, "budget_bytes": 69 * 10**7}], {})
    assert "| infcl, by ring, 690 MB, 4 GPUs |" in text
    text = figures.comparisons([{**ring, "budget_bytes": 5 * 10**8}], {})
    assert "| infcl, by ring, 4 GPUs |" in text
    behind = [{**rows_of_several_points()[0], "queued_ms": 1000.25, "queued_floor_ms": 1.125}]
    text = figures.comparisons(behind, {})
    assert "| infcl | 1024.00 ± 0.50 (1000.25), 1024 |" in text and "| 1.25 (1.12) |" in text


def test_peers_beside_the_fastest_package() -> None:
    point: dict[str, Any] = {"batch": 65536, "dim": 768, "error": None, "scale": 14.3}
    times = {"infcl": 10.0, "slow": 24.0, "slower": 30.0}
    rows = [{**point, "impl": impl, "queued_ms": time_ms} for impl, time_ms in times.items()]
    rows += [{**point, "impl": "infcl", "queued_ms": 8.0}, {**rows[1], "batch": 1024, "queued_ms": 1.0}]
    assert figures.beside_peers(rows).endswith("fastest package (8.0 ms): slow 3.0, slower 3.8.\n")
