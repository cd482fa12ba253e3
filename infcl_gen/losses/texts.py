"""A derived loss as text: formulas for people, and what the templates of loss.py read."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
from sympy import Expr, diff

from infcl_gen.losses.derive import Derivation
from infcl_gen.losses.form import STATES, Sides, left_out
from infcl_gen.losses.language import bias, guide, is_positive, keys, queries, same_id, scale, z
from infcl_gen.losses.printers import (
    Printer,
    cp,
    d,
    dense_code,
    dense_code_of_several,
    display,
    m,
    p,
    pc,
    pooled,
    positive_z,
    temporary,
    torch_code,
    x,
)

LONGEST_LOSS = 100  # characters of the dense loss in one line
_OF_BATCH = {scale, bias, queries, keys, pooled}  # alike for all queries
_NUMBERS = {"queries": "x.new_tensor(len(x))", "keys": "x.new_tensor(x.shape[1])", "positives_of_query": "n"}
_PAIR = {
    "x": "x_ij",
    "z": "z_ij",
    "r": "r_i",
    "c": "c_j",
    "p": "p_i",
    "positive_z": "z_ip",
    "u": "u_i",
    "h": "h_i",
    "state": "state_i",
    "next_state": "next_i",
    "m": "m_i",
    "d": "d_j",
    "r2": "r2_i",
    "rp": "rp_i",
    "cp": "C_i",
    "pc": "p_i",
    "uk": "uk_i",
    "statek": "statek_i",
    "next_statek": "nextk_i",
    "tq": "tq_i",
    "tk": "tk_j",
    "pooled": "E",
    "pooled_slope": "S",
    "queries": "M",
    "keys": "N",
    "positives_of_query": "n_i",
}
_SCALE_OF = {"query_scale": "query_scale_i", "key_scale": "key_scale_j"}
_WEIGHT = "\nWEIGHT = {}, {}  # key j has the weight a + b * y_ij in it, for these a and b"
_GUIDE_SHARES = "\nGUIDE_SHARES = {}  # of the guide's softmaxes over keys, and over queries, in M * dL/dx_ij"
_THRESHOLD = "\nTHRESHOLD = {}, {}  # of a query: a times the similarity of its positive, plus b, for these a and b"
_KEY_FACTOR = "U_j = sum_i ac_i * exp(-C_i) over the queries i of which j is a positive"
_NOT_ITSELF = "torch.eye(len(x), dtype=torch.bool, device=x.device)"
# Of any number of positives the number, and the statistic by its kind; a query without any has any other numbers.
_STATISTICS_OF_POSITIVES = {
    "mean_over_positives": "x.masked_fill(~same_id, 0.0).sum(dim=1) / n",
    "mean_by_guide": "(torch.softmax(y, dim=1) * x).sum(dim=1)",
    "logsumexp_over_positives": 'torch.logsumexp(x.masked_fill(~same_id & found[:, None], float("-inf")), dim=1)',
}
_SOFTMAXES = ("exp(y_ij - log sum_l exp(y_il))", "exp(y_ij - log sum_l exp(y_lj))")  # of a guide, over keys and queries
_BOTH_SOFTMAXES = f"t_ij = {_SOFTMAXES[0]}, s_ij = {_SOFTMAXES[1]}, y_ij = u_i . v_j"

_COLUMNS_OF_ID = 'torch.logsumexp(c.expand_as(x).masked_fill(~same_id & found[:, None], float("-inf")), dim=1)'
_ABOUT_LABELS = {
    "diagonal": "must be None: key i is the positive of query i, so there are as many keys as queries.",
    "label": 'int64 (M,), the index of each query\'s positive among the keys; None and "own" mean 0, 1, ..., M - 1.',
    "id": "must be None: the positives of a query are the keys of its id.",
    "none": "must be None: no key is the positive of a query.",
}
_ABOUT_IDS = {  # by whether there are any, and whether these are of rows alone
    (True, False): "int64 (M,) and (N,), the id of each query and of each key.",
    (True, True): "int64 (M,), the id of each row; key_ids must be None.",
    (False, False): "must be None.",
}
_IDS_OF_BOTH = """
    if key_ids is not None:
        raise ValueError("this loss compares rows with each other: query_ids are the ids of both, key_ids must be None")
    key_ids, k = query_ids, q"""
_ABOUT_GUIDES = "(M, D) and (N, D) floating-point, what a guide has for each of them; no gradients."
_CHECKED_GUIDES = """\
for name, given, like in (("guide_queries", guide_queries, q), ("guide_keys", guide_keys, k)):
        if given is None or given.shape != like.shape or not given.is_floating_point():
            raise ValueError(f"this loss needs {name}, floating-point of shape {tuple(like.shape)}")
    guide_queries, guide_keys = guide_queries.detach(), guide_keys.detach()"""
_NO_GUIDES = """\
if guide_queries is not None or guide_keys is not None:
        raise ValueError("this loss takes no guide_queries and guide_keys")"""
_STATE = """\
if {name} is None or {name}.shape != (len({x}),) or not {name}.is_floating_point():
    raise ValueError(f"this loss needs {name}, floating-point of shape ({{len({x})}},)")
{symbol} = {name}.detach().to(q.device, dtype)"""
_NO_STATE = """\
if {name} is not None:
    raise ValueError("this loss takes no {name}")"""
_ABOUT_STATES = {
    "query_state": "\n    state_i, next_i   the caller's state of a query, before and after a call",
    "key_state": "\n    statek_i, nextk_i  the same of key i",
}
_ABOUT_PAIRS = 'int64 (M,), the row of each row\'s positive; None and "own" pair rows i and i + M/2.'


@functools.lru_cache(maxsize=64)
def formulas_of(derivation: Derivation) -> Mapping[str, str]:
    """The derivation for people: ASCII formulas by the name of the quantity."""
    slope, by_number = display(diff(derivation.logit, z), _PAIR), derivation.by_number
    times_slope = "" if slope == "1" else f" * {_wrapped(slope)}"
    times_slope += "".join(f" * {_SCALE_OF[name]}" for name in derivation.form.scaled)
    of_pair, triangle = f"g_ij{times_slope}", derivation.traits.triangle
    at_positive = " + 1/M * e_i * [j = positive(i)]" * (positive_z in by_number)
    of_pair = f"({of_pair}{at_positive})" if at_positive else of_pair
    rest = " + 1/M * sum_i f_i" if scale in by_number else f" = {_dscale(derivation)}" * (positive_z not in by_number)
    gradients = {"dq": f"dq_i = sum_j {of_pair} * k_j", "dk": f"dk_j = sum_i {of_pair} * q_i"}
    product = f"q_i . {'q_j' if triangle else 'k_j'}"
    if derivation.traits.renormalised:
        product = "q_i . k_j / (|q_i| |k_j|)"
        of_sides = (("dq", "q_i", "k_j", "j"), ("dk", "k_j", "q_i", "i"))
        gradients = {
            name: f"d{own} = sum_{each} {of_pair} * ({other} / |{other}| - z_ij * {own} / |{own}|) / |{own}|"
            for name, own, other, each in of_sides
        }
    if triangle:
        both = f"(g_ij + g_ji){times_slope}"
        if at_positive:
            both = f"({both}{at_positive} + 1/M * e_j * [i = positive(j)])"
        gradients = {"dq": f"dq_i = sum_{{j != i}} {both} * q_j"}
    dx_dscale = display(diff(derivation.logit, scale), _PAIR)
    positive = {
        "diagonal": "p_i = x_ii",
        "label": "p_i = x_ij where j = labels[i]",
        "id": "the positives of query i are the keys of its id, id_j = id_i",
        "none": f"p_i = sum_j {_SOFTMAXES[0]} * x_ij, y_ij = u_i . v_j",
    }
    if derivation.spec.positives == "id" and derivation.form.several:
        positive["id"] = _positives_of_id(derivation)
    scales = "".join(f"{_SCALE_OF[name]} * " for name in derivation.form.scaled)
    return {
        "logit": f"x_ij = {display(derivation.logit, _PAIR)}, z_ij = {scales}{product}",
        **_statistics(derivation),
        "positive": positive[derivation.spec.positives],
        **pooled_formulas(derivation, lambda part: display(part, _PAIR), "E = log sum_i exp({})", "S = sum_i {}"),
        "loss": f"L = 1/M * ({' + '.join(_terms(derivation))})",
        **slopes_of_rows(derivation, lambda part: display(part, _PAIR)),
        **({"key_factor": _KEY_FACTOR} if derivation.form.crossed and derivation.form.several else {}),
        "dL/dx": f"g_ij = 1/M * ({_gradient(derivation)})" + ", j != i" * triangle,
        **gradients,
        "dscale": f"dscale = sum_ij g_ij * {_wrapped(dx_dscale)}{rest}",
        "dbias": f"dbias = {_dbias(derivation)}" + " + 1/M * sum_i v_i" * (bias in by_number),
        **_of_vectors(derivation),
        **{
            f"of_{name}": f"dL/d{_SCALE_OF[name]} = {of_side} / {_SCALE_OF[name]}"
            for name, of_side in (("query_scale", "q_i . dq_i"), ("key_scale", "k_j . dk_j"))
            if name in derivation.form.scaled
        },
        **_of_prefixes(derivation),
    }


def _of_prefixes(derivation: Derivation) -> dict[str, str]:
    """How the losses of prefixes of the features are added, whose own formulas are the others."""
    weights = ((f"{weight:g} * " * (weight != 1)) + f"L({columns})" for columns, weight in derivation.spec.prefixes)
    total = " + ".join(weights)
    return {"prefixes": f"loss = {total}, L(d) = L of the first d columns of q and k"} if total else {}


def _positives_of_id(derivation: Derivation) -> str:
    """What is known of a query's positives where a statistic of them is in its term."""
    which = "id_j = id_i" + ", j != i" * derivation.traits.triangle + "; without any a_i = b_i = 0"
    if derivation.traits.softmax_of_positives:
        return f"p_i = log sum_j exp(x_ij) over the n_i positives of i, {which}"
    return f"p_i = sum_j x_ij / n_i over the n_i positives of i, {which}"


# By number that a query's term changes with: the name of its slope, and its letter.
SLOPES = {positive_z: ("positive_z_slope", "e_i"), scale: ("scale_slope", "f_i"), bias: ("bias_slope", "v_i")}


def slopes_of_rows(
    derivation: Derivation, write: Callable[[Expr], str], second: str = "a2_i", column: str = "ac_i"
) -> dict[str, str]:
    """The slopes of a query's term by name, as equations; `write` gives the text of an expression, and `second` and
    `column` are the letters of those of a second log-sum-exp, and of that of the positive's column."""
    if not derivation.form.combined:
        return {}
    shared, slopes = derivation.slopes_of_query
    further = [("second_weight", second)] * derivation.form.second + [("key_weight", column)] * derivation.form.crossed
    names = [("query_weight", "a_i"), *further, ("positive_slope", "b_i")]
    names += map(SLOPES.__getitem__, derivation.by_number)
    found = {f"part_{symbol}": f"{write(symbol)} = {write(part)}" for symbol, part in shared}
    return found | {name: f"{letter} = {write(slope)}" for (name, letter), slope in zip(names, slopes, strict=True)}


def pooled_formulas(derivation: Derivation, write: Callable[[Expr], str], *of_each: str) -> dict[str, str]:
    """The log-sum-exp over the positives of all queries, and the sum of slopes by it, with their parts in `of_each`."""
    parts = derivation.of_pooled or ()
    texts = [write(part) for part in parts]
    if parts and (parts[1].is_Add or texts[1].startswith("-")):
        texts[1] = f"({texts[1]})"
    of_names = zip(("pooled", "pooled_slope"), of_each, texts, strict=False)
    return {name: each.format(text) for name, each, text in of_names}


def _of_vectors(derivation: Derivation) -> dict[str, str]:
    """The gradients of queries' own numbers, and what those of negatives add to others."""
    found, vectors = {}, derivation.form.vectors.items()
    for (keyword, symbol), slope in zip(vectors, derivation.vector_slopes, strict=True):
        if keyword not in STATES:
            found[f"of_{keyword}"] = f"dL/d{symbol}_i = 1/M * ({display(slope, _PAIR)})"
    if "negatives" in derivation.form.vectors:
        found["of_negatives"] += "; sums over j also have g_il = dL/dh_i * exp(x_il - h_i) of n_il"
    return found


def _statistics(derivation: Derivation) -> dict[str, str]:
    found, excluded = {}, derivation.form.excluded
    if excluded:
        above = f"{_COMPARED[derivation.traits.guide]} > t_i"
        texts = ("id_j = id_i", "j = positive(i)", "j != positive(i)", above, " and ", " or ")
        sides = Sides("i < labels[i]", "i > labels[i]", "j < labels[j]", "j > labels[j]")
        where = left_out(excluded, *texts, sides)
        found["mask"] = f"w_ij = 0 where {where}, else 1"
        found |= _threshold(derivation)
    if derivation.traits.triangle:
        mask = "w_ij * " * bool(excluded)
        found["query_statistic"] = f"r_i = log sum_{{j != i}} {mask}exp(x_ij)"
        found |= _second_statistic(derivation, f"sum_{{j != i}} {mask}")
        if derivation.form.partnered:
            found["partner_statistic"] = "rp_i = r_j where j = labels[i]; i = labels[j], too"
        return found | _own_statistics(derivation)
    if derivation.has_queries:
        found["query_statistic"] = "r_i = log sum_j w_ij * exp(x_ij)" if excluded else "r_i = logsumexp_j x_ij"
        found |= _second_statistic(derivation, "sum_j " + "w_ij * " * bool(excluded))
    if derivation.has_keys:
        found["key_statistic"] = "c_j = log sum_i w_ij * exp(x_ij)" if excluded else "c_j = logsumexp_i x_ij"
    if derivation.form.guided_sides:
        found["guide_softmaxes"] = _BOTH_SOFTMAXES
        found["guided_queries"] = "tq_i = sum_j t_ij * x_ij"
        found["guided_keys"] = "tk_j = sum_i s_ij * x_ij"
    if derivation.form.crossed:
        found["column_statistic"] = _COLUMNS[derivation.form.several]
    of_queries, of_keys = derivation.form.of_means
    if of_queries != 0 and derivation.form.weight:
        weight = display(_weight_of_keys(derivation), {guide.name: "u_i . v_j"})
        found["query_mean"] = f"m_i = sum_j o_ij * x_ij / sum_j o_ij, o_ij = {weight}"
    elif of_queries != 0:
        found["query_mean"] = "m_i = 1/N * sum_j x_ij"
    found |= {"key_mean": "d_j = 1/M * sum_i x_ij"} if of_keys != 0 else {}
    return found | _own_statistics(derivation)


_COLUMNS = ("C_i = c_i", "C_i = log sum_j exp(c_j) over the positives of i")
_COMPARED = ("z_ij", "y_ij")  # with a threshold, by whether a guide has them


def _threshold(derivation: Derivation) -> dict[str, str]:
    """What pairs are compared with that are left out above it."""
    if derivation.form.threshold is None:
        return {}
    guided, (slope, margin) = derivation.traits.guide, derivation.form.threshold
    own = "z_il" if derivation.traits.labels else "y_ii" if guided else "z_ii"
    which = ", l = labels[i]" * derivation.traits.labels + ", y_ij = u_i . v_j" * guided
    return {"threshold": f"t_i = {display(slope * z + margin, {'z': own})}{which}"}


def _second_statistic(derivation: Derivation, summed: str) -> dict[str, str]:
    if not derivation.form.second:
        return {}
    return {"second_statistic": f"r2_i = log {summed}exp({display(derivation.form.multiple * x, _PAIR)})"}


def _negatives(derivation: Derivation) -> str:
    if not derivation.traits.partnered:
        return "h_i = log sum_l exp(x(q_i . n_il))"
    near = " and q_i . n_il <= t_i" * derivation.traits.thresholds
    return f"h_i = h_j = log sum_l exp(x(q_i . n_il)) where j = labels[i], i < j{near}"


def _own_statistics(derivation: Derivation) -> dict[str, str]:
    following = derivation.form.following.items()
    vectors = {
        "query_weight": "u_i = the weight of query i",
        "key_weight": "uk_i = the weight of key i",
        "negatives": _negatives(derivation),
        **{
            keyword: "{2} = {0}, which replaces {1}".format(
                display(each, _PAIR), *(_PAIR[str(symbol)] for symbol in STATES[keyword])
            )
            for keyword, each in following
        },
    }
    return {f"own_{keyword}": vectors[keyword] for keyword in derivation.form.vectors}


def _terms(derivation: Derivation) -> list[str]:
    terms, pair = [], derivation.form.pair_term
    of_query, of_key = derivation.terms_with_means
    if of_query != 0:
        found = "[n_i > 0] * " * (derivation.form.several and not derivation.form.guided)
        terms.append(f"sum_i {found}({display(of_query, _PAIR)})")
    if of_key != 0:
        terms.append(f"sum_j ({display(of_key, {**_PAIR, 'p': 'p_j'})})")
    if pair and pair.other == pair.same_id == pair.positive:
        terms.append(f"sum_ij {display(pair.other, _PAIR)}")
    elif pair:
        ids, placed = derivation.traits.ids, derivation.traits.placed
        if placed:
            terms.append(f"sum_i ({display(pair.positive, {'x': 'p_i'})})")
        negative = "j != positive(i)" if placed else ""
        classes = (("id_j = id_i", pair.same_id), ("id_j != id_i", pair.other)) if ids else (("", pair.other),)
        terms += [
            f"sum_ij [{', '.join(filter(None, (negative, which)))}] * ({display(term, _PAIR)})"
            for which, term in classes
            if term != 0
        ]
    return terms


def _gradient(derivation: Derivation) -> str:
    """M * dL/dx_ij."""
    if derivation.pair_slope:
        slopes, traits = derivation.pair_slope, derivation.traits
        found = display(slopes.other, _PAIR)
        if traits.ids:
            found = f"{display(slopes.same_id, _PAIR)} if id_j = id_i else {found}"
        if traits.placed and slopes.positive != slopes.other:
            found = f"{display(slopes.positive, _PAIR)} if j = positive(i) else {found}"
        return found
    mask = "w_ij * " * bool(derivation.form.excluded)
    if derivation.form.combined:
        at_positives = "b_i * [j = positive(i)]"
        if derivation.form.several:
            of_each = "b_i * exp(x_ij - p_i)" if derivation.traits.softmax_of_positives else "b_i / n_i"
            at_positives = f"{of_each} * [id_j = id_i]"
        if derivation.form.guided:
            at_positives = f"b_i * {_SOFTMAXES[0]}"
        second = ""
        if derivation.form.second:
            second = f"a2_i * {mask}exp({display(derivation.form.multiple * x, _PAIR)} - r2_i) + "
        if derivation.form.crossed:
            second = "U_j * exp(x_ij) + " if derivation.form.several else f"ac_j * {mask}exp(x_ij - c_j) + "
        return f"a_i * {mask}exp(x_ij - r_i) + {second}{at_positives}" + _of_means(derivation)
    shares = {
        f"{mask}exp(x_ij - r_i)": derivation.query_share,
        f"{mask}exp(x_ij - c_j)": derivation.key_share * derivation.has_keys,
        "[j = positive(i)]": derivation.positive_share,
        **dict(zip(("t_ij", "s_ij"), derivation.guide_shares, strict=True)),
    }
    g = ""
    for text, share in shares.items():
        g += _signed(share, text, first=not g)
    return g + _of_means(derivation)


def _of_means(derivation: Derivation) -> str:
    share = derivation.mean_share
    each = " * o_ij / sum_l o_il" if derivation.form.weight else " / N"
    return f" {'-' if share < 0 else '+'} {abs(share)!r}{each}" * (share != 0)


def _weight_of_keys(derivation: Derivation) -> Expr:
    """The weight of a key in the mean of all of them."""
    constant, slope = derivation.form.weight or (1, 0)
    return constant + slope * guide


def _signed(share: float, text: str, first: bool = False) -> str:
    """A term of a sum."""
    if not share:
        return ""
    sign = ("-" if share < 0 else "") if first else (" - " if share < 0 else " + ")
    return sign + text if abs(share) == 1 else f"{sign}{abs(share)!r} * {text}"


def _dscale(derivation: Derivation) -> str:
    factor, dots = display(derivation.dscale_factor / derivation.gradient_factor), "sum_i q_i . dq_i"
    found = {"0": "0", "1": dots}.get(factor, f"{factor} * {dots}")
    rest = derivation.dscale_rest
    return found if rest == 0 else f"{found} + {_wrapped(display(rest))} * sum_ij g_ij"


def _dbias(derivation: Derivation) -> str:
    if not derivation.traits.sums_slopes or derivation.dbias_factor == 0:
        return display(derivation.dbias)
    factor = display(derivation.dbias_factor)
    return "sum_ij g_ij" if factor == "1" else f"{_wrapped(factor)} * sum_ij g_ij"


def loss_context(derivation: Derivation) -> dict[str, Any]:
    """The names in torch/loss*.py.jinja: torch source and literals."""
    form, spec = derivation.form, derivation.spec
    traits, excluded = derivation.traits, form.excluded
    labels, ids, own = traits.labels, traits.ids, form.vectors.values()
    dense_classes = {
        "diagonal": "torch.eye(len(x), dtype=x.dtype, device=x.device)",
        "label": "torch.zeros_like(x).scatter_(1, labels[:, None], 1.0)",
        "id": "same_id.to(x.dtype)",
        "none": "",
    }[spec.positives]
    at_positives = "{}.gather(1, labels[:, None]).squeeze(1)" if labels else "{}.diagonal()"
    triangle = traits.triangle
    above = f"({'y' if traits.guide else 'z'} > t[:, None])"
    is_class = ("same_id", "(is_positive == 1)", "(is_positive == 0)", above, " & ", " | ")
    masked = left_out(excluded, *is_class, Sides("first[:, None]", "~first[:, None]", "first", "~first"))
    apart = triangle and traits.own_references  # whose masks are long
    others, masked = masked, " | ".join([_NOT_ITSELF] * triangle + [masked] * bool(masked))
    summed = ("kept" if traits.thresholds else "y") if masked else "x"  # y is the guide's
    several = form.several and not form.guided
    of_all = form.pooled is not None and torch_code(form.pooled)
    read = form.formula.free_symbols | (form.pooled.free_symbols if form.pooled is not None else set())
    reductions = (
        ("p", form.guided, _STATISTICS_OF_POSITIVES["mean_by_guide"]),
        ("found, n, p", several, f"of_positives(x, same_id{f' & ~{_NOT_ITSELF}' * triangle})"),
        ("is_positive", form.formula.has(is_positive) or excluded, dense_classes),
        ("same_id", form.formula.has(same_id), "same_id.to(x.dtype)"),
        ("t", traits.thresholds, f"THRESHOLD[0] * {at_positives.format('y' if traits.guide else 'z')} + THRESHOLD[1]"),
        ("first", traits.by_side, "labels > torch.arange(len(x), device=x.device)"),
        ("left_out", apart, _NOT_ITSELF),
        ("left_out", apart, f"left_out | {others}"),
        (summed, masked, f'x.masked_fill({"left_out" if apart else masked}, float("-inf"))'),
        ("r", derivation.has_queries, f"torch.logsumexp({summed}, dim=1)"),
        ("r2", form.second, f"torch.logsumexp(MULTIPLE * {summed}, dim=1)"),
        ("rp", form.partnered, "r[labels]"),
        ("c", derivation.has_keys, f"torch.logsumexp({summed}, dim=0)"),
        ("cp", form.formula.has(cp), _COLUMNS_OF_ID if several else "c"),
        ("p", p in read and not form.several, at_positives.format("x")),
        ("tq", form.guided_sides, _STATISTICS_OF_POSITIVES["mean_by_guide"]),
        ("tk", form.guided_sides, "(torch.softmax(y, dim=0) * x).sum(dim=0)"),
        ("o", form.weight, "WEIGHT[0] + WEIGHT[1] * y"),
        ("m", form.formula.has(m), "(x * o).sum(1) / o.sum(1)" if form.weight else "x.mean(1)"),
        ("d", form.formula.has(d), "x.mean(0)"),
        ("positive_z", positive_z in read, at_positives.format("z")),
        ("pooled", of_all, f"torch.logsumexp({of_all}, dim=0)"),
    )
    shared, loss = _dense_loss(form.formula, dense_code_of_several if several else dense_code)
    literals = ("has_queries", "has_keys", "query_share", "key_share", "positive_share", "positive_rest")
    printed = ("logit", "gradient_factor", "dscale_factor")
    return {
        **{name: getattr(derivation, name) for name in literals},
        **{name: torch_code(getattr(derivation, name)) for name in printed},
        **_factors_of_slopes(derivation),
        **_pair_context(derivation),
        **_combined_context(derivation),
        "name": spec.name,
        "formulas": "\n".join(formulas_of(derivation).values()),
        "positives": spec.positives,
        "labels": labels,
        "ids": ids,
        "classes": repr(traits.classes),
        "paired": traits.paired,
        "legend_of_pair": f"z_ij  similarity of {'rows i and j' if triangle else 'query i and key j'}".ljust(46),
        "legend_of_counts": ("M     number of rows" if triangle else "M, N  numbers of queries and keys")
        + "".join(_ABOUT_STATES[keyword] for keyword in form.following)
        + "\n    tq_i, tk_j   means of a query's and of a key's logits by the softmax of the guide" * form.guided_sides,
        "own_side": traits.sides[0],
        "prefixes": _PREFIXES.format(derivation.prefixes, derivation.prefix_weights, derivation.spec.renormalise)
        * bool(traits.slabs),
        "mean_share": f"\nMEAN_SHARE = {derivation.mean_share}  # of the mean of all logits in L"
        * (traits.means or traits.weighted)
        + _WEIGHT.format(*(float(each) for each in form.weight or (1, 0))) * traits.weighted
        + _THRESHOLD.format(*(float(each) for each in form.threshold or (1, 0))) * traits.thresholds,
        "but_means": ", but for the mean of its logits" * (traits.means or traits.weighted),
        "shape": "(M, M)" if triangle else "(M, N)",
        "legend_of_positives": "p_i   logit of the positive                   " * traits.placed
        + "p_i   of its n_i positives                    " * several
        + "p_i   mean of its logits by its guide         " * form.guided,
        "guide_shares": _GUIDE_SHARES.format(derivation.guide_shares) * form.guided_sides,
        "and_guided_query": ", tq: Tensor" * form.guided_sides,
        "and_guided_key": ", tk: Tensor" * form.guided_sides,
        "about_labels": _ABOUT_PAIRS if triangle and labels else _ABOUT_LABELS[spec.positives],
        "triangle": triangle,
        "about_rest": "QUERY_SHARE + POSITIVE_SHARE" if triangle else "the sum of the three",
        "domain": traits.domain,
        "k_type": "None" if triangle else "Tensor",
        "about_k": "None: rows are compared with each other" if triangle else "(N, D) keys",
        "other_side": "q" if triangle else "k",
        "about_ids": _ABOUT_IDS[ids, triangle and ids],
        "ids_of_both": _IDS_OF_BOTH * (triangle and ids),
        "needed_ids": "query_ids (M,)" + " and key_ids (N,)" * (not triangle),
        **_vectors_context(derivation),
        **_scales_context(derivation),
        "dense_arguments": "x: Tensor"
        + ", labels: Tensor" * labels
        + ", same_id: Tensor" * ids
        + ", y: Tensor" * traits.guided
        + _arguments(own)
        + _arguments(derivation.of_dense),
        "dense": _dense(derivation),
        "and_classes": " and the (M,) positives" * labels
        + ", and which pairs are of one id, (M, N)" * ids
        + " and the similarities y of the guide, (M, N)" * traits.guided,
        "checked_guides": _CHECKED_GUIDES if traits.guided else _NO_GUIDES,
        "about_guides": _ABOUT_GUIDES if traits.guided else "must be None.",
        "labels_type": "Tensor | str | None" if labels else "Tensor | None",
        "dbias": float(derivation.dbias) * derivation.total_weight,
        "dlogit_dz": torch_code(derivation.dlogit_dz) if derivation.slope is None else "torch.ones_like(z)",
        "query_term": torch_code(derivation.query_term) if derivation.has_queries else "torch.zeros_like(p)",
        "key_term": torch_code(derivation.key_term) if derivation.has_keys else "torch.zeros_like(c)",
        "reductions": "\n".join([*(f"{name} = {code}" for name, used, code in reductions if used), *shared]),
        "loss": loss,
    }


_PREFIXES = """
PREFIXES = {}  # columns of the features: L is the sum over them of a weight times the loss above
PREFIX_WEIGHTS = {}
RENORMALISE = {}  # whether similarities of a prefix are cosines"""


def _dense_loss(formula: Expr, printer: Printer) -> tuple[list[str], str]:
    """Statements of parts that a long formula shares, and the formula after them."""
    text = printer(formula, _NUMBERS)
    if len(text) <= LONGEST_LOSS:
        return [], text
    shared, (rest,) = sympy.cse([formula], map(temporary, itertools.count()))
    return [f"{symbol} = {printer(part, _NUMBERS)}" for symbol, part in shared], printer(rest, _NUMBERS)


def _dense(derivation: Derivation) -> str:
    """How `reference` computes the loss from features."""
    traits, own = derivation.traits, derivation.form.vectors.values()
    taken = ", labels" * traits.labels + ", query_ids[:, None] == key_ids" * traits.ids
    taken += ", guide_queries.to(q.device, dtype) @ guide_keys.to(q.device, dtype).T" * traits.guided + _names(own)
    taken += "".join(f", {name}={name}" for name in derivation.of_dense)
    if traits.slabs:
        return _DENSE_OF_PREFIXES.format((_PRODUCTS, _COSINES)[traits.renormalised], taken)
    own_sum = (_OWN_SUM, _SUM_OF_PAIRS)[traits.partnered] * ("negatives" in derivation.form.vectors)
    above = _LEFT_OUT if traits.thresholds else ""
    return _DENSE.format("q" if traits.triangle else "k", own_sum.replace("{above}", above), taken)


_DENSE = """\
z = q.to(dtype) @ {}.to(dtype).T
x = logit(z, scale, bias){}
return loss_of_logits(x{})"""
_OWN_SUM = """
h = logit(torch.einsum("id,ild->il", q.to(dtype), negatives.to(q.device, dtype)), scale, bias).logsumexp(1)"""
_SUM_OF_PAIRS = """
pairs = [(i, j) for i, j in enumerate(labels.tolist()) if i < j]
h = torch.empty_like(x[0])
for (i, j), own in zip(pairs, negatives.to(q.device, dtype)):{above}
    h[[i, j]] = logit(own @ q[i].to(dtype), scale, bias).logsumexp(0)"""
_LEFT_OUT = """
    own = own[(own @ q[i].to(dtype)).detach() <= THRESHOLD[0] * z[i, j].detach() + THRESHOLD[1]]"""
_DENSE_OF_PREFIXES = """\
if q.shape[1] != PREFIXES[-1]:
    raise ValueError(f"this loss is over prefixes of {{PREFIXES[-1]}} columns, but features have {{q.shape[1]}}")
total = torch.zeros((), dtype=dtype, device=q.device)
for columns, weight in zip(PREFIXES, PREFIX_WEIGHTS):
    {}
    total = total + weight * loss_of_logits(x{})
return total"""


_PRODUCTS = "x = logit(q[:, :columns].to(dtype) @ k[:, :columns].to(dtype).T, scale, bias)"
_COSINES = """\
rows, others = (torch.nn.functional.normalize(x[:, :columns].to(dtype), dim=1) for x in (q, k))
    x = logit(rows @ others.T, scale, bias)"""
_OF_COLUMNS = ("over queries of its positive", "of those over queries of its positives")
_SOFTMAXES_OF_COLUMNS = ("\n#     + key_weight of j * exp(x_ij - c_j)", "\n#     + U_j * exp(x_ij)\n#    ")


def _combined_context(derivation: Derivation) -> dict[str, Any]:
    """What loss.py of a loss with a weight for each query has instead of shares."""
    if not derivation.form.combined:
        return {}
    own = derivation.form.vectors.values()
    several, softmax = derivation.form.several, derivation.traits.softmax_of_positives
    guided = derivation.form.guided
    share = ("exp(x_ij - p_i)" if softmax else "1/n_i") if several else "[j = positive(i)]"
    share = _SOFTMAXES[0] if guided else share + " * [id_j = id_i]" * several
    return {
        "of_rows": repr(derivation.of_rows),
        "share_of_positives": share,
        "about_p": "mean of its logits by the softmax of its guide"
        if guided
        else ("log-sum-exp" if softmax else "mean logit")
        + " of its positives; any number where there are none. `positives_of_query`, (M,), is how"
        "\n                many there are, and at least 1"
        if several
        else "logit of its positive; `positive_z` is that one's similarity",
        "about_positive_slope": "the derivative of that by p"
        if several
        else "M * dL/dx of its positive, but for the weight times its probability where the sum holds it",
        "several": several and not guided,
        "of_their_logits": "log-sum-exp" if softmax else "mean logit",
        "statistic_of_positives": _STATISTICS_OF_POSITIVES.get(derivation.form.statistics[-1].kind, ""),
        "share_of_other_side": "\nKEY_SHARE = 1.0  # of dL/dx_ji, likewise" * derivation.traits.triangle
        + "\nKEY_SHARE = 1.0  # times the weight of its column" * derivation.form.crossed,
        "times_multiple": f"\nMULTIPLE = {float(derivation.form.multiple)}  # of the logits in r2"
        * derivation.form.second,
        "second_softmax": "\n#     + second_weight of i * exp(MULTIPLE * x_ij - r2_i)" * derivation.form.second
        + _SOFTMAXES_OF_COLUMNS[several] * derivation.form.crossed,
        "about_second": "\n    second_weight   the derivative by r2, log-sum-exp of MULTIPLE * x, times MULTIPLE"
        * derivation.form.second
        + "\n    key_weight      the derivative of `query_term` by cp" * derivation.form.crossed,
        "and_further_weights": ", second_weight" * derivation.form.second + ", key_weight" * derivation.form.crossed,
        "of_partner": ", and of its positive's by that row's `rp`" * derivation.form.partnered,
        "about_partner": "\n    rp          r of its positive, whose own positive it is" * derivation.form.partnered
        + f"\n    cp          log-sum-exp {_OF_COLUMNS[several]}" * derivation.form.crossed
        + "\n    pc          p as that sum has it" * (pc.name in derivation.of_rows),
        "row_arguments": _broken(f"r: Tensor, p: Tensor{_arguments(derivation.of_rows)}"),
        "and_own": "".join(f" and {symbol}" for symbol in own),
        "about_vectors": "".join(
            f"\n    of_{each}        what replaces the state, a constant in `query_term`"
            if keyword in STATES
            else f"\n    of_{each}            the derivative of `query_term` by {each}"
            for keyword, each in derivation.form.vectors.items()
        ),
        "and_slopes": _names(derivation.slopes_of_vectors),
        "statements_of_rows": "\n".join(derivation.statements_of_rows(torch_code, "torch.full_like(p, {})", {})),
        **_pooled_context(derivation),
    }


def _pooled_context(derivation: Derivation) -> dict[str, Any]:
    """What loss.py has of a log-sum-exp over the positives of all queries."""
    if derivation.of_pooled is None:
        return {"pooled": False}
    of_each, slope = derivation.of_pooled
    taken = [name for name in derivation.of_rows if name != "pooled_slope"]
    whole = "{}" if slope.free_symbols - _OF_BATCH else "torch.zeros_like(p) + ({})"
    return {
        "pooled": True,
        "of_all_positives": torch_code(of_each),
        "slope_of_pooled": whole.format(torch_code(slope)),
        "slope_arguments": _broken(f"r: Tensor, p: Tensor{_arguments(taken)}"),
        "over_factor": ", over `gradient_factor`" * (derivation.factor_of_pooled != 1),
    }


def _vectors_context(derivation: Derivation) -> dict[str, Any]:
    """What loss.py says of queries' own numbers."""
    own = derivation.form.vectors
    weight = "(M,) floating-point, the weight of each query"
    weight_of_key = "(N,) floating-point, the weight of each key"
    negatives = "(M, H, D) floating-point, H further keys of each query"
    if derivation.traits.partnered:
        negatives = "(M / 2, H, D) floating-point, H further rows of each pair, with which its first row is compared"
    state = "(M,) floating-point, the state of each query, which stays as it is"
    state_of_key = "(N,) floating-point, the state of each key, which stays as it is"
    return {
        "vectors": repr(tuple(own)),
        "weights": "query_weight" in own,
        "weights_of_keys": "key_weight" in own,
        "further_keys": "negatives" in own,
        "with_negatives": "len(q) // 2" if derivation.traits.partnered else "len(q)",
        "states": "\n".join(
            (_STATE if name in own else _NO_STATE).format(name=name, x=x, symbol=STATES[name][0])
            for name, x in (("query_state", "q"), ("key_state", "k"))
        ),
        "about_weights": f"{weight if 'query_weight' in own else 'must be None'}.",
        "about_key_weights": f"{weight_of_key if 'key_weight' in own else 'must be None'}.",
        "about_negatives": f"{negatives if 'negatives' in own else 'must be None'}.",
        "about_state": f"{state if 'query_state' in own else 'must be None'}.",
        "about_key_state": f"{state_of_key if 'key_state' in own else 'must be None'}.",
    }


def _scales_context(derivation: Derivation) -> dict[str, Any]:
    """What loss.py says of numbers that multiply rows of features."""
    scaled = derivation.form.scaled
    factor = "{} floating-point, by which the similarities of each {} are multiplied."
    about = {"query_scale": factor.format("(M,)", "query"), "key_scale": factor.format("(N,)", "key")}
    sides = {"query_scale": "q", "key_scale": "k"}
    checks = ((_FACTOR if name in scaled else _NO_FACTOR).format(name=name, x=x) for name, x in sides.items())
    return {
        "scaled": repr(scaled),
        "factors": "\n".join(checks),
        **{f"about_{name}": text if name in scaled else "must be None." for name, text in about.items()},
    }


_FACTOR = """if {name} is None or {name}.shape != (len({x}),) or not {name}.is_floating_point():
    raise ValueError(f"this loss needs {name}, floating-point of shape ({{len({x})}},)")
{x} = {x}.to(dtype) * {name}.to(q.device, dtype)[:, None]"""
_NO_FACTOR = """if {name} is not None:
    raise ValueError("this loss takes no {name}")"""


def _arguments(symbols: Iterable[Expr | str]) -> str:
    return "".join(f", {each}: Tensor" for each in symbols)


def _broken(arguments: str) -> str:
    """Arguments on a line of their own, where they do not fit beside a function's name and result."""
    return arguments if len(arguments) <= 85 else f"\n    {arguments},\n"


def _names(symbols: Iterable[Expr | str]) -> str:
    return "".join(f", {each}" for each in symbols)


def _factors_of_slopes(derivation: Derivation) -> dict[str, Any]:
    """What multiplies the sum of dL/dx over all pairs, where that is no constant."""
    if not derivation.traits.sums_slopes:
        return {"sums_slopes": False}
    names = ("dscale_rest", "dbias_factor")
    return {"sums_slopes": True} | {name: torch_code(getattr(derivation, name)) for name in names}


def _pair_context(derivation: Derivation) -> dict[str, Any]:
    """What loss.py of a sum over pairs has instead of shares."""
    term, slope = derivation.form.pair_term, derivation.pair_slope
    if term is None or slope is None:
        return {}
    traits = derivation.traits
    own = traits.placed and traits.ids  # pairs of one id have terms of their own, beside a positive's
    conditions = ["positive_slope(x_ij) if " + ("j = positive(i)" if traits.placed else "id_j = id_i")]
    conditions += ["same_id_slope(x_ij) if id_j = id_i"] * own
    of_x = {"pair_term": term.other, "pair_slope": slope.other}
    of_p = {"positive_term": term.positive, "positive_slope": slope.positive}
    of_ids = (_tensor_code(expression, {}) for expression in (term.same_id, slope.same_id))
    return {
        "slope_by_class": " else ".join([*conditions, "pair_slope(x_ij)"]),
        "other_key": "a key of another id" if traits.ids else "a key that is not its positive",
        "same_id_functions": _SAME_ID.format(*of_ids) if own else "",
        **{name: _tensor_code(expression, {}) for name, expression in of_x.items()},
        **{name: _tensor_code(expression, {"x": "p"}) for name, expression in of_p.items()},
    }


_SAME_ID = '''

def same_id_term(x: Tensor) -> Tensor:
    """The part of a query and a key of its id, but no positive, in M * L."""
    return {}


def same_id_slope(x: Tensor) -> Tensor:
    """The derivative of `same_id_term`."""
    return {}
'''


def _tensor_code(expression: Expr, names: dict[str, str]) -> str:
    """Torch source whose value is a tensor like x, also where the expression is a constant."""
    code = torch_code(expression, names)
    return f"torch.full_like({names.get('x', 'x')}, {code})" if expression.is_number else code


def _wrapped(text: str) -> str:
    return f"({text})" if any(operator in text for operator in (" + ", " - ", " / ", " * ")) else text
