"""The benchmark: plain and speculative runs of the same prompts, interleaved and compared.

Every drafter runs every prompt on one engine, in an order that rotates from prompt to prompt, so
that a change of the machine's load hits all sides alike. Nothing is reused between runs: no cached
prefix, and a store across requests starts empty for every run, so a drafter cannot copy the answer
it gave a moment ago.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Drafter, Needs, NodeBudget, SequenceView
from outrider.drafters.table import Setting, build_drafter
from outrider.engine import Completion, Engine, EngineConfig, FixedBudget
from outrider.errors import InvalidParameter
from outrider.evaluate.bench_report import BenchReport, Cell
from outrider.evaluate.margins import judge
from outrider.evaluate.workloads import Prompt, load_workload
from outrider.models.target import Target
from outrider.models.tokenizer import TextModel, Tokenizer
from outrider.records.files import JsonlWriter
from outrider.records.manifest import RunManifest, TargetIdentity, run_manifest
from outrider.records.request import RequestRecord, RequestTimings, request_record

PLAIN = "none"
WARM_UP_TOKENS = 16
COST_ROWS = (1, 2, 4, 8, 16)
COST_STEPS = 12


@dataclass(frozen=True)
class BenchPlan:
    """What to run.

    Attributes:
        drafters: specs; plain decoding is always run beside them.
        workloads: specs, see `load_workload`.
        limit: prompts per workload.
        params: sampling parameters of every request; without a seed, seed 0.
        repeats: runs of each prompt.
        rule: walk, reject or block.
        context: positions per request; `None` takes the model's.
    """

    drafters: tuple[str, ...]
    workloads: tuple[str, ...]
    params: SamplingParams
    limit: int | None = None
    repeats: int = 1
    rule: str = "walk"
    context: int | None = None


@dataclass(frozen=True)
class Run:
    """One request of the benchmark."""

    workload: str
    prompt: Prompt
    repeat: int
    completion: Completion
    record: RequestRecord


def run_bench(
    target: Target,
    tokenizer: Tokenizer,
    plan: BenchPlan,
    *,
    source: Path | None = None,
    records: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> BenchReport:
    """Run the plan and judge it.

    Args:
        target: the model.
        tokenizer: its tokenizer.
        plan: what to run.
        source: the target's folder, for drafters that are heads.
        records: a new file for one line per request and per step.
        progress: told a line per prompt.

    Raises:
        InvalidParameter: an unknown drafter or workload, or a prompt that does not fit.
    """
    names = tuple(dict.fromkeys([PLAIN, *plan.drafters]))
    prompts = [(w, p) for w in plan.workloads for p in load_workload(w, limit=plan.limit)]
    params = replace(plan.params, seed=plan.params.seed or 0)
    engine = _engine(target, tokenizer, names, plan, source)
    encoded = {(w, p.id): tokenizer.chat(p.chat()) for w, p in prompts}
    _refuse_long(encoded, params, engine.context)
    manifest = _manifest(target, plan, params)
    progress("warming up")
    first = encoded[prompts[0][0], prompts[0][1].id]
    warm = replace(params, max_tokens=WARM_UP_TOKENS, min_tokens=0)
    for name in names:
        engine.generate([first], warm, drafter=name)
    runs: list[Run] = []
    writer = nullcontext(None) if records is None else JsonlWriter.create(records, manifest)
    with writer as lines:
        for number, (workload, prompt) in enumerate(prompts):
            progress(f"{workload} {prompt.id} ({number + 1} of {len(prompts)})")
            for repeat in range(plan.repeats):
                turn = (number + repeat) % len(names)
                for name in names[turn:] + names[:turn]:
                    tokens = encoded[workload, prompt.id]
                    completion = _one(engine, tokens, params, name)
                    run = Run(workload, prompt, repeat, completion, _record(prompt, completion))
                    runs.append(run)
                    if lines is not None:
                        _write(lines, run)
        progress("measuring the cost of a step by number of rows")
        verify_cost = measure_steps(target, tokenizer, first)
        cells = _cells(target, runs, names, plan, params)
        finished = lines.finish() if lines is not None else manifest.finish()
    exact = plan.rule == "walk" or params.temperature == 0
    return BenchReport(finished, verify_cost, cells, exact=exact)


def _engine(
    target: Target,
    tokenizer: Tokenizer,
    names: Sequence[str],
    plan: BenchPlan,
    source: Path | None,
) -> Engine:
    setting = Setting(target, tokenizer, sequences=1, context=plan.context, source=source)
    drafters = {name: build_drafter(name, setting) for name in names if name != PLAIN}
    config = EngineConfig(slots=1, context=plan.context, rule=plan.rule, reuse_prefix=False)
    return Engine(target, drafters=drafters, tokenizer=tokenizer, config=config)


def _refuse_long(
    encoded: dict[tuple[str, str], list[int]], params: SamplingParams, context: int
) -> None:
    for (workload, id), tokens in encoded.items():
        if len(tokens) + params.max_tokens > context:
            raise InvalidParameter(
                f"prompt {id} of {workload} has {len(tokens)} tokens; with max_tokens "
                f"{params.max_tokens} it exceeds the context of {context}: lower one of them"
            )


def _one(engine: Engine, tokens: Sequence[int], params: SamplingParams, name: str) -> Completion:
    # A tenant of its own keeps the answer out of the store that the next run drafts from.
    request = engine.add(tokens, params, drafter=name, tenant=f"run-{time.monotonic_ns()}")
    while engine.has_work:
        engine.step()
    return engine.take(request)


def _record(prompt: Prompt, completion: Completion) -> RequestRecord:
    ttft = completion.ttft_s
    return request_record(
        completion.steps,
        RequestTimings(
            queue_s=completion.queue_s,
            ttft_ms=None if ttft is None else ttft * 1000,
            e2e_ms=completion.e2e_s * 1000,
        ),
        id=prompt.id,
        family=prompt.family,
        sampling={
            k: v
            for k, v in asdict(completion.params).items()
            if k not in ("logit_bias", "bad_words")
        },
        prompt_tokens=len(completion.prompt),
        finish_reason=completion.finish_reason,
        error=completion.error,
        seed=completion.seed,
        peak_memory_bytes=peak_memory(),
    )


def peak_memory() -> int:
    """The process's largest resident memory so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _write(lines: JsonlWriter, run: Run) -> None:
    where = {"workload": run.workload, "prompt": run.prompt.id, "repeat": run.repeat}
    for step in run.completion.steps:
        lines.write({"kind": "step", **where, **step.to_dict()})
    lines.write({"kind": "request", **where, **run.record.to_dict()})


def _manifest(target: Target, plan: BenchPlan, params: SamplingParams) -> RunManifest:
    return run_manifest(
        seed=params.seed,
        threads=torch.get_num_threads(),
        target=TargetIdentity(target.name, target.fingerprint, target.precision),
        options={
            **asdict(plan),
            "params": {**asdict(params), "logit_bias": dict(params.logit_bias)},
        },
        accelerator=None if target.device.type == "cpu" else str(target.device),
    )


def _cells(
    target: Target,
    runs: Sequence[Run],
    names: Sequence[str],
    plan: BenchPlan,
    params: SamplingParams,
) -> list[Cell]:
    """One cell per workload and drafter."""
    plain = {(r.workload, r.prompt.id, r.repeat): r for r in runs if r.completion.drafter == PLAIN}
    cells = []
    for workload in plan.workloads:
        for name in names:
            cell = Cell(drafter=name, workload=workload, temperature=params.temperature)
            for run in runs:
                if run.workload != workload or run.completion.drafter != name:
                    continue
                baseline = plain[workload, run.prompt.id, run.repeat]
                difference = judge(
                    target,
                    run.completion.prompt,
                    baseline.completion.tokens,
                    run.completion.tokens,
                    params=params,
                    seed=run.completion.seed,
                    ends=target.end_tokens,
                )
                cell.add(run.record, baseline.record, difference)
            cells.append(cell)
    return cells


class _WrongGuesses:
    """Guesses one token again and again: a step of a chosen size whose guesses mostly fail."""

    name = "wrong"
    needs = Needs(trees=False)

    def observe(self, commits: Sequence[Commit]) -> None:
        return

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        return [
            DraftTree.chain([view.root] * (1 + min(budget.nodes, budget.depth)))
            for view, budget in zip(views, budgets, strict=True)
        ]

    def forget(self, sequences: Sequence[int]) -> None:
        return


def measure_steps(target: Target, tokenizer: TextModel, prompt: Sequence[int]) -> dict[int, float]:
    """Median milliseconds of a whole engine step by number of rows, the sizes interleaved."""
    context = min(target.context_length, len(prompt) + (max(COST_ROWS) + 1) * COST_STEPS)
    engines = {}
    wrong: Drafter = _WrongGuesses()
    for rows in COST_ROWS:
        engine = Engine(
            target,
            drafters={"wrong": wrong},
            tokenizer=tokenizer,
            config=EngineConfig(context=context),
            budget=FixedBudget(rows - 1, rows - 1),
        )
        limit = context - len(prompt)
        params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
        engine.add(prompt, params, drafter="wrong")
        engines[rows] = engine
    times: dict[int, list[float]] = {rows: [] for rows in COST_ROWS}
    for step in range(COST_STEPS):
        for rows, engine in engines.items():
            while True:  # prefill steps bring no token and are not what is measured
                begin = time.perf_counter()
                updates = engine.step()
                elapsed = (time.perf_counter() - begin) * 1000
                if updates:
                    break
            if step >= 2:
                times[rows].append(elapsed)
    return {rows: statistics.median(values) for rows, values in times.items()}
