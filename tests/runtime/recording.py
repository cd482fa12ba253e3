"""Recorded steps without a GPU: what stands for a CUDA graph, and a package for the CPU that records such."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor


class Graph:
    """Stands for a CUDA graph: replaying it does the work again, into the first results."""

    def __init__(self, work: Callable[[], Any], results: Any) -> None:
        self.work, self.results, self.broken = work, results, False

    def pool(self) -> None: ...

    def replay(self) -> None:
        if self.broken:
            raise ZeroDivisionError
        for old, new in zip(_flat(self.results), _flat(self.work()), strict=True):
            old.copy_(new)


def record(work: Callable[[], Any], pool: Any) -> tuple[Graph, Any]:
    """Stands for `replay._record`."""
    results = work()
    return Graph(work, results), results


def _flat(results: Any) -> list[Tensor]:
    if results is None:
        return []
    return [results] if isinstance(results, Tensor) else [x for part in results for x in _flat(part)]


@dataclasses.dataclass
class Recorded:
    """A package whose steps are recorded, how many graphs there are, and the gradients that are wanted.

    Calls as those of `replay` and `engine`.
    """

    package: Any
    replay: ModuleType
    engine: ModuleType
    graphs: int = 0
    gradients: int = 0b1111

    def forward(self, call: Any) -> tuple[Tensor, Any]:
        found: tuple[Tensor, Any] = self.replay.forward(self.package, call, self.gradients)
        return found

    def backward(self, call: Any, saved: Any, upstream: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.replay.backward(self.package, call, saved, upstream, self.gradients)
        return found

    def unrecorded(self, call: Any, upstream: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss and the gradients, launched one by one."""
        loss, saved = self.engine.forward(self.package, call, self.gradients)
        return loss, self.engine.backward(self.package, call, saved, upstream, self.gradients)


def as_recording(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The package in plain torch as one that records steps of tensors on the CPU, until the test ends."""
    replay, engine = (importlib.import_module(f"{module.__name__}._runtime.{name}") for name in ("replay", "engine"))
    package = dataclasses.replace(module.ContrastiveLoss._package, replay=True)
    recorded = Recorded(package, replay, engine)

    def counting(work: Callable[[], Any], pool: Any) -> tuple[Graph, Any]:
        recorded.graphs += 1
        return record(work, pool)

    def copy_inputs(*tensors: Tensor) -> None:
        for x, out in zip(tensors[:4], tensors[4:], strict=True):
            out.copy_(x)

    answers = {
        "_record": counting,
        "_recorders": {},
        "_recordable": lambda device: True,
        "capturing": lambda device: False,
        "raw_stream": lambda device: 0,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(replay, name, answer)
    monkeypatch.setattr(package.schedule, "copy_inputs", copy_inputs, raising=False)
    return recorded
