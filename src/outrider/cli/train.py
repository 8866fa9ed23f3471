"""`outrider train`: a drafter for a target, from data to a folder that serves.

The verb reads flags, shows progress and prints what came out; the work is `outrider.train`'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from outrider.cli import options
from outrider.cli.follow import Interrupt
from outrider.cli.generate import INTERRUPTED
from outrider.cli.session import Session
from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.train.loop import Progress as TrainProgress
    from outrider.train.pipeline import Plan
    from outrider.train.prepare import Progress as DataProgress
    from outrider.train.prompts import TrainPrompt
    from outrider.train.run import Outcome

LINE_EVERY_S = 10.0  # where there is no terminal


def train(
    context: typer.Context,
    style: Annotated[
        Literal["eagle", "eagle3", "eagle3.1", "medusa", "draft_model"],
        typer.Argument(help="What to train."),
    ],
    out: Annotated[Path, typer.Option(help="A folder for the drafter; new or empty.")],
    target: Annotated[str, typer.Option(help="The model to train for.")] = options.DEFAULT_TARGET,
    work: Annotated[
        Path | None,
        typer.Option(help="Data and checkpoints; goes on with what is there. Default: OUT.work."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts as JSON (prompt, OpenAI messages or ShareGPT conversations), or one a "
            "line in a .txt file. Default: the target writes them."
        ),
    ] = None,
    from_feedback: Annotated[
        Path | None,
        typer.Option(
            help="Prompts that a rollout kept: its feedback folder, or one set of it; beside those "
            "of --prompts, if any."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Answer tokens to generate, where no prompts are given.")
    ] = 1_000_000,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Longest answer to a prompt.")
    ] = 256,
    max_prompt: Annotated[
        int, typer.Option(help="Longest prompt, in tokens; longer ones are left out.")
    ] = 448,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 4.0,
    hours: Annotated[
        float | None, typer.Option(help="Stop after so long; the same command goes on.")
    ] = None,
    vocab: Annotated[int, typer.Option(help="Tokens that a head can guess.")] = 4096,
    layers: Annotated[int, typer.Option(help="Layers of a draft model.")] = 4,
    unroll: Annotated[
        int, typer.Option(help="Steps of EAGLE's training-time test; 1 is without it.")
    ] = 3,
    decay: Annotated[float, typer.Option(help="Weight of each further step, or head.")] = 0.8,
    loss: Annotated[
        Literal["kl", "ce"], typer.Option(help="Divergence from the target, or cross-entropy.")
    ] = "kl",
    rate: Annotated[float, typer.Option(help="Learning rate of matrices.")] = 0.01,
    rows: Annotated[int | None, typer.Option(help="Rows of a batch. Default: the style's.")] = None,
    precision: Annotated[
        Literal["bf16", "fp16", "fp32", "int8"], typer.Option(help="Of a head's written weights.")
    ] = "bf16",
    accumulate: Annotated[int, typer.Option(help="Batches of a step.")] = 1,
    online: Annotated[
        bool,
        typer.Option("--online", help="Keep no hidden states on disk; compute them every time."),
    ] = False,
    no_gate: Annotated[
        bool, typer.Option("--no-gate", help="Do not memorise one sample first.")
    ] = False,
    weights: options.Weights = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: Annotated[int, typer.Option(help="Of the data, its order and the weights.")] = 0,
) -> None:
    """Train a drafter for a model; the same command goes on where it was stopped."""
    from dataclasses import replace

    from outrider.train.config import TrainConfig
    from outrider.train.muon import denormals_as_zero
    from outrider.train.pipeline import Plan, round_of, settings

    session: Session = context.obj
    if hours is not None and not hours > 0:
        raise InvalidParameter(f"--hours is {hours}; use a number above 0")
    for name, value in (("--max-tokens", max_tokens), ("--max-prompt", max_prompt)):
        if value < 1:
            raise InvalidParameter(f"{name} is {value}; use 1 or more")
    given, named = _given(session, prompts, from_feedback)
    data = round_of(tokens)
    answers = replace(data.answers, max_tokens=max_tokens, max_prompt=max_prompt, seed=seed)
    plain = TrainConfig(
        epochs=epochs,
        longest=max(TrainConfig.longest, max_prompt + max_tokens),
        unroll=unroll,
        decay=decay,
        loss=loss,
        muon_rate=rate,
        rate=rate / 10,
        seed=seed,
        accumulate=accumulate,
    )
    plan = Plan(
        style=style,
        out=out.expanduser(),
        work=(work or Path(f"{out}.work")).expanduser(),
        prompts=given,
        prompts_name=named,
        data=replace(data, answers=answers, seed=seed),
        train=settings(style, plain, rows),
        vocab=vocab,
        layers=layers,
        gate=not no_gate,
        precision=precision,
        online=online,
    )
    until = None if hours is None else time.monotonic() + 3600 * hours
    with denormals_as_zero():  # also in the threads that PyTorch has not started yet
        _run(session, plan, target, until, weights=weights, device=device, threads=threads)


def _given(
    session: Session, file: Path | None, feedback: Path | None
) -> tuple[list[TrainPrompt] | None, str]:
    """The prompts of a user's file and of a rollout's feedback, and what the provenance calls them;
    `None` where neither is named."""
    from outrider.train.feedback import read_feedback
    from outrider.train.prompts import read_prompts, unique

    prompts: list[TrainPrompt] = []
    names = []
    if file is not None:
        prompts += read_prompts(file)
        names.append(f"prompts of {file.name}")
    if feedback is not None:
        kept = read_feedback(feedback.expanduser())
        prompts += kept.prompts
        names.append(f"feedback of {feedback.name}")
        session.err.print(f"feedback: {len(kept.prompts):,} prompts", markup=False)
        for count, why in (
            (kept.without_text, "hold no prompt text (feedback.text was off)"),
            (kept.judged_by, "are in a set that the drafter will be judged by"),
        ):
            if count:
                session.err.print(f"warning: {count:,} cases {why} and are left out", markup=False)
    return (list(unique(prompts)) if names else None), ", ".join(names)


def _run(
    session: Session,
    plan: Plan,
    target: str,
    until: float | None,
    *,
    weights: str,
    device: str,
    threads: int | None,
) -> None:
    from outrider.models.load import LoadedModel
    from outrider.train.pipeline import Watch, run_training

    loaded = session.model(target, weights=weights, device=device, threads=threads)
    if not isinstance(loaded, LoadedModel):
        raise InvalidParameter(f"{target} has no files to train from; name a real model")
    with Interrupt() as interrupt, Display(session.err) as display:
        watch = Watch(
            say=display.say,
            warn=lambda line: display.say(f"warning: {line}"),
            data=display.data,
            train=display.train,
            stop=lambda: interrupt.requested or (until is not None and time.monotonic() > until),
        )
        outcome = run_training(loaded, plan, watch)
        interrupted = interrupt.requested
    if outcome.folder is None:
        where = f"step {outcome.step:,} of {outcome.steps:,}" if outcome.steps else "the data"
        session.err.print(
            f"stopped at {where}; everything is in {plan.work}: run the same command to go on",
            markup=False,
        )
        raise typer.Exit(INTERRUPTED if interrupted else 0)
    session.out.print(table(outcome), markup=False)
    spec = f"draft_model:{outcome.folder}" if plan.style == "draft_model" else outcome.folder
    session.out.print(f"use it: outrider chat {target} --drafter {spec}", markup=False)


def table(outcome: Outcome) -> str:
    """What the best checkpoint did in serving, as text."""
    figures: Mapping[str, float] = outcome.figures
    probes = [k.removesuffix(_LENGTH) for k in figures if k.endswith(_LENGTH) and k != _LENGTH[1:]]
    lines = [
        f"wrote {outcome.folder}, with report.html; best step "
        f"{figures['step']:,.0f} of {outcome.steps:,}",
        "served on held-out prompts, greedy: acceptance length, and what was accepted by position",
    ]
    for probe in probes:
        shares = (figures.get(f"{probe}_position_{i}") for i in range(1, 33))
        text = " ".join(f"{share:.2f}" for share in shares if share is not None)
        lines.append(f"  {probe:<6} {figures[f'{probe}{_LENGTH}']:.2f}   {text or '-'}")
    return "\n".join(lines)


_LENGTH = "_acceptance_length"


class Display(AbstractContextManager["Display"]):
    """Shows progress: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=1.0, facts="")
        self._next_line = 0.0

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def data(self, progress: DataProgress) -> None:
        left = max(progress.wanted - progress.tokens, 0) / max(progress.per_second, 1e-9)
        facts = [f"{progress.per_second:,.0f} tokens/s", f"{progress.samples:,} samples"]
        if progress.wanted:
            facts.append(f"{_duration(left)} left")
        self._show("answers", progress.share, facts)

    def train(self, progress: TrainProgress) -> None:
        agreement = " ".join(f"{share:.2f}" for share in progress.agreement)
        facts = [
            f"step {progress.step:,}/{progress.steps:,}",
            f"loss {progress.loss:.3f}",
            f"agreement {agreement}",
            f"{progress.rows_per_second:,.0f} tokens/s",
            f"{_duration(progress.eta_s)} left",
        ]
        self._show("training", progress.step / progress.steps, facts)

    def _show(self, what: str, share: float, facts: list[str]) -> None:
        text = " | ".join(facts)
        self._bar.update(self._task, description=what, completed=share, facts=text)
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            self._console.print(f"{what} {share:.0%} | {text}", markup=False)


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{minutes:.0f} min"
