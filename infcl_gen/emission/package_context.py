"""What the templates say of a package as a whole, and the sweep of the torch strategy: their holes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from infcl_gen.inputs.problem import TORCH_DTYPES
from infcl_gen.planning.memory import STRIP_ROWS

if TYPE_CHECKING:
    from infcl_gen.losses import Derivation
    from infcl_gen.planning.planner import Plan


@dataclasses.dataclass(frozen=True)
class SpecContext:
    """The holes of package/spec.py.jinja; `spec` holds literals."""

    name: str
    spec: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class InitContext:
    """The holes of package/__init__.py.jinja: what its docstring tells."""

    name: str
    logit: str
    loss: str
    queries: int
    keys: int
    dim: int
    dtype: str
    devices: str
    alone: bool
    device: str
    strategy: str
    kernels: bool
    mib: str
    rows_per_rank: int


@dataclasses.dataclass(frozen=True)
class TorchContext:
    """The holes of torch/schedule.py.jinja. Dtypes are torch's names; `upcast`: features are converted panel by panel;
    `affine`: x = slope * z + shift, otherwise the logit is evaluated in strips of rows."""

    dim: int
    loss_formula: str
    gradient_formula: str
    feature_dtype: str
    statistics_dtype: str
    upcast: bool
    affine: bool
    logit_strips: int
    has_keys: bool
    labels: bool
    positive_parts: int
    finish_strips: str
    gradient_of_logits: str
    strip_rows: int
    forward_rows: int
    forward_keys: int
    panel_rows: int
    panel_keys: int


def init_context(plan: Plan, derivation: Derivation, name: str, device: str) -> InitContext:
    problem, formulas = plan.problem, derivation.formulas()
    alone = problem.devices == 1
    return InitContext(
        name=name,
        logit=formulas["logit"],
        loss=formulas["loss"],
        queries=problem.batch_size,
        keys=problem.total_keys,
        dim=plan.dim,
        dtype=plan.dtype,
        devices="1 device" if alone else f"{problem.devices} devices",
        alone=alone,
        device=device,
        strategy=plan.strategy,
        kernels=plan.strategy != "torch",
        mib=f"{plan.predicted_peak_bytes / 2**20:.1f}",
        rows_per_rank=plan.rows_per_rank,
    )


def torch_context(plan: Plan, derivation: Derivation) -> TorchContext:
    formulas, upcast = derivation.formulas(), plan.dtype != plan.statistics_dtype
    return TorchContext(
        dim=plan.dim,
        loss_formula=formulas["loss"],
        gradient_formula=formulas["dL/dx"],
        feature_dtype=TORCH_DTYPES[plan.dtype],
        statistics_dtype=TORCH_DTYPES[plan.statistics_dtype],
        upcast=upcast,
        affine=plan.affine,
        logit_strips=plan.logit_strips,
        has_keys=plan.has_keys,
        labels=plan.labels,
        positive_parts=5 if plan.has_keys else 3,
        finish_strips="2 strips" if upcast else "1 strip",
        gradient_of_logits="M * dL/dx" if plan.affine else "M * dL/dx * dx/dz",
        strip_rows=STRIP_ROWS,
        forward_rows=plan.forward_rows,
        forward_keys=plan.forward_keys,
        panel_rows=plan.panel_rows,
        panel_keys=plan.panel_keys,
    )
