"""`outrider diagnose`: where the time goes, from a server, its metrics, a log, traces or here."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options
from outrider.cli.check import chat_tokens
from outrider.cli.remote import KEY_VARIABLE
from outrider.cli.session import Session
from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.evaluate.diagnose import Picture

TAU = 2.5


def diagnose(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Option(help="A running server: a few requests, within --seconds.")
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="With --url: send nothing, read its metrics twice."),
    ] = False,
    metrics: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two saved pages of /metrics, the earlier one first."),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="JSON lines with ttft_ms, e2e_ms, completion_tokens.")
    ] = None,
    traces: Annotated[Path | None, typer.Option(help="OpenTelemetry traces as OTLP JSON.")] = None,
    target: Annotated[
        str | None, typer.Option(help="A model here, in the embedded engine.")
    ] = None,
    tau: Annotated[
        float, typer.Option(help="Tokens per target step that you expect of a drafter.")
    ] = TAU,
    roofline: Annotated[
        float | None,
        typer.Option(
            help="Rows that a pass takes nearly for free. Default: as measured, else 150 (a GPU)."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="At most so long with --url.")] = 25.0,
    engine: Annotated[str, typer.Option(help="The server's kind; auto finds out.")] = "auto",
    model: Annotated[str | None, typer.Option(help="Which of the server's models.")] = None,
    weights: options.Weights = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Say whether decoding is the bottleneck, and the most that speculation could gain."""
    from outrider.evaluate.diagnose import diagnose as judge

    session: Session = context.obj
    sources: dict[str, object] = {
        "--url": url,
        "--metrics": metrics,
        "--log": log,
        "--traces": traces,
        "--target": target,
    }
    given = [name for name, value in sources.items() if value]
    if len(given) != 1:
        told = "none" if not given else " and ".join(given)
        raise InvalidParameter(
            f"one source is needed, {told} given; use --url, --metrics, --log, --traces or --target"
        )
    if watch and url is None:
        raise InvalidParameter("--watch goes with --url; leave it out")
    if not 1 <= seconds <= 3600:
        raise InvalidParameter(f"--seconds is {seconds:g}; use 1 to 3600")
    if url is not None:
        picture = asyncio.run(_server(url, engine, model, seconds=seconds, watch=watch))
    elif metrics is not None:
        picture = _metrics(*metrics)
    elif log is not None:
        picture = _log(log)
    elif traces is not None:
        picture = _traces(traces)
    else:
        picture = _embedded(session, str(target), weights=weights, device=device, threads=threads)
    found = judge(picture, tau=tau, roofline=roofline)
    if as_json:
        session.out.out(json.dumps(found.to_dict(), indent=2))
    else:
        session.out.print(found.to_text(), markup=False)


def _metrics(before: Path, after: Path) -> Picture:
    from outrider.backends.prometheus import parse
    from outrider.evaluate.diagnose_sources import from_metrics

    return from_metrics(parse(_read(before)), parse(_read(after)))


def _log(path: Path) -> Picture:
    from outrider.evaluate.diagnose_sources import from_log

    return from_log(_read(path).splitlines())


def _traces(path: Path) -> Picture:
    from outrider.evaluate.diagnose_sources import from_traces, read_documents

    return from_traces(read_documents(_read(path)))


def _read(path: Path) -> str:
    """Raises:
    InvalidParameter: the file cannot be read as text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidParameter(
            f"{path} cannot be read: {error.strerror}; check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidParameter(
            f"{path} is not UTF-8 (byte {error.start}); give a text file"
        ) from error


async def _server(
    url: str, engine: str, model: str | None, *, seconds: float, watch: bool
) -> Picture:
    from outrider.backends.connect import connect
    from outrider.evaluate.diagnose_probe import probe_server
    from outrider.evaluate.diagnose_sources import NoPicture, from_metrics

    key = os.environ.get(KEY_VARIABLE)
    backend = await connect(url, kind=engine, model=model, api_key=key)
    try:
        if not watch:
            return await probe_server(backend, seconds=seconds)
        before = await backend.scrape()
        await asyncio.sleep(seconds)
        after = await backend.scrape()
        if before is None or after is None:
            raise NoPicture(f"{url} has no metrics page that can be read; leave --watch out")
        return from_metrics(before, after)
    finally:
        await backend.close()


def _embedded(
    session: Session, target: str, *, weights: str, device: str, threads: int | None
) -> Picture:
    from outrider.evaluate.diagnose_probe import PROMPTS, probe_embedded

    loaded = session.model(target, weights=weights, device=device, threads=threads)
    prompts = [chat_tokens(loaded, text) for text in PROMPTS]
    return probe_embedded(loaded.target, prompts)
