"""Device profiles: what the planner knows about a device, as data in `profiles/*.toml`.

Every peak carries its source: "measured: ...", "vendor: dense ..." (never the figure with sparsity),
"derived: ..." (from clocks and counts) or "assumed: ...".
"""

from __future__ import annotations

import dataclasses
import functools
import re
from importlib import resources
from typing import Any

from infcl_gen.errors import InputError
from infcl_gen.inputs.cluster_file import Peak
from infcl_gen.inputs.text import check_text, read_text_file, show, suggestion

MATMUL_KINDS = ("bf16", "fp16", "tf32", "fp32", "fp64")
_VENDORS = {"nvidia": "cuda", "amd": "rocm", "cpu": "cpu"}
_ARCHITECTURES = {"nvidia": r"sm_[0-9]{2,3}a?", "amd": r"gfx[0-9a-f]{3,5}", "cpu": r"[a-z0-9_]{2,32}"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Facts of an architecture, as `architectures.toml` explains and holds them."""

    family: str
    row_lanes: int = 0
    recomputed_rows: int = 64
    products_read_shared: bool = False
    recomputed_fused: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """One kind of device. Sizes in bytes, rates in the units of their names; `exp_gops` in 1e9 exponentials a
    second.

    `link_gbs` is the rate of a ring's hop per direction between devices of a node, `node_link_gbs` between
    nodes; `matmul_tflops` has every key of MATMUL_KINDS ("fp32" without reduced-precision products).
    `library_workspace_bytes` is what the library's matrix product keeps allocated. `shared_bytes_per_block`
    is the opt-in limit.
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
        """What kernels know of its architecture."""
        table = _architectures()
        return table.get(self.arch) or table.get(self.vendor) or Architecture("small")

    def __post_init__(self) -> None:
        problem = _defect(self)
        if problem:
            raise InputError(f"--device-profile: {show(self.name)}: {problem}")


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with infcl_gen, sorted."""
    files = resources.files("infcl_gen.hardware").joinpath("profiles").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_profile(name_or_path: str) -> DeviceProfile:
    """The profile of that name (case, spaces and dashes do not matter), or the one in a file `FILE.toml`.

    A name such as "h100-114mp-79gib" is that board with another number of multiprocessors and another memory:
    compute rates are scaled. Raises InputError naming what is unknown, missing or out of range.
    """
    text = check_text("--device-profile", name_or_path)
    if text.endswith(".toml"):
        return _decode(read_text_file("--device-profile", text), text)
    size = re.fullmatch(r"([a-z0-9]+)-([1-9][0-9]{0,3})mp-([1-9][0-9]{0,4})gib", text)
    name = size[1] if size else re.sub(r"[ _-]", "", text.lower())
    if name not in profile_names():
        near = suggestion(name, profile_names())
        raise InputError(f"--device-profile: {show(text)} is neither a profile nor a FILE.toml{near}")
    file = resources.files("infcl_gen.hardware").joinpath("profiles", f"{name}.toml")
    profile = _decode(file.read_text(encoding="utf-8"), file.name)
    return _resized(profile, text, int(size[2]), int(size[3]) * 2**30) if size else profile


def profile_from_literals(table: dict[str, Any], where: str = "SPEC['device']") -> DeviceProfile:
    """The profile that `dataclasses.asdict` wrote down. Raises InputError naming what is unknown or out of range."""
    return _convert(table, where)


@functools.cache
def _architectures() -> dict[str, Architecture]:
    import msgspec

    text = resources.files("infcl_gen.hardware").joinpath("architectures.toml").read_text(encoding="utf-8")
    return msgspec.toml.decode(text, type=dict[str, Architecture], strict=True)


def _resized(profile: DeviceProfile, name: str, multiprocessors: int, memory_bytes: int) -> DeviceProfile:
    ratio = multiprocessors / profile.multiprocessors
    source = f"derived: {profile.name}, {multiprocessors} of {profile.multiprocessors} multiprocessors"
    return dataclasses.replace(
        profile,
        name=name,
        multiprocessors=multiprocessors,
        memory_bytes=memory_bytes,
        matmul_tflops={kind: Peak(peak.value * ratio, source) for kind, peak in profile.matmul_tflops.items()},
        exp_gops=Peak(profile.exp_gops.value * ratio, source),
    )


def _decode(text: str, where: str) -> DeviceProfile:
    import msgspec

    try:
        table = msgspec.toml.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"--device-profile: {show(where)}: {error}") from None
    return _convert(table, where)


def _convert(table: dict[str, Any], where: str) -> DeviceProfile:
    import msgspec

    try:
        known = [field.name for field in dataclasses.fields(DeviceProfile)]
        for key, value in table.items():
            if not isinstance(key, str):
                raise InputError(f"--device-profile: key {show(key)} in {show(where)} is not text")
            if key not in known:
                raise InputError(f"--device-profile: unknown key {show(key)} in {show(where)}{suggestion(key, known)}")
            for inner in _unknown_inner_keys(key, value):
                raise InputError(f"--device-profile: unknown key {show(inner)} in {show(where)}")
        return msgspec.convert(table, DeviceProfile, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        # An InputError of __post_init__ arrives wrapped when msgspec builds the dataclass.
        cause = error.__cause__
        raise (cause if isinstance(cause, InputError) else None) or InputError(
            f"--device-profile: {show(where)}: {error}"
        ) from None


def _unknown_inner_keys(key: str, value: object) -> list[str]:
    # msgspec forbids unknown fields for its own structs only; a misspelt key of a peak must not pass either.
    if not isinstance(value, dict):
        return []
    if key == "matmul_tflops":
        return [f"{key}.{kind}" for kind in value if kind not in MATMUL_KINDS] + [
            inner for kind, peak in value.items() for inner in _unknown_inner_keys(f"{key}.{kind}", peak)
        ]
    return [f"{key}.{name}" for name in value if name not in ("value", "source")]


def _defect(profile: DeviceProfile) -> str | None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", profile.name):
        return "name must be lower-case letters, digits, '_', '.', '-', at most 64"
    if _VENDORS.get(profile.vendor) != profile.target:
        return f"vendor and target must be one of {', '.join(f'{v}/{t}' for v, t in _VENDORS.items())}"
    if not re.fullmatch(_ARCHITECTURES[profile.vendor], profile.arch):
        return f"arch {show(profile.arch)} is not an architecture of vendor {profile.vendor}"
    for field in dataclasses.fields(DeviceProfile):
        value = getattr(profile, field.name)
        zero_is_valid = field.name == "library_workspace_bytes" or profile.vendor == "cpu"
        if type(value) is int and not (0 if zero_is_valid else 1) <= value <= 2**50:
            return f"{field.name} = {value} is out of range"
    if profile.multiprocessors < 1 or profile.memory_bytes < 1:
        return "multiprocessors and memory_bytes must be at least 1"
    if set(profile.matmul_tflops) != set(MATMUL_KINDS):
        return f"matmul_tflops must have {', '.join(MATMUL_KINDS)}"
    peaks = {f"matmul_tflops.{kind}": peak for kind, peak in profile.matmul_tflops.items()}
    peaks |= {f.name: v for f in dataclasses.fields(profile) if isinstance(v := getattr(profile, f.name), Peak)}
    for name, peak in peaks.items():
        defect = peak.defect()
        if defect:
            return f"{name}: {defect}"
    return None
