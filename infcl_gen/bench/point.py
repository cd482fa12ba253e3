"""One size, and who is measured there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.bench.results import FIELDS, IDENTITY
from infcl_gen.emission.package import Package
from infcl_gen.errors import InputError
from infcl_gen.inputs.text import show

ROUNDED = "rounded fp32"


@dataclasses.dataclass(frozen=True)
class Point:
    """One size, and who is measured there: packages by their folders, and peers by name.

    `rounds` are at most that many runs of each; who has taken its share of `seconds` stops after a few of them.
    `exact` is a package whose loss gives the fp64 results that errors are relative to; None: no errors are computed.
    `edited` are packages whose files are not as generated, which their rows say.
    `feature_dtype` is `dtype`, or fp32 for everybody under autocast to it; the rows' precision then says so. "rounded
    fp32" holds numbers of `dtype`: casting, whose errors are the same for everybody, then makes none.
    """

    packages: tuple[str, ...]
    peers: tuple[str, ...]
    target: str
    loss: str
    batch: int
    keys: int
    dim: int
    dtype: str
    feature_dtype: str
    precision: str
    scale: float
    rounds: int
    seconds: float
    exact: str | None
    edited: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def device(self) -> str:
        return "cpu" if self.target == "cpu" else "cuda"

    @property
    def contestants(self) -> tuple[str, ...]:
        """Packages first."""
        return (*self.packages, *self.peers)

    @property
    def autocast(self) -> bool:
        return self.feature_dtype != self.dtype

    def only(self, names: Collection[str]) -> Point:
        """The same point for some of its contestants."""
        packages, peers = (tuple(name for name in group if name in names) for group in (self.packages, self.peers))
        return dataclasses.replace(self, packages=packages, peers=peers)

    def row(self, name: str) -> dict[str, Any]:
        """A contestant's row before anything is known of it: all figures are None."""
        row = dict.fromkeys(FIELDS) | {field: getattr(self, field) for field in IDENTITY}
        row["precision"] = row_precision(self.precision, self.dtype, self.feature_dtype)
        row["impl"], row["package"] = ("infcl", Path(name).name) if name in self.packages else (name, None)
        return {**row, "edited": True} if name in self.edited else row


def row_precision(precision: str, dtype: str, feature_dtype: str | None) -> str:
    """What rows say of their precision: that of the packages, unless everybody casts features of another dtype."""
    return precision if feature_dtype in (None, dtype) else f"autocast from {feature_dtype}"


def point_of(
    packages: Sequence[Package],
    batch: int | None = None,
    peers: Iterable[str] = (),
    scale: float = 14.3,
    rounds: int = 10,
    seconds: float = math.inf,
    errors: bool = False,
    feature_dtype: str | None = None,
    ranks: int = 1,
) -> Point:
    """The point at `batch` queries (default: the planned ones) of packages for one loss, dim, dtype and device.

    Raises InputError if they differ in that, are planned for other than `ranks` devices, or for fewer queries; and for
    a `feature_dtype` that is neither the packages' nor fp32 under autocast to it.
    """
    first = packages[0].spec
    problem = first["problem"]
    narrow = problem["dtype"] in ("bf16", "fp16")
    if feature_dtype not in (None, problem["dtype"]) and not (narrow and feature_dtype in ("fp32", ROUNDED)):
        valid = f"{problem['dtype']}, or fp32 under autocast to it" if narrow else problem["dtype"]
        raise InputError(f"--features: {show(feature_dtype)} is not what the packages take; valid: {valid}")
    queries = batch or problem["batch_size"]
    for package in packages:
        other = package.spec
        for name, ours, theirs in (
            ("loss", first["loss"], other["loss"]),
            ("device", first["device"]["target"], other["device"]["target"]),
            *((name, problem[name], other["problem"][name]) for name in ("dim", "dtype", "precision", "keys")),
        ):
            if ours != theirs:
                raise InputError(
                    f"--package: {package.path} is for another {name} than {packages[0].path}; give packages for one"
                )
        planned = other["plan"]["world_size"]
        if planned != ranks:
            raise InputError(
                f"--package: {package.path} was planned for {planned} device(s), not {ranks}; give --ranks {planned}"
            )
        if queries > other["problem"]["batch_size"]:
            raise InputError(
                f"--batches: {queries} is more than the {other['problem']['batch_size']} that {package.path} is for"
            )
    return Point(
        packages=tuple(str(package.path) for package in packages),
        peers=tuple(peers),
        target=first["device"]["target"],
        loss=first["loss"]["name"],
        batch=queries,
        keys=queries if problem["keys"] in (None, problem["batch_size"]) else problem["keys"],
        dim=problem["dim"],
        dtype=problem["dtype"],
        feature_dtype=feature_dtype or problem["dtype"],
        precision=problem["precision"],
        scale=scale,
        rounds=rounds,
        seconds=seconds,
        exact=next((str(package.path) for package in packages if errors and "loss.py" not in package.edited), None),
        edited=tuple(str(package.path) for package in packages if package.edited),
        ranks=ranks,
    )
