"""Every buffer that the loss allocates beyond its inputs.

Buffers of one rank's computation are SymPy expressions of a plan's sizes; buffers of tensors that travel follow from
the table of communication. `model` evaluates both, plans list them, and `make golden` prints the expressions.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import sympy
from sympy import Expr

from infcl_gen.inputs.problem import DTYPE_BYTES
from infcl_gen.kernels.choice import SPLIT_TERMS, Choice
from infcl_gen.kernels.elementwise import LIBRARY_MULTIPLE
from infcl_gen.kernels.statistics import LOSS_ROWS
from infcl_gen.runtime.table import ALL, KEPT, MAILBOX_BYTES, OWN, RECEIVED, STAYED, Copy, Place, Table, Transfer

MIB = 2**20
ELEMENT_BYTES: dict[str, int] = {**DTYPE_BYTES, "int32": 4, "int64": 8, "uint8": 1}
# As in runtime/means.py: rows that a GPU adds up at a time for sums of features; rows of fp32 that a strip takes.
MEAN_ROWS, MEAN_STRIP = 256, 64
SCALED_ROWS = 4096  # as in runtime/scaled.py, rows whose products are in work
NEGATIVE_ROWS = 16384  # as in runtime/negatives.py
STRIP_ROWS = 64  # rows at a time where the torch strategy needs temporaries
# In the order of `CostModel._values`.
LEGEND = {
    "m": "query rows of this rank",
    "n": "key rows of this rank",
    "W": "ranks in the ring",
    "D": "embedding",
    "P": "embedding, of split operands once for each term, padded to the depth of a block (fused: to its parts)",
    "e": "bytes of a feature",
    "s": "bytes of a statistic or an accumulator element",
    "Bf": "rows of a forward block",
    "Kf": "keys of a forward block",
    "Bg": "rows of a gradient block",
    "Kg": "keys of a gradient block",
    "Bu": "rows of a fused block",
    "Ku": "visiting rows of a fused block",
    "Bo": "rows of a finish block",
    "U": "multiprocessors",
    "w": "bytes of the matrix library's workspace",
    "F": "rows of a forward panel",
    "G": "keys of a forward panel",
    "R": "rows of a backward panel",
    "C": "keys of a backward panel",
    "S": "query rows whose tiles are kept from forward to backward (stash)",
    "T": "strips of a forward panel for each block that programs own, at most",
    "V": "strips of a backward panel for each block of keys, at most",
    "H": "negatives of each query, or of each pair of rows",
}
SYMBOLS = {name: sympy.Symbol(name, integer=True, positive=True) for name in LEGEND}
m, n, W, D, P, e, s, Bf, Kf, Bg, Kg, Bu, Ku, Bo, U, w, F, G, R, C, S, T, V, H = SYMBOLS.values()

# Unevaluated: SymPy's comparison of their arguments takes a third of the time of a process's first plan.
Min, Max = (functools.partial(function, evaluate=False) for function in (sympy.Min, sympy.Max))


class ceil_div(sympy.Function):
    """ceil_div(a, b) = ceil(a / b), exact for integers."""

    nargs = 2

    def _pythoncode(self, printer: Any) -> str:  # called by `lambdify`
        count, size = map(printer.doprint, self.args)
        return f"(-(-({count}) // ({size})))"


class Buffer(NamedTuple):
    """One line of the memory plan. `bytes` is of all pieces, without allocator slack."""

    name: str
    phase: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    why: str


class BufferTerm(NamedTuple):
    """`pieces` tensors of one shape. `phase`: "both" (from forward to the end of backward), "forward", "backward",
    "finish" (the gradients are written, and no scratch of a hop is left), or "after" (they are returned, and torch
    makes those of what they depend on)."""

    name: str
    phase: str
    shape: tuple[Any, ...]
    why: str
    dtype: str = "statistics"  # or "features", or a dtype by name
    pieces: int = 1

    @property
    def bytes(self) -> Expr:
        sizes = ELEMENT_BYTES | {"features": e, "statistics": s}
        return sympy.prod(self.shape) * sizes[self.dtype] * self.pieces


def buffer_terms(choice: Choice) -> tuple[BufferTerm, ...]:
    """The buffers that one rank computes with, in order of allocation."""
    v = choice
    if v.at_once:
        return _buffers_at_once(v)
    ring, both, forward, backward, finish = v.world_size > 1, "both", "forward", "backward", "finish"
    rows, keys = Min(R, m), Min(C, n)
    forward_rows, forward_keys = Min(F, m), Min(G, n)
    of_all = W * n if v.gather else n
    kept_keys = n if v.traits.crossed else 2 * n if v.keeps else of_all  # statistics stay from forward to backward
    of_queries, of_keys, dotted = int(v.of_queries), int(v.of_keys), _dotted(v)
    kept = v.losses * (2 + v.positive_parts)  # numbers of a query
    terms = [
        BufferTerm("query_statistics", both, (kept, m), _of_query(v)),
        v.traits.has_keys
        and BufferTerm("key_statistics", both, (v.traits.key_numbers, kept_keys), "c_j as a wide float"),
        *_common_terms(v),
        v.traits.per_row
        and BufferTerm("weighed_statistics", backward, (kept + len(v.traits.vectors), m), "by upstream"),
        (v.traits.per_row and v.traits.crossed)
        and BufferTerm("weighed_columns", backward, (v.traits.key_numbers, n), "by upstream"),
    ]
    if v.strategy == "stash":
        shape = ceil_div(Min(S, m), Bf) * Bf, ceil_div(n, Kf) * Kf + 16 * ceil_div(2 * ceil_div(n, Kf), 16)
        terms.append(BufferTerm("stash", both, shape, "kept tiles and the reference of each", "features"))
    if v.strategy == "torch":
        if v.gather and v.traits.has_keys:
            terms.append(BufferTerm("merged_statistics", forward, (3 * W + 7, Min(G, of_all)), "what adds them up"))
        shape, kind = (
            ((v.traits.held, Min(F, m)), "fp64") if v.traits.combined else ((8, Min(F, Max(m, n))), "statistics")
        )
        terms.append(BufferTerm("loss_terms", forward, shape, "temporaries of the loss's terms", kind))
        terms += _torch_panel(v, forward, forward_rows, forward_keys) + _torch_panel(v, backward, rows, keys)
    else:
        row_blocks, key_blocks = ceil_div(forward_rows, Bf), ceil_div(forward_keys, Kf)
        strips = Min(row_blocks, T)
        why = "partial sums of one panel, merged in a fixed order"
        terms.append(BufferTerm("row_partials", forward, (v.losses * v.partial_sums, key_blocks, forward_rows), why))
        terms += [
            v.both_axes and BufferTerm("key_partials", forward, (v.losses * v.partial_sums, strips, forward_keys), why),
            BufferTerm("flags", forward, (strips, key_blocks), "strips of wide range", "int32"),
            BufferTerm("references", forward, (v.losses * key_blocks,), "of each block of keys"),
            BufferTerm(
                "loss_parts", forward, (v.losses * ceil_div(Max(m, n), LOSS_ROWS),), "partial sums of the loss", "fp64"
            ),
        ] * (not v.traits.pairs)
        if v.traits.pairs:
            of_tiles = Max(strips * key_blocks, Min(ceil_div(rows, Bg), V) * ceil_div(keys, Kg))
            terms.append(BufferTerm("row_sums", forward, (forward_rows,), "of a panel, before they are added", "fp64"))
            terms.append(BufferTerm("slope_sums", both, (2, of_tiles), "a part of each program", "fp64"))
        terms += _halves(v, forward, forward_rows, forward_keys) + _halves(v, backward, rows, keys)
        terms += [_sorted_ids(phase) for phase in (forward, backward)] * v.traits.sorted_ids
    ratios = "shares over sums, and the range of each block"
    if v.strategy in ("panel", "stash"):
        row_blocks, key_blocks = ceil_div(rows, Bg), ceil_div(keys, Kg)
        terms += [
            *_gradient_panel(v, backward, row_blocks, key_blocks),
            *_radial_parts(v, row_blocks, key_blocks),
            not v.traits.pairs
            and BufferTerm(
                "gradient_flags", backward, (Min(row_blocks, V), key_blocks), "strips of wide range", "int32"
            ),
            v.both_axes
            and (v.traits.even or not v.traits.combined)
            and not v.traits.guided_sides
            and BufferTerm("ratios", backward, (v.losses * ceil_div(n, Kg), Kg + 2), ratios),
        ]
    if v.strategy == "fused":
        own = m if ring else rows  # a ring's hop takes all queries at once
        longer = Max(own, n)
        terms.append(BufferTerm("positive_gradients", backward, (own,), "g of each positive, unrounded"))
        if v.both_axes:
            why = "programs of wide range"
            terms.append(BufferTerm("gradient_flags", backward, (ceil_div(longer, Bu),), why, "int32"))
            terms.append(BufferTerm("ratios", backward, (ceil_div(longer, Ku), Ku + 2), ratios))
    room = n if ring or not v.library else ceil_div(n, LIBRARY_MULTIPLE) * LIBRARY_MULTIPLE
    dq = BufferTerm("dq", backward, (m, D), "returned", "features")
    dk = BufferTerm("dk", backward, (n if v.separate else room, D), "returned", "features")
    total_dq = BufferTerm("dq_accumulator", backward, (m, D), "dq over all hops")
    if v.traits.triangle:  # dq is written after the last panel
        rows = ceil_div(m, LIBRARY_MULTIPLE) * LIBRARY_MULTIPLE if v.library else m
        sums = BufferTerm("accumulators", backward, (rows, D), "dq over all panels: a pair adds to both of its rows")
        terms += [sums, sums._replace(phase=finish), *[dq._replace(phase=finish)] * v.separate]
    elif ring:  # gradients are written after the last hop; a gather writes dk over the sums of other ranks
        results = [dq] * of_queries + [dk] * (of_keys and not v.gather)
        totals = [total_dq] * of_queries
        finished = totals + results if v.separate else totals
        terms += [*totals, *(term._replace(phase=finish) for term in finished)]
    else:
        why = "dk over all query panels, and dq of the panel in work"
        # Autocast from wider features returns dq and dk unrounded: they replace the sums, in the sums' dtype.
        unrounded = m if v.replay else ceil_div(m - n * of_keys, 2)
        sums = BufferTerm("accumulators", backward, (room * of_keys + Max(rows, unrounded) * of_queries, D), why)
        results = [dq] * of_queries + [dk] * of_keys
        held = [sums, *results] if v.separate else results
        terms += held
        if v.strategy == "torch":  # without the panels' scratch
            terms += [term._replace(phase=finish) for term in held]
    if v.strategy == "torch":
        strip = (1 + v.separate, Min(STRIP_ROWS, R, dotted), D)
        terms.append(BufferTerm("finish_rows", finish, strip, "products for dscale"))
    if v.replay:
        why = "what the graphs read"
        terms += [
            BufferTerm("recorded_features", both, (m + n, D), why, "features"),
            BufferTerm("recorded_query_statistics", both, (2 + v.positive_parts, m), why),
            v.both_axes and BufferTerm("recorded_key_statistics", both, (2, n), why),
            v.labels and BufferTerm("recorded_labels", both, (m,), why, "int64"),
            v.traits.ids and BufferTerm("recorded_ids", both, (m + n,), why, "int64"),
            # Beside the accumulators, dq and dk, which a call needs that cannot be recorded.
            BufferTerm("recorded_sums", backward, (m * of_queries + room * of_keys, D), "what the graphs write"),
        ]
    terms.append(BufferTerm("dots", both, (ceil_div(dotted, Bo),), "partial sums of dscale"))
    return tuple(term for term in terms if term)


def _of_query(v: Choice) -> str:
    """What forward keeps of each query."""
    return "sum of its terms; factor of its row" if v.traits.pairs else "r_i as a wide float; the positive"


def _dotted(v: Choice) -> Any:
    """Rows of the side whose sums give dscale: a call may freeze the queries, unless keys are."""
    return Max(m, n) if v.frozen == "none" else n if v.frozen == "query" else m


def _common_terms(v: Choice) -> list[Any]:
    own = len(v.traits.vectors)
    return [
        v.labels and BufferTerm("labels", "both", (m,), "index of each query's positive", "int64"),
        v.labels and BufferTerm("label check", "forward", (m,), "NaN for labels out of range"),
        v.traits.ids
        and BufferTerm("ids", "both", (m + n,), "of queries and keys, where a call's have strides", "int64"),
        v.traits.means
        and BufferTerm(
            "means",
            "both",
            (Max(MEAN_STRIP, ceil_div(Max(m, n * W), MEAN_ROWS)), D),
            "sums of features, and of parts of them",
        ),
        own > 0 and BufferTerm("vectors", "both", (4 * own, m), "queries' own numbers, and their gradients"),
        *_of_negatives(v) * ("negatives" in v.traits.vectors),
        *_of_scales(v),
        *_of_weights() * v.traits.weighted,
        v.traits.pooled
        and BufferTerm("positives of all", "forward", (v.traits.pooled, m), "what their log-sum-exp takes", "fp64"),
        *_of_thresholds(v) * v.traits.thresholds,
        *_of_cosines(v),
        v.traits.columns_of_ids
        and BufferTerm("columns of ids", "forward", (COLUMN_NUMBERS, W * Max(m, n)), "sums of columns by id", "fp64"),
        BufferTerm("scalars", "both", (64, 512), "scale, bias, loss, weights and their gradients", "uint8"),
        v.library and BufferTerm("workspace", "both", (w,), "the matrix library keeps it", "uint8"),
    ]


def _of_negatives(v: Choice) -> list[Any]:
    """What torch holds of queries' own negatives, and of those of pairs, which are half as many."""
    of, after, copies = ceil_div(m, 2) if v.traits.partnered else m, "after", 1 + (v.strategy == "torch" and v.separate)
    returned = m * int(v.of_queries) + n * int(v.of_keys and not v.traits.triangle), D
    return [
        v.traits.partnered and BufferTerm("rows with negatives", "both", (of, D), "the first of each pair", "features"),
        BufferTerm("logits of negatives", "both", (3, of, H), "products, logits, and their gradients"),
        BufferTerm("strip of negatives", after, (copies, Max(H, Min(NEGATIVE_ROWS, of * H)), D), "products in work"),
        BufferTerm("gradients of features", after, returned, "returned", "statistics" if v.wider else "features"),
        BufferTerm("gradient of negatives", after, (of, H, D), "returned", "features"),
        BufferTerm("gradients through negatives", after, (m, D), "what they add to dq", "features", 2),
    ]


def _of_scales(v: Choice) -> list[BufferTerm]:
    """What torch holds of features that are multiplied by numbers of their rows."""
    found, dtype = list[BufferTerm](), "statistics" if v.wider else "features"
    for name, side, rows in (("query_scale", "queries", m), ("key_scale", "keys", n)):
        if name in v.traits.scaled:
            found.append(BufferTerm(f"scaled {side}", "both", (rows, D), "their product with a number of each", dtype))
            found.append(BufferTerm(f"gradient of scaled {side}", "backward", (rows, D), "from which theirs is", dtype))
            found += [
                BufferTerm(f"scales of {side}", "both", (3, rows), "their numbers, and the gradients of these"),
                BufferTerm(f"strips of {side}", "backward", (3, Min(SCALED_ROWS, rows), D), "products in work"),
            ]
    return found


def _sorted_ids(phase: str) -> BufferTerm:
    """Of either side ids and their rows, and what torch's sort of one side takes, twice: by ids, then by panels."""
    return BufferTerm("sorted_ids", phase, (12, Max(m, n)), "of queries and keys, with their rows", "int64")


def _of_weights() -> tuple[BufferTerm, ...]:
    """What means with weights take."""
    strip, matrix = (Min(SCALED_ROWS, Max(m, n)), 4 * (D + 1)), (D + 1, D + 1)
    return (
        BufferTerm("sums of weighted keys", "both", matrix, "kept for backward", "fp64"),
        BufferTerm("sums in work", "both", (3, *matrix), "those of queries, of other ranks, and of a strip", "fp64", 3),
        BufferTerm("strips of guides", "both", strip, "features and weights of a strip of rows", "fp64", 4),
    )


def _of_cosines(v: Choice) -> list[BufferTerm]:
    """Factors of own rows and visiting keys, radial sums, and the multiples of themselves that rows lose at the end."""
    alone = int(v.world_size == 1)  # else the sums of keys travel
    sums = BufferTerm("radial sums", "backward", (v.losses, m + n * alone), "of rows, along their own features")
    lost = BufferTerm("radial multiples", "finish", (v.losses, Max(m, n)), "of themselves, that rows lose")
    at_end = [lost, lost._replace(name="clamped rows", why="which lose none", dtype="uint8")]
    in_panels = [each._replace(phase="backward", shape=(v.losses, Min(R, m))) for each in at_end] * alone
    own, visiting = (ceil_div(rows, FACTOR_ROOM) * FACTOR_ROOM for rows in (m, n))
    found = [
        BufferTerm("factors", "both", (v.losses, own + visiting * (2 - alone)), "inverse norms of rows"),
        *(sums, sums._replace(phase="finish"), *at_end, *in_panels),
    ]
    return found * v.traits.renormalised


def _radial_parts(v: Choice, row_blocks: Any, key_blocks: Any) -> list[BufferTerm]:
    """What tiles of a panel leave of radial sums, and the g of positives that they read."""
    rows, keys, losses = row_blocks * Bg, key_blocks * Kg, v.losses
    found = [
        BufferTerm(
            "radial parts of rows", "backward", (losses, key_blocks, rows), "of g times the cosine, of each tile"
        ),
        BufferTerm("radial parts of keys", "backward", (losses, row_blocks, keys), "the same"),
        BufferTerm("positive gradients", "backward", (losses, rows), "g of each positive, unrounded"),
    ]
    return found * v.traits.renormalised


FACTOR_ROOM = 256  # as in runtime/renormalised.py, rows of whole tiles
COLUMN_NUMBERS = 14  # of each query or key of all ranks: ids, sums, what travels, and temporaries


def _of_thresholds(v: Choice) -> list[BufferTerm]:
    """Thresholds of queries, and the products in work that they are made of, before there is a buffer of a hop. Of a
    triangle over ranks each hop makes those of its rows beside what it computes in."""
    visiting = v.traits.triangle and v.world_size > 1
    phase = "both" if visiting else "finish"
    found = [
        BufferTerm("thresholds", "both", (2 + visiting, m), "of each query, above which pairs are left out"),
        BufferTerm("strips of positives", phase, (3, Min(SCALED_ROWS, m), D), "products in work"),
    ]
    return [*found, *[BufferTerm("pairs of rows", phase, (4, m), "places of positives", "int64")] * v.traits.triangle]


def _torch_panel(v: Choice, phase: str, a: Any, b: Any) -> list[Any]:
    """The scratch of a panel of a x b pairs."""
    further = len(v.traits.slabs) if phase == "backward" else min(1, len(v.traits.slabs))  # exponentials, or g of each
    guided = [
        BufferTerm("guide_panel", phase, (a, b), "the guide's similarities and their exponentials", pieces=2),
        v.separate and BufferTerm("widened_guide", phase, (a + b, D), "of a panel's rows and keys, in full precision"),
    ]
    return [
        *guided * v.traits.by_guide,
        v.traits.own_references
        and BufferTerm("left_out", phase, (a, b), "pairs in no sum", "uint8", v.traits.masks_of_sides),
        v.traits.thresholds
        and v.traits.guide
        and v.separate
        and BufferTerm("widened_guide", phase, (a, D), "of a panel's rows, in full precision"),
        BufferTerm("panel", phase, (a, b), "similarities and their exponentials", pieces=2 + further),
        BufferTerm("vectors", phase, (8, a + b), "weights along a panel's sides"),
        v.traits.renormalised
        and BufferTerm("radial parts", phase, (1 + v.losses, a + b), "sums of a panel along its sides"),
        v.traits.strips > 0 and BufferTerm("strips", phase, (v.traits.strips, STRIP_ROWS, b), "terms of the logit"),
        v.separate and BufferTerm("widened_queries", phase, (a, D), "a panel's rows, in full precision"),
        v.separate and BufferTerm("widened_keys", phase, (b, D), "a panel's keys, in full precision"),
    ]


def _halves(v: Choice, phase: str, a: Any, b: Any) -> list[BufferTerm]:
    """The features of a panel of a x b pairs, where they are multiplied as halves."""
    row = 8 * ceil_div(SPLIT_TERMS * D, 8)
    why = "one panel's features as bf16 halves, a row for each term"
    return [BufferTerm("split_operands", phase, (a + b, row), why, "bf16")] * v.split


def _gradient_panel(v: Choice, phase: str, row_blocks: Any, key_blocks: Any) -> list[BufferTerm]:
    tiled, why = (row_blocks * Bg, key_blocks * Kg), "gradients of one panel's logits"
    if v.split:
        return [BufferTerm("gradient_panel", phase, (2, *tiled), f"{why}, high and low half", "bf16")]
    return [BufferTerm("gradient_panel", phase, tiled, why, "features", v.losses)]


def _buffers_at_once(v: Choice) -> tuple[BufferTerm, ...]:
    """`buffer_terms` of a loss whose forward has gradients. "finish" is the end of its forward.

    Forward keeps gradients in bf16 or in the statistics' dtype: there sums become gradients in their place. Those of
    wider features are never rounded: with room for them, they bound what bf16 features take as well.
    """
    ring, both, forward, backward, finish = v.world_size > 1, "both", "forward", "backward", "finish"
    rows, keys = Min(R, m), Min(C, n)
    room = ceil_div(n, LIBRARY_MULTIPLE) * LIBRARY_MULTIPLE if v.library else n
    in_place, unit = v.dtype != "bf16", "for an upstream gradient of 1"
    kept = "statistics" if in_place else "features"
    returned = "statistics" if v.wider else "features"
    of_queries, of_keys, dotted = int(v.of_queries), int(v.of_keys), _dotted(v)
    both_sides = m * of_queries + room * of_keys
    # On one device dk is made after the sweep, where the sums are not dk itself.
    later, kept_dk = not in_place and not ring, BufferTerm("kept_dk", both, (room, D), unit, kept)
    terms = [*_common_terms(v), of_queries and BufferTerm("kept_dq", both, (m, D), unit, kept)]
    terms += [of_keys and kept_dk._replace(phase=phase) for phase in ((finish, backward) if later else (both,))]
    if v.strategy == "torch":
        terms += _torch_panel(v, forward, rows, keys)
        strip = (1 + v.separate, Min(STRIP_ROWS, R, dotted), D)
        terms.append(BufferTerm("finish_rows", finish, strip, "products for dscale"))
        strip = (2 - in_place, Min(STRIP_ROWS, Max(m, n)), D)
        terms.append(BufferTerm("rescaled_rows", backward, strip, "times upstream"))
    elif v.rows:
        row_blocks, key_blocks = ceil_div(rows, Bf), ceil_div(n * W, Kf)
        tiles, of_row = (row_blocks * Bf, key_blocks * Kf), "of each query of a row of panels"
        parts, strips = ceil_div(m, LOSS_ROWS), Min(key_blocks, T)
        terms += [
            BufferTerm("kept_tiles", forward, tiles, "p of each pair of a row of panels", "features"),
            BufferTerm("row_partials", forward, (2, strips, rows), "partial sums, merged in a fixed order"),
            BufferTerm("flags", forward, (strips, row_blocks), "strips of wide range", "int32"),
            BufferTerm("row_vectors", forward, (2, rows), f"reference and share {of_row}"),
            of_keys and BufferTerm("weighted_queries", forward, (rows, D), "times their shares", "features"),
        ]
        for phase in (forward, finish):
            shape = 2 + v.positive_parts, m
            terms.append(BufferTerm("query_statistics", phase, shape, "r_i as a wide float; the positive"))
            terms.append(BufferTerm("loss_parts", phase, (parts,), "partial sums of the loss", "fp64"))
    else:
        row_blocks, key_blocks = ceil_div(rows, Bg), ceil_div(keys, Kg)
        terms += _gradient_panel(v, forward, row_blocks, key_blocks)
        terms += _halves(v, forward, Max(rows, Min(F, m)), Max(keys, Min(G, n)))
        of_forward = Min(ceil_div(Min(F, m), Bf), T) * ceil_div(Min(G, n), Kf)
        parts = Max(Min(row_blocks, V) * key_blocks, of_forward)
        why = "terms, slopes" + ", and sizes of logits" * v.traits.small_first + ", a part of each program"
        terms.append(BufferTerm("term_sums", forward, (2 + 2 * v.traits.small_first, parts), why, "fp64"))
    if not in_place:
        # Unrounded gradients are twice as long as rounded ones, and their own sums.
        own, why = ceil_div(both_sides, 2), "dk over all query panels, and dq of the panel in work"
        least = {finish: own, forward: both_sides - ceil_div(m * of_queries, 2) if later else own}
        held = rows * of_queries + room * of_keys
        name = "accumulators"
        if ring:
            held, why = (rows, "dq of the panel in work") if v.rows else (m, "dq over all hops")
            held, name = held * of_queries, "dq_accumulator"
        for phase in (forward, finish):
            terms.append(BufferTerm(name, phase, (Max(held, least[phase]) if v.wider else held, D), why))
        if v.wider:
            why = "kept for wider features, which are not rounded"
            terms.append(BufferTerm("wider_gradients", backward, (both_sides, D), why, "features"))
    if v.replay:
        why = "what the graph reads"
        terms += [
            BufferTerm("recorded_features", both, (m + n, D), why, "features"),
            v.labels and BufferTerm("recorded_labels", both, (m,), why, "int64"),
            BufferTerm("recorded_gradients", both, (both_sides, D), "what the graph writes", returned),
        ]
    terms.append(of_queries and BufferTerm("dq", backward, (m, D), "returned", returned))
    terms.append(of_keys and BufferTerm("dk", backward, (n, D), "returned", returned))
    terms.append(BufferTerm("dots", both, (ceil_div(dotted, Bo),), "partial sums of dscale"))
    return tuple(term for term in terms if term)


@functools.lru_cache(maxsize=64)
def places_of(table: Table, phase: str) -> Mapping[str, set[Place]]:
    """By tensor, the places other than its own that it needs in a phase."""
    found: dict[str, set[Place]] = {item.name: set() for item in table.travelling}
    for step in table.steps(phase):
        for moved in itertools.chain[Copy | Transfer](step.copies, step.sends):
            found[moved.name] |= {moved.source, moved.target}
        for role, place in (("unchanged", step.unchanged), ("summed", step.sums)):
            for item in table.named(role, phase):
                found[item.name].add(place)
    return {name: places - {OWN} for name, places in found.items()}


def travelling_buffers(table: Table, choice: Choice, keys: int) -> list[tuple[Buffer, int]]:
    """The buffers of tensors that travel, each with its number of allocations. Statistics that stay for backward are
    part of `key_statistics`."""
    found, ranks = list[tuple[Buffer, int]](), table.world_size
    if table.copy_engines:
        why = "pieces of messages from other ranks; there as long as the process group"
        found.append((Buffer("mailboxes", "both", MAILBOX_BYTES, (MAILBOX_BYTES,), "uint8", why), 1))

    def add(name: str, phase: str, why: str, *counts: int, pieces: int = 1) -> None:
        rows = 1 if item.once else keys
        shape = (*counts, item.columns, rows) if item.across else (*counts, rows, item.columns)
        dtype = dtype_of(choice, item.dtype)
        size = math.prod(shape) * ELEMENT_BYTES[dtype]
        shown = item.name.replace("key", "row") if choice.traits.triangle else item.name
        found.append((Buffer(f"{name} {shown}", phase, size, shape, dtype, why), pieces))

    for phase, item in itertools.product(("forward", "backward"), table.travelling):
        places, found_first = places_of(table, phase)[item.name], item.forward == "unchanged"
        in_last = phase == ("backward" if table.named("unchanged", "backward") else "forward")  # its sums are gradients
        slots = sum(isinstance(place, int) for place in places)
        if slots:
            add("visiting", phase, "in use or in flight, in turns", slots, pieces=slots)
        if STAYED in places:
            add("own", phase, "of this rank", 1)
            add("own", "finish", "of this rank, beside those that come home and that leave", 3, pieces=3)
        elif slots and item.role(phase) == "summed" and in_last:
            add("own", "finish", "home again", 1)
        if KEPT in places and phase == ("forward" if found_first else "backward"):
            add("last", "both" if found_first else phase, "visits last in forward, first in backward", 1)
        sent = phase == "forward" or item.forward == "absent" or item.renewed
        if ALL in places and item.role(phase) == "unchanged" and sent:
            kept = phase == "forward" and item.backward == "unchanged"
            add("all", "both" if kept else phase, "of all ranks" + ", from forward to backward" * kept, ranks)
            if table.whole:
                add("all", "finish", "of all ranks", ranks)
        if RECEIVED in places and item.backward == "unchanged":
            add("shared", phase, "of the keys of all ranks, from each", ranks, ranks)
            if item.renewed:
                add("all", phase, "their sums", ranks)
        elif RECEIVED in places:
            others = sum(sent.name == item.name for step in table.steps(phase) for sent in step.sends)
            apart = others if item.across else 1  # contiguous for each owner
            for when in (phase, "finish") if in_last else (phase,):
                if not table.triangle:
                    add("own", when, "of this rank", 1)
                add("others'", when, "sums that go home", others, pieces=apart)
                add("received", when, "sums of others that come home", others)
    return found


def dtype_of(choice: Choice, name: str) -> str:
    """The dtype of "features" or "statistics"; any other name is a dtype."""
    return {"features": choice.dtype, "statistics": choice.statistics_dtype}.get(name, name)


def allocated_bytes(size: int, pieces: int, gpu: bool) -> int:
    """Upper bound on what torch's caching allocator takes for `size` bytes in `pieces` tensors."""
    if not gpu:
        return size
    rounded = size + 511 * pieces if pieces > 1 else -(-size // 512) * 512
    return rounded + pieces * MIB if size >= MIB else rounded
