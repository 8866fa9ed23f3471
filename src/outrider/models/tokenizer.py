"""Text to tokens and back: a thin wrapper over the tokenizer that a model folder holds.

`Tokenizer` hides the library; `Detokenizer` turns a stream of tokens into text that never changes
afterwards. Neither knows anything of models.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outrider.errors import InvalidParameter, ModelError
from outrider.models.safetensors_files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Ends of a turn that chat templates write; those that a template does use end its model's answer.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>")

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Decoder(Protocol):
    """Whatever turns ids into text."""

    def decode(self, ids: Sequence[int]) -> str: ...


class TextModel(Decoder, Protocol):
    """Whatever stands for a model's tokenizer and chat template: `Tokenizer`, or a fake.

    Attributes:
        vocab_size: one more than the largest id.
        end_tokens: ids that end an answer.
        fingerprint: a hash of everything that decides the tokens of a text or chat.
        template: the chat template's source; empty where there is none.
    """

    vocab_size: int
    end_tokens: frozenset[int]

    @property
    def fingerprint(self) -> str: ...

    @property
    def template(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, str | bool] | None = None,
    ) -> list[int]: ...

    def token_bytes(self) -> list[bytes]:
        """The bytes of every token by id; special tokens as they are written."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that stand for no text, by how they are written."""
        ...


class Tokenizer:
    """The tokenizer of a model.

    Attributes:
        vocab_size: one more than the largest id.
        end_tokens: ids that end an answer: end of text, and the end of a turn where the chat
            template uses one.
    """

    def __init__(self, inner: PreTrainedTokenizerBase, *, ends: Iterable[int] = ()) -> None:
        self._inner = inner
        self._vocabulary: dict[str, int] = inner.get_vocab()
        self.vocab_size: int = max(self._vocabulary.values()) + 1
        self.end_tokens: frozenset[int] = frozenset(ends) | self._own_ends()

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder. Never runs code from the folder.

        Raises:
            ModelError: its files are missing or damaged.
        """
        if not any((folder / name).exists() for name in _FILES):
            raise ModelError(f"no tokenizer in {folder}; one of {', '.join(_FILES)} is needed")
        inner = _from_pretrained(folder)
        return cls(inner, ends=_configured_ends(folder))

    def _own_ends(self) -> frozenset[int]:
        ends = set()
        if self._inner.eos_token_id is not None:
            ends.add(int(self._inner.eos_token_id))
        template = self.template
        ends |= {
            self._vocabulary[turn]
            for turn in TURN_ENDS
            if turn in template and turn in self._vocabulary
        }
        return frozenset(ends)

    @property
    def template(self) -> str:
        """The chat template as text; that of several ones as JSON."""
        template: Any = self._inner.chat_template
        return template if isinstance(template, str) else json.dumps(template or "")

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, with the model's own start token where it uses one."""
        return list(self._inner.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; special tokens give none, broken UTF-8 shows as U+FFFD."""
        text: Any = self._inner.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, str | bool] | None = None,
    ) -> list[int]:
        """Messages (``role``, ``content``) as tokens, ready for the model's turn.

        Args:
            messages: the conversation.
            add_generation_prompt: end with the opening of the model's turn.
            tools: for the template's own place for them.
            variables: more names that the template may know, such as ``enable_thinking``.

        Raises:
            InvalidParameter: the model has no chat template, or its template refuses the messages.
        """
        if not self._inner.chat_template:
            raise InvalidParameter("this model has no chat template; send a plain prompt")
        from jinja2 import TemplateError

        extra: dict[str, Any] = dict(variables or {})
        try:
            ids: Any = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                **extra,
                tokenize=True,
                return_dict=False,
            )
        except (TemplateError, KeyError, TypeError, ValueError) as error:
            raise InvalidParameter(f"the chat template refuses these messages: {error}") from None
        return [int(i) for i in ids]

    def pieces(self) -> list[str]:
        """Every token as the vocabulary spells it, by id; ids without a token are empty."""
        pieces = [""] * self.vocab_size
        for piece, index in self._vocabulary.items():
            pieces[index] = piece
        return pieces

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that stand for no text, by how they are written."""
        added: Any = self._inner.added_tokens_decoder
        return {str(token): index for index, token in added.items() if token.special}

    def token_bytes(self) -> list[bytes]:
        """The bytes of every token by id; special and added tokens as they are written."""
        backend: Any = self._inner.backend_tokenizer
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder") or {})
        spell = _byte_level if "ByteLevel" in decoder else _word_piece
        found = [spell(piece) for piece in self.pieces()]
        added: Any = self._inner.added_tokens_decoder
        for index, token in added.items():
            found[index] = str(token).encode()
        return found

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides the tokens of a text or chat, in hex."""
        digest = hashlib.sha256()
        backend: Any = self._inner.backend_tokenizer
        digest.update(backend.to_str().encode())
        digest.update(json.dumps(self._inner.special_tokens_map, sort_keys=True).encode())
        digest.update(self.template.encode())
        digest.update(json.dumps(sorted(self.end_tokens)).encode())
        return digest.hexdigest()


def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies write each byte: printable ones as themselves, the others as the
    characters from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted


_BYTES = _byte_alphabet()
_SINGLE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(piece: str) -> bytes:
    known = all(character in _BYTES for character in piece)
    return bytes(_BYTES[character] for character in piece) if known else piece.encode()


def _word_piece(piece: str) -> bytes:
    single = _SINGLE_BYTE.fullmatch(piece)
    if single is not None:
        return bytes([int(single[1], 16)])
    return piece.replace("\u2581", " ").encode()


def _from_pretrained(folder: Path) -> PreTrainedTokenizerBase:
    """The library's tokenizer: straight from its file where the folder says that this is enough,
    since importing the automatic classes takes a second or more."""
    try:
        settings = folder / "tokenizer_config.json"
        plain = settings.exists() and read_json(settings).get("tokenizer_class") in (
            "TokenizersBackend",
            "PreTrainedTokenizerFast",
        )
        if plain and (folder / "tokenizer.json").exists():
            from transformers import PreTrainedTokenizerFast

            inner: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(str(folder))
            return inner
        from transformers import AutoTokenizer

        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        return found
    except ModelError:
        raise
    except Exception as error:  # the library raises a bare Exception for a damaged tokenizer.json
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"the tokenizer in {folder} cannot be read: {reason}") from None


def _configured_ends(folder: Path) -> set[int]:
    """End tokens named by generation_config.json, or else by config.json."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            ends = read_json(folder / name).get("eos_token_id")
            if ends is not None:
                return {int(end) for end in (ends if isinstance(ends, list) else [ends])}
    return set()


class Detokenizer:
    """Turns a stream of tokens into text that is final.

    Text is held back while it could still change: when it ends in an unfinished character. What
    was fed decodes, in one piece, to the concatenation of all that `feed` and `flush` returned.
    Only the tokens since the last safe point are decoded again, so a token costs the same however
    long the text is.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._tokens: list[int] = []  # the window: context, then tokens not yet given out
        self._shown = 0  # tokens of the window whose text was given out

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that became final."""
        self._tokens.extend(tokens)
        before = self._decoder.decode(self._tokens[: self._shown])
        text = self._decoder.decode(self._tokens)
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        # keep one token's worth of context: decoders may treat the first token of a text specially
        self._tokens = self._tokens[self._shown :]
        self._shown = len(self._tokens)
        return text[len(before) :]

    def flush(self) -> str:
        """The rest, as it is; afterwards nothing is held back."""
        before = self._decoder.decode(self._tokens[: self._shown])
        text = self._decoder.decode(self._tokens)
        self._shown = len(self._tokens)
        return text[len(before) :]
