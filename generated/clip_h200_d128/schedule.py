"""One device's sweep of clip_h200_d128: which panel is computed when, and by which kernel.

    forward   panels of 16384 queries x 16384 keys -> partial sums -> merged into the statistics
    backward  fused: g never leaves the multiprocessor; one launch for dq, one for dk
"""

from __future__ import annotations

import torch

from . import kernels
from ._runtime.launch import INTERPRETED, cdiv, operands
from ._runtime.statistics import Statistics

STATISTICS_DTYPE = torch.float32
FEATURE_DTYPE = torch.bfloat16
GRADIENT_EXPONENT = 0
DIM = 128
FORWARD_ROWS = 16384  # forward panel
FORWARD_KEYS = 16384
PANEL_ROWS = 65536  # backward panel; on a group of one the query gradient accumulates over this many rows
PANEL_KEYS = 65536
FINISH_ROWS = 32
DESCRIPTORS = True  # tensor descriptors where an input's address and strides allow them, pointers elsewhere


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
    arguments = (q, k, scale, bias, positives, first_key, queries, keys)
    _fused(((kernels.fused_queries, 8, 2), (kernels.fused_queries_wide, 8, 2)), True, *arguments, dq)
    _fused(((kernels.fused_keys, 8, 2), (kernels.fused_keys_wide, 8, 2)), False, *arguments, dk)


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
        num_warps=8, num_stages=3)
    kernels.forward_wide[grid](
        q_side.source, k_side.source, scale, bias, *row_parts, *key_parts, flags, m, n, *strides,
        *q_side[1:], *k_side[1:], DESCRIPTORS=descriptors, WIDEN=INTERPRETED,
        num_warps=16, num_stages=2)


def _merge(parts, statistics, first, rows, count):
    kernels.merge[(cdiv(rows, kernels.VECTOR_ROWS.value),)](
        *parts, statistics.exponent[first:], statistics.mantissa[first:], rows, count, parts.stride(1), num_warps=4)


def _fused(launches, own_queries, q, k, scale, bias, positives, first_key, queries, keys, total):
    m, n = q.shape[0], k.shape[0]
    own, other = (m, n) if own_queries else (n, m)
    own_block = [kernels.FUSED_ROWS.value, kernels.FUSED_DEPTH.value]
    other_block = [kernels.FUSED_KEYS.value, kernels.FUSED_DEPTH.value]
    q_block, k_block = (own_block, other_block) if own_queries else (other_block, own_block)
    q_side, k_side, descriptors = operands(q, q_block, k, k_block, DESCRIPTORS)
    programs = cdiv(own, kernels.FUSED_ROWS.value)
    flags = torch.empty(programs, dtype=torch.int32, device=q.device)
    for kernel, warps, stages in launches:
        kernel[(programs,)](
            q_side.source, k_side.source, positives, first_key, scale, bias, *queries, *keys, total, flags, m, n,
            *q_side[1:], *k_side[1:], MASKED=other % kernels.FUSED_KEYS.value != 0, DESCRIPTORS=descriptors, WIDEN=INTERPRETED,
            num_warps=warps, num_stages=stages)
