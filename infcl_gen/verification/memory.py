"""Measuring what a computation allocates, in bytes, beyond what was there before it.

with PeakMeter("cpu") as meter:
    module.loss_and_grads(q, k)
meter.peak_bytes
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import TracebackType

import torch


class PeakMeter:
    """A context manager; afterwards `peak_bytes` is the most that was allocated at one moment inside it, net of frees.

    On CUDA the caching allocator counts (it rounds every block up to 512 bytes, and larger ones further); cuBLAS
    workspaces that exist already are given back first, so that one needed by the block is counted. On the CPU every
    call of torch's allocator is recorded by its profiler: exact, but slow for many thousands of operations. Memory that
    is not torch's, such as that of the Triton interpreter or of a gloo transfer, is not seen.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.peak_bytes = 0
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> PeakMeter:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
            if clear is not None:
                clear()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            return self
        self._exits.enter_context(_quiet())
        self._profile = self._exits.enter_context(
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._exits.__exit__(kind, error, trace)
        if kind is None:
            events = self._profile.profiler.kineto_results.events()
            sizes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
            live = 0
            for _, size in sorted(sizes, key=lambda event: event[0]):
                live += size
                self.peak_bytes = max(self.peak_bytes, live)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The profiler announces itself on the process's stderr, past sys.stderr."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # closed
        yield
        return
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
