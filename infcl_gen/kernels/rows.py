"""The kernels of a row of panels: a forward where only rows have sums, whose tiles become gradients of logits by one
factor for each query."""

from infcl_gen.kernels.arguments import (
    SCALARS,
    STRIDES,
    Argument,
    Kernel,
    arguments,
    gradient_of_positive,
    places,
    statistics,
)
from infcl_gen.kernels.choice import Choice
from infcl_gen.kernels.family import Family
from infcl_gen.kernels.forward import STASH, K, Q

SUMS = "row_exponent row_sum flags"
SIZES = "queries keys strip"


def forward_kernels(choice: Choice) -> tuple[Kernel, ...]:
    first = arguments(
        "q k", SCALARS, "own_reference queries keys", STRIDES, "DESCRIPTORS" * choice.descriptors, "WIDEN"
    )
    kept = "stash_stride" * (not choice.descriptors)
    forward = arguments(
        Q, K, SCALARS, "own_reference", SUMS, STASH, SIZES, f"rows_stride {kept}", STRIDES,
        "MASKED DESCRIPTORS WIDEN STASH",
    )  # fmt: skip
    again = arguments("q k", SCALARS, SUMS, SIZES, "rows_stride", STRIDES, "DESCRIPTORS" * choice.descriptors, "WIDEN")
    return (
        Kernel("row_references", first, "forward"),
        Kernel("forward", forward, "forward"),
        Kernel("forward_wide", again, "forward", wide=True),
    )


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    noted = "positive_g" if choice.traits.combined else "positive_z"
    of_blocks = arguments(statistics(choice), noted, "own_reference share flags", SIZES)
    again = arguments("q k", SCALARS, statistics(choice), "g flags", SIZES, "g_stride", STRIDES, "WIDEN")
    positives = arguments(places(choice), gradient_of_positive(choice), "share g queries keys g_stride")
    features = arguments(Argument("q", Q.type), "share out rows q_row_stride q_depth_stride")
    return (
        Kernel("shares", of_blocks),
        Kernel("row_gradient_wide", again, "forward", wide=True),
        Kernel("row_positives", positives),
        Kernel("weighted_queries", features, "finish"),
    )


FORWARD = Family("rows_forward", forward_kernels, ("rows",), revision=1)
FAMILY = Family("rows", kernels, ("rows",), revision=3)
