"""The check of heads in vLLM: what it counts, when it passes, and that its switch switches."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from heads_fakes import draft_tokens, head_config, random_head, tiny_target
from outrider.core.sampling import SamplingParams, Subset
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.growth import TreeShape
from outrider.engine import Engine, EngineConfig, FixedBudget
from outrider.models.heads.eagle import EagleModel

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "interop" / "vllm_heads.py"
TINY = tiny_target("native")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_heads", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules["vllm_heads"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def test_drafts_that_do_not_fit_into_the_answer_are_left_out(check):
    steps = check.of_vllm([1, 3, 1, 5, 1, 2])  # 13 tokens; drafts begin at 1, 4, 5, 10, 11
    assert check.whole_windows(steps, 4) == [2, 0, 4]
    assert check.whole_windows(steps, 2) == [2, 0, 4, 0]
    counts = check.Counts.of([2, 0, 4], 4)
    assert counts.drafts == 3 and counts.accepted == (2, 2, 1, 1)
    assert counts.length == pytest.approx(3.0) and counts.share(2) == pytest.approx(1 / 3)
    assert check.Counts.of([], 4).length == 1.0


def test_the_verdict(check):
    """Equal passes; higher passes where the switch makes it equal; all else fails."""
    low, high = check.Counts(1000, (500, 200)), check.Counts(1000, (560, 260))
    nothing = check.Counts(1000, (0, 0))

    def verdict(vllm, ours, off):
        return check.judge(check.Found(vllm, ours, ours, off))

    assert verdict(low, low, low)[0] and verdict(high, high, low)[0]
    assert "refreshes its drafter's states too" in verdict(high, high, low)[1]
    ok, reason = verdict(low, high, low)
    assert ok and "because it refreshes" in reason
    assert not verdict(low, high, high)[0]  # higher, and the switch does not explain it
    assert not verdict(high, low, low)[0]  # lower
    assert not verdict(nothing, nothing, nothing)[0]
    near = check.Counts(1000, (519, 200))
    assert check.near(low, near) and not check.near(low, check.Counts(1000, (521, 200)))


def _head() -> EagleDrafter:
    config = head_config("eagle3")
    return EagleDrafter(
        EagleModel(config, random_head(config), TINY, None),
        subset=Subset(draft_tokens().tolist(), size=TINY.vocab_size),
        shape=TreeShape(1, 1),
        sequences=1,
        length=128,
    )


def _observed(drafter: EagleDrafter) -> tuple[list[int], list[torch.Tensor]]:
    """Of each step the accepted guesses, and the states that its rows will start from."""
    engine = Engine(
        TINY,
        drafters={"it": drafter},
        config=EngineConfig(slots=1, context=128, reuse_prefix=False),
        budget=FixedBudget(4, 4),
    )
    seen: list[torch.Tensor] = []
    observe = drafter.observe

    def spy(commits):
        observe(commits)
        [commit] = commits
        if commit.features is not None:
            states = drafter._known[commit.sequence].pending(drafter._model)
            seen.append(states[-len(commit.features) :].clone())

    drafter.observe = spy  # type: ignore[method-assign]
    params = SamplingParams(temperature=1, max_tokens=60, seed=2)
    [done] = engine.generate([[5, 9, 3, 7]], params, drafter="it")
    assert not any("fault" in step.reason for step in done.steps)
    return [step.accepted for step in done.steps], seen


def test_the_switch_keeps_guessed_states_and_only_those(check):
    """Where guesses were accepted, their rows start from guessed states; all others from true."""
    accepted, true_states = _observed(_head())
    off, states = _observed(check.UnrefreshedDrafter(_head(), length=128))
    assert max(accepted) >= 2
    first = next(i for i, a in enumerate(accepted) if a)
    assert off[: first + 1] == accepted[: first + 1]  # alike up to there; behind it all may differ
    for step in range(first):
        assert torch.equal(states[step], true_states[step])
    kept = min(accepted[first], 3)
    rows = zip(states[first], true_states[first], strict=True)
    assert [torch.equal(a, b) for a, b in rows] == [
        row >= kept for row in range(len(states[first]))
    ]
