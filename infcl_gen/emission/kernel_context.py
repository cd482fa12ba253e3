"""What templates of kernels read: literals, printed expressions, and the names of the pieces that they include."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
from sympy import Expr

from infcl_gen.emission.render import ABSENT
from infcl_gen.hardware import DeviceProfile
from infcl_gen.kernels import forward, fused, hopper_slabs, pairs
from infcl_gen.kernels.arguments import parts_of
from infcl_gen.kernels.choice import SPLIT_TERMS, embedding_parts
from infcl_gen.losses import Derivation, Sides, formulas_of, left_out, others_left_out, triton_code
from infcl_gen.losses.printers import Printer, p, pair_code, pair_code_of_small_y, pair_code_of_y, x
from infcl_gen.planning.candidates import PANEL_LIMIT
from infcl_gen.planning.planner import Plan
from infcl_gen.runtime.traits import Traits


def _clamped(places: str) -> str:
    return f"tl.minimum(tl.maximum({places}, -(2**30)), 2**30).to(tl.int32)"


_BIAS_OF_FACTOR = """bias = tl.load(bias_ptr)
    # An affine logit's gradients do not depend on the bias: the last term keeps one that is not finite."""
_ABOUT_MEAN = "Before that `mean` (D,) times its share is added to each row of total."
_ABOUT_SHARE = "SHARED: before all that each row of total is multiplied by its `share`."
_TIMES_SHARE = """\
if SHARED:
    value *= tl.load(share + r, mask=r < rows, other=0.0)[:, None]"""
_ADDED_MEAN = "value += {} * tl.load(mean + d, mask=d < DIM, other=0.0)[None, :]"
_NOWHERE = "tl.full((ROWS,), -(2**30), tl.int32)"
# A row or column of which a tile leaves out all has a sum of 0, and a reference that is a number.
_MASK = {
    "id_mask": 'id_mask = tl.where(left_out, float("-inf"), 0.0)',
    "row_reference_as_number": "row_reference = tl.maximum(row_reference, LOWEST)",
    "top_as_number": "top = tl.maximum(top, LOWEST)",
}
_LOWEST = "LOWEST = tl.constexpr(-(2.0**100))  # the reference of a row or column of which a tile leaves out all"
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
_WHY_POSITIVES = (
    ": its share is added in fp32, before g is rounded, or 1 - p would lose its digits.",
    " by that of `combine`.",
)
_ROWS_OF_POSITIVES = (
    "VECTOR_ROWS = tl.constexpr(32)  # rows, and columns of the embedding, of a program that walks positives"
)
_LOG2E = "LOG2E = tl.constexpr(1.4426950408889634)"
_INTERPRETED = "INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # without libdevice"
_OF_SOFTPLUS = """LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr({})  # a logit whose term and slope are 0 exactly"""
_ABOUT_POWERS = "Functions are evaluated from 2^-|x log2(e)|, which cannot overflow."
_ABOUT_POWERS_OF_SMALL = """\
An unmasked strip is computed from 2^{0}y, y = x log2(e), and again from 2^-|y|, which cannot overflow, where a
product of 1 + 2^{0}y over up to 32 pairs of a row is not below 2^126."""
_OF_SMALL = "LARGEST_GROWTH = tl.constexpr(2.0**126)  # from there on a quotient in 2 instructions is 0"
_LIBDEVICE = "from triton.language.extra import libdevice"
_QUOTIENT = """if INTERPRETED:
        quotient = dividend / divisor
    else:  # good to 2 roundings, in 2 instructions; `/` takes 4
        quotient = libdevice.fast_dividef(dividend, divisor)
    return quotient"""
_CALLED_BY = {"sigmoid": "sigmoid2", "softplus": "log_one_plus"}
_IN_BASE_2 = "slope, shift = slope * LOG2E, shift * LOG2E  # y = x log2(e): powers of 2 take no product with it"
_IDS_OF_ROWS = "ids_of_queries = tl.load(query_ids + rows, mask=rows < queries, other=0)"
_LEGEND_OF_TRIANGLE = """\
triangle            k is q on the rank's own rows: z_ij = z_ji is computed once, counts for both rows, and i != j.
                        DIAGONAL: rows and columns of a panel are the same"""
_LEGENDS_OF_POSITIVES = (
    "p_i                 mean of y over the n_i positives of row i, which are of its id",
    "p_i                 log-sum-exp over the positives of row i, which are of its id, as r_i; n_i is their number",
)
_LEGEND_OF_GUIDE = (
    "guide               y_ij log2(e), y_ij = u_i . v_j, of the features u (M, D) and v (N, D) of the guide"
)
_LEGENDS_OF_GUIDE = (
    f"""{_LEGEND_OF_GUIDE}
p_i                 mean of z over row i by the softmax of its guide, times the slope of the logit""",
    f"""{_LEGEND_OF_GUIDE}
tq_i, tk_j          means of z over row i and column j by the softmaxes of the guide over these, times the slope""",
)
_LEGENDS_OF_THRESHOLDS = (
    "thresholds          of z_ij of row i: pairs above it are left out of r_i",
    """\
guide               u_i . v_j, of the features u (M, D) and v (N, D) of the guide
thresholds          of the guide's similarities of row i: pairs above it are left out of r_i""",
)
_BELOW = 'below = tl.where(DIAGONAL & (rows[:, None] >= columns[None, :]), float("-inf"), 0.0)'
_BELOW_OF_SIDES = f"""{_BELOW}
of_rows = tl.where(out_of_rows, float("-inf"), below)
of_columns = tl.where(out_of_columns, float("-inf"), below)"""
LABELLED = "tl.load(labels + rows, mask=rows < queries, other=-1) - first_key"
_TO_COLUMNS = "column_places = tl.load(key_labels + columns, mask=columns < keys, other=-1) - first_query"
_TO_ROWS = f"row_places = {LABELLED}"
# Of a pair's rows the first comes before its positive.
_FIRST_COLUMNS = "column_first = (column_places > columns + (first_key - first_query))[None, :]"
_FIRST_ROWS = "row_first = (row_places > rows + (first_query - first_key))[:, None]"
_PLACES_OF_COLUMNS = f"{_TO_COLUMNS}\ncolumn_places = {_clamped('column_places')}"
_COLUMN_THRESHOLDS = "column_thresholds = tl.load(key_thresholds + columns, mask=columns < keys, other=0.0)"
_ROW_THRESHOLDS = "row_thresholds = tl.load(thresholds + rows, mask=rows < queries, other=0.0)"
_OF_ROWS = Sides("row_first", "(row_first == 0)", "column_first", "(column_first == 0)")
_OF_COLUMNS = Sides(*_OF_ROWS[2:], *_OF_ROWS[:2])
_ABOVE_OF_SIDES = "(z > row_thresholds[:, None])", "(z > column_thresholds[None, :])"
_LEGEND_OF_SIDES = """\
sides               a row is the first of its pair, or the second, as its positive comes after it, or before it.
                        Pairs of some sides are left out of r_i"""
_OWN_SHARE = "lacking({0}s, here, z, {1}, {2}_exponent, {2}_mantissa, slope)"
_OWN_G = "QUERY_SHARE * tl.load({1} + {0}s, mask=here, other=0.0)"
SLAB_WIDE_NUMBERS = 1024  # of a tile that is computed again, beside statistics of all prefixes


def kernels_context(name: str, plan: Plan, derivation: Derivation, profile: DeviceProfile) -> dict[str, Any]:
    """The names in the kernels' templates of the package `name`; variants add `Family.values`."""
    if derivation.slope is None or derivation.shift is None:
        raise ValueError("kernels are for affine logits")
    formulas, blocks, both_axes = formulas_of(derivation), plan.blocks, plan.both_axes
    is_fused, keeps_keys = plan.strategy == "fused", forward.keeps_keys(blocks["forward"], plan)
    unit, of_pairs = 2.0 ** gradient_exponent(plan, derivation), plan.traits.pairs
    gradient_factor, dscale_factor = triton_code(derivation.gradient_factor), triton_code(derivation.dscale_factor)
    # A key term is linear in p: the part with p is the positive's.
    with_positive = derivation.key_term.diff(p) * p
    without_positive = (derivation.key_term - with_positive).expand()
    widths = embedding_parts(plan.inner_dim)
    parts = parts_of(widths)
    why = "of the embedding: tiles are powers of two, and a whole one would be padded to the next"
    part_widths = f"PART_WIDTHS = {list(widths)}  # {why}"
    load_scale, inner = "scale = tl.load(scale_ptr)", "INNER" if plan.split else "DIM"
    sampled = "a sample (forward) or of the complete statistics (backward)"
    of_plan = (
        "both_axes", "labels", "split", "stash", "rows", "at_once", "keeps_tiles", "descriptors", "dim",
        "input_precision",
    )  # fmt: skip
    return {field: getattr(plan, field) for field in of_plan} | {
        "name": name,
        "fused": is_fused,
        "sums_of_keys": plan.traits.has_keys,
        "by_blocks": not plan.rows,
        "triangle": plan.traits.triangle,
        "largest_of_sample": "largest_of_others" if plan.traits.triangle else "smallest_or_largest",
        "ifs_of_smallest": "elif" if plan.traits.triangle else "if",
        "summed_columns": "(columns < keys) & (columns > diagonal_row)" if plan.traits.triangle else "columns < keys",
        # Legend of the file.
        "loss_formula": formulas["loss"],
        "gradient_formula": formulas["dL/dx"],
        "unit_of_g": "M" if unit == 1 else f"M * 2^{math.frexp(unit)[1] - 1} (fp16 would underflow)",
        "walkers": "pairs and pair_terms" if of_pairs else "the forward" if is_fused else "forward and gradient",
        "reference_of": sampled
        if both_axes and not plan.traits.guided_sides
        else "a sample (the backward takes each row's own)",
        "summed_sides": "queries and keys" if plan.traits.has_keys else "queries",
        "reduced_along": "both axes" if both_axes else "its row",
        "formula_of_g": "share_i 2^(y - r_i)"
        + " + b_i 2^(guide - its log-sum-exp)" * (plan.traits.by_guide and not plan.traits.guided_sides)
        + f" + share_j 2^(y - {'r' if plan.traits.triangle else 'c'}_j)" * both_axes
        + ", and the same of MULTIPLE y" * plan.traits.second
        + ", and shares of 2^(guide - its log-sum-exps)" * plan.traits.guided_sides,
        "out_of_range": "most > LARGEST_SUM" if plan.rows else "(least < SMALLEST_SUM) | (most > LARGEST_SUM)",
        "library_of_functions": ABSENT,
        # Constants.
        "inner": inner,  # depth of a similarity, as a constant of the file
        "depth_of_positives": "width" if plan.slabs else inner,
        "columns_of_product": "width" if plan.slabs else "DIM",
        **_slab_context(plan, derivation, unit),
        "split_terms": SPLIT_TERMS,
        "constants": _constants(plan, derivation, profile, unit),
        "part_widths": part_widths if is_fused or keeps_keys else ABSENT,  # of descriptors
        "key_lanes": forward.key_lanes(blocks["forward"], plan, profile),
        "query_share": derivation.query_share * unit,
        # The derived mathematics.
        "slope": triton_code(derivation.slope),  # of the logit in z, in `scale`
        "shift": triton_code(derivation.shift),
        "gradient_factor": gradient_factor,
        "scale_of_factor": load_scale if "scale" in gradient_factor else ABSENT,
        "times_dscale_factor": "" if derivation.dscale_factor == 1 else f" * ({dscale_factor})",
        "scale_of_dscale_factor": load_scale if "scale" in dscale_factor else ABSENT,
        "bias_of_factor": ABSENT if of_pairs else _BIAS_OF_FACTOR,
        "plus_bias": "" if of_pairs else " + bias * 0.0",
        "plus_mean": f" {'-' if derivation.mean_share < 0 else '+'} {abs(derivation.mean_share)}"
        * (plan.traits.means or plan.traits.weighted),
        "about_mean": _ABOUT_MEAN if plan.traits.means else ABSENT,
        "about_share": _ABOUT_SHARE if plan.rows else ABSENT,
        "times_share": _TIMES_SHARE if plan.rows else ABSENT,
        "added_mean": _ADDED_MEAN.format(derivation.mean_share * unit) if plan.traits.means else ABSENT,
        "undo_exponent": "" if unit == 1 else f" * {1 / unit}",
        "dbias": float(derivation.dbias) * derivation.total_weight,
        "query_term": triton_code(derivation.query_term),  # in `r`, `p`
        "key_term_without_positive": triton_code(without_positive),  # in `c`
        "key_positive_term": triton_code(with_positive),  # in `p`
        "plus_positive_rest": " + POSITIVE_REST" if derivation.positive_rest else "",
        "sum_of_shares": "(a[:, None] + b[None, :])" if both_axes else "a[:, None]",  # of a tile
        **_header_context(plan),
        **_class_context(plan),
        **_combined_context(plan, derivation),
        **_several_context(plan),
        **_second_context(plan),
        **_guided_context(plan),
        **_sides_of_positives(plan),
        "sums_slopes": plan.traits.sums_slopes,
        "dscale_rest": triton_code(derivation.dscale_rest),
        "dbias_factor": triton_code(derivation.dbias_factor),
        "scalars": "scalars_of_rows" if plan.traits.combined else "scalars_of_pairs",
        "why_positives": _WHY_POSITIVES[plan.traits.combined],
        **(_pair_context(plan, derivation, unit) if of_pairs else {}),
        # Where positives are, and lists of arguments.
        "positive_columns": LABELLED if plan.labels else "rows.to(tl.int64) + first_positive - first_key",
        "positive_references": "positive_row_reference" + ", positive_key_reference" * both_axes,
        "statistics": "query_exponent, query_mantissa" + ", key_exponent, key_mantissa" * both_axes,
        # The parts of the embedding, the sides of fused, and the pieces that are chosen.
        "parts": parts,
        "kept_parts": parts if keeps_keys else [],  # where the forward keeps its keys
        "whole": parts_of([blocks["fused"].depth]) if is_fused else [],
        "sides": _sides(plan.labels),
        # Two products in its body are pipelined one after the other.
        "blocks_of_strip": f"{'' if plan.traits.guide else 'tl.'}range(first_block, stop_block"
        + ", flatten=True)" * (not plan.traits.guide)
        + ")" * plan.traits.guide,
        "each_tile": "each_tile_of_kept_keys" if keeps_keys else "each_tile",
        "kept_tile": "kept_tile_by_descriptor" if plan.descriptors else "kept_tile",
        "stored_tile_of_g": "g_as_halves" if plan.split else "g_as_one",
        "stored_positives": "positives_as_halves" if plan.split else "positives_as_one",
        "each_first_block": "each_block" if plan.labels else "each_first_block",
        # Defaults, which a template that includes a piece may change.
        "tile_rows": "GRADIENT_ROWS",
        "tile_keys": "GRADIENT_KEYS",
        "tile_key0": "key0",
        "visiting_keys": "FUSED_KEYS",
        "described": "DESCRIPTORS",
    }


_ABOUT_G_OF_PREFIX = (
    "Of each prefix g = share_i 2^(y - r_i){}. No exponent is large, as no term is above its sum: nothing is flagged.",
    """Of each prefix g = 2^(y - reference) * (a_i + b_j): both softmaxes share one exponential. `ratios` has prepared
    the statistics of keys: b_j relative to the block's reference, 0 beyond the last key. The flag is up if a row or key
    of any prefix lies more than SPREAD below its reference.""",
)


_POSITIVES_FOLLOW = "Positives get the g of a negative; `gradient_positives`\n    follows."
_POSITIVES_FIRST = """Positives get theirs from
    `gradient_positives`. Radial sums, of g times the cosine, go to memory tile by tile: of rows (key blocks, prefixes,
    rows), of keys (row blocks, prefixes, keys). Then g is multiplied by the factors. MASKED: the panel has ragged
    tiles, whose terms are cleared."""
_MASKED_E = """\
if MASKED:
    e = tl.where(rows < queries, e, float("inf"))"""
_MASKED_SHIFT = """\
shift = -reference_{0}
if MASKED:
    shift = tl.where(rows < queries, shift, float("-inf"))[:, None]"""
_CLEARED = """\
if MASKED:
    value = tl.where((tl.arange(0, GRADIENT_KEYS) < keys - key0)[None, :], value, 0.0)"""
_INSIDE = "tl.where((rows < queries)[:, None] & (columns < keys)[None, :], {0}, 0.0)"


def _slab_context(plan: Plan, derivation: Derivation, unit: float) -> dict[str, Any]:
    """The slabs of columns of a loss over prefixes, with the shares of the prefix that ends there."""
    renormalised = plan.traits.renormalised
    own = {"renormalised": renormalised}
    if not plan.traits.slabs:
        return own | {"times_prefixes": "", "place_of_ratio": "ratio + r", "about_prefixes": ABSENT}
    both, shared, combined = plan.both_axes, plan.one_exponential, plan.traits.combined
    apart = both and not shared  # each side has an exponential of its own, and no mask
    noted = ("positive_z", "positive_row_reference", *["positive_key_reference"] * both)
    sums = ("query_exponent + own", "query_mantissa + own", *["key_exponent + other", "key_mantissa + other"] * both)
    shares = {"weight": 1.0, "query_share": derivation.query_share * unit, "key_share": derivation.key_share * unit}
    slabs = [
        slab._asdict()
        | {name: share * weight for name, share in shares.items()}
        | {"last_step": f"== {slab.stop}"}
        | {name: f"{name}_{slab.stop}, " * both for name in ("lane_sums", "first_sums", "last_sums")}
        | {"shift": "shift" if renormalised else f"-reference_{slab.stop}"}
        | {"masked_shift": _MASKED_SHIFT.format(slab.stop) if renormalised else ABSENT}
        for slab, weight in zip(plan.slabs, derivation.prefix_weights, strict=True)
    ]
    slabs[-1]["last_step"] = ">= DIM"  # the last step may reach beyond the features
    return own | {
        "tile": "cosines" if renormalised else "z",
        "fp32_tile": "cosines" if renormalised else "z.to(tl.float32)",
        "wide_tile": "slab_cosines" if renormalised else "slab_fp32",
        "about_positives_of_slabs": _POSITIVES_FIRST if renormalised else _POSITIVES_FOLLOW,
        "places_of_rows_as_int32": _clamped("own_places"),
        "cleared": f"if MASKED:\n    value = {_INSIDE.format('value')}" if apart else _CLEARED,
        "masked_e": _MASKED_E if renormalised else ABSENT,
        "always_cleared": f"g_{{0}} = {_INSIDE.format('g_{0}')}",
        "slabs": slabs,
        "share_of_prefix": hopper_slabs.code_by_prefix([slab["query_share"] for slab in slabs], in_a_term=True),
        "longest_first": slabs[::-1],
        "g_of_slab": "slab_g_of_both" if shared else "slab_g_of_sides" if apart else "slab_g_of_queries",
        "visiting_keys_of_slabs": "visiting_keys = tl.minimum(columns, keys - 1)" if apart else ABSENT,
        "of_slab": "value",
        "other_of_slab": "other = {} * key_stride" if both and not combined else ABSENT,
        "g_of_positive": "slab_positive_of_row" if combined else "slab_positive_gradient",
        "about_g_of_prefix": _ABOUT_G_OF_PREFIX[shared].format(" + share_j 2^(y - c_j)" * both),
        "lane_sums": "lane_sums, " * both,
        "about_lane_sums": ", those of a column to lane_sums" * both,
        "prefixes": len(plan.slabs),
        "times_prefixes": f" * {len(plan.slabs)}",
        "place_of_ratio": f"ratio + block * {len(plan.slabs)} * ROWS + tl.arange(0, ROWS)",
        "about_prefixes": "A block has those of all prefixes; the pointers are to the first block's of one.",
        "one_exponential": plan.one_exponential,
        "unaligned_references": ["key_reference", "key_lowest"] * plan.one_exponential,
        "positive_references_of_slab": ", ".join(f"{name} + own" for name in noted),
        "statistics_of_slab": ", ".join(sums),
    }


def _header_context(plan: Plan) -> dict[str, Any]:
    """The pieces of header.py.jinja, and what they read."""
    traits = plan.traits
    if traits.pairs:
        return {
            "legend": "legend_of_pairs", "range": "range_of_pairs", "helpers": "helpers_of_pairs",
            "about_flags": "A program adds to its own part of the sums.",
        }  # fmt: skip
    kind = "exact" if plan.exact else "of_rows" if plan.rows else "of_blocks"
    return {
        "legend": "legend_of_sums",
        "legend_of_key_sums": "c_j                 log-sum-exp of column j, likewise" if traits.has_keys else ABSENT,
        "legend_of_triangle": _LEGEND_OF_TRIANGLE if traits.triangle else ABSENT,
        "about_flags": "A program writes its own flag, always, so flags need no clearing.",
        "range": f"range_{kind}",
        "helpers": "helpers_of_sums",
        "lowest": _LOWEST if traits.masked or traits.triangle or traits.softmax_of_positives else ABSENT,
        "legend_of_positives": _LEGENDS_OF_GUIDE[traits.guided_sides]
        if traits.by_guide
        else _LEGENDS_OF_POSITIVES[traits.softmax_of_positives]
        if traits.several
        else ABSENT,
        "legend_of_thresholds": _LEGENDS_OF_THRESHOLDS[traits.guide] if traits.thresholds else ABSENT,
        "legend_of_second": "r2_i                log-sum-exp of MULTIPLE * x over row i, likewise"
        if traits.second
        else ABSENT,
        "sampled": not plan.exact,
        "references": f"references_{kind}",
    }


def _class_context(plan: Plan) -> dict[str, Any]:
    """What tells a tile the classes of its pairs."""
    ids, triangle = plan.traits.ids_in_tiles, plan.traits.triangle
    offset, placed = f"offset = {_clamped('first_positive - first_key - key0')}", plan.traits.placed
    return {
        "placed": placed,
        "ids": ids,
        "ids_of_rows": _IDS_OF_ROWS if ids else ABSENT,
        "masked": plan.traits.masked,
        "in_sums": placed and not plan.traits.without_positives,
        "which_are_left_out": left_out(
            plan.traits.classes, "same_id", "is_positive", "(is_positive == 0)", "above", " & ", " | "
        ),
        "thresholds": plan.traits.thresholds,
        "guide": plan.traits.guide,
        "compared": "guide" if plan.traits.guide else "z",
        **_masks_of_sides(plan),
        **{name: text if plan.traits.masked or triangle else ABSENT for name, text in _MASK.items()},
        **({"id_mask": _BELOW_OF_SIDES if plan.traits.masked else _BELOW} if triangle else {}),
        # A tile's column of each row's positive, as an int32; any number that is no column where there is none.
        "offset_of_places": ABSENT if plan.labels or not placed else offset,
        "places_of_tile": _clamped(f"{LABELLED} - key0") if plan.labels else "rows + offset" if placed else _NOWHERE,
    }


def _masks_of_sides(plan: Plan) -> dict[str, Any]:
    """The terms of a tile that enter the sums of its rows, and of its columns: of a triangle each has its own mask."""
    apart = plan.traits.masked and plan.traits.triangle
    paired = apart and plan.traits.own_references
    both = " + id_mask" if plan.traits.masked else " + below" * plan.traits.triangle
    return {
        "left_out": "left_out_of_pairs" if paired else "left_out_of_sides" if apart else "left_out",
        "kept_terms": "kept_terms_of_sides" if apart else "kept_terms",
        "row_terms": "row_terms" if apart else "p",
        "column_terms": "column_terms" if apart else "p",
        "plus_row_mask": " + of_rows" if apart else both,
        "plus_column_mask": " + of_columns" if apart else both,
        "places_of_columns": _PLACES_OF_COLUMNS if apart and not paired else ABSENT,
        "places_of_rows": LABELLED,
        "places_as_int32": _clamped("row_places"),
        **_sides_of_pairs(plan.traits, paired),
    }


def _sides_of_pairs(traits: Traits, paired: bool) -> dict[str, Any]:
    """What a triangle's tiles have of thresholds and sides, where rows are pairs: by rows and by columns."""
    by_side, above = paired and traits.by_side, paired and traits.thresholds
    others = [
        " | ".join(others_left_out(traits.classes, "same_id", text, " & ", sides))
        for text, sides in zip(_ABOVE_OF_SIDES, (_OF_ROWS, _OF_COLUMNS), strict=True)
    ]
    which = [
        left_out(traits.classes, "same_id", "is_positive", "(is_positive == 0)", text, " & ", " | ", sides)
        for text, sides in zip(_ABOVE_OF_SIDES, (_OF_ROWS, _OF_COLUMNS), strict=True)
    ]
    return {
        "apart_by_rows": paired,
        "above_rows": traits.thresholds and not paired,
        "key_softmax": "kept_of_columns" if paired else "key_softmax",
        "legend_of_sides": _LEGEND_OF_SIDES if by_side else ABSENT,
        "first_columns": f"{_TO_COLUMNS}\n{_FIRST_COLUMNS}" if by_side else ABSENT,
        "column_thresholds": _COLUMN_THRESHOLDS if above else ABSENT,
        "first_rows": _FIRST_ROWS if by_side else ABSENT,
        "row_thresholds": _ROW_THRESHOLDS if above else ABSENT,
        "rows_of_sides": _TO_ROWS if by_side else ABSENT,
        "left_out_of_rows": which[0], "left_out_of_columns": which[1],
        "others_of_rows": others[0], "others_of_columns": others[1],
    }  # fmt: skip


def _sides_of_positives(plan: Plan) -> dict[str, str]:
    """What a triangle's kernel reads of positives, which are pairs of rows and of columns."""
    combined = plan.traits.combined
    share, z = (_OWN_G, "kept_z") if combined else (_OWN_SHARE, "positive_z")
    noted = ("positive_g", "key_positive_g") if combined else ("positive_row_reference", "key_positive_reference")
    return {
        "z_of_rows": z,
        "share_of_rows": share.format("row", noted[0], "query"),
        "share_of_columns": share.format("column", noted[1], "key"),
    }


def _pair_context(plan: Plan, derivation: Derivation, unit: float) -> dict[str, Any]:
    """What the templates of a sum over pairs read. Terms and slopes are printed as tensors like `x`.

    Sweeps of a sum of softplus take y = x log2(e).
    """
    term, slope = derivation.form.pair_term, derivation.pair_slope
    assert term is not None and slope is not None

    def of_tile(expression: Expr, factor: float = 1.0, of: str = "x", printed: Printer = pair_code) -> str:
        code = printed(expression, {"x": of})
        code = code if factor == 1 else f"{factor} * ({code})"
        return f"{code} + 0.0 * {of}" if expression.is_number else code

    weight, _ = term.other.as_coeff_Mul()
    sign = derivation.softplus_sign
    traits = plan.traits
    placed, ids, whole = traits.placed, traits.ids, traits.softplus
    minus = "-" if sign < 0 else ""
    logit, at_y, of_logit = ("y", ", at y = x log2(e)", pair_code_of_y) if whole else ("x", "", pair_code)
    pairs_by_class = ["of a query and its positive"] * placed + ["of its id"] * ids + ["of another key"]
    other = "a key of another id" if ids else "a key that is not its positive"
    same = "a key of its id" + ", but no positive" * placed
    own = """ A positive's own term takes the place of what
it would be as another key: the difference of two sums would lose it."""
    times_unit = "" if unit == 1 else ", times the unit of g"
    slopes_of = of_tile(slope.other, unit, logit, of_logit)
    small_slopes_of = of_tile(slope.other, unit, "y", pair_code_of_small_y)
    of_classes = [
        ("terms_of", f"h(x) of a query and {other}.", of_tile(term.other), not whole),
        ("positive_terms_of", "h(x) of a query and its positive.", of_tile(term.positive), placed),
        ("slopes_of", f"h'(x) of a query and {other}{times_unit}{at_y}.", slopes_of, True),
        ("small_slopes_of", f"The same of {minus}y below 126.", small_slopes_of, traits.small_first),
        (
            "positive_slopes_of",
            f"h'(x) of a query and its positive{times_unit}.",
            of_tile(slope.positive, unit),
            placed,
        ),
        ("same_id_terms_of", f"h(x) of a query and {same}.", of_tile(term.same_id), ids and not whole),
        (
            "same_id_slopes_of",
            f"h'(x) of a query and {same}{times_unit}.",
            of_tile(slope.same_id, unit),
            ids and not whole,
        ),
    ]
    functions = _functions((value for *_, value, used in of_classes if used), ["log_one_plus"] * whole)
    constants = [_LOG2E] * (whole or bool({"sigmoid", "softplus"} & set(functions)))
    constants += [_INTERPRETED] * ("sigmoid2" in functions) + [_OF_SOFTPLUS.format(-1e30 * sign)] * whole
    constants += [_OF_SMALL] * traits.small_first
    softplus_terms = "terms_by_size" if traits.small_first else "softplus_terms"
    # In a sum of softplus, pairs of one id have the terms of other pairs at another logit.
    at = {x: "y", -x: "-y", -sympy.oo: "NOTHING", None: ""}[derivation.same_id_logit]
    slopes = "same_id_slopes_of(x)" if not whole else "-value" if at == "-y" else ""
    by_class = {
        "ids_of_tile": (_IDS_OF_ROWS, True),
        "logit_of_same_id": (f"y = tl.where(same_id, {at}, y)", whole),
        "terms_of_same_id": ("terms = tl.where(same_id, same_id_terms_of(x), terms)", not whole),
        "slopes_of_same_id": (f"value = tl.where(same_id, {slopes}, value)", bool(slopes)),
    }
    return {
        "classes_of_pairs": ", or ".join(filter(None, (", ".join(pairs_by_class[:-1]), pairs_by_class[-1]))),
        "about_positives": own * placed,
        "about_powers": _ABOUT_POWERS_OF_SMALL.format(minus) if traits.small_first else _ABOUT_POWERS,
        "positives_or": "positives or " * placed,
        "within": "tl.arange(0, PART) < keys - key0 - first",
        "functions_of_pairs": [
            {
                "name": name,
                "of": logit if name in ("slopes_of", "small_slopes_of") else "x",
                "what": what,
                "value": value,
            }
            for name, what, value, used in of_classes
            if used
        ],
        "rows_of_vectors": _ROWS_OF_POSITIVES if placed else ABSENT,
        "depth_of_vectors": "VECTOR_DEPTH = tl.constexpr(128)" if placed else ABSENT,
        "functions": functions,
        "quotient": _QUOTIENT,
        "library_of_functions": _LIBDEVICE if "sigmoid2" in functions else ABSENT,
        "constants_of_functions": "\n".join(constants) or ABSENT,
        "in_base_2": _IN_BASE_2 if whole else ABSENT,
        "logit": logit,
        **{name: text if ids and used else ABSENT for name, (text, used) in by_class.items()},
        "of_softplus": whole,
        "small_first": traits.small_first,
        "softplus_sign": minus,
        "times_terms": f"{float(weight)} * " if sign and weight != 1 else "",
        "pairs_that_count": "counted_logits" if whole else "counted_pairs",
        "terms_of_part": softplus_terms if whole else "terms_of_classes",
        "slopes_of_y": "slopes_of(y)" + " if LARGE else small_slopes_of(y)" * traits.small_first,
        "slopes_of_part": "softplus_slopes" if whole else "slopes_of_classes",
        "sweeps": [
            each
            | {
                "follows": f" Those of positives are left out: `{each['positives']}` follows." * placed,
                "grown": whole and each["terms"],
                "summed": not each["of_rows"],
                "times_factor": "value *= factor[:, None]" if each["weighed"] else ABSENT,
                "times_factors": " * tl.load(factors + rows, mask=here, other=0.0)" * each["weighed"],
            }
            for each in pairs.sweeps(plan)
        ],
    }


def _combined_context(plan: Plan, derivation: Derivation) -> dict[str, Any]:
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
        "functions": (functions := _functions(statements)),
        "of_functions": bool(functions),
        "quotient": "return dividend / divisor",
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


def _functions(codes: Iterable[str], others: Sequence[str] = ()) -> tuple[str, ...]:
    """The functions of pieces/functions.py.jinja that codes call, the others, and what these call."""
    name = r"(?<![.\w])((?:small_)?sigmoid2?|softplus)\("
    called = {*others, *(found for code in codes for found in re.findall(name, code))}
    called |= {_CALLED_BY[name] for name in called & _CALLED_BY.keys()}
    return tuple(sorted(called))


def _columns(plan: Plan) -> dict[str, str]:
    """What `combine` has of the sums over queries of a query's positives."""
    texts = _COLUMNS_OF_IDS if plan.traits.columns_of_ids else _COLUMNS
    return {name: text if plan.traits.crossed else ABSENT for name, text in texts.items()}


def _several_context(plan: Plan) -> dict[str, Any]:
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


def _second_context(plan: Plan) -> dict[str, Any]:
    """What the kernels of a loss with a second log-sum-exp of each query read."""
    traits, both = plan.traits, plan.both_axes
    mantissa = "second_mantissa + i, {}, mask=i < queries"
    divided = "sum_of_second / second_weight"
    r2, empty, columns = _SECOND_OF_QUERY, ABSENT, _masks_of_sides(plan)["column_terms"]
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


def _guided_context(plan: Plan) -> dict[str, Any]:
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


def _constants(plan: Plan, derivation: Derivation, profile: DeviceProfile, unit: float) -> list[tuple[str, float, str]]:
    """Name, value and comment (or "") of the constants that differ between packages."""
    blocks, is_fused, rest = plan.blocks, plan.strategy == "fused", derivation.positive_rest * unit
    of_pairs, (of_keys, of_queries) = plan.traits.pairs, derivation.guide_shares
    walked_rows = [blocks[kernel].rows for kernel in ("forward", "gradient") if kernel in blocks]
    lanes, wide_rows = forward.key_lanes(blocks["forward"], plan, profile), profile.architecture.recomputed_rows
    wide_rows = min(wide_rows, *walked_rows)
    if plan.slabs:
        wide_rows = max(
            16, min(wide_rows, SLAB_WIDE_NUMBERS // max(blocks[name].keys for name in ("forward", "gradient")))
        )
    found: list[tuple[str, float, str, bool]] = [
        ("DIM", plan.dim, "", True),
        ("INNER", plan.inner_dim, "depth of a similarity: one DIM for each term", plan.split),
        ("KEY_LANES", lanes, "a program's sums over queries, kept apart by lane until a strip is done", plan.both_axes),
        ("WIDE_ROWS", wide_rows, "at a time where a strip is computed again",
         not plan.exact and not of_pairs),
        ("FUSED_WIDE_KEYS", fused.wide(profile, blocks["fused"])[0] if is_fused else 0, "", is_fused),
        ("QUERY_SHARE", derivation.query_share * unit, "", not of_pairs),
        ("KEY_SHARE", derivation.key_share * unit, "", plan.both_axes),
        ("GUIDE_SHARE", of_keys * unit, "of the guide's softmax over keys", plan.traits.guided_sides),
        ("KEY_GUIDE_SHARE", of_queries * unit, "of that over queries", plan.traits.guided_sides),
        ("MULTIPLE", float(derivation.form.multiple), "of the logits in the second log-sum-exps", plan.traits.second),
        ("POSITIVE_REST", rest, "of a positive's g, where the shares do not cancel", rest != 0 and plan.traits.placed),
        ("MIRROR_ROWS", _mirrored_rows(plan), "of a square of g that is turned", plan.traits.triangle),
        ("PLACE_BITS", PANEL_LIMIT.bit_length(), "of a number of places in a panel", plan.traits.sorted_ids),
    ]  # fmt: skip
    for kernel, block in blocks.items():
        for field in ("rows", "keys", "depth"):
            own = field != "keys" or kernel not in ("positive", "finish")  # these have no keys of their own
            found.append((f"{kernel}_{field}".upper(), getattr(block, field), "", own))
    return [(name, value, note and f"  # {note}") for name, value, note, wanted in found if wanted]


def _mirrored_rows(plan: Plan) -> int:
    """At most those of a tile of g: what a tile on the diagonal leaves out must lie in other squares."""
    block = plan.blocks.get("gradient")
    return min(64, block.rows, block.keys) if block else 0


def gradient_exponent(plan: Plan, derivation: Derivation) -> int:
    """The power of 2 that scales gradients of logits, of order 1/M: fp16 would underflow, or overflow beyond 65 504."""
    if plan.dtype != "fp16" or plan.strategy == "torch":
        return 0
    return 14 - math.ceil(math.log2(derivation.largest_slope))


def _sides(labels: bool) -> tuple[dict[str, str], dict[str, str]]:
    """The two fused sweeps: the side whose rows a program owns, and the other side, which it walks.

    own              begins the names of the side's statistics
    product          what is added to the total
    sign             of the positive's place against the own row's
    place            expression: the other side's row that is each own row's positive
    row_of_positive  expression: the query of each positive
    """
    offset = "(first_positive - first_key)"
    queries = {
        "owned": "queries", "own": "query", "features": "q", "strides": "q_row_stride, q_depth_stride",
        "share": "QUERY_SHARE", "product": "g k", "sign": "+",
        "place": LABELLED if labels else f"rows + {offset}", "row_of_positive": "own_rows",
    }  # fmt: skip
    keys = {
        "owned": "keys", "own": "key", "features": "k", "strides": "k_row_stride, k_depth_stride",
        "share": "KEY_SHARE", "product": "g^T q", "sign": "-",
        "place": f"rows - {offset}", "row_of_positive": "tl.maximum(target, 0)",
    }  # fmt: skip
    names = {"others": "owned", "other": "own"} | {f"other_{x}": x for x in ("features", "strides", "share")}
    for side, other in ((queries, keys), (keys, queries)):
        side |= {name: other[of_other] for name, of_other in names.items()}
    return queries, keys
