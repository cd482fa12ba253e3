"""The group: who takes part, what every rank brings, and how keys travel.

Queries stay; keys go round. At hop h rank p works on the keys of rank (p - h) mod W, while those of the next hop are
already on their way into a second buffer. What the work changes (statistics of the visiting keys, or their gradients)
follows after it, and is home after W hops. Everything that touches torch.distributed is in this file.

    hop 0        work on own keys       | keys -> p + 1, keys <- p - 1 |  then the accumulator, the same way
    hop 1        work on those of p - 1 | keys -> p + 1, keys <- p - 1 |  then the accumulator
    ...
    hop W - 1    work on those of p + 1 |                              |  then the accumulator: it comes home
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ALONE = "<this device>"  # a group name: one device, also where torch.distributed is initialised
PROTOCOL = 2  # raise it with every change of what ranks send to each other

# What each rank tells all others before the first hop. Text travels as 14 ASCII characters in two words. The protocol
# comes first and the length is fixed: gloo ends the process when a message is longer than its receiver expects.
_TEXT_WORDS, _WORD_BYTES, _HEADER_WORDS = 2, 7, 32
_CONTROL_TAG = 64  # parcels and accumulators count from 0
_HEADER: dict[str, type] = {
    "protocol": int,
    "accepted": bool,  # False: this rank's own arguments were wrong, and it raises
    "package digest": str,
    "torch version": str,
    "loss": str,
    "dtype": str,
    "embedding dimension": int,
    "phase": str,
    "trips finished": int,  # of this process in this group
    "call number": int,  # trips finished before the forward
    "ranks compared": bool,
    "labels given": bool,
    "gradients wanted": int,  # bits: q, k, scale, bias
    "grad_sync": str,
    "reduction": str,
    "rows": int,
    "keys": int,
    "first label": int,  # smallest and largest label; (0, -1) where they were not looked at
    "last label": int,
}
_FINGERPRINT = ("protocol", "package digest", "torch version", "loss", "dtype", "embedding dimension")
_ORDER = ("phase", "trips finished", "call number")
_PER_CALL = ("ranks compared", "labels given", "gradients wanted", "grad_sync", "reduction")

_rings: dict[str, Ring] = {}
# Of all packages of this process together. Gloo groups beside NCCL groups: a second one would meet the keys of another.
# Trips finished in each group: transfers that one package left behind would meet those of the next.
_control_groups: Any = vars(dist).setdefault("_infcl_control_groups", weakref.WeakKeyDictionary())
_trips: Any = vars(dist).setdefault("_infcl_trips", weakref.WeakKeyDictionary())


def find_ring(group_name: str) -> Ring | None:
    """The ring of a process group, given by name ("": the default group), or None for a group of one.

    Raises RuntimeError if there is no such group or this process is not in it.
    """
    if group_name == ALONE:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        if group_name:
            raise RuntimeError(
                f"process group {group_name!r} does not exist: torch.distributed is not initialised"
            )
        return None
    group = resolve(group_name)
    if dist.get_rank(group) < 0:
        raise RuntimeError(f"this process is not a member of the process group {group_name!r}")
    if dist.get_world_size(group) == 1:
        return None
    ring = _rings.get(group.group_name)
    if ring is None or ring.group is not group:  # names are used again after destroy_process_group
        ring = _rings[group.group_name] = Ring(group)
    return ring


def resolve(group_name: str) -> dist.ProcessGroup:
    """The group of that name ("": the default one). Operators carry names: a traced graph cannot carry a group."""
    by_name: Any = dist.distributed_c10d._resolve_process_group
    group = by_name(group_name) if group_name else dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


def group_size(group_name: str) -> int:
    """Number of ranks of a group that is given by name."""
    ring = find_ring(group_name)
    return 1 if ring is None else ring.size


class Ring:
    """The ranks of one process group, in group-rank order; this process is `rank` of `size` (at least 2)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.labels_checked: set[str] = set()
        self._backends = _backends(group)

    def check_device(self, device: torch.device) -> None:
        """Raises ValueError if tensors on `device` cannot travel in this group."""
        backend = self._backends.get(device.type)
        if backend is None or (device.type == "cuda" and backend == "gloo"):
            need = "nccl" if device.type == "cuda" else "gloo"
            raise ValueError(
                f"the process group cannot carry {device.type} tensors (its backends: {self._backends}); "
                f"initialise it with the {need} backend"
            )

    @property
    def trips(self) -> int:
        """Trips that this process has finished in the group. Where it differs, ranks are not in the same call."""
        return int(_trips.get(self.group, 0))

    def finish_trip(self) -> None:
        _trips[self.group] = self.trips + 1

    def exchange(
        self, header: Mapping[str, Any], phase: str = "forward", call: int | None = None
    ) -> list[dict[str, Any]]:
        """Every rank's header, in group-rank order. A small message between every two hosts; the device is not
        involved.

        `phase` is what follows, `call` in backward the number of trips before its forward. Raises RuntimeError if
        somebody's header does not come within the group's timeout, or is of another protocol.
        """
        trips = self.trips
        order = {"phase": phase, "trips finished": trips, "call number": trips if call is None else call}
        words = torch.tensor(_encode({**header, "protocol": PROTOCOL, **order}), dtype=torch.int64)
        gathered = words.repeat(self.size, 1)
        peers = [(self.rank - distance) % self.size for distance in range(1, self.size)]
        step, works = "connecting", []
        try:  # directly, not by an all-gather: whoever is silent can be named
            control = self._control_group()
            for peer in peers:
                step = f"addressing rank {peer}"
                works.append((peer, control.recv([gathered[peer]], peer, _CONTROL_TAG)))
                works.append((peer, control.send([words], peer, _CONTROL_TAG)))
            for peer, work in works:
                step = f"waiting for rank {peer}"
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"control exchange before the {phase} ring: rank {self.rank} of {self.size} failed {step} "
                f"(it has died, hangs, or does not call the loss): {error}"
            ) from error
        rows = gathered.tolist()
        protocols = [row[0] for row in rows]
        if any(protocol != PROTOCOL for protocol in protocols):
            each = ", ".join(f"rank {rank}: {protocol}" for rank, protocol in enumerate(protocols))
            raise RuntimeError(f"ranks disagree: protocol differs ({each})")
        return [_decode(row) for row in rows]

    def post(self, send: Tensor, receive: Tensor, tag: int) -> list[dist.Work]:
        """Starts sending to the next rank and receiving from the previous; both buffers are busy until waited for."""
        send_to, receive_from = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        transfers = [
            dist.P2POp(dist.isend, send, group=self.group, group_peer=send_to, tag=tag),
            dist.P2POp(dist.irecv, receive, group=self.group, group_peer=receive_from, tag=tag),
        ]
        works: list[dist.Work] = dist.batch_isend_irecv(transfers)
        return works

    def _control_group(self) -> Any:
        """What carries host tensors between these ranks: the group itself if it can, else gloo beside it.

        Not `new_group`: all processes of the job would have to call it, or (with local synchronisation) all ranks would
        have to have made equally many groups before; otherwise it hangs.
        """
        if "cpu" in self._backends:
            return self.group
        control = _control_groups.get(self.group)
        if control is None:
            store = dist.PrefixStore(
                f"infcl/{self.group.group_name}", dist.distributed_c10d._get_default_store()
            )
            backend: Any = self.group._get_backend(torch.device(next(iter(self._backends))))
            timeout = backend.options._timeout  # the group's own; gloo's default would be 30 minutes
            control = _control_groups[self.group] = dist.ProcessGroupGloo(
                store, self.rank, self.size, timeout
            )
        return control


class Rotation:
    """One trip of the keys round the ring.

    parcels      tensors that travel unchanged (the keys; in backward also their finished statistics). Contiguous, of
                 the same shape on every rank: the largest shard's. They are overwritten.
    accumulator  a tensor that the work at each hop adds to, or None.

    Iterating yields the owner of the visiting parcels, W times; the work goes into the loop's body and uses `.parcels`
    and, after `arrive()`, `.accumulator`: it leaves the previous rank when that has added to it, and travels beside
    this hop's work until then. Afterwards, and after a last `arrive()`, it is this rank's own, with the contributions
    of all. On CUDA nothing waits on the host: transfers run on the backend's stream, ordered against the current one
    at `post` and `wait`. Raises RuntimeError naming phase, hop and peers when a transfer fails.
    """

    def __init__(
        self, ring: Ring, phase: str, parcels: Sequence[Tensor], accumulator: Tensor | None = None
    ) -> None:
        self.ring, self.phase = ring, phase
        self.parcels, self.accumulator = list(parcels), accumulator
        self._spare_parcels = [torch.empty_like(parcel) for parcel in parcels]
        self._spare_accumulator = None if accumulator is None else torch.empty_like(accumulator)
        self._arriving: tuple[int, list[dist.Work]] = (
            0,
            [],
        )  # the accumulator: hop that it left in, its transfers

    def __iter__(self) -> Iterator[int]:
        size = self.ring.size
        for hop in range(size):
            works: list[dist.Work] = []
            if hop < size - 1:  # the keys need not go home
                for tag, (parcel, spare) in enumerate(zip(self.parcels, self._spare_parcels, strict=True)):
                    works += self._post(hop, parcel, spare, tag)
            yield (self.ring.rank - hop) % size
            self.arrive()  # where there was no work
            if self.accumulator is not None and self._spare_accumulator is not None:
                transfers = self._post(hop, self.accumulator, self._spare_accumulator, len(self.parcels))
                self._arriving = hop, transfers
                self.accumulator, self._spare_accumulator = self._spare_accumulator, self.accumulator
            self._wait(hop, works)
            self.parcels, self._spare_parcels = self._spare_parcels, self.parcels
        self.parcels, self._spare_parcels = [], []  # their memory is for the results
        self.ring.finish_trip()

    def arrive(self) -> None:
        """Waits for the accumulator, once a hop; nothing may touch it before."""
        hop, transfers = self._arriving
        self._arriving = hop, []
        self._wait(hop, transfers)

    def _post(self, hop: int, send: Tensor, receive: Tensor, tag: int) -> list[dist.Work]:
        try:
            return self.ring.post(send, receive, tag)
        except RuntimeError as error:
            raise self._failure(hop, error) from error

    def _wait(self, hop: int, works: list[dist.Work]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._failure(hop, error) from error

    def _failure(self, hop: int, error: RuntimeError) -> RuntimeError:
        rank, size = self.ring.rank, self.ring.size
        return RuntimeError(
            f"{self.phase} ring, hop {hop} of {size}: rank {rank} failed sending to rank {(rank + 1) % size} or "
            f"receiving from rank {(rank - 1) % size}: {error}"
        )


def disagreement(headers: Sequence[Mapping[str, Any]], only_order: bool = False) -> str | None:
    """What the ranks do not have in common, in words, or None: the first kind of difference, from which the others may
    follow. `only_order`: no more than that all are in the same call and accept it."""
    for fields in (_ORDER,) if only_order else (_FINGERPRINT, _ORDER, _PER_CALL):
        different = [field for field in fields if any(h[field] != headers[0][field] for h in headers)]
        if different:
            return "; ".join(
                f"{field} differs (" + ", ".join(f"rank {r}: {h[field]}" for r, h in enumerate(headers)) + ")"
                for field in different
            )
    rejecting = [rank for rank, header in enumerate(headers) if not header["accepted"]]
    if rejecting:
        return f"the arguments of rank {', '.join(map(str, rejecting))} are invalid (see the error there)"
    return None


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> backend, from torch's own description, such as "cpu:gloo,cuda:nccl"."""
    pairs = (item.split(":") for item in dist.get_backend_config(group).split(",") if ":" in item)
    return {device: backend for device, backend in pairs if backend and backend != "undefined"}


def _encode(header: Mapping[str, Any]) -> list[int]:
    words: list[int] = []
    for field, kind in _HEADER.items():
        value = header[field]
        if kind is str:
            text = value.encode("ascii", "replace")[: _TEXT_WORDS * _WORD_BYTES].ljust(
                _TEXT_WORDS * _WORD_BYTES
            )
            starts = range(0, len(text), _WORD_BYTES)
            words += [int.from_bytes(text[start : start + _WORD_BYTES], "big") for start in starts]
        else:
            words.append(int(value))
    return words + [0] * (_HEADER_WORDS - len(words))


def _decode(words: list[int]) -> dict[str, Any]:
    remaining = iter(words)
    header: dict[str, Any] = {}
    for field, kind in _HEADER.items():
        if kind is str:
            parts = (next(remaining).to_bytes(_WORD_BYTES, "big") for _ in range(_TEXT_WORDS))
            header[field] = b"".join(parts).decode("ascii", "replace").rstrip()
        else:
            header[field] = kind(next(remaining))
    return header
