"""gradient, gradient_wide, ratios, mirror, gradient_positives: the gradient g of one panel's logits."""

import dataclasses
from collections.abc import Mapping

from infcl_gen.kernels import hopper_slabs
from infcl_gen.kernels.arguments import (
    FACTORS,
    GUIDE_STRIDES,
    GUIDES,
    IDS,
    RADIAL,
    SCALARS,
    STRIDES,
    Argument,
    Kernel,
    arguments,
    both_labels,
    compared,
    gradient_of_positive,
    of_positives,
    places,
    positive,
    softmaxes,
    statistics,
)
from infcl_gen.kernels.choice import Block, Choice
from infcl_gen.kernels.family import Family, Tile

STORED_BLOCKS = {"hopper": Block(256, 128, 64, 8, 3)}  # of tiles that the forward stores through descriptors
# Terms and slopes of pairs take registers beside z, and AMD's tiles pass through shared memory where they are halved.
# A step of siglip at B = 65 536, D = 768 on an H200: 33.2 ms, 34.4 with 3 stages, 38.6 with 4 warps.
PAIR_BLOCKS = {
    "hopper": Block(128, 128, 64, 8, 4), "cdna3": Block(128, 64, 64, 8, 2), "cdna4": Block(128, 64, 64, 8, 2),
}  # fmt: skip
# The same step: 32.9 ms, 39.0 with 256 x 128. Its threads hold 128 numbers of z, so that much else spills.
WIDE_PAIR_BLOCKS = {"hopper": Block(128, 256, 64, 8, 3)}
# Ids take registers beside z: with 128 numbers of it a thread of sm_90 spills 16 to 160 bytes, with 64 one of sm_80 24.
ID_BLOCKS = {
    "hopper": (Block(128, 128, 64, 8, 4), Block(128, 64, 32, 8, 3)),
    "blackwell": (Block(128, 128, 64, 8, 3), Block(128, 64, 32, 8, 3)),
    "ampere": (Block(128, 64, 64, 8, 3), Block(64, 64, 32, 8, 3)),
    "small": (Block(128, 64, 32, 8, 3), Block(64, 64, 32, 8, 3)),
    "cdna3": (Block(64, 64, 64, 8, 2), Block(64, 64, 32, 8, 2)),
    "cdna4": (Block(64, 64, 64, 8, 2), Block(64, 64, 32, 8, 2)),
}
# A second statistic takes as many again: with 64 numbers of z a thread of sm_90 spills 296 to 960 bytes.
SEVERAL_BLOCKS = {
    "hopper": (Block(128, 64, 64, 8, 4), Block(64, 32, 32, 8, 3)),
    "blackwell": (Block(64, 64, 64, 8, 3), Block(64, 64, 32, 8, 3)),
    "ampere": (Block(64, 64, 64, 8, 3), Block(64, 64, 32, 8, 3)),
    "small": (Block(64, 64, 32, 8, 3), Block(64, 64, 32, 8, 3)),
    "cdna3": (Block(64, 64, 64, 8, 2), Block(64, 64, 32, 8, 2)),
    "cdna4": (Block(64, 64, 64, 8, 2), Block(64, 64, 32, 8, 2)),
}
# A thread's 64 numbers of z and of a guide's similarity take 255 registers of sm_90. At 65 536 x 768 on an H200 distill
# takes 79 ms, gist 78; with half of the keys 101 and 93.
GUIDE_BLOCKS = {"hopper": Block(128, 128, 64, 8, 3)}
# Softmaxes of a guide over both axes: of 128 keys a thread has 32 numbers of each vector over them, and forward spills
# 848 bytes of sm_90. Pointers at D = 200 spill 640 with 128 rows, and 48 with a depth of 64; 64 keys spill 40 of sm_80.
SIDES_BLOCKS = {"hopper": Block(64, 64, 32, 8, 3), "ampere": Block(64, 32, 64, 8, 3)}
# A thread holds 64 numbers of z, and of g of each prefix 64 in 32 registers: with 4 prefixes it takes 255 of sm_90.
# That takes 27.8 ms at 65 536 x 768 on an H200; tiles of 64 x 64, and g in fp32, 34.
SLAB_BLOCKS = {
    "hopper": Block(64, 128, 32, 4, 6),
    "blackwell": Block(64, 64, 64, 8, 3),
    "ampere": Block(64, 64, 64, 4, 3),
    "small": Block(64, 64, 32, 4, 3),
    "cdna3": Block(64, 64, 32, 8, 2),
    "cdna4": Block(64, 64, 32, 8, 2),
}
# Cosines have factors of rows and keys, and sums of either: 64 x 128 over 4 warps of sm_90 spills 490 bytes a thread.
COSINE_BLOCKS = SLAB_BLOCKS | {"hopper": Block(64, 128, 32, 8, 3)}
MOST_COSINES = 6  # beside half of the keys of these tiles
# Where each side has an exponential: with 4 warps a thread of sm_90 spills 576 bytes, and with 8 one of gfx942 620.
APART_BLOCKS = {
    "hopper": Block(64, 64, 32, 8, 3), "blackwell": Block(64, 32, 64, 8, 3), "ampere": Block(64, 32, 64, 4, 3),
    "small": Block(64, 32, 32, 4, 3), "cdna3": Block(64, 32, 32, 4, 2), "cdna4": Block(64, 32, 32, 4, 2),
}  # fmt: skip
APART_COSINE_BLOCKS = APART_BLOCKS | {"hopper": Block(64, 32, 32, 8, 3)}  # with 64 keys 128 bytes
STRATEGIES = ("panel", "stash", "rows")
Q = Argument("q", "*{operands}", block=("GRADIENT_ROWS", "GRADIENT_DEPTH"))
K = Argument("k", "*{operands}", block=("GRADIENT_KEYS", "GRADIENT_DEPTH"))
MIRROR = Kernel("mirror", arguments("g queries g_stride"), template="mirror")
RATIOS = Kernel("ratios", arguments("exponent mantissa ratio reference lowest count SHARE ROWS"), template="ratios")


class GradientTile(Tile):
    """Rows x keys of z, `depth` of the embedding at a time."""

    name = "gradient"
    tuned = described = walks = True

    def accumulators(self, block: Block, choice: Choice) -> int:
        """Beside z there is g of each prefix, until the last one's is known: in pairs of 16 bits."""
        return block.rows * block.keys * (2 + len(choice.slabs)) // 2

    def tabulated(self, architecture: str, choice: Choice) -> Block:
        if few := few_block(architecture, choice):
            return few
        if choice.slabs:
            apart = choice.both_axes and not choice.one_exponential
            own, of_cosines = (APART_BLOCKS, APART_COSINE_BLOCKS) if apart else (SLAB_BLOCKS, COSINE_BLOCKS)
            return beside_prefixes(of_cosines if choice.traits.renormalised else own, architecture, choice)
        two = choice.both_axes and choice.traits.combined and not choice.traits.even  # exponentials of each pair
        if choice.traits.ids_in_tiles or choice.traits.thresholds or two:
            return ID_BLOCKS[architecture][choice.operand_bytes > 2]
        if choice.traits.pairs and choice.operand_bytes == 2:
            wide = WIDE_PAIR_BLOCKS.get(architecture) if _has_registers(choice) else None
            return wide or PAIR_BLOCKS.get(architecture) or super().tabulated(architecture, choice)
        stored = STORED_BLOCKS if choice.stash and choice.descriptors and choice.operand_bytes == 2 else {}
        return stored.get(architecture) or super().tabulated(architecture, choice)


def beside_prefixes(blocks: Mapping[str, Block], architecture: str, choice: Choice) -> Block:
    """The tile, or a part of it where sums or gradients of more prefixes take its registers, or factors, too; on Hopper
    that of the variant, where there is one."""
    if hopper_slabs.here(choice):
        return hopper_slabs.ordinary_block(choice)
    block, many = blocks[architecture], len(choice.slabs) > hopper_slabs.MOST_PREFIXES
    most = choice.traits.renormalised and len(choice.slabs) > MOST_COSINES
    return dataclasses.replace(block, keys=max(16, block.keys // (1 + many + 2 * most)))


def few_block(architecture: str, choice: Choice) -> Block | None:
    """The tile where a thread has registers for few numbers of z: two statistics take them, a guide's similarities, and
    exact products of fp32, whose larger tiles spill 300 to 2 600 bytes. Losses of one positive still have these, but
    for those with thresholds. Beside them ids spill 32 bytes; beside a guide, pointers at D = 200 1 040. So do masks of
    both rows of a pair 440 to 736 in the forward, and 88 in the gradient, and halves of these tiles none but 80 of
    pointers at D = 100."""
    traits, wide = choice.traits, choice.operand_bytes > 2
    few = traits.guide or traits.ids or wide if traits.thresholds else traits.sorted_ids and wide
    masks_of_sides = traits.triangle and traits.own_references
    if not (traits.two_statistics or few or masks_of_sides):
        return None
    roomy = traits.guide and choice.descriptors and not wide and not traits.ids and choice.inner_dim % 32 == 0
    if traits.guided_sides:
        found = None if roomy or wide else SIDES_BLOCKS.get(architecture)
    else:
        found = GUIDE_BLOCKS.get(architecture) if roomy else None
    return found or SEVERAL_BLOCKS[architecture][wide]


def _has_registers(choice: Choice) -> bool:
    """Whether pairs in wide tiles do not spill on sm_90. Pointers, labels, halves of g or other terms take registers:
    24 to 832 bytes a thread spill; so do 16 where one block spans the embedding, and its loop is unrolled."""
    many_steps = choice.inner_dim > WIDE_PAIR_BLOCKS["hopper"].depth
    return many_steps and choice.descriptors and choice.traits.softplus and not choice.labels and not choice.split


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    shared = choice.one_exponential
    g = "g" + " g_low" * choice.split
    sizes = "queries keys strip g_stride"
    sums = "query_exponent query_mantissa key_ratio key_reference key_lowest" if shared else statistics(choice)
    if choice.traits.slabs:
        return _of_slabs(choice, sums, sizes)
    by_class = [IDS] * choice.traits.ids_in_tiles + [GUIDES] * choice.traits.by_guide
    told = " ".join(by_class + [both_labels(choice)] * choice.traits.by_side + compared(choice))
    diagonal, strides = "DIAGONAL" * choice.traits.triangle, f"{GUIDE_STRIDES * choice.traits.guide} {STRIDES}"
    sums += f" {softmaxes(choice)}"
    gradient = arguments(Q, K, told, SCALARS, sums, g, "flags" * shared, sizes, strides, diagonal, "DESCRIPTORS WIDEN")
    again = arguments("q k", told, SCALARS, statistics(choice), g, "flags", sizes, STRIDES, diagonal, "WIDEN")
    positives = arguments(places(choice), gradient_of_positive(choice), g, "queries keys g_stride")
    template = "gradient_positives"
    if choice.traits.triangle:
        noted, template = f"{positive(choice)} key_positive_z key_positive_reference", "triangle_gradient"
        if choice.traits.combined:
            noted = "positive_g key_positive_g kept_z key_kept_z"
        sizes = "queries keys g_stride DIAGONAL"
        positives = arguments(both_labels(choice), noted, SCALARS, statistics(choice), g, sizes)
    of = ""  # the block of the kernel of positives
    if choice.traits.sorted_ids:
        sums = of_positives(choice, "", "sum_of_positives", "exponent_of_positives")
        if choice.traits.triangle:
            sums += f" {of_positives(choice, '', 'key_sum_of_positives', 'key_exponent_of_positives')}"
        of, template = "positive", "gradient_of_ids"
        positives = arguments("q k", IDS, SCALARS, statistics(choice), sums, g, "queries keys g_stride", STRIDES,
                              diagonal, "WIDEN")  # fmt: skip
    return (
        Kernel("gradient", gradient, "gradient", template="" if shared else "gradient_exact"),
        *[Kernel("gradient_wide", again, "gradient", wide=True, template="gradient_wide")] * (shared or choice.stash),
        *[RATIOS] * shared,
        *[MIRROR] * choice.traits.triangle,
        *[Kernel("gradient_positives", positives, of, template=template)] * choice.traits.apart,
    )


def _of_slabs(choice: Choice, sums: str, sizes: str) -> tuple[Kernel, ...]:
    """The kernels of a loss over prefixes: statistics and g of each, at these distances."""
    shared, template, cosines = choice.one_exponential, "slabs_gradient", choice.traits.renormalised
    strides = "slab_stride query_stride" + " key_stride" * choice.both_axes
    of_sums = "slab_stride query_stride" if shared else strides
    own = f"{places(choice)} {FACTORS} {RADIAL}" * cosines
    masked = "MASKED " * cosines
    gradient = arguments(
        Q, K, SCALARS, sums, "g", "flags" * shared, sizes, of_sums, own, STRIDES, f"{masked}DESCRIPTORS WIDEN"
    )
    again = arguments("q k", SCALARS, statistics(choice), "g flags", sizes, strides, own, STRIDES, "WIDEN")
    stored = "g queries keys g_stride"
    if cosines:
        stored, strides = "prefix_g queries keys positive_stride", strides.removeprefix("slab_stride ")
    if choice.traits.combined:
        strides = strides.removesuffix(" key_stride")
    positives = arguments(places(choice), gradient_of_positive(choice), stored, strides)
    return (
        Kernel("gradient", gradient, "gradient", template=template),
        *[Kernel("gradient_wide", again, "gradient", wide=True, template="slabs_gradient_wide"), RATIOS] * shared,
        Kernel("gradient_positives", positives, template=template),
    )


FAMILY = Family(
    "gradient", kernels, STRATEGIES, lambda choice: not choice.traits.pairs, tile=GradientTile(), revision=1
)
