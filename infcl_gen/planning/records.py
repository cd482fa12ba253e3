"""What was measured: for each board a file of tuning records, each with its key in clear.

    store     Record -> <folder>/<board>.json, under a lock, complete or unchanged at every moment
    lookup    Key -> Found, or what differs, as text

A candidate is a set of `--set` pairs and nothing else, so a record is applied by adding its settings to the problem's
own; the pair `records=measured` then stands among them, which says where they come from. A record is stale when
today's plan with its settings would run other kernels (their `revision`) or the same ones otherwise (`timed_settings`).
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
from typing import TYPE_CHECKING, Any

from infcl_gen.errors import InfclError, InputError
from infcl_gen.files import checksum, lock, lock_file_of, write_file
from infcl_gen.inputs.overrides import Overrides, parse_overrides
from infcl_gen.kernels import families
from infcl_gen.losses import spec_as_dict

if TYPE_CHECKING:
    from infcl_gen.hardware import Cluster
    from infcl_gen.inputs.problem import Problem
    from infcl_gen.losses import LossSpec
    from infcl_gen.planning.planner import Plan

SCHEMA_VERSION = 3
SWEEP_REVISION = 1  # of plain torch, as a kernel's `Family.revision`; what the host does around kernels does not count
STATUSES = (
    *("timed", "illegal", "does not compile", "spills", "wrong", "crashed", "hung", "out of memory"),
    *("slower", "not timed"),  # given up after two rounds; ranked too low, or the time was up
)
_LARGEST_FILE_BYTES = 256 << 20

Settings = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Key:
    """What a measurement is for: the problem as resolved, without what the tuner chooses. `settings`: the user's."""

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
    """One candidate: its settings (over the user's own), what became of it (STATUSES), and every time taken."""

    family: str
    settings: Settings
    status: str
    detail: str = ""
    predicted_ms: float | None = None
    times_ms: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Record:
    """The outcome of a tuning run. `digest` is that of the package that was timed with `settings`, `timed` all that its
    plan had decided, `revisions` those of its kernels. `families` are those that were tuned, and `complete` says
    whether these are all."""

    key: Key
    settings: Settings
    digest: str
    timed: Settings
    revisions: dict[str, int]
    complete: bool
    families: tuple[str, ...]
    versions: dict[str, str]
    candidates: tuple[Candidate, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """A record that fits, and the plan with its settings; `file` holds it."""

    record: Record
    file: Path
    plan: Plan


def record_key(problem: Problem, loss: LossSpec, cluster: Cluster) -> Key:
    """The key of a problem; settings that the tuner chose (`records=measured`) are not part of it."""
    names = ("batch_size", "keys", "dim", "dtype", "precision", "devices", "nodes", "memory_budget_bytes")
    same: dict[str, Any] = {name: getattr(problem, name) for name in names}
    profile, own = cluster.profile, own_settings(problem.settings).pairs
    return Key(profile.name, loss.name, _loss_digest(loss), target=profile.target, settings=own, **same)


@functools.lru_cache(maxsize=64)
def _loss_digest(loss: LossSpec) -> str:
    literals = spec_as_dict(loss)
    return hashlib.sha256(repr((literals["formula"], literals["positives"])).encode()).hexdigest()[:16]


def fixed_by_user(settings: Overrides) -> list[str]:
    """The keys of `--set` among these that the tuner chooses, but for `products`: it takes a user's as given."""
    return [key for key in sorted(settings.keys) if "." in key or key in ("panel_rows", "panel_keys")]


def own_settings(settings: Overrides) -> Overrides:
    """The user's own among a problem's settings. Measured ones are not; nor is a `products` beside them."""
    own = dataclasses.replace(settings, records=None)
    if settings.records != "measured":
        return own
    return dataclasses.replace(own, products=None, panel_rows=None, panel_keys=None, blocks=())


def measured_settings(own: Overrides, chosen: Settings) -> Overrides:
    """The user's settings and those chosen by measurement, which `records` says of them."""
    pairs = dataclasses.replace(own, records="measured").pairs
    return parse_overrides((*pairs, *chosen))


def timed_settings(plan: Plan) -> Settings:
    """What a plan has decided that its kernels' time depends on, as pairs of text."""
    names = ["strategy", "products", "descriptors", "replay", "stash_rows"]
    names += ["forward_rows", "forward_keys", "panel_rows", "panel_keys"]
    names += ["hopper_stages"] * (plan.hopper_stages > 0)
    pairs = [(name, str(getattr(plan, name))) for name in names]
    for kernel, block in plan.blocks.items():
        pairs += ((f"{kernel}.{name}", str(size)) for name, size in vars(block).items())
    return tuple(sorted(pairs))


def revisions(plan: Plan) -> dict[str, int]:
    """Of the families of kernels that a plan runs."""
    return {each.template: each.revision for each in families(plan) if each.revision} or {"sweep": SWEEP_REVISION}


def record_folders() -> tuple[Path, ...]:
    """Where records are looked for: the user's data folder, then those that come with infcl_gen."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_records"  # in a wheel; in a checkout they stand beside the package
    return user_folder(), installed if installed.is_dir() else package.parent / "tune" / "records"


def user_folder() -> Path:
    """The folder of the user's own records."""
    import platformdirs

    return Path(platformdirs.user_data_dir("infcl_gen", appauthor=False)) / "records"


def lookup(problem: Problem, key: Key, plan_of: Callable[[Problem], Plan]) -> Found | str:
    """The first record for `key`, in the order of the folders, of the kernels and settings that a plan has today; or
    why there is none, on one line.

    plan_of: the plan for a problem with a record's settings. Never raises for what a file holds: a damaged one, or one
    whose settings have no plan, is a reason.
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
    """How a plan differs from the one that was timed; "" if it does not."""
    then = dict(record.timed) | {f"revision of {name}": str(n) for name, n in record.revisions.items()}
    now = dict(timed_settings(plan)) | {f"revision of {name}": str(n) for name, n in revisions(plan).items()}
    differing = sorted(key for key in {*then, *now} if then.get(key) != now.get(key))
    return ", ".join(f"{key} was {then.get(key, 'none')}, now {now.get(key, 'none')}" for key in differing)


def read_records(file: Path) -> tuple[Record, ...]:
    """The records of a file; none if it is absent. Raises InputError if it is damaged or of another schema."""
    try:
        if file.stat().st_size > _LARGEST_FILE_BYTES:
            raise InputError(f"{file}: too large for a file of tuning records")
        return _decoded(file.read_bytes(), str(file))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error


@functools.lru_cache(maxsize=2)  # the user's records and those that come with infcl_gen
def _decoded(content: bytes, file: str) -> tuple[Record, ...]:
    """The records of a file with this content."""
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
    """Add a record to its board's file, in place of one with the same key; a damaged file is kept as *.damaged.

    Other runs wait meanwhile. Raises InputError (the folder cannot be written), LockTimeoutError.
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
    """Write a file of records at once: a reader sees the old one or the new one. Raises InputError."""
    literals = [dataclasses.asdict(record) for record in records]
    texts = []
    for record in literals:  # a candidate a line, as in a table
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
    """What distinguishes the nearest of the other records."""
    if not others:
        return f"no problem has been tuned on {key.board}"
    names = [field.name for field in dataclasses.fields(Key)]
    pairs = [[(name, getattr(key, name), getattr(other, name)) for name in names] for other in others]
    nearest = min(([pair for pair in each if pair[1] != pair[2]] for each in pairs), key=len)
    fields = ", ".join(f"{name} is {here!r}, there {there!r}" for name, here, there in nearest)
    return f"no record on {key.board} fits; in the nearest: {fields}"
