"""The measurement format, version 1: rows of figures, with board, versions and command, in files that are written at
once.

Times are in milliseconds, sizes in bytes beyond the inputs, errors are norms relative to fp64; None where there is no
figure. A row whose `error` is not None has no figures of time or memory.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.errors import InputError
from infcl_gen.files import checksum, write_file
from infcl_gen.version import __version__

SCHEMA_VERSION = 1
SIZES = ("loss", "batch", "keys", "dim", "dtype", "precision")
IDENTITY = (*SIZES, "ranks", "scale")  # of a point, in its rows


def blank_row(sizes: Mapping[str, Any], ranks: int, impl: str, package: str | None, scale: float) -> dict[str, Any]:
    """The fields of the measurement format in their order; what is to be measured is None."""
    times = ("median_ms", "mean_ms", "std_ms", "repeats", "queued_ms", "queued_std_ms")
    figures = (*times, "peak_bytes", "floor_ms", "queued_floor_ms", "err", "error")
    planned = ("strategy", "budget_bytes", "predicted_peak_bytes", "predicted_ms", "predicted_queued_ms")
    who = {"ranks": ranks, "impl": impl, "package": package, "scale": scale}
    return {**sizes, **who, **dict.fromkeys((*planned, *figures))}


def write_results(
    path: Path,
    rows: Sequence[dict[str, Any]],
    command: str,
    absent: Mapping[str, str] | None = None,
    libraries: Iterable[str] = (),
) -> None:
    """Writes the rows with board and versions, atomically, with a checksum of the rows inside.

    `absent` says of contestants that are not in the rows why; `libraries` are distributions whose versions count.
    """
    text = json.dumps(measurement(rows, command, absent, libraries), indent=1, allow_nan=False)
    write_file(path, f"{text}\n".encode())


def measured_before(
    path: Path, command: str, libraries: Iterable[str] = ()
) -> tuple[list[dict[str, Any]], dict[str, str], str]:
    """Rows and absent peers of a results file that `command` adds to (nothing if there is none), and what to call the
    command of both.

    Raises InputError if it is of another board or of other versions.
    """
    if not path.exists():
        return [], {}, command
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for name, now in (("board", board()), ("versions", versions(libraries))):
        if earlier[name] != now:
            raise InputError(
                f"{path}: was measured with another {name} ({earlier[name]}, now {now}); give another --output"
            )
    commands = dict.fromkeys([*earlier["command"].split("; "), command])
    return earlier["rows"], earlier.get("absent", {}), "; ".join(commands)


def measurement(
    rows: Sequence[dict[str, Any]], command: str, absent: Mapping[str, str] | None = None, libraries: Iterable[str] = ()
) -> dict[str, Any]:
    """The contents of a results file."""
    found = {
        "schema_version": SCHEMA_VERSION,
        "board": board(),
        "versions": versions(libraries),
        "command": command,
        "checksum": checksum(rows),
        "rows": list(rows),
    }
    return found if absent is None else {**found, "absent": dict(absent)}


def board() -> str:
    """The GPU's name, as its driver gives it."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def versions(libraries: Iterable[str] = ()) -> dict[str, str]:
    """What a measurement depends on."""
    import torch

    found = {"infcl_gen": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if importlib.util.find_spec("triton") is not None:  # not on every system
        import triton

        found["triton"] = triton.__version__
    found["cuda"] = str(torch.version.cuda)
    for name in libraries:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.setdefault(name, importlib.metadata.version(name))
    return found
