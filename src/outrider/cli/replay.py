"""`outrider replay`: record a trace once, then predict drafters and budgets from it.

The flags of both halves; what is recorded and how it is replayed is up to `outrider.evaluate`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options
from outrider.cli.bench import check_results, split
from outrider.cli.session import Loaded, Session, check_drafter
from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.drafters.base import Drafter
    from outrider.engine.budget import DraftCost
    from outrider.evaluate.replay import BudgetPlan, Prediction, ReplayReport
    from outrider.evaluate.trace import FeatureKeeping, Trace, TracedRequest, TracePlan
    from outrider.train.features import FeatureStore

DRAFTERS = "ngram,suffix"
WORKLOADS = "builtin:chat"
AUTO = "auto"


def replay(
    context: typer.Context,
    trace: Annotated[Path, typer.Option(help="The trace: read, or with --record written.")],
    record: Annotated[
        bool, typer.Option("--record", help="Record the trace; without it, replay one.")
    ] = False,
    target: Annotated[str, typer.Option(help="The model.")] = options.DEFAULT_TARGET,
    drafters: Annotated[
        list[str] | None,
        typer.Option(
            help="Drafters to predict, by comma or repeated; with --record --features, those whose "
            f"hidden states are kept. Default: {DRAFTERS}."
        ),
    ] = None,
    nodes: Annotated[
        str,
        typer.Option(help="Guesses per step, by comma; auto: as many as pay, as the engine does."),
    ] = AUTO,
    depth: Annotated[
        str | None,
        typer.Option(help="Depths for each number of guesses, by comma. Default: the same number."),
    ] = None,
    draft_ms: Annotated[
        list[str] | None,
        typer.Option(
            help="DRAFTER=MS or DRAFTER=MS+MS, a proposal's cost and that of each depth, in place "
            "of measuring it; may be repeated."
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Take this machine's pass costs, not the trace's."),
    ] = False,
    workload: Annotated[
        list[str] | None,
        typer.Option(help=f"To record: builtin:NAME or a JSONL file. Default: {WORKLOADS}."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="At most this many prompts.")] = None,
    features: Annotated[
        bool,
        typer.Option(
            "--features", help="Keep the hidden states that --drafters read, in TRACE.features."
        ),
    ] = False,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    weights: options.Weights = "auto",
    device: options.Device = "auto",
    exact: options.Exact = False,
    threads: options.Threads = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every prediction to this file.")
    ] = None,
) -> None:
    """Predict acceptance and speed of drafters from one recorded trace, without generating."""
    from outrider.evaluate.trace import TracePlan, read_trace

    session: Session = context.obj
    names = specs(drafters or ([] if record else [DRAFTERS]))
    if limit is not None and limit < 1:
        raise InvalidParameter(f"--limit is {limit}; use 1 or more")
    for name in names:
        check_drafter(name)

    def load() -> Loaded:
        return session.model(target, weights=weights, device=device, exact=exact, threads=threads)

    if record:
        if drafters and not features:
            raise InvalidParameter("--record has no use for --drafters without --features")
        params = options.sampling(
            temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed
        )
        plan = TracePlan(tuple(split(workload or [WORKLOADS])), params, limit)
        _record(session, load, trace, plan, names if features else None)
        return
    if workload or features:
        raise InvalidParameter("--workload and --features belong to --record; leave them out")
    check_results(json_file, None)
    plans, given = budget_plans(nodes, depth), draft_costs(draft_ms or [], names)
    found = read_trace(trace)
    question = _Question(trace, found, tuple(names), plans, given, limit, measure)
    report = _answer(session, load(), question)
    session.out.print(report.to_text(), markup=False)
    if json_file is not None:
        options.write_file(json_file, json.dumps(report.to_dict(), indent=2) + "\n")


@dataclass(frozen=True)
class _Question:
    """What is to be predicted from a trace."""

    path: Path
    trace: Trace
    names: tuple[str, ...]
    plans: Sequence[BudgetPlan]
    given: Mapping[str, DraftCost]
    limit: int | None
    measure: bool


def specs(values: Sequence[str]) -> list[str]:
    """Drafters' specs by comma or repeated; the ``,chain`` of a head stays with it."""
    found: list[str] = []
    for value in values:
        for part in filter(None, (part.strip() for part in value.split(","))):
            if part == "chain" and found:
                found[-1] += ",chain"
            else:
                found.append(part)
    return list(dict.fromkeys(found))


def budget_plans(nodes: str, depth: str | None) -> list[BudgetPlan]:
    """The budgets of --nodes and --depth.

    Raises:
        InvalidParameter: a word that is no number, or depths without numbers of guesses.
    """
    from outrider.evaluate.replay import BudgetPlan

    words = split([nodes])
    depths = None if depth is None else [_number("--depth", word) for word in split([depth])]
    sizes = [_number("--nodes", word) for word in words if word != AUTO]
    if not words or (depths is not None and not (sizes and depths)):
        raise InvalidParameter("--depth goes with numbers in --nodes; write --nodes 5,16 --depth 5")
    fixed = [BudgetPlan(n, d) for n in sizes for d in (depths or [n]) if d <= n]
    if sizes and not fixed:
        raise InvalidParameter(f"--depth {depth} is more than --nodes {nodes}; lower it")
    return [BudgetPlan(), *fixed] if AUTO in words else fixed


def _number(option: str, word: str) -> int:
    if not word.isdecimal():
        raise InvalidParameter(f"{option} has {word!r}; use whole numbers, or auto for --nodes")
    return int(word)


def draft_costs(values: Sequence[str], names: Sequence[str]) -> dict[str, DraftCost]:
    """Given draft times by drafter.

    Raises:
        InvalidParameter: it is of another form, or of a drafter that is not replayed.
    """
    from outrider.engine.budget import DraftCost

    found = {}
    for value in values:
        name, _, cost = value.rpartition("=")
        base, _, per_depth = cost.partition("+")
        try:
            numbers = float(base), float(per_depth or 0)
        except ValueError:
            numbers = (-1.0, 0.0)
        if name not in names or not all(0 <= number < math.inf for number in numbers):
            raise InvalidParameter(
                f"--draft-ms {value}; write DRAFTER=MS or DRAFTER=MS+MS with one of "
                f"{', '.join(names)}"
            )
        found[name] = DraftCost(*numbers)
    return found


def _features_folder(trace: Path) -> Path:
    return trace.with_name(f"{trace.name}.features")


def _record(
    session: Session,
    load: Callable[[], Loaded],
    path: Path,
    plan: TracePlan,
    readers: Sequence[str] | None,
) -> None:
    """Record a trace; with ``readers``, the hidden states that these drafters read too."""
    from outrider.evaluate.trace import record_trace
    from outrider.evaluate.workloads import load_workload

    options.check_writable(path)
    if readers is not None and not readers:
        raise InvalidParameter("--features needs --drafters, whose hidden states are kept")
    for place in (path, _features_folder(path)):
        if place.exists():
            raise InvalidParameter(f"{place} exists already; choose another --trace or remove it")
    for spec in plan.workloads:
        load_workload(spec, limit=plan.limit)  # refuse a wrong one before a model is loaded
    loaded = load()
    keeping = None if readers is None else _keeping(loaded, readers, path)
    trace = record_trace(
        loaded.target,
        loaded.tokenizer,
        plan,
        path,
        keeping=keeping,
        progress=lambda line: session.err.print(line, style="dim", markup=False),
    )
    tokens = sum(len(request.tokens) for request in trace.requests)
    session.out.print(f"wrote {path}: {len(trace.requests)} requests, {tokens:,} tokens")


def _keeping(loaded: Loaded, readers: Sequence[str], path: Path) -> FeatureKeeping:
    from outrider.drafters.heads import runnable
    from outrider.evaluate.trace import FeatureKeeping
    from outrider.train.features import FeatureStore, Recorder

    built = [_build(loaded, spec, None) for spec in readers]
    layers = tuple(sorted({layer for drafter in built for layer in drafter.needs.layers}))
    if not layers:
        raise InvalidParameter(f"--features: {', '.join(readers)} read no hidden states")
    width = runnable(loaded.target).config.width
    return FeatureKeeping(
        Recorder(layers), FeatureStore(_features_folder(path), features=layers, width=width)
    )


def _build(loaded: Loaded, spec: str, context: int | None) -> Drafter:
    from outrider.drafters.table import Setting, build_drafter

    setting = Setting(
        loaded.target, loaded.tokenizer, sequences=1, context=context, source=loaded.source
    )
    return build_drafter(spec, setting)


def _answer(session: Session, loaded: Loaded, question: _Question) -> ReplayReport:
    """Replay every drafter under every budget, plain decoding first."""
    from outrider.engine import CostTable
    from outrider.engine.costs import cached_costs
    from outrider.evaluate.replay import ReplayReport, Side, predict
    from outrider.evaluate.trace import PLAIN
    from outrider.models.paths import cache_folder

    trace, target = question.trace, loaded.target
    if target.fingerprint != trace.target.fingerprint:
        raise InvalidParameter(
            f"{question.path} was recorded from {trace.target.name} in {trace.target.precision}, "
            f"not from {target.name} in {target.precision}; give its --target and --weights"
        )
    costs = trace.facts.costs()
    if question.measure:
        cache = target.new_cache(slots=1, length=trace.facts.context)
        measured = cached_costs(target, cache, slot=0, folder=cache_folder() / "costs")
        costs = CostTable(dict(measured.verify_ms), host_ms=trace.facts.host_ms)
    requests = trace.requests[: question.limit]
    features = _Features(loaded, trace, _features_folder(question.path))
    pairs = [(n, p) for n in question.names if n != PLAIN for p in question.plans]
    predictions: list[Prediction] = []
    for name, plan in [(PLAIN, question.plans[0]), *pairs]:
        session.err.print(f"replaying {name} {plan.label}", style="dim", markup=False)
        drafter = _build(loaded, name, trace.facts.context)
        side = Side(name, drafter, plan, question.given.get(name))
        predictions.append(
            predict(
                requests,
                side,
                trace.facts,
                costs=costs,
                features=features,
                precision=target.precision,
            )
        )
    about = {
        "path": question.path.name,
        "target": vars(trace.target),
        "recorded": trace.manifest.started,
        "requests": len(requests),
        "pass_costs": "measured now" if question.measure else "from the trace",
    }
    return ReplayReport(about, costs, predictions)


class _Features:
    """Hidden states of a trace: those that were kept, else from one pass of the target each."""

    def __init__(self, loaded: Loaded, trace: Trace, folder: Path) -> None:
        self._loaded = loaded
        self._kept = trace.facts.features
        self._folder = folder
        self._store: FeatureStore | None = None

    def __call__(self, request: TracedRequest, layers: tuple[int, ...]) -> Tensor:
        """[R, F, D] in fp32."""
        from outrider.train.features import compute_features

        if not set(layers) <= set(self._kept):
            tokens = [*request.prompt, *request.tokens]
            [rows] = compute_features(self._loaded.target, [tokens], layers)
            return rows.float()
        picked = [self._kept.index(layer) for layer in layers]
        return self._opened(request).get(request.id)[:, picked].float()

    def _opened(self, request: TracedRequest) -> FeatureStore:
        from outrider.drafters.heads import runnable
        from outrider.train.features import FeatureStore

        if self._store is None and self._folder.is_dir():
            width = runnable(self._loaded.target).config.width
            self._store = FeatureStore(self._folder, features=self._kept, width=width)
        if self._store is None or request.id not in self._store:
            raise InvalidParameter(
                f"{self._folder} lacks the hidden states of {request.id}; put it back beside the "
                "trace, or record anew"
            )
        return self._store
