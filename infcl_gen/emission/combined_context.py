"""What templates of kernels read of losses whose queries have weights: several positives, second sums, guides."""

from __future__ import annotations

from typing import Any

from infcl_gen.emission.class_context import masks_of_sides
from infcl_gen.emission.pairs_context import functions_called
from infcl_gen.emission.render import ABSENT
from infcl_gen.losses import Derivation
from infcl_gen.losses.printers import pair_code
from infcl_gen.planning.candidates import PANEL_LIMIT
from infcl_gen.planning.planner import Plan

_SHARE = "tl.load(share + rows, mask=here, other=1.0)"
# A query of weight 0 has a share of 0 and no gradient: its strip need not be computed again.
_NO_WEIGHT = (
    "({} | (own == 0.0) & (tl.load(positive_g + rows, mask=inside, other=0.0) == 0.0))",
    "tl.where(value == 0.0, 1.0, {})",
)
_ABOUT_VECTORS = "vectors         the query's own numbers become the derivatives of its part of M * L by them{}"
OF_STATE = ("", ", its state the next one", ", its states the next ones")  # by the number of states
_POOLED_NUMBERS = """\
pooled = tl.load(pooled_ptr)  # of all queries, in fp64
pooled_slope = tl.load(pooled_ptr + 1)"""
_ABOUT_KEPT_Z = "kept_z          z of the positive, whose row has a term of it in its own sum"
_ABOUT_PARTNER = "partner_exponent, partner_mantissa   from `partners`; query_terms and kept_z may overwrite them"
_R_OF_PARTNER = """\
partner_sum = tl.load(partner_mantissa + i, mask=i < queries, other=1.0)
rp = log2_of(tl.load(partner_exponent + i, mask=i < queries, other=0.0), partner_sum) * LN2 + shift"""
_OF_NO_PARTNER = '\nrp = tl.where(partner_sum == 0.0, float("-inf"), rp)'
# By name in the template of `combine`: of the column of each query's positive, which is the key of its index.
_COLUMNS = {
    "about_columns": "key_mantissa    that of its positive's column over ac_i, likewise",
    "sums_of_columns": """\
sum_of_column = tl.load(key_mantissa + i, mask=i < queries, other=1.0)
cp = log2_of(tl.load(key_exponent + i, mask=i < queries, other=0.0), sum_of_column) * LN2 + shift
cp = tl.where(sum_of_column == 0.0, float("-inf"), cp)""",
    "column_of_nothing": "key_weight = tl.where(sum_of_column == 0.0, 0.0, key_weight)",
    "divided_columns": """\
sum_of_column = tl.where(sum_of_column == 0.0, float("inf"), sum_of_column / key_weight)
tl.store(key_mantissa + i, sum_of_column.to(tl.float32), mask=i < queries)""",
}
_POSITIVE_OF_COLUMN = """\
reference_of_column = tl.load(positive_key_reference + i, mask=i < queries, other=0.0)
pc = positive_log2(z, slope, reference_of_column) * LN2 + shift"""
_COLUMNS_OF_IDS = {  # of combine_several
    "about_columns": "columns           cp of each query; becomes ac_i",
    "sums_of_columns": "cp = tl.load(columns + i, mask=i < queries, other=0.0)",
    "column_of_nothing": "key_weight = tl.where(found, key_weight, nothing)",
    "divided_columns": "tl.store(columns + i, key_weight, mask=i < queries)",
}
_REFERENCE = "reference = tl.load(positive_row_reference + i, mask=i < queries, other=0.0)"
_ROWS_IN_FP64 = {
    "positive_z": "z.to(tl.float64)", "queries": "all_queries.to(tl.float64)", "keys": "all_keys.to(tl.float64)",
}  # fmt: skip


def combined_context(plan: Plan, derivation: Derivation) -> dict[str, Any]:
    """What the kernels of a loss with a weight for each query read."""
    if not plan.traits.combined:
        return {
            "combined": False, "share_is_held": "(mantissa < 4.0)", "positive_of_row": "positive_z",
            "positives_of_rows": "positives_of_rows", "positives_from_sums": True, "share_of_positive": _SHARE,
        }  # fmt: skip
    statements = derivation.statements_of_rows(pair_code, "tl.full((VECTOR_ROWS,), {}, tl.float64)", _ROWS_IN_FP64)
    own = derivation.form.vectors.values()
    places = ("vectors + i", "vectors + vectors_stride + i", *(f"vectors + {n} * vectors_stride + i" for n in (2, 3)))
    nothing = {
        "r_of_nothing": 'r = tl.where(mantissa == 0.0, float("-inf"), r)',
        "weight_of_nothing": "weight = tl.where(mantissa == 0.0, 0.0, weight)",
    }
    held, may_be_0 = "(tl.abs(own) > 2.0**-100) & (tl.abs(own) < 2.0**100)", "query_weight" in plan.traits.vectors
    without, weighted = plan.traits.without_positives, "mantissa / weight"
    return {
        "combined": True,
        "share_is_held": _NO_WEIGHT[0].format(held) if may_be_0 else held,
        "share_of_positive": _NO_WEIGHT[1].format(_SHARE) if may_be_0 else _SHARE,
        "positive_of_row": "positive_g",
        "positives_of_rows": "combined_positives",
        "positives_from_sums": False,
        "vectors": list(zip(own, places[: len(own)], strict=True)),
        "about_vectors": _ABOUT_VECTORS.format(OF_STATE[plan.traits.states]) if plan.traits.vectors else ABSENT,
        "partnered": plan.traits.partnered,
        "about_partner": _ABOUT_PARTNER if plan.traits.partnered else ABSENT,
        "r_of_partner": (_R_OF_PARTNER + _OF_NO_PARTNER * without) if plan.traits.partnered else ABSENT,
        **_columns(plan),
        "plus_column": " + key_weight" * plan.traits.crossed,
        "positive_of_column": _POSITIVE_OF_COLUMN if plan.traits.in_columns else ABSENT,
        "about_kept_z": _ABOUT_KEPT_Z if plan.traits.triangle else ABSENT,
        "pooled_numbers": _POOLED_NUMBERS if plan.traits.pooled else ABSENT,
        "stored_z": "tl.store(kept_z + i, z, mask=i < queries)" if plan.traits.triangle else ABSENT,
        "statements_of_rows": "\n".join(statements),
        "functions": (functions := functions_called(statements)),
        "of_functions": bool(functions),
        "divided": "dividend / divisor",
        **{name: text if without else ABSENT for name, text in nothing.items()},
        "and_nothing": "; infinite where it is empty" * without,
        "weighted_mantissa": f'tl.where(mantissa == 0.0, float("inf"), {weighted})' if without else weighted,
        "reference_of_positive": ABSENT if without else _REFERENCE,
        # Of a positive that is in no sum the linear form is exact enough: it has no term there to be the logarithm of.
        "y_of_positive": "z.to(tl.float64) * slope" if without else "positive_log2(z, slope, reference)",
        "g_of_positives": "positive_slope + through_z"
        + " + weight * tl.exp(p - r)" * (not without)
        + " + second_weight * tl.exp(p * MULTIPLE - r2)" * (plan.traits.second and not without)
        + " + key_weight * tl.exp(pc - cp)" * plan.traits.in_columns,
    }


def _columns(plan: Plan) -> dict[str, str]:
    """What `combine` has of the sums over queries of a query's positives."""
    texts = _COLUMNS_OF_IDS if plan.traits.columns_of_ids else _COLUMNS
    return {name: text if plan.traits.crossed else ABSENT for name, text in texts.items()}


def several_context(plan: Plan) -> dict[str, Any]:
    """What the kernels of a loss with a statistic of any number of positives read."""
    softmax, triangle, both = plan.traits.softmax_of_positives, plan.traits.triangle, plan.both_axes
    groups = (_MEANS, plan.traits.sorted_ids), (_SHARES, softmax), (_OF_ITSELF, triangle)
    texts = {name: ABSENT for group, _ in groups for name in group}
    texts |= {name: text for group, used in groups if used for name, text in group.items()}
    return texts | {
        "several": plan.traits.sorted_ids,
        "about_g_of_positives": _ABOUT_G_OF_POSITIVES if plan.traits.apart else _ABOUT_G_BY_GUIDE,
        "largest_step": PANEL_LIMIT,
        "noted_positives": plan.traits.placed and not triangle,
        "softmax_of_keys": _SOFTMAX_OF_KEYS if both else ABSENT,
        "slopes_of_keys": texts["slopes_of_keys"] if triangle else ABSENT,
        "and_of_a_row_and_itself": " A row and itself has none." * triangle,
    }


def second_context(plan: Plan) -> dict[str, Any]:
    """What the kernels of a loss with a second log-sum-exp of each query read."""
    traits, both = plan.traits, plan.both_axes
    mantissa = "second_mantissa + i, {}, mask=i < queries"
    divided = "sum_of_second / second_weight"
    r2, empty, columns = _SECOND_OF_QUERY, ABSENT, masks_of_sides(plan)["column_terms"]
    if traits.without_positives:
        r2 += '\nr2 = tl.where(mantissa == 0.0, float("-inf"), r2)'
        empty = "second_weight = tl.where(mantissa == 0.0, 0.0, second_weight)"
        divided = f'tl.where(mantissa == 0.0, float("inf"), {divided})'
    found = {
        "second_slope": "second_slope = slope * MULTIPLE",
        "second_of_query": r2,
        "second_of_nothing": empty,
        "about_second": "second_mantissa that of the second sum over a2_i, likewise",
        "divided_second": f"sum_of_second = {divided}\n    tl.store({mantissa.format('sum_of_second.to(tl.float32)')})",
        "key_shares_of_second": _SHARES_OF_SECOND if both else ABSENT,
        "second_softmax_of_keys": _SECOND_SOFTMAX_OF_KEYS if both else ABSENT,
        "second_columns_above_diagonal": _SECOND_COLUMNS if traits.triangle else ABSENT,
        "no_second_below": _NO_SECOND_BELOW,
        "no_second_columns": "second_column_sums = tl.zeros((FORWARD_KEYS,), tl.float32)" if both else ABSENT,
        "second_columns": f"second_column_sums += tl.sum({columns}, axis=0)" if both else ABSENT,
    }
    share = "\n{2}+ softmax_share({0}s, here, z, {1}second_exponent, {1}second_mantissa, slope * MULTIPLE)"
    return {name: text if traits.second else ABSENT for name, text in found.items()} | {
        "second": traits.second,
        "second_of_both": traits.second and both,
        "plus_second": " + second_weight" * traits.second,
        "plus_second_of_columns": share.format("column", "key_", " " * 12) * traits.second,
        "plus_second_of_rows": share.format("row", "", " " * 17) * traits.second,
        # Defaults: pieces are included once more for the second sums.
        "which": "",
        "told": True,
    }


def guided_context(plan: Plan) -> dict[str, Any]:
    """What the kernels of a loss with means by the softmax of a guide read: of queries alone, or of both sides."""
    both = plan.traits.guided_sides
    return {name: text if both else ABSENT for name, text in _GUIDED_SIDES.items()} | {
        "guided": plan.traits.by_guide,
        "guided_sides": both,
        "guide_share": "GUIDE_SHARE" if both else "QUERY_SHARE",
        "share_by_guide": "share" if both else "b",  # b is of keys
        # The piece similarity_of_positives, of the features and then of the guide.
        "own": "q", "visited": "k", "of_guide": "", "or_line": " ", "noted": "positive_z", "unit": "",
        "next_line": "\n" + " " * 16,
    }  # fmt: skip


_MEAN_BY_GUIDE = """\
total = tl.load({0}guide_sum + i, mask=i < {1}, other=1.0).to(tl.float64)
{2} = tl.load({0}guided + i, mask=i < {1}, other=0.0).to(tl.float64) / total * slope * LN2 + shift"""
_GUIDED_SIDES = {
    "guide_of_pairs": "guide_of_pairs = guide",
    "of_columns_by_guide": "value += tl.exp2(guide - guide_key_e[None, :]) * guide_b[None, :]",
    "mean_of_query": _MEAN_BY_GUIDE.format("", "queries", "tq"),
    "mean_of_key": _MEAN_BY_GUIDE.format("key_", "keys", "tk"),
}
_SECOND_OF_QUERY = """\
second_exponents = tl.load(second_exponent + i, mask=i < queries, other=0.0)
sum_of_second = tl.load(second_mantissa + i, mask=i < queries, other=1.0)
r2 = log2_of(second_exponents, sum_of_second) * LN2 + shift * MULTIPLE"""
_NO_SECOND_BELOW = """\
tl.store(row_second_exponent + key_block * rows_stride + rows, nothing + LOWEST, mask=rows < queries)
tl.store(row_second_sum + key_block * rows_stride + rows, nothing, mask=rows < queries)"""
_SHARES_OF_SECOND = """\
second_e = tl.load(key_second_exponent + visiting_keys)
second_b = KEY_SHARE / tl.load(key_second_mantissa + visiting_keys)"""
_SECOND_SOFTMAX_OF_KEYS = "value += tl.exp2(tl.fma(z, slope * MULTIPLE, -second_e[None, :])) * second_b[None, :]"
_SECOND_COLUMNS = "second_column_reference = tl.where(columns > diagonal_row, second_column_reference, LOWEST)"
_ABOUT_G_OF_POSITIVES = "Positives get the g of a negative; `gradient_positives`\n    follows."
_ABOUT_G_BY_GUIDE = "The guide's similarities are\n    computed again, too."


# By name in the templates of `positives`, `combine` and `gradient_positives`: of a mean of positives, and of a
# log-sum-exp what differs.
_MEANS = {
    "what_of_positives": "their number, and the sum of their z",
    "no_positives": "total = tl.zeros((POSITIVE_ROWS,), tl.float32)",
    "added_positives": "total += tl.sum(tl.where(same_id, z, 0.0), axis=1)",
    "merged_positives": """\
total += tl.load(sum_of_positives + own_rows, mask=known, other=0.0)
tl.store(sum_of_positives + own_rows, total, mask=known)""",
    "about_left": "becomes what g of each positive has by it, b_i / n_i",
    "y_of_positives": "of_positives.to(tl.float64) / positives_of_query * slope",
    "left_of_positives": (
        "tl.store(sum_of_positives + i, (positive_slope / positives_of_query).to(tl.float32), mask=i < queries)"
    ),
    "positives_of_queries": "of_queries = tl.load(sum_of_positives + own_rows, mask=known, other=0.0)",
    "slopes_of_queries": "value += QUERY_SHARE * of_queries[:, None]",
    "slopes_of_keys": """\
of_keys = tl.load(key_sum_of_positives + key_rows, mask=there, other=0.0)
value += KEY_SHARE * of_keys[None, :]""",
}
_SHARES = {
    "what_of_positives": "their number, and the sum of their 2^y",
    "no_positives": """\
slope = base2_slope(scale_ptr, bias_ptr)
reference = tl.full((POSITIVE_ROWS,), LOWEST, tl.float32)
total = tl.zeros((POSITIVE_ROWS,), tl.float32)""",
    "added_positives": """\
not_positive = tl.where(same_id, 0.0, float("-inf"))
top = tl.maximum(reference, tl.floor(tl.max(z * slope + not_positive, axis=1)))
terms = tl.exp2(tl.fma(z, slope, -top[:, None]) + not_positive)
total = total * tl.exp2(reference - top) + tl.sum(terms, axis=1)
reference = top""",
    "merged_positives": """\
before = tl.load(sum_of_positives + own_rows, mask=known, other=0.0)
e = tl.load(exponent_of_positives + own_rows, mask=known, other=0.0)
e = tl.where(before == 0.0, LOWEST, e)  # nothing so far
top = tl.maximum(e, reference)
total = before * tl.exp2(e - top) + total * tl.exp2(reference - top)
tl.store(sum_of_positives + own_rows, total, mask=known)
tl.store(exponent_of_positives + own_rows, top, mask=known)""",
    "about_left": "becomes the sum over b_i, too",
    "exponents_of_positives": "exponent_of_sum = tl.load(exponent_of_positives + i, mask=i < queries, other=0.0)",
    "y_of_positives": "log2_of(exponent_of_sum, of_positives)",
    "left_of_positives": """\
of_positives = tl.where(found, of_positives / positive_slope, float("inf"))  # of no positives all shares are 0
    tl.store(sum_of_positives + i, of_positives.to(tl.float32), mask=i < queries)
    tl.store(exponent_of_positives + i, tl.where(found, exponent_of_sum, 2.0**127), mask=i < queries)""",
    "positives_of_queries": """\
positives_e = tl.load(exponent_of_positives + own_rows, mask=known, other=0.0)
positives_a = QUERY_SHARE / tl.load(sum_of_positives + own_rows, mask=known, other=1.0)""",
    "slopes_of_queries": "value += tl.exp2(tl.fma(z, slope, -positives_e[:, None])) * positives_a[:, None]",
    "slopes_of_keys": """\
e = tl.load(key_exponent_of_positives + key_rows, mask=there, other=0.0)
b = KEY_SHARE / tl.load(key_sum_of_positives + key_rows, mask=there, other=1.0)
value += tl.exp2(tl.fma(z, slope, -e[None, :])) * b[None, :]""",
}
_OF_ITSELF = {
    "but_for_itself": "if DIAGONAL:\n    number -= 1.0",
    "but_for_the_diagonal": "if DIAGONAL:\n    same_id = same_id & (own_rows[:, None] != key_rows[None, :])",
    "none_of_a_row_and_itself": """\
if DIAGONAL:
    value = tl.where(own_rows[:, None] == key_rows[None, :], 0.0, value)""",
}
_SOFTMAX_OF_KEYS = """\
e = tl.load(key_exponent + key_rows, mask=there, other=0.0)
b = KEY_SHARE / tl.load(key_mantissa + key_rows, mask=there, other=1.0)
value += tl.exp2(tl.fma(z, slope, -e[None, :])) * b[None, :]"""
