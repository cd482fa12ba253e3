"""Forty losses that combine what the language offers, each beside plain torch over all pairs.

See tests.losses.combinations. CI takes ten on the CPU target and over ranks, and four in the interpreter; the nightly
tier takes all, and so does a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from infcl_gen.emission import import_package
from infcl_gen.losses import LossError, derive
from infcl_gen.processes import Seat, run_ranks
from infcl_gen.runtime.selftest import product_roundoff
from infcl_gen.verification import gate as gates
from infcl_gen.verification.oracle import LossAndGrads
from infcl_gen.verification.properties import DTYPES
from tests.kernels.packages import Made, generated, module
from tests.kernels.worker import Interpreter
from tests.losses.combinations import (
    COMBINATIONS,
    NUMBERS,
    REFUSED,
    SHARP,
    Combination,
    assert_same,
    batch,
    gradients_of,
    leaves_of,
    placed,
    refusals,
    spec_of,
    truth_of,
)
from tests.tiers import LONG

DIM = 8
EXACT = 1e-12
TIMEOUT_S = 240.0
NAMES = list(COMBINATIONS)
AFFINE = [name for name, one in COMBINATIONS.items() if not one.capped]  # others have no kernels
FIRST_AFFINE = [
    next(name for name in AFFINE if name.startswith(form)) for form in ("queries", "both", "triangle", "pairs")
]
WORLDS = {
    1: ([97], [97]),
    2: ([33, 40], [65, 30]),
    3: ([70, 0, 27], [30, 66, 34]),
    4: ([1, 40, 0, 66], [50, 0, 41, 45]),
}


def test_draws_cover_the_options() -> None:
    """Also the ten of CI; what is refused is counted apart from the forty."""
    assert (len(COMBINATIONS), len(REFUSED)) == (40, 20)
    assert all(map(refusals, REFUSED)) and not any(map(refusals, COMBINATIONS.values()))
    assert len({one.form for one in COMBINATIONS.values() if one.smoothed}) == 2
    for drawn in (NAMES[:10], NAMES):
        assert any(COMBINATIONS[name].smoothed for name in drawn)
        assert {COMBINATIONS[name].tempered for name in drawn} == {"", "queries", "both"}
        assert any(COMBINATIONS[name].above for name in drawn)
        ones = [COMBINATIONS[name] for name in drawn]
        assert any(one.coupled for one in ones) and any(one.crossed for one in ones)
        assert {one.pooled for one in ones} == {"", "similarity", "logit"}
        assert len({one.form for one in ones}) == 4 and len({one.temperature for one in ones}) == 3
        assert len({one.mask for one in ones}) >= 3 and len({one.term for one in ones}) >= 3
        assert any(one.margin for one in ones) and any(one.weighted for one in ones) and any(one.hard for one in ones)
        assert any(one.weighted and one.form == "both" for one in ones)
        assert len({one.form for one in ones if one.reduction == "none"}) >= 2
    every = [dataclasses.astuple(one) for one in COMBINATIONS.values()]
    assert [len(set(values)) for values in zip(*every, strict=True)] == [
        4, 4, 3, 2, 2, 3, 4, 2, 4, 2, 2, 3, 2, 4, 2, 3, 2, 3, 2, 3
    ]  # fmt: skip


@pytest.mark.parametrize("one", REFUSED, ids=lambda one: one.form)
def test_what_has_no_kernel_is_refused_by_name(one: Any) -> None:
    with pytest.raises(LossError) as error:
        derive(spec_of(one, "mine"))
    said = str(error.value)
    assert "\n" not in said and any(text in said for text in refusals(one)), f"{refusals(one)}: {said}"


def exact(name: str, seed: int, device: str = "cpu") -> None:
    """In fp64: loss and all gradients, with the options of the combination."""
    one, package = COMBINATIONS[name], module(Made("torch", name, "fp64", DIM))
    given = placed(batch(one, seed, DIM), device)
    found = gradients_of(package, one, leaves_of(given, torch.float64, torch.float64, device))
    assert_same(one, found, *truth_of(one, given), EXACT)


def test_what_differs_is_noticed() -> None:
    """Any of the results, by 1e-11 of it; a gradient of the wrong side that is frozen; the mean for a sum."""
    name = next(name for name, one in COMBINATIONS.items() if one.weighted and one.hard and not one.frozen)
    one = dataclasses.replace(COMBINATIONS[name], reduction="mean")
    truth, sizes = truth_of(one, batch(one, 1, DIM))
    assert_same(one, truth, truth, sizes, EXACT)
    for place in (0, 1, 2, 3, 4, 5, 7):
        wrong, size = list(truth), sizes[place]
        wrong[place] = truth[place] + 1e-11 * size * torch.ones_like(truth[place]) / truth[place].numel() ** 0.5
        with pytest.raises(AssertionError, match=r"is off by 1\.0e-11"):
            assert_same(one, wrong, truth, sizes, EXACT)
        wrong[place] = None
        with pytest.raises((AssertionError, AttributeError)):
            assert_same(one, wrong, truth, sizes, EXACT)
    with pytest.raises(AssertionError, match="loss is off by"):
        assert_same(dataclasses.replace(one, reduction="sum"), truth, truth, sizes, EXACT)


@pytest.mark.parametrize("name", NAMES if LONG else NAMES[:10])
def test_in_fp64(name: str) -> None:
    for seed in range(5 if LONG else 1):
        exact(name, seed)


def judged(made: Made, seed: int, device: str = "cpu") -> None:
    """The numerics gate, with the truth and plain torch of the tests; queries' own numbers within a few roundings."""
    one, package = dataclasses.replace(COMBINATIONS[made.loss], reduction="mean", grad_sync="mean"), module(made)
    features, numbers = DTYPES[made.dtype], torch.promote_types(DTYPES[made.dtype], torch.float32)
    given = placed(batch(one, seed, made.dim, dtype=features), device)
    truth, plain = truth_of(one, given)[0], truth_of(one, given, numbers, features)[0]
    ours = gradients_of(package, dataclasses.replace(one, frozen=""), leaves_of(given, numbers, features, device))
    bounds = gates.truth_of(package, placed(given, device, features))
    rows = gates.gate(
        LossAndGrads(*ours[:5]),
        dataclasses.replace(bounds, reference=LossAndGrads(*truth[:5]), plain=LossAndGrads(*plain[:5])),
    )
    assert not gates.failures(rows), f"{made.loss}, seed {seed}: {gates.failures(rows)}"
    # A logit is SHARP times a product; the interpreter cuts the halves of fp32 where GPUs round.
    allowed = 2 * torch.finfo(features).eps + 8 * SHARP * product_roundoff(
        features, False, package.SPEC["plan"]["split"]
    )
    for what, found, true in zip(NUMBERS, ours[5:], truth[5:], strict=True):
        error = 0.0 if true is None else float((found.double() - true).norm() / true.norm())
        assert error < allowed, f"{made.loss}, seed {seed}: of {what} off by {error:.1e}, not {allowed:.1e}"


@pytest.mark.parametrize("name", NAMES if LONG else FIRST_AFFINE)
def test_in_fp32(name: str) -> None:
    judged(Made("torch", name, "fp32", DIM), 1)


@pytest.mark.parametrize("name", AFFINE if LONG else FIRST_AFFINE)
def test_kernels_in_the_interpreter(interpreted: Interpreter, name: str) -> None:
    for dtype in ("bf16", "fp32") if LONG else ("bf16",):
        interpreted(judged, Made("panel", name, dtype, 16), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str) -> None:
    """All of them: what has no kernels as plain torch on the device."""
    exact(name, 1, "cuda")
    for dtype in ("bf16", "fp32") if name in AFFINE else ():
        made = Made("auto", name, dtype, 64, rows=1024, small=False)
        judged(made, 1, "cuda")
        judged(made, 2, "cuda")


def run_rank(job: dict[str, Any], seat: Seat) -> list[list[Any]]:
    """The task of each rank: its part of each batch, by the options of the combination."""
    seat.join_group("cpu", TIMEOUT_S)
    found = []
    for name, folder in job["packages"].items():
        one = COMBINATIONS[name]
        package: Any = import_package(Path(folder), f"ranks_{name}")
        shards = shards_of(one, job["rows"], job["keys"])
        own = [slice(sum(sizes[: seat.rank]), sum(sizes[: seat.rank + 1])) for sizes in shards]
        for seed in job["seeds"]:
            part = batch(one, seed, DIM, shards).of_rank(*own)
            results = gradients_of(package, one, leaves_of(part, torch.float64, torch.float64))
            found.append([x if x is None else x.tolist() for x in results])
    return found


def shards_of(one: Combination, rows: list[int], keys: list[int]) -> tuple[list[int], list[int]]:
    """Rows and keys of each rank: a rank's positives are its own first keys, or its rows are pairs of views."""
    plain = one.term == "plain" and one.mask in ("", "same_id") and one.reduction != "none" and not one.weighted
    if one.form == "triangle" or one.above or one.crossed or (one.form == "both" and not plain):
        rows = [2 * (n // 2) for n in rows] if one.positives == "own" or one.coupled else rows
        return rows, rows
    if one.positives == "own":
        return [min(pair) for pair in zip(rows, keys, strict=True)], keys
    if one.positives == "diagonal":  # in any way: the same row of the whole batch
        return rows, [*keys[:-1], keys[-1] + sum(rows) - sum(keys)]
    return rows, keys


def over_ranks(names: list[str], ranks: int, seeds: tuple[int, ...] = (1, 2)) -> None:
    """Rows and numbers of all ranks together: features' gradients and numbers' are averaged, or summed."""
    rows, keys = WORLDS[ranks]
    folders = {name: str(generated(Made("torch", name, "fp64", DIM))) for name in names}
    job = {"packages": folders, "rows": rows, "keys": keys, "seeds": seeds}
    parts = run_ranks("tests.kernels.test_combinations:run_rank", job, ranks, TIMEOUT_S, {"OMP_NUM_THREADS": "1"})
    for (name, seed), of_ranks in zip(itertools.product(names, seeds), zip(*parts, strict=True), strict=True):
        one = COMBINATIONS[name]
        truth, sizes = truth_of(one, batch(one, seed, DIM, shards_of(one, rows, keys)))
        share = 1 / ranks if one.grad_sync == "mean" and one.reduction != "none" else 1.0
        found: list[Any] = []
        for true, *results in zip(truth, *of_ranks, strict=True):
            tensors = [None if x is None else torch.tensor(x, dtype=torch.float64) for x in results]
            if any(each is None for each in tensors):
                found.append(None)
            elif true.dim():
                found.append(share * torch.cat([x.reshape(-1, *true.shape[1:]) for x in tensors]))
            else:
                found.append(share * torch.stack(tensors).sum())
        assert_same(one, found, truth, sizes, EXACT)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("ranks", WORLDS if LONG else [3])
def test_over_ranks(ranks: int) -> None:
    """Uneven ranks, of which some have no rows: positives lie on other ranks, as do the keys of a query's id."""
    over_ranks(*((NAMES, ranks) if LONG else (NAMES[:10], ranks, (1,))))
