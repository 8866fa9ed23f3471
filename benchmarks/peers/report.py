"""From runs to figures: medians, ratios to the best peer, and the table. No engine, no process."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OURS = "outrider"
BASELINE = "llama.cpp Q8_0 plain"
PLAIN_BAR, PLAIN_STRETCH = 0.90, 0.65
SPECULATION_BAR = 2.5
PREFILL_BAR = 1.0


@dataclass(frozen=True)
class Run:
    """One answer of one side to one prompt.

    Attributes:
        agreement: leading tokens that are the same as ours decoded plainly.
    """

    side: str
    workload: str
    prompt: str
    repeat: int
    prompt_tokens: int
    n: int
    ttft_ms: float
    total_ms: float
    agreement: int | None = None

    @property
    def tpot_ms(self) -> float:
        return (self.total_ms - self.ttft_ms) / (self.n - 1)


@dataclass
class Row:
    """What was measured of one side; `reason` says why not, where it was not.

    Attributes:
        prefill_ms: to the first token behind a prompt of so many tokens as the run asked for.
        pass_ms: of one pass by number of rows; `pass_method` says how, or why not.
        idle_cores: processor time per second while it waited for its turn.
    """

    side: str
    peer: str
    mode: str
    versions: Mapping[str, str] = field(default_factory=dict)
    build_flags: Sequence[str] = ()
    note: str = ""
    reason: str = ""
    runs: list[Run] = field(default_factory=list)
    prefill_ms: float | None = None
    pass_ms: dict[int, float] = field(default_factory=dict)
    pass_method: str = ""
    idle_cores: float | None = None

    @property
    def verify_cost(self) -> float | None:
        """v(8): a pass of eight rows over a pass of one."""
        return self.pass_ms[8] / self.pass_ms[1] if {1, 8} <= set(self.pass_ms) else None

    def tpot_ms(self, workload: str | None = None) -> float | None:
        """The median over prompts; all workloads if none is named."""
        return _median(r.tpot_ms for r in self._of(workload))

    def tokens_per_s(self, workload: str) -> float | None:
        """All tokens over all time, the prompts' included."""
        runs = self._of(workload)
        return sum(r.n for r in runs) / sum(r.total_ms for r in runs) * 1000 if runs else None

    def agreement(self) -> float | None:
        return _median(r.agreement for r in self.runs if r.agreement is not None)

    def _of(self, workload: str | None) -> list[Run]:
        return [r for r in self.runs if workload in (None, r.workload)]

    def to_dict(self, workloads: Sequence[str]) -> dict[str, Any]:
        return {
            "side": self.side,
            "peer": self.peer,
            "mode": self.mode,
            "versions": dict(self.versions),
            "build_flags": list(self.build_flags),
            "note": self.note,
            "reason": self.reason or None,
            "tpot_ms_p50": {w: self.tpot_ms(w) for w in workloads},
            "tokens_per_s": {w: self.tokens_per_s(w) for w in workloads},
            "ttft_ms_p50": {w: _median(r.ttft_ms for r in self._of(w)) for w in workloads},
            "prefill_ms": self.prefill_ms,
            "pass_ms": {str(n): ms for n, ms in self.pass_ms.items()},
            "v8": self.verify_cost,
            "pass_method": self.pass_method or None,
            "agreement_tokens_p50": self.agreement(),
            "idle_cores": self.idle_cores,
            "runs": [{**asdict(r), "tpot_ms": r.tpot_ms} for r in self.runs],
        }


@dataclass(frozen=True)
class Ratio:
    """A figure that was asked for. `met` is `None` where one of the two sides is missing."""

    what: str
    value: float | None
    bar: float
    met: bool | None
    ours: str
    peer: str | None
    stretch: float | None = None


def ratios(rows: Sequence[Row], workloads: Sequence[str]) -> list[Ratio]:
    """The figures that were asked for, of the first of our precisions."""
    found = [r for r in rows if r.peer == OURS]
    plain = next((r for r in found if r.mode == "plain"), None)
    if plain is None:
        return []
    stem = plain.side.removesuffix(plain.mode)
    guessing = [r for r in found if r.mode != "plain" and r.side == stem + r.mode]
    baseline = next((r for r in rows if r.side == BASELINE), None)
    theirs = baseline.tpot_ms() if baseline else None
    value = _divide(plain.tpot_ms(), theirs)
    met = None if value is None else value <= PLAIN_BAR
    what = "plain TPOT, ours / llama.cpp Q8_0 (lower is better)"
    result = [Ratio(what, value, PLAIN_BAR, met, plain.side, BASELINE, PLAIN_STRETCH)]
    value = _divide(baseline.prefill_ms if baseline else None, plain.prefill_ms)
    met = None if value is None else value >= PREFILL_BAR
    what = "prefill, llama.cpp Q8_0 / ours (higher is better)"
    result.append(Ratio(what, value, PREFILL_BAR, met, plain.side, BASELINE))
    for workload in workloads:
        for row in guessing:
            result.append(_against_best(row, rows, workload))
    return result


def _against_best(row: Row, rows: Sequence[Row], workload: str) -> Ratio:
    """Our TPOT with guessing against the best peer's in any precision and mode."""
    peers = [(r.tpot_ms(workload), r.side) for r in rows if r.peer != OURS]
    measured = [(ms, side) for ms, side in peers if ms is not None]
    best, side = min(measured) if measured else (None, None)
    value = _divide(best, row.tpot_ms(workload))
    met = None if value is None else value >= SPECULATION_BAR
    what = f"{workload}: TPOT of the best peer in any mode / ours (higher is better)"
    return Ratio(what, value, SPECULATION_BAR, met, row.side, side)


def table(rows: Sequence[Row], workloads: Sequence[str], prefill: int) -> str:
    """One line per side; what is missing has its reason instead of figures."""
    width = max(len(row.side) for row in rows)
    heads = [*(f"TPOT {w}" for w in workloads), *(f"tok/s {w}" for w in workloads)]
    heads += ["v(8)", f"prefill {prefill}", "agree", "idle"]
    lines = ["  ".join([f"{'side':{width}}", *heads])]
    for row in rows:
        if row.reason and not row.runs:
            lines.append(f"{row.side:{width}}  {row.reason}")
            continue
        cells = [
            *(_cell(row.tpot_ms(w), 2) for w in workloads),
            *(_cell(row.tokens_per_s(w), 1) for w in workloads),
            _cell(row.verify_cost, 2),
            _cell(row.prefill_ms, 1),
            _cell(row.agreement(), 0),
            _cell(row.idle_cores, 2),
        ]
        padded = [f"{cell:>{len(head)}}" for cell, head in zip(cells, heads, strict=True)]
        lines.append("  ".join([f"{row.side:{width}}", *padded, row.reason]).rstrip())
    return "\n".join(lines)


def ratio_lines(found: Iterable[Ratio]) -> str:
    words = {True: "met", False: "missed", None: "not measured"}
    return "\n".join(
        f"{r.what}: {_cell(r.value, 2)} (bar {r.bar}"
        f"{f', stretch {r.stretch}' if r.stretch else ''}: {words[r.met]}); "
        f"{r.ours} against {r.peer or 'nobody'}"
        for r in found
    )


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _divide(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
