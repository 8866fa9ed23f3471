"""`outrider report`: a run as pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import measure as shared
from outrider.cli.session import Session


def report(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    against: Annotated[
        Path | None,
        typer.Option(help="Another run, to compare with: what differs, and by how much."),
    ] = None,
    ttft_ms: shared.TtftMs = None,
    tpot_ms: shared.TpotMs = None,
    target: Annotated[
        str | None, typer.Option(help="The model's name in the files for other engines.")
    ] = None,
) -> None:
    """Write a run's report.html, report.md, samples.csv, recommendation.json and settings anew."""
    from outrider.evaluate.summary import Limits

    session: Session = context.obj
    limits = Limits(ttft_ms, tpot_ms)
    shared.write_report(session, run, limits=limits, other=against, target=target)
