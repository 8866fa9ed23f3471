"""vLLM's CPU build behind the benchmark's protocol: plain, or its n-gram method."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from importlib.metadata import version

from vllm import LLM, SamplingParams
from wire import About, Answer, NotMeasured, PassTimes, Setting, serve

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


class VllmPeer:
    def __init__(self, setting: Setting) -> None:
        speculation = {"plain": None, "ngram": NGRAM}[setting.mode]
        self._llm = LLM(
            model=setting.model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=setting.context,
            max_num_seqs=1,
            speculative_config=speculation,
        )
        self._ids = 0

    def about(self) -> About:
        packages = {name: version(name) for name in ("vllm-cpu", "torch")}
        note = "end tokens are ignored, not banned: an answer may differ after one"
        return About(packages, ["dtype bfloat16", "enforce_eager"], note)

    def generate(self, prompt: list[int], max_tokens: int) -> Answer:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        engine, self._ids = self._llm.llm_engine, self._ids + 1
        begin = time.perf_counter()
        engine.add_request(str(self._ids), {"prompt_token_ids": prompt}, params)
        tokens: list[int] = []
        first = last = 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                last = (time.perf_counter() - begin) * 1000
                first = first or last
        return Answer(tokens, first, last)

    def pass_ms(self, rows: Sequence[int]) -> PassTimes:
        raise NotMeasured("vLLM offers no pass of a chosen number of rows")

    def close(self) -> None:
        return


if __name__ == "__main__":
    serve(VllmPeer)
