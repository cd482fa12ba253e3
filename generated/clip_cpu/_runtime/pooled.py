"""The log-sum-exp over the positives of all queries, on which their terms depend, and what these change with it.

E = log sum_i exp(e_i) of functions e_i of the positives changes the terms F_k of all queries:
M * dL/de_i = S * exp(e_i - E) with S = sum_k dF_k/dE. Both numbers follow between the sweeps, from the sum and the
positive of each query: vectors of M. Over ranks each tells its part of either number to all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .group import Group
from .package import Block, Package
from .statistics import Statistics, log
from .transport import of_ranks


def pooled(package: Package, block: Block, group: Group | None) -> Tensor:
    """E and S of the whole batch, fp64 (2,), from the block of all own queries, whose statistics are complete.

    Where e_i depends on similarities, S lacks the logit's own factor. All ranks call it, those without queries, too.
    They get the same numbers, bit by bit.
    """
    formulas, own = package.loss, block.vectors
    z, scale, bias = block.positive[0].double(), block.scale.double(), block.bias.double()
    p = formulas.logit(z, scale, bias)
    total = _of_ranks(formulas.of_all_positives(p, z, scale, bias).logsumexp(0), group).logsumexp(0)
    queries, keys = (z.new_full((), count) for count in block.counts)  # `new_tensor` waits for the device
    found = {"positive_z": z, "scale": scale, "bias": bias, "queries": queries, "keys": keys, "pooled": total}
    shift = formulas.logit(torch.zeros_like(scale), scale, bias) if package.schedule.SUMS_LACK_SHIFT else 0.0
    if package.traits.second:
        found["r2"] = log(block.second) + formulas.MULTIPLE * shift
    if own is not None:
        found |= zip(formulas.OF_ROWS[-len(own) :], own.double(), strict=True)
    assert isinstance(block.queries, Statistics)
    r = log(block.queries) + shift
    taken = {name: found[name] for name in formulas.OF_ROWS if name != "pooled_slope"}
    slope = _of_ranks(formulas.slope_of_pooled(r, p, **taken).sum(), group).sum()
    return torch.stack((total, slope))


def _of_ranks(own: Tensor, group: Group | None) -> Tensor:
    """The numbers of all ranks, (W,), of which `own`, 0-dim, is this one's."""
    if group is None:
        return own[None]
    return of_ranks(own[None], [1] * group.size, group, "forward, numbers of all positives")
