"""SGLang: facts of 0.5.23.

Every verify call is a step. Its width counts the root, and what it calls proposed is calls times
(width - 1), whatever was guessed: a nominal number. Its gauges are means over a window and cannot
be differenced, so without the answer's own details there is no acceptance.
"""

from __future__ import annotations

from typing import Any

from outrider.backends.base import RESPONSE, Acceptance, consistent
from outrider.backends.dialect import (
    CounterNames,
    Dialect,
    Json,
    TokenizeCall,
    count,
    counts,
    first_choice,
    inner,
)

KIND = "sglang"


def read_acceptance(event: Json) -> Acceptance | None:
    """From `sglext.spec_tokens_details` or `meta_info`; `None` where it is absent."""
    told = (
        inner(event, "sglext", "spec_tokens_details")
        or inner(first_choice(event), "sglext", "spec_tokens_details")
        or inner(event, "meta_info")
    )
    if told is None or "spec_verify_ct" not in told:
        return None
    steps, accepted = count(told.get("spec_verify_ct")), count(told.get("spec_num_correct_drafts"))
    histogram = counts(told.get("spec_correct_drafts_histogram"))
    if steps is None or accepted is None:
        return None
    return Acceptance(
        engine=KIND,
        source=RESPONSE,
        accepted=accepted,
        drafted=count(told.get("spec_num_proposed_drafts")),
        steps=steps,
        histogram=consistent(histogram, steps=steps, accepted=accepted),
        drafted_is_nominal=True,
    )


def _chat_tokens(model: str, messages: Any) -> Json:
    return {"model": model, "messages": list(messages)}


SGLANG = Dialect(
    kind=KIND,
    version_paths=("/server_info", "/get_server_info"),
    owners=("sglang",),
    extra_body={"return_spec_tokens_details": True},
    read=read_acceptance,
    counters=CounterNames(
        requests="sglang:num_requests_total",
        prompt_tokens="sglang:prompt_tokens_total",
        output_tokens="sglang:generation_tokens_total",
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        cache_use="sglang:token_usage",
        preemptions="sglang:num_retracted_reqs",
    ),
    tokenize=TokenizeCall(
        path="/tokenize",
        text=lambda model, text: {"model": model, "prompt": text},
        chat=_chat_tokens,
    ),
    sampling_off={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    scaled_logprobs=True,
    oldest=(0, 5),
    notes=lambda version: (
        "SGLang's drafted tokens are calls times width, not what was guessed",
        "SGLang on CPU, XPU and ROCm may answer sampled requests greedily without an error",
    ),
)
