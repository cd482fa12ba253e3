"""The profile of this machine's device."""

import dataclasses
import os
import re
import sys
from typing import Any

from infcl_gen.errors import ToolchainError
from infcl_gen.hardware.profile import DeviceProfile, architectures, load_profile, profile_names

# A GPU's driver creates one of these files. Without any, importing torch to find no GPU wastes seconds.
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvmap", "/dev/dxg", "/dev/kfd")


@dataclasses.dataclass(frozen=True)
class FoundDevice:
    """A GPU as its driver describes it."""

    name: str
    target: str
    arch: str
    multiprocessors: int
    memory_bytes: int


def detect(target: str = "auto") -> DeviceProfile:
    """The profile of this machine's first GPU, or of the CPU for target "cpu", and for "auto" without a GPU.

    Raises ToolchainError without a GPU of the target "cuda" or "rocm", or without a profile of its architecture.
    """
    found = None if target == "cpu" else find_device()
    if found is not None and target in ("auto", found.target):
        return match(found)
    if target in ("auto", "cpu"):
        return load_profile("cpu")
    raise ToolchainError(
        f"--target: no {target} device on this machine; name the device to plan for with --device-profile"
    )


def has_driver() -> bool:
    """Whether a GPU's driver may be loaded. It touches no GPU: a process may fork afterwards."""
    return not sys.platform.startswith("linux") or any(os.path.exists(path) for path in _DRIVERS)


def find_device() -> FoundDevice | None:
    """The first GPU that torch sees; None also without torch, or for a torch build without GPU support."""
    if not has_driver():
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
    """The profile of a device's name, else of its architecture. Raises ToolchainError without one.

    A device of another size (a PCIe board, a partition) gets a scaled profile with a name that `load_profile`
    understands on any machine, such as "h100-114mp-79gib".
    """
    words = re.findall(r"[a-z0-9]+", found.name.lower())
    default = {arch: facts.profile for arch, facts in architectures().items() if facts.profile}
    called = {*words, *map(str.__add__, words, words[1:])}  # profile "rtx4090" is of an "RTX 4090"
    names = [name for name in profile_names() if name in called] + [default.get(found.arch, "cpu")]
    profile = next((profile for profile in map(load_profile, names) if profile.arch == found.arch), None)
    if profile is None:
        raise ToolchainError(
            f"--device-profile: no profile for {found.name!r} ({found.arch}); supported architectures:"
            f" {', '.join(default)}; describe the device in a FILE.toml, or give --target cpu"
        )
    same_memory = 0.93 < found.memory_bytes / profile.memory_bytes < 1.07
    if found.multiprocessors == profile.multiprocessors and same_memory:
        return profile
    return load_profile(f"{profile.name}-{found.multiprocessors}mp-{found.memory_bytes // 2**30}gib")
