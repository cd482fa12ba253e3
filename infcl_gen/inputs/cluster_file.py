"""Cluster files: nodes, devices, links between them, and where each figure is from."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping

from infcl_gen.errors import InputError
from infcl_gen.inputs.text import check_integer, check_keys, check_text, read_toml, show

MAX_DEVICES = 65536
SOURCES = ("measured: ", "vendor: ", "derived: ", "assumed: ")


@dataclasses.dataclass(frozen=True)
class Peak:
    """A rate that a device or a link can reach, and where the figure comes from."""

    value: float
    source: str

    def defect(self) -> str | None:
        """What is wrong with it, as the end of a sentence."""
        if not (math.isfinite(self.value) and 0 < self.value < 1e12):
            return f"value {self.value} must be finite and above 0"
        if not self.source.startswith(SOURCES) or not self.source.isprintable() or len(self.source) > 200:
            return f"source must start with one of {', '.join(word.strip() for word in SOURCES)}"
        return None


@dataclasses.dataclass(frozen=True)
class Links:
    """What a cluster file says about links; None: as the device profile has it.

    `link_gbs`: GB/s per direction between devices of a node. `node_link_gbs`: of one device across nodes. As many as
    `links_per_node` devices' transfers cross the network at that rate; more of them share it. Latencies: microseconds
    of one message within a node and across nodes.
    """

    link_gbs: Peak | None = None
    node_link_gbs: Peak | None = None
    links_per_node: int | None = None
    latency_us: Peak | None = None
    node_latency_us: Peak | None = None

    def __post_init__(self) -> None:
        if self.links_per_node is not None:
            check_integer("--cluster: links_per_node", self.links_per_node, 1, MAX_DEVICES)
        for name, value in vars(self).items():
            if name != "links_per_node" and value is not None:
                defect = value.defect() if isinstance(value, Peak) else "is not a value with its source"
                if defect:
                    raise InputError(f"--cluster: {name}: {defect}")


@dataclasses.dataclass(frozen=True)
class ClusterFile:
    """What a cluster file may hold; None: not said."""

    nodes: int | None = None
    devices_per_node: int | None = None
    device_profile: str | None = None
    links: Links | None = None


_SIZES = ("nodes", "devices_per_node")
_LINKS = tuple(field.name for field in dataclasses.fields(Links))


def read_cluster(cluster: object) -> ClusterFile:
    """The cluster that a TOML file describes, or a mapping of the same keys; a `ClusterFile` is one already.

    A profile's file is looked for beside the cluster file. Raises InputError naming what is unknown or out of range.
    """
    if isinstance(cluster, ClusterFile):
        return cluster
    if isinstance(cluster, Mapping):
        table, where = dict(cluster), "the mapping"
    elif isinstance(cluster, str | os.PathLike):
        table, where = read_toml("--cluster", cluster), show(os.fspath(cluster))
    else:
        raise InputError(f"--cluster: expected the path of a TOML file, got {show(cluster)}")
    check_keys("--cluster", table, (*_SIZES, "device_profile", *_LINKS), where)
    given = [name for name in _SIZES if name in table]
    sizes = {name: check_integer(f"--cluster: {name} in {where}", table[name], 1, MAX_DEVICES) for name in given}
    profile = table.get("device_profile")
    if profile is not None:
        profile = check_text(f"--cluster: device_profile in {where}", profile)
        if profile.endswith(".toml") and not isinstance(cluster, Mapping):
            profile = os.path.join(os.path.dirname(os.fspath(cluster)), profile)
    links = {key: value for key, value in table.items() if key in _LINKS}
    return ClusterFile(**sizes, device_profile=profile, links=read_links(links, where) if links else None)


def read_links(table: object, where: str) -> Links:
    """Links from literals, as a file or a package's SPEC has them."""
    if not isinstance(table, Mapping):
        raise InputError(f"--cluster: {where}: expected a table of links, got {show(table)}")
    check_keys("--cluster", table, _LINKS, where)
    peaks = {
        key: _peak(value, f"--cluster: {key} in {where}")
        for key, value in table.items()
        if key != "links_per_node" and value is not None
    }
    return Links(**{**table, **peaks})


def _peak(value: object, where: str) -> Peak:
    match value:
        case {"value": int() | float() as rate, "source": str(source), **more} if not more and type(rate) is not bool:
            peak = Peak(math.inf if abs(rate) > 1e15 else float(rate), source)  # float() raises for huge integers
        case _:
            valid = '{ value = 50.0, source = "measured: ..." }'
            raise InputError(f"{where}: expected a number and where it is from, as {valid}; got {show(value)}")
    if defect := peak.defect():
        raise InputError(f"{where}: {defect}")
    return peak
