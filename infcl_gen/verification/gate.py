"""The numerics gate: is a result as accurate as its dtypes allow?

    ||a - ref||  <=  2 * ||plain - ref||  +  2 * ||bound||        for each of loss, dq, dk, dscale, dbias,
                                                                  over the whole tensor and for each row

`ref` is the fp64 oracle, `plain` plain torch in the same dtype (see `oracle`), and `bound` a first-order error analysis
of the data at hand, so that no bare absolute tolerance occurs: gradients are of order 1/M. With u the unit roundoff of
the features' dtype, v that of the statistics (fp32, or fp64 for fp64), w that of a product's operands, the bound is

    dx_ij = |dx/dz| * (w * sqrt(sum_d q_id^2 k_jd^2) + v * (1 + sqrt(D) / 4) * sum_d |q_id k_jd|)
            + v * (|x_ij| + |r_i| + |c_j| + 4 + sqrt(N) / 8)
    dg_ij = (query_share * P_ij + key_share * C_ij) * (dx_ij + its mean over the row, the column) + v * all shares
            + underflow of P and of the stored g
    bound on dq_i = |dx/dz| / M * (sum_j (dg_ij + v * min(N, 4 sqrt(N)) * |g_ij|) |k_j|
                                   + max(u, w) * (|sum_j (g_ij without positives) k_j| + sqrt(sum_j (g_ij k_j)^2)))
            + u * |dq_i| + half the smallest subnormal of the output

and likewise for dk, dscale and the loss (no u: the loss is in the statistics' dtype). A package with a stash rounds g
twice: 2 u there. The square roots are the growth
of rounding in long sums, with room for equal summands, which all round the same way. In words: a logit is wrong by the
rounding of its own size; a probability by that, relatively; and the difference `probability - positive` of well
classified rows is accurate to the terms *before* they cancel, because no arithmetic in v can do better, while the
rounding of g to the features' dtype is relative to g *after* they cancel. So where loss and gradient vanish, the gate
asks for an absolute error of v of one query's weight and not of u.

Plain torch's error is credited only up to an eighth of the quantity's own magnitude: at scale 1000 plain bf16 is all
error, and twice that would let anything pass, even zeros.

What is NaN or infinite in the oracle must be the same in the result, and nothing else may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from infcl_gen.runtime.selftest import product_roundoff
from infcl_gen.verification.oracle import LossAndGrads, loss_module, oracle, plain_torch

PLAIN_FACTOR = 2.0
BOUND_FACTOR = 2.0
PLAIN_CREDIT = 1 / 8


@dataclass(frozen=True)
class GateRow:
    """The verdict on one quantity; error, tolerance and plain_error are norms relative to the oracle's norm."""

    quantity: str
    passed: bool
    error: float
    tolerance: float
    plain_error: float
    detail: str

    @property
    def ratio(self) -> float:
        """The error as a part of what is allowed; 0 where nothing is compared."""
        return self.error / self.tolerance if self.tolerance else 0.0

    def as_dict(self) -> dict[str, object]:
        return dict(vars(self))


@dataclass(frozen=True)
class Truth:
    """For one input: the oracle, plain torch, and the bounds and magnitudes (same shapes as the oracle's, fp64)."""

    reference: LossAndGrads
    plain: LossAndGrads
    bound: LossAndGrads
    magnitude: LossAndGrads


def gate(result: LossAndGrads | tuple[Tensor, ...], truth: Truth, factor: float = 1.0) -> list[GateRow]:
    """Compare (loss, dq, dk, dscale, dbias) with the truth; `factor` widens every tolerance (1 is the gate)."""
    return [
        _judge(name, value, reference, plain, bound, magnitude, factor)
        for name, value, reference, plain, bound, magnitude in zip(
            LossAndGrads._fields, result, truth.reference, truth.plain, truth.bound, truth.magnitude, strict=True
        )
    ]


def truth_of(
    module: ModuleType,
    q: Tensor,
    k: Tensor,
    scale: float | Tensor = 1.0,
    bias: float | Tensor | None = None,
    labels: Tensor | None = None,
    precision: str = "default",
) -> Truth:
    """Everything the gate needs to judge results of `module` for this input; O(M N) memory, a few fp64 matrices."""
    reference = oracle(module, q, k, scale, bias, labels)
    bound, magnitude = _error_bound(module, q, k, scale, bias, labels, precision, reference)
    return Truth(reference, plain_torch(module, q, k, scale, bias, labels), bound, magnitude)


def failures(rows: list[GateRow]) -> str:
    """One line for people on what failed; empty if all passed."""
    return "; ".join(row.detail for row in rows if not row.passed)


def _judge(
    name: str, value: Tensor, reference: Tensor, plain: Tensor, bound: Tensor, magnitude: Tensor, factor: float
) -> GateRow:
    value = value.detach().to(device=reference.device, dtype=torch.float64)
    if value.shape != reference.shape:
        shapes = f"{tuple(value.shape)} for {tuple(reference.shape)}"
        return GateRow(name, False, math.inf, 0.0, math.inf, f"{name}: wrong shape {shapes}")
    finite = reference.isfinite()
    same = torch.where(reference.isnan(), value.isnan(), value == reference)
    if not bool((same | finite).all()) or not bool(value[finite].isfinite().all()):
        wrong = int((~same & ~finite).sum() + (~value[finite].isfinite()).sum())
        detail = f"{name}: {wrong} of {value.numel()} elements are NaN or infinite and must not be, or the reverse"
        return GateRow(name, False, math.inf, 0.0, math.inf, detail)

    def kept(tensor: Tensor) -> Tensor:  # rows (M, D), or one row for a number, without what is not finite
        return torch.where(finite, tensor.to(torch.float64), 0.0).reshape(
            -1, reference.shape[-1] if reference.dim() else 1
        )

    difference, plain_difference = kept(value - reference), kept(plain.to(torch.float64) - reference)
    bound, magnitude = kept(bound), kept(magnitude)

    def verdict(dim: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        def norm(tensor: Tensor) -> Tensor:
            return tensor.square().sum(dim).sqrt()

        credit = PLAIN_CREDIT * norm(magnitude)
        plain_error = norm(plain_difference)
        plain_error = torch.where(plain_error.isfinite(), plain_error.minimum(credit), credit)
        return (
            norm(difference),
            factor * (PLAIN_FACTOR * plain_error + BOUND_FACTOR * norm(bound)),
            norm(plain_difference),
        )

    error, tolerance, plain_error = (float(number) for number in verdict((0, 1)))
    row_error, row_tolerance, _ = verdict((1,))
    bad_rows = ~(row_error <= row_tolerance)  # so that NaN is bad
    passed = error <= tolerance and not bool(bad_rows.any())
    size = float(kept(reference).square().sum().sqrt()) or 1.0
    detail = f"{name}: error {error / size:.2e}, allowed {tolerance / size:.2e}, plain torch {plain_error / size:.2e}"
    if error <= tolerance and not passed:
        worst = int((row_error / row_tolerance).nan_to_num(math.inf).argmax())
        detail += (
            f"; {int(bad_rows.sum())} of {len(bad_rows)} rows beyond their own tolerance, row {worst} "
            f"by {float(row_error[worst] / row_tolerance[worst]):.1f} times"
        )
    return GateRow(name, passed, error / size, tolerance / size, plain_error / size, detail)


def _error_bound(
    module: ModuleType,
    q: Tensor,
    k: Tensor,
    scale: float | Tensor,
    bias: float | Tensor | None,
    labels: Tensor | None,
    precision: str,
    reference: LossAndGrads,
) -> tuple[LossAndGrads, LossAndGrads]:
    """The bound of the module docstring, and the magnitudes: the sums of the absolute values of what is summed."""
    mathematics = loss_module(module)
    dtype = q.dtype
    out = torch.finfo(dtype)
    statistics = torch.finfo(torch.promote_types(dtype, torch.float32))
    u, v = out.eps / 2, statistics.eps / 2
    w = product_roundoff(dtype, precision == "tf32", bool(module.SPEC.get("plan", {}).get("split")))

    with torch.no_grad():
        q, k = q.to(torch.float64), k.to(torch.float64)
        scale = torch.as_tensor(scale, dtype=torch.float64, device=q.device)
        bias = torch.as_tensor(0.0 if bias is None else bias, dtype=torch.float64, device=q.device)
        rows = torch.arange(len(q), device=q.device)
        at_positives = (rows, rows if labels is None else labels.to(q.device))
        z = q @ k.T
        z_sum = (1 + math.sqrt(q.shape[1]) / 4) * (q.abs() @ k.abs().T)
        x = mathematics.logit(z, scale, bias)
        r = x.logsumexp(1)
        own_slope = mathematics.dlogit_dz(z, scale, bias).abs()
        slope = own_slope * abs(float(mathematics.gradient_factor(scale, bias)))

        # the logits, and through them the probabilities and the loss
        longest = max(z.shape)
        long_sum = 4 + math.sqrt(longest) / 8
        dx = slope * (w * (q.square() @ k.square().T).sqrt() + v * z_sum)
        dx += v * (x.abs() + r.abs()[:, None] + long_sum)
        if mathematics.HAS_KEYS:
            c = x.logsumexp(0)
            dx += v * c.abs()
        dx.clamp_(max=1.0)  # a probability is not wronger than by its own size
        query = (x - r[:, None]).exp()
        mean = (query * dx).sum(1)
        probability = mathematics.QUERY_SHARE * query
        dprobability = abs(mathematics.QUERY_SHARE) * query * (dx + mean[:, None])
        dloss = abs(mathematics.QUERY_SHARE) * (mean + v * (r.abs() + long_sum)).sum()
        if mathematics.HAS_KEYS:
            key = (x - c).exp()
            mean = (key * dx).sum(0)
            probability = probability + mathematics.KEY_SHARE * key
            dprobability += abs(mathematics.KEY_SHARE) * key * (dx + mean)
            dloss = dloss + abs(mathematics.KEY_SHARE) * (mean + v * (c.abs() + long_sum)).sum()
        g, uncancelled = probability.clone(), probability.abs()
        g[at_positives] += mathematics.POSITIVE_SHARE
        uncancelled[at_positives] += abs(mathematics.POSITIVE_SHARE)
        dloss = dloss + abs(mathematics.POSITIVE_SHARE) * (dx[at_positives] + v * x[at_positives].abs()).sum()

        # the gradient of a logit, without its rounding, which is added where it is summed
        # g is rounded when it is stored, and before that where a stash keeps its probabilities
        rounded = max(u * (2 if module.SPEC.get("plan", {}).get("stash_rows") else 1), w)
        stored_exponent = 14 if dtype == torch.float16 else 0
        underflow = statistics.smallest_normal + out.smallest_normal * u * 2.0**-stored_exponent
        dg = dprobability + v * uncancelled + underflow
        # The slope of a soft-capped logit cancels too (1 - tanh^2): it is accurate to its value at z = 0.
        at_zero = mathematics.dlogit_dz(torch.zeros_like(z[:1, :1]), scale, bias).abs()
        dg += 4 * v * at_zero / own_slope.clamp(min=1e-30) * g.abs()
        accumulation = v * min(longest, 4 * math.sqrt(longest))

        factor = abs(float(mathematics.dscale_factor(scale, bias)))
        product = own_slope * z
        spread = (g * product).square().sum().sqrt() * math.sqrt(_most_alike(q) * _most_alike(k))
        alike = (probability * product).sum().abs() + (g * product)[at_positives].sum().abs()
        rounding = (g * product).abs().sum().minimum(alike + spread)
        dscale = (dg * product.abs() + accumulation * own_slope * g.abs() * z_sum).sum()
        dscale = factor * (dscale + rounded * rounding)
        positive = torch.zeros_like(g)
        positive[at_positives] = g[at_positives]
        sums = (slope * g, slope * probability, slope * positive, slope * dg)
        bias_slope = (mathematics.logit(z, scale, bias + 1) - x).abs()
        tiny = out.smallest_normal * out.eps / 2
        dq = _sum_bound(*sums, other=k, accumulation=accumulation, unit=rounded)
        dk = _sum_bound(*(part.T for part in sums), other=q, accumulation=accumulation, unit=rounded)
        dbias = (bias_slope * (dg + accumulation * g.abs())).sum()
        bound = LossAndGrads(
            loss=dloss / len(q),
            dq=dq / len(q) + u * reference.dq.abs() + tiny,
            dk=dk / len(q) + u * reference.dk.abs() + tiny,
            dscale=dscale / len(q) + v * reference.dscale.abs(),
            dbias=dbias / len(q) + v * reference.dbias.abs(),
        )
        magnitude = LossAndGrads(
            loss=reference.loss.abs(),
            dq=(slope * g.abs()) @ k.abs() / len(q),
            dk=(slope * g.abs()).T @ q.abs() / len(q),
            dscale=factor * (g * product).abs().sum() / len(q),
            dbias=reference.dbias.abs(),
        )
    return bound, magnitude


def _sum_bound(
    g: Tensor, probability: Tensor, positive: Tensor, dg: Tensor, *, other: Tensor, accumulation: float, unit: float
) -> Tensor:
    """The error of g @ other (slopes included), when g is wrong by dg and rounded to `unit`.

    Roundings of different elements are independent and add up as a root of squares, except for equal rows of `other`,
    and for elements that are nearly equal, as probabilities at a small scale and positives are: these amount to a
    factor of their sum. It is never more than the sum of all.
    """
    size = g.abs() @ other.abs()
    spread = (g.square() @ other.square()).sqrt() * math.sqrt(_most_alike(other))
    rounding = size.minimum((probability @ other).abs() + (positive @ other).abs() + spread)
    return dg @ other.abs() + accumulation * size + unit * rounding


def _most_alike(rows: Tensor) -> int:
    """How often the most frequent row occurs."""
    return int(rows.unique(dim=0, return_counts=True)[1].max())
