"""The loss `clip`, derived from its formula.

    z_ij  similarity of query i and key j         x_ij  its logit
    r_i   log-sum-exp of a query's logits
    c_j   log-sum-exp of a key's logits
    p_i   logit of the positive                   M, N  numbers of queries and keys

    x_ij = scale * z_ij + bias, z_ij = q_i . k_j
    r_i = logsumexp_j x_ij
    c_j = logsumexp_i x_ij
    p_i = x_ii
    L = 1/M * (sum_i ((r_i - p_i) / 2) + sum_j ((c_j - p_j) / 2))
    g_ij = 1/M * (0.5 * exp(x_ij - r_i) + 0.5 * exp(x_ij - c_j) - [j = positive(i)])
    dq_i = sum_j g_ij * scale * k_j
    dk_j = sum_i g_ij * scale * q_i
    dscale = sum_ij g_ij * z_ij = 1 / scale * sum_i q_i . dq_i
    dbias = 0
"""

from __future__ import annotations

import torch
from torch import Tensor

# dL/dx_ij = 1/M * (QUERY_SHARE * exp(x_ij - r_i) + KEY_SHARE * exp(x_ij - c_j) + POSITIVE_SHARE * [j = positive(i)])
QUERY_SHARE = 0.5
KEY_SHARE = 0.5
POSITIVE_SHARE = -1.0
POSITIVE_REST = 0.0  # the sum of the three: 0 where a certain positive has no gradient
HAS_KEYS = True  # whether the loss also reduces along the queries of a key
POSITIVES = "diagonal"
DBIAS = 0.0  # dL/dbias of the whole batch
CLASSES = ()  # of pairs, besides positives
DOMAIN = "rectangle"  # of pairs: of a triangle, rows are compared with each other, but not with themselves
VECTORS = ()  # the queries' own numbers
SCALES = ()  # numbers that multiply rows of features


def logit(z: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return scale * z + bias


def dlogit_dz(z: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """dx/dz, without the factor that `gradient_factor` holds."""
    return torch.ones_like(z)


def query_term(r: Tensor, p: Tensor) -> Tensor:
    """A query's part of M * L."""
    return (r - p) / 2


def key_term(c: Tensor, p: Tensor) -> Tensor:
    """A key's part of M * L."""
    return (c - p) / 2


def gradient_factor(scale: Tensor, bias: Tensor) -> Tensor | float:
    """What sum_j M * dL/dx_ij * dlogit_dz(z_ij) * k_j still lacks to be M * dq_i."""
    return scale


def dscale_factor(scale: Tensor, bias: Tensor) -> Tensor | float:
    """M * dL/dscale is this times sum_i q_i . (the sums that `gradient_factor` multiplies)."""
    return 1


def loss_of_logits(x: Tensor) -> Tensor:
    """The loss, 0-dim, from the dense (M, N) logits."""
    r = torch.logsumexp(x, dim=1)
    c = torch.logsumexp(x, dim=0)
    p = x.diagonal()
    return (c - p).mean() / 2 + (r - p).mean() / 2


def reference(
    q: Tensor, k: Tensor, scale: Tensor | float = 1.0, bias: Tensor | float | None = None, *,
    labels: Tensor | None = None, query_ids: Tensor | None = None, key_ids: Tensor | None = None,
    query_weight: Tensor | None = None, key_weight: Tensor | None = None, negatives: Tensor | None = None,
    query_state: Tensor | None = None, key_state: Tensor | None = None,
    query_scale: Tensor | None = None, key_scale: Tensor | None = None,
    guide_queries: Tensor | None = None, guide_keys: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The loss written out densely, in one process, differentiable by autograd: all else is checked against it.

    q       (M, D) queries, any strides and floating dtype; k (N, D) keys.
    scale   a number, or a tensor of one, 0-dim or of shape (1,); bias too, None meaning 0.
    labels  must be None: key i is the positive of query i, so there are as many keys as queries.
    query_ids, key_ids  must be None.
    query_weight        must be None.
    key_weight          must be None.
    negatives           must be None.
    query_state         must be None.
    key_state           must be None.
    query_scale         must be None.
    key_scale           must be None.
    guide_queries, guide_keys  must be None.
    dtype   of the arithmetic and of the result, which is 0-dim.

    Takes the memory of (M, N) logits. Raises ValueError where shapes do not fit.
    """
    if q.dim() != 2 or k.dim() != 2 or q.shape[1] != k.shape[1]:
        raise ValueError(f"expected q (M, D) and k (N, D), got {tuple(q.shape)} and {tuple(k.shape)}")
    if not q.is_floating_point() or not k.is_floating_point():
        raise ValueError(f"expected floating-point features, got {q.dtype} and {k.dtype}")
    if len(q) == 0 or len(k) == 0:
        raise ValueError(f"expected at least one query and one key, got {len(q)} and {len(k)}")
    if labels is not None:
        raise ValueError("this loss takes no labels")
    if len(q) != len(k):
        raise ValueError(f"this loss pairs query i with key i, but there are {len(q)} queries and {len(k)} keys")
    if query_ids is not None or key_ids is not None:
        raise ValueError("this loss takes no query_ids and key_ids")
    if query_weight is not None:
        raise ValueError("this loss takes no query_weight")
    if key_weight is not None:
        raise ValueError("this loss takes no key_weight")
    if negatives is not None:
        raise ValueError("this loss takes no negatives")
    if query_state is not None:
        raise ValueError("this loss takes no query_state")
    if key_state is not None:
        raise ValueError("this loss takes no key_state")
    if query_scale is not None:
        raise ValueError("this loss takes no query_scale")
    if key_scale is not None:
        raise ValueError("this loss takes no key_scale")
    if guide_queries is not None or guide_keys is not None:
        raise ValueError("this loss takes no guide_queries and guide_keys")
    scale = torch.as_tensor(scale, dtype=dtype, device=q.device)
    bias = torch.as_tensor(0.0 if bias is None else bias, dtype=dtype, device=q.device)
    if scale.shape not in ((), (1,)) or bias.shape not in ((), (1,)):
        raise ValueError(f"expected scale and bias of one number, got {tuple(scale.shape)} and {tuple(bias.shape)}")
    z = q.to(dtype) @ k.to(dtype).T
    x = logit(z, scale, bias)
    return loss_of_logits(x)
