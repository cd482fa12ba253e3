"""Losses of the tests, and short words for them. Nothing here loads torch."""

import math

import sympy

from infcl_gen.losses import BUILTIN_LOSSES, CLIP, INFONCE, SIGLIP, SIGLIP_MULTI, LossSpec
from infcl_gen.losses.language import (
    bias,
    detach,
    exp,
    guide,
    is_first,
    is_positive,
    is_self,
    key_scale,
    key_state,
    key_weight,
    keys,
    log,
    logsumexp_over_all_positives,
    logsumexp_over_keys,
    logsumexp_over_negatives,
    logsumexp_over_queries,
    maximum,
    mean_by_softmax,
    mean_by_softmax_over_queries,
    mean_of_keys,
    mean_of_queries,
    mean_over_keys,
    mean_over_queries,
    next_state,
    of_positive,
    positive,
    queries,
    query_scale,
    query_state,
    query_weight,
    same_id,
    scale,
    sigmoid,
    similarity,
    softplus,
    step,
    sum_over_pairs,
    tanh,
    z,
)

X = scale * z + bias
SIGN = 1 - 2 * is_positive
KEPT = 1 - same_id * (1 - is_positive)
# An angle of 0.3 more than between the query and its positive; `maximum` keeps its slope finite where they are one.
ANGULAR = scale * (math.cos(0.3) * z - math.sin(0.3) * sympy.sqrt(maximum(1 - z**2, 1e-12)))
NEGATIVES = logsumexp_over_keys(X, where=1 - is_positive)
# The negatives without the share of a tenth that are positives; exp does not overflow where there are no negatives.
DEBIASED = (
    NEGATIVES + log(maximum(1 - (keys - 1) * exp(-maximum(NEGATIVES - positive(X), -700)) / 10, 1e-30)) - log(0.9)
)
INFONCE_OF = lambda logit: mean_over_queries(logsumexp_over_keys(logit) - positive(logit))  # noqa: E731


def spec(formula: sympy.Expr, positives: str = "label", name: str = "mine") -> LossSpec:
    return LossSpec(name, formula, positives)


EPS = sympy.Rational(1, 10)  # of label smoothing: shared by all keys of a query, or all queries of a key
_SMOOTH = logsumexp_over_keys(X) - (1 - EPS) * positive(X) - EPS * mean_of_keys(X)
_SMOOTH_KEYS = logsumexp_over_queries(X) - (1 - EPS) * positive(X) - EPS * mean_of_queries(X)
SMOOTH = {
    "smooth": spec(mean_over_queries(_SMOOTH), name="smooth"),
    "smooth_clip": spec((mean_over_queries(_SMOOTH) + mean_over_keys(_SMOOTH_KEYS)) / 2, "diagonal", "smooth_clip"),
    "smooth_rince": spec(BUILTIN_LOSSES["rince"].formula - mean_over_queries(mean_of_keys(X)) / 5, name="smooth_rince"),
}
# A query counts for as much as its key is wrong among all queries, whose own term it has a quarter of.
_ROW, _COLUMN = logsumexp_over_keys(X, where=1 - is_positive), logsumexp_over_queries(X, where=1 - is_positive)
_OF_ROW, _OF_COLUMN = _ROW - positive(X), of_positive(_COLUMN) - positive(X)
BY_COLUMN = spec(
    mean_over_queries(sigmoid(_OF_COLUMN) * softplus(_OF_ROW) + softplus(_OF_COLUMN) / 4), "diagonal",
    "weighed_by_column",
)  # fmt: skip
# Two log-sum-exps of a query: of the logits and of a multiple of them.
OF_MULTIPLES = {
    "squared_weights": spec(
        mean_over_queries(
            query_weight * (logsumexp_over_keys(X, where=KEPT) - positive(X))
            + softplus((logsumexp_over_keys(X / 2, where=KEPT) - logsumexp_over_keys(X, where=KEPT)) / 4)
        ),
        name="squared_weights",
    ),
    "hard_keys": spec(
        mean_over_queries(
            softplus(logsumexp_over_keys(5 * X / 2, where=1 - is_positive) - maximum(NEGATIVES, -1e30) - positive(X))
        ),
        name="hard_keys",
    ),
}
# Of Qwen3 Embedding: pairs that are nearer than the positive by a tenth, and those of one id.
NEAR_AND_IDS = spec(
    mean_over_queries(
        logsumexp_over_keys(X, where=1 - (1 - is_positive) * (1 - (1 - same_id) * (1 - step(z - positive(z) - EPS))))
        - positive(X)
    ),
    "diagonal",
    "near_and_ids",
)
# Distillation in both directions, of other weights, and a tenth of CLIP's loss.
APART = spec(
    mean_over_queries(logsumexp_over_keys(X) - mean_by_softmax(X, guide)) / 4
    + mean_over_keys(logsumexp_over_queries(X) - mean_by_softmax_over_queries(X, guide)) * 3 / 4
    + CLIP.formula / 10,
    "diagonal",
    "distill_apart",
)
_WITH_HARD = logsumexp_over_keys(X) + softplus(logsumexp_over_negatives(X) - logsumexp_over_keys(X))
_OF_BOTH, _OF_QUERIES = query_scale * key_scale * scale * z, scale * (query_scale * z + bias)
_SUM, _FURTHER = logsumexp_over_keys(_OF_QUERIES), logsumexp_over_negatives(_OF_QUERIES)
# The rate of a moving average is what the call gives as the weight of a query; it begins at -4.
_APART, _BEFORE = logsumexp_over_keys(X) - positive(X), maximum(query_state, -4)
RATE = spec(
    mean_over_queries(query_weight * (_APART - next_state(_BEFORE + detach(query_weight) * (_APART - _BEFORE)))),
    name="rate",
)
# Weights that follow from the positives of all queries.
_EACH = positive(z) + positive(X) / 3
_WEIGHT_BY_ALL = 2 - queries * exp(_EACH - logsumexp_over_all_positives(_EACH))
_TWO_SUMS = logsumexp_over_keys(X) + logsumexp_over_keys(2 * X) / 2 - 2 * positive(X)
BY_ALL = spec(
    mean_over_queries(logsumexp_over_keys(X) + query_weight * _WEIGHT_BY_ALL * _TWO_SUMS), name="weighed_by_all"
)
# A weight for each query and each key, beside terms that are no multiples of their sums.
SIDES = spec(
    mean_over_queries(query_weight * (logsumexp_over_keys(X, where=KEPT) - positive(X))) / 2
    + mean_over_keys(key_weight * softplus(logsumexp_over_queries(X, where=KEPT) - positive(X))) / 3,
    "diagonal",
    "weighed_sides",
)
# The same of either side: a key, too, has a rate and a state.
_APART_OF_KEY = logsumexp_over_queries(X, where=KEPT) - positive(X)
_APART_OF_QUERY, _BEFORE_OF_KEY = logsumexp_over_keys(X, where=KEPT) - positive(X), maximum(key_state, -4)
_AFTER = _BEFORE + detach(query_weight) * (_APART_OF_QUERY - _BEFORE)
_AFTER_OF_KEY = _BEFORE_OF_KEY + detach(key_weight) * (_APART_OF_KEY - _BEFORE_OF_KEY)
RATES_OF_SIDES = spec(
    mean_over_queries(query_weight * (_APART_OF_QUERY - next_state(_AFTER))) / 2
    + mean_over_keys(key_weight * softplus(_APART_OF_KEY - next_state(_AFTER_OF_KEY))) / 3,
    "diagonal",
    "rates_of_sides",
)
DECOUPLED_CLIP = spec(
    mean_over_queries(logsumexp_over_keys(X, where=1 - is_positive) - positive(X)) / 2
    + mean_over_keys(logsumexp_over_queries(X, where=1 - is_positive) - positive(X)) / 2,
    "diagonal",
    "decoupled_clip",
)
_CAPPED_LOGIT = 20 * tanh(scale * z / 20) + bias
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
    "siglip": SIGLIP,
    "siglip_labels": spec(sum_over_pairs(softplus(SIGN * X)) / queries),
    "siglip_focal": spec(sum_over_pairs(sigmoid(SIGN * X) ** 2 * softplus(SIGN * X)) / queries, "diagonal"),
    "siglip_scaled_bias": spec(sum_over_pairs(softplus(SIGN * scale * (z + bias))) / queries, "diagonal"),
    "siglip_capped": spec(sum_over_pairs(softplus(SIGN * (20 * tanh(scale * z / 20) + bias))) / queries, "diagonal"),
    "squares": spec(sum_over_pairs((scale * z - is_positive) ** 2) / queries, "diagonal"),
    "siglip_multi": SIGLIP_MULTI,
    "siglip_without_ids": spec(sum_over_pairs(softplus(SIGN * X) * KEPT) / queries, "diagonal"),
    "siglip_of_distances": spec(sum_over_pairs(KEPT * softplus(-SIGN * X) / 2) / queries, "diagonal"),
    "squares_by_id": spec(
        sum_over_pairs((scale * z - is_positive - same_id * (1 - is_positive) / 2) ** 2) / queries, "diagonal"
    ),
    "focal_by_id": spec(sum_over_pairs(sigmoid(SIGN * X) ** 2 * softplus(SIGN * X)) / queries, "id"),
    "clip_without_ids": spec(
        mean_over_queries(logsumexp_over_keys(X, where=KEPT) - positive(X)) / 2
        + mean_over_keys(logsumexp_over_queries(X, where=KEPT) - positive(X)) / 2,
        "diagonal",
    ),
    "infonce_without_ids": spec(
        mean_over_queries(logsumexp_over_keys(X, where=1 - same_id + same_id * is_positive) - positive(X))
    ),
    "rince": BUILTIN_LOSSES["rince"],
    "focal": spec(
        mean_over_queries((1 - exp(positive(X) - logsumexp_over_keys(X))) ** 2 * (logsumexp_over_keys(X) - positive(X)))
    ),
    "margin": spec(mean_over_queries(softplus(logsumexp_over_keys(X, where=1 - is_positive) - positive(X) + 0.3))),
    "cosine_margin": spec(INFONCE_OF(X - scale * is_positive / 4)),
    "angular_margin": spec(INFONCE_OF(is_positive * ANGULAR + (1 - is_positive) * scale * z + bias)),
    "capped_angular_margin": spec(INFONCE_OF(20 * tanh((is_positive * ANGULAR + (1 - is_positive) * scale * z) / 20))),
    "debiased": spec(
        mean_over_queries(softplus(maximum(DEBIASED, log(maximum(keys - 1, 1e-30)) - scale) - positive(X)))
    ),
    "decoupled": spec(mean_over_queries(logsumexp_over_keys(X, where=1 - is_positive) - positive(X))),
    "decoupled_by_id": spec(
        mean_over_queries(softplus(logsumexp_over_keys(X, where=(1 - is_positive) * (1 - same_id)) - positive(X)))
    ),
    "guided": spec(mean_over_queries(logsumexp_over_keys(X) - mean_of_keys(X, weight=(1 + guide) / 2))),
    "weighted": spec(mean_over_queries(query_weight * (logsumexp_over_keys(X) - positive(X)))),
    "tempered": spec(
        mean_over_queries(logsumexp_over_keys(_OF_BOTH) - positive(_OF_BOTH)) / 3
        + mean_over_keys(logsumexp_over_queries(_OF_BOTH) - positive(_OF_BOTH)) / 2,
        "diagonal",
    ),
    "tempered_pairs": spec(sum_over_pairs(softplus(SIGN * (query_scale * scale * z + bias))) / queries),
    "tempered_and_hard": spec(
        mean_over_queries(query_weight * (_SUM + softplus(_FURTHER - _SUM) - positive(_OF_QUERIES)))
    ),
    "hard": spec(mean_over_queries(query_weight * (_WITH_HARD - positive(X)))),
    "rate": RATE,
    "rates_of_sides": RATES_OF_SIDES,
    "decoupled_clip": DECOUPLED_CLIP,
    "weighed_by_all": BY_ALL,
    "weighed_sides": SIDES,
    "squares_of_both": spec(
        mean_over_queries(logsumexp_over_keys(X) + positive(X) ** 2)
        + mean_over_keys(logsumexp_over_queries(X) ** 2 - positive(X) ** 2),
        "diagonal",
    ),
    "pooled_alone": spec(mean_over_queries(logsumexp_over_keys(X) - logsumexp_over_all_positives(positive(X) / 2))),
    "pooled_constant": spec(
        mean_over_queries(logsumexp_over_keys(X) * exp(logsumexp_over_all_positives(detach(positive(z)))) - positive(X))
    ),
    "pooled_of_capped_logits": spec(
        mean_over_queries(
            logsumexp_over_keys(_CAPPED_LOGIT) / logsumexp_over_all_positives(positive(_CAPPED_LOGIT + z))
        )
    ),
    "near_and_ids": NEAR_AND_IDS,
    "distill_apart": APART,
    "distill_capped": spec(APART.formula.xreplace({X: 4 * tanh(scale * z / 4)}), "diagonal"),
    "nearer_by_guide": spec(
        mean_over_queries(
            softplus(
                logsumexp_over_keys(X, where=(1 - is_positive) * (1 - step(2 * guide - positive(guide) - 1)))
                - positive(X)
            )
        ),
        "diagonal",
    ),
    **SMOOTH,
    "smooth_keys_only": spec(mean_over_keys(_SMOOTH_KEYS), "diagonal"),
    "smooth_of_a_shifted_logit": spec(mean_over_queries(_SMOOTH) + mean_over_queries(mean_of_keys(X - scale))),
    "means_that_do_not_balance": spec(
        mean_over_queries(logsumexp_over_keys(X, where=1 - is_positive) - positive(X) + 2 * mean_of_keys(X) / 3)
    ),
    "hard_keys": OF_MULTIPLES["hard_keys"],
    "weighed_by_column": BY_COLUMN,
    "multiples_as_floats": spec(
        mean_over_queries(logsumexp_over_keys(0.7 * X) - logsumexp_over_keys(0.3 * X) - positive(X) / 5)
    ),
    "irrational": spec(INFONCE_OF(sympy.sqrt(scale) * z * sympy.pi)),
}

# Of one side: the positive in the sum, with weights that grow, and a margin, by which it is a term of its own.
X_OF_ROWS = scale * similarity("query", "query") + bias
_R, _P = logsumexp_over_keys(X_OF_ROWS, where=1 - is_self), positive(X_OF_ROWS)
_FARTHER = X_OF_ROWS - 0.3 * is_positive
_WEIGHED = exp(logsumexp_over_keys(X_OF_ROWS / 3, where=1 - is_self) / 2) / 2
_CAPPED = logsumexp_over_keys(
    20 * tanh(scale * similarity("query", "query") / 20) + bias, where=(1 - is_self) * (1 - is_positive)
)
_OTHERS = logsumexp_over_keys(X_OF_ROWS, where=(1 - is_self) * (1 - is_positive))
# A row counts for as much as the other row of its pair is wrong, whose own term it has a quarter of.
_WRONG, _OF_PARTNER = _OTHERS - _P, of_positive(_OTHERS) - _P
BY_PARTNER = spec(
    mean_over_queries(sigmoid(_OF_PARTNER) * softplus(_WRONG) + softplus(_OF_PARTNER) / 4), name="weighed_by_partner"
)
# Rows in pairs, of which sums leave pairs out: GTE's four blocks with Qwen3's threshold, the pair once; of a query all
# others; and NT-Xent with a threshold, its positive in the sum.
_ROW, _OTHER_ROW = similarity("query", "query"), (1 - is_self) * (1 - is_positive)
_NEAR, _NEARER = (step(_ROW - positive(_ROW) - margin) for margin in (EPS, sympy.Rational(1, 8)))


def _of_pair(kept: sympy.Expr) -> sympy.Expr:
    """-log of the pair's share in the sums of both rows, of those pairs alone that are `kept`."""
    others = logsumexp_over_keys(X_OF_ROWS, where=_OTHER_ROW * kept)
    own = _P + softplus(others - _P)
    return mean_over_queries(own + softplus(of_positive(others) - own) - _P)


IN_PAIRS = {
    "four_block_apart": spec(_of_pair(1 - _NEAR), name="four_block_apart"),
    "of_queries_alone": spec(_of_pair(is_first), name="of_queries_alone"),
    "near_rows": spec(
        mean_over_queries(logsumexp_over_keys(X_OF_ROWS, where=(1 - is_self) * (1 - _NEARER * (1 - is_positive))) - _P),
        name="near_rows",
    ),
}
OF_ROWS = {
    "rince_of_rows": spec(mean_over_queries(exp(_R / 2) / 5 - 2 * exp(_P / 2)), name="rince_of_rows"),
    "margin_of_rows": spec(
        mean_over_queries(logsumexp_over_keys(_FARTHER, where=1 - is_self) - positive(_FARTHER)), name="margin_of_rows"
    ),
    "weighed_of_rows": spec(mean_over_queries(_R + _WEIGHED - 3 * _P), name="weighed_of_rows"),
    "capped_of_rows": spec(
        mean_over_queries(softplus(_CAPPED - positive(scale * similarity("query", "query")))), name="capped_of_rows"
    ),
}
