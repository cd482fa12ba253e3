"""merge, positives, and loss_terms and total_loss or partners, combine and row_loss: from partial sums to the loss."""

from infcl_gen.kernels.arguments import (
    GUIDE_STRIDES,
    GUIDES,
    IDS,
    SCALARS,
    STRIDES,
    Kernel,
    arguments,
    both_labels,
    of_positives,
    places,
    positive,
)
from infcl_gen.kernels.choice import Block, Choice
from infcl_gen.kernels.family import Family, Tile

_MERGED = "part_guided part_guide_sum part_guide_exponent guided guide_sum guide_exponent"
MERGE_GUIDED = Kernel("merge_guided", arguments(_MERGED, "rows parts part_stride written"))
LOSS_ROWS = 1024  # of one program: the fp64 logarithms of 32 768 rows take one program 0.12 ms, 1 % of a step


class PositiveTile(Tile):
    """The diagonal of a square tile; of positives by their ids, such a tile."""

    name = "positive"
    square = True
    for_positives = True

    def tabulated(self, architecture: str, choice: Choice) -> Block:
        if choice.operand_bytes != 2:
            return Block(32, 32, 32, 4, 2)
        hopper = architecture == "hopper"
        if choice.traits.guided_sides:  # whose pointers of two products spill 272 bytes of sm_90 with tiles of 64 x 64
            return Block(32, 32, 64, 4, 2)
        if choice.traits.sorted_ids:  # 4 warps spill 56 to 80 bytes a thread on sm_90, such depth 8 to 16 on sm_80
            return Block(64, 64, 64 if hopper else 32, 8, 4 if hopper else 2)
        return Block(64, 64, 64, 4, 4 if hopper else 2)


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    keys = choice.traits.has_keys
    merge = arguments(
        "row_exponent row_sum query_exponent query_mantissa queries row_parts rows_stride queries_written",
        "key_exponent key_sum key_totals_exponent key_totals_mantissa keys key_parts keys_stride keys_written" * keys,
    )
    guides, strides, noted = (each * choice.traits.guided_sides for each in (GUIDES, GUIDE_STRIDES, "positive_guide"))
    positives = arguments(
        "q k", guides, places(choice), "row_exponent", "key_exponent" * keys, positive(choice), noted, "queries keys",
        "strip" * (keys or choice.rows), "rows_stride", "keys_stride" * keys, strides,
        "query_factors key_factors" * choice.traits.renormalised, STRIDES, "width" * bool(choice.slabs), "WIDEN",
    )  # fmt: skip
    if choice.traits.triangle:
        noted = f"{positive(choice)} key_positive_z key_positive_reference"
        sizes = "queries keys strip rows_stride keys_stride"
        positives = arguments("q k", both_labels(choice), "row_exponent key_exponent", noted, sizes, STRIDES,
                              "DIAGONAL WIDEN")  # fmt: skip
    if choice.traits.several:
        return (Kernel("merge", merge), *_of_several(choice))
    return (
        Kernel("merge", merge),
        Kernel("positives", positives, "positive", template="triangle" if choice.traits.triangle else ""),
        *[MERGE_GUIDED] * choice.traits.guided_sides,
        *(_combining(choice) if choice.traits.combined else _adding(choice)),
    )


def _adding(choice: Choice) -> tuple[Kernel, ...]:
    keys, by_guide = choice.traits.has_keys, "guided guide_sum key_guided key_guide_sum" * choice.traits.guided_sides
    terms = arguments(
        "query_exponent query_mantissa", "key_exponent key_mantissa" * keys, positive(choice), by_guide, SCALARS,
        "part_sums queries", "keys" * keys, "query_weight", "key_weight" * keys, "BLOCK",
    )  # fmt: skip
    return Kernel("loss_terms", terms, warps=16), Kernel("total_loss", arguments("part_sums loss parts BLOCK"))


def _of_several(choice: Choice) -> tuple[Kernel, ...]:
    """Of any number of positives, or by a guide."""
    total = of_positives(choice, "number_of_positives", "sum_of_positives", "exponent_of_positives")
    total += "guided guide_sum" * choice.traits.by_guide
    vectors = "vectors vectors_stride" * bool(choice.traits.vectors)
    columns = "columns" * choice.traits.columns_of_ids
    taken = f"query_exponent query_mantissa {total} {columns} {SCALARS} {vectors} scale_parts bias_parts query_terms"
    diagonal, scalars = "DIAGONAL" * choice.traits.triangle, SCALARS * choice.traits.softmax_of_positives
    positives = arguments("q k", IDS, scalars, total, "queries keys", STRIDES, diagonal, "WIDEN")
    return (
        MERGE_GUIDED
        if choice.traits.by_guide
        else Kernel("positives", positives, "positive", template="positives_of_ids"),
        Kernel("combine", arguments(taken, "queries all_queries all_keys")),
        Kernel("row_loss", arguments("query_terms loss queries weight BLOCK")),
    )


def _combining(choice: Choice) -> tuple[Kernel, ...]:
    vectors = "vectors vectors_stride" * bool(choice.traits.vectors)
    second = "second_exponent second_mantissa" * choice.traits.second
    partner = "partner_exponent partner_mantissa" * choice.traits.partnered
    columns = "key_exponent key_mantissa" * choice.traits.crossed
    references = "positive_row_reference" + " positive_key_reference" * choice.traits.in_columns
    of_positive = f"positive_z {references} {SCALARS} {vectors}"
    taken = f"query_exponent query_mantissa {second} {partner} {columns} {of_positive}"
    left = "positive_g scale_parts bias_parts query_terms" + " kept_z" * choice.traits.triangle
    combine = arguments(taken, "pooled_ptr" * bool(choice.traits.pooled), left, "queries all_queries all_keys")
    noted = arguments(f"query_exponent query_mantissa labels first_query {partner} queries")
    return (
        *[Kernel("partners", noted)] * choice.traits.partnered,
        Kernel("combine", combine),
        Kernel("row_loss", arguments("query_terms loss queries weight BLOCK")),
    )


FAMILY = Family("statistics", kernels, wanted=lambda choice: not choice.traits.pairs, tile=PositiveTile())
