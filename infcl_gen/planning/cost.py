"""The cost model: memory and time of a plan as SymPy expressions. Numbers, explanations and documentation all come
from the same terms.

Memory is one term per buffer; the peak is "both" + max("forward", "backward", "finish"). It is an upper bound on what
the runtime allocates: each allocation of 1 MiB or more is counted with 1 MiB of allocator slack on GPUs, smaller ones
are rounded up to 512 bytes. Time is one term per phase: max(flops / (peak * efficiency), bytes / bandwidth,
exponentials / rate), whose largest is what bounds the phase, plus its launches. Phases follow one another, so they add;
communication counts where it is not hidden.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy
from sympy import Expr, Integer, Max, Min, Rational

from infcl_gen.planning.levels import LOSS_ROWS, SPLIT_TERMS, STRIP_ROWS, inner_dim, most_strips
from infcl_gen.problem import DTYPE_BYTES

if TYPE_CHECKING:
    from infcl_gen.hardware import Cluster, DeviceProfile
    from infcl_gen.planning.levels import Block

MIB = 2**20

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
_SYMBOLS = {name: sympy.Symbol(name, integer=True, positive=True) for name in LEGEND}
m, n, W, D, P, e, s, F, G, R, C, S, Bf, Kf, Bg, Kg, Bu, Ku, T, V, Bo, U, w = _SYMBOLS.values()


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


# Fraction of the peak that a kernel reaches as a function of the embedding, and how much faster a short step is (before
# its power has lowered the clock): fitted to the 76 rows of an earlier h200-grid.json, behind other work, B from 1 024
# to 131 072, D from 128 to 1 152, the worst 9 % off; of today's 84 the worst is 12.5 % off, of 0.05 ms, the next 9.
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
COOL, COOL_S = 0.1, 6e-3  # (1 + COOL) times as fast at first, which fades over COOL_S
# Panels of 16 384 rows are 7 % faster than of 2 048 (H200, D = 768); both sides count alike.
PANEL_EFFICIENCY = Min(R, m) / (Min(R, m) + 80) * Min(C, n) / (Min(C, n) + 80)
# A vendor's figure is not reached by any product: 765 of 989 on the H200.
VENDOR_FRACTION = 0.77
# Rate of a product of fp32 operands on NVIDIA that are not split, of the peak named: ieee has no tensor cores (1
# TFLOP/s measured in a kernel of Triton).
FP32_MODES = {"tf32": ("tf32", 1.0), "exact": ("fp32", 0.02)}
LIBRARY_FP32_MODES = {"tf32": ("tf32", 1.0), "exact": ("fp32", 0.8)}
# On the host of an H200, fitted to steps of B = 1 024 to 16 384: before the first kernel runs, where nothing hides the
# host; and a whole step that the device waits for all the time. Launches as they are, or two recorded graphs.
HOST_START_S, HOST_STEP_S, HOST_LAUNCH_S = 0.6e-3, 1.6e-3, 12e-6
REPLAY_START_S, REPLAY_STEP_S = 0.5e-3, 0.98e-3
# More before a forward that keeps tiles, which has a descriptor more and their room to divide: recorded, steps of
# B = 32 768 with a stash took 0.46, 0.68 and 0.70 ms less (D = 768, 1 024, 1 152); this makes it 0.4.
STASH_START_S = 0.3e-3
# More from an idle device where there are several ranks, whose hosts are up to 1 ms apart: 4 H200s with 16 384 rows
# each took 0.9 ms more by a gather, 2 of them 0.6 by a gather and 0.5 by a ring.
RANKS_HOST_S = 0.9e-3
HOST = "host"  # the phase of what the device waits for the host
# Of a batch of messages, from the start of its kernel to the first byte: both ends meet. Among four H200s 25 MB to the
# next take 151 us: 78 us more than bytes at 345 GB/s (75 MB to three 65 us more).
BATCH_S = 78e-6
# Kernels take so much longer while a message of their device is on its way: it takes multiprocessors. Fitted to rings
# of 2 and 4 H200s that sent one message of keys and one of gradients more; today's, of 2, are within 6 %.
SLOWDOWN = 0.4
TOGETHER_BYTES = 64 << 20  # keys of up to this size travel with a ring's sums (runtime/ring.py)
HIDDEN = 0.9  # of the device's work behind the host's, where the host takes longer
# What a panel of a ring's hop does before it adds to what travels.
BEFORE_SUMS = ("forward product", "gradient product", "gradient", "dq product", "fused dq")
AFTER_HOPS = ("finish", "additions")  # what is done once, when the last hop's work is over
TRITON_PRODUCT_FRACTION = 0.7  # of the library's rate: an assumption until a board is measured


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
            v.has_keys and BufferTerm("ratios", backward, (tiles[1], Kg + 2), "statistics", ratios),
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


def host_times(strategy: str, replay: bool) -> tuple[float, float]:
    """Seconds of the host before a step's first kernel, and of a whole step but for each launch of its own."""
    if replay:
        return REPLAY_START_S, REPLAY_STEP_S
    return HOST_START_S + STASH_START_S * (strategy == "stash"), HOST_STEP_S


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
        terms += [
            TimeTerm(
                "gradient",
                flops=2 * rows * keys * W * P * fraction,
                bytes=e * pairs * fraction + D * e * W * (m * ceil_div(n, C) + n * ceil_div(m, R)),
                exponentials=pairs * fraction,
                efficiency=EFFICIENCY["gradient"] * PANEL_EFFICIENCY * _filled(Min(R, m), Bg, Min(C, n), Kg),
                launches=3 * panels,
            ),
            # Written by the forward, which hides little of it; read and overwritten by g in the backward.
            v.strategy == "stash" and TimeTerm("stash", bytes=3 * e * kept * n),
            TimeTerm(
                "dq product",
                flops=2 * products * pairs * D,
                bytes=e * pairs + W * D * (2 * s * m * ceil_div(n, C) + e * n * ceil_div(m, R)),
                efficiency=EFFICIENCY["dq"] * PANEL_EFFICIENCY,
                rate="product",
                launches=panels,
            ),
            TimeTerm(
                "dk product",
                flops=2 * products * pairs * D,
                bytes=e * pairs + W * D * (2 * s * n * ceil_div(m, R) + e * m * ceil_div(n, C)),
                efficiency=EFFICIENCY["dk"] * PANEL_EFFICIENCY,
                rate="product",
                launches=panels,
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


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One line of the memory plan. `bytes` counts all its pieces, without allocator slack."""

    name: str
    phase: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    why: str


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """Predicted time of one phase and what bounds it: "product", "memory", "exponentials", "launches" or "link"."""

    name: str
    time_s: float
    bound: str
    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The tile sizes that the planner varies: forward panel, backward panel, stash."""

    forward_rows: int
    forward_keys: int
    panel_rows: int
    panel_keys: int
    stash_rows: int = 0


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The model of one strategy for one problem on one device: `peak_bytes` and `time_s` of any `Sizes`."""

    variant: Variant
    cluster: Cluster
    rows: int
    keys: int
    dim: int
    dtype: str
    precision: str
    blocks: Mapping[str, Block]

    @property
    def profile(self) -> DeviceProfile:
        return self.cluster.profile

    @property
    def world_size(self) -> int:
        return self.cluster.devices

    @property
    def nodes(self) -> int:
        return self.cluster.nodes

    def peak_bytes(self, sizes: Sizes) -> int:
        """Upper bound on what one rank allocates beyond its inputs, from forward to the end of backward."""
        totals = self._by_phase(sizes)
        return totals["both"] + max(totals["forward"], totals["backward"], totals["finish"])

    def forward_fits(self, sizes: Sizes) -> bool:
        """Whether the forward phase takes no more than the backward phase, which is there anyway."""
        totals = self._by_phase(sizes)
        return totals["forward"] <= max(totals["backward"], totals["finish"])

    def buffers(self, sizes: Sizes) -> tuple[Buffer, ...]:
        """The memory plan by buffer, without those that are empty."""
        values = self._values(sizes)
        names = {"features": self.dtype, "statistics": "fp64" if self.dtype == "fp64" else "fp32"}
        found = []
        lengths = iter(_shapes(self.variant)(*values))
        for term, size in zip(buffer_terms(self.variant), _memory(self.variant)(*values), strict=True):
            shape = tuple(next(lengths) for _ in term.shape)
            if not all(shape):
                continue
            shape = (term.pieces, *shape) if term.pieces > 1 else shape
            found.append(
                Buffer(term.name, term.phase, size, shape, names.get(term.dtype, term.dtype), term.why)
            )
        return tuple(found)

    def time_s(self, sizes: Sizes) -> float:
        """Predicted time of one forward and backward that begin on an idle device."""
        return math.fsum(phase.time_s for phase in self.phases(sizes))

    def queued_s(self, sizes: Sizes) -> float:
        """The same behind other work, as in training: the device does not wait for the host."""
        return math.fsum(phase.time_s for phase in self.phases(sizes) if phase.name != HOST)

    def phases(self, sizes: Sizes) -> tuple[PhaseTime, ...]:
        """Time by phase, of a ring the last two are what of the communication is not hidden. Kernels wait for the host
        at the start; where they are short they do so all the time."""
        terms = time_terms(self.variant)
        numbers = _time(self.variant)(*self._values(sizes))
        bandwidth = self.profile.bandwidth_gbs.value * 1e9
        found = []
        for index, term in enumerate(terms):
            flops, moved, exponentials, efficiency, launches = numbers[5 * index : 5 * index + 5]
            times = {
                "product": flops / (self._rate(term.rate) * efficiency),
                "memory": moved / bandwidth,
                "exponentials": exponentials / (self.profile.exp_gops.value * 1e9),
            }
            bound = max(times, key=lambda name: times[name])
            launch_s = launches * self.profile.launch_us.value * 1e-6
            bound = "launches" if launch_s > times[bound] else bound
            found.append(PhaseTime(term.name, _rounded(max(times.values()) + launch_s), bound, flops, moved))
        if self.variant.strategy != "torch":
            busy_s = math.fsum(phase.time_s for phase in found)
            faster = 1 + COOL * math.exp(-busy_s / COOL_S)
            found = [dataclasses.replace(phase, time_s=_rounded(phase.time_s / faster)) for phase in found]
            found.append(PhaseTime(HOST, self._host_s(found, numbers[4::5]), "launches", 0, 0))
        if self.variant.ring:
            work = {"forward": found[:2], "backward": found[2 : len(terms)]}
            found += [self._link(phase, parts, sizes) for phase, parts in work.items()]
        return tuple(found)

    def launches(self, sizes: Sizes) -> dict[str, float]:
        """How many kernels the host launches in each phase, over all hops."""
        counts = _time(self.variant)(*self._values(sizes))[4::5]
        return {term.name: count for term, count in zip(time_terms(self.variant), counts, strict=True)}

    def _host_s(self, phases: Sequence[PhaseTime], launches: Sequence[float]) -> float:
        """What the device waits for the host: at the start, and where kernels are shorter than their launches."""
        start_s, step_s = host_times(self.variant.strategy, self.variant.replay)
        if not self.variant.replay:
            step_s += HOST_LAUNCH_S * sum(launches)
        alone_s = max(start_s, step_s - HIDDEN * math.fsum(phase.time_s for phase in phases))
        return _rounded(alone_s + RANKS_HOST_S * self.variant.ring)

    def _link(self, phase: str, work: Sequence[PhaseTime], sizes: Sizes) -> PhaseTime:
        """What of the communication of a direction is not hidden. A batch of messages takes its time to start; of a
        ring's, one for each move is counted (and one for keys that travel apart).

        Ring: keys (in backward with their statistics) travel beside the work of W - 1 hops: what takes longer counts,
        and what slows the work down. Backward they do W - 2 times, as the own ones have not left; where the forward has
        kept nothing, another transfer comes first, and is waited for.
        What the work changes (statistics of the keys; in backward dk) follows each hop, beside the next one's work up
        to where that adds to it first: the forward product of a panel, in backward its gradient and dq. The last
        transfer of forward, home, is waited for. Of its W moves N cross the network, by all devices at once: the last
        one too, which backward does not repeat.

        Gather: the keys of all others come beside the work on the own ones, and so go home the sums of gradients; the
        statistics of all keys, from everybody to everybody, are waited for.
        """
        hops = self.world_size
        hop_s = math.fsum(part.time_s for part in work if part.name not in AFTER_HOPS) / hops
        start_s = BATCH_S * (self.profile.target != "cpu")
        beside, after = self.travels(phase)
        if self.variant.gather:
            # In backward the keys are there, and nobody waits for the sums.
            beside, after = (beside, hops * after) if phase == "forward" else (after, 0)
            total = (hops - 1) * (beside + after)
            beside_s = start_s + self._transfer_s((hops - 1) * beside)
            exposed = _added(beside_s, max(0.0, beside_s - hop_s))
            if after:
                exposed += start_s + self._transfer_s((hops - 1) * after)
            return PhaseTime(f"{phase} communication", _rounded(exposed), "link", 0, total)
        before_s = math.fsum(part.time_s for part in work if part.name in BEFORE_SUMS)
        first_s = before_s / hops / self.panels(phase, sizes)
        back = phase == "backward"
        # By the last move of forward, which leaves a node if there are several: sums come home, or keys go away again.
        waited = after if not back else 0 if self.variant.keeps else beside
        exposed = start_s + self._transfer_s(waited, network=self.nodes > 1) if waited else 0.0
        for network, moves in ((False, hops - self.nodes), (True, self.nodes - 1)):
            # Backward ends with the first move of forward, which leaves a node only if that is a single device.
            alone = back and network == (self.nodes == hops)
            for count, size in ((moves - alone, beside), (alone, 0)):
                apart_s = start_s if after and size > TOGETHER_BYTES else 0.0
                beside_s, after_s = (self._transfer_s(part, network) for part in (size, after))
                both_s = start_s + apart_s + beside_s + after_s
                exposed += count * _added(both_s, max(0.0, start_s + after_s - first_s, both_s - hop_s))
        total = (hops - 1 - (back and self.variant.keeps)) * beside + (hops - back) * after
        return PhaseTime(f"{phase} communication", _rounded(exposed), "link", 0, total)

    def travels(self, phase: str) -> tuple[int, int]:
        """Bytes of a hop's messages: of what travels beside its work, and of what the work adds to."""
        features = self.keys * self.dim * DTYPE_BYTES[self.dtype]
        statistics = self.keys * 2 * self._accumulator_bytes * self.variant.has_keys
        if phase == "forward":
            return features, statistics
        return features + statistics, self.keys * self.dim * self._accumulator_bytes

    def panels(self, phase: str, sizes: Sizes) -> int:
        """Panels of a hop."""
        if phase == "backward" and self.variant.strategy == "fused":
            return 1
        forward = phase == "forward"
        rows, keys = (
            (sizes.forward_rows, sizes.forward_keys) if forward else (sizes.panel_rows, sizes.panel_keys)
        )
        return -(-self.rows // rows) * -(-self.keys // keys)

    def _transfer_s(self, size: int, network: bool = False) -> float:
        """Of one message, of as many bytes to the device as from it."""
        cluster = self.cluster
        gbs, latency_us = cluster.link_gbs.value, cluster.latency_us.value
        if network:  # by all devices of a node at once
            gbs = cluster.node_link_gbs.value * min(1.0, cluster.links_per_node / cluster.devices_per_node)
            latency_us = cluster.node_latency_us.value
        return size and size / (gbs * 1e9) + latency_us * 1e-6

    @property
    def _accumulator_bytes(self) -> int:
        return 8 if self.dtype == "fp64" else 4

    def _by_phase(self, sizes: Sizes) -> dict[str, int]:
        totals = {"both": 0, "forward": 0, "backward": 0, "finish": 0}
        gpu = self.profile.target != "cpu"
        for (phase, pieces), size in zip(
            _pieces(self.variant), _memory(self.variant)(*self._values(sizes)), strict=True
        ):
            totals[phase] += allocated_bytes(size, pieces, gpu)
        return totals

    def _values(self, sizes: Sizes) -> tuple[int, ...]:
        block = dict.fromkeys(("forward", "gradient", "fused", "finish"), (64, 64, 64)) | {
            name: (block.rows, block.keys, block.depth) for name, block in self.blocks.items()
        }
        depth = block["forward"][2] if self.variant.strategy != "fused" else block["fused"][2]
        padded = -(-inner_dim("forward", self.dim, self.variant.split) // depth) * depth
        strips = [
            most_strips(*panel, self.blocks[name]) if name in self.blocks else 1
            for name, panel in (
                ("forward", (sizes.forward_rows, sizes.forward_keys)),
                ("gradient", (sizes.panel_rows, sizes.panel_keys)),
            )
        ]
        return (
            self.rows, self.keys, self.world_size, self.dim, padded, DTYPE_BYTES[self.dtype], self._accumulator_bytes,
            sizes.forward_rows, sizes.forward_keys, sizes.panel_rows, sizes.panel_keys, sizes.stash_rows,
            *block["forward"][:2], *block["gradient"][:2], *block["fused"][:2], *strips, block["finish"][0],
            self.profile.multiprocessors, self.profile.library_workspace_bytes,
        )  # fmt: skip

    def _rate(self, rate: str) -> float:
        """Peak of a product in FLOP/s: the kind of unit that the dtype and the precision allow."""
        kind, fraction = self.dtype, 1.0
        library = rate == "product" and self.variant.library
        if self.variant.split:
            kind = "bf16"
        elif self.dtype == "fp32" and self.profile.vendor == "nvidia" and self.variant.strategy != "torch":
            kind, fraction = LIBRARY_FP32_MODES[self.precision] if library else FP32_MODES[self.precision]
        if rate == "product" and self.variant.strategy != "torch" and not library:
            fraction *= TRITON_PRODUCT_FRACTION
        peak = self.profile.matmul_tflops[kind]
        return peak.value * 1e12 * fraction * (VENDOR_FRACTION if peak.source.startswith("vendor") else 1.0)


def _added(transfer_s: float, waited_s: float) -> float:
    """What a transfer adds to the work beside it: what is waited for, and what the rest of it slows the work down."""
    return waited_s + (transfer_s - waited_s) * SLOWDOWN / (1 + SLOWDOWN)


def allocated_bytes(size: int, pieces: int, gpu: bool) -> int:
    """Upper bound on what the caching allocator takes for `size` bytes in `pieces` tensors."""
    if not gpu:
        return size
    rounded = size + 511 * pieces if pieces > 1 else -(-size // 512) * 512
    return rounded + pieces * MIB if size >= MIB else rounded


def describe(variant: Variant) -> str:
    """The formulas of one variant as plain text."""
    lines = [f"{term.phase:9} {term.name:20} {term.bytes}" for term in buffer_terms(variant)]
    lines += ["peak      both + max(forward, backward, finish)"]
    for term in time_terms(variant):
        parts = [
            f"{name} = {value}" for name, value in _quantities(term) if value != int(name == "efficiency")
        ]
        lines.append(f"time      {term.name:20} {'; '.join(parts)}")
    return "\n".join(lines)


def markdown(variants: Sequence[Variant] | None = None) -> str:
    """The whole model as a page: legend, memory by buffer and time by phase for each variant."""
    if variants is None:
        names = ("panel", "fused", "stash", "torch")
        variants = [Variant(name) for name in names] + [
            Variant("panel", ring=True),
            Variant("panel", ring=True, gather=True),
        ]
    lines = ["# Cost model", "", "| symbol | meaning |", "|---|---|"]
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
            lines.append(
                "| " + " | ".join([term.name, *(f"`{value}`" for _, value in _quantities(term))]) + " |"
            )
    return "\n".join(lines) + "\n"


def _quantities(term: TimeTerm) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, getattr(term, name)) for name in ("flops", "bytes", "exponentials", "efficiency", "launches")
    )


def _compile(expressions: Sequence[Any]) -> Callable[..., list[Any]]:
    names = {"ceil_div": lambda a, b: -(-a // b), "Min": min, "Max": max}
    function = sympy.lambdify(tuple(_SYMBOLS.values()), list(expressions), modules=[names, "math"])
    return function  # type: ignore[no-any-return]


@functools.cache
def _memory(variant: Variant) -> Callable[..., list[int]]:
    return _compile([term.bytes for term in buffer_terms(variant)])


@functools.cache
def _pieces(variant: Variant) -> tuple[tuple[str, int], ...]:
    return tuple((term.phase, term.pieces) for term in buffer_terms(variant))


@functools.cache
def _shapes(variant: Variant) -> Callable[..., list[int]]:
    return _compile([length for term in buffer_terms(variant) for length in term.shape])


@functools.cache
def _time(variant: Variant) -> Callable[..., list[float]]:
    return _compile([value for term in time_terms(variant) for _, value in _quantities(term)])


def _rounded(time_s: float) -> float:
    """Six digits: enough, and the same on machines whose last digit differs."""
    return float(f"{time_s:.6g}")
