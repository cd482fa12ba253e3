"""The kernels: one module for each family names its kernels, their arguments, template, tiles and hardware.

To change a kernel by hand and time it:

    infcl-gen generate --batch-size 32k --dim 768 -o mine    then edit mine/kernels.py
    python -c "import mine; print(mine.selftest())"          its numbers; with TRITON_INTERPRET=1 no GPU is needed
    infcl-gen verify mine --edited --aot sm_90               its shared memory and spills, and the numerics gate
    infcl-gen bench --package mine                           its times, marked as edited

To keep the change, edit the template in templates/triton and raise the family's `revision`. A new argument needs a type
in `_NAMES` (arguments.py). It needs a value in emission/launches.py where the schedule has no variable of its name.

To add a variant for other GPUs:

1. Write a module here with a FAMILY, as hopper.py. `arch` and `wanted` say where it runs, `replaces` whose work it
   does. The schedule launches it there, and nothing else names it.
2. Write its template, triton/NAME.py.jinja. It makes a file of its own, so it opens with a docstring, imports and the
   `constants` of its blocks; the helpers of header.py.jinja are in kernels.py only. tests/kernels/variant.py is an
   example, which the interpreter runs; Gluon's kernels run on their GPU alone.
3. `infcl-gen generate ... --device-profile NAME` with a profile of that architecture makes a package with it on any
   machine; `infcl-gen verify DIR --aot ARCH` compiles it.
4. `python -m tests.emission.revisions` notes what it computes; `make golden` where a golden package has it.
   tests/emission/revisions.py and tests/emission/test_templates.py list problems: add one that wants the variant.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Collection

from infcl_gen.hardware import DeviceProfile
from infcl_gen.inputs.overrides import KERNELS
from infcl_gen.kernels import elementwise, forward, fused, gradient, pairs, rows, statistics
from infcl_gen.kernels.arguments import Argument, Kernel
from infcl_gen.kernels.choice import Block, Choice
from infcl_gen.kernels.family import Family, Tile
from infcl_gen.runtime.traits import Traits

__all__ = [
    "FAMILIES", "TILES", "Argument", "Family", "Kernel", "Tile", "default_blocks", "families", "launched", "tiles",
]  # fmt: skip

# In the order of kernels.py; then the variants, each a module of this folder.
_ORDINARY = (
    forward.FAMILY, rows.FORWARD, statistics.FAMILY, gradient.FAMILY, rows.FAMILY, pairs.FAMILY, fused.FAMILY,
    *elementwise.FAMILIES,
)  # fmt: skip
_MODULES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
_FOUND: list[Family] = [module.FAMILY for module in _MODULES if hasattr(module, "FAMILY")]
FAMILIES = tuple(dict.fromkeys([*_ORDINARY, *_FOUND]))
TILES = {family.tile.name: family.tile for family in FAMILIES if family.tile}
LARGE = 1 << 31  # rows or keys that fill any board


def families(choice: Choice) -> tuple[Family, ...]:
    """The families of a package, in the order of its files."""
    here = (each for each in FAMILIES if choice.strategy in each.strategies and each.arch in ("", choice.arch))
    return tuple(each for each in here if each.wanted(choice))


def launched(choice: Choice) -> dict[str, tuple[str, Block]]:
    """By tile the kernel that runs on the device of the choice, and its block: a variant in the place of another."""
    variants = {
        kernel.replaces: (kernel.name, family.block(choice, kernel))
        for family in families(choice)
        if family.block is not None
        for kernel in family.kernels(choice)
    }
    return {name: variants.get(name, (name, block)) for name, block in choice.blocks.items()}


def tiles(strategy: str, traits: Traits) -> tuple[Tile, ...]:
    """The tiles of a strategy's kernels for a loss, in the order of KERNELS."""
    named = {each.tile.name: each.tile for each in FAMILIES if each.tile and strategy in each.strategies}
    here = (named[name] for name in KERNELS if name in named)
    return tuple(tile for tile in here if traits.apart or not tile.for_positives)


def default_blocks(
    profile: DeviceProfile, choice: Choice, rows: int = LARGE, keys: int = LARGE, chosen: Collection[str] = ()
) -> dict[str, Block]:
    """A legal block for each kernel of the strategy, shrunk where the board's shared memory or registers are short.

    Few `rows` and `keys` get smaller blocks. A tile with a `chosen` field keeps the large-batch default, so that the
    user's field does not mean another block at each size. A forward with a stash takes the tiles of the gradient.

    Raises InputError if a kernel has no legal block on this board (fused with dim > 256, say).
    """
    blocks: dict[str, Block] = {}
    for tile in tiles(choice.strategy, choice.traits):
        owner = "gradient" if choice.stash and tile.name == "forward" else tile.name
        fixed = tile.walks and owner in chosen
        block = tile.default(profile, choice, LARGE if fixed else rows, LARGE if fixed else keys)
        if choice.stash and tile.name == "gradient":  # the forward's tiles, which a small board may have shrunk
            block = dataclasses.replace(block, rows=blocks["forward"].rows, keys=blocks["forward"].keys)
        blocks[tile.name] = tile.shrunk(block, choice, profile)
    if choice.stash:  # the gradient's may have been shrunk further
        smaller = {"rows": blocks["gradient"].rows, "keys": blocks["gradient"].keys}
        blocks["forward"] = dataclasses.replace(blocks["forward"], **smaller)
    return blocks
