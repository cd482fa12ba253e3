"""A kernel's signature and its launches as Python source, from its arguments."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from infcl_gen.kernels import Family

if TYPE_CHECKING:
    from infcl_gen.emission.lower import KernelSpec
    from infcl_gen.kernels.choice import Choice

WIDTH = 118


def kernel_printers(
    families: Sequence[Family], choice: Choice, launches: Sequence[KernelSpec]
) -> dict[str, Callable[..., str]]:
    """What templates call: `signature(name)`; `launched(name, grid, *groups, **values)`, of expressions by argument.

    A value for an argument that the kernel does not take in this package is left out; one too few is a LookupError.
    """
    options = {launch.name: launch for launch in launches}
    kernels = {each.name: each for family in families for each in family.kernels(choice)}
    modules = {each.name: family.file[:-3] for family in families for each in family.kernels(choice)}

    def signature(name: str) -> str:
        words = [
            f"{each.name}: tl.constexpr" if each.kind == "constexpr" else each.name for each in kernels[name].arguments
        ]
        return _wrapped(f"def {name}(", words, "):")

    def launched(name: str, grid: str, *groups: Mapping[str, str], **more: str) -> str:
        values = {key: value for group in (*groups, more) for key, value in group.items()}
        missing = [each.name for each in kernels[name].arguments if each.name not in values]
        if missing:
            raise LookupError(f"a launch of {name} lacks {', '.join(missing)}")
        words = [f"{each.name}={values[each.name]}" for each in kernels[name].arguments]
        registers, stages = kernels[name].registers, options[name].stages
        words.append(f"num_warps={options[name].warps}")
        words.append(f"maxnreg={modules[name]}.{registers}" if registers else f"num_stages={stages}")
        return _wrapped(f"launch({modules[name]}.{name}, {grid}, ", words, ")")

    return {"signature": signature, "launched": launched}


def _wrapped(opening: str, words: Sequence[str], closing: str) -> str:
    """One statement; further lines are indented by eight. Words are not broken."""
    marked = [word.replace(" ", "\0") for word in words]
    text = textwrap.fill(
        opening + ", ".join(marked) + closing, WIDTH - 12, subsequent_indent=" " * 8, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return text.replace("\0", " ")
