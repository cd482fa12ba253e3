"""Losses of the tests from which negatives of the query's own id are left out."""

from tests.losses.specs import DERIVABLE, spec

clip_without_ids = spec(DERIVABLE["clip_without_ids"].formula, "diagonal", "clip_without_ids")
infonce_without_ids = spec(DERIVABLE["infonce_without_ids"].formula, "label", "infonce_without_ids")
