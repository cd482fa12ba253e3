"""What a step costs the host through the loss without sizes, beyond one through `infcl_gen.load`: microseconds.

python -m tests.overhead [CALLS]: the median of so many forward and backward passes of tiny batches, in turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import infcl_gen


def step(criterion: Callable[..., Any], q: Any, k: Any, scale: Any) -> float:
    """Microseconds of a step."""
    q.grad = k.grad = scale.grad = None
    began = time.perf_counter_ns()
    criterion(q, k, scale).backward()
    return (time.perf_counter_ns() - began) / 1000


def main(calls: int = 10_000) -> None:
    torch.set_num_threads(1)
    q, k = (torch.randn(2, 8, requires_grad=True) for _ in "qk")
    scale = torch.tensor(10.0, requires_grad=True)
    package = infcl_gen.load(batch_size=2, dim=8, dtype="fp32", target="cpu")
    for what, lazy, loaded in (
        ("module", infcl_gen.ContrastiveLoss(), package.ContrastiveLoss()),
        ("function", infcl_gen.contrastive_loss, package.contrastive_loss),
    ):
        times: dict[str, list[float]] = {"lazy": [], "loaded": []}
        for index in range(calls + 200):
            for name, criterion in (("lazy", lazy), ("loaded", loaded))[:: 1 - 2 * (index % 2)]:
                each = step(criterion, q, k, scale)
                if index >= 200:
                    times[name].append(each)
        first, second = (statistics.median(times[name]) for name in ("lazy", "loaded"))
        print(f"{what}: lazy {first:.2f} us, loaded {second:.2f} us, difference {first - second:.2f} us", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
