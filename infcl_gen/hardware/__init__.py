"""Hardware: device profiles as data, detection of this machine's device, and the cluster of a problem."""

from infcl_gen.hardware.cluster import Cluster, cluster_of, resolve_cluster, resolved
from infcl_gen.hardware.detection import detect
from infcl_gen.hardware.profile import DeviceProfile, load_profile, profile_from_literals, profile_names

__all__ = [
    "Cluster", "DeviceProfile", "cluster_of", "detect", "load_profile", "profile_from_literals", "profile_names",
    "resolve_cluster", "resolved",
]  # fmt: skip
