"""fused_queries, fused_keys and their wide twins: gradients without ever storing g."""

from __future__ import annotations

from infcl_gen.kernels.arguments import (
    SCALARS,
    WIDEN,
    Argument,
    Kernel,
    Traits,
    constants,
    counts,
    features,
    places,
    pointers,
    positive,
    statistics,
    strides,
    when,
)
from infcl_gen.kernels.gradient import RATIOS

TEMPLATE = "fused"


def wanted(traits: Traits) -> bool:
    return traits.strategy == "fused"


def kernels(traits: Traits) -> tuple[Kernel, ...]:
    positives = (
        *places(traits), *positive(traits), *SCALARS, *statistics(traits), *pointers("*fp32", "positive_g"),
        *counts("queries", "keys"),
    )  # fmt: skip
    found = [RATIOS] if traits.has_keys else []
    found.append(Kernel("fused_positives", positives))
    for own in ("queries", "keys"):
        found.append(Kernel(f"fused_{own}", _arguments(traits, own, wide=False), "fused"))
        if traits.has_keys:
            found.append(Kernel(f"fused_{own}_wide", _arguments(traits, own, wide=True), "fused", wide=True))
    return tuple(found)


def _arguments(traits: Traits, own: str, wide: bool) -> tuple[Argument, ...]:
    rows = ("FUSED_ROWS", "FUSED_KEYS") if own == "queries" else ("FUSED_KEYS", "FUSED_ROWS")
    sources = pointers("*features", "q", "k")
    if not wide:
        sources = (*features("q", rows[0], traits.parts), *features("k", rows[1], traits.parts))
    other = "key" if own == "queries" else "query"
    ratios = pointers("*fp32", *(f"{other}_{part}" for part in ("ratio", "reference", "lowest")))
    return (
        *sources, *places(traits), *SCALARS, *statistics(traits), *when(traits.has_keys and not wide, ratios),
        *pointers("*fp32", "positive_g", "total"), *when(traits.has_keys, pointers("*int32", "flags")),
        *counts("queries", "keys"), *strides("q", "k"), *constants("FRESH", "MASKED"),
        *when(not wide, constants("DESCRIPTORS")), *WIDEN,
    )  # fmt: skip
