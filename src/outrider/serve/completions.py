"""`POST /v1/completions`."""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.engine import Update
from outrider.serve import plan
from outrider.serve.answers import RunningUsage, TokenTable, finite, new_id, speculation, usage
from outrider.serve.chat import PROMPT_TYPE
from outrider.serve.errors import bad_request
from outrider.serve.exchange import EventStream, Exchange, as_api_error
from outrider.serve.generation import Generation
from outrider.serve.metrics import prompt_type
from outrider.serve.profiles import HEADER, Choice
from outrider.serve.schema import CompletionRequest, parse
from outrider.serve.service import Service
from outrider.serve.worker import Job


@dataclass
class TextAnswer:
    """One choice of a completion as it grows."""

    echo: str
    table: TokenTable | None
    prompt_ids: list[int] | None = None  # set where tokens' ids are asked for
    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    _offset: int = 0
    _characters: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def __post_init__(self) -> None:
        self._offset = len(self.echo)

    def take(self, update: Update) -> str:
        """The new text; the prompt comes before the first."""
        new = update.text if self.text or not self.echo else self.echo + update.text
        self.text += new
        self.finish_reason = update.finish_reason
        self.token_ids += update.tokens
        if self.table is not None:
            for token, entry in zip(update.tokens, update.logprobs, strict=True):
                self.tokens.append(self.table.name_of(token))
                self.token_logprobs.append(finite(entry.logprob))
                self.top_logprobs.append(
                    {self.table.name_of(t): finite(p) for t, p in reversed(entry.top)}
                )
                self.text_offset.append(self._offset)
                # A character counts once its last byte is there.
                self._offset += len(self._characters.decode(self.table.shown(token)))
        return new

    def ids(self, start: int = 0) -> dict[str, Any]:
        """The fields with the tokens' ids, from one on; the prompt's with the first."""
        if self.prompt_ids is None:
            return {}
        found: dict[str, Any] = {"token_ids": self.token_ids[start:]}
        return found if start else {**found, "prompt_token_ids": self.prompt_ids}

    def logprobs(self, start: int = 0) -> dict[str, Any] | None:
        """OpenAI's older form, from an entry on."""
        if self.table is None:
            return None
        return {
            "tokens": self.tokens[start:],
            "token_logprobs": self.token_logprobs[start:],
            "top_logprobs": self.top_logprobs[start:],
            "text_offset": self.text_offset[start:],
        }


@dataclass(frozen=True)
class TextCompletion:
    """A completion that is ready to run."""

    request: CompletionRequest
    choice: Choice
    generation: Generation
    answers: list[TextAnswer]
    id: str
    created: int

    def frame(self) -> dict[str, Any]:
        """What every object of the response has in common."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.choice.model,
            "system_fingerprint": self.choice.fingerprint,
        }

    def chunk(self, index: int, update: Update) -> dict[str, Any]:
        """What an update brings, as a streamed choice."""
        answer = self.answers[index]
        seen = len(answer.token_ids)
        choice = {
            "index": index,
            "text": answer.take(update),
            "logprobs": answer.logprobs(seen),
            "finish_reason": answer.finish_reason,
            **answer.ids(seen),
        }
        return {"choices": [choice]}


async def completions(service: Service, exchange: Exchange) -> None:
    """Continue one or several prompts."""
    request = parse(CompletionRequest, exchange.body, ignore_unknown=service.config.ignore_unknown)
    task = await prepare(service, exchange, request)
    exchange.extra["x-outrider-profile"] = task.choice.name
    if request.stream:
        await _stream(service, exchange, task)
    else:
        await _whole(service, exchange, task)


async def prepare(
    service: Service, exchange: Exchange, request: CompletionRequest
) -> TextCompletion:
    """Check a request and make its jobs.

    Raises:
        ApiError: it cannot be served.
    """
    header = exchange.headers.text(HEADER)
    choice = service.profiles.choose(request.model, header, exchange.caller)
    exchange.facts["profile"] = choice.name
    plan.check_stream(request)
    plan.refuse_completion(request)
    number = plan.choices(request, service.room)
    given = plan.completion_prompts(request, service.room)
    prompts, echoes = await service.read(lambda: _encoded(service, request, given), what="prompt")
    source = plan.grammar_source(request, service.config.limits)
    count = number * len(prompts)
    followers = await service.grammars(source, count) if source else [None] * count
    jobs = []
    for place, prompt in enumerate(prompts):
        limit = plan.output_tokens(
            request.max_tokens,
            prompt=len(prompt),
            room=service.room,
            default=plan.COMPLETION_TOKENS,
            name="max_tokens",
        )
        params = plan.sampling(request, service.room, max_tokens=limit, logprobs=request.logprobs)
        for index, seed in enumerate(plan.seeds(request, number)):
            jobs.append(
                Job(
                    tuple(prompt),
                    replace(params, seed=seed),
                    drafter=choice.profile.drafter,
                    tenant=plan.tenant(exchange.caller.tenant, request.cache_salt),
                    grammar=followers[place * number + index],
                    most=choice.most,
                    rule=choice.profile.rule,
                )
            )
    kind = prompt_type(exchange.headers.text(PROMPT_TYPE))
    table = None if request.logprobs is None else service.token_table(request)
    answers = [
        TextAnswer(echo, table, prompt if request.return_token_ids else None)
        for echo, prompt in zip(echoes, prompts, strict=True)
        for _ in range(number)
    ]
    generation = Generation(
        service, choice, kind, jobs, sum(map(len, prompts)), "text_completion", exchange
    )
    return TextCompletion(request, choice, generation, answers, new_id("cmpl-"), int(time.time()))


def _encoded(
    service: Service, request: CompletionRequest, given: list[str] | list[list[int]]
) -> tuple[list[list[int]], list[str]]:
    """The prompts as tokens, and the text that each answer begins with."""
    tokens = [service.text.encode(p) if isinstance(p, str) else p for p in given]
    if any(not prompt for prompt in tokens):
        raise bad_request("prompt is empty; give at least one token", param="prompt")
    if not request.echo:
        return tokens, [""] * len(tokens)
    return tokens, [p if isinstance(p, str) else service.text.decode(p) for p in given]


async def _whole(service: Service, exchange: Exchange, task: TextCompletion) -> None:
    async with task.generation as generation:
        while not generation.done:
            for index, update in await generation.news():
                task.answers[index].take(update)
    found = [
        {
            "index": index,
            "text": answer.text,
            "logprobs": answer.logprobs(),
            "finish_reason": answer.finish_reason,
            **answer.ids(),
        }
        for index, answer in enumerate(task.answers)
    ]
    done = task.generation.completions
    numbers = usage(task.generation.prompt_tokens, done)
    exchange.facts.update(numbers)
    metrics = speculation(done, task.choice, details=service.config.details)
    await exchange.reply({**task.frame(), "choices": found, "usage": numbers, "metrics": metrics})


async def _stream(service: Service, exchange: Exchange, task: TextCompletion) -> None:
    options = task.request.stream_options
    pad = task.choice.profile.pad or bool(options and options.include_obfuscation)
    counter = RunningUsage(task.generation.prompt_tokens, options)
    labels, frame = task.generation.labels, task.frame()
    stream = EventStream(exchange, service.metrics, labels, frame=frame, pad=pad)
    try:
        async with task.generation as generation:
            while not generation.done:
                news = await generation.news(stream)
                await stream.send([{**task.chunk(*item), **counter.take(item[1])} for item in news])
    except Exception as fault:
        if not stream.begun:
            raise
        await stream.fail(as_api_error(fault))
        return
    done = task.generation.completions
    numbers = usage(task.generation.prompt_tokens, done)
    exchange.facts.update(numbers)
    if counter.wanted:
        metrics = speculation(done, task.choice, details=service.config.details)
        await stream.send([{"choices": [], "usage": numbers, "metrics": metrics}])
    await stream.done()
