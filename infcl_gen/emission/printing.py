"""A kernel's signature and what its launches pass, as Python source, from its arguments."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from infcl_gen.kernels import Family
from infcl_gen.kernels.choice import Choice

ABSENT = "\0"  # in a hole: what takes its line with it
WIDTH = 112  # of 120: some launches stand deeper


def signature_printer(families: Sequence[Family], choice: Choice) -> Callable[[str], str]:
    """What templates of kernels call: `signature(name)`."""
    kernels = {each.name: each for family in families for each in family.kernels(choice)}

    def signature(name: str) -> str:
        words = [f"{each.name}: tl.constexpr" if each.name.isupper() else each.name for each in kernels[name].arguments]
        return wrapped(f"def {name}(", words, "):")

    return signature


def wrapped(opening: str, words: Sequence[str], closing: str) -> str:
    """One statement, or what continues one; further lines are indented by eight. Words are not broken."""
    marked = ", ".join(word.replace(" ", "\0") for word in words)
    text = textwrap.fill(
        opening + marked + closing, WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
    )
    return text.replace("\0", " ")
