"""One process of `infcl-gen verify`: runs a package's code and writes what it found to a file.

    python -m infcl_gen.verification.worker JOB.json RANK

A job is a `Job` as JSON; what a process finds it writes to `found{RANK}.json` in the job's folder. Running packages in
processes of their own keeps a crash, a hang, a leak or an environment variable (TRITON_INTERPRET) out of the process
that verifies.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infcl_gen.emission import import_package
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.memory import PeakMeter
from infcl_gen.verification.oracle import LossAndGrads
from infcl_gen.verification.properties import ROWS, Case, Inputs, check_package, random_cases, tensors

SMALL_ROWS = (1, 17, 64, 65, 130)  # under the Triton interpreter
LARGE_ROWS = (*ROWS, 1000, 2049, 4096)  # on a GPU


@dataclass(frozen=True)
class Job:
    """What to do: "numerics" (the gate on one device, each process for its share of the examples), "memory" (the peak
    at the planned size), or "ring"."""

    kind: str
    package: str
    device: str  # "cpu", "interpreter" (CPU, with TRITON_INTERPRET=1 in the environment), or "cuda"
    examples: int
    folder: str  # a scratch folder that the processes of the job share
    processes: int = 1
    timeout_s: float = 120.0


def main() -> None:
    job, rank = Job(**json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[2])
    torch.set_num_threads(max(1, torch.get_num_threads() // job.processes))
    module = import_package(Path(job.package))
    found = {"numerics": numerics, "memory": memory, "ring": ring}[job.kind](job, module, rank)
    Path(job.folder, f"found{rank}.json").write_text(json.dumps(found))
    if job.kind == "ring":
        # gloo's threads may abort a process that tears its group down while a peer is gone already; NCCL's end so too
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def numerics(job: Job, module: ModuleType, rank: int) -> list[dict[str, Any]]:
    """Of each example and quantity: its error over what is allowed, and the failure, if it is one."""
    sizes = {"cuda": LARGE_ROWS, "interpreter": SMALL_ROWS}.get(job.device, ROWS)
    device = "cpu" if job.device == "interpreter" else job.device
    share = slice(rank, None, job.processes)
    verdicts = check_package(module, device, job.examples, rows=sizes, share=share)
    return [
        {
            "check": f"numerics {row.quantity}",
            "ratio": row.ratio,
            "failure": None if row.passed else f"{verdict.case}: {row.detail}",
        }
        for verdict in verdicts
        for row in verdict.rows
    ]


def memory(job: Job, module: ModuleType, rank: int) -> list[dict[str, Any]]:
    """The measured peak at the planned size against the predicted one."""
    problem, predicted = module.SPEC["problem"], module.SPEC["predicted"]["peak_bytes"]
    case = Case(
        problem["batch_size"], problem["keys"] or problem["batch_size"], problem["dim"], problem["dtype"]
    )
    inputs = tensors(case, module.SPEC["positives"], job.device)
    arguments = (inputs.q, inputs.k, 14.3)
    if job.device == "cuda":
        module.loss_and_grads(*arguments, labels=inputs.labels)  # compiles
    with PeakMeter(job.device) as meter:
        result = module.loss_and_grads(*arguments, labels=inputs.labels)
    del result
    detail = f"measured {meter.peak_bytes / 2**20:.2f} MiB, predicted {predicted / 2**20:.2f} MiB"
    return [{"check": "memory", "passed": meter.peak_bytes <= predicted, "detail": detail}]


def ring(job: Job, module: ModuleType, rank: int) -> list[dict[str, Any]]:
    """Of each example, on rank 0: its largest error over what is allowed, and the failures, if there are any."""
    device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=Path(job.folder, "store").absolute().as_uri(),
        rank=rank,
        world_size=job.processes,
        timeout=datetime.timedelta(seconds=job.timeout_s),
    )
    problem = module.SPEC["problem"]
    cases = random_cases(
        job.examples,
        problem["dim"],
        problem["dtype"],
        problem["batch_size"],
        problem["keys"] or problem["batch_size"],
        module.SPEC["positives"],
        rows=SMALL_ROWS if job.device == "interpreter" else ROWS,
    )
    found = []
    for case in cases:
        inputs = tensors(case, module.SPEC["positives"], device)
        q_cuts, k_cuts = shards(case, module.SPEC["positives"], job.processes)
        result = module.loss_and_grads(
            inputs.q[q_cuts[rank]],
            inputs.k[k_cuts[rank]],
            inputs.scale,
            inputs.bias,
            labels=None if inputs.labels is None else inputs.labels[q_cuts[rank]],
        )
        parts: list[Any] = [None] * job.processes
        dist.all_gather_object(parts, [tensor.cpu() for tensor in result])
        if rank == 0:
            judged = gate(averaged(parts), _truth(module, inputs))
            rows = [cut.stop - cut.start for cut in q_cuts]
            passed = all(row.passed for row in judged)
            found.append(
                {
                    "check": f"ring of {job.processes}",
                    "ratio": max(row.ratio for row in judged),
                    "failure": None if passed else f"{asdict(case)}, rows {rows}: {failures(judged)}",
                }
            )
    dist.barrier()
    return found


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


def _truth(module: ModuleType, inputs: Inputs) -> Any:
    return truth_of(module, *inputs, precision=module.SPEC["problem"]["precision"])


if __name__ == "__main__":
    main()
