"""Templates and the names in them -> the text of a package's files.

Runtime files are copied verbatim. The text depends on the arguments only: no date, no path, no order of a hash table.
"""

import io
import math
import re
import textwrap
import tokenize
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from infcl_gen.emission.package import with_digest
from infcl_gen.files import template_folder

LINE_WIDTH = 120
ABSENT = "\0"  # in a hole of a template: its whole line is left out
_PACKAGE = Path(__file__).resolve().parent.parent


class File(NamedTuple):
    """One file of the package: its path, the templates whose text it joins, and the names in them."""

    path: str
    templates: Sequence[str]
    names: Mapping[str, Any]


def render(files: Sequence[File]) -> dict[str, str]:
    """The text of every file of the package but the manifest, by path.

    SPEC["digest"] is the `content_digest` of the text: it identifies the whole package.
    """
    environment, found = _environment(), {}
    for file in files:
        parts = [environment.get_template(name).render(file.names) for name in file.templates]
        found[file.path] = _tidy("\n\n\n".join(part.strip("\n") for part in parts))
    for source in (_PACKAGE / "runtime").glob("*.py"):
        found[f"_runtime/{source.name}"] = source.read_text(encoding="utf-8")
    return with_digest(found)


def _tidy(text: str) -> str:
    """Without the lines of absent pieces, blanks at the end of lines, more than two empty lines together, and lines of
    more than LINE_WIDTH columns."""
    text = re.sub(rf"^[ \t]*{ABSENT}\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return _folded(re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n")


def _folded(text: str) -> str:
    """Python whose long lines are broken: formulas and notes between words, statements in brackets around their value.

    Their length follows from the formula: a maximum of two long terms has each three times.
    """
    lines = text.splitlines()
    if max(map(len, lines)) <= LINE_WIDTH:
        return text
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    texts = [token for token in tokens if token.type == tokenize.STRING and token.string.startswith('"""')]
    inside = {row for token in texts for row in range(token.start[0], token.end[0] + 1)}
    for row, line in enumerate(lines, 1):
        if len(line) > LINE_WIDTH:
            lines[row - 1] = _note(line) if row in inside else _statement(line)
    return "\n".join(lines) + "\n"


def _note(line: str) -> str:
    """Further lines begin below what follows a name and blanks, or a formula's first term."""
    begins = re.match(r" *\S+ {2,}| *\S+ = |", line.replace('"""', "   "))
    assert begins is not None
    return _filled(line, " " * (begins.end() or len(line) - len(line.lstrip())), "")


def _statement(line: str) -> str:
    """An assignment or a return in several lines, broken before operators and after commas."""
    found = re.fullmatch(r"( *)(return |[^()=#]+ [-+*/&|]?= )([^#]+)", line)
    if found is None:
        return line
    indent, opening, value = found.groups()
    value = re.sub(r'"[^"]*"| (?:[-+*/&|%]|//|<<|>>|[<>]=?|[!=]=) ', _held_together, value)
    inner = indent + " " * 4
    return f"{indent}{opening}(\n{_filled(value, inner, inner)}\n{indent})"


def _held_together(found: re.Match[str]) -> str:
    word = found[0]
    return f" {word[1:].replace(' ', ABSENT)}" if word[0] == " " else word.replace(" ", ABSENT)


def _filled(text: str, indent: str, first_indent: str) -> str:
    lines = textwrap.fill(
        text, LINE_WIDTH, initial_indent=first_indent, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return lines.replace(ABSENT, " ")


@jinja2.pass_context
def piece(
    context: jinja2.runtime.Context, name: str, each: Sequence[Any] = (None,), when: bool = True, **more: Any
) -> str:
    """The text of triton/pieces/`name`.py.jinja with the caller's names and `more`; once for `each` one, as `part`.
    Unless `when`, its line is left out.

    For `    {{ piece("name") | indent(4) }}`: statements that several kernels have in common.
    """
    if not when:
        return ABSENT
    template = context.environment.get_template(f"triton/pieces/{name}.py.jinja")
    names = {**context.get_all(), **more}
    return "".join(template.render({**names, "part": part}) for part in each).rstrip("\n")


def literal(value: Any, indent: int = 0, prefix: int = 0) -> str:
    """`value` as a readable Python literal in ASCII, broken over lines where it is longer than LINE_WIDTH.

    `indent`: columns before the enclosing line; `prefix`: characters that already stand on it. Raises TypeError for
    what is not None, bool, int, a finite float, str, tuple, list or dict.
    """
    return _fitted(_written(value), indent, prefix)


def _fitted(written: "_Written", indent: int, prefix: int = 0) -> str:
    flat, items, text = written
    if indent + prefix + len(flat) + 1 <= LINE_WIDTH or not (items or text):
        return flat
    if text:
        most = LINE_WIDTH - indent - 7
        parts = re.findall(rf".{{1,{most}}}(?:\s|\Z)|.{{1,{most}}}", text, re.DOTALL)
        return "(\n" + "".join(f"{' ' * (indent + 4)}{_written(part).flat}\n" for part in parts) + " " * indent + ")"
    words = [key + each.flat for key, each in items]
    if prefix or len(words) < 2 or "{" in flat[1:] or max(map(len, words)) > LINE_WIDTH - indent - 4:
        return _broken(written, indent)
    record = " " * indent + flat[0]  # as in a table
    return wrapped(record, words, flat[-1], LINE_WIDTH - 1, indent + 1).strip()


def wrapped(opening: str, words: Sequence[str], closing: str, width: int, indent: int) -> str:
    """A bracket of words in lines of at most `width` columns, the further ones indented. Words are not broken."""
    text = opening + ", ".join(word.replace(" ", "\0") for word in words) + closing
    lines = textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def broken_literal(value: dict[Any, Any] | list[Any] | tuple[Any, ...], indent: int = 0) -> str:
    """`literal` with one line for each item of the outermost container."""
    return _broken(_written(value), indent)


def _broken(written: "_Written", indent: int) -> str:
    inner, flat = indent + 4, written.flat
    lines = [f"{' ' * inner}{key}{_fitted(item, inner, len(key))},\n" for key, item in written.items]
    return f"{flat[0]}\n{''.join(lines)}{' ' * indent}{flat[-1]}"


class _Written(NamedTuple):
    """A literal on one line, and the items of a container, each after the text before it, or a text itself."""

    flat: str
    items: Sequence[tuple[str, "_Written"]] = ()
    text: str = ""


def _written(value: Any) -> _Written:
    if isinstance(value, str):
        plain = '"' not in value and "\\" not in value and value.isascii() and value.isprintable()
        return _Written(f'"{value}"' if plain else ascii(value), text=value)
    if isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{value!r} has no literal")
    if value is None or isinstance(value, bool | int | float):
        return _Written(repr(value))
    if not isinstance(value, dict | list | tuple):
        raise TypeError(f"{type(value).__name__} has no literal")
    if isinstance(value, dict):
        items = [(f"{_written(key).flat}: ", _written(item)) for key, item in value.items()]
    else:
        items = [("", _written(item)) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]" if isinstance(value, list) else "()"
    single = "," if isinstance(value, tuple) and len(value) == 1 else ""
    return _Written(opening + ", ".join(key + item.flat for key, item in items) + single + closing, items)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.globals["piece"] = piece
    environment.filters["broken_literal"] = broken_literal
    return environment
