"""Training steps by the gradient caches of other libraries, for training_step.py.

    gradcache               GradCache of https://github.com/luyug/GradCache, with a loss of one's own
    sentence_transformers   CachedMultipleNegativesRankingLoss, in both directions, which then is CLIP's loss

Each takes towers as `plan_step` does, and the inputs of a whole batch. The step that it returns leaves gradients in
.grad, also of the scale's parameters, and returns the loss. Raises ImportError where the library is not installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

Tower = Callable[[Tensor], Tensor]  # inputs (M, ...) -> features (M, D) of unit norm
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


def gradcache(
    towers: Sequence[Tower],
    inputs: Sequence[Tensor],
    scale: Callable[[], Tensor],
    micro_batch: int,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    autocast: Autocast = contextlib.nullcontext,
) -> Callable[[], Tensor]:
    """GradCache's step, with a loss of (image features, text features, scale)."""
    from grad_cache import GradCache

    cache = GradCache(
        models=[_under(autocast, tower) for tower in towers],
        chunk_sizes=micro_batch,
        loss_fn=_under(autocast, lambda image, text: loss(image, text, scale())),
    )
    return lambda: cache(*inputs)


def sentence_transformers(
    towers: Sequence[Tower],
    inputs: Sequence[Tensor],
    scale: Callable[[], Tensor],
    micro_batch: int,
    autocast: Autocast = contextlib.nullcontext,
) -> Callable[[], Tensor]:
    """The step of sentence-transformers' cached loss, whose scale is a number: its gradient is passed on here."""
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.util import dot_score

    # Its cosines would normalise the features again.
    cached = CachedMultipleNegativesRankingLoss(
        _Model([_under(autocast, tower) for tower in towers]),
        similarity_fct=dot_score,
        mini_batch_size=micro_batch,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )

    def step() -> Tensor:
        whole = scale()
        cached.scale = number = whole.detach().requires_grad_()
        with autocast():
            loss: Tensor = cached([{str(place): x} for place, x in enumerate(inputs)], None)
        loss.backward()
        whole.backward(number.grad)
        return loss.detach()

    return step


class _Model(nn.Module):
    """Towers as the one model that sentence-transformers trains: an input is named by the place of its tower."""

    def __init__(self, towers: Sequence[Tower]) -> None:
        super().__init__()
        self._towers = list(towers)

    def __getitem__(self, place: int) -> nn.Module:
        return self  # the loss looks at the first module, whether it is an embedding bag

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        ((place, x),) = features.items()
        return {"sentence_embedding": self._towers[int(place)](x)}


def _under(autocast: Autocast, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Each call has an autocast of its own: weights that were cast without a graph would be taken for later ones."""

    def call(*inputs: Tensor) -> Tensor:
        with autocast():
            return run(*inputs)

    return call
