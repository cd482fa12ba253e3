"""What a kernel takes: named and typed arguments, from which its signature, its launches and its ahead-of-time
compilation come."""

from __future__ import annotations

from dataclasses import dataclass

from infcl_gen.kernels.choice import Choice, embedding_parts

# By type in Triton, and of an int32 by when it is a multiple of 16: the names that have it in every kernel.
_NAMES = {
    "*{operands}": "q k x g g_low out",
    "*{inputs}": "q_out k_out",
    "*fp32": "scale_ptr bias_ptr scale_out bias_out upstream dots dscale dbias loss total "
    "row_exponent row_sum key_sum part_exponent part_sum key_totals_exponent key_totals_mantissa "
    "exponent mantissa ratio reference lowest query_exponent query_mantissa query_ratio query_reference query_lowest "
    "key_exponent key_mantissa key_ratio key_reference key_lowest "
    "positive_z positive_row_reference positive_key_reference positive_g stash_reference",
    "*fp64": "part_sums",
    "*bf16": "stash",
    "*i32": "flags",
    "*i64": "labels",
    "i64": "first_positive first_key",
    "i32 sizes": "queries keys rows count inner queries_written keys_written rows_stride keys_stride "
    "reference_stride g_inner_stride part_stride",
    "i32 dim": "q_row_stride k_row_stride x_row_stride x_inner_stride out_stride",
    "i32 always": "g_stride g_row_stride stash_stride",
    "i32": "strip parts row_parts key_parts ranks",
    "fp32": "weight query_weight key_weight",
    "constexpr": "q_depth_stride k_depth_stride x_depth_stride "  # of contiguous rows, which are compiled for: 1
    "BLOCK DESCRIPTORS DOTS FRESH KEYS MASKED ROWS SHARE STASH WIDEN",
}
_TYPES = {name: words.partition(" ") for words, names in _NAMES.items() for name in names.split()}

SCALARS = "scale_ptr bias_ptr"
STRIDES = "q_row_stride q_depth_stride k_row_stride k_depth_stride"


@dataclass(frozen=True)
class Argument:
    """`type`: in Triton; "{operands}" stands for the features' dtype, or bf16 of split ones, "{inputs}" for the first.

    multiple  of an int32, when Triton may take it for a multiple of 16: "sizes" (rows and keys that are), "dim" (or
              if the embedding is), "always", "never".
    block     rows and columns, as constants or numbers, of the tensor descriptor through which it may go, else ().
    """

    name: str
    type: str
    multiple: str = "never"
    block: tuple[str, ...] = ()
    layout: str = ""  # of that descriptor, a constant


@dataclass(frozen=True)
class Kernel:
    """One kernel. `block`: the family of blocks that says how it is launched, or "" where `warps` and `stages` do.

    A `wide` one holds more registers, and is launched with more warps.
    """

    name: str
    arguments: tuple[Argument, ...]
    block: str = ""
    warps: int = 4
    stages: int = 1
    wide: bool = False
    template: str = ""  # triton/`template`.py.jinja, if it is not the family's
    registers: str = ""  # of a thread, a constant of the file
    replaces: str = ""  # of a variant: the kernel of kernels.py


def arguments(*given: str | Argument, inputs: str = "") -> tuple[Argument, ...]:
    """The arguments in this order: names with blanks between them, whose types are the same in every kernel, or as they
    are. Those named in `inputs` are in the features' own dtype, which may be split before it is multiplied.

    Raises KeyError for a name without a type: it needs one in `_NAMES`, or an Argument of its own.
    """
    own, found = inputs.split(), list[Argument]()
    for each in given:
        if isinstance(each, Argument):
            found.append(each)
            continue
        for name in each.split():
            type_, _, multiple = _TYPES[name]
            found.append(Argument(name, "*{inputs}" if name in own else type_, multiple or "never"))
    return tuple(found)


def statistics(choice: Choice) -> str:
    """The sums of queries, and of keys where the loss has them, as wide floats."""
    return "query_exponent query_mantissa" + " key_exponent key_mantissa" * choice.has_keys


def positive(choice: Choice) -> str:
    """What the forward notes of each query's positive."""
    return "positive_z positive_row_reference" + " positive_key_reference" * choice.has_keys


def places(choice: Choice) -> str:
    """Where positives are: labels of the queries, or the global index of the first one's; and that of the first key."""
    return "labels first_key" if choice.labels else "first_positive first_key"


def named_parts(dim: int) -> list[tuple[str, int, int]]:
    """Of each part of an embedding: what the names of its tensors end with, its first column, and its width."""
    widths = embedding_parts(dim)
    starts = (sum(widths[:index]) for index in range(len(widths)))
    return [(f"_{start}" * (len(widths) > 1), start, width) for start, width in zip(starts, widths, strict=True)]


def features(side: str, rows: str, dim: int) -> tuple[Argument, ...]:
    """A feature matrix once for each part of the embedding, whose descriptors differ in width."""
    return tuple(Argument(side + name, "*{operands}", block=(rows, str(width))) for name, _, width in named_parts(dim))
