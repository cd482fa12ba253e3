"""The numerics gate: is a result as accurate as its dtypes allow?

    ||a - ref||  <=  2 * ||plain - ref||  +  2 * ||bound||        for each of loss, dq, dk, dscale, dbias,
                                                                  over the whole tensor and for each row;
                                                                  over prefixes also for the columns by which
                                                                  each exceeds the one before

`ref` is the fp64 oracle, `plain` plain torch in the same dtype (see `oracle`), and `bound` a first-order error analysis
of the data at hand (see `bounds`). There is no bare absolute tolerance, because gradients are of order 1/M.

Plain torch's error is credited only up to an eighth of the quantity's own magnitude. At scale 1000 plain bf16 is all
error, and twice that would let even zeros pass.

NaN and infinity must be where the oracle has them, and nowhere else. A row with elements that leave the range of their
dtype, or whose sums over LARGEST_BATCH queries may, can have either. A loss so large that the terms of LARGEST_BATCH
queries would leave the range of the statistics may be infinite or NaN, with its gradients; it must not be wrong. The
same holds where finite inputs have a loss that is NaN in fp64: there infinities cancel.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from infcl_gen.runtime.selftest import ROUNDINGS, compared, product_roundoff
from infcl_gen.runtime.traits import Traits
from infcl_gen.verification.bounds import bound_over_prefixes, error_bound
from infcl_gen.verification.oracle import (
    Inputs,
    LossAndGrads,
    gradients_of_numbers,
    loss_module,
    oracle,
    oracle_by_slices,
    plain_torch,
)

PLAIN_FACTOR = 2.0
BOUND_FACTOR = 2.0
PLAIN_CREDIT = 1 / 8
LARGEST_BATCH = 2**20
LARGEST_LOSS = 1e150  # whose square fp64 holds


@dataclass(frozen=True)
class GateRow:
    """The verdict on one quantity. `ratio`: the error over the allowed one; 0 where nothing is compared."""

    quantity: str
    passed: bool
    ratio: float
    detail: str


@dataclass(frozen=True)
class Truth:
    """For one input: the oracle, plain torch, bounds and magnitudes, in the oracle's shapes and fp64. `states`: of each
    state, by its keyword, the next one and its bound; `numbers`: of other own numbers their gradient and its bound.
    `slabs`: columns, from and to, that as many prefixes of the features have; none of a loss without prefixes."""

    reference: LossAndGrads
    plain: LossAndGrads
    bound: LossAndGrads
    magnitude: LossAndGrads
    states: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    numbers: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    slabs: tuple[tuple[int, int], ...] = ()


def gate(result: LossAndGrads | tuple[Tensor | None, ...], truth: Truth) -> list[GateRow]:
    """Compare (loss, dq, dk, dscale, dbias) with the truth; None is a gradient that the package does not compute."""
    parts = (truth.reference, truth.plain, truth.bound, truth.magnitude)
    assert result[0] is not None
    if _is_too_large(result[0], truth):
        return [_too_large(result[0], truth.reference.loss, truth.bound.loss)]
    return [_by_slabs(truth.slabs, *each) for each in compared(result, *parts)]


def _by_slabs(slabs: tuple[tuple[int, int], ...], name: str, value: Any, reference: Tensor, *others: Tensor) -> GateRow:
    """The verdict on the whole and, of gradients of features, on each slab of columns and its rows: what the longest
    prefix has alone may be so small that its error is none of the whole."""
    whole = _judge(reference, name, value, reference, *others)
    if not (slabs and name in ("dq", "dk") and whole.passed):
        return whole
    rows = [whole]
    for start, stop in slabs:
        parts = (x[..., start:stop] for x in (value, reference, *others))
        rows.append(_judge(reference, f"{name} of columns {start} to {stop - 1}", *parts))
    first_bad = next((row for row in rows if not row.passed), whole)
    return GateRow(name, first_bad.passed, max(row.ratio for row in rows), first_bad.detail)


def gate_states(given: Mapping[str, Any], truth: Truth) -> list[GateRow]:
    """Compare the states that a call has left in its keywords, rounded to their dtype, with the next ones."""
    return [_judge_own(name, given[name], *truth.states[name]) for name in truth.states]


def gate_numbers(loss: Tensor, gradients: Mapping[str, Any], truth: Truth) -> list[GateRow]:
    """Compare gradients of own numbers, by keyword, rounded to their dtype, with the true ones. None is one that the
    package does not compute."""
    if _is_too_large(loss, truth):
        return []
    return [  # each weight, and each scale, has its own tolerance
        _judge_own(f"d{name}", *(x if x is None or x.dim() > 1 else x[:, None] for x in (gradients[name], *each)))
        for name, each in truth.numbers.items()
    ]


def _judge_own(name: str, found: Any, value: Tensor, bound: Tensor) -> GateRow:
    own = None if found is None else torch.finfo(found.dtype)
    rounded = 0.0 if own is None else own.eps / 2 * value.abs() + own.smallest_normal * own.eps
    return _judge(value, name, found, value, value, bound + rounded, value)  # plain torch has no credit


def _is_too_large(loss: Tensor, truth: Truth) -> bool:
    largest = min(torch.finfo(loss.dtype).max / LARGEST_BATCH, LARGEST_LOSS)
    return bool((truth.reference.loss.abs() > largest).all())


def _too_large(loss: Tensor, reference: Tensor, bound: Tensor) -> GateRow:
    allowed = BOUND_FACTOR * float(bound) if bool(bound.isfinite()) else 0.0
    near = torch.isclose(loss.to(reference), reference, rtol=1e-3, atol=allowed)
    passed = bool(near | ~loss.isfinite().to(near.device))
    return GateRow("loss", passed, 0.0, f"loss: {float(loss):.2e}, and {float(reference):.2e} leaves the range")


def truth_of(module: ModuleType, inputs: Inputs, with_numbers: bool = False) -> Truth:
    """What the gate needs to judge results of `module` for this input, and gradients of own numbers `with_numbers`;
    takes a few M x N matrices in fp64."""
    mathematics, reference = loss_module(module), oracle(module, inputs)
    if all(bool(torch.as_tensor(x).isfinite().all()) for x in inputs if x is not None):
        # Infinities cancelled, of terms beyond 1e308: the loss leaves the range, too.
        reference = reference._replace(loss=reference.loss.masked_fill(reference.loss.isnan(), math.inf))
    if not hasattr(mathematics, "PREFIXES"):
        bound, magnitude, states, numbers = error_bound(module, inputs, reference, inputs.q.dtype)
        gradients = gradients_of_numbers(module, inputs) if with_numbers else {}
        of_numbers = {name: (gradients[name], numbers[name]) for name in gradients}
        return Truth(reference, plain_torch(module, inputs), bound, magnitude, states, of_numbers)

    bound, magnitude = bound_over_prefixes(module, inputs)
    slabs = tuple(itertools.pairwise((0, *mathematics.PREFIXES)))
    return Truth(reference, plain_torch(module, inputs), bound, magnitude, slabs=slabs)


def truth_by_slices(module: ModuleType, inputs: Inputs) -> Truth:
    """What the gate needs of loss, dq and dk for batches whose matrices do not fit into memory.

    Instead of the bound of the module docstring a row may be as wrong as the worst row of plain torch, by long sums,
    and by the roundings that `selftest` allows. That presumes rows which are alike, such as random ones.
    """
    traits, dtype = Traits(**module.SPEC["loss"]["traits"]), inputs.q.dtype
    longest = max(len(inputs.q), len(inputs.others))
    reference, plain = (oracle_by_slices(loss_module(module), inputs, each) for each in (torch.float64, dtype))
    u, v = (torch.finfo(each).eps / 2 for each in (dtype, torch.promote_types(dtype, torch.float32)))
    w = product_roundoff(dtype, module.SPEC["problem"]["precision"] == "tf32", module.SPEC["plan"]["split"])
    terms = float(inputs.scale) / (1.0 if traits.combined else math.sqrt(inputs.q.shape[1]))
    relative = u + v * min(longest, 4 * math.sqrt(longest)) + w * (ROUNDINGS + terms)

    def bound(true: Any, near: Any) -> Any:
        if true is None:
            return None
        rows = true.shape[-1:] if true.dim() else (1,)
        errors, sizes = (torch.linalg.vector_norm(x.reshape(-1, *rows), dim=1) for x in (near - true, true))
        worst = errors.nan_to_num(math.inf).minimum(PLAIN_CREDIT * sizes).max()
        return ((worst + relative * sizes) / math.sqrt(rows[0]))[:, None].expand(-1, *rows).reshape(true.shape)

    bounds: list[Any] = list(map(bound, reference, plain))
    sizes: list[Any] = [each if each is None else each.abs() for each in reference]
    return Truth(reference, plain, LossAndGrads(*bounds), LossAndGrads(*sizes))


def failures(rows: list[GateRow]) -> str:
    """One line on what failed; empty if all passed."""
    return "; ".join(row.detail for row in rows if not row.passed)


def _judge(
    whole: Tensor, name: str, value: Any, reference: Tensor, plain: Tensor, bound: Tensor, magnitude: Tensor
) -> GateRow:
    """The verdict on one quantity, or on some columns of it, of which `whole` is the reference with all columns."""
    if value is None or reference is None:
        return GateRow(name, False, 0.0, f"{name}: there is one where there should be none, or the reverse")
    wide = torch.promote_types(value.dtype, torch.float32)
    largest = min(torch.finfo(value.dtype).max, torch.finfo(wide).max / LARGEST_BATCH)
    value = value.detach().to(device=reference.device, dtype=torch.float64)
    if value.shape != reference.shape:
        return GateRow(name, False, 0.0, f"{name}: wrong shape {tuple(value.shape)} for {tuple(reference.shape)}")
    size_of_row = torch.where(whole.isfinite(), whole.abs(), 0.0)
    if reference.dim():
        size_of_row = size_of_row.amax(-1, keepdim=True)
    beyond = reference.isfinite() & (size_of_row > largest) & ~value.isfinite()
    finite = reference.isfinite() & ~beyond
    same = beyond | torch.where(reference.isnan(), value.isnan(), value == reference)
    if not bool((same | finite).all()) or not bool(value[finite].isfinite().all()):
        wrong = int((~same & ~finite).sum() + (~value[finite].isfinite()).sum())
        detail = f"{name}: {wrong} of {value.numel()} elements are NaN or infinite and must not be, or the reverse"
        return GateRow(name, False, 0.0, detail)

    def norms(tensor: Tensor) -> Tensor:
        """Of the whole, then of each row, without the elements that are not finite; a number is one row."""
        kept = torch.where(finite, tensor.to(torch.float64), 0.0)
        squares = kept.reshape(-1, reference.shape[-1] if reference.dim() else 1).square()
        return torch.cat([squares.sum()[None], squares.sum(1)]).sqrt()

    errors, plain_errors, credit = norms(value - reference), norms(plain - reference), PLAIN_CREDIT * norms(magnitude)
    credited = torch.where(plain_errors.isfinite(), plain_errors.minimum(credit), credit)
    tolerances = PLAIN_FACTOR * credited + BOUND_FACTOR * norms(bound)
    bad = ~(errors <= tolerances)  # so that NaN is bad
    size = float(norms(reference)[0]) or 1.0
    error, tolerance, of_plain = (float(each[0]) / size for each in (errors, tolerances, plain_errors))
    detail = f"{name}: error {error:.2e}, allowed {tolerance:.2e}, plain torch {of_plain:.2e}"
    if bool(bad.any()) and not bad[0]:
        beyond = torch.where(bad, errors / tolerances, 0.0)[1:].nan_to_num(math.inf)  # 0 / 0 is no error
        detail += f"; {int(bad[1:].sum())} of {len(beyond)} rows beyond their own tolerance"
        detail += f", row {int(beyond.argmax())} by {float(beyond.max()):.1f} times"
    return GateRow(name, not bool(bad.any()), error / tolerance if tolerance else 0.0, detail)
