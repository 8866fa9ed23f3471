"""The engine: many sequences, one step at a time, one path for plain and speculative decoding.

A step, in the order it happens: schedule, propose, target forward, distribution, verdict, commit,
keep cache, observe, record. There is no branch on drafter, temperature or tree shape: a sequence
without guesses has a tree of one node.

The engine is synchronous and owns no thread; the caller drives it with `step`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.grammar import Grammar
from outrider.core.sampling import SamplingParams, distribution, logprobs
from outrider.core.tree import DraftTree
from outrider.core.verify import FOR_CHAINS, RULES, Verdict
from outrider.drafters.base import Commit, Drafter, NodeBudget
from outrider.drafters.none import NoneDrafter
from outrider.engine.admission import WaitingLine
from outrider.engine.budget import Budget, CostBudget
from outrider.engine.costs import cached_costs
from outrider.engine.drafting import Drafting, Guess
from outrider.engine.memory import allocating, memory_plan
from outrider.engine.scheduler import Waiting, schedule
from outrider.engine.sequence import Completion, FinishReason, Sequence, Update
from outrider.engine.slots import Place, SlotPool
from outrider.errors import ContextExceeded, GrammarLimit, InvalidParameter, OutriderError
from outrider.kernels.native import owning_the_cores
from outrider.models.native import NativeTransformer
from outrider.models.paths import cache_folder
from outrider.models.target import Segment, Target
from outrider.models.tokenizer import Decoder
from outrider.records.step import StepRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is put together.

    Attributes:
        slots: sequences that run at once.
        context: positions per sequence, prompt and output together; `None` takes the model's.
        prefill_chunk: committed tokens that one step may bring into the cache.
        busy_chunk: the same while others are decoding, so that their streams do not stall; `None`
            for no difference.
        queue: requests that may wait for a slot; `None` for no bound.
        patience_s: seconds after which a waiting request is sent away; `None` for never.
        rule: walk, reject or block, for requests that name none.
        reuse_prefix: keep a finished request's cache rows for a prompt that starts the same.
        max_nodes, max_depth: never guess more than this per sequence and step.
    """

    slots: int = 1
    context: int | None = None
    prefill_chunk: int = 256
    busy_chunk: int | None = None
    queue: int | None = None
    patience_s: float | None = None
    rule: str = "walk"
    reuse_prefix: bool = True
    max_nodes: int = 31
    max_depth: int = 31

    def __post_init__(self) -> None:
        for name in ("slots", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise InvalidParameter(f"{name} is {getattr(self, name)}; use 1 or more")
        for name in ("max_nodes", "max_depth"):
            if getattr(self, name) < 0:
                raise InvalidParameter(f"{name} is {getattr(self, name)}; use 0 or more")
        for name in ("busy_chunk", "queue", "patience_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InvalidParameter(f"{name} is {value}; use a number above 0, or leave it out")
        if self.rule not in RULES:
            raise InvalidParameter(f"rule is {self.rule!r}; use one of {', '.join(RULES)}")
        if self.context is not None and self.context < 2:
            raise InvalidParameter(f"context is {self.context}; use 2 or more")


@dataclass
class _Running:
    """A sequence with its place in the cache."""

    sequence: Sequence
    place: Place

    @property
    def slot(self) -> int:
        return self.place.slot


@dataclass(frozen=True)
class _Work:
    """What one running sequence does in a step."""

    running: _Running
    segment: Segment
    guess: Guess | None  # None: a prefill chunk


@dataclass(frozen=True)
class _Rows:
    """What the target gave one sequence: see `Forward`."""

    logits: Tensor
    features: Tensor | None


@dataclass(frozen=True)
class _Settled:
    """What a step brought one sequence; no update for a prefill chunk."""

    update: Update | None = None
    accepted: int = 0


@dataclass
class _Times:
    """Seconds of the step under way."""

    begin: float = field(default_factory=time.perf_counter)
    draft: float = 0.0
    verify: float = 0.0

    def milliseconds(self) -> dict[str, float]:
        host = time.perf_counter() - self.begin - self.draft - self.verify
        return {
            "draft_ms": self.draft * 1000,
            "verify_ms": self.verify * 1000,
            "host_ms": host * 1000,
        }


@dataclass(frozen=True)
class Load:
    """How busy an engine is.

    Attributes:
        running, waiting: requests in the batch and in the queue.
        slots: requests that may run at once.
        rows, capacity: cache rows that running requests hold, and all there are.
    """

    running: int
    waiting: int
    slots: int
    rows: int
    capacity: int


class Engine:
    """Decodes many requests on one target, each with a drafter of its choice."""

    def __init__(
        self,
        target: Target,
        *,
        drafters: Mapping[str, Drafter] | None = None,
        tokenizer: Decoder | None = None,
        config: EngineConfig | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Put an engine together; what cannot work is refused here.

        Args:
            target: the model whose output counts.
            drafters: by the name that requests use; "none" is always there.
            tokenizer: for text and stop strings; without it there are only tokens.
            config: see `EngineConfig`.
            budget: how much to guess; measured costs by default.

        Raises:
            InvalidParameter: the context exceeds the model's, or the rule cannot judge what a
                drafter offers.
            OutOfMemory: the memory plan does not fit.
        """
        self.config = config or EngineConfig()
        self.target = target
        self.context = self.config.context or target.context_length
        if self.context > target.context_length:
            raise InvalidParameter(
                f"context is {self.context}; {target.name} reaches {target.context_length}"
            )
        self.drafters: dict[str, Drafter] = {"none": NoneDrafter(), **(drafters or {})}
        for name in self.drafters:
            self.check_rule(self.config.rule, drafter=name)
        self.plan = memory_plan(
            target,
            [drafter.needs for drafter in self.drafters.values()],
            slots=self.config.slots,
            context=self.context,
            nodes=self.config.max_nodes,
        )
        self.plan.check(slots=self.config.slots, context=self.context)
        self._tokenizer = tokenizer
        length = self.context + self.config.max_nodes + 1
        with allocating("the cache", slots=self.config.slots, context=self.context):
            self._cache = target.new_cache(slots=self.config.slots, length=length)
        self._pool = SlotPool(self._cache, reuse=self.config.reuse_prefix)
        self.budget = budget or self._measured_budget(cache_folder() / "costs")
        self._drafting = Drafting(self.drafters, self.budget, target.vocab_size)
        self._cores = (
            owning_the_cores if isinstance(target, NativeTransformer) else nullcontext[None]
        )
        self._ids = count()
        self._steps = count()
        self._waiting = WaitingLine(limit=self.config.queue, patience_s=self.config.patience_s)
        self._running: dict[int, _Running] = {}
        self._finished: dict[int, Completion] = {}
        self._updates: list[Update] = []

    # -- requests ---------------------------------------------------------------------------

    def add(
        self,
        prompt: SequenceOf[int],
        params: SamplingParams,
        *,
        drafter: str = "none",
        tenant: str = "",
        grammar: Grammar | None = None,
        most: NodeBudget | None = None,
        tokenizer: Decoder | None = None,
        rule: str | None = None,
    ) -> int:
        """Queue a request; returns its id.

        Args:
            prompt: its tokens.
            params: how to sample and when to end.
            drafter: who guesses.
            tenant: whose it is; cached rows and drafters' stores are never shared across tenants.
            grammar: what its output must follow, in its first state; belongs to this request alone.
            most: never guess more than this for it.
            tokenizer: turns its tokens into text; `None` takes the engine's.
            rule: how its guesses are judged; `None` takes the engine's.

        Raises:
            InvalidParameter: the prompt is empty, too long or not of this vocabulary, the output
                cannot fit, the drafter is unknown, or the rule cannot judge what it offers.
            Overloaded: too many requests wait already.
        """
        self._check(prompt, params, drafter)
        rule = rule or self.config.rule
        self.check_rule(rule, drafter=drafter, most=most)
        if grammar is not None and params.ignore_eos:
            raise InvalidParameter("ignore_eos with a grammar; the grammar ends the output")
        request = next(self._ids)
        sequence = Sequence(
            request,
            prompt,
            params,
            drafter=drafter,
            end_tokens=self.target.end_tokens,
            context=self.context,
            tokenizer=tokenizer or self._tokenizer,
            tenant=tenant,
            grammar=grammar,
            most=most,
            rule=rule,
        )
        self._waiting.push(sequence, free=len(self._pool))
        return request

    def check_rule(self, rule: str, *, drafter: str, most: NodeBudget | None = None) -> None:
        """Can a rule judge what a drafter of this engine offers?

        Args:
            rule: its name.
            drafter: the name that requests use.
            most: what is guessed at most; a tree of one node cannot branch.

        Raises:
            InvalidParameter: the rule is unknown, or is for chains and the drafter's trees branch.
        """
        if rule not in RULES:
            raise InvalidParameter(f"rule is {rule!r}; use one of {', '.join(RULES)}")
        nodes = min(self.config.max_nodes, most.nodes if most else self.config.max_nodes)
        if rule in FOR_CHAINS and nodes > 1 and self.drafters[drafter].needs.trees:
            raise InvalidParameter(
                f"rule {rule} judges chains and drafter {drafter} offers trees; use rule walk or "
                "reject, a drafter of chains (ngram, draft_model, eagle3:DIR,chain), or max_nodes 1"
            )

    def cancel(self, request: int) -> None:
        """End one request now; its last update comes with the next step. Others are untouched."""
        waiting = self._waiting.remove(request)
        if waiting is not None:
            self._end_waiting(waiting, "cancelled")
        elif request in self._running:
            running = self._running[request]
            self._updates.append(running.sequence.end("cancelled"))
            self._release(running)

    def abandon(self, error: str) -> list[Update]:
        """End every running request with an error and forget all cached rows.

        For whoever drives the engine, after `step` has raised: what ran is lost, those who wait go
        on as if nothing had happened. Returns the updates that have not been handed out.
        """
        for slot in range(self._cache.slots):
            self._cache.keep(slot, ())
        for running in list(self._running.values()):
            self._updates.append(running.sequence.end("error", error))
            self._release(running)
        self._pool.forget_rows()
        updates, self._updates = self._updates, []
        return updates

    @property
    def load(self) -> Load:
        """How busy it is."""
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            slots=self.config.slots,
            rows=sum(self._cache.lengths[r.slot] for r in self._running.values()),
            capacity=self.config.slots * self.context,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._updates)

    def take(self, request: int) -> Completion:
        """The result of a finished request; it is handed out once.

        Raises:
            InvalidParameter: it is unknown, not finished, or was taken before.
        """
        if request not in self._finished:
            raise InvalidParameter(f"request {request} is not finished, or was taken already")
        return self._finished.pop(request)

    def stream(
        self, prompt: SequenceOf[int], params: SamplingParams, *, drafter: str = "none"
    ) -> Iterator[Update]:
        """Run one request and yield its updates; leaving the loop early cancels it."""
        request = self.add(prompt, params, drafter=drafter)
        done = False
        try:
            while not done:
                for update in self.step():
                    if update.request == request:
                        done = update.finish_reason is not None
                        yield update
        finally:
            if not done:
                self.cancel(request)

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        params: SamplingParams,
        *,
        drafter: str = "none",
    ) -> list[Completion]:
        """Run requests to their end; results in the order of the prompts."""
        requests = [self.add(prompt, params, drafter=drafter) for prompt in prompts]
        while self.has_work:
            self.step()
        return [self.take(request) for request in requests]

    # -- the step ---------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Run one target pass for all sequences that can use it; returns what it brought."""
        with self._cores():
            times = _Times()
            self._admit()
            work = self._plan_work(times)
            if work:
                self._run(work, times)
        updates, self._updates = self._updates, []
        return updates

    def _run(self, work: list[_Work], times: _Times) -> None:
        """The pass and everything that follows from it."""
        layers = self._layers(work)
        begin = time.perf_counter()
        passed = self._passes(work, layers)
        times.verify = time.perf_counter() - begin
        number = next(self._steps)
        settled = [
            self._settle(item, rows, layers) for item, rows in zip(work, passed, strict=True)
        ]
        self._cache.check_integrity()
        total, spent = sum(w.segment.rows for w in work), times.milliseconds()
        self.budget.passed(total, verify_ms=spent["verify_ms"], host_ms=spent["host_ms"])
        facts = {"step": number, "rows": total, "sequences": len(work), **spent}
        for item, result in zip(work, settled, strict=True):
            sequence = item.running.sequence
            sequence.steps.append(self._record(item, result, facts))
            if result.update is not None:
                self._updates.append(result.update)
            if sequence.finished:
                self._release(item.running)

    def _admit(self) -> None:
        """Give free slots to waiting sequences; send those away that have waited too long."""
        while self._waiting and len(self._pool):
            tenants = Counter(r.sequence.tenant for r in self._running.values())
            sequence = self._waiting.pop(tenants)
            sequence.clock.started = time.perf_counter()
            layers = self.drafters[sequence.drafter].needs.layers
            place = self._pool.take(sequence.tokens, tenant=sequence.tenant, layers=layers)
            self._running[sequence.id] = _Running(sequence, place)
            reused = place.features.whole()
            prompt = Commit(sequence.id, tuple(sequence.tokens), sequence.tenant, reused)
            self._drafting.observe(sequence.drafter, prompt)
        for sequence in self._waiting.expired(time.perf_counter()):
            waited = f"no slot became free within {self.config.patience_s:g} s; try again later"
            self._end_waiting(sequence, "expired", waited)

    def _plan_work(self, times: _Times) -> list[_Work]:
        """Schedule, draft, and lay out the pass: prefill chunks and trees."""
        waiting = [Waiting(id, self._uncached(r)) for id, r in self._running.items()]
        plan = schedule(waiting, chunk=self.config.prefill_chunk, busy_chunk=self.config.busy_chunk)
        decoding = [self._running[id] for id in plan.decode]
        prefixes = [self._next_tokens(r, self._uncached(r) - 1) for r in decoding]
        other_rows = sum(map(len, prefixes)) + sum(plan.prefill.values())
        begin = time.perf_counter()
        guesses = self._drafting.guess([r.sequence for r in decoding], other_rows=other_rows)
        times.draft = time.perf_counter() - begin
        work = [
            _Work(running, Segment(running.slot, prefix, guess.tree), guess)
            for running, prefix, guess in zip(decoding, prefixes, guesses, strict=True)
        ]
        for id, rows in plan.prefill.items():
            running = self._running[id]
            chunk = Segment(running.slot, self._next_tokens(running, rows))
            work.append(_Work(running, chunk, None))
        return work

    def _passes(self, work: list[_Work], layers: tuple[int, ...]) -> list[_Rows | Exception]:
        """What the target gives each sequence.

        Where the common pass fails, every sequence gets one of its own, so that only those at
        fault are lost.

        Raises:
            Exception: the target's, where no sequence gets through.
        """
        segments = [item.segment for item in work]
        try:
            return [*self._forward(segments, layers)]
        except Exception as fault:
            if len(work) == 1:
                raise
            log.exception("a pass of %d sequences failed; each gets its own", len(work))
            passed: list[_Rows | Exception] = []
            for segment in segments:
                try:
                    passed += self._forward([segment], layers)
                except Exception as own:
                    passed.append(own)
            if all(isinstance(rows, Exception) for rows in passed):
                for segment in segments:
                    self._cache.keep(segment.slot, ())
                raise fault
            return passed

    def _forward(self, segments: list[Segment], layers: tuple[int, ...]) -> list[_Rows]:
        """The target's pass; leaves the cache as it was where the pass fails."""
        try:
            forward = self.target.forward(segments, self._cache, features=layers)
        except BaseException:
            for segment in segments:
                self._cache.keep(segment.slot, ())
            raise
        features = forward.features
        return [
            _Rows(logits, None if features is None else features[index])
            for index, logits in enumerate(forward.logits)
        ]

    def _settle(self, item: _Work, passed: _Rows | Exception, layers: tuple[int, ...]) -> _Settled:
        """Verdict, commit, cache and observation for one sequence; its faults end it alone."""
        try:
            if isinstance(passed, Exception):
                raise passed
            return self._conclude(item, passed, layers)
        except Exception as fault:
            sequence, slot = item.running.sequence, item.running.slot
            log.warning("request %d ends by a fault: %r", sequence.id, fault)
            if self._cache.staged[slot]:
                self._cache.keep(slot, ())
            refused = isinstance(fault, GrammarLimit)
            return _Settled(sequence.end("error", _explain(fault), refused=refused))

    def _conclude(self, item: _Work, rows: _Rows, layers: tuple[int, ...]) -> _Settled:
        running, sequence = item.running, item.running.sequence
        first_row = self._cache.lengths[running.slot]
        prefix_rows = len(item.segment.prefix)
        kept_rows = list(range(prefix_rows))
        result = _Settled()
        if item.guess is not None:
            verdict = self._verdict(sequence, item.guess.tree, rows.logits)
            update = self._commit(sequence, item.guess.tree, verdict, rows.logits)
            # Law 5: the cache holds all committed tokens but the last.
            path = verdict.path[: len(update.tokens) - 1]
            kept_rows += [prefix_rows, *(prefix_rows + node for node in path)]
            result = _Settled(update, len(verdict.path))
            self._drafting.learn(sequence, item.guess, update.tokens)
        self._cache.keep(running.slot, kept_rows)
        tokens = result.update.tokens if result.update else ()
        self._observe(running, tokens, rows.features, layers, kept_rows, first_row)
        return result

    def _verdict(self, sequence: Sequence, tree: DraftTree, logits_NV: Tensor) -> Verdict:
        """Apply the rule; only rows of visited nodes are turned into probabilities."""
        past = sequence.history()

        def p(node: int) -> Tensor:
            return distribution(
                logits_NV[node], sequence.params, past.along(tree.path_tokens(node))
            )

        return RULES[sequence.rule](tree, p, sequence.noise, start=len(sequence.tokens))

    def _commit(
        self, sequence: Sequence, tree: DraftTree, verdict: Verdict, logits_NV: Tensor
    ) -> Update:
        tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        update = sequence.commit(tokens)
        update = replace(update, accepted=min(len(verdict.path), len(update.tokens)))
        if sequence.params.logprobs is None:
            return update
        nodes = (0, *verdict.path)
        entries = tuple(
            logprobs(logits_NV[node], token, sequence.params.logprobs)
            for node, token in zip(nodes, update.tokens, strict=False)
        )
        sequence.logprobs += entries
        return replace(update, logprobs=entries)

    def _observe(
        self,
        running: _Running,
        tokens: tuple[int, ...],
        features: Tensor | None,
        layers: tuple[int, ...],
        kept_rows: list[int],
        first_row: int,
    ) -> None:
        sequence = running.sequence
        wanted = self.drafters[sequence.drafter].needs.layers
        rows = None
        if features is not None and wanted:
            rows = features[kept_rows]
            if wanted != layers:
                rows = rows[:, [layers.index(layer) for layer in wanted]]
            self._pool.note(running.place, rows)
        commit = Commit(sequence.id, tokens, sequence.tenant, rows, first_row)
        self._drafting.observe(sequence.drafter, commit)

    def _record(self, item: _Work, result: _Settled, facts: Mapping[str, Any]) -> StepRecord:
        guess, sequence = item.guess, item.running.sequence
        return StepRecord(
            request=sequence.id,
            drafter=sequence.drafter,
            rule=sequence.rule,
            precision=self.target.precision,
            lossless=True,
            proposed=len(guess.tree) - 1 if guess else 0,
            proposed_depth=max(guess.tree.depths) if guess else 0,
            offered=len(guess.offered) - 1 if guess else 0,
            accepted=result.accepted,
            emitted=len(result.update.tokens) if result.update else 0,
            reason=guess.reason if guess else "prefill",
            **facts,
        )

    # -- small helpers ----------------------------------------------------------------------

    def _uncached(self, running: _Running) -> int:
        return len(running.sequence.tokens) - self._cache.lengths[running.slot]

    def _next_tokens(self, running: _Running, number: int) -> tuple[int, ...]:
        """The next ``number`` committed tokens that the cache lacks."""
        start = self._cache.lengths[running.slot]
        return tuple(running.sequence.tokens[start : start + number])

    def _layers(self, work: list[_Work]) -> tuple[int, ...]:
        """The layers whose features some drafter of this step needs."""
        names = {item.running.sequence.drafter for item in work}
        return tuple(sorted({layer for n in names for layer in self.drafters[n].needs.layers}))

    def _end_waiting(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None
    ) -> None:
        self._updates.append(sequence.end(reason, error))
        self._finished[sequence.id] = sequence.completion()

    def _release(self, running: _Running) -> None:
        """Take a finished sequence out and free its slot."""
        sequence = running.sequence
        sequence.clock.finished = time.perf_counter()
        del self._running[sequence.id]
        self._pool.give_back(running.place, sequence.tokens, tenant=sequence.tenant)
        self._drafting.forget(sequence)
        self._finished[sequence.id] = sequence.completion()

    def _check(self, prompt: SequenceOf[int], params: SamplingParams, drafter: str) -> None:
        vocab = self.target.vocab_size
        if not prompt:
            raise InvalidParameter("the prompt is empty; give at least one token")
        if len(prompt) >= self.context:
            raise ContextExceeded(
                f"the prompt has {len(prompt)} tokens; the context holds {self.context}, "
                "one of them for output: shorten the prompt or raise the context"
            )
        if len(prompt) + params.max_tokens > self.context:
            raise ContextExceeded(
                f"max_tokens is {params.max_tokens}; with a prompt of {len(prompt)} tokens the "
                f"context of {self.context} leaves {self.context - len(prompt)}"
            )
        bad = next((t for t in prompt if not 0 <= t < vocab), None)
        if bad is not None:
            raise InvalidParameter(f"prompt token {bad} is not in the vocabulary of {vocab}")
        params.check_vocabulary(vocab)
        if drafter not in self.drafters:
            raise InvalidParameter(
                f"drafter is {drafter!r}; this engine has {', '.join(sorted(self.drafters))}"
            )

    def _measured_budget(self, folder: Path) -> Budget:
        costs = cached_costs(self.target, self._cache, slot=0, folder=folder)
        return CostBudget(costs, nodes=self.config.max_nodes, depth=self.config.max_depth)


def _explain(fault: Exception) -> str:
    """One line for the request's owner: our own messages as they are, of others only the kind."""
    if isinstance(fault, OutriderError):
        return str(fault)
    return f"an internal fault ended this request ({type(fault).__name__}); see the engine's log"
