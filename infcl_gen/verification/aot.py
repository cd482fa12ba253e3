"""Ahead-of-time compilation of every kernel of a package for any architecture, without a GPU.

Triton compiles without comparing with a device's limits, so shared memory and spills are checked here. So are the races
that Triton up to 3.8 may leave around asynchronous products (`races`), and registers that ptxas 12.8 may lose
(`unwritten`).
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from infcl_gen.emission.package import read_package
from infcl_gen.errors import ToolchainError
from infcl_gen.files import load_file
from infcl_gen.hardware import load_profile, profile_names
from infcl_gen.kernels import Argument, families
from infcl_gen.kernels.choice import Block, Choice
from infcl_gen.runtime.traits import Traits
from infcl_gen.verification.races import races
from infcl_gen.verification.registers import unwritten

_GPUS = [profile for profile in map(load_profile, profile_names()) if profile.target != "cpu"]
SHARED_BYTES = {profile.arch: profile.shared_bytes_per_block for profile in _GPUS}  # the most one block may use
DESCRIPTOR_TARGETS = {profile.arch for profile in _GPUS if profile.tensor_descriptors}
BRANCHES = {"DIAGONAL", "FRESH", "STASH", "KEYS"}  # constants that differ between launches of one plan


@dataclass(frozen=True)
class Inputs:
    """What a kernel is compiled for.

    aligned      sizes are multiples of the tiles and of 16, so nothing is masked.
    descriptors  features are read through tensor descriptors, where the kernel can.
    other        the other branch of a launch: accumulators that hold nothing yet, query rows that are not kept.

    Features are rows of D contiguous elements. Other strides, or misaligned features where there are descriptors, run
    element by element. That is slower, and most targets spill (1 KB a thread for 128 x 256 tiles on sm_90).
    """

    aligned: bool
    descriptors: bool
    other: bool = False

    def __str__(self) -> str:
        words = ["whole tiles" if self.aligned else "ragged", "descriptors" if self.descriptors else "pointers"]
        return ", ".join(words + ["other branch"] * self.other)


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes: shared memory a block, registers and spills a thread; and what is wrong in it."""

    kernel: str
    target: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    faults: tuple[str, ...]  # `races`, and in kernels with wgmma registers that are `unwritten`


class Kernels:
    """The kernels of a package, to be compiled ahead of time, without a GPU."""

    def __init__(self, package: Path, edited: bool = False) -> None:
        self.folder, self.spec = package, read_package(package, edited=edited).spec
        self._load = cache(load_file)
        plan = self.spec["plan"]
        literals = {field.name: plan[field.name] for field in fields(Choice) if field.name in plan}
        blocks = {name: Block(**sizes) for name, sizes in plan["blocks"].items()}
        traits = Traits(**self.spec["loss"]["traits"])
        choice = Choice(**literals | {"arch": self.spec["device"]["arch"], "blocks": blocks, "traits": traits})
        self._declared = {each.name: (family, each) for family in families(choice) for each in family.kernels(choice)}

    def names(self, target: str) -> list[str]:
        """The kernels that this target runs: some are for one architecture alone."""
        return [name for name, (family, _) in self._declared.items() if family.arch in ("", target)]

    def variants(self, kernel: str, target: str) -> list[Inputs]:
        """How a schedule launches a kernel. One that fits on whole tiles may spill on ragged sizes."""
        descriptors = bool(self.spec["plan"]["descriptors"]) and target in DESCRIPTOR_TARGETS
        branches = (False, True) if BRANCHES & set(getattr(self._module(kernel), kernel).arg_names) else (False,)
        return [Inputs(aligned, descriptors, other) for aligned in (True, False) for other in branches]

    def compiled(self, kernel: str, target: str, inputs: Inputs) -> Resources:
        """Compile a kernel as its schedule launches it on such inputs, and read the resources off the binary.

        Raises ToolchainError without cuobjdump, ValueError for an argument that kernels of this version do not have,
        or whatever Triton raises.
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        from infcl_gen.runtime.launch import OPTIONS

        module, launch = self._module(kernel), self.spec["launches"][kernel]
        function, declared = getattr(module, kernel), self._declared[kernel][1]
        known = {argument.name: argument for argument in declared.arguments}
        constants: dict[str, Any] = {}
        signature: dict[str, str] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, name in enumerate(function.arg_names):
            if name not in known:
                raise ValueError(f"{kernel} takes {name}, which kernels of this version do not; generate it again")
            kind = self._type(known[name], module, inputs)
            if kind == "constexpr":
                constants[name] = _constant(name, inputs, module)
            elif kind.startswith("*") or (kind == "i32" and self._divisible(known[name], inputs)):
                attributes[(index,)] = [["tt.divisibility", 16]]
            signature[name] = kind
        gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
        options = OPTIONS | {"num_warps": launch["warps"], "num_stages": launch["stages"]}
        if declared.registers:
            options["maxnreg"] = getattr(module, declared.registers)
        source = (GluonASTSource if function.is_gluon() else ASTSource)(function, signature, constants, attributes)
        return _resources(kernel, target, triton.compile(source, target=gpu, options=options), launch["warps"])

    def _module(self, kernel: str) -> ModuleType:
        return self._load(self.folder / self._declared[kernel][0].file)

    def _type(self, argument: Argument, module: ModuleType, inputs: Inputs) -> str:
        plan = self.spec["plan"]
        kind = argument.type.format(operands=plan["operand_dtype"], inputs=self.spec["problem"]["dtype"])
        stored = argument.name == "stash" and bool(argument.block)
        if stored and inputs.other:  # nothing is kept
            return "*fp32"
        if argument.block and (plan["descriptors"] if stored else inputs.descriptors):
            values = (eval(word, {}, vars(module)) for word in argument.block)  # names of constants
            sizes = ", ".join(str(getattr(value, "value", value)) for value in values)
            layout = f",{getattr(module, argument.layout)!r}" if argument.layout else ""
            return f"tensordesc<{kind[1:]}[{sizes}]{layout}>"
        return kind

    def _divisible(self, argument: Argument, inputs: Inputs) -> bool:
        of_dim = inputs.aligned or self.spec["problem"]["dim"] % 16 == 0
        return {"always": True, "": False, "sizes": inputs.aligned, "dim": of_dim}[argument.multiple]


def aot_checks(package: Path, targets: list[str], edited: bool = False) -> list[dict[str, Any]]:
    """One row (check, passed, detail) for each target (of SHARED_BYTES) and kernel, whose variants must all pass.

    `edited`: as in `read_package`. Warps and stages are those of SPEC.
    """
    kernels = Kernels(package, edited)
    if not (kernels.folder / "kernels.py").exists():
        return [{"check": "aot", "passed": True, "detail": "the torch strategy has no kernels to compile"}]
    return [_row(kernels, name, target) for target in targets for name in kernels.names(target)]


def _row(kernels: Kernels, kernel: str, target: str) -> dict[str, Any]:
    check = f"aot {target} {kernel}"
    found: list[Resources] = []
    for inputs in kernels.variants(kernel, target):
        try:
            found.append(kernels.compiled(kernel, target, inputs))
        except ToolchainError:
            raise
        except Exception as error:  # whatever a compiler throws is this check's result
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return {"check": check, "passed": False, "detail": f"{inputs}: {lines[-1][:300]}"}
    passed, detail = judged(found)
    return {"check": check, "passed": passed, "detail": detail}


def judged(variants: list[Resources]) -> tuple[bool, str]:
    """Whether every variant of a kernel fits, does not spill and has no fault; and the most that one takes."""
    limit = SHARED_BYTES[variants[0].target]
    shared, registers, spilled = (
        max(getattr(used, name) for used in variants) for name in ("shared_bytes", "registers", "spill_bytes")
    )
    detail = f"shared {shared} of {limit} B, {registers} registers, {spilled} B spilled"
    faults = sorted({line for used in variants for line in used.faults})
    if faults:
        detail += f"; {faults[0]} ({len(faults)} in all)"
    return shared <= limit and spilled == 0 and not faults, detail


def _constant(name: str, inputs: Inputs, module: ModuleType) -> Any:
    """What a launch passes for a `tl.constexpr`."""
    if name == "ROWS":
        return getattr(module, "GRADIENT_KEYS" if hasattr(module, "GRADIENT_KEYS") else "FUSED_KEYS").value
    if name == "SHARE":
        return module.QUERY_SHARE.value
    if name.endswith("depth_stride"):
        return 1
    return {
        "MASKED": not inputs.aligned, "DESCRIPTORS": inputs.descriptors, "WIDEN": False, "DOTS": True, "SHARED": True,
        "BLOCK": 1024, "STASH": not inputs.other, "FRESH": inputs.other, "KEYS": inputs.other, "DIAGONAL": inputs.other,
    }[name]  # fmt: skip


def _resources(kernel: str, target: str, compiled: Any, warps: int) -> Resources:
    import triton

    shared = int(compiled.metadata.shared)
    if target.startswith("gfx"):
        found = re.findall(r"\.([vs]gpr_(?:spill_)?count):\s+(\d+)", compiled.asm["amdgcn"])
        number = {name: int(value) for name, value in found}
        spilled = 4 * (number["vgpr_spill_count"] + number["sgpr_spill_count"])
        return Resources(kernel, target, shared, number["vgpr_count"], spilled, ())
    try:
        cuobjdump = triton.knobs.nvidia.cuobjdump.path
    except RuntimeError as error:
        raise ToolchainError(f"{error} in the installed triton; install a wheel that carries it") from error
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listing = ["-sass"] * ("wgmma" in compiled.asm["ptx"])  # whose operands may be lost; a listing takes 0.25 s
        text = subprocess.check_output(
            [cuobjdump, "-res-usage", *listing, file.name], stderr=subprocess.PIPE, text=True
        )
    usage = re.search(r"REG:(\d+).*?STACK:(\d+)", text, re.S)
    if usage is None:
        raise ToolchainError("cuobjdump -res-usage printed no resources; a matching CUDA toolchain comes with triton")
    faults = *races(compiled.asm["ptx"], warps), *unwritten(text)
    return Resources(kernel, target, shared, int(usage[1]), int(usage[2]), faults)
