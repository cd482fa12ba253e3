"""What a package must do, as functions that raise AssertionError: on a GPU, on the CPU, or in an interpreter process.

Each takes what to check (`Made`) first and the device last, so that a test reads the same wherever the kernels run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import mmap
import unittest.mock
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from infcl_gen.planning.schedule import gather_schedule, ring_schedule
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import LossAndGrads, oracle, plain_torch
from infcl_gen.verification.properties import DTYPES, Case, Inputs, check_case, tensors
from infcl_gen.verification.worker import averaged
from tests.kernels.guard import HUGE, LOW, NAN, GuardBands
from tests.kernels.packages import Made, generated, module
from tests.runtime.in_process import World


def numerics(made: Made, case: Case, device: str = "cpu") -> None:
    """The gate: loss, dq, dk, dscale and dbias are as accurate as their dtypes allow."""
    package = module(made)
    verdict = check_case(package, fitting(package, case), device)
    assert verdict.passed, f"{verdict.case}: {failures(verdict.rows)}"


def fitting(package: ModuleType, case: Case) -> Case:
    """The case with what the package was generated for."""
    problem = package.SPEC["problem"]
    keys = case.queries if package.SPEC["positives"] == "diagonal" else case.keys
    return dataclasses.replace(case, dim=problem["dim"], dtype=problem["dtype"], keys=keys)


def guarded(
    made: Made, sizes: list[tuple[int, int]], scale: float = 14.3, device: str = "cpu", step: int = 1
) -> None:
    """At each size: nothing outside a buffer is overwritten, nothing from there is let in, and the gate holds.

    Every `step`-th size runs a second time with other numbers outside, and must give the same bits.
    """
    package = module(made)
    for number, (queries, keys) in enumerate(sizes):
        case = fitting(package, Case(queries, keys, 0, scale=scale, seed=queries))
        inputs = tensors(case, package.SPEC["positives"], device)
        where = f"{case.queries} queries, {case.keys} keys"
        results, flags = [], []
        for poison in (NAN, HUGE if queries % 2 else LOW)[: 1 if number % step else 2]:
            with GuardBands(generated(made), poison) as bands, _accumulators_between(bands, package):
                q, k = (bands.place(x, name) for x, name in ((inputs.q, "q"), (inputs.k, "k")))
                labels = None if inputs.labels is None else bands.place(inputs.labels, "labels")
                results.append(package.loss_and_grads(q, k, inputs.scale, inputs.bias, labels=labels))
            damages = bands.damages()
            assert not damages, f"{where}: {damages}"
            assert len(bands.buffers) > 10, "the package's allocations were not seen"
            assert torch.equal(q, inputs.q) and torch.equal(k, inputs.k), f"{where}: an input was overwritten"
            flags.append(bands.written(torch.int32))
        judged = gate(results[0], truth(package, inputs))
        assert all(row.passed for row in judged), f"{where}: {failures(judged)}"
        same = [torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True)]
        assert all(same), f"{where}: what lies outside the buffers shows in {same}"
        assert torch.equal(flags[0], flags[-1]), (
            f"{where}: what lies outside the buffers decides what is flagged"
        )


def not_finite(made: Made, which: str, value: float, device: str = "cpu") -> None:
    """One element of q or k that is NaN or infinite: what it makes not finite in the oracle is so here too."""
    package = module(made)
    case = fitting(package, Case(100, 90, 0, scale=14.3, seed=2))
    inputs = tensors(case, package.SPEC["positives"], device)
    (inputs.q if which == "q" else inputs.k)[37, -1] = value
    ours = LossAndGrads(*package.loss_and_grads(inputs.q, inputs.k, inputs.scale, labels=inputs.labels))
    theirs = oracle(package, *inputs)
    if math.isnan(value):
        assert ours.loss.isnan() and ours.dscale.isnan() and ours.dbias.isnan(), f"{ours.loss} {ours.dscale}"
        assert (ours.dq[37] if which == "q" else ours.dk[37]).isnan().all()
    for name in ("loss", "dq", "dk", "dscale"):
        a, b = getattr(ours, name), getattr(theirs, name)
        swallowed = int((a.isfinite() & ~b.isfinite()).sum())
        assert not swallowed, f"{value} in {which}: {swallowed} elements of {name} are finite and must not be"


def not_finite_scalar(made: Made, which: str, value: float, device: str = "cpu") -> None:
    """A scale or bias that is NaN or infinite leaves nothing finite, though gradients may not depend on the bias."""
    package = module(made)
    inputs = tensors(fitting(package, Case(70, 70, 0)), package.SPEC["positives"], device)
    results = package.loss_and_grads(inputs.q, inputs.k, **{"scale": 3.0, which: value})
    for name, x in zip(LossAndGrads._fields, results, strict=True):
        assert not x.isfinite().any(), f"{which} {value}: {name} is finite"


def repeatable(made: Made, case: Case, repeats: int, device: str = "cpu") -> None:
    """The same bits every time, by `loss_and_grads` and by autograd, whatever the memory held before."""
    from infcl_gen.verification.properties import autograd_results

    package = module(made)
    inputs = tensors(fitting(package, case), package.SPEC["positives"], device)
    first = package.loss_and_grads(inputs.q, inputs.k, inputs.scale, inputs.bias, labels=inputs.labels)
    for repeat in range(repeats):
        again = package.loss_and_grads(inputs.q, inputs.k, inputs.scale, inputs.bias, labels=inputs.labels)
        for name, a, b in zip(LossAndGrads._fields, first, again, strict=True):
            assert torch.equal(a, b), f"{name} differs on repeat {repeat + 1} by {float((a - b).abs().max())}"
    for name, a, b in zip(LossAndGrads._fields, first, autograd_results(package, *inputs), strict=True):
        assert torch.equal(a, b), f"{name} differs between loss_and_grads and autograd"


def far_rows(made: Made, device: str = "cpu") -> None:
    """Rows so far apart that 32-bit offsets overflow. The wrapped addresses lie in memory of ours that holds NaN."""
    package = module(made)
    case = fitting(package, Case(70, 70, 0, scale=14.3))
    inputs = tensors(case, package.SPEC["positives"])
    stride, start = 1 << 26, 1 << 31  # row 32 begins 2^31 elements after row 0, and a panel has 64
    memory = _sparse(start + (case.queries + 1) * stride, DTYPES[case.dtype], device)
    memory[:start].view(-1, stride)[:, : 4 * case.dim] = math.nan
    q, k = (
        memory.as_strided(x.shape, (stride, 1), start + place * 2 * case.dim)
        for place, x in enumerate((inputs.q, inputs.k))
    )
    q.copy_(inputs.q)
    k.copy_(inputs.k)
    labels = None if inputs.labels is None else inputs.labels.to(device)
    result = package.loss_and_grads(q, k, inputs.scale, inputs.bias, labels=labels)
    judged = gate(result, truth(package, inputs._replace(q=q, k=k, labels=labels)))
    assert all(row.passed for row in judged), failures(judged)


def accumulators(made: Made, device: str = "cpu") -> None:
    """Gradients accumulate in fp32: their sums hold digits that the features' dtype does not have."""
    package = module(made)
    inputs = tensors(fitting(package, Case(130, 130, 0, scale=14.3)), package.SPEC["positives"], device)
    sums: list[Tensor] = []
    finish = package._schedule.finish

    def recording(total: Tensor, *rest: Any, **more: Any) -> None:
        sums.append(total.clone())
        finish(total, *rest, **more)

    package._schedule.finish = recording
    try:
        package.loss_and_grads(*inputs[:4], labels=inputs.labels)
    finally:
        package._schedule.finish = finish
    assert len(sums) >= 2
    for total in sums:
        kept = (total.to(inputs.q.dtype).to(total.dtype) == total).double().mean()
        assert total.dtype == torch.float32 and kept < 0.1, (
            f"{kept:.0%} of the sums were rounded to {inputs.q.dtype}"
        )


def small_probabilities(made: Made, device: str = "cpu") -> None:
    """Each negative has a probability of 2.6e-8, which rounds to 0 in fp16; together they are the whole gradient."""
    package = module(made)
    q = torch.zeros(
        8, package.SPEC["problem"]["dim"], device=device, dtype=DTYPES[package.SPEC["problem"]["dtype"]]
    )
    k = torch.zeros(200, q.shape[1], device=device, dtype=q.dtype)
    q[:, 0], k[0, 0], k[1:, 1] = 1.0, 1.0, 1.0
    labels = torch.zeros(8, dtype=torch.int64, device=device)
    ours, theirs = (
        package.loss_and_grads(q, k, 17.5, labels=labels)[1],
        oracle(package, q, k, 17.5, labels=labels).dq,
    )
    negatives = (
        ours[:, 1].double(),
        theirs[:, 1],
    )  # along the other axis 1 - p cancels, to an error of one fp32 rounding
    error = float((negatives[0] - negatives[1]).norm() / negatives[1].norm())
    assert error < 0.02, f"dq is wrong by {error:.1%}"
    plain = plain_torch(package, q, k, 17.5, labels=labels).dq
    whole, allowed = ((each.double() - theirs).norm() for each in (ours, plain))
    assert whole <= 2 * allowed, f"dq as a whole is wrong by {float(whole / theirs.norm()):.1%}"


def upstream(made: Made, device: str = "cpu") -> None:
    """Gradients are times the incoming one; by a power of two, to the bit where the result is no subnormal number."""
    package = module(made)
    inputs = tensors(fitting(package, Case(70, 70, 0, scale=2.0)), package.SPEC["positives"], device)
    q, k = inputs.q.requires_grad_(), inputs.k.requires_grad_()
    scale = torch.tensor(2.0, device=device, requires_grad=True)
    found = []
    for factor in (1.0, -4.0):
        loss = package.contrastive_loss(q, k, scale, labels=inputs.labels)
        found.append(torch.autograd.grad(factor * loss, (q, k, scale)))
    for name, a, b in zip(("dq", "dk", "dscale"), *found, strict=True):
        spacing = torch.finfo(a.dtype).smallest_normal * torch.finfo(a.dtype).eps  # of subnormal numbers
        wrong = (b.double() / -4.0 - a.double()).abs() > spacing
        assert not wrong.any(), f"{name} does not follow the incoming gradient"


def autocast(made: Made, device: str = "cpu") -> None:
    """Autocast to another dtype than the package's changes no bit."""
    package = module(made)
    inputs = tensors(fitting(package, Case(70, 70, 0, scale=14.3)), package.SPEC["positives"], device)
    first = package.loss_and_grads(*inputs[:4], labels=inputs.labels)
    with torch.autocast(device, torch.bfloat16 if inputs.q.dtype != torch.bfloat16 else torch.float16):
        second = package.loss_and_grads(*inputs[:4], labels=inputs.labels)
    for name, a, b in zip(LossAndGrads._fields, first, second, strict=True):
        assert torch.equal(a, b), f"autocast changes {name}"


def autocast_of_wider_features(made: Made, device: str = "cpu") -> None:
    """fp32 features under autocast to the package's dtype: its own results, with gradients that are not rounded. Often
    enough for a recording, and in turns with the package's dtype."""
    package = module(made)
    inputs = tensors(fitting(package, Case(70, 70, 0, scale=14.3)), package.SPEC["positives"], device)
    dtype = inputs.q.dtype
    plain = package.loss_and_grads(*inputs[:4], labels=inputs.labels)
    for _ in range(3):
        for _ in range(3):
            with torch.autocast(device, dtype):
                wide = package.loss_and_grads(
                    inputs.q.float(), inputs.k.float(), *inputs[2:4], labels=inputs.labels
                )
            assert wide[1].dtype == wide[2].dtype == torch.float32
            for name, a, b in zip(LossAndGrads._fields, plain, wide, strict=True):
                kind = torch.finfo(a.dtype)  # Triton's interpreter cuts bf16 where GPUs round
                off = (a.float() - b.float()).abs()
                allowed = kind.eps * b.float().abs() + kind.smallest_normal * kind.eps
                assert bool((off <= allowed).all()), f"wider features change {name}"
        again = package.loss_and_grads(*inputs[:4], labels=inputs.labels)
        for name, a, b in zip(LossAndGrads._fields, plain, again, strict=True):
            assert torch.equal(a, b), f"a call with wider features changes {name} of the next"
    rounded = [(a.float() != b).any() for a, b in zip(plain[1:3], wide[1:3], strict=True)]
    assert any(rounded), "gradients of wider features are rounded"


def second_derivative(made: Made, device: str = "cpu") -> None:
    """There is none, and that is said instead of returning a wrong one."""
    package = module(made)
    inputs = tensors(fitting(package, Case(7, 7, 0)), package.SPEC["positives"], device)
    q = inputs.q.requires_grad_()
    (gradient,) = torch.autograd.grad(package.contrastive_loss(q, inputs.k), q, create_graph=True)
    try:
        torch.autograd.grad(gradient.sum(), q)
    except RuntimeError as error:
        assert "twice" in str(error), error
    else:
        raise AssertionError("a second derivative was returned")


def left_of_a_transform(made: Made, device: str = "cpu") -> None:
    """Features that were kept when torch.func had ended: wrapped still, and without an address of their own."""
    package = module(made)
    inputs = tensors(fitting(package, Case(7, 7, 0)), package.SPEC["positives"], device)
    kept: list[Tensor] = []

    def total(x: Tensor) -> Tensor:
        kept.append(x)
        return x.float().sum()

    torch.func.grad(total)(inputs.q)
    loss = package.contrastive_loss(kept[0], inputs.k.requires_grad_())
    assert torch.equal(loss, package.contrastive_loss(inputs.q, inputs.k)), loss


def refuses_no_rows(made: Made, device: str = "cpu") -> None:
    """A group of one without a query or key has no loss: one clear error, and no kernel launch."""
    package = module(made)
    inputs = tensors(fitting(package, Case(5, 5, 0)), package.SPEC["positives"], device)
    for q, k in ((inputs.q[:0], inputs.k), (inputs.q, inputs.k[5:]), (inputs.q[:0], inputs.k[:0])):
        try:
            package.loss_and_grads(q, k)
        except ValueError as error:
            assert "at least one query and one key" in str(error), error
        else:
            raise AssertionError("an empty batch was accepted")


def copied_inputs(made: Made, device: str = "cpu") -> None:
    """What a recorded graph reads is what it was given: ragged sizes, any strides."""
    package = module(dataclasses.replace(made, settings=(*made.settings, ("replay", "on"))))
    dtype, dim = getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[made.dtype]), made.dim
    for rows, keys in ((33, 70), (1, 129)):
        q = torch.randn(dim, rows, device=device).to(dtype).T
        k = torch.randn(2 * keys, 3 * dim, device=device).to(dtype)[::2, 1::3]
        given = (q, k, torch.tensor(2.5, device=device), torch.tensor(-1.0, device=device))
        kept = [torch.full(x.shape, math.nan, dtype=x.dtype, device=device) for x in given]
        package._schedule.copy_inputs(*given, *kept)
        for name, x, y in zip(("q", "k", "scale", "bias"), given, kept, strict=True):
            assert torch.equal(x, y), f"{name} of {rows} x {keys}: copied wrongly"


def merged_ranks(made: Made, device: str = "cpu") -> None:
    """Sums of several ranks, ragged and of any range, are added up as in double precision, over what was there."""
    package = module(made)
    merge = package._schedule.merge_ranks
    for ranks, keys in ((1, 1), (2, 70), (5, 129), (40, 300)):
        random = torch.Generator().manual_seed(ranks)
        exponents = torch.randint(-300, 300, (ranks, keys), generator=random).float()
        mantissas = 1.0 + torch.rand(ranks, keys, generator=random)
        mantissas[-1, -1] = math.nan
        parts = torch.stack([exponents, mantissas], dim=1).to(device)
        found = torch.full((2, keys), math.nan, device=device)
        merge(parts, package._runtime.statistics.view(found))
        exponent, mantissa = found.cpu().double()
        assert mantissa[-1].isnan() and not mantissa[:-1].isnan().any(), f"{ranks} x {keys}: NaN strays"
        assert bool(((mantissa[:-1] >= 1) & (mantissa[:-1] < 2)).all()), f"{ranks} x {keys}: not normalised"
        exact = (mantissas.double().log2() + exponents.double()).mul(math.log(2)).logsumexp(0)
        errors = ((exponent + mantissa.log2()) * math.log(2) - exact)[:-1].abs()
        assert bool((errors <= 1e-6).all()), f"{ranks} x {keys}: the sum is off by {errors.max()}"


class _Graph:
    """Stands for a CUDA graph where there is no GPU: replaying it does the work again, into the first results."""

    def __init__(self, work: Callable[[], Any], results: Any) -> None:
        self.work, self.results, self.broken = work, results, False

    def pool(self) -> None: ...

    def replay(self) -> None:
        if self.broken:
            raise ZeroDivisionError
        for old, new in zip(_flat(self.results), _flat(self.work()), strict=True):
            old.copy_(new)


def over_ranks(
    made: Made, world: int, rows: list[list[int]], keeps: bool = True, device: str = "cpu"
) -> None:
    """Calls in one ring (or gather) of threads, of these rows on each rank, and as many keys on the ranks in the other
    order: the gate holds, nothing outside a buffer is overwritten, and backward has one scratch for all hops."""
    package = module(made)
    inner = package.ContrastiveLoss._package
    gathers = dict(made.settings).get("transport") == "gather"
    schedule = (gather_schedule if gathers else functools.partial(ring_schedule, 1, keeps=keeps))(
        world, inner.loss.HAS_KEYS
    )
    batches = []
    for number, shards in enumerate(rows):
        case = fitting(package, Case(sum(shards), sum(shards), 0, scale=14.3, seed=number))
        batches.append(tensors(case, package.SPEC["positives"], device))

    def job(rank: int) -> list[list[Tensor]]:
        found = []
        for shards, inputs in zip(rows, batches, strict=True):
            of_rank = [x.split(sizes)[rank] for x, sizes in ((inputs.q, shards), (inputs.k, shards[::-1]))]
            labels = None if inputs.labels is None else inputs.labels.split(shards)[rank]
            with GuardBands(generated(made), NAN) as bands:  # autograd would run backward outside of them
                results = package.loss_and_grads(*of_rank, inputs.scale, inputs.bias, labels=labels)
            assert not bands.damages(), f"rows {shards}, rank {rank}: {bands.damages()}"
            found.append(list(results))
        return found

    backward_scratch = inner.schedule.backward_scratch
    with unittest.mock.patch.object(
        inner.schedule, "backward_scratch", side_effect=backward_scratch
    ) as scratch:
        results = World(package, world, schedules={world: schedule}).run(job)
    working = sum(own > 0 for shards in rows for own in shards)
    assert scratch.call_count == working, f"{scratch.call_count} scratches for {working} sweeps"
    for shards, inputs, *parts in zip(rows, batches, *results, strict=True):
        judged = gate(averaged(parts), truth(package, inputs))
        assert all(row.passed for row in judged), f"rows {shards}: {failures(judged)}"


def _flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [x for part in results for x in _flat(part)]


def found_in_a_recording(made: Made) -> None:
    """A backward finds its own forward in a recording, or has it computed again, whatever ran in between."""
    package = module(dataclasses.replace(made, settings=(*made.settings, ("replay", "on"))))
    runtime = package.__name__ + "._runtime"
    engine, replay = (importlib.import_module(f"{runtime}.{name}") for name in ("engine", "replay"))
    bound, options = package.ContrastiveLoss._package, engine.Options()
    scale, bias, upstream = (torch.tensor(value) for value in (3.0, -1.0, 2.0))
    first, second = (
        (*tensors(fitting(package, Case(70, 70, 0, seed=seed)), "diagonal", "cpu")[:2], scale, bias, None)
        for seed in (1, 2)
    )

    def record(work: Callable[[], Any], pool: Any) -> tuple[_Graph, Any]:
        results = work()
        return _Graph(work, results), results

    def same(found: Any, expected: Any) -> None:
        for name, a, b in zip(LossAndGrads._fields[1:], found, expected, strict=True):
            assert torch.equal(a, b), f"{name} differs from that of a call that is not recorded"

    with unittest.mock.patch.object(replay, "_record", record):
        recorder, kind = replay._Recorder(bound), replay.Kind(70, 70, False, options, 0)
        replay._recorders[bound.digest, None] = recorder
        recorder.next(kind)
        recording = recorder.next(kind)
        loss, saved = recording.forward(*first)
        expected, kept = engine.forward(bound, *first, options, 0b1111)
        assert torch.equal(loss, expected)
        truth = engine.backward(bound, upstream, *first, kept, options)
        recording.forward(*second)
        for _ in range(2):
            same(recording.backward(upstream, *first, saved), truth)
        for capturing, keeps in ((True, True), (False, made.strategy != "stash")):
            with unittest.mock.patch.object(replay, "capturing", lambda device, answer=capturing: answer):
                replay.unrecorded_forward(bound, *second, options, 0)
                assert recorder.recording is recording
                replay.unrecorded_forward(bound, *second, options, 0b1111)
                assert (recorder.recording is recording) == keeps, "two stashes at once, or given up for none"
                recorder.recording = recording
                same(
                    replay.backward(bound, upstream, *first, saved, options), truth
                )  # as without a recording
                assert (recorder.recording is recording) == keeps, "two stashes at once, or given up for none"
                recorder.recording = recording
        with contextlib.ExitStack() as on_a_gpu:
            answers = {"_recorder": recorder, "_kind": kind, "capturing": False}
            answers["_plain_tensors"] = contextlib.nullcontext()
            for name, answer in answers.items():
                patch = unittest.mock.patch.object(replay, name, lambda *_, answer=answer: answer)
                on_a_gpu.enter_context(patch)
            assert not replay.forward(bound, *first, options, 0b1111)[1].stash.numel()
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                hooked = replay.forward(bound, *first, options, 0b1111)[1]
            assert hooked.stash.shape == kept.stash.shape, "hooks were given a stash that is not there"
            recorder.recording = recording
        recording._forward.broken = True
        with contextlib.suppress(ZeroDivisionError):
            recorder.attempt(lambda: recording.forward(*second))
        assert recorder.recording is None, "a backward could read what is half another call's"


def captured(made: Made, device: str = "cuda") -> None:
    """Forward and backward run without waiting for the device, and replay as a CUDA graph with other inputs."""
    package = module(made)
    inputs = tensors(
        fitting(package, Case(200, 200, 0, scale=14.3, seed=1)), package.SPEC["positives"], device
    )
    others = tensors(
        fitting(package, Case(200, 200, 0, scale=14.3, seed=3)), package.SPEC["positives"], device
    )
    q, k = inputs.q.clone().requires_grad_(), inputs.k.clone().requires_grad_()
    scale = torch.tensor(14.3, device=device, requires_grad=True)
    labels = inputs.labels

    def step() -> tuple[Tensor, ...]:
        loss = package.contrastive_loss(q, k, scale, labels=labels)
        return (loss.detach(), *torch.autograd.grad(loss, (q, k, scale)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles, and looks at the labels once
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    for source in (others, inputs):
        with torch.no_grad():
            q.copy_(source.q)
            k.copy_(source.k)
        for x in kept:
            x.fill_(math.nan)
        graph.replay()
        for name, a, b in zip(LossAndGrads._fields, kept, step(), strict=False):
            assert torch.equal(a, b), f"{name} of the replayed graph differs"


def recorded(made: Made, device: str = "cuda") -> None:
    """Recorded graphs give the bits of the same kernels launched one by one, whatever comes between two calls."""
    replaying, launching = (
        module(dataclasses.replace(made, settings=(*made.settings, ("replay", mode)), bug=bug))
        for mode, bug in (("on", made.bug), ("off", ""))
    )
    rows = [300, 300, 300, 301, *[300] * 4]
    batches = [
        tensors(
            fitting(replaying, Case(n, n, 0, scale=14.3 + i, bias=-float(i), seed=i)),
            replaying.SPEC["positives"],
            device,
        )
        for i, n in enumerate(rows)
    ]

    def leaves(inputs: Inputs) -> list[Tensor]:
        numbers = (torch.tensor(value or 0.0, device=device) for value in (inputs.scale, inputs.bias))
        return [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, *numbers)]

    def loss_of(package: ModuleType, x: list[Tensor], inputs: Inputs) -> Tensor:
        loss: Tensor = package.contrastive_loss(*x, labels=inputs.labels)
        return loss

    def one_by_one(package: ModuleType) -> Iterator[Tensor]:
        for factor, inputs in enumerate(batches, 1):
            x = leaves(inputs)
            loss = loss_of(package, x, inputs)
            yield from (loss.detach(), *torch.autograd.grad(factor * loss, x))

    def two_at_once(package: ModuleType) -> Iterator[Tensor]:
        first, second = leaves(batches[0]), leaves(batches[1])
        a, b = loss_of(package, first, batches[0]), loss_of(package, second, batches[1])
        yield from torch.autograd.grad(a, first, retain_graph=True)
        with torch.no_grad():
            yield loss_of(package, leaves(batches[2]), batches[2])
        yield from torch.autograd.grad(b, second)
        yield from torch.autograd.grad(a, first)

    def given_up(package: ModuleType) -> Iterator[Tensor]:
        first, other = leaves(batches[0]), leaves(batches[3])
        a = loss_of(package, first, batches[0])
        assert package is launching or all(recorder.recording for recorder in recorders.values())
        yield from torch.autograd.grad(loss_of(package, other, batches[3]), other)
        yield from torch.autograd.grad(a, first)

    with torch.inference_mode():  # records what the training steps below replay
        for package in (replaying, launching):
            for _ in range(3):
                loss_of(package, leaves(batches[0]), batches[0])
    recorders = importlib.import_module(f"{replaying.__name__}._runtime.replay")._recorders
    side = torch.cuda.Stream()
    for round_ in range(3):
        for recorder in recorders.values():
            recorder._wait = 1  # or it would wait for more calls alike than are made on the other stream
        kept = []
        for package in (replaying, launching):
            with torch.cuda.stream(side if round_ == 2 else torch.cuda.current_stream()):
                results = [*one_by_one(package), *two_at_once(package), *given_up(package)]
            torch.cuda.synchronize()
            kept.append(results)
        for index, (a, b) in enumerate(zip(*kept, strict=True)):
            assert torch.equal(a, b), f"round {round_}: result {index} differs"


def near_exact(made: Made, rows: int, device: str = "cuda") -> None:
    """fp32 features at scale 100: a log-sum-exp is within 1e-4 of fp64's, the gradients within 2e-5 of their norm."""
    package = module(made)
    runtime = package.__name__ + "._runtime"
    engine, statistics = (importlib.import_module(f"{runtime}.{name}") for name in ("engine", "statistics"))
    inputs = tensors(fitting(package, Case(rows, rows, 0, scale=100.0, seed=2)), "diagonal", device)
    scale, bias = (torch.tensor(value, device=device) for value in (100.0, 0.0))
    bound = package.ContrastiveLoss._package
    _, saved = engine.forward(bound, inputs.q, inputs.k, scale, bias, None, engine.Options(), 0)
    similarity = inputs.q.double() @ inputs.k.double().T
    for pair, axis in ((saved.query_statistics, 1), (saved.key_statistics, 0)):
        error = statistics.log(statistics.view(pair.double())) - torch.logsumexp(100.0 * similarity, axis)
        assert error.abs().max() <= 1e-4, f"a log-sum-exp is off by {float(error.abs().max()):.1e}"
    del similarity
    true = oracle(package, inputs.q, inputs.k, 100.0)
    ours = package.loss_and_grads(inputs.q, inputs.k, 100.0)
    for name in ("dq", "dk"):
        a, b = getattr(LossAndGrads(*ours), name), getattr(true, name)
        assert (a - b).norm() <= 2e-5 * b.norm(), f"{name} is off by {float((a - b).norm() / b.norm()):.1e}"


def split_products_in_parts(made: Made, device: str = "cpu") -> None:
    """Sums of split operands that are longer than one product of high halves may be."""
    schedule: Any = module(made)._schedule
    planned, schedule.EXACT_DEPTH = schedule.EXACT_DEPTH, 48
    try:
        for case in (Case(129, 129, 0, scale=14.3), Case(96, 96, 0, scale=100.0, seed=1)):
            numerics(made, case, device)
    finally:
        schedule.EXACT_DEPTH = planned


def far_accumulators(made: Made, device: str = "cuda") -> None:
    """Accumulators and results of more than 2^31 elements. Wrapped addresses lie in memory of ours."""
    package = module(made)
    schedule: Any = package._schedule
    dim, dtype = package.SPEC["problem"]["dim"], DTYPES[package.SPEC["problem"]["dtype"]]
    last, lead = 256, 1 << 31
    rows = -(-lead // dim) + last
    sums = torch.empty(lead + rows * dim, device=device)
    total = sums[lead:].view(rows, dim).zero_()
    out = torch.empty(lead + rows * dim, device=device, dtype=dtype)[lead:].view(rows, dim).fill_(math.nan)
    x = torch.zeros(rows, dim, device=device, dtype=dtype)
    x[-last:] = torch.randn(last, dim, device=device).to(dtype)
    if made.strategy != "fused":  # adds (last rows of g) x to the last rows of the accumulator
        g = torch.zeros(rows, 16, device=device, dtype=dtype)
        g[-last:] = torch.randn(last, 16, device=device).to(dtype)
        libraries, schedule.LIBRARY_PRODUCTS = schedule.LIBRARY_PRODUCTS, False
        try:
            schedule._add_product(total, g, x[-16:], False)
        finally:
            schedule.LIBRARY_PRODUCTS = libraries
        expected = g[-last:].double() @ x[-16:].double()
        wrong = float((total[-last:] - expected).abs().max())
        assert wrong < 1e-3, f"the product is wrong by {wrong} in its last rows"
    total[-last:] = torch.randn(last, dim, device=device)
    dots = torch.full((-(-rows // schedule.FINISH_ROWS),), math.nan, device=device)
    scale, zero, one = (torch.tensor(number, device=device) for number in (2.0, 0.0, 1.0))
    schedule.finish(total, x, scale, zero, one, 2.0**schedule.GRADIENT_EXPONENT, out, dots=dots)
    assert torch.equal(out[-last:], (2.0 * total[-last:]).to(dtype)), "finish is wrong in its last rows"
    assert not out[:last].any(), "finish is wrong in its first rows"
    found, expected = dots.double().sum(), (x[-last:].double() * total[-last:]).sum()
    assert abs(float(found - expected)) < 0.1, f"the sum of products is {found}, not {expected}"


def selftest(made: Made, device: str = "cpu") -> None:
    report = module(made).selftest(device)
    assert report["ok"], report


@contextlib.contextmanager
def _accumulators_between(bands: GuardBands, package: ModuleType) -> Iterator[None]:
    """The engine cuts accumulators out of one buffer: each gets bands of its own while the device sweep works on it."""
    schedule: Any = package._schedule
    backward_block, finish = schedule.backward_block, schedule.finish

    def guarded_block(*arguments: Any, **more: Any) -> None:
        *head, dq, dk = arguments
        kept = [bands.place(total, "an accumulator") for total in (dq, dk)]
        backward_block(*head, *kept, **more)
        dq.copy_(kept[0])
        dk.copy_(kept[1])

    def guarded_finish(total: Tensor, *arguments: Any, **more: Any) -> None:
        out = arguments[-1]
        kept = bands.place(total, "an accumulator")
        finish(kept, *arguments[:-1], kept if out is total else out, **more)
        if out is total:
            out.copy_(kept)

    schedule.backward_block, schedule.finish = guarded_block, guarded_finish
    try:
        yield
    finally:
        schedule.backward_block, schedule.finish = backward_block, finish


def truth(package: ModuleType, inputs: Inputs) -> Any:
    return truth_of(package, *inputs, precision=package.SPEC["problem"]["precision"])


def _sparse(elements: int, dtype: torch.dtype, device: str) -> Tensor:
    """Memory of which only the touched pages take room: on the CPU reserved nowhere, on a GPU simply there."""
    if device != "cpu":
        return torch.empty(elements, dtype=dtype, device=device)
    no_reserve = 0x4000  # MAP_NORESERVE of Linux
    size = elements * torch.empty(0, dtype=dtype).element_size()
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(pages, dtype=dtype)


def strided_labels(made: Made, device: str = "cpu") -> None:
    """Labels that are a column of a table, or one label for all, count as their contiguous copy does."""
    package = module(made)
    inputs = tensors(fitting(package, Case(70, 90, 0, scale=2.0)), "label", device)
    drawn = torch.randperm(90, generator=torch.Generator().manual_seed(0))[:70].to(device)
    table = torch.stack((drawn, drawn.flip(0)), dim=1)
    for labels in (table[:, 1], drawn[:1].expand(70)):
        ours, theirs = (
            package.loss_and_grads(inputs.q, inputs.k, 2.0, labels=each)
            for each in (labels, labels.contiguous())
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), labels.stride()
