"""The fakes tell the truth: what the table target reads from its cache equals `exact`."""

from __future__ import annotations

import pytest
import torch

from outrider.core.tree import DraftTree
from outrider.errors import InvalidParameter
from outrider.models.target import Segment, Target
from outrider.testing.fakes import END, START, ByteTokenizer, TableTarget

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
#      root 5 ─ 3 ─ 5
#            └ 8 ─ 9 ─ 7
TREE = DraftTree((5, 3, 8, 5, 9, 7), (-1, 0, 0, 1, 2, 4))


def test_bytes_round_trip_and_specials_never_come_from_text() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve 猫 <|end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < START
    assert tokenizer.decode([*ids, END]) == text
    assert tokenizer.decode([0xC3]) == "�"


def test_chat_frames_every_turn() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert ids == [START, *b"user\nhi", END, START, *b"assistant\n"]
    assert (
        tokenizer.chat([{"role": "user", "content": "hi"}], add_generation_prompt=False)[-1] == END
    )


def test_it_is_a_target() -> None:
    target: Target = TableTarget()
    assert target.cache_shape.layers == 1


@pytest.mark.parametrize("ripple", [0.0, 0.05])
def test_tree_rows_equal_exact(ripple: float) -> None:
    target = TableTarget(ripple=ripple)
    cache = target.new_cache(slots=2, length=64)
    layers = (0, 2, 4)
    result = target.forward([Segment(1, PROMPT, TREE)], cache, features=layers)
    assert result.features is not None
    assert result.features[0].shape == (len(PROMPT) + len(TREE), 3, 8)
    for node in range(len(TREE)):
        prefix = (*PROMPT, TREE.tokens[0], *TREE.path_tokens(node))
        assert torch.equal(result.logits[0][node], target.exact(prefix))
        row = result.features[0][len(PROMPT) + node]
        assert torch.equal(row, target.exact_features(prefix, layers))


def test_chunks_and_kept_paths_equal_exact() -> None:
    target = TableTarget()
    cache = target.new_cache(slots=1, length=64)
    assert target.forward([Segment(0, PROMPT[:3])], cache).logits[0].shape == (0, 16)
    cache.keep(0, range(3))
    target.forward([Segment(0, PROMPT[3:], TREE)], cache)
    cache.keep(0, [0, 1, 2, 3, 4, 5, 7, 9])  # the prefix, the root, then 8 and 9
    result = target.forward([Segment(0, (), DraftTree.root_only(7))], cache)
    assert torch.equal(result.logits[0][0], target.exact((*PROMPT, 5, 8, 9, 7)))


@pytest.mark.parametrize("which", ["keys", "values"])
def test_one_wrong_row_far_back_changes_the_logits(which: str) -> None:
    target = TableTarget()
    cache = target.new_cache(slots=1, length=64)
    target.forward([Segment(0, PROMPT)], cache)
    cache.keep(0, range(len(PROMPT)))
    getattr(cache, which)[0, 0, 0, 0, 0] += 1
    result = target.forward([Segment(0, (), DraftTree.root_only(7))], cache)
    assert not torch.equal(result.logits[0][0], target.exact((*PROMPT, 7)))


def test_a_row_kept_by_mistake_or_at_a_wrong_place_changes_the_logits() -> None:
    target = TableTarget()
    for kept in ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5, 6, 8]):
        cache = target.new_cache(slots=1, length=64)
        target.forward([Segment(0, PROMPT, TREE)], cache)
        cache.keep(0, kept)
        result = target.forward([Segment(0, (), DraftTree.root_only(7))], cache)
        rows = (*PROMPT, *TREE.tokens)
        assert not torch.equal(result.logits[0][0], target.exact((*(rows[k] for k in kept), 7)))


def test_the_text_repeats_itself_at_a_low_order() -> None:
    target = TableTarget(vocab_size=8, order=1)
    tokens = [0]
    for _ in range(64):
        tokens.append(int(target.exact(tokens).argmax()))
    assert len({tuple(tokens[i : i + 3]) for i in range(62)}) < 40


@pytest.mark.parametrize(
    "segment", [Segment(0, (16,)), Segment(0, (-1,)), Segment(0, tuple([1] * 9))]
)
def test_what_a_model_lacks_is_refused(segment: Segment) -> None:
    target = TableTarget(context_length=8)
    with pytest.raises(InvalidParameter):
        target.forward([segment], target.new_cache(slots=1, length=16))


def test_unknown_layers_are_refused() -> None:
    target = TableTarget()
    with pytest.raises(InvalidParameter, match="layer 5"):
        target.forward([Segment(0, PROMPT)], target.new_cache(slots=1, length=16), features=(5,))
