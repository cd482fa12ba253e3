"""gradient, gradient_wide, ratios, gradient_positives: g of one panel."""

from __future__ import annotations

from infcl_gen.kernels.arguments import (
    SCALARS,
    WIDEN,
    Argument,
    Kernel,
    constants,
    counts,
    places,
    pointers,
    positive,
    statistics,
    strides,
    when,
)
from infcl_gen.kernels.choice import Block, Choice
from infcl_gen.kernels.family import FP32_BLOCKS, Family, Tile

BLOCKS = {
    "hopper": Block(128, 128, 64, 4, 3),
    "blackwell": Block(128, 128, 64, 8, 3),
    "ampere": Block(128, 128, 64, 8, 3),
    "small": Block(128, 128, 32, 8, 3),
    "cdna3": Block(128, 128, 64, 8, 2),
    "cdna4": Block(128, 128, 64, 8, 2),
}
STORED_BLOCKS = {"hopper": Block(256, 128, 64, 8, 3)}  # of tiles that the forward stores through descriptors
STRATEGIES = ("panel", "stash")
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


class GradientTile(Tile):
    """Rows x keys of z, `depth` of the embedding at a time."""

    name = "gradient"
    tuned = described = walks = True

    def tabulated(self, architecture: str, choice: Choice) -> Block:
        if choice.operand_bytes != 2:
            return FP32_BLOCKS[architecture]
        stored = STORED_BLOCKS if choice.stash and choice.descriptors else {}
        return stored.get(architecture, BLOCKS[architecture])


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    shared = choice.has_keys and not choice.exact  # one exponential of an element for both softmaxes
    flagged = shared or choice.stash
    g = pointers("*features", "g", *["g_low"] * choice.split)
    flags = pointers("*int32", "flags")
    sizes = (*counts("queries", "keys"), *counts("strip", multiple="never"), *counts("g_stride", multiple="always"))
    own = pointers("*fp32", "query_exponent", "query_mantissa", "key_ratio", "key_reference", "key_lowest")
    gradient = (
        Q, K, *SCALARS, *(own if shared else statistics(choice)), *g, *when(shared, flags), *sizes, *strides("q", "k"),
        *constants("DESCRIPTORS"), *WIDEN,
    )  # fmt: skip
    again = (
        *pointers("*features", "q", "k"), *SCALARS, *statistics(choice), *g, *flags, *sizes, *strides("q", "k"), *WIDEN,
    )  # fmt: skip
    positives = (
        *places(choice), *positive(choice), *SCALARS, *statistics(choice), *g, *counts("queries", "keys"),
        *counts("g_stride", multiple="always"),
    )  # fmt: skip
    found = [Kernel("gradient", gradient, "gradient")]
    if flagged:
        found.append(Kernel("gradient_wide", again, "gradient", wide=True))
    if shared:
        found.append(RATIOS)
    return (*found, Kernel("gradient_positives", positives))


FAMILY = Family("gradient", kernels, STRATEGIES, tile=GradientTile(), revision=1)
