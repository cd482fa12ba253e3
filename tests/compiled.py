"""What kernels take on a target, compiled in a process of its own: here triton may have been imported to interpret.

The same compiler makes the same binary of the same source, so what was read off one is kept: in the build folder, and
in `compiled.json` beside this file. The nightly tier compiles everything, and fails where `compiled.json` says
otherwise. CI compiles what it does not know: those of prefixes in a minute. An edit above a kernel changes its name.
`python -m tests.compiled`, a part of `make golden`, runs tests/test_aot.py and writes what it has used.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from infcl_gen.files import write_file
from infcl_gen.processes import Seat, run_ranks
from tests.tiers import LONG

KNOWN = Path(__file__).with_suffix(".json")
RESOURCES, USED = "resources", "used"  # folders beside Triton's: what was compiled here, and what tests have asked for
NUMBERS = ("shared_bytes", "registers", "spill_bytes")


def resources(package: Path, target: str, *kernels: str) -> list[dict[str, Any]]:
    """What each kernel takes, or those of that name, ragged and whole."""
    (rows,) = run_ranks("tests.compiled:compile_all", [str(package), target, *kernels], 1, 250.0)
    return rows


def compile_all(arguments: list[str], seat: Seat) -> list[dict[str, Any]]:
    import triton

    from infcl_gen.verification import aot

    package, target, *names = arguments
    kernels = aot.Kernels(Path(package))
    with (
        mock.patch.object(aot, "_resources", functools.partial(_remembered, aot._resources, triton.compile)),
        mock.patch.object(triton, "compile", lambda source, **how: (source, how)),
    ):
        return [
            {"ragged": not inputs.aligned, **dataclasses.asdict(kernels.compiled(name, target, inputs))}
            for name in names or kernels.names(target)
            for inputs in kernels.variants(name, target)
        ]


def _remembered(read: Any, build: Any, kernel: str, target: str, compiled: Any, warps: int) -> Any:
    """Under a name that changes with the source, how it is compiled and by what, and with the code that reads it."""
    from infcl_gen.verification import aot, races, registers

    source, how = compiled
    seen = [repr((kernel, target, warps, source.hash(), how, importlib.metadata.version("triton"))).encode()]
    seen += [Path(str(module.__file__)).read_bytes() for module in (aot, races, registers)]
    name = hashlib.sha256(b"|".join(seen)).hexdigest()[:32]
    known = _known().get(name)
    file, used = (Path(os.environ["TRITON_CACHE_DIR"]).with_name(each) / f"{name}.json" for each in (RESOURCES, USED))
    used.parent.mkdir(parents=True, exist_ok=True)
    if known is not None and not LONG:
        write_file(used, json.dumps(known).encode())
        return _resources_of(kernel, target, known)
    if not file.exists():
        found = read(kernel, target, build(source, **how), warps)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps([*(getattr(found, each) for each in NUMBERS), *found.faults]).encode())
    kept = json.loads(file.read_text())
    write_file(used, json.dumps(kept).encode())
    assert known in (None, kept), f"{kernel} for {target}: {KNOWN.name} says {known}, compiled it takes {kept}"
    return _resources_of(kernel, target, kept)


def _resources_of(kernel: str, target: str, kept: list[Any]) -> Any:
    from infcl_gen.verification import aot

    return aot.Resources(kernel, target, *kept[: len(NUMBERS)], tuple(kept[len(NUMBERS) :]))


@functools.cache
def _known() -> dict[str, list[Any]]:
    return dict(json.loads(KNOWN.read_text()))


def main() -> None:
    used = Path("build/compiled", USED)
    shutil.rmtree(used, ignore_errors=True)
    tests = Path(__file__).with_name("test_aot.py")
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "2", str(tests)], check=True)
    found = {file.stem: json.loads(file.read_text()) for file in sorted(used.iterdir())}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept)}" for name, kept in found.items())
    write_file(KNOWN, f"{{\n{lines}\n}}\n".encode())


if __name__ == "__main__":
    main()
