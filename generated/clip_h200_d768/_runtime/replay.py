"""Forward and backward as recorded CUDA graphs, for small batches whose steps wait for launches.

The second of two equal calls is recorded; later ones replay it. Inputs are copied to the graph's tensors, and results
are written to fresh tensors, so a caller's tensors never change. A package has one recording per device. It gives the
recording up before another kind of batch runs; torch then reuses the memory when it runs short.

Where forward has the gradients (`Package.at_once`) it alone is recorded, and only calls with gradients: backward is a
multiplication of what forward returns.

The stash of the last forward stays in the recording; backward of an earlier forward computes it again. An unrecorded
call with a stash gives the recording up, except while the user captures a graph, which would be lost.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import engine
from .device_state import device_state
from .engine import Gradients
from .group import find_group
from .package import ALL, Call, Options, Package, Saved
from .weighting import Sums

# Equal calls before another recording, at most. The wait doubles from 1: alternating sizes record rarely.
LONGEST_WAIT = 64
ALIGNED_BYTES = 16  # to which a tensor descriptor's base is aligned

T = TypeVar("T")


class Kind(NamedTuple):
    """What a graph depends on. `options` say whether there are labels."""

    rows: int
    keys: int
    options: Options
    stream: int
    gradients: int


def forward(package: Package, call: Call, gradients: int) -> tuple[Tensor, Saved]:
    """`engine.forward`, recorded where planned and possible."""
    whole = call.options.reduction != "none"
    alone = package.replay and whole and find_group(call.options.group_name) is None
    recorder = _recorder(package, call) if alone else None
    # Hooks on saved tensors: `save_on_cpu` needs the stash itself; `checkpoint` compares shapes between two calls, of
    # which one may be unrecorded.
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    excess = package.at_once(1) and not gradients  # a recording has the gradients: three products instead of one
    if recorder is None or excess or (hooked and _keeps_tiles(package, call)):
        return unrecorded_forward(package, call, gradients)
    with recorder.lock:
        recording = recorder.next(_kind(call, gradients))
        if recording is None:
            return engine.forward(package, call, gradients)
        return recorder.attempt(lambda: recording.forward(call))


def unrecorded_forward(package: Package, call: Call, gradients: int) -> tuple[Tensor, Saved]:
    """`engine.forward`. A recording with a stash is given up: the plan has memory for one stash."""
    device = call.q.device
    recorder = _recorders.get((package.digest, device.index))
    if recorder is not None and gradients and _keeps_tiles(package, call) and not capturing(device):
        with recorder.lock:
            recorder.give_up()
    return engine.forward(package, call, gradients)


def backward(package: Package, call: Call, saved: Saved, upstream: Tensor, gradients: int) -> Gradients:
    """`engine.backward`, recorded if the package's recording is of this kind, whichever forward it has run last."""
    upstream = upstream.resolve_neg()  # kernels read memory as it is
    alone = package.replay and call.options.reduction != "none" and not saved.layout.shape[0]
    if alone and not package.at_once(1) and not saved.stash.numel():
        recorder = _recorder(package, call)
        if recorder is not None:
            with recorder.lock:
                recording = recorder.found(_kind(call, gradients))
                if recording is not None:
                    return recorder.attempt(lambda: recording.backward(call, saved, upstream))
        if _keeps_tiles(package, call):  # they were lost with a recording
            saved = unrecorded_forward(package, call, gradients)[1]
    return engine.backward(package, call, saved, upstream, gradients)


class _Recording:
    """The graphs of one kind of batch, and the tensors that they read and write."""

    _call: Call  # this and the following are set by the first forward or backward
    _loss: Tensor
    _saved: Saved
    _no_stash: Tensor
    _sums: Sums
    _handed: Tensor  # query statistics of the forward whose inputs and stash the graph holds; told by their address

    def __init__(self, package: Package, kind: Kind) -> None:
        self.kind, self._package = kind, package
        self._forward: torch.cuda.CUDAGraph | None = None
        self._backward: torch.cuda.CUDAGraph | None = None

    def forward(self, call: Call) -> tuple[Tensor, Saved]:
        with device_state(self._package, call.q.device, "forward", plain_tensors=True):
            if self._forward is None:
                tensors: list[Any] = [None if x is None else x.new_empty(x.shape) for x in call[:-1]]
                self._call, self._no_stash = Call(*(*tensors, call.options)), call.q.new_empty(0)
            self._load(call)
            if self._forward is None:
                self._forward, (self._loss, self._saved) = _record(
                    lambda: engine.forward(self._package, self._call, self.kind.gradients), pool=None
                )
            self._forward.replay()
            kept = 3 if self._package.at_once(1) else 2  # gradients and scalars, or statistics without a stash
            results = [self._loss, *self._saved[:kept]]
            loss, self._handed, keys, *rest = copies = [x.new_empty(x.shape) for x in results]
            torch._foreach_copy_(copies, results)
            return loss, Saved(self._handed, keys, rest[0] if rest else self._no_stash, *self._saved[3:])

    def backward(self, call: Call, saved: Saved, upstream: Tensor) -> Gradients:
        assert self._forward is not None
        gradients = self.kind.gradients
        with device_state(self._package, call.q.device, "backward", plain_tensors=True):
            if saved.of_queries.data_ptr() != self._handed.data_ptr():
                self._load(call)
                if self._saved.stash.numel():
                    self._forward.replay()
                else:
                    torch._foreach_copy_(self._saved[:2], saved[:2])
                self._handed = saved.of_queries
            if self._backward is None:
                self._backward, self._sums = _record(
                    lambda: engine.gradient_sums(self._package, self._call, self._saved, gradients),
                    self._forward.pool(),
                )
            self._backward.replay()
            return engine.weighted(self._package, call, saved, self._sums, upstream, gradients)

    def _load(self, call: Call) -> None:
        self._package.schedule.copy_inputs(*call[:4], *self._call[:4])
        of_pairs = zip((call.labels, *call.ids), (self._call.labels, *self._call.ids), strict=True)
        for given, read in of_pairs:
            if given is not None and read is not None:
                read.copy_(given)


class _Recorder:
    """The recording of a package on one device. A thread holds `lock` from copying inputs to copying results."""

    def __init__(self, package: Package) -> None:
        self.lock, self._package = threading.Lock(), package
        self.recording: _Recording | None = None
        self._kind: Kind | None = None  # of the last call
        self._equal, self._wait = 0, 1  # equal calls before this one, and before the next recording

    def next(self, kind: Kind) -> _Recording | None:
        """The recording for a call of this kind, a new one if it is time for one, else None. A forward without
        gradients is that of any others."""
        if not kind.gradients:
            kind = kind._replace(gradients=self._kind.gradients if self._kind else ALL)
        self._equal = self._equal + 1 if kind == self._kind else 0
        self._kind = kind
        self.recording = self.found(kind)
        if self.recording is None and self._equal >= self._wait:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
            self.recording = _Recording(self._package, kind)
        return self.recording

    def found(self, kind: Kind) -> _Recording | None:
        return self.recording if self.recording and self.recording.kind == kind else None

    def give_up(self) -> None:
        """Drops the recording; the next one waits as after a call of another kind."""
        self.recording, self._kind = None, None

    def attempt(self, work: Callable[[], T]) -> T:
        """`work` of the recording, which is given up on errors: its tensors may hold two calls, or be missing."""
        try:
            return work()
        except BaseException:
            self.give_up()
            raise


_recorders: dict[tuple[str, int], _Recorder] = {}
# All packages of the process record one at a time: torch empties no cache during a capture.
_recording: threading.Lock = vars(torch.cuda).setdefault("_infcl_recording", threading.Lock())
_streams: dict[int, torch.cuda.Stream] = {}  # one per device to record on: cuBLAS keeps a workspace for each stream
_clear_workspaces: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)


def give_up_all() -> None:
    """Gives up what this package has recorded, on every device: another package takes its place, and its memory."""
    for recorder in [*_recorders.values()]:
        with recorder.lock:
            recorder.give_up()


def _recorder(package: Package, call: Call) -> _Recorder | None:
    """None where a call cannot be recorded, as with labels that the host reads.

    Nor where features lie otherwise than the copies that a graph reads: they take other kernels, whose gradients differ
    in bits, and two equal calls must not.
    """
    device, labels = call.q.device, call.labels
    read = labels is not None and (labels.device != device or call.options.check_ranks == "always")
    as_copies = all(x.is_contiguous() and x.data_ptr() % ALIGNED_BYTES == 0 for x in (call.q, call.k))
    if read or not as_copies or not _recordable(device):
        return None
    key = package.digest, device.index
    return _recorders.get(key) or _recorders.setdefault(key, _Recorder(package))


def _recordable(device: torch.device) -> bool:
    """Whether work on the device can be recorded: torch caches its memory, and the user captures no graph."""
    cached = _clear_workspaces is not None and not _uncached_memory()
    return cached and device.type == "cuda" and not capturing(device)


@functools.cache  # torch reads it once, too
def _uncached_memory() -> bool:
    return any(f"PYTORCH_NO_{name}_MEMORY_CACHING" in os.environ for name in ("CUDA", "HIP"))


def _keeps_tiles(package: Package, call: Call) -> bool:
    shape = package.schedule.stash_shape(call.q.shape[0], call.k.shape[0])
    return bool(shape) and find_group(call.options.group_name) is None


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device is being captured."""
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def raw_stream(device: torch.device) -> int:
    """The handle of a CUDA device's current stream; torch's object for it takes 20 us."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def _kind(call: Call, gradients: int) -> Kind:
    return Kind(call.q.shape[0], call.k.shape[0], call.options, raw_stream(call.q.device), gradients)


def _record(work: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of `work` and its results. `work` runs once before: kernels compile and libraries start."""
    work()
    device, here, graph = torch.cuda.current_device(), torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream())
    with _recording:
        # A workspace from outside the graph's pool might be freed while the graph uses it.
        assert _clear_workspaces is not None
        _clear_workspaces()
        # A capture cannot return cached memory, such as the stash of earlier calls, to the device.
        with contextlib.suppress(RuntimeError):  # another thread is capturing
            torch.cuda.empty_cache()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # a capture that has failed has no graph
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(stream)
    return graph, results
