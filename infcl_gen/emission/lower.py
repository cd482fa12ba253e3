"""Plan -> package specification: which files there are, from which templates, with which values in their holes.

All arithmetic that a template might want is done here. The result holds literals and printed expressions only,
so that rendering is a pure function of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infcl_gen.hardware import load_profile, profile_names
from infcl_gen.losses import is_builtin, loss_template_context, spec_as_dict, triton_code
from infcl_gen.losses.printers import p
from infcl_gen.planning.levels import (
    EXACT_DEPTH,
    LOSS_ROWS,
    RING_WAVES,
    SPLIT_TERMS,
    STRIP_ROWS,
    Block,
    fused_wide,
    key_lanes,
    most_strips,
    resident_programs,
    wide_rows,
)
from infcl_gen.planning.records import own_settings
from infcl_gen.version import __version__

if TYPE_CHECKING:
    from sympy import Expr

    from infcl_gen.hardware import DeviceProfile
    from infcl_gen.losses import Derivation
    from infcl_gen.planning.planner import Plan
    from infcl_gen.problem import Problem

SCHEMA_VERSION = 1
RUNTIME_FOLDER = Path(__file__).resolve().parent.parent / "runtime"  # ships inside every package, verbatim

# kernels.py of a strategy is the header followed by these templates, in this order.
KERNEL_TEMPLATES: dict[str, tuple[str, ...]] = {
    "panel": ("header", "forward", "statistics", "gradient", "product", "finish"),
    "stash": ("header", "forward", "statistics", "gradient", "product", "finish", "stash"),
    "fused": ("header", "forward", "statistics", "fused", "finish"),
}
# The kernels of each template, and what says how they are launched: the family of their block (the plan's `blocks`),
# or a number of warps where a kernel only touches vectors. `_left_out` says which of them a package does not need.
KERNEL_FAMILIES: dict[str, dict[str, str | int]] = {
    "header": {},
    "forward": {"references": "forward", "forward": "forward", "forward_wide": "forward"},
    "statistics": {"merge": 4, "positives": "positive", "loss_terms": 16, "total_loss": 4},
    "gradient": {"gradient": "gradient", "gradient_wide": "gradient", "ratios": 4, "gradient_positives": 4},
    "stash": {"gradient_from_stash": "gradient"},
    "fused": {
        "ratios": 4,
        "fused_positives": 4,
        "fused_queries": "fused",
        "fused_queries_wide": "fused",
        "fused_keys": "fused",
        "fused_keys_wide": "fused",
    },
    "product": {"product": "product"},
    "finish": {"finish": "finish", "scalars": 4},
    "split": {"split": "finish"},
    "replay": {"copy_inputs": "finish"},
    "gather": {"merge_ranks": 4},
}
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One kernel of kernels.py and its launch options; its tile is a constant at the top of the file."""

    name: str
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class FileSpec:
    """One file of the package: its path there, the templates whose text it joins, the values for their holes."""

    path: str
    templates: tuple[str, ...]
    context: Mapping[str, Any]


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
    kernels = kernel_specs(plan, profile, bool(derivation.has_keys))
    names = {kernel.name for kernel in kernels}
    literals = spec_literals(plan, derivation, profile, name, kernels)
    shared = {
        "name": name,
        "spec": literals,
        "plan": plan,
        "problem": plan.problem,
        "device": _identifier(plan.problem.device_profile),
        "formulas": derivation.formulas(),
    }
    files = [
        FileSpec("__init__.py", ("package/__init__.py.jinja",), shared),
        FileSpec("spec.py", ("package/spec.py.jinja",), shared),
        FileSpec("loss.py", ("torch/loss.py.jinja",), shared | loss_template_context(derivation)),
    ]
    if plan.strategy == "torch":
        files.append(
            FileSpec("schedule.py", ("torch/schedule.py.jinja",), shared | _device_context(plan, derivation))
        )
    else:
        context = shared | _device_context(plan, derivation) | triton_expressions(derivation)
        context |= _strip_context(plan, profile)
        context["with_ratios"], context["flagged"] = "ratios" in names, "gradient_wide" in names
        context["gather"] = "merge_ranks" in names
        context["launches"] = {kernel.name: kernel for kernel in kernels}
        pieces = tuple(
            f"triton/{piece}.py.jinja" for piece in _kernel_templates(plan, bool(derivation.has_keys))
        )
        files.append(FileSpec("kernels.py", pieces, context))
        files.append(FileSpec("schedule.py", ("triton/schedule.py.jinja",), context))
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
        "gradient_exponent": _gradient_exponent(plan, derivation),
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
        *(("--set", f"{key}={value}") for key, value in own_settings(problem.settings)),
    ]
    given = shlex.join(word for flag, value in flags if value is not None for word in (flag, str(value)))
    literal = given.replace("{", "{{").replace("}", "}}")
    return f"infcl-gen generate --batch-size {{queries}} --keys {{keys}} {literal} -o DIR"


def kernel_specs(plan: Plan, profile: DeviceProfile, has_keys: bool) -> tuple[KernelSpec, ...]:
    """The kernels of a package in the order of kernels.py; none for the torch strategy."""
    specs = []
    left_out = _left_out(plan, has_keys)
    for template in _kernel_templates(plan, has_keys):
        for name, family in KERNEL_FAMILIES[template].items():
            if name in left_out:
                continue
            if isinstance(family, int):
                specs.append(KernelSpec(name, family, 1))
            elif name.endswith("_wide"):
                specs.append(KernelSpec(name, _wide_warps(family, plan.blocks[family], profile), 2))
            else:
                specs.append(KernelSpec(name, plan.blocks[family].warps, plan.blocks[family].stages))
    return tuple(specs)


def _kernel_templates(plan: Plan, has_keys: bool) -> tuple[str, ...]:
    gather = has_keys and plan.schedule.transport == "gather"
    wishes = (("split", plan.split), ("replay", plan.replay), ("gather", gather))
    chosen = [name for name, wanted in wishes if wanted]
    return (*KERNEL_TEMPLATES.get(plan.strategy, ()), *chosen)


def _wide_warps(family: str, block: Block, profile: DeviceProfile) -> int:
    """Two references and pointers hold more registers: a thread gets at most 32 elements of a tile, or it spills."""
    return fused_wide(profile, block)[1] if family == "fused" else max(4, block.keys // 16)


def _left_out(plan: Plan, has_keys: bool) -> set[str]:
    """Kernels that need no second look at any range: of fp32 features, and where only rows have statistics."""
    if _exact(plan):
        return {"references", "forward_wide", "gradient_wide", "ratios"}
    if has_keys:
        return set()
    kept = {"gradient_wide"} if plan.strategy == "stash" else set()
    return {"gradient_wide", "ratios", "fused_queries_wide", "fused_keys_wide"} - kept


def package_name(plan: Plan, derivation: Derivation) -> str:
    """An ASCII identifier such as clip_h200_d768; names of user files enter as a digest."""
    return (
        f"{_identifier(derivation.spec.name)}_{_identifier(plan.problem.device_profile)}_d{plan.problem.dim}"
    )


def triton_expressions(derivation: Derivation) -> dict[str, Any]:
    """The derived mathematics as Triton source.

    slope, shift, gradient_factor, dscale_factor: in `scale`, `bias`; dbias: a number; query_term in `r`, `p`; the key
    term, linear in `p`, as key_term_without_positive in `c` and key_positive_term in `p`; logit, dlogit_dz in `z`,
    `scale`, `bias` ("" if affine).
    """
    affine = derivation.slope is not None
    without_positive, with_positive = _split_positive(derivation.key_term)
    return {
        "affine": affine,
        "slope": triton_code(derivation.slope) if affine else "",
        "shift": triton_code(derivation.shift) if affine else "",
        "gradient_factor": triton_code(derivation.gradient_factor),
        "dscale_factor": triton_code(derivation.dscale_factor),
        "dbias": float(derivation.dbias),
        "query_term": triton_code(derivation.query_term),
        "key_term_without_positive": triton_code(without_positive),
        "key_positive_term": triton_code(with_positive),
    }


def _device_context(plan: Plan, derivation: Derivation) -> dict[str, Any]:
    """What the kernels and both device sweeps are specialised to."""
    formulas = derivation.formulas()
    return {
        "strategy": plan.strategy,
        "products": plan.products,
        "descriptors": plan.descriptors,
        "blocks": plan.blocks,
        "dim": plan.problem.dim,
        "dtype": plan.dtype,
        "torch_dtype": TORCH_DTYPES[plan.specialisation.operand_dtype],
        "split": plan.split,
        "split_terms": SPLIT_TERMS,
        "exact_depth": EXACT_DEPTH,
        "loss_rows": LOSS_ROWS,
        "strip_rows": STRIP_ROWS,
        "statistics_dtype": "float64" if plan.dtype == "fp64" else "float32",
        "gradient_exponent": _gradient_exponent(plan, derivation),
        "input_precision": _input_precision(plan),
        "has_keys": bool(derivation.has_keys),
        "positives": derivation.spec.positives,
        "query_share": derivation.query_share,
        "key_share": derivation.key_share,
        "positive_share": derivation.positive_share,
        "affine": derivation.slope is not None,
        "exact": _exact(plan),
        "stash": plan.stash_rows > 0,
        "loss_formula": formulas["loss"],
        "gradient_formula": formulas["dL/dx"],
    }


def _strip_context(plan: Plan, profile: DeviceProfile) -> dict[str, Any]:
    """How the kernels that walk strips are balanced on this board."""
    forward = plan.blocks["forward"]
    panels = {
        "forward": (plan.forward_rows, plan.forward_keys),
        "gradient": (plan.panel_rows, plan.panel_keys),
    }
    walking = {name: plan.blocks[name] for name in panels if name in plan.blocks}
    tiles = [block.rows for block in walking.values()]
    waves = RING_WAVES if plan.world_size > 1 else 1
    return {
        "waves": waves,
        "wide_rows": 0 if _exact(plan) else min(wide_rows(profile), *tiles),
        "fused_wide_keys": fused_wide(profile, plan.blocks["fused"])[0] if plan.strategy == "fused" else 0,
        "key_lanes": key_lanes(forward, profile),
        "keeps_keys": plan.specialisation.keeps_keys("forward", forward),
        "programs": {
            name: waves * resident_programs(name, block, profile, plan.specialisation)
            for name, block in walking.items()
        },
        "strips": {name: most_strips(*panels[name], block) for name, block in walking.items()},
    }


def _exact(plan: Plan) -> bool:
    """fp32 operands: every row and column has its own reference, so no tile needs a second look."""
    return plan.dtype == "fp32" and not plan.split


def _gradient_exponent(plan: Plan, derivation: Derivation) -> int:
    """Gradients of logits are kept times 2 to this power: they are of order 1/M, and fp16 would underflow, or overflow
    beyond 65504."""
    if plan.dtype != "fp16" or plan.strategy == "torch":
        return 0
    softmaxes = abs(derivation.query_share) + abs(derivation.key_share)
    return 14 - max(0, math.ceil(math.log2(max(softmaxes, abs(derivation.positive_share)))))


def _input_precision(plan: Plan) -> str:
    """`input_precision` of a product of fp32 operands; tf32 loses the loss at large scales, and is chosen only."""
    return "tf32" if plan.problem.precision == "tf32" else "ieee"


def _split_positive(term: Expr) -> tuple[Expr, Expr]:
    """A key term, linear in p, as the part without p and the part with it."""
    with_positive = term.diff(p) * p
    return (term - with_positive).expand(), with_positive


def _identifier(name: str) -> str:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,39}", name):
        return name
    return "file" + hashlib.sha256(name.encode()).hexdigest()[:8]
