"""Grammars of requests: what a follower allows along a path, what it costs, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest

from outrider.core.sampling import SamplingParams
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Engine, EngineConfig, FixedBudget
from outrider.engine.grammar import CACHED, JSON_OBJECT, Follower, GrammarCompiler, GrammarSource
from outrider.errors import GrammarLimit, InvalidParameter
from outrider.testing.fakes import END, ByteTokenizer
from outrider.testing.serving import text_target

VOCAB = 262  # more than the tokenizer has, as padded vocabularies do
ENDS = ByteTokenizer.end_tokens


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer(), vocab_size=VOCAB, ends=ENDS)


def start(compiler: GrammarCompiler, pattern: str) -> Follower:
    return compiler.start(GrammarSource("regex", pattern))


def may_follow(follower: Follower, path: str = "") -> str:
    allowed = np.flatnonzero(follower.allowed(tuple(path.encode())))
    return "".join("$" if token == END else chr(token) for token in allowed)


def test_what_may_follow_depends_on_the_path_and_leaves_no_trace(compiler: GrammarCompiler) -> None:
    follower = start(compiler, "a(b|c)d?")
    assert may_follow(follower, "ab") == "d$"
    assert may_follow(follower) == "a"
    assert may_follow(follower, "a") == "bc"
    assert may_follow(follower, "ac") == "d$"
    follower.advance(b"a")
    assert may_follow(follower) == "bc"
    assert may_follow(follower, "b") == "d$"


def test_committing_what_was_looked_at_or_something_else(compiler: GrammarCompiler) -> None:
    for committed in (b"ab", b"ac"):
        follower = start(compiler, "a(b|c)e")
        follower.allowed(tuple(b"ab"))
        follower.advance(committed)
        assert may_follow(follower) == "e"
        assert not follower.finished
        follower.advance(b"e")
        assert follower.finished


def test_guesses_fit_up_to_the_first_that_is_forbidden(compiler: GrammarCompiler) -> None:
    follower = start(compiler, "abc")
    assert [follower.fits(list(path)) for path in (b"", b"ab", b"abc", b"axc", b"x")] == [
        0,
        2,
        3,
        1,
        0,
    ]
    assert follower.fits([*b"abc", END, 97]) == 4  # the end token fits, nothing behind it does
    assert may_follow(follower) == "a"


def test_a_path_that_breaks_the_grammar_is_nobodys_output(compiler: GrammarCompiler) -> None:
    follower = start(compiler, "abc")
    assert follower.allowed(tuple(b"zz")).all()
    assert may_follow(follower) == "a"


def test_what_the_grammar_forbids_cannot_be_committed(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidParameter, match="does not allow"):
        start(compiler, "abc").advance(b"x")


def test_padding_and_special_tokens_are_never_allowed(compiler: GrammarCompiler) -> None:
    mask = start(compiler, "(?s:.*)").allowed(())
    assert len(mask) == VOCAB
    assert set(np.flatnonzero(mask[256:]) + 256) == {END}


def test_two_requests_do_not_share_a_follower(compiler: GrammarCompiler) -> None:
    one, two = start(compiler, "abc"), start(compiler, "abc")
    one.advance(b"ab")
    assert (may_follow(one), may_follow(two)) == ("c", "a")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (GrammarSource("regex", "[0-9]{3}-[a-z]{2}"), "123-ab"),
        (GrammarSource("grammar", 'start: "yes" | "no" | /[x-z]+/'), "no"),
        (GrammarSource("grammar", 'root ::= "a" ("b" | "c")'), "ac"),
        (JSON_OBJECT, '{"a": [1, 2.5, {"b": null}]}'),
        (
            GrammarSource.of_schema(
                {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
            ),
            '{"a": "y"}',
        ),
    ],
    ids=["regex", "lark", "gbnf", "json_object", "json_schema"],
)
def test_every_kind_of_grammar(compiler: GrammarCompiler, source: GrammarSource, text: str) -> None:
    follower = compiler.start(source)
    tokens = list(text.encode())
    assert follower.fits(tokens) == len(tokens)
    follower.advance(tokens)
    assert follower.allowed(())[END]


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource("regex", "("),
        GrammarSource("grammar", "start: missing_rule"),
        GrammarSource("grammar", "((("),
        GrammarSource.of_schema({"type": "nonsense"}),
        GrammarSource.of_schema({"$ref": "http://example.com/schema.json"}),
        GrammarSource.of_schema({"type": "string", "pattern": "(?<=x)y"}),
        GrammarSource.of_schema({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {}}),
    ],
    ids=lambda source: source.text[:20],
)
def test_what_is_no_grammar_is_refused_in_one_line(
    compiler: GrammarCompiler, source: GrammarSource
) -> None:
    with pytest.raises(InvalidParameter, match="cannot be used") as refusal:
        compiler.start(source)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [(r"(a)\1", "backreferences"), ("(?=a)b", "look-around"), ("[z-a]", "the start must be")],
)
def test_what_is_wrong_with_a_regular_expression_is_said(
    compiler: GrammarCompiler, pattern: str, reason: str
) -> None:
    with pytest.raises(InvalidParameter, match=f"the regex cannot be used: .*{reason}"):
        start(compiler, pattern)


def test_a_grammar_beyond_the_limits_is_called_that(compiler: GrammarCompiler) -> None:
    follower = start(compiler, "(a{1000}){1000}")
    follower.allowed(())
    with pytest.raises(GrammarLimit, match="too complex"):
        follower.advance(b"a" * 50)


@pytest.mark.parametrize(
    "pattern", ["a{999999}{999999}", "(a?){3000}(a*)*b{5000}", "((a{0,500}){0,500}){0,500}b"]
)
def test_a_pattern_made_to_explode_works_or_ends_its_own_request(
    compiler: GrammarCompiler, pattern: str
) -> None:
    with suppress(InvalidParameter):
        follower = start(compiler, pattern)
        for _ in range(50):
            assert follower.allowed(())[ord("a")]
            follower.advance(b"a")


def test_the_cache_is_bounded(compiler: GrammarCompiler) -> None:
    for number in range(CACHED + 5):
        start(compiler, f"a{number}")
    assert len(compiler._cache) == CACHED


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("rule", ["walk", "reject", "block"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_keep_the_schema_for_every_rule(
    compiler: GrammarCompiler, rule: str, temperature: float
) -> None:
    engine = Engine(
        text_target(),
        # Suffix trees are no chains.
        drafters={"ngram": NgramDrafter()}
        | ({} if rule == "block" else {"suffix": SuffixDrafter()}),
        tokenizer=ByteTokenizer(),
        config=EngineConfig(slots=3, rule=rule),
        budget=FixedBudget(6, 6),
    )
    source = GrammarSource.of_schema(SCHEMA)
    params = SamplingParams(temperature=temperature, max_tokens=120, seed=3)
    prompt = list(b'say {"name": "x", "age": 7, "tags": ["red", "red", "green"]}')
    small = GrammarCompiler(ByteTokenizer(), vocab_size=259, ends=ENDS)
    requests = [
        engine.add(prompt, params, drafter=name, grammar=small.start(source))
        for name in engine.drafters
    ]
    while engine.has_work:
        engine.step()
    done = [engine.take(request) for request in requests]
    for completion in done:
        assert completion.finish_reason == "stop", completion.error
        assert set(json.loads(completion.text)) == {"name", "age", "tags"}
    assert sum(step.accepted for c in done for step in c.steps) > 0
    if rule == "walk":
        assert len({completion.tokens for completion in done}) == 1
