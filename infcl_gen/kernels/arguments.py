"""Named and typed arguments of kernels: the source of signatures, launches and ahead-of-time compilation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from infcl_gen.kernels.choice import Choice, embedding_parts

# When an int32 is compiled as a multiple of 16: if the batch sizes are, if these or D are, always, or never. One that
# never is is not specialised on 1 either: a loop over one key would become straight-line code, which ptxas 12.8 may
# compile wrongly (verification/registers.py).
Multiple = Literal["sizes", "dim", "always", ""]


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel."""

    name: str
    type: str  # in Triton; "{operands}" is the dtype that kernels multiply, "{inputs}" the features' own
    multiple: Multiple = ""
    block: tuple[str, ...] = ()  # of its tensor descriptor: rows and columns, as constants of the file or numbers
    layout: str = ""  # of that descriptor, a constant of the file


# By type and `multiple`: the names that have them in every kernel.
_NAMES: dict[str | tuple[str, Multiple], str] = {
    "*{operands}": "q k x g g_low out guide_queries guide_keys",
    "*{inputs}": "q_out k_out",
    "*fp32": "vectors scale_ptr bias_ptr scale_out bias_out upstream dots dscale dbias loss total mean "
    "number_of_positives sum_of_positives exponent_of_positives key_sum_of_positives key_exponent_of_positives "
    "row_guided row_guide_sum row_guide_exponent part_guided part_guide_sum part_guide_exponent "
    "guided guide_sum guide_exponent key_guided key_guide_sum key_guide_exponent positive_guide "
    "row_exponent row_sum key_sum part_exponent part_sum key_totals_exponent key_totals_mantissa "
    "exponent mantissa ratio reference lowest query_exponent query_mantissa query_ratio query_reference query_lowest "
    "key_exponent key_mantissa key_ratio key_reference key_lowest "
    "positive_z positive_row_reference positive_key_reference key_positive_z key_positive_reference positive_g "
    "scale_parts bias_parts query_terms key_positive_g kept_z key_kept_z "
    "row_second_exponent row_second_sum key_second_exponent key_second_sum "
    "second_exponent second_mantissa key_second_mantissa partner_exponent partner_mantissa "
    "stash_reference own_reference share thresholds key_thresholds factors totals "
    "query_factors key_factors row_radial key_radial radial prefix_g",
    "*fp64": "part_sums sums pooled_ptr columns",
    "*bf16": "stash",
    "*i32": "flags",
    "*i64": "labels key_labels query_ids key_ids",
    "i64": "first_positive first_query first_key",
    ("i32", "sizes"): "inner rows_stride keys_stride reference_stride g_inner_stride part_stride vectors_stride "
    "query_stride key_stride positive_stride radial_stride",
    (
        "i32",
        "dim",
    ): "guide_q_row_stride guide_k_row_stride q_row_stride k_row_stride x_row_stride x_inner_stride out_stride",
    ("i32", "always"): "g_stride g_row_stride stash_stride slab_stride query_factors_stride key_factors_stride "
    "radial_rows radial_keys",
    "i32": "queries keys rows count queries_written keys_written strip parts row_parts key_parts ranks "
    "all_queries all_keys written width turn",
    "fp32": "weight query_weight key_weight",
    "constexpr": "q_depth_stride k_depth_stride x_depth_stride "  # compiled as 1, for contiguous rows
    "guide_q_depth_stride guide_k_depth_stride "
    "BLOCK DESCRIPTORS DIAGONAL DOTS FRESH KEYS MASKED ROWS SHARE SHARED STASH WIDEN",
}
_ARGUMENTS = {
    name: Argument(name, kind) if isinstance(kind, str) else Argument(name, *kind)
    for kind, names in _NAMES.items()
    for name in names.split()
}

SCALARS = "scale_ptr bias_ptr"
IDS = "query_ids key_ids"
GUIDES = "guide_queries guide_keys"
GUIDE_STRIDES = "guide_q_row_stride guide_q_depth_stride guide_k_row_stride guide_k_depth_stride"
FACTORS = "query_factors key_factors query_factors_stride key_factors_stride"
RADIAL = "prefix_g row_radial key_radial positive_stride radial_rows radial_keys"
STRIDES = "q_row_stride q_depth_stride k_row_stride k_depth_stride"


@dataclass(frozen=True)
class Kernel:
    """One kernel. The block of the tile that `block` names says how it is launched, else `warps` and `stages`."""

    name: str
    arguments: tuple[Argument, ...]
    block: str = ""
    warps: int = 4
    stages: int = 1
    wide: bool = False  # holds more registers, and is launched with more warps
    template: str = ""  # triton/`template`.py.jinja, if it is not the family's
    registers: str = ""  # of a thread, a constant of the file
    replaces: str = ""  # of a variant: the kernel of kernels.py
    row_blocks: int = 1  # of that kernel, which a program of a variant takes at once


def arguments(*given: str | Argument) -> tuple[Argument, ...]:
    """The arguments in this order, constants behind all others, as `launch` gives them; a string holds names of
    `_NAMES`, separated by blanks.

    Raises ValueError for a name that is not in `_NAMES`.
    """
    found: list[Argument] = []
    for each in given:
        if isinstance(each, Argument):
            found.append(each)
        elif untyped := [name for name in each.split() if name not in _ARGUMENTS]:
            raise ValueError(f"{untyped[0]}: no type; add it to _NAMES in kernels/arguments.py, or pass an Argument")
        else:
            found += [_ARGUMENTS[name] for name in each.split()]
    return tuple(sorted(found, key=lambda each: each.name.isupper()))


def statistics(choice: Choice) -> str:
    """The sums of queries, and of keys where the loss has them, as wide floats; then the second ones."""
    found = "query_exponent query_mantissa" + " key_exponent key_mantissa" * choice.both_axes
    if choice.traits.second:
        found += " second_exponent second_mantissa" + " key_second_exponent key_second_mantissa" * choice.both_axes
    return found


def of_positives(choice: Choice, numbers: str, sums: str, exponents: str) -> str:
    """What there is of any number of positives: their number, their sum, and of a log-sum-exp the exponents."""
    traits = choice.traits
    return f"{numbers} {sums}" * traits.sorted_ids + f" {exponents}" * traits.softmax_of_positives


def positive(choice: Choice) -> str:
    """What the forward notes of each query's positive: z, and the references of its row and its key."""
    return "positive_z positive_row_reference" + " positive_key_reference" * choice.traits.has_keys


def gradient_of_positive(choice: Choice) -> str:
    """What the gradient of a positive's logit follows from, or that gradient."""
    noted = f"{positive(choice)} positive_guide" if choice.traits.guided_sides else positive(choice)
    return "positive_g" if choice.traits.combined else f"{noted} {SCALARS} {statistics(choice)} {softmaxes(choice)}"


def softmaxes(choice: Choice) -> str:
    """The sums by which a guide's exponentials become shares: of queries, and of keys where these have them."""
    found = "guide_sum guide_exponent" + " key_guide_sum key_guide_exponent" * choice.traits.guided_sides
    return found * choice.traits.by_guide


def places(choice: Choice) -> str:
    """Where positives are: the labels, or the global index of the first query's positive; and that of the first key."""
    return "labels first_key" if choice.labels else "first_positive first_key"


def both_labels(choice: Choice) -> str:
    """Of a triangle: the labels of a panel's rows and of the rows in its columns, and their global places."""
    return "labels key_labels first_query first_key" * choice.traits.triangle


def classes(choice: Choice) -> str:
    """What a tile is told of the classes of its pairs: the places of positives, and ids. Of a triangle it is those of
    its columns, too."""
    if choice.traits.by_guide:
        return GUIDES
    if choice.traits.triangle:
        return " ".join([both_labels(choice), *compared(choice)])
    return " ".join([places(choice)] * choice.traits.placed + [IDS] * choice.traits.ids + compared(choice))


def compared(choice: Choice) -> list[str]:
    """What a tile compares its similarities, or a guide's, with, where pairs above a threshold are left out."""
    of_columns = ["key_thresholds"] * choice.traits.triangle
    return ["thresholds", *of_columns, *[GUIDES] * choice.traits.guide] if choice.traits.thresholds else []


class Part(NamedTuple):
    """Columns of an embedding that kernels multiply at once. `name` ends the names of the part's tensors."""

    name: str
    start: int
    width: int
    columns: str  # as an expression


def parts_of(widths: Sequence[int]) -> list[Part]:
    """The parts of an embedding by their widths; a single one has no name."""
    starts = [sum(widths[:index]) for index in range(len(widths))]
    return [
        Part(f"_{start}" * (len(widths) > 1), start, width, f"{start} + " * (start > 0) + f"tl.arange(0, {width})")
        for start, width in zip(starts, widths, strict=True)
    ]


def features(side: str, rows: str, dim: int) -> tuple[Argument, ...]:
    """A feature matrix once for each part of the embedding, whose descriptors differ in width."""
    return tuple(
        Argument(side + part.name, "*{operands}", block=(rows, str(part.width)))
        for part in parts_of(embedding_parts(dim))
    )
