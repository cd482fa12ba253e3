"""Losses of the tests, as a user's file has them."""

import dataclasses

from infcl_gen.losses import CLIP, INFONCE
from tests.losses.combinations import COMBINATIONS, spec_of
from tests.losses.specs import (
    APART,
    BY_ALL,
    BY_COLUMN,
    BY_PARTNER,
    DECOUPLED_CLIP,
    DERIVABLE,
    IN_PAIRS,
    NEAR_AND_IDS,
    OF_MULTIPLES,
    OF_ROWS,
    RATE,
    RATES_OF_SIDES,
    SIDES,
    SMOOTH,
    spec,
)

clip_without_ids = spec(DERIVABLE["clip_without_ids"].formula, "diagonal", "clip_without_ids")
infonce_without_ids = spec(DERIVABLE["infonce_without_ids"].formula, "label", "infonce_without_ids")
margin = spec(DERIVABLE["margin"].formula, "label", "margin")
decoupled_by_id = spec(DERIVABLE["decoupled_by_id"].formula, "diagonal", "decoupled_by_id")
angular = spec(DERIVABLE["angular_margin"].formula, "label", "angular")
siglip_of_distances = spec(DERIVABLE["siglip_of_distances"].formula, "diagonal", "siglip_of_distances")
siglip_labels = spec(DERIVABLE["siglip_labels"].formula, "label", "siglip_labels")
hard = spec(DERIVABLE["hard"].formula, "label", "hard")
weighed_sides, rates_of_sides, decoupled_clip = SIDES, RATES_OF_SIDES, DECOUPLED_CLIP
rate, weighed_by_all, weighed_by_partner, weighed_by_column = RATE, BY_ALL, BY_PARTNER, BY_COLUMN
near_and_ids, distill_apart = NEAR_AND_IDS, APART
rince_of_rows, margin_of_rows, weighed_of_rows, capped_of_rows = OF_ROWS.values()
four_block_apart, of_queries_alone, near_rows = IN_PAIRS.values()
squared_weights, hard_keys = OF_MULTIPLES.values()
smooth, smooth_clip, smooth_rince = SMOOTH.values()
clip_of_rows, smooth_of_rows = (dataclasses.replace(each, reduction="none") for each in (CLIP, SMOOTH["smooth"]))
siglip_of_rows, siglip_multi_of_rows, siglip_labels_of_rows, squares_by_id_of_rows = (
    dataclasses.replace(DERIVABLE[name], name=name, reduction="none")
    for name in ("siglip", "siglip_multi", "siglip_labels", "squares_by_id")
)

over = {16: 1.0, 32: 0.5, 48: 2.0}
clip_prefixes = dataclasses.replace(CLIP, prefixes=over)
infonce_prefixes = dataclasses.replace(INFONCE, prefixes=over)
clip_cosines_prefixes = dataclasses.replace(clip_prefixes, renormalise=True)
infonce_cosines_prefixes = dataclasses.replace(infonce_prefixes, renormalise=True)
clip_prefixes_of_rows, infonce_prefixes_of_rows, clip_cosines_prefixes_of_rows, infonce_cosines_prefixes_of_rows = (
    dataclasses.replace(loss, reduction="none")
    for loss in (clip_prefixes, infonce_prefixes, clip_cosines_prefixes, infonce_cosines_prefixes)
)
matryoshka = dataclasses.replace(CLIP, prefixes=(96, 192, 384, 768))
uneven_prefixes = dataclasses.replace(CLIP, prefixes={32: 1.0, 64: 0.5, 96: 2.0, 136: 1.0})  # two end in one stage
infonce_matryoshka = dataclasses.replace(INFONCE, prefixes=matryoshka.prefixes)
infonce_matryoshka_of_rows = dataclasses.replace(infonce_matryoshka, reduction="none")
matryoshka_cosines, uneven_cosines, infonce_matryoshka_cosines, infonce_uneven_cosines = (
    dataclasses.replace(loss, renormalise=True)
    for loss in (
        matryoshka, uneven_prefixes, infonce_matryoshka, dataclasses.replace(INFONCE, prefixes=uneven_prefixes.prefixes)
    )
)  # fmt: skip
two_cosines = dataclasses.replace(CLIP, prefixes={96: 2.0, 768: 1.0}, renormalise=True)
infonce_matryoshka_cosines_of_rows = dataclasses.replace(infonce_matryoshka_cosines, reduction="none")

globals().update({name: spec_of(one, name) for name, one in COMBINATIONS.items()})
