"""Triton kernels of infonce_a100_d768, specialised to D = 768.

Loss       L = 1/M * (sum_i (r_i - p_i))
Gradient   g_ij = 1/M * (exp(x_ij - r_i) - [j = positive(i)])

Legend
    q (M, D), k (N, D)  features of one rank's queries and of the visiting keys, any strides
    z = q k^T           similarity, fp32; one tile of it lives in registers and is never stored
    x = f(z)            logit; y = x log2(e) - shift log2(e) is what the kernels exponentiate in base 2
                        (the logit's shift is the same for every pair: it cancels in every softmax and enters only the loss)
    r_i, c_j            log-sum-exp of row i, as a wide float: sum of 2^y = mantissa * 2^exponent, exponent an integer
    g                   gradient of one logit, times M

Range. A tile takes one exponential per element against one reference for the whole tile, HEADROOM below the largest
value. fp32 then holds rows that lie up to SPREAD binary orders below that value to better than 2^-38; a tile
with a wider spread raises its flag, and the *_wide kernel that follows recomputes just that tile exactly. Logits may
reach 10^9.
"""

import triton
import triton.language as tl

DIM = tl.constexpr(768)
FORWARD_ROWS = tl.constexpr(128)
FORWARD_KEYS = tl.constexpr(128)
FORWARD_DEPTH = tl.constexpr(64)
GRADIENT_ROWS = tl.constexpr(128)
GRADIENT_KEYS = tl.constexpr(128)
GRADIENT_DEPTH = tl.constexpr(64)
PRODUCT_ROWS = tl.constexpr(128)
PRODUCT_KEYS = tl.constexpr(128)
PRODUCT_DEPTH = tl.constexpr(64)
POSITIVE_ROWS = tl.constexpr(64)
POSITIVE_DEPTH = tl.constexpr(64)
FINISH_ROWS = tl.constexpr(32)
FINISH_DEPTH = tl.constexpr(128)
VECTOR_ROWS = tl.constexpr(128)  # rows per program of the kernels that only touch vectors
QUERY_SHARE = tl.constexpr(1.0)
POSITIVE_SHARE = tl.constexpr(-1.0)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HEADROOM = tl.constexpr(30.0)  # fp32 resolves 2^y to 2^-20 there; more would cost accuracy, less would raise more flags
SPREAD = tl.constexpr(110.0)
SMALLEST_SUM = tl.constexpr(2.0**-80)  # = 2^(HEADROOM - SPREAD): a tile sum below it has lost precision


@triton.jit
def base2_slope(scale_ptr, bias_ptr):
    """y = base2_slope * z."""
    scale = tl.load(scale_ptr)
    return (scale) * LOG2E


@triton.jit
def load_block(source, row0, depth0, rows, row_stride, depth_stride, ROWS: tl.constexpr, DEPTH: tl.constexpr,
               DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr):
    """Tile (ROWS, DEPTH) of a feature matrix; zero beyond its last row and column. WIDEN: the interpreter has no bf16."""
    if DESCRIPTORS:
        tile = source.load([row0, depth0])
    else:
        r = row0 + tl.arange(0, ROWS)
        d = depth0 + tl.arange(0, DEPTH)
        offsets = r.to(tl.int64)[:, None] * row_stride + d.to(tl.int64)[None, :] * depth_stride
        tile = tl.load(source + offsets, mask=(r < rows)[:, None] & (d < DIM)[None, :], other=0.0)
    if WIDEN:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def similarity(q, k, row0, key0, queries, keys, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride,
               ROWS: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr,
               DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr):
    """z (ROWS, KEYS) fp32 of one tile; zero beyond the last row and key."""
    z = tl.zeros((ROWS, KEYS), tl.float32)
    for depth0 in range(0, DIM, DEPTH):
        a = load_block(q, row0, depth0, queries, q_row_stride, q_depth_stride, ROWS, DEPTH, DESCRIPTORS, WIDEN)
        b = load_block(k, key0, depth0, keys, k_row_stride, k_depth_stride, KEYS, DEPTH, DESCRIPTORS, WIDEN)
        z = tl.dot(a, b.T, z, input_precision="ieee")
    return z


@triton.jit
def tile_of(program, queries, keys, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Row block and key block of a program: groups of 8 row blocks walk the keys together and share them in L2."""
    row_blocks = tl.cdiv(queries, ROWS)
    key_blocks = tl.cdiv(keys, KEYS)
    group = program // (8 * key_blocks)
    group_rows = min(row_blocks - group * 8, 8)
    within = program % (8 * key_blocks)
    return group * 8 + within % group_rows, within // group_rows


@triton.jit
def forward(q, k, scale_ptr, bias_ptr, row_exponent, row_sum, flags, queries, keys,
            rows_stride, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride,
            MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr):
    """One tile: each z is computed once and reduced along its row."""
    tile = tl.program_id(0)
    row_block, key_block = tile_of(tile, queries, keys, FORWARD_ROWS, FORWARD_KEYS)
    row0 = row_block * FORWARD_ROWS
    key0 = key_block * FORWARD_KEYS
    z = similarity(q, k, row0, key0, queries, keys, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride,
                   FORWARD_ROWS, FORWARD_KEYS, FORWARD_DEPTH, DESCRIPTORS, WIDEN)
    slope = base2_slope(scale_ptr, bias_ptr)
    rows = row0 + tl.arange(0, FORWARD_ROWS)
    columns = key0 + tl.arange(0, FORWARD_KEYS)
    if slope >= 0.0:
        top = tl.max(z)
    else:
        top = tl.min(z)
    reference = tl.floor(top * slope) - HEADROOM
    p = tl.exp2(tl.fma(z, slope, -reference))
    if MASKED:
        p = tl.where((rows < queries)[:, None] & (columns < keys)[None, :], p, 0.0)
    row_sums = tl.sum(p, axis=1)
    row_reference = tl.zeros_like(row_sums) + reference
    tl.store(row_exponent + key_block * rows_stride + rows, row_reference, mask=rows < queries)
    tl.store(row_sum + key_block * rows_stride + rows, row_sums, mask=rows < queries)
    smallest = tl.min(tl.where(rows < queries, row_sums, 1.0))
    tl.store(flags + tile, (smallest < SMALLEST_SUM).to(tl.int32))


@triton.jit
def forward_wide(q, k, scale_ptr, bias_ptr, row_exponent, row_sum, flags, queries, keys,
            rows_stride, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride,
            DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr):
    """Recomputes a flagged tile with a reference for each row; exits at once elsewhere."""
    tile = tl.program_id(0)
    if tl.load(flags + tile) != 0:
        row_block, key_block = tile_of(tile, queries, keys, FORWARD_ROWS, FORWARD_KEYS)
        row0 = row_block * FORWARD_ROWS
        key0 = key_block * FORWARD_KEYS
        z = similarity(q, k, row0, key0, queries, keys, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride,
                       FORWARD_ROWS, FORWARD_KEYS, FORWARD_DEPTH, DESCRIPTORS, WIDEN)
        slope = base2_slope(scale_ptr, bias_ptr)
        rows = row0 + tl.arange(0, FORWARD_ROWS)
        columns = key0 + tl.arange(0, FORWARD_KEYS)
        key_mask = tl.where(columns < keys, 0.0, float("-inf"))
        row_reference = tl.floor(tl.max(z * slope + key_mask[None, :], axis=1))
        row_sums = tl.sum(tl.exp2(tl.fma(z, slope, -row_reference[:, None]) + key_mask[None, :]), axis=1)
        tl.store(row_exponent + key_block * rows_stride + rows, row_reference, mask=rows < queries)
        tl.store(row_sum + key_block * rows_stride + rows, row_sums, mask=rows < queries)


@triton.jit
def merge(part_exponent, part_sum, exponent, mantissa, rows, parts, part_stride):
    """Wide-float sum of `parts` partial sums (parts, part_stride) into (exponent, mantissa); 1 <= mantissa < 2 after it."""
    r = tl.program_id(0) * VECTOR_ROWS + tl.arange(0, VECTOR_ROWS)
    e = tl.load(exponent + r, mask=r < rows, other=0.0)
    s = tl.load(mantissa + r, mask=r < rows, other=1.0)
    for part in range(0, parts):
        place = part * part_stride + r  # a panel of partial sums is far below 2^31 elements
        part_e = tl.load(part_exponent + place, mask=r < rows, other=0.0)
        part_s = tl.load(part_sum + place, mask=r < rows, other=0.0)
        top = tl.maximum(e, part_e)
        s = s * tl.exp2(e - top) + part_s * tl.exp2(part_e - top)
        e = top
    carried = e + tl.floor(tl.log2(s))
    tl.store(exponent + r, carried, mask=r < rows)
    tl.store(mantissa + r, s * tl.exp2(e - carried), mask=r < rows)  # beyond 2^24 the sum above is rounded


@triton.jit
def positives(q, k, labels, first_key, positive_z, queries, keys,
              q_row_stride, q_depth_stride, k_row_stride, k_depth_stride, WIDEN: tl.constexpr):
    """z of each row's positive, where it lies among these keys: the diagonal of a tile of q against the gathered keys."""
    rows = tl.program_id(0) * POSITIVE_ROWS + tl.arange(0, POSITIVE_ROWS)
    columns = tl.load(labels + rows, mask=rows < queries, other=-1) - first_key
    here = (rows < queries) & (columns >= 0) & (columns < keys)
    z = tl.zeros((POSITIVE_ROWS, POSITIVE_ROWS), tl.float32)
    for depth0 in range(0, DIM, POSITIVE_DEPTH):
        d = (depth0 + tl.arange(0, POSITIVE_DEPTH)).to(tl.int64)
        mask = here[:, None] & (d < DIM)[None, :]
        a = tl.load(q + rows.to(tl.int64)[:, None] * q_row_stride + d[None, :] * q_depth_stride, mask=mask, other=0.0)
        b = tl.load(k + columns[:, None] * k_row_stride + d[None, :] * k_depth_stride, mask=mask, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        z = tl.dot(a, b.T, z, input_precision="ieee")
    i = tl.arange(0, POSITIVE_ROWS)
    tl.store(positive_z + rows, tl.sum(tl.where(i[:, None] == i[None, :], z, 0.0), axis=1), mask=here)


@triton.jit
def loss_terms(query_exponent, query_mantissa, positive_z, scale_ptr, bias_ptr, loss,
               queries, query_weight, BLOCK: tl.constexpr):
    """This rank's share of the loss, summed in fp64 by one program: a fixed order, and O(M) work."""
    scale = tl.load(scale_ptr).to(tl.float64)
    bias = tl.load(bias_ptr).to(tl.float64)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    slope = base2_slope(scale_ptr, bias_ptr).to(tl.float64) * LN2
    shift = bias
    for start in range(0, queries, BLOCK):
        i = start + lanes
        z = tl.load(positive_z + i, mask=i < queries, other=0.0).to(tl.float64)
        p = z * slope + shift
        r = (tl.load(query_exponent + i, mask=i < queries, other=0.0).to(tl.float64)
             + tl.log2(tl.load(query_mantissa + i, mask=i < queries, other=1.0).to(tl.float64))) * LN2 + shift
        total += tl.where(i < queries, query_weight * (r - p), 0.0)
    tl.store(loss, tl.sum(total).to(tl.float32))


@triton.jit
def gradient(q, k, scale_ptr, bias_ptr, query_exponent, query_mantissa, g, flags,
             queries, keys, g_stride, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride,
             MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr):
    """g = 2^(y - reference) * (a_i): one reference for the tile."""
    tile = tl.program_id(0)
    row_block, key_block = tile_of(tile, queries, keys, GRADIENT_ROWS, GRADIENT_KEYS)
    row0 = row_block * GRADIENT_ROWS
    key0 = key_block * GRADIENT_KEYS
    z = similarity(q, k, row0, key0, queries, keys, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride,
                   GRADIENT_ROWS, GRADIENT_KEYS, GRADIENT_DEPTH, DESCRIPTORS, WIDEN)
    slope = base2_slope(scale_ptr, bias_ptr)
    rows = row0 + tl.arange(0, GRADIENT_ROWS)
    columns = key0 + tl.arange(0, GRADIENT_KEYS)
    own = tl.minimum(rows, queries - 1)
    e = tl.load(query_exponent + own)
    a = QUERY_SHARE / tl.load(query_mantissa + own)
    top = tl.max(e)
    low = tl.min(e)
    tl.store(flags + tile, (top - low > SPREAD).to(tl.int32))
    reference = top - HEADROOM
    a *= tl.exp2(reference - e)
    value = tl.exp2(tl.fma(z, slope, -reference)) * a[:, None]
    g += row0.to(tl.int64) * g_stride + key0
    places = tl.arange(0, GRADIENT_ROWS)[:, None] * g_stride + tl.arange(0, GRADIENT_KEYS)[None, :]
    if MASKED:
        tl.store(g + places, value.to(g.dtype.element_ty), mask=(rows < queries)[:, None] & (columns < keys)[None, :])
    else:
        tl.store(g + places, value.to(g.dtype.element_ty))


@triton.jit
def gradient_wide(q, k, scale_ptr, bias_ptr, query_exponent, query_mantissa, g, flags,
             queries, keys, g_stride, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride,
             DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr):
    """Recomputes a flagged tile with a reference for each row; exits at once elsewhere."""
    tile = tl.program_id(0)
    if tl.load(flags + tile) != 0:
        row_block, key_block = tile_of(tile, queries, keys, GRADIENT_ROWS, GRADIENT_KEYS)
        row0 = row_block * GRADIENT_ROWS
        key0 = key_block * GRADIENT_KEYS
        z = similarity(q, k, row0, key0, queries, keys, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride,
                       GRADIENT_ROWS, GRADIENT_KEYS, GRADIENT_DEPTH, DESCRIPTORS, WIDEN)
        slope = base2_slope(scale_ptr, bias_ptr)
        rows = row0 + tl.arange(0, GRADIENT_ROWS)
        columns = key0 + tl.arange(0, GRADIENT_KEYS)
        own = tl.minimum(rows, queries - 1)
        e = tl.load(query_exponent + own)
        a = QUERY_SHARE / tl.load(query_mantissa + own)
        value = tl.exp2(tl.fma(z, slope, -e[:, None])) * a[:, None]
        g += row0.to(tl.int64) * g_stride + key0
        places = tl.arange(0, GRADIENT_ROWS)[:, None] * g_stride + tl.arange(0, GRADIENT_KEYS)[None, :]
        tl.store(g + places, value.to(g.dtype.element_ty), mask=(rows < queries)[:, None] & (columns < keys)[None, :])


@triton.jit
def gradient_positives(labels, first_key, positive_z, scale_ptr, bias_ptr, query_exponent, query_mantissa, g, queries, keys, g_stride):
    """Overwrites g of each positive: its share is added in fp32, before g is rounded, or 1 - p would lose its digits."""
    rows = tl.program_id(0) * VECTOR_ROWS + tl.arange(0, VECTOR_ROWS)
    columns = tl.load(labels + rows, mask=rows < queries, other=-1) - first_key
    here = (rows < queries) & (columns >= 0) & (columns < keys)
    slope = base2_slope(scale_ptr, bias_ptr)
    z = tl.load(positive_z + rows, mask=here, other=0.0)
    e = tl.load(query_exponent + rows, mask=here, other=0.0)
    value = QUERY_SHARE * tl.exp2(tl.fma(z, slope, -e)) / tl.load(query_mantissa + rows, mask=here, other=1.0)
    value += POSITIVE_SHARE
    tl.store(g + rows.to(tl.int64) * g_stride + columns, value.to(g.dtype.element_ty), mask=here)


@triton.jit
def product(g, x, total, rows, inner, g_row_stride, g_inner_stride, x_inner_stride, x_depth_stride, WIDEN: tl.constexpr):
    """One tile of `total`, which only this program touches: fp32, inner dimension in order."""
    row0 = tl.program_id(0) * PRODUCT_ROWS
    depth0 = tl.program_id(1) * PRODUCT_KEYS
    r = row0 + tl.arange(0, PRODUCT_ROWS)
    d = depth0 + tl.arange(0, PRODUCT_KEYS)
    result = tl.zeros((PRODUCT_ROWS, PRODUCT_KEYS), tl.float32)
    for inner0 in range(0, inner, PRODUCT_DEPTH):
        i = (inner0 + tl.arange(0, PRODUCT_DEPTH)).to(tl.int64)
        a = tl.load(g + r.to(tl.int64)[:, None] * g_row_stride + i[None, :] * g_inner_stride,
                    mask=(r < rows)[:, None] & (i < inner)[None, :], other=0.0)
        b = tl.load(x + i[:, None] * x_inner_stride + d.to(tl.int64)[None, :] * x_depth_stride,
                    mask=(i < inner)[:, None] & (d < DIM)[None, :], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        result = tl.dot(a, b, result, input_precision="ieee")
    total += row0.to(tl.int64) * DIM
    places = tl.arange(0, PRODUCT_ROWS)[:, None] * DIM + d[None, :]
    mask = (r < rows)[:, None] & (d < DIM)[None, :]
    tl.store(total + places, tl.load(total + places, mask=mask, other=0.0) + result, mask=mask)


@triton.jit
def finish(total, x, out, dots, scale_ptr, bias_ptr, upstream, weight, rows, x_row_stride, x_depth_stride, DOTS: tl.constexpr):
    """out (rows, D) = upstream * weight * (scale) * total;  dots[program] = sum over its rows of x . total."""
    program = tl.program_id(0)
    r = program * FINISH_ROWS + tl.arange(0, FINISH_ROWS)
    scale = tl.load(scale_ptr)
    factor = tl.load(upstream).to(tl.float32) * weight * (scale)
    dot = tl.zeros((FINISH_ROWS, FINISH_DEPTH), tl.float32)
    for depth0 in range(0, DIM, FINISH_DEPTH):
        d = depth0 + tl.arange(0, FINISH_DEPTH)
        mask = (r < rows)[:, None] & (d < DIM)[None, :]
        places = r.to(tl.int64)[:, None] * DIM + d[None, :]  # rows * D may exceed 2^31
        value = tl.load(total + places, mask=mask, other=0.0)
        if DOTS:
            feature = tl.load(x + r.to(tl.int64)[:, None] * x_row_stride + d.to(tl.int64)[None, :] * x_depth_stride, mask=mask, other=0.0)
            dot += feature.to(tl.float32) * value
        tl.store(out + places, (value * factor).to(out.dtype.element_ty), mask=mask)
    if DOTS:
        tl.store(dots + program, tl.sum(dot))
