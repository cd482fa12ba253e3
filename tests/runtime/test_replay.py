"""When a package records CUDA graphs, and when it gives them back. That they compute the same is tested on GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from infcl_gen.runtime import engine, replay
from infcl_gen.runtime.engine import Options


@dataclasses.dataclass
class Recording:
    package: Any
    kind: replay.Kind


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(replay, "_Recording", Recording)
    return replay._Recorder(None)  # type: ignore[arg-type]


def kind(rows: int, stream: int = 0, **options: str) -> replay.Kind:
    return replay.Kind(rows, rows, False, Options(**options), stream)


def test_the_second_call_of_a_kind_is_recorded_and_later_ones_replay_it(recorder: Any) -> None:
    assert recorder.next(kind(8)) is None
    first = recorder.next(kind(8))
    assert first.kind == kind(8)
    assert all(recorder.next(kind(8)) is first for _ in range(5))


@pytest.mark.parametrize("other", [kind(9), kind(8, 1), kind(8, reduction="sum"), kind(8, grad_sync="sum")])
def test_another_kind_of_call_gives_the_recording_back_first(recorder: Any, other: replay.Kind) -> None:
    recorder.next(kind(8))
    recorder.next(kind(8))
    assert recorder.next(other) is None
    assert recorder.recording is None


def test_sizes_that_alternate_are_recorded_ever_more_rarely(recorder: Any) -> None:
    recorded = 0
    for rows in (8, 9) * 600:
        for _ in range(2):
            before = recorder.recording
            recorded += recorder.next(kind(rows)) not in (None, before)
    assert recorded == 1  # and none for two calls alike
    waits = []
    for rows in range(10, 20):
        calls = 1
        while recorder.next(kind(rows)) is None:
            calls += 1
        waits.append(calls)
    assert waits == [3, 5, 9, 17, 33, 65, 65, 65, 65, 65]


@dataclasses.dataclass
class Package:
    replay: bool = True
    digest: str = "of test_replay"


class OnGpu:
    device = torch.device("cuda", 0)


def test_nothing_is_recorded_off_the_gpu_or_where_it_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "capturing", lambda device: False)
    monkeypatch.setattr(replay, "_clear_workspaces", lambda: None)
    gpu: Any = OnGpu()
    planned, not_planned = (cast(Any, Package(wanted)) for wanted in (True, False))
    assert replay._recorder(planned, gpu, None, Options()) is not None
    assert replay._recorder(not_planned, gpu, None, Options()) is None
    assert replay._recorder(planned, torch.zeros(4, 2), None, Options()) is None
    assert (
        replay._recorder(planned, gpu, torch.zeros(4), Options()) is None
    )  # labels of the host are looked at
    monkeypatch.setattr(replay, "capturing", lambda device: True)
    assert replay._recorder(planned, gpu, None, Options()) is None


class Graph:
    """Stands for a CUDA graph: replaying it does the work again, into the results of the first time."""

    def __init__(self, work: Callable[[], Any], results: Any) -> None:
        self.work, self.results = work, results

    def pool(self) -> None: ...

    def replay(self) -> None:
        again = self.work()
        for old, new in zip(flat(self.results), flat(again), strict=True):
            old.copy_(new)


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [x for part in results for x in flat(part)]


def recorded(work: Callable[[], Any], pool: Any) -> tuple[Graph, Any]:
    results = work()
    return Graph(work, results), results


def copied(*tensors: torch.Tensor) -> None:
    for given, ours in zip(tensors[:4], tensors[4:], strict=True):
        ours.copy_(given)


@pytest.mark.parametrize("reading", [False, True])
def test_a_backward_finds_its_own_forward_in_a_recording(
    packages: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, reading: bool
) -> None:
    """Whatever ran in between, and also if that failed between reading its inputs and handing out its results."""
    package = packages("clip").ContrastiveLoss._package
    monkeypatch.setattr(replay, "_record", recorded)
    monkeypatch.setattr(package.schedule, "copy_inputs", copied, raising=False)  # of packages with kernels
    recorder = replay._Recorder(package)
    recorder.next(kind(12))
    recording = recorder.next(kind(12))
    assert recording is not None
    first, second = ([torch.randn(12, 8).double() for _ in range(2)] for _ in range(2))
    scale, bias, upstream = (torch.tensor(value, dtype=torch.float64) for value in (3.0, -1.0, 2.0))
    loss, saved = recording.forward(*first, scale, bias, None)
    expected, kept = engine.forward(package, *first, scale, bias, None, Options(), 0b1111)
    assert torch.equal(loss, expected)
    truth = engine.backward(package, upstream, *first, scale, bias, None, kept, Options())
    if reading:
        monkeypatch.setattr(Graph, "replay", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            recorder.attempt(lambda: recording.forward(*second, scale, bias, None))
        assert recorder.recording is None  # so that backward does not read what is half another call's
        return
    recording.forward(*second, scale, bias, None)
    for _ in range(2):
        found = recording.backward(upstream, *first, scale, bias, None, saved)
        assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
