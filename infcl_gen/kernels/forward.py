"""references, forward, forward_wide: sums of 2^y over the rows and columns of one panel."""

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
    pointers,
    strides,
    when,
)

TEMPLATE = "forward"
Q = Argument("q", "*features", block=("FORWARD_ROWS", "FORWARD_DEPTH"))
K = Argument("k", "*features", block=("FORWARD_KEYS", "FORWARD_DEPTH"))
STASH = Argument("stash", "*bf16", block=("FORWARD_ROWS", "FORWARD_KEYS // 2"))


def wanted(traits: Traits) -> bool:
    return traits.strategy != "torch"


def kernels(traits: Traits) -> tuple[Kernel, ...]:
    plain = pointers("*features", "q", "k")
    described = when(traits.descriptors, constants("DESCRIPTORS"))
    parts = pointers("*fp32", "row_exponent", "row_sum") + when(
        traits.has_keys, pointers("*fp32", "key_exponent", "key_sum")
    )
    flags = when(not traits.exact, pointers("*int32", "flags"))
    sizes = (*counts("queries", "keys"), *counts("strip", multiple="never"), *counts("rows_stride"))
    sizes += when(traits.has_keys, counts("keys_stride"))
    lengths = strides("q", "k")
    sources: tuple[Argument, ...] = (Q, K)
    if traits.keeps_keys:
        sources = (*features("q", "FORWARD_ROWS", traits.parts), *features("k", "FORWARD_KEYS", traits.parts))
    forward = (
        *sources, *SCALARS, *when(not traits.exact, pointers("*fp32", "reference")), *parts, *flags,
        *when(traits.stash, STASH, pointers("*fp32", "stash_reference")), *sizes,
        *when(traits.stash and not traits.descriptors, counts("stash_stride", multiple="always")),
        *when(traits.stash, counts("reference_stride")), *lengths, *when(not traits.exact, constants("MASKED")),
        *constants("DESCRIPTORS"), *WIDEN, *when(traits.stash, constants("STASH")),
    )  # fmt: skip
    first = (
        *plain, *SCALARS, *pointers("*fp32", "reference"), *counts("queries", "keys"), *lengths, *described, *WIDEN,
    )  # fmt: skip
    again = (*plain, *SCALARS, *parts, *flags, *sizes, *lengths, *described, *WIDEN)
    found = Kernel("forward", forward, "forward")
    if traits.exact:
        return (found,)
    return (Kernel("references", first, "forward"), found, Kernel("forward_wide", again, "forward", wide=True))
