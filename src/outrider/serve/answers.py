"""What responses look like: usage, log-probabilities, acceptance, and the deltas of a chat.

One `ChatAnswer` per choice turns the engine's updates into deltas; a whole answer is those deltas
put together, so a stream and a whole answer of the same tokens say the same.
"""

from __future__ import annotations

import secrets
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.sampling import TokenLogprobs
from outrider.engine import Completion, Update
from outrider.models.tokenizer import Decoder, Detokenizer
from outrider.records.request import acceptance_record, is_verify_step
from outrider.serve.profiles import Choice
from outrider.serve.reader import CallArguments, CallStart, Content, Piece, Reader, Reasoning
from outrider.serve.schema import StreamOptions

REPLY_ROLE = "assistant"
_LETTERS = string.ascii_letters + string.digits


class TokenTable:
    """How single tokens look: their bytes, and the text of these.

    A token may be a part of a character. Its text is then U+FFFD, and only its bytes tell which it
    is; `name_of` is a text of its own for each such token, as OpenAI's older form has it.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        *,
        silent: frozenset[int] = frozenset(),
        by_id: bool = False,
    ) -> None:
        """Args:
        token_bytes: by id.
        silent: special tokens: they have a spelling, and give no text.
        by_id: texts and names are ``token_id:N``.
        """
        self._bytes = token_bytes
        self._silent = silent
        self._by_id = by_id

    def by_id(self) -> TokenTable:
        """The same, with tokens called by their ids."""
        return TokenTable(self._bytes, silent=self._silent, by_id=True)

    def bytes_of(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def shown(self, token: int) -> bytes:
        """What the token adds to the text."""
        return b"" if token in self._silent else self.bytes_of(token)

    def text_of(self, token: int) -> str:
        if self._by_id:
            return f"token_id:{token}"
        return self.bytes_of(token).decode("utf-8", errors="replace")

    def name_of(self, token: int) -> str:
        """``bytes:\\xf0\\x9f`` where the bytes are no text."""
        if self._by_id:
            return f"token_id:{token}"
        found = self.bytes_of(token)
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def chat_entry(self, token: int, entry: TokenLogprobs) -> dict[str, Any]:
        """One entry of `logprobs.content`."""
        top = [self._item(t, p) for t, p in entry.top]
        return {**self._item(token, entry.logprob), "top_logprobs": top}

    def _item(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.text_of(token),
            "logprob": finite(logprob),
            "bytes": list(self.bytes_of(token)),
        }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, -9999.0)


def usage(prompt_tokens: int, completions: Sequence[Completion]) -> dict[str, int]:
    """OpenAI's usage object. Drafts do not show here: `accepted_prediction_tokens` is another
    feature's field."""
    return _usage(prompt_tokens, sum(len(completion.tokens) for completion in completions))


class RunningUsage:
    """The `usage` field of a stream's chunks: absent, null until the end, or counting."""

    def __init__(self, prompt_tokens: int, options: StreamOptions | None) -> None:
        self.wanted = bool(options and options.include_usage)
        self._counts = self.wanted and bool(options and options.continuous_usage_stats)
        self._prompt = prompt_tokens
        self._output = 0

    def take(self, update: Update) -> dict[str, Any]:
        """What the chunks of an update carry."""
        self._output += len(update.tokens)
        if not self.wanted:
            return {}
        return {"usage": _usage(self._prompt, self._output) if self._counts else None}


def _usage(prompt: int, output: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def speculation(
    completions: Sequence[Completion], choice: Choice, *, details: bool
) -> dict[str, Any] | None:
    """The root's `metrics`: vLLM's fields, and why speculation did not run where it did not.

    `None` for several sequences: one record is one sequence's.
    """
    if len(completions) != 1:
        return None
    [completion] = completions
    record = acceptance_record(completion.steps)
    histogram = record.acceptance_histogram
    found: dict[str, Any] = {
        "mean_acceptance_length": record.mean_acceptance_length,
        "draft_acceptance_rate": record.draft_acceptance_rate,
        "acceptance_histogram": [histogram.get(j, 0) for j in range(max(histogram, default=0) + 1)],
        "num_spec_steps": record.num_spec_steps,
        "num_accepted_draft_tokens": record.num_accepted_draft_tokens,
        "num_draft_tokens": record.num_draft_tokens,
        "num_spec_tokens": choice.profile.max_nodes,
        "profile": choice.name,
        "drafter": completion.drafter,
        "lossless": all(step.lossless for step in completion.steps),
        "reason": why_plain(completion),
    }
    if details:
        found["per_step_accepted"] = list(record.per_step_accepted or ())
        found["per_step_drafted"] = list(record.per_step_drafted or ())
    return {"speculative_decoding": found}


def why_plain(completion: Completion) -> str | None:
    """Why nothing was guessed; `None` where something was."""
    verify = [step for step in completion.steps if is_verify_step(step)]
    if not verify or any(step.proposed for step in verify):
        return None
    reasons = Counter(step.reason for step in verify if step.reason)
    if not reasons:
        return None
    reason = reasons.most_common(1)[0][0]
    return "drafter fault" if reason.startswith("drafter fault") else reason  # no internals


def new_id(prefix: str, length: int = 24) -> str:
    return prefix + "".join(_LETTERS[byte % len(_LETTERS)] for byte in secrets.token_bytes(length))


@dataclass
class ChatAnswer:
    """One choice of a chat completion as it grows.

    Attributes:
        reader: finds reasoning and tool calls.
        table: for log-probabilities; `None` where none are wanted.
        id_length: of a tool call's id.
        single: only the first call is given out.
        tell_ids: chunks and the answer hold the tokens' ids.
    """

    reader: Reader
    table: TokenTable | None = None
    id_length: int = 24
    single: bool = False
    tell_ids: bool = False
    calls: list[dict[str, Any]] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    _pending: list[dict[str, Any]] = field(default_factory=list)
    _pending_ids: list[int] = field(default_factory=list)

    def take(self, update: Update) -> list[dict[str, Any]]:
        """The deltas that an update brings. Log-probabilities wait in `pop_logprobs`, ids in
        `pop_token_ids`."""
        self._pending_ids += update.tokens
        if self.table is not None:
            for token, entry in zip(update.tokens, update.logprobs, strict=True):
                self._pending.append(self.table.chat_entry(token, entry))
        pieces = self.reader.feed(update.text)
        if update.finish_reason is not None:
            pieces += self.reader.close()
            self.finish_reason = update.finish_reason
            if self.calls or any(isinstance(piece, CallStart) for piece in pieces):
                self.finish_reason = {"stop": "tool_calls"}.get(
                    update.finish_reason, update.finish_reason
                )
        return [delta for piece in _merged(pieces) if (delta := self._delta(piece)) is not None]

    def pop_logprobs(self) -> list[dict[str, Any]]:
        """Entries that no chunk has carried yet."""
        entries, self._pending = self._pending, []
        self.logprobs += entries
        return entries

    def pop_token_ids(self) -> dict[str, Any]:
        """The field with the ids that no chunk has carried yet; none where none are wanted."""
        ids, self._pending_ids = self._pending_ids, []
        self.token_ids += ids
        return {"token_ids": ids} if self.tell_ids else {}

    def message(self) -> dict[str, Any]:
        """The whole answer."""
        found: dict[str, Any] = {
            "role": REPLY_ROLE,
            "content": self.content if self.content or not self.calls else None,
            "refusal": None,
        }
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"} for call in self.calls
            ]
        return found

    def _delta(self, piece: Piece) -> dict[str, Any] | None:
        if isinstance(piece, Content):
            self.content += piece.text
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            self.reasoning += piece.text
            return {"reasoning_content": piece.text}
        if self.single and piece.index > 0:
            return None
        if isinstance(piece, CallStart):
            call = {
                "index": piece.index,
                "id": new_id("" if self.id_length < 24 else "call_", self.id_length),
                "type": "function",
                "function": {"name": piece.name, "arguments": ""},
            }
            self.calls.append(call)
            return {"tool_calls": [{**call, "function": dict(call["function"])}]}  # type: ignore[call-overload]
        self.calls[piece.index]["function"]["arguments"] += piece.text
        fragment = {"index": piece.index, "function": {"arguments": piece.text}}
        return {"tool_calls": [fragment]}


class Trace:
    """Tells the tokens of an answer apart, for the page that shows which were guessed."""

    def __init__(self, decoder: Decoder) -> None:
        self._text = Detokenizer(decoder)

    def step(self, update: Update) -> dict[str, Any]:
        """A step: the text of each token (empty while a character is unfinished), and how many of
        them, from the first, were guesses."""
        texts = [self._text.feed([token]) for token in update.tokens]
        if update.finish_reason is not None:
            texts[-1] += self._text.flush()
        return {"tokens": texts, "accepted": update.accepted}


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of the same kind in one."""
    if len(pieces) < 2:
        return pieces
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(piece, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + piece.text)
        elif (
            isinstance(piece, CallArguments)
            and isinstance(last, CallArguments)
            and last.index == piece.index
        ):
            merged[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            merged.append(piece)
    return merged
