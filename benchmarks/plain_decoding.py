"""Plain decoding against transformers, and the engine against a bare loop: one run, interleaved.

    python benchmarks/plain_decoding.py --target smollm2-135m --weights bf16 --json FILE

Four sides decode the same greedy continuation of the same prompts, one after the other, in an
order that rotates: transformers' `generate`; a bare loop of forward pass and argmax on our target
(a build without speculation, scheduler or records); the engine with no drafter; and the engine with
a drafter that never has a guess. Figures are medians of TPOT over prompts and rounds, in
milliseconds; the first round warms up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.none import NoneDrafter
from outrider.engine import Engine, EngineConfig
from outrider.evaluate.workloads import load_workload
from outrider.models.load import LoadedModel, load_model
from outrider.models.target import Segment
from outrider.records.files import write_json
from outrider.records.manifest import TargetIdentity, run_manifest

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Side = Callable[[Sequence[int], int], tuple[float, list[int]]]


def transformers_side(loaded: LoadedModel) -> Side:
    """Milliseconds per token of transformers' own generation loop, timed by a streamer."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Stamps(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            return

    model = AutoModelForCausalLM.from_pretrained(
        loaded.source, dtype=TORCH_DTYPES[loaded.choice.weights], local_files_only=True
    ).eval()

    def side(prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        stamps = Stamps()
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                streamer=stamps,
            )
        times = stamps.times[1:]  # the first stamp is the prompt's
        return (times[-1] - times[0]) / (len(times) - 1) * 1000, output[0, len(prompt) :].tolist()

    return side


def bare_side(loaded: LoadedModel) -> Side:
    """A forward pass and an argmax, and nothing else."""
    target = loaded.target

    @torch.inference_mode()
    def side(prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        cache = target.new_cache(slots=1, length=len(prompt) + tokens)
        prefix, output = tuple(prompt[:-1]), [prompt[-1]]
        begin = 0.0
        for index in range(tokens):
            segment = Segment(0, prefix, DraftTree.root_only(output[-1]))
            row = target.forward([segment], cache).logits[0][0].float()
            row[list(target.end_tokens)] = -torch.inf
            output.append(int(row.numpy().argmax()))
            cache.keep(0, range(segment.rows))
            prefix = ()
            if index == 0:
                begin = time.perf_counter()
        return (time.perf_counter() - begin) / (tokens - 1) * 1000, output[1:]

    return side


def engine_side(engine: Engine, drafter: str) -> Side:
    def side(prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens)
        [result] = engine.generate([prompt], params, drafter=drafter)
        assert result.ttft_s is not None
        return (result.e2e_s - result.ttft_s) / (tokens - 1) * 1000, list(result.tokens)

    return side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--weights", default="bf16", choices=sorted(TORCH_DTYPES))
    parser.add_argument("--kernels", default="torch", choices=("torch", "native"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_model(options.target, weights=options.weights, kernels=options.kernels)
    manifest = run_manifest(
        seed=None,
        threads=options.threads,
        target=TargetIdentity(loaded.target.name, loaded.target.fingerprint, loaded.choice.weights),
        options={k: str(v) for k, v in vars(options).items()},
    )
    config = EngineConfig(context=2048, reuse_prefix=False)
    engine = Engine(loaded.target, drafters={"silent": NoneDrafter()}, config=config)
    sides: dict[str, Side] = {
        "transformers": transformers_side(loaded),
        "bare_loop": bare_side(loaded),
        "engine_none": engine_side(engine, "none"),
        "engine_silent_drafter": engine_side(engine, "silent"),
    }
    prompts = [loaded.tokenizer.chat(p.chat()) for p in load_workload("builtin:chat")]
    times: dict[str, list[float]] = {name: [] for name in sides}
    agree: dict[str, int] = dict.fromkeys(sides, 0)
    names = list(sides)
    for number in range(options.rounds + 1):
        for index, prompt in enumerate(prompts[: options.prompts]):
            turn = (number + index) % len(names)
            outputs = {}
            for name in names[turn:] + names[:turn]:
                milliseconds, outputs[name] = sides[name](prompt, options.tokens)
                if number:
                    times[name].append(milliseconds)
            for name, tokens in outputs.items():
                agree[name] += bool(number) and tokens == outputs["engine_none"]
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = {name: min(values) for name, values in times.items()}
    document = {
        "manifest": manifest.finish().to_dict(),
        "tpot_ms_median": medians,
        "tpot_ms_best": best,
        "runs_per_side": len(times["engine_none"]),
        "same_tokens_as_engine": agree,
        "ratios_of_medians": {
            "engine_none / transformers": medians["engine_none"] / medians["transformers"],
            "engine_none / bare_loop": medians["engine_none"] / medians["bare_loop"],
            "engine_silent_drafter / engine_none": medians["engine_silent_drafter"]
            / medians["engine_none"],
        },
    }
    for key in ("tpot_ms_median", "tpot_ms_best", "same_tokens_as_engine", "ratios_of_medians"):
        print(key, {k: round(v, 3) for k, v in document[key].items()})
    if options.json:
        write_json(options.json, document)


if __name__ == "__main__":
    main()
