"""One process of `infcl-gen tune`, which can be killed alone: one candidate."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infcl_gen.inputs.text import one_line
from infcl_gen.processes import Answer, Requests

SAMPLED_ROWS = 512  # of each gradient, compared element by element; all rows are compared by their norms


def compile_kernels(requests: Requests, answer: Answer, folder: str, target: str, *kernels: str) -> None:
    """Answers whether these kernels of the package fit an architecture ("compiled"), as `verify --aot` judges."""
    from infcl_gen.verification.aot import Kernels, judged

    with _reported(answer):
        package = Kernels(Path(folder))
        for name in kernels:
            variants = package.variants(name, target)
            passed, detail = judged([package.compiled(name, target, inputs) for inputs in variants])
            if not passed:
                answer(failed="spills", detail=f"{name}: {detail}")
                return
        answer(done="compiled")


def run(requests: Requests, answer: Answer, folder: str) -> None:
    """Import the package, pass the numerics gate ("gated"), then run at the planned size, as requests ask:

    {"file": F, "reference": bool}   the first: compare results with those in F, or write them there ("compared")
    {"repeats": N}                   all others: N times in ms ("sampled")

    Answers carry `done`, or `failed` (a status of a record) and `detail`.
    """
    import torch

    from infcl_gen.bench.point import features, training_step
    from infcl_gen.bench.timing import Timer
    from infcl_gen.emission import import_package
    from infcl_gen.verification.gate import failures
    from infcl_gen.verification.properties import check_package

    with _reported(answer):
        module = import_package(Path(folder), "infcl_gen_candidate")  # unchecked: the tuner compares the manifest
        device = "cpu" if module.SPEC["device"]["target"] == "cpu" else "cuda"
        for case, rows in check_package(module, device):
            if wrong := failures(rows):
                answer(failed="wrong", detail=f"{case}: {wrong}"[:500])
                return
        answer(done="gated")
        asked = requests.get()  # before features are drawn: those of all candidates at once would not fit
        problem, plan = module.SPEC["problem"], module.SPEC["plan"]
        sizes = (plan["rows_per_rank"], plan["keys_per_rank"])  # of a ring, one hop is timed
        q, k = (features(rows, problem["dim"], problem["dtype"], seed, device) for seed, rows in enumerate(sizes))
        if module.SPEC["loss"]["traits"]["domain"] == "triangle":
            k = None
        wide = torch.promote_types(q.dtype, torch.float32)
        scale = torch.tensor(14.3, dtype=wide, device=device, requires_grad=True)
        step = training_step(module, q, k, scale)
        evidence = _evidence(step())
        if asked["reference"]:
            torch.save(evidence, asked["file"])
        elif defect := _defect(evidence, torch.load(asked["file"]), problem["dtype"]):
            answer(failed="wrong", detail=defect)
            return
        result: dict[str, Any] = {"done": "compared"}
        while True:
            for leaf in (q, k, scale):
                if leaf is not None:
                    leaf.grad = None
            if device == "cuda":  # the next candidate needs the memory
                torch.cuda.empty_cache()
            answer(**result)
            repeats = requests.get()["repeats"]
            step()
            timer = Timer(device)
            times = [timer.times(step) for _ in range(repeats)]
            times_ms = [each.idle_ms if each.queued_ms is None else each.queued_ms for each in times]
            result = {"done": "sampled", "times_ms": times_ms}


@contextlib.contextmanager
def _reported(answer: Answer) -> Iterator[None]:
    """Too little memory is an answer; any other exception ends the process."""
    try:
        yield
    except Exception as error:
        from infcl_gen.bench.measure import out_of_memory  # with torch, which compiling does without

        if not out_of_memory(error):
            raise
        answer(failed="out of memory", detail=one_line(error))


def _evidence(result: tuple[Any, ...]) -> dict[str, Any]:
    """Loss, dscale, the norm of every row of the gradients, and some of the rows."""
    import torch

    loss, dq, dk, dscale = result
    numbers = {"loss": loss, "dscale": dscale}  # dscale is None for a loss without a scale
    found = {name: x.double().cpu().reshape(1) for name, x in numbers.items() if x is not None}
    for name, rows in (("dq", dq),) if dk is None else (("dq", dq), ("dk", dk)):
        found[f"norms of {name}"] = torch.cat([part.double().norm(dim=1).cpu() for part in rows.split(1 << 16)])
        chosen = torch.linspace(0, len(rows) - 1, min(SAMPLED_ROWS, len(rows)), dtype=torch.float64).long()
        found[f"rows of {name}"] = rows[chosen.to(rows.device)].double().cpu()
    return found


def _defect(evidence: dict[str, Any], reference: dict[str, Any], dtype: str) -> str | None:
    """Where two results that passed the gate on other inputs differ by more than roundings, or None."""
    # Each is rounded twice to the features' dtype (g and the gradient); fp32 may be split products.
    allowed = {"bf16": 2.0**-6, "fp16": 2.0**-9, "fp32": 2.0**-13, "fp64": 1e-9}[dtype]
    for name, true in reference.items():
        got = evidence[name]
        if got.shape != true.shape:
            return f"{name}: another shape than the default's"
        rows = got.reshape(len(got), -1) - true.reshape(len(true), -1)
        largest = rows.norm(dim=1).max() / (true.norm() / len(true) ** 0.5)  # relative to the rows' root mean square
        # A row may be farther off than the whole is, and a number is only as exact as the statistics are.
        for part, error in (("", rows.norm() / true.norm()), (" in one row", largest / 8)):
            if not float(error) <= allowed:
                return f"{name}{part}: differs by {float(error):.1e} from the default's, allowed {allowed:.1e}"
    return None
