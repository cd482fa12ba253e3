"""Inputs that are made when their turn comes, or arrive as micro-batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infcl_gen
from infcl_gen.errors import InputError
from infcl_gen.step.executor import TrainingStep
from infcl_gen.step.feed import Ragged, Samples
from tests.step.models import DIM, Pair, batch, dense, difference, gradients, model_of, pair, plain
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
    read: list[int] = []

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            read.append(len(read))
            yield image[:23], text[:23]

    TrainingStep(mixed(), model_of(pair()))(endless())
    assert read == [0]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "the iterator gave no micro-batch"),
        ([torch.ones(4, 6)], "a micro-batch of Tensor; expected a tuple of 2 inputs"),
        ([(torch.ones(4, 6),) * 3], "a micro-batch of tuple; expected a tuple of 2 inputs"),
        ([(torch.ones(20, 6),) * 2] * 2, "a micro-batch of 20 after 20 samples; the step is planned for 23"),
        ([(torch.ones(4, 6), {"a": torch.ones(4, 6), "b": "x"})], "hold tensors alone"),
    ],
)
def test_wrong_micro_batches_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainingStep(mixed(), model_of(pair()))(iter(parts))


@pytest.mark.parametrize(
    ("count", "make", "message"),
    [
        (-4, list, "Samples: -4 is out of range; valid: 0 to"),
        ("4", list, "Samples: expected an integer from 0 to .*, got '4'"),
        (True, list, "Samples: expected an integer from 0 to .*, got True"),
        (4, 5, "Samples: expected a function of a slice, got 5"),
    ],
)
def test_what_are_no_samples(count: Any, make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Samples(count, make)


def test_errors_of_what_makes_samples_are_the_step_s() -> None:
    def make(rows: slice) -> Tensor:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        step_of(Samples(ROWS, make), batch(ROWS)[1])
    with pytest.raises(InputError, match="image and text have 24 and 23 samples"):
        step_of(Samples(ROWS + 1, make), batch(ROWS)[1])


class Words(nn.Module):
    """The mean of the embeddings of a sequence's tokens; 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(20, 12), nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.last, self.seen = nn.Linear(12, DIM), list[tuple[int, ...]]()

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(tuple(tokens.shape))
        there = (tokens > 0)[..., None]
        x = (self.table(tokens) * there).sum(1) / there.sum(1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        features: Tensor = nn.functional.normalize(self.last(x), dim=-1)
        return features


def worded() -> Pair:
    module = pair()
    torch.manual_seed(1)
    module.text = Words().double()
    return module


def sentences(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(1, 17, (count,), generator=generator)
    lengths[3] = 16
    return [torch.randint(1, 20, (int(length),), generator=generator) for length in lengths]


@pytest.mark.parametrize("treatments", [("cached",), ("checkpointed",), ("kept",), ("cached", "kept")])
def test_sequences_pass_by_their_tokens(treatments: tuple[str, ...]) -> None:
    """Features stay with their partners; a micro-batch of short sequences holds more, and never more tokens."""
    image, _ = batch(40)
    texts, module, other = sentences(40), worded(), worded()
    plan = infcl_gen.plan_step(
        [module.image, module.text], [image[:8], Ragged(texts)], scale=lambda: module.log_scale.exp(), batch_size=40,
        micro_batch=4, treatments=treatments, memory="1GiB",
    )  # fmt: skip
    assert plan.account.towers[1].tokens == 16
    module.text.seen.clear()
    plan.step()(image, Ragged(texts))
    padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    dense(other.image(image), other.text(padded), other.log_scale.exp()).backward()
    assert difference(gradients(module), gradients(other)) < 1e-12
    assert all(rows * tokens <= 4 * 16 for rows, tokens in module.text.seen)
    passes = module.text.seen[: len(module.text.seen) // (2 if treatments == ("cached",) else 1)]
    assert sum(rows for rows, _ in passes) >= 40 and len(passes) < 10 and max(rows for rows, _ in passes) > 4


def test_sequences_that_are_not_planned_for_are_refused() -> None:
    image, _ = batch(8)
    module, texts = worded(), sentences(8)
    towers, options = [module.image, module.text], {"batch_size": 8, "memory": "1GiB"}
    longer = [*texts[:-1], torch.ones(17, dtype=torch.int64)]
    step = infcl_gen.plan_step(towers, [image, Ragged(texts)], **options).step()
    with pytest.raises(InputError, match="Words got 17 tokens; the step is planned for 16"):
        step(image, Ragged(longer))
    plain = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    step = infcl_gen.plan_step(towers, [image, plain], **options).step()
    with pytest.raises(InputError, match="got sequences; the step is planned for samples of one length"):
        step(image, Ragged(texts))
