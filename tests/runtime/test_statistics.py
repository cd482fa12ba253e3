"""Wide-range sums against exact arithmetic."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from infcl_gen.runtime.statistics import LN2, empty, log, merge

EXPONENTS = st.floats(-1e6, 1e6) | st.floats(-3.0, 3.0)


@given(st.lists(EXPONENTS, min_size=1, max_size=12), st.sampled_from([torch.float32, torch.float64]))
def test_merging_is_logsumexp_over_any_range(terms: list[float], dtype: torch.dtype) -> None:
    statistics = empty(1, torch.device("cpu"), dtype)
    for term in terms:
        exponent = torch.tensor([term], dtype=dtype).floor()
        merge(statistics, exponent, torch.exp2(torch.tensor([term], dtype=dtype) - exponent))
    truth = torch.logsumexp(torch.tensor(terms, dtype=dtype).double() * LN2, 0)
    assert float(log(statistics)[0]) == pytest.approx(float(truth), rel=8 * torch.finfo(dtype).eps, abs=1e-6)
    assert 1.0 <= float(statistics.mantissa) < 2.0
    assert float(statistics.exponent) == math.floor(float(statistics.exponent))


def test_nothing_is_neutral_and_nan_stays() -> None:
    nothing, other = (
        empty(3, torch.device("cpu"), torch.float32),
        empty(3, torch.device("cpu"), torch.float32),
    )
    merge(nothing, other.exponent, other.mantissa)
    assert (nothing.mantissa == 0).all()
    merge(nothing, torch.tensor([5.0, math.nan, 7.0]), torch.tensor([1.5, 1.0, math.nan]))
    assert nothing.exponent[0] == 5.0 and nothing.mantissa[0] == 1.5
    assert log(nothing)[1:].isnan().all()
