"""The launch checklist: is there evidence for everything that must be known before going live?

Each row is `pass`, `fail` or `missing` and links to what it rests on. Evidence is read from disk,
whatever made it: runs (``samples.jsonl``), preflights, certificates, drills, the audit log; and
from the live verdicts where a gateway is asked. Nothing is measured here.

A drill is a JSON document {"drill": 1, "rows": [{"name": ..., "status": "pass", "detail": ...}]}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from outrider.records.files import RecordFileError, read_json, read_jsonl
from outrider.records.request import InvalidRecord
from outrider.rollout.audit import LOG, Ledger
from outrider.rollout.config import EXACT_RULES, RolloutConfig
from outrider.rollout.gates import read_evidence

Status = Literal["pass", "fail", "missing"]
Document = Mapping[str, Any]

MOST_FILES: Final = 5000
SHORT, LONG = 256, 800  # prompt tokens
HIGH_CONCURRENCY: Final = 8
TAIL_SAMPLES: Final = 100  # the fewest that have a 99th percentile


@dataclass(frozen=True)
class Row:
    """One line of the list.

    Attributes:
        name: what must be known.
        detail: what was found, or what to do.
        link: the evidence, relative to where it was looked for; empty where there is none.
    """

    name: str
    status: Status
    detail: str
    link: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """What was found, each with its link.

    Attributes:
        samples: lines of runs.
        preflights, certificates, drills: documents. A certificate whose seal is broken is none.
        audit: entries of the rollout's log.
        live: the last verdict of each profile, as `Report.to_dict` writes it.
        fed_back: files of the feedback folder.
        faults: files that could not be read, with why.
    """

    samples: tuple[tuple[str, Document], ...] = ()
    preflights: tuple[tuple[str, Document], ...] = ()
    certificates: tuple[tuple[str, Document], ...] = ()
    drills: tuple[tuple[str, Document], ...] = ()
    audit: tuple[Document, ...] = ()
    live: Mapping[str, Document] = field(default_factory=dict)
    fed_back: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


def gather(config: RolloutConfig, *, live: Mapping[str, Document] | None = None) -> Evidence:
    """Read everything in the evidence folder, the gates' files, the log and the feedback folder."""
    found = _Found(config.evidence)
    files = sorted(config.evidence.rglob("*.json*"))[:MOST_FILES]
    gates = config.gates
    named = [p for p in (gates.certificate, gates.preflight, gates.evaluation) if p is not None]
    for path in dict.fromkeys([*files, *(p for p in named if p.exists())]):
        found.read(path)
    audit: tuple[Document, ...] = ()
    try:
        audit = Ledger(config.state).history().entries
    except RecordFileError as fault:
        found.faults.append(str(fault))
    folder = config.feedback.folder
    fed_back = [] if folder is None else sorted(str(path) for path in folder.glob("*.jsonl"))
    return Evidence(
        samples=tuple(found.samples),
        preflights=tuple(found.preflights),
        certificates=tuple(found.certificates),
        drills=tuple(found.drills),
        audit=audit,
        live=dict(live or {}),
        fed_back=tuple(fed_back),
        faults=tuple(found.faults),
    )


class _Found:
    """Sorts files by what they are."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.samples: list[tuple[str, Document]] = []
        self.preflights: list[tuple[str, Document]] = []
        self.certificates: list[tuple[str, Document]] = []
        self.drills: list[tuple[str, Document]] = []
        self.faults: list[str] = []

    def read(self, path: Path) -> None:
        link = str(path.relative_to(self._root) if path.is_relative_to(self._root) else path)
        try:
            if path.suffix == ".jsonl":
                lines = read_jsonl(path).records
                self.samples += [(link, line) for line in lines if line.get("kind") == "sample"]
                return
            document = read_json(path)
        except (RecordFileError, InvalidRecord) as fault:
            self.faults.append(str(fault))
            return
        if "certificate" in document:
            told = read_evidence(path)
            if isinstance(told, str):
                self.faults.append(told)
            else:
                self.certificates.append((link, document))
        elif "check" in document:
            self.preflights.append((link, document))
        elif "drill" in document:
            self.drills.append((link, document))


def checklist(config: RolloutConfig, evidence: Evidence) -> tuple[Row, ...]:
    """Every row of the list, in order."""
    return tuple(check(config, evidence) for check in CHECKS)


def launchable(rows: Iterable[Row]) -> bool:
    """Every row passes."""
    return all(row.status == "pass" for row in rows)


def to_text(rows: Iterable[Row]) -> str:
    """For people."""
    rows = list(rows)
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        link = f"  [{row.link}]" if row.link else ""
        lines.append(f"{row.status:8}{row.name:{width}}  {row.detail}{link}")
    passed = sum(row.status == "pass" for row in rows)
    return "\n".join([*lines, f"{passed} of {len(rows)} pass"])


# -- what the rows ask ------------------------------------------------------------------------


def _needs_two_models(config: RolloutConfig) -> bool:
    """Some profile guesses with weights of its own; lookups have no tokenizer to compare."""
    lookups = ("ngram", "suffix", "replay", "none")
    return any(
        not (p.method or p.drafter or "").startswith(lookups)
        for name, p in config.profiles.items()
        if name in config.canaries and p.speculative
    )


def _preflight(
    name: str, rows: tuple[str, ...], *, any_of: tuple[str, ...]
) -> Callable[[RolloutConfig, Evidence], Row]:
    """A row that rests on rows of a preflight: none may fail, one of ``any_of`` must be there."""

    def check(config: RolloutConfig, evidence: Evidence) -> Row:
        if not _needs_two_models(config):
            return Row(name, "pass", "no profile has a second model")
        found: dict[str, tuple[str, str]] = {}
        for link, document in evidence.preflights:
            for row in document.get("rows", ()):
                if row.get("name") in rows and found.get(row["name"], ("", ""))[0] != "fail":
                    found[row["name"]] = (str(row.get("status")), link)
        if not found:
            return Row(name, "missing", "keep what outrider check --json prints here")
        bad = {row: state for row, (state, _) in found.items() if state == "fail"}
        link = next(iter(found.values()))[1]
        if bad:
            return Row(name, "fail", f"{', '.join(bad)} fails", link)
        if not found.keys() & set(any_of):
            return Row(name, "missing", f"the preflight says nothing on {any_of[0]}", link)
        return Row(name, "pass", f"{', '.join(found)} pass", link)

    return check


def _sides(evidence: Evidence) -> tuple[list[tuple[str, Document]], list[tuple[str, Document]]]:
    """Samples of plain decoding and of speculation, failed ones left out."""
    fine = [(link, s) for link, s in evidence.samples if not s.get("error")]
    plain = [pair for pair in fine if pair[1].get("setting") == "baseline"]
    return plain, [pair for pair in fine if pair[1].get("setting") != "baseline"]


def _sweep(config: RolloutConfig, evidence: Evidence) -> Row:
    name = "sweep done"
    plain, ours = _sides(evidence)
    settings = sorted({str(s.get("setting")) for _, s in ours})
    if not plain or not settings:
        return Row(name, "missing", "run outrider sweep with a baseline and put its folder here")
    link = ours[0][0]
    if len(settings) < 2:
        return Row(name, "missing", f"only {settings[0]} was run; sweep at least two", link)
    return Row(name, "pass", f"{len(settings)} settings: {', '.join(settings[:4])}", link)


def _covered(
    name: str, wanted: Mapping[str, Callable[[Document], bool]], remedy: str
) -> Callable[[RolloutConfig, Evidence], Row]:
    """A row that needs a speculative sample of each kind."""

    def check(config: RolloutConfig, evidence: Evidence) -> Row:
        _, ours = _sides(evidence)
        links: dict[str, str] = {}
        for link, sample in ours:
            for kind, fits in wanted.items():
                if kind not in links and fits(sample):
                    links[kind] = link
        lacking = [kind for kind in wanted if kind not in links]
        if lacking:
            return Row(name, "missing", f"no sample with {', '.join(lacking)}; {remedy}")
        return Row(name, "pass", ", ".join(wanted), next(iter(links.values())))

    return check


def _sampling(key: str, fits: Callable[[float], bool]) -> Callable[[Document], bool]:
    def check(sample: Document) -> bool:
        value = (sample.get("sampling") or {}).get(key)
        return isinstance(value, int | float) and fits(value)

    return check


def _number(sample: Document, key: str) -> float | None:
    value = sample.get(key)
    return value if isinstance(value, int | float) else None


def _between(key: str, low: float, high: float) -> Callable[[Document], bool]:
    def check(sample: Document) -> bool:
        value = _number(sample, key)
        return value is not None and low <= value <= high

    return check


def _baseline(config: RolloutConfig, evidence: Evidence) -> Row:
    name = "baseline TTFT, TPOT and end-to-end compared"
    keys = ("ttft_ms", "tpot_ms", "e2e_ms")
    for side, pairs in zip(("baseline", "speculative"), _sides(evidence), strict=True):
        lacking = [k for k in keys if all(_number(s, k) is None for _, s in pairs)]
        if lacking:
            return Row(name, "missing", f"no {side} sample with {', '.join(lacking)}")
    return Row(name, "pass", "both sides have all three", _sides(evidence)[0][0][0])


def _rejections(config: RolloutConfig, evidence: Evidence) -> Row:
    name = "acceptance length and rejection positions recorded"
    _, ours = _sides(evidence)
    told = [(link, s) for link, s in ours if s.get("accepted") is not None]
    if not told:
        return Row(name, "missing", "no sample tells what was accepted")
    placed = [link for link, s in told if s.get("rejected_by_position") is not None]
    if not placed:
        return Row(name, "missing", "acceptance is told, rejection positions are not", told[0][0])
    return Row(name, "pass", f"{len(placed)} samples", placed[0])


def _tails(config: RolloutConfig, evidence: Evidence) -> Row:
    name = "P95 and P99 watched"
    for profile, report in evidence.live.items():
        times = report.get("canary", {}).get("", {}).get("times", {}).get("tpot_ms", {})
        if times.get("p99") is not None:
            told = f"{profile} live: P95 {times['p95']:.1f}, P99 {times['p99']:.1f} ms a token"
            return Row(name, "pass", told, "live")
    counts = [len(pairs) for pairs in _sides(evidence)]
    if min(counts) >= TAIL_SAMPLES:
        return Row(name, "pass", f"{counts[0]} and {counts[1]} samples", evidence.samples[0][0])
    return Row(name, "missing", f"{min(counts)} samples a side have no P99; {TAIL_SAMPLES} have")


def _memory(config: RolloutConfig, evidence: Evidence) -> Row:
    name = "memory peak, KV use and OOM"
    for profile, report in evidence.live.items():
        cohort = report.get("canary", {}).get("", {})
        if cohort.get("rates", {}).get("out_of_memory"):
            return Row(name, "fail", f"{profile} ran out of memory", "live")
        if cohort.get("memory_bytes") or cohort.get("kv_share") is not None:
            return Row(name, "pass", f"{profile} is read live, no OOM", "live")
    if row := _drilled(evidence, name, ("memory",)):
        return row
    return Row(name, "missing", "no live reading of memory or cache; ask a gateway with --url")


def _drilled(evidence: Evidence, name: str, wanted: tuple[str, ...]) -> Row | None:
    """What drills say on all of ``wanted``; `None` where one of them was not drilled."""
    found: dict[str, tuple[str, str, str]] = {}
    for link, document in evidence.drills:
        for row in document.get("rows", ()):
            if row.get("name") in wanted:
                state, detail = str(row.get("status")), str(row.get("detail", ""))
                found[row["name"]] = (state, detail, link)
    for row_name, (state, detail, link) in found.items():
        if state != "pass":
            return Row(name, "fail", f"{row_name}: {detail or state}", link)
    if len(found) < len(wanted):
        return None
    return Row(name, "pass", f"{', '.join(found)} drilled", next(iter(found.values()))[2])


def _drill(name: str, wanted: tuple[str, ...]) -> Callable[[RolloutConfig, Evidence], Row]:
    def check(config: RolloutConfig, evidence: Evidence) -> Row:
        told = f"no drill of {', '.join(wanted)}"
        return _drilled(evidence, name, wanted) or Row(name, "missing", told)

    return check


def _switch(config: RolloutConfig, evidence: Evidence) -> Row:
    name = "independent limits and the rollback switch tested"
    profiles = [config.profiles[name] for name in config.canaries]
    unbounded = [n for n in config.canaries if config.profiles[n].limits.in_flight is None]
    if row := _drilled(evidence, name, ("switch",)):
        if row.status == "pass" and unbounded:
            return Row(name, "fail", f"{unbounded[0]} has no limits.in_flight of its own")
        return row
    kinds = {str(entry.get("action")) for entry in evidence.audit}
    if kinds >= {"kill", "unkill"} and not unbounded:
        return Row(name, "pass", f"pulled; {len(profiles)} profiles have limits", LOG)
    return Row(name, "missing", "the switch was never pulled; use --drill")


def _compared(config: RolloutConfig, evidence: Evidence) -> Row:
    name = "distribution or regression compared"
    verdicts = [(str(d.get("verdict")), link) for link, d in evidence.certificates]
    if not verdicts:
        return Row(name, "missing", "run outrider certify and put the certificate here")
    failed = [link for verdict, link in verdicts if verdict == "fail"]
    if failed:
        return Row(name, "fail", "a certificate fails", failed[0])
    passed = [link for verdict, link in verdicts if verdict == "pass"]
    if not passed:
        return Row(name, "missing", "certificates are inconclusive", verdicts[0][1])
    return Row(name, "pass", "the certificate passes", passed[0])


def _structured(config: RolloutConfig, evidence: Evidence) -> Row:
    name = "tool calls, JSON and structured output verified"
    for link, document in evidence.certificates:
        for section in document.get("sections", ()):
            if section.get("name") == "features" and section.get("verdict") in ("pass", "fail"):
                state: Status = "pass" if section["verdict"] == "pass" else "fail"
                return Row(name, state, str(section.get("summary", "")), link)
    wanted = {
        "tools": lambda s: bool((s.get("sampling") or {}).get("tools")),
        "response_format": lambda s: bool((s.get("sampling") or {}).get("response_format")),
    }
    return _covered(name, wanted, "run the regression set")(config, evidence)


def _marked(config: RolloutConfig, evidence: Evidence) -> Row:
    name = "no unmarked approximate rule"
    lossy = [n for n, p in config.profiles.items() if p.rule not in EXACT_RULES]
    unmarked = [n for n in lossy if not config.profiles[n].approximate]
    for link, sample in evidence.samples:
        if sample.get("lossless") is False and not any(
            p.approximate for p in config.profiles.values()
        ):
            return Row(name, "fail", f"a sample of {sample.get('setting')} is not lossless", link)
    if unmarked:
        return Row(name, "fail", f"{unmarked[0]} is not marked approximate")
    return Row(name, "pass", "marked: " + (", ".join(lossy) if lossy else "none needed"), "config")


def _fed(config: RolloutConfig, evidence: Evidence) -> Row:
    name = "outliers fed back"
    if config.feedback.folder is None:
        return Row(name, "missing", "feedback.folder is not set")
    if not evidence.fed_back:
        return Row(name, "missing", f"{config.feedback.folder} is empty")
    return Row(name, "pass", f"{len(evidence.fed_back)} files", evidence.fed_back[0])


CHECKS: Final[tuple[Callable[[RolloutConfig, Evidence], Row], ...]] = (
    _preflight("versions bound", ("lock file", "binding"), any_of=("lock file",)),
    _preflight(
        "tokenizer, template, special and stop tokens equal",
        ("vocabulary", "special tokens", "chat template", "stop tokens", "sample texts", "binding"),
        any_of=("vocabulary", "binding"),
    ),
    _sweep,
    _covered(
        "temperature, top-p and top-k covered",
        {
            "temperature 0": _sampling("temperature", lambda v: v == 0),
            "temperature above 0": _sampling("temperature", lambda v: v > 0),
            "top-p": _sampling("top_p", lambda v: v < 1),
            "top-k": _sampling("top_k", lambda v: v > 0),
        },
        "sweep them",
    ),
    _covered(
        "short and long context evaluated",
        {
            f"a prompt of at most {SHORT} tokens": _between("prompt_tokens", 1, SHORT),
            f"a prompt of at least {LONG} tokens": _between("prompt_tokens", LONG, 1e9),
        },
        "add such prompts",
    ),
    _baseline,
    _rejections,
    _tails,
    _covered(
        "low and high concurrency tested",
        {
            "concurrency 1": _between("concurrency", 1, 1),
            f"concurrency {HIGH_CONCURRENCY} or more": _between(
                "concurrency", HIGH_CONCURRENCY, 1e9
            ),
        },
        "sweep with --concurrency",
    ),
    _memory,
    _drill("drafter contention", ("contention",)),
    _drill("cancels, time-outs and retries exercised", ("cancel", "timeout", "retry")),
    _switch,
    _compared,
    _structured,
    _marked,
    _fed,
)


def write_drill(path: Path, rows: Iterable[Row]) -> None:
    """Keep a drill's rows as evidence.

    Raises:
        RecordFileError: it cannot be written.
    """
    document = {"drill": 1, "rows": [row.to_dict() for row in rows]}
    text = json.dumps(document, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise RecordFileError(f"{path} cannot be written: {fault.strerror}") from fault
