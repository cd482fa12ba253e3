"""What kernels are made for: one choice of how to compute the loss, with the block of each kernel."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from infcl_gen.inputs.problem import DTYPE_BYTES
from infcl_gen.runtime.traits import Traits

# Columns of a product below which the matrix library gets whole inner extents: with 32 columns and one of 4 097 dk
# lacked what the last row adds, on an H200 with cuBLAS 13.0; with 4 096 it did not.
NARROW = 64
SPLIT_TERMS = 3  # of a product of fp32 operands split into bf16 halves: low high, high low, high high


@dataclasses.dataclass(frozen=True)
class Block:
    """Tile of one program: `rows` queries x `keys` keys, `depth` of the embedding at a time; else its `Tile` says."""

    rows: int
    keys: int
    depth: int
    warps: int
    stages: int


class Slab(NamedTuple):
    """Columns of the features by which one prefix exceeds the one before."""

    number: int
    start: int
    stop: int  # the columns of the prefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """How a loss is computed on one kind of device; what kernels, their blocks and the cost model depend on."""

    strategy: str  # "panel", "fused", "stash", "rows" or "torch"
    dim: int
    dtype: str = "bf16"  # of the features; with `precision` it decides all other dtypes
    precision: str = "default"
    frozen: str = "none"  # the side that needs no gradient: "query", "key" or "none"
    target: str = "cuda"
    arch: str = ""  # of the device, as its profile names it: "sm_90"
    traits: Traits = dataclasses.field(default_factory=Traits)  # of the loss
    product_by: str = "triton"  # products with g: by the matrix "library", by "triton" or by "torch"
    descriptors: bool = False
    replay: bool = False  # steps are recorded as CUDA graphs
    world_size: int = 1
    transport: str = "none"  # how keys reach the queries of other ranks: "ring" or "gather"; "none" on one device
    keeps: bool = False  # with a ring: the keys that visit last in forward stay for backward
    wider: bool = True  # there is room for the gradients of features wider than `dtype`, which are not rounded to it
    blocks: Mapping[str, Block] = dataclasses.field(default_factory=dict, hash=False)  # by tile; none for torch
    hopper_stages: int = 0  # pipeline stages of the kernels for Hopper alone; 0 without them

    @property
    def of_queries(self) -> bool:
        """Whether there are gradients of queries: their product with g, and its sums."""
        return self.frozen != "query"

    @property
    def of_keys(self) -> bool:
        """The same of keys, whose sums travel."""
        return self.frozen != "key"

    @property
    def both_axes(self) -> bool:
        """Whether columns of tiles have sums: of keys, or of a triangle of the rows that stand there."""
        return self.traits.both_axes

    @property
    def positive_parts(self) -> int:
        """Numbers that forward notes of each positive: z, and of each sum with it a reference (torch: and the term). Of
        a combined loss four then take their place, a further one where the logit is not affine, and of a triangle z,
        too, of which another row's sum has a term; a second log-sum-exp follows. Of any number of positives four, too:
        at first their sum and number; a log-sum-exp has an exponent besides. With a guide of both sides its
        similarity follows, but for torch, and last the mean by its softmax, with mantissa and exponent of that one's
        sum. Of a sum over pairs there are none."""
        if self.traits.pairs:
            return 0
        if self.traits.several:
            return 4 + (self.traits.softmax_of_positives or self.traits.by_guide)
        if self.traits.combined:
            fifth = not self.traits.affine or (self.traits.in_columns and self.strategy == "torch")
            return 4 + fifth + self.traits.triangle + 2 * self.traits.second
        sums, by_guide = 1 + self.traits.has_keys, 3 * self.traits.guided_sides
        if self.strategy == "torch":
            return 1 + 2 * sums + by_guide
        return 1 + sums + by_guide + self.traits.guided_sides

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """The slabs of columns of a loss over prefixes; none of others."""
        widths = self.traits.slabs
        stops = itertools.accumulate(widths)
        return tuple(Slab(n, stop - width, stop) for n, (width, stop) in enumerate(zip(widths, stops, strict=True)))

    @property
    def narrow_products(self) -> bool:
        """Whether products with g have less than NARROW columns, those of one slab at least."""
        return min([self.dim, *self.traits.slabs]) < NARROW

    @property
    def losses(self) -> int:
        """How many losses with statistics of their own are added: one for each prefix of the features."""
        return len(self.traits.slabs) or 1

    @property
    def partial_sums(self) -> int:
        """Numbers of a row, or column, that a tile of the forward stores: those of its log-sum-exps, and of a guide's
        softmax its sum, that of z by it, and their exponent. Of a sum over pairs it is that of its terms."""
        return 1 if self.traits.pairs else 2 + 2 * self.traits.second + 3 * self.traits.by_guide

    @property
    def merges_sides(self) -> bool:
        """Whether partial sums are merged one by one: those of a triangle's rows and columns have one home, a query may
        have a second one, and a row of panels has its sums at once."""
        return self.traits.triangle or self.traits.second or self.rows

    @property
    def labels(self) -> bool:
        """Whether positives are named by labels."""
        return self.traits.labels

    @property
    def split(self) -> bool:
        """Whether fp32 features are multiplied as bf16 halves: 16 bits, twice as fast as three products in tf32. Not
        beside a guide, whose features would be halves, too, nor where rows have references of their own."""
        where = (self.strategy, self.target, self.dtype, self.precision)
        alone = not (self.traits.guide or self.traits.own_references)
        return where == ("panel", "cuda", "fp32", "default") and alone

    @property
    def exact(self) -> bool:
        """Whether every row and column has its own reference, so that no strip is computed again: of fp32 operands, and
        where pairs above a threshold, or of some sides, are left out, in which a sample would find its largest logits.
        Forward and gradient then compare the similarities of one kind of tile."""
        return (self.dtype == "fp32" and not self.split) or self.traits.own_references

    @property
    def input_precision(self) -> str:
        """Of products of fp32 operands. tf32 must be asked for: at large scales its loss is wrong."""
        return "tf32" if self.precision == "tf32" else "ieee"

    @property
    def operand_dtype(self) -> str:
        """Of what kernels multiply: the features' dtype, or bf16 where fp32 features are split."""
        return "bf16" if self.split else self.dtype

    @property
    def operand_bytes(self) -> int:
        return DTYPE_BYTES[self.operand_dtype]

    @property
    def statistics_dtype(self) -> str:
        """Of statistics and of sums of gradients."""
        return "fp64" if self.dtype == "fp64" else "fp32"

    @property
    def separate(self) -> bool:
        """Whether sums are wider than the features: returned gradients are then buffers of their own."""
        return self.dtype != self.statistics_dtype

    @property
    def library(self) -> bool:
        return self.product_by == "library"

    @property
    def gather(self) -> bool:
        return self.transport == "gather"

    @property
    def kind(self) -> Choice:
        """The choice without what the cost model has symbols for: it makes its expressions once for each kind."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Choice)}
        ranks = min(self.world_size, 2)
        return Choice(**fields | {"dim": 1, "arch": "", "descriptors": False, "world_size": ranks, "blocks": {}})

    @property
    def stash(self) -> bool:
        """Whether the forward keeps its tiles, so that the gradient need not compute them again."""
        return self.strategy == "stash"

    @property
    def one_exponential(self) -> bool:
        """Whether the softmaxes of both sides of a pair share one: not those of fp32 features, nor of rows that have
        weights of any size, beside which a reference for both leaves fp32; nor beside a guide's, which have others."""
        alike = self.traits.even or not self.traits.combined
        return self.both_axes and not self.exact and alike and not self.traits.guided_sides

    @property
    def rows(self) -> bool:
        """Whether forward computes the gradients of a row of panels once the sums of its queries are complete."""
        return self.strategy == "rows"

    @property
    def at_once(self) -> bool:
        """Whether forward has the gradients, so that backward multiplies them by the upstream gradient."""
        return self.traits.at_once or self.rows

    @property
    def keeps_tiles(self) -> bool:
        """Whether the forward stores its tiles."""
        return self.stash or self.rows

    @property
    def inner_dim(self) -> int:
        """Depth of a similarity: the embedding, once for each term of split operands."""
        return SPLIT_TERMS * self.dim if self.split else self.dim

    @property
    def aligned(self) -> bool:
        """Whether rows are multiples of 16 bytes, as tensor descriptors need them; rows of bf16 halves are padded."""
        return self.split or self.dim * DTYPE_BYTES[self.dtype] % 16 == 0


def embedding_parts(dim: int) -> tuple[int, ...]:
    """Widths of at most three powers of two, from 16 on, that cover the embedding: 200 takes 128 + 64 + 16 columns.

    Tiles are powers of two: kernels that hold a whole embedding multiply it part by part, to compute little padding.
    """
    units = -(-dim // 16)
    while units.bit_count() > 3:
        units += units & -units
    return tuple(16 << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1)


def dividing(prefixes: Sequence[int]) -> int:
    """The largest power of two that divides all prefixes but the last, which ends with the features."""
    whole = math.gcd(*prefixes[:-1])
    return whole & -whole if whole else 1 << 16


def padded_dim(dim: int) -> int:
    """The next power of two, at least 16, the smallest extent of a block."""
    return max(16, 1 << (dim - 1).bit_length())
