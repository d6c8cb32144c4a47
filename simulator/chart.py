"""The few shapes that plots consist of, as SVG text. Plain numbers in, markup out; nothing is read or written.

A chart is a white card, so it looks the same on light and dark pages. Colours are those of docs/picture.svg.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

BLUE, BROWN, GREEN, GREY, RED, INK = "#2f5d8a", "#b0702a", "#3b7d46", "#8a8a94", "#a33c3c", "#223"
_FAINT = "#e4e4ea"

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels.

    Args:
        start, end: pixels of `low` and `high`.
        is_log: equal steps are equal factors; both values are above 0.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; a value beyond an end is put on that end."""
        low, high, value = (
            (math.log(self.low), math.log(self.high), math.log(max(value, self.low)))
            if self.is_log
            else (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.0
        return self.start + (self.end - self.start) * min(max(share, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Round values, some four to nine of them."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            values = [factor * 10.0**power for power in powers for factor in (1, 3)]
        else:
            step = _round_step((self.high - self.low) / 6)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            values = [number * step for number in range(first, last + 1)]
        return [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]


def card(width: float, height: float, title: str, body: Iterable[str], subtitle: str = "") -> str:
    """A whole SVG document."""
    head = text(24, 30, title, size=16, weight=600) + (text(24, 50, subtitle, fill="#556") if subtitle else "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img" aria-label="{escape(title)}">\n'
        f'<rect width="{_n(width)}" height="{_n(height)}" rx="10" fill="#fff"/>\n{head}\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def text(
    x: float, y: float, words: str, *, anchor: str = "start", fill: str = INK, size: int = 13, weight: int = 400
) -> str:
    """One line of text."""
    more = f' font-size="{size}"' if size != 13 else ""
    more += f' font-weight="{weight}"' if weight != 400 else ""
    more += f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{_n(x)}" y="{_n(y)}" fill="{fill}"{more}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """A filled rectangle; `title` is shown when the pointer is on it."""
    size = f'width="{_n(width)}" height="{_n(height)}"'
    return f'<rect x="{_n(x)}" y="{_n(y)}" {size} fill="{fill}">{_title(title)}</rect>'


def line(
    points: Sequence[Point],
    stroke: str,
    *,
    width: float = 2.0,
    is_dashed: bool = False,
    fill: str = "none",
    title: str = "",
) -> str:
    """Straight lines from point to point; with a `fill`, also the area that they enclose."""
    path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
    dashes = ' stroke-dasharray="6 4"' if is_dashed else ""
    return f'<path d="{path}" fill="{fill}" stroke="{stroke}" stroke-width="{_n(width)}"{dashes}>{_title(title)}</path>'


def dots(points: Iterable[Point], fill: str, title: str) -> str:
    """Round dots, all in one element."""
    path = "".join(f"M{_n(x)} {_n(y)}h0" for x, y in points)
    return (
        f'<path d="{path}" fill="none" stroke="{fill}" stroke-width="3" stroke-linecap="round" stroke-opacity="0.5">'
        f"{_title(title)}</path>"
    )


def bars(pieces: Iterable[tuple[float, float, float]], stroke: str, *, height: float, title: str) -> str:
    """Horizontal strips (from x, y of the middle, length) of one height and colour, all in one element."""
    path = "".join(f"M{_n(x)} {_n(y)}h{_n(length)}" for x, y, length in pieces)
    return f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="{_n(height)}">{_title(title)}</path>'


def frame(x: Axis, y: Axis, x_name: str, y_name: str) -> list[str]:
    """Grid lines, ticks and names of both axes."""
    shapes = [shape for value in x.ticks() for shape in gridline(x, y, value, _label(value))]
    for value in y.ticks():
        shapes.append(line([(x.start, y.at(value)), (x.end, y.at(value))], _FAINT, width=1))
        shapes.append(text(x.start - 8, y.at(value) + 4, _label(value), anchor="end", fill="#556", size=12))
    shapes.append(text((x.start + x.end) / 2, y.start + 40, x_name, anchor="middle", fill="#445"))
    shapes.append(text(x.start, y.end - 10, y_name, fill="#445"))
    return shapes


def gridline(x: Axis, y: Axis, value: float, label: str) -> list[str]:
    """The line of a value of `x`, and its label."""
    return [
        line([(x.at(value), y.start), (x.at(value), y.end)], _FAINT, width=1),
        text(x.at(value), y.start + 18, label, anchor="middle", fill="#556", size=12),
    ]


def legend(x: float, y: float, entries: Iterable[tuple[str, str]]) -> list[str]:
    """Colours and their meanings, side by side."""
    shapes = []
    for colour, words in entries:
        shapes.append(box(x, y - 9, 18, 9, colour))
        shapes.append(text(x + 24, y, words, fill="#445"))
        x += 24 + 7.2 * len(words) + 22
    return shapes


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return min((factor * power for factor in (1, 2, 5, 10)), key=lambda candidate: abs(math.log(candidate / step)))


def _label(value: float) -> str:
    return f"{value / 1000:g}K" if value >= 10_000 else f"{round(value, 6):,g}"


def _n(value: float) -> str:
    """A number, as short as possible: a tenth of a pixel is precise enough."""
    return f"{value:.1f}".removesuffix(".0")
