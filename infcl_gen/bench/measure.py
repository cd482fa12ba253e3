"""A point, measured in one process: everybody alone (memory, errors), then in turns (times), on the same features.

One run of each per round, so that a ratio of times comes from one run; on a GPU two: `median_ms` begins on an idle
device, `queued_ms` behind other work (`timing`).
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infcl_gen.bench.peers import PEERS
from infcl_gen.bench.point import Inputs, Point, Step, bare_products, step_of, training_step
from infcl_gen.bench.results import RESULTS, planned_figures
from infcl_gen.bench.timing import Timer, Times, time_figures, turns
from infcl_gen.emission import import_package
from infcl_gen.errors import ToolchainError
from infcl_gen.files import load_file
from infcl_gen.inputs.text import one_line
from infcl_gen.verification.memory import PeakMeter
from infcl_gen.verification.oracle import oracle_by_slices

LEAST_ROUNDS = 3
WRONG = 0.25  # of the norm of loss, dq or dk: what roundings in bf16 never reach, and a wrong factor does
CROWDED = 0.5  # of the device's memory, all contestants' peaks added up
PART = 1 << 28  # elements that are looked at together: a mask of all would not fit beside the largest gradients

Row = dict[str, Any]
Errors = dict[str, float | None]
Events = Iterator[tuple[str | None, Row | None]]


def measure_point(point: Point) -> Events:
    """Measure everybody at one point, on unit-norm random features.

    Yields each contestant with its row as soon as that is known; and with None before it runs, so that who ends or
    hangs the process is known (None and None: that is nobody's turn). Raises ToolchainError without the device, and
    whatever has made the device unusable.
    """
    if point.device == "cuda" and not torch.cuda.is_available():
        raise ToolchainError("measuring needs the GPU that the package is for; torch sees none on this machine")
    yield None, None
    inputs = point.inputs()
    exact = None if point.exact is None else _exact_results(Path(point.exact), point.scale, inputs)
    steps: dict[str, Step] = {}
    rows: dict[str, Row] = {}
    for name in point.contestants:
        yield name, None
        row = point.row(name)
        try:
            steps[name], facts = _prepare(point, name, inputs)
            row |= facts
            row["peak_bytes"], row["err"], row["error"] = first_runs(steps[name], inputs, exact)
        except Exception as error:
            row["error"] = described(error, point.device)
        if row["error"] is None:
            rows[name] = row
        else:
            steps.pop(name, None)
            yield name, {**row, "peak_bytes": None}
        _release(inputs)
    factors = [x.detach().to(inputs.dtype) for x in (inputs.q, inputs.k)]
    for name in point.packages:
        if name in rows:
            plan = import_package(Path(name), edited=True).SPEC["plan"]
            steps[f"{name} products"] = bare_products(plan, *factors)
    yield from _in_turns(point, steps, rows, inputs)


def _prepare(point: Point, name: str, inputs: Inputs) -> tuple[Step, Row]:
    """A contestant's step, and what a row says about it before it has run."""
    if name not in point.packages:
        return step_of(PEERS[name].prepare(inputs), *inputs.leaves, point.autocast), {}
    module = import_package(Path(name), edited=True)
    planned = module.SPEC["problem"]["batch_size"] == point.batch and not point.autocast
    facts = planned_figures(module.SPEC, times=planned)
    if point.autocast:  # its copies, and gradients in fp32, come on top of a plan for features of its dtype
        facts["predicted_peak_bytes"] = None
    return training_step(module, *inputs.leaves, point.autocast), facts


def first_runs(
    step: Step, inputs: Inputs, exact: Mapping[str, Any] | None = None
) -> tuple[int, Errors | None, str | None]:
    """Peak in bytes of the second run (the first one compiles and tunes), its errors, and what is wrong with it."""
    step()
    _release(inputs)  # gradients that a step replaces would make room for the new ones unseen
    with PeakMeter(inputs.q.device) as meter:
        result = step()
    return meter.peak_bytes, *judged(result, exact)


def judged(result: Sequence[Any], exact: Mapping[str, Any] | None = None) -> tuple[Errors | None, str | None]:
    """Errors relative to fp64, where that is given, and the defect of a result that no time should be taken of."""
    got = {name: value for name, value in zip(RESULTS, result, strict=True) if value is not None}
    if absent := [name for name in RESULTS if name not in got and name != "dscale"]:
        return None, f"no result: {', '.join(absent)}"
    errors: Errors = dict.fromkeys(RESULTS)
    if exact is not None:
        for name, x in got.items():
            off = float((x.double() - exact[name]).norm() / exact[name].norm())
            errors[name] = off if math.isfinite(off) else None
    defects = [name for name, x in got.items() if not all(part.isfinite().all() for part in x.reshape(-1).split(PART))]
    defect = f"not finite: {', '.join(defects)}" if defects else None
    for name in ("loss", "dq", "dk"):
        if defect is None and (errors[name] or 0.0) > WRONG:
            defect = f"wrong: {name} is off by {errors[name]:.2g} of its norm"
    return (None if exact is None else errors), defect


def _in_turns(point: Point, steps: dict[str, Step], rows: dict[str, Row], inputs: Inputs) -> Events:
    """One measurement of each per round, and the rows with their times.

    The first is preceded by a run that is not timed and fills the allocator's cache. Where they may not fit into the
    device's memory beside what the others leave in that cache, it is emptied and filled again for every run.
    """
    peaks, timer = sum(row["peak_bytes"] for row in rows.values()), Timer(point.device)
    crowded = point.device == "cuda" and peaks > CROWDED * torch.cuda.mem_get_info()[1]
    times: dict[str, list[Times]] = {name: [] for name in steps}
    racing = list(steps)
    for round_, name in turns(racing, point.rounds):
        taken_ms = sum(sum(filter(None, both)) for both in times[name])
        if round_ >= LEAST_ROUNDS and taken_ms > 1e3 * point.seconds / len(steps):
            continue
        yield name.removesuffix(" products"), None
        try:
            if crowded:
                torch.cuda.empty_cache()
            if crowded or round_ == 0:
                steps[name]()
            times[name].append(timer.times(steps[name]))
        except Exception as error:
            why, times[name] = described(error, point.device), []
            racing.remove(name)
            if name in rows:
                yield name, {**rows.pop(name), "peak_bytes": None, "error": why}
            _release(inputs)
    if "torch._dynamo" in sys.modules:  # compiled graphs hold on to this point's shapes
        torch._dynamo.reset()
    steps.clear()
    _release(inputs)
    for name, row in rows.items():
        yield name, row | time_figures(times[name], times.get(f"{name} products", ()))


def _release(inputs: Inputs) -> None:
    """Give back what a contestant has left behind."""
    for leaf in inputs.leaves:
        leaf.grad = None
    gc.collect()
    if inputs.q.is_cuda:
        torch.cuda.empty_cache()


def _exact_results(package: Path, scale: float, inputs: Inputs) -> dict[str, Any] | None:
    """Loss and gradients in fp64, from the loss of a package; None where they do not fit into memory."""
    mathematics = load_file(package / "loss.py")  # alone: whether the package works is not known yet
    try:
        return oracle_by_slices(mathematics, inputs.q, inputs.k, scale, inputs.labels)._asdict()
    except Exception as error:
        if not out_of_memory(error):
            raise
    _release(inputs)
    return None


def described(error: Exception, device: str) -> str:
    """Why a contestant has no figure. Raises the error itself if it has made the device unusable for everybody."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise error from None
    if out_of_memory(error):
        return "out of memory"
    return f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory, of a device or of the host, is used up."""
    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )
