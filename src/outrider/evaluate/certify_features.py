"""Feature parity: which fields of a request does an engine honour, refuse, or ignore in silence?

Each probe asks for something whose effect can be seen in the answer for certain (a seed repeats, a
bias of 100 decides a token, a min-p of 1 leaves one token) and compares with the greedy answer. It
knows engines by the `Backend` protocol alone, the embedded engine included.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from outrider.backends.base import Answer, Ask, Backend
from outrider.errors import OutriderError

Outcome = Literal["honoured", "refused", "ignored", "unclear"]
OUTCOMES: tuple[Outcome, ...] = ("honoured", "refused", "ignored", "unclear")

PROMPT = "Say a few words about rivers. Rivers are"
REPEATS = "no no no no no no no no no no no no"
TOKENS = 12
HOT = 1.5
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Feature:
    """One row of the table."""

    name: str
    outcome: Outcome
    detail: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Refused(Exception):
    """The engine said no, and why."""


class _Unclear(Exception):
    """The answers decide nothing, and why."""


class _Prober:
    """Asks, and tells refusals from failures."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.plain = Ask(PROMPT, max_tokens=TOKENS, temperature=0.0, stream=False)
        self.greedy = ""

    async def ask(self, ask: Ask) -> Answer:
        """An answer without an error.

        Raises:
            _Refused: the engine or its client does not take the request.
            _Unclear: something else went wrong.
        """
        try:
            answer = await self.backend.answer(ask)
        except OutriderError as fault:
            raise _Refused(str(fault)) from None
        if answer.error is None:
            return answer
        if answer.status is None or 400 <= answer.status < 500:
            raise _Refused(answer.error)
        raise _Unclear(answer.error)

    async def text(self, **fields: Any) -> str:
        """The text of the plain request with some fields changed."""
        return (await self.ask(replace(self.plain, **fields))).text


Probe = Callable[[_Prober], Awaitable[tuple[bool, str]]]


async def _seed(p: _Prober) -> tuple[bool, str]:
    same = [await p.text(temperature=HOT, seed=7) for _ in range(2)]
    others = [await p.text(temperature=HOT, seed=seed) for seed in (8, 9, 10)]
    if len({*same, *others}) == 1:
        return False, "at temperature 1.5 every seed gives one and the same text"
    return same[0] == same[1], "two requests with one seed: " + (
        "the same text" if same[0] == same[1] else "different texts"
    )


async def _temperature(p: _Prober) -> tuple[bool, str]:
    texts = {await p.text(temperature=HOT, seed=seed) for seed in range(4)}
    return len(texts) > 1, f"{len(texts)} different texts from 4 seeds at temperature {HOT}"


async def _logprobs(p: _Prober) -> tuple[bool, str]:
    answer = await p.ask(replace(p.plain, logprobs=3))
    entries = answer.logprobs
    if not entries:
        return False, "the answer holds no log-probabilities"
    if answer.completion_tokens is not None and len(entries) != answer.completion_tokens:
        return False, f"{len(entries)} entries for {answer.completion_tokens} tokens"
    wrong = [e for e in entries if e.logprob > 1e-3 or (e.top and e.logprob < e.top[0][1] - 0.5)]
    if wrong:
        return False, f"token {wrong[0].token!r} was not the likeliest of a greedy answer"
    if len({round(e.logprob, 6) for e in entries}) == 1 and len(entries) > 3:
        return False, f"every token has log-probability {entries[0].logprob:.3f}"
    return True, f"{len(entries)} entries, one per token, greedy tokens on top"


def _leaves_one(**fields: Any) -> Probe:
    """A truncation that leaves one token makes hot sampling greedy."""

    async def probe(p: _Prober) -> tuple[bool, str]:
        texts = [await p.text(temperature=HOT, seed=seed, **fields) for seed in (1, 2, 3)]
        equal = sum(text == p.greedy for text in texts)
        return equal == len(texts), f"{equal} of {len(texts)} hot answers are the greedy one"

    return probe


def _penalty(**fields: float) -> Probe:
    """A penalty changes answers that repeat themselves, seed for seed."""

    async def probe(p: _Prober) -> tuple[bool, str]:
        common: dict[str, Any] = {"prompt": REPEATS, "max_tokens": 32, "temperature": 1.0}
        seeds: tuple[int, ...] = (1, 2, 3)
        before = [await p.text(**common, seed=seed) for seed in seeds]
        if await p.text(**common, seed=seeds[0]) != before[0]:  # no seeds here: greedy has to do
            common["temperature"], seeds = 0.0, (1,)
            before = [await p.text(**common)]
        after = [await p.text(**common, **fields, seed=seed) for seed in seeds]
        changed = sum(a != b for a, b in zip(before, after, strict=True))
        if changed:
            return True, f"{changed} of {len(seeds)} repeating answers changed"
        if not any(_repeats(text) for text in before):
            raise _Unclear("the answers do not repeat themselves; nothing to penalise")
        return False, f"{len(seeds)} repeating answers stayed as they were"

    return probe


def _repeats(text: str) -> bool:
    words = text.split()
    return (len(words) > 1 and len(set(words)) < len(words)) or len(set(text)) < len(text) / 2


async def _bias(p: _Prober) -> tuple[bool, str]:
    token = await _token_of(p, " seven")
    answer = await p.ask(replace(p.plain, max_tokens=3, logit_bias={token: 100.0}))
    if answer.tokens is not None:
        hits = sum(t == token for t in answer.tokens)
        return hits == len(answer.tokens), f"{hits} of {len(answer.tokens)} tokens are the biased"
    return answer.text != p.greedy[: len(answer.text)], "the text " + (
        "changed" if answer.text != p.greedy[: len(answer.text)] else "stayed as it was"
    )


async def _token_of(p: _Prober, text: str) -> int:
    tokens = await p.backend.tokenize(text)
    if not tokens:
        raise _Unclear("the engine cannot tell token ids, which a bias needs")
    return tokens[-1]


async def _stop(p: _Prober) -> tuple[bool, str]:
    middle = p.greedy[len(p.greedy) // 2 :].strip()[:3]
    if len(middle) < 2:
        raise _Unclear("the greedy answer is too short to stop inside it")
    answer = await p.ask(replace(p.plain, stop=(middle,)))
    cut = middle not in answer.text and len(answer.text) < len(p.greedy)
    return cut, f"stop {middle!r}: " + ("cut there" if cut else "the answer goes on past it")


async def _max_tokens(p: _Prober) -> tuple[bool, str]:
    answer = await p.ask(replace(p.plain, max_tokens=5, ignore_eos=False))
    told = answer.completion_tokens
    if told is None:
        raise _Unclear("the engine sends no usage")
    return told <= 5, f"{told} tokens where 5 were allowed"


async def _grammar(p: _Prober) -> tuple[bool, str]:
    conversation = ({"role": "user", "content": "Is water wet? Tell me at length."},)
    answer = await p.ask(
        replace(p.plain, prompt=conversation, max_tokens=40, response_format=SCHEMA)
    )
    try:
        found = json.loads(answer.text)
    except ValueError:
        _not_cut(answer)
        return False, f"the answer is no JSON: {answer.text[:40]!r}"
    fits = isinstance(found, dict) and set(found) == {"ok"} and isinstance(found["ok"], bool)
    return fits, "the answer follows the schema" if fits else "JSON of another form"


def _not_cut(answer: Answer) -> None:
    """Half a document proves nothing."""
    if answer.finish_reason == "length" or answer.completion_tokens in (40, 60):
        raise _Unclear("the answer was cut at its token limit; nothing can be told")


async def _tools(p: _Prober) -> tuple[bool, str]:
    conversation = ({"role": "user", "content": "What is the weather in Oslo?"},)
    answer = await p.ask(
        replace(
            p.plain,
            prompt=conversation,
            max_tokens=60,
            tools=(WEATHER,),
            tool_choice="required",
        )
    )
    if not answer.tool_calls:
        return False, "tool_choice required, and no call came back"
    name, words = answer.tool_calls[0]
    try:
        arguments = json.loads(words)
    except ValueError:
        _not_cut(answer)
        return False, f"the arguments are no JSON: {words[:40]!r}"
    fits = name == "get_weather" and isinstance(arguments, dict) and "city" in arguments
    return fits, f"{name} was called" if fits else f"{name} was called with other arguments"


PROBES: tuple[tuple[str, Probe], ...] = (
    ("temperature", _temperature),
    ("seed", _seed),
    ("max_tokens", _max_tokens),
    ("stop", _stop),
    ("logprobs", _logprobs),
    ("top_k", _leaves_one(top_k=1)),
    ("top_p", _leaves_one(top_p=0.0001)),
    ("min_p", _leaves_one(min_p=1.0)),
    ("presence_penalty", _penalty(presence_penalty=2.0)),
    ("frequency_penalty", _penalty(frequency_penalty=2.0)),
    ("repetition_penalty", _penalty(repetition_penalty=1.8)),
    ("logit_bias", _bias),
    ("grammar (JSON schema)", _grammar),
    ("tools", _tools),
)


async def probe_features(
    backend: Backend, *, probes: Sequence[tuple[str, Probe]] = PROBES
) -> list[Feature]:
    """The table for an engine; a probe that cannot decide says so and why."""
    prober = _Prober(backend)
    try:
        prober.greedy = (await prober.ask(prober.plain)).text
    except (_Refused, _Unclear) as fault:
        return [Feature(name, "unclear", f"a plain request failed: {fault}") for name, _ in probes]
    found = []
    for name, probe in probes:
        try:
            honoured, detail = await probe(prober)
        except _Refused as fault:
            found.append(Feature(name, "refused", str(fault)[:200]))
        except _Unclear as fault:
            found.append(Feature(name, "unclear", str(fault)[:200]))
        else:
            found.append(Feature(name, "honoured" if honoured else "ignored", detail))
    return found
