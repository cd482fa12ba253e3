"""Campaigns: files that say what is measured, and outputs that grow."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infcl_gen import cli
from infcl_gen.bench import board
from infcl_gen.bench.campaign import MEASURES, read_campaign, run_campaign
from infcl_gen.bench.contest import Contest
from infcl_gen.bench.point import Point
from infcl_gen.bench.results import Rows, table
from infcl_gen.errors import InfclError, InputError, ToolchainError
from tests.bench.rows import assert_is_row, measured_here

ROOT = Path(__file__).resolve().parent.parent.parent
POINT = 'dim = 16\ndtype = "fp32"\ntarget = "cpu"\n'


def write(folder: Path, points: str, head: str = "", measure: str = "speed") -> Path:
    file = folder / "campaign.toml"
    file.write_text(f'measure = "{measure}"\noutput = "rows.json"\nrepeats = 2\n{head}\n{points}')
    return file


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contests without their worker."""
    monkeypatch.setattr(Contest, "rows", lambda self, point: measured_here(point))


def test_it_goes_on_where_it_stopped(tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = f'[[points]]\nbatch_size = 64\nagainst = "torch"\n{POINT}'
    found = run_campaign(read_campaign(write(tmp_path, first, "minutes = 0")), "once")
    assert (found["rows"], found["left"]) == ([], 1) and not (tmp_path / "rows.json").exists()
    alone = first.replace('against = "torch"\n', "")
    assert [row["impl"] for row in run_campaign(read_campaign(write(tmp_path, alone)), "once")["rows"]] == ["infcl"]
    found = run_campaign(read_campaign(write(tmp_path, first)), "once")  # a peer is missing: once more, with it
    assert [(row["batch"], row["impl"]) for row in found["rows"]] == [(64, "infcl"), (64, "torch")]
    for row in found["rows"]:
        assert_is_row(row)
    # A later table wins; whoever lacks a peer is measured again, and a point under autocast is another point.
    more = (
        f"{first}[[points]]\nbatch_size = [64, 80]\n{POINT}"
        f'[[points]]\nbatch_size = 64\ndim = 16\ntarget = "cpu"\nfeatures = ["rounded fp32"]\n'
    )
    found = run_campaign(read_campaign(write(tmp_path, more)), "twice")
    assert found["command"] == "once; twice"
    assert [(row["batch"], row["impl"], row["precision"]) for row in found["rows"]] == [
        (64, "infcl", "default"),
        (64, "torch", "default"),
        (64, "infcl", "autocast from rounded fp32"),
        (80, "infcl", "default"),
    ]
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["rows"] == found["rows"] and written["command"] == "once; twice"
    assert found["rows"][2]["err"]["dq"] < 1e-5, "gradients in fp32 of features that bf16 holds"

    def nothing(*_: Any) -> Rows:
        raise AssertionError("nothing is left to measure")

    monkeypatch.setattr(Contest, "rows", nothing)
    assert run_campaign(read_campaign(write(tmp_path, more)), "twice")["rows"] == found["rows"]
    monkeypatch.setattr("infcl_gen.bench.results.board", lambda: "another board")
    with pytest.raises(InputError, match="another board"):
        run_campaign(read_campaign(write(tmp_path, more)), "twice")


def test_what_was_measured_before_an_interruption_counts(
    tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A campaign that ends amid a point has all points before it in its file; the next run measures the others only."""
    campaign = read_campaign(write(tmp_path, f"[[points]]\nbatch_size = [64, 80, 96]\n{POINT}"))
    begun: list[int] = []

    def interrupted(self: Contest, point: Point) -> Rows:
        begun.append(point.batch)
        if begun == [64, 80]:
            raise KeyboardInterrupt
        return measured_here(point)

    monkeypatch.setattr(Contest, "rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_campaign(campaign, "parts")
    first = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["batch"] for row in first] == [64]
    result = run_campaign(campaign, "parts")
    assert begun == [64, 80, 80, 96] and result["left"] == 0
    assert result["rows"][:1] == first and [row["batch"] for row in result["rows"]] == [64, 80, 96]


def test_frozen_sides_prefixes_and_forward_alone_are_points_of_their_own(tmp_path: Path, in_process: None) -> None:
    plain = f"[[points]]\nbatch_size = 64\n{POINT}"
    points = f'{plain}gradients = [true, false]\n{plain}prefixes = "8,16:0.5"\n{plain}frozen = ["query", "key"]\n'
    found = run_campaign(read_campaign(write(tmp_path, points)), "once")["rows"]
    named = [{name: row[name] for name in ("frozen", "prefixes", "gradients") if name in row} for row in found]
    assert named == [{}, {"gradients": False}, {"prefixes": "8,16:0.5"}, {"frozen": "query"}, {"frozen": "key"}]
    assert run_campaign(read_campaign(write(tmp_path, points)), "once")["rows"] == found, "nothing is measured again"
    losses = [line[0] for line in table(found)[1]]
    assert losses == [
        "clip",
        "clip, gradients false",
        "clip, prefixes 8,16:0.5",
        "clip, frozen query",
        "clip, frozen key",
    ]


def test_packages_at_one_point_are_those_that_plan_otherwise(tmp_path: Path, in_process: None) -> None:
    points = (
        "[[points]]\nbatch_size = 512\nset = [{ panel_rows = 64 }, { panel_rows = 128 }]\n"
        f'memory_budget = ["auto", "1GB"]\n{POINT}'
    )
    found = run_campaign(read_campaign(write(tmp_path, points)), "")
    assert [row["package"] for row in found["rows"]] == ["torch_panel_rows=64", "torch_panel_rows=128"]


def test_a_memory_plan_that_does_not_hold_is_told(
    tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, f"[[points]]\nbatch_size = 300\n{POINT}", measure="memory")
    found = run_campaign(read_campaign(file), "")
    sizes = [(row["budget_bytes"], row["predicted_peak_bytes"], row["peak_bytes"]) for row in found["rows"]]
    assert len(sizes) == 3 and all(a >= b >= c for a, b, c in sizes)

    def larger(self: Contest, point: Point) -> Rows:
        return [{**row, "peak_bytes": row["predicted_peak_bytes"] + 1} for row in measured_here(point)]

    monkeypatch.setattr(Contest, "rows", larger)
    words = [
        "bench",
        "--campaign",
        str(file),
        "-o",
        str(tmp_path / "again.json"),
        "--html",
        str(tmp_path / "again.html"),
    ]
    done = CliRunner().invoke(cli.main, words)
    assert "MiB beyond the inputs" in (tmp_path / "again.html").read_text()
    assert done.exit_code == 5 and "3 guarantees are broken" in done.stderr
    assert done.stdout.count("clip 300 x 16: within ") == 3


@pytest.mark.parametrize("measure", ["rings", "large"])
def test_rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: str) -> None:
    """What is asked of the ranks, which have tests of their own."""
    asked: list[Any] = []

    def measured(task: str, job: dict[str, Any], ranks: int, timeout_s: float) -> list[Rows]:
        points = [Point(**point) for point in job["points"]]
        asked.append((points, timeout_s, job["once"]))
        row = {**points[0].row(points[0].packages[0]), "transport": "ring"}
        return [[{**row, "error": "not finite"} if measure == "large" else row]] * ranks

    monkeypatch.setattr("infcl_gen.bench.contest.run_ranks", measured)
    ways = 'set = [{ transport = "ring" }, { transport = "gather" }]\nagainst = ["inf_cl"]\n'
    file = write(tmp_path, f"[[points]]\nbatch_size = 64\ndevices = 2\n{ways}{POINT}", "silent_s = 9", measure)
    monkeypatch.setattr("infcl_gen.bench.peers.Peer.absent", lambda peer, loss: f"{peer.name} is not installed")
    found = run_campaign(read_campaign(file), "")
    ((points, timeout_s, once),) = asked
    assert [Path(*point.packages).name for point in points] == ["torch_transport=ring", "torch_transport=gather"]
    assert all((point.ranks, point.peers, point.scale, point.rounds) == (2, (), 14.3, 2) for point in points)
    if measure == "rings":
        assert not once and timeout_s > 9 and found["absent"] == {"inf_cl": "inf_cl is not installed"}
    else:
        assert once and timeout_s == 9 and found["broken"] == ["64: not finite"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("speed", "sped", "measure: 'sped' is unknown; valid: speed"),
        ("repeats", "repeat", "did you mean 'repeats'"),
        ("repeats = 2", "repeats = 0", "repeats: 0 is out of range; valid: 1 to"),
        ("repeats = 2", "seconds = 'x'", "Expected `float`, got `str` - at `$.seconds`"),
        ("repeats = 2", "minutes = -1", "Expected `float` >= 0.0 - at `$.minutes`"),
        ("rows.json", "rows.txt", ".json"),
        ("output", "# output", "missing required field `output`"),
        ("[[points]]", "[points]", "Expected `array`, got `object` - at `$.points`"),
        ("dim = 16", "dim = [16, 0]", "--dim"),
        ("dim = 16", "dims = 16", "--dims: unknown option"),
        ("batch_size = 4", 'batch_size = 4\nagainst = "tortch"', "did you mean 'torch'"),
        ("batch_size = 4", "batch_size = 4\ngradients = 1", "gradients: expected true or false, got 1"),
        (
            "batch_size = 4",
            "batch_size = 4\ngradients = false\ndevices = 2",
            "gradients: forward alone is measured on one",
        ),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = write(tmp_path, f"[[points]]\nbatch_size = 4\n{POINT}")
    assert len(read_campaign(file).places) == 1
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=r"^--campaign: ") as caught:
        read_campaign(file)
    assert message in str(caught.value)


def test_flags_that_stand_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, f"[[points]]\nbatch_size = 4\n{POINT}")
    for flag in ("--dim=4", "--against=torch", "--ranks=2", "--set=a=b"):
        done = CliRunner().invoke(cli.main, ["bench", "--campaign", str(file), flag])
        assert done.exit_code == 2 and f"{flag.partition('=')[0]}: stands in the file" in done.stderr
    done = CliRunner().invoke(cli.main, ["bench", "--campaign", str(tmp_path / "none.toml")])
    assert done.exit_code == 2 and "--campaign" in done.stderr


@pytest.mark.parametrize("measure", [name for name in MEASURES if name != "speed"])
def test_other_measures_refuse_forward_alone(tmp_path: Path, measure: str) -> None:
    """Planted: they measured forward and backward, under the name of another point."""
    points = f"[[points]]\nbatch_size = 64\n{POINT}"
    assert read_campaign(write(tmp_path, points, measure=measure)).measure == measure
    with pytest.raises(InputError, match="gradients: forward alone is measured on one device"):
        read_campaign(write(tmp_path, f"{points}gradients = false\n", measure=measure))


def test_the_committed_campaigns() -> None:
    found = {file.stem: read_campaign(file) for file in (ROOT / "tune" / "campaigns").glob("*.toml")}
    assert {one.measure for one in found.values()} == set(MEASURES)
    assert all(one.output.resolve().parent == ROOT / "tune" / "bench" for one in found.values())
    assert len({one.output.name for one in found.values()}) == len(found)
    grid = found["grid"].places
    assert len(grid) == 56 and sum(len(place.against) > 1 for place in grid) == 2


def test_counters_are_read_by_their_names() -> None:
    head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    units = {"time_us": ("us", "12.5"), "clock_ghz": ("Mhz", "1,700")}
    lines = [
        f'"0","gradient(float)","{metric}","{units.get(name, ("%", "50"))[0]}","{units.get(name, ("%", "50"))[1]}"\n'
        for name, metric in board.METRICS.items()
    ]
    (row,) = board.read_counters(head + "".join(lines))
    assert list(row) == ["kernel", *board.METRICS] and row["kernel"] == "gradient"
    assert (row["time_us"], row["clock_ghz"], row["tensor_percent"]) == (12.5, 1.7, 50.0)
    with pytest.raises(ToolchainError, match="ncu gives no l1tex__data_bank_reads"):
        board.read_counters(head + "".join(lines[:-1]))
    with pytest.raises(ToolchainError, match=r"as '12.5' 'inst'"):
        board.read_counters(head + "".join(lines).replace('"us"', '"inst"'))


@pytest.mark.parametrize(("status", "said"), [(1, '"ID","Kernel Name"\n'), (0, "no permission")])
def test_counters_that_ncu_could_not_read(status: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], status, said, "")
    monkeypatch.setattr(board.subprocess, "run", lambda *_, **how: done)
    with pytest.raises(ToolchainError, match="ncu read no counters: "):
        board.counters(Path("package"), 1.0)


def test_what_other_meters_say_has_columns_of_its_own() -> None:
    rows = json.loads((ROOT / "tune" / "bench" / "h200-power.json").read_text())["rows"][:2]
    header, lines = table(rows)
    assert header[-7:] == ("what", "limit_w", "joules", "watts", "clock_mhz", "held_down", "")
    assert lines[1][-7:-4] == ("products", "700", "29.75") and lines[0][4] == "43.59"


@pytest.mark.parametrize("measure", ["power", "counters"])
def test_meters_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: str) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    file = write(tmp_path, f"[[points]]\nbatch_size = 64\n{POINT}", measure=measure)
    with pytest.raises(InfclError, match=r"nvidia-ml-py|ncu is not installed") as caught:
        run_campaign(read_campaign(file), "")
    assert caught.value.exit_code == 4
