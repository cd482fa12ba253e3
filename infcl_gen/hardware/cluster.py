"""The cluster of a problem: its devices, and the links between them."""

import dataclasses
import functools
import logging

from infcl_gen.errors import InputError, in_readers_words
from infcl_gen.hardware.detection import detect
from infcl_gen.hardware.profile import DeviceProfile, load_profile, profile_names
from infcl_gen.inputs.cluster_file import Links, Peak
from infcl_gen.inputs.problem import Problem


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`devices` equal devices in all, spread evenly over `nodes`. `Links` explains the figures of their links."""

    profile: DeviceProfile
    devices: int
    nodes: int
    devices_per_node: int
    link_gbs: Peak
    node_link_gbs: Peak
    links_per_node: int
    latency_us: Peak
    node_latency_us: Peak


def cluster_of(problem: Problem, profile: DeviceProfile) -> Cluster:
    """The problem's devices of this profile. Figures of links come from the problem, else from the profile."""
    links, devices_per_node = problem.links or Links(), problem.devices // problem.nodes
    latency_us = links.latency_us or profile.launch_us  # a launch is the best guess
    return Cluster(
        profile=profile,
        devices=problem.devices,
        nodes=problem.nodes,
        devices_per_node=devices_per_node,
        link_gbs=links.link_gbs or profile.link_gbs,
        node_link_gbs=links.node_link_gbs or profile.node_link_gbs,
        links_per_node=links.links_per_node or devices_per_node,
        latency_us=latency_us,
        node_latency_us=links.node_latency_us or latency_us,
    )


def resolve_cluster(problem: Problem) -> Cluster:
    """The cluster of a problem. Looks at this machine only for device profile "auto".

    A warning tells where several devices are taken for CPUs, which is hardly meant on a login node.
    Raises InputError where target and profile contradict each other, ToolchainError where "auto" finds no device.
    """
    name, target = problem.device_profile, problem.target
    profile = detect(target) if name == "auto" else load_profile(name)
    if name == target == "auto" and profile.target == "cpu" and (problem.devices > 1 or problem.links):
        names = ", ".join(profile_names())
        _warn_once(f"no GPU is here, so this plans for CPUs; --device-profile names another device: {names}")
    if target not in ("auto", profile.target):
        raise InputError(f"--target: {target} contradicts --device-profile {profile.name} (a {profile.target} device)")
    return cluster_of(problem, profile)


@functools.cache
def _warn_once(text: str) -> None:
    logging.getLogger("infcl_gen").warning("%s", in_readers_words(text))


def resolved(problem: Problem, loss: str, profile: DeviceProfile) -> Problem:
    """The problem with the names of what was found, so that it depends on no machine and no user's file."""
    return dataclasses.replace(problem, loss=loss, target=profile.target, device_profile=profile.name)
