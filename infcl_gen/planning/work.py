"""The work of a step, term by term, as SymPy expressions of a plan's sizes, and how fast kernels do it."""

from __future__ import annotations

from typing import Any, NamedTuple

from sympy import Expr, Integer, Rational

from infcl_gen.kernels.choice import SPLIT_TERMS, Choice

from infcl_gen.planning.memory import (  # isort: skip
    Bf, Bg, Bu, C, D, F, G, Kf, Kg, Max, Min, P, R, S, T, U, W, ceil_div, e, m, n, s,
)  # fmt: skip


class TimeTerm(NamedTuple):
    """Work of one rank over all hops.

    phase  of a step, "forward" or "backward".
    part   "first": a panel's, before it adds to sums that travel; "rest"; or "end": when the last hop is over.
    rate   which peak the flops run at, "triton" or "product".
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
        """Everything that has a value for each size."""
        return self.flops, self.bytes, self.exponentials, self.efficiency, self.launches


# Fraction of the peak that a kernel reaches as a function of the embedding: fitted to the 76 rows of an earlier
# h200-grid.json, behind other work, B from 1 024 to 131 072, D from 128 to 1 152, the worst 9 % off; of the 84 measured
# since the worst is 12.5 % off, of 0.05 ms, the next 9.
EFFICIENCY = {
    "forward": Rational(94, 100) * P / (P + 125),
    "gradient": Rational(101, 100) * P / (P + 205),
    "hopper forward": P / (P + 45),  # D = 200 and 256 take 3.3 and 3.5 ms at B = 65 536
    "hopper gradient": P / (P + 160),  # 4.6 and 4.7 ms
    "fused": P / (P + 31),
    "dq": Rational(896, 1000) * D**2 / (D**2 + 40**2),
    "dk": Rational(896, 1000) * D**2 / (D**2 + 40**2),
    "torch": Rational(7, 10),
}
WALK = 750  # of the embedding: what references and positives, a few programs each, walk in the time of one launch more
ALONE = Rational(7, 5)  # of half the time of two fused programs on a multiprocessor: what one takes by itself
# Panels of 16 384 rows are 7 % faster than of 2 048 (H200, D = 768); both sides count alike.
PANEL_EFFICIENCY = Min(R, m) / (Min(R, m) + 80) * Min(C, n) / (Min(C, n) + 80)


def time_terms(choice: Choice) -> tuple[TimeTerm, ...]:
    """One forward and one backward sweep, without communication."""
    v = choice
    pairs, sides = m * n * W, 2 if v.has_keys else 1
    panels, forward_panels = ceil_div(m, R) * ceil_div(n, C) * W, ceil_div(m, F) * ceil_div(n, G) * W
    additions = [TimeTerm("additions", part="end", bytes=3 * s * (W - 1) * n * D, launches=W - 1)] * v.gather
    if v.strategy == "torch":
        product = {"flops": 2 * pairs * D, "efficiency": EFFICIENCY["torch"], "launches": panels}
        # Passes over a panel of z: maximum, difference and exponential, and sum per side; backward one exponential per
        # side, their weighted sum, and the positives.
        each = {"exponentials": sides * pairs}
        return (
            TimeTerm("forward product", "forward", "first", **product),
            TimeTerm("statistics", "forward", bytes=(2 + 4 * sides) * s * pairs, launches=12 * panels, **each),
            TimeTerm("gradient product", part="first", **product),
            TimeTerm("gradient", part="first", bytes=6 * sides * s * pairs, launches=8 * panels, **each),
            TimeTerm("dq product", part="first", rate="product", **product),
            TimeTerm("dk product", rate="product", **product),
            TimeTerm("finish", part="end", bytes=(m + n) * D * (2 * s + e), launches=4),
            *additions,
        )
    rows, keys, hopper = ceil_div(m, Bf) * Bf, ceil_div(n, Kf) * Kf, "hopper " * (v.hopper_stages > 0)
    partials = 2 * s * W * (m * ceil_div(n, Kf) + (n * ceil_div(m, F) * Min(ceil_div(F, Bf), T) if v.has_keys else 0))
    launches = sides * forward_panels + W + 1 + forward_panels * D / WALK
    terms: list[Any] = [
        TimeTerm(
            "forward product",
            "forward",
            "first",
            flops=2 * rows * keys * W * P,
            bytes=W * D * e * (m * ceil_div(n, G) + n * ceil_div(m, F)) + partials,
            exponentials=pairs,
            efficiency=EFFICIENCY[f"{hopper}forward"] * _filled(Min(F, m), Bf, Min(G, n), Kf),
            launches=2 * forward_panels,
        ),
        TimeTerm("statistics", "forward", bytes=partials + 2 * W * m * D * e, launches=launches),
    ]
    if v.strategy == "fused":
        rows, slices = (m, W) if v.ring else (Min(R, m), ceil_div(m, R))
        for name, part, owned, other in (("fused dq", "first", rows, n), ("fused dk", "rest", n, rows)):
            programs = ceil_div(owned, Bu)
            terms.append(
                TimeTerm(
                    name,
                    part=part,
                    flops=4 * slices * programs * Bu * other * P,
                    bytes=slices * owned * D * (e + 2 * s),
                    exponentials=slices * programs * Bu * other,
                    efficiency=EFFICIENCY["fused"] * programs / (U * Max(ceil_div(programs, U), ALONE)),
                    launches=2 * slices,
                )
            )
    else:
        rows, keys = ceil_div(m, Bg) * Bg, ceil_div(n, Kg) * Kg
        kept = Min(S, m) if v.stash else Integer(0)
        fraction = (m - kept) / m
        reached = EFFICIENCY[f"{hopper}gradient"] * PANEL_EFFICIENCY * _filled(Min(R, m), Bg, Min(C, n), Kg)
        # g of each panel, and its positives; where keys have statistics a second look at each, and besides their ratios
        # at each hop (alone: for each row of panels), and the positives of the panels along the diagonal.
        once = (W if v.ring else ceil_div(m, R)) + Max(ceil_div(m, R), ceil_div(n, C))
        terms.append(
            TimeTerm(
                "gradient",
                part="first",
                flops=2 * rows * keys * W * P * fraction,
                bytes=e * pairs * fraction + D * e * W * (m * ceil_div(n, C) + n * ceil_div(m, R)),
                exponentials=pairs * fraction,
                efficiency=reached,
                launches=2 * panels + (once if v.has_keys else 0),
            )
        )
        if v.stash:  # written by the forward, which hides little of it; read and overwritten by g in the backward
            terms.append(TimeTerm("stash", bytes=3 * e * kept * n))
        product = {"flops": 2 * (SPLIT_TERMS if v.split else 1) * pairs * D, "rate": "product", "launches": panels}
        for name, part, own, stride, other, step in (("dq", "first", m, R, n, C), ("dk", "rest", n, C, m, R)):
            moved = e * pairs + W * D * (2 * s * own * ceil_div(other, step) + e * other * ceil_div(own, stride))
            efficiency = EFFICIENCY[name] * PANEL_EFFICIENCY
            terms.append(TimeTerm(f"{name} product", part=part, bytes=moved, efficiency=efficiency, **product))
    finish = (m + n) * D * (2 * s + e) + m * D * e
    terms += [TimeTerm("finish", part="end", bytes=finish, launches=2 * ceil_div(m, R) + 2), *additions]
    if v.split:  # the rows of a panel once, its keys once for each panel of rows
        sweeps = ceil_div(m, F) + ceil_div(m, R)
        launches = W * sweeps + forward_panels + panels
        terms.append(TimeTerm("split", bytes=W * D * (e + 2 * SPLIT_TERMS) * (2 * m + n * sweeps), launches=launches))
    if v.replay:
        terms.append(TimeTerm("copies", bytes=2 * (m + n) * D * e, launches=2))
    return tuple(terms)


def _filled(rows: Any, block_rows: Any, keys: Any, block_keys: Any) -> Expr:
    """Part of the multiprocessors that a panel has blocks for: small ones do not fill a large board."""
    return Min(1, ceil_div(rows, block_rows) * ceil_div(keys, block_keys) / U)
