"""A report of a training run: one HTML file with inline pictures and nothing from elsewhere.

It shows the losses and the teacher-forced agreement of every step of the training-time test (or
head), and what serving accepted at each evaluation. Input is `log.jsonl`; it knows no tensors.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 96, 14, 34
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8a5a9e", "#c77d0a", "#4a4e69", "#0b8a8a", "#a23e48")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2rem auto; padding: 0 1rem;
  color: #1c1f24; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: right; }
th:first-child, td:first-child { text-align: left; } .best { font-weight: 700; }
svg { width: 100%; height: auto; } text { font: 11px system-ui, sans-serif; fill: #444; }
"""

Entry = Mapping[str, Any]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One curve of a picture."""

    name: str
    points: Points


def write_report(log: Sequence[Entry], path: Path, *, title: str) -> None:
    """Write the report of a run's log."""
    path.write_text(report_html(log, title=title), encoding="utf-8")


def report_html(log: Sequence[Entry], *, title: str) -> str:
    """The whole page."""
    trained = [entry for entry in log if entry["kind"] == "train"]
    served = [entry for entry in log if entry["kind"] == "evaluate"]
    parts = [f"<h1>Training of {html.escape(title)}</h1>", _summary(trained, served)]
    if trained:
        parts += [
            "<h2>Loss</h2>",
            picture(_by_step(trained, "by_step", "step")),
            "<h2>Agreement with the target's first choice (teacher-forced)</h2>",
            picture(_by_step(trained, "agreement", "step"), low=0.0, high=1.0),
        ]
    if served:
        parts += [
            "<h2>Acceptance length in serving, held-out prompts</h2>",
            picture(_lengths(served)),
        ]
        for probe in _probes(served):
            lines = _positions(served, probe)
            parts += [
                f"<h2>Accepted by position, {html.escape(probe)}</h2>",
                picture(lines, low=0.0, high=1.0),
            ]
        parts.append(_table(served))
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def picture(lines: Sequence[Line], *, low: float | None = None, high: float | None = None) -> str:
    """An SVG of curves over training steps; points that are not finite are left out."""
    kept = [
        Line(line.name, [p for p in line.points if all(map(math.isfinite, p))]) for line in lines
    ]
    every = [point for line in kept for point in line.points]
    if not every:
        return "<p>Nothing was measured.</p>"
    xs, ys = [x for x, _ in every], [y for _, y in every]
    left, right = min(xs), max(max(xs), min(xs) + 1)
    bottom = min(ys) if low is None else low
    top = max(max(ys) if high is None else high, bottom + 1e-6)

    def place(x: float, y: float) -> str:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    parts = [*_axes(left, right, bottom, top)]
    for index, line in enumerate(kept):
        if not line.points:
            continue
        colour, dash = COLOURS[index % len(COLOURS)], "" if index < len(COLOURS) else "4 3"
        where = " ".join(place(x, y) for x, y in line.points)
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" '
            f'stroke-dasharray="{dash}" points="{where}"/>'
        )
        for x, y in line.points if len(line.points) < 40 else ():
            across, down = place(x, y).split(",")
            parts.append(f'<circle cx="{across}" cy="{down}" r="2" fill="{colour}"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{TOP + 10 + 15 * index}" '
            f'style="fill:{colour}">{html.escape(line.name)} {line.points[-1][1]:.3g}</text>'
        )
    inside = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n{inside}\n</svg>'


def _axes(left: float, right: float, bottom: float, top: float) -> list[str]:
    lines = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        down = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        value = bottom + share * (top - bottom)
        lines += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}" '
            f'stroke="#ddd"/>',
            f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{value:.3g}</text>',
        ]
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        across = LEFT + share * (WIDTH - LEFT - RIGHT)
        value = left + share * (right - left)
        lines.append(
            f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="{anchor}">'
            f"{value:,.0f}</text>"
        )
    return [*lines, f'<text x="{WIDTH - RIGHT + 8}" y="{HEIGHT - BOTTOM + 18}">step</text>']


def _by_step(log: Sequence[Entry], key: str, name: str) -> list[Line]:
    count = max(len(entry[key]) for entry in log)
    return [
        Line(
            f"{name} {index + 1}",
            [(entry["step"], entry[key][index]) for entry in log if index < len(entry[key])],
        )
        for index in range(count)
    ]


def _probes(served: Sequence[Entry]) -> list[str]:
    end = "_acceptance_length"
    return [key.removesuffix(end) for key in served[-1] if key.endswith(end)]


def _lengths(served: Sequence[Entry]) -> list[Line]:
    return [
        Line(probe, [(entry["step"], entry[f"{probe}_acceptance_length"]) for entry in served])
        for probe in _probes(served)
    ]


def _positions(served: Sequence[Entry], probe: str) -> list[Line]:
    found: dict[int, list[tuple[float, float]]] = {}
    start = f"{probe}_position_"
    for entry in served:
        for key, value in entry.items():
            if key.startswith(start):
                found.setdefault(int(key.removeprefix(start)), []).append((entry["step"], value))
    return [Line(f"position {index}", points) for index, points in sorted(found.items())]


def _summary(trained: Sequence[Entry], served: Sequence[Entry]) -> str:
    if not trained:
        return "<p>No step has been reported yet.</p>"
    last = trained[-1]
    text = f"Step {last['step']:,} of {last['steps']:,}; loss {last['loss']:.3f}."
    if served:
        best = max(served, key=lambda entry: float(entry["acceptance_length"]))
        text += (
            f" Best checkpoint: step {best['step']:,}, acceptance length "
            f"{best['acceptance_length']:.2f} in serving (the next token counts; plain is 1)."
        )
    return f"<p>{text}</p>"


def _table(served: Sequence[Entry]) -> str:
    probes = _probes(served)
    best = max(float(entry["acceptance_length"]) for entry in served)
    head = "".join(f"<th>{html.escape(probe)}</th>" for probe in probes)
    rows = []
    for entry in served:
        mark = ' class="best"' if entry["acceptance_length"] == best else ""
        cells = "".join(f"<td>{entry[f'{p}_acceptance_length']:.3f}</td>" for p in probes)
        rows.append(f"<tr{mark}><td>{entry['step']:,}</td>{cells}</tr>")
    return f"<table><tr><th>step</th>{head}</tr>{''.join(rows)}</table>"
