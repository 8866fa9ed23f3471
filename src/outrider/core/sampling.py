"""From vocabulary logits to probabilities and tokens: the only place where that happens.

Target and drafters call the same functions, so there is no second sampling path and a recorded `q`
cannot differ from what was drawn. Everything works on one row [V] at a time: a row's result depends
on that row alone, never on its neighbours in a batch. An architecture test keeps softmax, argmax
and multinomial over the vocabulary inside this file.

Order of the transforms: logits in float32 (float64 stays), logit bias, penalties along the path,
forbidden tokens (bad words, ends before `min_tokens`, what the grammar does not allow),
temperature, top-k, top-p, min-p, softmax. Ties at a truncation's edge are kept, so a result never
depends on a sort's stability.

The arithmetic is NumPy's on the host: one row is too small to share among threads (waking them
costs more than the work), and a sum split over threads would depend on how many there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.grammar import Grammar
from outrider.core.noise import MAX_SEED, Noise, Purpose, Stream
from outrider.errors import InvalidParameter, NonFiniteLogits

MAX_LOGPROBS = 100
Row = npt.NDArray[np.floating]

# Beyond these a float32 temperature would be 0 or infinite and forbidden tokens 0/0 or inf/inf;
# within them the distribution is already one-hot or flat, to the last bit.
_COLDEST, _HOTTEST = 1e-30, 1e30
# The likeliest tokens are looked for within this of the peak (logits, then weights relative to the
# peak's 1) before the whole vocabulary is sorted; the result is the same.
_NEAR_LOGITS = (4.0, 12.0, math.inf)
_NEAR_WEIGHTS = (1e-3, 1e-6, 0.0)


def _require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise InvalidParameter(f"{name} is {value!r}; {remedy}")


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of the sampler and of its end. Validated on construction.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches this.
        min_p: keep tokens at least this fraction as likely as the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in the
            prompt or the output (Keskar et al., arXiv 1909.05858); 1 is off.
        presence_penalty, frequency_penalty: subtracted once, or once per occurrence, from logits of
            tokens seen in the output; 0 is off.
        logit_bias: token id to a number added to its logit.
        bad_words: token sequences that must not occur in the output.
        stop_token_ids: tokens that end the output (kept in it), beside the model's own end tokens.
        stop: strings that end the output (cut from the text).
        ignore_eos: the model's own end tokens do not end the output.
        min_tokens: no end token before this many output tokens.
        max_tokens: at most this many output tokens.
        seed: 0 .. 2**64 - 1; the same seed gives the same tokens. `None` takes a fresh one.
        logprobs: give the log-probability of each output token and of this many likeliest others,
            under the target's plain distribution (before any transform of this class).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 256
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        finite = math.isfinite
        t = self.temperature
        _require(finite(t) and t >= 0, "temperature", t, "use a finite number of at least 0")
        _require(self.top_k >= 0, "top_k", self.top_k, "use 0 (off) or a positive count")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "use a number in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "use a number in [0, 1]")
        r = self.repetition_penalty
        _require(finite(r) and r > 0, "repetition_penalty", r, "use a finite number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(finite(value), name, value, "use a finite number")
        for token, bias in self.logit_bias.items():
            _require(bias < math.inf, f"logit_bias[{token}]", bias, "use a number or -inf")
        _require(all(self.bad_words), "bad_words", self.bad_words, "remove the empty sequence")
        _require(all(self.stop), "stop", self.stop, "remove the empty string")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "ask for at least 1 token")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"use a number from 0 to max_tokens ({self.max_tokens})",
        )
        _require(
            self.seed is None or 0 <= self.seed <= MAX_SEED,
            "seed",
            self.seed,
            f"use an integer from 0 to {MAX_SEED}",
        )
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"use an integer from 0 to {MAX_LOGPROBS}",
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            InvalidParameter: an id in `logit_bias`, `bad_words` or `stop_token_ids` is too large
                or negative.
        """
        named = {
            "logit_bias": list(self.logit_bias),
            "bad_words": [token for word in self.bad_words for token in word],
            "stop_token_ids": list(self.stop_token_ids),
        }
        for name, ids in named.items():
            for token in ids:
                _require(0 <= token < vocab_size, name, token, f"use token ids below {vocab_size}")


@dataclass(frozen=True)
class History:
    """What the sampler needs to know of a request's past, at one node of a tree.

    `path` holds the guesses between the last committed token and the node, so penalties, the
    grammar and forbidden tokens inside a tree see exactly what plain decoding would have seen.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    ends: frozenset[int] = frozenset()
    path: tuple[int, ...] = ()
    grammar: Grammar | None = None

    def along(self, path: tuple[int, ...]) -> History:
        """The same past, further down: with ``path`` guessed after the committed tokens."""
        return replace(self, path=path)

    def output_length(self) -> int:
        return len(self.output) + len(self.path)

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Do output and path end with ``tokens``?"""
        if len(tokens) > self.output_length():
            return False
        tail = (*self.output[-len(tokens) :], *self.path) if tokens else ()
        return not tokens or tail[-len(tokens) :] == tuple(tokens)


def _host(logits_V: Tensor) -> Row:
    """The row on the host in float32 (float64 stays); may share the tensor's memory."""
    row = logits_V.detach().cpu()
    if row.dtype == torch.bfloat16:  # NumPy has none; it is the upper half of a float32
        halves = row.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return (halves << np.uint32(16)).view(np.float32)
    values: Row = row.numpy()
    return values if values.dtype == np.float64 else values.astype(np.float32, copy=False)


def _penalise(logits_V: Row, params: SamplingParams, history: History) -> None:
    """Apply the three penalties in place."""
    counts = Counter(history.output)
    counts.update(history.path)
    if params.repetition_penalty != 1.0:
        seen = np.array(sorted({*history.prompt, *counts}), dtype=np.int64)
        values = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = np.where(values > 0, values / penalty, values * penalty)
    if counts:
        ids = np.array(list(counts), dtype=np.int64)
        times = np.array(list(counts.values()), dtype=logits_V.dtype)
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * times


def _forbidden(params: SamplingParams, history: History) -> set[int]:
    """The tokens that may not come next."""
    forbidden = {word[-1] for word in params.bad_words if history.ends_with(word[:-1])}
    if history.output_length() < params.min_tokens:
        forbidden |= history.ends
    return forbidden


def _adjusted(logits_V: Tensor, params: SamplingParams, history: History) -> tuple[Row, int]:
    """Logits after bias, penalties and forbidden tokens, and the index of the (first) largest.

    The given row is not changed, and the result may share its memory; it is float32, or float64
    for float64 logits.

    Raises:
        NonFiniteLogits: the row holds NaN or +inf, or forbids every token.
    """
    adjusted = _host(logits_V)
    penalised = (
        params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    )
    forbidden = _forbidden(params, history)
    grammar = history.grammar
    if penalised or forbidden or params.logit_bias or grammar is not None:
        adjusted = adjusted.copy()
        for token, bias in params.logit_bias.items():
            adjusted[token] += bias
        if penalised:
            _penalise(adjusted, params, history)
        for token in forbidden:
            adjusted[token] = -math.inf
        if grammar is not None:
            adjusted[~grammar.allowed(history.path)] = -math.inf
    top = int(adjusted.argmax())  # NaN counts as the largest
    peak = float(adjusted[top])
    if not math.isfinite(peak):
        what = "no token is allowed" if peak == -math.inf else f"the largest logit is {peak}"
        raise NonFiniteLogits(
            f"{what} at output token {history.output_length()}; "
            "check the model's weights and dtype, or the request's bias, bad words and grammar"
        )
    return adjusted, top


def _kth_largest(values_V: Row, k: int, *, peak: float) -> float:
    for distance in _NEAR_LOGITS:
        near = values_V[values_V > peak - distance]
        if len(near) >= k:
            return float(np.partition(near, len(near) - k)[len(near) - k])
    return -math.inf  # fewer than k tokens are allowed


def _nucleus_edge(weights_V: Row, top_p: float) -> float:
    """The smallest weight inside the nucleus of mass ``top_p``; the largest weight is 1."""
    goal = top_p * float(weights_V.sum())
    for least in _NEAR_WEIGHTS:
        ordered = np.sort(weights_V[weights_V > least])[::-1]
        reached = int(np.searchsorted(np.cumsum(ordered, dtype=np.float64), goal))
        if reached < len(ordered):
            return float(ordered[reached])
    return 0.0


def distribution(logits_V: Tensor, params: SamplingParams, history: History) -> Tensor:
    """The distribution [V] that a request draws its next token from, on the host.

    Args:
        logits_V: one row of raw logits; not changed.
        params: the request's sampling parameters.
        history: what came before this row, guesses included.

    Returns:
        Probabilities [V] in float32 (float64 for float64 logits), zero outside the support, one-hot
        at temperature 0.

    Raises:
        NonFiniteLogits: the row holds NaN or +inf, or nothing is allowed.
    """
    adjusted, top = _adjusted(logits_V, params, history)
    probs = np.zeros_like(adjusted)
    if params.temperature == 0:
        probs[top] = 1
        return torch.from_numpy(probs)
    peak = float(adjusted[top])
    kept: npt.NDArray[np.intp] | slice = slice(None)
    if 0 < params.top_k < len(adjusted):
        kept = np.flatnonzero(adjusted >= _kth_largest(adjusted, params.top_k, peak=peak))
    weights = _weights(adjusted[kept], peak=peak, temperature=params.temperature)
    edge = params.min_p
    if params.top_p < 1:
        edge = max(edge, _nucleus_edge(weights, params.top_p))
    if edge > 0:
        weights *= weights >= edge
    weights /= weights.sum()
    probs[kept] = weights
    return torch.from_numpy(probs)


def _weights(logits: Row, *, peak: float, temperature: float) -> Row:
    """exp((logits - peak) / temperature): unnormalised probabilities, 1 at the peak."""
    with np.errstate(over="ignore"):  # far below the peak: -inf, and a weight of 0
        weights = logits - peak
        weights /= min(max(temperature, _COLDEST), _HOTTEST)
    np.exp(weights, out=weights)
    return weights


def _largest(values_V: Row, count: int) -> list[int]:
    """The ids of the ``count`` largest values above -inf, best first, ties by id."""
    count = min(count, len(values_V))
    if count == 0:
        return []
    edge = _kth_largest(values_V, count, peak=float(values_V.max()))
    ids = np.flatnonzero((values_V >= edge) & (values_V > -math.inf))
    order = np.argsort(-values_V[ids], kind="stable")[:count]
    best: list[int] = ids[order].tolist()
    return best


@dataclass(frozen=True)
class Draw:
    """Tokens and the distribution [V] they were drawn from, in one piece so that they agree."""

    tokens: tuple[int, ...]
    q: Tensor


def draw(
    logits_V: Tensor,
    params: SamplingParams,
    history: History,
    *,
    stream: Stream,
    position: int,
    count: int = 1,
) -> Draw:
    """Draw ``count`` distinct tokens for ``position`` (without replacement, in order).

    Raises:
        NonFiniteLogits: as `distribution`.
    """
    q = distribution(logits_V, params, history)
    return Draw(tuple(stream.sample(q, position=position, count=count)), q)


class Subset:
    """A part of the vocabulary, for drafters that score fewer tokens than the target has.

    Attributes:
        ids: int64 [W] the target's ids, by the drafter's.
        size: of the target's vocabulary.
    """

    def __init__(self, ids: Sequence[int], *, size: int) -> None:
        self.ids: npt.NDArray[np.int64] = np.array(ids, dtype=np.int64)
        self.size = size

    def widen(self, logits_W: Tensor) -> Tensor:
        """The row [V] in which all other tokens are impossible."""
        row = torch.full((self.size,), -math.inf)
        row[torch.from_numpy(self.ids)] = logits_W.detach().to("cpu", torch.float32)
        return row


def is_bare(params: SamplingParams, history: History) -> bool:
    """Is the distribution the softmax of the logits over the temperature, with nothing else?"""
    cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return not (cut and params.temperature > 0) and not _names_tokens(params, history)


def _names_tokens(params: SamplingParams, history: History) -> bool:
    """Do the request's rules speak of certain tokens?"""
    return bool(
        params.logit_bias
        or params.bad_words
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or history.grammar is not None
        or history.output_length() < params.min_tokens
    )


@dataclass(frozen=True)
class Candidates:
    """Likely next tokens, best first, with the drafter's probability of each. Never a `q`."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]


def candidates(
    logits_V: Tensor,
    params: SamplingParams,
    history: History,
    *,
    stream: Stream,
    position: int,
    count: int,
    subset: Subset | None = None,
) -> Candidates:
    """The ``count`` best guesses as a function of context and noise, for the children of a node.

    At temperature 0 these are the likeliest tokens, with their probabilities at temperature 1.
    Above it they are the tokens that arrive first under the noise of ``stream``: with the target's
    own noise they are what the target would pick if it had the drafter's probabilities. They carry
    no `q`: verify them as chosen, not as drawn.

    Args:
        subset: whose ids the row's entries are, where it does not cover the vocabulary.

    Raises:
        NonFiniteLogits: as `distribution`.
    """
    if subset is not None and _names_tokens(params, history):
        logits_V, subset = subset.widen(logits_V), None
    if params.temperature == 0:
        adjusted, top = _adjusted(logits_V, params, history)
        weights = _weights(adjusted, peak=float(adjusted[top]), temperature=1.0)
        places, mass = _largest(adjusted, count), float(weights.sum())
        chances = tuple(float(weights[place]) / mass for place in places)
    else:
        probs = distribution(logits_V, params, history)
        ids = None if subset is None else subset.ids
        places = stream.sample(probs, position=position, count=count, ids=ids)
        chances = tuple(float(probs[place]) for place in places)
    if subset is not None:
        places = subset.ids[places].tolist()
    return Candidates(tuple(places), chances)


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of an emitted token and of the likeliest tokens, target's own."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs(logits_V: Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities under the plain softmax of a row, before any transform."""
    row = _host(logits_V)
    peak = float(row.max())
    row = row - (peak + math.log(_weights(row, peak=peak, temperature=1.0).sum()))
    top = tuple((t, float(row[t])) for t in _largest(row, count))
    return TokenLogprobs(float(row[token]), top)


def margin(
    logits_V: Tensor,
    params: SamplingParams,
    history: History,
    *,
    noise: Noise,
    position: int,
    tokens: tuple[int, int],
) -> float | None:
    """How close the choice between two tokens was, for judging near-ties.

    At temperature 0 the gap of their logits after all transforms; above it the gap of their scores
    log p + Gumbel noise, whose larger one wins the draw.

    Returns:
        The gap, at least 0; `None` where a truncation leaves one of them no probability.
    """
    if params.temperature == 0:
        adjusted, _ = _adjusted(logits_V, params, history)
        return abs(float(adjusted[tokens[0]]) - float(adjusted[tokens[1]]))
    probs = distribution(logits_V, params, history)
    weights = [float(probs[token]) for token in tokens]
    if min(weights) == 0:
        return None
    uniform = noise.uniform(np.array(tokens), position=position, purpose=Purpose.TOKEN)
    first, second = (
        math.log(weight) - math.log(-math.log(u))
        for weight, u in zip(weights, uniform, strict=True)
    )
    return abs(first - second)
