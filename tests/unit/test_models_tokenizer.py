"""The tokenizer wrapper, and text that never changes once it was shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models_files import SPECIALS, VOCAB, pieces, write_folder

from outrider.errors import InvalidParameter
from outrider.models.tokenizer import Detokenizer, Tokenizer
from outrider.testing.fakes import ByteTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("tokenizer")))


def test_text_goes_there_and_back(tokenizer: Tokenizer) -> None:
    for text in ("hello world", "", "  12\n", "naïve 🦊 日本"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0, *tokenizer.encode("hello"), 2]) == "hello"
    assert tokenizer.vocab_size == VOCAB
    assert tokenizer.pieces() == pieces()


def test_chat_uses_the_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.chat([{"role": "user", "content": "hello"}])
    spelled = [tokenizer.pieces()[i] for i in ids]
    assert spelled[0] == SPECIALS[1]
    assert spelled.count(SPECIALS[2]) == 1
    assert tokenizer.decode(ids) == "user\nhello\nassistant\n"
    closed = tokenizer.chat([{"role": "user", "content": "hello"}], add_generation_prompt=False)
    assert ids[: len(closed)] == closed
    assert len(ids) > len(closed)


def test_chat_refusals_are_the_requests_fault(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="refuses these messages: no aliens"):
        tokenizer.chat([{"role": "alien", "content": "hello"}])
    folder = write_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    plain = Tokenizer.load(folder)
    with pytest.raises(InvalidParameter, match="no chat template"):
        plain.chat([{"role": "user", "content": "hello"}])
    assert plain.fingerprint != tokenizer.fingerprint


@given(st.text(max_size=40), st.integers(1, 5))
def test_fed_text_is_final_and_complete(text: str, step: int) -> None:
    decoder = ByteTokenizer()
    ids = decoder.encode(text)
    stream = Detokenizer(decoder)
    shown = ""
    for first in range(0, len(ids), step):
        shown += stream.feed(ids[first : first + step])
        assert text.startswith(shown)
    assert shown + stream.flush() == text
    assert stream.flush() == ""


@given(st.lists(st.integers(0, 258), max_size=30))
def test_broken_bytes_come_out_as_the_whole_decodes(ids: list[int]) -> None:
    decoder = ByteTokenizer()
    stream = Detokenizer(decoder)
    shown = "".join(stream.feed([i]) for i in ids)
    assert shown + stream.flush() == decoder.decode(ids)


def test_half_a_character_is_held_back(tokenizer: Tokenizer) -> None:
    stream = Detokenizer(tokenizer)
    fox = tokenizer.encode("🦊")
    assert len(fox) == 4
    assert [stream.feed([i]) for i in fox] == ["", "", "", "🦊"]
    assert stream.feed(fox[:2]) == ""
    assert stream.flush() == "\ufffd"


def test_a_token_costs_the_same_however_long_the_text(tokenizer: Tokenizer) -> None:
    class Counting:
        longest = 0

        def decode(self, ids: list[int]) -> str:
            self.longest = max(self.longest, len(ids))
            return tokenizer.decode(ids)

    counting = Counting()
    stream = Detokenizer(counting)  # type: ignore[arg-type]
    text = "hello world " * 50
    shown = "".join(stream.feed([i]) for i in tokenizer.encode(text))
    assert shown + stream.flush() == text
    assert counting.longest <= 4
