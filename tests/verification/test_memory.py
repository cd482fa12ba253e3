"""The meter counts what is live at once, beyond what was there before."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import infcl_gen
from infcl_gen.emission import import_package
from infcl_gen.processes import Seat
from infcl_gen.verification import worker
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


def test_a_peak_on_the_cpu_needs_no_compiler() -> None:
    """torch.profiler imports all of Inductor first, in 3 s."""
    with mock.patch.dict(sys.modules, {"torch._inductor.config": None}), PeakMeter("cpu") as meter:
        block("cpu")
    assert meter.peak_bytes


def test_verify_allows_what_was_predicted_and_not_a_page_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = infcl_gen.generate(
        loss="clip", batch_size=600, dim=64, dtype="fp32", target="cpu", output=tmp_path / "package"
    )
    job, seat, module = (
        {"package": str(folder), "edited": False, "place": "cpu"},
        Seat(0, 1, tmp_path),
        import_package(folder),
    )
    right, _ = worker.memory(job, seat)
    assert right["passed"], right
    predicted, run = module.SPEC["predicted"]["peak_bytes"], module.loss_and_grads
    for beyond, passed in ((-4096, True), (4096, False)):

        def with_an_allocation(*arguments: object, beyond: int = beyond, **more: object) -> object:
            held = torch.empty(predicted + beyond, dtype=torch.uint8)
            del held
            return run(*arguments, **more)

        monkeypatch.setattr(module, "loss_and_grads", with_an_allocation)
        row, _ = worker.memory(job, seat)
        assert row["passed"] == passed, row


@pytest.mark.gpu
def test_the_peak_on_a_gpu() -> None:
    block("cuda")
    with PeakMeter("cuda") as meter:
        block("cuda")
    assert 4 * MIB <= meter.peak_bytes <= 6 * MIB
