"""From a problem to the text of a package, and from the text to a folder.

build                Problem -> {path: text}: the whole pipeline
plan_problem         Problem -> its plan and its derivation
simulate_problem     Problem -> its plan and a simulated step
write_package        {path: text} -> folder, atomically
read_package         folder -> SPEC and files, checked against the manifest, never imported
rerender             folder -> the text that its SPEC["problem"] generates today
load_cached          Problem -> imported module, through the user's cache folder
import_package       folder -> imported module
"""

from typing import TYPE_CHECKING, Any

from infcl_gen.emission.cache import import_package, load_cached
from infcl_gen.emission.package import read_package, write_package

if TYPE_CHECKING:
    from infcl_gen.emission.pipeline import build, loss_of, plan_problem, rerender, simulate_problem

__all__ = [
    "build", "import_package", "load_cached", "loss_of", "plan_problem", "read_package", "rerender", "simulate_problem",
    "write_package",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The pipeline when it is first asked for: it imports SymPy, which a package in the cache does not need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from infcl_gen.emission import pipeline

    return getattr(pipeline, name)
