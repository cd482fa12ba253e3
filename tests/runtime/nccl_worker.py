"""One rank of an NCCL ring in the GPU suite."""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


def main(rank: int, world: int, port: int, folder: str, cases: list[dict[str, Any]], results: Any) -> None:
    """Puts (rank, [errors of each case]) or (rank, text of the exception) into the queue."""
    faulthandler.dump_traceback_later(100)  # says where a hanging rank hangs
    try:
        sys.path.insert(0, folder)
        torch.cuda.set_device(rank)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        timeout = datetime.timedelta(seconds=60)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timeout)
        results.put((rank, [errors(rank, **case) for case in cases]))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}"))


def errors(
    rank: int, package: str, rows: list[int], scale: float, way: tuple[Any, ...] | None = None
) -> dict[str, float]:
    """Relative distance of this rank's part of the group's results from those of one device with the whole batch.
    `way`: a route's fields, as if the package had been planned so."""
    module = importlib.import_module(package)
    route = importlib.import_module(f"{package}._runtime.route").Route
    over = route.over if way is None else lambda self, size: route(*way)
    with mock.patch.object(route, "over", over):
        return distances(rank, module, rows, scale)


def distances(rank: int, module: Any, rows: list[int], scale: float) -> dict[str, float]:
    dtype, dim = module.ContrastiveLoss._package.dtype, module.SPEC["problem"]["dim"]
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(sum(rows), dim, generator=generator).div(dim**0.5).to(rank, dtype) for _ in range(2))
    own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    lone = dist.new_group([rank], use_local_synchronization=True)
    whole = module.loss_and_grads(q, k, scale, group=lone)
    leaves = [x[own].clone().requires_grad_() for x in (q, k)]
    leaves.append(torch.tensor(scale, device=rank, requires_grad=True))
    found = []
    for _ in range(3):
        loss = module.contrastive_loss(*leaves)
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True)), (
        "not repeatable"
    )
    loss, dq, dk, dscale = found[0]
    for scalar in (loss, dscale):
        dist.all_reduce(scalar, op=dist.ReduceOp.AVG)
    # grad_sync="mean": each rank's gradients are world times those of the global loss
    world = len(rows)
    pairs = {"loss": (loss, whole[0]), "dq": (dq / world, whole[1][own]), "dk": (dk / world, whole[2][own])}
    pairs["dscale"] = (dscale, whole[3])
    return {
        name: float((a.double() - b).norm() / b.double().norm().clamp_min(1e-30))
        for name, (a, b) in pairs.items()
    }
