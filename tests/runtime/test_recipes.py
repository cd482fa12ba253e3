"""What the page of losses builds of the losses that there are, against dense formulas in fp64."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.documents import blocks

from .in_process import World
from .pool import Packages


def example(word: str, folder: Path) -> dict[str, Any]:
    """The names of the page's example with this word, after it has run."""
    (code,) = (code for page, code in blocks("python") if page == "docs/losses.md" and word in code)
    (folder / "example.py").write_text(code)
    torch.manual_seed(0)
    return runpy.run_path(str(folder / "example.py"), run_name="__main__")


def with_scales(images: Tensor, texts: Tensor, image_scale: Tensor, text_scale: Tensor) -> Tensor:
    """CLIP where each row and each column of similarities has a scale of its own."""
    z, own = images @ texts.T, torch.arange(len(images))
    sides = (z * image_scale[:, None], z.T * text_scale[:, None])
    return torch.stack([torch.nn.functional.cross_entropy(x, own) for x in sides]).mean()


def test_scales_of_images_without_duplicates(tmp_path: Path) -> None:
    """Each row has a scale of its own; pairs of one id are left out of both sums, but for the positive."""
    shown = example("image_scale", tmp_path)
    given = [shown[name] for name in ("images", "texts", "image_scale")]
    images, texts, image_scale = leaves = [x.detach().double().requires_grad_() for x in given]
    own, ids = torch.arange(64), shown["ids"]
    assert len(ids.unique()) < 64
    duplicates = (ids[:, None] == ids) & (own[:, None] != own)
    x = (10.0 * image_scale[:, None] * (images @ texts.T)).masked_fill(duplicates, -torch.inf)
    expected = (torch.nn.functional.cross_entropy(x, own) + torch.nn.functional.cross_entropy(x.T, own)) / 2
    expected.backward()
    torch.testing.assert_close(shown["loss"].double(), expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(given, leaves, strict=True):
        assert theirs.grad is not None
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < 1e-5, error


@pytest.mark.parametrize("shards", [[5, 9], [6, 0, 8]], ids=str)
def test_scales_of_single_samples_over_ranks(packages: Packages, shards: list[int]) -> None:
    """Averaged as DDP does, gradients are those of the loss of all pairs; each rank has those of its own rows."""
    module: ModuleType = packages("infonce")
    draw = torch.Generator().manual_seed(1)
    images, texts = (torch.randn(14, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    scales = [torch.rand(14, generator=draw, dtype=torch.float64) + 0.5 for _ in range(2)]
    leaves = [x.clone().requires_grad_() for x in (images, texts, *scales)]
    expected = torch.autograd.grad(loss := with_scales(*leaves), leaves)

    def job(rank: int) -> list[Tensor]:
        own = [x.detach().split(shards)[rank].clone().requires_grad_() for x in leaves]
        q, k, of_images, of_texts = own
        there = module.contrastive_loss(q * of_images[:, None], k, 1.0)
        back = module.contrastive_loss(k * of_texts[:, None], q, 1.0)
        share = (there + back) / 2
        return [share.detach(), *torch.autograd.grad(share, own)]

    found = World(module, len(shards)).run(job)
    torch.testing.assert_close(torch.stack([each[0] for each in found]).mean(), loss.detach())
    for place, theirs in enumerate(expected, 1):
        torch.testing.assert_close(torch.cat([each[place] for each in found]) / len(shards), theirs)


def test_clip_without_duplicates(tmp_path: Path) -> None:
    """Of each sum it leaves out other pairs of the same id, by loops over rows and columns."""
    shown = example("unique_clip", tmp_path)
    z, ids = (shown["images"].double() @ shown["texts"].double().T) * 2.0, shown["ids"].tolist()
    assert len(set(ids)) < len(ids)
    terms = [
        torch.logsumexp(torch.stack([x[j] for j in range(64) if j == i or ids[j] != ids[i]]), 0) - x[i]
        for of_side in (z, z.T)
        for i, x in enumerate(of_side)
    ]
    torch.testing.assert_close(shown["loss"].double(), torch.stack(terms).mean(), rtol=1e-6, atol=0)
