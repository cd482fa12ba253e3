"""The built-in losses as formulas."""

from infcl_gen.losses.language import (
    LossSpec,
    bias,
    logsumexp_over_keys,
    logsumexp_over_queries,
    mean_over_keys,
    mean_over_queries,
    positive,
    scale,
    z,
)

_x = scale * z + bias

CLIP = LossSpec(
    name="clip",
    formula=mean_over_queries(logsumexp_over_keys(_x) - positive(_x)) / 2
    + mean_over_keys(logsumexp_over_queries(_x) - positive(_x)) / 2,
    positives="diagonal",
    doc="Symmetric cross-entropy of CLIP: each query against all keys and each key against all queries.",
)

INFONCE = LossSpec(
    name="infonce",
    formula=mean_over_queries(logsumexp_over_keys(_x) - positive(_x)),
    positives="label",
    doc="One-direction InfoNCE: each query against all keys; `labels` name the positives.",
)

BUILTIN_LOSSES: dict[str, LossSpec] = {spec.name: spec for spec in (CLIP, INFONCE)}
