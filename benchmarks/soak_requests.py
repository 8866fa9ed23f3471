"""What `soak.py` asks: mixed requests, each with what must come back. Knows no sockets.

Requests are drawn from a bounded set, so that most are asked several times, under other profiles,
streamed and whole: what came back must be the same each time.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.evaluate.workloads import load_workload

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROFILES = ("baseline", "suffix", "eagle3", "hybrid")
SHORT_WORDS = 60  # of a prompt
LENGTHS = (5, 8, 8, 12, 12, 20, 30, 40)  # tokens of an answer
SEEDS = 6  # besides greedy
BODY_BYTES = 256 * 1024  # the server's limit

Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """Attributes:
    kind: what it is counted as.
    path: where it goes; POST.
    body: JSON, or bytes that are sent as they are.
    status: what must come back.
    leave: the client goes away: "early" before the answer, "late" within it.
    check: what is wrong with the answer, in words, or nothing.
    """

    kind: str
    path: str
    body: Json | bytes
    status: int = 200
    leave: str = ""
    check: Callable[[Json], str] = field(default=lambda answer: "")

    @property
    def key(self) -> str:
        """The same for all requests that must be answered alike."""
        assert isinstance(self.body, dict)
        apart = ("model", "stream", "stream_options")
        same = {name: value for name, value in self.body.items() if name not in apart}
        return self.path + json.dumps(same, sort_keys=True)


class Material:
    """Prompts, and what a request is made of.

    Args:
        name: the model's.
        context: of the server, in tokens.
        book: tokens of a long text, for prompts that fill the context.
    """

    def __init__(self, name: str, *, context: int, book: Sequence[int], seed: int) -> None:
        self.name, self.context, self.book = name, context, list(book)
        self.rng = random.Random(seed)
        prompts = [p.chat() for p in load_workload("builtin:all") if p.words <= SHORT_WORDS]
        self.prompts = [prompt for prompt in prompts if len(prompt) == 1]

    def model(self) -> str:
        return f"{self.name}@{self.rng.choice(PROFILES)}"

    def sampling(self) -> Json:
        """Greedy or with one of few seeds."""
        seed = self.rng.randrange(SEEDS + 1)
        if not seed:
            return {"temperature": 0}
        return {"temperature": 0.8, "top_p": 0.95, "seed": seed}

    def stream(self, share: float = 0.4) -> Json:
        if self.rng.random() >= share:
            return {}
        return {"stream": True, "stream_options": {"include_usage": True}}

    def chat(self, messages: list[Json] | None = None, **more: Any) -> Json:
        """A chat; the number of the prompt decides how long its answer may be."""
        number = self.rng.randrange(len(self.prompts))
        body = {
            "model": self.model(),
            "messages": messages or self.prompts[number],
            "max_tokens": LENGTHS[number % len(LENGTHS)],
        }
        return {**body, **self.sampling(), **more}


# -- what is asked ----------------------------------------------------------------------------


def plain(m: Material) -> Request:
    return Request("plain", CHAT, m.chat())


def streamed(m: Material) -> Request:
    return Request("stream", CHAT, m.chat(**m.stream(1)))


def early(m: Material) -> Request:
    return Request("cancel early", CHAT, m.chat(max_tokens=300, **m.stream()), leave="early")


def late(m: Material) -> Request:
    return Request("cancel late", CHAT, m.chat(max_tokens=300, **m.stream(1)), leave="late")


def several(m: Material) -> Request:
    return Request("n", CHAT, m.chat(n=2, **m.stream()))


def logprobs(m: Material) -> Request:
    def check(answer: Json) -> str:
        told, tokens = sum(len(c["logprobs"]) for c in answer["choices"]), answer["tokens"]
        return "" if told == tokens else f"log-probabilities of {told} of {tokens} tokens"

    body = m.chat(logprobs=True, top_logprobs=m.rng.choice([0, 3]), **m.stream())
    return Request("logprobs", CHAT, body, check=check)


def stopped(m: Material) -> Request:
    stop = [" the", ".", "\n"]

    def check(answer: Json) -> str:
        found = [s for c in answer["choices"] for s in stop if s in c["text"]]
        return f"holds the stop strings {found}" if found else ""

    return Request("stop", CHAT, m.chat(stop=stop, **m.stream()), check=check)


def pattern(m: Material) -> Request:
    count = m.rng.randint(1, 12)
    regex = f"[a-c]{{{count}}}-[0-9]"

    def check(answer: Json) -> str:
        [choice] = answer["choices"]
        ok = choice["finish"] == "length" or re.fullmatch(regex, choice["text"])
        return "" if ok else f"{choice['text']!r} does not match {regex}"

    form = {"type": "regex", "regex": regex}
    return Request("regex", CHAT, m.chat(response_format=form, **m.stream()), check=check)


SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "size", "count"],
    "additionalProperties": False,
}


def schema(m: Material) -> Request:
    def check(answer: Json) -> str:
        [choice] = answer["choices"]
        if choice["finish"] == "length":
            return ""
        found = json.loads(choice["text"])
        return "" if list(found) == SCHEMA["required"] else f"{found} breaks the schema"

    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    body = m.chat(response_format=form, max_tokens=40, **m.stream())
    return Request("json_schema", CHAT, body, check=check)


def tool(m: Material) -> Request:
    def check(answer: Json) -> str:
        [choice] = answer["choices"]
        if choice["finish"] == "length":
            return ""
        [(name, arguments)] = choice["calls"]
        ok = name == "note" and list(json.loads(arguments)) == SCHEMA["required"]
        return "" if ok else f"calls {name} with {arguments}"

    tools = [{"type": "function", "function": {"name": "note", "parameters": SCHEMA}}]
    body = m.chat(tools=tools, tool_choice="required", max_tokens=60, **m.stream())
    return Request("tool", CHAT, body, check=check)


def completion(m: Material) -> Request:
    prompts = ["The three colours of the flag are", "def add(a, b):\n", "Once upon a time"]
    prompt = m.rng.choice([*prompts, prompts, m.book[:40], [m.book[:7], m.book[40:60]]])
    body = {"model": m.model(), "prompt": prompt, "max_tokens": 10, **m.sampling(), **m.stream()}
    return Request("completion", COMPLETIONS, body)


def long(m: Material) -> Request:
    """A prompt that leaves room for its answer and for nothing else, or for not much."""
    tokens = m.rng.choice([8, 16])
    start = 50 * m.rng.randrange(8)
    length = m.context - tokens - m.rng.choice([0, 0, 100])
    body = {"model": m.model(), "prompt": m.book[start : start + length], "max_tokens": tokens}
    return Request("long", COMPLETIONS, {**body, **m.sampling(), **m.stream()})


def tokenised(m: Material) -> Request:
    return Request("tokenize", "/tokenize", {"prompt": m.rng.choice(m.prompts)[0]["content"]})


def bad(m: Material) -> Request:
    """One of many wrongs, each with the status that it must get."""
    chat = m.chat(**m.stream())
    wrongs: list[tuple[int, Json | bytes]] = [
        (400, {**chat, "top_p": -1}),
        (400, {**chat, "temprature": 1}),
        (400, {**chat, "messages": []}),
        (400, {**chat, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (400, {**chat, "n": 99}),
        (400, {**chat, "logit_bias": {"999999": 1}}),
        (400, {**chat, "stop": ["x"] * 40}),
        (400, {**chat, "functions": [{"name": "f"}]}),
        (400, {**chat, "max_tokens": 10 * m.context}),
        (400, {**chat, "response_format": {"type": "regex", "regex": "(["}}),
        (400, {**chat, "response_format": {"type": "grammar", "grammar": "start: missing"}}),
        (400, {**chat, "tools": [], "tool_choice": "required"}),
        (400, b'{"model": "cut'),
        (400, b"[1, 2]"),
        (400, b'{"model": "x", "seed": NaN}'),
        (404, {**chat, "model": "nobody"}),
        (404, {**chat, "model": f"{m.name}@nobody"}),
        (413, {**chat, "user": "x" * BODY_BYTES}),
    ]
    status, body = m.rng.choice(wrongs)
    return Request("bad", CHAT, body, status=status)


def beyond(m: Material) -> Request:
    """A prompt that does not fit, by one token or by many."""
    tokens = m.book[: m.context + m.rng.choice([0, 300])]
    body = {"model": m.model(), "prompt": tokens, "max_tokens": 1, **m.stream()}
    return Request("beyond", COMPLETIONS, body, status=400)


KINDS: dict[Callable[[Material], Request], int] = {
    plain: 16, streamed: 16, early: 7, late: 7, several: 4, logprobs: 6, stopped: 5, pattern: 6,
    schema: 5, tool: 4, completion: 6, long: 2, tokenised: 3, bad: 8, beyond: 1,
}  # fmt: skip
TALK = 4  # weight of conversations
TURNS = 3


def draw(m: Material) -> list[Request] | None:
    """The next request; `None` for a conversation, whose turns depend on what is answered."""
    [kind] = m.rng.choices([*KINDS, None], weights=[*KINDS.values(), TALK])
    return None if kind is None else [kind(m)]


def turn(m: Material, history: list[Json], number: int) -> Request:
    """The next turn of a conversation; its sampling does not change."""
    asked = ["Name one animal.", "Why that one?", "Name another."][number]
    messages = [*history, {"role": "user", "content": asked}]
    return Request("talk", CHAT, m.chat(messages, max_tokens=20, **m.stream()))


# -- what came back ---------------------------------------------------------------------------


def whole(body: Json) -> Json:
    """What a response says, in a form that is the same however it was sent."""
    if "choices" not in body:
        return {"choices": [], "tokens": 0, "said": body}
    return {
        "choices": [_choice(c) for c in sorted(body["choices"], key=lambda c: c["index"])],
        "tokens": body["usage"]["completion_tokens"],
    }


def _choice(choice: Json) -> Json:
    message = choice.get("message", {})
    calls = [c["function"] for c in message.get("tool_calls") or ()]
    return {
        "text": choice.get("text", message.get("content")) or "",
        "finish": choice["finish_reason"],
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "logprobs": (choice.get("logprobs") or {}).get("content") or [],
    }


def joined(events: Sequence[Json]) -> Json:
    """The same of a stream's events."""
    choices: dict[int, Json] = {}
    tokens = 0
    for event in events:
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        for part in event["choices"]:
            empty: Json = {"text": "", "finish": None, "calls": [], "logprobs": []}
            choice, delta = choices.setdefault(part["index"], empty), part.get("delta", part)
            choice["text"] += delta.get("content") or delta.get("text") or ""
            choice["finish"] = part["finish_reason"] or choice["finish"]
            choice["logprobs"] += (part.get("logprobs") or {}).get("content") or []
            for call in delta.get("tool_calls") or ():
                _add_call(choice["calls"], call)
    return {"choices": [choices[index] for index in sorted(choices)], "tokens": tokens}


def _add_call(calls: list[tuple[str, str]], piece: Json) -> None:
    name, arguments = piece["function"].get("name") or "", piece["function"].get("arguments") or ""
    if piece["index"] == len(calls):
        calls.append((name, arguments))
    else:
        before = calls[piece["index"]]
        calls[piece["index"]] = (before[0] + name, before[1] + arguments)
