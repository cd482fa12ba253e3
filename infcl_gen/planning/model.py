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
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import sympy

from infcl_gen.kernels.choice import Block, Choice, embedding_parts
from infcl_gen.kernels.family import most_strips
from infcl_gen.planning.memory import (
    ELEMENT_BYTES,
    SYMBOLS,
    Buffer,
    BufferTerm,
    allocated_bytes,
    buffer_terms,
    dtype_of,
    travelling_buffers,
)
from infcl_gen.planning.work import TimeTerm, time_terms
from infcl_gen.runtime.table import HERE, Step, Table, Transfer

if TYPE_CHECKING:
    from infcl_gen.hardware import Cluster, DeviceProfile

# A step is (1 + COOL) times as fast at first, before its power has lowered the clock, which fades over COOL_S: fitted
# with the efficiencies of `work`.
COOL, COOL_S = 0.1, 6e-3
VENDOR_FRACTION = 0.77  # of a vendor's figure, which no product reaches: 765 of 989 on the H200
# A product of fp32 operands on NVIDIA that are not split: its unit, and of that peak the rate of Triton and of the
# library. ieee has no tensor cores (1 TFLOP/s measured in a kernel of Triton).
FP32_MODES: dict[str, tuple[str, float, float]] = {"tf32": ("tf32", 1.0, 1.0), "exact": ("fp32", 0.02, 0.8)}
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
ACROSS = {"device": (0, 1), "node": (1, 0)}  # a move over each level
HOST = "host"  # the phase of what the device waits for the host
# Of a batch of messages, from the start of its kernel to the first byte: both ends meet. Among four H200s 25 MB to the
# next take 151 us: 78 us more than bytes at 345 GB/s (75 MB to three 65 us more).
BATCH_S = 78e-6
# Kernels take so much longer while a message of their device is on its way: it takes multiprocessors. Fitted to rings
# of 2 and 4 H200s that sent one message of keys and one of gradients more; of 2 in h200-ring2.json within 6 %.
SLOWDOWN = 0.4
HIDDEN = 0.9  # of the device's work behind the host's, where the host takes longer
NO_BLOCK = Block(64, 64, 64, 4, 1)  # of a kernel that a strategy has not: its terms do not ask
TRITON_PRODUCT_FRACTION = 0.7  # of the library's rate: an assumption until a board is measured


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Rows and keys of a forward and a backward panel, and rows of the stash, which is 0 without one."""

    forward_rows: int
    forward_keys: int
    panel_rows: int
    panel_keys: int
    stash_rows: int = 0


class Memory(NamedTuple):
    """Bytes of one rank by phase, with allocator slack. "both" lives from forward to the end of backward."""

    both: int
    forward: int
    backward: int
    finish: int

    @property
    def peak_bytes(self) -> int:
        """Upper bound on what one rank allocates beyond its inputs, from forward to the end of backward."""
        return self.both + max(self.forward, self.backward, self.finish)


class PhaseTime(NamedTuple):
    """Predicted time of one phase and what bounds it: "product", "memory", "exponentials", "launches" or "link"."""

    name: str
    time_s: float
    bound: str
    flops: float
    bytes: float


class _Sent(NamedTuple):
    """What one kind of step of the table sends, and how many such steps there are. `works`: on keys, meanwhile;
    `transfer_s`: of all messages; `sums_s`: of those until the sums that the step's own work adds to are here."""

    times: int
    works: bool
    transfer_s: float
    sums_s: float
    bytes: int


class _Expressions(NamedTuple):
    """Expressions; and functions of the values of SYMBOLS: bytes and shape of each buffer, quantities of each term."""

    buffers: tuple[BufferTerm, ...]
    terms: tuple[TimeTerm, ...]
    shapes: Callable[..., list[tuple[int, list[int]]]]
    work: Callable[..., list[list[float]]]


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The model of one choice for one problem on one device: memory and time of any `Sizes`."""

    choice: Choice
    cluster: Cluster
    rows: int  # of one rank
    keys: int
    table: Table

    @property
    def profile(self) -> DeviceProfile:
        return self.cluster.profile

    def memory(self, sizes: Sizes) -> Memory:
        """What one rank allocates beyond its inputs."""
        totals, gpu = dict.fromkeys(Memory._fields, 0), self.profile.target != "cpu"
        for term, (size, _) in self._own(sizes):
            totals[term.phase] += allocated_bytes(size, term.pieces, gpu)
        for buffer, pieces in self._travelling:
            totals[buffer.phase] += pieces * allocated_bytes(buffer.bytes // pieces, 1, gpu)
        return Memory(**totals)

    def buffers(self, sizes: Sizes) -> tuple[Buffer, ...]:
        """The memory plan by buffer, without those that are empty."""
        found = []
        for term, (size, shape) in self._own(sizes):
            whole = (term.pieces, *shape) if term.pieces > 1 else tuple(shape)
            if all(shape):
                found.append(Buffer(term.name, term.phase, size, whole, dtype_of(self.choice, term.dtype), term.why))
        return (*found, *(buffer for buffer, _ in self._travelling))

    def phases(self, sizes: Sizes) -> tuple[PhaseTime, ...]:
        """Time by phase: of kernels, of the host where they wait for it, and what of communication is not hidden."""
        work = self._work(sizes)
        found = [self._phase(*each) for each in zip(self._kind.terms, self._rates, work, strict=True)]
        if self.choice.strategy != "torch":
            faster = 1 + COOL * math.exp(-math.fsum(phase.time_s for phase in found) / COOL_S)
            found = [phase._replace(time_s=_rounded(phase.time_s / faster)) for phase in found]
            # Kernels wait for the host at the start; where they are short they do so all the time.
            start_s, step_s, launch_s = host_times(self.choice)
            step_s += launch_s * sum(launches for *_, launches in work)
            alone_s = max(start_s, step_s - HIDDEN * math.fsum(phase.time_s for phase in found))
            found.append(PhaseTime(HOST, _rounded(alone_s + RANKS_HOST_S * self.choice.ring), "launches", 0, 0))
        return (*found, *self._exposed(found, sizes))

    def launches(self, phase: str, sizes: Sizes) -> float:
        """How many kernels the host launches in "forward" or "backward", over all hops."""
        work = self._work(sizes)
        return math.fsum(
            of_term[-1] for term, of_term in zip(self._kind.terms, work, strict=True) if term.phase == phase
        )

    def hop_s(self, phase: str, times: Sequence[PhaseTime], sizes: Sizes) -> tuple[float, float]:
        """Time of one hop, and of what its first panel does before it adds to sums that travel, of predicted times."""
        parts = [
            (term.part, at.time_s) for term, at in zip(self._kind.terms, times, strict=False) if term.phase == phase
        ]
        hop_s = math.fsum(time_s for part, time_s in parts if part != "end") / self.table.world_size
        first_s = math.fsum(time_s for part, time_s in parts if part == "first") / self.table.world_size
        return hop_s, first_s / self.panels(phase, sizes)

    def panels(self, phase: str, sizes: Sizes) -> int:
        """Panels of a hop."""
        if phase == "backward" and self.choice.strategy == "fused":
            return 1
        forward = phase == "forward"
        rows, keys = (sizes.forward_rows, sizes.forward_keys) if forward else (sizes.panel_rows, sizes.panel_keys)
        return -(-self.rows // rows) * -(-self.keys // keys)

    def sent_bytes(self, name: str) -> int:
        """Bytes of a tensor of a rank's keys that travels."""
        item = next(item for item in self.table.travelling if item.name == name)
        return self.keys * item.columns * int(ELEMENT_BYTES[dtype_of(self.choice, item.dtype)])

    def transfer_bytes(self, sent: Transfer) -> int:
        """Bytes of one message."""
        return self.sent_bytes(sent.name) * (self.table.world_size if sent.of is None else 1)

    @functools.cached_property
    def _kind(self) -> _Expressions:
        return _expressions(self.choice.kind)

    @functools.cached_property
    def _travelling(self) -> list[tuple[Buffer, int]]:
        return travelling_buffers(self.table, self.choice, self.keys)

    @functools.cached_property
    def _given(self) -> tuple[int, ...]:
        """The values of the symbols that do not depend on sizes."""
        choice = self.choice
        forward, gradient, fused, finish = (
            choice.blocks.get(name, NO_BLOCK) for name in ("forward", "gradient", "fused", "finish")
        )
        padded = -(-choice.inner_dim // forward.depth) * forward.depth
        if choice.strategy == "fused":
            padded = sum(embedding_parts(choice.dim))
        return (
            *(self.rows, self.keys, self.table.world_size, choice.dim, padded),
            *(choice.feature_bytes, choice.statistics_bytes),
            *(forward.rows, forward.keys, gradient.rows, gradient.keys, fused.rows, fused.keys, finish.rows),
            *(self.profile.multiprocessors, self.profile.library_workspace_bytes),
        )

    @functools.cached_property
    def _rates(self) -> list[float]:
        """The peak of each term's product in FLOP/s: the kind of unit that the dtype and the precision allow."""
        return [self._rate(term.rate == "product") for term in self._kind.terms]

    def _rate(self, product: bool) -> float:
        choice, kind, fraction = self.choice, self.choice.operand_dtype, 1.0
        if choice.strategy != "torch":
            if kind == "fp32" and self.profile.vendor == "nvidia":
                kind, *fractions = FP32_MODES[choice.precision]
                fraction = fractions[product and choice.library]
            if product and not choice.library:
                fraction *= TRITON_PRODUCT_FRACTION
        peak = self.profile.matmul_tflops[kind]
        return peak.value * 1e12 * fraction * (VENDOR_FRACTION if peak.source.startswith("vendor") else 1.0)

    @functools.cached_property
    def _sent(self) -> dict[str, list[_Sent]]:
        """What the table sends in each direction, by kind of step; nothing on one device."""
        table, cluster = self.table, self.cluster
        node_gbs = cluster.node_link_gbs.value * min(1.0, cluster.links_per_node / cluster.devices_per_node)
        links = {
            "device": (cluster.link_gbs.value, cluster.latency_us.value),
            "node": (node_gbs, cluster.node_latency_us.value),  # by all devices of a node at once
        }
        found: dict[str, list[_Sent]] = {}
        for phase in ("forward", "backward") if table.world_size > 1 else ():
            found[phase] = []
            for step, count in kinds(table, phase).items():
                elapsed_s, sums_s, total = 0.0, 0.0, 0
                for batch in table.batches(phase, step, self.sent_bytes):
                    elapsed_s += BATCH_S * (self.profile.target != "cpu")
                    together: Counter[tuple[str, str]] = Counter()  # of a role, over a level
                    for sent in batch:
                        key = table.role(sent.name, phase), table.level(sent.to)
                        together[key] += self.transfer_bytes(sent)
                    for (role, level), size in together.items():  # as many bytes to the device as from it
                        gbs, latency_us = links[level]
                        elapsed_s += size / (gbs * 1e9) + latency_us * 1e-6
                        total += size
                        if role == "summed" and step.sums_from == 0:  # waited for in this step
                            sums_s = elapsed_s
                found[phase].append(_Sent(count, step.owner is not None, elapsed_s, sums_s, total))
        return found

    def _values(self, sizes: Sizes) -> tuple[int, ...]:
        """The values of all symbols, in the order of LEGEND."""
        panels = sizes.forward_rows, sizes.forward_keys, sizes.panel_rows, sizes.panel_keys
        blocks = self.choice.blocks
        return (
            *(*self._given, *panels, sizes.stash_rows),
            most_strips(*panels[:2], blocks.get("forward", NO_BLOCK)),
            most_strips(*panels[2:], blocks.get("gradient", NO_BLOCK)),
        )

    def _own(self, sizes: Sizes) -> Iterator[tuple[BufferTerm, tuple[int, list[int]]]]:
        """What does not travel: each with its bytes and its shape."""
        return zip(self._kind.buffers, self._kind.shapes(*self._values(sizes)), strict=True)

    def _work(self, sizes: Sizes) -> list[list[float]]:
        """The quantities of each term."""
        return self._kind.work(*self._values(sizes))

    def _phase(self, term: TimeTerm, rate: float, quantities: Sequence[float]) -> PhaseTime:
        """The time of a term alone."""
        flops, moved, exponentials, efficiency, launches = quantities
        limits = {
            "product": flops / (rate * efficiency),
            "memory": moved / (self.profile.bandwidth_gbs.value * 1e9),
            "exponentials": exponentials / (self.profile.exp_gops.value * 1e9),
        }
        bound, work_s = max(limits.items(), key=lambda limit: limit[1])
        launch_s = launches * self.profile.launch_us.value * 1e-6
        bound = "launches" if launch_s > work_s else bound
        return PhaseTime(term.name, _rounded(work_s + launch_s), bound, flops, moved)

    def _exposed(self, kernels: Sequence[PhaseTime], sizes: Sizes) -> Iterator[PhaseTime]:
        """What of the communication of each direction is not hidden, step by step of the table.

        A step's messages travel beside its work. What takes longer than that counts, and of sums what takes longer than
        the work before they are added to (the forward product of a panel, in backward its gradient and dq); the rest
        slows the work down. Where nothing is worked on all of it is waited for.
        """
        for phase, steps in self._sent.items():
            hop_s, first_s = self.hop_s(phase, kernels, sizes)
            exposed_s = 0.0
            for step in steps:
                all_s = step.transfer_s
                waited_s = max(0.0, step.sums_s - first_s, all_s - hop_s) if step.works else all_s
                exposed_s += step.times * (waited_s + (all_s - waited_s) * SLOWDOWN / (1 + SLOWDOWN))
            size = sum(step.times * step.bytes for step in steps)
            yield PhaseTime(f"{phase} communication", _rounded(exposed_s), "link", 0, size)


def host_times(choice: Choice) -> tuple[float, float, float]:
    """Seconds of the host before a step's first kernel; of a whole step but for its launches; and of each launch.
    A device that is the host itself waits for nothing."""
    if choice.strategy == "torch":
        return 0.0, 0.0, 0.0
    if choice.replay:
        return REPLAY_START_S, REPLAY_STEP_S, 0.0
    return HOST_START_S + STASH_START_S * choice.stash, HOST_STEP_S, HOST_LAUNCH_S


@functools.lru_cache(maxsize=64)
def kinds(table: Table, phase: str) -> Mapping[Step, int]:
    """How many steps there are of each kind, as far as their cost goes: with equal transfers over equal levels.
    What they wait for is said relative to the step: 0 for its own transfers."""
    counts: Counter[Step] = Counter()
    for number, step in enumerate(table.steps(phase)):
        over = ((sent, ACROSS[table.level(sent.to)]) for sent in step.sends)
        sends = tuple(sent._replace(of=sent.of and HERE, to=to, source=0, target=0) for sent, to in over)
        waits = [number - start if start >= 0 else -1 for start in (step.unchanged_from, step.sums_from)]
        owner = step.owner and HERE
        counts[Step(owner, sends=sends, unchanged_from=waits[0], sums_from=waits[1])] += 1
    return counts


@functools.cache
def _expressions(choice: Choice) -> _Expressions:
    """What depends on `Choice.kind` alone."""
    buffers, terms = buffer_terms(choice), time_terms(choice)
    shapes = [(term.bytes, list(term.shape)) for term in buffers]
    functions = (
        sympy.lambdify(tuple(SYMBOLS.values()), each, modules=[{"Min": min, "Max": max}, "math"], docstring_limit=0)
        for each in (shapes, [list(term.quantities) for term in terms])
    )
    return _Expressions(buffers, terms, *functions)


def _rounded(time_s: float) -> float:
    """Six digits: enough, and the same on machines whose last digit differs."""
    return float(f"{time_s:.6g}")
