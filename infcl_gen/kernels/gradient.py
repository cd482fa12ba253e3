"""gradient, gradient_wide, ratios, gradient_positives: g of one panel."""

from __future__ import annotations

from infcl_gen.kernels.arguments import (
    SCALARS,
    WIDEN,
    Argument,
    Kernel,
    Traits,
    constants,
    counts,
    places,
    pointers,
    positive,
    statistics,
    strides,
    when,
)

TEMPLATE = "gradient"
Q = Argument("q", "*features", block=("GRADIENT_ROWS", "GRADIENT_DEPTH"))
K = Argument("k", "*features", block=("GRADIENT_KEYS", "GRADIENT_DEPTH"))
RATIOS = Kernel(
    "ratios",
    (
        *pointers("*fp32", "exponent", "mantissa", "ratio", "reference", "lowest"),
        *counts("count"),
        *constants("SHARE", "ROWS"),
    ),
)


def wanted(traits: Traits) -> bool:
    return traits.strategy in ("panel", "stash")


def kernels(traits: Traits) -> tuple[Kernel, ...]:
    shared = traits.has_keys and not traits.exact  # one exponential of an element for both softmaxes
    flagged = shared or traits.stash
    g = pointers("*features", "g", *["g_low"] * traits.split)
    flags = pointers("*int32", "flags")
    sizes = (*counts("queries", "keys"), *counts("strip", multiple="never"), *counts("g_stride", multiple="always"))
    own = pointers("*fp32", "query_exponent", "query_mantissa", "key_ratio", "key_reference", "key_lowest")
    gradient = (
        Q, K, *SCALARS, *(own if shared else statistics(traits)), *g, *when(shared, flags), *sizes, *strides("q", "k"),
        *constants("DESCRIPTORS"), *WIDEN,
    )  # fmt: skip
    again = (
        *pointers("*features", "q", "k"), *SCALARS, *statistics(traits), *g, *flags, *sizes, *strides("q", "k"), *WIDEN,
    )  # fmt: skip
    positives = (
        *places(traits), *positive(traits), *SCALARS, *statistics(traits), *g, *counts("queries", "keys"),
        *counts("g_stride", multiple="always"),
    )  # fmt: skip
    found = [Kernel("gradient", gradient, "gradient")]
    if flagged:
        found.append(Kernel("gradient_wide", again, "gradient", wide=True))
    if shared:
        found.append(RATIOS)
    return (*found, Kernel("gradient_positives", positives))
