"""Sampling against a slow, independent reference, and its edges.

The reference works on Python lists in float64, one transform after the other, as the module's head
and the attributes of `SamplingParams` describe them.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.noise import Noise, Purpose, Stream
from outrider.core.sampling import (
    History,
    SamplingParams,
    candidates,
    distribution,
    draw,
    logprobs,
)
from outrider.errors import InvalidParameter, NonFiniteLogits

V = 8
EMPTY = History((), ())
STREAM = Stream(Noise(1), Purpose.DRAFT)


def reference(logits: Sequence[float], params: SamplingParams, history: History) -> list[float]:
    """The distribution by definition; ties at an edge are kept."""
    out = [*history.output, *history.path]
    row = [x + params.logit_bias.get(token, 0.0) for token, x in enumerate(logits)]
    for token in {*history.prompt, *out}:
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in out:
        row[token] -= params.frequency_penalty
    for token in set(out):
        row[token] -= params.presence_penalty
    for word in params.bad_words:
        *head, last = word
        if not head or out[-len(head) :] == head:
            row[last] = -math.inf
    if len(out) < params.min_tokens:
        for token in history.ends:
            row[token] = -math.inf
    if params.temperature == 0:
        return [float(token == row.index(max(row))) for token in range(len(row))]
    if params.top_k:
        edge = sorted(row, reverse=True)[: params.top_k][-1]
        row = [x if x >= edge else -math.inf for x in row]
    peak = max(row)
    weights = [math.exp((x - peak) / params.temperature) for x in row]
    total = math.fsum(weights)
    probs = [w / total for w in weights]
    kept, mass = 0.0, 0.0
    for probability in sorted(probs, reverse=True):
        kept, mass = probability, mass + probability
        if params.top_p < 1 and mass >= params.top_p - 1e-12:
            break
    floor = max(kept, params.min_p * max(probs) * (1 - 1e-12))
    probs = [p if p >= floor else 0.0 for p in probs]
    total = math.fsum(probs)
    return [p / total for p in probs]


tokens = st.integers(0, V - 1)
histories = st.builds(
    History,
    prompt=st.lists(tokens, max_size=4),
    output=st.lists(tokens, max_size=5),
    ends=st.frozensets(tokens, max_size=2),
    path=st.lists(tokens, max_size=4).map(tuple),
)
# Multiples of 1/4: ties are common, and top-p's edge is not a matter of rounding.
logit_rows = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=V, max_size=V)
settings_of_a_request = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.integers(0, V + 1),
    top_p=st.sampled_from([0.1, 0.37, 0.62, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.27, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.4, -0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.35, -0.15]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-3.0, 0.7, 5.0, -math.inf]), max_size=2),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    min_tokens=st.integers(0, 8),
)


@settings(max_examples=400, deadline=None)
@given(logit_rows, settings_of_a_request, histories)
def test_it_equals_the_reference(
    logits: list[float], params: SamplingParams, history: History
) -> None:
    row = torch.tensor(logits, dtype=torch.float64)
    got = distribution(row, params, history)
    assert got.tolist() == pytest.approx(reference(logits, params, history), abs=1e-12)
    assert row.tolist() == logits
    single = distribution(row.float(), params, history)
    assert single.dtype == torch.float32
    assert float(single.sum()) == pytest.approx(1, abs=1e-6)


@settings(max_examples=200, deadline=None)
@given(
    logit_rows, settings_of_a_request, histories, st.sampled_from([torch.float32, torch.bfloat16])
)
def test_a_node_sees_what_plain_decoding_would_see(
    logits: list[float], params: SamplingParams, history: History, dtype: torch.dtype
) -> None:
    """Law of path-awareness: guessed tokens count as committed ones do, to the last bit."""
    row = torch.tensor(logits, dtype=dtype)
    committed = History(history.prompt, [*history.output, *history.path], history.ends)
    ahead = History(history.prompt, history.output, history.ends).along(history.path)
    assert torch.equal(distribution(row, params, ahead), distribution(row, params, committed))


def test_a_row_does_not_depend_on_where_it_lies_or_on_its_neighbours() -> None:
    rows = 6 * torch.randn(5, 4001, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(top_p=0.9, top_k=100, temperature=0.7)
    for row in rows:
        spread = torch.stack([row, -row], dim=1)[:, 0]
        assert torch.equal(
            distribution(row, params, EMPTY), distribution(row.clone(), params, EMPTY)
        )
        assert torch.equal(distribution(row, params, EMPTY), distribution(spread, params, EMPTY))


@pytest.mark.parametrize("spread", [0.01, 0.5, 2.0, 8.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=50),
        SamplingParams(top_k=3000, top_p=0.99),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.9999, min_p=0.01),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=5.0, top_p=0.999),
    ],
    ids=lambda params: f"T{params.temperature}-k{params.top_k}-p{params.top_p}-m{params.min_p}",
)
def test_long_rows_flat_and_peaked_equal_the_reference(
    params: SamplingParams, spread: float
) -> None:
    """The shortcuts for the likeliest tokens change nothing."""
    generator = torch.Generator().manual_seed(int(100 * spread))
    row = spread * torch.randn(5000, generator=generator, dtype=torch.float64)
    got = distribution(row, params, EMPTY).tolist()
    assert got == pytest.approx(reference(row.tolist(), params, EMPTY), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_logits_are_widened_exactly(dtype: torch.dtype) -> None:
    row = (9 * torch.randn(2, 3001, generator=torch.Generator().manual_seed(3))).to(dtype)
    row[0, :3] = torch.tensor([-math.inf, -0.0, 1e-40])
    for view in (row[0], row[1], row.T[7], row[:, ::2][1]):
        params = SamplingParams(temperature=0.9)
        wide = distribution(view.float(), params, EMPTY)
        assert wide.dtype == torch.float32
        assert torch.equal(distribution(view, params, EMPTY), wide)


# ---- Edges ----


def dist(logits: Sequence[float], history: History = EMPTY, **params: Any) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return distribution(torch.tensor(logits), SamplingParams(**params), history).tolist()


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-6])
def test_cold_is_greedy_and_ties_share(temperature: float) -> None:
    assert dist([1.0, 3.0, 2.0], temperature=temperature) == [0, 1, 0]
    assert dist([3.0, 3.0, -math.inf], temperature=temperature) == [0.5, 0.5, 0]
    assert dist([3e38, -3e38, 0.0], temperature=temperature) == [1, 0, 0]


@pytest.mark.parametrize("temperature", [1e12, 1e39, 1.7e308])
def test_hot_is_flat_over_what_is_allowed(temperature: float) -> None:
    assert dist([1.0, 5.0, -math.inf], temperature=temperature) == [0.5, 0.5, 0]


def test_greedy_takes_the_first_of_equals() -> None:
    assert dist([1.0, 2.0, 2.0], temperature=0) == [0, 1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_refused(bad: float, temperature: float) -> None:
    for place in range(3):
        row = [1.0, 2.0, 3.0]
        row[place] = bad
        with pytest.raises(NonFiniteLogits, match=f"largest logit is {bad} at output token 2"):
            dist(row, History((), (1, 1)), temperature=temperature)


def test_forbidding_everything_is_refused() -> None:
    with pytest.raises(NonFiniteLogits, match="no token is allowed at output token 0"):
        dist([1.0, 2.0], bad_words=((0,), (1,)))
    with pytest.raises(NonFiniteLogits, match="no token is allowed"):
        dist([-math.inf, -math.inf])


def test_ties_at_an_edge_are_kept() -> None:
    assert dist([2.0, 2.0, 2.0, 0.0], top_k=1) == pytest.approx([1 / 3] * 3 + [0])
    assert dist([0.0, 0.0, 0.0, 0.0], top_p=0.1) == [0.25] * 4
    assert dist([2.0, 2.0, 1.0], min_p=1.0) == [0.5, 0.5, 0]


def test_truncations_keep_at_least_the_likeliest_and_at_most_all() -> None:
    row = [0.3, 0.1, 5.0, 0.2]
    assert dist(row, top_p=1e-9) == [0, 0, 1, 0]
    assert dist(row, top_k=1) == [0, 0, 1, 0]
    assert dist(row, top_k=4) == dist(row) == dist(row, top_k=9)
    assert dist([1.0, -math.inf, -math.inf], top_k=2) == [1, 0, 0]


def test_min_p_is_relative_to_the_likeliest_after_temperature() -> None:
    row = [0.0, math.log(0.5), math.log(0.1)]
    assert dist(row, min_p=0.2) == pytest.approx([2 / 3, 1 / 3, 0])
    assert dist(row, min_p=0.2, temperature=0.25) == [1, 0, 0]


def test_bad_words_need_their_beginning_in_the_output_not_in_the_prompt() -> None:
    params: dict[str, Any] = {"bad_words": ((1, 2, 0),), "temperature": 1.0}
    allowed, forbidden = [0.5, 0.5], [0.0, 1.0]
    row = [0.0, 0.0, -math.inf]

    def first_two(history: History) -> list[float]:
        return dist(row, history, **params)[:2]

    assert first_two(History((), (1, 2))) == forbidden
    assert first_two(History((), (1,), path=(2,))) == forbidden
    assert first_two(History((), (), path=(1, 2))) == forbidden
    assert first_two(History((), (2, 1))) == allowed
    assert first_two(History((1, 2), ())) == allowed
    assert first_two(History((1,), (2,))) == allowed


def test_ends_wait_for_min_tokens_along_the_path() -> None:
    history = History((5, 5), (1,), ends=frozenset({0}))
    assert dist([0.0, 0.0], history, min_tokens=3) == [0, 1]
    assert dist([0.0, 0.0], history.along((1,)), min_tokens=3) == [0, 1]
    assert dist([0.0, 0.0], history.along((1, 1)), min_tokens=3) == [0.5, 0.5]


def test_penalties_count_the_output_and_repetition_the_prompt_too() -> None:
    history = History((0,), (1, 1))
    row = [1.0, 1.0, 1.0]
    by_frequency = dist(row, history, frequency_penalty=0.5)
    assert math.log(by_frequency[0] / by_frequency[1]) == pytest.approx(1.0, abs=1e-5)
    assert by_frequency[0] == by_frequency[2]
    by_presence = dist(row, history, presence_penalty=0.5)
    assert math.log(by_presence[0] / by_presence[1]) == pytest.approx(0.5, abs=1e-5)
    by_repetition = dist(row, history, repetition_penalty=2.0)
    assert by_repetition[0] == by_repetition[1] < by_repetition[2]


def test_a_history_that_is_asked_for_its_end() -> None:
    history = History((9,), (1, 2), path=(3,))
    assert history.output_length() == 3
    for tail in ((), (3,), (2, 3), (1, 2, 3)):
        assert history.ends_with(tail)
    for tail in ((2,), (1, 3), (9, 1, 2, 3)):
        assert not history.ends_with(tail)


# ---- Draws, guesses, log-probabilities ----


def test_a_draw_carries_the_q_it_came_from() -> None:
    row = torch.tensor([0.0, 2.0, 1.0, -math.inf])
    params = SamplingParams(temperature=0.7, top_k=2)
    drawn = draw(row, params, EMPTY, stream=STREAM, position=4, count=3)
    assert torch.equal(drawn.q, distribution(row, params, EMPTY))
    assert drawn.tokens == tuple(STREAM.sample(drawn.q, position=4, count=3))
    assert set(drawn.tokens) == {1, 2}


def test_greedy_guesses_are_the_likeliest_with_honest_confidence() -> None:
    row = torch.tensor([0.0, 2.0, 1.0, 2.0, 0.5])
    params = SamplingParams(temperature=0.0, top_p=0.1, min_p=0.9, bad_words=((2,),))
    guesses = candidates(row, params, EMPTY, stream=STREAM, position=0, count=3)
    assert guesses.tokens == (1, 3, 4)
    probs = distribution(row, SamplingParams(bad_words=((2,),)), EMPTY)
    assert guesses.probabilities == pytest.approx([float(probs[t]) for t in (1, 3, 4)])
    everything = candidates(row, params, EMPTY, stream=STREAM, position=0, count=9)
    assert everything.tokens == (1, 3, 4, 0)


@given(st.lists(st.integers(-9, 9), min_size=2, max_size=40), st.integers(0, 45))
def test_the_first_greedy_guess_is_the_greedy_token(logits: list[int], count: int) -> None:
    row = torch.tensor([x * 1e-8 for x in logits])
    params = SamplingParams(temperature=0.0)
    guesses = candidates(row, params, EMPTY, stream=STREAM, position=0, count=count).tokens
    best = sorted(range(len(row)), key=lambda token: (-float(row[token]), token))
    assert list(guesses) == best[:count]


def test_sampled_guesses_start_with_what_the_target_would_draw() -> None:
    row = 3 * torch.randn(300, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=0.8)
    probs = distribution(row, params, EMPTY)
    for position in range(30):
        stream = Stream(Noise(5), Purpose.TOKEN)
        guesses = candidates(row, params, EMPTY, stream=stream, position=position, count=4)
        token = Noise(5).sample(probs, position=position, purpose=Purpose.TOKEN)
        assert [guesses.tokens[0]] == token
        assert len(set(guesses.tokens)) == 4
        assert guesses.probabilities == tuple(float(probs[t]) for t in guesses.tokens)


def test_logprobs_are_the_plain_models() -> None:
    row = torch.tensor([0.0, 2.0, 1.0, 2.0], dtype=torch.bfloat16)
    expected = torch.log_softmax(row.double(), 0).tolist()
    found = logprobs(row, 2, 3)
    assert found.logprob == pytest.approx(expected[2], abs=1e-6)
    assert [token for token, _ in found.top] == [1, 3, 2]
    assert [value for _, value in found.top] == pytest.approx([expected[t] for t in (1, 3, 2)])
    assert logprobs(row, 2, 0).top == ()
    assert len(logprobs(row, 2, 99).top) == 4


# ---- Validation ----

REFUSED: list[tuple[Mapping[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature is -0.1; use a finite number of at least 0"),
    ({"temperature": math.inf}, "temperature is inf;"),
    ({"temperature": math.nan}, "temperature is nan;"),
    ({"top_k": -1}, "top_k is -1; use 0 (off) or a positive count"),
    ({"top_p": 0.0}, "top_p is 0.0; use a number in (0, 1]"),
    ({"top_p": 1.1}, "top_p is 1.1;"),
    ({"top_p": math.nan}, "top_p is nan;"),
    ({"min_p": -0.1}, "min_p is -0.1; use a number in [0, 1]"),
    ({"min_p": math.nan}, "min_p is nan;"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; use a finite number above 0"),
    ({"presence_penalty": math.inf}, "presence_penalty is inf; use a finite number"),
    ({"frequency_penalty": math.nan}, "frequency_penalty is nan; use a finite number"),
    ({"logit_bias": {3: math.nan}}, "logit_bias[3] is nan; use a number or -inf"),
    ({"logit_bias": {3: math.inf}}, "logit_bias[3] is inf; use a number or -inf"),
    ({"bad_words": ((1,), ())}, "bad_words is ((1,), ()); remove the empty sequence"),
    ({"stop": ("a", "")}, "stop is ('a', ''); remove the empty string"),
    ({"max_tokens": 0}, "max_tokens is 0; ask for at least 1 token"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; use a number from 0 to max_tokens (4)"),
    ({"min_tokens": -1}, "min_tokens is -1;"),
    ({"seed": -1}, f"seed is -1; use an integer from 0 to {2**64 - 1}"),
    ({"seed": 2**64}, f"seed is {2**64};"),
    ({"logprobs": 101}, "logprobs is 101; use an integer from 0 to 100"),
    ({"logprobs": -1}, "logprobs is -1;"),
]


@pytest.mark.parametrize(("params", "message"), REFUSED, ids=[str(p) for p, _ in REFUSED])
def test_what_cannot_work_is_refused_by_name(params: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{re.escape(message)}"):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logit_bias={9: 1.0}), "logit_bias is 9; use token ids below 8"),
        (SamplingParams(bad_words=((1, -1),)), "bad_words is -1; use token ids below 8"),
        (SamplingParams(stop_token_ids=(8,)), "stop_token_ids is 8; use token ids below 8"),
    ],
    ids=["bias", "words", "stop"],
)
def test_ids_beyond_the_vocabulary_are_refused(params: SamplingParams, message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        params.check_vocabulary(8)


def test_ids_within_the_vocabulary_pass() -> None:
    SamplingParams(logit_bias={7: 1.0}, bad_words=((0, 7),)).check_vocabulary(8)
