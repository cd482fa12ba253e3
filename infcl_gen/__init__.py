"""A compiler for contrastive losses: from a problem to a verified, importable loss package.

    from infcl_gen import ContrastiveLoss
    loss = ContrastiveLoss()(image_features, text_features, logit_scale)

`import infcl_gen` is cheap: torch, triton and SymPy are imported when they are needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Unpack

from infcl_gen.errors import (
    InfclError,
    InfeasibleError,
    InputError,
    LockTimeoutError,
    ToolchainError,
    VerificationError,
)
from infcl_gen.garbage import uncollected
from infcl_gen.inputs.flags import Flags, python_function
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.version import __version__

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from infcl_gen.lazy import ContrastiveLoss, contrastive_loss, global_value
    from infcl_gen.losses.language import LossSpec
    from infcl_gen.planning.planner import Plan
    from infcl_gen.planning.timeline import Timeline
    from infcl_gen.step.feed import Ragged, Samples
    from infcl_gen.step.live import plan_step

__all__ = [
    "ContrastiveLoss",
    "InfclError", "InfeasibleError", "InputError", "LockTimeoutError", "LossSpec", "Problem", "Ragged", "Samples",
    "ToolchainError", "VerificationError", "__version__", "contrastive_loss", "generate", "global_value", "load",
    "plan", "plan_step", "simulate",
]  # fmt: skip


# What needs torch or SymPy, and the module that it is found in when it is first asked for.
_LATER = {
    "ContrastiveLoss": "infcl_gen.lazy",
    "contrastive_loss": "infcl_gen.lazy",
    "global_value": "infcl_gen.lazy",
    "LossSpec": "infcl_gen.losses.language",
    "Ragged": "infcl_gen.step.feed",
    "Samples": "infcl_gen.step.feed",
    "plan_step": "infcl_gen.step.live",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with uncollected(import_only=True):
        globals()[name] = found = getattr(importlib.import_module(_LATER[name]), name)
    return found


@python_function
def plan(problem: Problem | None = None, **flags: Unpack[Flags]) -> Plan:
    """The plan for a `Problem`, or for its flags as keywords (`batch_size="64k"`).

    Raises InputError (a flag is wrong) or InfeasibleError (no plan fits the memory budget).
    """
    from infcl_gen import emission

    return emission.plan_problem(_problem(problem, flags))[0]


@python_function
def simulate(problem: Problem | None = None, **flags: Unpack[Flags]) -> Timeline:
    """A simulated step of the plan for a `Problem`, or for its flags as keywords, on one rank: its time behind other
    work, efficiency, bound and events.

    Raises what `plan` raises.
    """
    from infcl_gen import emission

    return emission.simulate_problem(_problem(problem, flags))[1]


@python_function
def generate(
    problem: Problem | None = None, output: str | Path | None = None, force: bool = False, **flags: Unpack[Flags]
) -> Path:
    """Write the package for a `Problem`, or for its flags as keywords, to the folder `output` and return its path.

    The folder is complete or absent. An existing package is replaced only with `force`; anything else that is there is
    never touched. Raises InputError, InfeasibleError, LockTimeoutError.
    """
    from infcl_gen import emission

    if output is None:
        raise InputError("output: a folder to write the package to is needed")
    return emission.write_package(emission.build(_problem(problem, flags)), output, force)


@python_function
def load(problem: Problem | None = None, **flags: Unpack[Flags]) -> ModuleType:
    """Import the package for a `Problem`, or for its flags as keywords, after generating it if it is missing.

    It is in the user's cache folder. Safe to call from many processes at once. Raises InputError, InfeasibleError,
    LockTimeoutError.
    """
    from infcl_gen import emission

    return emission.load_cached(_problem(problem, flags))


def _problem(problem: Problem | None, flags: Flags) -> Problem:
    if problem is None:
        return make_problem(**flags)
    if flags:
        raise InputError(f"give either a Problem or flags, not both (got {', '.join(sorted(flags))})")
    if not isinstance(problem, Problem):
        raise InputError(f"problem: expected a Problem or keyword flags, not {type(problem).__name__}")
    return problem
