"""The built-in losses as formulas."""

from infcl_gen.losses.language import (
    LossSpec,
    bias,
    is_positive,
    logsumexp_over_keys,
    logsumexp_over_queries,
    mean_over_keys,
    mean_over_queries,
    positive,
    queries,
    scale,
    softplus,
    sum_over_pairs,
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

SIGLIP = LossSpec(
    name="siglip",
    formula=sum_over_pairs(softplus((1 - 2 * is_positive) * _x)) / queries,
    positives="diagonal",
    doc="Pairwise sigmoid loss of SigLIP: each pair is classified as a positive or not, with `bias` as its prior.",
)

SIGLIP_MULTI = LossSpec(
    name="siglip_multi",
    formula=sum_over_pairs(softplus((1 - 2 * is_positive) * _x)) / queries,
    positives="id",
    doc="SigLIP where a query has any number of positives, also none: the keys of its id.",
)

BUILTIN_LOSSES: dict[str, LossSpec] = {spec.name: spec for spec in (CLIP, INFONCE, SIGLIP, SIGLIP_MULTI)}
