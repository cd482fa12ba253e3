"""Tuning records: written whole, found by their key, and a miss explains itself. Nothing here is timed."""

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infcl_gen import cli
from infcl_gen.emission import build, plan_problem, read_package, rerender, write_package
from infcl_gen.emission.pipeline import case_of, find_record
from infcl_gen.errors import InputError
from infcl_gen.hardware import resolve_cluster
from infcl_gen.inputs.overrides import parse_overrides
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.kernels import FAMILIES, forward
from infcl_gen.losses import load_loss
from infcl_gen.planning import candidates, records
from infcl_gen.planning.records import Candidate, Found, Key, Record, read_records, store

ROOT = Path(__file__).resolve().parent.parent.parent
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


def record_of(problem: Problem, settings: records.Settings = SETTINGS, **changes: Any) -> Record:
    """What a run that found `settings` would have stored."""
    candidate = Candidate("gradient", settings, "timed", "", 1.5, (1.0, 1.25))
    measured = records.measured_settings(problem.settings, changes.pop("planned", settings))
    plan, _ = plan_problem(dataclasses.replace(problem, settings=measured))
    record = Record(
        *(key_of(problem), settings, "d" * 64, records.timed_settings(plan), records.revisions(plan)),
        *(True, ("gradient",), {"torch": "2.11"}, (candidate,)),
    )
    return dataclasses.replace(record, **changes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that stands where the committed records are."""
    committed = tmp_path / "records"
    monkeypatch.setattr(records, "record_folders", lambda: (tmp_path / "users", committed))
    return committed


@pytest.fixture(scope="module")
def by_model() -> dict[str, str]:
    """The package without a record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "record_folders", tuple)
        return build(h200())


def reason(problem: Problem) -> str:
    found = find_record(case_of(problem))
    assert isinstance(found, str)
    assert len(found.splitlines()) == 1
    return found


def test_a_record_is_read_as_it_was_written(folder: Path) -> None:
    first, second = record_of(h200()), record_of(h200(dim=512))
    file = store(first, folder)
    assert store(second, folder) == file == folder / "h200.json"
    replaced = dataclasses.replace(first, settings=())
    store(replaced, folder)
    assert set(map(repr, read_records(file))) == {repr(replaced), repr(second)}
    assert [path.name for path in folder.iterdir()] == ["h200.json"]
    assert json.loads(file.read_text())["schema_version"] == 3


def test_a_record_that_fits_gives_its_settings_and_the_reasons_say_so(folder: Path, tmp_path: Path) -> None:
    store(record_of(h200()), folder)
    assert isinstance(find_record(case_of(h200())), Found)
    plan, _ = plan_problem(h200())
    assert plan.product_by == "triton" and plan.blocks["gradient"].stages == 2
    assert plan.problem.settings.pairs == tuple(sorted((*SETTINGS, ("records", "measured"), ("strategy", "panel"))))
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
    single = {"dtype": "fp32", "set": {}}
    store(record_of(h200(**single)), folder)
    for precision in ("tf32", "exact"):
        assert f"precision is {precision!r}, there 'default'" in reason(h200(**single, precision=precision))
    assert reason(h200(loss="infonce")).endswith("in the nearest: loss is 'infonce', there 'clip'")
    assert reason(h200(device_profile="a100")) == "no problem has been tuned on a100"
    assert "sets gradient.warps itself" in reason(h200(set={"gradient.warps": 8}))
    assert "--set records=off" in reason(h200(set={"strategy": "panel", "records": "off"}))
    with caplog.at_level(logging.INFO, "infcl_gen"):
        build(h200(batch_size="32k"))
    assert near in caplog.text


def test_as_many_keys_as_queries_are_the_same_problem_however_they_are_given(folder: Path) -> None:
    store(record_of(h200()), folder)
    assert isinstance(find_record(case_of(h200(keys="16k"))), Found)
    assert key_of(h200(loss="infonce", keys="8k")) != key_of(h200(loss="infonce"))


def test_a_stale_record_is_explained_and_not_used(folder: Path, by_model: dict[str, str]) -> None:
    store(record_of(h200(), timed=(("products", "library"),)), folder)
    assert "is stale: " in reason(h200()) and "products was library, now triton" in reason(h200())
    assert build(h200()) == by_model
    flags = ("--batch-size", "16k", "--dim", "768", "--device-profile", "h200", "--memory-budget", "1GiB")
    done = CliRunner().invoke(cli.main, ["plan", *flags, "--set", "strategy=panel"])
    assert done.exit_code == 0 and "no measured settings: the record in h200.json is stale" in done.stdout


def revise(patch: pytest.MonkeyPatch, name: str, revision: int) -> None:
    families = (dataclasses.replace(each, revision=revision) if each.template == name else each for each in FAMILIES)
    patch.setattr("infcl_gen.kernels.FAMILIES", tuple(families))


@pytest.mark.parametrize(
    ("strategy", "dim", "kernels"),
    [
        ("panel", 768, {"forward", "gradient", "product"}),
        ("panel", 256, {"forward", "gradient", "product", "hopper"}),
        ("fused", 128, {"forward", "fused"}),
        ("stash", 128, {"forward", "gradient", "product", "stash"}),
    ],
)
def test_a_record_is_of_one_revision_of_its_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, dim: int, kernels: set[str]
) -> None:
    problem = h200(dim=dim, set={"strategy": strategy})
    store(record_of(problem, ()), folder)
    revised = {family.template: family.revision for family in FAMILIES if family.revision}
    used = set(records.revisions(plan_problem(problem)[0]))
    assert kernels <= used <= set(revised)  # and those of variants that were added
    for family, revision in revised.items():
        with monkeypatch.context() as patch:
            revise(patch, family, revision + 1)
            if family in used:
                assert f"is stale: revision of {family} was {revision}, now {revision + 1}" in reason(problem)
            else:
                assert isinstance(find_record(case_of(problem)), Found)


def test_measured_settings_are_not_the_users_own() -> None:
    own = parse_overrides({"strategy": "panel", "replay": "off", "products": "library"})
    measured = records.measured_settings(parse_overrides({"strategy": "panel"}), SETTINGS)
    assert records.own_settings(measured) == parse_overrides({"strategy": "panel"})
    assert records.own_settings(own) == own
    assert records.own_settings(parse_overrides({"records": "off", "panel_rows": 64})).panel_rows == 64


@pytest.mark.parametrize(
    ("module", "name", "value", "message"),
    [
        (candidates, "PANEL_CAP", 4096, "panel_keys was 16384, now 4096"),
        (candidates, "FORWARD_CAP", 4096, "forward_keys was 16384, now 4096"),
        (forward, "DEEP", 4096, "forward.keys was 128, now 64|forward.rows was 256, now 128"),
    ],
)
def test_a_record_of_another_plan_is_stale(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: int, message: str
) -> None:
    problem = h200(set={"strategy": "panel", "products": "triton"}, memory_budget="4GiB")
    store(record_of(problem, ()), folder)
    assert isinstance(find_record(case_of(problem)), Found)
    monkeypatch.setattr(module, name, value)
    assert re.search(message, reason(problem)), reason(problem)


def test_what_came_after_a_record_makes_it_stale(folder: Path) -> None:
    """A family of kernels that the timed plan did not run. Planted: only what the record names is compared."""
    store(record_of(h200(), revisions={}), folder)
    assert "revision of forward was none, now 1" in reason(h200())


def test_without_kernels_a_record_is_of_the_sweep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(batch_size="4k", dim=64, target="cpu")
    store(record_of(problem, (("panel_rows", "128"), ("panel_keys", "128"))), folder)
    assert isinstance(find_record(case_of(problem)), Found)
    monkeypatch.setattr(records, "SWEEP_REVISION", 2)
    assert "revision of sweep was 1, now 2" in reason(problem)


def test_a_record_that_is_illegal_today_is_not_used(
    folder: Path, caplog: pytest.LogCaptureFixture, by_model: dict[str, str]
) -> None:
    store(record_of(h200(), (("gradient.rows", "8192"),), planned=()), folder)
    with caplog.at_level(logging.INFO, "infcl_gen"):
        assert build(h200()) == by_model
    assert "does not give a plan any more" in caplog.text and "gradient.rows" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "edited", "schema", "list", "unknown", "nothing"])
def test_a_damaged_file_is_explained_kept_and_replaced(folder: Path, damage: str, by_model: dict[str, str]) -> None:
    file = store(record_of(h200()), folder)
    text = file.read_text()
    table = json.loads(text)
    table["records"][0]["key"]["surprise"] = 1
    damaged = {
        "cut": text[: len(text) // 2],
        "edited": text.replace('"triton"', '"library"', 1),
        "schema": text.replace('"schema_version": 3', '"schema_version": 99'),
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
        "from infcl_gen.inputs.problem import make_problem\n"
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
            assert record.key.board == file.stem and record.timed
            assert set(record.revisions) <= {"sweep", *(family.template for family in FAMILIES if family.revision)}
            assert all(candidate.status in records.STATUSES for candidate in record.candidates)
