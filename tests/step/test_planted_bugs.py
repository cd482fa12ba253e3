"""Bugs that gradient caches and accumulation have had elsewhere, each planted once: the check that must notice does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infcl_gen.processes import ProcessError, run_ranks
from infcl_gen.step import gradients, state
from infcl_gen.step.executor import TrainingStep
from infcl_gen.step.plan import Part, TowerPlan
from infcl_gen.verification.memory import PeakMeter
from tests.step.models import DIM, Pair, batch, difference, model_of, pair, plain
from tests.step.models import gradients as gradients_of
from tests.step.test_executor import kept_step, mixed

ROWS = 23


def exact() -> bool:
    module, inputs = pair(), batch(ROWS)
    TrainingStep(mixed(), model_of(module))(*inputs)
    return difference(gradients_of(module), plain(module, *inputs)[1]) < 1e-12


def replayed() -> bool:
    module, other, inputs = pair(dropout=0.3), pair(dropout=0.3), batch(ROWS)
    step = TrainingStep(mixed(), model_of(module))
    step.repeats = True  # so that the gradients have to tell
    torch.manual_seed(5)
    step(*inputs)
    torch.manual_seed(5)
    kept_step(other, (other.image, other.text), mixed(), inputs)
    return difference(gradients_of(module), gradients_of(other)) < 1e-12


def freed() -> bool:
    """Four times the micro-batches take more memory for features, gradients of them and products, and no more."""

    def peak(rows: int) -> int:
        module, plan = pair(), [TowerPlan(name, cached=Part(rows, 16)) for name in ("image", "text")]
        model = model_of(module, loss=lambda image, text, scale: scale * (image * text).sum(), value=lambda x: x)
        step, inputs = TrainingStep(plan, model), batch(rows)
        step(*inputs)
        module.zero_grad()
        with PeakMeter("cpu") as meter:
            step(*inputs)
        return meter.peak_bytes

    return peak(256) - peak(64) < 192 * DIM * 8 * 2 * 4


def cast_with_a_graph() -> bool:
    module, inputs = pair(dtype=torch.float32), batch(ROWS, dtype=torch.float32)
    TrainingStep(mixed(), model_of(module, autocast=torch.bfloat16))(*inputs)
    return gradients_of(module).keys() == dict(module.named_parameters()).keys()


def moving() -> bool:
    class Counted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.blocks, self.inner = inner.blocks, inner
            self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            features: Tensor = self.inner(x * self.passes)
            return features

    def counted() -> Pair:
        module = pair()
        module.image = Counted(module.image)
        return module

    module, other, inputs = counted(), counted(), batch(ROWS)
    step = TrainingStep(mixed(), model_of(module))
    step.repeats = True
    step(*inputs)
    kept_step(other, (other.image, other.text), mixed(), inputs)
    return difference(gradients_of(module), gradients_of(other)) < 1e-12


def scaled_each_time(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the scale is added once for each micro-batch (open_clip's --accum-freq)."""
    original, seen = gradients.GradientSync.backward, dict[Any, Tensor]()

    def backward(self: Any, output: Tensor, gradient: Tensor, last_of: Any) -> None:
        original(self, output, gradient, last_of)
        for each in self._parameters:
            if each.dim() == 0 and each.grad is not None:
                each.grad += seen.setdefault(each, each.grad.clone())

    patch.setattr(gradients.GradientSync, "backward", backward)


def weighted(weigh: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    original = gradients.GradientSync.backward

    def plant(patch: pytest.MonkeyPatch) -> None:
        def backward(self: Any, output: Tensor, gradient: Tensor, last_of: Any) -> None:
            original(self, output, weigh(gradient), last_of)

        patch.setattr(gradients.GradientSync, "backward", backward)

    return plant


def graphs_retained(patch: pytest.MonkeyPatch) -> None:
    original, held = gradients.GradientSync.backward, list[Tensor]()

    def backward(self: Any, output: Tensor, gradient: Tensor, last_of: Any) -> None:
        held.append(output)
        with patch.context() as inner:
            free = torch.autograd.backward
            inner.setattr(torch.autograd, "backward", lambda x, g: free(x, g, retain_graph=True))
            original(self, output, gradient, last_of)

    patch.setattr(gradients.GradientSync, "backward", backward)


def without(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, lambda *arguments: None)


BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], bool]]] = {
    "the scale's gradient once for each micro-batch": (scaled_each_time, exact),
    "the loss divided by the number of micro-batches": (weighted(lambda gradient: gradient / 5), exact),
    "micro-batches weighted alike, whatever their size": (weighted(lambda g: g * 3 / len(g)), exact),
    "random numbers of the second pass": (without(state.RandomState, "restore"), replayed),
    "graphs that are retained": (graphs_retained, freed),
    "buffers of the second pass": (without(state, "restore_buffers"), moving),
}


def _torch_keeps_weights_cast_without_a_graph() -> bool:
    """So it did before torch 2.12 or so; a second pass then has no gradient of them."""
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            torch.mm(weight, weight)
        return not torch.mm(weight, weight).requires_grad


if _torch_keeps_weights_cast_without_a_graph():
    BUGS["weights cast without a graph"] = without(torch, "clear_autocast_cache"), cast_with_a_graph


@pytest.mark.parametrize("bug", sorted(BUGS))
def test_what_is_planted_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = BUGS[bug]
    assert check()
    plant(monkeypatch)
    assert not check()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("wrapper", "expected"), [("ddp", 1), ("fsdp", 6)])
def test_a_reduction_for_each_micro_batch_is_noticed(wrapper: str, expected: int, package_cache: str) -> None:
    """By the count that tests/step/test_ranks.py asserts."""
    job = {"wrapper": wrapper, "rows": [8, 8], "way": "cached", "cache": package_cache, "planted": True}
    try:
        answers = run_ranks("tests.step.ranks:step", job, 2, 120.0)
    except ProcessError as error:  # DDP notices by itself that a pass leaves parameters out
        assert wrapper == "ddp" and "rank 0 of 2" in str(error)
    else:
        assert min(answer["reductions"] for answer in answers) > expected
