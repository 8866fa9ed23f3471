"""Charts as inline SVG: numbers in, text out. No script, no network, no state.

Colours come from CSS variables (`--c1` and so on, `--ink`, `--faint`, `--line`), so that one chart
serves light and dark. Every chart has a title for those who cannot see it, and every mark a tooltip
with its number. Why our own and not a library: docs/decisions/0012-charts.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 720
COLOURS = 6
_LEFT, _RIGHT, _ROW = 190, 70, 24


@dataclass(frozen=True)
class Dot:
    """A labelled value with its interval, if it has one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    group: int = 0


def colour(number: int) -> str:
    return f"var(--c{number % COLOURS + 1})"


def dots(rows: Sequence[Dot], *, title: str, reference: float | None = None, unit: str = "") -> str:
    """Values with whiskers, one a row, and a line at the reference."""
    if not rows:
        return ""
    every = [x for r in rows for x in (r.value, r.low, r.high) if x is not None]
    every += [] if reference is None else [reference]
    scale = _Scale(min(0.0, *every), max(every) * 1.05 or 1.0, _LEFT, WIDTH - _RIGHT)
    height = _ROW * len(rows) + 34
    parts = [_x_axis(scale, height - 22, top=6, unit=unit)]
    if reference is not None:
        x = scale(reference)
        parts.append(_line(x, 6, x, height - 22, "var(--ink)", dash=True))
    for number, row in enumerate(rows):
        y, tone = 18 + number * _ROW, colour(row.group)
        told = f"{row.label}: {row.value:.3g}{unit}"
        if row.low is not None and row.high is not None:
            told += f" ({row.low:.3g} to {row.high:.3g})"
            parts.append(_line(scale(row.low), y, scale(row.high), y, tone, width=2))
        parts.append(_text(_LEFT - 8, y + 4, row.label, anchor="end"))
        mark = f'<circle cx="{scale(row.value):.1f}" cy="{y}" r="5" fill="{tone}"'
        parts.append(f"{mark}><title>{escape(told)}</title></circle>")
        at = max(scale(row.value), scale(row.high) if row.high is not None else 0.0)
        parts.append(_text(at + 9, y + 4, f"{row.value:.2f}{unit}"))
    return _svg("".join(parts), height, title)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_name: str,
    y_name: str,
    reference: float | None = None,
    log_x: bool = False,
    floor: float = 0.0,
) -> str:
    """One line a series; the x values are few and each gets its tick."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    height, bottom, left = 270, 222, 56

    def place(x: float) -> float:
        return math.log2(x) if log_x and x > 0 else x

    xs = sorted({x for x, _ in points})
    tops = [y for _, y in points] + ([] if reference is None else [reference])
    across = _Scale(place(xs[0]) - 0.05, place(xs[-1]) + 0.05, left, WIDTH - 150)
    up = _Scale(min(floor, *tops), max(tops) * 1.08 or 1.0, bottom, 14)
    parts = [
        _line(left, up(value), WIDTH - 150, up(value), "var(--line)")
        + _text(left - 6, up(value) + 4, f"{value:g}", anchor="end")
        for value in up.ticks()
    ]
    parts += [_text(across(place(x)), bottom + 18, f"{x:g}", anchor="middle") for x in xs[:24]]
    parts.append(_text((left + WIDTH - 150) / 2, bottom + 38, x_name, anchor="middle"))
    parts.append(_text(left, 10, y_name))
    if reference is not None:
        parts.append(
            _line(left, up(reference), WIDTH - 150, up(reference), "var(--ink)", dash=True)
        )
    for number, (name, line) in enumerate(series.items()):
        tone, ordered = colour(number), sorted(line)
        path = " ".join(f"{across(place(x)):.1f},{up(y):.1f}" for x, y in ordered)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{tone}" stroke-width="2"/>')
        for x, y in ordered:
            told = escape(f"{name}, {x_name} {x:g}: {y:.3g}")
            spot = f'cx="{across(place(x)):.1f}" cy="{up(y):.1f}" r="4" fill="{tone}"'
            parts.append(f"<circle {spot}><title>{told}</title></circle>")
        if number < 12:
            y = 24 + number * 17
            parts.append(f'<rect x="{WIDTH - 140}" y="{y - 9}" width="10" height="10" ')
            parts.append(f'fill="{tone}"/>' + _text(WIDTH - 124, y, name[:20]))
    return _svg("".join(parts), height, title)


def heat(rows: Mapping[str, Sequence[float | None]], *, title: str, columns: Sequence[str]) -> str:
    """Shares from 0 to 1 as shades, with the number in each field."""
    if not rows:
        return ""
    side = min(64, max(30, (WIDTH - _LEFT - 10) // max(1, len(columns))))
    height = _ROW * len(rows) + 34
    parts = [
        _text(_LEFT + side * (i + 0.5), height - 12, name, anchor="middle")
        for i, name in enumerate(columns)
    ]
    for number, (label, values) in enumerate(rows.items()):
        y = 6 + number * _ROW
        parts.append(_text(_LEFT - 8, y + 16, label, anchor="end"))
        for column, value in enumerate(values[: len(columns)]):
            if value is None:
                continue
            x, told = _LEFT + side * column, f"{label}, position {column + 1}: {value:.1%}"
            box = f'x="{x}" y="{y}" width="{side - 2}" height="{_ROW - 2}" rx="3"'
            parts.append(f'<rect {box} fill="var(--c2)" fill-opacity="{0.06 + 0.9 * value:.3f}">')
            parts.append(f"<title>{escape(told)}</title></rect>")
            parts.append(_text(x + side / 2 - 1, y + 16, f"{100 * value:.0f}", anchor="middle"))
    return _svg("".join(parts), height, title)


def stacks(rows: Mapping[str, Mapping[str, float]], *, title: str, unit: str = "") -> str:
    """Parts of a whole, one bar a row; the same part has the same colour in every row."""
    if not rows:
        return ""
    names = list(dict.fromkeys(part for row in rows.values() for part in row))
    most = max(sum(row.values()) for row in rows.values())
    scale = _Scale(0.0, most * 1.05 or 1.0, _LEFT, WIDTH - _RIGHT)
    height = _ROW * len(rows) + 60
    parts = [_x_axis(scale, height - 48, top=6, unit=unit)]
    for number, (label, row) in enumerate(rows.items()):
        y, at = 8 + number * _ROW, 0.0
        parts.append(_text(_LEFT - 8, y + 14, label, anchor="end"))
        for name, value in row.items():
            x, wide = scale(at), scale(at + value) - scale(at)
            box = f'x="{x:.1f}" y="{y}" width="{max(0.0, wide):.1f}" height="{_ROW - 6}"'
            told = escape(f"{label}, {name}: {value:.3g}{unit}")
            parts.append(f'<rect {box} fill="{colour(names.index(name))}">')
            parts.append(f"<title>{told}</title></rect>")
            at += value
        parts.append(_text(scale(at) + 6, y + 14, f"{at:.2f}"))
    for number, name in enumerate(names):
        x = _LEFT + number * 120
        parts.append(f'<rect x="{x}" y="{height - 18}" width="10" height="10" ')
        parts.append(f'fill="{colour(number)}"/>' + _text(x + 15, height - 9, name))
    return _svg("".join(parts), height, title)


def timeline(arrivals_ms: Sequence[float], accepted: Sequence[int] | None, *, title: str) -> str:
    """When the tokens of one request came: a column per step, accepted guesses in colour."""
    if not arrivals_ms:
        return ""
    last = max(arrivals_ms) or 1.0
    scale = _Scale(0.0, last * 1.02, 40, WIDTH - 20)
    most = 1 + max(accepted, default=0) if accepted else 1
    block = max(3, min(12, 110 // most))
    bottom = 20 + block * most
    height, parts = bottom + 44, [_x_axis(scale, bottom + 4, top=8, unit=" ms")]
    wide = max(1.5, min(10.0, (WIDTH - 60) / max(1, len(arrivals_ms)) - 1))
    for number, at in enumerate(arrivals_ms):
        guesses = accepted[number] if accepted and number < len(accepted) else 0
        told = f"{at:.1f} ms: {guesses} accepted guesses and the next token"
        for place in range(guesses + 1):
            tone = "var(--c1)" if place < guesses else "var(--faint)"
            y = bottom - block * (place + 1)
            box = f'x="{scale(at) - wide / 2:.1f}" y="{y}" width="{wide:.1f}"'
            parts.append(f'<rect {box} height="{block - 1}" fill="{tone}">')
            parts.append(f"<title>{escape(told)}</title></rect>")
    return _svg("".join(parts), height, title)


@dataclass(frozen=True)
class _Scale:
    """From values to pixels along one axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)

    def ticks(self) -> list[float]:
        """About five round numbers."""
        span = self.high - self.low or 1.0
        step = 10 ** math.floor(math.log10(span / 4))
        step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        count = int((self.high - first * step) / step + 1e-9) + 1
        return [round((first + i) * step, 10) for i in range(count)]


def _x_axis(scale: _Scale, y: float, *, top: float, unit: str) -> str:
    return "".join(
        _line(scale(v), top, scale(v), y, "var(--line)")
        + _text(scale(v), y + 16, f"{v:g}{unit}", anchor="middle")
        for v in scale.ticks()
    )


def _line(
    x1: float, y1: float, x2: float, y2: float, tone: str, *, width: float = 1, dash: bool = False
) -> str:
    dashes = ' stroke-dasharray="4 3"' if dash else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{tone}" stroke-width="{width:g}"{dashes}/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(words)}</text>"


def _svg(inside: str, height: float, title: str) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return (
        f'<svg {box} role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{inside}</svg>"
    )
