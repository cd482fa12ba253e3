"""The other kernels: products with g, the last step of a gradient, and copies of features in another form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from infcl_gen.hardware import DeviceProfile
from infcl_gen.inputs.overrides import Overrides
from infcl_gen.kernels.arguments import SCALARS, STRIDES, Argument, Kernel, arguments, statistics
from infcl_gen.kernels.choice import Block, Choice, padded_dim
from infcl_gen.kernels.family import Family, Tile
from infcl_gen.kernels.gradient import STRATEGIES

LIBRARY_MULTIPLE = 8  # of keys: with 10 007 keys an H200's cuBLAS takes 1.8 times as long for g^T q, 6 times for g k
EXACT_DEPTH = 2048  # of one product of high halves: on an H200 gradients are good to 4.6e-6, with 4096 to 6.3e-6
# Features in their own dtype, which kernels may multiply in another.
Q, K, X, OUT = (Argument(name, "*{inputs}") for name in ("q", "k", "x", "out"))


class ProductTile(Tile):
    """`rows` x `keys` of g times features, `depth` along the panel."""

    name = "product"
    tuned = True
    switches = ("products",)

    def tabulated(self, architecture: str, choice: Choice) -> Block:
        if choice.operand_bytes != 2:
            return super().tabulated(architecture, choice)
        stages = 2 if architecture in ("cdna3", "cdna4") else 3
        return Block(128, 64 if choice.slabs else 128, 64, 8, stages)  # of slabs, any of which may be narrow

    def default(self, profile: DeviceProfile, choice: Choice, rows: int, keys: int) -> Block:
        block = self.tabulated(profile.architecture.family, choice)
        return dataclasses.replace(block, keys=min(block.keys, padded_dim(choice.dim)))

    def misfits(self, block: Block, choice: Choice) -> list[str]:
        widest = padded_dim(choice.dim)
        text = f"keys = {block.keys} (output columns) is more than the padded embedding, {widest}"
        return [text] * (block.keys > widest)

    def proposals(self, base: Block, choice: Choice, given: Overrides) -> Iterator[tuple[tuple[str, str], ...]]:
        """Both values of `products` unless the user gives one; blocks of the Triton kernels."""
        triton = () if given.products else (("products", "triton"),)
        if triton:
            yield from ((("products", "library"),), triton)
        if given.products != "library":
            for pairs in super().proposals(base, choice, given):
                yield triton + pairs


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


_COPY_INPUTS = arguments(Q, K, SCALARS, "q_out k_out scale_out bias_out queries keys", STRIDES)
SPLIT = Kernel("split", arguments(X, "out rows x_row_stride x_depth_stride out_stride KEYS"), "finish")
COPY_INPUTS = Kernel("copy_inputs", _COPY_INPUTS, "finish")
MERGE_RANKS = Kernel("merge_ranks", arguments("part_exponent part_sum exponent mantissa keys ranks part_stride"))


def product_kernels(choice: Choice) -> tuple[Kernel]:
    strides, slab = "g_row_stride g_inner_stride x_inner_stride x_depth_stride", "width" * bool(choice.slabs)
    return (Kernel("product", arguments("g x total rows inner", strides, slab, "FRESH WIDEN"), "product"),)


def stash_kernels(choice: Choice) -> tuple[Kernel]:
    panel = "g flags queries keys strip stash_stride reference_stride g_stride"
    taken = arguments("stash stash_reference", statistics(choice), panel)
    return (Kernel("gradient_from_stash", taken, "gradient"),)


def finish_kernels(choice: Choice) -> tuple[Kernel, ...]:
    kept = Argument("kept", "*{inputs}" if choice.dtype == "bf16" else "*fp32")
    rescale = Kernel("rescale", arguments(kept, OUT, "upstream rows"), "finish")
    rest: tuple[Argument | str, ...] = ("rows",)
    if choice.traits.sums_slopes:
        rest = (Argument("slopes", "*fp64") if choice.traits.pairs else "scale_parts bias_parts", "count")
    scalars = Kernel("scalars", arguments("dots", "dscale dbias", SCALARS, "upstream weight parts", *rest, "BLOCK"))
    dots = "dots" + " mean" * choice.traits.means + " radial radial_stride" * choice.traits.renormalised
    total, shared = ("total share", "SHARED") if choice.rows else ("total", "")
    strides = f"upstream weight rows x_row_stride x_depth_stride DOTS {shared}"
    finish = Kernel("finish", arguments(total, X, OUT, dots, SCALARS, strides), "finish")
    return (finish, scalars, *[rescale] * choice.at_once)


FAMILIES = (
    Family("product", product_kernels, STRATEGIES, tile=ProductTile(), revision=1),
    Family("finish", finish_kernels, tile=FinishTile()),
    Family("stash", stash_kernels, ("stash",), revision=1),
    Family("split", lambda _: (SPLIT,), wanted=lambda choice: choice.split),
    Family("replay", lambda _: (COPY_INPUTS,), wanted=lambda choice: choice.replay),
    Family("gather", lambda _: (MERGE_RANKS,), wanted=lambda choice: choice.both_axes and choice.gather),
)
