"""Does a compiled kernel overwrite shared memory that an asynchronous product of another warp group still reads?

On sm_90 a warp group waits for its own products (wgmma) only. Triton up to 3.8 takes a product's reads for done at the
first barrier behind the product's *issue* (triton issue 11047). So in a block of more than one warp group a buffer may
be refilled between one group's wait and another's, unless a barrier happens to lie behind the wait.

The PTX is run here as far as addresses and branches need it, for two threads of each warp group, with sizes that give a
few trips of each loop. That yields each thread's reads by products, writes to shared memory, and barriers.

Only the warps of the first role are followed. Where warps have roles of their own (`warp_specialize`), a buffer is
released through an mbarrier that counts the arrival of every reader: the kernel itself orders it, and not Triton.
"""

from __future__ import annotations

import itertools
import operator
import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

WARP_GROUP = 128  # threads
SIZE = 1024  # of every 32-bit argument: rows, keys, strides; also a limit for branches on what memory holds
LONGEST_RUN = 1_000_000  # instructions that addresses and branches depend on; kernels end after 100 000 at most
_WRITES = re.compile(r"cp\.async\.c[ag]\.shared|cp\.async\.bulk\S*\.shared::c\w+\.global|st\.\S*shared|stmatrix")
_EVENTS = ("bra", "ret", "bar", "barrier", "wgmma")
_REGISTER = re.compile(r"%\w+(?:\.\w+)?")

Values = dict[str, int | None]  # of registers; None: unknown


class Moment(NamedTuple):
    """When a thread did something: barriers passed before, and instructions."""

    barriers: int
    instructions: int


@dataclass
class Read:
    """What one wgmma instruction reads: byte ranges; `done`: when this thread's wait for it returned."""

    ranges: tuple[tuple[int, int], ...]
    issued: Moment
    line: int
    done: Moment | None = None


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
    guesses: int = 0  # branches on what is unknown


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
        """The registers that decide what it does; of products the matrix descriptors, of writes the address."""
        if self.name.startswith("wgmma.mma"):
            return [part for part in self.operands[1:3] if part.startswith("%rd")]
        parts = self.operands[:1] if self.is_event else self.operands[1:]
        return _REGISTER.findall(" ".join((*parts, self.predicate)))


def races(ptx: str, warps: int) -> list[str]:
    """One line for each write that may hit what a product of another warp group, or of its own, still reads."""
    groups = warps * 32 // WARP_GROUP
    if "wgmma.mma_async" not in ptx or groups < 2:
        return []
    code, labels = _parsed(ptx)
    found = set()
    ends = [first + lane for first in range(0, 32 * warps, WARP_GROUP) for lane in (0, WARP_GROUP - 1)]
    for taken in (False, True):  # branches on what memory holds
        threads = [_run(code, labels, thread, 32 * warps, taken) for thread in ends]
        for writer, reader in itertools.product(threads, repeat=2):
            found |= {(write.line, read.line) for write, read in _conflicts(writer, reader)}
        if not any(thread.guesses for thread in threads):
            break
    words = "PTX line {} overwrites what the product of line {} may still read"
    return [words.format(*lines) for lines in sorted(found)]


def _conflicts(writer: Thread, reader: Thread) -> Iterator[tuple[Write, Read]]:
    """Two threads meet at barriers only: a read is over if its wait came before a barrier before the write."""

    def over(read: Read, at: Moment) -> bool:
        if read.done is None:
            return False
        return read.done < at if writer is reader else read.done.barriers < at.barriers

    first = 0
    for write in writer.writes:
        while first < len(reader.reads) and over(reader.reads[first], write.at):
            first += 1
        for read in reader.reads[first:]:
            if read.issued > write.at:
                break
            meet = any(start < write.stop and write.start < stop for start, stop in read.ranges)
            if meet and not over(read, write.at):
                yield write, read


def _parsed(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions that events depend on, and where labels point to among them."""
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
    lines = [item.line for item in code]
    return code, {label: bisect(lines, line) for label, line in labels.items()}


def _run(code: list[Instruction], labels: dict[str, int], thread: int, threads: int, taken: bool) -> Thread:
    """Run one thread. What is loaded or floating point is unknown; branches on that go as `taken` says."""
    did = Thread()
    values: Values = {"%tid.x": thread, "%ntid.x": threads, "%laneid": thread % 32, "%nctaid.x": 8}
    values |= {"%ctaid.x": 0, "%ctaid.y": 0, "%ctaid.z": 0, "%nctaid.y": 1, "%nctaid.z": 1}
    steps = [(item, _step(item)) for item in code]
    groups: list[list[Read]] = [[]]  # reads by commit group; the last is not committed
    barriers = place = 0
    for count in range(LONGEST_RUN):
        if place >= len(steps):
            break
        item, step = steps[place]
        place += 1
        if item.predicate:
            holds = _value(item.predicate.lstrip("!"), values)
            if holds is None and item.name.startswith("bra"):
                did.guesses += 1
                holds = int(taken == (did.guesses < SIZE))  # no loop goes on for ever
            elif item.predicate.startswith("!") and holds is not None:
                holds = 1 - holds
            if holds == 0:
                continue
        now = Moment(barriers, count)
        if step is not None:
            for output in item.outputs[1:]:
                values[output] = None
            values[item.outputs[0]] = step(values)
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
            pending = int(item.operands[0]) + 1
            for read in (read for group in groups[:-pending] for read in group):
                read.done = now
            groups = groups[-pending:]
        elif not item.name.startswith("wgmma"):
            parts = [_value(part, values) for part in re.split(r"[\[\]+\s]+", item.operands[0]) if part]
            if None in parts:
                raise ValueError(f"line {item.line}: the address of a write to shared memory is unknown")
            start = sum(part or 0 for part in parts)
            did.writes.append(Write(start, start + _bytes(item), now, item.line))
    did.writes = _sized(did.writes)
    return did


def _bytes(item: Instruction) -> int:
    """How much one thread writes; 0 for a whole tile."""
    if "bulk" in item.name:
        return 0
    if item.name.startswith("cp"):
        return int(item.operands[2], 0)
    stored = re.fullmatch(r"st\.\S*shared\S*?(?:\.v(\d))?\.[busf](\d+)", item.name)
    return int(stored[1] or 1) * int(stored[2]) // 8 if stored else 16


def _sized(writes: list[Write]) -> list[Write]:
    """Tiles reach up to the next one, or as far as those that one instruction writes are apart, if that is less."""
    tiles = [write for write in writes if write.start == write.stop]
    every = sorted({tile.start for tile in tiles})
    sizes = {start: after - start for start, after in itertools.pairwise(every)}
    for line in {tile.line for tile in tiles}:
        starts = sorted({tile.start for tile in tiles if tile.line == line})
        apart = min((after - start for start, after in itertools.pairwise(starts)), default=0)
        sizes |= {start: min(sizes.get(start, apart), apart) for start in starts if apart}
    whole = {tile: tile._replace(stop=tile.start + sizes.get(tile.start, 16)) for tile in tiles}
    return [whole.get(write, write) for write in writes]


def _ranges(item: Instruction, values: Values) -> tuple[tuple[int, int], ...]:
    """The bytes that a product reads, from its descriptors (PTX ISA: "Matrix Descriptor"); B's is the last."""
    columns = int(item.name.split(".m64n")[1].split("k")[0])
    transposed = [part == "1" for part in item.operands[3:] if part in ("0", "1")][2:] or [False]  # after two signs
    found: list[tuple[int, int]] = []
    for register, rows, across in zip(item.inputs[::-1], (columns, 64), transposed[::-1] * 2, strict=False):
        descriptor = values[register]
        if descriptor is None:
            raise ValueError(f"line {item.line}: the address of a product's operand is unknown")
        start, lead, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        swizzle = {0: 16, 1: 128, 2: 64, 3: 32}[descriptor >> 62 & 3]  # bytes of a row of its blocks of 8 rows
        start -= start % swizzle
        if across:  # rows lie along memory's rows: blocks side by side, two above one another
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
    "shr": lambda a, b: a >> min(b, 64),
    "div": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0,
    "rem": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1) if b else 0,
    "mad": lambda a, b, c: a * b + c,
    "bfe": lambda a, start, count: a >> start & (1 << count) - 1,
    **dict.fromkeys(("mov", "cvt", "cvta", "shfl"), lambda a, *_: a),  # a warp's lanes agree on what is shuffled
}


def _step(item: Instruction) -> Callable[[Values], int | None] | None:
    """What an instruction gives, of the values of registers; None for events. What is no integer is unknown."""
    if item.is_event:
        return None
    name, *kinds = item.name.split(".")
    kind = re.fullmatch(r"([bsu])(\d+)|pred", kinds[-1])
    if name == "elect":
        return lambda values: int(values["%laneid"] == 0)
    if name == "ld" and "param" in kinds:  # 64 bits: places; that they are alike lets their differences vanish
        return lambda values: SIZE if kinds[-1].endswith("32") else 1 << 40
    compute = _ARITHMETIC.get(kinds[0] if name == "setp" else name)
    if kind is None or (compute is None and name != "selp") or "{" in item.operands[0]:
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
        if name == "selp":
            chosen = _value(item.operands[3], values)
            return None if chosen is None else number(item.operands[2 - chosen], values)
        inputs = [number(operand, values) for operand in item.operands[1:]]
        if name == "and" and 0 in inputs:
            return 0
        if compute is None or None in inputs:
            return None
        return int(compute(*inputs)) % (1 << target)

    return step
