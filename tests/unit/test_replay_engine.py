"""A replay is the engine's own run: what drafters see, what is accepted, what a step would cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from torch import Tensor, equal

from heads_fakes import draft_tokens, head_config, random_head, tiny_target
from outrider.core.sampling import SamplingParams, Subset
from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Drafter, Needs, NodeBudget, SequenceView
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.hybrid import HybridDrafter, Member
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoneDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import CostTable, Engine, EngineConfig, FixedBudget
from outrider.engine.budget import Budget, CostBudget, DraftCost
from outrider.errors import DrafterMismatch, InvalidParameter
from outrider.evaluate.replay import (
    BudgetPlan,
    GivenDraftTimes,
    Replay,
    Side,
    accepted_path,
    by_position,
    predict,
)
from outrider.evaluate.trace import TracedRequest, TraceFacts
from outrider.models.heads.eagle import EagleModel
from outrider.models.target import Target
from outrider.records.request import is_verify_step
from outrider.records.step import StepRecord
from outrider.testing.fakes import TableTarget
from outrider.train.features import FeatureStore, compute_features

CHUNK, CONTEXT = 8, 128
COSTS = {1: 10.0, 4: 11.0, 16: 14.0, 32: 20.0}
TINY = tiny_target("native")
PROMPTS = [[(i * 7 + j * 3 + j * j) % 12 for j in range(4 + 9 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, seed=1)
WARM = SamplingParams(temperature=1, max_tokens=40, seed=7)
PENALISED = SamplingParams(
    temperature=0.9, top_k=8, repetition_penalty=1.2, stop_token_ids=(4,), max_tokens=40, seed=3
)


def table() -> TableTarget:
    return TableTarget(vocab_size=12, seed=3, ripple=0.05, context_length=CONTEXT)


def eagle() -> EagleDrafter:
    config = head_config("eagle3")
    return EagleDrafter(
        EagleModel(config, random_head(config), TINY, None),
        subset=Subset(draft_tokens().tolist(), size=TINY.vocab_size),
        sequences=1,
        length=CONTEXT,
    )


@dataclass
class Spy:
    """A drafter that writes down all that another one is told, asked and answers."""

    drafter: Drafter
    log: list[tuple[object, ...]] = field(default_factory=list)
    features: list[Tensor | None] = field(default_factory=list)
    name: str = "spied"

    @property
    def needs(self) -> Needs:
        return self.drafter.needs

    def observe(self, commits: Sequence[Commit]) -> None:
        for c in commits:
            self.log.append(("observe", c.sequence, c.tokens, c.tenant, c.features_from))
            self.features.append(c.features)
        self.drafter.observe(commits)

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        trees = self.drafter.propose(views, budgets)
        for v, budget, tree in zip(views, budgets, trees, strict=True):
            seen = (v.id, tuple(v.tokens), v.prompt_length, v.params, v.ends, v.stream, v.tenant)
            self.log.append(("propose", *seen, budget, tree.tokens, tree.parents))
        return trees

    def forget(self, sequences: Sequence[int]) -> None:
        self.log.append(("forget", tuple(sequences)))
        self.drafter.forget(sequences)


def engine_run(
    target: Target, drafter: Drafter, params: SamplingParams, budget: Budget, tenant: str = ""
) -> tuple[list[TracedRequest], list[tuple[StepRecord, ...]]]:
    """What really happens, one request after the other."""
    engine = Engine(
        target,
        drafters={"it": drafter},
        config=EngineConfig(slots=1, context=CONTEXT, prefill_chunk=CHUNK, reuse_prefix=False),
        budget=budget,
    )
    requests, runs = [], []
    for number, prompt in enumerate(PROMPTS):
        id = engine.add(prompt, params, drafter="it", tenant=tenant)
        while engine.has_work:
            engine.step()
        done = engine.take(id)
        assert done.error is None
        traced = TracedRequest(str(number), "w", tenant, done.prompt, done.tokens, params)
        requests.append(traced)
        runs.append(done.steps)
    return requests, runs


def facts(target: Target) -> TraceFacts:
    return TraceFacts(target.vocab_size, target.end_tokens, CONTEXT, CHUNK, COSTS, 0.5)


def features_of(target: Target) -> Callable[[TracedRequest, tuple[int, ...]], Tensor]:
    def features(request: TracedRequest, layers: tuple[int, ...]) -> Tensor:
        return compute_features(target, [[*request.prompt, *request.tokens]], layers)[0]

    return features


def replayed(
    target: Target,
    drafter: Drafter,
    requests: Sequence[TracedRequest],
    plan: BudgetPlan,
    *,
    kind: type[Replay] = Replay,
    draft: DraftCost | None = None,
) -> list[tuple[StepRecord, ...]]:
    side = Side("it", drafter, plan, draft)
    replay = kind(side, facts(target), costs=CostTable(dict(COSTS)), features=features_of(target))
    return [replay.run(request) for request in requests]


def outcome(runs: Sequence[Sequence[StepRecord]]) -> list[tuple[object, ...]]:
    """All that a step record says but times and names."""
    return [
        (
            *(s.request, s.proposed, s.proposed_depth, s.offered),
            *(min(s.accepted, s.emitted), s.emitted, s.rows, s.reason),
        )
        for steps in runs
        for s in steps
    ]


def same_features(a: Spy, b: Spy) -> bool:
    pairs = zip(a.features, b.features, strict=True)
    return all(x is y or (x is not None and y is not None and equal(x, y)) for x, y in pairs)


def hybrid() -> Drafter:
    return HybridDrafter([Member(SuffixDrafter()), Member(NgramDrafter())])


SIDES: dict[str, tuple[Callable[[], Target], Callable[[], Drafter]]] = {
    "none": (table, NoneDrafter),
    "ngram": (table, NgramDrafter),
    "suffix": (table, SuffixDrafter),
    "hybrid": (table, hybrid),
    "eagle": (lambda: TINY, eagle),
    "suffix+eagle": (
        lambda: TINY,
        lambda: HybridDrafter([Member(SuffixDrafter()), Member(eagle(), cost=0.1)]),
    ),
}
PARAMS = {"greedy": GREEDY, "warm": WARM, "penalised": PENALISED}


@pytest.mark.parametrize("sampling", PARAMS)
@pytest.mark.parametrize("name", SIDES)
def test_drafters_see_and_do_what_they_do_in_the_engine(name: str, sampling: str) -> None:
    """Every commit, view, budget and tree, the hidden states, and every step's outcome."""
    make_target, make = SIDES[name]
    target, params = make_target(), PARAMS[sampling]
    script, _ = engine_run(target, NoneDrafter(), params, FixedBudget(0, 0))
    there, here = Spy(make()), Spy(make())
    requests, runs = engine_run(target, there, params, FixedBudget(10, 4))
    assert [r.tokens for r in requests] == [r.tokens for r in script]
    found = replayed(target, here, script, BudgetPlan(10, 4))
    assert outcome(found) == outcome(runs)
    assert here.log == there.log and same_features(here, there)


@pytest.mark.parametrize("name", ["suffix", "eagle"])
def test_guesses_are_made_accepted_and_rejected_there(name: str) -> None:
    """Or the test above would show nothing."""
    make_target, make = SIDES[name]
    requests, runs = engine_run(make_target(), make(), WARM, FixedBudget(10, 4))
    steps = [step for run in runs for step in run]
    assert sum(s.accepted for s in steps) > 5
    assert any(s.proposed > s.accepted for s in steps)
    assert any(s.reason == "prefill" for s in steps)
    assert requests


@pytest.mark.parametrize("name", ["suffix", "eagle"])
def test_the_engines_own_budget_decides_the_same(name: str) -> None:
    """With given times, the budget by cost is a function of the trace alone."""
    make_target, make = SIDES[name]
    target, draft = make_target(), DraftCost(0.1, 0.4)

    class Frozen(GivenDraftTimes):
        def passed(self, rows: int, *, verify_ms: float, host_ms: float) -> None:
            return  # a replay's costs stand still

    budget = Frozen(CostBudget(CostTable(dict(COSTS)), nodes=31, depth=31), draft)
    requests, runs = engine_run(target, make(), WARM, budget)
    found = replayed(target, make(), requests, BudgetPlan(), draft=draft)
    assert outcome(found) == outcome(runs)
    assert len({s.proposed for run in found for s in run}) > 2


class LateTokens(Replay):
    """Planted: drafters observe one token less than was committed."""

    def _tell(self, commit: Commit) -> float:
        return super()._tell(replace(commit, tokens=commit.tokens[:-1]))


class LateFeatures(Replay):
    """Planted: hidden states are those of one position earlier."""

    def _tell(self, commit: Commit) -> float:
        rows = commit.features
        return super()._tell(commit if rows is None else replace(commit, features=rows.roll(1, 0)))


@pytest.mark.parametrize(
    ("name", "kind"), [("suffix", LateTokens), ("eagle", LateTokens), ("eagle", LateFeatures)]
)
def test_the_comparison_sees_an_observation_that_is_off_by_one(
    name: str, kind: type[Replay]
) -> None:
    make_target, make = SIDES[name]
    target, there, here = make_target(), Spy(make()), Spy(make())
    requests, runs = engine_run(target, there, WARM, FixedBudget(10, 4))
    found = replayed(target, here, requests, BudgetPlan(10, 4), kind=kind)
    assert outcome(found) != outcome(runs)
    assert here.log != there.log or not same_features(here, there)
    if kind is LateTokens:  # nothing is guessed any more
        assert sum(s.accepted for run in found for s in run) == 0


def test_stored_states_predict_within_three_percent(tmp_path: Path) -> None:
    """bf16 rounds hidden states; what is accepted hardly changes."""
    requests, runs = engine_run(TINY, eagle(), WARM, FixedBudget(10, 4))
    layers = eagle().needs.layers
    store = FeatureStore(tmp_path, features=layers, width=TINY.config.width)
    for request in requests:
        store.add(request.id, features_of(TINY)(request, layers))
    side = Side("eagle", eagle(), BudgetPlan(10, 4))
    found = predict(
        requests,
        side,
        facts(TINY),
        costs=CostTable(dict(COSTS)),
        features=lambda request, layers: store.get(request.id).float(),
    )
    steps = [step for run in runs for step in run if is_verify_step(step)]
    real = sum(step.emitted for step in steps) / len(steps)
    assert found.acceptance_length == pytest.approx(real, rel=0.03)
    assert found.acceptance_length > 1.05


def test_a_prediction_is_the_sum_of_its_steps() -> None:
    """Given times and a table: every number can be worked out by hand."""
    target = table()
    requests, runs = engine_run(target, SuffixDrafter(), GREEDY, FixedBudget(6, 6))
    side = Side("suffix", SuffixDrafter(), BudgetPlan(6, 6), DraftCost(0.25, 0.5))
    costs = CostTable(dict(COSTS), host_ms=0.5)
    found = predict(requests, side, facts(target), costs=costs)
    steps = [[s for s in run if is_verify_step(s)] for run in runs]
    flat = [step for run in steps for step in run]
    assert found.steps == len(flat) and found.tokens == sum(len(r.tokens) for r in requests)
    assert found.acceptance_length == pytest.approx(
        1 + sum(min(s.accepted, s.emitted) for s in flat) / len(flat)
    )
    assert found.by_position == by_position(flat) and len(found.by_position) == 6
    late = [step for run in steps for step in run[1:]]
    spent = sum(
        costs.verify(s.rows) + 0.5 + (0.25 + 0.5 * s.proposed_depth if s.proposed else 0.0)
        for s in late
    )
    assert found.tpot_ms == pytest.approx(spent / sum(s.emitted for s in late))
    assert found.speedup == pytest.approx(10.5 / found.tpot_ms)
    plain = predict(requests, Side("none", NoneDrafter(), BudgetPlan()), facts(target), costs=costs)
    assert plain.acceptance_length == 1 and plain.speedup == pytest.approx(1)
    assert plain.tpot_ms == pytest.approx(10.5) and plain.by_position == ()


def test_stores_follow_the_tenants_of_the_trace() -> None:
    """Requests of one tenant find each other's answers, as in the engine; no others do."""
    target = table()
    requests, _ = engine_run(target, NoneDrafter(), GREEDY, FixedBudget(0, 0))
    twice = [*requests, *requests]
    apart = [replace(r, tenant=str(i)) for i, r in enumerate(twice)]
    plan, costs = BudgetPlan(8, 8), CostTable(dict(COSTS))
    together = predict(twice, Side("s", SuffixDrafter(), plan), facts(target), costs=costs)
    alone = predict(apart, Side("s", SuffixDrafter(), plan), facts(target), costs=costs)
    assert together.acceptance_length > alone.acceptance_length * 1.05


def test_a_drafter_that_fails_is_no_prediction() -> None:
    class Broken(NoneDrafter):
        def propose(
            self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
        ) -> list[DraftTree]:
            raise ValueError("out of luck")

    requests, _ = engine_run(table(), NoneDrafter(), GREEDY, FixedBudget(0, 0))
    with pytest.raises(DrafterMismatch, match="out of luck"):
        replayed(table(), Broken(), requests, BudgetPlan(4, 4))


def test_a_head_without_hidden_states_is_refused() -> None:
    requests, _ = engine_run(TINY, NoneDrafter(), GREEDY, FixedBudget(0, 0))
    side = Side("eagle", eagle(), BudgetPlan(4, 4))
    with pytest.raises(DrafterMismatch, match="--features"):
        predict(requests, side, facts(TINY), costs=CostTable(dict(COSTS)))
    with pytest.raises(DrafterMismatch, match="rows"):
        predict(
            requests,
            side,
            facts(TINY),
            costs=CostTable(dict(COSTS)),
            features=lambda request, layers: features_of(TINY)(request, layers)[:-1],
        )


def test_the_accepted_path_is_where_tree_and_script_agree() -> None:
    tree = DraftTree((1, 2, 3, 4, 5), (-1, 0, 0, 2, 3))
    assert accepted_path(tree, (9,)) == 0
    assert accepted_path(tree, (2, 4)) == 1
    assert accepted_path(tree, (3, 4, 5, 6)) == 3
    assert accepted_path(tree, (3, 4)) == 2
    assert accepted_path(tree, ()) == 0


@pytest.mark.parametrize(("nodes", "depth"), [(-1, 2), (2, -1), (None, 2), (2, None)])
def test_a_budget_of_half_or_less_is_refused(nodes: int | None, depth: int | None) -> None:
    with pytest.raises(InvalidParameter):
        BudgetPlan(nodes, depth)
