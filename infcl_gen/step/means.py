"""Micro-batch processing (arXiv 2110.12484) of a loss that is a mean over samples, with the weights of the whole batch.

The mean over a batch is a sum over samples over a denominator: their number, the number of elements, or the sum of
weights of the classes that count. Each micro-batch contributes its sum over the denominator of the whole batch, which
targets alone decide. A mean of the micro-batches' means would weigh samples of smaller or emptier ones more.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infcl_gen.errors import InputError
from infcl_gen.step.executor import Model, bar
from infcl_gen.step.feed import Feed, Slabs, part_of, rows_of
from infcl_gen.step.gradients import Exchange
from infcl_gen.step.plan import Pass, TowerPlan

_OVER_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_OVER_ELEMENTS = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss,
)  # fmt: skip


class MeanLoss:
    """A mean over samples, as sums of parts over the denominator of the whole.

    `sum_of(outputs, targets)` is 0-dim and differentiable; `denominator(targets)` adds up over parts.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor], denominator: Callable[[Any], Tensor | float] | None) -> None:
        if denominator is not None:
            self.denominator: Callable[[Any], Tensor | float] = denominator
            self._loss, self._is_sum = loss, False
        elif isinstance(loss, nn.Module) and type(loss) in (*_OVER_CLASSES, *_OVER_ELEMENTS):
            if loss.reduction != "mean":
                raise InputError(f'loss: reduction="{loss.reduction}" is no mean over samples; give reduction="mean"')
            summing: Any = copy.copy(loss)
            summing.reduction = "sum"
            classes = isinstance(loss, _OVER_CLASSES)
            self.denominator = _ClassWeights(loss) if classes else _elements
            self._loss, self._is_sum = summing, True
        else:
            self.denominator, self._loss, self._is_sum = _samples, loss, False

    def sum_of(self, outputs: Any, targets: Any) -> Tensor:
        value = self._loss(outputs, targets)
        if not isinstance(value, Tensor) or value.dim():
            what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"loss: gave {what}; expected one number, the mean over samples")
        return value if self._is_sum else value * self.denominator(targets)

    def counting(self, turns: list[Pass], targets: Any) -> list[Pass]:
        """The micro-batches in which something counts: the mean of nothing is NaN, also times 0."""
        if self._is_sum or not turns:
            return turns
        weights = [torch.as_tensor(self.denominator(part_of(targets, turn.rows))) for turn in turns]
        return [turn for turn, weight in zip(turns, torch.stack(weights).tolist(), strict=True) if weight]

    def check(self, outputs: Any, targets: Any) -> None:
        """Raises InputError where the parts of an example do not add up to the whole."""
        rows = rows_of(targets, "targets")
        if rows < 3:
            raise InputError(f"example: {rows} samples; at least 3 are needed to see that the loss is a mean over them")
        cuts = (0, 1, rows // 2 + 1, rows)
        whole, total = self.sum_of(outputs, targets).double(), self.denominator(targets)
        parts = [
            self.sum_of(*(part_of(each, slice(first, last)) for each in (outputs, targets))).double()
            for first, last in itertools.pairwise(cuts)
            if float(self.denominator(part_of(targets, slice(first, last))))
        ]
        error = float((whole - sum(parts)).abs())
        dtype = next((x.dtype for x in (outputs, targets) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if float(total) and not error <= math.sqrt(torch.finfo(dtype or torch.float32).eps) * (
            1e-6 + float(whole.abs())
        ):
            raise InputError(
                f"loss: parts of a batch add up to {float(sum(parts)):.6g}, the whole gives {float(whole):.6g}: it is "
                "no mean over samples. Say what it is divided by: denominator=lambda targets: ...; a contrastive loss "
                "is planned without targets, with a tower for each input"
            )


class MeanStep:
    """One exact step: `loss = step(inputs, targets)`. Gradients are in `.grad`; the loss is the batch's, detached.

    Each micro-batch passes forward and backward at once. What holds for `TrainingStep` about gradients that are there,
    errors, scalers and ranks holds here. A batch in which nothing counts gives NaN, as in torch.
    """

    def __init__(self, plan: TowerPlan, model: Model, loss: MeanLoss, group: Any, progress: bool = False) -> None:
        self._plan, self._model, self._mean, self._group, self._progress = plan, model, loss, group, progress
        self._slabs = Slabs()

    def __call__(self, inputs: Any, targets: Any, scaler: Any = None) -> Tensor:
        model, (tower,) = self._model, self._model.towers
        rows = rows_of(inputs, "inputs")
        if rows_of(targets, "targets") != rows:
            raise InputError(f"targets: {rows_of(targets, 'targets')} samples; the inputs have {rows}")
        if rows > self._plan.samples:
            raise InputError(f"inputs: {rows} samples; the step is planned for {self._plan.samples}")
        turns = self._mean.counting(list(self._plan.passes(rows)), targets)
        total = torch.as_tensor(self._mean.denominator(targets), dtype=torch.float64).to(model.device).clone()
        size = 1
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
            size = dist.get_world_size(self._group)
        value = torch.zeros((), dtype=torch.float64, device=model.device)
        feed = Feed([(inputs, targets)], model.device, self._slabs)
        with contextlib.ExitStack() as around:
            around.enter_context(torch.enable_grad())
            if model.autocast is not None:
                around.enter_context(torch.autocast(model.device.type, model.autocast))
            exchange = around.enter_context(Exchange(model.modules, ()))
            passed = around.enter_context(bar(len(turns))) if self._progress else None
            for turn, given in feed.stream(turns):
                part = tower.run(given)
                value += part.detach()
                # Wrappers average over ranks.
                share = part * (size / total).to(part.dtype)
                share = share if scaler is None else scaler.scale(share)
                exchange.backward(share, torch.ones_like(share), model.modules if turn == turns[-1] else ())
                if passed is not None:
                    passed()
            exchange.reduce()
        if self._group is not None:
            dist.all_reduce(value, group=self._group)
        mean: Tensor = value / total
        return mean


class _ClassWeights:
    """Of cross-entropy: the weights of the targets that are not ignored; of probabilities, how many there are."""

    def __init__(self, loss: Any) -> None:
        self._weight, self._ignored = loss.weight, loss.ignore_index

    def __call__(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point():  # (N, C, ...)
            return torch.tensor(targets.numel() / targets.shape[1], dtype=torch.float64)
        counts: Tensor = targets != self._ignored
        if self._weight is None:
            return counts.sum(dtype=torch.float64)
        weight = self._weight.to(targets.device, torch.float64)
        total: Tensor = torch.where(counts, weight[torch.where(counts, targets, 0)], 0.0).sum()
        return total


def _elements(targets: Tensor) -> float:
    return float(targets.numel())


def _samples(targets: Any) -> float:
    return float(rows_of(targets, "targets"))
