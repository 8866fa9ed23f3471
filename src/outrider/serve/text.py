"""How an answer's special tokens are shown where a client has to see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.models.tokenizer import Decoder, TextModel


class KeepMarkers:
    """A decoder that shows some special tokens as they are written, for tool calls that begin
    with one."""

    def __init__(self, inner: Decoder, markers: Mapping[int, str]) -> None:
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


def call_decoder(text: TextModel, markers: Sequence[str]) -> KeepMarkers | None:
    """What shows those of the markers that are special tokens of this model; `None` if none is."""
    special = text.special_tokens
    found = {special[marker]: marker for marker in markers if marker in special}
    return KeepMarkers(text, found) if found else None
