"""Files of measurements, and the plots that are made of them."""

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

import infcl_gen
from infcl_gen.bench.plots import check_plot, plot
from infcl_gen.bench.results import FIELDS, IDENTITY, absences, lost, measurement, table, write_results
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.files import checksum
from tests.bench.rows import measure_package, rows_of_several_points


def test_results_are_valid_json_and_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = infcl_gen.generate(batch_size=96, dim=16, dtype="fp64", target="cpu", output=tmp_path / "small")
    rows = [measure_package(package, repeats=1)]
    file = tmp_path / "deep" / "rows.json"
    absent, libraries = {"memeff": "memeff is not installed"}, ["torch", "click", "no-such-thing"]
    write_results(file, measurement(rows, "a command", absent, libraries))
    written = json.loads(file.read_text())
    assert written["rows"] == rows and written["schema_version"] == 1 and written["command"] == "a command"
    assert written["checksum"] == checksum(rows) and written["absent"] == {"memeff": "memeff is not installed"}
    assert written["board"] and {"torch", "triton", "click"} <= set(written["versions"])
    assert file.stat().st_mode & 0o777 == 0o644
    with pytest.raises(ValueError):
        write_results(file, measurement([{**rows[0], "median_ms": math.nan}], "another", {}))

    def fails(*_: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError):
        write_results(file, measurement([], "another", {}))
    assert json.loads(file.read_text()) == written
    assert [path.name for path in file.parent.iterdir()] == ["rows.json"]


def test_what_a_measurement_without_some_would_lose(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert lost(file, ["torch"]) == []
    file.write_text(json.dumps({"rows": [{"impl": "torch"}, {"impl": "quack"}, {"impl": "torch"}]}))
    assert lost(file, ["torch", "quack", "memeff"]) == ["quack", "torch"] and lost(file, ["memeff"]) == []


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


def timed(impl: str, package: str | None, time_ms: float, **changes: Any) -> dict[str, Any]:
    sizes = {"loss": "clip", "batch": 64, "keys": 64, "dim": 16, "dtype": "bf16", "precision": "default"}
    times = {"median_ms": time_ms, "mean_ms": time_ms, "std_ms": 0.0, "repeats": 1, "peak_bytes": 1}
    who = {"impl": impl, "package": package, "ranks": 1, "scale": 14.3}
    behind = {"queued_ms": 10 * time_ms, "queued_std_ms": 0.0}
    return dict.fromkeys(FIELDS) | sizes | who | times | behind | changes


def ratios(rows: list[dict[str, Any]]) -> list[list[str]]:
    """From an idle device, and behind other work."""
    header, lines = table(rows)
    return [[line[place] for line in lines] for place, title in enumerate(header) if title == "ratio"]


@pytest.mark.parametrize("name", IDENTITY)
def test_ratios_are_to_the_fastest_package_of_the_same_point(name: str) -> None:
    """Packages of another point, much faster or slower, change no ratio. Without a package there is none."""
    here = [timed("infcl", "slower", 3.0), timed("infcl", "faster", 2.0), timed("torch", None, 4.0)]
    for time_ms in (0.5, 50.0):
        elsewhere = [
            timed(who, None, t, **{name: "another"}) for who, t in (("infcl", time_ms), ("torch", 2 * time_ms))
        ]
        alone = [timed("torch", None, 7.0, **{name: "a third"})]
        assert ratios([*elsewhere, *here, *alone]) == [["1.00", "2.00", "1.50", "1.00", "2.00", "-"]] * 2


def test_ratios_of_a_ring_are_to_the_package_as_it_is() -> None:
    ways = {None: 4.0, "no overlap": 5.0, "no communication": 2.0}
    rows = [timed("infcl", how, time_ms, ranks=4) for how, time_ms in ways.items()]
    assert ratios([*rows, timed("open_clip", None, 8.0, ranks=4)]) == [["1.00", "1.25", "0.50", "2.00"]] * 2


def test_peers_that_did_not_run_share_a_line_for_each_reason() -> None:
    absent = {"a": "does not compute clip", "b": "b is not installed", "c": "does not compute clip"}
    assert absences(absent) == ["did not run (does not compute clip): a, c", "did not run (b is not installed): b"]
