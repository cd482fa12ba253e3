"""DCL and DCLW of arXiv 2110.06848 as losses of one's own: a query's positive and keys of its id are not in its sum.

Weights of positives are constants, as lightly has them.
"""

from infcl_gen.losses.language import (
    LossSpec,
    detach,
    exp,
    is_positive,
    logsumexp_over_all_positives,
    logsumexp_over_keys,
    mean_over_queries,
    positive,
    queries,
    same_id,
    scale,
    z,
)

x = scale * z
OTHERS = logsumexp_over_keys(x, where=(1 - is_positive) * (1 - same_id))
DECOUPLED = LossSpec("decoupled", mean_over_queries(OTHERS - positive(x)), "label")
near = positive(z) / 0.5
WEIGHT = detach(2 - queries * exp(near - logsumexp_over_all_positives(near)))
DECOUPLED_WEIGHTED = LossSpec("decoupled_weighted", mean_over_queries(OTHERS - WEIGHT * positive(x)), "label")
