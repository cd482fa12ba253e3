"""Ahead-of-time compilation of every kernel of a package for any architecture, without a GPU.

Triton compiles but never compares with a device's limits, so shared memory, registers and spills are checked here.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from infcl_gen.errors import InputError, ToolchainError

SHARED_BYTES = {  # opt-in shared memory of one block: CUDA programming guide, table of compute capabilities; CDNA 3 and 4 ISA guides
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
    "gfx950": 163_840,
}
HELPERS = {"base2_slope", "load_block", "similarity", "tile_of"}
FEATURES = {"q", "k", "x", "g", "out"}
COUNTS = {"queries", "keys", "rows", "inner", "parts"}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes: bytes of shared memory a block, registers a thread, bytes of spills a thread."""

    kernel: str
    target: str
    shared_bytes: int
    registers: int
    spill_bytes: int


def aot_checks(package: Path, targets: list[str]) -> list[dict[str, Any]]:
    """One row (check, passed, detail) for each kernel and target. Raises InputError for an unknown target."""
    from infcl_gen.emission.package import read_package

    unknown = sorted(set(targets) - set(SHARED_BYTES))
    if unknown:
        raise InputError(f"--aot: unknown target {', '.join(unknown)}; known: {', '.join(SHARED_BYTES)}")
    spec = read_package(package).spec
    if not (Path(package) / "kernels.py").exists():
        return [{"check": "aot", "passed": True, "detail": "the torch strategy has no kernels to compile"}]
    rows = []
    for target in targets:
        for kernel in kernel_names(load_kernels(package)):
            try:
                used = compile_kernel(package, spec, kernel, target)
            except ToolchainError:
                raise
            except Exception as error:  # whatever a compiler throws is this check's result
                rows.append({"check": f"aot {target} {kernel}", "passed": False, "detail": str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__})
                continue
            fits = used.shared_bytes <= SHARED_BYTES[target] and used.spill_bytes == 0
            rows.append({
                "check": f"aot {target} {kernel}",
                "passed": fits,
                "detail": f"shared {used.shared_bytes} of {SHARED_BYTES[target]} B, {used.registers} registers, {used.spill_bytes} B spilled",
            })
    return rows


def load_kernels(package: Path) -> ModuleType:
    """kernels.py of a package as a module of its own: it needs nothing but triton."""
    path = Path(package) / "kernels.py"
    spec = importlib.util.spec_from_file_location(f"infcl_kernels_{abs(hash(str(path.resolve())))}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # triton finds a kernel's globals through its module
    spec.loader.exec_module(module)
    return module


def kernel_names(module: ModuleType) -> list[str]:
    """The kernels (not the inlined helpers) in the order of the file."""
    from triton.runtime.jit import JITFunction

    return [name for name, value in vars(module).items() if isinstance(value, JITFunction) and name not in HELPERS]


def compile_kernel(package: Path, spec: dict[str, Any], kernel: str, target: str, masked: bool = False) -> Resources:
    """Compiles one kernel as its schedule launches it and reads the resources off the binary."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = load_kernels(package)
    function = getattr(module, kernel)
    plan = spec["plan"]
    launch = spec["launches"][kernel]
    descriptors = bool(plan["descriptors"]) and target in ("sm_90", "sm_100", "sm_120")
    constants: dict[str, Any] = {}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(function.arg_names):
        kind = _argument_type(name, kernel, spec, module, descriptors)
        if kind == "constexpr":
            constants[name] = _constant(name, masked, descriptors)
        elif kind.startswith(("*", "i")) and not name.startswith("first_") and kind != "i64":
            attributes[(index,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    if target.startswith("sm_"):
        gpu = GPUTarget("cuda", int(target[3:]), 32)
    else:
        gpu = GPUTarget("hip", target, 64)
    source = ASTSource(function, signature, constants, attributes)
    options = {"num_warps": launch["warps"], "num_stages": launch["stages"]}
    compiled = triton.compile(source, target=gpu, options=options)
    return _resources(kernel, target, compiled)


def _argument_type(name: str, kernel: str, spec: dict[str, Any], module: ModuleType, descriptors: bool) -> str:
    dtype = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}[spec["problem"]["dtype"]]
    if name.isupper() or (name.endswith("depth_stride") and descriptors) or (name.endswith("depth_stride") and name != "x_depth_stride"):
        return "constexpr"
    if name == "labels":
        return "*i64" if spec["positives"] == "label" else "i64"
    if name in FEATURES:
        side = _descriptor_block(name, kernel, module) if descriptors else None
        return f"tensordesc<{dtype}[{side[0]}, {side[1]}]>" if side else f"*{dtype}"
    if name == "stash":
        return "*bf16"
    if name == "flags":
        return "*i32"
    if name == "first_key":
        return "i64"
    if name in COUNTS or name.endswith("stride"):
        return "i32"
    if name.endswith("weight"):
        return "fp32"
    return "*fp32"


def _constant(name: str, masked: bool, descriptors: bool) -> Any:
    if name.endswith("depth_stride"):
        return 1
    return {"MASKED": masked, "DESCRIPTORS": descriptors, "WIDEN": False, "STASH": True, "DOTS": True, "BLOCK": 1024}[name]


def _descriptor_block(name: str, kernel: str, module: ModuleType) -> tuple[int, int] | None:
    """Block (rows, depth) of the descriptor through which this kernel reads q or k; None where it reads pointers."""
    if name not in ("q", "k"):
        return None
    own_queries = name == "q"
    family = kernel.removesuffix("_wide")
    if family in ("fused_queries", "fused_keys"):
        own = own_queries == (family == "fused_queries")
        rows = module.FUSED_ROWS if own else module.FUSED_KEYS
        return rows.value, module.FUSED_DEPTH.value
    if family in ("forward", "gradient"):
        prefix = family.upper()
        rows = getattr(module, f"{prefix}_{'ROWS' if own_queries else 'KEYS'}")
        return rows.value, getattr(module, f"{prefix}_DEPTH").value
    return None


def _resources(kernel: str, target: str, compiled: Any) -> Resources:
    shared = int(compiled.metadata.shared)
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        number = {key: int(value) for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s+(\d+)", text)}
        spilled = 4 * (number.get("vgpr_spill_count", 0) + number.get("sgpr_spill_count", 0))
        return Resources(kernel, target, shared, number.get("vgpr_count", 0), spilled)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([str(_cuobjdump()), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+).*?STACK:(\d+)", text, re.S)
    if found is None:
        raise ToolchainError("cuobjdump -res-usage printed no resources; a matching CUDA toolchain comes with triton")
    return Resources(kernel, target, shared, int(found[1]), int(found[2]))


def _cuobjdump() -> Path:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not path.exists():
        raise ToolchainError(f"{path.name} is missing from the installed triton; install a triton wheel that carries it")
    return path
