"""DCL of arXiv 2110.06848 as a loss of one's own: a query's positive and keys of its id are not in its sum."""

from infcl_gen.losses.language import (
    LossSpec,
    is_positive,
    logsumexp_over_keys,
    mean_over_queries,
    positive,
    same_id,
    scale,
    z,
)

x = scale * z
OTHERS = logsumexp_over_keys(x, where=(1 - is_positive) * (1 - same_id))
DECOUPLED = LossSpec("decoupled", mean_over_queries(OTHERS - positive(x)), "label")
