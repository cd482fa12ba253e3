"""The planned schedule, SPEC["plan"]["schedule"], as the runtime follows it: who is whose neighbour at each hop.

Forward, what visits a rank at hop h goes on by the h-th move, (node step, device step), of a cycle that is repeated;
ranks stand in node order, rank = node * devices + device. A ring of one node has the cycle ((0, 1),); one of several
nodes moves devices - 1 times inside its nodes, then everybody sends to the next node at once. After as many hops as
there are ranks everything has been everywhere, and is home. Backward is the same way back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Route(NamedTuple):
    """The way of what visits, the same on every rank. All steps are modulo the nodes, and the devices of a node."""

    transport: str
    nodes: int
    devices: int  # of each node
    moves: tuple[tuple[int, int], ...]
    keeps: bool  # of a ring: the keys that visit last in forward stay for backward; else they are sent there again

    def over(self, size: int) -> Route:
        """This way where there are as many ranks as planned, else the flat ring: every rank comes to the same from the
        package and the size of the group, so nothing needs to be agreed on. Nodes are a matter of speed alone."""
        if size == self.nodes * self.devices:
            return self
        return Route.flat(size, self.keeps)

    @staticmethod
    def flat(size: int, keeps: bool) -> Route:
        """The ring of one node."""
        return Route("ring", 1, size, ((0, 1),), keeps)

    def send_to(self, rank: int, hop: int) -> int:
        """Where what visits `rank` at `hop` goes next."""
        return self._moved(rank, hop, 1)

    def receive_from(self, rank: int, hop: int) -> int:
        """Whence comes what visits `rank` at the hop after `hop`. Of the owner of what visits at `hop`: the owner of
        what visits then."""
        return self._moved(rank, hop, -1)

    def _moved(self, rank: int, hop: int, sign: int) -> int:
        node_step, device_step = self.moves[hop % len(self.moves)]
        node, device = divmod(rank, self.devices)
        node, device = (node + sign * node_step) % self.nodes, (device + sign * device_step) % self.devices
        return node * self.devices + device


def planned_route(schedule: Mapping[str, Any]) -> Route:
    """The route of a package from its SPEC."""
    moves = tuple((node_step, device_step) for node_step, device_step in schedule["moves"])
    return Route(
        schedule["transport"], schedule["nodes"], schedule["devices_per_node"], moves, schedule["keeps"]
    )
