"""`outrider check`: does a drafter fit its target? The flags; the rows come from `evaluate`."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options
from outrider.cli.remote import KEY_VARIABLE
from outrider.cli.session import Loaded, Session, check_drafter
from outrider.errors import DrafterMismatch, InvalidParameter, ModelError, OutriderError

if TYPE_CHECKING:
    from outrider.evaluate.preflight import ModelFacts, Report, Row

CONTEXT = 2048


def check(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="The model.")] = options.DEFAULT_TARGET,
    drafter: options.Drafter = options.DEFAULT_DRAFTER,
    lock: Annotated[
        Path | None,
        typer.Option(help="Bind the pair by hashes: written where it is absent, else compared."),
    ] = None,
    floor: Annotated[
        float, typer.Option(help="Least share of first guesses that easy text must accept.")
    ] = 0.05,
    slots: Annotated[int, typer.Option(help="Requests at once, for the memory plan.")] = 4,
    length: Annotated[
        int, typer.Option("--context", help="Positions per request, for the memory plan.")
    ] = CONTEXT,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Run the short acceptance probe.")
    ] = True,
    url: Annotated[
        str | None,
        typer.Option(help="Also compare a running server's tokenizer with the target's files."),
    ] = None,
    weights: options.Weights = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Check that a target and a drafter fit together; exit code 1 if a row fails."""
    from outrider.evaluate.preflight import Report, licence

    session: Session = context.obj
    if not 0 <= floor <= 1:
        raise InvalidParameter(f"--floor is {floor:g}; use a share from 0 to 1")
    if slots < 1 or length < 2:
        raise InvalidParameter("--slots needs 1 or more and --context 2 or more")
    if lock is not None:
        options.check_writable(lock)
    check_drafter(drafter)
    loaded = session.model(target, weights=weights, device=device, threads=threads)
    facts, rows = _files(loaded, drafter)
    plan = _Plan(loaded, drafter, slots, min(length, loaded.target.context_length), floor)
    if any(row.status == "fail" for row in rows):
        rows.append(_not_run())
    else:
        rows += plan.rows(probe=probe)
    rows.append(licence("licence of the target", facts.licence))
    if url is not None:
        rows += asyncio.run(_server(url, loaded))
    rows.append(
        _locked(loaded, drafter, facts, lock, sound=not any(r.status == "fail" for r in rows))
    )
    report = Report(
        target,
        drafter,
        tuple(rows),
        {"target_hash": facts.hash, "template_hash": facts.template_hash},
    )
    _show(session, report, as_json=as_json)
    if report.status == "fail":
        raise typer.Exit(1)


def _show(session: Session, report: Report, *, as_json: bool) -> None:
    if as_json:
        session.out.out(json.dumps(report.to_dict(), indent=2))
    else:
        session.out.print(report.to_text(), markup=False)


def _files(loaded: Loaded, drafter: str) -> tuple[ModelFacts, list[Row]]:
    """What the files say. A drafter whose files cannot be read is a failing row."""
    from outrider.evaluate.preflight import Row
    from outrider.evaluate.preflight_files import file_rows, model_facts

    name = loaded.target.name
    facts = model_facts(loaded.source, name=name, tokenizer=loaded.tokenizer)
    try:
        rows = file_rows(facts, drafter, source=loaded.source, tokenizer=loaded.tokenizer)
    except (ModelError, DrafterMismatch, InvalidParameter) as fault:
        text = str(fault)
        detail, _, remedy = text.rpartition("; ")
        rows = [
            Row("drafter's files", "fail", detail or text, remedy if detail else "mend the files")
        ]
    return facts, rows


class _Plan:
    """The rows for which the drafter is built."""

    def __init__(
        self, loaded: Loaded, drafter: str, slots: int, context: int, floor: float
    ) -> None:
        self._loaded, self._drafter = loaded, drafter
        self._slots, self._context, self._floor = slots, context, floor

    def rows(self, *, probe: bool) -> list[Row]:
        from outrider.drafters.identity import draft_model_folder
        from outrider.drafters.table import Setting, build_drafter
        from outrider.evaluate.preflight import Row
        from outrider.evaluate.preflight_probe import (
            PROBE_PROMPTS,
            SLOTS,
            acceptance_row,
            memory_row,
        )

        target, tokenizer = self._loaded.target, self._loaded.tokenizer
        setting = Setting(
            target,
            tokenizer,
            sequences=max(self._slots, SLOTS),
            context=self._context,
            source=self._loaded.source,
        )
        try:
            drafter = build_drafter(self._drafter, setting)
        except OutriderError as fault:
            return [Row("start", "fail", str(fault), "mend what the message names")]
        folder = draft_model_folder(self._drafter)
        own = sum(f.stat().st_size for f in folder.glob("*.safetensors")) if folder else 0
        found = [memory_row(target, drafter, slots=self._slots, context=self._context, weights=own)]
        if probe and self._drafter != "none":
            prompts = [chat_tokens(self._loaded, text) for text in PROBE_PROMPTS]
            found.append(acceptance_row(target, drafter, prompts, floor=self._floor))
        return found


def _not_run() -> Row:
    from outrider.evaluate.preflight import Row

    return Row(
        "acceptance probe", "warn", "not run, since a row above fails", "mend that and run again"
    )


def chat_tokens(loaded: Loaded, text: str) -> list[int]:
    """A prompt as a chat where the model has a template, else as it is."""
    try:
        return loaded.tokenizer.chat([{"role": "user", "content": text}])
    except InvalidParameter:
        return loaded.tokenizer.encode(text)


def _locked(
    loaded: Loaded, drafter: str, facts: ModelFacts, path: Path | None, *, sound: bool
) -> Row:
    """The row of the lock file; it is written for a pair without a failing row alone."""
    from outrider.evaluate.preflight import lock
    from outrider.evaluate.preflight_files import bound, read_lock, write_lock

    found = bound(drafter, target=loaded.target, facts=facts, source=loaded.source)
    if path is None:
        return lock(found, None, written=False)
    locked = read_lock(path)
    if locked is None and sound:
        write_lock(path, found)
    return lock(found, locked, written=locked is None and sound)


async def _server(url: str, loaded: Loaded) -> list[Row]:
    from outrider.backends.connect import connect
    from outrider.evaluate.preflight import Row
    from outrider.evaluate.preflight_files import CONVERSATIONS, SAMPLE_TEXTS, server_rows

    backend = await connect(url, api_key=os.environ.get(KEY_VARIABLE))
    try:
        samples = {text: await backend.tokenize(text) for text in SAMPLE_TEXTS}
        expected = {text: loaded.tokenizer.encode(text) for text in SAMPLE_TEXTS}
        for name, (messages, tools) in CONVERSATIONS.items():
            if not tools:
                samples[name] = await backend.tokenize(tuple(messages))
                expected[name] = _chat(loaded, messages)
        info = backend.info
        told = f"{info.kind} {info.version or '(no version)'} serves {info.model}"
        notes = [Row("server", "warn", note, "see docs/how-to/certify.md") for note in info.notes]
        return [Row("server", "pass", told), *notes, *server_rows(samples, expected)]
    finally:
        await backend.close()


def _chat(loaded: Loaded, messages: list[dict[str, str]]) -> list[int]:
    try:
        return loaded.tokenizer.chat(messages)
    except InvalidParameter:
        return []
