"""`outrider eval`: the flags of an evaluation; what it measures is up to `outrider.evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import measure as shared
from outrider.cli import options
from outrider.cli.generate import INTERRUPTED
from outrider.cli.session import Session

if TYPE_CHECKING:
    from outrider.backends.settings import Setting


def eval(  # the verb's name; Python's own function is not used here
    context: typer.Context,
    what: shared.What,
    sets: shared.Sets = None,
    out: shared.Out = Path("run"),
    engine: shared.Engine = "auto",
    model: shared.Model = None,
    drafter: options.Drafter = options.DEFAULT_DRAFTER,
    limit: shared.Limit = None,
    concurrency: shared.Concurrency = "1",
    rate: shared.Rate = None,
    shape: shared.Shape = "poisson",
    temperature: shared.Temperatures = "0",
    max_tokens: options.MaxTokens = 128,
    repeats: shared.Repeats = 1,
    warm_up: shared.WarmUp = 1,
    cancel_share: Annotated[
        float, typer.Option(help="This share of the requests hangs up early.")
    ] = 0.0,
    seed: options.Seed = 0,
    ttft_ms: shared.TtftMs = None,
    tpot_ms: shared.TpotMs = None,
    keep_text: shared.KeepText = False,
    skip_bad_lines: shared.SkipBadLines = False,
    resume: shared.Resume = False,
    weights: options.Weights = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Measure one engine as it is on evaluation sets: times, acceptance, faults."""
    from outrider.backends.settings import PLAIN, SERVED, Setting
    from outrider.evaluate.runs import Run
    from outrider.evaluate.summary import Limits
    from outrider.evaluate.sweep import SweepPlan

    session: Session = context.obj
    remote = shared.is_url(what)
    setting = Setting(SERVED) if remote else _embedded(drafter)
    plan = SweepPlan(
        sets=shared.load_sets(sets, limit=limit, skip_bad_lines=skip_bad_lines, session=session),
        settings=(setting or PLAIN,),
        loads=shared.make_loads(
            concurrency=concurrency,
            rate=rate,
            shape=shape,
            warm_up=warm_up,
            cancel_share=cancel_share,
            seed=seed or 0,
        ),
        temperatures=tuple(shared.numbers(temperature, "--temperature")),
        repeats=repeats,
        max_tokens=max_tokens,
        seed=seed or 0,
        early_stop=False,
        keep_text=keep_text,
    )
    shared.check_settings(plan.settings, embedded=not remote)
    opener = (
        shared.Remote(what, engine, model)
        if remote
        else shared.Embedded(session, what, plan, weights, device, threads=threads)
    )
    whole = shared.measure(
        session, plan, opener, out=out, resume=resume, limits=Limits(ttft_ms, tpot_ms)
    )
    if not whole:
        raise typer.Exit(INTERRUPTED)
    if any(sample.get("error") for sample in Run.load(out).samples):
        raise typer.Exit(1)


def _embedded(drafter: str) -> Setting | None:
    """The embedded engine's setting for a drafter's spec."""
    from outrider.backends.settings import METHODS, Setting

    method, _, path = drafter.partition(":")
    if method == "none":
        return None
    if method in METHODS:
        return Setting(method, model=path or None)
    return Setting("eagle3", model=drafter)
