"""What a generated package is to the runtime, what a call is given, what backward needs of forward, and what the device
sweep is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import panel, panel_columns
from .statistics import Statistics
from .table import Table


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
    table: Table  # of what as many ranks as planned send to each other
    rows_per_rank: int
    keys_per_rank: int
    any_device: bool  # False: Triton kernels, for CUDA and ROCm
    replay: bool  # recorded CUDA graphs
    product_precision: str  # of fp32 library products: "ieee" or "tf32"
    labelled: bool  # a query's positive is what a label says, and not the key of its row
    split: bool  # fp32 features are multiplied as bf16 halves
    regenerate: str  # the command for another problem
    loss: Any
    schedule: Any
    operators: Any = None  # of `ops.register`, which are made of the rest


class Options(NamedTuple):
    """How a call wants its result: `grad_sync` "mean" or "sum" (docstring of engine.py); `reduction` "mean" or "sum"
    (times M); `check_ranks` "first", "always" or "never" (`contrastive_loss`); `labelling`: a query's positive is the
    key of its global row ("none"), of its row of this rank ("own"), or what a tensor of labels says ("given");
    `unrounded`: dq and dk in the statistics dtype, as they are accumulated, for features that were wider before
    autocast."""

    group_name: str = ""
    grad_sync: str = "mean"
    reduction: str = "mean"
    check_ranks: str = "first"
    labelling: str = "none"
    unrounded: bool = False


class Call(NamedTuple):
    """What a call is given on this rank. At first whatever the user has passed; `api.accepted` makes it what follows.

    q (m, D), k (n, D)   on one device, any strides; of the package's dtype once `cast`
    scale, bias          0-dim, in the statistics dtype, on that device
    labels               int64 (m,), global, there or on the host; None unless `options.labelling` is "given"
    """

    q: Tensor
    k: Tensor
    scale: Tensor
    bias: Tensor
    labels: Tensor | None
    options: Options = Options()

    def cast(self, package: Package) -> Call:
        """The call with features in the package's dtype. Gradients of features that were wider are not rounded to it.
        By `to` also where they have that dtype: it undoes what torch.func may have left wrapped."""
        q, k, scale, bias, labels, options = self
        dtype = package.dtype
        if not q.dtype == k.dtype == dtype:
            options = options._replace(unrounded=True)
        return Call(q.to(dtype), k.to(dtype), scale, bias, labels, options)


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


class Block(NamedTuple):
    """Queries and keys that the device sweep brings together, and what belongs to them.

    q (m, D), k (n, D)  features, any strides; m and n are at least 1 in a sweep
    scale, bias         0-dim, in the statistics dtype
    positives           global key index of each query's positive, int64 (m,); or of row 0's, and row i's is i further
    first_key           global index of k's first row
    queries, keys       statistics (m,) and (n,), merged in place; None for keys that have none
    positive            (POSITIVE_PARTS, m): what is kept of each query's positive
    """

    q: Tensor
    k: Tensor
    scale: Tensor
    bias: Tensor
    positives: Tensor | int
    first_key: int
    queries: Statistics
    keys: Statistics | None
    positive: Tensor

    def panel(self, row0: int, rows: int, key0: int, keys: int) -> Block:
        """Up to `rows` queries from `row0` on and up to `keys` keys from `key0` on: itself, if these are all."""
        q, k = panel(self.q, row0, rows), panel(self.k, key0, keys)
        if q is self.q and k is self.k:
            return self
        own = self.positives
        return Block(
            q, k, self.scale, self.bias, own + row0 if isinstance(own, int) else panel(own, row0, rows),
            self.first_key + key0, self.queries.panel(row0, rows), self.keys and self.keys.panel(key0, keys),
            panel_columns(self.positive, row0, rows),
        )  # fmt: skip

    def meets_diagonal(self) -> bool:
        """Whether the positive of a query is one of these keys, where query i has the i-th key after `positives`. Of
        labels, which are on the device, always."""
        if not isinstance(self.positives, int):
            return True
        first = self.positives - self.first_key
        return bool(first < self.k.shape[0] and first + self.q.shape[0] > 0)
