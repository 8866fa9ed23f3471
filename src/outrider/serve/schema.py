"""What requests may hold: one model per endpoint, strict, closed to unknown names.

The models check form only; limits, profiles and the vocabulary are checked by `plan`. Parameters
that are known elsewhere but not offered here are in `REFUSED`, each with its reason: they are
refused by name wherever they ask for something.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from outrider.serve.errors import ApiError, bad_request

REFUSED = {
    "audio": "this server answers in text",
    "bad_words": "use logit_bias, or a grammar",
    "best_of": "use n",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": "use response_format with type regex",
    "guided_grammar": "use response_format with type grammar",
    "guided_json": "use response_format with type json_schema",
    "guided_regex": "use response_format with type regex",
    "chat_template": "templates are never taken from requests",
    "chat_template_kwargs": "templates are never steered by requests, but for reasoning_effort",
    "documents": "put them into a message",
    "moderation": "this server does not moderate",
    "prediction": "drafters are chosen by profile",
    "prompt_logprobs": "only output tokens have log-probabilities here",
    "store": "this server keeps nothing",
    "structured_outputs": "use response_format",
    "suffix": "this server does not fill in the middle",
    "use_beam_search": "this server samples",
    "web_search_options": "this server does not search",
}

Finite = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=2**20)]
Opaque = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
JsonObject = dict[str, JsonValue]


class Form(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Form):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's; load generators ask for it


class Sampled(Form):
    """What completions and chat completions have in common."""

    model: str = Field(min_length=1, max_length=256)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Opaque | None = None
    return_token_ids: bool | None = None  # vLLM's, as is the next
    return_tokens_as_token_ids: bool | None = None
    # Taken note of at most; see docs/reference/server.md.
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_retention: Annotated[str, Field(max_length=64)] | None = None


class TextFormat(Form):
    type: Literal["text"]


class JsonObjectFormat(Form):
    type: Literal["json_object"]


class NamedSchema(Form):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    json_schema: JsonObject = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Form):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(Form):
    type: Literal["regex"]
    regex: Annotated[str, Field(min_length=1)]


class GrammarFormat(Form):
    type: Literal["grammar"]
    grammar: Annotated[str, Field(min_length=1)]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat,
    Field(discriminator="type"),
]


class FunctionCall(Form):
    name: Annotated[str, Field(max_length=256)]
    arguments: Text


class ToolCall(Form):
    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Part(BaseModel):
    """A piece of a message's content; only text is read."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Form):
    """A turn; fields that our own answers carry may be sent back as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: list[JsonValue] | None = None
    audio: None = None
    function_call: None = None


class FunctionForm(Form):
    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Form):
    type: Literal["function"]
    function: FunctionForm


class NamedFunction(Form):
    name: ToolName


class NamedTool(Form):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class CompletionRequest(Sampled):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: Literal[1] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    response_format: ResponseFormat | None = None


class TokenizeRequest(Form):
    """`POST /tokenize`: a prompt, or a conversation."""

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(Form):
    """`POST /detokenize`."""

    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: list[int]


FormType = TypeVar("FormType", bound=Form)


def parse(kind: type[FormType], body: bytes, *, ignore_unknown: bool = False) -> FormType:
    """A request of a kind from a body.

    Raises:
        ApiError: 400 with the first thing that is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
    unknown = [f for f in faults if f["type"] == "extra_forbidden" and _may_go(f, ignore_unknown)]
    if len(unknown) == len(faults):
        return _without(kind, body, [fault["loc"] for fault in unknown])
    raise _explain(kind, next(fault for fault in faults if fault not in unknown), body)


def _may_go(fault: Any, ignore_unknown: bool) -> bool:
    """An unknown parameter that asks for nothing, or that the server was told to ignore."""
    name = str(fault["loc"][-1])
    if name in REFUSED or not ignore_unknown:
        return fault["input"] in (None, False, "", [], {})
    return True


def _without(kind: type[FormType], body: bytes, places: list[tuple[int | str, ...]]) -> FormType:
    """Parse again without the parameters at these places."""
    import json

    values: Any = json.loads(body)
    for place in places:
        inner = values
        for step in place[:-1]:
            found = isinstance(inner, list) and isinstance(step, int)
            found = found or (isinstance(inner, dict) and step in inner)
            if not found:
                continue  # the name of a union's branch
            inner = inner[step]
        if isinstance(inner, dict):
            inner.pop(place[-1], None)
    plain = json.dumps(values).encode()
    try:
        return kind.model_validate_json(plain)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        raise _explain(kind, fault, plain) from None


def _place(fault: Any, body: bytes) -> str:
    """Where in a body a fault is, without the names of unions' branches."""
    import json

    try:
        inner: Any = json.loads(body)
    except (ValueError, RecursionError):  # a number of thousands of digits, say
        return ".".join(str(part) for part in fault["loc"])
    found = []
    for step in fault["loc"]:
        there = isinstance(inner, dict) and step in inner
        if there or (isinstance(inner, list) and isinstance(step, int) and step < len(inner)):
            inner = inner[step]
        elif fault["type"] != "missing" or step is not fault["loc"][-1]:
            continue
        found.append(str(step))
    return ".".join(found)


def _explain(kind: type[Form], fault: Any, body: bytes) -> ApiError:
    if fault["type"] == "json_invalid":
        return bad_request("the body is not valid JSON", code="invalid_json")
    place = _place(fault, body)
    name = str(fault["loc"][-1]) if fault["loc"] else None
    if fault["type"] == "extra_forbidden" and name is not None:
        if name in REFUSED:
            message = f"{place} is not supported: {REFUSED[name]}"
            return bad_request(message, param=place, code="unsupported_parameter")
        near = difflib.get_close_matches(name, kind.model_fields, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return bad_request(
            f"{_clip(place)} is not a parameter of this server{hint}",
            param=_clip(place),
            code="unknown_parameter",
        )
    if fault["type"] == "missing":
        return bad_request(f"{place} is missing", param=place, code="missing_parameter")
    message = f"{_clip(place)}: {fault['msg']}" if place else str(fault["msg"])
    return bad_request(_clip(message, 300), param=_clip(place) or None)


def _clip(text: str, most: int = 100) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
