"""forward_hopper, gradient_hopper: what `forward` and `gradient` compute, for Hopper GPUs, in Gluon."""

from __future__ import annotations

from infcl_gen.kernels.arguments import SCALARS, Argument, Kernel, Traits, constants, counts, pointers

WARPS = 4  # of one group
Q, K, G = (
    Argument(name, "*features", block=(f"{name.upper()}_BLOCK[0]", f"{name.upper()}_BLOCK[1]"), layout="LAYOUT")
    for name in "qkg"
)


def wanted(traits: Traits) -> bool:
    return traits.hopper_stages > 0


def kernels(traits: Traits) -> tuple[Kernel, ...]:
    sizes = (*counts("queries", "keys"), *counts("strip", multiple="never"))
    sums = ("row_exponent", "row_sum", "key_exponent", "key_sum")
    forward = (
        Q, K, *SCALARS, *pointers("*fp32", "reference", *sums), *pointers("*int32", "flags"), *sizes,
        *counts("rows_stride", "keys_stride"), *constants("MASKED"),
    )  # fmt: skip
    own = ("query_exponent", "query_mantissa", "key_ratio", "key_reference", "key_lowest")
    gradient = (Q, K, *SCALARS, *pointers("*fp32", *own), G, *pointers("*int32", "flags"), *sizes)
    return tuple(
        Kernel(name, arguments, warps=WARPS, stages=traits.hopper_stages, registers="REGISTERS")
        for name, arguments in (("forward_hopper", forward), ("gradient_hopper", gradient))
    )
