"""The meter counts what is live at once, beyond what was there before."""

import pytest
import torch

from infcl_gen.verification.memory import PeakMeter

MIB = 2**20


def block(device: str) -> torch.Tensor:
    first = torch.ones(MIB // 2, device=device)
    del first
    second = torch.ones(3 * MIB // 4, device=device)
    third = torch.ones(MIB // 4, device=device)
    return second.sum() + third.sum()


def test_the_peak_on_the_cpu() -> None:
    before = torch.ones(10 * MIB, dtype=torch.uint8)
    with PeakMeter("cpu") as meter:
        block("cpu")
    assert 4 * MIB <= meter.peak_bytes <= 4 * MIB + 4096
    assert before.sum() == 10 * MIB


def test_temporaries_inside_an_operation_count() -> None:
    x = torch.ones(512, 512, dtype=torch.float32)
    with PeakMeter("cpu") as meter:
        (x.t().contiguous() + 1).sum()
    assert meter.peak_bytes >= 2 * x.nbytes


def test_nothing_is_nothing_and_errors_pass_through() -> None:
    with PeakMeter("cpu") as meter:
        pass
    assert meter.peak_bytes == 0
    with pytest.raises(KeyError), PeakMeter("cpu"):
        raise KeyError


@pytest.mark.gpu
def test_the_peak_on_a_gpu() -> None:
    block("cuda")
    with PeakMeter("cuda") as meter:
        block("cuda")
    assert 4 * MIB <= meter.peak_bytes <= 6 * MIB
