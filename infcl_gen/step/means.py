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
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infcl_gen.errors import InputError
from infcl_gen.step.executor import Model, Step, one_number
from infcl_gen.step.feed import Feed, Ragged, part_of, rows_of
from infcl_gen.step.gradients import GradientSync
from infcl_gen.step.plan import MicroBatch, TowerPlan

_OVER_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_OVER_ELEMENTS = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss,
)  # fmt: skip

WIDENED = 1 << 20  # numbers of an example that are taken in fp64


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
            self.denominator = _ClassWeights(loss) if classes else lambda targets: float(targets.numel())
            self._loss, self._is_sum = summing, True
        else:
            self.denominator = lambda targets: float(rows_of(targets, "targets"))
            self._loss, self._is_sum = loss, False

    def sum_of(self, outputs: Any, targets: Any) -> Tensor:
        value = one_number(self._loss(outputs, targets))
        return value if self._is_sum else value * self.denominator(targets)

    def counting(self, micros: list[MicroBatch], targets: Any) -> list[MicroBatch]:
        """The micro-batches in which something counts: the mean of nothing is NaN, also times 0."""
        if self._is_sum or not micros:
            return micros
        weights = [torch.as_tensor(self.denominator(part_of(targets, micro.rows))) for micro in micros]
        return [micro for micro, weight in zip(micros, torch.stack(weights).tolist(), strict=True) if weight]

    def check(self, outputs: Any, targets: Any) -> torch.dtype:
        """The loss's dtype. Raises InputError where the parts of an example do not add up to the whole."""
        rows = rows_of(targets, "targets")
        if rows < 3:
            raise InputError(f"example: {rows} samples; at least 3 are needed to see that the loss is a mean over them")
        loss = self._parts_add_up(outputs, targets, rows)
        with contextlib.suppress(RuntimeError, TypeError, AssertionError, AttributeError):  # it refuses fp64
            count = min(rows, max(3, WIDENED // max(1, outputs.numel() // rows)))
            few = _widened(outputs[:count]), _widened(part_of(targets, slice(0, count)))
            self._parts_add_up(*few, count)
        return loss.dtype

    def _parts_add_up(self, outputs: Any, targets: Any, rows: int) -> Tensor:
        """The loss of so many samples times their denominator. Raises InputError where it is not the sum of parts."""
        whole, parts = self.sum_of(outputs, targets), []
        for first, last in itertools.pairwise((0, 1, rows // 2 + 1, rows)):
            part = tuple(part_of(each, slice(first, last)) for each in (outputs, targets))
            if float(self.denominator(part[1])):
                parts.append(float(self.sum_of(*part)))
        narrow = math.sqrt(torch.finfo(whole.dtype).eps)
        allowed = (1e-9 if whole.dtype == torch.float64 else narrow) * (1e-6 + abs(float(whole)))
        if float(self.denominator(targets)) and not abs(float(whole) - sum(parts)) <= allowed:
            raise InputError(
                f"loss: parts of a batch add up to {sum(parts):.9g}, the whole gives {float(whole):.9g}: it is "
                "no mean over samples. Say what it is divided by: denominator=lambda targets: ...; a contrastive loss "
                "is planned without targets, with a tower for each input"
            )
        return whole


def _widened(values: Any) -> Any:
    """Numbers in fp64, in which rounding hides no mistake. Focal loss of the mean entropy is off by 1e-8 to 3e-5."""
    return values.double() if isinstance(values, Tensor) and values.is_floating_point() else values


class MeanStep(Step):
    """One exact step: `loss = step(inputs, targets)`. Gradients are in `.grad`; the loss is the batch's, detached.

    Each micro-batch passes forward and backward at once. What holds for `TrainingStep` about iterators, gradients that
    are there, errors, scalers and ranks holds here. A batch in which nothing counts gives NaN, as in torch.
    """

    def __init__(self, plan: TowerPlan, model: Model, loss: MeanLoss, progress: bool = False) -> None:
        super().__init__(("inputs", "targets"), model.towers[0].form or (None, None), plan.samples, model, progress)
        self._plan, self._mean = plan, loss

    def _run(self, inputs: Sequence[Any], rows: int, scaler: Any) -> Tensor:
        model, (tower,), targets = self.model, self.model.towers, inputs[1]
        micros = self._mean.counting(list(self._plan.passes(rows)), targets)
        self.check_ranks(micros)
        if isinstance(inputs[0], Ragged):
            raise InputError("inputs: Ragged sorts its sequences, and targets keep their places; give padded tensors")
        total = torch.as_tensor(self._mean.denominator(targets), dtype=torch.float64).to(model.device).clone()
        size = 1
        if model.group is not None:
            dist.all_reduce(total, group=model.group)
            size = dist.get_world_size(model.group)
        value = torch.zeros((), dtype=torch.float64, device=model.device)
        feed = Feed([tuple(inputs)], model.device, self.staging)
        with GradientSync(model.modules, (), model.group) as sync, self.bar(len(micros)) as passed:
            for micro, given in feed.stream(micros):
                part = tower.run(given)
                value += part.detach()
                # Wrappers average over ranks.
                share = part * (size / total).to(part.dtype)
                share = share if scaler is None else scaler.scale(share)
                sync.backward(share, torch.ones_like(share), model.modules if micro == micros[-1] else ())
                passed()
            sync.reduce()
        if model.group is not None:
            dist.all_reduce(value, group=model.group)
        return (value / total).to(tower.features.dtype)


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
