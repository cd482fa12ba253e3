"""What a forward pass draws from and writes to besides its inputs: random numbers, and buffers of the towers.

A micro-batch that passes a tower twice must meet the same of both: else the gradient belongs to other features than
those that the loss saw. Autocast needs no such care, since both passes run inside one step; but its cache of weights
cast without a graph must not reach the pass that needs one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class RandomState(NamedTuple):
    """The state of every generator that a tower may draw from: torch's of the CPU and of the devices in use, those that
    the user names, Python's, and NumPy's where it is imported."""

    cpu: Tensor
    devices: tuple[tuple[int, Tensor], ...]
    named: tuple[Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def now(
        cls, devices: Iterable[torch.device], generators: Sequence[torch.Generator], before: RandomState | None = None
    ) -> RandomState:
        """The state; `before` itself where nothing was drawn since, for a state takes 8 KB."""
        found = cls(
            torch.get_rng_state(),
            tuple((each.index, torch.cuda.get_rng_state(each)) for each in devices if each.type == "cuda"),
            tuple(generator.get_state() for generator in generators),
            random.getstate(),
            sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None,
        )
        return found if before is None or not found.equals(before) else before

    def equals(self, other: RandomState) -> bool:
        mine, others = ([each.cpu, *(state for _, state in each.devices), *each.named] for each in (self, other))
        if not all(map(torch.equal, mine, others)) or self.python != other.python:
            return False
        if self.numpy is None or other.numpy is None:
            return self.numpy is other.numpy
        (_, keys, *rest), (_, other_keys, *other_rest) = self.numpy, other.numpy
        same: bool = rest == other_rest and keys.tobytes() == other_keys.tobytes()
        return same

    def restore(self, generators: Sequence[torch.Generator]) -> None:
        torch.set_rng_state(self.cpu)
        for index, state in self.devices:
            torch.cuda.set_rng_state(state, index)
        for generator, state in zip(generators, self.named, strict=True):
            generator.set_state(state)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


class Buffers:
    """The buffers of modules that a forward pass in training mode changes: running statistics, counters.

    `changed` compares versions, which autograd counts for it, so that buffers that stay cost nothing.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._all = list({id(buffer): buffer for module in modules for buffer in module.buffers()}.values())
        self._seen = [buffer._version for buffer in self._all]
        self._moving: list[int] | None = None

    def save(self) -> list[tuple[Tensor, Tensor]]:
        """Copies of the buffers that may change: all at first, later those that the first pass changed."""
        chosen = range(len(self._all)) if self._moving is None else self._moving
        return [(self._all[index], self._all[index].clone()) for index in chosen]

    def watch(self) -> None:
        """Called after the first pass."""
        if self._moving is None:
            versions = [buffer._version for buffer in self._all]
            self._moving = [index for index, version in enumerate(versions) if version != self._seen[index]]


@torch.no_grad()
def restore_buffers(saved: Iterable[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in saved:
        buffer.copy_(value)
