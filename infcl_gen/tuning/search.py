"""`infcl-gen tune`: which settings are the fastest on this machine?

Kernel families are searched one after the other, with the others at their best so far:

    propose   settings that might be better             dropped: no plan, or beyond the budget
    rank      by earlier records, the cost model, and nearness to the default
    compile   ahead of time, in parallel                dropped: does not compile, spills
    gate      each in a process of its own              dropped: wrong, crashed, hung, out of memory
    time      in turns, on a cold cache                 dropped: clearly slower after two rounds
    record    the best so far, in a partial file        an interrupted run goes on from there

A candidate is a set of `--set` pairs. It is timed as a whole package, byte for byte what is written at the end.
"""

import contextlib
import dataclasses
import itertools
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from infcl_gen.emission.package import check_output, content_digest, read_package, write_package
from infcl_gen.emission.pipeline import spec_inputs
from infcl_gen.errors import InfclError, InputError, ToolchainError, VerificationError
from infcl_gen.files import check_folder
from infcl_gen.hardware import Cluster
from infcl_gen.kernels import TILES, tiles
from infcl_gen.losses import derive
from infcl_gen.planning import Plan, plan
from infcl_gen.planning import records as measurements
from infcl_gen.planning.records import Key, Record, Settings
from infcl_gen.processes import Progress
from infcl_gen.tuning.family import Case, Family, Limits, Proposed, belongs, proposed
from infcl_gen.version import __version__, installed

_LOG = logging.getLogger("infcl_gen")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run found: the record, its file, and the package that was written."""

    record: Record
    file: Path
    package: Path

    def as_dict(self) -> dict[str, Any]:
        """Literals, with the median times of the default and of the winner in ms (None: not timed)."""
        record, first, last = self.record, self.record.families[0], self.record.families[-1]
        times = {"default_ms": _median_ms(record, first, ()), "best_ms": _median_ms(record, last, record.settings)}
        return {"package": str(self.package), "file": str(self.file), **times, "record": dataclasses.asdict(record)}


def tune(
    folder: str | Path, records: Path | None = None, limits: Limits | None = None, progress: Progress = lambda *_: None
) -> Outcome:
    """Tune the package in `folder` on this machine, and write it again with the winning settings.

    The record goes to `records`, or the user's data folder. When the time is up, it holds the finished families; the
    next run goes on from there.

    Raises InputError (no package, or one with blocks of the user's), ToolchainError (this machine lacks the package's
    device), VerificationError (no candidate is right, or infcl_gen's own files changed meanwhile).
    """
    limits = limits or Limits()
    case = _case(read_package(folder).spec)
    check_device(case.cluster)
    key = measurements.record_key(case.problem, case.loss, case.cluster)
    records = measurements.record_folders()[0] if records is None else records
    check_folder("--records", records)
    check_output(folder, force=True)
    partial = records / f".{key.board}-{key.digest}.partial.json"
    record = _resumed(partial, key, case)
    names, earlier = families(case.default), _timed_before(records, key)
    deadline = time.monotonic() + 60 * limits.minutes
    for index, family in enumerate(names):
        if family in record.families:
            continue
        if index and time.monotonic() > deadline:
            break
        left = max(0.0, deadline - time.monotonic()) / (len(names) - index)
        with tempfile.TemporaryDirectory(prefix="infcl-gen-tune-") as scratch:
            run = Family(case, family, record.settings, limits, Path(scratch), progress, earlier)
            others = proposals(case, family, record.settings)
            settings, digest, candidates = run.run(others, time.monotonic() + left)
        if content_digest(case.files(settings)) != digest:  # infcl_gen's own files changed meanwhile
            raise VerificationError(f"{folder}: the package to be written is not the one that was timed")
        done, timed = (*record.families, family), case.plan(settings)
        record = dataclasses.replace(
            record,
            settings=settings,
            digest=digest,
            timed=measurements.timed_settings(timed),
            revisions=measurements.revisions(timed),
            families=done,
            complete=done == names,
            candidates=(*record.candidates, *candidates),
        )
        measurements.write_records(partial, [record])
    file = measurements.store(record, records)
    path = write_package(case.files(record.settings), folder, force=True)
    if record.complete:
        partial.unlink(missing_ok=True)
    return Outcome(record, file, path)


def families(default: Plan) -> tuple[str, ...]:
    """The names of what is tuned, in order: the tiles of the strategy's kernels, or the panel for torch. In `rows` no
    step runs the kernel `gradient`."""
    tuned = (tile.name for tile in tiles(default.strategy, default.traits) if tile.tuned)
    return tuple(name for name in tuned if not (default.rows and name == "gradient")) or ("panel",)


def proposals(case: Case, family: str, best: Settings) -> list[Settings]:
    """Settings to try for a family, legal or not; the other families' are as in `best`."""
    others = tuple(pair for pair in best if not belongs(pair[0], family))
    found: list[Settings] = [others]
    default = case.default
    if family == "panel":
        for rows, keys in itertools.product((128, 256, 512, 1024, 2048, 4096, 8192), repeat=2):
            if rows < 2 * default.rows_per_rank and keys < 2 * default.keys_per_rank:
                found.append((*others, ("panel_rows", str(rows)), ("panel_keys", str(keys))))
    else:
        offered = TILES[family].proposals(default.blocks[family], default, case.problem.settings)
        found += [(*others, *pairs) for pairs in offered]
    return list(dict.fromkeys(tuple(sorted(settings)) for settings in found))


def check_device(cluster: Cluster) -> None:
    """Raises ToolchainError unless this machine has the cluster's device."""
    from infcl_gen.hardware.detection import find_device, match

    profile = cluster.profile
    if profile.target == "cpu":
        return
    found = find_device()
    here = None if found is None else match(found)
    if here is None or (here.arch, here.multiprocessors) != (profile.arch, profile.multiprocessors):
        has = "no GPU" if here is None else here.name
        raise ToolchainError(f"tuning needs the device that the package is for, {profile.name}; this machine has {has}")


def _case(spec: dict[str, Any]) -> Case:
    problem, loss, cluster = spec_inputs(spec)
    if problem.frozen != "none":
        raise InputError("--frozen: the record of the whole step is used for it; tune a package without --frozen")
    problem = dataclasses.replace(problem, settings=measurements.own_settings(problem.settings))
    if fixed := ", ".join(measurements.fixed_by_user(problem.settings)):
        raise InputError(
            f"DIR: the package was generated with --set {fixed}, which tuning chooses; generate it without"
        )
    return Case(problem, loss, cluster, plan(problem, derive(loss), cluster))


def _resumed(partial: Path, key: Key, case: Case) -> Record:
    """What an earlier run finished for the same problem, kernels and versions; else an empty record."""
    versions = {"infcl_gen": __version__, **installed("torch", "triton")}
    with contextlib.suppress(InfclError):
        for record in measurements.read_records(partial):
            same = (record.key, record.versions) == (key, versions)
            if same and not measurements.staleness(record, case.plan(record.settings)):
                _LOG.info("going on after %s", ", ".join(record.families))
                return record
    return Record(key, (), "", (), {}, False, (), versions, ())


def _timed_before(records: Path, key: Key) -> dict[Proposed, float]:
    """Medians in ms of the candidates that stayed in the race in records of this problem.

    Kernels and versions may differ: after most changes the same candidates are fast.
    """
    found: dict[Proposed, float] = {}
    for folder in (records, *measurements.record_folders()):
        with contextlib.suppress(InputError):
            for record in measurements.read_records(folder / f"{key.board}.json"):
                for each in record.candidates if record.key == key else ():
                    if each.status == "timed":
                        found.setdefault(proposed(each.family, each.settings), statistics.median(each.times_ms))
    return found


def _median_ms(record: Record, family: str, settings: Settings) -> float | None:
    times = [c.times_ms for c in record.candidates if (c.family, c.settings) == (family, settings) and c.times_ms]
    return statistics.median(times[0]) if times else None
