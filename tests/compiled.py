"""What kernels take on a target, compiled in a process of its own: here triton may have been imported to interpret."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

from infcl_gen.files import write_file
from infcl_gen.processes import Seat, run_ranks


def resources(package: Path, target: str, *kernels: str) -> list[dict[str, Any]]:
    """What each kernel takes, or those of that name, ragged and whole."""
    (rows,) = run_ranks("tests.compiled:compile_all", [str(package), target, *kernels], 1, 250.0)
    return rows


def compile_all(arguments: list[str], seat: Seat) -> list[dict[str, Any]]:
    from infcl_gen.verification import aot

    package, target, *names = arguments
    kernels = aot.Kernels(Path(package))
    with mock.patch.object(aot, "_resources", functools.partial(_remembered, aot._resources)):
        return [
            {"ragged": not inputs.aligned, **dataclasses.asdict(kernels.compiled(name, target, inputs))}
            for name in names or kernels.names(target)
            for inputs in kernels.variants(name, target)
        ]


def _remembered(read: Any, kernel: str, target: str, compiled: Any, warps: int) -> Any:
    """What was read off a binary is kept beside it: a disassembly takes 0.3 s, and equal kernels meet in many tests.

    Under a name that changes with the binary, and with the code that reads it.
    """
    from infcl_gen.verification import aot, races, registers

    seen = [repr((kernel, target, warps, compiled.metadata.shared)).encode()]
    seen += [text.encode() if isinstance(text, str) else text for _, text in sorted(compiled.asm.items())]
    seen += [Path(str(module.__file__)).read_bytes() for module in (aot, races, registers)]
    folder = Path(os.environ["TRITON_CACHE_DIR"]).with_name("resources")
    file = folder / f"{hashlib.sha256(b'|'.join(seen)).hexdigest()}.json"
    if not file.exists():
        found = read(kernel, target, compiled, warps)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps(dataclasses.asdict(found)).encode())
    kept = json.loads(file.read_text())
    return aot.Resources(**{**kept, "faults": tuple(kept["faults"])})
