"""The runtime on CUDA, with the committed packages: no waiting for the device, and the ring over NCCL."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from . import nccl_worker

pytestmark = pytest.mark.gpu
GENERATED = Path(__file__).resolve().parents[2] / "generated"
PACKAGES = ("clip_h200_d128", "clip_h200_d768", "infonce_a100", "clip_cpu")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [str(GENERATED), *sys.path])
    yield


@pytest.mark.parametrize("name", PACKAGES)
def test_forward_and_backward_never_wait_for_the_device(name: str) -> None:
    module = importlib.import_module(name)
    dtype, dim = module.ContrastiveLoss._package.dtype, module.SPEC["problem"]["dim"]
    q, k = (torch.randn(1000, dim, device="cuda").div(dim**0.5).to(dtype).requires_grad_() for _ in range(2))
    scale = torch.tensor(20.0, device="cuda", requires_grad=True)
    labels = torch.randperm(1000, device="cuda") if module.SPEC["positives"] == "label" else None
    module.contrastive_loss(q, k, scale, labels=labels).backward()  # compiles; looks at the labels once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.contrastive_loss(q, k, scale, labels=labels).backward()
        module.contrastive_loss(q, k, 20.0, labels=labels).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert q.grad is not None and q.grad.isfinite().all()


@pytest.mark.parametrize("name", PACKAGES)
def test_selftest_passes(name: str) -> None:
    report = importlib.import_module(name).selftest("cuda")
    assert report["ok"], report


def test_a_wrong_label_on_the_device_is_an_error_once_and_then_nan() -> None:
    module = importlib.import_module("infonce_a100")
    engine = importlib.import_module("infonce_a100._runtime.engine")
    dim = module.SPEC["problem"]["dim"]
    q = torch.randn(100, dim, device="cuda").bfloat16()
    labels = torch.full((100,), 100, device="cuda")
    engine._labels_checked_alone.clear()
    with pytest.raises(ValueError, match="labels range from 100 to 100"):
        module.loss_and_grads(q, q, labels=labels)
    loss, dq, dk, dscale, _ = module.loss_and_grads(q, q, labels=labels)
    assert all(x.isnan().all() for x in (loss, dq, dk, dscale))


WAYS = {
    "flat ring": lambda world: None,  # the packages were planned for one device
    "hierarchical ring": lambda world: ("ring", 2, world // 2, (*((0, 1),) * (world // 2 - 1), (1, 1))),
    "gather": lambda world: ("gather", 1, world, ((0, 1),)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 4])
def test_results_over_nccl_are_those_of_one_device(world: int, way: str) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    cases = [
        {"package": name, "rows": rows, "scale": scale, "way": WAYS[way](world)}
        for name in PACKAGES
        for rows, scale in (([512] * world, 20.0), ([301, *[1, 0, 700][: world - 1]], 100.0))
    ]
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    arguments = (world, store.port, str(GENERATED), cases, results)
    processes = [
        context.Process(target=nccl_worker.main, args=(rank, *arguments), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        answers = dict(results.get(timeout=150) for _ in range(world))
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    for rank, found in answers.items():
        assert isinstance(found, list), f"rank {rank}: {found}"
        for case, error in zip(cases, found, strict=True):
            low = torch.finfo(importlib.import_module(case["package"]).ContrastiveLoss._package.dtype).eps
            # Gradients of bf16 features differ by the rounding of g and of the result.
            bound = {"loss": 1e-5, "dq": 2 * low + 1e-4, "dk": 2 * low + 1e-4, "dscale": 1e-2}
            assert all(error[name] <= bound[name] for name in error), (rank, case, error)
