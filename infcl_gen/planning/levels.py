"""Tiles inside one device: the blocks of each kernel, their defaults, and the one predicate that says what is legal.

    level 2  panel   R x C   g of one panel lives in memory (or in L2)        chosen by the planner from the budget
    level 3  block   rows x keys x depth   one program; shared memory         `Block`
    level 4  warps   warps, stages         registers, pipeline                `Block`

Planner, tuner and tests ask `violations`; nothing else decides whether a block is legal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from infcl_gen.errors import InputError
from infcl_gen.inputs.overrides import KERNELS
from infcl_gen.planning.choice import SIMILARITIES, Block, Choice, embedding_parts, padded_dim

if TYPE_CHECKING:
    from infcl_gen.hardware import DeviceProfile

FUSED_DIM_LIMIT = 256  # fused keeps the whole padded embedding in one block dimension
DEEP = 768  # from here on one program with a large tile beats two with small ones, whose epilogues hide each other
MOST_PROGRAMS = 4096  # of a panel's sweep: some 15 rounds of a large board
SMALL_TILE = 64  # rows and keys of the smallest tile that a small batch is given: a warp group's on Hopper
LARGE = 1 << 31  # rows or keys that fill any board
# Of programs, of several devices: messages take multiprocessors from them, and one wave costs 1.2 to 1.6 % more.
RING_WAVES = 4
REGISTERS = 65536  # of a multiprocessor, on every board
EXACT_DEPTH = 2048  # of one product of high halves: gradients good to 4.6e-6 on an H200, to 6.3e-6 at 4096
LIBRARY_MULTIPLE = 8  # of keys: at 10 007 an H200's cuBLAS takes 1.8 times as long for g^T q, 6 times for g k
STRIP_ROWS = 64  # of a panel, or of features, that the torch strategy works on where it needs temporaries
LOSS_ROWS = 1024  # of one program: fp64 logarithms of 32 768 rows took one program 0.12 ms, 1 % of the step
PANEL_UNIT = 128  # panels are multiples of it: rows per program of the kernels that only touch vectors

# Blocks of the table below for embeddings of up to so many columns, in parts.
FUSED_TABLE = {"fused64": 64, "fused96": 96, "fused128": 128, "fused256": FUSED_DIM_LIMIT}

# The kernels that have a block, by strategy.
KERNELS_OF = {
    "panel": ("forward", "gradient", "product", "positive", "finish"),
    "stash": ("forward", "gradient", "product", "positive", "finish"),
    "fused": ("forward", "fused", "positive", "finish"),
    "torch": (),
}


def default_blocks(
    profile: DeviceProfile, choice: Choice, rows: int = LARGE, keys: int = LARGE, chosen: Collection[str] = ()
) -> dict[str, Block]:
    """A legal block for each kernel of the strategy: the table below, shrunk where the board has less than it needs,
    or where `rows` queries x `keys` keys have fewer tiles than the board has multiprocessors; but not of kernels some
    of whose fields are `chosen`: what is chosen should not mean another block at each size. The tiles of a stash are
    the gradient's, so only what is chosen of that keeps them.

    Raises InputError if a kernel has no legal block on this board (fused with dim > 256, say).
    """
    table = _ELEMENTWISE | _TABLE[profile.architecture.family, 2 if choice.operand_bytes == 2 else 4]
    strategy, widest = choice.strategy, padded_dim(choice.dim)
    if strategy == "fused" and choice.feature_bytes != 2:
        raise InputError(
            f"fused keeps a gradient row in registers, too many of them for {choice.dtype}; valid: bf16, fp16"
        )
    blocks: dict[str, Block] = {}
    for kernel in KERNELS_OF[strategy]:
        if kernel == "fused":
            held = sum(embedding_parts(choice.dim))
            fitting = [name for name in FUSED_TABLE if name in table and held <= FUSED_TABLE[name]]
            # Taller blocks only where two of them come to every multiprocessor.
            tallest = max(64, min(rows, keys) // (2 * profile.multiprocessors))
            name = next((name for name in fitting if table[name].rows <= tallest), "fused256")
            base = dataclasses.replace(table[name], depth=widest)
        elif kernel == "product":
            base = dataclasses.replace(table[kernel], keys=min(table[kernel].keys, widest))
        else:
            found = _tabulated(table, kernel, choice)
            owner = "gradient" if strategy == "stash" and kernel == "forward" else kernel  # of the tiles
            base = found if owner in chosen else _spread(kernel, found, profile, rows, keys)
            deepest = padded_dim(choice.inner_dim(kernel))
            base = dataclasses.replace(base, depth=min(base.depth, deepest))
            if strategy == "stash" and kernel == "gradient":  # its tiles are those that the forward has kept
                base = dataclasses.replace(base, rows=blocks["forward"].rows, keys=blocks["forward"].keys)
        blocks[kernel] = _shrink(kernel, base, profile, choice)
    return blocks


def _tabulated(table: dict[str, Block], kernel: str, choice: Choice) -> Block:
    """A kernel's block for any number of rows and keys; of a stash, whose forward keeps the gradient's tiles."""
    inner = choice.inner_dim(kernel)
    found = table.get(f"deep {kernel}", table[kernel]) if inner >= DEEP else table[kernel]
    if choice.strategy == "stash" and kernel in ("forward", "gradient"):
        tile = table["gradient"]
        if choice.stores_tiles("forward"):
            found, tile = table.get(f"stored {kernel}", found), table.get("stored gradient", tile)
        return dataclasses.replace(found, rows=tile.rows, keys=tile.keys)
    for name in (f"narrow {kernel}", f"shallow {kernel}"):
        if name in table and choice.keeps_keys(kernel, table[name]):
            return table[name]
    return found


def shared_bytes(kernel: str, block: Block, choice: Choice) -> int:
    """Shared memory that the block's operand tiles take: over all pipeline stages, what stays in the program once.

    Where tiles are stored through it, also half of one in bf16; and a whole one where warps lie side by side (16 rows
    each), of which one then holds nothing of a half: the halves change hands.
    """
    if kernel == "finish":
        return 0
    rows, keys, depth = block.stages * block.rows, block.stages * block.keys, block.depth
    if kernel == "fused":  # the owned rows stay, the visiting ones are pipelined
        rows, depth = block.rows, sum(embedding_parts(choice.dim))
    elif choice.keeps_keys(kernel, block):
        keys, depth = block.keys, sum(embedding_parts(choice.inner_dim(kernel)))
    copies = 3 if block.rows < 16 * block.warps else 1
    stored = copies * block.rows * block.keys if choice.stores_tiles(kernel) else 0
    return (rows + keys) * depth * choice.operand_bytes + stored


def accumulator_registers(kernel: str, block: Block, dim: int, warp_size: int) -> int:
    """fp32 accumulator registers of one thread: the tile of z, for fused also the owned gradient rows."""
    elements = block.rows * (block.depth if kernel == "finish" else block.keys)
    if kernel == "fused":
        elements += block.rows * sum(embedding_parts(dim))
    return -(-elements // (block.warps * warp_size))


def resident_programs(kernel: str, block: Block, profile: DeviceProfile, choice: Choice) -> int:
    """Programs of a kernel that the board runs at once: what shared memory and registers of each multiprocessor hold.

    A thread is taken to need 96 registers beside its accumulators.
    """
    by_memory = profile.shared_bytes_per_block // max(shared_bytes(kernel, block, choice), 1)
    registers = accumulator_registers(kernel, block, choice.dim, profile.warp_size) + 96
    by_registers = REGISTERS // (registers * block.warps * profile.warp_size)
    return profile.multiprocessors * max(1, min(by_memory, by_registers))


def hopper_stages(profile: DeviceProfile, choice: Choice) -> int:
    """Tiles of queries on their way in the forward and the gradient of hopper.py; 0 where the ordinary kernels stay.

    At D = 256 and 200 its forward takes 0.88 and 0.60 of the ordinary one's time on an H200, its gradient 0.93 and
    0.70. At 128 columns the ordinary forward keeps its keys, too; beyond 256 keys and queries do not fit into shared
    memory together.
    """
    narrow = 128 < choice.dim <= 256 and choice.operand_bytes == 2 and not choice.split and choice.has_keys
    here = profile.architecture.family == "hopper" and choice.strategy == "panel" and choice.descriptors
    blocks = [choice.blocks[name] for name in ("forward", "gradient") if name in choice.blocks]
    tiled = all((block.rows, block.keys) == (128, 128) for block in blocks)
    return 9 // -(-choice.dim // 64) if narrow and here and tiled else 0


def most_strips(panel_rows: int, panel_keys: int, block: Block) -> int:
    """Strips that a panel's row blocks are cut into for each block of keys, at most: their partial sums take memory."""
    return min(-(-panel_rows // block.rows), max(1, MOST_PROGRAMS // -(-panel_keys // block.keys)))


def key_lanes(block: Block, profile: DeviceProfile) -> int:
    """Rows of key sums that a program keeps apart: those of different lanes, where a thread holds several rows."""
    lanes = profile.architecture.row_lanes * block.warps
    return lanes if 0 < 2 * lanes <= block.rows else 1


def fused_wide(profile: DeviceProfile, block: Block) -> tuple[int, int]:
    """Keys at a time, and warps, of a fused program that is computed again: `block` with two references and pointers,
    which hold more registers."""
    if fixed := profile.architecture.recomputed_fused:
        return fixed[0], fixed[1]
    return min(32, block.keys), min(8, 2 * block.warps)


def violations(kernel: str, block: Block, profile: DeviceProfile, choice: Choice) -> tuple[str, ...]:
    """Why the block is illegal for this kernel on this board, naming field and limit; () if it is legal."""
    found: list[str] = []
    if kernel not in KERNELS:
        return (f"unknown kernel {kernel!r}; valid: {', '.join(KERNELS)}",)
    for name in ("rows", "keys", "depth"):
        value = getattr(block, name)
        if value < 16 or value & (value - 1):
            found.append(f"{name} = {value} is not a power of two of at least 16")
    if block.warps < 1 or block.warps & (block.warps - 1) or block.warps > profile.max_warps_per_block:
        found.append(f"warps = {block.warps} is not a power of two from 1 to {profile.max_warps_per_block}")
    if not 1 <= block.stages <= 8:
        found.append(f"stages = {block.stages} is not between 1 and 8")
    if kernel == "fused" and choice.dim > FUSED_DIM_LIMIT:
        found.append(f"the embedding of {choice.dim} is wider than {FUSED_DIM_LIMIT}, the limit of the fused strategy")
    dim, widest = choice.dim, padded_dim(choice.inner_dim(kernel))
    if kernel == "fused" and block.depth != widest:
        found.append(f"depth = {block.depth} is not the whole padded embedding, {widest}")
    if kernel in (*SIMILARITIES, "finish") and block.depth > widest:
        found.append(f"depth = {block.depth} is more than the padded embedding, {widest}")
    if kernel == "product" and block.keys > padded_dim(dim):
        found.append(f"keys = {block.keys} (output columns) is more than the padded embedding, {padded_dim(dim)}")
    if kernel == "positive" and block.rows != block.keys:
        found.append(f"rows = {block.rows} and keys = {block.keys} differ: positives are the diagonal of a square tile")
    if found:
        return tuple(found)  # the estimates below are about well-formed blocks
    size, shared = choice.operand_bytes, shared_bytes(kernel, block, choice)
    if shared > profile.shared_bytes_per_block:
        found.append(f"needs {shared} bytes of shared memory; {profile.name} has {profile.shared_bytes_per_block}")
    registers = accumulator_registers(kernel, block, choice.dim, profile.warp_size)
    limit = profile.registers_per_thread * 3 // (4 if size == 2 else 8)  # fp32 operands pass through registers
    if registers > limit:
        found.append(f"needs {registers} accumulator registers per thread; {limit} leave room for the rest")
    if choice.descriptors and kernel in ("forward", "gradient", "fused"):
        for name in ("rows", "keys", "depth"):
            if getattr(block, name) > 256:
                found.append(f"{name} = {getattr(block, name)} is more than a tensor descriptor's box of 256")
        if dim * size % 16 and not choice.split:
            found.append(f"a row of {dim} {choice.dtype} is not a multiple of 16 bytes, which tensor descriptors need")
    return tuple(found)


def _spread(kernel: str, block: Block, profile: DeviceProfile, rows: int, keys: int) -> Block:
    """The block, smaller where a small batch would leave multiprocessors idle: for the 132 of an H200, 1 024 x 1 024
    have 32 tiles of 256 x 128, and 256 of 64 x 64."""
    if kernel not in ("forward", "gradient"):
        return block
    while -(-rows // block.rows) * -(-keys // block.keys) < profile.multiprocessors:
        if block.rows > SMALL_TILE:
            block = dataclasses.replace(block, rows=block.rows // 2, warps=min(block.warps, 4))
        elif block.keys > SMALL_TILE:
            block = dataclasses.replace(block, keys=block.keys // 2)
        else:
            break
    return block


def _shrink(kernel: str, block: Block, profile: DeviceProfile, choice: Choice) -> Block:
    """The first legal block on the way down: fewer stages, then halved keys, depth and rows in turn."""
    order = ("stages", "keys", "rows") if kernel == "fused" else ("stages", "keys", "depth", "rows")
    smallest = {"stages": 2, "keys": 16, "depth": 16, "rows": 16}
    if kernel == "positive":
        block = dataclasses.replace(block, keys=block.rows)
    while found := violations(kernel, block, profile, choice):
        wider = [name for name in order if getattr(block, name) > smallest[name]]
        if block.warps > profile.max_warps_per_block:
            change: dict[str, Any] = {"warps": block.warps // 2}
        elif not wider:
            raise InputError(f"the {kernel} kernel has no legal block on {profile.name}: {'; '.join(found)}")
        elif "stages" in wider:
            change = {"stages": block.stages - 1}
        else:
            widest = max(wider, key=lambda name: (getattr(block, name), -order.index(name)))
            change = {widest: getattr(block, widest) // 2}
        if kernel == "positive" and ("keys" in change or "rows" in change):
            change = {"rows": block.rows // 2, "keys": block.keys // 2}
        block = dataclasses.replace(block, **change)
    return block


# Block(rows, keys, depth, warps, stages) by family and bytes per element. Hopper at 2 bytes is measured on an H200; the
# others are the largest tiles that compile within shared memory (101 376 bytes for "small", 65 536 for cdna3) and
# registers without a spill, as `infcl-gen verify --aot` reports. "shallow": where it makes one step of the embedding,
# and keys are read once; 9.8 for 10.0 ms of a step at B = 65 536, D = 128.
_ELEMENTWISE = {"finish": Block(16, 16, 256, 4, 1)}
_TABLE: dict[tuple[str, int], dict[str, Block]] = {
    ("hopper", 2): {
        "forward": Block(128, 128, 64, 4, 3),
        "deep forward": Block(256, 128, 64, 8, 4),
        "shallow forward": Block(64, 256, 128, 4, 3),
        "narrow forward": Block(64, 128, 64, 4, 4),
        "gradient": Block(128, 128, 64, 4, 3),
        "stored forward": Block(256, 128, 64, 8, 3),
        "stored gradient": Block(256, 128, 64, 8, 3),
        "product": Block(128, 128, 64, 8, 3),
        "fused64": Block(128, 64, 64, 4, 4),
        "fused96": Block(64, 128, 128, 4, 3),
        "fused128": Block(64, 128, 128, 4, 2),
        "fused256": Block(64, 64, 256, 4, 2),
        "positive": Block(64, 64, 64, 4, 4),
    },
    ("hopper", 4): {
        "forward": Block(128, 64, 32, 8, 3),
        "gradient": Block(128, 64, 32, 8, 3),
        "product": Block(128, 64, 32, 8, 3),
        "positive": Block(32, 32, 32, 4, 2),
    },
    ("blackwell", 2): {
        "forward": Block(128, 128, 64, 8, 3),
        "gradient": Block(128, 128, 64, 8, 3),
        "stored forward": Block(128, 128, 64, 8, 2),
        "product": Block(128, 128, 64, 8, 3),
        "fused128": Block(128, 64, 128, 8, 2),
        "fused256": Block(64, 128, 256, 8, 2),
        "positive": Block(64, 64, 64, 4, 2),
    },
    ("blackwell", 4): {
        "forward": Block(128, 64, 32, 8, 3),
        "gradient": Block(128, 64, 32, 8, 3),
        "product": Block(128, 64, 32, 8, 3),
        "positive": Block(32, 32, 32, 4, 2),
    },
    ("ampere", 2): {
        "forward": Block(128, 128, 64, 8, 3),
        "gradient": Block(128, 128, 64, 8, 3),
        "product": Block(128, 128, 64, 8, 3),
        "fused128": Block(64, 64, 128, 4, 3),
        "fused256": Block(64, 64, 256, 8, 2),
        "positive": Block(64, 64, 64, 4, 2),
    },
    ("ampere", 4): {
        "forward": Block(64, 64, 32, 4, 3),
        "gradient": Block(64, 64, 32, 4, 3),
        "product": Block(64, 64, 32, 4, 3),
        "positive": Block(32, 32, 32, 4, 2),
    },
    ("small", 2): {
        "forward": Block(128, 128, 32, 8, 3),
        "gradient": Block(128, 128, 32, 8, 3),
        "product": Block(128, 128, 64, 8, 3),
        "fused128": Block(64, 64, 128, 4, 2),
        "fused256": Block(64, 64, 256, 8, 2),
        "positive": Block(64, 64, 64, 4, 2),
    },
    ("small", 4): {
        "forward": Block(64, 64, 32, 4, 3),
        "gradient": Block(64, 64, 32, 4, 3),
        "product": Block(64, 64, 32, 4, 3),
        "positive": Block(32, 32, 32, 4, 2),
    },
    ("cdna3", 2): {
        "forward": Block(128, 128, 64, 8, 2),
        "gradient": Block(128, 128, 64, 8, 2),
        "product": Block(128, 128, 64, 8, 2),
        "fused128": Block(64, 64, 128, 4, 2),
        "fused256": Block(32, 32, 256, 4, 2),
        "positive": Block(64, 64, 64, 4, 2),
    },
    ("cdna3", 4): {
        "forward": Block(64, 64, 32, 4, 2),
        "gradient": Block(64, 64, 32, 4, 2),
        "product": Block(64, 64, 32, 4, 2),
        "positive": Block(32, 32, 32, 4, 2),
    },
    ("cdna4", 2): {
        "forward": Block(128, 128, 64, 8, 2),
        "gradient": Block(128, 128, 64, 8, 2),
        "product": Block(128, 128, 64, 8, 2),
        "fused128": Block(64, 64, 128, 4, 2),
        "fused256": Block(32, 32, 256, 4, 2),
        "positive": Block(64, 64, 64, 4, 2),
    },
    ("cdna4", 4): {
        "forward": Block(64, 64, 32, 4, 2),
        "gradient": Block(64, 64, 32, 4, 2),
        "product": Block(64, 64, 32, 4, 2),
        "positive": Block(32, 32, 32, 4, 2),
    },
}  # fmt: skip
