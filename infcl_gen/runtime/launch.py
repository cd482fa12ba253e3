"""Launch glue between torch tensors and Triton kernels: which rows of a feature matrix are passed, as what, and how a
kernel starts."""

from __future__ import annotations

import functools
import importlib
import operator
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")  # as triton reads it
"""Kernels run as numpy on the CPU, where bf16 arithmetic is wrong: tiles are widened to fp32 after they are loaded."""

_HIP = bool(torch.version.hip)


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


def descriptor(x: Tensor, block: list[int], layout: Any = None) -> Any:
    """The tensor descriptor of `x` (rows, columns), for which it must be legal, in blocks of (rows, columns): Triton's,
    without the dozen checks that making one runs. `layout`: of a block in shared memory, which Gluon's kernels are
    told."""
    if layout is None:
        from triton.tools.tensor_descriptor import TensorDescriptor
    else:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    made = object.__new__(TensorDescriptor)
    vars(made).update(base=x, shape=x.shape, strides=x.stride(), block_shape=block, layout=layout)
    return made


@functools.cache
def runs_variant(device: torch.device, arch: str, gluon: str) -> bool:
    """Whether kernels for GPUs of one architecture run here: on such a GPU; those in Gluon ("module:name" of it, else
    "") with a Triton that has this name. Elsewhere the kernels of kernels.py do their work. The interpreter runs all
    but Gluon's."""
    module, _, path = gluon.partition(":")
    if INTERPRETED or device.type != "cuda":
        return INTERPRETED and not gluon
    if _HIP:
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
        return Operand(descriptor(q, q_block), q.stride(0), 1), Operand(descriptor(k, k_block), k.stride(0), 1), True
    return Operand(q, q.stride(0), q.stride(1)), Operand(k, k.stride(0), k.stride(1)), False


def read_in_place(x: Tensor) -> bool:
    """Whether a matrix product reads `x` as it is; otherwise torch would copy it, outside the memory plan."""
    rows, columns = x.shape
    return (x.stride(1) == 1 and x.stride(0) >= max(1, columns)) or (x.stride(0) == 1 and x.stride(1) >= max(1, rows))


def library_legal(x: Tensor) -> bool:
    """Whether the GPU's matrix library takes `x`; the interpreter runs the kernel instead."""
    return x.is_cuda and read_in_place(x)


class _Kernel(NamedTuple):
    """A kernel that was launched before. `compiled`: by what Triton compiles anew for, the compiled kernel, what runs
    it, and its constants."""

    kernel: Any  # held here, or another one could get its id
    arguments: list[str]  # in the kernel's order
    options: list[str]  # constants and launch options
    compiled: dict[tuple[Any, ...], tuple[Any, Any, list[Any]]]
    hooks: Any  # Triton's, of a profiler


_kernels: dict[int, _Kernel] = {}  # by id: a kernel's hash takes long


def launch(kernel: Any, grid: tuple[int, ...], **given: Any) -> None:
    """`kernel[grid](**given)` of tensors on the current device, faster from the second time on: small batches wait for
    the host. Constants have names in capitals; a kernel is launched with the same names each time.

    Triton binds, specialises and looks up anew at every launch; here the compiled kernel is kept for all arguments that
    it would specialise alike: integers that are 1, divisible by 16 or wider than 32 bits, and type and alignment of
    pointers (on ROCm also whether 32-bit offsets reach all of it). On the host of an H200 that has waited for its
    device a launch takes 14 to 40 us; of tensors, and through Triton's hooks, it took 20 to 67.
    """
    if INTERPRETED:
        kernel[grid](**given)
        return
    known = _kernels.get(id(kernel)) or _first(kernel, given)
    device = torch._C._cuda_getDevice()
    traits = [device, *map(given.__getitem__, known.options)]
    passed = []  # addresses for tensors: a launcher would ask each for it again, and the driver whether it is one
    for x in map(given.__getitem__, known.arguments):
        kind = type(x)
        if kind is int:
            traits.append((x == 1) + 2 * (x & 15 == 0) + 4 * (-0x80000000 <= x < 0x80000000))
        elif kind is Tensor or isinstance(x, Tensor):
            address = x.data_ptr()
            traits += x.dtype, address & 15 == 0
            if _HIP:
                traits.append(x.untyped_storage().size() < 0x80000000)
            x = address
        else:
            traits.append(kind)
        passed.append(x)
    key = tuple(traits)
    if key not in known.compiled:
        compiled = kernel[grid](**given)
        constants = [given[name] for name in kernel.arg_names if name.isupper()]
        known.compiled[key] = compiled, compiled.run, constants
        return
    compiled, run, constants = known.compiled[key]
    size = grid[0], grid[1] if len(grid) > 1 else 1, 1
    enter, leave = known.hooks.launch_enter_hook, known.hooks.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # Triton tells a profiler of the launch
        compiled[size](*passed, *constants)
        return
    stream, metadata = torch._C._cuda_getCurrentRawStream(device), compiled.packed_metadata
    run(*size, stream, compiled.function, metadata, None, None, None, *passed, *constants)


def _first(kernel: Any, given: dict[str, Any]) -> _Kernel:
    from triton import knobs

    arguments = [name for name in kernel.arg_names if not name.isupper()]
    options = [name for name in given if name not in arguments]
    return _kernels.setdefault(id(kernel), _Kernel(kernel, arguments, options, {}, knobs.runtime))
