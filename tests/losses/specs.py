"""Losses of the tests, and short words for them. Nothing here loads torch."""

import sympy

from infcl_gen.losses import CLIP, INFONCE, LossSpec
from infcl_gen.losses.language import (
    bias,
    logsumexp_over_keys,
    logsumexp_over_queries,
    mean_over_keys,
    mean_over_queries,
    positive,
    scale,
    tanh,
    z,
)

X = scale * z + bias
INFONCE_OF = lambda logit: mean_over_queries(logsumexp_over_keys(logit) - positive(logit))  # noqa: E731


def spec(formula: sympy.Expr, positives: str = "label", name: str = "mine") -> LossSpec:
    return LossSpec(name, formula, positives)


DERIVABLE = {
    "clip": CLIP,
    "infonce": INFONCE,
    "weighted_sides": spec(
        mean_over_queries(logsumexp_over_keys(X) - positive(X)) / 3
        + 2 * mean_over_keys(logsumexp_over_queries(X) - positive(X)) / 3,
        "diagonal",
    ),
    "keys_only": spec(mean_over_keys(logsumexp_over_queries(X) - positive(X)), "diagonal"),
    "soft_capped": spec(INFONCE_OF(30 * tanh(scale * z / 30) + bias)),
    "squared": spec(INFONCE_OF(scale * z - (scale * z) ** 2 / 10)),
    "no_scale": spec(INFONCE_OF(10 * z)),
    "scaled_bias": spec(INFONCE_OF(scale * (z + bias))),
    "not_balanced": spec(mean_over_queries(logsumexp_over_keys(X) - positive(X) / 2)),
    "irrational": spec(INFONCE_OF(sympy.sqrt(scale) * z * sympy.pi)),
}
