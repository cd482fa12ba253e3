"""The traits of losses: all that the rest of the generator knows of a formula."""

import pytest

from infcl_gen.losses import BUILTIN_LOSSES, derive
from infcl_gen.runtime.traits import Traits
from tests.losses.specs import DERIVABLE

NONE, IDS = (), ("same_id",)
GUIDED = ("logsumexp", "mean_by_guide")
EXPECTED = {
    "clip": Traits(),
    "infonce": Traits(key_statistics=NONE, known="row", positives="label"),
    "weighted_sides": Traits(),
    "keys_only": Traits(query_statistics=NONE),
    "soft_capped": Traits(key_statistics=NONE, known="row", positives="label", affine=False, strips=2),
    "squared": Traits(key_statistics=NONE, known="row", positives="label", affine=False, strips=3),
    "no_scale": Traits(key_statistics=NONE, known="row", positives="label"),
    "smooth": Traits(key_statistics=NONE, known="row", positives="label", means=True),
    "smooth_clip": Traits(means=True),
    "siglip": Traits(query_statistics=NONE, key_statistics=NONE, known="before", softplus=True, strips=4),
    "siglip_focal": Traits(query_statistics=NONE, key_statistics=NONE, known="before", strips=5),
    "siglip_multi": Traits(
        query_statistics=NONE, key_statistics=NONE, known="before", positives="id", classes=IDS, softplus=True, strips=6
    ),
    "siglip_without_ids": Traits(
        query_statistics=NONE, key_statistics=NONE, known="before", classes=IDS, softplus=True, strips=4
    ),
    "clip_without_ids": Traits(classes=IDS, strips=1),
    "ntxent": Traits(key_statistics=NONE, positives="label", domain="triangle"),
    "dcl": Traits(
        key_statistics=NONE, positives="label", combined=True, held=14, classes=("positive",), domain="triangle"
    ),
    "dclw": Traits(
        key_statistics=NONE,
        positives="label",
        combined=True,
        held=19,
        classes=("positive",),
        pooled=9,
        domain="triangle",
    ),
    "weighed_by_all": Traits(
        query_statistics=("logsumexp", "logsumexp_of_multiple"),
        key_statistics=NONE,
        positives="label",
        combined=True,
        vectors=("query_weight",),
        held=34,
        strips=2,
        pooled=11,
    ),
    "debiased": Traits(
        key_statistics=NONE, positives="label", combined=True, held=24, classes=("positive",), domain="triangle"
    ),
    "hard_negative": Traits(
        query_statistics=("logsumexp", "logsumexp_of_multiple"),
        key_statistics=NONE,
        positives="label",
        combined=True,
        held=32,
        classes=("positive",),
        strips=2,
        domain="triangle",
    ),
    "four_block": Traits(
        query_statistics=("logsumexp", "logsumexp_of_positive"),
        key_statistics=NONE,
        positives="label",
        combined=True,
        held=19,
        domain="triangle",
    ),
    "three_block": Traits(
        query_statistics=("logsumexp", "logsumexp_of_positive"),
        key_statistics=NONE,
        positives="label",
        combined=True,
        held=25,
        classes=("positive", "above", "second_first"),
        strips=1,
        domain="triangle",
    ),
    "three_block_hard": Traits(
        query_statistics=("logsumexp", "logsumexp_of_positive"),
        key_statistics=NONE,
        positives="label",
        combined=True,
        vectors=("negatives",),
        held=34,
        classes=("positive", "above", "second_first"),
        strips=1,
        domain="triangle",
    ),
    "mil_nce": Traits(
        query_statistics=("logsumexp", "logsumexp_of_column"), combined=True, held=26, classes=("positive",)
    ),
    "sogclr_clip": Traits(
        query_statistics=("logsumexp", "logsumexp_of_column"),
        combined=True,
        vectors=("query_state", "key_state"),
        held=41,
        classes=("positive",),
    ),
    "mil_nce_multi": Traits(
        query_statistics=("logsumexp", "logsumexp_of_column", "logsumexp_over_positives"),
        positives="id",
        combined=True,
        held=24,
        classes=IDS,
        strips=3,
    ),
    "supcon_out": Traits(
        query_statistics=("logsumexp", "mean_over_positives"),
        key_statistics=NONE,
        positives="id",
        combined=True,
        even=True,
        held=18,
        classes=IDS,
        strips=2,
        domain="triangle",
    ),
    "infonce_in": Traits(
        query_statistics=("logsumexp", "logsumexp_over_positives"),
        key_statistics=NONE,
        known="row",
        positives="id",
        combined=True,
        even=True,
        held=18,
        classes=IDS,
        strips=3,
    ),
    "distill": Traits(
        query_statistics=("logsumexp", "mean_by_guide"),
        key_statistics=NONE,
        known="row",
        positives="none",
        combined=True,
        held=18,
    ),
    "distill_both": Traits(query_statistics=GUIDED, key_statistics=GUIDED),
    "distill_clip": Traits(query_statistics=GUIDED, key_statistics=GUIDED),
    "gist": Traits(key_statistics=NONE, known="row", classes=("above_by_guide",), strips=1),
    "near_and_ids": Traits(key_statistics=NONE, known="row", classes=("same_id", "above"), strips=1),
    "infonce_without_ids": Traits(key_statistics=NONE, known="row", positives="label", classes=IDS, strips=1),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_traits_follow_from_the_formula(name: str) -> None:
    assert derive({**DERIVABLE, **BUILTIN_LOSSES}[name]).traits == EXPECTED[name]
