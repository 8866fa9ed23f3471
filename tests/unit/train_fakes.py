"""A tiny target on disk and a little data for it, for the tests of training."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from models_files import write_folder
from torch import Tensor

from outrider.drafters.heads import runnable, target_head_rows
from outrider.models.heads.fit import folder_facts
from outrider.models.load import LoadedModel, load_model
from outrider.train.config import TrainConfig
from outrider.train.heads import HeadModule
from outrider.train.learners import HeadLearner
from outrider.train.prepare import DataConfig, TrainingData, prepare
from outrider.train.prompts import TrainPrompt, make_prompt
from outrider.train.samples import AnswerConfig
from outrider.train.setup import (
    draft_vocabulary,
    frozen_parts,
    initial_tensors,
    new_head,
    stored_features,
)

LAYERS = 4
FEATURES = stored_features(LAYERS)
WIDTH = 64
VOCAB = 200
FAST = TrainConfig(
    epochs=4.0,
    rows=768,
    unroll=2,
    bf16=False,
    evaluate_every=10**6,
    save_every=10**6,
    muon_rate=0.02,
)


@cache
def tiny_model(folder: Path) -> LoadedModel:
    """A tiny llama with a byte tokenizer and a chat template, written once."""
    path = folder / "mine"
    if not path.exists():
        write_folder(path, num_hidden_layers=LAYERS)
    return load_model(path, weights="fp32", device="cpu")


def prompts(count: int) -> list[TrainPrompt]:
    """Short user turns, all different."""
    return [make_prompt("test", [{"role": "user", "content": f"say {n}"}]) for n in range(count)]


def data_config(**answers: object) -> DataConfig:
    plain = AnswerConfig(max_tokens=40, max_prompt=64, temperatures=(0.0, 1.0))
    return DataConfig(tokens=500, slots=16, answers=replace(plain, **answers))  # type: ignore[arg-type]


@cache
def tiny_data(folder: Path, count: int = 40) -> TrainingData:
    """Answers of the tiny target with all features."""
    model = tiny_model(folder)
    return prepare(
        model.target,
        model.tokenizer,
        folder / f"data-{count}",
        data_config(),
        features=FEATURES,
        width=WIDTH,
        prompts=prompts(count),
    )


def learner(
    style: str, model: LoadedModel, data: TrainingData, config: TrainConfig, **flags: object
) -> tuple[HeadLearner, Tensor]:
    """A fresh head and its draft vocabulary."""
    target = runnable(model.target)
    draft_tokens = draft_vocabulary(data.samples, size=VOCAB, vocab_size=target.vocab_size)
    facts = folder_facts(model.source, name="mine", tokenizer=model.tokenizer)
    head = new_head(style, target, facts, draft_vocab_size=VOCAB, **flags)  # type: ignore[arg-type]
    frozen = frozen_parts(target, target_head_rows(target, model.source, draft_tokens))
    module = HeadModule(head, initial_tensors(head, frozen, seed=0))
    made = HeadLearner(
        module, frozen, config, stored=data.store.features, draft_tokens=draft_tokens
    )
    return made, draft_tokens


class ShiftedStore:
    """A store whose rows are off by one: a classical mis-wiring."""

    def __init__(self, data: TrainingData, by: int = 1) -> None:
        self._store, self._by = data.store, by
        self.features = data.store.features

    def prefetch(self, samples: object) -> None:
        pass

    def get(self, sample: str) -> Tensor:
        return torch.roll(self._store.get(sample), self._by, 0)
