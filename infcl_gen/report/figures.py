"""Marks, figures and pages as records, and the charts that are made of marks.

Figures are 400 units wide: about the width of a phone, where letters of 12 units can be read. Lengths are in units;
`tone` names a colour of the stylesheet, "t0" to "t9" for things that are told apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

WIDTH = 400.0
TONES = 10


class Mark(NamedTuple):
    """One SVG element. `hint` is its tooltip, `data` what it stands for."""

    tag: str
    attributes: Mapping[str, Any]
    text: str = ""
    hint: str = ""


class Figure(NamedTuple):
    """`title` and `description` are also its text for screen readers; `key` names the tones."""

    title: str
    description: str
    height: float
    marks: Sequence[Mark]
    key: Sequence[tuple[str, str]] = ()


class Table(NamedTuple):
    """Rows of text. `tones`: the colour of each row, where it has one. `folded` tables open on demand."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    tones: Sequence[str] = ()
    folded: bool = False


class Section(NamedTuple):
    title: str
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


class Page(NamedTuple):
    """`origin` says what the page was made by, at its end."""

    title: str
    lead: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    origin: Sequence[str]


class Bar(NamedTuple):
    """A bar, or a part of a stacked one. `text` stands beside its name."""

    name: str
    value: float
    text: str
    tone: str


class Series(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]
    tone: str
    style: str = ""  # "dashed", "bold" or "dots"


def tone(number: int) -> str:
    return f"t{number % TONES}"


def rect(x: float, y: float, width: float, height: float, tone: str, hint: str = "", **data: Any) -> Mark:
    return Mark("rect", _lengths(x=x, y=y, width=width, height=height) | {"class": tone} | _data(data), hint=hint)


def line(x1: float, y1: float, x2: float, y2: float, tone: str) -> Mark:
    return Mark("line", _lengths(x1=x1, y1=y1, x2=x2, y2=y2) | {"class": tone})


def text(x: float, y: float, words: str, tone: str = "", anchor: str = "start") -> Mark:
    return Mark("text", _lengths(x=x, y=y) | {"class": tone, "text-anchor": anchor}, words)


def dot(x: float, y: float, radius: float, tone: str, hint: str = "", **data: Any) -> Mark:
    return Mark("circle", _lengths(cx=x, cy=y, r=radius) | {"class": tone} | _data(data), hint=hint)


def bars(title: str, description: str, items: Sequence[Bar]) -> Figure:
    """Horizontal bars from zero, each below its name."""
    longest, marks = max((item.value for item in items), default=0.0) or 1.0, list[Mark]()
    for number, item in enumerate(items):
        y, width = 32.0 * number, WIDTH * item.value / longest
        marks += [text(0, y + 11, item.name), text(WIDTH, y + 11, item.text, "muted", "end")]
        marks.append(rect(0, y + 15, max(width, 0.5), 11, item.tone, f"{item.name}: {item.text}", value=item.value))
    return Figure(title, description, max(32.0 * len(items), 1.0), marks)


def stacked(
    title: str, description: str, stacks: Sequence[tuple[str, str, Sequence[Bar]]], limit: float, limit_text: str
) -> Figure:
    """Horizontal stacks (name, text, parts) against a limit, which is drawn where it is at most twice the longest."""
    longest = max(math.fsum(part.value for part in parts) for _, _, parts in stacks)
    most, marks = max(longest, limit if limit <= 2 * longest else 0.0), list[Mark]()
    for number, (name, words, parts) in enumerate(stacks):
        x, y = 0.0, 46.0 * number + 18
        marks += [text(0, y + 11, name), text(WIDTH, y + 11, words, "muted", "end")]
        for part in parts:
            width = (WIDTH - 2) * part.value / most
            hint = f"{part.name}: {part.text}"
            marks.append(rect(x, y + 16, width, 20, part.tone, hint, value=part.value, name=part.name))
            if width > 7 * len(part.name):
                marks.append(text(x + width / 2, y + 30, part.name, "on", "middle"))
            x += width
    x, height = (WIDTH - 2) * min(1.0, limit / most) + 1, 46.0 * len(stacks) + 18
    if limit <= most:
        marks.append(line(x, 14, x, height, "limit"))
    marks.append(text(WIDTH, 10, limit_text + " \u2192" * (limit > most), "limit", "end"))
    return Figure(title, description, height, marks)


class Axes:
    """A plane of 400 units' width; each axis is logarithmic or begins at zero."""

    LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 18.0, 34.0
    height = 250.0

    def __init__(self, x: tuple[float, float], y: tuple[float, float], x_log: bool = True, y_log: bool = True) -> None:
        self._x, self._y, self._logs = x, y, (x_log, y_log)

    def x(self, value: float) -> float:
        return self.LEFT + (WIDTH - self.LEFT - self.RIGHT) * _share(value, *self._x, self._logs[0])

    def y(self, value: float) -> float:
        low = self.height - self.BOTTOM
        return low - (low - self.TOP) * _share(value, *self._y, self._logs[1])

    def frame(self, x_name: str, y_name: str, x_ticks: Mapping[float, str] | None = None) -> list[Mark]:
        """Grid, ticks (`x_ticks` by value, else round numbers) and the names of the axes."""
        bottom, right = self.height - self.BOTTOM, WIDTH - self.RIGHT
        across = ticks(*self._x, self._logs[0]) if x_ticks is None else x_ticks
        marks, last = list[Mark](), -math.inf
        for value, words in sorted(across.items()):
            x = self.x(value)
            marks.append(line(x, self.TOP, x, bottom, "grid"))
            if x - last > 7 * len(words) + 4:  # else the words would touch
                marks.append(text(x, bottom + 13, words, "muted", "middle"))
                last = x
        for value, words in ticks(*self._y, self._logs[1]).items():
            marks.append(line(self.LEFT, self.y(value), right, self.y(value), "grid"))
            marks.append(text(self.LEFT - 4, self.y(value) + 4, words, "muted", "end"))
        marks.append(text(right, self.height - 5, x_name, "muted", "end"))
        return [*marks, text(0, 10, y_name, "muted")]

    def curve(self, points: Iterable[tuple[float, float]], tone: str) -> Mark:
        where = " ".join(f"{self.x(x):.6g},{self.y(y):.6g}" for x, y in points)
        return Mark("polyline", {"points": where, "class": f"curve {tone}"})


def lines(
    title: str, description: str, series: Sequence[Series], names: tuple[str, str], x_ticks: Mapping[float, str],
    y_range: tuple[float, float] | None = None, diagonal: bool = False,
) -> Figure:  # fmt: skip
    """Series of positive points over a logarithmic x; y is logarithmic, too, unless it has a range from zero.

    With `diagonal` both axes have one range, and x = y is drawn.
    """
    xs, ys = ([point[axis] for each in series for point in each.points] for axis in (0, 1))
    across = _padded(xs + ys * diagonal)
    axes = Axes(across, y_range or _padded(ys + xs * diagonal), y_log=y_range is None)
    marks = axes.frame(*names, x_ticks=None if diagonal else x_ticks)
    if diagonal:
        marks.append(axes.curve([(end, end) for end in across], "limit"))
    for each in series:
        if each.style != "dots" and len(each.points) > 1:
            marks.append(axes.curve(each.points, f"{each.tone} {each.style}"))
        for x, y in each.points:
            marks.append(dot(axes.x(x), axes.y(y), 3.0, each.tone, f"{each.name}: {x:.4g}, {y:.4g}", across=x, up=y))
    key = [(f"{each.tone} {each.style}", each.name) for each in series]
    return Figure(title, description, axes.height, marks, list(dict.fromkeys(key)))


def ticks(low: float, high: float, log: bool) -> dict[float, str]:
    """Round numbers from low to high, with their text."""
    if not log:
        step = next(s for s in _rounds(-12) if s * 5 >= high - low)
        return {step * n: _number(step * n) for n in range(math.ceil(low / step), int(high / step * 1.0001) + 1)}
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        found = [
            s * 10.0**d for d, s in itertools.product(decades, steps) if low <= s * 10.0**d * 1.000001 <= high * 1.00001
        ]
        if len(found) > 2:
            break
    every = 1 + len(found) // 9
    return {value: _number(value) for value in found[::every]}


def size_text(count: int) -> str:
    """A count in few letters: 65536 is "64k" (k = 1024)."""
    for power, unit in ((20, "M"), (10, "k")):
        if count >= 1 << power and count % (1 << power) == 0:
            return f"{count >> power}{unit}"
    return str(count)


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u2009") if 10_000 <= value < 1e6 else f"{value:.4g}"


def _rounds(power: int) -> Iterable[float]:
    return (digit * 10.0**p for p in itertools.count(power) for digit in (1, 2, 5))


def _share(value: float, low: float, high: float, log: bool) -> float:
    scale: Callable[[float], float] = math.log if log else float
    return (scale(value) - scale(low)) / (scale(high) - scale(low))


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high / low) ** 0.05 * 1.05
    return low / room, high * room


def _lengths(**values: float) -> dict[str, str]:
    return {name: f"{value:.7g}" for name, value in values.items()}


def _data(data: Mapping[str, Any]) -> dict[str, Any]:
    return {f"data-{name}": repr(value) if isinstance(value, float) else value for name, value in data.items()}
