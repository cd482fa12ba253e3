"""What towers cost: bytes and seconds of a micro-batch by its size and treatment, measured once and kept as TOML.

Profiles of common towers are in `profiles/*.toml`.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infcl_gen.errors import InputError
from infcl_gen.files import write_file
from infcl_gen.inputs.text import check_keys, check_text, read_toml, show

SCHEMA = 1
_PROFILES = Path(__file__).parent / "profiles"


@dataclasses.dataclass(frozen=True)
class PassCosts:
    """One way through a tower, for micro-batches of several sizes in ascending order.

    Bytes are beyond what was allocated before the pass and its input, which arrives for it alone.

    forward_peak_bytes   while it runs forward
    kept_bytes           behind forward: the graph, the features, and the input where the graph holds it
    backward_peak_bytes  while it runs backward, with the graph; gradients of parameters were there
    """

    sizes: tuple[int, ...]
    forward_s: tuple[float, ...]
    forward_peak_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    backward_s: tuple[float, ...] = ()  # empty where there is no backward
    backward_peak_bytes: tuple[int, ...] = ()

    def at(self, name: str, size: int) -> float:
        """A cost of a micro-batch of any size: on the line through the two nearest measured ones."""
        found = self._found.get((name, size))
        if found is None:
            found = self._found[name, size] = self._on_the_line(name, size)
        return found

    @functools.cached_property
    def _found(self) -> dict[tuple[str, int], float]:
        """What `at` has answered: a plan asks for few sizes, a million times."""
        return {}

    def _on_the_line(self, name: str, size: int) -> float:
        values = getattr(self, name)
        if not values:
            return 0.0
        if len(values) == 1:
            return float(values[0] * size / self.sizes[0])
        right = min(max(1, bisect.bisect_left(self.sizes, size)), len(values) - 1)
        (x0, x1), (y0, y1) = self.sizes[right - 1 : right + 1], values[right - 1 : right + 1]
        return float(max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0)))

    def seconds(self, size: int) -> float:
        """Forward and backward."""
        return self.at("forward_s", size) + self.at("backward_s", size)


@dataclasses.dataclass(frozen=True)
class TowerCosts:
    """One tower. `without_graph` is the first pass of a cached micro-batch; a tower without gradients has no other."""

    name: str
    feature_bytes: int  # of a sample
    input_bytes: int  # of a sample
    without_graph: PassCosts
    kept: PassCosts | None = None
    checkpointed: PassCosts | None = None  # None: no blocks were found
    tokens: int = 0  # of a sample, where samples have various lengths
    state_bytes: int = 0  # kept of a cached micro-batch for its second pass: changed buffers, random states on the CPU

    def graph(self, treatment: str) -> PassCosts | None:
        """Of the pass that ends in backward."""
        return self.checkpointed if treatment in ("checkpointed", "offloaded") else self.kept

    @property
    def frozen(self) -> bool:
        return self.kept is None


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Towers on a device, and what does not depend on the batch. Bytes are of all towers.

    measured    the model, its autocast, and whatever else these costs depend on, in words
    device      the device profile, as --device-profile
    dim, dtype  of the features
    cast_bytes  copies of weights that autocast keeps while graphs are there
    workspace_bytes      that the matrix library keeps
    state_bytes          copies of all buffers
    random_bytes         states of all generators of torch, where the device is the host
    host_to_device_gbs   1e9 bytes a second, either way; 0 where the device is the host
    """

    device: str
    towers: tuple[TowerCosts, ...]
    dim: int
    dtype: str
    parameter_bytes: int  # and buffers
    gradient_bytes: int
    cast_bytes: int
    host_to_device_gbs: float = 0.0
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workspace_bytes: int = 0
    state_bytes: int = 0
    random_bytes: int = 0
    measured: str = ""

    @property
    def with_targets(self) -> bool:
        """Whether they include a loss that is a mean over samples; there are no features then."""
        return self.dim == 0


def write_costs(path: str | os.PathLike[str], costs: StepCosts) -> None:
    """Write the costs as TOML, atomically. Raises OSError."""
    write_file(Path(path), costs_text(costs).encode())


def costs_text(costs: StepCosts) -> str:
    """A TOML file that `read_costs` reads."""
    plain, lines = dataclasses.asdict(costs), [f"schema = {SCHEMA}"]
    towers = plain.pop("towers")
    lines += [f"{name} = {_literal(value)}" for name, value in plain.items() if not isinstance(value, Mapping)]
    lines += ["", "[versions]", *(f"{name} = {_literal(value)}" for name, value in plain["versions"].items())]
    for tower in towers:
        passes = {name: tower.pop(name) for name in ("without_graph", "kept", "checkpointed")}
        lines += ["", "[[towers]]", *(f"{name} = {_literal(value)}" for name, value in tower.items())]
        for name, values in passes.items():
            if values is not None:
                lines += ["", f"[towers.{name}]", *(f"{key} = {_literal(each)}" for key, each in values.items())]
    return "\n".join(lines) + "\n"


def profile_names() -> tuple[str, ...]:
    """Sorted names of the profiles of infcl_gen."""
    return tuple(sorted(file.stem for file in _PROFILES.glob("*.toml")))


def read_costs(profile: str | os.PathLike[str], flag: str = "--profile") -> StepCosts:
    """The costs in a FILE.toml, or in the profile of a name. Raises InputError naming `flag`."""
    name = check_text(flag, os.fspath(profile))
    path = Path(name) if name.endswith(".toml") else _PROFILES / f"{name}.toml"
    if not name.endswith(".toml") and name not in profile_names():
        valid = ", ".join(profile_names())
        raise InputError(f"{flag}: {show(name)} is neither a profile nor a FILE.toml; valid: {valid}")
    return costs_of(read_toml(flag, path), show(name), flag)


def costs_of(table: dict[str, Any], where: str, flag: str = "--profile") -> StepCosts:
    """The costs in the table of a TOML file. Raises InputError naming `flag`."""
    import msgspec

    check_keys(flag, table, {"schema", *(field.name for field in dataclasses.fields(StepCosts))}, where)
    if table.pop("schema", None) != SCHEMA:
        raise InputError(
            f"{flag}: {where} has no schema = {SCHEMA}; it is no profile of a step that this version reads"
        )
    try:
        costs = msgspec.convert(table, StepCosts)
    except msgspec.ValidationError as error:
        raise InputError(f"{flag}: {where}: {error}") from None
    for tower in costs.towers:
        for name in ("without_graph", "kept", "checkpointed"):
            _check(flag, f"{where}: {tower.name}.{name}", getattr(tower, name))
    return costs


def _check(flag: str, where: str, costs: PassCosts | None) -> None:
    if costs is None:
        return
    count = len(costs.sizes)
    if not count or list(costs.sizes) != sorted({*costs.sizes}) or costs.sizes[0] < 1:
        raise InputError(f"{flag}: {where}: sizes must be positive and ascending")
    for field in dataclasses.fields(PassCosts):
        values = getattr(costs, field.name)
        counts = {count, 0} if field.name.startswith("backward") else {count}
        if len(values) not in counts or min(values, default=0) < 0:
            raise InputError(f"{flag}: {where}: {field.name} must have {count} values of at least 0, one for each size")


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value) if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)
