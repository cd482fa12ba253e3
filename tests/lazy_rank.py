"""What a rank of tests/test_lazy.py does: each function is a task of `infcl_gen.processes.run_ranks`."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import infcl_gen
from infcl_gen import lazy
from infcl_gen.processes import Seat

SCALE = 14.3


def _features(rows: int, dim: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.functional.normalize(torch.randn(rows, dim, generator=generator), dim=1).requires_grad_() for _ in "qk"
    ]


def step(rows: int, seed: int, dim: int = 16, criterion: Any = None) -> tuple[float, float]:
    """The global value, and the norm of this rank's gradient of q."""
    q, k = _features(rows, dim, seed)
    loss = (criterion or infcl_gen.ContrastiveLoss())(q, k, SCALE)
    loss.backward()
    assert q.grad is not None
    return infcl_gen.global_value(loss).item(), q.grad.norm().item()


def batches(argument: Any, seat: Seat) -> Any:
    """Steps of this rank's sizes; a rank named in `cold` has a cache of its own. Values, and the packages' digests."""
    if seat.rank in argument.get("cold", ()):
        os.environ["INFCL_GEN_CACHE"] = str(Path(argument["cache"], f"rank{seat.rank}"))
    else:
        os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    seat.join_group("cpu", 60.0)
    found = [step(rows[seat.rank], 10 * index + seat.rank) for index, rows in enumerate(argument["rows"])]
    return {
        "steps": found,
        "digests": sorted(package.SPEC["digest"] for package in lazy._packages.values()),
        "sizes": sorted(package.SPEC["problem"]["batch_size"] for package in lazy._packages.values()),
    }


def failing(argument: Any, seat: Seat) -> Any:
    """The error of a step in which rank 1 does what `argument` names, then of a step that is right."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    if argument["case"] == "unwritable" and seat.rank == 1:
        file = Path(argument["cache"], "file")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        os.environ["INFCL_GEN_CACHE"] = str(file)
    seat.join_group("cpu", 60.0)
    dim = 24 if argument["case"] == "dim" and seat.rank == 1 else 16
    budget = "1KiB" if argument["case"] == "budget" else "auto"
    try:
        step(8, seat.rank, dim, infcl_gen.ContrastiveLoss(memory_budget=budget))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = "none"
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    after = step(8, seat.rank)
    dist.barrier()
    return {"error": message, "after": after}


def ranges(argument: Any, seat: Seat) -> list[str]:
    """The names of this package's ranges that a profiler sees of a step, in order."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    seat.join_group("cpu", 60.0)
    step(4, seat.rank)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(4, seat.rank)
    seen = [event for event in profile.events() if event.name.startswith("infcl ")]
    return [event.name for event in sorted(seen, key=lambda event: event.time_range.start)]


def early(argument: Any, seat: Seat) -> list[float]:
    """Global values by modules that were made before the process group was."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    loaded = infcl_gen.load(batch_size=16, dim=16, dtype="fp32", target="cpu", devices=seat.ranks)
    made = [infcl_gen.ContrastiveLoss(), loaded.ContrastiveLoss()]
    seat.join_group("cpu", 60.0)
    return [step(4, seat.rank, criterion=criterion)[0] for criterion in made]
