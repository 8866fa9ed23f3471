"""Any engine with an OpenAI-compatible server: asks, and measures when the answer comes.

`OpenAIBackend` does the same for all; what differs between engines is in its `Dialect`. Nothing is
assumed of an unknown server: `GENERIC` looks for acceptance in every place that an engine is known
to put it, and reports none where there is none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from outrider.backends import llamacpp, sglang, tensorrt_llm, vllm
from outrider.backends.base import (
    Acceptance,
    Answer,
    Ask,
    Conversation,
    Counters,
    EngineInfo,
    EngineUnfit,
    TokenLogprob,
    UnsupportedOption,
    between,
)
from outrider.backends.dialect import CounterNames, Dialect, Json, count, first_choice
from outrider.backends.prometheus import NotPrometheus, Scrape, parse
from outrider.backends.wire import Reply, StreamFault, Wire, encode, events, reason, refusal

SETTLE_S = 2.0
SETTLE_STEP_S = 0.02
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_READERS = (
    vllm.read_acceptance,
    sglang.read_acceptance,
    tensorrt_llm.read_acceptance,
    llamacpp.read_acceptance,
)
# Fields of `Ask` that keep their name on the wire.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "min_tokens", "tool_choice", "response_format"),
)


def read_any(event: Json) -> Acceptance | None:
    """Acceptance wherever an engine is known to put it; `None` if two claim the answer."""
    found = [told for read in _READERS if (told := read(event)) is not None]
    return replace(found[0], engine="openai") if len(found) == 1 else None


GENERIC = Dialect(kind="openai", read=read_any)


def body_of(ask: Ask, *, model: str, dialect: Dialect) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request.

    Raises:
        UnsupportedOption: the request asks for what this interface has no place for.
    """
    body: dict[str, Any] = {"model": ask.model or model, "max_tokens": ask.max_tokens}
    for name in dialect.refused:
        if getattr(ask, name) not in (None, (), False):
            raise UnsupportedOption(f"{dialect.kind} cannot honour {name}; leave it out")
    chat = ask.is_chat
    if chat:
        body["messages"] = list(ask.prompt)
    else:
        body["prompt"] = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
        for name in ("tools", "tool_choice"):
            if getattr(ask, name):
                raise UnsupportedOption(f"{name} needs messages; a plain prompt has no tools")
    body |= {name: value for name in _SAME if (value := getattr(ask, name)) is not None}
    if ask.tools:
        body["tools"] = list(ask.tools)
    if ask.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in ask.logit_bias.items()}
    if ask.stop:
        body["stop"] = list(ask.stop)
    if ask.ignore_eos:
        body["ignore_eos"] = True
    if ask.logprobs is not None:
        wanted = {"logprobs": True, "top_logprobs": ask.logprobs} if chat else {}
        body |= wanted or {"logprobs": ask.logprobs}
    if ask.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return (CHAT if chat else COMPLETIONS), {**body, **dialect.extra_body, **ask.extra}


@dataclass
class _Reading:
    """An answer as it comes in."""

    begin: float
    dialect: Dialect
    chat: bool
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    usage: Mapping[str, Any] = field(default_factory=dict)
    finish: str | None = None
    model: str | None = None
    fingerprint: str | None = None
    acceptance: Acceptance | None = None
    error: str | None = None
    status: int | None = None
    notes: list[str] = field(default_factory=list)

    def event(self, event: Mapping[str, Any]) -> None:
        """Take in one chunk of a stream."""
        error = event.get("error")
        if error:
            message = error.get("message") if isinstance(error, Mapping) else error
            self.error = f"the engine failed in mid-stream: {' '.join(str(message).split())}"
            return
        choice = first_choice(event)
        part = (choice.get("delta") or {}) if self.chat else choice
        if self._content(part if isinstance(part, Mapping) else {}):
            self.arrivals.append(time.perf_counter() - self.begin)
        self._facts(event, choice)

    def whole(self, event: Mapping[str, Any]) -> None:
        """Take in an answer that came in one piece."""
        choice = first_choice(event)
        part = (choice.get("message") or {}) if self.chat else choice
        self._content(part if isinstance(part, Mapping) else {})
        self._facts(event, choice)
        if not choice:
            self.error = "the answer has no choices; this is no OpenAI-compatible server"

    def _content(self, part: Mapping[str, Any]) -> bool:
        """Text, reasoning and calls of a chunk; was there any?"""
        text = part.get("content") if self.chat else part.get("text")
        thought = part.get("reasoning_content") or part.get("reasoning")
        if text:
            self.text.append(str(text))
        if isinstance(thought, str):
            self.reasoning.append(thought)
        calls = part.get("tool_calls") or ()
        for place, call in enumerate(calls):
            function = call.get("function") or {}
            known = self.calls.setdefault(call.get("index", place), ["", ""])
            known[0] += function.get("name") or ""
            known[1] += function.get("arguments") or ""
        return bool(text or thought or calls)

    def _facts(self, event: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        """Everything but the content. Late facts alone are looked for in late chunks."""
        if self.model is None:
            self.model = event.get("model")
            self.fingerprint = event.get("system_fingerprint")
        usage = event.get("usage")
        if isinstance(usage, Mapping):
            self.usage = usage
        told = choice.get("token_ids")
        if isinstance(told, list):
            self.tokens += [int(token) for token in told]
        if choice.get("logprobs"):
            self.logprobs += _logprobs(choice["logprobs"])
        finish = choice.get("finish_reason")
        if finish:
            self.finish = str(finish)
        if finish or not choice or "sglext" in event or "timings" in event:
            self.acceptance = self.dialect.read(event) or self.acceptance

    def answer(self) -> Answer:
        end = time.perf_counter() - self.begin
        tokens = count(self.usage.get("completion_tokens"))
        notes = list(self.notes)
        if tokens is None and self.error is None and self.finish != "cancelled":
            notes.append("the engine sent no usage: tokens and time per token are unknown")
        return Answer(
            begin=self.begin,
            end_s=end,
            text="".join(self.text),
            finish_reason="error" if self.error is not None else self.finish,
            prompt_tokens=count(self.usage.get("prompt_tokens")),
            completion_tokens=tokens,
            arrivals_s=tuple(self.arrivals),
            tokens=tuple(self.tokens) or None,
            tool_calls=tuple((name, words) for name, words in self.calls.values()),
            logprobs=tuple(self.logprobs) or None,
            acceptance=self.acceptance if self.error is None else None,
            model=self.model,
            fingerprint=self.fingerprint,
            status=self.status,
            error=self.error,
            notes=tuple(notes),
            reasoning="".join(self.reasoning),
        )


def _logprobs(told: Mapping[str, Any]) -> list[TokenLogprob]:
    """From chat's form, or from the older one of completions."""
    if isinstance(told.get("content"), list):
        return [
            TokenLogprob(
                entry["token"],
                entry["logprob"],
                tuple((top["token"], top["logprob"]) for top in entry.get("top_logprobs") or ()),
            )
            for entry in told["content"]
        ]
    tokens, values = told.get("tokens") or (), told.get("token_logprobs") or ()
    tops = told.get("top_logprobs") or [{}] * len(tokens)
    return [
        TokenLogprob(token, value, tuple((top or {}).items()))
        for token, value, top in zip(tokens, values, tops, strict=False)
        if value is not None
    ]


class OpenAIBackend:
    """A server at an address. `outrider.backends.connect.connect` makes one."""

    def __init__(self, wire: Wire, dialect: Dialect, info: EngineInfo) -> None:
        self._wire = wire
        self._dialect = dialect
        self._info = info

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """A request as it is, for questions that `Ask` has no word for.

        Raises:
            EngineUnfit: the server cannot be reached.
        """
        return await self._wire.post(path, body)

    async def get(self, path: str) -> Reply:
        """Likewise."""
        return await self._wire.get(path)

    async def answer(self, ask: Ask) -> Answer:
        path, body = body_of(ask, model=self._info.model, dialect=self._dialect)
        data = encode(body)
        reading = _Reading(time.perf_counter(), self._dialect, ask.is_chat)
        hang_up = asyncio.timeout(ask.cancel_after_s)
        try:
            async with hang_up:
                await self._exchange(path, data, reading, stream=ask.stream)
        except TimeoutError as fault:
            if hang_up.expired():
                reading.finish = "cancelled"
            else:
                reading.error = reason(fault)
        except aiohttp.ClientPayloadError as fault:
            reading.error = f"the answer broke off: {reason(fault)}"
        except (aiohttp.ClientError, StreamFault, OSError) as fault:
            reading.error = reason(fault)
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            reading.error = f"the answer is malformed: {fault!r}"
        answer = reading.answer()
        asked = ask.model or self._info.model
        if answer.model is not None and answer.model != asked:
            answer = answer.noted(f"asked for model {asked!r}, answered by {answer.model!r}")
        return answer

    async def _exchange(self, path: str, data: bytes, reading: _Reading, *, stream: bool) -> None:
        async with self._wire.session().post(self._wire.root + path, data=data) as response:
            reading.status = response.status
            if response.status != 200:
                reading.error = refusal(response.status, await response.text(errors="replace"))
                return
            if not stream:
                told = await response.json(content_type=None)
                reading.whole(told if isinstance(told, Mapping) else {})
                return
            if response.content_type != "text/event-stream":
                raise StreamFault(f"the answer is {response.content_type}, no event stream")
            async for event in events(response):
                reading.event(event)
                if reading.error is not None:
                    return
        if reading.finish is None:
            reading.error = "the stream ended before the answer was finished"

    async def answer_alone(self, ask: Ask) -> Answer:
        before = None
        if self._dialect.counters is not None and self._dialect.counters.accepted:
            before = await self.counters()
        answer = await self.answer(ask)
        if answer.acceptance is not None or answer.error is not None or before is None:
            return answer
        if answer.finish_reason == "cancelled":
            return answer
        after, why = await self._settled(before)
        if after is None:
            return answer.noted(why)
        found, missing = between(before, after, engine=self._dialect.kind)
        if found is None:
            return answer.noted(missing or "")
        return replace(answer, acceptance=found)

    async def _settled(self, before: Counters) -> tuple[Counters | None, str]:
        """The counters once the request is in them, or why they cannot be used."""
        end = time.perf_counter() + SETTLE_S
        while True:
            after = await self.counters()
            if after is None:
                return None, "the engine's counters cannot be read any more"
            if before.requests is None or after.requests is None:
                if after.output_tokens != before.output_tokens:
                    return after, ""
            elif after.requests - before.requests == 1:
                return after, ""
            elif after.requests - before.requests > 1:
                return None, "other requests ran beside this one: counters tell nothing of it"
            if time.perf_counter() > end:
                return None, "the engine's counters do not show this request"
            await asyncio.sleep(SETTLE_STEP_S)

    async def tokenize(self, prompt: str | Conversation) -> tuple[int, ...] | None:
        call = self._dialect.tokenize
        if call is None:
            return None
        if isinstance(prompt, str):
            body = call.text(self._info.model, prompt)
        elif call.chat is not None:
            body = call.chat(self._info.model, prompt)
        else:
            return None
        reply = await self._wire.post(call.path, body)
        found = reply.object.get("tokens")
        if reply.status != 200 or not isinstance(found, list):
            return None
        return tuple(int(token) for token in found)

    async def scrape(self) -> Scrape | None:
        if self._dialect.counters is None:
            return None
        reply = await self._wire.get(self._dialect.metrics_path)
        if reply.status != 200:
            return None
        try:
            return parse(reply.text)
        except NotPrometheus:
            return None

    async def counters(self) -> Counters | None:
        names, page = self._dialect.counters, await self.scrape()
        return None if page is None or names is None else read_counters(page, names)

    async def close(self) -> None:
        await self._wire.close()


def read_counters(page: Scrape, names: CounterNames) -> Counters:
    """The counters on a page; a name that is not there gives `None`."""

    def whole(name: str) -> int | None:
        value = page.total(name) if name else None
        return None if value is None else round(value)

    positions = page.by_label(names.per_position, names.position_label)
    return Counters(
        at=time.perf_counter(),
        drafts=whole(names.drafts),
        drafted=whole(names.drafted),
        accepted=whole(names.accepted),
        per_position={int(p): round(v) for p, v in positions.items() if p.isdigit()},
        requests=whole(names.requests),
        prompt_tokens=whole(names.prompt_tokens),
        output_tokens=whole(names.output_tokens),
        running=whole(names.running),
        waiting=whole(names.waiting),
        cache_use=page.mean(names.cache_use) if names.cache_use else None,
        preemptions=whole(names.preemptions),
    )


def models_of(reply: Reply, *, root: str) -> Sequence[Mapping[str, Any]]:
    """The models of a list-of-models answer.

    Raises:
        EngineUnfit: it is none, or empty.
    """
    if reply.status in (401, 403):
        raise EngineUnfit(f"{root} wants a key (HTTP {reply.status}); set OUTRIDER_API_KEY")
    found = reply.object.get("data")
    if reply.status != 200 or not isinstance(found, list):
        raise EngineUnfit(
            f"{root} has no /v1/models (HTTP {reply.status}); it is no OpenAI-compatible server"
        )
    models = [m for m in found if isinstance(m, Mapping) and isinstance(m.get("id"), str)]
    if not models:
        raise EngineUnfit(f"{root} serves no model")
    return models
