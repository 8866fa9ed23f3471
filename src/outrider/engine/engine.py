"""The engine: many sequences, one step at a time, one path for plain and speculative decoding.

A step, in the order it happens: schedule, propose, target forward, distribution, verdict, commit,
keep cache, observe, record. There is no branch on drafter, temperature or tree shape: a sequence
without guesses has a tree of one node.

The engine is synchronous and owns no thread; the caller drives it with `step`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.noise import Purpose
from outrider.core.sampling import SamplingParams, distribution, logprobs
from outrider.core.tree import DraftTree
from outrider.core.verify import RULES, Verdict
from outrider.drafters.base import Commit, Drafter
from outrider.drafters.none import NoneDrafter
from outrider.engine.budget import Budget, CostBudget
from outrider.engine.costs import cached_costs
from outrider.engine.drafting import Drafting, Guess
from outrider.engine.memory import MemoryPlan, available_memory
from outrider.engine.scheduler import Waiting, schedule
from outrider.engine.sequence import Completion, Decoder, Sequence, Update
from outrider.engine.slots import SlotPool
from outrider.errors import InvalidParameter, NonFiniteLogits
from outrider.models.paths import cache_folder
from outrider.models.target import Forward, Segment, Target
from outrider.records.step import StepRecord


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is put together.

    Attributes:
        slots: sequences that run at once.
        context: positions per sequence, prompt and output together; `None` takes the model's.
        prefill_chunk: committed tokens that one step may bring into the cache.
        rule: walk, reject or block.
        reuse_prefix: keep a finished request's cache rows for a prompt that starts the same.
        max_nodes, max_depth: never guess more than this per sequence and step.
    """

    slots: int = 1
    context: int | None = None
    prefill_chunk: int = 256
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
        if self.rule not in RULES:
            raise InvalidParameter(f"rule is {self.rule!r}; use one of {', '.join(RULES)}")
        if self.context is not None and self.context < 2:
            raise InvalidParameter(f"context is {self.context}; use 2 or more")


@dataclass
class _Running:
    """A sequence with its place in the cache."""

    sequence: Sequence
    slot: int


@dataclass(frozen=True)
class _Work:
    """What one running sequence does in a step."""

    running: _Running
    segment: Segment
    guess: Guess | None  # None: a prefill chunk


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
            InvalidParameter: the context exceeds the model's.
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
        self.plan = self._memory_plan()
        self.plan.check(slots=self.config.slots, context=self.context)
        self._tokenizer = tokenizer
        length = self.context + self.config.max_nodes + 1
        self._cache = target.new_cache(slots=self.config.slots, length=length)
        self._pool = SlotPool(self._cache, reuse=self.config.reuse_prefix)
        self.budget = budget or self._measured_budget(cache_folder() / "costs")
        purpose = Purpose.TOKEN if self.config.rule == "walk" else Purpose.DRAFT
        self._drafting = Drafting(self.drafters, self.budget, target.vocab_size, purpose)
        self._rule = RULES[self.config.rule]
        self._ids = count()
        self._steps = count()
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, _Running] = {}
        self._finished: dict[int, Completion] = {}
        self._late_updates: list[Update] = []

    # -- requests ---------------------------------------------------------------------------

    def add(
        self,
        prompt: SequenceOf[int],
        params: SamplingParams,
        *,
        drafter: str = "none",
        tenant: str = "",
    ) -> int:
        """Queue a request; returns its id.

        Raises:
            InvalidParameter: the prompt is empty, too long or not of this vocabulary, the output
                cannot fit, or the drafter is unknown.
        """
        self._check(prompt, params, drafter)
        request = next(self._ids)
        sequence = Sequence(
            request,
            prompt,
            params,
            drafter=drafter,
            end_tokens=self.target.end_tokens,
            context=self.context,
            tokenizer=self._tokenizer,
            tenant=tenant,
        )
        self._waiting.append(sequence)
        return request

    def cancel(self, request: int) -> None:
        """End one request now; its last update comes with the next step. Others are untouched."""
        waiting = next((s for s in self._waiting if s.id == request), None)
        if waiting is not None:
            self._waiting.remove(waiting)
            self._late_updates.append(waiting.end("cancelled"))
            self._finished[request] = waiting.completion()
        elif request in self._running:
            running = self._running[request]
            self._late_updates.append(running.sequence.end("cancelled"))
            self._release(running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._late_updates)

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
        updates, self._late_updates = self._late_updates, []
        times = _Times()
        self._admit()
        work = self._plan_work(times)
        if not work:
            return updates
        layers = self._layers(work)
        begin = time.perf_counter()
        forward = self._forward([w.segment for w in work], layers)
        times.verify = time.perf_counter() - begin
        number = next(self._steps)
        settled = []
        for index, item in enumerate(work):
            features = None if forward.features is None else forward.features[index]
            settled.append(self._settle(item, forward.logits[index], features, layers))
        self._cache.check_integrity()
        rows, spent = sum(w.segment.rows for w in work), times.milliseconds()
        self.budget.passed(rows, verify_ms=spent["verify_ms"], host_ms=spent["host_ms"])
        facts = {"step": number, "rows": rows, "sequences": len(work), **spent}
        for item, result in zip(work, settled, strict=True):
            sequence = item.running.sequence
            sequence.steps.append(self._record(item, result, facts))
            if result.update is not None:
                updates.append(result.update)
            if sequence.finished:
                self._release(item.running)
        return updates

    def _admit(self) -> None:
        """Give free slots to waiting sequences, first come first."""
        while self._waiting and len(self._pool):
            sequence = self._waiting.popleft()
            sequence.clock.started = time.perf_counter()
            # A drafter that needs features must see every prompt row, so nothing is reused.
            reuse = not self.drafters[sequence.drafter].needs.layers
            slot = self._pool.take(sequence.tokens, tenant=sequence.tenant, reuse=reuse)
            self._running[sequence.id] = _Running(sequence, slot)
            prompt = Commit(sequence.id, tuple(sequence.tokens), sequence.tenant)
            self._drafting.observe(sequence.drafter, prompt)

    def _plan_work(self, times: _Times) -> list[_Work]:
        """Schedule, draft, and lay out the pass: prefill chunks and trees."""
        waiting = [Waiting(id, self._uncached(r)) for id, r in self._running.items()]
        plan = schedule(waiting, chunk=self.config.prefill_chunk)
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

    def _forward(self, segments: list[Segment], layers: tuple[int, ...]) -> Forward:
        """The target's pass; leaves the cache as it was where the pass fails."""
        try:
            return self.target.forward(segments, self._cache, features=layers)
        except BaseException:
            for segment in segments:
                self._cache.keep(segment.slot, ())
            raise

    def _settle(
        self,
        item: _Work,
        logits_NV: Tensor,
        features: Tensor | None,
        layers: tuple[int, ...],
    ) -> _Settled:
        """Verdict, commit, cache and observation for one sequence of the step."""
        running, sequence = item.running, item.running.sequence
        first_row = self._cache.lengths[running.slot]
        prefix_rows = len(item.segment.prefix)
        kept_rows = list(range(prefix_rows))
        result = _Settled()
        if item.guess is not None:
            try:
                verdict = self._verdict(sequence, item.guess.tree, logits_NV)
            except NonFiniteLogits as fault:
                self._cache.keep(running.slot, kept_rows)
                return _Settled(sequence.end("error", str(fault)))
            update = self._commit(sequence, item.guess.tree, verdict, logits_NV)
            # Law 5: the cache holds all committed tokens but the last.
            path = verdict.path[: len(update.tokens) - 1]
            kept_rows += [prefix_rows, *(prefix_rows + node for node in path)]
            result = _Settled(update, len(verdict.path))
            self._drafting.learn(sequence, item.guess, update.tokens)
        self._cache.keep(running.slot, kept_rows)
        tokens = result.update.tokens if result.update else ()
        self._observe(sequence, tokens, features, layers, kept_rows, first_row)
        return result

    def _verdict(self, sequence: Sequence, tree: DraftTree, logits_NV: Tensor) -> Verdict:
        """Apply the rule; only rows of visited nodes are turned into probabilities."""
        past = sequence.history()

        def p(node: int) -> Tensor:
            return distribution(
                logits_NV[node], sequence.params, past.along(tree.path_tokens(node))
            )

        return self._rule(tree, p, sequence.noise, start=len(sequence.tokens))

    def _commit(
        self, sequence: Sequence, tree: DraftTree, verdict: Verdict, logits_NV: Tensor
    ) -> Update:
        tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        update = sequence.commit(tokens)
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
        sequence: Sequence,
        tokens: tuple[int, ...],
        features: Tensor | None,
        layers: tuple[int, ...],
        kept_rows: list[int],
        first_row: int,
    ) -> None:
        wanted = self.drafters[sequence.drafter].needs.layers
        rows = None
        if features is not None and wanted:
            picked = [layers.index(layer) for layer in wanted]
            rows = features[kept_rows][:, picked]
        commit = Commit(sequence.id, tokens, sequence.tenant, rows, first_row)
        self._drafting.observe(sequence.drafter, commit)

    def _record(self, item: _Work, result: _Settled, facts: Mapping[str, Any]) -> StepRecord:
        guess, sequence = item.guess, item.running.sequence
        return StepRecord(
            request=sequence.id,
            drafter=sequence.drafter,
            rule=self.config.rule,
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

    def _release(self, running: _Running) -> None:
        """Take a finished sequence out and free its slot."""
        sequence = running.sequence
        sequence.clock.finished = time.perf_counter()
        del self._running[sequence.id]
        self._pool.give_back(running.slot, sequence.tokens, tenant=sequence.tenant)
        self._drafting.forget(sequence)
        self._finished[sequence.id] = sequence.completion()

    def _check(self, prompt: SequenceOf[int], params: SamplingParams, drafter: str) -> None:
        vocab = self.target.vocab_size
        if not prompt:
            raise InvalidParameter("the prompt is empty; give at least one token")
        if len(prompt) >= self.context:
            raise InvalidParameter(
                f"the prompt has {len(prompt)} tokens; the context holds {self.context}, "
                "one of them for output: shorten the prompt or raise the context"
            )
        if len(prompt) + params.max_tokens > self.context:
            raise InvalidParameter(
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

    def _memory_plan(self) -> MemoryPlan:
        config = self.config
        length = self.context + config.max_nodes + 1
        rows = config.slots * (1 + config.max_nodes)
        return MemoryPlan(
            cache=self.target.cache_shape.nbytes(config.slots, length),
            drafters=sum(d.needs.memory_bytes for d in self.drafters.values()),
            logits=rows * self.target.vocab_size * 4,
            available=available_memory(self.target.device),
        )

    def _measured_budget(self, folder: Path) -> Budget:
        costs = cached_costs(self.target, self._cache, slot=0, folder=folder)
        return CostBudget(costs, nodes=self.config.max_nodes, depth=self.config.max_depth)
