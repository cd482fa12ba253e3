"""A derived loss in LaTeX: general form and gradient, by SymPy's printer."""

import re
from collections.abc import Iterable
from typing import Any

import sympy
from sympy import Expr, Symbol, diff
from sympy.core.sorting import default_sort_key
from sympy.printing.latex import LatexPrinter

from infcl_gen.losses import language
from infcl_gen.losses.derive import Derivation
from infcl_gen.losses.form import STATES, Sides, left_out
from infcl_gen.losses.language import bias, scale, z
from infcl_gen.losses.printers import c, is_negative, p, positive_z, r, tk, tq, x
from infcl_gen.losses.texts import SLOPES, pooled_formulas, slopes_of_rows

# Other symbols are named by their LaTeX.
_NAMES = {
    "z": "z_{ij}", "x": "x_{ij}", "r": "r_i", "c": "c_j", "p": "p_i", "positive_z": "z_i", "u": "u_i", "h": "h_i",
    "state": "y_i", "next_state": "y'_i", "r2": "r'_i", "rp": r"r_{\ell_i}", "cp": "C_i", "pc": "p_i", "uk": "u'_i",
    "statek": r"\bar y_i", "next_statek": r"\bar y'_i",
    "m": "m_i", "d": "d_j", "scale": "s", "bias": "b", "queries": "M", "keys": "N", "positives_of_query": "n_i",
    "pooled": "E", "pooled_slope": "S", "tq": r"\tau_i", "tk": r"\tau'_j",
}  # fmt: skip
_VECTORS = {
    "query_weight": r"u_i = \text{the weight of query } i",
    "key_weight": r"u'_i = \text{the weight of key } i",
    "negatives": r"h_i = \log \sum_l e^{x(q_i \cdot n_{il})}",
}
_OF_PAIRS = r"h_i = h_{\ell_i} = \log \sum_l %s e^{x(q_i \cdot n_{il})} \text{ where } i < \ell_i"
_NEAR = r"\left[q_i \cdot n_{il} \le \theta_i\right]"
_SCALES = {"query_scale": r"\beta_i", "key_scale": r"\gamma_j"}
_OF_SCALES = {
    "query_scale": r"q_i \cdot \frac{\partial L}{\partial (\beta_i q_i)}, \quad \beta_i = \text{factor of query } i",
    "key_scale": r"k_j \cdot \frac{\partial L}{\partial (\gamma_j k_j)}, \quad \gamma_j = \text{factor of key } j",
}
_OF_KEYS = {p: Symbol("p_j", real=True)}  # key j of a pair is the positive of query j
_BY_GUIDE = r"\frac{e^{y_{ij}}}{\sum_l e^{y_{il}}}"
_GUIDE = r"\quad y_{ij} = u_i \cdot v_j"
_OF_COLUMNS_BY_GUIDE = r"\frac{e^{y_{ij}}}{\sum_l e^{y_{lj}}}"
_KEPT = Symbol("w_{ij}", real=True)
_SAME_ID = r"\mathrm{id}_j = \mathrm{id}_i"
_KEY_FACTOR = rf"\eta_j = \sum_{{{_SAME_ID}}} \alpha_i e^{{- C_i}}"
_POOLED = r"E = \log \sum_i e^{{{}}}", r"S = \sum_i {}"
_POSITIVE = {"diagonal": "j = i", "label": r"j = \ell_i", "id": _SAME_ID, "none": ""}


class _Printer(LatexPrinter):
    """Terms in the order of formulas for people: the negative ones last."""

    def _print_Symbol(self, expr: Symbol, style: str = "plain") -> str:
        return _NAMES.get(str(expr)) or re.sub("^t([0-9]+)$", r"t_{\1}", str(expr))

    def _as_ordered_terms(self, expr: Expr, order: str | None = None) -> list[Expr]:
        return sorted(expr.args, key=lambda term: (is_negative(term), -len(term.free_symbols), default_sort_key(term)))

    def _print_softplus(self, expr: Expr, exp: str | None = None) -> str:
        return rf"\log{_raised(exp)}{{\left(1 + e^{{{self._print(expr.args[0])}}} \right)}}"

    def _print_sigmoid(self, expr: Expr, exp: str | None = None) -> str:
        return rf"\sigma{_raised(exp)}{{\left({self._print(expr.args[0])} \right)}}"

    def _print_maximum(self, expr: Expr, exp: str | None = None) -> str:
        arguments = ", ".join(map(self._print, expr.args))
        return rf"\max{_raised(exp)}{{\left({arguments} \right)}}"

    def _print_detach(self, expr: Expr, exp: str | None = None) -> str:
        return rf"\mathrm{{sg}}{_raised(exp)}{{\left({self._print(expr.args[0])} \right)}}"

    def _print_step(self, expr: Expr, exp: str | None = None) -> str:
        return rf"\left[{self._print(expr.args[0])} > 0\right]{_raised(exp)}"


_PRINTER = _Printer()


def latex_of(derivation: Derivation) -> dict[str, str]:
    """The formulas of `formulas_of` in LaTeX, by the same names; a query has the index i, a key j.

    s is scale, b bias, M the number of queries, l_i the label of query i, and sigma the logistic function.
    """
    slope, dx_dscale = diff(derivation.logit, z), diff(derivation.logit, scale)
    at = "ii" if derivation.spec.positives == "diagonal" else r"i \ell_i"
    positive = rf"p_i = x_{{{at}}}" if derivation.spec.positives in ("diagonal", "label") else ""
    if derivation.form.several:
        positive = _statistic_of_positives(derivation)
    scales = [_SCALES[name] for name in derivation.form.scaled]
    along = "".join(rf"\, {each}" for each in [_factor(slope)] * (slope != 1) + scales)
    by_number, times = derivation.by_number, "".join(rf"{each}\, " for each in scales)
    of_pair, triangle = f"g_{{ij}}{along}", derivation.traits.triangle
    if positive_z in by_number:
        at_positive = rf"\left[{_POSITIVE[derivation.spec.positives]}\right]"
        of_pair = rf"\Big( {of_pair} + \frac{{1}}{{M}} e_i\, {at_positive} \Big)"
    rest = {each: rf" + \frac{{1}}{{M}} \sum_i {SLOPES[each][1]}" * (each in by_number) for each in (scale, bias)}
    gradients = {
        "dq": rf"\frac{{\partial L}}{{\partial q_i}} = \sum_j {of_pair}\, k_j",
        "dk": rf"\frac{{\partial L}}{{\partial k_j}} = \sum_i {of_pair}\, q_i",
    }
    if triangle:
        both = rf"\left(g_{{ij}} + g_{{ji}}\right){along}"
        if positive_z in by_number:
            added = r"e_i\, \left[j = \ell_i\right] + e_j\, \left[i = \ell_j\right]"
            both = rf"\Big( {both} + \frac{{1}}{{M}} \left({added}\right) \Big)"
        gradients = {"dq": rf"\frac{{\partial L}}{{\partial q_i}} = \sum_{{j \ne i}} {both}\, q_j"}
    product = "q_i \\cdot " + ("q_j" if triangle else "k_j")
    if derivation.traits.renormalised:
        product = r"\frac{q_i \cdot k_j}{\lVert q_i \rVert \lVert k_j \rVert}"
        gradients = {
            name: rf"\frac{{\partial L}}{{\partial {own}}} = \frac{{1}}{{\lVert {own} \rVert}} \sum_{each} {of_pair}\, "
            rf"\Big( \frac{{{other}}}{{\lVert {other} \rVert}} - z_{{ij}} \frac{{{own}}}{{\lVert {own} \rVert}} \Big)"
            for name, own, other, each in (("dq", "q_i", "k_j", "j"), ("dk", "k_j", "q_i", "i"))
        }
    return {
        "logit": rf"x_{{ij}} = {_text(derivation.logit)}, \quad z_{{ij}} = {times}{product}",
        **_statistics(derivation),
        **({"positive": positive} if positive and derivation.form.formula.has(p) else {}),
        **({"positive_similarity": rf"z_i = z_{{{at}}}"} if derivation.form.formula.has(positive_z) else {}),
        **pooled_formulas(derivation, _text, *_POOLED),
        "loss": rf"L = \frac{{1}}{{M}} {_bracketed(_terms(derivation))}",
        **slopes_of_rows(derivation, _text, "a'_i", r"\alpha_i"),
        **({"key_factor": _KEY_FACTOR} if derivation.form.crossed and derivation.form.several else {}),
        "dL/dx": rf"g_{{ij}} = \frac{{\partial L}}{{\partial x_{{ij}}}} = {_gradient(derivation)}"
        + r", \quad j \ne i" * triangle,
        **gradients,
        "dscale": rf"\frac{{\partial L}}{{\partial s}} = {_summed(dx_dscale)}{rest[scale]}",
        "dbias": rf"\frac{{\partial L}}{{\partial b}} = {_dbias(derivation)}{rest[bias]}",
        **{
            f"of_{keyword}": rf"\frac{{\partial L}}{{\partial {_text(symbol)}}} = \frac{{1}}{{M}} {_factor(slope)}"
            for (keyword, symbol), slope in zip(derivation.form.vectors.items(), derivation.vector_slopes, strict=True)
            if keyword not in STATES
        },
        **{
            f"of_{name}": rf"\frac{{\partial L}}{{\partial {_SCALES[name]}}} = {side}"
            for name, side in _OF_SCALES.items()
            if name in derivation.form.scaled
        },
        **_of_prefixes(derivation),
    }


def _of_prefixes(derivation: Derivation) -> dict[str, str]:
    """The sum of the losses of prefixes, whose own formulas are the others."""
    total = " + ".join(
        f"{weight:g}\\, " * (weight != 1) + f"L({columns})" for columns, weight in derivation.spec.prefixes
    )
    of_each = r"L(d) = L \text{ of the first } d \text{ columns}"
    return {"prefixes": rf"\mathcal{{L}} = {total}, \quad {of_each}"} if total else {}


def _statistic_of_positives(derivation: Derivation) -> str:
    if derivation.form.guided:
        return rf"p_i = \sum_j {_BY_GUIDE} x_{{ij}}, {_GUIDE}"
    others = r" \\ j \ne i" if derivation.traits.triangle else ""
    below = rf"\sum_{{\substack{{{_SAME_ID}{others}}}}}" if others else rf"\sum_{{{_SAME_ID}}}"
    number = rf"\quad n_i = {below} 1, \quad a_i = b_i = 0 \text{{ where }} n_i = 0"
    if derivation.traits.softmax_of_positives:
        return rf"p_i = \log {below} e^{{x_{{ij}}}}, {number}"
    return rf"p_i = \frac{{1}}{{n_i}} {below} x_{{ij}}, {number}"


def aligned(formulas: Iterable[str], environment: str = "align*") -> str:
    """The formulas one below the other, their first equality signs in one column."""
    lines = " \\\\\n".join(text.replace(" = ", " &= ", 1) for text in formulas)
    return rf"\begin{{{environment}}}" + f"\n{lines}\n" + rf"\end{{{environment}}}"


def _raised(power: str | None) -> str:
    return "" if power is None else f"^{{{power}}}"


def _text(expression: Any) -> str:
    return str(_PRINTER.doprint(expression))


def _factor(expression: Expr) -> str:
    """With parentheses around a sum."""
    return rf"\left({_text(expression)}\right)" if expression.is_Add else _text(expression)


def _bracketed(terms: list[str]) -> str:
    """Their sum, as a factor."""
    return terms[0] if len(terms) == 1 else rf"\Big( {' + '.join(terms).replace('+ - ', '- ')} \Big)"


def _statistics(derivation: Derivation) -> dict[str, str]:
    excluded, positive = derivation.form.excluded, _POSITIVE[derivation.spec.positives]
    found, mask = {}, "w_{ij} " * bool(excluded)
    if mask:
        negative = positive.replace("=", r"\ne")
        above = ("y_{ij}" if derivation.traits.guide else "z_{ij}") + r" > \theta_i"
        sides = Sides(r"i < \ell_i", r"i > \ell_i", r"j < \ell_j", r"j > \ell_j")
        where = left_out(excluded, _SAME_ID, positive, negative, above, r" \text{ and } ", r" \text{ or } ", sides)
        found["mask"] = rf"w_{{ij}} = 0 \text{{ where }} {where}, \text{{ else }} 1"
    if derivation.form.threshold:
        guided, (slope, margin) = derivation.traits.guide, derivation.form.threshold
        place = r"i \ell_i" if derivation.traits.labels else "ii"
        own = Symbol(f"{'y' if guided else 'z'}_{{{place}}}", real=True)
        of_guide = r", \quad y_{ij} = u_i \cdot v_j" * guided
        found["threshold"] = rf"\theta_i = {_text(slope * own + margin)}{of_guide}"
    if derivation.has_queries:
        others = r"{j \ne i}" if derivation.traits.triangle else "j"
        found["query_statistic"] = rf"r_i = \log \sum_{others} {mask}e^{{x_{{ij}}}}"
        if derivation.form.second:
            power = _text(derivation.form.multiple * x)
            found["second_statistic"] = rf"r'_i = \log \sum_{others} {mask}e^{{{power}}}"
        if derivation.form.partnered:
            found["partners"] = r"\ell_{\ell_i} = i"
    if derivation.has_keys:
        found["key_statistic"] = rf"c_j = \log \sum_i {mask}e^{{x_{{ij}}}}"
    if derivation.form.guided_sides:
        found["guide_softmaxes"] = rf"\pi_{{ij}} = {_BY_GUIDE}, \quad \pi'_{{ij}} = {_OF_COLUMNS_BY_GUIDE}, {_GUIDE}"
        found["guided_queries"] = r"\tau_i = \sum_j \pi_{ij} x_{ij}"
        found["guided_keys"] = r"\tau'_j = \sum_i \pi'_{ij} x_{ij}"
    if derivation.form.crossed:
        found["column_statistic"] = (
            rf"C_i = \log \sum_{{{_SAME_ID}}} e^{{c_j}}" if derivation.form.several else "C_i = c_i"
        )
    of_queries, of_keys = derivation.form.of_means
    mean = r"m_i = \frac{1}{N} \sum_j x_{ij}"
    if derivation.form.weight:
        weight = _text(derivation.form.weight[0] + derivation.form.weight[1] * Symbol(r"u_i \cdot v_j", real=True))
        mean = r"m_i = \frac{\sum_j \omega_{ij} x_{ij}}{\sum_j \omega_{ij}}, \quad \omega_{ij} = " + weight
    found |= {"query_mean": mean} if of_queries != 0 else {}
    found |= {"key_mean": r"d_j = \frac{1}{M} \sum_i x_{ij}"} if of_keys != 0 else {}
    following = derivation.form.following.items()
    near = _NEAR * derivation.traits.thresholds
    of_pairs = {"negatives": _OF_PAIRS % near} if derivation.traits.partnered else {}
    vectors = (
        _VECTORS | of_pairs | {keyword: f"{_text(STATES[keyword][1])} = {_text(each)}" for keyword, each in following}
    )
    return found | {f"own_{keyword}": vectors[keyword] for keyword in derivation.form.vectors}


def _terms(derivation: Derivation) -> list[str]:
    form, pair, traits = derivation.form, derivation.form.pair_term, derivation.traits
    terms, (of_query, of_key) = [], derivation.terms_with_means
    if of_query != 0:
        found = r"\left[n_i > 0\right] " * (form.several and not form.guided)
        terms.append(rf"\sum_i {found}{_factor(of_query)}")
    if of_key != 0:
        terms.append(rf"\sum_j {_factor(sympy.factor_terms(of_key.xreplace(_OF_KEYS)))}")
    if pair is None:
        return terms
    positive = _POSITIVE[form.spec.positives]
    if pair.other == pair.same_id == pair.positive:
        return [*terms, rf"\sum_{{ij}} {_factor(pair.other)}"]
    if traits.placed and pair.positive != 0:
        at = {x: Symbol("x_{ii}" if traits.paired else r"x_{i \ell_i}", real=True)}
        terms.append(rf"\sum_i {_factor(pair.positive.xreplace(at))}")
    apart = [positive.replace("=", r"\ne")] if traits.placed else []
    classes = (
        [(_SAME_ID, pair.same_id), (_SAME_ID.replace("=", r"\ne"), pair.other)] if traits.ids else [("", pair.other)]
    )
    for which, term in classes:
        if term != 0:
            where = r" \\ ".join(filter(None, (*apart, which)))
            below = rf"\substack{{{where}}}" if apart and which else where
            terms.append(rf"\sum_{{{below}}} {_factor(term)}")
    return terms


def _gradient(derivation: Derivation) -> str:
    slopes, traits, positive = derivation.pair_slope, derivation.traits, _POSITIVE[derivation.spec.positives]
    if slopes is None:
        form, kept = derivation.form, _KEPT if derivation.form.excluded else 1
        placed = Symbol(rf"\left[{positive}\right]", real=True)
        share = sum(form.of_means, sympy.Integer(0))
        each = Symbol(r"\frac{\omega_{ij}}{\sum_l \omega_{il}}", real=True) if form.weight else 1 / language.keys
        of_means = [_text(share * each)] if share != 0 else []
        if form.combined:
            mask = "w_{ij} " * bool(form.excluded)
            ends = " + ".join(["", *of_means]).replace("+ -", "- ")
            share = r"e^{x_{ij} - p_i} " if derivation.traits.softmax_of_positives else r"\frac{1}{n_i} "
            at_positives = f"b_i {share * form.several}{_text(placed)}"
            if form.guided:
                at_positives = f"b_i {_BY_GUIDE}"
            second = rf"a'_i {mask}e^{{{_text(form.multiple * x)} - r'_i}} + " * form.second
            if form.crossed:
                second = r"\eta_j e^{x_{ij}} + " if form.several else rf"\alpha_j {mask}e^{{x_{{ij}} - c_j}} + "
            return rf"\frac{{1}}{{M}} \Big( a_i {mask}e^{{x_{{ij}} - r_i}} + {second}{at_positives}{ends} \Big)"
        parts = (
            diff(form.query_term, r) * kept * sympy.exp(x - r),
            diff(form.key_term, c) * kept * sympy.exp(x - c),
            diff(form.query_term + form.key_term, p) * placed,
            diff(form.query_term, tq) * Symbol(r"\pi_{ij}", real=True),
            diff(form.key_term, tk) * Symbol(r"\pi'_{ij}", real=True),
        )
        return rf"\frac{{1}}{{M}} {_bracketed([*(_text(part) for part in parts if part != 0), *of_means])}"
    cases = [(positive, slopes.positive)] if traits.placed and slopes.positive != slopes.other else []
    cases += [(_SAME_ID, slopes.same_id)] if traits.ids else []
    if not cases:
        return rf"\frac{{1}}{{M}} {_factor(slopes.other)}"
    lines = [rf"{_text(slope)} & {where}" for where, slope in [*cases, (r"\text{else}", slopes.other)]]
    return r"\frac{1}{M} \begin{cases}" + r" \\ ".join(lines) + r"\end{cases}"


def _summed(factor: Expr) -> str:
    """The sum over all pairs of dL/dx times `factor`."""
    if factor == 0:
        return "0"
    return r"\sum_{ij} g_{ij}" + ("" if factor == 1 else rf"\, {_factor(factor)}")


def _dbias(derivation: Derivation) -> str:
    if not derivation.traits.sums_slopes:
        return _text(derivation.dbias)
    return _summed(derivation.dbias_factor)
