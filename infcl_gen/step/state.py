"""What a forward pass draws from and writes to besides its inputs: random numbers, and buffers of the towers.

A micro-batch that passes a tower twice must meet the same of both: else the gradient belongs to other features than
those that the loss saw. Autocast needs no such care, since both passes run inside one step; but its cache of weights
cast without a graph must not reach the pass that needs one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Source = tuple[Callable[[], Any], Callable[[Any], object]]


class RandomState:
    """The state of every generator that a tower may draw from: torch's of the CPU and of the device, those that the
    user names, Python's, and NumPy's where it is imported.

    Where nothing was drawn since `before`, its states are shared: one of the CPU takes 5 KB.
    """

    def __init__(self, sources: Iterable[Source], before: RandomState | None = None) -> None:
        self._sources = list(sources)
        held: Sequence[Any] = () if before is None else before._states
        found = itertools.zip_longest((get() for get, _ in self._sources), held)
        self._states: list[Any] = [old if _equal(new, old) else new for new, old in found]

    def restore(self) -> None:
        for (_, put), state in zip(self._sources, self._states, strict=True):
            put(state)

    def bytes_on(self, device: torch.device, before: RandomState | None = None) -> int:
        """Of torch's states that are not shared with those before; they are all in the memory of the host."""
        if device.type != "cpu":
            return 0
        shared = set() if before is None else set(map(id, before._states))
        return sum(each.nbytes for each in self._states if isinstance(each, Tensor) and id(each) not in shared)


def sources_of(device: torch.device, generators: Sequence[Any]) -> Iterator[Source]:
    """How the state of each generator is read, and set."""
    yield torch.get_rng_state, torch.set_rng_state
    if device.type == "cuda":
        yield lambda: torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state, device)
    for generator in generators:
        if isinstance(generator, torch.Generator):
            yield generator.get_state, generator.set_state
        elif isinstance(generator, random.Random):
            yield generator.getstate, generator.setstate
        else:
            bits: Any = generator.bit_generator
            yield functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")
    yield random.getstate, random.setstate
    if "numpy" in sys.modules:  # last: it may be imported between two states
        yield sys.modules["numpy"].random.get_state, sys.modules["numpy"].random.set_state


def is_generator(value: Any) -> bool:
    """Whether it is one of torch, of Python or of NumPy."""
    return isinstance(value, torch.Generator | random.Random) or hasattr(value, "bit_generator")


def _equal(new: Any, old: Any) -> bool:
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        return torch.equal(new, old)
    return pickle.dumps(new) == pickle.dumps(old)  # NumPy's hold arrays


def autocast_in(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """As around a step: in `dtype`, or as it is where that is None."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Each once, also where modules share it."""
    return list(dict.fromkeys(each for module in modules for each in module.parameters()))


def buffers_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Each once, also where modules share it."""
    return list(dict.fromkeys(each for module in modules for each in module.buffers()))


@contextlib.contextmanager
def changed_buffers(buffers: Iterable[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Around a pass: afterwards the list holds each buffer that it changed, with what it was before.

    Versions tell, which autograd counts for itself.
    """
    before = [(buffer, buffer.clone(), buffer._version) for buffer in buffers]
    changed: list[tuple[Tensor, Tensor]] = []
    yield changed
    changed += [(buffer, value) for buffer, value, version in before if buffer._version != version]


@torch.no_grad()
def restore_buffers(saved: Iterable[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in saved:
        buffer.copy_(value)
