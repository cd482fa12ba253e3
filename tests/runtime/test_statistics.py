"""Wide-range sums against exact arithmetic."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from infcl_gen.runtime.statistics import LN2, Statistics, excess, log, merge, merge_parts, view

EXPONENTS = st.floats(-1e6, 1e6) | st.floats(-3.0, 3.0)


def empty(rows: int, dtype: torch.dtype) -> Statistics:
    """Of rows that have seen no key yet."""
    return view(torch.zeros((2, rows), dtype=dtype))


@given(st.lists(EXPONENTS, min_size=1, max_size=12), st.sampled_from([torch.float32, torch.float64]))
def test_merging_is_logsumexp_over_any_range(terms: list[float], dtype: torch.dtype) -> None:
    statistics = empty(1, dtype)
    for term in terms:
        exponent = torch.tensor([term], dtype=dtype).floor()
        merge(statistics, exponent, torch.exp2(torch.tensor([term], dtype=dtype) - exponent))
    truth = torch.logsumexp(torch.tensor(terms, dtype=dtype).double() * LN2, 0)
    assert float(log(statistics)[0]) == pytest.approx(float(truth), rel=8 * torch.finfo(dtype).eps, abs=1e-6)
    assert 1.0 <= float(statistics.mantissa) < 2.0
    assert float(statistics.exponent) == math.floor(float(statistics.exponent))


def test_nothing_is_neutral_and_nan_stays() -> None:
    nothing, other = (empty(3, torch.float32), empty(3, torch.float32))
    merge(nothing, other.exponent, other.mantissa)
    assert (nothing.mantissa == 0).all()
    merge(nothing, torch.tensor([5.0, math.nan, 7.0]), torch.tensor([1.5, 1.0, math.nan]))
    assert nothing.exponent[0] == 5.0 and nothing.mantissa[0] == 1.5
    assert log(nothing)[1:].isnan().all()


@given(
    st.lists(st.lists(EXPONENTS | st.none(), min_size=3, max_size=3), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_parts_at_once_are_parts_one_by_one(parts: list[list[float | None]], dtype: torch.dtype) -> None:
    """None: a sum over nothing, whose exponent means nothing."""
    one_by_one, at_once = (empty(3, dtype) for _ in range(2))
    exponents = torch.tensor([[1e6 if x is None else math.floor(x) for x in part] for part in parts]).to(dtype)
    totals = torch.tensor([[0.0 if x is None else 1.0 + x % 1 for x in part] for part in parts]).to(dtype)
    for exponent, total in zip(exponents, totals, strict=True):
        merge(one_by_one, torch.where(total == 0, -1e30, exponent), total)
    merge_parts(at_once, exponents, totals)
    seen = totals.sum(0) > 0
    assert torch.equal(at_once.mantissa > 0, seen)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(log(at_once)[seen], log(one_by_one)[seen], rtol=8 * eps, atol=1e-6)


def test_exponents_of_which_not_every_integer_is_a_number() -> None:
    """Of fp32 beyond 2^24: a sum of four equal terms is four times one of them."""
    one, four = empty(1, torch.float32), empty(1, torch.float32)
    far = torch.tensor([2.0**30 + 128.0])
    merge(one, far, torch.tensor([1.5]))
    for _ in range(4):
        merge(four, far, torch.tensor([1.5]))
    assert float(log(four) - log(one)) == pytest.approx(2 * LN2, rel=1e-6)


def test_one_number_has_one_logarithm_and_no_excess_over_itself() -> None:
    plain, shifted = (view(torch.tensor([[3.0 + n] * 999, [1.37 / 2**n] * 999])) for n in (0, 5))
    assert torch.equal(log(plain), log(shifted))
    assert not excess(plain, slice(0, 9), torch.stack(shifted)[:, :9]).any()
    half = view(torch.tensor([[4.0], [1.37]]))
    assert excess(half, slice(None), torch.stack(plain)[:, :1]) == -0.5


def test_nan_of_any_part_stays() -> None:
    into = view(torch.zeros(2, 3))
    merge_parts(into, torch.tensor([[1.0, math.nan, 1.0], [2.0] * 3]), torch.tensor([[1.0, 1.0, math.nan], [1.0] * 3]))
    assert into.mantissa[0] == 1.5 and into.exponent[0] == 2.0
    assert log(into)[1:].isnan().all()
