"""Outrider's own server. It speaks vLLM's fields, and says more: which profile and drafter ran,
whether the rule was lossless, and why nothing was guessed. Its steps include those without a guess.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.backends.base import Acceptance
from outrider.backends.dialect import CounterNames, Dialect, Json, inner
from outrider.backends.vllm import VLLM, read_acceptance

KIND = "outrider"
TOLD = ("profile", "drafter", "lossless", "reason")


def _read(event: Json) -> Acceptance | None:
    found = read_acceptance(event, engine=KIND)
    told = inner(event, "metrics", "speculative_decoding")
    if found is None or told is None:
        return None
    said = {name: told[name] for name in TOLD if told.get(name) is not None}
    # What it drafts may be trees, whose nodes do not tell the depth of a refusal.
    return replace(found, counts_plain_steps=True, per_step_drafted=None, told=said)


OWN = Dialect(
    kind=KIND,
    version_paths=("/version",),
    owners=("outrider",),
    read=_read,
    counters=CounterNames(
        drafts="outrider_spec_decode_drafts_total",
        drafted="outrider_spec_decode_draft_tokens_total",
        accepted="outrider_spec_decode_accepted_tokens_total",
        per_position="outrider_spec_decode_accepted_tokens_per_pos_total",
        requests="outrider_requests_total",
        prompt_tokens="outrider_prompt_tokens_total",
        output_tokens="outrider_output_tokens_total",
        running="outrider_requests_running",
        waiting="outrider_requests_waiting",
        cache_use="outrider_kv_cache_usage_ratio",
    ),
    tokenize=VLLM.tokenize,
    sampling_off={"top_k": 0, "min_p": 0.0},
    by_id=VLLM.by_id,
)
