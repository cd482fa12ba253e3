"""Hardware: device profiles as data, detection of the machine's own device, and the cluster of a problem."""

from infcl_gen.hardware.cluster import Cluster, resolve_cluster
from infcl_gen.hardware.detection import detect
from infcl_gen.hardware.profile import DeviceProfile, Peak, load_profile, profile_from_literals, profile_names

__all__ = [
    "Cluster",
    "DeviceProfile",
    "Peak",
    "detect",
    "load_profile",
    "profile_from_literals",
    "profile_names",
    "resolve_cluster",
]
