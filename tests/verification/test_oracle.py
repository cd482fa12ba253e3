"""The generator's dense losses against the tests' own, which share nothing with them."""

import pytest
import torch

from infcl_gen.losses import BUILTIN_LOSSES, derive
from infcl_gen.runtime.selftest import compared
from infcl_gen.verification import oracle
from infcl_gen.verification.properties import DTYPES, Case, tensors
from tests.losses.specs import DERIVABLE, SMOOTH
from tests.verification.dense import dense, dense_package

SPECS = BUILTIN_LOSSES | {f"{name}_ids": DERIVABLE[f"{name}_without_ids"] for name in ("clip", "infonce")}
SPECS |= SMOOTH
SPECS |= {name: DERIVABLE[name] for name in ("margin", "decoupled", "weighted", "hard", "weighed_by_all")} | {
    "decoupled_ids": DERIVABLE["decoupled_by_id"]
}


def drawn(name: str, case: Case) -> oracle.Inputs:
    traits = derive(SPECS[name]).traits
    given = (traits.ids, traits.triangle, traits.vectors, traits.guided, traits.mutual, traits.partnered)
    return tensors(case, traits.positives, "cpu", *given)


def assert_close(found: oracle.LossAndGrads, truth: oracle.LossAndGrads) -> None:
    for name, a, b in compared(found, truth):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_oracle_is_the_loss_by_its_definition(name: str, dtype: str) -> None:
    """Also of strided bf16 features, with labels that repeat, a scale and a bias."""
    case = Case(33, 33 if SPECS[name].positives == "diagonal" else 20, 8, dtype, 14.3, -1.0, layout="strided", seed=1)
    inputs = drawn(name, case)
    assert_close(oracle.oracle(dense_package(SPECS[name]), inputs), dense(name, *inputs))


@pytest.mark.parametrize("name", SPECS)
def test_the_oracle_by_slices_is_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "SLICE_ROWS", 16)
    case = Case(50, 50 if SPECS[name].positives == "diagonal" else 20, 8, "bf16", 14.3, seed=1)
    inputs = drawn(name, case)
    found = oracle.oracle_by_slices(dense_package(SPECS[name]).loss, inputs)
    assert_close(found, dense(name, *inputs))


@pytest.mark.parametrize("keys", [torch.eye(3), None], ids=["two sides", "one side"])
def test_a_loss_without_a_definition_is_named(keys: torch.Tensor | None) -> None:
    with pytest.raises(AssertionError, match=r"^no definition of new in dense_loss"):
        dense("new", torch.eye(3), keys)
