"""What a run's samples say in numbers: times, rates, acceptance, goodput, and what differs from
another run. Pure functions of a `Run`; the pages of `report_html` and `report_text` show them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.backends.settings import Setting
from outrider.evaluate.recommend import Recommendation, Sample, acceptance, recommend
from outrider.evaluate.runs import Run
from outrider.evaluate.statistics import (
    Array,
    Estimate,
    Pair,
    Speedup,
    bootstrap,
    percentile,
    speedup,
)

PERCENTS = (50, 95, 99)
RESAMPLES = 1000
BLOCK = 4


@dataclass(frozen=True)
class Limits:
    """What a request must keep to be good; `None` for no limit. Milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True)
class CellSummary:
    """One setting at one temperature and load.

    Attributes:
        times: name (ttft_ms, tpot_ms, e2e_ms, queue_ms, gap_p50_ms) to "p50" and so on to its
            estimate, `None` where there are too few samples to say.
        tokens_per_s: output tokens of all requests over the wall time.
        user_tokens_per_s: median over requests of 1000 / TPOT: what one reader sees.
        goodput: share of the requests sent that kept the limits, and per second.
        tau, acceptance_rate: see `recommend`.
        accepted, rejected: by position, 1 first; empty where unknown.
        sources: where acceptance came from, to how many samples.
        stopped: why it was cut short.
    """

    setting: str
    temperature: float
    load: str
    concurrency: int
    requests: int
    failed: int
    cancelled: int
    output_tokens: int
    wall_s: float
    times: Mapping[str, Mapping[str, Estimate | None]]
    tokens_per_s: float | None
    user_tokens_per_s: float | None
    goodput_share: float | None
    goodput_per_s: float | None
    tau: float | None
    acceptance_rate: float | None
    accepted: tuple[int, ...]
    rejected: tuple[int, ...]
    steps: int
    sources: Mapping[str, int]
    peak_cache_use: float | None
    late_ms_max: float
    stopped: str
    errors: Mapping[str, int]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RunSummary:
    """A whole run."""

    run: Run
    cells: tuple[CellSummary, ...]
    recommendation: Recommendation
    limits: Limits
    faults: tuple[str, ...] = field(default=())

    @property
    def settings(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = (self.run.manifest.options.get("plan") or {}).get("settings", {})
        return found


def summarise(run: Run, *, limits: Limits | None = None) -> RunSummary:
    """Everything that is shown of a run."""
    limits = limits or Limits()
    plan = run.manifest.options.get("plan") or {}
    settings = {name: Setting.from_dict(s) for name, s in plan.get("settings", {}).items()}
    groups: dict[tuple[float, int, str, str], list[Sample]] = defaultdict(list)
    for line in run.samples:
        key = (float(line["temperature"]), int(line["concurrency"]), str(line["load"]))
        groups[(*key, str(line["setting"]))].append(line)
    order = list(settings)
    keys = sorted(groups, key=lambda k: (*k[:3], order.index(k[3]) if k[3] in order else 99))
    cells = tuple(_cell(groups[key], _around(run, groups[key][0]), limits) for key in keys)
    found = recommend(run.samples, settings)
    return RunSummary(run, cells, found, limits, tuple(_faults(run, cells)))


def _faults(run: Run, cells: Sequence[CellSummary]) -> list[str]:
    """What keeps the numbers from being the whole truth."""
    found = run.faults()
    if not run.samples:
        found.append("the run holds no sample")
    failed = sum(cell.failed for cell in cells)
    if failed:
        found.append(f"{failed} of {len(run.samples)} requests failed")
    silent = sum(s.get("completion_tokens") is None and not s.get("error") for s in run.samples)
    if silent:
        found.append(f"{silent} answers came without usage: their tokens are unknown")
    found += [f"{c.setting} {c.load}: {c.stopped}" for c in cells if c.stopped]
    found += [
        f"{line['setting']} {line['load']}: {line['stopped']}"
        for line in run.cells
        if str(line.get("stopped", "")).startswith("skipped")
    ]
    if _in_blocks(run):
        found.append(
            "each setting was measured in one block of time: a change of the machine's load looks "
            "like a difference, and no interval knows of it; measure several rounds (--repeats)"
        )
    told = Counter(note for s in run.samples for note in s.get("notes", ()))
    found += [f"{times} x {note}" for note, times in told.most_common(8)]
    return list(dict.fromkeys([*found, *(note for cell in cells for note in cell.notes)]))


def _in_blocks(run: Run) -> bool:
    """Several settings, each with a single turn of several prompts."""
    turns = Counter((c["setting"], c["temperature"], c["load"]) for c in run.cells)
    settings = {setting for setting, _, _ in turns}
    most = max((int(c.get("requests") or 0) for c in run.cells), default=0)
    return len(settings) > 1 and max(turns.values()) == 1 and most > BLOCK


def _around(run: Run, line: Sample) -> list[Mapping[str, Any]]:
    key = (line["setting"], line["temperature"], line["load"])
    return [c for c in run.cells if (c["setting"], c["temperature"], c["load"]) == key]


def _cell(
    lines: Sequence[Sample], around: Sequence[Mapping[str, Any]], limits: Limits
) -> CellSummary:
    first = lines[0]
    ended = [s for s in lines if s.get("finish_reason") == "cancelled"]
    fine = [s for s in lines if not s.get("error") and s not in ended]
    wall = sum(float(cell.get("wall_s") or 0) for cell in around)
    tokens = sum(s.get("completion_tokens") or 0 for s in fine)
    tpot = [float(s["tpot_ms"]) for s in fine if s.get("tpot_ms")]
    tau, rate = acceptance(fine)
    good = sum(_good(s, limits) for s in fine)
    asked = len(lines) - len(ended)
    timed = sum(cell.get("requests") or 0 for cell in around)
    cache = [c["peak_cache_use"] for c in around if c.get("peak_cache_use") is not None]
    return CellSummary(
        setting=str(first["setting"]),
        temperature=float(first["temperature"]),
        load=str(first["load"]),
        concurrency=int(first["concurrency"]),
        requests=len(lines),
        failed=sum(bool(s.get("error")) for s in lines),
        cancelled=len(ended),
        output_tokens=tokens,
        wall_s=wall,
        times={name: _percentiles(fine, name) for name in TIMES},
        tokens_per_s=sum(cell.get("output_tokens") or 0 for cell in around) / wall
        if wall
        else None,
        user_tokens_per_s=1000 / float(np.median(tpot)) if tpot else None,
        goodput_share=good / asked if asked else None,
        goodput_per_s=good / wall if wall and timed == len(lines) else None,
        tau=tau,
        acceptance_rate=rate,
        accepted=_summed(fine, "accepted_by_position"),
        rejected=_summed(fine, "rejected_by_position"),
        steps=sum(s.get("target_steps") or 0 for s in fine),
        sources=Counter(str(s.get("acceptance_source", "none")) for s in fine),
        peak_cache_use=max(cache, default=None),
        late_ms_max=max((float(s.get("late_ms") or 0) for s in lines), default=0.0),
        stopped="; ".join(dict.fromkeys(c["stopped"] for c in around if c.get("stopped"))),
        errors=Counter(str(s["error"]) for s in lines if s.get("error")),
        notes=tuple(dict.fromkeys(note for cell in around for note in cell.get("notes", ()))),
    )


TIMES = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "gap_p50_ms")


def _good(line: Sample, limits: Limits) -> bool:
    for name in ("ttft_ms", "tpot_ms"):
        most, value = getattr(limits, name), line.get(name)
        if most is not None and (value is None or value > most):
            return False
    return True


def _summed(lines: Sequence[Sample], name: str) -> tuple[int, ...]:
    rows = [line[name] for line in lines if line.get(name)]
    depth = max((len(row) for row in rows), default=0)
    return tuple(sum(row[p] for row in rows if p < len(row)) for p in range(depth))


def _percentiles(lines: Sequence[Sample], name: str) -> dict[str, Estimate | None]:
    pairs = [(str(s["id"]), float(s[name])) for s in lines if s.get(name) is not None]
    return {f"p{p}": quantile(pairs, p / 100) for p in PERCENTS}


def quantile(values: Sequence[tuple[str, float]], q: float, *, seed: int = 0) -> Estimate | None:
    """A quantile of (prompt, value) with its interval by prompt; `None` with too few values."""
    if percentile([v for _, v in values], q) is None:
        return None
    ranked = sorted(values, key=lambda pair: pair[1])
    prompts = list(dict.fromkeys(prompt for prompt, _ in values))
    place = {prompt: i for i, prompt in enumerate(prompts)}
    owner_N = np.array([place[prompt] for prompt, _ in ranked])
    sorted_N = np.array([v for _, v in ranked])

    def statistic(weights_BC: Array) -> Array:
        heap_BN = np.cumsum(weights_BC[:, owner_N], axis=1)
        place_B1 = q * (heap_BN[:, -1:] - 1)  # as `PERCENTILE_METHOD` has it, from 0
        below_B1 = np.floor(place_B1 + 1e-9)
        last = len(sorted_N) - 1
        low_B = sorted_N[np.minimum((heap_BN <= below_B1).sum(axis=1), last)]
        high_B = sorted_N[np.minimum((heap_BN <= below_B1 + 1).sum(axis=1), last)]
        found_B: Array = low_B + (place_B1 - below_B1)[:, 0] * (high_B - low_B)
        return found_B

    return bootstrap(statistic, len(prompts), seed=seed, samples=RESAMPLES, level=0.95)


# -- two runs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A setting in which two runs differ; a comparison is fair where only the wanted ones do."""

    name: str
    first: str
    second: str


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        differences: of everything that decides the numbers.
        cells: (setting, temperature, load) to the speed-up of the second over the first, paired by
            prompt and repeat; `None` where they share none.
        same_outputs: (equal, compared) outputs.
    """

    differences: tuple[Difference, ...]
    cells: Mapping[tuple[str, float, str], Speedup | None]
    same_outputs: tuple[int, int]


def compare(first: Run, second: Run) -> Comparison:
    """The second run against the first."""
    groups: list[dict[tuple[str, float, str], dict[Any, Sample]]] = [{}, {}]
    for run, group in zip((first, second), groups, strict=True):
        for s in run.samples:
            key = (str(s["setting"]), float(s["temperature"]), str(s["load"]))
            group.setdefault(key, {})[s["id"], s["repeat"]] = s
    cells: dict[tuple[str, float, str], Speedup | None] = {}
    equal = compared = 0
    for key in groups[0]:
        if key not in groups[1]:
            continue
        pairs = []
        for sample, before in groups[0][key].items():
            after = groups[1][key].get(sample)
            if after is None:
                continue
            if before.get("output_sha256") and after.get("output_sha256"):
                compared += 1
                equal += before["output_sha256"] == after["output_sha256"]
            if _counts(before) and _counts(after):
                pairs.append(
                    Pair(
                        sample[0],
                        before["e2e_ms"] / 1000,
                        after["e2e_ms"] / 1000,
                        before["completion_tokens"],
                        after["completion_tokens"],
                    )
                )
        cells[key] = speedup(pairs, samples=RESAMPLES) if pairs else None
    return Comparison(tuple(differences(first, second)), cells, (equal, compared))


def _counts(line: Sample) -> bool:
    return bool(
        not line.get("error")
        and line.get("finish_reason") != "cancelled"
        and line.get("completion_tokens")
        and line.get("e2e_ms")
    )


def differences(first: Run, second: Run) -> list[Difference]:
    """Settings of the two that do not agree: plan, versions, machine, target, engine."""
    flat = [_flat(_facts(run)) for run in (first, second)]
    names = dict.fromkeys([*flat[0], *flat[1]])
    return [
        Difference(name, flat[0].get(name, "-"), flat[1].get(name, "-"))
        for name in names
        if flat[0].get(name) != flat[1].get(name)
    ]


def _facts(run: Run) -> dict[str, Any]:
    manifest = run.manifest.to_dict()
    engines = sorted({f"{s.get('engine')} {s.get('version')}" for s in run.samples})
    models = sorted({str(s.get("model")) for s in run.samples})
    kept = ("versions", "commit", "machine", "threads", "seed", "target", "options", "load_start")
    return {"engine": engines, "model": models, **{name: manifest.get(name) for name in kept}}


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, inner in value.items():
            found |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
        return found
    return {prefix: str(value)}
