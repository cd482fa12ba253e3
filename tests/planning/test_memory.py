"""The memory plan against what a package really allocates on the CPU (the GPU suite does the same on a GPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import infcl_gen

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def measured_peak_bytes(step: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    "flags",
    [
        {"batch_size": 1000, "dim": 64, "dtype": "fp32"},
        {"batch_size": 3000, "dim": 256, "dtype": "bf16"},
        {"batch_size": 3000, "dim": 256, "dtype": "bf16", "memory_budget": "12MiB"},
        {"batch_size": 3000, "dim": 256, "dtype": "fp64", "memory_budget": "24MiB"},
        {"batch_size": 2000, "keys": 3000, "dim": 96, "dtype": "fp64", "loss": "infonce"},
    ],
    ids=lambda flags: "-".join(map(str, flags.values())),
)
def test_predicted_peak_is_a_close_upper_bound(flags: dict[str, Any]) -> None:
    package = infcl_gen.load(target="cpu", **flags)
    predicted = package.SPEC["predicted"]["peak_bytes"]
    rows, keys, dim = flags["batch_size"], flags.get("keys", flags["batch_size"]), flags["dim"]
    dtype = DTYPES[flags["dtype"]]
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(rows, dim, generator=generator).to(dtype).requires_grad_()
    k = torch.randn(keys, dim, generator=generator).to(dtype).requires_grad_()
    scale = torch.tensor(3.0, requires_grad=True)
    measured = measured_peak_bytes(lambda: package.contrastive_loss(q, k, scale).backward())
    assert measured <= predicted <= 1.1 * measured
