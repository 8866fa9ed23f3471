"""A certificate of our own server over HTTP: tokens go back and forth as ids, never as text.

The model writes any byte, so most of its tokens are no text by themselves: a context that is put
together from their names is not the context that they came in.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from outrider.backends.base import Answer, Ask
from outrider.backends.connect import connect
from outrider.backends.openai import OpenAIBackend
from outrider.core.law import Setting
from outrider.core.sampling import SamplingParams
from outrider.evaluate import certify_remote as remote
from outrider.evaluate.certify_plan import CertifyPlan
from outrider.serve import plan as server_plan
from outrider.testing.fakes import ByteTokenizer, TableTarget
from outrider.testing.serving import FakeModel, fake_service, running_server

PLAN = CertifyPlan(
    requests=64,
    settings=(Setting("cool", 0.5), Setting("wide", 1.0)),
    prompts=("abcabcab", "aabbaabb"),
    greedy_tokens=12,
    greedy_prompts=("abcabcab", "x"),
)
Result = TypeVar("Result")


def any_bytes() -> FakeModel:
    """A model that knows all bytes and no text."""
    target = TableTarget(
        vocab_size=ByteTokenizer.vocab_size,
        sharpness=3.0,
        ripple=0.0,
        end_tokens=ByteTokenizer.end_tokens,
        name="fake",
    )
    return FakeModel(target)


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come without a seed, as most users ask; here the server's own are known."""
    numbers = itertools.count(1)
    monkeypatch.setattr(server_plan, "fresh_seed", lambda: next(numbers))


def certified(test: Callable[[remote.Side], Awaitable[Result]]) -> Result:
    """Run a test against a real server with a speculative default profile."""

    async def run(url: str) -> Result:
        backend = await connect(url)
        try:
            return await test(await remote.introduce(backend))
        finally:
            await backend.close()

    with running_server(fake_service(model=any_bytes())) as url:
        return asyncio.run(run(url))


def failing(evidence: remote.RemoteEvidence) -> list[str]:
    return [test.name for test in evidence.tests(PLAN.alpha) if not test.passed]


def test_our_server_passes_with_every_token_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []
    answer = OpenAIBackend.answer

    async def recorded(self: OpenAIBackend, ask: Ask) -> Answer:
        asked.append(ask)
        return await answer(self, ask)

    async def test(side: remote.Side) -> list[remote.RemoteEvidence]:
        assert side.by_id and side.certain
        monkeypatch.setattr(OpenAIBackend, "answer", recorded)
        return await remote.sample_remote(side, PLAN)

    for found in certified(test):
        assert failing(found) == [] and found.null.test().passed
        assert found.requests == PLAN.requests and not found.failed and not found.refused
        assert found.accepted and found.drafted and found.drafted > found.accepted
        assert found.undecided == 0  # every context is known, whatever its bytes
        assert found.tallies[remote.LATER].tokens == PLAN.requests * (PLAN.length - 1)
    assert asked and all(isinstance(ask.prompt, tuple) for ask in asked)
    continued = {ask.prompt for ask in asked if ask.max_tokens == 1}
    assert any(token > 127 for prompt in continued for token in prompt if isinstance(token, int))


def test_names_instead_of_ids_would_leave_contexts_undecided() -> None:
    async def test(side: remote.Side) -> list[remote.RemoteEvidence]:
        named = replace(side, by_id=False)
        return await remote.sample_remote(named, replace(PLAN, requests=16))

    assert all(found.undecided > 0 for found in certified(test))


def test_a_server_that_samples_otherwise_than_it_says_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer answers are sampled hotter than asked; single tokens, the reference, are not."""
    true = server_plan.sampling

    def hot(request: Any, room: Any, **more: Any) -> SamplingParams:
        params = true(request, room, **more)
        return params if params.max_tokens == 1 else replace(params, temperature=2.0)

    async def test(side: remote.Side) -> list[remote.RemoteEvidence]:
        return await remote.sample_remote(side, PLAN)

    monkeypatch.setattr(server_plan, "sampling", hot)
    for found in certified(test):
        assert failing(found) and found.null.test().passed


def test_the_sabotage_run_fails_and_greedy_answers_agree() -> None:
    async def test(side: remote.Side) -> tuple[remote.RemoteEvidence, list[remote.GreedyRow]]:
        broken = await remote.sabotage_remote(side, PLAN, requests=PLAN.requests)
        return broken, await remote.greedy_remote(side, PLAN)

    broken, rows = certified(test)
    assert failing(broken)
    assert [(row.tokens, row.position) for row in rows] == [(12, None), (12, None)]
