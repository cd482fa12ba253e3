"""Pages of plans and measurements: whole, self-contained, to scale, and with the numbers that they were made from."""

import collections
import json
import math
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result

from infcl_gen import cli
from infcl_gen.bench.results import FIELDS, table
from infcl_gen.cli.options import PROBLEM, command_line
from infcl_gen.cli.pages import around
from infcl_gen.cli.scaling import simulated
from infcl_gen.emission.pipeline import case_of, simulate_problem
from infcl_gen.files import checksum
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.inputs.text import bytes_text
from infcl_gen.planning import Plan
from infcl_gen.planning.model import CostModel
from infcl_gen.planning.planner import cost_model
from infcl_gen.planning.timeline import Timeline
from infcl_gen.report import plan as plan_report
from infcl_gen.report.bench import bench_page
from infcl_gen.report.figures import bars, size_text, ticks
from infcl_gen.report.page import html
from infcl_gen.report.plan import plan_page
from tests.bench.rows import rows_of_several_points

ROOT = Path(__file__).resolve().parents[1]
SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br", "img", "link", "input", "hr", "base"}
H200 = {"device_profile": "h200"}
PROBLEMS: dict[str, dict[str, Any]] = {
    "one": {"batch_size": "64k", "dim": 768, **H200},
    "fused": {"batch_size": 50021, "dim": 128, "devices": 4, **H200},
    "stash": {"batch_size": "64k", "dim": 768, "memory_budget": "3GiB", **H200},
    "cluster": {"batch_size": "512k", "dim": 1024, "devices": 64, "nodes": 8, "memory_budget": "2GiB", **H200},
    "keys": {"loss": "infonce", "batch_size": 8192, "keys": 40000, "dim": 256, **H200},
    "hopper": {"batch_size": "64k", "dim": 200, **H200},
    "prefixes": {"batch_size": "64k", "dim": 768, "prefixes": "96,192,384,768", **H200},
    "cpu": {"batch_size": 1000, "dim": 64, "device_profile": "cpu"},
    "negatives": {"loss": "gemini", "batch_size": "64k", "dim": 768, "negatives": 7, **H200},
    "forward alone": {"loss": "siglip", "batch_size": "64k", "dim": 768, "devices": 8, **H200},
    "whole": {
        "loss": "infonce",
        "batch_size": "64k",
        "dim": 768,
        "devices": 8,
        "set": ["transport=gather", "strategy=rows"],
        **H200,
    },
}
DEPTHS = {"hopper": 256, "prefixes": 64}  # where kernels for Hopper run, columns of a stage
GRID = json.loads((ROOT / "tune" / "bench" / "h200-grid.json").read_text())


class Shown(NamedTuple):
    problem: Problem
    plan: Plan
    model: CostModel
    step: Timeline
    text: str


class Reader(HTMLParser):
    """Tags that are closed in order, attributes, and the cells of tables by their title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._rows: list[list[str]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data
        if {"td", "th"} & set(self.open):
            self._rows[-1][-1] += data
        elif "caption" in self.open:
            self.tables[data] = self._rows


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def figures(text: str) -> dict[str, ElementTree.Element]:
    """The drawings of a page, by title; each is well-formed XML."""
    drawn = [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert all([child.tag for child in each][:2] == [f"{SVG}title", f"{SVG}desc"] for each in drawn)
    found = {each[0].text or "": each for each in drawn}
    assert len(found) == len(drawn)
    return found


def marked(figure: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [each for each in figure if f"data-{name}" in each.attrib]


@pytest.fixture(scope="module")
def shown() -> dict[str, Shown]:
    found = {}
    for name, flags in PROBLEMS.items():
        problem = make_problem(**flags)
        plan, step = simulate_problem(problem)
        model = cost_model(plan, case_of(problem).cluster)
        page = plan_page(plan, model, step, [], "infcl-gen plan")
        found[name] = Shown(problem, plan, model, step, html(page))
    return found


@pytest.fixture(scope="module")
def measured() -> str:
    return html(bench_page(GRID))


def check_page(text: str) -> Reader:
    """Well-formed and alone: no tag and no attribute that loads anything, and ids that are there once."""
    reader = Reader(text)
    used = {tag for tag, _ in reader.tags}
    assert not used & {"script", "link", "img", "iframe", "object", "embed", "base", "use", "image", "a", "form"}
    names = {name for _, attributes in reader.tags for name in attributes}
    assert not [name for name in names if name.startswith("on") or name in ("src", "href", "xlink:href", "style")]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in text and "width=device-width" in text and "prefers-color-scheme:dark" in text
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for tag, attributes in reader.tags:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert set((attributes["aria-labelledby"] or "").split()) <= set(ids)
    for figure in figures(text).values():
        numbers = [value for each in figure.iter() for key, value in each.attrib.items() if key in ("x", "y", "width")]
        assert all(math.isfinite(float(value)) for value in numbers)
    return reader


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_plan_is_a_whole_page(shown: dict[str, Shown], name: str) -> None:
    here = shown[name]
    reader = check_page(here.text)
    decisions = reader.tables["Decisions and their reasons"][1:]
    assert [row[1:] for row in decisions] == [[reason.decision, reason.why] for reason in here.plan.reasons]
    for value in (here.plan.predicted_peak_bytes, here.plan.allowed_bytes, here.plan.smallest_budget_bytes):
        assert bytes_text(value) in reader.words
    assert str(here.plan.largest_batch) in reader.words and here.plan.strategy in reader.words


@pytest.mark.parametrize("name", PROBLEMS)
def test_tiles_are_to_scale(shown: dict[str, Shown], name: str) -> None:
    plan, found = shown[name].plan, {}
    for figure in figures(shown[name].text).values():
        scales = set[float]()
        for each in marked(figure, "tile"):
            rows, keys = int(each.attrib["data-rows"]), int(each.attrib["data-keys"])
            found[each.attrib["data-tile"]] = (rows, keys)
            scales |= {float(each.attrib["width"]) / keys, float(each.attrib["height"]) / rows}
        assert not scales or max(scales) == pytest.approx(min(scales), rel=1e-4)
    rows, keys = plan.rows_per_rank, plan.keys_per_rank
    assert found["whole matrix"] == (plan.problem.batch_size, plan.problem.total_keys)
    assert found["one device"] == (rows, plan.problem.total_keys) and found["one hop"] == (rows, keys)
    assert found["forward panel"] == (min(rows, plan.forward_rows), min(keys, plan.forward_keys))
    panel = (min(rows, plan.panel_rows), min(keys, plan.panel_keys))
    assert found["panel 0, 0"] == ((rows, keys) if plan.strategy == "fused" else panel)
    assert ("stash" in found) == bool(plan.stash_rows)
    for kernel, block in plan.blocks.items():
        runs = f"{kernel}_hopper" if name in DEPTHS and kernel in ("forward", "gradient") else kernel
        assert found[f"block of {runs}"] == (block.rows, block.depth if kernel == "finish" else block.keys)
    for kernel in ("forward", "gradient") if name in DEPTHS else ():  # not those whose place they take
        assert found[f"left operand of {kernel}_hopper"] == (128, DEPTHS[name])
        assert not {f"block of {kernel}", f"left operand of {kernel}"} & {*found}


def test_panels_cover_a_hop(shown: dict[str, Shown]) -> None:
    for here in shown.values():
        panels = marked(figures(here.text)["Level 2: panels of a hop"], "tile")
        sizes = [
            int(each.attrib["data-rows"]) * int(each.attrib["data-keys"])
            for each in panels
            if each.attrib["data-tile"].startswith("panel ")
        ]
        assert sum(sizes) == here.plan.rows_per_rank * here.plan.keys_per_rank


def test_nodes_and_devices_are_drawn(shown: dict[str, Shown]) -> None:
    assert len(marked(figures(shown["cluster"].text)["Level 0 and 1: who exchanges keys"], "node")) == 8
    assert len(marked(figures(shown["fused"].text)["Level 0 and 1: who exchanges keys"], "device")) == 4
    assert "Level 0 and 1: who exchanges keys" not in figures(shown["one"].text)


@pytest.mark.parametrize("name", PROBLEMS)
def test_memory_is_that_of_the_plan(shown: dict[str, Shown], name: str) -> None:
    """Every buffer is a row and a part of the stacks that it is in; a stack is what the cost model counts."""
    plan, memory = shown[name].plan, shown[name].model.memory(shown[name].plan)
    rows = check_page(shown[name].text).tables["Buffers"][1:]
    listed = [
        [b.name, b.phase, bytes_text(b.bytes), " x ".join(map(str, b.shape)), b.dtype, b.why] for b in plan.buffers
    ]
    assert [row for row in rows if row[0] != "slack"] == listed
    stacks = collections.defaultdict[str, list[tuple[str, float]]](list)
    for each in marked(figures(shown[name].text)["Memory by phase"], "value"):
        stacks[each.attrib["y"]].append((each.attrib["data-name"], float(each.attrib["data-value"])))
    totals = [math.fsum(size for _, size in parts) for parts in stacks.values()]
    phases = [phase for phase in memory._fields[1:] if phase != "after" or plan.problem.loss == "gemini"]
    assert totals == [memory.both + getattr(memory, phase) for phase in phases]
    assert max(totals) == plan.predicted_peak_bytes
    for parts, phase in zip(stacks.values(), phases, strict=True):
        own = [(buffer.name, buffer.bytes) for buffer in plan.buffers if buffer.phase in ("both", phase)]
        assert [part for part in parts if part[0] != "slack"] == own


@pytest.mark.parametrize("name", PROBLEMS)
def test_times_and_rates_are_those_of_the_plan(shown: dict[str, Shown], name: str) -> None:
    plan, model, drawn = shown[name].plan, shown[name].model, figures(shown[name].text)
    times = [float(each.attrib["data-value"]) for each in marked(drawn["Predicted time by phase"], "value")]
    assert times == [phase.time_s for phase in plan.phases]
    assert math.fsum(times) == pytest.approx(plan.predicted_time_s)
    rates = [float(each.attrib["data-rate"]) for each in marked(drawn["Roofline"], "rate")]
    assert rates == [phase.flops / phase.time_s / 1e12 for phase in plan.phases if phase.flops]
    peak = model.profile.matmul_tflops[model.product_kind].value
    assert 0 < max(rates) <= peak and f"{peak:g} TFLOP/s" in shown[name].text


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_timeline_has_every_event(shown: dict[str, Shown], name: str) -> None:
    here = shown[name]
    drawn = figures(here.text)
    events = [
        (each.attrib["data-resource"], float(each.attrib["data-start"]), float(each.attrib["data-end"]))
        for each in marked(drawn["The whole step"], "start")
    ]
    assert events == [(each.resource, each.start_s, each.end_s) for each in here.step.intervals]
    near = "The turn from forward to backward"
    assert (near in drawn) == (here.plan.world_size > 6 and here.plan.schedule.hops("backward") > 0)
    if near in drawn:
        near_events = marked(drawn[near], "start")
        starts = [float(each.attrib["x"]) for each in near_events]
        assert 0 < len(starts) < len(events) and min(starts) >= 0 and max(starts) <= 400
        kernels = [each for each in near_events if each.attrib["data-resource"] == "compute"]
        assert float(kernels[0].attrib["x"]) == 0 and 6 <= len(kernels) <= 24


def test_a_step_of_very_many_events_is_not_drawn_whole(
    shown: dict[str, Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn is, where backward has work on keys."""
    monkeypatch.setattr(plan_report, "MOST_EVENTS", 20)
    for name, drawn in (("cluster", "only the turn is"), ("forward alone", "none are")):
        here = shown[name]
        text = html(plan_page(here.plan, here.model, here.step, "none", ""))
        assert "The whole step" not in figures(text) and f"{len(here.step.intervals)} events; {drawn} drawn" in text


def test_fp32_has_the_peak_of_its_products() -> None:
    kinds = {}
    for precision in ("default", "tf32", "exact"):
        problem = make_problem(batch_size=4096, dim=64, dtype="fp32", precision=precision, **H200)
        model = cost_model(simulate_problem(problem)[0], case_of(problem).cluster)
        kinds[precision] = model.product_kind
    assert kinds == {"default": "bf16", "tf32": "tf32", "exact": "fp32"}


def test_the_command_writes_the_same_page_in_every_process(tmp_path: Path) -> None:
    """With the rows of `scale`; the plan is printed as ever."""
    sizes = ("--batch-size", "64k", "--dim", "64", "--devices", "8")
    flags = (*sizes, "--device-profile", "h200", "--memory-budget", "28MiB")
    first, second = tmp_path / "first.html", tmp_path / "second.html"
    done = run("plan", *flags, "--html", str(first))
    assert done.exit_code == 0, done.stderr
    assert "Tiles" in done.stdout and done.stdout.endswith(f"\nwrote {first}\n")
    command = [sys.executable, "-m", "infcl_gen", "plan", *flags, "--json", "--html", str(second)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed).keys() == {"schema_version", "plan"}
    assert first.read_bytes() == second.read_bytes() and len(list(tmp_path.iterdir())) == 2
    reader, drawn = check_page(first.read_text()), figures(first.read_text())
    (made_by,) = re.findall(r"infcl-gen (plan --.*?)\s*$", reader.words, re.MULTILINE)
    assert run(*shlex.split(made_by)).stdout == done.stdout.replace(f"\nwrote {first}\n", "\n")
    problem = make_problem(batch_size="64k", dim=64, devices=8, memory_budget="28MiB", **H200)
    rows = [simulated(each) for each in around(problem)]
    assert [row["devices"] for row in rows] == [1, 2, 4, 8, 16, 32, 64]
    good = [row for row in rows if row["error"] is None]
    assert 1 < len(good) < len(rows)  # fewer devices need more memory each
    for name, what, number in (("Time", "step_ms", 2), ("Efficiency", "efficiency", 1)):
        points = [
            (int(each.attrib["data-across"]), float(each.attrib["data-up"])) for each in marked(drawn[name], "across")
        ]
        assert points[: len(good)] == [(row["devices"], row[what]) for row in good]
        assert len(points) == number * len(good)
    table = reader.tables["Numbers of devices"][1:]
    assert [row[0] for row in table] == [str(row["devices"]) for row in rows]
    assert {row[-1] for row in table if row[2] == "-"} == {"no plan fits the budget"}


def test_a_command_line_has_switches_without_values() -> None:
    for given, words in ((True, " --renormalise"), (False, ""), (None, "")):
        flags = {**dict.fromkeys(PROBLEM), "prefixes": "8,16", "renormalise": given}
        assert command_line("plan", flags, PROBLEM) == f"infcl-gen plan --prefixes 8,16{words}"


def test_devices_around_a_problem_fill_their_nodes() -> None:
    links = {"links_per_node": 4}
    problem = make_problem(batch_size=4096, dim=64, cluster={"nodes": 3, "devices_per_node": 8, **links}, **H200)
    found = [(each.devices, each.nodes, each.links and each.links.links_per_node) for each in around(problem)]
    assert found == [(3, 1, 3), (6, 1, 4), (24, 3, 4), (48, 6, 4), (96, 12, 4)]


def test_a_setting_that_other_sizes_forbid_is_named(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    flags = (
        "--batch-size",
        "4k",
        "--dim",
        "64",
        "--devices",
        "4",
        "--device-profile",
        "h200",
        "--set",
        "transport=gather",
    )
    assert run("plan", *flags, "--html", str(file)).exit_code == 0
    assert "Other numbers of devices are not simulated: --set" in file.read_text()


HOSTILE = "<script>alert(1)</script>&\"'"


def test_text_of_users_is_escaped(tmp_path: Path) -> None:
    """The path of a loss, the source of a figure in a profile, the name of a package and an error."""
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    loss, profile, page = folder / "own.py", folder / "own.toml", folder / "page.html"
    text = (ROOT / "infcl_gen/hardware/profiles/h200.toml").read_text()
    profile.write_text(re.sub(r'source = "[^"]*"', f"source = 'measured: {HOSTILE[:-1]}'", text))
    loss.write_text((ROOT / "infcl_gen/losses/builtin.py").read_text())
    flags = ["--loss", f"{loss}:CLIP", "--device-profile", str(profile), "--batch-size", "64", "--dim", "16"]
    done = run("plan", *flags, "--html", str(page))
    assert done.exit_code == 0, done.stderr
    reader = check_page(page.read_text())
    assert f"measured: {HOSTILE[:-1]}" in reader.words and str(loss.parent.name)[:20] in reader.words

    rows = rows_of_several_points()
    for row in rows:
        row |= {"package": HOSTILE, "loss": HOSTILE, "queued_ms": None, "ranks": 1, "mean_ms": None, "repeats": 3}
        row |= dict.fromkeys(("predicted_ms", "predicted_queued_ms", "predicted_peak_bytes", "queued_std_ms"))
        row |= {"queued_floor_ms": None, "error": row["error"] and HOSTILE}
    origin = {"board": HOSTILE, "versions": {HOSTILE: HOSTILE}, "command": HOSTILE, "absent": {HOSTILE: HOSTILE}}
    reader = check_page(html(bench_page({"rows": rows, **origin})))
    assert reader.words.count(HOSTILE) > 20


def test_measurements_are_a_whole_page(measured: str) -> None:
    reader = check_page(measured)
    header, rows = table(GRID["rows"])
    assert reader.tables[f"{len(rows)} rows"] == [list(line) for line in (header, *rows)]
    assert GRID["board"] in reader.words and GRID["command"] in reader.words


def test_bars_and_lines_are_the_rows(measured: str) -> None:
    drawn = figures(measured)
    bars = marked(drawn["B = 131072, clip, D = 768, bf16, scale 14.3"], "value")
    here = [row for row in GRID["rows"] if (row["batch"], row["dim"]) == (131072, 768)]
    assert [float(each.attrib["data-value"]) for each in bars] == sorted(row["median_ms"] for row in here)
    widths = [float(each.attrib["width"]) / float(each.attrib["data-value"]) for each in bars]
    assert max(widths) == pytest.approx(min(widths), rel=1e-4)
    for title, what, unit in (("Time", "median_ms", 1.0), ("Memory", "peak_bytes", 2.0**20)):
        points = marked(drawn[f"{title}, clip, D = 768, bf16, scale 14.3"], "across")
        found = sorted((int(each.attrib["data-across"]), float(each.attrib["data-up"])) for each in points)
        assert found == sorted((row["batch"], row[what] / unit) for row in GRID["rows"] if row["dim"] == 768)


@pytest.mark.parametrize(
    ("title", "predicted", "measures", "unit"),
    [
        ("ms from an idle device", "predicted_ms", "median_ms", 1.0),
        ("ms behind other work", "predicted_queued_ms", "queued_ms", 1.0),
        ("MiB beyond the inputs", "predicted_peak_bytes", "peak_bytes", 2.0**20),
    ],
)
def test_measured_against_predicted(measured: str, title: str, predicted: str, measures: str, unit: float) -> None:
    points = marked(figures(measured)[title], "across")
    found = sorted((float(each.attrib["data-across"]), float(each.attrib["data-up"])) for each in points)
    rows = [row for row in GRID["rows"] if row[predicted] is not None]
    assert found == sorted((row[predicted] / unit, row[measures] / unit) for row in rows) and len(found) > 50
    ratios = [row[-1] for row in Reader(measured).tables["252 predictions"] if row[4] == title]
    assert sorted(ratios) == sorted(f"{row[measures] / row[predicted]:.3f}" for row in rows)


@pytest.mark.parametrize("file", sorted((ROOT / "tune" / "bench").glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_file_of_measurements_has_a_page(tmp_path: Path, file: Path) -> None:
    """Files of other programs, whose rows lack the fields of a measurement, are refused."""
    page = tmp_path / "page.html"
    done = run("bench", "--results", str(file), "--html", str(page))
    results = json.loads(file.read_text())
    if not set(FIELDS) <= results["rows"][0].keys():
        assert re.match(r"python (docs/|examples/|-m tests\.)|infcl-gen scale ", results["command"])
        assert done.exit_code == 2 and not page.exists()
        return
    assert done.exit_code == 0, done.stderr
    assert done.stdout.endswith(f"wrote {page}\n")
    check_page(page.read_text())


def test_results_that_were_changed_are_refused(tmp_path: Path) -> None:
    good = json.loads((ROOT / "tune" / "bench" / "h200-large.json").read_text())
    fewer = [{name: value for name, value in row.items() if name != "floor_ms"} for row in good["rows"]]
    bad = (
        "{", "[]", "7", "{}", "\x00",
        json.dumps(good | {"rows": good["rows"][:1]}), json.dumps(good | {"schema_version": 2}),
        json.dumps(good | {"rows": fewer, "checksum": checksum(fewer)}),
        json.dumps({name: value for name, value in good.items() if name != "board"}),
    )  # fmt: skip
    file, page = tmp_path / "rows.json", tmp_path / "page.html"
    for text in bad:
        file.write_text(text)
        done = run("bench", "--results", str(file), "--html", str(page))
        assert done.exit_code == 2 and not page.exists(), text[:40]
        assert done.stderr.startswith("infcl-gen: error: --results: ") and "--output wrote" in done.stderr
    done = run("bench", "--results", str(file), "--html", str(page), "--repeats", "3")
    assert done.exit_code == 2 and "--repeats" in done.stderr


def test_numbers_on_axes() -> None:
    assert list(ticks(0.0, 42.0, log=False).values()) == ["0", "10", "20", "30", "40"]
    assert list(ticks(1.0, 1000.0, log=True).values()) == ["1", "10", "100", "1000"]
    assert len(ticks(20.0, 25.0, log=True)) > 0
    assert [size_text(count) for count in (1000, 1024, 65536, 2**20, 10007)] == ["1000", "1k", "64k", "1M", "10007"]
    assert bars("none", "nothing", []).marks == []
