"""When a package records CUDA graphs, and gives them back. That they compute the same is tested in tests/kernels."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from infcl_gen.runtime import replay
from infcl_gen.runtime.package import Call, Options
from tests.tiers import combined

from .recording import Recorded, as_recording


@dataclasses.dataclass
class Recording:
    package: Any
    kind: replay.Kind


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(replay, "_Recording", Recording)
    return replay._Recorder(None)  # type: ignore[arg-type]


def kind(rows: int, stream: int = 0, gradients: int = 0b1111, **options: str) -> replay.Kind:
    return replay.Kind(rows, rows, Options(**options), stream, gradients)


def test_the_second_call_of_a_kind_is_recorded_and_later_ones_replay_it(recorder: Any) -> None:
    assert recorder.next(kind(8)) is None
    first = recorder.next(kind(8))
    assert first.kind == kind(8)
    assert all(recorder.next(kind(8)) is first for _ in range(5))


@pytest.mark.parametrize(
    "other",
    [
        *(kind(9), kind(8, 1), kind(8, reduction="sum"), kind(8, grad_sync="sum"), kind(8, labelling="given")),
        kind(8, gradients=0b1101),
    ],
)
def test_another_kind_of_call_gives_the_recording_back_first(recorder: Any, other: replay.Kind) -> None:
    recorder.next(kind(8))
    recorder.next(kind(8))
    assert recorder.next(other) is None
    assert recorder.recording is None


def test_a_package_that_another_replaces_gives_all_recordings_back(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_recorders", {("digest", 0): recorder})
    recorder.next(kind(8))
    assert recorder.next(kind(8)) is recorder.recording is not None
    replay.give_up_all()
    assert recorder.recording is None


def test_a_forward_without_gradients_runs_in_the_recording_of_a_step(recorder: Any) -> None:
    """Planted: gradients of 0 are a kind of their own."""
    recorder.next(kind(8, gradients=0b1101))
    step = recorder.next(kind(8, gradients=0b1101))
    assert recorder.next(kind(8, gradients=0)) is step
    assert recorder.next(kind(8, gradients=0b1101)) is step


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


@pytest.fixture
def on_gpu(packages: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """A package that records steps where there is no GPU: to this one, tensors of the CPU are on the device."""
    return as_recording(packages("infonce"), monkeypatch)


def test_nothing_is_recorded_where_it_is_not_planned_or_not_possible(
    on_gpu: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, plain, labelled = on_gpu.package, batch(1), batch(1, labelling="given")
    assert labelled.labels is not None
    not_planned = dataclasses.replace(planned, replay=False)
    for package, recorders in ((not_planned, 0), (planned, 1)):
        on_gpu.replay.forward(package, plain, 0b1111)
        assert len(on_gpu.replay._recorders) == recorders
    assert on_gpu.replay._recorder(planned, labelled) is not None
    # Labels of the host are looked at, and so are others where that was asked for.
    assert on_gpu.replay._recorder(planned, labelled._replace(labels=labelled.labels.to("meta"))) is None
    assert on_gpu.replay._recorder(planned, batch(1, labelling="given", check_ranks="always")) is None
    monkeypatch.setattr(on_gpu.replay, "_recordable", lambda device: False)
    assert on_gpu.replay._recorder(planned, plain) is None


@pytest.mark.parametrize("loss", ["clip", "infonce", "margin", "smooth", "smooth_clip"])
def test_what_follows_a_recorded_backward_reads_what_forward_saved(
    packages: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """No sweep is made for it: labels would be copied, and positives counted, for nothing."""
    module = packages(loss)
    engine, record = (importlib.import_module(f"{module.__name__}._runtime.{name}") for name in ("engine", "package"))
    package, draw = module.ContrastiveLoss._package, torch.Generator().manual_seed(0)
    q, k = (torch.randn(6, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    call, upstream = record.Call(q, k, *torch.tensor([3.0, -1.0], dtype=torch.float64)), torch.tensor(2.0)
    with torch.no_grad():
        _, saved = engine.forward(package, call, record.ALL)
        expected = engine.backward(package, call, saved, upstream, record.ALL)
        sums = engine.gradient_sums(package, call, saved, record.ALL)
        monkeypatch.delattr(engine, "Sweep")
        found = engine.weighted(package, call, saved, sums, upstream, record.ALL)
    assert len(found) == 4 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("side", ["q", "k"])
def test_other_layouts_than_a_graphs_are_not_recorded(on_gpu: Recorded, side: str) -> None:
    """They take other kernels, whose gradients have other bits. Planted: each of the conditions left out."""
    plain = batch(1)
    x = getattr(plain, side)
    misaligned = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    for other in (x.T.contiguous().T, x.repeat(2, 1)[::2], x[:1].expand(5, 8), misaligned):
        assert on_gpu.replay._recorder(on_gpu.package, plain._replace(**{side: other})) is None
    assert on_gpu.replay._recorder(on_gpu.package, plain._replace(**{side: x.clone()})) is not None


def test_what_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "capturing", lambda device: False)
    monkeypatch.setattr(replay, "_clear_workspaces", lambda: None)
    gpu = torch.device("cuda", 0)
    assert replay._recordable(gpu)
    assert not replay._recordable(torch.device("cpu"))
    monkeypatch.setattr(replay, "capturing", lambda device: True)
    assert not replay._recordable(gpu), "in somebody's own graph"
    monkeypatch.setattr(replay, "capturing", lambda device: False)
    monkeypatch.setattr(replay, "_uncached_memory", replay._uncached_memory.__wrapped__)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert not replay._recordable(gpu), "torch asks the device for memory, which ends a recording"


def batch(seed: int, ids: bool = False, **options: str) -> Call:
    """Five rows, with labels if they are "given", and with ids if the loss has them."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    scale, bias = (torch.tensor(float(value), dtype=torch.float64) for value in (seed, -seed))
    labels = torch.randint(5, (5,), generator=generator) if options.get("labelling") == "given" else None
    query_ids, key_ids = (torch.randint(4, (5,), generator=generator) if ids else None for _ in range(2))
    return Call(q, k, scale, bias, None, labels, query_ids, key_ids, options=Options(**options))


def test_what_a_graph_depends_on_tells_calls_apart(on_gpu: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, keys, options, stream and gradients. Planted: each of them left out of `_kind`."""
    call = batch(1)
    calls = [call, call._replace(q=call.q[:4]), call._replace(k=call.k[:4]), batch(1, reduction="sum")]
    kinds = {on_gpu.replay._kind(each, 0b1111) for each in [*calls, batch(2)]}
    kinds.add(on_gpu.replay._kind(call, 0b1101))
    monkeypatch.setattr(on_gpu.replay, "raw_stream", lambda device: 7)
    assert len(kinds | {on_gpu.replay._kind(call, 0b1111)}) == 6


@pytest.mark.parametrize(
    ("loss", "order"),
    combined(["infonce", "clip", "rince", "angular", "decoupled_ids", "clip_ids"], itertools.permutations(range(3))),
)
def test_backwards_come_in_any_order(
    packages: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...], loss: str
) -> None:
    """A recording holds one forward's statistics: another's are copied in, and it must then not be taken for the first.

    Planted: `self._handed = ...` left out of `_Recording.backward`; statistics of keys that the recording keeps.
    """
    on_gpu = as_recording(packages(loss), monkeypatch)
    ids, upstream = on_gpu.package.traits.ids, torch.tensor(0.5, dtype=torch.float64)
    batches = [batch(seed, ids) for seed in range(1, 5)]
    on_gpu.forward(batches[3])  # the second call of a kind is recorded
    saved = [on_gpu.forward(call)[1] for call in batches[:3]]
    for index in order:
        expected = on_gpu.unrecorded(batches[index], upstream)[1]
        ours = on_gpu.backward(batches[index], saved[index], upstream)
        assert all(map(torch.equal, ours, expected)), index
    on_gpu.forward(batches[3])  # what the last backward has read is in the recording no longer
    assert all(map(torch.equal, on_gpu.backward(batches[index], saved[index], upstream), expected))
    assert on_gpu.graphs == 2


def test_calls_with_other_labels_are_not_replayed_without(on_gpu: Recorded) -> None:
    """None, own and given labels, each recorded and replayed.

    Planted: a kind without its options.
    """
    for labelling in ("none", "given", "none", "own", "given"):
        for seed in range(1, 7):
            call = batch(seed, labelling=labelling)
            loss, saved = on_gpu.forward(call)
            upstream = torch.ones_like(loss)
            expected, gradients = on_gpu.unrecorded(call, upstream)
            assert torch.equal(loss, expected), labelling
            assert all(map(torch.equal, on_gpu.backward(call, saved, upstream), gradients)), labelling
    assert on_gpu.graphs > 2


@pytest.mark.parametrize("check_ranks", ["first", "always"])
def test_labels_on_the_device_are_looked_at_as_often_as_asked(on_gpu: Recorded, check_ranks: str) -> None:
    """Planted: `check_ranks` left out of `_recorder`, then "always" replays a graph that looks at nothing."""
    for seed in range(1, 4):
        on_gpu.forward(batch(seed, labelling="given", check_ranks=check_ranks))
    assert on_gpu.graphs == (check_ranks == "first")
    wrong = batch(4, labelling="given", check_ranks="always")
    assert wrong.labels is not None
    wrong.labels[2] = 5
    with pytest.raises(ValueError, match="labels range from"):
        on_gpu.forward(wrong)


@pytest.mark.parametrize(
    ("gradients", "capturing", "kept"), [(0b1111, False, False), (0, False, True), (0b1111, True, True)]
)
def test_an_unrecorded_call_with_a_stash_gives_the_recording_up(
    on_gpu: Recorded, monkeypatch: pytest.MonkeyPatch, gradients: int, capturing: bool, kept: bool
) -> None:
    """The plan has memory for one stash, which no call without gradients needs; a graph being captured would be lost.

    Planted: the recording stays; it is given up whatever the call wants.
    """
    for seed in (1, 2):
        on_gpu.forward(batch(seed))
    (recorder,) = on_gpu.replay._recorders.values()
    assert recorder.recording is not None
    monkeypatch.setattr(on_gpu.replay, "_keeps_tiles", lambda package, call: True)
    monkeypatch.setattr(on_gpu.replay, "capturing", lambda device: capturing)
    on_gpu.replay.unrecorded_forward(on_gpu.package, batch(3), gradients)
    assert (recorder.recording is not None) == kept


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
