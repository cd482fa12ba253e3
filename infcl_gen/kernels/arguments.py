"""What a kernel takes: named and typed arguments, from which its signature, its launches and its ahead-of-time
compilation come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infcl_gen.kernels.choice import Choice, embedding_parts

KINDS = {  # of an argument, and its type in Triton; the operands' dtype is the features', or bf16 of split ones
    "*features": "*{operands}",
    "*inputs": "*{inputs}",
    "*fp32": "*fp32",
    "*fp64": "*fp64",
    "*bf16": "*bf16",
    "*int32": "*i32",
    "*int64": "*i64",
    "int64": "i64",
    "int32": "i32",
    "fp32": "fp32",
    "depth stride": "constexpr",  # of contiguous rows, which are compiled for: 1
    "constexpr": "constexpr",
}


@dataclass(frozen=True)
class Argument:
    """`kind`: one of KINDS.

    multiple  of an int32, when Triton may take it for a multiple of 16: "sizes" (rows and keys that are), "dim" (or
              if the embedding is), "always", "never".
    block     rows and columns, as constants or numbers, of the tensor descriptor through which it may go, else ().
    """

    name: str
    kind: str
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
    registers: str = ""  # of a thread, a constant of the file
    replaces: str = ""  # of a variant: the kernel of kernels.py

    def argument(self, name: str) -> Argument:
        return next(each for each in self.arguments if each.name == name)


def pointers(kind: str, *names: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, kind) for name in names)


def counts(*names: str, multiple: str = "sizes") -> tuple[Argument, ...]:
    return tuple(Argument(name, "int32", multiple) for name in names)


def constants(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, "constexpr") for name in names)


def strides(*names: str) -> tuple[Argument, ...]:
    """Of feature matrices: `name`_row_stride, `name`_depth_stride."""
    return tuple(
        each
        for name in names
        for each in (Argument(f"{name}_row_stride", "int32", "dim"), Argument(f"{name}_depth_stride", "depth stride"))
    )


def statistics(choice: Choice) -> tuple[Argument, ...]:
    """The sums of queries, and of keys where the loss has them, as wide floats."""
    sides = ("query", "key") if choice.has_keys else ("query",)
    return pointers("*fp32", *(f"{side}_{part}" for side in sides for part in ("exponent", "mantissa")))


def positive(choice: Choice) -> tuple[Argument, ...]:
    """What the forward notes of each query's positive."""
    references = ("positive_row_reference", "positive_key_reference")[: 1 + choice.has_keys]
    return pointers("*fp32", "positive_z", *references)


def places(choice: Choice) -> tuple[Argument, ...]:
    """Where positives are: labels of the queries, or the global index of the first one's; and that of the first key."""
    own = Argument("labels", "*int64") if choice.labels else Argument("first_positive", "int64")
    return own, Argument("first_key", "int64")


SCALARS = pointers("*fp32", "scale_ptr", "bias_ptr")
WIDEN = constants("WIDEN")


def named_parts(dim: int) -> tuple[tuple[str, int], ...]:
    """What the names of each part of an embedding end with, where it begins if there are several; and its width."""
    widths = embedding_parts(dim)
    several = len(widths) > 1
    return tuple((f"_{sum(widths[:index])}" if several else "", width) for index, width in enumerate(widths))


def features(side: str, rows: str, dim: int) -> tuple[Argument, ...]:
    """A feature matrix once for each part of the embedding, whose descriptors differ in width."""
    return tuple(Argument(side + name, "*features", block=(rows, str(width))) for name, width in named_parts(dim))


def when(condition: bool, *arguments: Argument | Iterable[Argument]) -> tuple[Argument, ...]:
    """The arguments, or none."""
    found: list[Argument] = []
    for each in arguments if condition else ():
        found += [each] if isinstance(each, Argument) else each
    return tuple(found)
