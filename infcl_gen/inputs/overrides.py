"""What `--set` decides instead of the planner: its text becomes typed values here, and only here."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_type_hints

from infcl_gen.errors import InputError
from infcl_gen.inputs.text import check_word, parse_count, show, suggestion

LARGEST_COUNT = 2**40
KERNELS = ("forward", "gradient", "product", "fused", "positive", "finish")
BLOCK_FIELDS = ("rows", "keys", "depth", "warps", "stages")


@dataclasses.dataclass(frozen=True)
class Overrides:
    """Choices made by the user; None: the planner decides. So it does for kernels that `blocks` does not name.

    keeps    whether a ring keeps the key shards that arrive last in forward for backward.
    copy_engines  whether those of GPUs carry messages between them, in place of NCCL.
    records  "off": ignore tuning records; "measured": `products`, panels and blocks come from a tuning record.
    blocks   sorted (kernel, field, count), of `--set <kernel>.<field>=count`.
    """

    strategy: Literal["panel", "fused", "stash", "rows", "torch"] | None = None
    products: Literal["library", "triton"] | None = None
    descriptors: bool | None = None
    replay: bool | None = None
    transport: Literal["ring", "gather"] | None = None
    keeps: bool | None = None
    copy_engines: bool | None = None
    records: Literal["off", "measured"] | None = None
    panel_rows: int | None = None
    panel_keys: int | None = None
    stash_rows: int | None = None
    blocks: tuple[tuple[str, str, int], ...] = ()

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The user's choices as (key, text), sorted by key: the form in SPEC and in tuning records."""
        given = vars(self) | {f"{kernel}.{field}": count for kernel, field, count in self.blocks}
        return tuple(
            (key, _SWITCH[not value] if isinstance(value, bool) else str(value))
            for key, value in sorted(given.items())
            if value is not None and key != "blocks"
        )

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for key, _ in self.pairs)

    def block(self, kernel: str) -> dict[str, int]:
        """The fields of a kernel's block that the user chose."""
        return {field: count for name, field, count in self.blocks if name == kernel}


_SWITCH = ("on", "off")
_TYPES = {name: get_args(hint)[0] for name, hint in get_type_hints(Overrides).items() if name != "blocks"}
_COUNTS = [name for name, kind in _TYPES.items() if kind is int]
_WORDS = {name: _SWITCH if kind is bool else get_args(kind) for name, kind in _TYPES.items() if kind is not int}


def parse_overrides(value: object) -> Overrides:
    """Overrides from a mapping, "key=value" strings, pairs, or `Overrides`. Counts may be "64k" (k = 1024).

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
