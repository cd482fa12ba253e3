"""Triton kernels of infonce_a100_d768, specialised to D = 768.

Loss       L = 1/M * (sum_i (r_i - p_i))
Gradient   g_ij = 1/M * (exp(x_ij - r_i) - [j = positive(i)])

Legend
    q (M, D), k (N, D)  features of one rank's queries and of the visiting keys, any strides
    z = q k^T           similarity, fp32; one tile of it lives in registers and is never stored
    x = f(z)            logit; y = x log2(e) - shift log2(e) is what the kernels exponentiate in base 2 (the shift is
                        the same for every pair: it cancels in every softmax and enters only the loss)
    r_i                 log-sum-exp of row i, as a wide float: sum of 2^y = mantissa * 2^exponent, exponent an integer
    g                   gradient of one logit, times M

Order. Partial sums are added in the order of their blocks, and no two programs add to one place: results repeat
bitwise. A program writes its own flag, always, so flags need no clearing.

Strips. A program of the forward owns a block of queries and walks a strip of key blocks: sums of its rows stay in
registers. A program of the gradient owns a block of keys and walks a strip of row blocks.

Range. One exponential per element, against a reference for each row: the largest value of a sample. A strip with a sum
above LARGEST_SUM is added up again by `forward_wide`. A block of queries has g computed again by `row_gradient_wide`
where a sum lies more than ROW_SPREAD binary orders off its reference, or is not finite. Logits may reach 10^9.
"""

import triton
import triton.language as tl

DIM = tl.constexpr(768)
WIDE_ROWS = tl.constexpr(32)  # at a time where a strip is computed again
QUERY_SHARE = tl.constexpr(1.0)
FORWARD_ROWS = tl.constexpr(128)
FORWARD_KEYS = tl.constexpr(64)
FORWARD_DEPTH = tl.constexpr(64)
GRADIENT_ROWS = tl.constexpr(128)
GRADIENT_KEYS = tl.constexpr(128)
GRADIENT_DEPTH = tl.constexpr(64)
PRODUCT_ROWS = tl.constexpr(128)
PRODUCT_KEYS = tl.constexpr(128)
PRODUCT_DEPTH = tl.constexpr(64)
POSITIVE_ROWS = tl.constexpr(64)
POSITIVE_DEPTH = tl.constexpr(64)
FINISH_ROWS = tl.constexpr(16)
FINISH_DEPTH = tl.constexpr(256)
VECTOR_ROWS = tl.constexpr(128)  # rows per program of the kernels that only touch vectors
MERGE_ROWS = tl.constexpr(32)  # of the partial sums: 64 parts at a time, so that few loads follow one another
MERGE_PARTS = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SAMPLE_KEYS = tl.constexpr(64)
ROW_SPREAD = tl.constexpr(80.0)  # largest p, and smallest share; 46 orders are left for features
LARGEST_SUM = tl.constexpr(2.0**100)


@triton.jit
def base2_slope(scale_ptr, bias_ptr):
    """y = base2_slope * z."""
    scale = tl.load(scale_ptr)
    return (scale) * LOG2E


@triton.jit
def load_block(source, row0, depth0, rows, row_stride, depth_stride, ROWS: tl.constexpr, DEPTH: tl.constexpr,
               DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr):
    """Tile (ROWS, DEPTH) of a feature matrix; zero beyond its last row and column.

    DESCRIPTORS: `source` is a tensor descriptor, which fills with zeros itself. WIDEN: the interpreter has no bf16.
    """
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
def add_products(z, a, b, WIDEN: tl.constexpr):
    """z + a b^T. All kernels add along the depth in one order: a similarity has the same bits in each of them.

    The interpreter's order depends on the shapes of tiles: it adds in fp64, and rounds once, when a tile is done.
    """
    if WIDEN:
        z += tl.dot(a.to(tl.float64), b.T.to(tl.float64))
    else:
        z = tl.dot(a, b.T, z, input_precision="ieee")
    return z


@triton.jit
def similarity(q, k, row0, key0, queries, keys, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride,
        ROWS: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr, DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr):
    """z (ROWS, KEYS) fp32 of one tile; zero beyond the last row and key."""
    z = tl.zeros((ROWS, KEYS), tl.float64 if WIDEN else tl.float32)
    for depth0 in range(0, DIM, DEPTH):
        a = load_block(q, row0, depth0, queries, q_row_stride, q_depth_stride, ROWS, DEPTH, DESCRIPTORS, WIDEN)
        b = load_block(k, key0, depth0, keys, k_row_stride, k_depth_stride, KEYS, DEPTH, DESCRIPTORS, WIDEN)
        z = add_products(z, a, b, WIDEN)
    return z.to(tl.float32)


@triton.jit
def strip_of(program, queries, strip, ROWS: tl.constexpr):
    """A program's block of keys, its number among the strips of that block, and its first and last + 1 row block."""
    row_blocks = tl.cdiv(queries, ROWS)
    strips = tl.cdiv(row_blocks, strip)
    number = program % strips
    return program // strips, number, number * strip, min(number * strip + strip, row_blocks)


@triton.jit
def strip_of_keys(program, queries, keys, strip):
    """A program's block of queries, its number among the strips of that block, and its first and last + 1 key block.

    Programs that run at once have different queries and walk the same keys, which L2 then holds.
    """
    row_blocks = tl.cdiv(queries, FORWARD_ROWS)
    number = program // row_blocks
    return program % row_blocks, number, number * strip, min(number * strip + strip, tl.cdiv(keys, FORWARD_KEYS))


@triton.jit(do_not_specialize=["queries", "keys"])
def row_references(q, k, scale_ptr, bias_ptr, own_reference, queries, keys, q_row_stride, q_depth_stride,
        k_row_stride, k_depth_stride, WIDEN: tl.constexpr):
    """The reference of each query: the largest y of SAMPLE_KEYS keys, spread over those given, as an integer.

    A row's sum is at least half its 2^reference. A sample that misses the largest y by too much is found in `shares`.
    """
    rows = tl.program_id(0) * WIDE_ROWS + tl.arange(0, WIDE_ROWS)
    columns = tl.arange(0, SAMPLE_KEYS).to(tl.int64) * keys // SAMPLE_KEYS
    z = tl.zeros((WIDE_ROWS, SAMPLE_KEYS), tl.float32)
    for depth0 in range(0, DIM, FORWARD_DEPTH):
        d = (depth0 + tl.arange(0, FORWARD_DEPTH)).to(tl.int64)
        a = tl.load(q + rows.to(tl.int64)[:, None] * q_row_stride + d[None, :] * q_depth_stride,
                    mask=(rows < queries)[:, None] & (d < DIM)[None, :], other=0.0)
        b = tl.load(k + columns[:, None] * k_row_stride + d[None, :] * k_depth_stride,
                    mask=(d < DIM)[None, :], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        z = tl.dot(a, b.T, z, input_precision="ieee")
    y = z * base2_slope(scale_ptr, bias_ptr)
    tl.store(own_reference + rows, tl.floor(tl.max(y, axis=1)), mask=rows < queries)


@triton.jit(do_not_specialize=["queries", "keys", "strip"])
def forward(q, k, scale_ptr, bias_ptr, own_reference, row_exponent, row_sum, flags, stash, queries, keys, strip,
        rows_stride, stash_stride, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride,
        MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr, STASH: tl.constexpr):
    """One strip: each z is computed once, and its p = 2^(y - the row's reference) added to the row's sum.

    Sums stay in registers until the strip is done, (strips, rows). STASH: p goes to `stash` (rows, keys), whole tiles
    in
    bf16. MASKED: the panel has ragged tiles, whose terms are cleared. The flag is up if a sum is too large.
    """
    program = tl.program_id(0)
    row_block, number, first_block, stop_block = strip_of_keys(program, queries, keys, strip)
    row0 = row_block * FORWARD_ROWS
    rows = row0 + tl.arange(0, FORWARD_ROWS)
    slope = base2_slope(scale_ptr, bias_ptr)
    row_reference = tl.load(own_reference + tl.minimum(rows, queries - 1))
    row_sums = tl.zeros((FORWARD_ROWS,), tl.float32)
    for key_block in tl.range(first_block, stop_block, flatten=True):
        key0 = key_block * FORWARD_KEYS
        z = similarity(q, k, row0, key0, queries, keys, q_row_stride, q_depth_stride, k_row_stride,
                       k_depth_stride, FORWARD_ROWS, FORWARD_KEYS, FORWARD_DEPTH, DESCRIPTORS, WIDEN)
        p = tl.exp2(tl.fma(z, slope, -row_reference[:, None]))
        if MASKED:
            columns = key0 + tl.arange(0, FORWARD_KEYS)
            p = tl.where((rows < queries)[:, None] & (columns < keys)[None, :], p, 0.0)
        if STASH:
            corner = stash + row0.to(tl.int64) * stash_stride + key0
            places = tl.arange(0, FORWARD_ROWS)[:, None] * stash_stride + tl.arange(0, FORWARD_KEYS)[None, :]
            tl.store(corner + places, p.to(stash.dtype.element_ty))
        row_sums += tl.sum(p, axis=1)
    tl.store(row_exponent + number * rows_stride + rows, row_reference, mask=rows < queries)
    tl.store(row_sum + number * rows_stride + rows, row_sums, mask=rows < queries)
    tl.store(flags + program, (tl.max(row_sums) > LARGEST_SUM).to(tl.int32))


@triton.jit(do_not_specialize=["queries", "keys", "strip"])
def forward_wide(q, k, scale_ptr, bias_ptr, row_exponent, row_sum, flags, queries, keys, strip, rows_stride,
        q_row_stride, q_depth_stride, k_row_stride, k_depth_stride, WIDEN: tl.constexpr):
    """Computes a flagged strip again, each row against its own largest y; exits at once elsewhere.

    Launched as `forward` was, with the same strips, whose sums it overwrites. It takes WIDE_ROWS at a time, as it holds
    more registers, and always pointers. A first walk finds the largest y: all terms of a row then have one reference,
    which `positives` rounds by.
    """
    program = tl.program_id(0)
    if tl.load(flags + program) != 0:
        row_block, number, first_block, stop_block = strip_of_keys(program, queries, keys, strip)
        slope = base2_slope(scale_ptr, bias_ptr)
        first_row = row_block * FORWARD_ROWS
        for index in range(0, tl.cdiv(min(first_row + FORWARD_ROWS, queries) - first_row, WIDE_ROWS)):
            row0 = first_row + index * WIDE_ROWS
            rows = row0 + tl.arange(0, WIDE_ROWS)
            row_reference = tl.full((WIDE_ROWS,), float("-inf"), tl.float32)
            for key_block in range(first_block, stop_block):
                key0 = key_block * FORWARD_KEYS
                z = similarity(q, k, row0, key0, queries, keys, q_row_stride, q_depth_stride, k_row_stride,
                               k_depth_stride, WIDE_ROWS, FORWARD_KEYS, FORWARD_DEPTH, False, WIDEN)
                y = z * slope + tl.where(key0 + tl.arange(0, FORWARD_KEYS) < keys, 0.0, float("-inf"))[None, :]
                row_reference = tl.maximum(row_reference, tl.max(y, axis=1))
            row_reference = tl.floor(row_reference)
            row_sums = tl.zeros((WIDE_ROWS,), tl.float32)
            for key_block in range(first_block, stop_block):
                key0 = key_block * FORWARD_KEYS
                z = similarity(q, k, row0, key0, queries, keys, q_row_stride, q_depth_stride, k_row_stride,
                               k_depth_stride, WIDE_ROWS, FORWARD_KEYS, FORWARD_DEPTH, False, WIDEN)
                p = tl.exp2(tl.fma(z, slope, -row_reference[:, None]))
                row_sums += tl.sum(tl.where((key0 + tl.arange(0, FORWARD_KEYS) < keys)[None, :], p, 0.0), axis=1)
            tl.store(row_exponent + number * rows_stride + rows, row_reference, mask=rows < queries)
            tl.store(row_sum + number * rows_stride + rows, row_sums, mask=rows < queries)


@triton.jit
def binary_exponent(x):
    """floor(log2(x)) of positive numbers in fp32, read off: a rounded log2 reaches the next integer too early."""
    return ((x.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def merge_rows(block, part_exponent, part_sum, exponent, mantissa, rows, parts, part_stride, written):
    """Wide-float sum of `parts` partial sums (parts, part_stride) into (exponent, mantissa), in the order of the parts.

    written: rows that hold statistics already, all or none. After it 1 <= mantissa < 2: numbers have one form only.
    """
    r = block * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    e = tl.load(exponent + r, mask=r < written, other=0.0)
    s = tl.load(mantissa + r, mask=r < written, other=0.0)
    e = tl.where((s == 0.0) & (r < rows), float("-inf"), e)  # nothing so far
    for first in range(0, parts, MERGE_PARTS):
        part = first + tl.arange(0, MERGE_PARTS)
        place = part[:, None].to(tl.int64) * part_stride + r[None, :]  # sums of many ranks may exceed 2^31
        mask = (part < parts)[:, None] & (r < rows)[None, :]
        part_e = tl.load(part_exponent + place, mask=mask, other=float("-inf"))
        part_s = tl.load(part_sum + place, mask=mask, other=0.0)
        top = tl.maximum(e, tl.max(part_e, axis=0))
        s = s * tl.exp2(e - top) + tl.sum(part_s * tl.exp2(part_e - top[None, :]), axis=0)
        e = top
    carried = e + binary_exponent(s)
    tl.store(exponent + r, carried, mask=r < rows)
    tl.store(mantissa + r, s * tl.exp2(e - carried), mask=r < rows)  # beyond 2^24 the sum above is rounded


@triton.jit(do_not_specialize=["queries", "row_parts", "queries_written"])
def merge(row_exponent, row_sum, query_exponent, query_mantissa, queries, row_parts, rows_stride,
        queries_written):
    """Adds the partial sums of one panel to the running statistics of queries, each by one program."""
    program = tl.program_id(0)
    merge_rows(program, row_exponent, row_sum, query_exponent, query_mantissa, queries, row_parts,
               rows_stride, queries_written)


@triton.jit(do_not_specialize=["first_key", "queries", "keys", "strip"])
def positives(q, k, labels, first_key, row_exponent, positive_z, positive_row_reference, queries, keys, strip,
        rows_stride, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride, WIDEN: tl.constexpr):
    """Of each row's positive, where it lies in this panel: z, and the references that its 2^y was taken against.

    z is the diagonal of a tile of q against the gathered keys, by the products of a tile of z in their order: numerator
    and denominator of a probability near 1 must round alike. Rows whose positive lies elsewhere are left as they are.
    """
    rows = tl.program_id(0) * POSITIVE_ROWS + tl.arange(0, POSITIVE_ROWS)
    columns = tl.load(labels + rows, mask=rows < queries, other=-1) - first_key
    here = (rows < queries) & (columns >= 0) & (columns < keys)
    z = tl.zeros((POSITIVE_ROWS, POSITIVE_ROWS), tl.float64 if WIDEN else tl.float32)
    for depth0 in range(0, DIM, POSITIVE_DEPTH):
        d = (depth0 + tl.arange(0, POSITIVE_DEPTH)).to(tl.int64)
        mask = here[:, None] & (d < DIM)[None, :]
        a = tl.load(q + rows.to(tl.int64)[:, None] * q_row_stride + d[None, :] * q_depth_stride, mask=mask, other=0.0)
        b = tl.load(k + columns[:, None] * k_row_stride + d[None, :] * k_depth_stride, mask=mask, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        z = add_products(z, a, b, WIDEN)
    z = z.to(tl.float32)
    i = tl.arange(0, POSITIVE_ROWS)
    tl.store(positive_z + rows, tl.sum(tl.where(i[:, None] == i[None, :], z, 0.0), axis=1), mask=here)
    part = columns // (FORWARD_KEYS * strip)
    tl.store(positive_row_reference + rows,
             tl.load(row_exponent + part * rows_stride + rows, mask=here, other=0.0), mask=here)


@triton.jit
def log2_of(exponent, mantissa):
    """log2(mantissa * 2^exponent) in fp64, to 2e-11; the same for one number, whatever its exponent.

    log2(1 + x) / x is a polynomial, fitted on [0, 1]: Triton's logarithm takes 1.2 us more per 1 024 pairs on an H100.
    """
    shift = binary_exponent(mantissa)
    x = (mantissa * tl.exp2(-shift) - 1.0).to(tl.float64)
    y = (((((((((((0.0011469616408622933 * x - 0.008734626182771786) * x + 0.031195072612753665)
          * x - 0.07083981853623195) * x + 0.11848590735604052) * x - 0.16259348790852485)
          * x + 0.20067685916395836) * x - 0.23930119697203714) * x + 0.2883793687620684) * x - 0.3606603221210365)
          * x + 0.4808977512935877) * x - 0.7213475099504594) * x + 1.4426950408579997
    return exponent.to(tl.float64) + shift + y * x


@triton.jit
def positive_log2(z, slope, reference):
    """y of a positive in fp64: the logarithm of the very term that its sum holds, or y itself where fp32 has none."""
    y = tl.fma(z, slope, -reference)
    term = tl.exp2(y)
    return tl.where(term >= 2.0**-126, log2_of(reference, term), y.to(tl.float64) + reference)


@triton.jit(do_not_specialize=["queries"])
def loss_terms(query_exponent, query_mantissa, positive_z, positive_row_reference, scale_ptr, bias_ptr,
        part_sums, queries, query_weight, BLOCK: tl.constexpr):
    """part_sums[program] = what BLOCK of queries add to this rank's share of the loss, in fp64.

    The statistics are complete. p, r, c are logits with their shift; a lone pair's terms cancel to exactly 0.
    """
    scale = tl.load(scale_ptr).to(tl.float64)
    bias = tl.load(bias_ptr).to(tl.float64)
    slope = base2_slope(scale_ptr, bias_ptr)
    shift = bias
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(positive_z + i, mask=i < queries, other=0.0)
    reference = tl.load(positive_row_reference + i, mask=i < queries, other=0.0)
    p = positive_log2(z, slope, reference) * LN2 + shift
    exponent = tl.load(query_exponent + i, mask=i < queries, other=0.0)
    r = log2_of(exponent, tl.load(query_mantissa + i, mask=i < queries, other=1.0)) * LN2 + shift
    terms = tl.where(i < queries, query_weight * (r - p), 0.0)
    tl.store(part_sums + tl.program_id(0), tl.sum(terms).to(part_sums.dtype.element_ty))


@triton.jit(do_not_specialize=["parts"])
def total_loss(part_sums, loss, parts, BLOCK: tl.constexpr):
    """loss = the sum of the parts in a fixed order, by one program."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, parts, BLOCK):
        total += tl.load(part_sums + start + lanes, mask=start + lanes < parts, other=0.0)
    tl.store(loss, tl.sum(total).to(tl.float32))


@triton.jit(do_not_specialize=["queries", "keys", "strip"])
def gradient(q, k, scale_ptr, bias_ptr, query_exponent, query_mantissa, g, queries, keys, strip, g_stride,
        q_row_stride, q_depth_stride, k_row_stride, k_depth_stride, DESCRIPTORS: tl.constexpr,
        WIDEN: tl.constexpr):
    """g = share_i 2^(y - r_i).

    The statistics are complete. g (rows, g_stride) has whole tiles and is stored without a mask: what lies beyond the
    last row and key holds any number, and is never read. Positives get the g of a negative; `gradient_positives`
    follows. No exponent is large, as no term is above its sum: nothing is flagged.
    """
    program = tl.program_id(0)
    key_block, number, first_block, stop_block = strip_of(program, queries, strip, GRADIENT_ROWS)
    key0 = key_block * GRADIENT_KEYS
    columns = key0 + tl.arange(0, GRADIENT_KEYS)
    slope = base2_slope(scale_ptr, bias_ptr)
    for row_block in tl.range(first_block, stop_block, flatten=True):
        row0 = row_block * GRADIENT_ROWS
        rows = row0 + tl.arange(0, GRADIENT_ROWS)
        z = similarity(q, k, row0, key0, queries, keys, q_row_stride, q_depth_stride, k_row_stride,
                       k_depth_stride, GRADIENT_ROWS, GRADIENT_KEYS, GRADIENT_DEPTH, DESCRIPTORS, WIDEN)
        own_rows = tl.minimum(rows, queries - 1)
        e = tl.load(query_exponent + own_rows)
        a = QUERY_SHARE / tl.load(query_mantissa + own_rows)
        value = tl.exp2(tl.fma(z, slope, -e[:, None])) * a[:, None]
        corner = g + row0.to(tl.int64) * g_stride + key0
        places = tl.arange(0, GRADIENT_ROWS)[:, None] * g_stride + tl.arange(0, GRADIENT_KEYS)[None, :]
        tl.store(corner + places, value.to(g.dtype.element_ty))


@triton.jit
def positive_gradient(
        rows, columns, here, positive_z, positive_row_reference, scale_ptr, bias_ptr,
        query_exponent, query_mantissa):
    """g of the positives (rows, columns), each share times p - 1 = (2^y - sum) / sum.

    2^y is rounded as it was when it entered the sums, so g is 0 where a sum holds nothing else, and elsewhere as exact
    as the sum of the others is in the sum; a rounded p would leave its own rounding. Where not `here` it is any number.
    """
    slope = base2_slope(scale_ptr, bias_ptr)
    z = tl.load(positive_z + rows, mask=here, other=0.0)
    reference = tl.load(positive_row_reference + rows, mask=here, other=0.0)
    term = (tl.exp2(tl.fma(z, slope, -reference))
            * tl.exp2(reference - tl.load(query_exponent + rows, mask=here, other=0.0)))
    total = tl.load(query_mantissa + rows, mask=here, other=1.0)
    value = QUERY_SHARE * ((term - total) / total)
    return value


@triton.jit(do_not_specialize=["first_key", "queries", "keys"])
def gradient_positives(labels, first_key, positive_z, positive_row_reference, scale_ptr, bias_ptr,
        query_exponent, query_mantissa, g, queries, keys, g_stride):
    """Overwrites g of each positive: its share is added in fp32, before g is rounded, or 1 - p would lose its digits.

    Rows whose positive lies in another panel are left as they are. No two rows write to one place.
    """
    rows = tl.program_id(0) * VECTOR_ROWS + tl.arange(0, VECTOR_ROWS)
    columns = tl.load(labels + rows, mask=rows < queries, other=-1) - first_key
    here = (rows < queries) & (columns >= 0) & (columns < keys)
    value = positive_gradient(
        rows, columns, here, positive_z, positive_row_reference, scale_ptr, bias_ptr,
        query_exponent, query_mantissa)
    tl.store(g + rows.to(tl.int64) * g_stride + columns, value.to(g.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["queries", "keys", "strip"])
def shares(query_exponent, query_mantissa, positive_z, own_reference, share, flags, queries, keys, strip):
    """share_i = QUERY_SHARE * 2^reference / (the sum of row i): g = share_i p of the forward's p = 2^(y - reference).

    The statistics of the rows are complete. A program has the rows of one block. If one of them lies more than
    ROW_SPREAD above its reference, or is not finite, the flags of all the block's strips go up. `row_gradient_wide`
    follows with the same strips, and writes g itself: shares of the block are 1. A row is NaN where no key has its
    label:
    `positive_z` holds none.
    """
    row_block, row_blocks = tl.program_id(0), tl.num_programs(0)
    rows = row_block * FORWARD_ROWS + tl.arange(0, FORWARD_ROWS)
    inside = rows < queries
    mantissa = tl.load(query_mantissa + rows, mask=inside, other=1.0)
    mantissa += 0.0 * tl.load(positive_z + rows, mask=inside, other=0.0)
    tl.store(query_mantissa + rows, mantissa, mask=inside)
    above = (tl.load(query_exponent + rows, mask=inside, other=0.0)
             - tl.load(own_reference + rows, mask=inside, other=0.0))
    own = tl.exp2(-above) / mantissa * QUERY_SHARE
    # A NaN is not held.
    held = (above < ROW_SPREAD) & (above > -ROW_SPREAD) & (mantissa < 4.0)
    beyond = tl.max(tl.where(held, 0, 1))
    tl.store(share + rows, tl.where(beyond != 0, 1.0, own), mask=inside)
    for number in range(0, tl.cdiv(tl.cdiv(keys, FORWARD_KEYS), strip)):
        tl.store(flags + number * row_blocks + row_block, beyond)


@triton.jit(do_not_specialize=["queries", "keys", "strip"])
def row_gradient_wide(q, k, scale_ptr, bias_ptr, query_exponent, query_mantissa, g, flags, queries, keys, strip,
        g_stride, q_row_stride, q_depth_stride, k_row_stride, k_depth_stride, WIDEN: tl.constexpr):
    """Computes a flagged strip again, g = share_i 2^(y - r_i); exits at once elsewhere.

    Launched with the strips of `forward`, whose p it overwrites. It takes WIDE_ROWS at a time, as it holds more
    registers, and always pointers. g has whole tiles: what lies beyond the last row and key is never read.
    """
    program = tl.program_id(0)
    if tl.load(flags + program) != 0:
        row_block, number, first_block, stop_block = strip_of_keys(program, queries, keys, strip)
        slope = base2_slope(scale_ptr, bias_ptr)
        first_row = row_block * FORWARD_ROWS
        for index in range(0, tl.cdiv(min(first_row + FORWARD_ROWS, queries) - first_row, WIDE_ROWS)):
            row0 = first_row + index * WIDE_ROWS
            rows = row0 + tl.arange(0, WIDE_ROWS)
            own_rows = tl.minimum(rows, queries - 1)
            a = QUERY_SHARE / tl.load(query_mantissa + own_rows)
            for key_block in range(first_block, stop_block):
                key0 = key_block * FORWARD_KEYS
                z = similarity(q, k, row0, key0, queries, keys, q_row_stride, q_depth_stride, k_row_stride,
                               k_depth_stride, WIDE_ROWS, FORWARD_KEYS, FORWARD_DEPTH, False, WIDEN)
                e = tl.load(query_exponent + own_rows)  # kept across tiles it would spill 8 bytes of sm_100
                value = tl.exp2(tl.fma(z, slope, -e[:, None])) * a[:, None]
                corner = g + row0.to(tl.int64) * g_stride + key0
                places = tl.arange(0, WIDE_ROWS)[:, None] * g_stride + tl.arange(0, FORWARD_KEYS)[None, :]
                tl.store(corner + places, value.to(g.dtype.element_ty))


@triton.jit(do_not_specialize=["first_key", "queries", "keys"])
def row_positives(labels, first_key, positive_z, positive_row_reference, scale_ptr, bias_ptr, query_exponent,
        query_mantissa, share, g, queries, keys, g_stride):
    """Overwrites p of each positive by g / share_i, formed in fp32: a rounded p would lose the digits of 1 - p.

    Rows whose positive is no key of the panel are left as they are. No two rows write to one place.
    """
    rows = tl.program_id(0) * VECTOR_ROWS + tl.arange(0, VECTOR_ROWS)
    columns = tl.load(labels + rows, mask=rows < queries, other=-1) - first_key
    here = (rows < queries) & (columns >= 0) & (columns < keys)
    value = positive_gradient(
        rows, columns, here, positive_z, positive_row_reference, scale_ptr, bias_ptr,
        query_exponent, query_mantissa)
    value /= tl.load(share + rows, mask=here, other=1.0)
    tl.store(g + rows.to(tl.int64) * g_stride + columns, value.to(g.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows"])
def weighted_queries(q, share, out, rows, q_row_stride, q_depth_stride):
    """out (rows, D) = share_i q_i, contiguous, in the features' dtype: dk += p^T out."""
    r = tl.program_id(0) * FINISH_ROWS + tl.arange(0, FINISH_ROWS)
    factor = tl.load(share + r, mask=r < rows, other=0.0)[:, None]
    for depth0 in range(0, DIM, FINISH_DEPTH):
        d = depth0 + tl.arange(0, FINISH_DEPTH)
        mask = (r < rows)[:, None] & (d < DIM)[None, :]
        places = r.to(tl.int64)[:, None] * DIM + d[None, :]  # rows * D may exceed 2^31
        source = q + r.to(tl.int64)[:, None] * q_row_stride + d.to(tl.int64)[None, :] * q_depth_stride
        value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + places, (value * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def product(g, x, total, rows, inner, g_row_stride, g_inner_stride, x_inner_stride, x_depth_stride,
        FRESH: tl.constexpr, WIDEN: tl.constexpr):
    """One tile of total (rows, D) += g (rows, inner) x (inner, D), any strides of g and x; total is contiguous, fp32.

    No other program touches the tile, and the inner dimension is added in order. FRESH: total holds nothing yet.
    """
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
    if not FRESH:
        result += tl.load(total + places, mask=mask, other=0.0)
    tl.store(total + places, result, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def finish(total, share, x, out, dots, scale_ptr, bias_ptr, upstream, weight, rows, x_row_stride,
        x_depth_stride, DOTS: tl.constexpr, SHARED: tl.constexpr):
    """out (rows, D) = upstream * weight * (scale) * total, rounded once, to the features' dtype.

    SHARED: before all that each row of total is multiplied by its `share`.
    DOTS: dots[program] = sum over its rows of x . total, of which `scalars` makes dscale: on the side of queries.
    """
    program = tl.program_id(0)
    r = program * FINISH_ROWS + tl.arange(0, FINISH_ROWS)
    scale = tl.load(scale_ptr)
    bias = tl.load(bias_ptr)
    # An affine logit's gradients do not depend on the bias: the last term keeps one that is not finite.
    factor = tl.load(upstream).to(tl.float32) * weight * (scale) + bias * 0.0
    dot = tl.zeros((FINISH_ROWS, FINISH_DEPTH), tl.float32)
    for depth0 in range(0, DIM, FINISH_DEPTH):
        d = depth0 + tl.arange(0, FINISH_DEPTH)
        mask = (r < rows)[:, None] & (d < DIM)[None, :]
        places = r.to(tl.int64)[:, None] * DIM + d[None, :]  # rows * D may exceed 2^31
        value = tl.load(total + places, mask=mask, other=0.0)
        if SHARED:
            value *= tl.load(share + r, mask=r < rows, other=0.0)[:, None]
        if DOTS:
            feature = tl.load(x + r.to(tl.int64)[:, None] * x_row_stride + d.to(tl.int64)[None, :] * x_depth_stride,
                              mask=mask, other=0.0)
            dot += feature.to(tl.float32) * value
        tl.store(out + places, (value * factor).to(out.dtype.element_ty), mask=mask)
    if DOTS:
        tl.store(dots + program, tl.sum(dot))


@triton.jit(do_not_specialize=["parts", "rows"])
def scalars(dots, dscale, dbias, scale_ptr, bias_ptr, upstream, weight, parts, rows, BLOCK: tl.constexpr):
    """dscale = upstream * weight * (sum of dots), dbias = upstream * weight * (0.0 * rows).

    One program adds the dots in fp64, in a fixed order.
    """
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, parts, BLOCK):
        total += tl.load(dots + start + lanes, mask=start + lanes < parts, other=0.0).to(tl.float64)
    sum_of_dots = tl.sum(total).to(tl.float32)
    bias = tl.load(bias_ptr)
    unit = tl.load(upstream).to(tl.float32) * weight
    tl.store(dscale, unit * sum_of_dots + bias * 0.0)
    tl.store(dbias, unit * (0.0 * rows) + (sum_of_dots + bias) * 0.0)  # the last term keeps a NaN


@triton.jit(do_not_specialize=["rows"])
def rescale(kept, out, upstream, rows):
    """out (rows, D) = upstream * kept, rounded once; both are contiguous."""
    r = tl.program_id(0) * FINISH_ROWS + tl.arange(0, FINISH_ROWS)
    factor = tl.load(upstream).to(tl.float32)
    for depth0 in range(0, DIM, FINISH_DEPTH):
        d = depth0 + tl.arange(0, FINISH_DEPTH)
        mask = (r < rows)[:, None] & (d < DIM)[None, :]
        places = r.to(tl.int64)[:, None] * DIM + d[None, :]  # rows * D may exceed 2^31
        source = kept + places
        value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + places, (value * factor).to(out.dtype.element_ty), mask=mask)
