"""clip_h200_d768: a contrastive loss that never stores the 65536 x 65536 similarity matrix.

    x_ij = scale * z_ij + bias, z_ij = q_i . k_j
    L = 1/M * (sum_i ((r_i - p_i) / 2) + sum_j ((c_j - p_j) / 2))

Planned for batches of up to 65536 queries and 65536 keys of D = 768 (bf16) on 1 device
of the kind h200, strategy `panel`, at most 984.1 MiB on each beyond the inputs.
Any smaller batch runs as well, with no more memory. So does a ring of any number of ranks, but it needs room for
visiting keys, which `--devices` plans.

    ContrastiveLoss    a module with the arguments and results of open_clip's ClipLoss
    contrastive_loss   the loss as a differentiable function
    loss_and_grads     the loss and its gradients, without an autograd graph
    reference          the same loss, dense: for tests and small batches
    selftest           compares the kernels with `reference` on this machine
    SPEC               what was generated, and for what

How to read it: loss.py is the derived mathematics, kernels.py computes tiles, schedule.py says in which
order one device sweeps its tiles, _runtime/ is the ring between devices and the glue to autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import loss as _loss
from . import schedule as _schedule
from ._runtime import api as _api
from .loss import reference
from .spec import SPEC

__all__ = ["SPEC", "ContrastiveLoss", "contrastive_loss", "loss_and_grads", "reference", "selftest"]

_package = _api.bind(SPEC, _loss, _schedule)


class ContrastiveLoss(_api.ContrastiveLoss):
    """The loss of a global batch as a module, with the arguments and results of open_clip's ClipLoss:
    `ContrastiveLoss(group=None)(image_features, text_features, logit_scale, logit_bias=None, *, labels=None,
    query_ids=None, key_ids=None, query_weight=None, key_weight=None, negatives=None, query_state=None,
    key_state=None, query_scale=None, key_scale=None, guide_queries=None, guide_keys=None)`.

    group, grad_sync, check_ranks as for `contrastive_loss`. The remaining arguments are those of open_clip, in its
    order. rank and world_size, if given, must be the group's. local_loss, gather_with_grad and cache_labels are
    accepted and have no effect (nothing is gathered, gradients are always exact, positives need no label tensor).
    use_horovod is refused.
    The result is the loss (0-dim), or {"contrastive_loss": loss} with output_dict.
    """

    _package = _package


def contrastive_loss(
    q: Tensor, k: Tensor, scale: Tensor | float = 1.0, bias: Tensor | float | None = None, *,
    labels: Tensor | str | None = None, query_ids: Tensor | None = None, key_ids: Tensor | None = None,
    query_weight: Tensor | None = None, key_weight: Tensor | None = None, negatives: Tensor | None = None,
    query_state: Tensor | None = None, key_state: Tensor | None = None,
    query_scale: Tensor | None = None, key_scale: Tensor | None = None,
    guide_queries: Tensor | None = None, guide_keys: Tensor | None = None,
    group: Any = None, grad_sync: str = "mean", reduction: str = "mean", check_ranks: str = "first",
) -> Tensor:
    """The loss of the batch that the group's ranks hold together, 0-dim; differentiable in q, k, scale and bias.

    q            (M, D) queries of this rank and k (N, D) keys, any strides. Features of bf16, fp16 and fp32 are cast
                 to the package's dtype; gradients have the features' own dtype, not rounded in between. M and N
                 differ between ranks as they like, and may be 0.
    scale, bias  numbers, or tensors of one, 0-dim or of shape (1,). A host tensor with a device batch makes
                 backward wait for the device.
    labels       None: query i and key i of the group are a pair, so that its ranks together have as many of both.
    query_ids    int64 (M,) and key_ids int64 (N,) of a loss that tells apart pairs of one id, on the device of q;
                 else None.
    query_weight  (M,) of a loss with weights of queries, key_weight (N,) of one with weights of keys, and negatives
                 (M, H, D), H further keys of each query that no other sees, of a loss with them, or (M / 2, H, D), of
                 the first rows of its pairs; floating-point, on the device of q. All have gradients.
    query_state  (M,) of a loss with a state of queries, key_state (N,) of one with a state of keys, fp32 or fp64, on
                 the device of q. The next states are written into them; they have no gradients.
    query_scale  (M,) and key_scale (N,) of a loss with scales of single queries or keys, 1 / temperature; the same.
    guide_queries  (M, D) and guide_keys (N, D) of a loss with a guide, any strides, of the package's dtype, on the
                 device of q. They have no gradients.
    group        a ProcessGroup, a 1-D DeviceMesh, or None: the default group if there is one, else this device.
    grad_sync    "mean": gradients are right after averaging over the ranks (DDP, FSDP); "sum": after summing.
    reduction    "mean"; "sum": M times as much; "none", in a package of a LossSpec(reduction="none"): the loss of each
                 query of this rank, (M,), in the dtype of the statistics, whatever grad_sync is.
    check_ranks  "never": ranks are not compared, except that all are in the same call. Else every call compares
                 package, versions and arguments (they travel with the sizes); labels on a device are looked at on
                 "first" use, or "always".

    Raises TypeError or ValueError for wrong arguments, RuntimeError on every rank where ranks disagree.
    """
    options = _api.options_of(group, grad_sync, reduction, check_ranks)
    own = query_weight, key_weight, negatives, query_state, key_state, query_scale, key_scale
    return _api.differentiable_loss(
        _package, q, k, scale, bias, own, labels, query_ids, key_ids, guide_queries, guide_keys, options
    )


def loss_and_grads(
    q: Tensor, k: Tensor, scale: Tensor | float = 1.0, bias: Tensor | float | None = None, *,
    labels: Tensor | str | None = None, query_ids: Tensor | None = None, key_ids: Tensor | None = None,
    query_weight: Tensor | None = None, key_weight: Tensor | None = None, negatives: Tensor | None = None,
    query_state: Tensor | None = None, key_state: Tensor | None = None,
    query_scale: Tensor | None = None, key_scale: Tensor | None = None,
    guide_queries: Tensor | None = None, guide_keys: Tensor | None = None,
    group: Any = None, grad_sync: str = "mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, dq (M, D), dk (N, D), dscale, dbias), without an autograd graph: dq and dk in the features' dtype, the
    others 0-dim. Arguments as for `contrastive_loss`; None as bias is 0."""
    options = _api.options_of(group, grad_sync)
    own = query_weight, key_weight, negatives, query_state, key_state, query_scale, key_scale
    return _api.loss_and_grads(
        _package, q, k, scale, bias, own, labels, query_ids, key_ids, guide_queries, guide_keys, options
    )


def selftest(device: torch.device | str | None = None) -> dict[str, Any]:
    """Runs small batches on one device against `reference` in fp64.

    Returns {"ok": bool, "package", "device", "dtype", "repeatable": bool, "cases": [...]}; a case names its sizes and
    scale, and for loss, dq, dk, dscale, dbias has the relative norm error and the largest one allowed.
    """
    return _api.selftest(_package, device)
