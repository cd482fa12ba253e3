"""The rules for dtypes and precision, each stated once."""

from __future__ import annotations

import pytest

from infcl_gen.kernels.choice import Choice
from infcl_gen.runtime.traits import Traits
from tests.planning.conftest import plan_flags

HALVES = ("bf16", "fp32", True, False, "ieee")


@pytest.mark.parametrize(
    ("strategy", "dtype", "precision", "target", "rules"),
    [
        # operands, statistics, split, exact, products of fp32 operands
        ("panel", "bf16", "default", "cuda", ("bf16", "fp32", False, False, "ieee")),
        ("fused", "fp16", "default", "rocm", ("fp16", "fp32", False, False, "ieee")),
        ("panel", "fp32", "default", "cuda", HALVES),
        ("panel", "fp32", "exact", "cuda", ("fp32", "fp32", False, True, "ieee")),
        ("panel", "fp32", "tf32", "cuda", ("fp32", "fp32", False, True, "tf32")),
        ("panel", "fp32", "default", "rocm", ("fp32", "fp32", False, True, "ieee")),
        ("torch", "fp32", "default", "cuda", ("fp32", "fp32", False, True, "ieee")),
        ("torch", "fp64", "default", "cpu", ("fp64", "fp64", False, False, "ieee")),
    ],
)
def test_numbers_follow_from_dtype_and_precision(
    strategy: str, dtype: str, precision: str, target: str, rules: tuple[object, ...]
) -> None:
    choice = Choice(strategy=strategy, dim=8, dtype=dtype, precision=precision, target=target)
    found = (choice.operand_dtype, choice.statistics_dtype, choice.split, choice.exact, choice.input_precision)
    assert found == rules
    assert choice.separate == (dtype in ("bf16", "fp16"))
    assert choice.inner_dim == 8 * (3 if choice.split else 1)
    assert choice.aligned


def test_a_plan_is_a_choice_with_sizes() -> None:
    plan = plan_flags(dtype="fp32", precision="tf32", devices=2, loss="infonce", set={"transport": "gather"})
    literals = plan.as_dict()
    assert (plan.transport, plan.world_size, plan.both_axes, plan.labels) == ("gather", 2, False, True)
    assert (literals["input_precision"], literals["operand_dtype"], literals["split"]) == ("tf32", "fp32", False)
    assert plan.kind == Choice(
        strategy="panel", dim=1, dtype="fp32", precision="tf32", product_by="library",
        traits=Traits(key_statistics=(), known="row", positives="label"),
        world_size=2, transport="gather",
    )  # fmt: skip
