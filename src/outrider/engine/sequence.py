"""The life of one request: its tokens, its text, its end.

`commit` is the only mutation of the tokens. End tokens, stop strings and length limits are decided
here, token by token, so that a step which brings several tokens ends exactly where plain decoding
would have ended. A sequence knows nothing of caches, drafters' state or other sequences.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

from outrider.core.grammar import Grammar
from outrider.core.noise import Noise, Purpose, Stream, fresh_seed
from outrider.core.sampling import History, SamplingParams, TokenLogprobs
from outrider.drafters.base import NodeBudget, SequenceView
from outrider.errors import InvalidParameter
from outrider.models.tokenizer import Decoder, Detokenizer
from outrider.records.step import StepRecord

FinishReason = Literal["stop", "length", "cancelled", "error", "expired"]


@dataclass(frozen=True)
class Update:
    """What a step brought one request.

    Attributes:
        request: its id.
        tokens: new tokens.
        text: new text that can no longer change (a possible stop string or an unfinished
            character is held back).
        logprobs: one entry per new token where asked for.
        accepted: how many of the tokens, from the first, were guesses.
        finish_reason: set in the last update. "cancelled" by its owner, "expired" in the queue,
            "error" by a fault.
        error: one line, with finish_reason "error" or "expired".
        refused: the error lies in the request; the same request would fail again.
    """

    request: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    accepted: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    refused: bool = False


@dataclass(frozen=True)
class Completion:
    """A finished request. Times in seconds.

    Attributes:
        queue_s: from `add` to the first step that worked on it.
        ttft_s: from `add` to the first output token; `None` where there was none.
        e2e_s: from `add` to the end.
    """

    request: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str | None
    logprobs: tuple[TokenLogprobs, ...]
    steps: tuple[StepRecord, ...]
    params: SamplingParams
    seed: int
    drafter: str
    queue_s: float
    ttft_s: float | None
    e2e_s: float


class StopStrings:
    """Finds the first stop string in a growing text and holds back what might become one."""

    def __init__(self, stops: SequenceOf[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(s) for s in stops), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take in new text; returns what can be shown now, and whether a stop string was met."""
        held = self._held + text
        hits = [i for i in (held.find(stop) for stop in self._stops) if i >= 0]
        if hits:
            self._held = ""
            return held[: min(hits)], True
        keep = next(
            (
                n
                for n in range(min(self._longest - 1, len(held)), 0, -1)
                if self._may_start(held[-n:])
            ),
            0,
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _may_start(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stops)


@dataclass
class Clock:
    """When things happened to a request, from `time.perf_counter`."""

    added: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Sequence:
    """One request from admission to its end."""

    def __init__(
        self,
        request: int,
        prompt: SequenceOf[int],
        params: SamplingParams,
        *,
        drafter: str,
        end_tokens: frozenset[int],
        context: int,
        tokenizer: Decoder | None = None,
        tenant: str = "",
        grammar: Grammar | None = None,
        most: NodeBudget | None = None,
        rule: str = "walk",
    ) -> None:
        if params.stop and tokenizer is None:
            raise InvalidParameter(
                f"stop is {params.stop!r}; an engine without a tokenizer has no text"
            )
        self.id = request
        self.params = params
        self.drafter = drafter
        self.tenant = tenant
        self.grammar = grammar
        self.most = most
        self.rule = rule
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.noise = Noise(self.seed)
        own_ends = frozenset() if params.ignore_eos else end_tokens
        self.ends = own_ends | frozenset(params.stop_token_ids)
        self.prompt_length = len(prompt)
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.steps: list[StepRecord] = []
        self.logprobs: list[TokenLogprobs] = []
        self.clock = Clock()
        self._tokens = list(prompt)
        self._limit = min(params.max_tokens, context - len(prompt))
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._stops = StopStrings(params.stop)
        self._text: list[str] = []

    @property
    def tokens(self) -> SequenceOf[int]:
        """All committed tokens, prompt first."""
        return self._tokens

    @property
    def output(self) -> SequenceOf[int]:
        return self._tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Output tokens that may still come."""
        return self._limit - (len(self._tokens) - self.prompt_length)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def view(self) -> SequenceView:
        """What a drafter may see.

        Only `walk` lets it draw with the target's own noise; a position then keeps its number
        whenever it is guessed. Independent noise is fresh in every step: `block` looks at guesses
        that it drops, and drawing them again from the same numbers would not be drawing from `q`
        any more.
        """
        noise, purpose = self.noise, Purpose.TOKEN
        if self.rule != "walk":
            noise, purpose = noise.for_step(len(self._tokens)), Purpose.DRAFT
        return SequenceView(
            id=self.id,
            tokens=self._tokens,
            prompt_length=self.prompt_length,
            params=self.params,
            ends=self.ends,
            stream=Stream(noise, purpose),
            tenant=self.tenant,
        )

    def history(self) -> History:
        """The sampler's view of the past at the last committed token."""
        past = self._tokens[: self.prompt_length], self.output, self.ends
        return History(*past, grammar=self.grammar)

    def commit(self, tokens: SequenceOf[int]) -> Update:
        """Append tokens that the target has confirmed, up to the end of the output.

        Tokens behind an end token, a stop string, the end of the grammar or the length limit are
        dropped: plain decoding would never have produced them.

        Raises:
            InvalidParameter: the grammar does not allow a token.
        """
        kept: list[int] = []
        text = ""
        for token in tokens:
            self._tokens.append(token)
            kept.append(token)
            shown, stopped = self._read(token)
            text += shown
            if stopped or token in self.ends or self._completes_grammar(token):
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finished:
                if not stopped:
                    text += self._flush()
                break
        if kept and self.clock.first_token is None:
            self.clock.first_token = time.perf_counter()
        self._text.append(text)
        return Update(self.id, tuple(kept), text, finish_reason=self.finish_reason)

    def end(
        self, reason: FinishReason, error: str | None = None, *, refused: bool = False
    ) -> Update:
        """End the request from outside: cancelled, or failed with one line of explanation.

        Args:
            refused: the request itself is at fault.
        """
        self.finish_reason, self.error = reason, error
        text = self._flush()
        self._text.append(text)
        return Update(self.id, text=text, finish_reason=reason, error=error, refused=refused)

    def completion(self) -> Completion:
        """The finished request as plain data."""
        assert self.finish_reason is not None
        clock = self.clock
        end = clock.finished or time.perf_counter()
        started = clock.started if clock.started is not None else end
        first = clock.first_token
        return Completion(
            request=self.id,
            prompt=tuple(self._tokens[: self.prompt_length]),
            tokens=tuple(self.output),
            text="".join(self._text),
            finish_reason=self.finish_reason,
            error=self.error,
            logprobs=tuple(self.logprobs),
            steps=tuple(self.steps),
            params=self.params,
            seed=self.seed,
            drafter=self.drafter,
            queue_s=started - clock.added,
            ttft_s=None if first is None else first - clock.added,
            e2e_s=end - clock.added,
        )

    def _read(self, token: int) -> tuple[str, bool]:
        """The text that ``token`` settles, and whether it completes a stop string."""
        if self._detokenizer is None or token in self.ends:
            return "", False
        return self._stops.feed(self._detokenizer.feed([token]))

    def _completes_grammar(self, token: int) -> bool:
        if self.grammar is None:
            return False
        self.grammar.advance([token])
        return self.grammar.finished

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        shown, stopped = self._stops.feed(self._detokenizer.flush())
        return shown if stopped else shown + self._stops.flush()
