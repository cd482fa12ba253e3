"""How wrong loss and gradients may be: a first-order error analysis of the data at hand, which `gate` allows.

With the unit roundoffs u of the features' dtype, v of the statistics (fp32, or fp64 for fp64) and w of a product's
operands, the bound is

    dx_ij = |dx/dz| * (w * sqrt(sum_d q_id^2 k_jd^2) + v * (1 + sqrt(D) / 4) * sum_d |q_id k_jd|)
            + v * (|x_ij| + |r_i| + |c_j| + 4 + sqrt(N) / 8)
    dg_ij = (query_share * P_ij + key_share * C_ij) * (dx_ij + its mean over the row, the column) + v * all shares
            + underflow of P and of the stored g
    bound on dq_i = |dx/dz| / M * (sum_j (dg_ij + v * min(N, 4 sqrt(N E)) * |g_ij|) |k_j|
                                   + max(u, w) * (|sum_j (g_ij without positives) k_j| + sqrt(sum_j (g_ij k_j)^2)))
            + u * |dq_i| + half the smallest subnormal of the output

and likewise for dk, dscale and the loss (no u: the loss is in the statistics' dtype). E is how often the most frequent
row of features occurs. In P_ij and C_ij a dx above 1 becomes e^dx - 1: features that are multiplied by numbers and
rounded have such logits. Where forward keeps tiles, g is the product of two rounded numbers: 2 u there. Of a sum over
pairs no r_i and N enter dx_ij, and with h the term of a pair

    dg_ij = max |h'(x_ij +- dx_ij) - h'(x_ij)| + 4 v |h'(x_ij)| + underflow
    bound on the loss = 1 / M * sum_ij (max |h(x_ij +- dx_ij) - h(x_ij)| + (8 + sqrt(N) / 8) v |h(x_ij)|
                                        + underflow)

Of a loss whose queries have weights a(r, p, v) and slopes b(r, p, v) of their positives, v their own numbers, with dr_i
the mean of dx_ij over the row,

    dg_ij = |a| P_ij (dx_ij + dr_i) + da P_ij + [j = positive(i)] db + v * all its terms

where da, db, and the bounds on the loss's terms and on next states, are the largest changes at r +- dr, p +- dp and
v +- dv.
The mean of all logits adds the rounding of means of features, (4 + 16) v of their absolute values.
With any number of positives of shares s_ij in p, 1/n_i or exp(x_ij - p_i), s_ij db + |b| ds_ij stands for the term of
one. A guide's softmax has the shares t_ij, wrong by the products of its features, and p by sum_j dt_ij |x_ij - p_i|;
with constant multiples of such means of both sides dg_ij has |guide_share| dt_ij of each.
Own negatives add the same with the products of a query and its own, to dq, dscale and dbias. Their own gradients are
multiples of q_i by g of these products; that of a weight is a value at r, p and v, as are a(r, p, v) and b(r, p, v).
Of features that are multiplied by numbers of their rows all this is said of the products, which are rounded to u: w + u
then stands for w. The gradient of the features is that of the product times the number, rounded once more. That of a
number is the dot product of the features and the gradient of the product.
Over prefixes the bounds of all add up. Of cosines they are said of the quotients, and the gradient of a feature is
divided by its norm. Their g is stored times the inverse norms of its pair, and underflows with these.

Gradients that forward computes are rounded once more where backward multiplies them: 2 u |dq_i|. The square roots are
the growth of rounding in long sums. They leave room for equal summands, which all round the same way.

In words: a logit is wrong by the rounding of its own size, and a probability by that, relatively. For well classified
rows, `probability - positive` is accurate to the terms *before* they cancel; no arithmetic in v can do better. Rounding
g to the features' dtype is relative to g *after* they cancel. Where loss and gradient vanish, the gate therefore asks
for an absolute error of v of one query's weight, not of u.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infcl_gen.runtime.launch import INTERPRETED
from infcl_gen.runtime.means import EACH
from infcl_gen.runtime.renormalised import SMALLEST_NORM
from infcl_gen.runtime.selftest import product_roundoff
from infcl_gen.runtime.traits import Traits
from infcl_gen.runtime.weighted import STRIP_ROWS
from infcl_gen.verification.oracle import (
    Inputs,
    LossAndGrads,
    further_left_out,
    kept,
    loss_module,
    mean_share,
    negatives_left_out,
    numbers_of_rows,
    over_prefixes,
    pair_values,
    plain_of_all,
    slopes_of_pooled,
)

NEAR = 8  # roundings between numbers whose errors may be correlated with similarities
MEAN_ROUNDINGS = 4  # of the mean of features, of its share, and of what it is added to
FUNCTION_ROUNDINGS = 4.0  # of the functions in the term of a pair, relative to its value


@torch.no_grad()
def error_bound(
    module: ModuleType, inputs: Inputs, reference: LossAndGrads, dtype: torch.dtype
) -> tuple[LossAndGrads, LossAndGrads, dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """The bound of the module docstring; the magnitudes, each sum with absolute values for its terms; `Truth.states`;
    and the bounds of `Truth.numbers`. `dtype`: of the features."""
    mathematics, plan = loss_module(module), module.SPEC["plan"]
    traits = Traits(**module.SPEC["loss"]["traits"])
    out, statistics = torch.finfo(dtype), torch.finfo(torch.promote_types(dtype, torch.float32))
    u, v = out.eps / 2, statistics.eps / 2
    w = product_roundoff(dtype, module.SPEC["problem"]["precision"] == "tf32", plan["split"])
    w += u * len(traits.scaled)
    given = inputs
    if traits.scaled:
        q, k = inputs.scaled(inputs.q.double(), inputs.others.double(), torch.float64)
        inputs = inputs._replace(q=q, k=k)
        reference = _times_scales(reference, given, -1)

    q, k, scale, bias = inputs.leaves(torch.float64, torch.float64)
    one_sided, k = k is None, q if k is None else k
    positives = inputs.are_positive(mathematics.POSITIVES)
    z = q @ k.T
    z_sum = (1 + math.sqrt(q.shape[1]) / 4) * (q.abs() @ k.abs().T)
    x = mathematics.logit(z, scale, bias)
    own_slope = mathematics.dlogit_dz(z, scale, bias).abs()
    of_logit = abs(float(mathematics.gradient_factor(scale, bias)))
    slope = own_slope * of_logit
    pairs, products = traits.pairs, (q.square() @ k.square().T).sqrt()
    if (traits.sums_slopes or one_sided) and plan["split"] and INTERPRETED:
        # Triton's interpreter cuts bf16 halves instead of rounding them: two operands and the product that is left out
        # are too small by up to w each. Errors of one sign cancel in softmaxes only, and there between logits alike.
        w, products = 3 * w, q.abs() @ k.abs().T
    dz = w * products + v * z_sum
    dx = slope * dz + v * x.abs()
    of_rows = u * ("query_scale" in traits.scaled)
    of_combined = functools.partial(_of_combined, traits=traits, operand=w, rounded=of_rows)
    of_softmaxes = functools.partial(_of_softmaxes, operand=w)
    terms: Any = _of_pairs if pairs else of_combined if traits.combined else of_softmaxes
    errors = terms(mathematics, x, dx, inputs, statistics, dz)
    g, smooth, dloss, dg = errors[:4]
    if one_sided:  # what is stored and summed has the gradients of both rows of a pair
        g, smooth, dg, positives = g + g.T, smooth + smooth.T, dg + dg.T, positives | positives.T

    # The gradient of a logit; its rounding is added where it is summed. Tiles that forward keeps are rounded, too.
    # Triton's interpreter truncates to bf16, by up to 2 u: the factor of `gate` covers that.
    by_rows = plan["strategy"] == "rows"
    rounded, tiny = max(2 * u if plan["stash_rows"] or by_rows else u, w), out.smallest_normal * u
    underflow = statistics.smallest_normal + tiny * (2.0**-14 if dtype == torch.float16 else 1.0)  # g is stored scaled
    dg += underflow
    # The slope of a soft-capped logit cancels too (1 - tanh^2), and is accurate to its value at z = 0.
    at_zero = mathematics.dlogit_dz(torch.zeros_like(z[:1, :1]), scale, bias).abs()
    dg += 4 * v * at_zero / own_slope.clamp(min=1e-30) * g.abs()
    longest, alike = max(z.shape), max(_most_alike(q), _most_alike(k))
    accumulation = v * min(longest, 4 * math.sqrt(longest * alike))

    # the gradient of a similarity without `of_logit`; then the sums over keys, over queries and over pairs
    of_z, smooth, dof_z = own_slope * g + errors.of_z, own_slope * smooth, own_slope * dg + errors.dof_z
    factor = abs(float(mathematics.dscale_factor(scale, bias)))
    product = of_z * z
    spread = product.square().sum().sqrt() * math.sqrt(_most_alike(q) * _most_alike(k))
    correlated = _correlated(x, smooth, u)
    alike = (smooth * z).sum().abs() + product[positives].sum().abs() + product[correlated].abs().sum()
    size = product.abs().sum()
    rounding = size.minimum(alike + spread)
    dscale = factor * ((dof_z * z.abs() + accumulation * of_z.abs() * z_sum).sum() + rounded * rounding)
    if traits.sums_slopes:
        dscale += abs(float(mathematics.dscale_rest(scale, bias))) * (dg + accumulation * g.abs()).sum()
    dscale += errors.of_scale
    parts = (of_z, smooth, torch.where(positives, of_z, 0.0), torch.where(correlated, of_z.abs(), 0.0), dof_z)
    sums = [of_logit * part for part in parts]
    bias_slope = (mathematics.logit(z, scale, bias + 1) - x).abs()
    dq = _sum_bound(sums, k, accumulation, rounded)
    dk = _sum_bound((part.T for part in sums), q, accumulation, rounded)
    dbias = (bias_slope * (dg + accumulation * g.abs())).sum() + errors.of_bias
    unit = 2 * u if pairs or by_rows else u
    bound = LossAndGrads(
        loss=dloss / len(q),
        dq=dq / len(q) + unit * reference.dq.abs() + tiny,
        dk=None if one_sided else dk / len(q) + unit * reference.dk.abs() + tiny,
        dscale=dscale / len(q) + v * reference.dscale.abs(),
        dbias=dbias / len(q) + v * reference.dbias.abs(),
    )
    if traits.weighted:
        more = _of_weighted_means(mathematics, inputs, x, of_logit, factor, v)
        bound = bound._replace(**{name: getattr(bound, name) + error for name, error in more.items()})
    if traits.means:
        more = _of_means(mathematics, q, k, x, of_logit, factor, v)
        bound = bound._replace(**{name: getattr(bound, name) + error for name, error in more.items()})
    terms = of_logit * of_z.abs()
    of_q = terms @ k.abs() / len(q)
    numbers = {name: error / len(q) for name, error in zip(traits.vectors, errors.numbers, strict=False)}
    if inputs.negatives is not None:
        of = _OfQueries(mathematics, x, dx, dz, inputs, statistics, traits, rounded=of_rows)
        added, of_negatives, numbers["negatives"] = _of_negatives(of, inputs, u, reference)
        more = {name: getattr(bound, name) + error for name, error in added.items()}
        bound, of_q = bound._replace(**more), of_q + of_negatives
    sizes: list[Any] = [each if each is None else each.abs() for each in reference]
    magnitude = LossAndGrads(*sizes)._replace(
        dq=of_q, dscale=factor * size / len(q),
        dk=None if one_sided else terms.T @ q.abs() / len(q),
    )  # fmt: skip
    if traits.scaled:
        width = v * (4 + math.sqrt(q.shape[1]) / 4)
        for name, x, error, size in (
            ("query_scale", given.q, bound.dq, magnitude.dq), ("key_scale", given.others, bound.dk, magnitude.dk)
        ):  # fmt: skip
            if name in traits.scaled:
                numbers[name] = (x.double().abs() * (error + width * size)).sum(1)
        reference, bound, magnitude = (_times_scales(each, given) for each in (reference, bound, magnitude))
        bound = bound._replace(dq=bound.dq + u * reference.dq.abs(), dk=bound.dk + u * reference.dk.abs())
    names = traits.vectors[traits.weighed :]
    numbers = {name: error + statistics.smallest_normal for name, error in numbers.items()}
    return bound, magnitude, dict(zip(names, zip(*errors.states, strict=True), strict=True)), numbers


def bound_over_prefixes(module: ModuleType, inputs: Inputs) -> tuple[LossAndGrads, LossAndGrads]:
    """The bound and the magnitudes of a loss over prefixes: each prefix has its own, and they add up."""
    mathematics = loss_module(module)

    def of_prefix(part: Inputs) -> tuple[LossAndGrads, LossAndGrads]:
        exact = part._replace(q=part.q.double(), k=part.others.double())
        return error_bound(module, part, plain_of_all(mathematics, exact), inputs.q.dtype)[:2]

    # Quotients by norms are exact to the statistics' dtype.
    exact = inputs._replace(q=inputs.q.double(), k=inputs.others.double()) if mathematics.RENORMALISE else inputs
    bound, magnitude = (
        over_prefixes(mathematics, exact, lambda part, place=place: of_prefix(part)[place], _over_norms)  # type: ignore[misc]
        for place in range(2)
    )
    return (_with_underflow(bound, mathematics, inputs) if mathematics.RENORMALISE else bound), magnitude


def _over_norms(x: Tensor, errors: Tensor) -> Tensor:
    """Errors in the gradient of x from those of x over its norm. What x has along itself is taken off, with the errors
    of that: twice the size at most."""
    norms: Tensor = torch.linalg.vector_norm(x.to(errors.dtype), dim=1, keepdim=True).clamp(min=SMALLEST_NORM)
    return 2 * errors / norms


def _with_underflow(bound: LossAndGrads, mathematics: Any, inputs: Inputs) -> LossAndGrads:
    """The bound where g of cosines is stored times the inverse norms of its pair, before or after its prefix's weight:
    long features let that underflow where g itself does not, and are multiplied by it."""
    smallest = torch.finfo(torch.promote_types(inputs.q.dtype, torch.float32)).smallest_normal
    _, _, scale, bias = inputs.leaves(torch.float64, torch.float64)
    weights = max(len(mathematics.PREFIXES), sum(map(abs, mathematics.PREFIX_WEIGHTS)))
    slope = abs(float(mathematics.gradient_factor(scale.detach(), bias.detach())))
    of_pair = slope * weights * smallest / len(inputs.q)
    of_q, of_k = (of_pair * x.double().abs().sum(0) for x in (inputs.q, inputs.others))
    return bound._replace(dq=bound.dq + of_k, dk=bound.dk + of_q)


def _times_scales(results: LossAndGrads, inputs: Inputs, power: int = 1) -> LossAndGrads:
    """The results with those of multiplied features, dq and dk, times the numbers of their rows to a power."""
    found = {"dq": (results.dq, inputs.query_scale), "dk": (results.dk, inputs.key_scale)}
    return results._replace(**{
        name: (x * numbers.double().abs().pow(power)[:, None]).nan_to_num(0.0)
        for name, (x, numbers) in found.items() if numbers is not None
    })  # fmt: skip


def _of_means(
    mathematics: Any, q: Tensor, k: Tensor, x: Tensor, of_logit: float, of_scale: float, v: float
) -> dict[str, Tensor]:
    """What a multiple of the mean of all logits adds to the bound, by result. Features are added up in the statistics'
    dtype, at most EACH at a time; then sums and products are in fp64, and rounded MEAN_ROUNDINGS times."""
    share, width = abs(mean_share(mathematics)), 1 + math.sqrt(q.shape[1]) / 4
    error = v * (MEAN_ROUNDINGS + math.sqrt(min(EACH, max(x.shape))))
    of_q, of_k = q.abs().mean(0), k.abs().mean(0)
    of_pairs = of_q @ of_k
    return {
        "loss": share * (of_logit * error * of_pairs + MEAN_ROUNDINGS * v * x.abs().mean()),
        "dq": share * of_logit * error * of_k / len(q),
        "dk": share * of_logit * error * of_q / len(k),
        "dscale": share * of_scale * error * width * of_pairs,
        "dbias": x.new_tensor(share * MEAN_ROUNDINGS * v),
    }


def _of_weighted_means(
    mathematics: Any, inputs: Inputs, x: Tensor, of_logit: float, of_scale: float, v: float
) -> dict[str, Tensor]:
    """The same where keys have weights: absolute values of the products that make the means, whose longest sums in the
    statistics' dtype are over a strip of rows, or a guide."""
    y = inputs.guided(x.dtype, x.dtype)
    assert y is not None and inputs.guide_queries is not None and inputs.guide_keys is not None
    q, k = inputs.q.to(x.dtype).abs(), inputs.others.to(x.dtype).abs()
    of_queries, of_keys = (each.to(x.dtype).abs() for each in (inputs.guide_queries, inputs.guide_keys))
    constant, slope = mathematics.WEIGHT
    weights, sizes = constant + slope * y, abs(constant) + abs(slope) * (of_queries @ of_keys.T)
    each = sizes / weights.sum(1, keepdim=True).abs()
    share, longest = abs(mean_share(mathematics)), max(STRIP_ROWS, q.shape[1])
    error = share * v * (MEAN_ROUNDINGS + math.sqrt(min(longest, max(x.shape))))
    of_k = each @ k
    of_pairs, width = (q * of_k).sum() / len(q), 1 + math.sqrt(q.shape[1]) / 4
    return {
        "loss": error * of_logit * of_pairs + share * MEAN_ROUNDINGS * v * (each * x.abs()).sum() / len(q),
        "dq": error * of_logit * of_k / len(q),
        "dk": error * of_logit * (each.T @ q) / len(q),
        "dscale": error * of_scale * width * of_pairs,
        "dbias": x.new_tensor(share * MEAN_ROUNDINGS * v),
    }


class _Errors(NamedTuple):
    """M * dL/dx, the same without positives, the error of M * L and that of M * dL/dx. Then of what M * dL/dscale and
    M * dL/dbias have besides sums of it the errors; what positives have by way of their z, with its error; next
    states, (S, M), with theirs; and the errors of M * dL/dv of other own numbers."""

    g: Tensor
    smooth: Tensor
    loss: Tensor
    dg: Tensor
    of_scale: Tensor | float = 0.0
    of_bias: Tensor | float = 0.0
    of_z: Tensor | float = 0.0
    dof_z: Tensor | float = 0.0
    states: tuple[Iterable[Tensor], Iterable[Tensor]] = ((), ())
    numbers: Iterable[Tensor] = ()


def _of_softmaxes(
    mathematics: Any, x: Tensor, dx: Tensor, inputs: Inputs, statistics: torch.finfo, dz: Tensor, operand: float
) -> _Errors:
    """Those of a loss of softmaxes, for logits wrong by dx."""
    guide_shares = zip((1, 0), getattr(mathematics, "GUIDE_SHARES", ()), strict=False)
    by_guide = [(share, *_by_guide(x, dx, inputs, statistics, operand, axis)) for axis, share in guide_shares]
    v, at_positives = statistics.eps / 2, inputs.are_positive(mathematics.POSITIVES)
    own_logits = x[at_positives]
    places = torch.arange(len(x), device=x.device)
    x = kept(
        x, inputs, places, mathematics.CLASSES, further_left_out(mathematics, inputs, places, inputs.q, inputs.others)
    )
    sides = [(1, mathematics.QUERY_SHARE)] + [(0, mathematics.KEY_SHARE)] * mathematics.HAS_KEYS
    statistic = {axis: x.logsumexp(axis, keepdim=True) for axis, _ in sides}
    long_sum = 4 + math.sqrt(max(x.shape)) / 8
    dx = dx + v * (sum(each.abs() for each in statistic.values()) + long_sum)
    probability, dprobability = torch.zeros_like(x), torch.zeros_like(x)
    dloss = abs(mathematics.POSITIVE_SHARE) * (dx[at_positives] + v * own_logits.abs()).sum()
    for axis, share in sides:
        own = (x - statistic[axis]).exp().nan_to_num(0.0)  # of a sum that leaves out all
        mean, wrong = _of_shares(own, dx, axis, inputs)
        probability += share * own
        dprobability += abs(share) * wrong
        dloss += abs(share) * (mean + v * (statistic[axis].abs() + long_sum)).sum()
    g, uncancelled = probability.clone(), probability.abs()
    g[at_positives] += mathematics.POSITIVE_SHARE
    uncancelled[at_positives] += abs(mathematics.POSITIVE_SHARE)
    for share, _, dmean, own, down in by_guide:
        dloss += abs(share) * dmean.sum()
        for total in (g, probability):
            total += share * own
        dprobability += abs(share) * down
        uncancelled += abs(share) * own
    return _Errors(g, probability, dloss, dprobability + v * uncancelled)


def _of_shares(shares: Tensor, dx: Tensor, axis: int, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What a log-sum-exp along `axis`, and the shares of its summands, are wrong by for logits wrong by dx.

    A share is wrong by its own size at most; where features were multiplied by numbers and rounded, by e^dx of it."""
    rounded, grown = inputs.query_scale is not None or inputs.key_scale is not None, dx.clamp(max=1.0)
    if rounded:
        grown = torch.where(dx > 1, dx.clamp(max=100.0).expm1(), dx)
    mean = (shares * grown).sum(axis, keepdim=True).minimum(dx.amax(axis, keepdim=True))
    wrong = grown + mean
    if rounded:
        wrong = torch.where(dx + mean > 1, (dx + mean).clamp(max=100.0).expm1(), wrong)
    return mean, (shares * wrong).clamp(max=1.0 if rounded else math.inf)


def _by_guide(
    x: Tensor, dx: Tensor, inputs: Inputs, statistics: torch.finfo, operand: float, axis: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean of logits wrong by dx along `axis`, by the softmax of a guide whose products are rounded to `operand`,
    and its error; the shares of that softmax, (M, N), and what each of them is wrong by."""
    u, t = inputs.guide_queries, inputs.guide_keys
    assert u is not None and t is not None
    u, t, v = u.to(x.dtype), t.to(x.dtype), statistics.eps / 2
    long_sum = 4 + math.sqrt(x.shape[axis]) / 8
    y, z_sum = u @ t.T, (1 + math.sqrt(u.shape[1]) / 4) * (u.abs() @ t.abs().T)
    s = y.logsumexp(axis, keepdim=True)
    dy = operand * (u.square() @ t.square().T).sqrt() + v * (z_sum + y.abs() + s.abs() + long_sum)
    dy.clamp_(max=1.0)
    shares = (y - s).exp()
    dshares = shares * (dy + (shares * dy).sum(axis, keepdim=True) + v) + statistics.smallest_normal
    mean = (shares * x).sum(axis, keepdim=True)
    dmean = (shares * (dx + v * (4 + long_sum) * x.abs())).sum(axis) + (dshares * (x - mean).abs()).sum(axis)
    return mean.squeeze(axis), dmean, shares, dshares


class _OfQueries:
    """What follows from r, p and the queries' own numbers, of a loss whose queries have weights: `values` of
    `of_queries`, and their `errors`, (V, M) each, for logits wrong by dx and similarities by dz; the shares of pairs in
    r, `probability`, and those of positives in p, `positive`, which are wrong by `dprobability` and `dpositive`; of a
    second log-sum-exp `second` and `dsecond` likewise, of those over queries `of_columns` and `dof_columns`, and of
    keys in a query's sum of these `of_ids`; `operand` is w, and `rounded` that of queries which are multiplied by
    numbers. An error is what a value changes over the intervals of its arguments, and FUNCTION_ROUNDINGS. `further`:
    there is one more weight; `cancels` (M,): what the oracle loses where it adds slopes."""

    def __init__(
        self, mathematics: Any, x: Tensor, dx: Tensor, dz: Tensor, inputs: Inputs, statistics: torch.finfo,
        traits: Traits, operand: float = 0.0, rounded: float = 0.0,
    ) -> None:  # fmt: skip
        self.v, self.smallest = statistics.eps / 2, statistics.smallest_normal
        self.mathematics, at = mathematics, inputs.are_positive(mathematics.POSITIVES)
        left_out = () if traits.several else mathematics.CLASSES
        places = torch.arange(len(x), device=x.device)
        y = kept(x, inputs, places, left_out, further_left_out(mathematics, inputs, places, inputs.q, inputs.others))
        self.long_sum = 4 + math.sqrt(x.shape[1]) / 8
        self.inputs = inputs
        r, dr, self.probability, self.dprobability = self._of_sum(y, dx)
        found, count = at.any(1), None
        if traits.by_guide:
            p, dp, self.positive, self.dpositive = _by_guide(x, dx, inputs, statistics, operand)
            found = torch.ones_like(found)
        elif traits.several:
            _, count, p = mathematics.of_positives(x, at)
            p = torch.where(found, p, 0.0)
            dp = self._of_positives(x, dx, at, p, traits.softmax_of_positives)
        else:
            p, dp = x[at], dx[at] + self.v * x[at].abs()
            self.positive, self.dpositive = at.to(x.dtype), torch.zeros_like(x)
        numbers, errors = [r, p], [dr, dp]
        if traits.second:
            times = mathematics.MULTIPLE
            r2, dr2, self.second, self.dsecond = self._of_sum(times * y, times * dx)
            numbers.append(r2)
            errors.append(dr2)
        if traits.partnered:
            numbers.append(r[inputs.positives()])
            errors.append(dr[inputs.positives()])
        if traits.crossed:
            c, dc, of_columns, dof_columns = self._of_sum(y.T, dx.T)
            self.of_columns, self.dof_columns = of_columns.T, dof_columns.T
            self.of_ids = torch.eye(len(x), dtype=x.dtype, device=x.device)
            if traits.several:
                c, dc = self._of_ids(c, dc, at)
            numbers.append(c)
            errors.append(dc)
        q, _, scale, bias = inputs.leaves(x.dtype, x.dtype)
        for weight in (inputs.query_weight, inputs.key_weight):
            if weight is not None:
                numbers.append(weight.to(x.dtype))
                errors.append(self.v * numbers[-1].abs())
        if inputs.negatives is not None:
            n, pairs = inputs.negatives.to(x.dtype), inputs.pairs()
            rows = q if pairs is None else q[pairs.first]
            z = torch.einsum("id,ild->il", rows, n)
            own = mathematics.logit(z, scale, bias)
            own = own.masked_fill(negatives_left_out(mathematics, inputs, inputs.q), -torch.inf)
            h = own.logsumexp(1)
            of_logit = abs(float(mathematics.gradient_factor(scale, bias)))
            self.slope = mathematics.dlogit_dz(z, scale, bias).abs() * of_logit
            z_sum = (1 + math.sqrt(n.shape[2]) / 4) * torch.einsum("id,ild->il", rows.abs(), n.abs())
            products = torch.einsum("id,ild->il", rows.square(), n.square()).sqrt()
            own_dx = self.slope * (self.v * z_sum + rounded * products)
            own_dx += self.v * (own.abs() + h.abs()[:, None] + 4)
            self.own_probability = (own - h[:, None]).exp().nan_to_num(0.0)  # of a sum that leaves out all
            mean, self.own_dprobability = _of_shares(self.own_probability, own_dx, 1, inputs)
            dh = mean[:, 0] + self.v * (h.abs().nan_to_num(0.0, posinf=0.0) + 4)
            numbers.append(h if pairs is None else h[pairs.of_row])
            errors.append(dh if pairs is None else dh[pairs.of_row])
        for state in (inputs.query_state, inputs.key_state):
            if state is not None:
                numbers.append(state.to(x.dtype))
                errors.append(self.v * numbers[-1].abs().nan_to_num(posinf=0.0))
        if traits.several:  # their terms do not depend on similarities otherwise
            positive_z = dz = torch.zeros_like(r)
        else:
            positive_z, dz = (q * inputs.others.to(x.dtype)[inputs.positives()]).sum(1), dz[at]

        def given(signs: Sequence[int], pooled: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor, Any]:
            r, p, *own = (x + s * e for x, s, e in zip(numbers, signs, errors, strict=True))
            similarity, second = positive_z + signs[1] * dz, own.pop(0) if traits.second else None
            partners, columns = (own.pop(0) if used else None for used in (traits.partnered, traits.crossed))
            if traits.columns_of_ids and columns is not None:  # which have what p is of
                r, columns = torch.maximum(r, p), torch.maximum(columns, p)
            sizes, more = (scale, bias, len(x), x.shape[1]), (count, second, partners, columns)
            return r, p, numbers_of_rows(mathematics, r, p, similarity, *sizes, own, *more, pooled=pooled)

        def at_ends(r: Tensor, p: Tensor, rest: Any) -> Tensor:
            values = mathematics.of_queries(r, p, **rest)
            return torch.stack([torch.as_tensor(value).to(r).expand_as(r) for value in values]) * found

        ends, of_all = list(itertools.product((-1, 1), repeat=len(numbers))), list[Any]((None,))
        if traits.pooled:
            each = [mathematics.of_all_positives(p + s * dp, positive_z + s * dz, scale, bias) for s in (-1, 0, 1)]
            of_all = self._pooled(each, given, ends)
        self.values = at_ends(*given([0] * len(numbers)))
        near = torch.stack([at_ends(*given(signs, pooled)) for signs in ends for pooled in of_all])
        self.errors = (near - self.values).abs().amax(0) + FUNCTION_ROUNDINGS * self.v * self.values.abs()
        self.further = traits.second or traits.crossed
        slopes = self.values[[1, 2, 6] if self.further else [1, 2]].abs().sum(0)
        self.cancels = torch.finfo(torch.float64).eps * slopes
        if traits.states:  # an exponential of what a next state is taken from has its roundings, also in the oracle
            following = self.values[-traits.states :].abs().nan_to_num(0.0, posinf=0.0).amax(0)
            self.errors += FUNCTION_ROUNDINGS * torch.finfo(torch.float64).eps * following * self.values.abs()

    def _pooled(self, each: Sequence[Tensor], given: Callable[..., Any], ends: Sequence[Any]) -> list[Any]:
        """The log-sum-exp over the positives of all queries, and the sum of slopes by it, at the ends of their
        intervals. `each`: of what, for positives wrong by their errors, without, and wrong to the other side."""
        low, middle, high = each
        total, wrong = middle.logsumexp(0), torch.maximum((low - middle).abs(), (high - middle).abs())
        dtotal = (middle.softmax(0) * wrong).sum() + self.v * (total.abs() + self.long_sum)

        def slopes(signs: Sequence[int], at: Tensor) -> Tensor:
            r, p, rest = given(signs, (at, at))
            return slopes_of_pooled(self.mathematics, r, p, rest | {"pooled": at})

        own = slopes([0] * len(ends[0]), total)
        near = torch.stack([slopes(signs, total + s * dtotal) for signs in ends for s in (-1, 1)])
        slope, dslope = own.sum(), (near - own).abs().amax(0).sum() + self.v * self.long_sum * own.abs().sum()
        return [(total + a * dtotal, slope + b * dslope) for a, b in itertools.product((-1, 1), repeat=2)]

    def _of_sum(self, y: Tensor, dx: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The log-sum-exp of each row of y, -inf where a pair is left out, for logits wrong by dx; the shares of pairs
        in it; and what each of them is wrong by."""
        r = y.logsumexp(1)
        finite = r.abs().nan_to_num(0.0, posinf=0.0)
        dx = dx + self.v * (finite[:, None] + self.long_sum)
        probability = (y - r[:, None]).exp().nan_to_num(0.0)  # of a sum that leaves out all
        mean, dprobability = _of_shares(probability, dx, 1, self.inputs)
        dr = mean[:, 0] + self.v * (finite + self.long_sum)
        return r, dr, probability, dprobability + self.v * probability

    def _of_ids(self, c: Tensor, dc: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """The log-sum-exp of these of each query's positives `at`, and its error; writes the shares of keys in it."""
        found = at.any(1)
        of_each = torch.where(at, c, -torch.inf).logsumexp(1).masked_fill(~found, 0.0)
        self.of_ids = torch.where(at, (c - of_each[:, None]).exp(), 0.0)
        return of_each, (self.of_ids * dc).sum(1) + self.v * (of_each.abs() + self.long_sum)

    def _of_positives(self, x: Tensor, dx: Tensor, at: Tensor, p: Tensor, softmax: bool) -> Tensor:
        """The error of p, a statistic of the positives `at`; writes their shares, which are all alike in a mean."""
        if softmax:
            self.positive = torch.where(at, (x - p[:, None]).exp(), 0.0)
            dx = dx + self.v * (p.abs()[:, None] + self.long_sum)
            mean, wrong = _of_shares(self.positive, dx, 1, self.inputs)
            self.dpositive = wrong + self.v * self.positive
            return mean[:, 0] + self.v * (p.abs() + self.long_sum)
        self.positive = at / at.sum(1, keepdim=True).clamp(min=1)
        self.dpositive = self.v * self.positive
        sums = (self.positive * (dx + self.v * self.long_sum * x.abs())).sum(1)
        return sums + self.v * p.abs()


def _of_combined(
    mathematics: Any, x: Tensor, dx: Tensor, inputs: Inputs, statistics: torch.finfo, dz: Tensor, traits: Traits,
    operand: float, rounded: float,
) -> _Errors:  # fmt: skip
    """The same where each query has a weight: it, its positive's slope and its term are wrong by what they change over
    the intervals of its sum, its positive and its own numbers, and by FUNCTION_ROUNDINGS."""
    of = _OfQueries(mathematics, x, dx, dz, inputs, statistics, traits, operand, rounded)
    terms, weight, slope, through_z, *_ = of.values
    dterms, dweight, dslope, dthrough_z, of_scale, of_bias, *_ = of.errors
    second, dsecond = (each[6] if of.further else torch.zeros_like(weight) for each in (of.values, of.errors))
    dweight, dslope = dweight + of.cancels, dslope + of.cancels
    smooth = weight[:, None] * of.probability
    dg = weight.abs()[:, None] * of.dprobability + dweight[:, None] * of.probability
    dg += weight.abs()[:, None] * statistics.smallest_normal  # where a probability underflows
    if traits.second:
        smooth = smooth + second[:, None] * of.second
        dg += second.abs()[:, None] * (of.dsecond + statistics.smallest_normal)
        dg += (dsecond + of.cancels)[:, None] * of.second
    if traits.crossed:  # by key, whose share in a sum is as wrong as that of the pair in the key's
        of_key, size = second @ of.of_ids, second.abs() @ of.of_ids
        smooth = smooth + of_key * of.of_columns
        dg += size * (of.dof_columns + statistics.smallest_normal)
        dg += ((dsecond + of.cancels) @ of.of_ids + of.v * size) * of.of_columns
    g = smooth + slope[:, None] * of.positive
    if traits.by_guide:  # all pairs round alike
        smooth = g
    elif traits.several:  # positives, of which there may be many, round alike, and so do all other pairs
        smooth = smooth.masked_fill(inputs.are_positive(mathematics.POSITIVES), 0.0)
    dg += dslope[:, None] * of.positive + slope.abs()[:, None] * of.dpositive
    dterms += statistics.smallest_normal
    by_z = [of.positive * each[:, None] for each in (through_z, dthrough_z)]
    dloss = dterms.sum() + of.v * of.long_sum * terms.abs().sum()
    first = len(of.values) - traits.states
    states = of.values[first:], of.errors[first:]
    numbers = of.errors[len(of.values) - len(traits.vectors) : first] + torch.finfo(torch.float64).eps * terms.abs()
    return _Errors(g, smooth, dloss, dg, of_scale.sum(), of_bias.sum(), by_z[0], by_z[1], states, numbers)


def _of_negatives(
    of: "_OfQueries", inputs: Inputs, u: float, reference: LossAndGrads
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What queries' own negatives add to the bound, by result, and to the magnitude of dq; and the bound of their own
    gradients.

    Their part of dq is rounded to the features' dtype, as is that of the sweep, and then their sum.
    """
    mathematics, count = of.mathematics, len(inputs.q)
    q, _, scale, bias = inputs.leaves(torch.float64, torch.float64)
    assert inputs.negatives is not None
    n, pairs = inputs.negatives.to(q.dtype), inputs.pairs()
    place = -1 - sum(each is not None for each in (inputs.query_state, inputs.key_state))  # states are the last ones
    slope, dslope = of.values[place], of.errors[place] + of.cancels
    rows = q
    if pairs is not None:  # both rows have the sum of the pair
        rows = q[pairs.first]
        slope, dslope = (each[pairs.first] + each[pairs.other] for each in (slope, dslope))
    g = slope[:, None] * of.own_probability
    dg = slope.abs()[:, None] * of.own_dprobability + 4 * of.v * g.abs() + dslope[:, None] * of.own_probability
    dg += slope.abs()[:, None] * of.smallest + 4 * of.v * g.abs()
    # As in the sweep, the slope of a soft-capped logit is accurate to its value at z = 0.
    at_zero = mathematics.dlogit_dz(q.new_zeros(1, 1), scale, bias) * mathematics.gradient_factor(scale, bias)
    dg += 4 * of.v * abs(float(at_zero)) / of.slope.clamp(min=1e-30) * g.abs()
    z = torch.einsum("id,ild->il", rows, n)
    one = torch.ones_like(scale)
    by_scale = torch.func.jvp(lambda s: mathematics.logit(z, s, bias), (scale,), (one,))[1].abs()
    by_bias = torch.func.jvp(lambda b: mathematics.logit(z, scale, b), (bias,), (one,))[1].abs()
    long_sum = of.v * min(count, 4 * math.sqrt(count))
    size = torch.einsum("il,ild->id", of.slope * g.abs(), n.abs())
    dq = torch.einsum("il,ild->id", of.slope * dg, n.abs()) + 2 * u * size
    own = (of.slope * (dg + of.smallest))[:, :, None] * rows.abs()[:, None]
    dscale, dbias = (((dg + long_sum * g.abs()) * each).sum() for each in (by_scale, by_bias))
    if pairs is not None:
        dq, size = (torch.zeros_like(q).index_add(0, pairs.first, each) for each in (dq, size))
    added = {"dq": dq / count + u * reference.dq.abs(), "dscale": dscale / count, "dbias": dbias / count}
    return added, size / count, own / count


def _of_pairs(mathematics: Any, x: Tensor, dx: Tensor, inputs: Inputs, statistics: torch.finfo, dz: Tensor) -> _Errors:
    """The same of a sum over pairs. A term is wrong by what it changes over the interval of its logit, and by
    FUNCTION_ROUNDINGS; so is its slope. Terms are monotone over so short an interval."""
    v = statistics.eps / 2

    def with_error(name: str) -> tuple[Tensor, Tensor]:
        value, above, below = (pair_values(mathematics, each, name, inputs) for each in (x, x + dx, x - dx))
        error = (above - value).abs().maximum((below - value).abs())
        return value, error + FUNCTION_ROUNDINGS * v * value.abs()

    (terms, dterms), (g, dg) = with_error("term"), with_error("slope")
    sums = v * (4 + math.sqrt(max(x.shape)) / 8) * terms.abs().sum()
    return _Errors(g, mathematics.pair_slope(x), (dterms + statistics.smallest_normal).sum() + sums, dg)


def _sum_bound(sums: Iterable[Tensor], other: Tensor, accumulation: float, unit: float) -> Tensor:
    """The error of g @ other, where g is wrong by dg and rounded to `unit`. `sums`: g, probability, positive, |g| of
    `_correlated` elements, dg.

    Roundings of different elements are independent, so they add up as a root of squares. Equal rows of `other`, and
    nearly equal elements (probabilities at a small scale, positives), round alike: they add a factor of their sum.
    Errors of correlated elements may add up. The rounding never exceeds the sum of all.
    """
    g, probability, positive, correlated, dg = sums
    size = g.abs() @ other.abs()
    spread = (g.square() @ other.square()).sqrt() * math.sqrt(_most_alike(other))
    alike = (probability @ other).abs() + (positive @ other).abs() + correlated @ other.abs()
    rounding = size.minimum(alike + spread)
    return dg @ other.abs() + accumulation * size + unit * rounding


def _correlated(x: Tensor, smooth: Tensor, u: float) -> Tensor:
    """Pairs whose rounding errors may all have the sign of z: slopes, or e^x, within NEAR roundings of the largest.

    There z decides on which side of a tie a slope lies. NaN is near nothing.
    """
    near = [each >= (1 - NEAR * u) * each.max() for each in (smooth.abs(), (x - x.max()).exp())]
    return near[0] | near[1]


def _most_alike(rows: Tensor) -> int:
    """How often the most frequent row occurs."""
    return int(rows.unique(dim=0, return_counts=True)[1].max())
