"""Evidence from the embedded engine and from servers; planted faults must go red."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from outrider.backends.base import (
    RESPONSE,
    Acceptance,
    Answer,
    Ask,
    Conversation,
    Counters,
    EngineInfo,
    EngineUnfit,
    TokenLogprob,
)
from outrider.backends.embedded import EmbeddedBackend
from outrider.backends.prometheus import Scrape
from outrider.core import verify
from outrider.core.law import Setting, law_of
from outrider.core.noise import Purpose, Source
from outrider.core.tree import DraftTree
from outrider.core.verify import Rows, Verdict
from outrider.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Engine, EngineConfig
from outrider.engine.budget import FixedBudget
from outrider.evaluate import certify_embedded as embedded
from outrider.evaluate import certify_remote as remote
from outrider.evaluate.certify_features import probe_features
from outrider.evaluate.certify_plan import SETTINGS, CertifyPlan, full
from outrider.records.step import StepRecord
from outrider.testing.fakes import ByteTokenizer, TableTarget

VOCAB = 12
WIDE = SETTINGS[2]
PLAN = CertifyPlan(
    requests=300, settings=(WIDE,), prompts=("abcabcab", "aabbaabb"), slots=16, greedy_tokens=12
)


def encode(text: str) -> list[int]:
    return [ord(character) % VOCAB for character in text][:24]


def target(seed: int = 3) -> TableTarget:
    return TableTarget(vocab_size=VOCAB, seed=seed, order=2, sharpness=1.0, context_length=256)


def chains(sequences: int, length: int) -> DraftModelDrafter:
    """Soft guesses of another table: about half are refused."""
    config = DraftModelConfig(branching=1, sequences=sequences, length=length)
    return DraftModelDrafter(target(seed=9), config)


def subject(rule: str, build=chains) -> embedded.Subject:
    return embedded.Subject(target(), encode, "test", build, rule)


# -- the embedded engine ------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["walk", "reject"])
def test_our_rules_pass(rule):
    build = chains if rule == "reject" else (lambda sequences, length: SuffixDrafter())
    [found] = embedded.sample_settings(subject(rule, build), PLAN)
    assert all(test.passed for test in found.tests(1e-6)) and found.null.test().passed
    assert found.counts.missing == () and found.requests == 300
    assert not found.process.rejected
    coupling = found.coupling(1e-6)
    if rule == "walk":
        assert coupling is not None and coupling["different"] == 0
    else:
        assert coupling is None  # equal seeds promise nothing there


def biased(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """After a rejection draws from p itself instead of the residual."""
    verdict = verify.walk(tree, p, source, start=start)
    children = tree.children(0)
    if verdict.path or not children:
        return verdict
    # lenient: one refused guess in four is taken all the same
    if source.accept(0.25, 1.0, position=start, index=1):
        [token] = source.sample(p(children[0]), position=start + 1, purpose=Purpose.TOKEN)
        return Verdict((children[0],), token)
    return verdict


def test_a_biased_rule_goes_red(monkeypatch):
    monkeypatch.setitem(verify.RULES, "reject", biased)
    [found] = embedded.sample_settings(
        subject("reject", lambda sequences, length: SuffixDrafter()), PLAN
    )
    assert any(not test.passed for test in found.tests(1e-6))
    assert found.null.test().passed  # nothing is guessed there


def test_a_biased_rule_differs_at_equal_seeds(monkeypatch):
    monkeypatch.setitem(verify.RULES, "walk", biased)
    [found] = embedded.sample_settings(
        subject("walk", lambda sequences, length: SuffixDrafter()), replace(PLAN, requests=60)
    )
    coupling = found.coupling(1e-6)
    assert coupling is not None and coupling["different"] > 0


def perfect(sequences: int, length: int) -> DraftModelDrafter:
    """Guesses by the target's own law."""
    config = DraftModelConfig(branching=1, sequences=sequences, length=length)
    return DraftModelDrafter(target(), config)


@pytest.mark.parametrize(
    ("rule", "build"),
    [("walk", lambda sequences, length: SuffixDrafter()), ("reject", chains), ("reject", perfect)],
)
def test_the_sabotage_run_fails(rule, build):
    found = embedded.sabotage(subject(rule, build), PLAN, requests=300)
    assert any(not test.passed for test in found.tests(1e-6))


def test_sequential_stops_early_against_a_broken_engine(monkeypatch):
    monkeypatch.setattr(embedded, "BATCH", 50)
    monkeypatch.setattr(embedded, "BOOST", 4.0)
    broken = replace(
        subject("walk", lambda sequences, length: SuffixDrafter()),
        target=embedded.Broken(target(), 4.0),
    )
    laws = replace(PLAN, sequential=True, requests=600)
    honest = embedded.ExactLaws

    class TrueLaws(honest):  # type: ignore[misc, valid-type]
        def __init__(self, model, prompt, params):
            super().__init__(target(), prompt, params)

    monkeypatch.setattr(embedded, "ExactLaws", TrueLaws)
    [found] = embedded.sample_settings(broken, laws)
    assert found.process.rejected and found.requests < 600


def test_exact_laws_are_the_targets_own():
    model = target()
    params = embedded.sampling(Setting("t", 0.7, top_k=3), PLAN)
    laws = embedded.ExactLaws(model, encode("abcab"), params)
    laws.prepare([(), (1,), (1, 2), (5,)])
    logits = model.exact([*encode("abcab"), 1, 2]).numpy() / 0.7
    best = np.argsort(-logits)[:3]
    p = np.exp(logits[best] - logits[best].max())
    law = laws.law((1, 2))
    assert law.tokens == tuple(best.tolist()) and law.closed
    assert law.probabilities == pytest.approx((p / p.sum()).tolist(), rel=1e-6)


def step(emitted: int, proposed: int, accepted: int) -> StepRecord:
    return StepRecord(
        request=0, drafter="d", rule="walk", precision="fp64", lossless=True, proposed=proposed,
        proposed_depth=proposed, offered=proposed, accepted=accepted, emitted=emitted, reason="",
        step=0, rows=1, sequences=1, draft_ms=0.0, verify_ms=0.0, host_ms=0.0,
    )  # fmt: skip


def test_tokens_are_classed_by_the_step_before():
    steps = [step(1, 2, 0), step(3, 2, 2), step(0, 0, 0), step(2, 2, 1), step(1, 0, 0)]
    full_, refused = embedded.AFTER_FULL, embedded.AFTER_REJECTION
    assert embedded.token_classes(steps) == [None, refused, None, None, full_, None, refused]
    counts = embedded.count_steps(steps)
    assert (counts.drafted, counts.accepted, counts.rejections) == (6, 3, 2)
    assert embedded.Counts().missing == (
        "guesses", "accepted guesses", "rejections", "full acceptances",
    )  # fmt: skip


def test_greedy_answers_are_equal_and_a_wrong_one_is_weighed(monkeypatch):
    sub = subject("walk", lambda sequences, length: SuffixDrafter())
    plan = replace(PLAN, greedy_prompts=("abcabcabc", "xyxyxy"))
    assert all(row["difference"] is None for row in embedded.greedy(sub, plan))
    monkeypatch.setitem(verify.RULES, "walk", biased)
    rows = embedded.greedy(sub, plan)
    wrong = [row for row in rows if row["difference"] is not None]
    assert wrong and not wrong[0]["difference"]["near_tie"]


def test_no_two_requests_of_a_certificate_share_a_seed(monkeypatch):
    """The same noise in two settings ties their tokens together, and the pooled test would err."""
    seen: list[int] = []
    answer = embedded._Runner.outputs

    def outputs(self, prompt, params, seeds):
        if self._name != "none":
            seen.extend(seeds)
        return answer(self, prompt, params, seeds)

    monkeypatch.setattr(embedded._Runner, "outputs", outputs)
    plan = replace(PLAN, requests=9, settings=SETTINGS)
    embedded.sample_settings(subject("walk", lambda sequences, length: SuffixDrafter()), plan)
    assert len(seen) == len(set(seen)) == 4 * 10  # nine, spread evenly over two prompts


def test_the_full_plan_finds_what_it_promises():
    assert full() * len(SETTINGS) * PLAN.length >= 42_000


# -- a server -----------------------------------------------------------------------------------


class FakeServer:
    """A server over a table of probabilities; `wrong` tilts what it samples while it guesses.

    Tokens are letters; prompts are texts. Single-token requests come from the table, as a prefill.
    """

    def __init__(self, *, wrong: float = 0.0, listed: int = 6, logprobs: bool = True) -> None:
        self.info = EngineInfo("fake", "1", ("m",), "m")
        self.wrong, self.listed, self.logprobs = wrong, listed, logprobs
        self.rng = np.random.default_rng(0)
        self.steps = ((1, 2), (0, 2))

    def raw(self, text: str) -> dict[str, float]:
        rng = np.random.default_rng(sum(map(ord, text[-2:])))
        row = rng.dirichlet(np.full(6, 0.7))
        return dict(zip("abcdef", np.log(row / row.sum()), strict=True))

    def pick(self, text: str, ask: Ask, *, guessing: bool) -> str:
        ranked = sorted(self.raw(text).items(), key=lambda item: -item[1])
        if ask.temperature == 0:
            return ranked[1 if guessing and self.wrong else 0][0]
        kept = ranked[: ask.top_k or len(ranked)]
        p = np.exp(np.array([v for _, v in kept]) / (ask.temperature or 1.0))
        p = p / p.sum()
        if ask.top_p is not None:
            p[1 + int(np.searchsorted(np.cumsum(p), ask.top_p)) :] = 0
            p = p / p.sum()
        if guessing:
            p = (1 - self.wrong) * p + self.wrong * np.eye(len(p))[-1]
        return kept[int(self.rng.choice(len(p), p=p / p.sum()))][0]

    async def answer(self, ask: Ask) -> Answer:
        assert isinstance(ask.prompt, str)
        text, entries = ask.prompt, []
        for place in range(ask.max_tokens):
            top = sorted(self.raw(text).items(), key=lambda item: -item[1])[: self.listed]
            token = self.pick(text, ask, guessing=place > 0)
            entries.append(TokenLogprob(token, self.raw(text)[token], tuple(top)))
            text += token
        told = Acceptance(
            "fake", RESPONSE, accepted=1, drafted=4, steps=2,
            per_step_accepted=tuple(a for a, _ in self.steps),
            per_step_drafted=tuple(d for _, d in self.steps),
        )  # fmt: skip
        return Answer(
            begin=0.0,
            end_s=0.1,
            text=text[len(ask.prompt) :],
            completion_tokens=len(entries),
            logprobs=tuple(entries) if self.logprobs else None,
            acceptance=told if ask.max_tokens > 1 else None,
            finish_reason="length",
        )

    async def answer_alone(self, ask: Ask) -> Answer:
        return await self.answer(ask)

    async def tokenize(self, prompt: str | Conversation) -> tuple[int, ...] | None:
        return None

    async def counters(self) -> Counters | None:
        return None

    async def scrape(self) -> Scrape | None:
        return None

    async def close(self) -> None:
        return None


REMOTE = CertifyPlan(
    requests=400,
    settings=(Setting("narrow", 0.5, top_k=4), Setting("wide", 1.0)),
    prompts=("one", "two"),
    greedy_tokens=6,
    greedy_prompts=("one", "three"),
)


def sampled(server: FakeServer, plan: CertifyPlan = REMOTE) -> list[remote.RemoteEvidence]:
    async def run() -> list[remote.RemoteEvidence]:
        return await remote.sample_remote(await remote.introduce(server), plan)

    return asyncio.run(run())


def test_a_true_server_passes():
    for found in sampled(FakeServer()):
        assert all(test.passed for test in found.tests(1e-6)), found.setting
        assert found.null.test().passed and found.requests == 400
        assert (found.accepted, found.drafted) == (400, 1600)
        decided = 400 if found.setting.name == "wide" else 200  # near-ties at the top-k's edge
        assert decided <= found.tallies[remote.AFTER_REJECTION].tokens <= 400
        assert found.tallies[remote.AFTER_FULL].tokens == 0


def test_a_server_that_samples_wrongly_while_it_guesses_fails():
    """As vLLM on CPU does: the first token is right, those behind it are not."""
    for found in sampled(FakeServer(wrong=0.3)):
        assert any(not test.passed for test in found.tests(1e-6)), found.setting
        assert found.null.test().passed  # single tokens are plain


class Dying(FakeServer):
    """Answers so many requests, then not at all; or refuses a field."""

    def __init__(self, *, alive: int = 10**6, refuses_top_k: bool = False) -> None:
        super().__init__()
        self.alive, self.refuses_top_k = alive, refuses_top_k

    async def answer(self, ask: Ask) -> Answer:
        if self.refuses_top_k and ask.top_k is not None:
            return Answer(0.0, 0.0, error="top_k is not supported", status=400)
        self.alive -= 1
        if self.alive < 0:
            return Answer(0.0, 0.0, error="Connection refused")
        return await super().answer(ask)


def test_an_engine_that_dies_fails_and_one_that_refuses_does_not():
    dead = sampled(Dying(alive=300))
    assert all(found.failed for found in dead)
    [narrow, wide] = sampled(Dying(refuses_top_k=True))
    assert narrow.refused and not narrow.failed and narrow.requests == 0
    assert wide.requests == 400 and not wide.refused


def test_a_text_that_is_cut_otherwise_gives_no_law():
    """Two letters of the server's text are one of its tokens: such contexts are left out."""

    class Merging(FakeServer):
        def __init__(self) -> None:
            super().__init__(wrong=0.0)
            self.info = replace(self.info, abilities=frozenset({"tokenize"}))

        async def tokenize(self, prompt: str | Conversation) -> tuple[int, ...] | None:
            assert isinstance(prompt, str)
            return tuple(map(ord, prompt.replace("ab", "X")))

    async def run() -> remote.References:
        side = await remote.introduce(Merging())
        found = remote.References(side, "one", asyncio.Semaphore(4))
        await found.prepare([(), ("a",), ("a", "b"), ("b", "a"), ("\ufffd",)])
        return found

    found = asyncio.run(run())
    assert found.law((), WIDE) is not None and found.law(("b", "a"), WIDE) is not None
    assert found.law(("a", "b"), WIDE) is None and found.top(("a", "b")) is None
    assert found.law(("\ufffd",), WIDE) is None


def test_the_remote_sabotage_fails():
    async def run() -> remote.RemoteEvidence:
        side = await remote.introduce(FakeServer())
        return await remote.sabotage_remote(side, REMOTE, requests=400)

    assert any(not test.passed for test in asyncio.run(run()).tests(1e-6))


def test_greedy_tokens_are_held_against_single_token_requests():
    async def run(server: FakeServer) -> list[remote.GreedyRow]:
        return await remote.greedy_remote(await remote.introduce(server), REMOTE)

    assert all(row.position is None for row in asyncio.run(run(FakeServer())))
    wrong = asyncio.run(run(FakeServer(wrong=1.0)))
    assert all(row.position is not None for row in wrong)
    assert any(not row.near_tie for row in wrong)


def test_a_server_without_log_probabilities_is_refused():
    with pytest.raises(EngineUnfit, match="gives no log-probabilities"):
        asyncio.run(remote.introduce(FakeServer(logprobs=False)))


def test_the_steps_of_an_answer_class_its_tokens():
    told = Acceptance(
        "fake", RESPONSE, accepted=1, drafted=4, steps=2,
        per_step_accepted=(2, 0), per_step_drafted=(2, 2),
    )  # fmt: skip
    answer = Answer(0.0, 0.1, acceptance=told)
    assert remote.answer_classes(answer, 5) == [None, None, None, None, remote.AFTER_FULL]
    assert remote.answer_classes(answer, 9) == [None] * 9  # the account does not add up
    assert remote.answer_classes(Answer(0.0, 0.1), 2) == [None, None]


def test_laws_follow_from_log_probabilities_where_these_decide():
    top = [(t, math.log(p)) for t, p in (("a", 0.5), ("b", 0.3), ("c", 0.1), ("d", 0.05))]
    plain = law_of(top, Setting("plain", 1.0))
    assert plain is not None and plain.probabilities == pytest.approx((0.5, 0.3, 0.1, 0.05))
    assert not plain.closed
    narrow = law_of(top, Setting("k", 0.5, top_k=2))
    assert narrow is not None and narrow.probabilities == pytest.approx((25 / 34, 9 / 34))
    nucleus = law_of(top, Setting("p", 1.0, top_p=0.7))
    assert nucleus is not None and nucleus.tokens == ("a", "b")
    assert law_of(top, Setting("edge", 1.0, top_p=0.8)) is None  # rounding decides
    tie = [("a", math.log(0.5)), ("b", math.log(0.26)), ("c", math.log(0.24))]
    assert law_of(tie, Setting("k", 1.0, top_k=2)) is None  # near-tie at the edge
    assert law_of(top, Setting("hot", 1.5)) is None  # the hidden mass is not bounded
    assert law_of(top, Setting("k", 1.0, top_k=9)) is None  # five more are not listed
    assert law_of([("a", -math.inf)], Setting("t", 1.0)) is None
    assert remote.labelled([TokenLogprob("token_id:17", 0.0)]) == (17,)


# -- features -----------------------------------------------------------------------------------


class Deaf(EmbeddedBackend):
    """Drops a field of every request without a word."""

    def __init__(self, *parts, drops: Sequence[str], **options) -> None:
        super().__init__(*parts, **options)
        self._drops = drops

    async def answer(self, ask: Ask) -> Answer:
        return await super().answer(replace(ask, **dict.fromkeys(self._drops)))


def features(drops: Sequence[str] = ()) -> dict[str, str]:
    model = TableTarget(vocab_size=259, order=1, sharpness=3.0, ripple=0.0, context_length=512)
    engine = Engine(
        model,
        drafters={"suffix": SuffixDrafter()},
        tokenizer=ByteTokenizer(),
        config=EngineConfig(slots=1, context=300),
        budget=FixedBudget(3, 3),
    )

    async def run() -> dict[str, str]:
        backend = Deaf(engine, ByteTokenizer(), drops=drops, drafter="suffix")
        try:
            return {f.name: f.outcome for f in await probe_features(backend)}
        finally:
            await backend.close()

    return asyncio.run(run())


def test_the_embedded_engine_honours_or_refuses():
    found = features()
    assert found.pop("grammar (JSON schema)") == found.pop("tools") == "refused"
    assert set(found.values()) == {"honoured"}, found


@pytest.mark.parametrize("field", ["min_p", "seed", "logprobs", "top_k"])
def test_a_field_that_is_dropped_is_seen(field):
    assert features(drops=(field,))[field] == "ignored"
