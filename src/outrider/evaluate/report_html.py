"""A run as one HTML page that needs nothing else: no network, no script, light and dark.

The verdict stands in the first screen, what weakens it right below, then the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from outrider.evaluate import charts
from outrider.evaluate.charts import Dot
from outrider.evaluate.recommend import Verdict, said
from outrider.evaluate.report_text import CELL_HEAD, cell_row, faults_of
from outrider.evaluate.summary import CellSummary, Comparison, RunSummary

MOST_POSITIONS = 12
MOST_ROWS = 40

STYLE = """
:root{--paper:#fff;--ink:#1b1f24;--dim:#5b6570;--line:#dfe3e8;--faint:#b4bcc6;--card:#f6f7f9;
--good:#176b3a;--bad:#a3262a;--c1:#2a6fdb;--c2:#d9622b;--c3:#2f9e62;--c4:#8a4fd0;--c5:#b8890b;--c6:#3c8f9e}
@media(prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e8ebef;--dim:#9aa4b0;--line:#333a43;
--faint:#6a7480;--card:#1d2127;--good:#5cc98a;--bad:#f08a8a;--c1:#6aa5ff;--c2:#f0915f;--c3:#62cf95;
--c4:#b78cf0;--c5:#e0b84a;--c6:#6cc3d2}}
body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;margin:0 auto;
max-width:60rem;padding:1.5rem}
h1{font-size:1.1rem;color:var(--dim);font-weight:500;margin:0}
.verdict{font-size:1.7rem;font-weight:650;line-height:1.25;margin:.4rem 0 1rem}
.good{color:var(--good)}.bad{color:var(--bad)}
h2{font-size:1.15rem;margin:2.2rem 0 .5rem}
.cards{display:flex;flex-wrap:wrap;gap:.8rem}
.card{background:var(--card);border-radius:8px;padding:.6rem .9rem;min-width:8rem}
.card b{display:block;font-size:1.25rem}.card span,small,caption{color:var(--dim)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .5rem;border-bottom:1px solid var(--line);text-align:right}
td:first-child,th:first-child{text-align:left}
.wide{overflow-x:auto}
.warn{border-left:4px solid var(--c5);background:var(--card);padding:.5rem .9rem;border-radius:4px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--ink);font-size:12px}
pre{background:var(--card);padding:.7rem;border-radius:6px;overflow-x:auto}
@media print{body{max-width:none}}
"""


def to_html(
    summary: RunSummary,
    *,
    files: Mapping[str, str] | None = None,
    comparison: Comparison | None = None,
) -> str:
    """The page.

    Args:
        files: the recommendation as files of other engines, by name.
        comparison: against another run.
    """
    found = summary.recommendation
    tone = "good" if found.pays else "bad" if found.verdicts else ""
    sections = [
        f"<h1>Outrider: {escape(summary.run.name)}</h1>",
        f'<p class="verdict {tone}">{escape(headline(summary))}</p>',
        _cards(summary),
        _faults(summary, comparison),
        _section("What to do at each load", _choices(summary)),
        _section("Comparison with another run", _comparison(comparison)),
        _section("Speed-up", _speedups(found.verdicts)),
        _section("Speed-up by load", _by_load(found.verdicts)),
        _section("Speed-up by family", _by_family(found.verdicts)),
        _section("Times", _times(summary.cells)),
        _section("Acceptance by position", _acceptance(summary.cells)),
        _section("Where guesses are refused", _rejections(summary.cells)),
        _section("What a step costs", _costs(found.verdicts, summary.settings)),
        _section("One request", _timeline(summary)),
        _section("All cells", _table(summary.cells)),
        _section("The setting for other engines", _files(files or {})),
        _section("How it was measured", _manifest(summary)),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(summary.run.name)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def headline(summary: RunSummary) -> str:
    """The verdict, or what was measured where nothing was compared."""
    if summary.recommendation.verdicts or not summary.cells:
        return summary.recommendation.headline()
    cell = summary.cells[0]
    times = cell.times["tpot_ms"]["p50"]
    speed = "" if times is None else f", {times.value:.1f} ms per token"
    tau = "" if cell.tau is None else f", {cell.tau:.2f} tokens per target step"
    return f"{cell.requests} requests at {cell.load}{speed}{tau}."


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{inside}</section>" if inside else ""


def _cards(summary: RunSummary) -> str:
    found = summary.recommendation
    run = summary.run
    facts: list[tuple[str, str]] = []
    best = next((c for c in found.choices if c.speedup is not None), None)
    if best is not None and best.speedup is not None:
        facts.append((f"{best.speedup.value:.2f}x", f"{best.setting} at {best.load}"))
    for crossover in found.crossovers[:1]:
        at = crossover.concurrency
        facts.append(("none seen" if at is None else f"{at:.1f}", "requests where it stops paying"))
    facts.append((str(len(run.samples)), "requests"))
    facts.append((str(len({s["id"] for s in run.samples})), "prompts"))
    failed = sum(cell.failed for cell in summary.cells)
    facts.append((str(failed), "failed"))
    engine = next((f"{s['engine']} {s.get('version') or ''}" for s in run.samples), "")
    facts.append((engine or "-", next((str(s["model"]) for s in run.samples), "")))
    cards = (
        f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in facts
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _faults(summary: RunSummary, comparison: Comparison | None) -> str:
    faults = faults_of(summary, comparison)
    if not faults:
        return ""
    items = "".join(f"<li>{escape(fault)}</li>" for fault in faults)
    return f'<div class="warn"><b>Read this first</b><ul>{items}</ul></div>'


def _choices(summary: RunSummary) -> str:
    rows = [
        (c.load, f"{c.temperature:g}", c.setting, c.reason) for c in summary.recommendation.choices
    ]
    told = "".join(f"<p>{escape(c.text)}</p>" for c in summary.recommendation.crossovers)
    table = _rows(("load", "temperature", "setting", "why"), rows)
    schedule = summary.recommendation.schedule
    lines = "".join(f"<li>batch {a} to {b}: {k} tokens</li>" for a, b, k in schedule)
    return (table if rows else "") + told + (f"<ul>{lines}</ul>" if lines else "")


def _name(v: Verdict, verdicts: Sequence[Verdict]) -> str:
    many = len({x.temperature for x in verdicts}) > 1
    return f"{v.setting} {v.load}" + (f" T{v.temperature:g}" if many else "")


def _speedups(verdicts: Sequence[Verdict]) -> str:
    settings = list(dict.fromkeys(v.setting for v in verdicts))
    rows = [
        Dot(
            _name(v, verdicts),
            v.whole.value,
            v.whole.interval.low if v.whole.interval else None,
            v.whole.interval.high if v.whole.interval else None,
            settings.index(v.setting),
        )
        for v in verdicts[:MOST_ROWS]
        if v.whole
    ]
    return charts.dots(rows, title="Speed-up of whole requests with 95% intervals", reference=1.0)


def _by_load(verdicts: Sequence[Verdict]) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for v in verdicts:
        if v.whole:
            name = _name(v, verdicts).replace(f" {v.load}", "")
            series.setdefault(name, []).append((v.concurrency, v.whole.value))
    if len({x for line in series.values() for x, _ in line}) < 2:
        return ""
    return charts.lines(
        series,
        title="Speed-up by requests at once",
        x_name="requests at once",
        y_name="speed-up",
        reference=1.0,
        log_x=True,
    )


def _by_family(verdicts: Sequence[Verdict]) -> str:
    rows = []
    chosen = [v for v in verdicts if v.concurrency == min(x.concurrency for x in verdicts)]
    settings = list(dict.fromkeys(v.setting for v in verdicts))
    for v in chosen:
        for family, e in v.families.items() if len(v.families) > 1 else ():
            low = e.interval.low if e.interval else None
            high = e.interval.high if e.interval else None
            label = f"{family}, {v.setting}"
            rows.append(Dot(label, e.value, low, high, settings.index(v.setting)))
    rows.sort(key=lambda row: (row.label.split(",")[0], -row.value))
    return charts.dots(rows[:MOST_ROWS], title="Speed-up by family, least load", reference=1.0)


def _times(cells: Sequence[CellSummary]) -> str:
    parts = []
    for name, words in (("tpot_ms", "time per output token"), ("ttft_ms", "time to first token")):
        rows = []
        for number, cell in enumerate(cells[:MOST_ROWS]):
            for percent, e in cell.times[name].items():
                if e is not None:
                    low = e.interval.low if e.interval else None
                    high = e.interval.high if e.interval else None
                    label = f"{cell.setting} {cell.load} {percent}"
                    rows.append(Dot(label, e.value, low, high, number))
        if rows:
            parts.append(f"<h3>{words}, ms</h3>" + charts.dots(rows[:MOST_ROWS], title=words))
    return "".join(parts)


def _told(cells: Sequence[CellSummary]) -> list[CellSummary]:
    return [cell for cell in cells if cell.accepted and cell.steps]


def _acceptance(cells: Sequence[CellSummary]) -> str:
    series = {
        f"{c.setting} {c.load}": [
            (float(p + 1), times / c.steps) for p, times in enumerate(c.accepted[:MOST_POSITIONS])
        ]
        for c in _told(cells)[:8]
    }
    chart = charts.lines(
        series,
        title="Share of all target steps that accepted a guess at this position",
        x_name="position of the guess",
        y_name="share of target steps",
    )
    note = "<small>Of all target steps, those without a guess included (unconditional).</small>"
    return chart + note if chart else ""


def _rejections(cells: Sequence[CellSummary]) -> str:
    told = [cell for cell in _told(cells) if cell.rejected]
    depth = max((len(cell.rejected) for cell in told), default=0)
    columns = [str(p + 1) for p in range(min(depth, MOST_POSITIONS))]
    rows = {}
    for cell in told[:MOST_ROWS]:
        shares: list[float | None] = []
        for p in range(len(columns)):
            accepted = cell.accepted[p] if p < len(cell.accepted) else 0
            rejected = cell.rejected[p] if p < len(cell.rejected) else 0
            shares.append(rejected / (accepted + rejected) if accepted + rejected else None)
        rows[f"{cell.setting} {cell.load}"] = shares
    chart = charts.heat(rows, title="Refused, of the guesses that came so far", columns=columns)
    note = "<small>Percent refused of the steps whose path came so far (conditional).</small>"
    return chart + note if chart else ""


def _costs(verdicts: Sequence[Verdict], settings: Mapping[str, Any]) -> str:
    parts = []
    split = {
        _name(v, verdicts): {
            "target pass v": v.split.v,
            "drafting d": v.split.d,
            "rest o": v.split.o,
        }
        for v in verdicts[:MOST_ROWS]
        if v.split
    }
    if split:
        parts.append(charts.stacks(split, title="Cost of a step, in plain steps"))
        rows = [
            (_name(v, verdicts), f"{v.tau:.2f}", f"{v.split.expected:.2f}x", said(v.decode))
            for v in verdicts
            if v.split and v.tau is not None
        ]
        parts.append(_rows(("setting", "tau", "expected speed-up", "measured, decoding"), rows))
    costs = [v for v in verdicts if v.cost is not None]
    curve: dict[str, list[tuple[float, float]]] = {}
    for v in costs:
        setting = settings.get(v.setting) or {}
        if setting.get("tokens") and v.cost is not None:
            line = curve.setdefault(f"{setting['method']} {v.load}", [])
            line.append((float(setting["tokens"]), v.cost))
    if any(len({x for x, _ in line}) > 1 for line in curve.values()):
        parts.append("<h3>v(n): cost of a step by guesses, in plain steps</h3>")
        chart = charts.lines(
            curve,
            title="Cost of a step by guesses",
            x_name="guesses per step",
            y_name="plain steps",
            reference=1.0,
        )
        parts.append(chart)
    bars = [Dot(_name(v, verdicts), v.cost, group=2) for v in costs[:MOST_ROWS] if v.cost]
    if bars:
        title = "Cost of a step with guesses, in plain steps; also the tau where it breaks even"
        parts.append(f"<h3>{title}</h3>" + charts.dots(bars, title=title, reference=1.0))
    return "".join(parts)


def _timeline(summary: RunSummary) -> str:
    """A request that accepted much and tells its steps, or any that tells its times."""
    told = [s for s in summary.run.samples if s.get("arrivals_ms") and not s.get("error")]
    if not told:
        return ""
    best = max(told, key=lambda s: (bool(s.get("per_step_accepted")), s.get("accepted") or 0))
    fits, arrivals = _accepted_by_chunk(best), best["arrivals_ms"]
    words = f"{best['id']} with {best['setting']} at {best['load']}"
    chart = charts.timeline(arrivals, fits, title=words)
    legend = (
        "in colour the accepted guesses, in grey the target's own next token"
        if fits is not None
        else "when chunks came; the engine does not tell which tokens were guesses"
    )
    return f"<p><small>{escape(words)}: {legend}.</small></p>{chart}"


def _accepted_by_chunk(line: Mapping[str, Any]) -> Sequence[int] | None:
    """Accepted guesses of each chunk, where a chunk is a step and every token has its place."""
    steps, chunks = line.get("per_step_accepted"), len(line["arrivals_ms"])
    if steps is None:
        return None
    if len(steps) == chunks - 1:  # an engine whose steps do not count the one that ends prefill
        steps = [0, *steps]
    whole = len(steps) == chunks and sum(steps) + chunks == line.get("completion_tokens")
    return steps if whole else None


def _table(cells: Sequence[CellSummary]) -> str:
    return _rows(CELL_HEAD, [cell_row(cell) for cell in cells])


def _files(files: Mapping[str, str]) -> str:
    return "".join(
        f"<h3>{escape(name)}</h3><pre>{escape(text)}</pre>" for name, text in files.items()
    )


def _comparison(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    rows = [
        (f"{setting} {load}", f"{temperature:g}", said(s.total) if s else "no common samples")
        for (setting, temperature, load), s in comparison.cells.items()
    ]
    equal, compared = comparison.same_outputs
    parts = [
        _rows(("cell", "temperature", "this run against the other"), rows),
        f"<p>{equal} of {compared} outputs are the same.</p>",
        "<h3>Settings that differ</h3>",
        _rows(
            ("setting", "other run", "this run"),
            [(d.name, d.first, d.second) for d in comparison.differences],
        ),
    ]
    return "".join(parts)


def _manifest(summary: RunSummary) -> str:
    facts = summary.run.manifest.to_dict()
    kept = {
        "started": facts["started"],
        "finished": facts["finished"] or "not finished",
        "command": " ".join(facts["command"]),
        "commit": f"{facts['commit']}{' (changed)' if facts['dirty'] else ''}",
        "cpu": facts["machine"]["cpu"],
        "cores": f"{facts['machine']['usable_cores']} of {facts['machine']['cores']}",
        "accelerator": facts["machine"]["accelerator"] or "-",
        "load of the machine": f"{facts['load_start']} to {facts['load_end']}",
        "seed": facts["seed"],
        **_options(summary.run.manifest.options),
    }
    table = _rows(("", ""), [(name, str(value)) for name, value in kept.items()])
    return table + (
        "<p><small>TTFT: to the first chunk with content. TPOT: (end - first) / (tokens - 1), "
        "tokens as the engine counts them. A gap lies between chunks, which may hold several "
        "tokens. Tau counts the target's own next token; steps without a guess and the one that "
        "gives the first token are counted. Intervals: bootstrap over prompts, 95%, those of "
        "speed-ups widened for the number of settings.</small></p>"
    )


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    plan = options.get("plan") or {}
    found = {name: plan[name] for name in ("repeats", "max_tokens", "early_stop") if name in plan}
    sets = (f"{s['name']} v{s['version']} ({s['prompts']})" for s in plan.get("sets", ()))
    limit = options.get("generator_limit") or {}
    if limit:
        found["generator's own limit"] = f"{limit['requests_per_s']:.0f} requests/s"
    return {"sets": ", ".join(sets), **found}


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(field))}</td>" for field in row) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'
