"""What a package must do, as functions that raise AssertionError: on a GPU, on the CPU, or in an interpreter process.

Each takes what to check (`Made`) first and the device last, so that a test reads the same wherever the kernels run.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import LossAndGrads, oracle
from infcl_gen.verification.properties import DTYPES, Case, Inputs, check_case, tensors
from tests.kernels.guard import GuardBands
from tests.kernels.packages import Made, generated, module


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


def guarded(made: Made, sizes: list[tuple[int, int]], scale: float = 14.3, device: str = "cpu") -> None:
    """At each size: nothing outside a buffer is read or overwritten, and the gate holds."""
    package = module(made)
    for queries, keys in sizes:
        case = fitting(package, Case(queries, keys, 0, scale=scale, features="unit", seed=queries))
        inputs = tensors(case, package.SPEC["positives"], device)
        with GuardBands(generated(made)) as bands:
            # Rows of one 16-byte multiple or not: descriptors and pointers both see bands.
            q, k = (bands.place(x, name) for x, name in ((inputs.q, "q"), (inputs.k, "k")))
            labels = None if inputs.labels is None else bands.place(inputs.labels, "labels")
            result = package.loss_and_grads(q, k, inputs.scale, inputs.bias, labels=labels)
        where = f"{case.queries} queries, {case.keys} keys"
        damages = bands.damages()
        assert not damages, f"{where}: {damages}"
        assert len(bands.buffers) > 10, "the package's allocations were not seen"
        assert torch.equal(q, inputs.q) and torch.equal(k, inputs.k), f"{where}: an input was overwritten"
        judged = gate(result, truth(package, inputs))
        assert all(row.passed for row in judged), f"{where}: {failures(judged)}"


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


def not_finite_scale(made: Made, value: float, device: str = "cpu") -> None:
    package = module(made)
    inputs = tensors(fitting(package, Case(70, 70, 0)), package.SPEC["positives"], device)
    for name, x in zip(LossAndGrads._fields, package.loss_and_grads(inputs.q, inputs.k, value), strict=True):
        assert not x.isfinite().any() or name == "dbias", f"scale {value}: {name} is finite"


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
    stride, start = 1 << 25, 1 << 31  # row 64 begins 2^31 elements after row 0
    memory = _sparse(start + (case.queries + 1) * stride, DTYPES[case.dtype], device)
    memory[: 8 * stride].view(8, stride)[:, : 4 * case.dim] = math.nan  # where offsets of rows 64 and up would wrap to
    q, k = (
        memory.as_strided(x.shape, (stride, 1), start + place * 2 * case.dim)
        for place, x in enumerate((inputs.q, inputs.k))
    )
    q.copy_(inputs.q)
    k.copy_(inputs.k)
    result = package.loss_and_grads(q, k, inputs.scale, inputs.bias)
    labels = None if inputs.labels is None else inputs.labels.to(device)
    judged = gate(result, truth(package, inputs._replace(q=q, k=k, labels=labels)))
    assert all(row.passed for row in judged), failures(judged)


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


def selftest(made: Made, device: str = "cpu") -> None:
    report = module(made).selftest(device)
    assert report["ok"], report


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
