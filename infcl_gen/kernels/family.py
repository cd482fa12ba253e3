"""A `Family` of kernels, and the `Tile` that chooses and limits their block.

A panel of R x C similarities lives in memory; the planner chooses it from the budget. A block of rows x keys x depth is
one program's in shared memory; its warps and stages decide registers and pipeline.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from infcl_gen.errors import InputError
from infcl_gen.hardware import DeviceProfile
from infcl_gen.inputs.overrides import BLOCK_FIELDS, Overrides
from infcl_gen.kernels.arguments import Kernel
from infcl_gen.kernels.choice import Block, Choice, dividing, padded_dim

REGISTERS = 65536  # of a multiprocessor, on every board
SMALL_TILE = 64  # rows and keys of the smallest tile of small batches: that of a warp group on Hopper
MOST_PROGRAMS = 4096  # of a panel's sweep: some 15 rounds of a large board
SWEEPS = ("panel", "stash", "rows", "fused")  # the strategies that have kernels

# Blocks by family of architectures: of forward and gradient for operands of 2 bytes, then for fp32, of product, too.
# Here and in the families' own tables Hopper at 2 bytes is measured on an H200. The others are the largest tiles that
# compile without a spill within shared memory (101 376 bytes for "small", 65 536 for cdna3): `infcl-gen verify --aot`.
BLOCKS = {
    "hopper": (Block(128, 128, 64, 4, 3), Block(128, 64, 32, 8, 3)),
    "blackwell": (Block(128, 128, 64, 8, 3), Block(128, 64, 32, 8, 3)),
    "ampere": (Block(128, 128, 64, 8, 3), Block(64, 64, 32, 4, 3)),
    "small": (Block(128, 128, 32, 8, 3), Block(64, 64, 32, 4, 3)),
    "cdna3": (Block(128, 128, 64, 8, 2), Block(64, 64, 32, 4, 2)),
    "cdna4": (Block(128, 128, 64, 8, 2), Block(64, 64, 32, 4, 2)),
}


class Tile:
    """The block of one kind of kernel, as most have it: its default, its legality, and what the tuner tries."""

    name: str  # in `--set` and in plans
    tuned = False  # whether `infcl-gen tune` tries other blocks
    described = False  # whether its kernels read features through tensor descriptors
    walks = False  # whether its programs walk strips of a panel; small batches then get smaller tiles
    square = False  # whether rows must equal keys
    for_positives = False  # whether its kernels are of positives that are found apart from tiles
    switches: tuple[str, ...] = ()  # further keys of `--set` that concern its kernels
    shrinks: tuple[str, ...] = ("stages", "keys", "depth", "rows")  # on a small board; of equal fields the first

    def tabulated(self, architecture: str, choice: Choice) -> Block:
        """The block for large batches on a family of architectures."""
        two_bytes, fp32 = BLOCKS[architecture]
        return two_bytes if choice.operand_bytes == 2 else fp32

    def default(self, profile: DeviceProfile, choice: Choice, rows: int, keys: int) -> Block:
        """The block for `rows` queries x `keys` keys, legal or not.

        Walked tiles are halved while there are fewer tiles than SMs. An H200 has 132 SMs, and 1 024 x 1 024 have 32
        tiles of 256 x 128, or 256 tiles of 64 x 64.
        """
        block = self.tabulated(profile.architecture.family, choice)
        while self.walks and -(-rows // block.rows) * -(-keys // block.keys) < profile.multiprocessors:
            if block.rows > SMALL_TILE:
                block = dataclasses.replace(block, rows=block.rows // 2, warps=min(block.warps, 4))
            elif block.keys > SMALL_TILE:
                block = dataclasses.replace(block, keys=block.keys // 2)
            else:
                break
        return dataclasses.replace(block, depth=min(block.depth, self.deepest(choice)))

    def deepest(self, choice: Choice) -> int:
        """The largest legal depth."""
        padded = padded_dim(choice.inner_dim)
        return min(padded, dividing(choice.traits.prefixes)) if self.walks else padded

    def shared_bytes(self, block: Block, choice: Choice) -> int:
        """Shared memory of the block's tiles, over all pipeline stages."""
        return block.stages * (block.rows + block.keys) * block.depth * choice.operand_bytes

    def accumulators(self, block: Block, choice: Choice) -> int:
        """fp32 numbers that a program holds in registers: here the tile of z, and that of a guide's similarities."""
        return block.rows * block.keys * (1 + choice.traits.guide)

    def strips(self, rows: int, keys: int, block: Block, choice: Choice) -> int:
        """Strips of a panel's row blocks for each block of keys, which programs own, at most: each strip's partial sums
        take memory."""
        return min(-(-rows // block.rows), max(1, MOST_PROGRAMS // -(-keys // block.keys)))

    def registers(self, block: Block, choice: Choice, warp_size: int) -> int:
        """Accumulator registers of one thread."""
        return -(-self.accumulators(block, choice) // (block.warps * warp_size))

    def resident_programs(self, block: Block, choice: Choice, profile: DeviceProfile) -> int:
        """Programs that the board runs at once, by the shared memory and the registers of an SM."""
        by_memory = profile.shared_bytes_per_block // max(self.shared_bytes(block, choice), 1)
        registers = self.registers(block, choice, profile.warp_size) + 96  # assumed beside accumulators
        registers = min(registers, profile.registers_per_thread)
        by_registers = REGISTERS // (registers * block.warps * profile.warp_size)
        return profile.multiprocessors * max(1, min(by_memory, by_registers))

    def wide_warps(self, block: Block, choice: Choice, profile: DeviceProfile) -> int:
        """Warps of the kernel that computes a strip again. Its second reference and its pointers take registers: with
        more than 32 elements of a tile a thread spills, with more than 16 where there are two statistics. Beside
        statistics of all prefixes 8 spill on sm_100: tiles have fewer rows instead."""
        if choice.slabs:
            return 256 // profile.warp_size
        warps = max(4, block.keys // 16)
        return min(2 * warps, profile.max_warps_per_block) if choice.traits.two_statistics else warps

    def misfits(self, block: Block, choice: Choice) -> list[str]:
        """What this tile's kernels cannot do with a block."""
        deepest = self.deepest(choice)
        limit = "what divides the prefixes" if self.walks and choice.traits.slabs else "the padded embedding"
        found = [f"depth = {block.depth} is more than {limit}, {deepest}"] * (block.depth > deepest)
        if self.square and block.rows != block.keys:
            sides = f"rows = {block.rows} and keys = {block.keys}"
            found.append(f"{sides} differ: positives are the diagonal of a square tile")
        return found

    def violations(self, block: Block, choice: Choice, profile: DeviceProfile) -> tuple[str, ...]:
        """Why the block is illegal on this board, naming field and limit; () if it is legal."""
        sides = {"rows": block.rows, "keys": block.keys, "depth": block.depth}
        power = "is not a power of two of at least 16"
        found = [f"{name} = {n} {power}" for name, n in sides.items() if n < 16 or n & (n - 1)]
        if block.warps < 1 or block.warps & (block.warps - 1) or block.warps > profile.max_warps_per_block:
            found.append(f"warps = {block.warps} is not a power of two from 1 to {profile.max_warps_per_block}")
        if not 1 <= block.stages <= 8:
            found.append(f"stages = {block.stages} is not between 1 and 8")
        found += self.misfits(block, choice)
        if found:
            return tuple(found)  # the estimates below need a well-formed block
        shared = self.shared_bytes(block, choice)
        if shared > profile.shared_bytes_per_block:
            found.append(f"needs {shared} bytes of shared memory; {profile.name} has {profile.shared_bytes_per_block}")
        registers = self.registers(block, choice, profile.warp_size)
        eighths = 6 if choice.operand_bytes == 2 else 3  # fp32 operands pass through registers
        limit = (profile.registers_per_thread + 1) * eighths // 8  # NVIDIA's 256th is always 0
        if registers > limit:
            found.append(f"needs {registers} accumulator registers per thread; {limit} leave room for the rest")
        if choice.descriptors and self.described:
            box = "is more than a tensor descriptor's box of 256"
            found += [f"{name} = {n} {box}" for name, n in sides.items() if n > 256]
            if not choice.aligned:
                row = f"a row of {choice.dim} {choice.dtype}"
                found.append(f"{row} is not a multiple of 16 bytes, which tensor descriptors need")
        return tuple(found)

    def shrunk(self, block: Block, choice: Choice, profile: DeviceProfile) -> Block:
        """The first legal block on the way down: fewer stages, then the largest of keys, depth and rows is halved.

        Raises InputError if there is none.
        """
        while found := self.violations(block, choice, profile):
            wider = [name for name in self.shrinks if getattr(block, name) > (2 if name == "stages" else 16)]
            if block.warps > profile.max_warps_per_block:
                change: dict[str, Any] = {"warps": block.warps // 2}
            elif not wider:
                raise InputError(f"the {self.name} kernel has no legal block on {profile.name}: {'; '.join(found)}")
            elif "stages" in wider:
                change = {"stages": block.stages - 1}
            else:
                widest = max(wider, key=lambda name: (getattr(block, name), -wider.index(name)))
                halved = ("rows", "keys") if self.square and widest != "depth" else (widest,)
                change = {name: getattr(block, name) // 2 for name in halved}
            block = dataclasses.replace(block, **change)
        return block

    def options(self, base: Block, choice: Choice) -> dict[str, tuple[int, ...]]:
        """The values of each field that the tuner tries. `base`: the default."""
        sides = (64, 128, 256)
        return {"rows": sides, "keys": sides, "depth": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)}

    def proposals(self, base: Block, choice: Choice, given: Overrides) -> Iterator[tuple[tuple[str, str], ...]]:
        """Pairs of `--set` for the tuner to try, legal or not; () is the default, `base`. `given`: the user's."""
        options = self.options(base, choice)
        for values in itertools.product(*options.values()):
            same = values == tuple(getattr(base, name) for name in options)
            pairs = zip(options, values, strict=True)
            yield () if same else tuple((f"{self.name}.{name}", str(value)) for name, value in pairs)

    @property
    def settings(self) -> frozenset[str]:
        """The keys of `--set` that concern this tile."""
        return frozenset({*(f"{self.name}.{field}" for field in BLOCK_FIELDS), *self.switches})


@dataclasses.dataclass(frozen=True)
class Family:
    """Kernels that are chosen together. A variant's have a file of their own. Each `replaces` one of kernels.py on one
    architecture, with the same tiles, strips and results.

    `revision` is raised when a change of text or launch may change the fastest settings: older tuning records are then
    stale. It is 0 if no setting matters.
    """

    template: str  # triton/`template`.py.jinja, for kernels that name no other
    kernels: Callable[[Choice], tuple[Kernel, ...]]
    strategies: tuple[str, ...] = SWEEPS  # whose packages have them, where `wanted` agrees
    wanted: Callable[[Choice], bool] = lambda choice: True
    tile: Tile | None = None  # of these kernels, where `--set` may change it
    revision: int = 0
    file: str = "kernels.py"  # of the package
    arch: str = ""  # a variant's only architecture
    gluon: str = ""  # "module:name" that the installed Triton's Gluon must have; "" for kernels in Triton
    values: Callable[[Choice], dict[str, Any]] = lambda choice: {}  # further names in its template
    longest_strip: int = 0  # row blocks that one program walks at most, where an SM runs one program
    block: Callable[[Choice, Kernel], Block] | None = None  # of a variant's kernel, for people; None: its original's

    def templates(self, choice: Choice) -> tuple[str, ...]:
        """The paths of the kernels' templates, each once."""
        names = dict.fromkeys(kernel.template or self.template for kernel in self.kernels(choice))
        return tuple(f"triton/{name}.py.jinja" for name in names)

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py")
