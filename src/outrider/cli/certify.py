"""`outrider certify`: the flags of a certificate; what is tested is up to `outrider.evaluate`."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider import __version__
from outrider.cli import options
from outrider.cli.bench import split
from outrider.cli.remote import KEY_VARIABLE
from outrider.cli.session import Loaded, Session, check_drafter
from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.evaluate.certify import Section
    from outrider.evaluate.certify_embedded import SettingEvidence, Subject
    from outrider.evaluate.certify_plan import CertifyPlan
    from outrider.evaluate.certify_remote import RemoteEvidence, Side

PARTS = ("greedy", "distribution", "features")
REMOTE_REQUESTS = 2000
SABOTAGED = 600


def certify(
    context: typer.Context,
    target: Annotated[
        str, typer.Option(help="The model, for the embedded engine.")
    ] = options.DEFAULT_TARGET,
    drafter: options.Drafter = options.DEFAULT_DRAFTER,
    rule: options.Rule = "walk",
    url: Annotated[
        str | None, typer.Option(help="A running server to certify, in place of the engine here.")
    ] = None,
    reference_url: Annotated[
        str | None,
        typer.Option(help="The same model without speculation; else single tokens are asked for."),
    ] = None,
    engine: Annotated[str, typer.Option(help="The server's kind; auto finds out.")] = "auto",
    model: Annotated[str | None, typer.Option(help="Which of the server's models.")] = None,
    parts: Annotated[
        str, typer.Option(help="Of greedy, distribution, features, by comma.")
    ] = ",".join(PARTS),
    requests: Annotated[
        int | None,
        typer.Option(
            help="Sampled requests per setting. Default: what finds a total variation of 0.02 "
            f"with power 0.99; {REMOTE_REQUESTS:,} for a server."
        ),
    ] = None,
    sequential: Annotated[
        bool,
        typer.Option("--sequential", help="Stop a setting once the evidence against it suffices."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the first sampled request.")] = 1,
    weights: options.Weights = "auto",
    device: options.Device = "auto",
    exact: options.Exact = False,
    threads: options.Threads = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the sealed certificate to this file.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write a page for people: .html, else Markdown.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(help="Check the seal of a certificate and show its verdict.")
    ] = None,
) -> None:
    """Test that speculation leaves the output's law unchanged; exit code 1 without a pass."""
    from outrider.evaluate import certify as certificates
    from outrider.evaluate.certify_plan import CertifyPlan, full

    session: Session = context.obj
    if verify is not None:
        document = read_certificate(verify)
        session.out.print(certificates.to_markdown(document), markup=False)
        _exit(document)
        return
    wanted = check_parts(parts)
    for path in (json_file, page):
        if path is not None:
            options.check_writable(path)
    if url is None and reference_url is not None:
        raise InvalidParameter("--reference-url goes with --url; leave it out")
    count = requests if requests is not None else (REMOTE_REQUESTS if url else full())
    plan = CertifyPlan(requests=count, seed=seed, sequential=sequential)
    begin = time.process_time()

    def tell(line: str) -> None:
        session.err.print(line, style="dim", markup=False)

    if url is None:
        check_drafter(drafter)
        loaded = session.model(target, weights=weights, device=device, exact=exact, threads=threads)
        subject, sections = certify_embedded(loaded, drafter, rule, plan, wanted, tell)
    else:
        place = _Place(url, reference_url, engine, model)
        subject, sections = asyncio.run(certify_server(place, _remote(plan), wanted, tell))
    parameters = {
        "parts": list(wanted),
        "requests_per_setting": plan.requests,
        "alpha": plan.alpha,
        "effect": plan.effect,
        "seed": plan.seed,
        "sequential": plan.sequential,
        "settings": [setting.name for setting in plan.settings],
        "cpu_seconds": round(time.process_time() - begin, 1),
    }
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    document = certificates.certificate(subject, parameters, sections, at=at)
    session.out.print(certificates.to_markdown(document), markup=False)
    if json_file is not None:
        options.write_file(json_file, json.dumps(document, indent=2) + "\n")
    if page is not None:
        as_html = page.suffix.lower() in (".html", ".htm")
        write = certificates.to_html if as_html else certificates.to_markdown
        options.write_file(page, write(document))
    _exit(document)


def _exit(document: Mapping[str, Any]) -> None:
    if document["verdict"] != "pass":
        raise typer.Exit(1)


def check_parts(words: str) -> tuple[str, ...]:
    """Raises:
    InvalidParameter: a part that there is not, or none."""
    named = split([words])
    wrong = [word for word in named if word not in PARTS]
    if wrong or not named:
        raise InvalidParameter(f"--parts {words}; use some of {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in named)


def read_certificate(path: Path) -> dict[str, Any]:
    """A certificate whose seal is whole.

    Raises:
        InvalidParameter: it is none, or was changed.
        RecordFileError: it cannot be read.
    """
    from outrider.evaluate.certify import check_seal
    from outrider.records.files import read_json

    document = read_json(path)
    check_seal(document)
    return document


def _remote(plan: CertifyPlan) -> CertifyPlan:
    """Settings that log-probabilities of 20 tokens decide."""
    from outrider.core.law import Setting

    settings = (
        Setting("cool: temperature 0.5, no truncation", 0.5),
        Setting("wide: temperature 1.0, no truncation", 1.0),
        Setting("nucleus: temperature 1.0, top-p 0.8", 1.0, top_p=0.8),
        Setting("narrow: temperature 0.5, top-k 4", 0.5, top_k=4),
    )
    return replace(plan, settings=settings)


# -- the embedded engine --------------------------------------------------------------------------


def certify_embedded(
    loaded: Loaded,
    drafter: str,
    rule: str,
    plan: CertifyPlan,
    parts: tuple[str, ...],
    tell: Callable[[str], None],
) -> tuple[dict[str, Any], list[Section]]:
    """Who was tested, and what was found."""
    from outrider.drafters.identity import drafter_identity
    from outrider.drafters.table import Setting as DrafterSetting
    from outrider.drafters.table import build_drafter
    from outrider.evaluate import certify as certificates
    from outrider.evaluate.certify_embedded import Subject, greedy

    target = loaded.target

    def build(sequences: int, length: int) -> Any:
        setting = DrafterSetting(
            target,
            loaded.tokenizer,
            sequences=sequences,
            context=length,
            source=loaded.source,
        )
        return build_drafter(drafter, setting)

    subject = Subject(target, loaded.tokenizer.encode, drafter, build, rule)
    sections = []
    if "greedy" in parts:
        tell("greedy: answers with and without speculation")
        sections.append(certificates.judge_greedy(greedy(subject, plan)))
    if "distribution" in parts:
        sections.append(_embedded_distribution(subject, plan, tell))
    if "features" in parts:
        tell("features")
        sections.append(certificates.judge_features(_embedded_features(loaded, subject)))
    who = {
        "engine": "outrider (embedded)",
        "version": __version__,
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "precision": target.precision,
        "device": str(target.device),
        "bit_equal_rows": "yes" if target.row_invariant else "no",
        "rule": rule,
        "drafter": drafter,
        "drafter_hash": drafter_identity(drafter, source=loaded.source, name=target.name),
        "guesses_per_step": plan.guesses,
    }
    return who, sections


def _embedded_distribution(
    subject: Subject, plan: CertifyPlan, tell: Callable[[str], None]
) -> Section:
    from outrider.evaluate import certify as certificates
    from outrider.evaluate.certify_embedded import sabotage, sample_settings
    from outrider.evaluate.certify_law import Tally

    evidence: list[SettingEvidence] = sample_settings(subject, plan, progress=tell)
    tell("broken on purpose: must fail")
    broken = sabotage(subject, plan, requests=min(SABOTAGED, plan.requests))
    pooled = Tally("all settings together")
    counts = broken.counts.__class__()
    for found in evidence:
        pooled.merge(found.tallies["all positions"])
        counts += found.counts
    couplings = [
        {"setting": found.setting.name, **coupling}
        for found in evidence
        if (coupling := found.coupling(plan.alpha)) is not None
    ]
    return certificates.judge_distribution(
        certificates.Distribution(
            settings=[(e.setting.name, e.tests(plan.alpha)) for e in evidence],
            nulls=[e.null.test(alpha=plan.alpha) for e in evidence],
            pooled=pooled,
            sabotage=broken.tests(plan.alpha),
            missing=counts.missing,
            counts=vars(counts),
            requests=sum(e.requests for e in evidence),
            couplings=couplings,
            exact=subject.rule == "walk" and subject.target.row_invariant,
            processes=[{"setting": e.setting.name, **e.process.to_dict()} for e in evidence],
        ),
        alpha=plan.alpha,
        effect=plan.effect,
    )


def _embedded_features(loaded: Loaded, subject: Subject) -> list[dict[str, str]]:
    from outrider.engine import Engine, EngineConfig
    from outrider.evaluate.certify_features import probe_features
    from outrider.serve.tool_use import whole_backend

    context = min(256, loaded.target.context_length)
    drafters = {} if subject.drafter == "none" else {subject.drafter: subject.build(1, context)}
    engine = Engine(
        loaded.target,
        drafters=drafters,
        tokenizer=loaded.tokenizer,
        config=EngineConfig(slots=1, context=context, rule=subject.rule),
    )

    async def run() -> list[dict[str, str]]:
        backend = whole_backend(engine, loaded.tokenizer, drafter=subject.drafter)
        try:
            return [feature.to_dict() for feature in await probe_features(backend)]
        finally:
            await backend.close()

    return asyncio.run(run())


# -- a server -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where the servers are."""

    url: str
    reference_url: str | None
    engine: str
    model: str | None


async def certify_server(
    place: _Place, plan: CertifyPlan, parts: tuple[str, ...], tell: Callable[[str], None]
) -> tuple[dict[str, Any], list[Section]]:
    """Who was tested, and what was found."""
    from outrider.backends.connect import connect
    from outrider.evaluate import certify as certificates
    from outrider.evaluate.certify_features import probe_features
    from outrider.evaluate.certify_remote import greedy_remote, introduce

    key = os.environ.get(KEY_VARIABLE)
    opened = []
    try:
        for url in (place.url, place.reference_url):
            if url is not None:
                opened.append(await connect(url, kind=place.engine, model=place.model, api_key=key))
        backend = opened[0]
        sections = []
        if "greedy" in parts or "distribution" in parts:
            sides = [await introduce(one) for one in opened]
            reference = sides[1] if len(sides) > 1 else None
            if "greedy" in parts:
                tell("greedy: every token against the likeliest one at its place")
                rows = await greedy_remote(sides[0], plan, reference=reference)
                table = [_greedy_dict(row) for row in rows]
                unsure = _unsure(sides[0])
                sections.append(certificates.judge_greedy(table, uncertain=unsure))
            if "distribution" in parts:
                sections.append(await _remote_distribution(sides[0], reference, plan, tell))
        if "features" in parts:
            tell("features")
            seen = [feature.to_dict() for feature in await probe_features(backend)]
            sections.append(certificates.judge_features(seen))
        who = {
            "engine": backend.info.kind,
            "version": backend.info.version or "not told",
            "model": backend.info.model,
            "url": place.url,
            "reference": place.reference_url or "single-token requests to the same server",
            "drafter": "the server's own; it tells no hash",
            "notes": list(backend.info.notes),
        }
        return who, sections
    finally:
        for one in opened:
            await one.close()


def _unsure(side: Side) -> str:
    """Why differences on this server may be the test's own fault; empty where they cannot."""
    if side.certain:
        return ""
    return (
        "the server names tokens by their text alone and has no tokenizer endpoint, so contexts "
        "may have been cut otherwise; start it with one, or with token ids in its answers"
    )


def _greedy_dict(row: Any) -> dict[str, Any]:
    from outrider.evaluate.certify_remote import TIE

    difference = None
    if row.position is not None:
        difference = {
            "position": row.position,
            "reference": row.reference,
            "other": row.other,
            "margin": row.margin,
            "tolerance": TIE,
            "near_tie": row.near_tie,
        }
    return {"prompt": row.prompt, "tokens": row.tokens, "accepted": None, "difference": difference}


async def _remote_distribution(
    side: Side, reference: Side | None, plan: CertifyPlan, tell: Callable[[str], None]
) -> Section:
    from outrider.evaluate import certify as certificates
    from outrider.evaluate.certify_law import Tally
    from outrider.evaluate.certify_remote import sabotage_remote, sample_remote

    tell("judged at another temperature: must fail")
    broken = await sabotage_remote(side, plan, requests=min(SABOTAGED, plan.requests))
    evidence: list[RemoteEvidence] = await sample_remote(
        side, plan, reference=reference, progress=tell
    )
    pooled = Tally("all settings together")
    for found in evidence:
        pooled.merge(found.tallies["all positions"])
    drafted = [e.drafted for e in evidence if e.drafted is not None]
    accepted = [e.accepted for e in evidence if e.accepted is not None]
    missing = []
    if drafted and not sum(drafted):
        missing.append("guesses")
    if accepted and not sum(accepted):
        missing.append("accepted guesses")
    notes = [] if drafted else ["the server tells nothing of its guesses: it may not have guessed"]
    notes += [f"{e.setting.name} is refused: {e.refused[0]}" for e in evidence if e.refused]
    undecided = sum(e.undecided for e in evidence)
    if undecided:
        notes.append(f"{undecided} tokens came where the log-probabilities decide no law")
    return certificates.judge_distribution(
        certificates.Distribution(
            settings=[(e.setting.name, e.tests(plan.alpha)) for e in evidence],
            nulls=[e.null.test(alpha=plan.alpha) for e in evidence],
            pooled=pooled,
            sabotage=broken.tests(plan.alpha),
            missing=missing,
            counts={"drafted": sum(drafted), "accepted": sum(accepted)},
            requests=sum(e.requests for e in evidence),
            processes=[{"setting": e.setting.name, **e.process.to_dict()} for e in evidence],
            notes=notes,
            uncertain=_unsure(side),
            failures=[error for e in evidence for error in e.failed],
        ),
        alpha=plan.alpha,
        effect=plan.effect,
    )
