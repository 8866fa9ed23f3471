"""From a request to jobs for the engine: the one validator of all endpoints.

Form was checked by `schema`; here come limits, the vocabulary, the context, and what the model can
do. Rendering, tokenising and compiling run outside the event loop, each with a time limit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.noise import MAX_SEED, fresh_seed
from outrider.core.sampling import SamplingParams
from outrider.engine.grammar import GrammarSource
from outrider.errors import InvalidParameter
from outrider.serve.config import Limits
from outrider.serve.errors import ApiError, bad_request
from outrider.serve.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    NamedTool,
    Sampled,
    Tool,
)
from outrider.serve.tools import ToolFormat, as_plain, forced_grammar, preamble

COMPLETION_TOKENS = 16  # OpenAI's default of the completions endpoint


@dataclass(frozen=True)
class Room:
    """What a request must fit into: the vocabulary, the context and the server's limits."""

    vocab_size: int
    context: int
    limits: Limits


@dataclass(frozen=True)
class ToolPlan:
    """The tools of a request.

    Attributes:
        tools: those the model is told of.
        forced: the answer must be a call.
        single: at most one call is wanted.
    """

    tools: tuple[Tool, ...] = ()
    forced: bool = False
    single: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool.function.name for tool in self.tools)


def check_stream(request: Sampled) -> None:
    """Raises:
    ApiError: options of a stream without one."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options without stream; set stream", param="stream_options")


def choices(request: Sampled, room: Room) -> int:
    """How many answers are wanted per prompt.

    Raises:
        ApiError: more than the server gives.
    """
    number = request.n or 1
    if number > room.limits.n:
        raise bad_request(f"n is {number}; this server gives up to {room.limits.n}", param="n")
    return number


def stops(request: Sampled, limits: Limits) -> tuple[str, ...]:
    given = request.stop
    found = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    if len(found) > limits.stop:
        raise bad_request(
            f"stop has {len(found)} strings; this server takes up to {limits.stop}", param="stop"
        )
    for text in found:
        if not text or len(text) > limits.stop_characters:
            raise bad_request(
                f"a stop string has {len(text)} characters; use 1 to {limits.stop_characters}",
                param="stop",
            )
    return found


def bias(request: Sampled, room: Room) -> dict[int, float]:
    given = request.logit_bias or {}
    if len(given) > room.limits.logit_bias:
        raise bad_request(
            f"logit_bias has {len(given)} entries; use up to {room.limits.logit_bias}",
            param="logit_bias",
        )
    found: dict[int, float] = {}
    for key, value in given.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
        if not 0 <= token < room.vocab_size:
            raise bad_request(
                f"logit_bias names token {key[:20]!r}; use token ids below {room.vocab_size}",
                param="logit_bias",
            )
        found[token] = value
    return found


def output_tokens(
    asked: int | None, *, prompt: int, room: Room, default: int | None, name: str
) -> int:
    """The limit of the output.

    Raises:
        ApiError: the prompt fills the context, or more is asked than can be given.
    """
    left = room.context - prompt
    if left < 1:
        raise bad_request(
            f"the prompt has {prompt} tokens; the context holds {room.context}, one of them for "
            "output",
            param=name,
            code="context_length_exceeded",
        )
    most = room.limits.max_tokens
    if asked is None:
        return min(left, default or left, most or left)
    if most is not None and asked > most:
        raise bad_request(f"{name} is {asked}; this server gives up to {most}", param=name)
    if asked > left:
        raise bad_request(
            f"{name} is {asked}; with a prompt of {prompt} tokens the context of {room.context} "
            f"leaves {left}",
            param=name,
            code="context_length_exceeded",
        )
    return asked


def sampling(
    request: Sampled, room: Room, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The sampler's parameters, the seed left out.

    Raises:
        ApiError: a value is out of range.
    """
    given: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": None if request.top_k is None else max(request.top_k, 0),
        "min_p": request.min_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
    }
    try:
        params = SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            logit_bias=bias(request, room),
            stop=stops(request, room.limits),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            max_tokens=max_tokens,
            logprobs=logprobs,
        )
        params.check_vocabulary(room.vocab_size)
    except InvalidParameter as error:
        raise bad_request(str(error), param=str(error).split(" ", 1)[0].split("[")[0]) from None
    return params


def seeds(request: Sampled, count: int) -> list[int]:
    """A seed per answer: the request's own first, the others derived from it."""
    first = fresh_seed() if request.seed is None else request.seed & MAX_SEED
    others = [
        int.from_bytes(hashlib.blake2b(f"{first}:{i}".encode(), digest_size=8).digest(), "big")
        for i in range(1, count)
    ]
    return [first, *others]


def tenant(name: str, salt: str | None) -> str:
    """Whose cached rows and stores a request shares: nobody's but the same key's and salt's."""
    return name if salt is None else f"{name}\n{salt}"


# -- chat ---------------------------------------------------------------------------------------


def plan_tools(request: ChatRequest, limits: Limits) -> ToolPlan:
    """Which tools the model is told of, and whether it must call one.

    Raises:
        ApiError: too many tools, two of one name, or a choice that cannot be.
    """
    tools, choice = request.tools or [], request.tool_choice
    if len(tools) > limits.tools:
        raise bad_request(f"{len(tools)} tools; this server takes {limits.tools}", param="tools")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("two tools have the same name; rename one", param="tools")
    single = request.parallel_tool_calls is False
    if choice not in (None, "none", "auto") and not tools:
        raise bad_request("tool_choice without tools; name some", param="tool_choice")
    if not tools or choice == "none":
        return ToolPlan()
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise bad_request(
                f"tool_choice names {choice.function.name!r}; tools has {', '.join(names)}",
                param="tool_choice",
            )
        chosen = tuple(t for t in tools if t.function.name == choice.function.name)
        return ToolPlan(chosen, forced=True, single=True)
    return ToolPlan(tuple(tools), forced=choice == "required", single=single)


def grammar_source(
    request: ChatRequest | CompletionRequest, limits: Limits
) -> GrammarSource | None:
    """The grammar that the response format asks for.

    Raises:
        ApiError: it is too large.
    """
    wanted = request.response_format
    if wanted is None:
        return None
    source = GrammarSource.of_format(wanted.model_dump(by_alias=True))
    if source is not None:
        check_grammar_size(source, limits, param="response_format")
    return source


def check_grammar_size(source: GrammarSource, limits: Limits, *, param: str) -> None:
    """Raises:
    ApiError: the grammar's text is larger than the server takes."""
    size = len(source.text.encode("utf-8", errors="replace"))
    if size > limits.grammar_bytes:
        raise bad_request(
            f"the {source.kind} has {size} bytes; this server takes {limits.grammar_bytes}",
            param=param,
        )


def chat_grammar(
    request: ChatRequest, tools: ToolPlan, tool_format: ToolFormat, limits: Limits
) -> GrammarSource | None:
    """The grammar of an answer: the response format's, or that of a forced call.

    Raises:
        ApiError: both are asked for, or it is too large.
    """
    source = grammar_source(request, limits)
    if not tools.forced:
        return source
    if source is not None:
        raise bad_request(
            "response_format together with a forced tool call; use one", param="response_format"
        )
    forced = forced_grammar(tools.tools, tool_format)
    check_grammar_size(forced, limits, param="tools")
    return forced


def chat_limit(request: ChatRequest) -> tuple[str, int | None]:
    """The name and value of the limit on the output.

    Raises:
        ApiError: both names are given and differ.
    """
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_request(
            f"max_tokens is {old} and max_completion_tokens {new}; give one", param="max_tokens"
        )
    return ("max_tokens", old) if new is None else ("max_completion_tokens", new)


def chat_logprobs(request: ChatRequest) -> int | None:
    """How many alternatives are wanted per token; `None` for no log-probabilities."""
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs without logprobs; set logprobs", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def template_messages(
    messages: Sequence[ChatMessage],
    *,
    limits: Limits,
    tools: ToolPlan,
    told_by_template: bool,
    tool_format: ToolFormat,
) -> list[dict[str, Any]]:
    """Messages as chat templates want them.

    Raises:
        ApiError: too many, or content that is no text.
    """
    if len(messages) > limits.messages:
        raise bad_request(
            f"{len(messages)} messages; this server takes {limits.messages}", param="messages"
        )
    found = [_as_plain(message, place) for place, message in enumerate(messages)]
    if tools.tools and not told_by_template:
        told = preamble(tools.tools, tool_format)
        if found[0]["role"] == "system":
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{told}"}
        else:
            found.insert(0, {"role": "system", "content": told})
    return found


def _as_plain(message: ChatMessage, place: int) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message, place)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _text(message: ChatMessage, place: int) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role in ("system", "developer", "user", "tool"):
            raise bad_request(
                f"messages.{place}.content is missing", param=f"messages.{place}.content"
            )
        return message.refusal or ""
    texts = []
    for part in content:
        text = part.text if part.type in ("text", "input_text", "output_text") else part.refusal
        if text is None:
            raise bad_request(
                f"messages.{place}.content has a part of type {part.type[:40]!r}; this server "
                "reads text only",
                param=f"messages.{place}.content",
                code="unsupported_content",
            )
        texts.append(text)
    return "".join(texts)


def _arguments(text: str) -> Any:
    """Arguments as an object where they are one, since templates write them as JSON themselves."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def template_variables(request: ChatRequest, *, constrained: bool) -> dict[str, str | bool]:
    """The few things that a request may tell the template.

    Reasoning is off where a grammar rules the answer, since it would rule the reasoning as well.
    """
    found: dict[str, str | bool] = {}
    effort = request.reasoning_effort
    if effort is not None:
        found["reasoning_effort"] = effort
    if constrained or effort == "none":
        found["enable_thinking"] = False
    return found


def plain_tools(tools: ToolPlan, *, told_by_template: bool) -> list[dict[str, Any]] | None:
    """Tools for the template's own place for them."""
    return as_plain(tools.tools) if tools.tools and told_by_template else None


# -- completions --------------------------------------------------------------------------------


def completion_prompts(request: CompletionRequest, room: Room) -> list[str] | list[list[int]]:
    """The prompts, as texts or as tokens.

    Raises:
        ApiError: none, too many, or a token that is not in the vocabulary.
    """
    prompt = request.prompt
    prompts: Any
    if isinstance(prompt, str) or (prompt and all(isinstance(item, int) for item in prompt)):
        prompts = [prompt]
    else:
        prompts = prompt
    if not prompts or any(not item and not isinstance(item, str) for item in prompts):
        raise bad_request("prompt is empty; give at least one token", param="prompt")
    if len(prompts) > room.limits.prompts:
        raise bad_request(
            f"{len(prompts)} prompts; this server takes {room.limits.prompts}", param="prompt"
        )
    check_tokens([t for p in prompts if not isinstance(p, str) for t in p], room, param="prompt")
    found: list[str] | list[list[int]] = prompts
    return found


def check_tokens(tokens: Sequence[int], room: Room, *, param: str) -> None:
    """Raises:
    ApiError: a token id that is not in the vocabulary."""
    bad = next((t for t in tokens if not 0 <= t < room.vocab_size), None)
    if bad is not None:
        raise bad_request(
            f"{param} holds token {bad}; use token ids below {room.vocab_size}", param=param
        )


def refuse_completion(request: CompletionRequest) -> None:
    """Raises:
    ApiError: a combination that is not offered."""
    if request.echo and request.logprobs is not None:
        raise ApiError(
            400,
            "echo with logprobs is not supported: only output tokens have log-probabilities here",
            param="echo",
            code="unsupported_parameter",
        )


def known(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that say something."""
    return {name: value for name, value in values.items() if value is not None}
