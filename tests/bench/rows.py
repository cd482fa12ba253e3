"""What a row of measurements is, and rows to draw and to write."""

import json
from pathlib import Path
from typing import Any

from infcl_gen.bench.measure import measure_point
from infcl_gen.bench.point import Point, point_of
from infcl_gen.emission import read_package

# The measurement format, version 1, and what this project adds to a row.
FIELDS = {
    *("loss", "batch", "keys", "dim", "dtype", "precision", "ranks", "impl", "scale"),
    *("median_ms", "mean_ms", "std_ms", "repeats", "peak_bytes", "budget_bytes", "predicted_peak_bytes"),
    *("predicted_ms", "floor_ms", "err", "error"),
}
ADDED = {"strategy", "package", "predicted_queued_ms", "queued_ms", "queued_std_ms", "queued_floor_ms"}
FIGURES = ("median_ms", "mean_ms", "std_ms", "repeats", "peak_bytes")


def assert_is_row(row: dict[str, Any]) -> None:
    assert set(row) == FIELDS | ADDED
    if row["error"] is None:
        assert all(isinstance(row[name], int | float) and row[name] >= 0 for name in FIGURES)
        assert row["median_ms"] > 0 and row["peak_bytes"] > 0
    else:
        assert isinstance(row["error"], str) and row["error"].isprintable()
        assert all(row[name] is None for name in FIGURES)
    json.dumps(row, allow_nan=False)


def rows_of_several_points() -> list[dict[str, Any]]:
    rows = []
    for dim in (64, 128):
        for batch in (1024, 4096, 6000):
            for index, name in enumerate(("infcl", "torch", "inf_cl")):
                row = {"loss": "clip", "batch": batch, "keys": batch, "dim": dim, "dtype": "bf16"}
                row |= {
                    "impl": name,
                    "precision": "default",
                    "scale": 14.3,
                    "package": None if index else "generated",
                    "strategy": None,
                    "err": None,
                }
                row |= {"median_ms": batch * (1.0 + index), "std_ms": 0.5, "peak_bytes": batch << 20}
                row |= {"floor_ms": None if index else 1.25, "error": None}
                rows.append(row)
    rows[2] |= {"error": "out of memory", "median_ms": None, "std_ms": None, "peak_bytes": None}
    rows[0]["err"] = {"loss": 1e-4, "dq": 2e-3, "dk": None, "dscale": None}
    return rows


def measured_here(point: Point) -> list[dict[str, Any]]:
    """The rows of everybody at a point, measured in this process."""
    rows = {name: row for name, row in measure_point(point) if row is not None}
    return [rows[name] for name in point.contestants]


def measure_package(package: Path, batch: int | None = None, repeats: int = 10, errors: bool = False) -> dict[str, Any]:
    """The row of one package alone at `batch` queries (default: the planned ones)."""
    (row,) = measured_here(point_of([read_package(package)], batch, rounds=repeats, errors=errors))
    return row
