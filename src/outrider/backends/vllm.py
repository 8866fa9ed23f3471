"""vLLM: facts of 0.32 and 0.33.

Its steps are those that had a guess; the acceptance length it prints counts the next token, its
rate does not; guesses that a grammar cut are not among the drafted ones. Answers tell acceptance
where the server runs with `--per-request-spec-decode-metrics`.
"""

from __future__ import annotations

from typing import Any

from outrider.backends.base import RESPONSE, Acceptance, dense
from outrider.backends.dialect import (
    CounterNames,
    Dialect,
    Json,
    TokenizeCall,
    count,
    counts,
    inner,
    version_tuple,
)

KIND = "vllm"


def read_acceptance(event: Json, *, engine: str = KIND) -> Acceptance | None:
    """From `metrics.speculative_decoding`; `None` where it is absent or malformed."""
    told = inner(event, "metrics", "speculative_decoding")
    if told is None:
        return None
    accepted, drafted = (
        count(told.get("num_accepted_draft_tokens")),
        count(told.get("num_draft_tokens")),
    )
    steps, histogram = count(told.get("num_spec_steps")), counts(told.get("acceptance_histogram"))
    if accepted is None or drafted is None or steps is None:
        return None
    if histogram is not None and (
        sum(histogram) != steps or sum(j * n for j, n in enumerate(histogram)) != accepted
    ):
        return None
    return Acceptance(
        engine=engine,
        source=RESPONSE,
        accepted=accepted,
        drafted=drafted,
        steps=steps,
        histogram=None if histogram is None else dense(histogram),
        per_step_accepted=counts(told.get("per_step_accepted")),
        per_step_drafted=counts(told.get("per_step_drafted")),
        width=count(told.get("num_spec_tokens")),
    )


def _chat_tokens(model: str, messages: Any) -> Json:
    return {"model": model, "messages": list(messages), "add_generation_prompt": True}


def notes(version: str | None) -> tuple[str, ...]:
    """What to know of a version."""
    if version is None:
        return ()
    number = version_tuple(version)
    found = []
    if number and number < (0, 29):
        found.append(f"vLLM {version} tells no acceptance per request; counters are used")
    if (0, 32) <= number < (0, 34):
        found.append(
            "vLLM's CPU build samples wrongly with speculation above temperature 0: trust greedy "
            "only, where this is one"
        )
    return tuple(found)


VLLM = Dialect(
    kind=KIND,
    version_paths=("/version",),
    owners=("vllm",),
    read=read_acceptance,
    counters=CounterNames(
        drafts="vllm:spec_decode_num_drafts_total",
        drafted="vllm:spec_decode_num_draft_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        per_position="vllm:spec_decode_num_accepted_tokens_per_pos_total",
        requests="vllm:request_success_total",
        prompt_tokens="vllm:prompt_tokens_total",
        output_tokens="vllm:generation_tokens_total",
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        cache_use="vllm:kv_cache_usage_perc",
        preemptions="vllm:num_preemptions_total",
    ),
    tokenize=TokenizeCall(
        path="/tokenize",
        text=lambda model, text: {"model": model, "prompt": text},
        chat=_chat_tokens,
    ),
    sampling_off={"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    by_id={"return_tokens_as_token_ids": True},
    oldest=(0, 10),
    notes=notes,
)
