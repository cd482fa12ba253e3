"""Measures the peak of what a computation allocates."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch


def give_workspaces_back() -> None:
    """The memory that cuBLAS keeps between calls on a GPU."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def _record_operators(wanted: bool) -> None:
    """Whether profilers of this thread see operators. Without them a peak is measured in a third of the time."""
    getattr(torch._C._autograd, "_enable_record_function", lambda wanted: None)(wanted)


class PeakMeter:
    """A context manager. Afterwards `peak_bytes` is the peak inside it, beyond what was allocated before, and
    `kept_bytes` what was still allocated at its end.

    On CUDA the caching allocator counts; it rounds every block up to 512 bytes or more. cuBLAS workspaces are given
    back first, so that one needed inside counts, unless `workspaces` is False. On the CPU torch's profiler records
    every call of its allocator: exact, but slow for many thousands of calls. Memory that is not torch's, such as
    that of the Triton interpreter or of a gloo transfer, is not seen.
    """

    def __init__(self, device: torch.device | str, workspaces: bool = True) -> None:
        self.device, self._workspaces = torch.device(device), workspaces
        self.peak_bytes = self.kept_bytes = 0

    def __enter__(self) -> PeakMeter:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if self._workspaces:
                give_workspaces_back()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler announces itself on stderr
            # That of torch.profiler imports all of Inductor first, in 3 s.
            self._profile: Any = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
            self._profile.__enter__()
            _record_operators(False)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self.device.type != "cuda":
            _record_operators(True)
            self._profile.__exit__(kind, *error)
            events = self._profile.kineto_results.events()
            changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
            changes.sort(key=lambda change: change[0])
            levels = list(itertools.accumulate((size for _, size in changes), initial=0))
            self.peak_bytes, self.kept_bytes = max(levels), levels[-1]
        elif kind is None:  # after an error the device may be unusable
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            self.kept_bytes = torch.cuda.memory_allocated(self.device) - self._before
