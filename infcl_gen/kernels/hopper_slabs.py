"""forward_hopper, gradient_hopper of losses over prefixes: what `forward` and `gradient` compute, for Hopper GPUs."""

import itertools
from typing import Any, NamedTuple

from infcl_gen.kernels import hopper
from infcl_gen.kernels.arguments import Argument, Kernel
from infcl_gen.kernels.choice import Block, Choice
from infcl_gen.kernels.family import Family

BLOCK = Block(*hopper.TILE, 32, 8, 3)  # of the ordinary kernels, whose tiles a variant has
DEPTH = 64  # columns of a stage, 128 bytes of a row: copies of 64 bytes take 1.5 times as long
UNIT = 32  # columns by which prefixes grow
STAGES = 6  # of 32 KiB each; beside them 35 KiB are left, for tiles of g and what groups tell each other
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
    ending: int | None = None  # the slab that ends behind them


def here(choice: Choice) -> bool:
    """Whether these kernels have tiles for the loss: 2 to 4 prefixes, each but the last a multiple of UNIT columns, of
    products as they are."""
    of_slabs = 2 <= len(choice.slabs) <= MOST_PREFIXES and choice.one_exponential and not choice.traits.renormalised
    return hopper.runs(choice) and of_slabs and not any(prefix % UNIT for prefix in choice.traits.prefixes[:-1])


def stages(choice: Choice) -> int:
    """Pipeline stages of tiles of queries and keys; 0 where the ordinary kernels stay."""
    return STAGES if here(choice) and hopper.has_tiles(choice) else 0


def walks_of(choice: Choice) -> list[list[Walk]]:
    """How the columns of each slab lie in stages: half of one, whole ones, half of another. The last slab fills its."""
    found = []
    for slab in choice.slabs:
        stop = slab.stop if slab.stop < choice.dim else -(-slab.stop // DEPTH) * DEPTH
        first, end = -(-slab.start // DEPTH), stop // DEPTH  # whole stages
        walks = [Walk(first - 1, first, UNIT, DEPTH)] * (slab.start % DEPTH > 0)
        walks += [Walk(first, end, 0, DEPTH)] * (first < end)
        walks += [Walk(end, end + 1, 0, UNIT)] * (stop % DEPTH > 0)
        found.append([*walks[:-1], walks[-1]._replace(ending=slab.number)])
    return found


def values(choice: Choice) -> dict[str, Any]:
    """Names of the template: constants; how slabs lie in stages; and the parts of stages in which slabs end."""
    walks = walks_of(choice)
    last = [of_slab[-1].end - 1 for of_slab in walks]
    ends = [
        {
            "condition": f"{'elif' if number else 'if'} step == {stage}",
            "walks": [
                walk if walk.end == stage + 1 else walk._replace(ending=None)
                for walk in itertools.chain.from_iterable(walks)
                if walk.first <= stage < walk.end
            ],
        }
        for number, stage in enumerate(dict.fromkeys(last))
    ]
    steps = -(-choice.dim // DEPTH)
    return {"stage_depth": DEPTH, "stages": choice.hopper_stages, "steps": steps, "walks": walks, "ends": ends}


def kernels(choice: Choice) -> tuple[Kernel, ...]:
    return hopper.variants(choice, (Q, K, G), "g_stride slab_stride query_stride")


FAMILY = Family(
    "hopper_slabs",
    kernels,
    ("panel",),
    wanted=lambda choice: choice.hopper_stages > 0 and bool(choice.slabs),
    revision=1,
    file="hopper_slabs.py",
    arch=hopper.ARCH,
    gluon=hopper.GLUON,
    values=values,
    block=lambda choice: Block(*hopper.TILE, DEPTH, hopper.ALL_WARPS, choice.hopper_stages),
)
