"""The kernels of a loss that is a sum over pairs: one sweep computes it and its gradients, or one each of them."""

from typing import Any

from infcl_gen.kernels.arguments import SCALARS, STRIDES, Argument, Kernel, arguments, classes, places
from infcl_gen.kernels.choice import Choice
from infcl_gen.kernels.family import Family
from infcl_gen.kernels.forward import K as FORWARD_K
from infcl_gen.kernels.forward import Q as FORWARD_Q
from infcl_gen.kernels.gradient import K, Q
from infcl_gen.kernels.hopper import ARCH

_ABOUT_SIZES = """
    Rows 2 and 3 have a size of logits for each program. A launch reads row 2 + turn, begins with the largest, and
    writes what it has met to the other row: what is read no program writes, so results repeat bitwise.{}"""
_ABOUT_MASKED_SIZES = """
    A launch with masks does neither: its logits count as large."""


def small_beside_masks(choice: Choice) -> bool:
    """Whether a panel with masks takes small logits apart, too: on Hopper, where positives lie on the diagonal.

    Ahead of time it compiles without spills on sm_80 and sm_89, too, but was not measured there. On sm_100 a thread has
    no registers for sizes beside masks, and spills 80 bytes, on gfx942 108; with labels or ids it spills 8 to 136 on
    sm_90.
    """
    traits = choice.traits
    diagonal = traits.placed and not (traits.labels or traits.ids)
    return choice.arch == ARCH and traits.small_first and diagonal


def tiny_first(choice: Choice) -> bool:
    """Whether gradients take tiny logits apart, too, whose slopes are then good to 2^-18: for g of 8 or 11 bits."""
    return small_beside_masks(choice) and choice.operand_bytes == 2 and not choice.split


def sweeps(choice: Choice) -> tuple[dict[str, Any], ...]:
    """What a panel's sweep computes of each pair. Of a loss that is taken query by query the terms go to sums of rows,
    and the slopes are multiplied by factors of rows."""
    by_row, small = not choice.traits.at_once, choice.traits.small_first
    found = "Slopes and g" if by_row else "Terms, slopes and g"
    of_programs = (
        f"A program adds its sums to its own part of `sums`, ({2 + 2 * small}, parts): of terms, then of slopes."
    )
    of_programs += _ABOUT_SIZES.format(_ABOUT_MASKED_SIZES * (not small_beside_masks(choice))) * small
    of_rows = "The sums of rows go to memory tile by tile, (key blocks, rows)."
    return (
        {"kernel": "pairs", "positives": "pair_positives", "walked": "GRADIENT", "gradients": True, "weighed": by_row,
         "terms": not by_row, "of_programs": not by_row, "of_rows": False, "about_sums": of_programs,
         "tiny": tiny_first(choice),
         "summary": f"{found} of a panel's pairs" + ", whose z is computed once" * (not by_row) + ".",
         "of_positives": f"{found} of a panel's positives, after `pairs`."},
        {"kernel": "pair_terms", "positives": "pair_positive_terms", "walked": "FORWARD", "gradients": False,
         "weighed": False, "terms": True, "of_programs": not by_row, "of_rows": by_row, "tiny": False,
         "about_sums": of_rows if by_row else of_programs, "summary": "Terms of a panel's pairs.",
         "of_positives": "Terms of a panel's positives."},
    )  # fmt: skip


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    placed, told, by_row = places(choice), classes(choice), not choice.traits.at_once
    sizes, constants = "queries keys strip", "MASKED DESCRIPTORS WIDEN"
    turn = " turn" * choice.traits.small_first
    g = "factors " * by_row + "g" + " g_low" * choice.split
    of_tiles, of_rows = ("row_sum", "totals") if by_row else ("sums", "sums")
    pairs = arguments(Q, K, told, SCALARS, g, "sums", sizes, "g_stride parts" + turn, STRIDES, constants)
    positives = arguments("q k", placed, SCALARS, g, "sums queries keys g_stride parts", STRIDES)
    distance = "rows_stride" if by_row else ("parts" + turn) * choice.traits.small_first
    terms = arguments(FORWARD_Q, FORWARD_K, told, SCALARS, of_tiles, sizes, distance, STRIDES, constants)
    positive_terms = arguments("q k", placed, SCALARS, of_rows, "queries keys", STRIDES)
    summed = Argument("sums", "*fp32" if by_row else "*fp64")
    found = (
        Kernel("pairs", pairs, "gradient"),
        Kernel("pair_positives", positives),
        Kernel("pair_terms", terms, "forward"),
        Kernel("pair_positive_terms", positive_terms),
        Kernel("pair_loss", arguments(summed, "loss weight parts BLOCK")),
    )
    return tuple(each for each in found if choice.traits.placed or "positive" not in each.name)


FAMILY = Family("pairs", kernels, ("panel",), wanted=lambda choice: choice.traits.pairs, revision=5)
