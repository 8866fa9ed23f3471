"""`outrider sweep`: the flags of a sweep; what it measures is up to `outrider.evaluate`."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import measure as shared
from outrider.cli import options
from outrider.cli.generate import INTERRUPTED
from outrider.cli.session import Session
from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.backends.settings import Setting
    from outrider.evaluate.sweep import Opener, SweepPlan


def sweep(
    context: typer.Context,
    what: shared.What,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="ngram, suffix, eagle3, hybrid=suffix+eagle3, draft_model=PATH ...; by comma or "
            "repeated; a head without a path is the one that ships. "
            "Plain decoding is always measured beside them. Default: ngram,suffix."
        ),
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="Most guesses per step, by comma; auto leaves it to the engine.")
    ] = "2,4,8",
    vary: Annotated[
        list[str] | None,
        typer.Option(help="NAME=V1,V2: a further field of the engine; may be repeated."),
    ] = None,
    profiles: Annotated[
        str | None, typer.Option(help="Profiles of a running outrider serve, instead of methods.")
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(help="Command that starts the engine, with {port} and {speculative} in it."),
    ] = None,
    sets: shared.Sets = None,
    out: shared.Out = Path("sweep"),
    engine: shared.Engine = "auto",
    model: shared.Model = None,
    limit: shared.Limit = None,
    concurrency: shared.Concurrency = "1,4",
    temperature: shared.Temperatures = "0",
    max_tokens: options.MaxTokens = 128,
    repeats: shared.Repeats = 1,
    warm_up: shared.WarmUp = 1,
    seed: options.Seed = 0,
    full: Annotated[
        bool, typer.Option("--full", help="Do not cut settings short that are surely slower.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and end.")] = False,
    keep_text: shared.KeepText = False,
    resume: shared.Resume = False,
    weights: options.Weights = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Try ways to guess on an engine and recommend one, or none; writes settings as files."""
    from outrider.evaluate.summary import Limits
    from outrider.evaluate.sweep import SweepPlan

    session: Session = context.obj
    embedded = launch is None and not shared.is_url(what)
    settings = make_settings(method, tokens, vary, profiles=profiles)
    if launch is None and not embedded and profiles is None:
        raise InvalidParameter(
            "a running server cannot be told how to guess; give --launch COMMAND to start it anew, "
            "or --profiles of outrider serve"
        )
    if profiles is not None and embedded:
        raise InvalidParameter("--profiles are those of a running server; give its address")
    shared.check_settings(settings, embedded=embedded)
    plan = SweepPlan(
        sets=shared.load_sets(sets, limit=limit, skip_bad_lines=False, session=session),
        settings=settings,
        loads=shared.make_loads(
            concurrency=concurrency,
            rate=None,
            shape="closed",
            warm_up=warm_up,
            cancel_share=0.0,
            seed=seed or 0,
        ),
        temperatures=tuple(shared.numbers(temperature, "--temperature")),
        repeats=repeats,
        max_tokens=max_tokens,
        seed=seed or 0,
        early_stop=not full,
        keep_text=keep_text,
    )
    opener: Opener = shared.Remote(what, engine, model)
    if embedded:
        opener = shared.Embedded(session, what, plan, weights, device, threads=threads)
    elif launch is not None:
        opener = _launcher(launch, plan, engine=engine, out=out, model=model)
    if dry_run:
        session.out.print(plan.to_text(), markup=False)
        return
    whole = shared.measure(
        session, plan, opener, out=out, resume=resume, limits=Limits(), together=launch is None
    )
    if not whole:
        raise typer.Exit(INTERRUPTED)


def _launcher(
    command: str, plan: SweepPlan, *, engine: str, out: Path, model: str | None
) -> Opener:
    """Starts the engine anew for every setting; what it cannot say is refused before the first.

    Raises:
        UnsupportedOption: the engine has no such setting.
        InvalidParameter: the command lacks its places.
    """
    from outrider.backends.settings import engine_flags
    from outrider.backends.started import command_words, started

    command_words(command, port=1, extra=())
    for setting in plan.settings:
        engine_flags(engine, setting, folder=out / "engine")
    kind = engine

    def opener(setting: Setting) -> object:
        return started(command, setting, kind=kind, folder=out / "engine", model=model)

    return opener  # type: ignore[return-value]


def make_settings(
    method: list[str] | None, tokens: str, vary: list[str] | None, *, profiles: str | None
) -> tuple[Setting, ...]:
    """Plain decoding and everything to try against it.

    Raises:
        InvalidParameter: a method or a number does not exist.
    """
    from outrider.backends.settings import PLAIN, SERVED, Setting

    if profiles is not None:
        if method:
            raise InvalidParameter("--method and --profiles were both given; use one of them")
        names = [name for name in shared.words(profiles, "--profiles") if name != PLAIN.name]
        return (PLAIN, *(Setting(SERVED, label=name) for name in names))
    numbers: list[int | None] = [
        None if part == "auto" else shared.counts(part, "--tokens")[0]
        for part in shared.words(tokens, "--tokens")
    ]
    axes = [_axis(entry) for entry in vary or []]
    found = [PLAIN]
    for spec in (s for part in method or ["ngram,suffix"] for s in shared.words(part, "--method")):
        name, _, path = spec.partition("=")
        if name == "none":
            continue
        for number in numbers:
            for values in product(*(axis[1] for axis in axes)):
                more = dict(zip((axis[0] for axis in axes), values, strict=True))
                found.append(Setting(name, number, model=path or None, more=more))
    return tuple(found)


def _axis(entry: str) -> tuple[str, list[float | int | str]]:
    name, equals, values = entry.partition("=")
    if not equals or not name:
        raise InvalidParameter(f"--vary is {entry!r}; write NAME=V1,V2")

    def value(text: str) -> float | int | str:
        try:
            return float(text) if "." in text else int(text)
        except ValueError:
            return text

    return name, [value(part) for part in shared.words(values, "--vary")]
