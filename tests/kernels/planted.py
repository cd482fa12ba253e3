"""Bugs that contrastive losses have had, each as an edit of a generated package, and the check that must notice it.

An edit names a file of the package, text that is in it, and what replaces it everywhere there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infcl_gen.verification.properties import Case
from tests.kernels import checks, pieces
from tests.kernels.packages import Made, generated

Edit = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Bug:
    """`check(made, *arguments)` must pass, and with the edits fail with a message that contains `says`."""

    made: Made
    edits: tuple[Edit, ...]
    check: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    says: str = ""


def edited(bug: str, edits: tuple[Edit, ...], package: Path) -> dict[str, str]:
    """What the edits make of files of the package in this folder. Raises LookupError where they find nothing."""
    texts: dict[str, str] = {}
    for name, old, new in edits:
        text = texts.get(name) or (package / name).read_text()
        if old not in text:
            raise LookupError(f"{bug}: {name} has no {old!r}")
        texts[name] = text.replace(old, new)
    return texts


def can_be_planted(bug: str) -> None:
    edited(bug, BUGS[bug].edits, generated(BUGS[bug].made))


def plant(bug: str, edits: tuple[Edit, ...], package: Path) -> None:
    """Edit the package in this folder; its digest changes too, so that torch keeps its operators apart."""
    for name, text in edited(bug, edits, package).items():
        (package / name).write_text(text)
    spec = package / "spec.py"
    head, _, tail = spec.read_text().partition('"digest": "')
    spec.write_text(f'{head}"digest": "{hashlib.sha256(bug.encode()).hexdigest()[:16]}{tail[16:]}')


def case(scale: float = 14.3, features: str = "unit", layout: str = "contiguous", rows: int = 100) -> Case:
    """Two panels of queries and two of keys, the last of four queries. With 129 rows it has 33, in twice the time: for
    bugs that four do not show, and for those of the GPU suite."""
    return Case(rows, rows - 9, 0, scale=scale, features=features, layout=layout, seed=4)


PANEL, FUSED, STASH = Made("panel"), Made("fused"), Made("stash")
LABELLED, FUSED_LABELLED = Made("panel", "infonce"), Made("fused", "infonce")
EXACT, SPLIT = Made("panel", dtype="fp32", precision="exact"), Made("panel", dtype="fp32")
PAIRS, ROWS, OWN = Made("panel", "siglip"), Made("rows", "infonce"), Made("rows", "hard")
WEIGHED, ANGULAR = Made("panel", "rince"), Made("panel", "angular")
STATES, RATES = Made("panel", "sogclr"), Made("rows", "rate")
STATES_OF_SIDES = Made("panel", "rates_of_sides")
WITHOUT_POSITIVES, OWN_OF_PANELS = Made("panel", "decoupled_by_id"), Made("panel", "hard")
BY_ID, LEFT_OUT = Made("panel", "siglip_multi"), Made("panel", "clip_without_ids")
OF_SIZES = Made("panel", "siglip", dim=128)
DISTANCES = Made("panel", "siglip_of_distances")
ROWS_OF_A_GATHER = Made("rows", "infonce", devices=4, settings=(("transport", "gather"),))
POINTERS = Made("panel", settings=(("descriptors", "off"),))
TRIANGLE, MANY_COLUMNS = Made("panel", "ntxent"), Made("panel", "ntxent", dim=384)
DECOUPLED_ROWS, ROOTS_OF_ROWS = Made("panel", "dcl"), Made("panel", "rince_of_rows")
BY_ALL, BY_ALL_OF_A_RING = (
    Made("panel", "weighed_by_all", devices=n, settings=(("transport", "ring"),) * (n > 1)) for n in (1, 4)
)
MARGINS_OF_ROWS = Made("panel", "margin_of_rows")
TWO_SUMS, TWO_SUMS_OF_ROWS = Made("panel", "hard_keys"), Made("panel", "hard_negative")
PARTNERS, PARTNERS_APART = Made("panel", "four_block"), Made("panel", "weighed_by_partner")
COLUMNS, COLUMNS_APART = Made("panel", "mil_nce"), Made("panel", "weighed_by_column")
COLUMNS_OF_IDS = Made("panel", "mil_nce_multi")
TWO_SUMS_OF_A_RING = Made("panel", "hard_negative", devices=4, settings=(("transport", "ring"),))
MEANS_OF_ROWS, SHARES_OF_ROWS = Made("panel", "supcon_out"), Made("panel", "supcon_in")
MEANS, SHARES = Made("panel", "infonce_out"), Made("panel", "infonce_in")
GUIDED = Made("panel", "distill")
GUIDED_SIDES, GUIDED_SIDES_OF_A_GATHER = (
    Made("panel", "distill_apart", devices=n, settings=(("transport", "gather"),) * (n > 1)) for n in (1, 4)
)
GUIDED_IN_A_RING = Made("panel", "distill", devices=4, settings=(("transport", "ring"),))
IN_PAIRS = Made("panel", "three_block")
IN_PAIRS_OF_A_RING = Made("panel", "three_block", devices=4, settings=(("transport", "ring"),))
ABOVE, ABOVE_OF_A_RING = Made("panel", "gist"), Made("panel", "gist", devices=4, settings=(("transport", "ring"),))
SEVERAL_OF_A_RING = Made("panel", "supcon_out", devices=4, settings=(("transport", "ring"),))
TRIANGLES_OF_A_RING = Made("panel", "ntxent", devices=4, settings=(("transport", "ring"),))
TRIANGLES_OF_A_GATHER = Made("panel", "ntxent", devices=4, settings=(("transport", "gather"),))
PREFIXES, COSINES, PREFIXES_OF_ROWS, COSINES_OF_ROWS = (
    Made("panel", f"clip_{of}", dim=48)
    for of in ("prefixes", "cosines_prefixes", "prefixes_of_rows", "cosines_prefixes_of_rows")
)
IN_A_RING = Made("panel", devices=4, settings=(("transport", "ring"),))
FUSED_POINTERS = Made("fused", settings=(("descriptors", "off"),))
RAGGED = [(33, 70), (65, 65), (100, 97)]

READS = "tl.load(source + offsets, mask=(r < rows)[:, None] & (d < DIM)[None, :], other=0.0)"
NEVER_FLAGGED = ("kernels.py", "(least < SMALLEST_SUM) | (most > LARGEST_SUM)", "least < -1.0")
MASKED = "MASKED=m % rows != 0 or n % columns != 0"

RANKS = (3, [[70, 10, 60]])
BEGUN = ([64, 72, 128], [(0, 64), (64, 128), (192, 264)])  # keys of each rank, and those with which its work begins

BUGS: dict[str, Bug] = {
    "a ring has room for a panel of its own keys only": Bug(
        IN_A_RING,
        (
            (
                "_runtime/engine.py",
                "forward_scratch(call.q, max(layout.keys))",
                "forward_scratch(call.q, call.k.shape[0])",
            ),
        ),
        checks.over_ranks,
        RANKS,
        "overwritten",
    ),
    "a ring's backward has room for a panel of its first keys only": Bug(
        dataclasses.replace(IN_A_RING, loss="infonce"),
        (
            (
                "_runtime/engine.py",
                "backward_scratch(q.shape[0], max(layout.keys)",
                "backward_scratch(q.shape[0], len(block.k)",
            ),
        ),
        checks.over_ranks,
        (3, [[70, 70, 30]]),
        "overwritten",
    ),
    "a ring's backward makes its scratch anew at each hop": Bug(
        IN_A_RING,
        (("_runtime/engine.py", "if scratch is None:", "if True:"),),
        checks.over_ranks,
        RANKS,
        "scratches for",
    ),
    # ---- edges: what lies beyond the last row or key
    "statistics are read past the end, selected, then multiplied": Bug(
        FUSED,
        (
            (
                "kernels.py",
                "tl.store(ratio + r, tl.where(r < count, share, 0.0))",
                "tl.store(ratio + r, share, mask=r < count)",
            ),
        ),
        checks.guarded,
        (RAGGED,),
        "NaN",
    ),
    "the sums of later ranks are left out": Bug(
        Made("panel", settings=(("transport", "gather"),), devices=4),
        (("kernels.py", "keys, ranks, part_stride, 0)", "keys, 1, part_stride, 0)"),),
        checks.merged_ranks,
        (),
        "NaN strays",
    ),
    "statistics are read past the end and dropped": Bug(
        PANEL,
        (("kernels.py", "own_rows = tl.minimum(rows, queries - 1)", "own_rows = rows"),),
        checks.guarded,
        (RAGGED,),
        "what lies outside the buffers",
    ),
    "a mask of a store lacks the block's offset": Bug(
        PANEL,
        (("kernels.py", "row_sums, mask=rows < queries)", "row_sums, mask=rows - row0 < queries)"),),
        checks.guarded,
        (RAGGED,),
        "overwritten",
    ),
    "a mask of a load lacks the block's offset": Bug(
        FUSED_POINTERS,
        (("kernels.py", READS, READS.replace("(r < rows)", "(tl.arange(0, ROWS) < rows)")),),
        checks.guarded,
        (RAGGED,),
    ),
    "a panel that begins left of the diagonal is taken to have no positives": Bug(
        PANEL,
        (
            (
                "_runtime/package.py",
                "bool(first < self.k.shape[0] and first + self.q.shape[0] > 0)",
                "0 <= first < self.k.shape[0]",
            ),
        ),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "zero times what lies beyond the last key": Bug(
        PANEL,
        (
            (
                "kernels.py",
                "mask=(i < inner)[:, None] & (d < DIM)[None, :]",
                "mask=(i >= 0)[:, None] & (d < DIM)[None, :]",
            ),
        ),
        checks.guarded,
        (RAGGED,),
        "NaN",
    ),
    "zero times what lies beyond the embedding": Bug(
        Made("fused", dim=3),
        (("kernels.py", READS, READS.replace("(d < DIM)", "(d >= 0)")),),
        checks.guarded,
        (RAGGED,),
    ),
    "ragged tiles are taken for whole ones in the forward": Bug(
        PANEL, (("schedule.py", MASKED, "MASKED=False"),), checks.guarded, (RAGGED,)
    ),
    "ragged visiting blocks are taken for whole ones": Bug(
        FUSED_LABELLED,
        (
            ("schedule.py", "masked = n % columns != 0", "masked = False"),
            ("schedule.py", "masked = m % rows != 0", "masked = False"),
        ),
        checks.numerics,
        (case(1000.0, "negative"),),
    ),
    "the last block of keys is not launched": Bug(
        PANEL,
        (
            (
                "schedule.py",
                "grid = (cdiv(n, columns) * cdiv(cdiv(m, rows), strip),)",
                "grid = (max(n // columns, 1) * cdiv(cdiv(m, rows), strip),)",
            ),
        ),
        checks.guarded,
        (RAGGED,),
    ),
    "zero padding takes part in the running maximum": Bug(
        PANEL,
        (
            ("kernels.py", "tl.max(z * slope + key_mask[None, :], axis=1)", "tl.max(z * slope, axis=1)"),
            ("kernels.py", "tl.max(z * slope + row_mask[:, None], axis=0)", "tl.max(z * slope, axis=0)"),
        ),
        checks.numerics,
        (case(1e5, "negative", rows=129),),
    ),
    "zero padding takes part in the running maximum of fp32 features": Bug(
        EXACT,
        (("kernels.py", "tl.max(z * slope + key_mask[None, :], axis=1)", "tl.max(z * slope, axis=1)"),),
        checks.numerics,
        (case(1000.0, "negative"),),
    ),
    # ---- addresses
    "the embedding dimension is the row stride": Bug(
        PANEL,
        (("kernels.py", "r.to(tl.int64)[:, None] * row_stride", "r.to(tl.int64)[:, None] * DIM"),),
        checks.numerics,
        (case(layout="sliced"),),
    ),
    "the embedding dimension is the row stride of positives": Bug(
        PANEL,
        (("kernels.py", "columns[:, None] * k_row_stride", "columns[:, None] * DIM"),),
        checks.numerics,
        (case(layout="sliced"),),
    ),
    "the embedding dimension is the row stride in the product": Bug(
        PANEL,
        (("kernels.py", "i[:, None] * x_inner_stride", "i[:, None] * DIM"),),
        checks.numerics,
        (case(layout="sliced"),),
    ),
    "the embedding dimension is the row stride in finish": Bug(
        PANEL,
        (("kernels.py", "r.to(tl.int64)[:, None] * x_row_stride", "r.to(tl.int64)[:, None] * DIM"),),
        checks.numerics,
        (case(layout="sliced"),),
        "dscale",
    ),
    "the mean of all logits has no gradient": Bug(
        Made("panel", "smooth_clip", dim=72), (("kernels.py", "value += -0.1", "value += 0.0"),), checks.smoothed
    ),
    "the mean of all logits is not kept as fp16's gradients are": Bug(
        Made("panel", "smooth", "fp16", dim=72), (("kernels.py", "value += -1638.4", "value += -0.1"),), checks.smoothed
    ),
    "the mean of another part of the embedding": Bug(
        Made("panel", "smooth", dim=384),
        (("kernels.py", "tl.load(mean + d,", "tl.load(mean + d % FINISH_DEPTH,"),),
        checks.numerics,
        (case(features="negative"),),
    ),
    "the sum of a query's gradients lacks the mean": Bug(
        Made("panel", "smooth_rince"),
        (("kernels.py", "positive_slope - 0.2", "positive_slope"),),
        checks.numerics,
        (case(1.0),),
        "dbias",
    ),
    "the stride along the embedding is ignored": Bug(
        FUSED,
        (("kernels.py", "d.to(tl.int64)[None, :] * depth_stride", "d.to(tl.int64)[None, :]"),),
        checks.numerics,
        (case(layout="transposed"),),
    ),
    "the stride along the embedding is ignored by positives": Bug(
        LABELLED,
        (("kernels.py", "d[None, :] * k_depth_stride", "d[None, :]"),),
        checks.numerics,
        (case(layout="transposed"),),
    ),
    "the stride along the embedding is ignored by the product": Bug(
        PANEL,
        (
            (
                "kernels.py",
                "d.to(tl.int64)[None, :] * x_depth_stride,\n                    mask",
                "d[None, :],\n                    mask",
            ),
        ),
        checks.numerics,
        (case(layout="strided"),),
    ),
    "an expanded row is read as if it had a stride": Bug(
        PANEL,
        (("schedule.py", "q_row_stride=q_side.row_stride", "q_row_stride=max(q_side.row_stride, DIM)"),),
        checks.numerics,
        (case(layout="expanded"),),
    ),
    "32-bit offsets in tiles": Bug(
        POINTERS,
        (("kernels.py", "r.to(tl.int64)[:, None] * row_stride", "r[:, None] * row_stride"),),
        checks.far_rows,
        (),
    ),
    "32-bit offsets of positives": Bug(
        FUSED,
        (("kernels.py", "rows.to(tl.int64)[:, None] * q_row_stride", "rows[:, None] * q_row_stride"),),
        checks.far_rows,
        (),
    ),
    "32-bit offsets in the product": Bug(
        PANEL,
        (
            (
                "kernels.py",
                "i = (inner0 + tl.arange(0, PRODUCT_DEPTH)).to(tl.int64)",
                "i = inner0 + tl.arange(0, PRODUCT_DEPTH)",
            ),
        ),
        checks.far_rows,
        (),
    ),
    "32-bit offsets in finish": Bug(
        PANEL,
        (("kernels.py", "r.to(tl.int64)[:, None] * x_row_stride", "r[:, None] * x_row_stride"),),
        checks.far_rows,
        (),
    ),
    "the second panel's keys are taken for the first's": Bug(
        PANEL, (("_runtime/package.py", "self.first_key + key0", "self.first_key"),), checks.numerics, (case(),)
    ),
    # ---- range
    "the reference is fixed at the largest possible logit": Bug(
        PANEL,
        (("kernels.py", "tl.floor(top * slope) - HEADROOM", "slope"), NEVER_FLAGGED),
        checks.numerics,
        (case(100.0, "negative"),),
        "loss",
    ),
    "tiles with a wide spread are not computed again in the forward": Bug(
        PANEL, (NEVER_FLAGGED,), checks.numerics, (case(1000.0, "unnormalised", rows=129),)
    ),
    "tiles with a wide spread are not computed again in the backward": Bug(
        PANEL,
        (("kernels.py", "tl.min(lowest) > SPREAD", "tl.min(lowest) > 1e30"),),
        checks.numerics,
        (case(1000.0, "unnormalised", rows=129),),
        "dq|dk",
    ),
    "programs with a wide spread are not computed again": Bug(
        FUSED,
        (("kernels.py", "spread > SPREAD", "spread > 1e30"),),
        checks.numerics,
        (case(1000.0, "unnormalised", rows=129),),
        "dq|dk",
    ),
    "stashed tiles with a wide spread are used": Bug(
        STASH,
        (("kernels.py", 'tl.where(flag, float("inf"), shared)', "shared"),),
        checks.numerics,
        (case(1000.0, "unnormalised"),),
        "dq|dk",
    ),
    "statistics of a panel replace those before it": Bug(
        PANEL,
        (("kernels.py", "s = s * tl.exp2(e - top) + tl.sum(", "s = tl.sum("),),
        checks.numerics,
        (case(),),
        "loss",
    ),
    # ---- precision
    "the positive's logit is rounded to bf16": Bug(
        PANEL,
        (
            (
                "kernels.py",
                "z, 0.0), axis=1), mask=here)",
                "z, 0.0), axis=1).to(tl.bfloat16).to(tl.float32), mask=here)",
            ),
        ),
        checks.numerics,
        (case(100.0, "matched", rows=129),),
        "loss",
    ),
    "the positive's share is added after rounding": Bug(
        PANEL,
        (("kernels.py", "((term - total) / total)", "((term / total).to(tl.bfloat16).to(tl.float32) - 1.0)"),),
        checks.numerics,
        (case(features="matched", rows=129),),
        "dq|dk",
    ),
    "a positive's probability is rounded before 1 is taken off": Bug(
        PANEL,
        (
            ("kernels.py", "QUERY_SHARE * ((term - total) / total)", "QUERY_SHARE / total * term - QUERY_SHARE"),
            ("kernels.py", "KEY_SHARE * ((term - total) / total)", "KEY_SHARE / total * term - KEY_SHARE"),
        ),
        checks.solved,
        (),
        "dq|dk",
    ),
    "the loss takes a positive's logit as it is, not as its sum holds it": Bug(
        PANEL, (("kernels.py", "term >= 2.0**-126", "term < 0.0"),), checks.solved, (), "loss"
    ),
    "forward and backward round logits differently": Bug(
        FUSED,
        (
            (
                "kernels.py",
                "z = add_products(z, features, visiting, WIDEN)",
                "z = add_products(z, features, visiting, WIDEN) * (1.0 + 2.0**-22)",
            ),
        ),
        checks.large_logits,
        (),
    ),
    "fp32 products cut their operands to 10 bits": Bug(
        EXACT,
        (
            (
                "kernels.py",
                "    if WIDEN:\n        tile = tile.to(tl.float32)\n",
                "    tile = (tile.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)\n",
            ),
        ),
        checks.numerics,
        (case(100.0),),
    ),
    "the low half of fp32 keys is left out": Bug(
        SPLIT,
        (
            (
                "kernels.py",
                "tl.store(out + places + DIM, low if KEYS else high, mask=mask)",
                "tl.store(out + places + DIM, 0.0 if KEYS else high, mask=mask)",
            ),
        ),
        checks.numerics,
        (case(100.0),),
    ),
    "the low half of g is left out": Bug(
        SPLIT,
        (("schedule.py", "    _add_product(total, low, x_high, False)\n", ""),),
        checks.numerics,
        (case(14.3),),
        "dq|dk",
    ),
    "a positive's low half of g is that of its softmax": Bug(
        SPLIT,
        (("kernels.py", "tl.store(g_low + places, (value - high.to(tl.float32)).to(tl.bfloat16), mask=here)", ""),),
        checks.numerics,
        (case(14.3),),
        "dq|dk",
    ),
    "gradients accumulate in bf16": Bug(
        PANEL,
        (
            (
                "kernels.py",
                "tl.store(total + places, result, mask=mask)",
                "tl.store(total + places, result.to(tl.bfloat16).to(tl.float32), mask=mask)",
            ),
        ),
        checks.accumulators,
        (),
        "rounded to",
    ),
    "fp16 gradients of logits underflow": Bug(
        Made("panel", "infonce", "fp16"),
        (
            ("kernels.py", "QUERY_SHARE = tl.constexpr(16384.0)", "QUERY_SHARE = tl.constexpr(1.0)"),
            ("schedule.py", "GRADIENT_EXPONENT = 14", "GRADIENT_EXPONENT = 0"),
        ),
        checks.small_probabilities,
        (),
    ),
    # ---- what must reach the result, and what must not
    "a NaN is swallowed by the tiles": Bug(
        PANEL,
        (
            ("kernels.py", "    return z\n", "    return tl.where(z == z, z, 0.0)\n"),
            ("kernels.py", "tl.fma(z, slope, -shared)", "tl.fma(tl.where(z == z, z, 0.0), slope, -shared)"),
        ),
        checks.not_finite,
        ("q", math.nan),
    ),
    "a NaN is swallowed by the backward": Bug(
        FUSED,
        (("kernels.py", "result = tl.dot(g, ", "result = tl.dot(tl.where(g == g, g, 0.0), "),),
        checks.not_finite,
        ("k", math.nan),
        "dq|dk",
    ),
    "a bias that is NaN is lost": Bug(
        PANEL,
        (("kernels.py", "* weight * (scale) + bias * 0.0", "* weight * (scale)"),),
        checks.not_finite_scalar,
        ("bias", math.nan),
        "dq is finite",
    ),
    "products replace what earlier panels added": Bug(
        PANEL, (("kernels.py", "if not FRESH:", "if False:"),), checks.numerics, (case(),)
    ),
    "the stash of another panel is used": Bug(
        STASH,
        (
            (
                "schedule.py",
                "stash[row0:, :columns], stash[row0:, columns:]",
                "stash[0:, :columns], stash[0:, columns:]",
            ),
            ("schedule.py", "row0 >= stash.shape[0]", "False"),
        ),
        checks.numerics,
        (case(),),
    ),
    "one half of a kept tile is kept twice": Bug(
        STASH, (("kernels.py", "right.to(tl.bfloat16)", "left.to(tl.bfloat16)"),), checks.numerics, (case(),)
    ),
    "the incoming gradient is ignored": Bug(
        PANEL, (("kernels.py", "tl.load(upstream).to(tl.float32) * weight", "weight"),), checks.upstream, ()
    ),
    "the gradient of the scale is times the rows": Bug(
        PANEL,
        (("kernels.py", "tl.store(dscale, unit * ", "tl.store(dscale, unit * rows * "),),
        checks.numerics,
        (case(),),
        "dscale",
    ),
    "the flags of a block's first strip alone go up": Bug(
        ROWS,
        (("kernels.py", "range(0, tl.cdiv(tl.cdiv(keys, FORWARD_KEYS), strip))", "range(0, 1)"),),
        checks.shares_of_a_block,
        (),
    ),
    "shares of a block that is computed again stay": Bug(
        ROWS, (("kernels.py", "tl.where(beyond != 0, 1.0, own)", "own"),), checks.shares_of_a_block, ()
    ),
    "a strip of keys ends early": Bug(
        ROWS,
        (("kernels.py", "min(number * strip + strip, tl.cdiv(keys, FORWARD_KEYS))", "number * strip + 1"),),
        checks.long_strips,
        (),
    ),
    "positives are rounded as those of another strip": Bug(
        ROWS,
        (("kernels.py", "part = columns // (FORWARD_KEYS * strip)", "part = columns // FORWARD_KEYS"),),
        checks.positives_of_strips,
        (),
    ),
    "a row computed again has the reference of its last tile": Bug(
        ROWS,
        (("kernels.py", "tl.maximum(row_reference, tl.max(y, axis=1))", "tl.max(y, axis=1)"),),
        checks.begun_rows,
        (),
    ),
    # ---- sums over pairs
    "a positive counts as another key, too": Bug(
        PAIRS, (("kernels.py", "(columns != place[:, None]) & ", ""),), checks.numerics, (case(),), "loss"
    ),
    "a positive has the slope of another key": Bug(
        PAIRS,
        (("kernels.py", "value = positive_slopes_of(x)", "value = slopes_of(x)"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "what lies beyond the last key counts": Bug(
        PAIRS, (("kernels.py", "(columns < limit[:, None])", "(columns >= 0)"),), checks.numerics, (case(),), "loss"
    ),
    "a tile is taken for one without positives": Bug(
        PAIRS, (("kernels.py", "(row0 + offset < KEYS)", "(row0 + offset < 0)"),), checks.numerics, (case(),), "loss"
    ),
    "a tile with columns beyond the last key is taken for a whole one": Bug(
        PAIRS, (("kernels.py", "(key0 + KEYS > keys)", "(key0 > keys)"),), checks.numerics, (case(),), "loss"
    ),
    "small terms are logarithms of a rounded sum": Bug(
        Made("panel", "siglip", "fp32", precision="exact"),
        (("kernels.py", "log_one_plus(grown_by), tl", "tl.log(1.0 + grown_by), tl"),),
        checks.numerics,
        (Case(129, 129, 0, scale=150.0, bias=-130.0, features="matched", seed=4),),
        "loss",
    ),
    "what does not count has a logit of the wrong sign": Bug(
        DISTANCES, (("kernels.py", "tl.constexpr(1e+30)", "tl.constexpr(-1e+30)"),), checks.numerics, (case(),), "loss"
    ),
    "the weight of a sum is left out": Bug(
        DISTANCES, (("kernels.py", "0.5 * tl.sum(term_sums)", "tl.sum(term_sums)"),), checks.numerics, (case(),), "loss"
    ),
    "large logits are taken for small ones": Bug(
        PAIRS, (("kernels.py", "tl.max(term_sums) == float", "tl.max(term_sums) == -float"),), checks.one_large_key
    ),
    "tiny terms lack their squares": Bug(
        OF_SIZES,
        (
            (
                "kernels.py",
                "TINY_TERM, TINY_SLOPE = tl.constexpr(0.4994607)",
                "TINY_TERM, TINY_SLOPE = tl.constexpr(0.0)",
            ),
        ),
        pieces.sizes_of_logits,
    ),
    "a tiny slope lacks its square": Bug(
        OF_SIZES, (("kernels.py", "value = tl.fma(t * -1.0, t, t)", "value = t"),), pieces.sizes_of_logits
    ),
    "a strip counts as one of tiny logits": Bug(
        OF_SIZES, (("kernels.py", "squares < SQUARES_BELOW,", "squares < 1.0,"),), pieces.sizes_of_logits
    ),
    "a NaN hides logits that are not tiny": Bug(
        OF_SIZES,
        (("kernels.py", "(squares < SQUARES_BELOW,", "(~(squares >= SQUARES_BELOW),"),),
        pieces.sizes_of_logits,
    ),
    "a launch does not read the sizes of the one before": Bug(
        PAIRS,
        (("kernels.py", "largest_size(sums + (2 + turn)", "0.0 * largest_size(sums + (2 + turn)"),),
        pieces.sizes_handed_on,
    ),
    "a launch reads the sizes that it writes": Bug(
        PAIRS, (("kernels.py", "(sums + (2 + turn) * parts", "(sums + (3 - turn) * parts"),), pieces.sizes_handed_on
    ),
    "one tile tells nothing of its strip": Bug(
        PAIRS, (("kernels.py", "< TINY_BELOW).to", "< 2 * TINY_BELOW).to"),), pieces.sizes_handed_on
    ),
    "a NaN hides large logits": Bug(
        PAIRS, (("kernels.py", "(grown_by < GROWTH_BELOW,", "(~(grown_by >= GROWTH_BELOW),"),), checks.one_large_key
    ),
    "a slope of two is not divided as the other": Bug(
        PAIRS,
        (("kernels.py", "tl.join(quotient(left_dividend, divisor), ", "tl.join(quotient(left, divisor), "),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "two slopes have the sum of two terms for their product": Bug(
        Made("panel", "siglip", "fp32", precision="exact", dim=64),
        (("kernels.py", "growth = left + right_dividend", "growth = left + right"),),
        pieces.slopes_of_all_sizes,
    ),
    "a strip of infinite terms counts as one of small logits": Bug(
        Made("panel", "siglip", "fp32", precision="exact", dim=64),
        (("kernels.py", "tl.max(term_sums) == float", "tl.max(term_sums) == -float"),),
        pieces.slopes_of_all_sizes,
    ),
    "the sum of slopes is that of one panel": Bug(
        PAIRS,
        (("kernels.py", "tl.load(part) + tl.sum(slope_sums).to(tl.float64)", "tl.sum(slope_sums).to(tl.float64)"),),
        checks.numerics,
        (case(),),
        "dbias",
    ),
    "what forward has kept is not multiplied": Bug(
        PAIRS,
        (("kernels.py", "(value * factor).to(out.dtype.element_ty)", "value.to(out.dtype.element_ty)"),),
        checks.upstream,
        (),
    ),
    "ids are compared by their low halves": Bug(
        BY_ID,
        (
            ("kernels.py", "ids_of_queries[:, None] == ids", "ids_of_queries.to(tl.int32)[:, None] == ids"),
            ("kernels.py", "ids_of_keys[None, :]\n", "ids_of_keys.to(tl.int32)[None, :]\n"),
        ),
        checks.numerics,
        (Case(100, 90, 0, scale=3.0, seed=2),),
        "loss",
    ),
    "a pair of one id has the slope of another pair": Bug(
        BY_ID,
        (("kernels.py", "value = tl.where(same_id, -value, value)", "value = tl.where(same_id, value, value)"),),
        checks.numerics,
        (Case(100, 90, 0, scale=3.0, seed=2),),
        "dq",
    ),
    "ids are those of the first panel": Bug(
        BY_ID,
        (("_runtime/package.py", "panel(self.key_ids, key0, keys)", "panel(self.key_ids, 0, keys)"),),
        checks.numerics,
        (Case(130, 130, 0, scale=3.0, seed=2),),
        "loss",
    ),
    "the positive is left out with its id": Bug(
        LEFT_OUT,
        (("kernels.py", "left_out = same_id & (is_positive == 0)", "left_out = same_id"),),
        checks.numerics,
        (Case(100, 100, 0, scale=3.0, seed=2),),
        "loss",
    ),
    "g of a pair that is left out": Bug(
        LEFT_OUT,
        (("kernels.py", "value = tl.where(same_id, 0.0, value)", "value = tl.where(same_id, value, value)"),),
        checks.numerics,
        (Case(100, 100, 0, scale=3.0, seed=0),),
        "dq",
    ),
    "torch: a positive has the term of another key": Bug(
        Made("torch", "siglip"),
        (("schedule.py", "terms[row, column] = formulas.positive_term(p)", "pass"),),
        checks.numerics,
        (case(),),
        "loss",
    ),
    "torch: the sum of slopes is left out": Bug(
        Made("torch", "siglip"),
        (("schedule.py", "block.sums[1] += slopes.sum(1)", "block.sums[1] += 0 * slopes.sum(1)"),),
        checks.numerics,
        (case(),),
        "dbias",
    ),
    "results depend on the order of events": Bug(
        FUSED,
        (("schedule.py", "    return loss\n", "    return loss * (1.0 + 2e-5 * torch.rand(()))\n"),),
        checks.repeatable,
        (case(), 5),
        "differs",
    ),
    "memory is used before it is written": Bug(
        PANEL, (("_runtime/engine.py", '"fresh_dk": start == 0', '"fresh_dk": False'),), checks.guarded, (RAGGED,)
    ),
    "statistics of queries are added to what memory held": Bug(
        PANEL, (("schedule.py", "0 if fresh_queries and key0 == 0 else m", "m"),), checks.guarded, (RAGGED,)
    ),
    "statistics of keys are added to what memory held": Bug(
        PANEL, (("schedule.py", "0 if fresh_keys and row0 == 0 else n", "n"),), checks.guarded, (RAGGED,)
    ),
    # ---- around the kernels
    "autocast rounds inside the sweep": Bug(
        Made("torch", dtype="fp32"),
        (("_runtime/device_state.py", "if torch.is_autocast_enabled(device.type):", "if False:"),),
        checks.autocast,
        (),
    ),
    "parts of a split product replace one another": Bug(
        Made("panel", dtype="fp32"),
        (("schedule.py", "fresh and start == 0)", "fresh)"),),
        checks.split_products_in_parts,
        (),
    ),
    "gradients of wider features are rounded": Bug(
        Made("torch", dtype="bf16"),
        (("_runtime/weighting.py", "(dtype if call.options.unrounded else package.dtype)", "package.dtype"),),
        checks.autocast_of_wider_features,
        (),
    ),
    "the second derivative is silently wrong": Bug(
        Made("torch", dtype="fp32"),
        (("_runtime/ops.py", "raise _twice(ctx.name)", "return (None,) * 11"),),
        checks.second_derivative,
        (),
    ),
    "features that torch.func has left wrapped are taken as they are": Bug(
        Made("panel", settings=(("replay", "off"),)),
        (("_runtime/package.py", "            q = q.to(dtype).resolve_neg()\n", ""),),
        checks.left_of_a_transform,
        (),
    ),
    "a process group is needed where scale is a tensor": Bug(
        Made("torch", dtype="fp32"),
        (("_runtime/group.py", "if not (dist.is_available() and dist.is_initialized()):", "if False:"),),
        checks.upstream,
        (),
    ),
    "a batch without rows is accepted": Bug(
        Made("torch", dtype="fp32"),
        (("_runtime/agreement.py", "if not queries or not keys:", "if False:"),),
        checks.refuses_no_rows,
        (),
    ),
    "a recorded backward takes the tiles of another forward": Bug(
        STASH,
        (("_runtime/replay.py", "if self._saved.stash.numel():", "if False:"),),
        checks.found_in_a_recording,
        (),
        "differs",
    ),
    "whoever takes care of saved tensors is given none": Bug(
        STASH,
        (("_runtime/replay.py", "(hooked and", "(False and"),),
        checks.found_in_a_recording,
        (),
        "hooks were given",
    ),
    "tiles that went with a recording are taken for none": Bug(
        STASH,
        (("_runtime/replay.py", "if _keeps_tiles(package, call):  # they", "if False:  # they"),),
        checks.found_in_a_recording,
        (),
        "differs",
    ),
    # ---- gradients in forward, by rows of panels
    "rows far above their reference are left as they are": Bug(
        ROWS,
        (("kernels.py", "beyond = tl.max(tl.where(held, 0, 1))", "beyond = tl.max(tl.where(held, 0, 0))"),),
        checks.sampled_references,
        (),
        "flags",
    ),
    "p of a positive is not put in units of its row": Bug(
        ROWS,
        (("kernels.py", "value /= tl.load(share + rows, mask=here, other=1.0)", "value *= 1.0"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "queries are multiplied without their shares": Bug(
        ROWS,
        (("kernels.py", "source = q + r.to", "factor = factor * 0.0 + 1.0; source = q + r.to"),),
        checks.numerics,
        (case(),),
        "dk",
    ),
    "a label that names no key is let pass": Bug(
        ROWS,
        (("kernels.py", "mantissa += 0.0 * tl.load(positive_z + rows, mask=inside, other=0.0)", "mantissa += 0.0"),),
        checks.labels_without_a_key,
        (),
        "are NaN",
    ),
    "the sums of a row leave out the last keys of a gather": Bug(
        ROWS_OF_A_GATHER,
        (("schedule.py", "scratch.row_parts, cdiv(cdiv(n, columns), strip)", "scratch.row_parts, max(1, n // 64)"),),
        checks.over_ranks,
        RANKS,
        "loss",
    ),
    "keys that come have references of their own": Bug(
        ROWS_OF_A_GATHER,
        (("schedule.py", "referenced=scratch.begun is not None", "referenced=False"),),
        checks.begun_over_ranks,
        BEGUN,
        "dq",
    ),
    "sums over keys that come replace those over the own ones": Bug(
        ROWS_OF_A_GATHER,
        (("schedule.py", "panel(part, first_strip, part.shape[0])", "part"),),
        checks.begun_over_ranks,
        BEGUN,
        "loss",
    ),
    "keys leave behind the work that hides them": Bug(
        ROWS_OF_A_GATHER,
        (("_runtime/engine.py", "            trip.arrive()  #", "            pass  #"),),
        checks.begun_over_ranks,
        BEGUN,
        "behind the early work",
    ),
    "a gather begins with keys that share a strip with others": Bug(
        ROWS_OF_A_GATHER,
        (("schedule.py", "start, stop = cdiv(first, keys) * keys,", "start, stop = first,"),),
        checks.begun_over_ranks,
        BEGUN,
        "dq",
    ),
    "the products of a gather begin with the first keys for each rank": Bug(
        ROWS_OF_A_GATHER,
        (("schedule.py", "panel_columns(g, first, keys)", "panel_columns(g, 0, keys)"),),
        checks.over_ranks,
        RANKS,
        "dk",
    ),
    "sums of a gather go home before those of the last rank are there": Bug(
        ROWS_OF_A_GATHER,
        (("schedule.py", "number == len(dk)", "number == 1"),),
        checks.over_ranks,
        RANKS,
        "written to before the wait",
    ),
    "gradients of keys leave out what other ranks' queries give": Bug(
        ROWS_OF_A_GATHER,
        (("_runtime/transport.py", "            own.add_(part)", "            pass"),),
        checks.over_ranks,
        RANKS,
        "dk",
    ),
    "forward rounds the gradients of wider features": Bug(
        ROWS, (("_runtime/engine.py", "not unrounded", "True"),), checks.autocast_of_wider_features, (), "rounded"
    ),
    "a recording hands out the gradients that it overwrites": Bug(
        ROWS,
        (("_runtime/replay.py", "copies = [x.new_empty(x.shape) for x in results]", "copies = results"),),
        checks.gradients_in_a_recording,
        (),
        "of another call",
    ),
    "a recording with gradients serves calls without": Bug(
        ROWS,
        (("_runtime/replay.py", "package.at_once(1) and not gradients", "False"),),
        checks.gradients_in_a_recording,
        (),
        "three products",
    ),
    "weights of a frozen query side are not written": Bug(
        ROWS, (("schedule.py", "    if dk:\n", "    if dk and dq is not None:\n"),), checks.frozen_sides, ()
    ),
    "dots of keys have the room of queries": Bug(
        LABELLED,
        (("_runtime/weighting.py", "(call.q if self.products.of_queries else call.k)", "call.q"),),
        checks.frozen_sides,
        (),
    ),
    # ---- prefixes of the features
    "a slab takes the gradient of its own prefix alone": Bug(
        PREFIXES,
        (("kernels.py", "value += unpacked(g_16,", "value = unpacked(g_16,"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "the halves of a pair of g change places": Bug(
        PREFIXES, (("kernels.py", "tl.join(low, high)", "tl.join(high, low)"),), checks.numerics, (case(),), "dq"
    ),
    "rows far below the reference of keys raise no flag": Bug(
        PREFIXES,
        (("kernels.py", "below = tl.maximum(below, reference_16 - e)", "below += 0.0 * e"),),
        checks.flagged_gradients,
    ),
    "prefixes take the partial sums of others": Bug(
        PREFIXES,
        (
            (
                "schedule.py",
                "each[number :: len(PREFIXES)] for each in scratch.row",
                "each[:: len(PREFIXES)] for each in scratch.row",
            ),
        ),
        checks.numerics,
        (case(),),
        "loss",
    ),
    "keys of a prefix have the weight of others": Bug(
        PREFIXES, (("schedule.py", "share_of_all * weight", "share_of_all"),), checks.numerics, (case(),), "dq"
    ),
    "a positive is that of all columns": Bug(
        PREFIXES, (("schedule.py", "width=q.shape[1]", "width=DIM"),), checks.numerics, (case(),), "dq"
    ),
    "a strip computed again leaves out prefixes": Bug(
        PREFIXES,
        (("kernels.py", "            value += g_32\n", "            value += 0.0\n"),),
        checks.numerics,
        (case(1000.0, "unnormalised"),),
        "dq",
    ),
    "the positive of a cosine is a product": Bug(
        COSINES,
        (("kernels.py", "own_z *= tl.load(key_factors + columns, mask=here, other=0.0)", "own_z *= 1.0"),),
        checks.numerics,
        (case(features="unnormalised"),),
        "loss",
    ),
    "radial sums have the g of a negative for the positive": Bug(
        COSINES,
        (("kernels.py", "== own_places[:, None]", "== own_places[:, None] - 2**30"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "terms beyond the last key are not cleared": Bug(
        COSINES,
        (("kernels.py", "(tl.arange(0, GRADIENT_KEYS) < keys - key0)[None, :], value, 0.0)", "True, value, 0.0)"),),
        checks.numerics,
        (case(1000.0, "negative"),),
        "NaN",
    ),
    "radial sums of a strip computed again have those before": Bug(
        COSINES,
        (
            (
                "kernels.py",
                "tl.store(key_radial + part * radial_keys + columns,",
                "tl.store(key_radial - 0 * part + columns - columns,",
            ),
        ),
        checks.numerics,
        (case(1000.0, "unnormalised"),),
        "dk",
    ),
    "a row loses of each slab what its own prefix has along it": Bug(
        COSINES, (("_runtime/renormalised.py", "shorter.add_(longer)", "pass"),), checks.numerics, (case(),), "dq"
    ),
    "columns of the longest prefix alone have roundings of the others": Bug(
        COSINES,
        (
            (
                "_runtime/renormalised.py",
                "            shorter.add_(longer)\n",
                "            shorter.add_(longer)\n        found[-1].add_(found[0], alpha=2.0**-8)\n",
            ),
        ),
        checks.numerics,
        (case(100.0, "solved"),),
        "of columns",
    ),
    "keys of a prefix have the exponentials of rows": Bug(
        PREFIXES_OF_ROWS,
        (("kernels.py", "slope, -key_e[None, :])) * b[None, :]", "slope, -e[:, None])) * b[None, :]"),),
        checks.numerics,
        (case(),),
        "dk",
    ),
    "positives of prefixes have no weight": Bug(
        PREFIXES_OF_ROWS,
        (
            (
                "kernels.py",
                "value += 0.5 * QUERY_SHARE * tl.load(positive_g",
                "value += QUERY_SHARE * tl.load(positive_g",
            ),
        ),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "rows beyond the last are not cleared beside exponentials of keys": Bug(
        COSINES_OF_ROWS,
        (("kernels.py", "(rows < queries)[:, None] & (columns < keys)[None, :], value, 0.0)", "True, value, 0.0)"),),
        checks.numerics,
        (case(1000.0, "negative"),),
        "NaN",
    ),
    # ---- rows that are keys of each other
    "a row is a key of its own": Bug(
        TRIANGLE,
        (("kernels.py", "rows[:, None] < columns[None, :], p, 0.0", "rows[:, None] <= columns[None, :], p, 0.0"),),
        checks.numerics,
        (case(rows=128),),
        "loss",
    ),
    "a pair counts for one of its rows": Bug(
        TRIANGLE,
        (("schedule.py", "    _merge(scratch.key_parts, strips, block.keys, fresh)", "    pass"),),
        checks.numerics,
        (case(rows=128),),
        "loss",
    ),
    "rows and columns of a panel on the diagonal overwrite each other's sums": Bug(
        TRIANGLE, (("schedule.py", " and not block.diagonal", ""),), checks.numerics, (case(rows=128),), "loss"
    ),
    "a row and itself have a gradient": Bug(
        TRIANGLE,
        (("kernels.py", "here = rows < queries\n", "here = rows < 0\n"),),
        checks.numerics,
        (case(rows=128),),
        "dq",
    ),
    "g below the diagonal is not turned": Bug(
        dataclasses.replace(TRIANGLE, small=False),
        (("kernels.py", "tl.trans(square)", "square"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "tiles that meet the diagonal are left out": Bug(
        dataclasses.replace(DECOUPLED_ROWS, small=False),
        (("kernels.py", "tl.cdiv(key0 + GRADIENT_KEYS, GRADIENT_ROWS)", "key0 // GRADIENT_ROWS"),),
        checks.numerics,
        (case(rows=130),),
        "dq",
    ),
    "g below the diagonal is never turned": Bug(
        dataclasses.replace(SHARES_OF_ROWS, small=False),
        (("schedule.py", "    if block.diagonal:\n        m, blocks", "    if not block.own:\n        m, blocks"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "two rows that are each other's positive count as one": Bug(
        TRIANGLE,
        (("kernels.py", "other=-1) == rows + first_query", "other=-1) == rows + first_query + queries"),),
        checks.numerics,
        (case(rows=128),),
        "dq",
    ),
    "a positive that is nobody's but its row's has no gradient of its own": Bug(
        TRIANGLE,
        (
            (
                "schedule.py",
                "cdiv(m, kernels.VECTOR_ROWS.value) + cdiv(n, kernels.VECTOR_ROWS.value)",
                "cdiv(m, kernels.VECTOR_ROWS.value)",
            ),
        ),
        checks.numerics,
        (case(rows=129),),
        "dq",
    ),
    "positives below the diagonal are not looked for": Bug(
        TRIANGLE,
        (("schedule.py", " + cdiv(n, kernels.POSITIVE_ROWS.value)", ""),),
        checks.numerics,
        (case(rows=128),),
        "loss",
    ),
    "a panel above the diagonal gives gradients to its rows alone": Bug(
        TRIANGLE,
        (("schedule.py", "if part.diagonal:  # panels there are whole", "if True:"),),
        checks.numerics,
        (case(rows=128),),
        "dq",
    ),
    "a panel on the diagonal gives its gradients twice": Bug(
        TRIANGLE,
        (("schedule.py", "if part.diagonal:  # panels there are whole", "if False:"),),
        checks.numerics,
        (case(rows=128),),
        "dq",
    ),
    "views of a sample are neighbours": Bug(
        TRIANGLE,
        (("_runtime/sweep.py", "places.roll(rows // 2)", "places.roll(1)"),),
        checks.numerics,
        (case(rows=128),),
        "loss",
    ),
    "a row and itself decide a reference": Bug(
        MANY_COLUMNS,
        (("kernels.py", "y = tl.where(rows[:, None] == columns[None, :], LOWEST, y)", "y += 0.0"),),
        checks.unflagged_triangle,
        (),
        "are flagged",
    ),
    "rows of which a tile leaves out all flag it": Bug(
        MANY_COLUMNS,
        (("kernels.py", "tl.where(summed, row_sums, 1.0)", "row_sums"),),
        checks.unflagged_triangle,
        (),
        "are flagged",
    ),
    "rows of other ranks are taken for the first": Bug(
        TRIANGLES_OF_A_RING,
        (("_runtime/sweep.py", "first_query=self.layout.key_offset(self.layout.rank),", "first_query=0,"),),
        checks.over_ranks,
        RANKS,
        "dq",
    ),
    "a gather's backward takes the statistics of other ranks before they are there": Bug(
        TRIANGLES_OF_A_GATHER,
        (("_runtime/table.py", "_of_others(table, len(steps) - 1)", "_of_others(table, -1)"),),
        checks.over_ranks,
        RANKS,
    ),
    "columns leave out the positives of rows": Bug(
        DECOUPLED_ROWS,
        (("kernels.py", "rows[:, None] == column_places[None, :]", "columns[None, :] == row_places[:, None]"),),
        checks.numerics,
        (case(rows=129),),
        "loss",
    ),
    "columns leave out nothing": Bug(
        DECOUPLED_ROWS,
        (("kernels.py", "key_labels + columns, mask=columns < keys,", "key_labels + columns, mask=keys < 0,"),),
        checks.numerics,
        (case(features="matched", rows=128),),
        "loss",
    ),
    "columns that are computed again leave out the positives of rows": Bug(
        DECOUPLED_ROWS,
        (("kernels.py", "of_columns = tl.where(out_of_columns,", "of_columns = tl.where(out_of_rows,"),),
        checks.numerics,
        (case(scale=1000.0, features="unnormalised", rows=129),),
        "dq",
    ),
    "a row is a positive of itself": Bug(
        MEANS_OF_ROWS,
        (("kernels.py", "same_id & (own_rows[:, None] != key_rows[None, :])", "same_id"),),
        checks.numerics,
        (case(),),
        "loss",
    ),
    "an id ends where it begins": Bug(
        SHARES,
        (("kernels.py", "inside & (other <= ids)", "inside & (other < ids)"),),
        checks.numerics,
        (Case(129, 120, 0, scale=14.3, seed=6),),
        "loss",
    ),
    "a panel has the ids of others": Bug(
        MEANS,
        (("schedule.py", "ids[order], rows[order] - panels * each", "ids, rows % each"),),
        checks.numerics,
        (Case(129, 300, 0, scale=14.3, seed=0),),
        "loss",
    ),
    "positives of columns are not counted": Bug(
        MEANS_OF_ROWS, (("schedule.py", "if not block.diagonal:", "if False:"),), checks.numerics, (case(),), "loss"
    ),
    "positives of earlier panels are forgotten": Bug(
        MEANS,
        (("kernels.py", "number += tl.load(number_of_positives + own_rows, mask=known, other=0.0)", "number += 0.0"),),
        checks.numerics,
        (Case(129, 300, 0, scale=14.3, seed=0),),
        "loss",
    ),
    "positives far below all others are lost": Bug(
        SHARES,
        (("kernels.py", "tl.full((POSITIVE_ROWS,), LOWEST,", "tl.full((POSITIVE_ROWS,), 0.0,"),),
        checks.far_positives,
        (),
        "loss|dq",
    ),
    "positives far below 1 are added to nothing at 1": Bug(
        SHARES_OF_ROWS,
        (("kernels.py", "e = tl.where(before == 0.0, LOWEST, e)", "e += 0.0"),),
        checks.far_positives,
        (),
        "loss|dq",
    ),
    "each of some positives has the slope of one": Bug(
        MEANS,
        (("kernels.py", "(positive_slope / positives_of_query)", "positive_slope"),),
        checks.numerics,
        (Case(129, 120, 0, scale=14.3, seed=6),),
        "dq",
    ),
    "columns have the slopes of rows": Bug(
        MEANS_OF_ROWS,
        (("kernels.py", "tl.load(key_sum_of_positives + key_rows,", "tl.load(sum_of_positives + key_rows,"),),
        checks.numerics,
        (Case(129, 120, 0, scale=14.3, seed=0),),
        "dq",
    ),
    "absent keys have a share of a guide's softmax": Bug(
        GUIDED,
        (("kernels.py", 'tl.where((columns < keys)[None, :], guide, float("-inf"))', "guide + 0.0"),),
        checks.numerics,
        (case(),),
        "loss|dq",
    ),
    "parts of a guide's mean have one exponent": Bug(
        GUIDED,
        (("kernels.py", "tl.sum(part_w * below, axis=0)", "tl.sum(part_w, axis=0)"),),
        checks.numerics,
        (dataclasses.replace(case(), seed=3),),
        "loss",
    ),
    "a guide's softmax in base 2": Bug(
        GUIDED,
        (("kernels.py", "GRADIENT_DEPTH, False, WIDEN) * LOG2E", "GRADIENT_DEPTH, False, WIDEN)"),),
        checks.numerics,
        (dataclasses.replace(case(), seed=3),),
        "dq",
    ),
    "a guide's slope is forgotten": Bug(
        GUIDED, (("kernels.py", "(total / positive_slope)", "total"),), checks.numerics, (case(),), "dq"
    ),
    "absent queries have a share of a key's softmax": Bug(
        GUIDED_SIDES,
        (("kernels.py", 'tl.where((rows < queries)[:, None], guide_of_pairs, float("-inf"))', "guide_of_pairs + 0.0"),),
        checks.numerics,
        (case(),),
        "loss|dk",
    ),
    "a guide's columns are those of the last rows": Bug(
        GUIDED_SIDES,
        (("kernels.py", "guided_columns = guided_columns * below + ", "guided_columns = "),),
        pieces.long_strips,
        (),
        "loss",
    ),
    "positives have no share of a key's softmax": Bug(
        GUIDED_SIDES,
        (
            (
                "kernels.py",
                "share = KEY_GUIDE_SHARE / tl.load(key_guide_sum + columns, mask=here, other=1.0)",
                "share = 0.0",
            ),
        ),
        checks.numerics,
        (dataclasses.replace(case(), seed=3),),
        "dk",
    ),
    "the mean of a key is that of a query": Bug(
        GUIDED_SIDES,
        (
            (
                "schedule.py",
                "key_guided=block.key_guide[0], key_guide_sum",
                "key_guided=block.positive[-3], key_guide_sum",
            ),
        ),
        checks.numerics,
        (dataclasses.replace(case(), seed=3),),
        "loss",
    ),
    "a guide's sums of keys stay on their ranks": Bug(
        GUIDED_SIDES_OF_A_GATHER,
        (
            (
                "schedule.py",
                "_merge_guided(parts.unbind(1), parts.shape[0], guide, fresh=True)",
                "guide.copy_(parts[0])",
            ),
        ),
        checks.over_ranks,
        (3, [[50, 50, 50]]),
        "rows",
    ),
    "keys of a guide do not travel": Bug(
        GUIDED_IN_A_RING,
        (
            (
                "_runtime/sweep.py",
                'guides = trip["guide keys"] if traits.guide else None',
                "guides = self.call.guide_keys",
            ),
        ),
        checks.over_ranks,
        (3, [[50, 50, 50]]),
        "rows",
    ),
    "positives above a threshold are left out": Bug(
        ABOVE,
        (("kernels.py", "left_out = above & (is_positive == 0)", "left_out = above"),),
        checks.numerics,
        (case(rows=129),),
        "loss|dq",
    ),
    "what is below a threshold is left out": Bug(
        ABOVE, (("kernels.py", "guide > row_thresholds", "guide < row_thresholds"),), checks.numerics, (case(),), "dq"
    ),
    "thresholds are of the first rows": Bug(
        ABOVE,
        (("kernels.py", "tl.load(thresholds + rows,", "tl.load(thresholds + rows - row0,"),),
        checks.numerics,
        (case(),),
        "loss|dq",
    ),
    "thresholds beyond the last row are read": Bug(
        ABOVE,
        (
            (
                "kernels.py",
                "tl.load(thresholds + rows, mask=rows < queries, other=0.0)",
                "tl.load(thresholds + 2 * rows)",
            ),
        ),
        checks.guarded,
        (RAGGED,),
        "loss|dq",
    ),
    "the gradient has what the sum leaves out": Bug(
        ABOVE,
        (("kernels.py", "value = tl.where(above, 0.0, value)", "value += 0.0"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "the gradient compares with other bits": Bug(
        ABOVE,
        (
            (
                "kernels.py",
                "tl.where(above, 0.0, value)",
                "tl.where(guide > row_thresholds[:, None] + 1e-6, 0.0, value)",
            ),
        ),
        checks.tied,
        (),
        "adds up to",
    ),
    "a threshold that is no number leaves nothing out": Bug(
        ABOVE,
        (("_runtime/engine.py", "sweep.thresholds * 0.0", "0.0 * saved.of_queries[0]"),),
        checks.guide_not_finite,
        (),
        "finite",
    ),
    "keys of a threshold's guide do not travel": Bug(
        ABOVE_OF_A_RING,
        (
            (
                "_runtime/sweep.py",
                'guides = trip["guide keys"] if traits.guide else None',
                "guides = self.call.guide_keys",
            ),
        ),
        checks.over_ranks,
        (3, [[50, 50, 50]]),
        "rows",
    ),
    "the threshold of a column is that of the row": Bug(
        IN_PAIRS,
        (("kernels.py", "z > column_thresholds[None, :]", "z > row_thresholds[:, None]"),),
        checks.numerics,
        (case(),),
        "loss|dq",
    ),
    "queries are not compared with documents": Bug(
        IN_PAIRS,
        (("kernels.py", "(row_first == 0) & column_first", "row_first & (column_first == 0)"),),
        checks.numerics,
        (case(),),
        "loss|dq",
    ),
    "the gradient of a column has what its sum leaves out": Bug(
        IN_PAIRS,
        (("kernels.py", "& row_first, 0.0, of_columns)", "& row_first, of_columns, of_columns)"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "thresholds of another rank's rows are the own": Bug(
        IN_PAIRS_OF_A_RING,
        (("_runtime/sweep.py", "labels, block.first_key)\n", "labels, block.first_key)[:0].new_ones(len(labels))\n"),),
        checks.over_ranks,
        (3, [[50, 50, 50]]),
        "rows",
    ),
    "rows of another rank are the first where they stand after": Bug(
        IN_PAIRS_OF_A_RING,
        (("kernels.py", "columns + (first_key - first_query)", "columns"),),
        checks.over_ranks,
        (3, [[50, 50, 50]]),
        "rows",
    ),
    "a row and itself have a gradient by their id": Bug(
        SHARES_OF_ROWS,
        (("kernels.py", "tl.where(own_rows[:, None] == key_rows[None, :], 0.0, value)", "value"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "a row without positives has a weight": Bug(
        MEANS,
        (("kernels.py", "weight = tl.where(found, weight, nothing)", "weight += nothing"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "ids of another rank's rows are the own": Bug(
        SEVERAL_OF_A_RING,
        (("_runtime/sweep.py", 'ids = trip["key ids"].view(-1) if traits.ids else None', "ids = self.key_ids"),),
        checks.over_ranks,
        (3, [[50, 50, 50]]),
        "rows",
    ),
    "a row has the g of the other at its positive": Bug(
        MARGINS_OF_ROWS,
        (("kernels.py", "tl.load(key_positive_g + columns, mask=here", "tl.load(positive_g + rows, mask=here"),),
        checks.numerics,
        (case(scale=1.0, features="unnormalised", rows=128),),
        "dq",
    ),
    # ---- two sums of each query
    "second sums that are too small are not computed again": Bug(
        TWO_SUMS, (NEVER_FLAGGED,), checks.numerics, (case(1000.0, "unnormalised"),)
    ),
    "second sums have the reference of the first": Bug(
        TWO_SUMS,
        (("kernels.py", "tl.floor((shared + HEADROOM) * MULTIPLE) - HEADROOM", "shared"), NEVER_FLAGGED),
        checks.numerics,
        (case(100.0, "negative"),),
    ),
    "second sums of columns of a wide range are lost": Bug(
        TWO_SUMS_OF_ROWS,
        (
            (
                "kernels.py",
                "top = tl.maximum(second_column_reference, top)",
                "top = second_column_reference * 0.0 + top",
            ),
        ),
        checks.numerics,
        (case(1000.0, "unnormalised"),),
    ),
    "second sums of nothing below the diagonal have a reference": Bug(
        dataclasses.replace(TWO_SUMS_OF_ROWS, dim=64, small=False),
        (
            (
                "kernels.py",
                "tl.store(row_second_exponent + key_block * rows_stride + rows, nothing + LOWEST",
                "tl.store(row_second_exponent + key_block * rows_stride + rows, nothing + 200.0",
            ),
        ),
        checks.selftest,
    ),
    "the second sums of earlier panels are forgotten": Bug(
        TWO_SUMS,
        (("schedule.py", "part.second, fresh)", "part.second, fresh_queries)"),),
        checks.numerics,
        (Case(129, 300, 0, scale=14.3, seed=0),),
        "loss",
    ),
    "the second share of columns is that of rows": Bug(
        TWO_SUMS_OF_ROWS,
        (("kernels.py", "tl.load(key_second_mantissa + visiting_keys)", "tl.load(second_mantissa + visiting_keys)"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "the positive of another row lacks its second share": Bug(
        TWO_SUMS_OF_ROWS,
        (("kernels.py", "key_second_mantissa, slope * MULTIPLE)", "key_second_mantissa, slope * MULTIPLE) * 0.0"),),
        checks.numerics,
        (case(features="matched", rows=129),),
        "dq",
    ),
    "a second sum is not divided by its weight": Bug(
        TWO_SUMS_OF_ROWS,
        (("kernels.py", "sum_of_second / second_weight", "sum_of_second / weight"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "second sums of another rank's rows are the own": Bug(
        TWO_SUMS_OF_A_RING,
        (("_runtime/package.py", "view(self.key_positive[-2:])", "view(self.key_positive[-4:-2])"),),
        checks.over_ranks,
        (3, [[50, 50, 50]]),
        "rows",
    ),
    "the partner of a row is the row itself": Bug(
        PARTNERS,
        (("kernels.py", "tl.load(query_mantissa + there, mask=here", "tl.load(query_mantissa + rows, mask=here"),),
        checks.numerics,
        (case(),),
    ),
    "the sums of partners are noted once they have weights": Bug(
        PARTNERS_APART,
        (
            (
                "schedule.py",
                "    m, positive = block.q.shape[0], block.positive.unbind()\n    loss = ",
                "    combine(block)\n    m, positive = block.q.shape[0], block.positive.unbind()\n    loss = ",
            ),
        ),
        checks.numerics,
        (case(),),
    ),
    "rows are partners of rows that have another": Bug(
        PARTNERS,
        (
            (
                "kernels.py",
                "mutual = here & (tl.load(labels + there, mask=here, other=-1) == rows + first_query)",
                "mutual = here",
            ),
        ),
        checks.rows_without_partners,
    ),
    "the sum of a column is that of the row": Bug(
        COLUMNS,
        (("kernels.py", "sum_of_column = tl.load(key_mantissa + i", "sum_of_column = tl.load(query_mantissa + i"),),
        checks.numerics,
        (case(),),
    ),
    "a column has the exponent of the row": Bug(
        COLUMNS, (("kernels.py", "tl.load(key_exponent + i", "tl.load(query_exponent + i"),), checks.numerics, (case(),)
    ),
    "a column has the weight of its row": Bug(
        COLUMNS_APART,
        (("kernels.py", "sum_of_column / key_weight)", "sum_of_column / weight)"),),
        checks.numerics,
        (case(),),
    ),
    "columns keep their sums": Bug(
        COLUMNS,
        (("kernels.py", "tl.store(key_mantissa + i, sum_of_column", "tl.store(key_mantissa + i, mantissa"),),
        checks.numerics,
        (case(),),
    ),
    "columns of ids have no slope": Bug(
        COLUMNS_OF_IDS,
        (("kernels.py", "tl.store(columns + i, key_weight", "tl.store(columns + i, 0.0 * key_weight"),),
        checks.numerics,
        (dataclasses.replace(case(), seed=3),),
    ),
    "positives have no part by their columns": Bug(
        COLUMNS_OF_IDS,
        (("kernels.py", "value += tl.exp2(tl.fma(z, slope, -e[None, :])) * b[None, :]", "value += 0.0 * e[None, :]"),),
        checks.numerics,
        (dataclasses.replace(case(), seed=3),),
    ),
    "the shift is no part of the sum of columns": Bug(
        COLUMNS_OF_IDS,
        (("schedule.py", "SUMS_LACK_SHIFT = True", "SUMS_LACK_SHIFT = False"),),
        checks.numerics,
        (dataclasses.replace(case(), bias=-2.0, seed=3),),
    ),
    "positives are in the sums of columns": Bug(
        COLUMNS,
        (("kernels.py", "p = tl.where(left_out, 0.0, p)", "row_p = tl.where(left_out, 0.0, p)"),),
        checks.numerics,
        (case(),),
    ),
    "columns have no weights": Bug(
        ROOTS_OF_ROWS,
        (("kernels.py", "KEY_SHARE / tl.load(key_mantissa + visiting_keys)", "KEY_SHARE + tl.zeros_like(key_e)"),),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "g stands where another row looks for z": Bug(
        ROOTS_OF_ROWS,
        (("schedule.py", "key_kept_z=block.key_positive[4]", "key_kept_z=block.key_positive[0]"),),
        checks.numerics,
        (case(rows=129),),
        "dq",
    ),
    # ---- queries' own numbers
    "the weight of a query is taken for its sum over negatives": Bug(
        OWN, (("kernels.py", "tl.load(vectors + vectors_stride + i", "tl.load(vectors + i"),), checks.own_numbers
    ),
    "a share of 0 divides the positive of its row": Bug(
        OWN,
        (("kernels.py", "tl.where(value == 0.0, 1.0, ", "tl.where(False, 1.0, "),),
        checks.own_numbers,
        (),
        "weight 0",
    ),
    "the next state is not written": Bug(
        STATES, (("kernels.py", "vectors + i, of_state.to", "vectors + i, state.to"),), checks.next_states
    ),
    "the state of a query is taken for its weight": Bug(
        RATES, (("kernels.py", "tl.load(vectors + vectors_stride + i", "tl.load(vectors + i"),), checks.next_states
    ),
    "the state of a key is taken for that of its query": Bug(
        STATES_OF_SIDES,
        (("kernels.py", "tl.load(vectors + 3 * vectors_stride + i", "tl.load(vectors + 2 * vectors_stride + i"),),
        checks.next_states,
        (),
        "key_state",
    ),
    # ---- a number of all positives
    "slopes are forgotten": Bug(
        BY_ALL,
        (("kernels.py", "tl.load(pooled_ptr + 1)", "0.0 * tl.load(pooled_ptr + 1)"),),
        checks.numerics,
        (case(3.0),),
        "dq",
    ),
    "sums lack what the logit has besides z": Bug(
        BY_ALL,
        (("schedule.py", "SUMS_LACK_SHIFT = True", "SUMS_LACK_SHIFT = False"),),
        checks.numerics,
        (dataclasses.replace(case(3.0), bias=-2.0),),
        "dq",
    ),
    "the softmax is over the positives of one rank": Bug(
        BY_ALL_OF_A_RING,
        (("_runtime/pooled.py", "if group is None:", "if True:"),),
        checks.over_ranks,
        (2, [[30, 70]], False),
        "rows",
    ),
    # ---- terms that combine the sum and the positive of a query
    "g of a positive is the query's part of the loss": Bug(
        WEIGHED,
        (
            (
                "schedule.py",
                "first_key=block.first_key, positive_g=positive[0]",
                "first_key=block.first_key, positive_g=positive[3]",
            ),
        ),
        checks.numerics,
        (case(),),
        "dq",
    ),
    "g of a positive lacks its share of the sum": Bug(
        WEIGHED, (("kernels.py", " + weight * tl.exp(p - r)", ""),), checks.numerics, (case(features="matched"),), "dq"
    ),
    "a sum is not divided by the weight of its row": Bug(
        WEIGHED, (("kernels.py", "mantissa = mantissa / weight", "mantissa *= 1.0"),), checks.numerics, (case(),), "dq"
    ),
    "positives that a sum leaves out keep the g of other keys": Bug(
        WITHOUT_POSITIVES,
        (
            (
                "kernels.py",
                "value = QUERY_SHARE * tl.load(positive_g + rows, mask=here, other=0.0)",
                "value = tl.load(g + rows.to(tl.int64) * g_stride + columns, mask=here, other=0.0)",
            ),
        ),
        checks.numerics,
        (case(3.0, rows=100),),
        "dq",
    ),
    "the mask of the gradient is that of the forward, inverted": Bug(
        WITHOUT_POSITIVES,
        (("kernels.py", "value = tl.where(same_id, 0.0, value)", "value = tl.where(same_id, value, 0.0)"),),
        checks.numerics,
        (Case(100, 100, 0, scale=3.0, seed=0),),
        "dq",
    ),
    "how a term changes with the scale is left out": Bug(
        ANGULAR,
        (("kernels.py", "scale_parts + i, scale_part.to", "scale_parts + i, (0.0 * scale_part).to"),),
        checks.numerics,
        (case(),),
        "dscale",
    ),
    "how a term changes with the positive's similarity is left out": Bug(
        ANGULAR, (("kernels.py", "positive_slope + through_z", "positive_slope"),), checks.numerics, (case(),), "dq"
    ),
    "the weights of rows have no part in the gradient of the bias": Bug(
        WEIGHED,
        (("kernels.py", "bias_parts + i, bias_part.to", "bias_parts + i, (0.0 * bias_part).to"),),
        checks.numerics,
        (case(3.0),),
        "dbias",
    ),
    "slopes of own negatives are not written": Bug(
        OWN_OF_PANELS,
        (("kernels.py", "vectors + vectors_stride + i, of_h.to", "vectors + vectors_stride + i, h.to"),),
        checks.own_numbers,
        (),
        "gradients of negatives",
    ),
    "slopes of weights are those of negatives": Bug(
        OWN_OF_PANELS,
        (("kernels.py", "vectors + i, of_u.to", "vectors + i, of_h.to"),),
        checks.own_numbers,
        (),
        "gradients of weights",
    ),
    # ---- what only a GPU shows
    "32-bit offsets of accumulators in finish": Bug(
        Made("panel", dim=1024),
        (("kernels.py", "r.to(tl.int64)[:, None] * DIM", "r[:, None] * DIM"),),
        checks.far_accumulators,
        (),
    ),
    "32-bit offsets of accumulators in the product": Bug(
        Made("panel", dim=1024),
        (("kernels.py", "total += row0.to(tl.int64) * DIM", "total += row0 * DIM"),),
        checks.far_accumulators,
        (),
    ),
    "tf32 products of fp32 features": Bug(
        EXACT,
        (("kernels.py", 'input_precision="ieee"', 'input_precision="tf32"'),),
        checks.numerics,
        (case(100.0, rows=129),),
        "loss",
    ),
    "a recorded backward takes what another forward has left": Bug(
        PANEL,
        (("_runtime/replay.py", "saved.of_queries.data_ptr() != self._handed.data_ptr()", "False"),),
        checks.recorded,
        (),
        "differs",
    ),
    "a recorded result is overwritten by the next call": Bug(
        PANEL,
        (("_runtime/replay.py", "return loss, Saved(", "return self._loss.detach(), Saved("),),
        checks.recorded,
        (),
        "differs",
    ),
}
ON_A_GPU = tuple(BUGS)[-5:]
