"""The kernels on a real GPU, with the tiles that are planned for it: the checks of tests/kernels, and more sizes.

Compilation takes most of the time: a package's tests stay in one process (pytest -n 8 --dist loadgroup).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from infcl_gen.planning.records import read_records
from infcl_gen.verification.properties import BIASES, FEATURES, LAYOUTS, SCALES, Case
from tests.kernels import checks, pieces
from tests.kernels.packages import Made, generated
from tests.tiers import examples

pytestmark = pytest.mark.gpu
RECORDS = Path(__file__).resolve().parents[2] / "tune" / "records"
ROWS = (1, 63, 64, 65, 100, 127, 129, 1000, 2049, 4097)


def planned(strategy: str, loss: str, dtype: str, dim: int, **settings: str) -> Made:
    named = tuple((key.replace("__", "."), value) for key, value in settings.items())
    return Made(strategy, loss, dtype, dim, rows=8192, small=False, settings=named)


PACKAGES = [
    planned("panel", "clip", "bf16", 768),
    planned("panel", "clip", "bf16", 384, products="triton"),
    planned("panel", "clip", "bf16", 96, descriptors="off"),
    planned("panel", "clip", "bf16", 1),
    planned("panel", "clip", "bf16", 72),
    planned("panel", "clip", "bf16", 256),  # hopper.py's kernels, where the GPU has them: these three
    planned("panel", "clip", "bf16", 200),
    planned("panel", "clip", "fp16", 144),
    dataclasses.replace(planned("panel", "clip", "bf16", 768), rows=1024),  # smaller tiles
    dataclasses.replace(planned("panel", "infonce", "fp32", 100), rows=1024),
    planned("panel", "clip", "fp16", 640),
    planned("panel", "clip", "fp16", 16),
    planned("panel", "clip", "fp32", 768),
    planned("panel", "clip", "fp32", 3),
    planned("panel", "clip", "fp32", 96, products="triton"),
    planned("panel", "infonce", "bf16", 1152),
    planned("panel", "infonce", "bf16", 100),
    planned("panel", "infonce", "fp16", 768),
    planned("panel", "infonce", "fp32", 96),
    planned("panel", "infonce", "fp32", 1152),
    planned("fused", "clip", "bf16", 64),
    planned("fused", "clip", "bf16", 3),
    planned("fused", "clip", "fp16", 96),
    planned("fused", "clip", "bf16", 256),
    planned("fused", "infonce", "bf16", 100),
    planned("fused", "infonce", "fp16", 16),
    planned("fused", "infonce", "bf16", 128),
    planned("stash", "clip", "bf16", 768),
    planned("stash", "clip", "bf16", 100),
    planned("stash", "infonce", "bf16", 384),
    planned("panel", "siglip", "bf16", 768),
    planned("panel", "siglip", "fp16", 96),
    planned("panel", "siglip", "fp32", 100),
    planned("panel", "siglip_multi", "bf16", 200),
    planned("panel", "clip_without_ids", "bf16", 768),
    planned("panel", "infonce_without_ids", "fp32", 96),
    planned("rows", "infonce", "bf16", 768),
    planned("rows", "infonce", "bf16", 100),
    planned("rows", "infonce", "bf16", 64),
]
COMBINED = [  # whose queries have weights
    planned("panel", "rince", "bf16", 64),
    planned("panel", "margin", "fp32", 96),
    planned("rows", "rince", "bf16", 64),
]
PACKAGES += COMBINED
PACKAGES += [planned(*each) for each in (("panel", "decoupled_by_id", "bf16", 768), ("panel", "hard", "bf16", 768))]
PACKAGES += [planned("rows", "hard", "bf16", 64), planned("panel", "ntxent", "bf16", 768)]
PACKAGES += [planned("panel", "supcon_out", "bf16", 768), planned("panel", "supcon_in", "bf16", 96)]
PACKAGES += [planned("panel", "distill", "bf16", 768), planned("panel", "distill", "fp32", 96)]
PACKAGES += [planned("panel", "gist", "bf16", 768), planned("panel", "near_and_ids", "bf16", 96)]
PACKAGES += [planned("panel", "infonce_in", "fp32", 96), planned("panel", "infonce_out", "fp16", 40)]
PACKAGES += [planned("panel", "hard_negative", "bf16", 768), planned("panel", "hard_negative", "fp32", 96)]
PACKAGES += [planned("panel", "hard_keys", "bf16", 96), planned("panel", "dclw", "bf16", 768)]
PACKAGES += [planned("panel", "four_block", "bf16", 768), planned("panel", "weighed_by_partner", "fp32", 96)]
PACKAGES += [planned("panel", "three_block", "bf16", 768), planned("panel", "three_block_hard", "bf16", 768)]
PACKAGES += [planned("panel", "near_rows", "fp32", 96)]
PACKAGES += [planned("panel", "mil_nce", "bf16", 768), planned("panel", "weighed_by_column", "fp32", 96)]
PACKAGES += [planned("panel", "mil_nce_multi", "bf16", 768), planned("panel", "mil_nce_multi", "fp32", 96)]
PACKAGES += [planned("panel", "weighed_sides", "bf16", 768), planned("panel", "weighed_sides", "fp32", 96)]
OF_ROWS = [planned("panel", "clip_of_rows", "bf16", 768), planned("panel", "smooth_of_rows", "fp32", 96)]
PACKAGES += OF_ROWS
SMOOTH = [planned(way, "smooth_clip", "bf16", 64) for way in ("panel", "fused", "stash")]
SMOOTH += [planned("rows", "smooth", "bf16", 64), planned("panel", "smooth_clip", "fp32", 96)]
PACKAGES += SMOOTH
PACKAGES += [planned("panel", "matryoshka", "bf16", 768), planned("panel", "uneven_prefixes", "fp16", 136)]
PACKAGES += [planned("panel", "infonce_matryoshka", "bf16", 768)]
PACKAGES += [planned("panel", f"clip_{of}prefixes_of_rows", "bf16", 48) for of in ("", "cosines_")]
PACKAGES += [planned("panel", "infonce_matryoshka_of_rows", "bf16", 768)]
COSINES = [planned("panel", "matryoshka_cosines", "bf16", 768), planned("panel", "uneven_cosines", "bf16", 136)]
COSINES += [planned("panel", "infonce_matryoshka_cosines", "bf16", 768), planned("panel", "two_cosines", "bf16", 768)]
COSINES += [planned("panel", "infonce_uneven_cosines", "bf16", 136)]
PACKAGES += [*COSINES, planned("panel", "infonce_matryoshka_cosines_of_rows", "bf16", 768)]
PACKAGES += [planned("rows", "cwcl", "bf16", 64), planned("panel", "cwcl", "fp32", 96)]


def tuned() -> list[Made]:
    """The kernels of each committed record, in packages of a size that can be checked."""
    found = []
    for file in sorted(RECORDS.glob("*.json")):
        for key, settings, families in ((r.key, r.settings, r.families) for r in read_records(file)):
            if settings:  # else they are those of the table, which are here anyway
                strategy = "fused" if "fused" in families else "panel"
                made = Made(strategy, key.loss, key.dtype, key.dim, 8192, False, settings, key.precision)
                found.append(dataclasses.replace(made, profile=key.board))
    return found


TUNED = tuned()
PACKAGES += TUNED
ONE_OF_EACH = [
    *TUNED,
    planned("panel", "clip", "bf16", 64),
    planned("panel", "clip", "bf16", 192),  # more than one step; on Hopper hopper.py's kernels
    planned("panel", "infonce", "fp32", 64),
    planned("fused", "clip", "bf16", 64),
    planned("fused", "infonce", "fp16", 64),
    planned("stash", "clip", "bf16", 64),
    planned("rows", "infonce", "bf16", 64),
]


def grouped(packages: list[Made], *more: Any) -> list[Any]:
    """Parameters (made, *more), each package in an xdist group of its own."""
    found = []
    for made in packages:
        words = [made.strategy, made.loss, made.dtype, str(made.dim), *(value for _, value in made.settings)]
        words += [f"of-{made.rows}"] if made.rows != 8192 else []
        name = "-".join(words)
        found.append(pytest.param(made, *more, id=name, marks=pytest.mark.xdist_group(name)))
    return found


CASES = st.builds(
    Case,
    queries=st.sampled_from(ROWS),
    keys=st.sampled_from(ROWS),
    dim=st.just(0),
    scale=st.sampled_from(SCALES),
    bias=st.sampled_from(BIASES),
    features=st.sampled_from(FEATURES),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**31),
)


@pytest.mark.parametrize("made", grouped(PACKAGES))
@examples(ci=8, long=200)
@hypothesis.given(case=CASES)
def test_as_accurate_as_the_dtypes_allow(made: Made, case: Case) -> None:
    fitting = dataclasses.replace(case, queries=min(case.queries, made.rows), keys=min(case.keys, made.rows))
    checks.numerics(made, fitting, "cuda")


@pytest.mark.parametrize("made", grouped(COSINES))
def test_positives_behind_the_last_key(made: Made) -> None:
    checks.positives_behind_the_last_key(made, "cuda")


@pytest.mark.parametrize("made", grouped(OF_ROWS))
def test_losses_of_single_queries(made: Made) -> None:
    checks.losses_of_rows(made, "cuda")


def test_sums_of_several_ranks() -> None:
    made = planned("panel", "clip", "bf16", 64, transport="gather")
    checks.merged_ranks(dataclasses.replace(made, devices=4), "cuda")


def test_large_logits_of_one_key() -> None:
    checks.one_large_key(planned("panel", "siglip", "bf16", 64), "cuda")


def test_sizes_of_logits() -> None:
    pieces.sizes_of_logits(planned("panel", "siglip", "bf16", 512), "cuda")
    pieces.sizes_handed_on(planned("panel", "siglip", "bf16", 64), "cuda")


@pytest.mark.parametrize("made", grouped(ONE_OF_EACH))
def test_solved_batches_and_large_logits(made: Made) -> None:
    checks.solved(made, "cuda")
    if made.dtype != "fp16":  # whose gradients overflow
        checks.large_logits(made, "cuda")


@pytest.mark.parametrize("made", grouped([planned("panel", "matryoshka", "bf16", 768), COSINES[0]]))
def test_solved_batches_of_prefixes(made: Made) -> None:
    """Kernels for Hopper give positives the terms that entered the sums, too."""
    checks.solved(made, "cuda")


@pytest.mark.parametrize("made", grouped(ONE_OF_EACH))
def test_every_ragged_size_amid_nan(made: Made) -> None:
    made = dataclasses.replace(made, settings=(*made.settings, ("replay", "off")))  # a graph's buffers are not seen
    checks.guarded(made, [(n, 131 - n) for n in range(1, 131)], device="cuda")
    checks.guarded(made, [(1000, 777), (129, 260)], 1000.0, device="cuda")


@pytest.mark.parametrize("made", grouped(ONE_OF_EACH))
def test_not_finite_in_not_finite_out(made: Made) -> None:
    for which in ("q", "k"):
        for value in (math.nan, math.inf, -math.inf):
            checks.not_finite(made, which, value, "cuda")
    for which in ("scale", "bias"):
        for value in (math.nan, math.inf, -math.inf):
            checks.not_finite_scalar(made, which, value, "cuda")


@pytest.mark.parametrize("made", grouped([*ONE_OF_EACH, *COMBINED, *SMOOTH, planned("panel", "siglip", "bf16", 64)]))
def test_the_same_bits_on_100_repeats(made: Made) -> None:
    checks.repeatable(made, Case(2049, 1000, 0, scale=14.3, bias=-1.0, seed=1), 100, "cuda")


@pytest.mark.parametrize("made", grouped([*ONE_OF_EACH, *SMOOTH, planned("panel", "siglip", "bf16", 64)]))
def test_graphs_and_no_waiting(made: Made) -> None:
    checks.captured(made)


@pytest.mark.parametrize("made", grouped(ONE_OF_EACH + COMBINED + SMOOTH))
def test_recorded_graphs_give_the_same_bits(made: Made) -> None:
    checks.recorded(made)


@pytest.mark.parametrize("made", grouped([planned("panel", "clip", "fp32", 768)]))
def test_fp32_is_nearly_exact(made: Made) -> None:
    checks.near_exact(made, 8192)


@pytest.mark.parametrize("made", grouped(ONE_OF_EACH))
def test_the_rest(made: Made) -> None:
    for scale in (0.0, -14.3, -1000.0):
        checks.numerics(made, Case(300, 300, 0, scale=scale, features="unnormalised"), "cuda")
    checks.upstream(made, "cuda")
    checks.autocast(made, "cuda")
    checks.refuses_no_rows(made, "cuda")
    if made.dtype != "fp32":
        checks.autocast_of_wider_features(made, "cuda")
        checks.accumulators(made, "cuda")
    if made.dtype == "fp16" and made.loss == "infonce":
        checks.small_probabilities(made, "cuda")


@pytest.mark.parametrize("strategy", ["panel", "stash"])
@pytest.mark.xdist_group("large")
def test_several_planned_panels(strategy: str) -> None:
    """The same at a size that takes more than one panel of each sweep."""
    settings = (("panel_rows", "4096"), ("panel_keys", "4096"))
    made = Made(strategy, "clip", "bf16", 768, rows=16384, small=False, settings=settings)
    checks.numerics(made, Case(10001, 10001, 0, scale=14.3, layout="sliced"), "cuda")


@pytest.mark.xdist_group("large")
def test_several_rows_of_panels() -> None:
    made = Made("rows", "infonce", "bf16", 768, rows=16384, small=False, settings=(("panel_rows", "4096"),))
    for scale, features in ((14.3, "unit"), (100.0, "matched"), (1000.0, "unnormalised")):
        checks.numerics(made, Case(10001, 12007, 0, scale=scale, features=features, layout="sliced"), "cuda")
    checks.begun_rows(made, "cuda")


@pytest.mark.parametrize("made", ONE_OF_EACH, ids=lambda made: f"{made.strategy}-{made.loss}-{made.dtype}")
@pytest.mark.xdist_group("large")
def test_offsets_beyond_31_bits(made: Made) -> None:
    checks.far_rows(made, "cuda")


@pytest.mark.parametrize("made", [planned("panel", "clip", "bf16", 1024)], ids=["panel"])
@pytest.mark.xdist_group("large")
def test_more_elements_than_31_bits(made: Made) -> None:
    checks.far_accumulators(made)


PLANTED: list[str] = [  # those that stay within the memory of the process, and what only a GPU shows
    "zero padding takes part in the running maximum",
    "tiles with a wide spread are not computed again in the forward",
    "tiles with a wide spread are not computed again in the backward",
    "programs with a wide spread are not computed again",
    "a NaN is swallowed by the tiles",
    "the positive's logit is rounded to bf16",
    "32-bit offsets in tiles",
    "32-bit offsets of accumulators in finish",
    "32-bit offsets of accumulators in the product",
    "tf32 products of fp32 features",
    "a recorded backward takes what another forward has left",
    "a recorded result is overwritten by the next call",
]


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.xdist_group("large")
def test_a_planted_bug_is_noticed(name: str) -> None:
    from tests.kernels.planted import BUGS

    bug = BUGS[name]
    planted = dataclasses.replace(bug.made, bug=name)
    generated(planted)  # or the check would fail for want of the text to edit
    bug.check(bug.made, *bug.arguments, "cuda")
    with pytest.raises(AssertionError, match=bug.says or None):
        bug.check(planted, *bug.arguments, "cuda")
