"""The problem: what a loss package is generated for. All parsing and validation of user input is here.

`make_problem` turns flags (strings from the command line, values from Python or from a TOML file) into one
`Problem`; `Problem` itself refuses values out of range, so that every later stage can rely on them. Each
message names the flag.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infcl_gen.errors import InputError

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
PRECISIONS = ("default", "tf32", "exact")
TARGETS = ("auto", "cpu", "cuda", "rocm")

MAX_BATCH = 2**40
MAX_DIM = 65536
MAX_DEVICES = 65536
MAX_BUDGET_BYTES = 2**50
_MAX_TEXT = 1024
_MAX_FILE_BYTES = 2**20

SOURCES = ("measured: ", "vendor: ", "derived: ", "assumed: ")

# What `--set` may steer: the words that are valid, or None for a count.
SETTINGS: dict[str, tuple[str, ...] | None] = {
    "strategy": ("panel", "fused", "stash", "torch"),
    "products": ("library", "triton"),
    "descriptors": ("on", "off"),
    "replay": ("on", "off"),
    "transport": ("ring", "gather"),
    "keeps": ("on", "off"),  # of a ring: what visits last in forward stays for backward
    "records": ("off", "measured"),  # measured: the settings beside it are a tuning record's
    "panel_rows": None,
    "panel_keys": None,
    "stash_rows": None,
}
BLOCK_FIELDS = ("rows", "keys", "depth", "warps", "stages")  # `--set <kernel>.<field>=count`


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
            _check_integer("--cluster: links_per_node", self.links_per_node, 1, MAX_DEVICES)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "links_per_node" and value is not None:
                defect = value.defect() if isinstance(value, Peak) else "is not a value with its source"
                if defect:
                    raise InputError(f"--cluster: {field.name}: {defect}")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem: sizes are global (over all devices), the memory budget is per device.

    `batch_size` counts queries (M), `keys` keys (N; None: as many as queries). `memory_budget_bytes` None
    lets the planner take what helps, up to 1/8 of the device's memory. `device_profile` is a name, the path
    of a TOML file, or "auto". `settings` are the pairs of `--set`, sorted by key. `links` is what a cluster file says
    beyond devices, nodes and profile. Raises InputError for anything out of range.
    """

    batch_size: int
    dim: int
    loss: str = "clip"
    keys: int | None = None
    devices: int = 1
    nodes: int = 1
    memory_budget_bytes: int | None = None
    dtype: str = "bf16"
    precision: str = "default"
    target: str = "auto"
    device_profile: str = "auto"
    settings: tuple[tuple[str, str], ...] = ()
    links: Links | None = None

    def __post_init__(self) -> None:
        _check_integer("--batch-size", self.batch_size, 1, MAX_BATCH)
        if self.keys is not None:
            _check_integer("--keys", self.keys, 1, MAX_BATCH)
        _check_integer("--dim", self.dim, 1, MAX_DIM)
        _check_integer("--devices", self.devices, 1, MAX_DEVICES)
        _check_integer("--nodes", self.nodes, 1, MAX_DEVICES)
        if self.devices % self.nodes:
            raise InputError(
                f"--nodes: {self.nodes} nodes cannot hold {self.devices} devices evenly;"
                " --devices (the total) must be a multiple of --nodes"
            )
        if self.memory_budget_bytes is not None:
            _check_integer("--memory-budget", self.memory_budget_bytes, 1, MAX_BUDGET_BYTES)
        _check_word("--dtype", self.dtype, tuple(DTYPE_BYTES))
        _check_word("--precision", self.precision, PRECISIONS)
        _check_word("--target", self.target, TARGETS)
        if self.precision == "tf32" and self.dtype != "fp32":
            raise InputError(f"--precision: tf32 is for --dtype fp32, not {self.dtype}; give 'default'")
        _check_loss(self.loss)
        check_text("--device-profile", self.device_profile)
        _check_settings(self.settings)
        if self.links is not None and not isinstance(self.links, Links):
            raise InputError(f"--cluster: expected links, got {show(self.links)}")
        per_node = self.links.links_per_node if self.links else None
        if per_node is not None and per_node > self.devices // self.nodes:
            raise InputError(
                f"--cluster: links_per_node = {per_node} of a node of {self.devices // self.nodes} device(s);"
                f" valid: 1 to {self.devices // self.nodes}"
            )

    def as_dict(self) -> dict[str, Any]:
        """The fields as literals; without links where no cluster file said anything about them."""
        fields = dataclasses.asdict(self)
        if self.links is None:
            del fields["links"]
        return fields

    @property
    def total_keys(self) -> int:
        """Global number of keys, N."""
        return self.batch_size if self.keys is None else self.keys

    @property
    def setting(self) -> dict[str, str]:
        """The pairs of `--set` as a dictionary."""
        return dict(self.settings)


def make_problem(**flags: Any) -> Problem:
    """`Problem` from flags as users write them: sizes as "64k" or numbers, `memory_budget` as "2GiB" or
    "auto".

    Keywords are the flags with underscores (`batch_size`, `dim`, `loss`, `keys`, `devices`, `nodes`,
    `memory_budget`, `dtype`, `precision`, `target`, `device_profile`, `set`, `cluster`) and the fields
    `memory_budget_bytes`, `settings` and `links`; None means "not given". `set` is a mapping, or an iterable of
    "key=value" or of pairs; `cluster` the path of a cluster file, or a mapping of what stands in one. Raises InputError
    naming the flag.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    known = (*(field.name for field in dataclasses.fields(Problem)), "memory_budget", "set", "cluster")
    for name in given:
        if name not in known:
            raise InputError(f"{flag_name(name)}: unknown option{suggestion(name, known)}")
    for name in ("batch_size", "dim"):
        if name not in given:
            raise InputError(f"{flag_name(name)}: is required")
    for short, full in (("memory_budget", "memory_budget_bytes"), ("set", "settings")):
        if short in given and full in given:
            raise InputError(f"{flag_name(short)}: give either {short} or {full}, not both")
    if "cluster" in given:
        given = _with_cluster(given)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("batch_size", "keys", "dim", "devices", "nodes"):
            values[name] = parse_count(value, flag_name(name))
        elif name in ("memory_budget", "memory_budget_bytes"):
            values["memory_budget_bytes"] = None if value == "auto" else parse_bytes(value, "--memory-budget")
        elif name in ("set", "settings"):
            values["settings"] = parse_settings(value)
        elif name == "links":
            values[name] = value if isinstance(value, Links) else _links(value, "the links")
        elif name in ("loss", "device_profile") and isinstance(value, os.PathLike):
            values[name] = os.fspath(value)
        else:
            values[name] = value
    return Problem(**values)


def parse_count(value: object, flag: str = "count") -> int:
    """65536, "65536", "64k" or "4M" (k = 1024) as an integer >= 0. Raises InputError naming `flag`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"([0-9]{1,15})([kKmMgG]?)", value) if isinstance(value, str) else None
    if match is None:
        raise InputError(
            f"{flag}: {show(value)} is not a count; give for example 65536, 64k or 4M (k = 1024)"
        )
    return int(match[1]) << 10 * (" kmg".index(match[2].lower() or " "))


_BYTE_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((letter + "ib", 1024), (letter + "b", 1000))
}


def bytes_text(size: int) -> str:
    """A size for people: "512 B", "1.5 GiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{math.ceil(10 * size / factor) / 10:g} {unit}"  # rounded up: a budget of it is enough
    return f"{size} B"


def parse_bytes(value: object, flag: str = "size") -> int:
    """512 (bytes), "512MiB", "1.5GiB" or "1GB" (10**9) as bytes. Raises InputError naming `flag`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = (
        re.fullmatch(r"([0-9]{1,15})(\.[0-9]{1,6})? ?([A-Za-z]{0,3})", value)
        if isinstance(value, str)
        else None
    )
    factor: int | None = _BYTE_UNITS.get(match[3].lower()) if match else None
    if match is None or factor is None:
        raise InputError(f"{flag}: {show(value)} is not a size; give for example 512MiB, 2GiB or 1GB")
    if match[2] and factor == 1:
        raise InputError(f"{flag}: {show(value)} is a fraction of a byte; give a unit, for example 1.5GiB")
    fraction = match[2][1:] if match[2] else ""
    return int(match[1] + fraction) * factor // int(10 ** len(fraction))


def parse_settings(value: object) -> tuple[tuple[str, str], ...]:
    """The pairs of `--set`, sorted by key, from a mapping or from "key=value" strings or pairs."""
    if isinstance(value, Mapping):
        items: list[object] = list(value.items())
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        items = list(value)
    else:
        raise InputError(f"--set: {show(value)} is not a list of key=value")
    pairs: list[tuple[str, str]] = []
    for item in items:
        if isinstance(item, str) and "=" in item:
            key, _, word = item.partition("=")
        elif isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str):
            key, word = item[0], item[1]
            word = str(word) if isinstance(word, int) and not isinstance(word, bool) else word
        else:
            raise InputError(f"--set: {show(item)} is not key=value")
        if any(key == other for other, _ in pairs):
            raise InputError(f"--set: {show(key)} is given twice")
        pairs.append((key, word))
    _check_settings(tuple(pairs))
    return tuple(sorted(pairs))


def check_text(flag: str, value: object) -> str:
    """`value` if it is a printable, non-empty text of moderate length; control characters, newlines and
    invisible direction marks are refused because the text may be shown, or written into a package as a
    literal."""
    if not isinstance(value, str):
        raise InputError(f"{flag}: expected text, got {show(value)}")
    if not value or len(value) > _MAX_TEXT or not value.isprintable():
        raise InputError(
            f"{flag}: {show(value)} is empty, longer than {_MAX_TEXT}, or has unprintable characters"
        )
    return value


def read_text_file(flag: str, path: str | os.PathLike[str]) -> str:
    """The text of a small regular UTF-8 file. Raises InputError naming `flag` (also for a device or a pipe,
    which would block)."""
    name = check_text(flag, os.fspath(path))
    try:
        mode = os.stat(name).st_mode
        if not stat.S_ISREG(mode):
            raise InputError(f"{flag}: {show(name)} is not a regular file")
        with open(name, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{flag}: cannot read {show(name)}: {error.strerror or error}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise InputError(f"{flag}: {show(name)} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{flag}: {show(name)} is not UTF-8 text (byte {error.start})") from None


@dataclasses.dataclass(frozen=True)
class ClusterFile:
    """What a cluster file may hold; None: not said."""

    nodes: int | None = None
    devices_per_node: int | None = None
    device_profile: str | None = None
    links: Links | None = None


def read_cluster(cluster: object) -> ClusterFile:
    """The cluster that a TOML file describes, or a mapping of the same keys; a `ClusterFile` is one already.

    A profile's file is looked for beside the cluster file. Raises InputError naming what is unknown or out of range.
    """
    if isinstance(cluster, ClusterFile):
        return cluster
    if isinstance(cluster, Mapping):
        table, where = dict(cluster), "the mapping"
    elif isinstance(cluster, str | os.PathLike):
        table, where = _toml("--cluster", cluster), show(os.fspath(cluster))
    else:
        raise InputError(f"--cluster: expected the path of a TOML file, got {show(cluster)}")
    own = ("nodes", "devices_per_node", "device_profile")
    known = (*own, *(field.name for field in dataclasses.fields(Links)))
    for key in table:
        if not isinstance(key, str) or key not in known:
            near = suggestion(key, known) if isinstance(key, str) else f"; valid: {', '.join(known)}"
            raise InputError(f"--cluster: unknown key {show(key)} in {where}{near}")
    sizes = {name: table[name] for name in own[:2] if name in table}
    for name, value in sizes.items():
        _check_integer(f"--cluster: {name} in {where}", value, 1, MAX_DEVICES)
    profile = table.get("device_profile")
    if profile is not None:
        profile = check_text(f"--cluster: device_profile in {where}", profile)
        if profile.endswith(".toml") and not isinstance(cluster, Mapping):
            profile = os.path.join(os.path.dirname(os.fspath(cluster)), profile)
    links = {key: value for key, value in table.items() if key not in own}
    return ClusterFile(**sizes, device_profile=profile, links=_links(links, where) if links else None)


def _links(table: object, where: str) -> Links:
    """Links from literals, as a file or a package's SPEC has them."""
    if not isinstance(table, Mapping):
        raise InputError(f"--cluster: {where}: expected a table of links, got {show(table)}")
    known = tuple(field.name for field in dataclasses.fields(Links))
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise InputError(f"--cluster: unknown key {show(key)} in {where}; valid: {', '.join(known)}")
        values[key] = value
        if key != "links_per_node" and value is not None:
            values[key] = _peak(value, f"--cluster: {key} in {where}")
    return Links(**values)


def _peak(value: object, where: str) -> Peak:
    fields: Mapping[Any, Any] = value if isinstance(value, Mapping) else {}
    rate, source = fields.get("value"), fields.get("source")
    if (
        set(fields) != {"value", "source"}
        or not isinstance(source, str)
        or not isinstance(rate, int | float)
        or isinstance(rate, bool)
    ):
        valid = '{ value = 50.0, source = "measured: ..." }'
        raise InputError(f"{where}: expected a number and where it is from, as {valid}; got {show(value)}")
    peak = Peak(math.inf if abs(rate) > 1e15 else float(rate), source)  # float() raises for huge integers
    if defect := peak.defect():
        raise InputError(f"{where}: {defect}")
    return peak


def _with_cluster(given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags with what the cluster file gives: devices, nodes, profile, links. A flag may repeat it, not differ."""
    cluster = read_cluster(given["cluster"])
    flags = {name: value for name, value in given.items() if name != "cluster"}
    asked: dict[str, Any] = {}
    for name in ("devices", "nodes"):
        if name in flags:
            asked[name] = parse_count(flags[name], flag_name(name))
    nodes, each = cluster.nodes or asked.get("nodes"), cluster.devices_per_node
    if each is not None and nodes is None:
        nodes = max(1, asked.get("devices", 1) // each)
    said = {
        "nodes": nodes if cluster.nodes or each else None,
        "devices": nodes * each if nodes and each else None,
        "device_profile": cluster.device_profile,
        "links": cluster.links,
    }
    for name, value in said.items():
        if value is None:
            continue
        before = asked.get(name, flags.get(name))
        before = os.fspath(before) if isinstance(before, os.PathLike) else before
        if before not in (None, value):
            raise InputError(
                f"{flag_name(name)}: {show(before)} contradicts {show(value)} of --cluster; leave one of them out"
            )
        flags[name] = value
    return flags


CONFIG_FLAGS: dict[str, Any] = {
    "loss": str,
    "batch_size": int | str,
    "keys": int | str,
    "dim": int | str,
    "devices": int | str,
    "nodes": int | str,
    "memory_budget": int | str,
    "dtype": str,
    "precision": str,
    "target": str,
    "device_profile": str,
    "set": dict[str, int | str] | list[str],
    "cluster": str,
    "output": str,
    "force": bool,
    "ranks": int | str,
    "aot": str | list[str],
    "minutes": int | float | str,
    "records": str,
    "against": str | list[str],
    "batches": int | str | list[int | str],
    "dims": int | str | list[int | str],
    "package": list[str],
    "scale": int | float | str,
    "repeats": int | str,
    "errors": int | str,
    "plot": str,
    "json": bool,
    "quiet": bool,
    "verbose": bool,
}


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The flags given in a TOML file, by their names with underscores (dashes are accepted as well).

    One file may serve every command: a flag that the running command does not have is checked, and unused.
    Raises InputError naming the key that is unknown, given twice, or has a wrong type.
    """
    import msgspec

    table, where = _toml("--config", path), show(os.fspath(path))
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in CONFIG_FLAGS:
            raise InputError(f"--config: unknown key {show(key)} in {where}{suggestion(name, CONFIG_FLAGS)}")
        if name in values:
            raise InputError(f"--config: {show(key)} is given twice in {where}")
        try:
            values[name] = msgspec.convert(value, CONFIG_FLAGS[name], strict=True)
        except msgspec.ValidationError as error:
            raise InputError(f"--config: key {show(key)} in {where}: {error}") from None
    return values


def _toml(flag: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    import msgspec

    text = read_text_file(flag, path)
    try:
        table: dict[str, Any] = msgspec.toml.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{flag}: {show(os.fspath(path))} is not valid TOML: {error}") from None
    return table


def flag_name(name: str) -> str:
    """ "batch_size" -> "--batch-size", as it is shown in messages."""
    return "--" + clean(name.removesuffix("_bytes")).replace("_", "-")


def show(value: object) -> str:
    """`value` for a message: its repr, on one line, printable and not too long."""
    try:
        text = clean(repr(value))
    except ValueError:  # an integer of more digits than Python prints
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 120 else text[:80] + "..." + text[-30:]


def clean(text: str) -> str:
    """`text` with everything unprintable escaped: safe to write to a terminal, and one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def suggestion(name: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?" or the list of what is valid."""
    known = list(known)
    close = difflib.get_close_matches(name[:64], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; valid: {', '.join(known)}"


def _check_integer(flag: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{flag}: expected an integer from {low} to {high}, got {show(value)}")
    if not low <= value <= high:
        raise InputError(f"{flag}: {_short_integer(value)} is out of range; valid: {low} to {high}")


def _short_integer(value: int) -> str:
    # str() of an integer beyond 4300 digits raises.
    return str(value) if abs(value) < 10**30 else f"a number of {value.bit_length()} bits"


def _check_word(flag: str, value: object, valid: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in valid:
        raise InputError(f"{flag}: {show(value)} is unknown; valid: {', '.join(valid)}")


def _check_loss(value: object) -> None:
    text = check_text("--loss", value)
    name = text
    if ":" in text:
        path, _, name = text.rpartition(":")
        if Path(path).suffix != ".py":
            raise InputError(f"--loss: {show(text)} must be a name or FILE.py:NAME")
    if not (name.isascii() and name.isidentifier()):
        raise InputError(
            f"--loss: {show(text)} must be a name or FILE.py:NAME, with NAME an ASCII identifier"
        )


def _check_settings(pairs: object) -> None:
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InputError(f"--set: expected pairs of key and value, got {show(pairs)}")
    seen = set()
    for key, word in pairs:
        if not isinstance(key, str) or not isinstance(word, str):
            raise InputError(f"--set: expected text for key and value, got {show((key, word))}")
        if key in seen:
            raise InputError(f"--set: {show(key)} is given twice")
        seen.add(key)
        _, dot, field = key.partition(".")
        if dot and re.fullmatch(r"[a-z][a-z_]*\.[a-z]+", key) and field in BLOCK_FIELDS:
            words = None
        elif key in SETTINGS:
            words = SETTINGS[key]
        else:
            known = [*SETTINGS, *(f"<kernel>.{name}" for name in BLOCK_FIELDS)]
            raise InputError(f"--set: {show(key)} is unknown{suggestion(key, known)}")
        if words is not None:
            _check_word(f"--set {key}", word, words)
        elif not 1 <= parse_count(word, f"--set {key}") <= MAX_BATCH:
            raise InputError(f"--set {key}: {show(word)} is out of range; valid: 1 to {MAX_BATCH}")
