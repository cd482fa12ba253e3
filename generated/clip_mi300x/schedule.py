"""One device's sweep of clip_mi300x_d768: which panel is computed when, and by which kernel.

    forward   panels of 16384 queries x 16384 keys -> partial sums -> merged into the statistics
    backward  panels of 16384 queries x 16384 keys of g -> dq += g k, dk += g^T q
"""

from __future__ import annotations

import torch

from . import kernels
from ._runtime.launch import INTERPRETED, cdiv, library_legal, operands
from ._runtime.statistics import Statistics

STATISTICS_DTYPE = torch.float32
FEATURE_DTYPE = torch.bfloat16
GRADIENT_EXPONENT = 0
DIM = 768
FORWARD_ROWS = 16384  # forward panel
FORWARD_KEYS = 16384
PANEL_ROWS = 16384  # backward panel; on a group of one the query gradient accumulates over this many rows
PANEL_KEYS = 16384
FINISH_ROWS = 32
DESCRIPTORS = False  # tensor descriptors where an input's address and strides allow them, pointers elsewhere
LIBRARY_PRODUCTS = False


def stash_shape(m, n):
    """Shape of what the forward keeps for the backward, in the features' dtype, or None."""
    return None


def forward_block(q, k, scale, bias, positives, first_key, queries, keys, positive_z, stash=None):
    """Merges every logit of q (m, D) x k (n, D) into `queries` and `keys`, and notes z of the positives found here.

    scale, bias: 0-dim fp32 on the device.  positives: global key index of row 0's positive; row i's is i further.
    first_key: global index of k's first row.  queries, keys: Statistics, merged in place.  positive_z (m,) fp32.
    """
    m, n = q.shape[0], k.shape[0]
    rows_max, keys_max = min(m, FORWARD_ROWS), min(n, FORWARD_KEYS)
    key_blocks = cdiv(keys_max, kernels.FORWARD_KEYS.value)
    row_blocks = cdiv(rows_max, kernels.FORWARD_ROWS.value)
    row_parts = torch.empty(2, key_blocks, rows_max, dtype=torch.float32, device=q.device)
    key_parts = torch.empty(2, row_blocks, keys_max, dtype=torch.float32, device=q.device)
    flags = torch.empty(row_blocks * key_blocks, dtype=torch.int32, device=q.device)
    for row0 in range(0, m, FORWARD_ROWS):
        q_panel = q[row0 : row0 + FORWARD_ROWS]
        for key0 in range(0, n, FORWARD_KEYS):
            k_panel = k[key0 : key0 + FORWARD_KEYS]
            _forward_panel(q_panel, k_panel, scale, bias, row_parts, key_parts, flags)
            _merge(row_parts, queries, row0, q_panel.shape[0], cdiv(k_panel.shape[0], kernels.FORWARD_KEYS.value))
            _merge(key_parts, keys, key0, k_panel.shape[0], cdiv(q_panel.shape[0], kernels.FORWARD_ROWS.value))
    kernels.positives[(cdiv(m, kernels.POSITIVE_ROWS.value),)](
        q, k, positives, first_key, positive_z, m, n, *q.stride(), *k.stride(), WIDEN=INTERPRETED,
        num_warps=4, num_stages=2)


def loss_terms(queries, keys, positive_z, scale, bias, query_weight, key_weight):
    """query_weight * sum of the query terms + key_weight * sum of the key terms: 0-dim fp32."""
    loss = torch.empty((), dtype=torch.float32, device=positive_z.device)
    kernels.loss_terms[(1,)](
        *queries, *keys, positive_z, scale, bias, loss, queries.exponent.shape[0], keys.exponent.shape[0],
        query_weight, key_weight, BLOCK=1024, num_warps=8)
    return loss


def backward_block(q, k, scale, bias, positives, first_key, queries, keys, positive_z, dq, dk, stash=None):
    """Adds sum_j g_ij k_j to dq (m, D) and sum_i g_ij q_i to dk (n, D), both fp32 and contiguous; g is unweighted."""
    m, n = q.shape[0], k.shape[0]
    scratch = torch.empty(min(m, PANEL_ROWS), _padded(min(n, PANEL_KEYS)), dtype=FEATURE_DTYPE, device=q.device)
    flags = torch.empty(
        cdiv(scratch.shape[0], kernels.GRADIENT_ROWS.value) * cdiv(scratch.shape[1], kernels.GRADIENT_KEYS.value),
        dtype=torch.int32, device=q.device)
    for row0 in range(0, m, PANEL_ROWS):
        rows = slice(row0, min(row0 + PANEL_ROWS, m))
        own = Statistics(queries.exponent[rows], queries.mantissa[rows])
        for key0 in range(0, n, PANEL_KEYS):
            columns = slice(key0, min(key0 + PANEL_KEYS, n))
            visiting = Statistics(keys.exponent[columns], keys.mantissa[columns])
            g = _gradient_panel(
                q[rows], k[columns], scale, bias, positives + row0, first_key + key0, own, visiting,
                positive_z[rows], scratch, flags)
            _add_product(dq[rows], g, k[columns])
            _add_product(dk[columns], g.T, q[rows])


def finish(total, x, scale, bias, upstream, weight, out, dots=None):
    """out (m, D) = upstream * weight * (scale) * total in the features' dtype; dots[b] = sum of x . total over FINISH_ROWS rows."""
    kernels.finish[(cdiv(total.shape[0], FINISH_ROWS),)](
        total, x, out, dots, scale, bias, upstream, weight * 2.0**-GRADIENT_EXPONENT, total.shape[0], *x.stride(), DOTS=dots is not None,
        num_warps=4)


def _forward_panel(q, k, scale, bias, row_parts, key_parts, flags):
    m, n = q.shape[0], k.shape[0]
    rows, columns = kernels.FORWARD_ROWS.value, kernels.FORWARD_KEYS.value
    depth = kernels.FORWARD_DEPTH.value
    q_side, k_side, descriptors = operands(q, [rows, depth], k, [columns, depth], DESCRIPTORS)
    grid = (cdiv(m, rows) * cdiv(n, columns),)
    strides = (row_parts.stride(1), key_parts.stride(1))
    kernels.forward[grid](
        q_side.source, k_side.source, scale, bias, *row_parts, *key_parts, flags, m, n, *strides,
        *q_side[1:], *k_side[1:], MASKED=m % rows != 0 or n % columns != 0, DESCRIPTORS=descriptors, WIDEN=INTERPRETED,
        num_warps=8, num_stages=2)
    kernels.forward_wide[grid](
        q_side.source, k_side.source, scale, bias, *row_parts, *key_parts, flags, m, n, *strides,
        *q_side[1:], *k_side[1:], DESCRIPTORS=descriptors, WIDEN=INTERPRETED,
        num_warps=16, num_stages=2)


def _merge(parts, statistics, first, rows, count):
    kernels.merge[(cdiv(rows, kernels.VECTOR_ROWS.value),)](
        *parts, statistics.exponent[first:], statistics.mantissa[first:], rows, count, parts.stride(1), num_warps=4)


def _gradient_panel(q, k, scale, bias, positives, first_key, queries, keys, positive_z, scratch, flags):
    """g (m, n) of one panel, in the scratch."""
    m, n = q.shape[0], k.shape[0]
    rows, columns = kernels.GRADIENT_ROWS.value, kernels.GRADIENT_KEYS.value
    depth = kernels.GRADIENT_DEPTH.value
    q_side, k_side, descriptors = operands(q, [rows, depth], k, [columns, depth], DESCRIPTORS)
    grid = (cdiv(m, rows) * cdiv(n, columns),)
    statistics = (*queries, *keys)
    kernels.gradient[grid](
        q_side.source, k_side.source, scale, bias, *statistics, scratch, flags, m, n, scratch.stride(0),
        *q_side[1:], *k_side[1:], MASKED=m % rows != 0 or n % columns != 0, DESCRIPTORS=descriptors, WIDEN=INTERPRETED,
        num_warps=8, num_stages=2)
    kernels.gradient_wide[grid](
        q_side.source, k_side.source, scale, bias, *statistics, scratch, flags, m, n, scratch.stride(0),
        *q_side[1:], *k_side[1:], DESCRIPTORS=descriptors, WIDEN=INTERPRETED,
        num_warps=16, num_stages=2)
    kernels.gradient_positives[(cdiv(m, kernels.VECTOR_ROWS.value),)](
        positives, first_key, positive_z, scale, bias, *statistics, scratch, m, n, scratch.stride(0), num_warps=4)
    return scratch[:m, :n]


def _add_product(total, g, x):
    """total (rows, D) += g (rows, inner) x (inner, D)."""
    if LIBRARY_PRODUCTS and total.is_cuda and library_legal(x):
        torch.addmm(total, g, x, out_dtype=torch.float32, out=total)
        return
    grid = (cdiv(total.shape[0], kernels.PRODUCT_ROWS.value), cdiv(DIM, kernels.PRODUCT_KEYS.value))
    kernels.product[grid](
        g, x, total, total.shape[0], g.shape[1], *g.stride(), *x.stride(), WIDEN=INTERPRETED,
        num_warps=8, num_stages=2)


def _padded(columns):
    """Columns of the scratch: rows of g start on 16-byte boundaries, as the matrix library likes them."""
    return cdiv(columns, 16) * 16
