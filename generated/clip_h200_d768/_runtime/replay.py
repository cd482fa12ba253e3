"""Forward and backward as recorded CUDA graphs, where kernels are shorter than their launches or start late.

The second of two calls alike is recorded, later ones replay it: inputs are copied to where the graph reads them, what
forward returns to fresh tensors, and gradients are weighted into such, so nothing that a caller holds changes under it.
A package has one recording per device, and gives it up before another kind of batch runs. Its memory, which is that of
the plan, is torch's to give to others when that asks the device for more, or when the next recording is made.

A stash stays in the recording: backward finds that of the last forward there, and has it computed again for an earlier
one. A call outside that keeps a stash of its own gives the recording up as well, but not in somebody's own graph, which
would be lost.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import engine
from .engine import Gradients
from .group import find_group
from .package import Call, Options, Package, Saved

# Equal calls before another recording; it doubles with each, from 1, so that alternating sizes record rarely.
LONGEST_WAIT = 64

T = TypeVar("T")


class Kind(NamedTuple):
    """What a graph depends on: `options` also say whether there are labels. Strides are not in it: the graph reads
    contiguous copies."""

    rows: int
    keys: int
    options: Options
    stream: int


def forward(package: Package, call: Call, gradients: int) -> tuple[Tensor, Saved]:
    """`engine.forward`, recorded where that is planned and possible."""
    alone = package.replay and find_group(call.options.group_name) is None
    recorder = _recorder(package, call) if alone else None
    # Somebody takes care of what is saved for backward: `save_on_cpu` wants the stash itself, and `checkpoint` compares
    # shapes with those of a call that may not have been recorded.
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if recorder is None or (hooked and _keeps_tiles(package, call)):
        return unrecorded_forward(package, call, gradients)
    with recorder.lock:
        recording = recorder.next(_kind(call))
        if recording is None:
            return engine.forward(package, call, gradients)
        return recorder.attempt(lambda: recording.forward(call))


def unrecorded_forward(package: Package, call: Call, gradients: int) -> tuple[Tensor, Saved]:
    """`engine.forward`. A recording that has a stash is given up for that of this call: the plan has one of them."""
    device = call.q.device
    recorder = _recorders.get((package.digest, device.index))
    if recorder is not None and gradients and _keeps_tiles(package, call) and not capturing(device):
        with recorder.lock:
            recorder.give_up()
    return engine.forward(package, call, gradients)


def backward(package: Package, call: Call, saved: Saved, upstream: Tensor) -> Gradients:
    """`engine.backward`, recorded if the last forward was recorded for such a batch; that may have been another one."""
    if package.replay and not saved.layout.shape[0] and not saved.stash.numel():
        recorder = _recorder(package, call)
        if recorder is not None:
            with recorder.lock:
                recording = recorder.found(_kind(call))
                if recording is not None:
                    return recorder.attempt(lambda: recording.backward(call, saved, upstream))
        if _keeps_tiles(package, call):  # they went with a recording that was given up
            saved = unrecorded_forward(package, call, 0b1111)[1]
    return engine.backward(package, call, saved, upstream)


class _Recording:
    """The graphs of one kind of batch, and the tensors that they read and write."""

    def __init__(self, package: Package, kind: Kind) -> None:
        self.kind = kind
        self._package = package
        # What the graphs read and write, which is there when they are.
        self._call: Call
        self._forward: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor
        self._saved: Saved
        self._no_stash: Tensor
        self._backward: torch.cuda.CUDAGraph | None = None
        self._sums: tuple[Tensor, Tensor]
        self._handed: Tensor | None = None  # statistics that came of what the graph's tensors hold now

    def forward(self, call: Call) -> tuple[Tensor, Saved]:
        with engine.device_state(self._package, call.q.device, plain_tensors=True):
            if self._forward is None:
                tensors: list[Any] = [None if x is None else x.new_empty(x.shape) for x in call[:5]]
                self._call, self._no_stash = Call(*(*tensors, call.options)), call.q.new_empty(0)
            self._load(call)
            if self._forward is None:
                self._forward, (self._loss, self._saved) = _record(
                    lambda: engine.forward(self._package, self._call, gradients=0b1111), pool=None
                )
            self._forward.replay()
            results = [self._loss, *self._saved[:2]]
            loss, queries, keys = copies = [x.new_empty(x.shape) for x in results]
            torch._foreach_copy_(copies, results)
            self._handed = queries
            return loss, Saved(queries, keys, self._no_stash, self._saved.layout)

    def backward(self, call: Call, saved: Saved, upstream: Tensor) -> Gradients:
        assert self._forward is not None
        with engine.device_state(self._package, call.q.device, plain_tensors=True):
            if self._handed is None or saved.query_statistics.data_ptr() != self._handed.data_ptr():
                self._load(call)
                if self._saved.stash.numel():
                    self._forward.replay()
                else:
                    torch._foreach_copy_(self._saved[:2], saved[:2])
                self._handed = saved.query_statistics
            if self._backward is None:
                self._backward, self._sums = _record(
                    lambda: engine.gradient_sums(self._package, self._call, self._saved), self._forward.pool()
                )
            self._backward.replay()
            return engine.weighted(self._package, call, self._sums, upstream)

    def _load(self, call: Call) -> None:
        self._package.schedule.copy_inputs(*call[:4], *self._call[:4])
        if call.labels is not None and self._call.labels is not None:
            self._call.labels.copy_(call.labels)


class _Recorder:
    """What a package has recorded on one device, and what it has seen lately. `lock` keeps what a call copies, replays
    and copies back in one piece among threads."""

    def __init__(self, package: Package) -> None:
        self.lock = threading.Lock()
        self.recording: _Recording | None = None
        self._package = package
        self._kind: Kind | None = None
        self._equal = 0  # calls alike before this one
        self._wait = 1

    def next(self, kind: Kind) -> _Recording | None:
        """The recording for the call of this kind, new where it is time for one; None: not recorded."""
        self._equal = self._equal + 1 if kind == self._kind else 0
        self._kind = kind
        self.recording = self.found(kind)
        if self.recording is None and self._equal >= self._wait:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
            self.recording = _Recording(self._package, kind)
        return self.recording

    def found(self, kind: Kind) -> _Recording | None:
        """The recording, if it is of this kind."""
        return self.recording if self.recording and self.recording.kind == kind else None

    def give_up(self) -> None:
        """No recording, and as many calls alike before the next one as after calls of another kind."""
        self.recording, self._kind = None, None

    def attempt(self, work: Callable[[], T]) -> T:
        """Of a recording: without one afterwards if it fails, since its tensors may be of two calls, or missing."""
        try:
            return work()
        except BaseException:
            self.give_up()
            raise


_recorders: dict[tuple[str, int], _Recorder] = {}
# Recordings of all packages of this process are made one at a time: torch empties no cache while there is one.
_recording: threading.Lock = vars(torch.cuda).setdefault("_infcl_recording", threading.Lock())
_streams: dict[int, torch.cuda.Stream] = {}  # by device, to record on: the library keeps a workspace for each
_clear_workspaces: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)


def _recorder(package: Package, call: Call) -> _Recorder | None:
    """None where a call cannot be recorded: in somebody's own graph, with labels to look at."""
    device, labels = call.q.device, call.labels
    if labels is not None and (labels.device != device or call.options.check_ranks == "always"):
        return None
    if not _recordable(device):
        return None
    key = package.digest, device.index
    return _recorders.get(key) or _recorders.setdefault(key, _Recorder(package))


def _recordable(device: torch.device) -> bool:
    """Whether what the device is given can be recorded: its memory must come from torch's cache."""
    cached = _clear_workspaces is not None and not _uncached_memory()
    return cached and device.type == "cuda" and not capturing(device)


@functools.cache
def _uncached_memory() -> bool:
    """As torch looks: once."""
    return any(f"PYTORCH_NO_{name}_MEMORY_CACHING" in os.environ for name in ("CUDA", "HIP"))


def _keeps_tiles(package: Package, call: Call) -> bool:
    """Whether a forward with gradients keeps a stash."""
    shape = package.schedule.stash_shape(call.q.shape[0], call.k.shape[0])
    return bool(shape) and find_group(call.options.group_name) is None


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device is in somebody's graph."""
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def raw_stream(device: torch.device) -> int:
    """The handle of the current stream of a CUDA device; an object for it, as torch makes one, takes 20 us."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def _kind(call: Call) -> Kind:
    return Kind(call.q.shape[0], call.k.shape[0], call.options, raw_stream(call.q.device))


def _record(work: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of `work`, which runs once before (kernels compile, libraries start), and its results."""
    work()
    device, here, graph = torch.cuda.current_device(), torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream())
    with _recording:
        # A workspace from outside of the graph's pool might be given back while the graph still uses it.
        assert _clear_workspaces is not None
        _clear_workspaces()
        # While it records torch gives nothing back that it has cached, as the stash of the calls before.
        with contextlib.suppress(RuntimeError):  # nor while another thread records a graph of its own: without, then
            torch.cuda.empty_cache()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = work()
            finally:
                graph.capture_end()
        here.wait_stream(stream)
    return graph, results
