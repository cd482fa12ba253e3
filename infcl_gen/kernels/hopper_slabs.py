"""forward_hopper, gradient_hopper of losses over prefixes: what `forward` and `gradient` compute, for Hopper GPUs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from infcl_gen.kernels import hopper
from infcl_gen.kernels.arguments import FACTORS, RADIAL, Argument, Kernel, places
from infcl_gen.kernels.choice import Block, Choice
from infcl_gen.kernels.family import REGISTERS, Family

BLOCK = Block(*hopper.TILE, 32, 8, 3)  # of the ordinary kernels, whose tiles a variant has
DEPTH = 64  # columns of a stage, 128 bytes of a row: copies of 64 bytes take 1.5 times as long
# Of cosines: 128 x 128 spills 184 to 1 192 bytes a thread of sm_90. A program of the variant takes two, one a group.
COSINE_BLOCK = Block(hopper.TILE[0] // 2, hopper.TILE[1], 32, 8, 3)
UNIT = 32  # columns by which prefixes grow
FORWARDS = 2  # programs of the forward on a multiprocessor, whose groups do not wait for each other's stages
FORWARD_STAGES = 3  # of 32 KiB each, beside 7 KiB: two programs share 228 KiB
FORWARD_WARPS = hopper.WARPS + 1  # one group multiplies, and one warp copies tiles
STAGES = 6  # of the gradient; beside them 35 KiB are left, for tiles of g and what groups tell each other
COSINE_STAGES = 3  # beside tiles of g of four prefixes, and a stage more for each prefix less
MOST_PREFIXES = 4  # beside whose sums, or g, a thread has registers for a tile of z
Q, K, G = (
    Argument(name, "*{operands}", block=(f"{side}_BLOCK[0]", f"{side}_BLOCK[1]"), layout="LAYOUT")
    for name, side in (("q", "Q"), ("k", "K"), ("g_of_slabs", "G"))
)


class Walk(NamedTuple):
    """Stages of a tile, from `first` on and before `end`, of each of which some columns are multiplied."""

    first: int
    end: int
    start: int
    stop: int


def here(choice: Choice) -> bool:
    """Whether these kernels have tiles for the loss: 2 to 4 prefixes, each but the last a multiple of UNIT columns."""
    of_slabs = 2 <= len(choice.slabs) <= MOST_PREFIXES and (choice.one_exponential or not choice.both_axes)
    return hopper.runs(choice) and of_slabs and not any(prefix % UNIT for prefix in choice.traits.prefixes[:-1])


def ordinary_block(choice: Choice) -> Block:
    """That of the ordinary kernels."""
    return COSINE_BLOCK if choice.traits.renormalised else BLOCK


def stages(choice: Choice) -> int:
    """Pipeline stages of the gradient's tiles of queries and keys; 0 where the ordinary kernels stay.

    Of cosines the tiles of g of each prefix but two take the 32 KiB of one.
    """
    own = ordinary_block(choice)
    if not (here(choice) and hopper.has_tiles(choice, (own.rows, own.keys))):
        return 0
    return COSINE_STAGES + MOST_PREFIXES - len(choice.slabs) if choice.traits.renormalised else STAGES


def g_tiles(choice: Choice) -> int:
    """Tiles of g in shared memory, halves of each group; of cosines one of each group, and all of shorter prefixes."""
    return 4 * len(choice.slabs) - 2 if choice.traits.renormalised else 4


def walks_of(choice: Choice) -> list[list[Walk]]:
    """How the columns of each slab lie in stages: half of one, whole ones, half of another. The last slab fills its."""
    found = []
    for slab in choice.slabs:
        stop = slab.stop if slab.stop < choice.dim else -(-slab.stop // DEPTH) * DEPTH
        first, end = -(-slab.start // DEPTH), stop // DEPTH  # whole stages
        walks = [Walk(first - 1, first, UNIT, DEPTH)] * (slab.start % DEPTH > 0)
        walks += [Walk(first, end, 0, DEPTH)] * (first < end)
        walks += [Walk(end, end + 1, 0, UNIT)] * (stop % DEPTH > 0)
        found.append(walks)
    return found


def code_by_prefix(numbers: list[Any], in_a_term: bool = False) -> str:
    """A Python expression for the number of the kernel's `prefix`. in_a_term: in parentheses, where it needs them."""
    text = f"{numbers[-1]}"
    for prefix in range(len(numbers) - 2, -1, -1):
        if numbers[prefix:] != [numbers[-1]] * (len(numbers) - prefix):
            text = f"{numbers[prefix]} if prefix == {prefix} else {text}"
    return f"({text})" if in_a_term and " " in text else text


def values(choice: Choice) -> dict[str, Any]:
    """Names of the template: constants; how slabs lie in stages; and what becomes of g of each half of a tile."""
    walks = walks_of(choice)
    return {
        "stage_depth": DEPTH, "stages": FORWARD_STAGES, "gradient_stages": choice.hopper_stages,
        "forward_registers": REGISTERS // (FORWARDS * 32 * 2 * hopper.WARPS),
        "g_tiles": g_tiles(choice), "steps": -(-choice.dim // DEPTH), "walks": walks,
        "halves": [_half(choice, number) for number in range(2)],
        "key_out": "key_out, " * choice.both_axes,
        "of_keys": "of keys, and " * choice.both_axes,
        "key_sums": "key_sums, " * choice.both_axes,
        "about_key_sums": ", those of a column to key_sums" * choice.both_axes,
        "more_sums": "sums, " * choice.both_axes,
        **_of_prefixes(walks),
        **_of_axes(choice.one_exponential),
        **_of_cosines(choice),
        **_of_positives(choice.labels),
    }  # fmt: skip


def _half(choice: Choice, number: int) -> dict[str, Any]:
    """The first or the last half of a tile: g of shorter prefixes, kept as pairs; and how sums leave, longest first.

    They leave from two places of each group in turn, so that one is written while the other is read.
    """
    name, plus = ("first", "last")[number], ("", " + 1")
    slabs = [
        {
            "number": slab.number,
            "pairs": f"{name}_{slab.stop}",
            "condition": f"{'elif' if slab.number else 'if'} prefix == {slab.number}",
            "place": f"2 * group{plus[sent % 2]}",
        }
        for sent, slab in enumerate(choice.slabs[::-1], number * len(choice.slabs))
    ]
    ratios = f", ratios.index(2 * prefix{plus[number]})" * choice.one_exponential
    own = {"name": name, "and_its_ratios": ratios, "first_key": ("key0", "key0 + 64")[number]}
    return own | {"longest_first": slabs, "shorter": slabs[:0:-1]}


def _of_prefixes(walks: list[list[Walk]]) -> dict[str, str]:
    """How loops over prefixes find their stages: whole ones, and slabs that begin or end within one."""
    before = [of_slab[0].start == UNIT for of_slab in walks]
    behind = [of_slab[-1].stop == UNIT for of_slab in walks]
    first = [of_slab[0].first + begins for of_slab, begins in zip(walks, before, strict=True)]
    stop = [of_slab[-1].end - ends for of_slab, ends in zip(walks, behind, strict=True)]
    return {
        "first_stages": code_by_prefix(first),
        "stop_stages": code_by_prefix(stop),
        "half_before": _any_of(before),
        "half_behind": _any_of(behind),
    }


def _any_of(prefixes: list[bool]) -> str:
    return " or ".join(f"prefix == {number}" for number, has_it in enumerate(prefixes) if has_it)


def _of_axes(both: bool) -> dict[str, str]:
    """How gradients of both axes differ from those of queries, whose rows have a reference each."""
    names = {
        "about_gradient": (
            "Of each prefix g = a_i 2^(y - reference_i).",
            "Of each prefix g = 2^(y - reference) * (a_i + b_j): both softmaxes share one exponential.",
        ),
        "g_of_prefix": ("hopper_g_of_queries", "hopper_g_of_both"),
        "next_shares": ("hopper_next_shares_by_row", "hopper_next_shares"),
        "cosines_of_tile": ("hopper_cosines_of_queries", "hopper_cosines_of_both"),
        "about_shares": ("a: times the factor of its row", "a, ratios: times the factors of their side"),
        "and_ratios": ("", ", ratios"),
        "and_ratios_of_half": ("", ", ratios.index(2 * prefix + half)"),
    }
    return _chosen(names, both)


def _of_positives(labels: bool) -> dict[str, str]:
    """How tiles of cosines find positives: on the diagonal, which few of them meet, or by the labels of their rows."""
    names = {
        "of_cosines": ("hopper_of_cosines", "hopper_of_labelled_cosines"),
        "place_of_positives": ("first_column", "places"),
        "place_in_tile": ("first_column", "own_places"),
        "columns_of_positives": ("rows + first_column", "places"),
        "or_where_positives": (" or positives", ""),
        "and_labels": ("", ", labels behind the tile before"),
    }
    return _chosen(names, labels)


def _of_cosines(choice: Choice) -> dict[str, str]:
    """How kernels of cosines differ. Strips are of smaller blocks."""
    names = {
        "strip": ("strip", "strip // 2"),
        "z_of_part": ("parts[part]", "cosines"),
        "factors_of_pairs": ("", "row_factors, column_factors, PREFIX: gl.constexpr, "),
        "and_masked": ("", ", MASKED"),
        "times_factors": ("", " * column_factors.index(row).load(LINE)"),
        "and_factors": ("", " and factors"),
        "with_factors": ("", ", factors"),
        "gradient_of_group": ("hopper_gradient_of_products", "hopper_gradient_of_cosines"),
    }
    return _chosen(names, choice.traits.renormalised)


def _chosen(names: Mapping[str, tuple[str, ...]], second: bool) -> dict[str, str]:
    return {name: texts[second] for name, texts in names.items()}


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    strides, factors = "g_stride slab_stride query_stride", ""
    if choice.traits.renormalised:
        factors, strides = FACTORS, f"{strides} {places(choice)} {RADIAL} MASKED"
    row_blocks = hopper.TILE[0] // ordinary_block(choice).rows
    forward, gradient = hopper.variants(choice, (Q, K, G), strides, factors, row_blocks)
    return dataclasses.replace(forward, registers="FORWARD_REGISTERS", stages=FORWARD_STAGES), gradient


def block(choice: Choice, kernel: Kernel) -> Block:
    """The forward of a program has one group of warps."""
    warps = FORWARD_WARPS if kernel.replaces == "forward" else hopper.ALL_WARPS
    return Block(*hopper.TILE, DEPTH, warps, kernel.stages)


def programs(choice: Choice, kernel: str) -> int:
    """Programs of "forward" or "gradient" that a multiprocessor runs at once, of any kernels for Hopper."""
    return FORWARDS if choice.slabs and kernel == "forward" else 1


FAMILY = Family(
    "hopper_slabs",
    kernels,
    ("panel",),
    wanted=lambda choice: choice.hopper_stages > 0 and bool(choice.slabs),
    revision=2,
    file="hopper_slabs.py",
    arch=hopper.ARCH,
    gluon=hopper.GLUON,
    values=values,
    block=block,
)
