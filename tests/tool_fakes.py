"""A target that writes a given text, and texts with tool calls in every format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.testing.fakes import END, START, ByteTokenizer
from outrider.testing.serving import FakeModel, TextTarget

MARK = 300  # "[TOOL_CALLS]", as the special token that Mistral's tokenizers have
VOCAB = 301
HEADER = list(b"assistant\n")

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("weather", "add")
]


class SpecialTokenizer(ByteTokenizer):
    """Bytes, and a special token that begins tool calls; the template says what the test wants."""

    vocab_size = VOCAB

    def __init__(self, template: str) -> None:
        self._template = template
        self.told: Any = None
        self.variables: Any = None

    @property
    def template(self) -> str:
        return self._template

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return {**super().special_tokens, "[TOOL_CALLS]": MARK}

    def token_bytes(self) -> list[bytes]:
        return [*super().token_bytes(), *[b""] * (MARK - 259), b"[TOOL_CALLS]"]

    def chat(self, messages: Any, add_generation_prompt: bool = True, **more: Any) -> list[int]:
        self.told, self.variables = more.get("tools"), more.get("variables")
        self.messages = messages
        return super().chat(messages, add_generation_prompt)


class ScriptTarget(TextTarget):
    """Writes a script after the last opening of its turn, then ends."""

    script: Sequence[int] = ()

    def _logits(self, seen_T2: Any) -> Tensor:
        tokens = [int(t) for t in seen_T2[np.argsort(seen_T2[:, 1], kind="stable"), 0]]
        start = len(tokens) - 1 - tokens[::-1].index(START) + 1 + len(HEADER)
        place = len(tokens) - start
        wanted = self.script[place] if place < len(self.script) else END
        row = torch.zeros(self.vocab_size, dtype=torch.float64)
        row[wanted] = 50.0
        return row


def script(text: str) -> list[int]:
    parts = text.split("[TOOL_CALLS]")
    tokens = list(parts[0].encode())
    for part in parts[1:]:
        tokens += [MARK, *part.encode()]
    return tokens


def script_model(text: str, template: str) -> FakeModel:
    target = ScriptTarget(vocab_size=VOCAB, context_length=4096, end_tokens=frozenset({END}))
    target.script = script(text)
    return FakeModel(target, SpecialTokenizer(template))


W, A = '{"place": "Paris", "note": "a } and \\"b\\""}', '{"a": 1, "b": [2, 3]}'
ONE, TWO = f'{{"name": "weather", "arguments": {W}}}', f'{{"name": "add", "arguments": {A}}}'
LLAMA = ONE.replace("arguments", "parameters"), TWO.replace("arguments", "parameters")
WRITTEN = {
    "hermes": (
        "tools <tool_call>",
        f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>",
        "Let me see.",
    ),
    "llama3": ("tools <|python_tag|>", f"{LLAMA[0]}; {LLAMA[1]}", None),
    "mistral": ("tools [TOOL_CALLS]", f"[TOOL_CALLS] [{ONE}, {TWO}]", None),
    "mistral names": (
        "tools [TOOL_CALLS]",
        f"[TOOL_CALLS]weather{W}[TOOL_CALLS]add{A}",
        None,
    ),
}
