"""Writes the README's tables of measurements, and of simulated steps, from the .json files of tune/bench
and tune/analysis (counters, errors alone, simulations), each between two markers.

python tune/readme_figures.py            rewrites README.md
python tune/readme_figures.py --plot     and draws tune/bench/h200-grid.svg
python tune/readme_figures.py --check    exits with 1 if the README does not show what the files hold
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also where the project is not installed

from infcl_gen.tuning.scaling import HEADER, cells  # noqa: E402

MARKERS = {kind: (f"<!-- {kind}:begin -->", f"<!-- {kind}:end -->") for kind in ("measured", "simulated")}
GRID, LARGE, COMPARED = "h200-grid.json", 32768, (65536, 768)
BESIDE_PEERS = (GRID, "h200-scale100.json", "h200-autocast-speed.json")
COLUMNS = (
    "| loss | B | D | dtype | strategy | ms (median ± std; queued) | product floor, ms | budget, MiB "
    "| predicted peak, MiB | measured peak, MiB | error of dq |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    fresh = text
    for kind, write in (("measured", tables), ("simulated", simulated_tables)):
        begin, end = MARKERS[kind]
        before, _, rest = fresh.partition(begin)
        _, _, after = rest.partition(end)
        fresh = f"{before}{begin}\n{write()}{end}{after}"
    if "--check" in sys.argv[1:]:
        return int(fresh != text)
    readme.write_text(fresh, encoding="utf-8")
    if "--plot" in sys.argv[1:]:
        from infcl_gen.tuning.plot import plot

        grid = json.loads((ROOT / "tune" / "bench" / GRID).read_text(encoding="utf-8"))
        plot(grid["rows"], ROOT / "tune" / "bench" / "h200-grid.svg", f"{grid['board']}, forward + backward")
    return 0


def tables() -> str:
    """The tables of each measured file, in the order of their names. Raises ValueError if a checksum is wrong."""
    parts = []
    for path, results in _files():
        if results.get("simulated"):
            continue
        versions = ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items()))
        parts.append(
            f"\n`{path.relative_to(ROOT)}`: {results['board']}; {versions}; `{results['command']}`\n"
        )
        if path.name in BESIDE_PEERS:
            lines = highlights(results["rows"]) if path.name == GRID else []
            parts += [f"\n* {line}" for line in [*lines, *beside_peers(results["rows"])]] + ["\n"]
        if results["rows"] and "kernel" in results["rows"][0]:
            parts.append(counters(results["rows"]))
        elif results["rows"] and "joules" in results["rows"][0]:
            parts.append(power(results["rows"]))
        elif results["rows"] and "way" in results["rows"][0]:
            parts.append(ways(results["rows"]))
        elif all(row.get("median_ms") is None and not row["error"] for row in results["rows"]):
            parts.append(accuracies(results["rows"]))
        elif any(row["impl"] != "infcl" for row in results["rows"]):
            if any(row.get("package") == "no communication" for row in results["rows"]):
                parts.append(efficiencies(results["rows"]))
            parts.append(comparisons(results["rows"], results.get("absent", {})))
        else:
            parts += [f"\n{COLUMNS}\n", *(_line(row) for row in results["rows"])]
    return "".join(parts)


def simulated_tables() -> str:
    """The tables of each file that says of itself that it was simulated."""
    parts = []
    for path, results in _files():
        if results.get("simulated"):
            parts.append(
                f"\n`{path.relative_to(ROOT)}`: {results['board']}, simulated; `{results['command']}`\n\n"
            )
            lines = [HEADER, ("---",) * len(HEADER), *map(cells, results["rows"])]
            parts += [f"| {' | '.join(line)} |\n" for line in lines]
    return "".join(parts)


def _files() -> list[tuple[Path, dict[str, Any]]]:
    found = []
    for path in (
        file for name in ("bench", "analysis") for file in sorted((ROOT / "tune" / name).glob("*.json"))
    ):
        results = json.loads(path.read_text(encoding="utf-8"))
        rows = json.dumps(results["rows"], sort_keys=True)
        if hashlib.sha256(rows.encode()).hexdigest() != results["checksum"]:
            raise ValueError(f"{path.name}: its rows do not match its checksum")
        found.append((path, results))
    return found


def highlights(rows: list[dict[str, Any]]) -> list[str]:
    """What the grid says in short: the fastest package at each point beside its peers, and beside its products."""
    points: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["error"] is None:
            points.setdefault((row["batch"], row["dim"]), []).append(row)

    def ratios(field: str, chosen: Callable[[int, int], bool], linear: bool = False) -> list[float]:
        """Time of the fastest other to that of the fastest package, or of the one whose memory is linear in B."""
        found = []
        for point, group in points.items():
            ours = [row[field] for row in group if row["impl"] == "infcl" and _linear(row) >= linear]
            theirs = [row[field] for row in group if row["impl"] != "infcl"]
            if chosen(*point):
                found.append(min(theirs) / min(ours))
        return found

    def floors(floor: str, whole: str, package: str) -> list[float]:
        return [
            row[floor] / row[whole]
            for row in rows
            if row["impl"] == "infcl" and row["batch"] >= LARGE and row["dim"] >= 512
            and row["package"] == package
        ]  # fmt: skip

    packages = {
        "panel": "panel without a budget (four products)",
        "panel_577MB": "panel within 577 MB",
        "stash_40GiB": "stash (three products)",
    }
    products = [
        f"{_range(floors('floor_ms', 'median_ms', package))} and "
        f"{_range(floors('queued_floor_ms', 'queued_ms', package))} for {name}"
        for package, name in packages.items()
    ]
    return [
        "Time of the fastest peer to that of the fastest package: from an idle device "
        f"{_range(ratios('median_ms', lambda b, d: True))}; behind other work "
        f"{_range(ratios('queued_ms', lambda b, d: b > 1024))}, at B = 1 024 "
        f"{_range(ratios('queued_ms', lambda b, d: b == 1024))}; from B = {LARGE} on "
        f"{_range(ratios('median_ms', lambda b, d: b >= LARGE))} and "
        f"{_range(ratios('queued_ms', lambda b, d: b >= LARGE))}; there to that of the plan without a budget, which "
        f"keeps no stash, {_range(ratios('median_ms', lambda b, d: b >= LARGE, linear=True))} and "
        f"{_range(ratios('queued_ms', lambda b, d: b >= LARGE, linear=True))}.",
        f"Time of the bare products to that of the whole, D >= 512 and B >= {LARGE}, from an idle device and behind "
        f"other work: {'; '.join(products)}.",
    ]


def _linear(row: dict[str, Any]) -> bool:
    """Whether a row of the grid is of the plan without a budget, which keeps no stash."""
    return bool(row["package"] == row["strategy"] != "stash")


def beside_peers(rows: list[dict[str, Any]]) -> list[str]:
    """How much longer than packages, and than bare products, the peers take at the point to compare at."""
    one = [row for row in rows if (row["batch"], row["dim"]) == COMPARED and row["error"] is None]
    ours = [row for row in one if row["impl"] == "infcl"]
    peers = sorted((row for row in one if row["impl"] != "infcl"), key=lambda row: row["queued_ms"])
    ours_ms, least_ms = (min(row[field] for row in ours) for field in ("queued_ms", "queued_floor_ms"))
    (linear_ms,) = (row["queued_ms"] for row in ours if _linear(row))
    bases = {
        "to the bare products of stash, which no exact loss can do without": least_ms,
        "to the plan without a budget": linear_ms,
    }

    def beside(base_ms: float) -> str:
        return ", ".join(f"{row['impl']} {row['queued_ms'] / base_ms:.1f}" for row in peers)

    return [
        f"At B = {COMPARED[0]}, D = {COMPARED[1]}, scale {ours[0]['scale']:g}, behind other work, relative to the "
        f"fastest package ({ours_ms:.1f} ms): {beside(ours_ms)}.",
        *(
            f"The same relative {what} ({base_ms:.1f} ms): {beside(base_ms)}."
            for what, base_ms in bases.items()
        ),
    ]


def _range(values: list[float]) -> str:
    ends = dict.fromkeys((f"{min(values):.2f}", f"{max(values):.2f}"))
    return " to ".join(ends)


def comparisons(rows: list[dict[str, Any]], absent: dict[str, str]) -> str:
    """A table for each loss, dim, dtype with precision, and scale: who by batch, milliseconds and MiB; below, who was
    not there."""
    groups: dict[tuple[str, int, str, float], list[dict[str, Any]]] = {}
    for row in rows:
        numbers = row["dtype"] if row["precision"] == "default" else f"{row['dtype']}, {row['precision']}"
        groups.setdefault((row["loss"], row["dim"], numbers, row["scale"]), []).append(row)
    parts = []
    for (loss, dim, numbers, scale), group in groups.items():
        batches = sorted({row["batch"] for row in group})
        lines: dict[str, dict[int, dict[str, Any]]] = {}
        for row in group:
            lines.setdefault(_who(row), {})[row["batch"]] = row
        floors: dict[str, dict[int, str]] = {}
        for row in group:
            if row.get("floor_ms") is not None:
                floors.setdefault(_who(row), {})[row["batch"]] = _times(row, "floor_ms", "queued_floor_ms")
        what = f"{loss}, D = {dim}, {numbers}, scale {scale:g}: ms (queued), MiB"
        parts.append(f"\n| {what} | {' | '.join(map(str, batches))} | error of dq |\n")
        parts.append("|---" * (len(batches) + 2) + "|\n")
        for who, points in lines.items():
            cells = [_cell(points.get(batch)) for batch in batches]
            errors = [
                row["err"]["dq"] for row in points.values() if row["err"] and row["err"]["dq"] is not None
            ]
            parts.append(f"| {who} | {' | '.join(cells)} | {f'{max(errors):.1e}' if errors else ''} |\n")
        for who, found in floors.items():
            cells = " | ".join(found.get(batch, "") for batch in batches)
            parts.append(f"| products of {who} | {cells} | |\n")
    if absent:
        parts.append(f"\nAbsent: {'; '.join(f'{name} ({why})' for name, why in sorted(absent.items()))}.\n")
    return "".join(parts)


def efficiencies(rows: list[dict[str, Any]]) -> str:
    """A line for each ring: beside the same work without communication, without overlap, and beside its peers."""
    lines = [
        "GPUs", "rows each", "keys travel by", "work alone / this (queued)", "without overlap / this (queued)",
        "Inf-CL / this (queued)", "OpenCLIP / this (queued)", "memory, OpenCLIP / this",
    ]  # fmt: skip
    text = f"\n| {' | '.join(lines)} |\n{'|---' * len(lines)}|\n"
    alike: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        who = row["package"] or "as it is" if row["impl"] == "infcl" else row["impl"]
        key = (row["ranks"], row["batch"], row["transport"], row["budget_bytes"])
        alike.setdefault(key, {})[who] = row
    for (ranks, batch, *_), found in alike.items():
        if "as it is" not in found:
            continue
        own = found["as it is"]
        peers = {row["impl"]: row for row in rows if (row["ranks"], row["batch"]) == (ranks, batch)}

        def times(other: dict[str, Any] | None, own: dict[str, Any] = own, digits: int = 1) -> str:
            if other is None:
                return ""
            both = (f"{other[name] / own[name]:.{digits}f}" for name in ("median_ms", "queued_ms"))
            return "{} ({})".format(*both)

        compared = [peers.get(name) for name in ("inf_cl", "open_clip")]
        how = _who(own).removeprefix("infcl, by ").removesuffix(f", {ranks} GPUs")
        cells = [
            str(ranks), str(batch // ranks), how, times(found.get("no communication"), digits=3),
            times(found.get("no overlap"), digits=2), *map(times, compared),
            f"{compared[1]['peak_bytes'] / own['peak_bytes']:.1f}" if compared[1] else "",
        ]  # fmt: skip
        text += f"| {' | '.join(cells)} |\n"
    return text


def _who(row: dict[str, Any]) -> str:
    package, ranks = row.get("package"), row.get("ranks", 1)
    who = row["impl"] if package in (None, "generated") else f"{row['impl']}, {package}"
    how = f", by {row['transport']}" if row.get("transport") else ""
    if how and row["budget_bytes"] != row["predicted_peak_bytes"]:  # else the plan without a budget
        how += f", {row['budget_bytes'] / 1e6:.0f} MB"
    return who if ranks == 1 else f"{who}{how}, {ranks} GPUs"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["error"]:
        return row["error"].partition(":")[0]
    return f"{_times(row, 'median_ms', 'queued_ms', 'std_ms')}, {row['peak_bytes'] / 2**20:.0f}"


def _times(row: dict[str, Any], idle: str, queued: str, spread: str | None = None) -> str:
    """ "11.15 ± 0.67 (10.48)": from an idle device, and where it was measured behind other work."""
    text = f"{row[idle]:.2f}" + (f" ± {row[spread]:.2f}" if spread else "")
    return text + (f" ({row[queued]:.2f})" if row.get(queued) is not None else "")


def counters(rows: list[dict[str, Any]]) -> str:
    """A line for each kernel of a step: medians of its launches; what was not counted is blank."""
    head = (
        "| B | D | strategy | kernel | launches | us | GHz | tensor cores, % | special functions, % | shared memory, % "
        "| L2, % | memory, % | issue slots, % | warps, % |"
    )
    names = (
        "time_us", "clock_ghz", "tensor_percent", "special_percent", "shared_percent", "l2_percent", "dram_percent",
        "issue_percent", "occupancy_percent",
    )  # fmt: skip
    kernels: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        kernels.setdefault(
            tuple(str(row[name]) for name in ("batch", "dim", "strategy", "kernel")), []
        ).append(row)
    lines = []
    for kernel, launches in kernels.items():
        figures = [
            f"{statistics.median(row[name] for row in launches):.4g}" if name in launches[0] else ""
            for name in names
        ]
        lines.append(f"| {' | '.join((*kernel, str(len(launches)), *figures))} |\n")
    return f"\n{head}\n{'|---' * (5 + len(names))}|\n" + "".join(lines)


def power(rows: list[dict[str, Any]]) -> str:
    """A line for each plan, and for its products."""
    head = "| B | D | plan | of it | W allowed | ms | J | W | MHz | held down for power, % |"
    lines = []
    for row in rows:
        sizes = [str(row[name]) for name in ("batch", "dim", "strategy", "what")]
        figures = (
            f"{row[name]:.{digits}f}"
            for name, digits in zip(
                ("limit_w", "ms", "joules", "watts", "clock_mhz"), (0, 1, 1, 0, 0), strict=True
            )
        )
        lines.append(f"| {' | '.join((*sizes, *figures))} | {100 * row['held_down']:.0f} |\n")
    return f"\n{head}\n{'|---' * 10}|\n" + "".join(lines)


def ways(rows: list[dict[str, Any]]) -> str:
    """A line for each way through a part of a step."""
    lines = [
        f"| {row['batch']} | {row['dim']} | {row['strategy']} | {row['way']} "
        f"| {row['error'] or '{:.2f} ± {:.2f}'.format(row['ms'], row['std_ms'])} |\n"
        for row in rows
    ]
    return "\n| B | D | strategy | way through backward | ms |\n|---|---|---|---|---|\n" + "".join(lines)


def accuracies(rows: list[dict[str, Any]]) -> str:
    """A table of errors alone."""
    names = ("loss", "dq", "dk", "dscale")
    head = f"\n| errors: loss | B | D | scale | who | {' | '.join(names)} |\n{'|---' * 9}|\n"
    lines = []
    for row in rows:
        who = row["impl"] if row["package"] is None else f"{row['impl']}, {row['package']}"
        sizes = (row["loss"], row["batch"], row["dim"], row["scale"], who)
        errors = (f"{row['err'][name]:.1e}" for name in names)
        lines.append(f"| {' | '.join(map(str, (*sizes, *errors)))} |\n")
    return head + "".join(lines)


def _line(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"| {row.get('loss', '')} | no figure: {row['error']} |\n"
    sizes = (f"{row[name] / 2**20:.1f}" for name in ("budget_bytes", "predicted_peak_bytes", "peak_bytes"))
    error = f"{row['err']['dq']:.1e}" if row["err"] else ""
    floor = "" if row["floor_ms"] is None else _times(row, "floor_ms", "queued_floor_ms")
    cells = (
        row["loss"], row["batch"], row["dim"], row["dtype"], row["strategy"],
        _times(row, "median_ms", "queued_ms", "std_ms"), floor, *sizes, error,
    )  # fmt: skip
    return "| " + " | ".join(str(cell) for cell in cells) + " |\n"


if __name__ == "__main__":
    sys.exit(main())
