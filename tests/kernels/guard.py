"""Guard bands: all buffers that a package allocates, and its inputs, lie between bands that must stay untouched.

Within `GuardBands`, memory that the package's own Python files ask for (torch.empty, new_zeros, ...) comes from the
middle of a larger buffer in which every byte is 0xFF: NaN in each floating-point type, -1 in each integer type. The
memory itself starts that way too, unless it was asked for with a value. A kernel that lets in what is outside, or what
was never written, makes NaN of its result; one that writes outside changes a band. Some operations drop a NaN (a
maximum does); with other bytes the same places hold huge numbers, and the result must be the same to the bit.
Statistics are separate buffers there: their rows (exponents, mantissas, ...) lie in one allocation, but each has bands
of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NAN, HUGE, LOW = 0xFF, 0x7F, 0xFE  # every byte of the bands: NaN, 3e38, -2e38 as fp32 or bf16
BAND = 1 << 15  # bytes; more than any tile of the small packages reaches beyond its buffer
SHIFT = 16  # no buffer is aligned better than to 16 bytes, which is what the kernels may rely on
UNSET, SET = ({"empty", "new_empty", "empty_like"}, {"zeros", "new_zeros", "zeros_like", "full", "ones_like", "arange"})
# Functions whose buffers of 2 to so many rows hold statistics, where they are of these dtypes.
MOST_STATISTICS = 18
STATISTICS_DTYPES = (torch.float32, torch.float64)
STATISTICS = {"new_saved", "new_statistics", "forward_scratch", "rows_scratch"}


class Buffer(NamedTuple):
    """`size` bytes are the buffer's own, from each of `starts` on; all else of `memory` is band."""

    what: str
    memory: Tensor
    poison: int
    starts: tuple[int, ...]
    size: int

    def damage(self) -> str:
        """Which bytes of the bands have changed, or ""."""
        edges = [0, *(edge for start in self.starts for edge in (start, start + self.size)), len(self.memory)]
        for number in range(0, len(edges), 2):
            band = self.memory[edges[number] : edges[number + 1]]
            if not bool((band == self.poison).all()):
                at = (band != self.poison).nonzero().flatten()
                first, last = int(at[0]) + edges[number], int(at[-1]) + edges[number]
                return f"{self.what}: bytes {first} to {last} overwritten; its own are {self.size} from {self.starts}"
        return ""


class GuardBands(TorchFunctionMode):
    """A context manager. `place` puts an input between bands; `buffers` are all that were made so."""

    def __init__(self, package: Path, poison: int = NAN) -> None:
        super().__init__()
        self.package, self.poison = str(package), poison
        self.buffers: list[Buffer] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in UNSET | SET and isinstance(result, Tensor) and result.numel():
            caller = sys._getframe(1)
            if caller.f_code.co_filename.startswith(self.package):
                where = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
                split = caller.f_code.co_name in STATISTICS and result.dim() > 1 and 2 <= len(result) <= MOST_STATISTICS
                split = split and result.dtype in STATISTICS_DTYPES
                return self.place(result, where, keep=name in SET, split=split)
        return result

    def place(self, x: Tensor, what: str = "an input", keep: bool = True, split: bool = False) -> Tensor:
        """A contiguous copy of x between bands; with `split`, one in which each x[i] is contiguous and has its own."""
        parts = len(x) if split else 1
        size = x.numel() // parts * x.element_size()
        step = (size // SHIFT + 1) * SHIFT + BAND
        starts = tuple(BAND + SHIFT + part * step for part in range(parts))
        memory = torch.full((BAND + SHIFT + parts * step,), self.poison, dtype=torch.uint8, device=x.device)
        typed = memory[starts[0] :][: (len(memory) - starts[0]) // 16 * 16].view(x.dtype)
        strides = list(torch.empty(x.shape, device="meta").stride())
        if split:
            strides[0] = step // x.element_size()
        inner = typed.as_strided(x.shape, strides, typed.storage_offset())
        if keep:
            inner.copy_(x)
        self.buffers.append(Buffer(f"{what} {tuple(x.shape)} {x.dtype}", memory, self.poison, starts, size))
        return inner

    def written(self, dtype: torch.dtype) -> Tensor:
        """What the buffers of this dtype hold at the end, one after the other, and 0 where nothing was ever written."""
        found = [torch.zeros(0, dtype=dtype)]
        for buffer in self.buffers:
            if buffer.what.endswith(str(dtype)):
                for start in buffer.starts:
                    own = buffer.memory[start : start + buffer.size].cpu()
                    fresh = torch.full_like(own, self.poison).view(dtype)
                    found.append(torch.where(own.view(dtype) == fresh, 0, own.view(dtype)))
        return torch.cat(found)

    def damages(self) -> list[str]:
        """What was overwritten outside the buffers."""
        return [damage for buffer in self.buffers if (damage := buffer.damage())]
