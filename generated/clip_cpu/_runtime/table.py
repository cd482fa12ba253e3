"""The communication of a training step as a table: at each step who works on whose keys, and what travels meanwhile.

Pure data, and the same for every rank: another rank is named by how far it is, (nodes on, devices on), modulo both.
Ranks stand in node order, rank = node * devices_per_node + device. The runtime executes this table, the cost model
prices it, the timeline simulates it and verification walks it.

Queries stay; what belongs to keys travels. A loss declares it as `Travelling` tensors: some are only read by the work
on these keys ("unchanged"), to others that work adds ("summed").

    ring      Keys go round. At each step a rank works on visiting keys, while those of the next step are on their way.
              Sums follow one step later, and are home after W steps. Backward is the same way back: it begins with the
              keys that forward has ended with (kept, or sent there once more), and the own keys, which come last, do
              not travel. A ring over several nodes moves devices - 1 times inside the nodes, then everybody sends to
              the next node at once: one step of as many as a node has devices crosses the network.
    gather    Everybody sends the own keys to everybody, beside the work on them. Sums go to their owner, or, where
              backward reads them, to everybody. Backward works on the own keys last, while sums for others go home.
    none      One device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Move = tuple[int, int]  # (nodes on, devices on)
HERE: Move = (0, 0)

# A batch of messages takes 0.1 ms of an H200's host and 0.08 ms to start, in which a link carries 60 MB. Sums do not
# wait for larger tensors than this, but travel in a batch of their own.
TOGETHER_BYTES = 64 << 20

# Where a tensor is. A number: a buffer for the largest shard, one of those that are used by turns.
Place = int | str
OWN = "own"  # of this rank's keys, as many as it has
KEPT = "kept"  # what forward leaves for backward: the keys that it ends with
ALL = "all"  # the owner's part of what is of all ranks' keys
RECEIVED = "received"  # one buffer for each sender


@dataclasses.dataclass(frozen=True)
class Travelling:
    """A tensor with `columns` numbers for each key: (keys, columns), or (columns, keys) if it lies `across`.

    dtype              "features", "statistics", or a dtype of torch by name
    forward, backward  "unchanged": work on the keys reads it; "summed": adds to it; "absent"
    """

    name: str
    columns: int
    dtype: str
    forward: str = "absent"
    backward: str = "absent"
    across: bool = False

    def role(self, phase: str) -> str:
        return self.forward if phase == "forward" else self.backward


class Transfer(NamedTuple):
    """What each rank sends: the tensor `name` of the keys of the rank at `of` (None: of all keys), to the rank at `to`.
    It receives the same from the rank as far in the other direction, in the place `target`."""

    name: str
    of: Move | None
    to: Move
    source: Place
    target: Place


class Copy(NamedTuple):
    """A tensor that is copied on a rank, before the step's transfers."""

    name: str
    source: Place
    target: Place


class Step(NamedTuple):
    """One row of the table.

    owner           whose keys are worked on; None: nothing is
    unchanged       where their unchanged tensors are
    sums            where their summed tensors are; after the last step, those of the own keys
    fresh           whether nothing was added to them before
    sends           they start beside this step's work, behind the work of all steps before
    unchanged_from  the step with whose transfers the unchanged tensors arrive, before the work; -1: they are here
    sums_from       the same of the summed ones, before the work adds to them
    """

    owner: Move | None
    unchanged: Place = OWN
    sums: Place = OWN
    fresh: bool = True
    sends: tuple[Transfer, ...] = ()
    unchanged_from: int = -1
    sums_from: int = -1
    copies: tuple[Copy, ...] = ()


@dataclasses.dataclass(frozen=True)
class Table:
    """How a package's ranks communicate. `keeps`: of a ring, the keys that forward ends with stay for backward."""

    transport: str
    nodes: int
    devices_per_node: int
    keeps: bool
    travelling: tuple[Travelling, ...]

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    def over(self, size: int) -> Table:
        """This table where there are as many ranks as planned, else that of the flat ring: every rank comes to the same
        from the package and the size of its group. Nodes are a matter of speed alone."""
        if size == self.world_size:
            return self
        if size == 1:
            return dataclasses.replace(self, transport="none", nodes=1, devices_per_node=1, keeps=False)
        return dataclasses.replace(self, transport="ring", nodes=1, devices_per_node=size)

    def named(self, role: str, phase: str) -> tuple[Travelling, ...]:
        """The tensors with this role."""
        return tuple(item for item in self.travelling if item.role(phase) == role)

    def role(self, name: str, phase: str) -> str:
        return next(item.role(phase) for item in self.travelling if item.name == name)

    def rank(self, start: int, move: Move, back: bool = False) -> int:
        """The rank that is `move` on from `start`, or as far `back`."""
        (node, device), sign = divmod(start, self.devices_per_node), -1 if back else 1
        node, device = (node + sign * move[0]) % self.nodes, (device + sign * move[1]) % self.devices_per_node
        return node * self.devices_per_node + device

    def level(self, move: Move) -> str:
        """What a move crosses: "node" if it leaves the node, else "device"."""
        return "node" if move[0] % self.nodes else "device"

    def steps(self, phase: str) -> tuple[Step, ...]:
        """The rows of "forward" or "backward"; none where nothing is worked on."""
        return _steps(self, phase)

    def batches(self, phase: str, step: Step, size: Callable[[str], int]) -> list[tuple[Transfer, ...]]:
        """A step's transfers as batches of messages: sums first, and apart from large unchanged tensors. `size`: bytes
        of what a transfer of a tensor of this name carries."""
        sums = tuple(sent for sent in step.sends if self.role(sent.name, phase) == "summed")
        rest = tuple(sent for sent in step.sends if sent not in sums)
        if sums and sum(size(sent.name) for sent in rest) > TOGETHER_BYTES:
            return [sums, rest]
        return [step.sends] if step.sends else []


def planned_table(literals: Mapping[str, Any]) -> Table:
    """The table of a package from its SPEC["plan"]["schedule"]."""
    travelling = tuple(Travelling(**item) for item in literals["travelling"])
    return Table(**{**literals, "travelling": travelling})


@functools.lru_cache(maxsize=16)
def _steps(table: Table, phase: str) -> tuple[Step, ...]:
    if not table.named("unchanged", phase):
        return ()
    if table.world_size == 1:
        return (Step(HERE),)
    if table.transport == "gather":
        return _gather_forward(table) if phase == "forward" else _gather_backward(table)
    return _ring_forward(table) if phase == "forward" else _ring_backward(table)


def _moves(table: Table) -> list[Move]:
    """After each step of a ring forward, how far the visiting keys go on."""
    cycle: list[Move] = [(0, 1)]
    if table.nodes > 1:  # with the device's 1 as many moves as a node has devices are a whole turn inside it
        cycle = [(0, 1)] * (table.devices_per_node - 1) + [(1, 1)]
    return list(itertools.islice(itertools.cycle(cycle), table.world_size))


def _owners(table: Table) -> list[Move]:
    """Whose keys visit at each step of a ring forward."""
    back = lambda at, move: ((at[0] - move[0]) % table.nodes, (at[1] - move[1]) % table.devices_per_node)  # noqa: E731
    return list(itertools.accumulate(_moves(table)[:-1], back, initial=HERE))


def _back(move: Move) -> Move:
    return -move[0], -move[1]


def _ring_forward(table: Table) -> tuple[Step, ...]:
    names, sums = ([item.name for item in table.named(role, "forward")] for role in ("unchanged", "summed"))
    owners, moves, last = _owners(table), _moves(table), table.world_size - 1

    def place(hop: int) -> Place:
        return hop % 2 if not table.keeps else KEPT if (last - hop) % 2 == 0 else 0

    def follow(hop: int) -> tuple[Transfer, ...]:
        return tuple(Transfer(name, owners[hop], moves[hop], hop % 2, (hop + 1) % 2) for name in sums)

    steps = []
    for hop, owner in enumerate(owners):
        sends: tuple[Transfer, ...] = follow(hop - 1) if hop else ()
        if hop < last:
            sends += tuple(Transfer(name, owner, moves[hop], place(hop), place(hop + 1)) for name in names)
        copies = () if hop else tuple(Copy(name, OWN, place(0)) for name in names)
        sums_from = hop if hop and sums else -1
        steps.append(Step(owner, place(hop), hop % 2, hop == 0, sends, hop - 1, sums_from, copies))
    if sums:
        read = [item.name for item in table.named("unchanged", "backward") if table.keeps]
        finished = tuple(Copy(name, last % 2, KEPT) for name in sums if name in read)
        home = (last + 1) % 2
        steps.append(Step(None, OWN, home, False, follow(last), -1, last + 1, finished))
    return tuple(steps)


def _ring_backward(table: Table) -> tuple[Step, ...]:
    names, sums = ([item.name for item in table.named(role, "backward")] for role in ("unchanged", "summed"))
    owners, moves, last = _owners(table)[::-1], [_back(move) for move in _moves(table)], table.world_size - 1
    fetch, steps = 0, []
    if not table.keeps:
        away = tuple(Transfer(name, HERE, moves[last], 1, 0) for name in names)
        steps.append(Step(None, sends=away, copies=tuple(Copy(name, OWN, 1) for name in names)))
        fetch = 1

    def place(hop: int) -> Place:
        if hop == last:
            return OWN
        return hop % 2 if not table.keeps else (hop - 1) % 2 if hop else KEPT

    for hop, owner in enumerate(owners):
        number, sends = hop + fetch, tuple[Transfer, ...]()
        if hop:
            sends = tuple(Transfer(name, owners[hop - 1], moves[last - hop], (hop - 1) % 2, hop % 2) for name in sums)
        if hop < last - 1:
            move = moves[last - 1 - hop]
            sends += tuple(Transfer(name, owner, move, place(hop), place(hop + 1)) for name in names)
        arrives = -1 if hop == last else number - 1
        sums_from = number if hop and sums else -1
        steps.append(Step(owner, place(hop), hop % 2, hop == 0, sends, arrives, sums_from))
    return tuple(steps)


def _others(table: Table) -> list[Move]:
    return [(0, distance) for distance in range(1, table.world_size)]


def _gather_forward(table: Table) -> tuple[Step, ...]:
    names = [item.name for item in table.named("unchanged", "forward")]
    others = _others(table)
    sends = tuple(Transfer(name, HERE, to, ALL, ALL) for name in names for to in others)
    steps = [Step(HERE, ALL, ALL, True, sends, copies=tuple(Copy(name, OWN, ALL) for name in names))]
    # In the order of a ring, in which no two ranks work on the same keys.
    steps += [Step(_back(to), ALL, ALL, True, unchanged_from=0) for to in others]
    if home := _home(table, "forward"):
        steps.append(Step(None, OWN, OWN, False, home, -1, len(steps)))
    return tuple(steps)


def _gather_backward(table: Table) -> tuple[Step, ...]:
    steps = [Step(_back(to), ALL, ALL) for to in _others(table)]
    home = _home(table, "backward")
    steps.append(Step(HERE, ALL, ALL, True, home))
    return (*steps, Step(None, sums_from=len(steps) - 1)) if home else tuple(steps)


def _home(table: Table, phase: str) -> tuple[Transfer, ...]:
    """Sums to the owners of their keys; those of all keys to everybody where backward reads them."""
    shared = {item.name for item in table.named("unchanged", "backward")} if phase == "forward" else set()
    return tuple(
        Transfer(item.name, None if item.name in shared else to, to, ALL, RECEIVED)
        for item in table.named("summed", phase)
        for to in _others(table)
    )
