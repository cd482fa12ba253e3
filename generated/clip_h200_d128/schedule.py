"""One device's sweep of clip_h200_d128: which panel is computed when, and by which kernel.

    forward   panels of 32768 queries x 32768 keys -> partial sums -> merged into the statistics
    backward  fused: g never leaves the SM; one launch for dq, one for dk
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from . import kernels
from ._runtime.launch import INTERPRETED, cdiv, launch, operands, panel, strip_blocks

STATISTICS_DTYPE = torch.float32
OPERAND_DTYPE = torch.bfloat16  # of what is multiplied
GRADIENT_EXPONENT = 0  # gradients of logits are kept times 2 to this power
DIM = 128  # of the embedding
POSITIVE_PARTS = 3  # of each query's positive: z, and the references of its sums
FORWARD_ROWS = 32768  # forward panel
FORWARD_KEYS = 32768  # of the same
PANEL_ROWS = 65536  # backward panel; on one device dq accumulates over this many rows
FINISH_ROWS = 16  # of one program
LOSS_ROWS = 1024  # queries, and keys, that one program takes the terms of
LONGEST_STRIP = 64  # row blocks: a program reads its keys once
DESCRIPTORS = True  # tensor descriptors, where address and strides allow them
LIBRARY_MULTIPLE = 1  # no library products
FORWARD_STRIPS = 32  # at most, for each block of keys
FORWARD_PROGRAMS = 264  # that run at once


def forward_scratch(q, most_keys):
    """What forward panels of q and up to so many keys are computed in."""
    rows, keys, device = min(q.shape[0], FORWARD_ROWS), min(most_keys, FORWARD_KEYS), q.device
    tiles = cdiv(rows, kernels.FORWARD_ROWS.value), cdiv(keys, kernels.FORWARD_KEYS.value)
    return SimpleNamespace(
        # exponents and sums (key blocks, rows)
        row_parts=torch.empty(2, tiles[1], rows, dtype=torch.float32, device=device).unbind(),
        # the same (strips, keys)
        key_parts=torch.empty(2, min(tiles[0], FORWARD_STRIPS), keys, dtype=torch.float32, device=device).unbind(),
        # of each block of keys
        reference=torch.empty(tiles[1], dtype=torch.float32, device=device),
        # of each strip, whether its range is wide
        flags=torch.empty(min(tiles[0], FORWARD_STRIPS) * tiles[1], dtype=torch.int32, device=device),
    )


def stash_shape(m, n):
    """The forward keeps no tiles for the backward."""


def forward_block(block, scratch, fresh_queries=False, fresh_keys=False, stash=None, arrive=None):
    """Merges every logit of a `Block` into its statistics, and notes the positives found here.

    scratch: what `forward_scratch` gave for at least as many rows and keys. What is fresh was never written.
    arrive(): called behind the first launches and before `block.keys` is touched; it sends what leaves, and waits for
    what comes.
    """
    for row0 in range(0, block.q.shape[0], FORWARD_ROWS):
        for key0 in range(0, block.k.shape[0], FORWARD_KEYS):
            part = block.panel(row0, FORWARD_ROWS, key0, FORWARD_KEYS)
            _forward_panel(part, scratch)
            if arrive:
                arrive()
            m, n = part.q.shape[0], part.k.shape[0]
            launch(kernels.merge, (cdiv(m, kernels.MERGE_ROWS.value) + cdiv(n, kernels.MERGE_ROWS.value),),
                row_exponent=scratch.row_parts[0], row_sum=scratch.row_parts[1], query_exponent=part.queries.exponent,
                query_mantissa=part.queries.mantissa, queries=m, row_parts=cdiv(n, kernels.FORWARD_KEYS.value),
                rows_stride=scratch.row_parts[0].stride(0), queries_written=0 if fresh_queries and key0 == 0 else m,
                key_exponent=scratch.key_parts[0], key_sum=scratch.key_parts[1], key_totals_exponent=part.keys.exponent,
                key_totals_mantissa=part.keys.mantissa, keys=n,
                key_parts=cdiv(cdiv(m, kernels.FORWARD_ROWS.value), _strip(m, n)),
                keys_stride=scratch.key_parts[0].stride(0), keys_written=0 if fresh_keys and row0 == 0 else n,
                num_warps=4, num_stages=1)
            _positives(part, scratch)


def _strip(m, n):
    """Row blocks that one program of the forward walks, in a panel of m queries and n keys."""
    row_blocks, key_blocks = cdiv(m, kernels.FORWARD_ROWS.value), cdiv(n, kernels.FORWARD_KEYS.value)
    return strip_blocks(row_blocks, key_blocks, FORWARD_STRIPS, FORWARD_PROGRAMS, LONGEST_STRIP)


def _forward_panel(block, scratch):
    """Starts the partial sums of one panel."""
    q, k, scale, bias = block[:4]
    m, n = q.shape[0], k.shape[0]
    rows, columns = kernels.FORWARD_ROWS.value, kernels.FORWARD_KEYS.value
    sides = [operands(q, [rows, width], k, [columns, width], DESCRIPTORS) for width in kernels.PART_WIDTHS]
    q_side, k_side, descriptors = sides[0]
    strip = _strip(m, n)
    grid = (cdiv(n, columns) * cdiv(cdiv(m, rows), strip),)
    launch(kernels.references, (cdiv(n, columns),),
        q=q, k=k, scale_ptr=scale, bias_ptr=bias, reference=scratch.reference, queries=m, keys=n,
        q_row_stride=q.stride(0), q_depth_stride=q.stride(1), k_row_stride=k.stride(0),
        k_depth_stride=k.stride(1), DESCRIPTORS=descriptors, WIDEN=INTERPRETED, num_warps=4, num_stages=3)
    launch(kernels.forward, grid,
        q=q_side.source, k=k_side.source, scale_ptr=scale, bias_ptr=bias, reference=scratch.reference,
        row_exponent=scratch.row_parts[0], row_sum=scratch.row_parts[1], key_exponent=scratch.key_parts[0],
        key_sum=scratch.key_parts[1], flags=scratch.flags, queries=m, keys=n, strip=strip,
        rows_stride=scratch.row_parts[0].stride(0), keys_stride=scratch.key_parts[0].stride(0),
        q_row_stride=q_side.row_stride, q_depth_stride=q_side.depth_stride, k_row_stride=k_side.row_stride,
        k_depth_stride=k_side.depth_stride, MASKED=m % rows != 0 or n % columns != 0, DESCRIPTORS=descriptors,
        WIDEN=INTERPRETED, num_warps=4, num_stages=3)
    launch(kernels.forward_wide, grid,
        q=q, k=k, scale_ptr=scale, bias_ptr=bias, row_exponent=scratch.row_parts[0],
        row_sum=scratch.row_parts[1], key_exponent=scratch.key_parts[0], key_sum=scratch.key_parts[1],
        flags=scratch.flags, queries=m, keys=n, strip=strip, rows_stride=scratch.row_parts[0].stride(0),
        keys_stride=scratch.key_parts[0].stride(0), q_row_stride=q.stride(0), q_depth_stride=q.stride(1),
        k_row_stride=k.stride(0), k_depth_stride=k.stride(1), DESCRIPTORS=descriptors, WIDEN=INTERPRETED,
        num_warps=16, num_stages=2)


def _positives(block, scratch):
    """Notes the positives of this panel, with the references of the sums that hold them."""
    if not block.meets_diagonal():
        return
    q, k, positive = block.q, block.k, block.positive.unbind()
    m, n = q.shape[0], k.shape[0]
    launch(kernels.positives, (cdiv(m, kernels.POSITIVE_ROWS.value),),
        q=q, k=k, first_positive=block.positives, first_key=block.first_key, row_exponent=scratch.row_parts[0],
        key_exponent=scratch.key_parts[0], positive_z=positive[0], positive_row_reference=positive[1],
        positive_key_reference=positive[2], queries=m, keys=n, strip=_strip(m, n),
        rows_stride=scratch.row_parts[0].stride(0), keys_stride=scratch.key_parts[0].stride(0),
        q_row_stride=q.stride(0), q_depth_stride=q.stride(1), k_row_stride=k.stride(0),
        k_depth_stride=k.stride(1), WIDEN=INTERPRETED, num_warps=4, num_stages=4)


def loss_terms(block, weight):
    """weight * the sum of the terms of the block's queries and keys, of which there may be none: 0-dim fp32."""
    scale, bias, positive = block.scale, block.bias, block.positive.unbind()
    loss = torch.empty((), dtype=torch.float32, device=block.q.device)
    parts = max(1, cdiv(max(block.q.shape[0], block.k.shape[0]), LOSS_ROWS))
    part_sums = loss if parts == 1 else torch.empty(parts, dtype=torch.float64, device=block.q.device)
    launch(kernels.loss_terms, (parts,),
        query_exponent=block.queries.exponent, query_mantissa=block.queries.mantissa,
        key_exponent=block.keys.exponent, key_mantissa=block.keys.mantissa, positive_z=positive[0],
        positive_row_reference=positive[1], positive_key_reference=positive[2], scale_ptr=scale, bias_ptr=bias,
        part_sums=part_sums, queries=block.q.shape[0], keys=block.k.shape[0], query_weight=weight,
        key_weight=weight, BLOCK=LOSS_ROWS, num_warps=16, num_stages=1)
    if parts > 1:
        launch(kernels.total_loss, (1,),
            part_sums=part_sums, loss=loss, parts=parts, BLOCK=1024, num_warps=4, num_stages=1)
    return loss


def backward_scratch(rows, keys, device):
    """What `backward_block`s of up to so many rows and keys are computed in."""
    return SimpleNamespace(
        # of each query
        positive_g=torch.empty(rows, dtype=torch.float32, device=device),
        # of each block of rows, whether its range is wide
        flags=torch.empty(cdiv(max(rows, keys), kernels.FUSED_ROWS.value), dtype=torch.int32, device=device),
        # room for what `_with_ratios` gives
        ratios=_ratios_scratch(max(rows, keys), device),
    )


def backward_block(block, dq, dk, scratch, fresh_dq=False, fresh_dk=False, stash=None, arrive=None):
    """Adds sum_j g_ij k_j to dq (m, D) and sum_i g_ij q_i to dk (n, D), both fp32 and contiguous; g is unweighted.

    One of them may be None, and is not computed. dk may have room behind it, rows up to a multiple of
    LIBRARY_MULTIPLE, which are overwritten. scratch: what `backward_scratch` gave for at least as many rows and keys.
    What is fresh was never written: the first sums replace what it holds. arrive(): called before `dk` is touched.
    """
    m, n, scale, bias = block.q.shape[0], block.k.shape[0], block.scale, block.bias
    positive = block.positive.unbind()
    launch(kernels.fused_positives, (cdiv(m, kernels.VECTOR_ROWS.value),),
        first_positive=block.positives, first_key=block.first_key, positive_z=positive[0],
        positive_row_reference=positive[1], positive_key_reference=positive[2], scale_ptr=scale, bias_ptr=bias,
        query_exponent=block.queries.exponent, query_mantissa=block.queries.mantissa,
        key_exponent=block.keys.exponent, key_mantissa=block.keys.mantissa, positive_g=scratch.positive_g,
        queries=m, keys=n, num_warps=4, num_stages=1)
    if dq is not None:
        ratios = _with_ratios(block.keys, kernels.KEY_SHARE.value, scratch.ratios)
        _queries(block._replace(keys=ratios), scratch, dq, fresh_dq)
    if arrive:
        arrive()
    if dk is not None:
        ratios = _with_ratios(block.queries, kernels.QUERY_SHARE.value, scratch.ratios)
        _keys(block._replace(queries=ratios), scratch, dk, fresh_dk)


def _queries(block, scratch, total, fresh):
    """total (m, D) += g k: each program has a block of queries, which all keys visit."""
    q, k, scale, bias = block[:4]
    m, n = q.shape[0], k.shape[0]
    rows, columns = kernels.FUSED_ROWS.value, kernels.FUSED_KEYS.value
    sides = [operands(q, [rows, width], k, [columns, width], DESCRIPTORS) for width in kernels.PART_WIDTHS]
    q_side, k_side, descriptors = sides[0]
    masked = n % columns != 0
    launch(kernels.fused_queries, (cdiv(m, rows),),
        q=q_side.source, k=k_side.source, first_positive=block.positives, first_key=block.first_key,
        scale_ptr=scale, bias_ptr=bias, query_exponent=block.queries.exponent,
        query_mantissa=block.queries.mantissa, key_exponent=block.keys.exponent,
        key_mantissa=block.keys.mantissa, key_ratio=block.keys.ratio, key_reference=block.keys.reference,
        key_lowest=block.keys.lowest, positive_g=scratch.positive_g, total=total, flags=scratch.flags,
        queries=m, keys=n, q_row_stride=q_side.row_stride, q_depth_stride=q_side.depth_stride,
        k_row_stride=k_side.row_stride, k_depth_stride=k_side.depth_stride, FRESH=fresh, MASKED=masked,
        DESCRIPTORS=descriptors, WIDEN=INTERPRETED, num_warps=4, num_stages=2)
    launch(kernels.fused_queries_wide, (cdiv(m, rows),),
        q=q, k=k, first_positive=block.positives, first_key=block.first_key, scale_ptr=scale, bias_ptr=bias,
        query_exponent=block.queries.exponent, query_mantissa=block.queries.mantissa,
        key_exponent=block.keys.exponent, key_mantissa=block.keys.mantissa, positive_g=scratch.positive_g,
        total=total, flags=scratch.flags, queries=m, keys=n, q_row_stride=q.stride(0),
        q_depth_stride=q.stride(1), k_row_stride=k.stride(0), k_depth_stride=k.stride(1), FRESH=fresh,
        MASKED=masked, WIDEN=INTERPRETED, num_warps=8, num_stages=2)


def _keys(block, scratch, total, fresh):
    """total (n, D) += g^T q: each program has a block of keys, which all queries visit."""
    q, k, scale, bias = block[:4]
    m, n = q.shape[0], k.shape[0]
    rows, columns = kernels.FUSED_KEYS.value, kernels.FUSED_ROWS.value
    sides = [operands(q, [rows, width], k, [columns, width], DESCRIPTORS) for width in kernels.PART_WIDTHS]
    q_side, k_side, descriptors = sides[0]
    masked = m % rows != 0
    launch(kernels.fused_keys, (cdiv(n, columns),),
        q=q_side.source, k=k_side.source, first_positive=block.positives, first_key=block.first_key,
        scale_ptr=scale, bias_ptr=bias, query_exponent=block.queries.exponent,
        query_mantissa=block.queries.mantissa, key_exponent=block.keys.exponent,
        key_mantissa=block.keys.mantissa, query_ratio=block.queries.ratio,
        query_reference=block.queries.reference, query_lowest=block.queries.lowest,
        positive_g=scratch.positive_g, total=total, flags=scratch.flags, queries=m, keys=n,
        q_row_stride=q_side.row_stride, q_depth_stride=q_side.depth_stride, k_row_stride=k_side.row_stride,
        k_depth_stride=k_side.depth_stride, FRESH=fresh, MASKED=masked, DESCRIPTORS=descriptors,
        WIDEN=INTERPRETED, num_warps=4, num_stages=2)
    launch(kernels.fused_keys_wide, (cdiv(n, columns),),
        q=q, k=k, first_positive=block.positives, first_key=block.first_key, scale_ptr=scale, bias_ptr=bias,
        query_exponent=block.queries.exponent, query_mantissa=block.queries.mantissa,
        key_exponent=block.keys.exponent, key_mantissa=block.keys.mantissa, positive_g=scratch.positive_g,
        total=total, flags=scratch.flags, queries=m, keys=n, q_row_stride=q.stride(0),
        q_depth_stride=q.stride(1), k_row_stride=k.stride(0), k_depth_stride=k.stride(1), FRESH=fresh,
        MASKED=masked, WIDEN=INTERPRETED, num_warps=8, num_stages=2)


class Ratios(SimpleNamespace):
    """Statistics of the other side, exponent and mantissa, and what kernels with one exponential an element take for
    them: ratio (rows, to whole blocks), reference and lowest of each block."""

    def panel(self, start, rows):
        """Up to `rows` of them from `start` on, which is the first of a block; the ratios of all that follow."""
        if start == 0 and rows >= self.exponent.shape[0]:
            return self
        own, blocks = slice(start, start + rows), slice(start // kernels.FUSED_KEYS.value, None)
        return Ratios(
            exponent=self.exponent[own], mantissa=self.mantissa[own], ratio=self.ratio[start:],
            reference=self.reference[blocks], lowest=self.lowest[blocks],
        )


def _ratios_scratch(rows, device):
    """Room for `_with_ratios` of `rows` rows: a ratio each, to whole blocks, and two numbers for each block."""
    block = kernels.FUSED_KEYS.value
    return torch.empty(cdiv(rows, block) * (block + 2), dtype=torch.float32, device=device)


def _with_ratios(statistics, share, scratch):
    """These statistics with their ratios, in the scratch."""
    rows, block = statistics.exponent.shape[0], kernels.FUSED_KEYS.value
    blocks = cdiv(rows, block)
    ratio, reference, lowest = panel(scratch, 0, blocks * (block + 2)).split((blocks * block, blocks, blocks))
    launch(kernels.ratios, (blocks,),
        exponent=statistics.exponent, mantissa=statistics.mantissa, ratio=ratio, reference=reference,
        lowest=lowest, count=rows, SHARE=share, ROWS=block, num_warps=4, num_stages=1)
    return Ratios(**statistics._asdict(), ratio=ratio, reference=reference, lowest=lowest)


def finish(total, x, scale, bias, upstream, weight, out, dots=None):
    """out (m, D) = upstream * weight * the logit's own factor * total, in the features' dtype.

    dots[b] = the sum of x . total over FINISH_ROWS rows.
    """
    launch(kernels.finish, (cdiv(total.shape[0], FINISH_ROWS),),
        total=total, x=x, out=out, dots=dots, scale_ptr=scale, bias_ptr=bias, upstream=upstream,
        weight=weight * 2.0**-GRADIENT_EXPONENT, rows=total.shape[0], x_row_stride=x.stride(0),
        x_depth_stride=x.stride(1), DOTS=dots is not None, num_warps=4, num_stages=1)


def scalar_gradients(dots, scale, bias, upstream, weight, rows):
    """(dscale, dbias), 0-dim fp32, from the dots of `finish` over all rows."""
    dscale, dbias = (torch.empty((), dtype=torch.float32, device=dots.device) for _ in range(2))
    launch(kernels.scalars, (1,),
        dots=dots, dscale=dscale, dbias=dbias, scale_ptr=scale, bias_ptr=bias, upstream=upstream, weight=weight,
        parts=dots.shape[0], rows=rows, BLOCK=1024, num_warps=4, num_stages=1)
    return dscale, dbias
