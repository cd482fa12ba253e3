"""forward_hopper, gradient_hopper: what `forward` and `gradient` compute, for Hopper GPUs, in Gluon."""

from infcl_gen.kernels.arguments import SCALARS, Argument, Kernel, arguments
from infcl_gen.kernels.choice import Choice
from infcl_gen.kernels.family import Family

ARCH = "sm_90"
GLUON = "language.nvidia.hopper:tma.async_copy_global_to_shared"  # so named in Triton 3.6 and 3.7
WARPS = 4  # of one group
Q, K, G = (
    Argument(name, "*{operands}", block=(f"{name.upper()}_BLOCK[0]", f"{name.upper()}_BLOCK[1]"), layout="LAYOUT")
    for name in "qkg"
)


def stages(choice: Choice) -> int:
    """Pipeline stages of query tiles; 0 where the ordinary kernels stay.

    On an H200 the forward takes 0.88 (D = 256) and 0.60 (D = 200) of the ordinary kernel's time, the gradient 0.93 and
    0.70. Up to D = 128 the ordinary forward keeps its keys, too. Beyond 256 keys and queries do not fit into shared
    memory together.
    """
    narrow = 128 < choice.dim <= 256 and choice.operand_bytes == 2 and not choice.split and choice.both_axes
    here = choice.arch == ARCH and choice.strategy == "panel" and choice.descriptors
    here = here and not (choice.traits.masked or choice.traits.triangle or choice.traits.slabs or choice.traits.guide)
    tiles = [(block.rows, block.keys) for name, block in choice.blocks.items() if name in ("forward", "gradient")]
    return 9 // -(-choice.dim // 64) if narrow and here and {*tiles} <= {(128, 128)} else 0


def values(choice: Choice) -> dict[str, int]:
    """Parts of 64 columns, the columns of the last part that are multiplied, and stages."""
    parts = -(-choice.dim // 64)
    last = -(-(choice.dim - 64 * (parts - 1)) // 16) * 16
    return {"hopper_parts": parts, "hopper_last": last, "hopper_stages": choice.hopper_stages}


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    sums = "reference row_exponent row_sum key_exponent key_sum"
    forward = arguments(Q, K, SCALARS, sums, "flags queries keys strip rows_stride keys_stride MASKED")
    sums = "query_exponent query_mantissa key_ratio key_reference key_lowest"
    gradient = arguments(Q, K, SCALARS, sums, G, "flags queries keys strip")
    return tuple(
        Kernel(f"{name}_hopper", taken, warps=WARPS, stages=choice.hopper_stages, registers="REGISTERS", replaces=name)
        for name, taken in (("forward", forward), ("gradient", gradient))
    )


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
)
