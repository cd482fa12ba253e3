"""Micro-batches of losses that are means over samples, against one plain batch in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import infcl_gen
from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.processes import run_ranks
from infcl_gen.step.feed import Ragged, Samples
from infcl_gen.step.means import MeanLoss
from infcl_gen.verification.memory import PeakMeter
from tests.step.models import difference, gradients
from tests.step.ranks import classifier, labelled
from tests.tiers import combined

ROWS = 23
WEIGHT = torch.tensor([0.2, 3.0, 1.0, 0.5], dtype=torch.float64)


def pixels(rows: int) -> Tensor:
    """Classes of 2 x 3 pixels, of which many are ignored: all those of the first samples."""
    classes = torch.randint(-1, 4, (rows, 2, 3), generator=torch.Generator().manual_seed(4))
    classes[:4] = -1
    return classes


def probabilities(rows: int) -> Tensor:
    return torch.rand(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).softmax(1)


def numbers(rows: int) -> Tensor:
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over the samples that count, as users write one."""
    each = cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    counts = targets >= 0
    return ((1 - (-each).exp()) ** 2 * each)[counts].sum() / counts.sum()


LOSSES: dict[str, tuple[Any, Callable[[int], Tensor], dict[str, Any]]] = {
    "cross-entropy": (nn.CrossEntropyLoss(), lambda rows: labelled(rows)[1].clamp(min=0), {}),
    "weighted classes, some ignored": (nn.CrossEntropyLoss(WEIGHT, ignore_index=-1), lambda r: labelled(r)[1], {}),
    "smoothed": (nn.CrossEntropyLoss(WEIGHT, ignore_index=-1, label_smoothing=0.1), lambda r: labelled(r)[1], {}),
    "probabilities": (nn.CrossEntropyLoss(WEIGHT), probabilities, {}),
    "squares": (nn.MSELoss(), numbers, {}),
    "Huber's": (nn.HuberLoss(delta=0.3), numbers, {}),
    "binary": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), probabilities, {}),
    "a function of samples": (lambda outputs, targets: (outputs - targets).abs().sum(1).mean(), numbers, {}),
    "a function that ignores": (focal, lambda r: labelled(r)[1], {"denominator": lambda targets: (targets >= 0).sum()}),
}


def planned(module: nn.Module, loss: Any, targets: Tensor, micro_batch: int | None = 5, **options: Any) -> Any:
    inputs = options.pop("inputs", labelled(len(targets))[0])
    given: dict[str, Any] = {"memory": "1GiB", "batch_size": len(targets), "micro_batch": micro_batch}
    return infcl_gen.plan_step(module, inputs, targets=targets, loss=loss, **given | options)


@pytest.mark.parametrize(("name", "micro_batch"), combined(sorted(LOSSES), [1, 5, 22, 23]))
def test_gradients_are_those_of_one_large_batch(name: str, micro_batch: int) -> None:
    loss, make, options = LOSSES[name]
    module, other, inputs, targets = classifier(), classifier(), labelled(ROWS)[0], make(ROWS)
    value = planned(module, loss, targets, micro_batch, **options).step()(inputs, targets)
    true = loss(other(inputs), targets)
    true.backward()
    assert not value.requires_grad and abs(float(value - true.detach())) < 1e-12
    assert difference(gradients(module), gradients(other)) < 1e-12


def test_a_segmentation_whose_first_micro_batches_are_ignored() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 1)).double()
    other, targets = copy.deepcopy(module), pixels(12)
    images = torch.randn(12, 3, 2, 3, dtype=torch.float64)
    loss = nn.CrossEntropyLoss(ignore_index=-1)
    step = infcl_gen.plan_step(
        module, images, targets=targets, loss=loss, batch_size=12, micro_batch=2, memory="1GiB"
    ).step()
    value, true = step(images, targets), loss(other(images), targets)
    true.backward()
    assert abs(float(value - true.detach())) < 1e-12 and difference(gradients(module), gradients(other)) < 1e-12


def test_the_bug_of_the_paper_s_code_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of micro-batches' means, each divided by their number."""
    loss, make, _ = LOSSES["weighted classes, some ignored"]
    module, other, inputs, targets = classifier(), classifier(), labelled(ROWS)[0], make(ROWS)
    step = planned(module, loss, targets).step()
    monkeypatch.setattr(MeanLoss, "sum_of", lambda self, outputs, targets: loss(outputs, targets) * 4)
    step(inputs, targets)
    loss(other(inputs), targets).backward()
    assert difference(gradients(module), gradients(other)) > 1e-3


def test_nothing_that_counts_gives_nan() -> None:
    module, inputs = classifier(), labelled(ROWS)[0]
    targets = torch.full((ROWS,), -1)
    loss = nn.CrossEntropyLoss(ignore_index=-1)
    value = planned(module, loss, labelled(ROWS)[1]).step()(inputs, targets)
    assert value.isnan() and loss(module(inputs), targets).isnan()


def test_memory_is_that_of_a_micro_batch_and_predicted() -> None:
    """A batch that would need ten times the memory; the predicted peak bounds the measured one closely."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4)).double()
    inputs, targets = labelled(4096)
    loss = nn.CrossEntropyLoss(ignore_index=-1)
    free = planned(module, loss, targets, 4096, optimizer="none")
    assert free.account.towers[0].streamed.samples == 4096
    costs = planned(module, loss, targets, None, optimizer="none").problem.costs
    tight = planned(module, loss, targets, None, optimizer="none", memory=free.predicted_peak_bytes // 10, costs=costs)
    assert tight.predicted_peak_bytes <= free.predicted_peak_bytes // 10
    for plan in (free, tight):
        step = plan.step()
        step(inputs, targets)
        module.zero_grad()
        with PeakMeter("cpu") as meter:
            step(inputs, targets)
        module.zero_grad()
        measured = meter.peak_bytes + sum(each.nbytes for each in (*module.parameters(), inputs, targets))
        assert measured <= plan.predicted_peak_bytes <= 1.1 * measured + plan.problem.costs.gradient_bytes
    with pytest.raises(InfeasibleError, match=r"a step of 4096 samples per device needs"):
        planned(module, loss, targets, None, optimizer="none", memory=10_000, costs=costs)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("rows", [(7,), (9, 14), (4, 0, 9)])
def test_ranks_with_uneven_parts(rows: tuple[int, ...], package_cache: str) -> None:
    for answer in run_ranks("tests.step.ranks:mean", {"rows": list(rows), "cache": package_cache}, len(rows), 120.0):
        assert answer["error"] < 1e-12 and answer["value"] < 1e-12


def coupled(outputs: Tensor, targets: Tensor) -> Tensor:
    """A contrast between samples."""
    return cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a contrastive loss": ({"loss": coupled}, "no mean over samples. Say what it is divided by: denominator=lambda"),
    "a sum": ({"loss": nn.CrossEntropyLoss(reduction="sum")}, 'reduction="sum" is no mean over samples'),
    "a name": ({"loss": "clip"}, "loss: 'clip' has no targets"),
    "a loss of each sample": ({"loss": lambda outputs, _: outputs.sum(1)}, r"loss: gave \(23,\); expected one number"),
    "a scale": ({"scale": 2.0}, "scale, bias, treatments: are of a contrastive loss"),
    "treatments": ({"treatments": ("kept",)}, "scale, bias, treatments: are of a contrastive loss"),
    "an example of sequences": ({"example": Ragged([torch.ones(3)] * ROWS)}, "example: Ragged are inputs of a step"),
    "samples as an example": (
        {"example": Samples(4, lambda rows: None)},
        "example: Samples are inputs of a step; give",
    ),
    "a denominator that is no function": ({"denominator": 4}, "denominator: expected a function of targets, got 4"),
    "targets of another batch": ({"targets": torch.zeros(4, dtype=torch.int64)}, "targets: 4 samples; the example has"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_what_is_no_mean_over_samples_is_refused(what: str) -> None:
    options, message = WRONG[what]
    inputs, targets = labelled(ROWS)
    given: dict[str, Any] = {"targets": targets.clamp(min=0), "loss": nn.CrossEntropyLoss(), "batch_size": ROWS}
    with pytest.raises(InputError, match=message):
        infcl_gen.plan_step(classifier(), memory="1GiB", **{"example": inputs, **given, **options})


def test_a_mistake_that_is_smaller_than_roundings_of_fp32_is_found() -> None:
    """Focal loss of the mean entropy. Before training its parts add up to the whole but for 3e-6 of it."""

    def focal_of_mean(outputs: Tensor, targets: Tensor) -> Tensor:
        entropy = cross_entropy(outputs, targets)
        return (1 - (-entropy).exp()) ** 2 * entropy

    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(64, 10, generator=generator) / 4
    targets = torch.randint(0, 10, (64,), generator=generator)
    with pytest.raises(InputError, match="no mean over samples"):
        MeanLoss(focal_of_mean, None).check(outputs, targets)
    assert MeanLoss(cross_entropy, None).check(outputs, targets) == torch.float32


def test_samples_beyond_the_first_are_judged_too() -> None:
    """Planted: few samples in fp64 alone, of which all are equally full."""
    targets = torch.zeros(8, 50, dtype=torch.int64)
    targets[3:, 40:] = -100
    outputs = 4 * torch.randn(8, 9000, 50, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="no mean over samples"):
        MeanLoss(cross_entropy, None).check(outputs, targets)


def test_several_towers_have_no_targets() -> None:
    inputs, targets = labelled(ROWS)
    with pytest.raises(InputError, match="a mean over the samples of one model"):
        infcl_gen.plan_step([classifier(), classifier()], [inputs, inputs], targets=targets)


def test_wrong_batches_are_refused() -> None:
    inputs, targets = labelled(ROWS)
    step = planned(classifier(), nn.CrossEntropyLoss(ignore_index=-1), targets).step()
    with pytest.raises(InputError, match="inputs and targets have 23 and 4 samples; give equally many"):
        step(inputs, targets[:4])
    with pytest.raises(InputError, match="inputs: 46 samples were given; the step is planned for 23"):
        step(torch.cat([inputs, inputs]), torch.cat([targets, targets]))
    with pytest.raises(InputError, match=r"inputs: 1 were given; the step takes 2: step\(inputs, targets\)"):
        step(inputs)
    with pytest.raises(InputError, match=r"targets got {'class': tensor}; the step is planned for tensor"):
        step(inputs, {"class": targets})
    with pytest.raises(InputError, match="Ragged sorts its sequences, and targets keep their places"):
        step(Ragged(list(inputs)), targets)
    with pytest.raises(InputError, match="scaler: 3 scales no loss"):
        step(inputs, targets, scaler=3)


def test_parameters_that_were_frozen_since_are_refused() -> None:
    module, (inputs, targets) = classifier(), labelled(ROWS)
    step = planned(module, nn.CrossEntropyLoss(ignore_index=-1), targets).step()
    module[0].requires_grad_(False)
    with pytest.raises(InputError, match="were frozen or unfrozen since the step was planned"):
        step(inputs, targets)
    module[0].requires_grad_(True)
    with torch.inference_mode(), pytest.raises(InputError, match="call it outside torch"):
        step(inputs, targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scaler_and_the_dtype_of_the_loss(dtype: torch.dtype) -> None:
    module, other = classifier().to(dtype), classifier().to(dtype)
    inputs, targets = labelled(ROWS)[0].to(dtype), labelled(ROWS)[1]
    loss, scaler = nn.CrossEntropyLoss(ignore_index=-1), torch.amp.GradScaler("cpu", init_scale=64.0)
    value = planned(module, loss, targets, inputs=inputs).step()(inputs, targets, scaler=scaler)
    true = loss(other(inputs), targets)
    (64 * true).backward()
    assert value.dtype == dtype and torch.allclose(value, true, rtol=1e-6)
    assert difference(gradients(module), gradients(other)) < (1e-12 if dtype == torch.float64 else 1e-5)


def test_a_scaler_skips_a_step_whose_gradients_overflow() -> None:
    """As without micro-batches: parameters stay, and the scale gets smaller; the next step is taken."""
    (inputs, targets), loss, found = labelled(ROWS), nn.CrossEntropyLoss(ignore_index=-1), []
    inputs = 1e3 * inputs.float()
    for planned_step in (True, False):
        module = classifier().float()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
        step = planned(module, loss, targets, inputs=inputs).step() if planned_step else None
        values = [each.detach().clone() for each in module.parameters()]
        for place in range(2):
            if step is not None:
                step(inputs, targets, scaler=scaler)
            else:
                scaler.scale(loss(module(inputs), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert all(map(torch.equal, module.parameters(), values)) == (place == 0)
        assert scaler.get_scale() == 2.0**27
        found.append(dict(module.named_parameters()))
    assert all(torch.allclose(found[0][name], found[1][name], rtol=1e-4) for name in found[1])


def test_samples_and_micro_batches_of_an_iterator() -> None:
    (inputs, targets), loss, found = labelled(ROWS), nn.CrossEntropyLoss(ignore_index=-1), []
    parts = [(inputs[start : start + 4], targets[start : start + 4]) for start in range(0, ROWS, 4)]
    for given in (inputs, targets), (Samples(ROWS, lambda rows: inputs[rows]), targets), (iter(parts),):
        module = classifier()
        planned(module, loss, targets).step()(*given)
        found.append(gradients(module))
    assert max(difference(found[0], other) for other in found[1:]) < 1e-12


def test_a_model_in_a_list() -> None:
    inputs, targets = labelled(ROWS)
    loss, modules = nn.CrossEntropyLoss(ignore_index=-1), (classifier(), classifier())
    for towers, example in ((modules[0], inputs), ([modules[1]], [inputs])):
        options = {"targets": targets, "loss": loss, "batch_size": ROWS, "memory": "1GiB"}
        infcl_gen.plan_step(towers, example, **options).step()(inputs, targets)
    assert difference(*map(gradients, modules)) < 1e-12
