"""From the end of a try to what a verdict counts: times, rates, guesses, quality."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.rollout.assign import RequestFacts
from outrider.rollout.tripwires import Event
from outrider.rollout.verdict import Observation
from outrider.serve.gateway.attempt import Result
from outrider.serve.gateway.parity import loops
from outrider.serve.gateway.reading import Reading

# Kinds of fault that say something of the engine, and the wire that they touch.
WIRES: Mapping[str, Event] = {
    "connect": "server_errors",
    "broken": "server_errors",
    "http": "server_errors",
    "malformed": "server_errors",
    "engine": "server_errors",
    "first byte": "stalled",
    "between": "stalled",
    "total": "stalled",
    "out_of_memory": "out_of_memory",
    "non_finite": "non_finite",
}


def observation(
    result: Result, facts: RequestFacts, *, body: Mapping[str, Any], request_id: str, at: float
) -> Observation:
    """One request of a cohort."""
    seen, acceptance = result.seen, result.seen.acceptance
    return Observation(
        at=at,
        prompt_type=facts.prompt_type,
        unit="" if facts.key.source == "request" else facts.key.hashed,
        outcome=result.outcome,
        ttft_ms=result.ttft_ms if body.get("stream") else None,
        tpot_ms=result.tpot_ms if body.get("stream") else None,
        e2e_ms=(result.end - result.begin) * 1000,
        prompt_tokens=seen.prompt_tokens,
        completion_tokens=seen.completion_tokens,
        finish_reason=seen.finish,
        accepted=None if acceptance is None else acceptance.accepted,
        drafted=None if acceptance is None else acceptance.drafted,
        steps=None if acceptance is None else acceptance.steps,
        repetitive=loops(seen.text()) if result.outcome == "ok" else None,
        valid=valid(seen, body) if result.outcome == "ok" else None,
        id=request_id,
    )


def valid(seen: Reading, body: Mapping[str, Any]) -> bool | None:
    """Do the answer's JSON and its tool arguments hold? `None` where there are none to look at, or
    where the length ended them."""
    if seen.finish == "length":
        return None
    if seen.calls:
        return all(name and _parses(arguments or "{}") for name, arguments in seen.calls.values())
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type") in ("json_object", "json_schema"):
        return _parses(seen.text())
    return None


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
