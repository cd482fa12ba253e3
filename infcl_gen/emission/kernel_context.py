"""What templates of kernels read: literals, printed expressions, lists of arguments.

Statements of kernels stand in templates. All that is computed for them, and every choice between pieces, is made here.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infcl_gen.kernels import forward
from infcl_gen.kernels import fused as fused_family
from infcl_gen.kernels.arguments import named_parts
from infcl_gen.kernels.choice import SPLIT_TERMS
from infcl_gen.losses import triton_code
from infcl_gen.losses.printers import p

if TYPE_CHECKING:
    from sympy import Expr

    from infcl_gen.hardware import DeviceProfile
    from infcl_gen.losses import Derivation
    from infcl_gen.planning.planner import Plan

TEXT_WIDTH = 120  # columns of generated kernels


@dataclass(frozen=True)
class Part:
    """A part of the embedding, as kernels hold it that hold a whole one: `name` ends the names of its tensors."""

    name: str
    start: int
    width: int
    columns: str  # an expression


@dataclass(frozen=True)
class Side:
    """One of the two fused sweeps: whose rows a program owns, and what it walks."""

    owned: str  # "queries" or "keys"
    others: str
    own: str  # "query" or "key", which begin the names of statistics
    other: str
    features: str  # "q" or "k"
    other_features: str
    strides: str
    other_strides: str
    share: str
    other_share: str
    product: str  # what is added to the total
    sign: str  # of the positive's place against the own row's
    place: str  # expression of it: the other side's row that is each own row's positive
    row_of_positive: str  # expression: the query whose positive it is


@dataclass(frozen=True)
class KernelsContext:
    """The names in the templates of kernels; variants have more, `Family.values`. Expressions and lists of arguments
    are printed."""

    name: str
    loss_formula: str
    gradient_formula: str
    # What the package is for.
    has_keys: bool  # columns have statistics, too; positives are then on the diagonal
    labels: bool  # positives are named, not on the diagonal
    exact: bool  # fp32 operands: every row and column has its own reference
    split: bool  # fp32 features enter as bf16 halves
    fused: bool
    stash: bool
    descriptors: bool
    # Legend of the file.
    unit_of_g: str
    walkers: str
    reference_of: str
    summed_sides: str
    reduced_along: str
    formula_of_g: str
    # Constants.
    dim: int
    inner: str  # depth of a similarity, as a constant of the file
    inner_dim: int
    padded_dim: int
    split_terms: int
    tile_constants: tuple[tuple[str, int], ...]
    part_widths: list[int]  # where the schedule makes descriptors for each part, else []
    key_lanes: int
    wide_rows: int
    fused_wide_keys: int
    query_share: float
    key_share: float
    positive_rest: float
    # The derived mathematics.
    input_precision: str
    slope: str  # of the logit in z, in `scale`
    shift: str
    gradient_factor: str
    factor_has_scale: bool
    times_dscale_factor: str
    dscale_factor_has_scale: bool
    undo_exponent: str
    dbias: float
    query_term: str  # in `r`, `p`
    key_term_without_positive: str  # in `c`
    key_positive_term: str  # in `p`
    plus_positive_rest: str
    sum_of_shares: str  # of a tile, in `a`, `b`
    # Where positives are, and lists of arguments.
    positive_columns: str
    positive_references: str
    statistics: str
    # The embedding in parts, the sides of fused, and the pieces that are chosen.
    parts: tuple[Part, ...]
    kept_parts: tuple[Part, ...]  # the parts, where the forward keeps its keys
    sides: tuple[Side, Side]
    each_tile: str
    kept_tile: str
    stored_tile_of_g: str
    tile_rows: str = "GRADIENT_ROWS"  # of a tile of g


def kernels_context(name: str, plan: Plan, derivation: Derivation, profile: DeviceProfile) -> KernelsContext:
    """Of the package `name`, whose strategy has kernels."""
    formulas, blocks = derivation.formulas(), plan.blocks
    has_keys, labels = bool(derivation.has_keys), derivation.spec.positives == "label"
    fused, keeps_keys = plan.strategy == "fused", forward.keeps_keys(blocks["forward"], plan)
    unit = 2.0 ** gradient_exponent(plan, derivation)
    parts = parts_of(plan.inner_dim)
    without_positive, with_positive = _split_positive(derivation.key_term)
    sampled = "a sample (forward) or of the complete statistics (backward)" if has_keys else (
        "a sample (the backward takes each row's own)"
    )  # fmt: skip
    if derivation.slope is None or derivation.shift is None:
        raise ValueError("kernels are for affine logits")
    return KernelsContext(
        name=name,
        loss_formula=_legend(formulas["loss"]),
        gradient_formula=_legend(formulas["dL/dx"]),
        has_keys=has_keys,
        labels=labels,
        exact=plan.exact,
        split=plan.split,
        fused=fused,
        stash=plan.stash_rows > 0,
        descriptors=plan.descriptors,
        unit_of_g="M" if unit == 1 else f"M * 2^{math.frexp(unit)[1] - 1} (fp16 would underflow)",
        walkers="the forward" if fused else "forward and gradient",
        reference_of=sampled,
        summed_sides="queries and keys" if has_keys else "queries",
        reduced_along="both axes" if has_keys else "its row",
        formula_of_g="share_i 2^(y - r_i)" + " + share_j 2^(y - c_j)" * has_keys,
        dim=plan.problem.dim,
        inner="INNER" if plan.split else "DIM",
        inner_dim=plan.inner_dim,
        padded_dim=blocks["fused"].depth if fused else 0,
        split_terms=SPLIT_TERMS,
        tile_constants=_tile_constants(plan),
        part_widths=[part.width for part in parts] if fused or keeps_keys else [],
        key_lanes=forward.key_lanes(blocks["forward"], profile),
        wide_rows=min(profile.architecture.recomputed_rows, *_walked_rows(plan)),
        fused_wide_keys=fused_family.wide(profile, blocks["fused"])[0] if fused else 0,
        query_share=derivation.query_share * unit,
        key_share=derivation.key_share * unit,
        positive_rest=derivation.positive_rest * unit,
        input_precision=plan.input_precision,
        slope=triton_code(derivation.slope),
        shift=triton_code(derivation.shift),
        gradient_factor=(factor := triton_code(derivation.gradient_factor)),
        factor_has_scale="scale" in factor,
        times_dscale_factor=(factor := _times(derivation.dscale_factor)),
        dscale_factor_has_scale="scale" in factor,
        undo_exponent="" if unit == 1 else f" * {1 / unit}",
        dbias=float(derivation.dbias),
        query_term=triton_code(derivation.query_term),
        key_term_without_positive=triton_code(without_positive),
        key_positive_term=triton_code(with_positive),
        plus_positive_rest=" + POSITIVE_REST" if derivation.positive_rest else "",
        sum_of_shares="(a[:, None] + b[None, :])" if has_keys else "a[:, None]",
        positive_columns=LABELLED if labels else "rows.to(tl.int64) + first_positive - first_key",
        positive_references="positive_row_reference" + ", positive_key_reference" * has_keys,
        statistics="query_exponent, query_mantissa" + ", key_exponent, key_mantissa" * has_keys,
        parts=parts,
        kept_parts=parts if keeps_keys else (),
        sides=_sides(labels),
        each_tile="each_tile_of_kept_keys" if keeps_keys else "each_tile",
        kept_tile="kept_tile_by_descriptor" if plan.descriptors else "kept_tile",
        stored_tile_of_g="g_as_halves" if plan.split else "g_as_one",
    )


LABELLED = "tl.load(labels + rows, mask=rows < queries, other=-1) - first_key"


def parts_of(dim: int) -> tuple[Part, ...]:
    """The embedding as kernels multiply it that hold a whole one."""
    found, start = [], 0
    for name, width in named_parts(dim):
        columns = f"{start} + tl.arange(0, {width})" if start else f"tl.arange(0, {width})"
        found.append(Part(name, start, width, columns))
        start += width
    return tuple(found)


def gradient_exponent(plan: Plan, derivation: Derivation) -> int:
    """Gradients of logits are kept times 2 to this power: they are of order 1/M, and fp16 would underflow, or overflow
    beyond 65504."""
    if plan.dtype != "fp16" or plan.strategy == "torch":
        return 0
    softmaxes = abs(derivation.query_share) + abs(derivation.key_share)
    return 14 - math.ceil(math.log2(max(softmaxes, abs(derivation.positive_share))))


def _sides(labels: bool) -> tuple[Side, Side]:
    queries = Side(
        owned="queries", others="keys", own="query", other="key", features="q", other_features="k",
        strides="q_row_stride, q_depth_stride", other_strides="k_row_stride, k_depth_stride",
        share="QUERY_SHARE", other_share="KEY_SHARE", product="g k", sign="+",
        place=LABELLED if labels else "rows + (first_positive - first_key)", row_of_positive="own_rows",
    )  # fmt: skip
    keys = Side(
        owned="keys", others="queries", own="key", other="query", features="k", other_features="q",
        strides=queries.other_strides, other_strides=queries.strides,
        share="KEY_SHARE", other_share="QUERY_SHARE", product="g^T q", sign="-",
        place="rows - (first_positive - first_key)", row_of_positive="tl.maximum(target, 0)",
    )  # fmt: skip
    return queries, keys


def _tile_constants(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Of the blocks; those of positives and finish have no keys of their own."""
    return tuple(
        (f"{kernel}_{field}".upper(), getattr(block, field))
        for kernel, block in plan.blocks.items()
        for field in ("rows", "keys", "depth")
        if field != "keys" or kernel not in ("positive", "finish")
    )


def _walked_rows(plan: Plan) -> list[int]:
    """Rows of a tile of each kernel that walks strips."""
    return [plan.blocks[name].rows for name in ("forward", "gradient") if name in plan.blocks]


def _legend(formula: str) -> str:
    return textwrap.fill(formula, TEXT_WIDTH, initial_indent=" " * 11, subsequent_indent=" " * 11).strip()


def _times(factor: Expr) -> str:
    return "" if factor == 1 else f" * ({triton_code(factor)})"


def _split_positive(term: Expr) -> tuple[Expr, Expr]:
    """A key term, linear in p, as the part without p and the part with it."""
    with_positive = term.diff(p) * p
    return (term - with_positive).expand(), with_positive
