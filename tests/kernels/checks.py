"""What a package must do, as functions that raise AssertionError: on a GPU, on the CPU, or in an interpreter process.

Each takes what to check (`Made`) first and the device last, so that a test reads the same wherever the kernels run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import mmap
import threading
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, softplus

from infcl_gen.emission import import_package
from infcl_gen.runtime.selftest import compared
from infcl_gen.runtime.table import Table
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import LossAndGrads, oracle, plain_torch
from infcl_gen.verification.properties import (
    DTYPES,
    Case,
    Inputs,
    check_case,
    check_package,
    inputs_of,
    neighbours,
    tensors,
)
from infcl_gen.verification.worker import averaged
from tests.kernels.guard import HUGE, LOW, NAN, GuardBands
from tests.kernels.packages import Made, generated, module
from tests.runtime.in_process import World
from tests.runtime.recording import record
from tests.tiers import LONG
from tests.verification.dense import dense, moving_average


def numerics(made: Made, case: Case, device: str = "cpu") -> None:
    """The gate: loss, dq, dk, dscale and dbias are as accurate as their dtypes allow."""
    package = module(made)
    case = fitting(package, case)
    rows = check_case(package, case, device)
    assert not failures(rows), f"{case}: {failures(rows)}"


def far_positives(made: Made, device: str = "cpu") -> None:
    """The gate where each positive is as far from its query as can be, and as many other keys are near it."""
    package, draw = module(made), torch.Generator().manual_seed(5)
    problem = package.SPEC["problem"]
    signs = 1.0 - 2.0 * (torch.arange(130) % 2)
    x = torch.nn.functional.normalize(torch.randn(131, problem["dim"], generator=draw), dim=1)
    k = (signs[:, None] * (x[0] + 0.02 * x[1:])).to(DTYPES[problem["dtype"]]).to(device)
    if package.ContrastiveLoss._package.traits.triangle:  # rows 2 i and 2 i + 1 are opposite
        inputs = Inputs(k, None, 500.0, None, None, (torch.arange(130) // 2).to(device))
    else:
        ids = (torch.arange(130) % 2).to(device)
        inputs = Inputs(k[::2].contiguous(), k, 500.0, None, None, torch.ones_like(ids)[::2], ids)
    judged = gate(package.loss_and_grads(*inputs[:4], **inputs.given), truth_of(package, inputs))
    assert not failures(judged), failures(judged)


def tied(made: Made, device: str = "cpu") -> None:
    """Of keys of which a guide finds four alike roundings decide which count: in the gradient those of the sum do. It
    then adds up to 0 over the keys of a query, as the last number of dq does where all keys have the same."""
    package, draw = module(made), torch.Generator().manual_seed(7)
    rows, dim, dtype = 130, package.SPEC["problem"]["dim"], DTYPES[made.dtype]
    u, v, k = (torch.nn.functional.normalize(torch.randn(rows, dim, generator=draw), dim=1) for _ in range(3))
    v, alike = v[torch.arange(rows) // 4], k[torch.arange(rows) // 4]
    k = alike + k / 8
    k[:, -1] = 1.0
    u, v, k = (x.to(dtype).to(device) for x in (u, v, k))
    q = torch.cat((4 * k[:, :-1], torch.zeros_like(k[:, -1:])), 1)
    _, dq, dk, *_ = package.loss_and_grads(q, k, 1.0, guide_queries=u, guide_keys=v)
    sums, sizes = rows * dq[:, -1].double().abs(), rows * dk.double().norm(dim=1) / q.double().norm(dim=1)
    assert float(sizes.max()) > 0.1, "no query has a gradient"
    assert float(sums.max()) <= 16 * torch.finfo(dtype).eps, f"a gradient adds up to {float(sums.max()):.1e}"


def fitting(package: ModuleType, case: Case) -> Case:
    """The case with what the package was generated for."""
    problem = package.SPEC["problem"]
    keys = case.queries if package.SPEC["positives"] == "diagonal" else case.keys
    return dataclasses.replace(case, dim=problem["dim"], dtype=problem["dtype"], keys=keys)


def guarded(made: Made, sizes: list[tuple[int, int]], scale: float = 14.3, device: str = "cpu", step: int = 1) -> None:
    """At each size: nothing outside a buffer is overwritten, nothing from there is let in, and the gate holds.

    Every `step`-th size runs a second time with other numbers outside, and must give the same bits.
    """
    package = module(made)
    for number, (queries, keys) in enumerate(sizes):
        case = fitting(package, Case(queries, keys, 0, scale=scale, seed=queries))
        inputs = inputs_of(package, case, device)
        if number == 0 and device != "cpu":  # compiles kernels by a rehearsal, whose buffers nothing writes
            package.loss_and_grads(*inputs[:4], **inputs.given)
        where = f"{case.queries} queries, {case.keys} keys"
        results, flags = [], []
        for poison in (NAN, HUGE if queries % 2 else LOW)[: 1 if number % step else 2]:
            with GuardBands(generated(made), poison) as bands, _accumulators_between(bands, package):
                q, k = (x if x is None else bands.place(x, name) for x, name in ((inputs.q, "q"), (inputs.k, "k")))
                given = {name: x if x is None else bands.place(x, name) for name, x in inputs.given.items()}
                results.append(package.loss_and_grads(q, k, inputs.scale, inputs.bias, **given))
            damages = bands.damages()
            assert not damages, f"{where}: {damages}"
            assert len(bands.buffers) > 10, "the package's allocations were not seen"
            traits = package.ContrastiveLoss._package.traits
            apart = any(len(buffer.starts) > 2 - traits.pairs for buffer in bands.buffers)
            assert apart or traits.at_once, "statistics were not taken apart"
            kept = [x is None or torch.equal(x, given) for x, given in ((q, inputs.q), (k, inputs.k))]
            assert all(kept), f"{where}: an input was overwritten"
            flags.append(bands.written(torch.int32))
        judged = gate(results[0], truth_of(package, inputs))
        assert all(row.passed for row in judged), f"{where}: {failures(judged)}"
        same = [torch.equal(a, b) for _, a, b in compared(results[0], results[-1])]
        assert all(same), f"{where}: what lies outside the buffers shows in {same}"
        assert torch.equal(flags[0], flags[-1]), f"{where}: what lies outside the buffers decides what is flagged"


def not_finite(made: Made, which: str, value: float, device: str = "cpu") -> None:
    """One element of q or k that is NaN or infinite: what it makes not finite in the oracle is so here too."""
    package = module(made)
    case = fitting(package, Case(100, 90, 0, scale=14.3, seed=2))
    inputs = tensors(case, package.SPEC["positives"], device)
    (inputs.q if which == "q" else inputs.k)[37, -1] = value
    ours = LossAndGrads(*package.loss_and_grads(inputs.q, inputs.k, inputs.scale, labels=inputs.labels))
    theirs = oracle(package, inputs)
    if math.isnan(value):
        assert ours.loss.isnan() and ours.dscale.isnan() and ours.dbias.isnan(), f"{ours.loss} {ours.dscale}"
        assert (ours.dq[37] if which == "q" else ours.dk[37]).isnan().all()
    for name in ("loss", "dq", "dk", "dscale"):
        a, b = getattr(ours, name), getattr(theirs, name)
        swallowed = int((a.isfinite() & ~b.isfinite()).sum())
        assert not swallowed, f"{value} in {which}: {swallowed} elements of {name} are finite and must not be"


def guide_not_finite(made: Made, device: str = "cpu") -> None:
    """A guide's number that is NaN leaves no loss, and no gradient of its query."""
    package = module(made)
    inputs = inputs_of(package, fitting(package, Case(100, 100, 0, scale=14.3, seed=2)), device)
    for name in ("guide_queries", "guide_keys"):
        spoilt = getattr(inputs, name).clone()
        spoilt[37, -1] = math.nan
        given = inputs._replace(**{name: spoilt})
        loss, dq, *_ = package.loss_and_grads(*given[:4], **given.given)
        assert loss.isnan() and dq[37].isnan().all(), f"NaN in {name}: the loss is {float(loss)}, finite gradients"


def not_finite_scalar(made: Made, which: str, value: float, device: str = "cpu") -> None:
    """A scale or bias that is NaN or infinite leaves nothing finite, though gradients may not depend on the bias."""
    package = module(made)
    inputs = tensors(fitting(package, Case(70, 70, 0)), package.SPEC["positives"], device)
    results = package.loss_and_grads(inputs.q, inputs.k, **{"scale": 3.0, which: value})
    for name, x in zip(LossAndGrads._fields, results, strict=True):
        assert not x.isfinite().any(), f"{which} {value}: {name} is finite"


def own_numbers(made: Made, device: str = "cpu") -> None:
    """Gradients by weights of queries and by their negatives are those of the oracle; rows of weight 0 have none."""
    package = module(made)
    inputs = inputs_of(package, fitting(package, Case(129, 100, 0, scale=3.0, seed=5)), device)
    given = {
        name: x.requires_grad_() if x is not None and x.is_floating_point() else x for name, x in inputs.given.items()
    }
    own = [x for x in given.values() if x is not None and x.requires_grad]
    loss, truth = package.contrastive_loss(*inputs[:3], **given), package.reference(*inputs[:3], **given)
    for name, a, b in zip(("weights", "negatives"), *(torch.autograd.grad(x, own) for x in (loss, truth)), strict=True):
        error = float((a - b).double().norm() / b.double().norm())
        assert error < 0.01, f"gradients of {name} are off by {error:.2g}"
    q = inputs.q.requires_grad_()
    (dq,) = torch.autograd.grad(package.contrastive_loss(q, *inputs[1:3], **given), q)
    nothing = given["query_weight"] == 0
    assert bool(nothing.any()) and not bool(dq[nothing].any()), "a query of weight 0 has a gradient"


def losses_of_rows(made: Made, device: str = "cpu") -> None:
    """The loss of each query, and gradients for a factor of each, of which some are 0. Their mean is the loss."""
    package, name = module(made), made.loss.removesuffix("_of_rows")
    inputs = inputs_of(package, fitting(package, Case(130, 130, 0, scale=14.3, seed=3)), device)
    factors = torch.linspace(-1, 1, 130, device=device).masked_fill(torch.arange(130, device=device) % 7 == 2, 0.0)
    given = {each: x for each, x in inputs.given.items() if x is not None}

    def found(features: torch.dtype, losses: Any) -> list[Tensor]:
        numbers = torch.promote_types(features, torch.float32)
        leaves = [x.to(features).requires_grad_() for x in (inputs.q, inputs.others)]
        leaves += [torch.tensor(x, dtype=numbers, device=device, requires_grad=True) for x in (14.3, -5.0)]
        values = losses(*leaves)
        gradients = torch.autograd.grad(values, leaves, factors.to(values.dtype), materialize_grads=True)
        return [values.detach(), *gradients]

    def dense(q: Tensor, k: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        if hasattr(package.loss, "PREFIXES"):  # of each prefix, as of all features at once
            parts = zip(package.loss.PREFIXES, package.loss.PREFIX_WEIGHTS, strict=True)
            slices = ([x[:, :columns] for x in (q, k)] + [weight] for columns, weight in parts)
            through = functools.partial(normalize, dim=1) if package.loss.RENORMALISE else lambda x: x
            return sum(weight * of_all(through(a), through(b), scale, bias) for a, b, weight in slices)
        return of_all(q, k, scale, bias)

    def of_all(q: Tensor, k: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        x, own = scale * q @ k.T, inputs.positives()
        if name.startswith(("clip", "infonce", "smooth")):
            smoothing = 0.1 if name == "smooth" else 0.0
            sides = [cross_entropy(y, own, reduction="none", label_smoothing=smoothing) for y in (x, x.T)]
            return sum(sides) / 2 if name.startswith("clip") else sides[0]
        same, positive = inputs.same_id(), own[:, None] == torch.arange(len(k), device=device)
        if name == "squares_by_id":
            assert same is not None
            return (x - torch.where(positive, 1.0, 0.5 * same)).square().sum(1)
        return softplus(torch.where(positive if same is None else same, -x - bias, x + bias)).sum(1)

    of_rows = functools.partial(package.contrastive_loss, reduction="none", **given)
    ours = found(inputs.q.dtype, of_rows)
    assert ours[0].dtype == torch.float32
    whole = package.contrastive_loss(inputs.q, inputs.k, 14.3, -5.0, **given)
    results = zip(("losses", "dq", "dk", "dscale", "dbias"), ours, found(torch.float64, dense), strict=True)
    for of, value, true in (*results, ("the mean", whole, ours[0].double().mean())):
        error = float((value.double() - true).norm() / max(1e-2, true.norm()))
        exact = made.dtype == "fp32" and value.dim()  # sums of slopes cancel, and of halves that are cut less
        assert error < (1e-4 if exact else 1e-2), f"{of} are off by {error:.1e}"


def next_states(made: Made, device: str = "cpu") -> None:
    """A call leaves the next states of their definition, those of a first visit, too, with and without gradients."""
    package = module(made)
    inputs = inputs_of(package, fitting(package, Case(129, 100, 0, scale=3.0, seed=5)), device)
    assert inputs.k is not None and inputs.query_state is not None
    z, own, scale = inputs.q.double() @ inputs.k.double().T, inputs.positives(), torch.tensor(3.0, device=device)
    sides = {"query_state": (z, inputs.query_weight), "key_state": (z.T, inputs.key_weight)}
    same_id = inputs.same_id()
    for call in (package.loss_and_grads, package.contrastive_loss):
        given = inputs.given
        call(*inputs[:3], **given)
        for name, (x, rate) in sides.items():
            before = getattr(inputs, name)
            if before is None:
                continue
            if rate is None:
                _, expected = moving_average(x, scale, own, before)
            else:
                terms = 3 * (x - x.gather(1, own[:, None]))
                if same_id is not None:
                    left_out = (same_id if name == "query_state" else same_id.T).scatter(1, own[:, None], False)
                    terms = terms.masked_fill(left_out, -torch.inf)
                before = before.clamp(min=-4)
                expected = before + rate * (terms.logsumexp(1) - before)
            error = float((given[name] - expected).abs().max())
            assert error < 0.02, f"{name} is off by {error:.2g}"


def repeatable(made: Made, case: Case, repeats: int, device: str = "cpu") -> None:
    """The same bits every time, by `loss_and_grads` and by autograd, whatever the memory held before."""
    from infcl_gen.verification.properties import autograd_results

    package = module(made)
    inputs = inputs_of(package, fitting(package, case), device)
    first = package.loss_and_grads(*inputs[:4], **inputs.given)
    for repeat in range(repeats):
        again = package.loss_and_grads(*inputs[:4], **inputs.given)
        for name, a, b in compared(first, again):
            assert torch.equal(a, b), f"{name} differs on repeat {repeat + 1} by {float((a - b).abs().max())}"
    for name, a, b in compared(first, autograd_results(package, inputs)):
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
    judged = gate(result, truth_of(package, inputs._replace(q=q, k=k, labels=labels)))
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
        assert total.dtype == torch.float32 and kept < 0.1, f"{kept:.0%} of the sums were rounded to {inputs.q.dtype}"


def small_probabilities(made: Made, device: str = "cpu") -> None:
    """Each negative has a probability of 2.6e-8, which rounds to 0 in fp16; together they are the whole gradient."""
    package = module(made)
    q = torch.zeros(8, package.SPEC["problem"]["dim"], device=device, dtype=DTYPES[package.SPEC["problem"]["dtype"]])
    k = torch.zeros(200, q.shape[1], device=device, dtype=q.dtype)
    q[:, 0], k[0, 0], k[1:, 1] = 1.0, 1.0, 1.0
    labels = torch.zeros(8, dtype=torch.int64, device=device)
    inputs = Inputs(q, k, 17.5, labels=labels)
    ours, theirs = (package.loss_and_grads(q, k, 17.5, labels=labels)[1], oracle(package, inputs).dq)
    negatives = (
        ours[:, 1].double(),
        theirs[:, 1],
    )  # along the other axis 1 - p cancels, to an error of one fp32 rounding
    error = float((negatives[0] - negatives[1]).norm() / negatives[1].norm())
    assert error < 0.02, f"dq is wrong by {error:.1%}"
    plain = plain_torch(package, inputs).dq
    whole, allowed = ((each.double() - theirs).norm() for each in (ours, plain))
    assert whole <= 2 * allowed, f"dq as a whole is wrong by {float(whole / theirs.norm()):.1%}"


def solved(made: Made, device: str = "cpu") -> None:
    """Pairs that see nobody else have no loss and no gradient, and nearly solved batches those of the few they see."""
    package = module(made)
    dim, dtype = package.SPEC["problem"]["dim"], DTYPES[package.SPEC["problem"]["dtype"]]

    def features(rows: int, seed: int) -> Tensor:
        x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return (x / x.norm(dim=1, keepdim=True)).to(dtype).to(device)

    # Beside a row's own logit all others are 2^-150 or less: the same as none.
    alone = [(1, scale) for scale in (1.0, 7.0, 40.0, 100.0, 1000.0)] + [(70, 1e5)]
    for seed, (rows, scale) in enumerate(alone):
        x = features(rows, seed)
        results = package.loss_and_grads(x, x.clone(), scale)
        for name, found in zip(LossAndGrads._fields, results, strict=True):
            assert not found.any(), f"{name} of {rows} solved rows at scale {scale} is {found.abs().max()}"
    eps, smallest = torch.finfo(dtype).eps, torch.finfo(torch.float32).tiny
    if package.SPEC["plan"].get("split") or dtype == torch.float64:  # sums of 16 bits; plain torch is the oracle
        return
    for rows, scale in ((2, 7.0), (70, 20.0), (70, 40.0)):
        x = features(rows, rows)
        ours = LossAndGrads(*package.loss_and_grads(x, x.clone(), scale))
        true, plain = (f(package, Inputs(x, x.clone(), scale)) for f in (oracle, plain_torch))
        for name in ("dq", "dk"):
            wanted = getattr(true, name)
            error, allowed = ((getattr(found, name).double() - wanted).norm() for found in (ours, plain))
            allowed = 1.05 * allowed + eps * wanted.norm() + scale * smallest
            assert error <= allowed, f"{name} of {rows} rows at scale {scale}: {error:.1e}, not {allowed:.1e}"


def smoothed(made: Made, device: str = "cpu") -> None:
    """Label smoothing of a tenth is solved where a positive has the probability 0.9 + 0.1 / N and all others share the
    rest: the parts of the gradient cancel. The gate holds there, beyond it, and for a pair that sees nobody else."""
    package = module(made)
    dtype = DTYPES[package.SPEC["problem"]["dtype"]]
    for rows, beyond in ((70, 0.0), (70, 1.0), (70, 20.0), (1, 0.0), (1, 40.0)):
        x = torch.eye(rows, package.SPEC["problem"]["dim"], dtype=torch.float64).to(device, dtype)
        solved = math.log((0.9 * rows + 0.1) / 0.1) if rows > 1 else 1.0
        inputs = Inputs(x, x.clone(), solved + beyond)
        found, truth = package.loss_and_grads(*inputs[:3]), truth_of(package, inputs)
        judged = gate(found, truth)
        assert not failures(judged), f"{rows} rows, {beyond} beyond: {failures(judged)}"
        if rows > 1 and not beyond:
            assert float(truth.reference.dq.norm()) < 1e-2 * solved * math.sqrt(0.1 / rows), "it is not solved"


def large_logits(made: Made, device: str = "cpu", layout: str = "contiguous") -> None:
    """Logits up to 1e9: fp32 rounds them by up to 64, and all kernels must round them alike."""
    package = module(made)
    coarse = 2.0**-7 if package.SPEC["problem"]["dtype"] != "fp32" else 2.0**-15
    for norm, scale in ((3e3, 1.0), (3e4, 1.0), (1.0, 1e7), (1.0, 1e9)):
        case = fitting(package, Case(70, 70, 0, layout=layout, seed=80))  # no row or column has two largest logits
        inputs = tensors(case, package.SPEC["positives"], device)
        q, k = (x.mul_(norm) for x in inputs[:2])
        ours = LossAndGrads(*package.loss_and_grads(q, k, scale, labels=inputs.labels))
        true = oracle(package, Inputs(q, k, scale, labels=inputs.labels))
        for name in ("loss", "dq", "dk"):
            found, wanted = getattr(ours, name).double(), getattr(true, name)
            error = float((found - wanted).norm() / wanted.norm())
            assert error <= coarse, f"{name} is wrong by {error:.1e} at norms {norm} and scale {scale}"


def one_large_key(made: Made, device: str = "cpu") -> None:
    """Logits of one key are in the hundreds: alone, and beside a NaN of a key whose logits the same thread adds up.
    Half of the panels have whole tiles and no positives."""
    package = module(made)
    schedule: Any = package._schedule
    tiles = schedule.kernels.GRADIENT_ROWS, schedule.kernels.GRADIENT_KEYS, schedule.kernels.FORWARD_KEYS
    side = max(tile.value for tile in tiles)
    case = fitting(package, Case(2 * side, 2 * side, 0, scale=14.3, seed=5))
    inputs = tensors(case, package.SPEC["positives"], device)
    large, missing = side + 13, side + 5  # 8 columns apart; the first panel that has them has no positives
    inputs.k[large] *= 200.0
    true = oracle(package, inputs)
    sides = dict.fromkeys(("PANEL_ROWS", "PANEL_KEYS", "FORWARD_ROWS", "FORWARD_KEYS"), side)
    with unittest.mock.patch.multiple(schedule, **sides):
        ours = LossAndGrads(*package.loss_and_grads(*inputs[:4], labels=inputs.labels))
        with torch.no_grad():
            alone = package.contrastive_loss(*inputs[:4], labels=inputs.labels)
        inputs.k[missing] = math.nan
        others = torch.arange(2 * side, device=device) != missing
        found = package.loss_and_grads(*inputs[:4], labels=inputs.labels)[2][others]
    pairs = [(getattr(ours, name), getattr(true, name)) for name in LossAndGrads._fields]
    for value, wanted in (*pairs, (alone, true.loss), (found, true.dk[others])):
        error = float((value.double() - wanted).norm() / wanted.norm())
        assert error <= 2.0**-7, f"wrong by {error:.1e}"


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
    turns = 1 if device == "cpu" else 3  # only on a GPU calls are recorded and replayed
    for _ in range(turns):
        for _ in range(turns):
            with torch.autocast(device, dtype):
                wide = package.loss_and_grads(inputs.q.float(), inputs.k.float(), *inputs[2:4], labels=inputs.labels)
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
    for wrapped, plain in zip(
        package.loss_and_grads(kept[0], inputs.k.detach()),  # which autograd does not unwrap
        package.loss_and_grads(inputs.q, inputs.k.detach()),
        strict=True,
    ):
        assert torch.equal(wrapped, plain), wrapped


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
    dtype, dim = DTYPES[made.dtype], made.dim
    for rows, keys in ((33, 70), (1, 129)):
        q = torch.randn(dim, rows, device=device).to(dtype).T
        k = torch.randn(2 * keys, 3 * dim, device=device).to(dtype)[::2, 1::3]
        given = (q, k, torch.tensor(2.5, device=device), torch.tensor(-1.0, device=device))
        kept = [torch.full(x.shape, math.nan, dtype=x.dtype, device=device) for x in given]
        package._schedule.copy_inputs(*given, *kept)
        for name, x, y in zip(("q", "k", "scale", "bias"), given, kept, strict=True):
            assert torch.equal(x, y), f"{name} of {rows} x {keys}: copied wrongly"


def long_strips(made: Made, device: str = "cpu") -> None:
    """Programs that walk two blocks, and one, where small problems give each program one."""
    package = module(made)
    two = unittest.mock.patch.object(package._schedule, "strip_blocks", lambda walked, *_: min(2, walked))
    with two:
        guarded(made, [(100, 97)], device=device)
        if made.dtype == "fp32":  # a column's reference is another in each strip: a positive's must be its own
            solved(made, device)


def many_parts(made: Made, device: str = "cpu") -> None:
    """More partial sums than a program adds at a time, which are 1 024; terms that cancel are added in fp64."""
    package = module(made)
    schedule, launch = package._schedule, package._runtime.launch.launch
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    parts = torch.arange(1.0, 3001.0, device=device)
    parts[::2] *= -1
    parts[0], parts[-1] = 2.0**40, -(2.0**40)
    wanted = float(parts.double().sum())
    dscale, _ = schedule.scalar_gradients(parts, one, zero, one, 1.0, 1)
    assert float(dscale) == wanted * 2.0**-schedule.GRADIENT_EXPONENT, f"dscale {dscale}, not {wanted}"
    if made.strategy != "torch":
        loss = torch.full((), math.nan, device=device)
        arguments = {"part_sums": parts.double(), "loss": loss, "parts": len(parts)}
        launch(package._schedule.kernels.total_loss, (1,), **arguments, BLOCK=1024, num_warps=4, num_stages=1)
        assert float(loss) == wanted, f"loss {loss}, not {wanted}"


def flagged_sums(made: Made, device: str = "cpu") -> None:
    """A strip of the forward is computed again where fp32 loses digits of its sums, and only there.

    That is beyond 2^-80 and 2^100 times 2^reference, which is 10 below the largest y of the sampled rows.
    """
    package = module(made)
    schedule: Any = package._schedule
    ln2, zero = torch.tensor(math.log(2), device=device), torch.zeros((), device=device)
    # Row 2 of 96 is not sampled. y is the first feature: scale is the logarithm of 2.
    for y, flagged in ((-89.0, False), (-91.0, True), (89.0, False), (91.0, True)):
        q, k = (torch.zeros(rows, made.dim, dtype=DTYPES[made.dtype], device=device) for rows in (96, 1))
        q[2, 0], k[0, 0] = y, 1.0
        scratch = schedule.forward_scratch(q, 1)
        block = package._runtime.package.Block(q, k, ln2, zero, 0, 0, None, None, None)
        schedule._forward_panel(block, scratch)
        found = [bool(flag) for flag in scratch.flags[:3]]
        assert found == [flagged, False, False], f"flags {found} where a row has y = {y}"


def flagged_gradients(made: Made, device: str = "cpu") -> None:
    """A strip of the backward is computed again where the exponent of a row or key lies too low, and only there.

    That is more than 80 below the reference of a block, which is 10 below its largest exponent.
    """
    package = module(made)
    schedule, statistics = package._schedule, package._runtime.statistics
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    prefixes = len(package.ContrastiveLoss._package.traits.slabs)
    count = prefixes or 1
    for low, flagged in ((-89.0, False), (-91.0, True)):
        for side, prefix in itertools.product((0, 1), range(count)):
            sides = [torch.zeros(2 * count, 64, device=device) for _ in range(2)]
            sides[side][prefix, 5] = low
            for each in sides:
                each[count:] = 1.0
            x = torch.zeros(64, made.dim, dtype=DTYPES[made.dtype], device=device)
            positive = statistics.by_prefix(torch.zeros(schedule.POSITIVE_PARTS * count, 64, device=device), prefixes)
            sums = [torch.zeros(64, made.dim, device=device) for _ in range(2)]
            scratch = schedule.backward_scratch(64, 64, x.device)
            scratch.flags.zero_()
            pairs = [statistics.view(each, prefixes) for each in sides]
            block = package._runtime.package.Block(x, x, one, zero, 0, 0, *pairs, positive)
            if package.ContrastiveLoss._package.traits.renormalised:
                names = ("query_factors", "key_factors", "query_radial", "key_radial")
                block = block._replace(**{name: torch.ones(count, 64, device=device) for name in names})
            schedule.backward_block(block, *sums, scratch)
            found = bool(scratch.flags.any())
            assert found == flagged, f"flagged: {found}, where an exponent of side {side}, prefix {prefix} is {low}"


def positives_behind_the_last_key(made: Made, device: str = "cpu") -> None:
    """Positives whose columns lie in a ragged tile, behind its last key: another panel or rank has them. Their g, which
    nobody has written, enters no sum: gradients and radial sums are those of the keys that are here."""
    package, draw, rows, scale = module(made), torch.Generator().manual_seed(9), 100, 20.0
    schedule, runtime = package._schedule, package._runtime
    traits = package.ContrastiveLoss._package.traits
    count, own = len(traits.prefixes), torch.arange(rows, 2 * rows, device=device) if traits.labels else rows
    q, k = (torch.randn(rows, made.dim, generator=draw).to(DTYPES[made.dtype]).to(device) for _ in range(2))
    factors = [runtime.renormalised.factors_of(x, traits.prefixes, torch.float32) for x in (q, k)]
    radial = [torch.zeros(count, rows, device=device) for _ in range(2)]
    complete = runtime.statistics.Statistics(*(torch.full((count, rows), x, device=device) for x in (6.0, 1.0)))
    block = runtime.package.Block(
        q, k, torch.tensor(scale, device=device), torch.zeros((), device=device), own, 0, complete,
        complete if traits.has_keys else None, torch.zeros(schedule.POSITIVE_PARTS, count, rows, device=device),
        query_factors=factors[0], key_factors=factors[1], query_radial=radial[0], key_radial=radial[1],
    )  # fmt: skip
    scratch = schedule.backward_scratch(rows, rows, q.device)
    scratch.prefix_g.fill_(math.nan)
    dq, dk = (torch.zeros(rows, made.dim, device=device) for _ in range(2))
    schedule.backward_block(block, dq, dk, scratch, fresh_dq=True, fresh_dk=True)
    expected = [torch.zeros_like(x, dtype=torch.float64) for x in (dq, dk, *radial)]
    for number, (columns, weight) in enumerate(zip(traits.prefixes, schedule.WEIGHTS, strict=True)):
        a, b = q[:, :columns].double(), k[:, :columns].double()
        of_pairs = torch.outer(factors[0][number].double(), factors[1][number].double())
        g = weight * torch.exp2(a @ b.T * of_pairs * scale / math.log(2.0) - 6.0) * of_pairs
        expected[0][:, :columns] += g @ b
        expected[1][:, :columns] += g.T @ a
        expected[2][number], expected[3][number] = ((g * (a @ b.T)).sum(axis) for axis in (1, 0))
    for name, found, truth in zip(("dq", "dk", "radial rows", "radial keys"), (dq, dk, *radial), expected, strict=True):
        assert found.isfinite().all(), f"{name}: {int((~found.isfinite()).sum())} numbers are not finite"
        error = float((found - truth).norm() / truth.norm())
        assert error < 2.0 * torch.finfo(q.dtype).eps, f"{name}: an error of {error:.1e}"


def unflagged_triangle(made: Made, device: str = "cpu") -> None:
    """The similarity of a row and itself, the largest of all, decides no reference; rows of which a tile leaves out all
    do not flag its strip. Of many columns, others' y lie within 2^40 of each other, and 2^100 below that of a row and
    itself."""
    package = module(made)
    schedule: Any = package._schedule
    inputs = inputs_of(package, fitting(package, Case(64, 64, 0, scale=100.0, seed=2)), device)
    scratches: list[Any] = []

    def kept(*arguments: Any, make: Any = schedule.forward_scratch) -> Any:
        scratches.append(make(*arguments))
        return scratches[-1]

    with unittest.mock.patch.object(schedule, "forward_scratch", kept):
        package.loss_and_grads(inputs.q, None, inputs.scale)
    assert not scratches[0].flags.any(), f"strips are flagged: {scratches[0].flags}"


def merged_ranks(made: Made, device: str = "cpu") -> None:
    """Sums of several ranks, ragged and of any range, are added up as in double precision, over what was there."""
    package = module(made)
    merge = package._schedule.merge_ranks
    for ranks, keys in ((1, 1), (2, 70), (5, 129), (40, 300), (130, 33)):  # a kernel takes 64 at a time
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


def rows_without_partners(made: Made, device: str = "cpu") -> None:
    """Labels that are not looked at, where rows are not pairs: the loss and all gradients are NaN."""
    package = module(made)
    q = inputs_of(package, fitting(package, Case(6, 6, 0)), device).q
    agreement = importlib.import_module(f"{package.__name__}._runtime.agreement")
    with unittest.mock.patch.object(agreement, "_label_range", lambda *_: (0, -1)):
        for labels in ([1, 0, 3, 2, 0, 4], [1, 0, 3, 2, 5, 6]):
            loss, dq, *_ = package.loss_and_grads(q, None, labels=torch.tensor(labels, device=device))
            assert loss.isnan() and dq.isnan().all(), f"labels {labels}"
        loss, dq, *_ = package.loss_and_grads(q, None, labels=neighbours(6).to(device))
        assert loss.isfinite() and dq.isfinite().all()


def over_ranks(
    made: Made, world: int, rows: list[list[int]], keeps: bool = True, device: str = "cpu", scale: float = 14.3
) -> None:
    """Calls in one ring (or gather) of threads, of these rows on each rank, and as many keys on the ranks in the other
    order, unless each rank needs its queries' own keys: the gate holds, nothing outside a buffer is overwritten, and
    gradients have one scratch for all hops."""
    package = module(made)
    inner = package.ContrastiveLoss._package
    gathers = dict(made.settings).get("transport") == "gather"
    kept = keeps and not gathers and inner.traits.keeps_keys
    whole = inner.table.whole
    how = {"nodes": 1, "devices_per_node": world, "keeps": kept}
    table = dataclasses.replace(inner.table, transport="gather" if gathers else "ring", **how)
    batches = []
    for number, shards in enumerate(rows):
        case = fitting(package, Case(sum(shards), sum(shards), 0, scale=scale, seed=number))
        batches.append(inputs_of(package, case, device))
        if inner.traits.triangle and inner.traits.labels:  # a row's other view is on any rank, or must be on its own
            labels = neighbours(sum(shards)).to(device) if inner.traits.mutual else batches[-1].positives()
            batches[-1] = batches[-1]._replace(labels=labels)

    def sides(shards: list[int]) -> tuple[list[int], list[int]]:
        return shards, shards if inner.traits.own_keys else shards[::-1]

    def job(rank: int) -> list[list[Tensor]]:
        found = []
        for shards, inputs in zip(rows, batches, strict=True):
            queries, keys = (slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) for sizes in sides(shards))
            own = inputs.of_rank(queries, keys)
            with GuardBands(generated(made), NAN) as bands:  # autograd would run backward outside of them
                results = package.loss_and_grads(*own[:4], **own.given)
            assert not bands.damages(), f"rows {shards}, rank {rank}: {bands.damages()}"
            found.append(list(results))
        return found

    name = "rows_scratch" if whole else "backward_scratch"
    with unittest.mock.patch.object(inner.schedule, name, side_effect=getattr(inner.schedule, name)) as scratch:
        results = World(package, world, tables={world: table}).run(job)
    working = sum(own > 0 for shards in rows for own in shards)  # of queries
    assert scratch.call_count == working, f"{scratch.call_count} scratches for {working} sweeps"
    for shards, inputs, *parts in zip(rows, batches, *results, strict=True):
        judged = gate(averaged(parts), truth_of(package, inputs))
        assert all(row.passed for row in judged), f"rows {shards}: {failures(judged)}"


def begun_over_ranks(made: Made, shards: list[int], begun: list[tuple[int, int] | None], device: str = "cpu") -> None:
    """Of a gather: ranks begin with those of their own keys, of so many, that fill strips. `begun` has the first and
    the last + 1 of each rank with queries. Messages are started first. Keys of others are NaN till they come."""
    package = module(made)
    schedule, trip = package._schedule, package._runtime.transport.Trip
    begin, start, started = schedule.begin_rows, trip.arrive, set[int]()

    def arrive(trip: Any) -> None:
        started.add(threading.get_ident())
        start(trip)

    for scale in (14.3, 1000.0):
        found = dict[int, tuple[int, int] | None]()

        def begin_rows(block: Any, first: int, count: int, scratch: Any, found: Any = found) -> None:
            assert threading.get_ident() in started, "keys leave behind the early work"
            begin(block, first, count, scratch)
            found[first] = scratch.begun

        patches = unittest.mock.patch.object(schedule, "begin_rows", begin_rows)
        with patches, unittest.mock.patch.object(trip, "arrive", arrive):
            started.clear()
            over_ranks(made, len(shards), [shards[::-1]], True, device, scale)
        assert [found[first] for first in sorted(found)] == begun, f"begun {found}"


def forward_with_gradients_over_ranks(made: Made, shards: list[int], device: str = "cpu") -> None:
    """Of a gather: without gradients the same loss; fp32 features under autocast give the same gradients, unrounded."""
    package, world = module(made), len(shards)
    inner = package.ContrastiveLoss._package
    table = Table("gather", 1, world, False, inner.table.travelling, inner.table.whole)
    case = fitting(package, Case(sum(shards), sum(shards), 0, scale=14.3, seed=1))
    q, k, scale, bias, labels = tensors(case, package.SPEC["positives"], device)[:5]
    assert labels is not None

    def job(rank: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        sides, own = (q.split(shards)[rank], k.split(shards[::-1])[rank]), labels.split(shards)[rank]
        plain = package.loss_and_grads(*sides, scale, bias, labels=own)
        with torch.no_grad():
            alone = package.contrastive_loss(*sides, scale, bias, labels=own)
        leaves = [x.float().requires_grad_() for x in sides]
        with torch.autocast(device, DTYPES[made.dtype]):
            loss = package.contrastive_loss(*leaves, scale, bias, labels=own)
        return [loss, *torch.autograd.grad(loss, leaves)], list(plain), alone

    rounded = False
    for wide, plain, alone in World(package, world, tables={world: table}).run(job):
        torch.testing.assert_close(alone, plain[0], rtol=1e-6, atol=1e-6)
        for name, a, b in zip(LossAndGrads._fields, wide, plain, strict=False):
            kind = torch.finfo(b.dtype)  # Triton's interpreter cuts bf16 where GPUs round
            off = (a.float() - b.float()).abs()
            assert bool((off <= kind.eps * a.float().abs() + kind.smallest_normal).all()), (
                f"wider features change {name}"
            )
            rounded |= bool((a.float() != b.float()).any())
    assert rounded, "gradients of wider features are rounded"


def found_in_a_recording(made: Made) -> None:
    """A backward finds its own forward in a recording, or has it computed again, whatever ran in between."""
    package = module(dataclasses.replace(made, settings=(*made.settings, ("replay", "on"))))
    runtime = package.__name__ + "._runtime"
    engine, replay, runtime_package = (
        importlib.import_module(f"{runtime}.{name}") for name in ("engine", "replay", "package")
    )
    bound, options = package.ContrastiveLoss._package, runtime_package.Options()
    scale, bias, upstream = (torch.tensor(value) for value in (3.0, -1.0, 2.0))
    first, second = (
        runtime_package.Call(*tensors(fitting(package, Case(70, 70, 0, seed=seed)), "diagonal", "cpu")[:2], scale, bias)
        for seed in (1, 2)
    )

    def same(found: Any, expected: Any) -> None:
        for name, a, b in zip(LossAndGrads._fields[1:], found, expected, strict=True):
            assert torch.equal(a, b), f"{name} differs from that of a call that is not recorded"

    with unittest.mock.patch.object(replay, "_record", record):
        recorder, kind = replay._Recorder(bound), replay.Kind(70, 70, options, 0, 0b1111)
        replay._recorders[bound.digest, None] = recorder
        recorder.next(kind)
        recording = recorder.next(kind)
        loss, saved = recording.forward(first)
        expected, kept = engine.forward(bound, first, 0b1111)
        assert torch.equal(loss, expected)
        truth = engine.backward(bound, first, kept, upstream, 0b1111)
        other = recording.forward(second)[1]
        for _ in range(2):
            same(recording.backward(first, saved, upstream), truth)
        kept_of_other = engine.forward(bound, second, 0b1111)[1]
        truth_of_other = engine.backward(bound, second, kept_of_other, upstream, 0b1111)
        same(recording.backward(second, other, upstream), truth_of_other)
        for capturing, keeps in ((True, True), (False, made.strategy != "stash")):
            with unittest.mock.patch.object(replay, "capturing", lambda device, answer=capturing: answer):
                replay.unrecorded_forward(bound, second, 0)
                assert recorder.recording is recording
                replay.unrecorded_forward(bound, second, 0b1111)
                assert (recorder.recording is recording) == keeps, "two stashes at once, or given up for none"
                recorder.recording = recording
                same(replay.backward(bound, first, saved, upstream, 0b1111), truth)  # as without a recording
                assert (recorder.recording is recording) == keeps, "two stashes at once, or given up for none"
                recorder.recording = recording
        with contextlib.ExitStack() as on_a_gpu:
            answers = {"_recorder": recorder, "_kind": kind, "capturing": False}
            for name, answer in answers.items():
                patch = unittest.mock.patch.object(replay, name, lambda *_, answer=answer: answer)
                on_a_gpu.enter_context(patch)
            assert not replay.forward(bound, first, 0b1111)[1].stash.numel()
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                hooked = replay.forward(bound, first, 0b1111)[1]
            assert hooked.stash.shape == kept.stash.shape, "hooks were given a stash that is not there"
            recorder.recording = recording
        recording._forward.broken = True
        with contextlib.suppress(ZeroDivisionError):
            recorder.attempt(lambda: recording.forward(second))
        assert recorder.recording is None, "a backward could read what is half another call's"


def gradients_in_a_recording(made: Made) -> None:
    """Where forward has the gradients, those of a recorded forward are its own, whatever the recording runs next."""
    package = module(dataclasses.replace(made, settings=(*made.settings, ("replay", "on"))))
    runtime = package.__name__ + "._runtime"
    engine, replay, runtime_package = (
        importlib.import_module(f"{runtime}.{name}") for name in ("engine", "replay", "package")
    )
    bound, upstream = package.ContrastiveLoss._package, torch.tensor(3.0)
    scale, bias = torch.tensor(14.3), torch.tensor(-1.0)
    calls = []
    for seed in (1, 3):
        inputs = tensors(fitting(package, Case(70, 90, 0, seed=seed)), package.SPEC["positives"], "cpu")
        options = runtime_package.Options(labelling="given")
        calls.append(runtime_package.Call(inputs.q, inputs.k, scale, bias, labels=inputs.labels, options=options))
    with unittest.mock.patch.object(replay, "_record", record), contextlib.ExitStack() as on_a_gpu:
        recorder, kind = replay._Recorder(bound), replay.Kind(70, 90, calls[0].options, 0, 0b1111)
        for name, answer in {"_recorder": recorder, "_kind": kind, "capturing": False}.items():
            patch = unittest.mock.patch.object(replay, name, lambda *_, answer=answer: answer)
            on_a_gpu.enter_context(patch)
        replay.forward(bound, calls[0], 0b1111)
        found = [replay.forward(bound, call, 0b1111) for call in calls]
        recording = recorder.recording
        assert recording is not None, "the second call was not recorded"
        with unittest.mock.patch.object(recording, "forward", side_effect=AssertionError("three products for one")):
            without = replay.forward(bound, calls[1], 0)
        assert recorder.recording is recording and not any(x.numel() for x in without[1][:3])
        for call, (loss, saved) in zip(calls, found, strict=True):
            expected, kept = engine.forward(bound, call, 0b1111)
            assert torch.equal(loss, expected), "the loss of another call"
            truth = engine.backward(bound, call, kept, upstream, 0b1111)
            for _ in range(2):
                same = map(torch.equal, replay.backward(bound, call, saved, upstream, 0b1111), truth)
                assert all(same), "the gradients of another call"


def rows_of_panels(made: Made, device: str = "cpu") -> None:
    """Gradients may be asked for again and times a factor; without them one product is computed and nothing kept."""
    package = module(made)
    inputs = tensors(fitting(package, Case(150, 90, 0, scale=14.3)), package.SPEC["positives"], device)
    numbers = (torch.tensor(value, device=device) for value in (inputs.scale, inputs.bias or 0.0))
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, *numbers)]
    loss = package.contrastive_loss(*leaves, labels=inputs.labels)
    first, again = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    fourfold = torch.autograd.grad(4.0 * loss, leaves)
    for a, b, c in zip(first, again, fourfold, strict=True):
        assert torch.equal(a, b) and torch.equal(4.0 * a, c), "backward is not a multiplication"
    schedule: Any = package._schedule
    with unittest.mock.patch.object(schedule, "rows_block", side_effect=AssertionError("gradients that none wants")):
        with torch.no_grad():
            alone = package.contrastive_loss(*leaves, labels=inputs.labels)
        torch.testing.assert_close(alone, loss.detach(), rtol=1e-6, atol=1e-6)


def frozen_sides(made: Made, device: str = "cpu") -> None:
    """With one side frozen, or both: the same bits of what is left, half of the products, nothing read unwritten."""
    package = module(made)
    inputs = inputs_of(package, fitting(package, Case(70, 131, 0, scale=14.3, bias=-1.0, seed=3)), device)
    schedule, truth = package._schedule, truth_of(package, inputs)
    names = {"_add_split_product", "_queries", "_keys"} & vars(schedule).keys() or {"_add_product"}

    def results(wanted: int) -> tuple[list[Tensor | None], int]:
        """Loss and gradients, and the number of products."""
        with GuardBands(generated(made), NAN) as bands, contextlib.ExitStack() as patches:
            spies = [unittest.mock.Mock(side_effect=getattr(schedule, name)) for name in names]
            for name, spy in zip(names, spies, strict=True):
                patches.enter_context(unittest.mock.patch.object(schedule, name, spy))
            found = _of_wanted(package, inputs, wanted)
        assert not bands.damages(), f"{wanted:04b}: {bands.damages()}"
        return found, sum(spy.call_count for spy in spies)

    whole, products = results(0b1111)
    assert products
    every = (0b1101, 0b1110, 0b1100, 0b0001, 0b0010)
    for wanted in every if LONG or device != "cpu" else every[:3]:
        found, count = results(wanted)
        assert 2 * count == products, f"{wanted:04b}: {count} of {products} products"
        same = [a is None or torch.equal(a, b) for a, b in zip(found[:3], whole, strict=False)]
        judged = gate(found, truth)
        assert all(same) and not failures(judged), f"{wanted:04b}: {same}, {failures(judged)}"


def frozen_sides_over_ranks(made: Made, shards: list[int], device: str = "cpu") -> None:
    """Of a gather: what is left is right, and without gradients of keys nothing but keys is sent."""
    package, world = module(made), len(shards)
    case = fitting(package, Case(sum(shards), sum(shards), 0, scale=14.3, bias=-1.0, seed=1))
    inputs = tensors(case, package.SPEC["positives"], device)
    assert inputs.labels is not None
    of_ranks = zip(inputs.q.split(shards), inputs.k.split(shards[::-1]), inputs.labels.split(shards), strict=True)
    parts = [inputs._replace(q=q, k=k, labels=labels) for q, k, labels in of_ranks]
    for wanted in (0b1101, 0b1110, 0b1100):
        ranks = World(package, world)
        found = averaged([list(each) for each in ranks.run(lambda rank, w=wanted: _of_wanted(package, parts[rank], w))])
        assert not failures(judged := gate(found, truth_of(package, inputs))), f"{wanted:04b}: {failures(judged)}"
        tags = {tag for posted in ranks.groups[0].posted for _, tag, _ in posted}
        assert tags == ({0, 1} if wanted & 2 else {0}), f"{wanted:04b}: {tags} are sent"


def _of_wanted(package: ModuleType, inputs: Inputs, wanted: int) -> list[Tensor | None]:
    """The loss, and gradients of q, k, scale and bias, those whose bits are set."""
    values = (inputs.q, inputs.k, *(torch.tensor(x, device=inputs.q.device) for x in inputs[2:4]))
    leaves = [x.detach().requires_grad_(bool(wanted >> bit & 1)) for bit, x in enumerate(values)]
    loss = package.contrastive_loss(*leaves, **inputs.given)
    found = iter(torch.autograd.grad(loss, [x for x in leaves if x.requires_grad]))
    return [loss.detach(), *(next(found) if x.requires_grad else None for x in leaves)]


def labels_without_a_key(made: Made, device: str = "cpu") -> None:
    """A query whose label names no key makes its row of dq, all of dk and the scalars NaN."""
    package = module(made)
    schedule, runtime = package._schedule, package._runtime
    inputs = tensors(fitting(package, Case(60, 90, 0, scale=3.0, seed=1)), package.SPEC["positives"], device)
    q, k, labels = inputs.q, inputs.k, inputs.labels.clone()
    labels[7] = 90
    positive = torch.full((schedule.POSITIVE_PARTS, 60), math.nan, device=device)
    statistics, dq = torch.empty(2, 60, device=device), torch.empty(60, made.dim, device=device)
    dk, one = torch.empty(90, made.dim, device=device), torch.ones((), device=device)
    scratch = schedule.rows_scratch(60, 90, q.device)
    pair = runtime.statistics.view(statistics)
    block = runtime.package.Block(q, k, one, 0 * one, labels, 0, pair, None, positive)
    schedule.rows_block(block, dq, [(dk, 0, 90)], scratch, fresh_dk=True)
    wrong = (dq * scratch.share[:60, None]).isnan().any(1).nonzero().flatten().tolist()
    assert wrong == [7] and bool(dk.isnan().all()), f"rows {wrong} of dq are NaN, and {dk.isnan().sum()} numbers of dk"


def sampled_references(made: Made, device: str = "cpu") -> None:
    """A block of rows is computed again where a sum lies 80 binary orders above its row's reference, and no other."""
    package = module(made)
    schedule, runtime = package._schedule, package._runtime
    ln2, zero = torch.tensor(math.log(2), device=device), torch.zeros((), device=device)
    # Key 3 of 90 is not sampled. y is the first feature: scale is the logarithm of 2.
    for y, flagged in ((78.0, False), (80.0, True), (101.0, True), (-200.0, False)):
        q, k = (torch.zeros(rows, made.dim, dtype=DTYPES[made.dtype], device=device) for rows in (64, 90))
        q[40, 0], k[3, 0] = y, 1.0
        labels = torch.zeros(64, dtype=torch.int64, device=device)
        positive, statistics = torch.empty(schedule.POSITIVE_PARTS, 64), torch.empty(2, 64)
        sums = torch.empty(64, made.dim, device=device), torch.empty(90, made.dim, device=device)
        scratch = schedule.rows_scratch(64, 90, q.device)
        pair = runtime.statistics.view(statistics.to(device))
        block = runtime.package.Block(q, k, ln2, zero, labels, 0, pair, None, positive.to(device))
        schedule.rows_block(block, sums[0], [(sums[1], 0, len(sums[1]))], scratch, fresh_dk=True)
        found = scratch.flags[:4].bool().tolist()
        assert found == [False, flagged] * 2, f"flags {found} where a row has y = {y}"
        truth = torch.softmax((q @ k.T).double() * math.log(2), 1)
        truth[:, 0] -= 1
        torch.testing.assert_close(sums[1].double(), truth.T @ q.double(), rtol=2e-2, atol=1e-6)
        of_queries = sums[0] * scratch.share[:64, None]
        torch.testing.assert_close(of_queries.double(), truth @ k.double(), rtol=2e-2, atol=1e-6)


def positives_of_strips(made: Made, device: str = "cpu") -> None:
    """A row that holds nothing but its positive has a loss of 0, also where its strip is computed again: the positive
    is rounded as the sum of that strip was."""
    package = module(made)
    schedule, runtime, keys = package._schedule, package._runtime, 4 * package._schedule.kernels.FORWARD_KEYS.value
    one, positive = torch.ones((), device=device), torch.full((schedule.POSITIVE_PARTS, 64), math.nan, device=device)
    for place, strip in itertools.product((5, keys // 2 - 3, keys - 3), (1, 2)):  # keys that no sample has
        q, k = (torch.zeros(n, made.dim, dtype=DTYPES[made.dtype], device=device) for n in (64, keys))
        q[:, 0], k[place, 0] = 100.5, 1.0  # y = 145: 2^y is beyond fp32 but against its own reference
        labels = torch.full((64,), place, device=device)
        pair = runtime.statistics.view(torch.empty(2, 64, device=device))
        block = runtime.package.Block(q, k, one, 0 * one, labels, 0, pair, None, positive)
        with unittest.mock.patch.object(schedule, "strip_blocks", lambda *_, strip=strip: strip):
            scratch = schedule.rows_scratch(64, keys, q.device)
            schedule.rows_block(block, None, [], scratch)
        loss = float(schedule.loss_terms(block, 1.0))
        assert loss == 0.0, f"loss {loss} where the positive is key {place} of strips of {strip}"


def begun_rows(made: Made, device: str = "cpu") -> None:
    """A row of panels that begins with keys in whole strips, while others are NaN, has the gradients of all. Of large
    logits some are computed again."""
    package = module(made)
    schedule, tile, rows = package._schedule, package._schedule.kernels.FORWARD_KEYS.value, 250
    seen = {
        (0, tile, 3 * tile, 1): (0, tile),
        (tile - 5, 2 * tile + 9, 4 * tile - 6, 1): (tile, 3 * tile),
        (2 * tile, tile - 6, 3 * tile - 6, 2): (2 * tile, 3 * tile - 6),
        (tile - 5, 5 * tile, 7 * tile - 6, 2): (2 * tile, 4 * tile),
    }
    for (first, count, keys, strip), whole in seen.items():
        for scale in (20.0, 300.0):
            inputs = tensors(fitting(package, Case(rows, keys, 0, scale=scale, seed=first)), "label", device)
            with unittest.mock.patch.multiple(schedule, PANEL_ROWS=256, strip_blocks=lambda *_, strip=strip: strip):
                begun, dq, dk = _begun_gradients(package, inputs, first, count)
            assert begun == whole
            q, k, labels = inputs.q.double(), inputs.k.double(), inputs.positives()
            g = torch.softmax(scale * q @ k.T, 1) - torch.nn.functional.one_hot(labels, keys)
            for name, found, truth in (("dq", dq, g @ k), ("dk", dk, g.T @ q)):
                error = float((found - truth).norm() / truth.norm())
                assert error < 1e-2, f"{name}, {whole} of {keys} keys first, scale {scale}: an error of {error:.1e}"


def _begun_gradients(package: ModuleType, inputs: Inputs, first: int, count: int) -> tuple[Any, Tensor, Tensor]:
    """The keys with which a row of panels begins, and g k and g^T q of it; other keys come later."""
    schedule, runtime, (rows, dim), keys = package._schedule, package._runtime, inputs.q.shape, len(inputs.k)
    scale, zero = (torch.tensor(x, device=inputs.q.device) for x in (inputs.scale, 0.0))
    room = -(-keys // schedule.LIBRARY_MULTIPLE) * schedule.LIBRARY_MULTIPLE
    dq, dk = (torch.empty(n, dim, device=inputs.q.device) for n in (rows, room))
    positive = torch.full((schedule.POSITIVE_PARTS, rows), math.nan, device=inputs.q.device)
    coming, pair = inputs.k.clone(), runtime.statistics.view(torch.empty(2, rows, device=inputs.q.device))
    coming[:first], coming[first + count :] = math.nan, math.nan
    block = runtime.package.Block(inputs.q, coming, scale, zero, inputs.positives(), 0, pair, None, positive)
    scratch = schedule.rows_scratch(rows, keys, inputs.q.device)
    schedule.begin_rows(block, first, count, scratch)
    begun = scratch.begun
    coming.copy_(inputs.k)
    schedule.rows_block(block, dq, [(dk, 0, keys)], scratch, fresh_dk=True)
    return begun, dq * scratch.share[:rows, None], dk[:keys]


def shares_of_a_block(made: Made, device: str = "cpu") -> None:
    """All rows of a block have shares, and each may put the flags of all its strips up; other blocks go without."""
    package = module(made)
    kernels, rows, strips = package._schedule.kernels, 2 * package._schedule.kernels.FORWARD_ROWS.value - 9, 3
    generator = torch.Generator().manual_seed(1)
    exponent = torch.randint(-9, 9, (rows,), generator=generator).float().to(device)
    mantissa = 1 + torch.rand(rows, generator=generator).to(device)
    for wide in (None, 7, kernels.FORWARD_ROWS.value - 1):
        reference, share = exponent - 1, torch.full((rows,), math.nan, device=device)
        if wide is not None:
            reference[wide] -= 100
        flags = torch.full((2 * strips + 1,), -1, dtype=torch.int32, device=device)
        package._runtime.launch.launch(
            kernels.shares, (2,), query_exponent=exponent, query_mantissa=mantissa.clone(),
            positive_z=torch.zeros(rows, device=device), own_reference=reference, share=share, flags=flags,
            queries=rows, keys=5 * kernels.FORWARD_KEYS.value, strip=2, num_warps=4, num_stages=1,
        )  # fmt: skip
        expected = kernels.QUERY_SHARE.value * torch.exp2(reference - exponent) / mantissa
        if wide is not None:
            expected[: kernels.FORWARD_ROWS.value] = 1
        torch.testing.assert_close(share, expected)
        assert flags.tolist() == [int(wide is not None), 0] * strips + [-1]


def captured(made: Made, device: str = "cuda") -> None:
    """Forward and backward run without waiting for the device, and replay as a CUDA graph with other inputs."""
    package = module(made)
    inputs = tensors(fitting(package, Case(200, 200, 0, scale=14.3, seed=1)), package.SPEC["positives"], device)
    others = tensors(fitting(package, Case(200, 200, 0, scale=14.3, seed=3)), package.SPEC["positives"], device)
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
            # Odd seeds: all calls have labels, or none has, and are of one kind.
            fitting(replaying, Case(n, n, 0, scale=14.3 + i, bias=-float(i), seed=2 * i + 1)),
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
    _, saved = engine.forward(bound, engine.Call(inputs.q, inputs.k, scale, bias), 0)
    similarity = inputs.q.double() @ inputs.k.double().T
    for pair, axis in ((saved.of_queries, 1), (saved.of_keys, 0)):
        error = statistics.log(statistics.view(pair.double())) - torch.logsumexp(100.0 * similarity, axis)
        assert error.abs().max() <= 1e-4, f"a log-sum-exp is off by {float(error.abs().max()):.1e}"
    del similarity
    true = oracle(package, Inputs(inputs.q, inputs.k, 100.0))
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


def library_rests(made: Made, device: str = "cpu") -> None:
    """The matrix library gets keys in multiples of 8, and of less than 64 columns queries, too: sums for dk have room,
    and a kernel adds the rest.

    Without the rounding, 101 keys reach the library; with `fresh` for the rest, only the rest is left.
    """
    schedule: Any = module(made)._schedule
    counts = set()

    def addmm(total: Tensor, g: Tensor, x: Tensor, beta: int, out: Tensor, **_: torch.dtype) -> None:
        of_queries, narrow = g.stride(1) == 1, x.shape[1] < 64
        counts.update(g.shape[of_queries : 2 if of_queries or narrow else 1])
        product = g.double() @ x.double()
        out.copy_(product + total if beta else product)

    legal = unittest.mock.patch.object(schedule, "library_legal", return_value=True)
    with legal, unittest.mock.patch.object(torch, "addmm", addmm):
        for rows in (101, 69, 5):  # sums over 5 keys are the kernel's alone
            numerics(made, Case(rows, rows, 0, scale=14.3, seed=rows), device)
        assert not any(count % 8 for count in counts), f"{sorted(counts)} keys or queries"


def hopper_arguments(made: Made, device: str = "cpu") -> None:
    """What the schedule gives kernels for Hopper, by the names of their arguments, is what the ordinary ones take,
    which are interpreted in their place."""
    package = module(made)
    schedule: Any = package._schedule
    kernels, launch, seen = schedule.kernels, schedule.launch, set()

    def instead(kernel: Any, grid: tuple[int, ...], **given: Any) -> None:
        name = kernel.__name__.removesuffix("_hopper")
        if kernel.__name__ == name:
            launch(kernel, grid, **given)
            return
        seen.add(name)
        ordinary = getattr(kernels, name)
        blocks = given.pop("maxnreg") and importlib.import_module(kernel.__module__)
        assert set(kernel.arg_names) <= set(given), f"{kernel.__name__} lacks arguments"
        for side in {"q", "k", "g", "g_of_slabs"} & set(given):
            assert given[side].block_shape == getattr(blocks, f"{side[0].upper()}_BLOCK")
            given[side] = given[side].base
            given[f"{side}_row_stride"], given[f"{side}_depth_stride"] = given[side].stride()
        if "g_of_slabs" in given:  # rows of one slab follow those of another
            given["g"] = given.pop("g_of_slabs")
        given |= {"g_stride": given["g"].stride(0)} if "g" in given else {}
        given |= {"DESCRIPTORS": False, "WIDEN": True}
        taken = {argument: given[argument] for argument in ordinary.arg_names}
        launch(ordinary, grid, **taken, num_warps=4, num_stages=1)

    here = unittest.mock.patch.object(schedule, "runs_variant", return_value=True)
    with here, unittest.mock.patch.object(schedule, "launch", instead):
        numerics(made, Case(200, 200, 0, scale=14.3), device)
    assert seen == {"forward", "gradient"}


def launches_variant(folder: str, name: str) -> None:
    """A package that launches this kernel passes the numerics gate's cases."""
    package = import_package(Path(folder), "infcl_gen_with_variant")
    schedule: Any = package._schedule
    launch, seen = schedule.launch, set()

    def instead(kernel: Any, grid: tuple[int, ...], **given: Any) -> None:
        seen.add(kernel.__name__)
        launch(kernel, grid, **given)

    with unittest.mock.patch.object(schedule, "launch", instead):
        for case, rows in check_package(package, "cpu", examples=3):
            assert not failures(rows), f"{case}: {failures(rows)}"
    assert name in seen


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
    name = "rows_block" if hasattr(schedule, "rows_block") else "backward_block"
    whole_block, finish = getattr(schedule, name), schedule.finish

    def guarded_block(*arguments: Any, **more: Any) -> None:
        block, dq, dk, *rest = arguments
        totals = [dq, *(total for total, *_ in dk)] if name == "rows_block" else [dq, dk]
        totals = [total for total in totals if total is not None]
        places = {id(total): bands.place(total, "an accumulator") for total in totals}  # own rows have one for both
        own, *others = kept = [places[id(total)] for total in totals]
        sums = (*others, None)[0]
        if name == "rows_block":
            sums = [(x, *which) for x, (_, *which) in zip(others, dk, strict=True)]
        whole_block(block, own, sums, *rest, **more)
        for total, found in zip(totals, kept, strict=True):
            total.copy_(found)

    def guarded_finish(total: Tensor, *arguments: Any, **more: Any) -> None:
        out = arguments[-1]
        kept = bands.place(total, "an accumulator")
        finish(kept, *arguments[:-1], kept if out is total else out, **more)
        if out is total:
            out.copy_(kept)

    setattr(schedule, name, guarded_block)
    schedule.finish = guarded_finish
    try:
        yield
    finally:
        setattr(schedule, name, whole_block)
        schedule.finish = finish


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
            package.loss_and_grads(inputs.q, inputs.k, 2.0, labels=each) for each in (labels, labels.contiguous())
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), labels.stride()


def ties_of_thresholds(made: Made, device: str = "cpu") -> None:
    """A negative that a guide finds exactly as near as the positive counts. Products of small whole numbers are exact,
    and each second key is as near to every query as the one before it. Of rows in pairs one that is exactly as near as
    the threshold counts."""
    package, draw = module(made), torch.Generator().manual_seed(0)
    dtype, dim = DTYPES[made.dtype], package.SPEC["problem"]["dim"]
    if package.ContrastiveLoss._package.traits.triangle:  # margins, and differences of similarities, are whole eighths
        x = torch.randint(-2, 3, (40, dim), generator=draw).div(4).mul(torch.rand(40, dim, generator=draw) < 0.2)
        x = x.to(device, dtype)
        truth, found = dense(made.loss, x, None, 1.0), package.loss_and_grads(x, None, 1.0)
        for ours, theirs in zip(found[:2], truth[:2], strict=True):
            assert torch.linalg.vector_norm(ours.double() - theirs) <= 0.01 * torch.linalg.vector_norm(theirs)
        return
    q, k = (torch.nn.functional.normalize(torch.randn(40, dim, generator=draw), dim=1) for _ in range(2))
    u, v = (torch.randint(-2, 3, (40, dim), generator=draw) for _ in range(2))
    v[1::2] = v[::2]
    given = [x.to(device, dtype) for x in (q, k)]
    guides = dict(zip(("guide_queries", "guide_keys"), (x.to(device, dtype) for x in (u, v)), strict=True))
    truth = dense(made.loss, *given, 5.0, 0.0, **guides)
    found = package.loss_and_grads(*given, 5.0, 0.0, **guides)
    for ours, theirs in zip(found[:3], truth[:3], strict=True):
        assert torch.linalg.vector_norm(ours.double() - theirs) <= 0.01 * torch.linalg.vector_norm(theirs)
