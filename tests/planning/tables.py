"""Tables of communication for tests, of losses with statistics of keys and without."""

from __future__ import annotations

from infcl_gen.runtime.table import Table, Travelling
from tests.planning.conftest import derivation_of


def travelling(loss: str, dim: int = 8) -> tuple[Travelling, ...]:
    return derivation_of(loss).travelling(dim, 4)


def _travelling(has_keys: bool, dim: int) -> tuple[Travelling, ...]:
    return travelling("clip" if has_keys else "infonce", dim)


def ring_table(nodes: int, devices: int, has_keys: bool = True, keeps: bool = True, dim: int = 8) -> Table:
    """The ring over all devices, hierarchical where there are several nodes; of one device, nothing."""
    transport = "none" if nodes * devices == 1 else "ring"
    return Table(transport, nodes, devices, keeps and transport == "ring", _travelling(has_keys, dim))


def triangle_table(transport: str, nodes: int, devices: int, keeps: bool = False, labels: bool = True) -> Table:
    """That of a loss of one side, with labels or with ids."""
    rows = derivation_of("ntxent" if labels else "supcon_out").travelling(8, 4)
    transport = "none" if nodes * devices == 1 else transport
    return Table(transport, nodes, devices, keeps and transport == "ring", rows, triangle=True)


def gather_table(devices: int, has_keys: bool = True, dim: int = 8) -> Table:
    return Table("gather", 1, devices, False, _travelling(has_keys, dim))
