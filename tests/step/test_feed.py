"""Inputs that are made when their turn comes, or arrive as micro-batches."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from infcl_gen.errors import InputError
from infcl_gen.step.executor import TrainingStep
from infcl_gen.step.feed import Samples
from tests.step.models import batch, difference, gradients, model_of, pair, plain
from tests.step.test_executor import ROWS, mixed, plans


def step_of(image: Any, text: Any, ways: Any = None) -> dict[str, Tensor]:
    module = pair()
    TrainingStep(ways or mixed(), model_of(module))(image, text)
    return gradients(module)


def true() -> dict[str, Tensor]:
    return plain(pair(), *batch(ROWS))[1]


def test_samples_are_made_ahead_in_another_thread_and_twice_where_they_are_cached() -> None:
    image, text = batch(ROWS)
    made: list[tuple[int, int]] = []
    threads = set()

    def make(rows: slice) -> Tensor:
        made.append((rows.start, rows.stop))
        threads.add(threading.current_thread())
        return image[rows]

    assert difference(step_of(Samples(ROWS, make), text, plans("cached", "kept")), true()) < 1e-12
    once = [(start, min(start + 5, ROWS)) for start in range(0, ROWS, 5)]
    assert made == [*once, *once]
    assert len(threads) == 1 and threading.main_thread() not in threads


def test_a_data_set_with_indices() -> None:
    image, text = batch(ROWS)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    dataset = [(image[place], {"tokens": text[place]}) for place in order.argsort()]
    dataset = [dataset[place] for place in range(ROWS)]
    images = Samples.of(dataset, order.tolist(), 0)
    module = pair()
    towers = module.image, lambda given: module.text(given["tokens"])
    TrainingStep(mixed(), model_of(module, towers))(images, Samples.of(dataset, order.tolist(), 1))
    shuffled = [torch.stack([dataset[int(place)][0] for place in order])]
    shuffled.append(torch.stack([dataset[int(place)][1]["tokens"] for place in order]))
    assert difference(gradients(module), plain(pair(), *shuffled)[1]) < 1e-12


@pytest.mark.parametrize("size", [1, 6, ROWS])
def test_an_iterator_of_micro_batches(size: int) -> None:
    image, text = batch(ROWS)
    module = pair()
    step = TrainingStep(mixed(), model_of(module))
    parts = iter([(image[start : start + size], text[start : start + size]) for start in range(0, ROWS, size)])
    step(parts)
    assert difference(gradients(module), true()) < 1e-12
    module.zero_grad()
    short = iter([(image[:4], text[:4]), (image[4:9], text[4:9])])  # that ends early
    step(short)
    assert difference(gradients(module), plain(pair(), image[:9], text[:9])[1]) < 1e-12


def test_an_iterator_is_read_no_further_than_the_batch() -> None:
    image, text = batch(ROWS)
    endless = ((image[:23], text[:23]) for _ in iter(int, 1))
    TrainingStep(mixed(), model_of(pair()))(endless)
    assert next(endless)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([torch.ones(4, 6)], "a micro-batch of Tensor; expected a tuple of 2 inputs"),
        ([(torch.ones(4, 6),) * 3], "a micro-batch of tuple; expected a tuple of 2 inputs"),
        ([(torch.ones(20, 6),) * 2] * 2, "a micro-batch of 20 behind 20 samples; the step is planned for 23"),
        ([(torch.ones(4, 6), {"a": torch.ones(4, 6), "b": "x"})], "hold tensors alone"),
    ],
)
def test_wrong_micro_batches_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainingStep(mixed(), model_of(pair()))(iter(parts))


def test_errors_of_what_makes_samples_are_the_step_s() -> None:
    def make(rows: slice) -> Tensor:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        step_of(Samples(ROWS, make), batch(ROWS)[1])
    with pytest.raises(InputError, match="image got 24 samples"):
        step_of(Samples(ROWS + 1, make), batch(ROWS)[1])
