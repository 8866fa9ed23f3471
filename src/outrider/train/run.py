"""A training run from a target to a folder that serves: data, gate, training, export.

`train_head` is what the command line calls. Everything lies in one working folder and is taken up
where it stopped: data, the run's checkpoint, its log. The result is the checkpoint with the best
acceptance in serving, written in the native layout with its provenance.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider import __version__
from outrider.drafters.heads import runnable, target_head_rows
from outrider.errors import InvalidParameter, TrainingFailed
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.files import Head, Precision, write_head
from outrider.models.heads.fit import folder_facts
from outrider.models.load import LoadedModel
from outrider.train import checkpoint
from outrider.train.acceptance import Evaluation, Probe
from outrider.train.features import FeatureStore
from outrider.train.heads import Frozen, HeadModule
from outrider.train.loop import BEST, Progress, TrainConfig, Trainer
from outrider.train.prepare import TrainingData
from outrider.train.samples import Sample
from outrider.train.setup import (
    draft_vocabulary,
    frozen_parts,
    initial_tensors,
    new_head,
    with_vocabulary,
)

GATE_AGREEMENT = 0.9


@dataclass(frozen=True)
class RunConfig:
    """What to train.

    Attributes:
        style: eagle, eagle3, eagle3.1, eagle3-token or medusa.
        draft_vocab_size: tokens that the head can guess.
        train: how.
        probes: how acceptance is measured; the first decides which checkpoint is best.
        held_out: prompts that it is measured on.
        gate_steps: steps of the one-sample gate; 0 leaves it out.
        precision: of the written weights.
        flags: of `HeadConfig`, over the style's.
    """

    style: str = "eagle3"
    draft_vocab_size: int = 4096
    train: TrainConfig = field(default_factory=TrainConfig)
    probes: dict[str, Probe] = field(default_factory=lambda: {"chain": Probe()})
    held_out: int = 24
    gate_steps: int = 150
    precision: Precision = "bf16"
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        folder: the head's, or `None` where the run stopped before its end.
        figures: of the best checkpoint.
    """

    folder: Path | None
    figures: dict[str, float]


def overfit_gate(
    module: HeadModule,
    frozen: Frozen,
    sample: Sample,
    store: FeatureStore,
    config: TrainConfig,
    *,
    draft_tokens: Tensor,
    folder: Path,
    steps: int,
) -> float:
    """Train a copy on one sample; a head that cannot memorise it is mis-wired.

    Returns:
        How often its first guess was the target's at the end.

    Raises:
        TrainingFailed: it did not memorise the sample.
    """
    single = replace(
        config,
        epochs=float(steps),
        evaluate_every=steps + 1,
        save_every=steps + 1,
        warm_up=0.05,
        muon_rate=max(config.muon_rate, 0.02),
    )
    copy = HeadModule(module.config, module.tensors())
    seen: list[Progress] = []
    trainer = Trainer(
        copy,
        frozen,
        [sample],
        store,
        single,
        draft_tokens=draft_tokens,
        folder=folder,
        report=seen.append,
        report_every=max(steps // 5, 1),
    )
    if trainer.step == 0:
        trainer.run()
    else:  # it was passed in an earlier session
        return 1.0
    reached = seen[-1].agreement[0]
    if reached < GATE_AGREEMENT:
        raise TrainingFailed(
            f"the head reached {reached:.2f} on the one sample of the gate after {steps} steps, "
            f"{GATE_AGREEMENT} is needed: its wiring or its learning rate is wrong"
        )
    return reached


def held_out_prompts(samples: Sequence[Sample], count: int) -> list[tuple[int, ...]]:
    """The prompts of held-out samples, spread over the families."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.family, []).append(sample)
    found: list[tuple[int, ...]] = []
    rank = 0
    while len(found) < count and any(rank < len(group) for group in families.values()):
        for group in families.values():
            if rank < len(group) and len(found) < count:
                found.append(group[rank].tokens[: group[rank].prompt_length])
        rank += 1
    return found


def train_head(
    loaded: LoadedModel,
    data: TrainingData,
    config: RunConfig,
    *,
    work: Path,
    out: Path,
    until: float | None = None,
    report: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] = lambda line: None,
    provenance: dict[str, Any] | None = None,
) -> Outcome:
    """Train a head on prepared data and write it.

    Args:
        work: folder of this run; taken up where it stopped.
        out: where the head goes; must not exist yet.
        until: stop with a checkpoint at this time (perf_counter).

    Raises:
        TrainingFailed: the gate was not passed, or a loss is not finite.
        InvalidParameter: no data, or a working folder of another run.
    """
    target = runnable(loaded.target)
    samples, held_out = data.split(False), data.split(True)
    if not samples or not held_out:
        raise InvalidParameter(
            f"{data.folder} holds {len(samples)} samples to train on and {len(held_out)} held out; "
            "both are needed: prepare more data"
        )
    draft_tokens = draft_vocabulary(
        samples,
        size=min(config.draft_vocab_size, target.vocab_size),
        vocab_size=target.vocab_size,
        always=target.end_tokens,
    )
    facts = folder_facts(loaded.source, name=loaded.spec, tokenizer=loaded.tokenizer)
    head_config = new_head(
        config.style, target, facts, draft_vocab_size=len(draft_tokens), **config.flags
    )
    frozen = frozen_parts(target, target_head_rows(target, loaded.source, draft_tokens))
    start = initial_tensors(head_config, frozen, seed=config.train.seed)
    module = HeadModule(head_config, start)
    extra = with_vocabulary({}, draft_tokens, target.vocab_size)
    if config.gate_steps and config.style != "medusa":
        longest = max(samples[:64], key=lambda s: len(s.answer))
        reached = overfit_gate(
            module,
            frozen,
            longest,
            data.store,
            config.train,
            draft_tokens=draft_tokens,
            folder=work / "gate",
            steps=config.gate_steps,
        )
        say(f"one-sample gate: {reached:.2f} of the first guesses are right")
    evaluate = Evaluation(
        loaded.target,
        list(held_out_prompts(held_out, config.held_out)),
        loaded.source,
        extra,
        config.probes,
    )
    begin = time.perf_counter()
    trainer = Trainer(
        module,
        frozen,
        samples,
        data.store,
        config.train,
        draft_tokens=draft_tokens,
        folder=work,
        evaluate=evaluate,
        report=report,
    )
    if not trainer.run(until=until):
        return Outcome(None, trainer.best)
    best, _ = checkpoint.load(work / BEST)
    facts_of_run = _provenance(config, data, trainer, time.perf_counter() - begin)
    head = Head(head_config, {**best, **extra}, {**facts_of_run, **(provenance or {})})
    write_head(head, out, precision=config.precision)
    return Outcome(out, trainer.best)


def _provenance(
    config: RunConfig, data: TrainingData, trainer: Trainer, seconds: float
) -> dict[str, Any]:
    head: HeadConfig = trainer.module.config
    return {
        "trained_by": f"outrider {__version__}",
        "date": datetime.now(UTC).date().isoformat(),
        "target": head.target.name,
        "data": {
            "samples": len(data.samples),
            "answer_tokens": data.answer_tokens,
            "feature_rows": data.store.rows,
            "source": "written by the target itself and by the built-in tasks (CC0)",
        },
        "train": asdict(config.train),
        "steps": trainer.steps,
        "best": trainer.best,
        "seconds_of_last_session": round(seconds),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "licence": "Apache-2.0",
    }


def read_log(work: Path) -> list[dict[str, Any]]:
    """The log of a run, one entry per report or evaluation."""
    path = work / "log.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
