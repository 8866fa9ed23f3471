"""The engine in this process, asked like any other. The one backend that knows a tensor library.

One thread drives the engine; requests and results cross by queues and by the event loop's own
call. It honours everything that `SamplingParams` has and structured output; tools, and a place of
its own for reasoning, where it is handed the server's way with chats.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from outrider import __version__
from outrider.backends.base import (
    RESPONSE,
    Acceptance,
    Answer,
    Ask,
    Conversation,
    Counters,
    EngineInfo,
    TokenLogprob,
    UnsupportedOption,
)
from outrider.backends.prometheus import Scrape
from outrider.core.grammar import Grammar
from outrider.core.sampling import SamplingParams
from outrider.engine import Completion, Engine, Update
from outrider.errors import InvalidParameter, OutriderError
from outrider.models.tokenizer import Decoder, TextModel
from outrider.records.request import acceptance_record, by_position, is_verify_step

if TYPE_CHECKING:
    from outrider.engine.grammar import GrammarCompiler, GrammarSource

KIND = "embedded"
IDLE_S = 0.2


@dataclass(frozen=True)
class ReadAnswer:
    """A whole answer's parts: what it says, what the model wrote for itself, and names and
    arguments of tool calls."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Rendered:
    """A chat as it is put to the model.

    Attributes:
        prompt: its tokens.
        source: the grammar of the answer; `None` for free text.
        read: finds the parts of the answer's text.
        decoder: shows the special tokens that calls are written with; `None` takes the engine's.
    """

    prompt: tuple[int, ...]
    source: GrammarSource | None
    read: Callable[[str], ReadAnswer]
    decoder: Decoder | None


Render = Callable[[Ask], Rendered]


@dataclass
class _Job:
    """A request on its way through the engine's thread."""

    prompt: tuple[int, ...]
    params: SamplingParams
    done: Callable[[Completion | OutriderError], None]
    tenant: str
    grammar: Grammar | None = None
    decoder: Decoder | None = None
    number: int = -1
    begin: float = field(default_factory=time.perf_counter)
    arrivals: list[float] = field(default_factory=list)
    tokens_at: list[int] = field(default_factory=list)
    cancelled: bool = False


class EmbeddedBackend:
    """An engine, run by a thread of its own from the first request to `close`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextModel,
        *,
        drafter: str = "none",
        render: Render | None = None,
    ) -> None:
        """
        Args:
            engine: nobody else may drive it. Its prefix reuse should be off for measurements.
            tokenizer: the target's.
            drafter: who guesses; every request is a tenant of its own, so that no drafter can
                copy the answer that another request got.
            render: how chats are put to the model and read; `None` knows no tools and leaves
                reasoning in the text. `outrider.serve.tool_use` has the server's way.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._drafter = drafter
        self._render = render
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._live: dict[int, _Job] = {}
        self._totals = {"requests": 0, "prompt": 0, "output": 0}
        self._sent = 0
        self._thread: threading.Thread | None = None
        self._compiler: GrammarCompiler | None = None
        self._compiling = threading.Lock()
        name = engine.target.name
        self._info = EngineInfo(
            kind=KIND,
            version=__version__,
            models=(name,),
            model=name,
            max_model_len=engine.context,
            abilities=frozenset({"tokenize", "acceptance in the response"}),
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def answer(self, ask: Ask) -> Answer:
        params, chat = parameters(ask), self._rendered(ask)
        prompt = chat.prompt if chat else self._tokens(ask)
        grammar = await asyncio.to_thread(self._grammar, ask, chat)
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Completion | OutriderError] = loop.create_future()

        def done(value: Completion | OutriderError) -> None:
            loop.call_soon_threadsafe(_resolve, result, value)

        self._sent += 1
        job = _Job(
            prompt,
            params,
            done,
            tenant=f"ask-{self._sent}",
            grammar=grammar,
            decoder=chat.decoder if chat else None,
        )
        self._start()
        self._jobs.put(job)
        try:
            async with asyncio.timeout(ask.cancel_after_s):
                ended = await asyncio.shield(result)
        except (TimeoutError, asyncio.CancelledError) as fault:
            job.cancelled = True
            if not isinstance(fault, TimeoutError):
                raise
            ended = await result
        if isinstance(ended, OutriderError):
            end = time.perf_counter() - job.begin
            return Answer(job.begin, end, finish_reason="error", error=str(ended))
        answer = self._answer(job, ended, ask)
        return answer if chat is None else _in_parts(answer, chat)

    async def answer_alone(self, ask: Ask) -> Answer:
        return await self.answer(ask)

    async def tokenize(self, prompt: str | Conversation) -> tuple[int, ...] | None:
        return self._tokens(Ask(prompt))

    async def counters(self) -> Counters | None:
        load = self._engine.load
        return Counters(
            at=time.perf_counter(),
            requests=self._totals["requests"],
            prompt_tokens=self._totals["prompt"],
            output_tokens=self._totals["output"],
            running=load.running,
            waiting=load.waiting,
            cache_use=load.rows / load.capacity if load.capacity else None,
        )

    async def scrape(self) -> Scrape | None:
        return None

    async def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    def _rendered(self, ask: Ask) -> Rendered | None:
        """Raises:
        UnsupportedOption: tools, or a choice of them, that cannot be honoured."""
        if self._render is not None and ask.is_chat:
            return self._render(ask)
        if ask.tools or ask.tool_choice:
            raise _unsupported("tools" if ask.tools else "tool_choice")
        return None

    def _tokens(self, ask: Ask) -> tuple[int, ...]:
        # As on the server: a grammar would rule the reasoning as well.
        variables = {"enable_thinking": False} if ask.response_format else None
        prompt = ask.prompt
        if isinstance(prompt, str):
            return tuple(self._tokenizer.encode(prompt))
        messages = [part for part in prompt if isinstance(part, Mapping)]
        if len(messages) == len(prompt):
            return tuple(self._tokenizer.chat(messages, variables=variables))
        return tuple(part for part in prompt if isinstance(part, int))

    def _grammar(self, ask: Ask, chat: Rendered | None) -> Grammar | None:
        """The grammar of the request in its first state; compiles it where it is new.

        Raises:
            UnsupportedOption: it is not a grammar, too complex, or the model never ends.
        """
        if chat is None and ask.response_format is None:
            return None
        from outrider.engine.grammar import GrammarSource

        try:
            source = chat.source if chat else GrammarSource.of_format(ask.response_format or {})
            return None if source is None else self._compiled(source)
        except InvalidParameter as fault:
            name = "response_format" if ask.response_format else "tools"
            raise UnsupportedOption(f"the embedded engine cannot honour {name}: {fault}") from None

    def _compiled(self, source: GrammarSource) -> Grammar:
        from outrider.engine.grammar import GrammarCompiler

        with self._compiling:
            if self._compiler is None:
                target = self._engine.target
                self._compiler = GrammarCompiler(
                    self._tokenizer, vocab_size=target.vocab_size, ends=target.end_tokens
                )
        return self._compiler.start(source)

    def _answer(self, job: _Job, ended: Completion, ask: Ask) -> Answer:
        arrivals = tuple(at - job.begin for at in job.arrivals)
        return Answer(
            begin=job.begin,
            end_s=arrivals[-1] if arrivals else time.perf_counter() - job.begin,
            text=ended.text,
            finish_reason=ended.finish_reason,
            prompt_tokens=len(ended.prompt),
            completion_tokens=len(ended.tokens),
            arrivals_s=arrivals,
            tokens=ended.tokens,
            tokens_at=tuple(job.tokens_at),
            queue_s=ended.queue_s,
            logprobs=self._logprobs(ended) if ask.logprobs is not None else None,
            acceptance=acceptance_of(ended) if ended.error is None else None,
            model=self._info.model,
            error=ended.error,
        )

    def _logprobs(self, ended: Completion) -> tuple[TokenLogprob, ...]:
        def text(token: int) -> str:
            return self._tokenizer.decode([token])

        return tuple(
            TokenLogprob(text(token), told.logprob, tuple((text(t), p) for t, p in told.top))
            for token, told in zip(ended.tokens, ended.logprobs, strict=True)
        )

    # -- the engine's thread -----------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        ending = False
        while not ending or self._live:
            ending = self._take_in() or ending
            for job in list(self._live.values()):
                if job.cancelled:
                    self._engine.cancel(job.number)
            try:
                updates = self._engine.step() if self._engine.has_work else []
            except Exception as fault:  # the engine lost what ran; those who wait go on
                updates = self._engine.abandon(f"the engine failed: {fault}")
            now = time.perf_counter()
            for update in updates:
                self._arrived(update, now)

    def _take_in(self) -> bool:
        """Give waiting jobs to the engine; is the end asked for?"""
        block = not self._engine.has_work
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S) if block else self._jobs.get_nowait()
            except queue.Empty:
                return False
            block = False
            if job is None:
                return True
            try:
                job.number = self._engine.add(
                    job.prompt,
                    job.params,
                    drafter=self._drafter,
                    tenant=job.tenant,
                    grammar=job.grammar,
                    tokenizer=job.decoder,
                )
            except OutriderError as fault:
                job.done(fault)
            else:
                self._live[job.number] = job

    def _arrived(self, update: Update, now: float) -> None:
        job = self._live[update.request]
        if update.tokens:
            job.arrivals.append(now)
            job.tokens_at.append(len(update.tokens))
        if update.finish_reason is None:
            return
        del self._live[update.request]
        completion = self._engine.take(update.request)
        self._totals["requests"] += 1
        self._totals["prompt"] += len(completion.prompt)
        self._totals["output"] += len(completion.tokens)
        job.done(completion)


def _resolve(
    future: asyncio.Future[Completion | OutriderError], value: Completion | OutriderError
) -> None:
    if not future.done():
        future.set_result(value)


def _unsupported(name: str) -> UnsupportedOption:
    return UnsupportedOption(
        f"the embedded engine cannot honour {name}; start outrider serve and measure that"
    )


def _in_parts(answer: Answer, chat: Rendered) -> Answer:
    """Reasoning and calls in their own places; a call that was cut before it was one stays text."""
    if answer.error is not None:
        return answer
    parts = chat.read(answer.text)
    finish = answer.finish_reason
    if parts.calls and finish == "stop":
        finish = "tool_calls"
    return replace(
        answer,
        text=parts.text,
        reasoning=parts.reasoning,
        tool_calls=parts.calls,
        finish_reason=finish,
    )


def parameters(ask: Ask) -> SamplingParams:
    """The request's parameters, its grammar and choice of tools left out.

    Raises:
        UnsupportedOption: it asks for another engine's own field.
        InvalidParameter: a value is out of range.
    """
    if ask.extra:
        raise _unsupported("extra")
    usual = SamplingParams()
    given: dict[str, Any] = {
        name: value
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "seed", "min_tokens", "logprobs"),
        )
        if (value := getattr(ask, name)) is not None
    }
    return SamplingParams(
        **{"temperature": usual.temperature, **given},
        logit_bias=dict(ask.logit_bias or {}),
        stop=ask.stop,
        ignore_eos=ask.ignore_eos,
        max_tokens=ask.max_tokens,
    )


def acceptance_of(completion: Completion) -> Acceptance:
    """What the steps of a request tell, its costs among it."""
    record = acceptance_record(completion.steps, engine=KIND)
    accepted, rejected = by_position(completion.steps)
    verify = [step for step in completion.steps if is_verify_step(step)]
    return Acceptance(
        engine=KIND,
        source=RESPONSE,
        accepted=record.num_accepted_draft_tokens,
        drafted=record.num_draft_tokens,
        steps=record.num_spec_steps,
        counts_plain_steps=True,
        histogram=record.acceptance_histogram,
        per_step_accepted=record.per_step_accepted,
        per_step_drafted=record.per_step_drafted,
        accepted_by_position=accepted,
        rejected_by_position=rejected,
        told={
            "drafter": completion.drafter,
            "lossless": all(step.lossless for step in completion.steps),
            "draft_ms": sum(step.draft_ms / step.sequences for step in verify),
            "verify_ms": sum(step.verify_ms / step.sequences for step in verify),
            "host_ms": sum(step.host_ms / step.sequences for step in verify),
        },
    )
