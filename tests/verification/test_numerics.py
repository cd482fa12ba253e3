"""The numerics gate over generated packages: the CPU target, and packages as planned under the interpreter."""

import dataclasses
import functools
import math
import re
import types
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import sympy
import torch
from hypothesis import strategies as st

import infcl_gen
from infcl_gen.inputs.problem import make_problem
from infcl_gen.losses import BUILTIN_LOSSES, LossSpec, spec_as_dict, spec_from_dict
from infcl_gen.losses.language import (
    bias,
    exp,
    is_positive,
    logsumexp_over_keys,
    maximum,
    mean_over_queries,
    positive,
    queries,
    scale,
    softplus,
    sqrt,
    sum_over_pairs,
    z,
)
from infcl_gen.verification import verify
from infcl_gen.verification.gate import failures
from infcl_gen.verification.properties import (
    BIASES,
    DIMS,
    DTYPES,
    FEATURES,
    LAYOUTS,
    ROWS,
    SCALES,
    Case,
    Inputs,
    autograd_results,
    check_case,
    inputs_of,
    nan_misplaced,
)
from tests.documents import blocks
from tests.tiers import LONG, examples, nightly

LOSSES = ("clip", "infonce", "siglip", "siglip_multi")
LARGEST = 300  # rows of the CPU packages: a panel and some more


@functools.cache
def package(
    loss: str, dtype: str, dim: int, target: str = "cpu", largest: int = LARGEST, **flags: str
) -> types.ModuleType:
    settings = {"settings": tuple(flags.items())} if flags else {}
    profile = {"cpu": "cpu"}.get(target, "auto")
    return infcl_gen.load(
        loss=loss, batch_size=largest, dim=dim, dtype=dtype, target=target, device_profile=profile, **settings
    )


def cases(dims: tuple[int, ...], dtypes: tuple[str, ...], rows: st.SearchStrategy[int]) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        queries=rows,
        keys=rows,
        dim=st.sampled_from(dims),
        dtype=st.sampled_from(dtypes),
        scale=st.sampled_from(SCALES),
        bias=st.sampled_from(BIASES),
        features=st.sampled_from(FEATURES),
        layout=st.sampled_from(LAYOUTS),
        seed=st.integers(0, 2**31),
    )


def checked(module: types.ModuleType, case: Case, device: str) -> None:
    if module.SPEC["positives"] == "diagonal":
        case = dataclasses.replace(case, keys=case.queries)
    rows = check_case(module, case, device)
    assert not failures(rows), f"{case}: {failures(rows)}"


@pytest.mark.parametrize("loss", LOSSES)
@examples(ci=6, long=500)
@hypothesis.given(
    case=cases(
        DIMS if LONG else (1, 16, 100, 384), tuple(DTYPES), st.one_of(st.sampled_from(ROWS), st.integers(1, LARGEST))
    )
)
def test_the_cpu_target(loss: str, case: Case) -> None:
    checked(package(loss, case.dtype, case.dim), case, "cpu")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_autograd_and_loss_and_grads_agree_to_the_bit_on_every_repeat(loss: str, dtype: str) -> None:
    module = package(loss, dtype, 64)
    inputs = inputs_of(module, Case(129, 129, 64, dtype, 14.3, -1.0, seed=1))
    first = module.loss_and_grads(*inputs[:4], **inputs.given)
    for _ in range((100 if LONG or loss == "clip" else 10) if dtype == "fp32" else 3):
        again = module.loss_and_grads(*inputs[:4], **inputs.given)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    by_autograd = autograd_results(module, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, by_autograd, strict=True))
    assert first[1].dtype == first[2].dtype == inputs.q.dtype and first[0].dim() == first[3].dim() == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_nan_in_nan_out(loss: str) -> None:
    module = package(loss, "fp32", 16)
    inputs = inputs_of(module, Case(65, 65, 16, "fp32", 14.3))
    for which in (0, 1):
        poisoned = Inputs(*(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs))
        poisoned[which][7, 3] = float("nan")
        result = module.loss_and_grads(*poisoned[:4], **poisoned.given)
        truth = module.reference(*poisoned[:4], **poisoned.given)
        assert truth.isnan() and result[0].isnan() and result[3].isnan()
        assert result[1][7].isnan().all() if which == 0 else result[1].isnan().all()
        alone = loss.startswith("siglip") and which == 1  # only pairs of key 7 know of it
        assert result[2][7].isnan().all() if alone else result[2].isnan().all()
        assert not alone or not result[2][:7].isnan().any()


@pytest.mark.parametrize("code", [code for page, code in blocks("python") if page == "docs/losses.md"])
def test_losses_of_the_documentation_are_right(code: str, tmp_path: Path) -> None:
    """As `verify` finds them, also where a NaN leads; planted: a NaN in dbias of a loss without bias was refused."""
    file = tmp_path / "losses.py"
    file.write_text(code)
    for name in re.findall(r"^(\w+) = LossSpec\(", code, re.MULTILINE):
        module = infcl_gen.load(loss=f"{file}:{name}", batch_size=65, dim=16, dtype="fp32", target="cpu")
        case = Case(65, 65, 16, "fp32", 3.0, seed=2)
        checked(module, case, "cpu")
        assert nan_misplaced(module, inputs_of(module, case)) == []


_SURPRISE = logsumexp_over_keys(scale * z) - positive(scale * z)
OF_ONES_OWN = {  # none is in the documentation: no scale, named constants, powers that only the derivative has, a hinge
    "fixed": (mean_over_queries(logsumexp_over_keys(z / 0.07) - positive(z / 0.07)), "label"),
    "fixed_pairs": (sum_over_pairs(softplus((1 - 2 * is_positive) * (10 * z + bias))) / queries, "diagonal"),
    "constants": (mean_over_queries(softplus(exp(1) * _SURPRISE) * sympy.pi / (3 + softplus(1))), "label"),
    "undistributed": (mean_over_queries(softplus(sympy.Mul(2, _SURPRISE, evaluate=False))), "label"),
    "roots": (mean_over_queries(_SURPRISE / sqrt(1 + _SURPRISE**2.0) + (1 + _SURPRISE**2) ** 0.5), "label"),
    "powers": (mean_over_queries(1 / (1 + softplus(_SURPRISE)) ** 4), "label"),
    "weighed": (
        sum_over_pairs((1 - is_positive) * (2 * softplus(scale * z)) / 3 - is_positive * scale * z) / queries,
        "diagonal",
    ),
    "hinge": (
        sum_over_pairs(is_positive * (1 - scale * z) + (1 - is_positive) * maximum(scale * z - 0.3, 0) ** 2) / queries,
        "diagonal",
    ),
}


@pytest.mark.parametrize("name", OF_ONES_OWN)
def test_losses_of_ones_own_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `verify` finds them, read back from text. Planted: NaN in dscale of a loss without scale was refused; so was
    that of a hinge, where autograd drops it, and in a row of dq that has none it is."""
    spec = LossSpec(name, *OF_ONES_OWN[name])
    assert spec_from_dict(spec_as_dict(spec)) == spec
    module = infcl_gen.load(loss=spec, batch_size=65, dim=16, dtype="fp32", target="cpu")
    case = Case(65, 65, 16, "fp32", 3.0, seed=2, features="zero_rows")
    checked(module, case, "cpu")
    inputs = inputs_of(module, case)
    assert nan_misplaced(module, inputs) == []
    found = module.loss_and_grads

    def spoilt(*args: Any, **how: Any) -> Any:
        loss, dq, *rest = found(*args, **how)
        dq[0] = math.nan
        return (loss, dq, *rest)

    monkeypatch.setattr(module, "loss_and_grads", spoilt)
    assert nan_misplaced(module, inputs) == ["dq"]


@pytest.mark.parametrize("loss", BUILTIN_LOSSES)
def test_a_nan_leads_where_the_reference_has_it(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of spectral, whose positives have a constant slope. Planted: a dk without NaN."""
    module = package(loss, "fp32", 16)
    inputs = inputs_of(module, Case(34, 34, 16, "fp32", 3.0, seed=2))
    assert nan_misplaced(module, inputs) == []
    if loss != "spectral":
        return
    found = module.loss_and_grads
    monkeypatch.setattr(
        module,
        "loss_and_grads",
        lambda *args, **how: (*(of := found(*args, **how))[:2], torch.nan_to_num(of[2]), *of[3:]),
    )
    assert nan_misplaced(module, inputs) == ["dk"]


INTERPRETED = [  # strategy, loss, dtype, dim: each kernel, and every dtype that the interpreter can do
    ("panel", "clip", "bf16", 64),
    ("panel", "infonce", "fp16", 100),
    ("panel", "clip", "fp32", 16),
    ("panel", "siglip_multi", "bf16", 64),
    ("fused", "clip", "fp16", 16),
    ("fused", "infonce", "bf16", 64),
    ("stash", "clip", "bf16", 64),
    ("rows", "infonce", "bf16", 64),
]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("strategy", "loss", "dtype", "dim"), nightly(INTERPRETED, set(INTERPRETED) - {INTERPRETED[4]})
)
def test_the_kernels_under_the_interpreter(tmp_path: Path, strategy: str, loss: str, dtype: str, dim: int) -> None:
    problem = make_problem(
        loss=loss, batch_size=130, dim=dim, dtype=dtype, device_profile="h200", settings=(("strategy", strategy),)
    )
    examples = 7 if LONG else 2
    rows = verify.run("numerics", infcl_gen.generate(problem, tmp_path / "package"), "interpreter", examples=examples)
    assert len(rows) == 7 and all(row["passed"] for row in rows), rows
