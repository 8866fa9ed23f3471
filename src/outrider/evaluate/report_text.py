"""A run as Markdown, as CSV, and as a table for a terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from outrider.evaluate.recommend import said
from outrider.evaluate.runs import INDEXED
from outrider.evaluate.statistics import Estimate
from outrider.evaluate.summary import CellSummary, Comparison, RunSummary

CELL_HEAD = (
    *("setting", "temp", "load", "requests", "failed", "TTFT p50 ms", "p95", "TPOT p50 ms", "p95"),
    *("tok/s user", "tok/s all", "good", "tau", "accepted"),
)


def cell_row(cell: CellSummary) -> tuple[str, ...]:
    """A cell's numbers under `CELL_HEAD`."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    def at(name: str, percent: str) -> str:
        estimate: Estimate | None = cell.times[name][percent]
        return number(None if estimate is None else estimate.value, ".1f")

    return (
        cell.setting,
        f"{cell.temperature:g}",
        cell.load,
        str(cell.requests),
        str(cell.failed),
        at("ttft_ms", "p50"),
        at("ttft_ms", "p95"),
        at("tpot_ms", "p50"),
        at("tpot_ms", "p95"),
        number(cell.user_tokens_per_s, ".1f"),
        number(cell.tokens_per_s, ".1f"),
        number(cell.goodput_share, ".0%"),
        number(cell.tau, ".2f"),
        number(cell.acceptance_rate, ".0%"),
    )


def faults_of(summary: RunSummary, comparison: Comparison | None = None) -> list[str]:
    """Everything that weakens the numbers."""
    found = [*summary.faults, *summary.recommendation.notes]
    if comparison is not None and comparison.differences:
        names = ", ".join(d.name for d in comparison.differences[:8])
        found.append(f"the two runs differ in {len(comparison.differences)} settings: {names}")
    return list(dict.fromkeys(found))


def to_terminal(summary: RunSummary) -> str:
    """What a command prints at its end."""
    rows = [CELL_HEAD, *(cell_row(cell) for cell in summary.cells)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(CELL_HEAD))]
    table = [
        "  ".join(
            field.ljust(width) if i == 0 else field.rjust(width)
            for i, (field, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    found = summary.recommendation
    parts = ["\n".join(table)]
    if found.verdicts:
        parts.append(found.to_text())
    faults = [f"note: {fault}" for fault in summary.faults]
    return "\n\n".join([*parts, *(["\n".join(faults)] if faults else [])])


def to_markdown(summary: RunSummary, *, comparison: Comparison | None = None) -> str:
    """The report for a repository or an issue."""
    found = summary.recommendation
    parts = [f"# {summary.run.name}", f"**{found.headline()}**" if found.verdicts else ""]
    faults = faults_of(summary, comparison)
    if faults:
        parts.append("Read this first:\n\n" + "\n".join(f"- {fault}" for fault in faults))
    if found.choices:
        lines = [f"- {c.load}, temperature {c.temperature:g}: {c.reason}" for c in found.choices]
        parts.append(
            "## What to do\n\n" + "\n".join(lines + [f"- {c.text}" for c in found.crossovers])
        )
    parts.append("## Cells\n\n" + _table(CELL_HEAD, [cell_row(cell) for cell in summary.cells]))
    if found.verdicts:
        rows = [
            (
                *(v.setting, f"{v.temperature:g}", v.load, said(v.whole), said(v.decode)),
                *("-" if value is None else f"{value:.2f}" for value in (v.tau, v.cost)),
            )
            for v in found.verdicts
        ]
        head: tuple[str, ...] = ("setting", "temp", "load", "speed-up", "decoding", "tau", "cost")
        parts.append("## Against the baseline\n\n" + _table(head, rows))
        families = [
            (v.setting, v.load, family, said(e))
            for v in found.verdicts
            for family, e in v.families.items()
        ]
        parts.append(
            "## By family\n\n" + _table(("setting", "load", "family", "speed-up"), families)
        )
    if comparison is not None:
        cells = [
            (s, f"{t:g}", load, said(c.total) if c else "no common samples")
            for (s, t, load), c in comparison.cells.items()
        ]
        parts.append(
            "## Against the other run\n\n" + _table(("setting", "temp", "load", "speed-up"), cells)
        )
        rows3 = [(d.name, d.first, d.second) for d in comparison.differences]
        parts.append("### Settings that differ\n\n" + _table(("name", "other", "this"), rows3))
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(fields: Sequence[str]) -> str:
        return "| " + " | ".join(field.replace("|", "\\|") for field in fields) + " |"

    return "\n".join([line(head), line(["---"] * len(head)), *(line(row) for row in rows)])


def to_csv(summary: RunSummary) -> str:
    """One line per sample, the columns of the index."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(INDEXED)
    for sample in summary.run.samples:
        writer.writerow([_safe(sample.get(name)) for name in INDEXED])
    return out.getvalue()


def _safe(value: object) -> object:
    """A field that no spreadsheet takes for a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t"):
        return "'" + value
    return "" if value is None else value
