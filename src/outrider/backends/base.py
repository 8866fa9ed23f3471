"""What the rest of Outrider knows of an engine: ask it for text, see when the text came, and read
what it tells about its guesses. Plain data and one protocol; nothing here speaks a protocol itself.

Everything is in our terms. Where an engine uses the same word for another thing, its own file
translates (the table is in docs/reference/engines.md). What an engine does not tell is `None`,
never zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

from outrider.backends.prometheus import Scrape
from outrider.errors import OutriderError
from outrider.records.request import AcceptanceRecord, InvalidRecord

RESPONSE = "response"
COUNTERS = "counters"
NO_COUNTERS = "the engine has no counters of accepted guesses"

Conversation = tuple[Mapping[str, Any], ...]


class EngineUnfit(OutriderError):
    """An engine cannot be reached, is another one than named, or cannot do what was asked."""

    exit_code = 3


class UnsupportedOption(EngineUnfit, ValueError):
    """An engine cannot honour an option of a request; it is never left out in silence."""

    exit_code = 2


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        prompt: a text to continue, its tokens, or the messages of a conversation.
        max_tokens: most tokens of the answer.
        temperature, top_p, top_k, min_p: as in `SamplingParams`; `None` leaves the engine's own
            default, which differs from engine to engine.
        presence_penalty, frequency_penalty, repetition_penalty, logit_bias, stop, seed: likewise.
        min_tokens, ignore_eos: likewise; not every engine has them.
        logprobs: give this many likeliest tokens per position; `None` for none.
        tools, tool_choice, response_format: as in the OpenAI interface.
        extra: fields of one engine's own, passed on unchanged.
        model: which of the engine's models; `None` takes the one it was connected for.
        stream: as it grows; without it there is no time of the first token.
        cancel_after_s: hang up after so long.
    """

    prompt: str | tuple[int, ...] | Conversation
    max_tokens: int = 128
    temperature: float | None = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    stream: bool = True
    cancel_after_s: float | None = None

    @property
    def is_chat(self) -> bool:
        """The prompt is a conversation."""
        prompt = self.prompt
        return not isinstance(prompt, str) and bool(prompt) and not isinstance(prompt[0], int)


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer, its log-probability, and the likeliest tokens at its place."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Acceptance:
    """What an engine tells about the guesses of one request, or of a span of time.

    Attributes:
        engine: who tells.
        source: `RESPONSE` (the answer itself) or `COUNTERS` (differences of exact counters).
        accepted: accepted guesses; the next token is not one.
        drafted: guesses put to the target, roots not counted.
        steps: steps as the engine counts them, see `counts_plain_steps`; `None` if it does not say.
        counts_plain_steps: `steps` and `histogram` include steps without a guess.
        histogram: j to the steps that accepted exactly j.
        per_step_accepted, per_step_drafted: one entry per step.
        accepted_by_position: entry j - 1 counts steps that accepted at least j.
        rejected_by_position: entry j - 1 counts steps that refused every guess at depth j.
        width: the fixed bound on guesses per step, root not counted.
        drafted_is_nominal: `drafted` is steps times the width, not what was guessed.
        told: more that the engine says, such as which drafter ran or why none did.
    """

    engine: str
    source: str
    accepted: int
    drafted: int | None = None
    steps: int | None = None
    counts_plain_steps: bool = False
    histogram: Mapping[int, int] | None = None
    per_step_accepted: tuple[int, ...] | None = None
    per_step_drafted: tuple[int, ...] | None = None
    accepted_by_position: tuple[int, ...] | None = None
    rejected_by_position: tuple[int, ...] | None = None
    width: int | None = None
    drafted_is_nominal: bool = False
    told: Mapping[str, Any] = field(default_factory=dict)

    def target_steps(self, completion_tokens: int) -> int:
        """Target passes that gave a token: every pass gives the accepted guesses and one more.

        This is our count on every engine: draft-free steps and the prefill pass that gives the
        first token are in it. An engine may count accepted guesses behind the end of the output;
        then its own number of steps is the better floor.
        """
        return max(completion_tokens - self.accepted, self.steps or 0, 1)

    def positions(self) -> tuple[int, ...] | None:
        """Entry j - 1 counts steps that accepted at least j guesses; `None` if unknown."""
        if self.accepted_by_position is not None or self.histogram is None:
            return self.accepted_by_position
        most = max((j for j, times in self.histogram.items() if times), default=0)
        return tuple(
            sum(times for j, times in self.histogram.items() if j >= depth)
            for depth in range(1, most + 1)
        )

    def rejections(self) -> tuple[int, ...] | None:
        """Entry j - 1 counts steps whose guess at depth j was the first to be refused.

        Exact or `None`: as told, from per-step arrays of chains, or from the histogram where every
        step was as wide as the fixed width.
        """
        if self.rejected_by_position is not None:
            return self.rejected_by_position
        if self.per_step_accepted is not None and self.per_step_drafted is not None:
            pairs = list(zip(self.per_step_accepted, self.per_step_drafted, strict=True))
            depth = max((drafted for _, drafted in pairs), default=0)
            refused = [0] * depth
            for accepted, drafted in pairs:
                if accepted < drafted:
                    refused[accepted] += 1
            return tuple(refused)
        if self.histogram is None or self.steps is None or self.width is None:
            return None
        if self.drafted_is_nominal or self.drafted != self.steps * self.width:
            return None
        return tuple(self.histogram.get(j, 0) for j in range(self.width))

    def record(self, completion_tokens: int | None) -> AcceptanceRecord | None:
        """The record in our counting, steps without a guess included; `None` if the engine does
        not tell enough for it or contradicts itself."""
        if None in (completion_tokens, self.drafted, self.histogram, self.steps):
            return None
        assert completion_tokens is not None and self.steps is not None  # for the type checker
        assert self.drafted is not None and self.histogram is not None
        steps = self.target_steps(completion_tokens)
        plain = 0 if self.counts_plain_steps else steps - self.steps
        if self.counts_plain_steps:
            steps = self.steps
        histogram = {j: times for j, times in sorted(self.histogram.items()) if times}
        if plain:
            histogram[0] = histogram.get(0, 0) + plain
        told = AcceptanceRecord(
            engine=self.engine,
            mean_acceptance_length=1 + self.accepted / steps if steps else None,
            draft_acceptance_rate=self.accepted / self.drafted if self.drafted else None,
            acceptance_histogram=dict(sorted(histogram.items())),
            num_accepted_draft_tokens=self.accepted,
            num_draft_tokens=self.drafted,
            num_spec_steps=steps,
            num_spec_tokens=self.width,
            completion_tokens=completion_tokens,
            per_step_accepted=None if plain else self.per_step_accepted,
            per_step_drafted=None if plain else self.per_step_drafted,
        )
        try:
            return told.check()
        except InvalidRecord:
            return None


@dataclass(frozen=True)
class Answer:
    """What came back. A request that failed is an answer with an `error`.

    Attributes:
        text: the text; reasoning and tool calls are not in it.
        finish_reason: "stop", "length", "tool_calls", "cancelled", "error" ...
        prompt_tokens, completion_tokens: from the engine's own count; `None` if it gives none.
        begin: when it was sent, on the monotonic clock.
        arrivals_s: seconds from `begin` to each chunk that carried content.
        end_s: seconds from `begin` to the end.
        tokens: ids of the answer's tokens, where the engine gives them.
        tokens_at: tokens that each of `arrivals_s` brought, where the engine gives them.
        queue_s: waiting in the engine, where it says so.
        tool_calls: name and arguments (JSON as text) of each call.
        logprobs: per token, where asked for.
        acceptance: see `Acceptance`; `None` if unknown.
        model, fingerprint: what the engine says it is.
        status: of HTTP; `None` without HTTP or without an answer.
        error: what went wrong, in one line.
        notes: what a reader of the numbers must know.
        reasoning: the text of reasoning.
    """

    begin: float
    end_s: float
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    arrivals_s: tuple[float, ...] = ()
    tokens: tuple[int, ...] | None = None
    tokens_at: tuple[int, ...] | None = None
    queue_s: float | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    acceptance: Acceptance | None = None
    model: str | None = None
    fingerprint: str | None = None
    status: int | None = None
    error: str | None = None
    notes: tuple[str, ...] = ()
    reasoning: str = ""

    @property
    def ttft_s(self) -> float | None:
        """To the first chunk with content; `None` without a stream or content."""
        return self.arrivals_s[0] if self.arrivals_s else None

    @property
    def tpot_s(self) -> float | None:
        """(end - first) / (tokens - 1), tokens as the engine counts them; `None` if unknown."""
        first, tokens = self.ttft_s, self.completion_tokens
        if first is None or tokens is None or tokens < 2 or self.error is not None:
            return None
        return (self.end_s - first) / (tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between chunks. A chunk may carry several tokens: this is no time between tokens."""
        return tuple(later - earlier for earlier, later in pairwise(self.arrivals_s))

    def noted(self, note: str) -> Answer:
        """The same with one more note."""
        return replace(self, notes=(*self.notes, note))


@dataclass(frozen=True)
class Counters:
    """An engine's running totals and its load, at one moment. `None` for what it has not.

    Attributes:
        at: on the monotonic clock.
        drafts: steps that had a guess.
        drafted, accepted: guesses put to the target, and accepted.
        per_position: 0-based position to steps that accepted there.
        requests: finished requests.
        prompt_tokens, output_tokens: totals.
        running, waiting: requests now.
        cache_use: share of the key-value cache in use, 0 to 1.
        preemptions: requests put back for lack of cache.
    """

    at: float
    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    per_position: Mapping[int, int] = field(default_factory=dict)
    requests: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    running: int | None = None
    waiting: int | None = None
    cache_use: float | None = None
    preemptions: int | None = None


@dataclass(frozen=True)
class EngineInfo:
    """Who an engine is.

    Attributes:
        kind: outrider, vllm, sglang, tensorrt_llm, llamacpp, openai or embedded.
        version: `None` if it does not say.
        models: what it serves.
        model: the one that is asked.
        max_model_len: most tokens of prompt and answer; `None` if unknown.
        abilities: of `ABILITIES`.
        notes: what a reader of the numbers must know.
    """

    kind: str
    version: str | None
    models: tuple[str, ...]
    model: str
    max_model_len: int | None = None
    abilities: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


ABILITIES = frozenset(
    {
        "tokenize",  # text to tokens
        "metrics",  # a Prometheus page that can be read
        "acceptance in the response",
        "acceptance in counters",
    }
)


class Backend(Protocol):
    """An engine that can be asked. `answer` never raises for what went wrong with a request."""

    @property
    def info(self) -> EngineInfo:
        """Who it is."""
        ...

    async def answer(self, ask: Ask) -> Answer:
        """Send a request, wait for its end, and tell how it went.

        Raises:
            UnsupportedOption: the engine is known not to honour an option of it.
        """
        ...

    async def answer_alone(self, ask: Ask) -> Answer:
        """The same while nothing else runs: where the answer tells no acceptance, it is taken from
        the differences of the engine's counters, and `Acceptance.source` says so."""
        ...

    async def tokenize(self, prompt: str | Conversation) -> tuple[int, ...] | None:
        """The prompt's tokens; `None` if the engine cannot tell."""
        ...

    async def counters(self) -> Counters | None:
        """Its totals; `None` if it has none."""
        ...

    async def scrape(self) -> Scrape | None:
        """Its whole Prometheus page; `None` if it has none."""
        ...

    async def close(self) -> None:
        """Let go of connections, or of the engine itself where it is embedded."""
        ...


def between(
    before: Counters, after: Counters, *, engine: str
) -> tuple[Acceptance | None, str | None]:
    """Acceptance between two readings, and why there is none where there is none."""
    if before.accepted is None or after.accepted is None:
        return None, NO_COUNTERS
    if before.drafted is None or after.drafted is None:
        return None, "the engine has no counter of drafted guesses"
    accepted, drafted = after.accepted - before.accepted, after.drafted - before.drafted
    steps = None
    if before.drafts is not None and after.drafts is not None:
        steps = after.drafts - before.drafts
    if min(accepted, drafted, 0 if steps is None else steps) < 0:
        return None, "a counter went back: the engine was restarted in between"
    positions = [
        after.per_position.get(p, 0) - before.per_position.get(p, 0)
        for p in range(1 + max(after.per_position, default=-1))
    ]
    if min(positions, default=0) < 0:
        return None, "a counter went back: the engine was restarted in between"
    while positions and not positions[-1]:
        positions.pop()
    consistent = sum(positions) == accepted
    histogram = None
    if steps is not None and consistent:
        reached = [steps, *positions, 0]
        counts = {j: here - further for j, (here, further) in enumerate(pairwise(reached))}
        histogram = counts if min(counts.values()) >= 0 else None
    found = Acceptance(
        engine=engine,
        source=COUNTERS,
        accepted=accepted,
        drafted=drafted,
        steps=steps,
        histogram=histogram,
        accepted_by_position=tuple(positions) if consistent else None,
    )
    return found, None


def dense(values: Sequence[int]) -> dict[int, int]:
    """A histogram given as a list, entry j being the steps that accepted j."""
    return {j: int(times) for j, times in enumerate(values) if times}


def consistent(
    histogram: Sequence[int] | None, *, steps: int | None, accepted: int
) -> dict[int, int] | None:
    """A histogram given as a list, where it agrees with the totals beside it; else `None`."""
    if histogram is None or sum(histogram) != steps:
        return None
    if sum(j * times for j, times in enumerate(histogram)) != accepted:
        return None
    return dense(histogram)
