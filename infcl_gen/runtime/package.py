"""What a generated package is to the runtime, how a call wants its result, and what backward needs of forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .route import Route


@dataclass(frozen=True)
class Package:
    """One generated package: what it was made for, its derived mathematics and its device sweep."""

    name: str
    digest: str
    loss_name: str
    dtype: torch.dtype
    dim: int
    batch_size: int
    key_count: int
    world_size: int  # planned
    route: Route  # for that many ranks
    rows_per_rank: int
    keys_per_rank: int
    any_device: bool  # False: Triton kernels, for CUDA and ROCm
    replay: bool  # recorded CUDA graphs
    product_precision: str  # of fp32 library products: "ieee" or "tf32"
    regenerate: str  # the command for another problem
    loss: Any
    schedule: Any

    @property
    def labelled(self) -> bool:
        return bool(self.loss.POSITIVES == "label")

    def cast(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The features in the package's dtype. By `to` also where they have it: it undoes what torch.func may have left
        wrapped."""
        return q.to(self.dtype), k.to(self.dtype)


class Options(NamedTuple):
    """How a call wants its result: `grad_sync` "mean" or "sum" (docstring of engine.py); `reduction` "mean" or "sum"
    (times M); `check_ranks` "first", "always" or "never" (`contrastive_loss`); `unrounded`: dq and dk in the statistics
    dtype, as they are accumulated, for features that were wider before autocast."""

    group_name: str = ""
    grad_sync: str = "mean"
    reduction: str = "mean"
    check_ranks: str = "first"
    unrounded: bool = False


class Saved(NamedTuple):
    """What backward needs of forward, besides the inputs.

    query_statistics  (2 + POSITIVE_PARTS, m): exponent, mantissa; z of the positive and what else is kept of it
    key_statistics    (2, n) of this rank's keys, (2, 0) if the loss has none; where gradients are wanted, of a gather
                      (2, planned keys): those of all ranks come first; of a ring those of `stash` follow
    stash             what the sweep keeps of the tile matrix; of a gather the keys of all ranks, of a ring those that
                      visit last; (0,) if nothing, or if it stayed in a recording (replay.py)
    layout            int64 (W, 3) on the host: rows and keys of each rank and the number of the call, by which backward
                      is compared; for a group of one (0, 3), on the device
    """

    query_statistics: Tensor
    key_statistics: Tensor
    stash: Tensor
    layout: Tensor
