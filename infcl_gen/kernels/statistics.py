"""merge, positives, loss_terms, total_loss: from partial sums to the loss."""

from __future__ import annotations

from infcl_gen.kernels.arguments import (
    SCALARS,
    WIDEN,
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

TEMPLATE = "statistics"


def wanted(traits: Traits) -> bool:
    return traits.strategy != "torch"


def kernels(traits: Traits) -> tuple[Kernel, ...]:
    keys = traits.has_keys
    merge = (
        *pointers("*fp32", "row_exponent", "row_sum", "query_exponent", "query_mantissa"), *counts("queries"),
        *counts("row_parts", multiple="never"), *counts("rows_stride", "queries_written"),
        *when(
            keys, pointers("*fp32", "key_exponent", "key_sum", "key_totals_exponent", "key_totals_mantissa"),
            counts("keys"), counts("key_parts", multiple="never"), counts("keys_stride", "keys_written"),
        ),
    )  # fmt: skip
    positives = (
        *pointers("*features", "q", "k"), *places(traits), *pointers("*fp32", "row_exponent"),
        *when(keys, pointers("*fp32", "key_exponent")), *positive(traits), *counts("queries", "keys"),
        *when(keys, counts("strip", multiple="never")), *counts("rows_stride"), *when(keys, counts("keys_stride")),
        *strides("q", "k"), *WIDEN,
    )  # fmt: skip
    loss_terms = (
        *statistics(traits), *positive(traits), *SCALARS, *pointers("*fp64", "part_sums"), *counts("queries"),
        *when(keys, counts("keys")), *pointers("fp32", "query_weight"), *when(keys, pointers("fp32", "key_weight")),
        *constants("BLOCK"),
    )  # fmt: skip
    total_loss = (
        *pointers("*fp64", "part_sums"), *pointers("*fp32", "loss"), *counts("parts", multiple="never"),
        *constants("BLOCK"),
    )  # fmt: skip
    return (
        Kernel("merge", merge),
        Kernel("positives", positives, "positive"),
        Kernel("loss_terms", loss_terms, warps=16),
        Kernel("total_loss", total_loss),
    )
