"""The runtime on CUDA, with the golden packages: no waiting for the device. Rings over NCCL: test_layouts,
test_failures."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import infcl_gen
from infcl_gen.emission import write_package
from infcl_gen.losses import BUILTIN_LOSSES
from infcl_gen.verification.properties import Case, inputs_of
from tests.emission.golden import golden_files

pytestmark = pytest.mark.gpu
PACKAGES = ("clip_h200_d128", "clip_h200_d768", "infonce_a100", "clip_cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("golden")
    for name in PACKAGES:
        write_package(golden_files(name), root / name)
    return root


@pytest.fixture(autouse=True)
def _importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


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


OVER_PREFIXES = {
    f"{loss} over {what}": {"loss": loss, "prefixes": "32,64", "renormalise": cosines}
    for loss in ("clip", "infonce")
    for cosines, what in ((False, "prefixes"), (True, "cosines"))
}


@pytest.mark.parametrize("name", [*BUILTIN_LOSSES, *OVER_PREFIXES])
def test_no_loss_waits_for_the_device(name: str) -> None:
    """Planted: cosines copied a number to the device in each backward, and waited for it: 6 of 74 ms."""
    module = infcl_gen.load(batch_size=512, dim=64, dtype="bf16", **OVER_PREFIXES.get(name, {"loss": name}))
    inputs = inputs_of(module, Case(512, 512, 64, "bf16", 14.3), "cuda")
    scale, bias = (torch.tensor(number, device="cuda", requires_grad=True) for number in (14.3, -0.5))
    leaves = [*(x if x is None else x.requires_grad_() for x in inputs[:2]), scale, bias]
    module.contrastive_loss(*leaves, **inputs.given).backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.contrastive_loss(*leaves, **inputs.given).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves if x is not None)


@pytest.mark.parametrize("name", PACKAGES)
def test_selftest_passes(name: str) -> None:
    report = importlib.import_module(name).selftest("cuda")
    assert report["ok"], report


def test_a_wrong_label_on_the_device_is_an_error_until_labels_were_right_once_and_then_nan() -> None:
    module = importlib.import_module("infonce_a100")
    agreement = importlib.import_module("infonce_a100._runtime.agreement")
    dim = module.SPEC["problem"]["dim"]
    q = torch.randn(100, dim, device="cuda").bfloat16()
    labels = torch.full((100,), 100, device="cuda")
    agreement._labels_checked_alone.clear()
    for _ in range(2):
        with pytest.raises(ValueError, match="labels range from 100 to 100"):
            module.loss_and_grads(q, q, labels=labels)
    module.loss_and_grads(q, q, labels=torch.arange(100, device="cuda"))
    loss, dq, dk, dscale, _ = module.loss_and_grads(q, q, labels=labels)
    assert all(x.isnan().all() for x in (loss, dq, dk, dscale))


def test_a_profilers_hooks_see_every_launch() -> None:
    """Launches leave Triton's hooks out while nobody listens."""
    from triton import knobs

    module = importlib.import_module("clip_h200_d768")
    q = torch.randn(100, 768, device="cuda").bfloat16()
    module.loss_and_grads(q, q, 1.0)
    entered: list[str] = []
    left: list[str] = []
    hooks = [
        (knobs.runtime.launch_enter_hook, lambda metadata: entered.append(metadata.get()["name"])),
        (knobs.runtime.launch_exit_hook, lambda metadata: left.append(metadata.get()["name"])),
    ]
    for chain, hook in hooks:
        chain.add(hook)
    try:
        watched = module.loss_and_grads(q, q, 1.0)
    finally:
        for chain, hook in hooks:
            chain.remove(hook)
    assert entered == left and {"references", "forward", "merge", "gradient", "finish", "scalars"} <= set(entered)
    seen = len(entered)
    unwatched = module.loss_and_grads(q, q, 1.0)
    assert len(entered) == len(left) == seen > 0
    assert all(torch.equal(a, b) for a, b in zip(watched, unwatched, strict=True))
