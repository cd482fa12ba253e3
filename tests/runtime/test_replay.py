"""When a package records CUDA graphs, and gives them back. That they compute the same is tested in tests/kernels."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch

from infcl_gen.runtime import replay
from infcl_gen.runtime.package import Options


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
    monkeypatch.setattr(replay.engine, "start", lambda *arguments: "started")
    assert replay.start(not_planned, gpu, gpu, gpu, gpu, None, Options(), 1) == "started"
    assert replay.start(planned, gpu, gpu, gpu, gpu, None, Options(), 1) is None, "it may be recorded"
    assert replay._recorder(planned, torch.zeros(4, 2), None, Options()) is None
    assert (
        replay._recorder(planned, gpu, torch.zeros(4), Options()) is None
    )  # labels of the host are looked at
    monkeypatch.setattr(replay, "capturing", lambda device: True)
    assert replay._recorder(planned, gpu, None, Options()) is None


def test_calls_that_alternate_with_others_outside_are_recorded_rarely(recorder: Any) -> None:
    """Each of those gives the recording up; so does one that failed."""
    recorded = 0
    for _ in range(200):
        recorded += recorder.next(kind(8)) is not None
        recorder.give_up()
    assert recorded == 0
    recorder.next(kind(8))
    assert recorder.next(kind(8)) is not None
    with pytest.raises(ZeroDivisionError):
        recorder.attempt(lambda: 1 / 0)
    assert recorder.next(kind(8)) is None
