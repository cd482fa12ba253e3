"""Launch glue between torch tensors and Triton kernels: which rows of a feature matrix are passed, as what, and how a
kernel starts."""

from __future__ import annotations

import functools
import importlib
import operator
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")  # as triton reads it
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


class Descriptor(NamedTuple):
    """The fields of Triton's TensorDescriptor, which a launcher reads, without the dozen checks that making one runs.

    Triton 3.6 has no `round_f32_to_tf32`.
    """

    base: Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    block_shape: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False
    layout: Any = None  # of a block in shared memory, which Gluon's kernels are told


def descriptor(x: Tensor, block: list[int], layout: Any = None) -> Descriptor:
    """The tensor descriptor of `x` (rows, columns), for which it must be legal, in blocks of (rows, columns)."""
    return Descriptor(x, x.shape, x.stride(), block, layout=layout)


def _checked(x: Any) -> Any:
    """A kernel's argument as Triton takes it where it compiles and interprets."""
    if type(x) is not Descriptor:
        return x
    if x.layout is not None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(x.base, list(x.shape), list(x.strides), x.block_shape, x.layout)
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x.base, x.shape, x.strides, x.block_shape)


@functools.cache
def runs_variant(device: torch.device, arch: str, gluon: str) -> bool:
    """Whether kernels for GPUs of one architecture run here: on such a GPU; those in Gluon ("module:name" of it, else
    "") with a Triton that has this name. Elsewhere the kernels of kernels.py do their work. The interpreter runs all
    but Gluon's."""
    module, _, path = gluon.partition(":")
    if INTERPRETED or device.type != "cuda":
        return INTERPRETED and not gluon
    if torch.version.hip:
        here = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    else:
        here = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    if here != arch or not gluon:
        return here == arch
    try:
        return bool(operator.attrgetter(path)(importlib.import_module(f"triton.experimental.gluon.{module}")))
    except (ImportError, AttributeError):
        return False


def panel(x: Tensor, start: int, rows: int) -> Tensor:
    """Up to `rows` rows of x from `start` on; x itself if these are all, for a view takes the host up to 13 us."""
    return x if start == 0 and rows >= x.shape[0] else x[start : start + rows]


def panel_columns(x: Tensor, start: int, count: int) -> Tensor:
    """Up to `count` columns of x from `start` on; x itself if these are all."""
    return x if start == 0 and count >= x.shape[1] else x[:, start : start + count]


def operands(
    q: Tensor, q_block: list[int], k: Tensor, k_block: list[int], descriptors: bool
) -> tuple[Operand, Operand, bool]:
    """`q` and `k` as kernel operands read in blocks (rows, depth), and whether both go as descriptors."""
    if descriptors and descriptor_legal(q) and descriptor_legal(k):
        return (Operand(descriptor(q, q_block), q.stride(0), 1), Operand(descriptor(k, k_block), k.stride(0), 1), True)
    return Operand(q, q.stride(0), q.stride(1)), Operand(k, k.stride(0), k.stride(1)), False


def read_in_place(x: Tensor) -> bool:
    """Whether a matrix product reads `x` as it is; otherwise torch would copy it, outside the memory plan."""
    rows, columns = x.shape
    return (x.stride(1) == 1 and x.stride(0) >= max(1, columns)) or (x.stride(0) == 1 and x.stride(1) >= max(1, rows))


def library_legal(x: Tensor) -> bool:
    """Whether the GPU's matrix library takes `x`; the interpreter runs the kernel instead."""
    return x.is_cuda and read_in_place(x)


Launcher = Callable[[tuple[int, int, int], int, list[Any]], None]  # of a grid, a stream and arguments

_launchers: dict[tuple[Any, ...], tuple[Launcher, Any]] = {}  # with the kernel, or another could get its id


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)` of tensors on the current device, faster from the second time on: small
    batches wait for the host. Arguments may all be given by name, in any order.

    Triton binds, specialises and looks up anew at every launch; here the compiled kernel is kept for all arguments that
    it would specialise alike: integers that are 1, divisible by 16 or wider than 32 bits, and type and alignment of
    pointers (on ROCm also whether 32-bit offsets reach all of it). On the host of an H200 that has waited for its
    device a launch takes 14 to 40 us; of tensors, and through Triton's hooks, it took 20 to 67.
    """
    if not arguments:
        arguments = tuple([options.pop(name) for name in kernel.arg_names if not name.isupper()])
    if INTERPRETED:
        kernel[grid](*map(_checked, arguments), **options)
        return
    device = torch._C._cuda_getDevice()
    traits = [id(kernel), device, *options.values()]
    passed = []  # addresses for tensors: a launcher would ask each for it again, and the driver whether it is one
    for x in arguments:
        kind = type(x)
        if kind is int:
            traits.append((x == 1) + 2 * (x & 15 == 0) + 4 * (-0x80000000 <= x < 0x80000000))
        elif kind is Tensor or isinstance(x, Tensor):
            address = x.data_ptr()
            traits += x.dtype, address & 15 == 0
            if torch.version.hip:
                traits.append(x.untyped_storage().size() < 0x80000000)
            x = address
        else:
            traits.append(kind)
        passed.append(x)
    key = tuple(traits)
    known = _launchers.get(key)
    if known is None:
        compiled = kernel[grid](*map(_checked, arguments), **options)
        constants = [options[name] for name in kernel.arg_names[len(arguments) :]]
        _launchers[key] = _launcher(compiled, constants), kernel
        return
    size = grid[0], grid[1] if len(grid) > 1 else 1, 1
    known[0](size, torch._C._cuda_getCurrentRawStream(device), passed)


def _launcher(compiled: Any, constants: list[Any]) -> Launcher:
    """What launches a compiled kernel, past Triton's hooks while nobody has any."""
    from triton import knobs

    hooks, run, function, metadata = knobs.runtime, compiled.run, compiled.function, compiled.packed_metadata

    def launcher(grid: tuple[int, int, int], stream: int, arguments: list[Any]) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        watched = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        if watched:  # by a profiler: Triton tells it of the launch
            compiled[grid](*arguments, *constants)
        else:
            run(*grid, stream, function, metadata, None, None, None, *arguments, *constants)

    return launcher
