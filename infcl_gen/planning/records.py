"""Tuning records: what was measured on each board, in <folder>/<board>.json.

A record's settings are added to the user's, with the pair `records=measured`. It is stale when a plan with them runs
kernels of another `revision`, or decides anything else that their time depends on (`timed_settings`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infcl_gen.errors import InfclError, InputError
from infcl_gen.files import checksum, lock, lock_file_of, record_folders, write_file
from infcl_gen.hardware import Cluster
from infcl_gen.inputs.overrides import Overrides, parse_overrides
from infcl_gen.inputs.problem import Problem
from infcl_gen.kernels import families
from infcl_gen.losses import LossSpec, spec_as_dict
from infcl_gen.planning.planner import Plan

SCHEMA_VERSION = 3
SWEEP_REVISION = 1  # as `Family.revision`, of the torch strategy, which runs no kernel of a family
STATUSES = (
    *("timed", "illegal", "does not compile", "spills", "wrong", "crashed", "hung", "out of memory"),
    *("slower", "not timed"),  # slower after two rounds; ranked too low, or the time was up
)
_LARGEST_FILE_BYTES = 256 << 20

Settings = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Key:
    """The problem that was measured, with the user's settings and without the tuner's."""

    board: str
    loss: str
    loss_digest: str
    batch_size: int
    keys: int | None
    dim: int
    dtype: str
    precision: str
    devices: int
    nodes: int
    memory_budget_bytes: int | None
    target: str
    settings: Settings

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A candidate: its settings beside the user's, its status (one of STATUSES), and all its times."""

    family: str
    settings: Settings
    status: str
    detail: str = ""
    predicted_ms: float | None = None
    times_ms: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Record:
    """The outcome of a tuning run."""

    key: Key
    settings: Settings
    digest: str  # of the package that was timed with these settings
    timed: Settings  # `timed_settings` of its plan
    revisions: dict[str, int]
    complete: bool  # whether all families were tuned
    families: tuple[str, ...]  # that were tuned
    versions: dict[str, str]
    candidates: tuple[Candidate, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """A record that fits, its file, and the plan with its settings."""

    record: Record
    file: Path
    plan: Plan


def record_key(problem: Problem, loss: LossSpec, cluster: Cluster) -> Key:
    """The key of a problem, without settings that the tuner chose."""
    names = ("batch_size", "keys", "dim", "dtype", "precision", "devices", "nodes", "memory_budget_bytes")
    same: dict[str, Any] = {name: getattr(problem, name) for name in names}
    profile, own = cluster.profile, own_settings(problem.settings).pairs
    return Key(profile.name, loss.name, _loss_digest(loss), target=profile.target, settings=own, **same)


@functools.lru_cache(maxsize=64)
def _loss_digest(loss: LossSpec) -> str:
    literals = spec_as_dict(loss)
    digested = (
        literals["formula"],
        literals["positives"],
        *literals.get("prefixes", ()),
        *["renormalise"] * loss.renormalise,
    )
    return hashlib.sha256(repr(digested).encode()).hexdigest()[:16]


def fixed_by_user(settings: Overrides) -> list[str]:
    """The keys that the user sets and the tuner would choose. `products` does not count: the tuner keeps it."""
    return [key for key in sorted(settings.keys) if "." in key or key in ("panel_rows", "panel_keys")]


def own_settings(settings: Overrides) -> Overrides:
    """The user's part of a problem's settings: without those of a record, which may include `products`."""
    own = dataclasses.replace(settings, records=None)
    if settings.records != "measured":
        return own
    return dataclasses.replace(own, products=None, panel_rows=None, panel_keys=None, blocks=())


def measured_settings(own: Overrides, chosen: Settings) -> Overrides:
    """The user's settings and those of a record."""
    return parse_overrides((*dataclasses.replace(own, records="measured").pairs, *chosen))


def timed_settings(plan: Plan) -> Settings:
    """The decisions of a plan that its kernels' time depends on, as pairs of text."""
    names = ["strategy", "descriptors", "replay", "stash_rows"]
    names += ["forward_rows", "forward_keys", "panel_rows", "panel_keys"]
    names += ["hopper_stages"] * (plan.hopper_stages > 0)
    pairs = [("products", plan.product_by), *((name, str(getattr(plan, name))) for name in names)]
    for kernel, block in plan.blocks.items():
        pairs += ((f"{kernel}.{name}", str(size)) for name, size in vars(block).items())
    return tuple(sorted(pairs))


def revisions(plan: Plan) -> dict[str, int]:
    """The revision of each family of kernels that a plan runs."""
    return {each.template: each.revision for each in families(plan) if each.revision} or {"sweep": SWEEP_REVISION}


def lookup(problem: Problem, key: Key, plan_of: Callable[[Problem], Plan]) -> Found | str:
    """The first record for `key` in `record_folders` that is not stale, or the reason why there is none, on one line.

    plan_of: the plan for a problem with a record's settings. A damaged file, or settings without a plan, are reasons.
    """
    if problem.settings.records:
        return f"records are not looked up with --set records={problem.settings.records}"
    if blocks := fixed_by_user(problem.settings):
        return f"the problem sets {', '.join(blocks)} itself"
    others: list[Key] = []
    reasons: list[str] = []
    for file in (folder / f"{key.board}.json" for folder in record_folders()):
        try:
            records = read_records(file)
        except InputError as error:
            reasons.append(str(error))
            continue
        others += (record.key for record in records)
        for record in (each for each in records if each.key == key):
            settings = measured_settings(problem.settings, record.settings)
            try:
                plan = plan_of(dataclasses.replace(problem, settings=settings))
            except InfclError as error:
                reasons.append(f"the record in {file.name} does not give a plan any more: {error}")
                continue
            if not (changed := staleness(record, plan)):
                return Found(record, file, plan)
            reasons.append(f"the record in {file.name} is stale: {changed}; infcl-gen tune measures again")
    return "; ".join(reasons) or _difference(key, others)


def staleness(record: Record, plan: Plan) -> str:
    """How a plan differs from the timed one; "" if it does not."""
    then = dict(record.timed) | {f"revision of {name}": str(n) for name, n in record.revisions.items()}
    now = dict(timed_settings(plan)) | {f"revision of {name}": str(n) for name, n in revisions(plan).items()}
    differing = sorted(key for key in {*then, *now} if then.get(key) != now.get(key))
    return ", ".join(f"{key} was {then.get(key, 'none')}, now {now.get(key, 'none')}" for key in differing)


def read_records(file: Path) -> tuple[Record, ...]:
    """The records of a file, none if it is absent. Raises InputError if it is damaged or of another schema."""
    try:
        if file.stat().st_size > _LARGEST_FILE_BYTES:
            raise InputError(f"{file}: too large for a file of tuning records")
        return _decoded(file.read_bytes(), str(file))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error


@functools.lru_cache(maxsize=2)  # a file of each of `record_folders`
def _decoded(content: bytes, file: str) -> tuple[Record, ...]:
    import msgspec

    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: damaged tuning records (not JSON)") from error
    if not isinstance(table, dict) or table.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"{file}: not tuning records of schema version {SCHEMA_VERSION}")
    if table.get("checksum") != checksum(table.get("records")):
        raise InputError(f"{file}: damaged tuning records (their checksum does not fit)")
    try:
        return msgspec.convert(table["records"], tuple[Record, ...], strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InputError(f"{file}: not tuning records: {error}") from error


def store(record: Record, folder: Path) -> Path:
    """Put a record into its board's file, under a lock; a damaged file is renamed to *.damaged.

    Raises InputError (the folder cannot be written), LockTimeoutError.
    """
    file = folder / f"{record.key.board}.json"
    with lock(lock_file_of(Path(os.path.abspath(file))), f"--records {file}"):
        try:
            records = read_records(file)
        except InputError:
            records = ()
            with contextlib.suppress(OSError):
                os.replace(file, file.with_suffix(".damaged"))
        kept = [record, *(other for other in records if other.key != record.key)]
        write_records(file, sorted(kept, key=lambda each: repr(each.key)))
    return file


def write_records(file: Path, records: Sequence[Record]) -> None:
    """Write a file of records atomically. Raises InputError."""
    literals = [dataclasses.asdict(record) for record in records]
    texts = []
    for record in literals:  # one candidate per line
        lines = ",\n  ".join(map(json.dumps, record["candidates"]))
        head = json.dumps({name: value for name, value in record.items() if name != "candidates"})
        texts.append(f'{head[:-1]}, "candidates": [\n  {lines}\n]}}')
    head = f'"schema_version": {SCHEMA_VERSION}, "checksum": "{checksum(literals)}"'
    text = ",\n".join(texts)
    try:
        write_file(file, f'{{{head}, "records": [\n{text}\n]}}\n'.encode())
    except OSError as error:
        raise InputError(f"--records {file.parent}: cannot write there ({error.strerror})") from error


def _difference(key: Key, others: Sequence[Key]) -> str:
    if not others:
        return f"no problem has been tuned on {key.board}"
    here = vars(key)
    differing = [[name for name in here if here[name] != getattr(other, name)] for other in others]
    names, nearest = min(zip(differing, others, strict=True), key=lambda pair: len(pair[0]))
    told = [f"{name} is {here[name]!r}, there {getattr(nearest, name)!r}" for name in names if name != "loss_digest"]
    fields = ", ".join(told) or f"the loss {key.loss!r} has another formula"
    return f"no record on {key.board} fits; in the nearest: {fields}"
