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
from infcl_gen.hardware import load_profile, profile_names
from infcl_gen.planning.levels import operand_dtype

_GPUS = [profile for profile in map(load_profile, profile_names()) if profile.target != "cpu"]
SHARED_BYTES = {profile.arch: profile.shared_bytes_per_block for profile in _GPUS}  # that one block may have
DESCRIPTOR_TARGETS = {profile.arch for profile in _GPUS if profile.tensor_descriptors}
HELPERS = {
    "base2_slope",
    "load_block",
    "similarity",
    "strip_of",
    "merge_rows",
    "positive_gradient",
    "copy_rows",
}
FEATURES = {"q", "k", "x", "g", "g_low", "out", "q_out", "k_out"}
COUNTS = {"queries", "keys", "rows", "inner", "count", "queries_written", "keys_written"}
BRANCHES = {"FRESH", "STASH", "KEYS"}  # constants that differ between launches of one plan
ANY_COUNTS = {"strip", "parts", "row_parts", "key_parts", "ranks"}  # no multiples of the tiles


@dataclass(frozen=True)
class Inputs:
    """What a kernel is compiled for. `aligned`: sizes are multiples of the tiles and of 16, so nothing is masked;
    `descriptors`: features are read through tensor descriptors, where the kernel can; `other`: the other branch of what
    a launch decides (accumulators that hold nothing yet, query rows that are not kept).

    Features are taken to be rows of D contiguous elements: the checks speak of these. Other strides, and misaligned
    features of a package with descriptors, run as well, but element by element: slower, and on most targets with spills
    (up to 1 KB a thread for 128 x 256 tiles on sm_90).
    """

    aligned: bool
    descriptors: bool
    other: bool = False

    def __str__(self) -> str:
        words = [
            "whole tiles" if self.aligned else "ragged",
            "descriptors" if self.descriptors else "pointers",
        ]
        return ", ".join(words + ["other branch"] * self.other)


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes: bytes of shared memory a block, registers a thread, bytes of spills a thread."""

    kernel: str
    target: str
    shared_bytes: int
    registers: int
    spill_bytes: int


def aot_checks(package: Path, targets: list[str]) -> list[dict[str, Any]]:
    """One row (check, passed, detail) for each target and kernel: the largest of its variants.

    Raises InputError for an unknown target.
    """
    from infcl_gen.emission.package import read_package

    unknown = sorted(set(targets) - set(SHARED_BYTES))
    if unknown:
        raise InputError(
            f"--aot: unknown target {', '.join(unknown)}; known: {', '.join(sorted(SHARED_BYTES))}"
        )
    spec = read_package(package).spec
    if not (Path(package) / "kernels.py").exists():
        return [{"check": "aot", "passed": True, "detail": "the torch strategy has no kernels to compile"}]
    names = kernel_names(load_kernels(package))
    return [_row(package, spec, kernel, target) for target in targets for kernel in names]


def variants(spec: dict[str, Any], target: str, kernel: Any) -> list[Inputs]:
    """The ways in which a schedule launches a kernel on the inputs that it was planned for."""
    descriptors = bool(spec["plan"]["descriptors"]) and target in DESCRIPTOR_TARGETS
    branches = (False, True) if BRANCHES & set(kernel.arg_names) else (False,)
    return [Inputs(aligned, descriptors, other) for aligned in (True, False) for other in branches]


def _row(package: Path, spec: dict[str, Any], kernel: str, target: str) -> dict[str, Any]:
    check, limit = f"aot {target} {kernel}", SHARED_BYTES[target]
    found: list[Resources] = []
    for inputs in variants(spec, target, getattr(load_kernels(package), kernel)):
        try:
            found.append(compile_kernel(package, spec, kernel, target, inputs))
        except ToolchainError:
            raise
        except Exception as error:  # whatever a compiler throws is this check's result
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return {"check": check, "passed": False, "detail": f"{inputs}: {lines[-1][:300]}"}
    shared, registers, spilled = (
        max(getattr(used, name) for used in found) for name in ("shared_bytes", "registers", "spill_bytes")
    )
    detail = f"shared {shared} of {limit} B, {registers} registers, {spilled} B spilled"
    return {"check": check, "passed": shared <= limit and spilled == 0, "detail": detail}


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

    return [
        name for name, value in vars(module).items() if isinstance(value, JITFunction) and name not in HELPERS
    ]


def compile_variants(package: Path, spec: dict[str, Any], kernel: str, target: str) -> list[Resources]:
    """`compile_kernel` in all ways in which the schedule launches it: on ragged sizes a kernel may spill that fits on
    whole tiles."""
    ways = variants(spec, target, getattr(load_kernels(package), kernel))
    return [compile_kernel(package, spec, kernel, target, inputs) for inputs in ways]


def compile_kernel(
    package: Path, spec: dict[str, Any], kernel: str, target: str, inputs: Inputs
) -> Resources:
    """Compiles one kernel as its schedule launches it on such inputs and reads the resources off the binary."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = load_kernels(package)
    function = getattr(module, kernel)
    launch = spec["launches"][kernel]
    constants: dict[str, Any] = {}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(function.arg_names):
        kind = _argument_type(name, kernel, spec, module, inputs)
        if kind == "constexpr":
            constants[name] = _constant(name, inputs, module)
        elif kind.startswith("*") or (kind == "i32" and _divisible(name, spec, inputs)):
            attributes[(index,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    nvidia = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, 64)
    source = ASTSource(function, signature, constants, attributes)
    options = {"num_warps": launch["warps"], "num_stages": launch["stages"]}
    return _resources(kernel, target, triton.compile(source, target=gpu, options=options))


def _argument_type(name: str, kernel: str, spec: dict[str, Any], module: ModuleType, inputs: Inputs) -> str:
    dtype = operand_dtype(spec["problem"]["dtype"], spec["plan"]["split"])
    if kernel in ("finish", "copy_inputs") or (kernel, name) == ("split", "x"):
        dtype = spec["problem"]["dtype"]
    if name.isupper() or name in (
        "q_depth_stride",
        "k_depth_stride",
        "x_depth_stride",
    ):  # a stride of 1 is a constant
        return "constexpr"
    if name == "labels":
        return "*i64" if spec["positives"] == "label" else "i64"
    if name == "stash" and kernel == "forward" and inputs.other:  # any tensor where nothing is kept
        return "*fp32"
    if name == "stash" and kernel == "forward" and spec["plan"]["descriptors"]:
        return f"tensordesc<bf16[{module.FORWARD_ROWS.value}, {module.FORWARD_KEYS.value // 2}]>"
    if name in FEATURES:
        block = _descriptor_block(name, kernel, module) if inputs.descriptors else None
        return f"tensordesc<{dtype}[{block[0]}, {block[1]}]>" if block else f"*{dtype}"
    if name in COUNTS or name in ANY_COUNTS or name.endswith("stride"):
        return "i32"
    named = {
        "stash": "*bf16",
        "part_sums": "*fp64",
        "flags": "*i32",
        "first_key": "i64",
        "query_weight": "fp32",
        "key_weight": "fp32",
    }
    return named.get(name, "fp32" if name == "weight" else "*fp32")


def _divisible(name: str, spec: dict[str, Any], inputs: Inputs) -> bool:
    """Whether Triton may take this argument for a multiple of 16."""
    return name not in ANY_COUNTS and (inputs.aligned or _always_aligned(name, spec))


def _always_aligned(name: str, spec: dict[str, Any]) -> bool:
    """Strides that do not depend on the number of rows: of the features, and of the scratch panel, which is padded."""
    of_features = name in ("q_row_stride", "k_row_stride", "x_row_stride", "x_inner_stride")
    return name in ("g_stride", "g_row_stride", "stash_stride") or (
        (of_features or name == "out_stride") and spec["problem"]["dim"] % 16 == 0
    )


def _constant(name: str, inputs: Inputs, module: ModuleType) -> Any:
    if name == "ROWS":
        return getattr(module, "GRADIENT_KEYS" if hasattr(module, "GRADIENT_KEYS") else "FUSED_KEYS").value
    if name == "SHARE":
        return module.QUERY_SHARE.value
    if name.endswith("depth_stride"):
        return 1
    if name == "KEYS":
        return inputs.other
    flags = {"MASKED": not inputs.aligned, "DESCRIPTORS": inputs.descriptors, "WIDEN": False}
    return (flags | {"STASH": not inputs.other, "FRESH": inputs.other, "DOTS": True, "BLOCK": 1024})[name]


def _descriptor_block(name: str, kernel: str, module: ModuleType) -> tuple[int, int] | None:
    """Block (rows, depth) of the descriptor through which this kernel reads q or k; None where it reads pointers."""
    if name not in ("q", "k"):
        return None
    own_queries = name == "q"
    family = kernel
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
        fields = "vgpr_count|vgpr_spill_count|sgpr_spill_count"
        found = re.findall(rf"\.({fields}):\s+(\d+)", compiled.asm["amdgcn"])
        number = {name: int(value) for name, value in found}
        spilled = 4 * (number.get("vgpr_spill_count", 0) + number.get("sgpr_spill_count", 0))
        return Resources(kernel, target, shared, number.get("vgpr_count", 0), spilled)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_cuobjdump()), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+).*?STACK:(\d+)", text, re.S)
    if usage is None:
        raise ToolchainError(
            "cuobjdump -res-usage printed no resources; a matching CUDA toolchain comes with triton"
        )
    return Resources(kernel, target, shared, int(usage[1]), int(usage[2]))


def _cuobjdump() -> Path:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not path.exists():
        raise ToolchainError(
            f"{path.name} is missing from the installed triton; install a wheel that carries it"
        )
    return path
