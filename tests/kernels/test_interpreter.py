"""The faster interpreter computes what Triton's own does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infcl_gen.verification.properties import Case, tensors
from tests.kernels import checks
from tests.kernels.packages import Made, module
from tests.kernels.worker import Interpreter

MADE = [Made("panel"), Made("panel", "infonce", "fp32"), Made("fused", "clip", "fp16"), Made("stash", "infonce")]


def same_bits(made: Made) -> None:
    from tests.kernels.interpreter import FAST, ORIGINAL, put

    package = module(made)
    case = checks.fitting(package, Case(70, 65, 0, scale=14.3, bias=-1.0, seed=3))
    inputs = tensors(case, package.SPEC["positives"])
    fast, original = [], []
    for results, attributes in ((original, ORIGINAL), (fast, FAST)):
        put(attributes)
        results += package.loss_and_grads(inputs.q, inputs.k, inputs.scale, inputs.bias, labels=inputs.labels)
    assert all(torch.equal(a, b) for a, b in zip(original, fast, strict=True))


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


def test_every_bf16_number_is_converted(interpreted: Interpreter) -> None:
    interpreted(conversions)
