"""The engine's own duties: ends, cancels, faults, limits, reuse, and honest records."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Needs, NodeBudget, SequenceView
from outrider.drafters.ngram import NgramDrafter
from outrider.engine import Completion, Engine, EngineConfig, FixedBudget
from outrider.engine.drafting import AT_THE_END, NO_DRAFTER
from outrider.engine.memory import MemoryPlan
from outrider.errors import InvalidParameter, OutOfMemory
from outrider.models.cache import KVCache
from outrider.models.target import Forward, Segment
from outrider.testing.fakes import ByteTokenizer, TableTarget

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


class OracleDrafter:
    """Knows the greedy future of a table target, so that whole paths are accepted."""

    def __init__(self, target: TableTarget, *, layers: tuple[int, ...] = ()) -> None:
        self.name = "oracle"
        self.needs = Needs(layers)
        self.commits: list[Commit] = []
        self.forgotten: list[int] = []
        self._target = target

    def observe(self, commits: Sequence[Commit]) -> None:
        self.commits += commits

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        return [self._chain(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _chain(self, view: SequenceView, budget: NodeBudget) -> DraftTree:
        tokens = list(view.tokens)
        for _ in range(min(budget.nodes, budget.depth)):
            tokens.append(int(self._target.exact(tokens).argmax()))
        return DraftTree.chain(tokens[len(view.tokens) - 1 :])

    def forget(self, sequences: Sequence[int]) -> None:
        self.forgotten += sequences


def make(
    target: TableTarget | None = None,
    *,
    drafter: object | None = None,
    tokenizer: ByteTokenizer | None = None,
    nodes: int = 6,
    **config: int,
) -> Engine:
    target = target or TableTarget(context_length=200)
    return Engine(
        target,
        drafters={} if drafter is None else {"d": drafter},  # type: ignore[dict-item]
        tokenizer=tokenizer,
        config=EngineConfig(**config),  # type: ignore[arg-type]
        budget=FixedBudget(nodes, nodes),
    )


def finish(engine: Engine, *requests: int) -> list[Completion]:
    while engine.has_work:
        engine.step()
    return [engine.take(request) for request in requests]


def test_full_acceptance_saves_steps_and_counts_right() -> None:
    target = TableTarget(context_length=200)
    oracle = OracleDrafter(target)
    [result] = make(target, drafter=oracle).generate([[1, 2, 3]], GREEDY, drafter="d")
    [plain] = make(target).generate([[1, 2, 3]], GREEDY)
    assert result.tokens == plain.tokens
    verify = [s for s in result.steps if s.emitted]
    assert [s.emitted for s in verify] == [7, 7, 7, 3]
    assert all(s.accepted == s.proposed for s in verify)
    assert sum(s.emitted for s in verify) == 24
    assert oracle.forgotten == [result.request]


def test_end_token_inside_an_accepted_path_ends_the_output_there() -> None:
    target = TableTarget(context_length=200)
    [free] = make(target).generate([[1, 2, 3]], GREEDY)
    end = free.tokens[9]
    first = free.tokens.index(end)
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(end,))
    [result] = make(target, drafter=OracleDrafter(target)).generate(
        [[1, 2, 3]], params, drafter="d"
    )
    assert result.tokens == free.tokens[: first + 1]
    assert result.finish_reason == "stop"


def test_ignore_eos_and_min_tokens() -> None:
    [free] = make(TableTarget(context_length=200)).generate([[1, 2, 3]], GREEDY)
    target = TableTarget(context_length=200, end_tokens=frozenset({free.tokens[4]}))
    [stopped] = make(target).generate([[1, 2, 3]], GREEDY)
    assert stopped.finish_reason == "stop" and len(stopped.tokens) <= 5
    ignoring = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    [ignored] = make(target).generate([[1, 2, 3]], ignoring)
    assert ignored.tokens == free.tokens
    at_least = SamplingParams(temperature=0.0, max_tokens=24, min_tokens=12)
    for drafter in (None, OracleDrafter(target), NgramDrafter()):
        name = "none" if drafter is None else "d"
        [held] = make(target, drafter=drafter).generate([[1, 2, 3]], at_least, drafter=name)
        assert len(held.tokens) >= 12 and not set(held.tokens[:11]) & target.end_tokens


@pytest.mark.parametrize("nodes", [0, 6])
def test_stop_string_cuts_text_and_streams_nothing_beyond_it(nodes: int) -> None:
    target = TableTarget(vocab_size=259, order=1, seed=5, context_length=300)
    tokenizer = ByteTokenizer()
    ascii_only = {i: -1e9 for i in range(259) if not 32 <= i < 127}
    base = {"temperature": 0.0, "max_tokens": 40, "logit_bias": ascii_only}
    oracle = OracleDrafter(target)
    [free] = make(target, tokenizer=tokenizer).generate([[65]], SamplingParams(**base))  # type: ignore[arg-type]
    stop = free.text[7:10]
    params = SamplingParams(**base, stop=(stop, "never there"))  # type: ignore[arg-type]
    engine = make(target, drafter=oracle, tokenizer=tokenizer, nodes=nodes)
    pieces = [u.text for u in engine.stream([65], params, drafter="d")]
    [result] = make(target, tokenizer=tokenizer).generate([[65]], params)
    assert result.text == free.text[: free.text.index(stop)] == "".join(pieces)
    assert result.finish_reason == "stop"


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="without a tokenizer"):
        make().add([1], SamplingParams(stop=("x",), max_tokens=5))


def test_cancel_touches_no_neighbour() -> None:
    engine = make(drafter=NgramDrafter(), slots=3)
    keep = engine.add([1, 2, 3], GREEDY, drafter="d")
    drop = engine.add([4, 5, 6], GREEDY, drafter="d")
    queued = [engine.add([7, i], GREEDY, drafter="d") for i in range(3)]
    engine.step()
    engine.cancel(drop)
    engine.cancel(queued[-1])
    updates = [u for u in engine.step() if u.request == drop]
    assert [u.finish_reason for u in updates] == ["cancelled"]
    kept, dropped, *others, last = finish(engine, keep, drop, *queued)
    assert dropped.finish_reason == last.finish_reason == "cancelled"
    assert last.tokens == () and last.ttft_s is None
    [alone] = make().generate([[1, 2, 3]], GREEDY)
    assert kept.tokens == alone.tokens
    assert all(r.finish_reason == "length" for r in others)


def test_leaving_a_stream_cancels_it() -> None:
    engine = make()
    stream = engine.stream([1, 2], GREEDY)
    next(stream)
    stream.close()
    assert [u.finish_reason for u in engine.step()] == ["cancelled"]
    assert not engine.has_work


class PoisonedTarget(TableTarget):
    """Gives NaN to any sequence whose prompt starts with token 9."""

    def forward(
        self, segments: Sequence[Segment], cache: KVCache, *, features: tuple[int, ...] = ()
    ) -> Forward:
        result = super().forward(segments, cache, features=features)
        logits = [
            torch.full_like(rows, torch.nan) if cache.keys[0, s.slot, 0, 0, 0] == 9 else rows
            for s, rows in zip(segments, result.logits, strict=True)
        ]
        return Forward(logits, result.features)


def test_nan_ends_one_request_and_no_other() -> None:
    target = PoisonedTarget(context_length=200)
    engine = make(target, slots=3)
    good = engine.add([1, 2, 3], GREEDY)
    bad = engine.add([9, 2, 3], GREEDY)
    fine, failed = finish(engine, good, bad)
    [alone] = make().generate([[1, 2, 3]], GREEDY)
    assert fine.tokens == alone.tokens
    assert failed.finish_reason == "error"
    assert failed.error is not None and "nan" in failed.error
    [again] = engine.generate([[4, 5]], GREEDY)  # the slot is clean again
    assert again.finish_reason == "length"


class FailingTarget(TableTarget):
    fail = False

    def forward(
        self, segments: Sequence[Segment], cache: KVCache, *, features: tuple[int, ...] = ()
    ) -> Forward:
        result = super().forward(segments, cache, features=features)
        if self.fail:
            raise RuntimeError("device lost")
        return result


def test_a_failed_pass_leaves_the_cache_as_it_was() -> None:
    target = FailingTarget(context_length=200)
    engine = make(target)
    request = engine.add([1, 2, 3], GREEDY)
    engine.step()
    target.fail = True
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    target.fail = False
    [result] = finish(engine, request)
    [alone] = make().generate([[1, 2, 3]], GREEDY)
    assert result.tokens == alone.tokens


class BrokenDrafter(OracleDrafter):
    """Breaks the protocol in the way its name says, from the third proposal on."""

    def __init__(self, target: TableTarget, how: str) -> None:
        super().__init__(target)
        self.how = how
        self.calls = 0

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        trees = super().propose(views, budgets)
        self.calls += 1
        if self.calls < 3:
            return trees
        if self.how == "raises":
            raise RuntimeError("drafter broke")
        if self.how == "too many nodes":
            return [DraftTree.chain([*tree.tokens, 1]) for tree in trees]
        if self.how == "wrong root":
            return [DraftTree.chain([(t.tokens[0] + 1) % 16, 1]) for t in trees]
        if self.how == "unknown token":
            return [DraftTree.chain([t.tokens[0], 99]) for t in trees]
        return trees[1:]


@pytest.mark.parametrize(
    "how", ["raises", "too many nodes", "wrong root", "unknown token", "too few trees"]
)
def test_a_faulty_drafter_costs_speed_and_nothing_else(how: str) -> None:
    target = TableTarget(context_length=200)
    drafter = BrokenDrafter(target, how)
    params = SamplingParams(temperature=0.0, max_tokens=60)
    [result] = make(target, drafter=drafter).generate([[1, 2, 3]], params, drafter="d")
    [plain] = make(target).generate([[1, 2, 3]], params)
    assert result.tokens == plain.tokens
    assert sum(s.accepted for s in result.steps) > 0
    assert result.steps[-1].reason.startswith("drafter fault")
    assert drafter.calls == 3


def test_features_reach_the_drafter_for_every_cached_row_once() -> None:
    target = TableTarget(context_length=200)
    oracle = OracleDrafter(target, layers=(3, 1))
    engine = make(target, drafter=oracle, prefill_chunk=4)
    [result] = engine.generate([[1, 2, 3, 4, 5, 6, 7]], GREEDY, drafter="d")
    check_features(oracle.commits, result, target)
    assert oracle.commits[0].features is None


def check_features(commits: Sequence[Commit], result: Completion, target: TableTarget) -> None:
    """All rows of an answer but the last token's, each once and right."""
    tokens = [*result.prompt, *result.tokens]
    assert [t for c in commits for t in c.tokens] == tokens
    position = 0
    for commit in commits:
        if commit.features is None:
            continue
        assert commit.features_from == position
        for row in commit.features:
            position += 1
            expected = target.exact_features(tokens[:position], (3, 1))
            assert torch.equal(row, expected)
    assert position == len(tokens) - 1


def test_a_reused_prefix_brings_its_features_along() -> None:
    """A drafter that reads the target's states sees every row, whoever had it computed."""
    target = TableTarget(context_length=200)
    oracle = OracleDrafter(target, layers=(3, 1))
    engine = make(target, drafter=oracle, slots=1, prefill_chunk=4)
    prompt = list(range(10)) * 4

    def ask(prompt: list[int], drafter: str) -> int:
        """Passes that the prompt took beside the first that decodes."""
        oracle.commits.clear()
        [result] = engine.generate([prompt], GREEDY, drafter=drafter)
        if drafter == "d":
            check_features(oracle.commits, result, target)
            assert sum(s.accepted for s in result.steps) > 0
        return sum(s.reason == "prefill" for s in result.steps)

    assert ask(prompt, "d") == 9
    assert ask([*prompt[:30], 1, 1], "d") == 0  # takes over 30 rows
    assert oracle.commits[0].features is not None and len(oracle.commits[0].features) == 30
    assert ask([*prompt[:12], 2], "d") == 0
    assert oracle.commits[0].features is not None and len(oracle.commits[0].features) == 12
    assert ask([*prompt[:12], 3], "none") == 0  # plain decoding needs no features
    assert ask([*prompt[:12], 4], "d") == 2  # and leaves none behind
    assert oracle.commits[0].features is None


def test_prefix_reuse_skips_work_within_a_tenant_only() -> None:
    target = TableTarget(context_length=200)
    prompt = list(range(10)) * 4
    engine = make(target, slots=1, prefill_chunk=8)

    def passes(tenant: str) -> tuple[int, Completion]:
        before = target.passes
        request = engine.add(
            [*prompt, 1], SamplingParams(temperature=0, max_tokens=4), tenant=tenant
        )
        [result] = finish(engine, request)
        return target.passes - before, result

    cold, first = passes("a")
    warm, second = passes("a")
    other, third = passes("b")
    assert warm < cold == other
    assert first.tokens == second.tokens == third.tokens


def test_slots_are_shared_fairly_and_streams_do_not_starve() -> None:
    engine = make(slots=2, prefill_chunk=4)
    short = engine.add([1, 2], GREEDY)
    long = engine.add(list(range(16)) * 6, GREEDY)
    short_tokens = 0
    while engine.has_work:
        short_tokens += sum(len(u.tokens) for u in engine.step() if u.request == short)
        if short_tokens == 10:
            break
    assert engine.has_work  # the long prompt is still being read
    a, b = finish(engine, short, long)
    assert len(a.tokens) == len(b.tokens) == 24


def test_reasons_are_stated() -> None:
    engine = make(drafter=NgramDrafter())
    [plain] = engine.generate([[1, 2, 3]], GREEDY)
    assert {s.reason for s in plain.steps} == {NO_DRAFTER}
    one = SamplingParams(temperature=0, max_tokens=1)
    [last] = engine.generate([[1, 2, 1, 2, 1]], one, drafter="d")
    assert last.steps[-1].reason == AT_THE_END


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 200, {}, "prompt has 200 tokens"),
        ([1, 99], {}, "token 99"),
        ([1], {"max_tokens": 10**9}, "max_tokens is 1000000000"),
        ([1], {"logit_bias": {77: 1.0}}, "logit_bias is 77"),
        ([1], {"stop_token_ids": (-1,)}, "stop_token_ids is -1"),
    ],
)
def test_bad_requests_are_refused_when_they_are_added(
    prompt: list[int], params: dict[str, object], message: str
) -> None:
    engine = make()
    with pytest.raises(InvalidParameter, match=message):
        engine.add(prompt, SamplingParams(**{"max_tokens": 5, **params}))  # type: ignore[arg-type]
    assert not engine.has_work


def test_bad_configurations_are_refused_when_the_engine_is_put_together() -> None:
    with pytest.raises(InvalidParameter, match="context is 500"):
        make(context=500)
    with pytest.raises(InvalidParameter, match="rule is 'typical'"):
        EngineConfig(rule="typical")
    with pytest.raises(InvalidParameter, match="this engine has none"):
        make().add([1], GREEDY, drafter="eagle")
    plan = MemoryPlan(cache=8 * 2**30, drafters=0, logits=0, available=2**30)
    with pytest.raises(OutOfMemory, match=r"8,192 MB.*1,024 MB are free"):
        plan.check(slots=4, context=8192)


def test_a_result_is_handed_out_once() -> None:
    engine = make()
    request = engine.add([1], GREEDY)
    with pytest.raises(InvalidParameter, match="not finished"):
        engine.take(request)
    finish(engine, request)
    with pytest.raises(InvalidParameter, match="taken already"):
        engine.take(request)
