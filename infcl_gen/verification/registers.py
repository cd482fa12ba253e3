"""Does a compiled kernel read a uniform register that nothing wrote?

ptxas 12.8, of Triton 3.6 and 3.7, may lose a register that holds the address of a wgmma operand. Seen in straight-line
code, where a loop over one key was a constant single trip: a product then read shared memory at a stray address.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"0x([0-9a-f]+)$")
_UNIFORM = re.compile(r"UR(\d+)")
_JUMPS = ("BRA", "CALL", "BSSY", "JMP")  # name a place in the code
_ENDS = ("EXIT", "RET", "BRA", "JMP")  # unless predicated, nothing follows them


class _Instruction(NamedTuple):
    address: int
    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    target: int | None
    falls_through: bool


def unwritten(sass: str) -> list[str]:
    """One line of text for each instruction of sm_90 code (`cuobjdump -sass`) that reads such a register."""
    found: list[str] = []
    for function in re.split(r"\n\s*Function : ", sass)[1:]:
        code = [_parsed(match) for match in map(_LINE.match, function.splitlines()) if match]
        written = _written_before(code)
        for each in code:
            lost = sorted(each.reads - written[each.address]) if each.address in written else []
            found += [f"UR{number} is read at {each.address:#x}, unwritten: {each.text}" for number in lost]
    return found


def _parsed(match: re.Match[str]) -> _Instruction:
    address, predicate, name, text = match.groups()
    operands = [each.strip() for each in text.split(",")]
    output = next((each for each in operands if not re.fullmatch(r"U?P[T\d]", each)), "")
    own = _UNIFORM.fullmatch(output)
    writes = range(0)
    if own and name.startswith(("U", "R2U", "S2U", "CS2U", "LDCU", "REDUX", "VOTEU")):
        writes = range(int(own[1]), int(own[1]) + (2 if re.search(r"\.64|WIDE", name) else 4 if ".128" in name else 1))
    place = _TARGET.search(operands[-1]) if name.split(".")[0] in _JUMPS else None
    return _Instruction(
        int(address, 16), f"{name} {text}", frozenset(_read(name, operands, output if writes else "")),
        frozenset(writes), int(place[1], 16) if place else None,
        bool(predicate) or name.split(".")[0] not in _ENDS,
    )  # fmt: skip


def _read(name: str, operands: list[str], output: str) -> Iterator[int]:
    """Registers whose number an operand gives. A product reads two descriptors, or B's alone if A is in registers."""
    for place, operand in enumerate(operands):
        if output and operand == output:
            output = ""
            continue
        for number in map(int, _UNIFORM.findall(operand)):
            if "gdesc" in operand:
                yield from range(number if place == 1 else number + 2, number + 4)
            else:
                wide = "desc" in operand or (name.startswith("U") and ".64" in name)
                yield from range(number, number + 1 + wide)


def _written_before(code: list[_Instruction]) -> dict[int, frozenset[int]]:
    """By address: the registers that some way from the start writes before that instruction."""
    places = {each.address: index for index, each in enumerate(code)}
    before: dict[int, frozenset[int]] = {code[0].address: frozenset()} if code else {}
    waiting = [0] if code else []
    while waiting:
        index = waiting.pop()
        each = code[index]
        after = before[each.address] | each.writes
        following = [index + 1] if each.falls_through and index + 1 < len(code) else []
        following += [places[each.target]] if each.target in places else []
        for other in following:
            address = code[other].address
            if address not in before or not after <= before[address]:
                before[address] = before.get(address, frozenset()) | after
                waiting.append(other)
    return before
