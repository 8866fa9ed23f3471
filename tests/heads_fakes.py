"""Tiny targets and random heads for the tests of draft heads."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.sampling import SamplingParams
from outrider.engine import Engine, EngineConfig, FixedBudget
from outrider.models.heads.config import HeadConfig, TargetFacts
from outrider.models.heads.files import Head
from outrider.models.native import NativeTransformer
from outrider.models.tiny import tiny_config
from outrider.models.transformer import Transformer
from outrider.models.weights import random_tensors
from outrider.train.features import Recorder
from outrider.train.heads import HeadModule
from outrider.train.loop import TrainConfig, Trainer
from outrider.train.prepare import TrainingData
from outrider.train.samples import Sample
from outrider.train.setup import frozen_parts, initial_tensors, with_vocabulary

SEED = 5


def tiny_target(kernels: str) -> Transformer | NativeTransformer:
    """A tiny llama in fp32, on PyTorch or on the native kernels, with the same weights."""
    config = tiny_config("llama")
    if kernels == "torch":
        return Transformer.random(config, SEED)
    tensors = random_tensors(config, SEED)
    return NativeTransformer.build(
        config, tensors.__getitem__, precision="fp32", name="tiny", fingerprint="tiny"
    )


def head_config(kind: str = "eagle3", **changes: object) -> HeadConfig:
    """A head for `tiny_target`; its draft vocabulary is every other token."""
    config = tiny_config("llama")
    facts = TargetFacts("tiny", ("LlamaForCausalLM",), config.width, 3, config.vocab_size)
    values: dict[str, object] = {
        "kind": kind,
        "target": facts,
        "features": (1, 2, 3) if kind == "eagle3" else (3,),
        "width": config.width,
        "inner": 96,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "draft_vocab_size": 48,
        "context_length": 256,
    }
    if kind == "medusa":
        values |= {"medusa_heads": 3, "medusa_layers": 1}
    return HeadConfig(**{**values, **changes})  # type: ignore[arg-type]


def random_head(config: HeadConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of a size at which every part of the head matters."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.shapes().items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * values if "norm" in name else values / shape[-1] ** 0.5
    return tensors


def draft_tokens() -> Tensor:
    """The target ids of the draft vocabulary."""
    return torch.arange(0, 96, 2)


def head_rows(target: Transformer | NativeTransformer) -> Tensor:
    """Rows of the (tied) head for the draft vocabulary."""
    return target.weights.embedding[draft_tokens()].float()


@cache
def tiny_data(folder: Path) -> TrainingData:
    """Answers of the native tiny target to random prompts, with features for all kinds of heads."""
    target = tiny_target("native")
    data = TrainingData.open(folder, features=(1, 2, 3), width=target.config.width)
    recorder = Recorder((1, 2, 3))
    engine = Engine(
        target,
        drafters={"recorder": recorder},
        config=EngineConfig(slots=8, context=96, max_nodes=0, max_depth=0),
        budget=FixedBudget(nodes=0, depth=0),
    )
    draw = random.Random(0)
    for number in range(24):
        prompt = [draw.randrange(97) for _ in range(6)]
        params = SamplingParams(temperature=0.4 * (number % 2), max_tokens=40, seed=number)
        [answer] = engine.generate([prompt], params, drafter="recorder")
        tokens = (*prompt, *answer.tokens)
        sample = Sample(f"{number:08x}", "tiny", tokens, len(prompt), params.temperature, False)
        data.add(sample, recorder.take(tokens))
    return data


@cache
def trained_head(kind: str, folder: Path) -> Head:
    """A head for the tiny targets, trained for a second: some guesses are right, some are not."""
    target, data = tiny_target("torch"), tiny_data(folder / "data")
    flags = {"fc_norm": True, "norm_output": True} if kind == "eagle3.1" else {}
    config = head_config("eagle3" if kind == "eagle3.1" else kind, **flags)
    frozen = frozen_parts(target, head_rows(target))
    module = HeadModule(config, initial_tensors(config, frozen, seed=0))
    settings = TrainConfig(
        epochs=25, rows=256, unroll=2, bf16=False, evaluate_every=10**6, save_every=10**6
    )
    trainer = Trainer(
        module,
        frozen,
        data.samples,
        data.store,
        settings,
        draft_tokens=draft_tokens(),
        folder=folder / kind,
    )
    trainer.run()
    tensors = with_vocabulary(module.tensors(), draft_tokens(), config.target.vocab_size)
    return Head(config, tensors)
