"""Requests that find out whether an engine samples what it says: a client's prompt and sampler,
and nothing else that would change what may come.

The end of an answer is not told as a token, so probes run past it; defaults of the engine's own are
switched off, so that temperature, top-k and top-p are all that there is. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from outrider.backends.connect import DIALECTS
from outrider.core.law import Setting
from outrider.rollout.sampled import TOP
from outrider.serve.gateway.lanes import Lane, Request
from outrider.serve.wire import encode_json

LENGTH: Final = 16  # tokens of a probe: several steps with guesses, and little work
HOTTEST: Final = 2.0


def law_probe(request: Request, lane: Lane) -> tuple[Request, Setting] | None:
    """The probe of a client's request, and the setting that its tokens are drawn with.

    `None` where the request is greedy, where its law could not be known from the likeliest tokens
    alone, or where it is not known of the engine what its log-probabilities mean.
    """
    dialect = DIALECTS.get("outrider" if lane.kind == "embedded" else lane.kind)
    setting = setting_of(request.body)
    if dialect is None or dialect.sampling_off is None or "logprobs" in lane.lacking:
        return None
    if setting is None or (dialect.scaled_logprobs and setting != Setting(setting.name, 1.0)):
        return None
    key = "messages" if request.chat else "prompt"
    if key not in request.body:
        return None
    body: dict[str, Any] = {
        "model": request.body["model"],
        key: request.body[key],
        "max_tokens": LENGTH,
        **dialect.sampling_off,
        **dialect.by_id,
        "temperature": setting.temperature,
        "top_p": setting.top_p,
        "ignore_eos": True,
        **({"logprobs": True, "top_logprobs": TOP} if request.chat else {"logprobs": TOP}),
    }
    if setting.top_k:
        body["top_k"] = setting.top_k
    return replace(request, body=body, raw=encode_json(body), seed=None), setting


def setting_of(body: Mapping[str, Any]) -> Setting | None:
    """The sampler that a request asks for; `None` for greedy, for a hot one without a top-k, whose
    hidden mass nothing bounds, and for what is no number."""
    temperature = _number(body.get("temperature"), 1.0)
    top_p, top_k = _number(body.get("top_p"), 1.0), _number(body.get("top_k"), 0)
    if temperature is None or top_p is None or top_k is None:
        return None
    k = int(top_k) if 0 < top_k < TOP else 0
    if top_k >= TOP or not 0 < temperature <= HOTTEST or not 0 < top_p <= 1:
        return None
    if temperature > 1 and not k:
        return None
    return Setting("as asked", float(temperature), top_k=k, top_p=float(top_p))


def _number(value: object, default: float) -> float | None:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value
