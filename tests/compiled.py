"""What kernels take on a target, compiled in a process of its own: here triton may have been imported to interpret."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from infcl_gen.processes import Seat, run_ranks


def resources(package: Path, target: str, *kernels: str) -> list[dict[str, Any]]:
    """What each kernel takes, or those of that name, ragged and whole."""
    (rows,) = run_ranks("tests.compiled:compile_all", [str(package), target, *kernels], 1, 250.0)
    return rows


def compile_all(arguments: list[str], seat: Seat) -> list[dict[str, Any]]:
    from infcl_gen.verification.aot import Kernels

    package, target, *names = arguments
    kernels = Kernels(Path(package))
    return [
        {"ragged": not inputs.aligned, **dataclasses.asdict(kernels.compiled(name, target, inputs))}
        for name in names or kernels.names(target)
        for inputs in kernels.variants(name, target)
    ]
