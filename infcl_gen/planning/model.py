"""The cost model: memory and time of a plan of given sizes, from the expressions of `memory` and `work`, in numbers.

Memory is one term per buffer; the peak is "both" + max("forward", "backward", "finish"). It is an upper bound on what
the runtime allocates: each allocation of 1 MiB or more is counted with 1 MiB of allocator slack on GPUs, smaller ones
are rounded up to 512 bytes. Time is one term per phase: max(flops / (peak * efficiency), bytes / bandwidth,
exponentials / rate), whose largest is what bounds the phase, plus its launches. Phases follow one another, so they add;
communication counts where it is not hidden.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import sympy

from infcl_gen.planning.choice import Choice, Sizes, embedding_parts
from infcl_gen.planning.levels import most_strips
from infcl_gen.planning.memory import LEGEND, SYMBOLS, buffer_terms
from infcl_gen.planning.work import QUANTITIES, time_terms
from infcl_gen.runtime.table import ALL, KEPT, RECEIVED, Table, Transfer, Travelling

if TYPE_CHECKING:
    from infcl_gen.hardware import Cluster, DeviceProfile

MIB = 2**20
# A step is (1 + COOL) times as fast at first, before its power has lowered the clock, which fades over COOL_S: fitted
# with the efficiencies of `work`.
COOL, COOL_S = 0.1, 6e-3
# A vendor's figure is not reached by any product: 765 of 989 on the H200.
VENDOR_FRACTION = 0.77
# Rate of a product of fp32 operands on NVIDIA that are not split, of the peak named: ieee has no tensor cores (1
# TFLOP/s measured in a kernel of Triton).
FP32_MODES = {"tf32": ("tf32", 1.0), "exact": ("fp32", 0.02)}
LIBRARY_FP32_MODES = {"tf32": ("tf32", 1.0), "exact": ("fp32", 0.8)}
# On the host of an H200: before the first kernel runs, where nothing hides the host; and a whole step that the device
# waits for all the time. Launches as they are, or two recorded graphs. Fitted to h200-grid.json: all but one of its
# rows are then within 14 %, of hosts that take 0.7 to 1.2 ms for about the same work.
HOST_START_S, HOST_STEP_S, HOST_LAUNCH_S = 0.35e-3, 1.6e-3, 12e-6
REPLAY_START_S, REPLAY_STEP_S = 0.3e-3, 1.05e-3
# More before a forward that keeps tiles, which has a descriptor more and their room to divide: recorded, steps of
# B = 32 768 with a stash took 0.46, 0.68 and 0.70 ms less (D = 768, 1 024, 1 152); this makes it 0.4.
STASH_START_S = 0.3e-3
# More from an idle device where there are several ranks: with 16 384 rows each 2 H200s take 0.1 to 0.4 ms more by a
# gather and 0.4 to 0.7 by a ring; 4 of them took 1.1 to 1.3, before a rank began on its own keys and their hosts had
# less to do (h200-ring.json). Steps of all are within 10 %.
RANKS_HOST_S = 0.6e-3
HOST = "host"  # the phase of what the device waits for the host
# Of a batch of messages, from the start of its kernel to the first byte: both ends meet. Among four H200s 25 MB to the
# next take 151 us: 78 us more than bytes at 345 GB/s (75 MB to three 65 us more).
BATCH_S = 78e-6
# Kernels take so much longer while a message of their device is on its way: it takes multiprocessors. Fitted to rings
# of 2 and 4 H200s that sent one message of keys and one of gradients more; of 2 in h200-ring2.json within 6 %.
SLOWDOWN = 0.4
HIDDEN = 0.9  # of the device's work behind the host's, where the host takes longer
# What a panel of a ring's hop does before it adds to what travels.
BEFORE_SUMS = ("forward product", "gradient product", "gradient", "dq product", "fused dq")
AFTER_HOPS = ("finish", "additions")  # what is done once, when the last hop's work is over
TRITON_PRODUCT_FRACTION = 0.7  # of the library's rate: an assumption until a board is measured


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One line of the memory plan. `bytes` counts all its pieces, without allocator slack."""

    name: str
    phase: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    why: str


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """Predicted time of one phase and what bounds it: "product", "memory", "exponentials", "launches" or "link"."""

    name: str
    time_s: float
    bound: str
    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The model of one choice for one problem on one device: `peak_bytes` and `time_s` of any `Sizes`."""

    choice: Choice
    cluster: Cluster
    rows: int  # of one rank
    keys: int
    table: Table

    @functools.cached_property
    def _kind(self) -> Choice:
        return self.choice.kind

    @property
    def profile(self) -> DeviceProfile:
        return self.cluster.profile

    @property
    def world_size(self) -> int:
        return self.cluster.devices

    @property
    def nodes(self) -> int:
        return self.cluster.nodes

    def peak_bytes(self, sizes: Sizes) -> int:
        """Upper bound on what one rank allocates beyond its inputs, from forward to the end of backward."""
        totals = self._by_phase(sizes)
        return totals["both"] + max(totals["forward"], totals["backward"], totals["finish"])

    def forward_fits(self, sizes: Sizes) -> bool:
        """Whether the forward phase takes no more than the backward phase, which is there anyway."""
        totals = self._by_phase(sizes)
        return totals["forward"] <= max(totals["backward"], totals["finish"])

    def buffers(self, sizes: Sizes) -> tuple[Buffer, ...]:
        """The memory plan by buffer, without those that are empty."""
        values = self._values(sizes)
        names = {"features": self.choice.dtype, "statistics": self.choice.statistics_dtype}
        found = []
        lengths = iter(_shapes(self._kind)(*values))
        for term, size in zip(buffer_terms(self._kind), _memory(self._kind)(*values), strict=True):
            shape = tuple(next(lengths) for _ in term.shape)
            if not all(shape):
                continue
            shape = (term.pieces, *shape) if term.pieces > 1 else shape
            found.append(Buffer(term.name, term.phase, size, shape, names.get(term.dtype, term.dtype), term.why))
        return (*found, *(buffer for buffer, _ in self._travelling))

    def time_s(self, sizes: Sizes) -> float:
        """Predicted time of one forward and backward that begin on an idle device."""
        return math.fsum(phase.time_s for phase in self.phases(sizes))

    def queued_s(self, sizes: Sizes) -> float:
        """The same behind other work, as in training: the device does not wait for the host."""
        return math.fsum(phase.time_s for phase in self.phases(sizes) if phase.name != HOST)

    def phases(self, sizes: Sizes) -> tuple[PhaseTime, ...]:
        """Time by phase, of a ring the last two are what of the communication is not hidden. Kernels wait for the host
        at the start; where they are short they do so all the time."""
        terms = time_terms(self._kind)
        work = self._work(sizes)
        bandwidth = self.profile.bandwidth_gbs.value * 1e9
        found = []
        for term, (flops, moved, exponentials, efficiency, launches) in zip(terms, work, strict=True):
            times = {
                "product": flops / (self._rate(term.rate) * efficiency),
                "memory": moved / bandwidth,
                "exponentials": exponentials / (self.profile.exp_gops.value * 1e9),
            }
            bound = max(times, key=lambda name: times[name])
            launch_s = launches * self.profile.launch_us.value * 1e-6
            bound = "launches" if launch_s > times[bound] else bound
            found.append(PhaseTime(term.name, _rounded(max(times.values()) + launch_s), bound, flops, moved))
        if self.choice.strategy != "torch":
            busy_s = math.fsum(phase.time_s for phase in found)
            faster = 1 + COOL * math.exp(-busy_s / COOL_S)
            found = [dataclasses.replace(phase, time_s=_rounded(phase.time_s / faster)) for phase in found]
            found.append(PhaseTime(HOST, self._host_s(found, [launches for *_, launches in work]), "launches", 0, 0))
        if self.choice.ring:
            done = {"forward": found[:2], "backward": found[2 : len(terms)]}
            found += [self._link(phase, parts, sizes) for phase, parts in done.items()]
        return tuple(found)

    def launches(self, sizes: Sizes) -> dict[str, float]:
        """How many kernels the host launches in each phase, over all hops."""
        terms, work = time_terms(self._kind), self._work(sizes)
        return {term.name: launches for term, (*_, launches) in zip(terms, work, strict=True)}

    def _work(self, sizes: Sizes) -> list[list[float]]:
        """The QUANTITIES of each term."""
        numbers, width = _time(self._kind)(*self._values(sizes)), len(QUANTITIES)
        return [numbers[start : start + width] for start in range(0, len(numbers), width)]

    def _host_s(self, phases: Sequence[PhaseTime], launches: Sequence[float]) -> float:
        """What the device waits for the host: at the start, and where kernels are shorter than their launches."""
        start_s, step_s = host_times(self.choice.strategy, self.choice.replay)
        if not self.choice.replay:
            step_s += HOST_LAUNCH_S * sum(launches)
        alone_s = max(start_s, step_s - HIDDEN * math.fsum(phase.time_s for phase in phases))
        return _rounded(alone_s + RANKS_HOST_S * self.choice.ring)

    def _link(self, phase: str, work: Sequence[PhaseTime], sizes: Sizes) -> PhaseTime:
        """What of the communication of a direction is not hidden, step by step of the table.

        A step's messages travel beside its work. What takes longer than that counts, and of sums what takes longer than
        the work before they are added to (the forward product of a panel, in backward its gradient and dq); the rest
        slows the work down. Where nothing is worked on all of it is waited for.
        """
        hop_s = math.fsum(part.time_s for part in work if part.name not in AFTER_HOPS) / self.world_size
        before_s = math.fsum(part.time_s for part in work if part.name in BEFORE_SUMS)
        first_s = before_s / self.world_size / self.panels(phase, sizes)
        start_s, exposed_s, total = BATCH_S * (self.profile.target != "cpu"), 0.0, 0
        for step, count in self.table.kinds(phase).items():
            elapsed_s = waited_s = 0.0
            for batch in self.table.batches(phase, step, self.sent_bytes):
                elapsed_s += start_s
                together: dict[tuple[str, str], int] = {}  # of a role, over a level
                for sent in batch:
                    key = self.table.role(sent.name, phase), self.table.level(sent.to)
                    together[key] = together.get(key, 0) + self.transfer_bytes(sent)
                for (role, level), size in together.items():
                    elapsed_s += self._transfer_s(size, level == "node")
                    total += count * size
                    if role == "summed" and step.sums_from == 0:  # waited for in this step
                        waited_s = max(waited_s, elapsed_s - first_s)
            waited_s = elapsed_s if step.owner is None else max(waited_s, elapsed_s - hop_s)
            exposed_s += count * _added(elapsed_s, waited_s)
        return PhaseTime(f"{phase} communication", _rounded(exposed_s), "link", 0, total)

    def sent_bytes(self, name: str) -> int:
        """Bytes of a tensor of a rank's keys that travels."""
        item = next(item for item in self.table.travelling if item.name == name)
        sizes = {"features": self.choice.feature_bytes, "statistics": self.choice.statistics_bytes, "int64": 8}
        return self.keys * item.columns * sizes[item.dtype]

    def transfer_bytes(self, sent: Transfer) -> int:
        """Bytes of one message."""
        return self.sent_bytes(sent.name) * (self.world_size if sent.of is None else 1)

    def panels(self, phase: str, sizes: Sizes) -> int:
        """Panels of a hop."""
        if phase == "backward" and self.choice.strategy == "fused":
            return 1
        forward = phase == "forward"
        rows, keys = (sizes.forward_rows, sizes.forward_keys) if forward else (sizes.panel_rows, sizes.panel_keys)
        return -(-self.rows // rows) * -(-self.keys // keys)

    def _transfer_s(self, size: int, network: bool = False) -> float:
        """Of one message, of as many bytes to the device as from it."""
        cluster = self.cluster
        gbs, latency_us = cluster.link_gbs.value, cluster.latency_us.value
        if network:  # by all devices of a node at once
            gbs = cluster.node_link_gbs.value * min(1.0, cluster.links_per_node / cluster.devices_per_node)
            latency_us = cluster.node_latency_us.value
        return size and size / (gbs * 1e9) + latency_us * 1e-6

    def _by_phase(self, sizes: Sizes) -> dict[str, int]:
        totals = {"both": 0, "forward": 0, "backward": 0, "finish": 0}
        gpu = self.profile.target != "cpu"
        for (phase, pieces), size in zip(_pieces(self._kind), _memory(self._kind)(*self._values(sizes)), strict=True):
            totals[phase] += allocated_bytes(size, pieces, gpu)
        for buffer, pieces in self._travelling:
            totals[buffer.phase] += pieces * allocated_bytes(buffer.bytes // pieces, 1, gpu)
        return totals

    @functools.cached_property
    def _travelling(self) -> tuple[tuple[Buffer, int], ...]:
        """What the table needs of memory, and in how many pieces. Statistics that stay for backward are part of
        `key_statistics`."""
        found: list[tuple[Buffer, int]] = []

        def add(item: Travelling, what: str, phase: str, why: str, counts: tuple[int, ...], pieces: int = 1) -> None:
            dtypes = {"features": self.choice.dtype, "statistics": self.choice.statistics_dtype}
            each = (item.columns, self.keys) if item.across else (self.keys, item.columns)
            size, dtype = math.prod(counts) * self.sent_bytes(item.name), dtypes.get(item.dtype, item.dtype)
            found.append((Buffer(f"{what} {item.name}", phase, size, (*counts, *each), dtype, why), pieces))

        ranks = self.world_size
        for phase, item in itertools.product(("forward", "backward"), self.table.travelling):
            places, stays = self.table.places(phase)[item.name], item.forward == "summed"
            slots = sum(isinstance(place, int) for place in places)
            home = ("backward", "finish") if phase == "backward" else ("forward",)
            if slots:
                add(item, "visiting", phase, "in use or in flight, in turns", (slots,), slots)
            if slots and phase == "backward" and item.role(phase) == "summed":
                add(item, "own", "finish", "home again", (1,))
            if KEPT in places and (phase == "backward" if stays else phase == "forward"):
                add(item, "last", phase if stays else "both", "visits last in forward, first in backward", (1,))
            if ALL in places and phase == "forward" and not stays:
                add(item, "all", "both", "of all ranks, from forward to backward", (ranks,))
            if RECEIVED in places and item.backward == "unchanged":
                add(item, "shared", phase, "of the keys of all ranks, from each", (ranks, ranks))
            elif RECEIVED in places:
                for when in home:
                    add(item, "own", when, "of this rank", (1,))
                    add(item, "others'", when, "sums that go home", (ranks - 1,))
                    add(item, "received", when, "sums of all others that come home", (ranks - 1,))
        return tuple(found)

    def _values(self, sizes: Sizes) -> tuple[int, ...]:
        block = dict.fromkeys(("forward", "gradient", "fused", "finish"), (64, 64, 64)) | {
            name: (block.rows, block.keys, block.depth) for name, block in self.choice.blocks.items()
        }
        depth = block["forward"][2]
        padded = -(-self.choice.inner_dim("forward") // depth) * depth
        if self.choice.strategy == "fused":
            padded = sum(embedding_parts(self.choice.dim))
        strips = [
            most_strips(*panel, self.choice.blocks[name]) if name in self.choice.blocks else 1
            for name, panel in (
                ("forward", (sizes.forward_rows, sizes.forward_keys)),
                ("gradient", (sizes.panel_rows, sizes.panel_keys)),
            )
        ]
        choice = self.choice
        return (
            self.rows, self.keys, self.world_size, choice.dim, padded, choice.feature_bytes, choice.statistics_bytes,
            sizes.forward_rows, sizes.forward_keys, sizes.panel_rows, sizes.panel_keys, sizes.stash_rows,
            *block["forward"][:2], *block["gradient"][:2], *block["fused"][:2], *strips, block["finish"][0],
            self.profile.multiprocessors, self.profile.library_workspace_bytes,
        )  # fmt: skip

    def _rate(self, rate: str) -> float:
        """Peak of a product in FLOP/s: the kind of unit that the dtype and the precision allow."""
        kind, fraction = self.choice.dtype, 1.0
        library = rate == "product" and self.choice.library
        if self.choice.split:
            kind = "bf16"
        elif self.choice.dtype == "fp32" and self.profile.vendor == "nvidia" and self.choice.strategy != "torch":
            kind, fraction = (LIBRARY_FP32_MODES if library else FP32_MODES)[self.choice.precision]
        if rate == "product" and self.choice.strategy != "torch" and not library:
            fraction *= TRITON_PRODUCT_FRACTION
        peak = self.profile.matmul_tflops[kind]
        return peak.value * 1e12 * fraction * (VENDOR_FRACTION if peak.source.startswith("vendor") else 1.0)


def markdown(choices: Sequence[Choice] | None = None) -> str:
    """The whole model as a page: legend, memory by buffer and time by phase for each choice."""
    if choices is None:
        names = ("panel", "fused", "stash", "torch")
        ring = Choice(strategy="panel", dim=1, world_size=2, transport="ring")
        choices = [Choice(strategy=name, dim=1) for name in names]
        choices += [ring, dataclasses.replace(ring, transport="gather")]
    lines = [
        "# Cost model",
        "",
        'The peak is "both" and the largest of "forward", "backward" and "finish". A phase takes the longest of FLOPs',
        "at the efficiency, bytes at the bandwidth and exponentials at their rate, and its launches.",
        "",
        "| symbol | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in LEGEND.items()]
    for choice in choices:
        transport = ", gather" if choice.gather else ", ring" if choice.ring else ""
        lines += ["", f"## {choice.strategy}{transport}", ""]
        lines += ["| buffer | phase | bytes | why |", "|---|---|---|---|"]
        lines += [f"| {t.name} | {t.phase} | `{t.bytes}` | {t.why} |" for t in buffer_terms(choice)]
        lines += ["", "| phase | FLOPs | bytes | exponentials | efficiency | launches |", "|---|---|---|---|---|---|"]
        for term in time_terms(choice):
            lines.append("| " + " | ".join([term.name, *(f"`{value}`" for value in term.quantities)]) + " |")
    return "\n".join(lines) + "\n"


def host_times(strategy: str, replay: bool) -> tuple[float, float]:
    """Seconds of the host before a step's first kernel, and of a whole step but for each launch of its own."""
    if replay:
        return REPLAY_START_S, REPLAY_STEP_S
    return HOST_START_S + STASH_START_S * (strategy == "stash"), HOST_STEP_S


def allocated_bytes(size: int, pieces: int, gpu: bool) -> int:
    """Upper bound on what the caching allocator takes for `size` bytes in `pieces` tensors."""
    if not gpu:
        return size
    rounded = size + 511 * pieces if pieces > 1 else -(-size // 512) * 512
    return rounded + pieces * MIB if size >= MIB else rounded


def _added(transfer_s: float, waited_s: float) -> float:
    """What a transfer adds to the work beside it: what is waited for, and what the rest of it slows the work down."""
    return waited_s + (transfer_s - waited_s) * SLOWDOWN / (1 + SLOWDOWN)


def _compile(expressions: Sequence[Any]) -> Callable[..., list[Any]]:
    names = {"ceil_div": lambda a, b: -(-a // b), "Min": min, "Max": max}
    function = sympy.lambdify(tuple(SYMBOLS.values()), list(expressions), modules=[names, "math"])
    return function  # type: ignore[no-any-return]


@functools.cache
def _memory(kind: Choice) -> Callable[..., list[int]]:
    return _compile([term.bytes for term in buffer_terms(kind)])


@functools.cache
def _pieces(kind: Choice) -> tuple[tuple[str, int], ...]:
    return tuple((term.phase, term.pieces) for term in buffer_terms(kind))


@functools.cache
def _shapes(kind: Choice) -> Callable[..., list[int]]:
    return _compile([length for term in buffer_terms(kind) for length in term.shape])


@functools.cache
def _time(kind: Choice) -> Callable[..., list[float]]:
    return _compile([value for term in time_terms(kind) for value in term.quantities])


def _rounded(time_s: float) -> float:
    """Six digits: enough, and the same on machines whose last digit differs."""
    return float(f"{time_s:.6g}")
