"""Grammars for structured output: JSON, JSON schema, regular expressions and Lark, by llguidance.

A compiled grammar is kept and copied for each request. The follower of a request consumes committed
tokens; asked about a path of guesses it walks ahead and back again, so rejected guesses leave no
trace. Work is bounded by the library's own limits: a grammar that exceeds them ends its request.

Shapes: V vocabulary of the target.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from outrider.core.grammar import Mask
from outrider.errors import GrammarLimit, InvalidParameter
from outrider.models.tokenizer import TextModel

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

CACHED = 64  # compiled grammars
# Far below the library's defaults: what exceeds them takes seconds, or hundreds of megabytes.
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=25_000,
    max_lexer_states=25_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# One way to write each value: less to guess wrong, and no endless white space.
JSON_STYLE: JsonCompileOptions = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}

FORMATS = "text, json_object, json_schema, regex, grammar"
Kind = Literal["json_schema", "regex", "grammar"]


@dataclass(frozen=True)
class GrammarSource:
    """A grammar as a request gives it."""

    kind: Kind
    text: str

    @classmethod
    def of_schema(cls, schema: object) -> GrammarSource:
        """Raises:
        InvalidParameter: it cannot be written as JSON."""
        try:
            return cls("json_schema", json.dumps(schema, sort_keys=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InvalidParameter(f"the json_schema is no JSON: {error}") from None

    @classmethod
    def of_format(cls, wanted: Mapping[str, Any]) -> GrammarSource | None:
        """What a `response_format` asks for: those of the OpenAI interface, and two of our own,
        ``{"type": "regex", "regex": ...}`` and ``{"type": "grammar", "grammar": ...}``.

        `None` for free text.

        Raises:
            InvalidParameter: there is no such format, or it lacks its grammar.
        """
        kind = wanted.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return JSON_OBJECT
        if kind == "json_schema":
            named = wanted.get("json_schema")
            if isinstance(named, Mapping):
                return cls.of_schema(named.get("schema", {}))
        elif kind == "regex" or kind == "grammar":
            if isinstance(wanted.get(kind), str):
                return cls(kind, wanted[kind])
        else:
            raise InvalidParameter(f"response_format is of type {kind!r}; use one of {FORMATS}")
        raise InvalidParameter(f"response_format of type {kind} lacks {kind}")


JSON_OBJECT = GrammarSource.of_schema({"type": "object"})


class _Vocabulary:
    """A tokenizer in the form that llguidance wraps."""

    def __init__(self, text: TextModel, ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.tokens = text.token_bytes()
        self.special_token_ids = sorted({*text.special_tokens.values(), *ends})
        self._encode = text.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class Follower:
    """The grammar of one request: an `outrider.core.grammar.Grammar`."""

    def __init__(self, matcher: LLMatcher, *, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ahead: tuple[int, ...] = ()  # guesses that the matcher has consumed

    @property
    def finished(self) -> bool:
        return not self._ahead and bool(self._matcher.is_stopped())

    def allowed(self, path: tuple[int, ...]) -> Mask:
        if not self._walk(path):
            # No output ever gets there, and no rule asks for more than a row of numbers.
            return np.ones(self._vocab_size, dtype=np.bool_)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        mask[: len(known)] = known
        return mask

    def fits(self, path: Sequence[int]) -> int:
        self._walk(())
        return int(self._matcher.validate_tokens(list(path)))

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._ahead and self._ahead[0] == token:
                self._ahead = self._ahead[1:]
                continue
            self._walk(())
            if not self._matcher.consume_token(token):
                raise self._refusal()
        if not self._ahead:
            self._check()

    def _walk(self, path: tuple[int, ...]) -> bool:
        """Bring the matcher to the end of ``path``; false where the grammar forbids it."""
        common = 0
        for ours, theirs in zip(self._ahead, path, strict=False):
            if ours != theirs:
                break
            common += 1
        if common < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - common)
        self._ahead = self._ahead[:common]
        rest = list(path[common:])
        if not rest:
            return True
        if self._matcher.validate_tokens(rest) < len(rest):
            return False
        self._matcher.consume_tokens(rest)
        self._check()
        self._ahead = tuple(path)
        return True

    def _check(self) -> None:
        if self._matcher.is_error():
            raise self._refusal()

    def _refusal(self) -> InvalidParameter:
        """Why the matcher gave up: what was generated, or what following it costs."""
        if "satisfy the grammar" in self._matcher.get_error():
            return InvalidParameter("the grammar does not allow what was generated")
        return GrammarLimit("the grammar is too complex to go on; use a simpler one")


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the latest. May be called from any thread."""

    def __init__(self, text: TextModel, *, vocab_size: int, ends: frozenset[int]) -> None:
        if not ends:
            raise InvalidParameter("the model has no end token; a grammar could never end")
        wrapped = TokenizerWrapper(_Vocabulary(text, sorted(ends)))
        self._tokenizer = LLTokenizer(wrapped, eos_token=sorted(ends))
        self._vocab_size = vocab_size
        self._cache: OrderedDict[GrammarSource, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, source: GrammarSource) -> Follower:
        """A follower at the start of a grammar; compiles it where it is new.

        Raises:
            InvalidParameter: it is not a grammar, too complex, or of an unsupported kind.
        """
        with self._lock:
            matcher = self._cache.get(source)
            if matcher is not None:
                self._cache.move_to_end(source)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer, _translate(source), log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise InvalidParameter(f"the {source.kind} {_reason(matcher.get_error())}")
            with self._lock:
                self._cache[source] = matcher
                while len(self._cache) > CACHED:
                    self._cache.popitem(last=False)
        return Follower(matcher.deep_copy(), vocab_size=self._vocab_size)


def _translate(source: GrammarSource) -> str:
    """The library's own form."""
    try:
        if source.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(source.text, defaults=JSON_STYLE)
        if source.kind == "regex":
            return LLMatcher.grammar_from_regex(source.text)
        return LLMatcher.grammar_from_lark(any_to_lark(source.text))
    except Exception as error:
        raise InvalidParameter(f"the {source.kind} {_reason(str(error))}") from None


def _reason(error: str) -> str:
    """The line that says what is wrong: of a regular expression's, the one behind its picture."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["it is not valid"]
    named = (line.removeprefix("error: ") for line in lines if line.startswith("error: "))
    return f"cannot be used: {next(named, lines[0])[:200]}"
