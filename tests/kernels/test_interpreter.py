"""The faster interpreter computes what Triton's own does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infcl_gen.verification.properties import Case, tensors
from tests.kernels import checks
from tests.kernels.packages import Made, module
from tests.kernels.worker import Interpreter

MADE = [
    Made("panel"),
    Made("panel", "infonce", "fp32"),
    Made("fused", "clip", "fp16"),
    Made("stash", "infonce"),
    Made("rows", "infonce"),
]


def same_bits(made: Made, planted: float | None = None) -> None:
    """Bits of all results, signs of zero among them; NaN where the other has it. `planted`: in one place of q."""
    from tests.kernels.interpreter import FAST, ORIGINAL, put

    package = module(made)
    case = checks.fitting(package, Case(70, 65, 0, scale=14.3, bias=-1.0, seed=3))
    inputs = tensors(case, package.SPEC["positives"])
    if planted is not None:
        inputs.q[3, 5] = planted
    fast, original = [], []
    for results, attributes in ((original, ORIGINAL), (fast, FAST)):
        put(attributes)
        results += package.loss_and_grads(inputs.q, inputs.k, inputs.scale, inputs.bias, labels=inputs.labels)
    for a, b in zip(original, fast, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and (planted is None or a.isnan().any() or a.dim() < 2)
        a, b = (torch.where(x.isnan(), 0.0, x.double()) for x in (a, b))
        assert torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def conversions() -> None:
    import triton.language as tl

    from tests.kernels.interpreter import convert

    halves = np.arange(1 << 16, dtype=np.uint16)
    whole = convert(halves, tl.bfloat16, tl.float32, None)
    expected = torch.from_numpy(halves).view(torch.bfloat16).float()
    assert torch.equal(torch.from_numpy(whole).view(torch.float32).nan_to_num(7.0), expected.nan_to_num(7.0))
    assert (convert((whole + 3).view(np.float32), tl.float32, tl.bfloat16, None) == halves).all()


@pytest.mark.parametrize("made", MADE, ids=lambda made: f"{made.strategy}-{made.loss}-{made.dtype}")
def test_results_are_those_of_triton_s_own(interpreted: Interpreter, made: Made) -> None:
    interpreted(same_bits, made)


@pytest.mark.parametrize("planted", [float("nan"), float("inf")])
def test_nan_and_infinity_are_those_of_triton_s_own(interpreted: Interpreter, planted: float) -> None:
    interpreted(same_bits, MADE[0], planted)


def test_every_bf16_number_is_converted(interpreted: Interpreter) -> None:
    interpreted(conversions)
