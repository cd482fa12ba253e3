"""What was measured: for each board a file of tuning records, each with its key in clear.

    store     Record -> <folder>/<board>.json, under a lock, complete or unchanged at every moment
    lookup    Key -> Found, or Missing, which says what differs

A candidate is a set of `--set` pairs and nothing else, so a record is applied by adding its settings to the problem's
own; the pair `records=measured` then stands among them, which says where they come from. A record is stale when what
the device did is not what it would do today (`work`): other kernels, launch options, or cuts into panels and strips.
What the host does around them may change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infcl_gen.errors import InfclError, InputError, LockTimeoutError
from infcl_gen.losses import spec_as_dict

if TYPE_CHECKING:
    from infcl_gen.hardware import Cluster
    from infcl_gen.losses import LossSpec
    from infcl_gen.problem import Problem

SCHEMA_VERSION = 2
LOCK_TIMEOUT_S = 60.0
STATUSES = (
    *("timed", "illegal", "does not compile", "spills", "wrong", "crashed", "hung", "out of memory"),
    *("slower", "not timed"),  # given up after two rounds; ranked too low, or the time was up
)
_MARK = ("records", "measured")
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
    """The outcome of a tuning run. `digest` is that of the package that was timed with `settings`; `work` is that of
    what the device did in it, which stays the same when only the host's code changes. `families` are those that were
    tuned, and `complete` says whether these are all."""

    key: Key
    settings: Settings
    digest: str
    work: str
    complete: bool
    families: tuple[str, ...]
    versions: dict[str, str]
    candidates: tuple[Candidate, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """A record that fits; `file` holds it."""

    record: Record
    file: Path

    def applied(self, problem: Problem) -> Problem:
        """The problem with the measured settings."""
        return dataclasses.replace(
            problem, settings=measured_settings(problem.settings, self.record.settings)
        )


@dataclasses.dataclass(frozen=True)
class Missing:
    """No record fits; `reason` says what differs, on one line."""

    reason: str


def record_key(problem: Problem, loss: LossSpec, cluster: Cluster) -> Key:
    """The key of a problem; settings that the tuner chose (`records=measured`) are not part of it."""
    literals = spec_as_dict(loss)
    content = repr((literals["formula"], literals["positives"]))
    return Key(
        board=cluster.profile.name,
        loss=loss.name,
        loss_digest=hashlib.sha256(content.encode()).hexdigest()[:16],
        batch_size=problem.batch_size,
        keys=None if problem.keys == problem.batch_size else problem.keys,
        dim=problem.dim,
        dtype=problem.dtype,
        precision=problem.precision,
        devices=problem.devices,
        nodes=problem.nodes,
        memory_budget_bytes=problem.memory_budget_bytes,
        target=cluster.profile.target,
        settings=own_settings(problem.settings),
    )


def is_tuned(key: str) -> bool:
    """Whether a key of `--set` is one that the tuner chooses."""
    return "." in key or key in ("panel_rows", "panel_keys", "products")


def own_settings(settings: Settings) -> Settings:
    """The user's own among a problem's settings. Measured ones are not; nor is a `products` beside them."""
    measured = _MARK in settings
    return tuple(pair for pair in settings if pair[0] != "records" and not (measured and is_tuned(pair[0])))


def measured_settings(own: Settings, chosen: Settings) -> Settings:
    """The user's settings, those chosen by measurement, and the mark that says so; sorted by key."""
    return tuple(sorted((*(pair for pair in own if pair[0] != "records"), *chosen, _MARK)))


def record_folders() -> tuple[Path, ...]:
    """Where records are looked for: the user's data folder, then those that come with infcl_gen."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_records"  # in a wheel; in a checkout they stand beside the package
    return user_folder(), installed if installed.is_dir() else package.parent / "tune" / "records"


def user_folder() -> Path:
    """The folder of the user's own records."""
    import platformdirs

    return Path(platformdirs.user_data_dir("infcl_gen", appauthor=False)) / "records"


def lookup(
    problem: Problem, key: Key, work_of: Callable[[Problem], str], folders: Sequence[Path] | None = None
) -> Found | Missing:
    """The first record for `key`, in the order of the folders, whose `work` is still what the device would do.

    work_of: the digest for a problem with a record's settings. Never raises for what a file holds: a damaged one, or
    one whose settings have no plan, is a reason.
    """
    if "records" in problem.setting:
        return Missing(f"records are not looked up with --set records={problem.setting['records']}")
    blocks = [name for name in problem.setting if is_tuned(name) and name != "products"]
    if blocks:
        return Missing(f"the problem sets {', '.join(blocks)} itself")
    others: list[Key] = []
    reasons: list[str] = []
    for folder in record_folders() if folders is None else folders:
        file = folder / f"{key.board}.json"
        try:
            records = read_records(file)
        except InputError as error:
            reasons.append(str(error))
            continue
        for record in records:
            others.append(record.key)
            if record.key != key:
                continue
            found = Found(record, file)
            try:
                today = work_of(found.applied(problem))
            except InfclError as error:
                reasons.append(f"the record in {file.name} does not give a plan any more: {error}")
                continue
            if record.work == today:
                return found
            reasons.append(
                f"the record in {file.name} is stale: what the device does has changed since it was timed"
                f" (work {record.work}, now {today}); infcl-gen tune measures again"
            )
    if not reasons:
        reasons.append(_difference(key, others))
    return Missing("; ".join(reasons))


def read_records(file: Path) -> tuple[Record, ...]:
    """The records of a file; none if it is absent. Raises InputError if it is damaged or of another schema."""
    import msgspec

    try:
        if file.stat().st_size > _LARGEST_FILE_BYTES:
            raise InputError(f"{file}: too large for a file of tuning records")
        table = json.loads(file.read_bytes())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: damaged tuning records (not JSON)") from error
    if not isinstance(table, dict) or table.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"{file}: not tuning records of schema version {SCHEMA_VERSION}")
    if table.get("checksum") != _checksum(table.get("records")):
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
    with _locked(file):
        try:
            records = read_records(file)
        except InputError:
            records = ()
            with contextlib.suppress(OSError):
                os.replace(file, file.with_suffix(".damaged"))
        others = [other for other in records if other.key != record.key]
        write_records(file, sorted([*others, record], key=lambda other: repr(other.key)))
    return file


def write_records(file: Path, records: Sequence[Record]) -> None:
    """Write a file of records at once: a reader sees the old one or the new one. Raises InputError."""
    literals = [dataclasses.asdict(record) for record in records]
    texts = []
    for record in literals:  # a candidate a line, as in a table
        lines = ",\n  ".join(json.dumps(candidate) for candidate in record["candidates"])
        head = json.dumps({name: value for name, value in record.items() if name != "candidates"})
        texts.append(f'{head[:-1]}, "candidates": [\n  {lines}\n]}}')
    text = ",\n".join(texts)
    head = f'"schema_version": {SCHEMA_VERSION}, "checksum": "{_checksum(literals)}"'
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(f'{{{head}, "records": [\n{text}\n]}}\n')
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)  # mkstemp's files are private
            os.fsync(stream.fileno())
        os.replace(temporary, file)
        temporary = None
    except OSError as error:
        raise InputError(f"--records {file.parent}: cannot write there ({error.strerror})") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _checksum(records: Any) -> str:
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    import filelock

    # Kept apart from the records, so that nothing else appears among committed files.
    name = hashlib.sha256(os.fsencode(os.path.abspath(file))).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"infcl_gen-{os.getuid()}" / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path, timeout=LOCK_TIMEOUT_S):
            yield
    except filelock.Timeout as error:
        raise LockTimeoutError(
            f"--records: another process has held {file} for {LOCK_TIMEOUT_S:g} s"
        ) from error


def _difference(key: Key, others: Sequence[Key]) -> str:
    """What distinguishes the nearest of the other records."""
    if not others:
        return f"no problem has been tuned on {key.board}"

    def differing(other: Key) -> list[str]:
        names = (field.name for field in dataclasses.fields(Key))
        return [name for name in names if getattr(key, name) != getattr(other, name)]

    nearest = min(others, key=lambda other: len(differing(other)))
    fields = ", ".join(
        f"{name} is {getattr(key, name)!r}, there {getattr(nearest, name)!r}" for name in differing(nearest)
    )
    return f"no record on {key.board} fits; in the nearest: {fields}"
