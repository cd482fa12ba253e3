"""The problem: what a loss package is generated for.

`make_problem` turns flags (text from the command line, values from Python or from a TOML file) into one `Problem`.
`Problem` refuses values out of range, so that every later stage can rely on them. Each message names the flag.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from infcl_gen.errors import InputError
from infcl_gen.inputs import text
from infcl_gen.inputs.cluster_file import MAX_DEVICES, Links, read_cluster, read_links, where_of
from infcl_gen.inputs.overrides import Overrides, parse_overrides
from infcl_gen.inputs.text import check_text, flag_name, show

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
MAX_BATCH = 2**40
MAX_DIM = 65536
MAX_BUDGET_BYTES = 2**50
_LARGEST = {
    "batch_size": MAX_BATCH, "keys": MAX_BATCH, "dim": MAX_DIM, "devices": MAX_DEVICES, "nodes": MAX_DEVICES,
    "negatives": MAX_DIM, "memory_budget_bytes": MAX_BUDGET_BYTES,
}  # fmt: skip
_WORDS = {
    "dtype": tuple(DTYPE_BYTES),
    "precision": ("default", "tf32", "exact"),
    "target": ("auto", "cpu", "cuda", "rocm"),
    "frozen": ("none", "query", "key"),
}


@runtime_checkable
class Formula(Protocol):
    """A `LossSpec`, whose module needs SymPy."""

    @property
    def name(self) -> str: ...

    @property
    def formula(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem: sizes are global (over all devices), the memory budget is per device.

    batch_size           number of queries, M.
    keys                 number of keys, N; None: as many as queries. A count equal to `batch_size` becomes None.
    loss                 the name of a built-in loss, FILE.py:NAME, or a LossSpec.
    frozen               the side that needs no gradient: nothing is planned for it.
    memory_budget_bytes  None: what helps, up to 1/8 of the device's memory, but no stash.
    device_profile       a name, the path of a TOML file, or "auto".
    prefixes             counts of first columns, or pairs of count and weight, over which the loss is added up.
    renormalise          whether similarities of a prefix are cosines of its columns.
    negatives            negatives of each query, or of each pair of rows, of a loss that has them.
    settings             the choices of `--set`; pairs of text become `Overrides`.

    Raises InputError for anything out of range.
    """

    batch_size: int
    dim: int
    loss: str | Formula = "clip"
    keys: int | None = None
    devices: int = 1
    nodes: int = 1
    memory_budget_bytes: int | None = None
    dtype: str = "bf16"
    precision: str = "default"
    frozen: str = "none"
    prefixes: tuple[tuple[int, float], ...] = ()
    renormalise: bool = False
    negatives: int = 1
    target: str = "auto"
    device_profile: str = "auto"
    settings: Overrides = dataclasses.field(default_factory=Overrides)
    links: Links | None = None

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            if getattr(self, name) is not None or name not in ("keys", "memory_budget_bytes"):
                text.check_integer(flag_name(name), getattr(self, name), 1, largest)
        for name, words in _WORDS.items():
            text.check_word(flag_name(name), getattr(self, name), words)
        if self.keys == self.batch_size:  # one problem, one package, one tuning record
            object.__setattr__(self, "keys", None)
        if self.devices % self.nodes:
            uneven = f"{self.nodes} nodes cannot hold {self.devices} devices evenly"
            raise InputError(f"--nodes: {uneven}; --devices (the total) must be a multiple of --nodes")
        if self.precision != "default" and self.dtype != "fp32":
            raise InputError(f"--precision: {self.precision} is for --dtype fp32, not {self.dtype}; give 'default'")
        named = self.loss.name if isinstance(self.loss, Formula) else self.loss
        if not isinstance(named, str):
            raise InputError(f"--loss: {show(named)} is no name, FILE.py:NAME or LossSpec")
        path, colon, name = check_text("--loss", named).rpartition(":")
        if (colon and Path(path).suffix != ".py") or not (name.isascii() and name.isidentifier()):
            raise InputError(f"--loss: {show(self.loss)} must be a name or FILE.py:NAME, with NAME an ASCII identifier")
        check_text("--device-profile", self.device_profile)
        object.__setattr__(self, "prefixes", text.parse_prefixes(self.prefixes))
        if self.renormalise not in (True, False):
            raise InputError(f"--renormalise: {show(self.renormalise)} is neither true nor false")
        if self.renormalise and not self.prefixes:
            raise InputError("--renormalise: cosines are of prefixes; give --prefixes, for example 96,192,384,768")
        object.__setattr__(self, "settings", parse_overrides(self.settings))
        if not isinstance(self.links, Links | None):
            raise InputError(f"--cluster: expected links, got {show(self.links)}")
        links, each = (self.links and self.links.links_per_node) or 1, self.devices // self.nodes
        if links > each:
            raise InputError(f"--cluster: links_per_node = {links} of a node of {each} device(s); valid: 1 to {each}")

    def as_dict(self) -> dict[str, Any]:
        """The fields as literals, without `links` where no cluster file describes them."""
        fields = dataclasses.asdict(self) | {"settings": self.settings.pairs}
        if self.links is None:
            del fields["links"]
        if self.prefixes:
            fields["prefixes"] = [list(each) for each in self.prefixes]
        else:
            del fields["prefixes"]
        if not self.renormalise:
            del fields["renormalise"]
        if self.negatives == 1:
            del fields["negatives"]
        return fields

    @property
    def loss_name(self) -> str:
        """The name of the loss, without its file."""
        return self.loss.name if isinstance(self.loss, Formula) else self.loss.rpartition(":")[2]

    @property
    def total_keys(self) -> int:
        """Global number of keys, N."""
        return self.batch_size if self.keys is None else self.keys


def make_problem(**flags: Any) -> Problem:
    """`Problem` from flags as users write them: sizes as "64k" or numbers, `memory_budget` as "2GiB" or "auto".

    Keywords are the fields of `Problem`, and the flags `memory_budget`, `set` and `cluster`; None means "not given".
    For `set` see `parse_overrides`, for `cluster` see `read_cluster`. Raises InputError naming the flag.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    known = (*(field.name for field in dataclasses.fields(Problem)), "memory_budget", "set", "cluster")
    for name in given:
        if name not in known:
            raise InputError(f"{flag_name(name)}: unknown option{text.suggestion(name, known)}")
    for name in ("batch_size", "dim"):
        if name not in given:
            raise InputError(f"{flag_name(name)}: is required")
    for short, full in (("memory_budget", "memory_budget_bytes"), ("set", "settings")):
        if short in given and full in given:
            raise InputError(f"{flag_name(short)}: give either {short} or {full}, not both")
        if short in given:
            given[full] = given.pop(short)
    for name, value in given.items():
        if name == "memory_budget_bytes":
            given[name] = None if value == "auto" else text.parse_bytes(value, flag_name(name))
        elif name in _LARGEST:
            given[name] = text.parse_count(value, flag_name(name))
        elif name == "links" and not isinstance(value, Links):
            given[name] = read_links(value, "the links")
        elif name in ("loss", "device_profile") and isinstance(value, os.PathLike):
            given[name] = os.fspath(value)
    written = given.pop("cluster", {})
    cluster = read_cluster(written)
    nodes, each = cluster.nodes or given.get("nodes"), cluster.devices_per_node
    if nodes is None and each is not None:
        nodes = max(1, given.get("devices", 1) // each)
    if cluster.nodes not in (None, 1) and each is None and "devices" not in given:
        raise InputError(f"--cluster: set devices_per_node in {where_of(written)}, which has {cluster.nodes} nodes")
    devices = nodes * each if nodes and each else None
    said = {"nodes": nodes, "devices": devices, "device_profile": cluster.device_profile, "links": cluster.links}
    for name, value in said.items():
        if value is not None and given.setdefault(name, value) != value:
            raise InputError(
                f"{flag_name(name)}: {show(given[name])} contradicts {show(value)} of --cluster; leave one of them out"
            )
    return Problem(**given)
