"""TensorRT-LLM's `trtllm-serve`: facts of its main branch of 2026; older releases tell less.

Answers tell acceptance per choice with `per_request_spec_decode_stats: true`; nothing at all where
nothing was drafted. `/metrics` is a queue that reading empties, so the Prometheus page is read.
"""

from __future__ import annotations

from outrider.backends.base import RESPONSE, Acceptance, consistent
from outrider.backends.dialect import (
    CounterNames,
    Dialect,
    Json,
    count,
    counts,
    first_choice,
    inner,
)

KIND = "tensorrt_llm"


def read_acceptance(event: Json) -> Acceptance | None:
    """From the first choice's `speculative_decoding`; `None` where it is absent."""
    told = inner(first_choice(event), "speculative_decoding")
    if told is None or "total_draft_tokens" not in told:
        return None
    accepted = count(told.get("total_accepted_draft_tokens"))
    histogram, steps = counts(told.get("acceptance_histogram")), count(told.get("num_spec_steps"))
    if accepted is None:
        return None
    return Acceptance(
        engine=KIND,
        source=RESPONSE,
        accepted=accepted,
        drafted=count(told.get("total_draft_tokens")),
        steps=steps,
        histogram=consistent(histogram, steps=steps, accepted=accepted),
        width=count(told.get("num_spec_tokens")),
    )


TENSORRT_LLM = Dialect(
    kind=KIND,
    version_paths=("/version",),
    owners=("tensorrt_llm", "trtllm"),
    read=read_acceptance,
    metrics_path="/prometheus/metrics",
    counters=CounterNames(
        drafted="trtllm_spec_decode_num_draft_tokens_total",
        accepted="trtllm_spec_decode_num_accepted_tokens_total",
        requests="trtllm_request_success_total",
        running="trtllm_num_requests_running",
        waiting="trtllm_num_requests_waiting",
        cache_use="trtllm_kv_cache_utilization",
    ),
    notes=lambda version: (
        "TensorRT-LLM: the keys of draft_len_schedule were read differently in older releases",
    ),
)
