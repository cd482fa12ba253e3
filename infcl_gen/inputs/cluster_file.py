"""Cluster files: nodes, devices, the links between them, and the source of each figure."""

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
    """A figure of a device or a link (a rate, a latency), and where it comes from."""

    value: float
    source: str

    def defect(self) -> str | None:
        """What is wrong, as the end of a sentence."""
        if not (math.isfinite(self.value) and 0 < self.value < 1e12):
            return f"value {self.value} must be finite and above 0"
        if not self.source.startswith(SOURCES) or not self.source.isprintable() or len(self.source) > 200:
            return f"source must start with one of {', '.join(word.strip() for word in SOURCES)}"
        return None


@dataclasses.dataclass(frozen=True)
class Links:
    """What a cluster file says about links; None: the device profile decides.

    link_gbs         GB/s per direction between two devices of a node.
    node_link_gbs    GB/s per direction of one device's transfer between two nodes.
    links_per_node   how many devices of a node reach `node_link_gbs` at once; more of them share the same total.
    latency_us       of one message between two devices of a node; `node_latency_us`: between two nodes.
    """

    link_gbs: Peak | None = None
    node_link_gbs: Peak | None = None
    links_per_node: int | None = None
    latency_us: Peak | None = None
    node_latency_us: Peak | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None:
                continue
            if name == "links_per_node":
                check_integer("--cluster: links_per_node", value, 1, MAX_DEVICES)
            elif defect := value.defect() if isinstance(value, Peak) else "is not a value with its source":
                raise InputError(f"--cluster: {name}: {defect}")


@dataclasses.dataclass(frozen=True)
class ClusterFile:
    """What a cluster file may hold; None: the file does not say."""

    nodes: int | None = None
    devices_per_node: int | None = None
    device_profile: str | None = None
    links: Links | None = None


_LINKS = tuple(field.name for field in dataclasses.fields(Links))


def where_of(cluster: object) -> str:
    """How messages name what describes a cluster: a file by its path."""
    return show(os.fspath(cluster)) if isinstance(cluster, str | os.PathLike) else "the mapping"


def read_cluster(cluster: object) -> ClusterFile:
    """The cluster that a TOML file or a mapping of the same keys describes; a `ClusterFile` is returned as it is.

    The path of a profile is relative to the cluster file. Raises InputError naming what is unknown or out of range.
    """
    if isinstance(cluster, ClusterFile):
        return cluster
    if isinstance(cluster, Mapping):
        table = dict(cluster)
    elif isinstance(cluster, str | os.PathLike):
        table = read_toml("--cluster", cluster)
    else:
        raise InputError(f"--cluster: expected the path of a TOML file, got {show(cluster)}")
    where = where_of(cluster)
    check_keys("--cluster", table, ("nodes", "devices_per_node", "device_profile", *_LINKS), where)
    links = {key: table.pop(key) for key in _LINKS if key in table}
    for name in ("nodes", "devices_per_node"):
        if name in table:
            check_integer(f"--cluster: {name} in {where}", table[name], 1, MAX_DEVICES)
    profile = table.get("device_profile")
    if profile is not None:
        check_text(f"--cluster: device_profile in {where}", profile)
        if profile.endswith(".toml") and not isinstance(cluster, Mapping):
            table["device_profile"] = os.path.join(os.path.dirname(os.fspath(cluster)), profile)
    return ClusterFile(**table, links=read_links(links, where) if links else None)


def read_links(table: object, where: str) -> Links:
    """Links from the literals of a cluster file or of a package's SPEC; None is as good as an absent key."""
    if not isinstance(table, Mapping):
        raise InputError(f"--cluster: {where}: expected a table of links, got {show(table)}")
    check_keys("--cluster", table, _LINKS, where)
    links = dict(table)
    for key, value in table.items():
        if key != "links_per_node" and value is not None:
            links[key] = _peak(value, f"--cluster: {key} in {where}")
    return Links(**links)


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
