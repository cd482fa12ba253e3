"""Which profile fits the device of this machine. The only place outside the tuner that asks torch about hardware."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from typing import Any

from infcl_gen.errors import ToolchainError
from infcl_gen.hardware.profile import DeviceProfile, architectures, load_profile, profile_names

# A driver shows one of these; without any, importing torch (seconds) to learn that there is no GPU is waste.
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvmap", "/dev/dxg", "/dev/kfd")


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

    `target` "cuda" or "rocm" wants such a GPU. Raises ToolchainError if there is none, or if its architecture has no
    profile.
    """
    found = None if target == "cpu" else find_device()
    if found is not None and target in ("auto", found.target):
        return match(found)
    if target in ("auto", "cpu"):
        return load_profile("cpu")
    raise ToolchainError(
        f"--target: no {target} device on this machine; name the device to plan for with --device-profile"
    )


def find_device() -> FoundDevice | None:
    """The first GPU that torch sees, or None (also where torch is missing or was built without GPU support)."""
    if sys.platform.startswith("linux") and not any(os.path.exists(path) for path in _DRIVERS):
        return None
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(0)
    target, arch = "cuda", f"sm_{properties.major}{properties.minor}"
    if torch.version.hip is not None:
        target, arch = "rocm", properties.gcnArchName.split(":")[0]
    return FoundDevice(properties.name, target, arch, properties.multi_processor_count, properties.total_memory)


def match(found: FoundDevice) -> DeviceProfile:
    """The profile for a device: by name where one fits, else of its architecture; scaled where its size differs.

    A device whose counts differ from the profile's (a PCIe board, a partition) gets a name such as
    "h100-114mp-79gib", which `load_profile` understands on any machine. Raises ToolchainError if nothing fits.
    """
    words = re.findall(r"[a-z0-9]+", found.name.lower())
    default = {arch: facts.profile for arch, facts in architectures().items() if facts.profile}
    called = {*words, *map(str.__add__, words, words[1:])}  # "rtx4090" is written "RTX 4090"
    names = [name for name in profile_names() if name in called]
    candidates = map(load_profile, names + [default[arch] for arch in default if arch == found.arch])
    profile = next((profile for profile in candidates if profile.arch == found.arch), None)
    if profile is None:
        raise ToolchainError(
            f"--device-profile: no profile for {found.name!r} ({found.arch}); supported architectures:"
            f" {', '.join(default)}; describe the device in a FILE.toml, or give --target cpu"
        )
    same_memory = 0.93 < found.memory_bytes / profile.memory_bytes < 1.07
    if found.multiprocessors == profile.multiprocessors and same_memory:
        return profile
    return load_profile(f"{profile.name}-{found.multiprocessors}mp-{found.memory_bytes // 2**30}gib")
