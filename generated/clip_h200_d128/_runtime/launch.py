"""Launch glue between torch tensors and Triton kernels: how a feature matrix is passed, and how a kernel starts."""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in (
    "1",
    "true",
    "yes",
    "on",
    "y",
)  # as triton reads it
"""Kernels run as numpy on the CPU, where bf16 arithmetic is wrong: tiles are widened to fp32 after they are loaded."""


class Operand(NamedTuple):
    """A feature matrix (rows, D) as kernel arguments: tensor descriptor or tensor, and its strides in elements."""

    source: Any
    row_stride: int
    depth_stride: int


def descriptor_legal(x: Tensor) -> bool:
    """Whether a tensor descriptor may address `x` (rows, D): base and row stride in 16 bytes, last stride 1."""
    return (
        x.shape[0] > 0
        and x.stride(1) == 1
        and x.data_ptr() % 16 == 0
        and x.stride(0) > 0
        and x.stride(0) * x.element_size() % 16 == 0
    )


def descriptor(x: Tensor, block: list[int]) -> Any:
    """The tensor descriptor of `x` (rows, columns), for which it must be legal, in blocks of (rows, columns)."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, block)


def operands(
    q: Tensor, q_block: list[int], k: Tensor, k_block: list[int], descriptors: bool
) -> tuple[Operand, Operand, bool]:
    """`q` and `k` as kernel operands read in blocks (rows, depth), and whether both go as descriptors."""
    if descriptors and descriptor_legal(q) and descriptor_legal(k):
        return (
            Operand(descriptor(q, q_block), q.stride(0), 1),
            Operand(descriptor(k, k_block), k.stride(0), 1),
            True,
        )
    return Operand(q, q.stride(0), q.stride(1)), Operand(k, k.stride(0), k.stride(1)), False


def library_legal(x: Tensor) -> bool:
    """Whether the matrix library takes `x` as it is; otherwise torch would copy it, outside the memory plan."""
    rows, columns = x.shape
    return (x.stride(1) == 1 and x.stride(0) >= max(1, columns)) or (
        x.stride(0) == 1 and x.stride(1) >= max(1, rows)
    )


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)`, faster from the second time on: small batches wait for the host.

    Triton binds, specialises and looks up anew at every launch; here the compiled kernel is kept for all arguments that
    it would specialise alike (`_trait`).
    """
    if INTERPRETED:
        kernel[grid](*arguments, **options)
        return
    key = (id(kernel), torch.cuda.current_device(), *options.values(), *map(_trait, arguments))
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **options)
        constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])
        _compiled[key] = compiled, constants
        return
    compiled, constants = found
    compiled[(grid[0], grid[1] if len(grid) > 1 else 1, 1)](*arguments, *constants)


def _trait(x: Any) -> Any:
    """What Triton specialises an argument on: integers that are 1, divisible by 16 or wider than 32 bits, and type and
    alignment of pointers (on ROCm also whether 32-bit offsets reach all of it)."""
    if type(x) is int:
        return (x == 1) + 2 * (x & 15 == 0) + 4 * (-0x80000000 <= x < 0x80000000)
    if isinstance(x, Tensor):
        reach = x.untyped_storage().size() < 0x80000000 if torch.version.hip else True
        return x.dtype, x.data_ptr() & 15 == 0, reach
    return type(x)


LONGEST_STRIP = 32  # row blocks; longer ones are not faster, and visit more keys at a time than L2 holds


@functools.cache
def strip_blocks(row_blocks: int, key_blocks: int, strips: int, programs: int) -> int:
    """Row blocks that one program walks: at most `strips` programs for each block of keys, in few and full rounds.

    A round is `programs` programs: as many as run at once, or for a ring, whose messages take multiprocessors away from
    some of them, several times as many. Each takes as long as its row blocks and about half a block more to start and
    end.
    """
    shortest = cdiv(row_blocks, strips)
    longest = max(shortest, min(row_blocks, LONGEST_STRIP))

    def cost(strip: int) -> float:
        return cdiv(key_blocks * cdiv(row_blocks, strip), programs) * (strip + 0.5)

    return min(range(shortest, longest + 1), key=cost)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
