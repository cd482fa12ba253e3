"""Which profile fits the device of this machine. The only place outside the tuner that asks torch about
hardware."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from typing import Any

from infcl_gen.errors import ToolchainError
from infcl_gen.hardware.profile import DeviceProfile, load_profile

# A driver shows one of these; without any, importing torch (seconds) to learn that there is no GPU is waste.
_DRIVER_FILES = (
    "/proc/driver/nvidia/version",
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvmap",
    "/dev/dxg",
    "/dev/kfd",
)

# Words of the device's name, in the order in which they are tried; then the architecture alone decides.
_NAMES = {
    "H200": "h200",
    "H100": "h100",
    "B200": "b200",
    "A100": "a100",
    "RTX 4090": "rtx4090",
    "RTX 5090": "rtx5090",
    "RTX 3090": "rtx3090",
    "L4": "l4",
    "MI300X": "mi300x",
    "MI355X": "mi355x",
}
_ARCHITECTURES = {
    "sm_80": "a100",
    "sm_86": "rtx3090",
    "sm_89": "rtx4090",
    "sm_90": "h100",
    "sm_100": "b200",
    "sm_120": "rtx5090",
    "gfx942": "mi300x",
    "gfx950": "mi355x",
}


@dataclasses.dataclass(frozen=True)
class FoundDevice:
    """What the driver says about a GPU."""

    name: str
    target: str
    arch: str
    multiprocessors: int
    memory_bytes: int


def detect(target: str = "auto") -> DeviceProfile:
    """The profile of this machine's first GPU, or the CPU's where there is no GPU.

    `target` "cuda" or "rocm" wants such a GPU. Raises ToolchainError if there is none, or if its architecture
    has no profile.
    """
    found = None if target == "cpu" else find_device()
    if found is None or target not in ("auto", found.target):
        if target in ("auto", "cpu"):
            return load_profile("cpu")
        raise ToolchainError(
            f"--target: no {target} device on this machine; name the device to plan for with --device-profile"
        )
    return match(found)


def find_device() -> FoundDevice | None:
    """The first GPU that torch sees, or None (also where torch is missing or was built without GPU
    support)."""
    if sys.platform.startswith("linux") and not any(os.path.exists(path) for path in _DRIVER_FILES):
        return None
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(0)
    rocm = torch.version.hip is not None
    arch = properties.gcnArchName.split(":")[0] if rocm else f"sm_{properties.major}{properties.minor}"
    target = "rocm" if rocm else "cuda"
    return FoundDevice(properties.name, target, arch, properties.multi_processor_count, properties.total_memory)


def match(found: FoundDevice) -> DeviceProfile:
    """The profile for a device: by name where one fits, else of its architecture; scaled where its size
    differs.

    A device whose counts differ from the profile's (a PCIe board, a partition) gets a name such as
    "h100-114mp-79gib", which `load_profile` understands on any machine. Raises ToolchainError if nothing
    fits.
    """
    words = re.sub(r"[^A-Z0-9 ]", " ", found.name.upper())
    candidates = [name for word, name in _NAMES.items() if re.search(rf"\b{word}\b", words)]
    candidates += [_ARCHITECTURES[found.arch]] if found.arch in _ARCHITECTURES else []
    profile = next((p for p in map(load_profile, candidates) if p.arch == found.arch), None)
    if profile is None:
        raise ToolchainError(
            f"--device-profile: no profile for {found.name!r} ({found.arch}); supported architectures:"
            f" {', '.join(_ARCHITECTURES)}; describe the device in a FILE.toml, or give --target cpu"
        )
    same_memory = 0.93 < found.memory_bytes / profile.memory_bytes < 1.07
    if found.multiprocessors == profile.multiprocessors and same_memory:
        return profile
    return load_profile(f"{profile.name}-{found.multiprocessors}mp-{found.memory_bytes // 2**30}gib")
