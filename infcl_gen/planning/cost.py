"""The cost model: memory and time of a plan of given sizes, from the expressions of `terms`, in numbers.

Memory is one term per buffer; the peak is "both" + max("forward", "backward", "finish"). It is an upper bound on what
the runtime allocates: each allocation of 1 MiB or more is counted with 1 MiB of allocator slack on GPUs, smaller ones
are rounded up to 512 bytes. Time is one term per phase: max(flops / (peak * efficiency), bytes / bandwidth,
exponentials / rate), whose largest is what bounds the phase, plus its launches. Phases follow one another, so they add;
communication counts where it is not hidden.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy

from infcl_gen.planning.levels import inner_dim, most_strips
from infcl_gen.planning.terms import QUANTITIES, SYMBOLS, Variant, buffer_terms, time_terms
from infcl_gen.problem import DTYPE_BYTES

if TYPE_CHECKING:
    from infcl_gen.hardware import Cluster, DeviceProfile
    from infcl_gen.planning.levels import Block

MIB = 2**20
# A step is (1 + COOL) times as fast at first, before its power has lowered the clock, which fades over COOL_S: fitted
# with the efficiencies of `terms`.
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
TOGETHER_BYTES = 64 << 20  # keys of up to this size travel with a ring's sums (runtime/ring.py)
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
class Sizes:
    """The tile sizes that the planner varies: forward panel, backward panel, stash."""

    forward_rows: int
    forward_keys: int
    panel_rows: int
    panel_keys: int
    stash_rows: int = 0


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The model of one strategy for one problem on one device: `peak_bytes` and `time_s` of any `Sizes`."""

    variant: Variant
    cluster: Cluster
    rows: int
    keys: int
    dim: int
    dtype: str
    precision: str
    blocks: Mapping[str, Block]

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
        names = {"features": self.dtype, "statistics": "fp64" if self.dtype == "fp64" else "fp32"}
        found = []
        lengths = iter(_shapes(self.variant)(*values))
        for term, size in zip(buffer_terms(self.variant), _memory(self.variant)(*values), strict=True):
            shape = tuple(next(lengths) for _ in term.shape)
            if not all(shape):
                continue
            shape = (term.pieces, *shape) if term.pieces > 1 else shape
            found.append(
                Buffer(term.name, term.phase, size, shape, names.get(term.dtype, term.dtype), term.why)
            )
        return tuple(found)

    def time_s(self, sizes: Sizes) -> float:
        """Predicted time of one forward and backward that begin on an idle device."""
        return math.fsum(phase.time_s for phase in self.phases(sizes))

    def queued_s(self, sizes: Sizes) -> float:
        """The same behind other work, as in training: the device does not wait for the host."""
        return math.fsum(phase.time_s for phase in self.phases(sizes) if phase.name != HOST)

    def phases(self, sizes: Sizes) -> tuple[PhaseTime, ...]:
        """Time by phase, of a ring the last two are what of the communication is not hidden. Kernels wait for the host
        at the start; where they are short they do so all the time."""
        terms = time_terms(self.variant)
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
        if self.variant.strategy != "torch":
            busy_s = math.fsum(phase.time_s for phase in found)
            faster = 1 + COOL * math.exp(-busy_s / COOL_S)
            found = [dataclasses.replace(phase, time_s=_rounded(phase.time_s / faster)) for phase in found]
            found.append(
                PhaseTime(HOST, self._host_s(found, [launches for *_, launches in work]), "launches", 0, 0)
            )
        if self.variant.ring:
            done = {"forward": found[:2], "backward": found[2 : len(terms)]}
            found += [self._link(phase, parts, sizes) for phase, parts in done.items()]
        return tuple(found)

    def launches(self, sizes: Sizes) -> dict[str, float]:
        """How many kernels the host launches in each phase, over all hops."""
        terms, work = time_terms(self.variant), self._work(sizes)
        return {term.name: launches for term, (*_, launches) in zip(terms, work, strict=True)}

    def _work(self, sizes: Sizes) -> list[list[float]]:
        """The QUANTITIES of each term."""
        numbers, width = _time(self.variant)(*self._values(sizes)), len(QUANTITIES)
        return [numbers[start : start + width] for start in range(0, len(numbers), width)]

    def _host_s(self, phases: Sequence[PhaseTime], launches: Sequence[float]) -> float:
        """What the device waits for the host: at the start, and where kernels are shorter than their launches."""
        start_s, step_s = host_times(self.variant.strategy, self.variant.replay)
        if not self.variant.replay:
            step_s += HOST_LAUNCH_S * sum(launches)
        alone_s = max(start_s, step_s - HIDDEN * math.fsum(phase.time_s for phase in phases))
        return _rounded(alone_s + RANKS_HOST_S * self.variant.ring)

    def _link(self, phase: str, work: Sequence[PhaseTime], sizes: Sizes) -> PhaseTime:
        """What of the communication of a direction is not hidden. A batch of messages takes its time to start; of a
        ring's, one for each move is counted (and one for keys that travel apart).

        Ring: keys (in backward with their statistics) travel beside the work of W - 1 hops: what takes longer counts,
        and what slows the work down. Backward they do W - 2 times, as the own ones have not left; where the forward has
        kept nothing, another transfer comes first, and is waited for.
        What the work changes (statistics of the keys; in backward dk) follows each hop, beside the next one's work up
        to where that adds to it first: the forward product of a panel, in backward its gradient and dq. The last
        transfer of forward, home, is waited for. Of its W moves N cross the network, by all devices at once: the last
        one too, which backward does not repeat.

        Gather: the keys of all others come beside the work on the own ones, and so go home the sums of gradients; the
        statistics of all keys, from everybody to everybody, are waited for.
        """
        hops = self.world_size
        hop_s = math.fsum(part.time_s for part in work if part.name not in AFTER_HOPS) / hops
        start_s = BATCH_S * (self.profile.target != "cpu")
        beside, after = self.travels(phase)
        if self.variant.gather:
            # In backward the keys are there, and nobody waits for the sums.
            beside, after = (beside, hops * after) if phase == "forward" else (after, 0)
            total = (hops - 1) * (beside + after)
            beside_s = start_s + self._transfer_s((hops - 1) * beside)
            exposed = _added(beside_s, max(0.0, beside_s - hop_s))
            if after:
                exposed += start_s + self._transfer_s((hops - 1) * after)
            return PhaseTime(f"{phase} communication", _rounded(exposed), "link", 0, total)
        before_s = math.fsum(part.time_s for part in work if part.name in BEFORE_SUMS)
        first_s = before_s / hops / self.panels(phase, sizes)
        back = phase == "backward"
        # By the last move of forward, which leaves a node if there are several: sums come home, or keys go away again.
        waited = after if not back else 0 if self.variant.keeps else beside
        exposed = start_s + self._transfer_s(waited, network=self.nodes > 1) if waited else 0.0
        for network, moves in ((False, hops - self.nodes), (True, self.nodes - 1)):
            # Backward ends with the first move of forward, which leaves a node only if that is a single device.
            alone = back and network == (self.nodes == hops)
            for count, size in ((moves - alone, beside), (alone, 0)):
                apart_s = start_s if after and size > TOGETHER_BYTES else 0.0
                beside_s, after_s = (self._transfer_s(part, network) for part in (size, after))
                both_s = start_s + apart_s + beside_s + after_s
                exposed += count * _added(both_s, max(0.0, start_s + after_s - first_s, both_s - hop_s))
        total = (hops - 1 - (back and self.variant.keeps)) * beside + (hops - back) * after
        return PhaseTime(f"{phase} communication", _rounded(exposed), "link", 0, total)

    def travels(self, phase: str) -> tuple[int, int]:
        """Bytes of a hop's messages: of what travels beside its work, and of what the work adds to."""
        features = self.keys * self.dim * DTYPE_BYTES[self.dtype]
        statistics = self.keys * 2 * self._accumulator_bytes * self.variant.has_keys
        if phase == "forward":
            return features, statistics
        return features + statistics, self.keys * self.dim * self._accumulator_bytes

    def panels(self, phase: str, sizes: Sizes) -> int:
        """Panels of a hop."""
        if phase == "backward" and self.variant.strategy == "fused":
            return 1
        forward = phase == "forward"
        rows, keys = (
            (sizes.forward_rows, sizes.forward_keys) if forward else (sizes.panel_rows, sizes.panel_keys)
        )
        return -(-self.rows // rows) * -(-self.keys // keys)

    def _transfer_s(self, size: int, network: bool = False) -> float:
        """Of one message, of as many bytes to the device as from it."""
        cluster = self.cluster
        gbs, latency_us = cluster.link_gbs.value, cluster.latency_us.value
        if network:  # by all devices of a node at once
            gbs = cluster.node_link_gbs.value * min(1.0, cluster.links_per_node / cluster.devices_per_node)
            latency_us = cluster.node_latency_us.value
        return size and size / (gbs * 1e9) + latency_us * 1e-6

    @property
    def _accumulator_bytes(self) -> int:
        return 8 if self.dtype == "fp64" else 4

    def _by_phase(self, sizes: Sizes) -> dict[str, int]:
        totals = {"both": 0, "forward": 0, "backward": 0, "finish": 0}
        gpu = self.profile.target != "cpu"
        for (phase, pieces), size in zip(
            _pieces(self.variant), _memory(self.variant)(*self._values(sizes)), strict=True
        ):
            totals[phase] += allocated_bytes(size, pieces, gpu)
        return totals

    def _values(self, sizes: Sizes) -> tuple[int, ...]:
        block = dict.fromkeys(("forward", "gradient", "fused", "finish"), (64, 64, 64)) | {
            name: (block.rows, block.keys, block.depth) for name, block in self.blocks.items()
        }
        depth = block["forward"][2] if self.variant.strategy != "fused" else block["fused"][2]
        padded = -(-inner_dim("forward", self.dim, self.variant.split) // depth) * depth
        strips = [
            most_strips(*panel, self.blocks[name]) if name in self.blocks else 1
            for name, panel in (
                ("forward", (sizes.forward_rows, sizes.forward_keys)),
                ("gradient", (sizes.panel_rows, sizes.panel_keys)),
            )
        ]
        return (
            self.rows, self.keys, self.world_size, self.dim, padded, DTYPE_BYTES[self.dtype], self._accumulator_bytes,
            sizes.forward_rows, sizes.forward_keys, sizes.panel_rows, sizes.panel_keys, sizes.stash_rows,
            *block["forward"][:2], *block["gradient"][:2], *block["fused"][:2], *strips, block["finish"][0],
            self.profile.multiprocessors, self.profile.library_workspace_bytes,
        )  # fmt: skip

    def _rate(self, rate: str) -> float:
        """Peak of a product in FLOP/s: the kind of unit that the dtype and the precision allow."""
        kind, fraction = self.dtype, 1.0
        library = rate == "product" and self.variant.library
        if self.variant.split:
            kind = "bf16"
        elif self.dtype == "fp32" and self.profile.vendor == "nvidia" and self.variant.strategy != "torch":
            kind, fraction = LIBRARY_FP32_MODES[self.precision] if library else FP32_MODES[self.precision]
        if rate == "product" and self.variant.strategy != "torch" and not library:
            fraction *= TRITON_PRODUCT_FRACTION
        peak = self.profile.matmul_tflops[kind]
        return peak.value * 1e12 * fraction * (VENDOR_FRACTION if peak.source.startswith("vendor") else 1.0)


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
def _memory(variant: Variant) -> Callable[..., list[int]]:
    return _compile([term.bytes for term in buffer_terms(variant)])


@functools.cache
def _pieces(variant: Variant) -> tuple[tuple[str, int], ...]:
    return tuple((term.phase, term.pieces) for term in buffer_terms(variant))


@functools.cache
def _shapes(variant: Variant) -> Callable[..., list[int]]:
    return _compile([length for term in buffer_terms(variant) for length in term.shape])


@functools.cache
def _time(variant: Variant) -> Callable[..., list[float]]:
    return _compile([value for term in time_terms(variant) for value in term.quantities])


def _rounded(time_s: float) -> float:
    """Six digits: enough, and the same on machines whose last digit differs."""
    return float(f"{time_s:.6g}")
