"""The certificate: evidence turned into a verdict, a sealed JSON document, and a page to read.

A certificate says who was tested (engine, version, model, drafter, parameters), what was found and
how small an error the tests would have found. Its seal is a hash over everything else in it: it
shows that nothing was changed afterwards, not who wrote it. Pure functions; no engine is known.
"""

from __future__ import annotations

import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.core.law import ALPHA
from outrider.errors import InvalidParameter
from outrider.evaluate.certify_law import EFFECT, POWER, LawTest, Tally, simulated_power

SCHEMA = 1
SEAL = "sha256"

Verdict = Literal["pass", "fail", "inconclusive", "skipped"]
WORDS: Mapping[Verdict, str] = {
    "pass": "PASS: no difference from the target was found",
    "fail": "FAIL: the output is not the target's",
    "inconclusive": "INCONCLUSIVE: the tests could not show anything",
    "skipped": "SKIPPED",
}


@dataclass(frozen=True)
class Section:
    """One part of a certificate.

    Attributes:
        name: greedy, distribution or features.
        summary: one or two sentences for a person who reads nothing else.
        reasons: what made it fail or inconclusive.
        details: the evidence, JSON-ready.
        rows: a table for people: heading row first.
    """

    name: str
    verdict: Verdict
    summary: str
    reasons: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Distribution:
    """The evidence about sampling, from whatever kind of engine.

    Attributes:
        settings: per setting its name and its tests with speculation.
        nulls: without speculation.
        pooled: all settings' tokens together.
        sabotage: the tests on an engine broken on purpose.
        missing: events that never happened though the tests are about them.
        couplings: per setting what equal seeds showed; empty where the rule promises nothing.
        exact: equal seeds must give equal outputs.
        processes: per setting the sequential test.
        counts: what the drafter did, JSON-ready.
        requests: sampled requests with speculation.
        failures: errors of sampled requests that the engine took and did not answer.
        uncertain: why a failing test may be the test's own fault; empty where it cannot.
    """

    settings: Sequence[tuple[str, Sequence[LawTest]]]
    nulls: Sequence[LawTest]
    pooled: Tally
    sabotage: Sequence[LawTest]
    missing: Sequence[str]
    counts: Mapping[str, Any]
    requests: int
    couplings: Sequence[Mapping[str, Any]] = ()
    exact: bool = False
    processes: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    uncertain: str = ""
    failures: Sequence[str] = ()


def judge_distribution(
    found: Distribution, *, alpha: float = ALPHA, effect: float = EFFECT
) -> Section:
    """The section on sampling: fails on evidence, is inconclusive where evidence is lacking."""
    pooled = found.pooled.test(alpha=alpha)
    tests = [test for _, rows in found.settings for test in rows]
    failed = [test for test in (*tests, pooled) if not test.passed]
    reasons = [f"{t.name}: {describe(t)}" for t in failed]
    differing = sum(int(c["different"]) for c in found.couplings)
    compared = sum(int(c["compared"]) for c in found.couplings)
    if found.exact and differing:
        reasons.append(f"{differing} of {compared} requests differ from plain ones at equal seeds")
    stopped = [p for p in found.processes if p["rejected"]]
    if stopped and not reasons:
        reasons.append("the sequential test has collected more evidence than chance allows")
    verdict: Verdict = "fail" if reasons else "pass"
    if reasons and found.uncertain:
        verdict, reasons = "inconclusive", [found.uncertain, *reasons]
    if found.failures:
        verdict = "fail"
        reasons.append(f"{len(found.failures)} requests failed, the first: {found.failures[0]}")
    doubts = _doubts(found)
    if verdict == "pass" and doubts:
        verdict, reasons = "inconclusive", doubts
    power = simulated_power(
        found.pooled.shares().tolist(), tokens=pooled.tokens, effect=effect, alpha=alpha
    )
    return Section(
        "distribution",
        verdict,
        _distribution_summary(found, pooled, power, effect, differing, compared),
        tuple(reasons),
        {
            "alpha_per_test": alpha,
            "tests": len(tests) + 1,
            "false_alarm_at_most": alpha * (len(tests) + 1 + len(found.nulls)),
            "effect": effect,
            "power_wanted": POWER,
            "power_simulated": power,
            "detectable_total_variation": pooled.detectable,
            "requests": found.requests,
            "pooled": pooled.to_dict(),
            "settings": [
                {"name": name, "tests": [test.to_dict() for test in rows]}
                for name, rows in found.settings
            ],
            "null": [test.to_dict() for test in found.nulls],
            "sabotage": [test.to_dict() for test in found.sabotage],
            "equal_seeds": list(found.couplings),
            "sequential": list(found.processes),
            "counts": dict(found.counts),
            "notes": list(found.notes),
        },
        _distribution_rows(found, pooled),
    )


def _doubts(found: Distribution) -> list[str]:
    doubts = [
        f"without speculation the law is already off ({describe(t)}): the reference or the plain "
        "sampler is wrong"
        for t in found.nulls
        if not t.passed
    ]
    if found.missing:
        doubts.append(
            f"there were no {', no '.join(found.missing)}: choose another drafter or prompts"
        )
    if found.sabotage and all(test.passed for test in found.sabotage):
        doubts.append("the engine that was broken on purpose passed: more requests are needed")
    if not any(test.tokens and not test.empty for _, rows in found.settings for test in rows):
        doubts.append("no setting could be tested")
    return doubts


def describe(test: LawTest) -> str:
    """A test in a few words."""
    if test.impossible:
        return f"{test.impossible} tokens came that have probability 0"
    return f"z = {test.z:,.1f}, p = {test.p_value:.1g} over {test.tokens:,} tokens"


def _distribution_summary(
    found: Distribution,
    pooled: LawTest,
    power: float,
    effect: float,
    differing: int,
    compared: int,
) -> str:
    smallest = "nothing" if pooled.detectable is None else f"{pooled.detectable:.3f}"
    text = (
        f"{pooled.tokens:,} sampled tokens in {len(found.settings)} settings were compared with "
        f"the target's exact probabilities (z = {pooled.z:.1f}). A total-variation error of "
        f"{smallest} would have been found with power {POWER:g} (one of {effect:g}: "
        f"{power:.2f} in simulation)."
    )
    if pooled.detectable is None or pooled.detectable > 1.1 * effect:
        text += f" That is weaker than a full certificate, which finds {effect:g}."
    if compared:
        bound = max(float(c["total_variation_at_most"]) for c in found.couplings)
        text += (
            f" {compared - differing:,} of {compared:,} requests gave the same tokens as plain "
            f"decoding with the same seed, which bounds the error of whole outputs by {bound:.3f}."
        )
    return text


def _distribution_rows(found: Distribution, pooled: LawTest) -> tuple[tuple[str, ...], ...]:
    heading = ("test", "tokens", "z", "p", "finds", "result")
    rows: list[tuple[str, ...]] = [heading]
    for _, tests in found.settings:
        rows += [_test_row(test, test.name) for test in tests if not test.empty]
    rows.append(_test_row(pooled, "all settings together"))
    rows += [_test_row(test, test.name) for test in found.nulls]
    rows += [
        _test_row(test, f"broken on purpose, must fail: {test.name}") for test in found.sabotage[:1]
    ]
    if len(found.sabotage) > 1:
        worst = min(found.sabotage, key=lambda test: test.p_value)
        rows[-1] = _test_row(worst, f"broken on purpose, must fail: {worst.name}")
    return tuple(rows)


def _test_row(test: LawTest, name: str) -> tuple[str, ...]:
    finds = "" if test.detectable is None else f"{test.detectable:.3f}"
    return (
        name,
        f"{test.tokens:,}",
        f"{test.z:,.1f}",
        f"{test.p_value:.2g}",
        finds,
        "within the law" if test.passed else "off",
    )


def judge_greedy(rows: Sequence[Mapping[str, Any]], *, uncertain: str = "") -> Section:
    """The section on greedy answers.

    Args:
        rows: per prompt "prompt", "tokens", "accepted" (or `None`) and "difference": `None`, or
            an object with "position", "margin", "tolerance" and "near_tie".
        uncertain: as in `Distribution`.
    """
    parted = [row for row in rows if row["difference"] is not None]
    wrong = [row for row in parted if not row["difference"]["near_tie"]]
    tokens = sum(int(row["tokens"]) for row in rows)
    accepted = [row["accepted"] for row in rows if row["accepted"] is not None]
    verdict: Verdict = "fail" if wrong else "pass"
    reasons = [_greedy_reason(row) for row in wrong]
    if wrong and uncertain:
        verdict, reasons = "inconclusive", [uncertain, *reasons]
    if not rows or not tokens:
        verdict, reasons = "inconclusive", ["no greedy answer was compared"]
    elif not wrong and accepted and not sum(accepted):
        verdict, reasons = "inconclusive", ["no guess was accepted in any greedy answer"]
    ties = len(parted) - len(wrong)
    summary = (
        f"{len(rows)} greedy answers ({tokens:,} tokens): {len(rows) - len(parted)} equal token by "
        f"token, {ties} part at a near-tie, {len(wrong)} part elsewhere."
    )
    table: list[tuple[str, ...]] = [
        ("prompt", "tokens", "first difference", "margin", "tolerance", "result")
    ]
    table += [_greedy_row(row) for row in rows]
    return Section(
        "greedy", verdict, summary, tuple(reasons), {"prompts": list(rows)}, tuple(table)
    )


def _greedy_reason(row: Mapping[str, Any]) -> str:
    difference = row["difference"]
    margin = difference["margin"]
    told = "beyond all listed tokens" if margin is None else f"{margin:.3f}"
    return (
        f"{_brief(row['prompt'])}: parts at token {difference['position']} with margin {told}, "
        f"tolerance {difference['tolerance']:.3f}"
    )


def _greedy_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    difference = row["difference"]
    if difference is None:
        return (_brief(row["prompt"]), str(row["tokens"]), "none", "", "", "equal")
    margin = difference["margin"]
    return (
        _brief(row["prompt"]),
        str(row["tokens"]),
        str(difference["position"]),
        "" if margin is None else f"{margin:.3f}",
        f"{difference['tolerance']:.3f}",
        "near-tie" if difference["near_tie"] else "differs",
    )


def _brief(text: str, size: int = 40) -> str:
    line = " ".join(text.split())
    return line if len(line) <= size else line[: size - 1] + "…"


def judge_features(rows: Sequence[Mapping[str, str]]) -> Section:
    """The section on features: a field that is ignored in silence fails, a refusal does not.

    Args:
        rows: per feature "name", "outcome" (of `certify_features.OUTCOMES`) and "detail".
    """
    ignored = [row for row in rows if row["outcome"] == "ignored"]
    by = {
        word: sum(row["outcome"] == word for row in rows)
        for word in ("honoured", "refused", "ignored", "unclear")
    }
    verdict: Verdict = "fail" if ignored else "pass"
    reasons = [f"{row['name']} is ignored in silence: {row['detail']}" for row in ignored]
    if not ignored and not by["honoured"]:
        verdict, reasons = "inconclusive", ["no feature could be seen to work"]
    return Section(
        "features",
        verdict,
        ", ".join(f"{count} {word}" for word, count in by.items()) + ".",
        tuple(reasons),
        {"features": [dict(row) for row in rows]},
        (("feature", "outcome", "seen"), *((r["name"], r["outcome"], r["detail"]) for r in rows)),
    )


def skipped(name: str, reason: str) -> Section:
    """A part that was left out."""
    return Section(name, "skipped", reason)


def overall(sections: Sequence[Section]) -> Verdict:
    """Fail beats inconclusive beats pass; skipped parts do not count, unless all are."""
    verdicts = [section.verdict for section in sections]
    for verdict in ("fail", "inconclusive", "pass"):
        if verdict in verdicts:
            return verdict
    return "inconclusive"


def certificate(
    subject: Mapping[str, Any],
    parameters: Mapping[str, Any],
    sections: Sequence[Section],
    *,
    at: str,
) -> dict[str, Any]:
    """The sealed document.

    Args:
        subject: engine, version, target, drafter, their hashes, the machine.
        parameters: of the tests.
        at: when, as ISO 8601.
    """
    document = {
        "certificate": SCHEMA,
        "created": at,
        "verdict": overall(sections),
        "subject": dict(subject),
        "parameters": dict(parameters),
        "sections": [
            {
                "name": section.name,
                "verdict": section.verdict,
                "summary": section.summary,
                "reasons": list(section.reasons),
                "details": _plain(section.details),
                "rows": [list(row) for row in section.rows],
            }
            for section in sections
        ],
    }
    return {**document, SEAL: seal(document)}


def _plain(value: Any) -> Any:
    """JSON has no infinity: such a number becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def seal(document: Mapping[str, Any]) -> str:
    """SHA-256 over everything but the seal, in one canonical form of JSON."""
    content = {key: value for key, value in document.items() if key != SEAL}
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_seal(document: Mapping[str, Any]) -> None:
    """Raises:
    InvalidParameter: it is no certificate, or was changed after it was sealed."""
    if document.get("certificate") != SCHEMA or SEAL not in document:
        raise InvalidParameter("this is no certificate of this version; run outrider certify anew")
    if seal(document) != document[SEAL]:
        raise InvalidParameter(
            "the certificate's content does not match its seal: it was changed afterwards; "
            "run outrider certify anew"
        )


def to_markdown(document: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    lines = [f"# Certificate: {WORDS[document['verdict']]}", ""]
    lines += [f"- {name}: {value}" for name, value in _facts(document)]
    for section in document["sections"]:
        lines += ["", f"## {section['name'].capitalize()}: {section['verdict']}", ""]
        lines += [section["summary"], *(f"- **{reason}**" for reason in section["reasons"])]
        rows = section["rows"]
        if rows:
            lines += ["", _markdown_row(rows[0]), _markdown_row(["---"] * len(rows[0]))]
            lines += [_markdown_row(row) for row in rows[1:]]
    return "\n".join([*lines, "", _how(document), ""])


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Who and when, for people."""
    subject = document["subject"]
    facts = [(name.replace("_", " "), _fact(value)) for name, value in subject.items() if value]
    return [*facts, ("tested", str(document["created"])), ("seal", str(document[SEAL])[:16] + "…")]


def _fact(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _how(document: Mapping[str, Any]) -> str:
    alpha = document["parameters"].get("alpha", ALPHA)
    return (
        "How to read this: speculation must not change what a model says. Greedy answers must be "
        "equal, but where two tokens tie within the numbers' precision. Sampled tokens must "
        "follow the model's probabilities; z within 3 of 0 is what chance gives, and one test "
        f"fails by chance once in {1 / alpha:,.0f} certificates. A field of a request must be "
        "honoured or refused, never ignored. The engine that was broken on purpose shows that "
        "the test can fail."
    )


_COLOURS: Mapping[str, str] = {
    "pass": "#1a7f37",
    "fail": "#c62828",
    "inconclusive": "#9a6700",
    "skipped": "#6e7781",
}
_STYLE = """
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;
margin:2rem auto;padding:0 1rem}h1{padding:.6rem 1rem;border-radius:.4rem;color:#fff}
table{border-collapse:collapse;width:100%;font-size:13px}td,th{border-bottom:1px solid #8885;
padding:.25rem .5rem;text-align:left}dl{display:grid;grid-template-columns:10rem 1fr;gap:.2rem}
dt{opacity:.7}dd{margin:0;overflow-wrap:anywhere}.reason{font-weight:600}details{margin:.5rem 0}
"""


def to_html(document: Mapping[str, Any]) -> str:
    """The page as one file of HTML, without scripts or anything from elsewhere."""
    escape = html.escape
    verdict = document["verdict"]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>Certificate: {escape(verdict)}</title><style>{_STYLE}</style></head><body>",
        f"<h1 style='background:{_COLOURS[verdict]}'>{escape(WORDS[verdict])}</h1><dl>",
        *(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in _facts(document)),
        "</dl>",
    ]
    for section in document["sections"]:
        colour = _COLOURS[section["verdict"]]
        parts.append(
            f"<h2>{escape(section['name'].capitalize())}: <span style='color:{colour}'>"
            f"{escape(section['verdict'])}</span></h2><p>{escape(section['summary'])}</p>"
        )
        parts += [f"<p class='reason'>{escape(reason)}</p>" for reason in section["reasons"]]
        if section["rows"]:
            parts += ["<details open><summary>Evidence</summary>", _html_table(section["rows"])]
            parts.append("</details>")
    parts.append(f"<p><small>{escape(_how(document))}</small></p></body></html>\n")
    return "".join(parts)


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows[1:])
    return f"<table><tr>{cells(rows[0], 'th')}</tr>{body}</table>"
