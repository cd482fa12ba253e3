"""The communication of a training step as a table: at each step who works on whose keys, and what travels meanwhile.

Pure data, the same for every rank: a rank names another by its distance (nodes on, devices on), modulo both, with
rank = node * devices_per_node + device. The runtime executes the table; the planner prices, simulates and explains it.

Queries stay, and tensors of keys travel. Work on the keys reads "unchanged" tensors, and adds to "summed" ones.

    ring      Each step works on visiting keys while the keys of the next step travel. Sums follow one step later, and
              are home after the last. Backward goes back: it begins with the last keys of forward (kept, or sent once
              more) and ends with the own keys, which do not travel. Over several nodes, devices - 1 moves stay inside
              the nodes; then all ranks send to the next node at once.
    gather    Each rank sends its keys to all others, beside the work on them. Sums go to their owner, or to all ranks
              if backward reads them. Backward works on the own keys last, while sums for others go home.
              A `whole` one works on all keys at once in forward, and has their sums: it begins with the own keys, while
              others come. It ends with them, and sums for others go home beside what is left then.
    none      One device.

A forward that has the sums for dk, and is not `whole`, works on the own keys twice: with half of its queries while the
first keys come, and with the others while sums go home. The rank's own part of the sums for its keys does not travel.

Of a `triangle` queries are keys of each other, and one of two ranks computes their pairs: a rank meets the keys of
those up to half way back, and has sums for each but itself. What has come home for its own keys belongs to its queries.
Two ranks that are as far from each other on either way meet each other: each has its `share` of their pairs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Move = tuple[int, int]  # (nodes on, devices on)
HERE: Move = (0, 0)

# A batch of messages takes 0.1 ms of an H200's host and 0.08 ms to start, in which a link carries 60 MB. Beside more
# bytes than this, sums travel in a batch of their own.
TOGETHER_BYTES = 64 << 20

Place = int | str  # where a tensor is; a number: one of the buffers used by turns, as long as the largest shard
OWN = "own"  # of this rank's keys
KEPT = "kept"  # left by forward for backward: the keys that it ends with
ALL = "all"  # the owner's part of a tensor of all ranks' keys
RECEIVED = "received"  # one buffer per sender
STAYED = "stayed"  # of a ring's sums the own part, which does not travel

# Of symmetric memory, for what other ranks of the host send by copy engines (mailboxes.py). The rest is for counts, and
# for what torch adds to symmetric memory.
MAILBOX_BYTES, MAILBOX_REST_BYTES = 64 << 20, 1 << 20
MAILBOX_PLACES = 2  # for each sender: one is filled while the other is emptied
PIECE_UNIT_BYTES = 512

SHARE_ROWS = 8  # shares of a block begin at multiples of it: of the library's inner extents, and of 16 bytes
# The first half of the queries ends at a multiple: of what kernels are compiled apart for, and if it can of a tile.
HALF_ROWS = (16, 128)


def piece_bytes(ranks: int) -> int:
    """The largest piece of a message by copy engines: a place in a mailbox of one of so many ranks."""
    each = (MAILBOX_BYTES - MAILBOX_REST_BYTES) // (MAILBOX_PLACES * (ranks - 1))
    return each // PIECE_UNIT_BYTES * PIECE_UNIT_BYTES


@dataclasses.dataclass(frozen=True)
class Travelling:
    """A tensor with `columns` numbers for each key: (keys, columns), or (columns, keys) if it lies `across`.

    One that is there `once` has one row for all keys of a rank. One that is `renewed` is summed in forward, changed
    by the rank that has the keys, and sent again for backward.
    """

    name: str
    columns: int
    dtype: str  # "features", "statistics", or a dtype of torch by name
    forward: str = "absent"  # its role: "unchanged", "summed" or "absent"
    backward: str = "absent"
    across: bool = False
    once: bool = False
    renewed: bool = False

    def role(self, phase: str) -> str:
        return self.forward if phase == "forward" else self.backward


class Transfer(NamedTuple):
    """Each rank sends the tensor `name` of the keys of the rank at `of` (None: of all keys) to the rank at `to`.

    It receives the same in `target`, from the rank as far in the other direction.
    """

    name: str
    of: Move | None
    to: Move
    source: Place
    target: Place


class Copy(NamedTuple):
    name: str
    source: Place
    target: Place


class Share(NamedTuple):
    """The pairs that a rank computes of its queries and of visiting keys: a part of their rows each."""

    row: int
    rows: int
    key: int
    keys: int


class Step(NamedTuple):
    owner: Move | None  # whose keys are worked on; None: no work
    unchanged: Place = OWN  # where their unchanged tensors are
    sums: Place = OWN  # where their summed tensors are; after the last step, what has come home for the own keys
    fresh: bool = True  # nothing was added to the sums before
    sends: tuple[Transfer, ...] = ()  # start beside this step's work, behind the work of earlier steps
    unchanged_from: int = -1  # the step whose transfers the work waits for; -1: the unchanged tensors are here
    sums_from: int = -1  # the same for the summed tensors
    copies: tuple[Copy, ...] = ()  # made on each rank before the transfers
    halved: bool = False  # the owner meets this rank's keys, too: of their pairs each computes its share
    part: int = 0  # of this rank's queries the first half works (1), the others (2), or all (0)
    late: bool = False  # `sends` start behind a part of this step's work, too
    early: bool = False  # work on these keys that a later step ends, which has the sums

    def share(self, rank: int, owner: int, rows: int, keys: int) -> Share:
        """What `rank` computes of the pairs of its `rows` and the owner's `keys`.

        Where both meet each other, the lower rank has the first half of its rows, and the other one all of its rows
        with the second half of the lower's.
        """
        if self.part:  # few rows are all of the first half: its work begins the sums
            each = HALF_ROWS[rows >= 2 * HALF_ROWS[1]]
            first = min(rows, -(-rows // (2 * each)) * each)
            return Share(0, first, 0, keys) if self.part == 1 else Share(first, rows - first, 0, keys)
        if not self.halved:
            return Share(0, rows, 0, keys)
        split = rows if rank < owner else keys
        half = min(split, (split + SHARE_ROWS) // (2 * SHARE_ROWS) * SHARE_ROWS)
        return Share(0, half, 0, keys) if rank < owner else Share(0, rows, half, keys - half)


@dataclasses.dataclass(frozen=True)
class Table:
    transport: str  # "ring", "gather" or "none"
    nodes: int
    devices_per_node: int
    keeps: bool  # of a ring: the keys that forward ends with stay for backward
    travelling: tuple[Travelling, ...]
    whole: bool = False  # a gather's forward works on the keys of all ranks at once, and has the sums for dk
    triangle: bool = False  # queries are keys of each other
    copy_engines: bool = False  # carry messages, where the ranks are GPUs of one host; else NCCL

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    def over(self, size: int) -> Table:
        """This table for the planned number of ranks, else a flat ring; every rank concludes the same from the size."""
        if size == self.world_size:
            return self
        flat = dataclasses.replace(self, transport="ring" if size > 1 else "none", nodes=1, devices_per_node=size)
        if size == 1:
            flat = dataclasses.replace(flat, keeps=False)
        if self.whole:
            in_both = (dataclasses.replace(item, backward="unchanged") for item in self.named("unchanged", "forward"))
            sums = (
                dataclasses.replace(x, forward="absent", backward="summed") for x in self.named("summed", "forward")
            )
            flat = dataclasses.replace(flat, whole=False, travelling=(*in_both, *sums))
        return flat

    def as_whole(self) -> Table:
        """This gather, where forward computes what keys get in backward otherwise."""
        keys = (dataclasses.replace(item, backward="absent") for item in self.named("unchanged", "forward"))
        sums = (dataclasses.replace(x, forward="summed", backward="absent") for x in self.named("summed", "backward"))
        return dataclasses.replace(self, whole=True, travelling=(*keys, *sums))

    def without_key_gradients(self) -> Table:
        """This table where no gradient of keys is wanted: sums that no work reads do not travel."""
        kept = (
            x for x in self.travelling if "summed" not in (roles := (x.forward, x.backward)) or "unchanged" in roles
        )
        return dataclasses.replace(self, travelling=tuple(kept))

    def without_sums(self) -> Table:
        """This table for a forward that only reads keys: its gradients are not wanted."""
        return dataclasses.replace(self, whole=False, travelling=self.named("unchanged", "forward"))

    def named(self, role: str, phase: str) -> tuple[Travelling, ...]:
        return tuple(item for item in self.travelling if item.role(phase) == role)

    def role(self, name: str, phase: str) -> str:
        return next(item.role(phase) for item in self.travelling if item.name == name)

    def rank(self, start: int, move: Move, back: bool = False) -> int:
        """The rank at distance `move` from `start`, or as far `back`."""
        (node, device), sign = divmod(start, self.devices_per_node), -1 if back else 1
        node, device = (node + sign * move[0]) % self.nodes, (device + sign * move[1]) % self.devices_per_node
        return node * self.devices_per_node + device

    def level(self, move: Move) -> str:
        """The link that a move crosses: "node" if it leaves the node, else "device"."""
        return "node" if move[0] % self.nodes else "device"

    @functools.lru_cache(maxsize=16)  # noqa: B019 - tables are few, and as long-lived as their packages
    def steps(self, phase: str) -> tuple[Step, ...]:
        """The rows of "forward" or "backward"; none where no tensor is read."""
        if not self.named("unchanged", phase):
            return ()
        if self.world_size == 1:
            return (Step(HERE),)
        if self.transport == "gather":
            return _gather_back(self) if phase == "backward" else _gather_forward(self)
        return _ring_back(self) if phase == "backward" else _ring_forward(self)

    @property
    def begins_and_ends_here(self) -> bool:
        """Whether forward works on the own keys first and last: it has the sums that others have in backward."""
        ends_here = self.named("summed", "forward") and not self.named("unchanged", "backward")
        return bool(ends_here) and not self.triangle and not self.whole

    @functools.lru_cache(maxsize=16)  # noqa: B019 - as above
    def hops(self, phase: str) -> int:
        """How many steps have work."""
        return sum(step.owner is not None for step in self.steps(phase))

    def visits(self, phase: str) -> int:
        """How many ranks' keys a rank works on."""
        return len({step.owner for step in self.steps(phase)} - {None})

    def adds(self, step: Step) -> bool:
        """Whether a step's work adds to summed tensors: a triangle's own rows have theirs with the queries."""
        return step.owner is not None and not step.early and not (self.triangle and step.owner == HERE)

    def work(self, step: Step) -> float:
        """The part of a rank's pairs that a step computes."""
        if step.owner is None:
            return 0.0
        if self.whole:
            return float(step.late)  # with what the first step begins
        if step.part:
            return 0.5 / self.world_size
        return (2 if self.adds(step) and self.triangle and not step.halved else 1) / self.world_size

    def batches(self, phase: str, step: Step, size: Callable[[str], int]) -> list[tuple[Transfer, ...]]:
        """A step's transfers as batches of messages: sums first, and apart from large unchanged tensors.

        `size(name)`: bytes that a transfer of this tensor carries.
        """
        sums = tuple(sent for sent in step.sends if self.role(sent.name, phase) == "summed")
        rest = tuple(sent for sent in step.sends if sent not in sums)
        if sums and sum(size(sent.name) for sent in rest) > TOGETHER_BYTES:
            return [sums, rest]
        return [step.sends] if step.sends else []


def planned_table(literals: Mapping[str, Any]) -> Table:
    """The table of a package from its SPEC["plan"]["schedule"]."""
    travelling = tuple(Travelling(**item) for item in literals["travelling"])
    return Table(**{**literals, "travelling": travelling})


def _turn(table: Table) -> list[Move]:
    """How far the keys have come at each step of a ring forward: to all devices of a node, then to the next node's.

    Of a triangle only to half of the nodes and, in the own node and in the one half way round, of the devices.
    """
    nodes, devices = table.nodes, table.devices_per_node
    if not table.triangle:
        return list(itertools.product(range(nodes), range(devices)))
    half_way = {0, nodes / 2}
    return [
        (node, device)
        for node in range(nodes // 2 + 1)
        for device in range(devices // 2 + 1 if node in half_way else devices)
    ]


def _is_halved(table: Table, distance: Move) -> bool:
    """Whether a triangle's ranks at this distance are as far from each other on the way back."""
    node, device = distance[0] % table.nodes, distance[1] % table.devices_per_node
    both_ways = 2 * node % table.nodes == 2 * device % table.devices_per_node == 0
    return table.triangle and both_ways and (node, device) != HERE


def _moves(table: Table) -> list[Move]:
    """How far the visiting keys move after each step of a ring forward; the last move takes them home."""
    turn = _turn(table)
    return [
        ((after[0] - before[0]) % table.nodes, (after[1] - before[1]) % table.devices_per_node)
        for before, after in itertools.pairwise([*turn, HERE])
    ]


def _owners(table: Table) -> list[Move]:
    """Whose keys visit at each step of a ring forward."""
    return [(-node % table.nodes, -device % table.devices_per_node) for node, device in _turn(table)]


def _back(move: Move) -> Move:
    return -move[0], -move[1]


def _ring_forward(table: Table) -> tuple[Step, ...]:
    names, sums = ([item.name for item in table.named(role, "forward")] for role in ("unchanged", "summed"))
    owners, moves = _owners(table), _moves(table)
    last, twice = len(owners) - 1, table.begins_and_ends_here  # twice: on the own keys
    first = int(table.triangle or twice)  # which step begins the sums that travel

    def place(hop: int) -> Place:
        return hop % 2 if not table.keeps else KEPT if (last - hop) % 2 == 0 else 0

    def follow(hop: int) -> tuple[Transfer, ...]:
        return tuple(Transfer(name, owners[hop], moves[hop], hop % 2, (hop + 1) % 2) for name in sums)

    steps = []
    for hop, owner in enumerate(owners):
        sends: tuple[Transfer, ...] = follow(hop - 1) if hop > first else ()
        if hop < last:
            sends += tuple(Transfer(name, owner, moves[hop], place(hop), place(hop + 1)) for name in names)
        copies = () if hop else tuple(Copy(name, OWN, place(0)) for name in names)
        sums_from = hop if hop > first and sums else -1
        halved, part = _is_halved(table, owner), int(twice and not hop)
        added_to, fresh = STAYED if part else hop % 2, hop == first or part == 1
        steps.append(Step(owner, place(hop), added_to, fresh, sends, hop - 1, sums_from, copies, halved, part))
    arrived = (last + 1) % 2
    if twice:
        steps.append(Step(HERE, OWN, STAYED, False, follow(last), part=2))
        steps.append(Step(None, OWN, arrived, False, sums_from=last + 1))
    elif sums:
        read = [item.name for item in table.named("unchanged", "backward") if table.keeps]
        finished = tuple(Copy(name, last % 2, KEPT) for name in sums if name in read)
        steps.append(Step(None, OWN, arrived, False, follow(last), -1, last + 1, finished))
    return tuple(steps)


def _ring_back(table: Table) -> tuple[Step, ...]:
    names, sums = ([item.name for item in table.named(role, "backward")] for role in ("unchanged", "summed"))
    owners, moves = _owners(table)[::-1], [_back(move) for move in _moves(table)]
    last, steps = len(owners) - 1, []
    # What forward has not left goes to the rank that begins with it.
    absent = [name for name in names if not table.keeps or table.role(name, "forward") == "absent"]
    source, target = (0, KEPT) if table.keeps else (1, 0)
    if absent:
        away = tuple(Transfer(name, HERE, moves[last], source, target) for name in absent)
        steps.append(Step(None, sends=away, copies=tuple(Copy(name, OWN, source) for name in absent)))
    fetch = len(steps)

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
        sums_from, halved = number if hop and sums else -1, _is_halved(table, owner)
        steps.append(Step(owner, place(hop), hop % 2, hop == 0, sends, arrives, sums_from, halved=halved))
    return tuple(steps)


def _receivers(table: Table) -> list[Move]:
    """To whom a rank of a gather sends its keys."""
    return _turn(table)[1:]


def _gather_forward(table: Table) -> tuple[Step, ...]:
    names = [item.name for item in table.named("unchanged", "forward")]
    receivers = _receivers(table)
    sends = tuple(Transfer(name, HERE, to, ALL, ALL) for name in names for to in receivers)
    copies = tuple(Copy(name, OWN, ALL) for name in names)
    home = _home(table, "forward")
    if table.whole:
        steps = [Step(HERE, ALL, ALL, True, sends, copies=copies, early=True), *_of_others(table)]
        ends = Step(HERE, ALL, ALL, True, home, late=True, unchanged_from=0)
        return (*steps, ends, *[Step(None, sums_from=len(steps))] * bool(home))
    steps = [Step(HERE, ALL, ALL, True, sends, copies=copies, part=int(table.begins_and_ends_here))]
    steps += _of_others(table)
    if table.begins_and_ends_here:
        steps += [Step(HERE, ALL, ALL, False, home, part=2), Step(None, sums_from=len(steps))]
    elif home:
        steps.append(Step(None, OWN, OWN, False, home, -1, len(steps)))
    return tuple(steps)


def _gather_back(table: Table) -> tuple[Step, ...]:
    fresh = [x.name for x in table.named("unchanged", "backward") if x.forward == "absent" or x.renewed]
    sends = tuple(Transfer(name, HERE, to, ALL, ALL) for name in fresh for to in _receivers(table))
    copies, home = tuple(Copy(name, OWN, ALL) for name in fresh), _home(table, "backward")
    if fresh and not home:  # what forward has not sent goes beside the work on the own keys
        return (Step(HERE, ALL, ALL, True, sends, copies=copies), *_of_others(table))
    steps = [Step(None, ALL, ALL, False, sends, copies=copies)] * bool(fresh)
    steps += _of_others(table, len(steps) - 1)
    steps.append(Step(HERE, ALL, ALL, True, home))
    return (*steps, Step(None, sums_from=len(steps) - 1)) if home else tuple(steps)


def _of_others(table: Table, unchanged_from: int = 0) -> list[Step]:
    """A gather's steps on the keys of others, in the order of a ring: no two ranks work on the same keys."""
    return [
        Step(_back(to), ALL, ALL, True, unchanged_from=unchanged_from, halved=_is_halved(table, to))
        for to in _receivers(table)
    ]


def _home(table: Table, phase: str) -> tuple[Transfer, ...]:
    """Transfers of sums to the owners of their keys; sums that backward reads go to all ranks."""
    shared = {item.name for item in table.named("unchanged", "backward")} if phase == "forward" else set()
    return tuple(
        Transfer(item.name, None if item.name in shared else to, to, ALL, RECEIVED)
        for item in table.named("summed", phase)
        for to in map(_back, _receivers(table))
    )
