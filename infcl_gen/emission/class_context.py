"""What templates of kernels read of the classes of pairs: where positives are, and which pairs a sum leaves out."""

from __future__ import annotations

from typing import Any

from infcl_gen.emission.render import ABSENT
from infcl_gen.losses import Sides, left_out, others_left_out
from infcl_gen.planning.planner import Plan
from infcl_gen.runtime.traits import Traits


def clamped(places: str) -> str:
    """Code of these places as int32: those far outside a tile stay outside."""
    return f"tl.minimum(tl.maximum({places}, -(2**30)), 2**30).to(tl.int32)"


_NOWHERE = "tl.full((ROWS,), -(2**30), tl.int32)"
# A row or column of which a tile leaves out all has a sum of 0, and a reference that is a number.
_MASK = {
    "id_mask": 'id_mask = tl.where(left_out, float("-inf"), 0.0)',
    "row_reference_as_number": "row_reference = tl.maximum(row_reference, LOWEST)",
    "top_as_number": "top = tl.maximum(top, LOWEST)",
}
IDS_OF_ROWS = "ids_of_queries = tl.load(query_ids + rows, mask=rows < queries, other=0)"
_BELOW = 'below = tl.where(DIAGONAL & (rows[:, None] >= columns[None, :]), float("-inf"), 0.0)'
_BELOW_OF_SIDES = f"""{_BELOW}
of_rows = tl.where(out_of_rows, float("-inf"), below)
of_columns = tl.where(out_of_columns, float("-inf"), below)"""
LABELLED = "tl.load(labels + rows, mask=rows < queries, other=-1) - first_key"
_TO_COLUMNS = "column_places = tl.load(key_labels + columns, mask=columns < keys, other=-1) - first_query"
_TO_ROWS = f"row_places = {LABELLED}"
# Of a pair's rows the first comes before its positive.
_FIRST_COLUMNS = "column_first = (column_places > columns + (first_key - first_query))[None, :]"
_FIRST_ROWS = "row_first = (row_places > rows + (first_query - first_key))[:, None]"
_PLACES_OF_COLUMNS = f"{_TO_COLUMNS}\ncolumn_places = {clamped('column_places')}"
_COLUMN_THRESHOLDS = "column_thresholds = tl.load(key_thresholds + columns, mask=columns < keys, other=0.0)"
_ROW_THRESHOLDS = "row_thresholds = tl.load(thresholds + rows, mask=rows < queries, other=0.0)"
_OF_ROWS = Sides("row_first", "(row_first == 0)", "column_first", "(column_first == 0)")
_OF_COLUMNS = Sides(*_OF_ROWS[2:], *_OF_ROWS[:2])
_ABOVE_OF_SIDES = "(z > row_thresholds[:, None])", "(z > column_thresholds[None, :])"
_LEGEND_OF_SIDES = """\
sides               a row is the first of its pair, or the second, as its positive comes after it, or before it.
                        Pairs of some sides are left out of r_i"""


def class_context(plan: Plan) -> dict[str, Any]:
    """What tells a tile the classes of its pairs."""
    ids, triangle = plan.traits.ids_in_tiles, plan.traits.triangle
    offset, placed = f"offset = {clamped('first_positive - first_key - key0')}", plan.traits.placed
    return {
        "placed": placed,
        "ids": ids,
        "ids_of_rows": IDS_OF_ROWS if ids else ABSENT,
        "masked": plan.traits.masked,
        "in_sums": placed and not plan.traits.without_positives,
        "which_are_left_out": left_out(
            plan.traits.classes, "same_id", "is_positive", "(is_positive == 0)", "above", " & ", " | "
        ),
        "thresholds": plan.traits.thresholds,
        "guide": plan.traits.guide,
        "compared": "guide" if plan.traits.guide else "z",
        **masks_of_sides(plan),
        **{name: text if plan.traits.masked or triangle else ABSENT for name, text in _MASK.items()},
        **({"id_mask": _BELOW_OF_SIDES if plan.traits.masked else _BELOW} if triangle else {}),
        # A tile's column of each row's positive, as an int32; any number that is no column where there is none.
        "offset_of_places": ABSENT if plan.labels or not placed else offset,
        "places_of_tile": clamped(f"{LABELLED} - key0") if plan.labels else "rows + offset" if placed else _NOWHERE,
    }


def masks_of_sides(plan: Plan) -> dict[str, Any]:
    """The terms of a tile that enter the sums of its rows, and of its columns: of a triangle each has its own mask."""
    apart = plan.traits.masked and plan.traits.triangle
    paired = apart and plan.traits.own_references
    both = " + id_mask" if plan.traits.masked else " + below" * plan.traits.triangle
    return {
        "left_out": "left_out_of_pairs" if paired else "left_out_of_sides" if apart else "left_out",
        "kept_terms": "kept_terms_of_sides" if apart else "kept_terms",
        "row_terms": "row_terms" if apart else "p",
        "column_terms": "column_terms" if apart else "p",
        "plus_row_mask": " + of_rows" if apart else both,
        "plus_column_mask": " + of_columns" if apart else both,
        "places_of_columns": _PLACES_OF_COLUMNS if apart and not paired else ABSENT,
        "places_of_rows": LABELLED,
        "places_as_int32": clamped("row_places"),
        **_sides_of_pairs(plan.traits, paired),
    }


def _sides_of_pairs(traits: Traits, paired: bool) -> dict[str, Any]:
    """What a triangle's tiles have of thresholds and sides, where rows are pairs: by rows and by columns."""
    by_side, above = paired and traits.by_side, paired and traits.thresholds
    others = [
        " | ".join(others_left_out(traits.classes, "same_id", text, " & ", sides))
        for text, sides in zip(_ABOVE_OF_SIDES, (_OF_ROWS, _OF_COLUMNS), strict=True)
    ]
    which = [
        left_out(traits.classes, "same_id", "is_positive", "(is_positive == 0)", text, " & ", " | ", sides)
        for text, sides in zip(_ABOVE_OF_SIDES, (_OF_ROWS, _OF_COLUMNS), strict=True)
    ]
    return {
        "apart_by_rows": paired,
        "above_rows": traits.thresholds and not paired,
        "key_softmax": "kept_of_columns" if paired else "key_softmax",
        "legend_of_sides": _LEGEND_OF_SIDES if by_side else ABSENT,
        "first_columns": f"{_TO_COLUMNS}\n{_FIRST_COLUMNS}" if by_side else ABSENT,
        "column_thresholds": _COLUMN_THRESHOLDS if above else ABSENT,
        "first_rows": _FIRST_ROWS if by_side else ABSENT,
        "row_thresholds": _ROW_THRESHOLDS if above else ABSENT,
        "rows_of_sides": _TO_ROWS if by_side else ABSENT,
        "left_out_of_rows": which[0], "left_out_of_columns": which[1],
        "others_of_rows": others[0], "others_of_columns": others[1],
    }  # fmt: skip
