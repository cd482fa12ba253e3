"""`infcl-gen verify`: is a package what this generator writes, and are its numbers right on this machine?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infcl_gen.emission import read_package, rerender
from infcl_gen.errors import InfclError, InputError, ToolchainError
from infcl_gen.version import __version__

SCHEMA_VERSION = 1
EXAMPLES = {"cpu": 28, "interpreter": 7, "cuda": 56}
RING_EXAMPLES = {"cpu": 14, "interpreter": 3, "cuda": 28}
# Each input is of other sizes and strides, for which Triton compiles other kernels, a second or two each: 163 of them
# for 56 inputs of a panel package, 265 of a fused one. More processes would crowd one GPU's memory.
MOST_PROCESSES = 8
LARGEST_RANKS = 64
TIMEOUT_S = 900.0
MEMORY_WORK = {"cpu": 2e11, "cuda": 2e15}  # FLOPs beyond which the planned size is not run
MEMORY_INPUTS_BYTES = 4 << 30


@dataclass(frozen=True)
class Report:
    """The checks in the order they ran: rows of check (name), passed, detail (one line)."""

    package: str
    rows: tuple[dict[str, Any], ...]

    @property
    def passed(self) -> bool:
        return all(row["passed"] for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "package": self.package,
            "passed": self.passed,
            "rows": list(self.rows),
        }


def verify_package(
    path: str | Path,
    ranks: int | None = None,
    aot: Sequence[str] | None = None,
    device: str | None = None,
    examples: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Report:
    """Check the package in folder `path`; every check becomes a row, passed or not.

    Bytes first: the files against their manifest, then against what would be generated now from SPEC. If these fail
    nothing of the package is run. Then the numerics gate over random inputs, on `device` ("cpu", "cuda", "interpreter";
    None: the GPU for GPU targets if there is one, else the CPU, where Triton kernels are interpreted), and,
    where that is affordable, the memory peak at the planned size. `ranks`: the gate on a ring of so many processes
    (NCCL if there are as many GPUs, else gloo). `aot`: compile the kernels for these targets, without a GPU.

    Package code runs in processes of its own, each killed after `timeout_s` seconds, which is a failed check.
    Raises InputError if `path` is no package, or an argument is wrong; ToolchainError if torch is missing.
    """
    folder = Path(path)
    if ranks is not None and not 1 <= ranks <= LARGEST_RANKS:
        raise InputError(f"--ranks {ranks}: expected 1 to {LARGEST_RANKS}")
    if device not in (None, "cpu", "cuda", "interpreter"):
        raise InputError(f"device {device!r}: expected cpu, cuda or interpreter")
    rows = list(_byte_checks(folder))
    report_of = str(folder)
    if not all(row["passed"] for row in rows):
        return Report(report_of, tuple(rows))
    spec = read_package(folder).spec
    place = device or _device(spec)
    rows += _numerics(folder, place, examples or EXAMPLES[place], timeout_s)
    if _memory_is_affordable(spec, place):
        rows += _run("memory", folder, place, 1, 1, timeout_s)
    if ranks is not None:
        if place == "cuda" and _gpus() < ranks:  # a ring on GPUs needs one for each rank
            place = "cpu" if spec["plan"]["strategy"] == "torch" else "interpreter"
        rows += _ring(folder, place, examples or RING_EXAMPLES[place], ranks, timeout_s)
    if aot:
        from infcl_gen.verification.aot import aot_checks

        rows += aot_checks(folder, list(aot))
    return Report(report_of, tuple(rows))


def _byte_checks(folder: Path) -> list[dict[str, Any]]:
    try:
        package = read_package(folder)
    except InputError as error:
        if not (folder / "manifest.json").is_file():
            raise
        return [_row("files", False, str(error))]
    rows = [_row("files", True, f"{len(package.files)} files as in the manifest")]
    written_by = package.spec.get("versions", {}).get("generator")
    try:
        fresh = rerender(folder)
    except InfclError as error:
        return [*rows, _row("re-render", False, str(error))]
    different = sorted(
        name for name in {*fresh, *package.files} if fresh.get(name) != package.files.get(name)
    )
    if not different:
        return [*rows, _row("re-render", True, "byte-identical to what is generated now")]
    detail = f"differs from what is generated now: {', '.join(different)}"
    if written_by != __version__:
        detail += f"; written by version {written_by}, this is {__version__}"
    return [*rows, _row("re-render", False, f"{detail}; generate it again")]


def _device(spec: dict[str, Any]) -> str:
    gpu = _gpus() > 0
    if spec["plan"]["strategy"] == "torch":
        return "cuda" if gpu and spec["problem"]["target"] != "cpu" else "cpu"
    return "cuda" if gpu else "interpreter"


def _gpus() -> int:
    try:
        import torch
    except ImportError as error:
        raise ToolchainError(
            "torch is missing: packages can be generated here, not run or verified"
        ) from error
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _memory_is_affordable(spec: dict[str, Any], place: str) -> bool:
    problem = spec["problem"]
    keys = problem["keys"] or problem["batch_size"]
    work = 8.0 * problem["batch_size"] * keys * problem["dim"]
    inputs_bytes = 8 * (problem["batch_size"] + keys) * problem["dim"]
    affordable = work <= MEMORY_WORK.get(place, 0.0) and inputs_bytes <= MEMORY_INPUTS_BYTES
    return bool(problem["devices"] == 1 and affordable)


def _numerics(folder: Path, place: str, examples: int, timeout_s: float) -> list[dict[str, Any]]:
    """A row for each result: of all examples, which are shared out among processes where kernels are compiled."""
    judged = _run("numerics", folder, place, examples, min(_processes(place), examples), timeout_s)
    return _summaries(judged, place)


def _ring(folder: Path, place: str, examples: int, ranks: int, timeout_s: float) -> list[dict[str, Any]]:
    backend = "nccl" if place == "cuda" else "gloo"
    return _summaries(_run("ring", folder, place, examples, ranks, timeout_s), f"{ranks} {backend} ranks")


def _summaries(judged: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """A row for all inputs of each check; or the row that says why there are none."""
    if any("passed" in found for found in judged):
        return judged
    rows = []
    for check in dict.fromkeys(found["check"] for found in judged):
        of_it = [found for found in judged if found["check"] == check]
        bad = [found["failure"] for found in of_it if found["failure"] is not None]
        ratio = max(found["ratio"] for found in of_it)
        detail = f"{len(of_it)} inputs on {where}, largest error {ratio:.2f} of what is allowed"
        if bad:
            detail = f"{len(bad)} of {len(of_it)} inputs on {where} fail, such as {bad[0]}"
        rows.append(_row(check, not bad, detail))
    return rows


def _processes(place: str) -> int:
    """How many share the inputs: one, unless kernels are compiled for each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_PROCESSES, cores // 2)) if place == "cuda" else 1


def _run(
    kind: str, folder: Path, place: str, examples: int, processes: int, timeout_s: float
) -> list[dict[str, Any]]:
    """Run a job in that many processes and return what they found, or one failed row that says how it ended."""
    name = {"numerics": "numerics", "memory": "memory", "ring": f"ring of {processes}"}[kind]
    environment = {**os.environ, "TRITON_INTERPRET": "1" if place == "interpreter" else "0"}
    source = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory(prefix="infcl-gen-verify-") as scratch:
        job = {
            "kind": kind,
            "package": str(folder.resolve()),
            "device": place,
            "examples": examples,
            "folder": scratch,
            "processes": processes,
            "timeout_s": timeout_s,
        }
        Path(scratch, "job.json").write_text(json.dumps(job))
        command = [sys.executable, "-P", "-m", "infcl_gen.verification.worker", f"{scratch}/job.json"]
        logs = [Path(scratch, f"log{rank}") for rank in range(processes)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    running.append(
                        subprocess.Popen(
                            [*command, str(rank)],
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=output,
                            env=environment,
                        )
                    )
            failed = _wait(running, timeout_s)
        finally:
            for process in running:
                process.kill()
                process.wait()
        if failed is not None:
            return [_row(name, False, f"{failed}: {_last_line(logs, running)}")]
        try:
            found = [json.loads(Path(scratch, f"found{rank}.json").read_text()) for rank in range(processes)]
        except (OSError, ValueError):
            return [_row(name, False, f"no result: {_last_line(logs, running)}")]
        return [row for part in found for row in part]


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> str | None:
    """Wait for all; None if all ended well, else what went wrong. One failure ends the wait: the others would hang."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        bad = [(rank, code) for rank, code in enumerate(codes) if code]
        if bad:
            rank, code = bad[0]
            how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
            return f"process {rank} {how}"
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            return f"not finished after {timeout_s:.0f} s"
        time.sleep(0.02)


def _last_line(logs: Sequence[Path], processes: Sequence[subprocess.Popen[bytes]]) -> str:
    """The last line that a failed process wrote, in the order of the ranks, or another's if it wrote nothing."""
    ranked = sorted(range(len(logs)), key=lambda rank: (not processes[rank].returncode, rank))
    for rank in ranked:
        lines = logs[rank].read_text(errors="replace").split("\n") if logs[rank].exists() else []
        written = [line.strip() for line in lines if line.strip()]
        if written:
            return written[-1][:500]
    return "it wrote nothing"


def _row(check: str, passed: bool, detail: str) -> dict[str, Any]:
    return {"check": check, "passed": passed, "detail": detail}
