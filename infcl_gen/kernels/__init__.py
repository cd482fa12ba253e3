"""The kernels: for each family its template, its kernels with their arguments, and the packages that have it.

`families` answers with the families of one package, in the order of its files. Kernels for other hardware are one more
module here and one more template: a `Family` with a file of its own, which the schedule prefers where a GPU runs it
(hopper).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infcl_gen.kernels import elementwise, forward, fused, gradient, hopper, statistics
from infcl_gen.kernels.arguments import Argument, Kernel, Traits

__all__ = ["FAMILIES", "Argument", "Family", "Kernel", "Traits", "families", "kernels_of_block"]


@dataclass(frozen=True)
class Family:
    """`template`: triton/`template`.py.jinja. `file`: of the package. `target`: the only one it is for, or ""."""

    template: str
    wanted: Callable[[Traits], bool]
    kernels: Callable[[Traits], tuple[Kernel, ...]]
    file: str = "kernels.py"
    target: str = ""


FAMILIES = (
    Family(forward.TEMPLATE, forward.wanted, forward.kernels),
    Family(statistics.TEMPLATE, statistics.wanted, statistics.kernels),
    Family(gradient.TEMPLATE, gradient.wanted, gradient.kernels),
    Family(fused.TEMPLATE, fused.wanted, fused.kernels),
    Family("product", gradient.wanted, lambda traits: (elementwise.PRODUCT,)),
    Family("finish", forward.wanted, lambda traits: (elementwise.FINISH, elementwise.SCALAR_GRADIENTS)),
    Family("stash", lambda traits: traits.stash, lambda traits: (elementwise.gradient_from_stash(traits),)),
    Family("split", lambda traits: traits.split, lambda traits: (elementwise.SPLIT,)),
    Family("replay", lambda traits: traits.replay, lambda traits: (elementwise.COPY_INPUTS,)),
    Family("gather", lambda traits: traits.gather, lambda traits: (elementwise.MERGE_RANKS,)),
    Family("hopper", hopper.wanted, hopper.kernels, "hopper.py", "sm_90"),
)


def families(traits: Traits) -> tuple[Family, ...]:
    """The families of a package, in the order of its files."""
    return tuple(family for family in FAMILIES if family.wanted(traits))


def kernels_of_block(strategy: str, block: str) -> tuple[str, ...]:
    """The kernels of a strategy that are launched as this family of blocks says, where a loss needs all of them."""
    traits = Traits(strategy, True, False, False, False, True, strategy == "stash", False, False)
    return tuple(each.name for family in families(traits) for each in family.kernels(traits) if each.block == block)
