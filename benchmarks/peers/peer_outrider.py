"""Outrider behind the benchmark's protocol: plain, or with one of its drafters (the mode)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from wire import About, Answer, PassTimes, Setting, serve

from outrider.core.sampling import SamplingParams
from outrider.drafters.table import Setting as DrafterSetting
from outrider.drafters.table import build_drafter
from outrider.engine import Engine, EngineConfig
from outrider.engine.costs import CONTEXT, measure
from outrider.models.load import load_model
from outrider.records.manifest import versions


class OutriderPeer:
    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(setting.threads)
        self._loaded = load_model(setting.model, weights=setting.options["weights"])
        target = self._loaded.target
        self._drafter = "none" if setting.mode == "plain" else setting.mode
        context = min(setting.context, target.context_length)
        place = DrafterSetting(
            target,
            self._loaded.tokenizer,
            sequences=1,
            context=context,
            source=self._loaded.source,
        )
        drafters = {self._drafter: build_drafter(self._drafter, place)}
        config = EngineConfig(slots=1, context=context, reuse_prefix=False)
        self._engine = Engine(target, drafters=drafters, config=config)

    def about(self) -> About:
        choice = self._loaded.choice
        return About(versions(), [f"weights {choice.weights}", choice.why])

    def generate(self, prompt: list[int], max_tokens: int) -> Answer:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, min_tokens=max_tokens)
        # A tenant of its own keeps one answer out of the store that the next one drafts from.
        tenant = f"run-{time.monotonic_ns()}"
        request = self._engine.add(prompt, params, drafter=self._drafter, tenant=tenant)
        while self._engine.has_work:
            self._engine.step()
        done = self._engine.take(request)
        if done.ttft_s is None:
            raise RuntimeError(f"no token came: {done.finish_reason} {done.error or ''}")
        return Answer(list(done.tokens), done.ttft_s * 1000, done.e2e_s * 1000)

    def pass_ms(self, rows: Sequence[int]) -> PassTimes:
        target = self._loaded.target
        cache = target.new_cache(slots=1, length=1024)
        times = measure(target, cache, slot=0, rows=rows, repeats=15)
        return PassTimes(times, f"best of 15 passes behind {CONTEXT} positions, logits of all rows")

    def close(self) -> None:
        return


if __name__ == "__main__":
    serve(OutriderPeer)
