"""forward_hopper, gradient_hopper: what `forward` and `gradient` compute, for Hopper GPUs, in Gluon."""

import functools

from infcl_gen.kernels.arguments import SCALARS, Argument, Kernel, arguments
from infcl_gen.kernels.choice import Block, Choice
from infcl_gen.kernels.family import Family

ARCH = "sm_90"
GLUON = "language.nvidia.hopper:tma.async_copy_global_to_shared"  # so named in Triton 3.6 and 3.7
WARPS = 4  # of one group
ALL_WARPS = 2 * WARPS + 1  # two groups multiply, and one warp copies tiles
Q, K, G = (
    Argument(name, "*{operands}", block=(f"{name.upper()}_BLOCK[0]", f"{name.upper()}_BLOCK[1]"), layout="LAYOUT")
    for name in "qkg"
)


TILE = (128, 128)  # rows and keys of the ordinary kernels, whose work is taken over


def runs(choice: Choice) -> bool:
    """Whether kernels in Gluon run: panels of 2-byte features that descriptors address, on Hopper."""
    panels = choice.strategy == "panel" and choice.descriptors and choice.operand_bytes == 2
    return choice.arch == ARCH and panels


def has_tiles(choice: Choice, tile: tuple[int, int] = TILE) -> bool:
    """Whether the ordinary forward and gradient have the tiles of these kernels."""
    blocks = (choice.blocks[name] for name in ("forward", "gradient") if name in choice.blocks)
    return all((block.rows, block.keys) == tile for block in blocks)


def stages(choice: Choice) -> int:
    """Pipeline stages of query tiles; 0 where the ordinary kernels stay.

    On an H200 the forward takes 0.88 (D = 256) and 0.60 (D = 200) of the ordinary kernel's time, the gradient 0.93 and
    0.70. Up to D = 128 the ordinary forward keeps its keys, too. Beyond 256 keys and queries do not fit into shared
    memory together.
    """
    narrow = 128 < choice.dim <= 256 and not choice.split and choice.one_exponential
    here = runs(choice) and not (
        choice.traits.masked or choice.traits.triangle or choice.traits.slabs or choice.traits.guide
    )
    return 9 // -(-choice.dim // 64) if narrow and here and has_tiles(choice) else 0


def values(choice: Choice) -> dict[str, int]:
    """Parts of 64 columns, the columns of the last part that are multiplied, and stages."""
    parts = -(-choice.dim // 64)
    last = -(-(choice.dim - 64 * (parts - 1)) // 16) * 16
    return {"hopper_parts": parts, "hopper_last": last, "hopper_stages": choice.hopper_stages}


def block(choice: Choice, kernel: Kernel) -> Block:
    """A stage has whole queries, padded to parts of 64 columns; keys stay in shared memory."""
    return Block(*TILE, 64 * values(choice)["hopper_parts"], ALL_WARPS, kernel.stages)


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    return variants(choice, (Q, K, G), "")


def variants(
    choice: Choice, tensors: tuple[Argument, Argument, Argument], strides: str, factors: str = "", row_blocks: int = 1
) -> tuple[Kernel, ...]:
    """The two kernels, of tensors q, k and g. `strides`: what else the gradient takes; `factors`: what both take."""
    q, k, g = tensors
    both, shared = choice.both_axes, choice.one_exponential
    sums, distances = "row_exponent row_sum" + " key_exponent key_sum" * both, "rows_stride" + " keys_stride" * both
    forward = arguments(q, k, SCALARS, "reference", sums, f"flags queries keys strip {distances} {factors} MASKED")
    sums = "query_exponent query_mantissa" + " key_ratio key_reference key_lowest" * shared
    gradient = arguments(q, k, SCALARS, sums, g, "flags" * shared, f"queries keys strip {strides} {factors}")
    made = functools.partial(
        Kernel, warps=WARPS, stages=choice.hopper_stages, registers="REGISTERS", row_blocks=row_blocks
    )
    return (made("forward_hopper", forward, replaces="forward"), made("gradient_hopper", gradient, replaces="gradient"))


FAMILY = Family(
    "hopper",
    kernels,
    ("panel",),
    wanted=lambda choice: choice.hopper_stages > 0 and not choice.slabs,
    revision=1,
    file="hopper.py",
    arch=ARCH,
    gluon=GLUON,
    values=values,
    longest_strip=256,  # blocks of 128 rows: a whole panel
    block=block,
)
