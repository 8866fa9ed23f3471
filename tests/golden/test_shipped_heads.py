"""The heads in the package: found by their style, made for the demo's target, small, and of use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.core.sampling import SamplingParams
from outrider.drafters.heads import shipped_head, shipped_heads, style_of
from outrider.drafters.table import Setting, build_drafter
from outrider.engine import Engine, EngineConfig, FixedBudget
from outrider.evaluate.workloads import load_workload
from outrider.kernels import native
from outrider.models.heads.files import read_head
from outrider.models.heads.fit import folder_facts
from outrider.models.load import LoadedModel, load_model

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason="no native kernels here")

MOST_BYTES = 25_000_000
LEAST = {"eagle3": 2.0, "eagle": 1.6, "medusa": 1.5}  # acceptance length that a broken head misses


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("smollm2-135m", weights="int8")


def styles() -> list[str]:
    return [style_of(read_head(folder).config) for folder in shipped_heads().values()]


def test_they_are_small_and_tell_where_they_come_from() -> None:
    folders = shipped_heads().values()
    size = sum(file.stat().st_size for folder in folders for file in Path(folder).iterdir())
    assert 0 < size <= MOST_BYTES
    assert len(set(styles())) == len(styles()) and set(styles()) <= set(LEAST)
    for folder in folders:
        told = json.loads((folder / "provenance.json").read_text())
        assert told["target"] == "smollm2-135m" and told["data"]["answer_tokens"] > 1_000_000
        assert not any(place in json.dumps(told) for place in ("/tmp", "/home", "/root"))


@pytest.mark.parametrize("style", styles())
def test_each_is_found_and_guesses_right(model: LoadedModel, style: str) -> None:
    facts = folder_facts(model.source, name=model.target.name)
    assert shipped_head(style, facts) in shipped_heads().values()
    place = Setting(model.target, model.tokenizer, context=512, source=model.source)
    engine = Engine(
        model.target,
        drafters={style: build_drafter(style, place)},
        tokenizer=model.tokenizer,
        config=EngineConfig(slots=1, context=512, reuse_prefix=False),
        budget=FixedBudget(15, 5),
    )
    prompts = [model.tokenizer.chat(p.chat()) for p in list(load_workload("builtin:chat"))[:3]]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    plain = engine.generate(prompts, params)
    guessed = engine.generate(prompts, params, drafter=style)
    assert [answer.tokens for answer in guessed] == [answer.tokens for answer in plain]
    every = [step for answer in guessed for step in answer.steps]
    assert not any("fault" in step.reason for step in every)
    steps = [step for step in every if step.proposed]
    drafted, accepted = sum(s.proposed for s in steps), sum(s.accepted for s in steps)
    assert 0 < accepted < drafted
    assert 1 + accepted / len(steps) >= LEAST[style]
