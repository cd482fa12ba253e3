"""Launch glue between torch tensors and Triton kernels: how a feature matrix is passed to a kernel."""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import torch

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


def descriptor_legal(x: torch.Tensor) -> bool:
    """Whether a tensor descriptor may address `x` (rows, D): base and row stride in 16 bytes, last stride 1."""
    return (
        x.shape[0] > 0
        and x.stride(1) == 1
        and x.data_ptr() % 16 == 0
        and x.stride(0) > 0
        and x.stride(0) * x.element_size() % 16 == 0
    )


def operands(
    q: torch.Tensor, q_block: list[int], k: torch.Tensor, k_block: list[int], descriptors: bool
) -> tuple[Operand, Operand, bool]:
    """`q` and `k` as kernel operands read in blocks (rows, depth), and whether both go as descriptors."""
    if descriptors and descriptor_legal(q) and descriptor_legal(k):
        from triton.tools.tensor_descriptor import TensorDescriptor

        return (
            Operand(TensorDescriptor.from_tensor(q, q_block), q.stride(0), 1),
            Operand(TensorDescriptor.from_tensor(k, k_block), k.stride(0), 1),
            True,
        )
    return Operand(q, q.stride(0), q.stride(1)), Operand(k, k.stride(0), k.stride(1)), False


def library_legal(x: torch.Tensor) -> bool:
    """Whether the matrix library takes `x` as it is; otherwise torch would copy it, outside the memory plan."""
    rows, columns = x.shape
    return (x.stride(1) == 1 and x.stride(0) >= max(1, columns)) or (
        x.stride(0) == 1 and x.stride(1) >= max(1, rows)
    )


LONGEST_STRIP = 32  # row blocks; longer ones are not faster, and visit more keys at a time than L2 holds


@functools.cache
def strip_blocks(row_blocks: int, key_blocks: int, strips: int, programs: int) -> int:
    """Row blocks that one program walks: at most `strips` programs for each block of keys, in few and full rounds.

    `programs` run at once; each takes as long as its row blocks and about half a block more to start and end.
    """
    shortest = cdiv(row_blocks, strips)
    longest = max(shortest, min(row_blocks, LONGEST_STRIP))

    def cost(strip: int) -> float:
        return cdiv(key_blocks * cdiv(row_blocks, strip), programs) * (strip + 0.5)

    return min(range(shortest, longest + 1), key=cost)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
