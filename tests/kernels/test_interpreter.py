"""The faster interpreter computes what Triton's own does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infcl_gen.verification.properties import Case, tensors
from tests.kernels import checks
from tests.kernels.packages import Made, module
from tests.kernels.worker import Interpreter
from tests.tiers import nightly

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
    case = checks.fitting(package, Case(40, 66, 0, scale=14.3, bias=-1.0, seed=3))
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
    # Each number and its neighbours, ties among them, round as torch's; NaN stays NaN.
    for bits in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        numbers = (whole + np.uint32(bits)).view(np.float32)
        found = torch.from_numpy(convert(numbers, tl.float32, tl.bfloat16, None)).view(torch.bfloat16)
        expected = torch.from_numpy(numbers).bfloat16()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def recordings() -> None:
    """What is recorded of other tensors is right for one that comes twice, and what numbers decide is not recorded."""
    import triton.language as tl
    from triton.runtime.interpreter import _implicit_cvt

    from tests.kernels.interpreter import SEMANTIC, Everything, patch_language

    patch_language(Everything)
    three, five = SEMANTIC.to_tensor(3), SEMANTIC.to_tensor(5)
    for _ in range(2):
        assert [int(x) for x in (three * three, three * five, five - three, three - three)] == [9, 15, 2, 0]
    row, column = tl.arange(0, 4)[None, :], tl.arange(0, 2)[:, None]
    for scale in (three, five):
        assert ((row * scale + column).handle.data == np.arange(4) * int(scale) + np.arange(2)[:, None]).all()
    memory, nowhere = torch.ones(1), SEMANTIC.to_tensor(1) > 2
    for other in (0.0, 7.0, 0.0):
        instead = SEMANTIC.to_tensor(other)
        assert float(tl.load(_implicit_cvt(memory), mask=nowhere, other=instead).handle.data[0]) == other


@pytest.mark.parametrize("made", MADE, ids=lambda made: f"{made.strategy}-{made.loss}-{made.dtype}")
def test_results_are_those_of_triton_s_own(interpreted: Interpreter, made: Made) -> None:
    interpreted(same_bits, made)


@pytest.mark.parametrize("planted", nightly(["nan", "inf"], ["nan"]))
def test_nan_and_infinity_are_those_of_triton_s_own(interpreted: Interpreter, planted: str) -> None:
    interpreted(same_bits, MADE[0], float(planted))


def test_every_bf16_number_is_converted(interpreted: Interpreter) -> None:
    interpreted(conversions)


def test_a_recording_is_of_types_alone(interpreted: Interpreter) -> None:
    interpreted(recordings)
