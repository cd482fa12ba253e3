"""Graphs whose saved tensors wait in the memory of the host.

They leave while the next micro-batch is computed, and come back while the one before theirs goes backward, so at most
two micro-batches of them are on the device. Around checkpointed blocks little is saved: what enters each block, and
the graph outside of them. Hooks of autograd see every tensor that is saved (torch.autograd.graph.saved_tensors_hooks).
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from infcl_gen.step.plan import MicroBatch


class HostMemory:
    """Page-locked memory of the host, by place, which stays from step to step, and the stream of copies to and from it.

    torch's own pinned memory comes in powers of two: 79 MB, which enter a block with 1024 images of ViT-B/32, take 134.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.held: dict[tuple[int, int], Tensor] = {}
        self._locks: dict[tuple[int, int], weakref.finalize[..., Any]] = {}

    def at(self, place: tuple[int, int], size_bytes: int) -> Tensor:
        """The bytes of a place, uint8 (size_bytes,). Raises RuntimeError where the host cannot lock as many."""
        if place not in self.held or self.held[place].numel() < size_bytes:
            if place in self._locks:
                torch.cuda.synchronize(self.device)
                self._locks.pop(place)()
            pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory = torch.frombuffer(pages, dtype=torch.uint8)
            if self.stream is not None:
                status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size_bytes, 0))
                if status != 0:
                    raise RuntimeError(
                        f"host_memory: the host locks no {size_bytes} bytes more (CUDA error {status}); plan with less"
                    )
                self._locks[place] = weakref.finalize(self, _unlock, memory)
            self.held[place] = memory
        return self.held[place][:size_bytes]

    def copied(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copies, behind what the current stream has to do so far; the end of the copy, where there is a stream."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.end()

    def end(self) -> torch.cuda.Event | None:
        """Of all copies so far."""
        event: torch.cuda.Event | None = None if self.stream is None else self.stream.record_event()
        return event

    def wait(self, end: torch.cuda.Event | None) -> None:
        """What the current stream has to do from here on begins behind the end of a copy."""
        if end is not None:
            torch.cuda.current_stream(self.device).wait_event(end)


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class _Stretch:
    """Neighbouring bytes that some saved tensors of a micro-batch lie in."""

    def __init__(self, host: Tensor) -> None:
        self.host, self.uses = host, 0
        self.arrived: tuple[Tensor, torch.cuda.Event | None] | None = None  # on the device, and the end of the copy


class _Place(NamedTuple):
    """Where such bytes were on the device, and after how many changes."""

    storage: int
    start: int
    size_bytes: int
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start, item = int(tensor.storage_offset()) * tensor.element_size(), tensor.element_size()
        return cls(tensor.untyped_storage()._cdata, start, (last + 1) * item, tensor._version)


class OffloadedGraphs:
    """A context manager around a step: the graphs of its micro-batches that wait on the host.

    weights   stay on the device, as does all else that graphs of several micro-batches save
    """

    def __init__(self, memory: HostMemory, weights: Iterable[Tensor]) -> None:
        self._memory, self._begun = memory, 0
        self._graphs: dict[MicroBatch, dict[_Place, _Stretch]] = {}
        self._leaving: list[tuple[list[Tensor], torch.cuda.Event | None]] = []  # by micro-batch
        self._saved = {_Place.of(each): StorageWeakRef(each.untyped_storage()) for each in weights if _is_plain(each)}

    def __enter__(self) -> OffloadedGraphs:
        return self

    def __exit__(self, *error: object) -> None:
        """Memory that copies read or write is given back behind these, also after an error."""
        if self._memory.stream is not None:
            torch.cuda.current_stream(self._memory.device).wait_stream(self._memory.stream)
        self._graphs.clear()
        self._leaving.clear()

    @contextlib.contextmanager
    def leaving(self, micro: MicroBatch) -> Iterator[None]:
        """Inside, what the graph of a micro-batch saves is copied to the host; at the end, the micro-batch before it
        holds none of that on the device any more."""
        own = self._graphs[micro] = {}
        held: list[Tensor] = []
        pack = functools.partial(self._pack, self._begun, own, held)
        self._begun += 1
        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield
        self._leaving.append((held, self._memory.end()))
        self._settle(1)

    def settle(self) -> None:
        """All that was saved has left the device."""
        self._settle(0)

    def _settle(self, remaining: int) -> None:
        while len(self._leaving) > remaining:
            held, end = self._leaving.pop(0)
            self._memory.wait(end)
            held.clear()

    def fetch(self, micro: MicroBatch) -> None:
        """Begin to copy what the graph of a micro-batch saved back to the device, where it waits on the host."""
        for stretch in self._graphs.get(micro, {}).values():
            self._fetched(stretch)

    def free(self, micro: MicroBatch) -> None:
        """Behind its backward."""
        for stretch in self._graphs.pop(micro, {}).values():
            if stretch.arrived is not None:
                self._memory.wait(stretch.arrived[1])

    def _fetched(self, stretch: _Stretch) -> tuple[Tensor, torch.cuda.Event | None]:
        if stretch.arrived is None:
            here = torch.empty(stretch.host.numel(), dtype=torch.uint8, device=self._memory.device)
            stretch.arrived = here, self._memory.copied(here, stretch.host)
        return stretch.arrived

    def _pack(self, number: int, own: dict[_Place, _Stretch], held: list[Tensor], tensor: Tensor) -> Any:
        if not _is_plain(tensor) or tensor.device != self._memory.device:
            return tensor
        place, storage = _Place.of(tensor), tensor.untyped_storage()
        if place not in own:
            if place in self._saved and not self._saved[place].expired():
                return tensor  # it outlives the micro-batch: another graph has it
            self._saved[place] = StorageWeakRef(storage)
            here = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            here.set_(storage, place.start, (place.size_bytes,), (1,))
            stretch = own[place] = _Stretch(self._memory.at((number, len(own)), place.size_bytes))
            held.append(here)
            self._memory.copied(stretch.host, here)
        own[place].uses += 1
        return own[place], tensor.dtype, tensor.shape, tensor.stride()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        stretch, dtype, shape, stride = packed
        here, end = self._fetched(stretch)
        self._memory.wait(end)
        stretch.uses -= 1
        if stretch.uses <= 0:  # one that is read again comes again
            stretch.arrived = None
        return here.view(dtype).as_strided(shape, stride)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes are all there is to it."""
    strided = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return strided and tensor.numel() > 0 and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
