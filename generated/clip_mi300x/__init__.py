"""clip_mi300x_d768: a contrastive loss that never stores the 65536 x 65536 similarity matrix.

    x_ij = scale * z_ij + bias, z_ij = q_i . k_j
    L = 1/M * (sum_i ((r_i - p_i) / 2) + sum_j ((c_j - p_j) / 2))

Planned for batches of up to 65536 queries and 65536 keys of D = 768 (bf16) on 1 device
of the kind mi300x, strategy `panel`, at most 951.1 MiB on each beyond the inputs.
Any smaller batch runs as well, with no more memory. So does a ring of any number of ranks, but it needs room for
visiting keys, which `--devices` plans.

    ContrastiveLoss    a module with the arguments and results of open_clip's ClipLoss
    contrastive_loss   the loss as a differentiable function
    loss_and_grads     the loss and its gradients, without an autograd graph
    reference          the same loss, dense: for tests and small batches
    selftest           compares the kernels with `reference` on this machine
    SPEC               what was generated, and for what

How to read it: loss.py is the derived mathematics, kernels.py computes tiles, schedule.py says in which order one
device sweeps its tiles, _runtime/ is the ring between devices and the glue to autograd.
"""

from . import loss as _loss
from . import schedule as _schedule
from ._runtime.api import build_api
from .spec import SPEC

__all__ = ["SPEC", "ContrastiveLoss", "contrastive_loss", "loss_and_grads", "reference", "selftest"]

_api = build_api(SPEC, _loss, _schedule)

ContrastiveLoss = _api.ContrastiveLoss
contrastive_loss = _api.contrastive_loss
loss_and_grads = _api.loss_and_grads
reference = _loss.reference
selftest = _api.selftest
