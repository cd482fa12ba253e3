"""The device sweep: what one device does with one block of queries and one block of keys, in plain torch.

    q (m, 512)   queries, row i       z_ij  q_i . k_j
    k (n, 512)   keys, row j          x_ij  logit; x2 = log2(e) * x
    r_i  log-sum-exp of row i          p_i   logit of the positive of row i
    c_j  log-sum-exp of column j

    L = 1/M * (sum_i ((r_i - p_i) / 2) + sum_j ((c_j - p_j) / 2))
    g_ij = 1/M * (0.5 * exp(x_ij - r_i) + 0.5 * exp(x_ij - c_j) - [j = positive(i)])

The m x n matrix is never whole: it is walked in panels. Scratch memory, exactly:
    2 panels (z and the exponentials) of float32, the smaller of the constants below and the block
    a few vectors as long as a panel's rows and columns
    in `finish` instead of all that: 1 strip of STRIP_ROWS rows of features
Sums are taken in a fixed order, so results are bitwise repeatable for a fixed number of threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import loss as formulas
from ._runtime.launch import read_in_place
from ._runtime.package import Block
from ._runtime.statistics import LOG2E, Statistics, excess, log, merge, merge_parts

FEATURE_DTYPE = torch.float32
STATISTICS_DTYPE = torch.float32
DIM = 512
LINE = 16  # elements: what begins elsewhere in a line of the cache, MKL may add up in another order
FORWARD_ROWS, FORWARD_KEYS = 2048, 2048  # panel of the forward sweep
PANEL_ROWS, PANEL_KEYS = 2048, 2048  # panel of the backward sweep
FINISH_ROWS = PANEL_ROWS  # rows per partial sum of dscale
STRIP_ROWS = 64  # rows at a time for an expression that needs temporaries
LOGIT_ROWS = PANEL_ROWS  # of a panel, for its softmaxes
LIBRARY_MULTIPLE = 1  # sums for dk have room for whole ones
# Kept of each query's positive: z, then exponent and term, as a wide float, in each sum that holds it.
POSITIVE_PARTS = 5
GRADIENT_EXPONENT = 0  # gradients of logits are float32 here: no scaling against underflow


def stash_shape(*_: object) -> None:
    """Nothing is kept between blocks: no part of the matrix, and a block's panels are gone when it is done."""


forward_scratch = backward_scratch = stash_shape


def forward_block(
    block: Block, scratch: None, fresh_queries: bool = False, fresh_keys: bool = False, stash: Tensor | None = None,
    arrive: Callable[[], None] | None = None,
) -> None:
    """Merges every logit of the block into its statistics, and notes the positives found here.

    What is fresh was never written. arrive(): called before `block.keys` is touched; it sends what leaves, and waits
    for what comes. `scratch` and `stash` are for other strategies.
    """
    if fresh_queries:
        block.queries.mantissa.zero_()
    if fresh_keys:
        block.keys.mantissa.zero_()
    m, n = len(block.q), len(block.k)
    panels = Panels(block.q, block.k, FORWARD_ROWS, FORWARD_KEYS)
    for i in range(0, m, FORWARD_ROWS):
        own = block.panel(i, FORWARD_ROWS, 0, n)
        q = converted(own.q, panels.q)
        for j in range(0, n, FORWARD_KEYS):
            part = own.panel(0, FORWARD_ROWS, j, FORWARD_KEYS)
            z, e = panels.products(q, converted(part.k, panels.k))
            row, column = positive_places(part)
            part.positive[0, row] = z[row, column]
            x2 = logits_(z, part.scale, part.bias)
            exponent = add_(part.queries, x2, e, 1)
            part.positive[1, row], part.positive[2, row] = exponent[row], e[row, column]
            if arrive:
                arrive()
            exponent = add_(part.keys, x2, e, 0)
            part.positive[3, row], part.positive[4, row] = exponent[column], e[row, column]


def loss_terms(block: Block, weight: float) -> Tensor:
    """`weight` times the sum of the terms of the block's queries and keys, 0-dim; there may be none of either."""
    queries, scale, bias, positive = block.queries, block.scale, block.bias, block.positive
    total = positive.new_zeros((), dtype=torch.float64)
    for i in range(0, max(len(block.q), len(block.k)), FORWARD_ROWS):
        panel = slice(i, i + FORWARD_ROWS)
        r, p = log(queries, panel), positive_logit(*positive[:3, panel], scale, bias)
        terms = formulas.query_term(r, p).mul_(weight)
        # A key's term is linear in p. A positive is counted with its query: its key may be on another rank. Terms of
        # row and key i are added before all others, so that those of a pair that sees nobody else cancel to 0.
        # Rows one by one: a list of them would be copied to the device, which waits for it.
        c = log(block.keys, panel)
        p = positive_logit(positive[0, panel], positive[3, panel], positive[4, panel], scale, bias)
        nothing = p.new_zeros(())
        terms += (formulas.key_term(nothing, p) - formulas.key_term(nothing, nothing)).mul_(weight)
        key_terms = formulas.key_term(c, nothing).mul_(weight)
        paired = min(len(terms), len(key_terms))
        terms[:paired] += key_terms[:paired]
        total += key_terms[paired:].sum()
        total += terms.sum()
    return total.to(STATISTICS_DTYPE)


def backward_block(
    block: Block, dq: Tensor | None, dk: Tensor | None, scratch: None, fresh_dq: bool = False, fresh_dk: bool = False,
    stash: Tensor | None = None, arrive: Callable[[], None] | None = None,
) -> None:
    """Adds sum_j g_ij k_j to dq (m, D) and sum_i g_ij q_i to dk (n, D), both contiguous float32.

    g here is M * dL/dx, recomputed panel by panel from complete statistics; `finish` does the rest.
    One of them may be None, and is not computed. What is fresh was never written: the first sums replace what it holds.
    arrive(): called before `dk` is touched.
    `scratch` and `stash` are for other strategies.
    """
    m, n = len(block.q), len(block.k)
    panels = Panels(block.q, block.k, PANEL_ROWS, PANEL_KEYS)
    for i in range(0, m, PANEL_ROWS):
        own = block.panel(i, PANEL_ROWS, 0, n)
        q = converted(own.q, panels.q)
        alone = excess(own.queries, slice(None), own.positive[1:3])
        alone.mul_(formulas.QUERY_SHARE).add_(formulas.POSITIVE_REST)
        for j in range(0, n, PANEL_KEYS):
            part = own.panel(0, PANEL_ROWS, j, PANEL_KEYS)
            k = converted(part.k, panels.k)
            z, g = panels.products(q, k)
            softmaxes_(z, g, part)
            # Of a positive p - 1 = (its term - the sum) / the sum: rounded once, 0 where the sum holds nothing else.
            row, column = positive_places(part)
            visible = excess(part.keys, column, part.positive[3:5, row]).mul_(formulas.KEY_SHARE)
            g[row, column] = visible.add_(alone[row])
            if dq is not None:
                panels.add_product(dq[i : i + PANEL_ROWS], g, k, fresh_dq and j == 0)
            if arrive:
                arrive()
            if dk is not None:
                panels.add_product(dk[j : j + PANEL_KEYS], g.T, q, fresh_dk and i == 0)


def finish(
    acc: Tensor, x: Tensor, scale: Tensor, bias: Tensor, upstream: Tensor, weight: float, out: Tensor,
    dots: Tensor | None = None,
) -> None:
    """Turns sums `acc` (rows, D) into the gradient of x, in `out`, which may be `acc`; acc is overwritten.

    dots (ceil(rows / FINISH_ROWS),) gets sum x_i . acc_i of FINISH_ROWS rows each, from which dscale follows.
    """
    if dots is not None:
        for part, start in enumerate(range(0, len(acc), FINISH_ROWS)):
            total = acc.new_zeros((), dtype=torch.float64)
            for first in range(start, min(start + FINISH_ROWS, len(acc)), STRIP_ROWS):
                rows = slice(first, min(first + STRIP_ROWS, start + FINISH_ROWS))
                products = torch.linalg.vecdot(x[rows].to(STATISTICS_DTYPE), acc[rows])  # as large as its operands
                total += products.sum(dtype=torch.float64)
            dots[part] = total
    acc.mul_(upstream * weight * formulas.gradient_factor(scale, bias))
    if out is not acc:
        out.copy_(acc)


def scalar_gradients(
    dots: Tensor, scale: Tensor, bias: Tensor, upstream: Tensor, weight: float, rows: int
) -> tuple[Tensor, Tensor]:
    """(dscale, dbias), 0-dim, from the partial sums of x . acc over all rows."""
    sum_of_dots = dots.sum(dtype=torch.float64).to(STATISTICS_DTYPE)
    unit = upstream * weight
    dscale = unit * formulas.dscale_factor(scale, bias) * sum_of_dots
    return dscale, unit * (formulas.DBIAS * rows) + sum_of_dots * 0.0  # the last term keeps a NaN


def merge_ranks(parts: Tensor, keys: Statistics) -> None:
    """keys (n,) = the sums of several ranks, `parts` (ranks, 2, n), in their order, whatever `keys` held."""
    for j in range(0, parts.shape[2], FORWARD_KEYS):
        columns = slice(j, j + FORWARD_KEYS)
        total = Statistics(keys.exponent[columns], keys.mantissa[columns])
        total.mantissa.zero_()
        merge_parts(total, parts[:, 0, columns], parts[:, 1, columns])


class Panels:
    """Panels of the largest size that a block needs, allocated once and used again."""

    def __init__(self, q: Tensor, k: Tensor, panel_rows: int, panel_keys: int) -> None:
        rows, columns = min(panel_rows, len(q)), min(panel_keys, len(k))
        room = max(rows * columns, rows + columns + LINE)  # also a column of either side, for `products`
        self.z, self.e = (q.new_empty(room, dtype=STATISTICS_DTYPE) for _ in range(2))
        lengths = (0, 0) if FEATURE_DTYPE == STATISTICS_DTYPE else (rows, columns)  # of what is `converted`
        self.q, self.k = (q.new_empty(length * DIM, dtype=STATISTICS_DTYPE) for length in lengths)

    def products(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """z of a panel, and room of the same shape. Both are contiguous and valid until the next call."""
        z, e = (flat[: len(q) * len(k)].view(len(q), len(k)) for flat in (self.z, self.e))
        if read_in_place(q) and read_in_place(k):
            return torch.mm(q, k.T, out=z), e
        width = max(1, (len(q) * len(k) - LINE) // (len(q) + len(k)))  # of the shape alone: one order of sums
        for d in range(0, DIM, width):
            q_part = packed(q[:, d : d + width], self.e)
            k_part = packed(k[:, d : d + width], self.e[-(-q_part.numel() // LINE) * LINE :])
            z.addmm_(q_part, k_part.T, beta=0 if d == 0 else 1)
        return z, e

    def add_product(self, total: Tensor, g: Tensor, x: Tensor, fresh: bool) -> None:
        """total += g @ x, or = if it is fresh; z is gone. Where x is not `read_in_place`, as many of its columns at a
        time as fit there."""
        whole = read_in_place(x)
        width = DIM if whole else len(self.z) // len(x)
        for d in range(0, DIM, width):
            part = x if whole else packed(x[:, d : d + width], self.z)
            total[:, d : d + width].addmm_(g, part, beta=0 if fresh else 1)


def packed(x: Tensor, room: Tensor) -> Tensor:
    """A contiguous copy of x at the start of `room`, in its dtype."""
    return room[: x.numel()].view(x.shape).copy_(x)


def converted(x: Tensor, room: Tensor) -> Tensor:
    """Features in the statistics dtype: themselves, or a copy in `room`."""
    return x if FEATURE_DTYPE == STATISTICS_DTYPE else packed(x, room)


def logits_(z: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """x2 = log2(e) * x of a panel, in the place of z."""
    shift = formulas.logit(torch.zeros_like(scale), scale, bias)
    return z.mul_(formulas.gradient_factor(scale, bias) * LOG2E).add_(shift * LOG2E)


def softmaxes_(z: Tensor, g: Tensor, block: Block) -> None:
    """g = the shares of both sides' softmaxes, of a panel; z becomes x2."""
    query_weight = formulas.QUERY_SHARE / block.queries.mantissa[:, None]
    key_weight = formulas.KEY_SHARE / block.keys.mantissa
    for first in range(0, len(z), LOGIT_ROWS):
        strip = slice(first, first + LOGIT_ROWS)
        x2 = logits_(z[strip], block.scale, block.bias)
        torch.sub(x2, block.queries.exponent[strip, None], out=g[strip]).exp2_().mul_(query_weight[strip])
        g[strip].add_(x2.sub_(block.keys.exponent).exp2_().mul_(key_weight))
        del x2  # its memory is for the terms of the next strip


def add_(statistics: Statistics, x2: Tensor, e: Tensor, axis: int) -> Tensor:
    """Merges the sums of 2**x2 along `axis` of a panel, each against the exponent of its largest term.

    Leaves the terms in `e`, and returns the exponents that they are relative to: 2**x2 = e * 2**exponent.
    """
    # An all -inf line has the sum 0; a NaN or +inf in it gives NaN.
    lowest = torch.finfo(STATISTICS_DTYPE).min
    exponent = x2.amax(axis, keepdim=True).floor_().clamp_(min=lowest)
    total = torch.sub(x2, exponent, out=e).exp2_().sum(axis)
    merge(statistics, exponent.squeeze(axis), total)
    return exponent.squeeze(axis)


def positive_places(block: Block) -> tuple[Tensor, Tensor]:
    """The rows whose positive is one of these keys, and its row among them: two int64 vectors of one length."""
    offset = block.positives - block.first_key
    first, stop = max(0, -offset), min(len(block.q), len(block.k) - offset)
    row = torch.arange(first, max(first, stop), device=block.q.device)
    return row, row + offset


def positive_logit(z: Tensor, exponent: Tensor, term: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """p in fp64 from z, exponent and term of each positive: the logarithm of the very term that its sum holds, or its
    formula where that term is lost beside the others."""
    linear = formulas.logit(z.double(), scale.double(), bias.double())
    return torch.where(term >= torch.finfo(term.dtype).tiny, log(Statistics(exponent, term)), linear)
