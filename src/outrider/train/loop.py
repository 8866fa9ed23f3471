"""The training loop: one for every kind of head.

A step is a function of the seed, the data and the step's number, and a checkpoint holds everything
else, so a run that was stopped goes on to the same losses. Matrices are trained with Muon, all else
with AdamW. The loop knows nothing of how acceptance is measured: it is handed a function for that,
and keeps the checkpoint that this function likes best.

Shapes: B sequences, L rows, N supervised rows, W draft vocabulary.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import InvalidParameter, TrainingFailed
from outrider.models.heads.config import HeadConfig
from outrider.train import checkpoint
from outrider.train.batches import Batch, epochs, make_batch, plan_batches
from outrider.train.features import FeatureStore
from outrider.train.heads import Frozen, HeadModule, rms, unroll
from outrider.train.losses import (
    LossKind,
    agreement_of,
    feature_loss,
    first_choice,
    hard_loss,
    mean,
    soft_loss,
)
from outrider.train.samples import Sample

CHECKPOINT = "checkpoint.safetensors"
BEST = "best.safetensors"


@dataclass(frozen=True)
class TrainConfig:
    """How a head is trained.

    Attributes:
        epochs: passes over the data.
        rows: rows of a batch, padding included.
        longest: samples are cut to so many tokens.
        unroll: steps of the training-time test; 1 is without it.
        decay: weight of step s is decay^s (Medusa: of head s).
        loss: "kl" or "ce", against the target's softmax over the draft vocabulary.
        feature_weight: of the smooth L1 loss on features (EAGLE-1 only).
        soft_weight: of the loss on tokens.
        muon_rate, rate: peak learning rates of matrices and of all else.
        warm_up: share of the steps.
        floor: learning rate at the end, as a share of the peak.
        clip: largest norm of the gradient.
        weight_decay: of matrices.
        evaluate_every, save_every: steps.
        bf16: multiply matrices in bf16.
        seed: of the order of the data.
    """

    epochs: float = 1.0
    rows: int = 3072
    longest: int = 640
    unroll: int = 3
    decay: float = 0.8
    loss: LossKind = "kl"
    feature_weight: float = 0.0
    soft_weight: float = 1.0
    muon_rate: float = 0.01
    rate: float = 0.001
    warm_up: float = 0.03
    floor: float = 0.02
    clip: float = 1.0
    weight_decay: float = 0.0
    evaluate_every: int = 400
    save_every: int = 100
    bf16: bool = True
    seed: int = 0


@dataclass
class Progress:
    """Where a run is; also what `log.jsonl` holds, one line per report."""

    step: int
    steps: int
    loss: float
    by_step: list[float]
    agreement: list[float]
    rows_per_second: float
    eta_s: float


@dataclass
class _Meter:
    """Sums since the last report."""

    rows: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    by_step: list[list[float]] = field(default_factory=list)
    agreement: list[list[float]] = field(default_factory=list)


Evaluate = Callable[[HeadConfig, dict[str, Tensor]], dict[str, float]]


class Trainer:
    """Trains one head on samples with cached features."""

    def __init__(
        self,
        module: HeadModule,
        frozen: Frozen,
        samples: Sequence[Sample],
        store: FeatureStore,
        config: TrainConfig,
        *,
        draft_tokens: Tensor,
        folder: Path,
        evaluate: Evaluate | None = None,
        report: Callable[[Progress], None] | None = None,
        report_every: int = 20,
    ) -> None:
        """Set up, and take up an earlier run's checkpoint in ``folder`` if there is one.

        Args:
            draft_tokens: int64 [W], the target ids of the draft vocabulary, increasing.
            evaluate: gives figures of a head, "acceptance_length" among them.

        Raises:
            InvalidParameter: no samples, features that the store lacks, or a checkpoint of another
                configuration.
        """
        if not samples:
            raise InvalidParameter("there are no samples to train on; prepare data first")
        self.module, self.frozen = module, frozen
        self.samples, self.store, self.config = samples, store, config
        self.folder, self.evaluate = folder, evaluate
        self.report, self.report_every = report, report_every
        missing = [f for f in module.config.features if f not in store.features]
        if missing:
            raise InvalidParameter(
                f"the data lacks hidden states {missing}; prepare it again with them"
            )
        self._picked = [store.features.index(f) for f in module.config.features]
        self._last = store.features.index(module.config.target.layers)
        self._known = torch.zeros(module.config.target.vocab_size, dtype=torch.bool)
        self._known[draft_tokens] = True
        self._draft_id = torch.zeros(module.config.target.vocab_size, dtype=torch.long)
        self._draft_id[draft_tokens] = torch.arange(len(draft_tokens))
        per_epoch = sum(1 for _ in _one_epoch(samples, config))
        self.steps = max(1, math.ceil(per_epoch * config.epochs))
        matrices = [p for p in module.parameters() if p.ndim == 2]
        others = [p for p in module.parameters() if p.ndim != 2]
        self._optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices,
                lr=config.muon_rate,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        ]
        if others:
            self._optimisers.append(
                torch.optim.AdamW(others, lr=config.rate, betas=(0.9, 0.95), weight_decay=0.0)
            )
        self.step = 0
        self.best: dict[str, float] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    # -- the loop -----------------------------------------------------------------------------

    def run(self, *, until: float | None = None) -> bool:
        """Train to the end, or stop with a checkpoint at the time ``until`` (perf_counter).

        Returns:
            True when all steps are done.

        Raises:
            TrainingFailed: a loss is not finite; the last good checkpoint stays.
        """
        config = self.config
        order = epochs(self.samples, rows=config.rows, seed=config.seed, longest=config.longest)
        for _ in range(self.step):
            next(order)
        meter = _Meter()
        while self.step < self.steps:
            chosen = [self.samples[i] for i in next(order)]
            self._train_step(make_batch(chosen, self.store, longest=config.longest), meter)
            self.step += 1
            if self.step % self.report_every == 0 or self.step == self.steps:
                self._report(meter)
                meter = _Meter()
            if self.step % config.evaluate_every == 0 or self.step == self.steps:
                self._evaluate()
            if self.step % config.save_every == 0 or self.step == self.steps:
                self.save()
            if until is not None and time.perf_counter() > until:
                self.save()
                return self.step >= self.steps
        return True

    def _train_step(self, batch: Batch, meter: _Meter) -> None:
        begin = time.perf_counter()
        rate = schedule(self.step, self.steps, self.config)
        peaks = (self.config.muon_rate, self.config.rate)
        for optimiser, peak in zip(self._optimisers, peaks, strict=False):
            for group in optimiser.param_groups:
                group["lr"] = peak * rate
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bf16):
            losses, agreement = self.losses(batch)
        weights = [self.config.decay**s for s in range(len(losses))]
        total = sum((w * v for w, v in zip(weights, losses, strict=True)), torch.zeros(()))
        total = total / sum(weights)
        value = total.item()
        if not math.isfinite(value):
            raise TrainingFailed(
                f"the loss is {value} at step {self.step}; the checkpoint of "
                f"{self.folder} is the last good one: lower the learning rate and go on"
            )
        torch.autograd.backward(total)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip)
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        meter.rows += batch.rows
        meter.seconds += time.perf_counter() - begin
        meter.losses.append(value)
        meter.by_step.append([v.item() for v in losses])
        meter.agreement.append(agreement)

    # -- losses -------------------------------------------------------------------------------

    def losses(self, batch: Batch) -> tuple[list[Tensor], list[float]]:
        """The mean loss of each step (or Medusa head), and how often its first choice is right."""
        if self.module.config.kind == "medusa":
            return self._medusa_losses(batch)
        config = self.config
        features = batch.features[:, :, self._picked].float()
        final = rms(batch.features[:, :, self._last], self.frozen.norm, self.frozen.norm_eps)
        if self.module.config.kind == "eagle":
            features = final[:, :, None]
        teacher = _Teacher(batch, final, self.frozen.head)
        found, agreement = [], []
        steps = unroll(self.module, self.frozen, batch.tokens, features, config.unroll)
        for step, normed in enumerate(steps):
            rows = batch.supervised(step, self._known)
            wanted = teacher.logits(rows, step)
            guess = self.module.logits(normed[rows], self.frozen)
            loss = config.soft_weight * mean(soft_loss(guess, wanted, config.loss))
            if self.module.config.kind == "eagle" and config.feature_weight:
                truth = teacher.states(rows, step)
                loss = loss + config.feature_weight * mean(feature_loss(normed[rows], truth))
            found.append(loss)
            with torch.no_grad():
                agreement.append(agreement_of(guess, first_choice(wanted)))
        return found, agreement

    def _medusa_losses(self, batch: Batch) -> tuple[list[Tensor], list[float]]:
        final = rms(batch.features[:, :, self._last], self.frozen.norm, self.frozen.norm_eps)
        found, agreement = [], []
        for head in range(self.module.config.medusa_heads):
            # head 0 reads the state of row i, which the target itself turns into token i + 1
            rows = batch.supervised(head, self._known)
            state = self.module.medusa_state(head, final[rows])
            guess = self.module.linear(state, f"lm_heads.{head}")
            guessed = torch.arange(rows.shape[1])[None].expand_as(rows)[rows] + 2 + head
            which = torch.arange(len(rows))[:, None].expand_as(rows)[rows]
            wanted = self._draft_id[batch.tokens[which, guessed]]
            found.append(mean(hard_loss(guess, wanted)))
            with torch.no_grad():
                agreement.append(agreement_of(guess, wanted))
        return found, agreement

    # -- reports and checkpoints --------------------------------------------------------------

    def _report(self, meter: _Meter) -> None:
        count = len(meter.losses)
        speed = meter.rows / max(meter.seconds, 1e-9)
        left = (self.steps - self.step) * meter.seconds / count
        progress = Progress(
            self.step,
            self.steps,
            sum(meter.losses) / count,
            [sum(column) / count for column in zip(*meter.by_step, strict=True)],
            [sum(column) / count for column in zip(*meter.agreement, strict=True)],
            speed,
            left,
        )
        self._log({"kind": "train", **asdict(progress)})
        if self.report is not None:
            self.report(progress)

    def _log(self, entry: dict[str, Any]) -> None:
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _evaluate(self) -> None:
        if self.evaluate is None:
            return
        figures = self.evaluate(self.module.config, self.module.tensors())
        self._log({"kind": "evaluate", "step": self.step, **figures})
        if figures["acceptance_length"] > self.best.get("acceptance_length", 0.0):
            self.best = {"step": float(self.step), **figures}
            checkpoint.save(self.folder / BEST, self.module.tensors(), self.best)

    def save(self) -> None:
        """Write a checkpoint; the former one stays until the new one is whole."""
        facts = {
            "step": self.step,
            "best": self.best,
            "config": asdict(self.config),
            "head": repr(self.module.config),
        }
        tensors = {f"head.{name}": value for name, value in self.module.tensors().items()}
        tensors |= checkpoint.optimiser_tensors(self._optimisers)
        checkpoint.save(self.folder / CHECKPOINT, tensors, facts)

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.exists():
            return
        tensors, facts = checkpoint.load(path)
        mine = json.loads(json.dumps(asdict(self.config)))
        if facts["config"] != mine or facts["head"] != repr(self.module.config):
            raise InvalidParameter(
                f"{path} belongs to a run with other settings; use another folder"
            )
        self.step, self.best = facts["step"], facts["best"]
        with torch.no_grad():
            for name in self.module.config.shapes():
                self.module.tensor(name).copy_(tensors[f"head.{name}"])
        checkpoint.restore_optimisers(self._optimisers, tensors)


class _Teacher:
    """The target's distribution over the draft vocabulary, computed once per batch."""

    def __init__(self, batch: Batch, final_BLD: Tensor, head_WD: Tensor) -> None:
        positions = torch.arange(final_BLD.shape[1])[None]
        # the state at j gives token j + 1
        wanted = (positions + 1 >= batch.prompt_lengths[:, None]) & (
            positions + 1 < batch.lengths[:, None]
        )
        self._place = torch.full(wanted.shape, -1)
        self._place[wanted] = torch.arange(int(wanted.sum()))
        self._final = final_BLD[wanted]
        with torch.no_grad():
            self._logits = torch.nn.functional.linear(self._final, head_WD)

    def _rows(self, rows_BL: Tensor, step: int) -> Tensor:
        which, row = rows_BL.nonzero(as_tuple=True)
        return self._place[which, row + 1 + step]

    def logits(self, rows_BL: Tensor, step: int) -> Tensor:
        """[N, W] for the guesses of ``rows_BL`` at ``step``."""
        return self._logits[self._rows(rows_BL, step)]

    def states(self, rows_BL: Tensor, step: int) -> Tensor:
        """[N, D]: the states that those guesses should have been."""
        return self._final[self._rows(rows_BL, step)]


def schedule(step: int, steps: int, config: TrainConfig) -> float:
    """Learning rate as a share of its peak: linear up, then a half cosine down to the floor."""
    warm = max(1, round(config.warm_up * steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _one_epoch(samples: Sequence[Sample], config: TrainConfig) -> Iterator[list[int]]:
    yield from plan_batches(
        samples, rows=config.rows, seed=config.seed, epoch=0, longest=config.longest
    )
