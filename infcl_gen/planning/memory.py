"""Every buffer that the loss allocates beyond its inputs, as SymPy expressions of a plan's sizes.

One source: `model` computes with them, plans are explained by them, and `model.markdown` writes them down.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import sympy
from sympy import Expr, Max, Min

from infcl_gen.planning.choice import SPLIT_TERMS, Choice
from infcl_gen.planning.levels import LIBRARY_MULTIPLE, LOSS_ROWS, STRIP_ROWS

LEGEND = {
    "m": "query rows of this rank",
    "n": "key rows of this rank",
    "W": "ranks in the ring",
    "D": "embedding",
    "P": "embedding, of split operands once for each term, padded to the depth of a block (fused: to its parts)",
    "e": "bytes of a feature",
    "s": "bytes of a statistic or an accumulator element",
    "F": "rows of a forward panel",
    "G": "keys of a forward panel",
    "R": "rows of a backward panel",
    "C": "keys of a backward panel",
    "S": "query rows whose tiles are kept from forward to backward (stash)",
    "Bf": "rows of a forward block",
    "Kf": "keys of a forward block",
    "Bg": "rows of a gradient block",
    "Kg": "keys of a gradient block",
    "Bu": "rows of a fused block",
    "Ku": "visiting rows of a fused block",
    "T": "strips of a forward panel for each block of keys, at most",
    "V": "strips of a backward panel for each block of keys, at most",
    "Bo": "rows of a finish block",
    "U": "multiprocessors",
    "w": "bytes of the matrix library's workspace",
}
SYMBOLS = {name: sympy.Symbol(name, integer=True, positive=True) for name in LEGEND}
m, n, W, D, P, e, s, F, G, R, C, S, Bf, Kf, Bg, Kg, Bu, Ku, T, V, Bo, U, w = SYMBOLS.values()


class ceil_div(sympy.Function):
    """ceil_div(a, b) = ceil(a / b), exact for integers."""

    nargs = 2


@dataclasses.dataclass(frozen=True)
class BufferTerm:
    """`pieces` tensors of one shape. `phase`: "both" (lives from forward to the end of backward), "forward",
    "backward", or "finish" (after a ring's last hop, when what travelled is gone and the gradients are written)."""

    name: str
    phase: str
    shape: tuple[Any, ...]
    dtype: str  # "features", "statistics", or a dtype by name (bf16: halves of split operands)
    why: str
    pieces: int = 1

    @property
    def bytes(self) -> Expr:
        sizes = {"features": e, "statistics": s, "bf16": 2, "int32": 4, "fp64": 8, "int64": 8, "uint8": 1}
        return sympy.prod(self.shape) * sizes[self.dtype] * self.pieces


@functools.cache
def buffer_terms(choice: Choice) -> tuple[BufferTerm, ...]:
    """Everything that the loss allocates beyond its inputs, in the order of its life."""
    v = choice
    ring, both, forward, backward, finish = v.ring, "both", "forward", "backward", "finish"
    positive_rows = 3 + 2 * v.has_keys if v.strategy == "torch" else 2 + v.has_keys
    rows, keys = Min(R, m), Min(C, n)
    forward_rows, forward_keys = Min(F, m), Min(G, n)
    terms = [
        BufferTerm("query_statistics", both, (2 + positive_rows, m), "statistics", "r_i as a wide float; the positive"),
        v.has_keys and BufferTerm("key_statistics", both, (2, _kept_keys(v)), "statistics", "c_j as a wide float"),
        v.labels and BufferTerm("labels", both, (m,), "int64", "index of each query's positive"),
        v.labels and BufferTerm("absent", forward, (m,), "statistics", "NaN for labels that name no key"),
        BufferTerm("scalars", both, (64, 512), "uint8", "scale, bias, loss, weights and their gradients"),
        v.library and BufferTerm("workspace", both, (w,), "uint8", "the matrix library keeps it"),
    ]
    if v.strategy == "stash":
        shape = ceil_div(Min(S, m), Bf) * Bf, ceil_div(n, Kf) * Kf + 16 * ceil_div(2 * ceil_div(n, Kf), 16)
        why = "kept tiles and the reference of each"
        terms.append(BufferTerm("stash", both, shape, "features", why))
    if v.gather and v.has_keys and v.strategy == "torch":
        shape = (3 * W + 7, Min(G, W * n))
        terms.append(BufferTerm("merged_statistics", forward, shape, "statistics", "what adds them up"))
    if v.strategy == "torch":
        why = "temporaries of the loss's terms"
        terms.append(BufferTerm("loss_terms", forward, (8, Min(F, Max(m, n))), "statistics", why))
        for phase, a, b in ((forward, forward_rows, forward_keys), (backward, rows, keys)):
            why = "similarities and their exponentials"
            terms.append(BufferTerm("panel", phase, (a, b), "statistics", why, pieces=2))
            terms.append(BufferTerm("vectors", phase, (8, a + b), "statistics", "weights along a panel's sides"))
            if not v.affine:
                terms.append(BufferTerm("strips", phase, (3, STRIP_ROWS, b), "statistics", "terms of the logit"))
            if v.separate:
                terms += [
                    BufferTerm("widened_queries", phase, (a, D), "statistics", "a panel's rows, in full precision"),
                    BufferTerm("widened_keys", phase, (b, D), "statistics", "a panel's keys, in full precision"),
                ]
    else:
        row_blocks, key_blocks = ceil_div(forward_rows, Bf), ceil_div(forward_keys, Kf)
        strips = Min(row_blocks, T)
        why = "partial sums of one panel, merged in a fixed order"
        terms += [
            BufferTerm("row_partials", forward, (2, key_blocks, forward_rows), "statistics", why),
            v.has_keys and BufferTerm("key_partials", forward, (2, strips, forward_keys), "statistics", why),
            BufferTerm("flags", forward, (strips, key_blocks), "int32", "strips of wide range"),
            BufferTerm("references", forward, (key_blocks,), "statistics", "of each block of keys"),
            BufferTerm("loss_parts", forward, (ceil_div(Max(m, n), LOSS_ROWS),), "fp64", "partial sums of the loss"),
        ]
        if v.split:
            why = "one panel's features as bf16 halves, a row for each term"
            row = 8 * ceil_div(SPLIT_TERMS * D, 8)
            for phase, a, b in ((forward, forward_rows, forward_keys), (backward, rows, keys)):
                terms.append(BufferTerm("split_operands", phase, (a + b, row), "bf16", why))
    ratios = "shares over sums, and the range of each block"
    if v.strategy in ("panel", "stash"):
        tiles = (ceil_div(rows, Bg), ceil_div(keys, Kg))
        shape = (tiles[0] * Bg, tiles[1] * Kg)
        strips = (Min(tiles[0], V), tiles[1])
        why = "gradients of one panel's logits"
        halves = BufferTerm("gradient_panel", backward, (2, *shape), "bf16", f"{why}, high and low half")
        terms += [
            halves if v.split else BufferTerm("gradient_panel", backward, shape, "features", why),
            BufferTerm("gradient_flags", backward, strips, "int32", "strips of wide range"),
            v.has_keys and BufferTerm("ratios", backward, (ceil_div(n, Kg), Kg + 2), "statistics", ratios),
        ]
    if v.strategy == "fused":
        own = m if ring else rows  # a ring's hop takes all queries at once
        longer = Max(own, n)
        flags = BufferTerm("gradient_flags", backward, (ceil_div(longer, Bu),), "int32", "programs of wide range")
        ratio_shape = (ceil_div(longer, Ku), Ku + 2)
        terms += [
            BufferTerm("positive_gradients", backward, (own,), "statistics", "g of each positive, unrounded"),
            v.has_keys and flags,
            v.has_keys and BufferTerm("ratios", backward, ratio_shape, "statistics", ratios),
        ]
    room = n if ring or not v.library else ceil_div(n, LIBRARY_MULTIPLE) * LIBRARY_MULTIPLE
    dq, dk = (
        BufferTerm(name, backward, (x, D), "features", "returned")
        for name, x in (("dq", m), ("dk", n if v.separate else room))
    )
    total_dq = BufferTerm("dq_accumulator", backward, (m, D), "statistics", "dq over all hops")
    if ring:  # the results are written when what has travelled is gone; of a gather, dk where others' sums were
        results = (dq,) if v.gather else (dq, dk)
        finished = [total_dq, *results] if v.separate else [total_dq]
        terms += [total_dq, *(dataclasses.replace(term, phase=finish) for term in finished)]
    else:
        why = "dk over all query panels, and dq of the panel in work"
        # Under autocast dq and dk of wider features are not rounded: no sums beside them, but in the sums' dtype.
        unrounded = m if v.replay else ceil_div(m - n, 2)
        sums = BufferTerm("accumulators", backward, (room + Max(rows, unrounded), D), "statistics", why)
        held = [sums, dq, dk] if v.separate else [dq, dk]
        terms += held
        if v.strategy == "torch":  # a panel's scratch is gone when its rows are finished
            terms += [dataclasses.replace(term, phase=finish) for term in held]
    if v.strategy == "torch":
        strip = (1 + v.separate, Min(STRIP_ROWS, rows), D)
        terms.append(BufferTerm("finish_rows", finish, strip, "statistics", "products for dscale"))
    if v.replay:
        why = "what the graphs read"
        terms += [
            BufferTerm("recorded_features", both, (m + n, D), "features", why),
            BufferTerm("recorded_query_statistics", both, (2 + positive_rows, m), "statistics", why),
            v.has_keys and BufferTerm("recorded_key_statistics", both, (2, n), "statistics", why),
            v.labels and BufferTerm("recorded_labels", both, (m,), "int64", why),
            # Kept: the accumulators, and dq and dk, are there too for a call that cannot be recorded meanwhile.
            BufferTerm("recorded_sums", backward, (m + room, D), "statistics", "what the graphs write"),
        ]
    terms.append(BufferTerm("dots", both, (ceil_div(m, Bo),), "statistics", "partial sums of dscale"))
    return tuple(term for term in terms if term)


def _kept_keys(choice: Choice) -> Any:
    """Keys whose statistics are kept: of all ranks, or of this one and of the keys that visit last."""
    return W * n if choice.gather else 2 * n if choice.keeps else n
