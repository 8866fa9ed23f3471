"""From samples to a setting: which way to guess pays, where, by how much, and how sure one may be.

Pure functions of a run's sample lines; nothing here measures. Every comparison is paired: the same
prompt at the same load and temperature, with and without guesses. Intervals resample prompts, and
are widened for the number of settings that compete (Bonferroni), since the best of many looks good
by luck alone. A setting is recommended only if the whole interval lies above 1.

Words: speed-up over the baseline of the same cell; tau is output tokens per target step; the *cost*
of a setting is tau / speed-up of decoding: what its step takes, in plain steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from outrider.backends.settings import BASELINE, Setting
from outrider.evaluate.statistics import MIN_PROMPTS, Estimate, Pair, Speedup, speedup

Sample = Mapping[str, Any]
CellKey = tuple[float, str]

LEVEL = 0.95
ALIKE = 0.03
TOO_CHEAP = 0.9
DRIFT = 0.05
RESAMPLES = 4000


@dataclass(frozen=True)
class Split:
    """Where a step's time goes, in plain steps, and the speed-up that follows from it.

    Attributes:
        v, d, o: target pass, drafting, everything else.
        expected: tau / (v + d + o).
    """

    v: float
    d: float
    o: float
    expected: float


@dataclass(frozen=True)
class Verdict:
    """One setting at one load and temperature, against the baseline there.

    Attributes:
        whole: speed-up of whole requests, prefill and queue included: what a user waits.
        decode: speed-up behind the first token; `None` where a stream told too little.
        pays: the whole interval of `whole` lies above 1; `None` with too few prompts to say.
        tau: output tokens per target step; `None` where the engine does not tell acceptance.
        acceptance_rate: accepted of drafted.
        cost: what a step takes, in plain steps; also the tau at which the setting breaks even.
        break_even_rate: acceptance rate at which it breaks even, all else equal.
        split: see `Split`; only where the engine tells its times.
        families: speed-up of whole requests by family.
        same_outputs: (equal, compared) outputs of greedy pairs.
        pairs, prompts, failed: how many.
    """

    setting: str
    temperature: float
    load: str
    concurrency: int
    whole: Estimate | None
    decode: Estimate | None
    pays: bool | None
    tau: float | None
    acceptance_rate: float | None
    cost: float | None
    break_even_rate: float | None
    split: Split | None
    families: Mapping[str, Estimate]
    same_outputs: tuple[int, int]
    pairs: int
    prompts: int
    failed: int


@dataclass(frozen=True)
class Choice:
    """The best setting at one load and temperature.

    Attributes:
        setting: its name; "baseline" where nothing pays.
        speedup: of whole requests; 1 for the baseline.
        reason: one sentence.
    """

    temperature: float
    load: str
    concurrency: int
    setting: str
    speedup: Estimate | None
    reason: str


@dataclass(frozen=True)
class Crossover:
    """Where a setting stops paying as the load grows.

    Attributes:
        setting: the one that is best at the smallest load.
        concurrency: interpolated where its speed-up crosses 1; `None` if it does not.
        text: for people.
    """

    temperature: float
    setting: str
    concurrency: float | None
    text: str


@dataclass(frozen=True)
class Recommendation:
    """What a sweep says.

    Attributes:
        verdicts: every setting in every cell.
        choices: the best per cell.
        crossovers: per temperature.
        schedule: (from, to, tokens) by batch size for the recommended method, 0 for none.
        setting: the one to use if only one can be chosen: the best at the smallest load of the
            first temperature. `None` if nothing pays.
        notes: what a reader of the numbers must know.
    """

    verdicts: tuple[Verdict, ...]
    choices: tuple[Choice, ...]
    crossovers: tuple[Crossover, ...]
    schedule: tuple[tuple[int, int, int], ...]
    setting: Setting | None
    notes: tuple[str, ...] = field(default=())

    @property
    def pays(self) -> bool:
        return self.setting is not None

    def headline(self) -> str:
        """The verdict in one sentence."""
        if self.setting is None:
            if not self.verdicts:
                return "Nothing was compared: the run holds no setting beside the baseline."
            if all(v.pays is None for v in self.verdicts):
                return f"Too little was measured to say: intervals need {MIN_PROMPTS} prompts."
            return "Nothing pays here: use plain decoding."
        choice = next(c for c in self.choices if c.setting == self.setting.name)
        gain = said(choice.speedup)
        temperature = f" at temperature {choice.temperature:g}"
        doubt = " Doubtful: see the notes." if self._doubtful(choice) else ""
        return f"Use {self.setting.name}: {gain} at {choice.load}{temperature}.{doubt}"

    def _doubtful(self, choice: Choice) -> bool:
        """The numbers behind the choice cannot be right."""
        return any(
            v.cost is not None and v.cost < TOO_CHEAP
            for v in self.verdicts
            if (v.setting, v.temperature, v.load)
            == (choice.setting, choice.temperature, choice.load)
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "headline": self.headline(),
            "pays": self.pays,
            "setting": None if self.setting is None else self.setting.to_dict(),
            "schedule": [list(entry) for entry in self.schedule],
            "choices": [asdict(choice) for choice in self.choices],
            "crossovers": [asdict(crossover) for crossover in self.crossovers],
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "notes": list(self.notes),
        }

    def to_text(self) -> str:
        """For a terminal."""
        lines = [self.headline(), ""]
        head = (
            f"{'setting':<24}{'temp':>6}{'load':>8}{'speed-up':>10}{'95% interval':>16}"
            f"{'decode':>8}{'tau':>7}{'cost':>7}{'accepted':>10}{'break-even':>12}"
        )
        lines += [head, "-" * len(head), *(_row(v) for v in self.verdicts), ""]
        lines += [f"{c.load}, temperature {c.temperature:g}: {c.reason}" for c in self.choices]
        lines += [c.text for c in self.crossovers]
        lines += _family_lines(self)
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def said(estimate: Estimate | None) -> str:
    """A speed-up in words."""
    if estimate is None:
        return "unknown"
    interval = estimate.interval
    if interval is None:
        return f"{estimate.value:.2f}x (no interval: too few prompts)"
    return f"{estimate.value:.2f}x ({interval.low:.2f} to {interval.high:.2f})"


def recommend(
    samples: Iterable[Sample],
    settings: Mapping[str, Setting],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Recommendation:
    """Judge the samples of a sweep.

    Args:
        settings: by name; their tokens decide between settings that are equally fast.
    """
    cells: dict[CellKey, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        key = (float(sample["temperature"]), str(sample["load"]))
        cells[key][str(sample["setting"])].append(sample)
    notes: list[str] = []
    verdicts: list[Verdict] = []
    choices: list[Choice] = []
    for key in sorted(cells, key=lambda k: (k[0], _concurrency(cells[k]), k[1])):
        groups = cells[key]
        rivals = [name for name in groups if name != BASELINE]
        notes += _drift(groups.get(BASELINE, ()), key)
        if BASELINE not in groups:
            if rivals:
                notes.append(f"{key[1]} at temperature {key[0]:g} has no baseline: not judged")
            continue
        level = 1 - (1 - LEVEL) / max(1, len(rivals))
        judged = [
            _verdict(groups[BASELINE], groups[name], name, key, level, seed, resamples)
            for name in rivals
        ]
        verdicts += judged
        if judged:
            choices.append(_choose(judged, settings, key))
    crossovers = _crossovers(verdicts, choices)
    best = next((c for c in choices if c.setting != BASELINE), None)
    setting = None if best is None else settings.get(best.setting)
    schedule = () if best is None else _schedule(verdicts, settings, best)
    odd = [v for v in verdicts if v.cost is not None and v.cost < TOO_CHEAP]
    if odd:
        names = ", ".join(dict.fromkeys(f"{v.setting} at {v.load}" for v in odd))
        notes.append(
            f"{names}: a step with guesses cannot be cheaper than a plain one; the machine's load "
            "changed between them: measure more rounds, or on a quiet machine"
        )
    unequal = sum(v.same_outputs[1] - v.same_outputs[0] for v in verdicts)
    if unequal:
        notes.append(
            f"{unequal} greedy outputs differ from the baseline's; run outrider certify to learn "
            "whether these are near-ties"
        )
    return Recommendation(
        verdicts=tuple(verdicts),
        choices=tuple(choices),
        crossovers=tuple(crossovers),
        schedule=schedule,
        setting=setting,
        notes=tuple(dict.fromkeys(notes)),
    )


def _drift(plain: Sequence[Sample], key: CellKey) -> list[str]:
    """Did the baseline itself change from round to round? Then so did the machine."""
    rounds: dict[int, dict[str, float]] = defaultdict(dict)
    for sample in plain:
        timed = _time(sample, decode=False)
        if timed is not None:
            rounds[int(sample["repeat"])][str(sample["id"])] = timed[0] / timed[1]
    first = rounds.get(0, {})
    found = []
    for number in sorted(rounds):
        common = first.keys() & rounds[number].keys()
        if number and common:
            change = sum(rounds[number][id] for id in common) / sum(first[id] for id in common) - 1
            if abs(change) > DRIFT:
                found.append(
                    f"the baseline at {key[1]} took {change:+.0%} time per token in round "
                    f"{number + 1}: the machine's load changed, trust small differences less"
                )
    return found


def _concurrency(groups: Mapping[str, Sequence[Sample]]) -> int:
    return min(int(sample["concurrency"]) for group in groups.values() for sample in group)


def paired(plain: Sequence[Sample], other: Sequence[Sample], *, decode: bool = False) -> list[Pair]:
    """Samples of the same prompt and repeat, both without a fault, with times in seconds.

    Args:
        decode: leave out everything up to the first token.
    """
    by_key = {(s["id"], s["repeat"]): s for s in plain}
    pairs = []
    for sample in other:
        partner = by_key.get((sample["id"], sample["repeat"]))
        if partner is None:
            continue
        a, b = _time(partner, decode=decode), _time(sample, decode=decode)
        if a is not None and b is not None:
            pairs.append(Pair(sample["id"], a[0], b[0], a[1], b[1]))
    return pairs


def _time(sample: Sample, *, decode: bool) -> tuple[float, int] | None:
    """Seconds and tokens of a sample that counts."""
    tokens, e2e = sample.get("completion_tokens"), sample.get("e2e_ms")
    if sample.get("error") or not tokens or not e2e:
        return None
    if sample.get("finish_reason") == "cancelled":
        return None
    if not decode:
        return e2e / 1000, tokens
    tpot = sample.get("tpot_ms")
    return None if not tpot else (tpot * (tokens - 1) / 1000, tokens - 1)


def _verdict(
    plain: Sequence[Sample],
    other: Sequence[Sample],
    name: str,
    key: CellKey,
    level: float,
    seed: int,
    resamples: int,
) -> Verdict:
    whole = _speedup(paired(plain, other), level, seed, resamples)
    decode = _speedup(paired(plain, other, decode=True), level, seed, resamples)
    fine = [s for s in other if _time(s, decode=False) is not None]
    tau, rate = acceptance(fine)
    speed = decode.total.value if decode is not None else None
    cost = tau / speed if tau is not None and speed else None
    interval = whole.total.interval if whole is not None else None
    return Verdict(
        setting=name,
        temperature=key[0],
        load=key[1],
        concurrency=int(other[0]["concurrency"]),
        whole=None if whole is None else whole.total,
        decode=None if decode is None else decode.total,
        pays=None if interval is None else interval.low > 1,
        tau=tau,
        acceptance_rate=rate,
        cost=cost,
        break_even_rate=_break_even(tau, rate, cost),
        split=split(plain, fine, tau),
        families=_families(plain, other, level, seed, resamples),
        same_outputs=_same(plain, other),
        pairs=0 if whole is None else whole.pairs,
        prompts=0 if whole is None else whole.prompts,
        failed=sum(bool(s.get("error")) for s in other),
    )


def _speedup(pairs: Sequence[Pair], level: float, seed: int, resamples: int) -> Speedup | None:
    return speedup(pairs, seed=seed, samples=resamples, level=level) if pairs else None


def acceptance(samples: Sequence[Sample]) -> tuple[float | None, float | None]:
    """(tau, accepted of drafted), pooled over samples that tell them."""
    told = [s for s in samples if s.get("target_steps") and s.get("completion_tokens")]
    if not told:
        return None, None
    tau = sum(s["completion_tokens"] for s in told) / sum(s["target_steps"] for s in told)
    exact = [s for s in told if s.get("drafted") is not None and not s.get("drafted_is_nominal")]
    drafted = sum(s["drafted"] for s in exact)
    return tau, sum(s["accepted"] or 0 for s in exact) / drafted if drafted else None


def _break_even(tau: float | None, rate: float | None, cost: float | None) -> float | None:
    """tau - 1 is proportional to the acceptance rate where as much is drafted per step."""
    if tau is None or rate is None or cost is None or tau <= 1 or rate <= 0:
        return None
    return max(0.0, rate * (cost - 1) / (tau - 1))


def split(plain: Sequence[Sample], other: Sequence[Sample], tau: float | None) -> Split | None:
    """Where the time of a step goes, where both sides tell their times."""
    base, mine = _per_step(plain), _per_step(other)
    if base is None or mine is None or tau is None:
        return None
    step = sum(base)
    if step <= 0:
        return None
    d, v, o = (part / step for part in mine)
    return Split(v=v, d=d, o=o, expected=tau / (v + d + o))


def _per_step(samples: Sequence[Sample]) -> tuple[float, float, float] | None:
    """Milliseconds per target step: drafting, target pass, the rest."""
    told = [
        s
        for s in samples
        if not s.get("error") and s.get("target_steps") and "verify_ms" in (s.get("told") or {})
    ]
    steps = sum(s["target_steps"] for s in told)
    if not steps:
        return None
    draft, verify, host = (
        sum(s["told"][name] for s in told) / steps for name in ("draft_ms", "verify_ms", "host_ms")
    )
    return draft, verify, host


def _families(
    plain: Sequence[Sample], other: Sequence[Sample], level: float, seed: int, resamples: int
) -> dict[str, Estimate]:
    family = {s["id"]: str(s["family"]) for s in other}
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in paired(plain, other):
        groups[family[str(pair.prompt)]].append(pair)
    return {
        name: speedup(pairs, seed=seed, samples=resamples, level=level).total
        for name, pairs in sorted(groups.items())
    }


def _same(plain: Sequence[Sample], other: Sequence[Sample]) -> tuple[int, int]:
    """(equal, compared) among greedy pairs that both have an output."""
    known = {(s["id"], s["repeat"]): s for s in plain}
    equal = compared = 0
    for sample in other:
        partner = known.get((sample["id"], sample["repeat"]))
        if partner is None or _time(sample, decode=False) is None:
            continue
        own = (sample.get("sampling") or {}).get("temperature", sample["temperature"])
        mine, theirs = sample.get("output_sha256"), partner.get("output_sha256")
        if own == 0 and mine and theirs:
            compared += 1
            equal += mine == theirs
    return equal, compared


def _choose(verdicts: Sequence[Verdict], settings: Mapping[str, Setting], key: CellKey) -> Choice:
    """The fastest that surely pays; among those within `ALIKE` of it the one that guesses least."""
    concurrency = verdicts[0].concurrency
    winners = [v for v in verdicts if v.pays and v.whole is not None]
    if not winners:
        known = [v for v in verdicts if v.whole is not None]
        if all(v.pays is None for v in verdicts):
            reason = f"too few prompts to say anything ({MIN_PROMPTS} are needed)"
        else:
            best = max(known, key=lambda v: v.whole.value if v.whole else 0.0)
            reason = f"nothing pays: the best, {best.setting}, is {said(best.whole)}"
        return Choice(*key, concurrency, setting=BASELINE, speedup=None, reason=reason)
    top = max(v.whole.value for v in winners if v.whole)
    close = [v for v in winners if v.whole and v.whole.value >= top * (1 - ALIKE)]

    def guesses(verdict: Verdict) -> tuple[float, float]:
        setting = settings.get(verdict.setting)
        tokens = math.inf if setting is None or setting.tokens is None else setting.tokens
        return tokens, -(verdict.whole.value if verdict.whole else 0.0)

    best = min(close, key=guesses)
    others = len(close) - 1
    also = f"; {others} more within {ALIKE:.0%}, this one guesses least" if others else ""
    reason = f"{best.setting} is {said(best.whole)}{also}"
    return Choice(*key, concurrency, setting=best.setting, speedup=best.whole, reason=reason)


def _crossovers(verdicts: Sequence[Verdict], choices: Sequence[Choice]) -> list[Crossover]:
    found = []
    for temperature in dict.fromkeys(c.temperature for c in choices):
        first = next((c for c in choices if c.temperature == temperature), None)
        if first is None or first.setting == BASELINE:
            continue
        line = sorted(
            (v.concurrency, v.whole.value)
            for v in verdicts
            if v.setting == first.setting and v.temperature == temperature and v.whole
        )
        found.append(_crossover(temperature, first.setting, line))
    return found


def _crossover(temperature: float, setting: str, line: Sequence[tuple[int, float]]) -> Crossover:
    """Where a speed-up falls through 1, between two loads along the logarithm of both."""
    name = f"{setting} at temperature {temperature:g}"
    for (low, fast), (high, slow) in pairwise(line):
        if fast > 1 >= slow and high > low:
            part = math.log(fast) / (math.log(fast) - math.log(slow))
            at = math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
            text = f"{name} stops paying near {at:.1f} requests at once"
            return Crossover(temperature, setting, at, text)
    most = line[-1][0] if line else 0
    return Crossover(temperature, setting, None, f"{name} still pays at {most}, the most measured")


def _schedule(
    verdicts: Sequence[Verdict], settings: Mapping[str, Setting], best: Choice
) -> tuple[tuple[int, int, int], ...]:
    """Tokens by batch size for the recommended method: the best of that method at each load.

    A range ends at the load that was measured: what pays there pays below it too, as far as the
    gain falls with the load.
    """
    method = settings[best.setting].method if best.setting in settings else None
    loads: dict[int, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        setting = settings.get(verdict.setting)
        same = verdict.temperature == best.temperature and setting is not None
        if same and setting is not None and setting.method == method and setting.tokens is not None:
            loads[verdict.concurrency].append(verdict)
    entries: list[tuple[int, int, int]] = []
    start = 1
    for concurrency in sorted(loads):
        paying = [v for v in loads[concurrency] if v.pays and v.whole]
        top = max(paying, key=lambda v: v.whole.value if v.whole else 0.0, default=None)
        tokens = 0 if top is None else (settings[top.setting].tokens or 0)
        if entries and entries[-1][2] == tokens:
            entries[-1] = (entries[-1][0], concurrency, tokens)
        else:
            entries.append((start, concurrency, tokens))
        start = concurrency + 1
    return tuple(entries)


def _row(v: Verdict) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    interval = v.whole.interval if v.whole else None
    between = "-" if interval is None else f"{interval.low:.2f} to {interval.high:.2f}"
    return (
        f"{v.setting:<24}{v.temperature:>6g}{v.load:>8}"
        f"{number(v.whole.value if v.whole else None, '.2f'):>9}x{between:>16}"
        f"{number(v.decode.value if v.decode else None, '.2f'):>7}x"
        f"{number(v.tau, '.2f'):>7}{number(v.cost, '.2f'):>7}"
        f"{number(v.acceptance_rate, '.0%'):>10}{number(v.break_even_rate, '.0%'):>12}"
    )


def _family_lines(found: Recommendation) -> list[str]:
    """Winners and losers of each chosen setting; where none was, of the fastest."""
    lines = []
    for choice in found.choices:
        here = [
            v
            for v in found.verdicts
            if (v.temperature, v.load) == (choice.temperature, choice.load) and v.whole
        ]
        chosen = [v for v in here if v.setting == choice.setting]
        best = max(chosen or here, key=lambda v: v.whole.value if v.whole else 0.0, default=None)
        if best is None or len(best.families) < 2:
            continue
        ranked = sorted(best.families.items(), key=lambda pair: -pair[1].value)
        told = ", ".join(f"{name} {e.value:.2f}x" for name, e in ranked)
        lines.append(f"{best.setting} at {best.load} by family: {told}")
        sure = [name for name, e in ranked if e.interval is not None and e.interval.low > 1]
        if choice.setting == BASELINE and sure:
            lines.append(f"  {', '.join(sure)} would gain with a profile of their own")
    return lines
