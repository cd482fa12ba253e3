"""What the cost model is made of: each buffer's bytes and each phase's work, as SymPy expressions of a plan's sizes.

One source: `cost` computes with these terms, a plan's buffers are explained by them, and `markdown` writes them down.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import sympy
from sympy import Expr, Integer, Max, Min, Rational

from infcl_gen.planning.levels import LOSS_ROWS, SPLIT_TERMS, STRIP_ROWS

LEGEND = {
    "m": "query rows of this rank",
    "n": "key rows of this rank",
    "W": "ranks in the ring",
    "D": "embedding",
    "P": "embedding, of split operands once for each term, padded to the depth of a block (fused: to a power of two)",
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
class Variant:
    """What decides which terms exist. `separate`: accumulators are wider than the features, so the returned gradients
    are buffers of their own. `library`: products by the matrix library. `affine`: the logit is slope * z + shift.
    `ring`: several ranks; `gather`: keys come from all of them at once instead of going round. `replay`: steps are
    recorded as CUDA graphs. `split`: fp32 operands as bf16 halves. `keeps`: of a ring, the keys that visit last stay
    for backward."""

    strategy: str
    has_keys: bool = True
    labels: bool = False
    ring: bool = False
    separate: bool = True
    library: bool = False
    affine: bool = True
    replay: bool = False
    split: bool = False
    gather: bool = False
    keeps: bool = False


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


QUANTITIES = ("flops", "bytes", "exponentials", "efficiency", "launches")


@dataclasses.dataclass(frozen=True)
class TimeTerm:
    """Work of one phase of one rank over all hops. `rate`: which peak the flops run at ("triton" or "product")."""

    name: str
    flops: Any = 0
    bytes: Any = 0
    exponentials: Any = 0
    efficiency: Any = 1
    rate: str = "triton"
    launches: Any = 0

    @property
    def quantities(self) -> tuple[Any, ...]:
        """The values of QUANTITIES."""
        return tuple(getattr(self, name) for name in QUANTITIES)


# Fraction of the peak that a kernel reaches as a function of the embedding: fitted to the 76 rows of an earlier
# h200-grid.json, behind other work, B from 1 024 to 131 072, D from 128 to 1 152, the worst 9 % off; of the 84 measured
# since the worst is 12.5 % off, of 0.05 ms, the next 9.
EFFICIENCY = {
    "forward": Rational(94, 100) * P / (P + 125),
    "gradient": Rational(101, 100) * P / (P + 205),
    "fused": P / (P + 31),
    "dq": Rational(896, 1000) * D**2 / (D**2 + 40**2),
    "dk": Rational(896, 1000) * D**2 / (D**2 + 40**2),
    "torch": Rational(7, 10),
}
WALK = 750  # of the embedding: what references and positives, a few programs each, walk in the time of one launch more
ALONE = Rational(7, 5)  # of half the time of two fused programs on a multiprocessor: what one takes by itself
# Panels of 16 384 rows are 7 % faster than of 2 048 (H200, D = 768); both sides count alike.
PANEL_EFFICIENCY = Min(R, m) / (Min(R, m) + 80) * Min(C, n) / (Min(C, n) + 80)


@functools.cache
def buffer_terms(variant: Variant) -> tuple[BufferTerm, ...]:
    """Everything that the loss allocates beyond its inputs, in the order of its life."""
    v = variant
    ring, both, forward, backward, finish = v.ring, "both", "forward", "backward", "finish"
    positive_rows = 1 if v.strategy == "torch" else 2 + v.has_keys
    rows, keys = Min(R, m), Min(C, n)
    forward_rows, forward_keys = Min(F, m), Min(G, n)
    terms = [
        BufferTerm(
            "query_statistics",
            both,
            (2 + positive_rows, m),
            "statistics",
            "r_i as a wide float; the positive",
        ),
        v.has_keys
        and BufferTerm("key_statistics", both, (2, _kept_keys(v)), "statistics", "c_j as a wide float"),
        v.labels and BufferTerm("labels", both, (m,), "int64", "index of each query's positive"),
        v.labels and BufferTerm("absent", forward, (m,), "statistics", "NaN for labels that name no key"),
        BufferTerm("scalars", both, (64, 512), "uint8", "scale, bias, loss, weights and their gradients"),
        v.library and BufferTerm("workspace", both, (w,), "uint8", "the matrix library keeps it"),
    ]
    if v.strategy == "stash":
        shape = ceil_div(Min(S, m), Bf) * Bf, ceil_div(n, Kf) * Kf + 16 * ceil_div(2 * ceil_div(n, Kf), 16)
        why = "kept tiles and the reference of each"
        terms.append(BufferTerm("stash", both, shape, "features", why))
    if v.gather:
        why = "of all ranks, from forward to backward"
        terms.append(BufferTerm("gathered_keys", both, (W * n, D), "features", why))
        if v.has_keys:
            why = "of the keys of all ranks, from each"
            terms.append(BufferTerm("summed_statistics", forward, (W, 2, W * n), "statistics", why))
            shape = (3 * W + 7, Min(G, W * n))
            if v.strategy == "torch":
                terms.append(
                    BufferTerm("merged_statistics", forward, shape, "statistics", "what adds them up")
                )
    elif ring:
        terms += _visitors(v)
    if v.strategy == "torch":
        why = "temporaries of the loss's terms"
        terms.append(BufferTerm("loss_terms", forward, (5, Max(m, n)), "statistics", why))
        for phase, a, b in ((forward, forward_rows, forward_keys), (backward, rows, keys)):
            why = "similarities and their exponentials"
            terms.append(BufferTerm("panel", phase, (a, b), "statistics", why, pieces=2))
            terms.append(
                BufferTerm("vectors", phase, (8, a + b), "statistics", "weights along a panel's sides")
            )
            if not v.affine:
                terms.append(
                    BufferTerm("strips", phase, (3, STRIP_ROWS, b), "statistics", "terms of the logit")
                )
            if v.separate:
                terms += [
                    BufferTerm(
                        "widened_queries", phase, (a, D), "statistics", "a panel's rows, in full precision"
                    ),
                    BufferTerm(
                        "widened_keys", phase, (b, D), "statistics", "a panel's keys, in full precision"
                    ),
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
            BufferTerm(
                "loss_parts", forward, (ceil_div(Max(m, n), LOSS_ROWS),), "fp64", "partial sums of the loss"
            ),
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
        flags = BufferTerm(
            "gradient_flags", backward, (ceil_div(longer, Bu),), "int32", "programs of wide range"
        )
        ratio_shape = (ceil_div(longer, Ku), Ku + 2)
        terms += [
            BufferTerm("positive_gradients", backward, (own,), "statistics", "g of each positive, unrounded"),
            v.has_keys and flags,
            v.has_keys and BufferTerm("ratios", backward, ratio_shape, "statistics", ratios),
        ]
    dq, dk = (
        BufferTerm(name, backward, (x, D), "features", "returned") for name, x in (("dq", m), ("dk", n))
    )
    total_dq = BufferTerm("dq_accumulator", backward, (m, D), "statistics", "dq over all hops")
    if v.gather:  # dq is written while sums come home, dk where those of others were
        owned = BufferTerm("dk_accumulator", backward, (n, D), "statistics", "dk of this rank")
        sent = BufferTerm("dk_of_others", backward, ((W - 1) * n, D), "statistics", "sums that go home")
        received = BufferTerm(
            "dk_received", backward, (W - 1, n, D), "statistics", "sums of all others that come home"
        )
        held = [total_dq, owned, sent, received]
        written = [*held, dq] if v.separate else held
        terms += [*held, *(dataclasses.replace(term, phase=finish) for term in written)]
    elif ring:  # the results are written after the last hop, when the visiting buffers are gone
        total_dk = BufferTerm("dk_accumulator", backward, (n, D), "statistics", "dk of this rank, home again")
        why = "travels with its keys: one in use, one in flight"
        travels = dataclasses.replace(total_dk, why=why, pieces=2)
        written = [total_dq, total_dk, dq, dk] if v.separate else [total_dq, total_dk]
        terms += [total_dq, travels, *(dataclasses.replace(term, phase=finish) for term in written)]
    else:
        why = "dk over all query panels, and dq of the panel in work"
        # Under autocast dq and dk of wider features are not rounded: no sums beside them, but in the sums' dtype.
        unrounded = m if v.replay else ceil_div(m - n, 2)
        sums = BufferTerm("accumulators", backward, (n + Max(rows, unrounded), D), "statistics", why)
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
            BufferTerm("recorded_sums", backward, (m + n, D), "statistics", "what the graphs write"),
        ]
    terms.append(BufferTerm("dots", both, (ceil_div(m, Bo),), "statistics", "partial sums of dscale"))
    return tuple(term for term in terms if term)


@functools.cache
def time_terms(variant: Variant) -> tuple[TimeTerm, ...]:
    """The phases of one forward and one backward sweep, without communication."""
    v = variant
    pairs = m * n * W
    terms: list[Any] = []
    if v.strategy == "torch":
        product = {"flops": 2 * pairs * D, "efficiency": EFFICIENCY["torch"]}
        panels = ceil_div(m, R) * ceil_div(n, C) * W
        sides = 2 if v.has_keys else 1
        # Passes over a panel of z: maximum, difference and exponential, and sum per side; backward one exponential per
        # side, their weighted sum, and the positives.
        return (
            TimeTerm("forward product", **product, launches=panels),
            TimeTerm(
                "statistics",
                bytes=(2 + 4 * sides) * s * pairs,
                exponentials=sides * pairs,
                launches=12 * panels,
            ),
            TimeTerm("gradient product", **product, launches=panels),
            TimeTerm(
                "gradient", bytes=6 * sides * s * pairs, exponentials=sides * pairs, launches=8 * panels
            ),
            TimeTerm("dq product", **product, rate="product", launches=panels),
            TimeTerm("dk product", **product, rate="product", launches=panels),
            TimeTerm("finish", bytes=(m + n) * D * (2 * s + e), launches=4),
            *_additions(v),
        )
    sides = 2 if v.has_keys else 1
    forward_panels = ceil_div(m, F) * ceil_div(n, G) * W
    rows, keys = ceil_div(m, Bf) * Bf, ceil_div(n, Kf) * Kf
    kept = Min(S, m) if v.strategy == "stash" else Integer(0)
    partials = (
        2
        * s
        * W
        * (m * ceil_div(n, Kf) + (n * ceil_div(m, F) * Min(ceil_div(F, Bf), T) if v.has_keys else 0))
    )
    features = W * D * e * (m * ceil_div(n, G) + n * ceil_div(m, F))
    terms.append(
        TimeTerm(
            "forward product",
            flops=2 * rows * keys * W * P,
            bytes=features + partials,
            exponentials=pairs,
            efficiency=EFFICIENCY["forward"] * _filled(Min(F, m), Bf, Min(G, n), Kf),
            launches=2 * forward_panels,
        )
    )
    launches = sides * forward_panels + W + 1 + forward_panels * D / WALK
    terms.append(TimeTerm("statistics", bytes=partials + 2 * W * m * D * e, launches=launches))
    if v.strategy == "fused":
        rows = m if v.ring else Min(R, m)
        slices = W if v.ring else ceil_div(m, R)
        for name, owned, other in (("fused dq", rows, n), ("fused dk", n, rows)):
            programs = ceil_div(owned, Bu)
            terms.append(
                TimeTerm(
                    name,
                    flops=4 * slices * programs * Bu * other * P,
                    bytes=slices * owned * D * (e + 2 * s),
                    exponentials=slices * programs * Bu * other,
                    efficiency=EFFICIENCY["fused"] * programs / (U * Max(ceil_div(programs, U), ALONE)),
                    launches=2 * slices,
                )
            )
    else:
        panels = ceil_div(m, R) * ceil_div(n, C) * W
        rows, keys = ceil_div(m, Bg) * Bg, ceil_div(n, Kg) * Kg
        fraction = (m - kept) / m
        products = SPLIT_TERMS if v.split else 1
        # g of each panel, and its positives; where keys have statistics a second look at each, and besides their ratios
        # at each hop (alone: for each row of panels), and the positives of the panels along the diagonal.
        once = (W if v.ring else ceil_div(m, R)) + Max(ceil_div(m, R), ceil_div(n, C))
        terms += [
            TimeTerm(
                "gradient",
                flops=2 * rows * keys * W * P * fraction,
                bytes=e * pairs * fraction + D * e * W * (m * ceil_div(n, C) + n * ceil_div(m, R)),
                exponentials=pairs * fraction,
                efficiency=EFFICIENCY["gradient"] * PANEL_EFFICIENCY * _filled(Min(R, m), Bg, Min(C, n), Kg),
                launches=2 * panels + (once if v.has_keys else 0),
            ),
            # Written by the forward, which hides little of it; read and overwritten by g in the backward.
            v.strategy == "stash" and TimeTerm("stash", bytes=3 * e * kept * n),
            *(
                TimeTerm(
                    f"{name} product",
                    flops=2 * products * pairs * D,
                    bytes=e * pairs
                    + W * D * (2 * s * own * ceil_div(other, step) + e * other * ceil_div(own, stride)),
                    efficiency=EFFICIENCY[name] * PANEL_EFFICIENCY,
                    rate="product",
                    launches=panels,
                )
                for name, own, stride, other, step in (("dq", m, R, n, C), ("dk", n, C, m, R))
            ),
        ]
    terms.append(
        TimeTerm("finish", bytes=(m + n) * D * (2 * s + e) + m * D * e, launches=2 * ceil_div(m, R) + 2)
    )
    terms += _additions(v)
    if v.split:  # the rows of a panel once, its keys once for each panel of rows
        sweeps = ceil_div(m, F) + ceil_div(m, R)
        read_written = e + 2 * SPLIT_TERMS
        launches = W * (sweeps + ceil_div(m, F) * ceil_div(n, G) + ceil_div(m, R) * ceil_div(n, C))
        terms.append(TimeTerm("split", bytes=W * D * read_written * (2 * m + n * sweeps), launches=launches))
    if v.replay:
        terms.append(TimeTerm("copies", bytes=2 * (m + n) * D * e, launches=2))
    return tuple(term for term in terms if term)


def markdown(variants: Sequence[Variant] | None = None) -> str:
    """The whole model as a page: legend, memory by buffer and time by phase for each variant."""
    if variants is None:
        names = ("panel", "fused", "stash", "torch")
        variants = [Variant(name) for name in names] + [
            Variant("panel", ring=True),
            Variant("panel", ring=True, gather=True),
        ]
    lines = [
        "# Cost model",
        "",
        'The peak is "both" and the largest of "forward", "backward" and "finish". A phase takes the longest of FLOPs',
        "at the efficiency, bytes at the bandwidth and exponentials at their rate, and its launches.",
        "",
        "| symbol | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in LEGEND.items()]
    for variant in variants:
        transport = ", gather" if variant.gather else ", ring" if variant.ring else ""
        lines += ["", f"## {variant.strategy}{transport}", ""]
        lines += ["| buffer | phase | bytes | why |", "|---|---|---|---|"]
        lines += [f"| {t.name} | {t.phase} | `{t.bytes}` | {t.why} |" for t in buffer_terms(variant)]
        lines += [
            "",
            "| phase | FLOPs | bytes | exponentials | efficiency | launches |",
            "|---|---|---|---|---|---|",
        ]
        for term in time_terms(variant):
            lines.append("| " + " | ".join([term.name, *(f"`{value}`" for value in term.quantities)]) + " |")
    return "\n".join(lines) + "\n"


def _visitors(v: Variant) -> list[BufferTerm]:
    """What a ring's keys travel in: two buffers, one in use and one in flight. Where forward's last keys are kept they
    are one of its two, and backward has two more, if there are enough ranks for keys that are neither the last nor the
    own."""
    use, flight, both = "in use", "in flight", "one in use, one in flight"
    keys = BufferTerm("visiting_keys", "backward", (n, D), "features", both, pieces=2)
    statistics = BufferTerm("visiting_statistics", "backward", (2, n), "statistics", both, pieces=2)
    sums = [dataclasses.replace(statistics, phase="forward")] * v.has_keys
    if not v.keeps:
        return [dataclasses.replace(keys, phase="forward"), *sums, keys, *[statistics] * v.has_keys]
    last = "visits last in forward, and first in backward"
    found = [
        BufferTerm("last_keys", "both", (n, D), "features", last),
        BufferTerm("visiting_keys", "forward", (n, D), "features", "in use or in flight, beside the last"),
        *sums,
        *[BufferTerm("last_statistics", "backward", (2, n), "statistics", "of the last keys")] * v.has_keys,
    ]
    for why, ranks in ((use, 3), (flight, 4)):
        there = Min(1, Max(0, W - ranks + 1))
        for term in (keys, *[statistics] * v.has_keys):
            found.append(dataclasses.replace(term, shape=(there, *term.shape), why=why, pieces=1))
    return found


def _kept_keys(variant: Variant) -> Any:
    """Keys whose statistics are kept: of all ranks, or of this one and of the keys that visit last."""
    return W * n if variant.gather else 2 * n if variant.keeps else n


def _filled(rows: Any, block_rows: Any, keys: Any, block_keys: Any) -> Expr:
    """Part of the multiprocessors that a panel has blocks for: small ones do not fill a large board."""
    return Min(1, ceil_div(rows, block_rows) * ceil_div(keys, block_keys) / U)


def _additions(variant: Variant) -> list[TimeTerm]:
    """What comes home at once is added up one by one."""
    if not variant.gather:
        return []
    return [TimeTerm("additions", bytes=3 * s * (W - 1) * n * D, launches=W - 1)]
