"""What templates of kernels read: literals, printed expressions, and the names of the pieces that they include."""

from __future__ import annotations

import math
from typing import Any

from infcl_gen.emission.class_context import LABELLED, class_context
from infcl_gen.emission.combined_context import combined_context, guided_context, second_context, several_context
from infcl_gen.emission.pairs_context import pairs_context
from infcl_gen.emission.render import ABSENT
from infcl_gen.emission.slabs_context import slabs_context
from infcl_gen.hardware import DeviceProfile
from infcl_gen.kernels import forward, fused
from infcl_gen.kernels.arguments import parts_of
from infcl_gen.kernels.choice import SPLIT_TERMS, embedding_parts
from infcl_gen.losses import Derivation, formulas_of, triton_code
from infcl_gen.losses.printers import p
from infcl_gen.planning.candidates import PANEL_LIMIT
from infcl_gen.planning.planner import Plan

_BIAS_OF_FACTOR = """bias = tl.load(bias_ptr)
    # An affine logit's gradients do not depend on the bias: the last term keeps one that is not finite."""
_ABOUT_MEAN = "Before that `mean` (D,) times its share is added to each row of total."
_ABOUT_SHARE = "SHARED: before all that each row of total is multiplied by its `share`."
_TIMES_SHARE = """\
if SHARED:
    value *= tl.load(share + r, mask=r < rows, other=0.0)[:, None]"""
_ADDED_MEAN = "value += {} * tl.load(mean + d, mask=d < DIM, other=0.0)[None, :]"
_STRIPS = """\
Strips. A program of {} owns a block of keys and walks a strip of row blocks: what belongs to its
keys stays in registers."""
_STRIPS_OF_ROWS = """\
Strips. A program of the forward owns a block of queries and walks a strip of key blocks: sums of its rows stay in
registers. A program of the gradient owns a block of keys and walks a strip of row blocks."""
_LOWEST = "LOWEST = tl.constexpr(-(2.0**100))  # the reference of a row or column of which a tile leaves out all"
_WHY_POSITIVES = (
    ": its share is added in fp32, before g is rounded, or 1 - p would lose its digits.",
    " by that of `combine`.",
)
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
        "both_axes", "labels", "split", "stash", "at_once", "descriptors", "dim",
        "input_precision",
    )  # fmt: skip
    return {field: getattr(plan, field) for field in of_plan} | {
        "name": name,
        "fused": is_fused,
        "sums_of_keys": plan.traits.has_keys,
        "triangle": plan.traits.triangle,
        "largest_of_sample": "largest_of_others" if plan.traits.triangle else "smallest_or_largest",
        "ifs_of_smallest": "elif" if plan.traits.triangle else "if",
        "summed_columns": "(columns < keys) & (columns > diagonal_row)" if plan.traits.triangle else "columns < keys",
        # Legend of the file.
        "loss_formula": formulas["loss"],
        "gradient_formula": formulas["dL/dx"],
        "unit_of_g": "M" if unit == 1 else f"M * 2^{math.frexp(unit)[1] - 1} (fp16 would underflow)",
        "about_strips": _STRIPS_OF_ROWS
        if plan.rows
        else _STRIPS.format(
            "pairs and pair_terms" if of_pairs else "the forward" if is_fused else "forward and gradient"
        ),
        "keys_of_part": "(FORWARD_KEYS * strip)" if plan.rows else "FORWARD_KEYS",
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
        "library_of_functions": ABSENT,
        # Constants.
        "inner": inner,  # depth of a similarity, as a constant of the file
        "depth_of_positives": "width" if plan.slabs else inner,
        "columns_of_product": "width" if plan.slabs else "DIM",
        **slabs_context(plan, derivation, unit),
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
        **class_context(plan),
        **combined_context(plan, derivation),
        **several_context(plan),
        **second_context(plan),
        **guided_context(plan),
        **_sides_of_positives(plan),
        "sums_slopes": plan.traits.sums_slopes,
        "dscale_rest": triton_code(derivation.dscale_rest),
        "dbias_factor": triton_code(derivation.dbias_factor),
        "tiny_first": False,
        "scalars": "scalars_of_rows" if plan.traits.combined else "scalars_of_pairs",
        "why_positives": _WHY_POSITIVES[plan.traits.combined],
        **(pairs_context(plan, derivation, unit) if of_pairs else {}),
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
        "part_of_sums": "key_block",  # the number of a row's partial sum
        "tile_rows": "GRADIENT_ROWS",
        "tile_keys": "GRADIENT_KEYS",
        "tile_key0": "key0",
        "visiting_keys": "FUSED_KEYS",
        "described": "DESCRIPTORS",
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
