"""The measurement format, version 1: rows, in files with board, versions and command, and as a table.

Times are in milliseconds, sizes in bytes beyond the inputs, errors are norms relative to fp64; None means no figure.
A row whose `error` is not None has no figures of time or memory.
"""

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.errors import InputError
from infcl_gen.files import checksum, write_file
from infcl_gen.inputs.text import check_text, show
from infcl_gen.version import __version__, installed

Row = dict[str, Any]
Rows = list[Row]
SCHEMA_VERSION = 1
SIZES = ("loss", "batch", "keys", "dim", "dtype", "precision")
IDENTITY = (*SIZES, "ranks", "scale")  # the fields that all rows of a point share
# What identifies a point besides, and what rows leave out. Without gradients a step is forward alone.
NAMED = {"frozen": "none", "prefixes": "", "gradients": True}
RESULTS = ("loss", "dq", "dk", "dscale")  # the results whose errors are computed
GENERATED = "generated"  # folder, and `package` in rows, of packages generated for one measurement
FIELDS = (  # in the order of a row
    *(*SIZES, "ranks", "impl", "package", "scale"),
    *("strategy", "budget_bytes", "predicted_peak_bytes", "predicted_ms", "predicted_queued_ms"),
    *("median_ms", "mean_ms", "std_ms", "repeats", "queued_ms", "queued_std_ms"),
    *("peak_bytes", "floor_ms", "queued_floor_ms", "err", "error"),
)
COLUMNS = (  # titles in a table, and their fields
    *(("median ms", "median_ms"), ("mean", "mean_ms"), ("std", "std_ms"), ("runs", "repeats"), ("ratio", "median_ms")),
    *(("floor ms", "floor_ms"), ("queued ms", "queued_ms"), ("std", "queued_std_ms"), ("ratio", "queued_ms")),
    *(("floor ms", "queued_floor_ms"), ("MiB", "peak_bytes")),
)


def planned_figures(spec: Mapping[str, Any], times: bool) -> Row:
    """A row's fields from the plan; `times` adds predicted times, for a run at the planned size."""
    plan, predicted = spec["plan"], spec["predicted"]
    queued = times and spec["device"]["target"] != "cpu"
    return {
        "strategy": plan["strategy"],
        "budget_bytes": plan["budget_bytes"],
        "predicted_peak_bytes": predicted["peak_bytes"],
        "predicted_ms": 1e3 * predicted["time_s"] if times else None,
        "predicted_queued_ms": 1e3 * predicted["queued_s"] if queued else None,
    }


def lost(path: Path, absent: Iterable[str]) -> list[str]:
    """Implementations that a written file has measured, and that another measurement there would lose."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return sorted({row["impl"] for row in rows}.intersection(absent))


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write a `measurement` or `document` atomically. Raises ValueError for NaN or infinity, OSError."""
    write_file(path, f"{json.dumps(results, indent=1, allow_nan=False)}\n".encode())


def read_results(name: str) -> dict[str, Any]:
    """The `measurement` or `document` in a file. Raises InputError unless the file is whole and unchanged."""
    try:
        found = json.loads(Path(check_text("--results", name)).read_text(encoding="utf-8"))
        whole = found["schema_version"] == SCHEMA_VERSION and found["checksum"] == checksum(found["rows"])
        whole &= {"board", "versions", "command"} <= found.keys()
        if whole and all(row.keys() >= set(FIELDS) for row in found["rows"]):
            return dict(found)
    except OSError as error:
        raise InputError(f"--results: cannot read {show(name)} ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise InputError(f"--results: {show(name)} is not an unchanged file that infcl-gen bench --output wrote")


def measured_before(path: Path, command: str, libraries: Iterable[str] = ()) -> tuple[Rows, dict[str, str], str]:
    """Rows and absent peers of a results file, empty without the file; and its commands joined with `command`.

    Raises InputError if the file is of another board or of other versions.
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
    """The contents of a results file. `absent` maps peers that did not run to the reason; the versions of the
    distributions `libraries` are listed."""
    return {**document(rows, command, board(), versions(libraries)), "absent": dict(absent)}


def document(
    rows: Sequence[Row], command: str, board: str, versions: Mapping[str, str], **marks: Any
) -> dict[str, Any]:
    """Rows with their origin and checksum; `marks` are further keys of the document."""
    origin = {"board": board, "versions": versions, "command": command}
    return {"schema_version": SCHEMA_VERSION, **marks, **origin, "checksum": checksum(rows), "rows": list(rows)}


def board() -> str:
    """The GPU's name as its driver gives it, else the host's architecture."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def versions(libraries: Iterable[str] = ()) -> dict[str, str]:
    """Versions that a measurement depends on."""
    import torch

    torch_versions = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    ours = {"infcl_gen": __version__, "python": platform.python_version()}
    return installed("triton", *libraries) | ours | torch_versions


def table(rows: Rows) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and one line of text per row, with times relative to the fastest package at its point. Fields beyond the
    measurement format become columns of their own."""
    more = dict.fromkeys(name for row in rows for name in row if name not in (*FIELDS, "transport", "edited"))
    titles = ("loss", "B", "D", "who", *(title for title, _ in COLUMNS), *(f"err {name}" for name in RESULTS))
    return (*titles, *more, ""), [_line(row, rows, more) for row in rows]


def absences(absent: Mapping[str, str]) -> list[str]:
    """A line for each reason by which peers did not run, with their names."""
    reasons: dict[str, list[str]] = {}
    for name, why in absent.items():
        reasons.setdefault(why, []).append(name)
    return [f"did not run ({why}): {', '.join(names)}" for why, names in reasons.items()]


def label(row: Mapping[str, Any]) -> str:
    """The contestant's name in tables and plots."""
    return row["impl"] if row["package"] in (None, GENERATED) else f"{row['impl']} {row['package']}"


def identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What all rows of a point share. Rows name what NAMED has only where it is not the usual."""
    return (*(row[name] for name in IDENTITY), *(row.get(name, usual) for name, usual in NAMED.items()))


def named(row: Mapping[str, Any]) -> str:
    """What a row names besides, behind its loss or contestant: ", frozen key", ", gradients false"."""
    return "".join(
        f", {name} {str(row[name]).lower()}" for name, usual in NAMED.items() if row.get(name, usual) != usual
    )


def error_texts(row: Mapping[str, Any]) -> list[str]:
    """The errors of RESULTS in a row, "-" where there is none."""
    return ["-" if error is None else f"{error:.1e}" for error in map((row["err"] or {}).get, RESULTS)]


def _line(row: Row, rows: Rows, more: Iterable[str]) -> tuple[str, ...]:
    sizes = (row["loss"] + named(row), str(row["batch"]), str(row["dim"]), label(row) + " (edited)" * ("edited" in row))
    figures = [_figure(title, name, row, rows) if row["error"] is None else "" for title, name in COLUMNS]
    others = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in (row.get(n, "") for n in more)]
    return (*sizes, *figures, *error_texts(row), *others, row["error"] or "")


def _figure(title: str, name: str, row: Row, rows: Rows) -> str:
    value = row[name]
    if value is None:
        return "-"
    if title == "runs":
        return str(value)
    if title != "ratio":
        return f"{value / 2**20:.1f}" if title == "MiB" else f"{value:.2f}"
    # On several ranks only the unchanged package counts: the other ways to carry messages are not of use to anybody.
    packages = [other for other in rows if other["impl"] == "infcl" and (row["ranks"] == 1 or other["package"] is None)]
    times = [other[name] for other in packages if identity(other) == identity(row)]
    fastest = min(filter(None, times), default=None)
    return f"{value / fastest:.2f}" if fastest else "-"
