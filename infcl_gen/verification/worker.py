"""One process of `infcl-gen verify`: runs a package's code and returns what it found.

A crash, a hang, a leak or an environment variable (TRITON_INTERPRET) stays out of the process that verifies.
"""

import contextlib
import dataclasses
import itertools
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from infcl_gen.emission import import_package
from infcl_gen.processes import Seat
from infcl_gen.runtime.traits import Traits
from infcl_gen.verification.gate import GateRow, failures, gate, gate_numbers, gate_states, truth_by_slices, truth_of
from infcl_gen.verification.memory import PeakMeter
from infcl_gen.verification.oracle import SLICE_ROWS, LossAndGrads, trained_numbers
from infcl_gen.verification.properties import (
    ROWS,
    SIZES,
    Case,
    check_package,
    crowded,
    inputs_of,
    nan_misplaced,
    neighbours,
    random_cases,
    small_panels,
    unrepeated,
    with_numbers,
)

# Beyond these no numbers of the planned size are compared: FLOPs in fp64, where the functions of a pair count as the
# products of so many features; bytes of the host, where so many matrices are held at once.
ORACLE_WORK, FUNCTIONS_OF_PAIR = {"cpu": 1e11, "cuda": 5e13}, 400
ORACLE_BYTES, ORACLE_MATRICES = 4 << 30, 24

Job = dict[str, Any]  # package (a folder), whether it is edited, place (of SIZES), examples, timeout_s
Finding = dict[str, Any]  # check (its name), ratio (error over what is allowed), failure (one line, or "")


def numerics(job: Job, seat: Seat) -> list[Finding]:
    """Of each of this process's examples: a finding for each quantity, for repeats and for NaN."""
    module, device, found = _package(job, seat), "cuda" if job["place"] == "cuda" else "cpu", list[Finding]()
    for case, rows in check_package(module, job["place"], job["examples"], slice(seat.rank, None, seat.ranks)):
        found += [_finding(f"numerics {row.quantity}", str(case), [row]) for row in rows]
        inputs = inputs_of(module, case, device)
        for check, differing in (("repeats", unrepeated(module, inputs)), ("NaN", nan_misplaced(module, inputs))):
            failure = f"{case}: {', '.join(differing)}" if differing else ""
            found.append({"check": check, "ratio": 0.0, "failure": failure})
    return found


def memory(job: Job, seat: Seat) -> list[dict[str, Any]]:
    """The measured peak at the planned size against the predicted one; and where that is affordable, the numbers."""
    module, device = _package(job, seat), job["place"]
    problem, predicted = module.SPEC["problem"], module.SPEC["predicted"]["peak_bytes"]
    queries, keys, dim = problem["batch_size"], problem["keys"] or problem["batch_size"], problem["dim"]
    inputs = inputs_of(module, Case(queries, keys, dim, problem["dtype"], scale=14.3), device)
    if device == "cuda":
        module.loss_and_grads(*inputs[:4], **inputs.given)  # compiles
    with PeakMeter(device) as meter:
        result = module.loss_and_grads(*inputs[:4], **inputs.given)
    detail = f"measured {meter.peak_bytes / 2**20:.2f} MiB, predicted {predicted / 2**20:.2f} MiB"
    rows = [{"check": "memory", "passed": meter.peak_bytes <= predicted, "detail": detail}]
    room = torch.cuda.mem_get_info()[0] if device == "cuda" else ORACLE_BYTES
    needed = 8 * ORACLE_MATRICES * (min(queries, SLICE_ROWS) * keys + (queries + keys) * dim)
    if 8.0 * queries * keys * (dim + FUNCTIONS_OF_PAIR) <= ORACLE_WORK[device] and needed <= room:
        judged = [row for row in gate(result, truth_by_slices(module, inputs)) if row.quantity in ("loss", "dq", "dk")]
        error = f"largest error {max(row.ratio for row in judged):.2f} of what is allowed"
        detail = failures(judged) or f"loss, dq and dk of {queries} x {keys} on {device}, {error}"
        rows.append({"check": "numerics at the planned size", "passed": not failures(judged), "detail": detail})
    return rows


def ring(job: Job, seat: Seat) -> list[Finding]:
    """On rank 0, a finding for each example: all quantities of the ranks together.

    Half of them run in small panels, of which one rank has several: shares of ranks are smaller than a panel else.
    """
    module, rank, ranks = _package(job, seat), seat.rank, seat.ranks
    device = torch.device("cuda", rank) if job["place"] == "cuda" else torch.device("cpu")
    seat.join_group(device.type, job["timeout_s"])
    found = []
    cases = random_cases(module, job["examples"], ROWS if job["place"] == "cuda" else SIZES[job["place"]])
    for index, case in enumerate(cases):
        small = index % 4 in (1, 2)  # contiguous rows and others
        case = crowded(module, case, ranks) if small else case
        inputs = inputs_of(module, case, device)
        case = dataclasses.replace(case, queries=len(inputs.q))
        traits = Traits(**module.SPEC["loss"]["traits"])
        if traits.mutual:  # of one rank
            inputs = inputs._replace(labels=neighbours(len(inputs.q)).to(device))
        q_cuts, k_cuts = shards(case, traits, ranks, uneven=small)
        # Several ranks need labels where keys outnumber queries, and where a row's other view is on another rank.
        labelled = inputs.labels is not None or (inputs.k is None and module.SPEC["positives"] == "label")
        labelled |= module.SPEC["positives"] == "label" and case.keys > case.queries
        whole = inputs._replace(labels=inputs.positives() if labelled else None)
        part = whole.of_rank(q_cuts[rank], k_cuts[rank])
        given, gradients, names = part.given, dict[str, Any](), trained_numbers(module, inputs)
        with small_panels(module) if small else contextlib.nullcontext():
            if case.seed % 2 and names:
                result, gradients = with_numbers(module, part, given, names)
            else:
                result = module.loss_and_grads(*part[:4], **given)
        parts: list[Any] = [None] * ranks
        states = {name: given[name] for name in traits.vectors[traits.weighed :]}
        own = [None if tensor is None else tensor.cpu() for tensor in (*result, *states.values(), *gradients.values())]
        dist.all_gather_object(parts, own)
        if rank == 0:
            rows, first = [cut.stop - cut.start for cut in q_cuts], len(LossAndGrads._fields)
            joined = list(map(torch.cat, zip(*(each[first:] for each in parts), strict=True)))
            truth, result = truth_of(module, inputs, bool(gradients)), averaged([each[:first] for each in parts])
            judged = gate(result, truth) + gate_states(dict(zip(states, joined, strict=False)), truth)
            of_numbers = (x / ranks for x in joined[len(states) :])  # the mean over ranks, as that of features
            judged += gate_numbers(result.loss, dict(zip(gradients, of_numbers, strict=True)), truth)
            found.append(_finding(f"ring of {ranks}", f"{case}, rows {rows}", judged))
    return found


def _package(job: Job, seat: Seat) -> ModuleType:
    """The imported package; the processes share the cores."""
    torch.set_num_threads(max(1, torch.get_num_threads() // seat.ranks))
    return import_package(Path(job["package"]), edited=job["edited"])


def _finding(check: str, where: str, rows: list[GateRow]) -> Finding:
    failed = failures(rows)
    return {"check": check, "ratio": max(row.ratio for row in rows), "failure": failed and f"{where}: {failed}"}


def shards(case: Case, traits: Traits, world_size: int, uneven: bool = False) -> tuple[list[slice], list[slice]]:
    """Which rows and keys each rank holds: even shares on even seeds, else random cuts, so that some may be empty. Cuts
    are between pairs of rows, where these are partners. `uneven`: one rank has all but two for each other rank."""
    draw, most = random.Random(case.seed), case.seed % world_size

    def cut(total: int) -> list[slice]:
        if uneven:
            inner = sorted(
                min(total, 2 * rank) if rank <= most else max(0, total - 2 * (world_size - rank))
                for rank in range(1, world_size)
            )
        elif case.seed % 2:
            inner = sorted(draw.randint(0, total) for _ in range(world_size - 1))
        else:
            inner = [total * rank // world_size for rank in range(1, world_size)]
        inner = [each - each % (1 + traits.mutual) for each in inner]
        return [slice(*pair) for pair in itertools.pairwise([0, *inner, total])]

    rows = cut(case.queries)
    alike = traits.own_keys or (traits.paired and case.seed % 3)
    return rows, rows if alike else cut(case.keys)


def averaged(parts: list[list[Any]]) -> LossAndGrads:
    """The ranks' results as data-parallel training uses them, fp64: numbers averaged, rows joined, over the ranks. None
    stays None."""

    def joined(values: tuple[Any, ...]) -> Any:
        if values[0] is None:
            return None
        return torch.cat(values).double() / len(parts) if values[0].dim() else torch.stack(values).double().mean()

    return LossAndGrads(*map(joined, zip(*parts, strict=True)))
