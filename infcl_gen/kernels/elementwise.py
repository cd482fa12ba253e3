"""The other kernels: products, what finishes a gradient, and copies of features in another form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from infcl_gen.kernels.arguments import (
    SCALARS,
    WIDEN,
    Argument,
    Kernel,
    constants,
    counts,
    pointers,
    statistics,
    strides,
)
from infcl_gen.kernels.choice import Block, Choice, padded_dim
from infcl_gen.kernels.family import FP32_BLOCKS, Family, Tile
from infcl_gen.kernels.gradient import STRATEGIES

if TYPE_CHECKING:
    from infcl_gen.hardware import DeviceProfile
    from infcl_gen.inputs.overrides import Overrides

LIBRARY_MULTIPLE = 8  # of keys: at 10 007 an H200's cuBLAS takes 1.8 times as long for g^T q, 6 times for g k
EXACT_DEPTH = 2048  # of one product of high halves: gradients good to 4.6e-6 on an H200, to 6.3e-6 at 4096


class ProductTile(Tile):
    """`rows` x `keys` of g times features, `depth` along the panel."""

    name = "product"
    tuned = True
    switches = ("products",)

    def tabulated(self, architecture: str, choice: Choice) -> Block:
        if choice.operand_bytes != 2:
            return FP32_BLOCKS[architecture]
        return Block(128, 128, 64, 8, 2 if architecture in ("cdna3", "cdna4") else 3)

    def default(self, profile: DeviceProfile, choice: Choice, rows: int, keys: int) -> Block:
        block = self.tabulated(profile.architecture.family, choice)
        return dataclasses.replace(block, keys=min(block.keys, padded_dim(choice.dim)))

    def misfits(self, block: Block, choice: Choice) -> list[str]:
        widest = padded_dim(choice.dim)
        text = f"keys = {block.keys} (output columns) is more than the padded embedding, {widest}"
        return [text] * (block.keys > widest)

    def proposals(self, base: Block, choice: Choice, given: Overrides) -> Iterator[tuple[tuple[str, str], ...]]:
        """The library against these kernels, unless that is given; their blocks."""
        asked = given.products is None
        if asked:
            yield from ((("products", word),) for word in ("library", "triton"))
        if asked or choice.products != "library":
            for pairs in super().proposals(base, choice, given):
                yield ((("products", "triton"),) if asked else ()) + pairs


class FinishTile(Tile):
    """`rows` x `depth` of an accumulator; `keys` has no meaning."""

    name = "finish"

    def tabulated(self, architecture: str, choice: Choice) -> Block:
        return Block(16, 16, 256, 4, 1)

    def deepest(self, choice: Choice) -> int:
        return padded_dim(choice.dim)

    def shared_bytes(self, block: Block, choice: Choice) -> int:
        return 0

    def accumulators(self, block: Block, choice: Choice) -> int:
        return block.rows * block.depth


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


def gradient_from_stash(choice: Choice) -> Kernel:
    arguments = (
        *pointers("*bf16", "stash"), *pointers("*fp32", "stash_reference"), *statistics(choice),
        *pointers("*features", "g"), *pointers("*int32", "flags"), *counts("queries", "keys"),
        *counts("strip", multiple="never"), *counts("stash_stride", multiple="always"), *counts("reference_stride"),
        *counts("g_stride", multiple="always"),
    )  # fmt: skip
    return Kernel("gradient_from_stash", arguments, "gradient")


FAMILIES = (
    Family("product", lambda _: (PRODUCT,), STRATEGIES, tile=ProductTile(), revision=1),
    Family("finish", lambda _: (FINISH, SCALAR_GRADIENTS), tile=FinishTile()),
    Family("stash", lambda choice: (gradient_from_stash(choice),), ("stash",), revision=1),
    Family("split", lambda _: (SPLIT,), wanted=lambda choice: choice.split),
    Family("replay", lambda _: (COPY_INPUTS,), wanted=lambda choice: choice.replay),
    Family("gather", lambda _: (MERGE_RANKS,), wanted=lambda choice: choice.has_keys and choice.gather),
)
