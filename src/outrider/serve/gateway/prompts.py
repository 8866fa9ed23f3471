"""Do two engines read prompts alike? Asked with a few conversations.

Another tokenizer or chat template shows in how many tokens a prompt has, whatever the engine.
Copies of clients' requests show it too (`parity.other_prompt`); this finds it where none are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any, Final

from outrider.serve.gateway.lanes import JSON_BODY, Lane
from outrider.serve.gateway.parity import unequal_prompts
from outrider.serve.gateway.upstream import UpstreamFault
from outrider.serve.wire import encode_json

SECONDS: Final = 20.0  # for all samples together
MOST_BYTES: Final = 1 << 16  # of an answer of one token
SAMPLES: Final = (
    "Count: 1234567890, 3.14159, 2026-11-30.",
    "Größe naïve café \u4f60\u597d \u043f\u0440\u0438\u0432\u0435\u0442 \U0001f600",
    "def f(x):\n    return  {'a': x ** 2}\t# tabs\n\n\n",
)


async def prompt_tokens(lane: Lane, *, model: str) -> list[int | None]:
    """How many tokens each sample has for a lane's engine; `None` where it does not tell."""
    counts: list[int | None] = [None] * len(SAMPLES)
    with contextlib.suppress(TimeoutError, UpstreamFault):
        async with asyncio.timeout(SECONDS):
            for place, text in enumerate(SAMPLES):
                counts[place] = await _count(lane, text, model=model)
    return counts


def read_otherwise(one: Sequence[int | None], two: Sequence[int | None]) -> str:
    """Where two engines' counts differ, in a line; empty where they agree or do not tell."""
    differences = (
        unequal_prompts(f"sample prompt {place}", a, b)
        for place, (a, b) in enumerate(zip(one, two, strict=True), start=1)
    )
    return next(filter(None, differences), "")


async def _count(lane: Lane, text: str, *, model: str) -> int | None:
    messages = [{"role": "user", "content": text}]
    asked = {"model": lane.model or model, "messages": messages, "max_tokens": 1, "temperature": 0}
    headers = {**JSON_BODY, **lane.headers}
    reply = await lane.upstream.send("/v1/chat/completions", encode_json(asked), headers)
    try:
        if reply.status != 200:
            return None
        body = b""
        while len(body) <= MOST_BYTES and (piece := await reply.read()):
            body += piece
    finally:
        await reply.close()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        told: Any = json.loads(body)["usage"]["prompt_tokens"]
        if isinstance(told, int) and not isinstance(told, bool):
            return told
    return None
