"""`infcl-gen verify`: is a package what this generator writes, and are its numbers right on this machine?"""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from infcl_gen.emission import read_package, rerender
from infcl_gen.emission.package import Package, PartialPackageError
from infcl_gen.errors import InfclError, InputError, ToolchainError
from infcl_gen.inputs.text import check_word
from infcl_gen.processes import ProcessError, Progress, run_ranks
from infcl_gen.verification.aot import SHARED_BYTES, aot_checks
from infcl_gen.version import __version__, interpreter_defect

EXAMPLES = {"numerics": {"cpu": 28, "interpreter": 7, "cuda": 49}, "ring": {"cpu": 14, "interpreter": 3, "cuda": 21}}
# Triton compiles kernels anew for an input's sizes and strides: about 3 for each input of a panel package, 5 of a fused
# one, 1 to 2 s each. More processes would crowd one GPU's memory.
MOST_PROCESSES = 8
LARGEST_RANKS = 64
TIMEOUT_S = 900.0
HELD = {"repeats": "the same bits twice", "NaN": "in the same results as in the reference"}
MEMORY_WORK = {"cpu": 2e11, "cuda": 2e15}  # FLOPs beyond which the planned size is not run
MEMORY_INPUTS_BYTES = 4 << 30

Row = dict[str, Any]  # check (name), passed, detail (one line)


def verify_package(
    path: str | Path,
    ranks: int | None = None,
    aot: Sequence[str] = (),
    examples: int | None = None,
    edited: bool = False,
    progress: Progress = lambda *_: None,
) -> list[Row]:
    """Check the package in folder `path`; every check becomes a row, passed or not.

    1. The files against their manifest, and against what SPEC generates today. If these differ, nothing is run, except
       with `edited`: the further rows are then marked `"edited": True`.
    2. The numerics gate over random inputs, on a GPU if there is one for the target, else on the interpreting CPU. The
       same inputs give the same bits twice, and a NaN in one query is where the reference has it.
    3. The memory peak at the planned size, and its loss, dq and dk in the gate, where that is affordable.
    4. `ranks`: the gate on a ring of so many processes, by NCCL if there are as many GPUs, else by gloo.
    5. `aot`: the kernels compiled for these targets, without a GPU.

    Package code runs in processes of its own. One killed after TIMEOUT_S seconds is a failed check. progress(check,
    done, total) is called before each check that compiles or runs it.
    Raises InputError if `path` is no package (`edited`: as `read_package`), or an argument is wrong; ToolchainError if
    torch is missing.
    """
    folder = Path(path)
    if ranks is not None and not 1 <= ranks <= LARGEST_RANKS:
        raise InputError(f"--ranks {ranks}: expected 1 to {LARGEST_RANKS}")
    for target in aot:
        check_word("--aot", target, tuple(sorted(SHARED_BYTES)))
    rows = _byte_checks(folder)
    if all(row["passed"] for row in rows):
        return rows + _code_checks(read_package(folder), ranks, aot, examples, progress)
    if not edited:
        why = "nothing was compiled: the files are not as generated; --edited compiles them all the same"
        return [*rows, _row("aot", False, why)] if aot else rows
    package = read_package(folder, edited=True)
    return rows + [{**row, "edited": True} for row in _code_checks(package, ranks, aot, examples, progress)]


def _code_checks(
    package: Package, ranks: int | None, aot: Sequence[str], examples: int | None, progress: Progress
) -> list[Row]:
    """The rows of what compiles or runs the package's code."""
    rows, spec, folder, edited = list[Row](), package.spec, package.path, bool(package.edited)
    checks: list[tuple[str, Callable[[], list[Row]]]] = []
    if "loss.py" in package.edited:
        rows = [_row("numerics", False, "loss.py was edited, and with it what numbers are compared with")]
    else:
        place = _place(spec, 1)
        drawn = examples or EXAMPLES["numerics"][place]
        cores = len(os.sched_getaffinity(0)) if place == "cuda" else 1  # kernels are compiled for each input
        processes = max(1, min(MOST_PROCESSES, cores // 2, drawn))
        numerics = partial(run, "numerics", folder, place, drawn, processes, edited=edited)
        checks.append((f"numerics of {drawn} inputs, {place}", numerics))
        if _memory_is_affordable(spec, place):
            checks.append(
                (f"memory at the planned size, {place}", partial(run, "memory", folder, place, edited=edited))
            )
        if ranks is not None:
            place = _place(spec, ranks)
            drawn = examples or EXAMPLES["ring"][place]
            ring = partial(run, "ring", folder, place, drawn, ranks, edited=edited)
            checks.append((f"a ring of {ranks} with {drawn} inputs, {place}", ring))
    if aot:
        checks.append((f"kernels for {', '.join(aot)}", partial(aot_checks, folder, list(aot), edited)))
    for done, (what, check) in enumerate(checks):
        progress(what, done, len(checks))
        rows += check()
    return rows


def _byte_checks(folder: Path) -> list[Row]:
    try:
        package = read_package(folder)
    except InputError as error:
        if isinstance(error, PartialPackageError) or not (folder / "manifest.json").is_file():
            raise
        return [_row("files", False, str(error))]
    files = _row("files", True, f"{len(package.files)} files as in the manifest")
    try:
        fresh = rerender(folder)
    except InfclError as error:
        return [files, _row("re-render", False, str(error))]
    different = sorted(name for name in {*fresh, *package.files} if fresh.get(name) != package.files.get(name))
    detail = f"differs from what is generated now: {', '.join(different)}"
    if (written_by := package.spec.get("versions", {}).get("generator")) != __version__:
        detail += f"; written by version {written_by}, this is {__version__}"
    detail = f"{detail}; generate it again" if different else "byte-identical to what is generated now"
    return [files, _row("re-render", not different, detail)]


def _place(spec: dict[str, Any], gpus: int) -> str:
    """The place of properties.SIZES where so many ranks run a package, each on a GPU of its own or all on the CPU."""
    try:
        import torch
    except ImportError as error:
        raise ToolchainError("torch is missing: packages can be generated here, not run or verified") from error
    if torch.cuda.is_available() and torch.cuda.device_count() >= gpus and spec["problem"]["target"] != "cpu":
        return "cuda"
    if spec["plan"]["strategy"] == "torch":
        return "cpu"
    if defect := interpreter_defect():
        raise ToolchainError(f"without {'a GPU' if gpus == 1 else f'{gpus} GPUs'} kernels are interpreted: {defect}")
    return "interpreter"


def _memory_is_affordable(spec: dict[str, Any], place: str) -> bool:
    problem = spec["problem"]
    queries, dim = problem["batch_size"], problem["dim"]
    keys = problem["keys"] or queries
    affordable = 8.0 * queries * keys * dim <= MEMORY_WORK.get(place, 0.0)
    return bool(problem["devices"] == 1 and affordable and 8 * (queries + keys) * dim <= MEMORY_INPUTS_BYTES)


def run(task: str, folder: Path, place: str, examples: int = 0, processes: int = 1, edited: bool = False) -> list[Row]:
    """A row for each check of a task of worker.py at a place of properties.SIZES, done by so many processes.

    "numerics" shares the examples among the processes; "ring" has one rank in each. If a process fails, there is one
    failed row that says how it ended.
    """
    package = str(folder.resolve())
    job = {"package": package, "edited": edited, "place": place, "examples": examples, "timeout_s": TIMEOUT_S}
    interpreted = {"TRITON_INTERPRET": str(int(place == "interpreter"))}
    try:
        parts = run_ranks(f"infcl_gen.verification.worker:{task}", job, processes, TIMEOUT_S, interpreted)
    except ProcessError as error:
        return [_row(f"ring of {processes}" if task == "ring" else task, False, str(error))]
    found = list(itertools.chain(*parts))
    if task == "memory":
        return found
    where = f"{processes} {'nccl' if place == 'cuda' else 'gloo'} ranks" if task == "ring" else place
    rows = []
    counts = Counter(each["check"] for each in found)
    compared = max((count for check, count in counts.items() if check.startswith("numerics d")), default=0)
    for check in counts:
        of_it = [each for each in found if each["check"] == check]
        bad = [each["failure"] for each in of_it if each["failure"]]
        worst = "" if check in HELD else f"{max(each['ratio'] for each in of_it):.2f}"
        detail = f"{len(of_it)} inputs on {where}, {HELD.get(check) or f'largest error {worst} of what is allowed'}"
        unjudged = len(of_it) - compared if check == "numerics loss" else 0
        seldom_finite = 2 * unjudged > len(of_it)
        without = f"of {unjudged} it is not finite in fp64, or too large"
        detail += f"; {without}, and no gradients compared" * bool(unjudged)
        if bad:
            detail = f"{len(bad)} of {len(of_it)} inputs on {where} fail, such as {bad[0]}"
        elif seldom_finite:
            detail = f"{len(of_it)} inputs on {where}; {without}: its formula leaves the range"
        rows.append(_row(check, not (bad or seldom_finite), detail))
    return rows


def _row(check: str, passed: bool, detail: str) -> Row:
    return {"check": check, "passed": passed, "detail": detail}
