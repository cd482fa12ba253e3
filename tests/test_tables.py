"""docs/tables.py: the tables of docs/benchmarks.md are those of the committed measurements."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.rows import rows_of_several_points
from tests.test_cli import run

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs" / "tables.py")
assert SPEC is not None and SPEC.loader is not None
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)


def test_pages_show_what_the_files_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says the command; markers that are missing count as a table that is not shown."""
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "docs" / "tables.py"), run_name="__main__")
    assert ended.value.code == 0, "run python docs/tables.py"


def test_a_page_that_shows_another_table_is_noticed_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", {page.name: ("kind",)})
    monkeypatch.setattr(tables, "tables", lambda kind: f"| {kind} | 1 |\n")
    stale = "before\n<!-- kind:begin -->\n| kind | 2 |\n<!-- kind:end -->\nafter\n"
    page.write_text(stale)
    for flags, code, digit in ((["--check"], 1, "2"), ([], 0, "1"), (["--check"], 0, "1")):
        monkeypatch.setattr(sys, "argv", ["tables.py", *flags])
        assert tables.main() == code and page.read_text() == stale.replace("2", digit)


def test_comparisons_as_tables() -> None:
    text = tables.comparisons(rows_of_several_points(), {"memeff": "memeff is not installed"})
    assert "| clip, D = 64, bf16, scale 14.3: ms (queued), MiB | 1024 | 4096 | 6000 | error of dq |" in text
    assert "| infcl | 1024.00 ± 0.50, 1024 | 4096.00 ± 0.50, 4096 |" in text and "| 2.0e-03 |" in text
    assert "| inf_cl | out of memory | 12288.00" in text
    assert "| products of infcl | 1.25 | 1.25 | 1.25 |  |" in text
    assert text.endswith("Absent: memeff (memeff is not installed).\n")
    autocast = [{**rows_of_several_points()[0], "precision": "autocast from fp32"}]
    text = tables.comparisons(autocast, {})
    assert "| clip, D = 64, bf16, autocast from fp32, scale 14.3: ms (queued), MiB | 1024 |" in text
    ring = {**rows_of_several_points()[0], "ranks": 4, "transport": "ring", "predicted_peak_bytes": 5 * 10**8}
    text = tables.comparisons([{**ring, "budget_bytes": 69 * 10**7}], {})
    assert "| infcl, by ring, 690 MB, 4 GPUs |" in text
    text = tables.comparisons([{**ring, "budget_bytes": 5 * 10**8}], {})
    assert "| infcl, by ring, 4 GPUs |" in text
    behind = [{**rows_of_several_points()[0], "queued_ms": 1000.25, "queued_floor_ms": 1.125}]
    text = tables.comparisons(behind, {})
    assert "| infcl | 1024.00 ± 0.50 (1000.25), 1024 |" in text and "| 1.25 (1.12) |" in text


def test_steps_that_failed_say_why() -> None:
    row: dict[str, Any] = {"model": "ViT-B-32", "batch": 32768, "ranks": 1, "way": "planned", "std_ms": 2.0}
    row["error"] = None
    predicted = {"predicted_ms": 8577.0, "predicted_peak_bytes": 2**30, "memory_bytes": 2**31, "micro_batch": 512}
    rows = [{**row, **predicted, "median_ms": 8590.0, "peak_bytes": 2**30}]
    for error, peak_bytes in (("out of memory: 1 GiB", 2**31), ("absent: no module", 0)):
        rows.append({**row, "median_ms": None, "std_ms": None, "peak_bytes": peak_bytes, "error": error})
    lines = tables.training_steps(rows).splitlines()[-3:]
    assert lines[0] == "| ViT-B-32 | 32,768 | 1 | planned by 512 | 2 GiB | 8,590 | 2 | 1,024 | 8,577 | 1,024 |"
    assert [line.partition(" planned ")[2] for line in lines[1:]] == [
        "|  | out of memory |  | 2,048 |  |  |",
        "|  | absent |  |  |  |  |",
    ]


def test_peers_beside_the_fastest_package() -> None:
    point: dict[str, Any] = {"batch": 65536, "dim": 768, "error": None, "scale": 14.3}
    times = {"infcl": 10.0, "slow": 24.0, "slower": 30.0}
    rows = [{**point, "impl": impl, "queued_ms": time_ms} for impl, time_ms in times.items()]
    rows += [{**point, "impl": "infcl", "queued_ms": 8.0}, {**rows[1], "batch": 1024, "queued_ms": 1.0}]
    assert tables.beside_peers(rows).endswith("fastest package (8.0 ms): slow 3.0, slower 3.8.\n")


@pytest.mark.parametrize(("model", "inputs"), [("vit_l_14", "device"), ("vit_l_14", "host"), ("vit_b_16", "device")])
def test_the_steps_of_the_paper_are_what_the_command_plans(model: str, inputs: str) -> None:
    """Up to the loss, which the command plans for the profile's device."""
    flags = f"--profile {model}-h200 --devices 8 --memory-budget 80GB --inputs {inputs} --treatments cached"
    plan = json.loads(run("step", *flags.split(), "--micro-batch", "128", "--json").stdout)["plan"]
    shown = tables.paper_step(model, 8, inputs, None)
    assert 8 * shown.towers[0].samples == pytest.approx(plan["largest_batch"], rel=0.01)
    assert shown.peak_bytes == pytest.approx(80e9, rel=1e-4) and shown.peak_bytes <= tables.PAPER_MEMORY


def test_a_row_with_a_frozen_side_stands_by_itself() -> None:
    """Planted: its figures replace those of the whole."""
    whole = next(row for row in rows_of_several_points() if row["impl"] == "infcl" and row["batch"] == 4096)
    frozen = {**whole, "frozen": "key", "median_ms": 7.0}
    text = tables.comparisons([whole, frozen], {})
    assert "| infcl | 4096.00 ± 0.50, 4096 |" in text and "| infcl, frozen key | 7.00 ± 0.50, 4096 |" in text
