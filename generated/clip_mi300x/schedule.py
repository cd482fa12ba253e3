"""One device's sweep of clip_mi300x_d768: which panel is computed when, and by which kernel.

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
POSITIVE_PARTS = 3  # what is kept of each query's positive: z, and the reference of its row and of its column in the sums
FORWARD_ROWS = 32768  # forward panel
FORWARD_KEYS = 32768
PANEL_ROWS = 16384  # backward panel; on a group of one the query gradient accumulates over this many rows
PANEL_KEYS = 16384
FINISH_ROWS = 16
LOSS_ROWS = 1024  # queries, and keys, that one program takes the terms of
FORWARD_STRIPS = 16  # at most, for each block of keys
FORWARD_PROGRAMS = 304  # that run at once
GRADIENT_STRIPS = 32
GRADIENT_PROGRAMS = 304
DESCRIPTORS = False  # tensor descriptors where an input's address and strides allow them, pointers elsewhere
LIBRARY_PRODUCTS = False


class ForwardScratch(NamedTuple):
    """What a forward panel is computed in."""

    row_parts: tuple[Tensor, Tensor]  # exponents and sums (key blocks, rows)
    key_parts: tuple[Tensor, Tensor]  # the same (strips, keys)
    reference: Tensor  # of each block of keys
    flags: Tensor  # of each strip, whether its range is wide


class BackwardScratch(NamedTuple):
    """What backward blocks are computed in."""

    g: Tensor  # of a panel, in whole tiles: no store needs a mask
    flags: Tensor  # of each strip, whether its range is wide
    ratios: Tensor  # see `_ratios`


def stash_shape(m, n):
    """Shape of what the forward keeps for the backward, in the features' dtype, or None."""
    return None


def start_forward(q, k, scale, bias, most_keys, stash=None):
    """What a `forward_block` with these arguments takes as `started`: its scratch, which later blocks of up to `most_keys`
    keys may use, and its first panel, which is at work there."""
    scratch = _forward_scratch(q, most_keys)
    return scratch, _forward_panel(q, k, 0, 0, scale, bias, scratch)


def forward_block(q, k, scale, bias, positives, first_key, queries, keys, positive, fresh_queries=False, fresh_keys=False, stash=None, arrive=None, started=None):
    """Merges every logit of q (m, D) x k (n, D) into `queries` and `keys`, and notes the positives found here.

    scale, bias: 0-dim fp32 on the device.  positives: global key index of row 0's positive; row i's is i further.
    first_key: global index of k's first row.  queries, keys: Statistics, merged in place.  positive (POSITIVE_PARTS, m) fp32.
    What is fresh was never written.  arrive(): called behind the first launches and before `keys` is touched; it sends
    what leaves, and waits for what comes.  started: what `start_forward` gave; (its scratch, None) for a later block.
    """
    m, n = q.shape[0], k.shape[0]
    scratch, first_panel = started or (_forward_scratch(q, n), None)
    row_parts, key_parts = scratch.row_parts, scratch.key_parts
    for row0 in range(0, m, FORWARD_ROWS):
        own, own_positive = queries.panel(row0, FORWARD_ROWS), panel_columns(positive, row0, FORWARD_ROWS)
        for key0 in range(0, n, FORWARD_KEYS):
            q_panel, k_panel, strip = first_panel or _forward_panel(q, k, row0, key0, scale, bias, scratch)
            first_panel = None
            visiting = keys.panel(key0, FORWARD_KEYS)
            if arrive:
                arrive()
            _merge(q_panel.shape[0], k_panel.shape[0], strip, row_parts, own, fresh_queries and key0 == 0, key_parts, visiting, fresh_keys and row0 == 0)
            first = positives + row0 - first_key - key0  # the positive of the panel's first row, as a row of its keys
            if first < k_panel.shape[0] and first + q_panel.shape[0] > 0:
                _positives(q_panel, k_panel, positives + row0, first_key + key0, strip, row_parts, key_parts, own_positive)


def loss_terms(queries, keys, positive, scale, bias, query_weight, key_weight):
    """query_weight * sum of the query terms + key_weight * sum of the key terms: 0-dim fp32."""
    loss = torch.empty((), dtype=torch.float32, device=positive.device)
    m, n = queries.exponent.shape[0], keys.exponent.shape[0]
    parts = max(1, cdiv(max(m, n), LOSS_ROWS))
    part_sums = loss if parts == 1 else torch.empty(parts, dtype=torch.float64, device=positive.device)
    launch(
        kernels.loss_terms, (parts,),
        *queries, *keys, *positive, scale, bias, part_sums, m, n, query_weight, key_weight, BLOCK=LOSS_ROWS,
        num_warps=16)
    if parts > 1:
        launch(kernels.total_loss, (1,), part_sums, loss, parts, BLOCK=1024, num_warps=4)
    return loss


def backward_block(q, k, scale, bias, positives, first_key, queries, keys, positive, dq, dk, fresh_dq=False, fresh_dk=False, stash=None, arrive=None, scratch=None):
    """Adds sum_j g_ij k_j to dq (m, D) and sum_i g_ij q_i to dk (n, D), both fp32 and contiguous; g is unweighted.

    What is fresh was never written: the first sums replace what it holds. arrive(): called before `dk` is touched.
    scratch: what `backward_scratch` gave for at least as many rows and keys.
    """
    m, n = q.shape[0], k.shape[0]
    g, flags, ratios = scratch or backward_scratch(m, n, q.device)
    block = kernels.GRADIENT_KEYS.value
    ratios = _ratios(keys, kernels.KEY_SHARE.value, block, ratios)
    for row0 in range(0, m, PANEL_ROWS):
        own, own_positive = queries.panel(row0, PANEL_ROWS), panel_columns(positive, row0, PANEL_ROWS)
        own_dq = panel(dq, row0, PANEL_ROWS)
        q_panel = panel(q, row0, PANEL_ROWS)
        for key0 in range(0, n, PANEL_KEYS):
            k_panel = panel(k, key0, PANEL_KEYS)
            visiting = keys.panel(key0, PANEL_KEYS)
            # One number a key, and two a block of keys.
            visiting_ratios = [part[key0 // size :] for part, size in zip(ratios, (1, block, block))] if key0 else ratios
            panel_g = _gradient_panel(
                q_panel, k_panel, scale, bias, positives + row0, first_key + key0, own, visiting,
                own_positive, g, flags, visiting_ratios)
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
    flags = torch.empty(min(tiles[0], GRADIENT_STRIPS) * tiles[1], dtype=torch.int32, device=device)
    ratios = _ratios_scratch(keys, kernels.GRADIENT_KEYS.value, device)
    return BackwardScratch(g, flags, ratios)


def finish(total, x, scale, bias, upstream, weight, out, dots=None):
    """out (m, D) = upstream * weight * (scale) * total in the features' dtype; dots[b] = sum of x . total over FINISH_ROWS rows."""
    launch(
        kernels.finish, (cdiv(total.shape[0], FINISH_ROWS),),
        total, x, out, dots, scale, bias, upstream, weight * 2.0**-GRADIENT_EXPONENT, total.shape[0], *x.stride(), DOTS=dots is not None,
        num_warps=4)


def scalar_gradients(dots, scale, bias, upstream, weight, rows):
    """(dscale, dbias), 0-dim fp32, from the dots of `finish` over all rows."""
    dscale, dbias = (torch.empty((), dtype=torch.float32, device=dots.device) for _ in range(2))
    launch(
        kernels.scalars, (1,),
        dots, dscale, dbias, scale, bias, upstream, weight, dots.shape[0], rows, BLOCK=1024, num_warps=4)
    return dscale, dbias


def _forward_scratch(q, most_keys):
    """What forward panels of q and up to so many keys are computed in."""
    rows_max, keys_max = min(q.shape[0], FORWARD_ROWS), min(most_keys, FORWARD_KEYS)
    key_blocks = cdiv(keys_max, kernels.FORWARD_KEYS.value)
    row_parts = torch.empty(2, key_blocks, rows_max, dtype=torch.float32, device=q.device).unbind()
    strips = min(cdiv(rows_max, kernels.FORWARD_ROWS.value), FORWARD_STRIPS)
    key_parts = torch.empty(2, strips, keys_max, dtype=torch.float32, device=q.device).unbind()
    flags = torch.empty(strips * key_blocks, dtype=torch.int32, device=q.device)
    reference = torch.empty(key_blocks, dtype=torch.float32, device=q.device)
    return ForwardScratch(row_parts, key_parts, reference, flags)


def _forward_panel(q, k, row0, key0, scale, bias, scratch):
    """Starts the partial sums of one panel. Returns its queries and keys, and the row blocks of a strip."""
    row_parts, key_parts, reference, flags = scratch
    q, k = panel(q, row0, FORWARD_ROWS), panel(k, key0, FORWARD_KEYS)
    m, n = q.shape[0], k.shape[0]
    rows, columns = kernels.FORWARD_ROWS.value, kernels.FORWARD_KEYS.value
    depth = kernels.FORWARD_DEPTH.value
    strip = strip_blocks(cdiv(m, rows), cdiv(n, columns), FORWARD_STRIPS, FORWARD_PROGRAMS)
    q_side, k_side, descriptors = operands(q, [rows, depth], k, [columns, depth], DESCRIPTORS)
    grid = (cdiv(n, columns) * cdiv(cdiv(m, rows), strip),)
    strides = (row_parts[0].stride(0), key_parts[0].stride(0))
    launch(
        kernels.references, (cdiv(n, columns),),
        q, k, scale, bias, reference, m, n, *q.stride(), *k.stride(), WIDEN=INTERPRETED,
        num_warps=8, num_stages=2)
    launch(
        kernels.forward, grid,
        q_side.source, k_side.source, scale, bias, reference, *row_parts, *key_parts, flags, m, n, strip, *strides,
        *q_side[1:], *k_side[1:], MASKED=m % rows != 0 or n % columns != 0, DESCRIPTORS=descriptors, WIDEN=INTERPRETED,
        num_warps=8, num_stages=2)
    launch(
        kernels.forward_wide, grid,
        q, k, scale, bias, *row_parts, *key_parts, flags, m, n, strip, *strides,
        *q.stride(), *k.stride(), WIDEN=INTERPRETED,
        num_warps=8, num_stages=2)
    return q, k, strip


def _merge(m, n, strip, row_parts, queries, fresh_queries, key_parts, keys, fresh_keys):
    """Adds the partial sums of one panel to the statistics of its m queries and n keys."""
    programs = cdiv(m, kernels.MERGE_ROWS.value) + cdiv(n, kernels.MERGE_ROWS.value)
    launch(
        kernels.merge, (programs,),
        *row_parts, *queries, m, cdiv(n, kernels.FORWARD_KEYS.value), row_parts[0].stride(0), 0 if fresh_queries else m,
        *key_parts, *keys, n, cdiv(cdiv(m, kernels.FORWARD_ROWS.value), strip), key_parts[0].stride(0), 0 if fresh_keys else n,
        num_warps=4)


def _positives(q, k, positives, first_key, strip, row_parts, key_parts, positive):
    m, n = q.shape[0], k.shape[0]
    launch(
        kernels.positives, (cdiv(m, kernels.POSITIVE_ROWS.value),),
        q, k, positives, first_key, row_parts[0], key_parts[0], *positive, m, n, strip, row_parts[0].stride(0), key_parts[0].stride(0),
        *q.stride(), *k.stride(), WIDEN=INTERPRETED, num_warps=4, num_stages=2)


def _ratios_scratch(rows, block, device):
    """Room for `_ratios` of `rows` rows: a ratio each, to whole blocks, and two numbers for each block."""
    return torch.empty(cdiv(rows, block) * (block + 2), dtype=torch.float32, device=device)


def _ratios(statistics, share, block, scratch):
    """(ratio (rows, to whole blocks), reference (blocks,), lowest (blocks,)) of these rows, in the scratch."""
    rows = statistics.exponent.shape[0]
    blocks = cdiv(rows, block)
    parts = panel(scratch, 0, blocks * (block + 2)).split((blocks * block, blocks, blocks))
    launch(kernels.ratios, (blocks,), *statistics, *parts, rows, SHARE=share, ROWS=block, num_warps=4)
    return parts


def _gradient_panel(q, k, scale, bias, positives, first_key, queries, keys, positive, g, flags, ratios):
    """g (m, n) of one panel, in the corner of the buffer `g`."""
    m, n = q.shape[0], k.shape[0]
    rows, columns = kernels.GRADIENT_ROWS.value, kernels.GRADIENT_KEYS.value
    depth = kernels.GRADIENT_DEPTH.value
    strip = strip_blocks(cdiv(m, rows), cdiv(n, columns), GRADIENT_STRIPS, GRADIENT_PROGRAMS)
    q_side, k_side, descriptors = operands(q, [rows, depth], k, [columns, depth], DESCRIPTORS)
    grid = (cdiv(n, columns) * cdiv(cdiv(m, rows), strip),)
    statistics = (*queries, *keys)
    launch(
        kernels.gradient, grid,
        q_side.source, k_side.source, scale, bias, *queries, *ratios, g, flags, m, n, strip, g.stride(0),
        *q_side[1:], *k_side[1:], DESCRIPTORS=descriptors, WIDEN=INTERPRETED,
        num_warps=8, num_stages=2)
    launch(
        kernels.gradient_wide, grid,
        q, k, scale, bias, *statistics, g, flags, m, n, strip, g.stride(0),
        *q.stride(), *k.stride(), WIDEN=INTERPRETED,
        num_warps=8, num_stages=2)
    first = positives - first_key  # the positive of the first row, as a row of these keys
    if first < n and first + m > 0:
        launch(
            kernels.gradient_positives, (cdiv(m, kernels.VECTOR_ROWS.value),),
            positives, first_key, *positive, scale, bias, *statistics, g, m, n, g.stride(0), num_warps=4)
    return g if g.shape == (m, n) else g[:m, :n]


def _add_product(total, g, x, fresh):
    """total (rows, D) += g (rows, inner) x (inner, D); with `fresh`, total holds nothing yet."""
    if LIBRARY_PRODUCTS and total.is_cuda and library_legal(x):
        torch.addmm(total, g, x, beta=0 if fresh else 1, out_dtype=torch.float32, out=total)
        return
    grid = (cdiv(total.shape[0], kernels.PRODUCT_ROWS.value), cdiv(DIM, kernels.PRODUCT_KEYS.value))
    launch(
        kernels.product, grid,
        g, x, total, total.shape[0], g.shape[1], *g.stride(), *x.stride(), FRESH=fresh, WIDEN=INTERPRETED,
        num_warps=8, num_stages=2)
