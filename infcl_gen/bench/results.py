"""The measurement format, version 1: rows of figures, in files with board, versions and command; and as a table.

Times are in milliseconds, sizes in bytes beyond the inputs, errors are norms relative to fp64; None where there is no
figure. A row whose `error` is not None has no figures of time or memory.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.errors import InputError
from infcl_gen.files import checksum, write_file
from infcl_gen.version import __version__, installed

Rows = list[dict[str, Any]]
SCHEMA_VERSION = 1
SIZES = ("loss", "batch", "keys", "dim", "dtype", "precision")
IDENTITY = (*SIZES, "ranks", "scale")  # of a point, in its rows
RESULTS = ("loss", "dq", "dk", "dscale")  # what errors are of
GENERATED = "generated"  # the folder, and so the name in a row, of a package made for one measurement
FIELDS = (  # of a row, in their order; what is to be measured is None
    *(*SIZES, "ranks", "impl", "package", "scale"),
    *("strategy", "budget_bytes", "predicted_peak_bytes", "predicted_ms", "predicted_queued_ms"),
    *("median_ms", "mean_ms", "std_ms", "repeats", "queued_ms", "queued_std_ms"),
    *("peak_bytes", "floor_ms", "queued_floor_ms", "err", "error"),
)
COLUMNS = (
    *(("median ms", "median_ms"), ("mean", "mean_ms"), ("std", "std_ms"), ("runs", "repeats"), ("ratio", "median_ms")),
    *(("floor ms", "floor_ms"), ("queued ms", "queued_ms"), ("std", "queued_std_ms"), ("ratio", "queued_ms")),
    *(("floor ms", "queued_floor_ms"), ("MiB", "peak_bytes")),
)  # titles in a table, and the fields below them


def planned_figures(spec: Mapping[str, Any], times: bool) -> dict[str, Any]:
    """What a package's row says of its plan; `times`: also what it takes, for a run as it is planned."""
    plan, predicted = spec["plan"], spec["predicted"]
    behind = times and spec["device"]["target"] != "cpu"
    return {
        "strategy": plan["strategy"],
        "budget_bytes": plan["budget_bytes"],
        "predicted_peak_bytes": predicted["peak_bytes"],
        "predicted_ms": 1e3 * predicted["time_s"] if times else None,
        "predicted_queued_ms": 1e3 * predicted["queued_s"] if behind else None,
    }


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Writes what `measurement` or `document` gives, atomically."""
    write_file(path, f"{json.dumps(results, indent=1, allow_nan=False)}\n".encode())


def measured_before(path: Path, command: str, libraries: Iterable[str] = ()) -> tuple[Rows, dict[str, str], str]:
    """Rows and absent peers of a results file that `command` adds to (nothing if there is none), and what to call the
    command of both.

    Raises InputError if it is of another board or of other versions.
    """
    if not path.exists():
        return [], {}, command
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for name, now in (("board", board()), ("versions", versions(libraries))):
        if (was := earlier[name]) != now:
            raise InputError(f"{path}: was measured with another {name} ({was}, now {now}); give another --output")
    commands = dict.fromkeys([*earlier["command"].split("; "), command])
    return earlier["rows"], earlier.get("absent", {}), "; ".join(commands)


def measurement(rows: Rows, command: str, absent: Mapping[str, str], libraries: Iterable[str] = ()) -> dict[str, Any]:
    """The contents of a results file: the rows with board and versions, and their checksum.

    `absent` says of contestants that are not in the rows why; `libraries` are distributions whose versions count.
    """
    return {**document(rows, command, board(), versions(libraries)), "absent": dict(absent)}


def document(
    rows: Sequence[dict[str, Any]], command: str, board: str, versions: Mapping[str, str], **marks: Any
) -> dict[str, Any]:
    """Rows with where they come from; `marks` say what else they are."""
    origin = {"board": board, "versions": versions, "command": command}
    return {"schema_version": SCHEMA_VERSION, **marks, **origin, "checksum": checksum(rows), "rows": list(rows)}


def board() -> str:
    """The GPU's name, as its driver gives it."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def versions(libraries: Iterable[str] = ()) -> dict[str, str]:
    """What a measurement depends on."""
    import torch

    ours = {"infcl_gen": __version__, "python": platform.python_version()}
    build = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    return installed("triton", *libraries) | ours | build


def table(rows: Rows) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and lines of text: one per row, with times relative to the fastest package at its point. What a row has
    beyond the measurement format has columns of its own."""
    more = dict.fromkeys(name for row in rows for name in row if name not in (*FIELDS, "transport", "edited"))
    titles = ("loss", "B", "D", "who", *(title for title, _ in COLUMNS), *(f"err {name}" for name in RESULTS))
    return (*titles, *more, ""), [_line(row, rows, more) for row in rows]


def label(row: Mapping[str, Any]) -> str:
    """Who a row is of."""
    return row["impl"] if row["package"] in (None, GENERATED) else f"{row['impl']} {row['package']}"


def _line(row: dict[str, Any], rows: Rows, more: Iterable[str]) -> tuple[str, ...]:
    who = label(row) + " (edited)" * ("edited" in row)
    figures = [_figure(title, name, row, rows) if row["error"] is None else "" for title, name in COLUMNS]
    errors = [f"{error:.1e}" if error is not None else "-" for error in map((row["err"] or {}).get, RESULTS)]
    others = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in (row.get(n, "") for n in more)]
    return (row["loss"], str(row["batch"]), str(row["dim"]), who, *figures, *errors, *others, row["error"] or "")


def _figure(title: str, name: str, row: dict[str, Any], rows: Rows) -> str:
    """A ratio is to the fastest package at the point; of a ring, to the package as it is, since the other ways to carry
    its messages compute nothing of use."""
    value = row[name]
    if value is None or title == "runs":
        return "-" if value is None else str(value)
    if title != "ratio":
        return f"{value / 2**20:.1f}" if title == "MiB" else f"{value:.2f}"
    packages = [other for other in rows if other["impl"] == "infcl" and (row["ranks"] == 1 or other["package"] is None)]
    times = [other[name] for other in packages if all(other[field] == row[field] for field in IDENTITY)]
    fastest = min(filter(None, times), default=None)
    return f"{value / fastest:.2f}" if fastest else "-"
