"""What `--set` decides instead of the planner, typed: text is read here, and only here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from infcl_gen.errors import InputError
from infcl_gen.inputs.text import check_word, parse_count, show, suggestion

LARGEST_COUNT = 2**40
KERNELS = ("forward", "gradient", "product", "fused", "positive", "finish")
BLOCK_FIELDS = ("rows", "keys", "depth", "warps", "stages")

# The words that are valid; "on" and "off" are True and False. Every other key is a count.
_SWITCH = ("on", "off")
_WORDS = {
    "strategy": ("panel", "fused", "stash", "torch"),
    "products": ("library", "triton"),
    "descriptors": _SWITCH,
    "replay": _SWITCH,
    "transport": ("ring", "gather"),
    "keeps": _SWITCH,
    "records": ("off", "measured"),
}
_COUNTS = ("panel_rows", "panel_keys", "stash_rows")


@dataclasses.dataclass(frozen=True)
class Overrides:
    """None, or a kernel that is not among `blocks`: the planner decides.

    keeps    whether a ring keeps the keys that visit last in forward for backward.
    records  "off": no tuning record is looked up; "measured": `products`, panels and blocks are a record's.
    blocks   (kernel, field, count), sorted: `--set <kernel>.<field>=count`.
    """

    strategy: str | None = None
    products: str | None = None
    descriptors: bool | None = None
    replay: bool | None = None
    transport: str | None = None
    keeps: bool | None = None
    records: str | None = None
    panel_rows: int | None = None
    panel_keys: int | None = None
    stash_rows: int | None = None
    blocks: tuple[tuple[str, str, int], ...] = ()

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """As pairs of text, sorted by key: what SPEC and tuning records hold."""
        given = {name: getattr(self, name) for name in (*_WORDS, *_COUNTS)}
        given |= {f"{kernel}.{field}": count for kernel, field, count in self.blocks}
        words = {True: "on", False: "off"}
        return tuple(
            (key, words[value] if isinstance(value, bool) else str(value))
            for key, value in sorted(given.items())
            if value is not None
        )

    @property
    def keys(self) -> frozenset[str]:
        """The keys that were given."""
        return frozenset(key for key, _ in self.pairs)

    def block(self, kernel: str) -> dict[str, int]:
        """The fields of a kernel's block that were given."""
        return {field: count for name, field, count in self.blocks if name == kernel}


def parse_overrides(value: object) -> Overrides:
    """From a mapping, from "key=value" strings or pairs, or from `Overrides`. Counts may be "64k" (k = 1024).

    Raises InputError naming the key that is unknown, given twice, or has an illegal value.
    """
    if isinstance(value, Overrides):
        return value
    if isinstance(value, Mapping):
        value = list(value.items())
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise InputError(f"--set: {show(value)} is not a list of key=value")
    found: dict[str, Any] = {}
    for key, word in map(_pair, value):
        kernel, _, field = key.partition(".")
        if key in found:
            raise InputError(f"--set: {show(key)} is given twice")
        if key in _WORDS:
            check_word(f"--set {key}", word, _WORDS[key])
            found[key] = word == "on" if _WORDS[key] == _SWITCH else word
        elif key in _COUNTS or (kernel in KERNELS and field in BLOCK_FIELDS):
            found[key] = parse_count(word, f"--set {key}")
            if not 1 <= found[key] <= LARGEST_COUNT:
                raise InputError(f"--set {key}: {show(word)} is out of range; valid: 1 to {LARGEST_COUNT}")
        elif field in BLOCK_FIELDS:
            raise InputError(f"--set {key}: unknown kernel {show(kernel)}; valid: {', '.join(KERNELS)}")
        else:
            known = [*_WORDS, *_COUNTS, *(f"<kernel>.{name}" for name in BLOCK_FIELDS)]
            raise InputError(f"--set: {show(key)} is unknown{suggestion(key, known)}")
    blocks = sorted((*key.split("."), count) for key, count in found.items() if "." in key)
    return Overrides(**{key: word for key, word in found.items() if "." not in key}, blocks=tuple(blocks))


def _pair(item: object) -> tuple[str, object]:
    if isinstance(item, str) and "=" in item:
        key, _, word = item.partition("=")
        return key, word
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str):
        return item[0], item[1]
    raise InputError(f"--set: {show(item)} is not key=value")
