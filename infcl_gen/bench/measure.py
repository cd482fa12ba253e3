"""A point, measured in one process: each contestant alone (memory, errors), then all in turns (times).

Every contestant gets the same features and runs once a round, so that a ratio of times comes from one run. On a GPU it
runs twice: `median_ms` begins on an idle device, `queued_ms` behind other work (`timing`).
"""

import gc
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infcl_gen.bench.peers import PEERS
from infcl_gen.bench.point import Inputs, Point, Step, bare_products, own_keywords, step_of, training_step
from infcl_gen.bench.results import RESULTS, Row, planned_figures
from infcl_gen.bench.timing import Timer, Times, time_figures, turns
from infcl_gen.emission import import_package
from infcl_gen.errors import ToolchainError
from infcl_gen.files import load_file
from infcl_gen.inputs.text import one_line
from infcl_gen.verification.memory import PeakMeter
from infcl_gen.verification.oracle import Inputs as Arguments
from infcl_gen.verification.oracle import oracle_by_slices

LEAST_ROUNDS = 3
WRONG = 0.25  # of the norm of loss, dq or dk: bf16 rounding never reaches it, a wrong factor does
CROWDED = 0.5  # sum of all contestants' peaks over the device's memory
PART = 1 << 28  # elements checked at once: a mask of all would not fit beside the largest gradients

Errors = dict[str, float | None]
Events = Iterator[tuple[str | None, Row | None]]


def measure_point(point: Point) -> Events:
    """Measure all contestants of one point, on unit-norm random features.

    Yields (name, None) before a contestant runs, so that the caller knows who ends or hangs the process, and
    (name, row) once its row is known. (None, None) starts the preparation. Raises ToolchainError without the device,
    and the error that made the device unusable.
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
            steps[name], planned = _prepare(point, name, inputs)
            row |= planned
            row["peak_bytes"], row["err"], row["error"] = first_runs(steps[name], inputs, exact)
        except Exception as error:
            row["error"] = described(error, point.device)
        if row["error"] is None:
            rows[name] = row
        else:
            steps.pop(name, None)
            yield name, {**row, "peak_bytes": None}
        _release(inputs)
    q, k = (None if x is None else x.detach().to(inputs.dtype) for x in (inputs.q, inputs.k))
    for name in point.packages:
        if name in rows:
            spec = import_package(Path(name), edited=True).SPEC
            steps[f"{name} products"] = bare_products(
                spec["plan"], q, k, spec["loss"]["traits"]["known"], point.gradients
            )
    yield from _in_turns(point, steps, rows, inputs)


def _prepare(point: Point, name: str, inputs: Inputs) -> tuple[Step, Row]:
    """A contestant's step, and its row's fields from the plan."""
    if name not in point.packages:
        prepare = PEERS[name].prepare
        assert prepare is not None
        return step_of(prepare(inputs), *inputs.leaves, point.autocast), {}
    module = import_package(Path(name), edited=True)
    as_planned = module.SPEC["problem"]["batch_size"] == point.batch and not point.autocast and point.gradients
    planned = planned_figures(module.SPEC, times=as_planned)
    if point.autocast or not point.gradients:  # plans have room for gradients, in the features' dtype only
        planned["predicted_peak_bytes"] = None
    return training_step(module, *inputs.leaves, point.autocast, inputs.bias), planned


def first_runs(
    step: Step, inputs: Inputs, exact: Mapping[str, Any] | None = None
) -> tuple[int, Errors | None, str | None]:
    """Peak bytes of the second run (the first compiles and tunes), and what `judged` says of its result."""
    step()
    _release(inputs)  # freeing old gradients during the run would hide as many bytes of the new ones
    with PeakMeter(inputs.q.device) as meter:
        result = step()
    return meter.peak_bytes, *judged(result, inputs.wanted, exact)


def judged(
    result: Sequence[Any], wanted: Collection[str], exact: Mapping[str, Any] | None = None
) -> tuple[Errors | None, str | None]:
    """Errors relative to `exact` fp64 results, if given; and the defect of a result that should not be timed."""
    got = {name: value for name, value in zip(RESULTS, result, strict=True) if value is not None}
    if absent := [name for name in RESULTS if name in wanted and name not in got]:
        return None, f"no result: {', '.join(absent)}"
    errors: Errors = dict.fromkeys(RESULTS)
    if exact is not None:
        for name, x in got.items():
            error = float((x.double() - exact[name]).norm() / exact[name].norm())
            errors[name] = error if math.isfinite(error) else None
    known = None if exact is None else errors
    if broken := [n for n, x in got.items() if not all(part.isfinite().all() for part in x.reshape(-1).split(PART))]:
        return known, f"not finite: {', '.join(broken)}"
    for name in ("loss", "dq", "dk"):
        if (errors[name] or 0.0) > WRONG:
            return known, f"wrong: {name} is off by {errors[name]:.2g} of its norm"
    return known, None


def _in_turns(point: Point, steps: dict[str, Step], rows: dict[str, Row], inputs: Inputs) -> Events:
    """One measurement of each step per round, then the rows with their times.

    An untimed run before the first fills the allocator's cache. Where all peaks together crowd the device's memory, the
    cache is emptied and filled again for every run.
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
    if "torch._dynamo" in sys.modules:  # compiled graphs are for this point's shapes
        torch._dynamo.reset()
    steps.clear()
    _release(inputs)
    for name, row in rows.items():
        yield name, row | time_figures(times[name], times.get(f"{name} products", ()))


def _release(inputs: Inputs) -> None:
    """Free gradients, garbage and the allocator's cache."""
    for leaf in inputs.leaves:
        if leaf is not None:
            leaf.grad = None
    gc.collect()
    if inputs.q.is_cuda:
        torch.cuda.empty_cache()


def _exact_results(package: Path, scale: float, inputs: Inputs) -> dict[str, Any] | None:
    """Loss and gradients in fp64, from a package's loss; None if they do not fit into memory."""
    loss, spec = (load_file(package / name) for name in ("loss.py", "spec.py"))  # alone: the package may not work
    own = own_keywords(spec.SPEC, *inputs.leaves[:2], dtype=inputs.dtype)
    bias = None if inputs.bias is None else inputs.bias.detach()
    try:
        return oracle_by_slices(loss, Arguments(inputs.q, inputs.k, scale, bias, labels=inputs.labels, **own))._asdict()
    except Exception as error:
        if not out_of_memory(error):
            raise
    _release(inputs)
    return None


def described(error: Exception, device: str) -> str:
    """Why a contestant has no figures. Raises the error itself if it has made the device unusable."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise error from None
    if out_of_memory(error):
        return "out of memory"
    return f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had too little memory."""
    told = re.search("out of memory|can't allocate memory", str(error), re.IGNORECASE) is not None
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and told)
