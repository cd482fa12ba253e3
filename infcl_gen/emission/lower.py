"""Plan -> package specification: which files there are, from which templates, with which values in their holes.

All arithmetic that a template might want is done here. The result holds literals and printed expressions only,
so that rendering is a pure function of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infcl_gen.emission.kernel_context import gradient_exponent, kernels_context
from infcl_gen.emission.package_context import SpecContext, init_context, torch_context
from infcl_gen.emission.printing import signature_printer
from infcl_gen.emission.schedule_context import schedule_context
from infcl_gen.hardware import load_profile, profile_names
from infcl_gen.kernels import TILES, families
from infcl_gen.losses import is_builtin, loss_context, spec_as_dict
from infcl_gen.planning.records import own_settings
from infcl_gen.version import __version__

if TYPE_CHECKING:
    from infcl_gen.hardware import DeviceProfile
    from infcl_gen.inputs.problem import Problem
    from infcl_gen.losses import Derivation
    from infcl_gen.planning.planner import Plan

SCHEMA_VERSION = 1
RUNTIME_FOLDER = Path(__file__).resolve().parent.parent / "runtime"  # ships inside every package, verbatim


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One kernel of kernels.py and its launch options; its tile is a constant at the top of the file."""

    name: str
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class FileSpec:
    """One file of the package: its path there, the templates whose text it joins, and a dataclass of their holes."""

    path: str
    templates: tuple[str, ...]
    context: Any


@dataclasses.dataclass(frozen=True)
class PackageSpec:
    """All that rendering needs. `literals` is SPEC (its digest is filled in when the text is known)."""

    name: str
    literals: Mapping[str, Any]
    kernels: tuple[KernelSpec, ...]
    files: tuple[FileSpec, ...]
    runtime_files: tuple[str, ...]


def lower(plan: Plan, derivation: Derivation, profile: DeviceProfile) -> PackageSpec:
    """The package for a plan made for `profile`. SPEC holds all that is needed to generate it again."""
    name = package_name(plan, derivation)
    kernels = kernel_specs(plan, profile)
    literals = spec_literals(plan, derivation, profile, name, kernels)
    device = _identifier(plan.problem.device_profile)
    files = [
        FileSpec("__init__.py", ("package/__init__.py.jinja",), init_context(plan, derivation, name, device)),
        FileSpec("spec.py", ("package/spec.py.jinja",), SpecContext(name, literals)),
        FileSpec("loss.py", ("torch/loss.py.jinja",), loss_context(derivation)),
    ]
    if plan.strategy == "torch":
        files.append(FileSpec("schedule.py", ("torch/schedule.py.jinja",), torch_context(plan, derivation)))
    else:
        found = families(plan)
        kernel = kernels_context(name, plan, derivation, profile)
        of_kernels = {**vars(kernel), "signature": signature_printer(found, plan)}
        templates = [name for family in found if family.file == "kernels.py" for name in family.templates(plan)]
        files.append(FileSpec("kernels.py", ("triton/header.py.jinja", *templates), of_kernels))
        files += [
            FileSpec(family.file, family.templates(plan), of_kernels | family.values(plan))
            for family in found
            if family.file != "kernels.py"
        ]
        sweep = "fused" if plan.strategy == "fused" else "panel"
        schedule = schedule_context(plan, name, profile, kernels, literals["gradient_exponent"])
        files.append(FileSpec("schedule.py", (f"triton/schedule_{sweep}.py.jinja",), schedule))
    runtime_files = sorted(file.name for file in RUNTIME_FOLDER.glob("*.py"))
    return PackageSpec(name, literals, kernels, tuple(files), tuple(runtime_files))


def spec_literals(
    plan: Plan, derivation: Derivation, profile: DeviceProfile, name: str, kernels: tuple[KernelSpec, ...]
) -> dict[str, Any]:
    """SPEC of the package: literals only, in a fixed order."""
    planned = plan.as_dict()
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "digest": "",
        "versions": {"generator": __version__},
        "problem": plan.problem.as_dict(),
        "positives": derivation.spec.positives,
        "has_keys": bool(derivation.has_keys),
        "gradient_exponent": gradient_exponent(plan, derivation),
        "descriptors": plan.descriptors,
        "loss": spec_as_dict(derivation.spec),
        "device": dataclasses.asdict(profile),
        "regenerate": _regenerate(plan.problem, derivation, profile),
        "derivation": derivation.formulas(),
        "launches": {kernel.name: {"warps": kernel.warps, "stages": kernel.stages} for kernel in kernels},
        "predicted": {
            "peak_bytes": plan.predicted_peak_bytes,
            "time_s": plan.predicted_time_s,
            "queued_s": plan.predicted_queued_s,
        },
        "plan": {key: value for key, value in planned.items() if key != "problem"},  # which stands above
    }


def _regenerate(problem: Problem, derivation: Derivation, profile: DeviceProfile) -> str:
    """The command that makes such a package for {queries} queries and {keys} keys. A file of the user's is a word in
    capitals: where it was is not known, and of no use elsewhere."""
    builtin = is_builtin(spec_as_dict(derivation.spec))
    shipped = problem.device_profile in profile_names() and load_profile(problem.device_profile) == profile
    flags = [
        ("--loss", problem.loss if builtin else "FILE.py:NAME"),
        ("--dim", problem.dim),
        ("--dtype", problem.dtype),
        ("--devices", problem.devices),
        ("--nodes", problem.nodes),
        ("--device-profile", problem.device_profile if shipped else "PROFILE.toml"),
        ("--cluster", None if problem.links is None else "CLUSTER.toml"),
        ("--memory-budget", problem.memory_budget_bytes),
        ("--precision", None if problem.precision == "default" else problem.precision),
        *(("--set", f"{key}={value}") for key, value in own_settings(problem.settings).pairs),
    ]
    given = shlex.join(word for flag, value in flags if value is not None for word in (flag, str(value)))
    literal = given.replace("{", "{{").replace("}", "}}")
    return f"infcl-gen generate --batch-size {{queries}} --keys {{keys}} {literal} -o DIR"


def kernel_specs(plan: Plan, profile: DeviceProfile) -> tuple[KernelSpec, ...]:
    """The kernels of a package in the order of kernels.py; none for the torch strategy."""
    specs = []
    for kernel in (kernel for family in families(plan) for kernel in family.kernels(plan)):
        if not kernel.block:
            specs.append(KernelSpec(kernel.name, kernel.warps, kernel.stages))
        elif kernel.wide:
            warps = TILES[kernel.block].wide_warps(plan.blocks[kernel.block], profile)
            specs.append(KernelSpec(kernel.name, warps, 2))
        else:
            block = plan.blocks[kernel.block]
            specs.append(KernelSpec(kernel.name, block.warps, block.stages))
    return tuple(specs)


def package_name(plan: Plan, derivation: Derivation) -> str:
    """An ASCII identifier such as clip_h200_d768; names of user files enter as a digest."""
    return f"{_identifier(derivation.spec.name)}_{_identifier(plan.problem.device_profile)}_d{plan.problem.dim}"


def _identifier(name: str) -> str:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,39}", name):
        return name
    return "file" + hashlib.sha256(name.encode()).hexdigest()[:8]
