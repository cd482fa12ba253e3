"""CLIP on handwritten digits and their captions, on the CPU: in micro-batches, and in whole batches.

    python examples/digits.py
    python examples/digits.py --micro-batch 0        # the whole batch at once

`digits.csv.gz` holds 1 797 images of 8 x 8 pixels and their digits: "Optical Recognition of Handwritten Digits" by
E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, CC BY 4.0. The first 1 437 are for training.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import infcl_gen

FILE = Path(__file__).with_name("digits.csv.gz")
TRAINING = 1437
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CAPTIONS = ("a handwritten {}", "the digit {}", "{}", "a scan of the number {}")
LENGTH = 32  # characters of a caption


def digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 64) from 0 to 1, and their digits (1797,)."""
    with gzip.open(FILE, "rt") as file:
        rows = [line.split(",") for line in file.read().split()]
    table = torch.tensor([[int(word) for word in row] for row in rows])
    return table[:, :64] / 16, table[:, 64]


def tokens(captions: list[str]) -> Tensor:
    """(captions, LENGTH) characters, 0 behind the end."""
    return torch.tensor([[ord(letter) for letter in caption.ljust(LENGTH, "\0")] for caption in captions])


class Model(nn.Module):
    """An image tower, a text tower, and a learnt scale."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32))
        self.letters = nn.Embedding(128, 64)
        self.places = nn.Parameter(torch.randn(LENGTH, 64) / 8)
        self.text = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def encode_image(self, pixels: Tensor) -> Tensor:
        return normalize(self.image(pixels), dim=-1)

    def encode_text(self, letters: Tensor) -> Tensor:
        words, there = nn.functional.gelu(self.letters(letters) + self.places), (letters > 0)[..., None]
        return normalize(self.text((words * there).sum(1) / there.sum(1)), dim=-1)


def batches(size: int, steps: int, seed: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Random training images, each with one of its captions."""
    pixels, labels = digits()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(TRAINING, (size,), generator=generator)
        forms = torch.randint(len(CAPTIONS), (size,), generator=generator)
        captions = [CAPTIONS[form].format(WORDS[labels[place]]) for place, form in zip(chosen, forms, strict=True)]
        yield pixels[chosen].to(dtype), tokens(captions)


def whole(model: Model) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward and backward of the whole batch, by the formula."""

    def step(pixels: Tensor, letters: Tensor) -> Tensor:
        logits = model.log_scale.exp() * model.encode_image(pixels) @ model.encode_text(letters).T
        own = torch.arange(len(logits))
        loss = (nn.functional.cross_entropy(logits, own) + nn.functional.cross_entropy(logits.T, own)) / 2
        loss.backward()
        return loss.detach()

    return step


def planned(model: Model, batch_size: int, micro_batch: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The same in micro-batches, of which only features are kept."""
    example = next(batches(64, 1, 0, model.log_scale.dtype))
    plan = infcl_gen.plan_step(
        [model.encode_image, model.encode_text], example, scale=lambda: model.log_scale.exp(), batch_size=batch_size,
        micro_batch=micro_batch, treatments=("cached",), memory="1GiB",
    )  # fmt: skip
    step: Callable[[Tensor, Tensor], Tensor] = plan.step()
    return step


def train(
    batch_size: int = 512, micro_batch: int = 64, steps: int = 300, seed: int = 0, dtype: torch.dtype = torch.float32,
    adam: bool = True,
) -> tuple[list[float], float]:  # fmt: skip
    """The loss of each step, and the accuracy on images that were not trained on. Without a micro-batch, whole ones."""
    torch.manual_seed(seed)
    model = Model().to(dtype)
    step = planned(model, batch_size, micro_batch) if micro_batch else whole(model)
    parameters = model.parameters()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=4e-3)
    if adam:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for pixels, letters in batches(batch_size, steps, seed, dtype):
        losses.append(step(pixels, letters).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, accuracy(model)


@torch.no_grad()
def accuracy(model: Model) -> float:
    """Of the nearest caption, over the other images."""
    pixels, labels = (each[TRAINING:] for each in digits())
    captions = model.encode_text(tokens([CAPTIONS[0].format(word) for word in WORDS]))
    found = (model.encode_image(pixels.to(captions.dtype)) @ captions.T).argmax(1)
    return float((found == labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=64, help="0: the whole batch at once")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    losses, right = train(flags.batch_size, flags.micro_batch, flags.steps, flags.seed)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {flags.steps} steps; {right:.1%} of unseen digits are right")


if __name__ == "__main__":
    main()
