"""The other kernels: products, what finishes a gradient, and copies of features in another form."""

from __future__ import annotations

from infcl_gen.kernels.arguments import (
    SCALARS,
    WIDEN,
    Argument,
    Kernel,
    Traits,
    constants,
    counts,
    pointers,
    statistics,
    strides,
)

PRODUCT = Kernel(
    "product",
    (
        *pointers("*features", "g", "x"), *pointers("*fp32", "total"), *counts("rows", "inner"),
        *counts("g_row_stride", multiple="always"), *counts("g_inner_stride"),
        *counts("x_inner_stride", multiple="dim"), Argument("x_depth_stride", "depth stride"),
        *constants("FRESH"), *WIDEN,
    ),
    "product",
)  # fmt: skip
FINISH = Kernel(
    "finish",
    (
        *pointers("*fp32", "total"), *pointers("*inputs", "x", "out"), *pointers("*fp32", "dots"), *SCALARS,
        *pointers("*fp32", "upstream"), *pointers("fp32", "weight"), *counts("rows"), *strides("x"), *constants("DOTS"),
    ),
    "finish",
)  # fmt: skip
SCALAR_GRADIENTS = Kernel(
    "scalars",
    (
        *pointers("*fp32", "dots", "dscale", "dbias"), *SCALARS, *pointers("*fp32", "upstream"),
        *pointers("fp32", "weight"), *counts("parts", multiple="never"), *counts("rows"), *constants("BLOCK"),
    ),
)  # fmt: skip
SPLIT = Kernel(
    "split",
    (
        *pointers("*inputs", "x"), *pointers("*features", "out"), *counts("rows"), *strides("x"),
        *counts("out_stride", multiple="dim"), *constants("KEYS"),
    ),
    "finish",
)  # fmt: skip
COPY_INPUTS = Kernel(
    "copy_inputs",
    (
        *pointers("*inputs", "q", "k"), *SCALARS, *pointers("*inputs", "q_out", "k_out"),
        *pointers("*fp32", "scale_out", "bias_out"), *counts("queries", "keys"), *strides("q", "k"),
    ),
    "finish",
)  # fmt: skip
MERGE_RANKS = Kernel(
    "merge_ranks",
    (
        *pointers("*fp32", "part_exponent", "part_sum", "exponent", "mantissa"), *counts("keys"),
        *counts("ranks", multiple="never"), *counts("part_stride"),
    ),
)  # fmt: skip


def gradient_from_stash(traits: Traits) -> Kernel:
    arguments = (
        *pointers("*bf16", "stash"), *pointers("*fp32", "stash_reference"), *statistics(traits),
        *pointers("*features", "g"), *pointers("*int32", "flags"), *counts("queries", "keys"),
        *counts("strip", multiple="never"), *counts("stash_stride", multiple="always"), *counts("reference_stride"),
        *counts("g_stride", multiple="always"),
    )  # fmt: skip
    return Kernel("gradient_from_stash", arguments, "gradient")
