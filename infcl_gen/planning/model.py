"""The cost model: the expressions of `memory` and `work` evaluated for a plan's sizes on a device.

The peak, "both" + the largest of the other phases, bounds what the runtime allocates, with allocator slack on
GPUs. The time of a phase is max(flops / (peak * efficiency), bytes / bandwidth, exponentials / rate) and its launches.
Times of phases add; communication counts where it is not hidden.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import sympy
from sympy.printing.pycode import PythonCodePrinter

from infcl_gen.hardware import Cluster, DeviceProfile
from infcl_gen.kernels import TILES
from infcl_gen.kernels.choice import Block, Choice, embedding_parts
from infcl_gen.planning import memory
from infcl_gen.planning.memory import Buffer, BufferTerm
from infcl_gen.planning.work import TimeTerm, time_terms
from infcl_gen.runtime.table import HERE, Step, Table, Transfer, piece_bytes

COOL, COOL_S = 0.1, 6e-3  # a step begins 10 % faster, until its power lowers the clock (time constant 6 ms, H200)
VENDOR_FRACTION = 0.77  # of a vendor's peak, which no product reaches: 765 of 989 TFLOP/s on the H200
# Products of fp32 operands on NVIDIA that are not split: whose peak, and the fractions that Triton and the library
# reach. ieee uses no tensor cores (1 TFLOP/s measured in a Triton kernel).
FP32_MODES: dict[str, tuple[str, float, float]] = {"tf32": ("tf32", 1.0, 1.0), "ieee": ("fp32", 0.02, 0.8)}
# Host of an H200: time before the first kernel, and time of a step that the host bounds; by single launches, or by two
# CUDA graphs. Fitted to h200-grid.json: all rows but one within 14 %, of hosts that take 0.7 to 1.2 ms for equal work.
HOST_START_S, HOST_STEP_S, HOST_LAUNCH_S = 0.35e-3, 1.6e-3, 12e-6
REPLAY_START_S, REPLAY_STEP_S = 0.3e-3, 1.05e-3
# A forward with a stash prepares more. The model then predicts that CUDA graphs save 0.4 ms; at B = 32 768 they save
# 0.46, 0.68 and 0.70 ms (D = 768, 1 024, 1 152).
STASH_START_S = 0.3e-3
# Several ranks from an idle device: at 16 384 rows a rank 2 H200s take 0.1 to 0.7 ms more, 4 H200s 1.1 to 1.3 ms
# (h200-ring.json). Whole steps are then within 10 %.
RANKS_HOST_S = 0.6e-3
ACROSS = {"device": (0, 1), "node": (1, 0)}  # a move over each level
HOST = "host"  # the phase in which the device waits for the host
# From the start of a batch of messages to its first byte, as both ends must meet. Among 4 H200s 25 MB to the next rank
# take 151 us, 78 us more than at 345 GB/s; 75 MB to three ranks take 65 us more.
BATCH_S = 78e-6
# Kernels take 40 % longer beside a message of NCCL, which occupies SMs. Fitted to rings of 2 and 4 H200s that sent two
# messages more; 2 H200s (h200-ring2.json) are within 6 %.
SLOWDOWN = 0.4
# Copy engines: 48 MiB take two H200s 157 us, 96 MiB 295 us. Beside them kernels take as long as alone, within 0.3 % of
# a step.
ENGINES_BATCH_S, ENGINES_SLOWDOWN = 10e-6, 0.0
# Of the host, to enqueue a piece that is sent and one that is taken: 96 MiB in 12 pieces take it 513 us, 8 MiB in one
# 136.
PIECE_HOST_S = 34e-6
HIDDEN = 0.9  # the part of the device's work that runs beside the host's, where the host takes longer
NO_BLOCK = Block(64, 64, 64, 4, 1)  # stands for a kernel that the strategy lacks: no term reads it
TRITON_PRODUCT_FRACTION = 0.7  # of the library's rate; assumed, not measured


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Rows and keys of a forward and a backward panel, and rows of the stash (0: none)."""

    forward_rows: int
    forward_keys: int
    panel_rows: int
    panel_keys: int
    stash_rows: int = 0


class Memory(NamedTuple):
    """Bytes of one rank by `BufferTerm.phase`, with allocator slack."""

    both: int
    forward: int
    backward: int
    finish: int
    after: int

    @property
    def peak_bytes(self) -> int:
        """Upper bound on what one rank allocates beyond its inputs."""
        return self.both + max(self[1:])


class PhaseTime(NamedTuple):
    """Predicted time of one phase and what bounds it: "product", "memory", "exponentials", "launches" or "link"."""

    name: str
    time_s: float
    bound: str
    flops: float
    bytes: float


def products_of(phases: Iterable[PhaseTime], choice: Choice, rows: int, keys: int) -> float:
    """Matrix products of 2 M N D operations that a step of a rank takes: M are its `rows`, N the `keys` of all ranks.
    fp32 features that are split count once."""
    flops = math.fsum(phase.flops for phase in phases) * choice.dim / choice.inner_dim
    return flops / (2 * rows * keys * choice.world_size * choice.dim)


class _Expressions(NamedTuple):
    """The terms of a choice; `shapes` (bytes and shape of each buffer) and `work` take the values of SYMBOLS."""

    buffers: tuple[BufferTerm, ...]
    terms: tuple[TimeTerm, ...]
    shapes: Callable[..., list[tuple[int, list[int]]]]
    work: Callable[..., list[list[float]]]


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The model of one choice for one problem on one device: memory and time of any `Sizes`."""

    choice: Choice
    cluster: Cluster
    rows: int  # of one rank, as are the keys
    keys: int
    negatives: int  # of each query, or pair of rows
    table: Table

    @property
    def profile(self) -> DeviceProfile:
        return self.cluster.profile

    @property
    def batch_s(self) -> float:
        """Seconds from the start of a batch of messages to its first byte."""
        return ENGINES_BATCH_S if self.table.copy_engines else BATCH_S * (self.profile.target != "cpu")

    def posting_s(self, batch: Iterable[Transfer]) -> float:
        """Seconds of the host for the pieces of these messages."""
        if not self.table.copy_engines:
            return 0.0
        size = piece_bytes(self.table.world_size)
        return PIECE_HOST_S * sum(-(-self.transfer_bytes(sent) // size) for sent in batch)

    @property
    def slowdown(self) -> float:
        """How much longer kernels take beside a message."""
        return ENGINES_SLOWDOWN if self.table.copy_engines else SLOWDOWN

    def memory(self, sizes: Sizes) -> Memory:
        """Bytes that one rank allocates beyond its inputs."""
        totals, gpu = dict.fromkeys(Memory._fields, 0), self.profile.target != "cpu"
        for term, (size, _) in self._own(sizes):
            totals[term.phase] += memory.allocated_bytes(size, term.pieces, gpu)
        for buffer, pieces in self._travelling:
            totals[buffer.phase] += pieces * memory.allocated_bytes(buffer.bytes // pieces, 1, gpu)
        return Memory(**totals)

    def buffers(self, sizes: Sizes) -> tuple[Buffer, ...]:
        """The memory plan by buffer, without empty buffers."""
        found = []
        for term, (size, shape) in self._own(sizes):
            whole = (term.pieces, *shape) if term.pieces > 1 else tuple(shape)
            if all(shape):
                dtype = memory.dtype_of(self.choice, term.dtype)
                found.append(Buffer(term.name, term.phase, size, whole, dtype, term.why))
        return (*found, *(buffer for buffer, _ in self._travelling))

    def phases(self, sizes: Sizes) -> tuple[PhaseTime, ...]:
        """Time by phase: kernels, the host where kernels wait for it, and communication that is not hidden."""
        work = self._kind.work(*self._values(sizes))
        found = [self._phase(*each) for each in zip(self._kind.terms, work, strict=True)]
        if self.choice.strategy != "torch":
            faster = 1 + COOL * math.exp(-math.fsum(phase.time_s for phase in found) / COOL_S)
            found = [phase._replace(time_s=_rounded(phase.time_s / faster)) for phase in found]
            # Kernels wait for the host at the start; short kernels wait all the time.
            start_s, step_s, launch_s = host_times(self.choice)
            step_s += launch_s * sum(launches for *_, launches in work)
            steps = (kinds(self.table, phase).items() for phase in self._sent)
            step_s += sum(count * self.posting_s(step.sends) for step, count in itertools.chain(*steps))
            alone_s = max(start_s, step_s - HIDDEN * math.fsum(phase.time_s for phase in found))
            alone_s += RANKS_HOST_S * (self.choice.world_size > 1)
            found.append(PhaseTime(HOST, _rounded(alone_s), "launches", 0, 0))
        return (*found, *self._exposed(found, sizes))

    def launches(self, phase: str, sizes: Sizes) -> float:
        """Number of kernels that the host launches in "forward" or "backward", over all hops."""
        work = zip(self._kind.terms, self._kind.work(*self._values(sizes)), strict=True)
        return math.fsum(launches for term, (*_, launches) in work if term.phase == phase)

    def work_s(self, phase: str, times: Sequence[PhaseTime], sizes: Sizes) -> tuple[float, float]:
        """Predicted seconds of all hops, and of each hop's first panel until that adds to sums that travel."""
        found = zip(self._kind.terms, times, strict=False)  # further times are of the host and of communication
        parts = [(term.part, at.time_s) for term, at in found if term.phase == phase]
        hops_s = math.fsum(time_s for part, time_s in parts if part != "end")
        first_s = math.fsum(time_s for part, time_s in parts if part == "first")
        return hops_s, first_s / self.panels(phase, sizes)

    def begun_s(self, times: Sequence[PhaseTime], sizes: Sizes) -> float:
        """Seconds of the early work, beside which a whole gather's keys come. At most: the forward of the first row of
        panels over the own keys."""
        if not self.table.whole:
            return 0.0
        forward_s = math.fsum(phase.time_s for phase in times if phase.name == "forward product")
        return forward_s / self.table.world_size * min(sizes.panel_rows, self.rows) / self.rows

    def left_s(self, times: Sequence[PhaseTime], sizes: Sizes) -> float:
        """Seconds of the products behind which late sums go home: of the last row of panels that for the own keys, and
        dq."""
        of = {phase.name: phase.time_s for phase in times}
        own_s = of.get("dk product", 0.0) / self.table.world_size
        last_rows = self.rows - (-(-self.rows // sizes.panel_rows) - 1) * sizes.panel_rows
        return (own_s + of.get("dq product", 0.0)) * last_rows / self.rows

    def panels(self, phase: str, sizes: Sizes) -> int:
        """Number of panels of a hop in "forward" or "backward"."""
        if phase == "backward" and self.choice.strategy == "fused":
            return 1
        forward = phase == "forward"
        rows, keys = (sizes.forward_rows, sizes.forward_keys) if forward else (sizes.panel_rows, sizes.panel_keys)
        found = -(-self.rows // rows), -(-self.keys // keys)
        if self.choice.traits.triangle and self.choice.world_size == 1:  # panels on and above the diagonal
            return found[0] * (found[0] + 1) // 2
        return math.prod(found)

    def sent_bytes(self, name: str) -> int:
        """Bytes of the travelling tensor `name` of one rank's keys."""
        item = next(item for item in self.table.travelling if item.name == name)
        return (
            (1 if item.once else self.keys)
            * item.columns
            * memory.ELEMENT_BYTES[memory.dtype_of(self.choice, item.dtype)]
        )

    def transfer_bytes(self, sent: Transfer) -> int:
        return self.sent_bytes(sent.name) * (self.table.world_size if sent.of is None else 1)

    @functools.cached_property
    def _kind(self) -> _Expressions:
        return _expressions(self.choice.kind)

    @functools.cached_property
    def _travelling(self) -> list[tuple[Buffer, int]]:
        return memory.travelling_buffers(self.table, self.choice, self.keys)

    @property
    def product_kind(self) -> str:
        """The key of `DeviceProfile.matmul_tflops` whose peak bounds the products."""
        kind = self.choice.operand_dtype
        return FP32_MODES[self.choice.input_precision][0] if self._reduced else kind

    @property
    def _reduced(self) -> bool:
        unsplit = self.choice.operand_dtype == "fp32" and self.choice.strategy != "torch"
        return unsplit and self.profile.vendor == "nvidia"

    @functools.cached_property
    def _rates(self) -> dict[str, float]:
        """Peak FLOP/s by `TimeTerm.rate`."""
        choice, by_triton, by_library = self.choice, 1.0, 1.0
        if self._reduced:
            _, by_triton, by_library = FP32_MODES[choice.input_precision]
        product = by_triton * TRITON_PRODUCT_FRACTION if choice.product_by == "triton" else by_library
        peak = self.profile.matmul_tflops[self.product_kind]
        reached = VENDOR_FRACTION if peak.source.startswith("vendor") else 1.0
        return {"triton": peak.value * 1e12 * by_triton * reached, "product": peak.value * 1e12 * product * reached}

    @functools.cached_property
    def _sent(self) -> dict[str, list[tuple[int, Step, float, float, int]]]:
        """By phase, of each kind of step: their number, the step, seconds of its messages, and bytes. Before bytes:
        seconds until sums arrive that its work adds to. Empty on one device."""
        table, cluster = self.table, self.cluster
        node_gbs = cluster.node_link_gbs.value * min(1.0, cluster.links_per_node / cluster.devices_per_node)
        links = {
            "device": (cluster.link_gbs.value, cluster.latency_us.value),
            "node": (node_gbs, cluster.node_latency_us.value),  # all devices of a node send at once
        }
        found: dict[str, list[tuple[int, Step, float, float, int]]] = {}
        for phase in ("forward", "backward") if table.world_size > 1 else ():
            found[phase] = []
            for step, count in kinds(table, phase).items():
                elapsed_s, sums_s, total = 0.0, 0.0, 0
                for batch in table.batches(phase, step, self.sent_bytes):
                    elapsed_s += self.batch_s
                    together: Counter[tuple[str, str]] = Counter()  # bytes by role and level
                    for sent in batch:
                        key = table.role(sent.name, phase), table.level(sent.to)
                        together[key] += self.transfer_bytes(sent)
                    for (role, level), size in together.items():  # a device receives as many bytes as it sends
                        gbs, latency_us = links[level]
                        elapsed_s += size / (gbs * 1e9) + latency_us * 1e-6
                        total += size
                        if role == "summed" and step.sums_from == 0 and table.adds(step):  # its work waits for them
                            sums_s = elapsed_s
                found[phase].append((count, step, elapsed_s, sums_s, total))
        return found

    def _values(self, sizes: Sizes) -> tuple[int, ...]:
        choice, names = self.choice, ("forward", "gradient", "fused", "finish")
        forward, gradient, fused, finish = (choice.blocks.get(name, NO_BLOCK) for name in names)
        padded = -(-choice.inner_dim // forward.depth) * forward.depth
        if choice.strategy == "fused":
            padded = sum(embedding_parts(choice.dim))
        return (
            *(self.rows, self.keys, self.table.world_size, choice.dim, padded),
            *(memory.ELEMENT_BYTES[choice.dtype], memory.ELEMENT_BYTES[choice.statistics_dtype]),
            *(forward.rows, forward.keys, gradient.rows, gradient.keys, fused.rows, fused.keys, finish.rows),
            *(self.profile.multiprocessors, self.profile.library_workspace_bytes),
            *(sizes.forward_rows, sizes.forward_keys, sizes.panel_rows, sizes.panel_keys, sizes.stash_rows),
            TILES["forward"].strips(sizes.forward_rows, sizes.forward_keys, forward, choice),
            TILES["gradient"].strips(sizes.panel_rows, sizes.panel_keys, gradient, choice),
            self.negatives,
        )

    def _own(self, sizes: Sizes) -> Iterator[tuple[BufferTerm, tuple[int, list[int]]]]:
        """The buffers that do not travel, each with its bytes and its shape."""
        return zip(self._kind.buffers, self._kind.shapes(*self._values(sizes)), strict=True)

    def _phase(self, term: TimeTerm, quantities: Sequence[float]) -> PhaseTime:
        flops, moved, exponentials, efficiency, launches = quantities
        limits = {
            "product": flops / (self._rates[term.rate] * efficiency),
            "memory": moved / (self.profile.bandwidth_gbs.value * 1e9),
            "exponentials": exponentials / (self.profile.exp_gops.value * 1e9),
        }
        bound, work_s = max(limits.items(), key=lambda limit: limit[1])
        launch_s = launches * self.profile.launch_us.value * 1e-6
        bound = "launches" if launch_s > work_s else bound
        return PhaseTime(term.name, _rounded(work_s + launch_s), bound, flops, moved)

    def _exposed(self, kernels: Sequence[PhaseTime], sizes: Sizes) -> Iterator[PhaseTime]:
        """The communication of each phase that is not hidden beside work, which it slows down.

        Work waits for messages that take longer than it does, and for sums that take longer than the work before it
        adds to them (a panel's forward product; in backward its gradient and dq). Messages of an early step hide
        behind its early work, late ones behind what is left. A step without work waits for all.
        """
        left_s, begun_s = self.left_s(kernels, sizes), self.begun_s(kernels, sizes)
        for phase, steps in self._sent.items():
            hops_s, first_s = self.work_s(phase, kernels, sizes)
            exposed_s, sent = 0.0, 0
            for times, step, all_s, sums_s, size in steps:
                part = self.table.work(step)
                beside_s = left_s if step.late else begun_s if step.early else part * hops_s
                waited_s = max(0.0, sums_s - part * first_s, all_s - beside_s)
                exposed_s += times * (waited_s + (all_s - waited_s) * self.slowdown / (1 + self.slowdown))
                sent += times * size
            yield PhaseTime(f"{phase} communication", _rounded(exposed_s), "link", 0, sent)


def host_times(choice: Choice) -> tuple[float, float, float]:
    """Seconds of the host before a step's first kernel, in a whole step without its launches, and for each launch."""
    if choice.strategy == "torch":  # the device is the host itself; on a GPU the wait is neglected
        return 0.0, 0.0, 0.0
    if choice.replay:
        return REPLAY_START_S, REPLAY_STEP_S, 0.0
    return HOST_START_S + STASH_START_S * choice.stash, HOST_STEP_S, HOST_LAUNCH_S


@functools.lru_cache(maxsize=64)
def kinds(table: Table, phase: str) -> Mapping[Step, int]:
    """The number of steps of each kind (equal transfers over equal levels, and as much work). `sums_from` is relative:
    0 is the step."""
    counts: Counter[Step] = Counter()
    for number, step in enumerate(table.steps(phase)):
        over = ((sent, ACROSS[table.level(sent.to)]) for sent in step.sends)
        sends = tuple(sent._replace(of=sent.of and HERE, to=to, source=0, target=0) for sent, to in over)
        waits = [number - start if start >= 0 else -1 for start in (step.unchanged_from, step.sums_from)]
        owner = step.owner and (ACROSS["device"] if table.triangle and table.adds(step) else HERE)
        kind = Step(owner, sends=sends, unchanged_from=waits[0], sums_from=waits[1])
        counts[kind._replace(halved=step.halved, part=step.part, late=step.late, early=step.early)] += 1
    return counts


@functools.cache
def _expressions(choice: Choice) -> _Expressions:
    buffers, terms = memory.buffer_terms(choice), time_terms(choice)
    values = [(term.bytes, list(term.shape)) for term in buffers], [list(term.quantities) for term in terms]
    how = {"modules": [{"Min": min, "Max": max}, "math"], "printer": _PRINTER, "docstring_limit": 0}
    shapes, work = (sympy.lambdify(tuple(memory.SYMBOLS.values()), each, **how) for each in values)
    return _Expressions(buffers, terms, shapes, work)


class _Printer(PythonCodePrinter):
    """Prints each expression once: most of a kind are those of other kinds, too."""

    def __init__(self) -> None:
        super().__init__({"fully_qualified_modules": False, "user_functions": {"Min": "Min", "Max": "Max"}})
        self.doprint = functools.cache(super().doprint)


_PRINTER = _Printer()


def _rounded(time_s: float) -> float:
    return float(f"{time_s:.6g}")  # the last digit of a double differs between machines
