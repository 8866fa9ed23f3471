"""Same tokens for every drafter, tree, temperature, penalty and batch: `==`, on a known target.

The target's logits depend on every cached row, so a stale or misplaced row would show. Each case
also shows that speculation really ran: guesses were made, accepted and rejected.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Drafter
from outrider.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from outrider.drafters.hybrid import HybridDrafter, Member
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Completion, CostBudget, CostTable, Engine, EngineConfig, FixedBudget
from outrider.testing.fakes import TableTarget

VOCAB = 12
CONTEXT = 160
PROMPTS = [[(i * 7 + j * 3 + j * j) % VOCAB for j in range(4 + 9 * i)] for i in range(6)]


def target(ripple: float = 0.05) -> TableTarget:
    return TableTarget(vocab_size=VOCAB, seed=3, ripple=ripple, context_length=CONTEXT)


def draft_model(branching: int) -> DraftModelDrafter:
    return DraftModelDrafter(target(ripple=0.0), DraftModelConfig(branching, sequences=4))


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "draft_chain": lambda: draft_model(1),
    "draft_tree": lambda: draft_model(3),
    "hybrid": lambda: HybridDrafter([Member(SuffixDrafter()), Member(draft_model(1), cost=0.1)]),
}
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "hot": {"temperature": 1.0},
    "truncated": {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    "penalised": {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {3: 1.5, 5: -2.0},
        "bad_words": ((1, 2), (7,)),
        "min_tokens": 10,
        "stop_token_ids": (4,),
    },
}


def run(
    drafter: str, params: dict[str, object], *, slots: int, budget: FixedBudget | CostBudget
) -> list[Completion]:
    engine = Engine(
        target(),
        drafters={} if drafter == "none" else {drafter: DRAFTERS[drafter]()},
        config=EngineConfig(slots=slots, prefill_chunk=8),
        budget=budget,
    )
    requests = []
    for i, prompt in enumerate(PROMPTS):
        own = SamplingParams(max_tokens=60, seed=100 + i, logprobs=1, **params)  # type: ignore[arg-type]
        requests.append(engine.add(prompt, own, drafter=drafter))
    while engine.has_work:
        engine.step()
    return [engine.take(request) for request in requests]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Completion]]:
    """Plain decoding, one request at a time, prompt in one piece."""
    return {
        name: run("none", params, slots=1, budget=FixedBudget(0, 0))
        for name, params in SAMPLING.items()
    }


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_tokens_as_plain(
    plain: dict[str, list[Completion]], drafter: str, sampling: str, slots: int
) -> None:
    results = run(drafter, SAMPLING[sampling], slots=slots, budget=FixedBudget(7, 5))
    for expected, got in zip(plain[sampling], results, strict=True):
        assert got.tokens == expected.tokens
        assert got.finish_reason == expected.finish_reason
        assert got.logprobs == expected.logprobs
    steps = [step for result in results for step in result.steps]
    proposed, accepted = sum(s.proposed for s in steps), sum(s.accepted for s in steps)
    assert 0 < accepted < proposed
    assert len([s for s in steps if s.emitted]) < sum(len(r.tokens) for r in results)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_cost_budget_changes_no_token(plain: dict[str, list[Completion]], drafter: str) -> None:
    costs = CostTable({1: 10.0, 8: 11.0, 16: 30.0}, host_ms=0.5)
    results = run(drafter, SAMPLING["warm"], slots=4, budget=CostBudget(costs, nodes=12, depth=12))
    assert [r.tokens for r in results] == [r.tokens for r in plain["warm"]]
    assert sum(s.accepted for r in results for s in r.steps) > 0


def test_plain_decoding_matches_the_definition(plain: dict[str, list[Completion]]) -> None:
    """The engine's greedy output is the argmax of the target's own function, token by token."""
    exact = target()
    for completion in plain["greedy"]:
        tokens = list(completion.prompt)
        for token in completion.tokens:
            assert token == int(exact.exact(tokens).argmax())
            tokens.append(token)
