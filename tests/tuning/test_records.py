"""Tuning records: written whole, found by their key, and a miss explains itself. Nothing here is timed."""

import dataclasses
import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infcl_gen import cli
from infcl_gen.emission import build, plan_problem, read_package, rerender, write_package
from infcl_gen.emission.pipeline import find_record, work_digest
from infcl_gen.errors import InputError
from infcl_gen.hardware import resolve_cluster
from infcl_gen.losses import load_loss
from infcl_gen.planning import records, strategies
from infcl_gen.planning.records import Candidate, Found, Key, Missing, Record, read_records, store
from infcl_gen.problem import Problem, make_problem

ROOT = Path(__file__).resolve().parent.parent.parent
# By name: `infcl_gen.emission` has functions that are called alike.
lower, render = (importlib.import_module(f"infcl_gen.emission.{name}") for name in ("lower", "render"))
SETTINGS = (("gradient.stages", "2"), ("products", "triton"))


def h200(**flags: Any) -> Problem:
    return make_problem(
        **{
            "batch_size": "16k", "dim": 768, "device_profile": "h200", "memory_budget": "1GiB",
            "set": {"strategy": "panel"}, **flags,
        }
    )  # fmt: skip


def key_of(problem: Problem) -> Key:
    return records.record_key(problem, load_loss(problem.loss), resolve_cluster(problem))


def work_of(problem: Problem, settings: records.Settings = SETTINGS) -> str:
    problem = dataclasses.replace(problem, settings=records.measured_settings(problem.settings, settings))
    return work_digest(problem, load_loss(problem.loss), resolve_cluster(problem))


def record_of(problem: Problem, settings: records.Settings = SETTINGS, **changes: Any) -> Record:
    candidate = Candidate("gradient", settings, "timed", "", 1.5, (1.0, 1.25))
    work = changes.pop("work", None) or work_of(problem, settings)
    record = Record(
        key_of(problem), settings, "d" * 64, work, True, ("gradient",), {"torch": "2.11"}, (candidate,)
    )
    return dataclasses.replace(record, **changes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that stands where the committed records are."""
    committed = tmp_path / "records"
    monkeypatch.setattr(records, "record_folders", lambda: (tmp_path / "users", committed))
    return committed


def reason(problem: Problem) -> str:
    found = find_record(problem)
    assert isinstance(found, Missing)
    assert len(found.reason.splitlines()) == 1
    return found.reason


def test_a_record_is_read_as_it_was_written(folder: Path) -> None:
    first, second = record_of(h200()), record_of(h200(dim=512))
    file = store(first, folder)
    assert store(second, folder) == file == folder / "h200.json"
    replaced = dataclasses.replace(first, settings=())
    store(replaced, folder)
    assert set(map(repr, read_records(file))) == {repr(replaced), repr(second)}
    assert [path.name for path in folder.iterdir()] == ["h200.json"]
    assert json.loads(file.read_text())["schema_version"] == 2


def test_a_record_that_fits_gives_its_settings_and_the_reasons_say_so(folder: Path, tmp_path: Path) -> None:
    store(record_of(h200()), folder)
    assert isinstance(find_record(h200()), Found)
    plan, _ = plan_problem(h200())
    assert plan.products == "triton" and plan.blocks["gradient"].stages == 2
    assert plan.problem.settings == tuple(sorted((*SETTINGS, ("records", "measured"), ("strategy", "panel"))))
    level3 = [reason for reason in plan.reasons if reason.level == 3]
    assert level3 and all(reason.why.startswith("measured on h200") for reason in level3)
    files = build(h200())
    assert files == build(h200()) != build(h200(set={"strategy": "panel", "records": "off"}))
    package = write_package(files, tmp_path / "package")
    (folder / "h200.json").unlink()  # from its SPEC alone
    assert rerender(package) == read_package(package).files


def test_the_users_records_come_first(folder: Path, tmp_path: Path) -> None:
    store(record_of(h200()), folder)
    store(record_of(h200(), (("gradient.stages", "4"),)), tmp_path / "users")
    assert plan_problem(h200())[0].blocks["gradient"].stages == 4


def test_a_miss_says_what_differs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert reason(h200()) == "no problem has been tuned on h200"
    store(record_of(h200()), folder)
    store(record_of(h200(dtype="fp16", dim=512, batch_size="8k")), folder)
    near = reason(h200(batch_size="32k"))
    assert near == "no record on h200 fits; in the nearest: batch_size is 32768, there 16384"
    assert "memory_budget_bytes is None, there 1073741824" in reason(h200(memory_budget="auto"))
    assert "settings is ()" in reason(h200(set={}))
    assert "loss is 'infonce'" in reason(h200(loss="infonce"))
    assert reason(h200(device_profile="a100")) == "no problem has been tuned on a100"
    assert "sets gradient.warps itself" in reason(h200(set={"gradient.warps": 8}))
    assert "--set records=off" in reason(h200(set={"strategy": "panel", "records": "off"}))
    with caplog.at_level(logging.INFO, "infcl_gen"):
        build(h200(batch_size="32k"))
    assert near in caplog.text


def test_a_stale_record_is_explained_and_not_used(folder: Path) -> None:
    by_model = build(h200())
    store(record_of(h200(), work="0" * 16), folder)
    assert "stale" in reason(h200()) and "0000" in reason(h200())
    assert build(h200()) == by_model
    flags = ("--batch-size", "16k", "--dim", "768", "--device-profile", "h200", "--memory-budget", "1GiB")
    done = CliRunner().invoke(cli.main, ["plan", *flags, "--set", "strategy=panel"])
    assert done.exit_code == 0 and "no measured settings: the record in h200.json is stale" in done.stdout


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of what packages are made of: the folders `runtime` and `templates`."""
    for name, folder in (("runtime", lower.RUNTIME_FOLDER), ("templates", render.template_folder())):
        shutil.copytree(folder, tmp_path / name)
    for module in (lower, render):
        monkeypatch.setattr(module, "RUNTIME_FOLDER", tmp_path / "runtime")
    monkeypatch.setattr(render, "template_folder", lambda: tmp_path / "templates")
    render._environment.cache_clear()
    yield tmp_path
    render._environment.cache_clear()


def appended(file: Path) -> None:
    """Code, not a comment: a schedule is digested without its comments."""
    file.write_text(file.read_text() + "\n\ndef another():\n    pass\n")


def test_a_record_outlives_changes_of_the_hosts_code(folder: Path, sources: Path) -> None:
    store(record_of(h200()), folder)
    before = build(h200())
    appended(sources / "runtime" / "engine.py")
    appended(sources / "templates" / "triton" / "schedule.py.jinja")
    assert isinstance(find_record(h200()), Found) and build(h200()) != before


@pytest.mark.parametrize("change", ["kernel", "launch", "panel", "programs", "strips"])
def test_a_record_of_other_work_of_the_device_is_stale(
    folder: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    problem = h200(set={"strategy": "panel", "products": "triton"})
    store(record_of(problem, ()), folder)
    assert isinstance(find_record(problem), Found)
    if change == "kernel":
        appended(sources / "templates" / "triton" / "gradient.py.jinja")
    elif change == "launch":
        monkeypatch.setitem(lower.KERNEL_FAMILIES["statistics"], "merge", 8)
    elif change == "panel":
        monkeypatch.setattr(strategies, "PANEL_CAP", 4096)
    elif change == "programs":
        resident = lower.resident_programs
        monkeypatch.setattr(lower, "resident_programs", lambda *given: 2 * resident(*given))
    else:
        appended(sources / "runtime" / "strips.py")
    assert "is stale: what the device does has changed" in reason(problem)


def test_without_kernels_a_record_is_of_the_sweep(folder: Path, sources: Path) -> None:
    problem = make_problem(batch_size="4k", dim=64, target="cpu")
    record = record_of(problem, (("panel_rows", "128"), ("panel_keys", "128")))
    store(record, folder)
    appended(sources / "runtime" / "engine.py")
    assert isinstance(find_record(problem), Found)
    appended(sources / "runtime" / "statistics.py")
    assert "is stale" in reason(problem)
    store(record_of(problem, record.settings), folder)
    assert isinstance(find_record(problem), Found)
    appended(sources / "templates" / "torch" / "schedule.py.jinja")
    assert "is stale" in reason(problem)


def test_a_record_that_is_illegal_today_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    by_model = build(h200())
    store(record_of(h200(), (("gradient.rows", "8192"),), work="0" * 16), folder)
    with caplog.at_level(logging.INFO, "infcl_gen"):
        assert build(h200()) == by_model
    assert "does not give a plan any more" in caplog.text and "gradient.rows" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "edited", "schema", "list", "unknown", "nothing"])
def test_a_damaged_file_is_explained_kept_and_replaced(folder: Path, damage: str) -> None:
    by_model = build(h200())
    file = store(record_of(h200()), folder)
    text = file.read_text()
    table = json.loads(text)
    table["records"][0]["key"]["surprise"] = 1
    damaged = {
        "cut": text[: len(text) // 2],
        "edited": text.replace('"triton"', '"library"', 1),
        "schema": text.replace('"schema_version": 2', '"schema_version": 99'),
        "list": "[1]",
        "unknown": json.dumps(table),
        "nothing": "",
    }[damage]
    file.write_text(damaged)
    with pytest.raises(InputError, match=r"h200\.json"):
        read_records(file)
    assert "h200.json" in reason(h200()) and build(h200()) == by_model
    store(record_of(h200(dim=512)), folder)
    assert len(read_records(file)) == 1 and (folder / "h200.damaged").read_text() == damaged


def test_a_write_that_fails_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = store(record_of(h200()), folder)
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        store(record_of(h200(dim=512)), folder)
    assert file.read_bytes() == before and [path.name for path in folder.iterdir()] == ["h200.json"]


def test_writers_at_once_lose_nothing(folder: Path) -> None:
    several = [record_of(h200(dim=dim)) for dim in range(64, 1024, 64)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda record: store(record, folder), several))
    assert {record.key for record in read_records(folder / "h200.json")} == {r.key for r in several}


def test_generation_with_a_record_needs_neither_torch_nor_a_gpu(folder: Path) -> None:
    """Another interpreter, where torch and triton cannot be imported, writes the same bytes."""
    store(record_of(h200()), folder)
    files = build(h200())
    code = (
        "import hashlib, sys\n"
        "from pathlib import Path\n"
        "sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from infcl_gen.planning import records\n"
        "records.record_folders = lambda: (Path(sys.argv[1]),)\n"
        "from infcl_gen.emission import build\n"
        "from infcl_gen.problem import make_problem\n"
        "files = build(make_problem(batch_size='16k', dim=768, device_profile='h200', memory_budget='1GiB',"
        " set={'strategy': 'panel'}))\n"
        "print(hashlib.sha256(repr(files).encode()).hexdigest(), 'measured on h200' in files['spec.py'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    import hashlib

    assert done.stdout.split() == [hashlib.sha256(repr(files).encode()).hexdigest(), "True"]


def test_committed_records_are_intact() -> None:
    files = sorted((ROOT / "tune" / "records").glob("*.json"))
    assert files
    for file in files:
        for record in read_records(file):
            assert record.key.board == file.stem
            assert all(candidate.status in records.STATUSES for candidate in record.candidates)
