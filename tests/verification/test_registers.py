"""A uniform register that is read before anything wrote it is found in the machine code."""

from __future__ import annotations

import pytest

from infcl_gen.verification.registers import unwritten

# What ptxas 12.8 made of a loop over one key: the address of the second product's operand is in UR12, not in UR13.
LOST = """
        Function : fused_queries
        /*1a50*/                   USGXT.U32 UR12, UR4, 0xe ;                     /* 0x0000000e040c789a */
        /*1ea0*/                   USGXT.U32 UR24, UR4, 0xe ;
        /*1eb0*/                   UMOV UR26, UR12 ;
        /*1ec0*/                   UMOV UR27, 0x80000020 ;
        /*1ed0*/                   UMOV UR25, 0x80000020 ;
        /*1ef0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR24], R24 ;
        /*1f00*/                   UIADD3 UR8, UP0, {address}, 0x2, URZ ;
        /*1f80*/                   EXIT ;
"""
START = "        /*1a40*/                   ULDC UR4, c[0x0][0x210] ;\n"


@pytest.mark.parametrize(("address", "found"), [("UR13", ["UR13 is read at 0x1f00"]), ("UR12", [])])
def test_a_lost_address_is_found(address: str, found: list[str]) -> None:
    head, body = LOST.format(address=address).split("fused_queries\n")
    lines = unwritten(f"{head}fused_queries\n{START}{body}")
    assert [line.partition(",")[0] for line in lines] == found


def code(*lines: str) -> str:
    return "\n  Function : f\n" + "".join(f"  /*{16 * index:04x}*/  {line} ;\n" for index, line in enumerate(lines))


@pytest.mark.parametrize(
    "lines",
    [
        ("UMOV UR4, URZ", "UMOV UR5, URZ", "UIADD3.64 UR8, UR4, 0x2, URZ", "EXIT"),
        ("ULDC.64 UR18, c[0x0][0x208]", "LDG.E R22, desc[UR18][R22.64]", "EXIT"),
        ("R2UR UR6, R1", "R2UR UR7, R2", "HGMMA.64x64x16.F32.BF16 R88, R28, gdesc[UR4].tnspB, R88", "EXIT"),
        ("@P0 UMOV UR4, URZ", "UIADD3 UR5, UR4, 0x1, URZ", "EXIT"),  # on some way
        ("BRA 0x20", "EXIT", "UMOV UR4, URZ", "UIADD3 UR5, UR4, 0x1, URZ", "@P0 BRA 0x10", "EXIT"),
        ("@P0 BRA 0x20", "EXIT", "UMOV UR4, URZ", "@P1 BRA 0x10", "EXIT"),
        ("EXIT", "UIADD3 UR5, UR4, 0x1, URZ"),  # is never reached
    ],
)
def test_what_some_way_wrote_is_no_fault(lines: tuple[str, ...]) -> None:
    assert unwritten(code(*lines)) == []


@pytest.mark.parametrize(
    ("lines", "register"),
    [
        (("UMOV UR4, URZ", "UIADD3.64 UR8, UR4, 0x2, URZ", "EXIT"), 5),
        (("UMOV UR4, URZ", "STS [R1+UR5], R2", "EXIT"), 5),
        (
            (
                "ULDC.64 UR4, c[0x0][0x208]",
                "HGMMA.64x64x16.F32.BF16 R88, R28, gdesc[UR2], R88",
                "UMOV UR6, UR7",
                "EXIT",
            ),
            7,
        ),
        (("ULDC.64 UR4, c[0x0][0x208]", "ULDC UR6, c[0x0][0x210]", "HGMMA.64x128 R24, gdesc[UR4], R24", "EXIT"), 7),
        (("@P0 BRA 0x30", "UMOV UR4, URZ", "EXIT", "UIADD3 UR5, UR4, 0x1, URZ", "EXIT"), 4),  # on another way
        (("UIADD3 UR4, UR4, 0x1, URZ", "EXIT"), 4),
    ],
)
def test_what_no_way_wrote_is_found(lines: tuple[str, ...], register: int) -> None:
    found = unwritten(code(*lines))
    assert len(found) == 1 and found[0].startswith(f"UR{register} is read at ")
