"""Replay: what a drafter and a budget would have brought, from a trace, without generating again.

Under `walk` the output does not depend on who guesses, so it is a script: drafters observe and
propose along it exactly as in the engine (the engine's own `Sequence`, `Drafting` and `schedule`
are at work here), the accepted path is where a tree agrees with the script, and the target's pass
is a number from the cost table. What a step costs beside the draft is never measured here.

It models one request at a time. It knows no target: features come from whoever has them.

Shapes: R rows (tokens of a request but its last), F features, D width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Drafter, NodeBudget
from outrider.drafters.none import NoneDrafter
from outrider.engine.budget import Budget, CostBudget, CostTable, DraftCost, FixedBudget, Subject
from outrider.engine.drafting import Drafting, Guess
from outrider.engine.engine import EngineConfig
from outrider.engine.scheduler import Waiting, schedule
from outrider.engine.sequence import Sequence as Request
from outrider.errors import DrafterMismatch, InvalidParameter
from outrider.evaluate.statistics import acceptance_summary
from outrider.evaluate.trace import PLAIN, TracedRequest, TraceFacts
from outrider.records.request import RequestRecord, RequestTimings, is_verify_step, request_record
from outrider.records.step import StepRecord

FAULT = "drafter fault"
Features = Callable[[TracedRequest, tuple[int, ...]], Tensor]
"""Gives the features [R, F, D] of a request, of the layers asked for."""


@dataclass(frozen=True)
class BudgetPlan:
    """Which budget to replay: always the same size, or the engine's own choice by cost.

    Attributes:
        nodes, depth: of a fixed budget; both `None` for the engine's.
    """

    nodes: int | None = None
    depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "depth"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidParameter(f"{name} is {value}; use 0 or more")
        if (self.nodes is None) != (self.depth is None):
            raise InvalidParameter("a fixed budget has nodes and depth; give both or none")

    @property
    def label(self) -> str:
        """How a report names it."""
        return "auto" if self.nodes is None else f"{self.nodes}x{self.depth}"

    def make(self, costs: CostTable) -> Budget:
        """The budget; the engine's own remembers, so every replay needs a new one."""
        if self.nodes is None or self.depth is None:
            limits = EngineConfig()
            return CostBudget(costs, nodes=limits.max_nodes, depth=limits.max_depth)
        return FixedBudget(self.nodes, self.depth)


class GivenDraftTimes:
    """A budget that is told a given draft time instead of the measured one."""

    def __init__(self, budget: Budget, cost: DraftCost) -> None:
        self._budget = budget
        self._cost = cost

    def limits(self, subjects: Sequence[Subject], *, other_rows: int) -> list[NodeBudget]:
        return self._budget.limits(subjects, other_rows=other_rows)

    def cut(
        self,
        subjects: Sequence[Subject],
        trees: Sequence[DraftTree],
        *,
        other_rows: int,
        draft_ms: float,
    ) -> list[DraftTree]:
        given = given_ms(self._cost, trees)
        return self._budget.cut(subjects, trees, other_rows=other_rows, draft_ms=given)

    def spent(
        self, drafter: str, milliseconds: float, levels: int, *, at_most: bool = False
    ) -> None:
        self._budget.spent(drafter, self._cost.at(levels), levels)

    def passed(self, rows: int, *, verify_ms: float, host_ms: float) -> None:
        self._budget.passed(rows, verify_ms=verify_ms, host_ms=host_ms)

    def learn(self, subject: Subject, tree: DraftTree, emitted: Sequence[int]) -> None:
        self._budget.learn(subject, tree, emitted)

    def forget(self, sequences: Sequence[int]) -> None:
        self._budget.forget(sequences)


def given_ms(cost: DraftCost, trees: Sequence[DraftTree]) -> float:
    """Milliseconds of a proposal by a given cost; nothing where nothing was offered."""
    levels = sum(max(tree.depths) for tree in trees)
    return cost.at(levels) if levels else 0.0


def accepted_path(tree: DraftTree, script: Sequence[int]) -> int:
    """How many tokens of the script the tree holds, from the root down: what `walk` accepts."""
    node = 0
    for depth, token in enumerate(script):
        follow = next((c for c in tree.children(node) if tree.tokens[c] == token), None)
        if follow is None:
            return depth
        node = follow
    return len(script)


@dataclass(frozen=True)
class Side:
    """One drafter under one budget.

    Attributes:
        name: of the drafter, for reports.
        drafter: a fresh one.
        budget: what to replay it under.
        draft: what its proposals cost; `None` to measure them.
    """

    name: str
    drafter: Drafter
    budget: BudgetPlan
    draft: DraftCost | None = None


class Replay:
    """Drives one side along requests, in the order of a trace."""

    def __init__(
        self,
        side: Side,
        facts: TraceFacts,
        *,
        costs: CostTable,
        features: Features | None = None,
        precision: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._side = side
        self._facts = facts
        self._costs = costs
        self._features = features
        self._precision = precision
        self._clock = clock
        own = CostTable(dict(costs.verify_ms), host_ms=costs.host_ms)  # budgets may change theirs
        budget = side.budget.make(own)
        if side.draft is not None:
            budget = GivenDraftTimes(budget, side.draft)
        drafters = {PLAIN: NoneDrafter(), side.name: side.drafter}
        self._drafting = Drafting(drafters, budget, facts.vocab_size)
        self._requests = 0
        self._steps = 0

    def run(self, traced: TracedRequest) -> tuple[StepRecord, ...]:
        """The steps that this request would have taken; their times are predictions.

        Raises:
            DrafterMismatch: the drafter failed, or its features cannot be had.
        """
        run = _Run(traced, self._start(traced), self._rows(traced))
        self._tell(Commit(run.sequence.id, tuple(run.sequence.tokens), traced.tenant))
        while not run.finished:
            run.steps.append(self._step(run))
        self._drafting.forget(run.sequence)
        fault = next((s.reason for s in run.steps if s.reason.startswith(FAULT)), None)
        if fault is not None:
            raise DrafterMismatch(f"{self._side.name} failed in the replay of {traced.id}: {fault}")
        return tuple(run.steps)

    def _start(self, traced: TracedRequest) -> Request:
        number, self._requests = self._requests, self._requests + 1
        return Request(
            number,
            traced.prompt,
            # Where a stop string ended the output, the script ends too; no text is needed.
            replace(traced.params, stop=(), logprobs=None),
            drafter=self._side.name,
            end_tokens=self._facts.end_tokens,
            context=self._facts.context,
            tenant=traced.tenant,
        )

    def _rows(self, traced: TracedRequest) -> Tensor | None:
        layers = self._side.drafter.needs.layers
        if not layers:
            return None
        if self._features is None:
            raise DrafterMismatch(
                f"{self._side.name} reads hidden states {list(layers)}, and the trace has none; "
                "record it with --features"
            )
        rows = self._features(traced, layers)
        if rows.shape[:2] != (traced.rows, len(layers)):
            raise DrafterMismatch(
                f"{traced.id}: features of shape {list(rows.shape)} for {traced.rows} rows of "
                f"{len(layers)} states; record the trace anew"
            )
        return rows

    def _tell(self, commit: Commit) -> float:
        """Let the drafter observe; returns milliseconds."""
        begin = self._clock()
        self._drafting.observe(self._side.name, commit)
        return (self._clock() - begin) * 1000

    def _step(self, run: _Run) -> StepRecord:
        """One step, in the engine's order: schedule, propose, verdict, commit, observe, record."""
        sequence = run.sequence
        waiting = Waiting(sequence.id, len(sequence.tokens) - run.cached)
        plan = schedule([waiting], chunk=self._facts.prefill_chunk)
        if not plan.decode:
            rows = plan.prefill[sequence.id]
            told = self._keep(run, (), rows)
            return self._record(run, _Pass(rows, told))
        prefix = waiting.uncached - 1
        begin = self._clock()
        [guess] = self._drafting.guess([sequence], other_rows=prefix)
        drafted = (self._clock() - begin) * 1000
        if self._side.draft is not None:
            drafted = given_ms(self._side.draft, [guess.offered])
        accepted = accepted_path(guess.tree, run.script)
        tokens = sequence.commit(run.script[: accepted + 1]).tokens
        self._drafting.learn(sequence, guess, tokens)
        told = self._keep(run, tokens, prefix + 1 + min(accepted, len(tokens) - 1))
        rows = prefix + len(guess.tree)
        return self._record(run, _Pass(rows, told, guess, drafted, accepted, len(tokens)))

    def _keep(self, run: _Run, tokens: tuple[int, ...], rows: int) -> float:
        """Rows enter the cache, and the drafter sees what is certain now; returns milliseconds."""
        start, run.cached = run.cached, run.cached + rows
        features = None if run.features is None else run.features[start : run.cached]
        commit = Commit(run.sequence.id, tokens, run.sequence.tenant, features, start)
        return self._tell(commit)

    def _record(self, run: _Run, done: _Pass) -> StepRecord:
        number, self._steps = self._steps, self._steps + 1
        guess = done.guess
        measured = self._side.draft is None and self._side.name != PLAIN
        return StepRecord(
            request=run.sequence.id,
            step=number,
            drafter=self._side.name,
            rule="walk",
            precision=self._precision,
            lossless=True,
            proposed=0 if guess is None else len(guess.tree) - 1,
            proposed_depth=0 if guess is None else max(guess.tree.depths),
            offered=0 if guess is None else len(guess.offered) - 1,
            accepted=done.accepted,
            emitted=done.emitted,
            rows=done.rows,
            sequences=1,
            draft_ms=0.0 if self._side.name == PLAIN else done.drafted,
            verify_ms=self._costs.verify(done.rows),
            host_ms=self._costs.host_ms + (done.told if measured else 0.0),
            reason="prefill" if guess is None else guess.reason,
        )


@dataclass(frozen=True)
class _Pass:
    """What became of a step; no guess for a prefill chunk. Times in milliseconds."""

    rows: int
    told: float
    guess: Guess | None = None
    drafted: float = 0.0
    accepted: int = 0
    emitted: int = 0


class _Run:
    """One request under replay.

    Attributes:
        cached: committed tokens that the target's cache would hold.
    """

    def __init__(self, traced: TracedRequest, sequence: Request, features: Tensor | None) -> None:
        self.traced = traced
        self.sequence = sequence
        self.features = features
        self.cached = 0
        self.steps: list[StepRecord] = []

    @property
    def script(self) -> tuple[int, ...]:
        """What the target says from here on."""
        return self.traced.tokens[len(self.sequence.output) :]

    @property
    def finished(self) -> bool:
        return self.sequence.finished or not self.script


@dataclass(frozen=True)
class Prediction:
    """What a side would bring on a trace.

    Attributes:
        drafter, budget: which side.
        acceptance_length: tokens per target step, pooled; plain decoding is 1.
        by_position: of the steps that guessed this deep, the share that accepted as deep.
        guessing_steps, steps, tokens: steps with a guess, all that gave a token, output tokens.
        rows_per_step: root and guesses of a step, mean.
        draft_ms: per step, with what observing costs.
        tpot_ms: milliseconds per token after those of the first step.
        speedup: plain decoding's TPOT over this one.
        records: one per request, times predicted.
    """

    drafter: str
    budget: str
    acceptance_length: float
    by_position: tuple[float, ...]
    guessing_steps: int
    steps: int
    tokens: int
    rows_per_step: float
    draft_ms: float
    tpot_ms: float | None
    speedup: float | None
    records: tuple[RequestRecord, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the requests' own figures in short."""
        own = {key: value for key, value in vars(self).items() if key != "records"}
        requests = [
            {
                "id": r.id,
                "workload": r.family,
                "tokens": r.completion_tokens,
                "target_steps": r.target_steps,
                "accepted_by_position": list(r.accepted_by_position),
                "rejected_by_position": list(r.rejected_by_position),
                "tpot_ms": r.tpot_ms,
            }
            for r in self.records
        ]
        return {**own, "by_position": list(self.by_position), "requests": requests}


def by_position(steps: Sequence[StepRecord]) -> tuple[float, ...]:
    """Of the steps that guessed as deep as 1, 2, ..., the share whose path came as far."""
    guessed: list[int] = []
    reached: list[int] = []
    for step in steps:
        for depth in range(step.proposed_depth):
            if depth == len(guessed):
                guessed.append(0)
                reached.append(0)
            guessed[depth] += 1
            reached[depth] += depth < min(step.accepted, step.emitted)
    return tuple(r / g for r, g in zip(reached, guessed, strict=True))


def tpot(runs: Sequence[Sequence[StepRecord]]) -> float | None:
    """Milliseconds per token behind every request's first step; `None` where there is none."""
    milliseconds, tokens = 0.0, 0
    for steps in runs:
        for step in [s for s in steps if is_verify_step(s)][1:]:
            milliseconds += step.draft_ms + step.verify_ms + step.host_ms
            tokens += step.emitted
    return milliseconds / tokens if tokens else None


def predict(
    requests: Sequence[TracedRequest],
    side: Side,
    facts: TraceFacts,
    *,
    costs: CostTable,
    features: Features | None = None,
    precision: str = "",
) -> Prediction:
    """Replay one side along a trace and sum up.

    Raises:
        DrafterMismatch: the drafter failed, or its features cannot be had.
    """
    replay = Replay(side, facts, costs=costs, features=features, precision=precision)
    runs = [replay.run(request) for request in requests]
    records = tuple(_record(r, steps) for r, steps in zip(requests, runs, strict=True))
    steps = [step for run in runs for step in run if is_verify_step(step)]
    length = acceptance_summary(records).acceptance_length
    assert length is not None  # every request has an output
    own, plain = tpot(runs), costs.verify(1) + costs.host_ms
    observed = sum(step.host_ms - costs.host_ms for step in steps)
    return Prediction(
        drafter=side.name,
        budget="-" if side.name == PLAIN else side.budget.label,
        acceptance_length=length.value,
        by_position=by_position(steps),
        guessing_steps=sum(step.proposed > 0 for step in steps),
        steps=len(steps),
        tokens=sum(step.emitted for step in steps),
        rows_per_step=sum(1 + step.proposed for step in steps) / len(steps),
        draft_ms=(sum(step.draft_ms for step in steps) + observed) / len(steps),
        tpot_ms=own,
        speedup=plain / own if own else None,
        records=records,
    )


def _record(request: TracedRequest, steps: Sequence[StepRecord]) -> RequestRecord:
    """A request's record with predicted times."""
    times = [step.draft_ms + step.verify_ms + step.host_ms for step in steps]
    first = next(i for i, step in enumerate(steps) if is_verify_step(step))
    return request_record(
        steps,
        RequestTimings(queue_s=0.0, ttft_ms=sum(times[: first + 1]), e2e_ms=sum(times)),
        id=request.id,
        family=request.workload,
        sampling={"temperature": request.params.temperature, "seed": request.params.seed},
        prompt_tokens=len(request.prompt),
        finish_reason=None,
        seed=request.params.seed,
    )


@dataclass(frozen=True)
class ReplayReport:
    """Predictions side by side.

    Attributes:
        trace: of what was replayed: path, target, requests, date.
        costs: milliseconds of a pass by rows, and of the rest of a step.
        predictions: plain decoding first.
    """

    trace: Mapping[str, Any]
    costs: CostTable
    predictions: Sequence[Prediction]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        table = {"verify_ms": {str(n): ms for n, ms in self.costs.verify_ms.items()}}
        return {
            "trace": dict(self.trace),
            "costs": {**table, "host_ms": self.costs.host_ms},
            "predictions": [prediction.to_dict() for prediction in self.predictions],
        }

    def to_text(self) -> str:
        """The table for people."""
        width = max(len(p.drafter) for p in self.predictions) + 2
        head = (
            f"{'drafter':<{width}}{'budget':<9}{'accept':>7}{'speed-up':>10}{'TPOT ms':>9}"
            f"{'draft ms':>10}{'rows':>6}{'steps':>7}  accepted by position"
        )
        lines = [head, "-" * len(head)]
        for p in self.predictions:
            speed = "-" if p.speedup is None else f"{p.speedup:.2f}x"
            each = "-" if p.tpot_ms is None else f"{p.tpot_ms:.2f}"
            shares = " ".join(f"{share:.2f}" for share in p.by_position[:8])
            lines.append(
                f"{p.drafter:<{width}}{p.budget:<9}{p.acceptance_length:>7.2f}{speed:>10}{each:>9}"
                f"{p.draft_ms:>10.2f}{p.rows_per_step:>6.1f}{p.steps:>7}  {shares}"
            )
        one = self.costs.verify(1)
        known = ", ".join(f"{n}: {ms / one:.2f}" for n, ms in sorted(self.costs.verify_ms.items()))
        lines.append(
            f"predicted with a one-row pass of {one:.2f} ms and {self.costs.host_ms:.2f} ms beside "
            f"it; passes by rows: {known}"
        )
        return "\n".join(lines)
