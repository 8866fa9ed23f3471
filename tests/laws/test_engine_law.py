"""L2: the law of whole outputs through the running engine, with a real transformer and its cache.

Thousands of short requests share a prompt; the joint law of their tokens is compared with the exact
product of the target's distributions by chi-square, at a false-alarm level of 1e-6 per case. With
63 degrees of freedom and 3,000 requests, a total-variation error of 0.10 is found with power 0.99
(N = lambda / (4 TV^2), lambda = 122). The laws themselves are proved exactly by enumeration; this
test is about everything around them. Plain decoding is the null case; a sabotaged rule must fail
(cache faults show in the golden tests, whose target makes any wrong row visible).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.core import verify
from outrider.core.noise import Purpose, Source
from outrider.core.sampling import History, SamplingParams, distribution
from outrider.core.tree import DraftTree
from outrider.core.verify import Rows, Verdict
from outrider.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from outrider.engine import Engine, EngineConfig, FixedBudget
from outrider.models.target import Segment
from outrider.models.tiny import tiny_config
from outrider.models.transformer import Transformer

VOCAB = 4
LENGTH = 3
REQUESTS = 3_000
ALPHA = 1e-6
PROMPT = [1, 3, 0, 2, 2]
SLOTS = 32
PARAMS = SamplingParams(temperature=0.8, top_p=0.97, presence_penalty=0.3, max_tokens=LENGTH)


@pytest.fixture(scope="module")
def target() -> Transformer:
    config = replace(tiny_config("llama"), vocab_size=VOCAB)
    return Transformer.random(config, seed=11)


@pytest.fixture(scope="module")
def exact(target: Transformer) -> dict[tuple[int, ...], float]:
    """The probability of every output of LENGTH tokens, teacher-forced without the engine."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in law.items():
            row = _logits(target, [*PROMPT, *tokens])
            p = distribution(row, PARAMS, History(PROMPT, tokens))
            for token in range(VOCAB):
                longer[*tokens, token] = probability * float(p[token])
        law = longer
    assert math.isclose(sum(law.values()), 1.0, rel_tol=1e-5)
    return law


def _logits(target: Transformer, tokens: list[int]) -> torch.Tensor:
    cache = target.new_cache(slots=1, length=len(tokens))
    segment = Segment(0, tuple(tokens[:-1]), DraftTree.root_only(tokens[-1]))
    return target.forward([segment], cache).logits[0][0]


def outputs(target: Transformer, *, rule: str, branching: int | None) -> Counter[tuple[int, ...]]:
    """The outputs of REQUESTS requests, SLOTS at a time."""
    drafters = {}
    if branching is not None:
        config = DraftModelConfig(branching=branching, sequences=SLOTS)
        drafters["d"] = DraftModelDrafter(target.first_layers(1), config)
    engine = Engine(
        target,
        drafters=drafters,
        config=EngineConfig(slots=SLOTS, context=16, rule=rule),
        budget=FixedBudget(4, 2),
    )
    name = "none" if branching is None else "d"
    requests = [
        engine.add(PROMPT, replace(PARAMS, seed=seed), drafter=name) for seed in range(REQUESTS)
    ]
    while engine.has_work:
        engine.step()
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = rejected = 0
    for request in requests:
        result = engine.take(request)
        seen[result.tokens] += 1
        accepted += sum(s.accepted for s in result.steps)
        rejected += sum(s.accepted < s.proposed_depth for s in result.steps)
    if branching is not None:
        assert accepted > 0 and rejected > 0
    return seen


def p_value(seen: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Chi-square, cells with an expectation below 5 pooled."""
    cells = list(itertools.product(range(VOCAB), repeat=LENGTH))
    expected = np.array([exact[c] for c in cells]) * sum(seen.values())
    observed = np.array([seen[c] for c in cells], dtype=float)
    if observed[expected == 0].any():
        return 0.0
    small = expected < 5
    expected = np.append(expected[~small], expected[small].sum())
    observed = np.append(observed[~small], observed[small].sum())
    keep = expected > 0
    expected, observed = expected[keep], observed[keep]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1))


@pytest.mark.parametrize(
    ("rule", "branching"),
    [("walk", None), ("walk", 2), ("reject", 1), ("block", 1)],
)
def test_the_output_law_is_the_targets(
    target: Transformer,
    exact: dict[tuple[int, ...], float],
    rule: str,
    branching: int | None,
) -> None:
    assert p_value(outputs(target, rule=rule, branching=branching), exact) > ALPHA


def ignores_the_residual(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """Sabotage: after a rejection, draws from p itself instead of the residual."""
    verdict = verify.reject(tree, p, source, start=start)
    node = verdict.path[-1] if verdict.path else 0
    position = start + len(verdict.path)
    [token] = source.sample(p(node), position=position, purpose=Purpose.TOKEN)
    return Verdict(verdict.path, token)


def test_a_sabotaged_rule_fails(
    target: Transformer, exact: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(verify.RULES, "reject", ignores_the_residual)
    assert p_value(outputs(target, rule="reject", branching=1), exact) < ALPHA
