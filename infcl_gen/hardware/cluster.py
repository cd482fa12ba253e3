"""The devices of a problem and the links between them."""

from __future__ import annotations

import dataclasses

from infcl_gen.errors import InputError
from infcl_gen.hardware.detection import detect
from infcl_gen.hardware.profile import DeviceProfile, load_profile
from infcl_gen.inputs.cluster_file import Links, Peak
from infcl_gen.inputs.problem import Problem


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`devices` equal devices in all, spread evenly over `nodes`, and the links between them: what `links` says of
    them, and what the profile says where that is silent."""

    devices: int
    nodes: int
    profile: DeviceProfile
    links: Links = dataclasses.field(default_factory=Links)

    @property
    def devices_per_node(self) -> int:
        return self.devices // self.nodes

    @property
    def link_gbs(self) -> Peak:
        """GB/s of a transfer between two devices of a node, per direction."""
        return self.links.link_gbs or self.profile.link_gbs

    @property
    def node_link_gbs(self) -> Peak:
        """GB/s of one device's transfer between two nodes, per direction."""
        return self.links.node_link_gbs or self.profile.node_link_gbs

    @property
    def links_per_node(self) -> int:
        """How many devices of a node can use `node_link_gbs` at once; more of them share the same total."""
        return self.links.links_per_node or self.devices_per_node

    @property
    def latency_us(self) -> Peak:
        """Of one message between two devices of a node: a launch, where nothing else is known."""
        return self.links.latency_us or self.profile.launch_us

    @property
    def node_latency_us(self) -> Peak:
        """Of one message between two nodes."""
        return self.links.node_latency_us or self.latency_us


def resolve_cluster(problem: Problem) -> Cluster:
    """The cluster that `problem` is planned for; looks at this machine only if the device profile is "auto".

    Raises InputError where target and profile contradict each other, and ToolchainError where "auto" finds no device
    of the wanted target.
    """
    if problem.device_profile != "auto":
        profile = load_profile(problem.device_profile)
    elif problem.target == "cpu":
        profile = load_profile("cpu")
    else:
        profile = detect(problem.target)
    if problem.target not in ("auto", profile.target):
        raise InputError(
            f"--target: {problem.target} contradicts --device-profile {profile.name} (a {profile.target} device)"
        )
    return Cluster(problem.devices, problem.nodes, profile, problem.links or Links())
