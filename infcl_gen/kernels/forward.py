"""references, forward, forward_wide: sums of 2^y over the rows and columns of one panel."""

from __future__ import annotations

import dataclasses

from infcl_gen.hardware import DeviceProfile
from infcl_gen.kernels.arguments import (
    FACTORS,
    GUIDE_STRIDES,
    SCALARS,
    STRIDES,
    Argument,
    Kernel,
    arguments,
    classes,
    features,
)
from infcl_gen.kernels.choice import Block, Choice, embedding_parts, padded_dim
from infcl_gen.kernels.family import MOST_PROGRAMS, Family, Tile
from infcl_gen.kernels.gradient import ID_BLOCKS, SLAB_BLOCKS, GradientTile, beside_prefixes, few_block

DEEP = 768  # from this depth on, one program with a large tile beats two small ones, whose epilogues hide each other
DEEP_BLOCKS = {"hopper": Block(256, 128, 64, 8, 4)}
# Where one block spans the embedding, keys are read once: a step at B = 65 536, D = 128 takes 9.8 ms, not 10.0 ms.
KEEPING_BLOCKS = {"hopper": (Block(64, 128, 64, 4, 4), Block(64, 256, 128, 4, 3))}
EARLY_STRIPS = 8  # of a rank's own keys, about: it begins with the whole ones, while other keys come
ROWS_STRIP = 32  # key blocks that one program of `rows` walks: as fast as 128 on an H200
NVIDIA_LANES = 8  # of a warp, by the rows of a tile: the most of all architectures
KEEPING_STRIP = 64  # row blocks that share one program's keys: 0.5 to 1 % faster than 32 at D = 64 and 96 on an H200
STORING_BLOCKS = {"hopper": Block(256, 128, 64, 8, 3), "blackwell": Block(128, 128, 64, 8, 2)}
# Two programs share an SM: one multiplies beside the other's exponentials. A step of infonce at B = 65 536, D = 768 in
# 1.5 GiB on an H200: 31.8 ms, 32.4 with one program of 128 x 256. With 128 keys at D = 768 a thread of sm_80 spills 370
# to 460 bytes. One of gfx942 spills 490, and 60 with 128 x 64.
ROWS_BLOCKS = {
    "hopper": Block(128, 128, 64, 4, 3), "blackwell": Block(128, 128, 64, 8, 2), "ampere": Block(128, 64, 64, 8, 3),
    "cdna3": Block(64, 64, 64, 8, 2), "cdna4": Block(64, 64, 64, 8, 2),
}  # fmt: skip
# A thread holds 64 numbers of z, and 32 sums of columns of each prefix. On an H200 4 prefixes at 65 536 x 768 take
# 18.7 ms, as with 6 stages; tiles of 64 x 64 take 26.
SLAB_FORWARD_BLOCKS = SLAB_BLOCKS | {"hopper": Block(64, 128, 32, 4, 4)}
# Factors of keys take registers beside them: of 64 numbers of z 24 to 40 bytes spill on sm_90.
COSINE_FORWARD_BLOCKS = SLAB_FORWARD_BLOCKS | {"hopper": Block(128, 64, 32, 8, 4)}
Q = Argument("q", "*{operands}", block=("FORWARD_ROWS", "FORWARD_DEPTH"))
K = Argument("k", "*{operands}", block=("FORWARD_KEYS", "FORWARD_DEPTH"))
STASH = Argument("stash", "*bf16", block=("FORWARD_ROWS", "FORWARD_KEYS // 2"))


class ForwardTile(Tile):
    """Rows x keys of z, `depth` of the embedding at a time. A stash keeps them for the gradient, in its tiles; `rows`
    keeps p of its own."""

    name = "forward"
    tuned = described = walks = True

    def tabulated(self, architecture: str, choice: Choice) -> Block:
        found = super().tabulated(architecture, choice)
        if choice.slabs:  # sums over columns for each prefix
            blocks = COSINE_FORWARD_BLOCKS if choice.traits.renormalised else SLAB_FORWARD_BLOCKS
            return beside_prefixes(blocks, architecture, choice)
        if few := few_block(architecture, choice):
            return few
        if choice.traits.masked:
            return ID_BLOCKS[architecture][choice.operand_bytes > 2]
        if choice.operand_bytes != 2 or choice.traits.pairs:  # small tiles hide each other's terms
            return found
        if choice.rows:
            return ROWS_BLOCKS.get(architecture, found)
        if choice.inner_dim >= DEEP:
            found = DEEP_BLOCKS.get(architecture, found)
        if choice.stash:
            if choice.descriptors:  # tiles go to memory asynchronously, through shared memory
                found = STORING_BLOCKS.get(architecture, found)
            tile = GradientTile().tabulated(architecture, choice)
            return dataclasses.replace(found, rows=tile.rows, keys=tile.keys)
        keeping = [block for block in KEEPING_BLOCKS.get(architecture, ()) if keeps_keys(block, choice)]
        if choice.traits.triangle:  # beside which 64 x 256 would spill 272 bytes a thread of sm_90
            keeping = [block for block in keeping if block.keys <= 128]
        return next(iter(keeping), found)

    def accumulators(self, block: Block, choice: Choice) -> int:
        """Beside z the sums of columns of all prefixes stay in registers."""
        lanes = lanes_of(block, NVIDIA_LANES) if choice.both_axes else 0
        return super().accumulators(block, choice) + len(choice.slabs) * lanes * block.keys

    def strips(self, rows: int, keys: int, block: Block, choice: Choice) -> int:
        """In `rows` programs own queries. Over a gather strips are short enough to part each rank's own keys."""
        if not choice.rows:
            return super().strips(rows, keys, block, choice)
        early = EARLY_STRIPS * choice.world_size if choice.world_size > 1 else 1
        return min(-(-keys // block.keys), max(early, MOST_PROGRAMS // -(-rows // block.rows)))

    def shared_bytes(self, block: Block, choice: Choice) -> int:
        """Keys that are read once have one stage. Kept tiles pass through shared memory: half a tile in bf16, or
        three times that where warps of 16 rows lie side by side, of which one then holds nothing of a half."""
        rows, keys, depth = block.stages * block.rows, block.stages * block.keys, block.depth
        if keeps_keys(block, choice):
            keys, depth = block.keys, sum(embedding_parts(choice.inner_dim))
        copies = 3 if block.rows < 16 * block.warps else 1
        stored = copies * block.rows * block.keys if choice.keeps_tiles and choice.descriptors else 0
        return (rows + keys) * depth * choice.operand_bytes + stored

    def options(self, base: Block, choice: Choice) -> dict[str, tuple[int, ...]]:
        tile = ("rows", "keys") if choice.stash else ()
        return {name: values for name, values in super().options(base, choice).items() if name not in tile}


def keeps_keys(block: Block, choice: Choice) -> bool:
    """Whether a program reads its keys once: one block spans their depth, descriptors load it, and tensor cores read it
    from shared memory. Where every row has its own reference, or a program owns rows, there is another forward."""
    whole = block.depth >= padded_dim(choice.inner_dim) and choice.descriptors and not (choice.exact or choice.rows)
    return whole and not choice.traits.pairs and not choice.traits.guide and not choice.traits.slabs


def key_lanes(block: Block, choice: Choice, profile: DeviceProfile) -> int:
    """Rows of key sums that a program keeps apart, one for each lane, where a thread holds several rows; else 1. Two
    statistics of each would take more registers than there are."""
    return 1 if choice.traits.two_statistics else lanes_of(block, profile.architecture.row_lanes)


def lanes_of(block: Block, row_lanes: int) -> int:
    """Lanes of a program that hold different rows of a tile, where each holds several; else 1."""
    lanes = row_lanes * block.warps
    return lanes if 0 < 2 * lanes <= block.rows else 1


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    sums = "row_exponent row_sum" + " key_exponent key_sum" * choice.both_axes
    if choice.traits.by_guide:
        sums += " row_guided row_guide_sum row_guide_exponent"
        sums += " key_guided key_guide_sum key_guide_exponent" * choice.traits.guided_sides
    if choice.traits.second:
        sums += " row_second_exponent row_second_sum" + " key_second_exponent key_second_sum" * choice.both_axes
    sizes = "queries keys strip rows_stride" + " keys_stride" * choice.both_axes
    told = classes(choice) if choice.traits.masked or choice.traits.guide else ""
    sampled, template = not choice.exact, "slabs_forward" if choice.traits.slabs else ""
    factors = f"{FACTORS} " * choice.traits.renormalised
    diagonal, strides = "DIAGONAL" * choice.traits.triangle, f"{GUIDE_STRIDES * choice.traits.guide} {factors}{STRIDES}"
    sources: tuple[Argument, ...] = (Q, K)
    if keeps_keys(choice.blocks["forward"], choice):
        sources = (*features("q", "FORWARD_ROWS", choice.inner_dim), *features("k", "FORWARD_KEYS", choice.inner_dim))
    reference = "reference" * sampled
    forward = arguments(
        *sources, told, SCALARS, reference, sums, "flags" * sampled,
        *[STASH] * choice.stash, "stash_reference" * choice.stash, sizes,
        "stash_stride" * (choice.stash and not choice.descriptors), "reference_stride" * choice.stash, strides,
        "MASKED" * sampled, diagonal, "DESCRIPTORS WIDEN", "STASH" * choice.stash,
    )  # fmt: skip
    if choice.exact:
        return (Kernel("forward", forward, "forward", template="forward_exact"),)
    constants = "DESCRIPTORS WIDEN" if choice.descriptors else "WIDEN"
    first = arguments("q k", SCALARS, f"{reference} queries keys", f"{factors}{STRIDES}", diagonal, constants)
    again = arguments("q k", told, SCALARS, sums, "flags", sizes, strides, diagonal, constants)
    return (
        Kernel("references", first, "forward", template=template),
        Kernel("forward", forward, "forward", template=template),
        Kernel("forward_wide", again, "forward", wide=True, template=template),
    )


FAMILY = Family(
    "forward", kernels, wanted=lambda choice: not (choice.traits.pairs or choice.rows), tile=ForwardTile(), revision=1
)
