"""The kernels: for each family its template, kernels with their arguments, tiles, and the packages that have it.

`families` answers with the families of one package, in the order of its files. Kernels for other hardware are one more
module here and one more template: a `Family` with a file of its own, which the schedule prefers where a GPU runs it
(hopper).
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Collection
from typing import TYPE_CHECKING

from infcl_gen.inputs.overrides import KERNELS
from infcl_gen.kernels import elementwise, forward, fused, gradient, statistics
from infcl_gen.kernels.arguments import Argument, Kernel
from infcl_gen.kernels.choice import Block, Choice
from infcl_gen.kernels.family import Family, Tile

if TYPE_CHECKING:
    from infcl_gen.hardware import DeviceProfile

__all__ = ["FAMILIES", "TILES", "Argument", "Family", "Kernel", "Tile", "default_blocks", "families", "tiles"]

# In the order of kernels.py; then the variants, each a module of this folder.
_ORDINARY = (forward.FAMILY, statistics.FAMILY, gradient.FAMILY, fused.FAMILY, *elementwise.FAMILIES)
_MODULES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
_FOUND: list[Family] = [module.FAMILY for module in _MODULES if hasattr(module, "FAMILY")]
FAMILIES = (*_ORDINARY, *(family for family in _FOUND if family not in _ORDINARY))
TILES = {family.tile.name: family.tile for family in FAMILIES if family.tile}
LARGE = 1 << 31  # rows or keys that fill any board


def families(choice: Choice) -> tuple[Family, ...]:
    """The families of a package, in the order of its files."""
    here = (each for each in FAMILIES if choice.strategy in each.strategies and each.arch in ("", choice.arch))
    return tuple(each for each in here if each.wanted(choice))


def tiles(strategy: str) -> tuple[Tile, ...]:
    """The tiles of a strategy, in the order of KERNELS."""
    named = {each.tile.name: each.tile for each in FAMILIES if each.tile and strategy in each.strategies}
    return tuple(named[name] for name in KERNELS if name in named)


def default_blocks(
    profile: DeviceProfile, choice: Choice, rows: int = LARGE, keys: int = LARGE, chosen: Collection[str] = ()
) -> dict[str, Block]:
    """A legal block for each kernel of the strategy: the table below, shrunk where the board has less than it needs,
    or where `rows` queries x `keys` keys have fewer tiles than the board has multiprocessors; but not of kernels some
    of whose fields are `chosen`: what is chosen should not mean another block at each size. The tiles of a stash are
    the gradient's, so only what is chosen of that keeps them.

    Raises InputError if a kernel has no legal block on this board (fused with dim > 256, say).
    """
    blocks: dict[str, Block] = {}
    for tile in tiles(choice.strategy):
        owner = "gradient" if choice.stash and tile.name == "forward" else tile.name  # of the tiles
        fixed = tile.walks and owner in chosen
        block = tile.default(profile, choice, LARGE if fixed else rows, LARGE if fixed else keys)
        if choice.stash and tile.name == "gradient":  # its tiles are those that the forward has kept
            block = dataclasses.replace(block, rows=blocks["forward"].rows, keys=blocks["forward"].keys)
        blocks[tile.name] = tile.shrunk(block, choice, profile)
    return blocks
