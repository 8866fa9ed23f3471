"""What a benchmark found: cells of numbers, as JSON and as a table. Pure; measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from outrider.evaluate.margins import Difference
from outrider.evaluate.statistics import (
    Estimate,
    Pair,
    Speedup,
    Summary,
    acceptance_summary,
    speedup,
    summarize,
    timing_summary,
)
from outrider.records.manifest import RunManifest
from outrider.records.request import RequestRecord

PERCENTS = (50, 95, 99)
SCHEMA_VERSION = 1


@dataclass
class Cell:
    """One drafter on one workload.

    Attributes:
        records: its requests.
        plain: the plain run of the same prompt and repeat, in the same order.
        differences: per request the first difference from the plain run, `None` if identical.
    """

    drafter: str
    workload: str
    temperature: float
    records: list[RequestRecord] = field(default_factory=list)
    plain: list[RequestRecord] = field(default_factory=list)
    differences: list[Difference | None] = field(default_factory=list)

    def add(
        self, record: RequestRecord, plain: RequestRecord, difference: Difference | None
    ) -> None:
        """Take in one request and its plain counterpart."""
        self.records.append(record)
        self.plain.append(plain)
        self.differences.append(difference)

    @property
    def identical(self) -> int:
        return sum(d is None for d in self.differences)

    @property
    def unexplained(self) -> int:
        """Requests that differ from plain decoding by more than a near-tie."""
        return sum(d is not None and not d.near_tie for d in self.differences)

    @property
    def failed(self) -> int:
        return sum(r.error is not None for r in self.records)

    def decode_speedup(self) -> Speedup | None:
        """Tokens per second after the first step that brought any, against plain."""
        return self._speedup(
            lambda r: r.e2e_ms - (r.ttft_ms or 0.0),
            lambda r: r.completion_tokens - r.first_step_tokens,
        )

    def whole_speedup(self) -> Speedup | None:
        """Tokens per second of the whole request, prefill included, against plain."""
        return self._speedup(lambda r: r.e2e_ms, lambda r: r.completion_tokens)

    def _speedup(
        self,
        milliseconds: Callable[[RequestRecord], float],
        tokens: Callable[[RequestRecord], int],
    ) -> Speedup | None:
        pairs = [
            Pair(
                prompt=record.id,
                plain_s=milliseconds(plain) / 1000,
                speculative_s=milliseconds(record) / 1000,
                plain_tokens=tokens(plain),
                speculative_tokens=tokens(record),
            )
            for record, plain in zip(self.records, self.plain, strict=True)
            if min(tokens(plain), tokens(record)) > 0
            and record.error is None
            and plain.error is None
        ]
        return speedup(pairs) if pairs else None

    def to_dict(self) -> dict[str, Any]:
        """The cell under the names that other tools rely on."""
        acceptance = acceptance_summary(self.records)
        timing = timing_summary(self.records)
        decode, whole = self.decode_speedup(), self.whole_speedup()
        e2e_s = sum(r.e2e_ms for r in self.records) / 1000
        return {
            "drafter": self.drafter,
            "workload": self.workload,
            "temperature": self.temperature,
            "requests": len(self.records),
            "failed": self.failed,
            "speedup": _estimate(decode.total if decode else None),
            "speedup_whole_request": _estimate(whole.total if whole else None),
            "speedup_detail": {
                "decode": decode.to_dict() if decode else None,
                "whole_request": whole.to_dict() if whole else None,
            },
            "ttft_ms": _percentiles([r.ttft_ms for r in self.records]),
            "tpot_ms": _percentiles([r.tpot_ms for r in self.records]),
            "tokens_per_s": sum(r.completion_tokens for r in self.records) / e2e_s
            if e2e_s
            else None,
            "acceptance_length": {
                "pooled": acceptance.acceptance_length.value
                if acceptance.acceptance_length
                else None,
                "per_request": acceptance.acceptance_length_per_request,
            },
            "draft_acceptance_rate": acceptance.draft_acceptance_rate,
            "accepted_by_position": _summed([r.accepted_by_position for r in self.records]),
            "rejected_by_position": _summed([r.rejected_by_position for r in self.records]),
            "target_steps": sum(r.target_steps for r in self.records),
            "target_step_reduction": acceptance.target_forward_reduction,
            "draft_ms_per_step": timing.draft_ms_per_step,
            "verify_ms_per_step": timing.verify_ms_per_step,
            "host_ms_per_step": timing.host_ms_per_step,
            "peak_memory_bytes": timing.peak_memory_bytes,
            "identical": {
                "requests": self.identical,
                "total": len(self.records),
                "near_ties": sum(d is not None and d.near_tie for d in self.differences),
                "differences": [
                    {"prompt": record.id, **difference.to_dict()}
                    for record, difference in zip(self.records, self.differences, strict=True)
                    if difference is not None
                ],
            },
        }


@dataclass(frozen=True)
class BenchReport:
    """A finished benchmark.

    Attributes:
        manifest: what was run, on what.
        verify_cost: rows to the median milliseconds of a whole engine step.
        cells: one per workload and drafter.
        exact: the rule promises the tokens of plain decoding.
    """

    manifest: RunManifest
    verify_cost: Mapping[int, float]
    cells: Sequence[Cell]
    exact: bool = True

    @property
    def ok(self) -> bool:
        """No request failed; where the rule promises it, none differs by more than a near-tie."""
        return all(not c.failed and (not self.exact or not c.unexplained) for c in self.cells)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            "manifest": self.manifest.to_dict(),
            "verify_cost": {str(rows): ms for rows, ms in self.verify_cost.items()},
            "exact_rule": self.exact,
            "ok": self.ok,
            "runs": [cell.to_dict() for cell in self.cells],
        }

    def to_text(self) -> str:
        """The table for people, and every difference in a line of its own."""
        head = (
            f"{'workload':<18}{'drafter':<14}{'TPOT ms':>9}{'speed-up':>10}{'95% interval':>16}"
            f"{'whole':>8}{'accept':>8}{'rate':>7}{'steps':>8}{'saved':>7}{'same':>10}"
        )
        lines = [head, "-" * len(head)]
        lines += [_row(cell.to_dict()) for cell in self.cells]
        one = self.verify_cost.get(1)
        if one:
            costs = ", ".join(f"{n}: {ms / one:.2f}" for n, ms in self.verify_cost.items())
            lines.append(f"cost of a step by rows, in one-row steps of {one:.2f} ms: {costs}")
        for cell in self.cells:
            for record, difference in zip(cell.records, cell.differences, strict=True):
                if difference is not None:
                    lines.append(_difference(cell, record, difference))
        return "\n".join(lines)


def _row(cell: Mapping[str, Any]) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    interval = cell["speedup"]["ci95"]
    same = cell["identical"]
    return (
        f"{cell['workload']:<18}{cell['drafter']:<14}"
        f"{number(cell['tpot_ms']['p50'], '.2f'):>9}"
        f"{number(cell['speedup']['value'], '.2f'):>9}x"
        f"{'-' if interval is None else f'{interval[0]:.2f} to {interval[1]:.2f}':>16}"
        f"{number(cell['speedup_whole_request']['value'], '.2f'):>7}x"
        f"{number(cell['acceptance_length']['pooled'], '.2f'):>8}"
        f"{number(cell['draft_acceptance_rate'], '.2f'):>7}"
        f"{cell['target_steps']:>8}"
        f"{number(cell['target_step_reduction'], '.0%'):>7}"
        f"{same['requests']:>6}/{same['total']}"
    )


def _difference(cell: Cell, record: RequestRecord, difference: Difference) -> str:
    margin = "none" if difference.margin is None else f"{difference.margin:.2e}"
    verdict = "near-tie" if difference.near_tie else "DIFFERENT"
    return (
        f"{verdict}: {cell.workload} {cell.drafter} {record.id} at output token "
        f"{difference.position}: {difference.plain} against {difference.other}, margin {margin}, "
        f"tolerance {difference.tolerance:.2e}"
    )


def _estimate(estimate: Estimate | None) -> dict[str, Any]:
    if estimate is None:
        return {"value": None, "ci95": None}
    interval = estimate.interval
    ci95 = None if interval is None else [interval.low, interval.high]
    return {"value": estimate.value, "ci95": ci95}


def _percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    found: Summary = summarize(values, percents=PERCENTS)
    return {**found.percentiles, "mean": found.mean}


def _summed(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
