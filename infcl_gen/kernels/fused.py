"""fused_queries, fused_keys and their wide twins: gradients without storing g."""

from __future__ import annotations

import dataclasses

from infcl_gen.hardware import DeviceProfile
from infcl_gen.inputs.problem import DTYPE_BYTES
from infcl_gen.kernels.arguments import SCALARS, STRIDES, Kernel, arguments, features, places, positive, statistics
from infcl_gen.kernels.choice import Block, Choice, embedding_parts, padded_dim
from infcl_gen.kernels.family import Family, Tile
from infcl_gen.kernels.gradient import RATIOS

DIM_LIMIT = 256  # the whole padded embedding is one block dimension
# By the most columns of the embedding, summed over its parts. The depth stands for the whole padded embedding.
BLOCKS = {
    "hopper": {
        64: Block(128, 64, 64, 4, 4),
        96: Block(64, 128, 128, 4, 3),
        128: Block(64, 128, 128, 4, 2),
        256: Block(64, 64, 256, 4, 2),
    },
    "blackwell": {128: Block(128, 64, 128, 8, 2), 256: Block(64, 128, 256, 8, 2)},
    "ampere": {128: Block(64, 64, 128, 4, 3), 256: Block(64, 64, 256, 8, 2)},
    "small": {128: Block(64, 64, 128, 4, 2), 256: Block(64, 64, 256, 8, 2)},
    "cdna3": {128: Block(64, 64, 128, 4, 2), 256: Block(32, 32, 256, 4, 2)},
    "cdna4": {128: Block(64, 64, 128, 4, 2), 256: Block(32, 32, 256, 4, 2)},
}


def impossible(dim: int, dtype: str) -> str | None:
    """Why the fused strategy cannot take such features, as the end of a sentence; None if it can."""
    if dim > DIM_LIMIT:
        return f"holds the whole embedding in one block: --dim at most {DIM_LIMIT}, not {dim}"
    if DTYPE_BYTES[dtype] != 2:
        return f"keeps a whole gradient row in registers, too many of them for {dtype}; valid: bf16, fp16"
    return None


class FusedTile(Tile):
    """`rows` owned x `keys` visiting; `depth` is the whole padded embedding."""

    name = "fused"
    tuned = described = True
    shrinks = ("stages", "keys", "rows")

    def default(self, profile: DeviceProfile, choice: Choice, rows: int, keys: int) -> Block:
        """Blocks of more than 64 rows only where every SM gets two of them."""
        held = sum(embedding_parts(choice.dim))
        tallest = max(64, min(rows, keys) // (2 * profile.multiprocessors))
        table = BLOCKS[profile.architecture.family]
        fitting = (block for columns, block in table.items() if held <= columns and block.rows <= tallest)
        return dataclasses.replace(next(fitting, table[DIM_LIMIT]), depth=padded_dim(choice.dim))

    def shared_bytes(self, block: Block, choice: Choice) -> int:
        """Owned rows stay; visiting rows are pipelined."""
        rows = block.rows + block.stages * block.keys
        return rows * sum(embedding_parts(choice.dim)) * choice.operand_bytes

    def accumulators(self, block: Block, choice: Choice) -> int:
        """The tile of z, and the owned rows of the gradient."""
        return block.rows * (block.keys + sum(embedding_parts(choice.dim)))

    def wide_warps(self, block: Block, choice: Choice, profile: DeviceProfile) -> int:
        return wide(profile, block)[1]

    def misfits(self, block: Block, choice: Choice) -> list[str]:
        reason, widest = impossible(choice.dim, choice.dtype), padded_dim(choice.dim)
        found = [f"fused {reason}"] if reason else []
        if block.depth != widest:
            found.append(f"depth = {block.depth} is not the whole padded embedding, {widest}")
        return found

    def options(self, base: Block, choice: Choice) -> dict[str, tuple[int, ...]]:
        return super().options(base, choice) | {"depth": (base.depth,)}


def wide(profile: DeviceProfile, block: Block) -> tuple[int, ...]:
    """Keys at a time, and warps, of the wide twin, whose second reference and pointers take registers."""
    return profile.architecture.recomputed_fused or (min(32, block.keys), min(8, 2 * block.warps))


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    sums = statistics(choice)
    positives = arguments(places(choice), positive(choice), SCALARS, sums, "positive_g queries keys")
    found = [RATIOS] * choice.both_axes + [Kernel("fused_positives", positives, template="fused_positives")]
    template = "fused" if choice.both_axes else "fused_rows"
    rest = "positive_g total", "flags" * choice.both_axes, "queries keys", STRIDES, "FRESH MASKED"
    sides = ("queries", "key", "FUSED_ROWS", "FUSED_KEYS"), ("keys", "query", "FUSED_KEYS", "FUSED_ROWS")
    for own, other, q_rows, k_rows in sides:
        described = *features("q", q_rows, choice.dim), *features("k", k_rows, choice.dim)
        ratios = f"{other}_ratio {other}_reference {other}_lowest" * choice.both_axes
        taken = arguments(*described, places(choice), SCALARS, sums, ratios, *rest, "DESCRIPTORS WIDEN")
        found.append(Kernel(f"fused_{own}", taken, "fused", template=template))
        if choice.both_axes:
            again = arguments("q k", places(choice), SCALARS, sums, *rest, "WIDEN")
            found.append(Kernel(f"fused_{own}_wide", again, "fused", wide=True))
    return tuple(found)


FAMILY = Family("fused", kernels, ("fused",), tile=FusedTile(), revision=2)
