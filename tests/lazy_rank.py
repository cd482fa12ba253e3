"""What a rank of tests/test_lazy.py does: each function is a task of `infcl_gen.processes.run_ranks`."""

import dataclasses
import datetime
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import infcl_gen
from infcl_gen import lazy
from infcl_gen import lengths as lengths_module
from infcl_gen.emission import pipeline
from infcl_gen.files import record_folders
from infcl_gen.losses import load_loss
from infcl_gen.planning import records
from infcl_gen.processes import Seat

SCALE = 14.3


def _features(rows: int, dim: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.functional.normalize(torch.randn(rows, dim, generator=generator), dim=1).requires_grad_() for _ in "qk"
    ]


def step(rows: int, seed: int, dim: int = 16, criterion: Any = None) -> tuple[float, float]:
    """The global value, and the norm of this rank's gradient of q."""
    q, k = _features(rows, dim, seed)
    loss = (infcl_gen.ContrastiveLoss() if criterion is None else criterion)(q, k, SCALE)
    loss.backward()
    assert q.grad is not None
    return infcl_gen.global_value(loss).item(), q.grad.norm().item()


def batches(argument: Any, seat: Seat) -> Any:
    """Steps of this rank's sizes; a rank named in `cold` has a cache of its own. Values, and the packages' digests."""
    if seat.rank in argument.get("cold", ()):
        os.environ["INFCL_GEN_CACHE"] = str(Path(argument["cache"], f"rank{seat.rank}"))
    else:
        os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    seat.join_group("cpu", 60.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a rank with more rows than planned
        found = [step(rows[seat.rank], 10 * index + seat.rank) for index, rows in enumerate(argument["rows"])]
    (shelf,) = lazy._shelves.values()
    return {
        "steps": found,
        "digests": sorted(package.SPEC["digest"] for package in shelf.packages.values()),
        "sizes": sorted(package.SPEC["problem"]["batch_size"] for package in shelf.packages.values()),
    }


def _calls(seat: Seat, cache: str) -> dict[str, Any]:
    """What this rank does in each scenario; one of two ranks does not do as the other."""
    rank, call = seat.rank, infcl_gen.contrastive_loss
    q, k = _features(8, 16, rank)
    cold_q, cold_k = _features(8, 24, rank)
    folder = seat.folder / f"losses{rank}"
    folder.mkdir()
    own = "mean_over_queries(logsumexp_over_keys(scale * z) - positive(scale * z))"
    (folder / "own.py").write_text(
        f"from infcl_gen.losses.language import *\nown = LossSpec('own', {own} * {1 + rank})\n"
        f"first = second = LossSpec('same', {own})\n"
    )

    def unwritable() -> Any:
        file = folder / "file"
        file.write_text("")
        os.environ["INFCL_GEN_CACHE"] = str(file) if rank else cache
        try:
            return call(cold_q, cold_k)
        finally:
            os.environ["INFCL_GEN_CACHE"] = cache

    def broken() -> Any:
        settled = lazy._settled
        lazy._settled = lambda problem: (_ for _ in ()).throw(OSError("the driver does not answer"))
        try:
            return call(cold_q, cold_k)
        finally:
            lazy._settled = settled

    return {
        "no tensor": lambda: call([1.0] if rank else q, k),
        "no tensor, cold": lambda: call([1.0] if rank else cold_q, cold_k),
        "another D of keys": lambda: call(cold_q, k if rank else cold_k),
        "no loss": lambda: call(cold_q, cold_k, loss=["clip"] if rank else "clip"),  # type: ignore[arg-type]
        "meta": lambda: call(q.to("meta") if rank else q, k),
        "dim": lambda: call(*((cold_q, cold_k) if rank else (q, k)), loss="infonce"),
        "dim, one rank warm": lambda: call(*((cold_q, cold_k) if rank else (q, k))),
        "formula": lambda: call(q, k, loss=folder / "own.py:own"),
        "given": lambda: call(q, k, loss=load_loss(f"{folder}/own.py:first")),
        "formula, given": lambda: call(q, k, loss=load_loss(f"{folder}/own.py:own")),
        "loss": lambda: call(q, k, loss=f"{folder}/own.py:{('first', 'second')[rank]}"),
        "budget": lambda: call(q, k, memory_budget="64MiB" if rank else "64000000"),
        "wrong budget": lambda: call(q, k, memory_budget="foo"),
        "small budget": lambda: call(q, k, memory_budget="1KiB"),
        "unpaired": lambda: call(q, torch.cat([k, k])),
        "one rank unpaired": lambda: call(q, torch.cat([k, k]) if rank else k),
        "unwritable": unwritable,
        "broken": broken,
    }


def troubles(argument: Any, seat: Seat) -> Any:
    """Scenario -> the error on this rank, and the value of a right step after it, which finds the ranks in step."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    if seat.rank == 0:
        step(8, 0)  # alone: what is at hand for one device is not for the group
    seat.join_group("cpu", 30.0)
    found = {}
    for name, call in {"none": lambda: step(8, seat.rank), **_calls(seat, argument["cache"])}.items():
        try:
            call()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        else:
            message = ""
        found[name] = message, step(8, seat.rank)[0]
    return found


def lengths(argument: Any, seat: Seat) -> Any:
    """The loss of this rank's rows over lengths that no package has at once, and what wrong features are told."""
    from tests.test_lengths import leaves

    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    seat.join_group("cpu", 30.0)
    first = sum(argument["rows"][: seat.rank])
    rows, found = slice(first, first + argument["rows"][seat.rank]), dict[str, Any]()
    q, k = (x.detach().float()[rows].requires_grad_() for x in leaves("siglip")[:2])
    how: Any = {"loss": "siglip", "prefixes": {int(d): w for d, w in argument["prefixes"].items()}}
    wide: Any = _features(len(q), 24, seat.rank)
    sparse = q.detach().to_sparse()
    others: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "no tensor": ([1.0], k, {}),
        "sparse": (sparse, k, {"renormalise": True}),
        "no memory": (q, k, {"renormalise": True}),
        "another width": (*wide, {}),
        "other prefixes": (q, k, {"prefixes": [8, 16]}),
        "another weight": (q, k, {"prefixes": how["prefixes"] | {8: 3.0}}),
        "cosines": (q, k, {"renormalise": True}),
        "all columns": (q, k, {"prefixes": None}),
    }
    apply = lengths_module._Directions.apply
    cut = [apply(x) for x in (q, k)]
    for name, (*features, given) in others.items():
        if seat.rank == 0:
            features, given = [q, k], given if name in ("sparse", "no memory") else {}
        full = [*cut, torch.OutOfMemoryError("out of memory")] if seat.rank and name == "no memory" else None
        try:
            with mock.patch.object(lengths_module._Directions, "apply", side_effect=full or apply):
                infcl_gen.contrastive_loss(*features, 1.5, **how | given)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    loss = infcl_gen.contrastive_loss(q, k, 1.5, **how)
    loss.backward()
    return found | {"value": infcl_gen.global_value(loss).item(), "dq": q.grad.tolist(), "dk": k.grad.tolist()}


def orders(argument: Any, seat: Seat) -> Any:
    """Loads that must not depend on the order of threads, on what a store holds, or on one machine's records."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    seat.join_group("cpu", 30.0)
    q, k = _features(8, 16, seat.rank)
    groups = [dist.new_group([0, 1], timeout=datetime.timedelta(seconds=10)) for _ in "ab"]
    values: list[float] = []

    def run(group: Any, wait_s: float) -> None:
        time.sleep(wait_s)
        values.append(infcl_gen.contrastive_loss(q, k, group=group).item())

    threads = [threading.Thread(target=run, args=(groups[i ^ seat.rank], i * 0.3)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"threads": len(values), "records": _with_a_record(seat), "again": _again(seat)}


def _with_a_record(seat: Seat) -> Any:
    """The settings of the package of a batch for which rank 0 alone has a tuning record."""
    if seat.rank == 0:
        os.environ["XDG_DATA_HOME"] = str(seat.folder)
        case = pipeline.case_of(lazy._problem(lazy.Kind("clip", "auto", 20, torch.float32, "cpu"), (1024, 1024), 2))
        chosen = (("panel_rows", "64"),)
        settings = records.measured_settings(case.problem.settings, chosen)
        plan, _ = pipeline._plan(case._replace(problem=dataclasses.replace(case.problem, settings=settings)))
        timed, revisions = records.timed_settings(plan), records.revisions(plan)
        record = records.Record(records.record_key(*case), chosen, "", timed, revisions, True, (), {}, ())
        records.store(record, record_folders()[0])
    step(300, seat.rank, 20)
    (package,) = [each for shelf in lazy._shelves.values() for kind, each in shelf.packages.items() if kind.dim == 20]
    return package.SPEC["problem"]["settings"]


def _again(seat: Seat) -> Any:
    """The sizes planned by two groups that use one store, one after the other.

    The second is a group that has planned nothing yet. Two process groups of gloo cannot share a store: a rank may read
    the address at which the other listened before.
    """
    sizes = []
    for rows in (8, 20):
        lazy._shelves.clear()
        dist.barrier()
        step(rows, seat.rank)
        (package,) = lazy._shelf(lazy.find_group("")).packages.values()
        sizes.append(package.SPEC["problem"]["batch_size"])
    return sizes


def ranges(argument: Any, seat: Seat) -> list[str]:
    """The names of this package's ranges that a profiler sees of a step, in order."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    seat.join_group("cpu", 60.0)
    step(4, seat.rank)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(4, seat.rank)
    seen = [event for event in profile.events() if event.name.startswith("infcl ")]
    return [event.name for event in sorted(seen, key=lambda event: event.time_range.start)]


def early(argument: Any, seat: Seat) -> list[float]:
    """Global values by modules that were made before the process group was."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    loaded = infcl_gen.load(batch_size=16, dim=16, dtype="fp32", target="cpu", devices=seat.ranks)
    made = [infcl_gen.ContrastiveLoss(), loaded.ContrastiveLoss()]
    step(16, seat.rank, criterion=made[0])
    seat.join_group("cpu", 60.0)
    values = [step(4, seat.rank, criterion=criterion)[0] for criterion in made]
    assert len(lazy._shelves) == 1  # the group's package, not the one that this rank alone has taken
    cold = torch.compile(infcl_gen.ContrastiveLoss(memory_budget="1GiB"), backend="eager")
    return [*values, step(4, seat.rank, criterion=cold)[0]]  # the compiler must not trace how ranks load
