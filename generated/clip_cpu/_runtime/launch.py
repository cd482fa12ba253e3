"""Glue between torch tensors and Triton kernels: panels, operands, strips, and fast launches."""

import contextlib
import functools
import importlib
import operator
import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

# As triton reads it. Interpreted kernels run as numpy on the CPU. bf16 arithmetic is wrong there: loaded tiles are
# widened to fp32.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
LONGEST_STRIP = 32  # row blocks; longer strips are not faster, and visit more keys at a time than L2 holds
# What Triton compiles every kernel with. a * b + c rounds once: the bounds of errors and the registers of each kernel
# are those of fused operations. Triton up to 3.9 fuses by default.
OPTIONS = {"enable_fp_fusion": True}
_HIP = bool(torch.version.hip)


class Operand(NamedTuple):
    """A feature matrix (rows, D) as kernel arguments: tensor descriptor or tensor, and its strides in elements."""

    source: Any
    row_stride: int
    depth_stride: int


def descriptor_legal(x: Tensor) -> bool:
    """Whether a tensor descriptor may address `x` (rows, D): base and row stride in 16 bytes, last stride 1."""
    row, column = x.stride()
    aligned = x.data_ptr() % 16 == 0 and row * x.element_size() % 16 == 0
    return x.shape[0] > 0 and column == 1 and row > 0 and aligned


def descriptor(x: Tensor, block: list[int], layout: Any = None) -> Any:
    """Triton's tensor descriptor of `x` (rows, columns), made without its dozen checks; it must be legal.

    `layout`: of a block in shared memory, for Gluon's kernels.
    """
    if layout is None:
        from triton.tools.tensor_descriptor import TensorDescriptor
    else:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    made = object.__new__(TensorDescriptor)
    vars(made).update(base=x, shape=x.shape, strides=x.stride(), block_shape=block, layout=layout)
    return made


@functools.cache
def runs_variant(device: torch.device, arch: str, gluon: str) -> bool:
    """Whether the kernels for one architecture run on this device; elsewhere those of kernels.py do their work.

    `gluon`: "module:name" that a Gluon kernel needs of Triton, else "". The interpreter runs all but Gluon's kernels.
    """
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
    """Up to `rows` rows of x from `start` on; x itself if these are all: a view takes up to 13 us of host time."""
    return x if start == 0 and rows >= x.shape[0] else x[start : start + rows]


def panel_columns(x: Tensor, start: int, count: int) -> Tensor:
    """Up to `count` columns of x, of any number of dimensions, from `start` on; x itself if these are all."""
    return x if start == 0 and count >= x.shape[-1] else x[..., start : start + count]


def operands(
    q: Tensor, q_block: list[int], k: Tensor, k_block: list[int], descriptors: bool
) -> tuple[Operand, Operand, bool]:
    """`q` and `k` as kernel operands, read in blocks (rows, depth), and whether both are descriptors."""
    if descriptors and descriptor_legal(q) and descriptor_legal(k):
        return Operand(descriptor(q, q_block), q.stride(0), 1), Operand(descriptor(k, k_block), k.stride(0), 1), True
    return Operand(q, q.stride(0), q.stride(1)), Operand(k, k.stride(0), k.stride(1)), False


def read_in_place(x: Tensor) -> bool:
    """Whether a matrix product reads `x` in place; else torch would copy it, outside the memory plan."""
    rows, columns = x.shape
    return (x.stride(1) == 1 and x.stride(0) >= max(1, columns)) or (x.stride(0) == 1 and x.stride(1) >= max(1, rows))


def library_legal(x: Tensor) -> bool:
    """Whether the GPU's matrix library takes `x`; the interpreter runs the kernel instead."""
    return x.is_cuda and read_in_place(x)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def strip_blocks(walked: int, owned: int, strips: int, programs: int, longest: int = LONGEST_STRIP) -> int:
    """Blocks that one program walks, of `walked` of one side of a panel. At most `strips` programs own each of the
    `owned` blocks of the other side. They run in few and full rounds.

    A round is `programs` programs: those that run at once, or several times as many in a ring, whose messages occupy
    SMs. A program takes as long as the blocks that it walks, and about half a block to start and end.
    """
    shortest = cdiv(walked, strips)
    longest = max(shortest, min(walked, longest))

    def cost(strip: int) -> float:
        return cdiv(owned * cdiv(walked, strip), programs) * (strip + 0.5)

    return min(range(shortest, longest + 1), key=cost)


class _Kernel(NamedTuple):
    kernel: Any  # kept alive: a freed kernel's id may be given to another
    arguments: list[str]  # in the kernel's order
    options: list[str]  # constants and launch options
    compiled: dict[tuple[Any, ...], tuple[Any, Any, list[Any]]]  # traits -> compiled kernel, its `run`, constants
    hooks: Any  # Triton's hooks for a profiler


class Launch(NamedTuple):
    """What `launch` was called with."""

    kernel: Any
    grid: tuple[int, ...]
    given: dict[str, Any]


class _Thread(threading.local):
    """Devices on which this thread has a context."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()
_kernels: dict[int, _Kernel] = {}  # by id: hashing a kernel takes long
_noted: ContextVar[list[Launch] | None] = ContextVar("infcl_launches", default=None)


@contextlib.contextmanager
def noting() -> Iterator[list[Launch]]:
    """Launches of this thread go to the list, and not to the device."""
    launches: list[Launch] = []
    token = _noted.set(launches)
    try:
        yield launches
    finally:
        _noted.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], **given: Any) -> None:
    """`kernel[grid](**given)` on the current device, faster from the second launch on.

    Constants have names in capitals, and are a kernel's last arguments: Triton's launcher goes by the place alone.
    Every launch of a kernel gives the same names. The compiled kernel is kept for all arguments that Triton specialises
    alike. Integers differ by being 1, divisible by 16 or wider than 32 bits. Pointers differ by dtype and alignment to
    16 bytes, on ROCm also by the reach of 32-bit offsets.

    After a wait for the device, a launch takes 14 to 40 us of an H200's host; through Triton's launcher 20 to 67 us.
    """
    given |= OPTIONS
    if (noted := _noted.get()) is not None:
        noted.append(Launch(kernel, grid, given))
        return
    if INTERPRETED:
        kernel[grid](**given)
        return
    known = _kernels.get(id(kernel))
    if known is None:
        from triton import knobs

        arguments = [name for name in kernel.arg_names if not name.isupper()]
        constants = [name for name in kernel.arg_names if name.isupper()]
        assert kernel.arg_names == [*arguments, *constants], f"constants must come last: {arguments}, then {constants}"
        options = [name for name in given if name not in arguments]
        known = _kernels.setdefault(id(kernel), _Kernel(kernel, arguments, options, {}, knobs.runtime))
    device = torch._C._cuda_getDevice()
    if device not in _thread.devices:
        # Triton makes tensor maps in a thread's context. A thread of autograd has none before it calls CUDA's runtime.
        torch.cuda.Event().record()
        _thread.devices.add(device)
    traits = [device, *map(given.__getitem__, known.options)]
    passed = []  # addresses of tensors: for a tensor the launcher asks again, and checks with the driver
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
        values = [given[name] for name in kernel.arg_names if name.isupper()]
        known.compiled[key] = compiled, compiled.run, values
        return
    compiled, run, constants = known.compiled[key]
    size = grid[0], grid[1] if len(grid) > 1 else 1, 1
    enter, leave = known.hooks.launch_enter_hook, known.hooks.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler hears of launches from Triton
        compiled[size](*passed, *constants)
        return
    stream, metadata = torch._C._cuda_getCurrentRawStream(device), compiled.packed_metadata
    run(*size, stream, compiled.function, metadata, None, None, None, *passed, *constants)
