"""Same tokens with trained heads as without: every kind, chain and tree, one and four at a time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from heads_fakes import tiny_target, trained_head
from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Drafter
from outrider.drafters.growth import TreeShape
from outrider.drafters.heads import make_drafter
from outrider.drafters.hybrid import HybridDrafter, Member
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Completion, Engine, EngineConfig, FixedBudget
from outrider.kernels import native

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason="no native kernels here")

HEADS = ("medusa", "eagle", "eagle-chain", "eagle3", "eagle3-chain", "eagle3.1")
DRAFTERS = (*HEADS, "hybrid")
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "hot": {"temperature": 1.0, "top_p": 0.95},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
}
TOKENS = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def build(name: str, folder: Path) -> Drafter:
    kind = "eagle3" if name == "hybrid" else name.removesuffix("-chain")
    shape = TreeShape(1, 1) if name.endswith("-chain") else TreeShape(3, 2)
    head = make_drafter(
        trained_head(kind, folder),
        tiny_target("native"),
        source=None,
        shape=shape,
        sequences=4,
        length=96,
    )
    if name != "hybrid":
        return head
    return HybridDrafter([Member(SuffixDrafter()), Member(head, cost=0.05)])


def run(drafter: Drafter | None, sampling: str, *, slots: int, rule: str) -> list[Completion]:
    engine = Engine(
        tiny_target("native"),
        drafters={} if drafter is None else {"head": drafter},
        config=EngineConfig(slots=slots, context=96, prefill_chunk=5, rule=rule),
        budget=FixedBudget(8, 4),
    )
    draw = random.Random(7)
    requests = []
    for seed in range(6):
        prompt = [draw.randrange(97) for _ in range(draw.randrange(2, 14))]
        params = SamplingParams(max_tokens=TOKENS, seed=seed, **SAMPLING[sampling])  # type: ignore[arg-type]
        requests.append(engine.add(prompt, params, drafter="none" if drafter is None else "head"))
    while engine.has_work:
        engine.step()
    return [engine.take(request) for request in requests]


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", DRAFTERS)
def test_same_tokens(name: str, sampling: str, slots: int, folder: Path) -> None:
    plain = run(None, sampling, slots=1, rule="walk")
    guessed = run(build(name, folder), sampling, slots=slots, rule="walk")
    assert [a.tokens for a in guessed] == [a.tokens for a in plain]
    steps = [step for answer in guessed for step in answer.steps if step.proposed]
    accepted = sum(step.accepted for step in steps)
    assert 0 < accepted < sum(step.proposed for step in steps)
    assert sum(step.emitted for step in steps) > len(steps)


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_other_rules_run_with_a_chain_that_carries_q(rule: str, folder: Path) -> None:
    answers = run(build("eagle3-chain", folder), "hot", slots=4, rule=rule)
    steps = [step for answer in answers for step in answer.steps if step.proposed]
    assert not any(step.reason for step in steps)
    assert 0 < sum(step.accepted for step in steps) < sum(step.proposed for step in steps)


def test_greedy_reject_equals_plain(folder: Path) -> None:
    plain = run(None, "greedy", slots=1, rule="walk")
    guessed = run(build("eagle3-chain", folder), "greedy", slots=1, rule="reject")
    assert [a.tokens for a in guessed] == [a.tokens for a in plain]
