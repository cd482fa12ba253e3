"""Verification of a table of communication: it is walked, and whatever goes wrong in it is named.

The table is the same for every rank, so one rank stands for all: what it receives is what it sends, seen from as far
away. A walk takes as many steps as there are ranks, and proves the table for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from infcl_gen.errors import VerificationError
from infcl_gen.runtime.table import ALL, HERE, KEPT, OWN, RECEIVED, STAYED, Move, Place, Step, Table, Transfer


@dataclasses.dataclass(frozen=True)
class Walk:
    """What a phase does on each rank: whose keys it works on, in this order, and how many messages it sends."""

    owners: tuple[Move, ...]
    transfers: int


def walk(table: Table, phases: Mapping[str, Sequence[Step]] | None = None) -> dict[str, Walk]:
    """Walk the steps of "forward" and "backward" (`phases`: other ones than the table's), tracking what is in which
    place.

    Proves that each rank meets the keys of all ranks exactly once, or its own with one half of its queries and with the
    other. Early work is not counted. Of a triangle one of two ranks meets the other, or both by half. What the work
    needs is present, of the right owner and finished. Nothing is read or written while it is on its way. All sums come
    home, or to everybody where backward reads them, with the contribution of every rank that has some. Raises
    VerificationError saying what fails, where.
    """
    phases = phases or {phase: table.steps(phase) for phase in ("forward", "backward")}
    held: dict[_Spot, _Content] = {}
    done = {}
    for phase, steps in phases.items():
        rank = _Rank(table, phase, held)
        for number, step in enumerate(steps):
            rank.take(number, step)
        done[phase] = rank.end(steps)
        held = rank.left()
    return done


# A tensor, its place, and of which owner, or from which sender, where a place is of several: relative to the rank.
_Spot = tuple[str, Place, Move | None]


@dataclasses.dataclass(frozen=True)
class _Content:
    """Of whose keys, relative to the rank; `added`: who has contributed to sums, relative to the owner, with which half
    of its queries (0: all)."""

    owner: Move
    added: set[tuple[Move, int]] | None = None


class _Rank:
    """What a rank has in its places, and what is on its way."""

    def __init__(self, table: Table, phase: str, held: dict[_Spot, _Content]) -> None:
        renewed = {item.name for item in table.travelling if item.renewed}
        self._table, self._phase = table, phase
        self._held = {spot: content for spot, content in held.items() if spot[0] not in renewed}
        for item in table.named("unchanged", phase):
            if item.forward != "summed" or item.renewed:
                self._held[item.name, OWN, None] = _Content(HERE)
        self._where, self._owners, self._sent, self._halved = f"before {phase}", list[Move](), 0, set[Move]()
        self._halves = 2 if any(step.part for step in table.steps(phase)) else 1  # of own queries with own keys
        # By step and role: target and what arrives there, and the places that are busy till then.
        self._coming: dict[tuple[int, str], list[tuple[_Spot, _Content]]] = {}
        self._received: dict[tuple[int, str], list[_Spot]] = {}
        self._sending: dict[tuple[int, str], list[_Spot]] = {}

    def take(self, number: int, step: Step) -> None:
        """One step."""
        table, phase = self._table, self._phase
        self._where = f"{phase} step {number}"
        for name, source, target in step.copies:
            content = self._read(name, source, step.owner or HERE, None if target == KEPT else HERE)
            added = None if content.added is None else set(content.added)
            self._write(self._spot(name, target, content.owner), _Content(content.owner, added))
        self._arrive(step.unchanged_from, "unchanged")
        for sent in step.sends:
            self._send(number, sent)
        if step.owner is not None:
            if step.part != 2 and not step.early:
                self._owners.append(self._at(step.owner))
            self._halved |= {self._at(step.owner)} if step.halved else set()
            for item in table.named("unchanged", phase):
                self._read(item.name, step.unchanged, step.owner, step.owner)
        self._arrive(step.sums_from, "summed")
        for item in table.named("summed", phase) if table.adds(step) else ():
            self._add(item.name, step)

    def end(self, steps: Sequence[Step]) -> Walk:
        """What must be so after the last step."""
        self._where = f"end of {self._phase}"
        if self._coming:
            raise self._error(f"nobody waits for what step {min(self._coming)[0]} has sent")
        self._check_visits(self._table.world_size if steps else 0)
        shared = {sent.name for step in steps for sent in step.sends if sent.of is None}
        for item in self._table.named("summed", self._phase):
            place = ALL if self._table.transport == "gather" else steps[-1].sums
            for owner in self._owners if item.name in shared else [HERE]:
                content = self._held.get(self._spot(item.name, place, owner))
                if content is None or content.owner != owner or content.added is None:
                    raise self._error(f"the {item.name} of {owner} are not there")
                added = content.added
                if (item.name, STAYED, None) in self._held:
                    added = self._with_own(item.name, added)
                if len(added) != self._contributors:
                    raise self._error(f"the {item.name} of {owner} have {len(added)} contributions")
            if item.name not in shared:
                self._held[item.name, OWN, None] = self._held[self._spot(item.name, place, HERE)]
        return Walk(tuple(self._owners), self._sent)

    def _with_own(self, name: str, arrived: set[tuple[Move, int]]) -> set[tuple[Move, int]]:
        """What has come home to a ring, with the own part, which has not travelled."""
        own = self._held[name, STAYED, None].added
        if own is None or own & arrived:
            raise self._error(f"the {name} that have come cannot be added to the own part")
        return own | arrived

    def _check_visits(self, world: int) -> None:
        different = set(self._owners)
        if not self._table.triangle:
            if len(different) != len(self._owners) or len(self._owners) != world:
                raise self._error(f"{len(different)} different of {len(self._owners)} visits, {world} ranks")
            return
        back = {self._at((-node, -device)) for node, device in different}
        if len(different) != len(self._owners) or len(different | back) != world:
            met = len(different | back)
            raise self._error(f"{met} of {world} ranks meet or are met, in {len(self._owners)} visits")
        if self._halved != (twice := (different & back) - {HERE}):
            raise self._error(f"{sorted(self._halved)} are met by half, and {sorted(twice)} meet each other")

    @property
    def _contributors(self) -> int:
        """How many contributions the sums of each have."""
        world = self._table.world_size
        if not self._table.triangle:
            return world - 1 + self._halves
        nodes, devices = self._table.nodes, self._table.devices_per_node
        alone = (1 + (nodes % 2 == 0)) * (1 + (devices % 2 == 0))  # distances that are the same on the way back
        return alone - 1 + (world - alone) // 2

    def left(self) -> dict[_Spot, _Content]:
        """What stays for the next phase."""
        return {spot: content for spot, content in self._held.items() if spot[1] in (OWN, KEPT, ALL)}

    def _at(self, move: Move) -> Move:
        return move[0] % self._table.nodes, move[1] % self._table.devices_per_node

    def _error(self, text: str) -> VerificationError:
        return VerificationError(f"{self._where}: {text}")

    def _spot(self, name: str, place: Place, owner: Move) -> _Spot:
        return name, place, self._at(owner) if place in (ALL, RECEIVED) else None

    def _read(self, name: str, place: Place, at: Move, owner: Move | None) -> _Content:
        """What is in a place, which must be of this owner (None: of any) and finished."""
        spot = self._spot(name, place, at)
        content = self._held.get(spot)
        if self._is_coming(spot):
            raise self._error(f"the {name} in {place} are on their way")
        if content is None:
            raise self._error(f"no {name} in {place}")
        if owner is not None and content.owner != self._at(owner):
            raise self._error(f"the {name} in {place} are of {content.owner}, not of {self._at(owner)}")
        if content.added is not None and len(content.added) != self._contributors:
            raise self._error(f"the {name} in {place} have {len(content.added)} contributions")
        return content

    def _write(self, spot: _Spot, content: _Content) -> None:
        if self._is_busy(spot):
            raise self._error(f"the {spot[0]} in {spot[1]} are written to while they are on their way")
        self._held[spot] = content

    def _is_coming(self, spot: _Spot) -> bool:
        return any(spot in spots for spots in self._received.values())

    def _is_busy(self, spot: _Spot) -> bool:
        return self._is_coming(spot) or any(spot in spots for spots in self._sending.values())

    def _send(self, number: int, sent: Transfer) -> None:
        """The rank sends what it has, and receives what the one as far in the other direction has sent."""
        to = self._at(sent.to)
        if to == HERE:
            raise self._error(f"the {sent.name} are sent to the rank itself")
        key = (number, self._table.role(sent.name, self._phase))
        for of in self._owners if sent.of is None else [sent.of]:
            source = self._spot(sent.name, sent.source, of)
            content = self._held.get(source)
            if self._is_coming(source):
                raise self._error(f"the {sent.name} in {sent.source} are sent before they have arrived")
            if content is None or content.owner != self._at(of):
                raise self._error(f"no {sent.name} of {self._at(of)} in {sent.source} to send")
            owner = self._at((of[0] - to[0], of[1] - to[1]))
            origin = self._at((-to[0], -to[1]))
            target = self._spot(sent.name, sent.target, origin if sent.target == RECEIVED else owner)
            if sent.of is None:
                target = (sent.name, f"{RECEIVED} of {owner}", origin)
            if target == source or self._is_busy(target):
                raise self._error(f"the {sent.name} are received in {sent.target} while it is busy")
            self._coming.setdefault(key, []).append((target, _Content(owner, content.added)))
            self._received.setdefault(key, []).append(target)
            self._sending.setdefault(key, []).append(source)
        self._sent += 1

    def _arrive(self, number: int, role: str) -> None:
        """What step `number` has sent in this role is here; what has come for sums is added up."""
        self._received.pop((number, role), None)
        self._sending.pop((number, role), None)
        for (name, place, at), content in self._coming.pop((number, role), ()):
            if not str(place).startswith(RECEIVED):
                self._held[name, place, at] = content
                continue
            own = self._held.get((name, ALL, content.owner))
            if own is None and self._table.triangle and content.owner == HERE:
                own = _Content(HERE, set())
            if own is None or own.added is None or content.added is None or own.added & content.added:
                raise self._error(f"what has come of the {name} of {content.owner} cannot be added")
            self._held[name, ALL, content.owner] = _Content(content.owner, own.added | content.added)

    def _add(self, name: str, step: Step) -> None:
        """This rank's contribution."""
        assert step.owner is not None
        owner, spot = self._at(step.owner), self._spot(name, step.sums, step.owner)
        me = self._at((-owner[0], -owner[1])), step.part
        if step.fresh:
            self._write(spot, _Content(owner, {me}))
            return
        content = self._held.get(spot)
        if content is None or content.owner != owner or content.added is None:
            raise self._error(f"no {name} of {owner} in {step.sums} to add to")
        if me in content.added:
            raise self._error(f"contributes twice to the {name} of {owner}")
        self._write(spot, content)
        content.added.add(me)
