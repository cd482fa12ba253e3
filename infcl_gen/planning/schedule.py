"""The ring: which keys visit at each hop, and what travels. Pure data, the same for every rank, and a simulator of it.

Rank p owns queries Q_p and keys K_p. Queries stay. At hop h rank p works on the keys of rank (p - h) mod W; then what
the hop carries goes to rank p + 1. Nodes need no level of their own: with ranks in node order, only the ring's edges
between neighbouring nodes cross the network, one device's traffic each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from infcl_gen.errors import VerificationError

FORWARD_PARTS = ("keys", "key statistics")
BACKWARD_PARTS = ("keys", "key statistics", "key gradients")


@dataclasses.dataclass(frozen=True)
class Hop:
    """One hop of every rank. Offsets are added to the rank, modulo the world size.

    `owner_offset`: whose keys are visiting. `send_offset`, `recv_offset`: the neighbours of the transfer that follows.
    `forward_carries`, `backward_carries`: what the next rank needs for its next hop, () for nothing: keys and finished
    statistics leave beside this hop's work, what the work adds to when that is done.
    """

    index: int
    owner_offset: int
    send_offset: int
    recv_offset: int
    forward_carries: tuple[str, ...]
    backward_carries: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """`world_size` hops, symbolic in the rank."""

    world_size: int
    hops: tuple[Hop, ...]

    def owner(self, rank: int, hop: Hop) -> int:
        """The rank whose keys visit `rank` at `hop`."""
        return (rank + hop.owner_offset) % self.world_size


def ring_schedule(world_size: int, has_keys: bool) -> Schedule:
    """The ring over `world_size` ranks. `has_keys`: statistics are kept per key, and therefore travel with the keys.

    After the last hop the keys themselves need not go home: only what was accumulated does.
    """
    statistics = ("key statistics",) if has_keys else ()
    hops = []
    for index in range(world_size):
        keys = ("keys",) if index < world_size - 1 else ()
        in_backward = statistics if keys else ()  # finished statistics are only read there
        hops.append(
            Hop(
                index,
                owner_offset=-index,
                send_offset=1 % world_size,
                recv_offset=-1 if world_size > 1 else 0,
                forward_carries=(*keys, *statistics) if world_size > 1 else (),
                backward_carries=(*keys, *in_backward, "key gradients") if world_size > 1 else (),
            )
        )
    return Schedule(world_size, tuple(hops))


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a simulated sweep did: the order of visits (query rank, key rank), and logits computed in total."""

    visits: tuple[tuple[int, int], ...]
    logits: int
    transfers: int


def simulate(
    schedule: Schedule, shard_sizes: Sequence[tuple[int, int]], has_keys: bool = True
) -> dict[str, Sweep]:
    """Run the forward and the backward sweep over shards of (queries, keys) rows, tracking what is in which buffer.

    Proves that each pair of query block and key block is visited exactly once, with the part of the payload that the
    work needs present and of the right owner, that both ends of each transfer agree, and that every accumulator comes
    home with the contributions of all ranks. Raises VerificationError saying which of these fails, where.
    """
    if len(shard_sizes) != schedule.world_size:
        raise VerificationError(f"{len(shard_sizes)} shards for a ring of {schedule.world_size}")
    return {
        phase: _sweep(schedule, shard_sizes, phase, _accumulators(phase, has_keys), _needs(phase, has_keys))
        for phase in ("forward", "backward")
    }


def _accumulators(phase: str, has_keys: bool) -> tuple[str, ...]:
    if phase == "backward":
        return ("key gradients",)
    return ("key statistics",) if has_keys else ()


def _needs(phase: str, has_keys: bool) -> tuple[str, ...]:
    parts = FORWARD_PARTS if phase == "forward" else BACKWARD_PARTS
    return tuple(part for part in parts if has_keys or part != "key statistics")


def _sweep(
    schedule: Schedule,
    shards: Sequence[tuple[int, int]],
    phase: str,
    accumulators: tuple[str, ...],
    needs: tuple[str, ...],
) -> Sweep:
    world = schedule.world_size
    # held[rank][part] = (owner, ranks that have contributed to it so far)
    held = [{part: (rank, frozenset[int]()) for part in needs} for rank in range(world)]
    visits: list[tuple[int, int]] = []
    logits = transfers = 0
    for hop in schedule.hops:
        where = f"{phase} hop {hop.index}"
        carries = hop.forward_carries if phase == "forward" else hop.backward_carries
        for rank in range(world):
            owner = schedule.owner(rank, hop)
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
        if carries:
            for rank in range(world):
                receiver = (rank + hop.send_offset) % world
                if (receiver + hop.recv_offset) % world != rank:
                    raise VerificationError(
                        f"{where}: rank {rank} sends to {receiver}, which receives from another"
                    )
                if receiver == rank:
                    raise VerificationError(f"{where}: rank {rank} sends to itself")
            moved = [
                {part: held[rank].pop(part) for part in carries if part in held[rank]}
                for rank in range(world)
            ]
            for rank in range(world):
                if set(moved[rank]) != set(carries):
                    raise VerificationError(
                        f"{where}: rank {rank} has not all of {', '.join(carries)} to send"
                    )
                held[(rank + hop.send_offset) % world].update(moved[rank])
                transfers += 1
    if len(set(visits)) != len(visits) or len(visits) != world * world:
        raise VerificationError(
            f"{phase}: {len(set(visits))} different of {len(visits)} visits, {world**2} pairs"
        )
    if logits != sum(rows for rows, _ in shards) * sum(keys for _, keys in shards):
        raise VerificationError(f"{phase}: {logits} logits computed")
    for rank in range(world):
        for part in accumulators:
            owner, contributors = held[rank].get(part, (-1, frozenset[int]()))
            if owner != rank or len(contributors) != world:
                raise VerificationError(
                    f"{phase}: the {part} at rank {rank} belong to rank {owner}, {len(contributors)} contributions"
                )
    return Sweep(tuple(visits), logits, transfers)
