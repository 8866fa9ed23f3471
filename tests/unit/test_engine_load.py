"""The engine under load: who gets a slot, what a fault takes with it, prompts beside streams."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from outrider.core.grammar import Mask
from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.base import Needs, NodeBudget
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Completion, Engine, EngineConfig, FixedBudget
from outrider.engine.drafting import UNGRAMMATICAL, grammatical
from outrider.engine.memory import allocating
from outrider.engine.scheduler import Plan, Waiting, schedule
from outrider.errors import InvalidParameter, OutOfMemory, Overloaded
from outrider.models.cache import KVCache
from outrider.models.target import Forward, Segment
from outrider.models.tiny import tiny_config
from outrider.models.transformer import Transformer
from outrider.testing.fakes import TableTarget

LONG = SamplingParams(temperature=0, max_tokens=40)


def make(target: TableTarget | None = None, **config: object) -> Engine:
    return Engine(
        target or TableTarget(context_length=400),
        drafters={"suffix": SuffixDrafter()},
        config=EngineConfig(**{"slots": 2, "prefill_chunk": 16, **config}),  # type: ignore[arg-type]
        budget=FixedBudget(nodes=6, depth=4),
    )


def drain(engine: Engine) -> dict[int, Completion]:
    done = {}
    while engine.has_work:
        for update in engine.step():
            if update.finish_reason is not None:
                done[update.request] = engine.take(update.request)
    return done


# -- who is next ----------------------------------------------------------------------------------


def test_a_tenant_with_many_requests_waits_for_itself() -> None:
    engine = make(slots=2)
    many = [engine.add([1, 2], LONG, tenant="many") for _ in range(6)]
    one = engine.add([3, 4], LONG, tenant="one")
    order = list(drain(engine))
    assert order.index(one) < order.index(many[2])


def test_within_a_tenant_the_first_is_first() -> None:
    engine = make(slots=1)
    requests = [engine.add([1 + i], LONG) for i in range(4)]
    assert list(drain(engine)) == requests


def test_who_gets_a_free_slot_does_not_count_as_waiting() -> None:
    engine = make(slots=1, queue=1)
    taken = [engine.add([1], LONG), engine.add([2], LONG)]  # no step between them
    with pytest.raises(Overloaded, match="1 requests wait"):
        engine.add([3], LONG)
    assert list(drain(engine)) == taken


def test_a_full_queue_refuses_and_forgets_nothing() -> None:
    engine = make(slots=1, queue=2)
    first = engine.add([1], LONG)
    engine.step()
    waiting = [engine.add([2], LONG), engine.add([3], LONG)]
    with pytest.raises(Overloaded, match="2 requests wait"):
        engine.add([4], LONG)
    assert set(drain(engine)) == {first, *waiting}


def test_who_waits_too_long_is_sent_away_and_no_other() -> None:
    engine = make(slots=1, patience_s=0.01)
    first = engine.add([1], LONG)
    engine.step()
    late = engine.add([2], LONG)
    time.sleep(0.02)
    done = drain(engine)
    assert done[late].finish_reason == "expired"
    assert done[late].error is not None and "0.01 s" in done[late].error
    assert done[first].finish_reason == "length"


def test_load_tells_how_busy_the_engine_is() -> None:
    engine = make(slots=1)
    engine.add([1, 2, 3], LONG)
    engine.add([1, 2, 3], LONG)
    engine.step()
    load = engine.load
    assert (load.running, load.waiting, load.slots) == (1, 1, 1)
    assert 0 < load.rows < load.capacity == 400


# -- prompts beside streams -----------------------------------------------------------------------


def test_the_oldest_gets_half_and_the_shortest_the_rest() -> None:
    running = [Waiting(0, 101), Waiting(1, 31), Waiting(2, 6), Waiting(3, 1)]
    assert schedule(running, chunk=20) == Plan(decode=(2, 3), prefill={0: 10, 1: 5})


def test_a_chunk_is_smaller_beside_streams_only() -> None:
    assert schedule([Waiting(0, 101)], chunk=64, busy_chunk=8).prefill == {0: 64}
    assert schedule([Waiting(0, 101), Waiting(1, 1)], chunk=64, busy_chunk=8).prefill == {0: 8}


def test_no_row_of_the_chunk_is_left_over() -> None:
    plan = schedule([Waiting(0, 50), Waiting(1, 3)], chunk=20)
    assert plan == Plan(decode=(1,), prefill={0: 18})


def test_a_stream_goes_on_while_a_long_prompt_is_read() -> None:
    engine = make(busy_chunk=4)
    stream = engine.add([1, 2], LONG)
    engine.step()
    engine.add([5] * 200, SamplingParams(temperature=0, max_tokens=1))
    for _ in range(20):
        assert stream in {update.request for update in engine.step()}


# -- faults ---------------------------------------------------------------------------------------


class Culprit(TableTarget):
    """Fails every pass that holds a segment whose cache begins with token 9."""

    def forward(
        self, segments: Sequence[Segment], cache: KVCache, *, features: tuple[int, ...] = ()
    ) -> Forward:
        result = super().forward(segments, cache, features=features)
        if any(cache.keys[0, s.slot, 0, 0, 0] == 9 for s in segments):
            raise RuntimeError("cannot multiply")
        return result


def test_a_failing_pass_costs_only_the_request_at_fault() -> None:
    engine = make(Culprit(context_length=400), slots=3)
    good = [engine.add([1, 2, 3], LONG, drafter="suffix"), engine.add([4, 5], LONG)]
    bad = engine.add([9, 9], LONG)
    done = drain(engine)
    assert done[bad].finish_reason == "error"
    assert "RuntimeError" in (done[bad].error or "") and "multiply" not in (done[bad].error or "")
    [alone] = make().generate([[1, 2, 3]], LONG)
    assert done[good[0]].tokens == alone.tokens
    assert done[good[1]].finish_reason == "length"


def test_where_no_sequence_gets_through_the_step_raises_and_what_ran_can_be_abandoned() -> None:
    engine = make(Culprit(context_length=400))
    lost = engine.add([9], LONG)
    waiting = [engine.add([9, 1], LONG), engine.add([1, 2, 3], LONG)]
    with pytest.raises(RuntimeError, match="cannot multiply"):
        engine.step()
    updates = engine.abandon("the engine failed")
    assert {u.request for u in updates} == {lost, waiting[0]}
    assert all(u.finish_reason == "error" and u.error == "the engine failed" for u in updates)
    [alone] = make().generate([[1, 2, 3]], LONG)
    assert drain(engine)[waiting[1]].tokens == alone.tokens


def test_a_cancelled_request_frees_its_place_in_the_queue_and_in_the_batch() -> None:
    engine = make(slots=1, queue=1)
    running = engine.add([1], LONG)
    engine.step()
    waiting = engine.add([2], LONG)
    for request in (waiting, running):
        engine.cancel(request)
    third = engine.add([3], LONG)
    done = drain(engine)
    assert [done[r].finish_reason for r in (running, waiting, third)] == [
        "cancelled",
        "cancelled",
        "length",
    ]


# -- grammars -------------------------------------------------------------------------------------


class Alternating:
    """Even and odd tokens in turn, an odd one first; ends after `length` tokens."""

    def __init__(self, *, length: int = 1000, vocab_size: int = 16) -> None:
        self.output: list[int] = []
        self.length = length
        self.vocab_size = vocab_size

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.length

    def allowed(self, path: tuple[int, ...]) -> Mask:
        wanted = (len(self.output) + len(path) + 1) % 2
        return np.arange(self.vocab_size) % 2 == wanted

    def fits(self, path: Sequence[int]) -> int:
        for place, token in enumerate(path):
            if not self.allowed(tuple(path[:place]))[token]:
                return place
        return len(path)

    def advance(self, tokens: Sequence[int]) -> None:
        assert self.fits(tokens) == len(tokens)
        self.output += tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_gives_the_same_tokens_with_and_without_guesses(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=60, seed=5)
    engine = make()
    plain = engine.add([1, 2, 3], params, grammar=Alternating())
    guessed = engine.add([1, 2, 3], params, drafter="suffix", grammar=Alternating())
    free = engine.add([1, 2, 3], params)
    done = drain(engine)
    assert done[plain].tokens == done[guessed].tokens != done[free].tokens
    assert [t % 2 for t in done[plain].tokens] == [1, 0] * 30
    assert sum(step.accepted for step in done[guessed].steps) > 0


def test_a_complete_grammar_ends_the_output() -> None:
    engine = make()
    request = engine.add([1], LONG, drafter="suffix", grammar=Alternating(length=7))
    done = drain(engine)[request]
    assert (len(done.tokens), done.finish_reason) == (7, "stop")


def test_guesses_that_the_grammar_forbids_are_cut_with_what_hangs_from_them() -> None:
    tree = DraftTree((0, 1, 3, 2, 4, 5), (-1, 0, 0, 1, 2, 3), confidence=(1.0,) * 6)
    cut = grammatical(tree, Alternating())
    assert cut.tokens == (0, 1, 3, 2, 4, 5)
    cut = grammatical(DraftTree((0, 2, 3, 1, 5), (-1, 0, 0, 1, 2)), Alternating())
    assert (cut.tokens, cut.parents) == ((0, 3), (-1, 0))


class Stubborn(Alternating):
    """Finds no guess fitting, so that the reason can be seen."""

    def fits(self, path: Sequence[int]) -> int:
        return 0


def test_the_record_says_that_the_grammar_left_no_guess() -> None:
    engine = make()
    request = engine.add([1, 2, 1, 2, 1], LONG, drafter="suffix", grammar=Stubborn())
    assert UNGRAMMATICAL in {step.reason for step in drain(engine)[request].steps}


class Faulty(Alternating):
    """Breaks after ten tokens."""

    def allowed(self, path: tuple[int, ...]) -> Mask:
        if len(self.output) >= 10:
            raise ZeroDivisionError("secret state")
        return super().allowed(path)


def test_a_grammar_that_fails_ends_its_own_request() -> None:
    engine = make()
    bad = engine.add([1, 2, 3], LONG, drafter="suffix", grammar=Faulty())
    good = engine.add([1, 2, 3], LONG, drafter="suffix", grammar=Alternating())
    done = drain(engine)
    assert done[bad].finish_reason == "error" and "secret" not in (done[bad].error or "")
    assert done[good].finish_reason == "length"


def test_a_grammar_needs_an_end() -> None:
    with pytest.raises(InvalidParameter, match="ignore_eos"):
        make().add([1], SamplingParams(ignore_eos=True), grammar=Alternating())


def test_a_profiles_bound_holds_for_its_request_only() -> None:
    engine = make()
    bound = engine.add([1, 2, 1, 2, 1], LONG, drafter="suffix", most=NodeBudget(1, 1))
    free = engine.add([1, 2, 1, 2, 1], LONG, drafter="suffix")
    done = drain(engine)
    assert max(step.proposed for step in done[bound].steps) == 1
    assert max(step.proposed for step in done[free].steps) > 1
    assert done[bound].tokens == done[free].tokens


# -- a rule for each request ----------------------------------------------------------------------


REPEATING = [1, 2, 3, 4] * 5


def with_ngram(**config: object) -> Engine:
    return Engine(
        TableTarget(context_length=400, sharpness=6.0, ripple=0.0),
        drafters={"ngram": NgramDrafter(), "suffix": SuffixDrafter()},
        config=EngineConfig(**{"slots": 4, **config}),  # type: ignore[arg-type]
        budget=FixedBudget(nodes=6, depth=4),
    )


def test_each_request_is_judged_by_its_own_rule_in_one_batch() -> None:
    params = SamplingParams(temperature=0.7, max_tokens=40, seed=5)
    rules = ("walk", "reject", "block")

    def alone(rule: str) -> Completion:
        engine = with_ngram()
        request = engine.add(REPEATING, params, drafter="ngram", rule=rule)
        return drain(engine)[request]

    engine = with_ngram(slots=3)
    requests = [engine.add(REPEATING, params, drafter="ngram", rule=rule) for rule in rules]
    together = drain(engine)
    for request, rule in zip(requests, rules, strict=True):
        done = together[request]
        assert {step.rule for step in done.steps} == {rule}
        assert max(step.sequences for step in done.steps) == 3
        assert sum(step.accepted for step in done.steps) > 0
        assert done.tokens == alone(rule).tokens
    [plain] = with_ngram().generate([REPEATING], params)
    assert together[requests[0]].tokens == plain.tokens


def test_a_rule_for_chains_with_a_drafter_of_trees_is_refused_when_put_together() -> None:
    with pytest.raises(InvalidParameter, match="rule block judges chains and drafter suffix"):
        with_ngram(rule="block")
    engine = with_ngram()
    with pytest.raises(InvalidParameter, match="rule block judges chains and drafter suffix"):
        engine.add([1, 2], LONG, drafter="suffix", rule="block")
    engine.add([1, 2], LONG, drafter="ngram", rule="block")
    engine.add([1, 2], LONG, drafter="suffix", rule="block", most=NodeBudget(1, 1))
    assert all(done.error is None for done in drain(engine).values())
    with pytest.raises(InvalidParameter, match="rule is 'typical'"):
        engine.add([1, 2], LONG, rule="typical")


class _Fickle(SuffixDrafter):
    """Says that it makes chains, and does not."""

    needs = Needs(trees=False)

    def propose(self, views: Sequence[object], budgets: Sequence[NodeBudget]) -> list[DraftTree]:
        return [DraftTree((view.root, 1, 2), (-1, 0, 0)) for view in views]  # type: ignore[attr-defined]


def test_a_drafter_is_held_to_its_word_on_chains() -> None:
    engine = Engine(
        TableTarget(context_length=400),
        drafters={"fickle": _Fickle()},
        config=EngineConfig(rule="block"),
        budget=FixedBudget(nodes=6, depth=4),
    )
    [done] = engine.generate([REPEATING], LONG, drafter="fickle")
    assert done.error is None and len(done.tokens) == 40
    assert any(step.reason.startswith("drafter fault") for step in done.steps)


# -- memory ---------------------------------------------------------------------------------------


def test_full_slots_of_full_length_queue_what_follows_and_refuse_the_rest() -> None:
    """Every slot holds as much as it can, with the widest trees: the others wait or are told no,
    and no row is asked for that was not planned."""
    target = Transformer.random(tiny_config(), seed=0)
    context = 48
    engine = Engine(
        target,
        drafters={"ngram": NgramDrafter(), "suffix": SuffixDrafter()},
        config=EngineConfig(slots=2, context=context, queue=3, prefill_chunk=16, max_nodes=8),
        budget=FixedBudget(nodes=8, depth=8),
    )
    planned = engine.plan.cache
    filling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = [5, 6, 7, 8] * 10  # with the output exactly the context

    def add(drafter: str) -> int:
        return engine.add(prompt, filling, drafter=drafter)

    taken = [add("suffix"), add("ngram"), add("suffix"), add("none"), add("suffix")]
    with pytest.raises(Overloaded, match="3 requests wait already"):
        add("none")
    with pytest.raises(InvalidParameter, match="context of 48 leaves 8"):
        engine.add(prompt, replace(filling, max_tokens=9))
    done: dict[int, Completion] = {}
    most = 0
    while engine.has_work:
        updates = engine.step()
        load = engine.load
        assert load.running <= 2 and load.rows <= load.capacity == 2 * context
        most = max(most, load.rows)
        for update in updates:
            if update.finish_reason is not None:
                done[update.request] = engine.take(update.request)
    assert most > 2 * 40 and sorted(done) == sorted(taken)
    assert {len(d.tokens) for d in done.values()} == {8}
    assert {d.tokens for d in done.values()} == {done[taken[3]].tokens}
    assert {d.finish_reason for d in done.values()} == {"length"}
    assert engine.plan.cache == planned == target.cache_shape.nbytes(2, context + 9)


def test_an_allocator_that_says_no_is_one_line_with_a_remedy() -> None:
    for fault in (
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ):

        class Poor(TableTarget):
            def new_cache(self, *, slots: int, length: int, error: Exception = fault) -> KVCache:
                raise error

        with pytest.raises(OutOfMemory, match=r"4 slots of 64 positions.*lower the slots"):
            Engine(Poor(context_length=64), config=EngineConfig(slots=4))
    with pytest.raises(RuntimeError, match="something else"), allocating("x", slots=1, context=1):
        raise RuntimeError("something else")
