"""Planned steps on several ranks, under DDP and FSDP2: the gradients of the whole batch, and one synchronisation."""

from __future__ import annotations

import pytest
import torch

from infcl_gen.processes import run_ranks
from tests.tiers import combined, nightly

pytestmark = pytest.mark.usefixtures("forked")
CASES = [
    ("ddp", (7,), "mixture"),
    ("ddp", (7, 7), "cached"),
    ("ddp", (12, 5), "mixture"),
    ("ddp", (4, 0, 9), "mixture"),
    ("fsdp", (7,), "cached"),
    ("fsdp", (8, 8), "mixture"),
    ("fsdp", (8, 8), "checkpointed"),
    ("fsdp", (6, 6, 6), "cached"),
]


# Each way under a wrapper that treats it in its own way; one rank, two and three; uneven ones and one without rows.
CASES_OF_CI = [
    ("ddp", (7, 7), "cached"),
    ("ddp", (4, 0, 9), "mixture"),
    ("fsdp", (7,), "cached"),
    ("fsdp", (8, 8), "mixture"),
]


@pytest.mark.parametrize(("wrapper", "rows", "way"), nightly(CASES, CASES_OF_CI))
def test_gradients_are_those_of_the_whole_batch(
    wrapper: str, rows: tuple[int, ...], way: str, package_cache: str
) -> None:
    """Behind steps that were interrupted in the loss, in a first pass, and between second ones."""
    interrupts = [0, *[2] * (min(rows) > 0), *[-(-rows[0] // 3) + 2] * (way == "cached")]
    job = {"wrapper": wrapper, "rows": list(rows), "way": way, "cache": package_cache, "interrupts": interrupts}
    for answer in run_ranks("tests.step.ranks:step", job, len(rows), 120.0):
        assert max(answer["errors"]) < 1e-12 and max(answer["values"]) < 1e-12, answer
        assert answer["reductions"] == (len(rows) > 1) * (6 if wrapper == "fsdp" else 1)  # 5 blocks and the rest


@pytest.mark.gpu
@pytest.mark.parametrize(("wrapper", "rows", "way"), [case for case in CASES if len(case[1]) == 2])
def test_gradients_on_two_gpus_are_those_of_the_whole_batch(
    wrapper: str, rows: tuple[int, ...], way: str, package_cache: str
) -> None:
    """In fp32, over NCCL. The loss multiplies fp32 features as two halves each: 2^-17 of a product, of which 7 pairs
    leave 2e-5 of the smallest gradient."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, there are {torch.cuda.device_count()}")
    job = {"wrapper": wrapper, "rows": list(rows), "way": way, "cache": package_cache, "gpus": True}
    for answer in run_ranks("tests.step.ranks:step", job, 2, 120.0):
        assert max(answer["errors"]) < 5e-5 and max(answer["values"]) < 1e-5, answer
        assert answer["reductions"] == (6 if wrapper == "fsdp" else 1)


def test_uneven_micro_batches_under_fsdp2_are_refused_on_all_ranks(package_cache: str) -> None:
    """They would wait for one another for ever."""
    job = {"wrapper": "fsdp", "rows": [8, 5], "way": "cached", "cache": package_cache}
    message = "ranks pass image in 2 to 3 cached micro-batches; under FSDP2 all must pass equally many"
    assert all(message in answer["refused"] for answer in run_ranks("tests.step.ranks:step", job, 2, 60.0))


@pytest.mark.parametrize(("wrapper", "treatments"), combined(["ddp", "fsdp"], [["checkpointed"], ["cached"]]))
def test_ranks_of_a_group_draw_their_own_random_numbers(
    wrapper: str, treatments: list[str], package_cache: str
) -> None:
    job = {"wrapper": wrapper, "treatments": treatments, "cache": package_cache}
    for answer in run_ranks("tests.step.ranks:subgroup", job, 3, 60.0):
        assert answer["error"] < 1e-12


@pytest.mark.parametrize("wrapper", nightly(["ddp", "fsdp"], ["fsdp"]))
def test_a_scale_and_a_bias_in_no_module_are_averaged_in_the_group(wrapper: str, package_cache: str) -> None:
    for answer in run_ranks("tests.step.ranks:numbers", {"wrapper": wrapper, "cache": package_cache}, 3, 60.0):
        assert max(answer["errors"]) < 1e-12


FAILING = [(0, "cached"), (0, "kept"), (2, "cached"), (2, "kept"), (4, "cached")]


@pytest.mark.parametrize(("failure", "wrapper"), combined(FAILING, ["ddp", "fsdp"]))
def test_wrappers_reduce_as_before_behind_an_error(failure: tuple[int, str], wrapper: str, package_cache: str) -> None:
    """In the loss, in a first pass and in a second one: the user's own backward is averaged over ranks."""
    failing, way = failure
    job = {"wrapper": wrapper, "failing": failing, "way": way, "cache": package_cache}
    for answer in run_ranks("tests.step.ranks:after_error", job, 2, 60.0):
        assert answer["error"] < 1e-12
