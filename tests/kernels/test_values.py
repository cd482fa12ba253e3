"""What is not finite stays so, equal inputs give equal bits, and the interface has its edges, on every strategy."""

from __future__ import annotations

import math

import pytest

from infcl_gen.verification.properties import Case
from tests.kernels import checks
from tests.kernels.packages import Made
from tests.kernels.worker import Interpreter
from tests.tiers import LONG, combined, nightly

EACH = [Made(strategy, loss) for strategy in ("panel", "fused", "stash") for loss in ("clip", "infonce")] + [
    Made("rows", "infonce")
]
EACH += [Made("panel", dtype="fp32"), Made("rows", "smooth"), Made("panel", "smooth_clip")]
OF_CI = [EACH[place] for place in (0, 2, 4, 6, 7, 9)]  # of each strategy, of halves and of means one
CPU = [Made("torch", loss, dtype) for loss, dtype in combined(("clip", "infonce", "smooth"), ("bf16", "fp32", "fp64"))]


def named(made: Made) -> str:
    return f"{made.strategy}-{made.loss}-{made.dtype}"


NOT_FINITE = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("made", nightly(EACH, OF_CI), ids=named)
def test_not_finite_in_not_finite_out(interpreted: Interpreter, made: Made) -> None:
    """In CI each value in either side of one package, of others NaN in one side and an infinity in the other."""
    number = 0 if LONG else OF_CI.index(made)
    for side, which in enumerate(("q", "k")):
        few = (math.nan,) if number % 2 == side else ((-1.0) ** (number // 2) * math.inf,)
        for value in NOT_FINITE if LONG or not number else few:
            interpreted(checks.not_finite, made, which, value)
    for which in ("scale", "bias") if LONG or not number else (("scale", "bias")[number % 2],):
        for value in NOT_FINITE if LONG or not number else (math.nan if which == "bias" else math.inf,):
            interpreted(checks.not_finite_scalar, made, which, value)


@pytest.mark.parametrize("made", nightly(EACH, OF_CI), ids=named)
def test_the_same_bits_on_every_repeat(interpreted: Interpreter, made: Made) -> None:
    """In CI autograd is the one repeat."""
    interpreted(checks.repeatable, made, Case(100, 91, 0, scale=14.3, bias=-1.0, seed=1), 5 if LONG else 0)


@pytest.mark.parametrize("made", CPU, ids=named)
def test_the_same_bits_on_many_repeats_of_the_cpu_target(made: Made) -> None:
    """100 times one package in CI, the others ten times."""
    repeats = 100 if LONG or made == CPU[1] else 10
    checks.repeatable(made, Case(129, 127, 0, scale=14.3, bias=-1.0, seed=1), repeats)


@pytest.mark.parametrize("made", nightly(EACH, OF_CI), ids=named)
def test_offsets_beyond_31_bits(interpreted: Interpreter, made: Made) -> None:
    interpreted(checks.far_rows, made)


@pytest.mark.parametrize("made", EACH[::2], ids=named)
def test_interface_of_the_kernels(interpreted: Interpreter, made: Made) -> None:
    interpreted(checks.upstream, made)
    interpreted(checks.refuses_no_rows, made)
    interpreted(checks.second_derivative, made)
    if made.dtype != "fp32":
        interpreted(checks.autocast_of_wider_features, made)


def test_features_that_a_transform_has_left(interpreted: Interpreter) -> None:
    interpreted(checks.left_of_a_transform, Made("panel", settings=(("replay", "off"),)))


def test_split_products_in_parts(interpreted: Interpreter) -> None:
    interpreted(checks.split_products_in_parts, Made("panel", dtype="fp32"))


# Narrow and wide features in halves or not, and prefixes.
RESTS = [Made("panel"), Made("panel", dtype="fp32"), Made("panel", dim=64), Made("panel", "clip_prefixes", dim=48)]


@pytest.mark.parametrize("made", nightly(RESTS, RESTS[1:]), ids=named)
def test_extents_that_the_matrix_library_is_slow_or_wrong_at(interpreted: Interpreter, made: Made) -> None:
    interpreted(checks.library_rests, made)


ON_HOPPER = ["clip", "uneven_prefixes", "uneven_cosines", "infonce_uneven_cosines"]


@pytest.mark.parametrize("loss", nightly(ON_HOPPER, ["clip", *ON_HOPPER[2:]]))
def test_what_the_kernels_for_hopper_are_given(interpreted: Interpreter, loss: str) -> None:
    interpreted(checks.hopper_arguments, Made("panel", loss, dim=136, rows=8192, small=False))


@pytest.mark.parametrize("made", CPU, ids=named)
def test_the_cpu_target(made: Made) -> None:
    for which in ("q", "k"):
        for value in (math.nan, math.inf, -math.inf):
            checks.not_finite(made, which, value)
    for which in ("scale", "bias"):
        for value in (math.nan, math.inf, -math.inf):
            checks.not_finite_scalar(made, which, value)
    checks.far_rows(made)
    checks.autocast(made)
    if made.dtype in ("bf16", "fp16"):
        checks.autocast_of_wider_features(made)
    checks.refuses_no_rows(made)
    for scale in (0.0, -14.3, -1000.0):
        checks.numerics(made, Case(65, 63, 0, scale=scale))


@pytest.mark.parametrize(("dtype", "dim"), [("bf16", 100), ("fp32", 3)])
def test_what_a_recording_reads(interpreted: Interpreter, dtype: str, dim: int) -> None:
    interpreted(checks.copied_inputs, Made("panel", dtype=dtype, dim=dim))


@pytest.mark.parametrize("strategy", ["panel", "fused"])
def test_sums_of_several_ranks(interpreted: Interpreter, strategy: str) -> None:
    interpreted(checks.merged_ranks, Made(strategy, settings=(("transport", "gather"),), devices=4))


def test_sums_of_several_ranks_of_the_cpu_target() -> None:
    checks.merged_ranks(Made("torch"))


RECORDED = [
    *(("panel", loss) for loss in ("clip", "rince", "margin", "smooth_clip")), ("fused", "clip"), ("stash", "clip"),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "loss"), nightly(RECORDED, [("panel", "rince"), ("fused", "clip")]))
def test_a_backward_finds_its_own_forward_in_a_recording(interpreted: Interpreter, strategy: str, loss: str) -> None:
    interpreted(checks.found_in_a_recording, Made(strategy, loss))


@pytest.mark.parametrize("strategy", ["panel", "fused"])
def test_labels_of_any_stride(interpreted: Interpreter, strategy: str) -> None:
    interpreted(checks.strided_labels, Made(strategy, "infonce"))
