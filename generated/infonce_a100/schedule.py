"""One device's sweep of infonce_a100_d768: which panel is computed when, and by which kernel.

    forward   panels of 32768 queries x 32768 keys -> partial sums -> merged into the statistics
    backward  panels of 16384 queries x 16384 keys of g -> dq += g k, dk += g^T q
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels
from ._runtime.launch import INTERPRETED, launch, library_legal, operands, panel, panel_columns
from ._runtime.strips import cdiv, strip_blocks

STATISTICS_DTYPE = torch.float32
OPERAND_DTYPE = torch.bfloat16  # of what is multiplied
GRADIENT_EXPONENT = 0
DIM = 768
POSITIVE_PARTS = 2  # what is kept of each query's positive: z, and the reference of its row in the sums
FORWARD_ROWS = 32768  # forward panel
FORWARD_KEYS = 32768
PANEL_ROWS = 16384  # backward panel; on a group of one the query gradient accumulates over this many rows
PANEL_KEYS = 16384
FINISH_ROWS = 16
LOSS_ROWS = 1024  # queries, and keys, that one program takes the terms of
FORWARD_STRIPS = 16  # at most, for each block of keys
FORWARD_PROGRAMS = 108  # that run at once
GRADIENT_STRIPS = 32
GRADIENT_PROGRAMS = 108
DESCRIPTORS = False  # tensor descriptors where an input's address and strides allow them, pointers elsewhere
LIBRARY_PRODUCTS = True
LIBRARY_MULTIPLE = 8  # of keys in a library product: others run on kernels for old GPUs, up to 6 times as slow


class ForwardScratch(NamedTuple):
    """What a forward panel is computed in."""

    row_parts: tuple[Tensor, Tensor]  # exponents and sums (key blocks, rows)
    reference: Tensor  # of each block of keys
    flags: Tensor  # of each strip, whether its range is wide


class BackwardScratch(NamedTuple):
    """What backward blocks are computed in."""

    g: Tensor  # of a panel, in whole tiles: no store needs a mask


def stash_shape(m, n):
    """Shape of what the forward keeps for the backward, in the features' dtype, or None."""
    return None


def forward_block(q, k, scale, bias, positives, first_key, queries, keys, positive, fresh_queries=False, fresh_keys=False, stash=None, arrive=None, scratch=None):
    """Merges every logit of q (m, D) x k (n, D) into `queries`, and notes the positives found here.

    scale, bias: 0-dim fp32 on the device.  positives: (m,) int64 global key indices.
    first_key: global index of k's first row.  queries, keys: Statistics, merged in place.  positive (POSITIVE_PARTS, m) fp32.
    What is fresh was never written.  arrive(): called behind the first launches and before `keys` is touched; it sends
    what leaves, and waits for what comes.  scratch: what `forward_scratch` gave for at least as many rows and keys.
    """
    m, n = q.shape[0], k.shape[0]
    scratch = scratch or forward_scratch(q, n)
    row_parts = scratch.row_parts
    for row0 in range(0, m, FORWARD_ROWS):
        own, own_positive = queries.panel(row0, FORWARD_ROWS), panel_columns(positive, row0, FORWARD_ROWS)
        for key0 in range(0, n, FORWARD_KEYS):
            q_panel, k_panel, strip = _forward_panel(q, k, row0, key0, scale, bias, scratch)
            if arrive:
                arrive()
            _merge(q_panel.shape[0], k_panel.shape[0], strip, row_parts, own, fresh_queries and key0 == 0)
            _positives(q_panel, k_panel, panel(positives, row0, FORWARD_ROWS), first_key + key0, strip, row_parts, own_positive)


def loss_terms(queries, keys, positive, scale, bias, query_weight, key_weight):
    """query_weight * sum of the query terms: 0-dim fp32."""
    loss = torch.empty((), dtype=torch.float32, device=positive.device)
    m = queries.exponent.shape[0]
    parts = max(1, cdiv(m, LOSS_ROWS))
    part_sums = loss if parts == 1 else torch.empty(parts, dtype=torch.float64, device=positive.device)
    positive = positive.unbind()
    launch(kernels.loss_terms, (parts,), query_exponent=queries.exponent, query_mantissa=queries.mantissa,
        positive_z=positive[0], positive_row_reference=positive[1], scale_ptr=scale, bias_ptr=bias,
        part_sums=part_sums, queries=m, query_weight=query_weight, BLOCK=LOSS_ROWS, num_warps=16,
        num_stages=1)
    if parts > 1:
        launch(kernels.total_loss, (1,), part_sums=part_sums, loss=loss, parts=parts, BLOCK=1024, num_warps=4,
        num_stages=1)
    return loss


def backward_block(q, k, scale, bias, positives, first_key, queries, keys, positive, dq, dk, fresh_dq=False, fresh_dk=False, stash=None, arrive=None, scratch=None):
    """Adds sum_j g_ij k_j to dq (m, D) and sum_i g_ij q_i to dk (n, D), both fp32 and contiguous; g is unweighted.

    dk may have room behind it, rows up to a multiple of LIBRARY_MULTIPLE, which are overwritten. What is fresh was never written: the first sums replace what it holds. arrive(): called before `dk` is touched.
    scratch: what `backward_scratch` gave for at least as many rows and keys.
    """
    m, n = q.shape[0], k.shape[0]
    g, = scratch or backward_scratch(m, n, q.device)
    for row0 in range(0, m, PANEL_ROWS):
        own, own_positive = queries.panel(row0, PANEL_ROWS), panel_columns(positive, row0, PANEL_ROWS)
        own_dq = panel(dq, row0, PANEL_ROWS)
        q_panel = panel(q, row0, PANEL_ROWS)
        for key0 in range(0, n, PANEL_KEYS):
            k_panel = panel(k, key0, PANEL_KEYS)
            visiting = None
            panel_g = _gradient_panel(
                q_panel, k_panel, scale, bias, panel(positives, row0, PANEL_ROWS), first_key + key0, own, visiting,
                own_positive, g)
            _add_product(own_dq, panel_g, k_panel, fresh_dq and key0 == 0)
            if arrive:
                arrive()
            _add_product(panel(dk, key0, PANEL_KEYS), panel_g.T, q_panel, fresh_dk and row0 == 0)


def backward_scratch(rows, keys, device):
    """What `backward_block`s of up to so many rows and keys are computed in."""
    rows_max, keys_max = min(rows, PANEL_ROWS), min(keys, PANEL_KEYS)
    tiles = cdiv(rows_max, kernels.GRADIENT_ROWS.value), cdiv(keys_max, kernels.GRADIENT_KEYS.value)
    shape = tiles[0] * kernels.GRADIENT_ROWS.value, tiles[1] * kernels.GRADIENT_KEYS.value
    g = torch.empty(shape, dtype=OPERAND_DTYPE, device=device)
    return BackwardScratch(g)


def finish(total, x, scale, bias, upstream, weight, out, dots=None):
    """out (m, D) = upstream * weight * (scale) * total in the features' dtype; dots[b] = sum of x . total over FINISH_ROWS rows."""
    launch(kernels.finish, (cdiv(total.shape[0], FINISH_ROWS),), total=total, x=x, out=out, dots=dots,
        scale_ptr=scale, bias_ptr=bias, upstream=upstream, weight=weight * 2.0**-GRADIENT_EXPONENT,
        rows=total.shape[0], x_row_stride=x.stride(0), x_depth_stride=x.stride(1), DOTS=dots is not None,
        num_warps=4, num_stages=1)


def scalar_gradients(dots, scale, bias, upstream, weight, rows):
    """(dscale, dbias), 0-dim fp32, from the dots of `finish` over all rows."""
    dscale, dbias = (torch.empty((), dtype=torch.float32, device=dots.device) for _ in range(2))
    launch(kernels.scalars, (1,), dots=dots, dscale=dscale, dbias=dbias, scale_ptr=scale, bias_ptr=bias,
        upstream=upstream, weight=weight, parts=dots.shape[0], rows=rows, BLOCK=1024, num_warps=4,
        num_stages=1)
    return dscale, dbias


def forward_scratch(q, most_keys):
    """What forward panels of q and up to so many keys are computed in."""
    rows_max, keys_max = min(q.shape[0], FORWARD_ROWS), min(most_keys, FORWARD_KEYS)
    key_blocks = cdiv(keys_max, kernels.FORWARD_KEYS.value)
    row_parts = torch.empty(2, key_blocks, rows_max, dtype=torch.float32, device=q.device).unbind()
    strips = min(cdiv(rows_max, kernels.FORWARD_ROWS.value), FORWARD_STRIPS)
    flags = torch.empty(strips * key_blocks, dtype=torch.int32, device=q.device)
    reference = torch.empty(key_blocks, dtype=torch.float32, device=q.device)
    return ForwardScratch(row_parts, reference, flags)


def _forward_panel(q, k, row0, key0, scale, bias, scratch):
    """Starts the partial sums of one panel. Returns its queries and keys, and the row blocks of a strip."""
    row_parts, reference, flags = scratch
    q, k = panel(q, row0, FORWARD_ROWS), panel(k, key0, FORWARD_KEYS)
    m, n = q.shape[0], k.shape[0]
    rows, columns = kernels.FORWARD_ROWS.value, kernels.FORWARD_KEYS.value
    strip = strip_blocks(cdiv(m, rows), cdiv(n, columns), FORWARD_STRIPS, FORWARD_PROGRAMS)
    sides = [operands(q, [rows, kernels.FORWARD_DEPTH.value], k, [columns, kernels.FORWARD_DEPTH.value], DESCRIPTORS)]
    q_side, k_side, descriptors = sides[0]
    grid = (cdiv(n, columns) * cdiv(cdiv(m, rows), strip),)
    launch(kernels.references, (cdiv(n, columns),), q=q, k=k, scale_ptr=scale, bias_ptr=bias,
        reference=reference, queries=m, keys=n, q_row_stride=q.stride(0), q_depth_stride=q.stride(1),
        k_row_stride=k.stride(0), k_depth_stride=k.stride(1), WIDEN=INTERPRETED, num_warps=8,
        num_stages=3)
    launch(kernels.forward, grid, q=q_side.source, k=k_side.source, scale_ptr=scale, bias_ptr=bias,
        reference=reference, row_exponent=row_parts[0], row_sum=row_parts[1], flags=flags, queries=m,
        keys=n, strip=strip, rows_stride=row_parts[0].stride(0), q_row_stride=q_side.row_stride,
        q_depth_stride=q_side.depth_stride, k_row_stride=k_side.row_stride,
        k_depth_stride=k_side.depth_stride, MASKED=m % rows != 0 or n % columns != 0,
        DESCRIPTORS=descriptors, WIDEN=INTERPRETED, num_warps=8, num_stages=3)
    launch(kernels.forward_wide, grid, q=q, k=k, scale_ptr=scale, bias_ptr=bias, row_exponent=row_parts[0],
        row_sum=row_parts[1], flags=flags, queries=m, keys=n, strip=strip,
        rows_stride=row_parts[0].stride(0), q_row_stride=q.stride(0), q_depth_stride=q.stride(1),
        k_row_stride=k.stride(0), k_depth_stride=k.stride(1), WIDEN=INTERPRETED, num_warps=8,
        num_stages=2)
    return q, k, strip


def _merge(m, n, strip, row_parts, queries, fresh_queries):
    """Adds the partial sums of one panel to the statistics of its m queries."""
    programs = cdiv(m, kernels.MERGE_ROWS.value)
    launch(kernels.merge, (programs,), row_exponent=row_parts[0], row_sum=row_parts[1],
        query_exponent=queries.exponent, query_mantissa=queries.mantissa, queries=m,
        row_parts=cdiv(n, kernels.FORWARD_KEYS.value), rows_stride=row_parts[0].stride(0),
        queries_written=0 if fresh_queries else m, num_warps=4, num_stages=1)


def _positives(q, k, positives, first_key, strip, row_parts, positive):
    m, n, positive = q.shape[0], k.shape[0], positive.unbind()
    launch(kernels.positives, (cdiv(m, kernels.POSITIVE_ROWS.value),), q=q, k=k, labels=positives,
        first_key=first_key, row_exponent=row_parts[0], positive_z=positive[0],
        positive_row_reference=positive[1], queries=m, keys=n, rows_stride=row_parts[0].stride(0),
        q_row_stride=q.stride(0), q_depth_stride=q.stride(1), k_row_stride=k.stride(0),
        k_depth_stride=k.stride(1), WIDEN=INTERPRETED, num_warps=4, num_stages=2)


def _gradient_panel(q, k, scale, bias, positives, first_key, queries, keys, positive, g):
    """g (m, n) of one panel, in the corner of the buffer `g`."""
    m, n, positive = q.shape[0], k.shape[0], positive.unbind()
    rows, columns = kernels.GRADIENT_ROWS.value, kernels.GRADIENT_KEYS.value
    depth = kernels.GRADIENT_DEPTH.value
    strip = strip_blocks(cdiv(m, rows), cdiv(n, columns), GRADIENT_STRIPS, GRADIENT_PROGRAMS)
    q_side, k_side, descriptors = operands(q, [rows, depth], k, [columns, depth], DESCRIPTORS)
    grid = (cdiv(n, columns) * cdiv(cdiv(m, rows), strip),)
    launch(kernels.gradient, grid, q=q_side.source, k=k_side.source, scale_ptr=scale, bias_ptr=bias,
        query_exponent=queries.exponent, query_mantissa=queries.mantissa, g=g, queries=m, keys=n,
        strip=strip, g_stride=g.stride(0), q_row_stride=q_side.row_stride,
        q_depth_stride=q_side.depth_stride, k_row_stride=k_side.row_stride,
        k_depth_stride=k_side.depth_stride, DESCRIPTORS=descriptors, WIDEN=INTERPRETED, num_warps=8,
        num_stages=3)
    launch(kernels.gradient_positives, (cdiv(m, kernels.VECTOR_ROWS.value),), labels=positives,
        first_key=first_key, positive_z=positive[0], positive_row_reference=positive[1], scale_ptr=scale,
        bias_ptr=bias, query_exponent=queries.exponent, query_mantissa=queries.mantissa, g=g, queries=m,
        keys=n, g_stride=g.stride(0), num_warps=4, num_stages=1)
    return g if g.shape == (m, n) else g[:m, :n]


def _add_product(total, g, x, fresh):
    """total (rows, D) += g (rows, inner) x (inner, D); with `fresh`, total holds nothing yet.

    The library gets keys in multiples of LIBRARY_MULTIPLE. Along g's rows the room behind the sums makes them whole: g's
    buffer has whole tiles. Of its inner extent a kernel adds the rest: first, as sums that are fresh are only written.
    """
    rows, inner = g.shape
    library = LIBRARY_PRODUCTS and library_legal(x)
    whole = inner if g.stride(1) != 1 else inner // LIBRARY_MULTIPLE * LIBRARY_MULTIPLE
    whole = whole if library else 0
    if whole < inner:
        rest_g, rest_x = (g[:, whole:], x[whole:]) if whole else (g, x)
        grid = (cdiv(rows, kernels.PRODUCT_ROWS.value), cdiv(DIM, kernels.PRODUCT_KEYS.value))
        launch(kernels.product, grid, g=rest_g, x=rest_x, total=total, rows=rows, inner=inner - whole,
            g_row_stride=g.stride(0), g_inner_stride=g.stride(1), x_inner_stride=x.stride(0),
            x_depth_stride=x.stride(1), FRESH=fresh, WIDEN=INTERPRETED, num_warps=8, num_stages=3)
        fresh = False
    if whole:
        if total.shape[0] > rows:
            g = g.as_strided((total.shape[0], inner), g.stride())
        torch.addmm(
            total, panel_columns(g, 0, whole), panel(x, 0, whole), beta=0 if fresh else 1, out_dtype=torch.float32, out=total)
