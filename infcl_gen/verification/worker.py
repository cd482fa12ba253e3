"""One process of `infcl-gen verify`: runs a package's code and returns what it found.

A package runs in a process of its own: a crash, a hang, a leak or an environment variable (TRITON_INTERPRET) stays
out of the process that verifies.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infcl_gen.emission import import_package
from infcl_gen.processes import Seat
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.memory import PeakMeter
from infcl_gen.verification.oracle import LossAndGrads
from infcl_gen.verification.properties import ROWS, Case, cases_for, check_package, tensors
from infcl_gen.verification.verify import Job

LARGE_ROWS = (*ROWS, 1000, 2049, 4096)  # on a GPU
SIZES = {"cpu": ROWS, "interpreter": (1, 17, 64, 65, 130), "cuda": LARGE_ROWS}


def run(argument: dict[str, Any], seat: Seat) -> list[dict[str, Any]]:
    """What this process finds of a `Job`, as rows of its kind."""
    job = Job(**argument)
    torch.set_num_threads(max(1, torch.get_num_threads() // seat.ranks))
    module = import_package(Path(job.package))
    return JOBS[job.kind](job, module, seat)


def numerics(job: Job, module: ModuleType, seat: Seat) -> list[dict[str, Any]]:
    """Of each example and quantity: its error over what is allowed, and the failure, if it is one."""
    device = "cpu" if job.device == "interpreter" else job.device
    share = slice(seat.rank, None, seat.ranks)
    verdicts = check_package(module, device, job.examples, SIZES[job.device], share)
    return [
        {
            "check": f"numerics {row.quantity}",
            "ratio": row.ratio,
            "failure": None if row.passed else f"{verdict.case}: {row.detail}",
        }
        for verdict in verdicts
        for row in verdict.rows
    ]


def memory(job: Job, module: ModuleType, seat: Seat) -> list[dict[str, Any]]:
    """The measured peak at the planned size against the predicted one."""
    problem, predicted = module.SPEC["problem"], module.SPEC["predicted"]["peak_bytes"]
    case = Case(problem["batch_size"], problem["keys"] or problem["batch_size"], problem["dim"], problem["dtype"])
    inputs = tensors(case, module.SPEC["positives"], job.device)
    if job.device == "cuda":
        module.loss_and_grads(inputs.q, inputs.k, 14.3, labels=inputs.labels)  # compiles
    with PeakMeter(job.device) as meter:
        module.loss_and_grads(inputs.q, inputs.k, 14.3, labels=inputs.labels)
    detail = f"measured {meter.peak_bytes / 2**20:.2f} MiB, predicted {predicted / 2**20:.2f} MiB"
    return [{"check": "memory", "passed": meter.peak_bytes <= predicted, "detail": detail}]


def ring(job: Job, module: ModuleType, seat: Seat) -> list[dict[str, Any]]:
    """Of each example, on rank 0: its largest error over what is allowed, and the failures, if there are any."""
    device = torch.device("cuda", seat.rank) if job.device == "cuda" else torch.device("cpu")
    seat.join_group(device.type, job.timeout_s)
    rank, ranks = seat.rank, seat.ranks
    found = []
    for case in cases_for(module, job.examples, ROWS if job.device == "cuda" else SIZES[job.device]):
        inputs = tensors(case, module.SPEC["positives"], device)
        q_cuts, k_cuts = shards(case, module.SPEC["positives"], ranks)
        labels = inputs.labels
        if case.keys > case.queries:  # over several ranks they must be given
            labels = torch.arange(case.queries, device=device) if labels is None else labels
        own = None if labels is None else labels[q_cuts[rank]]
        result = module.loss_and_grads(
            inputs.q[q_cuts[rank]], inputs.k[k_cuts[rank]], inputs.scale, inputs.bias, labels=own
        )
        parts: list[Any] = [None] * ranks
        dist.all_gather_object(parts, [tensor.cpu() for tensor in result])
        if rank == 0:
            judged = gate(averaged(parts), truth_of(module, inputs))
            rows = [cut.stop - cut.start for cut in q_cuts]
            passed = all(row.passed for row in judged)
            found.append(
                {
                    "check": f"ring of {ranks}",
                    "ratio": max(row.ratio for row in judged),
                    "failure": None if passed else f"{asdict(case)}, rows {rows}: {failures(judged)}",
                }
            )
    return found


JOBS = {"numerics": numerics, "memory": memory, "ring": ring}


def shards(case: Case, positives: str, world_size: int) -> tuple[list[slice], list[slice]]:
    """Which rows and keys each rank holds: even on even seeds, else cut anywhere, so that some may be empty."""
    draw = random.Random(case.seed)

    def cut(total: int) -> list[slice]:
        if case.seed % 2:
            inner = sorted(draw.randint(0, total) for _ in range(world_size - 1))
        else:
            inner = [total * rank // world_size for rank in range(1, world_size)]
        return [slice(*pair) for pair in itertools.pairwise([0, *inner, total])]

    rows = cut(case.queries)
    return rows, rows if positives == "diagonal" and case.seed % 3 else cut(case.keys)


def averaged(parts: list[list[Tensor]]) -> LossAndGrads:
    """The ranks' results as data-parallel training uses them: averaged losses and parameter gradients, rows joined."""
    loss, dq, dk, dscale, dbias = zip(*parts, strict=True)
    count = len(parts)

    def mean(numbers: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([number.double() for number in numbers]).mean(0)

    def joined(rows: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([part.double() for part in rows]) / count

    return LossAndGrads(mean(loss), joined(dq), joined(dk), mean(dscale), mean(dbias))
