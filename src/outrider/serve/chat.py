"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from outrider.engine import Update
from outrider.models.tokenizer import TextModel
from outrider.serve import plan
from outrider.serve.answers import (
    REPLY_ROLE,
    ChatAnswer,
    RunningUsage,
    Trace,
    new_id,
    speculation,
    usage,
)
from outrider.serve.exchange import EventStream, Exchange, as_api_error
from outrider.serve.generation import Generation
from outrider.serve.metrics import prompt_type
from outrider.serve.profiles import HEADER, Choice
from outrider.serve.reader import Reader
from outrider.serve.schema import ChatRequest, parse
from outrider.serve.service import Service
from outrider.serve.tools import answer_reader, opens_reasoning
from outrider.serve.worker import Job

PROMPT_TYPE = b"x-outrider-prompt-type"
TRACE = b"x-outrider-trace"


@dataclass(frozen=True)
class Chat:
    """A chat completion that is ready to run."""

    request: ChatRequest
    choice: Choice
    generation: Generation
    answers: list[ChatAnswer]
    id: str
    created: int

    def frame(self, kind: str) -> dict[str, Any]:
        """What every object of the response has in common."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.choice.model,
            "system_fingerprint": self.choice.fingerprint,
        }

    def prompt_ids(self) -> dict[str, Any]:
        """The prompt's tokens, where they are asked for."""
        if not self.request.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.generation.jobs[0].prompt)}


async def chat_completions(service: Service, exchange: Exchange) -> None:
    """Answer a conversation."""
    request = parse(ChatRequest, exchange.body, ignore_unknown=service.config.ignore_unknown)
    chat = await prepare(service, exchange, request)
    exchange.extra["x-outrider-profile"] = chat.choice.name
    if request.stream:
        await _stream(service, exchange, chat)
    else:
        await _whole(service, exchange, chat)


async def prepare(service: Service, exchange: Exchange, request: ChatRequest) -> Chat:
    """Check a request and make its jobs.

    Raises:
        ApiError: it cannot be served.
    """
    limits = service.config.limits
    header = exchange.headers.text(HEADER)
    choice = service.profiles.choose(request.model, header, exchange.caller)
    exchange.facts["profile"] = choice.name
    plan.check_stream(request)
    number = plan.choices(request, service.room)
    tools = plan.plan_tools(request, limits)
    source = plan.chat_grammar(request, tools, service.tool_format, limits)
    logprobs = plan.chat_logprobs(request)
    name, asked = plan.chat_limit(request)
    prompt, opens_reasoning = await service.read(
        _renderer(service, request, tools, constrained=source is not None), what="messages"
    )
    limit = plan.output_tokens(
        asked, prompt=len(prompt), room=service.room, default=None, name=name
    )
    params = plan.sampling(request, service.room, max_tokens=limit, logprobs=logprobs)
    followers = await service.grammars(source, number) if source else [None] * number
    jobs = [
        Job(
            tuple(prompt),
            replace(params, seed=seed),
            drafter=choice.profile.drafter,
            tenant=plan.tenant(exchange.caller.tenant, request.cache_salt),
            grammar=follower,
            most=choice.most,
            rule=choice.profile.rule,
            tokenizer=service.call_decoder if tools.tools else None,
        )
        for seed, follower in zip(plan.seeds(request, number), followers, strict=True)
    ]
    kind = prompt_type(exchange.headers.text(PROMPT_TYPE))
    answers = [
        ChatAnswer(
            _reader(service, tools, source is not None, opens_reasoning),
            table=None if logprobs is None else service.token_table(request),
            id_length=service.tool_format.id_length,
            single=tools.single,
            tell_ids=bool(request.return_token_ids),
        )
        for _ in jobs
    ]
    traced = service.config.ui and exchange.headers.get(TRACE) == b"1"
    generation = Generation(
        service, choice, kind, jobs, len(prompt), "chat", exchange, stepwise=traced
    )
    return Chat(request, choice, generation, answers, new_id("chatcmpl-"), int(time.time()))


def _renderer(
    service: Service, request: ChatRequest, tools: plan.ToolPlan, *, constrained: bool
) -> Callable[[], tuple[list[int], bool]]:
    """Renders and tokenises the conversation; tells whether the prompt opens a reasoning part."""
    messages = plan.template_messages(
        request.messages,
        limits=service.config.limits,
        tools=tools,
        told_by_template=service.told_by_template,
        tool_format=service.tool_format,
    )
    told = plan.plain_tools(tools, told_by_template=service.told_by_template)
    variables = plan.template_variables(request, constrained=constrained)

    def render() -> tuple[list[int], bool]:
        prompt = service.text.chat(messages, tools=told, variables=variables)
        return prompt, opens_reasoning(service.text.decode(prompt[-8:]))

    return render


def _reader(service: Service, tools: plan.ToolPlan, constrained: bool, opened: bool) -> Reader:
    return answer_reader(
        service.tool_format,
        tools.names,
        forced=tools.forced,
        template=service.template,
        constrained=constrained,
        opened=opened,
    )


async def _whole(service: Service, exchange: Exchange, chat: Chat) -> None:
    async with chat.generation as generation:
        while not generation.done:
            for index, update in await generation.news():
                chat.answers[index].take(update)
    found = []
    for index, answer in enumerate(chat.answers):
        answer.pop_logprobs()
        ids = answer.pop_token_ids()
        entries = {"content": answer.logprobs, "refusal": None}
        found.append(
            {
                "index": index,
                "message": answer.message(),
                "logprobs": entries if answer.table is not None else None,
                "finish_reason": answer.finish_reason,
                **ids,
            }
        )
    completions = chat.generation.completions
    numbers = usage(chat.generation.prompt_tokens, completions)
    exchange.facts.update(numbers)
    await exchange.reply(
        {
            **chat.frame("chat.completion"),
            **chat.prompt_ids(),
            "choices": found,
            "usage": numbers,
            "metrics": speculation(completions, chat.choice, details=service.config.details),
        }
    )


async def _stream(service: Service, exchange: Exchange, chat: Chat) -> None:
    options = chat.request.stream_options
    pad = chat.choice.profile.pad or bool(options and options.include_obfuscation)
    frame = chat.frame("chat.completion.chunk")
    stream = EventStream(exchange, service.metrics, chat.generation.labels, frame=frame, pad=pad)
    chunks = _Chunks(chat, service.text)
    try:
        async with chat.generation as generation:
            while not generation.done:
                news = await generation.news(stream)
                await stream.send([c for index, update in news for c in chunks.of(index, update)])
    except Exception as fault:
        if not stream.begun:
            raise
        await stream.fail(as_api_error(fault))
        return
    completions = chat.generation.completions
    numbers = usage(chat.generation.prompt_tokens, completions)
    exchange.facts.update(numbers)
    if chunks.usage.wanted:
        metrics = speculation(completions, chat.choice, details=service.config.details)
        await stream.send([{"choices": [], "usage": numbers, "metrics": metrics}])
    await stream.done()


class _Chunks:
    """Makes the chunks of a streamed chat, all but their frame."""

    def __init__(self, chat: Chat, text: TextModel) -> None:
        self._chat = chat
        self.usage = RunningUsage(chat.generation.prompt_tokens, chat.request.stream_options)
        self._tail: dict[str, Any] = {}
        self._traces = [Trace(text) for _ in chat.answers] if chat.generation.stepwise else []
        self._begun: set[int] = set()

    def of(self, index: int, update: Update) -> list[dict[str, Any]]:
        """The chunks of one update: the role first, the finish reason last."""
        answer = self._chat.answers[index]
        self._tail = self.usage.take(update)
        deltas = answer.take(update)
        found = []
        if index not in self._begun:
            self._begun.add(index)
            opening = self._chunk(index, {"role": REPLY_ROLE, "content": ""})
            found.append({**opening, **self._chat.prompt_ids()})
        for delta in deltas:
            ids = answer.pop_token_ids()
            found.append(self._chunk(index, delta, answer.pop_logprobs(), ids=ids))
        if answer.finish_reason is not None:
            entries = answer.pop_logprobs()
            ids = answer.pop_token_ids()
            found.append(self._chunk(index, {}, entries, ids=ids, finish=answer.finish_reason))
        if self._traces and update.tokens:
            found = found or [self._chunk(index, {})]
            found[-1]["steps"] = [self._traces[index].step(update)]
        return found

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        entries: list[dict[str, Any]] | None = None,
        *,
        ids: Mapping[str, Any] = MappingProxyType({}),
        finish: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": entries, "refusal": None} if entries else None,
            "finish_reason": finish,
            **ids,
        }
        return {"choices": [choice], **self._tail}
