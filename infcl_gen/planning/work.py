"""The work of a step as SymPy expressions of a plan's sizes, and the fraction of the peak that kernels reach."""

import itertools
from typing import Any, NamedTuple

from sympy import Expr, Integer, Rational

from infcl_gen.kernels.choice import SPLIT_TERMS, Choice

from infcl_gen.planning.memory import (  # isort: skip
    Bf, Bg, Bu, C, D, F, G, Kf, Kg, Max, Min, P, R, S, T, U, W, ceil_div, e, m, n, s,
)  # fmt: skip


class TimeTerm(NamedTuple):
    """Work of one rank over all hops. Amounts are expressions; `efficiency` is the fraction of the peak FLOP/s.

    part   "first": before a panel adds to sums that travel; "rest": the other work of hops; "end": after the last hop.
    rate   whose peak the FLOPs run at: "triton", or "product" (`Choice.product_by`).
    """

    name: str
    phase: str = "backward"
    part: str = "rest"
    flops: Any = 0
    bytes: Any = 0
    exponentials: Any = 0
    efficiency: Any = 1
    rate: str = "triton"
    launches: Any = 0

    @property
    def quantities(self) -> tuple[Any, ...]:
        """The amounts, in the order in which `CostModel` reads their values."""
        return self.flops, self.bytes, self.exponentials, self.efficiency, self.launches


# Fraction of the peak that a kernel reaches, by embedding. Fitted on an H200 behind other work to 76 steps within 9 %
# (B from 1 024 to 131 072, D from 128 to 1 152). Of the 84 steps of h200-grid.json one is 12.5 % off (0.05 ms), all
# others are within 9 %.
EFFICIENCY = {
    "forward": Rational(94, 100) * P / (P + 125),
    # Fitted to steps of infonce at B = 65 536, D from 64 to 768, within 10 %: 7.3, 11.2 and 31.8 ms at 64, 256 and 768.
    "rows forward": Rational(97, 100) * P / (P + 170),
    "gradient": Rational(101, 100) * P / (P + 205),
    "hopper forward": P / (P + 45),  # D = 200 and 256 take 3.3 and 3.5 ms at B = 65 536
    "hopper gradient": P / (P + 160),  # 4.6 and 4.7 ms
    "fused": P / (P + 31),
    "labelled fused": P / (P + 120),  # tiles look for positives: in bf16 12.5 to 22.2 ms at D = 64 to 256, within 17 %
    "torch": Rational(7, 10),
}
# Kernels reach less of it whose registers hold more than z: two sums of a row, or similarities of a guide. At
# B = 65 536, D = 768 on an H200 those of hard_negative take 13.3 and 11.5 ms, of ntxent 5.6 and 5.6; those of gist 29
# and 30 ms, of distill 31 and 32, twice those of clip 22. With a guide's softmaxes of both sides tiles are those of two
# sums, and so is the estimate: their kernels are not measured yet.
BESIDE_Z = {"second": Rational(45, 100), "guide": Rational(73, 100)}
# What the end of each prefix costs, in columns of a product: its sums; or its terms, that also go to memory. Fitted to
# kernels of 4 prefixes at B = 65 536, D = 768 on an H200: 18.7 and 27.8 ms. One loss has 125 and 205 above. Kernels for
# Hopper are fitted to their share of whole steps, 66.2 ms in 1 GiB: 14.3 and 25.1. Those of cosines also scale z and
# add up g z along both axes. By themselves they take 52.4 and 76.3 ms, in whole steps 56.7 and 86.7; for Hopper 15.7
# and 33.8 of a step.
PREFIX_END = {
    "forward": 220, "gradient": 405, "hopper forward": 126, "hopper gradient": 345,
    "cosines forward": 1070, "cosines gradient": 1690, "hopper cosines forward": 157, "hopper cosines gradient": 531,
}  # fmt: skip
WALK = 750  # columns of the embedding that kernels of few programs (references, positives) walk in a launch's time
COLUMN_LAUNCHES = 400  # of two sums by id: a dozen for each bit of the number of ids
SORT_LAUNCHES = 30  # that take the time of two sorts of ids
ALONE = Rational(7, 5)  # time of one fused program alone on an SM, over half the time of two that share it
# Panels of 16 384 rows are 7 % faster than panels of 2 048 (H200, D = 768).
PANEL_EFFICIENCY = Min(R, m) / (Min(R, m) + 80) * Min(C, n) / (Min(C, n) + 80)


class Shares(NamedTuple):
    """The parts of the pairs m n W that a step computes: all of a rectangle, of a triangle about half.

    A rank meets half of the others, or all of their rows by half. Panels of own rows lie on and above the diagonal.
    Kernels walk those on it by half; the rest of g is copied, so that one product has the gradients of all their rows.
    """

    forward: Any = Integer(1)
    forward_panels: Any = Integer(1)
    gradient: Any = Integer(1)
    dq: Any = Integer(1)  # also of panels
    dk: Any = Integer(1)  # the product with g transposed


def shares_of(choice: Choice) -> Shares:
    if not choice.traits.triangle:
        return Shares()
    others, whole = (W - 1) * n, 2 * W * n
    tile = Min(F, m) if choice.strategy == "torch" else Max(Bf, Kf)
    of_g = R if choice.strategy == "torch" else Max(Bg, Kg)
    forward, forward_panels, gradient, dq = ((Min(m, size) + m + others) / whole for size in (tile, F, of_g, R))
    return Shares(forward, forward_panels, gradient, dq, (m - Min(m, R) + others) / whole)


def time_terms(choice: Choice) -> tuple[TimeTerm, ...]:
    """The work of one forward and one backward sweep, without communication."""
    v = choice
    if v.at_once:
        return (*_terms_at_once(v), *_means(v, "forward"))
    share, sides, losses = shares_of(v), 2 if v.both_axes else 1, v.losses
    forward_pairs, pairs = m * n * W * share.forward, m * n * W * share.gradient
    products = 1 + v.traits.guide  # of a tile: z, and the guide's similarities
    terms_of_tile = 1 + v.traits.by_guide  # exponentials of both, where the guide's weigh logits
    panels = ceil_div(m, R) * ceil_div(n, C) * W * share.dq
    forward_panels = ceil_div(m, F) * ceil_div(n, G) * W * share.forward_panels
    additions, finished, means = _additions(v, "backward"), _finished(v), _means(v, "forward", "backward") + _pooled(v)
    if v.strategy == "torch":
        product = {"flops": 2 * pairs * D * products, "efficiency": EFFICIENCY["torch"], "launches": panels}
        # A panel of z is passed over for its maximum, the difference, and the exponentials and sum of each side; in
        # backward for one exponential of each side, their weighted sum, and the positives.
        each = {"exponentials": sides * losses * pairs * terms_of_tile}
        return (
            TimeTerm("forward product", "forward", "first", **product),
            TimeTerm(
                "statistics",
                "forward",
                bytes=(2 + 4 * sides) * losses * s * pairs,
                launches=12 * losses * panels,
                **each,
            ),
            TimeTerm("gradient product", part="first", **product),
            TimeTerm(
                "gradient", part="first", bytes=6 * sides * losses * s * pairs, launches=8 * losses * panels, **each
            ),
            *(
                TimeTerm(
                    f"{side.name} product",
                    part=side.part,
                    rate="product",
                    **product | {"flops": 2 * m * n * W * side.share * D},
                )
                for side in _sides(v)
            ),
            TimeTerm("finish", part="end", bytes=finished * D * (2 * s + e), launches=4),
            *additions,
            *means,
        )
    rows, keys = ceil_div(m, Bf) * Bf, ceil_div(n, Kf) * Kf
    partials = (
        losses
        * v.partial_sums
        * s
        * W
        * (m * ceil_div(n, Kf) + (n * ceil_div(m, F) * Min(ceil_div(F, Bf), T) if v.both_axes else 0))
    )
    launches = losses * (sides * forward_panels + forward_panels * D / WALK) + W + 1
    terms: list[Any] = [
        TimeTerm(
            "forward product",
            "forward",
            "first",
            flops=2 * rows * keys * W * P * share.forward * products,
            bytes=W * D * e * (m * ceil_div(n, G) + n * ceil_div(m, F)) + partials,
            exponentials=losses * forward_pairs * (products + v.traits.second + v.traits.guided_sides),
            efficiency=_sweep(v, "forward") * _filled(Min(F, m), Bf, Min(G, n), Kf),
            launches=2 * forward_panels,
        ),
        TimeTerm("statistics", "forward", bytes=partials + 2 * W * m * D * e, launches=launches),
        *_positives_of_ids(v, "forward", sides * forward_panels),
    ]
    if v.strategy == "fused":
        rows, slices = (m, W) if v.world_size > 1 else (Min(R, m), ceil_div(m, R))
        for side in _sides(v):
            owned, other = (rows, n) if side.name == "dq" else (n, rows)
            programs = ceil_div(owned, Bu)
            terms.append(
                TimeTerm(
                    f"fused {side.name}",
                    part=side.part,
                    flops=4 * slices * programs * Bu * other * P,
                    bytes=slices * owned * D * (e + 2 * s),
                    exponentials=slices * programs * Bu * other,
                    efficiency=EFFICIENCY["labelled fused" if v.labels else "fused"]
                    * programs
                    / (U * Max(ceil_div(programs, U), ALONE)),
                    launches=2 * slices,
                )
            )
    else:
        rows, keys = ceil_div(m, Bg) * Bg, ceil_div(n, Kg) * Kg
        kept = Min(S, m) if v.stash else Integer(0)
        fraction = (m - kept) / m
        reached = _sweep(v, "gradient") * PANEL_EFFICIENCY * _filled(Min(R, m), Bg, Min(C, n), Kg)
        # Launches of a panel: gradient, then gradient_positives; with key statistics gradient_wide instead. Key
        # statistics also need ratios at each hop (on one rank: each row of panels), and positives on the diagonal.
        once = (W if v.world_size > 1 else ceil_div(m, R)) + Max(ceil_div(m, R), ceil_div(n, C))
        terms.append(
            TimeTerm(
                "gradient",
                part="first",
                flops=2 * rows * keys * W * P * fraction * share.gradient * products,
                bytes=losses * e * pairs * fraction + D * e * W * (m * ceil_div(n, C) + n * ceil_div(m, R)),
                exponentials=losses
                * pairs
                * fraction
                * (sides if v.traits.guided_sides or (v.traits.combined and not v.traits.even) else 1)
                * (1 + v.traits.second + v.traits.by_guide),
                efficiency=reached,
                launches=2 * panels + (once if v.both_axes and not v.traits.guided_sides else 0),
            )
        )
        if v.traits.triangle:  # half of the panels on the diagonal are read and written
            terms.append(TimeTerm("mirror", part="first", bytes=e * m * Min(m, R), launches=ceil_div(m, R)))
        if v.stash:  # forward writes it, and hides little of that; backward reads it and overwrites it by g
            terms.append(TimeTerm("stash", bytes=3 * e * kept * n))
        terms += [*_positives_of_ids(v, "backward", panels), *_products(v, "backward")]
    finish = finished * D * (2 * s + e) + (m if v.of_queries else n) * D * e
    terms += [TimeTerm("finish", part="end", bytes=finish, launches=2 * ceil_div(m, R) + 2), *additions, *means]
    if v.split:  # queries once, keys once for each row of panels
        sweeps = ceil_div(m, F) + ceil_div(m, R)
        launches = W * sweeps + forward_panels + panels
        terms.append(TimeTerm("split", bytes=W * D * (e + 2 * SPLIT_TERMS) * (2 * m + n * sweeps), launches=launches))
    if v.replay:
        terms.append(TimeTerm("copies", bytes=2 * (m + n) * D * e, launches=2))
    return tuple(terms)


def _sweep(v: Choice, kernel: str) -> Expr:
    """The fraction of the peak that "forward" or "gradient" reaches where it fills the board."""
    if v.slabs:
        which = "hopper " * (v.hopper_stages > 0) + "cosines " * v.traits.renormalised
        return P / (P + PREFIX_END[which + kernel] * v.losses)
    few = v.traits.second or v.traits.guided_sides
    beside = BESIDE_Z["second"] if few else BESIDE_Z["guide"] if v.traits.guide else 1
    return EFFICIENCY["hopper " * (v.hopper_stages > 0) + kernel] * beside


def _positives_of_ids(v: Choice, phase: str, panels: Any) -> list[TimeTerm]:
    """Positives that each panel finds by sorted ids, if a row has few: tiles of z beside the diagonal of the sorted
    pairs, behind a search for their places. Sorts of both sides come first."""
    launches = 2 * W * SORT_LAUNCHES + panels * (2 + 2 * D / WALK)
    return [TimeTerm(f"positives {phase}", phase, launches=launches)] * v.traits.sorted_ids


def _means(v: Choice, *phases: str) -> list[TimeTerm]:
    """Of sums of features, where the mean of all logits is part of the loss: each phase reads all that it meets."""
    found = [TimeTerm(f"means {phase}", phase, bytes=(m + n * W) * D * e, launches=3 * W + 12) for phase in phases]
    return found * v.traits.means


def _pooled(v: Choice) -> list[TimeTerm]:
    """Of the log-sum-exp over the positives of all queries, and of slopes by it; of sums of columns by id."""
    found = [TimeTerm("positives of all", "forward", bytes=8 * v.traits.pooled * m, launches=28)]
    by_id = TimeTerm("columns of ids", "forward", bytes=64 * W * (m + n), launches=COLUMN_LAUNCHES)
    return found * bool(v.traits.pooled) + [by_id] * v.traits.columns_of_ids


def _additions(v: Choice, phase: str) -> list[TimeTerm]:
    """To this rank's own sums: of each part that a gather brings home; in a ring of one, if the own part has stayed."""
    triangle = v.traits.triangle
    parts = Integer(1) if not v.gather else ceil_div(W - 1, 2) if triangle else W - 1
    term = TimeTerm("additions", phase, "end", bytes=3 * s * parts * n * D, launches=parts)
    stays = v.gather or triangle or v.at_once
    return [term] * (v.world_size > 1 and stays and v.of_keys)


class _Side(NamedTuple):
    """A side whose gradients are wanted: their name, the part of their product, and the side's rows and those of a
    panel, then those of the other side; and the part of all pairs in their product."""

    name: str
    part: str
    own: Any
    stride: Any
    other: Any
    step: Any
    share: Any


def _sides(v: Choice) -> list[_Side]:
    """Without queries the product of keys does not wait for another, but for the sums that it adds to."""
    share = shares_of(v)
    queries, keys = _Side("dq", "first", m, R, n, C, share.dq), _Side("dk", "rest", n, C, m, R, share.dk)
    return [queries] * v.of_queries + [keys] * v.of_keys


def _of_product(columns: Any) -> Any:
    """The same of products with g, by the columns that they have."""
    return Rational(896, 1000) * columns**2 / (columns**2 + 40**2)


def _finished(v: Choice) -> Expr:
    """Rows of all gradients."""
    return m * int(v.of_queries) + n * int(v.of_keys and not v.traits.triangle)


def _products(v: Choice, phase: str) -> list[TimeTerm]:
    """g of panels times features: of a loss over prefixes one for each slab, whose g narrow ones read as fast as memory
    allows."""
    found = []
    slabs = [(f" of {slab.start} to {slab.stop}", slab.stop - slab.start) for slab in v.slabs]
    for (name, part, own, stride, other, step, share), (columns, width) in itertools.product(
        _sides(v), slabs or [("", D)]
    ):
        panels, pairs = ceil_div(m, R) * ceil_div(n, C) * W * share, m * n * W * share
        flops = 2 * (SPLIT_TERMS if v.split else 1) * pairs * width
        moved = e * pairs + W * width * (2 * s * own * ceil_div(other, step) + e * other * ceil_div(own, stride))
        efficiency = _of_product(width) * PANEL_EFFICIENCY
        how = {"rate": "product", "efficiency": efficiency, "launches": panels}
        found.append(TimeTerm(f"{name} product{columns}", phase, part, flops=flops, bytes=moved, **how))
    return found


def _terms_at_once(v: Choice) -> tuple[TimeTerm, ...]:
    """Three products in forward, and in backward a multiplication of what it kept."""
    forward, pairs, panels = "forward", m * n * W, ceil_div(m, R) * ceil_div(n, C) * W
    if v.world_size > 1 and v.of_keys and not v.rows:  # the own keys come with one half of the queries, then the other
        panels += (2 * ceil_div(m, 2 * R) - ceil_div(m, R)) * ceil_div(n, C)
    kept, finished = s if v.dtype != "bf16" else e, _finished(v)
    finish = finished * D * (2 * s + kept) + (m if v.of_queries else n) * D * e
    end = (
        TimeTerm("finish", forward, "end", bytes=finish, launches=4),
        *_additions(v, forward),
        TimeTerm("rescale", part="end", bytes=finished * D * (kept + e), launches=4),
    )
    if v.strategy == "torch":
        product = {"flops": 2 * pairs * D, "efficiency": EFFICIENCY["torch"], "launches": panels}
        # A panel is passed over for its logits, the terms and slopes with their sums, and the positives.
        work = {"bytes": 14 * s * pairs, "exponentials": 2 * pairs, "launches": 16 * panels}
        return (
            TimeTerm("pairs product", forward, "first", **product),
            TimeTerm("pairs", forward, "first", **work),
            *(TimeTerm(f"{side.name} product", forward, side.part, rate="product", **product) for side in _sides(v)),
            *end,
        )
    if v.rows:
        copies = TimeTerm("copies", forward, bytes=2 * (m + n + finished) * D * e, launches=2)
        return (*_row_terms(v), *end, *[copies] * v.replay)
    rows, keys = ceil_div(m, Bg) * Bg, ceil_div(n, Kg) * Kg
    terms = [
        TimeTerm(
            "pairs",
            forward,
            "first",
            flops=2 * rows * keys * W * P,
            bytes=e * pairs + D * e * W * (m * ceil_div(n, C) + n * ceil_div(m, R)),
            exponentials=2 * pairs,
            efficiency=EFFICIENCY["gradient"] * PANEL_EFFICIENCY * _filled(Min(R, m), Bg, Min(C, n), Kg),
            launches=panels,
        ),
        *_products(v, forward),
    ]
    if v.split:
        sweeps = ceil_div(m, R)
        moved, launches = W * D * (e + 2 * SPLIT_TERMS) * (m + n * sweeps), W * sweeps + panels
        terms.append(TimeTerm("split", forward, bytes=moved, launches=launches))
    return (*terms, *end)


def _row_terms(v: Choice) -> list[TimeTerm]:
    """Rows of panels: z with its sums, whose terms are kept, then products with these."""
    forward, panels, keys = "forward", ceil_div(m, R), n * W
    partials = 2 * s * m * Min(ceil_div(keys, Kf), T)
    return [
        TimeTerm(
            "forward product",
            forward,
            "first",
            flops=2 * ceil_div(m, Bf) * Bf * ceil_div(keys, Kf) * Kf * P,
            bytes=D * e * (m + keys * panels) + partials + e * m * keys,  # the last are the tiles that it keeps
            exponentials=m * keys,
            efficiency=EFFICIENCY["rows forward"] * _filled(Min(R, m), Bf, keys, Kf),
            launches=3 * panels,
        ),
        TimeTerm("statistics", forward, bytes=partials + 2 * m * D * e, launches=(3 + D / WALK) * panels),
        TimeTerm(
            "weights", forward, bytes=m * D * 2 * (s * int(v.of_queries) + e * int(v.of_keys)), launches=4 * panels
        ),
        *_products(v, forward),
    ]


def _filled(rows: Any, block_rows: Any, keys: Any, block_keys: Any) -> Expr:
    """The fraction of the SMs that a panel has blocks for."""
    return Min(1, ceil_div(rows, block_rows) * ceil_div(keys, block_keys) / U)
