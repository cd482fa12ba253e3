"""The derivation of a loss: from its formula to the gradient of one logit, in a numerically stable form.

Kernels exist for a weighted sum of means over queries of e(r, p) and means over keys of e(c, p). Here r and c are
log-sum-exps of one logit x = f(z, scale, bias), and p is the positive's logit. With M queries,

    dL/dx_ij = 1/M * (query_share * exp(x_ij - r_i) + key_share * exp(x_ij - c_j) + positive_share * [j = positive(i)])

From it follow dL/dz_ij = dL/dx_ij * dx/dz, dq_i = sum_j dL/dz_ij k_j and dk_j = sum_i dL/dz_ij q_i.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
from sympy import Dummy, Expr, Integer, Symbol, diff, exp

from infcl_gen.losses import language
from infcl_gen.losses.language import LossError, LossSpec, bias, is_positive, keys, queries, scale, z
from infcl_gen.losses.printers import c, dense_code, display, p, r, temporaries, torch_code, triton_code, x
from infcl_gen.runtime.table import Travelling

SUPPORTED = (
    "kernels exist for mean_over_queries and mean_over_keys of constant multiples of logsumexp_over_keys(x), "
    "logsumexp_over_queries(x) and positive(x), without masks, of one logit x of z, scale and bias"
)


@dataclass(frozen=True)
class Derivation:
    """A derived loss, as SymPy expressions over z, scale, bias and x, r, c, p (see `printers`).

    slope, shift     x = slope * z + shift where the logit is affine in z, else None.
    gradient_factor  the factor of dx/dz that all pairs share: the slope if affine, scale for f(scale * z), else 1.
                     It multiplies the finished sums only, so that dL/dx cannot overflow fp16 by it.
    dlogit_dz        dx/dz / gradient_factor, so 1 if affine.
    query_term       the loss is 1/M * (sum over queries of query_term(r, p) + sum over keys of key_term(c, p)).
    key_term         0 without a key reduction.
    query_share, key_share, positive_share   constants of dL/dx_ij (module docstring).
    dscale_factor    dL/dscale = dscale_factor * sum_i q_i . (sum_j dL/dx_ij * dlogit_dz * k_j).
    dbias            dL/dbias of the whole batch, a constant.
    """

    spec: LossSpec
    logit: Expr
    slope: Expr | None
    shift: Expr | None
    dlogit_dz: Expr
    query_term: Expr
    key_term: Expr
    query_share: float
    key_share: float
    positive_share: float
    gradient_factor: Expr
    dscale_factor: Expr
    dbias: Expr

    @property
    def has_queries(self) -> bool:
        """Whether the loss has a log-sum-exp over keys for each query."""
        return bool(self.query_term.has(r))

    @property
    def has_keys(self) -> bool:
        """Whether the loss has a log-sum-exp over queries for each key."""
        return bool(self.key_term.has(c))

    @property
    def positive_rest(self) -> float:
        """The sum of the shares, 0.0 if it is only rounding.

        M dL/dx of a positive with probabilities P, C is query_share * (P - 1) + key_share * (C - 1) + positive_rest.
        """
        shares = (self.query_share, self.key_share, self.positive_share)
        total = math.fsum(shares)
        return 0.0 if abs(total) < 1e-12 * max(map(abs, shares)) else total

    @property
    def logit_strips(self) -> int:
        """Temporaries of torch for the logit or its derivative of a strip of pairs; 0 if affine: computed in place."""
        if self.slope is not None:
            return 0
        return max(2, *(temporaries(torch_code(expression), "z") for expression in (self.logit, self.dlogit_dz)))

    def travelling(self, dim: int) -> tuple[Travelling, ...]:
        """The data of each key that ranks exchange: features, the statistics of its column, and its gradient."""
        keys = Travelling("keys", dim, "features", forward="unchanged", backward="unchanged")
        statistics = Travelling("key statistics", 2, "statistics", "summed", "unchanged", across=True)
        gradients = Travelling("key gradients", dim, "statistics", backward="summed")
        return (keys, statistics, gradients) if self.has_keys else (keys, gradients)

    def formulas(self) -> dict[str, str]:
        """The derivation for people: ASCII formulas by the name of the quantity."""
        pair = {"x": "x_ij", "z": "z_ij", "r": "r_i", "c": "c_j", "p": "p_i"}
        terms, statistics = [], {}
        if self.has_queries:
            terms.append(f"sum_i ({display(self.query_term, pair)})")
            statistics["query_statistic"] = "r_i = logsumexp_j x_ij"
        if self.has_keys:
            terms.append(f"sum_j ({display(self.key_term, {**pair, 'p': 'p_j'})})")
            statistics["key_statistic"] = "c_j = logsumexp_i x_ij"
        shares = {
            "exp(x_ij - r_i)": self.query_share,
            "exp(x_ij - c_j)": self.key_share,
            "[j = positive(i)]": self.positive_share,
        }
        g = ""
        for text, share in shares.items():
            if share:
                sign = (" - " if share < 0 else " + ") if g else ("-" if share < 0 else "")
                g += sign + text if abs(share) == 1 else f"{sign}{abs(share)!r} * {text}"
        slope = display(diff(self.logit, z), pair)
        slope = "" if slope == "1" else f" * {_wrapped(slope)}"
        dx_dscale = display(diff(self.logit, scale), pair)
        factor, dots = display(self.dscale_factor / self.gradient_factor), "sum_i q_i . dq_i"
        dscale = {"0": "0", "1": dots}.get(factor, f"{factor} * {dots}")
        return {
            "logit": f"x_ij = {display(self.logit, pair)}, z_ij = q_i . k_j",
            **statistics,
            "positive": "p_i = x_ii" if self.spec.positives == "diagonal" else "p_i = x_ij where j = labels[i]",
            "loss": f"L = 1/M * ({' + '.join(terms)})",
            "dL/dx": f"g_ij = 1/M * ({g})",
            "dq": f"dq_i = sum_j g_ij{slope} * k_j",
            "dk": f"dk_j = sum_i g_ij{slope} * q_i",
            "dscale": f"dscale = sum_ij g_ij * {_wrapped(dx_dscale)} = {dscale}",
            "dbias": f"dbias = {display(self.dbias)}",
        }


@lru_cache(maxsize=64)
def derive(spec: LossSpec) -> Derivation:
    """The derivation of a loss. Raises LossError, in one sentence, for a loss that no kernel implements."""
    try:
        return _derived(spec)
    except LossError as refusal:
        raise LossError(f"loss {spec.name}: {refusal}; {SUPPORTED}") from None


def _derived(spec: LossSpec) -> Derivation:
    logit = _logit(spec)
    formula = _over_x(spec, logit)
    query_term, key_term = _terms(formula)
    _refuse(
        (key_term.has(c) and spec.positives != "diagonal",
         "key reductions need positives='diagonal' (as many keys as queries)"),
        (key_term != 0 and not key_term.has(c),
         "mean_over_keys without logsumexp_over_queries: use mean_over_queries"),
        (not (query_term.has(r) or key_term.has(c)),
         "neither logsumexp_over_keys nor logsumexp_over_queries occurs"),
    )  # fmt: skip
    shares = _shares(spec, formula)
    total = sum(shares, Integer(0))  # sum_ij dL/dx_ij: the gradient by a constant that is added to the logit
    dx_dz = diff(logit, z)
    if dx_dz == 0:
        raise LossError(f"the logit {display(logit)} does not depend on z")
    affine = not dx_dz.has(z)
    slope = dx_dz if affine else None
    shift = sympy.expand(logit - dx_dz * z) if affine else None
    gradient_factor = dx_dz if affine else scale if logit.has(scale) else Integer(1)
    derivation = Derivation(
        spec=spec,
        logit=logit,
        slope=slope,
        shift=shift,
        dlogit_dz=dx_dz / gradient_factor,
        query_term=query_term,
        key_term=key_term,
        query_share=float(shares[0]),
        key_share=float(shares[1]),
        positive_share=float(shares[2]),
        gradient_factor=gradient_factor,
        dscale_factor=_dscale_factor(logit, slope, shift, total),
        dbias=_dbias(logit, total),
    )
    printed = (logit, derivation.dlogit_dz, query_term, key_term, gradient_factor, derivation.dscale_factor)
    try:
        for expression in printed:
            triton_code(expression)
            torch_code(expression)
    except LossError as error:
        raise LossError(f"its derivative has what kernels cannot compute: {error}") from None
    return derivation


def _refuse(*checks: tuple[object, str]) -> None:
    """Raises for the first (condition, reason) whose condition holds."""
    for holds, why in checks:
        if holds:
            raise LossError(why)


_STATISTICS = (language.logsumexp_over_keys, language.logsumexp_over_queries, language.positive)
_MEANS = (language.mean_over_queries, language.mean_over_keys)
_REDUCTIONS = (*language.ROW_FUNCTIONS, *language.LOSS_FUNCTIONS)
_LETTERS = {language.logsumexp_over_keys(x): r, language.logsumexp_over_queries(x): c, language.positive(x): p}


def _logit(spec: LossSpec) -> Expr:
    """The one expression inside all log-sum-exps and positives."""
    reductions = spec.formula.atoms(*_REDUCTIONS)
    foreign = sorted({each.func.__name__ for each in reductions if not isinstance(each, (*_STATISTICS, *_MEANS))})
    statistics = [each for each in reductions if isinstance(each, _STATISTICS)]
    logits = sorted({each.args[0] for each in statistics}, key=sympy.default_sort_key)
    listed = "; ".join(map(str, logits)) or "none"
    _refuse(
        (foreign, f"{', '.join(foreign)} has no kernel yet"),
        (spec.positives == "id", "positives='id' has no kernel yet"),
        (any(len(each.args) > 1 for each in statistics), "masks (where=) have no kernel yet"),
        (len(logits) != 1, f"a loss needs exactly one logit, and this one has {len(logits)} ({listed})"),
    )
    (logit,) = logits
    unknown = sorted(map(str, logit.free_symbols - {z, scale, bias}))
    if unknown or logit.atoms(*_REDUCTIONS):
        inside = ", ".join(unknown) or "another reduction"
        raise LossError(f"the logit {logit} depends on {inside}, not only on z, scale and bias")
    return logit


def _over_x(spec: LossSpec, logit: Expr) -> Expr:
    """The formula with the logit replaced by the symbol x; nothing else may depend on z, scale or bias."""
    formula = spec.formula.replace(lambda e: isinstance(e, _STATISTICS), lambda e: e.func(x))
    outside = sorted(map(str, formula.free_symbols - {x}))
    if outside:
        raise LossError(f"{', '.join(outside)} stands outside logsumexp_over_keys, logsumexp_over_queries and positive")
    return formula


def _terms(formula: Expr) -> tuple[Expr, Expr]:
    """query_term(r, p) and key_term(c, p), with the coefficients of their means."""
    means = sorted(formula.atoms(*_MEANS), key=sympy.default_sort_key)
    dummies = {mean: Dummy(f"mean_{index}") for index, mean in enumerate(means)}
    rest = linear = sympy.expand_mul(formula.xreplace(dummies))
    terms = dict.fromkeys(_MEANS, Integer(0))
    for mean, dummy in dummies.items():
        coefficient = diff(linear, dummy)
        _refuse(
            (mean.args[0].atoms(*_MEANS), "a mean of a mean"),
            (not coefficient.is_number, "the loss is not a sum of constant multiples of means"),
        )
        terms[mean.func] += coefficient * mean.args[0].xreplace(_LETTERS)
        rest -= coefficient * dummy
    if sympy.expand(rest) != 0:
        raise LossError("something stands outside the means, or a mean is not multiplied by a constant")
    query_term, key_term = (sympy.expand_mul(terms[mean]) for mean in _MEANS)
    for term, own, other, side in ((query_term, r, c, "queries"), (key_term, c, r, "keys")):
        if term.has(other) or term.has(x):
            raise LossError(f"mean_over_{side} of what is not one value for each of the {side}: {display(term)}")
        if any(not diff(term, statistic).is_number for statistic in (own, p)):
            raise LossError(
                f"mean_over_{side} of {display(term)}, which multiplies statistics (r: logsumexp_over_keys, c: "
                "logsumexp_over_queries, p: positive): terms may only add constant multiples of them"
            )
    return sympy.factor_terms(query_term), sympy.factor_terms(key_term)


def _shares(spec: LossSpec, formula: Expr) -> tuple[Expr, Expr, Expr]:
    """The constants of dL/dx_ij: coefficients of the formula's derivative."""
    gradient = sympy.expand_mul(diff(formula, x).xreplace(_LETTERS) * queries)
    if spec.positives == "diagonal":
        gradient = sympy.expand_mul(gradient.xreplace({keys: queries}))
    parts = (exp(x - r), exp(x - c), is_positive)
    stand_ins = [Dummy(f"part_{index}") for index in range(len(parts))]
    linear = gradient.xreplace(dict(zip(parts, stand_ins, strict=True)))
    shares = tuple(diff(linear, dummy) for dummy in stand_ins)
    rest = sympy.expand(linear - sum(s * d for s, d in zip(shares, stand_ins, strict=True)))
    if rest != 0 or not all(share.is_number and share.is_finite and share.is_real for share in shares):
        raise LossError(f"the gradient of one logit, 1/M * ({gradient}), is not a sum of constant shares")
    least, most = language.SMALLEST_NUMBER, language.LARGEST_NUMBER
    if any(share != 0 and not least <= abs(share) <= most for share in shares):
        raise LossError(f"a weight below {least:g} or above {most:g} leaves the range of fp32")
    return shares[0], shares[1], shares[2]


def _dscale_factor(logit: Expr, slope: Expr | None, shift: Expr | None, total: Expr) -> Expr:
    if not logit.has(scale):
        return Integer(0)
    if slope is not None and shift is not None:
        # dx/dscale = slope' z + shift'; the sum over pairs multiplies shift' by `total`, 0 for a proper loss.
        if shift.has(scale) and total != 0:
            raise LossError("the part of the logit without z depends on scale, and the shares do not sum to 0")
        return diff(slope, scale)
    # f(scale * z): dx/dscale = z * dx/dz / scale
    u = Symbol("u", real=True)
    if sympy.expand(logit.subs(z, u / scale)).has(scale):
        raise LossError("scale occurs in a non-affine logit other than as scale * z")
    return Integer(1)


def _dbias(logit: Expr, total: Expr) -> Expr:
    """sum_ij dL/dx_ij dx/dbias over the whole batch."""
    slope = diff(logit, bias)
    if slope == 0 or (total == 0 and not slope.has(z)):
        return Integer(0)
    if slope.is_number:
        return total * slope
    raise LossError("dL/dbias is not a constant (bias must be added to the logit)")


def loss_context(derivation: Derivation) -> dict[str, Any]:
    """The holes of torch/loss.py.jinja: torch source and literals."""
    spec = derivation.spec
    over_x, labels = _over_x(spec, derivation.logit), spec.positives == "label"
    reductions = (
        ("r", derivation.has_queries, "torch.logsumexp(x, dim=1)"),
        ("c", derivation.has_keys, "torch.logsumexp(x, dim=0)"),
        ("p", over_x.has(language.positive), "x.gather(1, labels[:, None]).squeeze(1)" if labels else "x.diagonal()"),
    )
    literals = ("has_queries", "has_keys", "query_share", "key_share", "positive_share", "positive_rest")
    printed = ("logit", "gradient_factor", "dscale_factor")
    return {
        **{name: getattr(derivation, name) for name in literals},
        **{name: torch_code(getattr(derivation, name)) for name in printed},
        "name": spec.name,
        "formulas": "\n".join(derivation.formulas().values()),
        "positives": spec.positives,
        "labels": labels,
        "dense_arguments": "x: Tensor" + ", labels: Tensor" * labels,
        "with_labels": ", labels" * labels,
        "and_positives": " and the (M,) positives" * labels,
        "labels_type": "Tensor | str | None" if labels else "Tensor | None",
        "dbias": float(derivation.dbias),
        "dlogit_dz": torch_code(derivation.dlogit_dz) if derivation.slope is None else "torch.ones_like(z)",
        "query_term": torch_code(derivation.query_term) if derivation.has_queries else "torch.zeros_like(p)",
        "key_term": torch_code(derivation.key_term) if derivation.has_keys else "torch.zeros_like(c)",
        "reductions": "\n".join(f"{name} = {code}" for name, used, code in reductions if used),
        "loss": dense_code(over_x.xreplace(_LETTERS)),
    }


def _wrapped(text: str) -> str:
    return f"({text})" if any(operator in text for operator in (" + ", " - ", " / ", " * ")) else text
