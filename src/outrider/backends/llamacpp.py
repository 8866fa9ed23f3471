"""llama.cpp's server: facts of 0.5.0-dev of October 2026.

An answer's `timings` tell drafted and accepted tokens, and nothing of them where nothing was
drafted; the number of steps is not sent, so there is no histogram and none is invented. Counters
move when a request has finished.
"""

from __future__ import annotations

from outrider.backends.base import RESPONSE, Acceptance
from outrider.backends.dialect import CounterNames, Dialect, Json, TokenizeCall, count, inner

KIND = "llamacpp"


def read_acceptance(event: Json) -> Acceptance | None:
    """From `timings`; drafted and accepted tokens that are absent there are none."""
    told = inner(event, "timings")
    if told is None or "predicted_n" not in told:
        return None
    drafted, accepted = count(told.get("draft_n", 0)), count(told.get("draft_n_accepted", 0))
    if drafted is None or accepted is None or accepted > drafted:
        return None
    nothing = drafted == 0
    return Acceptance(
        engine=KIND,
        source=RESPONSE,
        accepted=accepted,
        drafted=drafted,
        steps=0 if nothing else None,
        histogram={} if nothing else None,
    )


def _version(told: Json) -> str | None:
    build = told.get("build_info")
    return build if isinstance(build, str) else None


LLAMACPP = Dialect(
    kind=KIND,
    version_paths=("/props",),
    read_version=_version,
    owners=("llamacpp",),
    read=read_acceptance,
    counters=CounterNames(
        drafts="llamacpp:spec_decode_num_drafts_total",
        drafted="llamacpp:spec_decode_num_draft_tokens_total",
        accepted="llamacpp:spec_decode_num_accepted_tokens_total",
        per_position="llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
        prompt_tokens="llamacpp:prompt_tokens_total",
        output_tokens="llamacpp:tokens_predicted_total",
        running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
    ),
    tokenize=TokenizeCall(
        path="/tokenize",
        text=lambda model, text: {"content": text, "add_special": True, "parse_special": True},
    ),
    notes=lambda version: ("llama.cpp ignores speculative.* fields of a request without an error",),
)
