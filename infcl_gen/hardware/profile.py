"""Device profiles: the planner's facts about devices, as data in `profiles/*.toml`.

Every peak names its source: "measured: ...", "vendor: dense ..." (never with sparsity), "derived: ..." (from clocks
and counts) or "assumed: ...".
"""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

from infcl_gen.errors import InputError
from infcl_gen.inputs.cluster_file import Peak
from infcl_gen.inputs.text import bytes_text, check_keys, check_text, read_toml, show, suggestion

MATMUL_KINDS = ("bf16", "fp16", "tf32", "fp32", "fp64")
_FOLDER = Path(__file__).parent
_TARGETS = {"nvidia": "cuda", "amd": "rocm", "cpu": "cpu"}
_ARCHITECTURES = {"nvidia": r"sm_[0-9]{2,3}a?", "amd": r"gfx[0-9a-f]{3,5}", "cpu": r"[a-z0-9_]{2,32}"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Facts of an architecture; `architectures.toml` explains and holds them."""

    family: str
    row_lanes: int = 0
    recomputed_rows: int = 64
    products_read_shared: bool = False
    recomputed_fused: tuple[int, ...] = ()
    profile: str | None = None


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """One kind of device. Sizes in bytes, rates in the units of their names.

    shared_bytes_per_block   the opt-in limit.
    library_workspace_bytes  memory that the BLAS library's matrix product keeps allocated.
    matmul_tflops            by MATMUL_KINDS; "fp32" is without products of reduced precision.
    exp_gops                 1e9 exponentials per second.
    link_gbs, node_link_gbs  of a ring's hop per direction, within a node and between nodes.
    """

    name: str
    vendor: str
    target: str
    arch: str
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    shared_bytes_per_block: int
    registers_per_thread: int
    warp_size: int
    max_warps_per_block: int
    tensor_descriptors: bool
    library_workspace_bytes: int
    bandwidth_gbs: Peak
    matmul_tflops: dict[str, Peak]
    exp_gops: Peak
    launch_us: Peak
    link_gbs: Peak
    node_link_gbs: Peak

    @property
    def architecture(self) -> Architecture:
        """Facts of the architecture, else of the vendor."""
        table = architectures()
        return table.get(self.arch) or table.get(self.vendor) or Architecture("small")

    def check_budget(self, name: str, budget_bytes: int) -> None:
        """Raises InputError for a budget, called `name`, beyond the device's memory; that of a CPU is nominal."""
        if self.target != "cpu" and budget_bytes > self.memory_bytes:
            there = f"the {bytes_text(self.memory_bytes)} of one {self.name}"
            raise InputError(f"{name}: {bytes_text(budget_bytes)} on each device exceeds {there}; give less")

    def __post_init__(self) -> None:
        if defect := _defect(self):
            raise InputError(f"--device-profile: {show(self.name)}: {defect}")


# Valid keys of a profile, each with the valid keys of its table.
_PEAK_KEYS: dict[str, Any] = {"value": {}, "source": {}}
_KEYS = dict.fromkeys([field.name for field in dataclasses.fields(DeviceProfile)], _PEAK_KEYS)
_KEYS["matmul_tflops"] = dict.fromkeys(MATMUL_KINDS, _PEAK_KEYS)


@functools.cache
def architectures() -> dict[str, Architecture]:
    """Facts by the name of an architecture, and by a vendor's name for all its other architectures."""
    import msgspec

    table = read_toml("--device-profile", _FOLDER / "architectures.toml")
    return msgspec.convert(table, dict[str, Architecture], strict=True)


def profile_names() -> tuple[str, ...]:
    """Sorted names of the profiles of infcl_gen."""
    return tuple(sorted(file.stem for file in (_FOLDER / "profiles").glob("*.toml")))


def find_profile(name_or_path: str) -> DeviceProfile | None:
    """`load_profile`; None for a device that has no profile."""
    try:
        return load_profile(name_or_path)
    except InputError:
        return None


def load_profile(name_or_path: str) -> DeviceProfile:
    """The profile of a name (ignoring case, spaces and dashes), or of a FILE.toml.

    "h100-114mp-79gib" is an H100 with 114 SMs and 79 GiB; its compute rates are scaled by the SMs.
    Raises InputError naming what is unknown, missing or out of range.
    """
    text = check_text("--device-profile", name_or_path)
    if text.endswith(".toml"):
        return profile_from_literals(read_toml("--device-profile", text), text)
    size = re.fullmatch(r"([a-z0-9]+)-([1-9][0-9]{0,3})mp-([1-9][0-9]{0,4})gib", text)
    name = size[1] if size else re.sub(r"[ _-]", "", text.lower())
    if name not in profile_names():
        near = suggestion(name, profile_names())
        raise InputError(f"--device-profile: {show(text)} is neither a profile nor a FILE.toml{near}")
    profile = _shipped(name)
    if size is None:
        return profile
    ratio = int(size[2]) / profile.multiprocessors
    source = f"derived: {name}, {size[2]} of {profile.multiprocessors} multiprocessors"
    return dataclasses.replace(
        profile,
        name=text,
        multiprocessors=int(size[2]),
        memory_bytes=int(size[3]) * 2**30,
        matmul_tflops={kind: Peak(peak.value * ratio, source) for kind, peak in profile.matmul_tflops.items()},
        exp_gops=Peak(profile.exp_gops.value * ratio, source),
    )


@functools.cache
def _shipped(name: str) -> DeviceProfile:
    return profile_from_literals(read_toml("--device-profile", _FOLDER / "profiles" / f"{name}.toml"), name)


def profile_from_literals(table: dict[str, Any], where: str = "SPEC['device']") -> DeviceProfile:
    """The profile of literals as in `dataclasses.asdict`. Raises InputError for an unknown key or a bad value."""
    import msgspec

    try:
        check_keys("--device-profile", table, _KEYS, show(where))
        return msgspec.convert(table, DeviceProfile, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        if isinstance(error.__cause__, InputError):  # of __post_init__
            raise error.__cause__ from None
        raise InputError(f"--device-profile: {show(where)}: {error}") from None


def _defect(profile: DeviceProfile) -> str | None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", profile.name):
        return "name must be lower-case letters, digits, '_', '.', '-', at most 64"
    if _TARGETS.get(profile.vendor) != profile.target:
        return f"vendor and target must be one of {', '.join(f'{v}/{t}' for v, t in _TARGETS.items())}"
    if not re.fullmatch(_ARCHITECTURES[profile.vendor], profile.arch):
        return f"arch {show(profile.arch)} is not an architecture of vendor {profile.vendor}"
    for name, value in vars(profile).items():
        zero_is_valid = name == "library_workspace_bytes" or profile.vendor == "cpu"
        if type(value) is int and not (0 if zero_is_valid else 1) <= value <= 2**50:
            return f"{name} = {value} is out of range"
    if profile.multiprocessors < 1 or profile.memory_bytes < 1:
        return "multiprocessors and memory_bytes must be at least 1"
    if set(profile.matmul_tflops) != set(MATMUL_KINDS):
        return f"matmul_tflops must have {', '.join(MATMUL_KINDS)}"
    peaks = {f"matmul_tflops.{kind}": peak for kind, peak in profile.matmul_tflops.items()} | vars(profile)
    for name, peak in peaks.items():
        if isinstance(peak, Peak) and (defect := peak.defect()):
            return f"{name}: {defect}"
    return None
