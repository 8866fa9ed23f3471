"""Hugging Face transformers behind the benchmark's protocol: plain, or prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer
from wire import About, Answer, PassTimes, Setting, Stamps, serve

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LOOKUP_TOKENS = 10
CONTEXT = 128
REPEATS = 10


class _Streamer(BaseStreamer):
    """Stamps every arrival; the first one is the prompt's and is left out."""

    def __init__(self) -> None:
        self.stamps = Stamps()
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._seen_prompt:
            self.stamps.mark()
        self._seen_prompt = True

    def end(self) -> None:
        return


class TransformersPeer:
    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(setting.threads)
        self._dtype = setting.options["weights"]
        self._lookup = {"lookup": LOOKUP_TOKENS, "plain": None}[setting.mode]
        self._model = AutoModelForCausalLM.from_pretrained(
            setting.model, dtype=DTYPES[self._dtype], local_files_only=True
        ).eval()

    def about(self) -> About:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        return About(versions, [f"dtype {self._dtype}", "eager generate()"])

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int) -> Answer:
        ids, streamer = torch.tensor([prompt]), _Streamer()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            prompt_lookup_num_tokens=self._lookup,
            streamer=streamer,
        )
        return streamer.stamps.answer(output[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def pass_ms(self, rows: Sequence[int]) -> PassTimes:
        cache = DynamicCache(config=self._model.config)
        self._model(torch.ones((1, CONTEXT), dtype=torch.long), past_key_values=cache)
        best: dict[int, float] = {}
        for _ in range(REPEATS):
            for count in rows:
                begin = time.perf_counter()
                self._model(torch.ones((1, count), dtype=torch.long), past_key_values=cache)
                elapsed = (time.perf_counter() - begin) * 1000
                best[count] = min(elapsed, best.get(count, elapsed))
                cache.crop(-count)
        method = f"best of {REPEATS} passes behind {CONTEXT} positions, logits of all rows"
        return PassTimes(best, method)

    def close(self) -> None:
        return


if __name__ == "__main__":
    serve(TransformersPeer)
