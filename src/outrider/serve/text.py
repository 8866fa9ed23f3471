"""What the server asks of a tokenizer, and how single tokens look on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class TextModel(Protocol):
    """A tokenizer with a chat template.

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

    def decode(self, ids: Sequence[int]) -> str: ...

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


class KeepMarkers:
    """A decoder that shows some special tokens as they are written, for tool calls that begin
    with one."""

    def __init__(self, inner: TextModel, markers: Mapping[int, str]) -> None:
        self._inner = inner
        self._markers = dict(markers)

    def decode(self, ids: Sequence[int]) -> str:
        text = ""
        run: list[int] = []
        for token in ids:
            if token in self._markers:
                text += (self._inner.decode(run) if run else "") + self._markers[token]
                run = []
            else:
                run.append(token)
        return text + (self._inner.decode(run) if run else "")
