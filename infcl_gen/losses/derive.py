"""The derivation of a loss: from its general form to the gradient of one logit, in a numerically stable form.

Of a weighted sum of means over queries of e(r, p) and means over keys of e(c, p), r and c log-sum-exps, p the
positive's logit, and M queries,

    dL/dx_ij = 1/M * (query_share * exp(x_ij - r_i) + key_share * exp(x_ij - c_j) + positive_share * [j = positive(i)])

Of a mean over queries of any other F(r, p, scale, bias, v), v a query's own numbers, with a_i = dF/dr and b_i = dF/dp
at those of query i,

    dL/dx_ij = 1/M * (a_i * exp(x_ij - r_i) + b_i * [j = positive(i)])

Where query i and key i are a pair, and F has cp_i = c_i, too, as the term of key i is part of it, dL/dx_ij also has
ac_j * exp(x_ij - c_j) with ac_j = dF/dcp of query j: the sums of row and column of one index give the factor of a key.
Of any number of positives cp_i = log sum_j exp(c_j) over these, and in place of ac_j * exp(x_ij - c_j) stands
exp(x_ij) * (sum_l ac_l * exp(-cp_l) over the queries l of which j is a positive).

Where rows i and l are a pair, and F has rp_i = r_l, too, a_i = dF/dr + dF/drp of row l: its arguments are those of row
i, with r and rp exchanged.

A second log-sum-exp r2_i, of c * x_ij for a constant c, adds a2_i * exp(c * x_ij - r2_i) with a2_i = c * dF/dr2.

One number of the whole batch, E = log sum_i exp(e_i) of functions e_i of the positives, changes all terms:
dL/de_i = 1/M * S * exp(e_i - E), S = sum_k dF_k/dE. Slopes of F by what e depends on are then those of
F + S * exp(e - E) with constants E and S. Where e depends on similarities, `pooled_slope` is S over the factor that the
gradients of all pairs have, by which these slopes are divided: scale may be 0.

With a multiple a of the mean of all logits dL/dx_ij also has 1/M * a/N. No tile computes that part. The logit is
affine: it adds slope * a * (mean of all k) to M * dq_i, and slope * a/N * (sum of all q) to M * dk_j.

With any number n_i of positives p_i is their mean, or their log-sum-exp; in place of [j = positive(i)] then stand
[j is one of them] / n_i, or exp(x_ij - p_i) [j is one of them]. A guide's softmax t gives p_i = sum_j t_ij x_ij, and
t_ij in its place.

Of both sides a guide's softmaxes, t over keys and s over queries, give tq_i = sum_j t_ij x_ij and tk_j = sum_i s_ij
x_ij. Constant multiples of these add 1/M * (guide_shares[0] * t_ij + guide_shares[1] * s_ij) to the first formula.

The gradients of scale and bias add how F changes with them. Where F depends on the positive's z in another way than by
its logit, dL/dz of the positive adds dF/dz.

Of a sum over pairs of h(x, class of the pair), dL/dx_ij = 1/M * h'(x_ij, class). The loss of query i alone is the sum
of h over its row. A pair that is left out of a log-sum-exp has no exp(...) in it. From dL/dx follow
dL/dz_ij = dL/dx_ij * dx/dz, dq_i = sum_j dL/dz_ij k_j and dk_j = sum_i dL/dz_ij q_i.

Of a triangle k is q and x_ij = x_ji, so dq_i = sum_j (dL/dz_ij + dL/dz_ji) q_j. Both softmaxes of a pair share its
exponential: shares, sums and scalars are those of

    dL/dx_ij + dL/dx_ji = 1/M * (query_share * (exp(x_ij - r_i) + exp(x_ij - r_j))
                                 + positive_share * ([j = positive(i)] + [i = positive(j)]))

and of any other F they are those of a_i * exp(x_ij - r_i) + a_j * exp(x_ij - r_j) + b_i [j = positive(i)] +
b_j [i = positive(j)]. The positive of i may be left out of r_i and not of r_j: then only a_j has its exp(...).
"""

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from sympy import Expr, Integer, Symbol, diff

from infcl_gen.losses import language
from infcl_gen.losses.form import STATES, Form, PairTerm, form_of, refuse
from infcl_gen.losses.language import LossError, LossSpec, PrefixesApartError, bias, scale, z
from infcl_gen.losses.printers import (
    Printer,
    c,
    cp,
    d,
    display,
    m,
    p,
    pc,
    pooled,
    pooled_slope,
    positive_z,
    r,
    r2,
    rp,
    temporaries,
    temporary,
    tk,
    torch_code,
    tq,
    triton_code,
    x,
)
from infcl_gen.runtime.table import Travelling
from infcl_gen.runtime.traits import Known, Traits

LONG_SLOPES = 60  # operations


@dataclass(frozen=True)
class Derivation:
    """A derived loss, as SymPy expressions over z, scale, bias and x, r, c, p, u, h, r2, rp, cp, pc, uk, tq, tk (see
    `printers`).

    slope, shift     x = slope * z + shift where the logit is affine in z, else None.
    gradient_factor  the factor of dx/dz that all pairs share: the slope if affine, scale for f(scale * z), else 1.
                     It multiplies the finished sums only, so that dL/dx cannot overflow fp16 by it.
    dlogit_dz        dx/dz / gradient_factor, so 1 if affine.
    query_share, key_share, positive_share   constants of dL/dx_ij (module docstring); 1, 0 and 0 for any other F, whose
                     factors are a and b.
    guide_shares     the constants of a guide's softmaxes over keys, and over queries; 0.0 without means of both sides.
    mean_share       what multiplies the mean of all logits in L; 0.0 for none.
    query_weight, positive_slope   a and b of any other F; 0 for constants.
    second_weight    a2, of a second log-sum-exp; 0 without one.
    key_weight       ac, of the log-sum-exp over queries of a positive; 0 without one.
    vector_slopes    dF/du and dF/dh, those that F has; in place of a state's slope, which is none, the next state.
    through_z        dF/dz of the positive, over `gradient_factor`.
    scale_part, bias_part   of a query in M * dL/dscale and M * dL/dbias, besides multiples of q . dq and of the sum of
                     dL/dx over its row.
    pair_slope       h' by class, of a loss that is a sum over pairs.
    dscale_factor    dL/dscale = dscale_factor * sum_i q_i . (sum_j dL/dx_ij * dlogit_dz * k_j)
    dscale_rest      + dscale_rest * sum_ij dL/dx_ij; 0 for constants, whose sum is one.
    dbias_factor     dL/dbias = dbias_factor * sum_ij dL/dx_ij.
    dbias            the same of the whole batch where the sum is a constant; else 0.
    """

    form: Form
    slope: Expr | None
    shift: Expr | None
    dlogit_dz: Expr
    query_share: float
    key_share: float
    positive_share: float
    guide_shares: tuple[float, float]
    mean_share: float
    query_weight: Expr
    second_weight: Expr
    key_weight: Expr
    positive_slope: Expr
    through_z: Expr
    scale_part: Expr
    bias_part: Expr
    vector_slopes: tuple[Expr, ...]
    pair_slope: PairTerm | None
    gradient_factor: Expr
    dscale_factor: Expr
    dscale_rest: Expr
    dbias_factor: Expr
    dbias: Expr

    @property
    def spec(self) -> LossSpec:
        return self.form.spec

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Columns of the prefixes of the features that the loss is added up over; none where it has all at once."""
        return tuple(columns for columns, _ in self.spec.prefixes)

    @property
    def prefix_weights(self) -> tuple[float, ...]:
        return tuple(weight for _, weight in self.spec.prefixes)

    @property
    def total_weight(self) -> float:
        """Of all prefixes, each of which has the loss's terms; 1 without any."""
        return math.fsum(self.prefix_weights) or 1.0

    @property
    def logit(self) -> Expr:
        return self.form.logit

    @property
    def query_term(self) -> Expr:
        """The loss is 1/M * (sum over queries of query_term(r, p, u, h, r2, rp, cp, tq), keys of key_term(c, p, tk),
        pair terms)."""
        return self.form.query_term

    @property
    def key_term(self) -> Expr:
        """0 without a key reduction."""
        return self.form.key_term

    @property
    def terms_with_means(self) -> tuple[Expr, Expr]:
        """Both terms with the means of logits that they have: for people."""
        means = zip((self.query_term, self.key_term), self.form.of_means, (m, d), strict=True)
        of_query, of_key = (
            sympy.factor_terms(sympy.expand_mul(term) + factor * mean) if factor != 0 else term
            for term, factor, mean in means
        )
        return of_query, of_key

    @property
    def has_queries(self) -> bool:
        """Whether the loss has a log-sum-exp over keys for each query."""
        return bool(self.query_term.has(r))

    @property
    def has_keys(self) -> bool:
        """Whether the loss has a log-sum-exp over queries for each key."""
        return any(each.side == "key" for each in self.form.statistics)

    @functools.cached_property
    def by_number(self) -> dict[Symbol, Expr]:
        """How F changes with the positive's similarity, with scale and with bias, where it does."""
        slopes = {each: _slope_of_query(self.form, each) for each in (positive_z, scale, bias)}
        return {symbol: slope for symbol, slope in slopes.items() if slope != 0}

    @functools.cached_property
    def slopes_of_query(self) -> tuple[list[tuple[Symbol, Expr]], list[Expr]]:
        """For people: parts that the slopes of a query's term share, where these are long; then the slopes: a, a2 and
        ac if there are any, and b of the module docstring, and those of `by_number`."""
        further = [self.second_weight] * self.form.second + [self.key_weight] * self.form.crossed
        slopes = [self.query_weight, *further, self.positive_slope, *self.by_number.values()]
        if sum(map(sympy.count_ops, slopes)) <= LONG_SLOPES:
            return [], slopes
        shared, reduced = sympy.cse(slopes, map(temporary, itertools.count()))
        return shared, reduced

    @functools.cached_property
    def of_rows(self) -> tuple[str, ...]:
        """What functions of a query depend on besides r and p, in a fixed order."""
        slopes = (self.positive_slope, self.through_z, self.scale_part, self.bias_part, *self.vector_slopes)
        expressions = (self.query_term, *slopes, *(self.of_pooled or ()))
        found = set[Symbol]().union(*(each.free_symbols for each in expressions)) if self.form.combined else set()
        numbers = (
            positive_z,
            scale,
            bias,
            language.queries,
            language.keys,
            language.positives_of_query,
            r2,
            rp,
            cp,
            pc,
        )
        known = (*numbers, pooled, pooled_slope, *self.form.vectors.values())
        return tuple(each.name for each in known if each in found)

    @property
    def of_pooled(self) -> tuple[Expr, Expr] | None:
        """e of the module docstring, and a query's part of `pooled_slope`; None of a loss without them."""
        if self.form.pooled is None:
            return None
        slope = diff(self.query_term.xreplace(self.form.constants), pooled)
        return self.form.pooled, _by_term(slope, self.factor_of_pooled)

    @property
    def factor_of_pooled(self) -> Expr:
        """What `pooled_slope` lacks to be S of the module docstring."""
        return _factor_of_pooled(self.form)

    @property
    def _pooled(self) -> int:
        """`Traits.pooled`: z, r and p, the parts of r, queries' own numbers, and temporaries of an expression, or of
        the log-sum-exp."""
        if self.of_pooled is None:
            return 0
        names = dict.fromkeys(("r", "p", *self.of_rows), "x")
        return 6 + len(self.form.vectors) + max(3, *(temporaries(torch_code(e, names), "x") for e in self.of_pooled))

    @property
    def of_dense(self) -> tuple[str, ...]:
        """What the loss of logits depends on besides those, in a fixed order."""
        found, of_all = {z: positive_z} | {each: each for each in (scale, bias)}, self.form.pooled or Integer(0)
        read = self.form.formula.free_symbols | of_all.free_symbols
        if "above" in self.form.excluded:
            read |= {positive_z}
        return tuple(name.name for name, symbol in found.items() if symbol in read)

    @property
    def slopes_of_vectors(self) -> dict[str, Expr]:
        """`vector_slopes` by their names in generated code."""
        own = self.form.vectors.values()
        return {f"of_{symbol}": slope for symbol, slope in zip(own, self.vector_slopes, strict=True)}

    def statements_of_rows(self, printer: Printer, constant: str, names: Mapping[str, str]) -> list[str]:
        """Source text that computes, from `r`, `p` and `of_rows`, the vectors of queries: query_term, weight,
        positive_slope, through_z, scale_part, bias_part, second_weight and key_weight if there are any, and
        `slopes_of_vectors`; parts that they share once. A number is printed into `constant`."""
        results: dict[str, Expr] = {
            "query_term": self.query_term, "weight": self.query_weight, "positive_slope": self.positive_slope,
            "through_z": self.through_z, "scale_part": self.scale_part, "bias_part": self.bias_part,
            **({"second_weight": self.second_weight} if self.form.second else {}),
            **({"key_weight": self.key_weight} if self.form.crossed else {}),
            **self.slopes_of_vectors,
        }  # fmt: skip
        values = [each.xreplace(self.form.constants) for each in results.values()]
        shared, reduced = sympy.cse(values, map(temporary, itertools.count()))
        found = [f"{symbol} = {printer(value, names)}" for symbol, value in shared]
        for name, value in zip(results, reduced, strict=True):
            code = printer(value, names)
            found.append(f"{name} = {constant.format(code) if value.is_number else code}")
        return found

    @property
    def positive_rest(self) -> float:
        """The sum of the shares, 0.0 if it is only rounding.

        M dL/dx of a positive with probabilities P, C is query_share * (P - 1) + key_share * (C - 1) + positive_rest.
        Of a triangle it is query_share * (P - 1) + positive_rest, and the same for the other side.
        """
        key_share = 0.0 if self.form.domain == "triangle" else self.key_share  # there each side has its positive
        shares = (self.query_share, key_share, self.positive_share)
        total = math.fsum(shares)
        return 0.0 if abs(total) < 1e-12 * max(map(abs, shares)) else total

    @functools.cached_property
    def largest_slope(self) -> float:
        """A bound on M * |dL/dx|, or on what a triangle has for it; infinite where no bound is found."""
        sides = 2 if self.form.domain == "triangle" else 1
        if self.spec.reduction == "none":
            return math.inf
        if self.form.combined:
            of_row = self.query_weight, self.second_weight, self.key_weight, self.positive_slope, self.through_z
            return sides * math.fsum(map(_bound, of_row))
        if self.pair_slope is None:
            shares = (self.query_share, self.key_share, sides * self.positive_share, *self.guide_shares)
            largest = max(math.fsum(max(0.0, sign * share) for share in shares) for sign in (1, -1))
            return largest * self.total_weight
        slopes = self.pair_slope
        return max(map(_bound, (slopes.other, slopes.same_id, slopes.positive)))

    @property
    def softplus_sign(self) -> int:
        """1 or -1 where the terms of a tile are one multiple of softplus(x) or softplus(-x), else 0.

        The sum of such terms takes few logarithms. Pairs of one id may have the term of -x, or none.
        """
        if self.form.pair_term is None or self.same_id_logit is None:
            return 0
        _, factor = self.form.pair_term.other.as_coeff_Mul()
        return {x: 1, -x: -1}.get(factor.args[0], 0) if factor.func == language.softplus else 0

    @property
    def same_id_logit(self) -> Expr | None:
        """The logit whose term, as of another pair, is that of a pair of one id: x, -x, -oo for none; or None."""
        if self.form.pair_term is None:
            return None
        other, same = self.form.pair_term.other, self.form.pair_term.same_id
        return {other: x, other.xreplace({x: -x}): -x, Integer(0): -sympy.oo}.get(same)

    @property
    def _strips(self) -> int:
        """Temporaries of torch for a strip of pairs: of the logit, its derivative and the pairs' terms. 0 for an affine
        logit without such terms: it is computed in place."""
        mask = int(bool({"same_id", "above", "above_by_guide"} & {*self.form.classes}))  # of one byte for each pair
        if (
            self.form.several and not self.form.guided
        ):  # the shares of positives, those of the other side, and the logits they are made from
            softmax = self.form.statistics[-1].kind == "logsumexp_over_positives"
            mask += 1 + softmax + (self.slope is None)
        mask += 2 * self.form.second  # the multiple of the logits, and its shares
        if self.slope is not None and self.pair_slope is None:
            return mask
        of_logit, of_slope = (temporaries(torch_code(each), "z") for each in (self.logit, self.dlogit_dz))
        if self.form.pair_term is None or self.pair_slope is None:
            return max(2, of_logit, of_slope) + mask
        pairs = (self.form.pair_term, self.pair_slope)
        of_terms = [temporaries(torch_code(each.other), "x") for each in pairs]
        if mask:  # beside the terms of other pairs and the mask
            of_terms += [2 + max(1, temporaries(torch_code(each.same_id), "x")) for each in pairs]
        return max(
            of_logit, 1 + max(1, *of_terms), 2 + mask + of_slope
        )  # the terms beside x, dx/dz beside x and slopes

    @functools.cached_property
    def traits(self) -> Traits:
        """What the planner, kernels, the runtime and verification know of the loss."""
        by_query, by_key = (
            tuple(each.kind for each in self.form.statistics if each.side == side) for side in ("query", "key")
        )
        triangle = self.form.domain == "triangle"  # the gradient of a pair has the sums of both
        per_row = self.spec.reduction == "none"
        if per_row and self.form.pair_term is not None:
            by_query = ("sum_of_terms",)
        of_all = by_key or triangle or self.form.pooled is not None or (per_row and by_query)
        known: Known = "all" if of_all else "row" if by_query else "before"
        return Traits(
            query_statistics=by_query,
            key_statistics=by_key,
            known=known,
            positives=self.spec.positives,
            classes=self.form.classes,
            combined=self.form.combined,
            even=self.form.several
            and not (self.form.guided or self.form.crossed or per_row)
            and bool(self.query_weight.is_number),
            per_row=per_row,
            vectors=tuple(self.form.vectors),
            held=len(self.statements_of_rows(torch_code, "{}", {}))
            + 8
            + 4 * (self.form.several or self.form.second or self.form.partnered or self.form.crossed)
            if self.form.combined
            else 0,
            affine=self.slope is not None,
            softplus=self.softplus_sign != 0,
            strips=self._strips,
            domain=self.form.domain,
            means=self.mean_share != 0 and self.form.weight is None,
            weighted=self.mean_share != 0 and self.form.weight is not None,
            scaled=self.form.scaled,
            pooled=self._pooled,
            slabs=tuple(stop - start for start, stop in itertools.pairwise((0, *self.prefixes))),
            renormalised=self.spec.renormalise,
        )

    def travelling(self, dim: int, of_query: int) -> tuple[Travelling, ...]:
        """The data of each key that ranks exchange: features, its id, the statistics of its column, its gradient. Keys
        whose gradient has the mean of all queries collect the sum of these, once for each rank.

        Of a triangle rows take along their labels, or ids. In forward they collect what is noted of rows, `of_query`
        numbers, and backward reads these.
        """
        if self.traits.triangle:
            named = "key ids" if self.traits.ids else "key labels"
            return (
                Travelling("keys", dim, "features", forward="unchanged", backward="unchanged"),
                Travelling(named, 1, "int64", forward="unchanged", backward="unchanged"),
                Travelling("key sums", of_query, "statistics", forward="summed", across=True),
                Travelling("key statistics", of_query, "statistics", backward="unchanged", across=True),
                Travelling("key gradients", dim, "statistics", backward="summed"),
            )
        at_once = self.traits.at_once
        again = "absent" if at_once else "unchanged"
        keys = Travelling("keys", dim, "features", forward="unchanged", backward=again)
        ids = Travelling("key ids", 1, "int64", forward="unchanged", backward=again)
        guides = Travelling("guide keys", dim, "features", forward="unchanged", backward=again)
        read = (keys, *[ids] * self.traits.ids, *[guides] * self.traits.guide)
        if at_once:
            return (*read, Travelling("key gradients", dim, "statistics", forward="summed"))
        numbers = self.traits.key_numbers
        statistics = Travelling(
            "key statistics", numbers, "statistics", "summed", "unchanged", across=True, renewed=self.form.crossed
        )
        gradients = Travelling("key gradients", dim, "statistics", backward="summed")
        radial = Travelling("key radial sums", len(self.prefixes), "statistics", backward="summed", across=True)
        sums = (gradients, *[radial] * self.traits.renormalised)
        found = (*read, statistics, *sums) if self.has_keys else (*read, *sums)
        queries = Travelling("query sums", dim, "statistics", backward="summed", once=True)
        return (*found, queries) if self.traits.means else found


@functools.lru_cache(maxsize=64)
def derive(spec: LossSpec) -> Derivation:
    """The derivation of a loss. Raises LossError for a loss that no kernel implements, in one sentence: what has no
    kernel, and what to write instead."""
    try:
        derivation = _derived(form_of(spec))
        _check_rows(derivation)
        _check_prefixes(derivation)
        return derivation
    except LossError as refusal:
        raise type(refusal)(f"loss {spec.name}: {refusal}") from None


def _check_rows(derivation: Derivation) -> None:
    """Raises LossError for losses of single queries whose gradients are no sums of one part for each of them, times
    what backward has for it, or for which there are no kernels."""
    traits, form, word = derivation.traits, derivation.form, "reduction='none'"
    once = "write reduction='mean'"
    if not traits.per_row:
        return
    refuse(
        (traits.pooled, f"{word} has no kernel for logsumexp_over_all_positives, by which a query changes the terms of "
                        f"all others: {once}"),
        (traits.partnered, f"{word} has no kernel for of_positive of rows, whose weights have the terms of two rows in "
                           f"one: {once}"),
        (traits.crossed and traits.several, f"{word} has no kernel for columns of several positives, whose keys have "
                                            f"the terms of several queries: {once}"),
        (form.of_means[1] != 0, f"{word} has no kernel for mean_of_queries(x): write mean_of_keys(x) in "
                                "mean_over_queries, whose mean is the same"),
        (traits.weighted, f"{word} has no kernel for weights of mean_of_keys: {once}"),
    )  # fmt: skip


def _check_prefixes(derivation: Derivation) -> None:
    """Raises PrefixesApartError for prefixes of a loss whose sweeps keep one similarity of a pair, LossError for those
    of one with states."""
    traits, only = derivation.traits, "prefixes have kernels for losses of log-sum-exps and one positive"
    if not traits.slabs:
        return
    refuse(
        (traits.states, "a state is of one length of the features: add up losses of sliced features, each with states "
                        "of its own"),
    )  # fmt: skip
    instead = "write the loss without, and pass prefixes to infcl_gen.contrastive_loss, which adds up a loss of each"
    checks = (
        (traits.pairs, "not for sums over pairs"),
        (traits.triangle, "of two sides"),
        (traits.combined and not derivation.form.linear, "of which terms are constant multiples"),
        (traits.classes, "that leave no pairs out"),
        (traits.guide, "without a guide"),
        (traits.scaled, "without factors of z"),
        (traits.means or traits.weighted, "without means of logits"),
        (not traits.affine, "of an affine logit"),
    )
    for holds, which in checks:
        if holds:
            raise PrefixesApartError(f"{only}, {which}: {instead}")


def _derived(form: Form) -> Derivation:
    logit, pair_term, triangle = form.logit, form.pair_term, form.domain == "triangle"
    shares = _shares(form)
    guide_shares = diff(form.query_term, tq), diff(form.key_term, tk)
    for each in (x, *(() if pair_term is None else (pair_term.other, pair_term.same_id, pair_term.positive))):
        language.check_defined(each.xreplace({x: logit}))
    # sum_ij dL/dx_ij, the gradient by a constant that is added to the logit, where that is a constant
    mean_share = sum(form.of_means, Integer(0))
    total = None if form.combined or pair_term else sum((*shares, *guide_shares), mean_share)
    added = mean_share != 0 or form.guided_sides
    if added and total is not None and abs(total) < 1e-12 * max(map(abs, shares)):
        total = Integer(0)  # of 1, -0.9 and -0.1 a rounding is left
    dx_dz = diff(logit, z)
    if dx_dz == 0:
        raise LossError(f"the logit {display(logit)} does not depend on z: write one that does, as scale * z + bias")
    affine = not dx_dz.has(z)
    slope = dx_dz if affine else None
    shift = sympy.expand(logit - dx_dz * z) if affine else None
    gradient_factor = _gradient_factor(logit)
    dscale_rest = diff(shift, scale) if total is None and shift is not None else Integer(0)
    weight, of_p, of_z, of_scale, of_bias = (_slope_of_query(form, each) for each in (r, p, positive_z, scale, bias))
    if form.partnered:
        weight = sympy.factor_terms(weight + _slope_of_query(form, rp).xreplace({r: rp, rp: r}))
    through_z = of_z / gradient_factor if form.pooled is None else _by_term(of_z, gradient_factor)
    dscale_factor = _dscale_factor(logit, slope, shift, total)
    derivation = Derivation(
        form=form,
        slope=slope,
        shift=shift,
        dlogit_dz=dx_dz / gradient_factor,
        query_share=float(shares[0]),
        key_share=float(shares[0 if triangle or form.crossed else 1]),
        positive_share=float(shares[2]),
        guide_shares=(float(guide_shares[0]), float(guide_shares[1])) if form.guided_sides else (0.0, 0.0),
        mean_share=float(mean_share),
        query_weight=weight,
        second_weight=form.multiple * _slope_of_query(form, r2),
        key_weight=_slope_of_query(form, cp),
        positive_slope=of_p + _slope_of_query(form, pc),
        vector_slopes=tuple(
            form.following[keyword] if keyword in STATES else _slope_of_query(form, each)
            for keyword, each in form.vectors.items()
        ),
        through_z=through_z,
        # The multiple of q . dq has through_z * positive_z * dscale_factor, by which no logit changes with scale.
        scale_part=of_scale - through_z * positive_z * dscale_factor,
        bias_part=of_bias,
        pair_slope=pair_term and pair_term.slopes(),
        gradient_factor=gradient_factor,
        dscale_factor=dscale_factor / (2 if triangle else 1),
        dscale_rest=dscale_rest,
        dbias_factor=diff(logit, bias),
        dbias=_dbias(logit, total),
    )
    try:
        for expression in _printed(derivation):
            triton_code(expression)
            torch_code(expression)
    except LossError as error:
        how = "write fewer functions inside of functions"
        raise LossError(f"its derivative has what kernels cannot compute: {error}; {how}") from None
    return derivation


def _slope_of_query(form: Form, symbol: Symbol) -> Expr:
    """dF by one of its arguments, with what E changes by it; 0 where F is a sum of constant multiples."""
    if not form.combined:
        return Integer(0)
    found = diff(form.query_term, symbol)
    if form.pooled is not None:
        found += _factor_of_pooled(form) * pooled_slope * diff(sympy.exp(form.pooled - pooled), symbol)
    factored = (
        form.pooled is not None or form.crossed or form.partnered
    )  # 1 - sigmoid(u) stands in products of several terms
    return _stable(sympy.factor_terms(found) if factored else found)


def _gradient_factor(logit: Expr) -> Expr:
    """`Derivation.gradient_factor`."""
    dx_dz = diff(logit, z)
    return scale if dx_dz.has(z) and logit.has(scale) else Integer(1) if dx_dz.has(z) else dx_dz


def _factor_of_pooled(form: Form) -> Expr:
    """What `pooled_slope` lacks to be S of the module docstring."""
    by_z = form.pooled is not None and diff(form.pooled, positive_z) != 0
    return _gradient_factor(form.logit) if by_z else Integer(1)


def _by_term(whole: Expr, factor: Expr) -> Expr:
    """whole / factor, whose terms cancel one by one."""
    return sympy.Add(*(term / factor for term in sympy.Add.make_args(sympy.expand_mul(whole))))


def _printed(derivation: Derivation) -> list[Expr]:
    """What generated code contains."""
    names = (
        "logit", "dlogit_dz", "query_term", "key_term", "gradient_factor", "dscale_factor", "query_weight",
        "second_weight", "key_weight", "positive_slope", "through_z", "scale_part", "bias_part", "dscale_rest",
        "dbias_factor",
    )  # fmt: skip
    found = [*(getattr(derivation, name) for name in names), *derivation.vector_slopes, *(derivation.of_pooled or ())]
    for pair in (derivation.form.pair_term, derivation.pair_slope):
        found += [pair.other, pair.same_id, pair.positive] if pair else []
    return found


def _stable(slope: Expr) -> Expr:
    """With sigmoid(-u) for 1 - sigmoid(u), which loses its digits, also among other terms, and so for its negative."""

    def stable(total: Expr) -> Expr:
        one, rest = total.as_coeff_Add()
        terms = sympy.Add.make_args(rest) if one in (1, -1) else ()
        for falling in (term for term in terms if (-one * term).func == language.sigmoid):
            rising = one * language.sigmoid(-(-one * falling).args[0])
            return rising if len(terms) == 1 else sympy.factor_terms(rising + rest - falling)
        return total

    return slope.replace(lambda each: each.is_Add, stable)


def _bound(expression: Expr) -> float:
    """A bound on |expression| for any x."""
    if expression.is_number:
        return abs(float(expression))
    bounds = [_bound(part) for part in expression.args]
    if expression.is_Add:
        return math.fsum(bounds)
    if expression.is_Mul:
        return math.prod(bounds)
    if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
        return bounds[0] ** int(expression.exp)
    return 1.0 if expression.func in (language.sigmoid, language.step, sympy.tanh) else math.inf


def _shares(form: Form) -> tuple[Expr, Expr, Expr]:
    """The constants of dL/dx_ij: how F and G change with their statistics and with the positive."""
    if form.combined:
        return Integer(1), Integer(0), Integer(0)
    shares = diff(form.query_term, r), diff(form.key_term, c), diff(form.query_term + form.key_term, p)
    every = *shares, diff(form.query_term, tq), diff(form.key_term, tk)
    refuse(
        (
            not all(share.is_finite and share.is_real for share in every),
            "a weight of a mean is no finite number: write one",
        )
    )
    least, most = language.SMALLEST_NUMBER, language.LARGEST_NUMBER
    if any(share != 0 and not least <= abs(share) <= most for share in every):
        raise LossError(f"a weight below {least:g} or above {most:g} leaves the range of fp32: multiply the loss later")
    return shares


def _dscale_factor(logit: Expr, slope: Expr | None, shift: Expr | None, total: Expr | None) -> Expr:
    """`total`: the sum of dL/dx over all pairs where it is a constant."""
    if not logit.has(scale):
        return Integer(0)
    if slope is not None and shift is not None:
        # dx/dscale = slope' z + shift'; the sum over pairs multiplies shift' by `total`, 0 for a proper loss.
        if shift.has(scale) and total is not None and total != 0:
            part = f"{display(shift)}, the logit's part without z,"
            raise LossError(f"{part} depends on scale, and shares do not cancel: write a logit without it")
        return diff(slope, scale)
    # f(scale * z): dx/dscale = z * dx/dz / scale
    u = Symbol("u", real=True)
    if sympy.expand(logit.subs(z, u / scale)).has(scale):
        raise LossError(f"scale occurs in {display(logit)} other than as scale * z: write it as a function of that")
    return Integer(1)


def _dbias(logit: Expr, total: Expr | None) -> Expr:
    """sum_ij dL/dx_ij dx/dbias over the whole batch, where `total` = sum_ij dL/dx_ij is a constant; else 0."""
    slope = diff(logit, bias)
    if slope == 0 or (total == 0 and not slope.has(z)):
        return Integer(0)
    if total is None and not slope.has(z):
        return Integer(0)
    if total is not None and slope.is_number:
        return total * slope
    raise LossError(f"bias is not just added in the logit {display(logit)}: write it as a last term of the logit")
