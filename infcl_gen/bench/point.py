"""What packages and their peers take at one size, in one process: time, memory, and errors against fp64.

`measure_point` is the measurement: everybody computes with the same features, first alone (memory, errors), then in
turns, one run of each per round, so that a ratio of times comes from one run. On a GPU everybody runs twice a round, or
until the host is ahead: `median_ms` begins on an idle device, `queued_ms` behind other work (`timing`). A row's fields
are those of the measurement format (`results`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from infcl_gen.bench.peers import PEERS, Inputs
from infcl_gen.bench.results import SIZES, blank_row
from infcl_gen.bench.timing import SEED, Timer, Times, floor_figures, time_figures
from infcl_gen.emission.package import Package, read_package
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.inputs.text import show
from infcl_gen.kernels.choice import SPLIT_TERMS

LEAST_ROUNDS = 3
WRONG = 0.25  # of the norm of loss, dq or dk: what roundings in bf16 never reach, and a wrong factor does
RESULTS = ("loss", "dq", "dk", "dscale")
GENERATED = "generated"  # the folder, and so the name in a row, of a package made for one measurement
ROUNDED = "rounded fp32"
CROWDED = 0.5  # of the device's memory, all contestants' peaks added up

Step = Callable[[], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Point:
    """One size, and who is measured there: packages by their folders, and peers by name.

    `rounds` are at most that many runs of each; who has taken its share of `seconds` stops after LEAST_ROUNDS. `exact`
    is a package whose loss gives the fp64 results that errors are relative to; None: no errors are computed. `edited`
    are packages whose files are not as generated, which their rows say.
    `feature_dtype` is `dtype`, or fp32 for everybody under autocast to it; the rows' precision then says so. "rounded
    fp32" holds numbers of `dtype`: casting, whose errors are the same for everybody, then makes none.
    """

    packages: tuple[str, ...]
    peers: tuple[str, ...]
    device: str
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

    @property
    def contestants(self) -> tuple[str, ...]:
        return (*self.packages, *self.peers)

    @property
    def autocast(self) -> bool:
        return self.feature_dtype != self.dtype


def point_of(
    packages: Sequence[Package],
    batch: int | None = None,
    peers: Iterable[str] = (),
    scale: float = 14.3,
    rounds: int = 10,
    seconds: float = math.inf,
    errors: bool = False,
    feature_dtype: str | None = None,
) -> Point:
    """The point at `batch` queries (default: the planned ones) of packages for one loss, dim, dtype and device.

    Raises InputError if they differ in that, are planned for a ring, or for fewer queries; and for a `feature_dtype`
    that is neither the packages' nor fp32 under autocast to it.
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
        if other["plan"]["world_size"] > 1:
            raise InputError(
                f"--package: {package.path} is planned for {other['plan']['world_size']} devices; one is measured"
            )
        if queries > other["problem"]["batch_size"]:
            raise InputError(
                f"--batches: {queries} is more than the {other['problem']['batch_size']} that {package.path} is for"
            )
    return Point(
        packages=tuple(str(package.path) for package in packages),
        peers=tuple(peers),
        device="cpu" if first["device"]["target"] == "cpu" else "cuda",
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
    )


def measure_package(
    package: Path, batch: int | None = None, scale: float = 14.3, repeats: int = 10, errors: bool = False
) -> dict[str, Any]:
    """The row of one package alone at `batch` queries (default: the planned ones), measured in this process.

    Raises ToolchainError if the package is for a GPU and there is none.
    """
    point = point_of([read_package(package, edited=True)], batch, scale=scale, rounds=repeats, errors=errors)
    rows: dict[str, dict[str, Any]] = {}
    measure_point(point, report=lambda name, row: rows.update({name: row}))
    return rows[str(point.packages[0])]


def measure_point(
    point: Point,
    report: Callable[[str, dict[str, Any]], None],
    announce: Callable[[str | None], None] = lambda name: None,
) -> None:
    """Measure everybody at one point, on unit-norm random features.

    `report` gets the row of each contestant as soon as it is known; `announce` the one that is about to run, so that
    who ends or hangs the process is known, and None when that is nobody's. Raises ToolchainError without the device,
    and whatever has made the device unusable.
    """
    import torch

    if point.device == "cuda" and not torch.cuda.is_available():
        raise ToolchainError("measuring needs the GPU that the package is for; torch sees none on this machine")
    announce(None)
    inputs = _inputs(point)
    timer = Timer(point.device)
    exact = None if point.exact is None else _exact_results(Path(point.exact), point.scale, inputs)
    ready: dict[str, tuple[Step, dict[str, Any]]] = {}
    plans: dict[str, dict[str, Any]] = {}
    for name in point.contestants:
        announce(name)
        row = empty_row(point, name)
        try:
            step, facts, plan = _prepare(point, name, inputs)
            row |= facts
            if plan is not None:
                plans[name] = plan
            row["peak_bytes"], row["err"], row["error"] = _first_runs(inputs, step, exact)
            if row["error"] is None:
                ready[name] = (step, row)
            del step
        except Exception as error:
            row["error"] = _described(error, point.device)
        _release(inputs)
        if row["error"] is not None:
            report(name, _without_figures(row))
    peaks = sum(row["peak_bytes"] for _, row in ready.values())
    crowded = point.device == "cuda" and peaks > CROWDED * torch.cuda.mem_get_info()[1]
    steps = {name: step for name, (step, _) in ready.items()}
    factors = [x.detach().to(inputs.dtype) for x in (inputs.q, inputs.k)]
    steps |= {f"{name} products": bare_products(plans[name], *factors) for name in ready if name in plans}
    timed = _in_turns(point, steps, inputs, timer, announce, crowded)
    for name in ready:
        times, defect = timed[name]
        floors, _ = timed.get(f"{name} products", ([], None))
        row = ready[name][1] | floor_figures(floors)
        if defect is not None:
            report(name, _without_figures({**row, "error": defect}))
            continue
        report(name, row | time_figures(times))
    if "torch._dynamo" in sys.modules:  # compiled graphs hold on to this point's shapes
        torch._dynamo.reset()
    ready.clear()
    _release(inputs)


def features(rows: int, dim: int, dtype: str, seed: int, device: str = "cuda") -> Any:
    """Random features of unit norm that ask for gradients; the same on every run."""
    import torch

    from infcl_gen.verification.properties import DTYPES

    generator = torch.Generator(device).manual_seed(SEED + seed)
    found = torch.empty(rows, dim, dtype=DTYPES[dtype], device=device)
    wide = torch.promote_types(DTYPES[dtype], torch.float32)
    for start in range(0, rows, 1 << 16):  # the fp32 numbers of four million rows would not fit beside them
        count = min(1 << 16, rows - start)
        part = torch.randn(count, dim, generator=generator, device=device, dtype=wide)
        found[start : start + len(part)] = torch.nn.functional.normalize(part, dim=1)
    return found.requires_grad_()


def training_step(module: ModuleType, q: Any, k: Any, temperature: Any, autocast: Any = None) -> Step:
    """One forward and backward of a package, as training runs it: (loss, dq, dk, dscale). `autocast`: to this dtype."""
    import torch

    needs_labels = module.SPEC["positives"] == "label" and len(q) > len(k)
    labels = torch.arange(len(q), device=q.device) % len(k) if needs_labels else None
    return step_of(lambda: module.contrastive_loss(q, k, temperature, labels=labels), q, k, temperature, autocast)


def step_of(loss_function: Callable[[], Any], q: Any, k: Any, temperature: Any, autocast: Any = None) -> Step:
    """One forward and backward of any loss of q, k and the temperature: (loss, dq, dk, its own), as `training_step`."""
    import torch

    def step() -> tuple[Any, ...]:
        q.grad = k.grad = temperature.grad = None
        with torch.autocast(q.device.type, autocast) if autocast else contextlib.nullcontext():
            loss = loss_function()
        loss.backward()
        return loss.detach(), q.grad, k.grad, temperature.grad

    return step


def _inputs(point: Point) -> Inputs:
    import torch

    from infcl_gen.verification.properties import DTYPES

    drawn = point.dtype if point.feature_dtype == ROUNDED else point.feature_dtype
    q, k = (features(rows, point.dim, drawn, seed, point.device) for seed, rows in enumerate((point.batch, point.keys)))
    if point.feature_dtype == ROUNDED:
        q, k = (x.detach().float().requires_grad_() for x in (q, k))
    wide = torch.promote_types(DTYPES[point.dtype], torch.float32)
    scale = torch.tensor(point.scale, dtype=wide, device=point.device, requires_grad=True)
    labels = torch.arange(point.batch, device=point.device) % point.keys
    return Inputs(q, k, scale, labels, 1 if point.loss == "infonce" else 2, DTYPES[point.dtype])


def empty_row(point: Point, name: str) -> dict[str, Any]:
    """A contestant's row before anything is known of it: all figures are None."""
    is_package = name in point.packages
    sizes = {field: getattr(point, field) for field in SIZES}
    sizes["precision"] = row_precision(point.precision, point.dtype, point.feature_dtype)
    package = Path(name).name if is_package else None
    row = blank_row(sizes, 1, "infcl" if is_package else name, package, point.scale)
    return {**row, "edited": True} if name in point.edited else row


def row_precision(precision: str, dtype: str, feature_dtype: str | None) -> str:
    """What rows say of their precision: that of the packages, unless everybody casts features of another dtype."""
    return precision if feature_dtype in (None, dtype) else f"autocast from {feature_dtype}"


def _without_figures(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "peak_bytes": None, "floor_ms": None, "queued_floor_ms": None}


def _prepare(point: Point, name: str, inputs: Inputs) -> tuple[Step, dict[str, Any], dict[str, Any] | None]:
    """A contestant's step, what a row says about it before it has run, and a package's plan."""
    from infcl_gen.emission import import_package

    q, k, scale = inputs.q, inputs.k, inputs.scale
    autocast = inputs.dtype if point.autocast else None
    if name not in point.packages:
        return step_of(PEERS[name].prepare(inputs), q, k, scale, autocast), {}, None
    module = import_package(Path(name), edited=True)
    plan, predicted = module.SPEC["plan"], module.SPEC["predicted"]
    planned = module.SPEC["problem"]["batch_size"] == point.batch and not point.autocast
    facts = {
        "strategy": plan["strategy"],
        "budget_bytes": plan["budget_bytes"],
        # A plan is for features of its dtype: autocast's copies, and gradients in fp32, come on top.
        "predicted_peak_bytes": None if point.autocast else predicted["peak_bytes"],
        "predicted_ms": 1e3 * predicted["time_s"] if planned else None,
        "predicted_queued_ms": 1e3 * predicted["queued_s"] if planned and q.is_cuda else None,
    }
    return training_step(module, q, k, scale, autocast), facts, plan


def _first_runs(
    inputs: Inputs, step: Step, exact: dict[str, Any] | None
) -> tuple[int, dict[str, float | None] | None, str | None]:
    """Peak in bytes of the second run (the first one compiles and tunes), its errors, and what is wrong with it."""
    from infcl_gen.verification.memory import PeakMeter

    step()
    _release(inputs)  # gradients that a step replaces would make room for the new ones unseen
    with PeakMeter(inputs.q.device) as meter:
        result = step()
    errors, defect = _judged(result, exact)
    return meter.peak_bytes, errors, defect


def _judged(result: Sequence[Any], exact: dict[str, Any] | None) -> tuple[dict[str, float | None] | None, str | None]:
    """Errors relative to fp64, where that is given, and the defect of a result that no time should be taken of."""
    import torch

    got = dict(zip(RESULTS, result, strict=True))
    absent = [name for name, value in got.items() if value is None and name != "dscale"]
    if absent:
        return None, f"no result: {', '.join(absent)}"
    infinite = [name for name, x in got.items() if x is not None and not bool(torch.isfinite(x).all())]
    errors: dict[str, float | None] | None = None
    if exact is not None:
        errors = {
            name: None if x is None else _finite((x.double() - exact[name]).norm() / exact[name].norm())
            for name, x in got.items()
        }
    if infinite:
        return errors, f"not finite: {', '.join(infinite)}"
    for name in ("loss", "dq", "dk") if errors else ():
        error = errors[name] if errors else None
        if error is not None and error > WRONG:
            return errors, f"wrong: {name} is off by {error:.2g} of its norm"
    return errors, None


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _in_turns(
    point: Point,
    steps: Mapping[str, Step],
    inputs: Inputs,
    timer: Timer,
    announce: Callable[[str | None], None],
    crowded: bool,
) -> dict[str, tuple[list[Times], str | None]]:
    """Times of each, one measurement per round, in an order that is drawn anew, since who always comes after the
    hottest is slower for it; or why there are none.

    The first is preceded by a run that is not timed and fills the allocator's cache. `crowded`: they may not fit into
    the device's memory beside what the others leave in that cache, so it is emptied and filled again for every run.
    """
    import torch

    found: dict[str, tuple[list[Times], str | None]] = {name: ([], None) for name in steps}
    racing = list(steps)
    for round_ in range(point.rounds):
        for name in random.Random(SEED + round_).sample(racing, len(racing)):
            times, step = found[name][0], steps[name]
            taken_ms = sum(sum(filter(None, both)) for both in times)
            if round_ >= LEAST_ROUNDS and taken_ms > 1e3 * point.seconds / len(steps):
                continue
            announce(name.removesuffix(" products"))
            error = None
            try:
                if crowded:
                    torch.cuda.empty_cache()
                if crowded or round_ == 0:
                    step()
                times.append(timer.times(step))
            except Exception as failure:
                error = _described(failure, point.device)
            if error is not None:
                found[name] = ([], error)
                racing.remove(name)
                _release(inputs)
    return found


def _described(error: Exception, device: str) -> str:
    """Why a contestant has no figure. Raises the error itself if it has made the device unusable for everybody."""
    import torch

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
    import torch

    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _release(inputs: Inputs) -> None:
    """Give back what a contestant has left behind."""
    import torch

    inputs.q.grad = inputs.k.grad = inputs.scale.grad = None
    gc.collect()
    if inputs.q.is_cuda:
        torch.cuda.empty_cache()


def bare_products(plan: dict[str, Any], q: Any, k: Any) -> Step:
    """The library's products that a plan needs, panel by panel: z twice (once where a stash keeps it), dq and dk.

    fp32 features that the plan splits are as deep, and as often multiplied, as their halves are.
    """
    import torch

    m, n = len(q), len(k)
    rows, keys = min(plan["panel_rows"], m), min(plan["panel_keys"], n)
    if plan["strategy"] == "fused":
        rows = keys = min(16384, m, n)
    gpu, kept = q.is_cuda, min(plan["stash_rows"], m)
    terms = SPLIT_TERMS if plan["split"] else 1
    if plan["split"]:
        q, k = (x.bfloat16().repeat(1, SPLIT_TERMS) for x in (q, k))
    # The library returns fp32 sums of half-precision features on a GPU; elsewhere what it is given.
    wide: dict[str, Any] = {"out_dtype": torch.float32} if gpu and q.element_size() == 2 else {}
    sums = wide.get("out_dtype", q.dtype)

    def run() -> tuple[Any, ...]:
        z = torch.empty(rows * keys, dtype=q.dtype, device=q.device)
        dq, dk = (torch.zeros(n, q.shape[1] // terms, dtype=sums, device=q.device) for n in (rows, keys))
        for row0, key0 in itertools.product(range(0, m, rows), range(0, n, keys)):
            a, b = q[row0 : row0 + rows], k[key0 : key0 + keys]
            g = z[: len(a) * len(b)].view(len(a), len(b))
            for _ in range(1 if row0 < kept else 2):
                torch.mm(a, b.T, out=g)
            for total, left, right in ((dq[: len(a)], g, b), (dk[: len(b)], g.T, a)):
                for term in right.split(total.shape[1], 1):
                    torch.addmm(total, left, term, out=total, **wide)
        return (dq, dk)

    return run


def _exact_results(package: Path, scale: float, inputs: Inputs) -> dict[str, Any] | None:
    """Loss and gradients in fp64, from the loss of a package; None where they do not fit into memory."""
    import torch

    from infcl_gen.verification.oracle import oracle_by_slices

    # Of loss.py alone: whether the package works is not known yet.
    specification = importlib.util.spec_from_file_location("infcl_gen_exact_loss", package / "loss.py")
    assert specification is not None and specification.loader is not None
    mathematics = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(mathematics)
    try:
        with torch.no_grad():
            exact = oracle_by_slices(mathematics, inputs.q, inputs.k, scale, inputs.labels)
            return {name: getattr(exact, name) for name in RESULTS}
    except Exception as error:
        if not out_of_memory(error):
            raise
    _release(inputs)
    return None
