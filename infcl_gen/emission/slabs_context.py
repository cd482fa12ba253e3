"""What templates of kernels read of losses over prefixes: the slabs of columns, and the shares of their prefixes."""

from __future__ import annotations

from typing import Any

from infcl_gen.emission.class_context import clamped
from infcl_gen.emission.render import ABSENT
from infcl_gen.kernels import hopper_slabs
from infcl_gen.losses import Derivation
from infcl_gen.planning.planner import Plan

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


def slabs_context(plan: Plan, derivation: Derivation, unit: float) -> dict[str, Any]:
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
        | {"lane_sums": f"lane_sums_{slab.stop}, " * both, "key_sums": f"sums_{slab.stop}, " * both}
        | {"factors": f"row_factors, column_factors, {slab.number}, " * renormalised}
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
        "places_of_rows_as_int32": clamped("own_places"),
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
