"""`outrider collect`: an evaluation set from a log of one's own requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import measure as shared
from outrider.cli import options
from outrider.cli.session import Session
from outrider.errors import InvalidParameter


def collect(
    context: typer.Context,
    log: Annotated[
        Path,
        typer.Argument(help="OpenAI chat, ShareGPT, LiteLLM or vLLM request log, or CSV."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The new set.")] = Path("business.jsonl"),
    take: Annotated[
        int | None, typer.Option(help="So many prompts, in proportion to their lengths.")
    ] = None,
    name: Annotated[str, typer.Option(help="Of the set.")] = "business",
    family: Annotated[str, typer.Option(help="Of its prompts.")] = "business",
    pattern: Annotated[
        list[str] | None,
        typer.Option(help="NAME=REGEX: something more to take out; may be repeated."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(help="CSV: prompt=NAME, system=, answer= or output_tokens=."),
    ] = None,
    skip_bad_lines: shared.SkipBadLines = False,
    seed: options.Seed = 0,
) -> None:
    """Make an evaluation set of real requests: personal data out, a stratified sample in."""
    from outrider.evaluate.collect import collect as read

    session: Session = context.obj
    options.check_writable(out)
    if out.exists():
        raise InvalidParameter(f"{out} exists already; choose another name")
    found = read(
        log,
        name=name,
        family=family,
        take=take,
        seed=seed or 0,
        patterns=_pairs(pattern, "--pattern"),
        columns=_pairs(column, "--column"),
        skip_bad_lines=skip_bad_lines,
    )
    options.write_file(out, found.set.to_text())
    session.out.print(found.to_text(), markup=False)


def _pairs(entries: list[str] | None, what: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for entry in entries or []:
        name, equals, value = entry.partition("=")
        if not equals or not name or not value:
            raise InvalidParameter(f"{what} is {entry!r}; write NAME=VALUE")
        pairs[name] = value
    return pairs
