"""A training run from prepared data to a folder that serves: gate, training, export, report.

`train` is what the command line calls. Everything lies in one working folder and is taken up where
it stopped: data, the run's checkpoint, its log. The result is the checkpoint with the best
acceptance in serving, written with its provenance and a report.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider import __version__
from outrider.core.noise import Noise, Purpose, Stream
from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Commit, NodeBudget, SequenceView
from outrider.drafters.growth import TreeShape
from outrider.drafters.heads import draft_ids, runnable, target_head_rows
from outrider.errors import InvalidParameter, TrainingFailed
from outrider.models.heads.config import TargetFacts
from outrider.models.heads.files import Head, Precision, check_new, read_head, write_head
from outrider.models.heads.fit import check_fit, folder_facts
from outrider.models.heads.kernels import Decoder
from outrider.models.load import LoadedModel
from outrider.models.target import Target
from outrider.train import checkpoint
from outrider.train.acceptance import Build, Evaluation, Probe, head_builder
from outrider.train.calibrate import accuracy_by_rank
from outrider.train.config import TrainConfig
from outrider.train.draft_model import (
    DraftModelLearner,
    DraftModule,
    draft_model_builder,
    start_layers,
    write_draft_model,
)
from outrider.train.features import Features, compute_features
from outrider.train.heads import Frozen, HeadModule
from outrider.train.learners import HeadLearner, Learner, known_tokens
from outrider.train.loop import BEST, LOG, Loop, Progress
from outrider.train.losses import first_choice
from outrider.train.prepare import TrainingData
from outrider.train.report import write_report
from outrider.train.samples import Sample
from outrider.train.setup import (
    draft_vocabulary,
    frozen_parts,
    initial_tensors,
    input_spread,
    is_output,
    new_head,
    with_vocabulary,
)

DRAFT_MODEL = "draft_model"
GATE_AGREEMENT = 0.9
GATE_LOSS = 0.15  # at run time a head is rounded; more than this is not rounding
REPORT = "report.html"
OWN_DATA = "written by the target itself and by the built-in tasks (CC0)"


@dataclass(frozen=True)
class RunConfig:
    """What to train.

    Attributes:
        style: eagle, eagle3, eagle3.1, eagle3-token, medusa or draft_model.
        draft_vocab_size: tokens that a head can guess; of a draft model, which guesses all, those
            that every loss looks at.
        train: how.
        probes: how acceptance is measured; the first decides which checkpoint is best.
        held_out: prompts that it is measured on.
        gate_steps: steps of the one-sample gate; 0 leaves it out.
        precision: of a head's written weights; a draft model's are bf16.
        flags: of `HeadConfig`, over the style's.
        layers: of a draft model.
        start: a head to go on from: its draft vocabulary, widened to `draft_vocab_size`, and what
            its tensors share in name and shape with the new head's. Or a draft model, layers and
            all.
        data_source: where the prompts come from, for the provenance.
    """

    style: str = "eagle3"
    draft_vocab_size: int = 4096
    train: TrainConfig = field(default_factory=TrainConfig)
    probes: dict[str, Probe] = field(default_factory=lambda: {"chain": Probe()})
    held_out: int = 24
    gate_steps: int = 150
    precision: Precision = "bf16"
    flags: dict[str, Any] = field(default_factory=dict)
    layers: int = 4
    start: Path | None = None
    data_source: str = OWN_DATA


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        folder: the drafter's, or `None` where the run stopped before its end.
        figures: of the best checkpoint.
        step, steps: how far it came.
    """

    folder: Path | None
    figures: dict[str, float]
    step: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Job:
    """A drafter to train, whatever its kind.

    Attributes:
        make: a fresh learner at the run's start.
        assemble: drafters from a learner's tensors.
        known: bool [V], tokens that it can guess.
        write: its files, from the best tensors and a provenance.
        finish: last measurements on the best tensors, for the provenance.
        origin: for the provenance, how the head was made that the run goes on from.
    """

    make: Callable[[], Learner]
    assemble: Callable[[dict[str, Tensor]], Build]
    known: Tensor
    write: Callable[[dict[str, Tensor], dict[str, Any]], None]
    finish: Callable[[dict[str, Tensor], Evaluation], dict[str, Any]] = lambda tensors, ev: {}
    origin: dict[str, Any] = field(default_factory=dict)


def overfit_gate(
    make: Callable[[], Learner],
    sample: Sample,
    store: Features,
    config: TrainConfig,
    *,
    folder: Path,
    steps: int,
    at_run_time: Callable[[dict[str, Tensor]], float] | None = None,
) -> float:
    """Train a copy on one sample; what cannot memorise it, or does and then guesses worse as a
    drafter at run time, is mis-wired.

    Args:
        folder: where a gate that was passed is noted, so that it is passed once.
        at_run_time: gives the share of right first guesses of a drafter made of tensors.

    Returns:
        How often its first guess was the target's at the end.

    Raises:
        TrainingFailed: the gate was not passed.
    """
    single = replace(
        config,
        epochs=float(steps),
        evaluate_every=steps + 1,
        save_every=steps + 1,
        warm_up=0.05,
        muon_rate=max(config.muon_rate, 0.02),
        accumulate=1,
    )
    learner = make()
    passed = folder / "passed.json"
    if passed.exists():
        facts = json.loads(passed.read_text())
        if facts["head"] == learner.describe():
            return float(facts["reached"])
    shutil.rmtree(folder, ignore_errors=True)
    seen: list[Progress] = []
    loop = Loop(
        learner,
        [sample],
        store,
        single,
        folder=folder,
        report=seen.append,
        report_every=max(steps // 5, 1),
    )
    loop.run()
    reached = seen[-1].agreement[0]
    shutil.rmtree(folder)
    if reached < GATE_AGREEMENT:
        raise TrainingFailed(
            f"the drafter reached {reached:.2f} on the one sample of the gate after {steps} steps, "
            f"{GATE_AGREEMENT} is needed: its wiring or its learning rate is wrong"
        )
    served = reached if at_run_time is None else at_run_time(learner.tensors())
    if served < reached - GATE_LOSS:
        raise TrainingFailed(
            f"the drafter knows the one sample of the gate ({reached:.2f} of its first guesses are "
            f"right), but only {served:.2f} are right at run time: it is wired otherwise in "
            "training than in serving"
        )
    folder.mkdir(parents=True)
    facts = {"reached": reached, "at_run_time": served, "head": learner.describe()}
    passed.write_text(json.dumps(facts))
    return reached


def gate_sample(samples: Sequence[Sample], longest: int) -> Sample:
    """The sample of the gate: an answer of many different tokens, which no constant guess fits."""
    whole = [s for s in samples[:256] if len(s.tokens) <= longest] or list(samples[:256])
    return max(whole, key=lambda s: len(set(s.answer)))


def run_time_agreement(
    target: Target, build: Build, sample: Sample, known: Tensor, *, longest: int
) -> float:
    """How often a drafter's first guess along a sample is the target's choice (or the token that
    came), with the target's features as an engine would hand them out. Tokens that it cannot guess
    do not count.
    """
    tokens = sample.tokens[:longest]
    drafter = build(TreeShape(1, 1), 1, len(tokens) + 1)
    [rows] = compute_features(target, [tokens], (*drafter.needs.layers, target.layers))
    choices = first_choice(_guessable(target, rows[:, -1], known)).tolist()
    features = rows[:, :-1] if drafter.needs.layers else None
    right = count = seen = 0
    for end in range(sample.prompt_length, len(tokens)):
        held = None if features is None else features[max(seen - 1, 0) : end - 1]
        commit = Commit(0, tokens[seen:end], features=held, features_from=max(seen - 1, 0))
        drafter.observe([commit])
        seen = end
        view = SequenceView(
            0,
            tokens[:end],
            sample.prompt_length,
            SamplingParams(temperature=0.0),
            frozenset(),
            Stream(Noise(0), Purpose.TOKEN),
        )
        [tree] = drafter.propose([view], [NodeBudget(1, 1)])
        if known[tokens[end]]:
            count += 1
            right += tree.tokens[1:] in {(choices[end - 1],), (tokens[end],)}
    return right / max(count, 1)


def _guessable(target: Target, final_RD: Tensor, known: Tensor) -> Tensor:
    """[R, V] the target's logits, without the tokens that the drafter cannot guess."""
    decoder = runnable(target)
    logits = decoder.head(decoder.norm(final_RD)).float().cpu()
    return logits.masked_fill(~known, -torch.inf)


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
    stop: Callable[[], bool] = lambda: False,
    report: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] = lambda line: None,
    provenance: dict[str, Any] | None = None,
) -> Outcome:
    """Train a head or a draft model on prepared data and write it.

    Args:
        work: folder of this run; taken up where it stopped.
        out: where the drafter goes; must not exist yet.
        until: stop with a checkpoint at this time (perf_counter).
        stop: asked after every step; True stops with a checkpoint.

    Raises:
        TrainingFailed: the gate was not passed, or a loss is not finite.
        NoSpace: the disk is full; the last checkpoint is whole.
        InvalidParameter: no data, or a working folder of another run.
    """
    check_new(out)
    samples, held_out = data.split(False), data.split(True)
    if not samples or not held_out:
        raise InvalidParameter(
            f"{data.folder} holds {len(samples)} samples to train on and {len(held_out)} held out; "
            "both are needed: prepare more data"
        )
    facts = folder_facts(loaded.source, name=plain_name(loaded), tokenizer=loaded.tokenizer)
    job = _job(loaded, data, config, facts, out)
    evaluate = Evaluation(
        loaded.target,
        list(held_out_prompts(held_out, config.held_out)),
        job.assemble,
        config.probes,
    )
    if config.gate_steps:
        _gate(loaded, job, samples, data.store, config, folder=work / "gate", say=say)
    begin = time.perf_counter()
    loop = Loop(
        job.make(),
        samples,
        data.store,
        config.train,
        folder=work,
        evaluate=evaluate,
        report=report,
    )
    done = loop.run(until=until, stop=stop)
    title = f"{config.style} for {facts.name}"
    write_report(read_log(work), work / REPORT, title=title)
    if not done:
        return Outcome(None, loop.best, loop.step, loop.steps)
    best, _ = checkpoint.load(work / BEST)
    extra = job.finish(best, evaluate)
    ours = _provenance(config, data, loop, facts, time.perf_counter() - begin)
    job.write(best, {**ours, **job.origin, **extra, **(provenance or {})})
    write_report(read_log(work), out / REPORT, title=title)
    return Outcome(out, loop.best, loop.step, loop.steps)


def _gate(
    loaded: LoadedModel,
    job: Job,
    samples: Sequence[Sample],
    store: Features,
    config: RunConfig,
    *,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    sample = gate_sample(samples, config.train.longest)
    reached = overfit_gate(
        job.make,
        sample,
        store,
        config.train,
        folder=folder,
        steps=config.gate_steps,
        at_run_time=lambda tensors: run_time_agreement(
            loaded.target, job.assemble(tensors), sample, job.known, longest=config.train.longest
        ),
    )
    say(f"one-sample gate: {reached:.2f} of the first guesses are right")


def _job(
    loaded: LoadedModel, data: TrainingData, config: RunConfig, facts: TargetFacts, out: Path
) -> Job:
    target = runnable(loaded.target)
    make = _draft_model_job if config.style == DRAFT_MODEL else _head_job
    return make(loaded, target, data, config, facts, out)


def _head_job(
    loaded: LoadedModel,
    target: Decoder,
    data: TrainingData,
    config: RunConfig,
    facts: TargetFacts,
    out: Path,
) -> Job:
    former = None if config.start is None else read_head(config.start)
    draft_tokens = _draft_tokens(data, target, config, facts, former)
    head_config = new_head(
        config.style, target, facts, draft_vocab_size=len(draft_tokens), **config.flags
    )
    frozen = frozen_parts(target, target_head_rows(target, loaded.source, draft_tokens))
    spread = input_spread(head_config, frozen, data.split(False), data.store)
    start = initial_tensors(head_config, frozen, seed=config.train.seed, spread=spread)
    if former is not None:
        start |= carried_over(former, start, draft_tokens)
    extra = with_vocabulary({}, draft_tokens, target.vocab_size)

    def make() -> HeadLearner:
        return HeadLearner(
            HeadModule(head_config, start, spread),
            frozen,
            config.train,
            stored=data.store.features,
            draft_tokens=draft_tokens,
            device=target.device,
        )

    def build(tensors: dict[str, Tensor], provenance: dict[str, Any]) -> Build:
        head = Head(head_config, {**tensors, **extra}, provenance)
        return head_builder(target, head, source=loaded.source)

    def write(tensors: dict[str, Tensor], provenance: dict[str, Any]) -> None:
        head = Head(head_config, {**tensors, **extra}, provenance)
        write_head(head, out, precision=config.precision)

    def calibrate(tensors: dict[str, Tensor], evaluate: Evaluation) -> dict[str, Any]:
        learner = make()
        learner.restore(tensors)
        held_out, longest = data.split(True), config.train.longest
        found = {
            "accuracy_by_rank": accuracy_by_rank(learner, held_out, data.store, longest=longest)
        }
        free = evaluate.figures(build(tensors, {}))
        static = evaluate.figures(build(tensors, found))
        lengths = {
            "own_probabilities": free["acceptance_length"],
            "calibrated": static["acceptance_length"],
        }
        # kept under a key that no drafter reads where the heads' own probabilities do better
        if lengths["calibrated"] < lengths["own_probabilities"]:
            found = {"measured_accuracy_by_rank": found["accuracy_by_rank"]}
        return {**found, "trees": lengths}

    return Job(
        make,
        lambda tensors: build(tensors, {}),
        known_tokens(draft_tokens, target.vocab_size),
        write,
        calibrate if config.style == "medusa" else lambda tensors, evaluate: {},
        {} if former is None else {"started_from": _made(former)},
    )


def _made(head: Head) -> dict[str, Any]:
    """What a successor's provenance says of how a head was made."""
    kept = ("date", "style", "data", "train", "steps")
    return {key: head.provenance[key] for key in kept if key in head.provenance}


def carried_over(
    former: Head, start: Mapping[str, Tensor], draft_tokens: Tensor
) -> dict[str, Tensor]:
    """What a head brings to a new one of the same names and shapes. Of output matrices over a
    smaller draft vocabulary, the rows of its tokens; the others stay as they start.
    """
    found = {}
    ids = draft_ids(former)
    places = None if ids is None else torch.searchsorted(draft_tokens, ids)
    for name, values in former.tensors.items():
        if name not in start:
            continue
        if values.shape == start[name].shape:
            found[name] = values
        elif is_output(name) and places is not None:
            found[name] = start[name].clone()
            found[name][places] = values.to(start[name].dtype)
    return found


def _draft_tokens(
    data: TrainingData, target: Decoder, config: RunConfig, facts: TargetFacts, former: Head | None
) -> Tensor:
    """int64 [W], increasing: the most frequent ones, among them those of the head that is gone on
    from.
    """
    if former is None:
        return _frequent_tokens(data, target, config)
    check_fit(former.config, facts)
    ids = draft_ids(former)
    if ids is None:
        return torch.arange(target.vocab_size)
    return _frequent_tokens(data, target, config, always=ids.tolist())


def _frequent_tokens(
    data: TrainingData, target: Decoder, config: RunConfig, *, always: Sequence[int] = ()
) -> Tensor:
    """int64 [W], increasing: the most frequent tokens of the answers, those that end them, and
    those in ``always``."""
    return draft_vocabulary(
        data.split(False),
        size=min(config.draft_vocab_size, target.vocab_size),
        vocab_size=target.vocab_size,
        always={*target.end_tokens, *always},
    )


def _draft_model_job(
    loaded: LoadedModel,
    target: Decoder,
    data: TrainingData,
    config: RunConfig,
    facts: TargetFacts,
    out: Path,
) -> Job:
    small, start = start_layers(loaded.source, config.layers, config.start)
    every = torch.arange(target.vocab_size)
    frequent = _frequent_tokens(data, target, config)
    frozen: Frozen = frozen_parts(target, target_head_rows(target, loaded.source, every))

    def make() -> DraftModelLearner:
        return DraftModelLearner(
            DraftModule(small, start),
            frozen,
            config.train,
            stored=data.store.features,
            last=facts.layers,
            frequent=frequent,
            device=target.device,
        )

    def write(tensors: dict[str, Tensor], provenance: dict[str, Any]) -> None:
        write_draft_model(small, tensors, loaded.source, out, provenance=provenance)

    return Job(
        make,
        lambda tensors: draft_model_builder(small, tensors, target, loaded.source),
        torch.ones(target.vocab_size, dtype=torch.bool),
        write,
    )


def plain_name(loaded: LoadedModel) -> str:
    """How the target is called; of a path only its last part, for it is written into files."""
    return Path(loaded.spec).name if Path(loaded.spec).exists() else loaded.spec


def _provenance(
    config: RunConfig, data: TrainingData, loop: Loop, facts: TargetFacts, seconds: float
) -> dict[str, Any]:
    return {
        "trained_by": f"outrider {__version__}",
        "date": datetime.now(UTC).date().isoformat(),
        "target": facts.name,
        "style": config.style,
        "data": {
            "samples": len(data.samples),
            "answer_tokens": data.answer_tokens,
            "feature_rows": data.store.rows,
            "source": config.data_source,
        },
        "train": asdict(config.train),
        "steps": loop.steps,
        "best": loop.best,
        "seconds_of_last_session": round(seconds),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "licence": "Apache-2.0",
    }


def read_log(work: Path) -> list[dict[str, Any]]:
    """The log of a run, one entry per report or evaluation; a line that was cut off is left out."""
    path = work / LOG
    if not path.exists():
        return []
    lines = path.read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
