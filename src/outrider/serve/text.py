"""How an answer's special tokens are shown where a client has to see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.models.tokenizer import Decoder


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
