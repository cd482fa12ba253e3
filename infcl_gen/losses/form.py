"""The general form of a loss: what its formula says, sorted by when a sweep over the pairs can know it.

With z_ij = q_i . k_j, one logit x_ij = f(z_ij, scale, bias), and M queries,

    s_i = reduce_j x_ij     statistics of queries        t_j = reduce_i x_ij     statistics of keys
    L = 1/M * (sum_i F(s_i, p_i, v_i) + sum_j G(t_j, p_j) + sum_ij h(x_ij, class of the pair))

Of CLIP x = scale z + bias, s is r_i and t is c_j, log-sum-exps over keys and queries, F = (r - p) / 2, G = (c - p) / 2
and there is no h; of SigLIP h alone. `printers` has all letters.

p is the logit of the positive, and v are a query's own numbers, which a call gives. One of them may be a state: F then
has a constant in it, the next state, which is a function of the same arguments. So may G, of a key. Of positives="id" p
is a statistic, too, of any number n of positives: the mean of their logits, or the log-sum-exp; F may depend on n, and
a query without positives adds nothing. Of positives="none" p is the mean of a query's logits by the softmax of a guide.
F may also depend on the positive's similarity, scale, bias, and the numbers of queries and keys, and on a second
log-sum-exp, that of a constant multiple of the logits; and on one number of the whole batch, the log-sum-exp over the
positives of all queries of a function of their logits and similarities. Log-sum-exps of logits may leave pairs out:
positives, those of one id, and those whose similarity, or a guide's, exceeds their query's threshold, which is affine
in that of its positive. F may also depend on t of the key that is the positive. G that is more than constant multiples
is such a part of F. Of similarity("query", "query") z_ij = q_i . q_j, and a row is no key of its own: the form is that
of i != j over z, and its domain a triangle. There F may also depend on s of the row that is the positive: rows are then
pairs, each the positive of the other. So they are beside thresholds, and where a sum leaves out pairs by which row of
its pair each of the two is. To F and G may be added constants times the mean of a query's logits, m_i, and of a key's,
d_j. Of sides with a guide each, F has as such a statistic the mean of a query's logits by the softmax over keys, and G
that of a key's by the softmax over queries, times constants. `form_of` reads formulas, and nothing else does.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
from sympy import Dummy, Expr, Integer, Symbol, diff

from infcl_gen.losses import language
from infcl_gen.losses.language import (
    LossError,
    LossSpec,
    bias,
    is_first,
    is_positive,
    is_self,
    keys,
    queries,
    same_id,
    same_side,
    scale,
    z,
)
from infcl_gen.losses.printers import (
    c,
    cp,
    d,
    display,
    h,
    m,
    next_state,
    next_statek,
    p,
    pc,
    pooled,
    positive_z,
    r,
    r2,
    rp,
    state,
    statek,
    tk,
    tq,
    u,
    uk,
    x,
)  # fmt: skip
from infcl_gen.runtime.traits import SIDES, Domain

ONE = Integer(1)


@dataclass(frozen=True)
class Statistic:
    """One number of each query, or of each key, reduced over the pairs of its row or column."""

    side: str  # "query" or "key"
    kind: str  # as in `Traits`
    symbol: Symbol  # in F or G


@dataclass(frozen=True)
class PairTerm:
    """h(x) by the class of the pair: of a query and its positive, of one id but no positive, and of all `other` pairs.

    A class that the loss does not tell apart has the term of the class that it belongs to.
    """

    other: Expr
    same_id: Expr
    positive: Expr

    def slopes(self) -> "PairTerm":
        """h'(x)."""
        return PairTerm(*(diff(each, x) for each in (self.other, self.same_id, self.positive)))


@dataclass(frozen=True)
class Form:
    """A loss in the general form; expressions over z, scale, bias, x and the letters of `printers`.

    formula     the loss over x, as it was written: its reductions are those of the language
    query_term  F, and `key_term` G, times M and with the weights of their means; 0 without such a mean
    of_means    what multiplies m_i in M * L beside F, and d_j beside G: constants
    pair_term   h, times M; None without one
    excluded    the classes of pairs that are left out of the log-sum-exps: "positive", "same_id", pairs of one id but
                no positive, and "above" or "above_by_guide", pairs above their query's threshold, but no positive; and
                those of `SIDES`, by which row of its pair each of the two is, but no positive
    threshold   of a query: threshold[0] * y + threshold[1], y the similarity of its positive, or a guide's; None
                without one
    domain      of the pairs (i, j): as in `Traits`
    scaled      as in `Traits`: z is the product of features times these, in all expressions
    multiple    what multiplies the logits in the second log-sum-exp; 1 without one
    next_states  what becomes the state of a query, and of its key, and stands in F as a symbol of `STATES`; None for
                no state
    weight      of keys in m_i: weight[0] + weight[1] * u_i . v_j, of a guide; None where all are alike
    pooled      of the log-sum-exp over the positives of all queries, which stands in F as the symbol of this name, what
                it is of: a function of p, positive_z, scale and bias; None without one
    """

    spec: LossSpec
    logit: Expr
    formula: Expr
    statistics: tuple[Statistic, ...]
    query_term: Expr
    key_term: Expr
    pair_term: PairTerm | None
    excluded: tuple[str, ...] = ()
    domain: Domain = "rectangle"
    of_means: tuple[Expr, Expr] = (Integer(0), Integer(0))
    scaled: tuple[str, ...] = ()
    multiple: Expr = ONE
    next_states: tuple[Expr | None, Expr | None] = (None, None)
    weight: tuple[Expr, Expr] | None = None
    pooled: Expr | None = None
    threshold: tuple[Expr, Expr] | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of pairs that a sweep tells apart in its tiles. A positive that is one key of each query, and is
        not left out, is none of them: it is found by its place."""
        if self.guided:
            return ()
        told_apart = self.pair_term is not None and self.pair_term.other != self.pair_term.same_id
        return ("same_id",) if told_apart or self.several else self.excluded

    @property
    def several(self) -> bool:
        """Whether p is a statistic: of any number of positives, or by a guide."""
        return any(each.symbol == p for each in self.statistics)

    @property
    def second(self) -> bool:
        """Whether F has a second log-sum-exp, that of a multiple of the logits."""
        return any(each.symbol == r2 for each in self.statistics)

    @property
    def partnered(self) -> bool:
        """Whether F has the log-sum-exp of the row that is the positive."""
        return any(each.symbol == rp for each in self.statistics)

    @property
    def crossed(self) -> bool:
        """Whether F has the log-sum-exp over queries of the key that is the positive."""
        return any(each.symbol == cp for each in self.statistics)

    @property
    def guided(self) -> bool:
        """Whether p is the mean of a query's logits by the softmax of its guide."""
        return self.several and self.statistics[-1].kind == BY_GUIDE

    @property
    def guided_sides(self) -> bool:
        """Whether F and G have means by the softmaxes of a guide beside p."""
        return any(each.symbol == tq for each in self.statistics)

    @functools.cached_property
    def combined(self) -> bool:
        """Whether F is not a sum of constant multiples of its statistic and the positive, or its statistic may be a sum
        of nothing, or there are any number of positives."""
        if self.pair_term is not None:
            return False
        of_row = "positive" in self.excluded or bool(self.vectors) or self.several or self.spec.reduction == "none"
        return of_row or not _is_linear(self.query_term, r, tq)

    @property
    def linear(self) -> bool:
        """Whether F is a sum of constant multiples of log-sum-exps of its row and its column, and of one positive."""
        return not self.several and _is_linear(self.query_term, r, cp, pc)

    @property
    def vectors(self) -> dict[str, Symbol]:
        """The symbols of queries' own numbers in F, by the keyword of a call that they follow from."""
        read = [self.query_term, *self.following.values(), *(STATES[keyword][0] for keyword in self.following)]
        return {keyword: symbol for keyword, symbol in OWN.items() if any(each.has(symbol) for each in read)}

    @property
    def following(self) -> dict[str, Expr]:
        """`next_states` that there are, by the keyword of a call that each takes the place of."""
        return {keyword: each for keyword, each in zip(STATES, self.next_states, strict=True) if each is not None}

    @property
    def constants(self) -> dict[Expr, Expr]:
        """What stands for the symbols of next states where their expressions are written out."""
        return {STATES[keyword][1]: language.detach(each) for keyword, each in self.following.items()}


BY_GUIDE = "mean_by_guide"
_OF_QUERIES = language.similarity("query", "query")
_CLASSES = {is_positive, same_id}
# Which pairs are above their query's threshold, in masks; and the class of pairs by what is compared with it.
_IS_ABOVE = Symbol("is_above", real=True)
_ABOVE = {z: "above", language.guide: "above_by_guide"}
# By keyword the symbols of a state and of the next one.
STATES = {"query_state": (state, next_state), "key_state": (statek, next_statek)}
OWN = {"query_weight": u, "key_weight": uk, "negatives": h, "query_state": state, "key_state": statek}
SCALES = (language.query_scale, language.key_scale)
_SUMS = (language.logsumexp_over_keys, language.logsumexp_over_queries)
_CONSTANTS = (language.detach, language.next_state)
_OF_LOGITS = (*_SUMS, language.logsumexp_over_negatives)
_OF_ALL = (language.mean_of_keys, language.mean_of_queries)
_POOLED = language.logsumexp_over_all_positives
_BY_SOFTMAX = (language.mean_by_softmax, language.mean_by_softmax_over_queries)
_STATISTICS = (*_OF_LOGITS, language.positive, *_OF_ALL, *_BY_SOFTMAX)
_MEANS = (language.mean_over_queries, language.mean_over_keys)
_REDUCTIONS = (*language.ROW_FUNCTIONS, *language.LOSS_FUNCTIONS)
_REDUCED = {
    language.logsumexp_over_keys(x): r, language.logsumexp_over_queries(x): c, language.positive(x): p,
    language.logsumexp_over_negatives(x): h, language.query_weight: u, language.mean_of_keys(x): m,
    language.mean_of_queries(x): d, language.query_state: state, language.key_state: statek,
    language.of_positive(language.logsumexp_over_keys(x)): rp,
    language.of_positive(language.logsumexp_over_queries(x)): cp,
    language.key_weight: uk, language.mean_by_softmax(x, language.guide): tq,
    language.mean_by_softmax_over_queries(x, language.guide): tk,
}  # fmt: skip
# Where what stands outside of log-sum-exps and positives belongs.
_OUTSIDE = {
    "z": "z stands outside of log-sum-exps and positive: write positive(z), or mean_of_keys(x) of the logit x",
    "is_positive": "is_positive stands outside of log-sum-exps: write it in their logit or where=, or write positive",
    "same_id": "same_id stands outside of log-sum-exps: write it in their where=",
    "is_self": "is_self stands outside of log-sum-exps: write it in their where=, of similarity('query', 'query')",
    "is_first": "is_first stands outside of log-sum-exps: write it in their where=, of similarity('query', 'query')",
    "same_side": "same_side stands outside of log-sum-exps: write it in their where=, of similarity('query', 'query')",
    language.guide.name: "guide stands outside of means by it: write mean_by_softmax(x, guide), or it in a weight= "
    "or a where=",
    "positives_of_query": "positives_of_query is of many positives: write positives='id' and a statistic of these",
}
_WORD_OF = {symbol: word for word, symbol in _REDUCED.items()} | {positive_z: language.positive(z)}
_KNOWN = {
    r: Statistic("query", "logsumexp", r), c: Statistic("key", "logsumexp", c),
    r2: Statistic("query", "logsumexp_of_multiple", r2), rp: Statistic("query", "logsumexp_of_positive", rp),
    cp: Statistic("query", "logsumexp_of_column", cp), tq: Statistic("query", BY_GUIDE, tq),
    tk: Statistic("key", BY_GUIDE, tk),
}  # fmt: skip


def form_of(spec: LossSpec) -> Form:
    """The general form of a loss. Raises LossError for a formula that has none, or whose parts no kernel computes."""
    written = spec.formula
    domain: Domain = "triangle" if written.has(_OF_QUERIES) else "rectangle"
    _check_constants(written)
    if domain == "triangle":
        _check_triangle(spec)
        written = written.xreplace({_OF_QUERIES: z})
    written, scaled = _of_scaled_features(written)
    beside = f"has no kernel yet beside positives={spec.positives!r}"
    by_id = f"mean_of_keys(x) {beside}: leave it out, or write positives='label'"
    refuse((spec.positives in ("id", "none") and any(map(written.has, _OF_ALL)), by_id))
    reductions = written.atoms(*_REDUCTIONS)
    further = (language.mean_over_positives, language.sum_over_pairs, language.of_positive, _POOLED)
    known = (*_STATISTICS, *_MEANS, *further)
    foreign = sorted({each.func.__name__ for each in reductions if not isinstance(each, known)})
    refuse((foreign, f"{', '.join(foreign)} has no kernel yet: write positive(x), or sum_over_pairs by positives='id'"))
    of_pairs = written.atoms(language.sum_over_pairs)
    refuse((of_pairs and spec.positives == "none",
            "sum_over_pairs has no kernel yet beside positives='none': write positives='diagonal'"))  # fmt: skip
    if of_pairs:
        return _pointwise(spec, written, sorted(of_pairs, key=sympy.default_sort_key), scaled)
    _check_partners(spec, written, domain)
    written, compared = _without_thresholds(spec, written, domain)
    written, of_positives = _with_statistic_of_positives(spec, written, domain)
    whole = _without_classes_in_logits(written, 1 - is_self if domain == "triangle" else Integer(1))
    statistics = [each for each in whole.atoms(*_STATISTICS)]
    excluded, (logit, multiple) = _excluded(statistics, domain, compared), _logits(statistics)
    by_side = bool({*SIDES} & {*excluded})
    refuse(
        (by_side and compared is None and not written.has(language.of_positive),
         "is_first and same_side have kernels for rows in pairs, beside of_positive or a threshold: write where=1 - "
         "is_self without them"),
        (domain == "triangle" and (by_side or compared) and multiple != 1,
         "two log-sum-exps have no kernel yet beside a threshold or is_first in a loss of one side: write one"),
    )  # fmt: skip
    weight = _weight(statistics)
    means = sorted(each.func.__name__ for each in statistics if isinstance(each, _OF_ALL))
    refuse((means and diff(logit, z).has(z), f"{''.join(means[:1])} has kernels for logits affine in z, not for "
            f"{display(logit)}: leave it out, or write a logit such as scale * z + bias"))  # fmt: skip
    formula = whole.replace(lambda e: isinstance(e, _STATISTICS), lambda e: _over_logit(e, logit))
    formula = formula.replace(language.mean_of_keys, lambda over, *_: language.mean_of_keys(over))
    own_numbers = {language.query_weight, language.key_weight, language.query_state, language.key_state}
    known_outside = {x, positive_z, scale, bias, queries, keys, *own_numbers}
    if of_positives and of_positives != BY_GUIDE:
        known_outside.add(language.positives_of_query)
    apart = formula.xreplace({each: ONE for each in formula.atoms(*_BY_SOFTMAX)})
    outside = sorted(map(str, apart.free_symbols - known_outside))
    if outside:
        raise LossError(_OUTSIDE.get(outside[0], f"{', '.join(outside)} has no kernel yet in means: leave it out"))
    refuse(
        (formula.has(language.logsumexp_over_negatives) and formula.has(language.mean_over_keys),
         f"{display(language.logsumexp_over_negatives(x))} has no kernel yet beside mean_over_keys: write "
         "mean_over_queries alone, and call it once for each direction"),
        (formula.has(language.of_positive) and multiple != 1, "of_positive has no kernel yet beside two log-sum-exps: "
         "write one logit in all of them"),
    )  # fmt: skip
    second = {language.logsumexp_over_keys(multiple * x): r2} if multiple != 1 else {}
    query_term, key_term, of_means = _terms(formula, second)
    query_term, of_all = _with_pooled(spec, query_term, key_term)
    (query_term, following), (key_term, of_key) = (
        _with_next_state(*each) for each in zip((query_term, key_term), STATES, strict=True)
    )
    query_term, key_term, column = _crossed(spec, query_term, key_term, excluded)
    of_key = None if of_key is None else of_key.xreplace(column)
    by_guide = [query_term.has(tq), key_term.has(tk)]
    refuse((any(by_guide) and not all((*by_guide, query_term.has(r), key_term.has(c))),
            "a mean by a guide of both sides has kernels beside log-sum-exps of both: write logsumexp_over_keys(x) and "
            "logsumexp_over_queries(x), too"))  # fmt: skip
    found = tuple(each for symbol, each in _KNOWN.items() if query_term.has(symbol) or key_term.has(symbol))
    found += (_KNOWN[c],) * query_term.has(cp)
    alone = [symbol for symbol in (r, r2) if following is not None and following.has(symbol)]
    refuse(([each for each in alone if not query_term.has(each)], "a log-sum-exp stands in next_state alone, "
            "where it has no kernel: write it in the term, too"))  # fmt: skip
    refuse(
        (query_term.has(rp) and not query_term.has(r), "of_positive has no kernel where the row's own log-sum-exp is "
         "not: write that one, whose mean is the same"),
        (query_term.has(cp) and not query_term.has(r),
         "of_positive(logsumexp_over_queries(x)) has no kernel without a log-sum-exp over keys: exchange queries and "
         "keys, and write logsumexp_over_keys"),
        (formula.has(language.of_positive) and query_term.has(cp) and not of_positives
         and excluded[:1] != ("positive",),
         "of_positive(logsumexp_over_queries(x)) has kernels where sums leave positives out: write where=1 - "
         "is_positive in both log-sum-exps, and positive(x) beside them"),
    )  # fmt: skip
    if of_positives:
        refuse((key_term != 0, f"positives={spec.positives!r} has no kernel yet beside mean_over_keys: write "
                               "mean_over_queries alone, and call it once for each direction"),
               (not query_term.has(r), "a statistic of positives has no kernel alone: add logsumexp_over_keys(x)"),
               (not query_term.has(p), f"positives={spec.positives!r} has no kernel without a statistic of them: add "
                                        f"{_SEVERAL}"))  # fmt: skip
        refuse((following is not None, f"next_state has no kernel yet beside positives={spec.positives!r}: write "
                                       "positives='label'"))  # fmt: skip
        found += (Statistic("query", of_positives, p),)
    refuse(
        (key_term.has(c) and spec.positives != "diagonal",
         "logsumexp_over_queries needs positives='diagonal': write that, or mean_over_queries without mean_over_keys"),
        (key_term != 0 and not key_term.has(c),
         "mean_over_keys without logsumexp_over_queries: use mean_over_queries"),
        (of_means[1] != 0 and spec.positives != "diagonal",
         "mean_of_queries(x) needs positives='diagonal': write mean_of_keys(x) in mean_over_queries, the same number"),
        (not found, "a mean without log-sum-exps has no kernel: write sum_over_pairs(is_positive * x) / queries"),
    )  # fmt: skip
    over_symbols = formula.xreplace(_REDUCED | second).replace(language.next_state, language.detach)
    over_symbols = over_symbols.replace(_POOLED, lambda _: pooled)
    return Form(
        spec, logit, over_symbols, found, query_term, key_term, pair_term=None, excluded=excluded, domain=domain,
        of_means=of_means, scaled=scaled, multiple=multiple, next_states=(following, of_key), weight=weight,
        pooled=of_all, threshold=None if compared is None else compared.threshold,
    )  # fmt: skip


def _in_words(expression: Expr, second: dict[Expr, Symbol] | None = None) -> str:
    """A part of a reduced formula in the words of the language, for refusals; `second` as in `_terms`."""
    return display(expression.xreplace(_WORD_OF | {symbol: word for word, symbol in (second or {}).items()}))


def _of_scaled_features(formula: Expr) -> tuple[Expr, tuple[str, ...]]:
    """The formula over products of features that are multiplied by numbers of their rows, and what these are."""
    scaled = tuple(each.name for each in SCALES if formula.has(each))
    if not scaled:
        return formula, ()
    factor = math.prod((language.SYMBOLS[name] for name in scaled), start=Integer(1))
    found = formula.xreplace({z: z / factor})
    alone = f"{scaled[0]}, a sample's 1 / temperature, is a factor of similarities alone"
    how = f"write {display(factor * z)} wherever z stands; query_weight multiplies terms"
    refuse((any(map(found.has, SCALES)), f"{alone}: {how}"))
    own = "key_scale has no value in logsumexp_over_negatives: multiply the features of keys and negatives"
    refuse((factor.has(language.key_scale) and found.has(language.logsumexp_over_negatives), own))
    return found, scaled


def _check_constants(formula: Expr) -> None:
    """Raises LossError for a state, or a value without its derivative, where there are no kernels for it."""
    inside = {each for sums in formula.atoms(language.sum_over_pairs, *_STATISTICS) for each in sums.atoms(*_CONSTANTS)}
    names = sorted({each.func.__name__ for each in inside})
    refuse(
        (names, f"{' and '.join(names)} in a logit or in sum_over_pairs has no kernel yet: write it outside of "
                "reductions, in mean_over_queries"),
    )  # fmt: skip


def _with_next_state(term: Expr, keyword: str) -> tuple[Expr, Expr | None]:
    """F or G with a symbol for the next state of a query or a key, and that, if there is one."""
    (before, following), side = STATES[keyword], keyword.removesuffix("_state")
    found = sorted(term.atoms(language.next_state), key=sympy.default_sort_key)
    refuse(
        (term.has(before) and not found,
         f"{keyword} is kept by nothing: write next_state(e) of what becomes the state, or {side}_weight"),
        (len(found) > 1, f"a {side} has one state, and {' and '.join(map(_in_words, found))} are two: write one of "
                         "them, and detach the other"),
    )  # fmt: skip
    if not found:
        return term, None
    return sympy.factor_terms(term.xreplace({found[0]: following})), found[0].args[0]


def _with_pooled(spec: LossSpec, term: Expr, key_term: Expr) -> tuple[Expr, Expr | None]:
    """F with a symbol for the log-sum-exp over the positives of all queries, and what that is of, if there is one."""
    found = sorted(term.atoms(_POOLED), key=sympy.default_sort_key)
    if not found:
        return term, None
    word, inside = found[0].func.__name__, found[0].args[0]
    foreign = inside.free_symbols - {p, positive_z, scale, bias} or inside.has(language.next_state)
    refuse(
        (len(found) > 1, f"two of {word} have no kernel yet: write one, of one expression"),
        (spec.positives not in ("diagonal", "label"),
         f"{word} has kernels where each query has one positive: write positives='diagonal' or 'label'"),
        (key_term != 0, f"{word} has no kernel yet beside mean_over_keys: write mean_over_queries alone, and call it "
                        "once for each direction"),
        (term.has(rp, cp), f"{word} has no kernel yet beside of_positive: write one of the two"),
        (foreign or not inside.has(p, positive_z),
         f"{word}({_in_words(inside)}) is of positives: write an expression of positive(z)"),
    )  # fmt: skip
    return term.xreplace({found[0]: pooled}), inside


def _check_triangle(spec: LossSpec) -> None:
    """Raises LossError for what a loss of one side cannot have."""
    has, one = spec.formula.has, "a loss over similarity('query', 'query')"
    refuse(
        (has(z), f"{one} has no keys beside it: write that in place of z, too"),
        (has(language.sum_over_pairs), f"sum_over_pairs in {one} has no kernel yet: write mean_over_queries"),
        (has(language.logsumexp_over_queries) or has(language.mean_over_keys),
         f"{one} is symmetric: write logsumexp_over_keys and mean_over_queries"),
        (has(language.guide), f"guide in {one} has no kernel yet: give both sides, and write z"),
        (spec.positives in ("diagonal", "none"),
         f"{one} needs positives='label' or 'id': a row is not its own positive"),
        (any(map(has, _OF_ALL)), f"mean_of_keys(x) in {one} has no kernel yet: give both sides, and write z"),
        (any(map(has, SCALES)), f"a factor of similarities in {one} has no kernel yet: give both sides, and write z"),
    )  # fmt: skip


def _check_partners(spec: LossSpec, formula: Expr, domain: Domain) -> None:
    """Raises LossError for the log-sum-exp of a positive where there are no kernels for it."""
    found = sorted(formula.atoms(language.of_positive), key=sympy.default_sort_key)
    if not found:
        return
    inside = [each.args[0] for each in found]
    other = [display(each) for each in inside if not isinstance(each, _SUMS)]
    own = [language.query_weight, language.next_state, *[language.logsumexp_over_negatives] * (domain == "rectangle")]
    beside = [display(each) if isinstance(each, Expr) else each.__name__ for each in own if formula.has(each)]
    of_rows = any(isinstance(each, language.logsumexp_over_keys) for each in inside)
    refuse(
        (other, f"of_positive is of a log-sum-exp alone, not of {''.join(other[:1])}: write it around that"),
        (of_rows and domain != "triangle",
         "of_positive(logsumexp_over_keys(x)) has kernels for rows in pairs: write similarity('query', 'query') of "
         "both sides in one tensor, or logsumexp_over_queries(x) of the positive's column"),
        (any(each.args[0].has(is_positive) for each in inside),
         "a logit with is_positive has no kernel yet in of_positive: write where=(1 - is_self) * (1 - is_positive)"
         if of_rows else "a logit with is_positive has no kernel in of_positive: write where=1 - is_positive"),
        (of_rows and spec.positives != "label",
         "of_positive needs positives='label': a row of several positives has no partner"),
        (not of_rows and spec.positives not in ("diagonal", "id"),
         "of_positive(logsumexp_over_queries(x)) has kernels where no other query has a query's key: write "
         "positives='diagonal', or positives='id'"),
        (not of_rows and formula.has(language.mean_over_keys),
         "of_positive has no kernel yet beside mean_over_keys: write mean_over_queries alone, and call it once for "
         "each direction"),
        (beside, f"{''.join(beside[:1])} has no kernel yet beside of_positive: leave it out"),
    )  # fmt: skip


_SEVERAL = "mean_over_positives(x) or logsumexp_over_keys(x, where=is_positive)"


def _with_statistic_of_positives(spec: LossSpec, formula: Expr, domain: Domain) -> tuple[Expr, str]:
    """The formula with `positive` for the statistic of any number of positives, and its kind; "" of one positive."""
    if spec.positives == "none":
        return _with_mean_by_guide(formula), BY_GUIDE
    _check_guided_sides(spec, formula)
    of_mean = formula.atoms(language.mean_over_positives)
    if spec.positives != "id":
        refuse((of_mean, "mean_over_positives is of any number of positives: write positives='id', or positive(x)"))
        return formula, ""
    formula = formula.xreplace({same_id: is_positive})  # the two are one class
    mask = (1 - is_self) * is_positive if domain == "triangle" else is_positive
    of_sum = {each for each in formula.atoms(language.logsumexp_over_keys)
              if each.args[1:] and sympy.expand(each.args[1] - mask) == 0}  # fmt: skip
    left = formula.xreplace({each: language.positive(each.args[0]) for each in of_sum})
    of_left = left.atoms(*_SUMS, language.positive, language.mean_over_positives, language.logsumexp_over_negatives)
    refuse(
        (formula.has(language.positive), f"positive(x) of positives='id', of which a query has any number: write "
                                         f"{_SEVERAL}"),
        (not of_mean and not of_sum, "positives='id' has no kernel without a statistic of positives: add "
                                     f"mean_over_positives(x) or logsumexp_over_keys(x, where={display(mask)})"
                                     + ", or write sum_over_pairs" * (domain == "rectangle")),
        (of_mean and of_sum, f"two statistics of positives have no kernel yet beside each other: write {_SEVERAL}"),
        (any(each.args[0].has(is_positive) for each in of_left),
         "a logit with is_positive has no kernel yet beside positives='id': write positives='label'"),
        (len({each.args[0] for each in of_left}) > 1,
         "positives='id' has kernels for one logit: write the same in all statistics"),
        (any(each.args[1:] and each.args[1].has(is_positive) for each in left.atoms(*_SUMS)),
         "where= with is_positive has no kernel yet beside positives='id': leave it out of that log-sum-exp"),
    )  # fmt: skip
    left = left.xreplace({each: language.positive(each.args[0]) for each in of_mean})
    return left, "mean_over_positives" if of_mean else "logsumexp_over_positives"


def _check_guided_sides(spec: LossSpec, formula: Expr) -> None:
    """Raises LossError for means by the softmaxes of a guide beside positives, where there are no kernels for them."""
    means = formula.atoms(*_BY_SOFTMAX)
    if not means:
        return
    both = "mean_by_softmax(x, guide) in mean_over_queries and mean_by_softmax_over_queries(x, guide) in mean_over_keys"
    of = "a mean by a guide has kernels of queries alone by positives='none', or of both sides by positives='diagonal'"
    refuse(
        (spec.positives != "diagonal" or {each.func for each in means} != {*_BY_SOFTMAX},
         f"{of}: write one of these, for both sides {both}"),
        (any(map(formula.has, _OF_ALL)),
         "mean_of_keys(x) and mean_of_queries(x) have no kernel yet beside a mean by a guide: leave them out"),
    )  # fmt: skip
    _check_means_by_guide(formula, means)


def _check_means_by_guide(formula: Expr, means: set[Expr]) -> None:
    """Raises LossError for means by the softmax of a guide beside statistics that no kernel has there."""
    sums = formula.atoms(*_SUMS, language.logsumexp_over_negatives)
    others = formula.atoms(language.positive)
    refuse(
        (any(each.args[1] != language.guide for each in means),
         "the second argument of mean_by_softmax has a kernel where it is `guide`: scale the guide's features instead"),
        (any(each.args[1:] for each in sums), "where= has no kernel yet beside mean_by_softmax: leave it out"),
        (len({each.args[0] for each in (*means, *sums, *others)}) > 1,
         "mean_by_softmax has kernels for one logit: write the same in all statistics"),
    )  # fmt: skip


def _with_mean_by_guide(formula: Expr) -> Expr:
    """The formula with `positive` for the mean by the softmax of the guide."""
    means = formula.atoms(language.mean_by_softmax)
    of_positives = (language.positive, language.mean_over_positives, is_positive, language.positives_of_query)
    refuse(
        (formula.has(language.mean_over_keys) or formula.has(language.mean_by_softmax_over_queries),
         "positives='none' has kernels for queries alone: for both sides write positives='diagonal', and "
         "mean_by_softmax_over_queries(x, guide) in mean_over_keys"),
        (any(map(formula.has, of_positives)), "positives='none' says that no key is a positive: write positives="
                                              "'diagonal', or leave positives out"),
        (not means, "positives='none' has no kernel without a mean by a guide: add mean_by_softmax(x, guide)"),
    )  # fmt: skip
    _check_means_by_guide(formula, means)
    return formula.xreplace({each: language.positive(each.args[0]) for each in means})


def refuse(*checks: tuple[object, str]) -> None:
    """Raises LossError for the first (condition, reason) whose condition holds."""
    for holds, why in checks:
        if holds:
            raise LossError(why)


def _without_classes_in_logits(formula: Expr, mask: Expr) -> Expr:
    """The formula without is_positive in its logits: a log-sum-exp over such a logit is that of the negatives and the
    positive, log(e^a + e^b) = b + softplus(a - b), which loses no digits where b is subtracted. `mask`: of the pairs
    that the domain has."""

    def apart(sums: Expr) -> Expr:
        logit = sums.args[0]
        if not logit.has(is_positive):
            return sums
        refuse(
            (formula.has(language.mean_over_keys),
             "a logit that depends on is_positive has no kernel yet beside mean_over_keys: write mean_over_queries "
             "alone, and call it once for each direction"),
            (sympy.expand(math.prod(sums.args[1:], start=Integer(1)) - mask) != 0
             or isinstance(sums, language.logsumexp_over_queries),
             "a logit that depends on is_positive has a kernel in logsumexp_over_keys "
             + ("without where= alone" if mask == 1 else f"where={display(mask)} alone")
             + ": write positive(a) + softplus(logsumexp_over_keys(b, where=...) - positive(a))"),
        )  # fmt: skip
        own = language.positive(logit.xreplace({is_positive: Integer(1)}))
        others = mask * (1 - is_positive)
        negatives = language.logsumexp_over_keys(logit.xreplace({is_positive: Integer(0)}), where=others)
        return own + language.softplus(negatives - own)

    for mean in sorted(formula.atoms(*_OF_ALL), key=sympy.default_sort_key):
        name, inside = mean.func.__name__, mean.args[0]
        rest = sympy.expand(inside.xreplace({is_positive: Integer(0)}))
        remedy = f"{name}({display(rest)})" if rest.has(z) else "positive"
        refuse((inside.has(is_positive), f"{name} of a logit that depends on is_positive: write {remedy}"))
    found = formula.replace(lambda e: isinstance(e, _SUMS), apart)
    of_positives = lambda e: e.xreplace({is_positive: Integer(1)})  # noqa: E731
    return found.replace(lambda e: isinstance(e, language.positive), of_positives)


def _weight(statistics: list[Expr]) -> tuple[Expr, Expr] | None:
    """`Form.weight` of the means of all keys. Raises LossError for weights that are not affine in `guide`."""
    weights = {each.args[1:] for each in statistics if isinstance(each, language.mean_of_keys)}
    refuse((len(weights) > 1, "the means of all keys differ in their weights: give all of them one weight="))
    weight = next(iter(weights), ())
    if not weight:
        return None
    slope = diff(weight[0], language.guide)
    constant = sympy.expand(weight[0] - slope * language.guide)
    shown = display(weight[0], {language.guide.name: "guide"})
    refuse((not slope.is_number or not constant.is_number or slope == 0, "mean_of_keys has kernels for weights that "
            f"are affine in guide, not for {shown}: write one such as (1 + guide) / 2"))  # fmt: skip
    return constant, slope


def _over_logit(statistic: Expr, logit: Expr) -> Expr:
    """A statistic over x instead of the logit. The positive of another expression becomes that of the two that it
    depends on, the positive's logit and similarity; a mean of one may differ from the logit by what pairs share."""
    inside = statistic.args[0]
    if inside != logit and isinstance(statistic, (language.positive, *_SUMS)) and (times := _ratio(inside, logit)):
        return times * statistic.func(x) if isinstance(statistic, language.positive) else statistic.func(times * x)
    if not isinstance(statistic, (language.positive, *_OF_ALL)) or inside == logit:
        return statistic.func(x, *(statistic.args[1:] if isinstance(statistic, (*_OF_ALL, *_BY_SOFTMAX)) else ()))
    refuse((inside.atoms(*_REDUCTIONS), f"{display(statistic)} is not of a logit: write reductions beside positive"))
    own, rest = statistic.func(x, *statistic.args[1:]), sympy.expand(inside - logit)
    refuse((isinstance(statistic, _OF_ALL) and rest.has(z),
            f"{display(statistic)} is not of the one logit: write {display(statistic.func(logit))}"))  # fmt: skip
    return inside.xreplace({logit: own, z: positive_z}) if rest.has(z) else own + rest


def _ratio(expression: Expr, logit: Expr) -> Expr:
    """The positive number by which a logit is multiplied to be the expression; 0 if there is none."""
    # 0.7 is 7/3 of 0.3, and not as floating-point numbers.
    of_logit, parts = (
        sympy.expand(sympy.nsimplify(each, rational=True)).as_coefficients_dict() for each in (logit, expression)
    )
    first = min(of_logit, key=sympy.default_sort_key)
    times = parts[first] / of_logit[first]
    off = (abs(parts[each] - times * of_logit[each]) - abs(parts[each]) * 1e-14 for each in of_logit)
    same = parts.keys() == of_logit.keys() and all(each <= 0 for each in off)
    return times if same and times > 0 else Integer(0)


def _logits(statistics: list[Expr]) -> tuple[Expr, Expr]:
    """The one expression inside all log-sum-exps, or without any inside the positives; and what multiplies it in a
    second log-sum-exp over keys, 1 without one. Of two it is that of the negatives or the positive, if it can be."""
    sums = [each for each in statistics if isinstance(each, _OF_LOGITS)]
    logits = sorted({each.args[0] for each in sums or statistics}, key=sympy.default_sort_key)
    multiple = Integer(len(logits) == 1)
    if len(logits) == 2:
        for kind in (language.positive, language.logsumexp_over_negatives):  # the last one decides
            logits.sort(key=lambda e: not any(e == each.args[0] for each in statistics if isinstance(each, kind)))
        of_keys = {each.args[0] for each in sums if isinstance(each, language.logsumexp_over_keys)}
        others = {each.args[0] for each in sums if not isinstance(each, language.logsumexp_over_keys)}
        if of_keys == set(logits) and others <= {logits[0]}:
            multiple = _ratio(logits[1], logits[0])
    for inner in sorted(set[Expr]().union(*(each.args[0].atoms(*_SUMS) for each in sums)), key=sympy.default_sort_key):
        raise LossError(
            f"{display(inner)} stands inside another sum: a logit is of z, and normalised logits, as Sinkhorn's, have "
            "no kernels"
        )
    if not multiple:
        listed = "; ".join([*map(display, logits[:2]), *["..."] * (len(logits) > 2)]) or "none"
        how = "one, beside it at most one positive multiple" if logits else "logsumexp_over_keys(x) of a logit x of z"
        raise LossError(f"a loss needs exactly one logit, not {len(logits)} ({listed}): write {how}")
    logit = logits[0]
    words = {each.name: language.word_of(each) for each in logit.free_symbols - {z, scale, bias}}
    inside = [*sorted(words.values()), *sorted({each.func.__name__ for each in logit.atoms(*_REDUCTIONS)})]
    if inside:
        written = f"the logit {display(logit, words)} has {', '.join(inside)} in it"
        raise LossError(f"{written}: write it with z, scale and bias alone")
    return logit, multiple


class Sides(NamedTuple):
    """Texts that say that a row is the first of its pair, or the second, and the same of the row that is its column."""

    first: str = ""
    second: str = ""
    column_first: str = ""
    column_second: str = ""


NO_SIDES = Sides()


def others_left_out(
    excluded: tuple[str, ...], same_id: str, above: str, both: str, sides: Sides = NO_SIDES
) -> list[str]:
    """The conditions by which `Form.excluded` leaves out a pair that is no positive, as `left_out` has them."""
    of_row, of_column = (sides.second, sides.first), (sides.column_second, sides.column_first)
    return (
        [same_id] * ("same_id" in excluded)
        + [above] * bool({*_ABOVE.values()} & {*excluded})
        + [f"{of_row[i]}{both}{of_column[j]}" for name, (i, j) in SIDES.items() if name in excluded]
    )


def left_out(
    excluded: tuple[str, ...], same_id: str, positive: str, negative: str, above: str, both: str, either: str,
    sides: Sides = NO_SIDES,
) -> str:  # fmt: skip
    """The condition by which `Form.excluded` leaves a pair out, of texts that say that it is of one id, is a positive,
    is none, and is above its query's threshold; `both` and `either` join them. Of nothing excluded ""."""
    others = others_left_out(excluded, same_id, above, both, sides)
    if "positive" in excluded:
        return either.join([*others, positive])
    any_other = either.join(others)
    return (f"({any_other})" if others[1:] else any_other) + (both + negative) * bool(others)


class _Comparison(NamedTuple):
    """Of pairs with their query's threshold."""

    written: Expr  # the step
    name: str  # the class of pairs above it
    threshold: tuple[Expr, Expr]


def _without_thresholds(spec: LossSpec, formula: Expr, domain: Domain) -> tuple[Expr, _Comparison | None]:
    """The formula with a symbol in its masks for which pairs are above their query's threshold, if there is one."""
    masks = {each: math.prod(each.args[1:], start=ONE) for each in formula.atoms(*_SUMS)}
    steps = sorted(set[Expr]().union(*(mask.atoms(language.step) for mask in masks.values())), key=str)
    formula = _without_masks_of_negatives(formula, steps, domain)
    if not steps:
        return formula, None
    how = "write step(guide - positive(guide) + margin), or z for guide"
    positives = "label" if domain == "triangle" else "diagonal"
    shown = [display(each, {language.guide.name: "guide"}) for each in steps]
    refuse((len(steps) > 1, f"a mask has one threshold, and {' and '.join(shown)} are two: {how}"),
           (formula.has(language.mean_over_keys), "a threshold has no kernel yet beside mean_over_keys: write "
            "mean_over_queries alone, and call it once for each direction"),
           (domain == "rectangle" and formula.has(language.of_positive),
            "a threshold has no kernel yet beside of_positive: leave one of them out"),
           (spec.positives != positives, f"a threshold has no kernel yet beside positives={spec.positives!r}: write "
                                         f"positives={positives!r}"))  # fmt: skip
    (difference,) = steps[0].args
    compared = [each for each in _ABOVE if difference.has(each)]
    own = language.positive(compared[0]) if len(compared) == 1 else language.positive(z)
    at = Dummy("at_positive")
    apart = sympy.expand(difference.xreplace({own: at}))
    factor = diff(apart, compared[0]) if len(compared) == 1 else Integer(0)
    refuse((not factor.is_number or not factor > 0, f"{shown[0]} is no comparison of a similarity: {how}"))
    slope = -diff(apart, at) / factor
    margin = sympy.expand(compared[0] - slope * at - apart / factor)
    refuse((not slope.is_number or not margin.is_number, f"{shown[0]} is no comparison with a number: {how}"))
    where = {each: each.func(each.args[0], mask.xreplace({steps[0]: _IS_ABOVE})) for each, mask in masks.items()}
    formula = formula.xreplace({each: new for each, new in where.items() if each.args[1:]})
    return formula, _Comparison(steps[0], _ABOVE[compared[0]], (slope, margin))


def _without_masks_of_negatives(formula: Expr, steps: list[Expr], domain: Domain) -> Expr:
    """The formula without the masks of pairs' own negatives, which leave out those above the threshold of their pair,
    where there is one. Raises LossError for other masks."""
    of_pairs = domain == "triangle" and formula.has(language.of_positive)
    mask = (1 - steps[0],) if of_pairs and steps else ()
    own = formula.atoms(language.logsumexp_over_negatives)
    right = f"where={display(mask[0])}, as in the other log-sum-exps" if mask else "logsumexp_over_negatives(x)"
    refuse((any(each.args[1:] != mask for each in own), "logsumexp_over_negatives leaves out negatives above the "
            f"threshold of rows in pairs, beside of_positive, and no others: write {right}"))  # fmt: skip
    return formula.xreplace({each: each.func(each.args[0]) for each in own})


def _excluded(statistics: list[Expr], domain: Domain, compared: _Comparison | None) -> tuple[str, ...]:
    """The classes of pairs that the log-sum-exps leave out. Raises LossError for a mask that has no kernel; a row and
    itself are no pair of a triangle, and every mask of one must leave them out. The words of a pair that are 1 say what
    it is; a mask must be 0 for those of some classes, and 1 for all others."""
    sums = [each for each in statistics if isinstance(each, _SUMS)]
    masks = {math.prod(each.args[1:], start=ONE) for each in sums}
    refuse((len(masks) > 1, "the log-sum-exps differ in their masks: give all of them one where="))
    written = mask = masks.pop() if masks else ONE
    triangle = domain == "triangle"
    itself = sympy.expand(mask.xreplace({is_self: ONE, is_positive: Integer(0)}))
    mask = mask.xreplace({is_self: Integer(0)}) if triangle else mask  # a row is no positive of its own
    by_side = triangle and mask.has(is_first, same_side)
    refuse(
        (not triangle and mask.has(is_self), "is_self has no value where queries and keys are two sides: write it "
                                             "beside similarity('query', 'query')"),
        (not triangle and mask.has(is_first, same_side), "is_first and same_side have no value where queries and keys "
         "are two sides: write them beside similarity('query', 'query')"),
    )  # fmt: skip
    classes = {is_positive: "positive", **({} if triangle else {same_id: "same_id"})}
    classes |= {_IS_ABOVE: compared.name} if compared else {}
    symbols = [*classes, *[is_first, same_side] * by_side]
    pairs = [
        frozenset(of)
        for of in itertools.chain(*(itertools.combinations(symbols, count) for count in range(len(symbols) + 1)))
        if not (by_side and {is_positive, same_side} <= {*of})  # a positive is the other row of its pair
    ]
    kept = {of: sympy.expand(mask.xreplace({each: Integer(each in of) for each in symbols})) for of in pairs}
    of_sides = {of: side for of, side in zip(_OF_SIDES, SIDES, strict=True) if by_side and kept[of] == 0}
    of_block = {of: of & _SIDE_WORDS in of_sides for of in pairs}  # whether its block is left out
    alone = {each: [of for of in pairs if of - _SIDE_WORDS == {each}] for each in classes}
    found = {
        each: name
        for each, name in classes.items()
        if all(kept[of] == 0 for of in alone[each] if each == is_positive or not of_block[of])
    }

    def is_left_out(of: frozenset[Expr]) -> bool:
        other = of_block[of] or bool(of & ({*found} - {is_positive}))
        return other or is_positive in of if is_positive in found else other and is_positive not in of

    if (triangle and itself != 0) or any(kept[of] != Integer(not is_left_out(of)) for of in pairs):
        raise LossError(_no_mask(written, triangle, by_side, compared))
    return *found.values(), *of_sides.values()


# By what is 1 of a pair: the names of `SIDES`, in their order.
_SIDE_WORDS = frozenset((is_first, same_side))
_OF_SIDES = _SIDE_WORDS, frozenset((is_first,)), frozenset[Expr](), frozenset((same_side,))


def _no_mask(mask: Expr, triangle: bool, by_side: bool, compared: _Comparison | None) -> str:
    """Why a mask has no kernel."""
    shown = {language.guide.name: "guide"}
    one = "same_id" if compared is None else display(compared.written, shown)
    if triangle and mask.has(same_id):
        return (
            "same_id has no kernel yet beside similarity('query', 'query'): write z, where=1 - same_id * (1 - "
            "is_positive), and pass the rows as queries and as keys, with labels and ids"
        )
    if triangle and compared is None and not by_side:
        return (
            f"the mask where={display(mask)} of similarity('query', 'query') has no kernel yet: where=1 - is_self "
            "leaves out the row itself, and where=(1 - is_self) * (1 - is_positive) its positive, too"
        )
    if triangle:
        each = f" * (1 - {one})" * (compared is not None) + " * (1 - is_first * same_side)" * by_side
        return f"this where= has no kernel yet: write (1 - is_self) * (1 - is_positive){each}, say"
    if mask == same_id:
        return 'the mask where=same_id is of pairs of one id, which are positives: write positives="id"'
    written = mask if compared is None else mask.xreplace({_IS_ABOVE: compared.written})
    return (
        f"the mask where={display(written, shown)} has no kernel yet: write 1 - is_positive, "
        f"1 - {one} * (1 - is_positive), or the product of both"
    )


def _linear(formula: Expr, reductions: list[Expr]) -> Iterator[tuple[Expr, Expr]]:
    """Each reduction with its coefficient. Raises LossError where the formula is not a sum of such products."""
    dummies = {each: Dummy(f"part_{index}") for index, each in enumerate(reductions)}
    rest = linear = sympy.expand_mul(formula.xreplace(dummies))
    for reduction, dummy in dummies.items():
        coefficient = diff(linear, dummy)
        if coefficient.has(*dummies.values()):
            raise LossError(f"{_in_words(reduction)} stands in a product or a function: write a sum of such terms")
        yield reduction, coefficient
        rest -= coefficient * dummy
    rest = sympy.expand(rest)
    if rest != 0:
        rest = rest.xreplace({dummy: each for each, dummy in dummies.items()})
        raise LossError(f"{_in_words(rest)} stands outside of means: write it inside of one")


def _terms(formula: Expr, second: dict[Expr, Symbol]) -> tuple[Expr, Expr, tuple[Expr, Expr]]:
    """query_term(r, p, u, h, r2) and key_term(c, p), with the coefficients of their means; and `Form.of_means`.
    `second`: the symbol of the second log-sum-exp."""
    terms = dict.fromkeys(_MEANS, Integer(0))
    for mean, coefficient in _linear(formula, sorted(formula.atoms(*_MEANS), key=sympy.default_sort_key)):
        refuse(
            (mean.args[0].atoms(*_MEANS), f"{_in_words(mean)} is the mean of a mean: write one of the two"),
            (
                not coefficient.is_number,
                f"{mean.func.__name__} is multiplied by {_in_words(coefficient)}: write that factor inside of the mean",
            ),
        )
        terms[mean.func] += coefficient * mean.args[0].xreplace(_REDUCED | second)
    (query_term, of_m), (key_term, of_n) = (_without_mean(sympy.expand_mul(terms[mean]), mean) for mean in _MEANS)
    for term, own, other, side in ((query_term, r, c, "queries"), (key_term, c, r, "keys")):
        if term.has(other) or term.has(x):
            words = {r: "logsumexp_over_keys(x)", c: "logsumexp_over_queries(x)"}
            raise LossError(f"{words[other]} has no value in mean_over_{side}: write {words[own]}")
        by_guide, of_other = (tq, tk) if side == "queries" else (tk, tq)
        if term.has(of_other):
            word, right = (_WORD_OF[each].func.__name__ for each in (of_other, by_guide))
            raise LossError(f"{word}(x, guide) has no value in mean_over_{side}: write {right}(x, guide)")
        for number in ("weight", "state"):
            right, wrong = (f"{each}_{number}" for each in ("query", "key")[:: 1 if side == "queries" else -1])
            refuse((term.has(OWN[wrong]), f"{wrong} has no value in mean_over_{side}: write {right}"))
    return sympy.factor_terms(query_term), sympy.factor_terms(key_term), (of_m, of_n)  # F as people write it


def _crossed(
    spec: LossSpec, query_term: Expr, key_term: Expr, excluded: tuple[str, ...]
) -> tuple[Expr, Expr, dict[Symbol, Symbol]]:
    """F and G, and what stands for symbols of G. Where these are no sums of constant multiples of their parts, or sums
    leave out positives, or a query has a loss of its own, G of key i becomes part of F of query i, whose positive it
    is: there it is a function of cp, and of pc for p where the sum has it."""
    linear = _is_linear(query_term, r, tq) and _is_linear(key_term, c, tk) and "positive" not in excluded
    if key_term == 0 or (linear and spec.reduction == "mean"):
        return query_term, key_term, {}
    refuse((key_term.has(tk), "a mean by a guide of both sides has kernels in sums of constant multiples, by "
                              "reduction='mean': write such terms in both means"))  # fmt: skip
    once = "write mean_over_queries alone, and call it once for each direction"
    refuse(
        (not key_term.has(c), "mean_over_keys without logsumexp_over_queries: use mean_over_queries"),
        (spec.positives != "diagonal", "logsumexp_over_queries needs positives='diagonal': write that, or "
         "mean_over_queries without mean_over_keys"),
        (not query_term.has(r), "such terms of keys have no kernel without a log-sum-exp over keys: exchange queries "
                                "and keys, and write mean_over_queries"),
        (query_term.has(r2), f"two log-sum-exps of a query have no kernel yet beside mean_over_keys: {once}"),
        (query_term.has(cp), f"of_positive has no kernel yet beside mean_over_keys: {once}"),
    )  # fmt: skip
    column = {c: cp} | ({} if "positive" in excluded else {p: pc})
    return query_term + key_term.xreplace(column), Integer(0), column


def _without_mean(term: Expr, mean: Any) -> tuple[Expr, Expr]:
    """F or G without the mean of the logits, and the constant that multiplies that."""
    over = mean.__name__
    own, other = (m, d) if mean == language.mean_over_queries else (d, m)
    word, wrong = (each.func.__name__ for each in (_WORD_OF[own], _WORD_OF[other]))
    refuse((term.has(other), f"{wrong}(x) has no value in {over}: write {word}(x)"))
    factor = diff(term, own)
    rest = sympy.expand_mul(term - factor * own)
    refuse((not factor.is_number or rest.has(own), f"{word}(x) has kernels only as a constant multiple in a sum: take "
            f"it out of {_in_words(term)}"))  # fmt: skip
    return rest, factor


def _is_linear(term: Expr, *statistics: Symbol) -> bool:
    """Whether a term is a sum of constant multiples of its statistics and the positive."""
    return term.free_symbols <= {*statistics, p} and all(diff(term, each).is_number for each in (*statistics, p))


def _pointwise(spec: LossSpec, written: Expr, sums: list[Expr], scaled: tuple[str, ...]) -> Form:
    """The form of a loss that is a sum over pairs alone."""
    inside = sorted(map(display, set().union(*(each.args[0].atoms(*_REDUCTIONS) for each in sums))))
    refuse((inside, f"{''.join(inside[:1])} stands inside sum_over_pairs, whose terms know one pair: use z and "
            "is_positive, or mean_over_queries"))  # fmt: skip
    beside = sorted({each.func.__name__ for each in written.atoms(*_REDUCTIONS)} - {"sum_over_pairs"})
    refuse((beside, f"sum_over_pairs beside {', '.join(beside)} has no kernel yet: write two losses, and add them"))
    square = {keys: queries} if spec.positives == "diagonal" else {}
    total: Expr = Integer(0)
    for each, coefficient in _linear(written, sums):
        weight = (coefficient * queries).xreplace(square)
        if not weight.is_number:
            raise LossError(
                f"sum_over_pairs is multiplied by {display(coefficient)}: write a constant times sum_over_pairs(...) / "
                "queries"
            )
        total += weight * each.args[0]
    unknown = sorted(map(str, total.free_symbols - {z, scale, bias, *_CLASSES}))
    of_side = [name for name in ("query_weight", "query_state", "key_weight", "key_state") if name in unknown]
    side = "keys" if of_side and of_side[0].startswith("key") else "queries"
    refuse((of_side, f"{''.join(of_side[:1])} has no kernel yet in sum_over_pairs: write it in "
            f"mean_over_{side}"))  # fmt: skip
    if unknown:
        raise LossError(f"{', '.join(unknown)} has no kernel yet in sum_over_pairs: write terms of z, scale, bias, "
                        "is_positive and same_id")  # fmt: skip
    if spec.positives == "id":  # the two are one class
        total = total.xreplace({is_positive: same_id})
    of_others = False  # whether terms of other pairs depend on one logit, which those of positives do not
    for logit in _candidates(total):
        terms = [
            _of_logit(total, logit).xreplace({is_positive: Integer(a), same_id: Integer(b)})
            for a, b in ((0, 0), (0, 1), (1, 0), (1, 1))
        ]
        if not set().union(*(each.free_symbols for each in terms)) - {x}:
            other, same, positive, both = terms
            refuse((spec.positives != "id" and positive != both, "the term of a positive depends on same_id: write "
                                                                 "same_id * (1 - is_positive)"))  # fmt: skip
            formula = language.sum_over_pairs(_of_logit(total, logit)) / queries
            terms_of_pairs = PairTerm(other, same, both)
            return Form(spec, logit, formula, (), Integer(0), Integer(0), terms_of_pairs, scaled=scaled)
        of_others |= terms[0].free_symbols == {x}
    refuse((of_others, "a logit that depends on is_positive or same_id has no kernel yet in sum_over_pairs: write one "
                       "logit x, and h(x) by class"))  # fmt: skip
    raise LossError(f"{display(total)} is no function of one logit x of z, scale and bias: write it as h(x) by class")


def _candidates(total: Expr) -> list[Expr]:
    """What the logit may be: first what is affine in z, the longest first; then other parts, the shortest first."""
    parts = {_without_class(e) for e in sympy.preorder_traversal(total)}
    positive = {-e if e.could_extract_minus_sign() else e for e in parts if e.has(z)}
    size = lambda e: (sympy.count_ops(e), sympy.default_sort_key(e))  # noqa: E731
    affine = {e for e in positive if not diff(e, z).has(z) and diff(e, z) != 0}
    return sorted(affine, key=size, reverse=True) + sorted(positive - affine, key=size)


def _without_class(part: Expr) -> Expr:
    """A part, or the operands of a sum or product that do not depend on the class of the pair; 0 for none."""
    if not part.has(*_CLASSES):
        return part
    return part.func(*[e for e in part.args if not e.has(*_CLASSES)]) if part.is_Add or part.is_Mul else Integer(0)


def _of_logit(total: Expr, logit: Expr) -> Expr:
    """`total` over x."""
    slope = diff(logit, z)
    if slope.has(z):
        return total.xreplace({logit: x})
    found = total.subs(z, (x - sympy.expand(logit - slope * z)) / slope)
    if not found.free_symbols - {x, *_CLASSES}:
        return found
    # scale * ((x - scale * bias) / scale + bias) is x: what is inside functions has to be multiplied out to see it.
    return sympy.expand(found.replace(lambda e: e.is_Function, lambda e: e.func(*map(sympy.expand, e.args))))
