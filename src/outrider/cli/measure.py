"""What the verbs that measure share: sets, loads, and engines from words on the command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.session import Loaded, Session, check_drafter
from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.backends.base import Backend
    from outrider.backends.settings import Setting
    from outrider.evaluate.load import Load
    from outrider.evaluate.sets import EvaluationSet
    from outrider.evaluate.summary import Limits
    from outrider.evaluate.sweep import SweepPlan

KEY_VARIABLE = "OUTRIDER_API_KEY"
SLICE = 4  # prompts per request in flight: the tail of a slice, when few are left, stays short
DEFAULT_SETS = "builtin:regression,builtin:high-entropy,builtin:business"

What = Annotated[
    str, typer.Argument(help="A model for the embedded engine, or http://HOST:PORT of a server.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="builtin:business, builtin:high-entropy, builtin:regression, builtin:FAMILY, "
        "humaneval, gsm8k, mtbench, or a file; by comma or repeated. Default: the first three.",
    ),
]
Engine = Annotated[
    str,
    typer.Option(help="auto, outrider, vllm, sglang, tensorrt_llm, llamacpp or openai (unknown)."),
]
Model = Annotated[str | None, typer.Option(help="Which of the server's models.")]
Limit = Annotated[int | None, typer.Option(help="At most this many prompts of each set.")]
Concurrency = Annotated[
    str, typer.Option("--concurrency", "-c", help="Requests in flight, by comma: 1,4,16.")
]
Rate = Annotated[
    str | None, typer.Option(help="Requests per second instead, by comma: an open loop.")
]
Shape = Annotated[str, typer.Option(help="Of an open loop: poisson, constant or burst.")]
Temperatures = Annotated[str, typer.Option("--temperature", "-t", help="By comma: 0,0.7,1.")]
Repeats = Annotated[int, typer.Option(help="Rounds; each asks every prompt once more.")]
WarmUp = Annotated[int, typer.Option(help="Requests before the measured ones, per cell.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="A new folder for the run.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
KeepText = Annotated[
    bool, typer.Option("--keep-text", help="Prompts and answers go into the record too.")
]
SkipBadLines = Annotated[
    bool, typer.Option("--skip-bad-lines", help="Pass over and name lines that are no prompts.")
]
TtftMs = Annotated[
    float | None, typer.Option(help="A good request's first token comes within this.")
]
TpotMs = Annotated[float | None, typer.Option(help="A good request takes no longer per token.")]


def words(text: str, what: str) -> list[str]:
    """``"1,4"`` as its parts.

    Raises:
        InvalidParameter: there is none.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InvalidParameter(f"{what} is empty; name at least one")
    return list(dict.fromkeys(parts))


def numbers(text: str, what: str) -> list[float]:
    """``"0,0.7"`` as numbers.

    Raises:
        InvalidParameter: a part is none, or is below 0.
    """
    found = []
    for part in words(text, what):
        try:
            value = float(part)
        except ValueError:
            raise InvalidParameter(f"{what} has {part!r}; use numbers by comma") from None
        if not 0 <= value < float("inf"):
            raise InvalidParameter(f"{what} has {part}; use numbers of at least 0")
        found.append(value)
    return found


def counts(text: str, what: str) -> list[int]:
    """``"1,4"`` as counts above 0.

    Raises:
        InvalidParameter: a part is none.
    """
    found = numbers(text, what)
    for value in found:
        if value < 1 or value != int(value):
            raise InvalidParameter(f"{what} has {value:g}; use whole numbers from 1 on")
    return [int(value) for value in found]


def load_sets(
    specs: Sequence[str] | None, *, limit: int | None, skip_bad_lines: bool, session: Session
) -> tuple[EvaluationSet, ...]:
    """The sets; lines that were passed over are named on standard error.

    Raises:
        InvalidParameter: there is no such set, or it is empty or broken.
    """
    from outrider.evaluate.sets import load_set

    if limit is not None and limit < 1:
        raise InvalidParameter(f"--limit is {limit}; use 1 or more")
    names = [name for spec in specs or [DEFAULT_SETS] for name in words(spec, "--set")]
    found = []
    for name in dict.fromkeys(names):
        whole = load_set(name, skip_bad_lines=skip_bad_lines)
        for bad in whole.bad_lines:
            session.err.print(f"{name}, line {bad.number} is skipped: {bad.reason}", markup=False)
        found.append(whole.take(limit))
    return tuple(found)


def make_loads(
    *, concurrency: str, rate: str | None, shape: str, warm_up: int, cancel_share: float, seed: int
) -> tuple[Load, ...]:
    """The loads that the options ask for.

    Raises:
        InvalidParameter: an option is out of range.
    """
    from outrider.evaluate.load import SHAPES, Load

    usual = Load(warm_up=warm_up, cancel_share=cancel_share, seed=seed)
    if rate is None:
        return tuple(replace(usual, concurrency=c) for c in counts(concurrency, "--concurrency"))
    open_shapes = {name: name for name in SHAPES if name != "closed"}
    if shape not in open_shapes:
        raise InvalidParameter(f"--shape is {shape!r}; use one of {', '.join(open_shapes)}")
    many = counts(concurrency, "--concurrency")[0]
    return tuple(
        replace(usual, shape=open_shapes[shape], concurrency=many, rate=r)
        for r in numbers(rate, "--rate")
    )


def is_url(what: str) -> bool:
    return what.startswith(("http://", "https://"))


@dataclass
class Embedded:
    """Opens the embedded engine once per setting, on a target that is loaded once."""

    session: Session
    target: str
    plan: SweepPlan
    weights: str = "auto"
    device: str = "auto"
    threads: int | None = None
    _model: Loaded | None = field(default=None, init=False)

    @contextlib.asynccontextmanager
    async def __call__(self, setting: Setting) -> AsyncIterator[Backend]:
        from outrider.backends.settings import drafter_spec
        from outrider.drafters.table import Setting as Place
        from outrider.drafters.table import build_drafter
        from outrider.engine import Engine, EngineConfig
        from outrider.serve.tool_use import whole_backend

        loaded = self._loaded()
        slots = max(load.concurrency if load.shape == "closed" else 8 for load in self.plan.loads)
        context = self._context()
        place = Place(
            loaded.target, loaded.tokenizer, sequences=slots, context=context, source=loaded.source
        )
        spec = drafter_spec(setting)
        drafters = {} if setting.method == "none" else {spec: build_drafter(spec, place)}
        usual = EngineConfig()
        nodes, depth = setting.nodes or setting.tokens, setting.tokens
        config = EngineConfig(
            slots=slots,
            context=context,
            reuse_prefix=False,
            max_nodes=usual.max_nodes if nodes is None else nodes,
            max_depth=usual.max_depth if depth is None else depth,
        )
        engine = Engine(loaded.target, drafters=drafters, tokenizer=loaded.tokenizer, config=config)
        backend = whole_backend(engine, loaded.tokenizer, drafter=spec)
        try:
            yield backend
        finally:
            await backend.close()

    def _loaded(self) -> Loaded:
        if self._model is None:
            self._model = self.session.model(
                self.target, weights=self.weights, device=self.device, threads=self.threads
            )
        return self._model

    def _context(self) -> int:
        """As long as the longest request, so that many slots fit the memory."""
        loaded, longest = self._loaded(), 0
        for _, item in self.plan.items:
            tokens = loaded.tokenizer.chat(item.prompt.chat(), tools=list(item.tools) or None)
            answer = int(item.sampling.get("max_tokens", self.plan.max_tokens))
            longest = max(longest, len(tokens) + answer)
        return int(min(loaded.target.context_length, longest + 1))


@dataclass(frozen=True)
class Remote:
    """Opens a running server; a setting with a label is a profile of our own server."""

    url: str
    engine: str
    model: str | None

    @contextlib.asynccontextmanager
    async def __call__(self, setting: Setting) -> AsyncIterator[Backend]:
        from outrider.backends.connect import connect
        from outrider.backends.settings import SERVED

        key, model = os.environ.get(KEY_VARIABLE), self.model
        if setting.label is not None or setting.method == "none":
            found = await connect(self.url, kind=self.engine, model=model, api_key=key)
            await found.close()
            model = f"{found.info.model.partition('@')[0]}@{setting.name}"
        elif setting.method != SERVED:
            raise InvalidParameter(f"a running server cannot be told to guess by {setting.name}")
        backend = await connect(self.url, kind=self.engine, model=model, api_key=key)
        try:
            yield backend
        finally:
            await backend.close()


def check_settings(settings: Sequence[Setting], *, embedded: bool) -> None:
    """Refuse drafters that do not exist before a model is loaded.

    Raises:
        InvalidParameter: one does not exist.
    """
    from outrider.backends.settings import drafter_spec

    for setting in settings:
        if embedded:
            check_drafter(drafter_spec(setting))


def measure(
    session: Session,
    plan: SweepPlan,
    opener: Callable[[Setting], Any],
    *,
    out: Path,
    resume: bool,
    limits: Limits,
    together: bool = False,
) -> bool:
    """Run the plan into a folder and write its report; False if it was interrupted.

    Args:
        together: all engines can be open at once, so that settings take turns every few prompts.

    Raises:
        InvalidParameter: there is a run of another plan.
    """
    from outrider.evaluate.load import generator_limit
    from outrider.evaluate.runs import SAMPLES, RunWriter
    from outrider.evaluate.sweep import run_sweep
    from outrider.records.manifest import run_manifest

    if resume and (out / SAMPLES).exists():
        writer = RunWriter.resume(out)
        if writer.manifest.options.get("plan") != _as_json(plan.to_dict()):
            raise InvalidParameter(f"{out} holds a run of another plan; use its options, or --out")
    else:
        limit = asyncio.run(generator_limit(seconds=0.5)).to_dict()
        options = {"plan": plan.to_dict(), "generator_limit": limit}
        writer = RunWriter.create(out, run_manifest(seed=plan.seed, options=_as_json(options)))

    def progress(line: str) -> None:
        session.err.print(line, style="dim", markup=False)

    whole = False
    with writer:
        try:
            size = SLICE * max(load.concurrency for load in plan.loads) if together else None
            work = run_sweep(plan, opener, writer, progress=progress, slice_size=size)
            asyncio.run(_sweep(work))
            writer.finish()
            whole = True
        except KeyboardInterrupt:
            session.err.print("interrupted; --resume goes on with what is missing", markup=False)
    if whole or writer.earlier or _samples(out):
        write_report(session, out, limits=limits)
    return whole


async def _sweep(work: Coroutine[Any, Any, None]) -> None:
    """One fault of a group, told by itself."""
    try:
        await work
    except BaseExceptionGroup as group:
        fault: BaseException = group
        while isinstance(fault, BaseExceptionGroup):
            fault = fault.exceptions[0]
        raise fault from None


def _samples(out: Path) -> bool:
    from outrider.evaluate.runs import Run

    return bool(Run.load(out).samples)


def _as_json(value: Any) -> Any:
    """As it comes back from a file."""
    import json

    return json.loads(json.dumps(value))


def write_report(
    session: Session,
    run: Path,
    *,
    limits: Limits,
    other: Path | None = None,
    target: str | None = None,
) -> None:
    """report.html, report.md, samples.csv, recommendation.json and the settings as files.

    Raises:
        RecordFileError: there is no run.
    """
    from outrider.evaluate.emit import files
    from outrider.evaluate.report_html import to_html
    from outrider.evaluate.report_text import to_csv, to_markdown, to_terminal
    from outrider.evaluate.runs import Run
    from outrider.evaluate.summary import compare, summarise
    from outrider.records.files import write_json

    loaded = Run.load(run)
    summary = summarise(loaded, limits=limits)
    comparison = None if other is None else compare(Run.load(other), loaded)
    model = target or next((str(s["model"]).partition("@")[0] for s in loaded.samples), "MODEL")
    found = summary.recommendation
    texts = files(found, target=model) if found.verdicts else {}
    folder = loaded.folder
    for name, text in texts.items():
        (folder / "settings").mkdir(exist_ok=True)
        (folder / "settings" / name).write_text(text, encoding="utf-8")
    (folder / "report.html").write_text(
        to_html(summary, files=texts, comparison=comparison), encoding="utf-8"
    )
    (folder / "report.md").write_text(to_markdown(summary, comparison=comparison), encoding="utf-8")
    (folder / "samples.csv").write_text(to_csv(summary), encoding="utf-8")
    write_json(folder / "recommendation.json", found.to_dict())
    loaded.index()
    session.out.print(to_terminal(summary), markup=False)
    session.err.print(f"report: {folder / 'report.html'}", markup=False)
