"""The training loop: one for every kind of drafter.

A step is a function of the seed, the data and the step's number, and a checkpoint holds everything
else, so a run that was stopped goes on to the same losses. Matrices are trained with Muon, all else
with AdamW. The loop knows nothing of what it trains (`learners.py`) nor of how acceptance is
measured: it is handed a function for that, and keeps the checkpoint that this function likes best.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import InvalidParameter, NoSpace, TrainingFailed
from outrider.kernels.linear import multiplies_bf16
from outrider.train import checkpoint
from outrider.train.batches import Batch, epochs, make_batch, plan_batches
from outrider.train.config import TrainConfig
from outrider.train.features import Features
from outrider.train.heads import Frozen, HeadModule
from outrider.train.learners import HeadLearner, Learner
from outrider.train.muon import Muon, denormals_as_zero
from outrider.train.samples import Sample

__all__ = ["BEST", "CHECKPOINT", "LOG", "Loop", "Progress", "TrainConfig", "Trainer", "schedule"]

CHECKPOINT = "checkpoint.safetensors"
BEST = "best.safetensors"
LOG = "log.jsonl"


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


Evaluate = Callable[[dict[str, Tensor]], dict[str, float]]
Stop = Callable[[], bool]


class Loop:
    """Trains one learner on samples with cached features.

    Attributes:
        step, steps: done, and wanted.
        best: figures of the best checkpoint so far, its "step" among them.
    """

    def __init__(
        self,
        learner: Learner,
        samples: Sequence[Sample],
        store: Features,
        config: TrainConfig,
        *,
        folder: Path,
        evaluate: Evaluate | None = None,
        report: Callable[[Progress], None] | None = None,
        report_every: int = 20,
    ) -> None:
        """Set up, and take up an earlier run's checkpoint in ``folder`` if there is one.

        Args:
            evaluate: gives figures of tensors, "acceptance_length" among them.

        Raises:
            InvalidParameter: no samples, or a checkpoint of other settings or other data.
        """
        if not samples:
            raise InvalidParameter("there are no samples to train on; prepare data first")
        self.learner = learner
        self.samples, self.store, self.config = samples, store, config
        self.folder, self.evaluate = folder, evaluate
        self.report, self.report_every = report, report_every
        per_epoch = sum(1 for _ in _one_epoch(samples, config))
        self.steps = max(1, math.ceil(per_epoch * config.epochs / config.accumulate))
        self._optimisers = _optimisers(learner, config)
        fast = multiplies_bf16(learner.device)
        self._bf16 = fast if config.bf16 is None else config.bf16
        self._data = hashlib.sha256("\n".join(s.id for s in samples).encode()).hexdigest()[:32]
        self.step = 0
        self.best: dict[str, float] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        self._trim_log()

    # -- the loop -----------------------------------------------------------------------------

    def run(self, *, until: float | None = None, stop: Stop = lambda: False) -> bool:
        """Train to the end, or stop with a checkpoint.

        Args:
            until: stop at this time (perf_counter).
            stop: asked after every step.

        Returns:
            True when all steps are done.

        Raises:
            TrainingFailed: a loss or gradient is not finite; the last good checkpoint stays.
            NoSpace: the disk is full; the checkpoint before stays.
        """
        config = self.config
        order = epochs(self.samples, rows=config.rows, seed=config.seed, longest=config.longest)
        for _ in range(self.step * config.accumulate):
            next(order)
        meter = _Meter()
        while self.step < self.steps:
            with denormals_as_zero():
                self._train_step([next(order) for _ in range(config.accumulate)], meter)
            self.step += 1
            if self.step % self.report_every == 0 or self.step == self.steps:
                self._report(meter)
                meter = _Meter()
            if self.step % config.evaluate_every == 0 or self.step == self.steps:
                self._evaluate()
            if self.step % config.save_every == 0 or self.step == self.steps:
                self.save()
            if stop() or (until is not None and time.perf_counter() > until):
                self.save()
                return self.step >= self.steps
        return True

    def _train_step(self, batches: Sequence[Sequence[int]], meter: _Meter) -> None:
        begin = time.perf_counter()
        rate = schedule(self.step, self.steps, self.config)
        peaks = (self.config.muon_rate, self.config.rate)
        for optimiser, peak in zip(self._optimisers, peaks, strict=False):
            for group in optimiser.param_groups:
                group["lr"] = peak * rate
        for indices in batches:
            chosen = [self.samples[i] for i in indices]
            self._accumulate(make_batch(chosen, self.store, longest=self.config.longest), meter)
        norm = torch.nn.utils.clip_grad_norm_(self.learner.parameters(), self.config.clip)
        if not bool(torch.isfinite(norm)):
            self._fail("gradient", float(norm))
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        meter.seconds += time.perf_counter() - begin

    def _accumulate(self, batch: Batch, meter: _Meter) -> None:
        """Add a batch's gradient."""
        device = self.learner.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self._bf16):
            losses, agreement = self.learner.losses(batch.to(device))
        weights = [self.config.decay**s for s in range(len(losses))]
        zero = torch.zeros((), device=device)
        total = sum((w * v for w, v in zip(weights, losses, strict=True)), zero)
        total = total / sum(weights)
        value = total.item()
        if not math.isfinite(value):
            self._fail("loss", value)
        torch.autograd.backward(total / self.config.accumulate)
        meter.rows += batch.rows
        meter.losses.append(value)
        meter.by_step.append([v.item() for v in losses])
        meter.agreement.append(agreement)

    def _fail(self, what: str, value: float) -> None:
        path = self.folder / CHECKPOINT
        kept = f"{path} is the last good checkpoint" if path.exists() else "nothing was saved yet"
        raise TrainingFailed(
            f"the {what} is {value} at step {self.step + 1} of {self.steps}; {kept}: "
            "lower the learning rate (--rate) in a new folder"
        )

    # -- reports and checkpoints --------------------------------------------------------------

    def _report(self, meter: _Meter) -> None:
        count = len(meter.losses)
        speed = meter.rows / max(meter.seconds, 1e-9)
        left = (self.steps - self.step) * meter.seconds * self.config.accumulate / count
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
        try:
            with (self.folder / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            if not checkpoint.disk_full(error):
                raise
            raise NoSpace(
                f"no space left for {self.folder / LOG}; the last checkpoint is whole: make room "
                "and run the same command again"
            ) from None

    def _trim_log(self) -> None:
        """Drop what the log says of steps that will be done again."""
        path = self.folder / LOG
        if not path.exists():
            return
        lines = path.read_text("utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= self.step]
        if kept != lines:
            path.write_text("".join(kept), "utf-8")

    def _evaluate(self) -> None:
        if self.evaluate is None:
            return
        figures = self.evaluate(self.learner.tensors())
        self._log({"kind": "evaluate", "step": self.step, **figures})
        if figures["acceptance_length"] > self.best.get("acceptance_length", -1.0):
            self.best = {"step": float(self.step), **figures}
            checkpoint.save(self.folder / BEST, self.learner.tensors(), self.best)

    def save(self) -> None:
        """Write a checkpoint; the former one stays until the new one is whole."""
        facts = {
            "step": self.step,
            "best": self.best,
            "config": asdict(self.config),
            "head": self.learner.describe(),
            "data": self._data,
        }
        tensors = {f"head.{name}": value for name, value in self.learner.tensors().items()}
        tensors |= checkpoint.optimiser_tensors(self._optimisers)
        checkpoint.save(self.folder / CHECKPOINT, tensors, facts)

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.exists():
            return
        tensors, facts = checkpoint.load(path)
        mine = json.loads(json.dumps(asdict(self.config)))
        theirs = {**json.loads(json.dumps(asdict(TrainConfig()))), **facts["config"]}
        wrong = [name for name, value in mine.items() if theirs[name] != value]
        if facts["head"] != self.learner.describe():
            wrong.append("the drafter's shape")
        if facts.get("data", self._data) != self._data:
            wrong.append("the data")
        if wrong:
            raise InvalidParameter(
                f"{path} belongs to a run with other settings ({', '.join(wrong)}); "
                "use them again, or another folder"
            )
        self.step, self.best = facts["step"], facts["best"]
        self.learner.restore(
            {n.removeprefix("head."): t for n, t in tensors.items() if n.startswith("head.")}
        )
        checkpoint.restore_optimisers(self._optimisers, tensors)


class Trainer(Loop):
    """Trains one head."""

    def __init__(
        self,
        module: HeadModule,
        frozen: Frozen,
        samples: Sequence[Sample],
        store: Features,
        config: TrainConfig,
        *,
        draft_tokens: Tensor,
        folder: Path,
        evaluate: Evaluate | None = None,
        report: Callable[[Progress], None] | None = None,
        report_every: int = 20,
    ) -> None:
        """As `Loop`, with a `HeadLearner` of the module."""
        learner = HeadLearner(
            module, frozen, config, stored=store.features, draft_tokens=draft_tokens
        )
        super().__init__(
            learner,
            samples,
            store,
            config,
            folder=folder,
            evaluate=evaluate,
            report=report,
            report_every=report_every,
        )


def _optimisers(learner: Learner, config: TrainConfig) -> list[torch.optim.Optimizer]:
    matrices = [p for p in learner.parameters() if p.ndim == 2]
    others = [p for p in learner.parameters() if p.ndim != 2]
    found: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=config.muon_rate, weight_decay=config.weight_decay)
    ]
    if others:
        found.append(torch.optim.AdamW(others, lr=config.rate, betas=(0.9, 0.95), weight_decay=0.0))
    return found


def schedule(step: int, steps: int, config: TrainConfig) -> float:
    """Learning rate as a share of its peak: linear up, then a half cosine down to the floor."""
    warm = max(1, round(config.warm_up * steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62  # damaged


def _one_epoch(samples: Sequence[Sample], config: TrainConfig) -> Iterator[list[int]]:
    yield from plan_batches(
        samples, rows=config.rows, seed=config.seed, epoch=0, longest=config.longest
    )
