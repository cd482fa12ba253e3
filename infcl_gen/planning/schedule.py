"""The schedule: which keys visit whom at each hop, where they go next, and a simulator of it. Pure data, the same for
every rank.

Queries stay, keys visit: at hop h a rank works on the keys of `owner(rank, h)`, then what visits goes on by the move of
that hop. Ranks stand in node order, rank = node * devices_per_node + device. One inner cycle of moves is repeated until
every rank has met all keys, which are then home:

    flat ring            one node of W devices, moves ((0, 1),): everybody sends to the next rank
    hierarchical ring    d - 1 moves (0, 1) inside the nodes, then one move (1, 1): everybody sends to the next node at
                         once, over all its network links, in one hop of d; a flat ring would use one link at each hop.
                         With the 1 for the device too, d moves are a whole turn inside a node, and N * d come home

Backward is the way back, by the same moves the other way round. It begins with the keys that forward has ended with:
they are there, and so are their statistics, to which everybody has added. (Where they take too much memory to be kept,
they are sent there once more.) The own keys come last, and do not travel.

Where a few ranks share a node, the keys need not go round: by the transport "gather" everybody sends to everybody.

    forward     at hop 0, the own keys, all keys go to everybody; after the last one the sums for all keys, which
                everybody adds up
    backward    all others' keys are there; at the last hop, the own keys, the sums for others go home
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from infcl_gen.errors import VerificationError

Move = tuple[
    int, int
]  # (node step, device step): to the device so many further on, of the node so many further on


@dataclasses.dataclass(frozen=True)
class Payload:
    """What visits in one direction of the loss: `parcels` travel as they are, beside the work on them, and need not
    leave or come home; `sums` follow when the work has added to them, and come home. `shared`: sums that everybody gets
    then, of all keys, from all others, and adds up."""

    parcels: tuple[str, ...]
    sums: tuple[str, ...]
    shared: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """`world_size` hops, symbolic in the rank. `transport`: "ring", "gather", or "none" for one device. `moves`: one
    cycle, of which hop h is followed by the move h modulo its length; empty for one device. `forward`, `backward`: what
    moves. In a gather moves are the order of the work alone, and backward begins after the first: the own keys come
    last. `keeps`: of a ring, what visits last stays for backward."""

    transport: str
    nodes: int
    devices_per_node: int
    moves: tuple[Move, ...]
    forward: Payload
    backward: Payload
    keeps: bool = False

    @property
    def world_size(self) -> int:
        """Ranks, and as many hops."""
        return self.nodes * self.devices_per_node

    def owner(self, rank: int, hop: int, phase: str = "forward") -> int:
        """The rank whose keys visit `rank` at `hop`."""
        if not self.moves:
            return rank
        if phase == "backward":
            hop = hop + 1 if self.transport == "gather" else self.world_size - 1 - hop
        cycles, rest = divmod(hop, len(self.moves))
        whole, part = self._travelled[-1], self._travelled[rest]
        return self.moved(rank, (-cycles * whole[0] - part[0], -cycles * whole[1] - part[1]))

    def move(self, hop: int, phase: str = "forward") -> Move:
        """How far what visits a rank at `hop` goes on; backward against the forward's move between the same visits."""
        if not self.moves:
            return 0, 0
        if phase == "forward" or self.transport == "gather":
            return self.moves[hop % len(self.moves)]
        node, device = self.moves[(self.world_size - 2 - hop) % len(self.moves)]
        return -node, -device

    def moved(self, rank: int, move: Move) -> int:
        """The rank that a move from `rank` leads to."""
        node, device = divmod(rank, self.devices_per_node)
        node, device = (node + move[0]) % self.nodes, (device + move[1]) % self.devices_per_node
        return node * self.devices_per_node + device

    def send_to(self, rank: int, hop: int, phase: str = "forward") -> int:
        """Where what visits `rank` at `hop` goes next."""
        return self.moved(rank, self.move(hop, phase))

    def receive_from(self, rank: int, hop: int, phase: str = "forward") -> int:
        """Whence comes what visits `rank` at the hop after `hop`."""
        node, device = self.move(hop, phase)
        return self.moved(rank, (-node, -device))

    def level(self, move: Move) -> str:
        """What a move crosses: "node" if it leaves the node, else "device"."""
        return "node" if move[0] % self.nodes else "device"

    def payload(self, phase: str) -> Payload:
        """What visits in "forward" or "backward"."""
        return {"forward": self.forward, "backward": self.backward}[phase]

    def carries(self, phase: str, hop: int) -> tuple[str, ...]:
        """What moves after `hop`: parcels up to the last hop, or to the own keys, which have never left; what was added
        to until it is home."""
        payload, last = self.payload(phase), self.world_size - 1
        if self.transport == "gather":
            leaves = last - 1 if phase == "backward" else last
            return payload.parcels * (hop == 0) + (payload.sums + payload.shared) * (hop == leaves)
        if phase == "backward":
            return payload.parcels * (hop < last - 1) + payload.sums * (hop < last)
        return payload.parcels * (hop < last) + payload.sums

    @functools.cached_property
    def _travelled(self) -> tuple[Move, ...]:
        """How far what visits has come after 0, 1, ... moves of a cycle."""
        steps = itertools.accumulate(self.moves, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0))
        return tuple(steps)


def ring_schedule(nodes: int, devices_per_node: int, has_keys: bool, keeps: bool = True) -> Schedule:
    """The ring over all devices, hierarchical where there are several nodes. `has_keys`: statistics are kept per key,
    and therefore travel with the keys (finished ones, in backward, are only read)."""
    statistics = ("key statistics",) if has_keys else ()
    forward, backward = Payload(("keys",), statistics), Payload(("keys", *statistics), ("key gradients",))
    moves: tuple[Move, ...] = ((0, 1),)
    if nodes > 1:
        moves = ((0, 1),) * (devices_per_node - 1) + ((1, 1),)
    elif devices_per_node == 1:
        return Schedule("none", 1, 1, (), Payload((), ()), Payload((), ()))
    return Schedule("ring", nodes, devices_per_node, moves, forward, backward, keeps)


def gather_schedule(devices: int, has_keys: bool) -> Schedule:
    """Everybody sends to everybody: `devices` of one node, at least 2."""
    statistics = ("key statistics",) if has_keys else ()
    forward, backward = Payload(("keys",), (), statistics), Payload((), ("key gradients",))
    return Schedule("gather", 1, devices, ((0, 1),), forward, backward)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a simulated sweep did: the order of visits (query rank, key rank), logits computed in total, transfers."""

    visits: tuple[tuple[int, int], ...]
    logits: int
    transfers: int


def walk_schedule(
    schedule: Schedule, shard_sizes: Sequence[tuple[int, int]], has_keys: bool = True
) -> dict[str, Sweep]:
    """Run the forward and the backward sweep over shards of (queries, keys) rows, tracking what is in which buffer.

    Proves that each pair of query block and key block is visited exactly once, with the part of the payload that the
    work needs present and of the right owner, that both ends of each transfer agree, and that every accumulator comes
    home with the contributions of all ranks. Raises VerificationError saying which of these fails, where.
    """
    if len(shard_sizes) != schedule.world_size:
        raise VerificationError(f"{len(shard_sizes)} shards for a ring of {schedule.world_size}")
    statistics = ("key statistics",) if has_keys else ()
    if schedule.transport == "gather":
        return _simulate_gather(schedule, shard_sizes, statistics)
    home = [
        _Held({part: (rank, frozenset()) for part in ("keys", *statistics)})
        for rank in range(len(shard_sizes))
    ]
    forward, away = _sweep(schedule, shard_sizes, "forward", statistics, ("keys", *statistics), home, home)
    for rank, parts in enumerate(away):  # what is at hand when backward begins
        for part in statistics:
            owner, contributors = parts[part]
            if len(contributors) != len(shard_sizes):
                raise VerificationError(
                    f"forward: rank {rank} ends with {part} of rank {owner} that have {len(contributors)} contributions"
                )
    fetched = schedule.transport == "ring" and not schedule.keeps
    if fetched:
        # Against the forward's last move, by which the sums have come home: finished, or `_sweep` would have raised.
        away = [dict(parts) for parts in home]
        _transfer(schedule, "backward", -1, schedule.payload("backward").parcels, away)
    for rank, parts in enumerate(away):
        parts["key gradients"] = (schedule.owner(rank, 0, "backward"), frozenset())
    needs = ("keys", *statistics, "key gradients")
    backward, _ = _sweep(schedule, shard_sizes, "backward", ("key gradients",), needs, away, home)
    if fetched:
        backward = dataclasses.replace(backward, transfers=backward.transfers + len(shard_sizes))
    return {"forward": forward, "backward": backward}


# part -> (owner, ranks that have contributed to it so far): what a rank has in its buffers
_Held = dict[str, tuple[int, frozenset[int]]]


def _sweep(
    schedule: Schedule,
    shards: Sequence[tuple[int, int]],
    phase: str,
    accumulators: tuple[str, ...],
    needs: tuple[str, ...],
    start: Sequence[_Held],
    home: Sequence[_Held],
) -> tuple[Sweep, list[_Held]]:
    """From what each rank holds at the `start`; also what they hold after the last hop, before anything leaves. `home`:
    what each rank has of its own all the time."""
    world = schedule.world_size
    held = [dict(parts) for parts in start]
    visits: list[tuple[int, int]] = []
    logits = transfers = 0
    last: list[_Held] = []
    for hop in range(world):
        where = f"{phase} hop {hop}"
        for rank in range(world):
            owner = schedule.owner(rank, hop, phase)
            if phase == "backward" and owner == rank:
                held[rank] |= home[rank]
            for part in needs:
                if part not in held[rank]:
                    raise VerificationError(f"{where}: rank {rank} has no {part}")
                if held[rank][part][0] != owner:
                    raise VerificationError(
                        f"{where}: rank {rank} holds the {part} of rank {held[rank][part][0]}, not of rank {owner}"
                    )
            for part in accumulators:
                if rank in held[rank][part][1]:
                    raise VerificationError(
                        f"{where}: rank {rank} contributes twice to the {part} of rank {owner}"
                    )
                held[rank][part] = (owner, held[rank][part][1] | {rank})
            visits.append((rank, owner))
            logits += shards[rank][0] * shards[owner][1]
        last = [dict(parts) for parts in held]
        if carries := schedule.carries(phase, hop):
            _transfer(schedule, phase, hop, carries, held)
            transfers += world
    _check_visits(phase, visits, logits, shards)
    for rank in range(world):
        for part in accumulators:
            owner, contributors = held[rank].get(part, (-1, frozenset[int]()))
            if owner != rank or len(contributors) != world:
                raise VerificationError(
                    f"{phase}: the {part} at rank {rank} belong to rank {owner}, {len(contributors)} contributions"
                )
    return Sweep(tuple(visits), logits, transfers), last


def _transfer(schedule: Schedule, phase: str, hop: int, carries: tuple[str, ...], held: list[_Held]) -> None:
    """The move after a hop (-1: before the first), of every rank at once."""
    where, moved = f"{phase} hop {hop}" if hop >= 0 else f"before {phase}", []
    for rank, parts in enumerate(held):
        receiver = schedule.send_to(rank, hop, phase)
        if schedule.receive_from(receiver, hop, phase) != rank:
            raise VerificationError(f"{where}: rank {rank} sends to {receiver}, which receives from another")
        if receiver == rank:
            raise VerificationError(f"{where}: rank {rank} sends to itself")
        if not set(carries) <= set(parts):
            raise VerificationError(f"{where}: rank {rank} has not all of {', '.join(carries)} to send")
        moved.append((receiver, {part: parts.pop(part) for part in carries}))
    for receiver, payload in moved:
        held[receiver].update(payload)


def _check_visits(
    phase: str, visits: Sequence[tuple[int, int]], logits: int, shards: Sequence[tuple[int, int]]
) -> None:
    pairs = len(shards) ** 2
    if len(set(visits)) != len(visits) or len(visits) != pairs:
        raise VerificationError(
            f"{phase}: {len(set(visits))} different of {len(visits)} visits, {pairs} pairs"
        )
    if logits != sum(rows for rows, _ in shards) * sum(keys for _, keys in shards):
        raise VerificationError(f"{phase}: {logits} logits computed")


def _simulate_gather(
    schedule: Schedule, shards: Sequence[tuple[int, int]], statistics: tuple[str, ...]
) -> dict[str, Sweep]:
    """The same for everybody's messages to everybody: nothing is held at first but what is the own."""
    world = range(schedule.world_size)
    held = [{(part, rank) for part in ("keys",)} for rank in world]  # what may be read: (part, of whom)
    sweeps = {}
    for phase, sums in (("forward", statistics), ("backward", ("key gradients",))):
        payload, transfers, visits, logits = schedule.payload(phase), 0, list[tuple[int, int]](), 0
        # added[rank][part, owner]: the ranks whose contributions are in the sums of the owner that this rank has
        added: list[dict[tuple[str, int], list[int]]] = [{} for _ in world]
        needs = ("keys", *statistics) if phase == "backward" else ("keys",)
        for hop in world:
            for rank in world:
                owner = schedule.owner(rank, hop, phase)
                for part in needs:
                    if (part, owner) not in held[rank]:
                        raise VerificationError(
                            f"{phase} hop {hop}: rank {rank} has no {part} of rank {owner}"
                        )
                for part in sums:
                    added[rank].setdefault((part, owner), []).append(rank)
                visits.append((rank, owner))
                logits += shards[rank][0] * shards[owner][1]
            carried = schedule.carries(phase, hop)
            transfers += len(world) * (len(world) - 1) * len(carried)
            for part in payload.parcels if set(payload.parcels) <= set(carried) else ():
                for rank in world:
                    held[rank] |= {(part, owner) for owner in world}
            for part in payload.shared if set(payload.shared) <= set(carried) else ():
                of_all = {
                    (part, owner): [r for own in added for r in own.get((part, owner), [])] for owner in world
                }
                for rank in world:
                    added[rank] |= of_all
                    held[rank] |= set(of_all)
            for part in payload.sums if set(payload.sums) <= set(carried) else ():
                for rank in world:  # what is on its own keys stays, and is added to there
                    for owner in set(world) - {rank}:
                        here = added[owner].setdefault((part, owner), [])
                        here += added[rank].pop((part, owner), [])
        _check_visits(phase, visits, logits, shards)
        for rank, owner, part in itertools.product(world, world, sums):
            found = added[rank].get((part, owner), [])
            if (rank == owner or part in payload.shared) and sorted(found) != list(world):
                raise VerificationError(
                    f"{phase}: the {part} of rank {owner} at rank {rank} have contributions of {sorted(found)}"
                )
        sweeps[phase] = Sweep(tuple(visits), logits, transfers)
    return sweeps
