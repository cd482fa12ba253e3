"""What templates of kernels read of sums over pairs: terms, slopes, and the functions that these call."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
from sympy import Expr

from infcl_gen.emission.class_context import IDS_OF_ROWS
from infcl_gen.emission.render import ABSENT
from infcl_gen.kernels import pairs
from infcl_gen.losses import Derivation
from infcl_gen.losses.printers import Printer, pair_code, pair_code_of_y, x
from infcl_gen.planning.planner import Plan

_ROWS_OF_POSITIVES = (
    "VECTOR_ROWS = tl.constexpr(32)  # rows, and columns of the embedding, of a program that walks positives"
)
_LOG2E = "LOG2E = tl.constexpr(1.4426950408889634)"
_INTERPRETED = "INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # without libdevice"
_OF_SOFTPLUS = """LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr({})  # a logit whose term and slope are 0 exactly"""
_ABOUT_POWERS = "Functions are evaluated from 2^-|x log2(e)|, which cannot overflow."
_ABOUT_SMALL = """\
Logits of a strip are taken for small or large ones; it begins with the largest that the panel before has met. Small
ones take t = 2^{0}y, y = x log2(e), and large ones 2^-|y|, which cannot overflow. A strip is computed again as one of
large logits where over up to 32 pairs of a row the product of 1 + t reaches 2^126."""
_ABOUT_TINY = """\
Logits of a strip are taken for tiny, small or large ones; it begins with the largest that the panel before has met.
Tiny ones, with gradients alone, take t = 2^{0}y, y = x log2(e), and t^2, small ones t, and large ones 2^-|y|, which
cannot overflow. A strip is computed again as the next size where over up to 32 pairs of a row the sum of t^2 reaches
2^-18, or the product of 1 + t reaches 2^126."""
_ABOUT_MASKS = " Strips beside masks count as large."
_OF_SMALL = """\
SMALL, LARGE = tl.constexpr(2), tl.constexpr(3)  # sizes of logits
GROWTH_BELOW = tl.constexpr(2.0**126)  # from there on a quotient in 2 instructions is 0"""
_OF_TINY = """\
TINY = tl.constexpr(1)
LONG_STRIP = tl.constexpr(16)  # of row blocks: one tile that guesses costs 6 %; shorter ones begin small
TINY_BELOW = tl.constexpr(-9.0)  # log2(t) of a tile in front of tiny strips
SQUARES_BELOW = tl.constexpr(2.0**-18)
# Minimax for t up to 2^-9: log(1 + t) = t - TINY_TERM t^2, relatively to 2.2e-7; t / (1 + t) = t - TINY_SLOPE t^2, to
# 6.6e-7.
TINY_TERM, TINY_SLOPE = tl.constexpr(0.4994607), tl.constexpr(0.99838197)"""
_OPERATIONS = {
    "pairs": "A pair takes 8 operations where logits are small, and 13 where they are large.",
    "pair_terms": "A pair takes 4 operations where logits are small, and 6 where they are large.",
}
_OPERATIONS_OF_TINY = (
    "A pair takes 6 operations where logits are tiny, 8 where they are small, 13 where they are large."
)
_SIZE_MET = "largest_size(sums + (2 + turn) * parts, tl.num_programs(0))"
_OF_SMALL_SWEEP = {"first_size": "SMALL", "size_met": f"tl.maximum({_SIZE_MET}, SMALL)"}
_OF_TINY_SWEEP = {"first_size": "TINY", "size_met": _SIZE_MET, "terms_of_tile": "sums_by_three_sizes"}
_LOGIT = "tl.fma(part_of(z, part, PARTS), slope, shift)"
_COUNTED_LOGIT = "part_of(y_of_tile, part, PARTS)"
_LIBDEVICE = "from triton.language.extra import libdevice"
_CALLED_BY = {"sigmoid": "sigmoid2", "softplus": "log_one_plus"}
_IN_BASE_2 = "slope, shift = slope * LOG2E, shift * LOG2E  # y = x log2(e): powers of 2 take no product with it"


def pairs_context(plan: Plan, derivation: Derivation, unit: float) -> dict[str, Any]:
    """What the templates of a sum over pairs read. Terms and slopes are printed as tensors like `x`.

    Sweeps of a sum of softplus take y = x log2(e).
    """
    term, slope = derivation.form.pair_term, derivation.pair_slope
    assert term is not None and slope is not None

    def of_tile(expression: Expr, factor: float = 1.0, of: str = "x", printed: Printer = pair_code) -> str:
        code = printed(expression, {"x": of})
        code = code if factor == 1 else f"{factor} * ({code})"
        return f"{code} + 0.0 * {of}" if expression.is_number else code

    weight, slope_weight = (float(each.other.as_coeff_Mul()[0]) for each in (term, slope))
    sign = derivation.softplus_sign
    traits = plan.traits
    placed, ids, whole = traits.placed, traits.ids, traits.softplus
    small, beside_masks, tiny = traits.small_first, pairs.small_beside_masks(plan), pairs.tiny_first(plan)
    minus = "-" if sign < 0 else ""
    by_size = (_ABOUT_TINY if tiny else _ABOUT_SMALL).format(minus) + _ABOUT_MASKS * (not beside_masks)
    about_range = by_size if small else _ABOUT_POWERS
    logit, at_y, of_logit = ("y", ", at y = x log2(e)", pair_code_of_y) if whole else ("x", "", pair_code)
    pairs_by_class = ["of a query and its positive"] * placed + ["of its id"] * ids + ["of another key"]
    other = "a key of another id" if ids else "a key that is not its positive"
    same = "a key of its id" + ", but no positive" * placed
    own = " A positive's own term takes the place of what it would be as another key: a difference would lose it."
    times_unit = "" if unit == 1 else ", times the unit of g"
    slopes_of, factor = of_tile(slope.other, unit, logit, of_logit), unit * slope_weight
    of_classes = [
        ("terms_of", f"h(x) of a query and {other}.", of_tile(term.other), not whole),
        ("positive_terms_of", "h(x) of a query and its positive.", of_tile(term.positive), placed),
        ("slopes_of", f"h'(x) of a query and {other}{times_unit}{at_y}.", slopes_of, True),
        (
            "positive_slopes_of",
            f"h'(x) of a query and its positive{times_unit}.",
            of_tile(slope.positive, unit),
            placed,
        ),
        ("same_id_terms_of", f"h(x) of a query and {same}.", of_tile(term.same_id), ids and not whole),
        (
            "same_id_slopes_of",
            f"h'(x) of a query and {same}{times_unit}.",
            of_tile(slope.same_id, unit),
            ids and not whole,
        ),
    ]
    functions = functions_called((value for *_, value, used in of_classes if used), ["log_one_plus"] * whole)
    functions += ("quotient",) * ("sigmoid2" in functions)
    constants = [_LOG2E] * (whole or bool({"sigmoid", "softplus"} & set(functions)))
    constants += [_INTERPRETED] * ("quotient" in functions) + [_OF_SOFTPLUS.format(-1e30 * sign)] * whole
    constants += [_OF_SMALL] * small + [_OF_TINY] * tiny
    softplus_terms, softplus_slopes, terms_of_tile = "softplus_terms", "softplus_slopes", "logarithms_of_pairs"
    if small:
        softplus_terms, softplus_slopes = "terms_by_size", "slopes_by_three_sizes" if tiny else "slopes_by_size"
        terms_of_tile = "sums_by_size"
    # In a sum of softplus, pairs of one id have the terms of other pairs at another logit.
    at = {x: "y", -x: "-y", -sympy.oo: "NOTHING", None: ""}[derivation.same_id_logit]
    slopes = "same_id_slopes_of(x)" if not whole else "-value" if at == "-y" else ""
    by_class = {
        "ids_of_tile": (IDS_OF_ROWS, True),
        "logit_of_same_id": (f"y = tl.where(same_id, {at}, y)", whole),
        "terms_of_same_id": ("terms = tl.where(same_id, same_id_terms_of(x), terms)", not whole),
        "slopes_of_same_id": (f"value = tl.where(same_id, {slopes}, value)", bool(slopes)),
    }
    return {
        "classes_of_pairs": ", or ".join(filter(None, (", ".join(pairs_by_class[:-1]), pairs_by_class[-1]))),
        "about_range": textwrap.fill(f"Range. {about_range}{own * placed}", 118),
        "positives_or": "positives or " * placed,
        "within": "tl.arange(0, PART) < keys - key0 - first",
        "functions_of_pairs": [
            {"name": name, "of": logit if name == "slopes_of" else "x", "what": what, "value": value}
            for name, what, value, used in of_classes
            if used
        ],
        "rows_of_vectors": _ROWS_OF_POSITIVES if placed else ABSENT,
        "depth_of_vectors": "VECTOR_DEPTH = tl.constexpr(128)" if placed else ABSENT,
        "functions": functions,
        "divided": "quotient(dividend, divisor)",
        "library_of_functions": _LIBDEVICE if "quotient" in functions else ABSENT,
        "constants_of_functions": "\n".join(constants) or ABSENT,
        "in_base_2": _IN_BASE_2 if whole else ABSENT,
        "logit": logit,
        "logit_of_part": f"{logit} = {_COUNTED_LOGIT if beside_masks else _LOGIT}",
        **{name: text if ids and used else ABSENT for name, (text, used) in by_class.items()},
        "of_softplus": whole,
        "small_first": small,
        "small_beside_masks": beside_masks,
        "tiny_first": tiny,
        "softplus_sign": minus,
        "times_terms": f"{weight} * " if sign and weight != 1 else "",
        "pairs_that_count": "counted_logits" if whole else "counted_pairs",
        "terms_of_part": softplus_terms if whole else "terms_of_classes",
        "times_slopes": {1.0: "", -1.0: "-"}.get(factor, f"{factor} * "),
        "slopes_of_part": softplus_slopes if whole else "slopes_of_classes",
        "sweeps": [
            each
            | {
                "follows": f" Those of positives are left out: `{each['positives']}` follows." * placed,
                "grown": whole and each["terms"],
                "terms_apart": each["terms"] and not (small and each["gradients"]),
                **(_OF_TINY_SWEEP if each["tiny"] else {"terms_of_tile": terms_of_tile, **_OF_SMALL_SWEEP}),
                "about_operations": _OPERATIONS_OF_TINY if each["tiny"] else _OPERATIONS[each["kernel"]],
                "summed": not each["of_rows"],
                "times_factor": "value *= factor[:, None]" if each["weighed"] else ABSENT,
                "times_factors": " * tl.load(factors + rows, mask=here, other=0.0)" * each["weighed"],
            }
            for each in pairs.sweeps(plan)
        ],
    }


def functions_called(codes: Iterable[str], others: Sequence[str] = ()) -> tuple[str, ...]:
    """The functions of pieces/functions.py.jinja that codes call, the others, and what these call."""
    name = r"(?<![.\w])(sigmoid2?|softplus)\("
    called = {*others, *(found for code in codes for found in re.findall(name, code))}
    called |= {_CALLED_BY[name] for name in called & _CALLED_BY.keys()}
    return tuple(sorted(called))
