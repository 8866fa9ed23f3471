"""OpenVINO GenAI behind the benchmark's protocol: plain, or prompt lookup. Reads GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
import openvino
import openvino_genai
from wire import About, Answer, NotMeasured, PassTimes, Setting, Stamps, serve

LOOKUP_TOKENS = 5  # the library's own default
LOOKUP_NGRAM = 3


class _Streamer(openvino_genai.StreamerBase):
    def __init__(self) -> None:
        super().__init__()
        self.stamps = Stamps()

    def write(self, token: int | Sequence[int]) -> openvino_genai.StreamingStatus:
        self.stamps.mark()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        return


class OpenVinoPeer:
    def __init__(self, setting: Setting) -> None:
        self._lookup = {"plain": False, "lookup": True}[setting.mode]
        options: dict[str, object] = {"INFERENCE_NUM_THREADS": setting.threads}
        if self._lookup:
            options["prompt_lookup"] = True
        self._pipeline = openvino_genai.LLMPipeline(setting.model, "CPU", **options)

    def about(self) -> About:
        packages = ("openvino", "openvino-genai")
        note = "KV cache and activation precision as the library chooses"
        return About({name: version(name) for name in packages}, [], note)

    def generate(self, prompt: list[int], max_tokens: int) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        if self._lookup:
            config.num_assistant_tokens = LOOKUP_TOKENS
            config.max_ngram_size = LOOKUP_NGRAM
        ids = np.array([prompt], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        streamer = _Streamer()
        result = self._pipeline.generate(inputs, config, streamer)
        return streamer.stamps.answer(list(result.tokens[0]))

    def pass_ms(self, rows: Sequence[int]) -> PassTimes:
        raise NotMeasured("OpenVINO GenAI offers no pass of a chosen number of rows")

    def close(self) -> None:
        return


if __name__ == "__main__":
    serve(OpenVinoPeer)
