"""One device's sweep of infonce_a100_d768: which panel is computed when, and by which kernel.

    with gradients     5632 queries x all keys of p -> sums of the rows -> dq = g k, dk += g^T q
    without gradients  panels of 5632 queries x 65536 keys -> partial sums -> merged into the statistics
    in a ring          the same, and in backward panels of 5632 queries x 65536 keys of g -> dq += g k, dk += g^T q
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from . import kernels
from ._runtime.launch import INTERPRETED, cdiv, launch, library_legal, operands, panel, panel_columns, strip_blocks

STATISTICS_DTYPE = torch.float32
OPERAND_DTYPE = torch.bfloat16  # of what is multiplied
GRADIENT_EXPONENT = 0  # gradients of logits are kept times 2 to this power
DIM = 768  # of the embedding
POSITIVE_PARTS = 2  # of each query's positive: z, and the references of its sums
FORWARD_ROWS = 5632  # forward panel
FORWARD_KEYS = 65536  # of the same
PANEL_ROWS = 5632  # backward panel; on one device dq accumulates over this many rows
PANEL_KEYS = 65536  # of the same
FINISH_ROWS = 16  # of one program
LOSS_ROWS = 1024  # queries, and keys, that one program takes the terms of
LONGEST_STRIP = 32  # key blocks: longer strips are not faster
DESCRIPTORS = False  # tensor descriptors, where address and strides allow them
LIBRARY_PRODUCTS = True  # g times features, where the matrix library takes the strides
LIBRARY_MULTIPLE = 8  # of keys in a library product: others run on kernels for old GPUs, up to 6 times as slow
FORWARD_STRIPS = 93  # at most, for each block of queries
FORWARD_PROGRAMS = 216  # that run at once
GRADIENT_STRIPS = 8  # at most, for each block of keys
GRADIENT_PROGRAMS = 108  # that run at once


def forward_scratch(q, most_keys):
    """What forward panels of q and up to so many keys are computed in."""
    rows, keys, device = min(q.shape[0], FORWARD_ROWS), min(most_keys, FORWARD_KEYS), q.device
    tiles = cdiv(rows, kernels.FORWARD_ROWS.value), cdiv(keys, kernels.FORWARD_KEYS.value)
    return SimpleNamespace(
        # of each query
        own_reference=torch.empty(rows, dtype=torch.float32, device=device),
        # exponents and sums (strips, rows)
        row_parts=torch.empty(2, min(tiles[1], FORWARD_STRIPS), rows, dtype=torch.float32, device=device).unbind(),
        # of each strip, whether its range is wide
        flags=torch.empty(tiles[0] * min(tiles[1], FORWARD_STRIPS), dtype=torch.int32, device=device),
        # none: only `rows_block` keeps tiles
        kept=None,
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
            parts = cdiv(cdiv(n, kernels.FORWARD_KEYS.value), _strip(m, n))
            _merge(scratch.row_parts, parts, part.queries, fresh_queries and key0 == 0)
            _positives(part, scratch)


def _strip(m, n):
    """Key blocks that one program of the forward walks, in a panel of m queries and n keys."""
    row_blocks, key_blocks = cdiv(m, kernels.FORWARD_ROWS.value), cdiv(n, kernels.FORWARD_KEYS.value)
    return strip_blocks(key_blocks, row_blocks, FORWARD_STRIPS, FORWARD_PROGRAMS, LONGEST_STRIP)


def _forward_panel(block, scratch, strip=None, referenced=False):
    """Starts the partial sums of one panel. strip: key blocks that a program walks, given where this panel is part
    of a larger one, whose strips it keeps. referenced: its queries have their references."""
    q, k, scale, bias = block[:4]
    m, n = q.shape[0], k.shape[0]
    rows, columns = kernels.FORWARD_ROWS.value, kernels.FORWARD_KEYS.value
    depth = kernels.FORWARD_DEPTH.value
    q_side, k_side, descriptors = operands(q, [rows, depth], k, [columns, depth], DESCRIPTORS)
    strip = _strip(m, n) if strip is None else strip
    grid = (cdiv(m, rows) * cdiv(cdiv(n, columns), strip),)
    if not referenced:
        launch(kernels.row_references, (cdiv(m, kernels.WIDE_ROWS.value),),
            q=q, k=k, scale_ptr=scale, bias_ptr=bias, own_reference=scratch.own_reference, queries=m, keys=n,
            q_row_stride=q.stride(0), q_depth_stride=q.stride(1), k_row_stride=k.stride(0),
            k_depth_stride=k.stride(1), WIDEN=INTERPRETED, num_warps=8, num_stages=3)
    kept = scratch.row_parts[0] if scratch.kept is None else scratch.kept  # any tensor where nothing is kept
    launch(kernels.forward, grid,
        q=q_side.source, k=k_side.source, scale_ptr=scale, bias_ptr=bias, own_reference=scratch.own_reference,
        row_exponent=scratch.row_parts[0], row_sum=scratch.row_parts[1], flags=scratch.flags, stash=kept,
        queries=m, keys=n, strip=strip, rows_stride=scratch.row_parts[0].stride(0), stash_stride=kept.stride(0),
        q_row_stride=q_side.row_stride, q_depth_stride=q_side.depth_stride, k_row_stride=k_side.row_stride,
        k_depth_stride=k_side.depth_stride, MASKED=m % rows != 0 or n % columns != 0, DESCRIPTORS=descriptors,
        WIDEN=INTERPRETED, STASH=scratch.kept is not None, num_warps=8, num_stages=3)
    launch(kernels.forward_wide, grid,
        q=q, k=k, scale_ptr=scale, bias_ptr=bias, row_exponent=scratch.row_parts[0],
        row_sum=scratch.row_parts[1], flags=scratch.flags, queries=m, keys=n, strip=strip,
        rows_stride=scratch.row_parts[0].stride(0), q_row_stride=q.stride(0), q_depth_stride=q.stride(1),
        k_row_stride=k.stride(0), k_depth_stride=k.stride(1), WIDEN=INTERPRETED, num_warps=4, num_stages=2)


def _positives(block, scratch):
    """Notes the positives of this panel, with the references of the sums that hold them."""
    if not block.meets_diagonal():
        return
    q, k, positive = block.q, block.k, block.positive.unbind()
    m, n = q.shape[0], k.shape[0]
    launch(kernels.positives, (cdiv(m, kernels.POSITIVE_ROWS.value),),
        q=q, k=k, labels=block.positives, first_key=block.first_key, row_exponent=scratch.row_parts[0],
        positive_z=positive[0], positive_row_reference=positive[1], queries=m, keys=n, strip=_strip(m, n),
        rows_stride=scratch.row_parts[0].stride(0), q_row_stride=q.stride(0), q_depth_stride=q.stride(1),
        k_row_stride=k.stride(0), k_depth_stride=k.stride(1), WIDEN=INTERPRETED, num_warps=4, num_stages=2)


def loss_terms(block, weight):
    """weight * the sum of the terms of the block's queries and keys, of which there may be none: 0-dim fp32."""
    scale, bias, positive = block.scale, block.bias, block.positive.unbind()
    loss = torch.empty((), dtype=torch.float32, device=block.q.device)
    parts = max(1, cdiv(block.q.shape[0], LOSS_ROWS))
    part_sums = loss if parts == 1 else torch.empty(parts, dtype=torch.float64, device=block.q.device)
    launch(kernels.loss_terms, (parts,),
        query_exponent=block.queries.exponent, query_mantissa=block.queries.mantissa, positive_z=positive[0],
        positive_row_reference=positive[1], scale_ptr=scale, bias_ptr=bias, part_sums=part_sums,
        queries=block.q.shape[0], query_weight=weight, BLOCK=LOSS_ROWS, num_warps=16, num_stages=1)
    if parts > 1:
        launch(kernels.total_loss, (1,),
            part_sums=part_sums, loss=loss, parts=parts, BLOCK=1024, num_warps=4, num_stages=1)
    return loss


def backward_scratch(rows, keys, device):
    """What `backward_block`s of up to so many rows and keys are computed in."""
    panel_rows, panel_keys = min(rows, PANEL_ROWS), min(keys, PANEL_KEYS)
    tiles = cdiv(panel_rows, kernels.GRADIENT_ROWS.value), cdiv(panel_keys, kernels.GRADIENT_KEYS.value)
    shape = tiles[0] * kernels.GRADIENT_ROWS.value, tiles[1] * kernels.GRADIENT_KEYS.value
    return SimpleNamespace(
        # of a panel, in whole tiles: no store needs a mask
        g=torch.empty(shape, dtype=OPERAND_DTYPE, device=device),
    )


def backward_block(block, dq, dk, scratch, fresh_dq=False, fresh_dk=False, stash=None, arrive=None):
    """Adds sum_j g_ij k_j to dq (m, D) and sum_i g_ij q_i to dk (n, D), both fp32 and contiguous; g is unweighted.

    One of them may be None, and is not computed. dk may have room behind it, rows up to a multiple of
    LIBRARY_MULTIPLE, which are overwritten. scratch: what `backward_scratch` gave for at least as many rows and keys.
    What is fresh was never written: the first sums replace what it holds. arrive(): called before `dk` is touched.
    """
    m, n = block.q.shape[0], block.k.shape[0]
    for row0 in range(0, m, PANEL_ROWS):
        for key0 in range(0, n, PANEL_KEYS):
            part = block.panel(row0, PANEL_ROWS, key0, PANEL_KEYS)
            g = _gradient_panel(part, scratch)
            if dq is not None:
                own, fresh = panel(dq, row0, PANEL_ROWS), fresh_dq and key0 == 0
                _add_product(own, g, part.k, fresh)
            if arrive:
                arrive()
            if dk is not None:
                own, fresh = panel(dk, key0, PANEL_KEYS), fresh_dk and row0 == 0
                _add_product(own, g.mT, part.q, fresh)


def _gradient_panel(block, scratch):
    """g (m, n) of one panel, in the corner of the buffer `scratch.g`."""
    q, k, scale, bias = block[:4]
    m, n, g = q.shape[0], k.shape[0], scratch.g
    rows, columns, depth = kernels.GRADIENT_ROWS.value, kernels.GRADIENT_KEYS.value, kernels.GRADIENT_DEPTH.value
    q_side, k_side, descriptors = operands(q, [rows, depth], k, [columns, depth], DESCRIPTORS)
    strip = strip_blocks(cdiv(m, rows), cdiv(n, columns), GRADIENT_STRIPS, GRADIENT_PROGRAMS)
    grid = (cdiv(n, columns) * cdiv(cdiv(m, rows), strip),)
    launch(kernels.gradient, grid,
        q=q_side.source, k=k_side.source, scale_ptr=scale, bias_ptr=bias, query_exponent=block.queries.exponent,
        query_mantissa=block.queries.mantissa, g=g, queries=m, keys=n, strip=strip, g_stride=g.stride(0),
        q_row_stride=q_side.row_stride, q_depth_stride=q_side.depth_stride, k_row_stride=k_side.row_stride,
        k_depth_stride=k_side.depth_stride, DESCRIPTORS=descriptors, WIDEN=INTERPRETED, num_warps=8,
        num_stages=3)
    _gradient_positives(block, g)
    return g if g.shape[-2:] == (m, n) else g[..., :m, :n]


def _gradient_positives(block, g):
    """Puts g of this panel's positives in the place of what `gradient` takes them for."""
    if not block.meets_diagonal():
        return
    scale, bias, positive = block.scale, block.bias, block.positive.unbind()
    m, n = block.q.shape[0], block.k.shape[0]
    launch(kernels.gradient_positives, (cdiv(m, kernels.VECTOR_ROWS.value),),
        labels=block.positives, first_key=block.first_key, positive_z=positive[0],
        positive_row_reference=positive[1], scale_ptr=scale, bias_ptr=bias,
        query_exponent=block.queries.exponent, query_mantissa=block.queries.mantissa, g=g, queries=m, keys=n,
        g_stride=g.stride(0), num_warps=4, num_stages=1)


def _add_product(total, g, x, fresh):
    """total (rows, D) += g (rows, inner) x (inner, D); with `fresh`, total holds nothing yet.

    The library gets keys in multiples of LIBRARY_MULTIPLE. Along g's rows the room behind the sums makes them whole:
    g's buffer has whole tiles. Of its inner extent a kernel adds the rest: first, as fresh sums are only written.
    """
    rows, inner = g.shape
    library = LIBRARY_PRODUCTS and library_legal(x)
    whole = inner if g.stride(1) != 1 else inner // LIBRARY_MULTIPLE * LIBRARY_MULTIPLE
    whole = whole if library else 0
    if whole < inner:
        rest_g, rest_x = (g[:, whole:], x[whole:]) if whole else (g, x)
        grid = (cdiv(rows, kernels.PRODUCT_ROWS.value), cdiv(DIM, kernels.PRODUCT_KEYS.value))
        launch(kernels.product, grid,
            g=rest_g, x=rest_x, total=total, rows=rows, inner=inner - whole, g_row_stride=g.stride(0),
            g_inner_stride=g.stride(1), x_inner_stride=x.stride(0), x_depth_stride=x.stride(1), FRESH=fresh,
            WIDEN=INTERPRETED, num_warps=8, num_stages=3)
        fresh = False
    if whole:
        if total.shape[0] > rows:
            g = g.as_strided((total.shape[0], inner), g.stride())
        factors = panel_columns(g, 0, whole), panel(x, 0, whole)
        torch.addmm(total, *factors, out_dtype=torch.float32, beta=0 if fresh else 1, out=total)


def rows_scratch(rows, keys, device):
    """What `rows_block`s of up to so many rows and keys are computed in."""
    rows = min(rows, PANEL_ROWS)
    tiles = cdiv(rows, kernels.FORWARD_ROWS.value), cdiv(keys, kernels.FORWARD_KEYS.value)
    shape = tiles[0] * kernels.FORWARD_ROWS.value, tiles[1] * kernels.FORWARD_KEYS.value
    return SimpleNamespace(
        # of each query
        own_reference=torch.empty(rows, dtype=torch.float32, device=device),
        # exponents and sums (strips, rows)
        row_parts=torch.empty(2, min(tiles[1], FORWARD_STRIPS), rows, dtype=torch.float32, device=device).unbind(),
        # of each strip, whether its range is wide
        flags=torch.empty(tiles[0] * min(tiles[1], FORWARD_STRIPS), dtype=torch.int32, device=device),
        # p of each pair, in whole tiles: no store needs a mask
        kept=torch.empty(shape, dtype=OPERAND_DTYPE, device=device),
        # the keys that `begin_rows` has seen: the first, and the last + 1
        begun=None,
        # of each query: g = share * p
        share=torch.empty(rows, dtype=torch.float32, device=device),
        # queries times their shares
        weighted=torch.empty(rows, DIM, dtype=OPERAND_DTYPE, device=device),
    )


def begin_rows(block, first, count, scratch):
    """Begins `rows_block` of this block with so many of its keys from `first` on, while others are on their way.

    Only whole strips of the forward that hold none but these: other keys of the block wait. Its last strip may be
    short.
    """
    m, n = block.q.shape[0], block.k.shape[0]
    keys = kernels.FORWARD_KEYS.value * _strip(m, n)  # of a strip
    start, stop = cdiv(first, keys) * keys, first + count
    if stop < n:
        stop = stop // keys * keys
    if start < stop:
        _forward_keys(block, scratch, start, stop)
        scratch.begun = start, stop


def _forward_keys(block, scratch, start, stop):
    """`_forward_panel` of the keys from `start` on, where a strip of the block begins, before `stop`."""
    strip = _strip(block.q.shape[0], block.k.shape[0])
    first_strip = start // (kernels.FORWARD_KEYS.value * strip)
    own = vars(scratch) | {
        "row_parts": [panel(part, first_strip, part.shape[0]) for part in scratch.row_parts],
        "kept": panel_columns(scratch.kept, start, scratch.kept.shape[1]),
    }
    part = block.panel(0, block.q.shape[0], start, stop - start)
    _forward_panel(part, SimpleNamespace(**own), strip, referenced=scratch.begun is not None)


def rows_block(block, dq, dk, scratch, fresh_dk=False, arrive=None):
    """The statistics of a `Block`'s queries, at most PANEL_ROWS, and their positives; then sum_i g_ij q_i added to dk,
    as in `backward_block`, and dq = sum_j p_ij k_j, which `finish` multiplies by `scratch.share`. The block has all
    keys. dk: the sums for those of each rank, as triples of a tensor, its first key and their number. dq may be None,
    and dk empty: not computed. arrive(): called behind all sums for dk but the last. What `begin_rows` has begun in
    `scratch` is not computed again.

    Of each pair the forward keeps p = 2^(y - reference of the row), and g = share * p. So g k = share * (p k), and dk
    takes p^T (share * q): no pass over the pairs forms g.
    """
    q, k, scale, bias, *_ = block
    m, n, g, share, positive = q.shape[0], k.shape[0], scratch.kept, scratch.share, block.positive.unbind()
    rows, columns, strip = kernels.FORWARD_ROWS.value, kernels.FORWARD_KEYS.value, _strip(m, n)
    before, behind = scratch.begun or (0, 0)
    for start, stop in ((0, before), (behind, n)):
        if start < stop:
            _forward_keys(block, scratch, start, stop)
    scratch.begun = None
    _merge(scratch.row_parts, cdiv(cdiv(n, columns), strip), block.queries, fresh=True)
    _positives(block, scratch)
    grid = (cdiv(m, rows) * cdiv(cdiv(n, columns), strip),)
    launch(kernels.shares, (cdiv(m, rows),),
        query_exponent=block.queries.exponent, query_mantissa=block.queries.mantissa, positive_z=positive[0],
        own_reference=scratch.own_reference, share=share, flags=scratch.flags, queries=m, keys=n, strip=strip,
        num_warps=4, num_stages=1)
    launch(kernels.row_gradient_wide, grid,
        q=q, k=k, scale_ptr=scale, bias_ptr=bias, query_exponent=block.queries.exponent,
        query_mantissa=block.queries.mantissa, g=g, flags=scratch.flags, queries=m, keys=n, strip=strip,
        g_stride=g.stride(0), q_row_stride=q.stride(0), q_depth_stride=q.stride(1), k_row_stride=k.stride(0),
        k_depth_stride=k.stride(1), WIDEN=INTERPRETED, num_warps=4, num_stages=2)
    launch(kernels.row_positives, (cdiv(m, kernels.VECTOR_ROWS.value),),
        labels=block.positives, first_key=block.first_key, positive_z=positive[0],
        positive_row_reference=positive[1], scale_ptr=scale, bias_ptr=bias,
        query_exponent=block.queries.exponent, query_mantissa=block.queries.mantissa, share=share, g=g,
        queries=m, keys=n, g_stride=g.stride(0), num_warps=4, num_stages=1)
    g = g if g.shape == (m, n) else g[:m, :n]
    if dk:
        weighted = panel(scratch.weighted, 0, m)
        launch(kernels.weighted_queries, (cdiv(m, FINISH_ROWS),),
            q=q, share=share, out=weighted, rows=m, q_row_stride=q.stride(0), q_depth_stride=q.stride(1),
            num_warps=4, num_stages=1)
    for number, (total, first, keys) in enumerate(dk, 1):
        if arrive and number == len(dk):
            arrive()
        _add_product(total, panel_columns(g, first, keys).mT, weighted, fresh_dk)
    if dq is not None:
        _add_product(dq, g, k, True)


def _merge(parts, count, statistics, fresh):
    """Adds the first `count` of partial sums, exponents and sums (parts, rows), to the statistics of rows."""
    (exponents, sums), rows = parts, statistics.exponent.shape[0]
    written = 0 if fresh else rows
    launch(kernels.merge, (cdiv(rows, kernels.MERGE_ROWS.value),),
        row_exponent=exponents, row_sum=sums, query_exponent=statistics.exponent,
        query_mantissa=statistics.mantissa, queries=rows, row_parts=count, rows_stride=exponents.stride(0),
        queries_written=written, num_warps=4, num_stages=1)


def finish(total, x, scale, bias, upstream, weight, out, dots=None, share=None):
    """out (m, D) = upstream * weight * the logit's own factor * total, in the features' dtype.

    dots[b] = the sum of x . total over FINISH_ROWS rows.
    share (m,): what each row of total is multiplied by, before all that.
    """
    launch(kernels.finish, (cdiv(total.shape[0], FINISH_ROWS),),
        total=total, share=share, x=x, out=out, dots=dots, scale_ptr=scale, bias_ptr=bias, upstream=upstream,
        weight=weight * 2.0**-GRADIENT_EXPONENT, rows=total.shape[0], x_row_stride=x.stride(0),
        x_depth_stride=x.stride(1), DOTS=dots is not None, SHARED=share is not None, num_warps=4, num_stages=1)


def scalar_gradients(dots, scale, bias, upstream, weight, rows):
    """(dscale, dbias), 0-dim fp32, from the dots of `finish` over all rows."""
    dscale, dbias = (torch.empty((), dtype=torch.float32, device=dots.device) for _ in range(2))
    launch(kernels.scalars, (1,),
        dots=dots, dscale=dscale, dbias=dbias, scale_ptr=scale, bias_ptr=bias, upstream=upstream, weight=weight,
        parts=dots.shape[0], rows=rows, BLOCK=1024, num_warps=4, num_stages=1)
    return dscale, dbias


def rescale(kept, upstream, out):
    """out (rows, D) = upstream * kept, rounded once; `kept` is a gradient that `finish` wrote for upstream 1."""
    if kept.shape[0]:
        launch(kernels.rescale, (cdiv(kept.shape[0], FINISH_ROWS),),
            kept=kept, out=out, upstream=upstream, rows=kept.shape[0], num_warps=4, num_stages=1)
