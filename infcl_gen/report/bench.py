"""The page of measurements: each number is one of a row of `infcl_gen.bench.results`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infcl_gen.bench.results import IDENTITY, NAMED, Row, absences, label, named, table
from infcl_gen.inputs.text import bytes_text
from infcl_gen.report.figures import Bar, Figure, Page, Section, Series, Table, bars, lines, size_text, tone

GROUP = (*(name for name in IDENTITY if name not in ("batch", "keys")), *NAMED)
FEW_POINTS = 8
PAIRS = (  # what was predicted, what was measured, the name of the pair, units by which they are divided
    ("predicted_ms", "median_ms", "ms from an idle device", 1.0),
    ("predicted_queued_ms", "queued_ms", "ms behind other work", 1.0),
    ("predicted_peak_bytes", "peak_bytes", "MiB beyond the inputs", 2.0**20),
)


def bench_page(document: Mapping[str, Any]) -> Page:
    """`document` is what `bench` prints with --json and writes to --output."""
    rows = document["rows"]
    good = [row for row in rows if row["error"] is None]
    names = list(dict.fromkeys(map(_name, sorted(good, key=lambda row: row["impl"] != "infcl"))))
    tones = {name: tone(number) + " dashed" * (number > 9) for number, name in enumerate(names)}
    header, lines = table(rows)
    absent = [f"{line[0].upper()}{line[1:]}." for line in absences(document.get("absent", {}))]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    failed = len(rows) - len(good)
    return Page(
        title=f"Measurements on {document['board']}",
        lead=("Times are of the loss: forward and backward, or forward alone; memory is beyond the inputs.",),
        facts=(
            ("device", document["board"]),
            ("rows", str(len(rows))),
            ("rows without figures", str(failed)),
            ("losses", ", ".join(dict.fromkeys(row["loss"] for row in rows)) or "-"),
        ),
        sections=(
            _contestants(good, tones),
            _batches(good, tones),
            _predicted(good),
            Section("All rows", absent, (), [Table(f"{len(rows)} rows", header, lines, folded=len(rows) > 60)]),
        ),
        origin=(f"Measured by: {document['command']}", f"With {versions}."),
    )


def _contestants(rows: Sequence[Row], tones: Mapping[str, str]) -> Section:
    """Bars of each point, or of each group's largest batch, one with several contestants if there is one."""
    points = _grouped([row for row in rows if row["median_ms"]], (*GROUP, "batch", "keys"))
    notes = ["Median milliseconds from an idle device, in parentheses behind other work; peak memory."]
    if len(points) > FEW_POINTS:
        told = sorted(points, key=lambda key: (len(points[key]) > 1, key[-2:]))
        largest = {key[: len(GROUP)]: key for key in told}
        notes.append(f"Of {len(points)} sizes the largest of each kind that contestants share are drawn.")
        points = {key: points[key] for key in points if key in largest.values()}
    figures = []
    for here in points.values():
        first = here[0]
        keys = f" x {first['keys']} keys" * (first["keys"] != first["batch"])
        words = "The fastest first." if len(here) > 1 else "There is no other contestant."
        items = [Bar(_name(row), row["median_ms"], _figures(row), tones[_name(row)]) for row in _fastest_first(here)]
        figures.append(bars(f"B = {first['batch']}{keys}, {_group_text(first)}", words, items))
    return Section("Time by contestant", notes, figures)


def _batches(rows: Sequence[Row], tones: Mapping[str, str]) -> Section:
    figures = list[Figure]()
    for here in _grouped(rows, GROUP).values():
        sizes = {row["batch"]: size_text(row["batch"]) for row in here}
        if len(sizes) < 2:
            continue
        for what, unit, divisor in (("median_ms", "ms", 1.0), ("peak_bytes", "MiB", 2.0**20)):
            series = []
            for name in dict.fromkeys(map(_name, here)):
                found = sorted((row["batch"], row[what] / divisor) for row in here if _name(row) == name and row[what])
                style = "dashed" if "dashed" in tones[name] else "bold" if name.startswith("infcl") else ""
                series += [Series(name, found, tones[name].split()[0], style)] * bool(found)
            if series:
                words = "From an idle device." if unit == "ms" else "Peak beyond the inputs."
                title = f"{'Time' if unit == 'ms' else 'Memory'}, {_group_text(here[0])}"
                figures.append(lines(title, words, series, ("batch size", unit), sizes))
    return Section("Over the batch size", () if figures else ("Each problem was measured at one batch size.",), figures)


def _predicted(rows: Sequence[Row]) -> Section:
    figures, cells = [], []
    for predicted, measured, unit, divisor in PAIRS:
        pairs = [row for row in rows if row[predicted] and row[measured]]
        if not pairs:
            continue
        series = [
            Series(name, [(row[predicted] / divisor, row[measured] / divisor) for row in here], tone(number), "dots")
            for number, ((name,), here) in enumerate(_grouped(pairs, ("strategy",)).items())
        ]
        words = "Each point is a package; on the dashed line the measurement equals the prediction."
        figures.append(lines(unit, words, series, ("predicted", "measured"), {}, diagonal=True))
        for row in pairs:
            text = bytes_text if divisor > 1 else "{:.4g} ms".format
            ratio = f"{row[measured] / row[predicted]:.3f}"
            sizes = str(row["batch"]), str(row["dim"]), _name(row), str(row["strategy"])
            cells.append((*sizes, unit, text(row[predicted]), text(row[measured]), ratio))
    header = ("B", "D", "who", "strategy", "what", "predicted", "measured", "measured / predicted")
    shown = [Table(f"{len(cells)} predictions", header, cells, folded=len(cells) > 60)] * bool(cells)
    notes = (
        ("Predicted peaks are upper bounds; predicted times are the cost model's.",)
        if cells
        else ("No row has predictions.",)
    )
    return Section("Measured against predicted", notes, figures, shown)


def _grouped(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return found


def _name(row: Row) -> str:
    return " ".join(map(str, (label(row), *(row[name] for name in ("what",) if name in row))))


def _group_text(row: Row) -> str:
    precision = f", {row['precision']}" * (row["precision"] != "default")
    ranks = f", {row['ranks']} ranks" * (row["ranks"] > 1)
    precision += named(row)
    return f"{row['loss']}, D = {row['dim']}, {row['dtype']}{precision}, scale {row['scale']}{ranks}"


def _figures(row: Row) -> str:
    queued = f" ({row['queued_ms']:.4g})" if row["queued_ms"] else ""
    memory = "" if row["peak_bytes"] is None else f", {bytes_text(row['peak_bytes'])}"
    return f"{row['median_ms']:.4g}{queued} ms{memory}"


def _fastest_first(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row["median_ms"])
