"""Text from users and for users: sizes, counts, small files, and messages of one line that name the flag."""

import difflib
import math
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from infcl_gen.errors import InputError

_MAX_TEXT = 1024
_MAX_FILE_BYTES = 2**20
_UNITS = "B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
LEAST_WEIGHT = 1e-6  # of a prefix, and the inverse of the largest
MOST_PREFIXES = 8


def check_text(flag: str, value: object) -> str:
    """`value` if it is a printable, non-empty text of at most 1024 characters; else raises InputError.

    Control characters and invisible direction marks are refused: messages and packages repeat the text.
    """
    if not isinstance(value, str):
        raise InputError(f"{flag}: expected text, got {show(value)}")
    if not value or len(value) > _MAX_TEXT or not value.isprintable():
        raise InputError(f"{flag}: {show(value)} is empty, longer than {_MAX_TEXT}, or has unprintable characters")
    return value


def check_integer(flag: str, value: object, low: int, high: int) -> int:
    """`value` if it is an integer from `low` to `high`; else raises InputError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{flag}: expected an integer from {low} to {high}, got {show(value)}")
    if not low <= value <= high:
        raise InputError(f"{flag}: {show(value)} is out of range; valid: {low} to {high}")
    return value


def check_word(flag: str, value: object, valid: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in valid:
        raise InputError(f"{flag}: {show(value)} is unknown; valid: {', '.join(valid)}")


def check_keys(flag: str, table: Mapping[Any, Any], known: Collection[str], where: str, prefix: str = "") -> None:
    """Raises InputError for an unknown key. Where `known` is a mapping, its values are the keys of nested tables."""
    for key, value in table.items():
        path = prefix + (key if isinstance(key, str) else show(key))
        if key not in known:
            near = "" if prefix else suggestion(key, known)
            raise InputError(f"{flag}: unknown key {show(path)} in {where}{near}")
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            check_keys(flag, value, known[key], where, f"{path}.")


def parse_count(value: object, flag: str = "count") -> int:
    """The integer that 65536, "65536", "64k" or "4M" (k = 1024) stands for. Raises InputError naming `flag`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"([0-9]{1,15})([kKmMgG]?)", value) if isinstance(value, str) else None
    if match is None:
        raise InputError(f"{flag}: {show(value)} is not a count; give for example 8, 64k or 4M (k = 1024)")
    return int(match[1]) << 10 * (" kmg".index(match[2].lower() or " "))


def parse_bytes(value: object, flag: str = "size") -> int:
    """The bytes that 512, "512MiB", "1.5GiB" or "1GB" (10**9) stands for. Raises InputError naming `flag`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    form = r"([0-9]{1,15})(?:\.([0-9]{1,6}))? ?(?:([kmgt])(i?)b|b)?"
    match = re.fullmatch(form, value, re.ASCII | re.IGNORECASE) if isinstance(value, str) else None
    if match is None:
        raise InputError(f"{flag}: {show(value)} is not a size; give a number and {_UNITS}, for example 512MiB")
    whole, fraction, letter, binary = match.groups(default="")
    if fraction and not letter:
        raise InputError(f"{flag}: {show(value)} is a fraction of a byte; give a unit, for example 1.5GiB")
    factor: int = (1024 if binary else 1000) ** " kmgt".index(letter.lower() or " ")
    return int(whole + fraction) * factor // int(10 ** len(fraction))


def parse_prefixes(value: object, flag: str = "--prefixes") -> tuple[tuple[int, float], ...]:
    """Pairs of columns and weight that "96,192:0.5,384", [96, 192], {96: 0.5} or pairs stand for; a weight is 1 unless
    given. None and () stand for none. Raises InputError naming `flag`."""
    if value is None:
        return ()
    if isinstance(value, str):
        if re.search(r"\w\s+\w", value):
            raise InputError(f"{flag}: {show(value)}: counts are separated by commas; give for example 96,192,384,768")
        words = [[word.strip() for word in each.split(":")] for each in value.split(",")]
        value = [each if len(each) > 1 else each[0] for each in words]
    if isinstance(value, Mapping):
        value = list(value.items())
    if not isinstance(value, list | tuple) or value == []:
        raise InputError(f"{flag}: {show(value)} are no counts of columns; give for example 96,192,384,768")
    found = []
    for each in value:
        count, weight = each if isinstance(each, list | tuple) and len(each) == 2 else (each, 1.0)
        try:
            number = float(weight)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(weight, bool) or not LEAST_WEIGHT <= number <= 1 / LEAST_WEIGHT:
            raise InputError(f"{flag}: the weight {show(weight)} is no number from 1e-6 to 1e6")
        found.append((check_integer(flag, parse_count(count, flag), 1, 1 << 16), number))
    counts = [count for count, _ in found]
    if sorted(set(counts)) != counts:
        raise InputError(f"{flag}: {', '.join(map(str, counts))} do not grow; give each once, the shortest first")
    if len(counts) > MOST_PREFIXES:
        raise InputError(f"{flag}: {len(counts)} of them; kernels hold the gradients of at most {MOST_PREFIXES}")
    return tuple(found)


def prefixes_text(prefixes: Iterable[tuple[int, float]], renormalised: bool = False) -> str:
    """The prefixes as `parse_prefixes` reads them; for people those of cosines."""
    return "cosines of " * renormalised + ",".join(
        f"{count}" if weight == 1 else f"{count}:{weight!r}" for count, weight in prefixes
    )


def bytes_text(size: int) -> str:
    """A size for people: "512 B", "1.5 GiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{math.ceil(10 * size / factor) / 10:g} {unit}"  # rounded up, to be enough as a budget
    return f"{size} B"


def time_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.0f} s" if seconds >= 1000 else f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def count_text(value: float) -> str:
    for power, unit in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {unit}"
    return f"{value:.3g} "


def table_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, indented by two. Line breaks in cells are escaped."""
    lines = [[clean(str(cell)) for cell in row] for row in ([header] if header else []) + list(rows)]
    if not lines:
        return "  (none)"
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def read_toml(flag: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """The table in a regular TOML file of at most 1 MiB. Raises InputError naming `flag`.

    Devices and pipes are refused: reading them would block.
    """
    import msgspec

    name = show(check_text(flag, os.fspath(path)))
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError(f"{flag}: {name} is not a regular file")
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise InputError(f"{flag}: {name} is larger than {_MAX_FILE_BYTES} bytes")
        return msgspec.toml.decode(data.decode(), type=dict[str, Any])
    except OSError as error:
        raise InputError(f"{flag}: cannot read {name}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{flag}: {name} is not UTF-8 text (byte {error.start})") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{flag}: {name} is not valid TOML: {error}") from None


def flag_name(name: str) -> str:
    """The flag of a field, for messages: "batch_size" -> "--batch-size"."""
    return "--" + clean(name.removesuffix("_bytes")).replace("_", "-")


def show(value: object) -> str:
    """The repr of `value` for a message: one printable line of at most 120 characters."""
    try:
        text = clean(repr(value))
    except ValueError:  # an integer of more digits than Python prints
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 120 else text[:80] + "..." + text[-30:]


def clean(text: str) -> str:
    """`text` with everything unprintable escaped: one line, safe to write to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(error: BaseException) -> str:
    """The message of an error on one line, of at most 300 characters; its type where it has no message."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def suggestion(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known name nearest to it but for case, or all of them."""
    known = list(known)
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name[:64].lower() if isinstance(name, str) else "", by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else f"; valid: {', '.join(known)}"
