"""GISTEmbedLoss with a margin of a quarter, as a user's file has it."""

from infcl_gen.losses.language import (
    LossSpec,
    guide,
    is_positive,
    logsumexp_over_keys,
    mean_over_queries,
    positive,
    scale,
    step,
    z,
)

left_out = step(guide - positive(guide) + 0.25) * (1 - is_positive)
MARGIN = LossSpec("margin", mean_over_queries(logsumexp_over_keys(scale * z, where=1 - left_out) - positive(scale * z)))
