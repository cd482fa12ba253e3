"""Does a compiled kernel overwrite shared memory that an asynchronous product of another warp group still reads?

On sm_90 a warp group waits only for its own products (wgmma). Triton up to 3.8 treats a product's reads as finished at
the first barrier after the product is *issued* (triton issue 11047). With several warp groups, one may then refill a
buffer that another still reads, unless a barrier happens to follow the wait.

The check runs the part of the PTX that decides addresses and branches, for two threads of each warp group, with sizes
that give a few trips of each loop. Each run yields a thread's reads by products, writes to shared memory, and barriers.

Only the warps of the first role are followed. Kernels with `warp_specialize` release a buffer through an mbarrier that
counts the arrival of every reader, so the kernel orders it and not Triton.
"""

import itertools
import math
import operator
import re
from bisect import bisect, bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

WARP_GROUP = 128  # threads
SIZE = 1024  # of every 32-bit argument: rows, keys, strides; also the limit of branches on loaded values
LONGEST_RUN = 1_000_000  # instructions; kernels end after at most 100 000
_WRITES = re.compile(r"cp\.async\.c[ag]\.shared|cp\.async\.bulk\S*\.shared::c\w+\.global|st\.\S*shared|stmatrix")
_EVENTS = ("bra", "ret", "bar", "barrier", "wgmma")
_REGISTER = re.compile(r"%\w+(?:\.\w+)?")

Values = dict[str, int | None]  # of registers; None: unknown
Moment = tuple[float, float]  # of one thread: barriers passed, instructions run


@dataclass
class Read:
    """One wgmma instruction: the byte ranges it reads, and when this thread's wait for it returned."""

    ranges: tuple[tuple[int, int], ...]
    issued: Moment
    line: int
    done: Moment = (math.inf, math.inf)


class Write(NamedTuple):
    start: int
    stop: int
    at: Moment
    line: int


@dataclass
class Thread:
    """What one thread did to shared memory, in order."""

    reads: list[Read] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    guesses: int = 0  # branches on unknown values


@dataclass(frozen=True)
class Instruction:
    line: int
    predicate: str  # "", "%p1" or "!%p1"
    name: str
    operands: tuple[str, ...]

    @property
    def is_event(self) -> bool:
        return self.name.split(".")[0] in _EVENTS or _WRITES.match(self.name) is not None

    @property
    def outputs(self) -> list[str]:
        known = not self.is_event and self.operands and not self.name.startswith(("st.", "cp.", "mbarrier", "red"))
        return _REGISTER.findall(self.operands[0]) if known else []

    @property
    def inputs(self) -> list[str]:
        """The registers that decide its effect: the matrix descriptors of a product, the address of a write."""
        if self.name.startswith("wgmma.mma"):
            return [part for part in self.operands[1:3] if part.startswith("%rd")]
        parts = self.operands[:1] if self.is_event else self.operands[1:]
        return _REGISTER.findall(" ".join((*parts, self.predicate)))


def races(ptx: str, warps: int) -> list[str]:
    """One line of text for each write that may hit data which a product of any warp group still reads.

    Raises ValueError if the address of a write or of a product's operand is unknown, or a thread does not end.
    """
    threads = 32 * warps
    if "wgmma.mma_async" not in ptx or threads < 2 * WARP_GROUP:
        return []
    code, labels = _parsed(ptx)
    found: set[tuple[int, int]] = set()
    ends = [first + lane for first in range(0, threads, WARP_GROUP) for lane in (0, WARP_GROUP - 1)]
    for taken in (False, True):  # branches on loaded values
        ran = [_run(code, labels, thread, threads, taken) for thread in ends]
        for writer, reader in itertools.product(ran, repeat=2):
            found.update(_conflicts(writer, reader))
        if not any(thread.guesses for thread in ran):
            break
    words = "PTX line {} overwrites what the product of line {} may still read"
    return [words.format(*lines) for lines in sorted(found)]


def _conflicts(writer: Thread, reader: Thread) -> Iterator[tuple[int, int]]:
    """The lines of each write and of each read that was issued and may not be over by then.

    A thread knows that its own reads are over once it has waited. Other threads know at the next barrier.
    Reads are issued, and waited for, in order.
    """
    known = 2 if writer is reader else 1
    for write in writer.writes:
        over = bisect_left(reader.reads, write.at[:known], key=lambda read: read.done[:known])
        issued = bisect(reader.reads, write.at, key=lambda read: read.issued)
        for read in reader.reads[over:issued]:
            if any(start < write.stop and write.start < stop for start, stop in read.ranges):
                yield write.line, read.line


def _parsed(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions that events depend on, and the place of each label among them."""
    every: list[Instruction] = []
    labels: dict[str, int] = {}
    makers: dict[str, list[Instruction]] = defaultdict(list)  # of each register
    for number, line in enumerate(ptx.splitlines(), 1):
        text = line.split("//")[0].strip()
        if re.fullmatch(r"\$[\w$]+:", text):
            labels[text[:-1]] = number
        elif found := re.fullmatch(r"(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*);", text):
            parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]])+", found[3])
            item = Instruction(number, found[1] or "", found[2], tuple(part.strip() for part in parts))
            every.append(item)
            for output in item.outputs:
                makers[output].append(item)
    needed: set[Instruction] = set()
    waiting = [item for item in every if item.is_event]
    while waiting:
        item = waiting.pop()
        if item not in needed:
            needed.add(item)
            waiting += [maker for register in item.inputs for maker in makers[register]]
    code = [item for item in every if item in needed]
    return code, {label: bisect(code, line, key=lambda item: item.line) for label, line in labels.items()}


def _run(code: list[Instruction], labels: dict[str, int], thread: int, threads: int, taken: bool) -> Thread:
    """Run one thread. Loaded and floating-point values are unknown; branches on them go as `taken` says."""
    did = Thread()
    values: Values = {"%tid.x": thread, "%ntid.x": threads, "%laneid": thread % 32, "%nctaid.x": 8}
    values |= {"%ctaid.x": 0, "%ctaid.y": 0, "%ctaid.z": 0, "%nctaid.y": 1, "%nctaid.z": 1}
    steps = [(item, _step(item)) for item in code]
    groups: list[list[Read]] = [[]]  # reads by commit group; the last group is open
    barriers = place = 0
    for count in itertools.count():
        if place >= len(steps):
            break
        if count == LONGEST_RUN:
            raise ValueError(f"thread {thread} has not ended after {count} instructions; races are unknown")
        item, step = steps[place]
        place += 1
        if item.predicate:
            holds = _value(item.predicate.lstrip("!"), values)
            skipped = holds == item.predicate.startswith("!")
            if holds is None and item.name.startswith("bra"):
                did.guesses += 1
                skipped = taken != (did.guesses < SIZE)  # every loop ends
            if skipped:
                continue
        now = (barriers, count)
        if step is not None:
            values |= dict.fromkeys(item.outputs) | {item.outputs[0]: step(values)}
        elif item.name.startswith("bra"):
            place = labels[item.operands[0]]
        elif item.name.startswith("ret"):
            break
        elif item.name.startswith("bar"):
            barriers += len(item.operands) == 1 or _value(item.operands[1], values) == threads
        elif item.name.startswith("wgmma.mma"):
            did.reads.append(Read(_ranges(item, values), now, item.line))
            groups[-1].append(did.reads[-1])
        elif item.name.startswith("wgmma.commit"):
            groups.append([])
        elif item.name.startswith("wgmma.wait"):
            kept = int(item.operands[0]) + 1
            for read in itertools.chain(*groups[:-kept]):
                read.done = now
            groups = groups[-kept:]
        elif not item.name.startswith("wgmma"):
            parts = [_value(part, values) for part in re.split(r"[\[\]+\s]+", item.operands[0]) if part]
            if None in parts:
                raise ValueError(f"line {item.line}: the address of a write to shared memory is unknown")
            start = sum(part or 0 for part in parts)
            did.writes.append(Write(start, start + _bytes(item), now, item.line))
    did.writes = _sized(did.writes)
    return did


def _bytes(item: Instruction) -> int:
    """How many bytes one thread writes; 0 for a whole tile."""
    if "bulk" in item.name:
        return 0
    if item.name.startswith("cp"):
        return int(item.operands[2], 0)
    stored = re.fullmatch(r"st\.\S*shared\S*?(?:\.v(\d))?\.[busf](\d+)", item.name)
    return int(stored[1] or 1) * int(stored[2]) // 8 if stored else 16


def _sized(writes: list[Write]) -> list[Write]:
    """A tile ends where the next begins, or after the least distance between tiles of one instruction if less."""
    tiles = [write for write in writes if write.start == write.stop]
    every = sorted({tile.start for tile in tiles})
    sizes = {start: after - start for start, after in itertools.pairwise(every)}
    for line in {tile.line for tile in tiles}:
        starts = sorted({tile.start for tile in tiles if tile.line == line})
        if len(starts) > 1:
            apart = min(after - start for start, after in itertools.pairwise(starts))
            sizes |= {start: min(sizes.get(start, apart), apart) for start in starts}
    ends = {start: start + sizes.get(start, 16) for start in every}
    return [write._replace(stop=ends[write.start]) if write.start == write.stop else write for write in writes]


def _ranges(item: Instruction, values: Values) -> tuple[tuple[int, int], ...]:
    """The bytes that a product reads, by its descriptors, B's last (PTX ISA: "Matrix Descriptor")."""
    columns = int(item.name.split(".m64n")[1].split("k")[0])
    transposed = [part == "1" for part in item.operands[3:] if part in ("0", "1")][2:] or [False]  # after two signs
    found: list[tuple[int, int]] = []
    for register, rows, across in zip(item.inputs[::-1], (columns, 64), transposed[::-1] * 2, strict=False):
        descriptor = values[register]
        if descriptor is None:
            raise ValueError(f"line {item.line}: the address of a product's operand is unknown")
        start, lead, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        swizzle = {0: 16, 1: 128, 2: 64, 3: 32}[descriptor >> 62 & 3]  # bytes of a row; blocks have 8 rows
        start -= start % swizzle
        if across:  # rows lie along memory's rows: blocks lie side by side, in pairs
            starts = [start + lead * n + stride * m for n in range(max(1, 2 * rows // swizzle)) for m in (0, 1)]
        else:
            starts = [start + stride * block for block in range(rows // 8)]
        found += [(first, first + 8 * swizzle) for first in starts]
    return tuple(found)


def _value(operand: str, values: Values) -> int | None:
    if operand.startswith("%"):
        return values.get(operand)
    if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+U?", operand):
        return int(operand.rstrip("U"), 0)
    return 0 if operand == "global_smem" else None


_ARITHMETIC: dict[str, Callable[..., int]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "xor", "neg")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{"and": operator.and_, "or": operator.or_, "not": operator.invert, "min": min, "max": max},
    "shl": lambda a, b: a << min(b, 64),
    "shr": operator.rshift,
    "div": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0,
    "rem": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1) if b else 0,
    "mad": lambda a, b, c: a * b + c,
    "selp": lambda a, b, chosen: a if chosen else b,
    "bfe": lambda a, start, count: a >> start & (1 << count) - 1,
    **dict.fromkeys(("mov", "cvt", "cvta", "shfl"), lambda a, *_: a),  # lanes of a warp agree on shuffled values
}


def _step(item: Instruction) -> Callable[[Values], int | None] | None:
    """The function from registers' values to the result of an instruction; None for events. Floats are unknown."""
    if item.is_event:
        return None
    name, *kinds = item.name.split(".")
    kind = re.fullmatch(r"([bsu])(\d+)|pred", kinds[-1])
    if name == "elect":
        return lambda values: int(values["%laneid"] == 0)
    if name == "ld" and "param" in kinds:  # pointers are equal, so that their differences vanish
        return lambda values: SIZE if kinds[-1].endswith("32") else 1 << 40
    compute = _ARITHMETIC.get(kinds[0] if name == "setp" else name)
    if kind is None or compute is None or "{" in item.operands[0]:
        return lambda values: None
    bits, signed = int(kind[2] or 1), kind[1] == "s"
    target = 1 if name == "setp" else 2 * bits if "wide" in kinds else bits
    if name == "cvt":
        target = int(re.sub(r"\D", "", kinds[-2]) or 0)

    def number(operand: str, values: Values) -> int | None:
        if operand.startswith("{"):
            low, *_, high = (_value(part.strip(), values) for part in operand.strip("{}").split(","))
            return None if low is None or high is None else high << bits // 2 | low
        value = _value(operand, values)
        if value is None:
            return None
        value %= 1 << bits
        return value - (1 << bits) if signed and value >> (bits - 1) else value

    def step(values: Values) -> int | None:
        inputs = [number(operand, values) for operand in item.operands[1:]]
        if name == "selp" and inputs[2] is not None:
            return inputs[1 - inputs[2]]
        if name == "and" and 0 in inputs:
            return 0
        return None if None in inputs else int(compute(*inputs)) % (1 << target)

    return step
