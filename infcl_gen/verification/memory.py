"""Measuring what a computation allocates, in bytes, beyond what was there before it.

with PeakMeter("cpu") as meter:
    module.loss_and_grads(q, k)
meter.peak_bytes
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

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

    def __enter__(self) -> PeakMeter:
        self._measuring = self._on_a_gpu() if self.device.type == "cuda" else self._on_the_cpu()
        self._measuring.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._measuring.__exit__(*error)

    @contextlib.contextmanager
    def _on_a_gpu(self) -> Iterator[None]:
        torch.cuda.synchronize(self.device)
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        torch.cuda.synchronize(self.device)
        self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - before

    @contextlib.contextmanager
    def _on_the_cpu(self) -> Iterator[None]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with _quiet(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            yield
        events = profile.profiler.kineto_results.events()
        changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
        changes.sort(key=lambda change: change[0])
        self.peak_bytes = max(itertools.accumulate((size for _, size in changes), initial=0))


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
